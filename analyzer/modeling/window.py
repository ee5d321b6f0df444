"""The sliding window of each layer, from what the code's masks and calls use, tied to an attribute or to config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvskill.analyzer.modeling.facts import Window
from kvskill.analyzer.modeling.seam import RepRun
from kvskill.analyzer.modeling.values import Const, Instance, Ref, Scalar, Value
from kvskill.analyzer.modeling.walk import MISSING, Walk

__all__ = ["find_window", "window_of"]


def window_of(rep: RepRun) -> set[int]:
    """Window sizes (keys) that enter the masks or the call of one object; empty means full attention."""
    out: set[int] = set()
    for attend in rep.attends:
        for value in attend.windows:
            number = _number(rep.walk, value)
            if number is not None and abs(number) > 1 and number != 2048:
                out.add(abs(number))
    return out


def find_window(
    instances: list[Instance], reps: list[RepRun], config: Mapping[str, Any], layer_of: Mapping[int, int]
) -> tuple[Window | None, str | None]:
    """The window of a class as an expression of `__init__`, or why it is not certain.

    `layer_of` maps id(instance) to its layer index.
    """
    used = {id(r.inst): window_of(r) for r in reps if r.run.phase == "prefill"}
    if not any(used.values()):
        late = {w for r in reps if r.run.phase == "decode" for w in window_of(r)}
        return None, f"only decode has one ({sorted(late)})" if late else None
    walk = reps[0].walk
    sizes = {w for ws in used.values() for w in ws}
    real = {int(v) for k, v in config.items() if isinstance(v, int) and "window" in k and not isinstance(v, bool)}
    # `q - k <= W - 1` and `q - k < W` are one window
    sizes = {w + 1 if w + 1 in real and w not in real else w for w in sizes}
    picked = sizes & real if sizes & real else sizes
    if len(picked) > 1:
        return None, f"it uses several window sizes ({sorted(picked)})"
    size = next(iter(picked))
    late = {w for r in reps if r.run.phase == "decode" for w in window_of(r)}
    if any(abs(w - size) > 1 for w in late):
        return None, f"prefill sees {size} keys and decode {sorted(late)}"
    windowed = {i: bool(ws) for i, ws in used.items()}
    for name in instances[0].attrs:
        values = [_attr_window(walk, inst.attrs.get(name)) for inst in instances]
        if any(v is MISSING for v in values) or not any(v == size for v in values):
            continue
        if all((id(i) not in windowed) or (bool(v) == windowed[id(i)]) for i, v in zip(instances, values, strict=True)):
            return Window(f"self.{name}", name, tuple(v or None for v in values)), None
    source = next((k for k, v in config.items() if v == size and "window" in k), None)
    if source is None:
        return None, f"its window of {size} is neither an attribute nor a configuration key"
    types = config.get("layer_types")
    if all(windowed.values()):
        return Window(f"config.{source}", None, tuple(size for _ in instances)), None
    for name in instances[0].attrs:
        flags = [_attr_flag(walk, inst.attrs.get(name)) for inst in instances]
        if any(f is None for f in flags):
            continue
        for want in (True, False):
            if all(
                (id(i) not in windowed) or (bool(f) is want) == windowed[id(i)]
                for i, f in zip(instances, flags, strict=True)
            ):
                test = f"self.{name}" if want else f"not self.{name}"
                expr = f"config.{source} if {test} else None"
                return Window(expr, None, tuple(size if bool(f) is want else None for f in flags)), None
    for name in instances[0].attrs:
        words = [_attr_word(walk, inst.attrs.get(name)) for inst in instances]
        known = {words[i] for i, inst in enumerate(instances) if windowed.get(id(inst))}
        other = {words[i] for i, inst in enumerate(instances) if windowed.get(id(inst)) is False}
        if None not in words and len(known) == 1 and not known & other:
            word = next(iter(known))
            expr = f'config.{source} if self.{name} == "{word}" else None'
            return Window(expr, None, tuple(size if w == word else None for w in words)), None
    if isinstance(types, list):
        kinds = [types[layer_of[id(i)]] for i in instances]
        sliding = {k for i, k in zip(instances, kinds, strict=True) if windowed.get(id(i))}
        full = {k for i, k in zip(instances, kinds, strict=True) if windowed.get(id(i)) is False}
        if len(sliding) == 1 and not sliding & full:
            kind = next(iter(sliding))
            expr = f'config.{source} if config.layer_types[layer_idx] == "{kind}" else None'
            return Window(expr, None, tuple(size if k == kind else None for k in kinds)), None
    return None, "the condition that tells sliding from full layers is not an attribute of the attention object"


def _number(walk: Walk, value: Value) -> int | None:
    dim = walk.as_dim(value)
    return walk.concrete_dim(dim) if dim is not None else None


def _attr_window(walk: Walk, value: Value | None) -> Any:
    if value is None:
        return MISSING
    if isinstance(value, Const):
        return (
            value.value
            if value.value is None or (isinstance(value.value, int) and not isinstance(value.value, bool))
            else MISSING
        )
    if isinstance(value, Ref):
        known = walk.concrete(value.path)
        return known if known is None or (isinstance(known, int) and not isinstance(known, bool)) else MISSING
    if isinstance(value, Scalar) and value.dim is not None:
        known2 = walk.concrete_dim(value.dim)
        return MISSING if known2 is None else known2
    return MISSING


def _attr_flag(walk: Walk, value: Value | None) -> bool | None:
    if isinstance(value, Const) and isinstance(value.value, bool):
        return value.value
    return None


def _attr_word(walk: Walk, value: Value | None) -> str | None:
    known = walk.concrete(value.path) if isinstance(value, Ref) else value.value if isinstance(value, Const) else None
    return known if isinstance(known, str) else None
