"""Queues and batches, shared by every API version."""

import logging
from collections import deque

from executor.core.config import SchedulerConfig
from executor.core.requests import Batch, Request

logger = logging.getLogger(__name__)


class QueueingScheduler:
    """Prefill first, in arrival order and up to a token budget; decode when nothing waits."""

    def __init__(self, tokenizer, config=None, input_truncated_len=None):
        self.config = config or SchedulerConfig()
        self.tokenizer = tokenizer
        self.input_truncated_len = input_truncated_len
        self.mode = "offline"
        self.waiting_queue = deque()
        self.running_requests = {}
        self.finished_requests = {}
        self.prefilled_request_count = 0
        self._request_counter = 0
        self._batch_counter = 0

    def tokenize_request(self, prompt, input_truncated_len=None):
        """1-D token ids of a string or of a list of chat messages."""
        if isinstance(prompt, list):
            if not prompt or not isinstance(prompt[0], dict):
                raise ValueError("a prompt is a string or a non-empty list of chat messages")
            prompt = self.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        limits = {} if input_truncated_len is None else {"truncation": True, "max_length": input_truncated_len}
        return self.tokenizer(prompt, return_tensors="pt", **limits).input_ids[0]

    def new_request(self, prompt, request_id=None, input_ids=None, sampling_params=None):
        """Build and queue a request; returns it."""
        if request_id is None:
            request_id = self._request_counter
        self._request_counter += 1
        request = Request(request_id=request_id, prompt=prompt, sampling_params=sampling_params)
        if input_ids is not None:
            request.input_ids = input_ids
            request.prompt_tokens = input_ids.numel()
        self.waiting_queue.append(request)
        return request

    def prepare_prompt(self, request, limit):
        """Tokenize once."""
        if request.input_ids.numel() == 0:
            request.input_ids = self.tokenize_request(request.prompt, limit)
            request.prompt_tokens = int(request.input_ids.numel())

    def reject_long_prompt(self, request):
        """Finish a prompt that no prefill can hold; True when that happened."""
        if request.prompt_tokens <= self.config.max_prefill_tokens:
            return False
        request.is_finished = True
        request.finish_reason = "prompt_too_long"
        self.finished_requests[request.request_id] = request
        logger.warning("request %s: prompt of %s tokens dropped", request.request_id, request.prompt_tokens)
        return True

    def step(self, engine):
        """Run the next batch. Returns (batch or None, engine output, ids finished)."""
        batch = self._schedule_batch(engine)
        if batch is None or batch.is_empty():
            return None, {}, []
        output = engine.forward_batch(batch)
        return batch, output, self.after_batch(batch, engine.kvcache_manager)

    def _schedule_batch(self, engine):
        batch = self._schedule_prefill_batch(engine) if self.waiting_queue else None
        if batch is None and self.running_requests:
            batch = self._schedule_decode_batch(engine)
        return batch

    def _schedule_prefill_batch(self, engine):
        chosen, tokens = [], 0
        while self.waiting_queue:
            request = self.waiting_queue[0]
            self.prepare_prompt(request, engine.input_truncated_len)
            if self.reject_long_prompt(request):
                self.waiting_queue.popleft()
                continue
            if chosen and tokens + request.prompt_tokens > self.config.max_prefill_tokens:
                break
            if engine.kvcache_manager and not engine.kvcache_manager.allocate_slots(
                request.request_id, request.computed_len, request.prompt_tokens
            ):
                break
            chosen.append(self.waiting_queue.popleft())
            tokens += request.prompt_tokens
        if not chosen:
            return None
        return Batch(requests=chosen, is_prefill=True, request_offset=self.prefilled_request_count)

    def _schedule_decode_batch(self, engine):
        running = list(self.running_requests.values())[: self.config.batch_size_per_dp_rank]
        chosen = []
        for request in running:
            if engine.kvcache_manager and not engine.kvcache_manager.allocate_slots(
                request.request_id,
                computed_tokens=request.computed_len + 1,
                num_new_tokens=1 + engine.next_n,
                lookahead_tokens=max(engine.next_n - 1, 0),
            ):
                break
            chosen.append(request)
        return Batch(requests=chosen, is_prefill=False)

    def after_batch(self, batch, kv_cache_manager):
        """Move requests on; returns the ids that finished."""
        finished = []
        for request in batch.requests:
            if batch.is_prefill:
                request.is_prefill_done = True
                self.running_requests[request.request_id] = request
                self.prefilled_request_count += 1
                continue
            request.decode_step_count += 1
            self._mark_valid_output(request)
            if request.decode_step_count >= self.config.max_new_tokens:
                request.is_finished = True
                request.finish_reason = request.finish_reason or "length"
                del self.running_requests[request.request_id]
                self.finished_requests[request.request_id] = request
                if kv_cache_manager:
                    kv_cache_manager.free(request.request_id)
                finished.append(request.request_id)
        return finished

    def _mark_valid_output(self, request):
        """Offline runs a fixed number of steps; what counts ends at EOS or at max_new_tokens."""
        if request.stop_valid_generation:
            return
        tokens = request.output_id_list
        eos = getattr(self.tokenizer, "eos_token_id", None)
        ends = [self.config.max_new_tokens] if len(tokens) >= self.config.max_new_tokens else []
        if eos is not None and eos in tokens:
            ends.append(tokens.index(eos) + 1)
        if ends:
            request.stop_valid_generation = True
            request.valid_output_len = min(ends)

    def has_work(self):
        return bool(self.waiting_queue or self.running_requests)

    def reset(self):
        """Forget every request. Blocks of unfinished requests are not freed: finish them first."""
        self.waiting_queue.clear()
        self.running_requests.clear()
        self.finished_requests.clear()
        self.prefilled_request_count = 0
        self._request_counter = 0
        self._batch_counter = 0

    def get_stats(self):
        counts = {
            "pending": len(self.waiting_queue),
            "running": len(self.running_requests),
            "finished": len(self.finished_requests),
        }
        return {**counts, "total": sum(counts.values())}
