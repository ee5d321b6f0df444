"""From figures to findings: what differs, where it begins, and the likely cause with its rule page."""

from __future__ import annotations

from typing import Any

from kvskill.diagnostics import Diagnostic, InputError, Severity, Span
from kvskill.verifier.compare import Comparison, first_difference
from kvskill.verifier.discover import ModelUnderTest
from kvskill.verifier.jobs import Outcome
from kvskill.verifier.report import Check

__all__ = ["child_finding", "difference_findings", "observation_findings", "problem_findings"]

_CHECK_CODES = {
    "init.cache-info": ("KV410", "Add get_cache_info to the ForCausalLM class, or run `kvskill apply`."),
    "init.allocation": ("KV411", "Give every CacheEntry a tensor_setter and needs_block=True."),
    "init.setters": ("KV411", "Bind the layer in each setter (`lambda t, layer=self: setattr(layer, ...)`)."),
    "init.own-storage": ("KV412", "Each layer and each of k and v needs a cache of its own."),
    "init.weights": ("KV413", "Check load_weights: the conversion must not rename parameters."),
    "run.block-table-key": ("KV404", "Index block_table and slot_mapping by the layer's own manager key."),
    "run.kv-length": ("KV405", "Pass actual_seq_lengths_kv: it counts the token just written."),
    "run.logits-shape": ("KV414", "Return [requests, 1, V] in prefill and [batch, q, V] in decode."),
    "run.again": (
        "KV416",
        "Something is kept between requests: index caches by slots only, never by batch row.",
    ),
    "run.staggered": ("KV417", "A result depends on the batch row, on neighbours, or on blocks nobody owns."),
    "run.split": ("KV424", "Prefill and decode must compute the same: compare their two attention calls."),
    "run.greedy": ("KV423", "Drafts must not change what the model chooses: look at its decode with several queries."),
    "run.draft": (
        "KV423",
        "Compare the draft model's attention with the Legacy one: arguments are threaded anew there.",
    ),
    "run.draft-split": ("KV423", "Prefill and decode of the draft model must compute the same."),
    "release.split": ("KV415", "Let the framework own the blocks; do not hold or write block lists."),
    "run.rank-places": ("KV422", "Every rank loads the first shard: take the rank from the group that was created."),
    "run.ranks-agree": ("KV422", "Gather or reduce over the group that the layer is sharded on."),
    "release.blocks": ("KV415", "Let the framework own the blocks; do not hold or write block lists."),
    "release.no-leak": ("KV415", "Let the framework own the blocks; do not hold or write block lists."),
    "release.staggered": ("KV415", "Let the framework own the blocks; do not hold or write block lists."),
    "runner.allocation": (
        "KV455",
        "Allocate [rows * ceil(length / block_size), block_size, heads, dim] and an int32 table of these blocks.",
    ),
    "runner.own-storage": ("KV412", "Each layer and each of its caches needs a tensor of its own."),
    "runner.slots": ("KV461", "Take slots from the table: block id * block_size + position % block_size."),
    "runner.key-lengths": ("KV405", "Count the tokens in the cache by row, the one just written included."),
    "runner.kv-length": ("KV405", "The first decode step sees the prompt and the token just written, by row."),
    "runner.fed-tokens": ("KV414", "Take each row's last real token from the logits, and feed its best one."),
    "runner.reuse": ("KV416", "Something is kept between calls of model_generate: lengths, slots or cache rows."),
    "runner.batch-of-one": ("KV417", "A result depends on the other rows of the batch, or on padding."),
    "runner.overflow": ("KV425", "Compare each row's length with the cache's before a step, and raise."),
    "runner.ranks-agree": ("KV422", "Gather or reduce over the group that the layer is sharded on."),
    "runner.log-lines": ("KV426", "Keep the line `... inference time cost of {stage} is X ms` for both stages."),
}


def problem_findings(checks: list[Check], model: ModelUnderTest, explained: bool = False) -> list[Diagnostic]:
    """A finding for every named check that fails. `explained`: the attention calls already show a cause, of which
    runs that differ from each other are a consequence."""
    out = []
    for check in checks:
        if check.ok is False and not (explained and check.name in ("run.again", "run.staggered")):
            code, todo = _CHECK_CODES.get(check.name, ("KV400", "See the check's figures."))
            fact = f"Check {check.name} fails: {check.text}."
            out.append(Diagnostic(code, Severity.ERROR, fact, todo, Span(model.shown), {"check": check.name}))
    return out


def child_finding(outcome: Outcome, model: ModelUnderTest, party: str) -> Diagnostic:
    """Why a party that had to run did not come to its end."""
    phase = outcome.result.get("phase", "start")
    if outcome.died is not None:
        code = "KV408" if outcome.died.startswith("no result") else "KV409"
        fact = f"The {party} run did not end: {outcome.died} (phase {phase})."
        todo = "Look for an endless loop, a collective that not every rank enters, or an oversized allocation."
        return Diagnostic(code, Severity.ERROR, fact, todo, Span(model.shown), {"log": outcome.log})
    error = outcome.error or {}
    if error.get("target") is None and error.get("type") not in _MEMORY:
        raise _not_the_target(error, phase, model)
    if error.get("type") in ("ImportError", "ModuleNotFoundError") and "transformers" in error.get("message", ""):
        raise _other_transformers(error, outcome, model)
    where = error.get("model") or error.get("target")
    span = Span(where["file"], where["line"]) if where else Span(model.shown)
    data = {"trace": error.get("trace", ""), "phase": phase, "type": error.get("type")}
    kind, message = str(error.get("type")), _one_line(error.get("message", ""))
    if kind == "OperatorRuleViolation":
        fact = f"An operator rule is broken: {message}."
        data["rule"] = error.get("rule")
        code = str(error.get("code") or "KV406")
        return Diagnostic(code, Severity.ERROR, fact, "Change the call as the rule says.", span, data)
    if kind in ("MissingKernel", "UnmodelledCall"):
        todo = "This path was not verified; run with --backend npu, or report the operator."
        return Diagnostic("KV432", Severity.ERROR, f"{message}.", todo, span, data)
    if kind == "UnregisteredGroup":
        fact = f"A group is used that the model does not register: {message}."
        todo = "Call comm_manager.register_group for it before the submodules are built."
        return Diagnostic("KV420", Severity.ERROR, fact, todo, span, data)
    if "emory" in kind or "not enough memory" in message or "can't allocate memory" in message:
        fact = f"The {party} run asked for more memory than the limit (phase {phase}): {message}."
        return Diagnostic("KV409", Severity.ERROR, fact, "Look for a size that grows with the wrong axis.", span, data)
    fact = f"The {party} run raised {kind} in phase {phase}: {message}."
    return Diagnostic("KV407", Severity.ERROR, fact, "Follow the traceback (--json has it in full).", span, data)


_MEMORY = ("MemoryError", "OutOfMemoryError")


def _not_the_target(error: dict[str, Any], phase: str, model: ModelUnderTest) -> Exception:
    """An exception with no frame in the target's tree: a missing backend or package, else a fault of kvskill."""
    if error.get("type") in ("BackendError", "ModuleNotFoundError"):
        fact = f"The run cannot start: {_one_line(error.get('message', ''))}."
        todo = "Install what is named, or choose another --backend or --python."
        return InputError(Diagnostic("KV436", Severity.ERROR, fact, todo, Span(model.shown)))
    return RuntimeError(f"a child process failed in phase {phase}:\n{error.get('trace', '')}")


def _other_transformers(error: dict[str, Any], outcome: Outcome, model: ModelUnderTest) -> Exception:
    """The tree was written for another transformers release than the child's interpreter has."""
    where = error.get("model") or error.get("target") or {"file": model.shown, "line": 1}
    fact = f"The target imports what this transformers release does not have: {_one_line(error['message'])}."
    todo = "Name an interpreter with the release the tree needs (4.55 before 2026-05-09, then 5.x): --python."
    return InputError(Diagnostic("KV437", Severity.ERROR, fact, todo, Span(where["file"], where["line"])))


def _one_line(text: str) -> str:
    return " ".join(str(text).split())[:600].rstrip(".")


def difference_findings(
    comparisons: list[Comparison],
    references: dict[str, dict[str, Any]],
    tested: dict[str, Any],
    observations: dict[str, Any],
    attention: dict[str, Any],
    model: ModelUnderTest,
) -> list[Diagnostic]:
    """One finding per oracle that disagrees: the first bad request, position, layer, group and cause."""
    out = []
    for oracle, reference in references.items():
        bad = [c for c in comparisons if c.oracle == oracle and not c.ok]
        if not bad:
            continue
        first = bad[0]
        text, data = _describe(first, reference, tested, observations, len(bad))
        cause = _cause(observations, attention, data.get("layer"), first)
        code = "KV401" if first.nan else "KV400"
        todo = (
            f"Likely cause: {cause[1]}" if cause else "Compare the named layer's attention with the model's definition."
        )
        data["cause"] = cause[0] if cause else None
        out.append(Diagnostic(code, Severity.ERROR, text, todo, Span(model.shown), data))
    return out


def _describe(
    first: Comparison,
    reference: dict[str, Any],
    tested: dict[str, Any],
    observations: dict[str, Any],
    count: int,
) -> tuple[str, dict[str, Any]]:
    data: dict[str, Any] = {"oracle": first.oracle, "request": first.request, "position": first.first_bad}
    where = ""
    if first.first_bad is not None:
        step = first.first_bad - first.prompt + 1
        phase = "prefill" if step <= 0 else f"decode step {step}"
        where = f", first in request {first.request} (prompt {first.prompt}) at position {first.first_bad}, {phase}"
        found = first_difference(reference, tested, first.request, first.first_bad, first.tolerance)
        if found is not None:
            group = observations.get("groups", {}).get(str(found[0]))
            data.update(layer=found[0], kind=found[1], group=group)
            part = "attention" if found[1] == "attention" else "output (its attention agrees)"
            where += f"; layer {found[0]}'s {part} is the first to differ" + (f" (group {group})" if group else "")
    what = f"{first.nan} positions are NaN" if first.nan else f"max |a - b| / max |ref| = {first.relative:.2e}"
    if first.missing or not first.positions:
        what = f"{first.missing or 'all'} positions are missing"
    many = f"{count} requests differ" if count > 1 else "1 request differs"
    return f"Paged and {first.oracle} disagree: {many}, {what} (bound {first.tolerance:.0e}){where}.", data


def observation_findings(observations: dict[str, Any], model: ModelUnderTest) -> list[Diagnostic]:
    """What the recorded attention calls show, one finding per kind. These stand on their own."""
    out = []
    kinds: dict[str, list[dict[str, Any]]] = {}
    for item in observations.get("findings", []):
        kinds.setdefault(item["kind"], []).append(item)
    for kind, items in kinds.items():
        code, fact, todo = _OBSERVED[kind](items[0], sorted({i["layer"] for i in items}))
        data = {"observed": items}
        out.append(Diagnostic(code, Severity.ERROR, fact, todo, Span(model.shown), data))
    return out


def _window(f: dict[str, Any], layers: list[int]) -> tuple[str, str, str]:
    extra = f["visible"] - min(f["window"], f["position"] + 1)
    shows = f"W + {extra}" if extra > 0 else f"W - {-extra}"
    return (
        "KV402",
        f"The window shows {f['visible']} keys where the config's W is {f['window']} ({shows}), first in request "
        f"{f['request']} at position {f['position']}, layers {_list(layers)} (group {f['group']}).",
        "Band mode counts the keys before the query: on TND pass pre_tokens = W - 1.",
    )


def _freed(f: dict[str, Any], layers: list[int]) -> tuple[str, str, str]:
    return (
        "KV403",
        f"A visible key lies in a freed block: key position {f['key_position']} of request {f['request']} at "
        f"position {f['position']}, logical block {f['block']} is physical block {f['physical']}, which the request "
        f"does not own (layers {_list(layers)}, group {f['group']}, {f['count']} times).",
        "The block manager keeps what a W-key window needs; show no more than W keys.",
    )


def _table(f: dict[str, Any], layers: list[int]) -> tuple[str, str, str]:
    return (
        "KV404",
        f"Layers {_list(layers)} belong to group {f['group']} but read through the block table of {f['used']}.",
        "Index block_table and slot_mapping by the layer's own manager key.",
    )


def _length(f: dict[str, Any], layers: list[int]) -> tuple[str, str, str]:
    return (
        "KV405",
        f"Decode passes {f['passed']} as key length of request {f['request']}, where {f['expected']} tokens are "
        f"cached (layers {_list(layers)}).",
        "With a block table, pass actual_seq_lengths_kv: per request, the token just written included.",
    )


_OBSERVED = {"window": _window, "freed-block": _freed, "wrong-table": _table, "kv-length": _length}


def _list(layers: list[int]) -> str:
    return ", ".join(map(str, layers[:8])) + ("..." if len(layers) > 8 else "")


def _cause(
    observations: dict[str, Any], attention: dict[str, Any], layer: int | None, first: Comparison
) -> tuple[str, str] | None:
    """(code, sentence) from what was observed in the layer that differs first, else anywhere."""
    found = observations.get("findings", [])
    kinds = [f["kind"] for f in found if layer is None or f["layer"] == layer] or [f["kind"] for f in found]
    for kind, code, sentence in _CAUSES:
        if kind in kinds:
            return code, sentence
    form = observations.get("forms", {}).get(f"{layer}.decode") or observations.get("forms", {}).get(f"{layer}.prefill")
    theirs = attention.get(str(layer)) if layer is not None else None
    if form and theirs:
        ours, scale = form.get("scale"), theirs.get("scale")
        if ours is not None and scale and abs(ours - scale) > 1e-4 * abs(scale):
            return "KV418", f"the scale passed is {ours:.6g}, the definition's is {scale:.6g} (KV418)."
        if theirs.get("sinks") and not form.get("sinks"):
            return "KV419", "the model has attention sinks, and learnable_sink is not passed (KV419)."
        if theirs.get("window") and form.get("sparse_mode") == 3:
            return "KV402", f"the layer has window {theirs['window']}, and sparse_mode 3 ignores it (KV402)."
        if not theirs.get("window") and form.get("sparse_mode") == 4:
            return "KV402", "the layer has no window, and sparse_mode 4 gives it one (KV402)."
    return None


_CAUSES = (
    ("wrong-table", "KV404", "the layer reads through another group's block table (KV404)."),
    ("kv-length", "KV405", "the key length passed to decode is not the number of cached tokens (KV405)."),
    (
        "freed-block",
        "KV403",
        "a visible key lies in a freed block, since the window shows more than W keys (KV403).",
    ),
    ("window", "KV402", "the window does not show exactly W keys (KV402)."),
)
