"""The data-plane interface: what an engine that moves cache bytes to a peer must offer, and how it may fail.

It knows addresses and lengths. It does not know blocks, fields, requests or handoffs: the planner turns those into
runs, and the handoff session decides when a run may be posted. The node's composition root owns the one engine of a
process; whoever opens a peer link owns that link.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from ._native import digest_spans

# Longest run posted as one unit. A plane only reports progress per run, so a longer one could not be told from a
# stalled one inside the progress timeout.
MAX_RUN_BYTES = 8 << 20
# Every write names the grant that it belongs to; a receiver that places the bytes itself looks it up.
KEY_BYTES = 16
NO_KEY = bytes(KEY_BYTES)
# End of the addresses that are accepted: sums and products below it cannot wrap in int64, and no user memory is above.
MAX_ADDRESS = 1 << 62


class Run(NamedTuple):
    """One contiguous copy: `length_bytes` from a local address to an address in the peer's memory.

    A named tuple, not a dataclass: a long prompt makes thousands of them and they cost a third this way. Values are
    checked where they enter an engine, by `RegionSet.rejection`.
    """

    source_address: int
    target_address: int
    length_bytes: int


# The kind of digest (`checksums`) that every machine can take.
XXH3 = "xxh3"

# int64[num_spans, 2]: addresses [begin, end) of memory in this process.
Spans: TypeAlias = npt.NDArray[np.int64]
NO_SPANS: Spans = np.empty((0, 2), dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A range of memory `[base_address, base_address + num_bytes)` in one process."""

    base_address: int
    num_bytes: int

    def __post_init__(self) -> None:
        if self.base_address <= 0 or self.num_bytes <= 0:
            raise ValueError(
                f"region base_address={self.base_address} num_bytes={self.num_bytes}: both must be positive"
            )
        if self.base_address + self.num_bytes > MAX_ADDRESS:
            raise ValueError(f"region base_address={self.base_address:#x} num_bytes={self.num_bytes} ends above 2**62")

    @property
    def end_address(self) -> int:
        return self.base_address + self.num_bytes

    def contains(self, other: Region) -> bool:
        return self.base_address <= other.base_address and other.end_address <= self.end_address

    def overlaps(self, other: Region) -> bool:
        return self.base_address < other.end_address and other.base_address < self.end_address

    def __str__(self) -> str:
        return f"[{self.base_address:#x}, {self.end_address:#x})"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferReport:
    """What one write moved. Times are seconds of the clock the engine was given.

    `digests`: 8 bytes for each block that the write was to hash (`checksums`), in the order in which they were given.
    """

    num_bytes: int
    num_runs: int
    posted_at_s: float
    landed_at_s: float
    digests: bytes = b""


class PlaneKind(enum.Enum):
    """Who places the bytes, hence how a receiver can revoke a grant."""

    # The writer addresses the peer's memory; the receiver cannot revoke, so freed blocks must sit out the drain bound.
    ONE_SIDED = "one_sided"
    # The receiver copies the bytes into place and can drop what is no longer granted.
    TWO_SIDED = "two_sided"


class DataPlaneError(Exception):
    """The data plane of this node cannot be set up; nothing was started."""


class MissingDataPlane(DataPlaneError):
    """The package or a shared library the data plane needs is not installed."""


class DataPlaneUnavailable(DataPlaneError):
    """The machine or the environment does not allow the data plane that was asked for."""


class TransferError(Exception):
    """A write or a peer failed. `peer` is the endpoint concerned; the message starts with it.

    Unless it is a `LinkWedged`, nothing of the failed write is outstanding any more when this is raised.
    """

    # Whether the peer and the link to it are as good as before.
    spares_peer: ClassVar[bool] = False

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"{peer}: {reason}")
        self.peer = peer
        self.reason = reason

    def again(self, progress: str = "") -> Self:
        """A fresh error of the same reason, for one object must not be raised in two places.

        `progress` says how far the write got that it ends.
        """
        return type(self)(self.peer, f"{self.reason}; {progress}" if progress else self.reason)


class PeerUnreachable(TransferError):
    """The peer does not answer at its advertised endpoint, or something else answers there."""


class TransferRejected(TransferError):
    """The write was refused before a byte was sent: a run lies outside the memory it may touch."""


class TransferRefused(TransferError):
    """The receiver dropped runs that it had not granted at that instant. The link is sound and goes on."""

    spares_peer = True


class TransferTimeout(TransferError):
    """A write waited longer than it may for more of it to be posted; the rest was never sent."""

    spares_peer = True


class LinkCrowded(TransferTimeout):
    """Nothing of the write was sent: those ahead of it took longer than it may wait for its turn."""


class TransferRevoked(TransferError):
    """The writer gave the write up before every run was posted; the rest was never sent."""

    spares_peer = True


class TransferFailed(TransferError):
    """The plane reported that bytes were not delivered."""


class LinkWedged(TransferError):
    """Posted runs never ended: bytes may still land, so the blocks on both sides must stay quarantined."""


class EngineClosed(TransferError):
    """The engine or link was closed, or belongs to the parent of a forked process."""


def always_wanted() -> bool:
    return True


class PeerLink(Protocol):
    """The way to write into one incarnation of one peer. Thread-safe."""

    @property
    def peer(self) -> str:
        """Endpoint of the peer."""
        ...

    @property
    def hashes(self) -> bool:
        """Whether `write` can hash what it sends, while the processor has it at hand for sending anyway."""
        ...

    def write(
        self,
        runs: Sequence[Run],
        *,
        key: bytes = NO_KEY,
        timeout_s: float,
        is_wanted: Callable[[], bool] = always_wanted,
        hashed: Spans = NO_SPANS,
        digest_kind: str = XXH3,
    ) -> Future[TransferReport]:
        """Posts `runs` and returns at once; at most `timeout_s` pass until one is posted, and until one more is.

        A write waits for its turn, and is not hurried while it gets on: those before it on the link come first. One
        whose turn does not come in time ends in `LinkCrowded`, and the link goes on.

        `key`, of `KEY_BYTES` bytes, names the permit under which the peer allowed the targets; a one-sided plane has no
        use for it. Runs that no permit holds when they arrive are dropped there; the write ends in `TransferRefused`.

        A plane whose posts wait for room asks `is_wanted`, on any thread, before it posts more: once it says no, the
        rest is never sent. It must not block.

        `hashed`: blocks of the sources, each inside of one run, whose digests, of `digest_kind`, the report will have.
        For links that say that they hash; others leave them out.

        Sources must lie in regions registered with the engine (before the link was opened, where memory is shared),
        targets in the regions the link was opened for; both stay untouched by anyone else until the future is done. The
        future ends only when every posted run is terminal, on a thread of the engine: with a report when all of them
        landed, else with a `TransferError`.
        It cannot be cancelled. A failed link stays failed: later writes end at once with the same reason.
        """
        ...

    def close(self) -> None:
        """Refuses further writes. Never blocks; writes under way still end as `write` says."""
        ...


class Permit(Protocol):
    """Memory that a writer may fill, until it is revoked."""

    def revoke(self) -> None:
        """After it returned nothing lands under this permit any more, where the receiver places the bytes.

        Idempotent. Waits for a copy of at most 1 MiB, never for a peer.
        """
        ...

    def digests(self, blocks: Spans, kind: str) -> bytes:
        """8 bytes per block (`checksums`): what it holds now. Also after `revoke`.

        Those that were allowed as a span of its own, and hashed as `kind` when they arrived, are not read again. Raises
        ValueError for a kind that this CPU cannot take.
        """
        ...


class StandingPermit:
    """`Permit` of a one-sided plane: it hinders no writer, so there is nothing to revoke."""

    def revoke(self) -> None:
        return None

    def digests(self, blocks: Spans, kind: str) -> bytes:
        return digest_spans(blocks, kind)


class TransferEngine(Protocol):
    """One data plane of this process: receives into registered memory, writes through peer links. Thread-safe."""

    @property
    def name(self) -> str:
        """Name by which manifests select the plane, e.g. "mooncake"."""
        ...

    @property
    def kind(self) -> PlaneKind: ...

    @property
    def protocol(self) -> str:
        """What its connections speak, e.g. "tcp", "rdma" or "tls"; both ends must speak the same."""
        ...

    @property
    def drain_bound_s(self) -> float:
        """How long after its writer stopped posting (or died) a write may still land, in seconds."""
        ...

    @property
    def endpoint(self) -> str:
        """Where peers reach this engine, as put into the placement manifest."""
        ...

    @property
    def num_refused_runs(self) -> int:
        """Runs that arrived here and were dropped because no live permit held them; none on a one-sided plane."""
        ...

    def register(self, base_address: int, num_bytes: int, *, shared_descriptor: int | None = None) -> None:
        """Makes this memory part of the data plane: links read from it, peers write into it as the plane's kind says.

        `shared_descriptor` is that of the file that holds it from its first byte on, if there is one: a plane that
        shares memory reads from no other. The caller keeps both until the process exits. Raises `ValueError` for an
        empty, wrapping or overlapping range, `EngineClosed`, and `DataPlaneError` when the plane refuses the memory.
        """
        ...

    def allow(self, key: bytes, spans: Spans, *, hashed_as: str | None = None) -> Permit:
        """Lets the writer that names `key` fill `spans` of registered memory, from now until the permit is revoked.

        With `hashed_as`, a kind of digest, a plane that places the bytes hashes each span as it arrives, for
        `Permit.digests`.

        On a two-sided plane nothing else lands anywhere; a one-sided one cannot tell and permits everything. Raises
        `ValueError` for a key that has a live permit or is not `KEY_BYTES` long, and for spans that are empty or
        outside of registered memory, and `EngineClosed`.
        """
        ...

    def open_peer(self, endpoint: str, regions: Sequence[Region]) -> PeerLink:
        """Proves that the peer answers at `endpoint` and exposes `regions`, the only memory the link may write to.

        Blocks for about 2 s at most. Raises `PeerUnreachable`, `TransferRejected` (a region is not exposed),
        `EngineClosed`, or `ValueError` when `regions` is empty or two of them overlap.
        """
        ...

    def close(self) -> None:
        """Stops receiving and posting. Never blocks; writes under way still end as `PeerLink.write` says."""
        ...


def failed_write(error: TransferError) -> Future[TransferReport]:
    """What `PeerLink.write` returns when nothing was posted: a future that already ended with `error`."""
    future: Future[TransferReport] = Future()
    future.set_running_or_notify_cancel()
    future.set_exception(error)
    return future
