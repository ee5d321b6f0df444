"""What a command imports. Import time is what a user waits for before anything happens; no clock is asserted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvskill.cli import COMMANDS
from kvskill.diagnostics import ExitCode
from kvskill.embedded import materialise

HEAVY = ("torch", "torch_npu", "transformers", "numpy", "safetensors")
CODE = """
import sys
from kvskill.cli import main
code = 0
try:
    main(sys.argv[1:])
except SystemExit as exit:
    code = exit.code or 0
print("MODULES", *sorted({name.split(".")[0] for name in sys.modules}))
print("CODE", code)
"""


def imported(*argv: str, cwd: Path, code: int = 0) -> set[str]:
    """Top-level names of the modules in memory after a command."""
    result = subprocess.run([sys.executable, "-c", CODE, *argv], cwd=cwd, capture_output=True, text=True, timeout=120)
    lines = result.stdout.splitlines()
    assert lines[-1] == f"CODE {code}", result.stdout[-2000:] + result.stderr[-2000:]
    return set(lines[-2].split()[1:])


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A target repository with a Legacy model."""
    return materialise(tmp_path / "target", "2026-04")


def test_version_and_help_import_next_to_nothing(tmp_path: Path) -> None:
    for option in ("--version", "--help"):
        loaded = imported(option, cwd=tmp_path)
        assert not loaded & {*HEAVY, "pydantic", "libcst", "jinja2", "yaml", "rich", "markdown_it"}


def test_analyze_and_apply_import_no_torch(repo: Path) -> None:
    assert not imported("analyze", "tiny_dense", cwd=repo) & set(HEAVY)
    assert not imported("apply", "tiny_dense", "--diff", cwd=repo) & set(HEAVY)
    assert not imported("apply", "tiny_dense", cwd=repo) & set(HEAVY)


def test_analyze_does_not_load_the_concrete_syntax_parser(repo: Path) -> None:
    assert "libcst" not in imported("analyze", "tiny_dense", cwd=repo)


def test_no_command_imports_the_code_it_reads(repo: Path) -> None:
    names = {"executor", "models", "module"}
    assert not imported("analyze", "tiny_dense", cwd=repo) & names
    assert not imported("apply", "tiny_dense", cwd=repo) & names


def test_the_card_folders_are_never_imported_by_their_own_name() -> None:
    root = Path(__file__).resolve().parents[2]
    code = "import sys, pkgutil, kvskill\n"
    code += "import kvskill.analyzer, kvskill.implementer\n"
    code += "print(sorted({'analyzer', 'implementer', 'templates', 'references', 'skills'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]", result.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_list_exists_and_explains_itself(name: str, tmp_path: Path) -> None:
    assert not imported(name, "--help", cwd=tmp_path) & set(HEAVY)


def test_python_dash_m_is_the_same_command(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "kvskill", "--version"]
    result = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and result.stdout.startswith("kvskill, version ")


def test_the_exit_codes_are_in_the_help(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "kvskill", "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    text = " ".join(result.stdout.split())
    for code in ExitCode:
        assert f" {int(code)} " in text
