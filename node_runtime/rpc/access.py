"""Who may call what: what a caller shows, who that makes it, and what each method demands.

Knows certificates and methods of the mesh; tokens of clients are the router's (`router_node.tenants`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

from node_runtime.errors import PermissionDenied

OPERATOR: Final = "operator"
_READING: Final = frozenset(("router", "prefill", "decode", "fused", OPERATOR))
# Who sends spans and metrics, where a router receives them.
_NODES: Final = frozenset(("router", "prefill", "decode", "fused"))
_METHODS_FOR_READING: Final = (
    "/pdmesh.v1.Node/GetNodeInfo",
    "/pdmesh.v1.Node/GetNodeStatus",
    "/pdmesh.v1.Traces/ListRequests",
    "/pdmesh.v1.Traces/GetTrace",
    "/pdmesh.v1.Traces/FollowRequests",
)
# Tells more than how a node is: which prompts it has cached.
_METHOD_FOR_ROUTERS: Final = "/pdmesh.v1.Node/Follow"
# What gateways of other projects call in the place of a router.
ENGINE_PROTOCOL: Final = "tokenspeed.grpc.scheduler.TokenSpeedScheduler"
# By service; what is not listed is for operators alone.
_ROLES_BY_SERVICE: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "pdmesh.v1.Prefill": frozenset(("decode",)),
        "pdmesh.v1.Decode": frozenset(("router",)),
        ENGINE_PROTOCOL: frozenset(("gateway",)),
        "opentelemetry.proto.collector.trace.v1.TraceService": _NODES,
        "opentelemetry.proto.collector.metrics.v1.MetricsService": _NODES,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who calls, as far as that is known. `tenant` is empty where clients are not told apart."""

    tenant: str = ""


ANYBODY: Final = Caller()


class Credentials(Protocol):
    """What a caller shows. Read lazily: most calls show nothing that anybody looks at."""

    @property
    def authorization(self) -> str:
        """The header of that name; empty without one."""
        ...

    @property
    def certificate_names(self) -> frozenset[str]:
        """DNS names of the verified certificate; empty without one."""
        ...


class AccessPolicy(Protocol):
    """Decides about every call of a server but those of gRPC's own services."""

    def admit(self, method: str, credentials: Credentials) -> Caller:
        """`method` is "/package.Service/Method". Raises Unauthenticated or PermissionDenied."""
        ...


class OpenAccess:
    """Everybody may call everything: inside a trusted network."""

    __slots__ = ()

    def admit(self, method: str, credentials: Credentials) -> Caller:
        return ANYBODY


class MeshAccess:
    """Callers may do what the role in their certificate is for."""

    __slots__ = ("_domain",)

    def __init__(self, domain: str) -> None:
        """`domain` is that of the mesh: role R is the DNS name R.domain."""
        self._domain = domain

    def admit(self, method: str, credentials: Credentials) -> Caller:
        needed = roles_for(method)
        shown = self.roles_of(credentials)
        if not needed & shown:
            found = _listed(shown) or "no role of the mesh"
            raise PermissionDenied(f"{method} is for {_listed(needed)}; the certificate shown is of {found}")
        return ANYBODY

    def roles_of(self, credentials: Credentials) -> frozenset[str]:
        """Roles that the certificate names."""
        suffix = f".{self._domain}"
        return frozenset(name.removesuffix(suffix) for name in credentials.certificate_names if name.endswith(suffix))


def roles_for(method: str) -> frozenset[str]:
    """Roles that may call `method`."""
    if method in _METHODS_FOR_READING:
        return _READING
    if method == _METHOD_FOR_ROUTERS:
        return frozenset(("router", OPERATOR))
    service = method.removeprefix("/").partition("/")[0]
    return _ROLES_BY_SERVICE.get(service, frozenset((OPERATOR,)))


def only_reads(method: str) -> bool:
    """Whether `method` asks a node about itself, or about what it did, and changes nothing."""
    return method in _METHODS_FOR_READING


def _listed(roles: frozenset[str]) -> str:
    return " or ".join(sorted(roles))
