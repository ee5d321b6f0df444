"""Configuration fields that the target renamed: each read is rewritten by the table, in every file of the folder."""

from __future__ import annotations

import ast

from kvskill.analyzer.code_reader import field_uses
from kvskill.analyzer.modeling.values import Func
from kvskill.analyzer.target import migrations
from kvskill.diagnostics import Severity, Span
from kvskill.implementer.framework.context import Context
from kvskill.implementer.textops import names_read, replace_expr, statements, whole_removal
from kvskill.source import SourceFile

__all__ = ["migrate_fields"]


def migrate_fields(ctx: Context) -> None:
    """Rewrite renamed fields; removed and unknown ones become blocking findings, unless nothing reads them."""
    files = ctx.facts.program.files
    result = migrations(field_uses(files.values()), ctx.manifest.target)
    settled = {u.span for m in result.removed for u in m.uses if _settled(ctx, files[u.span.path], u.span, m.old)}
    ctx.findings.extend(f for f in result.findings if f.severity is Severity.BLOCKING and f.span not in settled)
    for move in result.renamed:
        if move.new is None:
            continue
        section, field = move.new.split(".", 1)
        for use in move.uses:
            file = files[use.span.path]
            for node in ast.walk(file.tree):
                if not isinstance(node, ast.Attribute) or file.span(node) != use.span:
                    continue
                if _inside_removed(ctx, file.shown, node):
                    continue
                owner = node.value
                if isinstance(owner, ast.Attribute):
                    text = f"{file.segment(owner.value)}.{section}.{field}"
                    replace_expr(ctx.edit_set(file), node, text, f"{move.old} became {move.new}")
                elif isinstance(owner, ast.Name) and move.old.split(".", 1)[0] == section:
                    text = f"{owner.id}.{field}"
                    replace_expr(ctx.edit_set(file), node, text, f"{move.old} became {move.new}")
                else:
                    ctx.refuse(
                        file,
                        node,
                        "KV240",
                        f"`{move.old}` moved to `{move.new}`, and this alias holds only the old section.",
                        f"Read it as `infer_config.{move.new}`.",
                    )


def _settled(ctx: Context, file: SourceFile, span: Span, field: str) -> bool:
    """Does the read go with code that goes, or serve only guards that raise? Such guards are removed."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Attribute) and file.span(node) == span:
            return _inside_removed(ctx, file.shown, node) or _drop_guards(ctx, file, node, field)
    return False


def _drop_guards(ctx: Context, file: SourceFile, node: ast.Attribute, field: str) -> bool:
    """`limit = settings.field` read by nothing but `if limit == 1: raise ...`: both go, with a warning."""
    found = next(
        (
            (cls, f)
            for cls in ctx.facts.program.classes()
            if cls.file is file
            for f in cls.node.body
            if isinstance(f, ast.FunctionDef) and any(n is node for n in ast.walk(f))
        ),
        None,
    )
    if found is None:
        return False
    cls, func = found
    stmt = next((s for s in statements(func.body) if isinstance(s, ast.Assign) and s.value is node), None)
    if stmt is None or len(stmt.targets) != 1 or not isinstance(stmt.targets[0], ast.Name):
        return False
    name = stmt.targets[0].id
    uses = [n for n in ast.walk(func) if isinstance(n, ast.Name) and n.id == name and n is not stmt.targets[0]]
    guards = [
        s
        for s in statements(func.body)
        if isinstance(s, ast.If) and not s.orelse and all(isinstance(b, ast.Raise) for b in s.body)
        if name in names_read([s.test])
    ]
    inside = {id(n) for g in guards for n in ast.walk(g)}
    if not guards or any(id(u) not in inside for u in uses):
        return False
    for guard in guards:
        ctx.optional(
            file,
            guard,
            "KV222",
            f"The target has no `{field}`; this check of it was removed.",
            "Check `scheduler_config.max_prefill_tokens` instead, if the mode needs a limit.",
        )
    ctx.mark_removed(Func(func, file, cls), {stmt, *guards})
    return True


def _inside_removed(ctx: Context, shown: str, node: ast.AST) -> bool:
    for cls in ctx.facts.program.classes():
        if any(id(f) in ctx.unrun and any(n is node for n in ast.walk(f)) for f in cls.node.body):
            return True
    for key, func in ctx.functions.items():
        if func.file.shown != shown or not isinstance(func.node, ast.FunctionDef):
            continue
        for stmt in whole_removal(func.node.body, ctx.removed.get(key, set())):
            if any(n is node for n in ast.walk(stmt)):
                return True
    return False
