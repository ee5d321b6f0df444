"""The scheduler of this API version: ready token ids are accepted, a StepOutput per step."""

from executor.core.requests import SamplingParams, StepOutput
from executor.core.scheduler.queueing import QueueingScheduler


class Scheduler(QueueingScheduler):
    """Queues prompts and runs them through an engine."""

    def __init__(self, tokenizer, config=None, input_truncated_len=None):
        super().__init__(tokenizer, config, input_truncated_len)
        self.last_added_request = None

    def add_request(self, prompt, request_id=None, sampling_params=None, input_ids=None):
        """Queue a prompt, tokenized already if `input_ids` is given; returns its id."""
        params = sampling_params or SamplingParams(max_tokens=self.config.max_new_tokens)
        self.last_added_request = self.new_request(prompt, request_id, input_ids, params)
        return self.last_added_request.request_id

    def prepare_prompt(self, request, limit):
        super().prepare_prompt(request, self.input_truncated_len)

    def run_step(self, engine, phase=None):
        """One batch. None when nothing could run. `phase` is for separated prefill and decode: not offered here."""
        if phase is not None:
            raise ValueError("this example framework runs prefill and decode in one process")
        batch, output, finished = self.step(engine)
        if batch is None:
            return None
        return StepOutput(next_tokens=output["next_tokens"], finished_requests=finished)

    def get_finished_request(self, request_id):
        return self.finished_requests.get(request_id)

    def get_all_finished_requests(self):
        return list(self.finished_requests.values())
