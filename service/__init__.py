"""What people and programs touch: start a service, publish to it, subscribe to it.

Names load on first use: torch and Ray take seconds to import, and `weightsync --help` needs neither.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightsync.protocol.status import ServiceStatus, SyncReport
    from weightsync.service.api import ServiceHandle, ServiceNotFoundError, connect, list_services, start
    from weightsync.service.fp8 import Fp8BlockTarget
    from weightsync.service.publisher import Publisher
    from weightsync.service.settings import Settings
    from weightsync.service.sources import DTensorSource, ModuleSource, StateDictSource
    from weightsync.service.subscriber import Subscriber
    from weightsync.service.targets import ModuleTarget, StateDictTarget

_MODULE_OF = {
    "DTensorSource": "service.sources",
    "Fp8BlockTarget": "service.fp8",
    "ModuleSource": "service.sources",
    "ModuleTarget": "service.targets",
    "Publisher": "service.publisher",
    "ServiceHandle": "service.api",
    "ServiceNotFoundError": "service.api",
    "ServiceStatus": "protocol.status",
    "Settings": "service.settings",
    "StateDictSource": "service.sources",
    "StateDictTarget": "service.targets",
    "Subscriber": "service.subscriber",
    "SyncReport": "protocol.status",
    "connect": "service.api",
    "list_services": "service.api",
    "start": "service.api",
}

__all__ = [
    "DTensorSource",
    "Fp8BlockTarget",
    "ModuleSource",
    "ModuleTarget",
    "Publisher",
    "ServiceHandle",
    "ServiceNotFoundError",
    "ServiceStatus",
    "Settings",
    "StateDictSource",
    "StateDictTarget",
    "Subscriber",
    "SyncReport",
    "connect",
    "list_services",
    "start",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"weightsync.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
