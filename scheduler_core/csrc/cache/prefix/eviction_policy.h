// Which cached blocks go first, and what a policy notes about a block for that.
#pragma once

#include <algorithm>
#include <cstdint>

namespace pdmesh {

enum class EvictionPolicy : std::uint8_t {
  kLru,            // least recently used
  kAgedFrequency,  // least frequently used, with dynamic aging (cache/prefix/aged_frequency.h)
};

constexpr const char* NameOf(EvictionPolicy policy) {
  switch (policy) {
    case EvictionPolicy::kLru:
      return "lru";
    case EvictionPolicy::kAgedFrequency:
      return "aged_frequency";
  }
  return "unknown";
}

// The index orders by `value`, carries the rest along and understands none of it. All zero under LRU.
struct BlockUse {
  std::uint64_t value = 0;     // smaller ones go first, whatever their epochs
  std::uint8_t uses = 0;       // how often the block was used again, as far as anyone remembers
  bool is_remembered = false;  // leaves a ghost when it is evicted

  void RaiseTo(const BlockUse& other) {
    value = std::max(value, other.value);
    uses = std::max(uses, other.uses);
    is_remembered = is_remembered || other.is_remembered;
  }
};

}  // namespace pdmesh
