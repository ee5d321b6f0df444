"""The main job on real input: Legacy files of the framework's history become paged, and agree."""

from __future__ import annotations

import ast
import io
import json
import shutil
import tokenize
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[2]
QWEN = "models/qwen3_moe/models/modeling_qwen3_moe.py"
DENSE = HERE / "src/kvskill/embedded/models/tiny_dense"
MOE_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "vocab_size": 151936,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 48,
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "moe_intermediate_size": 768,
    "intermediate_size": 6144, "decoder_sparse_step": 1, "mlp_only_layers": [], "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "max_position_embeddings": 40960, "attention_bias": False, "hidden_act": "silu",
    "pad_token_id": 0, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # the published shape of a 30B-A3B model; the verifier shrinks what may be shrunk


def worst(report: dict[str, Any]) -> str:
    """The largest relative difference of a report, with the oracles that ran."""
    figures = [c["relative"] for c in report["comparisons"]]
    assert figures, "nothing was compared"
    return f"{'+'.join(sorted({c['oracle'] for c in report['comparisons']}))} {max(figures):.1e}"


def legacy_tree(context: Any) -> Path:
    """Tree 0296d00 with the Legacy modeling file of 82ac5cb (2-D era)."""
    tree: Path = context.copy("0296d00", "qwen3_moe")
    (tree / QWEN).write_bytes(context.file("82ac5cb", QWEN))
    (tree / "config.json").write_text(json.dumps(MOE_CONFIG))
    return tree


def convert(context: Any, tree: Path, model: str, *config: Any) -> None:
    """analyze and apply, both exit 0."""
    context.kvskill("analyze", model, "--repo", tree, *config)
    context.kvskill("apply", model, "--repo", tree)


def input_a(context: Any) -> str:
    """qwen3_moe of the 2-D era: prompts 5,1,3,17, block 16, 24 steps, two waves, HF and its own before-tree."""
    tree = legacy_tree(context)
    convert(context, tree, "qwen3_moe", "--config", tree / "config.json")
    report = context.verify(
        "qwen3_moe", "--repo", tree, "--before-repo", context.tree("82ac5cb", "qwen3_moe"),
        "--prompts", "5,1,3,17", "--block-size", 16, "--decode-steps", 24,
    )
    again = context.kvskill("apply", "qwen3_moe", "--repo", tree)
    assert "nothing to do" in again.stdout, again.stdout
    return worst(report)


def input_b(commit: str) -> Any:
    def line(context: Any) -> str:
        wanted = context.newest() if commit == "newest" else commit
        tree: Path = context.copy(wanted)
        shutil.copytree(DENSE, tree / "models" / "tiny_dense")
        config = next((tree / "models" / "tiny_dense").rglob("config.json"))
        convert(context, tree, "tiny_dense", "--config", config)
        report = context.verify("tiny_dense", "--repo", tree)
        assert "nothing to do" in context.kvskill("apply", "tiny_dense", "--repo", tree).stdout
        return worst(report)

    return line


def ambiguous(context: Any) -> str:
    """One changed line of the attention: exit 3, nothing written, one finding that names the line."""
    tree = legacy_tree(context)
    path = tree / QWEN
    text = path.read_text(encoding="utf-8")
    mark = "        torch_npu.scatter_update_(v_cache, kv_len, value_states, -2)\n"
    assert text.count(mark) == 1
    path.write_text(text.replace(mark, mark.replace("value_states", "value_states * 0.5")), encoding="utf-8")
    before = path.read_bytes()
    context.kvskill("analyze", "qwen3_moe", "--repo", tree, "--config", tree / "config.json", expect=3)
    done = context.kvskill("apply", "qwen3_moe", "--repo", tree, expect=3)
    assert path.read_bytes() == before, "something was written"
    found = [line for line in (done.stdout + done.stderr).splitlines() if "KV" in line]
    assert len(found) == 1 and "modeling_qwen3_moe.py:" in found[0], found
    return found[0].split(": ", 1)[0]


def bytes_kept(context: Any) -> str:
    """Comments outside replaced code stay, lines outside edits are identical, with LF and with CRLF."""
    shown = []
    for newline in (b"\n", b"\r\n"):
        tree = legacy_tree(context)
        path = tree / QWEN
        old = path.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", newline)
        path.write_bytes(old)
        convert(context, tree, "qwen3_moe", "--config", tree / "config.json")
        new = path.read_bytes()
        assert new.count(newline) == new.count(b"\n"), "mixed line ends"
        kept = set(old.splitlines(keepends=True)) & set(new.splitlines(keepends=True))
        lost = [c for c in _comments(old) if c not in _comments(new)]
        inside = ("# BD -> BNSD", "# SD -> BSND")  # they stand in the branch that is replaced
        assert all(c.startswith(inside) for c in lost), lost
        shown.append(f"{len(kept)} lines kept")
        ast.parse(new)
    return ", ".join(shown)


def _comments(raw: bytes) -> list[str]:
    return [t.string for t in tokenize.tokenize(io.BytesIO(raw).readline) if t.type == tokenize.COMMENT]


LINES = [
    ("input A: qwen3_moe 82ac5cb in tree 0296d00", input_a),
    ("input B: tiny_dense in tree 0296d00", input_b("0296d00")),
    ("input B: tiny_dense in tree 48a59dc", input_b("48a59dc")),
    ("input B: tiny_dense in the newest tree", input_b("newest")),
    ("an ambiguous seam is refused", ambiguous),
    ("bytes outside edits are kept", bytes_kept),
]
