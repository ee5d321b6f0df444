"""Every diagnostic code has a page, every page a code, and the pages have one form."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvskill.opsinfo import reference_data

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "references/rules"
REGISTRY = reference_data("rules/registry")
SECTIONS = ["What it does", "Why is this bad?", "Example", "Use instead", "What to do"]


def test_codes_and_pages_match() -> None:
    pages = {p.stem for p in RULES.glob("KV*.md")}
    assert sorted(set(REGISTRY) - pages) == []
    assert sorted(pages - set(REGISTRY)) == []


def test_names_are_unique_and_speak() -> None:
    names = [row["name"] for row in REGISTRY.values()]
    assert len(set(names)) == len(names)
    for code, row in REGISTRY.items():
        assert re.fullmatch(r"KV\d{3}", code) and set(row) == {"name", "summary"}
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", row["name"]) and row["summary"].rstrip().endswith(".")


@pytest.mark.parametrize("page", sorted(RULES.glob("KV*.md")), ids=lambda p: p.stem)
def test_page_form(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# {REGISTRY[page.stem]['name']} ({page.stem})\n")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == SECTIONS
    for section in SECTIONS:
        body = text.split(f"## {section}\n")[1].split("\n## ")[0].strip()
        assert body, section


def test_codes_used_in_the_source_are_registered() -> None:
    used = set()
    for folder in ("src/kvskill", "analyzer", "implementer"):
        for path in (ROOT / folder).rglob("*.py"):
            if "embedded" not in path.parts:
                used |= set(re.findall(r"\"(KV\d{3})\"", path.read_text(encoding="utf-8")))
    assert len(used) > 20
    assert sorted(used - set(REGISTRY)) == []
