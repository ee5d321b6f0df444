"""Process groups. One process needs none; several use whatever backend torch.distributed was started with."""

import torch.distributed as dist


def get_default_group():
    """The default process group, or None when torch.distributed was not started."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def get_group_name(group, global_rank):
    """Name by which device operators address a group; None without a group."""
    return None if group is None else getattr(group, "group_name", str(global_rank))


def build_group(subgroups, global_rank):
    """Create every subgroup on every rank (a collective) and return the one that holds `global_rank`."""
    if get_default_group() is None:
        return None
    mine = None
    for ranks in subgroups:
        group = dist.new_group(ranks)
        if global_rank in ranks:
            mine = group
    return mine
