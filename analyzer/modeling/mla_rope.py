"""May the fused norm + rope + cache operator replace the Legacy code's own norm and rotary?

The operator takes pairs interleaved in the rope part (x0 x1 | x2 x3 | ...), and gives halves (x0 x2 ... | x1 x3 ...).
That is one of several orders in use; with any other the dot product with the query is scrambled. So the order of
both key and query is read from the value graph, and everything that is not this order keeps its own code.
Source: operator sheet 12.1 and 13.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from itertools import pairwise

from kvskill.analyzer.modeling.mla_parts import Fingerprint, Parts, slice_of
from kvskill.analyzer.modeling.reps import RepRun
from kvskill.analyzer.modeling.shapes import LAYOUT
from kvskill.analyzer.modeling.trace import ancestors, chain, root_of, tensor_parents
from kvskill.analyzer.modeling.values import Const, External, Frame, Instance, Scalar, Tensor, Tup, Value
from kvskill.analyzer.modeling.walk import Call, Walk

__all__ = ["FusedWrite", "fused_write"]

_RANK, _ROPE = 512, 64  # the only sizes the operator has (operator sheet 12.1)


@dataclass(frozen=True)
class FusedWrite:
    """What the operator takes, as expressions of the seam's function.

    `raw` is the projection's output [.., rank + rope], valid right after the statement `source`. A factor on the
    normalised latent goes into `gamma`: the same product.
    """

    raw: str
    source: ast.stmt
    cos: str
    sin: str
    gamma: str
    epsilon: str
    inline: bool = False  # `raw` holds at the new code's own place


def fused_write(
    rep: RepRun, frame: Frame, func: ast.FunctionDef, anchor: ast.stmt, mark: Fingerprint, parts: Parts
) -> tuple[FusedWrite | None, str]:
    """The operator's inputs, or None and the reason."""
    walk = rep.walk
    if mark.call is not None:
        return _as_written(frame, anchor, mark.call)
    sizes = (walk.concrete_dim(parts.rank), walk.concrete_dim(parts.rope))
    if sizes != (_RANK, _ROPE):
        return None, f"the operator has latent {_RANK} and rope {_ROPE}, not {sizes[0]} and {sizes[1]}"
    me = func.args.args[0].arg if func.args.args else "self"
    factor = _factor(rep.inst, parts.latent, mark.normed)
    if factor is None:
        return None, "the latent is changed after its norm"
    norm = _rms(mark)
    if isinstance(norm, str):
        return None, norm
    gamma, epsilon = norm
    key, query = _rotary(parts.k_rope, mark.rope_in), _rotary(parts.q_rope, None)
    if key is None or query is None:
        return None, "its rotary does not turn interleaved pairs into halves, or is not understood"
    tables = []
    for mine in (key, query):
        tables.append(tuple(root_of(t) for t in mine))
    if tables[0] != tables[1]:
        return None, "query and key are rotated by different tables"
    env = frame.env_before.get(id(anchor), {})
    torch = next((n for n, v in walk.modules[frame.file.shown].items() if v == External("torch")), "torch")
    full = (root := root_of(parts.k_rope)) is not None and root.op == "add"  # x * cos: as wide as the rope part
    names = [_table(walk, env, t, torch, full) for t in tables[0]]
    if names[0] is None or names[1] is None:
        return None, "its cos and sin tables have no names beside the cache write, or not the form the operator takes"
    raw = _raw(frame, func, mark, anchor, torch)
    if raw is None:
        return None, f"the output of `{mark.down}` has no name of its own"
    weight = f"{me}.{mark.norm}.{gamma}" + (f" * {me}.{factor}" if factor else "")
    return FusedWrite(raw[0], raw[1], names[0], names[1], weight, f"{me}.{mark.norm}.{epsilon}"), ""


def _as_written(frame: Frame, anchor: ast.stmt, call: Call) -> tuple[FusedWrite | None, str]:
    """The inputs of the Legacy code's own fused write, where they can be read at the new code's place."""
    given = dict(zip(("kv", "gamma", "cos", "sin"), call.node.args, strict=False))
    given |= {k.arg: k.value for k in call.node.keywords if k.arg is not None}
    env = frame.env_before.get(id(anchor), {})
    text: dict[str, str] = {"epsilon": "1e-5"}  # the operator's own default
    for name in ("kv", "gamma", "cos", "sin", "epsilon"):
        node = given.get(name)
        if node is None:
            continue
        for part in ast.walk(node):
            if not isinstance(part, ast.Name):
                continue
            known = call.frame.values.get(id(part))
            if call.frame is not frame or part.id not in env or (known is not None and env[part.id] is not known):
                return None, f"`{part.id}` is not yet known where the new code goes"
        text[name] = " ".join(frame.file.segment(node).split())
    if not {"kv", "gamma", "cos", "sin"} <= text.keys():
        return None, "its arguments are not all written at the call"
    for name in ("c_kv_scale", "k_rope_scale", "c_kv_offset", "k_rope_offset", "v"):
        if name in call.kwargs and call.kwargs[name] != Const(None):
            return None, f"it quantises or splits (`{name}`)"
    return FusedWrite(text["kv"], anchor, text["cos"], text["sin"], text["gamma"], text["epsilon"], inline=True), ""


def _factor(inst: Instance, latent: Tensor, normed: Tensor) -> str | None:
    """ "" when the latent is the norm's output, an attribute that it is multiplied by, None for anything else."""
    root = root_of(latent)
    if root is root_of(normed):
        return ""
    if root is None or root.op != "mul" or [root_of(p) for p in tensor_parents(root)] != [root_of(normed)]:
        return None
    number = next((p for p in root.parents if not isinstance(p, Tensor)), None)
    return next((n for n, v in inst.attrs.items() if v is number), None) if number is not None else None


def _rms(mark: Fingerprint) -> tuple[str, str] | str:
    """(gamma attribute, epsilon attribute) of a norm that computes x / rms(x) * gamma, or the reason."""
    frame = mark.norm_frame
    if frame is None or not isinstance(frame.self_, Instance):
        return f"`{mark.norm}` is a library norm whose epsilon is not an attribute known here"
    inst = frame.self_
    own = [t for t in ancestors([mark.normed]) if t.frame is not None and frame in t.frame.chain()]
    ops = {t.op for t in own}
    gammas = [n for n, v in inst.attrs.items() if isinstance(v, Tensor) and v.op == "parameter"]
    if len(gammas) != 1 or any(t.op == "sub" for t in own):
        return f"`{mark.norm}` is no plain RMS norm"
    gamma = inst.attrs[gammas[0]]
    fused = [t for t in ancestors([mark.normed]) if t.op == "npu:npu_rms_norm" and t in own]
    if any(t.op in ("add", "sub") and gamma in tensor_parents(t) for t in own):
        return f"`{mark.norm}` does not multiply by its plain weight"
    if not fused and not ({"rsqrt", "mean"} <= ops and any(gamma in tensor_parents(t) for t in own if t.op == "mul")):
        return f"`{mark.norm}` is no plain RMS norm"
    eps: Value | None = None
    for t in own:
        if t.op == "add" and any(c.op == "rsqrt" and t in ancestors([c]) for c in own):
            eps = next((p for p in t.parents if not isinstance(p, Tensor)), eps)
        if t in fused:
            eps = next((p for p in t.parents[2:] if not isinstance(p, Tensor)), eps)
    for name, value in inst.attrs.items():
        if value is eps or (isinstance(value, (Const, Scalar)) and isinstance(eps, (Const, Scalar)) and value == eps):
            if not (isinstance(value, Const) and not isinstance(value.value, float)):
                return gammas[0], name
    return f"the epsilon of `{mark.norm}` is not an attribute"


def _rotary(out: Tensor, source: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """(cos, sin) of a rotation of interleaved pairs into halves; None for any other."""
    root = root_of(out)
    if root is None:
        return None
    if root.op == "npu:npu_interleave_rope":
        given = tensor_parents(root)
        return (given[1], given[2]) if len(given) == 3 else None
    if root.op in ("cat", "concat"):
        return _even_odd(root, source)
    if root.op != "add":
        return None
    left, right = (root_of(p) for p in tensor_parents(root)) if len(tensor_parents(root)) == 2 else (None, None)
    if left is None or right is None or left.op != "mul" or right.op != "mul":
        return None
    for straight, turned in ((left, right), (right, left)):
        a, b = _data(straight), _data(turned)
        if a is None or b is None:
            continue
        (x, cos), (y, sin) = a, b
        if _half_turn(root_of(y), x) and _regrouped(x, source):
            return cos, sin
    return None


def _even_odd(root: Tensor, source: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """(cos, sin) of cat(even * cos - odd * sin, odd * cos + even * sin); the tables have one angle per pair."""
    pair = tensor_parents(root)
    if len(pair) != 2 or pair[0].op != "sub" or pair[1].op != "add":
        return None
    found: list[tuple[int, Tensor]] = []
    data: set[Tensor | None] = set()
    for half in pair:
        for product in tensor_parents(half):
            split = _data(product) if product.op == "mul" else None
            which = _parity(split[0]) if split is not None else None
            if split is None or which is None:
                return None
            found.append((which[1], split[1]))
            data.add(which[0])
    if len(found) != 4 or len(data) != 1 or (source is not None and data != {root_of(source)}):
        return None
    (a, cos), (b, sin), *second = found
    same = [(which, root_of(table)) for which, table in second]
    if (a, b) != (0, 1) or sorted(same, key=lambda x: x[0]) != [(0, root_of(sin)), (1, root_of(cos))]:
        return None
    return cos, sin


def _parity(t: Tensor) -> tuple[Tensor | None, int] | None:
    """(root, 0) of `x[..., 0::2]`, (root, 1) of `x[..., 1::2]`."""
    parts = t.attrs.get("parts")
    if t.op != "getitem" or not parts or not isinstance(parts[-1], slice) or parts[-1].step != Const(2):
        return None
    start = parts[-1].start
    which = 0 if start is None else (start.value if isinstance(start, Const) else None)
    source = t.parents[0] if t.parents else None
    return (root_of(source), which) if which in (0, 1) and isinstance(source, Tensor) else None


def _data(product: Tensor) -> tuple[Tensor, Tensor] | None:
    """(hidden states, table) of a product of the two."""
    pair = tensor_parents(product)
    if len(pair) != 2 or pair[0].stream is pair[1].stream:
        return None
    return (pair[0], pair[1]) if pair[0].stream else (pair[1], pair[0])


def _half_turn(t: Tensor | None, x: Tensor) -> bool:
    """Is `t` cat(-x[second half], x[first half])?"""
    if t is None or t.op not in ("cat", "concat"):
        return False
    pair = tensor_parents(t)
    if len(pair) != 2 or pair[0].op not in ("neg", "usub", "-"):
        return False
    second, first = _first(pair[0]), pair[1]
    return _half(second, x) == 1 and _half(first, x) == 0


def _first(t: Tensor) -> Tensor | None:
    found = tensor_parents(t)
    return found[0] if found else None


def _half(t: Tensor | None, x: Tensor) -> int | None:
    """0 or 1 when `t` is the first or second half of x's last axis."""
    if t is None or not t.parents or root_of(t.parents[0]) is not root_of(x) or not t.shape or not x.shape:
        return None
    if t.op == "split":
        return int(t.attrs.get("part", -1))
    parts = t.attrs.get("parts")
    if t.op != "getitem" or not parts or not isinstance(parts[-1], slice) or parts[-1].step is not None:
        return None
    last = parts[-1]
    if last.start is None and last.stop is not None:
        return 0
    return 1 if last.start is not None and last.stop is None else None


def _regrouped(x: Tensor, source: Tensor | None) -> bool:
    """Is x its root with interleaved pairs regrouped into halves: [.., d/2, 2] turned to [.., 2, d/2]?"""
    steps = [t for t in chain(x) if t.shape]
    if source is not None and root_of(x) is not root_of(source):
        return False
    turns = 0
    for later, earlier in pairwise(steps):
        assert later.shape is not None and earlier.shape is not None
        if len(later.shape) >= 2 and len(earlier.shape) >= 2:
            a, b = earlier.shape[-2:], later.shape[-2:]
            if a[1].value == 2 and b[0].value == 2 and later.op in ("transpose", "permute", "swapaxes", "movedim"):
                if a[0] == b[1]:
                    turns += 1
    return turns == 1


def _both_halves(table: Tensor) -> bool:
    """Does the table come from cat(f, f) on its last axis?"""
    for t in ancestors([table]):
        if t.op in ("cat", "concat"):
            pair = tensor_parents(t)
            if len(pair) == 2 and pair[0] is pair[1]:
                return True
    return False


def _table(walk: Walk, env: dict[str, Value], table: Tensor | None, torch: str, full: bool) -> str | None:
    """An expression for the table in the operator's form: one half, repeated."""
    if table is None:
        return None
    for whole in (table, slice_of(table)):
        wanted = whole[0] if isinstance(whole, tuple) else whole
        if wanted is None or (isinstance(whole, tuple) and whole[1] != 0):
            continue
        root = root_of(wanted)
        for name, value in env.items():
            if not isinstance(value, Tensor) or not value.shape or root_of(value) is not root:
                continue
            width = walk.concrete_dim(value.shape[-1])
            if (width == _ROPE or (width is None and whole is table and full)) and _both_halves(value):
                return name
            if width == _ROPE // 2 and whole is table:
                return f"{torch}.cat(({name}, {name}), dim=-1)"
    return None


def _raw(
    frame: Frame, func: ast.FunctionDef, mark: Fingerprint, anchor: ast.stmt, torch: str
) -> tuple[str, ast.stmt] | None:
    """(expression, statement after which it holds) of the projection's output as a whole."""
    nodes = {id(t) for t in _family(frame, mark.down_out)}
    for stmt in func.body:
        if stmt.lineno >= anchor.lineno:
            break
        if isinstance(stmt, ast.Assign) and len(stmt.targets) == 1 and isinstance(stmt.targets[0], ast.Name):
            if id(frame.values.get(id(stmt.value))) in nodes:
                return stmt.targets[0].id, stmt
        made = frame.values.get(id(stmt.value)) if isinstance(stmt, ast.Assign) else None
        if isinstance(stmt, ast.Assign) and isinstance(made, Tup) and made.items == [mark.raw, mark.rope_in]:
            target = stmt.targets[0]
            if isinstance(target, ast.Tuple) and all(isinstance(e, ast.Name) for e in target.elts):
                both = ", ".join(e.id for e in target.elts if isinstance(e, ast.Name))
                return f"{torch}.cat(({both}), dim=-1)", stmt
    return None


def _family(frame: Frame, t: Tensor) -> list[Tensor]:
    """`t` and its mere rearrangements among the frame's values."""
    return [v for v in frame.values.values() if isinstance(v, Tensor) and root_of(v, LAYOUT) is t]
