"""Tenants of a router: who is let in, what each may use, and that none sees another's cache."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path

import grpc
import pytest
from pdmesh.v1 import inference_pb2, mesh_pb2
from unit.router_node.fakes import FakeNode, Hang, RunningRouter, StartRouter, finish_event, tokens_event

from node_runtime.errors import BadConfig, QueueFull
from router_node.tenants import Tenants

TOKENS = {"alpha": "alpha-secret", "beta": "beta-secret", "ops": "ops-secret"}


class StoppedClock:
    """Time stands still unless a test moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def now_s(self) -> float:
        return self.now

    def unix_ns_at(self, moment_s: float) -> int:
        return round(moment_s * 1e9)


def write_tenants(path: Path, **limits: dict[str, object]) -> Path:
    tenants = [
        {
            "name": name,
            "token_sha256": [hashlib.sha256(token.encode()).hexdigest()],
            "is_operator": name == "ops",
            **limits.get(name, {}),
        }
        for name, token in TOKENS.items()
    ]
    replacement = path.with_suffix(".new")
    replacement.write_text(json.dumps({"tenants": tenants}))
    os.replace(replacement, path)
    return path


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


async def status_of_call(router: RunningRouter, metadata: tuple[tuple[str, str], ...]) -> tuple[str, str]:
    """Name of the status and its message."""
    request = inference_pb2.GenerateRequest(text="hi", max_tokens=5)
    try:
        async for _ in router.stub.Generate(request, timeout=10, metadata=metadata):
            pass
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""


async def test_only_known_tokens_are_served_and_none_is_logged(
    start_router: StartRouter,
    prefill: FakeNode,
    decode: FakeNode,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    router = await start_router(prefill, decode, tenants=str(write_tenants(tmp_path / "tenants.yaml")))
    assert await status_of_call(router, bearer("alpha-secret")) == ("OK", "")
    assert await status_of_call(router, (("authorization", "bearer  alpha-secret "),)) == ("OK", "")
    for metadata in ((), bearer(""), bearer("alpha-secre"), bearer("x" * 5000), (("authorization", "Basic eDp5"),)):
        code, message = await status_of_call(router, metadata)
        assert code == "UNAUTHENTICATED"
        assert "token" in message
        assert "secre" not in message
    assert len(decode.requests) == 2
    # Nor does one travel on to a node.
    assert not any("authorization" in metadata for metadata in decode.metadata)
    assert caplog.records
    assert "secre" not in caplog.text


async def test_tenants_share_no_cache_even_with_the_same_salt(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode, tmp_path: Path
) -> None:
    router = await start_router(prefill, decode, tenants=str(write_tenants(tmp_path / "tenants.yaml")))
    request = inference_pb2.GenerateRequest(text="hi", max_tokens=5, cache_salt=b"salt")
    for name in ("alpha", "beta"):
        async for _ in router.stub.Generate(request, timeout=10, metadata=bearer(TOKENS[name])):
            pass
    assert [list(seen.extra_keys) for seen in decode.requests] == [[b"alpha", b"salt"], [b"beta", b"salt"]]


async def test_a_tenant_at_its_limit_does_not_stop_another(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode, tmp_path: Path
) -> None:
    path = write_tenants(tmp_path / "tenants.yaml", alpha={"max_live_requests": 1})
    router = await start_router(prefill, decode, tenants=str(path))
    decode.script = [tokens_event("a"), Hang()]
    running = router.stub.Generate(
        inference_pb2.GenerateRequest(text="hi", max_tokens=5), timeout=30, metadata=bearer(TOKENS["alpha"])
    )
    await running.read()
    decode.script = [tokens_event("ab"), finish_event()]
    code, message = await status_of_call(router, bearer(TOKENS["alpha"]))
    assert (code, message) == (
        "RESOURCE_EXHAUSTED",
        "max_live_requests: tenant alpha already has 1 requests running, and 1 more exceed 1",
    )
    assert await status_of_call(router, bearer(TOKENS["beta"])) == ("OK", "")
    running.cancel()


def test_a_rate_lets_a_minute_of_requests_begin_and_then_says_when_to_come_back(tmp_path: Path) -> None:
    clock = StoppedClock()
    path = write_tenants(tmp_path / "tenants.yaml", alpha={"requests_per_minute": 6})
    tenants = Tenants(path, clock)

    def begin() -> None:
        with tenants.using("alpha"):
            pass

    for _ in range(6):
        begin()
    clock.now += 4.0
    with pytest.raises(QueueFull, match=r"requests_per_minute: tenant alpha may begin 6 requests") as refusal:
        begin()
    assert refusal.value.retry_after_s == pytest.approx(6.0)
    clock.now += 6.1
    begin()
    with pytest.raises(QueueFull):
        begin()
    for _ in range(100):
        with tenants.using("beta"):
            pass


def test_each_sample_of_a_request_counts(tmp_path: Path) -> None:
    clock = StoppedClock()
    path = write_tenants(tmp_path / "tenants.yaml", alpha={"requests_per_minute": 6, "max_live_requests": 4})
    tenants = Tenants(path, clock)
    with tenants.using("alpha", 3):
        with (
            pytest.raises(QueueFull, match="already has 3 requests running, and 2 more exceed 4"),
            tenants.using("alpha", 2),
        ):
            pass
        with tenants.using("alpha", 1):
            pass
    with pytest.raises(QueueFull, match="requests_per_minute") as refusal, tenants.using("alpha", 4):
        pass
    # Two are left of the six, and one comes every ten seconds.
    assert refusal.value.retry_after_s == pytest.approx(20.0)


async def test_only_operators_may_change_the_router(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode, tmp_path: Path
) -> None:
    router = await start_router(prefill, decode, tenants=str(write_tenants(tmp_path / "tenants.yaml")))
    for metadata, code in (
        ((), grpc.StatusCode.UNAUTHENTICATED),
        (bearer(TOKENS["alpha"]), grpc.StatusCode.PERMISSION_DENIED),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await router.node.ClearCache(mesh_pb2.ClearCacheRequest(), timeout=10, metadata=metadata)
        assert refusal.value.code() is code
    await router.node.ClearCache(mesh_pb2.ClearCacheRequest(), timeout=10, metadata=bearer(TOKENS["ops"]))


async def test_a_replaced_file_counts_at_once_and_a_wrong_one_changes_nothing(
    start_router: StartRouter, prefill: FakeNode, decode: FakeNode, tmp_path: Path
) -> None:
    path = write_tenants(tmp_path / "tenants.yaml")
    router = await start_router(prefill, decode, tenants=str(path))
    path.write_text("tenants: [{name: alpha}]")
    assert await status_of_call(router, bearer(TOKENS["beta"])) == ("OK", "")
    digest = hashlib.sha256(b"renewed").hexdigest()
    path.write_text(f"tenants:\n- name: alpha\n  token_sha256: ['{digest}']\n")
    assert await status_of_call(router, bearer("renewed")) == ("OK", "")
    assert (await status_of_call(router, bearer(TOKENS["beta"])))[0] == "UNAUTHENTICATED"


ONE, OTHER = f"['{'0' * 64}']", f"['{'1' * 64}']"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "cannot read"),
        ("- 1", "must hold a mapping with the key tenants"),
        ("tenants: []", "tenants"),
        ("tenants: [{name: a}]", r"tenants\.0\.token_sha256: required"),
        ("tenants: [{name: a, token_sha256: [abc]}]", "token_sha256"),
        (
            f"tenants: [{{name: a, token_sha256: {ONE}}}, {{name: a, token_sha256: {OTHER}}}]",
            "more than",
        ),
        (
            f"tenants: [{{name: a, token_sha256: {ONE}}}, {{name: b, token_sha256: {ONE}}}]",
            "more than",
        ),
        (f"tenants: [{{name: 'a b', token_sha256: {ONE}}}]", "name"),
    ],
)
def test_a_wrong_file_is_refused_by_key(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(content)
    with pytest.raises(BadConfig, match=message):
        Tenants(path, StoppedClock())


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"tenants: cannot read .*none\.yaml: No such file"):
        Tenants(tmp_path / "none.yaml", StoppedClock())
