"""What simulated nodes are configured with: small caches, one fake model, and configurations that are made once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import tokenizers

from decode_node.config import DecodeNodeConfig
from model_runtime.text.tokenizer import Tokenizer
from model_runtime.text.tokenizer_model import TokenizerModel
from model_runtime.text.vocabulary import Spelling, Vocabulary
from node_runtime.engine.core import ModelFacts
from prefill_node.config import PrefillNodeConfig
from router_node.config import RouterConfig
from simulation.model import CONTEXT_TOKENS, PREFIX_GRANULARITY, VOCAB_SIZE, ModelKind

MODEL_NAME = "simulated"
_MAX_MESSAGE_BYTES = 1 << 20


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
    lease_s: float = 4.0
    verifies: bool = False
    prefills_locally: bool = False
    max_local_prefill_tokens: int = 0


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
        max_message_bytes=_MAX_MESSAGE_BYTES,
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
        max_message_bytes=_MAX_MESSAGE_BYTES,
    )


@lru_cache(maxsize=256)
def router_config(name: str, host: str, port: int, prefill: tuple[str, ...], decode: tuple[str, ...]) -> RouterConfig:
    return RouterConfig(
        node_id=name,
        host=host,
        port=port,
        model=MODEL_NAME,
        served_model_name=MODEL_NAME,
        prefill=prefill,
        decode=decode,
        poll_interval_s=1.0,
        idle_poll_interval_s=15.0,
        max_message_bytes=_MAX_MESSAGE_BYTES,
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
