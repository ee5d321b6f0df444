"""All managers of one worker, asked together."""


class CacheCoordinator:
    """Allocates for a request in every group or in none."""

    def __init__(self, max_model_len, single_type_managers):
        self.max_model_len = max_model_len
        self.single_type_managers = tuple(single_type_managers)
        self.num_attn_types = len({manager.attn_type for manager in self.single_type_managers})

    def allocate_slots(self, request_id, computed_tokens, num_new_tokens, lookahead_tokens=0, reserved_tokens=0):
        """Room for the next tokens; False when some pool has none (nothing was allocated then)."""
        if num_new_tokens < 0:
            raise ValueError(f"cannot add {num_new_tokens} tokens")
        computed = min(computed_tokens, self.max_model_len)
        wanted = min(computed_tokens + num_new_tokens + lookahead_tokens, self.max_model_len)
        plan = []
        for manager in self.single_type_managers:
            manager.remove_skipped_blocks(request_id, computed)
            missing, possible = manager.pre_allocate_blocks(request_id, wanted, reserved_tokens)
            if not possible:
                return False
            plan.append((manager, missing))
        for manager, missing in plan:
            manager.allocate_new_blocks(request_id, missing, wanted)
        return True

    def get_block_ids(self, request_id):
        """Block ids of a request by group key."""
        return {manager.manager_key: manager.get_blocks(request_id) for manager in self.single_type_managers}

    def free(self, request_id):
        """Release a request in every group."""
        for manager in self.single_type_managers:
            manager.free(request_id)
