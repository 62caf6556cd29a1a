// CapacityModel: how much storage one request can ever need, and the longest request the pool can hold.
//
// The one home of these formulas: submission checks and start-up reports read them here. Answers depend on
// the configuration only, never on what is allocated at the moment.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/coordinator/group_geometry.h"
#include "scheduler/config.h"

namespace pdmesh {

class CapacityModel {
 public:
  // REQUIRES: config.Validate() passes.
  explicit CapacityModel(const SchedulerConfig& config);

  // Parents that a lone request of `num_tokens` occupies.
  std::int64_t LcmBlocksFor(std::int64_t num_tokens) const;
  // Largest request (prompt and completion) that fits the pool when nothing else is in it.
  std::int32_t max_request_tokens() const { return max_request_tokens_; }
  // Tokens that an admitted request reserves for its whole life.
  std::int64_t TokensToReserve(std::int64_t num_prompt_tokens, std::int64_t max_new_tokens) const;

 private:
  std::int32_t LargestFittingRequest() const;

  Role role_;
  std::int32_t verify_width_;
  std::int32_t num_lcm_blocks_;
  std::vector<GroupGeometry> geometries_;  // by group
  std::vector<std::int32_t> packing_;      // by group
  std::int32_t max_request_tokens_;
};

}  // namespace pdmesh
