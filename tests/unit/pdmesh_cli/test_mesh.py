"""A mesh of child processes: what is started with what, in which order all of it stops. The nodes are small scripts."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal

import pytest
from support.fake_mesh import until

from pdmesh_cli.child import Announcement, ChildError
from pdmesh_cli.mesh import Mesh, MeshPlan, shared_num_threads

_NODE = """
import json, os, signal, sys
role, name = sys.argv[1], sys.argv[2].removeprefix("--node-id=")
def stop(number, frame):
    print("stopped", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("arguments", *sys.argv[3:], flush=True)
if "--fail=" + name in sys.argv:
    sys.exit(7)
path = os.environ["PDMESH_READY_FILE"]
with open(path + ".part", "w") as file:
    json.dump({"role": role, "node_id": name, "address": "127.0.0.1:" + str(os.getpid()), "pid": os.getpid()}, file)
os.replace(path + ".part", path)
if "--die=" + name in sys.argv:
    sys.exit(9)
while True:
    signal.pause()
"""

_PLAN = MeshPlan(
    num_prefill=1,
    num_decode=1,
    fused=False,
    num_threads=2,
    compute_arguments=("--memory=8MiB",),
    router_arguments=("--port=0",),
    common_arguments=("--model=m",),
    program=("-c", _NODE),
    ready_timeout_s=60,
    stop_grace_s=30,
)


class Lines:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def write_line(self, name: str, line: str) -> None:
        self.lines.append((name, line))

    def names_with(self, line: str) -> list[str]:
        return [name for name, each in self.lines if each == line]


def _announcement(role: str, address: str) -> Announcement:
    return Announcement(role=role, node_id=role, address=address, pid=1)


async def _forever() -> None:
    await asyncio.Event().wait()


async def test_all_nodes_run_and_the_router_is_told_where_they_are() -> None:
    sink, ready = Lines(), list[Announcement]()
    async with Mesh(_PLAN, sink, on_ready=ready.append) as mesh:
        router = await mesh.start()
        assert router.role == "router"
        assert sorted(node.node_id for node in ready[:2]) == ["decode-0", "prefill-0"]
        assert ready[2] == router
        addresses = {node.role: node.address for node in ready}
    ((_, told),) = [(name, line) for name, line in sink.lines if name == "router" and line.startswith("arguments")]
    assert told == (f"arguments --prefill={addresses['prefill']} --decode={addresses['decode']} --port=0 --model=m")


async def test_the_router_stops_first_then_decode_then_prefill() -> None:
    sink = Lines()
    async with Mesh(_PLAN, sink, on_ready=lambda node: None) as mesh:
        await mesh.start()
    assert sink.names_with("stopped") == ["router", "decode-0", "prefill-0"]


async def test_a_node_that_cannot_start_is_named_and_the_others_are_stopped() -> None:
    sink = Lines()
    plan = dataclasses.replace(_PLAN, common_arguments=("--fail=decode-0",))
    with pytest.raises(ChildError, match="decode-0 exited with code 7"):
        async with Mesh(plan, sink, on_ready=lambda node: None) as mesh:
            await mesh.start()
    assert "router" not in {name for name, _ in sink.lines}


async def test_a_node_that_dies_ends_the_work_and_is_named() -> None:
    plan = dataclasses.replace(_PLAN, common_arguments=("--die=router",))

    async def start_and_work() -> None:
        async with Mesh(plan, Lines(), on_ready=lambda node: None) as mesh:
            await mesh.start()
            await mesh.run(_forever())

    with pytest.raises(ChildError, match="router exited with code 9"):
        await start_and_work()


async def test_a_node_that_was_told_to_leave_is_no_loss_where_there_is_another_one() -> None:
    sink, nodes = Lines(), list[Announcement]()
    async with Mesh(dataclasses.replace(_PLAN, num_prefill=2), sink, on_ready=nodes.append) as mesh:
        await mesh.start()
        pids = {node.node_id: node.pid for node in nodes}

        async def see_two_leave() -> None:
            for name in ("prefill-1", "decode-0"):
                os.kill(pids[name], signal.SIGTERM)
                await until(lambda name=name: name in sink.names_with("has left"), f"{name} has left")

        await mesh.run(see_two_leave())
        os.kill(pids["prefill-0"], signal.SIGTERM)
        with pytest.raises(ChildError, match="prefill-0 exited with code 0"):
            await mesh.run(_forever())
    assert sink.names_with("stopped") == ["prefill-1", "decode-0", "prefill-0", "router"]


async def test_a_router_that_leaves_ends_the_work() -> None:
    nodes = list[Announcement]()
    async with Mesh(_PLAN, Lines(), on_ready=nodes.append) as mesh:
        router = await mesh.start()
        os.kill(router.pid, signal.SIGTERM)
        with pytest.raises(ChildError, match="router exited with code 0"):
            await mesh.run(_forever())


async def test_the_result_of_the_work_is_returned() -> None:
    async def work() -> int:
        return 42

    async with Mesh(_PLAN, Lines(), on_ready=lambda node: None) as mesh:
        await mesh.start()
        assert await mesh.run(work()) == 42


async def test_a_failure_of_the_work_alone_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdmesh_cli.mesh._BLAME_WINDOW_S", 0.01)

    async def work() -> None:
        raise LookupError("mine")

    async with Mesh(_PLAN, Lines(), on_ready=lambda node: None) as mesh:
        await mesh.start()
        with pytest.raises(LookupError, match="mine"):
            await mesh.run(work())


def test_compute_nodes_get_their_share_of_threads_and_sleeping_waits() -> None:
    prefill, decode = _PLAN.compute_specs((4001, 4002))
    assert (prefill.name, decode.name) == ("prefill-0", "decode-0")
    for spec in (prefill, decode):
        assert spec.arguments[2:4] == (spec.name.split("-")[0], f"--node-id={spec.name}")
        assert spec.arguments[-3:] == ("--num-threads=2", "--memory=8MiB", "--model=m")
        assert spec.environment == {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
    router = _PLAN.router_spec([_announcement("prefill", "a:1"), _announcement("decode", "b:2")])
    assert router.environment["OMP_NUM_THREADS"] == "1"
    assert not any(argument.startswith("--num-threads") for argument in router.arguments)


def test_every_node_has_its_own_port_and_decode_nodes_know_all_prefill_nodes() -> None:
    plan = dataclasses.replace(_PLAN, num_prefill=2, num_decode=2)
    specs = plan.compute_specs((1, 2, 3, 4))
    assert plan.compute_names == ("prefill-0", "prefill-1", "decode-0", "decode-1")
    for port, spec in enumerate(specs, start=1):
        assert ("--host=127.0.0.1", f"--port={port}") == spec.arguments[4:6]
        peers = [argument for argument in spec.arguments if argument.startswith("--prefill=")]
        expected = ["--prefill=127.0.0.1:1", "--prefill=127.0.0.1:2"] if spec.name.startswith("decode") else []
        assert peers == expected


def test_a_fused_mesh_has_no_prefill_nodes() -> None:
    plan = dataclasses.replace(_PLAN, fused=True, num_decode=2)
    assert plan.compute_names == ("fused-0", "fused-1")
    assert not any("--prefill" in argument for spec in plan.compute_specs((1, 2)) for argument in spec.arguments)
    assert "--fused=a:1" in plan.router_spec([_announcement("fused", "a:1")]).arguments


@pytest.mark.parametrize(
    ("cores", "nodes", "threads"), [(8, 2, 4), (2, 2, 1), (1, 2, 1), (7, 3, 2), (4, 1, 4), (4, 0, 4)]
)
def test_cores_are_shared_out_equally_and_nobody_goes_without(cores: int, nodes: int, threads: int) -> None:
    assert shared_num_threads(cores, nodes) == threads


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"num_decode": 0}, "num_decode must be at least 1, got 0"),
        ({"num_prefill": 0}, "num_prefill must be at least 1 without fused, got 0"),
        ({"num_threads": 0}, "num_threads must be at least 1, got 0"),
    ],
)
def test_a_plan_that_makes_no_mesh_is_refused(change: dict[str, int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        dataclasses.replace(_PLAN, **change)  # type: ignore[arg-type]
