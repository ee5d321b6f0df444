"""Communication groups on a CPU host: gloo, and only what the code itself registered.

Some code asks for a group at world size 1, where the framework creates none: then a one-process gloo group
serves, provided that the model's source registers a group of that name (or, before models registered their own,
that the framework's manager can create it). A name that nobody registers is a KeyError, as in the field.
"""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

__all__ = ["Groups"]


class Groups:
    """Installs the substitutions; `served` lists the names that the one-process group stood in for."""

    def __init__(self, job: dict[str, Any], result: dict[str, Any]) -> None:
        self.job, self.result = job, result
        self.served: set[str] = set()
        self.ranks: dict[str, int] = {}
        self.tp = int(job["tp"])
        self.declared = set(job["group_names"])

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
            self.declared |= set(names)
        self._patch_manager(manager, dist)
        hccl: Any = importlib.import_module("executor.utils.hccl_utils")
        if hasattr(hccl, "get_group_name"):
            hccl.get_group_name = lambda group, rank: "gloo"
            module.get_group_name = hccl.get_group_name

    def _patch_distributed(self, dist: Any) -> None:
        new_group, init = dist.new_group, dist.init_process_group

        def gloo_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
            return new_group(ranks=ranks, backend="gloo")

        def gloo_init(*args: Any, **kwargs: Any) -> None:
            if not dist.is_initialized():
                store = f"file://{self.job['rendezvous']}"
                init("gloo", init_method=store, world_size=self.tp, rank=int(self.job["rank"]))

        dist.new_group, dist.init_process_group = gloo_group, gloo_init

    def _patch_manager(self, manager: Any, dist: Any) -> None:
        get_group, get_rank = manager.get_group, manager.get_rank
        get_name = getattr(manager, "get_group_name", None)

        def may_serve(name: str) -> bool:
            if self.tp == 1 and name in self.declared:
                self.served.add(name)
                return True
            return False

        def group(this: Any, name: str) -> Any:
            try:
                found = get_group(this, name)
            except KeyError:
                if not may_serve(name):
                    raise
                return dist.group.WORLD
            return found

        def rank(this: Any, name: str) -> Any:
            try:
                found = get_rank(this, name)
            except KeyError:
                if not may_serve(name):
                    raise
                found = 0
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
