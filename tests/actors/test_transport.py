"""Which transport is taken, and what is said where one cannot be."""

from __future__ import annotations

import sys

import pytest

from weightsync.actors import nixl_package, transport
from weightsync.actors.transport import choose_transport
from weightsync.protocol.errors import TransportUnavailableError


@pytest.mark.parametrize(
    ("wanted", "name", "reason"),
    [
        ("auto", "nixl", "NIXL imports here"),
        ("nixl", "nixl", "NIXL imports here"),
        ("rdt", "rdt", "set by configuration; NIXL imports here"),
        ("object_store", "object_store", "set by configuration"),
    ],
)
def test_each_setting_gives_its_transport_and_says_why(wanted: str, name: str, reason: str) -> None:
    assert choose_transport(wanted) == (name, reason)


@pytest.fixture
def no_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "nixl", raising=False)
    monkeypatch.setattr(nixl_package.importlib.util, "find_spec", lambda name: None)


@pytest.mark.parametrize("wanted", ["nixl", "rdt"])
def test_what_needs_nixl_is_refused_without_it_in_one_line(no_nixl: None, wanted: str) -> None:
    with pytest.raises(TransportUnavailableError, match="pip install nixl") as refused:
        choose_transport(wanted)
    assert "\n" not in str(refused.value)


def test_auto_falls_back_to_the_object_store_and_says_why(no_nixl: None) -> None:
    name, reason = choose_transport("auto")
    assert name == "object_store"
    assert "not installed" in reason


def test_an_older_ray_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "weightsync.actors.rdt_transport", raising=False)
    monkeypatch.delattr(sys.modules["weightsync.actors"], "rdt_transport", raising=False)
    monkeypatch.setitem(sys.modules, "ray.experimental.rdt", None)
    with pytest.raises(
        TransportUnavailableError, match=r"this Ray .* has no Ray Direct Transport .* upgrade `ray`"
    ) as why:
        choose_transport("rdt")
    assert "\n" not in str(why.value)


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="auto, nixl, rdt, object_store; got 'tcp'"):
        choose_transport("tcp")
    with pytest.raises(ValueError, match="unknown transport 'tcp'"):
        transport.create_transport("tcp", "a", serves=False)
