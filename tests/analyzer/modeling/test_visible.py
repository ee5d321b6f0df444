"""Masks are evaluated: what they show decides, not how they are written. The wrong ones are the larger table."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_model import facts

WINDOW = "        self.window = config.sliding_window\n        self.slide = True"  # 8 keys, on every layer
# the whole cache is read in decode; i is the position of the query, j those of the keys
READ = """
            k = self.k_cache.view(b, -1, self.kv, self.dim).transpose(1, 2)
            v = self.v_cache.view(b, -1, self.kv, self.dim).transpose(1, 2)
"""
SPLIT = """
        if forward_metadata.is_prefill:
            i, j = torch.arange(s)[:, None], torch.arange(s)[None, :]
            seen = {prefill}
        else:
            i, j = forward_metadata.kv_len[:, None, None, None], torch.arange(k.shape[2])
            seen = {decode}
"""
SDPA = "        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.scale)\n"
ADDED = """
        bias = torch.zeros_like(seen, dtype=q.dtype).masked_fill(~seen, torch.finfo(q.dtype).min)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=self.scale)
"""
EAGER = """
        scores = torch.matmul(q, k.transpose(2, 3)) * self.scale
        scores = scores.masked_fill(~seen, float("-inf"))
        out = torch.matmul(scores.softmax(dim=-1), v)
"""
WHERE = """
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / self.dim ** 0.5
        scores = torch.where(seen, scores, -1e9)
        scores = scores - scores.max(dim=-1, keepdim=True).values
        out = torch.matmul(scores.softmax(dim=-1), v)
"""
IN_PLACE = """
        bias = torch.zeros(seen.shape)
        bias.masked_fill_(seen.logical_not(), -torch.inf)
        scores = torch.matmul(q, k.transpose(2, 3)) * self.scale + bias
        out = torch.matmul(scores.float().softmax(dim=-1).to(q.dtype), v)
"""
USES = {"sdpa": SDPA, "added": ADDED, "eager": EAGER, "where": WHERE, "in place": IN_PLACE}
PREFILL = {
    "comparison": "j <= i",
    "inverted": "~(j > i)",
    "triangle": "torch.ones(s, s, dtype=torch.bool).tril()",
    "upper triangle": "torch.ones(s, s).triu(diagonal=1) == 0",
    "the framework's": "forward_metadata.attention_mask[:s, :s].logical_not()",
    "counted": "torch.ones(s, s).cumsum(dim=-1) <= torch.ones(s, s).cumsum(dim=0)",
    "joined halves": "torch.cat([j[:, :2] <= i, (j <= i)[:, 2:]], dim=-1)",
    "selected rows": "(j <= i).index_select(0, torch.arange(s))",
}
WINDOWED = {
    "distance": "(j <= i) & (i - j < self.window)",
    "distance at most": "(j <= i) & (i - j <= self.window - 1)",
    "band": "torch.ones(s, s, dtype=torch.bool).tril() & torch.ones(s, s, dtype=torch.bool).triu(-(self.window - 1))",
    "difference of triangles": "torch.ones(s, s).tril() - torch.ones(s, s).tril(-self.window) > 0",
}
DECODE = {"up to the token": "j <= i", "below its end": "j < i + 1"}
DECODE_WINDOWED = {"distance": "(j <= i) & (j > i - self.window)"}

WRONG = {  # prefill, decode, code, a word of the finding
    "hides the token itself": ("j < i", "j <= i", "KV299", "hides the query at position 0"),
    "triangle one down": ("torch.ones(s, s, dtype=torch.bool).tril(-1)", "j <= i", "KV299", "hides"),
    "triangle one up": ("torch.ones(s, s, dtype=torch.bool).tril(1)", "j <= i", "KV299", "later key"),
    "inverted": ("j > i", "j <= i", "KV299", "no key at all"),
    "prefix in both directions": ("(j <= i) | (j < 3)", "j <= i", "KV299", "later key"),
    "chunks": ("(j <= i) & (j // 4 == i // 4)", "j <= i", "KV144", "chunk"),
    "every second key": ("(j <= i) & ((i - j) % 2 == 0)", "j <= i", "KV", ""),
    "first keys stay visible": ("(j <= i) & ((i - j < 8) | (j < 2))", "j <= i", "KV299", "earlier key"),
    "decode hides the token itself": ("j <= i", "j < i", "KV299", "in decode"),
    "decode shows a free place": ("j <= i", "j <= i + 1", "KV299", "in decode"),
    "decode shows the whole cache": ("j <= i", "j >= 0", "KV299", "in decode"),
    "window one short": ("(j <= i) & (i - j < self.window - 1)", "(j <= i) & (j > i - self.window + 1)", "KV164", "7"),
    "window two wide": ("(j <= i) & (i - j <= self.window + 1)", "(j <= i) & (j >= i - self.window)", "KV164", "10"),
    "other window in decode": ("(j <= i) & (i - j < self.window)", "(j <= i) & (j > i - 5)", "KV164", "decode"),
    "short window in decode": (
        "(j <= i) & (i - j < self.window)",
        "(j <= i) & (j > i - self.window + 1)",
        "KV164",
        "decode",
    ),
}


def model(tmp_path: Path, prefill: str, decode: str, use: str, init: str = WINDOW):
    attend = SPLIT.format(prefill=prefill, decode=decode) + USES[use]
    return facts(tmp_path, init=init, read=READ, attend=attend)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    ("prefill", "decode"), [*((p, "up to the token") for p in PREFILL), ("comparison", "below its end")]
)
def test_full_attention_however_it_is_written(prefill: str, decode: str, use: str, tmp_path: Path) -> None:
    found = model(tmp_path, PREFILL[prefill], DECODE[decode], use)
    assert [str(f) for f in found.findings] == []
    assert found.attentions[0].window is None


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("prefill", WINDOWED)
def test_windows_however_they_are_written(prefill: str, use: str, tmp_path: Path) -> None:
    found = model(tmp_path, WINDOWED[prefill], DECODE_WINDOWED["distance"], use)
    assert [str(f) for f in found.findings] == []
    window = found.attentions[0].window
    assert window is not None and window.per_layer == (8, 8) and not window.differs


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_masks_are_refused(name: str, use: str, tmp_path: Path) -> None:
    prefill, decode, code, word = WRONG[name]
    found = model(tmp_path, prefill, decode, use)
    assert found.findings and found.findings[0].code.startswith(code), [str(f) for f in found.findings]
    assert word in found.findings[0].fact
    assert not found.attentions


@pytest.mark.parametrize("use", USES)
def test_one_key_more_is_a_warning(use: str, tmp_path: Path) -> None:
    """`k >= q - W` is a known slip: the configuration decides, and it is said."""
    found = model(tmp_path, "(j <= i) & (i - j <= self.window)", "(j <= i) & (j >= i - self.window)", use)
    assert [f.code for f in found.findings] == ["KV167"], [str(f) for f in found.findings]
    assert "9 keys in prefill and decode" in found.findings[0].fact
    window = found.attentions[0].window
    assert window is not None and window.per_layer == (8, 8)


@pytest.mark.parametrize("use", USES)
def test_a_decode_without_the_window_is_a_warning(use: str, tmp_path: Path) -> None:
    found = model(tmp_path, WINDOWED["distance"], "j <= i", use)
    assert [f.code for f in found.findings] == ["KV167"], [str(f) for f in found.findings]
    assert "in decode shows all keys" in found.findings[0].fact
