// A request that has blocks: what its next row takes, and the growth behind it.
#include <algorithm>
#include <utility>

#include "scheduler/scheduler.h"

namespace pdmesh {

// Results of earlier plans are out no deeper than plans may overlap, and no row of it is in this one.
bool Scheduler::CanTakeRow(const Request& request) const {
  return request.num_results_out() <= config_.overlap_depth && request.last_plan != num_plans_;
}

// What the request's next decode row feeds, 0 if it gets none in this round.
std::int32_t Scheduler::DecodeWidth(const Request& request) const {
  return CanTakeRow(request) ? std::clamp(request.num_open_tokens(), 0, config_.verify_width) : 0;
}

// What the next decode row needs beyond what is covered. It may begin as late as the results that are out can
// move it, so it is covered up to where it ends then.
std::int64_t Scheduler::DecodeGrowthTokens(const Request& request) const {
  const std::int64_t end =
      std::int64_t{request.num_tokens()} - 1 + request.results_out().max_tokens() + DecodeWidth(request);
  return std::max<std::int64_t>(0, end - HoldingsOf(request.state)->num_covered_tokens);
}

// Room in the full groups for what a step takes, or for what the runtime reserved. What a reservation would
// need beyond the longest request is left out, so that it can be had. Other groups were promised all they
// hold.
std::int64_t Scheduler::DecodeRoomTokens(const Request& request) const {
  const auto* decoding = std::get_if<Decoding>(&request.state);
  const std::int64_t most =
      capacity_model_.max_covered_tokens() - HoldingsOf(request.state)->num_covered_tokens;
  const std::int64_t num_reserved = decoding == nullptr ? 0 : decoding->reserve_tokens;
  return std::max(DecodeGrowthTokens(request), std::min(num_reserved, most));
}

// False, with nothing changed, while a full group needs a block that cannot be had.
// REQUIRES: DecodeWidth(request) > 0 and room in the round.
bool Scheduler::PlanDecodeRow(Round& round, Request& request) {
  const std::int32_t num_input_tokens = DecodeWidth(request);
  const std::int64_t growth_tokens = DecodeGrowthTokens(request);
  Holdings& secured = *HoldingsOf(request.state);
  if (!coordinator_.Secure(secured.tables, secured.num_computed_tokens, DecodeRoomTokens(request),
                           round.plan().zero_blocks)) {
    round.NoteBlocked(request);
    return false;
  }
  const bool is_first = request.phase() != Phase::kDecoding;  // the same line, so no queue changes
  if (auto* done = std::get_if<PrefillDone>(&request.state)) {
    request.state = StartDecoding(std::move(*done));
  } else if (auto* awaiting = std::get_if<AwaitingResult>(&request.state)) {
    request.state = StartDecoding(std::move(*awaiting));
  }
  auto& decoding = std::get<Decoding>(request.state);
  decoding.reserve_tokens = 0;
  Holdings& holdings = decoding.holdings;
  PublishPending(request, holdings, is_first ? PrefillStoreScope() : DecodeStoreScope());
  coordinator_.Step(holdings.tables, holdings.num_computed_tokens, growth_tokens, round.plan().zero_blocks);
  holdings.num_covered_tokens += growth_tokens;
  if (is_first && coordinator_.has_open_group()) {
    holdings.reserve.LowerTo(capacity_model_.held_while_decoding());  // there will be no more chunks
  }
  round.AddDecodeRow(request, num_input_tokens, DecodeCostTokens());
  decoding.results_out.Add(num_input_tokens);
  request.last_plan = num_plans_;
  return true;
}

// New tokens of the next chunk, 0 if the round has too little budget left for one.
std::int32_t Scheduler::ChunkTokens(const Request& request, std::int32_t begin,
                                    std::int32_t num_budget_tokens, std::int32_t promotion_tokens) const {
  return pdmesh::ChunkTokens(chunk_rules_,
                             {.begin_tokens = begin,
                              .num_left_tokens = request.num_prompt_tokens - begin,
                              .promotion_tokens = promotion_tokens},
                             num_budget_tokens);
}

std::int32_t Scheduler::ReplayTokens(std::int32_t hit_tokens) const {
  return pdmesh::ReplayTokens(chunk_rules_, hit_tokens);
}

PromptSpan Scheduler::SpanOf(const Request& request, std::int32_t begin, std::int32_t end, bool is_local,
                             std::int32_t replay_tokens) const {
  const std::int64_t num_step_end_tokens =
      request.num_prompt_tokens + capacity_model_.StepTokens(request.num_prompt_tokens);
  const std::int64_t num_limit_tokens =
      config_.role == Role::kPrefill ? num_step_end_tokens
                                     : std::max<std::int64_t>(num_step_end_tokens, request.limit_tokens);
  return {.begin_tokens = begin,
          .end_tokens = end,
          .num_prompt_tokens = request.num_prompt_tokens,
          .num_headroom_tokens = HeadroomTokens(request),
          .num_limit_tokens = num_limit_tokens,
          .is_local = is_local,
          .replay_tokens = replay_tokens};
}

// The prompt is computed up to `end`, or will be when it has landed. A chunk leaves a snapshot on the last
// grain boundary it reached; a peer sends the final state alone.
void Scheduler::NoteComputed(const Request& request, Holdings& holdings, std::int32_t end,
                             bool is_local) const {
  const std::int32_t boundary = end / config_.prefix_granularity * config_.prefix_granularity;
  const std::int32_t last_boundary =
      request.num_prompt_tokens / config_.prefix_granularity * config_.prefix_granularity;
  const bool has_snapshot = is_local ? boundary > holdings.num_computed_tokens : boundary == end;
  holdings.checkpoint_tokens = has_snapshot ? boundary : 0;
  holdings.boundary_tokens = boundary;
  holdings.boundary_kind = boundary == last_boundary ? BoundaryKind::kEndpoint : BoundaryKind::kChunk;
  if (is_local && end == holdings.promotion_tokens) {
    holdings.boundary_kind = BoundaryKind::kPromoted;
  }
  if (end >= holdings.promotion_tokens) {
    holdings.promotion_tokens = 0;
  }
  holdings.num_computed_tokens = end;
  holdings.num_covered_tokens = end;
}

// The next chunk of an admitted prompt. False if it gets none in this round.
// REQUIRES: the round has room and the request can take a row.
bool Scheduler::PlanChunk(Round& round, Request& request) {
  auto& prefilling = std::get<Prefilling>(request.state);
  Holdings& holdings = prefilling.holdings;
  const std::int32_t begin = holdings.num_computed_tokens;
  const std::int32_t chunk =
      ChunkTokens(request, begin, round.num_budget_tokens(), holdings.promotion_tokens);
  if (chunk == 0) {
    return false;
  }
  const RequestProgress progress =
      ProgressOf(request, holdings, PrefillStoreScope(), config_.enable_prefix_cache);
  const auto admission = coordinator_.AdmitNext(
      holdings.tables, holdings.epoch, progress, begin,
      capacity_model_.NextExtents(SpanOf(request, begin, begin + chunk, /*is_local=*/true)));
  if (!admission) {  // the last chunk wants more than the prompt, or a transfer holds what would expire
    round.NoteBlocked(request);
    return false;
  }
  holdings.num_published_grains = progress.end_grain;
  DescribePublished(request);
  round.AddZeroBlocks(admission->fresh_ids);
  NoteComputed(request, holdings, begin + chunk, /*is_local=*/true);
  round.AddPrefillRow(request, begin, chunk);
  round.NoteLaterChunk();
  NoteChunkPlanned(request);
  return true;
}

// The chunk whose row was added last: its result brings the first token if it completes the prompt.
void Scheduler::NoteChunkPlanned(Request& request) {
  auto& prefilling = std::get<Prefilling>(request.state);
  const bool is_last = prefilling.holdings.num_computed_tokens == request.num_prompt_tokens;
  prefilling.results_out.Add(is_last ? 1 : 0);
  request.last_plan = num_plans_;
  if (is_last) {
    SetState(request, CompletePrompt(std::move(prefilling)));
  }
}

}  // namespace pdmesh
