#include "cache/core/block_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <utility>

#include "cache/core/block_table.h"
#include "cache/core/cache_block_ref.h"

namespace pdmesh {
namespace {

using Refs = std::vector<CacheBlockRef>;

std::vector<std::int32_t> IdsOf(const Refs& refs) {
  std::vector<std::int32_t> ids;
  for (const CacheBlockRef& ref : refs) {
    ids.push_back(ref.block_id());
  }
  return ids;
}

Refs Take(BlockPool& pool, std::int32_t group, std::int64_t num_blocks) {
  auto blocks = pool.Acquire(group, num_blocks);
  EXPECT_TRUE(blocks.has_value());
  return std::move(*blocks);
}

class Recorder final : public SharingObserver {
 public:
  void OnSoleOwner(std::int32_t block_id) noexcept override { events.push_back(block_id); }
  void OnShared(std::int32_t block_id) noexcept override { events.push_back(-block_id); }
  std::vector<std::int32_t> events;
};

// behaviour: A2
TEST(BlockPool, FreedParentsAreReopenedInTheOrderTheyBecameEmpty) {
  BlockPool pool(5, {1, 1});
  Refs blocks = Take(pool, 0, 4);
  blocks[2].Reset();
  blocks[0].Reset();
  EXPECT_EQ(IdsOf(Take(pool, 1, 3)), (std::vector<std::int32_t>{5, 3, 1}));
}

// behaviour: A4
TEST(BlockPool, FillsTheFullestPartialParentBeforeOpeningAnother) {
  BlockPool pool(4, {3});
  Refs blocks = Take(pool, 0, 4);  // parent 1 full, parent 2 holds one
  blocks[1].Reset();               // one hole in parent 1
  const Refs more = Take(pool, 0, 4);
  EXPECT_EQ(IdsOf(more), (std::vector<std::int32_t>{2, 5, 6, 7}));  // parents 1, 2, 2, 3
}

// Two shards hold the blocks cyclically: odd ids lie in bucket 0, even ones in bucket 1.
// behaviour: R5
TEST(BlockPool, ABalancedPlacementNeverOpensAParentBeforeTheHolesAreUsed) {
  BlockPool pool(3, {4}, {2});
  const Refs first = Take(pool, 0, 3);
  EXPECT_EQ(IdsOf(first), (std::vector<std::int32_t>{1, 2, 3}));
  EXPECT_EQ(IdsOf(Take(pool, 0, 2)), (std::vector<std::int32_t>{4, 5}));
}

// behaviour: R1, R4
TEST(BlockPool, TakesTheLeastLoadedBucketThatHasAHole) {
  BlockPool pool(3, {4}, {2});
  Refs all = Take(pool, 0, 8);
  EXPECT_EQ(pool.BucketOf(0, 7), 0);
  EXPECT_EQ(pool.BucketOf(0, 8), 1);
  for (const std::size_t i : {0, 1, 3, 6}) {
    all[i].Reset();  // holes: 1, 2 and 4 in parent 1, 7 in parent 2
  }
  auto blocks = pool.Acquire(0, 1, {5, 0});
  EXPECT_EQ(IdsOf(*blocks), (std::vector<std::int32_t>{2})) << "bucket 1";
  auto more = pool.Acquire(0, 3, {0, 0});
  EXPECT_EQ(IdsOf(*more), (std::vector<std::int32_t>{7, 4, 1}))
      << "the fullest parent of each bucket in turn";
}

// behaviour: R6
TEST(BlockPool, EveryHoleOfAllShardsCountsAndAFailureChangesNothing) {
  BlockPool pool(2, {6}, {3});
  Refs blocks = Take(pool, 0, 11);
  EXPECT_FALSE(pool.Acquire(0, 2, {0, 0, 9}));
  EXPECT_EQ(pool.num_free_slots(0), 1);
  EXPECT_EQ(IdsOf(*pool.Acquire(0, 1, {0, 0, 9})), (std::vector<std::int32_t>{12})) << "load never forbids";
}

TEST(BlockPool, TheShardCountDividesThePacking) {
  EXPECT_THROW(BlockPool(2, {3}, {2}), std::invalid_argument);
}

TEST(BlockPool, ShardsAreReusedInAnyOrderOfReleases) {
  BlockPool pool(40, {6}, {3});
  std::vector<Refs> holders;
  std::uint32_t state = 1;
  for (int step = 0; step < 2000; ++step) {
    state = state * 1664525u + 1013904223u;
    if (state >> 31 && !holders.empty()) {
      holders.erase(holders.begin() + static_cast<std::ptrdiff_t>((state >> 8) % holders.size()));
    } else if (auto blocks = pool.Acquire(0, 1 + (state >> 16) % 9, {0, 0, 0})) {
      holders.push_back(std::move(*blocks));
    }
    std::vector<std::int32_t> ids;
    for (const Refs& refs : holders) {
      const auto held = IdsOf(refs);
      ids.insert(ids.end(), held.begin(), held.end());
    }
    std::sort(ids.begin(), ids.end());
    ASSERT_TRUE(std::adjacent_find(ids.begin(), ids.end()) == ids.end()) << "a block was given out twice";
    ASSERT_EQ(static_cast<std::int64_t>(ids.size()), pool.num_taken(0));
  }
  holders.clear();
  EXPECT_EQ(pool.num_empty_lcm_blocks(), 40);
}

// behaviour: A6
TEST(BlockPool, NumbersBlocksByParentAndSlot) {
  BlockPool pool(2, {8, 1});
  EXPECT_EQ(IdsOf(Take(pool, 0, 9)), (std::vector<std::int32_t>{1, 2, 3, 4, 5, 6, 7, 8, 9}));
  const Refs in_first_parent = Take(pool, 0, 1);
  EXPECT_EQ(IdsOf(Take(pool, 1, 1)), (std::vector<std::int32_t>{2}));
  EXPECT_EQ(pool.PlaceOf(0, 9).lcm_block, 2);
  EXPECT_EQ(pool.PlaceOf(0, 9).slot, 0);
}

// behaviour: A5
TEST(BlockPool, AcquiresAllOrNothing) {
  BlockPool pool(2, {2, 1});
  const Refs one = Take(pool, 0, 1);
  EXPECT_FALSE(pool.Acquire(0, 4).has_value());
  EXPECT_EQ(pool.num_free_slots(0), 1);
  EXPECT_EQ(pool.num_empty_lcm_blocks(), 1);
  EXPECT_FALSE(pool.Acquire(1, 2).has_value()) << "a hole in a foreign parent never helps";
  EXPECT_EQ(Take(pool, 0, 3).size(), 3u);
}

// behaviour: A2
TEST(BlockPool, TheLastChildUnbindsItsParent) {
  BlockPool pool(1, {2, 4});
  {
    Refs blocks = Take(pool, 0, 2);
    blocks[0].Reset();
    EXPECT_FALSE(pool.CanAcquire(1, 1));
    EXPECT_EQ(pool.num_free_slots(0), 1);
  }
  EXPECT_EQ(pool.num_free_slots(0), 0);
  EXPECT_EQ(Take(pool, 1, 4).size(), 4u);
}

// behaviour: A6
TEST(BlockPool, RefusesIdsBeyondInt32) {
  EXPECT_THROW(BlockPool(1 << 30, {4}), std::invalid_argument);
}

// behaviour: A11
TEST(BlockPoolDeathTest, DestroyingAPoolWithLiveReferencesEndsTheProcess) {
  EXPECT_DEATH(
      {
        auto pool = std::make_unique<BlockPool>(1, std::vector<std::int32_t>{1});
        Refs blocks = Take(*pool, 0, 1);
        pool.reset();
      },
      "references");
}

// behaviour: B1
TEST(CacheBlockRef, TheLastReferenceFreesItsSlot) {
  BlockPool pool(1, {1});
  Refs blocks = Take(pool, 0, 1);
  CacheBlockRef copy = blocks[0];
  blocks.clear();
  EXPECT_EQ(pool.num_empty_lcm_blocks(), 0);
  CacheBlockRef moved = std::move(copy);
  EXPECT_FALSE(copy);  // NOLINT(bugprone-use-after-move): a moved-from reference is empty
  moved = *&moved;
  EXPECT_EQ(moved.block_id(), 1);
  EXPECT_EQ(pool.num_empty_lcm_blocks(), 0);
  moved = CacheBlockRef();
  EXPECT_EQ(pool.num_empty_lcm_blocks(), 1);
}

// behaviour: B1
TEST(CacheBlockRef, AssignmentReleasesWhatItHeld) {
  BlockPool pool(2, {1});
  Refs blocks = Take(pool, 0, 2);
  blocks[0] = blocks[1];
  EXPECT_EQ(pool.num_empty_lcm_blocks(), 1);
  EXPECT_EQ(blocks[0].block_id(), 2);
}

// behaviour: B1
TEST(CacheBlockRef, SwapAndMoveNeverPassThroughFree) {
  BlockPool pool(2, {1});
  Refs blocks = Take(pool, 0, 2);
  blocks[0].swap(blocks[1]);
  CacheBlockRef third = std::move(blocks[0]);
  EXPECT_EQ(pool.num_freed_slots(), 0u);
  EXPECT_EQ(third.block_id(), 2);
}

// behaviour: A9
TEST(BlockPool, ReportsWhenAWatchedBlockIsSharedAndWhenItsWatcherIsAlone) {
  BlockPool pool(1, {1});
  Recorder recorder;
  pool.SetObserver(0, &recorder);
  Refs blocks = Take(pool, 0, 1);
  CacheBlockRef watcher = blocks[0];
  pool.Watch(watcher);
  EXPECT_TRUE(recorder.events.empty());
  blocks.clear();
  EXPECT_EQ(pool.num_watched_only_lcm_blocks(0), 1);
  const CacheBlockRef again = watcher;
  const CacheBlockRef third = watcher;
  EXPECT_EQ(recorder.events, (std::vector<std::int32_t>{1, -1}));
  EXPECT_EQ(pool.num_watched_only_lcm_blocks(0), 0);
  pool.Unwatch(watcher);
}

TEST(BlockPool, AParentIsWatchedOnlyWhileEveryChildIs) {
  BlockPool pool(1, {2});
  Recorder recorder;
  pool.SetObserver(0, &recorder);
  Refs blocks = Take(pool, 0, 2);
  pool.Watch(blocks[0]);
  EXPECT_EQ(pool.num_watched_only_lcm_blocks(0), 0);
  blocks[1].Reset();
  EXPECT_EQ(pool.num_watched_only_lcm_blocks(0), 1);
  Refs sibling = Take(pool, 0, 1);
  EXPECT_EQ(pool.num_watched_only_lcm_blocks(0), 0);
  sibling.clear();
  EXPECT_EQ(pool.num_watched_only_lcm_blocks(0), 1);
  pool.Unwatch(blocks[0]);
  EXPECT_EQ(pool.num_watched_only_lcm_blocks(0), 0);
}

// behaviour: H1, H3
TEST(BlockTable, KeepsAbsoluteSlotsAndTurnsReleasedOnesIntoHoles) {
  BlockPool pool(3, {1});
  BlockTable table;
  for (CacheBlockRef& block : Take(pool, 0, 3)) {
    table.Append(block);
  }
  table.ReleaseFront(2);
  EXPECT_TRUE(std::ranges::equal(table.block_ids(), std::vector<std::int32_t>{0, 0, 3}));
  EXPECT_EQ(pool.num_empty_lcm_blocks(), 2);
  table.Clear();
  table.Clear();
  EXPECT_EQ(table.num_slots(), 0);
  EXPECT_EQ(pool.num_empty_lcm_blocks(), 3);
}

// behaviour: H3
TEST(BlockTable, ReleasesFromTheLastSlotToTheFirst) {
  BlockPool pool(3, {1});
  {
    BlockTable table;
    for (CacheBlockRef& block : Take(pool, 0, 3)) {
      table.Append(std::move(block));
    }
  }
  EXPECT_EQ(IdsOf(Take(pool, 0, 3)), (std::vector<std::int32_t>{3, 2, 1}));
}

}  // namespace
}  // namespace pdmesh
