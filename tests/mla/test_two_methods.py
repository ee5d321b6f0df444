"""Latent attention with a method per phase, halves of the up projection of the class's own, slots and blocks that the
model manages, and a drafting model: what the conversion writes, and what small changes of the case must change."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvskill.analyzer.run import AnalyzeRequest, analyze
from kvskill.diagnostics import Refusal
from kvskill.embedded import materialise
from kvskill.implementer.apply import Applied, ApplyRequest, apply

CASE = "mla_twin"
SOURCE = Path(__file__).resolve().parent / "models" / CASE


def _convert(tmp_path: Path, *edits: tuple[str, str], era: str = "2026-04") -> tuple[Applied, str]:
    tree = materialise(tmp_path / "tree", era, [])
    folder = tree / "models" / CASE
    shutil.copytree(SOURCE / "models" / CASE, folder)
    shutil.copy(SOURCE / "config.json", folder / "config.json")
    path = folder / "models" / f"modeling_{CASE}.py"
    text = path.read_text(encoding="utf-8")
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
    analyze(AnalyzeRequest(model=CASE, repo=tree))
    try:
        applied = apply(ApplyRequest(model=CASE, repo=tree, force=True))
    except Refusal:
        assert path.read_text(encoding="utf-8") == text
        raise
    return applied, path.read_text(encoding="utf-8")


def _methods(text: str) -> dict[str, ast.FunctionDef]:
    return {
        f"{cls.name}.{item.name}": item
        for cls in ast.parse(text).body
        if isinstance(cls, ast.ClassDef)
        for item in cls.body
        if isinstance(item, ast.FunctionDef)
    }


def _call(func: ast.FunctionDef, name: str) -> dict[str, str]:
    """Keyword arguments of the only call of an operator in a function."""
    found = [
        n
        for n in ast.walk(func)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr.startswith(name)
    ]
    assert len(found) == 1, ast.unparse(func)
    return {k.arg or "**": ast.unparse(k.value) for k in found[0].keywords}


@pytest.mark.parametrize("era", ["2026-04", "2026-08"])
def test_each_phase_keeps_its_method(tmp_path: Path, era: str) -> None:
    _, text = _convert(tmp_path, era=era)
    methods = _methods(text)
    prompts, steps = methods["TwinAttention.prompts"], methods["TwinAttention.steps"]
    early, late = _call(prompts, "npu_fused_infer"), _call(steps, "npu_fused_infer")
    assert (early["input_layout"], late["input_layout"]) == ("'NTD_TND'", "'TND_NTD'")
    assert "block_table" not in early and late["block_table"]
    assert _call(prompts, "npu_kv_rmsnorm")["is_output_kv"] == "True"
    assert _call(steps, "npu_kv_rmsnorm")["is_output_kv"] == "False"
    # the class's own halves and products stay; nothing is split a second time
    assert "self.half_k.transpose(1, 2)" in ast.unparse(prompts) and "split_up_projection" not in text
    assert ast.unparse(steps).count("npu_transpose_batchmatmul") == 2
    assert (
        "self.pages"
        not in text.replace(ast.unparse(methods["TwinAttention.steps_folded"]), "").split("steps_folded")[0]
    )


def test_what_only_fed_the_own_cache_goes(tmp_path: Path) -> None:
    _, text = _convert(tmp_path)
    for gone in ("def init_cache", "def slots_of", "prefill_mini_batch", "mini_batch", "round_no", '"slots": slots'):
        assert gone not in text, gone
    assert '"hidden_states": hidden_states' in text  # the other arguments of the dict stay


def test_rotary_rows_follow_positions_in_both_phases(tmp_path: Path) -> None:
    _, text = _convert(tmp_path)
    rotary = ast.unparse(_methods(text)["TwinRotary.forward"])
    assert rotary.count("index=position_ids.view(-1)") == 2 and "for length" not in rotary
    assert text.count("position_ids=position_ids") >= 2  # both models pass them on


def test_the_head_asks_sizes_of_what_was_picked(tmp_path: Path) -> None:
    _, text = _convert(tmp_path)
    head = _methods(text)["TwinForCausalLM.head"].body
    assert isinstance(head[0], ast.If) and ast.unparse(head[1]) == "rows, width, size = x.shape"


def test_drafting_model_reports_its_layers(tmp_path: Path) -> None:
    _, text = _convert(tmp_path)
    methods = _methods(text)
    assert "layers.values()" in ast.unparse(methods["TwinForCausalLM.get_cache_info"])
    assert "TwinDraft.get_cache_info" not in methods
    assert "position_ids.view(1, -1)" in ast.unparse(methods["TwinDraft.forward"])


def test_modes_that_do_not_run_raise_and_are_named(tmp_path: Path) -> None:
    applied, text = _convert(tmp_path)
    methods = _methods(text)
    for name in ("TwinAttention.steps_folded", "TwinLayer.attend_only", "TwinModel.forward_overlapped"):
        body = methods[name].body
        first = body[1] if isinstance(body[0], ast.Expr) else body[0]
        assert isinstance(first, ast.Raise), name
        assert any(f.code == "KV221" and name in f.fact for f in applied.findings), name
    assert any(f.code == "KV222" for f in applied.findings)


OWN_HOOK = """        self.rotary = TwinRotary(config)

    def process_weights_after_loading(self):
        super().process_weights_after_loading()
"""
CHUNKED = "        x = torch.cat(done, dim=0)\n        return x.view(bsz, q_len, width)"
WIDTH = "        bsz, q_len, width = x.shape\n"
WRITE = '            epsilon=self.norm_kv.variance_epsilon, cache_mode="PA_NZ",\n'
EXTRA = "        x = x * self.infer_config.scheduler_config.prefill_mini_batch\n"
PERM = "perm_x1=(1, 0, 2), perm_x2=(0, 1, 2), perm_y=(1, 0, 2)"


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("self.parts(bsz * q_len, x.view", "self.parts(q_len, x.view", "KV213"),
        (WIDTH, WIDTH + "        x = x if bsz > 3 else x * 1\n", "KV213"),
        (CHUNKED, "        return done[0] if len(done) == 1 else torch.cat(done)", "KV207"),
        ("        return self.lm_head(x).reshape", EXTRA + "        return self.lm_head(x).reshape", "KV067"),
        ("index=where.view(-1)", "index=where.view(-1) * 1", "KV215"),
        (WRITE, WRITE[:-1] + " c_kv_scale=self.norm_kv.weight,\n", "KV298"),
        ("        self.rotary = TwinRotary(config)\n\n    def slots_of", OWN_HOOK + "\n    def slots_of", "KV223"),
        (PERM, PERM.replace("perm_x1=(1, 0, 2)", "perm_x1=(0, 1, 2)"), "KV263"),
    ],
)
def test_what_is_not_certain_is_refused(tmp_path: Path, old: str, new: str, code: str) -> None:
    with pytest.raises(Refusal) as caught:
        _convert(tmp_path, (old, new))
    assert code in {f.code for f in caught.value.findings}, [str(f) for f in caught.value.findings]


def _verify(tree: Path, *extra: str) -> dict[str, Any]:
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "kvskill", "verify", CASE, "--repo", str(tree), "--fast", "--json", *extra]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout))


def test_agrees_with_transformers_while_drafting(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    _convert(tmp_path, era="2026-08")
    report = _verify(tmp_path / "tree", "--against", "hf", "--mtp", "2")
    assert max(c["relative"] for c in report["comparisons"]) < 1e-5
    checks = {c["name"]: c for c in report["checks"]}
    assert checks["run.greedy"]["ok"] and checks["init.cache-info"]["text"].startswith("3 layers, 6 entries")


def test_agrees_with_its_padded_form(tmp_path: Path) -> None:
    _convert(tmp_path)
    before = materialise(tmp_path / "before", "2026-03", [])
    shutil.copytree(SOURCE / "models" / CASE, before / "models" / CASE)
    shutil.copy(SOURCE / "config.json", before / "models" / CASE / "config.json")
    report = _verify(tmp_path / "tree", "--before-repo", str(before), "--against", "legacy", "--prompts", "5,3,17")
    assert {c["oracle"] for c in report["comparisons"]} == {"Legacy"}
    assert max(c["relative"] for c in report["comparisons"]) < 1e-5
