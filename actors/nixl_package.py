"""The one place that imports NIXL, so that whichever package carries it is there under the name `nixl`.

On ROCm the package is called `nixl_rocm`, while Ray's transport and ours import `nixl`. The thing to watch: an alias
helps only who imports later, so this runs before Ray's transport is first used, and leaves a `nixl` that somebody has
imported already as it is. UCX reads its environment when it is loaded: what it needs on ROCm is set before.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

_UNRELEASED = "UCX_RCACHE_MAX_UNRELEASED"
_UNRELEASED_ON_ROCM = "1024"
"""Without a bound, UCX keeps registrations of freed ROCm memory until it runs out of it."""
_SUBMODULES = ("_bindings", "_utils", "logging", "_api")
_PROGRESS_PAUSE_US = 100
_lock = threading.RLock()


def load_nixl() -> ModuleType:
    """NIXL's package, which is `sys.modules["nixl"]` from now on.

    Raises:
        ImportError: it is not installed; on ROCm the message names `nixl_rocm`.
    """
    with _lock:
        if torch.version.hip is not None and "nixl" not in sys.modules:
            _alias_rocm()
        nixl = importlib.import_module("nixl")
    if "NIXL_LOG_LEVEL" not in os.environ:  # it logs to stdout, where scripts read our JSON
        logging.getLogger("nixl").setLevel(logging.WARNING)
    return nixl


def nixl_problem() -> str | None:
    """Why NIXL cannot be used in this process, in one line with the remedy; None if it can."""
    package = "nixl" if torch.version.hip is None else "nixl_rocm"
    if "nixl" not in sys.modules and importlib.util.find_spec(package) is None:
        return f"NIXL is not installed; run `pip install {package}`, or set WEIGHTSYNC_TRANSPORT=auto or object_store"
    try:
        load_nixl()
    except Exception as error:
        return (
            f"NIXL is installed but does not import ({type(error).__name__}: {error}); reinstall `{package}`, or set "
            "WEIGHTSYNC_TRANSPORT=auto or object_store"
        )
    return None


@contextlib.contextmanager
def paced_progress_thread() -> Iterator[None]:
    """Agents made inside get a progress thread that pauses; NIXL's Python API has no argument for it.

    As NIXL 1.5 makes it, it spins and takes a whole core per agent (measured: 1.00 CPU s/s idle against 0.03 with a
    pause of 100 us, and 0.3 s instead of 0.02 s for a tiny sync on two cores).
    """
    load_nixl()
    bindings: Any = importlib.import_module("nixl._bindings")

    with _lock:
        original = bindings.nixlAgentConfig

        class Paced(original):  # type: ignore[misc,valid-type]
            def __setattr__(self, name: str, value: Any) -> None:
                super().__setattr__(name, _PROGRESS_PAUSE_US if name == "pthrDelay" else value)

        bindings.nixlAgentConfig = Paced
        try:
            yield
        finally:
            bindings.nixlAgentConfig = original


def _alias_rocm() -> None:
    os.environ.setdefault(_UNRELEASED, _UNRELEASED_ON_ROCM)
    try:
        package = importlib.import_module("nixl_rocm")
    except ModuleNotFoundError as error:
        if error.name != "nixl_rocm":
            raise
        raise ImportError(
            f"this is PyTorch for ROCm {torch.version.hip} and the package `nixl_rocm` is not installed, which carries "
            "NIXL there; run `pip install nixl_rocm`",
            name="nixl_rocm",
        ) from error
    sys.modules["nixl"] = package
    for name in _SUBMODULES:  # one copy of each: a second load of the bindings would know other types
        with contextlib.suppress(ModuleNotFoundError):
            sys.modules[f"nixl.{name}"] = importlib.import_module(f"nixl_rocm.{name}")
