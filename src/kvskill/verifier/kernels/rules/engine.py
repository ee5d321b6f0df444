"""Checks a call against the rules of a profile."""

from __future__ import annotations

from typing import Any

from kvskill.verifier.backend.context import OpContext

__all__ = ["check_call"]


def check_call(op: str, arguments: dict[str, Any], context: OpContext) -> None:
    """Raise OperatorRuleViolation when the call breaks a rule of `context.profile`."""
