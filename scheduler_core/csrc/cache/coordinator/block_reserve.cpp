#include "cache/coordinator/block_reserve.h"

#include <algorithm>
#include <optional>

#include "cache/coordinator/admission_planner.h"
#include "support/errors.h"

namespace pdmesh {

ReserveLease& ReserveLease::operator=(ReserveLease&& other) noexcept {
  if (this != &other) {
    Reset();
    reserve_ = std::exchange(other.reserve_, nullptr);
    num_blocks_ = std::exchange(other.num_blocks_, {});
  }
  return *this;
}

void ReserveLease::LowerTo(const std::vector<std::int64_t>& num_blocks) noexcept {
  for (std::size_t group = 0; group < num_blocks_.size(); ++group) {
    const std::int64_t lowered = std::min(num_blocks_[group], num_blocks[group]);
    reserve_->ChangePromise(group, lowered - num_blocks_[group]);
    num_blocks_[group] = lowered;
  }
  if (reserve_ != nullptr) {
    reserve_->Settle();
  }
}

void ReserveLease::Reset() noexcept {
  for (std::size_t group = 0; group < num_blocks_.size(); ++group) {
    reserve_->ChangePromise(group, -num_blocks_[group]);
  }
  num_blocks_.clear();
  if (reserve_ != nullptr) {
    std::exchange(reserve_, nullptr)->Settle();
  }
}

BlockReserve::BlockReserve(BlockPool& pool, std::vector<const PrefixCacheIndex*> indexes,
                           std::function<void(const EvictionVictim&)> evict)
    : pool_(pool), indexes_(std::move(indexes)), evict_(std::move(evict)), groups_(indexes_.size()) {
  for (std::int32_t group = 0; group < pool_.num_groups(); ++group) {
    groups_[Index(group)].kept.resize(Index(pool_.shard_count(group)));
  }
}

std::int64_t BlockReserve::NumMissing(std::int32_t group, std::int64_t num_more_promised) const {
  const Group& bounded = groups_[Index(group)];
  const std::int64_t num_held =
      pool_.num_taken(group) - indexes_[Index(group)]->num_evictable() - pool_.num_pinned_only(group);
  return bounded.is_bounded ? bounded.num_promised + num_more_promised - num_held : 0;
}

ReserveLease BlockReserve::Lease(std::vector<std::int64_t> num_blocks) {
  bool is_empty = true;
  for (std::size_t group = 0; group < num_blocks.size(); ++group) {
    ChangePromise(group, num_blocks[group]);
    is_empty = is_empty && num_blocks[group] == 0;
  }
  if (is_empty) {
    return {};
  }
  ReserveLease lease(this, std::move(num_blocks));
  Settle();
  return lease;
}

std::vector<CacheBlockRef> BlockReserve::Take(std::int32_t group, std::int64_t num_blocks,
                                              std::vector<std::int64_t> loads) {
  Group& bounded = groups_[Index(group)];
  Ensure(bounded.num_kept >= num_blocks, "a request outgrew what it was promised");
  std::vector<CacheBlockRef> blocks;
  blocks.reserve(static_cast<std::size_t>(num_blocks));
  for (std::int64_t i = 0; i < num_blocks; ++i) {
    std::size_t best = 0;
    for (std::size_t bucket = 1; bucket < loads.size(); ++bucket) {
      if (!bounded.kept[bucket].empty() && (bounded.kept[best].empty() || loads[bucket] < loads[best])) {
        best = bucket;
      }
    }
    blocks.push_back(std::move(bounded.kept[best].front()));
    bounded.kept[best].pop_front();
    --bounded.num_kept;
    ++loads[best];
  }
  return blocks;
}

CacheBlockRef BlockReserve::TakeIn(std::int32_t group, std::int32_t bucket) {
  Group& bounded = groups_[Index(group)];
  Ensure(bounded.num_kept > 0, "a request outgrew what it was promised");
  std::deque<CacheBlockRef>& kept = bounded.kept[Index(bucket)];
  if (kept.empty()) {
    CacheBlockRef block = pool_.AcquireIn(group, bucket);
    if (block) {
      DropOne(bounded);
    }
    return block;
  }
  CacheBlockRef block = std::move(kept.front());
  kept.pop_front();
  --bounded.num_kept;
  return block;
}

void BlockReserve::Settle() noexcept {
  bool is_missing = false;
  for (std::int32_t group = 0; group < pool_.num_groups(); ++group) {
    Group& bounded = groups_[Index(group)];
    std::int64_t num_missing = NumMissing(group, 0);
    for (; num_missing < 0 && bounded.num_kept > 0; ++num_missing) {
      DropOne(bounded);
    }
    is_missing = is_missing || num_missing > 0;
  }
  if (is_missing) {
    AcquireMissing();
  }
}

void BlockReserve::DropOne(Group& group) noexcept {
  const auto is_smaller = [](const auto& a, const auto& b) { return a.size() < b.size(); };
  std::max_element(group.kept.begin(), group.kept.end(), is_smaller)->pop_back();
  --group.num_kept;
}

// All groups at once: what left the tables of one group can always replace it there, but need not be of use
// to another.
void BlockReserve::AcquireMissing() {
  std::vector<std::int64_t> num_missing;
  for (std::int32_t group = 0; group < pool_.num_groups(); ++group) {
    num_missing.push_back(std::max<std::int64_t>(0, NumMissing(group, 0)));
  }
  const std::optional<std::vector<EvictionVictim>> victims = PlanEvictions(pool_, num_missing, indexes_);
  Ensure(victims.has_value(), "a promised block could not be taken back");
  for (const EvictionVictim& victim : *victims) {
    evict_(victim);
  }
  for (std::int32_t group = 0; group < pool_.num_groups(); ++group) {
    Group& bounded = groups_[Index(group)];
    std::vector<std::int64_t> loads;
    for (const std::deque<CacheBlockRef>& kept : bounded.kept) {
      loads.push_back(static_cast<std::int64_t>(kept.size()));
    }
    std::vector<CacheBlockRef> blocks =
        std::move(*pool_.Acquire(group, num_missing[Index(group)], std::move(loads)));
    for (CacheBlockRef& block : blocks) {
      const std::int32_t bucket = pool_.BucketOf(group, block.block_id());
      bounded.kept[Index(bucket)].push_back(std::move(block));
      ++bounded.num_kept;
    }
  }
}

}  // namespace pdmesh
