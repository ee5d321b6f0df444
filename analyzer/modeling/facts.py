"""Facts about a model's code, as the walk found them. Frozen; each knows its source range."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kvskill.analyzer.modeling.program import Program
from kvskill.analyzer.modeling.run import Form, Run
from kvskill.analyzer.modeling.values import ClassVal, Func, Instance
from kvskill.diagnostics import Diagnostic
from kvskill.source import SourceFile

if TYPE_CHECKING:
    from kvskill.analyzer.modeling.mla import MlaFacts

__all__ = [
    "AttentionFacts",
    "Binding",
    "CacheDecl",
    "ModelFacts",
    "Seam",
    "State",
    "Window",
]

State = Literal["legacy", "paged", "half-migrated", "paged-by-hand", "none"]


@dataclass(frozen=True)
class Binding:
    """A name that holds a tensor at the seam, and how its axes lie (trace.Layout kinds).

    `copies`: the head axis holds copies of one head that all heads share (the rope part of latent keys, expanded).
    """

    name: str
    layout: str
    copies: bool = False


@dataclass(frozen=True, eq=False)
class CacheDecl:
    """Where `__init__` declares the Legacy cache."""

    placeholders: dict[str, ast.stmt]
    unit: ast.stmt | None
    heads_expr: str
    k_dim_expr: str
    v_dim_expr: str
    unit_cls: ClassVal | None = None  # the class of `unit`, where it is another one (a cache module)
    cls: ClassVal | None = None  # the class, where several share one forward
    holders: tuple[tuple[Instance, str], ...] = ()  # (object, attribute) that hold the caches in the class's stead


@dataclass(frozen=True)
class Window:
    """The sliding window of a class. `expr` is valid in `__init__` and is None (or falsy) for full layers."""

    expr: str
    attr: str | None
    per_layer: tuple[int | None, ...]
    differs: str = ""  # how the Legacy code's own mask differs from this window, in words

    @property
    def sliding(self) -> Literal["always", "some"]:
        """Do all layers of the class slide, or some?"""
        return "always" if all(self.per_layer) else "some"


@dataclass(frozen=True, eq=False)
class Seam:
    """The region of a function between fresh Q/K/V and the value that goes on."""

    func: ast.FunctionDef
    file: SourceFile
    owner: ClassVal
    self_name: str
    anchor: ast.stmt  # the new code goes before this statement
    q: Binding
    k: Binding
    v: Binding
    out: Binding
    extra_targets: tuple[str, ...]  # names that the attend statement also bound (attention weights)
    removed: tuple[tuple[Func, ast.stmt], ...]
    heads_expr: str
    kv_heads_expr: str
    k_dim_expr: str
    v_dim_expr: str
    scale_expr: str
    scale_value: float | None
    sinks_expr: str | None
    meta_expr: str | None  # how the function reaches the forward metadata; None: must be threaded
    kinds: tuple[str, ...]
    k_cache: str = "k_cache"
    v_cache: str = "v_cache"

    @property
    def extra(self) -> str:
        """The other name that the attend statement bound, if there is exactly one."""
        return self.extra_targets[0] if len(self.extra_targets) == 1 else ""


@dataclass(frozen=True, eq=False)
class AttentionFacts:
    """One attention class."""

    cls: ClassVal
    file: SourceFile
    layers: tuple[int, ...]
    entry: ast.FunctionDef
    stream_params: tuple[str, ...]
    caches: CacheDecl
    window: Window | None
    seam: Seam
    reps: tuple[Instance, ...] = ()
    mla: MlaFacts | None = None
    decls: tuple[CacheDecl, ...] = ()  # one for each __init__ of the classes that share the forward


@dataclass(frozen=True, eq=False)
class ModelFacts:
    """Everything that is known of a model folder's code."""

    program: Program
    state: State
    form: Form | None = None
    entry: ClassVal | None = None
    model_cls: ClassVal | None = None
    layer_cls: ClassVal | None = None
    attentions: tuple[AttentionFacts, ...] = ()
    prefill: Run | None = None
    decode: Run | None = None
    findings: tuple[Diagnostic, ...] = field(default=())
