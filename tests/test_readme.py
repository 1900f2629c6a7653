"""The example a newcomer pastes works as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_readme_example_runs_as_pasted() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    with tempfile.TemporaryDirectory(prefix="ws") as folder:  # short: Ray puts socket paths below it
        script = Path(folder) / "example.py"
        script.write_text(example)
        done = subprocess.run(
            [sys.executable, str(script)],
            env={**os.environ, "RAY_TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"version (\d): (\d+) bytes", done.stdout) == [(str(v), str(15 * 4)) for v in (1, 2, 3)]


def test_every_command_and_target_the_readme_names_exists() -> None:
    text = README.read_text()
    makefile = (README.parent / "Makefile").read_text()
    targets = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, flags=re.MULTILINE))
    assert targets >= {"demo", "test", "lint", "bench"}
    assert all(f"\n{target}:" in makefile for target in targets)
    help_text = subprocess.run(
        [sys.executable, "-m", "weightsync.service.cli", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert all(command in help_text for command in re.findall(r"weightsync (up|down|status|demo|plan)\b", text))
