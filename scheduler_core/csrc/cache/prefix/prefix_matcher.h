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

// Full attention needs every block before a boundary: walks from the left to the first miss.
class FullAttentionMatcher {
 public:
  // The entries of the slots [0, n) that are cached without a gap, n at most num_grains * slots_per_grain.
  static std::vector<const CacheEntry*> Match(const PrefixCacheIndex& index, const GroupKeySpace& keys,
                                              std::span<const Digest> digests, std::int64_t num_grains);
};

}  // namespace pdmesh
