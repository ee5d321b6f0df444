"""The verifier's own test: every deliberately wrong rewrite is caught, by the check that its row names."""

from __future__ import annotations

import ast
import importlib.util
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvskill.diagnostics import ExitCode
from kvskill.embedded import materialise
from kvskill.verifier.options import VerifyOptions
from kvskill.verifier.run import verify_model

# One worker runs them all: they share one preloaded process and the run of the oracle.
pytestmark = pytest.mark.xdist_group("wrong rewrites")

HERE = Path(__file__).resolve().parent
MODELS = ("gqa", "mixed", "mla")
PROMPTS = {"gqa": (5, 1, 17), "mixed": (5, 1, 60), "mla": (5, 1, 17)}


def _load(name: str, path: Path) -> Any:
    import sys

    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


zygote = _load("kvskill_test_zygote", HERE.parent / "zygote.py")
table = _load("kvskill_test_wrong_table", HERE / "table.py")
ROWS = {row.name: row for row in table.ROWS}


def _options(folder: Path, model: str, repeat: bool, tp: int = 1) -> VerifyOptions:
    return VerifyOptions(
        model=folder,
        against="hf",
        backend="table",
        prompts=PROMPTS[model],
        decode_steps=18,
        batch_size=2,
        checks=repeat,
        tp=tp,
    )


def _mutant(tree: Path, row: Any) -> Path:
    folder = tree / "models" / ("wrong_" + "".join(c if c.isalnum() else "_" for c in row.name))
    shutil.copytree(HERE / "models" / row.model, folder)
    path = folder / "models" / f"modeling_{row.model}.py"
    text = path.read_text(encoding="utf-8")
    for old, new, count in row.edits:
        assert text.count(old) == count, (row.name, old, text.count(old))
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Any]]]:
    """Every verification of this module, running two at a time in forks of one preloaded process."""
    base = tmp_path_factory.mktemp("wrong")
    tree = materialise(base / "tree", "2026-08", [])
    for model in MODELS:
        shutil.copytree(HERE / "models" / model, tree / "models" / model)
    jobs = {m: _options(tree / "models" / m, m, repeat=True) for m in MODELS}
    jobs["gqa tp 2"] = _options(tree / "models" / "gqa", "gqa", repeat=False, tp=2)
    for row in table.ROWS:
        jobs[row.name] = _options(_mutant(tree, row), row.model, row.repeat, row.tp)
    runner = zygote.Zygote(tree, base)
    pool = ThreadPoolExecutor(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ast, "parse", _one_at_a_time(ast.parse))
        try:
            yield {name: pool.submit(verify_model, options, runner.run) for name, options in jobs.items()}
        finally:
            pool.shutdown(cancel_futures=True)
            runner.close()


def _one_at_a_time(parse: Any) -> Any:
    """CPython 3.11 keeps the recursion depth of `ast.parse` in one place for all threads, and raises SystemError when
    two run at once: here those of the pool, and pytest's own where it shows a failure."""
    lock = threading.RLock()

    def locked(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return parse(*args, **kwargs)

    return locked


@pytest.mark.parametrize("model", [*MODELS, "gqa tp 2"])
def test_unchanged_model_passes(reports: dict[str, Future[Any]], model: str) -> None:
    report = reports[model].result()
    assert report.exit_code == ExitCode.DONE, [str(f) for f in report.findings]
    assert max(c.relative for c in report.comparisons) < 1e-5
    assert all(check.ok for check in report.checks), report.checks


@pytest.mark.parametrize("name", list(ROWS))
def test_wrong_rewrite_is_caught(reports: dict[str, Future[Any]], name: str) -> None:
    row, report = ROWS[name], reports[name].result()
    shown = "\n".join(map(str, report.findings))
    assert report.exit_code == ExitCode.FOUND, shown
    assert row.expect <= zygote.findings(report), shown
    ended = report.parties["Paged"].startswith("ran")
    assert ended != row.refused, report.parties["Paged"]


def test_there_are_enough_rows() -> None:
    assert len(ROWS) == len(table.ROWS) >= 25
    assert sum(not row.refused for row in table.ROWS) >= 25
