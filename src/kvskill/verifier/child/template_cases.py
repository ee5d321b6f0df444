"""Runs the code of templates in a bare harness, step by step, and measures it against the reference."""

from __future__ import annotations

import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvskill.verifier.child.template_blocks import Blocks, metadata
from kvskill.verifier.child.template_reference import attention, interleaved_to_half, rms_norm, turn_half
from kvskill.verifier.templates.render import render_case

__all__ = ["run_attention", "run_last_token", "run_mla", "run_standalone"]

RANK, ROPE, NOPE, VALUE = 512, 64, 128, 128
EPSILON = 1e-6


@dataclass
class Place:
    """Where and in what the case runs."""

    device: Any
    dtype: Any


def function(name: str, parameters: str, body: str, result: str, **scope: Any) -> Any:
    """A function around rendered statements."""
    text = f"def {name}({parameters}):\n{textwrap.indent(body, '    ')}    return {result}\n"
    values: dict[str, Any] = {"torch": torch, **scope}
    exec(compile(text, f"<{name}>", "exec"), values)
    return values[name]


def relative(got: Any, wanted: Any) -> float:
    """Largest difference over the largest value; infinite with a NaN."""
    difference = (got.double().cpu() - wanted).abs().max()
    return float(difference / wanted.abs().max()) if bool(torch.isfinite(difference)) else float("inf")


def steps(case: dict[str, Any], blocks: Blocks, place: Place) -> Iterator[tuple[Any, list[tuple[int, int, int]]]]:
    """(metadata, [(row, first position, tokens)]) of prefill and every decode step; idle rows have no request."""
    prompts, q, idle = case["prompts"], case["q"], case["idle"]
    host = bool(case.get("host_lists"))
    for row, length in enumerate(prompts):
        blocks.grow(row, length, 0)
    slots = [s for row, n in enumerate(prompts) for s in blocks.slots(row, list(range(n)))]
    table = blocks.table(place.device)[: len(prompts)]
    meta = metadata(True, prompts, prompts, slots, table, host, place.device)
    yield meta, [(row, 0, n) for row, n in enumerate(prompts)]
    lengths = list(prompts)
    for _ in range(case["steps"]):
        slots = []
        for row in range(len(prompts)):
            blocks.grow(row, lengths[row] + q, lengths[row])
            slots += blocks.slots(row, list(range(lengths[row], lengths[row] + q)))
        slots += [0] * (idle * q)
        keys = [n + q for n in lengths] + [1] * idle
        table = blocks.table(place.device)
        meta = metadata(False, [q] * len(keys), keys, slots, table, host, place.device)
        yield meta, [(row, lengths[row], q) for row in range(len(prompts))]
        lengths = [n + q for n in lengths]


def draw(seed: int, *shape: int) -> Any:
    """Normal noise that depends on the seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run_attention(case: dict[str, Any], place: Place) -> float:
    """framework/attend_head with attend or attend_dense."""
    n, nkv, dim, window = case["q_heads"], case["kv_heads"], case["dim"], case["window"]
    parts = [render_case(t, case) for t in case["templates"]]
    attend = function(
        "attend", "self, query_states, key_states, value_states, forward_metadata", "\n".join(parts), "attn_output"
    )
    rows = len(case["prompts"]) + case["idle"]
    longest = max(case["prompts"]) + case["steps"] * case["q"]
    blocks = Blocks(rows, longest, case["block"], window, case["id"])
    me = types.SimpleNamespace(
        attn_type="FullAttention",
        num_heads_per_rank=n,
        num_key_value_heads_per_rank=nkv,
        head_dim=dim,
        scaling=0.7 * dim**-0.5,  # not the default of anything
        sliding_window=window,
        sinks=draw(7, n).to(place.dtype).to(place.device),
        k_cache=blocks.cache(nkv, dim, place.dtype, place.device),
        v_cache=blocks.cache(nkv, dim, place.dtype, place.device),
    )
    query = [draw(10 + r, longest, n, dim).to(place.dtype) for r in range(rows)]
    key = [draw(30 + r, longest, nkv, dim).to(place.dtype) for r in range(rows)]
    value = [draw(50 + r, longest, nkv, dim).to(place.dtype) for r in range(rows)]
    worst = 0.0
    for meta, spans in steps(case, blocks, place):
        pad = 0 if meta.is_prefill else case["idle"] * case["q"]

        def packed(source: list[Any], spans: Any = spans, pad: int = pad) -> Any:
            parts = [source[r][a : a + c] for r, a, c in spans]
            parts += [source[0][:1]] * pad
            return torch.cat(parts).to(place.device)

        out = attend(me, packed(query), packed(key), packed(value), meta)
        start = 0
        for row, first, count in spans:
            end = first + count
            wanted = attention(
                query[row][first:end],
                key[row][:end],
                value[row][:end],
                first,
                me.scaling,
                window,
                me.sinks.cpu() if case.get("sinks") else None,
            )
            worst = max(worst, relative(out[start : start + count], wanted))
            start += count
    return worst


def run_mla(case: dict[str, Any], place: Place) -> float:
    """framework/mla_absorb, then mla_attend over steps; expanded attention is the reference in both phases."""
    n = case["q_heads"]
    scope: dict[str, Any] = {"torch": torch}
    exec(render_case("framework/mla_absorb", case), scope)
    parameters = (
        "self, query_nope, query_rope, compressed_kv, normed_latent, key_rope, kv_a_layernorm, cos, sin, "
        "forward_metadata"
    )
    attend = _mla_attend(case, parameters)
    rows = len(case["prompts"]) + case["idle"]
    longest = max(case["prompts"]) + case["steps"] * case["q"]
    blocks = Blocks(rows, longest, case["block"], None, case["id"])
    weight = (draw(1, n * (NOPE + VALUE), RANK) * RANK**-0.5).to(place.dtype)
    gamma = (1 + 0.2 * draw(2, RANK)).to(place.dtype)
    up = torch.nn.Linear(RANK, n * (NOPE + VALUE), bias=False, dtype=place.dtype, device=place.device)
    up.weight.data.copy_(weight)
    me = types.SimpleNamespace(
        attn_type="FullAttention",
        kv_lora_rank=RANK,
        qk_rope_head_dim=ROPE,
        qk_nope_head_dim=NOPE,
        v_head_dim=VALUE,
        num_heads_per_rank=n,
        softmax_scale=0.8 * (NOPE + ROPE) ** -0.5,
        kv_b_proj=up,
        nope_cache=blocks.cache(1, RANK, place.dtype, place.device),
        rope_cache=blocks.cache(1, ROPE, place.dtype, place.device),
    )
    scope["process_weights_after_loading"](me)
    halves = up.weight.data.view(n, NOPE + VALUE, RANK).split((NOPE, VALUE), dim=1)
    me.half_k, me.half_v = halves[0].contiguous(), halves[1].transpose(1, 2).contiguous()
    norm = types.SimpleNamespace(weight=gamma.to(place.device), variance_epsilon=EPSILON)
    q_nope = [draw(10 + r, longest, n, NOPE).to(place.dtype) for r in range(rows)]
    q_rope = [draw(30 + r, longest, n, ROPE).to(place.dtype) for r in range(rows)]
    latent = [draw(50 + r, longest, RANK + ROPE).to(place.dtype) for r in range(rows)]
    angle = torch.arange(longest)[:, None] * 1000.0 ** -(torch.arange(0, ROPE, 2) / ROPE)
    worst = 0.0
    for meta, spans in steps(case, blocks, place):
        pad = 0 if meta.is_prefill else case["idle"] * case["q"]
        where = torch.cat([torch.arange(a, a + c) for _, a, c in spans] + [torch.zeros(pad, dtype=torch.long)])

        def packed(source: list[Any], spans: Any = spans, pad: int = pad) -> Any:
            return torch.cat([source[r][a : a + c] for r, a, c in spans] + [source[0][:1]] * pad).to(place.device)

        raw = packed(latent)
        turned = torch.cat((angle[where], angle[where]), dim=-1)
        normed = rms_norm(raw[:, :RANK].cpu(), gamma, EPSILON).to(place.dtype).to(place.device)
        rope = turn_half(interleaved_to_half(raw[:, RANK:].cpu()), angle[where]).to(place.dtype).to(place.device)
        cos, sin = (f(turned).to(place.dtype).to(place.device) for f in (torch.cos, torch.sin))
        out = attend(me, packed(q_nope), packed(q_rope), raw, normed, rope, norm, cos, sin, meta)
        out = out.reshape(raw.shape[0], n, VALUE)
        start = 0
        for row, first, count in spans:
            end = first + count
            wanted = _expanded(q_nope[row][first:end], q_rope[row][first:end], latent[row][:end], weight, gamma, angle)
            worst = max(worst, relative(out[start : start + count], wanted(first, me.softmax_scale)))
            start += count
    return worst


def _mla_attend(case: dict[str, Any], parameters: str) -> Any:
    """The rendered attention; with form `methods` one function per phase, whose decode has its own products."""
    form = case.get("form")
    if form is None:
        return function("attend", parameters, render_case("framework/mla_attend", case), "attn_output")
    own = {"absorbed_k": "half_k", "absorbed_v": "half_v", "halves": True}
    if form == "halves":
        return function("attend", parameters, render_case("framework/mla_attend", case, **own), "attn_output")
    early = render_case("framework/mla_attend", case, phase="prefill", **own)
    plain = {"name": "attn_output", "text": "attn_output"}
    late = render_case("framework/mla_attend", case, phase="decode", absorbed=True, out=plain, **own)
    absorb = "query_nope = torch.matmul(query_nope.transpose(0, 1), self.half_k).transpose(0, 1)\n"
    project = "attn_output = torch.matmul(attn_output, self.half_v).transpose(0, 1)\n"
    prompts = function("prompts", parameters, early, "attn_output")
    steps_ = function("steps", parameters, absorb + late + project, "attn_output")

    def attend(*given: Any) -> Any:
        return (prompts if given[-1].is_prefill else steps_)(*given)

    return attend


def _expanded(q_nope: Any, q_rope: Any, latent: Any, weight: Any, gamma: Any, angle: Any) -> Any:
    """Full-head attention of one sequence: keys and values expanded for every cached token."""
    n = q_nope.shape[1]
    normed = rms_norm(latent[:, :RANK], gamma, EPSILON)
    expanded = (normed @ weight.double().T).reshape(latent.shape[0], n, NOPE + VALUE)
    shared = turn_half(interleaved_to_half(latent[:, RANK:]), angle[: latent.shape[0]])
    keys = torch.cat((expanded[..., :NOPE], shared[:, None].expand(-1, n, -1)), dim=-1)
    queries = torch.cat((q_nope.double(), q_rope.double()), dim=-1)
    return lambda first, scale: attention(queries, keys, expanded[..., NOPE:], first, scale)


def run_last_token(case: dict[str, Any], place: Place) -> float:
    """framework/last_token: rows of the packed states, by request."""
    select = function(
        "select", "hidden_states, forward_metadata", render_case("framework/last_token", case), "hidden_states"
    )
    blocks = Blocks(len(case["prompts"]) + case["idle"], 64, 16, None, case["id"])
    worst = 0.0
    for meta, spans in steps(case, blocks, place):
        tokens = int(meta.actual_seq_lengths_cu_q[-1])
        states = draw(3, tokens, 8).to(place.device)
        out = select(states, meta)
        ends = [sum(c for _, _, c in spans[: i + 1]) for i in range(len(spans))]
        if meta.is_prefill:
            wanted = torch.stack([states[e - 1] for e in ends]).unsqueeze(1)
        else:
            wanted = states.view(-1, case["q"], 8)
        worst = max(worst, float("inf") if out.shape != wanted.shape else relative(out, wanted.double().cpu()))
    return worst


def run_standalone(case: dict[str, Any], place: Place) -> float:
    """standalone/paged_kv makes the steps, standalone/attend attends over padded rows."""
    from dataclasses import dataclass as decorator

    n, nkv, dim, window = case["q_heads"], case["kv_heads"], case["dim"], case["window"]
    scope: dict[str, Any] = {"torch": torch, "dataclass": decorator, "__name__": __name__}
    exec(render_case("standalone/paged_kv", case), scope)
    attend = function(
        "attend",
        "self, query_states, key_states, value_states, forward_metadata",
        render_case("standalone/attend", case),
        "attn_output",
    )
    prompts = case["prompts"]
    longest, rows = max(prompts) + case["steps"], len(prompts)
    kv = scope["PagedKV"](rows, longest, case["block"], place.device)
    me = types.SimpleNamespace(
        num_heads_per_rank=n,
        num_key_value_heads_per_rank=nkv,
        head_dim=dim,
        scaling=0.7 * dim**-0.5,
        sliding_window=window,
        k_cache=torch.full(kv.shape(nkv, dim), float("nan"), dtype=place.dtype, device=place.device),
        v_cache=torch.full(kv.shape(nkv, dim), float("nan"), dtype=place.dtype, device=place.device),
    )
    query = [draw(10 + r, longest, n, dim).to(place.dtype) for r in range(rows)]
    key = [draw(30 + r, longest, nkv, dim).to(place.dtype) for r in range(rows)]
    value = [draw(50 + r, longest, nkv, dim).to(place.dtype) for r in range(rows)]
    worst, lengths = 0.0, [0] * rows
    for step in range(case["steps"] + 1):
        counts = prompts if step == 0 else [1] * rows
        width = max(counts)
        pads = [(width - c if case["left"] else 0, 0 if case["left"] else width - c) for c in counts]
        rows_of_mask = [[0] * a + [1] * c + [0] * b for c, (a, b) in zip(counts, pads, strict=True)]
        mask = torch.tensor(rows_of_mask, device=place.device)
        meta = kv.prefill(mask) if step == 0 else kv.decode(torch.tensor(lengths, device=place.device))

        spans = tuple(zip(counts, lengths, pads, strict=True))

        def padded(source: list[Any], spans: Any = spans, width: int = width) -> Any:
            out = torch.full((rows, width, *source[0].shape[1:]), float("nan"), dtype=place.dtype)
            for r, (c, at, (before, _)) in enumerate(spans):
                out[r, before : before + c] = source[r][at : at + c]
            return out.to(place.device)

        out = attend(me, padded(query), padded(key), padded(value), meta)
        for r, c in enumerate(counts):
            end = lengths[r] + c
            wanted = attention(query[r][lengths[r] : end], key[r][:end], value[r][:end], lengths[r], me.scaling, window)
            worst = max(worst, relative(out[r, pads[r][0] : pads[r][0] + c], wanted))
        lengths = [a + c for a, c in zip(lengths, counts, strict=True)]
    return worst
