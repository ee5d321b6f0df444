"""Set up a virtual environment for the Makefile: `make_env.py demo|dev [--venv DIR]`.

Runs with any Python >= 3.10 that has venv and pip. "demo" installs what `kvskill demo` runs, "dev" also the
test and lint tools and, where a wheel exists, torch_npu. What was installed is remembered in a stamp inside
the environment, so that a second call costs nothing. torch is pinned because an unpinned torch can be a build
of several gigabytes that does not fit the pinned torch_npu.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
TORCH_NPU = "torch-npu==2.13.0"
TRANSFORMERS = "transformers==5.24.0"
EXTRAS = {"demo": "verify,hf", "dev": "verify,hf,dev"}


def main() -> int:
    """Exit code 0 when the environment is ready."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("profile", choices=sorted(EXTRAS))
    parser.add_argument("--venv", default=".venv", type=Path)
    args = parser.parse_args()
    if sys.version_info < (3, 10):  # noqa: UP036  an older Python gets here before pip can refuse it
        print(f"kvskill needs Python 3.10 or newer; this is {platform.python_version()}", file=sys.stderr)
        return 2
    venv = args.venv if args.venv.is_absolute() else ROOT / args.venv
    wanted = _fingerprint()
    if any(_stamp(venv, profile) == wanted for profile in ("dev", args.profile)):
        return 0
    python = _create(venv)
    if python is None:
        return 2
    extras = EXTRAS[args.profile]
    print(f"setting up {args.venv}: {TORCH}, {TRANSFORMERS}, kvskill[{extras}]", flush=True)
    # One call resolves everything together; the editable package first would pull an unpinned torch.
    code = _pip(python, TORCH, TRANSFORMERS, "-e", f"{ROOT}[{extras}]")
    if code:
        print(_hint(), file=sys.stderr)
        return code
    if args.profile == "dev":
        _torch_npu(python)
    (venv / f"kvskill-{args.profile}.stamp").write_text(wanted, encoding="utf-8")
    return 0


def _fingerprint() -> str:
    digest = hashlib.sha256(platform.python_version().encode())
    for path in (ROOT / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _stamp(venv: Path, profile: str) -> str:
    path = venv / f"kvskill-{profile}.stamp"
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _create(venv: Path) -> Path | None:
    """The environment's interpreter; None (after a message) when venv or pip is missing."""
    python = venv / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    if (
        not python.is_file()
        or subprocess.run([str(python), "-m", "pip", "--version"], capture_output=True).returncode
    ):
        code = subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)]).returncode
        if code:
            print(
                "This Python cannot make virtual environments. Install its venv module "
                "(Debian, Ubuntu: the package python3-venv) or choose another one: make PYTHON=... .",
                file=sys.stderr,
            )
            return None
    return python


def _pip(python: Path, *packages: str) -> int:
    command = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", *packages]
    return subprocess.run(command).returncode


def _torch_npu(python: Path) -> None:
    """The released wheel gives the tests the real schemas; without it they skip and say so."""
    machine, version = platform.machine().lower(), sys.version_info[:2]
    if sys.platform != "linux" or machine not in ("x86_64", "amd64", "aarch64", "arm64") or version > (3, 14):
        where = f"{sys.platform}/{machine}, Python {version[0]}.{version[1]}"
        print(f"{TORCH_NPU} has no wheel for {where}: the tests that need it are skipped")
        return
    if _pip(python, TORCH_NPU, TORCH):
        print(f"{TORCH_NPU} could not be installed: the tests that need it are skipped")


def _hint() -> str:
    return (
        f"Installing failed. pip must find {TORCH} for Python {sys.version_info[0]}.{sys.version_info[1]} "
        "on this platform; pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, ...) are respected."
    )


if __name__ == "__main__":
    sys.exit(main())
