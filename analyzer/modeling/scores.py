"""What the Legacy code does between Q.K^T and softmax: scale, mask, window, sinks, or something FA cannot express."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from kvskill.analyzer.modeling.operators import ATTEND_OPS, argument
from kvskill.analyzer.modeling.shapes import LAYOUT
from kvskill.analyzer.modeling.trace import ancestors, root_of, tensor_parents
from kvskill.analyzer.modeling.values import Const, Dict_, Ref, Scalar, Tensor, Unknown, Value
from kvskill.analyzer.modeling.walk import Call, Walk

__all__ = ["Attend", "Bad", "causal_doubt", "find_attends", "needs_given_mask"]

_CAST = LAYOUT | {"nan_to_num"}
_MASK_OPS = frozenset(
    [
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "logical_not",
        "logical_and",
        "logical_or",
        "and",
        "or",
        "xor",
        "invert",
        "bitwise_not",
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
        "logical_xor",
        "triu",
        "tril",
        "triu_",
        "tril_",
        "masked_fill",
        "masked_fill_",
        "where",
        "zeros",
        "ones",
        "full",
        "arange",
        "zeros_like",
        "ones_like",
        "full_like",
        "empty",
        "cat",
        "concat",
        "stack",
        "expand",
        "join",
        "constant",
        "placeholder",
        "add",
        "sub",
        "getitem",
        "select",
        "unsqueeze",
        "squeeze",
        "repeat",
        "repeat_interleave",
        "cumsum",
        "index_select",
        "gather",
        "bucketize",
        "searchsorted",
        "new_zeros",
        "new_ones",
        "new_full",
        "neg",
        "clamp",
        "any",
        "all",
        "max",
        "min",
        "amax",
        "rsub",
        "split",
    ]
)


@dataclass(frozen=True, eq=False)
class Bad:
    """An operation that the fused operator has no argument for."""

    code: str
    what: str
    node: ast.AST | None
    where: Tensor | None


@dataclass(eq=False)
class Attend:
    """One attention computation of one run. Nodes are values of the graph."""

    kind: str  # fa1, fa2, sdpa, eager
    out: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    call: Call | None = None
    scale: list[tuple[str, Value, ast.AST | None]] = field(default_factory=list)  # ("mul"|"div", value, node)
    default_scale: bool = False
    masks: list[Tensor] = field(default_factory=list)
    causal: Value | None = None
    windows: list[Value] = field(default_factory=list)
    sinks: Value | None = None
    heads: Value | None = None
    kv_heads: Value | None = None
    bad: list[Bad] = field(default_factory=list)
    scores: Tensor | None = None  # the product of queries and keys, where the code writes it out
    logits: Tensor | None = None  # what the softmax is taken of
    sink_column: tuple[Tensor, bool] | None = None  # what is joined to the scores, and whether it comes last


def find_attends(walk: Walk) -> list[Attend]:
    """Fused calls, SDPA calls and eager softmax(Q.K^T).V of a run, in order."""
    out: list[Attend] = []
    for call in walk.calls:
        if call.name in ATTEND_OPS:
            attend = _from_call(walk, call)
            if attend is not None:
                out.append(attend)
    for t in walk.tensors:
        if t.op == "matmul" or t.op == "einsum":
            attend = _eager(walk, t)
            if attend is not None:
                out.append(attend)
    return out


def _from_call(walk: Walk, call: Call) -> Attend | None:
    q, k, v = (argument(call.name, call.args, call.kwargs, n) for n in ("query", "key", "value"))
    k, v = (_first(x) for x in (k, v))
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        return None
    result = call.result
    tensor = result if isinstance(result, Tensor) else None
    if tensor is None:
        items = getattr(result, "items", None)
        tensor = items[0] if items and isinstance(items[0], Tensor) else None
    if tensor is None:
        return None
    if call.name.startswith("npu:"):
        return _fused(walk, call, tensor, q, k, v)
    out = Attend("sdpa", tensor, q, k, v, call)
    scale = call.kwargs.get("scale", call.args[6] if len(call.args) > 6 else None)
    if scale is None or scale == Const(None):
        out.default_scale = True
    else:
        out.scale.append(("mul", scale, _arg_node(call, "scale")))
    mask = call.kwargs.get("attn_mask", call.args[3] if len(call.args) > 3 else None)
    out.causal = call.kwargs.get("is_causal", call.args[5] if len(call.args) > 5 else Const(False))
    if isinstance(mask, Tensor):
        _add_mask(walk, out, mask)
    elif isinstance(mask, (Unknown, Dict_)):
        out.bad.append(Bad("KV142", "a mask whose origin cannot be followed", call.node, tensor))
    return out


def _first(value: Value | None) -> Value | None:
    items = getattr(value, "items", None)
    return items[0] if isinstance(items, list) and items else value


def _fused(walk: Walk, call: Call, out_t: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Attend:
    version2 = call.name.endswith("_v2")
    out = Attend("fa2" if version2 else "fa1", out_t, q, k, v, call)
    name = "softmax_scale" if version2 else "scale"
    alt = "scale_value" if "scale_value" in call.kwargs else name
    if alt in call.kwargs:
        out.scale.append(("mul", call.kwargs[alt], _arg_node(call, alt)))
    out.heads = call.kwargs.get("num_query_heads" if version2 else "num_heads")
    out.kv_heads = call.kwargs.get("num_key_value_heads") or out.heads
    mode = call.kwargs.get("sparse_mode", Const(0))
    pre = call.kwargs.get("pre_tokens")
    if mode == Const(4) and pre is not None:
        out.windows.append(pre)
    later = call.kwargs.get("next_tokens")
    if mode == Const(4) and later != Const(0):
        said = "no `next_tokens`, which shows later keys" if later is None else "`next_tokens` that are not 0"
        out.bad.append(Bad("KV143", f"a band (sparse_mode 4) with {said}", call.node, out_t))
    out.causal = Const(True)
    sinks = call.kwargs.get("learnable_sink")
    if sinks is not None and sinks != Const(None):
        out.sinks = sinks
    for arg in ("pse_shift", "query_rope", "key_rope", "antiquant_scale", "dequant_scale_key", "key_antiquant_scale"):
        value = call.kwargs.get(arg)
        if value is not None and value != Const(None):
            out.bad.append(Bad("KV143", f"the argument `{arg}` of the fused operator", call.node, out_t))
    mask = call.kwargs.get("atten_mask")
    if isinstance(mask, Tensor) and mask.op != "input:attention_mask":
        _add_mask(walk, out, mask)
    return out


def _arg_node(call: Call, name: str) -> ast.AST | None:
    return next((k.value for k in call.node.keywords if k.arg == name), None)


def _eager(walk: Walk, pv: Tensor) -> Attend | None:
    """Recognise `P @ V` where P comes from a softmax over `Q @ K^T`."""
    parents = tensor_parents(pv)
    if len(parents) < 2:
        return None
    probs, value = parents[-2], parents[-1]
    soft, passed = _back_to_softmax(walk, probs)
    if soft is None:
        return None
    scores = _first_tensor(soft)
    out = Attend("eager", pv, pv, pv, value)
    out.bad.extend(b for t in passed if (b := _changed_probabilities(walk, t)) is not None)
    qk = _score_path(walk, scores, out)
    if qk is None:
        return None
    pair = tensor_parents(qk)
    if len(pair) < 2:
        return None
    out.q, out.k, out.scores, out.logits = pair[-2], pair[-1], qk, scores
    out.causal = Const(bool(out.masks))
    _check_sinks(out, passed)
    return out


def _changed_probabilities(walk: Walk, t: Tensor) -> Bad | None:
    """Something after the softmax that is neither a cast nor a cut."""
    if t.op == "dropout":
        given, named = t.attrs.get("given", ((), {}))
        rate = named.get("p", given[1] if len(given) > 1 else Const(0.5))
        on = named.get("training", given[2] if len(given) > 2 else Const(True))
        known = walk.concrete(rate.path) if isinstance(rate, Ref) else rate.value if isinstance(rate, Const) else None
        if on in (Const(True), None) and known != 0:
            return Bad("KV141", "a dropout that is on while inferring", t.node, t)
    elif t.op in ("where", "masked_fill") or t.op.rstrip("_") == "masked_fill":
        return Bad("KV141", f"`{t.op}` on the attention probabilities", t.node, t)
    return None


def _check_sinks(out: Attend, passed: list[Tensor]) -> None:
    """A sink is one more score, a parameter as it is, and its probability is the one that is cut off."""
    if out.sinks is None or out.sink_column is None:
        return
    column, main_first = out.sink_column
    root = root_of(column)
    if root is None or root.op != "parameter":
        out.bad.append(Bad("KV141", "a sink that is not a parameter as it is", column.node, column))
        return
    for t in passed:
        part = t.attrs["parts"][-1] if t.attrs.get("parts") else None
        if isinstance(part, slice) and (part.start not in (None, Const(0))) == main_first:
            out.bad.append(Bad("KV141", "a sink whose probability stays while a key's is cut off", t.node, t))


# the framework's own mask is a triangle
_ORDER = frozenset({"triu", "tril", "triu_", "tril_", "lt", "le", "gt", "ge", "input:attention_mask"})


def causal_doubt(walk: Walk, attend: Attend) -> str | None:
    """How a prefill attends otherwise than causally, in words; None where it does not."""
    for t in _mask_parts(walk, attend.masks):
        shift = _diagonal(walk, t)
        lower = t.op.startswith("tril")
        if shift is not None and (shift >= 1 or shift == -1 if lower else shift == 0 or shift >= 2):
            return f"with a mask cut at diagonal {shift} ({t.op}): it shows a later token, or hides the token itself"
        if _hides_itself(t):
            return f"with a mask that compares positions by `{t.op}`: it tells the token itself from earlier ones"
    return None if _is_causal(walk, attend) else "without a causal mask"


def needs_given_mask(walk: Walk, attend: Attend) -> bool:
    """Does the order of positions come from the mask that the model is handed, and from nothing else?"""
    masks = list(attend.masks)
    if attend.call is not None:
        masks += [m for m in (attend.call.kwargs.get("atten_mask"),) if isinstance(m, Tensor)]
    flag = attend.kind == "sdpa" and attend.causal not in (None, Const(False), Const(None))
    return not flag and {t.op for t in _mask_parts(walk, masks)} & _ORDER == {"input:attention_mask"}


def _hides_itself(t: Tensor) -> bool:
    """Is it `key < query` or `key >= query` on plain positions? Causal masks part at `<=` and `>`."""
    if t.op not in ("lt", "le", "gt", "ge") or len(t.parents) != 2:
        return False
    left, right = t.parents
    if not isinstance(left, Tensor) or not isinstance(right, Tensor) or not left.shape or not right.shape:
        return False
    if not (_positions(left) and _positions(right)):
        return False
    queries = [side.shape[-1].value == 1 for side in (left, right) if side.shape]
    if queries == [True, False]:
        return t.op in ("gt", "le")
    return queries == [False, True] and t.op in ("lt", "ge")


def _positions(t: Tensor) -> bool:
    """Token positions counted from 0, rearranged only."""
    root = root_of(t)
    if root is None or root.op == "input:position_ids":
        return root is not None
    starts = [p for p in root.parents if p != Const(None)]
    return root.op == "arange" and (len(starts) == 1 or (len(starts) > 1 and starts[0] == Const(0)))


def _diagonal(walk: Walk, t: Tensor) -> int | None:
    """The constant diagonal of a triangle."""
    if t.op.rstrip("_") not in ("triu", "tril"):
        return None
    given = [t.attrs.get("diagonal"), *t.parents[1:]]  # a function's keyword, or the argument of a method
    values = [d for d in given if isinstance(d, Value) and not isinstance(d, Tensor) and d != Const(None)]
    if not values:
        return 0
    dim = walk.as_dim(values[0])
    return dim.value if dim is not None and not dim.wild else None


def _is_causal(walk: Walk, attend: Attend) -> bool:
    """Does a prefill keep later tokens from earlier ones? A mask that orders positions, or the flag for one.

    A mask of equalities alone (padding) does not; a fused call needs its mask and a sparse_mode that reads it.
    """
    ordered = any(t.op in _ORDER for t in _mask_parts(walk, attend.masks))
    if attend.call is not None and attend.kind.startswith("fa"):
        given = attend.call.kwargs.get("atten_mask", Const(None)) != Const(None)
        if attend.call.kwargs.get("sparse_mode", Const(0)) in (Const(0), Const(1)):
            return ordered
        return given
    return ordered or (attend.kind == "sdpa" and attend.causal not in (None, Const(False), Const(None)))


def _first_tensor(t: Tensor) -> Tensor | None:
    found = tensor_parents(t)
    return found[0] if found else None


def _back_to_softmax(walk: Walk, t: Tensor | None) -> tuple[Tensor | None, list[Tensor]]:
    """(the softmax, what happens to its result on the way)."""
    passed: list[Tensor] = []
    for _ in range(12):
        if t is None:
            break
        if t.op in ("softmax", "torch.nn.functional.softmax"):
            return t, passed
        if t.op in _CAST or t.op in ("dropout", "getitem", "pointwise", "join", "where", "masked_fill"):
            passed.append(t)
            data = tensor_parents(t)[1:] if t.op == "where" and len(tensor_parents(t)) > 1 else tensor_parents(t)
            t = next((p for p in data if _from_softmax(p)), None) or _first_tensor(t)
        else:
            break
    return None, passed


def _from_softmax(t: Tensor) -> bool:
    return any(a.op in ("softmax", "torch.nn.functional.softmax") for a in ancestors([t]))


def _score_path(walk: Walk, scores: Tensor | None, out: Attend) -> Tensor | None:
    """Follow the scores back to Q.K^T, recording what happens on the way."""
    seen: set[Tensor] = set()
    t = scores
    while t is not None and t not in seen:
        seen.add(t)
        if t.op in ("matmul", "einsum"):
            return t
        if t.op in _CAST or t.op in ("dropout", "pointwise"):
            t = _first_tensor(t)
        elif t.op in ("mul", "div"):
            a, b = t.parents[0], t.parents[1] if len(t.parents) > 1 else Const(1)
            main, other = (a, b) if _holds_scores(a) else (b, a)
            if isinstance(other, Tensor):
                if other.stream or any(a.op == "parameter" for a in ancestors([other])):
                    out.bad.append(Bad("KV141", "a factor on the scores that is not a constant", t.node, t))
                else:
                    out.scale.append((t.op, other, None))
            else:
                out.scale.append((t.op, other, _other_operand(t, main)))
            t = main if isinstance(main, Tensor) else None
        elif t.op in ("add", "masked_fill", "masked_fill_", "where", "sub"):
            tensors = list(tensor_parents(t))
            main2 = next((p for p in tensors if _holds_scores(p)), None)
            for p in tensors:
                if p is main2:
                    continue
                if t.op == "sub" and main2 is not None and main2 in ancestors([p]):
                    continue  # subtracting the row maximum changes nothing
                _add_mask(walk, out, p)
            t = main2
        elif t.op in ("cat", "concat"):
            tensors = tensor_parents(t)
            main3 = next((p for p in tensors if _holds_scores(p)), None)
            extra = [p for p in tensors if p is not main3]
            if len(extra) == 1:
                out.sinks = next((a for a in ancestors(extra) if a.op == "parameter"), extra[0])
                out.sink_column = (extra[0], tensors[0] is main3)
            else:
                out.bad.append(Bad("KV141", "a concatenation on the scores", t.node, t))
            t = main3
        elif t.op == "join":
            found = [p for p in tensor_parents(t) if _holds_scores(p)]
            t = found[0] if found else None
        elif t.op == "getitem":
            t = _first_tensor(t)
        elif t.op in ("tanh", "clamp"):
            out.bad.append(Bad("KV140", "a soft cap (tanh) on the attention scores", t.node, t))
            t = _first_tensor(t)
        else:
            out.bad.append(Bad("KV141", f"the operation `{t.op.lstrip('?')}` on the attention scores", t.node, t))
            t = next((p for p in tensor_parents(t) if _holds_scores(p)), None)
    return None


def _holds_scores(value: Value) -> bool:
    if not isinstance(value, Tensor):
        return False
    return any(a.op in ("matmul", "einsum") and a.stream for a in ancestors([value]))


def _other_operand(t: Tensor, main: Value) -> ast.AST | None:
    node = t.node
    if isinstance(node, ast.BinOp):
        return node.right if t.parents[0] is main else node.left
    if isinstance(node, ast.Call) and node.args:
        return node.args[0]
    return None


def _add_mask(walk: Walk, out: Attend, mask: Tensor) -> None:
    """Accept masks made of positions and comparisons; find window sizes; name anything else."""
    out.masks.append(mask)
    parts = _mask_parts(walk, [mask])
    for t in (t for t in walk.tensors if t in parts):  # in the order of creation
        if t.op in ("cumsum", "bucketize", "searchsorted") and any(a.op == "input:input_ids" for a in ancestors([t])):
            out.bad.append(Bad("KV142", "a mask by segments of token ids", t.node, t))
            return
        if t.op.startswith("input:") or t.op in LAYOUT or t.op in _MASK_OPS:
            out.windows.extend(_window_operands(walk, t))
            continue
        if t.op in ("mul", "div"):
            numbers = [p for p in t.parents if not isinstance(p, Tensor)]
            if numbers or any(_boolean(p) for p in tensor_parents(t)):
                continue
        if t.op in ("floordiv",):
            out.bad.append(Bad("KV144", "a mask by chunks of positions", t.node, t))
        elif t.op in ("parameter", "pow", "exp", "linear", "mul", "div", "log", "embedding"):
            out.bad.append(Bad("KV145", "a bias (not only a mask) on the attention scores", t.node or mask.node, mask))
        else:
            out.bad.append(Bad("KV142", f"a mask made with `{t.op.lstrip('?')}`", t.node, t))
        return


def _mask_parts(walk: Walk, masks: list[Tensor]) -> set[Tensor]:
    """All that goes into masks, in-place operations on any part of them included."""
    parts = set(ancestors(masks))
    for t in walk.tensors:
        if t.op.endswith("_") and t.parents and t.parents[0] in parts:
            parts |= set(ancestors([t]))
    return parts


def _boolean(t: Tensor) -> bool:
    return t.op in ("eq", "ne", "lt", "le", "gt", "ge", "logical_not", "and", "or", "invert", "tril", "triu")


def _window_operands(walk: Walk, t: Tensor) -> list[Value]:
    """Sizes that enter a comparison or a diagonal: a window, if they are more than one."""
    found: list[Value] = []
    if any(a.op == "input:input_ids" for a in ancestors([t])):
        return found  # a token's id is no size
    if t.op in ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub"):
        found.extend(p for p in t.parents if _size(walk, p))
    if t.op in ("triu", "tril"):
        given = [t.attrs.get("diagonal"), *t.parents[1:]]  # a function's keyword, or the argument of a method
        found.extend(d for d in given if isinstance(d, Value) and not isinstance(d, Tensor) and _size(walk, d))
    return found


def _size(walk: Walk, value: Value) -> bool:
    dim = walk.as_dim(value)
    if dim is None:
        return isinstance(value, (Ref, Scalar)) and "window" in walk.as_text(value)
    if dim.atoms & {"B", "S", "C", "T", "n", "q"} or dim.wild:
        return False
    number = walk.concrete_dim(dim)
    return number is not None and abs(number) > 1
