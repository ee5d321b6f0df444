"""The analysis of a standalone model that is paged by hand already: a manifest that says so, and its hazards."""

from __future__ import annotations

from typing import Literal

from kvskill.analyzer.assemble import ordered, paged_manifest
from kvskill.analyzer.gather import Gathered
from kvskill.analyzer.modeling.facts import ModelFacts
from kvskill.analyzer.runner.recognise import Recognised, recognise
from kvskill.diagnostics import Diagnostic
from kvskill.manifest import Decision, Evidence, Manifest

__all__ = ["by_hand", "by_hand_manifest"]


def by_hand(base: Gathered) -> Recognised | None:
    """What was recognised when the model is standalone and paged by hand; None otherwise."""
    if base.deployment.decision.value != "standalone":
        return None
    found = recognise(base.place.model_dir, base.place.root)
    return found if found.mode == "paged" else None


def by_hand_manifest(base: Gathered, found: Recognised) -> tuple[Manifest, tuple[Diagnostic, ...]]:
    """The manifest and the findings; nothing blocks, for nothing is converted."""
    code = base.code
    entry = code.program.find(code.entry) if code.entry else None
    facts = ModelFacts(code.program, "paged-by-hand", entry=entry)
    yamls = (f for y in base.yamls for f in y.findings)
    notes = (*base.findings, *base.deployment.findings, *yamls, *found.findings)
    findings = tuple(ordered(notes, paged=True))
    manifest = paged_manifest(base, facts, findings)
    seen = Evidence(kind="code", ref=str(found.where), note=f"{found.title}: nothing to convert")
    mode = Decision[Literal["paged", "legacy", "out-of-scope"]](value="paged", source="code", evidence=(seen,))
    absorb = Decision[bool](value=found.latent, source="code", evidence=(seen,))
    model = manifest.model.model_copy(update={"state": "paged-by-hand"})
    return manifest.model_copy(update={"model": model, "kv_mode": mode, "mla_absorb": absorb}), findings
