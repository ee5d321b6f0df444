"""The wheel and the sdist, built once from a copy of the working tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = (
    ".git",
    ".venv*",
    "build",
    "dist",
    "*.egg-info",
    "__pycache__",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
)


def run(*argv: object, cwd: Path) -> str:
    """Output of a child process with a clean environment; fails the test with its error text."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_REQUIRE"))}
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    result = subprocess.run([str(a) for a in argv], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"{' '.join(map(str, argv))}\n{result.stdout[-2000:]}\n{result.stderr[-3000:]}"
    return result.stdout


def build(kind: str, source: Path, dest: Path) -> Path:
    """Build "wheel" or "sdist" with the setuptools of this environment."""
    dest.mkdir(exist_ok=True)
    code = f"from setuptools import build_meta as b; print(b.build_{kind}({str(dest)!r}))"
    return dest / run(sys.executable, "-c", code, cwd=source).splitlines()[-1]


@pytest.fixture(scope="session", name="run")
def run_fixture() -> Callable[..., str]:
    """`run` for tests."""
    return run


@pytest.fixture(scope="session")
def source_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working tree without build output, symbolic links kept."""
    copy = tmp_path_factory.mktemp("source") / "kvskill"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*SKIPPED))
    return copy


@pytest.fixture(scope="session")
def wheel(source_copy: Path) -> Path:
    """The wheel of the working tree."""
    return build("wheel", source_copy, source_copy.parent / "dist")


@pytest.fixture(scope="session")
def wheel_of_sdist(source_copy: Path) -> Path:
    """The wheel of the unpacked sdist."""
    archive = build("sdist", source_copy, source_copy.parent / "dist")
    unpacked = source_copy.parent / "unpacked"
    with tarfile.open(archive) as tar:
        tar.extractall(unpacked, filter="data")
    (folder,) = unpacked.iterdir()
    return build("wheel", folder, source_copy.parent / "from_sdist")


@pytest.fixture
def empty_env(tmp_path: Path) -> Callable[[Path, bool], Path]:
    """(wheel or source folder, editable) -> bin folder of an environment with that kvskill.

    The other packages come from this environment through a .pth file, so that nothing is downloaded.
    """

    def make(what: Path, editable: bool) -> Path:
        folder = tmp_path / "env"
        venv.create(folder, with_pip=False, symlinks=os.name != "nt")
        scripts = folder / ("Scripts" if os.name == "nt" else "bin")
        python = scripts / "python"
        site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
        here = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        (site / "zz_dependencies.pth").write_text("\n".join(sorted(here)) + "\n", encoding="utf-8")
        options = ["--no-deps", "--no-build-isolation", "--quiet", "--disable-pip-version-check"]
        target = ["-e", what] if editable else ["--no-index", what]
        run(
            sys.executable,
            "-m",
            "pip",
            "--python",
            python,
            "install",
            "--ignore-installed",
            *options,
            *target,
            cwd=tmp_path,
        )
        return scripts

    return make
