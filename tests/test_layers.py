"""Dependencies point one way: service -> actors -> protocol, and protocol knows neither Ray nor NIXL."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

IMPORT_ALL = """
import importlib, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("ray", "nixl", "fastapi"):
            raise ImportError(f"{name} is absent in this test")

sys.meta_path.insert(0, Absent())
import weightsync.protocol
names = [m.name for m in pkgutil.walk_packages(weightsync.protocol.__path__, "weightsync.protocol.")]
for name in names:
    importlib.import_module(name)
print(len(names))
"""


def test_protocol_imports_without_ray_and_nixl() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(list((ROOT / "protocol").glob("[!_]*.py")))


@pytest.mark.parametrize(("folder", "forbidden"), [("protocol", {"actors", "service"}), ("actors", {"service"})])
def test_no_folder_imports_the_one_above(folder: str, forbidden: set[str]) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in modules:
                parts = module.split(".")
                assert not (parts[0] == "weightsync" and len(parts) > 1 and parts[1] in forbidden), f"{path}: {module}"


def test_every_folder_of_modules_is_packaged() -> None:
    listed = (ROOT / "pyproject.toml").read_text()
    for folder in ("protocol", "actors", "service"):
        for init in (ROOT / folder).rglob("__init__.py"):
            assert f'"weightsync.{".".join(init.parent.relative_to(ROOT).parts)}"' in listed, init


def test_the_public_names_load_when_they_are_used_and_the_command_line_needs_none_of_them() -> None:
    program = """
import sys
import weightsync.service.cli
import weightsync.service as service
assert not {"torch", "ray"} & sys.modules.keys(), "slow to import"
assert set(service.__all__) == set(service._MODULE_OF) <= set(dir(service))
for name in service.__all__:
    module, listed = getattr(service, name).__module__ + ".", f"weightsync.{service._MODULE_OF[name]}."
    assert module.startswith(listed), name
try:
    service.Nothing
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "'Nothing'" in done.stdout
