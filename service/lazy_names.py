"""Names of a package that load when they are used: torch, Ray and vLLM take seconds to import."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, module_of: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__`.

    Args:
        package: its `__name__`.
        module_of: public name -> the module that has it, from "weightsync" on.
    """
    names = vars(sys.modules[package])

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        names[name] = getattr(importlib.import_module(f"weightsync.{module_of[name]}"), name)
        return names[name]

    return get, lambda: sorted({*names, *module_of})
