"""Names of spans and attributes.

Source: OpenTelemetry semantic conventions for generative AI; `pdmesh.*` where they define nothing.
"""

from __future__ import annotations

from typing import Final

GEN_AI_OPERATION_NAME: Final = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME: Final = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_K: Final = "gen_ai.request.top_k"
GEN_AI_REQUEST_TOP_P: Final = "gen_ai.request.top_p"
GEN_AI_REQUEST_SEED: Final = "gen_ai.request.seed"
GEN_AI_RESPONSE_ID: Final = "gen_ai.response.id"
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
ERROR_TYPE: Final = "error.type"

OPERATION_CHAT: Final = "chat"
OPERATION_TEXT_COMPLETION: Final = "text_completion"
PROVIDER_PDMESH: Final = "pdmesh"

PDMESH_REQUEST_ID: Final = "pdmesh.request_id"
# Whose token the request came with, where the router tells clients apart.
PDMESH_TENANT: Final = "pdmesh.tenant"
PDMESH_ADAPTER: Final = "pdmesh.adapter"
PDMESH_NODE_ID: Final = "pdmesh.node_id"
PDMESH_HANDOFF_ID: Final = "pdmesh.handoff_id"
PDMESH_DECODE_NODE: Final = "pdmesh.decode_node"
PDMESH_PREFILL_NODE: Final = "pdmesh.prefill_node"
PDMESH_CACHED_TOKENS_PREFILL_DEVICE: Final = "pdmesh.cached_tokens.prefill_device"
PDMESH_CACHED_TOKENS_DECODE_DEVICE: Final = "pdmesh.cached_tokens.decode_device"
PDMESH_CACHED_TOKENS_HOST: Final = "pdmesh.cached_tokens.host"
PDMESH_CACHED_TOKENS_STORAGE: Final = "pdmesh.cached_tokens.storage"
# Whoever asked for the work ended it early, as the router does when the text has reached a stop string.
PDMESH_CANCELLED: Final = "pdmesh.cancelled"
# Tokens of the completion that an earlier attempt on other nodes had generated.
PDMESH_RESUMED_TOKENS: Final = "pdmesh.resumed_tokens"
# Why a decode node computed the prompt itself: "short" or "fallback".
PDMESH_LOCAL_PREFILL: Final = "pdmesh.local_prefill"
PDMESH_ATTEMPT: Final = "pdmesh.attempt"
# From the request to its first token, as the router measured it.
PDMESH_TIME_TO_FIRST_TOKEN_MS: Final = "pdmesh.time_to_first_token_ms"
PDMESH_SAMPLE: Final = "pdmesh.sample"
# What became of a second attempt beside a slow first one: "won", "lost" or "failed".
PDMESH_HEDGE_OUTCOME: Final = "pdmesh.hedge_outcome"
PDMESH_RETRACTIONS: Final = "pdmesh.retractions"
PDMESH_TRANSFER_BYTES: Final = "pdmesh.transfer.bytes"
PDMESH_TRANSFER_RUNS: Final = "pdmesh.transfer.runs"
PDMESH_TRANSFER_BLOCKS: Final = "pdmesh.transfer.blocks"
# Followed by a dot and the id of a cache group.
PDMESH_TRANSFER_BLOCKS_OF_GROUP: Final = "pdmesh.transfer.blocks_of"
# The part of the transfer span in which at least one write was outstanding.
PDMESH_TRANSFER_BUSY_MS: Final = "pdmesh.transfer.busy_ms"
# In that part.
PDMESH_TRANSFER_BYTES_PER_S: Final = "pdmesh.transfer.bytes_per_s"
# Why a request was placed where it was. Durations are the estimates that the decision was made with.
PDMESH_PLACE_POLICY: Final = "pdmesh.place.policy"
PDMESH_PLACE_REASON: Final = "pdmesh.place.reason"
PDMESH_PLACE_CANDIDATES: Final = "pdmesh.place.candidates"
PDMESH_PLACE_RUNNERS_UP: Final = "pdmesh.place.runners_up"
PDMESH_PLACE_PREFILL_CACHED_TOKENS: Final = "pdmesh.place.prefill_cached_tokens"
PDMESH_PLACE_DECODE_CACHED_TOKENS: Final = "pdmesh.place.decode_cached_tokens"
PDMESH_PLACE_QUEUE_MS: Final = "pdmesh.place.queue_ms"
PDMESH_PLACE_COMPUTE_MS: Final = "pdmesh.place.compute_ms"
PDMESH_PLACE_TRANSFER_MS: Final = "pdmesh.place.transfer_ms"
PDMESH_PLACE_DECODE_MS: Final = "pdmesh.place.decode_ms"
PDMESH_PLACE_WORK_MS: Final = "pdmesh.place.work_ms"
PDMESH_PLACE_SHARE_MS: Final = "pdmesh.place.share_ms"

SPAN_TOKENIZE: Final = "pdmesh.tokenize"
SPAN_PLACE: Final = "pdmesh.place"
SPAN_FAILED_ATTEMPT: Final = "pdmesh.failed_attempt"
SPAN_SAMPLE: Final = "pdmesh.sample"
SPAN_HEDGE: Final = "pdmesh.hedge"
SPAN_DECODE_REQUEST: Final = "pdmesh.decode.request"
SPAN_DECODE_QUEUE: Final = "pdmesh.decode.queue"
SPAN_DECODE_GENERATE: Final = "pdmesh.decode.generate"
SPAN_HANDOFF: Final = "pdmesh.handoff"
SPAN_PREFILL_REQUEST: Final = "pdmesh.prefill.request"
SPAN_PREFILL_QUEUE: Final = "pdmesh.prefill.queue"
SPAN_PREFILL_COMPUTE: Final = "pdmesh.prefill.compute"
SPAN_TRANSFER: Final = "pdmesh.transfer"
