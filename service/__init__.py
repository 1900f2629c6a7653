"""What people and programs touch: start a service, publish to it, subscribe to it."""

from weightsync.protocol.status import ServiceStatus, SyncReport
from weightsync.service.api import ServiceHandle, ServiceNotFoundError, connect, list_services, start
from weightsync.service.publisher import Publisher
from weightsync.service.settings import Settings
from weightsync.service.sources import DTensorSource, ModuleSource, StateDictSource
from weightsync.service.subscriber import Subscriber
from weightsync.service.targets import ModuleTarget, StateDictTarget

__all__ = [
    "DTensorSource",
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
