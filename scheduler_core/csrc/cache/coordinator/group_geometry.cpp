#include "cache/coordinator/group_geometry.h"

#include <algorithm>

#include "support/errors.h"

namespace pdmesh {

GroupGeometry::GroupGeometry(std::int32_t prefix_granularity, std::int32_t block_granularity)
    : prefix_granularity_(prefix_granularity), block_granularity_(block_granularity) {
  Ensure(block_granularity > 0 && prefix_granularity % block_granularity == 0,
         "block_granularity does not divide prefix_granularity");
}

AcquirePlan GroupGeometry::PlanAcquire(std::int64_t tail_room_tokens, const DenseGrowth& demand) const {
  const std::int64_t missing_tokens = demand.extent_tokens + demand.reserve_tokens - tail_room_tokens;
  const std::int64_t num_blocks = BlocksFor(std::max<std::int64_t>(0, missing_tokens));
  return {.num_blocks = num_blocks,
          .tail_room = tail_room_tokens + num_blocks * block_granularity_ - demand.extent_tokens};
}

}  // namespace pdmesh
