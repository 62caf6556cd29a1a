#include "scheduler/retraction.h"

#include <gtest/gtest.h>

namespace pdmesh {
namespace {

VictimView Prefill(std::int64_t num_tokens, std::uint64_t submission = 1) {
  return {.is_incomplete_prefill = true,
          .num_tokens = num_tokens,
          .num_releasable_lcm_blocks = 0,
          .submission = submission};
}

VictimView Decode(std::int64_t num_releasable, std::int64_t num_tokens, std::uint64_t submission = 1) {
  return {.is_incomplete_prefill = false,
          .num_tokens = num_tokens,
          .num_releasable_lcm_blocks = num_releasable,
          .submission = submission};
}

// behaviour: M4
TEST(Retraction, IncompletePrefillsGiveWayFirstTheLongestOfThemBeforeTheOthers) {
  EXPECT_TRUE(GivesWayBefore(Prefill(1), Decode(100, 1)));
  EXPECT_FALSE(GivesWayBefore(Decode(100, 1), Prefill(1)));
  EXPECT_TRUE(GivesWayBefore(Prefill(20), Prefill(19)));
  EXPECT_TRUE(GivesWayBefore(Prefill(20, 3), Prefill(20, 2)));
}

// behaviour: M4
TEST(Retraction, OfTheOthersTheOneThatFreesMostThenTheShortestThenTheYoungest) {
  EXPECT_TRUE(GivesWayBefore(Decode(3, 90), Decode(2, 10)));
  EXPECT_TRUE(GivesWayBefore(Decode(3, 10), Decode(3, 11)));
  EXPECT_TRUE(GivesWayBefore(Decode(3, 10, 8), Decode(3, 10, 7)));
  EXPECT_FALSE(GivesWayBefore(Decode(3, 10, 7), Decode(3, 10, 7)));
}

}  // namespace
}  // namespace pdmesh
