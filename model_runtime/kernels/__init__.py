"""Kernels by device: the native CPU module `_native` and the torch reference it is measured against."""
