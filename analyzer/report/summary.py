"""The summary for people, and the JSON object for programs. Both are made from the same analysis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvskill.analyzer.report.pattern import compact
from kvskill.analyzer.yamls import differences
from kvskill.diagnostics import Diagnostic, Severity
from kvskill.manifest import Decision, Evidence, FaCall, Group, Manifest, MemoryPlan

if TYPE_CHECKING:
    from kvskill.analyzer.run import Analysis

__all__ = ["render", "to_json"]

_SHOWN_FINDINGS = 12
_LEGEND = {
    "F": "full",
    "S": "sliding",
    "M": "MLA",
    "C": "chunked",
    "B": "block-sparse",
    "K": "compressed",
    "L": "recurrent state",
    "X": "cross",
    "-": "no cache",
}


def render(analysis: Analysis) -> str:
    """Plain text, at most one screen for a plain model."""
    return "\n".join(line.rstrip() for line in _lines(analysis)) + "\n"


def to_json(analysis: Analysis) -> dict[str, Any]:
    """One object: the manifest, the findings, memory per YAML, differences, features, and the exit code."""
    m = analysis.manifest
    return {
        "exit_code": int(analysis.exit_code),
        "manifest": m.model_dump(mode="json"),
        "findings": [f.to_json() for f in analysis.findings],
        "config": {"source": analysis.base.source.kind, "shown": analysis.base.source.shown},
        "memory": [p.model_dump(mode="json") for p in analysis.plans],
        "what_if": None if analysis.what_if is None else analysis.what_if.model_dump(mode="json"),
        "yaml_differences": {
            k: [{"yaml": y, "value": v} for y, v in rows] for k, rows in differences(analysis.base.yamls).items()
        },
        "features": [{"id": f.id, "on": f.on, "at": [str(s) for s in f.spans[:5]]} for f in analysis.features],
        "written": None if analysis.written is None else m.model.folder + "/kv_manifest.yaml",
        "recorded": None if analysis.recorded is None else analysis.recorded.shown,
    }


def _lines(a: Analysis) -> Iterator[str]:
    m = a.manifest
    yield f"{m.model.name}: {_headline(a)}"
    yield ""
    yield "Found"
    yield from _found(a)
    yield ""
    yield "Decided"
    yield from _decided(m)
    if m.groups:
        yield ""
        kept = m.kv_mode.value != "paged"
        yield "Groups (as they are; nothing is converted)" if kept else "Groups"
        for group in m.groups:
            yield from _group(group, calls=not kept)
    if a.plans or a.what_if:
        yield ""
        yield "Memory per rank (framework formulas)"
        for plan in a.plans[:6]:
            yield _memory(plan)
        if len(a.plans) > 6:
            yield f"  ... and {len(a.plans) - 6} more YAML files (--json)"
        if a.what_if is not None:
            yield _memory(a.what_if)
    notes = list(_will_not(a))
    if notes:
        yield ""
        yield "Will not do"
        yield from (f"  - {n}" for n in notes)
    if a.findings:
        yield ""
        yield f"Findings ({_counts(a.findings)})"
        for finding in a.findings[:_SHOWN_FINDINGS]:
            yield f"  {finding.severity.value:<8} {finding.code} {finding.span}"
            yield f"           {finding.fact} {finding.todo}"
        if len(a.findings) > _SHOWN_FINDINGS:
            yield f"  ... and {len(a.findings) - _SHOWN_FINDINGS} more (--json)"
    yield ""
    yield from _closing(a)


def _headline(a: Analysis) -> str:
    m = a.manifest
    if m.model.state == "paged":
        return "already Paged, nothing to do"
    if m.model.state == "paged-by-hand":
        return "paged by hand in its own runner, nothing to convert"
    blocking = [f for f in a.findings if f.severity is Severity.BLOCKING]
    if m.kv_mode.value == "out-of-scope":
        return f"out of scope: {m.kv_grounds[0] if m.kv_grounds else 'no cache worth paging'}"
    if m.kv_mode.value == "legacy":
        return "keep Legacy (offline inference only)"
    if blocking:
        return f"convert to Paged, after {len(blocking)} blocking finding{'s' if len(blocking) > 1 else ''}"
    return "convert to Paged"


def _found(a: Analysis) -> Iterator[str]:
    m = a.manifest
    yield f"  model     {m.model.folder} ({m.model.state}{', ' + m.model.input_era if m.model.input_era else ''})"
    classes = ", ".join(c for c in (m.model.causal_lm, *m.model.attention) if c)
    if classes:
        yield f"  classes   {classes}"
    note = f" (through {a.base.source.note})" if a.base.source.note and a.base.source.kind == "yaml" else ""
    kind = " (defaults of the class; no config.json at hand)" if a.base.source.kind == "class" else note
    yield f"  config    {a.base.source.shown}{kind}"
    if m.layer_pattern:
        yield f"  layers    {compact(m.layer_pattern)}   {_legend(m.layer_pattern)}"
    t = m.target
    where = "target repository" if t.found else "no target repository: newest API assumed"
    yield f"  target    {where}; block_size on {t.block_size_on}; " + (
        "models register comm groups" if t.registers_groups else "comm groups are pre-created"
    )
    releases = ", ".join(t.torch_npu) if len(t.torch_npu) <= 4 else f"{t.torch_npu[0]} .. {t.torch_npu[-1]}"
    yield f"  torch_npu {releases or 'not named'} ({t.torch_npu_source})"
    if a.base.yamls:
        able = [y for y in a.base.yamls if y.era != "other"]
        varying = ", ".join(sorted(differences(a.base.yamls)))
        yield f"  yaml      {len(able)} of {len(a.base.yamls)} with cache settings" + (
            f"; they differ in {varying}" if varying else ""
        )
    if a.base.progress is not None:
        said = [f"{k} {s.value[:40]}" for k in ("npu", "cards", "state") if (s := a.base.progress.first(k)) is not None]
        yield f"  progress  {a.base.progress.shown}" + (f": {', '.join(said)}" if said else "")


def _decided(m: Manifest) -> Iterator[str]:
    rows: list[tuple[str, str, Decision[Any]]] = [
        ("deployment", m.deployment.value, m.deployment),
        ("KV mode", m.kv_mode.value, m.kv_mode),
    ]
    if m.kv_mode.value != "paged":  # the other answers are about calls that are not written
        yield from _answers(rows, m.kv_grounds)
        return
    rows += [
        ("FA version", f"v{m.fa_version.value}", m.fa_version),
        ("MLA absorb", "yes" if m.mla_absorb.value else "no", m.mla_absorb),
        ("mixed types", "yes" if m.mixed_attn_types.value else "no", m.mixed_attn_types),
        ("block size", str(m.block_size.value), m.block_size),
    ]
    if any(g.sliding_window for g in m.groups):
        rows.append(("window rule", m.window_rule.value, m.window_rule))
    yield from _answers(rows, m.kv_grounds)


def _answers(rows: list[tuple[str, str, Decision[Any]]], grounds: tuple[str, ...]) -> Iterator[str]:
    for title, value, decision in rows:
        yield f"  {title:<12}{value:<12}{_evidence(decision.evidence)}"
    for ground in grounds:
        yield f"  {'':<12}ground: {ground}"


def _group(g: Group, *, calls: bool) -> Iterator[str]:
    key = g.manager_key or g.attn_type
    heads = "latent, 1 head" if g.attention == "MLA" else f"{g.q_heads} q / {g.kv_heads} kv heads"
    dims = " + ".join(f"{c.name} {c.dim}" for c in g.caches)
    extras = [f"window {g.sliding_window}"] if g.sliding_window else []
    extras += ["sinks"] if g.sinks else []
    extras += [f"scale {g.scale_value:.6g}"] if g.scale_value is not None else []
    yield f"  {key} x{len(g.layers)}  {g.attention}, {heads}, {dims}" + (f", {', '.join(extras)}" if extras else "")
    for phase, call in (("prefill", g.prefill), ("decode", g.decode)):
        if call is not None and calls:
            yield f"    {phase:<8}{_call(call)}"


def _call(c: FaCall) -> str:
    window = f", pre_tokens {c.pre_tokens}" if c.pre_tokens is not None else ""
    mask = "mask" if c.mask else "no mask"
    return (
        f"v{c.version} {c.layout}, sparse_mode {c.sparse_mode}, {mask}{window}, "
        f"over {'fresh K/V' if c.reads == 'fresh' else 'the cache'}"
    )


def _memory(p: MemoryPlan) -> str:
    name = "what-if" if p.yaml is None else p.yaml.split("/config/")[-1]
    blocks = ", ".join(f"{k} {v}" for k, v in p.blocks.items())
    shape = f"batch {p.batch_size}, len {p.input_len}+{p.max_new_tokens}, tp {p.tp}, block {p.block_size}"
    return f"  {name}: Legacy {_bytes(p.legacy_bytes)}, Paged {_bytes(p.paged_bytes)} ({shape}; blocks {blocks})"


def _will_not(a: Analysis) -> Iterator[str]:
    m = a.manifest
    if m.model.state == "paged":
        yield "touch the model: it declares its cache entries already"
    if m.kv_mode.value == "legacy":
        yield "rewrite the model: Legacy serves offline inference only; online serving and evaluation need Paged"
    for feature in a.features:
        if feature.on:
            yield f"{feature.title}: recognised, left to its own skill"
    if m.groups and m.model.state != "paged" and m.kv_mode.value == "paged":
        yield "run on an NPU: operator limits are those of the named profile, not a measurement"


def _closing(a: Analysis) -> Iterator[str]:
    if a.written is not None:
        yield f"Manifest: {a.manifest.model.folder}/kv_manifest.yaml"
    if a.recorded is not None:
        yield f"Recorded: {a.recorded.shown}" if a.recorded.written else f"{a.recorded.shown} already says this."
    if a.manifest.model.state in ("paged", "paged-by-hand") or a.manifest.kv_mode.value != "paged":
        return
    if a.manifest.blocking:
        yield "Next: resolve the blocking findings, then analyze again."
    else:
        yield f"Next: kvskill apply {a.manifest.model.name} --diff"


def _evidence(evidence: Sequence[Evidence]) -> str:
    """The first piece of evidence in words, the places of the next two."""
    parts = []
    for i, e in enumerate(evidence[:3]):
        text = f"{e.ref}: {e.note}" if e.note and i == 0 else e.ref
        parts.append(text if len(text) <= 140 else text[:137] + "...")
    return "; ".join(parts)


def _legend(pattern: str) -> str:
    kinds = dict.fromkeys(c.upper() for c in pattern)
    text = ", ".join(f"{k} {_LEGEND.get(k, '?')}" for k in kinds)
    shared = ", lower case reads another layer's K/V" if any(c.islower() for c in pattern) else ""
    return f"[{text}{shared}]"


def _counts(findings: Sequence[Diagnostic]) -> str:
    counts: dict[str, int] = {}
    for f in findings:
        counts[f.severity.value] = counts.get(f.severity.value, 0) + 1
    return ", ".join(f"{n} {k}" for k, n in counts.items())


def _bytes(n: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n} B"
