"""Layer patterns in few characters: `(SSSF)x15` instead of sixty letters."""

from __future__ import annotations

__all__ = ["compact"]


def compact(pattern: str) -> str:
    """The shortest run-length form over one repeating unit: `FFFF` -> `F x4`, `SFSFS` -> `(SF)x2 S`."""
    if len(pattern) < 4:
        return pattern
    best = _runs(pattern)
    for size in range(1, min(len(pattern) // 2, 16) + 1):
        unit = pattern[:size]
        times = 1
        while pattern.startswith(unit, times * size):
            times += 1
        rest = pattern[times * size :]
        if times < 2:
            continue
        head = f"{unit} x{times}" if size == 1 else f"({unit})x{times}"
        form = f"{head} {compact(rest)}" if rest else head
        if len(form) < len(best):
            best = form
    return best


def _runs(pattern: str) -> str:
    parts: list[str] = []
    start = 0
    for i in range(1, len(pattern) + 1):
        if i == len(pattern) or pattern[i] != pattern[start]:
            count = i - start
            parts.append(f"{pattern[start]} x{count}" if count > 3 else pattern[start] * count)
            start = i
    return " ".join(parts)
