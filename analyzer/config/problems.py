"""Errors of config understanding, each one finding, built in one place."""

from __future__ import annotations

from kvskill.diagnostics import Diagnostic, InputError, Refusal, Severity, Span

__all__ = ["invalid", "refused"]


def invalid(code: str, shown: str, fact: str, todo: str, line: int = 1, col: int = 1) -> InputError:
    """The config cannot be read as it is: exit 2."""
    return InputError(Diagnostic(code, Severity.ERROR, fact, todo, Span(shown, line, col)))


def refused(code: str, shown: str, fact: str, todo: str) -> Refusal:
    """The config is readable, but no certain answer follows from it: exit 3."""
    return Refusal(Diagnostic(code, Severity.BLOCKING, fact, todo, Span(shown)))
