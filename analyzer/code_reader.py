"""The modeling code of a folder as the view that the selection uses. Built on `kvskill.analyzer.modeling`."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvskill.analyzer.modeling.facts import AttentionFacts, ModelFacts
from kvskill.analyzer.modeling.program import Program, load_program, source_files
from kvskill.analyzer.modeling.reader import entry_class, read_program
from kvskill.analyzer.resolve import Place
from kvskill.analyzer.selection.code import CodeView, Seen
from kvskill.analyzer.target import FieldUse, Registered
from kvskill.diagnostics import Diagnostic, InputError, Refusal, Severity, Span
from kvskill.manifest import ModelRef
from kvskill.source import SourceFile

__all__ = ["Code", "config_class", "field_uses", "open_code", "view_of"]

# findings of the code walk that are grounds to keep Legacy, not doubts: what the paged path cannot express
_GROUNDS = {"KV140": "softcap", "KV144": "chunked", "KV145": "bias"}
_SECTIONS = ("model_config", "data_config", "parallel_config", "scheduler_config", "disagg_config")


class Code:
    """The files of a model folder, loaded once, and the class that the registry names as entry."""

    def __init__(self, place: Place, program: Program, registered: Sequence[Registered]) -> None:
        self.place = place
        self.program = program
        self.registered = registered
        self.entry = _registered_entry(program, registered)

    def facts(self, config: Mapping[str, Any]) -> ModelFacts:
        """Facts of the code under a config. Raises InputError or Refusal when there is no model class."""
        return read_program(self.program, config, entry=self.entry, shown=self.place.folder)


def open_code(place: Place, registered: Sequence[Registered]) -> Code:
    """Load the model's files. Raises InputError for broken source and KV014 for a link that leaves the folder."""
    inside = place.model_dir.resolve()
    for path in sorted(place.model_dir.rglob("*.py")):
        if path.is_symlink() and not path.resolve().is_relative_to(inside):
            shown = path.relative_to(place.root).as_posix()
            raise Refusal(
                Diagnostic(
                    "KV014",
                    Severity.BLOCKING,
                    "The file is a symbolic link to a place outside the model folder.",
                    "Put a copy of it in the folder.",
                    Span(shown),
                )
            )
    paths = source_files(place.model_dir)
    if not paths:
        raise _no_model(place)
    program = load_program(paths, place.root)
    if not program.classes():
        raise _no_model(place)
    code = Code(place, program, registered)
    _one_entry(code)
    if code.entry is None and entry_class(program) is None:
        raise _no_model(place)
    return code


def config_class(registered: Sequence[Registered]) -> tuple[str, str] | None:
    """(module, class) of the configuration class that the registry names."""
    for entry in registered:
        for module, name in reversed(entry.classes):
            if name.endswith("Config"):
                return module, name
    return None


def view_of(code: Code, facts: ModelFacts) -> CodeView:
    """The facts in the terms of the selection."""
    grounds: dict[str, Seen] = {}
    findings = []
    for finding in facts.findings:
        name = _GROUNDS.get(finding.code)
        if name is None:
            findings.append(finding)
        else:
            grounds.setdefault(name, Seen(finding.fact.rstrip("."), finding.span))
    seams = facts.attentions
    config = config_class(code.registered)
    return CodeView(
        model=_model_ref(code, facts),
        grounds=grounds,
        sinks=_sinks(seams),
        layer_windows=_layer_windows(seams),
        mentions_window=_mentions_window(code.program.files.values()),
        scale=_one(seams, "scale_expr"),
        kv_heads=_one(seams, "kv_heads_expr"),
        field_uses=tuple(field_uses(code.program.files.values())),
        config_class=config[1] if config is not None else None,
        findings=tuple(findings),
    )


def _model_ref(code: Code, facts: ModelFacts) -> ModelRef:
    entry, config = facts.entry, config_class(code.registered)
    classes = [c for c in (entry, facts.model_cls, facts.layer_cls, *(a.cls for a in facts.attentions)) if c]
    mtp = next((n for r in code.registered for _, n in r.classes if "MTP" in n), None)
    draft = facts.prefill.draft if facts.prefill is not None else None
    if mtp is None and draft is not None:
        mtp = draft.cls.name
    return ModelRef(
        name=code.place.name,
        folder=code.place.folder,
        modeling=tuple(dict.fromkeys(c.file.shown for c in classes)),
        config_class=config[1] if config is not None else None,
        config_module=config[0] if config is not None else None,
        causal_lm=entry.name if entry is not None else None,
        model=facts.model_cls.name if facts.model_cls is not None else None,
        decoder_layer=facts.layer_cls.name if facts.layer_cls is not None else None,
        attention=tuple(dict.fromkeys(a.cls.name for a in facts.attentions)),
        mtp=mtp,
        input_era=None if facts.form == "paged" else facts.form,
        state=facts.state,
    )


def _sinks(attentions: Iterable[AttentionFacts]) -> Seen | None:
    for a in attentions:
        if a.seam.sinks_expr is not None:
            return Seen(a.seam.sinks_expr, a.file.span(a.seam.func))
    return None


def _layer_windows(attentions: Sequence[AttentionFacts]) -> dict[int, Seen | None] | None:
    """Window per layer as the code applies it; None where no attention class was understood."""
    if not attentions:
        return None
    out: dict[int, Seen | None] = {}
    for a in attentions:
        per_layer = a.window.per_layer if a.window is not None else (None,) * len(a.layers)
        for layer, window in zip(a.layers, per_layer, strict=False):
            out[layer] = None if window is None else Seen(str(window), a.file.span(a.cls.node))
    return out


def _mentions_window(files: Iterable[SourceFile]) -> Seen | None:
    """The first name, attribute, parameter or key that speaks of a sliding window."""
    for file in files:
        for node in ast.walk(file.tree):
            text = None
            if isinstance(node, ast.Attribute):
                text = node.attr
            elif isinstance(node, ast.Name):
                text = node.id
            elif isinstance(node, ast.arg):
                text = node.arg
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 60:
                text = node.value
            if text is not None and ("window" in text.lower() or "sliding" in text.lower()):
                return Seen(text, file.span(node))
    return None


def _one(attentions: Sequence[AttentionFacts], name: str) -> Seen | None:
    """An expression that all attention classes share."""
    values = {getattr(a.seam, name) for a in attentions}
    if len(values) != 1 or None in values:
        return None
    first = attentions[0]
    return Seen(str(values.pop()), first.file.span(first.seam.func))


def _registered_entry(program: Program, registered: Sequence[Registered]) -> str | None:
    """The model class that the registry names: the first of an entry that is not the config and not the draft model."""
    for entry in registered:
        for _, name in entry.classes:
            if not name.endswith("Config") and "MTP" not in name and program.find(name) is not None:
                return name
    return None


def _one_entry(code: Code) -> None:
    """Several files that each define a causal language model, and no registry to choose: one finding."""
    if code.entry is not None:
        return
    tops = [
        c
        for c in code.program.classes()
        if c.name.endswith(("ForCausalLM", "LMHeadModel")) and c.method("forward") is not None
    ]
    files = sorted({c.file.shown for c in tops})
    derived = {b.name for c in tops for b in c.mro()[1:]}
    own = [c for c in tops if c.name not in derived and not any(b in tops for b in c.mro()[1:])]
    if len(files) > 1 and len({c.file.shown for c in own}) > 1:
        raise Refusal(
            Diagnostic(
                "KV019",
                Severity.BLOCKING,
                f"{len(files)} files define a causal language model ({', '.join(files)}), and none is registered.",
                "Register the model in support_models.py, or move the other file out of the folder.",
                own[1].file.span(own[1].node),
            )
        )


def field_uses(files: Iterable[SourceFile]) -> Iterable[FieldUse]:
    """Reads of `<something>.scheduler_config.batch_size`: the section by name, whatever object holds it."""
    for file in files:
        sections = _section_aliases(file)
        for node in ast.walk(file.tree):
            if not (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)):
                continue
            owner = node.value
            if isinstance(owner, ast.Attribute) and owner.attr in _SECTIONS:
                yield FieldUse(f"{owner.attr}.{node.attr}", file.span(node))
            elif isinstance(owner, ast.Name) and owner.id in sections:
                yield FieldUse(f"{sections[owner.id]}.{node.attr}", file.span(node))


def _section_aliases(file: SourceFile) -> dict[str, str]:
    """Local names bound to a section: `scheduler = infer_config.scheduler_config`."""
    out = {}
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and node.value.attr in _SECTIONS:
            for target in node.targets:
                if isinstance(target, ast.Name):
                    out[target.id] = node.value.attr
    return out


def _no_model(place: Place) -> InputError | Refusal:
    return Refusal(
        Diagnostic(
            "KV018",
            Severity.BLOCKING,
            "The folder has no modeling file with a class that the framework could run.",
            "Give a folder with models/modeling_*.py; a model without a causal K/V cache has nothing to page.",
            Span(place.folder),
        )
    )
