"""What a newcomer pastes works as it stands, in terminals of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.shell import Shell

README = Path(__file__).parents[1] / "README.md"


def examples() -> dict[str, str]:
    """File name -> script, as their first lines name them."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    return {re.match(r"# (\w+\.py)\n", block)[1]: block for block in blocks}  # type: ignore[index]


def test_trainer_and_worker_run_as_pasted_beside_a_service_that_is_up(shell: Shell, tmp_path: Path) -> None:
    status, _, err = shell.run("up")
    assert status == 0, err
    scripts = examples()
    assert list(scripts) == ["trainer.py", "worker.py"]
    assert all(script.count("\n") <= 20 for script in scripts.values())
    running = {}
    for name, script in scripts.items():
        (tmp_path / name).write_text(script)
        running[name] = subprocess.Popen(
            [sys.executable, name],
            cwd=tmp_path,
            env=shell.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    out = {}
    for name, process in running.items():
        out[name], err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    published = re.findall(r"version (\d): (\d+) bytes to \['w0'\]", out["trainer.py"])
    assert published == [(str(v), str(15 * 4)) for v in (1, 2, 3)]
    seen = [int(v) for v in re.findall(r"generating with version (\d)", out["worker.py"])]
    assert seen == sorted(seen)
    assert seen[-1] == 3
    status, listed, err = shell.run("versions", "--json")
    assert status == 0, err
    assert listed.count('"state": "committed"') == 3
    assert shell.run("down")[0] == 0
    shell.assert_nothing_left()


def test_every_command_target_and_file_the_readme_names_exists() -> None:
    text = README.read_text()
    makefile = (README.parent / "Makefile").read_text()
    targets = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, flags=re.MULTILINE))
    assert targets >= {"demo", "test", "lint", "bench", "docs"}
    assert all(f"\n{target}:" in makefile for target in targets)
    help_text = subprocess.run(
        [sys.executable, "-m", "weightsync.service.cli", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "200"},
    ).stdout
    named = set(re.findall(r"^(?:\| `)?weightsync ([a-z]+)", text, flags=re.MULTILINE))
    commands = set(re.findall(r"[│|] (\w+) ", help_text))
    assert {"up", "down", "status", "watch", "members", "evict", "doctor"} <= named
    assert named <= commands, named - commands
    for link in re.findall(r"\]\(([^)h][^)]*)\)", text):
        assert (README.parent / link).exists(), link
