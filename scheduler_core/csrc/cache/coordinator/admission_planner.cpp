#include "cache/coordinator/admission_planner.h"

#include <algorithm>
#include <unordered_map>

#include "support/int_math.h"

namespace pdmesh {
namespace {

// Parents that `num_blocks` blocks take which no free slot is there for; negative counts take none.
std::int64_t NumParentsFor(std::int64_t num_blocks, std::int64_t packing) {
  return CeilDiv(std::max<std::int64_t>(0, num_blocks), packing);
}

class Shadow {
 public:
  Shadow(const BlockPool& pool, std::span<const std::int64_t> num_fresh_blocks)
      : pool_(pool), num_fresh_blocks_(num_fresh_blocks), num_empty_(pool.num_empty_lcm_blocks()) {
    for (std::int32_t group = 0; group < pool.num_groups(); ++group) {
      num_free_slots_.push_back(pool.num_free_slots(group));
    }
  }

  bool Fits() const {
    std::int64_t num_missing = 0;
    for (std::size_t group = 0; group < num_free_slots_.size(); ++group) {
      num_missing += NumParentsFor(num_fresh_blocks_[group] - num_free_slots_[group], Packing(group));
    }
    return num_missing <= num_empty_;
  }

  void Evict(const EvictionVictim& victim) {
    std::int32_t& num_occupied = OccupiedSlotsOf(victim);
    const auto group = static_cast<std::size_t>(victim.group);
    if (--num_occupied == 0) {
      ++num_empty_;
      num_free_slots_[group] -= Packing(group) - 1;
    } else {
      ++num_free_slots_[group];
    }
  }

  void Restore(const EvictionVictim& victim) {
    std::int32_t& num_occupied = OccupiedSlotsOf(victim);
    const auto group = static_cast<std::size_t>(victim.group);
    if (num_occupied++ == 0) {
      --num_empty_;
      num_free_slots_[group] += Packing(group) - 1;
    } else {
      --num_free_slots_[group];
    }
  }

 private:
  std::int64_t Packing(std::size_t group) const {
    return pool_.cache_blocks_per_lcm_block(static_cast<std::int32_t>(group));
  }

  std::int32_t& OccupiedSlotsOf(const EvictionVictim& victim) {
    const std::int32_t lcm_block = pool_.PlaceOf(victim.group, victim.entry->block.block_id()).lcm_block;
    return num_occupied_.try_emplace(lcm_block, pool_.num_occupied_slots(lcm_block)).first->second;
  }

  const BlockPool& pool_;
  std::span<const std::int64_t> num_fresh_blocks_;
  std::vector<std::int64_t> num_free_slots_;  // by group
  std::int64_t num_empty_;
  std::unordered_map<std::int32_t, std::int32_t>
      num_occupied_;  // of touched parents; looked up, never walked
};

// Reads the eviction orders of all groups as one.
class MergedCursor {
 public:
  explicit MergedCursor(std::span<const PrefixCacheIndex* const> indexes) : indexes_(indexes) {
    for (const PrefixCacheIndex* index : indexes) {
      heads_.push_back(index->eviction_order().begin());
    }
  }

  std::optional<EvictionVictim> Next() {
    std::optional<std::size_t> best;
    for (std::size_t group = 0; group < heads_.size(); ++group) {
      if (heads_[group] != indexes_[group]->eviction_order().end() &&
          (!best || RankOfHead(group) < RankOfHead(*best))) {
        best = group;
      }
    }
    if (!best) {
      return std::nullopt;
    }
    return EvictionVictim{.group = static_cast<std::int32_t>(*best), .entry = *heads_[*best]++};
  }

 private:
  EvictionRank RankOfHead(std::size_t group) const { return RankOf(**heads_[group]); }

  std::span<const PrefixCacheIndex* const> indexes_;
  std::vector<EvictionOrder::const_iterator> heads_;
};

// Walks back from the last victim and keeps every block that the demand does not need.
std::vector<EvictionVictim> WithoutNeedlessVictims(Shadow& shadow, std::vector<EvictionVictim> victims) {
  std::vector<EvictionVictim> needed;
  for (auto victim = victims.rbegin(); victim != victims.rend(); ++victim) {
    shadow.Restore(*victim);
    if (!shadow.Fits()) {
      shadow.Evict(*victim);
      needed.push_back(*victim);
    }
  }
  std::reverse(needed.begin(), needed.end());
  return needed;
}

}  // namespace

bool CouldFit(const BlockPool& pool, std::span<const std::int64_t> num_fresh_blocks,
              std::span<const PrefixCacheIndex* const> indexes, const Releasable& releasable) {
  std::int64_t num_empty = pool.num_empty_lcm_blocks();
  std::int64_t num_missing = 0;
  for (std::size_t group = 0; group < indexes.size(); ++group) {
    const auto group_index = static_cast<std::int32_t>(group);
    const std::int64_t packing = pool.cache_blocks_per_lcm_block(group_index);
    std::int64_t num_emptied = indexes[group]->num_evictable_lcm_blocks();
    std::int64_t num_freed = indexes[group]->num_evictable();
    if (!releasable.num_blocks.empty()) {
      num_emptied += releasable.num_lcm_blocks[group];
      num_freed += releasable.num_blocks[group];
    }
    const std::int64_t num_free_slots = pool.num_free_slots(group_index) + num_freed - num_emptied * packing;
    num_empty += num_emptied;
    num_missing += NumParentsFor(num_fresh_blocks[group] - num_free_slots, packing);
  }
  return num_missing <= num_empty;
}

std::optional<std::vector<EvictionVictim>> PlanEvictions(const BlockPool& pool,
                                                         std::span<const std::int64_t> num_fresh_blocks,
                                                         std::span<const PrefixCacheIndex* const> indexes) {
  Shadow shadow(pool, num_fresh_blocks);
  if (shadow.Fits()) {
    return std::vector<EvictionVictim>();
  }
  if (!CouldFit(pool, num_fresh_blocks, indexes)) {
    return std::nullopt;
  }
  std::vector<EvictionVictim> victims;
  MergedCursor candidates(indexes);
  while (!shadow.Fits()) {
    const std::optional<EvictionVictim> victim = candidates.Next();
    if (!victim) {
      return std::nullopt;
    }
    shadow.Evict(*victim);
    victims.push_back(*victim);
  }
  return WithoutNeedlessVictims(shadow, std::move(victims));
}

}  // namespace pdmesh
