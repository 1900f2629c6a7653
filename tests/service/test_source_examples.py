"""The example in each source's docstring does what it says."""

from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize("module", ["shards", "flat", "mapped", "cast", "grouped", "megatron", "tensors"])
def test_the_examples_of_a_source_hold(module: str) -> None:
    found = doctest.testmod(importlib.import_module(f"weightsync.service.sources.{module}"))
    assert found.attempted
    assert not found.failed


def test_the_example_of_mappings_holds() -> None:
    found = doctest.testmod(importlib.import_module("weightsync.protocol.mapping"))
    assert found.attempted
    assert not found.failed
