"""Facts of a standalone model's code: the same seam as in framework mode, with caches that come as arguments."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvskill.analyzer.modeling.facts import AttentionFacts, CacheDecl, ModelFacts, Seam, Window
from kvskill.analyzer.modeling.hazards import kept_states, mixed_tokens
from kvskill.analyzer.modeling.mla import MlaFacts
from kvskill.analyzer.modeling.operators import argument
from kvskill.analyzer.modeling.program import Program
from kvskill.analyzer.modeling.reader import entry_class
from kvskill.analyzer.modeling.reps import RepRun, phase_reps
from kvskill.analyzer.modeling.run import Run, submodules
from kvskill.analyzer.modeling.scores import find_attends, needs_given_mask
from kvskill.analyzer.modeling.seam import SeamError, find_seam
from kvskill.analyzer.modeling.settings import settings_of
from kvskill.analyzer.modeling.shapes import LAYOUT
from kvskill.analyzer.modeling.trace import ancestors
from kvskill.analyzer.modeling.values import ClassVal, Instance, Tensor, Value
from kvskill.analyzer.modeling.window import find_window, window_notes
from kvskill.analyzer.runner.files import folder_files
from kvskill.analyzer.runner.latent import find_latent
from kvskill.analyzer.runner.masks import mask_findings
from kvskill.analyzer.runner.walkrun import run_standalone
from kvskill.diagnostics import Diagnostic, Severity, Span
from kvskill.source import SourceFile

if TYPE_CHECKING:
    from kvskill.analyzer.code_reader import Code

_INDEX_OPS = LAYOUT | {"input:kv_len", "to", "select", "getitem"}
_NOT_KV_LEN = "The new token is not written at position `kv_len`, so `kv_len` may not be the number of cached tokens."

__all__ = ["read_standalone", "standalone_facts"]


def standalone_facts(code: Code, config: Mapping[str, Any]) -> ModelFacts:
    """Facts of an opened model folder; the files of the runner stand beside those of the model in `program.files`."""
    facts = read_standalone(code.program, config, entry=code.entry, shown=code.place.folder)
    runners = {f.shown: f for f in folder_files(code.place.model_dir, code.place.root)}
    program = Program({**runners, **code.program.files}, code.program.modules, code.program.root)
    frames = [f for run in (facts.prefill, facts.decode) if run is not None for f in run.walk.frames]
    walked = [f.func for f in frames if f.func is not None]
    masks = mask_findings(program.files.values(), walked, _relying(facts))
    return replace(facts, program=program, findings=(*facts.findings, *masks))


def _relying(facts: ModelFacts) -> Span | None:
    """An attention class whose prefill takes the order of positions from the mask that it is handed."""
    if facts.prefill is None:
        return None
    attends = find_attends(facts.prefill.walk)
    if not any(needs_given_mask(facts.prefill.walk, a) for a in attends):
        return None
    return next((_at(a.cls) for a in facts.attentions), None)


def read_standalone(
    program: Program, config: Mapping[str, Any], *, entry: str | None = None, shown: str = ""
) -> ModelFacts:
    """Facts of a standalone model in mode one. What is not certain is a blocking finding."""
    top = (program.find(entry) if entry else None) or entry_class(program) or _with_caches(program)
    if top is None:
        fact = "No model class whose forward takes the caches was found."
        return ModelFacts(program, "none", findings=(_blocking("KV291", fact, Span(shown or "models")),))
    config = settings_of(program, top, config)
    prefill = run_standalone(program, top, config, "prefill")
    decode = run_standalone(program, top, config, "decode")
    owners = _writers(prefill)
    base = ModelFacts(program, "none", "padded-2d", top, prefill=prefill, decode=decode)
    findings = [
        _blocking("KV163", f"The shapes do not fit padded input here ({p.text}).", p.frame.file.span(p.node))
        for p in prefill.walk.problems[:3]
    ]
    if not owners:
        fact = f"{top.name} writes no cache that it was handed."
        findings.append(_blocking("KV291", fact, top.file.span(top.node)))
        return _with(base, (), findings, "none")
    facts: list[AttentionFacts] = []
    for cls in dict.fromkeys(o.cls for o in owners):
        mine = [m for m in submodules(prefill.root) if m.cls is cls]
        try:
            facts.append(_attention(cls, mine, prefill, decode, config))
        except SeamError as exc:
            findings.append(exc.finding)
    findings.extend(window_notes(facts))
    findings.extend(kept_states([prefill, decode]))
    findings.extend(mixed_tokens(prefill, owners))
    return _with(base, tuple(facts), findings, "legacy")


def _with(base: ModelFacts, facts: tuple[AttentionFacts, ...], findings: list[Diagnostic], state: str) -> ModelFacts:
    assert base.prefill is not None
    layer = model = None
    if facts:
        layer, model = _containers(base.prefill, facts[0])
    return ModelFacts(
        base.program,
        state,  # type: ignore[arg-type]
        base.form,
        base.entry,
        model,
        layer,
        facts,
        base.prefill,
        base.decode,
        tuple(findings),
    )


def _containers(run: Run, facts: AttentionFacts) -> tuple[ClassVal | None, ClassVal | None]:
    frame = next(f for f in run.walk.frames if f.self_ in facts.reps)
    owners: list[ClassVal] = []
    for f in frame.chain():
        if isinstance(f.self_, Instance) and f.self_ not in facts.reps and f.self_.cls not in owners:
            owners.append(f.self_.cls)
    return (owners[0] if owners else None), (owners[1] if len(owners) > 1 else None)


def _writers(run: Run) -> list[Instance]:
    """Objects that write a handed cache, in the order of the model."""
    owners = [t.attrs.get("owner") for t in run.walk.tensors if t.op == "cache"]
    return [m for m in submodules(run.root) if m in owners]


def _attention(
    cls: ClassVal, mine: list[Instance], prefill: Run, decode: Run, config: Mapping[str, Any]
) -> AttentionFacts:
    reps = phase_reps(mine, prefill, decode, config)
    latent = find_latent(mine, reps)
    if latent is None:
        for rep in reps:
            _no_latent(cls, rep)
    seam = latent[0] if latent is not None else find_seam(reps)
    for rep in reps:
        if rep.run.phase == "decode":
            _written_at_kv_len(rep)
    if latent is not None:
        return _facts(cls, mine, prefill, reps, seam, None, latent[1])
    window, doubt = find_window(mine, reps, config, {id(m): i for i, m in enumerate(mine)})
    if doubt is not None:
        raise SeamError(_blocking("KV164", f"The window of {cls.name} is not certain: {doubt}.", _at(cls)))
    return _facts(cls, mine, prefill, reps, seam, window, None)


def _facts(
    cls: ClassVal,
    mine: list[Instance],
    prefill: Run,
    reps: list[RepRun],
    seam: Seam,
    window: Window | None,
    mla: MlaFacts | None,
) -> AttentionFacts:
    first = reps[0].inst
    entry = next(
        f for f in prefill.walk.frames if f.self_ is first and (f.parent is None or f.parent.self_ is not first)
    )
    assert isinstance(entry.func, ast.FunctionDef)
    decl = CacheDecl({}, None, seam.kv_heads_expr, seam.k_dim_expr, seam.v_dim_expr)
    layers = tuple(range(len(mine)))
    instances = tuple(r.inst for r in reps if r.run.phase == "prefill")
    return AttentionFacts(cls, cls.file, layers, entry.func, (), decl, window, seam, instances, mla)


def _written_at_kv_len(rep: RepRun) -> None:
    """The new token must go to position `kv_len`: that proves that kv_len counts the tokens cached before the step."""
    nodes = {id(w.node) for w in rep.writes}
    for call in rep.walk.calls:
        if id(call.node) in nodes:
            index = argument(call.name, call.args, call.kwargs, "indices")
            ops = {t.op for t in ancestors([index])} if index is not None else set()
            if "input:kv_len" not in ops or ops - _INDEX_OPS:
                raise SeamError(_blocking("KV291", _NOT_KV_LEN, call.frame.file.span(call.node)))
    for node, frame, _, _ in rep.walk.item_writes:
        if id(node) in nodes and isinstance(node, ast.Subscript):
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            starts = [p.lower if isinstance(p, ast.Slice) else p for p in parts]
            if any(isinstance(n, ast.BinOp) for s in starts if s is not None for n in ast.walk(s)):
                raise SeamError(_blocking("KV291", _NOT_KV_LEN, frame.file.span(node)))


def _no_latent(cls: ClassVal, rep: RepRun) -> None:
    for attend in rep.attends:
        parents: list[Value] = list(attend.out.parents)
        if any(isinstance(p, Tensor) and p.op == "kv_rmsnorm" for p in parents):
            fact = f"{cls.name} keeps a latent cache (mode three) without blocks."
            raise SeamError(_blocking("KV292", fact, _at(cls)))


def _with_caches(program: Program) -> ClassVal | None:
    from kvskill.analyzer.runner.walkrun import CACHES

    for cls in reversed(program.classes()):
        found = cls.method("forward")
        if found is not None and any(a.arg in CACHES for a in found[0].args.args):
            return cls
    return None


def _at(cls: ClassVal) -> Span:
    file: SourceFile = cls.file
    return file.span(cls.node)


def _blocking(code: str, fact: str, span: Span) -> Diagnostic:
    todo = "Bring the code into the form of `kvskill explain idioms`, or convert it by hand."
    return Diagnostic(code, Severity.BLOCKING, fact, todo, span)
