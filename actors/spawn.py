"""Names, placement and lifetime of the service's actors, and calls to them that raise our own errors.

Every actor is named `weightsync:<service>:<what>` in the namespace `weightsync` and takes no CPU from the
cluster. The registry is detached: it outlives the driver that started it. A producer belongs to its trainer
process and ends with it, because the memory it speaks for does.
"""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from weightsync.actors.options import RegistryOptions
from weightsync.actors.producer_actor import ProducerActor, ProducerOptions, concurrency_groups
from weightsync.actors.registry import Registry
from weightsync.protocol.errors import WeightsyncError

NAMESPACE = "weightsync"


def registry_name(service: str) -> str:
    return f"weightsync:{service}:registry"


def producer_name(service: str, rank: int, nonce: str) -> str:
    """The nonce lets a restarted trainer make its producer while Ray still buries the old one."""
    return f"weightsync:{service}:producer:{rank}:{nonce}"


REGISTRY_RESTART_S = 60.0
"""A registry that does not answer for longer is not waited for; Ray restarts one in a few seconds."""
_RETRY_S = 0.2


def this_node() -> str:
    return ray.get_runtime_context().get_node_id()


def _on_this_node() -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id=this_node(), soft=False)


def spawn_registry(options: RegistryOptions) -> Any:
    """The service's registry, made if it is not there yet."""
    return (
        ray.remote(Registry)
        .options(
            name=registry_name(options.service),
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,  # its members hold its state, and register again
            get_if_exists=True,
            num_cpus=0,
            max_concurrency=registry_concurrency(options.max_consumers),
        )
        .remote(options)
    )


def registry_concurrency(max_consumers: int) -> int:
    """Calls the registry can hold at once: each member parks at most two (its wait and a control call).

    Trainer ranks are not limited by a setting; 4096 is the largest world we plan for.
    """
    return 2 * (max_consumers + 4096)


def await_registry(service: str, registry: Any, timeout_s: float = REGISTRY_RESTART_S) -> bool:
    """Wait until a registry that does not answer has restarted; False if it is gone for good."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            ray.get(registry.options.remote(), timeout=timeout_s)
            return True
        except ray.exceptions.RayError:
            if find_registry(service) is None:
                return False
            time.sleep(_RETRY_S)
    return False


def find_registry(service: str) -> Any | None:
    """Handle of a running service's registry, or None."""
    try:
        return ray.get_actor(registry_name(service), namespace=NAMESPACE)
    except ValueError:
        return None


def spawn_producer(service: str, rank: int, nonce: str, options: ProducerOptions, max_consumers: int) -> Any:
    """A producer actor on this node; it ends with the calling process."""
    remote: Any = ray.remote
    actor_class = remote(
        concurrency_groups=concurrency_groups(max_consumers, options.num_serve_buffers),
        enable_tensor_transport=options.transport == "rdt",
    )(ProducerActor)
    return actor_class.options(
        name=producer_name(service, rank, nonce),
        namespace=NAMESPACE,
        num_cpus=0,
        scheduling_strategy=_on_this_node(),
    ).remote(options)


def call(ref: Any, timeout_s: float | None = None) -> Any:
    """`ray.get` that raises the actor's own error, not Ray's wrapping of it with a remote traceback."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, WeightsyncError | ValueError):
            raise error.cause from None
        raise
