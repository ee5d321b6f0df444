"""The model's settings as its own configuration class would hold them: file values, class defaults, what it derives."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from kvskill.analyzer.modeling.program import Program
from kvskill.analyzer.modeling.values import ClassVal, Const, Dict_, Scalar, Tup, Value
from kvskill.analyzer.modeling.walk import MISSING, Walk

__all__ = ["config_class_of", "settings_of"]

_CONFIG_BASES = ("PretrainedConfig", "PreTrainedConfig")


def config_class_of(program: Program, entry: ClassVal | None) -> ClassVal | None:
    """The class that the entry takes as `config`: by annotation, else the only configuration class of the files."""
    classes = [c for c in program.classes() if any(b.endswith(_CONFIG_BASES) for b in c.external_bases())]
    init = entry.method("__init__") if entry is not None else None
    if init is not None:
        for arg in init[0].args.args[1:2]:
            if isinstance(arg.annotation, ast.Name):
                named = next((c for c in classes if c.name == arg.annotation.id), None)
                if named is not None:
                    return named
    return classes[0] if len(classes) == 1 else None


def settings_of(program: Program, entry: ClassVal | None, values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` completed by running the configuration class's __init__ on them (symbolically: nothing is imported)."""
    cls = config_class_of(program, entry)
    if cls is None or cls.method("__init__") is None:
        return dict(values)
    walk = Walk(program.modules, lambda path: MISSING)
    given = {k: _wrap(v) for k, v in values.items() if k.isidentifier()}
    inst = walk.construct(cls, [], given, "config", None)
    out = dict(values)
    for name, value in inst.attrs.items():
        plain = _plain(value)
        if plain is not MISSING:
            out[name] = plain
    for name, same in _attribute_map(cls).items():
        if same in out and name not in out:
            out[name] = out[same]
    return out


def _wrap(value: Any) -> Value:
    if isinstance(value, list):
        return Tup([_wrap(v) for v in value], is_list=True)
    if isinstance(value, dict):
        return Dict_({k: _wrap(v) for k, v in value.items()})
    return Const(value)


def _plain(value: Value) -> Any:
    if isinstance(value, Const):
        return value.value
    if isinstance(value, Scalar) and value.dim is not None and value.dim.value is not None:
        return value.dim.value
    if isinstance(value, Tup):
        items = [_plain(v) for v in value.items]
        return MISSING if any(i is MISSING for i in items) else items
    if isinstance(value, Dict_) and value.rest is None:
        pairs = {k: _plain(v) for k, v in value.items.items()}
        return MISSING if any(v is MISSING for v in pairs.values()) else pairs
    return MISSING


def _attribute_map(cls: ClassVal) -> dict[str, str]:
    """Other names that the class gives its settings."""
    for base in cls.mro():
        for item in base.node.body:
            if (
                isinstance(item, ast.Assign)
                and isinstance(item.targets[0], ast.Name)
                and item.targets[0].id == "attribute_map"
            ):
                try:
                    found = ast.literal_eval(item.value)
                except (ValueError, SyntaxError):
                    return {}
                return found if isinstance(found, dict) else {}
    return {}
