"""Small helpers of the example framework."""

from executor.utils.common_utils import align_up, ceil_div, read_yaml
from executor.utils.hccl_utils import get_default_group, get_group_name

__all__ = ["align_up", "ceil_div", "get_default_group", "get_group_name", "read_yaml"]
