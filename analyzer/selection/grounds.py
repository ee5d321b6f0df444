"""Grounds against paging, each with the place it stands on: from the config, the code, and the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvskill.analyzer.config.facts import ConfigFacts
from kvskill.analyzer.selection.code import CodeView
from kvskill.diagnostics import Diagnostic, Severity, Span
from kvskill.manifest import Evidence, Group, TargetProfile

__all__ = ["Ground", "code_grounds", "config_grounds", "geometry_grounds", "target_grounds"]

Mode = Literal["paged", "legacy", "out-of-scope"]
# ground -> (code, what the code does); the ids are those of CodeView.grounds
_IN_CODE = {
    "softcap": ("KV070", "caps the attention scores"),
    "bias": ("KV071", "adds a bias to the attention scores"),
    "non-causal": ("KV072", "attends without a causal mask"),
    "cross": ("KV072", "attends over another sequence"),
    "block-sparse": ("KV073", "masks keys by blocks"),
    "chunked": ("KV073", "masks keys outside the query's chunk"),
    "shared": ("KV074", "shares K/V between layers in a way that cannot be followed"),
}
_TODO = "Legacy is kept: offline inference only. Nothing is rewritten."


@dataclass(frozen=True)
class Ground:
    """One reason to keep Legacy, with its evidence."""

    text: str
    evidence: Evidence
    finding: Diagnostic | None = None


def config_grounds(facts: ConfigFacts) -> tuple[Mode, tuple[Ground, ...]]:
    """The config's own verdict and its grounds."""
    verdict = facts.verdict
    if verdict.verdict == "paged":
        return "paged", ()
    blocking = [f for f in facts.findings if f.code in verdict.grounds]
    mode: Mode = "out-of-scope" if verdict.verdict == "out-of-scope" else "legacy"
    if not blocking:
        where = Evidence(kind="config", ref=facts.shown, note=verdict.reason)
        return mode, (Ground(verdict.reason, where),)
    return mode, tuple(
        Ground(f"{f.fact.rstrip('.')} ({f.span})", Evidence(kind="config", ref=str(f.span), note=f.fact))
        for f in blocking
    )


def code_grounds(code: CodeView | None, facts: ConfigFacts | None) -> tuple[Ground, ...]:
    """Grounds that the modeling code shows. The code wins over the config."""
    out = []
    for name, seen in (code.grounds if code is not None else {}).items():
        number, verb = _IN_CODE[name]
        text = f"the attention {verb} at {seen.span}"
        finding = Diagnostic(number, Severity.WARNING, f"The attention {verb}.", _TODO, seen.span)
        out.append(Ground(text, Evidence(kind="code", ref=str(seen.span), note=seen.value), finding))
    return tuple(out)


def geometry_grounds(facts: ConfigFacts, rejected: Sequence[tuple[Group, str]], shown: str) -> tuple[Ground, ...]:
    """Head geometry that no layout of the operator takes."""
    out = []
    for group, why in rejected:
        keys = ",".join((facts.mla.evidence if facts.mla is not None else facts.head_dim.evidence).keys)
        ref = f"{shown}:{keys}" if keys else shown
        layers = f"layers {group.layers[0]}..{group.layers[-1]}"
        finding = Diagnostic("KV075", Severity.WARNING, f"For {layers}, {why}.", _TODO, Span(shown))
        out.append(Ground(f"{layers}: {why}", Evidence(kind="config", ref=ref, note=why), finding))
    return tuple(out)


def target_grounds(
    facts: ConfigFacts | None,
    profile: TargetProfile,
    groups: Sequence[Group],
    *,
    sinks: bool,
    standalone: bool,
) -> tuple[Ground, ...]:
    """What this target lacks for this model. A standalone runner needs no cache manager."""
    out = []
    if standalone:
        return ()
    if profile.found and not profile.paged:
        out.append(
            _target(
                "KV077",
                "the target framework has no CacheEntry and ModelCacheInfo (older than 2026-04-26)",
                "Update the target repository, or analyze with --repo pointing at a newer tree.",
            )
        )
    state = [x for x in facts.layers if x.kind == "state" or x.has_state] if facts is not None else []
    if state and not profile.mamba_cache_entry:
        out.append(
            _target(
                "KV078",
                f"{len(state)} layers keep recurrent state, and the target has no MambaCacheEntry",
                "Update the target to 2026-07-27 or later; until then Legacy is kept.",
            )
        )
    for kind in sorted({g.attn_type for g in groups} - set(profile.attn_types)):
        if profile.paged:
            out.append(_target("KV077", f"the target has no manager for {kind}", "Update the target repository."))
    if any(g.manager_key for g in groups) and "manager_key" not in profile.cache_entry_fields and profile.paged:
        out.append(
            _target(
                "KV077",
                "the model needs two groups of one attn_type, and the target's CacheEntry has no manager_key",
                "Update the target to 2026-06-11 or later; until then Legacy is kept.",
            )
        )
    return tuple(out)


def _target(code: str, text: str, todo: str) -> Ground:
    where = Span("executor")
    finding = Diagnostic(code, Severity.WARNING, f"{text[0].upper()}{text[1:]}.", todo, where)
    return Ground(text, Evidence(kind="target", ref="executor", note=text), finding)
