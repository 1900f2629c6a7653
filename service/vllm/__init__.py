"""The vLLM backend named `weightsync`: engines whose workers pull what they hold from trainer memory.

Installed with the package (entry point `vllm.general_plugins`), so that

    vllm serve MODEL --weight-transfer-config '{"backend": "weightsync"}'

makes every worker process a member, whatever the executor. Which service it joins: `WEIGHTSYNC_SERVICE`, or
"default". How one version goes in:

    plugin    registers the backend in each of vLLM's processes
    backend   the worker's side of vLLM's calls: init, start, update, finish, shutdown
    target    what the model's own loader does, recorded on a skeleton of it, never on the live model
    skeleton  the model's modules with parameters in the form of the checkpoint, on the meta device
    reload    a layer that converts its weights (packed, quantised, derived) takes a new version in
    follower  in the engine's own process: watches the service, pauses at a step boundary, installs, resumes
    server    the same for `vllm serve`
    trainer   vLLM's trainer-side interface on top of a Publisher

Names load on first use: importing this package needs no vLLM.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightsync.service.vllm.backend import WeightsyncEngine, WeightsyncInitInfo, WeightsyncUpdateInfo
    from weightsync.service.vllm.follower import EngineFollower, OfflineEngine
    from weightsync.service.vllm.target import VllmTarget
    from weightsync.service.vllm.trainer import WeightsyncTrainerEngine, WeightsyncTrainerInitInfo

_MODULE_OF = {
    "EngineFollower": "follower",
    "OfflineEngine": "follower",
    "VllmTarget": "target",
    "WeightsyncEngine": "backend",
    "WeightsyncInitInfo": "backend",
    "WeightsyncTrainerEngine": "trainer",
    "WeightsyncTrainerInitInfo": "trainer",
    "WeightsyncUpdateInfo": "backend",
}

__all__ = [
    "EngineFollower",
    "OfflineEngine",
    "VllmTarget",
    "WeightsyncEngine",
    "WeightsyncInitInfo",
    "WeightsyncTrainerEngine",
    "WeightsyncTrainerInitInfo",
    "WeightsyncUpdateInfo",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
