// Integer arithmetic on token and block counts.
#pragma once

#include <cstdint>

namespace pdmesh {

// ceil(numerator / denominator). REQUIRES: numerator >= 0, denominator > 0.
constexpr std::int64_t CeilDiv(std::int64_t numerator, std::int64_t denominator) {
  return (numerator + denominator - 1) / denominator;
}

}  // namespace pdmesh
