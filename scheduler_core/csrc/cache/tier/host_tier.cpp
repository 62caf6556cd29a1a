#include "cache/tier/host_tier.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "support/errors.h"

namespace pdmesh {
namespace {

// The eviction order looks at this value first.
constexpr BlockUse kNeverHit{.value = 0};
constexpr BlockUse kHit{.value = 1};

}  // namespace

HostTier::HostTier(std::int32_t num_lcm_blocks, std::vector<std::int32_t> cache_blocks_per_lcm_block,
                   std::vector<std::int32_t> shard_counts, const std::vector<Closure>& closures)
    : pool_(num_lcm_blocks, std::move(cache_blocks_per_lcm_block), std::move(shard_counts)) {
  for (const Closure closure : closures) {
    const auto group = static_cast<std::int32_t>(indexes_.size());
    indexes_.push_back(std::make_unique<PrefixCacheIndex>(pool_, group, closure));
  }
}

std::int64_t HostTier::num_blocks() const {
  std::int64_t num_blocks = 0;
  for (std::int32_t group = 0; group < pool_.num_groups(); ++group) {
    num_blocks += pool_.num_blocks(group);
  }
  return num_blocks;
}

CacheBlockRef HostTier::Place(std::int32_t group, std::int32_t bucket) {
  CacheBlockRef block = pool_.AcquireIn(group, bucket);
  if (block) {
    return block;
  }
  if (const CacheEntry* coldest = ColdestIn(group, bucket)) {
    indexes_[Index(group)]->Evict(*coldest);
  } else {
    for (const CacheEntry* entry : ColdestForeignParent(group)) {
      indexes_[Index(entry->key.group)]->Evict(*entry);
    }
  }
  return pool_.AcquireIn(group, bucket);
}

const CacheEntry* HostTier::ColdestIn(std::int32_t group, std::int32_t bucket) const {
  const EvictionOrder& order = indexes_[Index(group)]->eviction_order();
  const auto found = std::find_if(order.begin(), order.end(), [&](const CacheEntry* entry) {
    return pool_.BucketOf(group, entry->block.block_id()) == bucket;
  });
  return found == order.end() ? nullptr : *found;
}

std::vector<const CacheEntry*> HostTier::ColdestForeignParent(std::int32_t group) const {
  std::vector<const CacheEntry*> coldest;
  for (std::int32_t other = 0; other < pool_.num_groups(); ++other) {
    if (other == group || indexes_[Index(other)]->num_evictable_lcm_blocks() == 0) {
      continue;
    }
    std::vector<const CacheEntry*> entries = ColdestParentOf(other);
    if (coldest.empty() || RankOf(*entries.back()) < RankOf(*coldest.back())) {
      coldest = std::move(entries);
    }
  }
  return coldest;
}

// Coldest copy first; the first parent whose last copy comes up is the one. REQUIRES: there is one.
std::vector<const CacheEntry*> HostTier::ColdestParentOf(std::int32_t group) const {
  std::unordered_map<std::int32_t, std::vector<const CacheEntry*>> entries_in;  // looked up, never walked
  for (const CacheEntry* entry : indexes_[Index(group)]->eviction_order()) {
    const std::int32_t lcm_block = pool_.PlaceOf(group, entry->block.block_id()).lcm_block;
    std::vector<const CacheEntry*>& entries = entries_in[lcm_block];
    entries.push_back(entry);
    if (static_cast<std::int32_t>(entries.size()) == pool_.num_occupied_slots(lcm_block)) {
      return std::move(entries);
    }
  }
  Fatal("no parent could be given up whole");
}

void HostTier::Publish(const CacheKey& key, const CacheBlockRef& block, std::uint64_t epoch,
                       std::int64_t depth_tokens, BoundaryKind kind) {
  indexes_[Index(key.group)]->Register(key, block, epoch, depth_tokens, kind, kNeverHit);
}

void HostTier::NoteHit(const CacheEntry& entry, std::uint64_t epoch) {
  indexes_[Index(entry.key.group)]->Touch(entry, epoch, kHit);
}

std::int32_t HostTier::num_cached_lcm_blocks() const {
  std::int32_t num_lcm_blocks = 0;
  for (const auto& index : indexes_) {
    num_lcm_blocks += index->num_evictable_lcm_blocks();
  }
  return num_lcm_blocks;
}

bool HostTier::CanClear() const {
  return pool_.num_empty_lcm_blocks() + num_cached_lcm_blocks() == pool_.num_lcm_blocks();
}

void HostTier::Clear() {
  for (const auto& index : indexes_) {
    index->Clear();
  }
}

}  // namespace pdmesh
