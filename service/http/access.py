"""Who may ask and who may act: bearer tokens with two scopes, and limits on sizes and rates.

The thing to watch: without tokens a service answers only where nobody else can reach it, on loopback; anywhere
else everything but `/healthz` is refused until tokens are set.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal

from fastapi import Request
from limits import RateLimitItemPerMinute, RateLimitItemPerSecond
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter

from weightsync.service.http.problems import ProblemError

Scope = Literal["read", "operate"]

MAX_BODY_BYTES = 4096
"""An operator's request is a sentence."""


@dataclass(frozen=True)
class Rates:
    """How often one client address may ask, in each replica."""

    reads_per_s: int = 200
    """A scraper that follows `/sd` reads the pages of 500 workers within a few seconds."""
    operations_per_min: int = 60
    wrong_tokens_per_min: int = 20


@dataclass(frozen=True)
class Tokens:
    """Who may do what. Tokens of scope `operate` may read too."""

    read: tuple[str, ...] = ()
    operate: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.read or self.operate)

    def scopes(self, presented: str) -> frozenset[Scope]:
        """What a token may do; every known one is compared, in constant time each."""
        may_read = _matches(presented, self.read)
        may_operate = _matches(presented, self.operate)
        if may_operate:
            return frozenset({"read", "operate"})
        return frozenset({"read"}) if may_read else frozenset()


def _matches(presented: str, known: Sequence[str]) -> bool:
    return bool(sum(secrets.compare_digest(presented.encode(), token.encode()) for token in known))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Gate:
    """Lets requests in, or refuses them before anything is done.

    Args:
        tokens: who may do what; none: everybody may do everything, if `exposed` is false.
        exposed: whether other machines reach this service.
        rates: how often.
    """

    def __init__(self, tokens: Tokens, exposed: bool, rates: Rates | None = None) -> None:
        self._tokens = tokens
        self._exposed = exposed
        self._limiter = MovingWindowRateLimiter(MemoryStorage())
        rates = rates or Rates()
        self._limits = {
            "read": RateLimitItemPerSecond(rates.reads_per_s),
            "operate": RateLimitItemPerMinute(rates.operations_per_min),
            "login": RateLimitItemPerMinute(rates.wrong_tokens_per_min),
        }

    def admit(self, request: Request, scope: Scope) -> None:
        """Raises ProblemError: 401, 403, or 429."""
        client = request.client.host if request.client is not None else "?"
        self._check_token(request, scope, client)
        self._spend(scope, client)

    def _check_token(self, request: Request, scope: Scope, client: str) -> None:
        if not self._tokens:
            if not self._exposed:
                return
            raise ProblemError(
                HTTPStatus.FORBIDDEN,
                "other machines can reach this service, and it has no tokens; set WEIGHTSYNC_HTTP_READ_TOKENS and "
                "WEIGHTSYNC_HTTP_OPERATE_TOKENS (or bind it to 127.0.0.1) and deploy it again",
            )
        if not self._limiter.test(self._limits["login"], client):
            raise ProblemError(
                HTTPStatus.TOO_MANY_REQUESTS, "too many wrong tokens from this address", {"Retry-After": "60"}
            )
        presented = _presented(request)
        scopes = self._tokens.scopes(presented) if presented else frozenset()
        if not scopes:
            if presented:
                self._limiter.hit(self._limits["login"], client)
            raise ProblemError(
                HTTPStatus.UNAUTHORIZED,
                "a valid token is needed: `Authorization: Bearer <token>`",
                {"WWW-Authenticate": 'Bearer realm="weightsync"'},
            )
        if scope not in scopes:
            raise ProblemError(HTTPStatus.FORBIDDEN, f"this token may not {scope}; use one of http_operate_tokens")

    def _spend(self, scope: Scope, client: str) -> None:
        if not self._limiter.hit(self._limits[scope], client):
            seconds = 1 if scope == "read" else 60
            raise ProblemError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"more requests from this address than {self._limits[scope]}",
                {"Retry-After": str(seconds)},
            )


def _presented(request: Request) -> str:
    """The token of a request; a browser's page and its event stream cannot send headers, and put it in the query."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return request.query_params.get("token", "") if request.method == "GET" else ""


def check_size(request: Request) -> None:
    """Refuse a body above `MAX_BODY_BYTES`, or of unknown size, before it is read.

    Raises:
        ProblemError: 413 or 411.
    """
    if "transfer-encoding" in request.headers:
        raise ProblemError(HTTPStatus.LENGTH_REQUIRED, "say how long the body is (Content-Length)")
    announced = request.headers.get("content-length", "0")
    if not announced.isdigit() or int(announced) > MAX_BODY_BYTES:
        raise ProblemError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has {announced} bytes, the limit is {MAX_BODY_BYTES}"
        )
