"""Every failure of loading or configuring a model. Knows nothing about RPC: the node maps each class to a status."""

from __future__ import annotations


class ModelError(Exception):
    """Base of the failures raised by model_runtime."""


class CheckpointError(ModelError):
    """A model file that is missing, corrupt, incomplete or of an unknown kind; names the tensor or key and both values.

    Raised before any weight or cache memory is allocated.
    """


class UnsupportedWeightsError(ModelError):
    """Weights asked to stay quantised that the file or the kernels do not have so; names the tensor and its kind."""


class RankGroupError(ModelError, RuntimeError):
    """Another rank of the same model is gone, silent, or carries out another plan; names this rank and their number."""


class UnsupportedRanksError(ModelError, ValueError):
    """A model whose layers do not share out over so many tensor ranks; names the field and both values."""


class UnsupportedDtypeError(ModelError, ValueError):
    """A compute dtype for which the device has no kernels; names the dtype and those it has."""


class AdapterError(ModelError):
    """An adapter that is missing, corrupt, or asks for what is not computed here; names it, and the key or tensor.

    Raised when a node starts, never by a request.
    """
