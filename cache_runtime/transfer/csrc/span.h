// A range of addresses.
#pragma once

#include <cstdint>

namespace pdmesh::transfer {

// Addresses [begin, end).
struct Span {
  std::uint64_t begin;
  std::uint64_t end;
};
static_assert(sizeof(Span) == 16);

}  // namespace pdmesh::transfer
