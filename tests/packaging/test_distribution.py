"""What is built can be used: from the wheel, from the sdist, and as an editable install."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CARDS = ("analyzer", "implementer", "templates", "references", "skills")


def members(wheel: Path) -> set[str]:
    """Files of a wheel below kvskill/."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if name.startswith("kvskill/") and not name.endswith("/")}


@pytest.mark.parametrize("folder", CARDS)
def test_every_file_of_a_card_folder_is_in_the_wheel(folder: str, wheel: Path) -> None:
    inside = members(wheel)
    files = [p for p in (ROOT / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert files
    missing = [str(p.relative_to(ROOT)) for p in files if f"kvskill/{p.relative_to(ROOT).as_posix()}" not in inside]
    assert missing == []


@pytest.mark.parametrize("folder", ["embedded", "data", "verifier"])
def test_every_file_of_a_package_folder_is_in_the_wheel(folder: str, wheel: Path) -> None:
    inside, source = members(wheel), ROOT / "src" / "kvskill"
    files = [p for p in (source / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert files
    missing = [str(p.relative_to(source)) for p in files if f"kvskill/{p.relative_to(source).as_posix()}" not in inside]
    assert missing == []


def test_card_folders_are_relative_links() -> None:
    for folder in CARDS:
        link = ROOT / "src" / "kvskill" / folder
        assert link.is_symlink() and not link.readlink().is_absolute()
        assert link.resolve() == ROOT / folder


def test_the_sdist_builds_the_same_wheel(wheel: Path, wheel_of_sdist: Path) -> None:
    assert members(wheel_of_sdist) == members(wheel)


def test_nothing_but_the_package_is_installed(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvskill"}


def test_the_licence_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert any(name.endswith("/LICENSE") for name in archive.namelist())


@pytest.mark.parametrize("editable", [False, True], ids=["wheel", "editable"])
def test_the_installed_command_works_from_an_empty_folder(
    editable: bool,
    wheel: Path,
    source_copy: Path,
    empty_env: Callable[[Path, bool], Path],
    run: Callable[..., str],
    tmp_path: Path,
) -> None:
    scripts = empty_env(source_copy if editable else wheel, editable)
    empty = tmp_path / "empty"
    empty.mkdir()
    where = run(scripts / "python", "-c", "import kvskill; print(kvskill.__file__)", cwd=empty).strip()
    assert Path(where).is_relative_to(source_copy if editable else scripts.parent)
    kvskill = scripts / "kvskill"
    assert run(kvskill, "--version", cwd=empty).startswith("kvskill, version ")
    assert json.loads(run(kvskill, "schema", cwd=empty))["title"] == "Manifest"
    assert "npu_fused_infer_attention_score_v2" in run(kvskill, "ops", "list", cwd=empty)
    assert "KV001" in run(kvskill, "explain", "KV001", cwd=empty)
    assert run(kvskill, "template", "list", cwd=empty).strip()
    make = "from pathlib import Path; from kvskill.embedded import materialise; materialise(Path('target'), '2026-06')"
    run(scripts / "python", "-c", make, cwd=empty)
    run(kvskill, "analyze", "tiny_dense", cwd=empty / "target")
    run(kvskill, "apply", "tiny_dense", cwd=empty / "target")
    converted = empty / "target" / "models" / "tiny_dense" / "models" / "modeling_tiny_dense.py"
    assert "get_cache_info" in converted.read_text(encoding="utf-8")
