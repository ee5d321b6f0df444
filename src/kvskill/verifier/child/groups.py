"""Communication groups on one host: gloo (hccl on a device), and only what the code itself registered.

Some code asks for a group at world size 1 that it registers only for larger sizes: then a one-process gloo group
serves, provided that the function with that registration has run (or, before models registered their own, that the
framework's manager creates it for larger sizes). A name that nobody registers is an error, as in the field.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from typing import Any

__all__ = ["Groups", "UnregisteredGroup"]


class UnregisteredGroup(KeyError):  # noqa: N818
    """A communication group is asked for that nobody registered."""

    def __str__(self) -> str:
        return f"communication group '{self.args[0]}' was never registered"


class Groups:
    """Installs the substitutions; `served` lists the names that the one-process group stood in for."""

    def __init__(self, job: dict[str, Any], result: dict[str, Any]) -> None:
        self.job, self.result = job, result
        self.served: set[str] = set()
        self.ranks: dict[str, int] = {}
        self.corrected: set[str] = set()
        self.tp = int(job["tp"])
        self.comm = str(job["comm"])
        self.conditional = [tuple(item.split("@")) for item in job["group_names"]]
        self.by_manager: set[str] = set()
        self.ran: set[str] = set()

    def install(self) -> None:
        """Patch torch.distributed for gloo and the target's CommManager."""
        import torch.distributed as dist

        self._patch_distributed(dist)
        dist.init_process_group()
        module: Any = importlib.import_module("executor.core.config.comm_manager")
        manager = module.CommManager
        registers = hasattr(manager, "register_group")
        self.result["registers_groups"] = registers
        if not registers:
            names = re.findall(r"_groups\[\"(\w+)\"\]", inspect.getsource(manager))
            self.by_manager = set(names)
        self._patch_manager(manager, dist)
        hccl: Any = importlib.import_module("executor.utils.hccl_utils")
        if self.comm == "gloo" and hasattr(hccl, "get_group_name"):
            hccl.get_group_name = lambda group, rank: "gloo"
            module.get_group_name = hccl.get_group_name

    def _patch_distributed(self, dist: Any) -> None:
        new_group, init = dist.new_group, dist.init_process_group

        def gloo_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
            return new_group(ranks=ranks, backend=self.comm)

        def gloo_init(*args: Any, **kwargs: Any) -> None:
            if not dist.is_initialized():
                store = f"file://{self.job['rendezvous']}"
                init(self.comm, init_method=store, world_size=self.tp, rank=int(self.job["rank"]))

        dist.new_group, dist.init_process_group = gloo_group, gloo_init

    def _patch_manager(self, manager: Any, dist: Any) -> None:
        get_group, get_rank = manager.get_group, manager.get_rank
        get_name = getattr(manager, "get_group_name", None)
        register = getattr(manager, "register_group", None)

        def register_group(this: Any, *args: Any, **kwargs: Any) -> Any:
            assert register is not None
            self.ran.add(sys._getframe(1).f_code.co_name)
            return register(this, *args, **kwargs)

        if register is not None:
            manager.register_group = register_group

        def may_serve(name: str) -> bool:
            known = name in self.by_manager or any(n == name and f in self.ran for n, f in self.conditional)
            if self.tp == 1 and known:
                self.served.add(name)
                return True
            return False

        def group(this: Any, name: str) -> Any:
            try:
                found = get_group(this, name)
            except KeyError:
                if not may_serve(name):
                    raise UnregisteredGroup(name) from None
                return dist.group.WORLD
            return found

        def rank(this: Any, name: str) -> Any:
            try:
                found = get_rank(this, name)
            except KeyError:
                if not may_serve(name):
                    raise UnregisteredGroup(name) from None
                found = 0
            if self.by_manager and this._groups.get(name) is None and found != dist.get_rank():
                # the whole world is the group, and the manager takes that for rank 0 everywhere: a defect of the
                # tree, not of the model; the run goes on with the true rank and the report says so
                self.corrected.add(name)
                found = dist.get_rank()
            self.ranks[name] = int(found)
            return found

        def group_name(this: Any, name: str) -> Any:
            assert get_name is not None
            try:
                return get_name(this, name)
            except KeyError:
                if not may_serve(name):
                    raise
                return name

        manager.get_group, manager.get_rank = group, rank
        if get_name is not None:
            manager.get_group_name = group_name
