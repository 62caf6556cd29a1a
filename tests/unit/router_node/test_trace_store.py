"""What the in-memory trace ring keeps, drops and waits for."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from node_runtime.rpc import span_names
from router_node.trace_store import Span, TraceStore, is_complete


def _span(trace: str, span_id: str, parent: str = "", name: str = "work", start_ns: int = 0) -> Span:
    return Span(
        trace_id=trace, span_id=span_id, parent_span_id=parent, name=name, node="n", start_ns=start_ns, end_ns=start_ns
    )


def _of_request(trace: str, request_id: str) -> Span:
    return replace(_span(trace, "a"), attributes={span_names.PDMESH_REQUEST_ID: request_id})


async def test_spans_of_several_processes_merge_into_their_trace_in_order_of_time() -> None:
    store = TraceStore()
    await store.add([_span("t1", "b", "a", start_ns=5), _span("t2", "x")])
    await store.add([_span("t1", "a", start_ns=1)])
    assert [span.span_id for span in store.spans("t1")] == ["a", "b"]
    assert store.trace_ids() == ("t1", "t2")
    assert store.spans("unknown") == ()


async def test_a_span_that_is_exported_twice_counts_once() -> None:
    store = TraceStore()
    await store.add([_span("t", "a"), _span("t", "a", name="again")])
    assert [span.name for span in store.spans("t")] == ["again"]


async def test_a_trace_is_found_by_no_request_that_its_spans_do_not_name_any_more() -> None:
    store = TraceStore(max_traces=1)
    await store.add(_of_request("t", f"request-{index}") for index in range(3))
    assert [store.find(f"request-{index}") for index in range(3)] == [(), (), ("t",)]
    await store.add([_of_request("u", "request-3")])
    assert [store.find(f"request-{index}") for index in range(4)] == [(), (), (), ("u",)]


async def test_the_oldest_trace_leaves_when_the_ring_is_full() -> None:
    store = TraceStore(max_traces=2)
    await store.add([_span("t1", "a"), _span("t1", "b", "a"), _span("t2", "a"), _span("t3", "a")])
    assert store.trace_ids() == ("t2", "t3")
    assert store.num_dropped_spans == 2


async def test_a_trace_takes_no_more_than_its_share_of_spans() -> None:
    store = TraceStore(max_spans_per_trace=2)
    await store.add(_span("t", str(index)) for index in range(5))
    assert len(store.spans("t")) == 2
    assert store.num_dropped_spans == 3


async def test_waiting_ends_as_soon_as_the_trace_is_complete() -> None:
    store = TraceStore()
    waiter = asyncio.create_task(store.wait_for_trace("t", required_names={"leaf"}, timeout_s=60))
    await store.add([_span("t", "b", "a", name="leaf")])
    await asyncio.sleep(0)
    assert not waiter.done()
    await store.add([_span("t", "a")])
    assert {span.span_id for span in await waiter} == {"a", "b"}


async def test_requests_are_followed_from_the_moment_their_own_spans_arrive() -> None:
    store = TraceStore()
    await store.add([_span("old", "a")])
    following = store.ended_requests()
    first = asyncio.ensure_future(anext(following))
    await asyncio.sleep(0)
    await store.add([_span("t1", "b", "a")])
    await asyncio.sleep(0)
    assert not first.done()
    await store.add([_span("t1", "a"), _span("t2", "a"), _span("t2", "a")])
    assert [(await first).span.trace_id, (await anext(following)).span.trace_id] == ["t1", "t2"]
    resumed = store.ended_requests(after=1)
    assert [(await anext(resumed)).sequence for _ in range(2)] == [2, 3]


async def test_a_follower_of_another_process_s_store_begins_with_what_ends_from_now_on() -> None:
    store = TraceStore()
    await store.add([_span("old", "a")])
    following = store.ended_requests(after=7)
    first = asyncio.ensure_future(anext(following))
    await asyncio.sleep(0)
    await store.add([_span("new", "a")])
    assert (await first).span.trace_id == "new"


async def test_a_request_is_known_by_its_name_where_its_client_opened_the_trace() -> None:
    store = TraceStore()
    await store.add([_span("t1", "b", "of the client", name="chat tiny"), _span("t1", "c", "b", name="pdmesh.place")])
    await store.add([_span("t2", "a", name="another root", start_ns=1), _span("t2", "b", "a", name="chat tiny")])
    assert [(span.trace_id, span.span_id) for span in store.newest_requests(5)] == [("t2", "b"), ("t1", "b")]
    assert [span.trace_id for span in store.newest_requests(1)] == ["t2"]


async def test_a_trace_is_found_by_its_id_the_beginning_of_it_and_its_requests() -> None:
    store = TraceStore(max_traces=2)
    mine = Span(
        trace_id="abcd01",
        span_id="a",
        parent_span_id="",
        name="chat m",
        node="n",
        start_ns=0,
        end_ns=0,
        attributes={"pdmesh.request_id": "mine"},
    )
    await store.add([mine, _span("abcd02", "a")])
    assert store.find("abcd01") == store.find("mine") == ("abcd01",)
    assert store.find("abcd") == ("abcd01", "abcd02")
    assert store.find("other") == ()
    await store.add([_span("ef", "a")])
    assert store.find("mine") == (), "the ring forgot it"


async def test_waiting_gives_what_is_there_when_the_time_is_up() -> None:
    store = TraceStore()
    await store.add([_span("t", "b", "missing parent")])
    assert len(await store.wait_for_trace("t", timeout_s=0)) == 1


@pytest.mark.parametrize(
    ("spans", "complete"),
    [
        ([], False),
        ([_span("t", "a")], True),
        ([_span("t", "a"), _span("t", "b", "a")], True),
        ([_span("t", "a"), _span("t", "c", "b")], False),
        ([_span("t", "b", "a")], False),
    ],
)
def test_a_complete_trace_has_a_root_and_every_parent(spans: list[Span], complete: bool) -> None:
    assert is_complete(spans, ()) is complete
    assert not is_complete(spans, {"never"})


def test_a_span_that_ends_before_it_starts_is_refused() -> None:
    with pytest.raises(ValueError, match="end_ns 1 lies before start_ns 2"):
        Span(trace_id="t", span_id="a", parent_span_id="", name="x", node="n", start_ns=2, end_ns=1)


@pytest.mark.parametrize("limits", [{"max_traces": 0}, {"max_spans_per_trace": 0}])
def test_a_ring_without_room_is_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        TraceStore(**limits)
