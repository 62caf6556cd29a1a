// Digests of blocks while they arrive: a block is hashed when its last bytes were placed, which the processor
// still has in its cache then, so that nobody has to fetch them from memory again.
//
// A digest is kept only as long as nothing more is placed in its block. It knows no fence: whoever owns it
// lets one thread at a time in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "digest_core.h"
#include "digest_variants.h"
#include "span.h"

namespace pdmesh::transfer {

// How long hashing may hold up whoever waits for the owner.
inline constexpr std::uint64_t kMaxHashedBytes = 1ull << 20;

class ArrivalDigests {
 public:
  // `blocks`: what is hashed as a whole, each on its own; not those of more than `kMaxHashedBytes`, whose
  // begin has left the cache when their end arrives.
  ArrivalDigests(std::vector<Span> blocks, DigestKind kind);

  DigestKind kind() const { return kind_; }

  // Bytes [begin, begin + num_bytes) were just placed.
  void note_placed(std::uint64_t begin, std::uint64_t num_bytes);

  // Into `digests`, one for each of `wanted`, what these hold. Returns the places of those that are not
  // known.
  std::vector<std::size_t> find(std::span<const Span> wanted, std::span<std::uint64_t> digests) const;

  std::uint64_t num_hashed() const { return num_hashed_; }

 private:
  struct Block {
    Span span;
    std::uint64_t num_placed_bytes = 0;  // since it was last hashed
    std::uint64_t digest = 0;
    bool is_hashed = false;  // and nothing came after
  };

  std::vector<Block>::const_iterator first_behind(std::uint64_t address) const;

  std::vector<Block> blocks_;  // in order
  DigestKind kind_;
  DigestCore core_;
  std::uint64_t num_hashed_ = 0;
};

// What it holds now.
std::uint64_t digest_of(DigestCore core, const Span& span);

}  // namespace pdmesh::transfer
