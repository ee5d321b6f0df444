"""Communication groups, registered by the models that need them."""

import torch.distributed as dist

from executor.core.config.inference_config import PlatformVersion
from executor.utils.hccl_utils import build_group, get_default_group, get_group_name


class CommManager:
    """Groups by name. Only `default_pg` exists from the start; a group one rank has to itself is None, its rank 0."""

    def __init__(self, parallel_config, platform_version=PlatformVersion.A3):
        self.config = parallel_config
        self.platform_version = PlatformVersion.from_value(platform_version)
        self._groups = {"default_pg": get_default_group()}
        self._group_names = {}
        self._ranks = {}

    def register_group(
        self,
        name,
        group_num=None,
        group_size=None,
        group_stride=1,
        start_ranks=None,
        subgroups=None,
        hccl_buffer_size=None,
        group_type=None,
        return_name=False,
        allow_physical_reuse=True,
        platform_version=None,
    ):
        """Create a group once; a second registration of the same name returns the first group.

        Either `subgroups` lists all ranks of all subgroups, or `group_num` subgroups of `group_size` ranks are made,
        `group_stride` apart. Every rank must call this with the same arguments.
        """
        if name in self._groups:
            return self._groups[name]
        if subgroups is None:
            if group_num is None or group_size is None:
                raise ValueError(f"{name}: give subgroups, or group_num and group_size")
            if group_num * group_size != self.config.world_size:
                raise ValueError(f"{name}: {group_num} * {group_size} is not world_size={self.config.world_size}")
            starts = start_ranks or [
                index * group_size if group_stride == 1 else index for index in range(group_num)
            ]
            subgroups = [[start + i * group_stride for i in range(group_size)] for start in starts]
        for ranks in subgroups:
            if not ranks or list(ranks) != sorted(ranks) or not 0 <= ranks[0] <= ranks[-1] < self.config.world_size:
                raise ValueError(f"{name}: {ranks} is not an ascending list of ranks")
        alone = all(len(ranks) == 1 for ranks in subgroups)
        group = None if alone else build_group(subgroups, self.config.global_rank)
        self._groups[name] = group
        self._ranks[name] = 0 if group is None else dist.get_rank(group)
        if return_name:
            self._group_names[name] = get_group_name(group, self.config.global_rank)
        return group

    def get_group(self, name):
        if name not in self._groups:
            raise KeyError(f"no communication group {name!r} was registered; there are {sorted(self._groups)}")
        return self._groups[name]

    def get_rank(self, group_name):
        if group_name not in self._ranks:
            raise KeyError(f"no communication group {group_name!r} was registered; there are {sorted(self._ranks)}")
        return self._ranks[group_name]

    def has_group(self, name):
        return name in self._groups

    def get_group_name(self, name):
        if name not in self._group_names:
            raise KeyError(f"group {name!r} has no device name; there are {sorted(self._group_names)}")
        return self._group_names[name]
