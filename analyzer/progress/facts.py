"""What progress.md says: deployment mode, architecture, migrator state, hardware; each value with its line.

Keys are recognised in list items (`- key：value`), plain lines, bold labels, table rows, and section text.
Two different answers to one question are a finding; a value that lists both choices is the template's
placeholder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from kvskill.analyzer.data import load_yaml
from kvskill.analyzer.progress.text import ProgressText
from kvskill.diagnostics import Diagnostic, Severity, Span

__all__ = ["ProgressFacts", "Said", "read_facts"]

Deployment = Literal["framework", "standalone"]
State = Literal["runnable", "not-runnable", "needs-cards"]
_ITEM = re.compile(
    r"^\s*(?:>\s*)*(?:[-*+•]\s+|\d+[.)、]\s*)?(?:\[[ xX]\]\s*)?"
    r"(?P<key>[^:：|]{1,40}?)\s*[:：]\s*(?P<value>.*)$"
)
_HEADING = re.compile(r"^\s{0,3}#{1,6}\s*(?P<text>.*?)\s*#*\s*$")
_ATTENTION = re.compile(r"(?<![A-Za-z])(MHA|MQA|GQA|MLA)(?![A-Za-z])")
_EMPTY = ("", "-", "—", "–", "无", "n/a", "na", "tbd", "待定", "待填", "none", "?", "未知", "unknown")


@dataclass(frozen=True)
class Said:
    """One value as written, and where."""

    field: str
    value: str
    span: Span


@dataclass(frozen=True)
class ProgressFacts:
    """Everything that was understood. `values` holds every answer by field, in file order."""

    shown: str
    language: Literal["zh", "en"]
    deployment: Deployment | None
    deployment_at: Span | None
    state: State | None
    attention: str | None
    attention_at: Span | None
    values: dict[str, tuple[Said, ...]]
    findings: tuple[Diagnostic, ...]

    def first(self, field: str) -> Said | None:
        """The first non-empty answer to a field."""
        said = self.values.get(field, ())
        return said[0] if said else None


def read_facts(text: ProgressText) -> ProgressFacts:
    """Understand a progress file; whatever is not there stays None."""
    spec = load_yaml("progress_keys.yaml")
    values: dict[str, list[Said]] = {}
    for said in _answers(text, spec):
        values.setdefault(said.field, []).append(said)
    findings: list[Diagnostic] = []
    deployment, deployment_at = _deployment(values.get("deployment", []), spec, findings)
    attention, attention_at = _attention([*values.get("attention", []), *values.get("architecture", [])])
    state = _state(values.get("state", []), spec)
    return ProgressFacts(
        text.shown,
        text.language,
        deployment,
        deployment_at,
        state,
        attention,
        attention_at,
        {k: tuple(v) for k, v in values.items()},
        tuple(findings),
    )


def _answers(text: ProgressText, spec: dict[str, Any]) -> Iterator[Said]:
    labels = {_plain(label): name for name, all_ in spec["fields"].items() for label in all_}
    sections = {_plain(h): name for name, all_ in spec["sections"].items() for h in all_}
    section: str | None = None
    header: list[str] = []
    for number, line in text.lines():
        span = Span(text.shown, number)
        heading = _HEADING.match(line)
        if heading:
            section = sections.get(_plain(heading.group("text")))
            header = []
            line = heading.group("text")  # "#### Attention 类型: MLA" answers by itself
            if ":" not in line and "：" not in line:
                continue
        if "|" in line:
            yield from _table_row(line, header, labels, span)
            continue
        header = []
        item = _ITEM.match(line)
        field = labels.get(_plain(item.group("key"))) if item else None
        if item and field:
            value = _value(item.group("value"))
            if value is not None:
                yield Said(field, value, span)
        elif section and _value(line) is not None:
            yield Said(section, _value(line) or "", span)


def _table_row(line: str, header: list[str], labels: dict[str, str], span: Span) -> Iterator[Said]:
    cells = [c.strip() for c in line.strip().strip("|").split("|")]
    if all(re.fullmatch(r":?-{2,}:?", c) for c in cells if c):
        return
    named = labels.get(_plain(cells[0]))
    if named and len(cells) > 1:
        value = _value(cells[1])
        if value is not None and labels.get(_plain(cells[1])) is None:
            yield Said(named, value, span)
            return
    if header and len(header) == len(cells):
        for title, cell in zip(header, cells, strict=True):
            field, value = labels.get(_plain(title)), _value(cell)
            if field and value is not None:
                yield Said(field, value, span)
    if not header or any(labels.get(_plain(c)) for c in cells):
        header[:] = cells


def _deployment(
    said: list[Said], spec: dict[str, Any], findings: list[Diagnostic]
) -> tuple[Deployment | None, Span | None]:
    answers: list[tuple[Deployment, Said]] = []
    for item in said:
        low = item.value.lower()
        hits = [mode for mode, words in spec["deployment"].items() if any(w in low for w in words)]
        if len(hits) == 1:
            answers.append((hits[0], item))
        elif not hits:
            findings.append(
                Diagnostic(
                    "KV022",
                    Severity.WARNING,
                    f"The deployment mode `{item.value[:60]}` is neither of the two modes.",
                    "Write `部署模式: 框架部署` or `部署模式: 独立部署`.",
                    item.span,
                )
            )
    modes = {mode for mode, _ in answers}
    if len(modes) > 1:
        first, other = answers[0], next(a for a in answers if a[0] != answers[0][0])
        findings.append(
            Diagnostic(
                "KV021",
                Severity.BLOCKING,
                f"progress.md names two modes: `{first[1].value[:40]}` (line {first[1].span.line}) and "
                f"`{other[1].value[:40]}` (line {other[1].span.line}).",
                "Say which one holds with --mode framework or --mode standalone.",
                other[1].span,
            )
        )
        return None, None
    return (answers[0][0], answers[0][1].span) if answers else (None, None)


def _attention(said: list[Said]) -> tuple[str | None, Span | None]:
    for item in said:
        kinds = set(_ATTENTION.findall(item.value))
        if len(kinds) == 1:
            return kinds.pop(), item.span
    return None, None


def _state(said: list[Said], spec: dict[str, Any]) -> State | None:
    for item in said:
        low = item.value.lower()
        if sum(any(w in low for w in words) for words in spec["state"].values()) > 2:
            continue  # the template's placeholder lists every choice
        for name, words in spec["state"].items():
            if any(w in low for w in words):
                return name  # type: ignore[no-any-return]
    return None


def _plain(text: str) -> str:
    """A label without markup, numbering, brackets and case."""
    text = re.sub(r"[*_`~]", "", text)
    text = re.sub(r"^\s*(?:[-+•]|\d+(?:\.\d+)*[.)、]?)\s+", "", text)
    text = re.sub(r"[（(].*?[）)]", "", text)
    return re.sub(r"\s+", " ", text).strip().lower()


def _value(text: str) -> str | None:
    """A value without markup; None where nothing was filled in."""
    text = re.sub(r"[*`]", "", text).strip()
    return None if text.lower() in _EMPTY or re.fullmatch(r"[（(<{\[].*[）)>}\]]", text) else text
