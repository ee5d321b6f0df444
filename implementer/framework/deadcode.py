"""What the seam's removal leaves without a reader: assignments, then parameters and the arguments given for them."""

from __future__ import annotations

import ast

from kvskill.analyzer.modeling.values import Frame, Func
from kvskill.implementer.framework.calls import drop_argument, drop_parameter, parameter_names
from kvskill.implementer.framework.context import Context
from kvskill.implementer.framework.deadfields import drop_fields
from kvskill.implementer.framework.deadvalues import dead_entries, dead_returns
from kvskill.implementer.framework.starargs import drop_starred
from kvskill.implementer.textops import names_read, remove_statements, replace_expr, statements, whole_removal

__all__ = ["settle_names", "sweep", "sweep_again", "write_removals"]


def sweep(ctx: Context, *, parameters: bool = True) -> None:
    """Mark dead statements and drop dead parameters (`parameters`) until nothing changes."""
    dropped: set[tuple[int, str]] = set()
    for _ in range(30):
        changed = False
        for key in list(ctx.functions):
            changed |= _dead_statements(ctx, ctx.functions[key])
            changed |= _dead_loop_names(ctx, ctx.functions[key])
        for key in list(ctx.functions) if parameters else ():
            changed |= _dead_parameters(ctx, ctx.functions[key], dropped)
        if parameters:
            changed |= drop_starred(ctx, {name for _, name in dropped})
            changed |= dead_entries(ctx, lambda f, line: _all_reads(ctx, f, line), dropped)
            changed |= dead_returns(ctx, lambda f, line: _all_reads(ctx, f, line))
            changed |= drop_fields(ctx)
        if not changed:
            return


def sweep_again(ctx: Context) -> None:
    """Remove statements that became dead after edits were planned, with the edits inside them."""
    before = {key: set(stmts) for key, stmts in ctx.removed.items()}
    sweep(ctx, parameters=False)
    for key, func in ctx.functions.items():
        edits = ctx.edit_set(func.file)
        for stmt in ctx.removed.get(key, set()) - before.get(key, set()):
            start, end = func.file.byte_range(stmt)
            edits.edits = [e for e in edits.edits if not (start <= e.start and e.end <= end)]


def settle_names(ctx: Context) -> None:
    """Names that only removed statements bound must not be read any more.

    A by-product of the old attention that is merely returned (weights, the cache itself) is returned as None; any
    other use is not understood and stops the plan.
    """
    for key, func in ctx.functions.items():
        node = func.node
        assert isinstance(node, ast.FunctionDef)
        gone: set[ast.stmt] = set()
        for stmt in whole_removal(node.body, ctx.removed.get(key, set())):
            gone.update(statements([stmt]))
        lost = {n.id for s in gone for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        left = _left(ctx, func)
        kept = set(parameter_names(node)) | {a.arg for a in (node.args.vararg, node.args.kwarg) if a is not None}
        for stmt in left:
            for part in _own_expressions(stmt):
                kept |= {
                    n.id for n in ast.walk(part) if isinstance(n, ast.Name) and isinstance(n.ctx, (ast.Store, ast.Del))
                }
        kept |= {name for _, names in ctx.bound_at.get(key, []) for name in names}
        missing = lost - kept
        if missing:
            _settle(ctx, func, left, missing)


def _settle(ctx: Context, func: Func, left: list[ast.stmt], missing: set[str]) -> None:
    for stmt in left:
        for part in _own_expressions(stmt):
            cut = {id(n) for d in ast.walk(part) if id(d) in ctx.dropped_args for n in ast.walk(d)}
            for name in ast.walk(part):
                if not (isinstance(name, ast.Name) and isinstance(name.ctx, ast.Load) and name.id in missing):
                    continue
                if id(name) in cut:
                    continue
                if isinstance(stmt, ast.Return) and _returned_plainly(stmt.value, name):
                    replace_expr(ctx.edit_set(func.file), name, "None", "a by-product of the old attention")
                    continue
                ctx.refuse(
                    func.file,
                    name,
                    "KV216",
                    f"`{name.id}` comes from code that the paged path replaces, and is still used here.",
                    "Drop this use, or keep what it needs before the cache is written.",
                )


def _own_expressions(stmt: ast.stmt) -> list[ast.AST]:
    """The parts of a statement that are not statements themselves."""
    if isinstance(stmt, (ast.If, ast.While)):
        return [stmt.test]
    if isinstance(stmt, ast.For):
        return [stmt.target, stmt.iter]
    if isinstance(stmt, ast.With):
        return list(stmt.items)
    if isinstance(stmt, ast.Match):
        return [stmt.subject, *[c.guard for c in stmt.cases if c.guard is not None]]
    if isinstance(stmt, (ast.Try, ast.FunctionDef, ast.ClassDef)):
        return []
    return [stmt]


def _returned_plainly(value: ast.expr | None, name: ast.Name) -> bool:
    """Is the name one element of the returned tuple (or of a tuple in it)?"""
    if isinstance(value, ast.Tuple):
        return any(e is name or _returned_plainly(e, name) for e in value.elts)
    return False


def write_removals(ctx: Context) -> None:
    """Turn everything that was marked into edits."""
    for key, func in ctx.functions.items():
        assert isinstance(func.node, ast.FunctionDef)
        removed = ctx.removed.get(key, set())
        if removed:
            remove_statements(ctx.edit_set(func.file), func.node, removed, "replaced by the paged path")


def _left(ctx: Context, func: Func) -> list[ast.stmt]:
    """Statements that stay (simple ones; the heads of compound ones are looked at by `_reads`)."""
    assert isinstance(func.node, ast.FunctionDef)
    removed = whole_removal(func.node.body, ctx.removed.get(id(func.node), set()))
    gone: set[ast.stmt] = set(ctx.rewritten.get(id(func.node), set()))
    for stmt in removed:
        gone.add(stmt)
        gone.update(statements([stmt]))
    return [s for s in statements(func.node.body) if s not in gone]


def _reads(ctx: Context, func: Func, after: int = 0) -> set[str]:
    """Names that what stays reads, from line `after` on."""
    out = set(ctx.used.get(id(func.node), set()))
    for stmt in _left(ctx, func):
        if stmt.lineno <= after and not isinstance(stmt, ast.While):
            continue
        if isinstance(stmt, (ast.If, ast.While)):
            out |= set() if id(stmt.test) in ctx.rewritten_tests else names_read([stmt.test])
        elif isinstance(stmt, ast.For):
            out |= _live_names(ctx, stmt.iter) | names_read([stmt.target])
        elif isinstance(stmt, ast.With):
            out |= names_read([i.context_expr for i in stmt.items])
        elif isinstance(stmt, ast.Match):
            out |= names_read([stmt.subject, *[c.guard for c in stmt.cases if c.guard is not None]])
        elif isinstance(stmt, ast.Try):
            continue
        else:
            out |= _live_names(ctx, stmt)
            if isinstance(stmt, ast.AugAssign) and isinstance(stmt.target, ast.Name):
                out.discard(stmt.target.id) if _only_self_update(stmt) else None
    return out


def _all_reads(ctx: Context, func: Func, after: int) -> set[str]:
    """What stays and what was added reads from line `after` on."""
    later = {n for line, names in ctx.used_at.get(id(func.node), []) if after < line for n in names}
    return _reads(ctx, func, after) | later


def _only_self_update(stmt: ast.AugAssign) -> bool:
    return isinstance(stmt.target, ast.Name) and stmt.target.id not in names_read([stmt.value])


def _live_names(ctx: Context, stmt: ast.AST) -> set[str]:
    """Names that a statement reads, dropped arguments left out."""
    out: set[str] = set()

    def visit(node: ast.AST) -> None:
        if id(node) in ctx.dropped_args:
            return
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            out.add(node.id)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(stmt)
    return out


def _dead_statements(ctx: Context, func: Func) -> bool:
    freed = ctx.freed.get(id(func.node), set())
    dead: set[ast.stmt] = set()
    everywhere = _reads(ctx, func)
    looped = _in_loops(func)
    for stmt in _left(ctx, func):
        targets = _plain_targets(stmt)
        if not targets & freed:
            continue
        reads = everywhere if stmt in looped else _reads(ctx, func, stmt.lineno)
        later = {n for line, names in ctx.used_at.get(id(func.node), []) if stmt.lineno < line for n in names}
        if targets and not targets & (reads | later) and targets & freed and _pure(ctx, func, stmt):
            dead.add(stmt)
    if not dead:
        return False
    ctx.mark_removed(func, dead)
    # the tests of branches that are now empty free their names as well
    assert isinstance(func.node, ast.FunctionDef)
    for stmt in whole_removal(func.node.body, ctx.removed[id(func.node)]) - ctx.removed[id(func.node)]:
        if isinstance(stmt, (ast.If, ast.While)):
            ctx.freed[id(func.node)] |= names_read([stmt.test])
    return True


def _dead_loop_names(ctx: Context, func: Func) -> bool:
    """`for layer, cache in zip(layers, caches)` whose `cache` nobody reads: the loop goes over the layers alone."""
    freed, reads = ctx.freed.get(id(func.node), set()), _reads(ctx, func)
    frames = ctx.frames_of(func.node) if isinstance(func.node, ast.FunctionDef) else []
    for stmt in _left(ctx, func):
        if not (isinstance(stmt, ast.For) and isinstance(stmt.target, ast.Tuple) and isinstance(stmt.iter, ast.Call)):
            continue
        names, args = stmt.target.elts, stmt.iter.args
        zipped = isinstance(stmt.iter.func, ast.Name) and stmt.iter.func.id == "zip" and not stmt.iter.keywords
        if not zipped or len(names) != 2 or len(args) != 2 or id(stmt.iter.func) in ctx.dropped_args:
            continue
        for dead, kept in ((0, 1), (1, 0)):
            name = names[dead]
            if not isinstance(name, ast.Name) or name.id in reads or name.id not in freed:
                continue
            if not frames or not all(_as_many(f, args[dead], args[kept]) for f in frames):
                continue
            edits = ctx.edit_set(func.file)
            replace_expr(edits, stmt.target, func.file.segment(names[kept]), f"nothing reads `{name.id}` any more")
            replace_expr(edits, stmt.iter, func.file.segment(args[kept]), f"nothing reads `{name.id}` any more")
            ctx.dropped_args |= {id(args[dead]), id(stmt.iter.func)}
            freed |= names_read([args[dead]])
            return True
    return False


def _as_many(frame: Frame, one: ast.expr, other: ast.expr) -> bool:
    """Do two sequences have as many items?"""
    sizes = [len(getattr(frame.values.get(id(n)), "items", ())) for n in (one, other)]
    return sizes[0] == sizes[1] > 0


def _in_loops(func: Func) -> set[ast.stmt]:
    """Statements whose binding the next turn of a loop may read."""
    assert isinstance(func.node, ast.FunctionDef)
    out: set[ast.stmt] = set()
    for stmt in statements(func.node.body):
        if isinstance(stmt, (ast.For, ast.While)):
            out.update(statements(stmt.body))
    return out


def _plain_targets(stmt: ast.stmt) -> set[str]:
    """Names bound by an assignment to plain names; empty for anything else."""
    if isinstance(stmt, ast.Assign):
        targets = stmt.targets
    elif isinstance(stmt, (ast.AnnAssign, ast.AugAssign)) and getattr(stmt, "value", None) is not None:
        targets = [stmt.target]
    else:
        return set()
    out: set[str] = set()
    for target in targets:
        parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
        for part in parts:
            if not isinstance(part, ast.Name):
                return set()
            out.add(part.id)
    return out


def _pure(ctx: Context, func: Func, stmt: ast.stmt) -> bool:
    """No effect but the binding: no in-place operation, no attribute or item written while it runs."""
    for node in ast.walk(stmt):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name.endswith("_") and not name.endswith("__"):
                return False
            if name in ("pop", "append", "extend", "setdefault", "setattr", "print", "all_reduce"):
                return False
        if isinstance(node, (ast.Yield, ast.YieldFrom, ast.Await, ast.NamedExpr)):
            return False
    for run in (ctx.facts.prefill, ctx.facts.decode):
        if run is None:
            continue
        for write in run.walk.attr_writes:
            if any(f.call_stmt is stmt for f in write.frame.chain()):
                return False
    return True


def _dead_parameters(ctx: Context, func: Func, dropped: set[tuple[int, str]]) -> bool:
    node = func.node
    assert isinstance(node, ast.FunctionDef)
    frames = ctx.frames_of(node)
    if not frames or any(f.parent is None for f in frames):
        return False
    reads = _reads(ctx, func)
    for _, names in ctx.used_at.get(id(node), []):
        reads |= names
    changed = False
    for name in parameter_names(node)[1 if func.owner is not None else 0 :]:
        key = (id(node), name)
        if name in reads or key in dropped:
            continue
        if name not in ctx.freed.get(id(node), set()) and not all(_freed_argument(ctx, f, name) for f in frames):
            continue
        if not _callees_agree(ctx, frames, name) or not _passed_plainly(frames, name, node):
            continue
        if not drop_parameter(ctx, func.file, node, name):
            continue
        dropped.add(key)
        changed = True
        for frame in frames:
            gone = drop_argument(ctx, frame, name)
            parent = frame.parent
            if gone and parent is not None and isinstance(parent.func, ast.FunctionDef):
                owner = Func(parent.func, parent.file, parent.owner)
                ctx.functions.setdefault(id(parent.func), owner)
                ctx.freed.setdefault(id(parent.func), set()).update(names_read(gone))
    return changed


def _freed_argument(ctx: Context, frame: Frame, name: str) -> bool:
    """Is what the call passes for a parameter (one that the function never read) a name that removed code freed?"""
    call, parent, func = frame.call, frame.parent, frame.func
    if not isinstance(call, ast.Call) or parent is None or not isinstance(func, ast.FunctionDef):
        return False
    given = next((k.value for k in call.keywords if k.arg == name), None)
    names = [a.arg for a in [*func.args.posonlyargs, *func.args.args]]
    at = names.index(name) - (1 if frame.owner is not None and frame.self_ is not None else 0) if name in names else -1
    if given is None and 0 <= at < len(call.args) and not any(isinstance(a, ast.Starred) for a in call.args):
        given = call.args[at]
    return isinstance(given, ast.Name) and given.id in ctx.freed.get(id(parent.func), set())


def _callees_agree(ctx: Context, frames: list[Frame], name: str) -> bool:
    """Every function that one of these calls may reach is the one that loses the parameter."""
    func = frames[0].func
    calls = {id(f.call) for f in frames}
    return all(frame.func is func for frame in ctx.frames if id(frame.call) in calls)


def _passed_plainly(frames: list[Frame], name: str, node: ast.FunctionDef) -> bool:
    """The argument is written at each call; one that arrives through ** would have nowhere to go."""
    for frame in frames:
        call = frame.call
        if not isinstance(call, ast.Call) or any(isinstance(a, ast.Starred) for a in call.args):
            return False
        names = [a.arg for a in node.args.args]
        offset = 1 if frame.owner is not None and frame.self_ is not None else 0
        by_position = name in names and 0 <= names.index(name) - offset < len(call.args)
        by_keyword = any(k.arg == name for k in call.keywords)
        through_stars = any(k.arg is None for k in call.keywords)
        if not by_position and not by_keyword and through_stars and node.args.kwarg is None:
            return False
    return True
