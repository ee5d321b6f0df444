"""Ways of writing a model that the case folders do not show; each is put into a case that converts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

GUARD = """        if input_ids.shape[0] % self.batch_size != 0:
            raise NotImplementedError("prompts of one length only")
        input_ids = input_ids.view(self.batch_size, -1)
"""
CHUNKS = """        flat = hidden.view(-1, shape[-1])
        if flat.shape[0] > self.factor * 1000:
            count = flat.shape[0] // 1000 + 1
            pieces = flat.chunk(count, dim=0)
        else:
            pieces = [flat]
        flat = torch.cat(list(pieces), dim=0)
"""
SCALED = """class ScaledEmbedding(nn.Embedding):
    def __init__(self, count, width, scale=1.0):
        super().__init__(count, width)
        self.scale = scale

    def forward(self, ids):
        return super().forward(ids) * self.scale


class MinitronMLP(nn.Module):
"""
# kind -> case, [(old, new)], text that must be gone
KINDS: dict[str, tuple[str, list[tuple[str, str]], str]] = {
    "a guard of the fold by requests goes": (
        "starcoder2",
        [("        input_ids = input_ids.view(self.batch_size, -1)\n", GUARD)],
        "prompts of one length only",
    ),
    "rows in one piece or in several": ("dots1", [("        flat = hidden.view(-1, shape[-1])\n", CHUNKS)], ""),
    "a shape that is only given on": (
        "nemotron",
        [
            (
                "return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))",
                "out = self.mlp(self.post_attention_layernorm(hidden_states))\n"
                "        return hidden_states + out.reshape(hidden_states.shape)",
            )
        ],
        "(1, *hidden_states.shape)",
    ),
    "a module class from outside as base": (
        "nemotron",
        [
            ("class MinitronMLP(nn.Module):\n", SCALED),
            ("nn.Embedding(config.vocab_size", "ScaledEmbedding(config.vocab_size"),
        ],
        "",
    ),
    "keys and values in one tensor": (
        "nemotron",
        [
            (
                "            k_cache = torch.zeros(self.batch_size, max_len, width, "
                "dtype=self.lm_head.weight.dtype, device=device)\n"
                "            v_cache = torch.zeros(self.batch_size, max_len, width, "
                "dtype=self.lm_head.weight.dtype, device=device)\n"
                "            caches.append((k_cache, v_cache))",
                "            caches.append(torch.zeros(2, self.batch_size, max_len, width, device=device))",
            )
        ],
        "past_key_values",
    ),
    "a window told by a string": ("gpt_neo", [], "cache_unit"),
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_it_converts(case_bench: Callable[..., Any], kind: str) -> None:
    name, changes, gone = KINDS[kind]
    b = case_bench(name)
    for old, new in changes:
        b.edit(old, new)
    text = b.convert()
    assert not gone or gone not in text


def test_a_choice_by_count_is_refused(case_bench: Callable[..., Any]) -> None:
    """Both sides must hold the same rows: here one side drops some where there are several requests."""
    from kvskill.diagnostics import Refusal

    b = case_bench("dots1")
    dropping = CHUNKS.replace("[flat]", "[flat[:1]]").replace("flat.shape[0] > self.factor * 1000", "shape[0] > 4")
    b.edit("        flat = hidden.view(-1, shape[-1])\n", dropping)
    b.analyze()
    with pytest.raises(Refusal) as caught:
        b.apply()
    assert "KV213" in str(caught.value.findings)
