"""The defaults of a model's own configuration class, read without importing it.

`read_defaults` evaluates what `ClassName()` would set: class attributes, parameter defaults, and the
assignments of `__init__` with `kwargs` empty. What cannot be evaluated is left out, never guessed.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvskill.analyzer.static_eval import UNKNOWN, Evaluator
from kvskill.source import SourceFile, read_source

__all__ = ["StaticConfig", "config_classes", "read_defaults"]


@dataclass(frozen=True)
class StaticConfig:
    """Default values as config.json would hold them, and the line that sets each."""

    name: str
    shown: str
    values: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()


def config_classes(source: SourceFile) -> tuple[str, ...]:
    """Names of the configuration classes of a file: those with `model_type`, or deriving from one, in file
    order.
    """
    found: list[str] = []
    for stmt in source.tree.body:
        if not isinstance(stmt, ast.ClassDef):
            continue
        bases = {ast.unparse(b).split(".")[-1] for b in stmt.bases}
        named = any(
            isinstance(s, (ast.Assign, ast.AnnAssign)) and "model_type" in ast.unparse(s).split("=")[0]
            for s in stmt.body
        )
        if named or any(b.endswith("Config") or b in found for b in bases):
            found.append(stmt.name)
    return tuple(found)


def read_defaults(path: Path, shown: str, class_name: str | None = None) -> StaticConfig | None:
    """The defaults of one configuration class (the last one of the file when no name is given); None
    without any.

    Raises InputError for a file that cannot be read or parsed.
    """
    source = read_source(path, shown)
    names = config_classes(source)
    name = class_name if class_name in names else (names[-1] if names else None)
    if name is None:
        return None
    values, lines = Evaluator(source).instance(name)
    known = {k: v for k, v in values.items() if _is_plain(v) and not k.startswith("_")}
    skipped = tuple(sorted(k for k, v in values.items() if v is UNKNOWN))
    return StaticConfig(name, shown, known, {k: lines[k] for k in known if k in lines}, skipped)


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Whether a value could stand in a JSON file."""
    if isinstance(value, dict):
        return depth < 8 and all(isinstance(k, str) and _is_plain(v, depth + 1) for k, v in value.items())
    if isinstance(value, list):
        return depth < 8 and all(_is_plain(v, depth + 1) for v in value)
    return value is None or isinstance(value, (str, int, float, bool))
