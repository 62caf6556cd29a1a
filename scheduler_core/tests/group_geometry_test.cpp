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

// behaviour: E4
TEST(GroupGeometry, AWindowLooksBackToTheBlocksItsFirstQuerySees) {
  const auto lookback = [](std::int32_t window_tokens) {
    return GroupGeometry(4, 4, AttentionKind::kSlidingWindow, window_tokens).num_lookback_blocks();
  };
  EXPECT_EQ(lookback(10), 3);
  EXPECT_EQ(lookback(9), 2);
  EXPECT_EQ(lookback(5), 1);
  EXPECT_EQ(lookback(2), 1);
  EXPECT_EQ(lookback(1), 0);
  EXPECT_EQ(GroupGeometry(4, 4, AttentionKind::kState).num_lookback_blocks(), 1);
  EXPECT_EQ(GroupGeometry(4, 4).num_lookback_blocks(), 0);
}

// behaviour: G3
TEST(GroupGeometry, ADemandIsItsExtentAndItsReserve) {
  const GroupGeometry geometry(4, 4);
  const auto num_blocks = [&](std::int64_t tail_room, std::int64_t extent, std::int64_t reserve) {
    return geometry.PlanAcquire(tail_room, {.extent_tokens = extent, .reserve_tokens = reserve}).num_blocks;
  };
  EXPECT_EQ(num_blocks(0, 5, 0), 2);
  EXPECT_EQ(num_blocks(3, 5, 0), 1);
  EXPECT_EQ(num_blocks(3, 2, 1), 0);
  EXPECT_EQ(num_blocks(3, 2, 2), 1);
  EXPECT_EQ(num_blocks(3, 2, 6), 2);
  EXPECT_EQ(num_blocks(3, 0, 0), 0);
  const AcquirePlan suffix =
      geometry.PlanSuffix(0, {.first_slot = 2, .extent_tokens = 13, .reserve_tokens = 4});
  EXPECT_EQ(suffix.num_holes, 2);
  EXPECT_EQ(suffix.num_blocks, 3) << "ceil(17 / 4) - 2";
}

}  // namespace
}  // namespace pdmesh
