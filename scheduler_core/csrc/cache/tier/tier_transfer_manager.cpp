#include "cache/tier/tier_transfer_manager.h"

#include <algorithm>
#include <tuple>
#include <unordered_set>

#include "support/errors.h"

namespace pdmesh {
namespace {

// Every copy once: an operation that copies nothing would never be acknowledged.
void CheckCopies(const std::vector<TierCopy>& copies) {
  Ensure(!copies.empty(), "a transfer without a copy was planned");
  std::vector<std::tuple<std::int32_t, std::int32_t, std::int32_t>> seen;
  seen.reserve(copies.size());
  for (const TierCopy& copy : copies) {
    seen.emplace_back(copy.group, copy.source_block_id, copy.destination_block_id);
  }
  std::sort(seen.begin(), seen.end());
  Ensure(std::adjacent_find(seen.begin(), seen.end()) == seen.end(), "a copy was planned twice");
}

bool IsOfEarlierGroup(const TierCopy& a, const TierCopy& b) {
  return a.group < b.group;
}

}  // namespace

PinnedBlock::PinnedBlock(BlockPool& pool, CacheBlockRef block) : pool_(&pool), block_(std::move(block)) {
  pool_->Pin(block_);
}

PinnedBlock::~PinnedBlock() {
  if (pool_ != nullptr) {
    pool_->Unpin(block_);
  }
}

TierTransferManager::TierTransferManager(BlockPool& device_pool,
                                         std::vector<PrefixCacheIndex*> device_indexes, HostTier& host,
                                         StorageShadow* shadow)
    : device_pool_(device_pool), device_indexes_(std::move(device_indexes)), host_(host), shadow_(shadow) {}

std::optional<TierTransferManager::Store> TierTransferManager::MakeStore(const CacheKey& key,
                                                                         bool is_pinned) {
  const CacheEntry* entry = device_indexes_[static_cast<std::size_t>(key.group)]->Find(key);
  if (entry == nullptr || host_.index(key.group).Find(key) != nullptr || keys_under_way_.contains(key)) {
    return std::nullopt;
  }
  const std::int32_t bucket = device_pool_.BucketOf(key.group, entry->block.block_id());
  CacheBlockRef place = host_.Place(key.group, bucket);
  if (!place) {
    return std::nullopt;
  }
  keys_under_way_.insert(key);
  Store store{.key = key,
              .host = std::move(place),
              .source_block_id = entry->block.block_id(),
              .source = {},
              .epoch = entry->epoch,
              .depth_tokens = entry->depth_tokens,
              .kind = entry->kind};
  if (is_pinned) {
    store.source.emplace(device_pool_, entry->block);
  }
  return store;
}

void TierTransferManager::StoreAhead(const CacheKey& key) {
  if (std::optional<Store> store = MakeStore(key, /*is_pinned=*/false)) {
    stores_ahead_.push_back(std::move(*store));
  }
}

void TierTransferManager::QueueLoad(WantedLoad load) {
  CacheBlockRef device = std::move(load.device);
  wanted_loads_.push_back(
      {.wanted = std::move(load), .destination = PinnedBlock(device_pool_, std::move(device))});
}

PlannedTransfers TierTransferManager::Start(bool holds_queued_stores_back) {
  PlannedTransfers planned;
  if (!stores_ahead_.empty()) {
    planned.stores.push_back(StartStores(std::exchange(stores_ahead_, {}), /*is_pinned=*/false));
  }
  std::vector<Store> stores;
  std::vector<CacheKey> queued;
  if (!holds_queued_stores_back) {
    queued.swap(queued_stores_);
  }
  for (const CacheKey& key : queued) {
    if (std::optional<Store> store = MakeStore(key, /*is_pinned=*/true)) {
      stores.push_back(std::move(*store));
    }
  }
  if (!stores.empty()) {
    planned.stores.push_back(StartStores(std::move(stores), /*is_pinned=*/true));
  }
  if (!wanted_loads_.empty()) {
    planned.load = StartLoads();
  }
  return planned;
}

PlannedStore TierTransferManager::StartStores(std::vector<Store> stores, bool is_pinned) {
  PlannedStore operation{.operation_id = ++last_operation_id_, .is_pinned = is_pinned, .copies = {}};
  for (const Store& store : stores) {
    operation.copies.push_back({.group = store.key.group,
                                .source_block_id = store.source_block_id,
                                .destination_block_id = store.host.block_id(),
                                .key = store.key});
  }
  std::stable_sort(operation.copies.begin(), operation.copies.end(), IsOfEarlierGroup);
  CheckCopies(operation.copies);
  num_pinned_stores_ += is_pinned ? 1 : 0;
  stores_.emplace(operation.operation_id, StoreTicket{.is_pinned = is_pinned, .stores = std::move(stores)});
  return operation;
}

PlannedLoad TierTransferManager::StartLoads() {
  PlannedLoad operation{.operation_id = ++last_operation_id_, .copies = {}};
  for (const Load& load : wanted_loads_) {
    operation.copies.push_back({.group = load.wanted.key.group,
                                .source_block_id = load.wanted.host.block_id(),
                                .destination_block_id = load.destination.block().block_id(),
                                .key = load.wanted.key,
                                .reads_storage = load.wanted.reads_storage});
  }
  std::stable_sort(operation.copies.begin(), operation.copies.end(), IsOfEarlierGroup);
  CheckCopies(operation.copies);
  loads_.emplace(operation.operation_id, std::exchange(wanted_loads_, {}));
  return operation;
}

void TierTransferManager::CompleteStore(std::uint64_t operation_id, std::span<const CacheKey> created) {
  const auto found = stores_.find(operation_id);
  if (found == stores_.end()) {
    return;
  }
  const StoreTicket ticket = std::move(found->second);
  stores_.erase(found);
  num_pinned_stores_ -= ticket.is_pinned ? 1 : 0;
  std::vector<const Store*> by_depth;
  for (const Store& store : ticket.stores) {
    keys_under_way_.erase(store.key);
    host_.Publish(store.key, store.host, store.epoch, store.depth_tokens, store.kind);
    by_depth.push_back(&store);
  }
  if (shadow_ == nullptr) {
    return;
  }
  std::stable_sort(by_depth.begin(), by_depth.end(),
                   [](const Store* a, const Store* b) { return a->depth_tokens < b->depth_tokens; });
  std::vector<CacheKey> keys;
  for (const Store* store : by_depth) {
    keys.push_back(store->key);
  }
  shadow_->RegisterWritten(keys, created);
}

void TierTransferManager::CompleteLoad(std::uint64_t operation_id, bool is_success,
                                       std::span<const CacheKey> missed) {
  const auto found = loads_.find(operation_id);
  if (found == loads_.end()) {
    return;
  }
  const std::vector<Load> loads = std::move(found->second);
  loads_.erase(found);
  std::unordered_set<CacheKey, CacheKeyHash> keys;
  for (const Load& load : loads) {
    keys.insert(load.wanted.key);
    if (is_success) {
      PublishLoaded(load);
    } else {
      WithdrawUnfilled(load);
    }
  }
  for (const CacheKey& key : missed) {
    if (shadow_ != nullptr && !is_success && keys.contains(key)) {
      shadow_->MarkUnreadable(key);
    }
  }
}

void TierTransferManager::PublishLoaded(const Load& load) {
  const WantedLoad& wanted = load.wanted;
  if (wanted.reads_storage) {
    host_.Publish(wanted.key, wanted.host, wanted.epoch, wanted.depth_tokens, BoundaryKind::kChunk);
  }
  if (wanted.publishes_later) {
    device_indexes_[static_cast<std::size_t>(wanted.key.group)]->Register(
        wanted.key, load.destination.block(), wanted.epoch, wanted.depth_tokens, BoundaryKind::kChunk);
  }
}

// What was published ahead of a copy that did not happen.
void TierTransferManager::WithdrawUnfilled(const Load& load) {
  PrefixCacheIndex& index = *device_indexes_[static_cast<std::size_t>(load.wanted.key.group)];
  const CacheEntry* entry = index.Find(load.wanted.key);
  if (entry != nullptr && entry->block.block_id() == load.destination.block().block_id()) {
    index.Withdraw(*entry);
  }
}

}  // namespace pdmesh
