"""The parts of latent attention in the value graph of one run: projections, norm, query and key parts, output."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from kvskill.analyzer.modeling.dims import Dim
from kvskill.analyzer.modeling.operators import argument
from kvskill.analyzer.modeling.reps import RepRun
from kvskill.analyzer.modeling.scores import Attend
from kvskill.analyzer.modeling.shapes import LAYOUT
from kvskill.analyzer.modeling.trace import ancestors, chain, method_frame, root_of, tensor_parents
from kvskill.analyzer.modeling.values import Const, ExtInstance, Frame, Instance, Tensor, Tup, Value
from kvskill.analyzer.modeling.walk import Call, Walk

__all__ = ["Fingerprint", "Parts", "fingerprint", "parts_of", "slice_of", "sum_of_products"]

_PRODUCTS = ("matmul", "einsum")
FUSED_WRITES = ("npu:npu_kv_rmsnorm_rope_cache", "npu:npu_kv_rmsnorm_rope_cache_v2")


@dataclass(frozen=True)
class Halves:
    """Attributes that hold the up projection in two halves: keys [N, nope, rank], values [N, rank, v]."""

    keys: str | None = None
    values: str | None = None
    v: Dim | None = None
    tensors: frozenset[Tensor] = frozenset()


NO_HALVES = Halves()


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """Attributes of the attention object, and the tensors of this run.

    down_out [.., rank + rope] splits into `raw` [.., rank] and `rope_in` [.., rope]; `normed` is norm(raw).
    """

    down: str
    norm: str
    up: str | None  # None: only halves of its weight, kept in attributes of their own, are used
    up_module: ExtInstance | None
    down_out: Tensor
    raw: Tensor
    rope_in: Tensor
    normed: Tensor
    norm_frame: Frame | None
    call: Call | None = None  # the fused operator, where the Legacy code uses it itself
    halves: Halves = NO_HALVES


@dataclass(frozen=True, eq=False)
class Parts:
    """What enters attention in one run, and what leaves it ([.., heads, v] before the output projection)."""

    q_nope: Tensor
    q_rope: Tensor
    latent: Tensor
    raw: Tensor
    k_rope: Tensor
    out: Tensor
    heads: Dim
    rank: Dim
    nope: Dim
    rope: Dim
    v: Dim


def fingerprint(rep: RepRun) -> Fingerprint | None:
    """The latent path of an attention object, or None."""
    inst, walk = rep.inst, rep.walk
    for name, taken, given, frame in _norms(walk, inst):
        raw = root_of(taken)
        cut = slice_of(raw)
        if raw is None or cut is None:
            continue
        down_out = root_of(cut[0])
        down = _attr(inst, down_out.attrs.get("module")) if down_out is not None and down_out.op == "linear" else None
        if down is None or down_out is None or not (down_out.parents and _stream(down_out.parents[0])):
            continue
        rope_in = _next_part(walk, raw, cut)
        halves = _halves(rep, raw)
        up = _up(rep, given, raw) or (None, None)
        if rope_in is None or (up[0] is None and halves is NO_HALVES):
            continue
        return Fingerprint(down, name, up[0], up[1], down_out, raw, rope_in, given, frame, None, halves)
    return _fused_fingerprint(rep)


def _fused_fingerprint(rep: RepRun) -> Fingerprint | None:
    """The latent path where norm, rotary and write are the fused operator already."""
    inst = rep.inst
    calls = [c for c in rep.walk.calls if c.name in FUSED_WRITES and method_frame(c.frame, inst) is not None]
    if len(calls) != 1:
        return None
    call, made = calls[0], calls[0].result
    if not isinstance(made, Tup):
        return None
    kv, gamma = (argument(call.name, call.args, call.kwargs, n) for n in ("kv", "gamma"))
    rope, latent = made.items[-2:]
    down_out = root_of(kv) if isinstance(kv, Tensor) else None
    if down_out is None or down_out.op != "linear" or not isinstance(rope, Tensor) or not isinstance(latent, Tensor):
        return None
    down = _attr(inst, down_out.attrs.get("module"))
    norm = next((n for n, v in inst.attrs.items() if isinstance(v, Instance) and gamma in v.attrs.values()), None)
    halves = _halves(rep, latent)
    up = _up(rep, latent, latent) or (None, None)
    if down is None or norm is None or (up[0] is None and halves is NO_HALVES):
        return None
    return Fingerprint(down, norm, up[0], up[1], down_out, latent, rope, latent, None, call, halves)


def _halves(rep: RepRun, latent: Tensor) -> Halves:
    """The halves of the up projection that this run multiplies by, where they are attributes of the object.

    Prefill turns them on the latent, decode the key half on the query and the value half on the output. Which half
    is which is read from what the product becomes; its shape must agree.
    """
    inst, walk = rep.inst, rep.walk
    rank = latent.shape[-1] if latent.shape else None
    if len(rep.attends) != 1 or rank is None:
        return NO_HALVES
    attend = rep.attends[0]
    keys = _weight(inst, attend.k) or _weight(inst, attend.q)
    values = _weight(inst, attend.v)
    if values is None:
        after = next((t for t in walk.tensors if t.op in _PRODUCTS and attend.out in _arguments(t)), None)
        values = _weight(inst, after) if after is not None else None
    if keys is None or values is None or keys[0] == values[0]:
        return NO_HALVES
    k, v = keys[1].shape, values[1].shape
    if not (k and v and len(k) == len(v) == 3):
        return NO_HALVES
    size, (n, nope, k_rank), (m, v_rank, _) = walk.concrete_dim, k, v
    if not (size(k_rank) == size(v_rank) == size(rank) != size(nope) and size(n) == size(m) is not None):
        return NO_HALVES
    return Halves(keys[0], values[0], v[2], frozenset({keys[1], values[1]}))


def _arguments(t: Tensor) -> set[Tensor]:
    return {x for p in tensor_parents(t) for x in chain(p)}


def _weight(inst: Instance, product: Value | None) -> tuple[str, Tensor] | None:
    """(attribute, tensor) of the factor of a product that is an attribute of the object."""
    root = root_of(product) if isinstance(product, Tensor) else None
    if root is None or root.op not in _PRODUCTS:
        return None
    for parent in tensor_parents(root):
        held = set(chain(parent))
        for name, value in inst.attrs.items():
            if isinstance(value, Tensor) and not value.stream and value in held and value.op != "cache":
                return name, value
    return None


def _stream(value: Value) -> bool:
    return isinstance(value, Tensor) and value.stream


def _attr(inst: Instance, module: object) -> str | None:
    return next((n for n, v in inst.attrs.items() if v is module), None) if module is not None else None


def _norms(walk: Walk, inst: Instance) -> list[tuple[str, Tensor, Tensor, Frame | None]]:
    """(attribute, input, output, frame) of calls of submodules that keep the shape of one tensor."""
    out: list[tuple[str, Tensor, Tensor, Frame | None]] = []
    for frame in walk.frames:
        child = frame.self_
        if not isinstance(child, Instance) or child is inst or not frame.returns:
            continue
        if frame.parent is None or method_frame(frame.parent, inst) is None or frame.parent.self_ is not inst:
            continue
        name = _attr(inst, child)
        func = frame.func
        if name is None or not isinstance(func, ast.FunctionDef) or len(func.args.args) < 2:
            continue
        taken = frame.env_before.get(id(func.body[0]), {}).get(func.args.args[1].arg)
        given = frame.returns[0][1]
        if isinstance(taken, Tensor) and isinstance(given, Tensor) and given.shape is not None:
            out.append((name, taken, given, frame))
    for t in walk.tensors:
        module = t.attrs.get("module")
        if t.op == "pointwise" and isinstance(module, ExtInstance) and module.name.endswith("RMSNorm"):
            name = _attr(inst, module)
            source = t.parents[0] if t.parents else None
            if name is not None and isinstance(source, Tensor) and method_frame(t.frame, inst) is not None:
                out.append((name, source, t, None))
    return out


def slice_of(t: Tensor | None) -> tuple[Tensor, int, object] | None:
    """(what it is cut from, index of the cut, the start) of a part of the last axis: split or a slice."""
    if t is None or not t.parents or not isinstance(t.parents[0], Tensor):
        return None
    source = t.parents[0]
    if t.op == "split":
        axis = t.attrs.get("axis")
        if source.shape is not None and axis in (len(source.shape) - 1, -1):
            return source, int(t.attrs.get("part", 0)), None
        return None
    parts = t.attrs.get("parts")
    if t.op != "getitem" or not parts:
        return None
    last = parts[-1]
    others = parts[:-1]
    if not isinstance(last, slice) or last.step is not None:
        return None
    if not all((isinstance(p, slice) and p == slice(None)) or p == Const(...) for p in others):
        return None
    if last.start is None and last.stop is not None:
        return source, 0, None
    if last.start is not None and last.stop is None:
        return source, 1, last.start
    return None


def _next_part(walk: Walk, raw: Tensor, cut: tuple[Tensor, int, object]) -> Tensor | None:
    """The part of the same tensor that follows `raw`."""
    whole = root_of(cut[0])
    for t in walk.tensors:
        other = slice_of(t)
        if t is not raw and other is not None and root_of(other[0]) is whole and other[1] == cut[1] + 1:
            return t
    return None


def _up(rep: RepRun, normed: Tensor, raw: Tensor) -> tuple[str, ExtInstance] | None:
    """The projection that the normalised latent goes through, as a layer or by its weight."""
    inst = rep.inst
    rank = raw.shape[-1] if raw.shape else None
    if rank is None:
        return None
    options: list[tuple[str, ExtInstance]] = []
    for name, module in inst.attrs.items():
        if not isinstance(module, ExtInstance):
            continue
        width = module.kwargs.get("in_features", module.kwargs.get("input_size"))
        width = width if width is not None else (module.args[0] if module.args else None)
        dim = rep.walk.as_dim(width) if width is not None else None
        if dim is not None and rep.walk.equal_dims(dim, rank):
            options.append((name, module))
    below = [t for t in rep.walk.tensors if method_frame(t.frame, inst) is not None]
    outs = {a.out for a in rep.attends}  # what follows the attention is the output projection, not the latent's
    for name, module in options:
        for t in below:
            uses = t.op == "linear" and t.attrs.get("module") is module and not outs & ancestors([t])
            weight = t.op == "parameter" and t.attrs.get("owner") is module and t.attrs.get("name") == "weight"
            if weight or (uses and _latent_itself(t.parents[0], normed)):
                return name, module
    return None


def _latent_itself(value: Value, normed: Tensor) -> bool:
    """Is it the normalised latent, or what was cached, and not something that attention made of it?"""
    todo = [value]
    for _ in range(40):
        if not todo:
            return False
        t = todo.pop()
        if not isinstance(t, Tensor):
            continue
        if t is normed or t.op == "cache":
            return True
        number = t.op in ("mul", "div") and len(tensor_parents(t)) == 1
        if t.op in LAYOUT | {"getitem", "split", "join", "written", "index_select", "cat", "concat"} or number:
            todo.extend(tensor_parents(t))
    return False


def parts_of(rep: RepRun, mark: Fingerprint) -> Parts | str:
    """The parts of one run, or what is missing in words."""
    walk = rep.walk
    rank, rope = _last(mark.raw), _last(mark.rope_in)
    if rank is None or rope is None:
        return "the sizes of its latent and rope part are not known"
    if mark.call is not None:
        return _assemble(rep, mark, mark.normed, mark.rope_in, rank, rope)
    written = [p for w in rep.writes for p in _pieces(w.value)]
    k_rope = [t for t in written if mark.rope_in in ancestors([t]) and mark.raw not in ancestors([t])]
    latent = [
        t
        for t in written
        if mark.normed in ancestors([t]) and _same(walk, t, rank) and not _went_up(t, mark) and t not in k_rope
    ]
    if len({root_of(t) for t in k_rope}) != 1 or not _same(walk, k_rope[0], rope):
        return "the shared rope part is not written to the cache"
    if not latent:
        entering = [t.parents[0] for t in walk.tensors if t.attrs.get("module") is mark.up_module]
        latent = [t for t in entering if isinstance(t, Tensor) and mark.normed in ancestors([t])]
    if len({root_of(t) for t in latent}) != 1:
        return "the latent neither goes to the cache nor through one up projection"
    return _assemble(rep, mark, latent[0], k_rope[0], rank, rope)


def _assemble(rep: RepRun, mark: Fingerprint, latent: Tensor, k_rope: Tensor, rank: Dim, rope: Dim) -> Parts | str:
    walk, attend = rep.walk, rep.attends[0]
    query = _query(walk, attend, mark, rope)
    if isinstance(query, str):
        return query
    q_nope, q_rope = query
    out = _output(walk, attend, mark)
    order = _up_order(rep, mark)
    if order is not None:
        return order
    shape = q_nope.shape
    heads, nope = _heads(q_nope, rep), _last(q_nope)
    v = _value_dim(walk, attend, mark, out, nope)
    if shape is None or heads is None or nope is None or v is None:
        return "the number of heads or the value size is not known"
    return Parts(q_nope, q_rope, latent, mark.raw, k_rope, out, heads, rank, nope, rope, v)


def _last(t: Tensor | None) -> Dim | None:
    return t.shape[-1] if t is not None and t.shape else None


def _pieces(value: Tensor) -> list[Tensor]:
    """The tensors that a written value is put together from."""
    root = root_of(value)
    if root is None:
        return []
    return tensor_parents(root) if root.op in ("cat", "concat") else [value]


def _went_up(t: Tensor, mark: Fingerprint) -> bool:
    found = ancestors([t])
    if mark.halves.tensors & found:
        return True
    up = mark.up_module
    return up is not None and any(a.attrs.get("module") is up or a.attrs.get("owner") is up for a in found)


def _same(walk: Walk, t: Tensor, size: Dim) -> bool:
    last = _last(t)
    return last is not None and walk.equal_dims(last, size)


def _query(walk: Walk, attend: Attend, mark: Fingerprint, rope: Dim) -> tuple[Tensor, Tensor] | str:
    """The query's two parts as they enter the scores: q_nope before absorption, q_rope after rotary."""
    root = root_of(attend.q)
    joined = root is not None and root.op in ("cat", "concat")
    pair = tensor_parents(root) if root is not None and joined else _absorbed_query(attend, root)
    if len(pair) != 2:
        return "the query is not put together from a plain and a rope part"
    if not _same(walk, pair[1], rope):
        return "the query's rope part does not have the size of the key's"
    first = root_of(pair[0])
    if first is not None and first.op in _PRODUCTS:  # absorbed already: what goes into the product with `up`
        data = [p for p in tensor_parents(first) if p.stream]
        if not _went_up(first, mark) or len(data) != 1:
            return "the query's plain part is a product that is not understood"
        return data[0], pair[1]
    return pair[0], pair[1]


def _absorbed_query(attend: Attend, root: Tensor | None) -> list[Tensor]:
    """(plain, rope) of a score made of two products, or of a fused call with query_rope."""
    if attend.call is not None:
        rope = attend.call.kwargs.get("query_rope")
        return [root, rope] if root is not None and isinstance(rope, Tensor) else []
    total = sum_of_products(attend)
    if total is None:
        return []
    found = [operands[0] for p in total if (operands := tensor_parents(p))]
    return sorted(found, key=lambda t: 0 if (r := root_of(t)) is not None and r.op in _PRODUCTS else 1)


def sum_of_products(attend: Attend) -> list[Tensor] | None:
    """The two products whose sum are the scores."""
    for t in ancestors([attend.out]):
        if t.op == "add" and len(tensor_parents(t)) == 2:
            pair = [root_of(p) for p in tensor_parents(t)]
            mine = any(p is not None and attend.q in tensor_parents(p) for p in pair)
            if mine and all(p is not None and p.op in _PRODUCTS and p.stream for p in pair):
                return [p for p in pair if p is not None]
    return None


def _output(walk: Walk, attend: Attend, mark: Fingerprint) -> Tensor:
    """The attention output per head; where V is the latent, the product with the up projection that follows."""
    if _went_up(attend.v, mark):
        return attend.out
    family = {attend.out}
    for t in walk.tensors:
        if t.op in LAYOUT | {"getitem"} and any(p in family for p in tensor_parents(t)):
            family.add(t)
        if t.op in _PRODUCTS and any(p in family for p in tensor_parents(t)) and _went_up(t, mark):
            return t
    return attend.out


def _caches(tensors: set[Tensor], rep: RepRun) -> set[object]:
    return {t.attrs.get("name") for t in tensors if t.op == "cache" and t.attrs.get("owner") is rep.inst}


def _up_order(rep: RepRun, mark: Fingerprint) -> str | None:
    """The up projection must give [nope | v] per head, in this order. None when it does."""
    walk, attend = rep.walk, rep.attends[0]
    if mark.halves.keys is not None:
        return None  # each half is known by what it is multiplied with
    firsts = seconds = wrong = 0
    to_keys, to_values = ancestors([attend.q, attend.k]), ancestors([attend.v])
    to_out = ancestors([_output(walk, attend, mark)])
    for write in rep.writes:  # what is cached decompressed is read back by name
        cache = write.cache.attrs.get("name")
        if cache in _caches(to_keys, rep) and cache not in _caches(to_values, rep):
            to_keys |= ancestors([write.value])
        elif cache in _caches(to_values, rep) and cache not in _caches(to_keys, rep):
            to_values |= ancestors([write.value])
    for t in walk.tensors:
        cut = slice_of(t) or _row_slice(t)
        source = root_of(cut[0]) if cut is not None else None
        if cut is None or source is None:
            continue
        if source.attrs.get("module") is not mark.up_module and source.attrs.get("owner") is not mark.up_module:
            continue
        value = t in to_values or (t in to_out and t not in to_keys)
        key = t in to_keys
        firsts += cut[1] == 0 and key
        seconds += cut[1] == 1 and value
        wrong += (cut[1] == 0 and value) or (cut[1] == 1 and key)
    if wrong or (rep.run.phase == "prefill" and not (firsts and seconds)):
        return "the parts that the up projection gives are not [nope | v] per head, or could not be told apart"
    return None


def _row_slice(t: Tensor) -> tuple[Tensor, int, object] | None:
    """A part of the middle axis of a weight seen as [heads, nope + v, rank], by split or slice."""
    source = t.parents[0] if t.parents else None
    if not isinstance(source, Tensor):
        return None
    if t.op == "split" and source.rank == 3 and t.attrs.get("axis") in (1, -2):
        return source, int(t.attrs.get("part", 0)), None
    parts = t.attrs.get("parts")
    if t.op != "getitem" or not parts or len(parts) < 2 or source.rank not in (3, None):
        return None
    middle = parts[1]
    if not isinstance(middle, slice) or middle.step is not None or parts[0] != slice(None):
        return None
    if middle.start is None and middle.stop is not None:
        return source, 0, None
    return (source, 1, middle.start) if middle.start is not None and middle.stop is None else None


def _heads(q: Tensor, rep: RepRun) -> Dim | None:
    """The head count: the axis beside the last that is neither batch nor tokens."""
    todo = [q]
    for _ in range(12):
        if not todo:
            return None
        t = todo.pop(0)
        if t.shape is not None and len(t.shape) in (3, 4):
            rest = [d for d in t.shape[:-1] if not d.atoms & {"B", "S", "T", "n", "q"} and not d.wild]
            rest = [d for d in rest if d.value != 1] or rest
            if len(rest) == 1:
                return rest[0]
        todo.extend(tensor_parents(t)[:1])
    return None


def _value_dim(walk: Walk, attend: Attend, mark: Fingerprint, out: Tensor, nope: Dim | None) -> Dim | None:
    """The value size: the second part of the up projection."""
    if mark.halves.values is not None:
        return mark.halves.v
    for t in walk.tensors:
        cut = slice_of(t)
        source = root_of(cut[0]) if cut is not None else None
        if cut is not None and cut[1] == 1 and source is not None and t.shape:
            if source.attrs.get("module") is mark.up_module:
                return t.shape[-1]
        rows = _row_slice(t)
        weight = root_of(rows[0]) if rows is not None else None
        if rows is not None and rows[1] == 1 and weight is not None and t.shape and len(t.shape) == 3:
            if weight.attrs.get("owner") is mark.up_module:
                return t.shape[1]
    return out.shape[-1] if out.shape and not out.shape[-1].wild else None
