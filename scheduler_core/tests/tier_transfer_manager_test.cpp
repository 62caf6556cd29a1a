#include "cache/tier/tier_transfer_manager.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "content_keys.h"

namespace pdmesh {
namespace {

// A device of 16 parents, one block each, and two groups, over a host.
struct Tiers {
  explicit Tiers(std::int32_t num_host_lcm_blocks)
      : host(num_host_lcm_blocks, {1, 1}, {1, 1}, {Closure::kClosed, Closure::kClosed}),
        transfers(pool, {&index, &other}, host, &shadow) {}

  CacheBlockRef Publish(std::uint8_t content, std::int32_t group = 0) {
    CacheBlockRef block = std::move(pool.Acquire(group, 1)->front());
    (group == 0 ? index : other).Register(Key(content, group), block, 1, 1);
    return block;
  }

  BlockPool pool{16, {1, 1}};
  PrefixCacheIndex index{pool, 0};
  PrefixCacheIndex other{pool, 1};
  StorageShadow shadow{100};
  HostTier host;
  TierTransferManager transfers;
};

// behaviour: N1
TEST(TierTransferManager, ACandidateHoldsNothing) {
  Tiers tiers(4);
  tiers.Publish(1);
  tiers.transfers.QueueStore(Key(1));
  EXPECT_EQ(tiers.index.num_evictable(), 1);
  EXPECT_EQ(tiers.pool.num_pins(0), 0);
  EXPECT_TRUE(tiers.transfers.is_idle());
}

// behaviour: N1
TEST(TierTransferManager, DropsWhatIsOnTheHostUnderWayDoubledOrGone) {
  Tiers tiers(8);
  for (const std::uint8_t content : {1, 2, 3}) {
    tiers.Publish(content);
  }
  tiers.transfers.QueueStore(Key(1));
  tiers.transfers.CompleteStore(tiers.transfers.Start().stores.front().operation_id, {});  // on the host
  tiers.transfers.QueueStore(Key(2));
  ASSERT_EQ(tiers.transfers.Start().stores.size(), 1U);  // under way
  for (const std::uint8_t content : {1, 2, 3, 3, 4}) {   // 4 was never published
    tiers.transfers.QueueStore(Key(content));
  }
  const PlannedTransfers planned = tiers.transfers.Start();
  ASSERT_EQ(planned.stores.size(), 1U);
  ASSERT_EQ(planned.stores.front().copies.size(), 1U);
  EXPECT_EQ(planned.stores.front().copies.front().key, Key(3));
  EXPECT_TRUE(tiers.transfers.Start().stores.empty());
}

// behaviour: N5
TEST(TierTransferManager, SixCandidatesAndFourPlacesMakeOneOperationOfFour) {
  Tiers tiers(4);
  std::vector<CacheBlockRef> blocks;
  for (std::uint8_t content = 1; content <= 6; ++content) {
    blocks.push_back(tiers.Publish(content));
    tiers.transfers.QueueStore(Key(content));
  }
  const PlannedTransfers planned = tiers.transfers.Start();
  ASSERT_EQ(planned.stores.size(), 1U);
  ASSERT_EQ(planned.stores.front().copies.size(), 4U);
  EXPECT_EQ(tiers.host.index(0).num_entries(), 0);  // not before it is done
  tiers.transfers.QueueStore(Key(5));
  EXPECT_TRUE(tiers.transfers.Start().stores.empty());  // no place at all
  tiers.transfers.CompleteStore(planned.stores.front().operation_id, {});
  EXPECT_EQ(tiers.host.index(0).num_entries(), 4);
}

// behaviour: N6
TEST(TierTransferManager, APinnedSourceStaysUntilItIsDone) {
  Tiers tiers(4);
  tiers.Publish(1);
  tiers.transfers.QueueStore(Key(1));
  const PlannedTransfers planned = tiers.transfers.Start();
  EXPECT_TRUE(planned.stores.front().is_pinned);
  EXPECT_TRUE(tiers.transfers.has_pinned_store());
  EXPECT_EQ(tiers.index.num_evictable(), 0);
  EXPECT_NE(tiers.index.Find(Key(1)), nullptr);
  EXPECT_EQ(tiers.pool.num_pinned_only(0), 1);
  tiers.transfers.CompleteStore(planned.stores.front().operation_id, {});
  EXPECT_EQ(tiers.index.num_evictable(), 1);
  EXPECT_EQ(tiers.pool.num_pinned_only(0), 0);
  EXPECT_FALSE(tiers.transfers.has_pinned_store());
}

// behaviour: N6, M10
TEST(TierTransferManager, AStoreThatRunsAheadHoldsTheHostSideOnly) {
  Tiers tiers(4);
  const std::int32_t source = tiers.Publish(1).block_id();
  tiers.transfers.StoreAhead(Key(1));
  tiers.index.Evict(*tiers.index.Find(Key(1)));  // the block may go to another request at once
  tiers.Publish(2);
  tiers.transfers.QueueStore(Key(2));
  const PlannedTransfers planned = tiers.transfers.Start();
  ASSERT_EQ(planned.stores.size(), 2U);
  EXPECT_FALSE(planned.stores.front().is_pinned);
  EXPECT_EQ(planned.stores.front().copies.front().source_block_id, source);
  EXPECT_TRUE(planned.stores.back().is_pinned);
  EXPECT_EQ(tiers.pool.num_pins(0), 1);
  tiers.transfers.CompleteStore(planned.stores.back().operation_id, {});
  EXPECT_FALSE(tiers.transfers.has_pinned_store());
  EXPECT_FALSE(tiers.transfers.is_idle());
  EXPECT_EQ(tiers.host.pool().num_taken(0), 2);
  tiers.transfers.CompleteStore(planned.stores.front().operation_id, {});
  EXPECT_NE(tiers.host.index(0).Find(Key(1)), nullptr);
}

// behaviour: N7, T3
TEST(TierTransferManager, RepeatedAndUnknownAcknowledgementsChangeNothing) {
  Tiers tiers(4);
  tiers.Publish(1);
  tiers.transfers.QueueStore(Key(1));
  const std::uint64_t operation_id = tiers.transfers.Start().stores.front().operation_id;
  tiers.transfers.CompleteStore(operation_id + 1, {});
  tiers.transfers.CompleteLoad(operation_id, true, {});
  EXPECT_EQ(tiers.host.index(0).num_entries(), 0);
  tiers.transfers.CompleteStore(operation_id, {});
  tiers.transfers.CompleteStore(operation_id, {});
  EXPECT_EQ(tiers.host.index(0).num_entries(), 1);
  EXPECT_EQ(tiers.host.index(0).num_evictable(), 1);
}

// behaviour: I6, I7
TEST(TierTransferManager, CopiesGoGroupByGroupAndIdsRise) {
  Tiers tiers(8);
  std::vector<CacheBlockRef> blocks;
  for (const std::uint8_t content : {1, 2}) {
    blocks.push_back(tiers.Publish(content, 1));
    tiers.transfers.QueueStore(Key(content, 1));
    blocks.push_back(tiers.Publish(content, 0));
    tiers.transfers.QueueStore(Key(content, 0));
  }
  const PlannedTransfers planned = tiers.transfers.Start();
  std::vector<std::int32_t> groups;
  for (const TierCopy& copy : planned.stores.front().copies) {
    groups.push_back(copy.group);
  }
  EXPECT_EQ(groups, (std::vector<std::int32_t>{0, 0, 1, 1}));
  tiers.transfers.CompleteStore(planned.stores.front().operation_id, {});
  blocks.push_back(tiers.Publish(3));
  tiers.transfers.QueueStore(Key(3));
  EXPECT_GT(tiers.transfers.Start().stores.front().operation_id, planned.stores.front().operation_id);
}

WantedLoad Load(Tiers& tiers, std::uint8_t content, CacheBlockRef device, bool reads_storage) {
  return {.key = Key(content),
          .host = tiers.host.Place(0, 0),
          .device = std::move(device),
          .epoch = 1,
          .depth_tokens = 1,
          .reads_storage = reads_storage,
          .publishes_later = reads_storage};
}

// behaviour: N9
TEST(TierTransferManager, ALoadHoldsBothEndsWhateverBecomesOfTheRequest) {
  Tiers tiers(4);
  CacheBlockRef block = std::move(tiers.pool.Acquire(0, 1)->front());
  tiers.transfers.QueueLoad(Load(tiers, 1, block, false));
  const PlannedTransfers planned = tiers.transfers.Start();
  ASSERT_TRUE(planned.load);
  block.Reset();  // the request ended
  EXPECT_EQ(tiers.pool.num_taken(0), 1);
  EXPECT_EQ(tiers.host.pool().num_taken(0), 1);
  EXPECT_TRUE(tiers.transfers.has_load());
  tiers.transfers.CompleteLoad(planned.load->operation_id, true, {});
  tiers.transfers.CompleteLoad(planned.load->operation_id, true, {});
  EXPECT_EQ(tiers.pool.num_taken(0), 0);
  EXPECT_EQ(tiers.host.pool().num_taken(0), 0);
  EXPECT_TRUE(tiers.transfers.is_idle());
}

// behaviour: O4
TEST(TierTransferManager, WhatStorageFilledIsPublishedOnBothTiersWhenItIsThere) {
  Tiers tiers(4);
  tiers.transfers.QueueLoad(Load(tiers, 1, std::move(tiers.pool.Acquire(0, 1)->front()), true));
  const PlannedTransfers planned = tiers.transfers.Start();
  EXPECT_TRUE(planned.load->copies.front().reads_storage);
  EXPECT_EQ(tiers.index.Find(Key(1)), nullptr);
  EXPECT_EQ(tiers.host.index(0).Find(Key(1)), nullptr);
  tiers.transfers.CompleteLoad(planned.load->operation_id, true, {});
  EXPECT_NE(tiers.index.Find(Key(1)), nullptr);
  EXPECT_NE(tiers.host.index(0).Find(Key(1)), nullptr);
}

// behaviour: O5
TEST(TierTransferManager, AFailedLoadPublishesNothingOnAnyTier) {
  Tiers tiers(4);
  tiers.shadow.Register(std::vector<CacheKey>{Key(1), Key(2)});
  tiers.transfers.QueueLoad(Load(tiers, 1, std::move(tiers.pool.Acquire(0, 1)->front()), true));
  CacheBlockRef warm = std::move(tiers.pool.Acquire(0, 1)->front());
  tiers.index.Register(Key(3), warm, 1, 1);  // published ahead of its copy
  tiers.transfers.QueueLoad(Load(tiers, 3, warm, false));
  const std::uint64_t operation_id = tiers.transfers.Start().load->operation_id;
  tiers.transfers.CompleteLoad(operation_id, false, std::vector<CacheKey>{Key(1), Key(2)});
  EXPECT_EQ(tiers.index.num_entries(), 0);
  EXPECT_EQ(tiers.host.index(0).num_entries(), 0);
  EXPECT_FALSE(tiers.shadow.Contains(Key(1)));
  EXPECT_TRUE(tiers.shadow.Contains(Key(2)));  // was no part of it
  warm.Reset();
  EXPECT_EQ(tiers.pool.num_taken(0), 0);
}

// behaviour: O9
TEST(TierTransferManager, AStoreThatIsBackedUpIsKnownInStorageAndStaysSoWithoutItsCopy) {
  Tiers tiers(1);
  tiers.Publish(1);
  tiers.transfers.QueueStore(Key(1));
  const std::uint64_t first = tiers.transfers.Start().stores.front().operation_id;
  EXPECT_FALSE(tiers.shadow.Contains(Key(1)));
  tiers.transfers.CompleteStore(first, std::vector<CacheKey>{Key(1)});
  EXPECT_TRUE(tiers.shadow.Contains(Key(1)));
  tiers.Publish(2);
  tiers.transfers.QueueStore(Key(2));
  tiers.transfers.CompleteStore(tiers.transfers.Start().stores.front().operation_id, {});
  EXPECT_EQ(tiers.host.index(0).Find(Key(1)), nullptr);
  EXPECT_TRUE(tiers.shadow.Contains(Key(1)));
}

TEST(TierTransferManagerDeathTest, ACopyThatIsPlannedTwiceEndsTheProcess) {
  Tiers tiers(4);
  CacheBlockRef block = std::move(tiers.pool.Acquire(0, 1)->front());
  WantedLoad load = Load(tiers, 1, block, false);
  WantedLoad again{.key = load.key,
                   .host = load.host,
                   .device = block,
                   .epoch = 1,
                   .depth_tokens = 1,
                   .reads_storage = false,
                   .publishes_later = false};
  tiers.transfers.QueueLoad(std::move(load));
  tiers.transfers.QueueLoad(std::move(again));
  EXPECT_DEATH(tiers.transfers.Start(), "a copy was planned twice");
}

}  // namespace
}  // namespace pdmesh
