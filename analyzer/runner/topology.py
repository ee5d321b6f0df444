"""Lengths gathered over attention ranks: with attn_tp and attn_dp above 1, attention sees the rows of several ranks.

A paged step describes the rows of one rank. Such a topology is a task: the padding mask must be gathered as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

from kvskill.analyzer.runner.files import Function, functions, leaf
from kvskill.analyzer.yamls import YamlFacts
from kvskill.diagnostics import Diagnostic, Severity
from kvskill.source import SourceFile

__all__ = ["gathers", "topology_findings"]

_GATHERS = ("all_gather_into_tensor", "all_gather", "_all_gather_base")
_TODO = (
    "Gather the padding mask and the cached lengths over the same group before the step's metadata is built, and give "
    "each rank its own rows back; until then keep attn_dp_size 1."
)


def gathers(files: Iterable[SourceFile]) -> list[tuple[Function, ast.Call, ast.If | None]]:
    """Calls that gather `kv_len`, with the innermost test around each."""
    out = []
    for file in files:
        for func in functions(file):
            for call in [n for n in ast.walk(func.node) if isinstance(n, ast.Call) and leaf(n.func) in _GATHERS]:
                given = [*call.args, *(k.value for k in call.keywords)]
                if any(isinstance(a, ast.Name) and a.id == "kv_len" for a in given):
                    out.append((func, call, _test(func.node, call)))
    return out


def _test(func: ast.FunctionDef, call: ast.Call) -> ast.If | None:
    found = [n for n in ast.walk(func) if isinstance(n, ast.If) and any(c is call for s in n.body for c in ast.walk(s))]
    return min(found, key=lambda n: (n.end_lineno or 0) - n.lineno) if found else None


def topology_findings(files: Iterable[SourceFile], yamls: Sequence[YamlFacts]) -> tuple[Diagnostic, ...]:
    """One finding at the first gather. It blocks where every YAML of the folder asks for such a topology."""
    found = gathers(files)
    if not found:
        return ()
    func, call, _ = found[0]
    sized = [y for y in yamls if y.era != "other"]
    wide = [y for y in sized if _wide(y)]
    blocked = bool(wide) and len(wide) == len(sized)
    where = f" ({', '.join(y.path.name for y in wide)})" if wide else ""
    fact = (
        "Lengths are gathered over attention ranks here (attn_tp and attn_dp above 1); the paged step describes the "
        f"rows of one rank and raises in that topology{where}."
    )
    severity = Severity.BLOCKING if blocked else Severity.WARNING
    return (Diagnostic("KV165", severity, fact, _TODO, func.file.span(call), {"task": True}),)


def _wide(y: YamlFacts) -> bool:
    """attn_tp_size above 1 and below the world size."""
    tp = _number(y, "attn_tp_size")
    world = _number(y, "world_size")
    dp = _number(y, "attn_dp_size")
    return tp is not None and tp > 1 and ((dp or 1) > 1 or (world is not None and world > tp))


def _number(y: YamlFacts, name: str) -> int | None:
    values = [v for k, (v, _) in y.keys.items() if k.rsplit(".", 1)[-1] == name and isinstance(v, int)]
    return max(values) if values else None
