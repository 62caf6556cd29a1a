#include "cache/allocator/group_allocator.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "cache/coordinator/group_geometry.h"

namespace pdmesh {
namespace {

using Ids = std::vector<std::int32_t>;

Ids IdsOf(const BlockTable& table) {
  return {table.block_ids().begin(), table.block_ids().end()};
}

class GroupAllocatorTest : public testing::Test {
 protected:
  // Appends room for `demand` and returns the fresh ids.
  Ids Grow(BlockTable& table, const DenseGrowth& demand) {
    Ids fresh_ids;
    allocator_.Acquire(table, geometry_.PlanAcquire(table.tail_room(), demand), fresh_ids);
    return fresh_ids;
  }

  BlockPool pool_{8, {1}};
  GroupAllocator allocator_{pool_, 0};
  GroupGeometry geometry_{4, 4, AttentionKind::kSlidingWindow, 5};
};

// behaviour: H2
TEST_F(GroupAllocatorTest, HitsBringNoRoomAndHolesBeforeThemCountAsGivenUp) {
  std::vector<CacheBlockRef> hits = std::move(*pool_.Acquire(0, 2));
  BlockTable table;
  allocator_.Claim(table, 2, std::move(hits));
  EXPECT_EQ(IdsOf(table), (Ids{0, 0, 1, 2}));
  EXPECT_EQ(table.tail_room(), 0);
  EXPECT_EQ(table.num_reclaimed_slots(), 2);
  EXPECT_EQ(Grow(table, {.extent_tokens = 1, .reserve_tokens = 0}), (Ids{3}));
}

// behaviour: H2
TEST_F(GroupAllocatorTest, HitsAreClaimedIntoAnEmptyTableOnly) {
  BlockTable table;
  Grow(table, {.extent_tokens = 4, .reserve_tokens = 0});
  EXPECT_DEATH(allocator_.Claim(table, 0, {}), "not empty");
}

// behaviour: H2
TEST_F(GroupAllocatorTest, AReserveIsHeldUntilItIsConsumedOrTheTableEnds) {
  BlockTable table;
  EXPECT_EQ(Grow(table, {.extent_tokens = 1, .reserve_tokens = 8}).size(), 3u);
  EXPECT_EQ(table.tail_room(), 11);
  EXPECT_EQ(pool_.num_empty_lcm_blocks(), 5);
  EXPECT_EQ(Grow(table, {.extent_tokens = 8, .reserve_tokens = 0}), Ids{});
  EXPECT_EQ(table.tail_room(), 3);
  table.Clear();
  EXPECT_EQ(pool_.num_empty_lcm_blocks(), 8);
}

// behaviour: H1
TEST_F(GroupAllocatorTest, ATableGrowsIntoItsRoomFirstAndNeverMovesASlot) {
  BlockTable table;
  Grow(table, {.extent_tokens = 2, .reserve_tokens = 0});
  EXPECT_EQ(IdsOf(table), (Ids{1}));
  EXPECT_EQ(table.tail_room(), 2);
  Grow(table, {.extent_tokens = 7, .reserve_tokens = 0});
  EXPECT_EQ(IdsOf(table), (Ids{1, 2, 3}));
  EXPECT_EQ(table.tail_room(), 3);
  Grow(table, {.extent_tokens = 0, .reserve_tokens = 0});
  EXPECT_EQ(IdsOf(table), (Ids{1, 2, 3}));
  EXPECT_EQ(table.tail_room(), 3);
}

// behaviour: H5
TEST_F(GroupAllocatorTest, GivingUpWhatExpiredIsCappedRepeatableAndLeavesTheRoomAlone) {
  BlockTable table;
  Grow(table, {.extent_tokens = 11, .reserve_tokens = 0});
  const CacheBlockRef published = table.block(0);
  EXPECT_TRUE(allocator_.ReclaimExpired(table, 2));
  EXPECT_EQ(IdsOf(table), (Ids{0, 0, 3}));
  EXPECT_EQ(table.tail_room(), 1);
  EXPECT_EQ(pool_.num_taken(0), 2) << "a block that somebody else holds stays";
  EXPECT_FALSE(allocator_.ReclaimExpired(table, 2));
  EXPECT_FALSE(allocator_.ReclaimExpired(table, 1));
  EXPECT_TRUE(allocator_.ReclaimExpired(table, 100));
  EXPECT_EQ(IdsOf(table), (Ids{0, 0, 0}));
  EXPECT_FALSE(allocator_.ReclaimExpired(table, 100));
}

}  // namespace
}  // namespace pdmesh
