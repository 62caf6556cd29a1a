"""Ports that are known before somebody listens on them."""

from __future__ import annotations

import socket

import pytest

from node_runtime.config import NodeConfig
from node_runtime.rpc import RpcServer
from pdmesh_cli.ports import PortTaken, check_port_free, reserved_ports


async def test_a_server_can_listen_on_a_port_that_is_reserved() -> None:
    with reserved_ports("127.0.0.1", 1) as (port,):
        server = RpcServer(NodeConfig(port=port))
        assert await server.start() == port
        await server.stop(grace_s=0)


def test_reserved_ports_differ_and_are_given_to_nobody_else() -> None:
    with reserved_ports("127.0.0.1", 8) as ports:
        assert len(set(ports)) == 8
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", ports[0]))


def test_a_port_that_somebody_listens_on_is_in_use_and_free_afterwards() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PortTaken, match=f"127.0.0.1:{port}: the port is already in use"):
            check_port_free("127.0.0.1", port, option="--port")
    check_port_free("127.0.0.1", port, option="--port")
