"""Python's own part of the walk: builtins, imports, containers, attributes and comparisons."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kvskill.analyzer.modeling import shapes
from kvskill.analyzer.modeling.dims import Dim, fresh, product
from kvskill.analyzer.modeling.enums import member_of
from kvskill.analyzer.modeling.kinds import representatives, row_representatives
from kvskill.analyzer.modeling.values import (
    Bool,
    Bound,
    ClassVal,
    Const,
    Dict_,
    External,
    ExtInstance,
    Func,
    Instance,
    ModuleSeq,
    Partial,
    Ref,
    Scalar,
    Tensor,
    Tup,
    Unknown,
    Value,
)
from kvskill.source import SourceFile

if TYPE_CHECKING:
    from kvskill.analyzer.modeling.walk import Walk

__all__ = [
    "OUTSIDE",
    "Super",
    "bind_import",
    "builtin",
    "call_builtin",
    "call_method",
    "compare",
    "enum_by_value",
    "ext_attr",
    "get_setting",
    "inplace_source",
    "iterate",
    "name_children",
    "outside_base",
    "outside_part",
    "subscript",
    "super_proxy",
    "tensor_attr",
]

_MISSING = object()
_RUNTIME = frozenset({"B", "S", "T", "n", "q"})


def builtin(name: str) -> Value:
    return External(f"builtins.{name}")


def bind_import(
    stmt: ast.Import | ast.ImportFrom,
    env: dict[str, Value],
    modules: Mapping[str, Mapping[str, Value]],
    file: SourceFile,
) -> None:
    """Bind the names of an import; names of the model's own files resolve to their values."""
    if isinstance(stmt, ast.Import):
        for alias in stmt.names:
            env[alias.asname or alias.name.split(".")[0]] = External(
                alias.name if alias.asname else alias.name.split(".")[0]
            )
        return
    own = _own_module(stmt, modules, file)
    for alias in stmt.names:
        name = alias.asname or alias.name
        if own is not None and alias.name in modules[own]:
            env[name] = modules[own][alias.name]
        elif own is not None and alias.name == "*":
            env.update({k: v for k, v in modules[own].items() if not k.startswith("_")})
        else:
            prefix = "." * stmt.level + (stmt.module or "")
            sub = _file_named(alias.name, modules) if stmt.level and not stmt.module else None
            env[name] = External(f"{prefix}.{alias.name}") if sub is None else External(f"file:{sub}")


def _own_module(stmt: ast.ImportFrom, modules: Mapping[str, Mapping[str, Value]], file: SourceFile) -> str | None:
    tail = (stmt.module or "").split(".")[-1]
    if not tail or (not stmt.level and not (stmt.module or "").startswith("models.")):
        # an absolute import of a sibling file also counts when the folder is on the path
        if stmt.level or "." in (stmt.module or "."):
            return None
    return _file_named(tail, modules)


def _file_named(name: str, modules: Mapping[str, Mapping[str, Value]]) -> str | None:
    for shown in modules:
        if shown.replace("\\", "/").rsplit("/", 1)[-1] == f"{name}.py":
            return shown
    return None


def name_children(value: Value, path: str) -> None:
    """Give submodules their dotted path, for messages and for matching checkpoints."""
    if isinstance(value, (Instance, ExtInstance)):
        if not value.path:
            value.path = path
            if isinstance(value, Instance):
                for name, child in value.attrs.items():
                    name_children(child, f"{path}.{name}")
        elif isinstance(value, Instance) and not value.path.startswith(path):
            old = value.path
            value.path = f"{path}"
            for name, child in value.attrs.items():
                if isinstance(child, (Instance, ExtInstance)) and child.path.startswith(old):
                    child.path = ""
                name_children(child, f"{path}.{name}")
    elif isinstance(value, ModuleSeq):
        for i, item in enumerate(value.items):
            key = value.keys[i] if value.keys else i
            if isinstance(item, Instance) and item.index is None:
                item.index = i
            name_children(item, f"{path}.{key}")


def enum_by_value(walk: Walk, cls: ClassVal, args: list[Value]) -> Value:
    """`Mode(0)`: the member with this value."""
    wanted = _python(walk, args[0]) if args else _MISSING
    found = member_of(cls, wanted) if wanted is not _MISSING else None
    if found is None:
        return Unknown("enum")
    origin = args[0].origin if isinstance(args[0], Const) else getattr(args[0], "path", "")
    return Const(found.value, origin)


def get_setting(walk: Walk, path: str, args: list[Value]) -> Value:
    """`config.rope_scaling.get("factor", 1)`: an entry of a dict of the configuration, or the default."""
    known = walk.concrete(path)
    key = _python(walk, args[0])
    if not isinstance(known, dict) or key is _MISSING:
        return Unknown("get", tuple(args))
    if key in known:
        return walk._ref(f"{path}[{key!r}]")
    default = args[1] if len(args) > 1 else Const(None)
    return Const(default.value, f"{path}[{key!r}]") if isinstance(default, Const) else default


def iterate(walk: Walk, value: Value) -> list[Value] | None:
    """The items of a loop, or None when they are not known. Equal layers run once."""
    if isinstance(value, Tup):
        return value.items
    if isinstance(value, ModuleSeq):
        return [value.items[i] for i in representatives(walk, value.items)]
    if isinstance(value, Dict_) and value.rest is None:
        return [Const(k) for k in value.items]
    if isinstance(value, Ref):
        known = walk.concrete(value.path)
        if isinstance(known, (list, tuple)) and all(isinstance(v, (str, int, float, bool)) for v in known):
            return [Const(v) for v in known]
    return None


def tensor_attr(walk: Walk, node: ast.Attribute, t: Tensor, name: str) -> Value:
    if name == "shape":
        if t.shape is None:
            return Unknown("shape", (t,))
        return Tup([_dim_value(d) for d in t.shape], shape_of=t)
    if name in ("T", "mT"):
        if t.shape is not None and len(t.shape) >= 2:
            return walk.tensor("transpose", [t], (*t.shape[:-2], t.shape[-1], t.shape[-2]), node)
        return walk.tensor("transpose", [t], None, node)
    if name == "data":
        return t
    if name == "dtype":
        return External("tensor.dtype")
    if name == "device":
        return External("tensor.device")
    if name == "ndim":
        return Const(len(t.shape)) if t.shape is not None else Unknown("ndim")
    if name == "is_cuda":
        return Const(False)
    if name in ("grad", "requires_grad"):
        return Const(None)
    return Bound(t, name)


def _dim_value(dim: Dim) -> Value:
    return Const(dim.value) if dim.value is not None else Scalar(str(dim), dim)


def ext_attr(walk: Walk, node: ast.Attribute, obj: ExtInstance, name: str) -> Value:
    if name in ("weight", "bias", "scale"):
        return walk.tensor("parameter", [], None, node, owner=obj, name=name)
    if name in obj.kwargs:
        return obj.kwargs[name]
    return Bound(obj, name)


def subscript(walk: Walk, node: ast.AST, obj: Value, index: Value | None, parts: list[Value | slice]) -> Value:
    if isinstance(obj, (Tup, ModuleSeq)):
        items = obj.items
        if isinstance(index, Const) and isinstance(index.value, int) and not isinstance(index.value, bool):
            if -len(items) <= index.value < len(items):
                return items[index.value]
            if isinstance(obj, Tup) and obj.shape_of is not None:
                walk.problem(node, "rank", f"axis {index.value} of a tensor with {len(items)} axes")
            return Unknown("index out of range", (obj,))
        if isinstance(index, Const) and isinstance(obj, ModuleSeq) and obj.keys and index.value in obj.keys:
            return items[obj.keys.index(index.value)]
        if len(parts) == 1 and isinstance(parts[0], slice):
            s = parts[0]
            try:
                picked = items[slice(_const(walk, s.start), _const(walk, s.stop), _const(walk, s.step))]
            except (TypeError, ValueError):
                return obj
            if isinstance(obj, ModuleSeq):
                return ModuleSeq(picked)
            return Tup(picked, obj.is_list, obj.shape_of)
        if isinstance(index, Const) and isinstance(obj, ModuleSeq) and isinstance(index.value, str):
            if index.value.isdigit() and int(index.value) < len(items):
                return items[int(index.value)]
        return Unknown("index", tuple(items[:4]))
    if isinstance(obj, Dict_):
        key = index.value if isinstance(index, Const) else _MISSING
        if isinstance(index, Ref):
            known = walk.concrete(index.path)
            key = known if isinstance(known, (str, int)) else _MISSING
        if key is not _MISSING and key in obj.items:
            return obj.items[key]
        if key is _MISSING and obj.items:
            values = list(obj.items.values())
            out = values[0]
            for other in values[1:]:
                out = walk.join(out, other)
            return out
        return obj.rest if obj.rest is not None else Unknown("dict entry")
    if isinstance(obj, Ref):
        if isinstance(index, Const):
            return walk._ref(f"{obj.path}[{index.value!r}]")
        if isinstance(index, (Scalar, Ref)):
            return Ref(f"{obj.path}[{walk.as_text(index)}]")
        return Unknown("config entry")
    if isinstance(obj, External):
        return External(f"{obj.name}[]")
    sources = tuple(v for v in (obj, index) if isinstance(v, Value))
    return Unknown("subscript", sources)


def _const(walk: Walk, value: Value | None) -> int | None:
    if value is None:
        return None
    if isinstance(value, Const) and isinstance(value.value, int):
        return value.value
    dim = walk.as_dim(value)
    known = walk.concrete_dim(dim) if dim is not None else None
    if known is None:
        raise TypeError("not a constant")
    return known


def compare(
    walk: Walk, op: ast.cmpop, a: Value, b: Value, table: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]]
) -> Value:
    if isinstance(op, (ast.Is, ast.IsNot)):
        want = isinstance(op, ast.Is)
        if isinstance(a, Const) and isinstance(b, Const):
            return Const((a.value is b.value) is want)
        if isinstance(b, Const) and b.value is None:
            if isinstance(a, Ref):
                known = walk.concrete(a.path)
                return Bool(f"{a.path} is None") if _missing(known) else Const((known is None) is want)
            if isinstance(
                a,
                (Scalar, Tup, Dict_, Instance, ExtInstance, External, Func, Bound, Partial, ClassVal, ModuleSeq, Bool),
            ):
                return Const(not want)
        return Bool("is")
    if isinstance(op, (ast.In, ast.NotIn)):
        return _contains(walk, op, a, b)
    x, y = walk.as_dim(a), walk.as_dim(b)
    if x is not None and y is not None:
        decided = _compare_dims(walk, op, x, y)
        if decided is not None:
            return Const(decided, _settings(walk, a, b))
        axes = (x.atoms | y.atoms) & _RUNTIME
        return Bool(f"{x} {type(op).__name__} {y}", frozenset(axes))
    va, vb = _python(walk, a), _python(walk, b)
    if va is not _MISSING and vb is not _MISSING:
        try:
            return Const(bool(table[type(op)](va, vb)), _settings(walk, a, b))
        except TypeError:
            return Bool("comparison")
    if isinstance(a, External) and isinstance(b, External) and isinstance(op, (ast.Eq, ast.NotEq)):
        return Const((a == b) is isinstance(op, ast.Eq)) if a == b else Bool("names")
    return Bool(f"{walk.as_text(a)} {type(op).__name__} {walk.as_text(b)}")


def _settings(walk: Walk, *values: Value) -> str:
    """The run settings that the values are made of."""
    texts = [v.origin if isinstance(v, Const) else walk.as_text(v) for v in values]
    return " ".join(t for t in texts if "infer." in t)


def _missing(value: object) -> bool:
    from kvskill.analyzer.modeling.walk import MISSING

    return value is MISSING


def _python(walk: Walk, value: Value) -> Any:
    if isinstance(value, Const):
        return value.value
    if isinstance(value, Ref):
        known = walk.concrete(value.path)
        return _MISSING if _missing(known) else known
    if isinstance(value, Scalar) and value.dim is not None:
        known = walk.concrete_dim(value.dim)
        return _MISSING if known is None else known
    if isinstance(value, Tup):
        items = [_python(walk, v) for v in value.items]
        return _MISSING if any(i is _MISSING for i in items) else items
    return _MISSING


def _contains(walk: Walk, op: ast.cmpop, a: Value, b: Value) -> Value:
    want = isinstance(op, ast.In)
    needle = _python(walk, a)
    if isinstance(b, Dict_) and b.rest is None and needle is not _MISSING:
        return Const((needle in b.items) is want)
    hay = _python(walk, b)
    if needle is not _MISSING and isinstance(hay, (list, tuple, dict, str)):
        try:
            return Const((needle in hay) is want)
        except TypeError:
            return Bool("in")
    return Bool("in")


def _compare_dims(walk: Walk, op: ast.cmpop, x: Dim, y: Dim) -> bool | None:
    """Compare sizes. A symbolic padded length S and a packed length T are taken as more than one token."""
    diff = x - y
    if diff.value is not None:
        return bool(_apply(op, diff.value, 0))
    runtime = diff.atoms & _RUNTIME
    if not runtime:
        known = walk.concrete_dim(diff)
        return None if known is None else bool(_apply(op, known, 0))
    if runtime <= {"S"} and y.value is not None and x == Dim.atom("S"):
        if y.value <= 1:
            return bool(_apply(op, 2, y.value))
    return None


def _apply(op: ast.cmpop, a: int, b: int) -> bool:
    return {
        ast.Eq: a == b,
        ast.NotEq: a != b,
        ast.Lt: a < b,
        ast.LtE: a <= b,
        ast.Gt: a > b,
        ast.GtE: a >= b,
    }[type(op)]


def super_proxy(walk: Walk) -> Value:
    """`super()`: the object seen through the classes that follow the running one in its order of bases."""
    frame = walk.frame
    owner = frame.owner
    args = frame.func.args.args if isinstance(frame.func, ast.FunctionDef) else []
    self_ = frame.env.get(args[0].arg) if args else None
    if owner is None or self_ is None:
        return External("super")
    real = self_.real if isinstance(self_, Super) else self_
    order = real.cls.mro() if isinstance(real, Instance) else owner.mro()
    at = next((i for i, c in enumerate(order) if c.node is owner.node), None)
    tail = order[at + 1 :] if at is not None else owner.mro()[1:]
    if not tail and not (isinstance(real, Instance) and outside_base(real.cls)):
        return External("super")
    return Super(tail, real if isinstance(real, Instance) else Instance(owner))


class Super(Instance):
    """Methods come from the classes after the running one, `self` stays the object."""

    def __init__(self, tail: list[ClassVal], real: Instance) -> None:
        super().__init__(tail[0] if tail else real.cls)
        self.tail = tail
        self.real = real
        self.attrs = real.attrs
        self.attr_nodes = real.attr_nodes
        self.path = real.path

    def method(self, name: str) -> tuple[ast.FunctionDef, ClassVal] | None:
        for cls in self.tail:
            for item in cls.node.body:
                if isinstance(item, ast.FunctionDef) and item.name == name:
                    return item, cls
        return None


OUTSIDE = "<outside>"  # the attribute that holds what an outside base class made of its arguments


def outside_base(cls: ClassVal) -> str | None:
    """The module class from outside the files that the class derives from (`torch.nn.Embedding`), if it has one."""
    return next((b for b in sorted(cls.external_bases()) if b.startswith("torch.nn.") and b != "torch.nn.Module"), None)


def outside_part(inst: Instance) -> ExtInstance | None:
    """The object's part that an outside base class made."""
    part = inst.attrs.get(OUTSIDE)
    return part if isinstance(part, ExtInstance) else None


def call_builtin(walk: Walk, name: str, args: list[Value], kwargs: dict[str, Value], node: ast.Call) -> Value:
    """Calls of Python builtins."""
    first = args[0] if args else None
    if name == "range":
        bounds = []
        for arg in args:
            dim = walk.as_dim(arg)
            bounds.append(walk.concrete_dim(dim) if dim is not None else None)
        if all(b is not None for b in bounds) and bounds:
            numbers = range(*[b for b in bounds if b is not None])
            return Tup([Const(i) for i in numbers[:4096]], is_list=True)
        return Unknown("range")
    if name in ("len",) and first is not None:
        if isinstance(first, (Tup, ModuleSeq)):
            return Const(len(first.items))
        if isinstance(first, Dict_):
            return Const(len(first.items)) if first.rest is None else Unknown("len")
        if isinstance(first, Tensor) and first.shape:
            return _dim_value(first.shape[0])
        if isinstance(first, Ref):
            known = walk.concrete(first.path)
            return Const(len(known)) if isinstance(known, (list, dict, str)) else Unknown("len")
        return Unknown("len", (first,))
    if name == "getattr" and len(args) >= 2 and isinstance(args[1], Const):
        return _getattr(walk, args, node)
    if name == "hasattr" and len(args) == 2 and isinstance(args[1], Const):
        return _hasattr(walk, args[0], str(args[1].value))
    if name == "setattr" and len(args) == 3 and isinstance(first, Instance) and isinstance(args[1], Const):
        set_member(walk, first, str(args[1].value), args[2])
        return Const(None)
    if name == "isinstance" and len(args) == 2:
        return _isinstance(walk, args[0], args[1])
    if name == "enumerate" and first is not None:
        if isinstance(first, ModuleSeq):
            kept = representatives(walk, first.items, walk.frame.stmt)
            return Tup([Tup([Const(i), first.items[i]]) for i in kept])
        items = iterate(walk, first)
        if items is None:
            return Unknown("enumerate", (first,))
        return Tup([Tup([Const(i), v]) for i, v in enumerate(items)])
    if name == "zip":
        seqs = [a.items if isinstance(a, ModuleSeq) else iterate(walk, a) for a in args]
        if any(s is None for s in seqs):
            return Unknown("zip", tuple(args))
        rows = list(zip(*[s for s in seqs if s is not None], strict=False))
        layers = any(isinstance(a, ModuleSeq) for a in args)
        keep: Iterable[int] = row_representatives(walk, rows) if layers else range(len(rows))
        return Tup([Tup(list(rows[i])) for i in keep])
    if name in ("list", "tuple") and args:
        if isinstance(first, ModuleSeq):
            return Tup(list(first.items), is_list=name == "list")
        items = iterate(walk, args[0])
        return Tup(list(items), is_list=name == "list") if items is not None else Unknown(name, (args[0],))
    if name == "dict":
        out = Dict_(dict(kwargs))
        if isinstance(first, Dict_):
            out.items = {**first.items, **out.items}
            out.rest = first.rest
        elif first is not None:
            pairs = iterate(walk, first)
            if pairs is None or not all(isinstance(p, Tup) and len(p.items) == 2 for p in pairs):
                return Unknown("dict", (first,))
            for pair in pairs:
                assert isinstance(pair, Tup)
                key = _python(walk, pair.items[0])
                if key is _MISSING or not isinstance(key, (str, int, float, type(None))):
                    out.rest = pair.items[1] if out.rest is None else walk.join(out.rest, pair.items[1])
                else:
                    out.items[key] = pair.items[1]
        return out
    if name in ("max", "min"):
        return _extreme(walk, name, args)
    if name in ("int", "float", "bool", "str", "abs", "round"):
        return _convert(walk, name, args)
    if name in (
        "sum",
        "any",
        "all",
        "sorted",
        "reversed",
        "set",
        "map",
        "filter",
        "next",
        "iter",
        "type",
        "id",
    ):
        if name == "reversed" and isinstance(first, (Tup, ModuleSeq)):
            return Tup(list(reversed(first.items)), is_list=True)
        if name in ("set", "sorted") and first is not None:
            items = iterate(walk, first)
            if items is not None and all(isinstance(i, Const) for i in items):
                return Tup([Const(v) for v in _distinct(items, in_order=name == "sorted")], is_list=True)
            if name == "set" and isinstance(first, Tup):
                return first
        return Unknown(name, tuple(args))
    if name in ("print", "RuntimeError", "ValueError", "NotImplementedError", "KeyError", "AssertionError"):
        return Const(None)
    return Unknown(name, tuple(args))


def set_member(walk: Walk, obj: Instance, name: str, value: Value) -> None:
    """`setattr`, `register_buffer`, `add_module`: an attribute set by a call."""
    obj.attrs[name] = value
    stmt = walk.frame.stmt
    if stmt is not None:
        obj.attr_nodes[name] = stmt
    if walk.naming and isinstance(value, (Instance, ExtInstance, ModuleSeq)):
        name_children(value, f"{obj.path}.{name}" if obj.path else name)


def _distinct(items: list[Value], *, in_order: bool) -> list[Any]:
    values = [i.value for i in items if isinstance(i, Const)]
    if in_order:
        try:
            return sorted(values)
        except TypeError:
            return values
    return list(dict.fromkeys(values))


def _getattr(walk: Walk, args: list[Value], node: ast.Call) -> Value:
    obj, name = args[0], args[1].value if isinstance(args[1], Const) else ""
    if isinstance(obj, Ref):
        path = f"{obj.path}.{name}"
        known = walk.concrete(path)
        if _missing(known) and len(args) > 2:
            # a key that the configuration lacks takes the default; an unknown configuration does not
            return args[2] if not _missing(walk.concrete(obj.path)) else Unknown("getattr", (args[2],))
        return walk._ref(path)
    fake = ast.copy_location(ast.Attribute(node, str(name), ast.Load()), node)
    if isinstance(obj, Instance):
        if name in obj.attrs or obj.cls.method(str(name)) is not None:
            return walk._attribute(fake, obj)
        return args[2] if len(args) > 2 else Unknown("getattr")
    if isinstance(obj, (Tensor, ExtInstance, External)):
        if isinstance(obj, ExtInstance) and len(args) > 2:
            return args[2]
        return walk._attribute(fake, obj)
    return Unknown("getattr", (obj,))


def _hasattr(walk: Walk, obj: Value, name: str) -> Value:
    if isinstance(obj, Instance):
        return Const(name in obj.attrs or obj.cls.method(name) is not None)
    if isinstance(obj, Ref):
        known = walk.concrete(f"{obj.path}.{name}")
        if _missing(walk.concrete(obj.path)):
            return Bool("hasattr")
        return Const(not _missing(known))
    if isinstance(obj, ModuleSeq) and name in ("values", "items", "keys"):
        return Const(obj.keys is not None)
    return Bool("hasattr")


def _isinstance(walk: Walk, obj: Value, cls: Value) -> Value:
    if isinstance(obj, Instance) and isinstance(cls, ClassVal):
        return Const(cls in obj.cls.mro())
    names = [c.name for c in (cls.items if isinstance(cls, Tup) else [cls]) if isinstance(c, External)]
    python = {
        "builtins.dict": dict,
        "builtins.list": list,
        "builtins.tuple": tuple,
        "builtins.int": int,
        "builtins.str": str,
        "builtins.float": float,
        "builtins.bool": bool,
    }
    if names and all(n in python for n in names):
        value = _python(walk, obj)
        if value is not _MISSING:
            return Const(isinstance(value, tuple(python[n] for n in names)))
        if isinstance(obj, Dict_):
            return Const("builtins.dict" in names)
        if isinstance(obj, Tup):
            return Const(("builtins.list" if obj.is_list else "builtins.tuple") in names)
        if isinstance(obj, (Tensor, Instance)):
            return Const(False)
    if isinstance(obj, Tensor) and names:
        return Const("torch.Tensor" in names)
    return Bool("isinstance")


def _extreme(walk: Walk, name: str, args: list[Value]) -> Value:
    items = args[0].items if len(args) == 1 and isinstance(args[0], Tup) else args
    dims = [walk.as_dim(a) for a in items]
    known = [d for d in dims if d is not None]
    if len(known) != len(items) or not known:
        return Unknown(name, tuple(args))
    values = [d.value for d in known]
    if all(v is not None for v in values):
        picked = max(v for v in values if v is not None) if name == "max" else min(v for v in values if v is not None)
        return Const(picked)
    # max(heads // tp, 1) is heads // tp wherever that is at least one: keep the expression, remember the value
    concrete = [walk.concrete_dim(d) for d in known]
    if all(c is not None for c in concrete):
        best = (max if name == "max" else min)(range(len(known)), key=lambda i: concrete[i] or 0)
        return _dim_value(known[best])
    text = f"{name}({', '.join(str(d) for d in known)})"
    walk.extremes[text] = (name, known)
    return Scalar(text, Dim.atom(text))


_CONVERT: dict[str, Callable[[Any], Any]] = {
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "abs": abs,
    "round": round,
}


def _convert(walk: Walk, name: str, args: list[Value]) -> Value:
    value = args[0] if args else Const(0)
    if isinstance(value, Const):
        try:
            return Const(_CONVERT[name](value.value))
        except (TypeError, ValueError):
            return Unknown(name)
    if name in ("int", "abs", "round"):
        dim = walk.as_dim(value)
        if dim is not None:
            return _dim_value(dim)
        if isinstance(value, Scalar):
            return _evaluated(walk, name, value)
    if name == "float" and isinstance(value, (Scalar, Ref)):
        return value
    if name == "str" and (known := _python(walk, value)) is not _MISSING:
        return Const(str(known))
    if name == "bool":
        known = walk.truth(value)
        return Const(known) if known is not None else Bool("bool")
    if isinstance(value, Tensor):
        return walk.measure(value)
    return Unknown(name, (value,))


def _evaluated(walk: Walk, name: str, value: Scalar) -> Value:
    text = f"{name}({value.text})"
    return Scalar(text, Dim.atom(text))


def call_method(
    walk: Walk, node: ast.Call, obj: Value, name: str, args: list[Value], kwargs: dict[str, Value]
) -> Value:
    """Methods of tensors, containers, nn.Module and objects of outside classes."""
    if isinstance(obj, Tensor):
        result_t = _tensor_method(walk, node, obj, name, args, kwargs)
        if isinstance(result_t, Tensor) and result_t.node is node:
            result_t.attrs.setdefault("given", ((obj, *args), kwargs))
        return result_t
    if isinstance(obj, (Dict_,)):
        return _dict_method(walk, obj, name, args)
    if isinstance(obj, Tup):
        if name == "append" and args:
            obj.items.append(args[0])
            return Const(None)
        if name == "extend" and args and isinstance(args[0], Tup):
            obj.items.extend(args[0].items)
            return Const(None)
        if name == "numel":
            return Unknown("numel")
        return Unknown(f"list.{name}", tuple(args))
    if isinstance(obj, ModuleSeq):
        if name == "append" and args:
            obj.items.append(args[0])
            return Const(None)
        if name in ("values", "children"):
            return ModuleSeq(obj.items)
        if name == "items" and obj.keys is not None:
            return Tup([Tup([Const(k), v]) for k, v in zip(obj.keys, obj.items, strict=True)])
        return Unknown(f"modules.{name}")
    if isinstance(obj, Instance):
        if name in ("register_buffer", "register_parameter", "add_module", "register_module"):
            if len(args) >= 2 and isinstance(args[0], Const):
                set_member(walk, obj, str(args[0].value), args[1])
                return Const(None)
        if name in ("modules", "named_modules", "parameters", "named_parameters", "children", "state_dict"):
            return Unknown(name)
        if name in (
            "to",
            "eval",
            "npu",
            "cuda",
            "cpu",
            "train",
            "half",
            "bfloat16",
            "float",
            "requires_grad_",
        ):
            return obj
        real = obj.real if isinstance(obj, Super) else obj
        if name == "__init__":
            base = outside_base(real.cls)
            if base is not None:
                real.attrs[OUTSIDE] = ExtInstance(base, args, kwargs)
            return Const(None)
        part = outside_part(real)
        if name in ("forward", "__call__") and part is not None:
            from kvskill.analyzer.modeling.externals import call_ext_instance

            return call_ext_instance(walk, part, args, kwargs, node)
        return Unknown(f"{obj.cls.name}.{name}", tuple(args))
    if isinstance(obj, ExtInstance):
        if name in ("to", "npu", "cuda", "eval"):
            return obj
        if name == "forward":
            from kvskill.analyzer.modeling.externals import call_ext_instance

            return call_ext_instance(walk, obj, args, kwargs, node)
        tensors = [a for a in args if isinstance(a, Tensor)]
        result: Value = (
            walk.tensor(f"?{obj.name}.{name}", list(args), None, node) if tensors else Unknown(name, tuple(args))
        )
        walk.record_call(f"{obj.name}.{name}", node, [obj, *args], kwargs, result)
        return result
    if isinstance(obj, Const) and isinstance(obj.value, str):
        if name == "attrgetter" and len(args) == 1:  # what operator.attrgetter(path) gives, called
            found = args[0]
            for piece in obj.value.split("."):
                found = _getattr(walk, [found, Const(piece)], node)
            return found
        if name in ("startswith", "endswith", "lower", "upper", "format", "replace", "split", "strip"):
            plain = [a.value for a in args if isinstance(a, Const)]
            if len(plain) == len(args):
                try:
                    result_py = getattr(obj.value, name)(*plain)
                except Exception:
                    return Unknown(name)
                return Const(result_py) if not isinstance(result_py, list) else Tup([Const(v) for v in result_py])
    return Unknown(f"method {name}", (obj, *args))


def _dict_method(walk: Walk, obj: Dict_, name: str, args: list[Value]) -> Value:
    if name == "get" and args:
        key = _python(walk, args[0])
        if key is not _MISSING and key in obj.items:
            return obj.items[key]
        if obj.rest is None and key is not _MISSING:
            return args[1] if len(args) > 1 else Const(None)
        values = [] if key is not _MISSING else list(obj.items.values())
        values += [v for v in (obj.rest, args[1] if len(args) > 1 else None) if v is not None and v != Const(None)]
        if not values:
            return Unknown("dict.get")
        out = values[0]
        for other in values[1:]:
            out = walk.join(out, other)
        return out
    if name == "pop" and args:
        key = _python(walk, args[0])
        if key is not _MISSING and key in obj.items:
            return obj.items.pop(key)
        return args[1] if len(args) > 1 and obj.rest is None else Unknown("dict.pop")
    if name == "update" and args and isinstance(args[0], Dict_):
        obj.items.update(args[0].items)
        obj.rest = args[0].rest or obj.rest
        return Const(None)
    if name == "items" and obj.rest is None:
        return Tup([Tup([Const(k), v]) for k, v in obj.items.items()])
    if name == "values" and obj.rest is None:
        return Tup(list(obj.items.values()))
    if name == "keys" and obj.rest is None:
        return Tup([Const(k) for k in obj.items])
    if name == "copy":
        return Dict_(dict(obj.items), obj.rest)
    return Unknown(f"dict.{name}")


# in-place method -> (position and name of what is written, of the index)
_INPLACE: dict[str, tuple[int, tuple[str, ...], int | None]] = {
    "copy_": (0, ("src", "other"), None),
    "index_copy_": (2, ("source", "tensor"), 1),
    "index_put_": (1, ("values",), 0),
    "scatter_": (2, ("src",), 1),
}


def inplace_source(name: str, args: list[Value], kwargs: dict[str, Value]) -> tuple[Value | None, Value | None]:
    """What an in-place method of a tensor writes, and where (its index)."""
    if name not in _INPLACE:
        return None, None
    at, names, index = _INPLACE[name]
    source = args[at] if len(args) > at else next((kwargs[n] for n in names if n in kwargs), None)
    where = kwargs.get("index", args[index] if index is not None and len(args) > index else None)
    return source, where


def _tensor_method(
    walk: Walk, node: ast.Call, t: Tensor, name: str, args: list[Value], kwargs: dict[str, Value]
) -> Value:
    if name == "size":
        if t.shape is None:
            return Unknown("size", (t,))
        if not args and "dim" not in kwargs:
            return Tup([_dim_value(d) for d in t.shape], shape_of=t)
        return subscript(
            walk,
            node,
            Tup([_dim_value(d) for d in t.shape], shape_of=t),
            args[0] if args else kwargs["dim"],
            [],
        )
    if name in ("dim", "ndimension"):
        return Const(len(t.shape)) if t.shape is not None else Unknown("dim")
    if name == "numel":
        if t.op == "cache":
            return Const(1)
        return _dim_value(product(t.shape)) if t.shape is not None else Unknown("numel")
    if name in ("item", "tolist"):
        value = walk.measure(t) if name == "item" else Unknown("tolist", (t,))
        walk.record_call(f"tensor.{name}", node, [t, *args], kwargs, value)
        return value
    if name == "is_contiguous":
        return Bool("contiguous")
    if name == "stride":
        return Unknown("stride")
    if name == "baddbmm" and len(args) >= 2 and isinstance(args[0], Tensor) and isinstance(args[1], Tensor):
        from kvskill.analyzer.modeling.externals import baddbmm

        return baddbmm(walk, t, args[0], args[1], kwargs, node)
    if name in ("matmul", "bmm", "mm") and args and isinstance(args[0], Tensor):
        return walk.tensor("matmul", [t, args[0]], shapes.matmul_shape(walk, node, t.shape, args[0].shape), node)
    if name in ("new_empty", "new_zeros", "new_ones", "new_full"):
        sizes = args[0] if args else None
        items = sizes.items if isinstance(sizes, Tup) else args
        return walk.tensor(name, [], tuple(walk.as_dim(i) or fresh() for i in items), node)
    rule = shapes.METHODS.get(name)
    if rule is not None:
        result = rule(walk, node, t, args, kwargs)
    else:
        result = walk.tensor(f"?{name}", [t, *args, *kwargs.values()], None, node)
    if name.endswith("_") and not name.endswith("__"):
        walk.taint(t, [*args, *kwargs.values()])
        source, index = inplace_source(name, args, kwargs)
        walk.fill(t, source, index)
        if isinstance(result, Tensor) and result.shape is None:
            result.shape = t.shape
        walk.record_call(f"tensor.{name}", node, [t, *args], kwargs, result)
    return result
