"""Attention calls and cache writes of a folder, with keyword arguments followed through `**dict` names."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass

from kvskill.analyzer.runner.files import Function, functions, leaf, own_name
from kvskill.source import SourceFile

__all__ = ["Attend", "attends", "custom_operators", "latent_write", "wraps"]

_FUSED = ("npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2")
_ORDER = ("query", "key", "value")
_LATENT_WRITES = ("npu_kv_rmsnorm_rope_cache", "npu_kv_rmsnorm_rope_cache_v2", "npu_mla_prolog_v2", "npu_mla_prolog_v3")


@dataclass(frozen=True, eq=False)
class Attend:
    """A fused attention call and its arguments by name, `**kwargs` dicts of the same function included."""

    call: ast.Call
    inside: Function
    args: dict[str, ast.expr]
    prefill: bool  # it runs in prefill: not only below a test that excludes it

    @property
    def paged(self) -> bool:
        """A block table is passed (and is not the constant None)."""
        table = self.args.get("block_table")
        return table is not None and not (isinstance(table, ast.Constant) and table.value is None)

    @property
    def latent(self) -> bool:
        """Key and value are one tensor and the rope parts come apart: attention over the compressed cache."""
        key, value = self.args.get("key"), self.args.get("value")
        same = key is not None and value is not None and ast.dump(key) == ast.dump(value)
        return same and "query_rope" in self.args


def attends(files: Iterable[SourceFile]) -> list[Attend]:
    """All fused attention calls."""
    out = []
    for file in files:
        for func in functions(file):
            dicts = _dicts(func.node)
            for node, decode_only in _calls(func.node.body, False):
                if leaf(node.func) not in _FUSED:
                    continue
                args: dict[str, ast.expr] = dict(zip(_ORDER, node.args, strict=False))
                for kw in node.keywords:
                    if kw.arg is not None:
                        args[kw.arg] = kw.value
                    elif (name := own_name(kw.value)) is not None:
                        args.update(dicts.get(name, {}))
                out.append(Attend(node, func, args, not decode_only))
    return out


def _calls(body: list[ast.stmt], decode_only: bool) -> Iterable[tuple[ast.Call, bool]]:
    """Calls with whether a test on `is_prefill` keeps prefill away from them."""
    for stmt in body:
        if isinstance(stmt, ast.If):
            word, positive = _phase_test(stmt.test)
            yield from _calls(stmt.body, decode_only or (word and not positive))
            yield from _calls(stmt.orelse, decode_only or (word and positive))
            continue
        parts = [p for name in ("body", "orelse", "finalbody") if (p := getattr(stmt, name, None))]
        if parts:
            for part in parts:
                yield from _calls(part, decode_only)
        elif not isinstance(stmt, (ast.FunctionDef, ast.ClassDef)):
            for node in ast.walk(stmt):
                if isinstance(node, ast.Call):
                    yield node, decode_only


def _phase_test(test: ast.expr) -> tuple[bool, bool]:
    """(is it a plain test of the phase, is its body the prefill side)"""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        word, positive = _phase_test(test.operand)
        return word, not positive
    name = leaf(test)
    return name == "is_prefill", True


def _dicts(func: ast.FunctionDef) -> dict[str, dict[str, ast.expr]]:
    """Dict literals and dict updates of the function, by the name that holds them."""
    out: dict[str, dict[str, ast.expr]] = {}
    for node in ast.walk(func):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for target in node.targets:
                if (name := own_name(target)) is not None:
                    out.setdefault(name, {}).update(_items(node.value))
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "update"
            and (name := own_name(node.func.value)) is not None
        ):
            for arg in node.args:
                if isinstance(arg, ast.Dict):
                    out.setdefault(name, {}).update(_items(arg))
    return out


def _items(node: ast.Dict) -> dict[str, ast.expr]:
    return {
        k.value: v
        for k, v in zip(node.keys, node.values, strict=True)
        if isinstance(k, ast.Constant) and isinstance(k.value, str)
    }


def latent_write(files: Iterable[SourceFile]) -> tuple[SourceFile, ast.Call] | None:
    """The first operator that writes a compressed (latent) cache."""
    for file in files:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Call) and leaf(node.func) in _LATENT_WRITES:
                return file, node
    return None


def custom_operators(files: Iterable[SourceFile]) -> list[tuple[SourceFile, ast.Attribute]]:
    """`torch.ops.custom.<name>`: each operator once, at its first use."""
    out, seen = [], set()
    for file in files:
        nodes = [n for n in ast.walk(file.tree) if isinstance(n, ast.Attribute) and leaf(n.value) == "custom"]
        for node in sorted(nodes, key=lambda n: n.lineno):
            inner = node.value
            if isinstance(inner, ast.Attribute) and leaf(inner.value) == "ops" and node.attr not in seen:
                seen.add(node.attr)
                out.append((file, node))
    return out


def wraps(node: ast.AST, kinds: tuple[type[ast.AST], ...]) -> bool:
    """Does any node below (itself included) have one of these types?"""
    return any(isinstance(n, kinds) for n in ast.walk(node))
