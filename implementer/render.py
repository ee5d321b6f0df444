"""Templates: the code that conversions write. Rendered text is parsed with libcst before it is used."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import libcst as cst

__all__ = ["TEMPLATES", "render"]

TEMPLATES = Path(__file__).parent.parent / "templates"


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def render(template: str, /, **context: Any) -> str:
    """Render `template` (without .j2). The result is statements at indentation 0; a syntax error is our bug."""
    text = _environment().get_template(f"{template}.j2").render(context).strip("\n") + "\n"
    cst.parse_module(text)
    return text
