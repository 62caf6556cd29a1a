// CapacityModel: how much storage one request can ever need, and the longest request the pool can hold.
//
// The one home of these formulas: what an admission demands of each group, what a submission is checked
// against and what a pool is sized by are read here. Answers depend on the configuration only, never on what
// is allocated at the moment.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cache/coordinator/cache_coordinator.h"
#include "scheduler/config.h"

namespace pdmesh {

// A stretch of a prompt that one admission is for.
struct PromptSpan {
  std::int64_t begin_tokens;  // what lies before is computed or cached
  std::int64_t end_tokens;
  std::int64_t num_prompt_tokens;
  std::int64_t num_headroom_tokens;  // completion that is secured at once
  std::int64_t num_limit_tokens;     // prompt and completion that it can grow to
  bool is_local;                     // computed here, in chunks; else a peer fills all of it
  std::int64_t replay_tokens = 0;    // before `begin_tokens`, fed again

  bool completes_prompt() const { return end_tokens == num_prompt_tokens; }
};

class CapacityModel {
 public:
  // REQUIRES: config.ValidateSizing() passes.
  explicit CapacityModel(const SchedulerConfig& config);
  // To size a pool that does not exist yet; `config` need not say how many parents there are. Throws
  // ConfigError.
  static CapacityModel ForSizing(const SchedulerConfig& config);

  std::int32_t num_groups() const { return static_cast<std::int32_t>(geometries_.size()); }

  // Parents that a lone request of `num_tokens` occupies at most.
  std::int64_t LcmBlocksFor(std::int64_t num_tokens) const;
  // Blocks of one group that it holds at most at one time.
  std::int64_t BlocksFor(std::size_t group, std::int64_t num_tokens) const;
  // Blocks of one group that `num_requests` of up to `context_tokens` hold at most, `num_tokens` in all.
  std::int64_t ConcurrentBlocksFor(std::size_t group, std::int64_t num_requests, std::int64_t num_tokens,
                                   std::int64_t context_tokens) const;
  // Parents that all groups together need for that.
  std::int64_t LcmBlocksForConcurrency(std::int64_t num_requests, std::int64_t num_tokens,
                                       std::int64_t context_tokens) const;
  // Largest request (prompt and completion) that fits the pool when nothing else is in it.
  std::int32_t max_request_tokens() const { return max_request_tokens_; }
  // Where the room of a request ends at most: the largest request, and what is planned ahead for it.
  std::int64_t max_covered_tokens() const { return max_request_tokens_ + overlap_tokens_; }
  // What a submission is checked against the limit with: prompt and completion, of an undeclared one the
  // first step.
  std::int64_t TokensToCheck(std::int64_t num_prompt_tokens,
                             std::optional<std::int32_t> max_new_tokens) const;
  // Completion tokens that an admission secures; `num_wanted_tokens` may still be generated, nullopt if that
  // was not declared. Every retraction makes the next one less likely.
  std::int64_t HeadroomTokens(std::optional<std::int32_t> num_wanted_tokens,
                              std::int32_t num_retractions) const;
  // Room behind the end of a prompt that its last chunk, or its landing, needs in any case.
  std::int64_t StepTokens(std::int64_t num_prompt_tokens) const;

  // By group: what a first admission secures, and what a later chunk takes of it.
  std::vector<GroupDemand> FirstDemands(const PromptSpan& span) const;
  std::vector<Extent> NextExtents(const PromptSpan& span) const;
  // By group: the most a request holds once its prompt is computed, 0 for full groups.
  const std::vector<std::int64_t>& held_while_decoding() const { return held_while_decoding_; }

 private:
  std::int64_t HeldAtMost(const GroupGeometry& geometry, std::int64_t num_prompt_tokens,
                          std::int64_t num_limit_tokens, bool is_local) const;
  std::int64_t HeldWhileDecoding(const GroupGeometry& geometry) const;
  std::int64_t WindowHeldAtMost(const GroupGeometry& geometry, std::int64_t num_prompt_tokens,
                                bool is_local) const;
  std::int64_t StatesHeldAtMost(const GroupGeometry& geometry, std::int64_t num_prompt_tokens,
                                bool is_local) const;
  std::int64_t StateReserveTokens(const GroupGeometry& geometry) const;
  Extent ExtentOf(std::size_t group, const PromptSpan& span) const;
  std::int32_t LargestFittingRequest() const;

  Role role_;
  std::int64_t prefix_granularity_;
  std::int64_t token_budget_;
  std::int64_t verify_width_;
  std::int64_t overlap_tokens_;  // what rows planned ahead of results may feed behind the last token
  bool enable_prefix_cache_;
  std::int32_t num_lcm_blocks_;
  std::vector<GroupGeometry> geometries_;  // by group
  std::vector<std::int32_t> packing_;      // by group
  std::vector<bool> is_replayable_;        // by group
  std::vector<std::int64_t> held_while_decoding_;
  std::int32_t max_request_tokens_;
};

}  // namespace pdmesh
