"""Environment variables that look like settings and are none.

A misspelt one is ignored by everything that reads settings, so somebody has to say so. The thing to watch: it is said
and not refused, because the prefix is not ours alone: Kubernetes gives every pod variables named after its services.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping

from weightsync.service.settings import FILE_VARIABLE, Settings

PREFIX = str(Settings.model_config["env_prefix"])
SERVICE_VARIABLE = f"{PREFIX}SERVICE"
"""Scripts and vLLM workers say with it which service they mean."""
ENGINE_VARIABLE, IN_FLIGHT_VARIABLE, INSTALL_VARIABLE = ENGINE_VARIABLES = (
    f"{PREFIX}ENGINE",
    f"{PREFIX}IN_FLIGHT",
    f"{PREFIX}INSTALL",
)
"""What `vllm serve` is told of its engine."""

_KUBERNETES = re.compile(r"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")


def known_variables() -> list[str]:
    """Every variable that means something here."""
    return [
        FILE_VARIABLE,
        SERVICE_VARIABLE,
        *ENGINE_VARIABLES,
        *(f"{PREFIX}{name.upper()}" for name in Settings.model_fields),
    ]


def warnings(environment: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each variable of our prefix that means nothing, with the nearest one that does."""
    known = known_variables()
    for variable in sorted(environment):
        name = variable.upper()  # as settings are read
        if not name.startswith(PREFIX) or name in known or _is_of_kubernetes(name, environment):
            continue
        yield f"{variable} is set and has no effect; {_meant(name, known)}"


def _meant(name: str, known: list[str]) -> str:
    bare = [other.removeprefix(PREFIX) for other in known]  # with the prefix all names are alike
    nearest = difflib.get_close_matches(name.removeprefix(PREFIX), bare, n=1)
    return f"did you mean {PREFIX}{nearest[0]}?" if nearest else "`weightsync settings` lists those that have"


def _is_of_kubernetes(name: str, environment: Mapping[str, str]) -> bool:
    of_a_service = name.endswith("_PORT") and f"{name.removesuffix('PORT')}SERVICE_HOST" in environment
    return of_a_service or _KUBERNETES.fullmatch(name) is not None
