"""What the selection needs from modeling code, independent of how it was read.

`CodeView` is the seam between `analyzer/modeling` (facts of the files) and the decisions: every field that
is None or empty means "not seen", never "not there".
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvskill.analyzer.target import FieldUse
from kvskill.diagnostics import Diagnostic, Span
from kvskill.manifest import ModelRef

__all__ = ["CodeView", "Seen"]


@dataclass(frozen=True)
class Seen:
    """A property seen in code: what, and where."""

    value: str
    span: Span


@dataclass(frozen=True)
class CodeView:
    """Facts of the modeling files that decisions rest on.

    `grounds` are properties of the attention that the paged path cannot express, by name of the ground (softcap,
    bias, non-causal, cross, block-sparse, chunked). `layer_windows` gives, per layer that was understood, the window
    that the code applies (None: full attention); None as a whole where no attention was understood. `owns_state`
    names state that `init_cache` allocates beside K/V. `mentions_window` is the first name with a window in it: as
    long as there is one, a window that was not seen is a doubt and no proof of full attention.
    """

    model: ModelRef
    attention_kind: Seen | None = None
    grounds: dict[str, Seen] = field(default_factory=dict)
    sinks: Seen | None = None
    antiquant: Seen | None = None
    layer_windows: dict[int, Seen | None] | None = None
    mentions_window: Seen | None = None
    scale: Seen | None = None
    kv_heads: Seen | None = None
    sublayers: int = 1
    owns_state: tuple[Seen, ...] = ()
    field_uses: tuple[FieldUse, ...] = ()
    config_class: str | None = None
    findings: tuple[Diagnostic, ...] = ()
