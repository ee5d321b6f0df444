"""Runs the constructors of configuration classes, as far as they are made of what `static_expr` can evaluate."""

from __future__ import annotations

import ast
from typing import Any

from kvskill.analyzer.static_expr import MAX_ITEMS, RUNNING, UNKNOWN, Expressions, TooLongError
from kvskill.source import SourceFile

__all__ = ["UNKNOWN", "Evaluator"]


class Evaluator(Expressions):
    def __init__(self, source: SourceFile) -> None:
        self.source = source
        self.steps = 0
        self.classes = {s.name: s for s in source.tree.body if isinstance(s, ast.ClassDef)}
        self.functions = {s.name: s for s in source.tree.body if isinstance(s, ast.FunctionDef)}
        self.active: list[str] = []
        self.parents: list[ast.ClassDef] = []  # classes below the one whose __init__ runs, base first
        self.globals: dict[str, Any] = {}
        for stmt in source.tree.body:
            if isinstance(stmt, ast.Assign) and isinstance(stmt.targets[0], ast.Name):
                self.globals[stmt.targets[0].id] = self.expr(stmt.value, {}, {})

    def instance(
        self, name: str, given: list[Any] | None = None, named: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, int]]:
        """Attributes of `name(*given, **named)` and their lines."""
        attrs: dict[str, Any] = {}
        lines: dict[str, int] = {}
        if name in self.active:
            return attrs, lines
        self.active.append(name)
        try:
            chain = self._bases(name)
            for node in chain:
                for stmt in node.body:
                    self._class_attribute(stmt, attrs, lines)
            self._construct(list(chain), given or [], named or {}, attrs, lines)
        except (TooLongError, RecursionError):
            pass
        finally:
            self.active.pop()
        return attrs, lines

    def _bases(self, name: str) -> list[ast.ClassDef]:
        """The class and its bases within the file, base first."""
        out: list[ast.ClassDef] = []
        node = self.classes.get(name)
        while node is not None and node not in out:
            out.insert(0, node)
            base = next((ast.unparse(b) for b in node.bases if ast.unparse(b) in self.classes), None)
            node = self.classes.get(base) if base else None
        return out

    def _class_attribute(self, stmt: ast.stmt, attrs: dict[str, Any], lines: dict[str, int]) -> None:
        if isinstance(stmt, ast.Assign) and isinstance(stmt.targets[0], ast.Name):
            target, value = stmt.targets[0], stmt.value
        elif isinstance(stmt, ast.AnnAssign) and isinstance(stmt.target, ast.Name) and stmt.value is not None:
            target, value = stmt.target, stmt.value
        else:
            return
        found = self.expr(value, {}, attrs)
        if found is not UNKNOWN or target.id not in attrs:
            attrs[target.id] = found
            lines[target.id] = stmt.lineno

    def _construct(
        self,
        chain: list[ast.ClassDef],
        given: list[Any],
        named: dict[str, Any],
        attrs: dict[str, Any],
        lines: dict[str, int],
    ) -> None:
        """Run the nearest `__init__` of a chain (base first); without one, the outer base keeps its
        keywords.
        """
        while chain:
            node = chain.pop()
            for stmt in node.body:
                if isinstance(stmt, ast.FunctionDef) and stmt.name == "__init__":
                    self._run_init(stmt, chain, given, named, attrs, lines)
                    return
        for key, value in named.items():
            if key not in attrs:
                attrs[key] = value

    def _run_init(
        self,
        init: ast.FunctionDef,
        parents: list[ast.ClassDef],
        given: list[Any],
        named: dict[str, Any],
        attrs: dict[str, Any],
        lines: dict[str, int],
    ) -> None:
        env: dict[str, Any] = {}
        args = init.args
        positional = [*args.posonlyargs, *args.args][1:]
        for arg, default in zip(reversed(positional), reversed(args.defaults), strict=False):
            env[arg.arg] = self.expr(default, {}, attrs)
        for arg, kw_default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
            env[arg.arg] = UNKNOWN if kw_default is None else self.expr(kw_default, {}, attrs)
        for arg in positional:
            env.setdefault(arg.arg, UNKNOWN)
        for arg, value in zip(positional, given, strict=False):
            env[arg.arg] = value
        names = {a.arg for a in (*positional, *args.kwonlyargs)}
        env.update({k: v for k, v in named.items() if k in names})
        if args.kwarg:
            env[args.kwarg.arg] = {k: v for k, v in named.items() if k not in names}
        outer, self.parents = self.parents, parents
        self.block(init.body, env, attrs, lines)
        self.parents = outer

    def block(self, body: list[ast.stmt], env: dict[str, Any], attrs: dict[str, Any], lines: dict[str, int]) -> Any:
        """Run statements; the value of a `return`, else RUNNING."""
        for stmt in body:
            self.tick()
            if isinstance(stmt, ast.Return):
                return None if stmt.value is None else self.expr(stmt.value, env, attrs)
            if isinstance(stmt, ast.Raise):
                return UNKNOWN
            ended: Any = RUNNING
            if isinstance(stmt, ast.Assign):
                value = self.expr(stmt.value, env, attrs)
                for target in stmt.targets:
                    self.store(target, value, env, attrs, lines)
            elif isinstance(stmt, ast.AnnAssign) and stmt.value is not None:
                self.store(stmt.target, self.expr(stmt.value, env, attrs), env, attrs, lines)
            elif isinstance(stmt, ast.AugAssign):
                both = ast.BinOp(stmt.target, stmt.op, stmt.value)
                self.store(stmt.target, self.expr(both, env, attrs), env, attrs, lines)
            elif isinstance(stmt, ast.If):
                ended = self._branch(stmt, env, attrs, lines)
            elif isinstance(stmt, ast.For):
                ended = self._loop(stmt, env, attrs, lines)
            elif isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Call):
                self._call_statement(stmt.value, env, attrs, lines)
            if ended is not RUNNING:
                return ended
        return RUNNING

    def _branch(self, stmt: ast.If, env: dict[str, Any], attrs: dict[str, Any], lines: dict[str, int]) -> Any:
        test = self.expr(stmt.test, env, attrs)
        if test is not UNKNOWN:
            return self.block(stmt.body if test else stmt.orelse, env, attrs, lines)
        for branch in (stmt.body, stmt.orelse):  # either may run: what they assign is not known
            for node in ast.walk(ast.Module(branch, [])):
                if isinstance(node, ast.Return):
                    return UNKNOWN
                if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
                    self.store(node, UNKNOWN, env, attrs, lines)
        return RUNNING

    def _loop(self, stmt: ast.For, env: dict[str, Any], attrs: dict[str, Any], lines: dict[str, int]) -> Any:
        items = self.expr(stmt.iter, env, attrs)
        if isinstance(items, dict):
            items = list(items)
        if not isinstance(items, (list, tuple, range)) or len(items) > MAX_ITEMS:
            return RUNNING
        for item in items:
            self.store(stmt.target, item, env, attrs, lines)
            ended = self.block(stmt.body, env, attrs, lines)
            if ended is not RUNNING:
                return ended
        return RUNNING

    def _call_statement(
        self, call: ast.Call, env: dict[str, Any], attrs: dict[str, Any], lines: dict[str, int]
    ) -> None:
        """`super().__init__(pad_token_id=..., **kwargs)` sets what it is given; `x.append(v)` extends a
        list.
        """
        func = call.func
        if not isinstance(func, ast.Attribute):
            return
        if func.attr == "__init__":
            named = self.keywords(call, env, attrs)
            given = [self.expr(a, env, attrs) for a in call.args if ast.unparse(a) != "self"]
            before = set(attrs)
            self._construct(list(self.parents), given, named, attrs, lines)
            lines.update({k: call.lineno for k in attrs.keys() - before if k not in lines})
        elif func.attr in ("append", "extend", "update") and len(call.args) == 1:
            owner, value = self.expr(func.value, env, attrs), self.expr(call.args[0], env, attrs)
            if isinstance(owner, list) and func.attr == "append" and len(owner) < MAX_ITEMS:
                owner.append(value)
            elif isinstance(owner, list) and func.attr == "extend" and isinstance(value, (list, tuple)):
                owner.extend(value)
            elif isinstance(owner, dict) and func.attr == "update" and isinstance(value, dict):
                owner.update(value)

    def store(
        self, target: ast.expr, value: Any, env: dict[str, Any], attrs: dict[str, Any], lines: dict[str, int]
    ) -> None:
        if isinstance(target, ast.Name):
            env[target.id] = value
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
            attrs[target.attr] = value
            lines[target.attr] = target.lineno
        elif isinstance(target, ast.Subscript):
            owner, key = self.expr(target.value, env, attrs), self.expr(target.slice, env, attrs)
            if isinstance(owner, dict) and isinstance(key, (str, int)):
                owner.update({key: value})
            elif isinstance(owner, list) and isinstance(key, int) and -len(owner) <= key < len(owner):
                owner[key] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            parts = value if isinstance(value, (list, tuple)) and len(value) == len(target.elts) else None
            for i, element in enumerate(target.elts):
                self.store(element, parts[i] if parts else UNKNOWN, env, attrs, lines)
