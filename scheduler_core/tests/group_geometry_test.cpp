#include "cache/coordinator/group_geometry.h"

#include <gtest/gtest.h>

namespace pdmesh {
namespace {

// behaviour: G3, H1
TEST(GroupGeometry, GrowthUsesTheRoomBehindTheLastTokenFirst) {
  const GroupGeometry geometry(8, 4);
  const AcquirePlan first = geometry.PlanAcquire(0, {.extent_tokens = 2, .reserve_tokens = 0});
  EXPECT_EQ(first.num_blocks, 1);
  EXPECT_EQ(first.tail_room, 2);
  const AcquirePlan second = geometry.PlanAcquire(first.tail_room, {.extent_tokens = 7, .reserve_tokens = 0});
  EXPECT_EQ(second.num_blocks, 2);
  EXPECT_EQ(second.tail_room, 3);
  const AcquirePlan third = geometry.PlanAcquire(second.tail_room, {.extent_tokens = 0, .reserve_tokens = 0});
  EXPECT_EQ(third.num_blocks, 0);
  EXPECT_EQ(third.tail_room, 3);
}

// behaviour: G3, H2
TEST(GroupGeometry, AReserveIsRealBlocksAndIsConsumedWithoutAcquiring) {
  const GroupGeometry geometry(4, 4);
  const AcquirePlan first = geometry.PlanAcquire(0, {.extent_tokens = 1, .reserve_tokens = 8});
  EXPECT_EQ(first.num_blocks, 3);
  EXPECT_EQ(first.tail_room, 11);
  const AcquirePlan next = geometry.PlanAcquire(first.tail_room, {.extent_tokens = 8, .reserve_tokens = 0});
  EXPECT_EQ(next.num_blocks, 0);
  EXPECT_EQ(next.tail_room, 3);
}

// behaviour: H4
TEST(GroupGeometry, OneTokenPerBlockIsAsGoodAsAnyOther) {
  const GroupGeometry geometry(1, 1);
  EXPECT_EQ(geometry.slots_per_grain(), 1);
  EXPECT_EQ(geometry.PlanAcquire(0, {.extent_tokens = 5, .reserve_tokens = 1}).num_blocks, 6);
}

// behaviour: H5
TEST(GroupGeometry, BlocksExpireWhenNoLaterQuerySeesThem) {
  const GroupGeometry sliding(2, 2, AttentionKind::kSlidingWindow, 4);
  const std::vector<std::pair<std::int64_t, std::int64_t>> expired = {
      {4, 0}, {5, 1}, {6, 1}, {7, 2}, {11, 4}};
  for (const auto& [num_computed, num_blocks] : expired) {
    EXPECT_EQ(sliding.ExpiredBlocksAt(num_computed), num_blocks) << num_computed;
  }
  EXPECT_EQ(GroupGeometry(4, 4, AttentionKind::kState).ExpiredBlocksAt(16), 3);
  EXPECT_EQ(GroupGeometry(4, 4).ExpiredBlocksAt(1000), 0);
}

// behaviour: G3
TEST(GroupGeometry, ASuffixLeavesHolesBelowItsFirstSlot) {
  const GroupGeometry geometry(4, 2, AttentionKind::kSlidingWindow, 4);
  const AcquirePlan plan =
      geometry.PlanSuffix(4, {.first_slot = 6, .extent_tokens = 16, .reserve_tokens = 1});
  EXPECT_EQ(plan.num_holes, 2);
  EXPECT_EQ(plan.num_blocks, 3);
  EXPECT_EQ(plan.tail_room, 2);
  const AcquirePlan nothing =
      geometry.PlanSuffix(9, {.first_slot = 6, .extent_tokens = 17, .reserve_tokens = 1});
  EXPECT_EQ(nothing.num_holes, 0);
  EXPECT_EQ(nothing.num_blocks, 0);
  EXPECT_EQ(nothing.tail_room, 1);
}

}  // namespace
}  // namespace pdmesh
