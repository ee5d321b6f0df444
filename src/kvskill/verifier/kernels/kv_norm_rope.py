"""npu_kv_rmsnorm_rope_cache, v1 and v2: norm of the latent, rope of the rest, both written to paged caches.

Operator sheet, section 12.1. Mind the order of the caches: rope first, latent second. v1 writes its caches too,
although its schema does not say so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvskill.verifier.backend.context import current
from kvskill.verifier.kernels.errors import UnmodelledCall
from kvskill.verifier.kernels.norms import rms
from kvskill.verifier.kernels.numeric import up
from kvskill.verifier.kernels.registry import kernel
from kvskill.verifier.kernels.rotary import rope_of_pairs

__all__ = ["nz_width", "place_of"]

_OP = "npu_kv_rmsnorm_rope_cache"
_Pair = tuple[torch.Tensor, torch.Tensor]
_Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def nz_width(cache: torch.Tensor) -> int:
    """x of the NZ form: 32 bytes of the deployed dtype, which is 16 bits wide for every float here."""
    return 32 if cache.dtype == torch.int8 else 16


def place_of(mode: str, index: list[int], b: int, s: int, length: int, block_size: int) -> tuple[int, int] | None:
    """(block, row) of token s of batch row b, None for a skipped one. `index` is flat."""
    if "BLK" in mode:
        pages = -(-length // block_size)
        start = index[b * pages + s // block_size]
        return None if start < 0 else (start // block_size, s % block_size)
    slot = index[b * length + s]
    return None if slot < 0 else divmod(slot, block_size)


@dataclass(frozen=True)
class _Call:
    kv: torch.Tensor
    gamma: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    index: torch.Tensor
    k_cache: torch.Tensor
    ckv_cache: torch.Tensor
    k_rope_scale: torch.Tensor | None
    c_kv_scale: torch.Tensor | None
    v: torch.Tensor | None
    epsilon: float
    cache_mode: str
    is_output_kv: bool

    def run(self) -> _Pair:
        """Write both caches; -> (k_embed, y) in kv's dtype, undefined when `is_output_kv` is False."""
        k, y = self._values()
        self._write(self.k_cache, _quantised(k, self.k_rope_scale))
        self._write(self.ckv_cache, _quantised(y, self.c_kv_scale))
        k, y = k.to(self.kv.dtype), y.to(self.kv.dtype)
        if self.is_output_kv:
            return k, y
        fill = float("nan") if current().undefined == "nan" else 0.0
        return torch.full_like(k, fill), torch.full_like(y, fill)

    def _values(self) -> _Pair:
        kv = up(self.kv)
        cos, sin = up(self.cos, kv.dtype), up(self.sin, kv.dtype)
        width = self.cos.shape[-1]
        if self.v is None:
            latent, rope = kv.split([kv.shape[-1] - width, width], dim=-1)
            return rope_of_pairs(rope, cos, sin), rms(latent, self.gamma, self.epsilon)[0]
        normed = rms(kv, self.gamma, self.epsilon)[0]
        rope, rest = normed.split([width, kv.shape[-1] - width], dim=-1)
        return torch.cat((rope_of_pairs(rope, cos, sin), rest), dim=-1), up(self.v, kv.dtype)

    def _write(self, cache: torch.Tensor, rows: torch.Tensor) -> None:
        mode, flat = self.cache_mode, self.index.flatten().tolist()
        batch, _, length, _ = self.kv.shape
        for b in range(batch):
            for s in range(length):
                row = rows[b, 0, s].to(cache.dtype)
                if mode == "Norm":
                    cache[b, 0, flat[b * length + s]] = row
                    continue
                place = place_of(mode, flat, b, s, length, cache.shape[1])
                if place is None:
                    continue
                block, offset = place
                if block >= cache.shape[0]:
                    raise IndexError(f"{_OP}: block {block} of {cache.shape[0]}")
                if mode.endswith("NZ"):
                    x = nz_width(cache)
                    nz = cache.view(cache.shape[0], 1, cache.shape[-1] // x, cache.shape[1], x)
                    nz[block, 0, :, offset] = row.reshape(-1, x)
                else:
                    cache[block, offset, 0] = row


_MODES = frozenset({"Norm", "PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ"})


def _quantised(rows: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    if scale is None:
        return rows
    return (rows * up(scale, rows.dtype)).round().clamp(-128, 127).to(torch.int8)


@kernel("npu_kv_rmsnorm_rope_cache_v2")
def kv_rmsnorm_rope_cache_v2(
    kv: torch.Tensor, gamma: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, index: torch.Tensor,
    k_cache: torch.Tensor, ckv_cache: torch.Tensor, k_rope_scale: torch.Tensor | None = None,
    c_kv_scale: torch.Tensor | None = None, v: torch.Tensor | None = None, epsilon: float = 1e-5,
    cache_mode: str = "Norm", is_output_kv: bool = False,
) -> _Pair:  # fmt: skip
    """-> (k_embed, y); both caches written.

    kv [B, 1, S, 512 + 64]: y = rms(first 512) * gamma -> ckv_cache, k_embed = rope(last 64) -> k_cache. With v
    [B, 1, S, 128], kv [B, 1, S, 192]: all 192 normalised, the first 64 roped -> k_cache; v -> ckv_cache.
    Negative slots are skipped.
    """
    if cache_mode not in _MODES:
        raise UnmodelledCall(_OP, f"cache_mode {cache_mode!r}")
    call = _Call(
        kv, gamma, cos, sin, index, k_cache, ckv_cache, k_rope_scale, c_kv_scale, v, epsilon, cache_mode, is_output_kv
    )  # fmt: skip
    return call.run()


@kernel("npu_kv_rmsnorm_rope_cache", undeclared=("k_cache", "ckv_cache"))
def kv_rmsnorm_rope_cache(
    kv: torch.Tensor, gamma: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, index: torch.Tensor,
    k_cache: torch.Tensor, ckv_cache: torch.Tensor, k_rope_scale: torch.Tensor | None = None,
    c_kv_scale: torch.Tensor | None = None, v: torch.Tensor | None = None, epsilon: float = 1e-5,
    cache_mode: str = "Norm", is_output_kv: bool = False,
) -> _Four:  # fmt: skip
    """-> (k_cache, ckv_cache, k_embed, y); the caches are written in place and returned."""
    k, y = kv_rmsnorm_rope_cache_v2(
        kv, gamma, cos, sin, index, k_cache, ckv_cache, k_rope_scale, c_kv_scale, v, epsilon, cache_mode, is_output_kv
    )  # fmt: skip
    return k_cache, ckv_cache, k, y


@kernel("npu_kv_rmsnorm_rope_cache_v2_functional")
def kv_rmsnorm_rope_cache_v2_functional(
    kv: torch.Tensor, gamma: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, index: torch.Tensor,
    k_cache: torch.Tensor, ckv_cache: torch.Tensor, k_rope_scale: torch.Tensor | None = None,
    c_kv_scale: torch.Tensor | None = None, v: torch.Tensor | None = None, epsilon: float = 1e-5,
    cache_mode: str = "Norm", is_output_kv: bool = False,
) -> _Four:  # fmt: skip
    """-> (k_embed, y, new k_cache, new ckv_cache)."""
    new_k, new_ckv = k_cache.clone(), ckv_cache.clone()
    k, y = kv_rmsnorm_rope_cache_v2(
        kv, gamma, cos, sin, index, new_k, new_ckv, k_rope_scale, c_kv_scale, v, epsilon, cache_mode, is_output_kv
    )  # fmt: skip
    return k, y, new_k, new_ckv
