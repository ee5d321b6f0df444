"""Operator limits of the target's release, and which route a head dim can take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvskill.analyzer.data import load_json, load_yaml

__all__ = ["Limits", "Route", "limits_for", "mla_route", "route"]

# tnd: packed both phases; bnsd-bsh: BNSD prefill, BSH decode; mla: latent; none: no layout takes it
Route = Literal["tnd", "bnsd-bsh", "mla", "none"]


@dataclass(frozen=True)
class Limits:
    """The limits of one named profile (`selection_limits.yaml`)."""

    profile: str
    values: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.values[key]


def limits_for(releases: Sequence[str]) -> Limits:
    """The profile of the releases' train: the oldest where they span several, the newest when none is
    known.
    """
    data = load_yaml("selection_limits.yaml")
    of_train = {t: name for name, row in data["profiles"].items() for t in row["trains"]}
    table = load_json("op_availability.json")["releases"]
    names = [of_train[table[r]] for r in releases if r in table and table[r] in of_train]
    order = list(data["profiles"])
    chosen = min(names, key=order.index) if names else order[-1]
    return Limits(chosen, data["limits"][chosen])


def route(k_dim: int, v_dim: int, *, window: bool, limits: Limits) -> tuple[Route, str]:
    """The layout route of a head geometry, and the reason in words. `v_dim` 0 means V is the K tensor."""
    value = v_dim or k_dim
    if k_dim == value and k_dim in limits["tnd_equal_dims"]:
        if not window or value in limits["tnd_window_v_dims"]:
            return "tnd", f"TND takes head dim {k_dim} ({limits.profile})"
    if [k_dim, value] in limits["tnd_split_dims"] and not window:
        return "tnd", f"TND takes K dim {k_dim} with V dim {value} ({limits.profile})"
    step, most = limits["any_layout_dim_multiple"], limits["any_layout_max_dim"]
    if max(k_dim, value) > most or k_dim % step or value % step:
        return (
            "none",
            f"every layout wants dims of at most {most} and multiples of {step}, not {k_dim}/{value}",
        )
    if k_dim != value:
        return "none", f"no layout takes K dim {k_dim} with V dim {value}"
    return "bnsd-bsh", f"TND does not take head dim {k_dim} ({limits.profile}); BNSD and BSH do"


def mla_route(latent: int, rope: int, limits: Limits) -> tuple[Route, str]:
    """Whether the absorbed path takes a latent geometry."""
    if latent in limits["mla_latent"] and rope in limits["mla_rope"]:
        return "mla", f"absorbed attention takes latent {latent} with rotary part {rope} ({limits.profile})"
    return "none", (
        f"absorbed attention takes latent {limits['mla_latent']} with rotary part {limits['mla_rope']}, "
        f"not {latent}/{rope} ({limits.profile})"
    )
