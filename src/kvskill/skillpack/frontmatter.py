"""Reads the YAML head of SKILL.md and role files, as strictly as the strictest loader."""

from __future__ import annotations

from typing import Any

import yaml

__all__ = ["FrontmatterError", "frontmatter_problems", "split_frontmatter"]

_FENCE = "---"


class FrontmatterError(ValueError):
    """The head is missing or is not YAML; the text says why."""


def _raw(text: str) -> tuple[str, str]:
    lines = text.replace("\r\n", "\n").split("\n")
    if lines[0] != _FENCE:
        raise FrontmatterError("the first line is not ---")
    for i, line in enumerate(lines[1:], start=1):
        if line == _FENCE:
            return "\n".join(lines[1:i]), "\n".join(lines[i + 1 :])
    raise FrontmatterError("the head is not closed by a line ---")


def split_frontmatter(text: str) -> tuple[dict[str, Any], str]:
    """(fields, body). Raises FrontmatterError."""
    head, body = _raw(text)
    try:
        fields = yaml.safe_load(head)
    except yaml.YAMLError as exc:
        problem = getattr(exc, "problem", None) or str(exc)
        raise FrontmatterError(f"the head is not valid YAML: {problem}") from None
    if not isinstance(fields, dict):
        raise FrontmatterError("the head is not a mapping")
    return fields, body


def frontmatter_problems(text: str) -> list[str]:
    """What plain YAML accepts and some loaders do not: flow style, twice the same key, --- inside a value."""
    head, _ = _raw(text)
    problems = []
    if _FENCE in head:
        problems.append("three hyphens inside the head: some loaders read only what comes before them")
    problems += _node_problems(yaml.compose(head))
    return problems


def _node_problems(node: yaml.Node | None) -> list[str]:
    if isinstance(node, yaml.MappingNode):
        out = ["flow style ({...}) is not accepted by every loader"] if node.flow_style else []
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen:
                out.append(f"the key {key.value} is given twice")
            seen.add(key.value)
            out += _node_problems(value)
        return out
    if isinstance(node, yaml.SequenceNode):
        out = ["flow style ([...]) is not accepted by every loader"] if node.flow_style else []
        return out + [p for item in node.value for p in _node_problems(item)]
    return []
