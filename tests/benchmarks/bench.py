"""Everything that is measured, into RESULTS.md beside this file: `weightsync bench --suite full`, control, planning.

Run it on a machine that does nothing else: `make bench`, about an hour on two cores. If it is interrupted, the same
command goes on with the cases that are missing. `make bench ARGS=--quick` takes two minutes and prints what it finds,
so that a glance does not replace the record.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from weightsync.service.bench.cases import suite
from weightsync.service.bench.command import measure
from weightsync.service.bench.kept import Kept
from weightsync.service.bench.markdown import render_markdown
from weightsync.service.bench.plot import check_plot_file, write_plot
from weightsync.service.bench.ways import all_ways
from weightsync.service.interrupts import Interrupts

FOLDER = Path(__file__).parent
KEPT = FOLDER.parents[1] / "build" / "bench.jsonl"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the quick suite, printed")
    parser.add_argument("--output", type=Path, help="write here; default RESULTS.md, or nowhere with --quick")
    options = parser.parse_args()
    output = options.output or (None if options.quick else FOLDER / "RESULTS.md")
    picture = output.with_suffix(".svg") if output else None
    if picture:
        check_plot_file(picture)
    name = "quick" if options.quick else "full"
    command = "make bench" + (" ARGS=--quick" if options.quick else "")
    kept = Kept(None if options.quick else KEPT)
    result = measure(suite(name, list(all_ways())), Interrupts(), command, kept)
    control = _output("bench_control.py", *(["--only", "simulated"] if options.quick else []))["tables"]
    control |= _output("bench_service.py")["tables"]
    planning = {f"Planning: {title.replace('_', ' ')}": rows for title, rows in _output("bench_planning.py").items()}
    document = render_markdown(result, {**control, **planning}, picture.name if picture else None)
    if output and picture:
        write_plot(result, picture)
        output.write_text(document)
        kept.forget()
        print(f"written: {output}, {picture}")
    else:
        print(document)
    for failure in result.failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 0 if result.ok else 1


def _output(script: str, *options: str) -> dict[str, Any]:
    """What a script beside this one finds out: its last line, for Ray's warnings come on standard output too."""
    command = [sys.executable, str(FOLDER / script), "--json", *options]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


if __name__ == "__main__":
    raise SystemExit(main())
