"""Moves cache blocks between nodes: manifests, the run planner and the data planes.

Importing this package loads neither torch nor Mooncake; `create_engine` imports the plane that is asked for.
"""

from __future__ import annotations

from .engine import DataPlaneUnavailable, TransferEngine
from .memory_engine import MemoryEngine, MemoryFabric
from .shm_engine import open_shm_engine
from .stream_engine import open_stream_engine
from .stream_tls import TlsFiles

DATA_PLANES = ("shm", "stream", "mooncake", "memory")

__all__ = ["DATA_PLANES", "create_engine"]


def create_engine(
    name: str,
    *,
    host: str = "127.0.0.1",
    bind_host: str = "",
    port: int = 0,
    protocol: str = "tcp",
    device: str = "",
    tls: TlsFiles | None = None,
    fabric: MemoryFabric | None = None,
) -> TransferEngine:
    """Starts the data plane `name` of this process.

    Args:
        name: One of `DATA_PLANES`.
        host: Address peers reach this node at; part of the engine's endpoint. For "stream" and "mooncake".
        bind_host: Address to listen on, for "stream"; empty: all interfaces.
        port: TCP port, for "stream"; 0 takes a free one.
        protocol: "tcp", "rdma" or "auto" (rdma where there is a device), for "mooncake".
        device: RDMA device name, for "mooncake" over "rdma"; empty selects any.
        tls: Certificates of this node and of the mesh, for "stream"; None: no encryption.
        fabric: What connects the engines of a process, for "memory"; None makes an engine without peers.

    Raises:
        DataPlaneUnavailable: unknown name, or the machine or environment does not allow it.
        MissingDataPlane: its package or a shared library is not installed; the message says how to install it.
    """
    if name == "memory":
        return MemoryEngine(fabric if fabric is not None else MemoryFabric())
    if name == "mooncake":
        from .mooncake_engine import MooncakeEngine

        return MooncakeEngine(host, protocol=protocol, device=device)
    if name == "shm":
        return open_shm_engine()
    if name == "stream":
        return open_stream_engine(host, bind_host=bind_host, port=port, tls=tls)
    raise DataPlaneUnavailable(f'data plane "{name}" is unknown; choose one of {", ".join(DATA_PLANES)}')
