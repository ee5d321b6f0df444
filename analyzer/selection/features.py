"""Advanced features of a model folder: recognised in YAML, config and code, named, and routed to their
skill.

A key that switches a feature on decides. A name in code shows that the code supports it; where only the
name is there and no key switches it on, that is a note: the plain path is what gets converted.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvskill.analyzer.data import load_yaml
from kvskill.analyzer.yamls import YamlFacts
from kvskill.diagnostics import Diagnostic, InputError, Severity, Span
from kvskill.source import SourceFile, read_source

__all__ = ["Feature", "find_features"]

_MAX_BYTES = 2_000_000


@dataclass(frozen=True)
class Feature:
    """One recognised feature. `on` says that a key or a deciding name switches it on."""

    id: str
    title: str
    on: bool
    spans: tuple[Span, ...]
    finding: Diagnostic


def find_features(
    model_dir: Path,
    shown_root: Path,
    yamls: Sequence[YamlFacts],
    config: dict[str, Any] | None,
    config_shown: str = "config.json",
) -> tuple[Feature, ...]:
    """Every advanced feature of the folder, in the order of the table."""
    table = load_yaml("features.yaml")["features"]
    named = _names_in_code(model_dir, shown_root, {n for row in table.values() for n in row["names"]})
    out = []
    for name, row in table.items():
        on = [*_yaml_hits(row, yamls), *_config_hits(row, config or {}, config_shown)]
        code = [span for n in row["names"] for span in named.get(n, ())]
        if "names" in row["decides"] and not row["yaml"]:
            on.extend(code)
        if not on and not code:
            continue
        decided = bool(on) or ("names" in row["decides"] and bool(code) and not _all_off(row, yamls))
        out.append(Feature(name, row["title"], decided, tuple(on or code), _finding(row, decided, (on or code)[0])))
    return tuple(out)


def _finding(row: dict[str, Any], on: bool, span: Span) -> Diagnostic:
    state = "is in use" if on else "is supported by the code and not switched on"
    if not on:
        todo = "Nothing to do for the plain path; its branches are not converted."
    elif row["skill"]:
        todo = f"It is left to the skill `{row['skill']}`. {row['note']}"
    else:
        todo = f"It is not converted. {row['note']}"
    severity = Severity.WARNING if on else Severity.NOTE
    return Diagnostic(row["code"], severity, f"{row['title'][0].upper()}{row['title'][1:]} {state}.", todo, span)


def _yaml_hits(row: dict[str, Any], yamls: Sequence[YamlFacts]) -> Iterator[Span]:
    for facts in yamls:
        for key in row["yaml"]:
            if key in facts.keys and not _off(row, facts.keys[key][0]):
                yield facts.span(key)


def _all_off(row: dict[str, Any], yamls: Sequence[YamlFacts]) -> bool:
    """The files mention the feature and every one switches it off."""
    said = [facts.keys[k][0] for facts in yamls for k in row["yaml"] if k in facts.keys]
    return bool(said) and all(_off(row, v) for v in said)


def _off(row: dict[str, Any], value: Any) -> bool:
    if isinstance(value, dict):
        return not value or all(_off(row, v) for v in value.values())
    text = str(value).lower()
    return any(text == str(off).lower() for off in row["inactive"])


def _config_hits(row: dict[str, Any], config: dict[str, Any], shown: str) -> Iterator[Span]:
    for key in row["config"]:
        value: Any = config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value not in (None, {}, [], "", False):
            yield Span(shown)


def _names_in_code(model_dir: Path, shown_root: Path, names: set[str]) -> dict[str, list[Span]]:
    """Where each name occurs as attribute, call, keyword, import or string key; comments and prose do not
    count.
    """
    found: dict[str, list[Span]] = {}
    quick = re.compile("|".join(sorted(map(re.escape, names))).encode())
    real = model_dir.resolve()
    for path in sorted(model_dir.rglob("*.py")):
        if not path.is_file() or real not in path.resolve().parents or path.stat().st_size > _MAX_BYTES:
            continue
        raw = path.read_bytes()
        if not quick.search(raw):
            continue
        try:
            source = read_source(path, path.relative_to(shown_root).as_posix())
        except InputError:
            continue
        for name, node in _uses(source):
            if name in names:
                found.setdefault(name, []).append(source.span(node))
    return found


def _uses(source: SourceFile) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute):
            yield node.attr, node
        elif isinstance(node, ast.Name):
            yield node.id, node
        elif isinstance(node, ast.keyword) and node.arg and not _is_none(node.value):
            yield node.arg, node.value
        elif isinstance(node, ast.alias):
            yield node.name.split(".")[-1], node
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            if isinstance(node.args[0].value, str):  # custom_params.get("kv_cache_quant_mode")
                yield node.args[0].value, node.args[0]


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
