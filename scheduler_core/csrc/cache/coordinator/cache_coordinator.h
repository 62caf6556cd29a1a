// CacheCoordinator: the scheduler's sole entry point into the cache: probe, admit, publish, free.
//
// It fans a request's operations out over all groups, which share one pool, and folds the answers into one.
// It speaks tokens and grains; placement stays below it. It holds no per-request state: tables, epoch and
// progress are the request's own and are passed in.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "cache/coordinator/admission_planner.h"
#include "cache/coordinator/block_reserve.h"
#include "cache/coordinator/cache_group.h"
#include "cache/coordinator/host_matcher.h"
#include "cache/core/block_pool.h"
#include "cache/core/block_table.h"
#include "cache/prefix/aged_frequency.h"
#include "cache/prefix/eviction_policy.h"
#include "cache/tier/host_tier.h"
#include "cache/tier/storage_shadow.h"
#include "cache/tier/tier_operations.h"
#include "cache/tier/tier_transfer_manager.h"

namespace pdmesh {

// The prefix that every matched group backs. Valid until the next change of the cache or of the chain it
// looked at.
struct PrefixProbe {
  std::int64_t hit_tokens = 0;     // multiple of prefix_granularity
  std::int64_t closed_tokens = 0;  // what the closed groups alone back; 0 without a closed group
  // By group: what the device has of it, ending at its own hit; empty for groups that are not matched.
  std::vector<GroupHits> hits = {};
  std::span<const Digest> digests = {};  // of all grains looked at

  // The host's part: what lies behind the device's hit, up to `hit_tokens`. Empty when the device reaches as
  // far.
  std::int64_t device_hit_tokens = 0;
  std::int64_t storage_hit_tokens = 0;           // in grains of which a part must be read from storage
  std::vector<SlotRun<HostHit>> host_hits = {};  // by group
};

struct TierConfig {
  std::int32_t num_host_lcm_blocks = 0;  // 0 for no host tier
  bool enable_storage = false;           // needs a host tier
};

struct HostCapacity {
  std::int32_t total_lcm_blocks = 0;
  std::int32_t empty_lcm_blocks = 0;
  std::int32_t cached_lcm_blocks = 0;  // can be hit, and given up
  std::int32_t active_lcm_blocks = 0;  // a transfer reads or writes there
};

// What one group takes part in a probe with.
enum class ProbeScope : std::uint8_t {
  kAllGroups,
  kHistoryGroups,  // a peer sends the final state, so states neither limit the hit nor are claimed
};

// What an admission asks of one group.
struct GroupDemand {
  Extent extent;
  // Groups whose blocks expire: the most the request will ever hold at once. Promised for its whole life.
  std::int64_t num_promised_blocks = 0;
};

// Which publications are to be copied to the host. Without a host tier it does not matter.
enum class StoreScope : std::uint8_t {
  kNothing,
  kWindows,     // of sliding groups
  kEverything,  // also of full groups, and published states
};

enum class StoreGuard : std::uint8_t {
  kPinned,  // copied at leisure: the sources stay as they are until then
  kAhead,   // copied before anything else of the plan: the sources may be granted in it
};

// What a request has completed since the coordinator's last transaction for it.
struct RequestProgress {
  std::span<const Digest> digests;  // of the whole chain so far
  std::int32_t first_grain;         // newly completed grains: [first_grain, end_grain)
  std::int32_t end_grain;
  BoundaryKind kind = BoundaryKind::kChunk;  // of the boundary at end_grain
  // Where a state was computed into a block of the table, 0 for nowhere. Only there it may be published.
  std::int64_t state_checkpoint_tokens = 0;
  // A transfer may still read the request's blocks: those that turn out to be duplicates stay taken as long
  // as its tables live.
  bool keeps_duplicates = false;
  const PromptUses* uses = nullptr;  // as the first admission gave them; not read under LRU
  StoreScope store_scope = StoreScope::kNothing;
};

struct Admission {
  std::uint64_t epoch;   // the request's, for its later transactions
  PromptUses uses;       // first admission: likewise; says nothing under LRU
  ReserveLease reserve;  // first admission: goes with the request's tables and outlives them
  std::vector<std::vector<std::int32_t>> fresh_ids;  // by group, in slot order
};

// The demands of a first admission behind a hit; nothing if the round has no use for it there.
using DemandsFor = std::function<std::optional<std::vector<GroupDemand>>(const PrefixProbe& probe)>;

class CacheCoordinator {
 public:
  CacheCoordinator(std::int32_t prefix_granularity, std::int32_t num_lcm_blocks,
                   std::vector<CacheGroupSpec> specs, EvictionPolicy eviction_policy = EvictionPolicy::kLru,
                   const TierConfig& tiers = {});

  std::int32_t num_groups() const { return static_cast<std::int32_t>(groups_.size()); }
  const CacheGroup& group(std::int32_t group) const { return *groups_[static_cast<std::size_t>(group)]; }
  const BlockPool& pool() const { return pool_; }
  const BlockReserve& reserve() const { return reserve_; }
  // The state of the aged frequency policy; nullptr under LRU, which has none.
  const AgedFrequency* aged_frequency() const { return aged_frequency_ ? &*aged_frequency_ : nullptr; }
  bool has_open_group() const { return num_closed_ < groups_.size(); }
  std::vector<BlockTable> MakeTables() const { return std::vector<BlockTable>(groups_.size()); }

  // Looks at the first `num_grains` grains of the chain and changes nothing. The hit is the highest common
  // boundary, so the order of the groups does not matter.
  PrefixProbe ProbePrefix(std::span<const Digest> digests, std::int32_t num_grains,
                          ProbeScope scope = ProbeScope::kAllGroups) const;

  // Whether an admission behind the whole hit would read storage, which may miss.
  bool ReadsStorage(const PrefixProbe& probe) const;

  // First admission of a request: claims the probe's hits into its empty tables, evicts what must go and
  // acquires what `demands[group]` says behind the hit. Takes a new epoch. nullopt, with nothing changed, if
  // it does not fit.
  std::optional<Admission> AdmitFirst(std::span<BlockTable> tables, const PrefixProbe& probe,
                                      std::span<const GroupDemand> demands);
  // The same for a probe that may have hits on the host. They are loaded into blocks of the table and can be
  // hit here from now on, or, with storage, once the load is acknowledged. If the host cannot take all that
  // has to be read from storage the hit shrinks to what it can: `probe` becomes what is admitted behind, and
  // `demands_for` is asked again.
  std::optional<Admission> AdmitFirst(std::span<BlockTable> tables, PrefixProbe& probe,
                                      const DemandsFor& demands_for);

  // Whether blocks for a first admission could be had now, on the device. Changes nothing.
  bool CanAdmit(const PrefixProbe& probe, std::span<const GroupDemand> demands);

  // Whether empty tables could take the demands if everything evictable went, the hits of the request
  // included. False means that a first admission with them or larger ones fails. Costs O(groups).
  bool CouldAdmit(std::span<const GroupDemand> demands, const Releasable& releasable = {}) const;

  // What would come free or evictable if all these tables were gone: blocks that nobody but they and the
  // index holds, and parents without another child. Costs what they hold.
  Releasable CountReleasable(std::span<const std::vector<BlockTable>* const> holders) const;

  // A later admission: publishes the progress, gives up what expired at `num_computed_tokens` and grows every
  // table by `extents[group]`. nullopt, with nothing changed, if a full group needs a block beyond what it
  // holds that cannot be had, or if transfers hold blocks that would expire and nothing else can take their
  // place; a transfer always ends.
  std::optional<Admission> AdmitNext(std::span<BlockTable> tables, std::uint64_t epoch,
                                     const RequestProgress& progress, std::int64_t num_computed_tokens,
                                     std::span<const Extent> extents);

  // Makes sure that every full group has room for `num_tokens` behind the last one, and that what expires at
  // `num_computed_tokens` while transfers hold it can be replaced; costs nothing where both is so. Evicts
  // what must go and appends the ids of fresh blocks to `fresh_ids[group]`. False, with nothing changed, if
  // it does not fit.
  bool Secure(std::span<BlockTable> tables, std::int64_t num_computed_tokens, std::int64_t num_tokens,
              std::vector<std::vector<std::int32_t>>& fresh_ids);
  // Whether Secure() would succeed if everything evictable and what is releasable went.
  bool CouldSecure(std::span<const BlockTable> tables, std::int64_t num_tokens,
                   const Releasable& releasable) const;

  // A decode step, which publishes nothing: gives up what expired and makes room for `num_tokens` behind the
  // last one, out of the room the tables have or the blocks the request was promised. Appends the ids of
  // fresh blocks to `fresh_ids[group]`. REQUIRES: Secure() for the same step.
  void Step(std::span<BlockTable> tables, std::int64_t num_computed_tokens, std::int64_t num_tokens,
            std::vector<std::vector<std::int32_t>>& fresh_ids);

  // Grains before one that may matter to a hit at its end: windows reach back so far at most.
  std::int64_t num_lookback_grains() const;
  // Whether every group that is matched has published the blocks of these grains that a hit at the end of the
  // last one reads. `tail`: that grain behind the num_lookback_grains() before it, or all there are; of
  // fewer, what lies before them counts as there.
  bool IsResident(std::span<const Digest> tail) const;
  bool IsResident(const Digest& digest) const { return IsResident({&digest, 1}); }
  // Whether any group has published any block of one grain.
  bool HasBlockOf(const Digest& digest) const;
  // Tells `observer` about all entries that come and go from now on.
  void AddResidencyObserver(ResidencyObserver* observer);
  // Whether every closed group has published one grain. No hit reaches beyond a grain that one of them lacks.
  bool HasClosedGrain(std::span<const Digest> digests, std::int32_t grain) const;
  // Changes whenever something was published. A hit cannot have grown before it does.
  std::uint64_t publication_version() const;

  // Publishes without admitting. In the table a block whose content is published already gives way to the
  // canonical one.
  void Publish(std::span<BlockTable> tables, std::uint64_t epoch, const RequestProgress& progress);

  // Changes whenever blocks became free or evictable. An admission that failed cannot succeed before it does,
  // unless its prefix has grown.
  std::uint64_t capacity_version() const;

  std::int32_t num_cached_lcm_blocks() const;
  bool CanClear() const;  // every entry is held by its index alone, no transfer is under way
  void Clear();           // empties the cache of the device. REQUIRES: CanClear()
  void ClearHost();       // empties that of the host, and what is known of storage. REQUIRES: CanClear()

  // The tiers below the device. Without a host tier these do nothing.
  bool has_host_tier() const { return host_.has_value(); }
  const HostTier* host() const { return host_ ? &*host_ : nullptr; }
  const StorageShadow* shadow() const { return shadow_ ? &*shadow_ : nullptr; }  // with storage
  // Wants copies of the first `num_grains` grains of a chain, as far as the device has them: of full groups
  // everything, of state groups the newest state, of sliding groups what continuing from either end reads.
  void QueueSnapshot(std::span<const Digest> digests, std::int32_t num_grains, StoreGuard guard);
  // The transfers of a plan, when all else of it is decided. Pinned stores that are held back are asked for
  // again the next time.
  PlannedTransfers StartTransfers(bool holds_pinned_stores_back = false);
  void CompleteStore(std::uint64_t operation_id, std::span<const CacheKey> created);
  void CompleteLoad(std::uint64_t operation_id, bool is_success, std::span<const CacheKey> missed);
  bool IsLoadUnderWay(std::uint64_t operation_id) const {
    return transfers_ && transfers_->IsLoadUnderWay(operation_id);
  }
  bool has_transfer() const { return transfers_ && !transfers_->is_idle(); }
  // Transfers whose blocks nobody can take before they end.
  bool has_load() const { return transfers_ && transfers_->has_load(); }
  bool has_pinned_store() const { return transfers_ && transfers_->has_pinned_store(); }
  void RegisterStorageKeys(std::span<const CacheKey> keys);
  void UnregisterStorageKeys(std::span<const CacheKey> keys);
  // The keys behind the device's hit that a prompt could use from storage, front first. Empty without
  // storage.
  std::vector<CacheKey> StorageKeysFor(std::span<const Digest> digests, std::int32_t num_grains) const;
  HostCapacity host_capacity() const;

 private:
  struct GroupSlots {
    std::int32_t first;
    std::int32_t end;
  };

  struct HostExtension;
  // An admission, or nothing, or the shorter hit that is left to try.
  struct AdmissionAttempt {
    std::optional<Admission> admission;
    std::optional<std::int64_t> shorter_hit_tokens;
  };

  void AddTiers(const TierConfig& tiers);
  PrefixProbe ProbeDevice(std::span<const Digest> digests, std::int32_t num_grains, ProbeScope scope) const;
  void ExtendOnHost(PrefixProbe& probe, std::int64_t num_grains) const;
  void KeepWindowOf(PrefixProbe& probe, std::size_t group) const;
  AdmissionAttempt TryAdmitFirst(std::span<BlockTable> tables, PrefixProbe& probe,
                                 std::span<const GroupDemand> demands);
  std::optional<std::vector<EvictionVictim>> PlanFirst(const HostExtension& extension,
                                                       std::span<const GroupDemand> demands) const;
  HostExtension HoldExtension(const PrefixProbe& probe) const;
  std::int64_t PlaceReads(HostExtension& extension, std::int64_t hit_tokens);
  std::int64_t AcquireDestinations(HostExtension& extension, std::span<const GroupDemand> demands,
                                   const PrefixProbe& probe);
  void Abandon(HostExtension& extension);
  void TakeOver(BlockTable& table, std::size_t group, HostExtension& extension, std::uint64_t epoch,
                const PromptUses& uses);
  std::int64_t NewestStateGrains(std::span<const Digest> digests, std::int32_t num_grains) const;
  void QueueStore(const CacheGroup& group, const CacheKey& key, StoreScope scope);
  std::vector<std::int64_t> NumDetaching(std::span<const BlockTable> tables,
                                         std::int64_t num_computed_tokens) const;

  std::vector<std::int64_t> NumMissingFor(std::span<const GroupDemand> demands) const;
  AcquirePlan PlanSecure(std::span<const BlockTable> tables, std::size_t group,
                         std::int64_t num_tokens) const;
  std::vector<std::int64_t> NumMissingToSecure(std::span<const BlockTable> tables,
                                               std::int64_t num_tokens) const;
  void Evict(const EvictionVictim& victim);
  PromptUses UsesFor(const PrefixProbe& probe) const;
  // The grain in which the block that ends at `depth_tokens` lies.
  std::int64_t GrainOf(std::int64_t depth_tokens) const { return (depth_tokens - 1) / prefix_granularity_; }
  BlockUse UseAt(const PromptUses& uses, std::int64_t depth_tokens) const;
  void ForgetGhosts(const RequestProgress& progress);
  void ReclaimExpired(std::span<BlockTable> tables, std::int64_t num_computed_tokens);
  std::vector<std::int32_t> Acquire(BlockTable& table, std::int32_t group, const AcquirePlan& plan);
  bool PublishGroup(BlockTable& table, CacheGroup& group, std::uint64_t epoch,
                    const RequestProgress& progress);
  GroupSlots SlotsToPublish(const CacheGroup& group, const RequestProgress& progress) const;

  BlockPool pool_;
  std::vector<std::unique_ptr<CacheGroup>> groups_;
  std::vector<const PrefixCacheIndex*> indexes_;  // of groups_, for the planner
  std::vector<std::size_t> order_;                // closed groups first, each part in index order
  std::size_t num_closed_ = 0;
  std::optional<AgedFrequency> aged_frequency_;
  BlockReserve reserve_;
  std::optional<HostTier> host_;
  std::optional<StorageShadow> shadow_;
  std::optional<TierTransferManager> transfers_;
  std::int32_t prefix_granularity_;
  std::uint64_t last_epoch_ = 0;
};

}  // namespace pdmesh
