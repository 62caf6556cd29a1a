"""One module per architecture of `transformers`: its config.json to a ModelConfig."""
