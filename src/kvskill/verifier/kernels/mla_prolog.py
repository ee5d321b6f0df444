"""npu_mla_prolog_v3 without quantisation (operator sheet, section 12.3).

    cq = rms(x Wdq) * gamma_cq * qc_qr_scale;  [qc | qr] = cq Wuq_qr per head
    query = qc Wuk;  query_rope = rope(qr)
    ckv = rms((x Wdkv_kr)[:512]) * gamma_ckv * kc_scale -> kv_cache;  kr = rope((x Wdkv_kr)[512:]) -> kr_cache
"""

from __future__ import annotations

import torch

from kvskill.verifier.kernels.errors import UnmodelledCall
from kvskill.verifier.kernels.kv_norm_rope import nz_width
from kvskill.verifier.kernels.norms import rms
from kvskill.verifier.kernels.numeric import up
from kvskill.verifier.kernels.registry import kernel
from kvskill.verifier.kernels.rotary import rope_of_pairs

__all__ = ["mla_prolog_v3"]

_OP = "npu_mla_prolog_v3"
_Five = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
_MODES = frozenset({"PA_BSND", "PA_NZ", "PA_BLK_BSND", "PA_BLK_NZ"})


@kernel(_OP)
def mla_prolog_v3(
    token_x: torch.Tensor, weight_dq: torch.Tensor, weight_uq_qr: torch.Tensor, weight_uk: torch.Tensor,
    weight_dkv_kr: torch.Tensor, rmsnorm_gamma_cq: torch.Tensor, rmsnorm_gamma_ckv: torch.Tensor,
    rope_sin: torch.Tensor, rope_cos: torch.Tensor, kv_cache: torch.Tensor, kr_cache: torch.Tensor,
    cache_index: torch.Tensor | None = None, rmsnorm_epsilon_cq: float = 1e-5,
    rmsnorm_epsilon_ckv: float = 1e-5, cache_mode: str = "PA_BSND", query_norm_flag: bool = False,
    qc_qr_scale: float = 1.0, kc_scale: float = 1.0,
) -> _Five:  # fmt: skip
    """-> (query [.., N, 512], query_rope [.., N, 64], unused, query_norm, unused); caches are written.

    token_x [T, He] or [B, S, He]; sin before cos, [.., 64]; cache_index [T] or [B, S] holds flat slots, for
    PA_BLK_* [B, ceil(S / block_size)] block ids.
    """
    if cache_mode not in _MODES or cache_index is None:
        raise UnmodelledCall(_OP, f"cache_mode {cache_mode!r} with cache_index {cache_index is not None}")
    if not all(t.is_floating_point() for t in (token_x, weight_dq, weight_uq_qr, weight_dkv_kr)):
        raise UnmodelledCall(_OP, "quantised tokens or weights")
    lead = token_x.shape[:-1]
    x = up(token_x).reshape(-1, token_x.shape[-1])
    heads, dim, _ = weight_uk.shape
    kind = x.dtype
    cos, sin = (up(t, kind).reshape(len(x), -1) for t in (rope_cos, rope_sin))
    rope_dim = cos.shape[-1]
    cq = rms(x @ up(weight_dq, kind), rmsnorm_gamma_cq, rmsnorm_epsilon_cq)[0] * qc_qr_scale
    both = (cq @ up(weight_uq_qr, kind)).reshape(len(x), heads, dim + rope_dim)
    query = torch.einsum("tnd,ndh->tnh", both[..., :dim], up(weight_uk, kind))
    query_rope = rope_of_pairs(both[..., dim:], cos[:, None], sin[:, None])
    down = x @ up(weight_dkv_kr, kind)
    latent = down.shape[-1] - rope_dim
    ckv = rms(down[:, :latent], rmsnorm_gamma_ckv, rmsnorm_epsilon_ckv)[0] * kc_scale
    kr = rope_of_pairs(down[:, latent:], cos, sin)
    length = lead[-1] if len(lead) == 2 else len(x)
    for cache, rows in ((kv_cache, ckv), (kr_cache, kr)):
        _write(cache, rows, cache_index.flatten().tolist(), cache_mode, length)
    unused = torch.zeros(1, dtype=torch.float32)
    norm = cq.reshape(*lead, -1).to(token_x.dtype) if query_norm_flag else torch.zeros(1, dtype=token_x.dtype)
    shaped = (t.reshape(*lead, heads, -1).to(token_x.dtype).contiguous() for t in (query, query_rope))
    return (*shaped, unused, norm, unused.clone())


@kernel("npu_mla_prolog_v3_functional")
def mla_prolog_v3_functional(
    token_x: torch.Tensor, weight_dq: torch.Tensor, weight_uq_qr: torch.Tensor, weight_uk: torch.Tensor,
    weight_dkv_kr: torch.Tensor, rmsnorm_gamma_cq: torch.Tensor, rmsnorm_gamma_ckv: torch.Tensor,
    rope_sin: torch.Tensor, rope_cos: torch.Tensor, kv_cache: torch.Tensor, kr_cache: torch.Tensor,
    cache_index: torch.Tensor | None = None, rmsnorm_epsilon_cq: float = 1e-5,
    rmsnorm_epsilon_ckv: float = 1e-5, cache_mode: str = "PA_BSND", query_norm_flag: bool = False,
    qc_qr_scale: float = 1.0, kc_scale: float = 1.0,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The same on copies of the caches, which are the last two results."""
    new_kv, new_kr = kv_cache.clone(), kr_cache.clone()
    results = mla_prolog_v3(
        token_x, weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr, rmsnorm_gamma_cq, rmsnorm_gamma_ckv, rope_sin,
        rope_cos, new_kv, new_kr, cache_index, rmsnorm_epsilon_cq, rmsnorm_epsilon_ckv, cache_mode,
        query_norm_flag, qc_qr_scale, kc_scale,
    )  # fmt: skip
    return (*results, new_kv, new_kr)


def _write(cache: torch.Tensor, rows: torch.Tensor, index: list[int], mode: str, length: int) -> None:
    size = cache.shape[1]
    for t, row in enumerate(rows):
        if "BLK" in mode:
            b, s = divmod(t, length)
            block, offset = index[b * -(-length // size) + s // size], s % size
        else:
            block, offset = divmod(index[t], size)
        if block < 0:
            continue
        if block >= cache.shape[0]:
            raise IndexError(f"{_OP}: block {block} of {cache.shape[0]}")
        if mode.endswith("NZ"):
            x = nz_width(cache)
            nz = cache.view(cache.shape[0], cache.shape[-1] // x, size, x)
            nz[block, :, offset] = row.reshape(-1, x).to(cache.dtype)
        else:
            cache[block, offset, 0] = row.to(cache.dtype)
