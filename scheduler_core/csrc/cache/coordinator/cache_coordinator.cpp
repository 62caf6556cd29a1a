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
