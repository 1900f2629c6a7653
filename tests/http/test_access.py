"""Who is let in: tokens with scopes, and limits; in the gate itself, and once through a real service."""

from __future__ import annotations

from http import HTTPStatus

import httpx
import pytest
from fastapi import Request
from pydantic import ValidationError

from weightsync.service import Settings
from weightsync.service.http.access import (
    MAX_BODY_BYTES,
    Gate,
    Rates,
    Tokens,
    check_size,
    is_loopback,
)
from weightsync.service.http.problems import ProblemError

READ, OPERATE = "read-token-0123456789", "operate-token-0123456789"
TOKENS = Tokens((READ, "another-read-token-01"), (OPERATE,))


def request(
    token: str | None = None, method: str = "GET", query: str = "", client: str = "10.0.0.1", **headers: str
) -> Request:
    if token is not None:
        headers["authorization"] = f"Bearer {token}"
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request(
        {"type": "http", "method": method, "headers": raw, "query_string": query.encode(), "client": (client, 5)}
    )


def refusal(gate: Gate, scope: str, **what: str) -> HTTPStatus | None:
    try:
        gate.admit(request(**what), scope)  # type: ignore[arg-type]
    except ProblemError as error:
        return error.status
    return None


@pytest.mark.parametrize(
    ("token", "read", "operate"),
    [
        (READ, None, HTTPStatus.FORBIDDEN),
        ("another-read-token-01", None, HTTPStatus.FORBIDDEN),
        (OPERATE, None, None),
        ("", HTTPStatus.UNAUTHORIZED, HTTPStatus.UNAUTHORIZED),
        (None, HTTPStatus.UNAUTHORIZED, HTTPStatus.UNAUTHORIZED),
        (READ[:-1], HTTPStatus.UNAUTHORIZED, HTTPStatus.UNAUTHORIZED),
        (READ + "x", HTTPStatus.UNAUTHORIZED, HTTPStatus.UNAUTHORIZED),
        ("tökén", HTTPStatus.UNAUTHORIZED, HTTPStatus.UNAUTHORIZED),
    ],
)
def test_a_token_opens_what_its_scope_says(
    token: str | None, read: HTTPStatus | None, operate: HTTPStatus | None
) -> None:
    gate = Gate(TOKENS, exposed=True)
    assert refusal(gate, "read", token=token) == read  # type: ignore[arg-type]
    assert refusal(gate, "operate", token=token, method="POST") == operate  # type: ignore[arg-type]


def test_a_browser_may_put_the_token_in_the_query_to_read_but_not_to_act() -> None:
    gate = Gate(TOKENS, exposed=True)
    assert refusal(gate, "read", query=f"token={READ}") is None
    assert refusal(gate, "operate", query=f"token={OPERATE}", method="POST") is HTTPStatus.UNAUTHORIZED


def test_without_tokens_only_this_machine_is_served() -> None:
    assert refusal(Gate(Tokens(), exposed=False), "operate") is None
    assert refusal(Gate(Tokens(), exposed=True), "read") is HTTPStatus.FORBIDDEN
    assert refusal(Gate(TOKENS, exposed=False), "read") is HTTPStatus.UNAUTHORIZED, "tokens that are set are needed"


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.3.2.1", True), ("::1", True), ("localhost", True)]
    + [(host, False) for host in ("0.0.0.0", "::", "10.1.2.3", "example.org", "")],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_guessing_tokens_is_slow_and_locks_out_nobody_else() -> None:
    gate = Gate(TOKENS, exposed=True)
    for guess in range(Rates().wrong_tokens_per_min):
        assert refusal(gate, "read", token=f"guess-{guess}") is HTTPStatus.UNAUTHORIZED
    assert refusal(gate, "read", token="one-more") is HTTPStatus.TOO_MANY_REQUESTS
    assert refusal(gate, "read", token=READ, client="10.0.0.2") is None


def test_an_address_may_act_so_often() -> None:
    gate = Gate(TOKENS, exposed=True)
    for _ in range(Rates().operations_per_min):
        assert refusal(gate, "operate", token=OPERATE, method="POST") is None
    assert refusal(gate, "operate", token=OPERATE, method="POST") is HTTPStatus.TOO_MANY_REQUESTS
    assert refusal(gate, "read", token=OPERATE) is None, "looking is another matter"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, None),
        ({"content_length": str(MAX_BODY_BYTES)}, None),
        ({"content_length": str(MAX_BODY_BYTES + 1)}, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
        ({"content_length": "-5"}, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
        ({"transfer_encoding": "chunked"}, HTTPStatus.LENGTH_REQUIRED),
    ],
)
def test_a_body_has_a_known_and_small_size(headers: dict[str, str], status: HTTPStatus | None) -> None:
    if status is None:
        check_size(request(method="POST", **headers))  # type: ignore[arg-type]
        return
    with pytest.raises(ProblemError) as refused:
        check_size(request(method="POST", **headers))  # type: ignore[arg-type]
    assert refused.value.status is status


def test_short_tokens_are_refused_by_name_and_never_shown() -> None:
    with pytest.raises(ValidationError, match="http_read_tokens") as refused:
        Settings(http_read_tokens=["hunter2"])
    assert "at least 16 characters" in str(refused.value)
    assert OPERATE not in repr(Settings(http_operate_tokens=[OPERATE]))


def test_a_service_with_tokens_lets_in_who_has_one(make_service) -> None:  # type: ignore[no-untyped-def]
    service = make_service(http=True, http_read_tokens=[READ], http_operate_tokens=[OPERATE])
    with httpx.Client(base_url=service.status().http_url, timeout=30.0) as client:
        assert client.get("/healthz").status_code == 200
        for path in ("/v1/status", "/metrics", "/sd", "/v1/events", "/v1/versions"):
            refused = client.get(path)
            assert (refused.status_code, refused.json()["title"]) == (401, "Unauthorized")
            assert refused.headers["www-authenticate"].startswith("Bearer")
        reader, operator = ({"Authorization": f"Bearer {token}"} for token in (READ, OPERATE))
        assert client.get("/v1/status", headers=reader).status_code == 200
        body = {"reason": "test"}
        assert client.post("/v1/publishing/pause", json=body, headers=reader).status_code == 403
        assert service.status().paused is None
        assert client.post("/v1/publishing/pause", json=body, headers=operator).status_code == 200
        assert service.status().paused == "test"
