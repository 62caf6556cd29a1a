// AgedFrequency: the arithmetic and the ghosts of the eviction policy "aged frequency".
//
// Source: LFU with dynamic aging, Arlitt, Cherkasova, Dilley, Friedrich, Jin, "Evaluating Content Management
// Techniques for Web Proxy Caches", 1999 (LFU-DA): a block is worth its use count plus the value of the last
// victim, so that what was popular once ages without any clock. Three things are ours, because the blocks
// of a prefix cache depend on one another:
// - A use counts for the whole prefix it reaches through, so no block is worth less than one that needs it.
// - The level a request adds is that of its admission, also for what it publishes much later; else a prefix
//   published early would be worth less than its continuation.
// - Ghosts: a small cache evicts a conversation before its next turn comes. Of evicted blocks every 16th
//   grain and the ends of prompts are remembered, and speak for the prefix before them when it is computed
//   anew.
//
// It knows digests and grains, no block, table or group. Integers only, no clock; a decision depends on the
// order of calls alone. Owned by the coordinator.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <span>
#include <unordered_map>
#include <utility>

#include "cache/prefix/eviction_policy.h"
#include "support/sha256.h"

namespace pdmesh {

inline constexpr std::uint8_t kMaxUses = 7;
inline constexpr std::uint64_t kValuePerUse = 2;
inline constexpr std::int64_t kGhostStrideGrains = 16;

// What the grains of one prompt are worth, fixed when its first admission is granted.
struct PromptUses {
  std::uint64_t level = 0;
  std::int64_t num_grains = 0;                           // of the prompt, as far as they can be hit
  std::array<std::int64_t, kMaxUses> num_grains_with{};  // [u - 1]: leading grains with at least u uses

  std::uint8_t UsesOf(std::int64_t grain) const;
  BlockUse UseOf(std::int64_t grain) const;
};

class AgedFrequency {
 public:
  // Remembers at most `max_ghosts` evicted grains.
  explicit AgedFrequency(std::int64_t max_ghosts) : max_ghosts_(max_ghosts) {}

  // Reads. `digests` are those of the prompt; the first of them are cached, with the uses in `cached_uses`.
  // Each grain gets one use more than the most used among itself and all behind it that are cached or have a
  // ghost, none if there are no such grains.
  PromptUses UsesFor(std::span<const Digest> digests, std::span<const std::uint8_t> cached_uses) const;
  std::uint64_t level() const { return level_; }
  std::int64_t num_ghosts() const { return static_cast<std::int64_t>(ghosts_.size()); }

  // A block was evicted: nothing published from now on is worth less.
  void RaiseLevel(const BlockUse& victim);
  // The block was the end of its grain: leaves a ghost if it is one of those that do.
  void RememberEnd(const Digest& digest, std::int64_t grain, const BlockUse& victim);
  // The grain is published again.
  void Forget(const Digest& digest) { ghosts_.erase(digest); }
  // Drops the ghosts. The level stays: values only ever grow.
  void Clear();

 private:
  struct Ghost {
    std::uint8_t uses;
    std::uint64_t number;
  };
  struct DigestHash {
    std::size_t operator()(const Digest& digest) const noexcept;
  };

  std::int64_t max_ghosts_;
  std::uint64_t level_ = 0;
  std::uint64_t num_remembered_ = 0;
  std::unordered_map<Digest, Ghost, DigestHash> ghosts_;  // looked up, never walked
  // Oldest first, at most max_ghosts_. One whose grain was published again or is remembered under a newer
  // number stands for nothing.
  std::deque<std::pair<Digest, std::uint64_t>> line_;
};

}  // namespace pdmesh
