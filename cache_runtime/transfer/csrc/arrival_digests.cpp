#include "arrival_digests.h"

#include <algorithm>

namespace pdmesh::transfer {

std::uint64_t digest_of(DigestCore core, const Span& span) {
  const Extent whole{0, span.end - span.begin};
  std::uint64_t digest;
  core({&span.begin, 1}, {&whole, 1}, {&digest, 1});
  return digest;
}

ArrivalDigests::ArrivalDigests(std::vector<Span> blocks, DigestKind kind)
    : kind_(kind), core_(choose_digest_core(kind)) {
  std::sort(blocks.begin(), blocks.end(),
            [](const Span& left, const Span& right) { return left.begin < right.begin; });
  for (const Span& block : blocks) {
    if (block.end - block.begin <= kMaxHashedBytes) blocks_.push_back({.span = block});
  }
}

std::vector<ArrivalDigests::Block>::const_iterator ArrivalDigests::first_behind(std::uint64_t address) const {
  return std::upper_bound(blocks_.begin(), blocks_.end(), address,
                          [](std::uint64_t value, const Block& block) { return value < block.span.end; });
}

void ArrivalDigests::note_placed(std::uint64_t begin, std::uint64_t num_bytes) {
  const std::uint64_t end = begin + num_bytes;
  auto block = blocks_.begin() + (first_behind(begin) - blocks_.cbegin());
  for (; block != blocks_.end() && block->span.begin < end; ++block) {
    const Span& span = block->span;
    if (block->is_hashed) {
      block->is_hashed = false;
      block->num_placed_bytes = 0;
    }
    block->num_placed_bytes += std::min(end, span.end) - std::max(begin, span.begin);
    // Not more than a hint that all of it is there: the digest is of what the block holds now, whatever that
    // is.
    if (block->num_placed_bytes < span.end - span.begin) continue;
    block->digest = digest_of(core_, span);
    block->is_hashed = true;
    ++num_hashed_;
  }
}

std::vector<std::size_t> ArrivalDigests::find(std::span<const Span> wanted,
                                              std::span<std::uint64_t> digests) const {
  std::vector<std::size_t> unknown;
  for (std::size_t index = 0; index < wanted.size(); ++index) {
    const Span& span = wanted[index];
    const auto block = first_behind(span.begin);
    const bool is_known = block != blocks_.end() && block->is_hashed && block->span.begin == span.begin &&
                          block->span.end == span.end;
    if (is_known) {
      digests[index] = block->digest;
    } else {
      unknown.push_back(index);
    }
  }
  return unknown;
}

}  // namespace pdmesh::transfer
