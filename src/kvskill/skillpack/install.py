"""Plans and carries out install and uninstall: idempotent, never over an edited file without `force`."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, field
from pathlib import Path

import kvskill
from kvskill.diagnostics import Diagnostic, InputError, Refusal, Severity, Span
from kvskill.skillpack.clients import Client
from kvskill.skillpack.lock import BACKUP_NAME, LOCK_NAME, Lock, digest, read_lock
from kvskill.skillpack.pack import SKILL_NAME, role_texts, role_view, skill_files
from kvskill.skillpack.write import Writer

__all__ = ["Plan", "apply_plan", "plan_install", "plan_uninstall", "status"]


@dataclass(frozen=True)
class Plan:
    """What a run will do below `base`. Paths are POSIX and relative to it.

    `actions`: (verb, path) for people, in order. `write`: new content. `remove`: files to delete.
    `backup`: files to save first, into `backup_name`. `restore`: file -> the backup it comes out of.
    `lock`: the new lock, or None to remove it. `conflicts`: files that need `force`.
    """

    base: Path
    skill: str
    actions: tuple[tuple[str, str], ...] = ()
    write: dict[str, bytes] = field(default_factory=dict)
    remove: tuple[str, ...] = ()
    backup: tuple[str, ...] = ()
    backup_name: str = ""
    restore: dict[str, str] = field(default_factory=dict)
    lock: Lock | None = None
    old_lock: Lock | None = None
    conflicts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def changes(self) -> bool:
        """True when a run would touch anything."""
        return bool(self.write or self.remove or self.restore or self.lock != self.old_lock)


def _wanted(client: Client) -> dict[str, bytes]:
    skill = posixpath.join(client.skills, SKILL_NAME)
    out = {posixpath.join(skill, name): content for name, content in skill_files().items()}
    if client.roles:
        for text in role_texts().values():
            name, content = role_view(text, client)
            out[posixpath.join(client.roles, name)] = content
    return out


def _check_links(base: Path, paths: list[str]) -> None:
    """Raises InputError (KV092) when a path or a folder on the way to it is a symbolic link."""
    for relative in paths:
        here = base
        for part in relative.split("/"):
            here = here / part
            if here.is_symlink():
                raise InputError(
                    Diagnostic(
                        "KV092",
                        Severity.ERROR,
                        f"{here} is a symbolic link to {here.readlink()}.",
                        "Install for the client that owns its target, or replace the link by a folder.",
                        Span(str(here)),
                    )
                )


def _content(path: Path) -> bytes | None:
    """The bytes of a file, None when there is none. Raises InputError (KV090) when it cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise InputError(
            Diagnostic(
                "KV090",
                Severity.ERROR,
                f"{path} cannot be read ({exc.strerror}).",
                "Make it a readable file or move it away.",
                Span(str(path)),
            )
        ) from None


def _foreign_files(base: Path, skill: str) -> tuple[str, ...]:
    """Every file of a skill folder that this installer did not make. Raises InputError (KV092) on links."""
    root = base / skill
    if not root.is_dir():
        return ()
    found = [
        p.relative_to(base).as_posix()
        for p in sorted(root.rglob("*"))
        if (p.is_symlink() or p.is_file()) and not p.name.startswith(BACKUP_NAME)
    ]
    _check_links(base, found)
    return tuple(found)


def plan_install(base: Path, client: Client, force: bool = False) -> Plan:
    """What an install will do.

    Raises InputError (links, unreadable files), and Refusal (KV091) when an edited or foreign file is in the
    way and `force` is not given.
    """
    skill = posixpath.join(client.skills, SKILL_NAME)
    wanted = _wanted(client)
    _check_links(base, [*wanted, posixpath.join(skill, LOCK_NAME)])
    old = read_lock(base / skill / LOCK_NAME)
    ours = old.files if old else {}
    found = {p: _content(base / p) for p in wanted}
    # what somebody else put there: the whole folder of a skill of the same name, and role files
    foreign = _foreign_files(base, skill) if old is None else ()
    other = {p: c for p, c in found.items() if c is not None and c != wanted[p]}
    foreign += tuple(p for p in other if p not in ours and p not in foreign)
    edited = tuple(p for p, c in other.items() if p in ours and digest(c) != ours[p])
    conflicts = (*foreign, *edited)
    if conflicts and not force:
        raise _conflict(base, conflicts, "replace")

    backup_name = _free_name(base / skill)
    write = {p: c for p, c in wanted.items() if found[p] != c}
    stale = {p: c for p in ours if p not in wanted and (c := _content(base / p)) is not None}
    remove = tuple(p for p, c in stale.items() if digest(c) == ours[p])
    remove += tuple(p for p in foreign if p not in wanted)
    left = [p for p in stale if p not in remove]
    actions = [("write" if found[p] is None else "replace", p) for p in write]
    actions += [("remove", p) for p in remove]
    mine = {p: digest(c) for p, c in wanted.items() if p in ours or p in foreign or p in write}
    lock = Lock(
        kvskill.__version__,
        tuple(sorted({*(old.clients if old else ()), client.name})),
        mine,
        _new_dirs(base, wanted, old),
        {**(old.foreign if old else {}), **dict.fromkeys(foreign, backup_name)},
        tuple(sorted({*(old.edited if old else ()), *([backup_name] if edited else [])})),
    )
    notes = tuple(f"{p} is no longer part of the skill but was edited: left as it is" for p in left)
    return Plan(base, skill, tuple(actions), write, remove, conflicts, backup_name, {}, lock, old, conflicts, notes)


def _free_name(folder: Path) -> str:
    number = 1
    while (folder / f"{BACKUP_NAME}-{number}.zip").exists():
        number += 1
    return f"{BACKUP_NAME}-{number}.zip"


def _new_dirs(base: Path, wanted: dict[str, bytes], old: Lock | None) -> tuple[str, ...]:
    """Folders that this install makes, and those that earlier ones made."""
    made = set(old.created_dirs) if old else set()
    for path in wanted:
        folder = posixpath.dirname(path)
        while folder:
            if not (base / folder).is_dir():
                made.add(folder)
            folder = posixpath.dirname(folder)
    return tuple(sorted(made))


def _conflict(base: Path, paths: tuple[str, ...], verb: str) -> Refusal:
    return Refusal(
        Diagnostic(
            "KV091",
            Severity.BLOCKING,
            f"{path} was edited or was not installed by kvskill.",
            f"Keep a copy and run again with --force to {verb} it.",
            Span(str(base / path)),
        )
        for path in paths
    )


def plan_uninstall(base: Path, client: Client, force: bool = False) -> Plan:
    """What an uninstall will do; an empty plan when nothing is installed. Raises as `plan_install`."""
    skill = posixpath.join(client.skills, SKILL_NAME)
    _check_links(base, [posixpath.join(skill, LOCK_NAME)])
    old = read_lock(base / skill / LOCK_NAME)
    if old is None or client.name not in old.clients:
        return Plan(base, skill, notes=(f"not installed for {client.name}",))
    _check_links(base, list(old.files))
    others = tuple(c for c in old.clients if c != client.name)
    if others:
        lock = Lock(old.version, others, old.files, old.created_dirs, old.foreign, old.edited)
        return Plan(base, skill, lock=lock, old_lock=old, notes=(f"kept for {', '.join(others)}",))
    present = {p: c for p in old.files if (c := _content(base / p)) is not None}
    conflicts = tuple(p for p, c in present.items() if digest(c) != old.files[p])
    if conflicts and not force:
        raise _conflict(base, conflicts, "remove")
    notes = [f"restored {len(old.foreign)} files of the skill that was there before"] if old.foreign else []
    if old.edited:
        kept = ", ".join(posixpath.join(skill, b) for b in old.edited)
        notes.append(f"edits that --force replaced are kept in the backup {kept}")
    return Plan(
        base,
        skill,
        tuple(("remove", p) for p in present),
        {},
        tuple(present),
        (),
        "",
        old.foreign,
        None,
        old,
        conflicts,
        tuple(notes),
    )


def apply_plan(plan: Plan) -> None:
    """Carry the plan out. Raises InputError (KV090), before any change, when a folder cannot be written."""
    if not plan.changes:
        return
    writer = Writer(plan.base, plan.skill)
    if plan.lock is not None:
        if plan.backup:
            writer.save(plan.backup, plan.backup_name)
        new = {**plan.write, posixpath.join(plan.skill, LOCK_NAME): plan.lock.dump()}
        writer.write(new)
        writer.remove(plan.remove)
        return
    assert plan.old_lock is not None
    writer.remove(plan.remove)
    writer.remove((posixpath.join(plan.skill, LOCK_NAME),))
    if plan.restore:
        writer.restore(plan.restore)
    done = set(plan.restore.values()) - set(plan.old_lock.edited)
    writer.remove(posixpath.join(plan.skill, b) for b in sorted(done))
    writer.remove_empty(plan.old_lock.created_dirs)


def status(base: Path, client: Client) -> tuple[str, tuple[str, ...]]:
    """(`absent` | `foreign` | `current` | `outdated` | `edited`, paths that differ)."""
    skill = posixpath.join(client.skills, SKILL_NAME)
    wanted = _wanted(client)
    _check_links(base, [*wanted, posixpath.join(skill, LOCK_NAME)])
    lock = read_lock(base / skill / LOCK_NAME)
    if lock is None or client.name not in lock.clients:
        foreign = lock is None and (base / skill / "SKILL.md").exists()
        return ("foreign" if foreign else "absent"), ()
    here = {p: _content(base / p) for p in lock.files}
    edited = tuple(p for p, c in here.items() if c is None or digest(c) != lock.files[p])
    if edited:
        return "edited", edited
    everything = {**wanted, **lock.files}
    differs = tuple(p for p in everything if p not in lock.files or here.get(p) != wanted.get(p))
    return ("outdated" if differs or lock.version != kvskill.__version__ else "current"), differs
