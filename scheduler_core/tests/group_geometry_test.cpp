#include "cache/coordinator/group_geometry.h"

#include <gtest/gtest.h>

namespace pdmesh {
namespace {

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

TEST(GroupGeometry, AReserveIsRealBlocksAndIsConsumedWithoutAcquiring) {
  const GroupGeometry geometry(4, 4);
  const AcquirePlan first = geometry.PlanAcquire(0, {.extent_tokens = 1, .reserve_tokens = 8});
  EXPECT_EQ(first.num_blocks, 3);
  EXPECT_EQ(first.tail_room, 11);
  const AcquirePlan next = geometry.PlanAcquire(first.tail_room, {.extent_tokens = 8, .reserve_tokens = 0});
  EXPECT_EQ(next.num_blocks, 0);
  EXPECT_EQ(next.tail_room, 3);
}

TEST(GroupGeometry, OneTokenPerBlockIsAsGoodAsAnyOther) {
  const GroupGeometry geometry(1, 1);
  EXPECT_EQ(geometry.slots_per_grain(), 1);
  EXPECT_EQ(geometry.PlanAcquire(0, {.extent_tokens = 5, .reserve_tokens = 1}).num_blocks, 6);
}

}  // namespace
}  // namespace pdmesh
