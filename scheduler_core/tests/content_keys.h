// Keys of blocks that differ in what is in them.
#pragma once

#include <cstdint>

#include "cache/prefix/cache_key.h"
#include "support/sha256.h"

namespace pdmesh {

inline CacheKey Key(std::uint8_t content, std::int32_t group = 0) {
  Digest digest{};
  digest[0] = content;
  return {.name_space = 0, .group = group, .digest = digest, .grain_offset = 0};
}

}  // namespace pdmesh
