"""What a conversion would lose is refused, wherever it stands; what it keeps is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_model import ATTEND, READ, WRITE, facts

EAGER = """
        scores = torch.matmul(q, k.transpose(2, 3)) * self.scale
        if forward_metadata.is_prefill:
            scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), float("-inf"))
        probs = scores.softmax(dim=-1)
{after}
        out = torch.matmul(probs, v)
"""
SINKS = """
        scores = torch.matmul(q, k.transpose(2, 3)) * self.scale
        if forward_metadata.is_prefill:
            scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), float("-inf"))
        column = {column}.view(1, -1, 1, 1).expand(b, -1, s, 1)
        probs = torch.cat({joined}, dim=-1).softmax(dim=-1){cut}
        out = torch.matmul(probs, v)
"""
SINK = "        self.sinks = nn.Parameter(torch.empty(4))"
CUT = READ.replace("[:, :end]", "[:, {cut}]")
LAYER = "        self.layer_idx = layer_idx"


def attend(after: str) -> str:
    return EAGER.format(after="        " + after)


def cut(text: str) -> str:
    return CUT.replace("{cut}", text).replace("b, end,", "b, -1,")


REFUSED = {  # parts of the model, code, a word of the finding
    "probabilities cut off": (
        {"attend": attend("probs = probs.masked_fill(probs < 0.05, 0.0)")},
        "KV141",
        "masked_fill",
    ),
    "probabilities chosen": ({"attend": attend("probs = torch.where(probs < 0.05, 0.0, probs)")}, "KV141", "where"),
    "dropout that is on": ({"attend": attend("probs = F.dropout(probs, p=0.1, training=True)")}, "KV141", "dropout"),
    "dropout by default": ({"attend": attend("probs = F.dropout(probs, 0.1)")}, "KV141", "dropout"),
    "a scaled sink": (
        {"init": SINK, "attend": SINKS.format(column="(2 * self.sinks)", joined="[scores, column]", cut="[..., :-1]")},
        "KV141",
        "sink",
    ),
    "a sink that stays": (
        {"init": SINK, "attend": SINKS.format(column="self.sinks", joined="[scores, column]", cut="[..., 1:]")},
        "KV141",
        "sink",
    ),
    "queries scaled after the write": ({"write": WRITE + "\n        q.mul_(1.5)\n"}, "KV149", "queries"),
    "values changed after the write": ({"write": WRITE + "\n        v[..., :8] = 0\n"}, "KV149", "cached"),
    "the cache is scaled": ({"write": WRITE + "\n        self.k_cache.mul_(0.5)\n"}, "KV149", "the cache"),
    "a place of the cache is cleared": ({"write": WRITE + "\n        self.v_cache[:, 3] = 0\n"}, "KV149", "the cache"),
    "every second key": ({"read": cut(":end:2")}, "KV148", "chosen places"),
    "chosen keys": ({"read": cut("torch.arange(3)")}, "KV148", "chosen places"),
    "the first keys left out": ({"read": cut("4:end")}, "KV164", "decode"),
    "a window in decode only": ({"read": cut("max(end - 24, 0):end")}, "KV164", "decode"),
    "another scale in decode": (
        {"attend": ATTEND.replace("scale=self.scale", "scale=0.3 if forward_metadata.is_prefill else None")},
        "KV147",
        "0.3 in prefill and by 0.25 in decode",
    ),
    "a scale by length in decode": (
        {
            "attend": ATTEND.replace(
                "scale=self.scale", "scale=self.scale if forward_metadata.is_prefill else 1.0 / int(start.max())"
            )
        },
        "KV147",
        "not known in decode",
    ),
    "a soft cap in one layer": (
        {
            "init": LAYER,
            "attend": EAGER.format(after="").replace(
                "        probs =",
                "        if self.layer_idx == 1:\n            scores = 5.0 * torch.tanh(scores / 5.0)\n        probs =",
            ),
        },
        "KV140",
        "tanh",
    ),
    "a mask less in one layer": (
        {
            "init": LAYER,
            "attend": ATTEND.replace(
                "is_causal=forward_metadata.is_prefill",
                "is_causal=forward_metadata.is_prefill and self.layer_idx % 2 == 0",
            ),
        },
        "KV299",
        "without a causal mask",
    ),
    "queries scaled by the longest request": (
        {"write": "        q = q * torch.log(forward_metadata.actual_seq_lengths_kv.max().float())\n" + WRITE},
        "KV173",
        "max",
    ),
    "a state of the row": (
        {
            "init": "        self.last = None",
            "write": "        if not forward_metadata.is_prefill:\n            x = x + self.last\n"
            "        self.last = x[:, -1:]\n" + WRITE,
        },
        "KV174",
        "`last`",
    ),
}
KEPT = {
    "dropout that is off": {"attend": attend("probs = F.dropout(probs, p=0.1, training=self.training)")},
    "dropout of nothing": {"attend": attend("probs = F.dropout(probs, p=0.0)")},
    "a sink": {"init": SINK, "attend": SINKS.format(column="self.sinks", joined="[scores, column]", cut="[..., :-1]")},
    "a sink in front": {
        "init": SINK,
        "attend": SINKS.format(column="self.sinks", joined="[column, scores]", cut="[..., 1:]"),
    },
    "queries clamped before the write": {"write": "        q.clamp_(-8, 8)\n        k.clamp_(-8, 8)\n" + WRITE},
    "an attribute that is only looked at": {"write": "        self.seen = x\n" + WRITE},
    "an attribute that is set first": {"write": "        self.now = x\n        x = self.now * 1\n" + WRITE},
    "the same scale twice": {
        "attend": ATTEND.replace("scale=self.scale", "scale=self.scale if forward_metadata.is_prefill else None")
    },
    "the number of the layer in a message": {"init": LAYER, "attend": ATTEND + "        print(self.layer_idx)\n"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    parts, code, word = REFUSED[name]
    found = facts(tmp_path, **parts)
    assert code in [f.code for f in found.findings], [str(f) for f in found.findings]
    finding = next(f for f in found.findings if f.code == code)
    assert word in finding.fact + str(finding) and finding.span.line > 1


@pytest.mark.parametrize("name", KEPT)
def test_kept(name: str, tmp_path: Path) -> None:
    found = facts(tmp_path, **KEPT[name])
    assert [str(f) for f in found.findings] == []
    assert found.attentions


MIXING = {
    "mean": "x = x - x.mean(dim=1, keepdim=True)",
    "running sum": "x = x + x.cumsum(dim=1) * 0.1",
    "rotation": "x = x + torch.roll(x, 1, dims=1)",
    "maximum": "x = x * x.amax(dim=1, keepdim=True)",
    "norm along tokens": "x = x / x.norm(dim=1, keepdim=True)",
}


@pytest.mark.parametrize("name", MIXING)
def test_tokens_are_not_mixed_outside_attention(name: str, tmp_path: Path) -> None:
    found = facts(tmp_path, layer=f"        {MIXING[name]}")
    assert [f.code for f in found.findings] == ["KV175"], [str(f) for f in found.findings]


ROUTING = {
    "norm of a token": "x = x / x.norm(dim=-1, keepdim=True)",
    "counts choose rows": (
        "order = x.sum(-1).view(-1).argsort()\n        x = x.view(-1, x.shape[-1])[order].view(x.shape)"
    ),
}


@pytest.mark.parametrize("name", ROUTING)
def test_what_only_chooses_rows_is_no_mixing(name: str, tmp_path: Path) -> None:
    found = facts(tmp_path, layer=f"        {ROUTING[name]}")
    assert "KV175" not in [f.code for f in found.findings], [str(f) for f in found.findings]


def test_layers_that_differ_by_number_have_their_own_window(tmp_path: Path) -> None:
    """A window by the number of the layer, by a function that is held, by a dict: never one kind for all."""
    for init, test in (
        (LAYER, "self.layer_idx % 2 == 1"),
        ("        self.options = {'near': layer_idx % 2 == 1}", "self.options['near']"),
        ("        self.pick = (lambda: True) if layer_idx % 2 else (lambda: False)", "self.pick()"),
    ):
        mask = (
            "        i, j = torch.arange(s)[:, None], torch.arange(k.shape[2])[None, :]\n"
            "        seen = j <= i if forward_metadata.is_prefill else j >= 0\n"
            f"        if forward_metadata.is_prefill and {test}:\n            seen = seen & (i - j < 8)\n"
            "        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.scale)\n"
        )
        found = facts(tmp_path, init=init, attend=mask)
        windows = [a.window.per_layer if a.window is not None else None for a in found.attentions]
        assert windows == [(None, 8)] or [f.code for f in found.findings] == ["KV164"], (init, windows)
