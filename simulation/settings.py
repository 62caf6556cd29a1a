"""What simulated nodes are configured with: small caches, one fake model, and configurations that are made once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import tokenizers

from decode_node.config import DecodeNodeConfig, FusedNodeConfig
from model_runtime.text.tokenizer import Tokenizer
from model_runtime.text.tokenizer_model import TokenizerModel
from model_runtime.text.vocabulary import Spelling, Vocabulary
from node_runtime.engine.core import ModelFacts
from node_runtime.handoff.lease import DEFAULT_LEASE_S
from prefill_node.config import PrefillNodeConfig
from router_node.config import RouterConfig
from router_node.placement_policy import PolicyName
from simulation.model import CONTEXT_TOKENS, PREFIX_GRANULARITY, VOCAB_SIZE, ModelKind
from simulation.tenants import TENANTS_FILE

MODEL_NAME = "simulated"
MAX_MESSAGE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeSettings:
    """What a compute host is configured with."""

    kind: ModelKind
    num_lcm_blocks: int
    max_batch_size: int
    token_budget: int
    max_waiting_requests: int = 64
    max_ready_ungranted: int = 8
    # Of decode nodes only.
    lease_s: float = DEFAULT_LEASE_S
    verifies: bool = False
    prefills_locally: bool = False
    max_local_prefill_tokens: int = 0
    # Of decode and fused nodes: completions are admitted without the headroom that is longer than any of them is here,
    # so that memory runs short and requests give way to others.
    is_overcommitted: bool = False
    # 1 or 2.
    num_tensor_ranks: int = 1

    def __str__(self) -> str:
        traits = [
            f"{self.num_lcm_blocks} LCM blocks",
            f"batches of {self.max_batch_size}",
            f"{self.token_budget} tokens a pass",
            *([f"lease {self.lease_s:g} s"] if self.lease_s != DEFAULT_LEASE_S else []),
            *(["verifies"] if self.verifies else []),
            *(["prefills locally when it must"] if self.prefills_locally else []),
            *([f"and what lacks {self.max_local_prefill_tokens} tokens"] if self.max_local_prefill_tokens else []),
            *(["overcommits its memory"] if self.is_overcommitted else []),
            *([f"{self.num_tensor_ranks} tensor ranks"] if self.num_tensor_ranks > 1 else []),
        ]
        return ", ".join(traits)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """What a router is configured with. By default it hedges nothing, and places by what it knows itself, so that a
    scenario takes the same course whatever nodes would tell.
    """

    placement_policy: PolicyName = "least_loaded"
    # 0: nodes are not followed.
    follow_interval_s: float = 0.0
    hedge_after_s: float = 0.0
    hedge_percentile: float = 0.0
    silence_timeout_s: float = 8.0
    has_tenants: bool = False

    @property
    def hedges(self) -> bool:
        return self.hedge_after_s > 0 or self.hedge_percentile > 0

    @property
    def follows(self) -> bool:
        return self.follow_interval_s > 0

    def __str__(self) -> str:
        traits = [
            f"places by {self.placement_policy}",
            *([f"follows nodes every {self.follow_interval_s:g} s"] if self.follows else []),
            *([f"hedges after {self.hedge_after_s:g} s"] if self.hedge_after_s else []),
            *([f"hedges what is later than {self.hedge_percentile:.0%}"] if self.hedge_percentile else []),
            f"bears {self.silence_timeout_s:g} s of silence",
            *(["has tenants"] if self.has_tenants else []),
        ]
        return ", ".join(traits)


PLAIN_ROUTER: Final = RouterSettings()


def model_facts(settings: ComputeSettings, arena_bytes: int, capacity_tokens: int) -> ModelFacts:
    return ModelFacts(
        name=MODEL_NAME,
        path="nowhere",
        fingerprint=settings.kind.value,
        vocab_size=VOCAB_SIZE,
        context_tokens=CONTEXT_TOKENS,
        prefix_granularity=PREFIX_GRANULARITY,
        arena_bytes=arena_bytes,
        num_lcm_blocks=settings.num_lcm_blocks,
        capacity_tokens=capacity_tokens,
        weight_formats=("float32",),
        weight_bytes=0,
        float32_weight_bytes=0,
        num_threads=1,
        device="cpu",
        is_batch_invariant=True,
        num_tensor_ranks=settings.num_tensor_ranks,
    )


@lru_cache(maxsize=256)
def prefill_config(name: str, host: str, port: int, settings: ComputeSettings) -> PrefillNodeConfig:
    return PrefillNodeConfig(
        node_id=name,
        host=host,
        port=port,
        model=MODEL_NAME,
        max_waiting_requests=settings.max_waiting_requests,
        max_ready_ungranted=settings.max_ready_ungranted,
        max_message_bytes=MAX_MESSAGE_BYTES,
    )


@lru_cache(maxsize=256)
def decode_config(
    name: str, host: str, port: int, settings: ComputeSettings, prefill: tuple[str, ...]
) -> DecodeNodeConfig:
    return DecodeNodeConfig(
        node_id=name,
        host=host,
        port=port,
        model=MODEL_NAME,
        prefill=prefill,
        handoff_lease_s=settings.lease_s,
        verify_transfers="all" if settings.verifies else "off",
        local_prefill="fallback" if settings.prefills_locally else "never",
        max_local_prefill_tokens=settings.max_local_prefill_tokens,
        max_waiting_requests=settings.max_waiting_requests,
        max_message_bytes=MAX_MESSAGE_BYTES,
    )


@lru_cache(maxsize=256)
def fused_config(name: str, host: str, port: int, settings: ComputeSettings) -> FusedNodeConfig:
    return FusedNodeConfig(
        node_id=name,
        host=host,
        port=port,
        model=MODEL_NAME,
        max_waiting_requests=settings.max_waiting_requests,
        max_message_bytes=MAX_MESSAGE_BYTES,
    )


@lru_cache(maxsize=256)
def router_config(
    name: str,
    host: str,
    port: int,
    settings: RouterSettings,
    prefill: tuple[str, ...],
    decode: tuple[str, ...],
    fused: tuple[str, ...],
) -> RouterConfig:
    return RouterConfig(
        node_id=name,
        host=host,
        port=port,
        model=MODEL_NAME,
        served_model_name=MODEL_NAME,
        prefill=prefill,
        decode=decode,
        fused=fused,
        poll_interval_s=1.0,
        idle_poll_interval_s=15.0,
        placement_policy=settings.placement_policy,
        follow_interval_s=settings.follow_interval_s,
        hedge_after_s=settings.hedge_after_s,
        hedge_percentile=settings.hedge_percentile,
        silence_timeout_s=settings.silence_timeout_s,
        tenants=str(TENANTS_FILE) if settings.has_tenants else "",
        max_message_bytes=MAX_MESSAGE_BYTES,
    )


@lru_cache(maxsize=1)
def simulated_tokenizer() -> Tokenizer:
    """A vocabulary whose token i is spelled `i` and a comma; prompts come as tokens."""
    return Tokenizer(
        TokenizerModel(
            backend=tokenizers.Tokenizer(tokenizers.models.BPE()),
            vocabulary=Vocabulary(
                tokens=tuple(f"{token}," for token in range(VOCAB_SIZE)),
                spelling=Spelling.SENTENCEPIECE,
                verbatim=frozenset(),
                silent=frozenset(),
            ),
            prefix_token_ids=(),
            suffix_token_ids=(),
            eos_token_ids=(),
            max_context_tokens=CONTEXT_TOKENS,
            chat_template=None,
        )
    )
