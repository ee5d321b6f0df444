"""Look keys up: by meaning, through aliases, in the file first and the class defaults second."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvskill.analyzer.config.facts import Evidence, Value
from kvskill.analyzer.config.problems import invalid, refused
from kvskill.analyzer.config.rules import ClassInfo, rules

__all__ = ["Settings"]

_MISSING = object()


class Settings:
    """The language model's settings of one config, with the class behind them.

    `defaulted` collects the keys whose value came from the class.
    """

    def __init__(self, tree: Mapping[str, Any], path: str, info: ClassInfo, shown: str) -> None:
        self.tree, self.path, self.info, self.shown = tree, path, info, shown
        self.defaulted: dict[str, Any] = {}

    def where(self, key: str) -> str:
        """The key's path from the top of the file."""
        return f"{self.path}.{key}" if self.path else key

    def raw(self, key: str) -> Any:
        """The value in the file under a dotted key, or `Settings.missing`."""
        node: Any = self.tree
        for part in key.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return _MISSING
            node = node[part]
        return node

    def has(self, key: str) -> bool:
        """True when the file has the key with a value other than null."""
        return self.raw(key) not in (_MISSING, None)

    def names(self, concept: str) -> list[str]:
        """All names of a meaning, the class's own name first."""
        listed: list[str] = list(rules()["concepts"][concept])
        if self.info.role == "encoder-decoder":
            listed = rules()["decoder_first"].get(concept, []) + listed
        if key := self.info.facts.get(f"{concept}_key"):
            listed.insert(0, key)
        own = [n for n in listed if n in self.info.defaults]
        return list(dict.fromkeys(listed if self.info.role == "encoder-decoder" else own + listed))

    def find(self, concept: str) -> Value[Any] | None:
        """The value of a meaning: file, then class default; a null in the file is a value."""
        names = self.names(concept)
        found = [(n, v) for n in names if (v := self.raw(n)) is not _MISSING]
        given = [(n, v) for n, v in found if v is not None]
        if given:
            self._agree(concept, given)
            return Value(given[0][1], Evidence("key", (self.where(given[0][0]),)))
        if found:
            return Value(None, Evidence("key", (self.where(found[0][0]),), "null"))
        known = [n for n in names if n in self.info.defaults]
        if known:
            return self._default(next((n for n in known if self.info.defaults[n] is not None), known[0]))
        return None

    def get(self, *keys: str) -> Value[Any] | None:
        """The value of the first of `keys` that the file has, then the first the class has."""
        for key in keys:
            value = self.raw(key)
            if value is not _MISSING:
                return Value(value, Evidence("key", (self.where(key),)))
        for key in keys:
            if key in self.info.defaults:
                return self._default(key)
        return None

    def value(self, *keys: str) -> Any:
        """Like `get`, without the evidence; None when nobody knows."""
        found = self.get(*keys)
        return None if found is None else found.value

    def _default(self, key: str) -> Value[Any]:
        value = self.info.defaults[key]
        if value not in (None, False, 0):
            self.defaulted[key] = value
        how = f"default of {self.info.class_name or self.info.model_type}"
        return Value(value, Evidence("class-default", (key,), how))

    def _agree(self, concept: str, given: list[tuple[str, Any]]) -> None:
        """Two names of one meaning must not say two things, except where the class has both."""
        first_name, first = given[0]
        for name, other in given[1:]:
            if other != first and not (self.info.reads(name) and self.info.reads(first_name)):
                if concept in ("layers", "q_heads", "hidden", "kv_heads") and self.info.role != "encoder-decoder":
                    raise refused(
                        "KV055",
                        self.shown,
                        f"{self.where(first_name)} is {first!r} but {self.where(name)} is {other!r}.",
                        "Remove the one that the model does not use.",
                    )

    # typed access; a wrong type or range is an error of the file

    def integer(self, found: Value[Any] | None, low: int = 1, high: int | None = None) -> Value[int] | None:
        """A whole number in range, or None when absent or null."""
        if found is None or found.value is None:
            return None
        value, key = found.value, found.evidence.keys[0] if found.evidence.keys else "value"
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong_type(key, value, "a whole number")
        top = rules()["limits"]["max_value"] if high is None else high
        if not low <= value <= top:
            bound = f"below {low}" if value < low else f"above {top}"
            shown = value if abs(value) < 10**12 else "a huge number"
            raise invalid("KV050", self.shown, f"{key} is {shown}, {bound}.", "Give the model's own value.")
        return Value(value, found.evidence)

    def number(self, found: Value[Any] | None) -> Value[float] | None:
        """A finite number, or None when absent or null."""
        if found is None or found.value is None:
            return None
        value = found.value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong_type(found.evidence.keys[0], value, "a number")
        return Value(float(value), found.evidence)

    def flag(self, *keys: str) -> bool | None:
        """A boolean, or None when absent or null."""
        found = self.get(*keys)
        if found is None or found.value is None:
            return None
        if not isinstance(found.value, bool):
            raise self.wrong_type(found.evidence.keys[0], found.value, "true or false")
        return found.value

    def wrong_type(self, key: str, value: Any, wanted: str) -> Exception:
        """The error for a value of the wrong type."""
        shown = repr(value)
        shown = shown if len(shown) <= 40 else shown[:37] + "..."
        return invalid("KV049", self.shown, f"{key} is {shown}, not {wanted}.", f"Give {wanted}.")

    def counts(self, found: Value[Any] | None) -> list[int]:
        """A list of positive whole numbers."""
        values = self.whole_list(found, "whole numbers")
        if any(v < 1 for v in values):
            key = found.evidence.keys[0] if found else "value"
            raise invalid(
                "KV050", self.shown, f"{key} has the entry {min(values)}, below 1.", "Give the model's own value."
            )
        return values

    def whole_list(self, found: Value[Any] | None, what: str) -> list[int]:
        """A list of whole numbers."""
        if found is None:
            return []
        value = found.value
        if not isinstance(value, list) or any(isinstance(x, bool) or not isinstance(x, int) for x in value):
            raise self.wrong_type(found.evidence.keys[0], value, what)
        return value

    def first_given(self, keys: Iterable[str]) -> Value[Any] | None:
        """The first key the file has with a value other than null."""
        for key in keys:
            if self.has(key):
                return Value(self.raw(key), Evidence("key", (self.where(key),)))
        return None
