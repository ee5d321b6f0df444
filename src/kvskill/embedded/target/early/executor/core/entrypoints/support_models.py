"""Models by name: (model class, [draft model class,] configuration class)."""

model_dict = {}
