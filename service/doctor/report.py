"""What `weightsync doctor` found, as it is printed and as `--json` prints it."""

from __future__ import annotations

from enum import StrEnum

from pydantic import ConfigDict, Field, computed_field

from weightsync.service.doctor.facts import ClockOffset, Facts, NodeFacts, PairFacts


class Finding(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """It works, and slower or less safely than it could."""
    PROBLEM = "problem"
    """A sync will fail, or run at a fraction of what the hardware does."""
    SKIPPED = "skipped"
    """It does not apply here, or could not be found out; the detail says which."""


class Check(Facts):
    """One thing that was looked at."""

    id: str = Field(description="stable, for scripts")
    title: str
    status: Finding
    detail: str = Field(description="what was measured")
    remedy: str = Field("", description="what to do; empty if nothing")


class NodeReport(Facts):
    node_id: str
    host: str
    facts: NodeFacts | None = Field(description="None if the node did not answer")
    clock: ClockOffset | None = Field(None, description="None where no cluster was asked")
    checks: list[Check]


class PairReport(Facts):
    measured: PairFacts
    source_host: str
    target_host: str
    status: Finding
    verdict: str
    remedy: str = ""


class DoctorReport(Facts):
    """Everything. `ok` says whether there is no problem; warnings do not count."""

    model_config = ConfigDict(frozen=True, extra="ignore")  # `ok` is written and not read

    address: str | None = Field(description="of the Ray cluster; None if none was running")
    checks: list[Check] = Field(description="of the cluster as a whole")
    nodes: list[NodeReport]
    pairs: list[PairReport]
    services: list[Check]
    seconds: float

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ok(self) -> bool:
        return not self.count(Finding.PROBLEM)

    def count(self, status: Finding) -> int:
        """How many checks and pairs ended so."""
        checks = [*self.checks, *self.services, *(check for node in self.nodes for check in node.checks)]
        found = [check.status for check in checks] + [pair.status for pair in self.pairs]
        return found.count(status)
