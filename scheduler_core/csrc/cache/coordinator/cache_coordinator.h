// CacheCoordinator: the scheduler's sole entry point into the cache: probe, admit, publish, free.
//
// It fans a request's operations out over all groups, which share one pool, and folds the answers into one.
// It speaks tokens and grains; placement stays below it. It holds no per-request state: tables, epoch and
// progress are the request's own and are passed in.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "cache/coordinator/admission_planner.h"
#include "cache/coordinator/cache_group.h"
#include "cache/core/block_pool.h"
#include "cache/core/block_table.h"
#include "cache/prefix/aged_frequency.h"
#include "cache/prefix/eviction_policy.h"

namespace pdmesh {

// The prefix that every group has cached. Valid until the next change of the cache or of the chain it looked
// at.
struct PrefixProbe {
  std::int64_t hit_tokens = 0;                          // multiple of prefix_granularity
  std::vector<std::vector<const CacheEntry*>> entries;  // by group, slot by slot up to the hit
  std::span<const Digest> digests = {};                 // of all grains looked at
};

// What a request has completed since the coordinator's last transaction for it.
struct RequestProgress {
  std::span<const Digest> digests;  // of the whole chain so far
  std::int32_t first_grain;         // newly completed grains: [first_grain, end_grain)
  std::int32_t end_grain;
  // A transfer may still read the request's blocks: those that turn out to be duplicates stay taken as long
  // as its tables live.
  bool keeps_duplicates = false;
  const PromptUses* uses = nullptr;  // as the first admission gave them; not read under LRU
};

struct Admission {
  std::uint64_t epoch;                               // the request's, for its later transactions
  PromptUses uses;                                   // first admission: likewise; says nothing under LRU
  std::vector<std::vector<std::int32_t>> fresh_ids;  // by group, in slot order
};

class CacheCoordinator {
 public:
  CacheCoordinator(std::int32_t prefix_granularity, std::int32_t num_lcm_blocks,
                   std::vector<CacheGroupSpec> specs, EvictionPolicy eviction_policy = EvictionPolicy::kLru);

  std::int32_t num_groups() const { return static_cast<std::int32_t>(groups_.size()); }
  const CacheGroup& group(std::int32_t group) const { return *groups_[static_cast<std::size_t>(group)]; }
  const BlockPool& pool() const { return pool_; }
  // The state of the aged frequency policy; nullptr under LRU, which has none.
  const AgedFrequency* aged_frequency() const { return aged_frequency_ ? &*aged_frequency_ : nullptr; }
  std::vector<BlockTable> MakeTables() const { return std::vector<BlockTable>(groups_.size()); }

  // Looks at the first `num_grains` grains of the chain and changes nothing.
  PrefixProbe ProbePrefix(std::span<const Digest> digests, std::int32_t num_grains) const;

  // First admission of a request: claims the probe's hits into its empty tables, evicts what must go and
  // acquires `demand` behind the hit in every group. Takes a new epoch. nullopt, with nothing changed, if it
  // does not fit.
  std::optional<Admission> AdmitFirst(std::span<BlockTable> tables, const PrefixProbe& probe,
                                      const DenseGrowth& demand);

  // Whether empty tables could grow by `demand` if everything evictable went, the hits of the request
  // included. False means that a first admission with this demand or a larger one fails. Costs O(groups).
  bool CouldAdmit(const DenseGrowth& demand) const;

  // A later admission: publishes the progress and grows every table by `demand`.
  std::optional<Admission> AdmitNext(std::span<BlockTable> tables, std::uint64_t epoch,
                                     const RequestProgress& progress, const DenseGrowth& demand);

  // Takes tokens out of the reserve of an earlier admission. REQUIRES: every table has that much room.
  void ConsumeReserve(std::span<BlockTable> tables, std::int64_t num_tokens) const;

  // Whether every block of one grain is published in every group.
  bool HasGrain(std::span<const Digest> digests, std::int32_t grain) const;

  // Publishes without admitting. In the table a block whose content is published already gives way to the
  // canonical one.
  void Publish(std::span<BlockTable> tables, std::uint64_t epoch, const RequestProgress& progress);

  // Changes whenever blocks became free or evictable. An admission that failed cannot succeed before it does,
  // unless its prefix has grown.
  std::uint64_t capacity_version() const;

  std::int32_t num_cached_lcm_blocks() const;
  bool CanClear() const;  // every entry is held by its index alone
  void Clear();           // REQUIRES: CanClear()

 private:
  struct GrowthPlan {
    std::vector<AcquirePlan> acquires;  // by group
    std::vector<EvictionVictim> victims;
  };

  std::optional<GrowthPlan> PlanGrowth(std::span<const BlockTable> tables, const DenseGrowth& demand) const;
  void Evict(const GrowthPlan& plan);
  PromptUses UsesFor(const PrefixProbe& probe) const;
  // The grain in which the block that ends at `depth_tokens` lies.
  std::int64_t GrainOf(std::int64_t depth_tokens) const { return (depth_tokens - 1) / prefix_granularity_; }
  BlockUse UseAt(const PromptUses& uses, std::int64_t depth_tokens) const;
  void ForgetGhosts(const RequestProgress& progress);
  std::vector<std::vector<std::int32_t>> Acquire(std::span<BlockTable> tables, const GrowthPlan& plan);

  BlockPool pool_;
  std::vector<std::unique_ptr<CacheGroup>> groups_;
  std::vector<const PrefixCacheIndex*> indexes_;  // of groups_, for the planner
  std::int32_t prefix_granularity_;
  std::optional<AgedFrequency> aged_frequency_;
  std::uint64_t last_epoch_ = 0;
};

}  // namespace pdmesh
