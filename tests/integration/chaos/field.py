"""A mesh that is there to be broken: processes that come back at their addresses, clients that check every token.

One prefill and one decode node are reached through a proxy that can break their connections. Where the machine allows
it, that prefill node lives in a network of its own, whose cable can be cut: then its data plane hears nothing either.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import grpc
from support.mesh import Answer, Client, is_quiet
from support.namespace import Namespace
from support.processes import NodeProcess, wait_until
from support.tcp_proxy import TcpProxy
from support.tiny_checkpoint import write_tiny_checkpoint

COMPUTE = ("--memory", "8MiB", "--num-threads", "1", "--prefix-granularity", "16", "--token-budget", "64")
COMPUTE_NODES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
PROXIED = ("prefill-1", "decode-1")
APART = "prefill-1"
ROUTER = "router"
# What a request may take in a mesh of which half is gone and whose processors are shared; a hang is longer.
DEADLINE_S = 40.0
# What a client may be told beside its answer: a node died under it. A deadline that passes would be a hang.
EXCUSABLE = (grpc.StatusCode.UNAVAILABLE,)


def make_prompts() -> Mapping[str, tuple[list[int], int]]:
    """Prompt and number of tokens by name: shared prefixes, one token, several chunks, short and long answers."""
    drawn = random.Random(31)
    shared = [drawn.randrange(256) for _ in range(70)]
    return {
        "one token": ([65], 30),
        "short": (shared[:9], 120),
        "shared": ([*shared, 1, 2], 60),
        "shared too": ([*shared, 3], 90),
        "chunks": ([drawn.randrange(256) for _ in range(300)], 40),
        "long answer": ([drawn.randrange(256) for _ in range(33)], 400),
    }


PROMPTS = make_prompts()


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Field:
    """The processes by name. A context manager: ends all of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._model = str(write_tiny_checkpoint(folder / "model"))
        self._ports = {name: unused_port() for name in (*COMPUTE_NODES, ROUTER)}
        self.cable = Namespace.make()
        self.proxies = {name: TcpProxy(self._own_address(name)) for name in PROXIED}
        # Kept until the end: the kernel ends a process together with the thread that started it.
        self._starters = ThreadPoolExecutor(len(self._ports))
        self.nodes: dict[str, NodeProcess] = {}
        self._past: list[NodeProcess] = []
        self.expected: dict[str, list[int]] = {}

    def __enter__(self) -> Field:
        for proxy in self.proxies.values():
            proxy.__enter__()
        try:
            list(self._starters.map(self.start, (*COMPUTE_NODES, ROUTER)))
            self.wait_until_whole()
            with self.client() as client:
                self.expected = {name: self._ask(client, name).token_ids for name in PROMPTS}
        except BaseException:
            self._kill_all()
            raise
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._kill_all()

    def start(self, name: str) -> NodeProcess:
        """A process of that name at the address that its predecessor had."""
        generation = sum(node.name.startswith(f"{name}.") for node in self._past)
        prefix = self.cable.prefix if self.cable is not None and name == APART else ()
        role, log_name = name.split("-")[0], f"{name}.{generation}"
        node = NodeProcess(role, self._arguments(name), self._folder, name=log_name, prefix=prefix)
        self.nodes[name] = node
        self._past.append(node)
        return node

    def kill(self, name: str) -> None:
        """SIGKILL."""
        self.nodes[name].kill()

    def restart(self, *names: str) -> list[NodeProcess]:
        """Other processes in the places of some that have ended; returns when they serve."""
        nodes = list(self._starters.map(self.start, names))
        for node in nodes:
            node.wait_serving()
        return nodes

    @contextlib.contextmanager
    def paused(self, name: str) -> Iterator[None]:
        """SIGSTOP now, SIGCONT at the end of the block."""
        pid = self.nodes[name].process.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    @contextlib.contextmanager
    def client(self) -> Iterator[Client]:
        client = Client(self.nodes[ROUTER].address)
        try:
            yield client
        finally:
            client.close()

    def wait_until_whole(self, timeout_s: float = 60.0) -> None:
        """The router uses every node, and every node says that it serves."""
        router = self.nodes[ROUTER]
        for node in self.nodes.values():
            node.wait_serving(timeout_s)
        wait_until(
            lambda: {peer.state for peer in router.status().peers} == {"ready"}, timeout_s, "the router uses all nodes"
        )

    def peer_state(self, name: str) -> str:
        """What the router thinks of a node."""
        (state,) = [peer.state for peer in self.nodes[ROUTER].status().peers if peer.address == self._address(name)]
        return state

    def wait_until_idle(self) -> None:
        """No compute node holds anything for a request."""
        for name in COMPUTE_NODES:
            node = self.nodes[name]
            wait_until(lambda node=node: is_quiet(node), 40.0, f"{name} holds nothing for a request")

    def assert_whole(self) -> None:
        """Serves right answers, holds nothing for anybody, and logged no traceback on the way."""
        self.wait_until_whole()
        with self.client() as client:
            for name in ("shared", "chunks"):
                wait_until(lambda name=name: self._is_answered(client, name), 40.0, f'"{name}" is answered')
        self.wait_until_idle()
        for name in COMPUTE_NODES:
            node = self.nodes[name]
            node.clear_cache()
            arena = node.status().arena
            assert arena.empty_lcm_blocks == arena.total_lcm_blocks, name
        for node in self._past:
            assert "Traceback" not in node.log_text(), f"{node.name}:\n{node.log_text()}"

    def _is_answered(self, client: Client, name: str) -> bool:
        """Raises grpc.RpcError where the mesh has yet to find out that a link is broken, never returns a wrong text."""
        tokens = self._ask(client, name).token_ids
        assert tokens == self.expected[name], f"{name}: {tokens}"
        return True

    def _ask(self, client: Client, name: str) -> Answer:
        prompt, num_tokens = PROMPTS[name]
        return client.generate(DEADLINE_S, token_ids=prompt, max_tokens=num_tokens, ignore_eos=True)

    def _arguments(self, name: str) -> list[str]:
        arguments = ["--model", self._model, "--node-id", name]
        arguments += ["--host", self._host(name), "--port", str(self._ports[name])]
        if name == ROUTER:
            listed = [(node.split("-")[0], self._address(node)) for node in COMPUTE_NODES]
            return [*arguments, *(word for role, address in listed for word in (f"--{role}", address))]
        if name.startswith("decode"):
            for node in COMPUTE_NODES:
                if node.startswith("prefill"):
                    arguments += ["--prefill", self._address(node)]
        return [*arguments, *COMPUTE]

    def _own_address(self, name: str) -> str:
        return f"{self._host(name)}:{self._ports[name]}"

    def _host(self, name: str) -> str:
        if self.cable is None:
            return "127.0.0.1"
        return self.cable.inner if name == APART else self.cable.outer

    def _address(self, name: str) -> str:
        """Under which others reach the node."""
        return self.proxies[name].address if name in self.proxies else self._own_address(name)

    def _kill_all(self) -> None:
        for node in self._past:
            if node.process.poll() is None:
                node.process.send_signal(signal.SIGCONT)
                node.kill()
            node.channel.close()
            node.log.close()
        for proxy in self.proxies.values():
            proxy.__exit__(None, None, None)
        self._starters.shutdown()
        if self.cable is not None:
            self.cable.remove()


@dataclass
class Record:
    """What the clients of a load lived through."""

    num_answers: int = 0
    errors: list[tuple[grpc.StatusCode, str]] = field(default_factory=list)
    # Of them those of answers that had begun.
    num_broken: int = 0
    wrong: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


class Load:
    """Clients that ask one prompt after another and compare every token. Runs while the block of its `with` runs."""

    def __init__(self, field: Field, *, num_clients: int = 6, think_s: float = 0.0, seed: int = 0) -> None:
        """`think_s`: what each client waits between two requests, so that processes that start get a processor."""
        self._field = field
        self._think_s = think_s
        self._seed = seed
        self._is_over = threading.Event()
        self._moved = threading.Condition()
        self._num_tokens = 0
        self.record = Record()
        self._threads = [
            threading.Thread(target=self._run, args=(index,), name=f"client {index}") for index in range(num_clients)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """The requests that run are waited for: each of them must end."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(2 * DEADLINE_S)
            if error is None:
                assert not thread.is_alive(), "a request outlived its deadline"

    def wait_for_tokens(self, num_tokens: int, timeout_s: float = 60.0) -> None:
        """Until the clients together have received that many more."""
        with self._moved:
            goal = self._num_tokens + num_tokens
            assert self._moved.wait_for(lambda: self._num_tokens >= goal, timeout_s), (
                f"no {num_tokens} tokens within {timeout_s} s; errors so far: {self.record.errors[-3:]}"
            )

    def assert_only_excusable(self) -> None:
        """Right text to everybody; who got less was told UNAVAILABLE, before the deadline."""
        record = self.record
        assert not record.wrong, record.wrong[0]
        inexcusable = [error for error in record.errors if error[0] not in EXCUSABLE]
        assert not inexcusable, inexcusable[0]
        assert record.num_answers > 0

    def assert_unbroken(self) -> None:
        """Whatever had begun was finished; others were told UNAVAILABLE at once."""
        assert not self.record.num_broken, self.record.errors
        self.assert_only_excusable()

    def assert_flawless(self) -> None:
        """Every request got the whole of the right text."""
        assert not self.record.errors, self.record.errors[0]
        self.assert_only_excusable()

    def _run(self, index: int) -> None:
        drawn = random.Random(self._seed * 1000 + index)
        names = sorted(PROMPTS)
        with contextlib.ExitStack() as stack:
            client = stack.enter_context(self._field.client())
            while not self._is_over.is_set():
                self._ask(client, drawn.choice(names))
                self._is_over.wait(self._think_s)

    def _ask(self, client: Client, name: str) -> None:
        prompt, num_tokens = PROMPTS[name]
        expected, received = self._field.expected[name], list[int]()
        began_s = time.monotonic()
        error = None
        try:
            for response in client.start(DEADLINE_S, token_ids=prompt, max_tokens=num_tokens, ignore_eos=True):
                received += [token.token_id for token in response.delta.tokens]
                with self._moved:
                    self._num_tokens += len(response.delta.tokens)
                    self._moved.notify_all()
        except grpc.RpcError as raised:
            error = (raised.code(), raised.details())
        with self._moved:
            record = self.record
            record.slowest_s = max(record.slowest_s, time.monotonic() - began_s)
            if received != expected[: len(received)] or (error is None and len(received) != len(expected)):
                record.wrong.append(f"{name}: {received} instead of {expected}")
            elif error is None:
                record.num_answers += 1
            else:
                record.errors.append(error)
                record.num_broken += bool(received)
        if error is not None:
            # A router that is down refuses at once: nobody profits from asking it a thousand times a second.
            self._is_over.wait(0.1)
