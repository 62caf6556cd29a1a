#include "scheduler/prefix_events.h"

#include <gtest/gtest.h>

#include <string>

#include "cache/prefix/prefix_hasher.h"

namespace pdmesh {
namespace {

constexpr std::uint64_t kFirstHash = 0xdd1cc29a217b1effULL;   // of 1 2 3 4
constexpr std::uint64_t kSecondHash = 0xad3ba5e45c6213feULL;  // of 5 6 7 8 behind it

CacheGroupSpec Group(AttentionKind kind, std::int32_t block_granularity, std::int32_t window_tokens = 0) {
  return {.group_id = "group",
          .block_granularity = block_granularity,
          .cache_blocks_per_lcm_block = 1,
          .kind = kind,
          .window_tokens = window_tokens};
}

// A cache with its events, and requests that come, publish and go.
class Cache {
 public:
  Cache(std::int32_t prefix_granularity, std::int32_t num_lcm_blocks, std::vector<CacheGroupSpec> specs)
      : prefix_granularity_(prefix_granularity),
        coordinator(prefix_granularity, num_lcm_blocks, std::move(specs)),
        events(coordinator, prefix_granularity) {}

  // A prompt with its own blocks for `num_tokens`. What it computed is published by Publish.
  struct Prompt {
    std::vector<std::int32_t> tokens;
    GrainChain chain;
    std::vector<std::uint64_t> hashes;
    ReserveLease reserve;
    std::vector<BlockTable> tables;
    std::uint64_t epoch;
  };

  Prompt Admit(std::vector<std::int32_t> tokens, std::int64_t num_tokens,
               std::vector<std::string> extra_keys = {}) {
    std::vector<BlockTable> tables = coordinator.MakeTables();
    std::vector<GroupDemand> demands;
    for (std::int32_t group = 0; group < coordinator.num_groups(); ++group) {
      const std::int64_t num_blocks = coordinator.group(group).geometry.BlocksFor(num_tokens);
      demands.push_back({.extent = DenseGrowth{.extent_tokens = num_tokens, .reserve_tokens = 0},
                         .num_promised_blocks = num_blocks});
    }
    auto admission = coordinator.AdmitFirst(tables, coordinator.ProbePrefix({}, 0), demands);
    EXPECT_TRUE(admission.has_value());
    GrainChain chain(prefix_granularity_, std::move(extra_keys));
    chain.ExtendTo(tokens, static_cast<std::int32_t>(tokens.size()) / prefix_granularity_);
    return {.tokens = std::move(tokens),
            .chain = std::move(chain),
            .hashes = {},
            .reserve = std::move(admission->reserve),
            .tables = std::move(tables),
            .epoch = admission->epoch};
  }

  void Grow(Prompt& prompt, std::int64_t num_tokens) {
    const std::vector<Extent> extents(prompt.tables.size(),
                                      DenseGrowth{.extent_tokens = num_tokens, .reserve_tokens = 0});
    const RequestProgress nothing{.digests = prompt.chain.digests(), .first_grain = 0, .end_grain = 0};
    EXPECT_TRUE(coordinator.AdmitNext(prompt.tables, prompt.epoch, nothing, 0, extents).has_value());
  }

  void Publish(Prompt& prompt, std::int32_t end_grain, std::int64_t state_checkpoint_tokens = 0) {
    coordinator.Publish(prompt.tables, prompt.epoch,
                        {.digests = prompt.chain.digests(),
                         .first_grain = 0,
                         .end_grain = end_grain,
                         .kind = BoundaryKind::kEndpoint,
                         .state_checkpoint_tokens = state_checkpoint_tokens});
    events.Describe(prompt.tokens, prompt.hashes);
  }

  // One line per event.
  std::vector<std::string> Drain() {
    std::vector<std::string> lines;
    for (const PrefixEvent& event : events.Drain()) {
      if (const auto* stored = std::get_if<PrefixStored>(&event)) {
        lines.push_back("stored " + std::to_string(stored->tokens.front()) +
                        (stored->parent_hash ? " behind a parent" : ""));
      } else if (std::holds_alternative<PrefixRemoved>(event)) {
        lines.push_back("removed");
      } else {
        lines.push_back("cleared");
      }
    }
    return lines;
  }

 private:
  std::int32_t prefix_granularity_;

 public:
  CacheCoordinator coordinator;
  PrefixEvents events;
};

using Lines = std::vector<std::string>;

// behaviour: P3
TEST(PrefixEvents, TheHashIsFnv1aOverFlagParentCountAndTokens) {
  EXPECT_EQ(HashForEvent({}, std::vector<std::int32_t>{1, 2, 3, 4}), kFirstHash);
  EXPECT_EQ(HashForEvent(kFirstHash, std::vector<std::int32_t>{5, 6, 7, 8}), kSecondHash);
  EXPECT_EQ(HashForEvent({}, {}), 0xe604823a249029bfULL);
  EXPECT_EQ(HashForEvent({}, std::vector<std::int32_t>{-1}), 0xc0373fff485ce3daULL);
}

// behaviour: P3
TEST(PrefixEvents, AStoredGrainNamesItsParentAndItsTokens) {
  Cache cache(4, 8, {Group(AttentionKind::kFull, 2)});
  auto prompt = cache.Admit({1, 2, 3, 4, 5, 6, 7, 8}, 8);
  cache.Publish(prompt, 2);
  const std::vector<PrefixEvent> events = cache.events.Drain();
  ASSERT_EQ(events.size(), 2U);
  const auto& first = std::get<PrefixStored>(events[0]);
  EXPECT_EQ(first.hash, kFirstHash);
  EXPECT_EQ(first.parent_hash, std::nullopt);
  EXPECT_EQ(first.tokens, (std::vector<std::int32_t>{1, 2, 3, 4}));
  EXPECT_EQ(first.prefix_granularity, 4);
  const auto& second = std::get<PrefixStored>(events[1]);
  EXPECT_EQ(second.hash, kSecondHash);
  EXPECT_EQ(second.parent_hash, kFirstHash);
  EXPECT_EQ(second.tokens, (std::vector<std::int32_t>{5, 6, 7, 8}));
}

// behaviour: P5
TEST(PrefixEvents, OneEvictedChildOfEachOfTwoBoundariesRemovesBoth) {
  CacheGroupSpec packed = Group(AttentionKind::kFull, 1);
  packed.cache_blocks_per_lcm_block = 2;
  CacheGroupSpec whole = Group(AttentionKind::kSlidingWindow, 2, 2);  // takes parents whole
  whole.is_replayable = true;
  Cache cache(2, 4, {packed, whole});
  {
    auto a = cache.Admit({1, 2}, 1);
    auto b = cache.Admit({3, 4}, 1);  // beside a in the first parent
    cache.Grow(a, 1);
    cache.Grow(b, 1);  // beside a in the second
    cache.Publish(a, 1);
    cache.Publish(b, 1);
  }
  EXPECT_EQ(cache.Drain(), (Lines{"stored 1", "stored 3"}));
  auto tables = cache.coordinator.MakeTables();
  const DenseGrowth none{.extent_tokens = 0, .reserve_tokens = 0};
  const auto other = cache.coordinator.AdmitFirst(
      tables, cache.coordinator.ProbePrefix({}, 0),
      std::vector<GroupDemand>{{.extent = none}, {.extent = none, .num_promised_blocks = 3}});
  ASSERT_TRUE(other.has_value());
  EXPECT_EQ(cache.coordinator.group(0).index.num_entries(), 2);
  EXPECT_EQ(cache.Drain(), (Lines{"removed", "removed"}));
  EXPECT_EQ(cache.events.num_grains(), 0);
}

// behaviour: P1
TEST(PrefixEvents, AGrainIsStoredOnceEveryGroupHasIt) {
  Cache cache(4, 64, {Group(AttentionKind::kFull, 4), Group(AttentionKind::kState, 4)});
  auto prompt = cache.Admit({1, 2, 3, 4, 5, 6, 7, 8}, 8);
  cache.Publish(prompt, 1);  // no snapshot yet
  EXPECT_EQ(cache.Drain(), Lines{});
  EXPECT_EQ(cache.events.num_grains(), 0);
  cache.Publish(prompt, 2, 8);
  EXPECT_EQ(cache.Drain(), (Lines{"stored 5 behind a parent"}));
}

// behaviour: P1
TEST(PrefixEvents, OfAnOpenGroupTheBlocksThatAHitReadsCount) {
  // One snapshot at the end of a grain of four blocks, and the last two of them for the window.
  Cache cache(4, 64,
              {Group(AttentionKind::kFull, 4), Group(AttentionKind::kState, 1),
               Group(AttentionKind::kSlidingWindow, 1, 3)});
  auto prompt = cache.Admit({1, 2, 3, 4}, 4);
  cache.Publish(prompt, 1, 4);
  EXPECT_EQ(cache.coordinator.group(1).index.num_entries(), 1);
  EXPECT_EQ(cache.coordinator.group(2).index.num_entries(), 2);
  EXPECT_EQ(cache.Drain(), (Lines{"stored 1"}));
}

// behaviour: P1
TEST(PrefixEvents, AReplayableGroupDoesNotCount) {
  CacheGroupSpec replayable = Group(AttentionKind::kSlidingWindow, 2, 4);
  replayable.is_replayable = true;
  Cache cache(4, 64, {Group(AttentionKind::kFull, 2), replayable});
  auto prompt = cache.Admit({1, 2, 3, 4}, 4);
  cache.Publish(prompt, 1);
  EXPECT_EQ(cache.Drain(), (Lines{"stored 1"}));
}

// behaviour: P4
TEST(PrefixEvents, WhatWasStoredAndRemovedBetweenTwoDrainsIsNotMentioned) {
  Cache cache(4, 2, {Group(AttentionKind::kFull, 4)});
  {
    auto prompt = cache.Admit({1, 2, 3, 4, 5, 6, 7, 8}, 8);
    cache.Publish(prompt, 2);
  }
  {
    auto other = cache.Admit({9, 9, 9, 9, 9, 9, 9, 9}, 8);
    EXPECT_EQ(cache.events.num_grains(), 0);  // nothing is kept of what is gone
  }
  EXPECT_EQ(cache.Drain(), Lines{});
}

// behaviour: P4
TEST(PrefixEvents, WhatWasRemovedAndStoredAgainIsNotMentioned) {
  Cache cache(4, 2, {Group(AttentionKind::kFull, 4)});
  const auto come_and_go = [&](std::vector<std::int32_t> tokens, std::int32_t num_grains) {
    auto prompt = cache.Admit(std::move(tokens), 8);
    cache.Publish(prompt, num_grains);
  };
  come_and_go({1, 2, 3, 4, 5, 6, 7, 8}, 2);
  EXPECT_EQ(cache.Drain().size(), 2U);
  come_and_go({9, 9, 9, 9, 9, 9, 9, 9}, 0);
  come_and_go({1, 2, 3, 4, 5, 6, 7, 8}, 1);
  EXPECT_EQ(cache.Drain(), (Lines{"removed"}));
  EXPECT_EQ(cache.events.num_grains(), 1);
}

// behaviour: P4
TEST(PrefixEvents, RemovalsComeLeafFirstAndBeforeTheStores) {
  Cache cache(4, 3, {Group(AttentionKind::kFull, 4)});
  {
    auto prompt = cache.Admit({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, 12);
    cache.Publish(prompt, 3);
  }
  EXPECT_EQ(cache.Drain(), (Lines{"stored 1", "stored 5 behind a parent", "stored 9 behind a parent"}));
  auto other = cache.Admit({21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32}, 12);
  cache.Publish(other, 2);
  const std::vector<PrefixEvent> events = cache.events.Drain();
  ASSERT_EQ(events.size(), 5U);
  EXPECT_EQ(std::get<PrefixRemoved>(events[1]).hash, kSecondHash);
  EXPECT_EQ(std::get<PrefixRemoved>(events[2]).hash, kFirstHash);
  EXPECT_EQ(std::get<PrefixStored>(events[4]).parent_hash, std::get<PrefixStored>(events[3]).hash);
}

// behaviour: P5
TEST(PrefixEvents, PublishingAgainSaysNothing) {
  Cache cache(4, 8, {Group(AttentionKind::kFull, 2)});
  auto first = cache.Admit({1, 2, 3, 4}, 4);
  auto second = cache.Admit({1, 2, 3, 4}, 4);
  cache.Publish(first, 1);
  EXPECT_EQ(cache.Drain().size(), 1U);
  cache.Publish(second, 1);
  cache.Publish(first, 1);
  EXPECT_EQ(cache.Drain(), Lines{});
}

TEST(PrefixEvents, PromptsThatDifferInTheirExtraKeysShareAHashWhileOneOfThemIsResident) {
  Cache cache(4, 3, {Group(AttentionKind::kFull, 4)});
  {
    auto plain = cache.Admit({1, 2, 3, 4}, 4);
    cache.Publish(plain, 1);
    auto keyed = cache.Admit({1, 2, 3, 4}, 4, {"adapter"});
    cache.Publish(keyed, 1);
  }
  EXPECT_EQ(cache.Drain(), (Lines{"stored 1"}));
  {
    const auto other = cache.Admit({5, 6, 7, 8, 9, 10, 11, 12}, 8);
  }
  EXPECT_EQ(cache.coordinator.group(0).index.num_entries(), 1);
  EXPECT_EQ(cache.Drain(), Lines{});
  {
    const auto other = cache.Admit({5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}, 12);
  }
  EXPECT_EQ(cache.Drain(), (Lines{"removed"}));
}

TEST(PrefixEvents, AClearSupersedesWhatIsPending) {
  Cache cache(4, 8, {Group(AttentionKind::kFull, 2)});
  {
    auto announced = cache.Admit({1, 2, 3, 4}, 4);
    cache.Publish(announced, 1);
    EXPECT_EQ(cache.Drain().size(), 1U);
    auto pending = cache.Admit({5, 6, 7, 8}, 4);
    cache.Publish(pending, 1);
  }
  cache.coordinator.Clear();
  cache.events.OnCleared();
  auto later = cache.Admit({1, 2, 3, 4}, 4);
  cache.Publish(later, 1);
  EXPECT_EQ(cache.Drain(), (Lines{"cleared", "stored 1"}));
  EXPECT_EQ(cache.Drain(), Lines{});
}

TEST(PrefixEventsDeathTest, AGrainThatNobodyDescribedIsABrokenInvariant) {
  Cache cache(4, 8, {Group(AttentionKind::kFull, 2)});
  auto prompt = cache.Admit({1, 2, 3, 4}, 4);
  cache.coordinator.Publish(prompt.tables, prompt.epoch,
                            {.digests = prompt.chain.digests(), .first_grain = 0, .end_grain = 1});
  EXPECT_DEATH(cache.events.Drain(), "nobody described");
}

}  // namespace
}  // namespace pdmesh
