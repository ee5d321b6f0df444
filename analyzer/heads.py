"""Head counts against the tensor-parallel sizes of every YAML, and settings that the framework itself rejects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvskill.analyzer.selection.limits import Limits
from kvskill.analyzer.yamls import YamlFacts
from kvskill.diagnostics import Diagnostic, Severity
from kvskill.manifest import Group

__all__ = ["check_runs"]


def check_runs(yamls: Sequence[YamlFacts], groups: Sequence[Group], limits: Limits) -> Iterator[Diagnostic]:
    """Findings per YAML: sizes that do not divide, heads that do not split, latent heads that the operator rejects."""
    for facts in yamls:
        run = facts.settings
        if facts.era == "other":
            continue
        if run.world_size % run.attn_tp_size:
            yield _unfit(
                facts,
                "attn_tp_size",
                f"world_size {run.world_size} is no multiple of attn_tp_size {run.attn_tp_size}",
            )
            continue
        if run.batch_per_rank < 1:
            yield _unfit(
                facts,
                "batch_size",
                f"batch_size {run.batch_size} is less than the {run.world_size // run.attn_tp_size} "
                "data-parallel ranks",
            )
        yield from _heads(facts, groups, limits)


def _heads(facts: YamlFacts, groups: Sequence[Group], limits: Limits) -> Iterator[Diagnostic]:
    tp = facts.settings.attn_tp_size
    span = facts.setting_span("attn_tp_size")
    seen: set[tuple[int, int, bool]] = set()
    for group in groups:
        latent = group.attention == "MLA"
        key = (group.q_heads, group.kv_heads, latent)
        if key in seen or not group.q_heads:
            continue
        seen.add(key)
        if group.q_heads % tp:
            yield Diagnostic(
                "KV027",
                Severity.WARNING,
                f"{group.q_heads} query heads do not split over attn_tp_size {tp}.",
                "The framework refuses this file; correct attn_tp_size.",
                span,
            )
        elif latent and group.q_heads // tp not in limits["mla_q_heads"]:
            yield Diagnostic(
                "KV028",
                Severity.WARNING,
                f"attn_tp_size {tp} leaves {group.q_heads // tp} query heads per rank; absorbed attention takes "
                f"{', '.join(map(str, limits['mla_q_heads']))} ({limits.profile}).",
                "Choose an attn_tp_size that leaves a power of two.",
                span,
            )
        elif not latent and group.kv_heads and group.kv_heads % tp and tp % group.kv_heads:
            yield Diagnostic(
                "KV027",
                Severity.WARNING,
                f"{group.kv_heads} KV heads neither split over attn_tp_size {tp} nor repeat on its ranks.",
                "Choose an attn_tp_size that divides the KV heads or is a multiple of them.",
                span,
            )


def _unfit(facts: YamlFacts, name: str, fact: str) -> Diagnostic:
    return Diagnostic(
        "KV029",
        Severity.WARNING,
        f"{fact[0].upper()}{fact[1:]}.",
        "The framework refuses this file; correct it.",
        facts.setting_span(name),
    )
