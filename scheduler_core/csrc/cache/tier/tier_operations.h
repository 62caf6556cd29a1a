// What a plan asks the runtime to copy between device and host memory, and to read from storage on the way.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/prefix/cache_key.h"

namespace pdmesh {

struct TierCopy {
  std::int32_t group;
  std::int32_t source_block_id;  // on the device for a store, on the host for a load
  std::int32_t destination_block_id;
  CacheKey key;                // of the content
  bool reads_storage = false;  // load: the source must be filled from storage first
};

// Acknowledged when the copies are done, with storage on when they are backed up as well.
struct PlannedStore {
  std::uint64_t operation_id;  // rises, never used again
  // Pinned: nobody writes to the sources before the acknowledgement. Otherwise the plan itself may grant them
  // to others, so the copies go before its zeroing.
  bool is_pinned;
  std::vector<TierCopy> copies;  // at least one; group by group
};

struct PlannedLoad {
  std::uint64_t operation_id;
  std::vector<TierCopy> copies;
};

}  // namespace pdmesh
