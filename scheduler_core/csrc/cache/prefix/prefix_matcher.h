// How far the cache of one group backs a prompt. Reads the group's index; never touches placement.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cache/prefix/prefix_index.h"
#include "support/sha256.h"

namespace pdmesh {

// The keys of a group's blocks in a chain of grains, slot by slot.
struct GroupKeySpace {
  std::uint32_t name_space;
  std::int32_t group;
  std::int32_t slots_per_grain;

  CacheKey KeyOf(std::span<const Digest> digests, std::int64_t slot) const {
    return {.name_space = name_space,
            .group = group,
            .digest = digests[static_cast<std::size_t>(slot / slots_per_grain)],
            .grain_offset = static_cast<std::int32_t>(slot % slots_per_grain)};
  }
};

// What a group backs: holes up to `first_slot`, cached blocks from there.
struct GroupHits {
  std::int64_t first_slot = 0;
  std::vector<const CacheEntry*> entries;

  std::int64_t end_slot() const { return first_slot + static_cast<std::int64_t>(entries.size()); }
};

// Full attention needs every block before a boundary: walks from the left to the first miss.
class FullAttentionMatcher {
 public:
  // The entries of the slots [0, n) that are cached without a gap, n at most num_grains * slots_per_grain.
  static GroupHits Match(const PrefixCacheIndex& index, const GroupKeySpace& keys,
                         std::span<const Digest> digests, std::int64_t num_grains);
};

// Sliding attention needs the `num_lookback_slots` blocks before a boundary, or all there are: walks from the
// right until a run backs one. Attention over a state is the case of one slot.
class SlidingWindowMatcher {
 public:
  // Hits up to the highest grain boundary, at most num_grains, that the cache backs.
  static GroupHits Match(const PrefixCacheIndex& index, const GroupKeySpace& keys,
                         std::span<const Digest> digests, std::int64_t num_grains,
                         std::int64_t num_lookback_slots);
};

}  // namespace pdmesh
