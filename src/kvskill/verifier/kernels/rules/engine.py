"""Checks a call against the rules of a profile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvskill.verifier.backend.context import OpContext
from kvskill.verifier.kernels.errors import OperatorRuleViolation, RuleHit
from kvskill.verifier.kernels.rules.checks import CHECKS
from kvskill.verifier.kernels.rules.profile import Rule, load_profile
from kvskill.verifier.kernels.rules.view import FaView
from kvskill.verifier.kernels.rules.warnings import note_warning

__all__ = ["broken_rules", "check_call"]


def broken_rules(op: str, arguments: dict[str, Any], context: OpContext) -> list[tuple[Rule, RuleHit]]:
    """The rules of `context.profile` that the call breaks, in order. Waived rules are left out."""
    rules = load_profile(context.profile).for_op(op)
    if not rules:
        return []
    view: Any = FaView.of(op, arguments) if "fused_infer_attention" in op else arguments
    hits: list[tuple[Rule, RuleHit]] = []
    for rule in rules:
        if rule.id in context.waive or (hits and hits[-1][0].early and not rule.early):
            continue
        check: Callable[..., dict[str, Any] | None] = CHECKS[rule.check]
        facts = check(view, rule.params, context)
        if facts is not None:
            message = rule.message.format(**facts)
            hit = RuleHit(rule.id, rule.code, context.profile, op, rule.source, message, rule.silent)
            hits.append((rule, hit))
    return hits


def check_call(op: str, arguments: dict[str, Any], context: OpContext) -> None:
    """Raise OperatorRuleViolation when the call breaks a rule; note the warnings (see `take_warnings`)."""
    hits = broken_rules(op, arguments, context)
    errors = tuple(h for r, h in hits if (r.level == "error" or context.strict) and r.id not in context.note)
    if errors:
        raise OperatorRuleViolation(errors)
    for _, hit in hits:
        note_warning(hit)
