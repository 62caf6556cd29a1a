"""Opens the data planes that a node's configuration asks for, or those that its machine allows.

Knows no model and no peer. A plane that was asked for by name must start; of several, those that can.
"""

from __future__ import annotations

import logging
from pathlib import Path

from cache_runtime.transfer import create_engine
from cache_runtime.transfer.engine import DataPlaneError, TransferEngine
from cache_runtime.transfer.plane_set import PlaneSet
from cache_runtime.transfer.shm_engine import host_id
from cache_runtime.transfer.stream_tls import TlsFiles
from node_runtime.config import ComputeNodeConfig

_log = logging.getLogger(__name__)

AUTO = "auto"
# Nodes of older releases know no other.
_MOONCAKE = "mooncake"


def open_planes(config: ComputeNodeConfig) -> PlaneSet:
    """Raises DataPlaneError naming what is missing."""
    if config.data_plane != AUTO:
        return PlaneSet((_open(config, config.data_plane),), host_id=host_id())
    engines: list[TransferEngine] = []
    for name in _automatic(config):
        try:
            engines.append(_open(config, name))
        except DataPlaneError as error:
            if name == _MOONCAKE and config.transfer_protocol == "rdma":
                # It was asked for, if not by the name of the plane.
                raise
            _log.info("data plane %s is not offered: %s", name, error)
    if not engines:
        raise DataPlaneError("no data plane can be started on this machine; the log says why")
    return PlaneSet(engines, host_id=host_id())


def known_to_older_releases(planes: PlaneSet) -> TransferEngine:
    """The plane that the manifest names for peers that do not read its list."""
    return planes.find(_MOONCAKE) or planes.engines[0]


def _automatic(config: ComputeNodeConfig) -> tuple[str, ...]:
    # Whoever wants encryption does not want an open port beside it, unless RDMA was asked for.
    is_encrypted = tls_of(config) is not None and config.transfer_protocol != "rdma"
    return ("shm", "stream") if is_encrypted else ("shm", "stream", _MOONCAKE)


def tls_of(config: ComputeNodeConfig) -> TlsFiles | None:
    """What the stream plane of a node is encrypted with; None: it is not.

    Files of its own name hosts. Those of the node's calls name roles: they write who are prefill nodes of the mesh.
    """
    if config.data_plane_tls_cert:
        return TlsFiles(
            certificate=Path(config.data_plane_tls_cert),
            key=Path(config.data_plane_tls_key),
            authority=Path(config.data_plane_tls_ca),
        )
    if not config.tls_cert or config.data_plane_tls == "off":
        return None
    return TlsFiles(
        certificate=Path(config.tls_cert),
        key=Path(config.tls_key),
        authority=Path(config.tls_ca),
        receiver_name=config.tls_domain,
        writer_name=f"prefill.{config.tls_domain}",
    )


def _open(config: ComputeNodeConfig, name: str) -> TransferEngine:
    return create_engine(
        name,
        host=config.advertised_host(),
        bind_host=config.host,
        port=config.data_plane_port,
        protocol=config.transfer_protocol,
        device=config.rdma_device,
        tls=tls_of(config),
    )
