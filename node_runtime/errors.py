"""The operating errors of a node, ours and a peer's.

Torch-free and gRPC-free: services and sessions raise these, `node_runtime.rpc.errors` alone knows which status each
one becomes. The text of an error is shown to clients, so it names fields, limits, nodes and addresses, never internals.
"""

from __future__ import annotations

from collections.abc import Iterable


class NodeError(Exception):
    """Base of every operating error. Never raised itself: the status table has no row for it."""

    retry_after_s: float | None = None
    """After how many seconds the same call may succeed; None where the node cannot say or waiting does not help."""

    @property
    def message(self) -> str:
        """Text for the client and the log."""
        return str(self)


class InvalidRequest(NodeError):
    """A field of a request breaks a documented rule; the message names field and limit."""


class ContextExceeded(InvalidRequest):
    """Prompt and completion are longer than the model's context."""


class Unauthenticated(NodeError):
    """The caller did not show who it is, or what it showed is not known here."""


class PermissionDenied(NodeError):
    """The caller is known and may not do this; the message says who may."""


class UnknownModel(NodeError):
    """The model or adapter asked for is not served here; the message names what is."""


class AdapterNotHere(NodeError):
    """A peer counts on an adapter that this node does not have, or has another one under its name."""


class UnknownTrace(NodeError):
    """No trace of that name is held here, or not any more."""


class TracesNotKept(NodeError):
    """Traces were asked for where none are kept."""


class DuplicateRequest(NodeError):
    """A live request of this node has the same request_id."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f'request_id "{request_id}" is already live on this node')
        self.request_id = request_id


class IncompatiblePeer(NodeError):
    """The logical manifests of two nodes differ. The message lists every difference with both values."""

    def __init__(self, peer: str, differences: Iterable[str]) -> None:
        self.peer = peer
        self.differences = tuple(differences)
        super().__init__(f"the caches of this node and {peer} do not fit together: " + "; ".join(self.differences))


class NotBootstrapped(NodeError):
    """A handoff names an incarnation that this node never bootstrapped with, or one that is gone."""


class NoPrefillNode(NodeError):
    """A decode node that cannot prefill itself was given no prefill address."""


class NoPrefillNodeReady(NodeError):
    """None of the prefill nodes that a decode node could choose is ready, and it computes no prompts itself."""

    retry_after_s = 1.0


class NodeBusy(NodeError):
    """An operation that needs an idle node met live requests or transfers; nothing was changed."""


class QueueFull(NodeError):
    """The bounded waiting queue has no place left."""

    retry_after_s = 1.0


class RequestTooLarge(NodeError):
    """The request can never fit this node's arena, however long it waits."""


class NoMemoryInTime(NodeError):
    """This node had no memory for a request while its prefill node could wait for it."""

    retry_after_s = 1.0


class PeerUnavailable(NodeError):
    """A peer cannot be reached, or it went away during a call."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"node at {address} is unavailable: {reason}")
        self.address = address
        self.reason = reason


class PeerDraining(PeerUnavailable):
    """A node is about to leave: it refused work, or cut off what outlived its grace period. Others may take it at once.

    `node_id` names the node that drains, which need not be the one that was called.
    """

    def __init__(self, address: str, reason: str, *, node_id: str) -> None:
        super().__init__(address, reason)
        self.node_id = node_id


class NodeDraining(NodeError):
    """This node finishes what it has and accepts nothing new."""

    retry_after_s = 1.0

    def __init__(self, node_id: str, message: str) -> None:
        super().__init__(message)
        self.node_id = node_id


class NodeBroken(NodeError):
    """A process that this node is made of is gone, and the node with it. Other nodes may take the request at once."""


class EngineStalled(NodeError):
    """The engine of this node stands still: nothing that it has is served, and nothing new is taken."""

    def __init__(self, node_id: str) -> None:
        super().__init__(f"the engine of node {node_id} stands still")


class TransferBroken(NodeError):
    """The data plane failed to move the cache of a request."""


class LinkBusy(NodeError):
    """The way to a peer was taken by other transfers for longer than one may wait for it. Nothing is wrong with it."""

    retry_after_s = 1.0


class DeadlineExceeded(NodeError):
    """The deadline of a call passed before its work was done."""


class RequestCancelled(NodeError):
    """The caller gave up."""


class NoUsableLogits(NodeError):
    """The model knows no next token for a request: its weights, the adapter or what was asked for are to blame. Another
    node would know none either.
    """


class RemoteError(NodeError):
    """A peer's own status, passed on unchanged.

    `code_name` is the canonical gRPC name, e.g. "FAILED_PRECONDITION".
    """

    def __init__(self, code_name: str, message: str, *, address: str = "") -> None:
        super().__init__(message)
        self.code_name = code_name
        self.address = address


class PrefillFailed(RemoteError):
    """The prefill node at `address` is to blame for the failure of a request; the decode node that says so is well."""


class PrefillDraining(PrefillFailed):
    """The prefill node at `address` is about to leave, and refused a prompt or cut it off. Nobody is to blame: others
    may take it at once.
    """

    def __init__(self, message: str, *, address: str, node_id: str) -> None:
        super().__init__("UNAVAILABLE", message, address=address)
        self.node_id = node_id


class BadConfig(NodeError):
    """A configuration value is wrong; the message names the key."""


class PortInUse(NodeError):
    """Another process listens on the address that was configured."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(f"cannot listen on {host}:{port}: the port is already in use")
        self.host = host
        self.port = port


class InternalError(NodeError):
    """A defect of this node. The message tells the client no more than where to look."""
