"""Before anything is written: is the result what the plan claimed?

The new text parses (libcst round trip), the code walks in paged form to logits of one row per request, no Legacy
declaration is left, comments outside replaced code are still there, and planning the result gives nothing to do.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Mapping
from typing import Any

import libcst as cst

from kvskill.analyzer.modeling.dims import Dim
from kvskill.analyzer.modeling.facts import ModelFacts
from kvskill.analyzer.modeling.operators import ATTEND_OPS
from kvskill.analyzer.modeling.program import Program, bind_files
from kvskill.analyzer.modeling.reader import read_program
from kvskill.analyzer.modeling.run import Run, draft_class, run_model
from kvskill.analyzer.modeling.settings import settings_of
from kvskill.analyzer.modeling.trace import ancestors
from kvskill.analyzer.modeling.values import Const, Instance, Tensor, Tup, Value
from kvskill.diagnostics import Diagnostic, Severity, Span
from kvskill.implementer.names import first_use, unbound_names
from kvskill.implementer.plan import Plan
from kvskill.source import SourceFile

__all__ = ["postcheck"]


def postcheck(plan: Plan, facts: ModelFacts, config: Mapping[str, Any]) -> list[Diagnostic]:
    """Findings that stop the write; empty when the result holds."""
    out: list[Diagnostic] = []
    files = dict(facts.program.files)
    for shown, new in plan.results().items():
        old = files[shown]
        problem = _parses(old, new)
        if problem is not None:
            return [problem]
        files[shown] = SourceFile(old.path, shown, new, old.encoding, ast.parse(new, filename=shown))
        out.extend(_comments(old, files[shown], plan))
        out.extend(_names(old, files[shown]))
    program = bind_files(files, facts.program.root)
    assert facts.entry is not None
    entry = program.find(facts.entry.name)
    assert entry is not None
    again = read_program(program, config, entry=entry.name)
    if again.state != "paged":
        out.append(_finding(entry.file, entry.node, "KV260", f"The result reads as `{again.state}`, not as paged."))
        return out
    config = settings_of(program, entry, config)
    drafts = any("mtp" in c.name.lower() for c in program.classes())
    for phase in ("prefill", "decode"):
        draft = draft_class(program, entry, config)
        run = run_model(program, entry, config, phase, "paged", drafts=drafts, draft=draft)
        out.extend(_walks(run, program))
    return out


def _finding(file: SourceFile, node: ast.AST | None, code: str, fact: str) -> Diagnostic:
    span = file.span(node) if node is not None else Span(file.shown)
    todo = "Nothing was written. Convert this part by hand, or report it: the plan's own check failed."
    return Diagnostic(code, Severity.BLOCKING, fact, todo, span)


def _parses(old: SourceFile, new: bytes) -> Diagnostic | None:
    try:
        module = cst.parse_module(new)
        ast.parse(new)
    except Exception as exc:
        return _finding(old, None, "KV261", f"The result is not valid Python ({exc}).")
    if module.bytes != new:
        return _finding(old, None, "KV261", "The result does not survive a parse and print.")
    return None


def _comments(old: SourceFile, new: SourceFile, plan: Plan) -> list[Diagnostic]:
    """Comments outside edited lines must all be there."""
    touched = plan.edits[old.shown].touched_lines()
    want = Counter(text for line, text in _comment_lines(old.raw) if line not in touched)
    have = Counter(text for _, text in _comment_lines(new.raw))
    lost = want - have
    return [_finding(old, None, "KV262", f"The comment {text!r} would be lost.") for text in lost]


def _names(old: SourceFile, new: SourceFile) -> list[Diagnostic]:
    """A name that the source bound and the result does not."""
    before, after = (unbound_names(f.raw.decode(f.encoding), f.shown) for f in (old, new))
    return [
        _finding(new, first_use(new.tree, name), "KV267", f"`{name}` would be read and never bound.")
        for name in sorted(after - before)
    ]


def _comment_lines(raw: bytes) -> list[tuple[int, str]]:
    try:
        return [
            (t.start[0], t.string) for t in tokenize.tokenize(io.BytesIO(raw).readline) if t.type == tokenize.COMMENT
        ]
    except (tokenize.TokenError, SyntaxError, IndentationError):
        return []


def _walks(run: Run, program: Program) -> list[Diagnostic]:
    out: list[Diagnostic] = []
    for problem in run.walk.problems[:2]:
        out.append(
            _finding(
                problem.frame.file,
                problem.node,
                "KV263",
                f"In paged {run.phase} the shapes do not fit here ({problem.text}).",
            )
        )
    out.extend(_logits(run, run.root, run.result))
    if run.draft is not None:
        out.extend(_logits(run, run.draft, run.drafted))
    out.extend(_picked_rows(run))
    out.extend(_attends(run))
    return out


def _picked_rows(run: Run) -> list[Diagnostic]:
    """The last token of each prompt is picked from packed rows, not from the axis of a row that is left over."""
    for t in run.walk.tensors:
        source = t.parents[0] if t.parents else None
        if t.op != "index_select" or not t.stream or t.frame is None or not isinstance(source, Tensor):
            continue
        if not source.stream or source.shape is None or t.attrs.get("axis") != 0:
            continue
        if not any(a.op == "input:actual_seq_lengths_cu_q" for a in ancestors(t.parents[1:])):
            continue
        if source.shape[0].value is not None:
            shown = ", ".join(map(str, source.shape))
            fact = f"The last tokens are picked from [{shown}], not from packed tokens [T, H]."
            return [_finding(t.frame.file, t.node, "KV264", fact)]
    return []


def _logits(run: Run, root: Instance, value: Value) -> list[Diagnostic]:
    file, node = root.cls.file, root.cls.node
    if isinstance(value, Tup) and value.items:
        value = value.items[0]
    if not isinstance(value, Tensor) or value.shape is None:
        return [_finding(file, node, "KV264", f"The shape of the logits is not known in {run.phase}.")]
    rows = Dim.atom("n")
    shown = ", ".join(map(str, value.shape))
    if len(value.shape) != 3 or value.shape[0] != rows:
        return [_finding(file, node, "KV264", f"The logits of {run.phase} are [{shown}], not one row per request.")]
    if run.phase == "prefill" and value.shape[1].value != 1:
        return [_finding(file, node, "KV264", f"The logits of prefill are [{shown}], not [n, 1, V].")]
    return []


def _attends(run: Run) -> list[Diagnostic]:
    """Every fused call reads packed queries, and rotary inputs follow positions, not counts."""
    out: list[Diagnostic] = []
    calls = [c for c in run.walk.calls if c.name in ATTEND_OPS]
    tokens = Dim.atom("T")
    if run.phase == "decode":
        ids = next(t for t in run.walk.tensors if t.op == "input:slot_mapping")
        assert ids.shape is not None
        tokens = ids.shape[0]
    for call in calls:
        q = call.args[0] if call.args else call.kwargs.get("query")
        if call.kwargs.get("input_layout") != Const("TND"):
            continue
        if not isinstance(q, Tensor) or q.shape is None or len(q.shape) != 3 or q.shape[0] != tokens:
            shown = "unknown" if not isinstance(q, Tensor) or q.shape is None else ", ".join(map(str, q.shape))
            out.append(
                _finding(call.frame.file, call.node, "KV265", f"The query of {run.phase} is [{shown}], not [T, N, D].")
            )
        if isinstance(q, Tensor):
            out.extend(_positions(run, q))
    if not calls:
        out.append(_finding(run.root.cls.file, run.root.cls.node, "KV265", "No fused attention call is left."))
    return out


def _positions(run: Run, q: Tensor) -> list[Diagnostic]:
    for t in ancestors([q]):
        if t.stream or t.frame is None:
            continue
        counted = t.op == "arange" and t.shape and t.shape[0].atoms & {"T", "n", "q"}
        if counted:
            return [
                _finding(t.frame.file, t.node, "KV266", "Rotary positions are counted over the packed tokens here.")
            ]
    return []
