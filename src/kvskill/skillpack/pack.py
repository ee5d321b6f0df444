"""The files of the skill as they ship, and the role files in the form a client wants."""

from __future__ import annotations

from pathlib import Path

import yaml

import kvskill
from kvskill.skillpack.clients import Client
from kvskill.skillpack.frontmatter import split_frontmatter

__all__ = ["ROLES", "SKILL_NAME", "role_texts", "role_view", "skill_files", "skill_folder"]

SKILL_NAME = "model-infer-kvcache"
ROLES = ("analyzer", "implementer", "reviewer")


def _skills() -> Path:
    return Path(kvskill.__file__).resolve().parent / "skills"


def skill_folder() -> Path:
    """The folder of the skill inside the installed package (or the checkout)."""
    return _skills() / SKILL_NAME


def skill_files() -> dict[str, bytes]:
    """Content by POSIX path relative to the skill folder; hidden and compiled files are not part of it."""
    root = skill_folder()
    out = {}
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        if path.is_file() and not any(p.startswith(".") or p == "__pycache__" for p in parts):
            out["/".join(parts)] = path.read_bytes()
    return out


def role_texts() -> dict[str, str]:
    """The role files as they ship, by role."""
    return {r: (_skills() / "agents" / f"{r}.md").read_text(encoding="utf-8") for r in ROLES}


def role_view(text: str, client: Client) -> tuple[str, bytes]:
    """(file name, content) of a role for one client: only the fields that the client knows."""
    fields, body = split_frontmatter(text)
    kept = {k: fields[k] for k in client.role_fields} | client.role_extra
    head = yaml.safe_dump(kept, sort_keys=False, allow_unicode=True, width=1000)
    return f"{fields['name']}.md", f"---\n{head}---\n{body}".encode()
