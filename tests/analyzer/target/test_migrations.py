"""Renamed and removed configuration fields: the target's dataclasses decide, the table explains."""

from __future__ import annotations

from pathlib import Path

from kvskill.analyzer.target import FieldUse, migrations, probe, yaml_migrations
from kvskill.diagnostics import Severity, Span
from kvskill.embedded import materialise

OLD = "scheduler_config.input_max_len"
NEW = "data_config.input_truncated_len"


def _use(path: str, line: int = 1) -> FieldUse:
    return FieldUse(path, Span("m.py", line))


def test_rename_only_where_the_target_renamed(tmp_path: Path) -> None:
    early = probe(materialise(tmp_path / "a", "2026-03"), use_installed=False).profile
    late = probe(materialise(tmp_path / "b", "2026-04"), use_installed=False).profile
    assert migrations([_use(OLD)], early) == migrations([], early)
    (move,) = migrations([_use(OLD, 3), _use(OLD, 9)], late).renamed
    assert (move.old, move.new, [u.span.line for u in move.uses]) == (OLD, NEW, [3, 9])
    assert yaml_migrations([OLD, "model_name"], late)[OLD] == NEW
    assert OLD not in yaml_migrations([OLD], early)


def test_removed_and_unknown_block(tmp_path: Path) -> None:
    profile = probe(materialise(tmp_path / "b", "2026-08"), use_installed=False).profile
    result = migrations([_use("model_config.packed_sequence"), _use("parallel_config.nobody_knows")], profile)
    assert [m.old for m in result.removed] == ["model_config.packed_sequence"]
    assert [u.path for u in result.unknown] == ["parallel_config.nobody_knows"]
    assert [(f.code, f.severity) for f in result.findings] == [
        ("KV067", Severity.BLOCKING),
        ("KV068", Severity.BLOCKING),
    ]


def test_existing_fields_are_left_alone(tmp_path: Path) -> None:
    profile = probe(materialise(tmp_path / "b", "2026-04"), use_installed=False).profile
    uses = [_use("scheduler_config.block_size"), _use("model_config.custom_params"), _use("scheduler_config")]
    assert migrations(uses, profile) == migrations([], profile)


def test_unknown_section_is_unknown(tmp_path: Path) -> None:
    profile = probe(materialise(tmp_path / "b", "2026-04"), use_installed=False).profile
    assert [u.path for u in migrations([_use("kv_config.size")], profile).unknown] == ["kv_config.size"]
