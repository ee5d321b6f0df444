"""Acceptance of the analyzer on real input: every model folder of the newest tree, and the memory plan."""

from __future__ import annotations

import importlib.util
import json
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 10.0  # CPU seconds of one analysis, interpreter start included; a machine may be busy


def _folders(ctx: Any, commit: str) -> list[str]:
    out = subprocess.run(
        ["git", "-C", str(ctx.git), "ls-tree", "--name-only", commit, "models/"],
        check=True,
        capture_output=True,
        text=True,
    )
    return [line.split("/", 1)[1] for line in out.stdout.split()]


def every_folder(ctx: Any) -> str:
    """Each folder under models/ of the newest tree ends with a manifest or a reasoned refusal, never a crash."""
    commit = ctx.newest()
    names = _folders(ctx, commit)
    tree = ctx.work / "every-folder"  # a tree of its own: manifests are written
    tree.mkdir()
    ctx._extract(commit, tree, ["executor", "module", "models"])
    paged, decided, refused, wrong, slow = [], [], [], [], []
    slowest = (0.0, "")
    for name in names:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = ctx.kvskill("analyze", name, "--repo", tree, expect=None)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        slowest = max(slowest, (seconds, name))
        if seconds > LIMIT:
            slow.append(f"{name} {seconds:.1f} s")
        manifest = tree / "models" / name / "kv_manifest.yaml"
        first = (done.stdout or done.stderr).splitlines()[0] if (done.stdout or done.stderr).strip() else ""
        if "Traceback" in done.stderr or done.returncode not in (0, 2, 3):
            wrong.append(f"{name}: exit {done.returncode}")
        elif done.returncode == 0 and manifest.is_file():
            (paged if "already Paged" in first else decided).append(name)
        elif manifest.is_file() or re.search(r"KV\d{3}", done.stderr):
            refused.append(name)
        else:
            wrong.append(f"{name}: no manifest and no reason")
        if _declares_pages(tree / "models" / name) and "already Paged" not in first:
            wrong.append(f"{name}: Paged already, but {first[:80]!r}")
    assert not wrong, "; ".join(wrong)
    assert not slow, "over the time limit: " + ", ".join(slow)
    counts = f"{len(paged)} Paged already, {len(decided)} decided, {len(refused)} refused"
    return f"{len(names)} folders at {commit}: {counts}; slowest {slowest[1]} {slowest[0]:.1f} s CPU"


def _declares_pages(folder: Path) -> bool:
    """A text judgement that shares nothing with the analyzer: entries built and reported, nothing scattered by row."""
    text = "\n".join(p.read_text(errors="replace") for p in sorted((folder / "models").glob("modeling_*.py")))
    return "def get_cache_info" in text and "cache_entries" in text and "scatter_update_(" not in text


def memory(ctx: Any) -> str:
    """The plan equals calculate_block_num and the allocated tensors, byte for byte, in three eras of the framework."""
    path = ROOT / "tests/analyzer/memory/framework.py"
    spec = importlib.util.spec_from_file_location("kvskill_real_framework", path)
    assert spec is not None and spec.loader is not None
    framework = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = framework
    spec.loader.exec_module(framework)
    commits = ("0296d00", "48a59dc", ctx.newest())
    for commit in commits:
        wrong = framework.compare(ctx.tree(commit))
        assert not wrong, f"{commit}: {wrong[0]} ({len(wrong)} differences)"
    return f"{len(framework.MODELS)} models x {len(framework.RUNS)} settings equal at {', '.join(commits)}"


def profiles(ctx: Any) -> str:
    """The probe tells the API eras apart by source."""
    from kvskill.analyzer.target import probe

    expected = {
        "82ac5cb": (False, "padded-2d", False, "entry"),
        "0296d00": (True, "packed-1d", False, "model"),
        "48a59dc": (True, "packed-1d", True, "entry"),
        ctx.newest(): (True, "packed-1d", True, "entry"),
    }
    for commit, wanted in expected.items():
        p = probe(ctx.tree(commit), use_installed=False).profile
        found = (p.paged, p.input_era, p.registers_groups, p.block_size_on)
        assert found == wanted, f"{commit}: {found}, not {wanted}"
    return f"{len(expected)} commits"


def before_paging(ctx: Any) -> str:
    """A target older than paging: Legacy is kept, with the ground, exit 0."""
    tree = ctx.copy("82ac5cb", "qwen3_moe")
    done = ctx.kvskill("analyze", "qwen3_moe", "--repo", tree, "--json", "--no-write")
    manifest = json.loads(done.stdout)["manifest"]
    assert manifest["kv_mode"]["value"] == "legacy" and manifest["kv_grounds"], manifest["kv_mode"]
    return manifest["kv_grounds"][0]


LINES = [
    ("every folder of the newest tree", every_folder),
    ("memory plan equals the framework", memory),
    ("target profiles", profiles),
    ("target older than paging", before_paging),
]
