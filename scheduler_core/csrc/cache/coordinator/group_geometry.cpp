#include "cache/coordinator/group_geometry.h"

#include <algorithm>

#include "support/errors.h"

namespace pdmesh {
namespace {

// The state after the last token, and the one before it that the next token continues from.
constexpr std::int32_t kStateWindowTokens = 2;

}  // namespace

GroupGeometry::GroupGeometry(std::int32_t prefix_granularity, std::int32_t block_granularity,
                             AttentionKind kind, std::int32_t window_tokens)
    : prefix_granularity_(prefix_granularity),
      block_granularity_(block_granularity),
      kind_(kind),
      window_tokens_(kind == AttentionKind::kState ? kStateWindowTokens : window_tokens) {
  Ensure(block_granularity > 0 && prefix_granularity % block_granularity == 0,
         "block_granularity does not divide prefix_granularity");
  Ensure(kind != AttentionKind::kSlidingWindow || window_tokens > 0, "a sliding group has no window");
}

AcquirePlan GroupGeometry::PlanAcquire(std::int64_t tail_room_tokens, const DenseGrowth& demand) const {
  const std::int64_t missing_tokens = demand.extent_tokens + demand.reserve_tokens - tail_room_tokens;
  const std::int64_t num_blocks = BlocksFor(std::max<std::int64_t>(0, missing_tokens));
  return {.num_holes = 0,
          .num_blocks = num_blocks,
          .tail_room = tail_room_tokens + num_blocks * block_granularity_ - demand.extent_tokens};
}

AcquirePlan GroupGeometry::PlanSuffix(std::int64_t num_slots, const SparseSuffix& demand) const {
  const std::int64_t first_slot = std::max(num_slots, demand.first_slot);
  const std::int64_t end_slot = std::max(first_slot, BlocksFor(demand.extent_tokens + demand.reserve_tokens));
  return {.num_holes = first_slot - num_slots,
          .num_blocks = end_slot - first_slot,
          .tail_room = end_slot * block_granularity_ - demand.extent_tokens};
}

AcquirePlan GroupGeometry::PlanExtent(const BlockTable& table, const Extent& extent) const {
  if (const auto* growth = std::get_if<DenseGrowth>(&extent)) {
    return PlanAcquire(table.tail_room(), *growth);
  }
  return PlanSuffix(table.num_slots(), std::get<SparseSuffix>(extent));
}

}  // namespace pdmesh
