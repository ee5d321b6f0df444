"""Checks the operator calls in a piece of Python text against the schemas of a torch_npu release.

Static: the text is parsed, never run. A call is recognised by its last attribute (`torch_npu.X`,
`torch.ops.npu.X`, `self.fa_ops.X`); calls that spread `**kwargs` or hold a literal `...` are checked for what
they show.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvskill.opsinfo.facts import reference_data
from kvskill.opsinfo.schema import Schema, parse_schema

__all__ = ["CallProblem", "check_calls"]


@dataclass(frozen=True)
class CallProblem:
    """One wrong call: `line` is 1-based in the text given."""

    line: int
    operator: str
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.operator}: {self.text}"


def _name(func: ast.expr) -> str | None:
    if isinstance(func, ast.Attribute):
        if func.attr == "default":
            return _name(func.value)
        return func.attr
    return func.id if isinstance(func, ast.Name) else None


def _spread(call: ast.Call) -> bool:
    """True when the call shows only a part of its arguments: `*args`, `**kwargs`, or a literal `...`."""
    parts = [k.arg is None for k in call.keywords]
    parts += [isinstance(a, ast.Starred) or (isinstance(a, ast.Constant) and a.value is ...) for a in call.args]
    return any(parts)


def _fa_version(operator: str) -> int | None:
    row = reference_data("operators/fused_infer_attention")["operators"].get(operator)
    return int(row["version"]) if row else None


def _other_version(keyword: str, version: int) -> str | None:
    """The name of the same argument in this version, when `keyword` is the other version's name."""
    here, there = ("v1", "v2") if version == 1 else ("v2", "v1")
    for row in reference_data("operators/fused_infer_attention")["argument_map"]:
        theirs = [n.strip() for n in str(row[there]).split(",")]
        ours = [n.strip() for n in str(row[here]).split(",")]
        if keyword in theirs and keyword not in ours and ours != ["absent"]:
            return ", ".join(ours)
    return None


def _against(call: ast.Call, schema: Schema) -> list[str]:
    out = []
    spread = _spread(call)
    positional = schema.positional
    if not spread and len(call.args) > len(positional):
        out.append(f"{len(call.args)} positional arguments, at most {len(positional)} allowed")
    given = {a.name for a in positional[: len(call.args)]}
    for keyword in call.keywords:
        if keyword.arg is None:
            continue
        if schema.argument(keyword.arg) is None:
            out.append(f"unknown keyword {keyword.arg}")
        elif keyword.arg in given:
            out.append(f"{keyword.arg} is given twice")
        given.add(keyword.arg)
    if not spread:
        missing = [a.name for a in schema.arguments if a.default is None and a.name not in given]
        if missing:
            out.append(f"missing {', '.join(missing)}")
    return out


def _attention_rules(call: ast.Call, version: int) -> list[str]:
    """Rules that the schema cannot state: defaults that are silent, and the other version's names."""
    keywords = {k.arg: k.value for k in call.keywords if k.arg}
    spread = _spread(call)
    out = []
    for name in keywords:
        same = _other_version(name, version)
        if same:
            out.append(f"{name} is the other version's name; FA v{version} calls it {same}")
    tables: Mapping[str, Mapping[int, list[str]]] = reference_data("operators/fused_infer_attention")
    absent = [n for n in tables["required_arguments"][version] if n not in keywords]
    if absent and not spread:
        out.append(f"relies on a default for {', '.join(absent)}")
    if "block_table" in keywords and "block_size" not in keywords and not spread:
        out.append("block_table without block_size")
    mode = keywords.get("sparse_mode")
    number = mode.value if isinstance(mode, ast.Constant) else None
    if number in (1, 2, 3, 4) and "atten_mask" not in keywords and not spread:
        out.append(f"sparse_mode={number!r} without atten_mask")
    return out


def check_calls(text: str, schemas: Iterable[str]) -> list[CallProblem]:
    """Problems of the known operators' calls in `text`, in source order; raises SyntaxError.

    `schemas`: schema strings of one release. A call of an operator that it lacks is a problem.
    """
    by_name: dict[str, list[Schema]] = {}
    for item in schemas:
        schema = parse_schema(item)
        by_name.setdefault(schema.name, []).append(schema)
    known = set(by_name) | _documented()
    problems: list[CallProblem] = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = _name(node.func)
        if name is None or name not in known:
            continue
        if name not in by_name:
            problems.append(CallProblem(node.lineno, name, "this release does not register it"))
            continue
        attempts = [_against(node, s) for s in by_name[name] if s.overload != "out"]
        found = min(attempts, key=len) if attempts else ["no overload to call"]
        version = _fa_version(name)
        if version is not None:
            found = [*found, *_attention_rules(node, version)]
        problems += [CallProblem(node.lineno, name, t) for t in found]
    return sorted(problems, key=lambda p: p.line)


def _documented() -> set[str]:
    files = ("fused_infer_attention", "cache_writes", "companions")
    return {op for f in files for op in reference_data(f"operators/{f}")["operators"]}
