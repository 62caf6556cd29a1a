// Groups whose blocks expire, at the level of the coordinator: convergence, publication, retention, the
// reserve.
#include <gtest/gtest.h>

#include <random>

#include "coordinator_fixture.h"

namespace pdmesh {
namespace {

constexpr std::int32_t kGrain = 4;
constexpr std::int32_t kNumGrains = 8;

CacheGroupSpec Full() {
  return {.group_id = "full", .block_granularity = 4, .cache_blocks_per_lcm_block = 1};
}
CacheGroupSpec Sliding(std::int32_t window_tokens, std::int32_t block_granularity = 4) {
  return {.group_id = "sliding",
          .block_granularity = block_granularity,
          .cache_blocks_per_lcm_block = 1,
          .kind = AttentionKind::kSlidingWindow,
          .window_tokens = window_tokens};
}
CacheGroupSpec State() {
  return {.group_id = "state",
          .block_granularity = 4,
          .cache_blocks_per_lcm_block = 1,
          .kind = AttentionKind::kState};
}

// A request that holds blocks in every slot of the groups it takes part in, and holes in the others.
struct Holder {
  Holder(CacheCoordinator& in, const std::vector<bool>& takes_part)
      : coordinator(in), tables(in.MakeTables()) {
    std::vector<GroupDemand> demands;
    for (std::int32_t group = 0; group < in.num_groups(); ++group) {
      const GroupGeometry& geometry = in.group(group).geometry;
      const std::int64_t num_slots = kNumGrains * geometry.slots_per_grain();
      const bool is_full = geometry.kind() == AttentionKind::kFull;
      if (takes_part[static_cast<std::size_t>(group)]) {
        demands.push_back({.extent = DenseGrowth{.extent_tokens = kNumGrains * kGrain, .reserve_tokens = 0},
                           .num_promised_blocks = is_full ? 0 : num_slots});
      } else {
        demands.push_back(
            {.extent = SparseSuffix{
                 .first_slot = num_slots, .extent_tokens = kNumGrains * kGrain, .reserve_tokens = 0}});
      }
    }
    PrefixProbe none;
    none.hits.resize(demands.size());
    admission = in.AdmitFirst(tables, none, demands);
  }

  void PublishUpTo(const std::vector<Digest>& digests, std::int32_t boundary,
                   BoundaryKind kind = BoundaryKind::kEndpoint) {
    coordinator.Publish(tables, admission->epoch,
                        {.digests = digests,
                         .first_grain = 0,
                         .end_grain = boundary,
                         .kind = kind,
                         .state_checkpoint_tokens = std::int64_t{boundary} * kGrain});
  }

  CacheCoordinator& coordinator;
  std::optional<Admission> admission;
  std::vector<BlockTable> tables;
};

void PublishOnce(CacheCoordinator& coordinator, const std::vector<bool>& takes_part,
                 const std::vector<Digest>& digests, std::int32_t boundary) {
  Holder(coordinator, takes_part).PublishUpTo(digests, boundary);
}

std::vector<std::int64_t> CachedSlots(const CacheCoordinator& coordinator, std::int32_t group,
                                      const std::vector<Digest>& digests) {
  const CacheGroup& looked_at = coordinator.group(group);
  std::vector<std::int64_t> slots;
  for (std::int64_t slot = 0; slot < kNumGrains * looked_at.keys.slots_per_grain; ++slot) {
    if (looked_at.index.Find(looked_at.keys.KeyOf(digests, slot)) != nullptr) {
      slots.push_back(slot);
    }
  }
  return slots;
}

// behaviour: E6
TEST(OpenGroups, SlidingGroupsConvergeOnACommonBoundaryWhicheverComesFirst) {
  for (const bool x_comes_first : {true, false}) {
    CacheCoordinator coordinator(kGrain, 200, {Full(), Sliding(10), Sliding(10)});
    const std::vector<Digest> digests = ChainOf(1, kNumGrains);
    const std::vector<bool> only_x = {true, x_comes_first, !x_comes_first};
    const std::vector<bool> only_y = {true, !x_comes_first, x_comes_first};
    PublishOnce(coordinator, {true, false, false}, digests, 8);
    PublishOnce(coordinator, only_x, digests, 3);
    PublishOnce(coordinator, only_x, digests, 7);
    PublishOnce(coordinator, only_y, digests, 2);
    PublishOnce(coordinator, only_y, digests, 6);
    EXPECT_EQ(CachedSlots(coordinator, x_comes_first ? 1 : 2, digests),
              (std::vector<std::int64_t>{0, 1, 2, 4, 5, 6}));
    EXPECT_EQ(CachedSlots(coordinator, x_comes_first ? 2 : 1, digests),
              (std::vector<std::int64_t>{0, 1, 3, 4, 5}));
    const PrefixProbe probe = coordinator.ProbePrefix(digests, kNumGrains);
    EXPECT_EQ(probe.hit_tokens, 8);
    for (const GroupHits& hits : probe.hits) {
      EXPECT_EQ(hits.end_slot(), 2);
    }
  }
}

// behaviour: E7
TEST(OpenGroups, OneEmptyGroupLeavesNoHit) {
  CacheCoordinator coordinator(kGrain, 200, {Full(), Sliding(10), State()});
  const std::vector<Digest> digests = ChainOf(1, kNumGrains);
  PublishOnce(coordinator, {true, true, false}, digests, 8);
  EXPECT_EQ(coordinator.ProbePrefix(digests, kNumGrains).hit_tokens, 0);
}

// behaviour: E8, E9
TEST(OpenGroups, WhatTheClosedGroupsAloneBackIsToldApart) {
  CacheCoordinator coordinator(kGrain, 200, {State(), Full()});
  const std::vector<Digest> digests = ChainOf(1, kNumGrains);
  PublishOnce(coordinator, {false, true}, digests, 8);
  PublishOnce(coordinator, {true, true}, digests, 4);
  const PrefixProbe probe = coordinator.ProbePrefix(digests, kNumGrains);
  EXPECT_EQ(probe.hit_tokens, 16);
  EXPECT_EQ(probe.closed_tokens, 32);
  CacheCoordinator open_only(kGrain, 200, {State()});
  PublishOnce(open_only, {true}, digests, 4);
  EXPECT_EQ(open_only.ProbePrefix(digests, kNumGrains).hit_tokens, 16);
  EXPECT_EQ(open_only.ProbePrefix(digests, kNumGrains).closed_tokens, 0);
}

// behaviour: E11
TEST(OpenGroups, AStateDoesNotLimitWhatAPeerIsAskedFor) {
  CacheCoordinator coordinator(kGrain, 200, {Full(), State()});
  const std::vector<Digest> digests = ChainOf(1, kNumGrains);
  PublishOnce(coordinator, {true, false}, digests, 8);
  const PrefixProbe probe = coordinator.ProbePrefix(digests, 7, ProbeScope::kHistoryGroups);
  EXPECT_EQ(probe.hit_tokens, 28);
  EXPECT_TRUE(probe.hits[1].entries.empty());
}

bool Backs(const CacheCoordinator& coordinator, std::int32_t group, const std::vector<Digest>& digests,
           std::int64_t grain) {
  const CacheGroup& looked_at = coordinator.group(group);
  const std::int64_t end = grain * looked_at.keys.slots_per_grain;
  const std::int64_t first =
      looked_at.is_closed() ? 0 : std::max<std::int64_t>(0, end - looked_at.geometry.num_lookback_blocks());
  for (std::int64_t slot = first; slot < end; ++slot) {
    if (looked_at.index.Find(looked_at.keys.KeyOf(digests, slot)) == nullptr) {
      return false;
    }
  }
  return true;
}

// behaviour: E5, E7, T8
TEST(OpenGroups, AHitIsTheHighestBoundaryThatEveryGroupBacksAlone) {
  std::mt19937 chance(7);
  const std::vector<std::vector<CacheGroupSpec>> mixes = {
      {Sliding(6, 2), Full(), Sliding(9)},
      {Sliding(3, 1), State(), Full()},
      {Sliding(5), Sliding(10)},
      {Full(), State()},
  };
  std::int64_t num_hits = 0;
  for (int round = 0; round < 400; ++round) {
    const auto& specs = mixes[chance() % mixes.size()];
    CacheCoordinator coordinator(kGrain, 120, specs);
    const std::vector<Digest> digests = ChainOf(1, kNumGrains);
    for (int i = 0; i < 6; ++i) {
      std::vector<bool> takes_part;
      for (const CacheGroupSpec& spec : specs) {
        takes_part.push_back(spec.kind == AttentionKind::kFull || chance() % 2 == 0);
      }
      // Other content drives some of it out again.
      const bool is_other = i > 2 && chance() % 3 == 0;
      const std::vector<Digest> content =
          is_other ? ChainOf(static_cast<std::int32_t>(100 + i), kNumGrains) : digests;
      PublishOnce(coordinator, takes_part, content, static_cast<std::int32_t>(1 + chance() % kNumGrains));
    }
    const std::int64_t bound = static_cast<std::int64_t>(chance() % (kNumGrains + 1));
    std::int64_t expected = bound;
    const auto all_back = [&](std::int64_t grain) {
      for (std::int32_t group = 0; group < coordinator.num_groups(); ++group) {
        if (!Backs(coordinator, group, digests, grain)) {
          return false;
        }
      }
      return true;
    };
    while (!all_back(expected)) {
      --expected;
    }
    EXPECT_EQ(coordinator.ProbePrefix(digests, static_cast<std::int32_t>(bound)).hit_tokens,
              expected * kGrain);
    num_hits += expected > 0 ? 1 : 0;
  }
  EXPECT_GT(num_hits, 50);
}

// behaviour: H9
TEST(OpenGroups, ASlidingGroupPublishesItsLookbackBeforeTheNewestBoundary) {
  CacheCoordinator coordinator(kGrain, 200, {Full(), Sliding(9)});
  const std::vector<Digest> digests = ChainOf(1, kNumGrains);
  PublishOnce(coordinator, {true, true}, digests, 3);
  EXPECT_EQ(CachedSlots(coordinator, 0, digests), (std::vector<std::int64_t>{0, 1, 2}));
  EXPECT_EQ(CachedSlots(coordinator, 1, digests), (std::vector<std::int64_t>{1, 2}));
  const std::vector<Digest> others = ChainOf(2, kNumGrains);
  Holder holder(coordinator, {true, true});
  coordinator.Publish(holder.tables, holder.admission->epoch,
                      {.digests = others, .first_grain = 0, .end_grain = 3});
  coordinator.Publish(holder.tables, holder.admission->epoch,
                      {.digests = others, .first_grain = 3, .end_grain = 4});
  EXPECT_EQ(CachedSlots(coordinator, 1, others), (std::vector<std::int64_t>{1, 2, 3}))
      << "the run before the boundary reaches across what was new";
}

// behaviour: H9
TEST(OpenGroups, HolesAreNotPublished) {
  CacheCoordinator coordinator(kGrain, 200, {Full(), Sliding(9)});
  const std::vector<Digest> digests = ChainOf(1, kNumGrains);
  PublishOnce(coordinator, {true, false}, digests, 3);
  EXPECT_TRUE(CachedSlots(coordinator, 1, digests).empty());
}

// behaviour: H15, H16
TEST(OpenGroups, AStateIsPublishedOnlyWhereItWasRecordedAndIsWorthIt) {
  CacheCoordinator coordinator(kGrain, 200, {Full(), State()});
  const std::vector<Digest> digests = ChainOf(1, kNumGrains);
  Holder holder(coordinator, {true, true});
  const auto publish = [&](std::int32_t first, std::int32_t end, BoundaryKind kind, std::int64_t checkpoint) {
    coordinator.Publish(holder.tables, holder.admission->epoch,
                        {.digests = digests,
                         .first_grain = first,
                         .end_grain = end,
                         .kind = kind,
                         .state_checkpoint_tokens = checkpoint});
    return CachedSlots(coordinator, 1, digests);
  };
  using Slots = std::vector<std::int64_t>;
  EXPECT_EQ(publish(0, 1, BoundaryKind::kEndpoint, 0), Slots{}) << "nothing was recorded";
  EXPECT_EQ(publish(1, 2, BoundaryKind::kChunk, 8), Slots{}) << "a chance boundary";
  EXPECT_EQ(publish(2, 3, BoundaryKind::kEndpoint, 8), Slots{}) << "recorded before the new range";
  EXPECT_EQ(publish(3, 5, BoundaryKind::kEndpoint, 20), Slots{4});
  EXPECT_EQ(publish(5, 6, BoundaryKind::kPromoted, 24), (Slots{4, 5}));
}

// behaviour: G8, G9
TEST(OpenGroups, OfOneEpochChanceBoundariesGoBeforeOthersAndClosedPrefixesLast) {
  BlockPool pool(16, {1, 1});
  PrefixCacheIndex full(pool, 0, Closure::kClosed);
  PrefixCacheIndex state(pool, 1, Closure::kOpen);
  std::int32_t content = 0;
  const auto add = [&](PrefixCacheIndex& index, std::int32_t group, std::uint64_t epoch, std::int64_t depth,
                       BoundaryKind kind) {
    const CacheBlockRef block = std::move(pool.Acquire(group, 1)->front());
    index.Register({.name_space = 0,
                    .group = group,
                    .digest = HashGrain({}, std::vector<std::int32_t>{content++}, {}),
                    .grain_offset = 0},
                   block, epoch, depth, kind);
    return block.block_id();
  };
  std::vector<std::pair<std::int32_t, std::int32_t>> expected(8);
  for (std::int32_t depth = 0; depth < 4; ++depth) {
    expected[static_cast<std::size_t>(7 - depth)] = {0, add(full, 0, 2, depth, BoundaryKind::kChunk)};
  }
  expected[2] = {1, add(state, 1, 2, 6, BoundaryKind::kChunk)};
  expected[3] = {1, add(state, 1, 2, 2, BoundaryKind::kEndpoint)};
  expected[1] = {1, add(state, 1, 2, 3, BoundaryKind::kChunk)};
  expected[0] = {0, add(full, 0, 1, 0, BoundaryKind::kChunk)};
  const std::vector<const PrefixCacheIndex*> indexes = {&full, &state};
  const std::vector<std::int64_t> all = {8 + 8, 0};
  const auto victims = PlanEvictions(pool, all, indexes);
  ASSERT_TRUE(victims);
  std::vector<std::pair<std::int32_t, std::int32_t>> order;
  for (const EvictionVictim& victim : *victims) {
    order.emplace_back(victim.group, victim.entry->block.block_id());
  }
  EXPECT_EQ(order, expected);
}

// behaviour: G8
TEST(OpenGroups, AHitEntryIsEstablished) {
  BlockPool pool(4, {1});
  PrefixCacheIndex index(pool, 0, Closure::kOpen);
  const auto key = [](std::int32_t content) {
    return CacheKey{.name_space = 0,
                    .group = 0,
                    .digest = HashGrain({}, std::vector<std::int32_t>{content}, {}),
                    .grain_offset = 0};
  };
  CacheBlockRef hit = std::move(pool.Acquire(0, 1)->front());
  const std::int32_t hit_id = hit.block_id();
  index.Register(key(0), hit, 3, 4);
  index.Touch(*index.Find(key(0)), 3);
  hit.Reset();
  index.Register(key(1), std::move(pool.Acquire(0, 1)->front()), 3, 8);
  EXPECT_EQ((*index.eviction_order().rbegin())->block.block_id(), hit_id);
  EXPECT_EQ(RankOf(*index.Find(key(0))).tier, EvictionTier::kEstablished);
  EXPECT_EQ(RankOf(*index.Find(key(1))).tier, EvictionTier::kProbationary);
}

// behaviour: D8
TEST(OpenGroups, PublishingAgainMayRaiseTheKindAndNeverLowersIt) {
  CacheCoordinator coordinator(kGrain, 200, {Full(), Sliding(5)});
  const std::vector<Digest> digests = ChainOf(1, kNumGrains);
  const auto kind_of_last = [&] {
    const CacheGroup& sliding = coordinator.group(1);
    return sliding.index.Find(sliding.keys.KeyOf(digests, 2))->kind;
  };
  Holder holder(coordinator, {true, true});
  holder.PublishUpTo(digests, 3, BoundaryKind::kChunk);
  EXPECT_EQ(kind_of_last(), BoundaryKind::kChunk);
  holder.PublishUpTo(digests, 3, BoundaryKind::kPromoted);
  EXPECT_EQ(kind_of_last(), BoundaryKind::kPromoted);
  holder.PublishUpTo(digests, 3, BoundaryKind::kEndpoint);
  EXPECT_EQ(kind_of_last(), BoundaryKind::kPromoted);
}

// The reserve.

// g = P = 4, W = 5: a step of four tokens holds two blocks.
struct Slider {
  explicit Slider(CacheCoordinator& in, const PrefixProbe& probe, std::int64_t first_tokens)
      : coordinator(in), tables(in.MakeTables()) {
    const GroupDemand demand{.extent = DenseGrowth{.extent_tokens = first_tokens, .reserve_tokens = 0},
                             .num_promised_blocks = 2};
    admission = in.AdmitFirst(tables, probe, std::span(&demand, 1));
    num_computed = probe.hit_tokens + first_tokens;
  }

  void Step(const std::vector<Digest>& digests) {
    const Extent extent = DenseGrowth{.extent_tokens = 4, .reserve_tokens = 0};
    const auto end_grain = static_cast<std::int32_t>(num_computed / kGrain);
    const auto next = coordinator.AdmitNext(
        tables, admission->epoch,
        {.digests = digests, .first_grain = std::exchange(num_published, end_grain), .end_grain = end_grain},
        num_computed, std::span(&extent, 1));
    ASSERT_TRUE(next);
    num_computed += 4;
  }

  std::vector<std::int32_t> ids() const {
    return {tables[0].block_ids().begin(), tables[0].block_ids().end()};
  }

  CacheCoordinator& coordinator;
  std::optional<Admission> admission;
  std::vector<BlockTable> tables;
  std::int64_t num_computed = 0;
  std::int32_t num_published = 0;
};

const PrefixProbe kNoHit{.hits = {{}}};

// behaviour: G7, G13, G14
TEST(BlockReserve, WhatSlidOutPaysForTheSameAdmissionEvenWhenItWasPublished) {
  CacheCoordinator coordinator(kGrain, 2, {Sliding(5)});
  const std::vector<Digest> digests = ChainOf(1, kNumGrains);
  Slider slider(coordinator, kNoHit, 8);
  EXPECT_EQ(slider.ids(), (std::vector<std::int32_t>{1, 2}));
  slider.Step(digests);
  EXPECT_EQ(slider.ids(), (std::vector<std::int32_t>{0, 2, 1}));
  slider.Step(digests);
  EXPECT_EQ(slider.ids(), (std::vector<std::int32_t>{0, 0, 1, 2}));
}

// behaviour: G13, H8
TEST(BlockReserve, PublishedBlocksStayCachedWhileThereIsRoom) {
  CacheCoordinator coordinator(kGrain, 4, {Sliding(5)});
  const std::vector<Digest> digests = ChainOf(1, kNumGrains);
  Slider slider(coordinator, kNoHit, 8);
  slider.Step(digests);
  slider.Step(digests);
  EXPECT_EQ(CachedSlots(coordinator, 0, digests), (std::vector<std::int64_t>{1, 2}));
  EXPECT_EQ(coordinator.num_cached_lcm_blocks(), 1);
}

// behaviour: G14, K14
TEST(BlockReserve, ARequestThatSharesABlockPaysForItself) {
  CacheCoordinator coordinator(kGrain, 4, {Sliding(5)});
  const std::vector<Digest> digests = ChainOf(1, kNumGrains);
  Slider first(coordinator, kNoHit, 8);
  first.Step(digests);  // publishes the boundary at 8, which block 2 backs
  Slider second(coordinator, coordinator.ProbePrefix(digests, 2), 4);
  ASSERT_TRUE(second.admission);
  EXPECT_EQ(second.ids()[1], first.ids()[1]);
  EXPECT_EQ(coordinator.pool().num_empty_lcm_blocks(), 0) << "the shared block counts once, so one is kept";
  EXPECT_EQ(coordinator.reserve().num_kept(0), 1);
  first.Step(digests);  // slides past the shared block, which stays taken, and still gets its next one
  second.Step(ChainOf(1, kNumGrains));
  first.Step(digests);
  EXPECT_EQ(coordinator.reserve().num_promised(0), 4);
}

// behaviour: K14, T1
TEST(BlockReserve, AnAdmissionThatWouldBreakAPromiseFailsAndChangesNothing) {
  CacheCoordinator coordinator(kGrain, 3, {Sliding(5)});
  const std::vector<Digest> digests = ChainOf(1, kNumGrains);
  Slider first(coordinator, kNoHit, 8);
  first.Step(digests);
  const std::vector<std::int32_t> ids = first.ids();
  Slider second(coordinator, coordinator.ProbePrefix(digests, 2), 4);
  EXPECT_FALSE(second.admission);
  EXPECT_EQ(first.ids(), ids);
  EXPECT_EQ(coordinator.reserve().num_promised(0), 2);
  EXPECT_EQ(coordinator.pool().num_empty_lcm_blocks(), 1);
}

TEST(BlockReserve, EverythingComesBackAtTheEnd) {
  CacheCoordinator coordinator(kGrain, 6, {Sliding(5)});
  const std::vector<Digest> digests = ChainOf(1, kNumGrains);
  {
    Slider first(coordinator, kNoHit, 4);
    EXPECT_EQ(coordinator.reserve().num_kept(0), 1);
    EXPECT_EQ(coordinator.pool().num_empty_lcm_blocks(), 4);
    Slider second(coordinator, kNoHit, 8);
  }
  EXPECT_EQ(coordinator.reserve().num_promised(0), 0);
  EXPECT_EQ(coordinator.reserve().num_kept(0), 0);
  EXPECT_EQ(coordinator.pool().num_empty_lcm_blocks(), 6);
}

// behaviour: G17, T2
TEST(BlockReserve, TakingMoreThanWasPromisedEndsTheProcess) {
  CacheCoordinator coordinator(kGrain, 6, {Sliding(5)});
  Slider slider(coordinator, kNoHit, 8);
  const Extent extent = DenseGrowth{.extent_tokens = 8, .reserve_tokens = 0};
  EXPECT_DEATH(
      (void)coordinator.AdmitNext(slider.tables, 1, {.digests = {}, .first_grain = 0, .end_grain = 0}, 8,
                                  std::span(&extent, 1)),
      "outgrew");
}

}  // namespace
}  // namespace pdmesh
