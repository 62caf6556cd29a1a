"""The leading rank's scheduler and executor: each call goes to the other ranks as well, in the same order.

To the engine loop they are a scheduler and an executor like any other. Only the leader samples; the others are told the
tokens as results, like every other event. What happens outside, such as a transfer that landed, reaches the schedulers
of all ranks by the one event that the leader was given, so it must not be reported before it holds for every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from node_runtime.engine.loop import Executor
from node_runtime.engine.ranks.link import RankLink, RankLost
from node_runtime.engine.ranks.orders import (
    Advance,
    ClearCache,
    Compute,
    MakePlan,
    Order,
    Submit,
    ZeroBlocks,
    encode_order,
    plan_digest,
)
from node_runtime.engine.scheduler import EngineBroken, EngineScheduler
from scheduler_core import Capacity, Event, Plan, RequestSpec

if TYPE_CHECKING:
    from model_runtime.sampler import SampledToken, SamplingParams

ANSWER_TIMEOUT_S = 60.0


class Followers:
    """The links to the other ranks."""

    def __init__(self, links: Sequence[RankLink]) -> None:
        self._links = tuple(links)

    def tell(self, order: Order) -> None:
        """Raises EngineBroken when a rank is gone."""
        frame = encode_order(order)
        try:
            for link in self._links:
                link.send(frame)
        except RankLost as error:
            raise EngineBroken(str(error)) from error

    def wait_for_answers(self) -> None:
        """Until every rank has answered once. Raises EngineBroken when one is gone or silent."""
        try:
            for link in self._links:
                if link.receive(ANSWER_TIMEOUT_S) is None:
                    raise EngineBroken(f"{link.name} is gone")
        except RankLost as error:
            raise EngineBroken(str(error)) from error


class MirroredScheduler:
    """The scheduler of the leading rank. What it refuses, the others never hear of."""

    def __init__(self, scheduler: EngineScheduler, followers: Followers) -> None:
        self._scheduler = scheduler
        self._followers = followers

    def submit(self, requests: Sequence[RequestSpec]) -> None:
        self._scheduler.submit(requests)
        self._followers.tell(Submit(requests=tuple(requests)))

    def advance(self, events: Sequence[Event]) -> None:
        self._scheduler.advance(events)
        if events:
            self._followers.tell(Advance(events=tuple(events)))

    def next_plan(self) -> Plan:
        plan = self._scheduler.next_plan()
        self._followers.tell(MakePlan(digest=plan_digest(plan)))
        return plan

    def clear_cache(self) -> bool:
        self._followers.tell(ClearCache())
        return self._scheduler.clear_cache()

    def block_tables(self, request_id: str) -> Sequence[npt.NDArray[np.int32]]:
        return self._scheduler.block_tables(request_id)

    def find_cached_tokens(self, tokens: npt.NDArray[np.int32], extra_keys: Sequence[bytes]) -> int:
        return self._scheduler.find_cached_tokens(tokens, extra_keys)

    def capacity(self) -> Capacity:
        return self._scheduler.capacity()

    @property
    def max_request_tokens(self) -> int:
        return self._scheduler.max_request_tokens


class MirroredExecutor:
    """The executor of the leading rank. A failure leaves the ranks in different places, so it ends the engine."""

    def __init__(self, executor: Executor, followers: Followers) -> None:
        self._executor = executor
        self._followers = followers

    def zero_blocks(self, plan: Plan) -> None:
        """Blocks that are granted to a peer are zero on all ranks when this returns: they may be written at once."""
        is_answered = bool(plan.remote_prefills)
        self._followers.tell(ZeroBlocks(is_answered=is_answered))
        try:
            self._executor.zero_blocks(plan)
        except Exception as error:
            raise EngineBroken(f"blocks of one rank could not be zeroed: {error}") from error
        if is_answered:
            self._followers.wait_for_answers()

    def execute(
        self, plan: Plan, sampling: Mapping[str, SamplingParams], on_stage: Callable[[int], None] | None = None
    ) -> tuple[SampledToken | None, ...]:
        self._followers.tell(Compute())
        try:
            return self._executor.execute(plan, sampling, on_stage)
        except Exception as error:
            raise EngineBroken(f"a forward pass failed on one rank: {error}") from error
