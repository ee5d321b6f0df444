"""What the conversion of a runner writes, and what it refuses with a place and without writing."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest

from kvskill.diagnostics import InputError, Refusal

RUNNER, MODEL = "runner_skel.py", "models/modeling_skel.py"


def test_model_and_runner_are_converted_together(case: Callable[[str], Any]) -> None:
    folder = case("skeleton_gqa")
    done = folder.convert()
    assert sorted(c.path.rsplit("/", 1)[1] for c in done.changes) == ["modeling_skel.py", "runner_skel.py"]
    runner = (folder.model / RUNNER).read_text(encoding="utf-8")
    model = (folder.model / MODEL).read_text(encoding="utf-8")
    for text in (runner, model):
        ast.parse(text)
    assert "scatter_update_" not in model and "npu_scatter_nd_update_" in model
    assert "inference time cost of prefill is" in runner and "inference time cost of decode is" in runner
    assert runner.count("self.model(") == 2 and "for step in range(self.max_new_tokens - 1)" in runner
    assert "logits[:, -1].argmax" in runner  # decode has one column
    assert runner.count("forward_metadata.last_token(") == 1


def test_a_second_conversion_changes_nothing(case: Callable[[str], Any]) -> None:
    folder = case("skeleton_gqa")
    folder.convert()
    before = folder.sources()
    assert folder.convert().status == "nothing-to-do"
    assert folder.sources() == before


@pytest.mark.parametrize(
    ("file", "old", "new", "code", "line"),
    [
        (RUNNER, "cache.append((k, v))", "cache.append(Pair(k, v))", "KV290", None),
        (RUNNER, "batch_size, max_seq_len, kv_dim,", "*shape_of(batch_size, kv_dim),", "KV290", "torch.zeros"),
        (MODEL, "(past_key, kv_len,", "(past_key, kv_len - 1,", "KV291", "scatter_update_(past_key, kv_len - 1"),
        (RUNNER, "next_token = outputs.logits[:, -1]", "next_token = pick(outputs)", "KV290", "self.model("),
        (RUNNER, "is_prefill=False,", "is_prefill=step < 0,", "KV290", "self.model("),
        (RUNNER, "inputs = self.tokenizer(", "inputs = self.encode(", "KV290", "def model_generate"),
        (MODEL, "attn_mask=~attention_mask if is_prefill else None,", "attn_mask=alibi(attention_mask),", None, None),
        (MODEL, "past_key, past_value = past_key_value", "past_key, past_value = past_key_value.pair()", None, None),
    ],
)
def test_what_is_not_certain_is_refused_and_nothing_is_written(
    case: Callable[[str], Any], file: str, old: str, new: str, code: str | None, line: str | None
) -> None:
    folder = case("skeleton_gqa")
    folder.replace(file, old, new)
    before = folder.sources()
    analysis = folder.analyze()
    with pytest.raises(Refusal) as caught:
        folder.apply()
    assert folder.sources() == before
    first = caught.value.findings[0]
    assert first.todo and first.span.line > 0 and first.span.path.endswith(".py")
    if code is not None:
        assert first.code == code, (first, analysis.findings)
    if line is not None:
        text = (folder.model / file).read_text(encoding="utf-8").splitlines()
        assert line in text[first.span.line - 1], (first, text[first.span.line - 1])


LATENT = "models/modeling_latent.py"


def test_a_latent_cache_in_rows_becomes_two_paged_caches(case: Callable[[str], Any]) -> None:
    """Mode one to mode three: expanded prefill, absorbed decode, no fused write."""
    folder = case("skeleton_mla")
    assert int(folder.analyze().exit_code) == 0
    folder.apply()
    model = (folder.model / LATENT).read_text(encoding="utf-8")
    runner = (folder.model / "runner_latent.py").read_text(encoding="utf-8")
    assert "scatter_update_(" not in model.replace("npu_scatter_nd_update_(", "")
    assert 'input_layout="NTD_TND"' in model and 'input_layout="TND_NTD"' in model
    assert "num_key_value_heads=1," in model and "def split_up_projection(self, like)" in model
    assert "self.paged_kv.shape(1, latent)" in runner and "self.paged_kv.shape(1, rope)" in runner
    assert "padded left" not in runner  # its rotary takes position_ids
    before = folder.sources()
    assert folder.convert().status == "nothing-to-do" and folder.sources() == before


@pytest.mark.parametrize(
    ("file", "old", "new", "code"),
    [
        # a bias has no place in the absorbed form
        (LATENT, "self.num_heads * (self.qk_nope_head_dim + self.v_head_dim), bias=False", "*up_sizes(self)", None),
        (
            LATENT,
            "(self.qk_nope_head_dim + self.v_head_dim), bias=False",
            "(self.qk_nope_head_dim + self.v_head_dim)",
            "KV289",
        ),
        # the values come first in the up projection
        (
            LATENT,
            "key_nope, value = expanded.split([self.qk_nope_head_dim, self.v_head_dim]",
            "value, key_nope = expanded.split([self.v_head_dim, self.qk_nope_head_dim]",
            "KV270",
        ),
        # both parts in one tensor
        (LATENT, "torch_npu.scatter_update_(past_rope, kv_len, key_rope, 1)", "pass", None),
        (LATENT, "(past_latent, kv_len, latent, 1)", "(past_latent, kv_len + 1, latent, 1)", "KV291"),
        (
            "runner_latent.py",
            "v = torch.zeros(batch_size, max_seq_len, rope,",
            "v = torch.zeros(batch_size, max_seq_len, latent,",
            "KV290",
        ),
        (
            "runner_latent.py",
            "v = torch.zeros(batch_size, max_seq_len, rope,",
            "v = torch.zeros(batch_size, max_seq_len + 1, rope,",
            "KV290",
        ),
    ],
)
def test_latent_attention_that_is_not_certain_is_refused(
    case: Callable[[str], Any], file: str, old: str, new: str, code: str | None
) -> None:
    folder = case("skeleton_mla")
    folder.replace(file, old, new)
    before = folder.sources()
    folder.analyze()
    with pytest.raises(Refusal) as caught:
        folder.apply()
    first = caught.value.findings[0]
    assert folder.sources() == before and first.todo and first.span.line > 0
    assert code is None or first.code == code, first


def test_mini_batches_in_another_form_are_refused(case: Callable[[str], Any]) -> None:
    folder = case("skeleton_minibatch")
    folder.replace("runner_mini.py", "[(k[rows], v[rows]) for k, v in past_key_values]", "part(past_key_values, rows)")
    before = folder.sources()
    folder.analyze()
    with pytest.raises(Refusal) as caught:
        folder.apply()
    assert "mini-batch" in caught.value.findings[0].fact and folder.sources() == before


def test_columns_as_positions_forbid_left_padding(case: Callable[[str], Any]) -> None:
    folder = case("skeleton_gqa")
    folder.replace(
        "models/modeling_skel.py",
        "cos_sin = self.rotary_emb(hidden_states, position_ids)",
        "steps = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)\n"
        "        cos_sin = self.rotary_emb(hidden_states, steps)",
    )
    folder.convert()
    assert "padded left" in (folder.model / "runner_skel.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [RUNNER, MODEL, "helper.py"])
def test_a_file_that_changed_after_the_analysis_makes_the_manifest_stale(case: Callable[[str], Any], name: str) -> None:
    folder = case("skeleton_gqa")
    (folder.model / "helper.py").write_text("X = 1\n", encoding="utf-8")
    folder.analyze()
    path = folder.model / name
    path.write_text(path.read_text(encoding="utf-8") + "\n# later\n", encoding="utf-8")
    before = folder.sources()
    with pytest.raises(InputError) as caught:
        folder.apply()
    assert caught.value.findings[0].code == "KV256" and name in caught.value.findings[0].fact
    assert folder.sources() == before


def test_the_model_s_own_pick_and_positions_come_from_the_metadata(case: Callable[[str], Any]) -> None:
    folder = case("skeleton_prepare")
    folder.convert()
    model = (folder.model / "models" / "modeling_prep.py").read_text(encoding="utf-8")
    assert "last_token(hidden_states).unsqueeze(1)" in model and "torch.gather" not in model
    assert "position_ids = forward_metadata.position_ids" in model and "masked_fill_" not in model
    assert "kv_len = self.paged_kv.kv_len" in model


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("last = torch.max(position_ids, dim=-1)[0]", "last = input_ids.argmax(dim=-1)"),
        ("hidden_states = torch.gather(hidden_states, 1, last)", "hidden_states = hidden_states[:, :1]"),
        (
            "        if hidden_states.size()[1] > 1:\n",
            "        if hidden_states.size()[1] > 1 and self.config.never:\n",
        ),
    ],
)
def test_a_pick_that_is_not_each_row_s_last_token_is_refused(case: Callable[[str], Any], old: str, new: str) -> None:
    folder = case("skeleton_prepare")
    folder.replace("models/modeling_prep.py", old, new)
    before = folder.sources()
    folder.analyze()
    with pytest.raises(Refusal) as caught:
        folder.apply()
    assert caught.value.findings[0].code == "KV290" and folder.sources() == before


@pytest.mark.parametrize("pick", ["hidden_states[:, -1:]", "hidden_states[:, -1, :]", "hidden_states[:, -1:, :]"])
def test_the_last_column_becomes_each_row_s_last_token(case: Callable[[str], Any], pick: str) -> None:
    folder = case("skeleton_prepare")
    folder.replace(
        "models/modeling_prep.py", "hidden_states = torch.gather(hidden_states, 1, last)", f"hidden_states = {pick}"
    )
    for line in (
        "last = torch.max(position_ids, dim=-1)[0]",
        "last = last[:, None, None].expand(-1, 1, hidden_states.shape[-1])",
    ):
        folder.replace("models/modeling_prep.py", f"            {line}\n", "")
    folder.convert()
    model = (folder.model / "models" / "modeling_prep.py").read_text(encoding="utf-8")
    assert (
        "forward_metadata.last_token(hidden_states)" in model
        and "-1" not in model.split("def forward")[-1].split("def prefill")[0]
    )


GATHER = """            if self.attn_tp_size > 1 and self.attn_dp_size > 1:
                gathered = torch.empty([self.attn_tp_size * batch_size], dtype=kv_len.dtype, device=kv_len.device)
                dist.all_gather_into_tensor(gathered, kv_len, group=None)
                kv_len = gathered
"""
ZEROS = "            kv_len = torch.zeros(batch_size, dtype=torch.int32, device=input_ids.device)\n"


@pytest.mark.parametrize("wide", [False, True])
def test_rows_of_several_ranks_are_a_task_and_an_error_at_run_time(case: Callable[[str], Any], wide: bool) -> None:
    """attn_tp and attn_dp above 1: refused where the folder has no other topology, else a task and a `raise`."""
    folder = case("skeleton_prepare")
    folder.replace("models/modeling_prep.py", ZEROS, ZEROS + GATHER)
    folder.replace(
        "models/modeling_prep.py",
        "        self.max_position_embeddings =",
        '        self.attn_dp_size = runner_settings.get("parallel_config").get("attn_dp_size", 1)\n'
        "        self.max_position_embeddings =",
    )
    if wide:
        folder.replace("config/prep.yaml", "  world_size: 2\n", "  world_size: 4\n")
    analysis = folder.analyze()
    task = next(t for t in analysis.manifest.manual if t.code == "KV165")
    assert task.blocking is wide
    text = (folder.model / "models" / "modeling_prep.py").read_text(encoding="utf-8").splitlines()
    assert "all_gather_into_tensor" in text[task.line - 1]
    if wide:
        with pytest.raises(Refusal):
            folder.apply()
        return
    folder.apply()
    model = (folder.model / "models" / "modeling_prep.py").read_text(encoding="utf-8")
    head = model.split("paged_kv.prefill(")[0].splitlines()[-5:]
    assert "if self.attn_tp_size > 1 and self.attn_dp_size > 1:" in "\n".join(head)
    assert "raise NotImplementedError" in "\n".join(head)


@pytest.mark.parametrize(
    ("read", "refused"),
    [
        ("length = past_key_values[0][0].size()[-2]", False),
        ("length = past_key_values[0][0].shape[1]\n        hidden_states = hidden_states * (length / 300)", True),
        ("hidden_states = hidden_states * (past_key_values[0][0].shape[1] / 300)", True),
    ],
)
def test_a_size_of_the_cache_must_not_be_used(case: Callable[[str], Any], read: str, refused: bool) -> None:
    folder = case("skeleton_prepare")
    line = "        hidden_states = self.embed_tokens(input_ids)\n"
    folder.replace("models/modeling_prep.py", line, f"{line}        {read}\n")
    folder.analyze()
    if not refused:
        assert any(f.code == "KV292" for f in folder.apply().findings)
        return
    with pytest.raises(Refusal) as caught:
        folder.apply()
    assert caught.value.findings[0].code == "KV292"


PLAIN_MASK = "return ~torch.tril(torch.ones((mask_length, mask_length), dtype=torch.bool, device=device))"


@pytest.mark.parametrize(
    ("new", "refused"),
    [
        ("return torch.triu(torch.ones(mask_length, mask_length, device=device), diagonal=1).bool()", False),
        ("return ~torch.ones(mask_length, mask_length, device=device).tril().bool()", False),
        ("return ~torch.tril(torch.ones(mask_length, mask_length, device=device), diagonal=3).bool()", True),
        ("return torch.triu(torch.ones(mask_length, mask_length, device=device)).bool()", True),
        (
            'low = torch.tril(torch.ones(mask_length, mask_length, device=device))\n    notes = {}\n'
            '    notes["low"] = low\n    return ((1.0 - low) * torch.finfo(low.dtype).max).bool()',
            False,
        ),
        (
            "at = torch.arange(mask_length, device=device)\n"
            "    near = at[:, None] - at[None] < 7\n"
            "    return ~(torch.ones(mask_length, mask_length, device=device).tril().bool() & near)",
            True,
        ),
        (
            "full = torch.ones(mask_length, mask_length, device=device)\n"
            "    return ~(torch.tril(full) * torch.triu(full, diagonal=-7)).bool()",
            True,
        ),
        (
            "mask = ~torch.tril(torch.ones(mask_length, mask_length, device=device)).bool()\n"
            "    mask[:4, :4] = False\n    return mask",
            True,
        ),
        (  # changed by another function
            "return near(~torch.tril(torch.ones(mask_length, mask_length, device=device)).bool(), 7)\n\n\n"
            "def near(hidden, size):\n"
            "    for row in range(hidden.shape[-1]):\n"
            "        hidden[row, : max(0, row - size + 1)] = True\n"
            "    return hidden",
            True,
        ),
        (  # the same for every row: still the plain triangle
            "return shaped(~torch.tril(torch.ones(mask_length, mask_length, device=device)).bool())\n\n\n"
            "def shaped(hidden):\n"
            "    table = {'mask': hidden, 'size': 0}\n"
            "    table['size'] = hidden.shape[-1]\n"
            "    return table['mask']",
            False,
        ),
        (  # what a model makes of its mask is no mask
            "mask = ~torch.tril(torch.ones(mask_length, mask_length, device=device)).bool()\n"
            "    return mask\n\n\n"
            "def counted(model, device):\n"
            "    hidden = ~torch.tril(torch.ones(4, 4, device=device)).bool()\n"
            "    tokens = model(hidden).argmax(-1)\n"
            "    return tokens + (tokens != 0)",
            False,
        ),
        (
            "mask = ~torch.tril(torch.ones(mask_length, mask_length, device=device)).bool()\n"
            "    mask[:, :4].fill_(False)\n    return mask",
            True,
        ),
        (
            "mask = ~torch.tril(torch.ones(mask_length, mask_length, device=device)).bool()\n"
            "    at = torch.arange(mask_length, device=device)\n"
            "    mask |= at[:, None] - at[None] > 7\n    return mask",
            True,
        ),
        (  # no triangle, but a loop
            "mask = torch.zeros(mask_length, mask_length, device=device).bool()\n"
            "    for row in range(mask_length):\n"
            "        mask[row, row + 1 :] = True\n"
            "        mask[row, : max(0, row - 7)] = True\n"
            "    return mask",
            True,
        ),
    ],
)
def test_a_mask_of_the_runner_that_is_not_plain_causal_is_refused(
    case: Callable[[str], Any], new: str, refused: bool
) -> None:
    folder = case("skeleton_gqa")
    folder.replace(RUNNER, PLAIN_MASK, new)
    folder.analyze()
    if not refused:
        assert folder.apply().status == "converted"
        return
    with pytest.raises(Refusal) as caught:
        folder.apply()
    assert caught.value.findings[0].code == "KV166"


OLD_PAIR = """            k = torch.zeros(batch_size, max_seq_len, kv_dim, dtype=self.dtype, device=self.device)
            v = torch.zeros(batch_size, max_seq_len, kv_dim, dtype=self.dtype, device=self.device)
            cache.append((k, v))
"""
SIZED = "torch.empty(size=(batch_size, max_seq_len, kv_dim), dtype=self.dtype, device=self.device)"


@pytest.mark.parametrize(
    "new",
    [
        OLD_PAIR.replace("(k, v))", "[k, v])"),
        f"            cache.append(({SIZED}, {SIZED}))\n",
        OLD_PAIR.replace(OLD_PAIR.splitlines()[1].strip(), "v = torch.zeros_like(k)"),
    ],
)
def test_other_spellings_of_the_allocation(case: Callable[[str], Any], new: str) -> None:
    folder = case("skeleton_gqa")
    folder.replace(RUNNER, OLD_PAIR, new)
    folder.convert()
    runner = (folder.model / RUNNER).read_text(encoding="utf-8")
    assert "self.paged_kv.shape(self.config.num_key_value_heads, self.config.head_dim)" in runner
    assert "max_seq_len, kv_dim" not in runner


def test_caches_from_a_comprehension(case: Callable[[str], Any]) -> None:
    folder = case("skeleton_gqa")
    pair = f"({SIZED}, {SIZED})"
    folder.replace(RUNNER, f"        for _ in range(self.config.num_hidden_layers):\n{OLD_PAIR}", "")
    folder.replace(RUNNER, "        cache = []\n        return cache", f"        return [{pair} for _ in range(2)]")
    folder.convert()
    assert "return [(torch.empty(size=paged_shape" in (folder.model / RUNNER).read_text(encoding="utf-8")


PICK = "        next_token = outputs.logits[:, -1].argmax(dim=-1, keepdim=True)\n"


@pytest.mark.parametrize(
    ("new", "want"),
    [
        (
            "        next_token = torch.argmax(outputs.logits, dim=-1)[:, -1:]\n",
            "forward_metadata.last_token(torch.argmax(outputs.logits, dim=-1)).unsqueeze(1)",
        ),
        (
            "        first = outputs.logits.float()[:, -1, :].argmax(dim=-1, keepdim=True)\n"
            "        generated_ids = torch.cat([generated_ids, first], dim=-1)\n"
            "        next_token = generated_ids[:, -1].unsqueeze(1)\n"
            "        generated_ids = generated_ids[:, :-1]\n",
            "generated_ids[:, -1].unsqueeze(1)",  # no logits: stays
        ),
        (
            "        probs = torch.softmax(outputs.logits / 0.7, dim=-1)\n"
            "        next_token = probs[:, -1].argmax(dim=-1, keepdim=True)\n",
            "forward_metadata.last_token(probs)",
        ),
        ("        next_token = outputs.logits.argmax(dim=1)[:, -1:]\n", None),
    ],
)
def test_only_the_last_column_of_the_logits_is_replaced(case: Callable[[str], Any], new: str, want: str | None) -> None:
    folder = case("skeleton_gqa")
    path = folder.model / RUNNER
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(PICK, new, 1), encoding="utf-8")
    folder.analyze()
    if want is None:
        with pytest.raises(Refusal):
            folder.apply()
        return
    folder.apply()
    assert want in path.read_text(encoding="utf-8")


def test_the_model_may_be_called_by_position(case: Callable[[str], Any]) -> None:
    folder = case("skeleton_gqa")
    folder.replace(
        RUNNER,
        "            input_ids=input_ids,\n            position_ids=position_ids,\n            past_key_values=past",
        "            input_ids,\n            position_ids,\n            past",
    )
    folder.convert()
    assert (folder.model / RUNNER).read_text(encoding="utf-8").count("forward_metadata=forward_metadata") == 2


def test_lengths_that_are_changed_while_inputs_are_prepared_are_refused(case: Callable[[str], Any]) -> None:
    folder = case("skeleton_prepare")
    line = "            position_ids = kv_len.unsqueeze(1)\n"
    folder.replace("models/modeling_prep.py", line, f"{line}            kv_len = kv_len + 1\n")
    folder.analyze()
    with pytest.raises(Refusal) as caught:
        folder.apply()
    found = caught.value.findings[0]
    text = (folder.model / "models" / "modeling_prep.py").read_text(encoding="utf-8").splitlines()
    assert found.code == "KV290" and "kv_len = kv_len + 1" in text[found.span.line - 1]


def test_the_step_is_marked_where_the_runner_marks_its_graph_inputs(case: Callable[[str], Any]) -> None:
    """In a loop where the step is built; where a dict of inputs is marked, after that."""
    folder = case("skeleton_gqa")
    folder.replace(
        RUNNER,
        "            cache.append((k, v))\n",
        "            torch._dynamo.mark_static(k)\n            cache.append((k, v))\n",
    )
    folder.convert()
    text = (folder.model / RUNNER).read_text(encoding="utf-8")
    assert "def mark_static(self):" in text and text.count("forward_metadata.mark_static()") == 1


def test_a_dict_of_inputs_is_marked_with_the_step(case: Callable[[str], Any]) -> None:
    folder = case("skeleton_prepare")
    name = "runner_prep.py"
    folder.replace(
        name,
        "        start = time.time()\n",
        "        if self.graph:\n            self.mark_inputs(model_inputs)\n        start = time.time()\n",
    )
    folder.convert()
    lines = (folder.model / name).read_text(encoding="utf-8").splitlines()
    at = lines.index("            self.mark_inputs(model_inputs)")
    assert lines[at + 1] == '            model_inputs["forward_metadata"].mark_static()'


def test_no_marks_where_the_runner_has_none(case: Callable[[str], Any]) -> None:
    folder = case("skeleton_gqa")
    folder.convert()
    assert "mark_static" not in (folder.model / RUNNER).read_text(encoding="utf-8")


GATHERED = """        if hidden_states.size()[1] > 1:
            # the last token of each row stands at its largest position
            last = torch.max(position_ids, dim=-1)[0]
            last = last[:, None, None].expand(-1, 1, hidden_states.shape[-1])
            hidden_states = torch.gather(hidden_states, 1, last)
"""


def test_a_model_without_a_pick_gets_one_where_the_runner_reads_the_last_column(case: Callable[[str], Any]) -> None:
    folder = case("skeleton_prepare")
    folder.replace("models/modeling_prep.py", GATHERED, "")
    folder.convert()
    model = (folder.model / "models" / "modeling_prep.py").read_text(encoding="utf-8")
    picked = "hidden_states = forward_metadata.last_token(hidden_states).unsqueeze(1)"
    assert f"{picked}\n        return self.lm_head" in model


def test_a_model_without_a_pick_whose_runner_reads_otherwise_is_refused(case: Callable[[str], Any]) -> None:
    folder = case("skeleton_prepare")
    folder.replace("models/modeling_prep.py", GATHERED, "")
    folder.replace("runner_prep.py", "torch.argmax(logits, dim=-1)[:, -1:]", "pick(logits)")
    folder.analyze()
    with pytest.raises(Refusal):
        folder.apply()


def test_the_step_is_built_after_caches_that_are_allocated_in_the_same_method(case: Callable[[str], Any]) -> None:
    folder = case("skeleton_prepare")
    line = "        batch_size, _ = input_ids.size()\n        if is_prefill:\n"
    made = "        if past_key_values is None:\n            past_key_values = self.init_cache(input_ids)\n"
    more = line.replace("        if", f"        extra = {{}}\n{made}        if")
    folder.replace("models/modeling_prep.py", line, more)
    folder.convert()
    model = (folder.model / "models" / "modeling_prep.py").read_text(encoding="utf-8")
    assert 0 < model.index("past_key_values = self.init_cache(input_ids)") < model.index("self.paged_kv.prefill(")


def test_wrappers_that_drop_keywords_are_refused(case: Callable[[str], Any]) -> None:
    folder = case("skeleton_prepare")
    names = "input_ids, position_ids, past_key_values, attention_mask, kv_len, is_prefill"
    folder.replace(
        "models/modeling_prep.py",
        "    def decode(self, **kwargs):\n        return self.forward(**kwargs)\n",
        f"    def decode(self, {names}):\n"
        "        return self(input_ids, kv_len, attention_mask, position_ids, past_key_values, is_prefill)\n",
    )
    folder.analyze()
    with pytest.raises(Refusal) as caught:
        folder.apply()
    assert "`decode`" in caught.value.findings[0].fact
