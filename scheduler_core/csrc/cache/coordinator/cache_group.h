// CacheGroup: one attention structure. The only place where placement and prefix matching meet.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include "cache/allocator/group_allocator.h"
#include "cache/coordinator/group_geometry.h"
#include "cache/prefix/prefix_index.h"
#include "cache/prefix/prefix_matcher.h"

namespace pdmesh {

// The scheduling form of a configured group.
struct CacheGroupSpec {
  std::string group_id;
  std::int32_t block_granularity;
  std::int32_t cache_blocks_per_lcm_block;
  AttentionKind kind = AttentionKind::kFull;
  std::int32_t window_tokens = 0;  // of a sliding group
  std::int32_t shard_count = 1;    // owners that hold the blocks cyclically
  bool is_replayable = false;      // regenerated behind a hit: neither matched nor published
};

struct CacheGroup {
  CacheGroup(CacheGroupSpec group_spec, std::int32_t prefix_granularity, BlockPool& pool, std::int32_t group)
      : spec(std::move(group_spec)),
        geometry(prefix_granularity, spec.block_granularity, spec.kind, spec.window_tokens),
        allocator(pool, group),
        index(pool, group, is_closed() ? Closure::kClosed : Closure::kOpen),
        keys{.name_space = 0, .group = group, .slots_per_grain = geometry.slots_per_grain()} {}

  // A hit needs every block before it; nothing expires.
  bool is_closed() const { return spec.kind == AttentionKind::kFull; }
  // Leading slots that a hit accounts for: claimed, or holes. A peer fills none of them.
  std::int64_t NumHitSlots(std::int64_t hit_tokens) const {
    return spec.is_replayable ? 0 : hit_tokens / geometry.block_granularity();
  }
  // The first slot that a peer fills.
  std::int64_t FirstLandingSlot(std::int64_t hit_tokens, std::int64_t num_prompt_tokens) const {
    return std::max(NumHitSlots(hit_tokens), geometry.ExpiredBlocksAt(num_prompt_tokens));
  }
  // Grains before one whose blocks a hit at its end reads as well; a closed group has them if it has that
  // one.
  std::int64_t num_lookback_grains() const {
    return std::max<std::int64_t>(1, CeilDiv(geometry.num_lookback_blocks(), keys.slots_per_grain)) - 1;
  }
  GroupHits Match(std::span<const Digest> digests, std::int64_t num_grains) const {
    return is_closed() ? FullAttentionMatcher::Match(index, keys, digests, num_grains)
                       : SlidingWindowMatcher::Match(index, keys, digests, num_grains,
                                                     geometry.num_lookback_blocks());
  }

  CacheGroupSpec spec;
  GroupGeometry geometry;
  GroupAllocator allocator;
  PrefixCacheIndex index;
  GroupKeySpace keys;
};

}  // namespace pdmesh
