#include "cache/prefix/prefix_matcher.h"

#include <gtest/gtest.h>

#include "cache/prefix/prefix_hasher.h"

namespace pdmesh {
namespace {

// Lookback of a window over blocks of four tokens.
constexpr std::int64_t LookbackOf(std::int64_t window_tokens) {
  return (window_tokens - 1 + 3) / 4;
}

class SlidingWindowMatcherTest : public testing::Test {
 protected:
  void Cache(const std::vector<std::int64_t>& slots) {
    for (const std::int64_t slot : slots) {
      const CacheBlockRef block = std::move(pool_.Acquire(0, 1)->front());
      index_.Register(keys_.KeyOf(digests_, slot), block, 1, slot);
    }
  }

  // {first slot of the run, boundary}
  std::pair<std::int64_t, std::int64_t> Match(std::int64_t num_grains,
                                              std::int64_t num_lookback_slots) const {
    const GroupHits hits =
        SlidingWindowMatcher::Match(index_, keys_, digests_, num_grains, num_lookback_slots);
    return {hits.first_slot, hits.end_slot()};
  }

  static std::vector<Digest> Chain() {
    std::vector<std::int32_t> tokens(8, 5);
    GrainChain chain(1, {});
    chain.ExtendTo(tokens, 8);
    return {chain.digests().begin(), chain.digests().end()};
  }

  BlockPool pool_{16, {1}};
  PrefixCacheIndex index_{pool_, 0, Closure::kOpen};
  GroupKeySpace keys_{.name_space = 0, .group = 0, .slots_per_grain = 1};
  std::vector<Digest> digests_ = Chain();
};

using HitRun = std::pair<std::int64_t, std::int64_t>;

TEST_F(SlidingWindowMatcherTest, AWindowOfTenOverBlocksOfFourLooksBackThree) {
  EXPECT_EQ(LookbackOf(10), 3);
  EXPECT_EQ(LookbackOf(2), 1);
  EXPECT_EQ(LookbackOf(1), 0);
}

// behaviour: E4
TEST_F(SlidingWindowMatcherTest, ARunOfTheWholeLookbackBacksItsBoundary) {
  Cache({1, 2, 3});
  EXPECT_EQ(Match(5, 3), HitRun(1, 4));
}

// behaviour: E3, E4
TEST_F(SlidingWindowMatcherTest, AShorterRunBacksABoundaryIfItReachesTheFloor) {
  Cache({0, 1, 3, 4});
  EXPECT_EQ(Match(5, 3), HitRun(0, 2));
}

// behaviour: E4
TEST_F(SlidingWindowMatcherTest, ARunBeyondTheBoundBacksNothing) {
  Cache({2, 3, 4});
  EXPECT_EQ(Match(5, 3), HitRun(2, 5));
  EXPECT_EQ(Match(4, 3), HitRun(0, 0));
}

// behaviour: E3
TEST_F(SlidingWindowMatcherTest, AWindowOfOneBacksEveryBoundaryWithHoles) {
  EXPECT_EQ(Match(5, 0), HitRun(5, 5));
}

// behaviour: E3
TEST_F(SlidingWindowMatcherTest, AStateNeedsTheOneSnapshotBeforeTheBoundary) {
  Cache({1, 3});
  EXPECT_EQ(Match(5, 1), HitRun(3, 4));
  EXPECT_EQ(Match(3, 1), HitRun(1, 2));
  EXPECT_EQ(Match(1, 1), HitRun(0, 0));
}

TEST_F(SlidingWindowMatcherTest, OnlyGrainBoundariesCount) {
  keys_.slots_per_grain = 2;
  Cache({0, 1, 2, 4, 5});
  EXPECT_EQ(Match(3, 2), HitRun(4, 6));
  EXPECT_EQ(Match(2, 1), HitRun(1, 2)) << "slot 2 alone ends inside a grain";
}

}  // namespace
}  // namespace pdmesh
