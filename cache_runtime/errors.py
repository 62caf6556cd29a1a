"""Every failure the cache runtime raises, by kind.

Knows nothing about RPC: the node maps each class to a status. Configuration errors are raised before anything is
allocated; the others mean that a caller or the scheduler broke a contract, and leave arena bytes untouched.
"""

from __future__ import annotations


class CacheError(Exception):
    """Base of every cache runtime failure."""


class CacheConfigError(CacheError, ValueError):
    """A spec, recipe, plan or kernel page size that cannot work; names the field and both values."""


class ArenaAllocationError(CacheError, MemoryError):
    """The device cannot provide the arena the plan asks for; names the bytes wanted and available."""


class UnknownDeviceError(CacheError, ValueError):
    """A device that this machine or this torch does not have; names it and what there is."""


class UnknownGroupError(CacheError, LookupError):
    """A group id that the bound plan never published."""


class UnknownFieldError(CacheError, LookupError):
    """A field id that the bound plan never published."""


class BlockIdError(CacheError, ValueError):
    """A CacheBlock id outside its group's range; raised before any byte changes."""


class BatchContractError(CacheError, ValueError):
    """A forward batch whose tables and spans contradict each other or the contract."""


class UnboundLayerError(CacheError, RuntimeError):
    """A layer's cache group was read before binding, or bound twice to different groups."""
