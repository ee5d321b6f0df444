"""What every loader offers."""

from abc import ABC, abstractmethod


class BaseModelLoader(ABC):
    """Builds a model and fills its parameters."""

    @abstractmethod
    def load_model(self, *, config, model_cls, runner_settings, **kwargs):
        """A model in eval mode."""
