#include "cache/prefix/prefix_matcher.h"

#include <utility>

namespace pdmesh {

GroupHits FullAttentionMatcher::Match(const PrefixCacheIndex& index, const GroupKeySpace& keys,
                                      std::span<const Digest> digests, std::int64_t num_grains) {
  auto run = MatchFrom(0, num_grains * keys.slots_per_grain,
                       [&](std::int64_t slot) { return index.Find(keys.KeyOf(digests, slot)); });
  return {.first_slot = run.first_slot, .entries = std::move(run.hits)};
}

GroupHits SlidingWindowMatcher::Match(const PrefixCacheIndex& index, const GroupKeySpace& keys,
                                      std::span<const Digest> digests, std::int64_t num_grains,
                                      std::int64_t num_lookback_slots) {
  auto run = MatchFrom(0, num_grains * keys.slots_per_grain, keys.slots_per_grain, num_lookback_slots,
                       [&](std::int64_t slot) { return index.Find(keys.KeyOf(digests, slot)); });
  return {.first_slot = run.first_slot, .entries = std::move(run.hits)};
}

}  // namespace pdmesh
