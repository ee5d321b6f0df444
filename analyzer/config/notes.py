"""Notes that a reader of the result needs: what was inert, assumed, taken from the class, or easily misread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvskill.analyzer.config.facts import ConfigFacts
from kvskill.analyzer.config.grounds import Grounds
from kvskill.analyzer.config.heads import Geometry
from kvskill.analyzer.config.nested import Located
from kvskill.analyzer.config.rules import defaults_source
from kvskill.analyzer.config.window import Window

__all__ = ["blocking_notes", "facts_notes"]


def blocking_notes(located: Located, base: Geometry | None, grounds: Grounds) -> None:
    """What makes an answer a guess: an unknown class with missing keys, and nested settings that disagree."""
    info = located.settings.info
    if not info.known and base is not None and base.assumed:
        grounds.add(
            "KV130",
            f"model_type {located.model_type!r} is not known and the file does not give {base.assumed[0]}.",
            "Add the key with the model's own value; the class may have a default of its own.",
            blocks=True,
        )
    for key in located.twins:
        grounds.add(
            "KV131",
            f"{key} at the top of the file differs from {located.settings.where(key)}.",
            "Remove the one that the model does not use.",
            blocks=True,
        )


def facts_notes(
    config: Mapping[str, Any],
    located: Located,
    base: Geometry | None,
    window: Window,
    grounds: Grounds,
    made: ConfigFacts,
) -> list[str]:
    """Notes on a finished result, and further things to watch."""
    settings = located.settings
    info = settings.info
    watch: list[str] = []
    if info.by_architecture:
        name = located.text_model_type or located.model_type
        fact = f"model_type {name!r} is not known; the class facts are those of {info.by_architecture}."
        grounds.add("KV118", fact, "Compare it with the modeling code.")
    if not info.known:
        name = located.text_model_type or located.model_type
        fact = f"model_type {name!r} is not known; the answer follows from the keys alone."
        grounds.add("KV118", fact, "Compare it with the modeling code.")
    if made.class_defaults_needed and info.class_name:
        names = ", ".join(made.class_defaults_needed[:8])
        source = defaults_source().split(":")[0]
        fact = f"The file lacks {names}; the values are the defaults of {info.class_name} ({source})."
        grounds.add("KV117", fact, "Check them against the code that runs the model.")
    raw = made.sliding_window_raw.value
    if isinstance(raw, int) and raw > 0 and made.sliding_window.value is None and window.rule:
        fact = f"The window {raw} is inert: {window.rule}."
        grounds.add("KV116", fact, "Do not pass it to the operator.", made.sliding_window_raw.evidence)
    if window.note:
        fact = f"Two readings of the window: {' or '.join(map(str, window.acceptable))}; {window.note}."
        grounds.add("KV119", fact, "Take the one of the modeling code.", made.sliding_window_raw.evidence)
    if base and made.head_dim.value and made.naive_head_dim and made.head_dim.value != made.naive_head_dim:
        fact = f"head_dim is {made.head_dim.value}, not hidden size // heads = {made.naive_head_dim}."
        grounds.add("KV120", fact, "Never compute it from the hidden size.", made.head_dim.evidence)
    if made.quant.kv_cache_quant:
        fact = f"K/V are stored quantised ({made.quant.kv_cache_quant}); kvskill converts unquantised caches."
        grounds.add(
            "KV121", fact, "Use the quantisation skill for the cache, after the conversion.", made.quant.evidence
        )
    if made.mtp.count:
        fact = (
            f"Extra prediction layers ({made.mtp.key}: {made.mtp.count}) come on top of the {len(made.layers)} slots."
        )
        grounds.add("KV123", fact, "Give them cache entries of their own where the target runs them.")
    if made.layers_declared.value is not None and made.layers_declared.value != len(made.layers):
        fact = f"The file declares {made.layers_declared.value} layers; there are {len(made.layers)} slots."
        grounds.add("KV128", fact, "Register one entry per slot.", made.layer_rule)
    if made.sinks.value != "no":
        watch.append("attention sinks: needs the operator version with a learnable-sink input")
    if made.scale.value == 1.0 and any(s.grows for s in made.layers):
        watch.append("softmax scale is 1.0: leaving the operator default or 1/sqrt(d) would be wrong")
    if any(s.kind == "chunked" for s in made.layers):
        fact = "Chunked-local layers see only keys of their own chunk; that is not a sliding window."
        grounds.add("KV112", fact, "Cache them in full and mask per chunk, or keep Legacy.")
    if any(s.kind == "cross" for s in made.layers):
        grounds.add("KV113", "Some layers attend to K/V of fixed length.", "Leave their cache as it is.")
    if any(s.kind == "state" or s.has_state for s in made.layers):
        grounds.add("KV114", "Some layers keep fixed-size state per request.", "Keep it out of the paged cache.")
    for extra in made.extra_caches:
        if "indexer" in extra.name:
            fact = f"{extra.layers} layers keep indexer keys of width {extra.head_dim} beside the K/V."
            grounds.add("KV115", fact, "Register a further entry for them.", extra.evidence)
    if "auto_map" in config and info.has_class:
        fact = "The file points at code of its own (auto_map); class facts are those of the library's class."
        grounds.add("KV129", fact, "Where the two differ, the code decides.")
    return watch
