"""The selection rules: pages, deployment priority, FA version, routes, grounds, features."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import kvskill
from kvskill.analyzer.config import understand
from kvskill.analyzer.progress import read_facts, read_progress_text
from kvskill.analyzer.selection.code import CodeView, Seen
from kvskill.analyzer.selection.decide import SelectionInput, select
from kvskill.analyzer.selection.deployment import RunnerClass, decide_deployment, find_runners, prompt_mode
from kvskill.analyzer.selection.effective import effective
from kvskill.analyzer.selection.features import find_features
from kvskill.analyzer.selection.limits import limits_for, mla_route, route
from kvskill.analyzer.selection.rules import all_rules, because, rule_page
from kvskill.analyzer.target import Registered, newest_profile, probe_operators
from kvskill.analyzer.yamls import read_yamls
from kvskill.diagnostics import InputError, Severity, Span
from kvskill.manifest import ModelRef, Overrides


def test_every_rule_has_its_page_and_every_page_its_rule() -> None:
    folder = Path(kvskill.__file__).parent / "references" / "selection"
    assert {p.stem for p in folder.glob("*.md")} == set(all_rules())
    for rule in all_rules().values():
        assert (folder / f"{rule.id}.md").read_text(encoding="utf-8") == rule_page(rule), rule.id


def test_every_table_of_the_seed_is_covered() -> None:
    tables = {r.table for r in all_rules().values()}
    assert tables == {"1.1", "1.2", "1.3", "1.4", "2.7"}
    with pytest.raises(KeyError):
        because("S99-nothing")


# deployment ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("部署模式: 框架部署", "framework"),
        ("工作目录: x\n部署模式：独立部署\n任务: y", "standalone"),
        ("deployment mode: standalone", "standalone"),
        ("部署模式: `框架部署`", "framework"),
        ("convert the model", None),
        ("用独立部署的方式", None),
    ],
)
def test_prompt(text: str, mode: str | None) -> None:
    assert prompt_mode(text) == mode


def test_prompt_with_both_is_an_error() -> None:
    with pytest.raises(InputError):
        prompt_mode("部署模式: 框架部署\n部署模式: 独立部署")


def _progress(tmp_path: Path, text: str):
    path = tmp_path / "progress.md"
    path.write_text(text)
    return read_facts(read_progress_text(path, "progress.md"))


REGISTERED = (Registered("m", (("models.m.models.modeling_m", "M"),), Span("executor/core/support_models.py", 5)),)
OWN_LOOP = (RunnerClass("R", ("executor.model_runner.ModelRunner",), False, Span("runner_m.py", 3)),)
FRAMEWORK = (RunnerClass("R", ("executor.core.engine.ExecutionEngine",), True, Span("runner_m.py", 3)),)


def _decide(**kw):
    given = {"option": None, "prompt": None, "override": None, "progress": None, "registered": (), "runners": ()}
    return decide_deployment(**{**given, **kw})


@pytest.mark.parametrize(
    ("given", "value", "source"),
    [
        ({}, "framework", "default"),
        ({"registered": REGISTERED}, "framework", "target"),
        ({"runners": OWN_LOOP}, "standalone", "code"),
        ({"runners": FRAMEWORK}, "framework", "default"),
        ({"registered": REGISTERED, "runners": OWN_LOOP}, "framework", "target"),
        ({"override": "standalone", "registered": REGISTERED}, "standalone", "override"),
        ({"option": "standalone", "override": "framework", "registered": REGISTERED}, "standalone", "option"),
        ({"prompt": "standalone", "registered": REGISTERED}, "standalone", "option"),
    ],
)
def test_priority(given: dict, value: str, source: str) -> None:
    decided = _decide(**given).decision
    assert (decided.value, decided.source) == (value, source) and decided.evidence


def test_progress_beats_the_self_check_and_the_contradiction_is_said(tmp_path: Path) -> None:
    said = _progress(tmp_path, "# a\n部署模式：独立部署\n")
    result = _decide(progress=said, registered=REGISTERED)
    assert (result.decision.value, result.decision.source) == ("standalone", "progress")
    assert result.decision.evidence[0].ref == "progress.md:2"
    assert [f.code for f in result.findings] == ["KV025"]
    assert _decide(progress=said, option="standalone").findings == ()


def test_contradicting_progress_blocks_until_someone_says(tmp_path: Path) -> None:
    said = _progress(tmp_path, "部署模式：独立部署\n部署模式：框架部署\n")
    assert [f.severity for f in _decide(progress=said).findings] == [Severity.BLOCKING]
    assert [f.severity for f in _decide(progress=said, option="framework").findings] == [Severity.WARNING]


def test_runner_bases_follow_imports(tmp_path: Path) -> None:
    (tmp_path / "runner_a.py").write_text(
        "from executor.core.engine import ExecutionEngine as Base\nfrom executor.model_runner import ModelRunner\n"
        "class A(Base): pass\nclass B(A): pass\nclass C(ModelRunner): pass\nclass D: pass\n"
    )
    assert {r.name: r.framework for r in find_runners(tmp_path, tmp_path)} == {
        "A": True,
        "B": True,
        "C": False,
        "D": False,
    }


# selection ----------------------------------------------------------------------------------------------------------

GQA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "torch_dtype": "float16",
}
MIXED = {
    **GQA,
    "model_type": "olmo3",
    "sliding_window": 1024,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 65536,
}
MLA = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}


def _select(
    config: dict, *, torch_npu: str = "2.8.0.post4", code: CodeView | None = None, standalone=False, **override
):
    facts = understand(config, shown="config.json")
    operators = probe_operators(None, None, torch_npu, use_installed=False)
    profile = newest_profile().model_copy(
        update={"torch_npu": operators.releases, "fa_version": operators.fa_version, "fa_reason": operators.reason}
    )
    profile_update = override.pop("profile", {})
    return select(
        SelectionInput(
            facts,
            code,
            profile.model_copy(update=profile_update),
            operators,
            Overrides(**override),
            (),
            (),
            None,
            standalone,
        )
    )


def test_standard_row() -> None:
    s = _select(GQA)
    assert s.kv_mode.value == "paged" and not s.mla_absorb.value and not s.mixed.value
    (g,) = s.groups
    assert (g.attn_type, g.attention, [c.name for c in g.caches]) == ("FullAttention", "GQA", ["k_cache", "v_cache"])
    assert g.caches[0].dtype == "torch.bfloat16"  # the framework's loaders build bf16 whatever the checkpoint says
    assert g.layers == (0, 1, 2, 3)
    assert _select(GQA, standalone=True).groups[0].caches[0].dtype == "torch.float16"  # a runner follows the config
    assert (g.prefill.layout, g.prefill.sparse_mode, g.prefill.mask, g.prefill.reads) == ("TND", 3, True, "fresh")
    assert (g.decode.layout, g.decode.sparse_mode, g.decode.reads) == ("TND", 3, "cache")
    assert (g.decode.q_lengths, g.decode.kv_lengths) == ("actual_seq_lengths_cu_q", "actual_seq_lengths_kv")
    assert g.prefill.kv_lengths == "actual_seq_lengths_cu_kv"  # unpaged TND: both cumulative
    assert {e.ref for e in g.reasons} >= {
        "S11-standard",
        "S27-layout-tnd",
        "S27-sparse-full",
        "S27-lengths",
        "S27-order",
    }


def test_sliding_row_and_mixed() -> None:
    s = _select(MIXED)
    window, full = s.groups
    assert s.mixed.value and (window.attn_type, full.attn_type) == ("SlidingWindow", "FullAttention")
    assert window.manager_key is None and window.sliding_window == 1024
    for call in (window.prefill, window.decode):
        assert (call.sparse_mode, call.mask, call.pre_tokens, call.next_tokens) == (4, True, 1023, 0)
    upstream = _select(MIXED, window="upstream")
    assert upstream.groups[0].decode.pre_tokens == 1024 and upstream.window_rule.source == "override"


def test_mla_row() -> None:
    s = _select(MLA)
    (g,) = s.groups
    assert s.mla_absorb.value and g.attention == "MLA" and g.attn_type == "FullAttention"
    assert [(c.name, c.dim, c.num_head) for c in g.caches] == [("nope_cache", 512, "1"), ("rope_cache", 64, "1")]
    assert (g.prefill.layout, g.prefill.reads, g.decode.layout, g.decode.sparse_mode, g.decode.mask) == (
        "NTD_TND",
        "fresh",
        "TND_NTD",
        0,
        False,
    )


def test_dims_choose_the_layout() -> None:
    old, new = limits_for(("2.6.0",)), limits_for(("2.8.0.post4",))
    assert route(128, 128, window=False, limits=old)[0] == "tnd"
    assert route(256, 256, window=True, limits=old)[0] == "bnsd-bsh"
    assert route(256, 256, window=True, limits=new)[0] == "tnd"
    assert route(512, 512, window=False, limits=new)[0] == "bnsd-bsh"
    assert route(80, 80, window=False, limits=new)[0] == "bnsd-bsh"
    assert route(192, 128, window=False, limits=new)[0] == "tnd"
    assert route(192, 128, window=True, limits=new)[0] == "none"
    assert route(100, 100, window=False, limits=new)[0] == "none"
    assert route(640, 640, window=False, limits=new)[0] == "none"
    assert mla_route(512, 64, new)[0] == "mla" and mla_route(256, 32, new)[0] == "none"
    assert limits_for(()).profile == new.profile and limits_for(("2.6.0", "2.8.0.post4")).profile == old.profile
    decode = _select({**MIXED, "head_dim": 96}).groups[0].decode
    assert (decode.layout, decode.sparse_mode, decode.mask, decode.pre_tokens) == ("BSH", 0, False, 1024)


def test_rejected_dims_keep_legacy() -> None:
    s = _select({**GQA, "head_dim": 100})
    assert s.kv_mode.value == "legacy" and "100" in s.grounds[0]
    assert {"S13-keep-legacy", "S13-offline-only"} <= {e.ref for e in s.kv_mode.evidence}


@pytest.mark.parametrize(
    ("torch_npu", "override", "version", "source"),
    [
        ("2.8.0.post4", None, 2, "target"),
        ("2.6.0", None, 1, "target"),
        ("2.8.0.post4", 1, 1, "override"),
        ("2.6.0", 2, 2, "override"),
    ],
)
def test_fa_version(torch_npu: str, override: int | None, version: int, source: str) -> None:
    s = _select(GQA, torch_npu=torch_npu, fa_version=override)
    assert (s.fa_version.value, s.fa_version.source) == (version, source)
    assert {g.decode.version for g in s.groups} == {version}
    assert ("KV085" in [f.code for f in s.findings]) is (torch_npu == "2.6.0" and override == 2)


def _view(**kw) -> CodeView:
    return CodeView(ModelRef(name="m", folder="models/m", modeling=("models/m/modeling_m.py",)), **kw)


HERE = Span("models/m/modeling_m.py", 7, 5)


def test_sinks_force_v2_or_keep_legacy() -> None:
    code = _view(sinks=Seen("self.sinks", HERE))
    assert _select(GQA, code=code, fa_version=1).fa_version.value == 2
    s = _select(GQA, code=code, torch_npu="2.6.0")
    assert s.kv_mode.value == "legacy" and "sinks" in s.grounds[0]
    assert [f.code for f in s.findings if f.code == "KV079"]


def test_antiquant_forces_v1() -> None:
    s = _select(GQA, code=_view(antiquant=Seen("antiquant_scale", HERE)))
    assert (s.fa_version.value, s.fa_version.source) == (1, "code")


@pytest.mark.parametrize(
    ("name", "code"),
    [("softcap", "KV070"), ("bias", "KV071"), ("non-causal", "KV072"), ("cross", "KV072"), ("chunked", "KV073")],
)
def test_grounds_in_code_name_their_place(name: str, code: str) -> None:
    s = _select(GQA, code=_view(grounds={name: Seen("x", HERE)}))
    assert s.kv_mode.value == "legacy" and str(HERE) in s.grounds[0]
    assert code in [f.code for f in s.findings]
    assert _select(GQA, code=_view()).kv_mode.value == "paged"


def test_grounds_in_the_config() -> None:
    s = _select({**GQA, "model_type": "gemma2", "attn_logit_softcapping": 50.0})
    assert s.kv_mode.value == "legacy" and s.kv_mode.evidence[0].kind == "config"


@pytest.mark.parametrize(
    ("update", "config", "ground"),
    [
        ({"found": True, "paged": False}, GQA, "CacheEntry"),
        ({"found": True, "attn_types": ("FullAttention",)}, MIXED, "SlidingWindow"),
    ],
)
def test_grounds_of_the_target(update: dict, config: dict, ground: str) -> None:
    s = _select(config, profile=update)
    assert s.kv_mode.value == "legacy" and ground in s.grounds[0]
    assert _select(config, profile=update, standalone=True).kv_mode.value == "paged"


def test_overrides() -> None:
    assert _select(GQA, kv_mode="legacy").kv_mode.source == "override"
    s = _select({**GQA, "head_dim": 100}, kv_mode="paged")
    assert s.kv_mode.value == "legacy"
    assert [f.severity for f in s.findings if f.code == "KV089"] == [Severity.BLOCKING]
    assert _select(GQA, block_size=64).block_size.value == 64
    assert "KV086" in [f.code for f in _select(GQA, block_size=100).findings]


def test_code_wins_over_the_config_about_windows() -> None:
    facts = understand(MIXED, shown="config.json")
    same = _view(layer_windows={i: (Seen("1024", HERE) if i % 2 == 0 else None) for i in range(4)})
    assert effective(facts, same) == (facts, ())
    none = _view(layer_windows=dict.fromkeys(range(4)))
    changed, (finding,) = effective(facts, none)
    assert finding.code == "KV035" and {x.attn_type for x in changed.layers} == {"FullAttention"}
    assert len(changed.groups) == 1 and changed.groups[0].indices == (0, 1, 2, 3)
    doubt = _view(layer_windows=dict.fromkeys(range(4)), mentions_window=Seen("sliding_window", HERE))
    same_facts, (finding,) = effective(facts, doubt)
    assert same_facts is facts and (finding.code, finding.severity) == ("KV036", Severity.BLOCKING)
    everywhere = _view(layer_windows={i: Seen("512", HERE) for i in range(4)})
    assert {x.window for x in effective(facts, everywhere)[0].layers} == {512}
    assert effective(facts, _view()) == (facts, ())


def test_two_windows_need_keys() -> None:
    facts = understand(MIXED, shown="config.json")
    code = _view(layer_windows={0: Seen("1024", HERE), 1: None, 2: Seen("256", HERE), 3: None})
    changed, _ = effective(facts, code)
    base = SelectionInput(changed, code, newest_profile(), None, Overrides(), (), (), None, False)
    assert [g.manager_key for g in select(base).groups] == ["SlidingWindow_1024", None, "SlidingWindow_256"]
    fields = tuple(f for f in newest_profile().cache_entry_fields if f != "manager_key")
    old = newest_profile().model_copy(update={"cache_entry_fields": fields})
    s = select(replace(base, profile=old))
    assert s.kv_mode.value == "legacy" and "manager_key" in s.grounds[0]


# features -----------------------------------------------------------------------------------------------------------


def _folder(tmp_path: Path, yaml: str = "", code: str = "") -> Path:
    folder = tmp_path / "m"
    (folder / "config").mkdir(parents=True)
    (folder / "config" / "a.yaml").write_text(yaml)
    (folder / "modeling_m.py").write_text(code)
    return folder


@pytest.mark.parametrize(
    ("yaml", "code", "expected"),
    [
        ("model_config:\n  custom_params:\n    kv_cache_quant_mode: int8\n", "", {"kv-quant": True}),
        ("model_config:\n  custom_params:\n    kv_cache_quant_mode: unquant\n", "", {}),
        ("", "x = self.kv_cache_quant_mode\n", {"kv-quant": False}),
        ("", "f(q, antiquant_scale=s)\n", {"kv-quant": False}),
        ("", "f(q, antiquant_scale=None)\n", {}),
        ("", "# kv_cache_quant_mode\n'''kvp_size'''\n", {}),
        ("parallel_config:\n  kvp_size: 8\n", "", {"kvp": True}),
        ("parallel_config:\n  kvp_size: 1\n", "", {}),
        ("model_config:\n  enable_offload: True\n", "", {"offload": True}),
        ("", "import torch_npu as t\nt.empty_with_swapped_memory((1,))\n", {"offload": True}),
        ("dit_cache:\n  method: TeaCache\n", "", {"dit-cache": True}),
        ("dit_cache:\n  method: NoCache\n", "", {}),
        ("parallel_config:\n  cp_size: 4\n", "", {"cp": True}),
    ],
)
def test_features_are_recognised_and_routed(tmp_path: Path, yaml: str, code: str, expected: dict) -> None:
    folder = _folder(tmp_path, yaml, code)
    found = find_features(folder, folder, read_yamls(folder, folder), None)
    assert {f.id: f.on for f in found} == expected
    assert all(("It is " in f.finding.todo) is f.on for f in found)
    routed = {"kv-quant": "model-infer-quantization", "kvp": "model-infer-parallel-impl"}
    assert all(routed.get(f.id, "") in f.finding.todo for f in found if f.on)


def test_kv_scheme_in_the_config(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    config = {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}}
    assert [f.id for f in find_features(folder, folder, (), config)] == ["kv-quant"]
    assert find_features(folder, folder, (), {"quantization_config": {"kv_cache_scheme": None}}) == ()


def test_state_beside_kv_blocks() -> None:
    hybrid = {**GQA, "model_type": "jamba", "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2}
    s = _select(hybrid)
    assert [f.severity for f in s.findings if f.code == "KV037"] == [Severity.BLOCKING]
    assert "KV037" not in [f.code for f in _select(GQA).findings]
    without = _select(hybrid, profile={"found": True, "mamba_cache_entry": False})
    assert without.kv_mode.value == "legacy" and "MambaCacheEntry" in without.grounds[0]
    assert "KV037" not in [f.code for f in without.findings]
