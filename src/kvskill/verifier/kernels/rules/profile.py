"""Rule profiles: which limits hold on which CANN. Data in `verifier/data/rules/<name>.yaml`; imports no torch.

A profile may extend another one: `change` overrides fields of a rule (its params are merged), `remove` drops
rules with a reason, `rules` adds some.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any, Literal

import yaml

__all__ = ["Profile", "Rule", "load_profile", "profile_names"]

Level = Literal["error", "warning"]


@dataclass(frozen=True)
class Rule:
    """One rule. `check` names the condition (`rules.fa_*`, `rules.other`), `params` its figures.

    `ops` are operator names; "fa" stands for both versions. `early` rules come first, and when one is broken
    the later ones are not looked at. `message` is a format string over the facts that the check returns.
    `silent` rules are those that no device checks: the call goes on and computes something else.
    """

    id: str
    code: str
    ops: tuple[str, ...]
    check: str
    message: str
    source: str
    level: Level = "error"
    early: bool = False
    silent: bool = False
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Profile:
    """A named set of rules. `removed` maps the ids that the parent had to the reason why they are gone."""

    name: str
    about: str
    rules: tuple[Rule, ...]
    removed: dict[str, str] = field(default_factory=dict)

    def for_op(self, op: str) -> tuple[Rule, ...]:
        """The rules of an operator, early ones first, else in file order."""
        return _for_op(self.name, op)


def profile_names() -> tuple[str, ...]:
    """Names of the profiles that ship with kvskill."""
    folder = resources.files("kvskill.verifier").joinpath("data/rules")
    return tuple(sorted(p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml")))


@functools.cache
def load_profile(name: str) -> Profile:
    """Read a profile. Raises KeyError, with the known names, when there is none of this name."""
    if name not in profile_names():
        raise KeyError(f"no rule profile {name!r}; known: {', '.join(profile_names())}")
    path = resources.files("kvskill.verifier").joinpath(f"data/rules/{name}.yaml")
    data: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    rules: dict[str, Rule] = {}
    if parent := data.get("extends"):
        rules = {r.id: r for r in load_profile(parent).rules}
    for rule_id, change in (data.get("change") or {}).items():
        old = rules[rule_id]
        params = {**old.params, **change.pop("params", {})}
        rules[rule_id] = replace(old, **change, params=params)
    removed = data.get("remove") or {}
    for rule_id in removed:
        del rules[rule_id]
    for entry in data.get("rules") or []:
        rule = Rule(**{**entry, "ops": tuple(entry["ops"])})
        if rule.id in rules:
            raise ValueError(f"{name}: rule {rule.id} is there already; use `change`")
        rules[rule.id] = rule
    return Profile(name, data["about"], tuple(rules.values()), dict(removed))


_FA = ("npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2")


@functools.cache
def _for_op(profile: str, op: str) -> tuple[Rule, ...]:
    names = {op, "fa"} if op.split(".")[0] in _FA else {op, op.removesuffix("_functional")}
    chosen = [r for r in load_profile(profile).rules if names & set(r.ops)]
    return tuple(sorted(chosen, key=lambda r: not r.early))
