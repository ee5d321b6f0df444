"""Mutations of Python source that change its text but not what it computes, and a form in which that is undone.

`MUTATIONS` maps a name to a function source -> source. `canonical` gives a tree in which two files are equal if and
only if they differ by nothing but these mutations: comments, blank lines, quotes, line breaks and line ends are gone
with parsing; names of locals, import aliases, the order of methods and `@torch.no_grad()` are normalised.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Callable, Iterator

__all__ = ["MUTATIONS", "canonical", "everything"]

FunctionLike = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
Insertion = tuple[int, int, int, str]  # 1-based line, byte column, bytes replaced, text


def _change(source: str, changes: list[Insertion]) -> str:
    """Apply changes at ast positions (columns count UTF-8 bytes)."""
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    for line, col, length, text in sorted(set(changes), reverse=True):
        old = lines[line - 1]
        lines[line - 1] = old[:col] + text.encode() + old[col + length :]
    return b"".join(lines).decode()


def _in_strings(tree: ast.AST) -> set[int]:
    """Nodes inside f-strings: their positions are not those of the file."""
    return {id(n) for j in ast.walk(tree) if isinstance(j, ast.JoinedStr) for n in ast.walk(j)}


def _params(func: ast.AST) -> set[str]:
    return {n.arg for n in ast.walk(func) if isinstance(n, ast.arg)}


def _locals(func: ast.FunctionDef) -> set[str]:
    """Names that a method binds and that are not its parameters or those of functions inside it."""
    bound = {n.id for n in ast.walk(func) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    outer = {x for n in ast.walk(func) if isinstance(n, (ast.Global, ast.Nonlocal)) for x in n.names}
    return bound - _params(func) - outer


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """Methods and functions of the module, not the functions inside them."""
    for item in tree.body:
        if isinstance(item, ast.FunctionDef):
            yield item
        elif isinstance(item, ast.ClassDef):
            yield from (f for f in item.body if isinstance(f, ast.FunctionDef))


def rename_locals(source: str) -> str:
    """Every local of every function gets another name."""
    tree = ast.parse(source)
    hidden = _in_strings(tree)
    changes: list[Insertion] = []
    for func in _functions(tree):
        names = [n for n in ast.walk(func) if isinstance(n, ast.Name)]
        fixed = {n.id for n in names if id(n) in hidden}
        for n in names:
            if n.id in _locals(func) - fixed and n.id != "_":
                changes.append((n.lineno, n.col_offset, len(n.id.encode()), f"renamed_{n.id}"))
    return _change(source, changes)


def _imported(tree: ast.Module) -> dict[str, ast.alias]:
    """Names that module-level imports bind and that nothing else binds."""
    out = {}
    for stmt in tree.body:
        for alias in stmt.names if isinstance(stmt, (ast.Import, ast.ImportFrom)) else ():
            future = isinstance(stmt, ast.ImportFrom) and stmt.module == "__future__"
            if alias.name != "*" and not future and (alias.asname or "." not in alias.name):
                out[alias.asname or alias.name] = alias
    bound = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)} | _params(tree)
    hidden = _in_strings(tree)
    quoted = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and id(n) in hidden}
    return {k: v for k, v in out.items() if k not in bound | quoted}


def alias_imports(source: str) -> str:
    """`import torch_npu` becomes `import torch_npu as alias_torch_npu`, with its uses."""
    tree = ast.parse(source)
    imported = _imported(tree)
    changes: list[Insertion] = []
    for name, alias in imported.items():
        assert alias.end_col_offset is not None
        length = alias.end_col_offset - alias.col_offset
        changes.append((alias.lineno, alias.col_offset, length, f"{alias.name} as alias_{name}"))
    for n in ast.walk(tree):
        if isinstance(n, ast.Name) and n.id in imported:
            changes.append((n.lineno, n.col_offset, len(n.id), f"alias_{n.id}"))
    return _change(source, changes)


def reorder_methods(source: str) -> str:
    """The methods of each class in reverse order, with the comments above them."""
    lines = source.splitlines(keepends=True)
    out, done = "", 0
    for cls in (c for c in ast.parse(source).body if isinstance(c, ast.ClassDef)):
        first = next((i for i, s in enumerate(cls.body) if isinstance(s, ast.FunctionDef)), len(cls.body))
        methods = cls.body[first:]
        plain = all(isinstance(m, ast.FunctionDef) and not _is_setter(m) for m in methods)
        if not plain or len(methods) < 2:
            continue
        starts = [_start(m, lines) for m in methods]
        ends = [*starts[1:], methods[-1].end_lineno or 0]
        chunks = ["".join(lines[a:b]) for a, b in zip(starts, ends, strict=True)]
        chunks = [c.rstrip("\n") + "\n\n" for c in reversed(chunks)]
        out += "".join(lines[done : starts[0]]) + "".join(chunks)
        done = ends[-1]
    return out + "".join(lines[done:])


def _is_setter(method: ast.FunctionDef) -> bool:
    return any(isinstance(d, ast.Attribute) for d in method.decorator_list)


def _start(method: ast.stmt, lines: list[str]) -> int:
    """0-based line of a method's first decorator or of the comments above it."""
    assert isinstance(method, ast.FunctionDef)
    line = min([method.lineno, *(d.lineno for d in method.decorator_list)]) - 1
    while lines[line - 1].strip().startswith("#"):
        line -= 1
    return line


def add_comments(source: str) -> str:
    """A comment above and behind statements of functions, and blank lines."""
    lines = source.splitlines()
    changes: list[Insertion] = []
    tree = ast.parse(source)
    for number, stmt in enumerate(n for f in _functions(tree) for n in ast.walk(f) if isinstance(n, ast.stmt)):
        decorators = getattr(stmt, "decorator_list", [])
        line = min([stmt.lineno, *(d.lineno for d in decorators)])
        indent = lines[line - 1][: len(lines[line - 1]) - len(lines[line - 1].lstrip())]
        simple = not hasattr(stmt, "body") and stmt.lineno == stmt.end_lineno
        if stmt.col_offset == len(indent) and not decorators:
            changes.append((line, 0, 0, "\n" * (number % 3) + f"{indent}# remark {number}: k_cache, scatter_update_\n"))
        if simple and number % 2 and lines[line - 1].isascii() and stmt.end_col_offset == len(lines[line - 1].rstrip()):
            changes.append((line, len(lines[line - 1]), 0, "  # as before"))
    return _change(source, changes)


def change_quotes(source: str) -> str:
    """Single quotes become double ones and the other way round, where the text allows it."""
    changes: list[Insertion] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = token.string
        if token.type != tokenize.STRING or text[0] not in "\"'" or text[:3] in ('"""', "'''") or "\\" in text:
            continue
        other = "'" if text[0] == '"' else '"'
        if other not in text and token.line.isascii():
            changes.append((token.start[0], token.start[1], len(text), other + text[1:-1] + other))
    return _change(source, changes)


def windows_lines(source: str) -> str:
    """CRLF line ends."""
    return source.replace("\n", "\r\n")


def decorate(source: str) -> str:
    """`@torch.no_grad()` on every forward."""
    tree = ast.parse(source)
    if not any(isinstance(s, ast.Import) and [a.name for a in s.names] == ["torch"] for s in tree.body):
        return source
    lines, changes = source.splitlines(), []
    for func in _functions(tree):
        if func.name == "forward" and not func.decorator_list:
            indent = lines[func.lineno - 1][: func.col_offset]  # spaces or tabs
            changes.append((func.lineno, 0, 0, f"{indent}@torch.no_grad()\n"))
    return _change(source, changes)


def wrap_lines(source: str) -> str:
    """Each argument of each call on a line of its own."""
    tree = ast.parse(source)
    hidden = _in_strings(tree)
    changes: list[Insertion] = []
    for call in (n for f in _functions(tree) for n in ast.walk(f) if isinstance(n, ast.Call)):
        for part in [*call.args, *call.keywords]:
            if id(part) not in hidden and not isinstance(part, ast.GeneratorExp):
                changes.append((part.lineno, part.col_offset, 0, "\n" + " " * 16))
    return _change(source, changes)


MUTATIONS: dict[str, Callable[[str], str]] = {
    "locals renamed": rename_locals,
    "imports aliased": alias_imports,
    "methods reordered": reorder_methods,
    "comments and blank lines": add_comments,
    "quotes": change_quotes,
    "decorators": decorate,
    "wrapped lines": wrap_lines,
    "CRLF": windows_lines,
}


def everything(source: str) -> str:
    """All of them, one after the other; aliases after the decorators, which name torch."""
    for name in ("decorators", *(n for n in MUTATIONS if n != "decorators")):
        source = MUTATIONS[name](source)
    return source


class _Canonical(ast.NodeTransformer):
    def __init__(self, aliases: dict[str, str]) -> None:
        self.aliases = aliases

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.copy_location(ast.Name(self.aliases.get(node.id, node.id), node.ctx), node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.generic_visit(node)
        node.body.sort(key=lambda s: s.name if isinstance(s, ast.FunctionDef) else "")
        return node


def canonical(source: str) -> str:
    """The dump of the tree without what the mutations change."""
    tree = ast.parse(source)
    aliases = {}
    for stmt in tree.body:
        for alias in stmt.names if isinstance(stmt, (ast.Import, ast.ImportFrom)) else ():
            if alias.asname and alias.asname.startswith("alias_"):
                plain = alias.asname.removeprefix("alias_")
                aliases[alias.asname] = plain
                alias.asname = plain if plain != alias.name else None
    tree = _Canonical(aliases).visit(tree)
    for func in _functions(tree):
        func.decorator_list = [d for d in func.decorator_list if ast.unparse(d) != "torch.no_grad()"]
        own, names = _locals(func), dict[str, str]()
        for n in ast.walk(func):
            if isinstance(n, ast.Name) and n.id in own:
                n.id = names.setdefault(n.id, f"local_{len(names)}")
    return ast.unparse(tree)
