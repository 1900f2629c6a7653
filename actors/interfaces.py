"""What a trainer and an engine must offer: the two small interfaces the actors are built on.

Sources describe shards (live) or yield whole groups (staged); targets say which copies their own loader would
do and where those land. Implementations for people are in `weightsync.service`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from weightsync.protocol.copies import RecordedCopy
from weightsync.protocol.messages import TensorMeta


@dataclass(frozen=True)
class LocalShard:
    """A box of one logical tensor that this rank holds: `tensor`, of any positive strides, at logical `offset`.

    `offset` has one entry per dimension of the logical tensor, in elements; `tensor.shape` is the extent. What a rank
    holds in several places (heads of an interleaved QKV, a range of a flattened parameter) is several shards.
    """

    name: str
    offset: tuple[int, ...]
    tensor: torch.Tensor


class WeightSource(ABC):
    """What one trainer rank publishes."""

    @abstractmethod
    def manifest(self) -> tuple[TensorMeta, ...]:
        """Every logical tensor this rank knows of, aliases included; equal on ranks that share names.

        Raises:
            InvalidLayoutError, UnsupportedLayoutError: a tensor cannot be published as it is; names it.
        """

    @abstractmethod
    def shards(self) -> Sequence[LocalShard]:
        """This rank's parts of the canonical tensors, lying where the trainer keeps them; nothing moves.

        The same boxes in the same order at every call.
        """

    @abstractmethod
    def gather(self, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
        """Whole tensors of one gather group, for staged publishing; may be collective over the ranks.

        Returns exactly the names of `names` that this rank serves in full.
        """

    @abstractmethod
    def held_names(self) -> tuple[str, ...]:
        """Canonical names `gather` yields on this rank over all groups."""

    def refresh(self) -> None:  # noqa: B027
        """Called on every rank at each publish, before the epoch opens: bring derived memory (a cast) up to date."""

    @property
    def extra_bytes(self) -> int:
        """Memory this source holds beside the trainer's own."""
        return 0


class WeightTarget(ABC):
    """Where one inference worker keeps its weights, and how its loader fills them."""

    @abstractmethod
    def record(self, manifest: Mapping[str, tuple[str, tuple[int, ...]]]) -> Sequence[RecordedCopy]:
        """The copies the worker's own loading does, recorded without moving anything.

        Args:
            manifest: name -> (dtype name, global shape) of everything that is published, aliases included.

        Returns:
            Copies in loading order; `param_name` is a key of `tensors()`.

        Raises:
            InvalidLayoutError: a parameter's source is not published, or shapes disagree; names it.
            UnsupportedViewError: the loader needs the data of a weight.
        """

    @abstractmethod
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Qualified name -> the tensor that bytes end up in; each keeps its memory from one `record` to the next."""

    def unseen(self) -> frozenset[str]:
        """Keys of `tensors()` that no request ever reads: an engine that converts weights keeps them in the form of
        the checkpoint beside its own. A pull may write them at any time; `install` brings them in.
        """
        return frozenset()

    def install(self) -> None:  # noqa: B027  (most targets have nothing to convert)
        """Every tensor holds the new version, and the engine holds still: make it the one that requests see.

        Raises:
            Exception: the worker is torn then, and not ready until the next version.
        """


def iter_groups(names: Sequence[str], group_lens: Sequence[int]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(group index, names) of names in group-major order."""
    start = 0
    for group, length in enumerate(group_lens):
        yield group, tuple(names[start : start + length])
        start += length
