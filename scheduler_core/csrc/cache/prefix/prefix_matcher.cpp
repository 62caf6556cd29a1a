#include "cache/prefix/prefix_matcher.h"

namespace pdmesh {

std::vector<const CacheEntry*> FullAttentionMatcher::Match(const PrefixCacheIndex& index,
                                                           const GroupKeySpace& keys,
                                                           std::span<const Digest> digests,
                                                           std::int64_t num_grains) {
  std::vector<const CacheEntry*> hits;
  const std::int64_t num_slots = num_grains * keys.slots_per_grain;
  for (std::int64_t slot = 0; slot < num_slots; ++slot) {
    const CacheEntry* entry = index.Find(keys.KeyOf(digests, slot));
    if (entry == nullptr) {
      break;
    }
    hits.push_back(entry);
  }
  return hits;
}

}  // namespace pdmesh
