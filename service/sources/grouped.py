"""A source for exporters that must gather or convert: tensors come out of an iterator, group after group.

Only for staged mode. The exporter says beforehand what it will yield, and yields it in the order of the gather
groups, in pieces of any size; what is gathered and not yet published is at most one group. The thing to watch: on
several ranks the exporter's collectives run on all of them, so each must iterate to the end, also ranks that serve
nothing (`serves=False`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

import torch

from weightsync.actors.interfaces import LocalShard, WeightSource
from weightsync.protocol.errors import InvalidLayoutError, UnsupportedLayoutError
from weightsync.protocol.groups import layerwise_groups
from weightsync.protocol.messages import TensorMeta

Export = Callable[[], Iterable[tuple[Sequence[str], Sequence[torch.Tensor]]]]
"""Called once per version; yields (names, tensors) of a gather group, or of a part of one."""


class GroupedSource(WeightSource):
    """What an exporter yields, for `Publisher(mode="staged")`.

    Args:
        metadata: every tensor that will be yielded, in checkpoint order, and aliases of them.
        export: makes the iterator of one version: (names, tensors), as whole tensors under checkpoint names. Names
            of one gather group (`groups`) come before those of the next.
        serves: this rank publishes what it yields; False for ranks that only take part in collectives.

    Raises:
        InvalidLayoutError: at publish, names that were not announced, come in another group's turn, twice or never.

    Example:
        >>> weights = {"embed": torch.zeros(4, 2), "layers.0.w": torch.ones(2, 2)}
        >>> metadata = [TensorMeta("embed", "float32", (4, 2)), TensorMeta("layers.0.w", "float32", (2, 2))]
        >>> source = GroupedSource(metadata, lambda: (([name], [tensor]) for name, tensor in weights.items()))
        >>> source.refresh()
        >>> [list(source.gather(group)) for group in source.groups]
        [['embed'], ['layers.0.w']]
    """

    def __init__(self, metadata: Sequence[TensorMeta], export: Export, serves: bool = True) -> None:
        self._manifest = tuple(metadata)
        self._canonical = tuple(meta.name for meta in self._manifest if meta.alias_of is None)
        self._export = export
        self._serves = serves
        self._exported: Iterator[tuple[Sequence[str], Sequence[torch.Tensor]]] | None = None
        self._left: set[str] = set()
        """Names of this version that were not yielded yet."""

    @property
    def groups(self) -> list[list[str]]:
        """Gather groups, in the order in which they must be yielded."""
        return layerwise_groups(self._canonical)

    def manifest(self) -> tuple[TensorMeta, ...]:
        return self._manifest

    def held_names(self) -> tuple[str, ...]:
        return self._canonical if self._serves else ()

    def shards(self) -> Sequence[LocalShard]:
        raise UnsupportedLayoutError(
            "a GroupedSource has nothing that could be read where it lies; use Publisher(mode='staged')"
        )

    def refresh(self) -> None:
        """Begin a version; what an abandoned attempt left in the iterator is dropped."""
        if isinstance(self._exported, Generator):
            self._exported.close()
        self._exported = iter(self._export())
        self._left = set(self._canonical)

    def gather(self, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
        """The next group. `names` are one group's; those of other sources are none of ours."""
        if self._exported is None:
            raise InvalidLayoutError("gather was called before refresh: publish through a Publisher")
        wanted = self._left.intersection(names)
        found: dict[str, torch.Tensor] = {}
        while len(found) < len(wanted):
            found.update(self._next(wanted - found.keys()))
        self._left -= wanted
        if not self._left:
            self._check_exhausted()
        return {name: found[name] for name in names if name in found} if self._serves else {}

    def _next(self, missing: set[str]) -> dict[str, torch.Tensor]:
        assert self._exported is not None
        step = next(self._exported, None)
        if step is None:
            raise InvalidLayoutError(f"the exporter ended without {sorted(missing)[:3]}, which its metadata announces")
        names, tensors = step
        if len(names) != len(tensors):
            raise InvalidLayoutError(f"the exporter yielded {len(names)} names with {len(tensors)} tensors")
        for name in names:
            if name not in missing:
                raise InvalidLayoutError(self._why_not(name, missing))
        if len(set(names)) < len(names):
            raise InvalidLayoutError(f"the exporter yielded a name twice in {sorted(names)[:5]}")
        return dict(zip(names, tensors, strict=True))

    def _why_not(self, name: str, missing: set[str]) -> str:
        if name not in self._canonical:
            return f"the exporter yielded {name!r}, which its metadata does not announce; announce it, or leave it out"
        if name not in self._left:
            return f"the exporter yielded {name!r} a second time in one version"
        return (
            f"the exporter yielded {name!r} while {sorted(missing)[:3]} of the present gather group were to come; "
            "yield names in the order of GroupedSource.groups"
        )

    def _check_exhausted(self) -> None:
        assert self._exported is not None
        extra = next(self._exported, None)
        if extra is not None and len(extra[0]):
            raise InvalidLayoutError(self._why_not(extra[0][0], set()))
