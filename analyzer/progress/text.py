"""progress.md as bytes and as lines: encoding, line ends, the fence around a whole file, comments.

People paste the template with its fence, write it by hand in either language, and save it in whatever
encoding the editor had. Reading copes; writing only ever appends, in the file's own encoding and line ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvskill.diagnostics import Diagnostic, InputError, Severity, Span

__all__ = ["ProgressText", "find_progress", "read_progress_text"]

NAMES = ("agentic/progress.md", "progress.md")
_MAX_BYTES = 5_000_000
_FENCE = re.compile(r"^\s{0,3}(`{3,}|~{3,})\s*([\w-]*)\s*$")
_CJK = re.compile(r"[\u4e00-\u9fff]")
MARKER = re.compile(r"<!-- kvskill stage-2 ([0-9a-f]{16}) -->")


@dataclass(frozen=True)
class ProgressText:
    """The file as read. `open_fence` is the fence that is still open at the end (None: closed)."""

    path: Path
    shown: str
    raw: bytes
    encoding: str
    text: str
    open_fence: str | None

    @property
    def newline(self) -> str:
        """The line end most lines use."""
        return "\r\n" if self.raw.count(b"\r\n") * 2 > max(self.raw.count(b"\n"), 1) else "\n"

    @property
    def language(self) -> Literal["zh", "en"]:
        """The language to write in: that of the headings and keys, Chinese for an empty file."""
        body = MARKER.sub("", self.text)
        if not body.strip():
            return "zh"
        return "zh" if _CJK.search(body) else "en"

    def lines(self) -> Iterator[tuple[int, str]]:
        """(line number, text) of what is said: comments, inner fences and our own records are left out."""
        outer = self._outer_fence()
        inner: str | None = None
        comment = False
        headings: int | None = None  # inside one of our own records: headings seen
        for number, line in enumerate(self.text.splitlines(), 1):
            if MARKER.search(line):
                headings = 0
            if headings is not None:
                headings += line.startswith("#")
                if headings <= 2 and (MARKER.search(line) or not line.strip() or line[0] in "#|"):
                    continue
                headings = None
            if number in outer:
                continue
            fence = _FENCE.match(line)
            if inner is not None:
                if fence and fence.group(1).startswith(inner) and not fence.group(2):
                    inner = None
                continue
            if fence:
                inner = fence.group(1)
                continue
            line, comment = _strip_comment(line, comment)
            if line.strip():
                yield number, line

    def _outer_fence(self) -> frozenset[int]:
        """Line numbers of a fence that wraps the whole file (as pasted from a chat), so that its inside is
        read.
        """
        fences = [(n, m) for n, line in enumerate(self.text.splitlines(), 1) if (m := _FENCE.match(line)) is not None]
        if not fences:
            return frozenset()
        first, opening = fences[0]
        before = self.text.splitlines()[: first - 1]
        if len([x for x in before if x.strip()]) > 3 or opening.group(2) not in (
            "",
            "markdown",
            "md",
            "text",
        ):
            return frozenset()
        closing = _closing(fences)
        if closing is None:
            return frozenset({first})
        after = MARKER.split("\n".join(self.text.splitlines()[closing:]))[0]  # our own records do not count
        rest = [x for x in after.splitlines() if x.strip()]
        return frozenset({first, closing}) if closing - first - 1 > len(rest) else frozenset()


def find_progress(model_dir: Path) -> tuple[Path | None, tuple[Path, ...]]:
    """(the file to use, all candidates): `agentic/progress.md` before `progress.md`, links inside the
    folder only.
    """
    real = model_dir.resolve()
    found = []
    for name in NAMES:
        path = model_dir / name
        if path.is_file() and real in path.resolve().parents:
            found.append(path)
    return (found[0] if found else None), tuple(found)


def read_progress_text(path: Path, shown: str) -> ProgressText:
    """Read the file. Raises InputError KV020 when it cannot be read or is no text."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise _unreadable(shown, f"it is larger than {_MAX_BYTES} bytes")
        raw = path.read_bytes()
    except OSError as exc:
        raise _unreadable(shown, exc.strerror or str(exc)) from None
    for encoding in ("utf-8-sig" if raw.startswith(b"\xef\xbb\xbf") else "utf-8", "gb18030"):
        try:
            text = raw.decode(encoding)
        except UnicodeDecodeError:
            continue
        if "\x00" not in text:
            return ProgressText(path, shown, raw, encoding, text, _open_fence(text))
    raise _unreadable(shown, "it is neither UTF-8 nor GB18030 text")


def _closing(fences: list[tuple[int, re.Match[str]]]) -> int | None:
    """Line that closes the first fence. People nest fences of one length: one with a language opens
    another.
    """
    mark, depth = fences[0][1].group(1), 1
    for number, fence in fences[1:]:
        if not fence.group(1).startswith(mark):
            continue
        depth += 1 if fence.group(2) else -1
        if depth == 0:
            return number
    return None


def _open_fence(text: str) -> str | None:
    fences = [(n, m) for n, line in enumerate(text.splitlines(), 1) if (m := _FENCE.match(line)) is not None]
    while fences:
        end = _closing(fences)
        if end is None:
            return fences[0][1].group(1)
        fences = [f for f in fences if f[0] > end]
    return None


def _strip_comment(line: str, inside: bool) -> tuple[str, bool]:
    """The line without HTML comments, and whether a comment stays open."""
    out = ""
    while line:
        if inside:
            end = line.find("-->")
            if end < 0:
                return out, True
            line, inside = line[end + 3 :], False
        else:
            start = line.find("<!--")
            if start < 0:
                return out + line, False
            out, line, inside = out + line[:start], line[start + 4 :], True
    return out, inside


def _unreadable(shown: str, why: str) -> InputError:
    return InputError(
        Diagnostic(
            "KV020",
            Severity.ERROR,
            f"progress.md cannot be read: {why}.",
            "Save it as UTF-8 text, or move it away.",
            Span(shown),
        )
    )
