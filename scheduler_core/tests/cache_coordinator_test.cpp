#include "cache/coordinator/cache_coordinator.h"

#include <gtest/gtest.h>

#include "coordinator_fixture.h"

namespace pdmesh {
namespace {

TEST(CacheCoordinator, AHitIsWhatEveryGroupBacks) {
  const auto coordinator = TwoGroups(64);
  const std::vector<Digest> digests = ChainOf(1, 4);
  auto tables = coordinator->MakeTables();
  const auto admission =
      coordinator->AdmitFirst(tables, coordinator->ProbePrefix(digests, 4),
                              Everywhere(*coordinator, {.extent_tokens = 32, .reserve_tokens = 0}));
  ASSERT_TRUE(admission);
  EXPECT_EQ(tables[0].num_slots(), 8);
  EXPECT_EQ(tables[1].num_slots(), 16);
  coordinator->Publish(tables, admission->epoch, Grains(digests, 0, 3));
  EXPECT_EQ(coordinator->ProbePrefix(digests, 4).hit_tokens, 24);
  EXPECT_EQ(coordinator->ProbePrefix(digests, 2).hit_tokens, 16);
  EXPECT_EQ(coordinator->ProbePrefix(ChainOf(2, 4), 4).hit_tokens, 0);
}

// behaviour: E1
TEST(CacheCoordinator, ProbingChangesNothing) {
  const auto coordinator = TwoGroups(64);
  const std::vector<Digest> digests = ChainOf(1, 2);
  {
    auto tables = coordinator->MakeTables();
    const auto admission =
        coordinator->AdmitFirst(tables, coordinator->ProbePrefix(digests, 2),
                                Everywhere(*coordinator, {.extent_tokens = 16, .reserve_tokens = 0}));
    coordinator->Publish(tables, admission->epoch, Grains(digests, 0, 2));
  }
  const std::uint64_t version = coordinator->capacity_version();
  const std::int32_t cached = coordinator->num_cached_lcm_blocks();
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(coordinator->ProbePrefix(digests, 2).hit_tokens, 16);
  }
  EXPECT_EQ(coordinator->capacity_version(), version);
  EXPECT_EQ(coordinator->num_cached_lcm_blocks(), cached);
}

// behaviour: E1, G17, T1
TEST(CacheCoordinator, AFailedAdmissionChangesNothing) {
  const auto coordinator = TwoGroups(8);
  const std::vector<Digest> digests = ChainOf(1, 1);
  {
    auto tables = coordinator->MakeTables();
    const auto admission =
        coordinator->AdmitFirst(tables, coordinator->ProbePrefix(digests, 1),
                                Everywhere(*coordinator, {.extent_tokens = 8, .reserve_tokens = 0}));
    coordinator->Publish(tables, admission->epoch, Grains(digests, 0, 1));
  }
  const std::uint64_t version = coordinator->capacity_version();
  auto tables = coordinator->MakeTables();
  const PrefixProbe probe = coordinator->ProbePrefix(digests, 1);
  EXPECT_FALSE(coordinator->AdmitFirst(tables, probe,
                                       Everywhere(*coordinator, {.extent_tokens = 80, .reserve_tokens = 0})));
  EXPECT_EQ(tables[0].num_slots(), 0);
  EXPECT_EQ(coordinator->capacity_version(), version);
  EXPECT_EQ(coordinator->num_cached_lcm_blocks(), 4);
  EXPECT_TRUE(coordinator->AdmitFirst(tables, probe,
                                      Everywhere(*coordinator, {.extent_tokens = 8, .reserve_tokens = 0})))
      << "the probe serves a retry";
}

// behaviour: G6
TEST(CacheCoordinator, HitsAreProtectedFromTheirOwnAdmission) {
  const CacheGroupSpec full{.group_id = "full", .block_granularity = 4, .cache_blocks_per_lcm_block = 1};
  CacheCoordinator coordinator(4, 4, {full});
  const std::vector<Digest> digests = ChainOf(1, 3);
  {
    auto tables = coordinator.MakeTables();
    const auto admission =
        coordinator.AdmitFirst(tables, PrefixProbe{.hits = {{}}},
                               Everywhere(coordinator, {.extent_tokens = 12, .reserve_tokens = 0}));
    coordinator.Publish(tables, admission->epoch, Grains(digests, 0, 3));
  }
  auto tables = coordinator.MakeTables();
  const PrefixProbe probe = coordinator.ProbePrefix(digests, 2);
  EXPECT_FALSE(coordinator.AdmitFirst(tables, probe,
                                      Everywhere(coordinator, {.extent_tokens = 12, .reserve_tokens = 0})));
  const auto admission = coordinator.AdmitFirst(
      tables, probe, Everywhere(coordinator, {.extent_tokens = 8, .reserve_tokens = 0}));
  ASSERT_TRUE(admission);
  EXPECT_TRUE(std::ranges::equal(tables[0].block_ids(), std::vector<std::int32_t>{1, 2, 4, 3}));
}

// behaviour: D8
TEST(CacheCoordinator, PublishingADuplicateDropsItForTheCanonicalBlock) {
  const CacheGroupSpec full{.group_id = "full", .block_granularity = 4, .cache_blocks_per_lcm_block = 1};
  CacheCoordinator coordinator(4, 4, {full});
  const std::vector<Digest> digests = ChainOf(1, 1);
  auto first = coordinator.MakeTables();
  auto second = coordinator.MakeTables();
  const PrefixProbe none{.hits = {{}}};
  const auto first_admission =
      coordinator.AdmitFirst(first, none, Everywhere(coordinator, {.extent_tokens = 4, .reserve_tokens = 0}));
  const auto second_admission = coordinator.AdmitFirst(
      second, none, Everywhere(coordinator, {.extent_tokens = 4, .reserve_tokens = 0}));
  coordinator.Publish(first, first_admission->epoch, Grains(digests, 0, 1));
  coordinator.Publish(second, second_admission->epoch, Grains(digests, 0, 1));
  EXPECT_EQ(second[0].block_ids()[0], first[0].block_ids()[0]);
  EXPECT_EQ(coordinator.pool().num_empty_lcm_blocks(), 3);
}

// One request at a time on one group with a block per grain of four tokens.
class AgedCache {
 public:
  explicit AgedCache(std::int32_t num_lcm_blocks)
      : coordinator(4, num_lcm_blocks,
                    {{.group_id = "full", .block_granularity = 4, .cache_blocks_per_lcm_block = 1}},
                    EvictionPolicy::kAgedFrequency) {}

  Admission Admit(std::vector<BlockTable>& tables, const std::vector<Digest>& digests) {
    const auto num_grains = static_cast<std::int32_t>(digests.size());
    const PrefixProbe probe = coordinator.ProbePrefix(digests, num_grains);
    return *coordinator.AdmitFirst(
        tables, probe,
        Everywhere(coordinator, {.extent_tokens = 4 * num_grains - probe.hit_tokens, .reserve_tokens = 0}));
  }
  void Publish(std::vector<BlockTable>& tables, const Admission& admission, std::span<const Digest> digests) {
    RequestProgress progress = Grains(digests, 0, static_cast<std::int32_t>(digests.size()));
    progress.uses = &admission.uses;
    coordinator.Publish(tables, admission.epoch, progress);
  }
  void Serve(const std::vector<Digest>& digests) {
    auto tables = coordinator.MakeTables();
    Publish(tables, Admit(tables, digests), digests);
  }
  std::vector<std::uint64_t> Values() const {
    std::vector<std::uint64_t> values;
    for (const CacheEntry* entry : coordinator.group(0).index.eviction_order()) {
      values.push_back(entry->use.value);
    }
    return values;
  }
  std::uint64_t level() const { return coordinator.aged_frequency()->level(); }
  std::int64_t num_ghosts() const { return coordinator.aged_frequency()->num_ghosts(); }

  CacheCoordinator coordinator;
};

using Values = std::vector<std::uint64_t>;

TEST(AgedFrequencyInTheCache, UsesAddValueAndVictimsRaiseTheLevel) {
  AgedCache cache(4);
  cache.Serve(ChainOf(1, 2));
  EXPECT_EQ(cache.Values(), (Values{1, 1}));
  cache.Serve(ChainOf(1, 1));  // the first block is used once more
  EXPECT_EQ(cache.Values(), (Values{1, 3}));
  cache.Serve(ChainOf(2, 3));  // takes the two empty blocks and the once-used one
  EXPECT_EQ(cache.level(), 1u);
  EXPECT_EQ(cache.Values(), (Values{1, 1, 1, 3})) << "the level was still 0 when it was admitted";
  cache.Serve(ChainOf(3, 1));
  EXPECT_EQ(cache.Values(), (Values{1, 1, 2, 3}));
}

TEST(AgedFrequencyInTheCache, AChainThatComesBackStartsWithTheUsesOfItsGhost) {
  AgedCache cache(2);
  cache.Serve(ChainOf(1, 2));
  cache.Serve(ChainOf(2, 2));
  EXPECT_EQ(cache.num_ghosts(), 1) << "the end of the prompt, not the grain before it";
  cache.Serve(ChainOf(1, 2));
  EXPECT_EQ(cache.level(), 1u);
  EXPECT_EQ(cache.Values(), (Values{4, 4})) << "level 1, and one use for both grains";
  EXPECT_EQ(cache.num_ghosts(), 1) << "that of the second prompt; the first is published again";
}

TEST(AgedFrequencyInTheCache, WhatIsPublishedLateIsWorthWhatItWasAtItsAdmission) {
  AgedCache cache(4);
  auto tables = cache.coordinator.MakeTables();
  const std::vector<Digest> late = ChainOf(1, 2);
  const Admission admission = cache.Admit(tables, late);
  for (const std::int32_t content : {2, 3, 4}) {
    cache.Serve(ChainOf(content, 2));
  }
  EXPECT_EQ(cache.level(), 1u);
  cache.Publish(tables, admission, late);
  tables.clear();
  EXPECT_EQ(cache.Values(), (Values{1, 1, 2, 2}));
}

// behaviour: T1
TEST(AgedFrequencyInTheCache, AFailedAdmissionCountsNoUse) {
  AgedCache cache(2);
  cache.Serve(ChainOf(1, 2));
  auto tables = cache.coordinator.MakeTables();
  const std::vector<Digest> digests = ChainOf(1, 2);
  EXPECT_FALSE(
      cache.coordinator.AdmitFirst(tables, cache.coordinator.ProbePrefix(digests, 2),
                                   Everywhere(cache.coordinator, {.extent_tokens = 4, .reserve_tokens = 0})));
  EXPECT_EQ(cache.Values(), (Values{1, 1}));
  EXPECT_EQ(cache.level(), 0u);
}

TEST(AgedFrequencyInTheCache, PublishingADuplicateAddsNoUse) {
  AgedCache cache(4);
  const std::vector<Digest> digests = ChainOf(1, 1);
  auto first = cache.coordinator.MakeTables();
  auto second = cache.coordinator.MakeTables();
  const Admission first_admission = cache.Admit(first, digests);
  const Admission second_admission = cache.Admit(second, digests);
  cache.Publish(first, first_admission, digests);
  cache.Publish(second, second_admission, digests);
  first.clear();
  second.clear();
  EXPECT_EQ(cache.Values(), (Values{1}));
}

TEST(CacheCoordinator, LruNotesNothingButEpochs) {
  const auto coordinator = TwoGroups(64);
  const std::vector<Digest> digests = ChainOf(1, 2);
  auto tables = coordinator->MakeTables();
  const auto admission =
      coordinator->AdmitFirst(tables, coordinator->ProbePrefix(digests, 2),
                              Everywhere(*coordinator, {.extent_tokens = 16, .reserve_tokens = 0}));
  coordinator->Publish(tables, admission->epoch, Grains(digests, 0, 2));
  tables.clear();
  for (const CacheEntry* entry : coordinator->group(0).index.eviction_order()) {
    EXPECT_EQ(entry->use.value, 0u);
  }
  EXPECT_EQ(coordinator->aged_frequency(), nullptr);
}

TEST(CacheCoordinator, ClearsOnlyWhenNobodyHoldsACachedBlock) {
  const CacheGroupSpec full{.group_id = "full", .block_granularity = 4, .cache_blocks_per_lcm_block = 1};
  CacheCoordinator coordinator(4, 4, {full});
  const std::vector<Digest> digests = ChainOf(1, 1);
  {
    auto tables = coordinator.MakeTables();
    const auto admission =
        coordinator.AdmitFirst(tables, PrefixProbe{.hits = {{}}},
                               Everywhere(coordinator, {.extent_tokens = 4, .reserve_tokens = 0}));
    coordinator.Publish(tables, admission->epoch, Grains(digests, 0, 1));
    EXPECT_FALSE(coordinator.CanClear());
  }
  EXPECT_TRUE(coordinator.CanClear());
  coordinator.Clear();
  EXPECT_EQ(coordinator.pool().num_empty_lcm_blocks(), 4);
}

// behaviour: M4
TEST(CacheCoordinator, ReleasableParentsAreThoseThatNobodyElseKeeps) {
  const CacheGroupSpec packed{.group_id = "packed", .block_granularity = 4, .cache_blocks_per_lcm_block = 2};
  CacheCoordinator coordinator(4, 8, {packed});
  const std::vector<Digest> digests = ChainOf(1, 4);
  const auto grow = [&](std::vector<BlockTable>& tables, std::int64_t num_tokens) {
    return *coordinator.AdmitFirst(
        tables, PrefixProbe{.hits = {{}}},
        Everywhere(coordinator, {.extent_tokens = num_tokens, .reserve_tokens = 0}));
  };
  const auto num_releasable = [&](const std::vector<const std::vector<BlockTable>*>& holders) {
    const Releasable releasable = coordinator.CountReleasable(holders);
    return std::pair(releasable.num_blocks[0], releasable.num_lcm_blocks[0]);
  };
  auto first = coordinator.MakeTables();
  auto second = coordinator.MakeTables();
  const Admission admission = grow(first, 12);  // parent 1, half of parent 2
  grow(second, 8);                              // the other half, half of parent 3
  EXPECT_EQ(num_releasable({&first}), std::pair(3L, 1L));
  EXPECT_EQ(num_releasable({&second}), std::pair(2L, 1L));
  EXPECT_EQ(num_releasable({&first, &second}), std::pair(5L, 3L));
  coordinator.Publish(first, admission.epoch, Grains(digests, 0, 3));
  EXPECT_EQ(num_releasable({&first}), std::pair(3L, 1L));  // the index gives them up
  auto third = coordinator.MakeTables();
  const auto hit = coordinator.AdmitFirst(third, coordinator.ProbePrefix(digests, 1),
                                          Everywhere(coordinator, {.extent_tokens = 4, .reserve_tokens = 0}));
  ASSERT_TRUE(hit);
  EXPECT_EQ(num_releasable({&first}), std::pair(2L, 0L));
  EXPECT_EQ(num_releasable({&first, &third}), std::pair(4L, 1L));
  second.clear();
  EXPECT_EQ(num_releasable({&first}), std::pair(2L, 1L));
}

// behaviour: T1
TEST(CacheCoordinator, AStepThatCannotBeSecuredChangesNothing) {
  const CacheGroupSpec full{.group_id = "full", .block_granularity = 4, .cache_blocks_per_lcm_block = 1};
  CacheCoordinator coordinator(4, 3, {full});
  auto tables = coordinator.MakeTables();
  auto other = coordinator.MakeTables();
  const auto demands = Everywhere(coordinator, {.extent_tokens = 4, .reserve_tokens = 2});
  coordinator.AdmitFirst(tables, PrefixProbe{.hits = {{}}}, demands);
  EXPECT_FALSE(coordinator.AdmitFirst(other, PrefixProbe{.hits = {{}}}, demands));
  coordinator.AdmitFirst(other, PrefixProbe{.hits = {{}}},
                         Everywhere(coordinator, {.extent_tokens = 4, .reserve_tokens = 0}));
  std::vector<std::vector<std::int32_t>> fresh_ids(1);
  EXPECT_TRUE(coordinator.Secure(tables, 0, 4, fresh_ids));  // the room is there
  EXPECT_FALSE(coordinator.Secure(tables, 0, 5, fresh_ids));
  EXPECT_EQ(tables[0].num_slots(), 2);
  EXPECT_TRUE(fresh_ids[0].empty());
  const std::vector<BlockTable>* holders[] = {&other};
  EXPECT_TRUE(coordinator.CouldSecure(tables, 5, coordinator.CountReleasable(holders)));
  EXPECT_FALSE(coordinator.CouldSecure(tables, 9, coordinator.CountReleasable(holders)));
  other.clear();
  EXPECT_TRUE(coordinator.Secure(tables, 0, 5, fresh_ids));
  EXPECT_EQ(fresh_ids[0], (std::vector<std::int32_t>{3}));
}

}  // namespace
}  // namespace pdmesh
