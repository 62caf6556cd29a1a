"""What the kinds of layers add to a ModelConfig, one module per kind."""
