"""The pool of cache blocks of one manager. Block 0 is the null block: it is never handed out."""

from collections import deque


class BlockPool:
    """Free list of block ids 1 .. num_blocks-1; id 0 fills tables and takes the writes of idle rows."""

    def __init__(self, num_blocks, block_size):
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least the null block, got num_blocks={num_blocks}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._null_block = 0
        self._free_block_queue = deque(range(1, num_blocks))
        self._free_block_set = set(self._free_block_queue)

    def get_num_free_blocks(self):
        return len(self._free_block_queue)

    def get_null_block(self):
        return self._null_block

    def get_block(self, block_id):
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"block {block_id} is outside the pool of {self.num_blocks}")
        return block_id

    def get_new_blocks(self, num_blocks):
        """Take blocks from the front of the queue; all or nothing."""
        if num_blocks < 0:
            raise ValueError(f"cannot allocate {num_blocks} blocks")
        if num_blocks > len(self._free_block_queue):
            raise ValueError(f"{num_blocks} blocks wanted, {len(self._free_block_queue)} free")
        taken = [self._free_block_queue.popleft() for _ in range(num_blocks)]
        self._free_block_set.difference_update(taken)
        return taken

    def free_blocks(self, blocks):
        """Give blocks back; the null block is skipped, a block given back twice is an error."""
        for block_id in blocks:
            if self.get_block(block_id) == self._null_block:
                continue
            if block_id in self._free_block_set:
                raise ValueError(f"block {block_id} was freed twice")
            self._free_block_queue.append(block_id)
            self._free_block_set.add(block_id)
