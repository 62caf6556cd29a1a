// Where a pool puts blocks, step by step against a model that keeps nothing but which slots are taken and the
// line of empty parents, and looks through all of them each time.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <random>
#include <type_traits>
#include <vector>

#include "cache/core/block_pool.h"
#include "cache/core/cache_block_ref.h"

namespace pdmesh {
namespace {

struct SlowPool {
  SlowPool(std::int32_t num_lcm_blocks, std::vector<std::int32_t> group_packing,
           std::vector<std::int32_t> group_shards)
      : packing(std::move(group_packing)), shards(std::move(group_shards)), parents(num_lcm_blocks + 1) {
    for (std::int32_t parent = 1; parent <= num_lcm_blocks; ++parent) {
      line.push_back(parent);
    }
  }

  struct Parent {
    std::int32_t group = -1;
    std::vector<bool> is_taken;

    std::int64_t num_taken() const { return std::count(is_taken.begin(), is_taken.end(), true); }
  };

  std::int64_t NumHoles(std::int32_t group) const {
    std::int64_t num_holes = 0;
    for (const Parent& parent : parents) {
      num_holes += parent.group == group ? packing[group] - parent.num_taken() : 0;
    }
    return num_holes;
  }

  bool CanAcquire(std::int32_t group, std::int64_t num_blocks) const {
    return NumHoles(group) + static_cast<std::int64_t>(line.size()) * packing[group] >= num_blocks;
  }

  // The parent and slot of one more block: by load of the bucket, bucket, fullness, parent, slot.
  std::int32_t Acquire(std::int32_t group, std::vector<std::int64_t>& loads) {
    if (NumHoles(group) == 0) {
      Parent& opened = parents[line.front()];
      line.pop_front();
      opened.group = group;
      opened.is_taken.assign(packing[group], false);
    }
    std::vector<std::vector<std::int64_t>> holes;
    for (std::size_t id = 1; id < parents.size(); ++id) {
      for (std::int32_t slot = 0; parents[id].group == group && slot < packing[group]; ++slot) {
        if (!parents[id].is_taken[slot]) {
          const std::int64_t bucket = slot % shards[group];
          holes.push_back(
              {loads[bucket], bucket, -parents[id].num_taken(), static_cast<std::int64_t>(id), slot});
        }
      }
    }
    const std::vector<std::int64_t>& best = *std::min_element(holes.begin(), holes.end());
    parents[best[3]].is_taken[best[4]] = true;
    ++loads[best[1]];
    return static_cast<std::int32_t>(1 + (best[3] - 1) * packing[group] + best[4]);
  }

  void Release(std::int32_t group, std::int32_t block_id) {
    const std::int32_t id = (block_id - 1) / packing[group] + 1;
    parents[id].is_taken[(block_id - 1) % packing[group]] = false;
    if (parents[id].num_taken() == 0) {
      parents[id].group = -1;
      line.push_back(id);
    }
  }

  std::vector<std::int32_t> packing;
  std::vector<std::int32_t> shards;
  std::vector<Parent> parents;  // by id
  std::deque<std::int32_t> line;
};

void ExpectEqualCounts(const BlockPool& pool, const SlowPool& slow) {
  ASSERT_EQ(pool.num_empty_lcm_blocks(), static_cast<std::int32_t>(slow.line.size()));
  for (std::int32_t group = 0; group < pool.num_groups(); ++group) {
    ASSERT_EQ(pool.num_free_slots(group), slow.NumHoles(group));
  }
}

// behaviour: A1, A2, A4, A5, A8, R4, R6
TEST(BlockPoolPlacement, EveryBlockLiesWhereASearchOfAllParentsWouldPutIt) {
  std::mt19937 chance(3);
  for (int history = 0; history < 30; ++history) {
    const std::vector<std::int32_t> shards =
        history % 2 == 0 ? std::vector<std::int32_t>{1, 1, 1} : std::vector<std::int32_t>{1, 2, 3};
    BlockPool pool(9, {1, 4, 6}, shards);
    SlowPool slow(9, {1, 4, 6}, shards);
    struct Held {
      std::int32_t group;
      CacheBlockRef block;
    };
    std::vector<Held> held;
    for (int step = 0; step < 200; ++step) {
      const auto group = static_cast<std::int32_t>(chance() % 3);
      if (chance() % 2 == 0 && !held.empty()) {
        const std::size_t victim = chance() % held.size();
        slow.Release(held[victim].group, held[victim].block.block_id());
        std::swap(held[victim], held.back());
        held.pop_back();
      } else {
        std::vector<std::int64_t> loads(static_cast<std::size_t>(shards[group]));
        for (std::int64_t& load : loads) {
          load = chance() % 3;
        }
        const std::int64_t num_blocks = 1 + chance() % 7;
        auto blocks = pool.Acquire(group, num_blocks, loads);
        ASSERT_EQ(blocks.has_value(), slow.CanAcquire(group, num_blocks));
        for (std::int64_t i = 0; blocks && i < num_blocks; ++i) {
          CacheBlockRef& block = (*blocks)[static_cast<std::size_t>(i)];
          ASSERT_EQ(block.block_id(), slow.Acquire(group, loads))
              << "history " << history << " step " << step;
          held.push_back({.group = group, .block = std::move(block)});
        }
      }
      ExpectEqualCounts(pool, slow);
    }
  }
}

std::vector<std::int32_t> IdsOf(const std::optional<std::vector<CacheBlockRef>>& blocks) {
  std::vector<std::int32_t> ids;
  for (const CacheBlockRef& block : *blocks) {
    ids.push_back(block.block_id());
  }
  return ids;
}

// behaviour: A1
TEST(BlockPoolPlacement, ParentsStandInLineByIdAndTheNullParentIsNeverHandedOut) {
  BlockPool pool(4, {1, 2});
  EXPECT_EQ(pool.num_empty_lcm_blocks(), 4);
  const auto first = pool.Acquire(0, 2);
  const auto second = pool.Acquire(1, 1);
  const auto third = pool.Acquire(0, 1);
  EXPECT_EQ(IdsOf(first), (std::vector<std::int32_t>{1, 2}));
  EXPECT_EQ(IdsOf(second), (std::vector<std::int32_t>{5})) << "parent 3";
  EXPECT_EQ(IdsOf(third), (std::vector<std::int32_t>{4}));
  EXPECT_FALSE(pool.CanAcquire(0, 1)) << "parent 0 is nobody's";
}

// behaviour: A3
TEST(BlockPoolPlacement, ReleasedParentsAreOpenedNextByAnyGroup) {
  BlockPool pool(4, {1, 1});
  std::vector<CacheBlockRef> blocks = std::move(*pool.Acquire(0, 4));
  blocks[0].Reset();
  blocks[2].Reset();
  const auto other = pool.Acquire(1, 1);
  const auto same = pool.Acquire(0, 1);
  EXPECT_EQ(IdsOf(other), (std::vector<std::int32_t>{1}));
  EXPECT_EQ(IdsOf(same), (std::vector<std::int32_t>{3}));
}

// behaviour: A4
TEST(BlockPoolPlacement, OfEquallyFullParentsTheLowestIsFilledAtItsLowestSlot) {
  BlockPool pool(3, {4});
  std::vector<CacheBlockRef> blocks = std::move(*pool.Acquire(0, 8));
  for (const std::size_t i : {7, 5, 3, 2}) {
    blocks[i].Reset();  // two holes each, in slots 2 and 3, and 1 and 3
  }
  EXPECT_EQ(IdsOf(pool.Acquire(0, 4)), (std::vector<std::int32_t>{3, 4, 6, 8}));
}

// behaviour: A7, R1
TEST(BlockPoolPlacement, GeometryIsFixedWithThePoolAndSurvivesItsLastBlock) {
  static_assert(!std::is_copy_assignable_v<BlockPool> && !std::is_move_assignable_v<BlockPool>);
  BlockPool pool(2, {6, 1}, {3, 1});
  for (int round = 0; round < 2; ++round) {
    EXPECT_EQ(pool.cache_blocks_per_lcm_block(0), 6);
    EXPECT_EQ(pool.shard_count(0), 3);
    EXPECT_EQ(pool.num_blocks(0), 12);
    EXPECT_EQ(pool.shard_count(1), 1);
    for (std::int32_t block_id = 1; block_id <= 12; ++block_id) {
      EXPECT_EQ(pool.BucketOf(0, block_id), (block_id - 1) % 3);
    }
    EXPECT_EQ(pool.Acquire(0, 12)->size(), 12u);
  }
}

// behaviour: A6
TEST(BlockPoolPlacementDeathTest, AnIdThatIsNoBlockHasNoPlace) {
  const BlockPool pool(2, {8});
  EXPECT_EQ(pool.PlaceOf(0, 16).lcm_block, 2);
  EXPECT_EQ(pool.PlaceOf(0, 16).slot, 7);
  EXPECT_DEATH((void)pool.PlaceOf(0, 0), "block id");
  EXPECT_DEATH((void)pool.PlaceOf(0, -8), "block id");
  EXPECT_DEATH((void)pool.PlaceOf(0, 17), "block id");
}

// behaviour: B1
TEST(CacheBlockRef, AnEmptyReferenceIsHarmless) {
  BlockPool pool(1, {1});
  CacheBlockRef empty;
  CacheBlockRef copy = empty;
  copy.swap(empty);
  copy = empty;
  copy.Reset();
  EXPECT_FALSE(copy);
  EXPECT_EQ(copy.block_id(), kNullBlockId);
  CacheBlockRef held = std::move(pool.Acquire(0, 1)->front());
  held.swap(empty);
  EXPECT_FALSE(held);
  EXPECT_EQ(pool.num_empty_lcm_blocks(), 0);
  empty = held;
  EXPECT_EQ(pool.num_empty_lcm_blocks(), 1) << "assigning nothing gives up what was held";
}

// behaviour: A11
TEST(CacheBlockRef, GivingAReferenceUpTwiceFreesOnce) {
  BlockPool pool(1, {2});
  std::vector<CacheBlockRef> blocks = std::move(*pool.Acquire(0, 2));
  blocks[0].Reset();
  blocks[0].Reset();
  EXPECT_EQ(pool.num_freed_slots(), 1u);
  EXPECT_EQ(pool.num_taken(0), 1);
}

// behaviour: B2
TEST(CacheBlockRef, CannotBeMadeFromABlockId) {
  static_assert(!std::is_constructible_v<CacheBlockRef, std::int32_t>);
  static_assert(!std::is_constructible_v<CacheBlockRef, BlockPool*, std::int32_t, std::int32_t>);
  static_assert(std::is_constructible_v<CacheBlockRef, const CacheBlockRef&>);
}

}  // namespace
}  // namespace pdmesh
