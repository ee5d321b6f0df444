"""What a generation loop hands to its model: converted where the paged step gives the same, refused where it may not.

Each case changes the skeleton runner in one way; `None` as the wanted text is a refusal at the line of `at`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest

from kvskill.diagnostics import Refusal

RUNNER = "runner_skel.py"
ARANGE = "position_ids = torch.arange(input_seq_len, device=self.device).unsqueeze(0).expand(batch_size, -1)\n"
COUNTER = "kv_len = torch.tensor([input_seq_len + step] * batch_size, dtype=torch.int32, device=self.device)\n"
DECODE = "position_ids = kv_len.unsqueeze(-1)\n"
EOS = "if (next_token == self.tokenizer.eos_token_id).all():\n"
IDS = "input_ids = inputs.input_ids.to(self.device)\n"
PICK = "next_token = outputs.logits[:, -1].argmax(dim=-1, keepdim=True)\n"
CACHES = "past_key_values = self.init_static_kvcache(batch_size, self.max_seq_len)\n"
FOR = "for step in range(self.max_new_tokens - 1):\n"


def _change(folder: Any, old: str, new: str, count: int = 1) -> None:
    """Replace the first places of a statement, its indentation kept for every line of the new text."""
    path = folder.model / RUNNER
    text = path.read_text(encoding="utf-8")
    assert old in text, old
    for _ in range(count):
        at = text.index(old)
        lead = text[text.rindex("\n", 0, at) + 1 : at]
        text = text[:at] + new.rstrip("\n").replace("\n", f"\n{lead}") + "\n" + text[at + len(old) :]
    path.write_text(text, encoding="utf-8")


def _converts(folder: Any) -> str:
    folder.convert()
    text = (folder.model / RUNNER).read_text(encoding="utf-8")
    ast.parse(text)
    return str(text[text.index("def model_generate") :])


def _refused(folder: Any, at: str) -> str:
    before = folder.sources()
    folder.analyze()
    with pytest.raises(Refusal) as caught:
        folder.apply()
    first = caught.value.findings[0]
    line = (folder.model / RUNNER).read_text(encoding="utf-8").splitlines()[first.span.line - 1]
    assert first.code == "KV290" and first.todo and at in line, (first, line)
    assert folder.sources() == before
    return str(first.fact)


def _check(folder: Any, at: str | None) -> str:
    return _converts(folder) if at is None else _refused(folder, at)


# --- positions of prefill


@pytest.mark.parametrize(
    ("new", "at"),
    [
        ("position_ids = torch.arange(0, input_seq_len)[None, :].repeat(batch_size, 1).to(self.device)", None),
        ("position_ids = torch.arange(self.max_seq_len)[:input_seq_len].expand(batch_size, -1)", None),
        ("position_ids = torch.tensor([list(range(input_ids.shape[1]))] * batch_size)", None),
        ("position_ids = inputs.attention_mask.long().cumsum(-1) - 1\n"
         "position_ids.masked_fill_(inputs.attention_mask == 0, 1)", None),
        ("position_ids = (inputs['attention_mask'].cumsum(dim=1) - 1).clamp(min=0)", None),
        ("mask = inputs.attention_mask\nposition_ids = (mask.cumsum(-1) - 1) * mask", None),
        ("position_ids = inputs.attention_mask.cumsum(-1) - 1\nposition_ids[inputs.attention_mask == 0] = 0", None),
        ("first = 0\nposition_ids = first + torch.arange(input_seq_len).unsqueeze(0)", None),
        ("position_ids = torch.arange(input_seq_len).unsqueeze(0).expand(batch_size, -1) + 2", "+ 2"),
        ("position_ids = torch.arange(2, input_seq_len + 2).unsqueeze(0)", "arange(2"),
        ("position_ids = torch.arange(input_seq_len).unsqueeze(0)\nposition_ids = position_ids + self.off", "self.off"),
        ("position_ids = torch.arange(input_seq_len).unsqueeze(0).clone()\nposition_ids += 2", "+= 2"),
        ("position_ids = torch.arange(input_seq_len).unsqueeze(0).clone()\nposition_ids.add_(1)", "add_(1)"),
        ("position_ids = torch.arange(input_seq_len).unsqueeze(0).clone()\nother = position_ids\nother += 2", "arange"),
        ("position_ids = torch.arange(input_seq_len).unsqueeze(0).clone()\nposition_ids[:, 0] = 7", "= 7"),
        ("position_ids = torch.arange(input_seq_len).unsqueeze(0).clone()\nself.shift(position_ids)", "position_ids ="),
        ("position_ids = torch.arange(input_seq_len).unsqueeze(0).clone()\n"
         "_ = torch.add(position_ids, 2, out=position_ids)", "position_ids ="),
        ("position_ids = torch.arange(input_seq_len).unsqueeze(0)\nlogger.debug('%s', position_ids)", None),
        ("position_ids = torch.arange(input_seq_len).flip(0).unsqueeze(0)", "flip"),
        ("position_ids = torch.arange(input_seq_len).unsqueeze(0) * 2", "* 2"),
        ("position_ids = torch.arange(0, 2 * input_seq_len, 2).unsqueeze(0)", "2 * input"),
        ("position_ids = torch.arange(self.max_seq_len)[1 : input_seq_len + 1].unsqueeze(0)", "[1 :"),
        ("position_ids = inputs.attention_mask.long().cumsum(-1)", "cumsum(-1)"),
        ("position_ids = (inputs.attention_mask.cumsum(-1) - 1).clamp(max=7)", "clamp(max"),
        ("position_ids = torch.arange(input_seq_len)[None]\nif warm_up:\n    position_ids = position_ids + 1", "+ 1"),
        ("if warm_up:\n    position_ids = torch.arange(input_seq_len)[None]\nelse:\n"
         "    position_ids = torch.arange(input_seq_len).expand(batch_size, -1)", None),
        ("position_ids = self.positions(input_ids)", "self.positions"),
    ],
)
def test_positions_of_prefill(case: Callable[[str], Any], new: str, at: str | None) -> None:
    folder = case("skeleton_gqa")
    _change(folder, ARANGE, new)
    text = _check(folder, at)
    if at is None:
        assert text.count("position_ids = forward_metadata.position_ids") == 2
        head = text.split("outputs =")[0]
        assert "position_ids." not in head.split("position_ids = forward_metadata.position_ids")[1]


# --- lengths and positions of decode


@pytest.mark.parametrize(
    ("before", "counter", "position", "end", "at"),
    [
        ("", "kv_len = torch.full((batch_size,), input_seq_len + step)", "position_ids = kv_len[:, None]", "", None),
        ("past = input_seq_len", "kv_len = torch.full((batch_size,), past)", DECODE, "past += 1", None),
        ("kv_len = torch.full_like(kv_len, input_seq_len)", "", DECODE, "kv_len = kv_len + 1", None),
        ("kv_len.fill_(input_seq_len)", "", DECODE, "kv_len.add_(1)", None),
        ("kv_len = inputs.attention_mask.sum(-1)", "", DECODE, "kv_len += 1", None),
        ("kv_len = position_ids[:, -1] + 1", "", DECODE, "kv_len = position_ids[:, -1] + 1", None),
        ("mask = inputs.attention_mask", "mask = torch.cat([mask, mask.new_ones(batch_size, 1)], -1)\n"
         "kv_len = mask.sum(-1) - 1", "position_ids = mask.cumsum(-1)[:, -1:] - 1", "", None),
        ("", "kv_len = torch.full((batch_size,), generated_ids.shape[1] - 1)", DECODE, "", None),
        ("", COUNTER, "position_ids = kv_len.unsqueeze(1) + 2", "", "+ 2"),
        ("", COUNTER, "position_ids = (kv_len + 2).unsqueeze(1)", "", "+ 2"),
        ("", COUNTER, "position_ids = kv_len.unsqueeze(1)\nposition_ids += 2", "", "kv_len = torch.tensor"),
        ("", COUNTER, "position_ids = kv_len.unsqueeze(1).clone()\nposition_ids.mul_(2)", "", "mul_"),
        ("", "kv_len = torch.full((batch_size,), input_seq_len + step + 1)", DECODE, "", "step + 1"),
        ("", "kv_len = torch.full((batch_size,), input_seq_len + 2 * step)", DECODE, "", "2 * step"),
        ("", "kv_len = torch.full((batch_size,), input_seq_len)", DECODE, "", "input_seq_len)"),
        ("past = input_seq_len", "kv_len = torch.full((batch_size,), past)", DECODE, "past += 2", "past)"),
        ("past = input_seq_len", "kv_len = torch.full((batch_size,), past)", DECODE,
         "if warm_up:\n    past += 1", "past)"),
        ("kv_len = torch.full_like(kv_len, input_seq_len)", "", DECODE, "kv_len = kv_len.clamp(max=9) + 1", "clamp"),
        ("kv_len = inputs.attention_mask.sum(-1)", "", DECODE, "kv_len = kv_len + self.more", "self.more"),
        ("", COUNTER, "position_ids = self.position(kv_len)", "", "self.position"),
    ],
)
def test_lengths_and_positions_of_decode(
    case: Callable[[str], Any], before: str, counter: str, position: str, end: str, at: str | None
) -> None:
    folder = case("skeleton_gqa")
    _change(folder, DECODE, position)
    _change(folder, COUNTER, counter or "pass")
    _change(folder, FOR, f"{before or 'pass'}\n{FOR}")
    _change(folder, EOS, f"{end or 'pass'}\n{EOS}")
    text = _check(folder, at)
    if at is None:
        loop = text.split(FOR.strip())[1]
        assert loop.count("kv_len = self.paged_kv.kv_len") == 1 and loop.count("paged_kv.decode(kv_len)") == 1
        assert "kv_len +" not in loop and "kv_len.add_" not in loop and loop.count("position_ids = ") == 1


# --- who else reads what the step binds anew


@pytest.mark.parametrize(
    ("where", "code", "at"),
    [
        (EOS, "logger.info(f'step at {kv_len}')", None),
        (EOS, "spent = input_seq_len + step", None),
        (EOS, "if int(kv_len[0]) >= self.max_seq_len - 1:\n    break", "int(kv_len[0])"),
        (EOS, "self.seen = kv_len", "self.seen"),
        (EOS, "done = position_ids > 9", "done"),
        (FOR, "limit = int(position_ids.max())", "limit"),
        (FOR, "logger.info(f'{position_ids.shape}')", None),
        ("if not warm_up:\n            for i in", "self.n = kv_len\nif not warm_up:\n            for i in", "self.n ="),
    ],
)
def test_other_reads_of_lengths_and_positions(
    case: Callable[[str], Any], where: str, code: str, at: str | None
) -> None:
    folder = case("skeleton_gqa")
    if where not in (EOS, FOR):
        folder.replace(RUNNER, where, code.replace("\n", "\n        ", 1))
    else:
        _change(folder, where, f"{code}\n{where}")
    _check(folder, at)


@pytest.mark.parametrize("test", ["int(kv_len[0]) < self.max_seq_len", "(kv_len < self.max_seq_len).all()"])
def test_a_loop_that_ends_by_a_length_is_refused(case: Callable[[str], Any], test: str) -> None:
    folder = case("skeleton_gqa")
    _change(folder, COUNTER, "pass")
    _change(folder, FOR, f"kv_len = kv_len + input_seq_len\nwhile {test}:\n")
    _change(folder, EOS, f"kv_len = kv_len + 1\n{EOS}")
    _refused(folder, "while")


# --- the order of the step and what is made of it


@pytest.mark.parametrize(
    ("counter", "position", "at"),
    [
        (f"{COUNTER}extra = self.embed(kv_len[:, None])", DECODE, None),
        (COUNTER, f"{DECODE}extra = self.embed(position_ids)", None),
        (f"extra = self.embed(kv_len)\n{COUNTER}", DECODE, "extra"),
        (f"{COUNTER}extra = self.embed(position_ids)", DECODE, None),  # refused below: the last step's positions
        (f"{COUNTER}extra = self.embed(kv_len)\nself.kept = extra", DECODE, "self.kept"),
        (f"{COUNTER}extra = kv_len + 1\nif int(extra[0]) > 9:\n    break", DECODE, "int(extra[0])"),
    ],
)
def test_the_step_stands_before_what_reads_it(
    case: Callable[[str], Any], counter: str, position: str, at: str | None
) -> None:
    folder = case("skeleton_gqa")
    _change(folder, DECODE, position)
    _change(folder, COUNTER, counter)
    if counter.endswith("extra = self.embed(position_ids)"):
        _refused(folder, "extra")
        return
    text = _check(folder, at)
    if at is None:
        loop = text.split(FOR.strip())[1]
        step, positions = loop.index("paged_kv.decode("), loop.index("position_ids = forward_metadata")
        assert 0 < step < positions < loop.index("extra =")


@pytest.mark.parametrize(
    ("new", "at"),
    [
        (f"{ARANGE}extra = self.embed(position_ids)\n", None),
        (f"{ARANGE}extra = self.embed(position_ids)\nposition_ids = position_ids.to(torch.int32)\n", None),
        (f"extra = self.embed(position_ids)\n{ARANGE}", "extra"),
        (f"{ARANGE}self.positions = position_ids\n", "self.positions"),
    ],
)
def test_the_same_in_prefill(case: Callable[[str], Any], new: str, at: str | None) -> None:
    folder = case("skeleton_gqa")
    if at == "extra":
        _change(folder, CACHES, f"{CACHES}position_ids = input_ids\n")
    _change(folder, ARANGE, new)
    if at == "self.positions":
        _change(folder, FOR, f"if self.positions is None:\n    return None\n{FOR}")
    text = _check(folder, at)
    if at is None:
        assert text.index("position_ids = forward_metadata.position_ids") < text.index("extra =")


@pytest.mark.parametrize("read", [False, True])
def test_the_step_of_prefill_comes_after_the_caches(case: Callable[[str], Any], read: bool) -> None:
    """Positions that are bound before the caches are allocated: the step needs the new block table."""
    folder = case("skeleton_gqa")
    _change(folder, ARANGE, "pass")
    more = "extra = self.embed(position_ids)\n" if read else ""
    _change(folder, CACHES, f"{ARANGE}{more}{CACHES}")
    if read:
        _refused(folder, "extra")
        return
    text = _converts(folder)
    assert text.index("self.init_static_kvcache(") < text.index("self.paged_kv.prefill(")
    assert "torch.arange" not in text


# --- the tokens and their mask


@pytest.mark.parametrize(
    ("new", "at"),
    [
        ("input_ids = inputs['input_ids'].to(self.device)", None),
        ("input_ids = inputs.input_ids.to(self.device).clone()", None),
        ("inputs = inputs.to(self.device)\ninput_ids = inputs.input_ids", None),
        ("input_ids, mask = inputs.input_ids, inputs.attention_mask", None),
        ("inputs = {k: v.to(self.device) for k, v in inputs.items()}\ninput_ids = inputs['input_ids']", None),
        ("input_ids = inputs.input_ids[:, -self.max_seq_len :]", "input_ids=input_ids"),
        ("input_ids = inputs.input_ids.repeat_interleave(4, dim=0)", "input_ids=input_ids"),
        ("input_ids = inputs.input_ids.repeat(4, 1)", "input_ids=input_ids"),
        ("input_ids = torch.cat([self.system_ids.expand(4, -1), inputs.input_ids], dim=1)", "input_ids=input_ids"),
        ("input_ids = torch.cat([inputs.input_ids, inputs.input_ids[:, -1:]], dim=-1)", "input_ids=input_ids"),
        ("input_ids = F.pad(inputs.input_ids, (0, 8))", "input_ids=input_ids"),
        ("input_ids = self.prepend(inputs.input_ids)", "input_ids=input_ids"),
        ("inputs['input_ids'] = torch.cat([self.system, inputs.input_ids], 1)\ninput_ids = inputs.input_ids",
         "inputs = self.tokenizer("),
        ("inputs.attention_mask[:, 0] = 0\ninput_ids = inputs.input_ids", "inputs = self.tokenizer("),
    ],
)
def test_the_tokens_of_prefill_are_those_of_the_mask(case: Callable[[str], Any], new: str, at: str | None) -> None:
    folder = case("skeleton_gqa")
    _change(folder, IDS, new)
    text = _check(folder, at)
    if at is None:
        wanted = 'inputs["attention_mask"]' if "items()" in new else "inputs.attention_mask"
        assert f"self.paged_kv.prefill({wanted})" in text


TOKENIZE = "inputs = self.tokenizer(\n            prompts, "


@pytest.mark.parametrize(
    ("old", "new", "at"),
    [
        # text only: no tokens of it
        (TOKENIZE, "texts = self.tokenizer.apply_chat_template(prompts, tokenize=False)\n        "
                   "inputs = self.tokenizer(\n            texts, ", None),
        (TOKENIZE, "texts = [self.tokenizer.apply_chat_template(p, tokenize=False) for p in prompts]\n        "
                   "inputs = self.tokenizer(\n            texts, ", None),
        (TOKENIZE, "inputs = self.tokenizer.apply_chat_template(\n            prompts, return_dict=True, ", None),
        (TOKENIZE, "inputs = self.tokenizer.batch_encode_plus(\n            prompts, ", None),
        (TOKENIZE, "encode = self.tokenizer\n        inputs = encode(\n            prompts, ", None),
        (TOKENIZE, f"{TOKENIZE}return_attention_mask=False, ", "def model_generate"),
        (TOKENIZE, "inputs = self.encode(\n            prompts, ", "def model_generate"),
        # the result is not kept
        ("input_ids = inputs.input_ids.to(", "input_ids = input_ids.to(", "input_ids = self.tokenizer("),
    ],
)
def test_the_tokenizer_s_call(case: Callable[[str], Any], old: str, new: str, at: str | None) -> None:
    folder = case("skeleton_gqa")
    folder.replace(RUNNER, old, new)
    if at == "input_ids = self.tokenizer(":
        folder.replace(RUNNER, "inputs = self.tokenizer(", at)
        folder.replace(RUNNER, "max_length=self.input_truncated_len\n        )\n",
                       "max_length=self.input_truncated_len\n        ).input_ids\n")
    text = _check(folder, at)
    if at is None:
        assert "self.paged_kv.prefill(inputs.attention_mask)" in text


# --- reads of the logits of prefill


@pytest.mark.parametrize(
    ("new", "at"),
    [
        ("lengths = inputs.attention_mask.sum(-1)\n"
         "next_token = outputs.logits[torch.arange(batch_size), lengths - 1].argmax(-1, keepdim=True)", None),
        ("last = inputs['attention_mask'].sum(dim=1) - 1\nrows = torch.arange(input_ids.size(0), device=self.device)\n"
         "next_token = outputs.logits[rows, last, :].argmax(-1, keepdim=True)", None),
        ("next_token = outputs.logits[torch.arange(batch_size), -1].argmax(-1, keepdim=True)", None),
        ("next_token = outputs.logits[:, input_seq_len - 1].argmax(-1, keepdim=True)", None),
        ("next_token = outputs.logits[:, input_seq_len - 1 :].argmax(-1)", None),
        ("next_token = outputs.logits.select(1, input_seq_len - 1).argmax(-1, keepdim=True)", None),
        ("next_token = outputs.logits.float().select(1, -1).argmax(-1, keepdim=True)", None),
        # a second pick beside the first one
        (f"logger.info(f'{{outputs.logits[:, -1].max()}}')\n{PICK}", None),
        ("top = outputs.logits[:, -1].max()\nnext_token = outputs.logits.select(1, 3).argmax(-1, True)", "select"),
        ("top = outputs.logits[:, -1].max()\nnext_token = outputs.logits[:, self.last].argmax(-1, True)", "last]"),
        (f"{PICK}second = self.sample(outputs.logits)", "self.sample"),
        (f"{PICK}best = outputs.logits.max(-1).values[:, -1]", "best"),
        (f"{PICK}all_of_them = torch.topk(outputs.logits, 4)", "topk"),
        (f"{PICK}third = outputs.logits[0, -1]", "third"),
        # lengths of another kind, rows in another order
        ("lengths = inputs.attention_mask.sum(-1)\n"
         "next_token = outputs.logits[torch.arange(batch_size), lengths - 2].argmax(-1, keepdim=True)", "self.model("),
        ("rows = torch.arange(batch_size).flip(0)\n"
         "next_token = outputs.logits[rows, inputs.attention_mask.sum(-1) - 1].argmax(-1, True)", "self.model("),
        # what stays as it is
        (f"{PICK}width = outputs.logits.shape[-1]", None),
        (f"{PICK}scores = outputs.logits.log_softmax(-1)[:, :-1]", None),
    ],
)
def test_reads_of_the_logits_of_prefill(case: Callable[[str], Any], new: str, at: str | None) -> None:
    folder = case("skeleton_gqa")
    _change(folder, PICK, new)
    if at == "self.model(":
        _refused(folder, at)
        return
    text = _check(folder, at)
    if at is None:
        head = text.split(FOR.strip())[0]
        assert head.count("forward_metadata.last_token(") == new.count("[:, -1]") + ("[:, -1]" not in new)
        assert "select(" not in head and "- 1]" not in head


# --- the form of the loop


def test_expressions_in_the_calls_are_replaced_where_they_stand(case: Callable[[str], Any]) -> None:
    folder = case("skeleton_gqa")
    _change(folder, ARANGE, "pass")
    _change(folder, DECODE, "pass")
    _change(folder, COUNTER, "pass")
    _change(folder, "position_ids=position_ids,\n", "position_ids=torch.arange(input_seq_len).unsqueeze(0),")
    _change(folder, "position_ids=position_ids,\n", "position_ids=torch.full((batch_size, 1), input_seq_len + step),")
    text = (folder.model / RUNNER).read_text(encoding="utf-8")
    first, second = text.rsplit("kv_len=kv_len,", 1)
    new = f"{first}kv_len=torch.full((batch_size,), input_seq_len + step),{second}"
    (folder.model / RUNNER).write_text(new, encoding="utf-8")
    out = _converts(folder)
    assert out.count("position_ids=forward_metadata.position_ids,") == 2 and "kv_len=paged_kv_len," in out
    assert "paged_kv.decode(paged_kv_len)" in out and "input_seq_len + step" not in out


HELPER = "    def timed(self, stage, **kw):\n        {body}\n\n    @torch.no_grad()\n    def model_generate"


@pytest.mark.parametrize(
    ("body", "at"),
    [
        ("return self.model(**kw)", None),
        ("return self.model(input_ids=kw['input_ids'], past_key_values=kw['past_key_values'])", "self.model("),
        ("kw.pop('kv_len')\n        return self.model(**kw)", "self.timed("),
    ],
)
def test_a_model_that_is_called_through_a_method(case: Callable[[str], Any], body: str, at: str | None) -> None:
    folder = case("skeleton_gqa")
    folder.replace(RUNNER, "outputs = self.model(\n", "outputs = self.timed(\n                'step',\n")
    folder.replace(RUNNER, "    @torch.no_grad()\n    def model_generate", HELPER.format(body=body))
    text = _check(folder, at)
    if at is None:
        assert text.count("forward_metadata=forward_metadata") == 2


def test_prefill_and_decode_in_one_loop_over_prompts_are_refused_there(case: Callable[[str], Any]) -> None:
    folder = case("skeleton_gqa")
    path = folder.model / RUNNER
    text = path.read_text(encoding="utf-8")
    head, body = text.split("def model_generate(self, prompts, warm_up=False):\n")
    body = "".join(f"    {line}\n" if line else "\n" for line in body.rstrip("\n").split("\n"))
    start = "def model_generate(self, all_prompts, warm_up=False):\n        for prompts in all_prompts:\n"
    path.write_text(f"{head}{start}{body}", encoding="utf-8")
    assert "together in a loop" in _refused(folder, "for prompts in all_prompts")


PREPARE = "models/modeling_prep.py"
MASKED = "            position_ids.masked_fill_(attention_mask == 0, 1)\n"
NEW_TOKEN = "            position_ids = kv_len.unsqueeze(1)\n"


@pytest.mark.parametrize(
    ("old", "new", "at"),
    [
        (MASKED, "            position_ids = position_ids.clamp(min=0)\n", None),
        (NEW_TOKEN, "            position_ids = kv_len.view(-1, 1).long()\n", None),
        (MASKED, f"{MASKED}            position_ids = position_ids + 2\n", "+ 2"),
        (MASKED, f"{MASKED}            position_ids += 2\n", "+= 2"),
        (MASKED, f"{MASKED}            position_ids.add_(self.offset)\n", "add_"),
        (NEW_TOKEN, f"{NEW_TOKEN}            position_ids = position_ids + 2\n", "+ 2"),
        (NEW_TOKEN, "            position_ids = kv_len.unsqueeze(1) * 2\n", "* 2"),
        (NEW_TOKEN, "            position_ids = self.position(kv_len)\n", "self.position"),
    ],
)
def test_positions_that_a_model_prepares(case: Callable[[str], Any], old: str, new: str, at: str | None) -> None:
    folder = case("skeleton_prepare")
    folder.replace(PREPARE, old, new)
    if at is None:
        folder.convert()
        assert "position_ids = forward_metadata.position_ids" in (folder.model / PREPARE).read_text(encoding="utf-8")
        return
    folder.analyze()
    with pytest.raises(Refusal) as caught:
        folder.apply()
    first = caught.value.findings[0]
    line = (folder.model / PREPARE).read_text(encoding="utf-8").splitlines()[first.span.line - 1]
    assert first.code == "KV290" and at in line, (first, line)
