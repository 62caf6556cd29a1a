// PrefixKeys: tells a router which prompts would hit the device cache, by short keys.
//
// A key is made of everything that a hit depends on, extra keys included, so that prompts which may share
// nothing share no key. A grain is announced while a hit may end behind it; which blocks that takes, the
// coordinator knows.
//
// Only the grains that changed since the last drain are asked for, and nothing is counted, so that nothing
// can drift. Where windows reach into the grains before one, those behind a change are asked for as well; for
// that each cached grain is remembered with the one before it. Owned by the scheduler, if it is to keep
// track; otherwise nothing of this exists.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
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
  PrefixKeys(CacheCoordinator& coordinator, std::int32_t prefix_granularity);
  PrefixKeys(const PrefixKeys&) = delete;
  PrefixKeys& operator=(const PrefixKeys&) = delete;

  void OnPublished(const CacheKey& key, std::int64_t depth_tokens) override;
  void OnEvicted(const CacheKey& key) override;

  // Tells what a request has of a chain, from its front, some grains of which may have been published. Until
  // then nothing that a window reads there is announced.
  void Describe(std::span<const Digest> digests);

  // The cache was emptied on purpose.
  void OnCleared();

  // The net change since the last drain.
  PrefixKeyChanges Drain();

 private:
  struct DigestHash {
    std::size_t operator()(const Digest& digest) const noexcept;
  };
  using DigestSet = std::unordered_set<Digest, DigestHash>;

  struct Published {
    Digest digest;
    std::int32_t grain;
  };

  void NoteTouched(const Digest& digest);
  bool IsResident(const Digest& digest) const;
  void Link(const Digest& digest, const std::optional<Digest>& parent);
  void Unlink(const Digest& digest);
  std::vector<Digest> WithThoseBehind(std::vector<Digest> digests) const;

  const CacheCoordinator& coordinator_;
  std::int32_t prefix_granularity_;
  std::int64_t num_lookback_grains_;
  // Nothing is kept here where windows end in their own grain.
  std::vector<Published> undescribed_;
  std::unordered_map<Digest, std::optional<Digest>, DigestHash> parent_of_;  // none: the first of a prompt
  std::unordered_map<Digest, std::set<Digest>, DigestHash> children_of_;
  std::vector<Digest> touched_;  // since the last drain, in order
  DigestSet touched_set_;
  DigestSet announced_;
  bool is_cleared_ = false;
};

}  // namespace pdmesh
