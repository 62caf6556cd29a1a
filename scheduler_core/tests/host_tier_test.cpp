#include "cache/tier/host_tier.h"

#include <gtest/gtest.h>

#include <vector>

namespace pdmesh {
namespace {

CacheKey Key(std::int32_t group, std::uint8_t content) {
  Digest digest{};
  digest[0] = content;
  return {.name_space = 0, .group = group, .digest = digest, .grain_offset = 0};
}

// Places and publishes a copy that nobody holds afterwards.
std::int32_t Put(HostTier& host, std::int32_t group, std::uint8_t content, std::uint64_t epoch,
                 std::int32_t bucket = 0) {
  const CacheBlockRef block = host.Place(group, bucket);
  host.Publish(Key(group, content), block, epoch, 1, BoundaryKind::kChunk);
  return block.block_id();
}

bool Has(const HostTier& host, std::int32_t group, std::uint8_t content) {
  return host.index(group).Find(Key(group, content)) != nullptr;
}

// behaviour: A1, N4
TEST(HostTier, UsesHolesAndEmptyParentsBeforeItGivesACopyUp) {
  HostTier host(2, {2, 1}, {1, 1}, {Closure::kClosed, Closure::kClosed});
  EXPECT_EQ(Put(host, 0, 1, 1), 1);
  EXPECT_EQ(Put(host, 1, 2, 2), 2);  // parent 2 of one child
  EXPECT_EQ(Put(host, 0, 3, 3), 2);  // the hole in parent 1
  EXPECT_TRUE(Has(host, 0, 1) && Has(host, 1, 2) && Has(host, 0, 3));
}

// behaviour: N4
TEST(HostTier, GivesUpTheColdestCopyOfTheGroupFirst) {
  HostTier host(4, {1, 1}, {1, 1}, {Closure::kClosed, Closure::kClosed});
  Put(host, 1, 9, 1);  // colder than all, but of another group
  Put(host, 0, 1, 2);
  Put(host, 0, 2, 3);
  Put(host, 0, 3, 4);
  {
    const CacheEntry* hit = host.index(0).Find(Key(0, 1));
    const CacheBlockRef held = hit->block;
    host.NoteHit(*hit, 2);  // as old as before, but hit
  }
  Put(host, 0, 4, 5);
  EXPECT_TRUE(Has(host, 1, 9));
  EXPECT_TRUE(Has(host, 0, 1));
  EXPECT_FALSE(Has(host, 0, 2));
  EXPECT_TRUE(Has(host, 0, 3) && Has(host, 0, 4));
}

// behaviour: N4
TEST(HostTier, TakesTheForeignParentWhoseWarmestCopyIsColdest) {
  HostTier host(2, {1, 2}, {1, 1}, {Closure::kClosed, Closure::kClosed});
  Put(host, 1, 1, 1);  // parent 1: epochs 1 and 9
  Put(host, 1, 2, 9);
  Put(host, 1, 3, 5);  // parent 2: epochs 5 and 6
  Put(host, 1, 4, 6);
  Put(host, 0, 5, 10);
  EXPECT_TRUE(Has(host, 1, 1) && Has(host, 1, 2));
  EXPECT_FALSE(Has(host, 1, 3) || Has(host, 1, 4));
  EXPECT_TRUE(Has(host, 0, 5));
}

// behaviour: N4
TEST(HostTier, TakesTheForeignParentOfTheGroupWhoseCopiesAreColdest) {
  for (const std::int32_t colder : {1, 2}) {
    HostTier host(2, {1, 1, 1}, {1, 1, 1}, {Closure::kClosed, Closure::kClosed, Closure::kClosed});
    Put(host, colder, 1, 1);
    Put(host, 3 - colder, 2, 2);
    Put(host, 0, 3, 3);
    EXPECT_FALSE(Has(host, colder, 1));
    EXPECT_TRUE(Has(host, 3 - colder, 2) && Has(host, 0, 3));
  }
}

// behaviour: N4
TEST(HostTier, AHeldCopyKeepsItsParent) {
  HostTier host(1, {1, 2}, {1, 1}, {Closure::kClosed, Closure::kClosed});
  Put(host, 1, 1, 1);
  Put(host, 1, 2, 2);
  const CacheBlockRef held = host.index(1).Find(Key(1, 2))->block;
  EXPECT_FALSE(host.Place(0, 0));
  EXPECT_TRUE(Has(host, 1, 1) && Has(host, 1, 2));
}

// behaviour: R7
TEST(HostTier, ACopyLiesInTheBucketThatIsAskedFor) {
  HostTier host(2, {4}, {2}, {Closure::kClosed});
  EXPECT_EQ(Put(host, 0, 1, 1, 1), 2);
  EXPECT_EQ(Put(host, 0, 2, 2, 1), 4);
  EXPECT_EQ(Put(host, 0, 3, 3, 1), 6);
  EXPECT_EQ(Put(host, 0, 4, 4, 1), 8);
  EXPECT_EQ(Put(host, 0, 5, 5, 0), 1);
  EXPECT_EQ(Put(host, 0, 6, 6, 1), 2);  // the coldest of that bucket gave way
  EXPECT_FALSE(Has(host, 0, 1));
}

// behaviour: A1, T5
TEST(HostTier, AClearedTierIsEmpty) {
  HostTier host(3, {2}, {1}, {Closure::kClosed});
  Put(host, 0, 1, 1);
  Put(host, 0, 2, 2);
  EXPECT_EQ(host.num_cached_lcm_blocks(), 1);
  CacheBlockRef unpublished = host.Place(0, 0);
  EXPECT_FALSE(host.CanClear());
  unpublished.Reset();
  ASSERT_TRUE(host.CanClear());
  host.Clear();
  EXPECT_EQ(host.pool().num_empty_lcm_blocks(), 3);
}

}  // namespace
}  // namespace pdmesh
