"""Expressions of configuration classes: literals, arithmetic, comprehensions, `getattr`, own functions and classes.

What is not known becomes UNKNOWN, and so does everything made from it. Steps and sizes are bounded, so that hostile
input ends.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["MAX_ITEMS", "RUNNING", "UNKNOWN", "Expressions", "TooLongError"]

_STEPS = 200_000
MAX_ITEMS = 20_000


class _UnknownType:
    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = _UnknownType()


class TooLongError(Exception):
    """Evaluation ran too long."""


@dataclass(frozen=True)
class _ClassRef:
    """A configuration class of the file, as a value."""

    name: str


RUNNING = object()  # a block ended without `return`


class Expressions:
    """Evaluates expressions; a subclass runs statements and builds instances."""

    steps: int
    classes: dict[str, ast.ClassDef]
    functions: dict[str, ast.FunctionDef]
    globals: dict[str, Any]
    active: list[str]

    def instance(
        self, name: str, given: list[Any] | None = None, named: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, int]]:
        """Attributes of `name(*given, **named)` and their lines."""
        raise NotImplementedError

    def block(self, body: list[ast.stmt], env: dict[str, Any], attrs: dict[str, Any], lines: dict[str, int]) -> Any:
        """Run statements; the value of a `return`, else RUNNING."""
        raise NotImplementedError

    def store(
        self, target: ast.expr, value: Any, env: dict[str, Any], attrs: dict[str, Any], lines: dict[str, int]
    ) -> None:
        """Assign to a target."""
        raise NotImplementedError

    def expr(self, node: ast.expr, env: dict[str, Any], attrs: dict[str, Any]) -> Any:
        """The value of an expression, or UNKNOWN."""
        self.tick()
        handler: Callable[..., Any] | None = getattr(self, f"_x_{type(node).__name__.lower()}", None)
        if handler is None:
            return UNKNOWN
        try:
            return handler(node, env, attrs)
        except (
            TypeError,
            ValueError,
            KeyError,
            IndexError,
            ZeroDivisionError,
            AttributeError,
            OverflowError,
        ):
            return UNKNOWN

    def _x_constant(self, node: ast.Constant, env: dict[str, Any], attrs: dict[str, Any]) -> Any:
        return node.value if isinstance(node.value, (int, float, str, bool, type(None))) else UNKNOWN

    def _x_name(self, node: ast.Name, env: dict[str, Any], attrs: dict[str, Any]) -> Any:
        if node.id in self.classes and node.id not in env:
            return _ClassRef(node.id)
        return env.get(node.id, self.globals.get(node.id, UNKNOWN))

    def _x_attribute(self, node: ast.Attribute, env: dict[str, Any], attrs: dict[str, Any]) -> Any:
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            return attrs.get(node.attr, UNKNOWN)
        text = ast.unparse(node)
        if text.startswith("torch."):  # torch.bfloat16 stands in config.json as "bfloat16"
            return node.attr
        owner = self.expr(node.value, env, attrs)
        return owner.get(node.attr, UNKNOWN) if isinstance(owner, dict) else UNKNOWN

    def _x_list(self, node: ast.List, env: dict[str, Any], attrs: dict[str, Any]) -> Any:
        return [self.expr(e, env, attrs) for e in node.elts]

    def _x_tuple(self, node: ast.Tuple, env: dict[str, Any], attrs: dict[str, Any]) -> Any:
        return [self.expr(e, env, attrs) for e in node.elts]

    def _x_dict(self, node: ast.Dict, env: dict[str, Any], attrs: dict[str, Any]) -> Any:
        out: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            found = self.expr(value, env, attrs)
            if key is None:
                out.update(found)
            else:
                out[self.expr(key, env, attrs)] = found
        return out

    def _x_binop(self, node: ast.BinOp, env: dict[str, Any], attrs: dict[str, Any]) -> Any:
        left, right = self.expr(node.left, env, attrs), self.expr(node.right, env, attrs)
        if left is UNKNOWN or right is UNKNOWN:
            return UNKNOWN
        if isinstance(node.op, ast.Mult) and isinstance(left, (list, str)) and len(left) * right > MAX_ITEMS:
            return UNKNOWN
        if isinstance(node.op, ast.Pow) and abs(right) > 64:
            return UNKNOWN
        function = _BINARY.get(type(node.op))
        return UNKNOWN if function is None else function(left, right)

    def _x_unaryop(self, node: ast.UnaryOp, env: dict[str, Any], attrs: dict[str, Any]) -> Any:
        value = self.expr(node.operand, env, attrs)
        if value is UNKNOWN:
            return UNKNOWN
        return not value if isinstance(node.op, ast.Not) else -value if isinstance(node.op, ast.USub) else +value

    def _x_boolop(self, node: ast.BoolOp, env: dict[str, Any], attrs: dict[str, Any]) -> Any:
        value: Any = UNKNOWN
        for part in node.values:
            value = self.expr(part, env, attrs)
            if value is UNKNOWN or bool(value) is isinstance(node.op, ast.Or):
                return value
        return value

    def _x_compare(self, node: ast.Compare, env: dict[str, Any], attrs: dict[str, Any]) -> Any:
        left = self.expr(node.left, env, attrs)
        for op, right_node in zip(node.ops, node.comparators, strict=True):
            right = self.expr(right_node, env, attrs)
            if left is UNKNOWN or right is UNKNOWN:
                return UNKNOWN
            if not _COMPARE[type(op)](left, right):
                return False
            left = right
        return True

    def _x_ifexp(self, node: ast.IfExp, env: dict[str, Any], attrs: dict[str, Any]) -> Any:
        test = self.expr(node.test, env, attrs)
        if test is UNKNOWN:
            return UNKNOWN
        return self.expr(node.body if test else node.orelse, env, attrs)

    def _x_subscript(self, node: ast.Subscript, env: dict[str, Any], attrs: dict[str, Any]) -> Any:
        owner = self.expr(node.value, env, attrs)
        if isinstance(node.slice, ast.Slice):
            parts = [
                None if p is None else self.expr(p, env, attrs)
                for p in (node.slice.lower, node.slice.upper, node.slice.step)
            ]
            return UNKNOWN if UNKNOWN in parts or owner is UNKNOWN else owner[slice(*parts)]
        key = self.expr(node.slice, env, attrs)
        return UNKNOWN if owner is UNKNOWN or key is UNKNOWN else owner[key]

    def _x_listcomp(self, node: ast.ListComp, env: dict[str, Any], attrs: dict[str, Any]) -> Any:
        if len(node.generators) != 1:
            return UNKNOWN
        generator = node.generators[0]
        items = self.expr(generator.iter, env, attrs)
        if items is UNKNOWN or len(items) > MAX_ITEMS:
            return UNKNOWN
        out = []
        for item in items:
            inner = dict(env)
            self.store(generator.target, item, inner, attrs, {})
            tests = [self.expr(t, inner, attrs) for t in generator.ifs]
            if UNKNOWN in tests:
                return UNKNOWN
            if all(tests):
                out.append(self.expr(node.elt, inner, attrs))
        return out

    _x_generatorexp = _x_listcomp

    def _x_joinedstr(self, node: ast.JoinedStr, env: dict[str, Any], attrs: dict[str, Any]) -> Any:
        return UNKNOWN

    def _x_call(self, node: ast.Call, env: dict[str, Any], attrs: dict[str, Any]) -> Any:
        args = [self.expr(a, env, attrs) for a in node.args]
        func = node.func
        if isinstance(func, ast.Attribute):
            return self._method(func, args, env, attrs)
        name = func.id if isinstance(func, ast.Name) else ""
        maker = None if name in _BUILTINS else self.expr(func, env, attrs)
        if isinstance(maker, _ClassRef):
            made = self.instance(maker.name, args, self.keywords(node, env, attrs))[0]
            return {k: v for k, v in made.items() if v is not UNKNOWN}
        if name in self.functions:
            return self._user_function(self.functions[name], node, env, attrs)
        if name == "getattr" and len(args) >= 2:
            owner = attrs if ast.unparse(node.args[0]) == "self" else args[0]
            if isinstance(owner, dict) and isinstance(args[1], str):
                return owner.get(args[1], args[2] if len(args) > 2 else UNKNOWN)
            return UNKNOWN
        if name == "hasattr" and len(args) == 2 and ast.unparse(node.args[0]) == "self":
            return args[1] in attrs
        if name == "isinstance" and len(args) == 2 and args[0] is not UNKNOWN:
            kinds = {"dict": dict, "list": list, "int": int, "str": str, "float": float, "bool": bool}
            kind = kinds.get(ast.unparse(node.args[1]))
            return UNKNOWN if kind is None else isinstance(args[0], kind)
        if name == "range" and UNKNOWN not in args:
            numbers = range(*args)
            return numbers if len(numbers) <= MAX_ITEMS else UNKNOWN
        if name == "field":  # dataclass field(default=...) / field(default_factory=list)
            return self._field(node, env, attrs)
        function = _BUILTINS.get(name)
        if function is None or UNKNOWN in args or node.keywords:
            return UNKNOWN
        return function(*args)

    def keywords(self, node: ast.Call, env: dict[str, Any], attrs: dict[str, Any]) -> dict[str, Any]:
        named: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.expr(keyword.value, env, attrs)
            if keyword.arg:
                named[keyword.arg] = value
            elif isinstance(value, dict):
                named.update(value)
        return named

    def _user_function(
        self, function: ast.FunctionDef, node: ast.Call, env: dict[str, Any], attrs: dict[str, Any]
    ) -> Any:
        """The result of a function of the same file, run with the arguments at hand."""
        if function.name in self.active:
            return UNKNOWN
        given = [self.expr(a, env, attrs) for a in node.args]
        names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
        local: dict[str, Any] = {}
        defaults = function.args.defaults
        for name, default in zip(reversed(names), reversed(defaults), strict=False):
            local[name] = self.expr(default, {}, {})
        local.update(zip(names, given, strict=False))
        if function.args.vararg:
            local[function.args.vararg.arg] = given[len(names) :]
        local.update(self.keywords(node, env, attrs))
        self.active.append(function.name)
        try:
            result = self.block(function.body, local, {}, {})
        finally:
            self.active.pop()
        return None if result is RUNNING else result

    def _field(self, node: ast.Call, env: dict[str, Any], attrs: dict[str, Any]) -> Any:
        for keyword in node.keywords:
            if keyword.arg == "default":
                return self.expr(keyword.value, env, attrs)
            if keyword.arg == "default_factory":
                if isinstance(keyword.value, ast.Lambda):
                    return self.expr(keyword.value.body, env, attrs)
                return {"list": [], "dict": {}}.get(ast.unparse(keyword.value), UNKNOWN)
        return UNKNOWN

    def _method(self, func: ast.Attribute, args: list[Any], env: dict[str, Any], attrs: dict[str, Any]) -> Any:
        owner = self.expr(func.value, env, attrs)
        if isinstance(owner, dict) and func.attr in ("get", "pop") and args and args[0] is not UNKNOWN:
            default = args[1] if len(args) > 1 else None
            return owner.get(args[0], default)
        if isinstance(owner, dict) and func.attr in ("copy", "keys", "values", "items") and not args:
            return {
                "copy": dict(owner),
                "keys": list(owner),
                "values": list(owner.values()),
                "items": [list(i) for i in owner.items()],
            }[func.attr]
        if isinstance(owner, list) and func.attr in ("copy", "count", "index"):
            return getattr(owner, func.attr)(*args)
        if isinstance(owner, str) and func.attr in ("lower", "upper", "startswith", "endswith", "split"):
            return getattr(owner, func.attr)(*args)
        return UNKNOWN

    def tick(self) -> None:
        self.steps += 1
        if self.steps > _STEPS:
            raise TooLongError


_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
}
_COMPARE: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: lambda a, b: a is b,
    ast.IsNot: lambda a, b: a is not b,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_BUILTINS: dict[str, Callable[..., Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "len": len,
    "abs": abs,
    "max": max,
    "min": min,
    "sum": sum,
    "round": round,
    "list": list,
    "tuple": list,
    "dict": dict,
    "set": list,
    "sorted": sorted,
    "all": all,
    "any": any,
    "enumerate": lambda x: [[i, v] for i, v in enumerate(x)],
}
