"""One module per model family: which tensors it needs, how it caches, how it is built."""
