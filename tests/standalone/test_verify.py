"""Case folders, converted by the command's own code and verified by `kvskill verify` in child processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvskill.diagnostics import ExitCode, InputError
from kvskill.verifier.options import VerifyOptions
from kvskill.verifier.run import verify_model
from kvskill.verifier.standalone.run import is_standalone

pytest.importorskip("torch")
pytest.importorskip("transformers")


def _options(folder: Any, **more: Any) -> VerifyOptions:
    options = VerifyOptions(model=folder.model, config=folder.config, prompts=(5, 2, 17), decode_steps=12)
    return replace(options, **more)


@pytest.mark.parametrize("name", ["skeleton_gqa", "skeleton_sliding", "skeleton_minibatch", "skeleton_mla"])
def test_case_agrees_with_its_before_state_and_hf(case: Callable[[str], Any], name: str) -> None:
    folder = case(name)
    folder.convert()
    report = verify_model(_options(folder))
    assert report.exit_code is ExitCode.DONE, [str(f) for f in report.findings]
    oracles = {c.oracle for c in report.comparisons}
    assert oracles == {"old, right", "old, left", "HF, right", "HF, left"}
    assert max(c.relative for c in report.comparisons) < 1e-5
    assert all(check.ok for check in report.checks) and len(report.checks) == 10
    assert any("decode step, median" in n and "old" in n and "new" in n for n in report.notes)


ONE_BY_ONE = """    def model_generate(self, prompts, warm_up=False):
        return [self.one([prompt], warm_up) for prompt in prompts]

    @torch.no_grad()
    def one(self, prompts, warm_up):
"""
OWN_TEXT = """        self.model = self._load_model()
        self.attn_mask = get_init_attn_mask(2048, self.device)
        self.model_generate(["Hello, how are you?"], warm_up=True)
"""


@pytest.mark.parametrize("form", ["one by one", "own warm-up", "text around prompts"])
def test_other_ways_to_go_through_prompts_agree(case: Callable[[str], Any], form: str) -> None:
    """Every prompt is a batch of its own; texts that the test did not name."""
    folder, name = case("skeleton_gqa"), "runner_skel.py"
    head = "    @torch.no_grad()\n    def model_generate(self, prompts, warm_up=False):\n"
    if form == "one by one":
        folder.replace(name, head, ONE_BY_ONE)
    elif form == "own warm-up":
        lines = OWN_TEXT.splitlines(keepends=True)
        folder.replace(name, lines[0] + lines[1], OWN_TEXT)
    else:
        folder.replace(name, head, head + '        prompts = [f"<user>{p}</user>" for p in prompts]\n')
    folder.convert()
    report = verify_model(_options(folder))
    assert report.exit_code is ExitCode.DONE, [str(f) for f in report.findings]
    assert {c.oracle for c in report.comparisons} == {"old, right", "old, left", "HF, right", "HF, left"}
    assert len({c.request for c in report.comparisons}) == 3
    assert all(check.ok for check in report.checks) and len(report.checks) == 10


def test_one_by_one_a_wrong_second_prompt_is_found(case: Callable[[str], Any]) -> None:
    folder, name = case("skeleton_gqa"), "runner_skel.py"
    folder.replace(name, "    @torch.no_grad()\n    def model_generate(self, prompts, warm_up=False):\n", ONE_BY_ONE)
    folder.convert()
    folder.replace(name, "lengths = kv_len + 1\n", "lengths = kv_len + 1 + int(kv_len[0] == 2)\n")
    report = verify_model(_options(folder))
    assert report.exit_code is ExitCode.FOUND


@pytest.mark.parametrize(
    ("text", "given", "count"),
    [("#1", [7, 8, 9], 3), ("<s>#1</s>", [7, 8, 9], 3), ("#12", None, 2), ("#0 or #1", None, 2), ("Hello", None, 2)],
)
def test_the_tokenizer_knows_any_text(text: str, given: list[int] | None, count: int) -> None:
    from kvskill.verifier.standalone.tokens import StubTokenizer

    tokenizer = StubTokenizer({"#0": [5, 6], "#1": [7, 8, 9]}, "right")
    ids = tokenizer([text], truncation=True, max_length=9).input_ids[0].tolist()
    assert len(ids) == count and set(ids) <= {5, 6, 7, 8, 9}
    assert ids == (given or tokenizer([text], truncation=True, max_length=9).input_ids[0].tolist())
    if given is None:
        assert tokenizer([text]).input_ids.shape == (1, 1)


def test_the_mask_of_tokens_is_found_in_any_batch() -> None:
    import torch

    from kvskill.verifier.standalone.tokens import StubTokenizer

    tokenizer = StubTokenizer({"#0": [5, 6], "#1": [7, 8, 9], "#2": [5]}, "left")
    both = tokenizer(["#0", "#1"])
    tokenizer(["#2"])
    assert tokenizer.mask_of(both.input_ids, 0).tolist() == [[0, 1, 1], [1, 1, 1]]
    assert tokenizer.mask_of(both.input_ids[1:], 1).tolist() == [[1, 1, 1]]
    assert tokenizer.mask_of(torch.tensor([[5]]), 0).tolist() == [[1]]


def test_a_wrong_runner_is_found(case: Callable[[str], Any]) -> None:
    folder = case("skeleton_gqa")
    folder.convert()
    folder.replace("runner_skel.py", "(self.blocks_per_row * self.block_size)", "self.max_seq_len")
    report = verify_model(_options(folder))
    assert report.exit_code is ExitCode.FOUND
    assert any("block_table" in f.fact or f.code in ("KV400", "KV409") for f in report.findings)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_one_token_prompt_in_a_padded_batch_is_right(case: Callable[[str], Any], tp: int) -> None:
    """The default prompts have one token, and one that ends with its block."""
    folder = case("skeleton_prepare")
    folder.convert()
    report = verify_model(_options(folder, prompts=None, tp=tp))
    assert report.exit_code is ExitCode.DONE, [str(f) for f in report.findings]
    assert "prompts 5,1,16,17" in report.setup[0] and f"tp {tp}" in report.setup[0]
    assert all(c.ok for c in report.comparisons) and not report.findings
    assert all(check.ok for check in report.checks) and len(report.checks) == (10 if tp == 1 else 11)


def test_the_naive_pick_fails_the_one_token_prompt(case: Callable[[str], Any]) -> None:
    folder = case("skeleton_prepare")
    folder.convert()
    folder.replace(
        "models/modeling_prep.py",
        "forward_metadata.last_token(hidden_states).unsqueeze(1)",
        "torch.gather(hidden_states, 1, (position_ids.max(dim=-1)[0].clamp(min=1))[:, None, None]"
        ".expand(-1, 1, hidden_states.shape[-1]))",
    )
    report = verify_model(_options(folder, prompts=None, checks=False))
    assert report.exit_code is ExitCode.FOUND
    bad = [f for f in report.findings if f.code == "KV400" and "right padding" in f.fact]
    assert bad and all("prompt 1" in f.fact for f in bad)


@pytest.mark.parametrize(
    ("old", "new", "code", "check"),
    [
        ("(self.blocks_per_row * self.block_size)", "self.max_seq_len", "KV461", "runner.slots"),
        ("_lengths_kv=counts", "_lengths_kv=[c + 1 for c in counts]", "KV405", "runner.key-lengths"),
        ("self.kv_len = torch.cat([self.kv_len[:first_row], lengths])", "self.kv_len = self.kv_len", "KV407", None),
        ("            if count > self.max_seq_len:", "            if count > 1 << 20:", "KV425", "runner.overflow"),
        ("inference time cost of decode is", "decode took", "KV426", "runner.log-lines"),
    ],
)
def test_findings_have_codes_of_their_own(
    case: Callable[[str], Any], old: str, new: str, code: str, check: str | None
) -> None:
    folder = case("skeleton_gqa")
    folder.convert()
    folder.replace("runner_skel.py", old, new)
    report = verify_model(_options(folder, prompts=(5, 2), decode_steps=14, block_size=16))
    assert report.exit_code is ExitCode.FOUND
    found = next(f for f in report.findings if f.code == code)
    assert check is None or found.data["check"] == check


def test_a_name_under_models_is_recognised(case: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = case("skeleton_gqa")
    monkeypatch.chdir(folder.model.parents[1])
    assert is_standalone(VerifyOptions(model=Path("skel")))
    monkeypatch.chdir("/")
    assert is_standalone(VerifyOptions(model=Path("skel"), repo=folder.model.parents[1]))
    assert not is_standalone(VerifyOptions(model=Path("no-such-model")))


@pytest.mark.parametrize("flag", ["before", "outside", "yaml", "vocab", "dtype"])
def test_what_cannot_run_says_so(case: Callable[[str], Any], tmp_path: Path, flag: str) -> None:
    folder, more, code = case("skeleton_gqa"), {}, "KV430"
    other = tmp_path / "other"
    other.mkdir()
    if flag == "before":
        more, code = {"before_repo": other}, "KV434"
    elif flag == "outside":
        more = {"repo": other}
    elif flag == "yaml":
        (folder.model / "config" / "a.yaml").write_text("a: [1,\n", encoding="utf-8")
        code = "KV435"
    elif flag == "vocab":
        config = other / "config.json"
        config.write_text('{"model_type": "llama", "num_hidden_layers": 2}', encoding="utf-8")
        more, code = {"config": config}, "KV435"
    else:
        more = {"dtype": "bf16"}
    with pytest.raises(InputError) as caught:
        verify_model(_options(folder, **more))
    assert caught.value.findings[0].code == code


def test_a_nested_config_is_shrunk_and_run(case: Callable[[str], Any], tmp_path: Path) -> None:
    """vocab_size stands in the text part; the class takes its own defaults for the rest, and both runners run."""
    folder = case("skeleton_gqa")
    folder.convert()
    config = tmp_path / "config.json"
    inner = json.loads(folder.config.read_text(encoding="utf-8"))
    config.write_text(json.dumps({"model_type": "no-such", "text_config": inner}), encoding="utf-8")
    report = verify_model(_options(folder, config=config, prompts=(3, 2), decode_steps=2))
    assert report.exit_code is ExitCode.DONE, [str(f) for f in report.findings]


def test_latent_attention_with_other_rotary_agrees_with_its_before_state(case: Callable[[str], Any]) -> None:
    """Halves instead of pairs: HF's definition is another one, the old runner's is kept. The order of the pair too."""
    folder = case("skeleton_mla")
    model, runner = "models/modeling_latent.py", "runner_latent.py"
    folder.replace(model, "    x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)\n", "")
    folder.replace(model, "past_latent, past_rope = past_key_value", "past_rope, past_latent = past_key_value")
    folder.replace(runner, "cache.append((k, v))", "cache.append((v, k))")
    folder.convert()
    report = verify_model(_options(folder, prompts=(5, 1, 18), against="legacy"))
    assert report.exit_code is ExitCode.DONE, [str(f) for f in report.findings]
    assert {c.oracle for c in report.comparisons} == {"old, right", "old, left"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("sparse_mode=0,", "sparse_mode=0,\n            atten_mask=forward_metadata.attention_mask,"),
        ("torch.matmul(paged_packed, self.absorbed_v)", "torch.matmul(paged_packed, self.absorbed_v.flip(-1))"),
        (
            'softmax_scale=self.scaling,\n                input_layout="TND_NTD"',
            'softmax_scale=576**-0.5,\n                input_layout="TND_NTD"',
        ),
        ("weight[:, : self.qk_nope_head_dim]", "weight[:, self.v_head_dim :]"),
        ("npu_scatter_nd_update_(paged_rope_cache", "npu_scatter_nd_update_(torch.zeros_like(paged_rope_cache)"),
    ],
)
def test_a_wrong_latent_conversion_is_found(case: Callable[[str], Any], old: str, new: str) -> None:
    folder = case("skeleton_mla")
    folder.convert()
    folder.replace("models/modeling_latent.py", old, new)
    report = verify_model(_options(folder, prompts=(5, 2), decode_steps=4, checks=False))
    assert report.exit_code is ExitCode.FOUND


def test_an_old_runner_that_differs_from_hf_is_the_wrong_one(case: Callable[[str], Any]) -> None:
    """Where the new runner agrees with HF; without HF the difference stays an error."""
    folder = case("skeleton_gqa")
    folder.convert()
    saved = next((folder.model / ".kvskill" / "originals").rglob("modeling_skel.py"))
    text = saved.read_text(encoding="utf-8")
    saved.write_text(text.replace("self.scaling = self.head_dim**-0.5", "self.scaling = 0.3"), encoding="utf-8")
    report = verify_model(_options(folder, checks=False))
    assert report.exit_code is ExitCode.DONE, [str(f) for f in report.findings]
    assert {f.code for f in report.findings} == {"KV421"} and len(report.findings) == 3
    report = verify_model(_options(folder, checks=False, against="legacy"))
    assert report.exit_code is ExitCode.FOUND and {f.code for f in report.findings} == {"KV400"}


def test_a_model_that_transformers_does_not_know_runs_with_named_weights(
    case: Callable[[str], Any], tmp_path: Path
) -> None:
    folder = case("skeleton_gqa")
    folder.convert()
    config = tmp_path / "config.json"
    values = json.loads(folder.config.read_text(encoding="utf-8"))
    config.write_text(json.dumps({**values, "model_type": "no-such"}), encoding="utf-8")
    report = verify_model(_options(folder, config=config, prompts=(5, 1), checks=False))
    assert report.exit_code is ExitCode.DONE, [str(f) for f in report.findings]
    assert {c.oracle for c in report.comparisons} == {"old, right", "old, left"}
    assert any("by parameter name" in n for n in report.notes)
    with pytest.raises(InputError) as caught:
        verify_model(_options(folder, config=config, tp=2))
    assert caught.value.findings[0].code == "KV430"


def test_a_window_is_crossed_by_default(case: Callable[[str], Any]) -> None:
    """One prompt reaches the window in decode, one is longer; one key more per query is found."""
    folder = case("skeleton_sliding")
    folder.convert()
    report = verify_model(_options(folder, prompts=None, checks=False))
    assert report.exit_code is ExitCode.DONE, [str(f) for f in report.findings]
    window = json.loads(folder.config.read_text(encoding="utf-8"))["sliding_window"]
    assert any(c.prompt > window + 16 for c in report.comparisons)
    assert any(c.prompt <= window < c.prompt + 12 for c in report.comparisons)
    folder.replace("models/modeling_slide.py", "pre_tokens=self.sliding_window - 1", "pre_tokens=self.sliding_window")
    report = verify_model(_options(folder, prompts=None, checks=False))
    assert report.exit_code is ExitCode.FOUND
