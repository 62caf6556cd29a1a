// How the groups of a coordinator agree on a hit, and what an admission marks of it.
#include <gtest/gtest.h>

#include <set>

#include "cache/coordinator/cache_coordinator.h"
#include "cache/prefix/prefix_hasher.h"

namespace pdmesh {
namespace {

constexpr std::int32_t kGrainTokens = 4;
constexpr std::int32_t kNumPromptGrains = 8;

CacheGroupSpec FullOf(std::string group_id = "full") {
  return {
      .group_id = std::move(group_id), .block_granularity = kGrainTokens, .cache_blocks_per_lcm_block = 1};
}
CacheGroupSpec WindowOf(std::int32_t window_tokens) {
  return {.group_id = "sliding",
          .block_granularity = kGrainTokens,
          .cache_blocks_per_lcm_block = 1,
          .kind = AttentionKind::kSlidingWindow,
          .window_tokens = window_tokens};
}

std::vector<Digest> Chain() {
  const std::vector<std::int32_t> tokens(kNumPromptGrains, 5);
  GrainChain chain(1, {});
  chain.ExtendTo(tokens, kNumPromptGrains);
  return {chain.digests().begin(), chain.digests().end()};
}

class PrefixConvergence : public testing::Test {
 protected:
  void Build(std::vector<CacheGroupSpec> specs, std::int32_t num_lcm_blocks = 64) {
    coordinator_ = std::make_unique<CacheCoordinator>(kGrainTokens, num_lcm_blocks, std::move(specs));
  }

  // A request of `end_grain` grains that publishes them up to there and ends. Groups that take no part have
  // holes.
  void PublishUpTo(std::int32_t end_grain, const std::vector<bool>& takes_part) {
    auto tables = coordinator_->MakeTables();
    const std::int64_t num_tokens = std::int64_t{end_grain} * kGrainTokens;
    std::vector<GroupDemand> demands;
    for (std::size_t group = 0; group < takes_part.size(); ++group) {
      const GroupGeometry& geometry = coordinator_->group(static_cast<std::int32_t>(group)).geometry;
      const std::int64_t num_slots = geometry.BlocksFor(num_tokens);
      if (takes_part[group]) {
        demands.push_back({.extent = DenseGrowth{.extent_tokens = num_tokens, .reserve_tokens = 0},
                           .num_promised_blocks = geometry.kind() == AttentionKind::kFull ? 0 : num_slots});
      } else {
        demands.push_back({.extent = SparseSuffix{
                               .first_slot = num_slots, .extent_tokens = num_tokens, .reserve_tokens = 0}});
      }
    }
    const auto admission = coordinator_->AdmitFirst(tables, coordinator_->ProbePrefix({}, 0), demands);
    ASSERT_TRUE(admission);
    coordinator_->Publish(tables, admission->epoch,
                          {.digests = digests_, .first_grain = 0, .end_grain = end_grain});
  }

  std::int64_t MatchedUpTo(std::int32_t group, std::int64_t num_grains) const {
    return coordinator_->group(group).Match(digests_, num_grains).end_slot();
  }

  const CacheEntry& Entry(std::int32_t group, std::int64_t slot) const {
    const CacheGroup& looked_at = coordinator_->group(group);
    return *looked_at.index.Find(looked_at.keys.KeyOf(digests_, slot));
  }

  std::vector<Digest> digests_ = Chain();
  std::unique_ptr<CacheCoordinator> coordinator_;
};

// behaviour: E5, E6
TEST_F(PrefixConvergence, EachGroupIsMatchedAgainAtTheBoundAnotherOneLowered) {
  for (const std::int32_t x : {1, 2}) {
    const std::int32_t y = 3 - x;
    Build({FullOf(), WindowOf(10), WindowOf(10)});
    PublishUpTo(8, {true, false, false});
    for (const std::int32_t boundary : {3, 7}) {  // X has blocks 0, 1, 2, 4, 5, 6
      PublishUpTo(boundary, {true, x == 1, x == 2});
    }
    for (const std::int32_t boundary : {2, 6}) {  // Y has blocks 0, 1, 3, 4, 5
      PublishUpTo(boundary, {true, y == 1, y == 2});
    }
    EXPECT_EQ(MatchedUpTo(0, 8), 8);
    EXPECT_EQ(MatchedUpTo(x, 8), 7);
    EXPECT_EQ(MatchedUpTo(y, 7), 6);
    EXPECT_EQ(MatchedUpTo(x, 6), 3);
    EXPECT_EQ(MatchedUpTo(y, 3), 2);
    EXPECT_EQ(MatchedUpTo(x, 2), 2);
    EXPECT_EQ(coordinator_->ProbePrefix(digests_, 8).hit_tokens, 8);
  }
}

// behaviour: E5
TEST_F(PrefixConvergence, TheExtentOfAGroupIsRoundedDownToAGrain) {
  CacheGroupSpec fine = FullOf("fine");
  fine.block_granularity = 2;
  Build({fine, FullOf()}, 9);
  PublishUpTo(3, {true, true});
  EXPECT_EQ(coordinator_->ProbePrefix(digests_, 8).hit_tokens, 12);
  auto tables = coordinator_->MakeTables();
  const std::vector<GroupDemand> one_block = {
      {.extent = DenseGrowth{.extent_tokens = 2, .reserve_tokens = 0}},
      {.extent = DenseGrowth{.extent_tokens = 0, .reserve_tokens = 0}}};
  ASSERT_TRUE(coordinator_->AdmitFirst(tables, coordinator_->ProbePrefix({}, 0), one_block));
  EXPECT_EQ(MatchedUpTo(0, 8), 5) << "the last half of a grain was evicted";
  EXPECT_EQ(coordinator_->ProbePrefix(digests_, 8).hit_tokens, 8);
}

// behaviour: E7
TEST_F(PrefixConvergence, WhatLiesAboveTheHitOrBesideItsRunIsNotMarked) {
  Build({FullOf(), WindowOf(5)});
  PublishUpTo(8, {true, false});
  PublishUpTo(2, {true, true});
  PublishUpTo(4, {true, true});  // the window group has blocks 1 and 3
  auto tables = coordinator_->MakeTables();
  const std::vector<GroupDemand> demands = {
      {.extent = DenseGrowth{.extent_tokens = 4, .reserve_tokens = 0}},
      {.extent = DenseGrowth{.extent_tokens = 4, .reserve_tokens = 0}, .num_promised_blocks = 2}};
  const auto admission = coordinator_->AdmitFirst(tables, coordinator_->ProbePrefix(digests_, 8), demands);
  ASSERT_TRUE(admission);
  EXPECT_EQ(tables[1].num_slots(), 5) << "the hit is 16 tokens";
  for (std::int64_t slot = 0; slot < 8; ++slot) {
    EXPECT_EQ(Entry(0, slot).was_hit, slot < 4) << slot;
    EXPECT_EQ(Entry(0, slot).epoch == admission->epoch, slot < 4) << slot;
    EXPECT_EQ(Entry(0, slot).place.has_value(), slot >= 4) << "held by the cache alone, slot " << slot;
  }
  EXPECT_EQ(Entry(1, 3).epoch, admission->epoch);
  EXPECT_NE(Entry(1, 1).epoch, admission->epoch);
  EXPECT_FALSE(Entry(1, 1).was_hit);
}

// behaviour: H9
TEST_F(PrefixConvergence, ASlidingGroupPublishesAcrossTheEdgeOfTheNewGrains) {
  const auto published = [&](std::int32_t first_grain, std::int32_t end_grain) {
    Build({WindowOf(9)});
    auto tables = coordinator_->MakeTables();
    const std::vector<GroupDemand> demands = {
        {.extent = DenseGrowth{.extent_tokens = 16, .reserve_tokens = 0}, .num_promised_blocks = 4}};
    const auto admission = coordinator_->AdmitFirst(tables, coordinator_->ProbePrefix({}, 0), demands);
    coordinator_->Publish(tables, admission->epoch,
                          {.digests = digests_, .first_grain = first_grain, .end_grain = end_grain});
    std::set<std::int64_t> slots;
    for (std::int64_t slot = 0; slot < 4; ++slot) {
      const CacheGroup& group = coordinator_->group(0);
      if (group.index.Find(group.keys.KeyOf(digests_, slot)) != nullptr) {
        slots.insert(slot);
      }
    }
    return slots;
  };
  EXPECT_EQ(published(3, 4), (std::set<std::int64_t>{2, 3})) << "16 computed, grain 3 is new";
  EXPECT_EQ(published(0, 3), (std::set<std::int64_t>{1, 2})) << "14 computed, grains 0 to 2 are new";
}

}  // namespace
}  // namespace pdmesh
