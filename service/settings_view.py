"""Settings as a table: for `weightsync settings`, and for the documents made of it."""

from __future__ import annotations

from typing import Any

from pydantic import SecretStr
from rich.table import Table

from weightsync.service.settings import Settings


def describe(settings: Settings) -> list[dict[str, Any]]:
    """One row per setting: name, environment variable, value, default, and its meaning with its unit."""
    return [
        {
            "name": name,
            "variable": f"{settings.model_config['env_prefix']}{name.upper()}",
            "value": _plain(getattr(settings, name)),
            "default": _plain(field.get_default(call_default_factory=True)),
            "meaning": field.description,
        }
        for name, field in type(settings).model_fields.items()
    ]


def render_settings(rows: list[dict[str, Any]]) -> Table:
    """Rows of `describe`; what is not the default stands out."""
    table = Table("setting", "value", "meaning", show_lines=True)
    for row in rows:
        changed = row["value"] != row["default"]
        value = f"[bold]{row['value']}[/] (default {row['default']})" if changed else str(row["value"])
        table.add_row(row["name"], value, row["meaning"])
    return table


def _plain(value: Any) -> Any:
    """As JSON has it; secrets stay secret."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, SecretStr) else value
