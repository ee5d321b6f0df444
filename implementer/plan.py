"""The plan: a pure function of facts and manifest. It says what would change, or why nothing will."""

from __future__ import annotations

from dataclasses import dataclass

from kvskill.analyzer.modeling.facts import AttentionFacts, ModelFacts, Seam
from kvskill.analyzer.modeling.values import Instance
from kvskill.diagnostics import Diagnostic, Severity
from kvskill.implementer.edits import EditSet
from kvskill.implementer.framework.attention import convert_attention
from kvskill.implementer.framework.blocks import convert_blocks, convert_phase_tests
from kvskill.implementer.framework.calls import write_additions, write_cuts
from kvskill.implementer.framework.container import convert_containers, find_containers
from kvskill.implementer.framework.context import Context
from kvskill.implementer.framework.deadcode import settle_names, sweep, sweep_again, write_removals
from kvskill.implementer.framework.fields import migrate_fields
from kvskill.implementer.framework.held import drop_held_caches
from kvskill.implementer.framework.interface import add_cache_info, add_imports, drop_init_cache, register_groups
from kvskill.implementer.framework.lasttoken import convert_last_token
from kvskill.implementer.framework.mla import convert_mla, leftover_caches
from kvskill.implementer.framework.mla_model import add_mla_interface
from kvskill.implementer.framework.parallel import guard_parallel_branches
from kvskill.implementer.framework.rotary import convert_rotary
from kvskill.implementer.framework.rows import convert_row_counts
from kvskill.implementer.framework.threading import thread_metadata
from kvskill.implementer.framework.unrun import drop_uncalled, guard_unrun
from kvskill.manifest import Manifest

__all__ = ["Plan", "build_plan"]


@dataclass(frozen=True)
class Plan:
    """Edits by file and findings. With a blocking finding nothing may be written."""

    edits: dict[str, EditSet]
    findings: tuple[Diagnostic, ...]

    @property
    def blocking(self) -> tuple[Diagnostic, ...]:
        return tuple(f for f in self.findings if f.severity in (Severity.BLOCKING, Severity.ERROR))

    def results(self) -> dict[str, bytes]:
        """New contents of the files that change."""
        out = {}
        for shown, edit_set in self.edits.items():
            new = edit_set.result()
            if new != edit_set.file.raw:
                out[shown] = new
        return out


def build_plan(facts: ModelFacts, manifest: Manifest) -> Plan:
    """Plan the conversion to the framework's paged interface."""
    ctx = Context(facts, manifest)
    blocking = [f for f in facts.findings if f.severity is Severity.BLOCKING]
    if blocking or not facts.attentions or facts.prefill is None:
        return Plan({}, tuple(blocking))
    for attention in facts.attentions:
        _convert_one(ctx, attention)
    if facts.form == "paged":  # entries and packed tokens are there already; only the attention was plain
        return _finish(ctx)
    containers = find_containers(facts)
    after = convert_last_token(ctx, containers)
    convert_rotary(ctx, containers)
    sweep(ctx)
    convert_containers(ctx, containers, after)
    sweep_again(ctx)
    convert_blocks(ctx, containers, set())
    convert_row_counts(ctx, containers)
    convert_phase_tests(ctx, containers)
    sweep_again(ctx)
    touched = set(containers.functions) | {id(a.seam.func) for a in facts.attentions}
    touched |= {id(a.entry) for a in facts.attentions}
    touched |= {id(a.mla.twin[0].func) for a in facts.attentions if a.mla is not None and a.mla.twin is not None}
    guard_parallel_branches(ctx, touched)
    guard_unrun(ctx, containers)
    drop_uncalled(ctx)
    if any(a.mla is not None for a in facts.attentions):
        add_mla_interface(ctx)
        leftover_caches(ctx)
    else:
        add_cache_info(ctx)
        drop_init_cache(ctx)
        drop_held_caches(ctx)
    register_groups(ctx)
    return _finish(ctx)


def _finish(ctx: Context) -> Plan:
    """What every plan ends with; turns what was marked into edits."""
    if ctx.facts.form == "paged":
        sweep(ctx)
    migrate_fields(ctx)
    add_imports(ctx)
    settle_names(ctx)
    write_removals(ctx)
    write_cuts(ctx)
    write_additions(ctx)
    return Plan({k: v for k, v in ctx.edits.items() if v.edits}, tuple(dict.fromkeys(ctx.findings)))


def _convert_one(ctx: Context, attention: AttentionFacts) -> None:
    twin = attention.mla.twin if attention.mla is not None else None
    metas: list[str] = []
    for seam in (attention.seam, *((twin[0],) if twin is not None else ())):
        meta = _metadata_at(ctx, attention, seam)
        if meta is None:
            ctx.refuse(
                seam.file,
                seam.func,
                "KV211",
                "The forward metadata does not reach the attention.",
                "Take `forward_metadata` in the model's forward and pass it on.",
            )
            return
        metas.append(meta)
    if attention.mla is not None:
        convert_mla(ctx, attention, *metas)
    else:
        convert_attention(ctx, attention, metas[0])


def _metadata_at(ctx: Context, attention: AttentionFacts, seam: Seam) -> str | None:
    """The metadata's name in the seam's function, passed on along every chain of calls that leads there."""
    classes = [attention.cls, *(rep.cls for rep in attention.reps)]  # a forward may be shared by several
    names = [
        thread_metadata(ctx, frame, seam.anchor)
        for frame in ctx.frames_of(seam.func)
        if isinstance(frame.self_, Instance) and frame.self_.cls in classes
    ]
    assert names
    return names[0] if len(set(names)) == 1 else None
