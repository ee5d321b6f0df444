"""From a rule in class_facts.yaml to one kind per layer. The rules are data; this is their meaning.

all: kind                        every layer
cycle: [kinds], key: name        the list repeats; the file's list under `key` wins
period: n, at: first|last|end    one layer of n is `hit`, the others `miss`
from: key                        layers from that index on slide
offset: [period, offset]         layers with index % period == offset are `hit`
indices: key                     listed layers are `hit`
listed: key, listed_kind, other  listed layers are one kind, the others another
flags: key                       one number per layer chooses `one` or `zero`
pairs: key                       gpt_neo's [[kinds, times], ...]
dense_every: key                 one layer of n is full, the others block-sparse
blocks: [[kind, times], ...]     the class's own list
first, last, ensure_last         kinds put over the ends
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvskill.analyzer.config.facts import Evidence, Value
from kvskill.analyzer.config.problems import refused
from kvskill.analyzer.config.reader import Settings

__all__ = ["expand"]

Kinds = tuple[list[str], Evidence]


def expand(spec: Mapping[str, Any], count: int, settings: Settings) -> Kinds | None:
    """The kinds of `count` layers, or None when the rule needs a key that nobody gives."""
    for name, function in _RULES.items():
        if name in spec:
            made = function(spec, count, settings)
            return None if made is None else (_ends(made[0], spec), made[1])
    return None


def _ends(kinds: list[str], spec: Mapping[str, Any]) -> list[str]:
    for index, kind in enumerate(spec.get("first", ())[: len(kinds)]):
        kinds[index] = kind
    if kinds and "last" in spec:
        kinds[-1] = spec["last"]
    if kinds and "ensure_last" in spec and spec["ensure_last"] not in kinds:
        kinds[-1] = spec["ensure_last"]
    return kinds


def _evidence(settings: Settings, keys: tuple[str, ...], how: str) -> Evidence:
    given = tuple(settings.where(k) for k in keys if settings.has(k))
    return Evidence("key" if given else "class-fact", given, how)


def _all(spec: Mapping[str, Any], count: int, settings: Settings) -> Kinds:
    return [spec["all"]] * count, _evidence(settings, (), f"every layer {spec['all']}")


def _cycle(spec: Mapping[str, Any], count: int, settings: Settings) -> Kinds:
    base: list[str] = list(spec["cycle"])
    return [base[i % len(base)] for i in range(count)], _evidence(settings, (), f"the class repeats {base}")


def _period_value(source: Any, settings: Settings) -> Value[int] | None:
    if isinstance(source, int):
        return Value(source, Evidence("class-fact"))
    found = settings.integer(settings.get(source["key"]))
    if found is None and "default" in source:
        settings.defaulted.setdefault(source["key"], source["default"])
        return Value(source["default"], Evidence("class-default", (source["key"],)))
    return found


def _period(spec: Mapping[str, Any], count: int, settings: Settings) -> Kinds | None:
    found = _period_value(spec["period"], settings)
    if found is None:
        return None
    hit, miss, at, n = spec.get("hit", "full"), spec.get("miss", "sliding"), spec.get("at", "last"), found.value
    shift = {"first": 0, "last": 1, "end": n - count % n + 1}[at]
    kinds = [hit if (i + shift) % n == 0 else miss for i in range(count)]
    if "listed" in spec and (listed := settings.get(spec["listed"])) and listed.value is not None:
        chosen = set(settings.whole_list(listed, "a list of layer indices"))
        kinds = [spec["listed_kind"] if i in chosen else hit for i in range(count)]
        return kinds, Evidence("key", listed.evidence.keys, f"listed layers are {spec['listed_kind']}")
    if prefix := spec.get("prefix"):
        lead = settings.integer(settings.get(prefix["count"]), low=0)
        step = settings.integer(settings.get(prefix["period"]))
        if lead and lead.value and step:
            kinds = [hit if (i + 1) % step.value == 0 else miss for i in range(min(lead.value, count))]
            kinds += [hit if (i + 1) % n == 0 else miss for i in range(count - len(kinds))]
    shape = {"first": f"i % {n} == 0", "last": f"(i+1) % {n} == 0", "end": f"(layers-1-i) % {n} == 0"}[at]
    how = f"{hit} when {shape}, else {miss}"
    keys = (spec["period"]["key"],) if isinstance(spec["period"], Mapping) else ()
    return kinds, _evidence(settings, keys, how)


def _from(spec: Mapping[str, Any], count: int, settings: Settings) -> Kinds | None:
    start = settings.integer(settings.get(spec["from"]), low=0)
    if start is None:
        return None
    if spec.get("parity"):
        kinds = ["sliding" if i % 2 == 0 and i < start.value else "full" for i in range(count)]
        how = f"even layers below {spec['from']} slide"
    else:
        kinds = ["sliding" if i >= start.value else "full" for i in range(count)]
        how = f"layers from {spec['from']} = {start.value} on slide"
    return kinds, Evidence(start.evidence.source, start.evidence.keys, how)


def _offset(spec: Mapping[str, Any], count: int, settings: Settings) -> Kinds | None:
    period_key, offset_key = spec["offset"]
    period = settings.integer(settings.get(period_key))
    offset = settings.integer(settings.get(offset_key), low=0)
    if period is None or offset is None:
        return None
    hit, miss = spec.get("hit", "full"), spec.get("miss", "state")
    lead = len(spec.get("first", ()))
    kinds = [hit if (i - lead) % period.value == offset.value else miss for i in range(count)]
    how = f"{hit} when i % {period_key}({period.value}) == {offset_key}({offset.value}), else {miss}"
    return kinds, _evidence(settings, (period_key, offset_key), how)


def _indices(spec: Mapping[str, Any], count: int, settings: Settings) -> Kinds | None:
    found = settings.get(spec["indices"])
    kind = spec.get("kind", "full")
    if found is None or found.value is None:
        if "blocks" in spec:
            return _blocks(spec, count, settings)
        everything = {"all_full": "full", "all_state": "state"}.get(spec.get("none", ""))
        return None if everything is None else _all({"all": everything}, count, settings)
    chosen = set(settings.whole_list(found, "a list of layer indices"))
    return [kind if i in chosen else "state" for i in range(count)], Evidence(
        found.evidence.source, found.evidence.keys, f"listed layers are {kind}, the others hold state"
    )


def _blocks(spec: Mapping[str, Any], count: int, settings: Settings) -> Kinds | None:
    made = [kind for kind, times in spec["blocks"] for _ in range(times)]
    if len(made) != count:
        return None
    return made, _evidence(settings, (), "the class's own list of blocks")


def _listed(spec: Mapping[str, Any], count: int, settings: Settings) -> Kinds | None:
    found = settings.get(spec["listed"])
    if (found is None or found.value is None) and "default" in spec:
        settings.defaulted.setdefault(spec["listed"], spec["default"])
        found = Value(spec["default"], Evidence("class-default", (spec["listed"],)))
    if found is None or found.value is None:
        return None
    chosen = set(settings.whole_list(found, "a list of layer indices"))
    kinds = [spec["listed_kind"] if i in chosen else spec["other"] for i in range(count)]
    how = f"layers in {spec['listed']} are {spec['listed_kind']}, the others {spec['other']}"
    return kinds, Evidence(found.evidence.source, found.evidence.keys, how)


def _flags(spec: Mapping[str, Any], count: int, settings: Settings) -> Kinds | None:
    flags = layer_flags(spec, count, settings)
    if flags is None:
        return None
    kinds = [spec["one"] if on else spec["zero"] for on in flags[0]]
    how = f"{spec['one']} where {spec['flags']} is 1, else {spec['zero']}"
    return kinds, Evidence(flags[1].source, flags[1].keys, how)


def layer_flags(spec: Mapping[str, Any], count: int, settings: Settings) -> tuple[list[bool], Evidence] | None:
    """One boolean per layer from a list of 0/1, or from an interval when the list is absent (or empty)."""
    found = settings.get(spec["flags"])
    if found is not None and found.value is not None and (found.value or not spec.get("empty_is_default")):
        values = settings.whole_list(found, "a list of 0 and 1")
        if len(values) < count:
            key = found.evidence.keys[0]
            raise refused(
                "KV052", settings.shown, f"{key} has {len(values)} entries for {count} layers.", "Give one per layer."
            )
        return [bool(v) for v in values[:count]], found.evidence
    interval = _period_value(spec["interval"], settings)
    if interval is None:
        return None
    return [(i + 1) % interval.value != 0 for i in range(count)], Evidence(
        interval.evidence.source, interval.evidence.keys, f"every {interval.value}th layer is 0"
    )


def _pairs(spec: Mapping[str, Any], count: int, settings: Settings) -> Kinds | None:
    words = {"global": "full", "local": "sliding"}
    listed = settings.first_given([spec["list"]])
    if listed and isinstance(listed.value, list):
        made = [words.get(str(w), "?") for w in listed.value]
        keys = listed.evidence.keys
    elif found := settings.first_given([spec["pairs"]]):
        try:
            made = [words.get(str(w), "?") for kinds, times in found.value for _ in range(times) for w in kinds]
        except (TypeError, ValueError):
            raise settings.wrong_type(found.evidence.keys[0], found.value, "pairs of words and a count") from None
        keys = found.evidence.keys
    else:
        return _cycle(spec, count, settings)
    if len(made) != count or "?" in made:
        raise refused(
            "KV052", settings.shown, f"{keys[0]} gives {len(made)} layers, not {count}.", "Give one word per layer."
        )
    return made, Evidence("key", keys, "global layers are full, local layers slide")


def _dense_every(spec: Mapping[str, Any], count: int, settings: Settings) -> Kinds | None:
    step = settings.integer(settings.get(spec["dense_every"]))
    if step is None:
        return ["blocksparse"] * count, _evidence(settings, (), "every layer block-sparse")
    kinds = ["full" if (i + 1) % step.value == 0 else "blocksparse" for i in range(count)]
    how = f"every {step.value}th layer dense, the others block-sparse"
    return kinds, Evidence(step.evidence.source, step.evidence.keys, how)


_RULES = {
    "all": _all,
    "indices": _indices,
    "blocks": _blocks,
    "pairs": _pairs,
    "cycle": _cycle,
    "period": _period,
    "from": _from,
    "offset": _offset,
    "listed": _listed,
    "flags": _flags,
    "dense_every": _dense_every,
}
