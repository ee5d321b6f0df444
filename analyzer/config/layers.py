"""Which kind each layer is: from lists in the file, else from the class's rule, else from the window alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvskill.analyzer.config.expand import expand
from kvskill.analyzer.config.facts import Evidence, Value
from kvskill.analyzer.config.problems import invalid, refused
from kvskill.analyzer.config.reader import Settings
from kvskill.analyzer.config.rules import rules

__all__ = ["Kinds", "layer_kinds"]

_WORD_KEYS = ("layer_types", "layers_block_type", "attn_layer_types", "layer_block_types")
_CYCLE_KEYS = ("block_types", "_block_types")


@dataclass(frozen=True)
class Kinds:
    """One kind per layer, as `layer_words` names them; `explicit` when the file lists them."""

    kinds: list[str]
    evidence: Evidence
    explicit: bool
    rule_needs_window: bool = False  # no list: a window, when set, covers every layer


def layer_kinds(settings: Settings, declared: Value[int] | None, mtp: int) -> Kinds:
    """The kinds in layer order.

    Raises InputError/Refusal: KV050 (layer count), KV052 (list length), KV053 (unknown word), KV054 (no layer count),
    KV057 (a rule that is read in two ways and no class to decide).
    """
    listed = _from_words(settings) or _from_letters(settings)
    if listed is not None:
        return _fit(listed, settings, declared, mtp)
    if declared is None and (default := settings.info.facts.get("layers_default")):
        declared = Value(int(default), Evidence("class-fact", (), "the class's own list"))
    if declared is None:
        raise refused("KV054", settings.shown, "No key gives the number of layers.", "Add the model's own layer count.")
    count = declared.value
    facts = settings.info.facts
    if made := _from_indices(settings, count):
        return made
    if spec := facts.get("layers"):
        if "required" in spec:
            raise refused(
                "KV054",
                settings.shown,
                f"{settings.where(spec['required'])} is missing, and its class has no default for it.",
                "Add the model's own list.",
            )
        if expanded := expand(spec, count, settings):
            kinds = [facts.get("full_means", k) if k == "full" else k for k in expanded[0]]
            return Kinds(kinds, expanded[1], explicit=False)
    if not settings.info.has_class and (made := _from_keys(settings, count)):
        return made
    return Kinds(
        ["full"] * count,
        Evidence("derived", declared.evidence.keys, "no per-layer rule"),
        False,
        rule_needs_window=True,
    )


def _word_map() -> dict[str, str]:
    return {word: kind for kind, words in rules()["layer_words"].items() for word in words}


def _from_words(settings: Settings) -> Kinds | None:
    facts = settings.info.facts
    for key in _WORD_KEYS + _CYCLE_KEYS:
        if not settings.has(key):
            continue
        value = settings.raw(key)
        where = settings.where(key)
        if not isinstance(value, list) or not value or any(not isinstance(x, str) for x in value):
            raise settings.wrong_type(where, value, "a list of layer kinds")
        if len(value) > rules()["limits"]["max_layers"]:
            raise invalid("KV050", settings.shown, f"{where} has {len(value)} entries.", "Give the model's own list.")
        words = _word_map()
        unknown = sorted({x for x in value if x not in words})
        if unknown:
            raise refused(
                "KV053",
                settings.shown,
                f"{where} has the unknown layer kind {unknown[0]!r}.",
                "Decide by the modeling code what such a layer caches, or report the word to kvskill.",
            )
        kinds = [words[x] for x in value]
        if "full_means" in facts:
            kinds = [facts["full_means"] if k == "full" else k for k in kinds]
        how = key if key in _WORD_KEYS else f"{key}, repeated"
        return Kinds(kinds, Evidence("key", (where,), how), explicit=True, rule_needs_window=key in _CYCLE_KEYS)
    return None


def _from_letters(settings: Settings) -> Kinds | None:
    for key, letters in rules()["layer_letters"].items():
        if not settings.has(key):
            continue
        value, where = settings.raw(key), settings.where(key)
        if key == "sliding_window_pattern":
            if not isinstance(value, str):
                continue
            value = value.replace("-", "")
        if not isinstance(value, (str, list)) or not value:
            raise settings.wrong_type(where, value, "one entry per layer")
        unknown = [x for x in value if not isinstance(x, (str, int)) or x not in letters]
        if unknown:
            raise refused(
                "KV053",
                settings.shown,
                f"{where} has the unknown entry {unknown[0]!r}.",
                "Decide by the modeling code what such a layer caches, or report the entry to kvskill.",
            )
        kinds = [letters[x] for x in value]
        said = ", ".join(f"{k} {v}" for k, v in letters.items())
        cyclic = key == "sliding_window_pattern"
        return Kinds(kinds, Evidence("key", (where,), f"{key} ({said})"), explicit=True, rule_needs_window=cyclic)
    freq = "sparse_attention_config.sparse_attention_freq"
    if settings.has(freq):
        values = settings.whole_list(settings.get(freq), "a list of 0 and 1")
        kinds = ["block_indexed" if x else "full" for x in values]
        return Kinds(kinds, Evidence("key", (settings.where(freq),), "1: selected blocks, 0: full"), explicit=True)
    return None


def _fit(made: Kinds, settings: Settings, declared: Value[int] | None, mtp: int) -> Kinds:
    """A list must have one entry per layer; MTP entries behind it and repeating lists are known exceptions."""
    kinds = made.kinds
    if declared is None or len(kinds) == declared.value:
        return Kinds(kinds, made.evidence, made.explicit)
    count = declared.value
    if made.rule_needs_window:  # the list repeats
        return Kinds([kinds[i % len(kinds)] for i in range(count)], made.evidence, made.explicit)
    if settings.info.facts.get("layers_from_pattern"):
        return made
    if mtp and len(kinds) == count + mtp:
        how = f"{made.evidence.how}; {mtp} further entries belong to the MTP layers"
        return Kinds(kinds[:count], Evidence("key", made.evidence.keys, how), made.explicit)
    where = made.evidence.keys[0]
    raise refused(
        "KV052",
        settings.shown,
        f"{where} has {len(kinds)} entries, but {declared.evidence.keys[0]} is {count}.",
        "Give one entry per layer.",
    )


def _from_indices(settings: Settings, count: int) -> Kinds | None:
    for key in rules()["sliding_index_keys"]:
        if settings.has(key):
            made = expand({"listed": key, "listed_kind": "sliding", "other": "full"}, count, settings)
            if made:
                return Kinds(made[0], made[1], explicit=True)
    for rule in rules()["attention_index_keys"]:
        if not settings.has(rule["key"]):
            continue
        found = settings.get(rule["key"])
        assert found is not None
        chosen = {x - rule["base"] for x in settings.whole_list(found, "a list of layer indices")}
        if any(not 0 <= x < count for x in chosen):
            raise refused(
                "KV052", settings.shown, f"{found.evidence.keys[0]} names a layer beyond {count}.", "Correct the list."
            )
        kinds = ["full" if i in chosen else "state" for i in range(count)]
        how = "listed layers are attention, the others hold fixed-size state"
        return Kinds(kinds, Evidence("key", found.evidence.keys, how), explicit=True)
    return None


def _from_keys(settings: Settings, count: int) -> Kinds | None:
    """Rules that follow from a key alone, for a model_type without a class."""
    generic: list[Mapping[str, Any]] = [
        {"listed": "cross_attention_layers", "listed_kind": "cross", "other": "full"},
        {"offset": ["attn_layer_period", "attn_layer_offset"]},
        {"indices": "hybrid_layer_ids", "kind": "hybrid"},
    ]
    for rule in rules()["period_keys"]:
        if settings.has(rule["key"]) and not isinstance(settings.raw(rule["key"]), str):
            spec = {"period": {"key": rule["key"]}, **{k: rule[k] for k in ("at", "hit", "miss")}}
            made = expand(spec, count, settings)
            if made:
                return Kinds(made[0], made[1], explicit=False)
    for rule_spec in generic:
        made = expand(rule_spec, count, settings)
        if made:
            return Kinds(made[0], made[1], explicit=False)
    if settings.has("max_window_layers") and settings.has("use_sliding_window"):
        made = expand({"from": "max_window_layers"}, count, settings)
        if made:
            return Kinds(made[0], made[1], explicit=False)
    for key in rules()["ambiguous_period_keys"]:
        if settings.has(key):
            raise refused(
                "KV057",
                settings.shown,
                f"{settings.where(key)} is read differently by different classes, and this model_type is not known.",
                "Read the layer rule in the modeling code, and add layer_types to the config.",
            )
    marks = [k for k in settings.tree if k.startswith(tuple(rules()["other_state_marks"])) and settings.raw(k)]
    if marks and not settings.info.known:
        raise refused(
            "KV057",
            settings.shown,
            f"{settings.where(marks[0])} belongs to layers with other state than K and V; no key says which they are.",
            "Read the layer rule in the modeling code, and add layer_types to the config.",
        )
    return None
