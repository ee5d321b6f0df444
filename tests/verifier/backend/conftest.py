"""Runs scripts with a backend in child processes: an install holds for the rest of a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def _torch() -> None:
    try:
        metadata.distribution("torch")
    except metadata.PackageNotFoundError:
        pytest.skip("torch is not installed")


def _wheel() -> None:
    _torch()
    try:
        metadata.distribution("torch_npu")
    except metadata.PackageNotFoundError:
        pytest.skip("torch_npu is not installed: the wheel backend cannot be tested (pip install torch_npu==2.13.0)")


def child(script: str | Path, *args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a script file, or program text, in a fresh interpreter."""
    command = [sys.executable, str(script)] if isinstance(script, Path) else [sys.executable, "-c", script]
    full = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    full.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)  # install must see to it
    return subprocess.run([*command, *args], capture_output=True, text=True, timeout=300, env=full)


@pytest.fixture(scope="session")
def run() -> Callable[..., str]:
    """Output of program text that must end well; "wheel" in the text needs the wheel."""

    def run_text(script: str, *args: str, env: dict[str, str] | None = None) -> str:
        _wheel() if "wheel" in args else _torch()
        done = child(script, *args, env=env)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run_text


def _scenario(kind: str, folder: Path, *tests: str) -> dict[str, Any]:
    out = folder / f"{kind}.json"
    done = child(HERE / "scenario.py", kind, str(out), *tests)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What scenario.py found with the table of 2.13.0."""
    _torch()
    return _scenario("table", tmp_path_factory.mktemp("scenario"), "test_schema")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What scenario.py found with the installed wheel."""
    _wheel()
    return _scenario("wheel", tmp_path_factory.mktemp("scenario"), "test_schema", "test_faketensor")
