// How far the cache of one group backs a prompt. Reads the group's index; never touches placement.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
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

// Blocks that somebody has for the slots [first_slot, end_slot()).
template <typename Hit>
struct SlotRun {
  std::int64_t first_slot = 0;
  std::vector<Hit> hits;

  std::int64_t end_slot() const { return first_slot + static_cast<std::int64_t>(hits.size()); }
};

// Full attention needs every block before a boundary: walks from the left to the first miss.
class FullAttentionMatcher {
 public:
  // The entries of the slots [0, n) that are cached without a gap, n at most num_grains * slots_per_grain.
  static GroupHits Match(const PrefixCacheIndex& index, const GroupKeySpace& keys,
                         std::span<const Digest> digests, std::int64_t num_grains);

  // The same over any source: `find(slot)` gives what it has, or something false. Everything before
  // `first_slot` counts as there.
  template <typename Find>
  static auto MatchFrom(std::int64_t first_slot, std::int64_t end_slot, const Find& find) {
    SlotRun<decltype(find(first_slot))> run{.first_slot = first_slot, .hits = {}};
    for (std::int64_t slot = first_slot; slot < end_slot; ++slot) {
      auto hit = find(slot);
      if (!hit) {
        break;
      }
      run.hits.push_back(std::move(hit));
    }
    return run;
  }
};

// Sliding attention needs the `num_lookback_slots` blocks before a boundary, or all there are: walks from the
// right until a run backs one. Attention over a state is the case of one slot.
class SlidingWindowMatcher {
 public:
  // Hits up to the highest grain boundary, at most num_grains, that the cache backs.
  static GroupHits Match(const PrefixCacheIndex& index, const GroupKeySpace& keys,
                         std::span<const Digest> digests, std::int64_t num_grains,
                         std::int64_t num_lookback_slots);

  // The same over any source. Everything before `known_slots` counts as there and is not asked for, so the
  // run ends there at the lowest. REQUIRES: `known_slots` is a grain boundary.
  template <typename Find>
  static auto MatchFrom(std::int64_t known_slots, std::int64_t end_slot, std::int64_t slots_per_grain,
                        std::int64_t num_lookback_slots, const Find& find) {
    SlotRun<decltype(find(known_slots))> run;
    std::int64_t boundary = end_slot;
    std::int64_t first_slot = boundary;  // the run so far is [first_slot, boundary)
    while (first_slot > std::max(known_slots, boundary - num_lookback_slots)) {
      auto hit = find(first_slot - 1);
      if (hit) {
        run.hits.push_back(std::move(hit));
        --first_slot;
      } else {
        run.hits.clear();
        boundary = (first_slot - 1) / slots_per_grain * slots_per_grain;
        first_slot = boundary;
      }
    }
    run.first_slot = first_slot;
    std::reverse(run.hits.begin(), run.hits.end());
    return run;
  }
};

}  // namespace pdmesh
