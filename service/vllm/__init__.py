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

from typing import TYPE_CHECKING

from weightsync.service.lazy_names import lazy_names

if TYPE_CHECKING:
    from weightsync.service.vllm.backend import WeightsyncEngine, WeightsyncInitInfo, WeightsyncUpdateInfo
    from weightsync.service.vllm.follower import EngineFollower, OfflineEngine
    from weightsync.service.vllm.target import VllmTarget
    from weightsync.service.vllm.trainer import WeightsyncTrainerEngine, WeightsyncTrainerInitInfo

_MODULE_OF = {
    "EngineFollower": "service.vllm.follower",
    "OfflineEngine": "service.vllm.follower",
    "VllmTarget": "service.vllm.target",
    "WeightsyncEngine": "service.vllm.backend",
    "WeightsyncInitInfo": "service.vllm.backend",
    "WeightsyncTrainerEngine": "service.vllm.trainer",
    "WeightsyncTrainerInitInfo": "service.vllm.trainer",
    "WeightsyncUpdateInfo": "service.vllm.backend",
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


__getattr__, __dir__ = lazy_names(__name__, _MODULE_OF)
