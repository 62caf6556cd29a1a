// PrefixEvents: tells a router which prefixes the device cache holds.
//
// A grain is announced while every block of it that a hit at its end reads is in the prefix indexes. That is
// asked of the indexes whenever one of its keys comes or goes; nothing is counted. Kept are only the grains
// that are resident or announced.
//
// Announced hashes are apart from cache keys: they are cheap, and a router can compute them from tokens
// alone. Prompts that differ in their extra keys only therefore share a hash; it is out while one of them is
// resident.
//
// Owned by the scheduler, if events are wanted; otherwise nothing of this exists.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "cache/coordinator/cache_coordinator.h"
#include "cache/prefix/residency_observer.h"

namespace pdmesh {

struct PrefixStored {
  std::uint64_t hash;
  std::optional<std::uint64_t> parent_hash;  // none for the first grain of a prompt
  std::vector<std::int32_t> tokens;          // of this grain
  std::int32_t prefix_granularity;
};

struct PrefixRemoved {
  std::uint64_t hash;
};

// Nothing is cached any more; supersedes all that was said before.
struct PrefixCleared {};

using PrefixEvent = std::variant<PrefixStored, PrefixRemoved, PrefixCleared>;

// 64-bit FNV-1a over, little-endian: a byte, 1 if there is a parent, else 0; the parent's hash as u64 if
// there is one; the number of tokens as u64; each token as i32.
std::uint64_t HashForEvent(std::optional<std::uint64_t> parent_hash, std::span<const std::int32_t> tokens);

class PrefixEvents final : public ResidencyObserver {
 public:
  // Observes `coordinator`, which outlives it, from now on.
  PrefixEvents(CacheCoordinator& coordinator, std::int32_t prefix_granularity);
  PrefixEvents(const PrefixEvents&) = delete;
  PrefixEvents& operator=(const PrefixEvents&) = delete;

  void OnPublished(const CacheKey& key, std::int64_t depth_tokens) override;
  void OnEvicted(const CacheKey& key) override;

  // Takes up what was published since the last call. REQUIRES: all of it belongs to one request, whose tokens
  // these are; `hashes` are the request's own, empty at first, and are continued as far as they are needed.
  void Describe(std::span<const std::int32_t> tokens, std::vector<std::uint64_t>& hashes);

  // The same when others' blocks were published as well: takes up what has one of the request's `digests`.
  void DescribeOnly(std::span<const Digest> digests, std::span<const std::int32_t> tokens,
                    std::vector<std::uint64_t>& hashes);

  // Instead of these: it is never announced.
  void LeaveOut();
  void LeaveOutOnly(std::span<const Digest> digests);

  // The cache was emptied on purpose.
  void OnCleared();

  // The net change since the last drain: whether all was cleared, then what was removed, leaves first, then
  // what was stored, parents first.
  std::vector<PrefixEvent> Drain();

  // Grains that are resident or announced.
  std::int64_t num_grains() const { return static_cast<std::int64_t>(grains_.size()); }

 private:
  struct Published {
    Digest digest;
    std::int32_t grain;
  };

  struct Grain {
    std::optional<std::uint64_t> parent_hash;
    std::int32_t position;             // in its prompt
    std::uint64_t arrival;             // orders grains of one position
    std::vector<std::int32_t> tokens;  // until it is announced
    std::vector<Digest> digests;       // under which it is resident
    bool is_announced = false;

    bool is_resident() const { return !digests.empty(); }
  };

  struct DigestHash {
    std::size_t operator()(const Digest& digest) const noexcept;
  };

  using Place = std::pair<std::int32_t, std::uint64_t>;  // position and arrival of a grain

  void Enter(const Published& published, std::span<const std::int32_t> tokens,
             const std::vector<std::uint64_t>& hashes);
  void NoteChange(std::uint64_t hash, Grain& grain);

  CacheCoordinator& coordinator_;
  std::int32_t prefix_granularity_;
  std::vector<Published> published_;  // not taken up yet
  std::unordered_map<std::uint64_t, Grain> grains_;
  std::unordered_map<Digest, std::uint64_t, DigestHash> hash_of_;  // of every digest that is resident
  std::map<Place, std::uint64_t> changed_;  // hashes whose residency is not as announced
  std::uint64_t num_arrivals_ = 0;
  bool is_cleared_ = false;
};

}  // namespace pdmesh
