"""What one attention object did in one run: its writes, its attention, and what its mask shows."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvskill.analyzer.modeling.builtins import inplace_source
from kvskill.analyzer.modeling.cuts import Cut, token_cuts
from kvskill.analyzer.modeling.held import cache_root
from kvskill.analyzer.modeling.operators import WRITE_OPS, argument
from kvskill.analyzer.modeling.run import Run, submodules
from kvskill.analyzer.modeling.scores import Attend, causal_doubt, find_attends
from kvskill.analyzer.modeling.trace import method_frame
from kvskill.analyzer.modeling.values import Frame, Instance, Tensor
from kvskill.analyzer.modeling.visible import Visible, visible_keys
from kvskill.analyzer.modeling.walk import Walk
from kvskill.analyzer.modeling.window import window_sizes

__all__ = ["RepRun", "Write", "mask_doubt", "phase_reps", "rep_runs"]


@dataclass(eq=False)
class Write:
    """One write of fresh K or V into a cache."""

    cache: Tensor
    value: Tensor
    frame: Frame
    stmt: ast.stmt | None
    node: ast.AST


@dataclass(eq=False)
class RepRun:
    """What one attention object did in one run."""

    run: Run
    inst: Instance
    writes: list[Write]
    attends: list[Attend]
    sizes: tuple[int, ...] = ()  # configured sizes that may be windows

    @property
    def walk(self) -> Walk:
        return self.run.walk

    @cached_property
    def visible(self) -> Visible | None:
        """The keys that the mask shows, where it can be evaluated."""
        return visible_keys(self.walk, self.attends[0], self.run.phase, self.sizes) if self.attends else None

    @cached_property
    def cut(self) -> str | None:
        """What is read of a cache that is neither all of it nor a span that could be evaluated, in words."""
        if not self.attends:
            return None
        ends = [_ends(self.walk, token_cuts(t)) for t in (self.attends[0].k, self.attends[0].v)]
        if ends[0] != ends[1] and None not in ends:
            return "other places for keys than for values"
        for operand in (self.attends[0].k, self.attends[0].v):
            for cut in token_cuts(operand) or ():
                if cut.other:
                    return "chosen places"
                if cut.start is not None and self.visible is None:
                    return "a part whose start is not known"
        return None


def _ends(walk: Walk, cuts: list[Cut] | None) -> list[tuple[str, ...]] | None:
    """What the cuts of one operand are made of, for comparison."""
    if cuts is None:
        return None
    texts = ([walk.as_text(v) if v is not None else "" for v in (c.start, c.stop)] for c in cuts)
    return [tuple("" if t.startswith("<") or "?" in t else t for t in pair) for pair in texts]


def rep_runs(run: Run, inst: Instance, attends: list[Attend], sizes: tuple[int, ...] = ()) -> RepRun:
    """Collect the writes of `inst` in a run, and those of the run's attends that are its own."""
    walk = run.walk
    writes: list[Write] = []
    for call in walk.calls:
        if method_frame(call.frame, inst) is None:
            continue
        if call.name.startswith("tensor."):
            source, _ = inplace_source(call.name[len("tensor.") :], call.args[1:], call.kwargs)
            cache = cache_root(call.args[0]) if source is not None else None
            if cache is not None and isinstance(source, Tensor):
                writes.append(Write(cache, source, call.frame, call.stmt, call.node))
            continue
        if call.name not in WRITE_OPS:
            continue
        cache = cache_root(argument(call.name, call.args, call.kwargs, "input"))
        value = argument(call.name, call.args, call.kwargs, "updates")
        if cache is not None and isinstance(value, Tensor):
            writes.append(Write(cache, value, call.frame, call.stmt, call.node))
    for node, frame, obj, value in walk.item_writes:
        cache = cache_root(obj)
        if cache is not None and isinstance(value, Tensor) and method_frame(frame, inst) is not None:
            stmt = _frame_stmt(frame, node)
            writes.append(Write(cache, value, frame, stmt, node))
    mine = [a for a in attends if method_frame(a.out.frame, inst) is not None]
    return RepRun(run, inst, writes, mine, sizes)


def phase_reps(mine: list[Instance], prefill: Run, decode: Run, config: Mapping[str, Any]) -> list[RepRun]:
    """Both phases of each object that the prefill enters (layers of one kind are walked once), one after the other."""
    sizes = window_sizes(config)
    paths = {m.path for m in mine}
    twins = {m.path: m for m in submodules(decode.root) if m.path in paths}
    reps: list[RepRun] = []
    early, late = find_attends(prefill.walk), find_attends(decode.walk)
    for inst in mine:
        if any(f.self_ is inst for f in prefill.walk.frames):
            reps.append(rep_runs(prefill, inst, early, sizes))
            reps.append(rep_runs(decode, twins[inst.path], late, sizes))
    return reps


def _frame_stmt(frame: Frame, node: ast.AST) -> ast.stmt | None:
    if isinstance(frame.func, ast.FunctionDef):
        for stmt in ast.walk(frame.func):
            if isinstance(stmt, (ast.Assign, ast.AugAssign)) and any(n is node for n in ast.walk(stmt)):
                return stmt
    return None


def mask_doubt(rep: RepRun) -> str | None:
    """How an object attends otherwise than to its own and earlier tokens, in words. The mask is evaluated; where it
    cannot be, a prefill is judged by what its mask is made of."""
    if rep.visible is not None:
        return rep.visible.doubt
    return causal_doubt(rep.walk, rep.attends[0]) if rep.run.phase == "prefill" else None
