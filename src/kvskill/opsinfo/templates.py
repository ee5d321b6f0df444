"""The code templates: their headers, and rendering with a context. Imports jinja2 only when it renders.

A template begins with a comment block that says `name`, `operators`, `constraints`, `evidence`, and whatever else
its author adds, one `key: value` each (a value goes on over indented lines).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

__all__ = ["TemplateInfo", "list_templates", "render_template"]

_HEADER = re.compile(r"\A\s*\{#-?(?P<text>.*?)-?#\}\n?", re.DOTALL)
_FIELD = re.compile(r"(?P<key>[a-z][a-z_ -]*):(?:\s+(?P<value>.*))?$")


@dataclass(frozen=True)
class TemplateInfo:
    """One template. `name`: path below `templates/` without the ending. `header`: its fields, in order."""

    name: str
    file: str
    header: dict[str, str]
    body: str

    @property
    def summary(self) -> str:
        """The first line of what the template says of itself."""
        for key in ("summary", "what", "purpose", "name"):
            if self.header.get(key):
                return self.header[key]
        return self.name


def _root() -> Traversable:
    return resources.files("kvskill").joinpath("templates")


def _walk(folder: Traversable, prefix: str = "") -> list[tuple[str, Traversable]]:
    out: list[tuple[str, Traversable]] = []
    for entry in sorted(folder.iterdir(), key=lambda e: e.name):
        if entry.is_dir():
            out += _walk(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".j2"):
            out.append((f"{prefix}{entry.name}", entry))
    return out


def parse_header(text: str) -> tuple[dict[str, str], str]:
    """(fields, rest) of a template text; no fields when it does not begin with a comment."""
    match = _HEADER.match(text)
    if match is None:
        return {}, text
    fields: dict[str, str] = {}
    key = ""
    for line in match["text"].splitlines():
        found = _FIELD.match(line.strip()) if not line.startswith((" " * 4, "\t")) or not key else None
        if found:
            key = found["key"]
            fields[key] = (found["value"] or "").strip()
        elif key and line.strip():
            fields[key] = f"{fields[key]} {line.strip()}".strip()
    return fields, text[match.end() :]


def list_templates() -> dict[str, TemplateInfo]:
    """Every packaged template by name."""
    out = {}
    for file, entry in _walk(_root()):
        header, body = parse_header(entry.read_text(encoding="utf-8"))
        name = file.removesuffix(".j2").removesuffix(".py")
        out[name] = TemplateInfo(name, file, header, body)
    return out


def render_template(name: str, context: dict[str, Any]) -> str:
    """The code of a template. Raises KeyError for an unknown one, jinja2.UndefinedError for a missing value."""
    import jinja2

    info = list_templates()[name]
    env = jinja2.Environment(
        loader=jinja2.FunctionLoader(_load),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return env.get_template(info.file).render(**context)


def _load(file: str) -> str | None:
    for name, entry in _walk(_root()):
        if name == file:
            return entry.read_text(encoding="utf-8")
    return None
