"""`analyze`: from a model folder to a manifest, with every decision's evidence.

Order: where things are, YAML files, target, code, config, progress.md, selection, memory. Reading only: the one file
that is written is the manifest (and progress.md with `record`), and only after everything succeeded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kvskill.analyzer.assemble import build_manifest, input_files, ordered
from kvskill.analyzer.code_reader import read_code
from kvskill.analyzer.config.facts import ConfigFacts
from kvskill.analyzer.config.load import read_config
from kvskill.analyzer.config.sidefiles import side_files
from kvskill.analyzer.config.understand import understand
from kvskill.analyzer.heads import check_runs
from kvskill.analyzer.memory import CacheGeometry, Formulas, parse_what_if, plan_memory, read_formulas
from kvskill.analyzer.progress import (
    ProgressFacts,
    Record,
    find_progress,
    read_facts,
    read_progress_text,
    record_decisions,
)
from kvskill.analyzer.report.record import decision_rows
from kvskill.analyzer.resolve import ConfigSource, Place, find_config, find_model, shown_path
from kvskill.analyzer.selection.decide import Selection, SelectionInput, select
from kvskill.analyzer.selection.deployment import decide_deployment, find_runners, prompt_mode
from kvskill.analyzer.selection.features import Feature, find_features
from kvskill.analyzer.selection.groups import geometries
from kvskill.analyzer.selection.limits import limits_for
from kvskill.analyzer.target import ProbeResult, migrations, probe
from kvskill.analyzer.yamls import RunSettings, YamlFacts, old_keys, primary_yaml, read_yamls
from kvskill.diagnostics import Diagnostic, ExitCode, InputError, Severity, Span
from kvskill.manifest import MANIFEST_NAME, Manifest, MemoryPlan, Overrides, dump_manifest, load_overrides

__all__ = ["Analysis", "AnalyzeRequest", "analyze"]

Mode = Literal["framework", "standalone"]


@dataclass(frozen=True)
class AnalyzeRequest:
    """What the command line asks for. `model` is a folder or a name under `models/` of the target."""

    model: str
    repo: Path | None = None
    config: Path | None = None
    yaml: str | None = None
    mode: Mode | None = None
    prompt: str | None = None
    torch_npu: str | None = None
    what_if: str | None = None
    record: bool = False
    write: bool = True


@dataclass(frozen=True)
class Analysis:
    """The result: the manifest, every finding, and what the report shows beside it."""

    manifest: Manifest
    findings: tuple[Diagnostic, ...]
    exit_code: ExitCode
    place: Place
    config: ConfigSource
    facts: ConfigFacts
    features: tuple[Feature, ...]
    yamls: tuple[YamlFacts, ...]
    plans: tuple[MemoryPlan, ...] = ()
    what_if: MemoryPlan | None = None
    progress: ProgressFacts | None = None
    recorded: Record | None = None
    written: Path | None = None


def analyze(request: AnalyzeRequest) -> Analysis:
    """Analyze one model folder.

    Raises InputError (exit 2) for what cannot be read and Refusal (exit 3) where no answer can be given at all. What
    can be decided is in the manifest; blocking findings make the exit code 3.
    """
    place = find_model(request.model, request.repo)
    overrides = _overrides(place)
    target = probe(place.repo, torch_npu=request.torch_npu, model_dir=place.model_dir)
    yamls = read_yamls(place.model_dir, place.root, target.defaults)
    primary = _primary(yamls, request.yaml, place)
    progress, progress_findings = _progress(place)
    registered = target.registry.for_folder(place.folder)
    deployment = decide_deployment(
        option=request.mode,
        prompt=prompt_mode(request.prompt) if request.prompt else None,
        override=overrides.deployment,
        progress=progress,
        registered=registered,
        runners=find_runners(place.model_dir, place.root),
        registry_form=target.registry.form,
    )
    code = read_code(place, registered)
    source = find_config(place, option=request.config, primary=primary, yamls=yamls, class_name=code.config_class)
    if source is None:
        raise _no_config(place, yamls)
    config, facts = _understand(source)
    features = find_features(place.model_dir, place.root, yamls, dict(config), source.shown)
    standalone = deployment.decision.value == "standalone"
    chosen = select(
        SelectionInput(facts, code, target.profile, target.operators, overrides, features, yamls, primary, standalone)
    )
    plans, what_if, plan_findings = _memory(request, place, target, facts, chosen, yamls, primary)
    findings = ordered(
        [
            *progress_findings,
            *deployment.findings,
            *(f for y in yamls for f in y.findings),
            *target.findings,
            *facts.findings,
            *code.findings,
            *chosen.findings,
            *check_runs(yamls, chosen.groups, limits_for(target.profile.torch_npu)),
            *plan_findings,
            *(f.finding for f in features),
            *(_as_warning(f) for f in migrations(code.field_uses, target.profile).findings),
            *_progress_against_config(progress, facts),
            *_old_keys(yamls, target),
        ],
        paged=code.model.state == "paged",
    )
    manifest = build_manifest(
        place=place,
        target=target,
        deployment=deployment.decision,
        chosen=chosen,
        code=code,
        facts=facts,
        source=source,
        yamls=yamls,
        memory=next((p for p in plans if primary is not None and p.yaml == primary.shown), None),
        overrides=overrides,
        findings=findings,
    )
    recorded = None
    if request.record:
        recorded = _record(place, manifest)
        if recorded.written:  # its bytes changed: the manifest names the new ones
            manifest = manifest.model_copy(update={"inputs": input_files(place, source, yamls, code)})
    written = _write(place, manifest) if request.write else None
    return Analysis(
        manifest,
        tuple(findings),
        _exit(findings, manifest),
        place,
        source,
        facts,
        features,
        yamls,
        tuple(plans),
        what_if,
        progress,
        recorded,
        written,
    )


def _overrides(place: Place) -> Overrides:
    """The overrides of an existing manifest; a manifest that cannot be read stops the run before it is replaced."""
    path = place.model_dir / MANIFEST_NAME
    if not path.exists():
        return Overrides()
    return load_overrides(path, shown_path(path, place.root))


def _primary(yamls: Sequence[YamlFacts], wanted: str | None, place: Place) -> YamlFacts | None:
    found = primary_yaml(tuple(yamls), wanted)
    if wanted is not None and found is None:
        names = ", ".join(y.path.name for y in yamls if y.era != "other") or "none"
        raise InputError(
            Diagnostic(
                "KV026",
                Severity.ERROR,
                f"--yaml {wanted} is not among the YAML files of the model.",
                f"Give one of: {names}.",
                Span(place.folder),
            )
        )
    return found


def _progress(place: Place) -> tuple[ProgressFacts | None, list[Diagnostic]]:
    path, candidates = find_progress(place.model_dir)
    if path is None:
        return None, []
    findings = []
    if len(candidates) > 1:
        findings.append(
            Diagnostic(
                "KV031",
                Severity.WARNING,
                f"There are {len(candidates)} progress files; {shown_path(path, place.root)} is read.",
                "Keep one.",
                Span(shown_path(candidates[1], place.root)),
            )
        )
    try:
        return read_facts(read_progress_text(path, shown_path(path, place.root))), findings
    except InputError as exc:  # the analysis can do without it
        return None, [*findings, *(_as_warning(f) for f in exc.findings)]


def _understand(source: ConfigSource) -> tuple[dict[str, Any], ConfigFacts]:
    """The settings and what they mean; the defaults of a class stand for a config.json that is not at hand."""
    if source.defaults is not None or source.path is None:
        values = dict(source.defaults.values) if source.defaults is not None else {}
        return values, understand(values, shown=source.shown)
    values = dict(read_config(source.path, source.shown))
    side, notes = side_files(source.path.parent)
    return values, understand(values, shown=source.shown, side=side, notes=notes)


def _memory(
    request: AnalyzeRequest,
    place: Place,
    target: ProbeResult,
    facts: ConfigFacts,
    chosen: Selection,
    yamls: Sequence[YamlFacts],
    primary: YamlFacts | None,
) -> tuple[list[MemoryPlan], MemoryPlan | None, list[Diagnostic]]:
    """One plan per offline YAML, and the what-if on top of the primary one."""
    partitions = "offline_prefill_dp_group_size" in target.profile.config_fields.get("parallel_config", ())
    formulas = read_formulas(target.tree, partitions=partitions)
    caches = geometries(chosen.groups, facts.mtp.count)
    if not caches:
        return [], None, []
    plans: list[MemoryPlan] = []
    findings: list[Diagnostic] = []
    for y in yamls:
        if y.era == "other" or y.online or y.settings.batch_per_rank < 1:
            continue
        run = _with_block_size(y.settings, chosen.block_size.value, y is primary)
        plan = _plan(caches, run, formulas, y.shown, findings)
        if plan is not None:
            plans.append(plan)
    what_if = None
    if request.what_if is not None:
        base = primary.settings if primary is not None else RunSettings(block_size=chosen.block_size.value)
        what_if = _plan(caches, parse_what_if(request.what_if, base), formulas, None, findings)
    return plans, what_if, findings


def _with_block_size(run: RunSettings, decided: int, primary: bool) -> RunSettings:
    return replace(run, block_size=decided) if primary else run


def _plan(
    caches: Sequence[CacheGeometry],
    run: RunSettings,
    formulas: Formulas,
    yaml: str | None,
    findings: list[Diagnostic],
) -> MemoryPlan | None:
    try:
        return plan_memory(caches, run, formulas, yaml)
    except ValueError as exc:
        findings.append(
            Diagnostic(
                "KV029",
                Severity.WARNING,
                f"The memory plan cannot be computed: {exc}.",
                "Correct the settings named.",
                Span(yaml or "--what-if"),
            )
        )
        return None


def _progress_against_config(progress: ProgressFacts | None, facts: ConfigFacts) -> Iterator[Diagnostic]:
    if progress is None or progress.attention is None or progress.attention_at is None:
        return
    said, found = progress.attention, facts.attention_kind
    if said != found and {said, found} != {"GQA", "MQA"} and found != "none":
        yield Diagnostic(
            "KV030",
            Severity.WARNING,
            f"progress.md says {said}, the config describes {found}.",
            "The config and the code count; correct progress.md if it is out of date.",
            progress.attention_at,
        )


def _old_keys(yamls: Sequence[YamlFacts], target: ProbeResult) -> Iterator[Diagnostic]:
    """Keys of another era in framework files; `apply` migrates the ones that paging needs."""
    for y in yamls:
        if y.era != "framework-2d":
            continue
        for old, new, line in old_keys(y):
            section, _, name = new.partition(".")
            if name in target.profile.config_fields.get(section, ()) and new not in y.keys:
                yield Diagnostic(
                    "KV032",
                    Severity.NOTE,
                    f"`{old}` is read by the target as `{new}`.",
                    "`apply` moves it.",
                    Span(y.shown, line),
                )


def _no_config(place: Place, yamls: Sequence[YamlFacts]) -> InputError:
    paths = sorted({y.settings.model_path for y in yamls if y.settings.model_path})
    tried = f" (model_path {paths[0]} is not here)" if paths else ""
    return InputError(
        Diagnostic(
            "KV017",
            Severity.ERROR,
            f"No config describes the model{tried}, and the folder has no configuration_*.py with defaults.",
            "Give --config PATH/config.json.",
            Span(place.folder),
        )
    )


def _record(place: Place, manifest: Manifest) -> Record:
    path, _ = find_progress(place.model_dir)
    folder = place.model_dir / "agentic"
    path = path or (folder if folder.is_dir() else place.model_dir) / "progress.md"
    return record_decisions(path, shown_path(path, place.root), decision_rows(manifest), root=place.model_dir)


def _write(place: Place, manifest: Manifest) -> Path:
    """Write the manifest beside the model; an unchanged one is not touched."""
    path = place.model_dir / MANIFEST_NAME
    text = dump_manifest(manifest)
    try:
        if path.is_symlink() and not path.resolve().is_relative_to(place.model_dir.resolve()):
            raise InputError(
                Diagnostic(
                    "KV014",
                    Severity.ERROR,
                    "kv_manifest.yaml is a symbolic link out of the model folder.",
                    "Remove the link.",
                    Span(shown_path(path, place.root)),
                )
            )
        if not path.exists() or path.read_bytes() != text.encode("utf-8"):
            path.write_bytes(text.encode("utf-8"))
    except OSError as exc:
        raise InputError(
            Diagnostic(
                "KV034",
                Severity.ERROR,
                f"The manifest cannot be written ({exc.strerror}).",
                "Check the folder's permissions, or use --no-write.",
                Span(shown_path(path, place.root)),
            )
        ) from None
    return path


def _exit(findings: Sequence[Diagnostic], manifest: Manifest) -> ExitCode:
    if manifest.model.state == "paged":
        return ExitCode.DONE
    blocked = any(f.severity is Severity.BLOCKING for f in findings)
    return ExitCode.REFUSED if blocked or manifest.kv_mode.value == "out-of-scope" else ExitCode.DONE


def _as_warning(finding: Diagnostic) -> Diagnostic:
    return Diagnostic(finding.code, Severity.WARNING, finding.fact, finding.todo, finding.span, finding.data)
