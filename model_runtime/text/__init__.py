"""Text in, tokens out, and back: what a router needs of a model, without the model."""
