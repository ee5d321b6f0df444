"""YAML files of a model folder: eras, settings with lines, differences, broken files."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvskill.analyzer.heads import check_runs
from kvskill.analyzer.selection.limits import limits_for
from kvskill.analyzer.yamls import differences, old_keys, primary_yaml, read_yamls
from kvskill.manifest import Group

FRAMEWORK = """model_config:
  model_name: "m"
  model_path: "/weights/m"
  next_n: {next_n}
data_config:
  input_truncated_len: 2048
parallel_config:
  world_size: {world}
  attn_tp_size: {tp}
scheduler_config:
  batch_size: {batch}
  max_new_tokens: 64
"""
PADDED = """model_name: m
world_size: 2
model_config:
  model_path: x
parallel_config:
  world_size: 2
  attn_tp_size: 2
scheduler_config:
  batch_size: 4
  input_max_len: 1024
  max_new_tokens: 8
"""
RUNNER = """model_name: "r"
model_path: "w"
exe_mode: "ge_graph"
world_size: 4
model_config:
  pa_block_size: 64
data_config:
  input_max_len: 512
  max_new_tokens: 32
  batch_size: 8
parallel_config:
  attn_tp_size: 2
"""


def _write(tmp_path: Path, **files: str) -> Path:
    folder = tmp_path / "m"
    for name, text in files.items():
        path = folder / "config" / name.replace("__", "/").replace("_yaml", ".yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_eras_and_settings(tmp_path: Path) -> None:
    folder = _write(
        tmp_path,
        a_yaml=FRAMEWORK.format(world=4, tp=2, batch=8, next_n=1),
        b_yaml=PADDED,
        c_yaml=RUNNER,
        d_yaml="model_args: {x: 1}\n",
        model_pd__prefill_yaml=FRAMEWORK.format(world=1, tp=1, batch=1, next_n=0),
    )
    found = {y.shown: y for y in read_yamls(folder, folder, {"scheduler_config.block_size": 96})}
    a, b, c, d = (found[f"config/{n}.yaml"] for n in "abcd")
    assert [y.era for y in (a, b, c, d)] == ["framework", "framework-2d", "runner", "other"]
    assert (a.settings.batch_size, a.settings.batch_per_rank, a.settings.next_n, a.settings.block_size) == (8, 4, 1, 96)
    assert a.setting_span("attn_tp_size").line == 9 and a.setting_span("block_size").line == 1
    assert (b.settings.input_len, b.settings.batch_per_rank) == (1024, 4)
    assert (c.settings.input_len, c.settings.max_new_tokens, c.settings.batch_size, c.settings.block_size) == (
        512,
        32,
        8,
        64,
    )
    assert c.settings.exe_mode == "ge_graph" and c.settings.batch_per_rank == 4
    assert found["config/model_pd/prefill.yaml"].online and not a.online
    assert [(o, n) for o, n, _ in old_keys(b)][-1] == (
        "scheduler_config.input_max_len",
        "data_config.input_truncated_len",
    )
    assert primary_yaml(tuple(found.values())) is a
    assert primary_yaml(tuple(found.values()), "c.yaml") is c and primary_yaml(tuple(found.values()), "no.yaml") is None
    assert {"batch_size", "input_len", "era"} <= set(differences(tuple(found.values())))


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [
        ("a: [1\n", "KV005", 2),
        ("- 1\n", "KV005", 1),
        ("a: b: c\n", "KV005", 1),
        ("a: !!python/object/apply:os.system [x]\n", "KV005", 1),
        ("scheduler_config:\n  batch_size: many\n", "KV007", 2),
        ("scheduler_config:\n  batch_size: -4\n", "KV007", 2),
        ("scheduler_config:\n  batch_size: true\n", "KV007", 2),
        ("scheduler_config:\n  batch_size: 1\n  batch_size: 2\n", "KV006", 3),
    ],
)
def test_trouble_is_one_finding_with_a_line(tmp_path: Path, text: str, code: str, line: int) -> None:
    folder = _write(tmp_path, x_yaml=text)
    (facts,) = read_yamls(folder, folder)
    assert [(f.code, f.span.line) for f in facts.findings] == [(code, line)]


def test_empty_binary_and_bombs(tmp_path: Path) -> None:
    bomb = "a: &a [x, x]\n" + "".join(
        f"{c}: &{c} [*{p}, *{p}, *{p}]\n" for p, c in zip("abcdefghijk", "bcdefghijkl", strict=True)
    )
    folder = _write(tmp_path, e_yaml="", b_yaml=bomb)
    (folder / "config" / "z.yaml").write_bytes(b"\xff\xfe\x00\x01")
    (folder / "config" / "big.yaml").write_text("a: " + "x" * 1_100_000)
    codes = {y.path.name: [f.code for f in y.findings] for y in read_yamls(folder, folder)}
    assert codes == {"b.yaml": [], "big.yaml": ["KV005"], "e.yaml": [], "z.yaml": ["KV005"]}


def test_links_out_are_not_read(tmp_path: Path) -> None:
    folder = _write(tmp_path, a_yaml=PADDED)
    (tmp_path / "o.yaml").write_text(PADDED)
    (folder / "config" / "l.yaml").symlink_to(tmp_path / "o.yaml")
    assert [y.path.name for y in read_yamls(folder, folder)] == ["a.yaml"]


def _group(kind: str, q: int, kv: int) -> Group:
    return Group(
        layers=(0,), attention=kind, attn_type="FullAttention", q_heads=q, kv_heads=kv, k_head_dim=128, v_head_dim=128
    )


@pytest.mark.parametrize(
    ("kind", "q", "kv", "tp", "code"),
    [
        ("GQA", 32, 8, 8, None),
        ("GQA", 32, 8, 16, None),  # KV heads repeat
        ("GQA", 32, 8, 3, "KV027"),
        ("GQA", 24, 6, 4, "KV027"),  # 6 KV heads on 4 ranks
        ("MLA", 128, 1, 16, None),
        ("MLA", 96, 1, 32, "KV028"),  # 3 heads per rank
    ],
)
def test_heads_per_rank(tmp_path: Path, kind: str, q: int, kv: int, tp: int, code: str | None) -> None:
    folder = _write(tmp_path, a_yaml=FRAMEWORK.format(world=tp, tp=tp, batch=tp, next_n=0))
    yamls = read_yamls(folder, folder)
    found = list(check_runs(yamls, [_group(kind, q, kv)], limits_for(())))
    assert [f.code for f in found] == ([code] if code else [])
    assert all(f.span.line == 9 for f in found)


def test_impossible_runs(tmp_path: Path) -> None:
    folder = _write(
        tmp_path,
        a_yaml=FRAMEWORK.format(world=6, tp=4, batch=8, next_n=0),
        b_yaml=FRAMEWORK.format(world=8, tp=1, batch=4, next_n=0),
    )
    found = list(check_runs(read_yamls(folder, folder), [], limits_for(())))
    assert [(f.code, f.span.path) for f in found] == [("KV029", "config/a.yaml"), ("KV029", "config/b.yaml")]
