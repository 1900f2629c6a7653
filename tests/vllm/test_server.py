"""`vllm serve` follows a service by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.vllm.engines import PROMPTS
from tests.vllm.models import read
from weightsync.service import Publisher, ServiceHandle, StateDictSource
from weightsync.service.ports import free_port

Checkpoints = Callable[[str, int], Path]


def test_a_server_follows(
    make_service: Callable[..., ServiceHandle], reachable: None, checkpoints: Checkpoints
) -> None:
    service, port = make_service(stall_timeout_s=120.0), free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port)]
    command += [
        "--model",
        str(checkpoints("llama", 1)),
        "--skip-tokenizer-init",
        "--enforce-eager",
        "--enable-scale-out",
    ]
    command += ["--max-model-len", "128", "--weight-transfer-config", '{"backend": "weightsync"}']
    settings = {"WEIGHTSYNC_SERVICE": service.name, "WEIGHTSYNC_ENGINE": "web", "VLLM_PLUGINS": "weightsync"}
    weights = {seed: read(checkpoints("llama", seed)) for seed in (2, 3)}
    tensors = {name: torch.zeros_like(tensor) for name, tensor in weights[2].items()}
    with (
        Publisher(service, 0, 1, StateDictSource(tensors)) as publisher,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30.0) as client,
    ):
        server = subprocess.Popen(command, env={**os.environ, **settings}, start_new_session=True)
        try:
            answer = _await(client, server, lambda answer: True)
            assert (answer.status_code, answer.json()) == (503, _served(service, None))
            made = []
            for version, seed in ((1, 2), (2, 3)):
                for name, tensor in tensors.items():
                    tensor.copy_(weights[seed][name])
                assert publisher.publish(version).installed == ["web-dp0-rank0"]
                answer = _await(client, server, lambda answer, version=version: answer.json()["version"] == version)
                assert (answer.status_code, answer.json()) == (200, _served(service, version))
                made.append(_generate(client))
                assert [span["version"] for span in made[-1]["weight_versions"]] == [str(version)]
            assert made[0]["token_ids"] != made[1]["token_ids"]
        finally:
            server.terminate()
            server.wait(60)


def _served(service: ServiceHandle, version: int | None) -> dict[str, Any]:
    return {"engine": "web", "service": service.name, "version": version}


def _await(
    client: httpx.Client, server: subprocess.Popen[bytes], good: Callable[[httpx.Response], bool]
) -> httpx.Response:
    """What `GET /weightsync` answers once it is good."""
    deadline = time.monotonic() + 120
    while True:
        assert server.poll() is None, "the server ended"
        assert time.monotonic() < deadline
        try:
            answer = client.get("/weightsync")
        except httpx.TransportError:
            time.sleep(0.5)
            continue
        if good(answer):
            return answer
        time.sleep(0.1)


def _generate(client: httpx.Client) -> Any:
    asked = {
        "token_ids": PROMPTS[0]["prompt_token_ids"],
        "sampling_params": {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "detokenize": False},
    }
    answer = client.post("/inference/v1/generate", json=asked)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
