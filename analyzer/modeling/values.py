"""Abstract values of the symbolic walk.

A walk runs a model's `__init__` and `forward` on shapes instead of numbers. Tensors form a graph: each keeps
the operation that made it, its parents, its symbolic shape and the place in the source. Nothing of the target is
imported or run; everything here is derived from its syntax tree.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

from kvskill.analyzer.modeling.dims import Dim
from kvskill.source import SourceFile

__all__ = [
    "Bool",
    "Bound",
    "ClassVal",
    "Const",
    "Dict_",
    "EnumMember",
    "ExtInstance",
    "External",
    "Frame",
    "Func",
    "Instance",
    "ModuleSeq",
    "Partial",
    "Ref",
    "Scalar",
    "Tensor",
    "Tup",
    "Unknown",
    "Value",
]

Shape = tuple[Dim, ...]


class Value:
    """Base of all abstract values."""


@dataclass(frozen=True)
class Const(Value):
    """A Python constant: None, bool, int, float, str, torch dtype name, member of an enumeration.

    `origin` says which run setting it depends on, where it is one or was decided by one.
    """

    value: Any
    origin: str = field(default="", compare=False, repr=False)


@dataclass(frozen=True)
class EnumMember:
    """A member of an enumeration, as the value of a Const."""

    cls: str
    name: str
    value: Any


@dataclass(frozen=True)
class Scalar(Value):
    """A number. `text` is canonical (built from configuration paths), `dim` is set for integers."""

    text: str
    dim: Dim | None = None


@dataclass(frozen=True)
class Bool(Value):
    """A truth value that is not known; `text` says what it depends on, `axes` which runtime axes."""

    text: str
    axes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Ref(Value):
    """Something reached from a root object by attributes: `config.layer_types`, `infer.scheduler_config`."""

    path: str


@dataclass(eq=False, repr=False)
class Tensor(Value):
    """A node of the value graph. `shape` is None when not even the rank is known."""

    op: str
    parents: tuple[Value, ...]
    shape: Shape | None
    node: ast.AST | None
    frame: Frame | None
    stmt: ast.stmt | None
    attrs: dict[str, Any] = field(default_factory=dict)
    stream: bool = False  # computed from the token embeddings: the hidden states

    @property
    def rank(self) -> int | None:
        return None if self.shape is None else len(self.shape)


@dataclass(eq=False, repr=False)
class Tup(Value):
    """Tuple or list. `shape_of` is set when it is a tensor's shape."""

    items: list[Value]
    is_list: bool = False
    shape_of: Tensor | None = None


@dataclass(eq=False, repr=False)
class Dict_(Value):  # noqa: N801 (Dict alone would read as typing's)
    """A dict with constant keys; `rest` stands for entries that are not known."""

    items: dict[Any, Value]
    rest: Value | None = None


@dataclass(eq=False, repr=False)
class Instance(Value):
    """An object of a class defined in the model's files."""

    cls: ClassVal
    attrs: dict[str, Value] = field(default_factory=dict)
    attr_nodes: dict[str, ast.stmt] = field(default_factory=dict)
    path: str = ""
    index: int | None = None


@dataclass(eq=False, repr=False)
class ModuleSeq(Value):
    """ModuleList, Sequential or ModuleDict: children in order, with keys for a dict."""

    items: list[Value]
    keys: list[Any] | None = None


@dataclass(frozen=True, eq=False, repr=False)
class ClassVal(Value):
    """A class of the model's files."""

    name: str
    node: ast.ClassDef
    file: SourceFile
    bases: tuple[ClassVal | str, ...] = ()

    def mro(self) -> list[ClassVal]:
        """The class and its bases in the files, depth first."""
        out = [self]
        for base in self.bases:
            if isinstance(base, ClassVal):
                out.extend(b for b in base.mro() if b not in out)
        return out

    def external_bases(self) -> set[str]:
        return {b for c in self.mro() for b in c.bases if isinstance(b, str)}

    def method(self, name: str) -> tuple[ast.FunctionDef, ClassVal] | None:
        for cls in self.mro():
            for item in cls.node.body:
                if isinstance(item, ast.FunctionDef) and item.name == name:
                    return item, cls
        return None


@dataclass(frozen=True, eq=False, repr=False)
class Func(Value):
    """A function or method of the files, or a lambda; `owner` is the class it is defined in."""

    node: ast.FunctionDef | ast.Lambda
    file: SourceFile
    owner: ClassVal | None = None
    closure: Frame | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Bound(Value):
    """A function with its `self`; or a method of a tensor, tuple, dict, ... when `func` is a name."""

    self_: Value
    func: Func | str


@dataclass(frozen=True, eq=False, repr=False)
class Partial(Value):
    """`functools.partial`: a callable with some of its arguments."""

    func: Value
    args: tuple[Value, ...]
    kwargs: dict[str, Value]


@dataclass(frozen=True)
class External(Value):
    """A name from outside the model's files, by qualified name: `torch.nn.functional.softmax`."""

    name: str


@dataclass(eq=False, repr=False)
class ExtInstance(Value):
    """An object of an outside class, with its constructor arguments."""

    name: str
    args: list[Value]
    kwargs: dict[str, Value]
    path: str = ""


@dataclass(frozen=True)
class Unknown(Value):
    """Nothing is known but why."""

    why: str = ""
    sources: tuple[Value, ...] = field(default=(), compare=False)


@dataclass(eq=False, repr=False)
class Frame:
    """One activation of a function in the walk."""

    func: ast.FunctionDef | ast.Lambda | None
    file: SourceFile
    owner: ClassVal | None
    env: dict[str, Value]
    parent: Frame | None
    call: ast.AST | None
    stmt: ast.stmt | None = None
    call_stmt: ast.stmt | None = None  # the caller's statement
    self_: Value | None = None
    env_before: dict[int, dict[str, Value]] = field(default_factory=dict)
    values: dict[int, Value] = field(default_factory=dict)
    returns: list[tuple[ast.Return | None, Value]] = field(default_factory=list)
    depth: int = 0

    def chain(self) -> list[Frame]:
        """This frame and its callers, innermost first."""
        out: list[Frame] = []
        frame: Frame | None = self
        while frame is not None:
            out.append(frame)
            frame = frame.parent
        return out
