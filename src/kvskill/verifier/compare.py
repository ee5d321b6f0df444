"""Figures: how far two parties' logits are apart, and in which layer the difference begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["OUTLIERS", "Comparison", "compare", "distance", "first_difference", "largest", "table_tolerance"]

TOLERANCE = {"fp32": 1e-4, "bf16": 4e-2}
# In bfloat16 a router may choose another expert where two are nearly tied: one position in ten may exceed the bound.
OUTLIERS = {"fp32": 0.0, "bf16": 0.1}


@dataclass(frozen=True)
class Comparison:
    """One request against one oracle. `relative` is max |a - b| / max |reference logit| over the positions;
    `prefill` is that of the prompt's last position and before, `decode` of those after it (None where there is none).
    """

    oracle: str
    request: int
    prompt: int
    positions: int
    relative: float
    nan: int
    tolerance: float
    first_bad: int | None
    missing: int = 0
    outliers: int = 0
    outliers_allowed: int = 0
    prefill: float | None = None
    decode: float | None = None

    @property
    def ok(self) -> bool:
        """Within the tolerance (but for the outliers allowed), no NaN, every position present."""
        complete = self.nan == 0 and self.missing == 0 and self.positions > 0
        return complete and self.outliers <= self.outliers_allowed


def table_tolerance(dtype: str, given: float | None) -> float:
    """The bound for a dtype, unless one was given."""
    return given if given is not None else TOLERANCE[dtype]


def _rows(arrays: dict[str, Any], request: int, name: str = "logits") -> dict[int, Any]:
    where = "positions" if name == "logits" else f"{name}_positions"
    key = f"{name}/{request}"
    if key not in arrays:
        return {}
    return dict(zip(arrays[f"{where}/{request}"].tolist(), arrays[key], strict=True))


def compare(
    oracle: str,
    reference: dict[str, Any],
    tested: dict[str, Any],
    prompts: list[int],
    tolerance: float,
    name: str = "logits",
    outliers: float = 0.0,
) -> list[Comparison]:
    """One Comparison per request. A position that the oracle has and the tested party lacks counts as missing,
    up to the last position that the tested party reached."""
    out = []
    for request, prompt in enumerate(prompts):
        ref, got = _rows(reference, request, name), _rows(tested, request, name)
        common = sorted(set(ref) & set(got))
        scale = max((largest(ref[p]) for p in common), default=1.0) or 1.0
        nan, first, above = 0, None, 0
        differences: dict[int, float] = {}
        for position in common:
            if np.isnan(got[position]).any() or np.isnan(ref[position]).any():
                nan += 1
                first = position if first is None else first
                continue
            difference = distance(ref[position], got[position]) / scale
            if difference > tolerance:
                above += 1
                first = position if first is None else first
            differences[position] = difference
        last = max(got, default=-1)
        missing = sum(1 for p in ref if p not in got and p <= last)
        out.append(
            Comparison(
                oracle=oracle,
                request=request,
                prompt=prompt,
                positions=len(common),
                relative=max(differences.values(), default=0.0),
                nan=nan,
                tolerance=tolerance,
                first_bad=first,
                missing=missing,
                outliers=above,
                outliers_allowed=int(np.ceil(outliers * len(common))),
                prefill=max((d for p, d in differences.items() if p < prompt), default=None),
                decode=max((d for p, d in differences.items() if p >= prompt), default=None),
            )
        )
    return out


def largest(row: Any) -> float:
    """The largest magnitude of the finite numbers."""
    finite = np.abs(row[np.isfinite(row)])
    return float(finite.max()) if finite.size else 0.0


def distance(ref: Any, got: Any) -> float:
    """The largest difference; infinities (a masked vocabulary) must be the same ones, and have no distance then."""
    endless = np.isinf(ref) | np.isinf(got)
    if (ref[endless] != got[endless]).any():
        return float("inf")
    return largest(np.where(endless, 0.0, got) - np.where(endless, 0.0, ref))


def first_difference(
    reference: dict[str, Any], tested: dict[str, Any], request: int, position: int, tolerance: float
) -> tuple[int, str] | None:
    """(layer, "attention" or "layer") where the hidden states of this position first differ, if they were kept."""
    layers: dict[int, dict[str, float]] = {}
    prefix = f"hidden/{request}/"
    for key in tested:
        if not key.startswith(prefix) or key not in reference:
            continue
        where = tested.get(f"hidden_positions/{request}/{key[len(prefix) :]}")
        at = reference.get(f"hidden_positions/{request}/{key[len(prefix) :]}", reference.get(f"positions/{request}"))
        if where is None or at is None or position not in where or position not in at:
            continue
        ours = tested[key][:, int(np.where(where == position)[0][0])]
        theirs = reference[key][:, int(np.where(at == position)[0][0])]
        if ours.shape[-1] != theirs.shape[-1]:
            continue
        layer, kind = key[len(prefix) :].split(".")
        layers.setdefault(int(layer), {})[kind] = _nearest(ours, theirs)
    for number in sorted(layers):
        for kind in ("attention", "layer"):
            if layers[number].get(kind, 0.0) > tolerance:
                return number, kind
    return None


def _nearest(ours: Any, theirs: Any) -> float:
    best = float("inf")
    for a in ours:
        for b in theirs:
            if np.isnan(a).any():
                continue
            best = min(best, distance(b, a) / (largest(b) or 1.0))
    return best
