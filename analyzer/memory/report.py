"""Memory plans for every offline YAML of a model, and the what-if on top of the primary one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvskill.analyzer.memory.formulas import Formulas, read_formulas
from kvskill.analyzer.memory.plan import CacheGeometry, parse_what_if, plan_memory, plan_standalone
from kvskill.analyzer.selection.groups import geometries
from kvskill.analyzer.target.classes import SourceTree
from kvskill.analyzer.yamls import RunSettings, YamlFacts
from kvskill.diagnostics import Diagnostic, Severity, Span
from kvskill.manifest import Group, MemoryPlan

__all__ = ["plans_for"]


def plans_for(
    groups: Sequence[Group],
    mtp_layers: int,
    yamls: Sequence[YamlFacts],
    primary: YamlFacts | None,
    tree: SourceTree | None,
    *,
    block_size: int,
    what_if: str | None,
    standalone: bool,
) -> tuple[list[MemoryPlan], MemoryPlan | None, list[Diagnostic]]:
    """(plans, what-if, findings). Online files are left out: their pools are sized from free memory at start-up.

    Raises InputError KV008 for a what-if that is not understood.
    """
    base = primary.settings if primary is not None else RunSettings()
    wanted = None if what_if is None else parse_what_if(what_if, replace(base, block_size=block_size))
    caches = geometries(groups, mtp_layers)
    findings: list[Diagnostic] = []
    if not caches:
        return [], None, findings
    formulas = read_formulas(tree)
    plans = []
    for y in yamls:
        if y.era == "other" or y.online or y.settings.batch_per_rank < 1:
            continue
        run = replace(y.settings, block_size=block_size) if y is primary else y.settings
        plan = _one(caches, run, formulas, y.shown, standalone, findings)
        if plan is not None:
            plans.append(plan)
    extra = None if wanted is None else _one(caches, wanted, formulas, None, standalone, findings)
    return plans, extra, findings


def _one(
    caches: Sequence[CacheGeometry],
    run: RunSettings,
    formulas: Formulas,
    yaml: str | None,
    standalone: bool,
    findings: list[Diagnostic],
) -> MemoryPlan | None:
    try:
        if standalone:
            return plan_standalone(caches, run, yaml)
        return plan_memory(caches, run, formulas, yaml)
    except ValueError as exc:
        findings.append(
            Diagnostic(
                "KV029",
                Severity.WARNING,
                f"The memory plan cannot be computed: {exc}.",
                "Correct the settings named.",
                Span(yaml or "--what-if"),
            )
        )
        return None
