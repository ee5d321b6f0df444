"""Is what a loop hands to its model what the paged step gives? Shown by formulas, or refused at the line.

Prefill: the tokenizer's own tokens under its own mask, positions from 0 on (by column, or counted in the mask). Decode:
lengths and positions are the tokens so far (columns, or real ones), one more in each step.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass

from kvskill.analyzer.runner.files import leaf
from kvskill.implementer.standalone.flow import Flow
from kvskill.implementer.standalone.formulas import Arange, Counted, Grid, Num, Tok, Value, is_mask, key, num

__all__ = [
    *("Doubt", "as_counted", "counts_on", "from_zero", "into_empty"),
    *("mask_text", "own_tokens", "tokenizer_call", "tokenizers"),
]

_METHODS = ("apply_chat_template", "batch_encode_plus", "encode_plus", "pad")


@dataclass(frozen=True, eq=False)
class Doubt:
    """Where something is not certain, what it is, and what to do."""

    node: ast.AST
    what: str
    todo: str


def tokenizers(tree: ast.Module) -> frozenset[str]:
    """Names and attributes that hold a tokenizer: made by a class that says so, or called so."""
    found = set()
    for n in ast.walk(tree):
        if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call):
            made = "Tokenizer" in ast.unparse(n.value.func)
            found |= {name for t in n.targets if made and (name := leaf(t)) is not None}
        if isinstance(n, ast.Assign) and leaf(n.value) in found:
            found |= {name for t in n.targets if (name := leaf(t)) is not None}
    return frozenset(found)


def tokenizer_call(call: ast.Call, known: frozenset[str]) -> bool:
    """Does the call give token ids with their mask? A template that is only written out as text does not."""
    target = call.func
    given = {k.arg: k.value for k in call.keywords if k.arg in ("tokenize", "return_attention_mask")}
    if any(isinstance(v, ast.Constant) and not v.value for v in given.values()):
        return False
    return _named(target.value if isinstance(target, ast.Attribute) and target.attr in _METHODS else target, known)


def _named(node: ast.expr, known: frozenset[str]) -> bool:
    name = leaf(node) or ""
    return name in known or "tokenizer" in name


def mask_text(flow: Flow, at: ast.stmt) -> str | None:
    """An expression of the padding mask of the prompts, as the state before a statement has it."""
    envs = flow.before.get(id(at), [])
    for name in envs[0] if envs else ():
        held = [env.get(name) for env in envs]
        if all(isinstance(v, Tok) and _whole_mask(v.mask) for v in held):
            plain = any(isinstance(v, Tok) and v.plain for v in held)
            return f'{name}["attention_mask"]' if plain else f"{name}.attention_mask"
    return next((n for n in envs[0] if all(_whole_mask(e.get(n)) for e in envs)), None) if envs else None


def _whole_mask(v: Value) -> bool:
    return is_mask(v) and v.cols.same(num(P=1))


def own_tokens(flow: Flow, at: ast.stmt, ids: ast.expr) -> Doubt | None:
    """Are the tokens of prefill those that the mask belongs to?"""
    if _all(isinstance(v, Grid) and v.what == "ids" for v in flow.values(at, ids)):
        return None
    return Doubt(
        ids,
        "the tokens of prefill are not known to be the tokenizer's as they came, so its padding mask may not fit them",
        "Change prompts before the tokenizer (its text, its truncation, one text for each sample), not its result.",
    )


def from_zero(flow: Flow, at: ast.stmt, positions: ast.expr, bound: list[ast.stmt]) -> Doubt | None:
    """Are prefill's positions 0, 1, .. by column or by real token?"""
    if _all(_prompt(v) for v in flow.values(at, positions)):
        return None
    return Doubt(
        _place(flow, at, positions, bound),
        "the positions of prefill are not known to be 0, 1, 2, .. of each prompt, which the paged step gives",
        "Take `arange` over the columns, or `attention_mask.cumsum(-1) - 1`; add an offset in the model, not here.",
    )


def _prompt(v: Value) -> bool:
    if isinstance(v, Arange):
        return v.start.same(num()) and v.stop is not None and v.stop.same(num(P=1))
    return isinstance(v, Counted) and v.offset == -1 and v.added == 0


def into_empty(flow: Flow, at: ast.stmt, lengths: ast.expr) -> Doubt | None:
    """Prefill writes from position 0 on, as far as its lengths are known."""
    if not any(isinstance(v, Num) and not v.same(num()) for v in flow.values(at, lengths)):
        return None
    return Doubt(lengths, "the lengths of prefill are not 0", "Let prefill begin with an empty cache.")


def counts_on(flow: Flow, at: ast.stmt, value: ast.expr, bound: list[ast.stmt], what: str) -> Doubt | None:
    """Is the value of decode the number of tokens so far, in each of the rounds?"""
    seen = flow.values(at, value)
    wanted = [[num(i, P=1) for i in range(len(seen))], [num(i, L=1) for i in range(len(seen))]]
    if len(seen) > 1 and any(all(w.same(v) for w, v in zip(ws, seen, strict=True)) for ws in wanted):
        return None
    return Doubt(
        _place(flow, at, value, bound),
        f"{what} of decode are not known to be the number of tokens so far, one more in each step",
        "Count on from the prompt's length (`prompt_len + step`, or `kv_len + 1` at the end of each round).",
    )


def as_counted(flow: Flow, at: ast.stmt, value: ast.expr, bound: list[ast.stmt]) -> Doubt | None:
    """Is the position of the new token the number of cached tokens that came in?"""
    if _all(num(K=1).same(v) for v in flow.values(at, value)):
        return None
    return Doubt(
        _place(flow, at, value, bound),
        "the position of the new token is not known to be `kv_len`, the number of cached tokens",
        "Let `kv_len` be that number before the step and take it as it is; add an offset in the model, not here.",
    )


def _all(seen: Iterable[bool]) -> bool:
    """All of them, and there are some."""
    found = list(seen)
    return bool(found) and all(found)


def _place(flow: Flow, at: ast.stmt, value: ast.expr, bound: Iterable[ast.stmt]) -> ast.AST:
    """The last statement that binds the value, where it is a name; the value itself otherwise."""
    ahead = [s for s in bound if s.lineno <= at.lineno and id(s) in flow.before] or list(bound)
    return max(ahead, key=lambda s: s.lineno) if ahead and key(value) is not None else value
