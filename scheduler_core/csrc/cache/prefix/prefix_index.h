// PrefixCacheIndex: the published blocks of one group, by content.
//
// An entry is metadata and one owning reference; publishing neither allocates nor copies storage. Entries
// that nobody but the index holds stand in an eviction order that is kept up to date by the pool's sharing
// reports, so that neither an admission nor a gauge ever scans the cache. The index sees no block table.
//
// Owned by the coordinator; the pool outlives it.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

#include "cache/core/block_pool.h"
#include "cache/core/cache_block_ref.h"
#include "cache/prefix/cache_key.h"
#include "cache/prefix/eviction_policy.h"
#include "cache/prefix/residency_observer.h"

namespace pdmesh {

// Whether a hit of a group needs every block before it.
enum class Closure : std::uint8_t { kClosed, kOpen };

// Why a boundary was computed up to; the higher, the likelier it is hit.
enum class BoundaryKind : std::uint8_t {
  kChunk,     // where a chunk or a decode step happened to be
  kEndpoint,  // the last grain boundary of a prompt
  kPromoted,  // where a prompt was stopped because others share it up to there
};

// Which entries of one access epoch go first.
enum class EvictionTier : std::uint8_t {
  kProbationary,  // of an open group, at a chance boundary, never hit
  kEstablished,   // others of an open group
  kClosedPrefix,  // of a closed group
};

// Victims are taken smallest first. Of a closed prefix the deep blocks go before those they depend on; of
// chance boundaries the deepest stays longest.
struct EvictionRank {
  std::uint64_t value;  // 0 under LRU
  std::uint64_t epoch;
  EvictionTier tier;
  std::int64_t position;
  std::int32_t group;
  std::int32_t block_id;  // orders as (parent, slot) does

  auto operator<=>(const EvictionRank&) const = default;
};

struct CacheEntry;
EvictionRank RankOf(const CacheEntry& entry);

struct ByRank {
  bool operator()(const CacheEntry* a, const CacheEntry* b) const;
};

// Evictable entries, first victim first.
using EvictionOrder = std::set<CacheEntry*, ByRank>;

struct CacheEntry {
  CacheKey key;
  CacheBlockRef block;
  std::uint64_t epoch;        // of the newest admission that published or hit the block
  std::int64_t depth_tokens;  // prompt position at which the block ends
  Closure closure;
  BoundaryKind kind;
  bool was_hit;
  BlockUse use;                                  // what the eviction policy notes about it
  std::optional<EvictionOrder::iterator> place;  // in the eviction order, while it is evictable
};

class PrefixCacheIndex final : public SharingObserver {
 public:
  PrefixCacheIndex(BlockPool& pool, std::int32_t group, Closure closure = Closure::kClosed);
  ~PrefixCacheIndex() override;
  PrefixCacheIndex(const PrefixCacheIndex&) = delete;
  PrefixCacheIndex& operator=(const PrefixCacheIndex&) = delete;

  // Reads.
  const CacheEntry* Find(const CacheKey& key) const;
  std::int64_t num_entries() const { return static_cast<std::int64_t>(entries_.size()); }
  // Counts the entries ever published; a prefix that was looked up before can have grown only if it changed.
  std::uint64_t num_publications() const { return num_publications_; }
  std::int64_t num_evictable() const { return static_cast<std::int64_t>(eviction_order_.size()); }
  // Parents all of whose children are evictable entries of this index.
  std::int32_t num_evictable_lcm_blocks() const { return pool_.num_watched_only_lcm_blocks(group_); }
  // Counts the moments at which a block of this index became evictable.
  std::uint64_t num_releases() const { return num_releases_; }
  // Forgets the releases since an earlier count: those of a pin that was taken and dropped again freed
  // nothing new.
  void RestoreNumReleases(std::uint64_t num_releases) { num_releases_ = num_releases; }

  // Tells `observer`, which outlives every change of the index, about entries that come and go.
  void AddResidencyObserver(ResidencyObserver* observer) { residency_observers_.push_back(observer); }

  // Valid only while the index and its blocks stay as they are.
  const EvictionOrder& eviction_order() const { return eviction_order_; }

  // Publishes a block that its caller holds, or finds the key taken; either way the entry's epoch and kind
  // are at least `epoch` and `kind` afterwards, and no part of its use is below `use`. Returns the canonical
  // block of the key. REQUIRES: the key is of this group, the block has no other key.
  const CacheBlockRef& Register(const CacheKey& key, const CacheBlockRef& block, std::uint64_t epoch,
                                std::int64_t depth_tokens, BoundaryKind kind = BoundaryKind::kChunk,
                                const BlockUse& use = {});
  // Marks a held entry as hit by the admission `epoch`, with `use`. REQUIRES: its block is shared.
  void Touch(const CacheEntry& entry, std::uint64_t epoch, const BlockUse& use = {});
  // Takes an evictable entry out; its block becomes free.
  void Evict(const CacheEntry& entry);
  // Takes out an entry whose content turned out not to be there, whoever holds its block.
  void Withdraw(const CacheEntry& entry) { Evict(entry); }
  // Takes every entry out. REQUIRES: all are evictable.
  void Clear();

  void OnSoleOwner(std::int32_t block_id) noexcept override;
  void OnShared(std::int32_t block_id) noexcept override;

 private:
  CacheEntry* EntryOf(std::int32_t block_id) const {
    return entry_by_block_id_[static_cast<std::size_t>(block_id)];
  }

  BlockPool& pool_;
  std::int32_t group_;
  Closure closure_;
  std::unordered_map<CacheKey, CacheEntry, CacheKeyHash> entries_;
  std::vector<CacheEntry*> entry_by_block_id_;
  EvictionOrder eviction_order_;
  std::uint64_t num_releases_ = 0;
  std::uint64_t num_publications_ = 0;
  std::vector<ResidencyObserver*> residency_observers_;
};

}  // namespace pdmesh
