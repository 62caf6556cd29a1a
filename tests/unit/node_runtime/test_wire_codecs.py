"""Codecs are lossless for every domain value and refuse every message that is none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pdmesh.v1 import cache_pb2, decode_pb2, handoff_pb2, inference_pb2

from cache_runtime.recipes.partition import HeadSection
from cache_runtime.recipes.spec import CacheFamily, CacheRetention
from cache_runtime.transfer.schema import (
    FieldPlacement,
    FieldSchema,
    GroupBlockCount,
    GroupSchema,
    LogicalManifest,
    PlacementManifest,
    PlaneOffer,
    RankPlacement,
    StageSchema,
)
from model_runtime.output_form import FormKind, OutputForm
from model_runtime.sampler import SampledToken, SamplingParams
from node_runtime.adapters import AdapterId
from node_runtime.engine.messages import EndReason
from node_runtime.errors import InvalidRequest
from node_runtime.handoff.messages import (
    Abort,
    Beat,
    Checksums,
    Done,
    Failed,
    FieldChecksums,
    Grant,
    GroupGrant,
    HandoffTimings,
    Quiesced,
    Ready,
    Renewed,
    RequestMessage,
    ResponseMessage,
    Start,
)
from node_runtime.wire.decode import DecodeJob, job_from_proto, job_to_proto, tokens_from_proto, tokens_to_proto
from node_runtime.wire.handoff import request_from_proto, request_to_proto, response_from_proto, response_to_proto
from node_runtime.wire.manifest import manifest_from_proto, manifest_to_proto
from node_runtime.wire.outcome import (
    CachedTokens,
    DecodeAdmitted,
    DecodeFinish,
    Timings,
    Usage,
    admitted_from_proto,
    admitted_to_proto,
    end_reason_from_proto,
    end_reason_to_proto,
    finish_from_proto,
    finish_to_proto,
    usage_from_proto,
)
from node_runtime.wire.sampling import sampling_from_proto, token_from_proto

UINT32 = st.integers(0, 2**32 - 1)
UINT64 = st.integers(0, 2**64 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
LEASE_MS = st.just(0) | st.integers(400, 60_000)
MILLISECONDS = st.floats(0, 1e9)
HANDOFF_ID = st.binary(min_size=16, max_size=16)
PRINTABLE = st.text("abcXYZ09-_é", min_size=1, max_size=30)

forms = st.builds(OutputForm, kind=st.sampled_from(FormKind), source=st.text("{}a", min_size=1, max_size=5))
sampling_params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100, width=32),
    top_k=st.none() | st.integers(1, 2**32 - 1),
    top_p=st.floats(0.0078125, 1, width=32),
    seed=UINT64,
    num_logprobs=st.none() | st.integers(0, 20),
    form=st.none() | forms,
    num_prompt_logprobs=st.none() | st.integers(0, 20),
    logit_bias=st.dictionaries(st.integers(0, 999), st.floats(-100, 100, width=32), max_size=5).map(
        lambda biases: tuple(sorted(biases.items()))
    ),
    presence_penalty=st.floats(-2, 2, width=32),
    frequency_penalty=st.floats(-2, 2, width=32),
    repetition_penalty=st.floats(0.0078125, 10, width=32),
)
adapters = st.builds(AdapterId, name=PRINTABLE, digest=st.binary(min_size=32, max_size=32))
sampled_tokens = st.builds(
    SampledToken,
    token_id=UINT32,
    logprob=st.none() | FLOAT32,
    top_logprobs=st.lists(st.tuples(UINT32, FLOAT32), max_size=3).map(tuple),
)
token_lists = st.lists(st.integers(0, 999), min_size=1, max_size=20).map(tuple)
starts = st.builds(
    Start,
    handoff_id=HANDOFF_ID,
    request_id=PRINTABLE,
    token_ids=token_lists,
    sampling=sampling_params,
    extra_keys=st.lists(st.binary(max_size=64), max_size=8).map(tuple),
    decode_incarnation=UINT64,
    prefill_incarnation=UINT64,
    lease_ms=LEASE_MS,
    wants_checksums=st.booleans(),
    checksum_kinds=st.lists(PRINTABLE.filter(lambda kind: len(kind.encode()) <= 32), max_size=8).map(tuple),
    adapter=st.none() | adapters,
).flatmap(
    lambda start: st.builds(
        dataclasses.replace, st.just(start), num_output_tokens=st.integers(0, len(start.token_ids) - 1)
    )
)
grants = st.builds(
    Grant,
    handoff_id=HANDOFF_ID,
    from_token=UINT32,
    groups=st.lists(
        st.builds(GroupGrant, group_id=PRINTABLE, first_slot=UINT32, block_ids=st.lists(UINT32, max_size=5).map(tuple)),
        max_size=3,
    ).map(tuple),
    lease_ms=LEASE_MS,
    beat=UINT32,
)
dones = st.builds(
    Done,
    handoff_id=HANDOFF_ID,
    first_token=sampled_tokens,
    transferred_bytes=UINT64,
    transferred_blocks=UINT32,
    transferred_runs=UINT32,
    timings=st.builds(
        HandoffTimings,
        queue_ms=MILLISECONDS,
        compute_ms=MILLISECONDS,
        transfer_ms=MILLISECONDS,
        transfer_exposed_ms=MILLISECONDS,
    ),
    num_checksum_parts=UINT32,
    prompt_logprobs=st.lists(sampled_tokens, max_size=3).map(tuple),
)
request_messages = (
    starts
    | grants
    | st.builds(Renewed, handoff_id=HANDOFF_ID, beat=st.integers(1, 2**32 - 1))
    | st.builds(Abort, handoff_id=HANDOFF_ID, reason=st.text())
)
response_messages = (
    dones
    | st.builds(
        Ready,
        handoff_id=HANDOFF_ID,
        cached_tokens=UINT32,
        beat_interval_ms=st.integers(0, 60_000),
        checksum_kind=PRINTABLE,
    )
    | st.builds(Beat, handoff_id=HANDOFF_ID, number=st.integers(1, 2**32 - 1))
    | st.builds(
        Checksums,
        handoff_id=HANDOFF_ID,
        part=UINT32,
        fields=st.lists(
            st.builds(
                FieldChecksums,
                field_id=PRINTABLE,
                first_slot=UINT32,
                digests=st.sampled_from([b"", b"12345678" * 3]),
                tp_rank=UINT32,
            ),
            max_size=2,
        ).map(tuple),
    )
    | st.builds(Failed, handoff_id=HANDOFF_ID, code=st.integers(1, 16), message=st.text())
    | st.builds(Quiesced, handoff_id=HANDOFF_ID)
)


@settings(deadline=None)
@given(starts, st.data())
def test_the_output_in_a_start_survives_the_wire(start: Start, data_source: st.DataObject) -> None:
    start = dataclasses.replace(start, num_output_tokens=data_source.draw(st.integers(0, len(start.token_ids) - 1)))
    assert len(start.output_token_ids) == start.num_output_tokens
    received = request_from_proto(handoff_pb2.HandoffRequest.FromString(request_to_proto(start).SerializeToString()))
    assert received == start


def test_a_start_whose_tokens_are_all_output_is_refused() -> None:
    start = handoff_pb2.Start(handoff_id=b"x" * 16, request_id="r", token_ids=[1, 2], num_output_tokens=2)
    with pytest.raises(InvalidRequest, match=r"start\.num_output_tokens: 2 given, fewer than the 2 of token_ids"):
        request_from_proto(handoff_pb2.HandoffRequest(start=start))


@pytest.mark.parametrize(
    ("kinds", "refusal"),
    [
        (["x"] * 9, r"start\.checksum_kinds: 9 given, at most 8 allowed"),
        (["x" * 33], r"start\.checksum_kinds: one of 33 bytes given, 1 to 32 allowed"),
        ([""], r"start\.checksum_kinds: one of 0 bytes given"),
    ],
)
def test_a_start_that_offers_too_much_is_refused(kinds: list[str], refusal: str) -> None:
    start = handoff_pb2.Start(handoff_id=b"x" * 16, request_id="r", token_ids=[1], checksum_kinds=kinds)
    with pytest.raises(InvalidRequest, match=refusal):
        request_from_proto(handoff_pb2.HandoffRequest(start=start))


def test_a_release_that_names_no_kind_of_digest_means_xxh3_and_is_told_so_in_the_same_way() -> None:
    ready = handoff_pb2.HandoffResponse(ready=handoff_pb2.Ready(handoff_id=b"x" * 16))
    message = response_from_proto(ready)
    assert isinstance(message, Ready)
    assert message.checksum_kind == "xxh3"
    assert response_to_proto(message) == ready
    start = handoff_pb2.Start(handoff_id=b"x" * 16, request_id="r", token_ids=[1], wants_checksums=True)
    opening = request_from_proto(handoff_pb2.HandoffRequest(start=start))
    assert isinstance(opening, Start)
    assert opening.checksum_kinds == ()


@settings(deadline=None)
@given(request_messages)
def test_a_handoff_request_survives_the_wire(message: RequestMessage) -> None:
    data = request_to_proto(message).SerializeToString()
    assert request_from_proto(handoff_pb2.HandoffRequest.FromString(data)) == message


@settings(deadline=None)
@given(response_messages)
def test_a_handoff_response_survives_the_wire(message: ResponseMessage) -> None:
    data = response_to_proto(message).SerializeToString()
    assert response_from_proto(handoff_pb2.HandoffResponse.FromString(data)) == message


@given(
    st.builds(
        DecodeJob,
        request_id=PRINTABLE,
        token_ids=token_lists,
        sampling=sampling_params,
        max_tokens=st.integers(1, 100),
        stop_token_ids=st.frozensets(st.integers(0, 999), max_size=80),
        extra_keys=st.lists(st.binary(max_size=64), max_size=8).map(tuple),
        prefill_address=st.none() | st.just("10.0.0.7:5000"),
        adapter=st.none() | adapters | st.builds(AdapterId, name=PRINTABLE),
        progress_interval_s=st.none() | st.integers(50, 60_000).map(lambda interval_ms: interval_ms / 1000),
    ),
    st.data(),
)
def test_a_decode_job_survives_the_wire(job: DecodeJob, data_source: st.DataObject) -> None:
    # Whoever has output has been told what the prompt was worth.
    most = 0 if job.sampling.num_prompt_logprobs is not None else len(job.token_ids) - 1
    num_output_tokens = data_source.draw(st.integers(0, most))
    job = dataclasses.replace(job, num_output_tokens=num_output_tokens)
    assert job.num_prompt_tokens + num_output_tokens == len(job.token_ids)
    data = job_to_proto(job).SerializeToString()
    received = job_from_proto(
        decode_pb2.DecodeRequest.FromString(data), vocab_size=1000, context_tokens=120, seed_if_absent=0
    )
    assert received == job


def test_a_handoff_names_its_adapter_with_the_digest() -> None:
    fields = {"handoff_id": bytes(16), "request_id": "r", "token_ids": [1], "adapter": {"name": "red"}}
    with pytest.raises(InvalidRequest, match=r"adapter\.digest: required in a handoff"):
        request_from_proto(handoff_pb2.HandoffRequest(start=handoff_pb2.Start(**fields)))


def test_a_decode_job_whose_tokens_are_all_output_is_refused() -> None:
    message = decode_pb2.DecodeRequest(request_id="r", token_ids=[1, 2], max_tokens=1, num_output_tokens=2)
    with pytest.raises(InvalidRequest, match="num_output_tokens: 2 given, fewer than the 2 of token_ids"):
        job_from_proto(message, vocab_size=10, context_tokens=10, seed_if_absent=0)


@given(st.lists(sampled_tokens, max_size=4).map(tuple))
def test_tokens_survive_the_wire(tokens: tuple[SampledToken, ...]) -> None:
    data = tokens_to_proto(tokens).SerializeToString()
    assert tokens_from_proto(decode_pb2.DecodeResponse.FromString(data).tokens) == tokens


COUNTS = st.integers(0, 999)
cached_tokens = st.builds(CachedTokens, prefill_device=COUNTS, decode_device=COUNTS, host=COUNTS, storage=COUNTS)
request_timings = st.builds(
    Timings,
    prefill_queue_ms=MILLISECONDS,
    prefill_compute_ms=MILLISECONDS,
    transfer_ms=MILLISECONDS,
    transfer_exposed_ms=MILLISECONDS,
    transferred_bytes=UINT64,
    transferred_runs=UINT32,
    transferred_blocks=UINT32,
    time_to_first_token_ms=MILLISECONDS,
    decode_ms=MILLISECONDS,
)


@given(
    st.builds(
        DecodeAdmitted,
        cached=cached_tokens,
        timings=request_timings,
        prompt_logprobs=st.lists(sampled_tokens, max_size=3).map(tuple),
        output_is_structured=st.booleans(),
    )
)
def test_an_admission_survives_the_wire(admitted: DecodeAdmitted) -> None:
    data = admitted_to_proto(admitted).SerializeToString()
    assert admitted_from_proto(decode_pb2.DecodeResponse.FromString(data).admitted) == admitted


@given(
    st.builds(
        DecodeFinish,
        reason=st.sampled_from(EndReason),
        matched_token_id=st.none() | UINT32,
        usage=st.builds(
            Usage, prompt_tokens=st.integers(4000, 2**32 - 1), completion_tokens=UINT32, cached=cached_tokens
        ),
        timings=request_timings,
    )
)
def test_a_finish_survives_the_wire(finish: DecodeFinish) -> None:
    data = finish_to_proto(finish).SerializeToString()
    assert finish_from_proto(decode_pb2.DecodeResponse.FromString(data).finish) == finish


def test_every_end_reason_has_a_number_of_its_own() -> None:
    numbers = {end_reason_to_proto(reason) for reason in EndReason}
    assert len(numbers) == len(EndReason)
    assert inference_pb2.FINISH_REASON_UNSPECIFIED not in numbers


def test_an_unknown_end_reason_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="reason: unknown value 0"):
        end_reason_from_proto(inference_pb2.FINISH_REASON_UNSPECIFIED)


def test_usage_with_more_cached_tokens_than_the_prompt_is_refused() -> None:
    message = inference_pb2.Usage(prompt_tokens=5, cached=inference_pb2.CachedTokens(host=3, storage=3))
    with pytest.raises(InvalidRequest, match=r"usage\.cached: 6 tokens of a prompt of 5"):
        usage_from_proto(message)


def test_absent_sampling_fields_take_the_documented_defaults() -> None:
    params = sampling_from_proto(inference_pb2.SamplingParams(), num_logprobs=None, seed_if_absent=99)
    assert params == SamplingParams(temperature=0.0, top_k=None, top_p=1.0, seed=99)


def test_a_seed_of_zero_is_a_seed() -> None:
    params = sampling_from_proto(inference_pb2.SamplingParams(seed=0), num_logprobs=None, seed_if_absent=99)
    assert params.seed == 0


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"token_id: 1000 is outside \[0, 1000\)"):
        token_from_proto(inference_pb2.SampledToken(token_id=1000), vocab_size=1000)


def test_an_empty_handoff_message_is_refused_by_both_sides() -> None:
    with pytest.raises(InvalidRequest, match="none of start, grant, renewed, abort is set"):
        request_from_proto(handoff_pb2.HandoffRequest())
    with pytest.raises(InvalidRequest, match="none of ready, beat, checksums, done, failed, quiesced is set"):
        response_from_proto(handoff_pb2.HandoffResponse())


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (handoff_pb2.HandoffRequest(start=handoff_pb2.Start(handoff_id=b"x")), r"start\.handoff_id: 1 bytes"),
        (
            handoff_pb2.HandoffRequest(
                start=handoff_pb2.Start(
                    handoff_id=b"x" * 16,
                    request_id="r",
                    token_ids=[1],
                    sampling=inference_pb2.SamplingParams(temperature=float("nan")),
                )
            ),
            "sampling.temperature: nan",
        ),
        (handoff_pb2.HandoffRequest(grant=handoff_pb2.Grant()), r"grant\.handoff_id: 0 bytes"),
        (handoff_pb2.HandoffRequest(abort=handoff_pb2.Abort()), r"abort\.handoff_id: 0 bytes"),
    ],
)
def test_a_malformed_handoff_request_is_refused_with_message_and_field(
    message: handoff_pb2.HandoffRequest, text: str
) -> None:
    with pytest.raises(InvalidRequest, match=text):
        request_from_proto(message)


def test_a_failure_with_the_code_of_success_is_refused() -> None:
    message = handoff_pb2.HandoffResponse(failed=handoff_pb2.Failed(handoff_id=b"x" * 16, code=0))
    with pytest.raises(InvalidRequest, match=r"failed\.code: 0 given"):
        response_from_proto(message)


def two_group_manifest() -> PlacementManifest:
    """Two kinds of retention, a partitioned and a replicated field, two stages: every optional field is used."""
    logical = LogicalManifest(
        model_fingerprint="sha256:abc",
        weight_version="v1",
        prefix_granularity=64,
        groups=(
            GroupSchema(
                group_id="full",
                family=CacheFamily.HISTORY,
                retention=CacheRetention.FULL_HISTORY,
                block_granularity=64,
            ),
            GroupSchema(
                group_id="window",
                family=CacheFamily.HISTORY,
                retention=CacheRetention.SLIDING_WINDOW,
                block_granularity=32,
                sliding_window_tokens=128,
                replayable=True,
            ),
        ),
        fields=(
            FieldSchema(
                field_id="layers.0.k", group_id="full", dtype="float32", block_shape=(64, 2, 4), partition_axis=1
            ),
            FieldSchema(
                field_id="layers.1.k",
                group_id="window",
                dtype="bfloat16",
                block_shape=(32, 2, 4),
                partition_axis=2,
                partition_sections=(HeadSection(num_heads=1, head_width=3), HeadSection(num_heads=1)),
            ),
        ),
        stages=(StageSchema(field_ids=("layers.0.k",)), StageSchema(field_ids=("layers.1.k",))),
    )
    rank = RankPlacement(
        tp_rank=0,
        tp_size=1,
        data_plane="memory",
        endpoint="10.0.0.7:15342",
        arena_base=4096,
        arena_bytes=2**20,
        fields=(
            FieldPlacement(field_id="layers.0.k", offset_bytes=0, block_stride_bytes=2048, block_bytes=2048),
            FieldPlacement(field_id="layers.1.k", offset_bytes=65536, block_stride_bytes=512, block_bytes=512),
        ),
        block_counts=(GroupBlockCount(group_id="full", num_blocks=8), GroupBlockCount(group_id="window", num_blocks=9)),
        planes=(
            PlaneOffer(name="shm", endpoint="pdmesh-1", protocol="unix", host_id="this-boot"),
            PlaneOffer(name="stream", endpoint="10.0.0.7:4000", protocol="tls"),
        ),
    )
    return PlacementManifest(logical=logical, ranks=(rank,))


def test_a_manifest_survives_the_wire() -> None:
    manifest = two_group_manifest()
    data = manifest_to_proto(manifest).SerializeToString()
    assert manifest_from_proto(cache_pb2.PlacementManifest.FromString(data)) == manifest


def test_a_manifest_of_an_older_release_offers_the_one_data_plane_that_it_names() -> None:
    message = manifest_to_proto(two_group_manifest())
    message.ranks[0].ClearField("planes")
    rank = manifest_from_proto(message).ranks[0]
    assert rank.offers == (PlaneOffer(name="memory", endpoint="10.0.0.7:15342"),)


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda planes: planes.add(name="shm", endpoint="x"), '"shm" appears twice'),
        (lambda planes: planes.add(name="", endpoint="x"), "planes: name has 0 characters"),
        (lambda planes: planes.add(name="other", endpoint=""), 'plane "other": endpoint has 0 characters'),
        (lambda planes: planes.add(name="other", endpoint="x", host_id="h" * 257), "host_id has 257 characters"),
        (lambda planes: [planes.add(name=f"n{i}", endpoint="x") for i in range(15)], "17 entries, limit 16"),
    ],
)
def test_offers_that_break_a_rule_are_refused(break_it: Callable[[object], object], reason: str) -> None:
    message = manifest_to_proto(two_group_manifest())
    break_it(message.ranks[0].planes)
    with pytest.raises(InvalidRequest, match=reason):
        manifest_from_proto(message)


@pytest.mark.parametrize("family", CacheFamily)
def test_every_cache_family_has_a_number(family: CacheFamily) -> None:
    group = GroupSchema(group_id="g", family=family, retention=CacheRetention.FULL_HISTORY, block_granularity=64)
    field = FieldSchema(field_id="f", group_id="g", dtype="float32", block_shape=(4,))
    logical = LogicalManifest(
        model_fingerprint="x",
        weight_version="",
        prefix_granularity=64,
        groups=(group,),
        fields=(field,),
        stages=(StageSchema(field_ids=("f",)),),
    )
    rank = RankPlacement(
        tp_rank=0,
        tp_size=1,
        data_plane="memory",
        endpoint="e",
        arena_base=4096,
        arena_bytes=4096,
        fields=(FieldPlacement(field_id="f", offset_bytes=0, block_stride_bytes=16, block_bytes=16),),
        block_counts=(GroupBlockCount(group_id="g", num_blocks=2),),
    )
    manifest = PlacementManifest(logical=logical, ranks=(rank,))
    assert manifest_from_proto(manifest_to_proto(manifest)) == manifest


def test_an_empty_manifest_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="manifest: model_fingerprint"):
        manifest_from_proto(cache_pb2.PlacementManifest())


@pytest.mark.parametrize("name", ["family", "retention"])
def test_a_group_of_an_unknown_kind_is_refused(name: str) -> None:
    message = manifest_to_proto(two_group_manifest())
    message.logical.groups[1].ClearField(name)
    with pytest.raises(InvalidRequest, match=f'manifest: group "window": {name} has the unknown value 0'):
        manifest_from_proto(message)


def test_a_placement_outside_its_arena_is_refused() -> None:
    message = manifest_to_proto(two_group_manifest())
    message.ranks[0].fields[1].offset_bytes = 2**20 - 512
    with pytest.raises(InvalidRequest, match=r"manifest: .*layers\.1\.k"):
        manifest_from_proto(message)


def test_a_field_that_a_newer_release_added_is_ignored() -> None:
    newer = manifest_to_proto(two_group_manifest()).SerializeToString() + b"\xfa\x3e\x03abc"
    assert manifest_from_proto(cache_pb2.PlacementManifest.FromString(newer)) == two_group_manifest()
