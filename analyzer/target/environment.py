"""From the places that name torch_npu releases to the operators at hand and the FA version, with the
reason.

Order of sources: `--torch-npu`, what is installed here (first on a host with CANN, last on one without:
there the wheel only serves `verify`), what the model's and the repository's requirement files pin, what
their documents say. Where the releases of the first source that speaks disagree about an operator, the
calls that the repository already makes decide, then a wheel named in the documents; else a person is asked.
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvskill.analyzer.data import load_json
from kvskill.analyzer.target.releases import (
    FA_V1,
    FA_V2,
    Mention,
    has_operator,
    known_releases,
    read_mentions,
    select,
)
from kvskill.diagnostics import Diagnostic, InputError, Severity, Span
from kvskill.manifest import Evidence
from kvskill.source import read_source

__all__ = ["OperatorFacts", "probe_operators"]

_MAX_DOC_BYTES = 2_000_000
_PIN_FILES = (
    "requirements*.txt",
    "pyproject.toml",
    "setup.cfg",
    "Dockerfile*",
    "*.dockerfile",
    "environment*.y*ml",
)
_DOC_FILES = ("README*", "INSTALL*")
_ASK = "Say it with --torch-npu RELEASE, or set `overrides: {fa_version: 1 or 2}` in the manifest."


@dataclass(frozen=True)
class OperatorFacts:
    """What is known about the target's torch_npu.

    `releases` are the candidates; `operators[op]` is True or False where all candidates agree, else None.
    `fa_version` is None only when a person has to be asked (then a blocking finding says so).
    """

    releases: tuple[str, ...]
    source: str
    operators: dict[str, bool | None]
    fa_version: Literal[1, 2] | None
    reason: str
    evidence: tuple[Evidence, ...]
    findings: tuple[Diagnostic, ...]


def probe_operators(
    repo: Path | None, model_dir: Path | None, torch_npu: str | None, *, use_installed: bool = True
) -> OperatorFacts:
    """Decide releases, operators and FA version. Raises InputError KV060 for an unusable `--torch-npu`."""
    shown_root = repo or model_dir
    mentions = list(_document_mentions(repo, model_dir, shown_root))
    source, chosen = _first_source(torch_npu, mentions, use_installed)
    releases = _common(chosen)
    findings: list[Diagnostic] = []
    if not chosen:
        return _assume_newest(repo, model_dir, shown_root)
    evidence = [_evidence(m) for m in chosen[:4]]
    operators = _operators(releases)
    fa2 = operators[FA_V2]
    if fa2 is not None:
        exact = [m for m in mentions if m.exact and set(m.releases) & set(releases)]
        if source in ("pin", "prose") and exact and len(releases) > 1:
            releases = tuple(sorted(set(releases) & {r for m in exact for r in m.releases}))
            operators = _operators(releases)
            evidence.append(_evidence(exact[0]))
        findings.extend(_contradictions(source, fa2, mentions, shown_root))
        named = _span_text(releases)
        verb = "registered" if fa2 else "not registered"
        reason = f"{FA_V2} is {verb} by torch_npu {named} ({_source_text(source)})"
        return OperatorFacts(releases, source, operators, 2 if fa2 else 1, reason, tuple(evidence), tuple(findings))
    return _undecided(repo, model_dir, shown_root, mentions, source, releases, operators, evidence)


def _undecided(
    repo: Path | None,
    model_dir: Path | None,
    shown_root: Path | None,
    mentions: list[Mention],
    source: str,
    releases: tuple[str, ...],
    operators: dict[str, bool | None],
    evidence: list[Evidence],
) -> OperatorFacts:
    """The candidates differ about FA v2: calls, then a wheel name, then a question."""
    spread = f"torch_npu {_span_text(releases)} ({_source_text(source)}) differ about {FA_V2}"
    version, call = _calls_decide(repo, model_dir, shown_root)
    if version and call:
        evidence.append(call)
        reason = f"{spread}; the repository already calls v{version} ({call.ref})"
        if version == 2:  # a release without the called operator cannot be the one in use
            releases = tuple(r for r in releases if has_operator(r, FA_V2) is not False)
            operators = _operators(releases)
        return OperatorFacts(releases, source, operators, version, reason, tuple(evidence), ())
    wheels = [m for m in mentions if m.kind == "wheel" and m.exact]
    verdicts = {has_operator(r, FA_V2) for m in wheels for r in m.releases}
    if len(verdicts) == 1 and None not in verdicts:
        named = _common(wheels)
        has = verdicts == {True}
        evidence.append(_evidence(wheels[0]))
        reason = f"{spread}; the documents name the wheel {wheels[0].text} ({wheels[0].ref})"
        return OperatorFacts(named, "wheel", _operators(named), 2 if has else 1, reason, tuple(evidence), ())
    asked = Diagnostic(
        "KV061",
        Severity.BLOCKING,
        f"{spread[0].upper()}{spread[1:]}, and neither a call in the repository nor a wheel name decides.",
        _ASK,
        _ref_span(evidence[0].ref if evidence else "torch_npu"),
        {"releases": list(releases)},
    )
    return OperatorFacts(releases, source, operators, None, spread, tuple(evidence), (asked,))


def _assume_newest(repo: Path | None, model_dir: Path | None, shown_root: Path | None) -> OperatorFacts:
    newest = known_releases()[-1]
    version, call = _calls_decide(repo, model_dir, shown_root)
    evidence = (call,) if call else ()
    if version == 2 and call:
        reason = f"no release of torch_npu is named; the repository already calls v2 ({call.ref})"
        able = tuple(r for r in known_releases() if has_operator(r, FA_V2))
        return OperatorFacts((), "calls", _operators(able), 2, reason, evidence, ())
    note = Diagnostic(
        "KV062",
        Severity.WARNING,
        f"No release of torch_npu is named anywhere; the operators of {newest} (newest known) are assumed.",
        _ASK,
        Span("." if shown_root is None else "requirements.txt"),
    )
    operators = _operators((newest,))
    return OperatorFacts((), "assumed", operators, 2, f"torch_npu {newest} assumed", evidence, (note,))


def _first_source(option: str | None, mentions: list[Mention], use_installed: bool) -> tuple[str, list[Mention]]:
    if option is not None:
        return "option", [_option(option)]
    installed = _installed() if use_installed else []
    if installed and _has_cann():
        return "installed", installed
    for kind in ("pin", "wheel", "prose"):
        found = [m for m in mentions if m.kind == kind]
        if found:
            return kind, found
    return ("installed", installed) if installed else ("none", [])


def _installed() -> list[Mention]:
    for name in ("torch_npu", "torch-npu"):
        try:
            version = importlib.metadata.version(name).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
        return [Mention("installed", (version,), "installed", f"torch_npu {version}", exact=True)]
    return []


def _has_cann() -> bool:
    """Whether this host can run what is installed: CANN's own variables, or a device node."""
    named = any(os.environ.get(v) for v in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH"))
    return named or Path("/dev/davinci_manager").exists()


def _option(text: str) -> Mention:
    text = text.strip()
    specifier = text if text[:1] in "=<>!~" else f"=={text}"
    releases = select(specifier)
    if not releases and text[:1] in "0123456789":
        releases = (text,)
        if has_operator(text, FA_V1) is None:  # older than the table, or another numbering
            raise InputError(
                Diagnostic(
                    "KV060",
                    Severity.ERROR,
                    f"`--torch-npu {text}` is not a release that the operator table can judge.",
                    f"Give one of {', '.join(known_releases()[-8:])}, or an older one of the table.",
                    Span("--torch-npu"),
                )
            )
    if not releases:
        raise InputError(
            Diagnostic(
                "KV060",
                Severity.ERROR,
                f"`--torch-npu {text}` names no known release.",
                "Give a release like 2.8.0.post4, or a specifier like `>=2.8.0`.",
                Span("--torch-npu"),
            )
        )
    return Mention("option", releases, "--torch-npu", text, exact=len(releases) == 1)


def _common(mentions: Iterable[Mention]) -> tuple[str, ...]:
    """Releases that fit all that is said: exact names are alternatives, ranges narrow each other."""
    mentions = list(mentions)
    exact = {r for m in mentions if m.exact for r in m.releases}
    ranges = [set(m.releases) for m in mentions if not m.exact]
    both = set.intersection(*ranges) if ranges else set()
    if exact:
        kept = exact & both if both else exact
        pool = kept or exact
    else:
        pool = both or {r for s in ranges for r in s}
    order = {r: i for i, r in enumerate(known_releases())}
    return tuple(sorted(pool, key=lambda r: (order.get(r, len(order)), r)))


def _operators(releases: tuple[str, ...]) -> dict[str, bool | None]:
    out: dict[str, bool | None] = {}
    for op in load_json("op_availability.json")["operators"]:
        said = {has_operator(r, op) for r in releases}
        out[op] = said.pop() if len(said) == 1 else None
    return out


def _document_mentions(repo: Path | None, model_dir: Path | None, shown_root: Path | None) -> Iterator[Mention]:
    """Pins and documents of the model folder; those of the repository root only where the model's are
    silent.
    """
    for folder, depth in ((model_dir, 2), (repo, 1)):
        found: list[Mention] = []
        if folder is None or shown_root is None:
            continue
        for patterns, pins in ((_PIN_FILES, True), (_DOC_FILES, False)):
            for path in _matching(folder, patterns, depth):
                text = path.read_text(encoding="utf-8", errors="replace")
                found.extend(read_mentions(text, _shown(path, shown_root), pins=pins))
        yield from found
        if found:
            return


def _matching(folder: Path, patterns: tuple[str, ...], depth: int) -> Iterator[Path]:
    for pattern in patterns:
        for level in range(depth):
            for path in sorted(folder.glob("*/" * level + pattern)):
                if path.is_file() and path.stat().st_size <= _MAX_DOC_BYTES:
                    yield path


def _calls_decide(
    repo: Path | None, model_dir: Path | None, shown_root: Path | None
) -> tuple[Literal[1, 2] | None, Evidence | None]:
    """The FA version that code of the repository already calls: v2 anywhere proves v2, else v1."""
    v1: Evidence | None = None
    for path in _python_files(repo, model_dir):
        raw = path.read_bytes()
        if FA_V1.encode() not in raw or shown_root is None:
            continue
        try:
            source = read_source(path, _shown(path, shown_root))
        except InputError:
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and node.attr in (FA_V1, FA_V2):
                where = Evidence(kind="code", ref=str(source.span(node)), note=f"calls {node.attr}")
                if node.attr == FA_V2:
                    return 2, where
                v1 = v1 or where
    return (1, v1) if v1 else (None, None)


def _python_files(repo: Path | None, model_dir: Path | None) -> Iterator[Path]:
    seen: set[Path] = set()
    for folder in (model_dir, *(repo / sub for sub in ("models", "module", "executor") if repo is not None)):
        if folder is None or not folder.is_dir():
            continue
        for path in sorted(folder.rglob("*.py")):
            if path not in seen and path.is_file() and path.stat().st_size <= _MAX_DOC_BYTES:
                seen.add(path)
                yield path


def _contradictions(source: str, fa2: bool, mentions: list[Mention], shown_root: Path | None) -> Iterator[Diagnostic]:
    """What is installed here may not be what the documents ask for; say so where the answer would change."""
    if source not in ("installed", "option"):
        return
    for mention in mentions:
        said = {has_operator(r, FA_V2) for r in mention.releases}
        if len(said) == 1 and said != {fa2} and None not in said:
            yield Diagnostic(
                "KV063",
                Severity.WARNING,
                f"`{mention.text}` names a torch_npu {'without' if fa2 else 'with'} {FA_V2}, "
                f"unlike {_source_text(source)}.",
                "Check which release runs the model; --torch-npu RELEASE decides.",
                _ref_span(mention.ref),
            )
            return


def _evidence(mention: Mention) -> Evidence:
    kind: Literal["option", "target"] = "option" if mention.kind == "option" else "target"
    return Evidence(kind=kind, ref=mention.ref, note=mention.text)


def _source_text(source: str) -> str:
    return {
        "option": "--torch-npu",
        "installed": "installed here",
        "pin": "pinned by requirements",
        "wheel": "named in the documents",
        "prose": "named in the documents",
    }.get(source, source)


def _span_text(releases: tuple[str, ...]) -> str:
    if len(releases) <= 3:
        return ", ".join(releases) or "of an unknown release"
    return f"{releases[0]} .. {releases[-1]} ({len(releases)} releases)"


def _ref_span(ref: str) -> Span:
    path, _, line = ref.rpartition(":")
    return Span(path, int(line)) if path and line.isdigit() else Span(ref)


def _shown(path: Path, root: Path) -> str:
    try:
        return path.relative_to(root).as_posix()
    except ValueError:
        return path.name
