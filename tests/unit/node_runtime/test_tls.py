"""Mutual TLS between nodes: who gets in, what each role may call, and certificates that are replaced."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import grpc
import pytest
from pdmesh.v1 import decode_pb2, mesh_pb2, mesh_pb2_grpc, prefill_pb2
from support.certificates import DOMAIN, MeshAuthority

from node_runtime.config import NodeConfig, load_config
from node_runtime.errors import BadConfig, NodeError, PeerUnavailable
from node_runtime.rpc import Channel, ChannelPool, TlsFiles, TlsTransport, connect, status_of, transport_for
from tests.unit.node_runtime.probe_service import Probe, ScriptedDecode, ScriptedPrefill, serving, two_responses

MAX_BYTES = 1 << 20


async def no_handoff(requests: object, context: object) -> AsyncIterator[object]:
    return
    yield


@asynccontextmanager
async def secured(authority: MeshAuthority, role: str = "prefill") -> AsyncIterator[Probe]:
    config = NodeConfig(node_id="probe", **authority.settings(role))
    async with serving(
        config=config, decode=ScriptedDecode(two_responses), prefill=ScriptedPrefill(no_handoff)
    ) as probe:
        yield probe


def dial(authority: MeshAuthority, role: str, address: str) -> Channel:
    certificate, key = authority.issue(role)
    files = TlsFiles(authority=authority.path, certificate=certificate, key=key)
    return connect(address, max_message_bytes=MAX_BYTES, transport=TlsTransport(files, server_name=DOMAIN))


async def outcome_of(channel: Channel, method: str) -> str:
    """OK or the name of the status."""
    probe = Probe(server=None, channel=channel, address="", drains=[])  # type: ignore[arg-type]
    calls = {
        "Bootstrap": lambda: channel.unary(probe.prefill.Bootstrap, prefill_pb2.BootstrapRequest(), timeout_s=10),
        "Generate": lambda: _drained(channel, probe),
        "Follow": lambda: _first_update(channel, probe),
        "GetNodeStatus": lambda: channel.unary(probe.node.GetNodeStatus, mesh_pb2.GetNodeStatusRequest(), timeout_s=10),
        "ClearCache": lambda: channel.unary(probe.node.ClearCache, mesh_pb2.ClearCacheRequest(), timeout_s=10),
    }
    try:
        await calls[method]()
    except NodeError as error:
        return status_of(error).name
    return "OK"


async def _drained(channel: Channel, probe: Probe) -> None:
    async for _ in channel.server_stream(probe.decode.Generate, decode_pb2.DecodeRequest(), timeout_s=10):
        pass


async def _first_update(channel: Channel, probe: Probe) -> None:
    updates = channel.server_stream(probe.node.Follow, mesh_pb2.FollowRequest(), timeout_s=10)
    async with aclosing(updates):
        async for _ in updates:
            return


MAY_CALL = {
    "router": {"Generate", "GetNodeStatus", "Follow"},
    "decode": {"Bootstrap", "GetNodeStatus"},
    "prefill": {"GetNodeStatus"},
    "operator": {"GetNodeStatus", "Follow", "ClearCache"},
    "client": set(),
}


@pytest.mark.parametrize("role", MAY_CALL)
async def test_a_certificate_opens_what_its_role_is_for_and_nothing_else(tmp_path: Path, role: str) -> None:
    authority = MeshAuthority(tmp_path)
    async with secured(authority) as probe:
        channel = dial(authority, role, probe.address)
        outcomes = {
            method: await outcome_of(channel, method)
            for method in ("Bootstrap", "Generate", "GetNodeStatus", "Follow", "ClearCache")
        }
        await channel.close()
    refused = {method for method, outcome in outcomes.items() if outcome == "PERMISSION_DENIED"}
    assert {method for method, outcome in outcomes.items() if outcome == "OK"} == MAY_CALL[role]
    assert refused == outcomes.keys() - MAY_CALL[role]


async def test_a_refusal_says_who_may_call(tmp_path: Path) -> None:
    authority = MeshAuthority(tmp_path)
    async with secured(authority) as probe:
        channel = dial(authority, "prefill", probe.address)
        with pytest.raises(NodeError, match=r"ClearCache is for operator; the certificate shown is of prefill"):
            await channel.unary(
                channel.stub(mesh_pb2_grpc.NodeStub).ClearCache, mesh_pb2.ClearCacheRequest(), timeout_s=10
            )
        await channel.close()


async def test_strangers_do_not_get_in(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    other.mkdir()
    authority, stranger = MeshAuthority(own), MeshAuthority(other)
    certificate, key = stranger.issue("operator")
    async with secured(authority) as probe:
        in_the_open = connect(probe.address, max_message_bytes=MAX_BYTES)
        without_certificate = connect(
            probe.address,
            max_message_bytes=MAX_BYTES,
            transport=TlsTransport(TlsFiles(authority=authority.path), server_name=DOMAIN),
        )
        of_another_authority = connect(
            probe.address,
            max_message_bytes=MAX_BYTES,
            transport=TlsTransport(
                TlsFiles(authority=authority.path, certificate=certificate, key=key), server_name=DOMAIN
            ),
        )
        for channel in (in_the_open, without_certificate, of_another_authority):
            assert await outcome_of(channel, "GetNodeStatus") == "UNAVAILABLE"
            await channel.close()


async def test_a_server_of_another_mesh_is_not_talked_to(tmp_path: Path) -> None:
    authority = MeshAuthority(tmp_path)
    certificate, key = authority.issue("router")
    files = TlsFiles(authority=authority.path, certificate=certificate, key=key)
    async with secured(authority) as probe:
        transport = TlsTransport(files, server_name="another.mesh")
        channel = connect(probe.address, max_message_bytes=MAX_BYTES, transport=transport)
        with pytest.raises(PeerUnavailable):
            await channel.unary(
                channel.stub(mesh_pb2_grpc.NodeStub).GetNodeStatus, mesh_pb2.GetNodeStatusRequest(), timeout_s=10
            )
        await channel.close()


async def test_replaced_certificates_are_used_for_new_connections_and_old_calls_go_on(tmp_path: Path) -> None:
    authority = MeshAuthority(tmp_path)
    config = NodeConfig(node_id="caller", **authority.settings("router"))
    released = asyncio.Event()

    async def until_released(
        request: decode_pb2.DecodeRequest, context: object
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        yield decode_pb2.DecodeResponse()
        await released.wait()
        yield decode_pb2.DecodeResponse()

    server_config = NodeConfig(node_id="probe", **authority.settings("decode"))
    async with serving(config=server_config, decode=ScriptedDecode(until_released)) as probe:
        pool = ChannelPool(max_message_bytes=MAX_BYTES, transport=transport_for(config))
        old = pool.get(probe.address)
        stub = Probe(server=probe.server, channel=old, address="", drains=[]).decode
        stream = old.server_stream(stub.Generate, decode_pb2.DecodeRequest(), timeout_s=30)
        await anext(stream)
        # Every file is another one now, that of the authority included: nothing old would be accepted.
        renewed = MeshAuthority(tmp_path)
        renewed.issue("router")
        renewed.issue("decode")
        fresh = pool.get(probe.address)
        assert fresh is not old
        assert await outcome_of(fresh, "GetNodeStatus") == "OK"
        released.set()
        assert [response async for response in stream] == [decode_pb2.DecodeResponse()]
        await pool.close()


async def test_certificates_that_are_gone_or_half_written_leave_the_old_ones_in_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    authority = MeshAuthority(tmp_path)

    async def answers(probe: Probe) -> bool:
        """In a handshake of its own: who is connected notices nothing."""
        channel = dial(authority, "router", probe.address)
        outcome = await outcome_of(channel, "GetNodeStatus")
        await channel.close()
        return outcome == "OK"

    async with secured(authority) as probe:
        certificate, key = tmp_path / "prefill.pem", tmp_path / "prefill.key"
        old_key = key.read_bytes()
        authority.issue("prefill")
        renewed, new_key = certificate.read_bytes(), key.read_bytes()
        key.write_bytes(old_key)
        certificate.unlink()
        assert await answers(probe)
        # The last one is whole, and its key is still to come.
        for content in (b"", renewed[: len(renewed) // 2], renewed):
            certificate.write_bytes(content)
            assert await answers(probe)
        caplog.clear()
        key.write_bytes(new_key)
        assert await answers(probe)
        assert "certificates were read again" in caplog.text


@pytest.mark.parametrize("missing", ["tls_cert", "tls_key", "tls_ca"])
def test_the_files_go_together(tmp_path: Path, missing: str) -> None:
    values = {key: value for key, value in MeshAuthority(tmp_path).settings("decode").items() if key != missing}
    with pytest.raises(BadConfig, match="tls_cert, tls_key and tls_ca go together"):
        load_config(NodeConfig, values)


async def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    settings = MeshAuthority(tmp_path).settings("decode") | {"tls_ca": str(tmp_path / "none.pem")}
    with pytest.raises(BadConfig, match=r"tls: cannot read .*none\.pem"):
        transport_for(NodeConfig(node_id="probe", **settings))


async def test_health_answers_everybody_who_may_connect(tmp_path: Path) -> None:
    authority = MeshAuthority(tmp_path)
    async with secured(authority) as probe:
        certificate, key = authority.issue("client")
        credentials = grpc.ssl_channel_credentials(
            authority.path.read_bytes(), key.read_bytes(), certificate.read_bytes()
        )
        options = (("grpc.ssl_target_name_override", DOMAIN),)
        async with grpc.aio.secure_channel(probe.address, credentials, options=options) as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            assert await check(b"", timeout=10) is not None
