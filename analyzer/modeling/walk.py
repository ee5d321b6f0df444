"""The symbolic walk: runs a model's code on shapes.

`Walk` interprets the subset of Python that modeling code uses. Branches whose condition is known take one side;
others run both sides and join. The walk is total: what it does not understand becomes `Unknown` or a tensor
without a shape, never an exception, and impossible shapes are recorded as problems. Consumers decide what
missing knowledge means; they must treat it as "not sure".
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvskill.analyzer.modeling import builtins as py
from kvskill.analyzer.modeling import shapes
from kvskill.analyzer.modeling.dims import Dim, const, fresh
from kvskill.analyzer.modeling.enums import ENUM_BASES, enum_members
from kvskill.analyzer.modeling.externals import call_ext_instance, call_external
from kvskill.analyzer.modeling.values import (
    Bool,
    Bound,
    ClassVal,
    Const,
    Dict_,
    EnumMember,
    External,
    ExtInstance,
    Frame,
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

__all__ = ["MISSING", "AttrWrite", "Call", "Problem", "Test", "Walk"]

MISSING = object()
MAX_DEPTH = 60
MAX_STEPS = 400_000
RUNTIME = frozenset({"B", "S", "T", "n", "q"})
# tensors that hold nothing yet
FRESH = frozenset({"new_zeros", "new_empty", "zeros", "empty", "zeros_like", "empty_like"})

_BINOPS: dict[type[ast.operator], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("add", operator.add),
    ast.Sub: ("sub", operator.sub),
    ast.Mult: ("mul", operator.mul),
    ast.Div: ("div", operator.truediv),
    ast.FloorDiv: ("floordiv", operator.floordiv),
    ast.Mod: ("mod", operator.mod),
    ast.Pow: ("pow", operator.pow),
    ast.BitAnd: ("and", operator.and_),
    ast.BitOr: ("or", operator.or_),
    ast.BitXor: ("xor", operator.xor),
    ast.LShift: ("lshift", operator.lshift),
    ast.RShift: ("rshift", operator.rshift),
}
_SIGN = {"add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%", "pow": "**"}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}
_CMP: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


@dataclass(frozen=True, eq=False, repr=False)
class Problem:
    """A shape that cannot be: the code does not fit the assumed input."""

    node: ast.AST
    frame: Frame
    kind: str
    text: str


@dataclass(frozen=True, eq=False, repr=False)
class Call:
    """A call of an outside function or operator, with what went in and out."""

    name: str
    node: ast.Call
    frame: Frame
    stmt: ast.stmt | None
    args: list[Value]
    kwargs: dict[str, Value]
    result: Value


@dataclass(frozen=True, eq=False, repr=False)
class Test:
    """A condition that was evaluated; `axes` are the runtime axes it depends on."""

    node: ast.expr
    frame: Frame
    owner: ast.AST
    value: Value
    axes: frozenset[str]
    operands: tuple[Value, ...] = ()


@dataclass(frozen=True, eq=False, repr=False)
class AttrWrite:
    """`obj.name = value` outside __init__."""

    node: ast.AST
    frame: Frame
    target: Instance
    name: str
    value: Value


@dataclass
class Walk:
    """One run. `concrete(path)` gives the Python value of a configuration path or MISSING."""

    modules: dict[str, dict[str, Value]]
    concrete: Callable[[str], Any]
    dim_env: dict[str, int] = field(default_factory=dict)
    dim_alias: dict[str, Dim] = field(default_factory=dict)
    exact: dict[str, tuple[Dim, Dim]] = field(default_factory=dict)  # quotients without remainder
    extremes: dict[str, tuple[str, list[Dim]]] = field(default_factory=dict)  # sizes that are max or min of others
    measured: dict[str, Tensor] = field(default_factory=dict)  # sizes that are numbers in a tensor
    problems: list[Problem] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    tests: list[Test] = field(default_factory=list)
    attr_writes: list[AttrWrite] = field(default_factory=list)
    item_writes: list[tuple[ast.AST, Frame, Value, Value]] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    frame: Frame = field(init=False)
    steps: int = 0
    collapse_layers: bool = False
    deciding: dict[tuple[int, str], bool] = field(default_factory=dict)  # classes whose code decides by an attribute
    naming: bool = True  # submodules get their paths while the model is built, not by helpers that hold them later
    hooks: dict[str, Callable[[Walk, ast.Call, list[Value], dict[str, Value]], Value]] = field(default_factory=dict)

    # -- entry ---------------------------------------------------------------------------------------------

    def construct(
        self, cls: ClassVal, args: list[Value], kwargs: dict[str, Value], path: str, node: ast.AST | None
    ) -> Instance:
        """Run `cls.__init__`; the result holds the attributes that it set."""
        inst = Instance(cls, path=path)
        found = cls.method("__init__")
        self._class_attrs(inst)
        if found is not None:
            func, owner = found
            self.call_func(Func(func, owner.file, owner), [inst, *args], kwargs, node)
        elif (base := py.outside_base(cls)) is not None:
            inst.attrs[py.OUTSIDE] = ExtInstance(base, args, kwargs)
        else:
            self._dataclass_init(inst, args, kwargs)
        return inst

    def call_func(self, func: Func, args: list[Value], kwargs: dict[str, Value], node: ast.AST | None) -> Value:
        """Run a function of the files and return the join of its results."""
        parent = getattr(self, "frame", None)
        depth = parent.depth + 1 if parent is not None else 0
        if depth > MAX_DEPTH:
            return Unknown("recursion", tuple(args))
        frame = Frame(func.node, func.file, func.owner, {}, parent, node, depth=depth)
        if func.closure is not None:
            frame.env.update(func.closure.env)
        frame.call_stmt = parent.stmt if parent is not None else None
        frame.self_ = args[0] if func.owner is not None and args else None
        self.frames.append(frame)
        self.frame = frame
        try:
            self._bind(func, frame, args, kwargs)
            if isinstance(func.node, ast.Lambda):
                return self.eval(func.node.body)
            self.block(func.node.body)
            if not frame.returns:
                return Const(None)
            result = frame.returns[0][1]
            for _, other in frame.returns[1:]:
                result = self.join(result, other)
            return result
        finally:
            if parent is not None:
                self.frame = parent
            else:
                del self.frame

    # -- helpers used by rules -----------------------------------------------------------------------------

    def tensor(
        self, op: str, parents: list[Value], shape: tuple[Dim, ...] | None, node: ast.AST | None, **attrs: Any
    ) -> Tensor:
        frame = getattr(self, "frame", None)
        out = Tensor(op, tuple(parents), shape, node, frame, frame.stmt if frame else None, attrs)
        out.stream = any(isinstance(p, Tensor) and p.stream for p in parents) or (
            op == "embedding" and (not parents or any(_from_ids(p) for p in parents))
        )
        self.tensors.append(out)
        return out

    def measure(self, t: Tensor) -> Scalar:
        """The number in a tensor of one element: not known, but it is remembered whose it is."""
        dim = fresh()
        self.measured[next(iter(dim.atoms))] = t
        return Scalar(f"<item:{id(t)}>", dim)

    def quotient(self, total: Dim, rest: Dim) -> Dim:
        """`total // rest`, exact where possible; a quotient of settings stays an atom that remembers its value.

        Division by a parallel size is kept even when that size is 1 here: heads and heads per rank are
        different names for different things.
        """
        runtime = const(1)
        for atom in sorted(RUNTIME):
            unit = Dim.atom(atom)
            while (x := total.divide(unit)) is not None and total.terms:
                y = rest.divide(unit)
                total, rest, runtime = x, (y if y is not None else rest), runtime if y is not None else runtime * unit
        for atom in sorted(total.atoms & rest.atoms):
            unit = Dim.atom(atom)
            while (x := total.divide(unit)) is not None and (y := rest.divide(unit)) is not None and total.terms:
                total, rest = x, y
        exact = total.divide(rest)
        if exact is not None:
            return exact * runtime
        if total.value is not None and rest.value:
            return const(total.value // rest.value) * runtime
        text = f"({total})//({rest})"
        a, b = self.concrete_dim(total), self.concrete_dim(rest)
        if a is not None and a == b:
            return runtime
        if a is not None and b:
            self.dim_env[text] = a // b
            if a % b == 0:
                self.exact[text] = (total, rest)
        return Dim.atom(text) * runtime

    def simplify(self, dim: Dim) -> Dim:
        """k * (X // k) is X where k divides X."""
        out = const(0)
        for mono, coef in dim.terms:
            term = Dim(((mono, coef),))
            for name, _ in mono:
                if name in self.exact:
                    total, rest = self.exact[name]
                    if rest.value == coef and (other := Dim(((mono, 1),)).divide(Dim.atom(name))) is not None:
                        term = total * other
                        break
            out = out + term
        return out

    def taint(self, target: Value, values: list[Value]) -> None:
        """A write of hidden states into a tensor makes it, and what it is a view of, hidden states."""
        if not any(isinstance(v, Tensor) and v.stream for v in values):
            return
        t: Value | None = target
        while isinstance(t, Tensor) and not t.stream and t.op != "cache":
            t.stream = True
            t = t.parents[0] if t.op in shapes.LAYOUT | {"getitem"} and t.parents else None

    def fill(self, target: Value, value: Value | None, index: Value | None) -> None:
        """Hidden states written into a fresh buffer: from here on the buffer is made of them."""
        if not (isinstance(target, Tensor) and isinstance(value, Tensor) and value.stream):
            return
        if target.op not in FRESH | {"filled"} or target is value or target not in self.tensors:
            return  # what was made before this step is a state, no buffer of the step
        target.op = "filled"
        target.parents = (*target.parents, value)
        target.attrs.setdefault("index", index)
        self.tensors.remove(target)  # the order of creation stays the order of what depends on what
        self.tensors.append(target)

    def problem(self, node: ast.AST, kind: str, text: str) -> None:
        self.problems.append(Problem(node, self.frame, kind, text))

    def concrete_dim(self, dim: Dim) -> int | None:
        """The integer behind a dim, if all its atoms are known configuration values."""
        if dim.value is not None:
            return dim.value
        env: dict[str, int] = {}
        for name in dim.atoms:
            value = self.dim_env.get(name, MISSING)
            if value is MISSING:
                value = self.concrete(name)
            if isinstance(value, bool) or not isinstance(value, int):
                return None
            env[name] = value
        return dim.evaluate(env)

    def equal_dims(self, a: Dim, b: Dim) -> bool:
        """Equal as far as can be known: structurally, by wildcard, or by configuration values."""
        if a == b or a.wild or b.wild:
            return True
        if (a.atoms | b.atoms) & RUNTIME:
            # split off the runtime part: B*S*X against B*S*Y
            for atom in sorted((a.atoms & b.atoms) & RUNTIME):
                x, y = a.divide(Dim.atom(atom)), b.divide(Dim.atom(atom))
                if x is not None and y is not None:
                    return self.equal_dims(x, y)
            return False
        ca, cb = self.concrete_dim(a), self.concrete_dim(b)
        return ca == cb if ca is not None and cb is not None else True

    def as_dim(self, value: Value | None) -> Dim | None:
        if isinstance(value, Const) and isinstance(value.value, int) and not isinstance(value.value, bool):
            return const(value.value)
        if isinstance(value, Scalar):
            return self.known_dim(value.dim) if value.dim is not None else None
        if isinstance(value, Ref):
            if value.path in self.dim_alias:
                return self.dim_alias[value.path]
            known = self.concrete(value.path)
            if known is None or isinstance(known, bool) or (known is not MISSING and not isinstance(known, int)):
                return None
            return Dim.atom(value.path)
        return None

    def learn_batch(self, t: Tensor, sizes: list[Dim | None]) -> None:
        """A shim that folds packed ids by a count of unknown origin folds them by requests: that count is B."""
        if t.op in ("input:input_ids", "input:position_ids") and t.rank == 1 and len(sizes) == 2:
            first = sizes[0]
            if (
                first is not None
                and first.wild
                and len(first.atoms) == 1
                and first == Dim.atom(next(iter(first.atoms)))
            ):
                self.dim_alias[next(iter(first.atoms))] = Dim.atom("B")

    def known_dim(self, dim: Dim) -> Dim:
        """The dim with learned aliases put in."""
        if len(dim.atoms) == 1 and (name := next(iter(dim.atoms))) in self.dim_alias and dim == Dim.atom(name):
            return self.dim_alias[name]
        return dim

    def unit_dims(self, unit: Value) -> tuple[Dim, ...] | None:
        """The factors of a `cache_unit`: a tuple of sizes or one size."""
        items = unit.items if isinstance(unit, Tup) else [unit]
        dims = [self.as_dim(i) for i in items]
        return None if any(d is None for d in dims) else tuple(d for d in dims if d is not None)

    def as_text(self, value: Value) -> str:
        """Canonical text of a number-like value; equal texts mean equal values."""
        if isinstance(value, Const):
            return repr(value.value)
        if isinstance(value, Scalar):
            return str(value.dim) if value.dim is not None else value.text
        if isinstance(value, Ref):
            return value.path
        return f"<{type(value).__name__}:{id(value)}>"

    def truth(self, value: Value) -> bool | None:
        """True, False or None for not known."""
        if isinstance(value, Const):
            return bool(value.value)
        if isinstance(value, Ref):
            known = self.concrete(value.path)
            if known is MISSING and value.path in self.dim_alias:
                return True  # a count of requests is at least one
            return None if known is MISSING else bool(known)
        if isinstance(value, Scalar):
            number = self.concrete_dim(value.dim) if value.dim is not None else None
            return None if number is None else bool(number)
        if isinstance(value, Tup):
            return bool(value.items)
        if isinstance(value, Dict_):
            return True if value.items else (None if value.rest else False)
        if isinstance(value, (Instance, ExtInstance, ClassVal, Func, Bound, Partial, External)):
            return True
        if isinstance(value, ModuleSeq):
            return bool(value.items)
        return None

    def join(self, a: Value, b: Value) -> Value:
        """What is known when either may hold."""
        if a is b or self._equal(a, b):
            return a
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            shape = a.shape if a.shape is not None and a.shape == b.shape else None
            if shape is None and a.shape is not None and b.shape is not None:
                shape = _for_any_batch(a.shape, b.shape)
            if shape is None and a.shape is not None and b.shape is not None and len(a.shape) == len(b.shape):
                shape = tuple(x if x == y else fresh() for x, y in zip(a.shape, b.shape, strict=True))
            return self.tensor("join", [a, b], shape, None)
        if isinstance(a, Tup) and isinstance(b, Tup) and len(a.items) == len(b.items):
            return Tup([self.join(x, y) for x, y in zip(a.items, b.items, strict=True)])
        if isinstance(a, Tensor) and isinstance(b, Const) and b.value is None:
            return self.tensor("join", [a, b], a.shape, None)
        if isinstance(b, Tensor) and isinstance(a, Const) and a.value is None:
            return self.tensor("join", [b, a], b.shape, None)
        return Unknown("differs by branch", (a, b))

    @staticmethod
    def _equal(a: Value, b: Value) -> bool:
        return type(a) is type(b) and isinstance(a, (Const, Scalar, Ref, Bool, External)) and a == b

    # -- statements ----------------------------------------------------------------------------------------

    def block(self, stmts: list[ast.stmt]) -> str:
        """Run statements; returns next, return, raise, break or continue."""
        frame = self.frame
        for stmt in stmts:
            self.steps += 1
            if self.steps > MAX_STEPS:
                return "raise"
            frame.stmt = stmt
            frame.env_before[id(stmt)] = dict(frame.env)
            flow = self._stmt(stmt)
            frame.stmt = stmt
            if flow != "next":
                return flow
        return "next"

    def _stmt(self, stmt: ast.stmt) -> str:
        frame = self.frame
        if isinstance(stmt, ast.Expr):
            self.eval(stmt.value)
        elif isinstance(stmt, ast.Assign):
            value = self.eval(stmt.value)
            for target in stmt.targets:
                self._assign(target, value)
        elif isinstance(stmt, ast.AnnAssign):
            if stmt.value is not None:
                self._assign(stmt.target, self.eval(stmt.value))
        elif isinstance(stmt, ast.AugAssign):
            left = self.eval(_as_load(stmt.target))
            value = self._binop(stmt, type(stmt.op), left, self.eval(stmt.value))
            self._assign(stmt.target, value)
        elif isinstance(stmt, ast.Return):
            frame.returns.append((stmt, self.eval(stmt.value) if stmt.value else Const(None)))
            return "return"
        elif isinstance(stmt, ast.If):
            return self._if(stmt)
        elif isinstance(stmt, ast.Match):
            return self._match(stmt)
        elif isinstance(stmt, ast.For):
            return self._for(stmt)
        elif isinstance(stmt, ast.While):
            self._record_test(stmt.test, stmt, self.eval(stmt.test))
            self.block(stmt.body)
        elif isinstance(stmt, ast.With):
            for item in stmt.items:
                value = self.eval(item.context_expr)
                if item.optional_vars is not None:
                    self._assign(item.optional_vars, value)
            return self.block(stmt.body)
        elif isinstance(stmt, ast.Try):
            flow = self.block(stmt.body)
            if flow == "next":
                flow = self.block(stmt.orelse)
            self.block(stmt.finalbody)
            return flow if flow != "raise" else "next"
        elif isinstance(stmt, ast.Raise):
            return "raise"
        elif isinstance(stmt, ast.Break):
            return "break"
        elif isinstance(stmt, ast.Continue):
            return "continue"
        elif isinstance(stmt, ast.FunctionDef):
            frame.env[stmt.name] = Func(stmt, frame.file, None, frame)
        elif isinstance(stmt, (ast.Import, ast.ImportFrom)):
            py.bind_import(stmt, frame.env, self.modules, frame.file)
        elif isinstance(stmt, ast.Delete):
            for target in stmt.targets:
                if isinstance(target, ast.Name):
                    frame.env.pop(target.id, None)
        elif isinstance(stmt, ast.Assert):
            self._record_test(stmt.test, stmt, self.eval(stmt.test))
        return "next"

    def _if(self, stmt: ast.If) -> str:
        value = self.eval(stmt.test)
        self._record_test(stmt.test, stmt, value)
        known = self.truth(value)
        if known is not None:
            return self.block(stmt.body if known else stmt.orelse)
        frame = self.frame
        before = dict(frame.env)
        objects = self._snapshot(before)
        flow_a = self.block(stmt.body)
        env_a, attrs_a = frame.env, self._snapshot(before)
        frame.env = before
        self._restore(objects)
        flow_b = self.block(stmt.orelse)
        if flow_a != "next" and flow_b != "next":
            return flow_a if flow_a == flow_b else "next"
        if flow_a != "next":
            return "next"
        if flow_b != "next":
            frame.env = env_a
            self._restore(attrs_a)
            return "next"
        env_b = frame.env
        frame.env = {
            name: self.join(env_a[name], env_b[name])
            if name in env_a and name in env_b
            else Unknown("bound in one branch", (env_a.get(name) or env_b[name],))
            for name in {*env_a, *env_b}
        }
        for inst, attrs in attrs_a.items():
            for name, val in attrs.items():
                now = inst.attrs.get(name)
                inst.attrs[name] = val if now is None or now is val else self.join(val, now)
        return "next"

    def _match(self, stmt: ast.Match) -> str:
        """`match` on constants is a chain of comparisons; other patterns are not understood."""
        chain: list[ast.stmt] = []
        for case in reversed(stmt.cases):
            test = _case_test(stmt.subject, case)
            if test is None:
                self.problem(case.pattern, "match", "a pattern that is no constant")
                return "next"
            if isinstance(test, ast.Constant):
                chain = case.body
            else:
                chain = [ast.copy_location(ast.If(test, case.body, chain), stmt)]
        return self.block(chain)

    def _snapshot(self, env: dict[str, Value]) -> dict[Instance, dict[str, Value]]:
        found = {v for v in env.values() if isinstance(v, Instance)}
        return {inst: dict(inst.attrs) for inst in found}

    @staticmethod
    def _restore(objects: dict[Instance, dict[str, Value]]) -> None:
        for inst, attrs in objects.items():
            inst.attrs = dict(attrs)

    def _for(self, stmt: ast.For) -> str:
        items = py.iterate(self, self.eval(stmt.iter))
        if items is None:
            self._assign(stmt.target, Unknown("loop variable", ()))
            self.block(stmt.body)
        else:
            for item in items:
                self._assign(stmt.target, item)
                flow = self.block(stmt.body)
                if flow in ("return", "raise"):
                    return flow
                if flow == "break":
                    break
        return self.block(stmt.orelse)

    def _record_test(self, node: ast.expr, owner: ast.AST, value: Value) -> None:
        axes: set[str] = set()
        operands: list[Value] = []
        for part in ast.walk(node):
            val = self.frame.values.get(id(part))
            if isinstance(val, Scalar) and val.dim is not None and val.dim.atoms & RUNTIME:
                axes |= val.dim.atoms & RUNTIME
                operands.append(val)
            elif isinstance(val, Bool):
                axes |= val.axes
        self.tests.append(Test(node, self.frame, owner, value, frozenset(axes), tuple(operands)))

    def _assign(self, target: ast.expr, value: Value) -> None:
        frame = self.frame
        if isinstance(target, ast.Name):
            frame.env[target.id] = value
            frame.values[id(target)] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            self._unpack(target, value)
        elif isinstance(target, ast.Attribute):
            obj = self.eval(target.value)
            if isinstance(obj, Instance):
                obj.attrs[target.attr] = value
                if frame.stmt is not None:
                    obj.attr_nodes[target.attr] = frame.stmt
                if isinstance(value, (Instance, ExtInstance, ModuleSeq)) and self.naming:
                    py.name_children(value, f"{obj.path}.{target.attr}" if obj.path else target.attr)
                if not self._in_init(obj):
                    self.attr_writes.append(AttrWrite(target, frame, obj, target.attr, value))
        elif isinstance(target, ast.Subscript):
            obj = self.eval(target.value)
            self.eval(target.slice)
            self.item_writes.append((target, frame, obj, value))
            self.taint(obj, [value])
            self.fill(obj, value, self.frame.values.get(id(target.slice)))
            if isinstance(obj, Dict_):
                key = self.eval(target.slice)
                if isinstance(key, Const):
                    obj.items[key.value] = value
                else:
                    obj.rest = value if obj.rest is None else self.join(obj.rest, value)
            elif isinstance(obj, Tup):
                key = self.eval(target.slice)
                if isinstance(key, Const) and isinstance(key.value, int) and key.value < len(obj.items):
                    obj.items[key.value] = value
        elif isinstance(target, ast.Starred):
            self._assign(target.value, value)

    def _in_init(self, obj: Instance) -> bool:
        return any(isinstance(f.func, ast.FunctionDef) and f.func.name == "__init__" for f in self.frame.chain())

    def _unpack(self, target: ast.Tuple | ast.List, value: Value) -> None:
        n = len(target.elts)
        star = next((i for i, e in enumerate(target.elts) if isinstance(e, ast.Starred)), None)
        items: list[Value] | None = None
        if isinstance(value, Tup):
            items = list(value.items)
            if star is None and len(items) != n:
                self.problem(target, "rank", f"{len(items)} values unpacked into {n} names")
                items = None
        elif isinstance(value, Tensor):
            items = [self.tensor("select", [value], value.shape[1:] if value.shape else None, target) for _ in range(n)]
        if items is None:
            for elt in target.elts:
                self._assign(elt, Unknown("unpacked", (value,)))
            return
        if star is not None:
            tail = n - star - 1
            mid = items[star : len(items) - tail]
            items = [*items[:star], Tup(mid, is_list=True), *(items[len(items) - tail :] if tail else [])]
        for elt, item in zip(target.elts, items, strict=False):
            self._assign(elt, item)

    # -- expressions ---------------------------------------------------------------------------------------

    def eval(self, node: ast.expr) -> Value:
        value = self._eval(node)
        self.frame.values[id(node)] = value
        return value

    def _eval(self, node: ast.expr) -> Value:
        if isinstance(node, ast.Constant):
            return Const(node.value)
        if isinstance(node, ast.Name):
            return self._name(node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(node, self.eval(node.value))
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Subscript):
            return self._subscript(node)
        if isinstance(node, ast.BinOp):
            return self._binop(node, type(node.op), self.eval(node.left), self.eval(node.right))
        if isinstance(node, ast.UnaryOp):
            return self._unary(node)
        if isinstance(node, ast.BoolOp):
            return self._boolop(node)
        if isinstance(node, ast.Compare):
            return self._compare(node)
        if isinstance(node, ast.IfExp):
            test = self.eval(node.test)
            self._record_test(node.test, node, test)
            known = self.truth(test)
            if known is not None:
                return self.eval(node.body if known else node.orelse)
            return self.join(self.eval(node.body), self.eval(node.orelse))
        if isinstance(node, (ast.Tuple, ast.List)):
            items: list[Value] = []
            for elt in node.elts:
                if isinstance(elt, ast.Starred):
                    inner = self.eval(elt.value)
                    if isinstance(inner, (Tup, ModuleSeq)):
                        items.extend(inner.items)
                    else:
                        return Unknown("star of an unknown sequence", (inner,))
                else:
                    items.append(self.eval(elt))
            return Tup(items, is_list=isinstance(node, ast.List))
        if isinstance(node, ast.Dict):
            out = Dict_({})
            for key, val in zip(node.keys, node.values, strict=True):
                value = self.eval(val)
                if key is None:
                    if isinstance(value, Dict_):
                        out.items.update(value.items)
                        out.rest = value.rest or out.rest
                    else:
                        out.rest = value
                    continue
                k = self.eval(key)
                if isinstance(k, Const):
                    out.items[k.value] = value
                else:
                    name = self.concrete(k.path) if isinstance(k, Ref) else MISSING
                    if name is not MISSING:
                        out.items[name] = value
                    else:
                        out.rest = value
            return out
        if isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.SetComp)):
            return self._comprehension(node)
        if isinstance(node, ast.DictComp):
            return self._dictcomp(node)
        if isinstance(node, ast.Lambda):
            return Func(node, self.frame.file, None, self.frame)
        if isinstance(node, ast.JoinedStr):
            return self._fstring(node)
        if isinstance(node, ast.NamedExpr):
            value = self.eval(node.value)
            self._assign(node.target, value)
            return value
        if isinstance(node, ast.Starred):
            return self.eval(node.value)
        if isinstance(node, ast.Slice):
            return Unknown("slice")
        return Unknown(type(node).__name__)

    def _name(self, name: str) -> Value:
        env = self.frame.env
        if name in env:
            return env[name]
        globals_ = self.modules.get(self.frame.file.shown, {})
        if name in globals_:
            return globals_[name]
        return py.builtin(name)

    def _attribute(self, node: ast.Attribute, obj: Value) -> Value:
        name = node.attr
        if isinstance(obj, Instance):
            if name in obj.attrs:
                return obj.attrs[name]
            found = obj.method(name) if isinstance(obj, py.Super) else obj.cls.method(name)
            if found is not None:
                func, owner = found
                bound = Bound(obj.real if isinstance(obj, py.Super) else obj, Func(func, owner.file, owner))
                if any(isinstance(d, ast.Name) and d.id == "property" for d in func.decorator_list):
                    return self.call_func(Func(func, owner.file, owner), [obj], {}, node)
                if any(isinstance(d, ast.Name) and d.id in ("staticmethod",) for d in func.decorator_list):
                    return Func(func, owner.file, owner)
                return bound
            if name in ("__class__",):
                return obj.cls
            part = py.outside_part(obj)
            if part is not None and name not in ("__init__", "forward", "__call__"):
                return py.ext_attr(self, node, part, name)
            return Bound(obj, name)
        if isinstance(obj, Ref):
            return self._ref(f"{obj.path}.{name}")
        if isinstance(obj, External):
            return External(f"{obj.name}.{name}")
        if isinstance(obj, Tensor):
            return py.tensor_attr(self, node, obj, name)
        if isinstance(obj, ClassVal):
            found = obj.method(name)
            if found is not None:
                return Func(found[0], found[1].file, found[1])
            return enum_members(obj).get(name, Unknown(f"class attribute {name}"))
        if isinstance(obj, Const) and isinstance(obj.value, EnumMember) and name in ("name", "value"):
            return Const(getattr(obj.value, name))
        if isinstance(obj, Dict_) and name in obj.items and name not in ("items", "keys", "values", "get", "update"):
            return obj.items[name]
        if isinstance(obj, ExtInstance):
            return py.ext_attr(self, node, obj, name)
        if isinstance(obj, (Tup, Dict_, ModuleSeq, Const, Scalar, Bound)):
            return Bound(obj, name)
        return Unknown(f"attribute {name}", (obj,))

    def _ref(self, path: str) -> Value:
        known = self.concrete(path)
        if known is None or isinstance(known, (bool, str)):
            return Const(known, path) if known is None or isinstance(known, bool) else Ref(path)
        return Ref(path)

    def _subscript(self, node: ast.Subscript) -> Value:
        obj = self.eval(node.value)
        parts = self._index_parts(node.slice)
        index = parts[0] if len(parts) == 1 and isinstance(parts[0], Value) else None
        if isinstance(obj, Tensor):
            return shapes.getitem(self, node, obj, index or Unknown("index"), parts)
        return py.subscript(self, node, obj, index, parts)

    def _index_parts(self, node: ast.expr) -> list[Value | slice]:
        elts = node.elts if isinstance(node, ast.Tuple) else [node]
        out: list[Value | slice] = []
        for elt in elts:
            if isinstance(elt, ast.Slice):
                out.append(
                    slice(
                        self.eval(elt.lower) if elt.lower else None,
                        self.eval(elt.upper) if elt.upper else None,
                        self.eval(elt.step) if elt.step else None,
                    )
                )
            else:
                out.append(self.eval(elt))
        return out

    def _binop(self, node: ast.AST, op: type[ast.operator], a: Value, b: Value) -> Value:
        if op is ast.MatMult:
            if isinstance(a, Tensor) and isinstance(b, Tensor):
                return self.tensor("matmul", [a, b], shapes.matmul_shape(self, node, a.shape, b.shape), node)
            return Unknown("matmul", (a, b))
        name, func = _BINOPS[op]
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            shape_a = a.shape if isinstance(a, Tensor) else ()
            shape_b = b.shape if isinstance(b, Tensor) else ()
            if isinstance(a, Unknown) or isinstance(b, Unknown):
                shape = shape_b if isinstance(a, Unknown) else shape_a
            else:
                shape = shapes.broadcast(self, node, shape_a, shape_b)
            return self.tensor(name, [a, b], shape, node)
        if isinstance(a, Const) and isinstance(b, Const):
            try:
                return Const(func(a.value, b.value))
            except Exception:
                return Unknown("constant fold", (a, b))
        if isinstance(a, Tup) and isinstance(b, Tup) and name == "add":
            return Tup([*a.items, *b.items], a.is_list)
        if isinstance(a, Tup) and name == "mul" and isinstance(b, Const) and isinstance(b.value, int):
            return Tup(list(a.items) * b.value, a.is_list)
        x, y = self.as_dim(a), self.as_dim(b)
        if x is not None and y is not None and name in ("add", "sub", "mul", "floordiv"):
            if name == "floordiv":
                if y.value == 0:
                    return Unknown("division by zero")
                dim = self.quotient(x, y)
            else:
                dim = {"add": x + y, "sub": x - y, "mul": x * y}[name]
            return Const(dim.value) if dim.value is not None else Scalar(str(dim), dim)
        if self._number(a) and self._number(b):
            text = f"({self.as_text(a)}{_SIGN.get(name, name)}{self.as_text(b)})"
            dim2 = Dim.atom(text) if name == "mod" and x is not None and y is not None else None
            if dim2 is not None and x is not None and y is not None:
                cx, cy = self.concrete_dim(x), self.concrete_dim(y)
                if cx is not None and cy:
                    self.dim_env[text] = cx % cy
            return Scalar(text, dim2)
        return Unknown(name, (a, b))

    @staticmethod
    def _number(value: Value) -> bool:
        if isinstance(value, Const):
            return isinstance(value.value, (int, float)) and not isinstance(value.value, bool)
        return isinstance(value, (Scalar, Ref))

    def _unary(self, node: ast.UnaryOp) -> Value:
        value = self.eval(node.operand)
        if isinstance(node.op, ast.Not):
            known = self.truth(value)
            if known is not None:
                return Const(not known, value.origin if isinstance(value, Const) else "")
            return Bool(f"not {self.as_text(value)}", value.axes if isinstance(value, Bool) else frozenset())
        if isinstance(value, Tensor):
            name = {ast.USub: "neg", ast.Invert: "invert", ast.UAdd: "pos"}[type(node.op)]
            return self.tensor(name, [value], value.shape, node)
        if isinstance(value, Const) and isinstance(node.op, (ast.USub, ast.UAdd, ast.Invert)):
            try:
                return Const(_UNARY[type(node.op)](value.value))
            except Exception:
                return Unknown("unary")
        dim = self.as_dim(value)
        if dim is not None and isinstance(node.op, ast.USub):
            return Scalar(str(-dim), -dim)
        if self._number(value) and isinstance(node.op, ast.USub):
            return Scalar(f"(-{self.as_text(value)})")
        return Unknown("unary", (value,))

    def _boolop(self, node: ast.BoolOp) -> Value:
        is_and = isinstance(node.op, ast.And)
        unknown: list[Value] = []
        last: Value = Const(is_and)
        for part in node.values:
            last = self.eval(part)
            known = self.truth(last)
            if known is None:
                unknown.append(last)
            elif known is not is_and:
                return last if not unknown else (Const(False) if is_and else last)
        if not unknown:
            return last
        if len(unknown) == 1 and unknown[0] is last:
            return last
        axes: frozenset[str] = frozenset()
        for value in unknown:
            if isinstance(value, Bool):
                axes |= value.axes
        if not is_and and len(unknown) == 1 and not isinstance(unknown[0], Bool):
            return self.join(unknown[0], last)
        return Bool("and" if is_and else "or", axes)

    def _compare(self, node: ast.Compare) -> Value:
        values = [self.eval(node.left), *(self.eval(c) for c in node.comparators)]
        if len(node.ops) != 1:
            return Bool("chained comparison")
        a, b, op = values[0], values[1], node.ops[0]
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            if isinstance(op, (ast.Is, ast.IsNot)):
                none = Const(None)
                if (isinstance(b, Const) and b == none) or (isinstance(a, Const) and a == none):
                    other = a if isinstance(b, Const) else b
                    if isinstance(other, Tensor) and other.op != "join":
                        return Const(isinstance(op, ast.IsNot))
                    if isinstance(other, Tensor) and not any(p == none for p in other.parents):
                        return Const(isinstance(op, ast.IsNot))
                return Bool("is")
            shape_a = a.shape if isinstance(a, Tensor) else ()
            shape_b = b.shape if isinstance(b, Tensor) else ()
            name = {
                ast.Eq: "eq",
                ast.NotEq: "ne",
                ast.Lt: "lt",
                ast.LtE: "le",
                ast.Gt: "gt",
                ast.GtE: "ge",
            }.get(type(op), "cmp")
            return self.tensor(name, [a, b], shapes.broadcast(self, node, shape_a, shape_b), node)
        return py.compare(self, op, a, b, _CMP)

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp) -> Value:
        if len(node.generators) != 1:
            return Unknown("nested comprehension")
        gen = node.generators[0]
        items = py.iterate(self, self.eval(gen.iter))
        if items is None:
            saved = dict(self.frame.env)
            self._assign(gen.target, Unknown("loop variable"))
            elt = self.eval(node.elt)
            self.frame.env = saved
            return Unknown("comprehension over an unknown sequence", (elt,))
        out: list[Value] = []
        saved = dict(self.frame.env)
        for item in items:
            self._assign(gen.target, item)
            keep = True
            for cond in gen.ifs:
                known = self.truth(self.eval(cond))
                keep = keep and known is not False
            if keep:
                out.append(self.eval(node.elt))
        self.frame.env = saved
        return Tup(out, is_list=True)

    def _dictcomp(self, node: ast.DictComp) -> Value:
        if len(node.generators) != 1:
            return Unknown("nested comprehension")
        gen = node.generators[0]
        items = py.iterate(self, self.eval(gen.iter))
        if items is None:
            return Unknown("comprehension over an unknown sequence")
        out = Dict_({})
        saved = dict(self.frame.env)
        for item in items:
            self._assign(gen.target, item)
            key, value = self.eval(node.key), self.eval(node.value)
            if isinstance(key, Const):
                out.items[key.value] = value
            else:
                known = self.concrete(key.path) if isinstance(key, Ref) else MISSING
                if known is not MISSING:
                    out.items[known] = value
                else:
                    out.rest = value
        self.frame.env = saved
        return out

    def _fstring(self, node: ast.JoinedStr) -> Value:
        text = ""
        for part in node.values:
            if isinstance(part, ast.Constant):
                text += str(part.value)
            elif isinstance(part, ast.FormattedValue):
                value = self.eval(part.value)
                if isinstance(value, Const):
                    text += str(value.value)
                elif isinstance(value, Ref) and isinstance(self.concrete(value.path), (str, int)):
                    text += str(self.concrete(value.path))
                else:
                    return Scalar("<str>")
        return Const(text)

    # -- calls ---------------------------------------------------------------------------------------------

    def _call(self, node: ast.Call) -> Value:
        if isinstance(node.func, ast.Name) and node.func.id == "super":
            return py.super_proxy(self)
        callee = self.eval(node.func)
        args: list[Value] = []
        for arg in node.args:
            if isinstance(arg, ast.Starred):
                inner = self.eval(arg.value)
                if isinstance(inner, (Tup, ModuleSeq)):
                    args.extend(inner.items)
                else:
                    args.append(Unknown("star argument", (inner,)))
            else:
                args.append(self.eval(arg))
        kwargs: dict[str, Value] = {}
        for kw in node.keywords:
            value = self.eval(kw.value)
            if kw.arg is None:
                if isinstance(value, Dict_):
                    kwargs.update({k: v for k, v in value.items.items() if isinstance(k, str)})
            else:
                kwargs[kw.arg] = value
        return self.apply(callee, args, kwargs, node)

    def apply(self, callee: Value, args: list[Value], kwargs: dict[str, Value], node: ast.Call) -> Value:
        """Call a value."""
        if isinstance(callee, ClassVal):
            if callee.external_bases() & ENUM_BASES:
                return py.enum_by_value(self, callee, args)
            return self.construct(callee, args, kwargs, "", node)
        if isinstance(callee, Func):
            return self.call_func(callee, args, kwargs, node)
        if isinstance(callee, Bound):
            if isinstance(callee.func, Func):
                return self.call_func(callee.func, [callee.self_, *args], kwargs, node)
            return py.call_method(self, node, callee.self_, callee.func, args, kwargs)
        if isinstance(callee, Instance):
            found = callee.cls.method("forward") or callee.cls.method("__call__")
            if found is None and (part := py.outside_part(callee)) is not None:
                return call_ext_instance(self, part, args, kwargs, node)
            if found is None:
                return Unknown(f"call of {callee.cls.name}", tuple(args))
            func, owner = found
            return self.call_func(Func(func, owner.file, owner), [callee, *args], kwargs, node)
        if isinstance(callee, ModuleSeq):
            value: Value = args[0] if args else Unknown("no argument")
            for item in callee.items:
                value = self.apply(item, [value], {}, node)
            return value
        if isinstance(callee, Partial):
            return self.apply(callee.func, [*callee.args, *args], {**callee.kwargs, **kwargs}, node)
        if isinstance(callee, External):
            return call_external(self, callee.name, args, kwargs, node)
        if isinstance(callee, ExtInstance):
            return call_ext_instance(self, callee, args, kwargs, node)
        if isinstance(callee, Ref) and callee.path.endswith(".get") and args:
            return py.get_setting(self, callee.path.removesuffix(".get"), args)
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if tensors or isinstance(callee, Ref):
            return (
                self.tensor("?call", [*args, *kwargs.values()], None, node) if tensors else Unknown("call", tuple(args))
            )
        return Unknown("call", (callee, *args))

    def record_call(
        self, name: str, node: ast.Call, args: list[Value], kwargs: dict[str, Value], result: Value
    ) -> None:
        self.calls.append(Call(name, node, self.frame, self.frame.stmt, args, kwargs, result))

    def _bind(self, func: Func, frame: Frame, args: list[Value], kwargs: dict[str, Value]) -> None:
        spec = func.node.args
        params = [*spec.posonlyargs, *spec.args]
        rest = dict(kwargs)
        for param, arg in zip(params, args, strict=False):
            frame.env[param.arg] = arg
        if spec.vararg is not None:
            frame.env[spec.vararg.arg] = Tup(list(args[len(params) :]))
        defaults = dict(zip([p.arg for p in params][len(params) - len(spec.defaults) :], spec.defaults, strict=True))
        defaults |= {p.arg: d for p, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if d is not None}
        for param in [*params[len(args) :], *spec.kwonlyargs]:
            if param.arg in rest:
                frame.env[param.arg] = rest.pop(param.arg)
            elif param.arg in defaults:
                frame.env[param.arg] = self.eval(defaults[param.arg])
            else:
                frame.env[param.arg] = Unknown(f"argument {param.arg} not given")
        if spec.kwarg is not None:
            frame.env[spec.kwarg.arg] = Dict_(dict(rest))

    def _class_attrs(self, inst: Instance) -> None:
        for cls in reversed(inst.cls.mro()):
            for item in cls.node.body:
                if isinstance(item, ast.Assign) and len(item.targets) == 1 and isinstance(item.targets[0], ast.Name):
                    if isinstance(item.value, ast.Constant):
                        inst.attrs[item.targets[0].id] = Const(item.value.value)

    def _dataclass_init(self, inst: Instance, args: list[Value], kwargs: dict[str, Value]) -> None:
        names = [
            item.target.id
            for cls in reversed(inst.cls.mro())
            for item in cls.node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        ]
        inst.attrs.update(dict(zip(names, args, strict=False)))
        inst.attrs.update(kwargs)


def _for_any_batch(a: tuple[Dim, ...], b: tuple[Dim, ...]) -> tuple[Dim, ...] | None:
    """Two shapes that are one for a batch of one: the one that holds for any batch."""
    if len(a) != len(b):
        return None
    one_a, one_b = (tuple(_without_batch(d) for d in s) for s in (a, b))
    if one_a != one_b:
        return None
    return a if a[:1] == (Dim.atom("B"),) else b


def _without_batch(dim: Dim) -> Dim:
    return dim.divide(Dim.atom("B")) or (const(1) if dim == Dim.atom("B") else dim)


def _from_ids(value: Value) -> bool:
    """Is it computed from the token ids?"""
    todo, seen = [value], set()
    while todo:
        t = todo.pop()
        if not isinstance(t, Tensor) or id(t) in seen:
            continue
        if t.op == "input:input_ids":
            return True
        seen.add(id(t))
        todo.extend(t.parents)
    return False


def _case_test(subject: ast.expr, case: ast.match_case) -> ast.expr | None:
    """The condition of a case: True for the one that takes everything, None for what is not understood."""
    pattern = case.pattern
    test: ast.expr
    if isinstance(pattern, ast.MatchAs) and pattern.pattern is None and pattern.name is None:
        test = ast.Constant(True)
    elif isinstance(pattern, ast.MatchValue):
        test = ast.Compare(subject, [ast.Eq()], [pattern.value])
    elif isinstance(pattern, ast.MatchSingleton):
        test = ast.Compare(subject, [ast.Is()], [ast.Constant(pattern.value)])
    elif isinstance(pattern, ast.MatchOr) and all(isinstance(p, ast.MatchValue) for p in pattern.patterns):
        values = [p.value for p in pattern.patterns if isinstance(p, ast.MatchValue)]
        test = ast.Compare(subject, [ast.In()], [ast.Tuple(values, ast.Load())])
    else:
        return None
    if case.guard is not None:
        test = case.guard if isinstance(test, ast.Constant) else ast.BoolOp(ast.And(), [test, case.guard])
    return ast.fix_missing_locations(ast.copy_location(test, pattern))


def _as_load(node: ast.expr) -> ast.expr:
    """The same expression read instead of written; keeps its position."""
    copy: ast.expr
    if isinstance(node, ast.Name):
        copy = ast.Name(node.id, ast.Load())
    elif isinstance(node, ast.Attribute):
        copy = ast.Attribute(node.value, node.attr, ast.Load())
    elif isinstance(node, ast.Subscript):
        copy = ast.Subscript(node.value, node.slice, ast.Load())
    else:
        return node
    return ast.copy_location(copy, node)
