"""Before a standalone conversion is written: is the result what the plan claimed?"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import libcst as cst

from kvskill.analyzer.modeling.facts import ModelFacts
from kvskill.analyzer.modeling.program import bind_files
from kvskill.analyzer.modeling.settings import settings_of
from kvskill.analyzer.runner.calls import attends
from kvskill.analyzer.runner.hazards import find_hazards
from kvskill.analyzer.runner.walkrun import run_standalone
from kvskill.diagnostics import Diagnostic, Severity, Span
from kvskill.implementer.plan import Plan
from kvskill.source import SourceFile

__all__ = ["postcheck_standalone"]


def postcheck_standalone(plan: Plan, facts: ModelFacts, config: Mapping[str, Any]) -> list[Diagnostic]:
    """Findings that stop the write; empty when the result holds.

    The result parses, each converted attention class has exactly the paged call, no write by row is left in it, the
    code walks as before on padded rows, and no hazard of hand-paged code is in it.
    """
    files = dict(facts.program.files)
    for shown, new in plan.results().items():
        old = files[shown]
        try:
            module = cst.parse_module(new)
            tree = ast.parse(new, filename=shown)
        except Exception as exc:
            return [_finding(shown, f"The result is not valid Python ({exc}).")]
        if module.bytes != new:
            return [_finding(shown, "The result does not survive a parse and print.")]
        files[shown] = SourceFile(old.path, shown, new, old.encoding, tree)
    assert facts.entry is not None and facts.prefill is not None
    out: list[Diagnostic] = []
    calls = attends(files.values())
    for attention in facts.attentions:
        mine = [c for c in calls if c.inside.owner is not None and c.inside.owner.name == attention.seam.owner.name]
        phases = [c.paged for c in mine]
        if phases != ([True] if attention.mla is None else [False, True]):
            out.append(_finding(attention.file.shown, f"{attention.cls.name} has {len(mine)} attention calls."))
        for node in ast.walk(mine[0].inside.node) if mine else ():
            if isinstance(node, ast.Attribute) and node.attr in ("scatter_update_", "scatter_update"):
                out.append(_finding(attention.file.shown, f"{attention.cls.name} still writes by row."))
    out.extend(_finding(h.span.path, h.fact) for h in find_hazards(list(files.values())))
    program = bind_files({k: f for k, f in files.items() if k in facts.program.modules}, facts.program.root)
    entry = program.find(facts.entry.name)
    assert entry is not None
    settings = settings_of(program, entry, config)
    for phase in ("prefill", "decode"):
        run = run_standalone(program, entry, settings, phase)
        out.extend(
            Diagnostic(
                "KV293",
                Severity.BLOCKING,
                f"The shapes of the result do not fit here ({p.text}).",
                "Nothing was written. Report it: the plan's own check failed.",
                p.frame.file.span(p.node),
            )
            for p in run.walk.problems[:3]
        )
    return out


def _finding(shown: str, fact: str) -> Diagnostic:
    todo = "Nothing was written. Report it: the plan's own check failed."
    return Diagnostic("KV293", Severity.BLOCKING, fact, todo, Span(shown))
