"""The demo, start to finish: bring a service up, train, publish, verify, tear everything down.

    1. start a service; spawn two trainer ranks (FSDP2) and two inference workers (tensor parallel 2)
    2. per version: an optimiser step, publish and sync at once with live bars, then three checks on the workers:
       every parameter bit for bit against the trainer's full state dict cut by plain torch, no parameter
       reallocated, and logits against the trainer's own
    3. print a table, or JSON; exit code 0 only if every check passed

The thing to watch: whatever happens, a Ctrl-C included, nothing may be left running; every way out goes through
`_Stage.close`.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import time
from typing import Any

import ray
import torch

from weightsync.protocol.errors import WeightsyncError
from weightsync.protocol.status import SyncReport
from weightsync.service.api import ServiceHandle, start
from weightsync.service.demo.models import model_config
from weightsync.service.demo.results import DemoResult, VersionResult, worker_names
from weightsync.service.demo.view import DemoView
from weightsync.service.demo.workers import SEED, InferenceWorker, TrainerRank, spawn, stop
from weightsync.service.interrupts import Interrupts
from weightsync.service.settings import Settings

TRAINER_RANKS = 2
TENSOR_PARALLEL = 2
LOGITS_TOLERANCE = 0.05
"""Relative distance. A version's own weights give 0.005 (tiny) to 0.014 (base): two summation orders in
bfloat16. The weights of the version before give 0.17 (tiny) and 0.41 (small); tests/demo holds both sides."""

_POLL_S = 0.1


def run_demo(
    *,
    size: str = "base",
    versions: int = 5,
    mode: str = "live",
    install: str = "shadow",
    transport: str | None = None,
    json_output: bool = False,
) -> int:
    """Run the demo; returns the process exit code (0 verified, 1 a check failed, 130 interrupted)."""
    view = DemoView(json_output)
    config = model_config(size)
    given: dict[str, Any] = {} if transport is None else {"transport": transport}
    settings = Settings(http_port=0, min_consumers=TENSOR_PARALLEL, **given)
    stage, interrupts = _Stage(view), Interrupts()
    try:
        with interrupts.raised(), contextlib.redirect_stdout(sys.stderr if json_output else sys.stdout):
            try:
                result = stage.play(size, config, versions, mode, install, settings)
            finally:
                with interrupts.noted():
                    stage.close()
    except (KeyboardInterrupt, WeightsyncError, ray.exceptions.RayError) as error:
        if interrupts.caused(error):
            view.say("Interrupted: everything stopped.")
            return 130
        view.say(f"[red]failed:[/] {_first_line(error)}")
        return 1
    if json_output:
        sys.stdout.write(result.model_dump_json(indent=2) + "\n")
    else:
        view.summary(result)
    return 0 if result.ok else 1


class _Stage:
    """Everything the demo starts, so that it can be stopped whatever state it is in."""

    def __init__(self, view: DemoView) -> None:
        self._view = view
        self._handle: ServiceHandle | None = None
        self._actors: list[Any] = []

    def play(self, size: str, config: Any, versions: int, mode: str, install: str, settings: Settings) -> DemoResult:
        started = time.monotonic()
        view, service = self._view, f"demo-{secrets.token_hex(3)}"
        with view.busy("starting Ray and the service ..."):
            self._handle = start(service, address="local", settings=settings)
        status = self._handle.status()
        view.say(f"service {service} on {status.http_url} (transport {status.transport})")
        with view.busy(f"building the {size} model on {TRAINER_RANKS} FSDP2 ranks and its tensor-parallel engine ..."):
            trainers = spawn(TrainerRank, service, size, mode, world=TRAINER_RANKS)
            self._actors += trainers
            workers = spawn(InferenceWorker, service, size, install, world=TENSOR_PARALLEL)
            self._actors += workers
            parameters = ray.get([trainer.parameters.remote() for trainer in trainers])[0]
            ray.get([worker.ready.remote() for worker in workers])
        view.say(f"{parameters / 1e6:.1f} M parameters in bfloat16; training {versions} versions")
        results = [self._one_version(version, config, trainers, workers) for version in range(1, versions + 1)]
        names = worker_names(TENSOR_PARALLEL)
        return DemoResult(
            size=size,
            parameters=parameters,
            mode=mode,
            install=install,
            transport=status.transport,
            trainer_ranks=TRAINER_RANKS,
            tensor_parallel=TENSOR_PARALLEL,
            versions=results,
            logits_tolerance=LOGITS_TOLERANCE,
            failures=[failure for result in results for failure in result.failures(LOGITS_TOLERANCE, names)],
            seconds=time.monotonic() - started,
        )

    def _one_version(self, version: int, config: Any, trainers: list[Any], workers: list[Any]) -> VersionResult:
        view = self._view
        before = time.monotonic()
        with view.busy(f"version {version}: training step ..."):
            steps = ray.get([trainer.train_step.remote() for trainer in trainers])
        train_seconds = time.monotonic() - before
        report = self._sync(version, trainers, workers)
        with view.busy(f"version {version}: verifying ..."):
            problems, distance = self._verify(config, trainers, workers)
        result = VersionResult(
            version=version,
            loss=steps[0][0],
            train_seconds=train_seconds,
            report=report,
            unchanged_parameters=[f"rank {rank} {name}" for rank, step in enumerate(steps) for name in step[1]],
            problems=problems,
            logits_distance=distance,
        )
        view.version(result)
        return result

    def _sync(self, version: int, trainers: list[Any], workers: list[Any]) -> SyncReport:
        """Publish on every rank and sync on every worker at once, with live bars."""
        assert self._handle is not None
        publishing = [trainer.publish.remote(version) for trainer in trainers]
        pending = publishing + [worker.sync.remote(version) for worker in workers]
        with self._view.pulling(version, worker_names(len(workers))) as bars:
            while pending:
                done, pending = ray.wait(pending, num_returns=len(pending), timeout=_POLL_S)
                ray.get(done)  # an error of any side ends the demo at once
                bars.update(self._handle.status())
            report: SyncReport = ray.get(publishing)[0]
            bars.finish(report)
        return report

    @staticmethod
    def _verify(config: Any, trainers: list[Any], workers: list[Any]) -> tuple[list[str], float]:
        """(parameters that are wrong, distance of the worst worker's logits)."""
        generator = torch.Generator().manual_seed(SEED)
        tokens = torch.randint(0, config.vocab_size, (1, 8), generator=generator)
        full, theirs = ray.get([trainer.reference.remote(tokens) for trainer in trainers])[0]
        found = ray.get([worker.verify.remote(full) for worker in workers])
        problems = [f"worker tp{rank}: {problem}" for rank, lines in enumerate(found) for problem in lines]
        return problems, max(ray.get([worker.logits_distance.remote(tokens, theirs) for worker in workers]))

    def close(self) -> None:
        """Stop actors, service and (if the demo launched it) Ray. Idempotent."""
        if self._actors:
            with contextlib.suppress(Exception):
                stop(self._actors)
            self._actors = []
        if self._handle is not None:
            self._handle.shutdown()
            self._handle = None


def _first_line(error: BaseException) -> str:
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {str(cause).strip().splitlines()[0]}"
