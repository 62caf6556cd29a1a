// How much of a prompt the next row computes. Pure arithmetic on tokens: knows no request, no cache and no
// plan.
#pragma once

#include <cstdint>

namespace pdmesh {

struct ChunkRules {
  std::int32_t prefix_granularity;
  bool has_state;                     // snapshots are taken on grain boundaries
  std::int32_t replay_window_tokens;  // the largest window of a replayable group, 0 without one
};

// What is left of a prompt.
struct PromptRest {
  std::int32_t begin_tokens;      // where the next chunk begins
  std::int32_t num_left_tokens;   // up to the prompt's end
  std::int32_t promotion_tokens;  // position that others share the prompt up to; not ahead of `begin_tokens`
                                  // for none
};

// Tokens before a hit that its first chunk feeds again.
std::int32_t ReplayTokens(const ChunkRules& rules, std::int32_t hit_tokens);

// New tokens of the next chunk, 0 if the budget is too small for one in this round.
//
// A chunk that does not complete its prompt ends on a grain boundary beside a state group, and where a
// promotion is ahead if the budget reaches one. Off a boundary it first goes to the next one. A last chunk
// computes a replayable window whole, so that what follows sees all of it; a promotion inside that window is
// passed over.
std::int32_t ChunkTokens(const ChunkRules& rules, const PromptRest& rest, std::int32_t num_budget_tokens);

}  // namespace pdmesh
