// The XXH3 digest.
#include "digest_core.h"

#define XXH_INLINE_ALL
// Memory that no cache holds arrives a quarter faster when it is asked for this far ahead, across the end of
// a page.
#define XXH_PREFETCH_DIST 4096
#include <xxhash.h>

namespace pdmesh::transfer::PDMESH_VARIANT {
namespace {

const void* at(std::uint64_t begin, const Extent& extent) {
  return reinterpret_cast<const void*>(begin + extent.offset);
}

std::uint64_t digest_pieces(std::uint64_t begin, std::span<const Extent> extents) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  for (const Extent& extent : extents) XXH3_64bits_update(&state, at(begin, extent), extent.num_bytes);
  return XXH3_64bits_digest(&state);
}

void digest(std::span<const std::uint64_t> begins, std::span<const Extent> extents,
            std::span<std::uint64_t> digests) {
  for (std::size_t block = 0; block < begins.size(); ++block) {
    digests[block] = extents.size() == 1 ? XXH3_64bits(at(begins[block], extents[0]), extents[0].num_bytes)
                                         : digest_pieces(begins[block], extents);
  }
}

}  // namespace

DigestCore digest_core() {
  return &digest;
}

}  // namespace pdmesh::transfer::PDMESH_VARIANT
