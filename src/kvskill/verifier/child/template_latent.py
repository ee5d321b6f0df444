"""Cases of the standalone latent templates: padded rows, NaN in padding and in every slot that nobody wrote."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch

from kvskill.verifier.child.template_cases import NOPE, RANK, ROPE, VALUE, Place, draw, function, relative
from kvskill.verifier.child.template_reference import attention
from kvskill.verifier.templates.render import render_case

__all__ = ["run_standalone_latent"]


def run_standalone_latent(case: dict[str, Any], place: Place) -> float:
    """standalone/paged_kv makes the steps, latent_absorb splits, latent_attend attends; expanded is the reference."""
    n, prompts = case["q_heads"], case["prompts"]
    scope: dict[str, Any] = {"torch": torch, "dataclass": dataclass, "__name__": __name__}
    exec(render_case("standalone/paged_kv", case), scope)
    exec(render_case("standalone/latent_absorb", case), scope)
    parameters = "self, query_nope, query_rope, latent, key_rope, forward_metadata"
    attend = function("attend", parameters, render_case("standalone/latent_attend", case), "attn_output")
    longest, rows = max(prompts) + case["steps"], len(prompts)
    kv = scope["PagedKV"](rows, longest, case["block"], place.device)
    weight = (draw(1, n * (NOPE + VALUE), RANK) * RANK**-0.5).to(place.dtype)
    up = torch.nn.Linear(RANK, n * (NOPE + VALUE), bias=False, dtype=place.dtype, device=place.device)
    up.weight.data.copy_(weight)
    me = types.SimpleNamespace(
        kv_lora_rank=RANK,
        qk_rope_head_dim=ROPE,
        qk_nope_head_dim=NOPE,
        v_head_dim=VALUE,
        num_heads=n,
        scaling=0.8 * (NOPE + ROPE) ** -0.5,
        kv_b_proj=up,
        absorbed_k=None,
        nope_cache=torch.full(kv.shape(1, RANK), float("nan"), dtype=place.dtype, device=place.device),
        rope_cache=torch.full(kv.shape(1, ROPE), float("nan"), dtype=place.dtype, device=place.device),
    )
    me.split_up_projection = lambda like: scope["split_up_projection"](me, like)
    sources = [
        [draw(seed + r, longest, *shape).to(place.dtype) for r in range(rows)]
        for seed, shape in ((10, (n, NOPE)), (30, (n, ROPE)), (50, (RANK,)), (70, (ROPE,)))
    ]
    worst, lengths = 0.0, [0] * rows
    for step in range(case["steps"] + 1):
        counts = prompts if step == 0 else [1] * rows
        width = max(counts)
        before = [width - c if case["left"] else 0 for c in counts]
        mask = torch.zeros(rows, width, dtype=torch.long)
        for r, c in enumerate(counts):
            mask[r, before[r] : before[r] + c] = 1
        mask = mask.to(place.device)
        meta = kv.prefill(mask) if step == 0 else kv.decode(torch.tensor(lengths, device=place.device))
        given = []
        for source in sources:
            padded = torch.full((rows, width, *source[0].shape[1:]), float("nan"), dtype=place.dtype)
            for r, c in enumerate(counts):
                padded[r, before[r] : before[r] + c] = source[r][lengths[r] : lengths[r] + c]
            given.append(padded.to(place.device))
        out = attend(me, *given, meta)
        for r, c in enumerate(counts):
            end = lengths[r] + c
            wanted = _expanded([s[r] for s in sources], weight, n, lengths[r], end, me.scaling)
            worst = max(worst, relative(out[r, before[r] : before[r] + c], wanted))
        lengths = [a + c for a, c in zip(lengths, counts, strict=True)]
    return worst


def _expanded(parts: list[Any], weight: Any, n: int, first: int, end: int, scale: float) -> Any:
    """Full-head attention of one sequence: keys and values expanded for every cached token."""
    q_nope, q_rope, latent, k_rope = (p.double() for p in parts)
    expanded = (latent[:end] @ weight.double().T).reshape(end, n, NOPE + VALUE)
    keys = torch.cat((expanded[..., :NOPE], k_rope[:end, None].expand(-1, n, -1)), dim=-1)
    queries = torch.cat((q_nope[first:end], q_rope[first:end]), dim=-1)
    return attention(queries, keys, expanded[..., NOPE:], first, scale)
