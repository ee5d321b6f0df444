"""Templates: the code that conversions write. Rendered text is parsed with libcst before it is used."""

from __future__ import annotations

from typing import Any

import libcst as cst

from kvskill.opsinfo.templates import render_template

__all__ = ["render"]


def render(template: str, /, **context: Any) -> str:
    """Render `template` (without .j2). The result is statements at indentation 0; a syntax error is our bug."""
    text = render_template(template, context).strip("\n") + "\n"
    cst.parse_module(text)
    return text
