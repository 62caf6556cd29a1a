"""What a node tells a gateway about itself: its model, its settings, and how busy it is. Reads, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Final

from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp
from pdmesh.v1 import mesh_pb2
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2

from decode_node.config import GeneratingNodeConfig
from decode_node.engine_protocol.served_model import ServedModel
from node_runtime.engine.core import ModelFacts
from node_runtime.engine.messages import EngineSnapshot

_GB: Final = 1e9


@dataclass(slots=True)
class CacheHits:
    """Tokens of the prompts that came by this protocol, and those of them that were not computed for them."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def rate(self) -> float:
        """Share of the tokens that were cached; 0 before the first prompt."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0


class NodeDescription:
    """Facts that hold for the life of the process, and the gauges of the moment."""

    def __init__(
        self,
        *,
        config: GeneratingNodeConfig,
        facts: ModelFacts,
        info: mesh_pb2.NodeInfo,
        model: ServedModel,
        snapshot: Callable[[], EngineSnapshot],
        started_unix_s: float,
    ) -> None:
        self._config = config
        self._facts = facts
        self._info = info
        self._model = model
        self._snapshot = snapshot
        self._started_unix_s = started_unix_s
        self.hits = CacheHits()

    @property
    def version(self) -> str:
        return f"pdmesh {self._info.version}"

    def model_info(self) -> tokenspeed_scheduler_pb2.GetModelInfoResponse:
        facts, info = self._facts, self._info
        return tokenspeed_scheduler_pb2.GetModelInfoResponse(
            model_path=facts.path,
            tokenizer_path=facts.path,
            served_model_name=facts.name,
            model_type=self._model.model_type,
            architectures=self._model.architectures,
            max_context_length=facts.context_tokens,
            max_req_input_len=min(facts.context_tokens, info.max_request_tokens) - 1,
            vocab_size=facts.vocab_size,
            eos_token_ids=self._model.tokenizer.eos_token_ids,
            weight_version=self._config.weight_version,
            model_dtype=self._config.dtype,
        )

    def server_info(self, *, now_unix_s: float) -> tokenspeed_scheduler_pb2.GetServerInfoResponse:
        """`server_args` has what gateways make labels of; secrets are not among the settings of compute nodes."""
        return tokenspeed_scheduler_pb2.GetServerInfoResponse(
            server_args=_struct(self._settings()),
            scheduler_info=_struct(
                {
                    "max_req_input_len": min(self._facts.context_tokens, self._info.max_request_tokens) - 1,
                    "num_lcm_blocks": self._facts.num_lcm_blocks,
                }
            ),
            active_requests=self._snapshot().num_live_requests,
            uptime_seconds=max(0.0, now_unix_s - self._started_unix_s),
            max_total_num_tokens=self._facts.capacity_tokens,
            tokenspeed_version=self.version,
            start_time=Timestamp(seconds=int(self._started_unix_s)),
            constrained_decoding="requested",
        )

    def loads(
        self, request: tokenspeed_scheduler_pb2.GetLoadsRequest, *, now_unix_s: float
    ) -> tokenspeed_scheduler_pb2.GetLoadsResponse:
        """Gateways ask all engines for the sections that any of them has; those that we lack are left out."""
        is_asked_for = not request.HasField("dp_rank") or request.dp_rank == 0
        loads = [self.load(request.include)] if is_asked_for else []
        return tokenspeed_scheduler_pb2.GetLoadsResponse(
            timestamp=datetime.fromtimestamp(now_unix_s, UTC).isoformat(),
            version=self.version,
            dp_rank_count=len(loads),
            loads=loads,
            aggregate=_aggregate(loads),
        )

    def _settings(self) -> Mapping[str, str | int]:
        config, info = self._config, self._info
        return MappingProxyType(
            {
                "node_id": info.node_id,
                "role": config.role_name,
                "disaggregation_mode": "null",
                "tp_size": config.tensor_parallel,
                "max_running_requests": config.max_batch_size,
                "device": info.device,
                # GetModelInfo has no field for it.
                "batch_invariant": info.batch_invariant,
            }
        )

    def load(self, include: Sequence[str] = ()) -> tokenspeed_scheduler_pb2.SchedulerLoad:
        """How busy the node is now. Blocks are counted as the share of the tokens that the arena has room for."""
        snapshot, facts = self._snapshot(), self._facts
        total = max(1, snapshot.total_lcm_blocks)
        num_used = snapshot.total_lcm_blocks - snapshot.empty_lcm_blocks
        num_active = snapshot.active_lcm_blocks + snapshot.quarantined_lcm_blocks
        load = tokenspeed_scheduler_pb2.SchedulerLoad(
            num_running_reqs=snapshot.num_running,
            num_waiting_reqs=snapshot.num_waiting,
            num_total_reqs=snapshot.num_running + snapshot.num_waiting,
            num_used_tokens=num_used * facts.capacity_tokens // total,
            max_total_num_tokens=facts.capacity_tokens,
            max_running_requests=self._config.max_batch_size,
            token_usage=num_used / total,
            active_token_usage=num_active / total,
            gen_throughput=snapshot.num_running / snapshot.decode_step_s if snapshot.decode_step_s else 0.0,
            cache_hit_rate=self.hits.rate,
            utilization=snapshot.num_running / self._config.max_batch_size,
        )
        if {"memory", "all"} & set(include):
            load.memory.weight_gb = facts.weight_bytes / _GB
            load.memory.kv_cache_gb = facts.arena_bytes / _GB
            load.memory.token_capacity = facts.capacity_tokens
        if {"queues", "all"} & set(include):
            load.queues.waiting = snapshot.num_waiting
        return load


def _aggregate(loads: Sequence[tokenspeed_scheduler_pb2.SchedulerLoad]) -> tokenspeed_scheduler_pb2.AggregateMetrics:
    """Of one rank, or of none."""
    return tokenspeed_scheduler_pb2.AggregateMetrics(
        total_running_reqs=sum(load.num_running_reqs for load in loads),
        total_waiting_reqs=sum(load.num_waiting_reqs for load in loads),
        total_reqs=sum(load.num_total_reqs for load in loads),
        avg_token_usage=sum(load.token_usage for load in loads),
        avg_throughput=sum(load.gen_throughput for load in loads),
        avg_utilization=sum(load.utilization for load in loads),
    )


def _struct(values: Mapping[str, str | int]) -> Struct:
    struct = Struct()
    struct.update(values)
    return struct
