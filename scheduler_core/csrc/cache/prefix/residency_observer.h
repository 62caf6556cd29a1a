// ResidencyObserver: hears which published blocks enter and leave the prefix indexes.
//
// Called while an index changes, so an observer notes what it hears and asks the indexes later. Without an
// observer nothing is called.
#pragma once

#include <cstdint>

#include "cache/prefix/cache_key.h"

namespace pdmesh {

class ResidencyObserver {
 public:
  virtual ~ResidencyObserver() = default;

  // A key was published that was not there. `depth_tokens`: the prompt position at which its block ends.
  virtual void OnPublished(const CacheKey& key, std::int64_t depth_tokens) = 0;
  // A key is there no more.
  virtual void OnEvicted(const CacheKey& key) = 0;
};

}  // namespace pdmesh
