"""Configuration fields that the target renamed, moved or dropped.

The target's own dataclasses decide whether a field exists; the table `kvskill/data/framework_fields.yaml`
only says what became of one that does not. A field that the target lacks and the table does not know is
`unknown`: a refusal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from kvskill.analyzer.data import load_yaml
from kvskill.diagnostics import Diagnostic, Severity, Span
from kvskill.manifest import TargetProfile

__all__ = ["FieldUse", "Migration", "MigrationResult", "migrations", "yaml_migrations"]


@dataclass(frozen=True, order=True)
class FieldUse:
    """One read of a configuration field, `section.field` (`scheduler_config.input_max_len`), and where."""

    path: str
    span: Span


@dataclass(frozen=True)
class Migration:
    """What becomes of one old field. `new` is None for a removed field; `note` says what else to look at."""

    old: str
    new: str | None
    kind: Literal["renamed", "custom-param", "removed"]
    since: str
    note: str
    uses: tuple[FieldUse, ...]


@dataclass(frozen=True)
class MigrationResult:
    """`renamed` can be rewritten, `removed` has no successor, `unknown` is refused."""

    renamed: tuple[Migration, ...] = ()
    removed: tuple[Migration, ...] = ()
    unknown: tuple[FieldUse, ...] = ()

    @property
    def findings(self) -> tuple[Diagnostic, ...]:
        """Blocking findings for what cannot be rewritten."""
        lost = [
            Diagnostic(
                "KV067",
                Severity.BLOCKING,
                f"The target removed `{m.old}` ({m.since}) and {u.span} reads it.",
                m.note,
                u.span,
            )
            for m in self.removed
            for u in m.uses
        ]
        unknown = [
            Diagnostic(
                "KV068",
                Severity.BLOCKING,
                f"The target's configuration has no field `{u.path}`, and no rename of it is known.",
                "Replace it by hand, or add its rename and source to kvskill/data/framework_fields.yaml.",
                u.span,
            )
            for u in self.unknown
        ]
        return (*lost, *unknown)


def migrations(old_fields_used: Iterable[FieldUse], profile: TargetProfile) -> MigrationResult:
    """Sort reads of configuration fields by what the target does with them; existing fields are left out."""
    table = load_yaml("framework_fields.yaml")
    by_path: dict[str, list[FieldUse]] = {}
    for use in old_fields_used:
        if not _exists(use.path, profile):
            by_path.setdefault(use.path, []).append(use)
    renamed: list[Migration] = []
    removed: list[Migration] = []
    unknown: list[FieldUse] = []
    for path, uses in sorted(by_path.items()):
        row = _row(table, path, profile)
        if row is None:
            unknown.extend(uses)
        else:
            move = Migration(path, row.get("new"), row["kind"], _since(row), _note(row), tuple(sorted(uses)))
            (removed if move.kind == "removed" else renamed).append(move)
    return MigrationResult(tuple(renamed), tuple(removed), tuple(unknown))


def yaml_migrations(keys: Iterable[str], profile: TargetProfile) -> dict[str, str]:
    """Dotted YAML keys of an older era or of a runner -> the key that the target reads; others are left
    out.
    """
    table = load_yaml("framework_fields.yaml")
    moves = dict(table["runner_yaml"])
    moves.update({r["old"]: r["new"] for r in table["renamed"]})
    return {
        k: moves[k] for k in sorted(set(keys)) if k in moves and not _exists(k, profile) and _exists(moves[k], profile)
    }


def _exists(path: str, profile: TargetProfile) -> bool:
    section, _, rest = path.partition(".")
    name = rest.split(".")[0].split("[")[0]
    if section not in profile.config_fields:
        return not name and not profile.config_fields
    return not name or name in profile.config_fields[section]


def _row(table: dict[str, Any], path: str, profile: TargetProfile) -> dict[str, Any] | None:
    for kind, rows in (("renamed", "renamed"), ("custom-param", "to_custom_params"), ("removed", "removed")):
        for row in table[rows]:
            if row["old"] != path:
                continue
            if kind != "removed" and not _exists(str(row["new"]).split("[")[0], profile):
                continue  # this target has neither the old nor the new name
            return {**row, "kind": kind}
    return None


def _since(row: dict[str, Any]) -> str:
    return f"{row['commit']}, {row['date']}"


def _note(row: dict[str, Any]) -> str:
    return str(row.get("when") or row.get("also") or "")
