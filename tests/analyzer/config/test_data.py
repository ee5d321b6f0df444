"""The data files behind config understanding hold together."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvskill.analyzer.config import rules as rules_module
from kvskill.analyzer.config import understand
from kvskill.analyzer.config.rules import class_info, rules
from kvskill.diagnostics import KvskillError

DATA = files("kvskill") / "data"
DEFAULTS = json.loads((DATA / "class_defaults.json").read_text(encoding="utf-8"))
FACTS = yaml.safe_load((DATA / "class_facts.yaml").read_text(encoding="utf-8"))["classes"]


def test_defaults_name_their_source_and_stay_small() -> None:
    assert re.fullmatch(r"transformers \d+\.\d+\.\d+.*", DEFAULTS["source"])
    assert len((DATA / "class_defaults.json").read_bytes()) < 200_000
    assert len(DEFAULTS["classes"]) > 300


def test_facts_stand_on_a_class_or_name_a_source() -> None:
    for name, row in FACTS.items():
        known = name in DEFAULTS["classes"] or name in DEFAULTS["other"]
        assert known or row.get("source"), f"{name} is in no transformers class and names no source"
        if "like" in row:
            assert row["like"] in DEFAULTS["classes"] or row["like"] in FACTS, name


def test_kinds_in_rules_are_known() -> None:
    known = set(rules()["layer_words"])
    for name, row in FACTS.items():
        spec = row.get("layers", {})
        used = [
            spec.get(k)
            for k in ("all", "hit", "miss", "one", "zero", "listed_kind", "other", "kind", "last", "ensure_last")
        ]
        used += list(spec.get("cycle", [])) + list(spec.get("first", [])) + [b[0] for b in spec.get("blocks", [])]
        assert {u for u in used if u is not None} <= known, name


@pytest.mark.parametrize("name", sorted(DEFAULTS["classes"]))
def test_a_class_alone_gives_an_answer_or_one_finding(name: str) -> None:
    try:
        facts = understand({"model_type": name}, shown="config.json")
    except KvskillError as exc:
        assert len(exc.findings) == 1
        return
    assert facts.layers and facts.verdict.reason
    assert class_info(name).known


def test_no_fact_is_dead() -> None:
    """Every field of class_facts.yaml is read somewhere, and so is every table of config_rules.yaml."""
    folder = Path(rules_module.__file__).parent
    code = "".join(p.read_text(encoding="utf-8") for p in folder.glob("*.py"))
    fields = {k for row in FACTS.values() for k in row} | {k for row in FACTS.values() for k in row.get("layers", {})}
    dead = [k for k in sorted(fields | set(rules())) if not re.search(rf"[\"']{k}[\"']", code) and k != "source"]
    assert dead == []


def test_unknown_types_are_unknown() -> None:
    info: Any = class_info("no_such_model")
    assert not info.known and not info.defaults and class_info(None).model_type is None
