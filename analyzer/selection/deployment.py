"""Deployment mode, by the seed's priority.

1. the option (`--mode`) or the dispatch prompt (`--prompt "部署模式: 独立部署"`); 2. what people set: the
manifest's override, then progress.md; 3. self-check: registered with the framework; an own runner whose
class does not derive from the framework; else framework. Two sources that differ are a finding, whichever
wins.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvskill.analyzer.progress import ProgressFacts
from kvskill.analyzer.target import Registered
from kvskill.analyzer.target.classes import module_statements
from kvskill.diagnostics import Diagnostic, InputError, Severity, Span
from kvskill.manifest import Decision, Evidence
from kvskill.source import read_source

__all__ = ["Deployment", "RunnerClass", "decide_deployment", "find_runners", "prompt_mode"]

Mode = Literal["framework", "standalone"]
FRAMEWORK_PACKAGE = "executor.core"
_PROMPT = re.compile(
    r"(?:部署模式|部署方式|deploy(?:ment)? mode)\s*[:：=]\s*[`*\"'「]*\s*"
    r"(框架(?:部署)?|独立(?:部署)?|framework|standalone)",
    re.IGNORECASE,
)
_WORDS: dict[str, Mode] = {"框架": "framework", "独立": "standalone", "framework": "framework"}
_WORDS["standalone"] = "standalone"


@dataclass(frozen=True)
class RunnerClass:
    """A class of a runner file; `framework` says that a base of it comes from executor/core."""

    name: str
    bases: tuple[str, ...]
    framework: bool
    span: Span


@dataclass(frozen=True)
class Deployment:
    """The decision and what spoke against it."""

    decision: Decision[Mode]
    findings: tuple[Diagnostic, ...]


def prompt_mode(text: str) -> Mode | None:
    """The mode that a dispatch prompt names; None when it names none. Raises InputError KV024 when it names
    both.
    """
    said = {_WORDS[next(w for w in _WORDS if m.group(1).lower().startswith(w))] for m in _PROMPT.finditer(text)}
    if len(said) > 1:
        raise InputError(
            Diagnostic(
                "KV024",
                Severity.ERROR,
                "The prompt names both deployment modes.",
                "Give one: `部署模式: 框架部署` or `部署模式: 独立部署`.",
                Span("--prompt"),
            )
        )
    return said.pop() if said else None


def find_runners(model_dir: Path, shown_root: Path) -> tuple[RunnerClass, ...]:
    """The classes of `runner_*.py` in the model folder. Files that cannot be parsed are left to the reader
    of code.
    """
    found = []
    real = model_dir.resolve()
    for path in sorted(model_dir.glob("runner_*.py")):
        if real not in path.resolve().parents:
            continue
        try:
            source = read_source(path, path.relative_to(shown_root).as_posix())
        except InputError:
            continue
        imported: dict[str, str] = {}
        derived: dict[str, bool] = {}
        for stmt in module_statements(source.tree.body):
            if isinstance(stmt, ast.ImportFrom):
                imported.update({a.asname or a.name: f"{stmt.module}.{a.name}" for a in stmt.names})
            elif isinstance(stmt, ast.Import):
                imported.update({(a.asname or a.name): a.name for a in stmt.names})
            elif isinstance(stmt, ast.ClassDef):
                bases = [_qualified(b, imported) for b in stmt.bases]
                derived[stmt.name] = any(b.startswith(FRAMEWORK_PACKAGE) or derived.get(b, False) for b in bases)
                found.append(RunnerClass(stmt.name, tuple(bases), derived[stmt.name], source.span(stmt)))
    return tuple(found)


def decide_deployment(
    *,
    option: Mode | None,
    prompt: Mode | None,
    override: Mode | None,
    progress: ProgressFacts | None,
    registered: Sequence[Registered],
    runners: Sequence[RunnerClass],
    registry_form: str | None = None,
) -> Deployment:
    """Decide, and report every source that says otherwise."""
    said: list[tuple[str, Mode, Evidence]] = []
    if option:
        said.append(("option", option, Evidence(kind="option", ref="--mode")))
    if prompt:
        said.append(("option", prompt, Evidence(kind="option", ref="--prompt")))
    if override:
        said.append(("override", override, Evidence(kind="override", ref="overrides.deployment")))
    if progress is not None and progress.deployment is not None:
        where = f"{progress.shown}:{progress.deployment_at.line}" if progress.deployment_at else progress.shown
        said.append(("progress", progress.deployment, Evidence(kind="progress", ref=where)))
    checked, evidence, certain = _self_check(registered, runners, registry_form)
    findings = list(_both_registered_and_runner(registered, runners))
    if not said:
        findings.extend(progress.findings if progress is not None else ())
        return Deployment(Decision(value=checked, source=evidence.kind, evidence=(evidence,)), tuple(findings))
    source, mode, first = said[0]
    for _, other, there in said[1:]:
        if other != mode:
            findings.append(_contradiction(mode, first, other, there))
    if certain and checked != mode:
        findings.append(_contradiction(mode, first, checked, evidence))
    if progress is not None:
        findings.extend(_softened(progress.findings))
    agreeing = tuple(e for _, m, e in said if m == mode)
    backing = (evidence,) if certain and checked == mode else ()
    return Deployment(Decision(value=mode, source=source, evidence=(*agreeing, *backing)), tuple(findings))


def _self_check(
    registered: Sequence[Registered], runners: Sequence[RunnerClass], registry_form: str | None
) -> tuple[Mode, Evidence, bool]:
    """(mode, evidence, certain): certain when the code itself shows it."""
    if registered:
        keys = ", ".join(r.key for r in registered)
        return (
            "framework",
            Evidence(kind="target", ref=str(registered[0].span), note=f"registered as {keys}"),
            True,
        )
    own = [r for r in runners if not r.framework]
    if own:
        base = ", ".join(own[0].bases) or "no class"
        note = f"{own[0].name} runs its own loop (derives from {base}, not from {FRAMEWORK_PACKAGE})"
        return "standalone", Evidence(kind="code", ref=str(own[0].span), note=note), True
    where = registry_form.split(":")[0] if registry_form else "support_models"
    note = f"not registered in {where}, no runner_*.py of its own: framework is the default"
    return "framework", Evidence(kind="default", ref="S13-deployment", note=note), False


def _both_registered_and_runner(
    registered: Sequence[Registered], runners: Sequence[RunnerClass]
) -> tuple[Diagnostic, ...]:
    own = [r for r in runners if not r.framework]
    if not (registered and own):
        return ()
    return (
        Diagnostic(
            "KV025",
            Severity.WARNING,
            f"The model is registered with the framework, and `{own[0].name}` drives it too.",
            "Framework deployment is assumed; give --mode standalone to convert the runner instead.",
            own[0].span,
        ),
    )


def _contradiction(mode: Mode, first: Evidence, other: Mode, where: Evidence) -> Diagnostic:
    path, _, line = where.ref.partition(":")
    number = line.split(":")[0]
    return Diagnostic(
        "KV025",
        Severity.WARNING,
        f"The deployment mode is {mode} by {first.ref}, but {other} by {where.ref}.",
        f"{first.ref} wins; correct the other place if it is out of date.",
        Span(path, int(number)) if number.isdigit() else Span(where.ref),
    )


def _softened(findings: Sequence[Diagnostic]) -> list[Diagnostic]:
    """A contradiction inside progress.md no longer blocks when a stronger source has spoken."""
    return [
        Diagnostic(f.code, Severity.WARNING, f.fact, f.todo, f.span, f.data) if f.severity is Severity.BLOCKING else f
        for f in findings
    ]


def _qualified(node: ast.expr, imported: dict[str, str]) -> str:
    text = ast.unparse(node)
    head, _, rest = text.partition(".")
    head = imported.get(head, head)
    return f"{head}.{rest}" if rest else head
