"""Checks a skill folder against the Agent Skills format, its budgets and what goes wrong in the field."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kvskill
from kvskill.diagnostics import Diagnostic, Severity, Span
from kvskill.skillpack.frontmatter import FrontmatterError, frontmatter_problems, split_frontmatter
from kvskill.skillpack.tokens import estimate_tokens

__all__ = ["BODY_LINES", "BODY_TOKENS", "validate_skill"]

BODY_LINES, BODY_TOKENS = 250, 3000
_FIELDS = {"name", "description", "license", "allowed-tools", "metadata", "compatibility"}
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*$")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_RELATIVE_RUN = re.compile(r"(?:^|[\s`(])(?:(?:bash|sh|python3?)\s+)?(?:\./|scripts/)[\w./-]+\.(?:sh|py)\b")


def validate_skill(folder: Path, version: str | None = None) -> list[Diagnostic]:
    """Findings (KV093) for a skill folder, none when it is valid.

    `version`: what metadata.version must be; the package's own version when not given.
    """
    file = folder / "SKILL.md"
    if not file.is_file():
        return [_finding(file, 1, "There is no SKILL.md.", "Write one with a YAML head.")]
    try:
        text = file.read_text(encoding="utf-8")
        fields, body = split_frontmatter(text)
        problems = frontmatter_problems(text)
    except (OSError, UnicodeDecodeError, FrontmatterError) as exc:
        return [_finding(file, 1, f"SKILL.md cannot be loaded: {exc}.", "Correct the head; clients skip it.")]
    found = [_finding(file, 1, f"The head has a problem: {p}.", "Write plain block YAML.") for p in problems]
    folder_name = folder.resolve().name
    found += [_finding(file, 1, p, "Correct the field.") for p in _field_problems(fields, folder_name)]
    found += _version_findings(file, fields, version or kvskill.__version__)
    found += _body_findings(file, body, offset=text.count("\n") - body.count("\n"))
    return found + _file_findings(folder)


def _finding(path: Path, line: int, fact: str, todo: str) -> Diagnostic:
    return Diagnostic("KV093", Severity.ERROR, fact, todo, Span(str(path), line))


def _field_problems(fields: dict[str, Any], folder: str) -> list[str]:
    out = []
    extra = sorted(set(fields) - _FIELDS)
    if extra:
        out.append(f"The head has unknown fields: {', '.join(extra)}.")
    name = fields.get("name")
    if not isinstance(name, str) or not _NAME.match(name) or len(name) > 64:
        out.append("`name` is not 1 to 64 lowercase letters, digits and single hyphens.")
    elif name != folder:
        out.append(f"`name` is {name}, the folder is {folder}.")
    for key, limit in (("description", 1024), ("compatibility", 500)):
        value = fields.get(key, "" if key == "description" else "-")
        if not isinstance(value, str) or not 0 < len(value.strip()) <= limit:
            out.append(f"`{key}` is not 1 to {limit} characters.")
    metadata = fields.get("metadata", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        out.append("`metadata` is not a mapping from text to text (quote numbers).")
    return out


def _version_findings(file: Path, fields: dict[str, Any], version: str) -> list[Diagnostic]:
    metadata = fields.get("metadata")
    here = metadata.get("version") if isinstance(metadata, dict) else None
    if here is None or here == version:
        return []
    fact = f"The skill is of version {here}, kvskill of {version}."
    return [_finding(file, 1, fact, "Run `kvskill skill install` again.")]


def _body_findings(file: Path, body: str, offset: int) -> list[Diagnostic]:
    out = []
    lines, tokens = body.strip().count("\n") + 1, estimate_tokens(body)
    if lines >= BODY_LINES or tokens >= BODY_TOKENS:
        fact = f"The body has {lines} lines (limit {BODY_LINES}), about {tokens} tokens (limit {BODY_TOKENS})."
        out.append(_finding(file, offset + 1, fact, "Move detail into references/."))
    for i, line in enumerate(body.split("\n"), start=offset + 1):
        if _RELATIVE_RUN.search(line):
            fact = "A script is called by a relative path, but the shell starts in the user's folder."
            out.append(_finding(file, i, fact, "Call an installed command instead."))
    return out


def _file_findings(folder: Path) -> list[Diagnostic]:
    out = []
    for path in sorted(folder.rglob("*.md")):
        relative = path.relative_to(folder)
        if any(p.startswith(".") for p in relative.parts):
            continue
        if len(relative.parts) > 2:
            fact = "A reference lies more than one level deep."
            out.append(_finding(path, 1, fact, "Move it to references/."))
        text = path.read_text(encoding="utf-8")
        if relative.parts[0] == "references" and "Read this when" not in "\n".join(text.split("\n")[:6]):
            fact = "A reference does not say when to read it."
            out.append(_finding(path, 1, fact, "Begin it with `Read this when ...`."))
        for i, line in enumerate(text.split("\n"), start=1):
            for target in _LINK.findall(line):
                if "://" in target or target.startswith(("#", "mailto:")):
                    continue
                if not (path.parent / target.partition("#")[0]).exists():
                    out.append(_finding(path, i, f"The link {target} does not resolve.", "Correct it."))
    return out
