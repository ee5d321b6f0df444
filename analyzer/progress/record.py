"""Append the stage-2 decision table to progress.md: append only, atomic, in the file's language and encoding.

The bytes before stay as they are. A marker with a digest of the table makes the append idempotent: nothing is
written while the last recorded table still says the same.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvskill.analyzer.progress.text import MARKER, ProgressText, read_progress_text
from kvskill.diagnostics import Diagnostic, InputError, Severity, Span

__all__ = ["Record", "record_decisions"]

# (what, choice, reason) in one language
Row = tuple[str, str, str]
_HEAD = {
    "zh": ("## 阶段 2：KVCache 优化", "### 关键决策", ("决策项", "选择", "理由")),
    "en": ("## Stage 2: KV cache optimization", "### Key decisions", ("Decision", "Choice", "Reason")),
}


@dataclass(frozen=True)
class Record:
    """What happened: `written` False means that the file already says it (or that it was only previewed)."""

    path: Path
    shown: str
    text: str
    written: bool


def record_decisions(
    path: Path,
    shown: str,
    rows: Mapping[Literal["zh", "en"], Sequence[Row]],
    *,
    root: Path,
    dry_run: bool = False,
) -> Record:
    """Append the table to `path` (created when missing).

    Raises InputError: KV020 unreadable, KV023 the file is a link out of `root`, cannot be written, or
    changed meanwhile.
    """
    if path.is_symlink() and root.resolve() not in path.resolve().parents:
        raise _refused(shown, "it is a link that leaves the model folder")
    if path.exists():
        text = read_progress_text(path, shown)
    else:
        text = ProgressText(path, shown, b"", "utf-8", "", None)
    table = _table(text, rows[text.language])
    digest = hashlib.sha256(table.encode()).hexdigest()[:16]
    markers = MARKER.findall(text.text)
    if markers and markers[-1] == digest:
        return Record(path, shown, "", False)
    addition = _joined(text, table, digest)
    if not dry_run:
        _append(path.resolve() if path.is_symlink() else path, shown, text, addition)
    return Record(path, shown, addition, not dry_run)


def _table(text: ProgressText, rows: Sequence[Row]) -> str:
    heading, sub, titles = _HEAD[text.language]
    lines = [heading, "", sub, "", _row(titles), "|" + "|".join(["------"] * 3) + "|"]
    lines.extend(_row(r) for r in rows)
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(c.split()).replace("|", "\\|") for c in cells) + " |"


def _joined(text: ProgressText, table: str, digest: str) -> str:
    """The addition, with what is needed so that it starts on its own line and outside an open fence."""
    lead = "" if not text.text or text.text.endswith(("\n", "\r")) else "\n"
    if text.open_fence:
        lead += f"{text.open_fence}\n"
    gap = "\n" if text.text.strip() else ""
    body = f"{lead}{gap}<!-- kvskill stage-2 {digest} -->\n{table}"
    return body.replace("\n", text.newline)


def _append(path: Path, shown: str, before: ProgressText, addition: str) -> None:
    """Write old bytes + addition to a temporary file beside it and rename."""
    encoding = "utf-8" if before.encoding == "utf-8-sig" else before.encoding
    try:
        added = addition.encode(encoding)
        path.parent.mkdir(parents=True, exist_ok=True)
        if before.raw and path.read_bytes() != before.raw:
            raise _refused(shown, "it changed while it was analyzed")
        handle, name = tempfile.mkstemp(prefix=".progress-", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as out:
                out.write(before.raw + added)
                out.flush()
                os.fsync(out.fileno())
            Path(name).chmod(path.stat().st_mode & 0o777 if path.exists() else 0o644)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as exc:
        raise _refused(shown, exc.strerror or str(exc)) from None


def _refused(shown: str, why: str) -> InputError:
    return InputError(
        Diagnostic(
            "KV023",
            Severity.ERROR,
            f"The decisions cannot be appended to progress.md: {why}.",
            "Check the file, then run `kvskill analyze --record` again.",
            Span(shown),
        )
    )
