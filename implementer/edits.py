"""Byte-range edits: the only way in which a file changes. Edits never overlap; bytes outside them stay."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise

from kvskill.source import SourceFile

__all__ = ["Edit", "EditConflict", "EditSet"]


class EditConflict(Exception):  # noqa: N818 (says what it is)
    """Two edits want the same bytes: the plan behind them is wrong."""

    def __init__(self, first: Edit, second: Edit) -> None:
        super().__init__(f"edits overlap in {first.path}: {first.why} / {second.why}")
        self.first, self.second = first, second


@dataclass(frozen=True, order=True)
class Edit:
    """Replace bytes [start, end) of a file by `text` (\\n line ends; the file's own are used when written)."""

    path: str
    start: int
    end: int
    text: str
    why: str


@dataclass
class EditSet:
    """Edits of one file, in any order."""

    file: SourceFile
    edits: list[Edit] = field(default_factory=list)

    def add(self, start: int, end: int, text: str, why: str) -> None:
        edit = Edit(self.file.shown, start, end, text, why)
        if edit not in self.edits:
            self.edits.append(edit)

    def ordered(self) -> list[Edit]:
        """By position; raises EditConflict where two overlap. Insertions at one place keep their order."""
        out: list[Edit] = []
        for edit in sorted(map(self._clipped, self.edits), key=lambda e: (e.start, e.end)):
            last = out[-1] if out else None
            if last is not None and edit.start < last.end and not edit.text and not last.text:
                out[-1] = replace(last, end=max(last.end, edit.end))  # two removals are one
            else:
                out.append(edit)
        for a, b in pairwise(out):
            if b.start < a.end:
                raise EditConflict(a, b)
        return out

    def _clipped(self, edit: Edit) -> Edit:
        """A removal that also takes blank lines ends before text that is inserted among them."""
        if edit.text:
            return edit
        inside = [e.start for e in self.edits if e.start == e.end and edit.start < e.start < edit.end]
        blank = [p for p in inside if not self.file.raw[p : edit.end].strip()]
        return replace(edit, end=min(blank)) if blank else edit

    def result(self) -> bytes:
        """The edited bytes."""
        raw, out, pos = self.file.raw, bytearray(), 0
        for edit in self.ordered():
            out += raw[pos : edit.start]
            text = edit.text if self.file.newline == "\n" else edit.text.replace("\n", self.file.newline)
            out += text.encode(self.file.encoding if self.file.encoding != "utf-8-sig" else "utf-8")
            pos = edit.end
        return bytes(out + raw[pos:])

    def touched_lines(self) -> set[int]:
        """1-based lines of the original that an edit touches."""
        starts = self.file.line_starts
        lines: set[int] = set()
        for edit in self.edits:
            first = _line_at(starts, edit.start)
            last = _line_at(starts, max(edit.start, edit.end - 1))
            lines.update(range(first, last + 1))
        return lines


def _line_at(starts: Iterable[int], offset: int) -> int:
    line = 0
    for i, start in enumerate(starts, 1):
        if start > offset:
            break
        line = i
    return line
