"""Read a model folder: entry class, input form, attention classes, and the state of the conversion."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvskill.analyzer.modeling.facts import AttentionFacts, CacheDecl, ModelFacts, Seam, State
from kvskill.analyzer.modeling.hazards import kept_states, mixed_tokens
from kvskill.analyzer.modeling.mla import find_mla
from kvskill.analyzer.modeling.program import Program, load_program, source_files
from kvskill.analyzer.modeling.reps import phase_reps
from kvskill.analyzer.modeling.run import Form, Phase, Run, draft_class, run_model, submodules
from kvskill.analyzer.modeling.seam import SeamError, find_seam
from kvskill.analyzer.modeling.settings import settings_of
from kvskill.analyzer.modeling.values import ClassVal, Frame, Instance, Tensor
from kvskill.analyzer.modeling.window import find_window, window_notes
from kvskill.diagnostics import Diagnostic, InputError, Severity, Span

__all__ = ["entry_class", "read_model"]

_FORMS: tuple[Form, ...] = ("packed-1d", "padded-2d")
_PHASES: tuple[Phase, ...] = ("prefill", "decode")


def read_model(folder: Path, shown_root: Path, config: Mapping[str, Any], *, entry: str | None = None) -> ModelFacts:
    """Facts of a model folder. Raises InputError for unreadable files or when no model class is found."""
    program = load_program(source_files(folder), shown_root)
    return read_program(program, config, entry=entry, shown=folder.name)


def read_program(
    program: Program, config: Mapping[str, Any], *, entry: str | None = None, shown: str = ""
) -> ModelFacts:
    """Facts of a loaded program."""
    top = program.find(entry) if entry else entry_class(program)
    if top is None:
        raise InputError(
            Diagnostic(
                "KV018",
                Severity.ERROR,
                "No class with a forward and a language-model head was found in the model folder.",
                "Pass the folder that holds modeling_*.py.",
                Span(shown or "models"),
            )
        )
    config = settings_of(program, top, config)
    state = _state(program, top)
    plain = state == "paged" and not _calls_fused(program)
    if state != "legacy" and not plain:
        return ModelFacts(program, state, entry=top, findings=_state_findings(program, top, state))
    form: Form = "paged"
    if plain:  # paged entries, but plain attention over gathered blocks: the fused call is missing
        prefill = run_model(program, top, config, "prefill", form)
    else:
        form, prefill = _best_form(program, top, config)
    decode = run_model(program, top, config, "decode", form)
    found = _understand(program, top, config, form, prefill, decode)
    draft = draft_class(program, top, config)
    if draft is None or not found.attentions or any(f.severity is Severity.BLOCKING for f in found.findings):
        return found
    # the drafting model runs through the same code: what is read of it must hold for both
    runs = [run_model(program, top, config, phase, form, draft=draft) for phase in _PHASES]
    return _understand(program, top, config, form, *runs)


def _understand(
    program: Program, top: ClassVal, config: Mapping[str, Any], form: Form, prefill: Run, decode: Run
) -> ModelFacts:
    """The attention classes of a model's two runs."""
    owners = [m for m in submodules(prefill.root) if _has_cache(m)]
    findings: list[Diagnostic] = []
    if not owners:
        return ModelFacts(program, "none", form, top, prefill=prefill, decode=decode, findings=(_no_attention(top),))
    if prefill.walk.problems:
        findings.extend(_shape_findings(prefill))
    facts = []
    for cls, mine in _groups(owners):
        try:
            facts.append(_attention(cls, mine, prefill, decode, config))
        except SeamError as exc:
            findings.append(exc.finding)
    findings.extend(window_notes(facts))
    findings.extend(kept_states([prefill, decode]))
    findings.extend(mixed_tokens(prefill, owners))
    layers = [f for f in prefill.walk.frames if f.self_ in owners and f.parent is not None]
    layer_cls, model_cls = _containers(layers[0] if layers else None)
    return ModelFacts(
        program, "legacy", form, top, model_cls, layer_cls, tuple(facts), prefill, decode, tuple(findings)
    )


def entry_class(program: Program) -> ClassVal | None:
    """The outermost model class: it has forward, and no other class of the files builds it."""
    built: set[str] = set()
    for cls in program.classes():
        for node in ast.walk(cls.node):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                built.add(node.func.id)
    options = [
        c
        for c in program.classes()
        if c.method("forward") is not None
        and c.name not in built
        and (c.method("load_weights") is not None or c.name.endswith(("ForCausalLM", "LMHeadModel")))
    ]
    # a multi-token-prediction model usually derives from the main one: prefer the base
    bases = [c for c in options if not any(b in options for b in c.mro()[1:])]
    return next(iter(bases or options), None)


def _state(program: Program, top: ClassVal) -> State:
    unit = entries = False
    for cls in program.classes():
        for node in ast.walk(cls.node):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                unit |= node.attr == "cache_unit"
                entries |= node.attr == "cache_entries"
    info = top.method("get_cache_info") is not None
    if entries and info:
        # the engine ignores a leftover cache_unit; a write by batch row is what makes a half conversion
        return "half-migrated" if unit and _writes_rows(program) else "paged"
    if entries or info:
        return "half-migrated"
    return "legacy"


def _calls_fused(program: Program) -> bool:
    """Whether any file names a fused attention operator."""
    nodes = (n for file in program.files.values() for n in ast.walk(file.tree))
    names = ((n.attr if isinstance(n, ast.Attribute) else n.name if isinstance(n, ast.alias) else "") for n in nodes)
    return any("attention_score" in name or "flash_attention" in name or "mla_prolog" in name for name in names)


def _writes_rows(program: Program) -> bool:
    """Whether any class still writes a cache by batch row."""
    nodes = (n for cls in program.classes() for n in ast.walk(cls.node))
    return any(isinstance(n, ast.Attribute) and n.attr in ("scatter_update_", "scatter_update") for n in nodes)


def _state_findings(program: Program, top: ClassVal, state: State) -> tuple[Diagnostic, ...]:
    if state != "half-migrated":
        return ()
    out = []
    for cls in program.classes():
        for node in ast.walk(cls.node):
            legacy = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == "cache_unit"
            if legacy:
                out.append(
                    Diagnostic(
                        "KV161",
                        Severity.BLOCKING,
                        f"{cls.name} still declares a Legacy cache although the model reports paged entries.",
                        "Finish or undo the earlier conversion; half-migrated code is not converted.",
                        cls.file.span(node),
                    )
                )
    if not out:
        what = "get_cache_info" if top.method("get_cache_info") else "cache_entries"
        out.append(
            Diagnostic(
                "KV161",
                Severity.BLOCKING,
                f"The model has {what} but not the rest of the paged interface.",
                "Finish or undo the earlier conversion; half-migrated code is not converted.",
                top.file.span(top.node),
            )
        )
    return tuple(out)


def _best_form(program: Program, top: ClassVal, config: Mapping[str, Any]) -> tuple[Form, Run]:
    """The input form that the code fits: the fewest impossible shapes; packed wins a tie."""
    runs = [(form, run_model(program, top, config, "prefill", form)) for form in _FORMS]
    return min(runs, key=lambda pair: len(pair[1].walk.problems))


def _has_cache(module: Instance) -> bool:
    return sum(1 for v in module.attrs.values() if isinstance(v, Tensor) and v.op == "cache") >= 2


def _groups(instances: list[Instance]) -> list[tuple[ClassVal, list[Instance]]]:
    """Objects by the forward that they run, each with its class: the one that defines it, where several share it."""
    out: dict[int, list[Instance]] = {}
    for inst in instances:
        found = inst.cls.method("forward") or inst.cls.method("__call__")
        out.setdefault(id(found[0]) if found is not None else id(inst.cls), []).append(inst)
    groups = []
    for mine in out.values():
        cls = mine[0].cls
        found = cls.method("forward") or cls.method("__call__")
        if found is not None and any(m.cls is not cls for m in mine):
            cls = found[1]
        groups.append((cls, mine))
    return groups


def _layer_indices(mine: list[Instance]) -> list[int]:
    """The layer of each object: the number in its path, else its place."""
    numbers = [next((int(p) for p in m.path.split(".") if p.isdigit()), None) for m in mine]
    known = [n for n in numbers if n is not None]
    return known if len(set(known)) == len(mine) else list(range(len(mine)))


def _no_attention(top: ClassVal) -> Diagnostic:
    return Diagnostic(
        "KV162",
        Severity.BLOCKING,
        "No attention object that owns a K and a V cache was found.",
        "Declare k_cache, v_cache and cache_unit in the attention class, or convert by hand.",
        top.file.span(top.node),
    )


def _shape_findings(run: Run) -> list[Diagnostic]:
    out = []
    for problem in run.walk.problems[:3]:
        out.append(
            Diagnostic(
                "KV163",
                Severity.BLOCKING,
                f"The shapes do not fit the framework's input here ({problem.text}).",
                "Check the code, or convert it by hand: what is not understood is not edited.",
                problem.frame.file.span(problem.node),
            )
        )
    return out


def _attention(
    cls: ClassVal, mine: list[Instance], prefill: Run, decode: Run, config: Mapping[str, Any]
) -> AttentionFacts:
    reps = phase_reps(mine, prefill, decode, config)
    if not reps:
        raise SeamError(_no_attention(cls))
    latent = find_mla(mine, reps)
    seam = latent[0] if latent is not None else find_seam(reps)
    layers = _layer_indices(mine)
    layer_of = {id(m): i for m, i in zip(mine, layers, strict=True)}
    window, doubt = find_window(mine, reps, config, layer_of) if latent is None else (None, None)
    if doubt is not None:
        raise SeamError(
            Diagnostic(
                "KV164",
                Severity.BLOCKING,
                f"The sliding window of {cls.name} is not certain: {doubt}.",
                "Keep the window of each layer in an attribute that is None for full layers.",
                cls.file.span(cls.node),
            )
        )
    entry_frame = _entry_frame(prefill, reps[0].inst)
    entry = entry_frame.func
    assert isinstance(entry, ast.FunctionDef)
    stream = tuple(
        a.arg
        for a in [*entry.args.posonlyargs, *entry.args.args, *entry.args.kwonlyargs]
        if isinstance(v := _start_value(entry_frame, a.arg), Tensor) and v.stream and v.rank == 3
    )
    decls = _cache_decls(mine, prefill, seam)
    return AttentionFacts(
        cls,
        cls.file,
        tuple(layers),
        entry,
        stream,
        decls[0],
        window,
        seam,
        tuple(r.inst for r in reps if r.run.phase == "prefill"),
        latent[1] if latent is not None else None,
        decls,
    )


def _cache_decls(mine: list[Instance], run: Run, seam: Seam) -> tuple[CacheDecl, ...]:
    """One declaration for each `__init__` among the classes."""
    out: dict[int, CacheDecl] = {}
    for inst in mine:
        found = inst.cls.method("__init__")
        key = id(found[0]) if found is not None else id(inst.cls)
        if key not in out:
            out[key] = _cache_decl(inst.cls, inst, run, seam.kv_heads_expr, seam)
    return tuple(out.values())


def _start_value(frame: Frame, name: str) -> object:
    func = frame.func
    assert isinstance(func, ast.FunctionDef)
    return frame.env_before.get(id(func.body[0]), frame.env).get(name)


def _entry_frame(run: Run, inst: Instance) -> Frame:
    for frame in run.walk.frames:
        if frame.self_ is inst and (frame.parent is None or frame.parent.self_ is not inst):
            return frame
    raise AssertionError("a representative has a frame")


def _cache_decl(cls: ClassVal, inst: Instance, run: Run, kv_heads: str, seam: Seam) -> CacheDecl:
    placeholders: dict[str, ast.stmt] = {}
    for name, value in inst.attrs.items():
        if isinstance(value, Tensor) and value.op == "cache" and name in inst.attr_nodes:
            placeholders[name] = inst.attr_nodes[name]
    init_self = "self"
    found = cls.method("__init__")
    if found is not None and found[0].args.args:
        init_self = found[0].args.args[0].arg

    def here(expr: str) -> str:
        return expr.replace(f"{seam.self_name}.", f"{init_self}.")

    caches = [v for v in inst.attrs.values() if isinstance(v, Tensor) and v.op == "cache"]
    home = next((v.attrs["home"] for v in caches if "home" in v.attrs), inst)
    return CacheDecl(
        placeholders,
        home.attr_nodes.get("cache_unit"),
        here(kv_heads),
        here(seam.k_dim_expr),
        here(seam.v_dim_expr),
        home.cls if home is not inst else None,
        cls,
        tuple(dict.fromkeys(v.attrs["holder"] for v in caches if "holder" in v.attrs)),
    )


def _containers(frame: Frame | None) -> tuple[ClassVal | None, ClassVal | None]:
    """(decoder layer class, model class): the objects whose methods lead to the attention."""
    owners: list[ClassVal] = []
    current = frame.parent if frame is not None else None
    while current is not None:
        if isinstance(current.self_, Instance) and (not owners or owners[-1] is not current.self_.cls):
            owners.append(current.self_.cls)
        current = current.parent
    layer = owners[0] if owners else None
    return layer, owners[1] if len(owners) > 1 else layer
