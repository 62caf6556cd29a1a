// AdmissionPlanner: which cached blocks must go for an admission to fit.
//
// Runs on shadow occupancy of the parents it touches and changes nothing. Blocks that the admission itself
// hits are held while it runs and therefore are no candidates. With enough free blocks it looks at no
// candidate; when even an empty cache would not do it says so from counts alone.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cache/core/block_pool.h"
#include "cache/prefix/prefix_index.h"

namespace pdmesh {

struct EvictionVictim {
  std::int32_t group;
  const CacheEntry* entry;
};

// What would be free or evictable if certain tables were gone, by group; empty for nothing.
struct Releasable {
  std::vector<std::int64_t> num_blocks;
  std::vector<std::int64_t> num_lcm_blocks;  // parents that are not all evictable now and would be then
};

// Whether the demand would fit with every evictable entry gone, and what is releasable besides. Costs
// O(groups).
bool CouldFit(const BlockPool& pool, std::span<const std::int64_t> num_fresh_blocks,
              std::span<const PrefixCacheIndex* const> indexes, const Releasable& releasable = {});

// `num_fresh_blocks[group]` is what the admission needs, `indexes[group]` what can be evicted for it. Returns
// a set in which no member can be left out, in eviction order; nullopt if nothing that may be evicted makes
// it fit. The result is valid until the pool or an index changes.
std::optional<std::vector<EvictionVictim>> PlanEvictions(const BlockPool& pool,
                                                         std::span<const std::int64_t> num_fresh_blocks,
                                                         std::span<const PrefixCacheIndex* const> indexes);

}  // namespace pdmesh
