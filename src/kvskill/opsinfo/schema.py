"""Reads one operator schema string, as a torch_npu wheel registers it. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Argument", "Schema", "parse_schema"]

_HEAD = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?:\.(?P<overload>[A-Za-z0-9_]+))?\((?P<rest>.*)$", re.DOTALL)
_ARGUMENT = re.compile(r"(?P<type>\S.*?)\s+(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?:\s*=\s*(?P<default>.*))?$", re.DOTALL)
_OPEN, _CLOSE = "([{", ")]}"


@dataclass(frozen=True)
class Argument:
    """One parameter. `type` and `default` are schema text; no default (None) means required."""

    name: str
    type: str
    default: str | None
    keyword_only: bool


@dataclass(frozen=True)
class Schema:
    """A parsed schema: `name` without namespace, `overload` empty for the default one."""

    name: str
    overload: str
    arguments: tuple[Argument, ...]
    returns: str
    text: str

    @property
    def positional(self) -> tuple[Argument, ...]:
        """The arguments that may be given by position."""
        return tuple(a for a in self.arguments if not a.keyword_only)

    @property
    def return_count(self) -> int:
        """Number of results; 0 for `()`."""
        inner = self.returns.strip()
        if not inner.startswith("("):
            return 1
        inner = inner[1:-1].strip()
        return len(_split(inner)) if inner else 0

    @property
    def mutates(self) -> tuple[str, ...]:
        """Arguments that the schema declares as written (`Tensor(a!)`)."""
        return tuple(a.name for a in self.arguments if "!" in a.type)

    def argument(self, name: str) -> Argument | None:
        """The argument of that name, or None."""
        return next((a for a in self.arguments if a.name == name), None)


def _outside_quotes(text: str) -> Iterator[tuple[int, str, int]]:
    """(index, character, bracket depth after it) of what stands outside quotes."""
    depth, quote = 0, ""
    for i, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
            continue
        if char in "\"'":
            quote = char
        depth += (char in _OPEN) - (char in _CLOSE)
        yield i, char, depth


def _split(text: str) -> list[str]:
    """Split at the commas outside brackets and quotes."""
    parts: list[str] = []
    start = 0
    for i, char, depth in _outside_quotes(text):
        if char == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return [p for p in parts if p]


def _argument_list(rest: str) -> tuple[str, str]:
    """Split what follows the first `(` into argument text and return text."""
    for i, char, depth in _outside_quotes(rest):
        if char in _CLOSE and depth == -1:
            return rest[:i], rest[i + 1 :].partition("->")[2].strip()
    raise ValueError("unbalanced brackets")


def parse_schema(text: str) -> Schema:
    """Parse `name.overload(args) -> returns`. Raises ValueError when the text is not a schema."""
    head = _HEAD.match(text.strip())
    if head is None:
        raise ValueError(f"not an operator schema: {text!r}")
    inner, returns = _argument_list(head["rest"])
    arguments: list[Argument] = []
    keyword_only = False
    for part in _split(inner):
        if part == "*":
            keyword_only = True
            continue
        match = _ARGUMENT.match(part)
        if match is None:
            raise ValueError(f"not a schema argument: {part!r} in {head['name']}")
        arguments.append(Argument(match["name"], match["type"], match["default"], keyword_only))
    return Schema(head["name"], head["overload"] or "", tuple(arguments), returns, text.strip())
