"""What people and programs touch: start a service, publish to it, subscribe to it.

Names load on first use: torch and Ray take seconds to import, and `weightsync --help` needs neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.service.lazy_names import lazy_names

if TYPE_CHECKING:
    from weightsync.protocol.status import ServiceStatus, SyncReport
    from weightsync.service.api import ServiceHandle, ServiceNotFoundError, connect, list_services, start
    from weightsync.service.fp8 import Fp8BlockTarget
    from weightsync.service.publisher import Publisher
    from weightsync.service.settings import Settings
    from weightsync.service.sources import (
        AffineSource,
        CastSource,
        DTensorSource,
        FlatRange,
        FlatSource,
        GroupedSource,
        LoraBaseSource,
        LoraSource,
        MappedSource,
        MegatronModel,
        MegatronRank,
        MegatronSource,
        MergedLoraSource,
        ModuleSource,
        SafetensorsSource,
        ShardSource,
        StateDictSource,
        TransformersSource,
        concatenated_ranges,
        cut_partitions,
        partitioned_ranges,
    )
    from weightsync.service.subscriber import Subscriber
    from weightsync.service.targets import ModuleTarget, StateDictTarget

_MODULE_OF = {
    "AffineSource": "service.sources",
    "CastSource": "service.sources",
    "DTensorSource": "service.sources",
    "FlatRange": "service.sources",
    "FlatSource": "service.sources",
    "Fp8BlockTarget": "service.fp8",
    "GroupedSource": "service.sources",
    "LoraBaseSource": "service.sources",
    "LoraSource": "service.sources",
    "MappedSource": "service.sources",
    "MegatronModel": "service.sources",
    "MegatronRank": "service.sources",
    "MegatronSource": "service.sources",
    "MergedLoraSource": "service.sources",
    "ModuleSource": "service.sources",
    "ModuleTarget": "service.targets",
    "Publisher": "service.publisher",
    "SafetensorsSource": "service.sources",
    "ServiceHandle": "service.api",
    "ServiceNotFoundError": "service.api",
    "ServiceStatus": "protocol.status",
    "Settings": "service.settings",
    "ShardSource": "service.sources",
    "StateDictSource": "service.sources",
    "StateDictTarget": "service.targets",
    "Subscriber": "service.subscriber",
    "SyncReport": "protocol.status",
    "TransformersSource": "service.sources",
    "concatenated_ranges": "service.sources",
    "connect": "service.api",
    "cut_partitions": "service.sources",
    "list_services": "service.api",
    "partitioned_ranges": "service.sources",
    "start": "service.api",
}

__all__ = [
    "AffineSource",
    "CastSource",
    "DTensorSource",
    "FlatRange",
    "FlatSource",
    "Fp8BlockTarget",
    "GroupedSource",
    "LoraBaseSource",
    "LoraSource",
    "MappedSource",
    "MegatronModel",
    "MegatronRank",
    "MegatronSource",
    "MergedLoraSource",
    "ModuleSource",
    "ModuleTarget",
    "Publisher",
    "SafetensorsSource",
    "ServiceHandle",
    "ServiceNotFoundError",
    "ServiceStatus",
    "Settings",
    "ShardSource",
    "StateDictSource",
    "StateDictTarget",
    "Subscriber",
    "SyncReport",
    "TransformersSource",
    "concatenated_ranges",
    "connect",
    "cut_partitions",
    "list_services",
    "partitioned_ranges",
    "start",
]


__getattr__, __dir__ = lazy_names(__name__, _MODULE_OF)
