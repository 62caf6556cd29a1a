// What is cached under which key: looking a chain up and publishing what a request computed.
#include <algorithm>
#include <optional>

#include "cache/coordinator/cache_coordinator.h"

namespace pdmesh {

PrefixProbe CacheCoordinator::ProbePrefix(std::span<const Digest> digests, std::int32_t num_grains,
                                          ProbeScope scope) const {
  PrefixProbe probe = ProbeDevice(digests, num_grains, scope);
  if (host_ && scope == ProbeScope::kAllGroups) {
    ExtendOnHost(probe, num_grains);
  }
  return probe;
}

// The bound only falls, and each group is matched again until it backs the bound itself.
PrefixProbe CacheCoordinator::ProbeDevice(std::span<const Digest> digests, std::int32_t num_grains,
                                          ProbeScope scope) const {
  PrefixProbe probe;
  probe.hits.resize(groups_.size());
  std::int64_t bound_grains = num_grains;
  const auto match = [&](std::size_t group) {
    probe.hits[group] = groups_[group]->Match(digests, bound_grains);
    bound_grains = probe.hits[group].end_slot() / groups_[group]->keys.slots_per_grain;
  };
  for (std::size_t i = 0; i < num_closed_; ++i) {
    match(order_[i]);
  }
  probe.closed_tokens = num_closed_ == 0 ? 0 : bound_grains * prefix_granularity_;
  std::optional<std::int64_t> settled_grains;
  while (settled_grains != bound_grains) {
    const bool is_first_time = !settled_grains;
    settled_grains = bound_grains;
    for (std::size_t i = num_closed_; i < order_.size(); ++i) {
      const std::size_t group = order_[i];
      const CacheGroupSpec& spec = groups_[group]->spec;
      const bool is_matched =
          !spec.is_replayable && (scope == ProbeScope::kAllGroups || spec.kind != AttentionKind::kState);
      const std::int64_t bound_slots = bound_grains * groups_[group]->keys.slots_per_grain;
      if (is_matched && (is_first_time || probe.hits[group].end_slot() > bound_slots)) {
        match(group);
      }
    }
  }
  for (std::size_t i = 0; i < num_closed_; ++i) {
    const std::size_t group = order_[i];
    probe.hits[group].entries.resize(
        static_cast<std::size_t>(bound_grains * groups_[group]->keys.slots_per_grain));
  }
  probe.hit_tokens = bound_grains * prefix_granularity_;
  probe.device_hit_tokens = probe.hit_tokens;
  probe.digests = digests.first(static_cast<std::size_t>(num_grains));
  return probe;
}

bool CacheCoordinator::HasClosedGrain(std::span<const Digest> digests, std::int32_t grain) const {
  return std::all_of(
      order_.begin(), order_.begin() + static_cast<std::ptrdiff_t>(num_closed_), [&](std::size_t group) {
        const CacheGroup& closed = *groups_[group];
        const std::int64_t first_slot = std::int64_t{grain} * closed.keys.slots_per_grain;
        for (std::int64_t slot = first_slot; slot < first_slot + closed.keys.slots_per_grain; ++slot) {
          if (closed.index.Find(closed.keys.KeyOf(digests, slot)) == nullptr) {
            return false;
          }
        }
        return true;
      });
}

std::int64_t CacheCoordinator::num_lookback_grains() const {
  std::int64_t num_grains = 0;
  for (const std::unique_ptr<CacheGroup>& group : groups_) {
    num_grains = std::max(num_grains, group->spec.is_replayable ? 0 : group->num_lookback_grains());
  }
  return num_grains;
}

// From the right: what is not cached mostly lacks its last block.
bool CacheCoordinator::IsResident(std::span<const Digest> tail) const {
  return std::all_of(groups_.begin(), groups_.end(), [&](const std::unique_ptr<CacheGroup>& group) {
    if (group->spec.is_replayable) {
      return true;
    }
    const std::int64_t slots_per_grain = group->keys.slots_per_grain;
    const std::int64_t end = static_cast<std::int64_t>(tail.size()) * slots_per_grain;
    const std::int64_t num_read =
        group->is_closed() ? slots_per_grain : std::min(end, group->geometry.num_lookback_blocks());
    for (std::int64_t slot = end - 1; slot >= end - num_read; --slot) {
      if (group->index.Find(group->keys.KeyOf(tail, slot)) == nullptr) {
        return false;
      }
    }
    return true;
  });
}

bool CacheCoordinator::HasBlockOf(const Digest& digest) const {
  return std::any_of(groups_.begin(), groups_.end(), [&](const std::unique_ptr<CacheGroup>& group) {
    for (std::int64_t slot = 0; slot < group->keys.slots_per_grain; ++slot) {
      if (group->index.Find(group->keys.KeyOf({&digest, 1}, slot)) != nullptr) {
        return true;
      }
    }
    return false;
  });
}

void CacheCoordinator::AddResidencyObserver(ResidencyObserver* observer) {
  for (const auto& group : groups_) {
    group->index.AddResidencyObserver(observer);
  }
}

std::uint64_t CacheCoordinator::publication_version() const {
  std::uint64_t version = 0;
  for (const PrefixCacheIndex* index : indexes_) {
    version += index->num_publications();
  }
  for (std::int32_t group = 0; host_ && group < num_groups(); ++group) {
    version += host_->index(group).num_publications();
  }
  return version + (shadow_ ? shadow_->num_registrations() : 0);
}

void CacheCoordinator::Publish(std::span<BlockTable> tables, std::uint64_t epoch,
                               const RequestProgress& progress) {
  if (progress.first_grain >= progress.end_grain) {
    return;
  }
  ForgetGhosts(progress);
  bool has_dropped = false;
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    has_dropped |= PublishGroup(tables[group], *groups_[group], epoch, progress);
  }
  if (has_dropped) {
    reserve_.Settle();
  }
}

// True if a duplicate was dropped whose place has to be refilled.
bool CacheCoordinator::PublishGroup(BlockTable& table, CacheGroup& group, std::uint64_t epoch,
                                    const RequestProgress& progress) {
  bool has_dropped = false;
  const GroupSlots slots = SlotsToPublish(group, progress);
  for (std::int32_t slot = slots.first; slot < slots.end; ++slot) {
    const CacheBlockRef& own = table.block(slot);
    if (!own && !group.is_closed()) {
      continue;
    }
    const std::int64_t depth_tokens = (std::int64_t{slot} + 1) * group.spec.block_granularity;
    const BlockUse use = progress.uses == nullptr ? BlockUse{} : UseAt(*progress.uses, depth_tokens);
    const CacheKey key = group.keys.KeyOf(progress.digests, slot);
    const CacheBlockRef& canonical = group.index.Register(key, own, epoch, depth_tokens, progress.kind, use);
    QueueStore(group, key, progress.store_scope);
    // A transfer keeps the duplicates it may read. Where blocks are promised by number that would be one more
    // than the promise, so there the duplicate stays in its slot, unpublished. So does one that a load holds
    // and nobody else would.
    const bool stays = !group.is_closed() && (progress.keeps_duplicates || pool_.IsPinnedBehind(own));
    if (canonical.block_id() != own.block_id() && !stays) {
      group.allocator.Repoint(table, slot, canonical, progress.keeps_duplicates);
      has_dropped |= !group.is_closed();
    }
  }
  return has_dropped;
}

// Of a sliding group only what continuing from the newest boundary reads, of a state group what was recorded.
CacheCoordinator::GroupSlots CacheCoordinator::SlotsToPublish(const CacheGroup& group,
                                                              const RequestProgress& progress) const {
  if (group.spec.is_replayable) {
    return {.first = 0, .end = 0};
  }
  const std::int32_t slots_per_grain = group.keys.slots_per_grain;
  const std::int32_t end = progress.end_grain * slots_per_grain;
  if (group.spec.kind == AttentionKind::kFull) {
    return {.first = progress.first_grain * slots_per_grain, .end = end};
  }
  if (group.spec.kind == AttentionKind::kSlidingWindow) {
    return {.first = std::max(0, end - static_cast<std::int32_t>(group.geometry.num_lookback_blocks())),
            .end = end};
  }
  const std::int64_t checkpoint = progress.state_checkpoint_tokens;
  const bool is_published = progress.kind > BoundaryKind::kChunk &&
                            checkpoint > std::int64_t{progress.first_grain} * prefix_granularity_ &&
                            checkpoint <= std::int64_t{progress.end_grain} * prefix_granularity_;
  if (!is_published) {
    return {.first = 0, .end = 0};
  }
  const auto slot = static_cast<std::int32_t>(group.geometry.SlotOfLast(checkpoint));
  return {.first = slot, .end = slot + 1};
}

void CacheCoordinator::ForgetGhosts(const RequestProgress& progress) {
  if (aged_frequency_) {
    for (std::int32_t grain = progress.first_grain; grain < progress.end_grain; ++grain) {
      aged_frequency_->Forget(progress.digests[static_cast<std::size_t>(grain)]);
    }
  }
}

}  // namespace pdmesh
