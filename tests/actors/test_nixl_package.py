"""On ROCm the package is called `nixl_rocm`: it stands in for `nixl`, once, and never over one that is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ROCM_PACKAGE = {
    "__init__.py": "from . import _api, _bindings, _utils, logging\nfrom ._api import nixl_agent\n",
    "_api.py": "from . import _bindings\nclass nixl_agent: made_of = _bindings\n",
    "_bindings.py": "import os\nSEEN = os.environ.get('UCX_RCACHE_MAX_UNRELEASED')\nclass nixlAgentConfig: pass\n",
    "_utils.py": "",
    "logging.py": "",
}
"""A stand-in for the wheel: modules of the same names; the bindings note what UCX would have read when loaded."""


@pytest.fixture
def rocm(tmp_path: Path) -> Path:
    package = tmp_path / "nixl_rocm"
    package.mkdir()
    for name, text in ROCM_PACKAGE.items():
        (package / name).write_text(text)
    return tmp_path


def _run(script: str, *folders: Path, hip: str | None = "6.4", **environment: str) -> str:
    """Runs a script in a process of its own, whose PyTorch says it is one for ROCm."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("UCX_")}
    done = subprocess.run(
        [sys.executable, "-c", f"import torch\ntorch.version.hip = {hip!r}\nimport sys\n{script}"],
        env={**clean, "PYTHONPATH": os.pathsep.join(map(str, (*folders, ROOT))), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


LOAD = "from weightsync.actors.nixl_package import load_nixl, nixl_problem\n"


def test_rays_import_and_ours_get_rocms_package_and_one_copy_of_its_bindings(rocm: Path) -> None:
    said = _run(
        LOAD + "first = load_nixl()\n"
        "import nixl, nixl._bindings, nixl_rocm, nixl_rocm._bindings\n"
        "from nixl._api import nixl_agent\n"  # as Ray imports it
        "print(nixl is nixl_rocm is first is load_nixl(), nixl._bindings is nixl_rocm._bindings,\n"
        "      nixl_agent is nixl_rocm.nixl_agent, nixl_agent.made_of is nixl_rocm._bindings, nixl_problem())",
        rocm,
    )
    assert said == "True True True True None"


@pytest.mark.parametrize(("given", "seen"), [({}, "1024"), ({"UCX_RCACHE_MAX_UNRELEASED": "7"}, "7")])
def test_ucx_reads_the_bound_or_the_users_own_before_it_loads(rocm: Path, given: dict[str, str], seen: str) -> None:
    assert _run(LOAD + "print(load_nixl()._bindings.SEEN)", rocm, **given) == seen


def test_a_nixl_that_is_imported_already_stays(rocm: Path) -> None:
    said = _run(
        "import nixl\n" + LOAD + "import os\n"
        "print(load_nixl() is nixl, 'nixl_rocm' in sys.modules, os.environ.get('UCX_RCACHE_MAX_UNRELEASED'))",
        rocm,
    )
    assert said == "True False None"


def test_elsewhere_nothing_is_aliased_or_set(rocm: Path) -> None:
    said = _run(
        LOAD + "import os\nload_nixl()\n"
        "print(sys.modules['nixl'].__name__, 'nixl_rocm' in sys.modules, os.environ.get('UCX_RCACHE_MAX_UNRELEASED'))",
        rocm,
        hip=None,
    )
    assert said == "nixl False None"


def test_without_it_the_error_names_the_package(tmp_path: Path) -> None:
    said = _run(
        LOAD + "print(nixl_problem())\n"
        "try:\n    load_nixl()\nexcept ImportError as error:\n    print(error.name, '|', error)",
        tmp_path,
    )
    problem, raised = said.splitlines()
    assert "pip install nixl_rocm" in problem
    assert raised.startswith("nixl_rocm | ")
    assert "pip install nixl_rocm" in raised


def test_an_import_that_fails_inside_the_package_is_not_taken_for_its_absence(rocm: Path) -> None:
    (rocm / "nixl_rocm" / "_bindings.py").write_text("import a_library_of_rocm\n")
    said = _run(LOAD + "print(nixl_problem())", rocm)
    assert "does not import" in said
    assert "a_library_of_rocm" in said
    assert "reinstall `nixl_rocm`" in said
