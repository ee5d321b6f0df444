"""The selection rules as data: ids, reasons and pages, from `references/selection/rules.yaml`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import kvskill
from kvskill.analyzer.data import parse_yaml
from kvskill.manifest import Evidence

__all__ = ["Rule", "all_rules", "because", "rule_page"]


@dataclass(frozen=True)
class Rule:
    """One row of the seed's tables: when it applies, what it decides, and why."""

    id: str
    table: str
    title: str
    when: str
    then: str
    why: str
    source: tuple[str, ...]


@cache
def all_rules() -> dict[str, Rule]:
    """Every rule by id, in table order."""
    path = Path(kvskill.__file__).parent / "references" / "selection" / "rules.yaml"
    data = parse_yaml(path.read_text(encoding="utf-8"))
    return {
        k: Rule(k, r["table"], r["title"], r["when"], r["then"], r["why"], tuple(r["source"]))
        for k, r in data["rules"].items()
    }


def because(rule_id: str, note: str = "") -> Evidence:
    """Evidence that names a rule; `note` says what made it apply. Raises KeyError for an unknown rule."""
    rule = all_rules()[rule_id]
    return Evidence(kind="rule", ref=rule.id, note=note or rule.why)


def rule_page(rule: Rule) -> str:
    """The page `references/selection/<id>.md`."""
    return "\n".join(
        [
            f"# {rule.id}: {rule.title}",
            "",
            f"Table {rule.table} of the skill.",
            "",
            f"- When: {rule.when}.",
            f"- Then: {rule.then}.",
            f"- Why: {rule.why}.",
            f"- Evidence: {' '.join(f'[{s}]' for s in rule.source)}"
            " (R: a decision of this tool; others: references/operators/sources.yaml). NPU: not run.",
            "",
        ]
    )
