"""`apply`: manifest and facts to a plan, the plan to edits, checked, then written: all files or none."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvskill.analyzer.gather import gather, understand_model
from kvskill.analyzer.modeling.facts import ModelFacts
from kvskill.analyzer.request import AnalyzeRequest
from kvskill.analyzer.resolve import Place, find_model
from kvskill.analyzer.runner.recognise import recognise
from kvskill.diagnostics import Diagnostic, ExitCode, InputError, KvskillError, Refusal, Severity, Span
from kvskill.implementer.edits import EditConflict
from kvskill.implementer.names import unused_since
from kvskill.implementer.plan import Plan, build_plan
from kvskill.implementer.postcheck import postcheck
from kvskill.implementer.standalone.plan import build_standalone_plan
from kvskill.implementer.standalone.postcheck import postcheck_standalone
from kvskill.implementer.writer import dirty_files, read_journal, write_all
from kvskill.manifest import MANIFEST_NAME, Manifest, load_manifest

__all__ = ["Applied", "ApplyRequest", "FileChange", "apply"]

Mode = Literal["write", "diff", "check"]


@dataclass(frozen=True)
class ApplyRequest:
    """What the command line asks for."""

    model: str
    repo: Path | None = None
    config: Path | None = None
    mode: Mode = "write"
    force: bool = False


@dataclass(frozen=True)
class FileChange:
    """One file that changes; `path` is relative to the repository."""

    path: str
    old: bytes
    new: bytes
    edits: int


@dataclass(frozen=True)
class Applied:
    """The outcome. `status` is converted, would-convert, nothing-to-do or legacy-kept."""

    status: str
    exit_code: ExitCode
    place: Place
    changes: tuple[FileChange, ...] = ()
    findings: tuple[Diagnostic, ...] = ()


def apply(request: ApplyRequest) -> Applied:
    """Convert one model. Raises InputError (exit 2) and Refusal (exit 3); then nothing was written."""
    place = find_model(request.model, request.repo)
    _recover(place)
    manifest = load_manifest(place.model_dir / MANIFEST_NAME, f"{place.folder}/{MANIFEST_NAME}")
    if manifest.deployment.value == "standalone":
        recognised = recognise(place.model_dir, place.root)
        if recognised.mode == "paged":
            return Applied("nothing-to-do", ExitCode.DONE, place, findings=recognised.findings)
    facts, config = _facts(place, manifest, request)
    if facts.state == "paged":
        return Applied("nothing-to-do", ExitCode.DONE, place)
    if manifest.kv_mode.value != "paged":
        return Applied("legacy-kept", ExitCode.DONE, place)
    _check_inputs(place, manifest)
    if manifest.blocking:
        raise Refusal(_from_manual(manifest))
    standalone = manifest.deployment.value == "standalone"
    plan = build_standalone_plan(facts, manifest, config) if standalone else build_plan(facts, manifest)
    if plan.blocking:
        raise Refusal(plan.blocking)
    changes = _changes(plan, facts)
    problems = (postcheck_standalone if standalone else postcheck)(plan, facts, config)
    if problems:
        raise Refusal(problems)
    findings = tuple(f for f in plan.findings if f.severity is not Severity.BLOCKING)
    findings += tuple(_unused(changes, facts))
    if request.mode != "write":
        return Applied(
            "would-convert", ExitCode.FOUND if request.mode == "check" else ExitCode.DONE, place, changes, findings
        )
    targets = {place.root / c.path: c.new for c in changes}
    _guard(place, list(targets), request.force)
    write_all(place.model_dir, targets)
    return Applied("converted", ExitCode.DONE, place, changes, findings)


def _recover(place: Place) -> None:
    """A run that was killed while writing left a journal: say so instead of converting half of a model."""
    journal = read_journal(place.model_dir)
    if journal is not None and journal.state == "writing":
        raise Refusal(
            Diagnostic(
                "KV254",
                Severity.BLOCKING,
                "An earlier apply was stopped while it wrote its files.",
                f"Run `kvskill undo {place.name}` to put the originals back, then apply again.",
                Span(place.folder),
            )
        )


def _facts(place: Place, manifest: Manifest, request: ApplyRequest) -> tuple[ModelFacts, dict[str, Any]]:
    config = request.config
    if config is None and manifest.model.config_file is not None:
        config = place.root / manifest.model.config_file
        if not config.exists():
            raise InputError(
                Diagnostic(
                    "KV255",
                    Severity.ERROR,
                    f"The config that the manifest was made with ({manifest.model.config_file}) is not there.",
                    "Give --config, or run `kvskill analyze` again.",
                    Span(f"{place.folder}/{MANIFEST_NAME}"),
                )
            )
    base = gather(AnalyzeRequest(model=str(place.model_dir), repo=place.repo, config=config, write=False))
    try:
        model = understand_model(base)
    except KvskillError:
        raise
    return model.modeling, model.values


def _check_inputs(place: Place, manifest: Manifest) -> None:
    """The manifest must describe the files as they are."""
    for item in manifest.inputs:
        path = place.root / item.path
        if not path.exists() or path.suffix != ".py":
            continue
        if hashlib.sha256(path.read_bytes()).hexdigest() != item.sha256:
            raise InputError(
                Diagnostic(
                    "KV256",
                    Severity.ERROR,
                    f"{item.path} changed after the manifest was written.",
                    "Run `kvskill analyze` again.",
                    Span(item.path),
                )
            )


def _from_manual(manifest: Manifest) -> list[Diagnostic]:
    return [
        Diagnostic(t.code, Severity.BLOCKING, t.why or t.what, t.what, Span(t.path, t.line, t.col))
        for t in manifest.blocking
    ]


def _changes(plan: Plan, facts: ModelFacts) -> tuple[FileChange, ...]:
    try:
        results = plan.results()
    except EditConflict as exc:
        file = facts.program.files[exc.first.path]
        line = next(i for i, s in reversed(list(enumerate(file.line_starts, 1))) if s <= exc.second.start)
        raise Refusal(
            Diagnostic(
                "KV257",
                Severity.BLOCKING,
                f"Two edits want the same code here ({exc.first.why}; {exc.second.why}).",
                "Split the statement so that each line does one thing.",
                Span(exc.first.path, line),
            )
        ) from None
    return tuple(
        FileChange(shown, facts.program.files[shown].raw, new, len(plan.edits[shown].edits))
        for shown, new in sorted(results.items())
    )


def _unused(changes: tuple[FileChange, ...], facts: ModelFacts) -> Iterator[Diagnostic]:
    """Helpers that only removed code called. They are left in place: another folder may import them."""
    files = facts.program.files
    new = {c.path: ast.parse(c.new, c.path) for c in changes}
    after = (new.get(path, file.tree) for path, file in files.items())
    names = {n.name for n in unused_since((f.tree for f in files.values()), after)}
    for file in files.values():
        for node in ast.walk(file.tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in names:
                yield Diagnostic(
                    "KV269",
                    Severity.NOTE,
                    f"Nothing in this folder uses `{node.name}` any more.",
                    "Remove it where no other code imports it.",
                    file.span(node),
                )


def _guard(place: Place, paths: list[Path], force: bool) -> None:
    dirty = [] if force else dirty_files(paths)
    if dirty:
        shown = dirty[0].relative_to(place.root).as_posix()
        raise Refusal(
            Diagnostic(
                "KV258",
                Severity.BLOCKING,
                f"{len(dirty)} of the files to write have changes that git does not hold.",
                "Commit or stash them, or use --force (the originals are saved either way).",
                Span(shown),
            )
        )
