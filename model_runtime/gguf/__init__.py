"""Models in GGUF files: the directory of the file, its quantised tensors, and what the llama architecture stores."""
