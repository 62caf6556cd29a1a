"""Tenants of a router: the tokens they are known by and what each may use.

The file is read again when it is replaced; one that is wrong leaves the old tenants in place, and says so. It holds
digests of tokens, so that reading it does not let anybody in. Lives on the router's event loop.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from node_runtime.clock import Clock
from node_runtime.config import load_config
from node_runtime.errors import BadConfig, PermissionDenied, QueueFull, Unauthenticated
from node_runtime.rpc import ANYBODY, Caller, Credentials, MeshAccess, only_reads

_INFERENCE: Final = "/pdmesh.v1.Inference/"
_BEARER: Final = "bearer "
_MAX_TOKEN_BYTES: Final = 4096
_S_PER_MINUTE: Final = 60.0

_log = logging.getLogger("pdmesh.tenants")

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Tenant(BaseModel):
    """One who may call. Its name is part of the cache's keys: no tenant hits what another one computed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Name
    token_sha256: tuple[Digest, ...] = Field(min_length=1, max_length=16)
    max_live_requests: int | None = Field(default=None, ge=1)
    requests_per_minute: float | None = Field(default=None, gt=0)
    is_operator: bool = False


class _TenantsFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    tenants: tuple[Tenant, ...] = Field(min_length=1, max_length=10_000)


class Tenants:
    """Who the tokens belong to, and what each tenant uses at this moment."""

    def __init__(self, path: Path, clock: Clock) -> None:
        """Raises BadConfig."""
        self._path = path
        self._clock = clock
        self._by_digest: Mapping[str, Tenant] = {}
        self._by_name: Mapping[str, Tenant] = {}
        self._num_live: Counter[str] = Counter()
        # By tenant: requests that may begin now, and when that was true.
        self._allowances: dict[str, tuple[float, float]] = {}
        self._stamp = self._stamp_now()
        self._read()

    def named(self, token: str) -> Tenant | None:
        """Whose token it is."""
        self._read_again()
        if len(token) > _MAX_TOKEN_BYTES:
            return None
        return self._by_digest.get(hashlib.sha256(token.encode()).hexdigest())

    @contextmanager
    def using(self, name: str, num_samples: int = 1) -> Iterator[None]:
        """One request of a tenant runs inside the block; each of its samples counts as one. Raises QueueFull; a tenant
        that is gone has no limits.
        """
        tenant = self._by_name.get(name)
        if tenant is not None:
            self._check_live(tenant, num_samples)
            self._take_from_rate(tenant, num_samples)
        self._num_live[name] += num_samples
        try:
            yield
        finally:
            self._num_live[name] -= num_samples

    def _check_live(self, tenant: Tenant, num_samples: int) -> None:
        limit, num_live = tenant.max_live_requests, self._num_live[tenant.name]
        if limit is not None and num_live + num_samples > limit:
            raise QueueFull(
                f"max_live_requests: tenant {tenant.name} already has {num_live} requests running, and {num_samples} "
                f"more exceed {limit}"
            )

    def _take_from_rate(self, tenant: Tenant, num_samples: int) -> None:
        """A bucket that holds one minute's requests, all of which one with more samples than that takes.

        Source: token bucket, as in RFC 2697.
        """
        rate = tenant.requests_per_minute
        if rate is None:
            return
        burst, now_s = max(1.0, rate), self._clock.now_s()
        allowance, at_s = self._allowances.get(tenant.name, (burst, now_s))
        allowance = min(burst, allowance + (now_s - at_s) * rate / _S_PER_MINUTE)
        cost = min(float(num_samples), burst)
        self._allowances[tenant.name] = (allowance - cost if allowance >= cost else allowance, now_s)
        if allowance < cost:
            error = QueueFull(f"requests_per_minute: tenant {tenant.name} may begin {rate:g} requests per minute")
            error.retry_after_s = (cost - allowance) * _S_PER_MINUTE / rate
            raise error

    def _read_again(self) -> None:
        try:
            stamp = self._stamp_now()
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._read()
            _log.info("%d tenants were read again from %s", len(self._by_name), self._path)
        except BadConfig as error:
            _log.error("the old tenants stay: %s", error)

    def _stamp_now(self) -> tuple[int, int]:
        try:
            status = self._path.stat()
        except OSError as error:
            raise BadConfig(f"tenants: cannot read {self._path}: {error.strerror}") from None
        return status.st_mtime_ns, status.st_ino

    def _read(self) -> None:
        try:
            values = yaml.safe_load(self._path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            # The text of a YAML error quotes the file.
            raise BadConfig(f"tenants: cannot read {self._path}: {type(error).__name__}") from None
        if not isinstance(values, Mapping):
            raise BadConfig(f"tenants: {self._path} must hold a mapping with the key tenants")
        tenants = load_config(_TenantsFile, {str(key): value for key, value in values.items()}).tenants
        by_digest = {digest: tenant for tenant in tenants for digest in tenant.token_sha256}
        by_name = {tenant.name: tenant for tenant in tenants}
        if len(by_name) < len(tenants):
            raise BadConfig("tenants: a name appears more than once")
        if len(by_digest) < sum(len(tenant.token_sha256) for tenant in tenants):
            raise BadConfig("tenants: a token appears more than once")
        self._by_digest, self._by_name = by_digest, by_name


class RouterAccess:
    """Clients of Inference show a token where there are tenants; what changes the router is for operators.

    An operator is a tenant that is one, or a certificate of that role. Where neither tokens nor certificates are used
    everybody may call everything.
    """

    def __init__(self, tenants: Tenants | None, mesh: MeshAccess | None) -> None:
        """`mesh` is None without TLS."""
        self._tenants = tenants
        self._mesh = mesh

    def admit(self, method: str, credentials: Credentials) -> Caller:
        if method.startswith(_INFERENCE):
            return ANYBODY if self._tenants is None else self._client(self._tenants, credentials)
        if self._tenants is None and (self._mesh is None or only_reads(method)):
            return ANYBODY
        if self._tenants is not None and credentials.authorization:
            return self._operator(self._tenants, method, credentials)
        if self._mesh is not None:
            return self._mesh.admit(method, credentials)
        raise Unauthenticated(f"{method} needs the token of an operator: authorization: Bearer TOKEN")

    def _client(self, tenants: Tenants, credentials: Credentials) -> Caller:
        return Caller(tenant=self._tenant(tenants, credentials).name)

    def _operator(self, tenants: Tenants, method: str, credentials: Credentials) -> Caller:
        tenant = self._tenant(tenants, credentials)
        if not tenant.is_operator:
            raise PermissionDenied(f"{method} is for operators, which tenant {tenant.name} is not")
        return Caller(tenant=tenant.name)

    def _tenant(self, tenants: Tenants, credentials: Credentials) -> Tenant:
        shown = credentials.authorization
        if shown[: len(_BEARER)].lower() != _BEARER:
            raise Unauthenticated("a token is required: authorization: Bearer TOKEN")
        tenant = tenants.named(shown[len(_BEARER) :].strip())
        if tenant is None:
            raise Unauthenticated("the token is not known here")
        return tenant
