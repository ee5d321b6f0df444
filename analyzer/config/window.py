"""The window that takes effect, per layer: gates, null, zero, and windows longer than the model's positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvskill.analyzer.config.facts import Evidence, Value
from kvskill.analyzer.config.layers import Kinds
from kvskill.analyzer.config.problems import refused
from kvskill.analyzer.config.reader import Settings

__all__ = ["Window", "effective_window", "raw_window"]

_SLIDING = ("sliding", "hybrid_sliding", "compressed")
_WITHOUT = {"sliding": "full", "hybrid_sliding": "hybrid", "reference_sliding": "full"}


@dataclass(frozen=True)
class Window:
    """What the file says, what holds, and the kinds after it."""

    raw: Value[int | None]
    value: Value[int | None]
    kinds: list[str]
    per_layer: list[int | None]
    rule: str  # why the window is off, or ""
    acceptable: tuple[int, ...] = ()
    note: str = ""


def raw_window(settings: Settings) -> Value[Any]:
    """The window key's own value, before any gate (None when absent)."""
    key = settings.info.facts.get("window_key")
    found = settings.get(key) if key else None
    if found is None or found.value is None:
        found = settings.find("window")
    if (found is None or found.value is None) and (default := settings.info.facts.get("window_null")):
        return Value(default, Evidence("class-fact", (), "the class's window where none is given"))
    return found or Value(None, Evidence("absent"))


def effective_window(settings: Settings, made: Kinds) -> Window:
    """Apply gates and limits to the window and to the kinds.

    Raises Refusal KV055 when layers slide by name but no window is set.
    """
    raw = raw_window(settings)
    count = len(made.kinds)
    if isinstance(raw.value, list):
        return _listed(settings, raw, made)
    number = settings.integer(raw, low=-(2**31))
    size = number.value if number else None
    facts = settings.info.facts
    acceptable: tuple[int, ...] = ()
    note = ""
    if size is not None and facts.get("window_halve"):
        size //= 2
    if size and facts.get("window_add") and "".join(raw.evidence.keys).endswith(str(facts["window_key"])):
        acceptable = (size, size + facts["window_add"])
        note = "the class counts the query on top of this key; other code takes the key as it is"
        size += facts["window_add"]
    off = _why_off(settings, raw, size, made)
    kinds = list(made.kinds)
    named = [i for i, k in enumerate(kinds) if k in _SLIDING]
    if off:
        if made.explicit and named and not off.startswith("longer"):
            raise refused(
                "KV055",
                settings.shown,
                f"{made.evidence.keys[0]} has sliding layers, but {off}.",
                "Give the window the model was trained with.",
            )
        kinds = [_WITHOUT.get(k, k) for k in kinds]
        none: Value[int | None] = Value(None, Evidence(raw.evidence.source, raw.evidence.keys, off))
        return Window(raw, none, kinds, [None] * count, off)
    if size is not None and (made.rule_needs_window or facts.get("window") == "full_layers"):
        kinds = ["sliding" if k == "full" else k for k in kinds]
    windows = [size if k in _SLIDING else None for k in kinds]
    in_force = size if any(windows) else None
    how = "" if in_force else "no layer slides"
    value: Value[int | None] = Value(in_force, Evidence(raw.evidence.source, raw.evidence.keys, how))
    rule = "" if in_force or size is None else "no layer slides"
    return Window(raw, value, kinds, windows, rule, acceptable, note)


def _why_off(settings: Settings, raw: Value[Any], size: int | None, made: Kinds) -> str:
    """One clause that says why the window does nothing, or ""."""
    info = settings.info
    where = raw.evidence.keys[0] if raw.evidence.keys else "sliding_window"
    if raw.evidence.source == "absent":
        return "no window key is set"
    if size is None:
        return f"{where} is null"
    gate = settings.get("use_sliding_window")
    if gate is not None and gate.value is False and (not info.has_class or info.reads("use_sliding_window")):
        return f"{gate.evidence.keys[0]} is false"
    if size <= 0:
        return f"{where} is {size}"
    if info.facts.get("window") == "none" or (info.has_class and not _class_slides(settings, made)):
        return f"{info.class_name or info.model_type} does not read {where}"
    before = dict(settings.defaulted)
    limit = _positions(settings)
    if limit is not None and size >= limit.value:
        return f"longer than the model: {where}={size} >= {limit.evidence.keys[0]}={limit.value}"
    settings.defaulted = before  # the class's length decided nothing
    return ""


def _class_slides(settings: Settings, made: Kinds) -> bool:
    """True when the class is known to have a window setting (an explicit list in the file also counts)."""
    info = settings.info
    if made.explicit or "window_key" in info.facts or info.facts.get("window") == "all":
        return True
    return any(info.reads(name) for name in settings.names("window"))


def _positions(settings: Settings) -> Value[int] | None:
    """Longest position of the model, stretched by a rope factor where the file gives the short length."""
    found = settings.integer(settings.find("max_positions"))
    if found is None:
        return None
    given = settings.first_given(["rope_scaling", "rope_parameters"])
    rope = given.value if given else None
    if not isinstance(rope, dict):
        return found
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    if not isinstance(factor, (int, float)) or isinstance(factor, bool) or factor <= 1:
        return found
    if isinstance(original, int) and original < found.value:
        return found
    return Value(int(found.value * factor), Evidence("derived", found.evidence.keys, f"times rope factor {factor}"))


def _listed(settings: Settings, raw: Value[Any], made: Kinds) -> Window:
    """A window per layer, given as a list (null or non-positive: full)."""
    sizes = raw.value
    where = raw.evidence.keys[0]
    if any(x is not None and (isinstance(x, bool) or not isinstance(x, int)) for x in sizes):
        raise settings.wrong_type(where, sizes, "whole numbers or null")
    if len(sizes) != len(made.kinds):
        raise refused(
            "KV052",
            settings.shown,
            f"{where} has {len(sizes)} entries for {len(made.kinds)} layers.",
            "Give one per layer.",
        )
    windows = [x if x is not None and x > 0 else None for x in sizes]
    kinds = [
        "sliding" if w and k in ("full", "sliding") else "full" if k == "sliding" else k
        for k, w in zip(made.kinds, windows, strict=True)
    ]
    windows = [w if k == "sliding" else None for k, w in zip(kinds, windows, strict=True)]
    distinct = sorted({w for w in windows if w})
    value: Value[int | None] = Value(distinct[0] if distinct else None, Evidence("key", (where,), "a window per layer"))
    return Window(Value(None, raw.evidence), value, kinds, windows, "")
