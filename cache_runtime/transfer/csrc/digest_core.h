// Hashing of cache blocks, compiled once per kind of digest and instruction set.
//
// Two kinds, whose digests have 64 bits and do not depend on what they were compiled for:
// - XXH3, seed 0, as the xxhash library has it, which every machine can take;
// - AES-16, defined in aes_digest.cpp, for processors that have instructions for AES. It takes one of them
// for
//   each vector that is read, so that it is as fast as a cache is read.
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

// XXH3.
namespace baseline {
DigestCore digest_core();
}
namespace avx2 {
DigestCore digest_core();
}
namespace avx512 {
DigestCore digest_core();
}

// AES-16, with vectors of 128, 256 and 512 bits.
namespace aesni {
DigestCore digest_core();
}
namespace vaes256 {
DigestCore digest_core();
}
namespace vaes512 {
DigestCore digest_core();
}

}  // namespace pdmesh::transfer
