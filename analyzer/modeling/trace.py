"""Questions about the value graph: where a tensor comes from, which statement made it, what its axes mean."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvskill.analyzer.modeling.dims import Dim
from kvskill.analyzer.modeling.shapes import LAYOUT
from kvskill.analyzer.modeling.values import Frame, Instance, Tensor, Tup, Unknown, Value
from kvskill.analyzer.modeling.walk import Walk

__all__ = [
    "Layout",
    "ancestors",
    "between",
    "chain",
    "layout_of",
    "root_of",
    "stmt_in",
    "tensor_parents",
    "through",
]

# layout operations and what else leaves K and V the same up to repetition and length
PASSING = LAYOUT | {"repeat", "repeat_interleave", "getitem", "join", "written", "select", "unbind"}
PASSING |= {"filled", "nan_to_num", "narrow"}


def tensor_parents(value: Value) -> list[Tensor]:
    """Direct tensor parents, looking through tuples and unknowns."""
    out: list[Tensor] = []
    parents: Iterable[Value] = value.parents if isinstance(value, Tensor) else ()
    for parent in parents:
        if isinstance(parent, Tensor):
            out.append(parent)
        elif isinstance(parent, Tup):
            out.extend(v for v in parent.items if isinstance(v, Tensor))
        elif isinstance(parent, Unknown):
            out.extend(v for v in parent.sources if isinstance(v, Tensor))
    return out


def ancestors(values: Iterable[Value]) -> set[Tensor]:
    """All tensors that the values are computed from, themselves included."""
    todo = [v for v in values if isinstance(v, Tensor)]
    seen: set[Tensor] = set()
    while todo:
        t = todo.pop()
        if t in seen:
            continue
        seen.add(t)
        todo.extend(tensor_parents(t))
    return seen


def between(walk: Walk, starts: set[Tensor], ends: Iterable[Tensor]) -> set[Tensor]:
    """Tensors computed from a start (not a start itself) that an end is computed from (ends included)."""
    below: set[Tensor] = set()
    for t in walk.tensors:  # creation order is topological
        if t not in starts and any(p in starts or p in below for p in tensor_parents(t)):
            below.add(t)
    return below & ancestors(ends)


def chain(value: Value, ops: frozenset[str] = LAYOUT) -> list[Tensor]:
    """`value` and what it is a mere rearrangement of, nearest first; the last entry is the root."""
    out: list[Tensor] = []
    current = value if isinstance(value, Tensor) else None
    while current is not None and current not in out:
        out.append(current)
        if current.op not in ops or not current.parents or not isinstance(current.parents[0], Tensor):
            break
        current = current.parents[0]
    return out


def root_of(value: Value, ops: frozenset[str] = LAYOUT) -> Tensor | None:
    """The last tensor of `chain`."""
    found = chain(value, ops)
    return found[-1] if found else None


def through(value: Value, stop: Callable[[Tensor], bool]) -> set[Tensor]:
    """The tensors at which the search through passing operations (joins fork) ends; `stop` ends it early."""
    out: set[Tensor] = set()
    seen: set[Tensor] = set()
    todo = [value] if isinstance(value, Tensor) else []
    while todo:
        t = todo.pop()
        if t in seen:
            continue
        seen.add(t)
        if stop(t) or (t.op not in PASSING and t.op not in ("where", "masked_fill")):
            out.add(t)
        elif t.op == "join":
            todo.extend(tensor_parents(t))
        elif t.op in ("where", "masked_fill"):  # clearing unwritten rows
            todo.extend(p for p in tensor_parents(t) if p.stream or any(a.op == "cache" for a in ancestors([p])))
        elif t.parents and isinstance(t.parents[0], Tensor):
            todo.append(t.parents[0])
        else:
            out.add(t)
    return out


def stmt_in(frame: Frame, t_frame: Frame | None, stmt: ast.stmt | None) -> ast.stmt | None:
    """The statement of `frame` during which something happened in `t_frame`, or None if it happened elsewhere."""
    current = t_frame
    while current is not None:
        if current is frame:
            return stmt
        stmt = current.call_stmt
        current = current.parent
    return None


@dataclass(frozen=True)
class Layout:
    """How a tensor holds tokens and heads. `kind` is one of BSND, BNSD, BSH, TND, TH (T = B*S flattened)."""

    kind: str
    heads: Dim | None
    dim: Dim | None


def layout_of(walk: Walk, t: Tensor, seq: Dim, batch: Dim) -> Layout | None:
    """Read the axes of a prefill tensor: `batch` and `seq` mark themselves, what is left are heads and size."""
    shape = t.shape
    if shape is None:
        return None
    flat = batch * seq

    def is_(d: Dim, want: Dim) -> bool:
        return not d.wild and d == want

    if len(shape) == 4 and is_(shape[0], batch):
        if is_(shape[1], seq):
            return Layout("BSND", shape[2], shape[3])
        if is_(shape[2], seq):
            return Layout("BNSD", shape[1], shape[3])
    if len(shape) == 4:
        if shape[0].value == 1 and is_(shape[1], flat):  # the tokens of all rows in one
            return Layout("BSND", shape[2], shape[3])
        if shape[0].value == 1 and is_(shape[2], flat):
            return Layout("BNSD", shape[1], shape[3])
    if len(shape) == 3:
        if (is_(shape[0], batch) and is_(shape[1], seq)) or (shape[0].value == 1 and is_(shape[1], flat)):
            return Layout("BSH", None, None)
        if is_(shape[0], flat):
            return Layout("TND", shape[1], shape[2])
        if is_(shape[1], flat):
            return Layout("NTD", shape[0], shape[2])
    if len(shape) == 2 and is_(shape[0], flat):
        return Layout("TH", None, None)
    return None


def method_frame(frame: Frame | None, inst: Instance) -> Frame | None:
    """The nearest frame at or above `frame` that runs a method of `inst`."""
    while frame is not None:
        if frame.self_ is inst:
            return frame
        frame = frame.parent
    return None
