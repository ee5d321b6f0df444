"""The evidence ledger is fresh, a slice of it is repeated, and a wrong template does not pass."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from kvskill.diagnostics import InputError
from kvskill.verifier.templates import TemplateOptions, ledger, read_ledger, stale_entries, verify_templates
from kvskill.verifier.templates.cases import all_cases, slice_of, templates_of

ROOT = Path(__file__).resolve().parents[2]


def _commit() -> str:
    done = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "no commit"


def test_ledger_is_fresh() -> None:
    report = verify_templates(TemplateOptions(check=True))
    assert not report.findings, [f.fact for f in report.findings[:5]]


def test_a_slice_chosen_by_the_commit_is_reproduced() -> None:
    text = _commit()
    report = verify_templates(TemplateOptions(slice_text=text, backend="table"))
    assert not report.findings, [f.fact for f in report.findings[:5]]
    assert len(report.figures) >= 10
    assert set(report.figures) == {c["id"] for c in slice_of(all_cases(), text)}


def test_every_template_has_cases_and_slices_differ() -> None:
    cases = all_cases()
    assert set(templates_of(cases)) == set(ledger.template_hashes())
    assert len({c["id"] for c in cases}) == len(cases)
    first, second = (slice_of(cases, t) for t in ("a", "b"))
    assert templates_of(first) == templates_of(second) == templates_of(cases)
    assert {c["id"] for c in first} != {c["id"] for c in second}


MATRIX = """
schema: 1
axes:
  heads: {gqa4x2d64: {q_heads: 4, kv_heads: 2, dim: 64}}
  latent: {n4: {q_heads: 4}}
  window: {some24: {window: 24, sliding: some}}
  write: {nz: {fused: true}}
  batch: {long: {prompts: [60, 3], idle: 1, steps: 3, q: 1}}
groups:
  - name: attend
    kind: attention
    templates: [framework/attend_head, framework/attend]
    axes: {heads: [gqa4x2d64], block: [16], window: [some24], batch: [long], fa_version: [2]}
  - name: mla
    kind: mla
    templates: [framework/mla_attend, framework/mla_absorb]
    axes: {latent: [n4], block: [16], write: [nz], batch: [long], rope_op_version: [1], fa_version: [2]}
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package whose templates may be changed, with a matrix of two cases."""
    base = tmp_path_factory.mktemp("package")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src" / "kvskill", base / "kvskill", ignore=ignore)
    (base / "kvskill" / "data" / "template_matrix.yaml").write_text(MATRIX)
    return base


def _run(package: Path, **options: Any) -> dict[str, Any]:
    """verify_templates in the copied package: exit code, findings and figures."""
    code = (
        "import json; from pathlib import Path; from kvskill.verifier.templates import *\n"
        f"r = verify_templates(TemplateOptions(ledger=Path({str(package / 'l.json')!r}), framework=False, workers=1, "
        f"backend='table', **{options!r}))\n"
        "print(json.dumps([int(r.exit_code), [[f.code, f.fact] for f in r.findings], r.figures]))"
    )
    env = {**os.environ, "PYTHONPATH": str(package)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True, cwd=package
    )
    status, findings, figures = json.loads(done.stdout.splitlines()[-1])
    return {"exit": status, "codes": {c for c, _ in findings}, "facts": [f for _, f in findings], "figures": figures}


def test_write_check_change_and_repeat(package: Path) -> None:
    path = package / "l.json"
    assert _run(package)["exit"] == 0
    data = read_ledger(path)
    entry = data.templates["framework/attend"]
    assert entry["reference"]["cases"] == 1 and entry["reference"]["worst"] < 1e-5
    assert entry["npu"] == "not run" and "all" in json.dumps(entry["binds"])
    assert data.dump() == path.read_text()
    assert _run(package, check=True)["exit"] == 0

    case = next(c for c in data.cases if c.startswith("mla"))
    data.cases[case] = 1e-30
    path.write_text(data.dump())
    assert _run(package, slice_text="x")["exit"] == 0, "below the floor of rounding nothing is contradicted"
    data.templates["framework/attend"]["sha256"] = "0" * 64
    path.write_text(data.dump())
    found = _run(package, check=True)
    assert found["codes"] == {"KV440"} and "framework/attend has changed" in found["facts"][0]


@pytest.mark.parametrize(
    ("template", "old", "new"),
    [
        ("framework/attend", "pre_tokens={{ window }}{{ ", "pre_tokens={{ window }} + 1{{ "),
        ("framework/attend", "{{ meta }}.actual_seq_lengths_kv\n", "{{ meta }}.actual_seq_lengths_kv * 0 + 1\n"),
        ("framework/attend", "atten_mask={{ meta }}.attention_mask", "atten_mask=~{{ meta }}.attention_mask"),
        ("framework/mla_attend", "{{ scale_arg }}={{ scale }}", "{{ scale_arg }}=1.0"),
    ],
)
def test_a_wrong_template_fails(package: Path, template: str, old: str, new: str) -> None:
    path = package / "kvskill" / "templates" / f"{template}.j2"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    try:
        found = _run(package)
    finally:
        path.write_text(text, encoding="utf-8")
    assert found["exit"] == 1 and found["codes"] == {"KV441"}
    assert any(template in fact for fact in found["facts"])


def test_a_broken_ledger_is_an_input_error(tmp_path: Path) -> None:
    path = tmp_path / "verification.json"
    path.write_text("{")
    with pytest.raises(InputError) as caught:
        read_ledger(path)
    assert caught.value.findings[0].code == "KV442"
    assert stale_entries(read_ledger(tmp_path / "absent.json"))


def test_figures_are_rounded_up() -> None:
    assert [ledger.round_up(x) for x in (0.0, 3.4e-7, 4e-7, 9.5e-8)] == [0.0, 4e-7, 4e-7, 1e-7]
