#include "cache/prefix/prefix_index.h"

#include <gtest/gtest.h>

#include "cache/prefix/prefix_hasher.h"
#include "cache/prefix/prefix_matcher.h"

namespace pdmesh {
namespace {

class PrefixIndexTest : public testing::Test {
 protected:
  CacheKey Key(std::int32_t grain, std::int32_t offset = 0) const {
    return {.name_space = 0, .group = 0, .digest = DigestOf(grain), .grain_offset = offset};
  }
  static Digest DigestOf(std::int32_t grain) { return HashGrain({}, std::vector<std::int32_t>{grain}, {}); }

  CacheBlockRef Block() { return std::move(pool_.Acquire(0, 1)->front()); }

  std::vector<std::int32_t> EvictionOrder() const {
    std::vector<std::int32_t> ids;
    for (const CacheEntry* entry : index_.eviction_order()) {
      ids.push_back(entry->block.block_id());
    }
    return ids;
  }

  BlockPool pool_{8, {1}};
  PrefixCacheIndex index_{pool_, 0};
};

// behaviour: D7
TEST_F(PrefixIndexTest, AllFourPartsOfAKeyAreIdentity) {
  index_.Register(Key(1, 0), Block(), 1, 4);
  CacheKey other = Key(1, 0);
  EXPECT_NE(index_.Find(other), nullptr);
  other.name_space = 1;
  EXPECT_EQ(index_.Find(other), nullptr);
  EXPECT_EQ(index_.Find(Key(1, 1)), nullptr);
  EXPECT_EQ(index_.Find(Key(2, 0)), nullptr);
  other = Key(1, 0);
  other.group = 1;
  EXPECT_EQ(index_.Find(other), nullptr);
}

// behaviour: D8
TEST_F(PrefixIndexTest, ATakenKeyKeepsItsCanonicalBlock) {
  const CacheBlockRef first = Block();
  const CacheBlockRef duplicate = Block();
  index_.Register(Key(1), first, 1, 4);
  EXPECT_EQ(index_.Register(Key(1), duplicate, 2, 4).block_id(), first.block_id());
  EXPECT_EQ(index_.num_entries(), 1);
  EXPECT_EQ(index_.Find(Key(1))->epoch, 2u);
}

// behaviour: D8
TEST_F(PrefixIndexTest, PublishingAgainNeverMakesAnEntryOlder) {
  const CacheBlockRef block = Block();
  index_.Register(Key(1), block, 5, 4);
  index_.Register(Key(1), block, 3, 4);
  EXPECT_EQ(index_.Find(Key(1))->epoch, 5u);
}

// behaviour: A9, G7
TEST_F(PrefixIndexTest, OnlyBlocksThatNobodyElseHoldsAreEvictable) {
  CacheBlockRef held = Block();
  index_.Register(Key(1), held, 1, 4);
  EXPECT_EQ(index_.num_evictable(), 0);
  held.Reset();
  EXPECT_EQ(index_.num_evictable(), 1);
  held = index_.Find(Key(1))->block;
  EXPECT_EQ(index_.num_evictable(), 0);
}

// behaviour: G8
TEST_F(PrefixIndexTest, OldEpochsGoFirstAndDeepBlocksBeforeShallowOnes) {
  index_.Register(Key(1), Block(), 2, 4);   // block 1
  index_.Register(Key(2), Block(), 2, 8);   // block 2
  index_.Register(Key(3), Block(), 1, 4);   // block 3
  index_.Register(Key(4), Block(), 2, 12);  // block 4
  EXPECT_EQ(EvictionOrder(), (std::vector<std::int32_t>{3, 4, 2, 1}));
}

TEST_F(PrefixIndexTest, ASmallerValueGoesFirstWhateverTheEpoch) {
  index_.Register(Key(1), Block(), 1, 4, BoundaryKind::kChunk, {.value = 7});  // block 1
  index_.Register(Key(2), Block(), 2, 4, BoundaryKind::kChunk, {.value = 5});  // block 2
  index_.Register(Key(3), Block(), 3, 4, BoundaryKind::kChunk, {.value = 5});  // block 3
  EXPECT_EQ(EvictionOrder(), (std::vector<std::int32_t>{2, 3, 1}));
}

TEST_F(PrefixIndexTest, TouchingAndPublishingAgainOnlyRaiseAUse) {
  const CacheBlockRef held = Block();
  index_.Register(Key(1), held, 1, 4, BoundaryKind::kChunk, {.value = 5, .uses = 2, .is_remembered = true});
  index_.Touch(*index_.Find(Key(1)), 2, {.value = 7, .uses = 3});
  index_.Register(Key(1), held, 1, 4, BoundaryKind::kChunk, {.value = 6});
  EXPECT_EQ(index_.Find(Key(1))->use.value, 7u);
  EXPECT_EQ(index_.Find(Key(1))->use.uses, 3);
  EXPECT_TRUE(index_.Find(Key(1))->use.is_remembered);
}

TEST_F(PrefixIndexTest, ATouchedEntryMovesToItsNewEpoch) {
  index_.Register(Key(1), Block(), 1, 4);
  index_.Register(Key(2), Block(), 2, 4);
  {
    const CacheBlockRef held = index_.Find(Key(1))->block;
    index_.Touch(*index_.Find(Key(1)), 3);
  }
  EXPECT_EQ(EvictionOrder(), (std::vector<std::int32_t>{2, 1}));
}

TEST_F(PrefixIndexTest, EvictingFreesTheBlock) {
  index_.Register(Key(1), Block(), 1, 4);
  EXPECT_EQ(pool_.num_empty_lcm_blocks(), 7);
  index_.Evict(*index_.Find(Key(1)));
  EXPECT_EQ(pool_.num_empty_lcm_blocks(), 8);
  EXPECT_EQ(index_.Find(Key(1)), nullptr);
}

// behaviour: E3
TEST_F(PrefixIndexTest, FullAttentionMatchesFromTheLeftToTheFirstMiss) {
  const GroupKeySpace keys{.name_space = 0, .group = 0, .slots_per_grain = 2};
  const std::vector<Digest> digests = {DigestOf(0), DigestOf(1), DigestOf(2)};
  for (const std::int64_t slot : {0, 1, 2, 4, 5}) {
    index_.Register(keys.KeyOf(digests, slot), Block(), 1, slot);
  }
  EXPECT_EQ(FullAttentionMatcher::Match(index_, keys, digests, 3).entries.size(), 3u);
  EXPECT_EQ(FullAttentionMatcher::Match(index_, keys, digests, 1).entries.size(), 2u)
      << "bounded by the grains asked for";
}

// behaviour: D8
TEST_F(PrefixIndexTest, ABlockUnderASecondKeyEndsTheProcess) {
  const CacheBlockRef block = Block();
  index_.Register(Key(1), block, 1, 4);
  EXPECT_DEATH(index_.Register(Key(2), block, 1, 4), "second key");
}

// behaviour: D7
TEST_F(PrefixIndexTest, OneDigestNamesEveryBlockOfItsGrain) {
  const GroupKeySpace keys{.name_space = 0, .group = 0, .slots_per_grain = 4};  // grains of 8, blocks of 2
  const std::vector<Digest> digests = {DigestOf(0), DigestOf(1)};
  for (std::int64_t slot = 0; slot < 8; ++slot) {
    const CacheKey key = keys.KeyOf(digests, slot);
    EXPECT_EQ(key.digest, digests[static_cast<std::size_t>(slot / 4)]);
    EXPECT_EQ(key.grain_offset, slot % 4);
  }
}

// behaviour: D7
TEST_F(PrefixIndexTest, AKeyOfAnotherGroupEndsTheProcess) {
  CacheKey key = Key(1);
  key.group = 1;
  EXPECT_DEATH(index_.Register(key, Block(), 1, 4), "another group");
}

// behaviour: G9
TEST_F(PrefixIndexTest, AnOlderEpochGoesFirstEvenIfItWasHit) {
  BlockPool pool(4, {1});
  PrefixCacheIndex open(pool, 0, Closure::kOpen);
  for (const std::int32_t grain : {1, 2}) {
    const CacheBlockRef block = std::move(pool.Acquire(0, 1)->front());
    open.Register(Key(grain), block, static_cast<std::uint64_t>(grain), 4);
    if (grain == 1) {
      open.Touch(*open.Find(Key(1)), 1);
    }
  }
  EXPECT_EQ((*open.eviction_order().begin())->key.digest, DigestOf(1));
  EXPECT_TRUE((*open.eviction_order().begin())->was_hit);
}

}  // namespace
}  // namespace pdmesh
