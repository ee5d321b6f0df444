"""Models by name, imported when asked for: (model class, [draft model class,] configuration class)."""

import importlib

_specs: dict[str, list[tuple[str, str]]] = {
}


def load_model_classes(name):
    """The classes of a model. Raises ValueError for an unknown name."""
    if name not in _specs:
        raise ValueError(f"unknown model {name!r}; there are {sorted(_specs)}")
    return tuple(getattr(importlib.import_module(module), attribute) for module, attribute in _specs[name])
