"""Latent attention: what is recognised, what is written, and what is refused. Small changes of the cases must change
the answer: an order of the rope part that the fused operator does not have, a norm that is not plain, a bias."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from kvskill.analyzer.run import AnalyzeRequest, analyze
from kvskill.diagnostics import Refusal
from kvskill.embedded import materialise
from kvskill.implementer.apply import Applied, ApplyRequest, apply
from kvskill.manifest import MANIFEST_NAME

CASES = Path(__file__).resolve().parents[1] / "cases"
MODELS = Path(__file__).resolve().parent / "models"  # Legacy forms that need the verifier's operators to run
V3 = "deepseek_v3"


def _tree(tmp_path: Path, case: str, era: str, *edits: tuple[str, str]) -> Path:
    tree = materialise(tmp_path / "tree", era, [])
    folder = tree / "models" / case
    source = next(root / case for root in (CASES, MODELS) if (root / case).exists())
    shutil.copytree(source / "models" / case, folder)
    shutil.copy(source / "config.json", folder / "config.json")
    path = folder / "models" / f"modeling_{case}.py"
    text = path.read_text(encoding="utf-8")
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
    return tree


def _convert(tree: Path, case: str, **overrides: str) -> tuple[Applied, str]:
    analyze(AnalyzeRequest(model=case, repo=tree))
    manifest = tree / "models" / case / MANIFEST_NAME
    text = manifest.read_text(encoding="utf-8")
    for key, value in overrides.items():
        text = text.replace(f"{key}: null", f"{key}: {value}")
    manifest.write_text(text, encoding="utf-8")
    analyze(AnalyzeRequest(model=case, repo=tree))
    applied = apply(ApplyRequest(model=case, repo=tree, force=True))
    return applied, (tree / "models" / case / "models" / f"modeling_{case}.py").read_text(encoding="utf-8")


def _codes(applied: Applied) -> set[str]:
    return {f.code for f in applied.findings}


@pytest.mark.parametrize("case", [V3, "deepseek_v2", "kimi", "longcat", "mla_blocks"])
@pytest.mark.parametrize("era", ["2026-04", "2026-08"])
def test_cases_convert(tmp_path: Path, case: str, era: str) -> None:
    tree = _tree(tmp_path, case, era)
    applied, text = _convert(tree, case)
    assert applied.status == "converted"
    module = ast.parse(text)
    calls = [n for n in ast.walk(module) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    attends = [c for c in calls if c.func.attr.startswith("npu_fused_infer")]  # type: ignore[union-attr]
    given = [{k.arg: ast.unparse(k.value) for k in c.keywords} for c in attends]
    assert [g["input_layout"] for g in given] == ["'NTD_TND'", "'TND_NTD'"]
    prefill, decode = given
    assert prefill["softmax_scale"] == decode["softmax_scale"]
    assert decode["num_key_value_heads"] == "1" and prefill["num_key_value_heads"] == prefill["num_query_heads"]
    assert decode["sparse_mode"].startswith("3 if") and decode["atten_mask"].endswith("else None")
    entries = [c for c in ast.walk(module) if isinstance(c, ast.Call) and ast.unparse(c.func) == "CacheEntry"]
    assert [ast.literal_eval(k.value) for e in entries for k in e.keywords if k.arg == "num_head"] == [1, 1]
    info = next(c for c in ast.walk(module) if isinstance(c, ast.Call) and ast.unparse(c.func) == "ModelCacheInfo")
    assert ("is_mla_backend" in {k.arg for k in info.keywords}) is (era == "2026-08")
    for gone in (
        "scatter_update_(",
        ".k_cache",
        ".v_cache",
        ".cache_unit",
        "def init_cache",
        ".latent_cache",
        "self.block_table",
    ):
        assert gone not in text, gone
    again = apply(ApplyRequest(model=case, repo=tree))
    assert again.status == "nothing-to-do"


@pytest.mark.parametrize(
    ("case", "fused"), [(name, name != "deepseek_v2") for name in (V3, "kimi", "longcat", "mla_blocks", "deepseek_v2")]
)
def test_write_and_view_are_paired(tmp_path: Path, case: str, fused: bool) -> None:
    """NZ is written and read as 5-D, ND as 3-D; complex rope keeps its own order and the ND cache."""
    applied, text = _convert(_tree(tmp_path, case, "2026-08"), case)
    assert ('cache_mode="PA_NZ"' in text) is fused
    assert ("// 16, paged_block_size, 16)" in text) is fused
    assert ("npu_scatter_nd_update_" in text) is not fused
    assert ("KV279" in _codes(applied)) is not fused


def test_nd_on_request(tmp_path: Path) -> None:
    _, text = _convert(_tree(tmp_path, V3, "2026-08"), V3, mla_cache="nd")
    assert "kv_rmsnorm_rope_cache" not in text
    assert "self.nope_cache.view(*self.nope_cache.shape[:2], -1)" in text


def test_epsilon_is_the_norms_own(tmp_path: Path) -> None:
    _, text = _convert(_tree(tmp_path, V3, "2026-08"), V3)
    assert "epsilon=self.kv_a_layernorm.variance_epsilon" in text


PAIRS = "    k = k.view(b, h, s, d // 2, 2).transpose(4, 3).reshape(b, h, s, d)\n"
QUERY_PAIRS = PAIRS.replace("k = k", "q = q")


@pytest.mark.parametrize(
    ("edits", "why"),
    [
        (((PAIRS, ""), (QUERY_PAIRS, "")), "interleaved pairs"),
        (((PAIRS, ""),), "interleaved pairs"),
        (((QUERY_PAIRS, ""),), "interleaved pairs"),
        ((("torch.cat((-x2, x1), dim=-1)", "torch.cat((x2, -x1), dim=-1)"),), "interleaved pairs"),
        ((("return self.weight * hid", "return (1 + self.weight) * hid"),), "plain"),
        (
            (
                (
                    "        variance = hid",
                    "        hidden_states = hidden_states - hidden_states.mean(-1, keepdim=True)\n"
                    "        variance = hid",
                ),
            ),
            "plain",
        ),
        ((("emb = torch.cat((freqs, freqs), dim=-1)", "emb = torch.repeat_interleave(freqs, 2, dim=-1)"),), "table"),
    ],
)
def test_other_forms_do_not_use_the_fused_write(tmp_path: Path, edits: tuple[tuple[str, str], ...], why: str) -> None:
    """With its own code kept, the conversion is right whatever the order is; with the fused operator it is not."""
    applied, text = _convert(_tree(tmp_path, V3, "2026-08", *edits), V3)
    assert "kv_rmsnorm_rope_cache" not in text
    assert any(f.code == "KV279" and why in f.fact for f in applied.findings), [f.fact for f in applied.findings]


@pytest.mark.parametrize(
    ("case", "edits", "code"),
    [
        (
            V3,
            (
                (
                    "(self.qk_nope_head_dim + self.v_head_dim), bias=False)",
                    "(self.qk_nope_head_dim + self.v_head_dim), bias=True)",
                ),
            ),
            "KV289",
        ),
        (
            V3,
            (
                (
                    "        for layer in self.model.layers:\n            attn =",
                    "        self.steps = 0\n        for layer in self.model.layers:\n            attn =",
                ),
            ),
            "KV275",
        ),
        (
            V3,
            (
                (
                    "        bsz, q_len, _ = hidden_states.size()\n",
                    "        bsz, q_len, _ = hidden_states.size()\n        self.seen = self.k_cache.numel()\n",
                ),
            ),
            "KV276",
        ),
        (
            V3,
            (
                (
                    "        self.k_cache = torch.Tensor([])\n",
                    "        self.k_cache = torch.Tensor([])\n        self.absorbed_k = 3\n",
                ),
            ),
            "KV294",
        ),
        (
            V3,
            (
                (
                    "k_nope, value_states = torch.split(kv, [self.qk_nope_head_dim, self.v_head_dim], dim=-1)",
                    "value_states, k_nope = torch.split(kv, [self.v_head_dim, self.qk_nope_head_dim], dim=-1)",
                ),
            ),
            "KV270",
        ),
    ],
)
def test_what_is_not_certain_is_refused(
    tmp_path: Path, case: str, edits: tuple[tuple[str, str], ...], code: str
) -> None:
    tree = _tree(tmp_path, case, "2026-08", *edits)
    path = tree / "models" / case / "models" / f"modeling_{case}.py"
    before = path.read_bytes()
    with pytest.raises(Refusal) as caught:
        _convert(tree, case)
    assert code in {f.code for f in caught.value.findings}
    assert path.read_bytes() == before


def test_attention_in_both_directions_is_refused(tmp_path: Path) -> None:
    edit = ("            mask = forward_metadata.attention_mask[:q_len, :q_len]\n", "            mask = None\n")
    with pytest.raises(Refusal) as caught:
        _convert(_tree(tmp_path, V3, "2026-08", edit), V3)
    assert "KV299" in {f.code for f in caught.value.findings}


def test_nz_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal) as caught:
        _convert(_tree(tmp_path, "deepseek_v2", "2026-08"), "deepseek_v2", mla_cache="nz")
    assert "KV278" in {f.code for f in caught.value.findings}


def test_sizes_the_operator_does_not_take_stay_legacy(tmp_path: Path) -> None:
    tree = _tree(tmp_path, "minicpm3", "2026-08")
    result = analyze(AnalyzeRequest(model="minicpm3", repo=tree))
    assert result.manifest.kv_mode.value == "legacy"
    assert apply(ApplyRequest(model="minicpm3", repo=tree)).status == "legacy-kept"


def test_own_fused_write_has_no_nd_form(tmp_path: Path) -> None:
    """Norm and rotary are inside the operator; without it there is nothing to write from."""
    with pytest.raises(Refusal) as caught:
        _convert(_tree(tmp_path, "mla_blocks", "2026-08"), "mla_blocks", mla_cache="nd")
    assert "KV278" in {f.code for f in caught.value.findings}


def test_own_quantised_write_is_refused(tmp_path: Path) -> None:
    scale = '            cache_mode="PA_NZ",\n'
    edit = (scale, scale + "            c_kv_scale=self.kv_a_layernorm.weight,\n")
    with pytest.raises(Refusal) as caught:
        _convert(_tree(tmp_path, "mla_blocks", "2026-08", edit), "mla_blocks")
    assert "KV298" in {f.code for f in caught.value.findings}
