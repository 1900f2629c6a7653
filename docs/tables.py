"""Writes `metrics.md` and `settings.md` beside this file from the code: `python docs/tables.py`."""

from __future__ import annotations

from pathlib import Path

from weightsync.protocol.faults import Fault
from weightsync.protocol.metric_names import ALL, Metric
from weightsync.service.settings import RuntimeSettings, Settings
from weightsync.service.settings_view import describe

FOLDER = Path(__file__).parent
_MADE = "<!-- Made by docs/tables.py; do not edit. -->\n\n"


def main() -> None:
    for name, text in tables().items():
        (FOLDER / name).write_text(text)
        print(f"written: {name}")


def tables() -> dict[str, str]:
    """File name -> content."""
    return {"metrics.md": metrics_table(), "settings.md": settings_table()}


def metrics_table() -> str:
    """Every metric, by the page it is on."""
    parts = [
        "# Metrics\n\n",
        _MADE,
        "`/metrics` has all of them. A scraper that follows `/sd` reads the registry's page (`/metrics/registry`) and "
        "one per member (`/metrics/producers/<rank>`, `/metrics/consumers/<worker>`); scrape one or the other, not "
        "both. Every series has the label `service`. The number of series is bounded by members: labels are workers "
        "(at most `max_consumers`), ranks, nodes, and closed sets of words.\n\n",
        f"`reason` is one of {', '.join(f'`{fault}`' for fault in Fault)}.\n",
    ]
    for page in ("registry", "producer", "consumer"):
        parts.append(f"\n## On the page of {'the registry' if page == 'registry' else f'each {page}'}\n\n")
        parts.append("| name | type | labels | unit | meaning |\n| --- | --- | --- | --- | --- |\n")
        parts += [_metric_row(metric) for metric in ALL if metric.page == page]
    return "".join(parts)


def _metric_row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.full_name}` | {metric.kind} | {labels} | {metric.unit} | {metric.text} |\n"


def settings_table() -> str:
    """Every setting of a service."""
    rows = "".join(
        f"| `{row['name']}` | `{row['default']}` | {row['meaning']}"
        f"{' (may change while the service runs)' if row['name'] in RuntimeSettings.model_fields else ''} |\n"
        for row in describe(Settings.model_construct())
    )
    return (
        "# Settings\n\n" + _MADE + "Arguments of `Settings(...)`, or of `settings:` in a Serve config file, win over "
        "environment variables (`WEIGHTSYNC_` and the name in capitals; lists and mappings as JSON), those over the "
        "YAML file that `WEIGHTSYNC_SETTINGS_FILE` names, that over the defaults. An unknown name in arguments or file "
        "and a wrong value anywhere are refused by name; a variable of that prefix that is no setting is named by `up` "
        "and `settings`, and has no effect. `weightsync settings` shows what is set here. Durations are seconds, sizes "
        "bytes.\n\n| setting | default | meaning |\n| --- | --- | --- |\n" + rows
    )


if __name__ == "__main__":
    main()
