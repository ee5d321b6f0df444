"""Latent attention (MLA) of a standalone model: the seam of framework mode, with caches that come as arguments."""

from __future__ import annotations

from dataclasses import replace

from kvskill.analyzer.modeling.facts import Seam
from kvskill.analyzer.modeling.mla import MlaFacts, find_mla
from kvskill.analyzer.modeling.mla_parts import Fingerprint, fingerprint
from kvskill.analyzer.modeling.reps import RepRun
from kvskill.analyzer.modeling.seam import SeamError
from kvskill.analyzer.modeling.trace import ancestors
from kvskill.analyzer.modeling.values import Instance, Tensor
from kvskill.diagnostics import Diagnostic, Severity

__all__ = ["find_latent"]

_BY_HAND = "Convert this class by hand (`kvskill template show standalone/latent_attend`)."


def find_latent(mine: list[Instance], reps: list[RepRun]) -> tuple[Seam, MlaFacts] | None:
    """The seam and facts of a latent attention class; the seam's caches are named as the handed pair names them
    ("k" is the first of the pair). None when it is no latent attention; raises SeamError where it is, and something
    is not certain.
    """
    found = find_mla(mine, reps)
    if found is None:
        return None
    seam, mla = found
    if mla.only_fused:
        raise _blocking(reps[0], "writes rows by the fused norm, rotary and cache operator")
    latent, rope = _written(reps)
    return replace(seam, k_cache=latent, v_cache=rope), mla


def _written(reps: list[RepRun]) -> tuple[str, str]:
    """Which of the pair holds the latent, and which the rope part; the same in every run."""
    names: set[tuple[str, str]] = set()
    for rep in reps:
        mark = fingerprint(rep)
        assert mark is not None
        latent = {n for w in rep.writes if (n := _name(w.cache)) and _is_latent(w.value, mark)}
        rope = {n for w in rep.writes if (n := _name(w.cache)) and _is_rope(w.value, mark)}
        if len(latent) != 1 or len(rope) != 1 or latent == rope or len(rep.writes) != 2:
            raise _blocking(rep, "does not keep the latent and the rope part in one tensor each")
        names.add((latent.pop(), rope.pop()))
    if len(names) != 1:
        raise _blocking(reps[0], "keeps its parts in another order in decode")
    return names.pop()


def _name(cache: Tensor) -> str | None:
    name = cache.attrs.get("name")
    return name if isinstance(name, str) else None


def _is_latent(value: Tensor, mark: Fingerprint) -> bool:
    """The normalised latent, not what the up projection makes of it, and no rope part in it."""
    above = ancestors([value])
    up = any(mark.up_module in (t.attrs.get("module"), t.attrs.get("owner")) for t in above)
    return mark.normed in above and mark.rope_in not in above and not up


def _is_rope(value: Tensor, mark: Fingerprint) -> bool:
    above = ancestors([value])
    return mark.rope_in in above and mark.raw not in above


def _blocking(rep: RepRun, what: str) -> SeamError:
    cls = rep.inst.cls
    fact = f"{cls.name} is latent attention and {what}."
    node = rep.writes[0].node if rep.writes else cls.node
    file = rep.writes[0].frame.file if rep.writes and rep.writes[0].frame is not None else cls.file
    return SeamError(Diagnostic("KV292", Severity.BLOCKING, fact, _BY_HAND, file.span(node)))
