// The tiers below the device, as the coordinator sees them.
#include <algorithm>
#include <utility>

#include "cache/coordinator/cache_coordinator.h"
#include "support/errors.h"

namespace pdmesh {

void CacheCoordinator::AddTiers(const TierConfig& tiers) {
  if (tiers.num_host_lcm_blocks == 0) {
    return;
  }
  std::vector<std::int32_t> packing;
  std::vector<std::int32_t> shard_counts;
  std::vector<Closure> closures;
  std::vector<PrefixCacheIndex*> indexes;
  for (const auto& group : groups_) {
    packing.push_back(group->spec.cache_blocks_per_lcm_block);
    shard_counts.push_back(group->spec.shard_count);
    closures.push_back(group->is_closed() ? Closure::kClosed : Closure::kOpen);
    indexes.push_back(&group->index);
  }
  host_.emplace(tiers.num_host_lcm_blocks, std::move(packing), std::move(shard_counts), closures);
  if (tiers.enable_storage) {
    shadow_.emplace(host_->num_blocks());
  }
  transfers_.emplace(pool_, std::move(indexes), *host_, shadow_ ? &*shadow_ : nullptr);
}

// Behind the device's hit the groups converge on the host as they did on the device.
void CacheCoordinator::ExtendOnHost(PrefixProbe& probe, std::int64_t num_grains) const {
  const std::int64_t device_grains = probe.device_hit_tokens / prefix_granularity_;
  std::vector<SlotRun<HostHit>> runs(groups_.size());
  std::int64_t bound_grains = num_grains;
  const auto match = [&](std::size_t group) {
    const CacheGroup& matched = *groups_[group];
    const std::int32_t slots_per_grain = matched.keys.slots_per_grain;
    runs[group] = MatchOnHost(matched, host_->index(matched.keys.group), shadow(), probe.digests,
                              device_grains * slots_per_grain, bound_grains * slots_per_grain);
    bound_grains = runs[group].end_slot() / slots_per_grain;
  };
  for (std::size_t i = 0; i < num_closed_; ++i) {
    match(order_[i]);
  }
  if (num_closed_ > 0) {
    probe.closed_tokens = std::max(probe.closed_tokens, bound_grains * prefix_granularity_);
  }
  std::optional<std::int64_t> settled_grains;
  while (settled_grains != bound_grains) {
    const bool is_first_time = !settled_grains;
    settled_grains = bound_grains;
    for (std::size_t i = num_closed_; i < order_.size(); ++i) {
      const CacheGroup& open = *groups_[order_[i]];
      if (!open.spec.is_replayable &&
          (is_first_time || runs[order_[i]].end_slot() > bound_grains * open.keys.slots_per_grain)) {
        match(order_[i]);
      }
    }
  }
  if (bound_grains <= device_grains) {
    return;
  }
  for (std::size_t i = 0; i < num_closed_; ++i) {
    runs[order_[i]].hits.resize(
        static_cast<std::size_t>((bound_grains - device_grains) * groups_[order_[i]]->keys.slots_per_grain));
  }
  probe.hit_tokens = bound_grains * prefix_granularity_;
  probe.host_hits = std::move(runs);
  for (std::size_t i = num_closed_; i < order_.size(); ++i) {
    KeepWindowOf(probe, order_[i]);
  }
}

// What the device has all the same, beyond its own hit, is read from nowhere.
bool CacheCoordinator::ReadsStorage(const PrefixProbe& probe) const {
  for (std::size_t group = 0; group < probe.host_hits.size(); ++group) {
    const SlotRun<HostHit>& run = probe.host_hits[group];
    for (std::int64_t slot = run.first_slot; slot < run.end_slot(); ++slot) {
      if (run.hits[static_cast<std::size_t>(slot - run.first_slot)].is_in_storage &&
          groups_[group]->index.Find(groups_[group]->keys.KeyOf(probe.digests, slot)) == nullptr) {
        return true;
      }
    }
  }
  return false;
}

// Of an open group only what is read behind the whole hit is claimed.
void CacheCoordinator::KeepWindowOf(PrefixProbe& probe, std::size_t group) const {
  const CacheGroup& open = *groups_[group];
  if (open.spec.is_replayable) {
    probe.host_hits[group] = {};
    return;
  }
  const std::int64_t slots_per_grain = open.keys.slots_per_grain;
  const std::int64_t end_slot = probe.hit_tokens / prefix_granularity_ * slots_per_grain;
  const std::int64_t first_slot = std::max<std::int64_t>(0, end_slot - open.geometry.num_lookback_blocks());
  GroupHits& hits = probe.hits[group];
  const std::int64_t num_unread = std::clamp<std::int64_t>(first_slot - hits.first_slot, 0,
                                                           static_cast<std::int64_t>(hits.entries.size()));
  hits.entries.erase(hits.entries.begin(), hits.entries.begin() + num_unread);
  hits.first_slot = hits.entries.empty() ? probe.host_hits[group].first_slot : first_slot;
}

// By group: blocks that expire from the tables and are then held by transfers alone.
std::vector<std::int64_t> CacheCoordinator::NumDetaching(std::span<const BlockTable> tables,
                                                         std::int64_t num_computed_tokens) const {
  std::vector<std::int64_t> num_detaching(groups_.size(), 0);
  for (std::size_t i = num_closed_; i < order_.size(); ++i) {
    const std::size_t group = order_[i];
    if (pool_.num_pins(static_cast<std::int32_t>(group)) == 0) {
      continue;
    }
    const BlockTable& table = tables[group];
    const std::int64_t num_expired = std::min<std::int64_t>(
        groups_[group]->geometry.ExpiredBlocksAt(num_computed_tokens), table.num_slots());
    for (std::int64_t slot = table.num_reclaimed_slots(); slot < num_expired; ++slot) {
      num_detaching[group] += pool_.IsPinnedBehind(table.block(static_cast<std::int32_t>(slot))) ? 1 : 0;
    }
  }
  return num_detaching;
}

void CacheCoordinator::QueueStore(const CacheGroup& group, const CacheKey& key, StoreScope scope) {
  const bool is_stored = scope == StoreScope::kEverything ||
                         (scope == StoreScope::kWindows && group.spec.kind == AttentionKind::kSlidingWindow);
  if (transfers_ && is_stored) {
    transfers_->QueueStore(key);
  }
}

void CacheCoordinator::QueueSnapshot(std::span<const Digest> digests, std::int32_t num_grains,
                                     StoreGuard guard) {
  if (!transfers_) {
    return;
  }
  const auto store = [&](const CacheGroup& group, std::int64_t first_slot, std::int64_t end_slot) {
    for (std::int64_t slot = std::max<std::int64_t>(0, first_slot); slot < end_slot; ++slot) {
      const CacheKey key = group.keys.KeyOf(digests, slot);
      if (guard == StoreGuard::kAhead) {
        transfers_->StoreAhead(key);
      } else {
        transfers_->QueueStore(key);
      }
    }
  };
  const std::int64_t state_grains = NewestStateGrains(digests, num_grains);
  for (const std::size_t group : order_) {
    const CacheGroup& stored = *groups_[group];
    const std::int64_t slots_per_grain = stored.keys.slots_per_grain;
    const std::int64_t num_lookback = stored.geometry.num_lookback_blocks();
    if (stored.spec.is_replayable) {
      continue;
    }
    if (stored.is_closed()) {
      store(stored, 0, num_grains * slots_per_grain);
      continue;
    }
    store(stored, state_grains * slots_per_grain - num_lookback, state_grains * slots_per_grain);
    if (stored.spec.kind == AttentionKind::kSlidingWindow && state_grains != num_grains) {
      store(stored, num_grains * slots_per_grain - num_lookback, num_grains * slots_per_grain);
    }
  }
}

// The highest boundary at which every state group has a published state; 0 for none.
std::int64_t CacheCoordinator::NewestStateGrains(std::span<const Digest> digests,
                                                 std::int32_t num_grains) const {
  const auto lacks_state_at = [&](std::int64_t boundary) {
    return std::any_of(groups_.begin(), groups_.end(), [&](const auto& group) {
      return group->spec.kind == AttentionKind::kState &&
             group->index.Find(group->keys.KeyOf(digests, boundary * group->keys.slots_per_grain - 1)) ==
                 nullptr;
    });
  };
  std::int64_t boundary = num_grains;
  while (boundary > 0 && lacks_state_at(boundary)) {
    --boundary;
  }
  return boundary;
}

PlannedTransfers CacheCoordinator::StartTransfers(bool holds_pinned_stores_back) {
  return transfers_ ? transfers_->Start(holds_pinned_stores_back) : PlannedTransfers();
}

void CacheCoordinator::CompleteStore(std::uint64_t operation_id, std::span<const CacheKey> created) {
  if (transfers_) {
    transfers_->CompleteStore(operation_id, created);
  }
}

void CacheCoordinator::CompleteLoad(std::uint64_t operation_id, bool is_success,
                                    std::span<const CacheKey> missed) {
  if (transfers_) {
    transfers_->CompleteLoad(operation_id, is_success, missed);
  }
}

void CacheCoordinator::RegisterStorageKeys(std::span<const CacheKey> keys) {
  if (shadow_) {
    shadow_->Register(keys);
  }
}

void CacheCoordinator::UnregisterStorageKeys(std::span<const CacheKey> keys) {
  if (shadow_) {
    shadow_->Unregister(keys);
  }
}

std::vector<CacheKey> CacheCoordinator::StorageKeysFor(std::span<const Digest> digests,
                                                       std::int32_t num_grains) const {
  std::vector<CacheKey> keys;
  if (!shadow_) {
    return keys;
  }
  const std::int64_t device_hit_tokens =
      ProbeDevice(digests, num_grains, ProbeScope::kAllGroups).device_hit_tokens;
  for (std::int64_t grain = device_hit_tokens / prefix_granularity_; grain < num_grains; ++grain) {
    for (const auto& group : groups_) {
      const std::int32_t slots_per_grain = group->spec.is_replayable ? 0 : group->keys.slots_per_grain;
      for (std::int64_t offset = 0; offset < slots_per_grain; ++offset) {
        const CacheKey key = group->keys.KeyOf(digests, grain * slots_per_grain + offset);
        if (host_->index(key.group).Find(key) == nullptr) {
          keys.push_back(key);
        }
      }
    }
  }
  return keys;
}

HostCapacity CacheCoordinator::host_capacity() const {
  if (!host_) {
    return {};
  }
  const std::int32_t total = host_->pool().num_lcm_blocks();
  const std::int32_t empty = host_->pool().num_empty_lcm_blocks();
  const std::int32_t cached = host_->num_cached_lcm_blocks();
  return {.total_lcm_blocks = total,
          .empty_lcm_blocks = empty,
          .cached_lcm_blocks = cached,
          .active_lcm_blocks = total - empty - cached};
}

void CacheCoordinator::ClearHost() {
  if (host_) {
    host_->Clear();
  }
  if (shadow_) {
    shadow_->Clear();
  }
}

}  // namespace pdmesh
