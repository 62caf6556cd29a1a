"""gRPC channel arguments, in one place because both ends must agree on keepalive and sizes.

Source: grpc/doc/keepalive.md for the pings; a server answers pings that come too often by closing the connection.
"""

from __future__ import annotations

from typing import Final

_KEEPALIVE_TIME_MS: Final = 5_000
_KEEPALIVE_TIMEOUT_MS: Final = 3_000
# Below the clients' interval, or the server would take their pings for abuse.
_MIN_PING_INTERVAL_MS: Final = 2_000
_MAX_METADATA_BYTES: Final = 16 * 1024
_RECONNECT_BACKOFF_MS: Final = (100, 1_000)

CONNECT_TIMEOUT_S: Final = 3.0
# How long a peer may go on before it notices that a connection broke without a word.
PEER_NOTICE_BOUND_S: Final = (_KEEPALIVE_TIME_MS + _KEEPALIVE_TIMEOUT_MS) / 1000

Options = tuple[tuple[str, int], ...]


def server_options(max_message_bytes: int) -> Options:
    """Arguments of a server."""
    return (
        *_shared_options(max_message_bytes),
        # A second process on the same port must fail, not silently take half of the connections.
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
    )


def channel_options(max_message_bytes: int) -> Options:
    """Arguments of a client's channel."""
    return (
        *_shared_options(max_message_bytes),
        # Nodes talk to nodes: a proxy that the environment names for the outside world is not for them.
        ("grpc.enable_http_proxy", 0),
        # gRPC takes this as the time one connection attempt may last.
        ("grpc.min_reconnect_backoff_ms", round(CONNECT_TIMEOUT_S * 1000)),
        ("grpc.initial_reconnect_backoff_ms", _RECONNECT_BACKOFF_MS[0]),
        ("grpc.max_reconnect_backoff_ms", _RECONNECT_BACKOFF_MS[1]),
        # Every pool dials for itself, so that closing one never touches another's connection.
        ("grpc.use_local_subchannel_pool", 1),
    )


def _shared_options(max_message_bytes: int) -> Options:
    return (
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.keepalive_time_ms", _KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        # The wait for the answer to a ping; the keepalive timeout alone does not shorten its default of a minute.
        ("grpc.http2.ping_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
        # An idle connection costs nothing; a dead peer matters only while a call waits for it.
        ("grpc.keepalive_permit_without_calls", 0),
    )
