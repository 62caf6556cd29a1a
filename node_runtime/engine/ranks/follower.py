"""Follower: a rank that does what the leader tells it, and nothing else. It answers no client and samples nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, assert_never

from node_runtime.engine.loop import NoHooks, StepHooks
from node_runtime.engine.ranks.link import RankLink
from node_runtime.engine.ranks.orders import (
    Advance,
    ClearCache,
    Compute,
    MakePlan,
    Order,
    Submit,
    ZeroBlocks,
    decode_order,
    plan_digest,
)
from node_runtime.engine.scheduler import EngineBroken, EngineScheduler
from scheduler_core import Plan


class FollowingExecutor(Protocol):
    """Computes this rank's part of plans."""

    def zero_blocks(self, plan: Plan) -> None: ...

    def logits(self, plan: Plan, on_stage: Callable[[int], None] | None, adapters: Mapping[str, str]) -> object:
        """The forward pass, which the ranks carry out together. Whoever follows does not look at what it returns.

        `adapters` by request id.
        """


class Follower:
    """Owns the scheduler and the executor of this rank; `run` is for one thread.

    `hooks` are this rank's part of what a role does while a plan runs.
    """

    def __init__(
        self,
        link: RankLink,
        scheduler: EngineScheduler,
        executor: FollowingExecutor,
        hooks: StepHooks | None = None,
    ) -> None:
        self._link = link
        self._scheduler = scheduler
        self._executor = executor
        self._hooks: StepHooks = NoHooks() if hooks is None else hooks
        self._plan: Plan | None = None

    def run(self) -> None:
        """Until the leader is gone. Raises EngineBroken when its plans are others than the leader's."""
        while (frame := self._link.receive()) is not None:
            self._follow(decode_order(frame))

    def _follow(self, order: Order) -> None:
        match order:
            case Submit():
                self._scheduler.submit(order.requests)
            case Advance():
                self._scheduler.advance(order.events)
            case MakePlan():
                self._plan = self._scheduler.next_plan()
                self._check_same(self._plan, order.digest)
            case ZeroBlocks():
                plan = self._current_plan()
                self._executor.zero_blocks(plan)
                if order.is_answered:
                    self._link.send(b"zeroed")
                self._hooks.on_admitted(plan)
            case Compute():
                plan = self._current_plan()
                self._executor.logits(plan, lambda stage: self._hooks.on_stage(stage, plan), dict(order.adapters))
            case ClearCache():
                self._scheduler.clear_cache()
            case _:
                assert_never(order)

    def _current_plan(self) -> Plan:
        if self._plan is None:
            raise EngineBroken(f"{self._link.name} wants a plan carried out before it asked for one")
        return self._plan

    def _check_same(self, plan: Plan, digest: int) -> None:
        mine = plan_digest(plan)
        if mine != digest:
            raise EngineBroken(f"plans of the ranks differ: digest {digest:#x} of {self._link.name}, {mine:#x} here")
