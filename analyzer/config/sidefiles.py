"""Files beside a config.json that say more about quantisation. Read when they are there, never required."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvskill.analyzer.config.load import read_json
from kvskill.analyzer.config.rules import rules
from kvskill.diagnostics import Diagnostic, KvskillError, Severity, Span

__all__ = ["SideFile", "side_files"]


@dataclass(frozen=True)
class SideFile:
    """What one side file says: weight method, and the key and value of a K/V storage type."""

    name: str
    method: str | None
    kv_key: str | None
    kv: Any


def side_files(folder: Path) -> tuple[tuple[SideFile, ...], tuple[Diagnostic, ...]]:
    """Every known side file of a folder; one that cannot be read is a warning."""
    found: list[SideFile] = []
    warnings: list[Diagnostic] = []
    for rule in rules()["side_files"]:
        path = folder / rule["name"]
        if not path.is_file():
            continue
        try:
            data = read_json(path, rule["name"])
        except KvskillError as exc:
            why = exc.findings[0].fact
            warnings.append(
                Diagnostic(
                    "KV132",
                    Severity.WARNING,
                    f"A file beside the config cannot be read: {why}",
                    "Repair or remove it; K/V quantisation may be described there.",
                    Span(rule["name"]),
                )
            )
            continue
        if isinstance(data, dict):
            found.append(_read(rule, data))
    return tuple(found), tuple(warnings)


def _read(rule: dict[str, Any], data: dict[str, Any]) -> SideFile:
    method = next((v for k in rule["method"] if isinstance(v := _dig(data, k), str)), None)
    plain = rules()["kv_plain"]
    for key in rule["kv"]:
        value = _dig(data, key)
        if value not in plain and value is not False:
            return SideFile(rule["name"], method, key, value)
    if rule["prefix"] == "msmodelslim":
        # per-tensor rows such as "model.layers.0.self_attn.k_proj.kv_cache_scale": "W8A8"
        row = next((k for k, v in data.items() if "kv_cache_scale" in k and v not in plain), None)
        if row:
            return SideFile(rule["name"], method, "kv_cache_scale rows", data[row])
    return SideFile(rule["name"], method, None, None)


def _dig(data: Any, key: str) -> Any:
    for part in key.split("."):
        data = data.get(part) if isinstance(data, dict) else None
    return data
