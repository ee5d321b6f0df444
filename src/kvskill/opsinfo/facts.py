"""Reads `references/operators/*.yaml`: what an operator does, its limits, and how well each fact is known."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

__all__ = ["Fact", "OperatorFacts", "load_operators", "reference_data"]

_FILES = ("fused_infer_attention", "cache_writes", "companions")
_FAMILY = "fused_infer_attention"


@dataclass(frozen=True)
class Fact:
    """One sentence with its evidence letters (see `sources.yaml`) and where it was read."""

    id: str
    fact: str
    evidence: tuple[str, ...]
    source: str

    def __str__(self) -> str:
        return f"{self.fact} [{']['.join(self.evidence)}]"


@dataclass(frozen=True)
class OperatorFacts:
    """What the tables say of one operator. `tables` holds the structured limits shared by its family."""

    name: str
    summary: str
    returns: str
    use: str
    facts: tuple[Fact, ...]
    tables: dict[str, Any]


@functools.cache
def reference_data(name: str) -> Any:
    """A YAML file of the packaged `references/` folder by name, e.g. `operators/sources` or `topics`."""
    path = resources.files("kvskill").joinpath(f"references/{name}.yaml")
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _facts(rows: list[dict[str, Any]]) -> tuple[Fact, ...]:
    return tuple(Fact(r["id"], r["fact"], tuple(r["evidence"]), r["source"]) for r in rows)


@functools.cache
def load_operators() -> dict[str, OperatorFacts]:
    """Every operator with facts, by name, in file order."""
    out: dict[str, OperatorFacts] = {}
    for name in _FILES:
        data = reference_data(f"operators/{name}")
        tables = {k: v for k, v in data.items() if k != "operators" and k != "facts"}
        shared = _facts(data.get("facts", []))
        for op, row in data["operators"].items():
            facts = (*_facts(row.get("facts", [])), *shared)
            out[op] = OperatorFacts(
                op, row["summary"], row["returns"], row["use"], facts, tables if name == _FAMILY else {}
            )
    return out
