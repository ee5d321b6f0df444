"""The reference pages: current, linked, bounded, and every operator call in them legal for released schemas."""

from __future__ import annotations

import ast
import importlib.util
import re
import textwrap
from pathlib import Path

import pytest

from kvskill.opsinfo import check_calls, load_operators, parse_schema, reference_data
from kvskill.skillpack import estimate_tokens, skill_folder
from kvskill.verifier.backend.schemas import load_table

ROOT = Path(__file__).resolve().parents[2]
SKILLS = ROOT / "skills"
PAGES = sorted(SKILLS.rglob("*.md"))
RULES = sorted((ROOT / "references/rules").glob("KV*.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def fences(text: str, language: str) -> list[str]:
    return [body for lang, body in FENCE.findall(text) if lang == language]


def wrong_calls(code: str) -> list[str]:
    """Problems of the calls in `code`, over every release that registers all operators that it uses."""
    table = load_table()
    nodes = list(ast.walk(ast.parse(code)))
    names = {n.attr for n in nodes if isinstance(n, ast.Attribute)} | {n.id for n in nodes if isinstance(n, ast.Name)}
    used = names & set(table.operators)
    problems, releases = [], 0
    for release in table.releases:
        schemas = table.schemas(release).values()
        if used <= {parse_schema(s).name for s in schemas}:
            releases += 1
            problems += [f"{release}: {p}" for p in check_calls(code, schemas)]
    assert releases, f"no release registers all of {used}"
    return problems


def test_pages_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("build", ROOT / "scripts/build_skill_references.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_links_resolve(page: Path) -> None:
    targets = LINK.findall(page.read_text(encoding="utf-8"))
    missing = [t for t in targets if "://" not in t and not (page.parent / t.partition("#")[0]).exists()]
    assert missing == []


def test_links_between_code_pages_resolve() -> None:
    for page in (ROOT / "references").rglob("*.md"):
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            assert "://" in target or (page.parent / target.partition("#")[0]).exists(), (page, target)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_code_blocks_call_operators_as_released(page: Path) -> None:
    for block in fences(page.read_text(encoding="utf-8"), "python"):
        assert wrong_calls(textwrap.dedent(block)) == []


@pytest.mark.parametrize("page", RULES, ids=lambda p: p.stem)
def test_rule_pages_show_a_legal_replacement(page: Path) -> None:
    instead = page.read_text(encoding="utf-8").split("## Use instead")[1]
    newest = list(load_table().schemas("2.13.0").values())
    for block in fences(instead, "python"):
        try:
            code = ast.unparse(ast.parse(block))
        except SyntaxError:
            # a list of keyword arguments, or a signature that leaves parameters out
            shortened = re.search(r"def \w+\(.*\.\.\.", block)
            code = "pass" if shortened else ast.unparse(ast.parse(f"call({block})"))
        assert [str(p) for p in check_calls(code, newest)] == []


def test_the_call_check_is_not_blind() -> None:
    page = (skill_folder() / "references/fa-examples.md").read_text(encoding="utf-8")
    calls = [b for b in fences(page, "python") if "npu_fused_infer_attention_score" in b]
    assert len(calls) >= 5
    for name, swap in (
        ("softmax_scale", "scale"),
        ("num_query_heads", "num_heads"),
        ("actual_seq_qlen", "actual_seq_lengths"),
    ):
        changed = [b.replace(f"{name}=", f"{swap}=") for b in calls if "score_v2" in b]
        assert changed and all(wrong_calls(b) for b in changed)
    dropped = [re.sub(r"^\s*softmax_scale=.*\n", "", b, flags=re.MULTILINE) for b in calls if "score_v2" in b]
    assert all("relies on a default" in " ".join(wrong_calls(b)) for b in dropped)


def test_pages_are_one_reading() -> None:
    for page in (skill_folder() / "references").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert estimate_tokens(text) < 9000 and text.count("\n") < 500, page.name


# page -> words of the seed's sections that it must speak about
SEED_SECTIONS = {
    "framework-deployment": """部署模式 get_cache_info CacheEntry attn_type ATTN_TYPE_MANAGER_MAP packed
        FIXED_BLOCK_ATTN_TYPES
        is_prefill 初始化链路
        运行期链路 释放链路 is_mla_backend .values() sublayer""",
    "standalone-deployment": """连续缓存 手动 absorb block_table slot_mapping kv_len ForwardMetaData scatter_update_
        npu_kv_rmsnorm_rope_cache""",
    "fa-calls": """scale softmax_scale num_query_heads TND_NTD BSND_NBSD sparse_mode 2048 pre_tokens learnable_sink
        prefill decode mscale query_rope""",
    "operators": """scatter_update_ npu_scatter_nd_update_ npu_kv_rmsnorm_rope_cache
        npu_fused_infer_attention_score_v2""",
    "advanced-features": "quantisation KVP kvp_size empty_with_swapped_memory TeaCache MTP",
}


@pytest.mark.parametrize("page", SEED_SECTIONS)
def test_every_section_of_the_seed_is_covered(page: str) -> None:
    text = (skill_folder() / f"references/{page}.md").read_text(encoding="utf-8")
    assert [w for w in SEED_SECTIONS[page].split() if w.lower() not in text.lower()] == []


def test_every_row_of_the_seed_table_is_an_error_entry() -> None:
    rows = {str(e["seed"]).split(",")[0] for e in reference_data("common_errors")["errors"].values()}
    assert {f"row {n}" for n in range(1, 12)} <= rows
    page = (skill_folder() / "references/common-errors.md").read_text(encoding="utf-8")
    assert all(f"**{name}**" in page for name in reference_data("common_errors")["errors"])


def test_known_wrong_statements_do_not_come_back() -> None:
    """The prose traps of the operator sheet, as they are usually written."""
    text = "\n".join(p.read_text(encoding="utf-8") for p in PAGES if p.stem != "common-errors")
    for wrong in (
        r"pre_tokens\s*=\s*\{?(self\.)?sliding_window\}?(?!\s*-)",
        r"num_blocks\s*=\s*max_seq_len\s*//",
        r"lower[- ]triangular",
        r"\[TotalTokens, vocab\]",
        r"silently (use|fall)s? (the )?default",
        r"tril\(",
    ):
        hits = [m.group() for m in re.finditer(wrong, text, re.IGNORECASE)]
        table_rows = [line for line in text.splitlines() if re.search(wrong, line, re.IGNORECASE) and "| " in line]
        assert len(hits) == 0 or len(table_rows) == len(hits), (wrong, hits)


def test_every_operator_fact_carries_its_evidence_on_the_page() -> None:
    page = (skill_folder() / "references/operators.md").read_text(encoding="utf-8")
    for operator in load_operators().values():
        for fact in operator.facts:
            letters = "".join(f"[{e}]" for e in fact.evidence)
            assert f"{fact.fact} {letters}" in page
    assert "NPU: not run" in page
