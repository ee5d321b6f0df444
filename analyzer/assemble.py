"""Putting the manifest together: inputs with hashes, findings in a fixed order, tasks that are left."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Literal

from kvskill._version import __version__
from kvskill.analyzer.config import ConfigFacts
from kvskill.analyzer.progress import find_progress
from kvskill.analyzer.resolve import ConfigSource, Place, shown_path
from kvskill.analyzer.selection.code import CodeView
from kvskill.analyzer.selection.decide import Selection
from kvskill.analyzer.target import ProbeResult
from kvskill.analyzer.yamls import YamlFacts
from kvskill.diagnostics import Diagnostic, Severity
from kvskill.manifest import Decision, InputFile, Manifest, ManualTask, MemoryPlan, Overrides

__all__ = ["build_manifest", "input_files", "ordered"]

_RANK = {Severity.ERROR: 0, Severity.BLOCKING: 1, Severity.WARNING: 2, Severity.NOTE: 3}


def ordered(findings: Iterable[Diagnostic], *, paged: bool) -> list[Diagnostic]:
    """Findings by severity and place, each once. On an already Paged model nothing blocks: there is nothing to do."""
    seen: dict[tuple[str, str, str], Diagnostic] = {}
    for f in findings:
        if paged and f.severity is Severity.BLOCKING:
            f = Diagnostic(f.code, Severity.WARNING, f.fact, f.todo, f.span, f.data)
        seen.setdefault((f.code, str(f.span), f.fact), f)
    return sorted(seen.values(), key=lambda f: (_RANK[f.severity], f.code, f.span, f.fact))


def build_manifest(
    *,
    place: Place,
    target: ProbeResult,
    deployment: Decision[Literal["framework", "standalone"]],
    chosen: Selection,
    code: CodeView,
    facts: ConfigFacts,
    source: ConfigSource,
    yamls: Sequence[YamlFacts],
    memory: MemoryPlan | None,
    overrides: Overrides,
    findings: Sequence[Diagnostic],
) -> Manifest:
    """The manifest of one analysis; equal facts give an equal manifest."""
    file = source.shown if source.path is not None and source.defaults is None else None
    return Manifest(
        tool_version=__version__,
        inputs=input_files(place, source, yamls, code),
        model=code.model.model_copy(update={"config_file": code.model.config_file or file}),
        deployment=deployment,
        kv_mode=chosen.kv_mode,
        kv_grounds=chosen.grounds,
        target=target.profile,
        fa_version=chosen.fa_version,
        mla_absorb=chosen.mla_absorb,
        mixed_attn_types=chosen.mixed,
        block_size=chosen.block_size,
        window_rule=chosen.window_rule,
        layer_pattern=facts.layer_pattern,
        groups=chosen.groups,
        mtp_layers=facts.mtp.count,
        sublayers=code.sublayers,
        memory=memory,
        yamls=tuple(y.shown for y in yamls),
        overrides=overrides,
        findings=tuple(f.to_json() for f in findings),
        manual=tuple(_task(i, f) for i, f in enumerate(f for f in findings if f.severity is Severity.BLOCKING)),
    )


def input_files(
    place: Place, source: ConfigSource, yamls: Sequence[YamlFacts], code: CodeView
) -> tuple[InputFile, ...]:
    """Every file that was read, by shown path, with the hash of its bytes."""
    paths = [*(y.path for y in yamls), *(place.root / m for m in code.model.modeling)]
    if source.path is not None:
        paths.append(source.path)
    progress, _ = find_progress(place.model_dir)
    if progress is not None:
        paths.append(progress)
    paths.extend(sorted(place.model_dir.glob("runner_*.py")))
    found: dict[str, str] = {}
    for path in paths:
        try:
            found[shown_path(path, place.root)] = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError:
            continue
    return tuple(InputFile(path=p, sha256=h) for p, h in sorted(found.items()))


def _task(number: int, finding: Diagnostic) -> ManualTask:
    """A blocking finding as a task: what is missing is for a person or an agent to say."""
    return ManualTask(
        id=f"{finding.code}-{number + 1}",
        blocking=True,
        code=finding.code,
        path=finding.span.path,
        line=finding.span.line,
        col=finding.span.col,
        what=finding.todo,
        why=finding.fact,
        check="Run `kvskill analyze` again: the finding is gone.",
    )
