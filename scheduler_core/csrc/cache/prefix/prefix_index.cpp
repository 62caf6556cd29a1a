#include "cache/prefix/prefix_index.h"

#include <algorithm>

#include "support/errors.h"

namespace pdmesh {

namespace {

EvictionTier TierOf(const CacheEntry& entry) {
  if (entry.closure == Closure::kClosed) {
    return EvictionTier::kClosedPrefix;
  }
  return entry.kind == BoundaryKind::kChunk && !entry.was_hit ? EvictionTier::kProbationary
                                                              : EvictionTier::kEstablished;
}

}  // namespace

EvictionRank RankOf(const CacheEntry& entry) {
  const EvictionTier tier = TierOf(entry);
  return {.value = entry.use.value,
          .epoch = entry.epoch,
          .tier = tier,
          .position = tier == EvictionTier::kProbationary ? entry.depth_tokens : -entry.depth_tokens,
          .group = entry.key.group,
          .block_id = entry.block.block_id()};
}

bool ByRank::operator()(const CacheEntry* a, const CacheEntry* b) const {
  return RankOf(*a) < RankOf(*b);
}

PrefixCacheIndex::PrefixCacheIndex(BlockPool& pool, std::int32_t group, Closure closure)
    : pool_(pool),
      group_(group),
      closure_(closure),
      entry_by_block_id_(static_cast<std::size_t>(pool.num_blocks(group)) + 1) {
  pool_.SetObserver(group_, this);
}

PrefixCacheIndex::~PrefixCacheIndex() {
  for (const auto& [key, entry] : entries_) {
    pool_.Unwatch(entry.block);
  }
  entries_.clear();
  pool_.SetObserver(group_, nullptr);
}

const CacheEntry* PrefixCacheIndex::Find(const CacheKey& key) const {
  const auto found = entries_.find(key);
  return found == entries_.end() ? nullptr : &found->second;
}

const CacheBlockRef& PrefixCacheIndex::Register(const CacheKey& key, const CacheBlockRef& block,
                                                std::uint64_t epoch, std::int64_t depth_tokens,
                                                BoundaryKind kind, const BlockUse& use) {
  Ensure(key.group == group_, "a key of another group was published");
  Ensure(static_cast<bool>(block), "a hole was published");
  const auto found = entries_.find(key);
  if (found != entries_.end()) {
    CacheEntry& entry = found->second;
    const CacheBlockRef held = entry.block;  // leaves the eviction order before the rank changes
    entry.epoch = std::max(entry.epoch, epoch);
    entry.kind = std::max(entry.kind, kind);
    entry.use.RaiseTo(use);
    return entry.block;
  }
  Ensure(EntryOf(block.block_id()) == nullptr, "a block was published under a second key");
  CacheEntry& entry = entries_
                          .emplace(key, CacheEntry{.key = key,
                                                   .block = block,
                                                   .epoch = epoch,
                                                   .depth_tokens = depth_tokens,
                                                   .closure = closure_,
                                                   .kind = kind,
                                                   .was_hit = false,
                                                   .use = use,
                                                   .place = {}})
                          .first->second;
  ++num_publications_;
  entry_by_block_id_[static_cast<std::size_t>(block.block_id())] = &entry;
  pool_.Watch(entry.block);
  for (ResidencyObserver* observer : residency_observers_) {
    observer->OnPublished(key, depth_tokens);
  }
  return entry.block;
}

void PrefixCacheIndex::Touch(const CacheEntry& entry, std::uint64_t epoch, const BlockUse& use) {
  CacheEntry& held = *EntryOf(entry.block.block_id());
  Ensure(!held.place, "an evictable entry was touched without being held");
  held.epoch = std::max(held.epoch, epoch);
  held.was_hit = true;
  held.use.RaiseTo(use);
}

void PrefixCacheIndex::Evict(const CacheEntry& entry) {
  const std::int32_t block_id = entry.block.block_id();
  const CacheKey key = entry.key;
  pool_.Unwatch(entry.block);
  entry_by_block_id_[static_cast<std::size_t>(block_id)] = nullptr;
  entries_.erase(key);
  for (ResidencyObserver* observer : residency_observers_) {
    observer->OnEvicted(key);
  }
}

void PrefixCacheIndex::Clear() {
  Ensure(num_evictable() == num_entries(), "an index with held entries was cleared");
  while (!eviction_order_.empty()) {
    Evict(**eviction_order_.begin());
  }
}

void PrefixCacheIndex::OnSoleOwner(std::int32_t block_id) noexcept {
  CacheEntry& entry = *EntryOf(block_id);
  Ensure(!entry.place, "an entry became evictable twice");
  entry.place = eviction_order_.insert(&entry).first;
  ++num_releases_;
}

void PrefixCacheIndex::OnShared(std::int32_t block_id) noexcept {
  CacheEntry& entry = *EntryOf(block_id);
  Ensure(entry.place.has_value(), "an entry that was not evictable became shared");
  eviction_order_.erase(*entry.place);
  entry.place.reset();
}

}  // namespace pdmesh
