// The transaction that serves all groups of a request: what it takes, marks and reports.
#include <gtest/gtest.h>

#include <algorithm>

#include "coordinator_fixture.h"

namespace pdmesh {
namespace {

// behaviour: G1, T1
TEST(Admission, OneGroupThatDoesNotFitLeavesAllOthersUntouched) {
  const auto coordinator = TwoGroups(8);
  const std::vector<GroupDemand> demands = {
      {.extent = DenseGrowth{.extent_tokens = 8, .reserve_tokens = 0}},
      {.extent = DenseGrowth{.extent_tokens = 28, .reserve_tokens = 0}}};  // two parents and seven
  auto tables = coordinator->MakeTables();
  EXPECT_FALSE(coordinator->AdmitFirst(tables, coordinator->ProbePrefix({}, 0), demands));
  EXPECT_EQ(coordinator->pool().num_empty_lcm_blocks(), 8);
  EXPECT_EQ(tables[0].num_slots() + tables[1].num_slots(), 0);
  const std::vector<GroupDemand> less = {demands[0],
                                         {.extent = DenseGrowth{.extent_tokens = 24, .reserve_tokens = 0}}};
  EXPECT_TRUE(coordinator->AdmitFirst(tables, coordinator->ProbePrefix({}, 0), less));
  EXPECT_EQ(coordinator->pool().num_empty_lcm_blocks(), 0);
}

// behaviour: G2
TEST(Admission, GrainsThatAreNotNewPublishNothingWhateverTheirKind) {
  const auto coordinator = TwoGroups(64);
  const std::vector<Digest> digests = ChainOf(1, 2);
  auto tables = coordinator->MakeTables();
  const auto admission =
      coordinator->AdmitFirst(tables, coordinator->ProbePrefix(digests, 2),
                              Everywhere(*coordinator, {.extent_tokens = 16, .reserve_tokens = 0}));
  coordinator->Publish(tables, admission->epoch, Grains(digests, 0, 1));
  const std::uint64_t version = coordinator->publication_version();
  RequestProgress nothing_new = Grains(digests, 1, 1);
  nothing_new.kind = BoundaryKind::kPromoted;
  coordinator->Publish(tables, admission->epoch + 1, nothing_new);
  EXPECT_EQ(coordinator->publication_version(), version);
  EXPECT_EQ(coordinator->ProbePrefix(digests, 2).hit_tokens, 8);
  const CacheGroup& group = coordinator->group(0);
  EXPECT_EQ(group.index.Find(group.keys.KeyOf(digests, 1))->kind, BoundaryKind::kChunk);
  EXPECT_EQ(group.index.Find(group.keys.KeyOf(digests, 1))->epoch, admission->epoch);
}

// behaviour: G15
TEST(Admission, OnlyFirstAdmissionsThatSucceedTakeAnEpoch) {
  const CacheGroupSpec full{.group_id = "full", .block_granularity = 4, .cache_blocks_per_lcm_block = 1};
  CacheCoordinator coordinator(4, 4, {full});
  const std::vector<Digest> digests = ChainOf(1, 3);
  const auto admit = [&](std::vector<BlockTable>& tables, std::int64_t num_tokens) {
    return coordinator.AdmitFirst(
        tables, coordinator.ProbePrefix(digests, 3),
        Everywhere(coordinator, {.extent_tokens = num_tokens, .reserve_tokens = 0}));
  };
  const auto epoch_of = [&](std::int64_t slot) {
    const CacheGroup& group = coordinator.group(0);
    return group.index.Find(group.keys.KeyOf(digests, slot))->epoch;
  };
  auto first = coordinator.MakeTables();
  const auto first_admission = admit(first, 8);
  ASSERT_TRUE(first_admission);
  auto refused = coordinator.MakeTables();
  EXPECT_FALSE(admit(refused, 12));
  auto second = coordinator.MakeTables();
  const auto second_admission = admit(second, 4);
  ASSERT_TRUE(second_admission);
  EXPECT_EQ(second_admission->epoch, first_admission->epoch + 1);
  const Extent nothing = DenseGrowth{.extent_tokens = 0, .reserve_tokens = 0};
  const auto later =
      coordinator.AdmitNext(first, first_admission->epoch, Grains(digests, 0, 2), 8, std::span(&nothing, 1));
  EXPECT_EQ(later->epoch, first_admission->epoch);
  EXPECT_EQ(epoch_of(0), first_admission->epoch) << "published after the second admission";
  second.clear();
  first.clear();
  auto third = coordinator.MakeTables();
  const auto third_admission = admit(third, 4);
  EXPECT_EQ(third_admission->epoch, second_admission->epoch + 1);
  EXPECT_EQ(epoch_of(0), third_admission->epoch);
  EXPECT_EQ(epoch_of(1), third_admission->epoch) << "all hits alike";
}

// behaviour: G16
TEST(Admission, FreshAreAcquiredBlocksAndNeitherHitsNorRoom) {
  const CacheGroupSpec full{.group_id = "full", .block_granularity = 4, .cache_blocks_per_lcm_block = 1};
  CacheCoordinator coordinator(4, 8, {full});
  const std::vector<Digest> digests = ChainOf(1, 2);
  {
    auto tables = coordinator.MakeTables();
    const auto admission =
        coordinator.AdmitFirst(tables, coordinator.ProbePrefix({}, 0),
                               Everywhere(coordinator, {.extent_tokens = 8, .reserve_tokens = 0}));
    coordinator.Publish(tables, admission->epoch, Grains(digests, 0, 2));
  }
  auto tables = coordinator.MakeTables();
  const auto admission =
      coordinator.AdmitFirst(tables, coordinator.ProbePrefix(digests, 2),
                             Everywhere(coordinator, {.extent_tokens = 2, .reserve_tokens = 5}));
  EXPECT_TRUE(std::ranges::equal(tables[0].block_ids(), std::vector<std::int32_t>{1, 2, 3, 4}));
  EXPECT_EQ(admission->fresh_ids[0], (std::vector<std::int32_t>{3, 4})) << "the reserve included";
  const Extent in_the_room = DenseGrowth{.extent_tokens = 6, .reserve_tokens = 0};
  const auto later =
      coordinator.AdmitNext(tables, admission->epoch, Grains(digests, 2, 2), 10, std::span(&in_the_room, 1));
  EXPECT_EQ(later->fresh_ids[0], std::vector<std::int32_t>{});
}

// behaviour: C8
TEST(AdmissionDeathTest, ChecksWhatItsConfigurationWasCheckedFor) {
  const CacheGroupSpec full{.group_id = "full", .block_granularity = 4, .cache_blocks_per_lcm_block = 3};
  EXPECT_DEATH(CacheCoordinator(4, 4, {}), "at least one group");
  EXPECT_DEATH(CacheCoordinator(6, 4, {full}), "does not divide");
  const CacheCoordinator coordinator(8, 4, {full, full});
  for (const std::int32_t group : {0, 1}) {
    EXPECT_EQ(coordinator.group(group).keys.group, group);
    EXPECT_EQ(coordinator.pool().cache_blocks_per_lcm_block(group), 3);
  }
}

}  // namespace
}  // namespace pdmesh
