// How far the tiers below the device back a prompt, behind what the device has of it.
#pragma once

#include <cstdint>
#include <span>

#include "cache/coordinator/cache_group.h"
#include "cache/prefix/prefix_matcher.h"
#include "cache/tier/storage_shadow.h"

namespace pdmesh {

// A block that the host has, or could read from storage.
struct HostHit {
  const CacheEntry* entry = nullptr;  // of the host; nullptr when only storage has it
  bool is_in_storage = false;

  explicit operator bool() const { return entry != nullptr || is_in_storage; }
};

// Hits of one group in the slots [known_slots, end_slot), by the group's own rule; what lies before counts as
// there. `shadow` is nullptr without storage. REQUIRES: both are grain boundaries.
inline SlotRun<HostHit> MatchOnHost(const CacheGroup& group, const PrefixCacheIndex& host_index,
                                    const StorageShadow* shadow, std::span<const Digest> digests,
                                    std::int64_t known_slots, std::int64_t end_slot) {
  const auto find = [&](std::int64_t slot) {
    const CacheKey key = group.keys.KeyOf(digests, slot);
    const CacheEntry* entry = host_index.Find(key);
    return HostHit{.entry = entry,
                   .is_in_storage = entry == nullptr && shadow != nullptr && shadow->Contains(key)};
  };
  return group.is_closed()
             ? FullAttentionMatcher::MatchFrom(known_slots, end_slot, find)
             : SlidingWindowMatcher::MatchFrom(known_slots, end_slot, group.keys.slots_per_grain,
                                               group.geometry.num_lookback_blocks(), find);
}

}  // namespace pdmesh
