#include "cache/prefix/prefix_matcher.h"

#include <algorithm>

namespace pdmesh {

GroupHits FullAttentionMatcher::Match(const PrefixCacheIndex& index, const GroupKeySpace& keys,
                                      std::span<const Digest> digests, std::int64_t num_grains) {
  GroupHits hits;
  const std::int64_t num_slots = num_grains * keys.slots_per_grain;
  for (std::int64_t slot = 0; slot < num_slots; ++slot) {
    const CacheEntry* entry = index.Find(keys.KeyOf(digests, slot));
    if (entry == nullptr) {
      break;
    }
    hits.entries.push_back(entry);
  }
  return hits;
}

GroupHits SlidingWindowMatcher::Match(const PrefixCacheIndex& index, const GroupKeySpace& keys,
                                      std::span<const Digest> digests, std::int64_t num_grains,
                                      std::int64_t num_lookback_slots) {
  GroupHits hits;
  std::int64_t boundary = num_grains * keys.slots_per_grain;
  std::int64_t first_slot = boundary;  // the run so far is [first_slot, boundary)
  while (first_slot > std::max<std::int64_t>(0, boundary - num_lookback_slots)) {
    const CacheEntry* entry = index.Find(keys.KeyOf(digests, first_slot - 1));
    if (entry != nullptr) {
      hits.entries.push_back(entry);
      --first_slot;
    } else {
      hits.entries.clear();
      boundary = (first_slot - 1) / keys.slots_per_grain * keys.slots_per_grain;
      first_slot = boundary;
    }
  }
  hits.first_slot = first_slot;
  std::reverse(hits.entries.begin(), hits.entries.end());
  return hits;
}

}  // namespace pdmesh
