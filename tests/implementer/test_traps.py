"""Legacy code that computes something the paged call cannot: each is refused where it stands, and nothing is written.

Each row changes a case that converts, so that its shapes stay as they were and its results do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvskill.diagnostics import Refusal

KEYS = "keys = keys.repeat_interleave(self.num_key_value_groups, dim=1)"
VALUES = "values = values.repeat_interleave(self.num_key_value_groups, dim=1)"
TRAPS = {
    "keys tiled": ("nemotron", [(KEYS, "keys = keys.repeat(1, self.num_key_value_groups, 1, 1)")], "KV146"),
    "values tiled": ("nemotron", [(VALUES, "values = values.repeat(1, self.num_key_value_groups, 1, 1)")], "KV146"),
    "queries grouped the other way": (
        "apertus",
        [
            (
                'x.reshape(x.shape[0], x.shape[1], sizes["k"], -1, x.shape[-1]).permute(0, 2, 3, 1, 4)',
                'x.reshape(x.shape[0], x.shape[1], -1, sizes["k"], x.shape[-1]).permute(0, 3, 2, 1, 4)',
            )
        ],
        "KV146",
    ),
    "groups before heads": (
        "mixtral",
        [("hidden_states[:, :, None].expand(b, n, n_rep, s, d)", "hidden_states[:, None].expand(b, n_rep, n, s, d)")],
        "KV146",
    ),
    "decode scaled otherwise": (
        "dots1",
        [("scale_value=self.scale_value, actual_seq_lengths", "scale_value=2 * self.scale_value, actual_seq_lengths")],
        "KV147",
    ),
    "decode sees another window": (
        "afmoe",
        [
            (
                "return OrderedDict([(None, causal), (window, causal & (now - key < window))])",
                "seen = now - key < (window if meta.is_prefill else window // 2)\n"
                "        return OrderedDict([(None, causal), (window, causal & seen)])",
            )
        ],
        "KV164",
    ),
    "first token to the head": (
        "nemotron",
        [("hidden_states = hidden_states[:, -1:]", "hidden_states = hidden_states[:, :1]")],
        "KV210",
    ),
    "caches that are never allocated": (
        "bitnet",
        [("attn.k_cache = torch.zeros(shape,", "attn.other = torch.zeros(shape,")],
        "KV",
    ),
    "keys changed after they were stored": (
        "starcoder2",
        [("            return key_states, value_states\n\n", "            return key_states * 2.0, value_states\n\n")],
        "KV153",
    ),
}


@pytest.mark.parametrize("kind", sorted(TRAPS))
def test_a_trap_is_refused(case_bench: Callable[..., Any], kind: str) -> None:
    name, changes, code = TRAPS[kind]
    b = case_bench(name)
    for old, new in changes:
        b.edit(old, new)
    before = b.modeling.read_bytes()
    b.analyze()
    with pytest.raises(Refusal) as caught:
        b.apply()
    assert code in str(caught.value.findings)
    assert b.modeling.read_bytes() == before
