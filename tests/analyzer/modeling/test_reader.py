"""What the walk finds in small models, and what it refuses to be certain of. The refusals are the larger table."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_model import ATTEND, CONFIG, WRITE, facts

from kvskill.analyzer.modeling.program import load_program
from kvskill.analyzer.modeling.reader import read_program
from kvskill.diagnostics import InputError


def test_the_plain_form(tmp_path: Path) -> None:
    found = facts(tmp_path)
    assert found.state == "legacy" and found.form == "packed-1d" and not found.findings
    (attention,) = found.attentions
    seam = attention.seam
    assert (seam.q.layout, seam.k.layout, seam.v.layout, seam.out.layout) == ("BNSD", "BNSD", "BNSD", "BSH")
    assert (seam.heads_expr, seam.kv_heads_expr, seam.k_dim_expr) == ("self.heads", "self.kv", "self.dim")
    assert seam.scale_expr == "self.scale" and seam.sinks_expr is None and attention.window is None
    assert attention.stream_params == ("x",) and attention.layers == (0, 1)


EAGER = """
        scores = torch.matmul(q, k.transpose(2, 3)) * self.scale
        {middle}
        if forward_metadata.is_prefill:
            scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), float("-inf"))
        probs = scores.softmax(dim=-1)
        out = torch.matmul(probs, v)
"""

UNDERSTOOD = {
    "default scale of SDPA": ({"attend": ATTEND.replace(", scale=self.scale", "")}, "scale", "self.dim ** -0.5"),
    "eager with a scale": ({"attend": EAGER.format(middle="")}, "scale", "self.scale"),
    "eager without a scale": ({"attend": EAGER.format(middle="").replace(" * self.scale", "")}, "scale", "1.0"),
    "division": (
        {"attend": EAGER.format(middle="").replace("* self.scale", "/ self.dim")},
        "scale",
        "1.0 / (self.dim)",
    ),
    "aliased caches": (
        {
            "write": "        kc, vc = self.k_cache, self.v_cache\n"
            + WRITE.replace("self.k_cache", "kc").replace("self.v_cache", "vc")
        },
        "scale",
        "self.scale",
    ),
    "operator imported by name": (
        {
            "imports": "from torch_npu import scatter_update_ as put",
            "write": WRITE.replace("torch_npu.scatter_update_", "put"),
        },
        "scale",
        "self.scale",
    ),
    "softmax subtracts its maximum": (
        {"attend": EAGER.format(middle="scores = scores - scores.amax(dim=-1, keepdim=True)")},
        "scale",
        "self.scale",
    ),
}


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_understood(name: str, tmp_path: Path) -> None:
    parts, _, want = UNDERSTOOD[name]
    found = facts(tmp_path, **parts)
    assert [str(f) for f in found.findings] == []
    assert found.attentions[0].seam.scale_expr == want


REFUSED = {
    "soft cap": ({"attend": EAGER.format(middle="scores = 50.0 * torch.tanh(scores / 50.0)")}, "KV140", "tanh"),
    "soft cap by method": ({"attend": EAGER.format(middle="scores = (scores / 30.0).tanh() * 30.0")}, "KV140", "tanh"),
    "learned factor": (
        {
            "init": "        self.temp = nn.Parameter(torch.ones(4))",
            "attend": EAGER.format(middle="scores = scores * self.temp.view(1, -1, 1, 1)"),
        },
        "KV141",
        "factor",
    ),
    "linear bias": (
        {
            "init": "        self.slopes = nn.Parameter(torch.ones(4))",
            "attend": EAGER.format(middle="scores = scores + (self.slopes.view(1, -1, 1, 1) * torch.arange(s))"),
        },
        "KV145",
        "bias",
    ),
    "chunks of positions": (
        {
            "attend": EAGER.format(
                middle="pos = torch.arange(s)\n        scores = scores + ((pos[:, None] // 4) == (pos[None, :] // 4))"
            )
        },
        "KV144",
        "chunk",
    ),
    "value changed on the way to the cache": (
        {"write": WRITE.replace("v.transpose", "(v * 0.5).transpose")},
        "KV153",
        "written",
    ),
    "K and V caches swapped in the read": (
        {
            "write": WRITE.replace("self.k_cache", "self.X")
            .replace("self.v_cache", "self.k_cache")
            .replace("self.X", "self.v_cache")
        },
        "KV153",
        "different caches",
    ),
    "only K is written": ({"write": "\n".join(WRITE.splitlines()[:2]) + "\n"}, "KV152", "writes its cache 1 times"),
    "no attention at all": ({"attend": "        out = q\n"}, "KV150", "No attention"),
    "two attentions": ({"attend": ATTEND + ATTEND.replace("out =", "extra =")}, "KV151", "more than once"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    parts, code, word = REFUSED[name]
    found = facts(tmp_path, **parts)
    assert [f.code for f in found.findings][:1] == [code], [str(f) for f in found.findings]
    finding = found.findings[0]
    assert word in finding.fact and finding.todo and finding.span.path == "modeling_small.py"
    assert finding.span.line > 1, "the finding names its place"
    assert not found.attentions


WINDOWED = """
        i = torch.arange(s)[:, None]
        j = torch.arange(s)[None, :]
        seen = j <= i
        if {test}:
            seen = seen & (j > i - self.window)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.scale)
"""
WINDOWS = {
    "attribute that is None for full layers": (
        '        self.window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None',
        "self.window is not None",
        "self.window",
    ),
    "flag attribute": (
        "        self.window = config.sliding_window\n"
        '        self.local = config.layer_types[layer_idx] == "sliding_attention"',
        "self.local",
        "config.sliding_window if self.local else None",
    ),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows(name: str, tmp_path: Path) -> None:
    init, test, want = WINDOWS[name]
    found = facts(tmp_path, init=init, attend=WINDOWED.format(test=test))
    assert [str(f) for f in found.findings] == []
    window = found.attentions[0].window
    assert window is not None and window.per_layer == (8, None) and window.expr == want


def test_nothing_of_the_target_runs(tmp_path: Path) -> None:
    """A file that would leave a mark when imported or run leaves none."""
    mark = tmp_path / "mark"
    found = facts(tmp_path, imports=f"open({str(mark)!r}, 'w').write('x')\nimport no_such_module")
    assert found.state == "legacy" and not mark.exists()


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    path = tmp_path / "modeling_none.py"
    path.write_text("x = 1\n", encoding="utf-8")
    with pytest.raises(InputError):
        read_program(load_program([path], tmp_path), CONFIG)


def test_an_endless_loop_ends(tmp_path: Path) -> None:
    found = facts(tmp_path, attend="        while True:\n            q = q + 0\n" + ATTEND)
    assert found.attentions or found.findings


def test_recursion_ends(tmp_path: Path) -> None:
    imports = "def again(x, n):\n    return again(x, n + 1)\n"
    found = facts(tmp_path, imports=imports, attend="        q = again(q, 0)\n" + ATTEND)
    assert found.findings
