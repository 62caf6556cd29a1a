// SHA-256 over byte ranges. Knows nothing of tokens or caches.
//
// Source: FIPS 180-4, sections 4.1.2, 4.2.2, 5.1.1, 5.3.3 and 6.2.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace pdmesh {

using Digest = std::array<std::uint8_t, 32>;

Digest Sha256Of(std::span<const std::uint8_t> message);

// For a message of fixed length that is hashed many times with other content: pad it once, then hash it in
// place.
void PadForSha256(std::vector<std::uint8_t>& message);
// REQUIRES: `message` was padded by PadForSha256; its content but not its length may have changed since.
Digest Sha256OfPadded(std::span<const std::uint8_t> message);

// The compression function over `num_blocks` 64-byte blocks. Two implementations of one contract, apart so
// that a test can hold them against each other.
void Sha256CompressPortable(std::uint32_t* state, const std::uint8_t* blocks, std::size_t num_blocks);
// REQUIRES: CpuHasSha256Instructions().
void Sha256CompressWithInstructions(std::uint32_t* state, const std::uint8_t* blocks, std::size_t num_blocks);
bool CpuHasSha256Instructions();

}  // namespace pdmesh
