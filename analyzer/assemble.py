"""Putting the manifest together: inputs with hashes, findings in a fixed order, tasks that are left."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from kvskill._version import __version__
from kvskill.analyzer.config.facts import ConfigFacts
from kvskill.analyzer.gather import Gathered
from kvskill.analyzer.modeling.facts import ModelFacts
from kvskill.analyzer.progress import find_progress
from kvskill.analyzer.resolve import shown_path
from kvskill.analyzer.runner.files import folder_files
from kvskill.analyzer.selection.code import CodeView
from kvskill.analyzer.selection.decide import Selection
from kvskill.analyzer.selection.limits import limits_for
from kvskill.diagnostics import Diagnostic, Severity, as_warning
from kvskill.manifest import Decision, Evidence, InputFile, Manifest, ManualTask, MemoryPlan, ModelRef

__all__ = ["build_manifest", "input_files", "ordered", "paged_manifest"]

_RANK = {Severity.ERROR: 0, Severity.BLOCKING: 1, Severity.WARNING: 2, Severity.NOTE: 3}


def ordered(findings: Iterable[Diagnostic], *, paged: bool, settled: frozenset[str] = frozenset()) -> list[Diagnostic]:
    """Findings by severity and place, each once.

    On an already Paged model nothing blocks: there is nothing to do. Codes in `settled` are grounds that led to a
    decision (Legacy is kept): they are said, and block nothing further.
    """
    seen: dict[tuple[str, str, str], Diagnostic] = {}
    for f in findings:
        if (paged or f.code in settled) and f.severity is Severity.BLOCKING:
            f = as_warning(f)
        seen.setdefault((f.code, str(f.span), f.fact), f)
    return sorted(seen.values(), key=lambda f: (_RANK[f.severity], f.code, f.span, f.fact))


def build_manifest(
    base: Gathered,
    code: CodeView,
    facts: ConfigFacts,
    chosen: Selection,
    memory: MemoryPlan | None,
    findings: Sequence[Diagnostic],
) -> Manifest:
    """The manifest of one analysis; equal facts give an equal manifest."""
    tasks = [f for f in findings if f.severity is Severity.BLOCKING or f.data.get("task")]
    return Manifest(
        tool_version=__version__,
        inputs=input_files(base, code.model.modeling),
        model=_with_config(base, code.model),
        deployment=base.deployment.decision,
        kv_mode=chosen.kv_mode,
        kv_grounds=chosen.grounds,
        target=base.target.profile.model_copy(
            update={"operator_profile": limits_for(base.target.profile.torch_npu).profile}
        ),
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
        yamls=tuple(y.shown for y in base.yamls),
        overrides=base.overrides,
        findings=tuple(f.to_json() for f in findings),
        manual=tuple(_task(i, f) for i, f in enumerate(tasks)),
    )


def paged_manifest(base: Gathered, facts: ModelFacts, findings: Sequence[Diagnostic]) -> Manifest:
    """The manifest of a model that is Paged already and whose config could not be understood."""
    entry = facts.entry
    where = str(entry.file.span(entry.node)) if entry is not None else base.place.folder
    seen = Evidence(kind="code", ref=where, note="the class declares its cache entries")
    profile = base.target.profile
    files = (entry.file.shown,) if entry is not None else ()
    model = ModelRef(
        name=base.place.name,
        folder=base.place.folder,
        modeling=files,
        causal_lm=entry.name if entry is not None else None,
        state="paged",
    )
    unknown = Evidence(kind="default", ref="", note="not decided: nothing is converted")
    return Manifest(
        tool_version=__version__,
        inputs=input_files(base, files),
        model=_with_config(base, model),
        deployment=base.deployment.decision,
        kv_mode=Decision[Literal["paged", "legacy", "out-of-scope"]](value="paged", source="code", evidence=(seen,)),
        target=profile,
        fa_version=Decision[Literal[1, 2]](value=profile.fa_version, source="target", evidence=(unknown,)),
        mla_absorb=Decision[bool](value=False, source="default", evidence=(unknown,)),
        mixed_attn_types=Decision[bool](value=False, source="default", evidence=(unknown,)),
        block_size=Decision[int](value=profile.default_block_size, source="default", evidence=(unknown,)),
        window_rule=Decision[Literal["hf", "upstream"]](value="hf", source="default", evidence=(unknown,)),
        yamls=tuple(y.shown for y in base.yamls),
        overrides=base.overrides,
        findings=tuple(f.to_json() for f in findings),
    )


def input_files(base: Gathered, modeling: Sequence[str]) -> tuple[InputFile, ...]:
    """Every file that was read, by shown path, with the hash of its bytes."""
    place = base.place
    paths = [*(y.path for y in base.yamls), *(place.root / m for m in modeling)]
    if base.source.path is not None:
        paths.append(base.source.path)
    progress, _ = find_progress(place.model_dir)
    if progress is not None:
        paths.append(progress)
    paths.extend(sorted(place.model_dir.glob("runner_*.py")))
    if base.deployment.decision.value == "standalone":  # caches may be allocated in any file of the folder
        paths.extend(f.path for f in folder_files(place.model_dir, place.root))
    found: dict[str, str] = {}
    for path in paths:
        try:
            found[shown_path(path, place.root)] = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError:
            continue
    return tuple(InputFile(path=p, sha256=h) for p, h in sorted(found.items()))


def _with_config(base: Gathered, model: ModelRef) -> ModelRef:
    """The model with the config file in use, as a path from the root that later commands can follow; None where
    only the class's defaults are at hand.
    """
    path = base.source.path if base.source.defaults is None else None
    shown = None if path is None else Path(os.path.relpath(path.resolve(), base.place.root.resolve())).as_posix()
    return model.model_copy(update={"config_file": shown})


def _task(number: int, finding: Diagnostic) -> ManualTask:
    """A finding as a task: what is missing is for a person or an agent to say or do."""
    return ManualTask(
        id=f"{finding.code}-{number + 1}",
        blocking=finding.severity is Severity.BLOCKING,
        code=finding.code,
        path=finding.span.path,
        line=finding.span.line,
        col=finding.span.col,
        what=finding.todo,
        why=finding.fact,
        check="Run `kvskill analyze` again: the finding is gone.",
    )
