"""Weights reach the target as the framework loads them: through the model's own `load_weights`.

Every parameter is filled with NaN first, so that what the checkpoint did not reach is known. Where no HF
checkpoint exists ("named"), parameters are filled by their own names, the same in every party.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["hook_loading"]


def hook_loading(job: dict[str, Any], result: dict[str, Any]) -> None:
    """Wrap `load_weights` of the model classes of this job."""
    modeling = importlib.import_module(job["modeling_module"])
    result["unloaded"] = {}
    names = [job["causal_lm"]] + ([job["mtp"]] if job["mtp"] and job["next_n"] else [])
    wrapped: set[str] = set()
    for name in names:
        cls = getattr(modeling, name)
        owner = next((c for c in cls.__mro__ if "load_weights" in vars(c)), cls)
        if owner.__qualname__ in wrapped:
            continue
        wrapped.add(owner.__qualname__)
        _wrap(owner, job, result)


def _wrap(owner: Any, job: dict[str, Any], result: dict[str, Any]) -> None:
    import torch

    from kvskill.verifier.child.weights import fill_named

    original = getattr(owner, "load_weights", None)
    seed = int(job["seed"])

    def load_weights(self: Any, weights: Any) -> Any:
        named = dict(self.named_parameters())
        floats = {n: p for n, p in named.items() if p.is_floating_point()}
        if job["weights"] == "named" or original is None:
            result["named_weights"] = True
            fill_named(floats, seed)
            return set(named)
        with torch.no_grad():
            for parameter in floats.values():
                parameter.fill_(float("nan"))
            loaded = original(self, weights)
            left = {n: p for n, p in floats.items() if bool(p.isnan().any())}
            if getattr(getattr(self, "config", None), "tie_word_embeddings", False):
                _tie(left, floats)
        # a class may be main model and draft model in turn: only the draft's own layers have no HF name
        kind = "mtp" if type(self).__name__ == job["mtp"] else "main"
        result["unloaded"].setdefault(kind, []).extend(sorted(left))
        fill_named(left, seed)
        return loaded

    owner.load_weights = load_weights


def _tie(left: dict[str, Any], floats: dict[str, Any]) -> None:
    """A tied checkpoint has no head of its own: a head that waits for the embedding gets it here."""
    for name in [n for n in left if n.endswith("lm_head.weight")]:
        for other, value in floats.items():
            if other not in left and "embed" in other and value.shape == left[name].shape:
                left.pop(name).copy_(value)
                break
