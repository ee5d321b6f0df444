"""A model with a drafting model (multi-token prediction): both are converted, and drafts change no choice."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvskill.analyzer.run import AnalyzeRequest, analyze
from kvskill.diagnostics import Refusal
from kvskill.embedded import materialise
from kvskill.implementer.apply import ApplyRequest, apply

CASE = "mla_draft"
SOURCE = Path(__file__).resolve().parent / "models" / CASE


def _convert(tmp_path: Path, *edits: tuple[str, str], drafts: int = 1, era: str = "2026-08") -> str:
    tree = materialise(tmp_path / "tree", era, [])
    folder = tree / "models" / CASE
    shutil.copytree(SOURCE / "models" / CASE, folder)
    config = json.loads((SOURCE / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": drafts}))
    path = folder / "models" / f"modeling_{CASE}.py"
    text = path.read_text(encoding="utf-8")
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
    analyze(AnalyzeRequest(model=CASE, repo=tree))
    apply(ApplyRequest(model=CASE, repo=tree, force=True))
    return path.read_text(encoding="utf-8")


def _method(text: str, cls: str, name: str) -> str:
    body = next(c.body for c in ast.parse(text).body if isinstance(c, ast.ClassDef) and c.name == cls)
    return ast.unparse(next(f for f in body if isinstance(f, ast.FunctionDef) and f.name == name))


@pytest.mark.parametrize("cls", ["DraftedForCausalLM", "DraftedMTP"])
def test_hidden_states_go_on_unpicked(tmp_path: Path, cls: str) -> None:
    """The drafting model takes every token's hidden states, not those of the last token."""
    forward = _method(_convert(tmp_path), cls, "forward")
    assert 0 < forward.index("prev_hidden_states = hidden_states") < forward.index("index_select")


@pytest.mark.parametrize("era", ["2026-04", "2026-08"])
def test_layers_of_both_models_are_walked(tmp_path: Path, era: str) -> None:
    text = _convert(tmp_path, era=era)
    for name in ("get_cache_info", "process_weights_after_loading"):
        assert "layers.values()" in _method(text, "DraftedForCausalLM", name), name


def test_without_drafts_in_the_config_the_dict_is_not_expected(tmp_path: Path) -> None:
    assert "layers.values()" not in _method(_convert(tmp_path, drafts=0), "DraftedForCausalLM", "get_cache_info")


def test_drafting_model_of_another_base_is_refused(tmp_path: Path) -> None:
    own = "class DraftedMTP(DraftedForCausalLM):\n"
    hook = "    def process_weights_after_loading(self):\n        self.ready = True\n\n"
    with pytest.raises(Refusal) as caught:
        _convert(tmp_path, (own, own + hook))
    assert "KV223" in {f.code for f in caught.value.findings}


def test_drafts_change_no_choice(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    _convert(tmp_path)
    command = [sys.executable, "-m", "kvskill", "verify", CASE, "--repo", str(tmp_path / "tree"), "--against", "hf"]
    done = subprocess.run([*command, "--fast", "--mtp", "1", "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert max(c["relative"] for c in report["comparisons"]) < 1e-5
    assert all(c["ok"] for c in report["checks"] if c["name"] == "run.greedy")
