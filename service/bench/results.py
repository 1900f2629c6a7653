"""What a bench found out, as `--json` prints it and everything else is rendered from."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from weightsync.service.bench.cases import Case
from weightsync.service.bench.statistics import Spread, paired_ratio, spread

REFERENCE = "bare NIXL READ"
"""The row that others are compared with: the very same runs, prepared once, and nothing else."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Row(_Model):
    """One measured line of one case."""

    label: str
    way: str = Field(description="the way as --ways names it")
    seconds: dict[int, float] = Field(description="round -> median seconds of its moves, until every worker has it")
    extra_bytes: int | None = Field(None, description="memory held beyond trainer's and workers' own tensors")

    @property
    def time(self) -> Spread:
        return spread(list(self.seconds.values()))


class LayoutFacts(_Model):
    model_nbytes: int
    moved_nbytes: int = Field(description="what all workers together receive")
    tensors: int
    runs: int = Field(description="runs that are contiguous on both sides")
    contiguous: bool


class Skipped(_Model):
    way: str
    reason: str


class CaseResult(_Model):
    case: Case
    layout: LayoutFacts
    rows: list[Row]
    skipped: list[Skipped]
    failures: list[str] = Field(description="wrong bytes or errors; such a bench did not succeed")

    def row(self, label: str) -> Row | None:
        return next((row for row in self.rows if row.label == label), None)

    def gbytes_per_second(self, row: Row) -> Spread:
        """All workers together."""
        return spread([self.layout.moved_nbytes / 1e9 / seconds for seconds in row.seconds.values()])

    def share_of_reference(self, row: Row) -> Spread | None:
        """Speed as a share of the bare reads of the same runs: 1 is the limit, below 1 is slower."""
        reference = self.row(REFERENCE)
        return None if reference is None else paired_ratio(reference.seconds, row.seconds)

    def slower_than(self, row: Row, label: str) -> Spread | None:
        """How many times as long a row takes as the one called `label`."""
        other = self.row(label)
        return None if other is None else paired_ratio(row.seconds, other.seconds)


class BenchResult(_Model):
    """The whole run."""

    command: str
    started: str = Field(description="UTC, ISO 8601")
    seconds: float
    machine: dict[str, str]
    packages: dict[str, str]
    cases: list[CaseResult]
    refused: list[str] = Field(description="cases that were not measured at all, and why")

    @property
    def failures(self) -> list[str]:
        return [f"{result.case.title}: {failure}" for result in self.cases for failure in result.failures]

    @property
    def ok(self) -> bool:
        return not self.failures and any(result.rows for result in self.cases)
