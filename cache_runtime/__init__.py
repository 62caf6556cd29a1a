"""The cache subsystem between models and the native scheduler: layers -> group -> pack -> bind, the arena, the mapping.

Importing this package imports neither torch nor numpy; `cache_runtime.recipes.spec` and `cache_runtime.recipes.plan`
stay torch-free because a plan travels to peers that may hold no tensors.
"""
