"""What the leader tells the others arrives as it was said, and plans that differ anywhere have another digest."""

from __future__ import annotations

import numpy as np
import pytest

from node_runtime.engine.ranks.orders import (
    Advance,
    ClearCache,
    Compute,
    MakePlan,
    Order,
    OrderError,
    Submit,
    ZeroBlocks,
    decode_order,
    encode_order,
    plan_digest,
)
from scheduler_core import (
    AbortEvent,
    CacheGroupConfig,
    DoneEvent,
    Event,
    FailedEvent,
    Family,
    FinishEvent,
    GrantedEvent,
    HandedOverEvent,
    QuiescedEvent,
    ReadyEvent,
    RequestSpec,
    ReserveEvent,
    ResultEvent,
    Retention,
    RetractEvent,
    Role,
    Scheduler,
    SchedulerConfig,
)

NAMED = (
    AbortEvent,
    FailedEvent,
    FinishEvent,
    GrantedEvent,
    HandedOverEvent,
    QuiescedEvent,
    ReadyEvent,
    RetractEvent,
)


@pytest.mark.parametrize(
    "order", [MakePlan(digest=7), ZeroBlocks(is_answered=True), ZeroBlocks(is_answered=False), Compute(), ClearCache()]
)
def test_orders_arrive_as_they_were_given(order: Order) -> None:
    assert decode_order(encode_order(order)) == order


@pytest.mark.parametrize("event", NAMED)
def test_events_of_a_request_arrive_in_their_class(event: type[AbortEvent]) -> None:
    order = decode_order(encode_order(Advance(events=(event("a"),))))
    assert isinstance(order, Advance)
    (arrived,) = order.events
    assert type(arrived) is event
    assert arrived.request_id == "a"


def test_results_and_first_tokens_arrive_in_order() -> None:
    events: tuple[Event, ...] = (ResultEvent("a", [3, 4]), ResultEvent("b", []), DoneEvent("c", 9))
    order = decode_order(encode_order(Advance(events=events)))
    assert isinstance(order, Advance)
    first, second, third = order.events
    assert isinstance(first, ResultEvent)
    assert (first.request_id, first.tokens) == ("a", [3, 4])
    assert isinstance(second, ResultEvent)
    assert second.tokens == []
    assert isinstance(third, DoneEvent)
    assert (third.request_id, third.token) == ("c", 9)


def test_a_pass_arrives_with_the_adapters_of_its_requests() -> None:
    for order in (Compute(), Compute(adapters=(("a", "red"), ("b", "blue")))):
        assert decode_order(encode_order(order)) == order


def test_requests_arrive_with_everything_that_a_scheduler_reads() -> None:
    spec = RequestSpec(
        request_id="a", tokens=[5, 6, 7], max_new_tokens=None, extra_keys=[b"\x00k", b""], local_prefill=True
    )
    order = decode_order(encode_order(Submit(requests=(spec,))))
    assert isinstance(order, Submit)
    (arrived,) = order.requests
    assert (arrived.request_id, arrived.tokens.tolist(), arrived.max_new_tokens) == ("a", [5, 6, 7], None)
    assert (arrived.extra_keys, arrived.local_prefill) == ([b"\x00k", b""], True)


def test_an_event_that_ranks_do_not_share_is_refused() -> None:
    with pytest.raises(OrderError, match="ReserveEvent is no event that ranks share"):
        encode_order(Advance(events=(ReserveEvent("a", 3),)))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"[]",
        b'{"kind":"fly"}',
        b'{"kind":"plan"}',
        b'{"kind":"compute"}',
        b'{"kind":"compute","adapters":[["a"]]}',
        b'{"kind":"advance","events":[["AbortEvent"]]}',
        b'{"kind":"advance","events":[["ResultEvent","a",["x"]]]}',
        b'{"kind":"submit","requests":[["a",[1]]]}',
    ],
)
def test_bytes_that_are_no_order_are_refused(frame: bytes) -> None:
    with pytest.raises(OrderError, match="no "):
        decode_order(frame)


def scheduler() -> Scheduler:
    group = CacheGroupConfig(
        group_id="full",
        block_granularity=4,
        family=Family.HISTORY,
        retention=Retention.FULL_HISTORY,
        cache_blocks_per_lcm_block=1,
    )
    return Scheduler(
        SchedulerConfig(
            role=Role.FUSED,
            prefix_granularity=4,
            num_lcm_blocks=20,
            max_batch_size=4,
            token_budget=16,
            cache_groups=[group],
        )
    )


def digest_of(*requests: tuple[str, list[int]]) -> int:
    mine = scheduler()
    mine.submit(
        [RequestSpec(request_id=name, tokens=np.array(tokens, np.int32), max_new_tokens=2) for name, tokens in requests]
    )
    return plan_digest(mine.next_plan())


def test_equal_inputs_give_plans_of_one_digest_and_others_of_another() -> None:
    base = digest_of(("a", [1, 2, 3]), ("b", [4]))
    assert base == digest_of(("a", [1, 2, 3]), ("b", [4]))
    others = {
        digest_of(("a", [1, 2, 9]), ("b", [4])),
        digest_of(("b", [1, 2, 3]), ("a", [4])),
        digest_of(("a", [1, 2, 3])),
        digest_of(),
    }
    assert base not in others
    assert len(others) == 4
