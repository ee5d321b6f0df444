"""What a runner does with the caches beside handing them to the model: stored and returned, or refused at its line."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest

from kvskill.diagnostics import Refusal

RUNNER = "runner_skel.py"
BREAK = "            if (next_token == self.tokenizer.eos_token_id).all():\n"
RETURN = "        return generated_ids"
PREPARE = "        return self.model.prepare_inputs_for_generation(\n"


def _refused(folder: Any, name: str, at: str) -> None:
    before = folder.sources()
    folder.analyze()
    with pytest.raises(Refusal) as caught:
        folder.apply()
    found = [f for f in caught.value.findings if f.code == "KV168"]
    lines = (folder.model / name).read_text(encoding="utf-8").splitlines()
    assert found and found[0].todo, caught.value.findings
    assert at in lines[found[0].span.line - 1], (at, found[0], lines[found[0].span.line - 1])
    assert folder.sources() == before


@pytest.mark.parametrize(
    ("where", "code", "at"),
    [
        # rows in another order, or fewer of them
        (BREAK, "past_key_values = [(k[best], v[best]) for k, v in past_key_values]", "k[best]"),
        (BREAK, "past_key_values = [tuple(t[best] for t in pair) for pair in past_key_values]", "t[best]"),
        (BREAK, "past_key_values = [[t.index_select(0, best) for t in pair] for pair in past_key_values]", "index_sel"),
        (BREAK, "kept = [torch.index_select(k, 0, best) for k, _ in past_key_values]", "torch.index_select"),
        (BREAK, "past_key_values = [(k[: len(best)], v[: len(best)]) for k, v in past_key_values]", "k[: len"),
        (BREAK, "for layer in range(2):\n    past_key_values[layer][0].copy_(best)", "copy_"),
        (BREAK, "past_key_values[0] = (best, best)", "past_key_values[0] ="),
        # positions that are written or zeroed
        (BREAK, "for k, v in past_key_values:\n    k[:, 4:8] = 0", "k[:, 4:8]"),
        (BREAK, "for pair in zip(*past_key_values):\n    for t in pair:\n        t[:, 4:8] = 0", "t[:, 4:8]"),
        (BREAK, "for i, (k, v) in enumerate(past_key_values):\n    k *= 0.5", "k *= 0.5"),
        (BREAK, "caches = past_key_values\nfirst = caches[0]\nfirst[1].narrow(1, 0, 4).zero_()", "narrow"),
        # contents that are kept, written to a file or counted
        (RETURN, "self.saved = [(k[:, :8].cpu(), v[:, :8].cpu()) for k, v in past_key_values]", "self.saved"),
        (RETURN, "torch.save(past_key_values, 'prefix.pt')", "torch.save"),
        (RETURN, "self.store.put(past_key_values)", "self.store.put"),
        (RETURN, "self.held = past_key_values\nself.size = self.held[0][0].shape[1]", "self.held[0][0].shape"),
        (RETURN, "k, v = past_key_values[-1]\nlogger.info(f'{k.sum()}')", "k.sum()"),
        (RETURN, "logger.info(f'{past_key_values}')", "logger.info"),
    ],
)
def test_a_use_of_the_caches_is_refused_at_its_line(case: Callable[[str], Any], where: str, code: str, at: str) -> None:
    folder = case("skeleton_gqa")
    lead = where[: len(where) - len(where.lstrip())]
    lines = "".join(f"{lead}{line}\n" for line in code.split("\n"))
    best = f"{lead}best = outputs.logits[:, -1].max(-1).values.argsort()\n" if "best" in code else ""
    folder.replace(RUNNER, where, best + lines + where)
    _refused(folder, RUNNER, at)


@pytest.mark.parametrize("form", ["argument", "attribute", "result", "key", "keyword", "nested"])
def test_the_caches_are_followed_into_other_functions(case: Callable[[str], Any], form: str) -> None:
    call, head, items = {
        "argument": ("self.reorder(past_key_values)", "def reorder(self, held):", "held"),
        "attribute": ("self.kept = past_key_values\n            self.reorder()", "def reorder(self):", "self.kept"),
        "result": ("self.reorder()", "def reorder(self):", "self.init_static_kvcache(1, 8)"),
        "key": ("self.reorder({'held': past_key_values})", "def reorder(self, state):", "state['held']"),
        "keyword": ("self.reorder(held=past_key_values)", "def reorder(self, **state):", "state.get('held')"),
        "nested": ("self.outer(past_key_values)", "def outer(self, a):\n        self.reorder(a)\n\n    "
                   "def reorder(self, held):", "held"),
    }[form]
    folder = case("skeleton_gqa")
    folder.replace(RUNNER, BREAK, f"            {call}\n{BREAK}")
    folder.replace(
        RUNNER,
        "    def init_static_kvcache",
        f"    {head}\n        for k, v in {items}:\n            k[0] = v[0]\n\n    def init_static_kvcache",
    )
    _refused(folder, RUNNER, "k[0] = v[0]")


@pytest.mark.parametrize(
    ("where", "code"),
    [
        (RETURN, "self.past_key_values = past_key_values"),
        (RETURN, "self.state = {'caches': past_key_values, 'ids': generated_ids}"),
        (RETURN, "if past_key_values is not None and len(past_key_values) > 0:\n    logger.info('kept')"),
        (RETURN, "logger.info(f'{len(past_key_values)} layers on {past_key_values[0][0].device}')"),
        (RETURN, "for k, v in past_key_values:\n    k.zero_()\n    v.zero_()"),
        (RETURN, "del past_key_values"),
        (BREAK, "past_key_values = [(k, v) for k, v in past_key_values]"),
        (BREAK, "held = ()\nfor pair in past_key_values:\n    new = ()\n    for t in pair:\n        new += (t,)\n"
                "    held += (new,)\npast_key_values = held"),
        (BREAK, "past_key_values = self.same(past_key_values)"),
    ],
)
def test_caches_that_are_stored_and_handed_on_convert(case: Callable[[str], Any], where: str, code: str) -> None:
    folder = case("skeleton_gqa")
    lead = where[: len(where) - len(where.lstrip())]
    folder.replace(RUNNER, where, "".join(f"{lead}{line}\n" for line in code.split("\n")) + where)
    folder.replace(
        RUNNER,
        "    def init_static_kvcache",
        "    def same(self, held):\n        return tuple(held)\n\n"
        "    @staticmethod\n    def _reorder_cache(past, index):\n"  # nobody calls it
        "        return tuple(tuple(t.index_select(0, index) for t in pair) for pair in past)\n\n"
        "    def init_static_kvcache",
    )
    folder.convert()
    ast.parse((folder.model / RUNNER).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("code", "refused"),
    [
        ("held = self.past_key_values", False),
        ("held = input_dict.get('past_key_values')[0]\n        held[0][:, :2] = 0", True),
        ("for pair in input_dict['past_key_values']:\n            self.seen = pair[0][0]", True),
    ],
)
def test_the_same_where_the_model_prepares_its_inputs(case: Callable[[str], Any], code: str, refused: bool) -> None:
    folder = case("skeleton_prepare")
    folder.replace("runner_prep.py", PREPARE, f"        {code}\n{PREPARE}")
    if refused:
        _refused(folder, "runner_prep.py", code.split("\n")[1].strip())
    else:
        assert folder.convert().status == "converted"
