"""The sliding window of each layer, from what the code's masks and calls use, tied to an attribute or to config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvskill.analyzer.modeling.facts import AttentionFacts, Window
from kvskill.analyzer.modeling.values import Const, Instance, Ref, Scalar, Value
from kvskill.analyzer.modeling.walk import MISSING, Walk
from kvskill.diagnostics import Diagnostic, Severity

if TYPE_CHECKING:
    from kvskill.analyzer.modeling.reps import RepRun

__all__ = ["find_window", "window_notes", "window_of", "window_sizes"]


def window_sizes(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Sizes that a configuration gives a window or a chunk."""
    named = (v for k, v in config.items() if "window" in k or "chunk" in k)
    return tuple(sorted({v for v in named if isinstance(v, int) and not isinstance(v, bool)}))


def _shown(rep: RepRun) -> int | None:
    """Keys that the evaluated mask shows to a query, 0 for all; None where it was not evaluated."""
    seen = rep.visible
    return (seen.window or 0) if seen is not None and seen.whole and seen.doubt is None else None


def window_of(rep: RepRun) -> set[int]:
    """Window sizes (keys) that the masks show, or that enter them or the call; empty means full attention."""
    shown = _shown(rep)
    if shown is not None:
        return {shown} if shown else set()
    out: set[int] = set()
    for attend in rep.attends:
        for value in attend.windows:
            number = _number(rep.walk, value)
            # the framework's mask has 2048 rows, which is a window only where the configuration says so
            if number is not None and abs(number) > 1 and (number != 2048 or 2048 in rep.sizes):
                out.add(abs(number))
    return out


def find_window(
    instances: list[Instance], reps: list[RepRun], config: Mapping[str, Any], layer_of: Mapping[int, int]
) -> tuple[Window | None, str | None]:
    """The window of a class as an expression of `__init__`, or why it is not certain.

    `layer_of` maps id(instance) to its layer index.
    """
    window, doubt = _find_window(instances, reps, config, layer_of)
    if window is None or doubt is not None:
        return window, doubt
    return replace(window, differs=_differs(window, reps)), None


def _differs(window: Window, reps: list[RepRun]) -> str:
    """How evaluated masks differ from the window: one key more, or none in decode. Both are known slips of migrators,
    and the configuration decides."""
    size = next(w for w in window.per_layer if w)
    late = {_shown(r) for r in reps if r.run.phase == "decode"}
    early = {_shown(r) for r in reps if r.run.phase == "prefill"}
    if size + 1 in early | late:
        phases = " and ".join(p for p, s in (("prefill", early), ("decode", late)) if size + 1 in s)
        return f"its mask shows {size + 1} keys in {phases}"
    slides = any(early - {0, None}) and not any(late - {0, None}) and 0 in late
    return "its mask in decode shows all keys" if slides and window.sliding == "always" else ""


def window_notes(facts: list[AttentionFacts]) -> list[Diagnostic]:
    """A warning for each class whose own mask differs from the window that the conversion keeps."""
    out = []
    for fact in facts:
        if fact.window is not None and fact.window.differs:
            size = next(w for w in fact.window.per_layer if w)
            text = f"The window of {fact.cls.name} is {size} keys, but {fact.window.differs}."
            todo = (
                "The conversion shows the window's keys, as the original model does; past the window its logits differ "
                "from the Legacy code's. Correct the Legacy mask, or compare with `verify --against hf`."
            )
            out.append(Diagnostic("KV167", Severity.WARNING, text, todo, fact.file.span(fact.cls.node)))
    return out


def _find_window(
    instances: list[Instance], reps: list[RepRun], config: Mapping[str, Any], layer_of: Mapping[int, int]
) -> tuple[Window | None, str | None]:
    used = {id(r.inst): window_of(r) for r in reps if r.run.phase == "prefill"}
    if not any(used.values()):
        late = {w for r in reps if r.run.phase == "decode" for w in window_of(r)}
        return None, f"only decode has one ({sorted(late)})" if late else None
    walk = reps[0].walk
    sizes = {w for ws in used.values() for w in ws}
    real = {int(v) for k, v in config.items() if isinstance(v, int) and "window" in k and not isinstance(v, bool)}
    if any(_shown(r) is None for r in reps if r.run.phase == "prefill"):
        # a number of the mask: `q - k <= W - 1` and `q - k < W` are one window
        sizes = {w + 1 if w + 1 in real and w not in real else w for w in sizes}
    else:
        # one key more than configured: a slip that the configuration decides
        sizes = {w - 1 if w - 1 in real and w not in real else w for w in sizes}
    picked = sizes & real or sizes
    if len(picked) > 1:
        return None, f"it uses several window sizes ({sorted(picked)})"
    size = next(iter(picked))
    late = {w for r in reps if r.run.phase == "decode" for w in window_of(r)}
    exact = {_shown(r) for r in reps if r.run.phase == "decode"} - {None, 0}
    if any(abs(w - size) > 1 for w in late) or not exact <= {size, size + 1}:
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
