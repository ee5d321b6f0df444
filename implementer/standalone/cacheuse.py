"""What runner code does with the caches beside handing them to the model.

The caches are followed by data flow: from what the allocating method makes and returns through names, attributes, keys
of dicts, items, iteration, arguments and results of the folder's own functions. They may be stored, returned and handed
on. Whatever looks into a tensor of them (rows, positions, contents) sees blocks after the conversion: it is refused.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from kvskill.analyzer.runner.files import Function, functions, leaf
from kvskill.analyzer.runner.walkrun import CACHES
from kvskill.implementer.framework.context import Context
from kvskill.source import SourceFile

__all__ = ["refuse_cache_uses"]

_TENSOR, _ALL = 0, 2  # a cache tensor, a pair (or list) of them, all pairs
_FACTS = ("device", "dtype", "is_cuda", "is_npu", "element_size", "is_contiguous", "zero_")  # the same for blocks
_SAME = ("to", "npu", "cuda", "contiguous", "detach")  # the whole tensor again
_GROW = ("append", "extend", "insert")
_WALKS = ("list", "tuple", "zip", "enumerate", "reversed", "iter", "next")
_HARMLESS = ("len", "isinstance", "id", "type", "mark_static", "zeros_like", "empty_like", "ones_like", "super")


def refuse_cache_uses(ctx: Context, inside: Function, made: Iterable[ast.Call], rewritten: Iterable[ast.AST]) -> None:
    """Refuse uses of the caches that the conversion does not keep right.

    `inside` allocates: the tensors in it are `made` (and what is made like them); `rewritten` are expressions that the
    conversion replaces.
    """
    files = list(ctx.facts.program.files.values())
    walked = {id(f.func) for f in ctx.frames}
    flow = _Flow(files, inside, {id(n) for n in made}, walked)
    flow.settle()
    gone = {id(n) for r in rewritten for n in ast.walk(r)}
    for file, node, what in flow.uses():
        if id(node) in gone:
            continue
        ctx.refuse(
            file,
            node,
            "KV168",
            f"Runner code {what}; a cache is now [blocks, block_size, heads, dim] and not one row for each prompt.",
            "Take this use out, or write it for blocks through the block table after the conversion.",
        )


class _Flow:
    """Depths of what holds caches: by function and name, by attribute, by key of a dict, by function result."""

    def __init__(self, files: list[SourceFile], inside: Function, made: set[int], walked: set[int]) -> None:
        self.inside, self.made = inside, made
        self.scopes = [f for file in files for f in functions(file) if id(f.node) not in walked]
        self.by_name: dict[str, list[Function]] = {}
        self.known = {f.node.name for file in files for f in functions(file)}
        self.classes = {n.name: n for file in files for n in file.tree.body if isinstance(n, ast.ClassDef)}
        # attributes that the code sets: what is called by such a name is an object that it keeps
        self.kept = {n.attr for file in files for n in ast.walk(file.tree) if _sets(n) and isinstance(n, ast.Attribute)}
        self.modules = {file.shown: _imported(file) for file in files}
        for f in self.scopes:
            self.by_name.setdefault(f.node.name, []).append(f)
        self.names: dict[tuple[int, str], int] = {}
        self.attrs: dict[str, int] = {}
        self.keys: dict[str, int] = {}
        self.results: dict[str, int] = {}
        self.changed = False

    def settle(self) -> None:
        """Until nothing more is reached."""
        for _ in range(20):
            self.changed = False
            for f in self.scopes:
                for n in ast.walk(f.node):
                    self._step(f, n)
            if not self.changed:
                return

    # --- depths

    def depth(self, f: Function, e: ast.AST | None) -> int | None:
        """How deep the tensors lie in what the expression gives; None when it holds no cache."""
        if isinstance(e, ast.Name):
            return self.names.get((id(f.node), e.id))
        if isinstance(e, ast.Attribute):
            if e.attr in _FACTS or e.attr in ("shape", "size"):
                return None
            return self.attrs.get(e.attr)
        if isinstance(e, ast.Subscript):
            if isinstance(e.slice, ast.Constant) and isinstance(e.slice.value, str):
                return self.keys.get(e.slice.value)
            held = self.depth(f, e.value)
            if held is None or held == _TENSOR:
                return None
            return held if isinstance(e.slice, ast.Slice) else held - 1
        if isinstance(e, (ast.Tuple, ast.List, ast.Set)):
            return _outer(self._least(f, e.elts))
        if isinstance(e, ast.Starred):
            return self._inner(f, e.value)
        if isinstance(e, (ast.ListComp, ast.GeneratorExp, ast.SetComp)):
            return _outer(self.depth(f, e.elt))
        if isinstance(e, ast.BinOp) and isinstance(e.op, ast.Add):
            return self._least(f, [e.left, e.right], above=_TENSOR)
        if isinstance(e, ast.IfExp):
            return self._least(f, [e.body, e.orelse])
        if isinstance(e, ast.BoolOp):
            return self._least(f, e.values)
        if isinstance(e, (ast.NamedExpr, ast.Await)):
            return self.depth(f, e.value)
        return self._result(f, e) if isinstance(e, ast.Call) else None

    def _result(self, f: Function, call: ast.Call) -> int | None:
        if id(call) in self.made:
            return _TENSOR
        name = leaf(call.func)
        if isinstance(call.func, ast.Attribute):
            if name in ("get", "pop", "setdefault") and call.args and isinstance(call.args[0], ast.Constant):
                return self.keys.get(str(call.args[0].value))
            held = self.depth(f, call.func.value)
            if held is not None:
                return held if name in _SAME or name == "copy" else held - 1 if name == "pop" and held else None
        if name in ("zeros_like", "empty_like", "ones_like") and f.node is self.inside.node:
            return self._least(f, call.args[:1])
        if name == "getattr" and len(call.args) > 1 and isinstance(call.args[1], ast.Constant):
            return self.attrs.get(str(call.args[1].value))
        if name in ("list", "tuple", "reversed", "iter", "next") and call.args:
            held = self.depth(f, call.args[0])
            return held - 1 if name == "next" and held else held
        return self.results.get(name or "")

    def _least(self, f: Function, parts: Iterable[ast.AST], above: int = -1) -> int | None:
        found = [d for p in parts if (d := self.depth(f, p)) is not None and d > above]
        return min(found) if found else None

    def _inner(self, f: Function, e: ast.AST) -> int | None:
        """The depth of one item of an iterable."""
        if isinstance(e, ast.Call) and leaf(e.func) in ("zip", "enumerate") and e.args:
            return self._least(f, e.args)
        held = self.depth(f, e)
        if held is None and isinstance(e, ast.Call) and isinstance(e.func, ast.Attribute) and e.func.attr == "values":
            held = self.depth(f, e.func.value)
        return None if not held else held - 1

    # --- one step of the flow

    def _set(self, table: dict, key: object, depth: int | None) -> None:  # type: ignore[type-arg]
        if depth is not None and depth < table.get(key, 9):
            table[key] = depth
            self.changed = True

    def _bind(self, f: Function, target: ast.AST, depth: int | None) -> None:
        if depth is None:
            return
        if isinstance(target, ast.Name):
            self._set(self.names, (id(f.node), target.id), depth)
        elif isinstance(target, ast.Attribute):
            self._set(self.attrs, target.attr, depth)
        elif isinstance(target, ast.Starred):
            self._bind(f, target.value, depth)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for e in target.elts:
                self._bind(f, e, depth - 1 if depth else None)
        elif isinstance(target, ast.Subscript):
            if isinstance(target.slice, ast.Constant) and isinstance(target.slice.value, str):
                self._set(self.keys, target.slice.value, depth)
            else:
                self._bind(f, target.value, _outer(depth))

    def _assign(self, f: Function, target: ast.AST, value: ast.expr) -> None:
        if isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, (ast.Tuple, ast.List)):
            if len(target.elts) == len(value.elts):
                for t, v in zip(target.elts, value.elts, strict=True):
                    self._assign(f, t, v)
                return
        self._bind(f, target, self.depth(f, value))

    def _loop(self, f: Function, target: ast.expr, over: ast.expr) -> None:
        if isinstance(over, ast.Call) and isinstance(target, (ast.Tuple, ast.List)) and over.args:
            if leaf(over.func) == "zip" and len(target.elts) == len(over.args):
                for t, a in zip(target.elts, over.args, strict=True):
                    self._loop(f, t, a)
                return
            if leaf(over.func) == "enumerate" and len(target.elts) == 2:
                self._loop(f, target.elts[1], over.args[0])
                return
        self._bind(f, target, self._inner(f, over))

    def _step(self, f: Function, n: ast.AST) -> None:
        if isinstance(n, ast.Assign):
            for t in n.targets:
                self._assign(f, t, n.value)
        elif isinstance(n, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and n.value is not None:
            self._bind(f, n.target, self.depth(f, n.value))
        elif isinstance(n, (ast.For, ast.comprehension)):
            self._loop(f, n.target, n.iter)
        elif isinstance(n, ast.Return) and n.value is not None:
            self._set(self.results, f.node.name, self.depth(f, n.value))
        elif isinstance(n, ast.Dict):
            for k, v in zip(n.keys, n.values, strict=True):
                if isinstance(k, ast.Constant) and isinstance(k.value, str):
                    self._set(self.keys, k.value, self.depth(f, v))
        elif isinstance(n, ast.Call):
            self._call(f, n)

    def _call(self, f: Function, call: ast.Call) -> None:
        name = leaf(call.func)
        if isinstance(call.func, ast.Attribute) and name in _GROW and call.args:
            held = self.depth(f, call.args[-1])
            self._bind(f, call.func.value, held if name == "extend" else _outer(held))
            return
        if name in ("dict", "update") or (name in self.classes and not self._targets(call)):
            for k in call.keywords:
                if k.arg is not None:
                    held = self.depth(f, k.value)
                    self._set(self.attrs if name in self.classes else self.keys, k.arg, held)
        for target in self._targets(call):
            params = [a.arg for a in [*target.node.args.posonlyargs, *target.node.args.args]]
            if target.owner is not None and not _static(target.node):
                params = params[1:]
            given = list(zip(params, call.args, strict=False))
            rest = target.node.args.vararg
            if rest is not None:
                given += [(rest.arg, a) for a in call.args[len(params) :]]
            for p, a in given:
                held = self.depth(f, a)
                self._set(self.names, (id(target.node), p), _outer(held) if rest and p == rest.arg else held)
            own = {*params, *(a.arg for a in target.node.args.kwonlyargs)}
            for k in call.keywords:
                if k.arg is not None and k.arg in own:
                    self._set(self.names, (id(target.node), k.arg), self.depth(f, k.value))
                elif k.arg is not None and target.node.args.kwarg is not None:
                    self._set(self.keys, k.arg, self.depth(f, k.value))

    def _targets(self, call: ast.Call) -> list[Function]:
        """Functions of the folder that the call may run; those of the model's forward are not among them."""
        name = leaf(call.func) or ""
        if name in self.classes:
            return [f for f in self.by_name.get("__init__", []) if f.owner is self.classes[name]]
        return self.by_name.get(name, [])

    # --- what is done with them

    def uses(self) -> list[tuple[SourceFile, ast.AST, str]]:
        """(file, node, what is done there) of every use beside storing and handing on, in the order of the code."""
        out: list[tuple[SourceFile, ast.AST, str]] = []
        for f in self.scopes:
            parents = {id(c): n for n in ast.walk(f.node) for c in ast.iter_child_nodes(n)}
            for n in ast.walk(f.node):
                if isinstance(n, ast.AugAssign) and self.depth(f, n.target) == _TENSOR:
                    out.append((f.file, n, "changes a cache tensor in place"))
                if isinstance(n, ast.expr) and not isinstance(getattr(n, "ctx", None), ast.Store):
                    held = self.depth(f, n)
                    what = None if held is None else self._judge(f, n, held, parents)
                    if what is not None:
                        out.append((f.file, n, what))
        seen: set[int] = set()
        kept = []
        for file, n, what in sorted(out, key=lambda u: (u[0].shown, u[1].lineno, u[1].col_offset)):  # type: ignore[attr-defined]
            if n.lineno not in seen:  # type: ignore[attr-defined]
                kept.append((file, n, what))
            seen.add(n.lineno)  # type: ignore[attr-defined]
        return kept

    def _judge(self, f: Function, n: ast.expr, held: int, parents: dict[int, ast.AST]) -> str | None:
        """What a holder of caches is used for, when it is more than storing it and handing it on."""
        p = parents.get(id(n))
        if isinstance(p, ast.keyword):
            p = parents.get(id(p))
        if isinstance(p, ast.AugAssign):
            return None if isinstance(p.op, ast.Add) and held > _TENSOR else "computes with a cache tensor"
        if isinstance(p, ast.Subscript) and p.value is n:
            if held == _TENSOR:
                return "reads or writes a part of a cache tensor"
            return None if isinstance(p.ctx, ast.Load) or f.node is self.inside.node else self._stored(f, p, parents)
        if isinstance(p, ast.Attribute):
            return self._attribute(f, p, held, parents)
        if isinstance(p, ast.Call):
            return self._argument(f, p, n)
        if isinstance(p, ast.Compare):
            same = all(isinstance(op, (ast.Is, ast.IsNot)) for op in p.ops)
            return None if same else "compares the caches"
        if isinstance(p, ast.BinOp):
            return None if isinstance(p.op, ast.Add) and held > _TENSOR else "computes with a cache tensor"
        if isinstance(p, (ast.For, ast.comprehension)) and p.iter is n:
            return None if held > _TENSOR else "goes through a cache tensor"
        if isinstance(p, ast.Starred):
            return None if held > _TENSOR else "goes through a cache tensor"
        if isinstance(p, (ast.UnaryOp, ast.FormattedValue, ast.Slice, ast.BoolOp, ast.If, ast.While, ast.IfExp)):
            if isinstance(p, (ast.UnaryOp, ast.BoolOp, ast.If, ast.While, ast.IfExp)) and held > _TENSOR:
                return None  # is there any cache?
            return None if isinstance(p, (ast.BoolOp, ast.IfExp)) else "reads the contents of a cache"
        return None

    def _stored(self, f: Function, p: ast.Subscript, parents: dict[int, ast.AST]) -> str | None:
        """A pair put in the place of another: its tensors must be caches too."""
        up = parents.get(id(p))
        if isinstance(up, ast.Assign) and self.depth(f, up.value) is not None:
            return None
        return None if isinstance(up, ast.Delete) else "puts something else in the place of a cache"

    def _attribute(self, f: Function, p: ast.Attribute, held: int, parents: dict[int, ast.AST]) -> str | None:
        up = parents.get(id(p))
        called = isinstance(up, ast.Call) and up.func is p
        if held == _TENSOR:
            if p.attr in _FACTS or (p.attr in _SAME and called):
                return None
            if f.node is self.inside.node and p.attr in ("shape", "size", "numel", "nbytes"):
                return None  # of what is allocated: its user is looked at by itself
            return f"takes `.{p.attr}` of a cache tensor"
        if called and p.attr in (*_GROW, "clear", "copy", "pop", "values", "get", "reverse"):
            return None
        # an attribute of something that is itself reached through the same name as the caches is no tensor of them
        return f"takes `.{p.attr}` of the caches" if called else None

    def _argument(self, f: Function, call: ast.Call, n: ast.expr) -> str | None:
        if n is call.func:
            return None
        name = leaf(call.func) or ""
        if name in _HARMLESS or name in _WALKS or name in self.known or name in self.classes:
            return None
        if isinstance(call.func, ast.Attribute) and name in (*_GROW, "get", "setdefault", "update"):
            return None
        if name in ("dict", "setattr"):
            return None
        handed = [k.value for k in call.keywords if k.arg in CACHES]
        if self._object(f, call.func) and (n in handed or name in self.kept):
            return None  # the model, or what stands for it
        return f"hands a cache to `{ast.unparse(call.func)}`"

    def _object(self, f: Function, func: ast.expr) -> bool:
        """Is an object called, and no function of a library?"""
        while isinstance(func, (ast.Attribute, ast.Call)):
            func = func.value if isinstance(func, ast.Attribute) else func.func
        return isinstance(func, ast.Name) and func.id not in self.modules[f.file.shown]


def _outer(depth: int | None) -> int | None:
    return None if depth is None else min(depth + 1, _ALL)


def _sets(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Store)


def _imported(file: SourceFile) -> set[str]:
    """Names that import statements bind."""
    found = [n for n in ast.walk(file.tree) if isinstance(n, (ast.Import, ast.ImportFrom))]
    return {(a.asname or a.name).split(".")[0] for n in found for a in n.names}


def _static(node: ast.FunctionDef) -> bool:
    return any(leaf(d) == "staticmethod" for d in node.decorator_list)
