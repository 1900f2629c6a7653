"""The API does what its own OpenAPI document says, whatever is sent to it."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from weightsync.service import ServiceHandle
from weightsync.service.http.access import Gate, Rates, Tokens
from weightsync.service.http.app import create_app
from weightsync.service.http.gateway import RegistryGateway

OPERATE = "operate-token-0123456789"
OFTEN = Rates(reads_per_s=10**6, operations_per_min=10**6, wrong_tokens_per_min=10**6)
APP = create_app("set by the fixture", Gate(Tokens((), (OPERATE,)), exposed=True, rates=OFTEN))
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP).exclude(path="/v1/events")  # a stream without an end
OPERATIONS = [found.ok() for found in SCHEMA.get_all_operations()]
LABELS = [operation.label for operation in OPERATIONS]
INPUTS = [operation for operation in OPERATIONS if operation.body or operation.path_parameters]


@pytest.fixture
def service(shared_scene: Any) -> ServiceHandle:
    """A service with two ranks and two workers; the API runs in this process, so that only its answers count."""
    handle: ServiceHandle = shared_scene.service
    handle.resume()  # an example before may have paused it
    shared_scene.set_workers(2)
    APP.state.gateway = RegistryGateway(handle.name)
    return handle


def check(operation: Any, mode: GenerationMode, headers: dict[str, str]) -> set[int]:
    """Send what the schema allows, or what it forbids, and compare answers with the document; returns statuses."""
    statuses = set()

    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        response = case.call(headers=headers)
        case.validate_response(response, headers=headers)
        statuses.add(response.status_code)

    send()
    return statuses


def test_all_operations_are_covered() -> None:
    assert len(OPERATIONS) == 16
    assert "POST /v1/versions/{version}/abort" in LABELS


@pytest.mark.parametrize("operation", OPERATIONS, ids=LABELS)
def test_what_the_document_allows_is_answered_as_it_says(operation: Any, service: ServiceHandle) -> None:
    statuses = check(operation, GenerationMode.POSITIVE, {"Authorization": f"Bearer {OPERATE}"})
    assert statuses <= {200, 404, 409}, "with a token, input that is valid is never refused as such"
    assert statuses & {404, 409} == set() or operation in INPUTS


@pytest.mark.parametrize("operation", INPUTS, ids=[operation.label for operation in INPUTS])
def test_what_the_document_forbids_is_refused_and_changes_nothing(operation: Any, service: ServiceHandle) -> None:
    before = service.status()
    statuses = check(operation, GenerationMode.NEGATIVE, {"Authorization": f"Bearer {OPERATE}"})
    assert statuses
    assert 200 not in statuses
    after = service.status()
    assert (after.events, after.paused) == (before.events, before.paused)


@pytest.mark.parametrize("operation", OPERATIONS, ids=LABELS)
def test_without_a_valid_token_nothing_is_answered_but_health(operation: Any, service: ServiceHandle) -> None:
    before = service.status()
    statuses = check(operation, GenerationMode.POSITIVE, {"Authorization": "Bearer wrong"})
    assert statuses == ({200} if operation.path == "/healthz" else {401})
    assert service.status().events == before.events


def test_what_was_sent_left_the_service_as_it_works(service: ServiceHandle, shared_scene: Any) -> None:
    shared_scene.check_sync(["w0", "w1"])
