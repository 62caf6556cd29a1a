// PrefixKeys: tells a router which prompts would hit the device cache, by short keys.
//
// A key is made of everything that a hit depends on, extra keys included, so that prompts which may share
// nothing share no key. A grain is announced while a hit may end behind it; which blocks that takes, the
// coordinator knows.
//
// Only the grains that changed since the last drain are asked for, and nothing is counted, so that nothing
// can drift. Owned by the scheduler, if it is to keep track; otherwise nothing of this exists.
#pragma once

#include <cstdint>
#include <unordered_set>
#include <vector>

#include "cache/coordinator/cache_coordinator.h"
#include "cache/prefix/residency_observer.h"

namespace pdmesh {

// The first eight bytes of a grain's digest, as a little-endian number.
std::uint64_t PrefixKeyOf(const Digest& digest);

// How the set of keys changed. To be applied in this order.
struct PrefixKeyChanges {
  bool is_cleared = false;
  std::vector<std::uint64_t> removed;
  std::vector<std::uint64_t> stored;  // of one prompt its front first
};

class PrefixKeys final : public ResidencyObserver {
 public:
  // Observes `coordinator`, which outlives it and in which nothing is cached yet.
  explicit PrefixKeys(CacheCoordinator& coordinator);
  PrefixKeys(const PrefixKeys&) = delete;
  PrefixKeys& operator=(const PrefixKeys&) = delete;

  void OnPublished(const CacheKey& key, std::int64_t depth_tokens) override;
  void OnEvicted(const CacheKey& key) override;

  // The cache was emptied on purpose.
  void OnCleared();

  // The net change since the last drain.
  PrefixKeyChanges Drain();

 private:
  struct DigestHash {
    std::size_t operator()(const Digest& digest) const noexcept;
  };
  using DigestSet = std::unordered_set<Digest, DigestHash>;

  void NoteTouched(const Digest& digest);

  const CacheCoordinator& coordinator_;
  std::vector<Digest> touched_;  // since the last drain, in order
  DigestSet touched_set_;
  DigestSet announced_;
  bool is_cleared_ = false;
};

}  // namespace pdmesh
