// Hashing of cache blocks, compiled once per instruction set.
//
// XXH3, 64 bits, seed 0, as the xxhash library has it: whatever it was compiled for, the digests are the
// same.
#pragma once

#include <cstdint>
#include <span>

namespace pdmesh::transfer {

// A part of a block: bytes [offset, offset + num_bytes) from the block's first one.
struct Extent {
  std::uint64_t offset;
  std::uint64_t num_bytes;
};
static_assert(sizeof(Extent) == 16);

// Into `digests`, one per block, the digest of the block's extents one after the other. `begins`: addresses
// of the blocks. Only reads memory.
using DigestCore = void (*)(std::span<const std::uint64_t> begins, std::span<const Extent> extents,
                            std::span<std::uint64_t> digests);

namespace baseline {
DigestCore digest_core();
}
namespace avx2 {
DigestCore digest_core();
}
namespace avx512 {
DigestCore digest_core();
}

}  // namespace pdmesh::transfer
