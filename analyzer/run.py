"""`analyze`: from a model folder to a manifest, with every decision's evidence.

Reading only: the one file that is written is the manifest (and progress.md with `record`), and only after everything
else succeeded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvskill.analyzer.assemble import build_manifest, input_files, ordered, paged_manifest
from kvskill.analyzer.config.facts import ConfigFacts
from kvskill.analyzer.gather import Gathered, Understood, gather, understand_model
from kvskill.analyzer.heads import check_runs
from kvskill.analyzer.memory.report import plans_for
from kvskill.analyzer.progress import Record, find_progress, record_decisions
from kvskill.analyzer.report.record import decision_rows
from kvskill.analyzer.request import AnalyzeRequest
from kvskill.analyzer.resolve import Place, shown_path
from kvskill.analyzer.runner.analysis import by_hand, by_hand_manifest
from kvskill.analyzer.runner.topology import topology_findings
from kvskill.analyzer.selection.decide import SelectionInput, select
from kvskill.analyzer.selection.features import Feature, find_features
from kvskill.analyzer.selection.limits import limits_for
from kvskill.analyzer.target import migrations
from kvskill.analyzer.yamls import old_keys
from kvskill.diagnostics import Diagnostic, ExitCode, InputError, KvskillError, Severity, Span, as_warning
from kvskill.manifest import MANIFEST_NAME, Manifest, MemoryPlan, dump_manifest

__all__ = ["Analysis", "AnalyzeRequest", "analyze"]


@dataclass(frozen=True)
class Analysis:
    """The result: the manifest, every finding, and what the report shows beside it. `facts` is None only for a Paged
    model whose config cannot be understood.
    """

    manifest: Manifest
    findings: tuple[Diagnostic, ...]
    exit_code: ExitCode
    base: Gathered
    facts: ConfigFacts | None = None
    features: tuple[Feature, ...] = ()
    plans: tuple[MemoryPlan, ...] = ()
    what_if: MemoryPlan | None = None
    recorded: Record | None = None
    written: Path | None = None


def analyze(request: AnalyzeRequest) -> Analysis:
    """Analyze one model folder.

    Raises InputError (exit 2) for what cannot be read and Refusal (exit 3) where no answer can be given at all. What
    can be decided is in the manifest; blocking findings make the exit code 3.
    """
    base = gather(request)
    recognised = by_hand(base)
    if recognised is not None:
        manifest, findings = by_hand_manifest(base, recognised)
        written = _write(base.place, manifest) if request.write else None
        return Analysis(manifest, findings, ExitCode.DONE, base, written=written)
    try:
        model = understand_model(base)
    except KvskillError as exc:
        done = _paged_anyway(request, base, exc)
        if done is None:
            raise
        return done
    return _decide(request, base, model)


def _decide(request: AnalyzeRequest, base: Gathered, model: Understood) -> Analysis:
    place, target, facts, code = base.place, base.target, model.facts, model.code
    features = find_features(place.model_dir, place.root, base.yamls, model.values, base.source.shown)
    standalone = base.deployment.decision.value == "standalone"
    chosen = select(
        SelectionInput(
            facts,
            code,
            target.profile,
            target.operators,
            base.overrides,
            features,
            base.yamls,
            base.primary,
            standalone,
        )
    )
    plans, what_if, plan_findings = plans_for(
        chosen.groups,
        facts.mtp.count,
        base.yamls,
        base.primary,
        target.tree,
        block_size=chosen.block_size.value,
        what_if=request.what_if,
        standalone=standalone,
    )
    findings = ordered(
        [
            *base.findings,
            *base.deployment.findings,
            *(f for y in base.yamls for f in y.findings),
            *target.findings,
            *facts.findings,
            *(code.findings if chosen.kv_mode.value == "paged" else map(as_warning, code.findings)),
            *(model.findings if chosen.kv_mode.value == "paged" else map(as_warning, model.findings)),
            *chosen.findings,
            *check_runs(base.yamls, chosen.groups, limits_for(target.profile.torch_npu)),
            *plan_findings,
            *(f.finding for f in features),
            *(topology_findings(model.modeling.program.files.values(), base.yamls) if standalone else ()),
            *map(as_warning, migrations(code.field_uses, target.profile).findings),
            *_progress_against_config(base, facts),
            *_old_keys(base),
        ],
        paged=code.model.state == "paged",
        settled=frozenset(facts.verdict.grounds) if chosen.kv_mode.value != "paged" else frozenset(),
    )
    primary = base.primary.shown if base.primary is not None else None
    memory = next((p for p in plans if p.yaml == primary), None) if primary else None
    manifest = build_manifest(base, code, facts, chosen, memory, findings)
    recorded = None
    if request.record:
        recorded = _record(place, manifest)
        if recorded.written:  # its bytes changed: the manifest names the new ones
            manifest = manifest.model_copy(update={"inputs": input_files(base, code.model.modeling)})
    written = _write(place, manifest) if request.write else None
    return Analysis(
        manifest,
        tuple(findings),
        _exit(findings, manifest),
        base,
        facts,
        features,
        tuple(plans),
        what_if,
        recorded,
        written,
    )


def _paged_anyway(request: AnalyzeRequest, base: Gathered, exc: KvskillError) -> Analysis | None:
    """A model that is Paged already needs no config: recognised as such, with the config's trouble as a warning."""
    try:
        facts = base.code.facts({})
    except Exception:  # the walk had no config to stand on; the config's own error is the one to report
        return None
    if facts.state != "paged":
        return None
    findings = ordered([*base.findings, *base.deployment.findings, *map(as_warning, exc.findings)], paged=True)
    manifest = paged_manifest(base, facts, findings)
    written = _write(base.place, manifest) if request.write else None
    return Analysis(manifest, tuple(findings), ExitCode.DONE, base, written=written)


def _progress_against_config(base: Gathered, facts: ConfigFacts) -> Iterator[Diagnostic]:
    progress = base.progress
    if progress is not None and progress.state == "not-runnable":
        said = progress.first("state")
        yield Diagnostic(
            "KV038",
            Severity.NOTE,
            "progress.md says that the model does not run yet.",
            "`verify` then has no Legacy run to compare with; finish the migration first, or let transformers judge.",
            said.span if said is not None else Span(progress.shown),
        )
    if progress is None or progress.attention is None or progress.attention_at is None:
        return
    kind, found = progress.attention, facts.attention_kind
    if kind != found and {kind, found} != {"GQA", "MQA"} and found != "none":
        yield Diagnostic(
            "KV030",
            Severity.WARNING,
            f"progress.md says {kind}, the config describes {found}.",
            "Config and code count; correct progress.md if it is out of date.",
            progress.attention_at,
        )


def _old_keys(base: Gathered) -> Iterator[Diagnostic]:
    """Keys of another era in framework files; `apply` migrates the ones that paging needs."""
    fields = base.target.profile.config_fields
    for y in base.yamls:
        if y.era != "framework-2d":
            continue
        for old, new, line in old_keys(y):
            section, _, name = new.partition(".")
            if name in fields.get(section, ()) and new not in y.keys:
                yield Diagnostic(
                    "KV032",
                    Severity.NOTE,
                    f"`{old}` is read by the target as `{new}`.",
                    "`apply` moves it.",
                    Span(y.shown, line),
                )


def _record(place: Place, manifest: Manifest) -> Record:
    path, _ = find_progress(place.model_dir)
    folder = place.model_dir / "agentic"
    path = path or (folder if folder.is_dir() else place.model_dir) / "progress.md"
    return record_decisions(path, shown_path(path, place.root), decision_rows(manifest), root=place.model_dir)


def _write(place: Place, manifest: Manifest) -> Path:
    """Write the manifest beside the model; an unchanged one is not touched."""
    path = place.model_dir / MANIFEST_NAME
    data = dump_manifest(manifest).encode("utf-8")
    shown = Span(shown_path(path, place.root))
    if path.is_symlink() and not path.resolve().is_relative_to(place.model_dir.resolve()):
        raise InputError(
            Diagnostic(
                "KV014",
                Severity.ERROR,
                "kv_manifest.yaml is a symbolic link out of the model folder.",
                "Remove the link.",
                shown,
            )
        )
    try:
        if not path.exists() or path.read_bytes() != data:
            path.write_bytes(data)
    except OSError as exc:
        raise InputError(
            Diagnostic(
                "KV034",
                Severity.ERROR,
                f"The manifest cannot be written ({exc.strerror}).",
                "Check the folder's permissions, or use --no-write.",
                shown,
            )
        ) from None
    return path


def _exit(findings: Sequence[Diagnostic], manifest: Manifest) -> ExitCode:
    if manifest.model.state == "paged":
        return ExitCode.DONE
    blocked = any(f.severity is Severity.BLOCKING for f in findings)
    return ExitCode.REFUSED if blocked or manifest.kv_mode.value == "out-of-scope" else ExitCode.DONE
