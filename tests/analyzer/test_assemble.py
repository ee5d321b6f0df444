"""Findings of an analysis: one order, each once, and what no longer blocks."""

from __future__ import annotations

from kvskill.analyzer.assemble import ordered
from kvskill.diagnostics import Diagnostic, Severity, Span


def _finding(code: str, severity: Severity, line: int = 1, fact: str = "a.") -> Diagnostic:
    return Diagnostic(code, severity, fact, "b.", Span("f.py", line))


MIXED = [
    _finding("KV120", Severity.NOTE),
    _finding("KV062", Severity.WARNING, 9),
    _finding("KV062", Severity.WARNING, 2),
    _finding("KV061", Severity.BLOCKING),
    _finding("KV061", Severity.BLOCKING),
]


def test_order_does_not_depend_on_the_input() -> None:
    one, other = ordered(MIXED, paged=False), ordered(MIXED[::-1], paged=False)
    assert one == other
    assert [(f.code, f.span.line) for f in one] == [("KV061", 1), ("KV062", 2), ("KV062", 9), ("KV120", 1)]


def test_nothing_blocks_a_paged_model_or_a_settled_ground() -> None:
    assert {f.severity for f in ordered(MIXED, paged=True)} == {Severity.WARNING, Severity.NOTE}
    settled = ordered(MIXED, paged=False, settled=frozenset({"KV061"}))
    assert Severity.BLOCKING not in {f.severity for f in settled}
