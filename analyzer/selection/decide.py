"""The five answers of layer one, from facts: a pure function."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from kvskill.analyzer.config.facts import ConfigFacts
from kvskill.analyzer.data import load_yaml
from kvskill.analyzer.selection.code import CodeView
from kvskill.analyzer.selection.features import Feature
from kvskill.analyzer.selection.grounds import (
    Ground,
    code_grounds,
    config_grounds,
    geometry_grounds,
    target_grounds,
)
from kvskill.analyzer.selection.groups import GroupChoices, build_groups
from kvskill.analyzer.selection.limits import limits_for
from kvskill.analyzer.selection.rules import because
from kvskill.analyzer.target import OperatorFacts
from kvskill.analyzer.yamls import YamlFacts
from kvskill.diagnostics import Diagnostic, Severity, Span
from kvskill.manifest import Decision, Evidence, Group, Overrides, TargetProfile

__all__ = ["Selection", "SelectionInput", "select"]

Version = Literal[1, 2]
KvMode = Literal["paged", "legacy", "out-of-scope"]


@dataclass(frozen=True)
class SelectionInput:
    """Everything the selection looks at."""

    facts: ConfigFacts
    code: CodeView | None
    profile: TargetProfile
    operators: OperatorFacts | None
    overrides: Overrides
    features: tuple[Feature, ...]
    yamls: tuple[YamlFacts, ...]
    primary: YamlFacts | None
    standalone: bool


@dataclass(frozen=True)
class Selection:
    """The answers, with evidence; findings are those that the answers gave rise to."""

    kv_mode: Decision[KvMode]
    grounds: tuple[str, ...]
    fa_version: Decision[Version]
    mla_absorb: Decision[bool]
    mixed: Decision[bool]
    block_size: Decision[int]
    window_rule: Decision[Literal["hf", "upstream"]]
    groups: tuple[Group, ...]
    findings: tuple[Diagnostic, ...]


def select(given: SelectionInput) -> Selection:
    """Decide. Never raises for facts; what cannot be decided is a blocking finding."""
    findings: list[Diagnostic] = list(_disagreements(given))
    sinks = _sinks(given)
    version, no_sinks = _version(given, sinks, findings)
    window_rule = _window_rule(given)
    block_size = _block_size(given, findings)
    limits = limits_for(given.profile.torch_npu)
    choices = GroupChoices(
        version.value,
        window_rule.value,
        limits,
        mtp=given.facts.mtp.count > 0 and any(y.settings.next_n > 0 for y in given.yamls),
        run_dtype=None if given.standalone else load_yaml("target_profile.yaml")["run_dtype"],
        mla_prefill=given.overrides.mla_prefill,
    )
    built = build_groups(given.facts, given.code, choices)
    findings.extend(built.findings)
    mode, grounds = _kv_mode(given, built.groups, built.rejected, no_sinks, sinks is not None)
    findings.extend(g.finding for g in grounds if g.finding is not None)
    if mode.value == "paged":
        findings.extend(_other_state(given))
    kinds = {(g.attn_type, g.manager_key) for g in built.groups}
    mla = [g for g in built.groups if g.attention == "MLA"]
    absorb = Decision[bool](
        value=bool(mla) and mode.value == "paged",
        source="rule",
        evidence=(
            because("S14-absorb", f"{len(mla)} of {len(built.groups)} groups are MLA"),
            *_mla_evidence(given),
        ),
    )
    mixed = Decision[bool](
        value=len(kinds) > 1,
        source="rule",
        evidence=(because("S12-mixed" if len(kinds) > 1 else "S14-mixed", _kinds_text(built.groups)),),
    )
    return Selection(
        mode,
        tuple(g.text for g in grounds),
        version,
        absorb,
        mixed,
        block_size,
        window_rule,
        tuple(built.groups),
        tuple(findings),
    )


def _kv_mode(
    given: SelectionInput,
    groups: tuple[Group, ...],
    rejected: tuple[tuple[Group, str], ...],
    no_sinks: Ground | None,
    sinks: bool,
) -> tuple[Decision[KvMode], tuple[Ground, ...]]:
    mode, found = config_grounds(given.facts)
    grounds = list(found)
    grounds.extend(code_grounds(given.code, given.facts))
    grounds.extend(geometry_grounds(given.facts, rejected, given.facts.shown) if mode == "paged" else ())
    grounds.extend(target_grounds(given.facts, given.profile, groups, sinks=sinks, standalone=given.standalone))
    if no_sinks is not None:
        grounds.append(no_sinks)
    wanted = given.overrides.kv_mode
    if mode == "out-of-scope":
        evidence = tuple(g.evidence for g in grounds) or (because("S13-keep-legacy"),)
        return Decision[KvMode](value="out-of-scope", source="rule", evidence=evidence), tuple(grounds)
    if wanted == "legacy":
        chosen = Evidence(kind="override", ref="overrides.kv_mode")
        grounds.append(Ground("asked for by overrides.kv_mode", chosen))
        return Decision[KvMode](
            value="legacy", source="override", evidence=(chosen, because("S13-offline-only"))
        ), tuple(grounds)
    if grounds:
        if wanted == "paged":
            first = replace(grounds[0], finding=_overruled(grounds[0]))
            grounds[0] = first
        evidence = (*(g.evidence for g in grounds), because("S13-keep-legacy"), because("S13-offline-only"))
        return Decision[KvMode](value="legacy", source=grounds[0].evidence.kind, evidence=evidence), tuple(grounds)
    source = "override" if wanted == "paged" else "rule"
    return Decision[KvMode](value="paged", source=source, evidence=(because("S13-paged"),)), ()


def _version(
    given: SelectionInput, sinks: Evidence | None, findings: list[Diagnostic]
) -> tuple[Decision[Version], Ground | None]:
    """FA version, and the ground that arises where sinks need a v2 that is missing."""
    override = given.overrides.fa_version
    antiquant = given.code.antiquant if given.code is not None else None
    known = given.operators.fa_version if given.operators is not None else given.profile.fa_version
    releases = given.operators.evidence if given.operators is not None else ()
    reason = given.profile.fa_reason
    base = (because("S27-version", reason), *releases)
    if known is None and override is None and sinks is None:
        # the blocking question comes with the operator findings
        return Decision[Version](value=2, source="assumed", evidence=base), None
    if sinks is not None:
        has = known == 2 or override == 2
        if not has and known is not None:
            text = "the attention has sinks, and no FA v2 (learnable_sink) is registered by this torch_npu"
            finding = Diagnostic(
                "KV079",
                Severity.WARNING,
                f"{text[0].upper()}{text[1:]}.",
                "Install torch_npu 2.6.0.post3 or later; until then Legacy is kept.",
                _span(sinks),
            )
            return Decision[Version](value=2, source="rule", evidence=(because("S27-sink"), sinks)), Ground(
                text, sinks, finding
            )
        if override == 1:
            findings.append(
                Diagnostic(
                    "KV085",
                    Severity.WARNING,
                    "overrides.fa_version is 1, but the attention has sinks, which only v2 takes.",
                    "Remove the override; v2 is used.",
                    _span(sinks),
                )
            )
        return Decision[Version](value=2, source="rule", evidence=(because("S27-sink"), sinks, *base)), None
    if override is not None:
        if known is not None and known == 1 and override == 2:
            findings.append(
                Diagnostic(
                    "KV085",
                    Severity.WARNING,
                    f"overrides.fa_version is 2, but {reason}.",
                    "Remove the override, or name the release that runs the model with --torch-npu.",
                    Span("kv_manifest.yaml"),
                )
            )
        chosen = Evidence(kind="override", ref="overrides.fa_version")
        return Decision[Version](value=override, source="override", evidence=(chosen, *base)), None
    if antiquant is not None:
        where = Evidence(kind="code", ref=str(antiquant.span), note=antiquant.value)
        return Decision[Version](value=1, source="code", evidence=(because("S27-antiquant"), where)), None
    value: Version = 1 if known == 1 else 2
    return Decision[Version](value=value, source="target", evidence=base), None


def _sinks(given: SelectionInput) -> Evidence | None:
    """Where sinks come from: the code wins."""
    if given.code is not None and given.code.sinks is not None:
        return Evidence(kind="code", ref=str(given.code.sinks.span), note=given.code.sinks.value)
    if given.facts.sinks.value != "no" and (given.code is None or given.code.layer_windows is None):
        keys = ",".join(given.facts.sinks.evidence.keys)
        return Evidence(kind="config", ref=f"{given.facts.shown}:{keys}", note=given.facts.sinks.value)
    return None


def _window_rule(given: SelectionInput) -> Decision[Literal["hf", "upstream"]]:
    wanted = given.overrides.window
    if wanted is not None:
        evidence = (Evidence(kind="override", ref="overrides.window"), because("S27-window"))
        return Decision[Literal["hf", "upstream"]](value=wanted, source="override", evidence=evidence)
    return Decision[Literal["hf", "upstream"]](value="hf", source="rule", evidence=(because("S27-window"),))


def _block_size(given: SelectionInput, findings: list[Diagnostic]) -> Decision[int]:
    if given.overrides.block_size is not None:
        evidence = (Evidence(kind="override", ref="overrides.block_size"),)
        decided = Decision[int](value=given.overrides.block_size, source="override", evidence=evidence)
    elif given.primary is not None and "block_size" in given.primary.settings.given:
        where = Evidence(kind="config", ref=str(given.primary.setting_span("block_size")))
        decided = Decision[int](
            value=given.primary.settings.block_size,
            source="config",
            evidence=(where, because("S27-block-size")),
        )
    else:
        where = Evidence(kind="default", ref="scheduler_config.block_size")
        decided = Decision[int](
            value=given.profile.default_block_size,
            source="default",
            evidence=(where, because("S27-block-size")),
        )
    for y in given.yamls:
        if decided.source == "override" and "block_size" in y.settings.given:
            if y.settings.block_size != decided.value:
                findings.append(
                    Diagnostic(
                        "KV086",
                        Severity.WARNING,
                        f"overrides.block_size is {decided.value}, but {y.shown} runs with {y.settings.block_size}.",
                        "The file's value counts at run time; make them equal.",
                        y.setting_span("block_size"),
                    )
                )
    limits = limits_for(given.profile.torch_npu)
    step, most = limits["block_multiple"], limits["block_max"]
    if decided.value % step or decided.value > most or decided.value < 1:
        findings.append(
            Diagnostic(
                "KV086",
                Severity.WARNING,
                f"block_size {decided.value} is no multiple of {step} up to {most} ({limits.profile}).",
                "Use 128, which every path takes.",
                _span(decided.evidence[0]),
            )
        )
    return decided


def _disagreements(given: SelectionInput) -> list[Diagnostic]:
    """Where code and config differ the code wins, and a finding says so."""
    code, facts = given.code, given.facts
    if code is None:
        return []
    out = []
    if code.attention_kind is not None and (code.attention_kind.value == "MLA") != (facts.attention_kind == "MLA"):
        out.append(
            Diagnostic(
                "KV087",
                Severity.BLOCKING,
                f"The code's attention is {code.attention_kind.value}, the config's {facts.attention_kind}.",
                "Give the model's real config with --config.",
                code.attention_kind.span,
            )
        )
    if code.layer_windows is not None and code.sinks is None and facts.sinks.value != "no":
        out.append(
            Diagnostic(
                "KV088",
                Severity.WARNING,
                "The config's class has attention sinks, but no sink was seen in the code; the code wins.",
                "Check that the model needs none.",
                Span(facts.shown),
            )
        )
    return out


def _other_state(given: SelectionInput) -> list[Diagnostic]:
    """State beside K/V: with get_cache_info the engine never calls init_cache, so what is allocated there must move."""
    facts = given.facts
    layers = [x for x in facts.layers if x.kind == "state" or x.has_state]
    extra = [x.name for x in facts.extra_caches]
    if given.standalone or not (layers or extra):
        return []
    what = ", ".join([*([f"recurrent state in {len(layers)} layers"] if layers else []), *extra])
    return [
        Diagnostic(
            "KV037",
            Severity.BLOCKING,
            f"The model keeps more than K and V ({what}), and get_cache_info switches its allocation off.",
            "Declare entries for it by hand (MambaCacheEntry for recurrent state); this tool converts K and V only.",
            Span(facts.shown),
        )
    ]


def _mla_evidence(given: SelectionInput) -> tuple[Evidence, ...]:
    mla = given.facts.mla
    if mla is None:
        return ()
    return (Evidence(kind="config", ref=f"{given.facts.shown}:{','.join(mla.evidence.keys)}"),)


def _overruled(ground: Ground) -> Diagnostic:
    """overrides.kv_mode: paged cannot make the operator do what it does not do."""
    return Diagnostic(
        "KV089",
        Severity.BLOCKING,
        f"overrides.kv_mode is paged, but {ground.text}.",
        "Remove the override, or remove the ground.",
        Span("kv_manifest.yaml"),
    )


def _kinds_text(groups: tuple[Group, ...]) -> str:
    names = [f"{g.manager_key or g.attn_type} x{len(g.layers)}" for g in groups]
    return ", ".join(names) or "no cache"


def _span(evidence: Evidence) -> Span:
    path, _, rest = evidence.ref.partition(":")
    number = rest.split(":")[0]
    return Span(path, int(number)) if number.isdigit() else Span(path)
