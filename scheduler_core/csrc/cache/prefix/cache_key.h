// CacheKey: the identity of one published CacheBlock. All four parts count.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "support/sha256.h"

namespace pdmesh {

struct CacheKey {
  std::uint32_t name_space;  // keeps what may never be shared apart
  std::int32_t group;
  Digest digest;              // of the grain the block lies in
  std::int32_t grain_offset;  // which of the grain's prefix_granularity / block_granularity blocks

  bool operator==(const CacheKey&) const = default;
};

struct CacheKeyHash {
  // A digest is uniform already; the other parts only have to move it. Never decides an order.
  std::size_t operator()(const CacheKey& key) const noexcept {
    std::uint64_t head;
    std::memcpy(&head, key.digest.data(), sizeof head);
    const auto rest = (std::uint64_t{key.name_space} << 32) ^ (static_cast<std::uint64_t>(key.group) << 16) ^
                      static_cast<std::uint64_t>(key.grain_offset);
    return static_cast<std::size_t>(head ^ (rest * 0x9e3779b97f4a7c15ULL));
  }
};

}  // namespace pdmesh
