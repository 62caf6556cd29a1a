#include "scheduler/capacity_model.h"

#include <algorithm>
#include <limits>

#include "support/int_math.h"

namespace pdmesh {

namespace {

// A completion is rarely longer: most requests are secured whole by their first admission.
constexpr std::int64_t kHeadroomTokens = 4096;

}  // namespace

CapacityModel::CapacityModel(const SchedulerConfig& config)
    : role_(config.role),
      prefix_granularity_(config.prefix_granularity),
      token_budget_(config.token_budget),
      verify_width_(config.verify_width),
      overlap_tokens_(
          config.role == Role::kPrefill ? 0 : std::int64_t{config.overlap_depth} * config.verify_width),
      enable_prefix_cache_(config.enable_prefix_cache),
      num_lcm_blocks_(config.num_lcm_blocks) {
  for (const CacheGroupSpec& spec : MakeSpecsFromConfig(config)) {
    geometries_.emplace_back(config.prefix_granularity, spec.block_granularity, spec.kind,
                             spec.window_tokens);
    packing_.push_back(spec.cache_blocks_per_lcm_block);
    is_replayable_.push_back(spec.is_replayable);
    held_while_decoding_.push_back(HeldWhileDecoding(geometries_.back()));
  }
  max_request_tokens_ = LargestFittingRequest();
}

CapacityModel CapacityModel::ForSizing(const SchedulerConfig& config) {
  config.ValidateSizing();
  return CapacityModel(config);
}

std::int64_t CapacityModel::LcmBlocksFor(std::int64_t num_tokens) const {
  std::int64_t num_lcm_blocks = 0;
  for (std::size_t group = 0; group < geometries_.size(); ++group) {
    num_lcm_blocks += CeilDiv(BlocksFor(group, num_tokens), packing_[group]);
  }
  return num_lcm_blocks;
}

// A decode node must hold a request whichever way its prompt comes.
std::int64_t CapacityModel::BlocksFor(std::size_t group, std::int64_t num_tokens) const {
  const GroupGeometry& geometry = geometries_[group];
  if (num_tokens == 0 && geometry.kind() == AttentionKind::kState) {
    return 0;
  }
  const std::int64_t num_prompt_tokens = std::max<std::int64_t>(0, num_tokens - verify_width_);
  const std::int64_t local = HeldAtMost(geometry, num_prompt_tokens, num_tokens, /*is_local=*/true);
  return role_ == Role::kDecode
             ? std::max(local, HeldAtMost(geometry, num_prompt_tokens, num_tokens, /*is_local=*/false))
             : local;
}

// Every request sits at the worst offset in its blocks, and one prompt is in the middle of a chunk. On a
// decode node all may be landing at once, each with its claimed run beside its tail, and one is computed
// here.
std::int64_t CapacityModel::ConcurrentBlocksFor(std::size_t group, std::int64_t num_requests,
                                                std::int64_t num_tokens, std::int64_t context_tokens) const {
  const GroupGeometry& geometry = geometries_[group];
  const std::int64_t whole =
      geometry.BlocksFor(num_tokens) +
      num_requests * geometry.BlocksFor(geometry.block_granularity() - 1 + overlap_tokens_);
  if (geometry.kind() == AttentionKind::kFull) {
    return whole;
  }
  if (geometry.kind() == AttentionKind::kState) {
    return num_requests * BlocksFor(group, context_tokens);
  }
  if (role_ != Role::kDecode) {
    const std::int64_t resident_tokens =
        std::min<std::int64_t>(geometry.window_tokens() - 1, context_tokens) + verify_width_ +
        overlap_tokens_;
    const std::int64_t num_in_chunk =
        geometry.num_lookback_blocks() + geometry.BlocksFor(std::min(token_budget_, num_tokens));
    return num_requests * geometry.BlocksAtWorst(resident_tokens) + num_in_chunk;
  }
  const std::int64_t landing = std::min(geometry.BlocksFor(context_tokens + overlap_tokens_),
                                        WindowHeldAtMost(geometry, context_tokens, /*is_local=*/false));
  const std::int64_t excess =
      num_requests > 0 ? std::max<std::int64_t>(0, BlocksFor(group, context_tokens) - landing) : 0;
  return std::min(whole, num_requests * landing + excess);
}

std::int64_t CapacityModel::LcmBlocksForConcurrency(std::int64_t num_requests, std::int64_t num_tokens,
                                                    std::int64_t context_tokens) const {
  std::int64_t num_lcm_blocks = 0;
  for (std::size_t group = 0; group < geometries_.size(); ++group) {
    num_lcm_blocks +=
        CeilDiv(ConcurrentBlocksFor(group, num_requests, num_tokens, context_tokens), packing_[group]);
  }
  return num_lcm_blocks;
}

std::int64_t CapacityModel::TokensToCheck(std::int64_t num_prompt_tokens,
                                          std::optional<std::int32_t> max_new_tokens) const {
  if (role_ == Role::kPrefill) {
    return num_prompt_tokens + verify_width_;
  }
  return num_prompt_tokens + std::max<std::int64_t>(max_new_tokens.value_or(0), verify_width_);
}

std::int64_t CapacityModel::HeadroomTokens(std::optional<std::int32_t> num_wanted_tokens,
                                           std::int32_t num_retractions) const {
  if (role_ == Role::kPrefill) {  // generates nothing, and its blocks come free through hand-overs only
    return verify_width_;
  }
  return std::min(std::int64_t{num_wanted_tokens.value_or(0)},
                  kHeadroomTokens * (1 + std::int64_t{num_retractions}));
}

// A retracted request that stands near the longest possible one has less than a whole step before it.
std::int64_t CapacityModel::StepTokens(std::int64_t num_prompt_tokens) const {
  return std::min(verify_width_, max_request_tokens_ - num_prompt_tokens);
}

std::vector<GroupDemand> CapacityModel::FirstDemands(const PromptSpan& span) const {
  std::vector<GroupDemand> demands;
  for (std::size_t group = 0; group < geometries_.size(); ++group) {
    const GroupGeometry& geometry = geometries_[group];
    if (geometry.kind() == AttentionKind::kFull) {
      const std::int64_t step_tokens = span.completes_prompt() ? StepTokens(span.num_prompt_tokens) : 0;
      const std::int64_t ahead_tokens = span.num_headroom_tokens > 0 ? overlap_tokens_ : 0;
      const std::int64_t rest_tokens =
          span.num_prompt_tokens - span.end_tokens + span.num_headroom_tokens + ahead_tokens;
      demands.push_back({.extent = DenseGrowth{.extent_tokens = span.end_tokens - span.begin_tokens,
                                               .reserve_tokens = std::max(step_tokens, rest_tokens)}});
    } else {
      demands.push_back({.extent = ExtentOf(group, span),
                         .num_promised_blocks = HeldAtMost(geometry, span.num_prompt_tokens,
                                                           span.num_limit_tokens, span.is_local)});
    }
  }
  return demands;
}

std::vector<Extent> CapacityModel::NextExtents(const PromptSpan& span) const {
  std::vector<Extent> extents;
  for (std::size_t group = 0; group < geometries_.size(); ++group) {
    extents.push_back(ExtentOf(group, span));
  }
  return extents;
}

// A chunk materialises the rows of its tokens; of a state only the last snapshot on a grain boundary inside
// the chunk, if there is one, and everything from there to the end. A landing brings the rows that the first
// decode step can see and the final state. Where the prompt ends, blocks for what follows stand behind it.
Extent CapacityModel::ExtentOf(std::size_t group, const PromptSpan& span) const {
  const GroupGeometry& geometry = geometries_[group];
  const bool is_state = geometry.kind() == AttentionKind::kState;
  std::int64_t reserve_tokens = 0;
  if (span.completes_prompt()) {
    reserve_tokens = is_state ? StateReserveTokens(geometry) : StepTokens(span.num_prompt_tokens);
  }
  if (is_state) {
    const std::int64_t checkpoint = span.end_tokens / prefix_granularity_ * prefix_granularity_;
    const bool is_internal = span.is_local && span.begin_tokens < checkpoint;
    return SparseSuffix{.first_slot = geometry.SlotOfLast(is_internal ? checkpoint : span.end_tokens),
                        .extent_tokens = span.end_tokens,
                        .reserve_tokens = reserve_tokens};
  }
  if (span.is_local && is_replayable_[group]) {  // nothing before what is fed again
    return SparseSuffix{.first_slot = (span.begin_tokens - span.replay_tokens) / geometry.block_granularity(),
                        .extent_tokens = span.end_tokens,
                        .reserve_tokens = reserve_tokens};
  }
  if (!span.is_local) {
    return SparseSuffix{.first_slot = geometry.ExpiredBlocksAt(span.end_tokens),
                        .extent_tokens = span.end_tokens,
                        .reserve_tokens = reserve_tokens};
  }
  return DenseGrowth{.extent_tokens = span.end_tokens - span.begin_tokens, .reserve_tokens = reserve_tokens};
}

// So that the first step over a block boundary finds its block; a prefill node makes no such step.
std::int64_t CapacityModel::StateReserveTokens(const GroupGeometry& geometry) const {
  return role_ == Role::kPrefill
             ? 0
             : std::max<std::int64_t>(geometry.block_granularity(), verify_width_ + overlap_tokens_);
}

std::int64_t CapacityModel::HeldWhileDecoding(const GroupGeometry& geometry) const {
  switch (geometry.kind()) {
    case AttentionKind::kFull:
      return 0;
    case AttentionKind::kSlidingWindow:
      return geometry.BlocksAtWorst(geometry.window_tokens() - 1 + verify_width_ + overlap_tokens_);
    case AttentionKind::kState:
      return 1 + geometry.BlocksFor(StateReserveTokens(geometry));
  }
  return 0;
}

std::int64_t CapacityModel::HeldAtMost(const GroupGeometry& geometry, std::int64_t num_prompt_tokens,
                                       std::int64_t num_limit_tokens, bool is_local) const {
  const std::int64_t end_tokens = num_limit_tokens + overlap_tokens_;
  switch (geometry.kind()) {
    case AttentionKind::kFull:
      return geometry.BlocksFor(end_tokens);
    case AttentionKind::kSlidingWindow:
      return std::min(geometry.BlocksFor(end_tokens),
                      WindowHeldAtMost(geometry, num_prompt_tokens, is_local));
    case AttentionKind::kState:
      return std::min(
          geometry.BlocksFor(std::max(end_tokens, num_prompt_tokens + StateReserveTokens(geometry))),
          StatesHeldAtMost(geometry, num_prompt_tokens, is_local));
  }
  return 0;
}

// A chunk reads the window before its first token and may begin anywhere in a block; behind its last token
// stands one step. A landing holds the claimed prefix apart from the tail that its peer fills.
std::int64_t CapacityModel::WindowHeldAtMost(const GroupGeometry& geometry, std::int64_t num_prompt_tokens,
                                             bool is_local) const {
  const std::int64_t lookback_tokens = geometry.window_tokens() - 1;
  const std::int64_t ahead_tokens = verify_width_ + overlap_tokens_;
  if (!is_local) {
    return geometry.num_lookback_blocks() + geometry.BlocksAtWorst(lookback_tokens + ahead_tokens);
  }
  return geometry.BlocksAtWorst(lookback_tokens + std::min(token_budget_, num_prompt_tokens) + ahead_tokens);
}

// A chunk reads one snapshot, writes one on a grain boundary and one at its end, which lies at most a grain
// behind that boundary. With few tokens of budget left a round, any prompt may be cut into two chunks.
std::int64_t CapacityModel::StatesHeldAtMost(const GroupGeometry& geometry, std::int64_t num_prompt_tokens,
                                             bool is_local) const {
  const std::int64_t reserve_tokens = StateReserveTokens(geometry);
  const auto num_written = [&](std::int64_t num_tail_tokens) {
    return 1 + geometry.BlocksFor(num_tail_tokens + reserve_tokens);
  };
  if (!is_local) {
    return num_written(0);
  }
  const auto tail_behind = [&](std::int64_t num_tokens) {
    return std::max<std::int64_t>(0, std::min({prefix_granularity_ - 1, token_budget_ - prefix_granularity_,
                                               num_prompt_tokens - num_tokens}));
  };
  const std::int64_t only_chunk =
      (enable_prefix_cache_ ? 1 : 0) + num_written(tail_behind(prefix_granularity_));
  const bool can_be_cut = num_prompt_tokens > prefix_granularity_;
  return can_be_cut ? std::max(only_chunk, 1 + num_written(tail_behind(2 * prefix_granularity_)))
                    : only_chunk;
}

std::int32_t CapacityModel::LargestFittingRequest() const {
  std::int64_t fits = 0;
  std::int64_t too_long = std::int64_t{std::numeric_limits<std::int32_t>::max()};
  while (too_long - fits > 1) {
    const std::int64_t middle = fits + (too_long - fits) / 2;
    (LcmBlocksFor(middle) <= num_lcm_blocks_ ? fits : too_long) = middle;
  }
  return static_cast<std::int32_t>(fits);
}

}  // namespace pdmesh
