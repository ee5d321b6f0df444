"""What a walk sees and a conversion would lose: changes in place, numbers of other requests, state of a batch row."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from kvskill.analyzer.modeling.held import cache_root
from kvskill.analyzer.modeling.reps import RepRun
from kvskill.analyzer.modeling.run import Run
from kvskill.analyzer.modeling.shapes import LAYOUT, MIXING
from kvskill.analyzer.modeling.trace import ancestors, chain, method_frame
from kvskill.analyzer.modeling.values import Frame, Instance, Tensor, Tup, Value
from kvskill.diagnostics import Diagnostic, Severity

__all__ = ["Hazard", "attention_hazard", "kept_states", "mixed_tokens"]

_RUNTIME = frozenset({"B", "S", "T", "n"})
_KEEP = frozenset({"sort", "argsort", "flip", "roll"})
_SIDES = ("input:position_ids", "input:kv_len", "input:actual_seq", "input:input_ids")


@dataclass(frozen=True)
class Hazard:
    """Something that would be lost, with its place."""

    code: str
    fact: str
    todo: str
    node: ast.AST | None
    frame: Frame | None


def attention_hazard(rep: RepRun) -> Hazard | None:
    """The first hazard of one attention object in one run."""
    return next(_changed_in_place(rep), None) or next(_of_other_requests(rep), None)


def _changed_in_place(rep: RepRun) -> Iterator[Hazard]:
    """A cache that is changed, and queries, keys or values that are, after the cache was written: the paged call comes
    before that."""
    walk = rep.walk
    written = {id(w.node) for w in rep.writes}
    watched = {id(t): "the queries" for a in rep.attends for t in chain(a.q)}
    for write in rep.writes:
        watched |= {id(t): "what is cached" for t in chain(write.value)}
    used = {id(t) for t in ancestors([x for a in rep.attends for x in (a.q, a.k, a.v)])}
    used |= {id(t) for t in ancestors([w.value for w in rep.writes])}
    order = {id(t.node): i for i, t in enumerate(walk.tensors) if t.node is not None}
    first = min((order[id(w.node)] for w in rep.writes if id(w.node) in order), default=None)
    places: list[tuple[ast.AST | None, Frame | None, object]] = [
        (t.node, t.frame, t.parents[0])
        for t in walk.tensors
        if t.op.endswith("_") and t.parents and id(t) not in used and id(t.node) not in written
    ]
    places += [(node, frame, obj) for node, frame, obj, _ in walk.item_writes if id(node) not in written]
    for node, frame, target in places:
        if not isinstance(target, Tensor) or frame is None or method_frame(frame, rep.inst) is None:
            continue
        what = "the cache" if cache_root(target) is not None else None
        late = first is None or order.get(id(node), first) >= first
        if id(node) not in order and rep.writes and rep.writes[0].frame.func is frame.func:
            late = getattr(node, "lineno", 0) > getattr(rep.writes[0].node, "lineno", 0)
        if what is None and late:
            what = next((watched[id(t)] for t in chain(target, _PARTS) if id(t) in watched), None)
        if what is not None and target.op != "filled":
            fact = f"{rep.inst.cls.name} changes {what} in place in {rep.run.phase}."
            yield Hazard("KV149", fact, "Write it as an expression before the cache is written.", node, frame)


_PARTS = LAYOUT | {"getitem", "select", "narrow", "split"}


def _of_other_requests(rep: RepRun) -> Iterator[Hazard]:
    """Queries or keys that depend on a number over all tokens or requests: the longest of them, a mean."""
    operands = [x for a in rep.attends for x in (a.q,)] + [w.value for w in rep.writes]
    for t in sorted(ancestors(operands), key=lambda t: getattr(t.node, "lineno", 0)):
        mixed = t.attrs.get("mixed")
        if t.op not in MIXING or t.op in _KEEP or t.stream or mixed is None:
            continue
        if not any(d.atoms & _RUNTIME for d in mixed):
            continue
        if any(a.op.startswith(_SIDES) for a in ancestors([t])):
            fact = f"The queries or keys depend on `{t.op}` over the tokens of all requests in {rep.run.phase}."
            todo = "Take the number for each request by itself: packed requests have other neighbours."
            yield Hazard("KV173", fact, todo, t.node, t.frame)


_SUMS = frozenset({"mean", "sum", "cumsum", "cumprod", "max", "amax", "min", "amin", "roll", "softmax", "norm", "var"})
_SUMS |= {"std", "logsumexp", "prod", "median", "flip"}
_BY_INDEX = frozenset({"getitem", "index_select", "gather", "embedding", "select", "narrow", "scatter", "scatter_add"})


def mixed_tokens(run: Run, attentions: list[Instance]) -> list[Diagnostic]:
    """Operations outside attention over the token axis of hidden states: packed tokens are of all requests."""
    out: dict[tuple[str, int], Diagnostic] = {}
    for t in _value_ancestors(run.result):
        mixed = t.attrs.get("mixed")
        if t.op not in _SUMS or not t.stream or mixed is None or t.frame is None:
            continue
        if not any(d.atoms & {"S", "T"} for d in mixed) or any(f.self_ in attentions for f in t.frame.chain()):
            continue
        fact = f"`{t.op}` goes over the tokens of the batch, outside attention."
        todo = "Keep the Legacy cache, or compute it for each request: packed tokens are those of all requests."
        span = t.frame.file.span(t.node) if t.node is not None else t.frame.file.span(t.stmt or t.frame.file.tree)
        out.setdefault((t.frame.file.shown, span.line), Diagnostic("KV175", Severity.BLOCKING, fact, todo, span))
    return list(out.values())


def _value_ancestors(result: Value) -> set[Tensor]:
    """What the result's numbers are computed from; an index only chooses, and is not followed."""
    todo: list[Value] = [result]
    seen: set[Tensor] = set()
    while todo:
        value = todo.pop()
        if isinstance(value, Tup):
            todo.extend(value.items)
        if not isinstance(value, Tensor) or value in seen:
            continue
        seen.add(value)
        todo.extend(value.parents[:1] if value.op in _BY_INDEX else value.parents)
    return seen


def kept_states(runs: list[Run]) -> list[Diagnostic]:
    """Hidden states that a module keeps from one step to the next outside a cache: rows are other requests then."""
    out: dict[tuple[str, int], Diagnostic] = {}
    for run in runs:
        for write in run.walk.attr_writes:
            kept = isinstance(write.value, Tensor) and write.value.stream and write.value.op != "cache"
            if kept and _read_before(write.target, write.name):
                _state(out, write.target, write.name, write.node, write.frame)
        for node, frame, obj, value in run.walk.item_writes:
            root = chain(obj, _PARTS)[-1] if isinstance(obj, Tensor) else None
            if root is None or not (isinstance(value, Tensor) and value.stream) or cache_root(root) is not None:
                continue
            if _made_in_init(root):
                owner = next((f.self_ for f in frame.chain() if isinstance(f.self_, Instance)), None)
                if owner is not None:
                    _state(out, owner, ast.unparse(node)[:40], node, frame)
    return list(out.values())


def _state(out: dict[tuple[str, int], Diagnostic], owner: Instance, name: str, node: ast.AST, frame: Frame) -> None:
    line = getattr(node, "lineno", 0)
    fact = f"{owner.cls.name} keeps hidden states in `{name}` from one step to the next; that is no K or V cache."
    todo = "Declare it as an entry of its own, or keep the Legacy cache: rows of a step are other requests when paged."
    span = frame.file.span(node)
    out.setdefault((frame.file.shown, line), Diagnostic("KV174", Severity.BLOCKING, fact, todo, span))


def _made_in_init(t: Tensor) -> bool:
    if t.op == "parameter":
        return True
    frames = t.frame.chain() if t.frame is not None else []
    return any(isinstance(f.func, ast.FunctionDef) and f.func.name == "__init__" for f in frames)


def _read_before(target: Instance, name: str) -> bool:
    """Does a method read `self.name` where it has not set it itself?"""
    for owner in target.cls.mro():
        for method in owner.node.body:
            if not isinstance(method, ast.FunctionDef) or method.name == "__init__" or not method.args.args:
                continue
            uses = list(_uses(method.body, method.args.args[0].arg, name, ()))
            stores = [(node.lineno, path) for node, path in uses if isinstance(node.ctx, ast.Store)]
            for node, path in uses:
                set_above = any(line < node.lineno and path[: len(at)] == at for line, at in stores)
                if isinstance(node.ctx, ast.Load) and not set_above:
                    return True
    return False


_Path = tuple[tuple[int, str], ...]


def _uses(body: list[ast.stmt], me: str, name: str, path: _Path) -> Iterator[tuple[ast.Attribute, _Path]]:
    """Each `self.name` with the branches around it."""
    for stmt in body:
        parts = [(p, getattr(stmt, p)) for p in ("body", "orelse", "finalbody") if getattr(stmt, p, None)]
        inner = {id(n) for _, part in parts for s in part for n in ast.walk(s)}
        for node in ast.walk(stmt):
            if id(node) in inner or not (isinstance(node, ast.Attribute) and node.attr == name):
                continue
            if isinstance(node.value, ast.Name) and node.value.id == me:
                yield node, path
        for branch, part in parts:
            yield from _uses(part, me, name, (*path, (id(stmt), branch)))
