#include "cache/coordinator/admission_planner.h"

#include <gtest/gtest.h>

#include "cache/core/cache_block_ref.h"
#include "cache/prefix/prefix_hasher.h"

namespace pdmesh {
namespace {

// A pool with one index per group, filled by hand.
class Cache {
 public:
  Cache(std::int32_t num_lcm_blocks, std::vector<std::int32_t> packing) : pool(num_lcm_blocks, packing) {
    for (std::int32_t group = 0; group < static_cast<std::int32_t>(packing.size()); ++group) {
      indexes.push_back(std::make_unique<PrefixCacheIndex>(pool, group));
    }
  }

  // Publishes one block per epoch and leaves it to the cache alone. Returns the blocks while they are held.
  std::vector<CacheBlockRef> Publish(std::int32_t group, const std::vector<std::uint64_t>& epochs) {
    std::vector<CacheBlockRef> blocks =
        std::move(*pool.Acquire(group, static_cast<std::int64_t>(epochs.size())));
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      const CacheKey key{.name_space = 0,
                         .group = group,
                         .digest = HashGrain({}, std::vector<std::int32_t>{next_content++}, {}),
                         .grain_offset = 0};
      indexes[static_cast<std::size_t>(group)]->Register(key, blocks[i], epochs[i], 4);
    }
    return blocks;
  }

  std::optional<std::vector<std::pair<std::int32_t, std::int32_t>>> Plan(
      std::vector<std::int64_t> need) const {
    std::vector<const PrefixCacheIndex*> views;
    for (const auto& index : indexes) {
      views.push_back(index.get());
    }
    const auto victims = PlanEvictions(pool, need, views);
    if (!victims) {
      return std::nullopt;
    }
    std::vector<std::pair<std::int32_t, std::int32_t>> named;
    for (const EvictionVictim& victim : *victims) {
      named.emplace_back(victim.group, victim.entry->block.block_id());
    }
    return named;
  }

  BlockPool pool;
  std::vector<std::unique_ptr<PrefixCacheIndex>> indexes;
  std::int32_t next_content = 0;
};

using Victims = std::vector<std::pair<std::int32_t, std::int32_t>>;

// behaviour: G11
TEST(AdmissionPlanner, EvictsNothingWhileEmptyParentsAreLeft) {
  Cache cache(3, {1});
  cache.Publish(0, {1, 2});
  EXPECT_EQ(cache.Plan({1}), Victims{});
}

TEST(AdmissionPlanner, EvictsTheOldestEpochs) {
  Cache cache(3, {1});
  cache.Publish(0, {3, 1, 2});
  EXPECT_EQ(cache.Plan({2}), (Victims{{0, 2}, {0, 3}}));
}

// behaviour: G7
TEST(AdmissionPlanner, TakesNoBlockThatSomeoneHolds) {
  Cache cache(2, {1});
  const std::vector<CacheBlockRef> held = cache.Publish(0, {1});
  cache.Publish(0, {2});
  EXPECT_EQ(cache.Plan({1}), (Victims{{0, 2}}));
  EXPECT_EQ(cache.Plan({2}), std::nullopt);
}

// behaviour: G10
TEST(AdmissionPlanner, LeavesOutVictimsThatTurnOutNotToBeNeeded) {
  // Parent 1 (two children of group 0) holds epochs 1 and 3, parent 2 epoch 2. Group 1 needs a whole parent.
  Cache cache(2, {2, 1});
  cache.Publish(0, {1, 3});
  cache.Publish(0, {2});
  EXPECT_EQ(cache.Plan({0, 1}), (Victims{{0, 3}}));
}

// behaviour: G11
TEST(AdmissionPlanner, AParentChangesGroupOnlyWhenAllItsChildrenAreGone) {
  Cache cache(1, {2, 1});
  const std::vector<CacheBlockRef> blocks = cache.Publish(0, {1, 2});
  EXPECT_EQ(cache.Plan({0, 1}), std::nullopt);
}

// behaviour: G11, G12
TEST(AdmissionPlanner, HolesAreFilledBeforeAnythingIsEvicted) {
  // Three parents of two children: two half-full and cached, one empty.
  Cache cache(3, {2, 1});
  {
    std::vector<CacheBlockRef> fillers = std::move(*cache.pool.Acquire(0, 1));
    cache.Publish(0, {1});
    std::vector<CacheBlockRef> more = std::move(*cache.pool.Acquire(0, 1));
    cache.Publish(0, {2});
  }
  ASSERT_EQ(cache.pool.num_empty_lcm_blocks(), 1);
  ASSERT_EQ(cache.pool.num_free_slots(0), 2);
  EXPECT_EQ(cache.Plan({2, 0}), Victims{});
  EXPECT_EQ(cache.Plan({2, 2}), (Victims{{0, 2}, {0, 4}}));
}

// behaviour: G8
TEST(AdmissionPlanner, MergesTheOrdersOfAllGroups) {
  Cache cache(4, {1, 1});
  cache.Publish(0, {2, 4});
  cache.Publish(1, {1, 3});
  EXPECT_EQ(cache.Plan({3, 0}), (Victims{{1, 3}, {0, 1}, {1, 4}}));
}

// behaviour: G4
TEST(AdmissionPlanner, WithoutAnythingToEvictItFitsIfTheParentsThatHolesLeaveOutAreThere) {
  Cache cache(3, {2, 1, 4});
  const std::vector<CacheBlockRef> in_first = std::move(*cache.pool.Acquire(0, 1));
  // One hole of the first group, two empty parents.
  for (const auto& [need, fits] : std::vector<std::pair<std::vector<std::int64_t>, bool>>{
           {{1, 2, 0}, true},
           {{2, 1, 0}, true},
           {{3, 1, 0}, true},
           {{3, 2, 0}, false},
           {{4, 1, 0}, false},
           {{5, 0, 0}, true},
           {{1, 1, 4}, true},
           {{1, 1, 5}, false},
           {{0, 3, 0}, false},
       }) {
    EXPECT_EQ(cache.Plan(need), fits ? std::optional(Victims()) : std::nullopt)
        << need[0] << " " << need[1] << " " << need[2];
  }
}

// behaviour: G8
TEST(AdmissionPlanner, OfEqualRankTheLowerGroupAndBlockGoFirst) {
  Cache cache(3, {1, 1});
  cache.Publish(1, {5});
  cache.Publish(0, {5, 5});
  EXPECT_EQ(cache.Plan({3, 0}), (Victims{{0, 2}, {0, 3}, {1, 1}}));
}

// behaviour: G11
TEST(AdmissionPlanner, OneChildThatIsHeldBlocksItsParentForOtherGroups) {
  Cache cache(2, {2, 1});
  std::vector<CacheBlockRef> blocks = cache.Publish(0, {1, 2});
  blocks[1].Reset();
  const std::vector<CacheBlockRef> rest = std::move(*cache.pool.Acquire(1, 1));
  EXPECT_EQ(cache.Plan({0, 1}), std::nullopt);
  EXPECT_EQ(cache.Plan({1, 0}), (Victims{{0, 2}})) << "its own group may have the slot";
  blocks[0].Reset();
  EXPECT_EQ(cache.Plan({0, 1}), (Victims{{0, 1}, {0, 2}}));
}

}  // namespace
}  // namespace pdmesh
