"""Communication groups, created by the framework before any model is built."""

import torch.distributed as dist

from executor.utils.hccl_utils import build_group, get_default_group, get_group_name


class CommManager:
    """Groups by name. A group that one rank has to itself is None, its rank 0."""

    def __init__(self, parallel_config):
        self.config = parallel_config
        self._groups = {}
        self._group_names = {}
        self._ranks = {}

    def initialize(self):
        """Create the groups of every parallel dimension in use; call it after init_process_group."""
        config = self.config
        for name, size in (
            ("attn_tp_group", config.attn_tp_size),
            ("embed_tp_group", config.embed_tp_size),
            ("lmhead_tp_group", config.lmhead_tp_size),
        ):
            self._create(name, self._neighbours(size))
        for name, size in (
            ("moe_tp_group", config.moe_tp_size),
            ("dense_tp_group", config.dense_tp_size),
            ("o_proj_tp_group", config.o_proj_tp_size),
        ):
            if size > 1:
                self._create(name, self._neighbours(size))
        if config.moe_ep_size > 1:
            stride = config.world_size // config.moe_ep_size
            self._create(
                "moe_ep_group", [list(range(first, config.world_size, stride)) for first in range(stride)]
            )
            self._group_names["moe_ep_group"] = get_group_name(self._groups["moe_ep_group"], config.global_rank)
        self._groups["default_pg"] = get_default_group()

    def _neighbours(self, size):
        return [list(range(first, first + size)) for first in range(0, self.config.world_size, size)]

    def _create(self, name, subgroups):
        alone = all(len(ranks) == 1 for ranks in subgroups)
        group = None if alone else build_group(subgroups, self.config.global_rank)
        self._groups[name] = group
        self._ranks[name] = 0 if group is None else dist.get_rank(group)

    def get_group(self, name):
        if name not in self._groups:
            raise KeyError(f"no communication group {name!r}; there are {sorted(self._groups)}")
        return self._groups[name]

    def get_rank(self, group_name):
        if group_name not in self._ranks:
            raise KeyError(f"no communication group {group_name!r}; there are {sorted(self._ranks)}")
        return self._ranks[group_name]

    def has_group(self, name):
        return name in self._groups

    def get_group_name(self, name):
        if name not in self._group_names:
            raise KeyError(f"group {name!r} has no device name; there are {sorted(self._group_names)}")
        return self._group_names[name]
