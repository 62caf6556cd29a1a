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

from model_runtime.errors import RankGroupError
from model_runtime.sampler import adapters_of
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
from node_runtime.engine.scheduler import EngineBroken, EngineScheduler, RankGone
from scheduler_core import Capacity, Event, Plan, PrefixEvent, PrefixKeyChanges, RequestSpec

if TYPE_CHECKING:
    from model_runtime.sampler import RowOutcome, SamplingParams

ANSWER_TIMEOUT_S = 60.0


class Followers:
    """The links to the other ranks."""

    def __init__(self, links: Sequence[RankLink]) -> None:
        self._links = tuple(links)

    def tell(self, order: Order) -> None:
        """Raises RankGone when one is."""
        frame = encode_order(order)
        try:
            for link in self._links:
                link.send(frame)
        except RankLost as error:
            raise RankGone(str(error)) from error

    def wait_for_answers(self) -> None:
        """Until every rank has answered once. Raises RankGone when one is, or is silent."""
        try:
            for link in self._links:
                if link.receive(ANSWER_TIMEOUT_S) is None:
                    raise RankGone(f"{link.name} is gone")
        except RankLost as error:
            raise RankGone(str(error)) from error


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

    def track_prefix_keys(self) -> None:
        self._scheduler.track_prefix_keys()

    def drain_prefix_keys(self) -> PrefixKeyChanges:
        return self._scheduler.drain_prefix_keys()

    def track_prefix_events(self, *, with_extra_keys: bool) -> None:
        self._scheduler.track_prefix_events(with_extra_keys=with_extra_keys)

    def drain_prefix_events(self) -> Sequence[PrefixEvent]:
        return self._scheduler.drain_prefix_events()

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
    ) -> tuple[RowOutcome, ...]:
        """`on_stage(i)` is called once the rows of stage `i` are in the arenas of all ranks."""
        self._followers.tell(Compute(adapters=tuple(adapters_of(sampling).items())))
        stages = _StoredByAll(on_stage)
        try:
            sampled = self._executor.execute(plan, sampling, stages.stored_here)
        except RankGroupError as error:
            raise RankGone(str(error)) from error
        except Exception as error:
            raise EngineBroken(f"a forward pass failed on one rank: {error}") from error
        stages.finish()
        return sampled


class _StoredByAll:
    """Passes a stage on when every rank has stored its rows.

    Behind its rows each stage gathers what all ranks made of theirs. So once this rank is at the next one, or through,
    the others have stored this one: they gave their part of it afterwards.
    """

    def __init__(self, on_stage: Callable[[int], None] | None) -> None:
        self._on_stage = on_stage
        self._stored: int | None = None

    def stored_here(self, stage: int) -> None:
        self.finish()
        self._stored = stage

    def finish(self) -> None:
        """The pass is over, or at another stage."""
        stage, self._stored = self._stored, None
        if stage is not None and self._on_stage is not None:
            self._on_stage(stage)
