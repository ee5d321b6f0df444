"""Which torch_npu releases the target may run, and which operators they register.

Operators follow the release train, not the torch minor: torch_npu 2.6.0 has no FA v2 while 2.6.0.post3 has.
So a torch pin stands for a set of releases, and an answer that differs inside the set is no answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

from kvskill.analyzer.data import load_json

__all__ = [
    "FA_V1",
    "FA_V2",
    "KV_RMSNORM_V2",
    "Mention",
    "has_operator",
    "known_releases",
    "read_mentions",
    "select",
    "version_key",
]

FA_V1 = "npu_fused_infer_attention_score"
FA_V2 = "npu_fused_infer_attention_score_v2"
KV_RMSNORM_V2 = "npu_kv_rmsnorm_rope_cache_v2"

_VERSION = r"\d+\.\d+(?:\.\d+)?(?:\.?(?:rc|alpha|beta|a|b)[-.]?\d+)?(?:\.post\d+)?"
_WHEEL = re.compile(rf"torch[_-]npu-({_VERSION})(?:\+[\w.]+)?-(?:cp|py|pp)\d")
_SPEC = re.compile(
    rf"(?<![\w-])(?P<name>torch[_-]npu|(?:py)?torch)\s*(?:\[[\w,\s]*\])?\s*"
    rf"(?P<spec>(?:(?:===|==|~=|!=|>=|<=|>|<)\s*{_VERSION}(?:\+[\w.]+|\.\*)?\s*,?\s*)+)"
)
_ONE_SPEC = re.compile(rf"(===|==|~=|!=|>=|<=|>|<)\s*({_VERSION})(?:\+[\w.]+)?(\.\*)?")
# "torch_npu 2.8.0", "| torch_npu | v26.0.0 |", "Ascend Extension for PyTorch版本为`v26.0.0`": close by.
_PROSE_NPU = re.compile(
    rf"(?:torch[_-]npu|Ascend Extension for PyTorch)[^0-9\n。.；;，,]{{0,24}}?"
    rf"\bv?({_VERSION})(?![\w-]*\.whl)",
    re.IGNORECASE,
)
_PROSE_TORCH = re.compile(
    rf"(?<!for )(?<![\w-])(?:PyTorch|torch)(?![A-Za-z_-])[^0-9\n。.；;，,]{{0,12}}?\bv?({_VERSION})",
    re.IGNORECASE,
)
Kind = Literal["option", "installed", "pin", "wheel", "prose"]


@dataclass(frozen=True)
class Mention:
    """A place that names releases: the candidates it allows; `exact` when it names one."""

    kind: Kind
    releases: tuple[str, ...]
    ref: str
    text: str
    exact: bool = False


def version_key(text: str) -> tuple[tuple[int, ...], int, int]:
    """Sort key: (release numbers, phase, number). Phase: -1 pre-release, 0 final, 1 post."""
    numbers = re.match(r"\d+(?:\.\d+)*", text)
    release = tuple(int(x) for x in numbers.group().split(".")) if numbers else ()
    release = release + (0,) * (3 - len(release))
    post = re.search(r"\.?post(\d+)", text)
    if post:
        return release, 1, int(post.group(1))
    pre = re.search(r"(?:rc|alpha|beta|a|b)[-.]?(\d+)", text)
    return (release, -1, int(pre.group(1))) if pre else (release, 0, 0)


@cache
def known_releases() -> tuple[str, ...]:
    """Every release of the table, oldest first."""
    return tuple(sorted(load_json("op_availability.json")["releases"], key=version_key))


def has_operator(release: str, operator: str) -> bool | None:
    """Whether a release registers an operator; None when the table cannot say.

    A release that the table lacks is judged by its neighbours of the same torch line: between two that
    agree, or after one that has the operator (no listed operator ever disappeared). Anything else stays
    unknown.
    """
    table = load_json("op_availability.json")
    if operator not in table["operators"]:
        return None
    if release in table["releases"]:
        return operator in table["trains"][table["releases"][release]]["operators"]
    key = version_key(release)
    line = [r for r in known_releases() if version_key(r)[0] == key[0]]
    below = [r for r in line if version_key(r) < key]
    above = [r for r in line if version_key(r) > key]
    before = has_operator(below[-1], operator) if below else None
    after = has_operator(above[0], operator) if above else None
    if before or (before is not None and before == after):
        return before
    newest = version_key(known_releases()[-1])
    if not line and key > newest and key[0][0] == newest[0][0]:
        return True if has_operator(known_releases()[-1], operator) else None
    return None


def select(specifier: str) -> tuple[str, ...]:
    """Known releases that a requirement specifier of torch_npu allows (`==2.6.0` means that release only)."""
    parts = _ONE_SPEC.findall(specifier)
    return tuple(r for r in known_releases() if parts and all(_allows(r, *s) for s in parts))


def _allows(release: str, op: str, wanted: str, star: str) -> bool:
    have, want = version_key(release), version_key(wanted)
    if star or op == "~=":
        depth = len(re.match(r"\d+(?:\.\d+)*", wanted).group().split("."))  # type: ignore[union-attr]
        same = have[0][: depth if star else depth - 1] == want[0][: depth if star else depth - 1]
        if op == "!=":
            return not same
        return same and (bool(star) or have >= want)
    if op in ("==", "==="):
        return have == want
    return {
        "!=": have != want,
        ">=": have >= want,
        "<=": have <= want,
        ">": have > want,
        "<": have < want,
    }[op]


def _torch_line(specifier: str) -> tuple[str, ...]:
    """Known releases whose torch version a torch specifier allows: the post number is torch_npu's own."""
    return tuple(
        r
        for r in known_releases()
        if all(_allows(".".join(map(str, version_key(r)[0])), *s) for s in _ONE_SPEC.findall(specifier))
    )


def _named(version: str) -> tuple[tuple[str, ...], bool]:
    """Releases that a bare version in prose stands for: a train, a torch line, or one release."""
    trains = load_json("op_availability.json")["trains"]
    of = load_json("op_availability.json")["releases"]
    if version in trains:
        return tuple(r for r in known_releases() if of[r] == version), False
    release, phase, _ = version_key(version)
    if release[0] != 2:
        return (), False
    if phase:
        return (version,), True
    return tuple(r for r in known_releases() if version_key(r)[0] == release) or (version,), False


def read_mentions(text: str, ref: str, *, pins: bool) -> list[Mention]:
    """Every place of a text that names torch_npu releases. `pins` says that the file installs what it
    names.
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{ref}:{number}"
        for m in _WHEEL.finditer(line):
            found.append(Mention("pin" if pins else "wheel", (m.group(1),), where, m.group(0), exact=True))
        comment = pins and line.lstrip().startswith("#")
        if pins and not comment:
            found.extend(_pin_mentions(line, where))
            continue
        if _SPEC.search(line):
            found.extend(_pin_mentions(line, where, "wheel"))
        elif "torch" in line.lower() or "Ascend Extension" in line:
            found.extend(_prose_mentions(line, where))
    return found


def _pin_mentions(line: str, where: str, kind: Kind = "pin") -> list[Mention]:
    found = []
    for m in _SPEC.finditer(line):
        spec = m.group("spec")
        if "npu" not in m.group("name"):
            releases: tuple[str, ...] = _torch_line(spec)
            exact = False
            kind = "prose" if kind == "wheel" else kind
        else:
            releases = select(spec)
            one = re.fullmatch(rf"\s*={{2,3}}\s*({_VERSION})\s*,?\s*", spec)
            exact = one is not None
            if one and not releases:
                releases = (one.group(1),)
        if releases:
            found.append(Mention(kind, releases, where, m.group(0).strip().rstrip(","), exact))
    return found


def _prose_mentions(line: str, where: str) -> list[Mention]:
    found = []
    for pattern in (_PROSE_NPU, _PROSE_TORCH):
        for m in pattern.finditer(line):
            releases, exact = _named(m.group(1))
            if releases and (pattern is _PROSE_NPU or not exact):
                found.append(Mention("prose", releases, where, m.group(0).strip(), exact))
    return found
