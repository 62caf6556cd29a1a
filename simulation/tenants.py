"""The tenants of simulated routers: whose they are is told by `tenants.yaml`, which routers read as well."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias

TENANTS_FILE: Final = Path(__file__).with_name("tenants.yaml")
ROOMY: Final = "roomy"
OPERATOR: Final = "operator"
# How many requests the others may have running.
LIMITS: Mapping[str, int] = MappingProxyType({"narrow": 1})


Credentials: TypeAlias = tuple[tuple[str, str], ...]
"""Metadata that a client sends."""
_BEARER: Final = "Bearer "
_SUFFIX: Final = " token"


def credentials_of(tenant: str) -> Credentials:
    """None for the empty name."""
    return (("authorization", f"{_BEARER}{tenant}{_SUFFIX}"),) if tenant else ()


def tenant_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Whose credentials these are; empty where there are none."""
    shown = dict(metadata).get("authorization", "")
    return shown.removeprefix(_BEARER).removesuffix(_SUFFIX) if isinstance(shown, str) else ""


def extra_keys_of(tenant: str) -> tuple[bytes, ...]:
    """What makes the cached prefixes of a tenant its own."""
    return (tenant.encode(),) if tenant else ()
