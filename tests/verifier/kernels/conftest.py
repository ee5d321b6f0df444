"""Calls of kernels through the real binder, and an attention oracle that shares no code with them.

The oracle is a scalar loop in Python floats over (sequence, head, query, key); it takes the visible set as a
predicate. Packing into layouts and pages is done here by plain loops over tokens.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # an installed torch_npu would load with torch, without CANN
torch = pytest.importorskip("torch")

from kvskill.verifier.backend.binder import implementation  # noqa: E402
from kvskill.verifier.backend.context import OpContext, using  # noqa: E402
from kvskill.verifier.backend.schemas import load_table  # noqa: E402
from kvskill.verifier.kernels.registry import load_kernels  # noqa: E402

RELEASE = "2.13.0"


def call(op: str, *args: Any, context: OpContext | None = None, rules: bool = False, **kwargs: Any) -> Any:
    """Call the kernel of `op` as the dispatcher would: schema defaults, refusal of what is not modelled."""
    schema = torch._C.parse_schema("npu::" + load_table().schemas(RELEASE)[op])
    names = {a.name for a in schema.arguments}
    assert set(kwargs) <= names, set(kwargs) - names
    context = context or OpContext(enforce=rules)
    with using(context):
        return implementation(schema, load_kernels()[op])(*args, **kwargs)


@dataclass(frozen=True)
class Case:
    """One attention problem; `visible(i, j, s_q, s_kv)` says which keys a query sees."""

    q_len: tuple[int, ...]
    kv_len: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    value_dim: int = 8
    rope: int = 0
    scale: float = 0.3
    layout: str = "TND"
    pages: int = 0  # 0 unpaged, else rank of the cache
    block: int = 4
    mode: int = 0
    pre: int = 2147483647
    nxt: int = 2147483647
    seed: int = 0
    dtype: Any = torch.float64


def triangle() -> Any:
    rows = torch.arange(2048)
    return rows[None, :] > rows[:, None]  # True strictly above the diagonal


def formula(case: Case) -> Callable[[int, int, int, int], bool]:
    """The visible sets of the operator sheet, section 3."""
    m, p, n = case.mode, case.pre, case.nxt
    return {
        0: lambda i, j, q, kv: True,
        2: lambda i, j, q, kv: j <= i,
        3: lambda i, j, q, kv: j <= i + kv - q,
        4: lambda i, j, q, kv: i + kv - q - p <= j <= i + kv - q + n,
    }[m]


def data(case: Case) -> SimpleNamespace:
    """Random q [Sq, Nq, D], k [Skv, Nkv, D], v, and rope parts, per sequence."""
    g = torch.Generator().manual_seed(case.seed)

    def rand(*shape: int) -> Any:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(case.dtype)

    return SimpleNamespace(
        q=[rand(s, case.heads, case.dim) for s in case.q_len],
        k=[rand(s, case.kv_heads, case.dim) for s in case.kv_len],
        v=[rand(s, case.kv_heads, case.value_dim) for s in case.kv_len],
        qr=[rand(s, case.heads, case.rope) for s in case.q_len] if case.rope else None,
        kr=[rand(s, case.kv_heads, case.rope) for s in case.kv_len] if case.rope else None,
    )


def expected(case: Case, d: SimpleNamespace, visible: Any = None, sink: Any = None) -> tuple[list[Any], list[Any]]:
    """(outputs [Sq, Nq, Dv], lse [Sq, Nq]) per sequence by scalar loops."""
    visible = visible or formula(case)
    outs, lses = [], []
    for b in range(len(case.q_len)):
        out = torch.zeros(case.q_len[b], case.heads, case.value_dim, dtype=torch.float64)
        lse = torch.full((case.q_len[b], case.heads), math.inf, dtype=torch.float64)
        for i in range(case.q_len[b]):
            for h in range(case.heads):
                g = h // (case.heads // case.kv_heads)
                scores = {}
                for j in range(case.kv_len[b]):
                    if visible(i, j, case.q_len[b], case.kv_len[b]):
                        s = sum(float(x) * float(y) for x, y in zip(d.q[b][i, h], d.k[b][j, g], strict=True))
                        if d.qr is not None:
                            pairs = zip(d.qr[b][i, h], d.kr[b][j, g], strict=True)
                            s += sum(float(x) * float(y) for x, y in pairs)
                        scores[j] = s * case.scale
                if not scores:
                    continue
                top = max(scores.values())
                total = sum(math.exp(s - top) for s in scores.values())
                lse[i, h] = math.log(total) + top
                if sink is not None:
                    total += math.exp(float(sink[h]) - top)
                for j, s in scores.items():
                    out[i, h] += math.exp(s - top) / total * d.v[b][j, g].double()
        outs.append(out)
        lses.append(lse)
    return outs, lses


def dense(parts: list[Any], form: str) -> Any:
    """Equal-length parts [S, N, D] as one tensor of a dense layout; shorter ones are padded with NaN."""
    longest = max(len(p) for p in parts)
    rows = torch.full((len(parts), longest, *parts[0].shape[1:]), math.nan, dtype=parts[0].dtype)
    for b, p in enumerate(parts):
        rows[b, : len(p)] = p
    if form == "BSH":
        return rows.flatten(2)
    return rows if form == "BSND" else rows.transpose(1, 2).contiguous()


def packed(parts: list[Any], form: str) -> Any:
    rows = torch.cat(parts)
    return rows if form == "TND" else rows.transpose(0, 1).contiguous()


def paged(parts: list[Any], case: Case, table: Any, blocks: int) -> Any:
    """The cache of rank `case.pages`, token by token; every slot that no token owns is NaN."""
    n, d = parts[0].shape[1:]
    shape = {3: (blocks, case.block, n * d), 4: (blocks, n, case.block, d), 5: (blocks, n, d // 4, case.block, 4)}
    cache = torch.full(shape[case.pages], math.nan, dtype=parts[0].dtype)
    for b, part in enumerate(parts):
        for p, token in enumerate(part):
            block, row = int(table[b, p // case.block]), p % case.block
            for h in range(n):
                for e in range(d):
                    if case.pages == 3:
                        cache[block, row, h * d + e] = token[h, e]
                    elif case.pages == 4:
                        cache[block, h, row, e] = token[h, e]
                    else:
                        cache[block, h, e // 4, row, e % 4] = token[h, e]
    return cache


def block_table(case: Case) -> tuple[Any, int]:
    """Shuffled block ids from 1 on (0 is the null block), rows padded with 0."""
    need = [-(-s // case.block) for s in case.kv_len]
    g = torch.Generator().manual_seed(case.seed + 1)
    ids = (torch.randperm(sum(need), generator=g) + 1).tolist()
    table = torch.zeros(len(need), max(need) + 1, dtype=torch.int32)
    for b, n in enumerate(need):
        for k in range(n):
            table[b, k] = ids.pop()
    return table, sum(need) + 1


def arguments(case: Case, d: SimpleNamespace, version: int = 2, **more: Any) -> dict[str, Any]:
    """Keyword arguments of the operator for a case."""
    form = case.layout.split("_")[0]
    is_packed = form in ("TND", "NTD")
    put = packed if is_packed else dense
    args: dict[str, Any] = {"query": put(d.q, form)}
    if case.pages:
        table, blocks = block_table(case)
        args.update(key=paged(d.k, case, table, blocks), value=paged(d.v, case, table, blocks))
        args.update(block_table=table, block_size=case.block)
    else:
        args.update(key=put(d.k, form), value=put(d.v, form))
    if d.qr is not None:
        args["query_rope"] = put(d.qr, form)
        args["key_rope"] = paged(d.kr, case, table, blocks) if case.pages else put(d.kr, form)
    q_len, kv_len = list(case.q_len), list(case.kv_len)
    if is_packed:
        q_len = [sum(q_len[: b + 1]) for b in range(len(q_len))]
        if not case.pages:
            kv_len = [sum(kv_len[: b + 1]) for b in range(len(kv_len))]
    v1 = version == 1
    args.update({
        "actual_seq_lengths" if v1 else "actual_seq_qlen": q_len,
        "actual_seq_lengths_kv" if v1 else "actual_seq_kvlen": kv_len,
        "num_heads" if v1 else "num_query_heads": case.heads,
        "num_key_value_heads": case.kv_heads,
        "scale" if v1 else "softmax_scale": case.scale,
        "input_layout": case.layout,
        "sparse_mode": case.mode,
        "pre_tokens": case.pre,
        "next_tokens": case.nxt,
    })  # fmt: skip
    if case.mode in (2, 3, 4):
        args["atten_mask"] = triangle()
    return {**args, **more}


def unpack(out: Any, case: Case) -> list[Any]:
    """The output as [Sq, Nq, Dv] per sequence."""
    form = case.layout.split("_")[-1]
    if form in ("TND", "NTD"):
        rows = out if form == "TND" else out.transpose(0, 1)
        return list(rows.split(list(case.q_len)))
    if form == "BSH":
        out = out.unflatten(2, (case.heads, -1))
    elif form == "BNSD":
        out = out.transpose(1, 2)
    elif form == "NBSD":
        out = out.permute(1, 2, 0, 3)
    return [out[b, :n] for b, n in enumerate(case.q_len)]


def attend(case: Case, d: Any = None, version: int = 2, context: Any = None, rules: bool = False, **more: Any) -> Any:
    """(outputs per sequence, lse tensor) of the kernel."""
    op = "npu_fused_infer_attention_score" + ("_v2" if version == 2 else "")
    args = arguments(case, d or data(case), version, **more)
    positional = [args.pop(n) for n in ("query", "key", "value")]
    out, lse = call(op, *positional, context=context, rules=rules, **args)
    return unpack(out, case), lse


def unpack_bsnd(out: Any, layout: str) -> list[Any]:
    """A result of npu_fusion_attention with 4 heads, two sequences of 4 tokens, as [S, N, D] per sequence."""
    if layout == "TND":
        return list(out.unflatten(0, (2, 4)))
    if layout == "SBH":
        out = out.transpose(0, 1)
    rows = out.transpose(1, 2) if layout == "BNSD" else out if layout == "BSND" else out.unflatten(2, (4, -1))
    return list(rows)


@pytest.fixture(scope="session")
def fa() -> SimpleNamespace:
    """The attention helpers."""
    return SimpleNamespace(
        Case=Case, data=data, expected=expected, attend=attend, arguments=arguments, triangle=triangle,
        formula=formula, replace=replace, paged=paged, block_table=block_table, unpack=unpack,
        unpack_bsnd=unpack_bsnd,
    )  # fmt: skip


@pytest.fixture(scope="session", name="call")
def call_fixture() -> Callable[..., Any]:
    """`call(op, ...)` of this file."""
    return call
