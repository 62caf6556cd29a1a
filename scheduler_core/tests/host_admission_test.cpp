// Admissions behind hits on the host, and what transfers mean to the blocks they hold.
#include "tier_fixture.h"

namespace pdmesh {
namespace {

constexpr TierConfig kHost{.num_host_lcm_blocks = 40};

// behaviour: G3, G16, F1, I6
TEST(HostAdmission, AHostHitTakesOneBlockEachThatIsNotReportedAsFresh) {
  TierFixture fixture(2, 40, {FullGroup(2), SlidingGroup(4, 2)}, kHost);
  fixture.ComputeToHost(3);
  TierRequest request = fixture.Admit(8);
  ASSERT_TRUE(request.admission);
  EXPECT_EQ(request.probe.device_hit_tokens, 0);
  EXPECT_EQ(request.probe.hit_tokens, 6);
  EXPECT_EQ(request.admission->fresh_ids[0].size(), 1U);
  EXPECT_EQ(request.admission->fresh_ids[1].size(), 1U);
  EXPECT_EQ(request.tables[0].num_held_blocks(), 4);
  const PlannedTransfers planned = fixture.coordinator.StartTransfers();
  ASSERT_TRUE(planned.load);
  ASSERT_EQ(planned.load->copies.size(), 5U);
  std::vector<std::int32_t> destinations;
  for (const TierCopy& copy : planned.load->copies) {
    destinations.push_back(copy.destination_block_id);
  }
  const auto full = request.tables[0].block_ids();
  const auto sliding = request.tables[1].block_ids();
  EXPECT_EQ(destinations, (std::vector<std::int32_t>{full[0], full[1], full[2], sliding[1], sliding[2]}));
  EXPECT_EQ(sliding[0], kNullBlockId);
  fixture.coordinator.CompleteLoad(planned.load->operation_id, true, {});
}

// behaviour: F5
TEST(HostAdmission, RestoredGrainsCanBeHitOnTheDeviceAtOnce) {
  TierFixture fixture(2, 40, {FullGroup(2), StateGroup(2)}, kHost);
  fixture.ComputeToHost(3);
  const TierRequest first = fixture.Admit(8);
  const PrefixProbe probe = fixture.coordinator.ProbePrefix(fixture.digests, 3);
  EXPECT_EQ(probe.device_hit_tokens, 6);
  EXPECT_EQ(probe.hits[1].entries.front()->kind, BoundaryKind::kChunk);
  const TierRequest second = fixture.Admit(8);
  EXPECT_EQ(second.tables[0].block_ids()[0], first.tables[0].block_ids()[0]);
  const PlannedTransfers planned = fixture.coordinator.StartTransfers();
  EXPECT_EQ(planned.load->copies.size(), 4U);  // once
  EXPECT_TRUE(planned.stores.empty());
  fixture.coordinator.CompleteLoad(planned.load->operation_id, true, {});
}

// behaviour: F4, T1
TEST(HostAdmission, AFailedOneLeavesNoPinOnEitherTier) {
  TierFixture fixture(2, 4, {FullGroup(2)}, kHost);
  fixture.ComputeToHost(3);
  std::vector<BlockTable> blocking = fixture.coordinator.MakeTables();
  ASSERT_TRUE(fixture.coordinator.AdmitFirst(blocking, fixture.coordinator.ProbePrefix({}, 0),
                                             fixture.DemandsBehind(0, 2)));
  const std::uint64_t version = fixture.coordinator.capacity_version();
  const TierRequest request = fixture.Admit(8);
  EXPECT_FALSE(request.admission);
  EXPECT_FALSE(fixture.coordinator.has_load());
  EXPECT_EQ(fixture.coordinator.capacity_version(), version);
  EXPECT_EQ(fixture.coordinator.host_capacity().active_lcm_blocks, 0);
  EXPECT_EQ(fixture.coordinator.host()->index(0).num_entries(), 3);
}

// behaviour: E7, F4
TEST(HostAdmission, ABlockThatTheDeviceHasAllTheSameIsNotLoaded) {
  TierFixture fixture(4, 40, {FullGroup(4), StateGroup(4)}, kHost);
  fixture.ComputeToHost(3);
  {
    TierRequest chunk{.tables = fixture.coordinator.MakeTables(), .admission = {}, .probe = {}};
    PrefixProbe none = fixture.coordinator.ProbePrefix({}, 0);
    chunk.admission = fixture.coordinator.AdmitFirst(chunk.tables, none, fixture.DemandsBehind(0, 8));
    fixture.coordinator.Publish(chunk.tables, chunk.admission->epoch,
                                {.digests = fixture.digests, .first_grain = 0, .end_grain = 2});
  }
  const TierRequest request = fixture.Admit(16);
  EXPECT_EQ(request.probe.device_hit_tokens, 0);
  EXPECT_EQ(request.probe.hit_tokens, 12);
  const PlannedTransfers planned = fixture.coordinator.StartTransfers();
  EXPECT_EQ(planned.load->copies.size(), 2U);  // the third block and the state
  fixture.coordinator.CompleteLoad(planned.load->operation_id, true, {});
}

// behaviour: O6
TEST(HostAdmission, TooLittleRoomOnTheHostShrinksTheHitToAGrainBoundary) {
  TierFixture fixture(8, 40, {FullGroup(2)}, {.num_host_lcm_blocks = 9, .enable_storage = true}, 2);
  const std::vector<Digest> prompt = std::exchange(fixture.digests, ChainOf(2, 2));
  fixture.ComputeOnce(1, StoreScope::kEverything);
  const PlannedTransfers other = fixture.coordinator.StartTransfers();  // four blocks of the host are taken
  fixture.digests = prompt;
  fixture.PutInStorage(0, {0, 1, 2, 3, 4, 5, 6, 7});
  ASSERT_EQ(fixture.coordinator.ProbePrefix(fixture.digests, 2).hit_tokens, 16);
  TierRequest request = fixture.Admit(20);
  ASSERT_TRUE(request.admission);
  EXPECT_EQ(request.probe.hit_tokens, 8);  // five of eight blocks: 8, not 10
  EXPECT_EQ(fixture.num_attempts, 2);
  EXPECT_EQ(request.tables[0].num_slots(), 10);
  EXPECT_EQ(request.admission->fresh_ids[0].size(), 6U);
  const PlannedTransfers planned = fixture.coordinator.StartTransfers();
  EXPECT_EQ(planned.load->copies.size(), 4U);
  EXPECT_EQ(fixture.coordinator.host_capacity().active_lcm_blocks, 8);
  fixture.CompleteStores(other);
  fixture.coordinator.CompleteLoad(planned.load->operation_id, true, {});
}

// behaviour: O6
TEST(HostAdmission, AShortageIsSharedByAllGroups) {
  TierFixture wide(8, 40, {FullGroup(2), FullGroup(4)}, {.num_host_lcm_blocks = 9, .enable_storage = true},
                   2);
  wide.PutInStorage(0, {0, 1, 2, 3, 4, 5, 6, 7});
  wide.PutInStorage(1, {0, 1, 2, 3});
  ASSERT_EQ(wide.coordinator.ProbePrefix(wide.digests, 2).hit_tokens, 16);
  const TierRequest request = wide.Admit(20);  // 12 blocks are wanted, 9 are there
  ASSERT_TRUE(request.admission);
  EXPECT_EQ(request.probe.hit_tokens, 8);
  EXPECT_EQ(wide.num_attempts, 2);
  EXPECT_EQ(request.tables[0].num_slots(), 10);
  EXPECT_EQ(request.admission->fresh_ids[0].size(), 6U);
  const PlannedTransfers planned = wide.coordinator.StartTransfers();
  EXPECT_EQ(planned.load->copies.size(), 6U);
  EXPECT_EQ(wide.coordinator.host_capacity().active_lcm_blocks, 6);
  wide.coordinator.CompleteLoad(planned.load->operation_id, true, {});
}

// behaviour: O7
TEST(HostAdmission, AWindowIsMatchedAgainAtAShorterHit) {
  // P=g=2, W=5: two blocks before a boundary. The host has room for four of the five blocks.
  TierFixture fixture(2, 40, {FullGroup(2), SlidingGroup(5, 2)},
                      {.num_host_lcm_blocks = 4, .enable_storage = true}, 3);
  fixture.PutInStorage(0, {0, 1, 2});
  fixture.PutInStorage(1, {1, 2});
  ASSERT_EQ(fixture.coordinator.ProbePrefix(fixture.digests, 3).hit_tokens, 6);
  TierRequest request = fixture.Admit(8);
  ASSERT_TRUE(request.admission);
  EXPECT_EQ(request.probe.hit_tokens, 0);  // a window of [hole, 1] would lack a block
  EXPECT_LE(fixture.num_attempts, 1 + 3);
  EXPECT_FALSE(fixture.coordinator.has_load());
  EXPECT_EQ(fixture.coordinator.host_capacity().empty_lcm_blocks, 4);  // all given back
}

// behaviour: O4
TEST(HostAdmission, AGrainThatIsPartlyInStorageIsPublishedWhenAllOfItIsThere) {
  TierFixture fixture(2, 40, {FullGroup(2), FullGroup(2)},
                      {.num_host_lcm_blocks = 40, .enable_storage = true}, 4);
  fixture.ComputeToHost(2);
  fixture.PutInStorage(0, {2});
  fixture.PutInStorage(1, {2});
  TierRequest request = fixture.Admit(8);
  ASSERT_EQ(request.probe.hit_tokens, 6);
  EXPECT_EQ(fixture.coordinator.ProbePrefix(fixture.digests, 3).device_hit_tokens, 4);
  const PlannedTransfers planned = fixture.coordinator.StartTransfers();
  request.tables.clear();
  request.admission.reset();  // completion publishes all the same
  fixture.coordinator.CompleteLoad(planned.load->operation_id, true, {});
  EXPECT_EQ(fixture.coordinator.ProbePrefix(fixture.digests, 3).device_hit_tokens, 6);
  EXPECT_EQ(fixture.coordinator.host()->index(0).num_entries(), 3);
}

// behaviour: O5
TEST(HostAdmission, AFailedLoadTakesBackWhatItPublished) {
  TierFixture fixture(2, 40, {FullGroup(2)}, {.num_host_lcm_blocks = 40, .enable_storage = true}, 4);
  fixture.ComputeToHost(2);
  fixture.PutInStorage(0, {2});
  TierRequest request = fixture.Admit(8);
  const PlannedTransfers planned = fixture.coordinator.StartTransfers();
  fixture.coordinator.CompleteLoad(planned.load->operation_id, false,
                                   std::vector<CacheKey>{fixture.KeyOf(0, 2)});
  request.tables.clear();
  request.admission.reset();
  const PrefixProbe probe = fixture.coordinator.ProbePrefix(fixture.digests, 3);
  EXPECT_EQ(probe.device_hit_tokens, 0);
  EXPECT_EQ(probe.hit_tokens, 4);  // from the host
  EXPECT_EQ(fixture.coordinator.pool().num_empty_lcm_blocks(), 40);
}

// behaviour: N8
TEST(HostAdmission, AWindowBlockThatAStoreHoldsCannotMakeRoomForTheNext) {
  // g=P=4, W=5: two parents. At 8 computed slot 0 expires and would become slot 2.
  for (const bool has_spare_parent : {false, true}) {
    TierFixture fixture(4, has_spare_parent ? 3 : 2, {SlidingGroup(5, 4)}, kHost, 3);
    std::vector<BlockTable> tables = fixture.coordinator.MakeTables();
    PrefixProbe none = fixture.coordinator.ProbePrefix({}, 0);
    auto admission = fixture.coordinator.AdmitFirst(
        tables, none,
        std::vector<GroupDemand>{
            {.extent = SparseSuffix{.first_slot = 0, .extent_tokens = 8, .reserve_tokens = 0},
             .num_promised_blocks = 2}});
    ASSERT_TRUE(admission);
    const std::int32_t first_block = tables[0].block_ids()[0];
    fixture.coordinator.Publish(
        tables, admission->epoch,
        {.digests = fixture.digests, .first_grain = 0, .end_grain = 1, .store_scope = StoreScope::kWindows});
    const PlannedTransfers planned = fixture.coordinator.StartTransfers();
    ASSERT_EQ(planned.stores.size(), 1U);
    const std::vector<Extent> extents = {
        SparseSuffix{.first_slot = 2, .extent_tokens = 12, .reserve_tokens = 0}};
    const RequestProgress nothing{.digests = fixture.digests, .first_grain = 1, .end_grain = 1};
    std::vector<std::vector<std::int32_t>> fresh_ids(1);
    EXPECT_EQ(fixture.coordinator.Secure(tables, 8, 0, fresh_ids), has_spare_parent);
    auto next = fixture.coordinator.AdmitNext(tables, admission->epoch, nothing, 8, extents);
    EXPECT_EQ(next.has_value(), has_spare_parent);
    if (!has_spare_parent) {
      EXPECT_EQ(tables[0].block_ids()[0], first_block);
      fixture.CompleteStores(planned);
      next = fixture.coordinator.AdmitNext(tables, admission->epoch, nothing, 8, extents);
      ASSERT_TRUE(next);
      EXPECT_EQ(tables[0].block_ids()[2], first_block);
    }
    EXPECT_EQ(fixture.coordinator.reserve().NumMissing(0, 0), 0);
    fixture.CompleteStores(planned);
    tables.clear();
  }
}

// behaviour: N9
TEST(HostAdmission, AnEndedRequestReturnsItsLoadingBlocksWhenTheyAreLoaded) {
  TierFixture fixture(2, 10, {FullGroup(2)}, kHost, 4);
  fixture.ComputeToHost(3);
  TierRequest request = fixture.Admit(10);
  const PlannedTransfers planned = fixture.coordinator.StartTransfers();
  EXPECT_EQ(fixture.coordinator.pool().num_empty_lcm_blocks(), 5);
  request.tables.clear();
  request.admission.reset();
  EXPECT_EQ(fixture.coordinator.pool().num_empty_lcm_blocks(), 7);
  EXPECT_EQ(fixture.coordinator.num_cached_lcm_blocks(), 0);
  fixture.coordinator.CompleteLoad(planned.load->operation_id, true, {});
  EXPECT_EQ(fixture.coordinator.num_cached_lcm_blocks(), 3);
}

// behaviour: N9
TEST(HostAdmission, ATransferOfAnEndedRequestTakesNothingFromTheOthersPromises) {
  TierFixture fixture(2, 10, {SlidingGroup(7, 2)}, kHost, 4);
  fixture.ComputeToHost(4);
  TierRequest request = fixture.Admit(10);
  ASSERT_EQ(request.probe.hit_tokens, 8);
  std::vector<BlockTable> others = fixture.coordinator.MakeTables();
  auto other = fixture.coordinator.AdmitFirst(
      others, fixture.coordinator.ProbePrefix({}, 0),
      std::vector<GroupDemand>{
          {.extent = SparseSuffix{.first_slot = 0, .extent_tokens = 2, .reserve_tokens = 0},
           .num_promised_blocks = 4}});
  ASSERT_TRUE(other);
  const PlannedTransfers planned = fixture.coordinator.StartTransfers();
  request.tables.clear();
  request.admission.reset();
  EXPECT_EQ(fixture.coordinator.reserve().num_kept(0), 3);
  fixture.coordinator.CompleteLoad(planned.load->operation_id, true, {});
  EXPECT_EQ(fixture.coordinator.reserve().num_kept(0), 3);
  EXPECT_EQ(fixture.coordinator.reserve().NumMissing(0, 0), 0);
}

// behaviour: R7
TEST(HostAdmission, CopiesAndLoadsStayWithTheirOwner) {
  TierFixture fixture(2, 10, {FullGroup(2, 4, 2)}, kHost, 6);
  fixture.ComputeOnce(5, StoreScope::kEverything);
  const PlannedTransfers stored = fixture.coordinator.StartTransfers();
  const auto bucket = [](std::int32_t block_id) { return (block_id - 1) % 2; };
  ASSERT_EQ(stored.stores.front().copies.size(), 5U);
  for (const TierCopy& copy : stored.stores.front().copies) {
    EXPECT_EQ(bucket(copy.source_block_id), bucket(copy.destination_block_id));
  }
  fixture.CompleteStores(stored);
  fixture.coordinator.Clear();
  TierRequest request = fixture.Admit(12);
  const PlannedTransfers loaded = fixture.coordinator.StartTransfers();
  ASSERT_EQ(loaded.load->copies.size(), 5U);
  for (const TierCopy& copy : loaded.load->copies) {
    EXPECT_EQ(bucket(copy.source_block_id), bucket(copy.destination_block_id));
  }
  fixture.coordinator.CompleteLoad(loaded.load->operation_id, true, {});
}

// behaviour: R7
TEST(HostAdmission, ALoadThatItsOwnerHasNoRoomForIsComputedInstead) {
  TierFixture fixture(2, 1, {FullGroup(2, 4, 2)}, kHost, 3);
  fixture.ComputeToHost(1);  // one copy, in bucket 0
  std::vector<BlockTable> tables = fixture.coordinator.MakeTables();
  const auto held = fixture.coordinator.AdmitFirst(tables, fixture.coordinator.ProbePrefix({}, 0),
                                                   fixture.DemandsBehind(0, 4));
  ASSERT_TRUE(held);
  std::vector<BlockTable> more = fixture.coordinator.MakeTables();
  const auto held_too = fixture.coordinator.AdmitFirst(more, fixture.coordinator.ProbePrefix({}, 0),
                                                       fixture.DemandsBehind(0, 2));
  ASSERT_TRUE(held_too);  // block 3; block 4 is the last one and of bucket 1
  PrefixProbe probe = fixture.coordinator.ProbePrefix(fixture.digests, 1);
  ASSERT_EQ(probe.hit_tokens, 2);
  std::vector<BlockTable> last = fixture.coordinator.MakeTables();
  std::vector<std::int64_t> hits;
  const auto admission = fixture.coordinator.AdmitFirst(last, probe, [&](const PrefixProbe& tried) {
    hits.push_back(tried.hit_tokens);
    return std::optional(fixture.DemandsBehind(tried.hit_tokens, 2));
  });
  ASSERT_TRUE(admission);
  EXPECT_EQ(hits, (std::vector<std::int64_t>{2, 0}));
  EXPECT_EQ(last[0].block_ids()[0], 4);
}

// behaviour: R7
TEST(HostAdmission, OneThatFindsNoRoomForItsLoadsTakesNothingFromTheOthersPromises) {
  TierFixture fixture(4, 6, {SlidingGroup(5, 4), FullGroup(4, 4, 2)}, kHost, 3);
  fixture.ComputeToHost(1);
  std::vector<BlockTable> tables = fixture.coordinator.MakeTables();
  std::vector<GroupDemand> demands = fixture.DemandsBehind(0, 12);
  demands[0].num_promised_blocks = 4;  // three are taken
  const auto held = fixture.coordinator.AdmitFirst(tables, fixture.coordinator.ProbePrefix({}, 0), demands);
  ASSERT_TRUE(held);
  ASSERT_EQ(fixture.coordinator.reserve().num_kept(0), 1);
  PrefixProbe probe = fixture.coordinator.ProbePrefix(fixture.digests, 1);
  ASSERT_EQ(probe.hit_tokens, 4);
  std::vector<BlockTable> last = fixture.coordinator.MakeTables();
  std::vector<std::int64_t> hits;
  const auto admission = fixture.coordinator.AdmitFirst(
      last, probe, [&](const PrefixProbe& tried) -> std::optional<std::vector<GroupDemand>> {
        hits.push_back(tried.hit_tokens);
        if (tried.hit_tokens == 0) {
          return std::nullopt;
        }
        return fixture.DemandsBehind(tried.hit_tokens, 4);
      });
  EXPECT_FALSE(admission);
  EXPECT_EQ(hits, (std::vector<std::int64_t>{4, 0}));
  EXPECT_EQ(fixture.coordinator.reserve().num_kept(0), 1);
  EXPECT_EQ(fixture.coordinator.reserve().NumMissing(0, 0), 0);
}

// behaviour: O4, N9
TEST(HostAdmission, AWindowBlockThatALoadHoldsStaysInItsSlotWhenAnotherHasItsContent) {
  TierFixture fixture(4, 4, {SlidingGroup(9, 4)}, {.num_host_lcm_blocks = 4, .enable_storage = true}, 3);
  fixture.PutInStorage(0, {0});
  TierRequest first = fixture.Admit(8);
  TierRequest second = fixture.Admit(8);
  ASSERT_EQ(first.probe.storage_hit_tokens, 4);
  ASSERT_EQ(second.probe.storage_hit_tokens, 4);
  const PlannedTransfers planned = fixture.coordinator.StartTransfers();
  ASSERT_EQ(planned.load->copies.size(), 2U);
  const RequestProgress progress{.digests = fixture.digests, .first_grain = 1, .end_grain = 2};
  fixture.coordinator.Publish(first.tables, first.admission->epoch, progress);
  const std::int32_t loaded_block = second.tables[0].block_ids()[0];
  fixture.coordinator.Publish(second.tables, second.admission->epoch, progress);
  EXPECT_EQ(second.tables[0].block_ids()[0], loaded_block);
  EXPECT_EQ(second.tables[0].block_ids()[1], first.tables[0].block_ids()[1]);
  EXPECT_EQ(fixture.coordinator.reserve().NumMissing(0, 0), 0);
  fixture.coordinator.CompleteLoad(planned.load->operation_id, true, {});
  EXPECT_EQ(fixture.coordinator.reserve().NumMissing(0, 0), 0);
}

// behaviour: M10, M11, N3
TEST(HostAdmission, ASnapshotHasTheFullGrainsTheNewestStateAndTheWindowsItNeeds) {
  TierFixture fixture(2, 60, {FullGroup(2), SlidingGroup(4, 2), StateGroup(2)}, kHost, 6);
  TierRequest request{.tables = fixture.coordinator.MakeTables(), .admission = {}, .probe = {}};
  PrefixProbe none = fixture.coordinator.ProbePrefix({}, 0);
  request.admission = fixture.coordinator.AdmitFirst(request.tables, none, fixture.DemandsBehind(0, 12));
  const auto publish = [&](std::int32_t first, std::int32_t end, BoundaryKind kind) {
    fixture.coordinator.Publish(request.tables, request.admission->epoch,
                                {.digests = fixture.digests,
                                 .first_grain = first,
                                 .end_grain = end,
                                 .kind = kind,
                                 .state_checkpoint_tokens = std::int64_t{end} * 2});
  };
  publish(0, 3, BoundaryKind::kEndpoint);
  publish(3, 5, BoundaryKind::kChunk);
  fixture.coordinator.QueueSnapshot(fixture.digests, 5, StoreGuard::kAhead);
  request.tables.clear();
  request.admission.reset();
  const PlannedTransfers planned = fixture.coordinator.StartTransfers();
  ASSERT_EQ(planned.stores.size(), 1U);
  EXPECT_FALSE(planned.stores.front().is_pinned);
  std::vector<CacheKey> keys;
  for (const TierCopy& copy : planned.stores.front().copies) {
    keys.push_back(copy.key);
  }
  std::vector<CacheKey> expected;
  for (const std::int64_t slot : {0, 1, 2, 3, 4}) {
    expected.push_back(fixture.KeyOf(0, slot));
  }
  for (const std::int64_t slot : {1, 2, 3, 4}) {
    expected.push_back(fixture.KeyOf(1, slot));
  }
  expected.push_back(fixture.KeyOf(2, 2));
  EXPECT_EQ(keys, expected);
  EXPECT_EQ(fixture.coordinator.num_cached_lcm_blocks(), 5 + 4 + 1);  // none of them pinned
  fixture.CompleteStores(planned);
}

// behaviour: N11, O11, D9
TEST(HostAdmission, AClearWaitsForTransfersAndLeavesTheHost) {
  TierFixture fixture(2, 10, {FullGroup(2)}, kHost, 4);
  fixture.ComputeOnce(3, StoreScope::kEverything);
  const PlannedTransfers planned = fixture.coordinator.StartTransfers();
  EXPECT_FALSE(fixture.coordinator.CanClear());
  fixture.CompleteStores(planned);
  ASSERT_TRUE(fixture.coordinator.CanClear());
  fixture.coordinator.Clear();
  EXPECT_EQ(fixture.coordinator.pool().num_empty_lcm_blocks(), 10);
  EXPECT_EQ(fixture.coordinator.host_capacity().cached_lcm_blocks, 3);
  EXPECT_EQ(fixture.coordinator.ProbePrefix(fixture.digests, 4).hit_tokens, 6);
  fixture.coordinator.ClearHost();
  EXPECT_EQ(fixture.coordinator.host_capacity().empty_lcm_blocks, 40);
  EXPECT_EQ(fixture.coordinator.ProbePrefix(fixture.digests, 4).hit_tokens, 0);
}

}  // namespace
}  // namespace pdmesh
