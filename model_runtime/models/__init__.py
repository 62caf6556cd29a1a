"""One module per model family."""
