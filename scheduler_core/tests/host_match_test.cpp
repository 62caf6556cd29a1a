// How far the tiers below the device back a prompt.
#include "tier_fixture.h"

namespace pdmesh {
namespace {

constexpr TierConfig kHostAndStorage{.num_host_lcm_blocks = 40, .enable_storage = true};

// P=g=2, the first grain on the device, the rest of the slots in storage.
PrefixProbe ProbeWith(TierFixture& fixture, const std::vector<std::vector<std::int64_t>>& slots_by_group) {
  fixture.ComputeOnce(1);
  for (std::size_t group = 0; group < slots_by_group.size(); ++group) {
    fixture.PutInStorage(static_cast<std::int32_t>(group), slots_by_group[group]);
  }
  return fixture.coordinator.ProbePrefix(fixture.digests, 8);
}

// behaviour: F1 F2
TEST(HostMatch, TheHostContinuesWhereTheDeviceEnds) {
  TierFixture fixture(2, 40, {FullGroup(2), SlidingGroup(4, 2)}, kHostAndStorage);
  const PrefixProbe probe = ProbeWith(fixture, {{1, 2, 3}, {2, 3}});
  EXPECT_EQ(probe.device_hit_tokens, 2);
  EXPECT_EQ(probe.hit_tokens, 8);
  EXPECT_EQ(probe.host_hits[0].first_slot, 1);
  EXPECT_EQ(probe.host_hits[0].hits.size(), 3U);
  EXPECT_EQ(probe.host_hits[1].first_slot, 2);  // [hole, 2, 3]
  EXPECT_EQ(probe.host_hits[1].hits.size(), 2U);
  EXPECT_TRUE(probe.hits[1].entries.empty());  // nobody reads the device's window any more
}

// behaviour: F2 F4
TEST(HostMatch, ABlockAboveTheCommonBoundaryIsNoPartOfTheHit) {
  TierFixture fixture(2, 40, {FullGroup(2), SlidingGroup(4, 2)}, kHostAndStorage);
  const PrefixProbe probe = ProbeWith(fixture, {{1, 2, 3}, {1, 2}});
  EXPECT_EQ(probe.hit_tokens, 6);
  EXPECT_EQ(probe.host_hits[0].end_slot(), 3);
}

// behaviour: F2
TEST(HostMatch, AFullGroupNeedsEveryBlockBehindTheDevice) {
  TierFixture fixture(2, 40, {FullGroup(2), SlidingGroup(4, 2)}, kHostAndStorage);
  EXPECT_EQ(ProbeWith(fixture, {{1, 3}, {1, 2, 3}}).hit_tokens, 4);
}

// behaviour: F3
TEST(HostMatch, ACascadeThatEndsAtTheDeviceTakesNothingFromTheHost) {
  TierFixture fixture(2, 40, {FullGroup(2), SlidingGroup(6, 2), SlidingGroup(2, 2)}, kHostAndStorage);
  const PrefixProbe probe = ProbeWith(fixture, {{1, 2, 3, 4}, {2, 3, 4}, {3}});
  EXPECT_EQ(probe.hit_tokens, 2);
  EXPECT_TRUE(probe.host_hits.empty());
  EXPECT_EQ(probe.hits[1].entries.size(), 1U);
}

// behaviour: F4
TEST(HostMatch, AWindowOfOneTokenExtendsByHoles) {
  TierFixture fixture(2, 40, {FullGroup(2), SlidingGroup(1, 2)}, kHostAndStorage);
  fixture.ComputeOnce(1);
  fixture.PutInStorage(0, {1, 2});
  TierRequest request = fixture.Admit(8);
  ASSERT_TRUE(request.admission);
  EXPECT_EQ(request.probe.hit_tokens, 6);
  EXPECT_EQ(request.tables[1].num_slots(), 4);
  EXPECT_EQ(request.tables[1].num_reclaimed_slots(), 3);
  EXPECT_EQ(request.tables[1].num_held_blocks(), 1);
}

// behaviour: E8 E9
TEST(HostMatch, WhatTheHostBacksNeedsNoPromotion) {
  TierFixture fixture(4, 40, {FullGroup(4), StateGroup(4)}, kHostAndStorage);
  fixture.ComputeOnce(4);
  {
    TierRequest longer{.tables = fixture.coordinator.MakeTables(), .admission = {}, .probe = {}};
    PrefixProbe none = fixture.coordinator.ProbePrefix({}, 0);
    longer.admission = fixture.coordinator.AdmitFirst(longer.tables, none, fixture.DemandsBehind(0, 32));
    fixture.coordinator.Publish(longer.tables, longer.admission->epoch,
                                {.digests = fixture.digests, .first_grain = 0, .end_grain = 8});
  }
  const PrefixProbe without = fixture.coordinator.ProbePrefix(fixture.digests, 8);
  EXPECT_EQ(without.hit_tokens, 16);
  EXPECT_EQ(without.closed_tokens, 32);
  fixture.PutInStorage(0, {4, 5, 6, 7});
  fixture.PutInStorage(1, {7});
  const PrefixProbe with = fixture.coordinator.ProbePrefix(fixture.digests, 8);
  EXPECT_EQ(with.hit_tokens, 32);
  EXPECT_EQ(with.closed_tokens, 32);
}

// behaviour: E8
TEST(HostMatch, APromotionBoundaryIsTheLargerOfBothTiers) {
  TierFixture fixture(4, 40, {FullGroup(4), StateGroup(4)}, kHostAndStorage);
  fixture.ComputeOnce(2);
  fixture.PutInStorage(0, {2, 3, 4});  // full history alone
  const PrefixProbe probe = fixture.coordinator.ProbePrefix(fixture.digests, 8);
  EXPECT_EQ(probe.hit_tokens, 8);
  EXPECT_EQ(probe.closed_tokens, 20);
}

// behaviour: O3
TEST(HostMatch, AKeyInTheShadowIsAHitThatMustBeRead) {
  TierFixture fixture(2, 40, {FullGroup(2)}, kHostAndStorage);
  fixture.ComputeToHost(2);
  fixture.PutInStorage(0, {2});
  TierRequest request = fixture.Admit(8);
  ASSERT_TRUE(request.admission);
  EXPECT_EQ(request.probe.hit_tokens, 6);
  EXPECT_EQ(request.probe.storage_hit_tokens, 2);
  const PlannedTransfers planned = fixture.coordinator.StartTransfers();
  ASSERT_TRUE(planned.load);
  std::vector<bool> reads_storage;
  for (const TierCopy& copy : planned.load->copies) {
    reads_storage.push_back(copy.reads_storage);
  }
  EXPECT_EQ(reads_storage, (std::vector<bool>{false, false, true}));
  fixture.coordinator.CompleteLoad(planned.load->operation_id, true, {});
}

// behaviour: O1
TEST(HostMatch, WithoutStorageThereIsNoShadowAndNothingToAskFor) {
  TierFixture fixture(2, 40, {FullGroup(2)}, {.num_host_lcm_blocks = 40});
  fixture.PutInStorage(0, {0, 1, 2});
  EXPECT_EQ(fixture.coordinator.shadow(), nullptr);
  EXPECT_EQ(fixture.coordinator.ProbePrefix(fixture.digests, 8).hit_tokens, 0);
  EXPECT_TRUE(fixture.coordinator.StorageKeysFor(fixture.digests, 8).empty());
}

// behaviour: O10
TEST(HostMatch, StorageIsAskedForWhatNeitherTierHas) {
  TierFixture fixture(2, 40, {FullGroup(2), SlidingGroup(2, 2)}, kHostAndStorage);
  fixture.ComputeToHost(2);
  fixture.ComputeOnce(1);
  const std::vector<CacheKey> keys = fixture.coordinator.StorageKeysFor(fixture.digests, 4);
  const std::vector<CacheKey> expected = {fixture.KeyOf(0, 2), fixture.KeyOf(1, 2), fixture.KeyOf(0, 3),
                                          fixture.KeyOf(1, 3)};
  EXPECT_EQ(keys, expected);
}

// behaviour: E11
TEST(HostMatch, APromptThatAPeerFillsTakesNothingFromTheHost) {
  TierFixture fixture(2, 40, {FullGroup(2)}, kHostAndStorage);
  fixture.ComputeToHost(4);
  EXPECT_EQ(fixture.coordinator.ProbePrefix(fixture.digests, 4, ProbeScope::kHistoryGroups).hit_tokens, 0);
  EXPECT_EQ(fixture.coordinator.ProbePrefix(fixture.digests, 4, ProbeScope::kAllGroups).hit_tokens, 8);
}

}  // namespace
}  // namespace pdmesh
