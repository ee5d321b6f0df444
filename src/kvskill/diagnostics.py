"""Findings, errors and exit codes: the only vocabulary in which kvskill reports.

A finding is one sentence that names a fact, one sentence that says what to do, and the source range it
stands on. Codes live in `references/rules/registry.yaml`; the hundreds digit is the part that found it
(0 input, 1 analysis, 2 apply, 3 check, 4 verify, 9 internal).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

__all__ = [
    "Diagnostic",
    "ExitCode",
    "InputError",
    "KvskillError",
    "Refusal",
    "Severity",
    "Span",
    "as_warning",
]

_CODE = re.compile(r"KV\d{3}$")


class ExitCode(enum.IntEnum):
    """Exit codes of every command."""

    DONE = 0  # done, nothing to report
    FOUND = 1  # ran and found something: finding, would change, verification differs
    CANNOT_RUN = 2  # usage, unreadable or invalid input
    REFUSED = 3  # pattern not supported or not certain: nothing was written
    INTERNAL = 70  # our own bug


class Severity(enum.Enum):
    """How much a finding matters. BLOCKING stops `apply`; ERROR is wrong input; others inform."""

    ERROR = "error"
    BLOCKING = "blocking"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, order=True)
class Span:
    """A source range. Lines and columns are 1-based, columns count characters, the end is exclusive."""

    path: str
    line: int = 1
    col: int = 1
    end_line: int = 0
    end_col: int = 0

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.col}"


@dataclass(frozen=True)
class Diagnostic:
    """One finding.

    `fact` says what was found (one sentence), `todo` what to do next (one sentence).
    `data` holds extra machine-readable values and must be JSON-serialisable.
    """

    code: str
    severity: Severity
    fact: str
    todo: str
    span: Span
    data: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if not _CODE.match(self.code):
            raise ValueError(f"not a diagnostic code: {self.code!r}")

    def __str__(self) -> str:
        return f"{self.span}: {self.severity.value} {self.code}: {self.fact} {self.todo}"

    def to_json(self) -> dict[str, Any]:
        """A plain dict; the severity is its name."""
        out = asdict(self)
        out["severity"] = self.severity.value
        return out


def as_warning(finding: Diagnostic) -> Diagnostic:
    """The same finding where it does not stop anything."""
    return replace(finding, severity=Severity.WARNING)


class KvskillError(Exception):
    """Base of the errors that carry findings; the CLI prints them and exits with `exit_code`."""

    exit_code = ExitCode.INTERNAL

    def __init__(self, findings: Diagnostic | Iterable[Diagnostic]) -> None:
        self.findings: tuple[Diagnostic, ...] = (
            (findings,) if isinstance(findings, Diagnostic) else tuple(findings)
        )
        super().__init__("\n".join(str(f) for f in self.findings))


class InputError(KvskillError):
    """The input cannot be read or is invalid: exit 2."""

    exit_code = ExitCode.CANNOT_RUN


class Refusal(KvskillError):  # noqa: N818 (not a failure: an answer)
    """The input is readable but is not converted: exit 3, nothing was written."""

    exit_code = ExitCode.REFUSED
