#include "cache/coordinator/cache_coordinator.h"

#include <algorithm>
#include <utility>

#include "cache/coordinator/admission_planner.h"
#include "support/errors.h"

namespace pdmesh {
namespace {

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

// Holds a probe's hits so that planning cannot evict them.
class HitPins {
 public:
  HitPins(const std::vector<std::unique_ptr<CacheGroup>>& groups, const PrefixProbe& probe)
      : groups_(groups) {
    for (const auto& entries : probe.entries) {
      std::vector<CacheBlockRef>& blocks = blocks_.emplace_back();
      blocks.reserve(entries.size());
      for (const CacheEntry* entry : entries) {
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

CacheCoordinator::CacheCoordinator(std::int32_t prefix_granularity, std::int32_t num_lcm_blocks,
                                   std::vector<CacheGroupSpec> specs, EvictionPolicy eviction_policy)
    : pool_(num_lcm_blocks, PackingOf(specs)), prefix_granularity_(prefix_granularity) {
  Ensure(!specs.empty(), "a coordinator needs at least one group");
  for (CacheGroupSpec& spec : specs) {
    const auto group = static_cast<std::int32_t>(groups_.size());
    groups_.push_back(std::make_unique<CacheGroup>(std::move(spec), prefix_granularity, pool_, group));
    indexes_.push_back(&groups_.back()->index);
  }
  if (eviction_policy == EvictionPolicy::kAgedFrequency) {
    aged_frequency_.emplace(MaxGhosts(pool_, groups_));
  }
}

PrefixProbe CacheCoordinator::ProbePrefix(std::span<const Digest> digests, std::int32_t num_grains) const {
  PrefixProbe probe;
  std::int64_t bound_grains = num_grains;
  for (const auto& group : groups_) {
    probe.entries.push_back(FullAttentionMatcher::Match(group->index, group->keys, digests, bound_grains));
    bound_grains = static_cast<std::int64_t>(probe.entries.back().size()) / group->keys.slots_per_grain;
  }
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    probe.entries[group].resize(
        static_cast<std::size_t>(bound_grains * groups_[group]->keys.slots_per_grain));
  }
  probe.hit_tokens = bound_grains * prefix_granularity_;
  probe.digests = digests.first(static_cast<std::size_t>(num_grains));
  return probe;
}

std::optional<Admission> CacheCoordinator::AdmitFirst(std::span<BlockTable> tables, const PrefixProbe& probe,
                                                      const DenseGrowth& demand) {
  HitPins pins(groups_, probe);
  const std::optional<GrowthPlan> plan = PlanGrowth(tables, demand);
  if (!plan) {
    pins.Abandon();
    return std::nullopt;
  }
  const std::uint64_t epoch = ++last_epoch_;
  const PromptUses uses = UsesFor(probe);
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    groups_[group]->allocator.Claim(tables[group], pins.Take(group));
    for (const CacheEntry* entry : probe.entries[group]) {
      groups_[group]->index.Touch(*entry, epoch, UseAt(uses, entry->depth_tokens));
    }
  }
  Evict(*plan);
  return Admission{.epoch = epoch, .uses = uses, .fresh_ids = Acquire(tables, *plan)};
}

// What the policy makes of an admission's hits and ghosts. REQUIRES: nothing was touched or evicted for it
// yet.
PromptUses CacheCoordinator::UsesFor(const PrefixProbe& probe) const {
  if (!aged_frequency_) {
    return {};
  }
  std::vector<std::uint8_t> cached_uses(static_cast<std::size_t>(probe.hit_tokens / prefix_granularity_));
  for (const auto& entries : probe.entries) {
    for (const CacheEntry* entry : entries) {
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

bool CacheCoordinator::CouldAdmit(const DenseGrowth& demand) const {
  std::vector<std::int64_t> num_fresh_blocks;
  for (const auto& group : groups_) {
    num_fresh_blocks.push_back(group->geometry.PlanAcquire(0, demand).num_blocks);
  }
  return CouldFit(pool_, num_fresh_blocks, indexes_);
}

std::optional<Admission> CacheCoordinator::AdmitNext(std::span<BlockTable> tables, std::uint64_t epoch,
                                                     const RequestProgress& progress,
                                                     const DenseGrowth& demand) {
  const std::optional<GrowthPlan> plan = PlanGrowth(tables, demand);
  if (!plan) {
    return std::nullopt;
  }
  Evict(*plan);
  Publish(tables, epoch, progress);
  return Admission{.epoch = epoch, .uses = {}, .fresh_ids = Acquire(tables, *plan)};
}

std::optional<CacheCoordinator::GrowthPlan> CacheCoordinator::PlanGrowth(std::span<const BlockTable> tables,
                                                                         const DenseGrowth& demand) const {
  GrowthPlan plan;
  std::vector<std::int64_t> num_fresh_blocks;
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    plan.acquires.push_back(groups_[group]->geometry.PlanAcquire(tables[group].tail_room(), demand));
    num_fresh_blocks.push_back(plan.acquires.back().num_blocks);
  }
  std::optional<std::vector<EvictionVictim>> victims = PlanEvictions(pool_, num_fresh_blocks, indexes_);
  if (!victims) {
    return std::nullopt;
  }
  plan.victims = std::move(*victims);
  return plan;
}

void CacheCoordinator::Evict(const GrowthPlan& plan) {
  for (const EvictionVictim& victim : plan.victims) {
    if (aged_frequency_) {
      aged_frequency_->RaiseLevel(victim.entry->use);
      if (victim.entry->depth_tokens % prefix_granularity_ == 0) {
        aged_frequency_->RememberEnd(victim.entry->key.digest, GrainOf(victim.entry->depth_tokens),
                                     victim.entry->use);
      }
    }
    groups_[static_cast<std::size_t>(victim.group)]->index.Evict(*victim.entry);
  }
}

std::vector<std::vector<std::int32_t>> CacheCoordinator::Acquire(std::span<BlockTable> tables,
                                                                 const GrowthPlan& plan) {
  std::vector<std::vector<std::int32_t>> fresh_ids;
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    fresh_ids.push_back(groups_[group]->allocator.Acquire(tables[group], plan.acquires[group]));
  }
  return fresh_ids;
}

void CacheCoordinator::ConsumeReserve(std::span<BlockTable> tables, std::int64_t num_tokens) const {
  for (BlockTable& table : tables) {
    Ensure(table.tail_room() >= num_tokens, "a request outgrew what its admission reserved");
    table.SetTailRoom(table.tail_room() - num_tokens);
  }
}

bool CacheCoordinator::HasGrain(std::span<const Digest> digests, std::int32_t grain) const {
  return std::all_of(groups_.begin(), groups_.end(), [&](const auto& group) {
    const std::int64_t first_slot = std::int64_t{grain} * group->keys.slots_per_grain;
    for (std::int64_t slot = first_slot; slot < first_slot + group->keys.slots_per_grain; ++slot) {
      if (group->index.Find(group->keys.KeyOf(digests, slot)) == nullptr) {
        return false;
      }
    }
    return true;
  });
}

void CacheCoordinator::Publish(std::span<BlockTable> tables, std::uint64_t epoch,
                               const RequestProgress& progress) {
  ForgetGhosts(progress);
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    CacheGroup& target = *groups_[group];
    const std::int32_t first_slot = progress.first_grain * target.keys.slots_per_grain;
    const std::int32_t end_slot = progress.end_grain * target.keys.slots_per_grain;
    for (std::int32_t slot = first_slot; slot < end_slot; ++slot) {
      const std::int64_t depth_tokens = (std::int64_t{slot} + 1) * target.spec.block_granularity;
      const CacheBlockRef& own = tables[group].block(slot);
      const BlockUse use = progress.uses == nullptr ? BlockUse{} : UseAt(*progress.uses, depth_tokens);
      const CacheBlockRef& canonical =
          target.index.Register(target.keys.KeyOf(progress.digests, slot), own, epoch, depth_tokens, use);
      if (canonical.block_id() != own.block_id()) {
        target.allocator.Repoint(tables[group], slot, canonical, progress.keeps_duplicates);
      }
    }
  }
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
  return std::all_of(indexes_.begin(), indexes_.end(), [](const PrefixCacheIndex* index) {
    return index->num_evictable() == index->num_entries();
  });
}

void CacheCoordinator::Clear() {
  for (const auto& group : groups_) {
    group->index.Clear();
  }
  if (aged_frequency_) {
    aged_frequency_->Clear();
  }
}

}  // namespace pdmesh
