"""Reasons for and against paging, each a finding with the key it stands on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvskill.analyzer.config.facts import Evidence, LayerFacts, MlaFacts, Value
from kvskill.analyzer.config.reader import Settings
from kvskill.analyzer.config.rules import rules
from kvskill.diagnostics import Diagnostic, Severity, Span

__all__ = ["Grounds", "operator_grounds", "score_grounds"]


@dataclass
class Grounds:
    """Findings collected while the facts are put together."""

    shown: str
    findings: list[Diagnostic] = field(default_factory=list)

    def add(self, code: str, fact: str, todo: str, evidence: Evidence | None = None, *, blocks: bool = False) -> None:
        """A ground against paging (`blocks`) or a note."""
        severity = Severity.BLOCKING if blocks else Severity.NOTE
        data: dict[str, Any] = {"keys": list(evidence.keys), "source": evidence.source} if evidence else {}
        self.findings.append(Diagnostic(code, severity, fact, todo, Span(self.shown), data))

    @property
    def blocking(self) -> list[Diagnostic]:
        return [f for f in self.findings if f.severity is Severity.BLOCKING]


_KEEP = "Keep the Legacy cache (offline inference only), or change the attention to one the operator has."


def score_grounds(
    settings: Settings,
    slots: tuple[LayerFacts, ...],
    kinds: list[str],
    grounds: Grounds,
    softcap: Value[float | None],
    alibi: Value[bool],
) -> None:
    """Whatever stands between the product and the softmax besides scale, causal mask and window."""
    if softcap.value is not None:
        fact = (
            f"Scores are soft-capped at {softcap.value:g} ({_at(softcap.evidence)}); the operator has no softcap input."
        )
        grounds.add("KV100", fact, _KEEP, softcap.evidence, blocks=True)
    if alibi.value:
        fact = (
            f"Scores get an ALiBi bias ({_at(alibi.evidence)}), which the operator's packed paged path does not take."
        )
        grounds.add("KV101", fact, _KEEP, alibi.evidence, blocks=True)
    compressed = sum(k == "compressed" for k in kinds)
    if compressed:
        fact = f"{compressed} layers attend to a window and to pooled keys, which no cache type of the target holds."
        grounds.add("KV110", fact, _KEEP, blocks=True)
    sparse = sum(s.kind == "blocksparse" for s in slots)
    if sparse:
        fact = f"{sparse} layers attend to a block pattern; the fused operator has no mask mode for it."
        grounds.add("KV102", fact, _KEEP, blocks=True)
    for rule in rules()["score_keys"]:
        found = settings.get(rule["key"])
        if found is None or found.value is None or found.value in rule["idle"] or found.value in ({}, [], ""):
            continue
        if rule.get("blocksparse") and sparse:
            continue
        if found.evidence.source == "class-default" and not rule["ground"]:
            continue
        _score(rule["note"], rule["ground"], found.evidence, grounds)
    known = settings.info.facts.get("score")
    if isinstance(known, dict):
        switch = known.get("key")
        if switch is None or settings.value(switch):
            if not any(d.fact.startswith(_sentence(known["note"])) for d in grounds.findings):
                _score(known["note"], known["ground"], Evidence("class-fact"), grounds)


def _score(note: str, ground: bool, evidence: Evidence, grounds: Grounds) -> None:
    where = f" ({_at(evidence)})" if evidence.keys else ""
    if ground:
        fact = f"{_sentence(note)}{where}; the fused operator has no input for it."
        grounds.add("KV103", fact, _KEEP, evidence, blocks=True)
    else:
        todo = "Keep the statements that do it; they stand before the cache write."
        grounds.add("KV126", f"{_sentence(note)}{where}.", todo, evidence)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _at(evidence: Evidence) -> str:
    return evidence.keys[0] if evidence.keys else evidence.how or "class fact"


def operator_grounds(slots: tuple[LayerFacts, ...], mla: MlaFacts | None, grounds: Grounds) -> list[str]:
    """Widths and counts that no layout takes are grounds; the others are things to watch."""
    limits = rules()["operator"]
    watch: list[str] = []
    grows = [s for s in slots if s.grows]
    for name in ("kv_lora_rank", "qk_rope_head_dim"):
        if mla and getattr(mla, name) not in limits["mla"][name] and any(s.cache_width for s in grows):
            have, want = getattr(mla, name), limits["mla"][name]
            fact = f"{name} is {have}; the absorbed latent attention of the operator takes {want[0]}."
            grounds.add("KV108", fact, _KEEP, mla.evidence, blocks=True)
    dims = sorted({d for s in grows if s.cache_width is None for d in (s.k_head_dim, s.v_head_dim) if d})
    too_wide = [d for d in dims if d > limits["head_dim_max"]]
    if too_wide:
        fact = f"Head width {too_wide[-1]} is above {limits['head_dim_max']}, the operator's limit on every layout."
        grounds.add("KV109", fact, _KEEP, blocks=True)
    odd = [d for d in dims if d % limits["head_dim_multiple"]]
    if odd:
        fact = f"Head width {odd[0]} is not a multiple of {limits['head_dim_multiple']}, which the operator requires."
        grounds.add("KV109", fact, _KEEP, blocks=True)
    for slot in grows:
        ratio = slot.q_heads // slot.kv_heads if slot.q_heads and slot.kv_heads and slot.cache_width is None else 0
        if ratio > limits["group_max"]:
            watch.append(
                f"{ratio} query heads per K/V head: the operator takes at most {limits['group_max']} on one rank; "
                "split the query heads over ranks"
            )
            break
    unusual = [d for d in dims if d not in limits["usual_head_dims"]]
    if unusual and set(dims) != {192, 128}:
        watch.append(f"head dims {dims}: packed layouts with a block table take a short list; check the layout")
    geometry = {(s.kv_heads, s.k_head_dim, s.v_head_dim, s.cache_width) for s in grows if s.owns_cache}
    if len(geometry) > 1:
        watch.append("cache geometry differs between layer groups: one block pool cannot serve both")
    return watch
