"""Runs a runner's function on formulas: what a name holds before each of its statements.

A small abstract interpreter. Statements are run in order, each loop a few times, with whole numbers as sums of symbols:
P (columns of the prompt batch), B (rows), L (real tokens of a row) and K (the lengths that came in). Whatever it does
not know is `None`, and stays so. No code of the runner is run.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

from kvskill.analyzer.runner.files import leaf
from kvskill.implementer.standalone.evaluate import Evaluator
from kvskill.implementer.standalone.formulas import Counted, Grid, Num, Seq, Tok, Value, alike, key, num, root

__all__ = ["Flow"]

# calls whose result is dropped, and which leave their arguments as they are (or the same on every rank)
_PURE = ("debug", "info", "warning", "print", "log", "append", "extend", "mark_static", "broadcast")
ROUNDS = 3  # how often a loop's body is run: the third round shows a step that the second one does not


class Flow(Evaluator):
    """Runs a function and keeps the state before each of its statements.

    `tokenizer` says which calls give tokens and their mask; `skip` are statements (ids) that do not run here; `column`
    is the expression of one column of tokens that the model is given in decode.
    """

    def __init__(
        self,
        func: ast.FunctionDef,
        tokenizer: Callable[[ast.Call], bool] | None = None,
        skip: frozenset[int] = frozenset(),
        column: ast.expr | None = None,
    ) -> None:
        super().__init__(tokenizer, column)
        self.func, self.skip = func, skip
        self.before: dict[int, list[dict[str, Value]]] = {}

    def run(self, env: Mapping[str, Value] | None = None) -> Flow:
        """From the first statement to the last."""
        self.env = dict(env or {})
        self._block(self.func.body)
        return self

    def values(self, stmt: ast.stmt, e: ast.expr) -> list[Value]:
        """What the expression gives before the statement, each time that it was reached."""
        now, out = self.env, []
        for env in self.before.get(id(stmt), ()):
            self.env = env
            out.append(self.eval(e))
        self.env = now
        return out

    # --- statements

    def _block(self, body: list[ast.stmt]) -> bool:
        """False when the block surely ends the function or the round."""
        return all(self._stmt(stmt) for stmt in body)

    def _stmt(self, s: ast.stmt) -> bool:
        if id(s) in self.skip or isinstance(s, (ast.FunctionDef, ast.ClassDef)):
            return True
        self.before.setdefault(id(s), []).append(dict(self.env))
        if isinstance(s, (ast.If, ast.For, ast.While, ast.With, ast.Try)):
            return self._compound(s)
        self._simple(s)
        for n in ast.walk(s):
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and leaf(n.func.value) == "self":
                self.env = {k: v for k, v in self.env.items() if not k.startswith("self.")}
            if isinstance(n, ast.Call) and (out := next((k.value for k in n.keywords if k.arg == "out"), None)):
                self._spoil(self.eval(out))
            if isinstance(n, ast.NamedExpr):
                self.env[n.target.id] = None
            elif isinstance(s, ast.Match) and isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store):
                self.env[n.id] = None
        return not isinstance(s, (ast.Return, ast.Raise, ast.Break, ast.Continue))

    def _simple(self, s: ast.stmt) -> None:
        if isinstance(s, ast.Assign):
            value = self.eval(s.value)
            for t in s.targets:
                self._bind(t, value)
        elif isinstance(s, ast.AnnAssign) and s.value is not None:
            self._bind(s.target, self.eval(s.value))
        elif isinstance(s, ast.AugAssign):
            old = self.eval(s.target)
            value = self._arith(s.op, old, self.eval(s.value))
            if not isinstance(old, Num) or old.tensor:
                self._spoil(old)  # a tensor is changed in place: whatever shares it changes too
            self._bind(s.target, value)
        elif isinstance(s, ast.Expr):
            self._effect(s.value)
        elif isinstance(s, ast.Delete):
            for t in s.targets:
                self.env.pop(key(t) or "", None)

    def _compound(self, s: ast.If | ast.For | ast.While | ast.With | ast.Try) -> bool:
        if isinstance(s, ast.With):
            for held in s.items:
                if held.optional_vars is not None:
                    self._bind(held.optional_vars, None)
            return self._block(s.body)
        if isinstance(s, ast.Try):
            self._block(s.body)
            for block in (*[h.body for h in s.handlers], s.orelse, s.finalbody):
                self._maybe(block)
            return True
        if isinstance(s, ast.If):
            known = self.eval(s.test)
            if isinstance(known, bool):
                return self._block(s.body if known else s.orelse)
            before = dict(self.env)
            first = self._block(s.body)
            then, self.env = self.env, before
            second = self._block(s.orelse)
            self._join([e for e, goes_on in ((then, first), (self.env, second)) if goes_on])
            return first or second
        before = dict(self.env)
        items = self._rounds(s.iter) if isinstance(s, ast.For) else [None] * ROUNDS
        for item in items:
            if isinstance(s, ast.For):
                self._bind(s.target, item)
            self._block(s.body)
        self._join([before, self.env])  # after any number of rounds
        self._maybe(s.orelse)
        return True

    def _rounds(self, over: ast.expr) -> list[Value]:
        """What the loop's name holds in the first rounds."""
        if isinstance(over, ast.Call) and leaf(over.func) == "range" and 1 <= len(over.args) <= 3:
            start = self.eval(over.args[0]) if len(over.args) > 1 else num()
            step = self.eval(over.args[2]) if len(over.args) > 2 else num(1)
            if isinstance(start, Num) and isinstance(step, Num) and not step.terms:
                return [start.plus(num(step.const * i)) for i in range(ROUNDS)]
        return [None] * ROUNDS

    def _maybe(self, block: list[ast.stmt]) -> None:
        before = dict(self.env)
        if self._block(block):
            self._join([before, self.env])
        else:
            self.env = before

    def _join(self, envs: list[dict[str, Value]]) -> None:
        if len(envs) == 1:
            self.env = envs[0]
        elif envs:
            names = set(envs[0]) & set(envs[1])
            self.env = {n: envs[0][n] if alike(envs[0][n], envs[1][n]) else None for n in names}

    def _bind(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            parts: list[Value] = [None] * len(target.elts)
            if isinstance(value, Seq) and not value.many and len(value.items) == len(parts):
                parts = list(value.items)
            for t, v in zip(target.elts, parts, strict=True):
                self._bind(t, v)
        elif (name := key(target)) is not None:
            self.env[name] = value
        elif isinstance(target, (ast.Subscript, ast.Attribute)):
            held = self.eval(target.value)
            where = self.eval(target.slice) if isinstance(target, ast.Subscript) else None
            if isinstance(held, Counted) and isinstance(where, Grid) and where.what == "pad":
                return  # positions of padding
            name = root(target)  # a part is written: the whole is not known any more, nor what shares it
            self._spoil(self.env.get(name or ""))
            if name is not None:
                self.env[name] = None

    def _spoil(self, value: Value) -> None:
        """Names of one tensor are not known any more."""
        if value is None or isinstance(value, (bool, str)):
            return
        shared = {id(value), *((id(value.ids), id(value.mask)) if isinstance(value, Tok) else ())}
        for name, other in self.env.items():
            parts = (other, other.ids, other.mask) if isinstance(other, Tok) else (other,)
            if any(id(p) in shared for p in parts):
                self.env[name] = None

    def _effect(self, e: ast.expr) -> None:
        """A call for its effect: `x.masked_fill_(..)` and its like change `x`, `append` changes a list."""
        if not isinstance(e, ast.Call):
            return
        called = leaf(e.func) or ""
        if called not in _PURE and not called.endswith("_"):  # it is there for what it does to its arguments
            for arg in [*e.args, *(k.value for k in e.keywords)]:
                held = self.eval(arg)
                if not isinstance(held, Num) or held.tensor:
                    self._spoil(held)
        if not isinstance(e.func, ast.Attribute):
            return
        name = root(e.func.value)
        old = self.env.get(name or "")
        if name is None or not (e.func.attr.endswith("_") or isinstance(old, (Seq, Grid, Tok))):
            return
        value = self.eval(e) if e.func.attr.endswith("_") and key(e.func.value) is not None else None
        self._spoil(old)
        self.env[name] = value
