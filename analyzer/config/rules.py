"""The data behind config understanding: key meanings, class defaults and class facts, loaded on first use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

__all__ = ["ClassInfo", "class_info", "class_of_architecture", "defaults_source", "rules"]

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_LIKE_DEPTH = 4


@dataclass(frozen=True)
class ClassInfo:
    """What is known of one model_type.

    `defaults` are the configuration class's own values; `facts` come from class_facts.yaml; `known` is False
    for a model_type that neither file has.
    """

    model_type: str | None
    known: bool
    role: str = "decoder"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    alias: Mapping[str, str] = field(default_factory=dict)
    text: tuple[str, str] | None = None  # path and model_type of the language model's settings
    facts: Mapping[str, Any] = field(default_factory=dict)
    has_class: bool = False  # a transformers class stands behind `defaults`
    class_name: str | None = None
    by_architecture: str | None = None  # the architecture that named the class, for an unknown model_type

    def reads(self, key: str) -> bool:
        """True when the class is known to have the key as a setting of its own."""
        return key in self.defaults


def _data(name: str) -> str:
    return (files("kvskill") / "data" / name).read_text(encoding="utf-8")


@cache
def rules() -> dict[str, Any]:
    """config_rules.yaml."""
    loaded: dict[str, Any] = yaml.load(_data("config_rules.yaml"), Loader=_LOADER)
    return loaded


@cache
def _defaults() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(_data("class_defaults.json"))
    return loaded


@cache
def _facts() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.load(_data("class_facts.yaml"), Loader=_LOADER)["classes"]
    return loaded


def defaults_source() -> str:
    """Where the class defaults come from."""
    return str(_defaults()["source"])


@cache
def _architectures() -> dict[str, str]:
    """Stem of an architecture name (LlamaForCausalLM -> Llama) or the whole name -> model_type."""
    classes = _defaults()["classes"]
    out = {row["class"].removesuffix("Config"): name for name, row in classes.items() if "of" not in row}
    for name, row in _facts().items():
        out.update(dict.fromkeys(row.get("architectures", ()), name))
    return out


def class_of_architecture(architecture: str) -> str | None:
    """The model_type whose class an architecture name belongs to, by the library's naming or class_facts.yaml."""
    table = _architectures()
    if architecture in table:
        return table[architecture]
    for ending in rules()["architecture_endings"]:
        if architecture.endswith(ending):
            return table.get(architecture.removesuffix(ending))
    return None


@cache
def class_info(model_type: str | None) -> ClassInfo:
    """Everything known of a model_type; `like` chains are followed, the nearer entry wins."""
    if model_type is None:
        return ClassInfo(None, known=False)
    data, facts = _defaults(), _facts()
    chain = [model_type]
    while len(chain) < _LIKE_DEPTH and (nxt := facts.get(chain[-1], {}).get("like")):
        chain.append(nxt)
    merged: dict[str, Any] = {}
    for name in reversed(chain):
        merged.update(facts.get(name) or {})
    entry = next((data["classes"][name] for name in chain if name in data["classes"]), None)
    if entry is None:
        if model_type in data["other"]:
            return ClassInfo(model_type, known=True, role="other", facts=merged, has_class=True)
        role = merged.get("role", "decoder")
        return ClassInfo(model_type, known=model_type in facts, role=role, facts=merged)
    own = model_type in data["classes"]
    return ClassInfo(
        model_type,
        known=True,
        role=merged.get("role", entry["role"]),
        defaults=entry["defaults"],
        alias=entry.get("alias", {}),
        text=tuple(entry["text"]) if "text" in entry else None,
        facts=merged,
        has_class=own,
        class_name=entry["class"] if own else None,
    )
