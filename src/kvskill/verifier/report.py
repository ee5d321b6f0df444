"""What a verification found: figures, named checks, findings; as a table for people and JSON for tools."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from kvskill.diagnostics import Diagnostic, ExitCode, Severity
from kvskill.verifier.compare import Comparison

__all__ = ["Check", "VerifyReport", "render"]


@dataclass(frozen=True)
class Check:
    """A named check with its figures. `ok` None: it could not be run, and the text says why."""

    name: str
    ok: bool | None
    text: str


@dataclass
class VerifyReport:
    """Everything that a verification established. `parties` says for each party that it ran, or why not."""

    model: str
    repo: str
    seed: int
    setup: list[str] = field(default_factory=list)
    parties: dict[str, str] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    findings: list[Diagnostic] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    backend: dict[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> ExitCode:
        """DONE when nothing at error severity was found and something was compared."""
        if any(f.severity in (Severity.ERROR, Severity.BLOCKING) for f in self.findings):
            return ExitCode.FOUND
        if not self.comparisons:
            return ExitCode.CANNOT_RUN
        return ExitCode.DONE

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        return {
            "model": self.model,
            "repo": self.repo,
            "seed": self.seed,
            "exit_code": int(self.exit_code),
            "backend": self.backend,
            "parties": self.parties,
            "setup": self.setup,
            "comparisons": [{**asdict(c), "ok": c.ok} for c in self.comparisons],
            "checks": [asdict(c) for c in self.checks],
            "findings": [f.to_json() for f in self.findings],
            "notes": self.notes,
            "seconds": round(self.seconds, 1),
        }


def _phases(report: VerifyReport) -> list[str]:
    """The worst figure of each phase, by oracle: what progress.md records."""
    out = []
    for oracle in dict.fromkeys(c.oracle for c in report.comparisons):
        mine = [c for c in report.comparisons if c.oracle == oracle]
        words = []
        for phase in ("prefill", "decode"):
            figures = [f for c in mine if (f := getattr(c, phase)) is not None]
            words.append(f"{phase} {max(figures):.2e}" if figures else f"{phase} not compared")
        out.append(f"worst against {oracle}: {', '.join(words)}")
    return out


def render(report: VerifyReport, console: Console) -> None:
    """Print the report."""
    console.print(f"verify {report.model}  (seed {report.seed}, {report.seconds:.1f} s)", highlight=False)
    for line in report.setup:
        console.print(f"  {line}", highlight=False, markup=False)
    for party, how in report.parties.items():
        console.print(f"  {party}: {how}", highlight=False, markup=False)
    if report.comparisons:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in (
            "oracle",
            "request",
            "prompt",
            "positions",
            "max |a-b| / max |ref|",
            "NaN",
            "bound",
            "result",
        ):
            table.add_column(column, justify="left" if column in ("oracle", "result") else "right")
        for c in report.comparisons:
            flips = f" ({c.outliers} above the bound)" if c.outliers else ""
            result = f"agrees{flips}" if c.ok else f"DIFFERS from position {c.first_bad}"
            if c.missing:
                result = f"{c.missing} positions missing"
            if c.positions == 0:
                result = "NOTHING COMPARED"
            table.add_row(
                c.oracle,
                str(c.request),
                str(c.prompt),
                str(c.positions),
                f"{c.relative:.2e}",
                str(c.nan),
                f"{c.tolerance:.0e}",
                result,
            )
        console.print(table)
        for line in _phases(report):
            console.print(f"  {line}", highlight=False)
    for check in report.checks:
        mark = {True: "ok  ", False: "FAIL", None: "-   "}[check.ok]
        console.print(f"  {mark} {check.name}: {check.text}", highlight=False, markup=False)
    for note in report.notes:
        console.print(f"  note: {note}", highlight=False, markup=False)
    for finding in report.findings:
        console.print(str(finding), highlight=False, markup=False)
    word = {ExitCode.DONE: "agrees", ExitCode.FOUND: "FOUND", ExitCode.CANNOT_RUN: "NOT VERIFIED"}
    console.print(f"result: {word.get(report.exit_code, str(report.exit_code))}", highlight=False)
