"""Who serves whom: owners of names, and which of them a consumer asks.

An owner set is a set of producers that hold the same names; every name belongs to one owner class (an index
into the owner sets). Within an owner set consumers are spread in contiguous blocks, and a consumer that has
several producers to itself rotates over them by gather group, so that every producer carries traffic.

The thing to watch: routing uses the worker's index within one deployment (`consumer_id % workers_per_replica`),
so that the same worker of every deployment asks the same producer and a new deployment moves nobody; but what
travels with a pull is always the fleet-wide consumer id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weightsync.protocol.errors import InvalidLayoutError


def assign_producer_indices(num_producers: int, num_consumers: int, consumer_idx: int) -> list[int]:
    """The producers that serve one consumer, as indices, ascending.

    With at least as many producers as consumers, each consumer gets a contiguous block of them, sizes differing
    by at most one; with fewer, consumers are cut into contiguous blocks and each gets exactly one producer.

    Raises:
        InvalidLayoutError: no producers or consumers, or an index out of range.
    """
    if num_producers < 1 or num_consumers < 1:
        raise InvalidLayoutError(f"routing needs producers and consumers, got {num_producers} and {num_consumers}")
    if not 0 <= consumer_idx < num_consumers:
        raise InvalidLayoutError(f"consumer index {consumer_idx} is not in 0..{num_consumers - 1}")
    if num_producers < num_consumers:
        return [consumer_idx * num_producers // num_consumers]
    start = consumer_idx * num_producers // num_consumers
    end = (consumer_idx + 1) * num_producers // num_consumers
    return list(range(start, end))


def consumer_id(worker_index: int, workers_per_replica: int, replica_rank: int) -> int:
    """Fleet-wide id of a worker: distinct for every (replica, worker index).

    Raises:
        InvalidLayoutError: an index out of range.
    """
    if workers_per_replica < 1 or not 0 <= worker_index < workers_per_replica or replica_rank < 0:
        raise InvalidLayoutError(
            f"worker {worker_index} of {workers_per_replica} in replica {replica_rank} is out of range"
        )
    return replica_rank * workers_per_replica + worker_index


class Router:
    """Routes pulls of one fleet.

    Args:
        num_producers: trainer ranks.
        num_consumers: workers of the whole fleet.
        owner_sets: per owner class the producers that hold its names; None is one class of all producers.
        name_owner_class: name -> owner class; names that are missing belong to class 0 when there is only one.
        names: all names in group-major order, for `group_owners`.
        group_lens: names per gather group.
        workers_per_replica: workers of one deployment; 0 takes the whole fleet as one deployment.

    Raises:
        InvalidLayoutError: see `validate`.
    """

    def __init__(
        self,
        num_producers: int,
        num_consumers: int,
        owner_sets: Sequence[Sequence[int]] | None = None,
        name_owner_class: Mapping[str, int] | None = None,
        names: Sequence[str] | None = None,
        group_lens: Sequence[int] | None = None,
        workers_per_replica: int = 0,
    ) -> None:
        self.num_producers = num_producers
        self.num_consumers = num_consumers
        self.workers_per_replica = workers_per_replica
        self.owner_sets = (
            [tuple(range(num_producers))] if owner_sets is None else [tuple(sorted(set(s))) for s in owner_sets]
        )
        self._class_of = dict(name_owner_class or {})
        self._names = list(names or [])
        self._group_lens = list(group_lens or [])
        self.validate()
        self._group_owners = [self._owners_of_group(group) for group in self._groups()]

    def validate(self) -> None:
        """Refuse what cannot be routed.

        Raises:
            InvalidLayoutError: names the empty or out-of-range owner set, the name without a class, the group
                lengths that do not add up, or the fleet that is no multiple of its replicas.
        """
        if self.num_producers < 1 or self.num_consumers < 1:
            raise InvalidLayoutError(
                f"routing needs producers and consumers, got {self.num_producers} and {self.num_consumers}"
            )
        for index, owners in enumerate(self.owner_sets):
            if not owners:
                raise InvalidLayoutError(f"owner set {index} is empty: nobody holds its names")
            if owners[0] < 0 or owners[-1] >= self.num_producers:
                raise InvalidLayoutError(
                    f"owner set {index} {owners} names a producer outside 0..{self.num_producers - 1}"
                )
        for name, owner_class in self._class_of.items():
            if not 0 <= owner_class < len(self.owner_sets):
                raise InvalidLayoutError(f"{name!r} is of owner class {owner_class}; there are {len(self.owner_sets)}")
        for name in self._names:
            self.class_of(name)
        if self._group_lens and sum(self._group_lens) != len(self._names):
            raise InvalidLayoutError(f"groups hold {sum(self._group_lens)} names, {len(self._names)} are given")
        width = self.workers_per_replica
        if width < 0 or (width and self.num_consumers % width):
            raise InvalidLayoutError(
                f"{self.num_consumers} consumers are no whole number of replicas of {width} workers; every "
                "deployment of a fleet must be of one size"
            )

    def class_of(self, name: str) -> int:
        """The owner class of a name.

        Raises:
            InvalidLayoutError: the name has none.
        """
        owner_class = self._class_of.get(name, 0 if len(self.owner_sets) == 1 else None)
        if owner_class is None:
            raise InvalidLayoutError(
                f"{name!r} belongs to no owner class; there are {len(self.owner_sets)} to choose from"
            )
        return owner_class

    def owners(self, name: str) -> tuple[int, ...]:
        """Producers that hold a name, ascending."""
        return self.owner_sets[self.class_of(name)]

    def group_owners(self, group: int) -> tuple[int, ...]:
        """Producers that hold any name of a gather group: all of them want a free signal.

        A router made without group lengths does not know which names a group holds and answers with every
        producer that owns anything.
        """
        if not self._group_lens:
            return tuple(sorted({owner for owners in self.owner_sets for owner in owners}))
        return self._group_owners[group]

    def producer_for(self, owner_class: int, group: int, consumer: int) -> int:
        """The producer that serves a consumer the names of one class in one group.

        Args:
            owner_class: as `class_of`.
            group: gather group; consecutive groups rotate over the consumer's producers.
            consumer: fleet-wide consumer id.
        """
        owners = self.owner_sets[owner_class]
        width = self.workers_per_replica or self.num_consumers
        block = assign_producer_indices(len(owners), width, consumer % width)
        return owners[block[group % len(block)]]

    def _groups(self) -> list[list[str]]:
        groups, start = [], 0
        for length in self._group_lens:
            groups.append(self._names[start : start + length])
            start += length
        return groups

    def _owners_of_group(self, names: Sequence[str]) -> tuple[int, ...]:
        classes = {self.class_of(name) for name in names}
        return tuple(sorted({owner for owner_class in classes for owner in self.owner_sets[owner_class]}))
