"""Queues and padded batches."""

from collections import deque

from executor.core.config import SchedulerConfig
from executor.core.types_.types import Batch, Request, StepOutput


class Scheduler:
    """Prefill first, in mini-batches; decode when nothing waits."""

    def __init__(self, tokenizer, config=None):
        self.config = config or SchedulerConfig()
        self.tokenizer = tokenizer
        self.waiting_queue = deque()
        self.running_requests = {}
        self.finished_requests = {}
        self._request_counter = 0
        self._batch_counter = 0

    def add_request(self, prompt):
        """Queue a prompt; returns its id."""
        request = Request(request_id=self._request_counter, prompt=prompt)
        self._request_counter += 1
        self.waiting_queue.append(request)
        return request.request_id

    def run_step(self, engine):
        """One batch. None when nothing could run."""
        batch = self._schedule_batch()
        if batch is None:
            return None
        output = engine.forward_batch(batch)
        return StepOutput(next_tokens=output["next_tokens"], finished_requests=self._process_batch_output(batch))

    def _schedule_batch(self):
        if self.waiting_queue:
            return self._schedule_prefill_batch()
        return self._schedule_decode_batch() if self.running_requests else None

    def _schedule_prefill_batch(self):
        mini = self.config.prefill_mini_batch
        cycle_idx = len(self.running_requests) // mini
        chosen = []
        while self.waiting_queue and len(chosen) < mini:
            request = self.waiting_queue.popleft()
            if request.input_ids.numel() == 0:
                request.input_ids = self.tokenizer(
                    request.prompt,
                    return_tensors="pt",
                    truncation=True,
                    padding="max_length",
                    max_length=self.config.input_max_len,
                    return_attention_mask=False,
                ).input_ids[0]
            chosen.append(request)
        return Batch(requests=chosen, is_prefill=True, cycle_idx=cycle_idx)

    def _schedule_decode_batch(self):
        running = list(self.running_requests.values())[: self.config.batch_size_per_dp_rank]
        return Batch(requests=running, is_prefill=False)

    def _process_batch_output(self, batch):
        finished = []
        for request in batch.requests:
            if batch.is_prefill:
                request.is_prefill_done = True
                self.running_requests[request.request_id] = request
                continue
            request.decode_step_count += 1
            if request.decode_step_count >= self.config.max_new_tokens:
                request.is_finished = True
                request.finish_reason = "length"
                del self.running_requests[request.request_id]
                self.finished_requests[request.request_id] = request
                finished.append(request.request_id)
        return finished

    def has_work(self):
        return bool(self.waiting_queue or self.running_requests)

    def get_finished_request(self, request_id):
        return self.finished_requests.get(request_id)

    def get_all_finished_requests(self):
        return list(self.finished_requests.values())

    def reset(self):
        """Forget every request."""
        self.waiting_queue.clear()
        self.running_requests.clear()
        self.finished_requests.clear()
        self._request_counter = 0
        self._batch_counter = 0
