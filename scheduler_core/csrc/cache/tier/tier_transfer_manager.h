// TierTransferManager: which copies between the tiers are wanted and which are under way.
//
// A store begins as a key and holds nothing. When a plan is complete the keys become one operation, as far as
// the host has room and lacks them; then it holds its destinations, and its sources too unless the copy runs
// ahead of everything else in the plan. A load holds both ends. Only the acknowledgement of an operation ends
// it, whatever becomes of the requests it was for; nothing else proves a copy.
//
// It knows keys and blocks, no requests and no tokens. Owned by the coordinator, which outlives nothing that
// it holds: pools, indexes and shadow outlive it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <unordered_set>
#include <utility>
#include <vector>

#include "cache/core/cache_block_ref.h"
#include "cache/tier/host_tier.h"
#include "cache/tier/storage_shadow.h"
#include "cache/tier/tier_operations.h"

namespace pdmesh {

// A device block that a transfer reads or writes. It is not released, evicted or granted before the end.
class PinnedBlock {
 public:
  PinnedBlock(BlockPool& pool, CacheBlockRef block);
  PinnedBlock(PinnedBlock&& other) noexcept
      : pool_(std::exchange(other.pool_, nullptr)), block_(std::move(other.block_)) {}
  PinnedBlock& operator=(PinnedBlock&&) = delete;
  ~PinnedBlock();

  const CacheBlockRef& block() const { return block_; }

 private:
  BlockPool* pool_;
  CacheBlockRef block_;
};

// One block that an admission takes from the host.
struct WantedLoad {
  CacheKey key;
  CacheBlockRef host;
  CacheBlockRef device;  // the manager takes it
  std::uint64_t epoch;
  std::int64_t depth_tokens;
  bool reads_storage;
  // The device block holds the key's content only after the acknowledgement, and is published then.
  bool publishes_later;
};

struct PlannedTransfers {
  std::vector<PlannedStore> stores;  // the one that runs ahead first
  std::optional<PlannedLoad> load;
};

class TierTransferManager {
 public:
  // `shadow` is nullptr without storage.
  TierTransferManager(BlockPool& device_pool, std::vector<PrefixCacheIndex*> device_indexes, HostTier& host,
                      StorageShadow* shadow);

  // Wants a copy of what the device has under the key when the plan is complete.
  void QueueStore(const CacheKey& key) { queued_stores_.push_back(key); }
  // Takes the block that the device has under the key now; it may be granted to others in the same plan.
  void StoreAhead(const CacheKey& key);
  void QueueLoad(WantedLoad load);

  // Makes operations of all that is wanted, but of queued stores only if they are not held back. At the end
  // of every plan.
  PlannedTransfers Start(bool holds_queued_stores_back = false);

  // Acknowledgements; of an operation that is not under way they change nothing. With storage the blocks of
  // a store are backed up by then, `created` being the keys that storage did not have before.
  void CompleteStore(std::uint64_t operation_id, std::span<const CacheKey> created);
  // Not successful: nothing of it counts as copied, and `missed` are the keys that storage turned out not to
  // have.
  void CompleteLoad(std::uint64_t operation_id, bool is_success, std::span<const CacheKey> missed);
  bool IsLoadUnderWay(std::uint64_t operation_id) const { return loads_.contains(operation_id); }

  // Until acknowledged their blocks are nobody's to take.
  bool has_load() const { return !loads_.empty() || !wanted_loads_.empty(); }
  bool has_pinned_store() const { return num_pinned_stores_ > 0; }
  bool is_idle() const { return stores_.empty() && !has_load() && stores_ahead_.empty(); }
  // Forgets wanted stores. REQUIRES: is_idle().
  void Clear() { queued_stores_.clear(); }

 private:
  struct Store {
    CacheKey key;
    CacheBlockRef host;
    std::int32_t source_block_id;
    std::optional<PinnedBlock> source;  // none when the copy runs ahead
    std::uint64_t epoch;
    std::int64_t depth_tokens;
    BoundaryKind kind;
  };
  struct Load {
    WantedLoad wanted;
    PinnedBlock destination;
  };
  struct StoreTicket {
    bool is_pinned;
    std::vector<Store> stores;
  };

  std::optional<Store> MakeStore(const CacheKey& key, bool is_pinned);
  PlannedStore StartStores(std::vector<Store> stores, bool is_pinned);
  PlannedLoad StartLoads();
  void PublishLoaded(const Load& load);
  void WithdrawUnfilled(const Load& load);

  BlockPool& device_pool_;
  std::vector<PrefixCacheIndex*> device_indexes_;  // by group
  HostTier& host_;
  StorageShadow* shadow_;
  std::uint64_t last_operation_id_ = 0;
  std::vector<CacheKey> queued_stores_;
  std::vector<Store> stores_ahead_;
  std::vector<Load> wanted_loads_;
  std::unordered_set<CacheKey, CacheKeyHash> keys_under_way_;  // of stores; looked up, never walked
  std::map<std::uint64_t, StoreTicket> stores_;                // by operation id
  std::map<std::uint64_t, std::vector<Load>> loads_;           // by operation id
  std::int32_t num_pinned_stores_ = 0;
};

}  // namespace pdmesh
