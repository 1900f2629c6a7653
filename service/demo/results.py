"""What the demo found out, version by version, as `--json` prints it."""

from __future__ import annotations

from pydantic import BaseModel

from weightsync.protocol.status import SyncReport


def worker_names(tensor_parallel: int) -> list[str]:
    return [f"tp{rank}" for rank in range(tensor_parallel)]


class VersionResult(BaseModel):
    """One version: how it moved, and every check that was made of it."""

    version: int
    loss: float
    train_seconds: float
    report: SyncReport
    unchanged_parameters: list[str]
    """Trainer parameters that the optimiser step did not change: must be empty."""
    problems: list[str]
    """Parameters that are not bit for bit what they must be: must be empty."""
    logits_distance: float
    """Relative distance of the workers' logits to the trainer's."""

    def failures(self, tolerance: float, workers: list[str]) -> list[str]:
        """Every check that failed, in words."""
        found = [f"version {self.version}: {problem}" for problem in self.problems]
        found += [f"version {self.version}: training left {name} unchanged" for name in self.unchanged_parameters]
        if self.report.bytes != self.report.needed_bytes:
            found.append(
                f"version {self.version}: {self.report.bytes} bytes on the wire, {self.report.needed_bytes} needed"
            )
        if self.report.installed != workers:
            found.append(f"version {self.version}: installed on {self.report.installed}, must be {workers}")
        if not self.logits_distance <= tolerance:
            found.append(
                f"version {self.version}: logits are {self.logits_distance:.4f} from the trainer's, tolerance "
                f"{tolerance}"
            )
        return found


class DemoResult(BaseModel):
    """The whole run."""

    size: str
    parameters: int
    mode: str
    install: str
    transport: str
    trainer_ranks: int
    tensor_parallel: int
    versions: list[VersionResult]
    logits_tolerance: float
    failures: list[str]
    seconds: float

    @property
    def workers(self) -> list[str]:
        """Names of the inference workers, every one of which must have installed every version."""
        return worker_names(self.tensor_parallel)

    @property
    def ok(self) -> bool:
        return not self.failures and bool(self.versions)
