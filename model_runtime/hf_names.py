"""What some architectures' files call tensors that have another name here: replacements by architecture."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_REPLACEMENTS: Mapping[str, tuple[tuple[str, str], ...]] = MappingProxyType(
    {
        # Published files have the first name for layers with experts only, `transformers` writes it for all.
        "KimiLinearForCausalLM": (
            (".block_sparse_moe.", ".mlp."),
            (".w1.weight", ".gate_proj.weight"),
            (".w2.weight", ".down_proj.weight"),
            (".w3.weight", ".up_proj.weight"),
        ),
    }
)


def canonical_name(architecture: str, stored_name: str) -> str:
    """The name under which a model of the architecture asks for a stored tensor."""
    name = stored_name
    for found, wanted in _REPLACEMENTS.get(architecture, ()):
        name = name.replace(found, wanted)
    return name
