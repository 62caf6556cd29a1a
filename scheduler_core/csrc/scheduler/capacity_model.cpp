#include "scheduler/capacity_model.h"

#include <algorithm>
#include <limits>

#include "support/int_math.h"

namespace pdmesh {

CapacityModel::CapacityModel(const SchedulerConfig& config)
    : role_(config.role), verify_width_(config.verify_width), num_lcm_blocks_(config.num_lcm_blocks) {
  for (const CacheGroupConfig& group : config.cache_groups) {
    geometries_.emplace_back(config.prefix_granularity, group.block_granularity);
    packing_.push_back(group.cache_blocks_per_lcm_block);
  }
  max_request_tokens_ = LargestFittingRequest();
}

std::int64_t CapacityModel::LcmBlocksFor(std::int64_t num_tokens) const {
  std::int64_t num_lcm_blocks = 0;
  for (std::size_t group = 0; group < geometries_.size(); ++group) {
    num_lcm_blocks += CeilDiv(geometries_[group].BlocksFor(num_tokens), packing_[group]);
  }
  return num_lcm_blocks;
}

std::int64_t CapacityModel::TokensToReserve(std::int64_t num_prompt_tokens,
                                            std::int64_t max_new_tokens) const {
  if (role_ == Role::kPrefill) {
    return num_prompt_tokens + verify_width_;
  }
  return num_prompt_tokens + std::max<std::int64_t>(max_new_tokens, verify_width_);
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
