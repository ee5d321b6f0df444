"""The two READMEs say the same, and what they name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvskill.cli import COMMANDS
from kvskill.diagnostics import ExitCode

ROOT = Path(__file__).resolve().parents[2]
ENGLISH, CHINESE = (ROOT / name for name in ("README.md", "README.zh-CN.md"))


def blocks(path: Path) -> list[list[str]]:
    """Fenced code blocks, comments cut off."""
    text = path.read_text(encoding="utf-8")
    found = re.findall(r"```\w*\n(.*?)```", text, flags=re.S)
    return [[line.split("  #")[0].rstrip() for line in block.splitlines()] for block in found]


def headings(path: Path) -> list[int]:
    """Depths of the headings, in order."""
    return [len(m) for m in re.findall(r"^(#+) ", path.read_text(encoding="utf-8"), flags=re.M)]


def test_both_languages_have_the_same_sections_and_the_same_code() -> None:
    assert headings(ENGLISH) == headings(CHINESE)
    assert blocks(ENGLISH) == blocks(CHINESE)


@pytest.mark.parametrize("path", [ENGLISH, CHINESE], ids=["en", "zh"])
def test_commands_and_targets_named_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    code = "\n".join(line for block in blocks(path) for line in block)
    for name in re.findall(r"`kvskill ([a-z]+)", text) + re.findall(r"^kvskill ([a-z]+)", code, flags=re.M):
        assert name in COMMANDS, name
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`make ([a-z]+)", text) + re.findall(r"^make ([a-z]+)", code, flags=re.M):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target
    for name in re.findall(r"`((?:docs|scripts)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("path", [ENGLISH, CHINESE], ids=["en", "zh"])
def test_the_exit_code_table_is_complete(path: Path) -> None:
    rows = re.findall(r"^\| (\d+) \|", path.read_text(encoding="utf-8"), flags=re.M)
    assert [int(row) for row in rows] == [int(code) for code in ExitCode]


@pytest.mark.parametrize("path", [ENGLISH, CHINESE], ids=["en", "zh"])
def test_the_evidence_table_has_its_markers_and_says_what_did_not_run(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    begin, end = text.index("<!-- evidence:begin -->"), text.index("<!-- evidence:end -->")
    assert begin < end
    assert re.search(r"not run|未运行", text[begin:end])


def test_no_machine_paths_or_package_hosts_in_tracked_text() -> None:
    banned = re.compile(r"/home/\w+/|/root/|/tmp/\w+/\w+/|pypi\.org|files\.pythonhosted|mirrors?\.\w+\.\w+")
    hits = []
    for path in [ENGLISH, CHINESE, ROOT / "Makefile", ROOT / "pyproject.toml", *ROOT.glob("docs/*.md")]:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if banned.search(line):
                hits.append(f"{path.name}:{number}: {line}")
    assert hits == []
