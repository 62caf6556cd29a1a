#include "cache/coordinator/cache_coordinator.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "cache/coordinator/admission_planner.h"
#include "support/errors.h"

namespace pdmesh {
namespace {

std::vector<std::int32_t> ShardCountsOf(const std::vector<CacheGroupSpec>& specs) {
  std::vector<std::int32_t> shard_counts;
  for (const CacheGroupSpec& spec : specs) {
    shard_counts.push_back(spec.shard_count);
  }
  return shard_counts;
}

std::vector<std::int32_t> PackingOf(const std::vector<CacheGroupSpec>& specs) {
  std::vector<std::int32_t> packing;
  for (const CacheGroupSpec& spec : specs) {
    packing.push_back(spec.cache_blocks_per_lcm_block);
  }
  return packing;
}

// As many as the cache holds grains if one group has it all.
std::int64_t MaxGhosts(const BlockPool& pool, const std::vector<std::unique_ptr<CacheGroup>>& groups) {
  std::int64_t max_ghosts = 0;
  for (const auto& group : groups) {
    max_ghosts =
        std::max<std::int64_t>(max_ghosts, pool.num_blocks(group->keys.group) / group->keys.slots_per_grain);
  }
  return max_ghosts;
}

std::vector<std::unique_ptr<CacheGroup>> MakeGroups(std::int32_t prefix_granularity, BlockPool& pool,
                                                    std::vector<CacheGroupSpec> specs) {
  Ensure(!specs.empty(), "a coordinator needs at least one group");
  std::vector<std::unique_ptr<CacheGroup>> groups;
  for (CacheGroupSpec& spec : specs) {
    const auto group = static_cast<std::int32_t>(groups.size());
    groups.push_back(std::make_unique<CacheGroup>(std::move(spec), prefix_granularity, pool, group));
  }
  return groups;
}

std::vector<const PrefixCacheIndex*> IndexesOf(const std::vector<std::unique_ptr<CacheGroup>>& groups) {
  std::vector<const PrefixCacheIndex*> indexes;
  for (const auto& group : groups) {
    indexes.push_back(&group->index);
  }
  return indexes;
}

}  // namespace

CacheCoordinator::CacheCoordinator(std::int32_t prefix_granularity, std::int32_t num_lcm_blocks,
                                   std::vector<CacheGroupSpec> specs, EvictionPolicy eviction_policy,
                                   const TierConfig& tiers)
    : pool_(num_lcm_blocks, PackingOf(specs), ShardCountsOf(specs)),
      groups_(MakeGroups(prefix_granularity, pool_, std::move(specs))),
      reserve_(pool_, IndexesOf(groups_), [this](const EvictionVictim& victim) { Evict(victim); }),
      prefix_granularity_(prefix_granularity) {
  if (eviction_policy == EvictionPolicy::kAgedFrequency) {
    aged_frequency_.emplace(MaxGhosts(pool_, groups_));
  }
  for (const bool is_closed : {true, false}) {
    for (std::size_t group = 0; group < groups_.size(); ++group) {
      if (groups_[group]->is_closed() == is_closed) {
        order_.push_back(group);
        num_closed_ += is_closed ? 1 : 0;
      }
    }
  }
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    indexes_.push_back(&groups_[group]->index);
    if (!groups_[group]->is_closed()) {
      reserve_.Bound(static_cast<std::int32_t>(group));
    }
  }
  AddTiers(tiers);
}

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

// What the policy makes of an admission's hits and ghosts. REQUIRES: nothing was touched or evicted for it
// yet.
PromptUses CacheCoordinator::UsesFor(const PrefixProbe& probe) const {
  if (!aged_frequency_) {
    return {};
  }
  std::vector<std::uint8_t> cached_uses(static_cast<std::size_t>(probe.hit_tokens / prefix_granularity_));
  for (const GroupHits& hits : probe.hits) {
    for (const CacheEntry* entry : hits.entries) {
      std::uint8_t& uses = cached_uses[static_cast<std::size_t>(GrainOf(entry->depth_tokens))];
      uses = std::max(uses, entry->use.uses);
    }
  }
  return aged_frequency_->UsesFor(probe.digests, cached_uses);
}

// Of the block that ends at `depth_tokens`.
BlockUse CacheCoordinator::UseAt(const PromptUses& uses, std::int64_t depth_tokens) const {
  return aged_frequency_ ? uses.UseOf(GrainOf(depth_tokens)) : BlockUse{};
}

bool CacheCoordinator::CouldAdmit(std::span<const GroupDemand> demands, const Releasable& releasable) const {
  return CouldFit(pool_, NumMissingFor(demands), indexes_, releasable);
}

Releasable CacheCoordinator::CountReleasable(std::span<const std::vector<BlockTable>* const> holders) const {
  Releasable releasable{.num_blocks = std::vector<std::int64_t>(groups_.size()),
                        .num_lcm_blocks = std::vector<std::int64_t>(groups_.size())};
  std::vector<std::int32_t> held;  // one id for every reference of the holders
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    held.clear();
    for (const std::vector<BlockTable>* tables : holders) {
      const std::span<const std::int32_t> block_ids = (*tables)[group].block_ids();
      std::copy_if(block_ids.begin(), block_ids.end(), std::back_inserter(held),
                   [](std::int32_t block_id) { return block_id != kNullBlockId; });
    }
    std::sort(held.begin(), held.end());  // the children of a parent stand together, too
    const auto group_index = static_cast<std::int32_t>(group);
    std::int32_t lcm_block = 0;
    std::int32_t num_children = 0;
    const auto note_parent = [&] {
      const bool is_whole = num_children > 0 && num_children + pool_.num_watched_only_slots(lcm_block) ==
                                                    pool_.num_occupied_slots(lcm_block);
      releasable.num_lcm_blocks[group] += is_whole ? 1 : 0;
    };
    for (auto block = held.begin(); block != held.end();) {
      const auto next = std::upper_bound(block, held.end(), *block);
      if (const std::int32_t parent = pool_.PlaceOf(group_index, *block).lcm_block; parent != lcm_block) {
        note_parent();
        lcm_block = parent;
        num_children = 0;
      }
      if (pool_.num_references(group_index, *block) == next - block) {
        ++num_children;
        ++releasable.num_blocks[group];
      }
      block = next;
    }
    note_parent();
  }
  return releasable;
}

// Blocks by group that must come from the pool. Hits that are held already count as there.
std::vector<std::int64_t> CacheCoordinator::NumMissingFor(std::span<const GroupDemand> demands) const {
  std::vector<std::int64_t> num_missing;
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    const GroupDemand& demand = demands[group];
    num_missing.push_back(
        groups_[group]->is_closed()
            ? groups_[group]->geometry.PlanAcquire(0, std::get<DenseGrowth>(demand.extent)).num_blocks
            : reserve_.NumMissing(static_cast<std::int32_t>(group), demand.num_promised_blocks));
  }
  return num_missing;
}

std::optional<Admission> CacheCoordinator::AdmitNext(std::span<BlockTable> tables, std::uint64_t epoch,
                                                     const RequestProgress& progress,
                                                     std::int64_t num_computed_tokens,
                                                     std::span<const Extent> extents) {
  std::vector<std::int64_t> num_missing = NumDetaching(tables, num_computed_tokens);
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    if (groups_[group]->is_closed()) {
      num_missing[group] = groups_[group]->geometry.PlanExtent(tables[group], extents[group]).num_blocks;
    }
  }
  const std::optional<std::vector<EvictionVictim>> victims = PlanEvictions(pool_, num_missing, indexes_);
  if (!victims) {
    return std::nullopt;
  }
  std::for_each(victims->begin(), victims->end(), [this](const EvictionVictim& victim) { Evict(victim); });
  Admission admission{.epoch = epoch,
                      .uses = {},
                      .reserve = {},
                      .fresh_ids = std::vector<std::vector<std::int32_t>>(groups_.size())};
  const auto grow = [&](std::size_t group) {
    const AcquirePlan plan = groups_[group]->geometry.PlanExtent(tables[group], extents[group]);
    admission.fresh_ids[group] = Acquire(tables[group], static_cast<std::int32_t>(group), plan);
  };
  const auto open = order_.begin() + static_cast<std::ptrdiff_t>(num_closed_);
  std::for_each(order_.begin(), open, grow);
  Publish(tables, epoch, progress);
  ReclaimExpired(tables, num_computed_tokens);
  std::for_each(open, order_.end(), grow);
  return admission;
}

bool CacheCoordinator::Secure(std::span<BlockTable> tables, std::int64_t num_computed_tokens,
                              std::int64_t num_tokens, std::vector<std::vector<std::int32_t>>& fresh_ids) {
  const auto closed = std::span(order_).first(num_closed_);
  std::vector<std::int64_t> num_missing;
  if (transfers_ && !transfers_->is_idle()) {
    num_missing = NumDetaching(tables, num_computed_tokens);
  }
  const bool is_detaching = std::any_of(num_missing.begin(), num_missing.end(),
                                        [](std::int64_t num_blocks) { return num_blocks > 0; });
  if (!is_detaching && std::all_of(closed.begin(), closed.end(), [&](std::size_t group) {
        return tables[group].tail_room() >= num_tokens;
      })) {
    return true;
  }
  num_missing.resize(groups_.size());
  for (const std::size_t group : closed) {
    num_missing[group] = PlanSecure(tables, group, num_tokens).num_blocks;
  }
  const std::optional<std::vector<EvictionVictim>> victims = PlanEvictions(pool_, num_missing, indexes_);
  if (!victims) {
    return false;
  }
  std::for_each(victims->begin(), victims->end(), [this](const EvictionVictim& victim) { Evict(victim); });
  for (const std::size_t group : closed) {
    groups_[group]->allocator.Acquire(tables[group], PlanSecure(tables, group, num_tokens), fresh_ids[group]);
  }
  return true;
}

bool CacheCoordinator::CouldSecure(std::span<const BlockTable> tables, std::int64_t num_tokens,
                                   const Releasable& releasable) const {
  return CouldFit(pool_, NumMissingToSecure(tables, num_tokens), indexes_, releasable);
}

AcquirePlan CacheCoordinator::PlanSecure(std::span<const BlockTable> tables, std::size_t group,
                                         std::int64_t num_tokens) const {
  return groups_[group]->geometry.PlanAcquire(tables[group].tail_room(),
                                              {.extent_tokens = 0, .reserve_tokens = num_tokens});
}

std::vector<std::int64_t> CacheCoordinator::NumMissingToSecure(std::span<const BlockTable> tables,
                                                               std::int64_t num_tokens) const {
  std::vector<std::int64_t> num_missing(groups_.size());
  for (const std::size_t group : std::span(order_).first(num_closed_)) {
    num_missing[group] = PlanSecure(tables, group, num_tokens).num_blocks;
  }
  return num_missing;
}

void CacheCoordinator::Step(std::span<BlockTable> tables, std::int64_t num_computed_tokens,
                            std::int64_t num_tokens, std::vector<std::vector<std::int32_t>>& fresh_ids) {
  if (has_open_group()) {
    ReclaimExpired(tables, num_computed_tokens);
  }
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    BlockTable& table = tables[group];
    if (table.tail_room() >= num_tokens) {
      table.SetTailRoom(table.tail_room() - num_tokens);
      continue;
    }
    Ensure(!groups_[group]->is_closed(), "a step was not secured");
    const AcquirePlan plan = groups_[group]->geometry.PlanAcquire(
        table.tail_room(), {.extent_tokens = num_tokens, .reserve_tokens = 0});
    groups_[group]->allocator.Place(table, plan,
                                    reserve_.Take(static_cast<std::int32_t>(group), plan.num_blocks,
                                                  groups_[group]->allocator.LoadsOf(table)),
                                    fresh_ids[group]);
  }
}

void CacheCoordinator::Evict(const EvictionVictim& victim) {
  const CacheEntry& entry = *victim.entry;
  if (aged_frequency_) {
    aged_frequency_->RaiseLevel(entry.use);
    if (entry.depth_tokens % prefix_granularity_ == 0) {
      aged_frequency_->RememberEnd(entry.key.digest, GrainOf(entry.depth_tokens), entry.use);
    }
  }
  groups_[static_cast<std::size_t>(victim.group)]->index.Evict(entry);
}

void CacheCoordinator::ReclaimExpired(std::span<BlockTable> tables, std::int64_t num_computed_tokens) {
  bool has_reclaimed = false;
  for (std::size_t i = num_closed_; i < order_.size(); ++i) {
    const std::size_t group = order_[i];
    has_reclaimed |= groups_[group]->allocator.ReclaimExpired(
        tables[group], groups_[group]->geometry.ExpiredBlocksAt(num_computed_tokens));
  }
  if (has_reclaimed) {
    reserve_.Settle();
  }
}

std::vector<std::int32_t> CacheCoordinator::Acquire(BlockTable& table, std::int32_t group,
                                                    const AcquirePlan& plan) {
  std::vector<std::int32_t> fresh_ids;
  const GroupAllocator& allocator = groups_[static_cast<std::size_t>(group)]->allocator;
  if (reserve_.is_bounded(group)) {
    allocator.Place(table, plan, reserve_.Take(group, plan.num_blocks, allocator.LoadsOf(table)), fresh_ids);
  } else {
    allocator.Acquire(table, plan, fresh_ids);
  }
  return fresh_ids;
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

bool CacheCoordinator::IsResident(const Digest& digest) const {
  return std::all_of(groups_.begin(), groups_.end(), [&](const std::unique_ptr<CacheGroup>& group) {
    if (group->spec.is_replayable) {
      return true;
    }
    const std::int32_t slots_per_grain = group->keys.slots_per_grain;
    for (std::int32_t slot = slots_per_grain - group->num_hit_slots_per_grain(); slot < slots_per_grain;
         ++slot) {
      if (group->index.Find(group->keys.KeyOf({&digest, 1}, slot)) == nullptr) {
        return false;
      }
    }
    return true;
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

std::uint64_t CacheCoordinator::capacity_version() const {
  std::uint64_t version = pool_.num_freed_slots();
  for (const PrefixCacheIndex* index : indexes_) {
    version += index->num_releases();
  }
  return version;
}

std::int32_t CacheCoordinator::num_cached_lcm_blocks() const {
  std::int32_t num_lcm_blocks = 0;
  for (const PrefixCacheIndex* index : indexes_) {
    num_lcm_blocks += index->num_evictable_lcm_blocks();
  }
  return num_lcm_blocks;
}

bool CacheCoordinator::CanClear() const {
  return (!transfers_ || transfers_->is_idle()) &&
         std::all_of(indexes_.begin(), indexes_.end(), [](const PrefixCacheIndex* index) {
           return index->num_evictable() == index->num_entries();
         });
}

void CacheCoordinator::Clear() {
  for (const auto& group : groups_) {
    group->index.Clear();
  }
  if (transfers_) {
    transfers_->Clear();
  }
  if (aged_frequency_) {
    aged_frequency_->Clear();
  }
}

}  // namespace pdmesh
