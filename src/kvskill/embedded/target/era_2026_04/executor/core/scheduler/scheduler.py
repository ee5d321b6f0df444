"""The scheduler of this API version: prompts only, a StepOutput per step."""

from executor.core.requests import StepOutput
from executor.core.scheduler.queueing import QueueingScheduler


class Scheduler(QueueingScheduler):
    """Queues prompts and runs them through an engine."""

    def __init__(self, tokenizer, config=None):
        super().__init__(tokenizer, config)

    def add_request(self, prompt):
        """Queue a prompt; returns its id."""
        return self.new_request(prompt).request_id

    def run_step(self, engine):
        """One batch. None when nothing could run."""
        batch, output, finished = self.step(engine)
        if batch is None:
            return None
        return StepOutput(next_tokens=output["next_tokens"], finished_requests=finished)

    def get_finished_request(self, request_id):
        return self.finished_requests.get(request_id)

    def get_all_finished_requests(self):
        return list(self.finished_requests.values())
