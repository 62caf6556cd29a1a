// GroupGeometry: the token arithmetic of one group. The only place where tokens become block counts.
#pragma once

#include <cstdint>

#include "cache/core/acquire_plan.h"
#include "cache/core/block_table.h"
#include "support/int_math.h"

namespace pdmesh {

// What a group needs for the round ahead, relative to the current fill of its table.
struct DenseGrowth {
  std::int64_t extent_tokens;   // consumed now
  std::int64_t reserve_tokens;  // held beyond the extent, nobody else's
};

class GroupGeometry {
 public:
  // REQUIRES: block_granularity > 0 and divides prefix_granularity.
  GroupGeometry(std::int32_t prefix_granularity, std::int32_t block_granularity);

  std::int32_t block_granularity() const { return block_granularity_; }
  std::int32_t slots_per_grain() const { return prefix_granularity_ / block_granularity_; }
  std::int64_t BlocksFor(std::int64_t num_tokens) const { return CeilDiv(num_tokens, block_granularity_); }

  // Growth uses the room behind the last token first.
  AcquirePlan PlanAcquire(std::int64_t tail_room_tokens, const DenseGrowth& demand) const;

 private:
  std::int32_t prefix_granularity_;
  std::int32_t block_granularity_;
};

}  // namespace pdmesh
