#include "scheduler/chunking.h"

#include <algorithm>

namespace pdmesh {
namespace {

// The longest part of a chunk that ends on a grain boundary; from an unaligned begin, the first such part.
std::int32_t AlignedPart(std::int32_t prefix_granularity, std::int32_t begin_tokens,
                         std::int32_t chunk_tokens) {
  const std::int32_t into_grain = begin_tokens % prefix_granularity;
  if (into_grain == 0) {
    return chunk_tokens / prefix_granularity * prefix_granularity;
  }
  const std::int32_t to_boundary = prefix_granularity - into_grain;
  return chunk_tokens >= to_boundary ? to_boundary : 0;
}

}  // namespace

std::int32_t ReplayTokens(const ChunkRules& rules, std::int32_t hit_tokens) {
  return std::min(rules.replay_window_tokens, hit_tokens);
}

std::int32_t ChunkTokens(const ChunkRules& rules, const PromptRest& rest, std::int32_t num_budget_tokens) {
  const std::int32_t before_last_window = rest.num_left_tokens - rules.replay_window_tokens;
  const std::int32_t to_promotion = rest.promotion_tokens - rest.begin_tokens;
  const bool is_promotion_ahead = to_promotion > 0 && to_promotion <= before_last_window;
  std::int32_t chunk = std::min(rest.num_left_tokens, num_budget_tokens);
  if (is_promotion_ahead) {
    chunk = std::min(chunk, to_promotion);
  }
  if (chunk == rest.num_left_tokens) {
    return chunk;
  }
  chunk = std::max(0, std::min(chunk, before_last_window));
  const std::int32_t aligned = AlignedPart(rules.prefix_granularity, rest.begin_tokens, chunk);
  // Without states an aligned end is a wish: a budget below a grain must not hold the prompt up for ever.
  const bool is_aligned = rules.has_state || (is_promotion_ahead && aligned > 0);
  return is_aligned ? aligned : chunk;
}

}  // namespace pdmesh
