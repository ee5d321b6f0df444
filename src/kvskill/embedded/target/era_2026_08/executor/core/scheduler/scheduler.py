"""The scheduler of this API version: long prompts are rejected on arrival, a step says whether it ran."""

from executor.core.requests import SamplingParams
from executor.core.scheduler.queueing import QueueingScheduler


class Scheduler(QueueingScheduler):
    """Queues prompts and runs them through an engine."""

    def __init__(self, tokenizer, config=None, input_truncated_len=None):
        super().__init__(tokenizer, config, input_truncated_len)

    def add_request(self, prompt, request_id=None, sampling_params=None, input_ids=None):
        """Queue a prompt, tokenized already if `input_ids` is given; returns its id."""
        params = sampling_params or SamplingParams(max_tokens=self.config.max_new_tokens)
        request = self.new_request(prompt, request_id, input_ids, params)
        self.prepare_prompt(request, self.input_truncated_len)
        if self.reject_long_prompt(request):
            self.waiting_queue.pop()
        return request.request_id

    def prepare_prompt(self, request, limit):
        super().prepare_prompt(request, self.input_truncated_len)

    def run_step(self, engine, phase=None):
        """One batch. True if one ran. `phase` is for separated prefill and decode: not offered here."""
        if phase is not None:
            raise ValueError("this example framework runs prefill and decode in one process")
        return self.step(engine)[0] is not None

    def pop_finished_request(self, request_id):
        return self.finished_requests.pop(request_id, None)
