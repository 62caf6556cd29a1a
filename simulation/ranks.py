"""The second tensor rank of a simulated node: a process of its own that mirrors the first one's scheduler.

Real: what the leader orders, as bytes, and what the follower makes of it. Simulated: the socket between them, on which
orders are on their way for a while, and the gathers of a pass. Every rank keeps whole rows, as ranks do that repeat the
heads of a model that has fewer, so a node of two ranks has the text of one. The leader's data plane reaches the arenas
of both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

from model_runtime.errors import RankGroupError
from node_runtime.engine.ranks.follower import Follower
from node_runtime.engine.ranks.leader import Followers
from node_runtime.engine.ranks.link import SEND_TIMEOUT_S, RankLink, RankLost
from node_runtime.engine.scheduler import RankGone
from scheduler_core import Plan, Scheduler
from simulation.kernel import Process, ProcessKilled
from simulation.model import FakeExecutor, Reading

RANK_NAME = "tensor rank 1"
_ORDER_S = (0.00005, 0.001)
# Longer than any lateness that a scenario asks for.
_GATHER_TIMEOUT_S = 60.0


@dataclass(slots=True)
class _FollowingExecutor:
    """What a follower computes with; remembers what the pass has read."""

    executor: FakeExecutor
    num_passes: int = 0
    readings: tuple[Reading, ...] = ()

    def zero_blocks(self, plan: Plan) -> None:
        self.executor.zero_blocks(plan)

    def logits(self, plan: Plan, on_stage: Callable[[int], None] | None, adapters: Mapping[str, str]) -> None:
        self.readings = self.executor.compute(plan, on_stage)
        self.num_passes += 1


class _LeadersEnd(RankLink):
    """The leader's end of the link: what it sends arrives a while later, in order."""

    def __init__(self, ranks: SimulatedRanks) -> None:
        self.name = RANK_NAME
        self._ranks = ranks

    def send(self, frame: bytes, timeout_s: float = SEND_TIMEOUT_S) -> None:
        del timeout_s
        self._ranks.order(frame)

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        ranks = self._ranks
        if not ranks.answers:
            ranks.wait_until(lambda: bool(ranks.answers), _GATHER_TIMEOUT_S if timeout_s is None else timeout_s)
        return ranks.answers.popleft() if ranks.answers else None

    def close(self) -> None:
        self._ranks.close()


class _FollowersEnd(RankLink):
    """The follower's end: what has arrived, and nothing more."""

    def __init__(self, ranks: SimulatedRanks) -> None:
        self.name = "tensor rank 0"
        self._ranks = ranks

    def send(self, frame: bytes, timeout_s: float = SEND_TIMEOUT_S) -> None:
        del timeout_s
        self._ranks.answers.append(frame)

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        del timeout_s
        return self._ranks.arrived.popleft() if self._ranks.arrived else None

    def close(self) -> None:
        """The leader closes the link."""


@dataclass(slots=True, eq=False)
class SimulatedRanks:
    """`RankProcesses` of a node of two ranks. `leader` is the process of the node, `process` that of the other rank."""

    leader: Process
    process: Process
    rng: Random
    lateness_s: float = 0.0
    num_passes_made: int = 0
    arrived: deque[bytes] = field(default_factory=deque)
    answers: deque[bytes] = field(default_factory=deque)
    # Orders that were sent and not carried out.
    num_under_way: int = 0
    # Of the other rank.
    scheduler: Scheduler | None = None
    _last_arrival_s: float = 0.0
    _follower: Follower | None = None
    _following: _FollowingExecutor | None = None
    _on_lost: Callable[[BaseException], None] | None = None

    def follow(self, scheduler: Scheduler, executor: FakeExecutor) -> Followers:
        """Makes the follower; returns the leader's way to it."""
        self.scheduler, self._following = scheduler, _FollowingExecutor(executor)
        self._follower = Follower(_FollowersEnd(self), scheduler, self._following)
        return Followers([_LeadersEnd(self)])

    # RankProcesses.

    def watch(self, on_lost: Callable[[BaseException], None]) -> None:
        self._on_lost = on_lost

    def close(self) -> None:
        self._on_lost = None
        self.process.kill()

    # The other rank.

    def die(self, status: int) -> None:
        """Its process ends, and the node's own hears of it."""
        self.process.kill()
        on_lost, self._on_lost = self._on_lost, None
        if on_lost is not None and not self.leader.is_dead:
            self.leader.call_soon(on_lost, RankGone(f"{RANK_NAME} ended with status {status}"))

    def order(self, frame: bytes) -> None:
        """Raises RankLost."""
        if self.process.is_dead:
            raise RankLost(f"{RANK_NAME} is gone: Broken pipe")
        delay_s = self.rng.uniform(*_ORDER_S) + self.lateness_s * self.rng.random()
        self._last_arrival_s = max(self._last_arrival_s, self.process.world.now_s + delay_s)
        self.num_under_way += 1
        self.process.call_at(self._last_arrival_s, self._take, frame)

    def _take(self, frame: bytes) -> None:
        self.num_under_way -= 1
        if self._follower is None:
            return
        self.arrived.append(frame)
        try:
            self._follower.run()
        except Exception as error:
            self.process.call_exception_handler({"message": f"{RANK_NAME} cannot go on", "exception": error})
            self.die(1)

    # The leader's side of a pass.

    def meet(self) -> None:
        """Behind the rows of a layer: until the other rank has given its part. Raises RankGroupError."""
        following = self._following
        if following is None:
            return
        try:
            self.wait_until(lambda: following.num_passes > self.num_passes_made, _GATHER_TIMEOUT_S)
        except RankLost as error:
            raise RankGroupError(str(error)) from error

    def gather(self, readings: tuple[Reading, ...]) -> tuple[Reading, ...]:
        """What both ranks have read in this pass: a difference shows in the text. Raises RankGroupError."""
        following = self._following
        if following is None:
            return readings
        self.meet()
        self.num_passes_made += 1
        pairs = zip(readings, following.readings, strict=True)
        return tuple(mine if mine == other else b"the ranks differ" for mine, other in pairs)

    def wait_until(self, is_there: Callable[[], bool], timeout_s: float) -> None:
        """The leader's engine stands still, and the world goes on. Raises RankLost."""
        world = self.leader.world
        world.run_until(world.now_s + timeout_s, lambda: is_there() or self.process.is_dead or self.leader.is_dead)
        if self.leader.is_dead:
            raise ProcessKilled
        if not is_there():
            raise RankLost(f"{RANK_NAME} is gone" if self.process.is_dead else f"{RANK_NAME} did not answer")
