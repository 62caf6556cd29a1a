"""Which role may call which RPC: all of them, so that a new one is decided about."""

from __future__ import annotations

from fuzz.fuzzed_mesh import all_methods

from node_runtime.rpc.access import only_reads, roles_for

NODES = frozenset(("router", "prefill", "decode", "fused", "operator"))
WHO_MAY = {
    "Decode.Generate": {"router"},
    "Prefill.Bootstrap": {"decode"},
    "Prefill.Handoff": {"decode"},
    "Node.GetNodeInfo": NODES,
    "Node.GetNodeStatus": NODES,
    "Node.Follow": {"router", "operator"},
    "Node.ClearCache": {"operator"},
    "Node.Drain": {"operator"},
    "Traces.ListRequests": NODES,
    "Traces.GetTrace": NODES,
    "Traces.FollowRequests": NODES,
    # What a router itself decides about, by tokens: no certificate opens it on another node.
    "Inference.Generate": {"operator"},
    "Inference.ListModels": {"operator"},
}


def test_every_rpc_is_for_the_roles_that_need_it_and_for_nobody_else() -> None:
    names = {method.full_name.removeprefix("pdmesh.v1."): method for method in all_methods()}
    told = {name: roles_for(f"/{method.containing_service.full_name}/{method.name}") for name, method in names.items()}
    assert told == WHO_MAY
    assert not any("client" in roles for roles in told.values())


def test_what_is_not_known_is_for_operators_alone() -> None:
    for method in ("/pdmesh.v1.Node/Reboot", "/pdmesh.v2.Decode/Generate", "/", ""):
        assert roles_for(method) == {"operator"}
        assert not only_reads(method)


def test_what_changes_a_node_is_no_reading() -> None:
    assert not any(only_reads(f"/pdmesh.v1.Node/{name}") for name in ("ClearCache", "Drain", "Follow"))
