"""Broken rules of level warning, counted per process. Imports no torch."""

from __future__ import annotations

from kvskill.verifier.kernels.errors import RuleHit

__all__ = ["note_warning", "take_warnings"]

_warnings: dict[RuleHit, int] = {}


def note_warning(hit: RuleHit) -> None:
    """Count one."""
    _warnings[hit] = _warnings.get(hit, 0) + 1


def take_warnings() -> dict[RuleHit, int]:
    """The warnings noted in this process since the last call, with how often each came; then forgets them."""
    found = dict(_warnings)
    _warnings.clear()
    return found
