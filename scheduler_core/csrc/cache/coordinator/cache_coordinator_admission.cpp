// First admissions: a request's way from a probe to its tables.
#include <algorithm>
#include <utility>

#include "cache/coordinator/cache_coordinator.h"
#include "support/errors.h"

namespace pdmesh {
namespace {

// Holds a probe's hits so that planning cannot evict them.
class HitPins {
 public:
  HitPins(const std::vector<std::unique_ptr<CacheGroup>>& groups, const PrefixProbe& probe)
      : groups_(groups) {
    for (const GroupHits& hits : probe.hits) {
      std::vector<CacheBlockRef>& blocks = blocks_.emplace_back();
      blocks.reserve(hits.entries.size());
      for (const CacheEntry* entry : hits.entries) {
        blocks.push_back(entry->block);
      }
    }
  }

  std::vector<CacheBlockRef> Take(std::size_t group) { return std::move(blocks_[group]); }

  // Drops the pins as if they had never been.
  void Abandon() {
    for (std::size_t group = 0; group < blocks_.size(); ++group) {
      PrefixCacheIndex& index = groups_[group]->index;
      const std::uint64_t num_releases = index.num_releases();
      blocks_[group].clear();
      index.RestoreNumReleases(num_releases);
    }
  }

 private:
  const std::vector<std::unique_ptr<CacheGroup>>& groups_;
  std::vector<std::vector<CacheBlockRef>> blocks_;  // by group
};

}  // namespace

// What an admission takes from behind the device's hits, by group and in slot order.
struct CacheCoordinator::HostExtension {
  struct Slot {
    CacheKey key;
    std::int64_t slot;
    CacheBlockRef device;     // the canonical block if the device has one all the same, else the destination
    CacheBlockRef host;       // what is loaded, or what storage is read into
    const CacheEntry* entry;  // of the tier the block is on already; nullptr when storage is read
    bool is_loaded;
  };
  std::vector<std::vector<Slot>> slots;  // by group
  std::vector<bool> reads_storage;       // by grain

  bool empty() const { return slots.empty(); }
  std::int64_t NumLoads(std::size_t group) const {
    return empty() ? 0 : std::count_if(slots[group].begin(), slots[group].end(), [](const Slot& slot) {
      return slot.is_loaded;
    });
  }
};

std::optional<Admission> CacheCoordinator::AdmitFirst(std::span<BlockTable> tables, const PrefixProbe& probe,
                                                      std::span<const GroupDemand> demands) {
  Ensure(probe.host_hits.empty(), "an admission behind hits on the host cannot shrink its demands");
  PrefixProbe device_probe = probe;
  return TryAdmitFirst(tables, device_probe, demands).admission;
}

// Every attempt is for a shorter hit than the one before, and at the device's own hit nothing can be short.
std::optional<Admission> CacheCoordinator::AdmitFirst(std::span<BlockTable> tables, PrefixProbe& probe,
                                                      const DemandsFor& demands_for) {
  for (;;) {
    const std::optional<std::vector<GroupDemand>> demands = demands_for(probe);
    if (!demands) {
      return std::nullopt;
    }
    AdmissionAttempt attempt = TryAdmitFirst(tables, probe, *demands);
    if (!attempt.shorter_hit_tokens) {
      return std::move(attempt.admission);
    }
    Ensure(*attempt.shorter_hit_tokens < probe.hit_tokens, "a hit did not get shorter");
    const PrefixProbe longer = std::move(probe);
    const auto num_grains = static_cast<std::int32_t>(longer.digests.size());
    probe = ProbeDevice(longer.digests, num_grains, ProbeScope::kAllGroups);
    ExtendOnHost(probe, *attempt.shorter_hit_tokens / prefix_granularity_);
    probe.closed_tokens = longer.closed_tokens > longer.hit_tokens ? longer.closed_tokens : probe.hit_tokens;
  }
}

CacheCoordinator::AdmissionAttempt CacheCoordinator::TryAdmitFirst(std::span<BlockTable> tables,
                                                                   PrefixProbe& probe,
                                                                   std::span<const GroupDemand> demands) {
  HitPins pins(groups_, probe);
  HostExtension extension = HoldExtension(probe);
  const std::optional<std::vector<EvictionVictim>> victims = PlanFirst(extension, demands);
  if (!victims) {
    pins.Abandon();
    Abandon(extension);
    return {};
  }
  const std::int64_t placed_tokens = PlaceReads(extension, probe.hit_tokens);
  if (placed_tokens < probe.hit_tokens) {
    pins.Abandon();
    Abandon(extension);
    return {.admission = {}, .shorter_hit_tokens = placed_tokens};
  }
  const PromptUses uses = UsesFor(probe);
  std::for_each(victims->begin(), victims->end(), [this](const EvictionVictim& victim) { Evict(victim); });
  std::vector<std::int64_t> num_promised;
  for (const GroupDemand& demand : demands) {
    num_promised.push_back(demand.num_promised_blocks);
  }
  ReserveLease lease = reserve_.Lease(std::move(num_promised));
  const std::int64_t acquired_tokens = AcquireDestinations(extension, demands, probe);
  if (acquired_tokens < probe.hit_tokens) {
    // Before the lease ends, since the reserve would take blocks that are held here for ones it can do
    // without.
    pins.Abandon();
    Abandon(extension);
    return {.admission = {}, .shorter_hit_tokens = acquired_tokens};
  }
  const std::uint64_t epoch = ++last_epoch_;
  Admission admission{.epoch = epoch, .uses = uses, .reserve = std::move(lease), .fresh_ids = {}};
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    groups_[group]->allocator.Claim(tables[group], probe.hits[group].first_slot, pins.Take(group));
    for (const CacheEntry* entry : probe.hits[group].entries) {
      groups_[group]->index.Touch(*entry, epoch, UseAt(uses, entry->depth_tokens));
    }
    TakeOver(tables[group], group, extension, epoch, uses);
  }
  probe.storage_hit_tokens =
      std::count(extension.reads_storage.begin(), extension.reads_storage.end(), true) * prefix_granularity_;
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    const AcquirePlan plan = groups_[group]->geometry.PlanExtent(tables[group], demands[group].extent);
    admission.fresh_ids.push_back(Acquire(tables[group], static_cast<std::int32_t>(group), plan));
  }
  return {.admission = std::move(admission), .shorter_hit_tokens = {}};
}

bool CacheCoordinator::CanAdmit(const PrefixProbe& probe, std::span<const GroupDemand> demands) {
  HitPins pins(groups_, probe);
  HostExtension extension = HoldExtension(probe);
  const bool fits = PlanFirst(extension, demands).has_value();
  pins.Abandon();
  Abandon(extension);
  return fits;
}

// What must go for a first admission whose hits are held.
std::optional<std::vector<EvictionVictim>> CacheCoordinator::PlanFirst(
    const HostExtension& extension, std::span<const GroupDemand> demands) const {
  std::vector<std::int64_t> num_missing = NumMissingFor(demands);
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    num_missing[group] += groups_[group]->is_closed() ? extension.NumLoads(group) : 0;
  }
  return PlanEvictions(pool_, num_missing, indexes_);
}

// Holds what is there already, on either tier.
CacheCoordinator::HostExtension CacheCoordinator::HoldExtension(const PrefixProbe& probe) const {
  HostExtension extension;
  if (probe.host_hits.empty()) {
    return extension;
  }
  extension.slots.resize(groups_.size());
  extension.reads_storage.resize(probe.digests.size());
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    const SlotRun<HostHit>& run = probe.host_hits[group];
    const GroupKeySpace& keys = groups_[group]->keys;
    for (std::int64_t slot = run.first_slot; slot < run.end_slot(); ++slot) {
      const HostHit& hit = run.hits[static_cast<std::size_t>(slot - run.first_slot)];
      const CacheKey key = keys.KeyOf(probe.digests, slot);
      const CacheEntry* resident = groups_[group]->index.Find(key);
      const CacheEntry* entry = resident != nullptr ? resident : hit.entry;
      extension.slots[group].push_back(
          {.key = key,
           .slot = slot,
           .device = resident != nullptr ? resident->block : CacheBlockRef(),
           .host = resident == nullptr && entry != nullptr ? entry->block : CacheBlockRef(),
           .entry = entry,
           .is_loaded = resident == nullptr});
      if (entry == nullptr) {
        extension.reads_storage[static_cast<std::size_t>(slot / keys.slots_per_grain)] = true;
      }
    }
  }
  return extension;
}

// Drops what was held as if it had never been.
void CacheCoordinator::Abandon(HostExtension& extension) {
  for (std::size_t group = 0; group < extension.slots.size(); ++group) {
    PrefixCacheIndex& index = groups_[group]->index;
    const std::uint64_t num_releases = index.num_releases();
    extension.slots[group].clear();
    index.RestoreNumReleases(num_releases);
  }
}

// Finds room on the host for what storage is read into, grain by grain, so that what is short is short for
// all groups. Returns the boundary up to which there is room.
std::int64_t CacheCoordinator::PlaceReads(HostExtension& extension, std::int64_t hit_tokens) {
  std::vector<std::pair<std::int64_t, HostExtension::Slot*>> reads;  // with their grains
  for (std::size_t group = 0; group < extension.slots.size(); ++group) {
    for (HostExtension::Slot& slot : extension.slots[group]) {
      if (slot.entry == nullptr) {
        reads.emplace_back(slot.slot / groups_[group]->keys.slots_per_grain, &slot);
      }
    }
  }
  std::stable_sort(reads.begin(), reads.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  for (const auto& [grain, slot] : reads) {
    const std::int32_t group = slot->key.group;
    slot->host = host_->Place(group, static_cast<std::int32_t>(slot->slot % pool_.shard_count(group)));
    if (!slot->host) {
      return grain * prefix_granularity_;
    }
  }
  return hit_tokens;
}

// Acquires what is loaded into, each block in the bucket of its copy. Blocks of other buckets may be all that
// is left, or this may leave too little for the rest of the demand; then the boundary that is left to try is
// returned.
std::int64_t CacheCoordinator::AcquireDestinations(HostExtension& extension,
                                                   std::span<const GroupDemand> demands,
                                                   const PrefixProbe& probe) {
  if (extension.empty()) {
    return probe.hit_tokens;
  }
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    const auto group_index = static_cast<std::int32_t>(group);
    for (HostExtension::Slot& slot : extension.slots[group]) {
      if (!slot.is_loaded) {
        continue;
      }
      const std::int32_t bucket = host_->pool().BucketOf(group_index, slot.host.block_id());
      slot.device = reserve_.is_bounded(group_index) ? reserve_.TakeIn(group_index, bucket)
                                                     : pool_.AcquireIn(group_index, bucket);
      if (!slot.device) {
        return slot.slot / groups_[group]->keys.slots_per_grain * prefix_granularity_;
      }
    }
  }
  std::vector<std::int64_t> num_missing = NumMissingFor(demands);
  for (std::size_t i = num_closed_; i < order_.size(); ++i) {
    num_missing[order_[i]] = 0;  // promised and acquired by now
  }
  const std::optional<std::vector<EvictionVictim>> victims = PlanEvictions(pool_, num_missing, indexes_);
  if (!victims) {
    return probe.device_hit_tokens;
  }
  std::for_each(victims->begin(), victims->end(), [this](const EvictionVictim& victim) { Evict(victim); });
  return probe.hit_tokens;
}

// Appends the extension to the table, publishes what the host has and wants the loads.
void CacheCoordinator::TakeOver(BlockTable& table, std::size_t group, HostExtension& extension,
                                std::uint64_t epoch, const PromptUses& uses) {
  if (extension.empty()) {
    return;
  }
  CacheGroup& taker = *groups_[group];
  std::vector<CacheBlockRef> blocks;
  for (HostExtension::Slot& slot : extension.slots[group]) {
    const std::int64_t depth_tokens = (slot.slot + 1) * taker.spec.block_granularity;
    const BlockUse use = UseAt(uses, depth_tokens);
    blocks.push_back(slot.device);
    if (!slot.is_loaded) {
      taker.index.Touch(*slot.entry, epoch, use);
      continue;
    }
    const bool publishes_later =
        extension.reads_storage[static_cast<std::size_t>(slot.slot / taker.keys.slots_per_grain)];
    if (!publishes_later) {
      taker.index.Register(slot.key, slot.device, epoch, depth_tokens, BoundaryKind::kChunk, use);
    }
    if (slot.entry != nullptr) {
      host_->NoteHit(*slot.entry, epoch);
    }
    transfers_->QueueLoad({.key = slot.key,
                           .host = std::move(slot.host),
                           .device = std::move(slot.device),
                           .epoch = epoch,
                           .depth_tokens = depth_tokens,
                           .reads_storage = slot.entry == nullptr,
                           .publishes_later = publishes_later});
  }
  taker.allocator.Extend(table, std::move(blocks));
}

}  // namespace pdmesh
