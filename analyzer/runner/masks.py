"""The prefill mask that a runner builds: the paged step has the plain causal one, so no other may be lost."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from kvskill.analyzer.runner.files import Function, functions, leaf
from kvskill.diagnostics import Diagnostic, Severity
from kvskill.source import SourceFile

__all__ = ["mask_findings"]

_PLAIN = {"tril": 0, "tril_": 0, "triu": 1, "triu_": 1}  # the diagonal of a plain causal mask
_JOINING = ("logical_and", "logical_or", "logical_xor", "where", "masked_fill", "masked_fill_", "minimum", "maximum")
_JOINS = (ast.BitAnd, ast.BitOr, ast.BitXor, ast.Mult, ast.Add, ast.Sub)
_TODO = "Keep the cache as it is, or put the rule (a window, a prefix) into the model's attention, where it is read."


def mask_findings(files: Iterable[SourceFile], walked: Iterable[ast.AST]) -> tuple[Diagnostic, ...]:
    """A blocking finding for each triangle outside the walked code that is not the plain causal one.

    `walked`: functions of the model that were walked; what they do to a mask was read there.
    """
    known = {id(n) for n in walked}
    files = list(files)
    out = []
    for file in files:
        for func in functions(file):
            if id(func.node) in known:
                continue
            made = list(_triangles(func))
            for triangle in made:
                call: ast.AST = triangle
                if _combined(func, made):
                    fact = "The runner joins a triangle with another mask, which may not be the plain causal one."
                elif (write := _written(func, made, files)) is not None:
                    call = write
                    fact = "The runner changes a part of its triangle here; the mask is not the plain causal one."
                elif not _plain(triangle):
                    text = file.segment(triangle)[:80]
                    fact = f"The runner builds a mask with `{text}`, which is not the plain causal one."
                else:
                    continue
                out.append(Diagnostic("KV166", Severity.BLOCKING, fact, _TODO, file.span(call)))
                break
    return tuple(out)


def _triangles(func: Function) -> Iterator[ast.Call]:
    nested = [f for f in ast.walk(func.node) if isinstance(f, ast.FunctionDef) and f is not func.node]
    inner = {id(n) for f in nested for n in ast.walk(f)}
    for node in ast.walk(func.node):
        if isinstance(node, ast.Call) and leaf(node.func) in _PLAIN and id(node) not in inner:
            yield node


def _combined(func: Function, made: list[ast.Call]) -> bool:
    """Is a triangle joined with another mask: something that is neither a number nor a dtype's limit?"""
    names = _named(func, made)
    for node in ast.walk(func.node):
        name = leaf(node.func) or "" if isinstance(node, ast.Call) else ""
        parts: list[ast.expr] = []
        if isinstance(node, ast.BinOp) and isinstance(node.op, _JOINS):
            parts = [node.left, node.right]
        elif isinstance(node, ast.Call) and name in _JOINING:
            parts = [*node.args, *([node.func.value] if isinstance(node.func, ast.Attribute) else [])]
            parts = [p for p in parts if leaf(p) not in ("torch", "np")]
        mine = [p for p in parts if _holds(p, made, names) and not _number(p)]
        if mine and (len(mine) > 1 or not all(_number(p) for p in parts if p not in mine)):
            return True
    return False


def _named(func: Function, made: list[ast.Call]) -> set[str]:
    """Names that hold a triangle, or something made of one."""
    names: set[str] = set()
    for _ in range(3):
        for node in ast.walk(func.node):
            if isinstance(node, ast.Assign) and _holds(node.value, made, names):
                names |= {t.id for t in node.targets if isinstance(t, ast.Name)}
    return names


def _holds(node: ast.expr, made: list[ast.Call], names: set[str]) -> bool:
    return any(any(n is m for m in made) or (isinstance(n, ast.Name) and n.id in names) for n in ast.walk(node))


def _number(node: ast.expr) -> bool:
    """A number, `float("-inf")`, or a limit of a dtype."""
    calls = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
    if calls:
        return all(leaf(c.func) in ("float", "int", "finfo", "iinfo") for c in calls)
    return not any(isinstance(n, (ast.Name, ast.Attribute)) for n in ast.walk(node))


def _written(func: Function, made: list[ast.Call], files: list[SourceFile]) -> ast.AST | None:
    """The first item assignment to a triangle that runs: not below a test for an argument that nobody gives."""
    names = _named(func, made)
    for node in ast.walk(func.node):
        if not isinstance(node, ast.Assign):
            continue
        targets = [t.value for t in node.targets if isinstance(t, ast.Subscript)]
        if any(isinstance(t, ast.Name) and t.id in names for t in targets):
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
