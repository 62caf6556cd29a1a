"""The Mooncake data plane: `TransferEngine` over the native library, wrapped so that its faults become exceptions.

The only module that imports `mooncake`. What the wrapper adds, and why, is said where it is done; in short the native
library hangs on first contact with a stopped peer, wedges when its queue overflows, goes on writing after an error,
crashes on misuse, and reports every failure as -1.

Security: the native data plane has no authentication and listens on all interfaces; keep it inside a trusted network.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from .engine import (
    NO_KEY,
    NO_SPANS,
    XXH3,
    DataPlaneError,
    DataPlaneUnavailable,
    EngineClosed,
    MissingDataPlane,
    PeerUnreachable,
    PlaneKind,
    Region,
    Run,
    Spans,
    StandingPermit,
    TransferError,
    TransferRejected,
    TransferReport,
    always_wanted,
    failed_write,
)
from .native_log import silenced_native_log
from .poller import Poller, PostedWrite, SendingLink
from .preflight import describe_peer
from .regions import RegionSet, check_permit, open_regions, rejection

OPEN_TIMEOUT_S = 2.0
PROTOCOLS = ("tcp", "rdma")
_RDMA_DEVICES = Path("/sys/class/infiniband")
# What the native timeouts are short of: noticing an expired timer, ending the slice, our own poll.
_DRAIN_MARGIN_S = 3.0
_PROGRESS_TIMEOUT = "MC_TCP_PROGRESS_TIMEOUT_SEC"
_STATUS_TIMEOUT = "MC_TCP_STATUS_TIMEOUT_SEC"

# Read by the library when it is imported or first used, so they are set before that. An operator's own values win.
_ENVIRONMENT = {
    "MC_LOG_LEVEL": "ERROR",
    # The default queue overflows at about 2,000 slices to a peer, after which all later writes to it may fail.
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    # The default of 30 s is how long a stopped peer would keep blocks in quarantine.
    _PROGRESS_TIMEOUT: "5",
    _STATUS_TIMEOUT: "5",
    # A third less CPU and more throughput for runs of megabytes than the default of 64 KiB.
    "MC_TCP_SLICE_SIZE": str(1 << 20),
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "2",
}


class NativeEngine(Protocol):
    """The part of `mooncake.engine.TransferEngine` that is used; addresses and lengths are bytes.

    Every call before `initialize` is a crash of the process, and so is asking about a ticket that has ended.
    """

    def initialize(self, hostname: str, metadata_server: str, protocol: str, device: str, /) -> int: ...

    def get_rpc_port(self) -> int: ...

    def register_memory(self, address: int, num_bytes: int, /) -> int: ...

    def unregister_memory(self, address: int, /) -> int: ...

    def transfer_submit_write(self, peer: str, source: int, target: int, num_bytes: int, /) -> int: ...

    def transfer_check_status(self, ticket: int, /) -> int: ...


class MooncakeEngine:
    """`TransferEngine` over Mooncake's P2P mode: one receiving native engine, and a private sending one per peer link.

    The private engines keep what goes wrong with one peer (locks held during a handshake, a wedged queue, a stale
    address) from touching the others. Native engines are never destroyed: their destructor stops the whole interpreter
    for a second each, and hangs in a forked child. Each stays behind as two idle threads, five descriptors and 20 KB;
    `num_native_engines` says how many there are.
    """

    name = "mooncake"
    kind = PlaneKind.ONE_SIDED

    def __init__(
        self, host: str, *, protocol: str = "tcp", device: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Starts receiving at `host` on a port the library draws. `protocol` "auto": rdma where there is a device.

        Raises `DataPlaneUnavailable` and `MissingDataPlane`, both before anything is started, and `DataPlaneError` when
        the library cannot start.
        """
        protocol = choose_protocol() if protocol == "auto" else protocol
        check_request(host, protocol, device)
        prepare_environment()
        self._host = host
        self._protocol = protocol
        self._device = device
        self._clock = clock
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._regions = RegionSet()
        self._links: list[MooncakePeerLink] = []
        self._num_native_engines = 0
        self.drain_bound_s = max(_seconds(_PROGRESS_TIMEOUT), _seconds(_STATUS_TIMEOUT)) + _DRAIN_MARGIN_S
        self._factory = load_native_engine()
        self._receiver = self._new_native_engine()
        self._endpoint = f"{host}:{self._receiver.get_rpc_port()}"
        self._poller = Poller(f"pdmesh-mooncake-{self._endpoint}", clock)

    @property
    def endpoint(self) -> str:
        return self._endpoint

    @property
    def protocol(self) -> str:
        return self._protocol

    @property
    def regions(self) -> RegionSet:
        return self._regions

    @property
    def num_native_engines(self) -> int:
        """Native engines ever made by this engine, all of which live until the process ends."""
        return self._num_native_engines

    @property
    def num_refused_runs(self) -> int:
        return 0

    def register(self, base_address: int, num_bytes: int, *, shared_descriptor: int | None = None) -> None:
        del shared_descriptor  # addresses are all that the library wants
        self.check_usable()
        region = Region(base_address=base_address, num_bytes=num_bytes)
        with self._lock:
            regions = self._regions.with_region(region)
            self._register_native(self._receiver, region)
            # RDMA reads registered memory only; over TCP any local address will do.
            if self._protocol == "rdma":
                for link in self._links:
                    self._register_native(link.native, region)
            self._regions = regions

    def allow(self, key: bytes, spans: Spans, *, hashed_as: str | None = None) -> StandingPermit:
        del hashed_as  # nobody here sees the bytes arrive
        self.check_usable()
        check_permit(key, spans, self._regions)
        return StandingPermit()

    def open_peer(self, endpoint: str, regions: Sequence[Region]) -> MooncakePeerLink:
        self.check_usable()
        targets = open_regions(regions)
        deadline_s = time.monotonic() + OPEN_TIMEOUT_S
        exposed = describe_peer(endpoint, timeout_s=OPEN_TIMEOUT_S).regions
        for region in targets:
            if not exposed.covers(region):
                raise TransferRejected(endpoint, f"the peer does not expose {region}")
        with self._lock:
            native = self._new_native_engine()
            if self._protocol == "rdma":
                for region in self._regions:
                    self._register_native(native, region)
        _make_contact(native, endpoint, regions[0], deadline_s)
        link = MooncakePeerLink(self, native, endpoint, targets)
        with self._lock:
            self.check_usable()
            self._links.append(link)
        return link

    def close(self) -> None:
        """Refuses further writes from and to this process; see `TransferEngine.close`.

        Leave the process with `os._exit` once its own clean-up is done: native threads may still be at work, and
        must not meet the interpreter's tear-down.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            links, self._links = self._links, []
            # Not a fence: what a peer is sending right now still lands. It stops the peer's next run.
            for region in self._regions:
                self._receiver.unregister_memory(region.base_address)
        for link in links:
            link.end(EngineClosed(link.peer, "the engine is closed"))
        self._poller.close()

    def check_usable(self) -> None:
        """Raises `EngineClosed` when the engine is closed or was inherited by a forked child.

        Comes before every native call: in a forked child the native threads are gone and calls hang.
        """
        if os.getpid() != self._pid:
            raise EngineClosed(self._endpoint, f"the engine belongs to process {self._pid}, not to its forked child")
        if self._closed:
            raise EngineClosed(self._endpoint, "the engine is closed")

    def post(
        self, link: SendingLink, runs: Sequence[Run], timeout_s: float, is_wanted: Callable[[], bool]
    ) -> Future[TransferReport]:
        write = PostedWrite(runs=runs, timeout_s=timeout_s, posted_at_s=self._clock(), is_wanted=is_wanted)
        write.future.set_running_or_notify_cancel()
        self._poller.post(link, write)
        return write.future

    def forget(self, link: MooncakePeerLink) -> None:
        # The lock may have been held by a thread that a fork left behind.
        if os.getpid() != self._pid:
            return
        with self._lock:
            if link in self._links:
                self._links.remove(link)

    def _new_native_engine(self) -> NativeEngine:
        with silenced_native_log():
            native = self._factory()
            # One reference too many, on purpose: see the class comment on why it must never be destroyed.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(native))
            status = native.initialize(self._host, "P2PHANDSHAKE", self._protocol, self._device)
        if status != 0:
            raise DataPlaneError(f"mooncake: initialize(host={self._host}, protocol={self._protocol}) gave {status}")
        self._num_native_engines += 1
        return native

    def _register_native(self, native: NativeEngine, region: Region) -> None:
        status = native.register_memory(region.base_address, region.num_bytes)
        if status != 0:
            raise DataPlaneError(f"mooncake: register_memory of {region} gave {status}")


class MooncakePeerLink:
    """`PeerLink` with a native sending engine of its own."""

    hashes = False

    def __init__(self, engine: MooncakeEngine, native: NativeEngine, peer: str, targets: RegionSet) -> None:
        self.native = native
        self._engine = engine
        self._targets = targets
        self._sending = SendingLink(peer, _NativeSender(native, peer), engine.drain_bound_s)

    @property
    def peer(self) -> str:
        return self._sending.peer

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
        del key, hashed, digest_kind  # nobody checks the key: the writes are one-sided
        try:
            self._engine.check_usable()
            refusal = self._sending.refusal()
            if refusal is not None:
                return failed_write(refusal)
            reason = rejection(runs, self._engine.regions, self._targets)
            if reason is not None:
                return failed_write(TransferRejected(self.peer, reason))
            return self._engine.post(self._sending, tuple(runs), timeout_s, is_wanted)
        except TransferError as error:
            return failed_write(error)

    def close(self) -> None:
        self.end(EngineClosed(self.peer, "the link is closed"))
        self._engine.forget(self)

    def end(self, error: TransferError) -> None:
        """Takes no more writes, for this reason."""
        self._sending.retire(error)


class _NativeSender:
    """`RunSender` over one native engine and one peer."""

    def __init__(self, native: NativeEngine, peer: str) -> None:
        self._submit = native.transfer_submit_write
        self._check = native.transfer_check_status
        self._peer = peer

    def submit(self, run: Run) -> int:
        return self._submit(self._peer, run.source_address, run.target_address, run.length_bytes)

    def check(self, ticket: int) -> int:
        return self._check(ticket)


def check_request(host: str, protocol: str, device: str, *, rdma_devices: Path = _RDMA_DEVICES) -> None:
    """Raises `DataPlaneUnavailable` when this machine cannot offer what was asked for.

    Asked before the library is: it accepts any protocol and device, and silently uses TCP instead.
    """
    if not host:
        raise DataPlaneUnavailable("mooncake: host is empty; it must be the address peers reach this node at")
    if protocol not in PROTOCOLS:
        raise DataPlaneUnavailable(f'mooncake: protocol "{protocol}" is not one of {", ".join(PROTOCOLS)}')
    if protocol == "tcp":
        if device:
            raise DataPlaneUnavailable(f'mooncake: device "{device}" was given, but protocol "tcp" uses none')
        return
    found = sorted(entry.name for entry in rdma_devices.iterdir()) if rdma_devices.is_dir() else []
    if not found:
        raise DataPlaneUnavailable(f'mooncake: protocol "rdma" needs an RDMA device, and {rdma_devices} lists none')
    if device and device not in found:
        raise DataPlaneUnavailable(f'mooncake: RDMA device "{device}" is not in {rdma_devices}: {", ".join(found)}')


def choose_protocol(*, rdma_devices: Path = _RDMA_DEVICES) -> str:
    """The better one of those that this machine has a device for."""
    return "rdma" if rdma_devices.is_dir() and any(rdma_devices.iterdir()) else "tcp"


def prepare_environment() -> None:
    """Sets what the library reads from the environment. Raises `DataPlaneUnavailable` on settings that break it."""
    if "MC_LOG_DIR" in os.environ:
        raise DataPlaneUnavailable("mooncake: MC_LOG_DIR is set, which makes the library abort the process; unset it")
    if os.environ.get("MC_TCP_PROTO") == "1":
        raise DataPlaneUnavailable(
            "mooncake: MC_TCP_PROTO=1 drops acknowledgements, so a finished write would prove nothing; unset it"
        )
    for name in (_PROGRESS_TIMEOUT, _STATUS_TIMEOUT):
        if name in os.environ:
            _seconds(name)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def load_native_engine() -> Callable[[], NativeEngine]:
    """The native engine's constructor. Raises `MissingDataPlane` with what to install."""
    try:
        # By name, since the package has no type stubs: the Protocol above is the only type it has here.
        module = importlib.import_module("mooncake.engine")
    except ModuleNotFoundError as error:
        raise MissingDataPlane(
            f"mooncake: {error}; install it with: pip install 'pdmesh[cpu]' (or 'pdmesh[cuda]' on a GPU node)"
        ) from error
    except ImportError as error:
        raise MissingDataPlane(
            f"mooncake: {error}; on Debian install it with: apt-get install libibverbs1 libnuma1 libcurl4"
        ) from error
    factory: Callable[[], NativeEngine] = module.TransferEngine
    return factory


def _seconds(name: str) -> float:
    text = os.environ[name]
    if not text.isascii() or not text.isdigit() or not 0 < int(text) <= 3600:
        raise DataPlaneUnavailable(f"mooncake: {name}={text} is not a whole number of seconds in [1, 3600]")
    return float(text)


def _make_contact(native: NativeEngine, endpoint: str, region: Region, deadline_s: float) -> None:
    """Has the library open its side of the connection now, by a write of no bytes. Raises `PeerUnreachable`.

    The first write to a peer blocks on a handshake, for a minute if the peer stopped since the pre-flight. On a
    thread of its own that costs an abandoned thread; on the poller it would hold up every other peer.
    """
    outcome: Future[int] = Future()

    def contact() -> None:
        nothing = ctypes.c_char()
        ticket = native.transfer_submit_write(endpoint, ctypes.addressof(nothing), region.base_address, 0)
        status = native.transfer_check_status(ticket) if ticket else -1
        while status == 0:
            time.sleep(1e-3)
            status = native.transfer_check_status(ticket)
        outcome.set_result(status)

    threading.Thread(target=contact, name=f"pdmesh-contact-{endpoint}", daemon=True).start()
    try:
        status = outcome.result(timeout=max(0.0, deadline_s - time.monotonic()))
    except TimeoutError:
        raise PeerUnreachable(endpoint, f"no handshake within {OPEN_TIMEOUT_S} s") from None
    if status < 0:
        raise PeerUnreachable(endpoint, f"the handshake failed with status {status}")
