"""RPC plumbing: the only package that imports grpc, and OpenTelemetry in its telemetry and metrics modules."""

from __future__ import annotations

import os

# gRPC's core writes its own diagnostics to standard error unless this is set before it is loaded; what matters of them
# reaches us as statuses and exceptions.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from node_runtime.address import format_address, parse_address
from node_runtime.rpc.access import ANYBODY, Caller, Credentials, MeshAccess, only_reads
from node_runtime.rpc.channel import Channel, ChannelPool, DuplexCall, connect
from node_runtime.rpc.context import RpcContext
from node_runtime.rpc.deadlines import deadline_within, remaining_s
from node_runtime.rpc.errors import STATUS_BY_ERROR, code_number, error_from_code, error_from_rpc, status_of
from node_runtime.rpc.health import watch_health
from node_runtime.rpc.metrics import Counter, Histogram, Metrics
from node_runtime.rpc.node_service import NodeReporter, NodeService
from node_runtime.rpc.phases import PhaseRecorder
from node_runtime.rpc.server import RpcServer
from node_runtime.rpc.status_metrics import StatusMetrics
from node_runtime.rpc.telemetry import (
    Span,
    SpanKind,
    Telemetry,
    TraceContext,
    current_context,
    current_trace_id,
    rpc_metadata,
)
from node_runtime.rpc.tls import TlsFiles, TlsTransport, tls_files_of, transport_for
from node_runtime.rpc.transport import SocketTransport, Transport

__all__ = [
    "ANYBODY",
    "STATUS_BY_ERROR",
    "Caller",
    "Channel",
    "ChannelPool",
    "Counter",
    "Credentials",
    "DuplexCall",
    "Histogram",
    "MeshAccess",
    "Metrics",
    "NodeReporter",
    "NodeService",
    "PhaseRecorder",
    "RpcContext",
    "RpcServer",
    "SocketTransport",
    "Span",
    "SpanKind",
    "StatusMetrics",
    "Telemetry",
    "TlsFiles",
    "TlsTransport",
    "TraceContext",
    "Transport",
    "code_number",
    "connect",
    "current_context",
    "current_trace_id",
    "deadline_within",
    "error_from_code",
    "error_from_rpc",
    "format_address",
    "only_reads",
    "parse_address",
    "remaining_s",
    "rpc_metadata",
    "status_of",
    "tls_files_of",
    "transport_for",
    "watch_health",
]
