"""Runs the template matrix in a child process and writes, checks or repeats the ledger."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvskill._version import __version__
from kvskill.diagnostics import Diagnostic, ExitCode, Severity, Span
from kvskill.verifier.jobs import Child, run_children
from kvskill.verifier.options import Limits
from kvskill.verifier.templates.binds import binding_releases
from kvskill.verifier.templates.cases import all_cases, slice_of
from kvskill.verifier.templates.framework import FrameworkRun, framework_runs
from kvskill.verifier.templates.ledger import (
    Ledger,
    default_path,
    read_ledger,
    round_up,
    stale_entries,
    template_hashes,
)

__all__ = ["BOUND", "TemplateOptions", "TemplateReport", "verify_templates"]

BOUND = {"float32": 1e-5, "bfloat16": 2e-2}
REPEATED = 10.0  # a re-run may differ by the order of sums on another CPU, not by more than this factor
FLOOR = 1e-6


@dataclass(frozen=True)
class TemplateOptions:
    """`check`: only compare hashes. `slice_text`: repeat the slice chosen by this text. Else: run all and write."""

    ledger: Path | None = None
    check: bool = False
    slice_text: str | None = None
    backend: str = "auto"
    framework: bool = True
    workers: int = 2
    seconds: float = 1800.0


@dataclass
class TemplateReport:
    """What was run, with findings; `figures` by case id."""

    ledger: Path
    figures: dict[str, float] = field(default_factory=dict)
    findings: list[Diagnostic] = field(default_factory=list)
    written: bool = False
    backend: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def exit_code(self) -> ExitCode:
        """FOUND with any finding."""
        return ExitCode.FOUND if self.findings else ExitCode.DONE


Progress = Callable[[int, int], None]


def verify_templates(options: TemplateOptions, progress: Progress | None = None) -> TemplateReport:
    """Check, repeat or write the evidence ledger. `progress(done, total)` is called now and then."""
    start = time.monotonic()
    path = options.ledger or default_path()
    ledger = read_ledger(path)
    report = TemplateReport(path)
    if options.check or options.slice_text is not None:
        for text in stale_entries(ledger):
            report.findings.append(_finding("KV440", f"The ledger is stale: {text}.", path, _WRITE))
    if not options.check:
        cases = all_cases()
        chosen = cases if options.slice_text is None else slice_of(cases, options.slice_text)
        results = _run(chosen, options, progress, report)
        _judge(results, chosen, ledger, options, report)
        if options.slice_text is None and not report.findings:
            on_npu = report.backend.get("kind") == "npu"
            runs = framework_runs() if options.framework and not on_npu else {}
            for shown, run in runs.items():
                if run.failed is not None:
                    todo = "Correct the conversion, or the templates that it uses."
                    report.findings.append(_finding("KV441", f"Framework run {shown} fails: {run.failed}.", path, todo))
            if not report.findings:
                _write(path, ledger, results, runs, options, report)
    report.seconds = time.monotonic() - start
    return report


_WRITE = "Run `kvskill verify --templates` and commit the ledger."


def _finding(code: str, fact: str, path: Path, todo: str) -> Diagnostic:
    return Diagnostic(code, Severity.ERROR, fact, todo, Span(path.name))


def _run(
    cases: list[dict[str, Any]], options: TemplateOptions, progress: Progress | None, report: TemplateReport
) -> dict[str, Any]:
    """Results by case id: {"error": figure} or {"failed": text}."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="kvskill-templates-") as name:
        folder = Path(name)
        count = min(options.workers, max(1, len(cases) // 8))
        children = []
        for number in range(count):
            job = {
                "role": "templates",
                "backend": options.backend,
                "cases": cases[number::count],
                "trees": [],
                "out": str(folder / str(number)),
            }
            children.append(Child(str(number), job))
        stop = threading.Event()
        watcher = threading.Thread(target=_watch, args=(folder, len(cases), progress, stop), daemon=True)
        watcher.start()
        outcomes = run_children(children, Limits(options.seconds))
        stop.set()
        watcher.join()
    for outcome in outcomes.values():
        if not outcome.ok:
            detail = outcome.died or (outcome.error or {}).get("trace", "")
            raise RuntimeError(f"a template process failed: {detail}\n{outcome.log}")
        results.update(outcome.result["results"])
        report.backend = outcome.result["backend"]
    return results


def _watch(folder: Path, total: int, progress: Progress | None, stop: threading.Event) -> None:
    while progress is not None and not stop.wait(0.5):
        done = 0
        for path in folder.glob("*/progress"):
            text = path.read_text(encoding="utf-8").strip()
            done += int(text) if text.isdigit() else 0
        progress(done, total)


def _judge(
    results: dict[str, Any],
    cases: list[dict[str, Any]],
    ledger: Ledger,
    options: TemplateOptions,
    report: TemplateReport,
) -> None:
    bound = BOUND["bfloat16" if report.backend.get("kind") == "npu" else "float32"]
    for case in cases:
        found = results.get(case["id"], {"failed": "the case was not run"})
        what = f"Case {case['id']} ({', '.join(case['templates'])})"
        if "failed" in found:
            todo = "Correct the template, or the case."
            report.findings.append(_finding("KV441", f"{what} fails: {found['failed']}.", report.ledger, todo))
            continue
        figure = float(found["error"])
        report.figures[case["id"]] = figure
        if not figure <= bound:
            fact = f"{what} differs from the reference by {figure:.1e} (bound {bound:.0e})."
            report.findings.append(_finding("KV441", fact, report.ledger, "Correct the template."))
        elif options.slice_text is not None:
            old = ledger.cases.get(case["id"])
            if old is not None and figure > max(REPEATED * old, FLOOR):
                fact = f"{what} gives {figure:.1e}, the ledger says {old:.1e}."
                report.findings.append(_finding("KV443", fact, report.ledger, _WRITE))


def _write(
    path: Path,
    ledger: Ledger,
    results: dict[str, Any],
    runs: dict[str, FrameworkRun],
    options: TemplateOptions,
    report: TemplateReport,
) -> None:
    cases = all_cases()
    on_npu = report.backend.get("kind") == "npu"
    before = ledger.templates
    ledger.templates = {}
    for name, digest in template_hashes().items():
        ids = [c["id"] for c in cases if name in c["templates"]]
        old = before.get(name, {})
        same = old.get("sha256") == digest
        entry: dict[str, Any] = dict(old) if same else {"npu": "not run"}
        entry["sha256"] = digest
        figures = [float(results[i]["error"]) for i in ids]
        worst = round_up(max(figures)) if figures else None
        if on_npu:
            known = {k: report.backend.get(k) for k in ("soc", "cann", "torch_npu")}
            entry["npu"] = {"cases": len(ids), "worst": worst, **known}
        else:
            entry["binds"] = binding_releases(name)
            meta = [results[i].get("meta") for i in ids]
            run = sum(m is True for m in meta)
            entry["meta"] = {"cases": run} if run else _no_meta(entry["binds"], report)
            entry["reference"] = {"cases": len(ids), "worst": worst} if ids else "not run"
            used = {k: run.worst for k, run in runs.items() if name in run.templates}
            if options.framework:
                entry["framework"] = used or "not run"
        ledger.templates[name] = entry
    if not on_npu:
        ledger.cases = {i: round_up(float(r["error"])) for i, r in results.items()}
        keys = ("kind", "torch", "torch_npu", "profile")
        ledger.tool = {"kvskill": __version__, **{k: report.backend.get(k) for k in keys}}
    path.write_text(ledger.dump(), encoding="utf-8")
    report.written = True


def _no_meta(binds: dict[str, Any], report: TemplateReport) -> str:
    if binds and set(binds.values() if all(isinstance(v, str) for v in binds.values()) else ["some"]) == {"any"}:
        return "calls no operator"
    return "not run" if report.backend.get("kind") == "wheel" else "not run: needs the torch_npu wheel"
