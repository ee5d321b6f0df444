"""The prefill mask that a runner builds: the paged step has the plain causal one, so no other may be lost."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from kvskill.analyzer.runner.files import Function, functions, leaf
from kvskill.diagnostics import Diagnostic, Severity, Span
from kvskill.source import SourceFile

__all__ = ["mask_findings"]

_PLAIN = {"tril": 0, "tril_": 0, "triu": 1, "triu_": 1}  # the diagonal of a plain causal mask
_JOINING = ("logical_and", "logical_or", "logical_xor", "where", "masked_fill", "masked_fill_", "minimum", "maximum")
_PUTS = ("fill_", "zero_", "copy_", "masked_fill_", "logical_not_", "index_fill_")
_LIBRARIES = ("torch", "F", "np", "numpy", "nn")
_JOINS = (ast.BitAnd, ast.BitOr, ast.BitXor, ast.Mult, ast.Add, ast.Sub)
_TODO = "Keep the cache as it is, or put the rule (a window, a prefix) into the model's attention, where it is read."


def mask_findings(
    files: Iterable[SourceFile], walked: Iterable[ast.AST], relying: Span | None = None
) -> tuple[Diagnostic, ...]:
    """A blocking finding for each triangle outside the walked code that is not the plain causal one.

    `walked`: functions of the model that were walked; what they do to a mask was read there. `relying`: where a prefill
    has no order of positions but the mask that it is handed; then a triangle must be there.
    """
    known = {id(n) for n in walked}
    files = list(files)
    mine = [func for file in files for func in functions(file) if id(func.node) not in known]
    flow = _Flow(mine)
    out = []
    for func in mine:
        if not flow.names[id(func.node)] and not flow.made[id(func.node)]:
            continue
        call: ast.AST | None
        if (call := _combined(func, flow)) is not None:
            fact = "The runner joins a triangle with another mask, which may not be the plain causal one."
        elif (call := _written(func, flow, files)) is not None:
            fact = "The runner changes a part of its triangle here; the mask is not the plain causal one."
        elif (call := next((t for t in flow.made[id(func.node)] if not _plain(t)), None)) is not None:
            text = func.file.segment(call)[:80]
            fact = f"The runner builds a mask with `{text}`, which is not the plain causal one."
        else:
            continue
        out.append(Diagnostic("KV166", Severity.BLOCKING, fact, _TODO, func.file.span(call)))
    if relying is not None and not any(flow.made.values()):
        fact = "The prefill has no order of positions but in the mask that it is handed, and no triangle is made here."
        out.append(Diagnostic("KV166", Severity.BLOCKING, fact, _TODO, relying))
    return tuple(out)


class _Flow:
    """Names that hold a triangle, or something made of one, in each function: through assignments, attributes, results
    and arguments of calls within the folder."""

    def __init__(self, funcs: list[Function]) -> None:
        self.made = {id(f.node): list(_triangles(f)) for f in funcs}
        self.names: dict[int, set[str]] = {id(f.node): set() for f in funcs}
        self.attrs: set[str] = set()
        self.returning: set[str] = set()
        by_name: dict[str, list[Function]] = {}
        for f in funcs:
            by_name.setdefault(f.node.name, []).append(f)
        before = -1
        while (now := sum(map(len, self.names.values())) + len(self.attrs) + len(self.returning)) != before:
            before = now
            for f in funcs:
                self._follow(f, by_name)

    def _follow(self, func: Function, by_name: dict[str, list[Function]]) -> None:
        names = self.names[id(func.node)]
        for node in ast.walk(func.node):
            if isinstance(node, ast.Assign) and self.holds(node.value, func):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        names.add(target.id)
                    elif isinstance(target, ast.Attribute):
                        self.attrs.add(target.attr)
            elif isinstance(node, ast.Return) and node.value is not None and self.holds(node.value, func):
                self.returning.add(func.node.name)
            elif isinstance(node, ast.Call):
                for callee in by_name.get(leaf(node.func) or "", ()):
                    self._pass(node, func, callee)

    def _pass(self, call: ast.Call, func: Function, callee: Function) -> None:
        """Arguments that hold a triangle make parameters that do."""
        params = [a.arg for a in (*callee.node.args.posonlyargs, *callee.node.args.args)]
        if callee.owner is not None and isinstance(call.func, ast.Attribute):
            params = params[1:]
        given = [*zip(params, call.args, strict=False), *((k.arg, k.value) for k in call.keywords)]
        every = {*params, *(a.arg for a in callee.node.args.kwonlyargs)}
        self.names[id(callee.node)] |= {n for n, value in given if n in every and self.holds(value, func)}

    def holds(self, node: ast.expr, func: Function) -> bool:
        """Is the value a triangle or made of one? A dict or an object that has one among others is not."""
        made = self.made[id(func.node)]
        todo: list[ast.AST] = [node]
        while todo:
            n = todo.pop()
            if any(n is m for m in made) or (isinstance(n, ast.Name) and n.id in self.names[id(func.node)]):
                return True
            if isinstance(n, ast.Attribute) and n.attr in self.attrs:
                return True
            if isinstance(n, (ast.Dict, ast.Lambda)):
                continue
            if isinstance(n, ast.Call):
                name = leaf(n.func) or ""
                if name in self.returning:
                    return True
                todo.extend(_through(n))  # what a model or a helper makes of its arguments is no mask
                continue
            if isinstance(n, ast.Attribute) and n.attr in ("shape", "device", "dtype"):
                continue
            todo.extend(ast.iter_child_nodes(n))
        return False


def _through(call: ast.Call) -> list[ast.expr]:
    """What the result of a tensor operation is made of: arguments of torch functions, the tensor of a method."""
    if not isinstance(call.func, ast.Attribute):
        return []
    root: ast.expr = call.func
    while isinstance(root, ast.Attribute):
        root = root.value
    given = [*call.args, *(k.value for k in call.keywords)]
    if isinstance(root, ast.Name) and root.id in _LIBRARIES:
        return given
    return [call.func.value, *(given if call.func.attr in _JOINING else [])]


def _triangles(func: Function) -> Iterator[ast.Call]:
    nested = [f for f in ast.walk(func.node) if isinstance(f, ast.FunctionDef) and f is not func.node]
    inner = {id(n) for f in nested for n in ast.walk(f)}
    for node in ast.walk(func.node):
        if isinstance(node, ast.Call) and leaf(node.func) in _PLAIN and id(node) not in inner:
            yield node


def _combined(func: Function, flow: _Flow) -> ast.AST | None:
    """Where a triangle is joined with another mask: something that is neither a number nor a dtype's limit."""
    for node in ast.walk(func.node):
        name = leaf(node.func) or "" if isinstance(node, ast.Call) else ""
        parts: list[ast.expr] = []
        if isinstance(node, ast.BinOp) and isinstance(node.op, _JOINS):
            parts = [node.left, node.right]
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, _JOINS):
            parts = [node.target, node.value]
        elif isinstance(node, ast.Call) and name in _JOINING:
            parts = [*node.args, *([node.func.value] if isinstance(node.func, ast.Attribute) else [])]
            parts = [p for p in parts if leaf(p) not in ("torch", "np")]
        mine = [p for p in parts if flow.holds(p, func) and not _number(p)]
        if mine and (len(mine) > 1 or not all(_number(p) for p in parts if p not in mine)):
            return node
    return None


def _number(node: ast.expr) -> bool:
    """A number, `float("-inf")`, or a limit of a dtype."""
    calls = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
    if calls:
        return all(leaf(c.func) in ("float", "int", "finfo", "iinfo") for c in calls)
    return not any(isinstance(n, (ast.Name, ast.Attribute)) for n in ast.walk(node))


def _written(func: Function, flow: _Flow, files: list[SourceFile]) -> ast.AST | None:
    """The first write into a part of a triangle that runs: not below a test for an argument that nobody gives."""
    for node in ast.walk(func.node):
        parts: list[ast.expr] = []
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            parts = node.targets if isinstance(node, ast.Assign) else [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _PUTS:
            parts = [node.func.value]  # mask[:, :k].fill_(0)
        if any(isinstance(t, ast.Subscript) and flow.holds(t.value, func) for t in parts):
            around = [n for n in ast.walk(func.node) if isinstance(n, ast.If) and any(s is node for s in ast.walk(n))]
            if not any(_never_given(func.node, test.test, files) for test in around):
                return node
    return None


def _never_given(func: ast.FunctionDef, test: ast.expr, files: list[SourceFile]) -> bool:
    """`param is not None` of a parameter that is None by default and that no call in the folder passes."""
    if not (isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot) and isinstance(test.left, ast.Name)):
        return False
    names = [a.arg for a in func.args.args]
    if test.left.id not in names[len(names) - len(func.args.defaults) :]:
        return False
    at = names.index(test.left.id)
    default = func.args.defaults[at - (len(names) - len(func.args.defaults))]
    if not (isinstance(default, ast.Constant) and default.value is None):
        return False
    calls = [n for f in files for n in ast.walk(f.tree) if isinstance(n, ast.Call) and leaf(n.func) == func.name]
    stars = any(isinstance(a, ast.Starred) for c in calls for a in c.args)
    return not stars and not any(
        len(c.args) > at or any(k.arg in (None, test.left.id) for k in c.keywords) for c in calls
    )


def _plain(call: ast.Call) -> bool:
    """tril of the main diagonal, triu of the one above it."""
    name = leaf(call.func) or ""
    wanted = _PLAIN[name]
    method = isinstance(call.func, ast.Attribute) and leaf(call.func.value) not in ("torch", "np", "numpy")
    args = call.args if method else call.args[1:]
    given = [*args[:1], *(k.value for k in call.keywords if k.arg in ("diagonal", "k"))]
    if not given:
        return wanted == 0
    return isinstance(given[0], ast.Constant) and given[0].value == wanted
