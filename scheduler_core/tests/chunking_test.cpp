#include "scheduler/chunking.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace pdmesh {
namespace {

constexpr ChunkRules kPlain{.prefix_granularity = 4, .has_state = false, .replay_window_tokens = 0};
constexpr ChunkRules kBesideState{.prefix_granularity = 4, .has_state = true, .replay_window_tokens = 0};
constexpr ChunkRules kBesideReplay{.prefix_granularity = 4, .has_state = false, .replay_window_tokens = 8};

std::int32_t Chunk(const ChunkRules& rules, std::int32_t begin, std::int32_t left, std::int32_t budget,
                   std::int32_t promotion = 0) {
  return ChunkTokens(rules, {.begin_tokens = begin, .num_left_tokens = left, .promotion_tokens = promotion},
                     budget);
}

// behaviour: J8
TEST(ChunkTokens, BesideAStateAChunkEndsOnAGrainBoundary) {
  EXPECT_EQ(Chunk(kBesideState, 16, 24, 24, 32), 16);
  EXPECT_EQ(Chunk(kBesideState, 16, 24, 8, 32), 8);
  EXPECT_EQ(Chunk(kBesideState, 24, 16, 16, 32), 8);
  EXPECT_EQ(Chunk(kBesideState, 24, 4, 16, 32), 4);
  EXPECT_EQ(Chunk(kBesideState, 32, 16, 10, 32), 8);
  EXPECT_EQ(Chunk(kBesideState, 18, 20, 10), 2);
  EXPECT_EQ(Chunk(kBesideState, 18, 20, 1), 0);
}

// behaviour: J8
TEST(ChunkTokens, BeforeAPromotionTheyAreTheSameWithoutAState) {
  EXPECT_EQ(Chunk(kPlain, 16, 24, 24, 32), 16);
  EXPECT_EQ(Chunk(kPlain, 16, 24, 8, 32), 8);
  EXPECT_EQ(Chunk(kPlain, 24, 16, 16, 32), 8);
  EXPECT_EQ(Chunk(kPlain, 24, 4, 16, 32), 4);
}

// behaviour: J8
TEST(ChunkTokens, WithoutAStateTheBudgetIsUsedUp) {
  const auto chunks = [](const ChunkRules& rules, std::int32_t num_tokens, std::int32_t budget) {
    std::vector<std::int32_t> sizes;
    for (std::int32_t begin = 0; begin < num_tokens; begin += sizes.back()) {
      sizes.push_back(Chunk(rules, begin, num_tokens - begin, budget));
    }
    return sizes;
  };
  EXPECT_EQ(chunks(kBesideState, 12, 6), (std::vector<std::int32_t>{4, 4, 4}));
  EXPECT_EQ(chunks(kPlain, 30, 12), (std::vector<std::int32_t>{12, 12, 6}));
}

// behaviour: J7
TEST(ChunkTokens, AChunkIsNeverLargerThanWhatIsLeftOrTheBudgetAndNeverPassesAPromotion) {
  for (const ChunkRules& rules : {kPlain, kBesideState, kBesideReplay}) {
    for (std::int32_t begin = 0; begin < 24; ++begin) {
      for (std::int32_t left = 1; left < 24; ++left) {
        for (std::int32_t budget = 0; budget < 30; ++budget) {
          for (const std::int32_t promotion : {0, 8, 16, 20}) {
            const std::int32_t chunk = Chunk(rules, begin, left, budget, promotion);
            const std::int32_t end = begin + chunk;
            ASSERT_GE(chunk, 0);
            ASSERT_LE(chunk, std::min(left, budget));
            const bool is_ahead = promotion > begin && promotion <= begin + left - rules.replay_window_tokens;
            ASSERT_TRUE(!is_ahead || end <= promotion) << begin << " " << left << " " << budget;
            ASSERT_TRUE(chunk == left || !rules.has_state || chunk == 0 || end % 4 == 0);
            ASSERT_TRUE(chunk == left || left - chunk >= rules.replay_window_tokens || chunk == 0);
          }
        }
      }
    }
  }
}

TEST(ChunkTokens, WithoutAStateABudgetBelowAGrainGetsAPromptOn) {
  EXPECT_EQ(Chunk(kPlain, 16, 24, 2, 32), 2);
  EXPECT_EQ(Chunk(kPlain, 18, 22, 2, 32), 2);
}

// behaviour: Q5, Q6
TEST(ChunkTokens, TheLastChunkComputesAReplayableWindowWhole) {
  const auto after_hit = [](std::int32_t hit, std::int32_t left, std::int32_t budget,
                            std::int32_t promotion = 0) {
    return Chunk(kBesideReplay, hit, left, budget - ReplayTokens(kBesideReplay, hit), promotion);
  };
  EXPECT_EQ(after_hit(16, 100, 40), 32);
  EXPECT_EQ(after_hit(4, 100, 40), 36);
  EXPECT_EQ(after_hit(16, 100, 8), 0);
  EXPECT_EQ(Chunk(kBesideReplay, 16, 100, 40), 40);
  EXPECT_EQ(Chunk(kBesideReplay, 0, 50, 45), 42);
  EXPECT_EQ(Chunk(kBesideReplay, 42, 8, 45), 8);
  EXPECT_EQ(Chunk(kBesideReplay, 0, 6, 4), 0);
  EXPECT_EQ(after_hit(16, 100, 40, 24), 8);
  EXPECT_EQ(Chunk(kBesideReplay, 48, 8, 64, 52), 8);
}

// behaviour: Q2
TEST(ChunkTokens, AHitReplaysNoMoreThanItself) {
  EXPECT_EQ(ReplayTokens(kBesideReplay, 0), 0);
  EXPECT_EQ(ReplayTokens(kBesideReplay, 4), 4);
  EXPECT_EQ(ReplayTokens(kBesideReplay, 16), 8);
  EXPECT_EQ(ReplayTokens(kPlain, 16), 0);
}

}  // namespace
}  // namespace pdmesh
