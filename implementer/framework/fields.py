"""Configuration fields that the target renamed: each read is rewritten by the table, in every file of the folder."""

from __future__ import annotations

import ast

from kvskill.analyzer.code_reader import field_uses
from kvskill.analyzer.target import migrations
from kvskill.diagnostics import Severity
from kvskill.implementer.framework.context import Context
from kvskill.implementer.textops import replace_expr, whole_removal

__all__ = ["migrate_fields"]


def migrate_fields(ctx: Context) -> None:
    """Rewrite renamed fields; removed and unknown ones become blocking findings."""
    files = ctx.facts.program.files
    result = migrations(field_uses(files.values()), ctx.manifest.target)
    ctx.findings.extend(f for f in result.findings if f.severity is Severity.BLOCKING)
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


def _inside_removed(ctx: Context, shown: str, node: ast.AST) -> bool:
    for key, func in ctx.functions.items():
        if func.file.shown != shown or not isinstance(func.node, ast.FunctionDef):
            continue
        for stmt in whole_removal(func.node.body, ctx.removed.get(key, set())):
            if any(n is node for n in ast.walk(stmt)):
                return True
    return False
