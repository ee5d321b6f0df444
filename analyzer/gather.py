"""Everything that is read before a decision: folder, overrides, target, YAML files, progress.md, code, config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvskill.analyzer.code_reader import Code, config_class, open_code, view_of
from kvskill.analyzer.config.facts import ConfigFacts
from kvskill.analyzer.config.load import read_config
from kvskill.analyzer.config.sidefiles import side_files
from kvskill.analyzer.config.understand import understand
from kvskill.analyzer.modeling.facts import ModelFacts
from kvskill.analyzer.progress import ProgressFacts, find_progress, read_facts, read_progress_text
from kvskill.analyzer.request import AnalyzeRequest
from kvskill.analyzer.resolve import ConfigSource, Place, find_config, find_model, shown_path
from kvskill.analyzer.runner.reader import standalone_facts
from kvskill.analyzer.selection.code import CodeView
from kvskill.analyzer.selection.deployment import Deployment, decide_deployment, find_runners, prompt_mode
from kvskill.analyzer.selection.effective import effective
from kvskill.analyzer.selection.features import find_features
from kvskill.analyzer.target import ProbeResult, Registered, probe
from kvskill.analyzer.yamls import YamlFacts, primary_yaml, read_yamls
from kvskill.diagnostics import Diagnostic, InputError, Refusal, Severity, Span, as_warning
from kvskill.manifest import MANIFEST_NAME, Overrides, load_overrides

__all__ = ["Gathered", "Understood", "gather", "understand_model"]


@dataclass(frozen=True)
class Gathered:
    """What surrounds the model. `findings` are those of reading; the parts carry their own too."""

    place: Place
    overrides: Overrides
    target: ProbeResult
    yamls: tuple[YamlFacts, ...]
    primary: YamlFacts | None
    progress: ProgressFacts | None
    deployment: Deployment
    code: Code
    source: ConfigSource
    findings: tuple[Diagnostic, ...]


@dataclass(frozen=True)
class Understood:
    """The model itself: settings, what they mean under the code, and the code."""

    values: dict[str, Any]
    facts: ConfigFacts
    code: CodeView
    findings: tuple[Diagnostic, ...]
    modeling: ModelFacts


def gather(request: AnalyzeRequest) -> Gathered:
    """Read the surroundings. Raises InputError and Refusal; nothing is written."""
    place = find_model(request.model, request.repo)
    overrides = _overrides(place)
    target = probe(place.repo, torch_npu=request.torch_npu, model_dir=place.model_dir)
    yamls = read_yamls(place.model_dir, place.root, target.defaults)
    primary = _primary(yamls, request.yaml, place)
    progress, findings = _progress(place)
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
    code = _open(place, registered, yamls)
    named = config_class(registered)
    source = find_config(
        place, option=request.config, primary=primary, yamls=yamls, class_name=named[1] if named else None
    )
    if source is None:
        raise _no_config(place, yamls)
    return Gathered(place, overrides, target, yamls, primary, progress, deployment, code, source, tuple(findings))


def _open(place: Place, registered: Sequence[Registered], yamls: tuple[YamlFacts, ...]) -> Code:
    """The model's code; a folder without a model is refused with the features that explain what it is."""
    try:
        return open_code(place, registered)
    except Refusal as exc:
        features = find_features(place.model_dir, place.root, yamls, None)
        raise Refusal((*exc.findings, *(f.finding for f in features if f.on))) from None


def understand_model(base: Gathered) -> Understood:
    """Understand config and code together; the code wins. Raises InputError and Refusal."""
    source = base.source
    if source.defaults is not None or source.path is None:
        values = dict(source.defaults.values) if source.defaults is not None else {}
        facts = understand(values, shown=source.shown)
    else:
        values = dict(read_config(source.path, source.shown))
        side, notes = side_files(source.path.parent)
        facts = understand(values, shown=source.shown, side=side, notes=notes)
    flat = _flat(values, facts)
    modeling = base.code.facts(flat)
    if base.deployment.decision.value == "standalone" and modeling.state in ("none", "legacy"):
        modeling = standalone_facts(base.code, flat)
    code = view_of(base.code, modeling)
    facts, found = effective(facts, code)
    return Understood(flat, facts, code, found, modeling)


def _flat(values: dict[str, Any], facts: ConfigFacts) -> dict[str, Any]:
    """The language model's own settings, as its configuration object holds them."""
    node: Any = values
    for part in filter(None, facts.text_path.split(".")):
        node = node.get(part) if isinstance(node, dict) else None
    return {**values, **node} if isinstance(node, dict) else values


def _overrides(place: Place) -> Overrides:
    """The overrides of an existing manifest; one that cannot be read stops the run before it is replaced."""
    path = place.model_dir / MANIFEST_NAME
    return load_overrides(path, shown_path(path, place.root)) if path.exists() else Overrides()


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
        return None, [*findings, *map(as_warning, exc.findings)]


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
