"""What every pass shares: facts, manifest, edit sets by file, and the findings it adds."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cached_property

from kvskill.analyzer.modeling.facts import ModelFacts, Seam
from kvskill.analyzer.modeling.values import External, Frame, Func
from kvskill.diagnostics import Diagnostic, Severity
from kvskill.implementer.edits import EditSet
from kvskill.implementer.textops import indent_unit, names_read
from kvskill.manifest import Manifest
from kvskill.source import SourceFile

__all__ = ["Context"]


@dataclass
class Context:
    """The state of one plan. Passes add edits; nothing is written here."""

    facts: ModelFacts
    manifest: Manifest
    edits: dict[str, EditSet] = field(default_factory=dict)
    findings: list[Diagnostic] = field(default_factory=list)
    # statements that a pass removed or replaced, by id of the function node
    removed: dict[int, set[ast.stmt]] = field(default_factory=dict)
    functions: dict[int, Func] = field(default_factory=dict)
    # names that removed statements read, by function: seeds of the dead-code pass
    freed: dict[int, set[str]] = field(default_factory=dict)
    # names that inserted code reads or binds, by function
    used: dict[int, set[str]] = field(default_factory=dict)
    # names that inserted code reads at a line: they keep only what is bound above it alive
    used_at: dict[int, list[tuple[int, set[str]]]] = field(default_factory=dict)
    # names that inserted code binds at a line
    bound_at: dict[int, list[tuple[int, set[str]]]] = field(default_factory=dict)
    imports: dict[str, set[str]] = field(default_factory=dict)  # file -> import lines wanted
    dropped_args: set[int] = field(default_factory=set)
    # items of calls and parameter lists that go: id(owner) -> (file, owner, {id(item): why})
    cuts: dict[int, tuple[SourceFile, ast.AST, dict[int, str]]] = field(default_factory=dict)
    # statements and tests that a pass cut out itself, outside `removed`
    rewritten: dict[int, set[ast.stmt]] = field(default_factory=dict)
    rewritten_tests: set[int] = field(default_factory=set)
    # functions that return None for an element that nobody reads
    narrowed: dict[int, ast.FunctionDef] = field(default_factory=dict)
    # methods that raise first, or that go as a whole
    unrun: set[int] = field(default_factory=set)
    # arguments and parameters to add once it is known which ones go: (file, call or function, name, value)
    added: list[tuple[SourceFile, ast.Call | ast.FunctionDef, str, str]] = field(default_factory=list)

    def edit_set(self, file: SourceFile) -> EditSet:
        return self.edits.setdefault(file.shown, EditSet(file))

    def refuse(self, file: SourceFile, node: ast.AST, code: str, fact: str, todo: str) -> None:
        self.findings.append(Diagnostic(code, Severity.BLOCKING, fact, todo, file.span(node)))

    def optional(self, file: SourceFile, node: ast.AST, code: str, fact: str, todo: str) -> None:
        """A task that does not change the result as configured."""
        self.findings.append(Diagnostic(code, Severity.WARNING, fact, todo, file.span(node)))

    def mark_removed(self, func: Func, stmts: set[ast.stmt]) -> None:
        """Statements that go; what they read may become dead."""
        key = id(func.node)
        self.functions[key] = func
        self.removed.setdefault(key, set()).update(stmts)
        self.freed.setdefault(key, set()).update(names_read(stmts))

    def remove_seam(self, seam: Seam) -> None:
        """What the paged attention replaces goes, in whichever functions it stands."""
        for owner, stmt in seam.removed:
            self.mark_removed(owner, {stmt})

    def use(self, func: ast.FunctionDef, names: set[str]) -> None:
        self.used.setdefault(id(func), set()).update(names)

    def use_at(self, func: ast.FunctionDef, line: int, names: set[str]) -> None:
        self.used_at.setdefault(id(func), []).append((line, names))

    def unit(self, func: ast.FunctionDef, file: SourceFile) -> str:
        return indent_unit(file, func)

    def fresh_name(self, func: ast.FunctionDef, want: str) -> str:
        """A name that the function does not use yet."""
        taken = {n.id for n in ast.walk(func) if isinstance(n, ast.Name)} | {
            a.arg for a in [*func.args.posonlyargs, *func.args.args, *func.args.kwonlyargs]
        }
        name = want
        while name in taken:
            name = f"paged_{name}" if not name.startswith("paged_") else f"{name}_"
        return name

    def module_name(self, file: SourceFile, qualified: str) -> str | None:
        """The name under which a file binds a module, e.g. `torch`."""
        for name, value in self.facts.program.modules[file.shown].items():
            if isinstance(value, External) and value.name == qualified:
                return name
        return None

    def torch_name(self, file: SourceFile) -> str | None:
        """The name of torch in a file; a refusal if it has none."""
        name = self.module_name(file, "torch")
        if name is None:
            self.refuse(file, file.tree, "KV201", "The file does not import torch by name.", "Add `import torch`.")
        return name

    def frames_of(self, func: ast.FunctionDef) -> list[Frame]:
        """Activations of a function in both runs."""
        return [f for f in self.frames if f.func is func]

    @cached_property
    def frames(self) -> tuple[Frame, ...]:
        """All activations, prefill before decode."""
        runs = (self.facts.prefill, self.facts.decode)
        return tuple(f for run in runs if run is not None for f in run.walk.frames)

    @cached_property
    def frames_by_call(self) -> dict[int, list[Frame]]:
        """Activations by the node (its id) of the call that made them."""
        out: dict[int, list[Frame]] = {}
        for frame in self.frames:
            if isinstance(frame.call, ast.Call):
                out.setdefault(id(frame.call), []).append(frame)
        return out

