// HostTier: where copies of device blocks lie in host memory, and which of them can be hit.
//
// The same kinds of pool and index as on the device, over parents of host memory. It places copies and makes
// room for them; it knows no tokens, requests or transfers. Whoever gets a block from Place holds it; once
// published a block can be hit, and be given up for another as soon as nobody but the index holds it.
//
// Colder goes first: never hit before hit, then the older access epoch.
//
// Owned by the coordinator.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cache/core/block_pool.h"
#include "cache/core/cache_block_ref.h"
#include "cache/prefix/prefix_index.h"

namespace pdmesh {

class HostTier {
 public:
  // Packing, shard counts and closures by group, those of the device.
  HostTier(std::int32_t num_lcm_blocks, std::vector<std::int32_t> cache_blocks_per_lcm_block,
           std::vector<std::int32_t> shard_counts, const std::vector<Closure>& closures);

  const BlockPool& pool() const { return pool_; }
  const PrefixCacheIndex& index(std::int32_t group) const { return *indexes_[Index(group)]; }
  // Blocks that lie here if every group fills all parents; the size of what is remembered about storage.
  std::int64_t num_blocks() const;

  // A block of the group in one bucket: a free one, else in the place of the group's coldest copy there, else
  // in a parent that a foreign group leaves whole: the one whose warmest copy is coldest. Empty, with nothing
  // changed, if all of that is held.
  CacheBlockRef Place(std::int32_t group, std::int32_t bucket);

  // The block holds the content of the key now. Another copy of it may be there already; then that one stays.
  void Publish(const CacheKey& key, const CacheBlockRef& block, std::uint64_t epoch,
               std::int64_t depth_tokens, BoundaryKind kind);
  // REQUIRES: the entry's block is held by somebody else as well.
  void NoteHit(const CacheEntry& entry, std::uint64_t epoch);

  std::int32_t num_cached_lcm_blocks() const;
  bool CanClear() const;  // every copy is held by its index alone, and there is no unpublished one
  void Clear();           // REQUIRES: CanClear()

 private:
  static std::size_t Index(std::int32_t i) { return static_cast<std::size_t>(i); }
  const CacheEntry* ColdestIn(std::int32_t group, std::int32_t bucket) const;
  // The copies of the coldest foreign parent that can be given up whole.
  std::vector<const CacheEntry*> ColdestForeignParent(std::int32_t group) const;
  std::vector<const CacheEntry*> ColdestParentOf(std::int32_t group) const;

  BlockPool pool_;
  std::vector<std::unique_ptr<PrefixCacheIndex>> indexes_;  // by group
};

}  // namespace pdmesh
