#include "cache/core/block_pool.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "cache/core/cache_block_ref.h"
#include "support/errors.h"
#include "support/int_math.h"

namespace pdmesh {

BlockPool::BlockPool(std::int32_t num_lcm_blocks, std::vector<std::int32_t> cache_blocks_per_lcm_block,
                     std::vector<std::int32_t> shard_counts)
    : num_lcm_blocks_(num_lcm_blocks) {
  shard_counts.resize(cache_blocks_per_lcm_block.size(), 1);
  if (num_lcm_blocks < 1) {
    throw std::invalid_argument("num_lcm_blocks must be at least 1, got " + std::to_string(num_lcm_blocks));
  }
  for (const std::int32_t packing : cache_blocks_per_lcm_block) {
    if (packing < 1) {
      throw std::invalid_argument("cache_blocks_per_lcm_block must be at least 1, got " +
                                  std::to_string(packing));
    }
    max_packing_ = std::max(max_packing_, packing);
    const std::int32_t shard_count = shard_counts[groups_.size()];
    if (shard_count < 1 || packing % shard_count != 0) {
      throw std::invalid_argument("shard_count " + std::to_string(shard_count) +
                                  " must divide cache_blocks_per_lcm_block " + std::to_string(packing));
    }
    max_shard_count_ = std::max(max_shard_count_, Index(shard_count));
    GroupPlacement& placement = groups_.emplace_back();
    placement.packing = packing;
    placement.partial_parents.resize(Index(shard_count));
  }
  const std::int64_t num_children = (std::int64_t{num_lcm_blocks} + 1) * max_packing_;
  if (num_children > std::numeric_limits<std::int32_t>::max()) {
    throw std::invalid_argument("num_lcm_blocks * cache_blocks_per_lcm_block exceeds int32 block ids");
  }
  parents_.resize(Index(num_lcm_blocks) + 1);
  references_.resize(static_cast<std::size_t>(num_children));
  num_standing_.resize(static_cast<std::size_t>(num_children));
  num_pins_.resize(static_cast<std::size_t>(num_children));
  lowest_free_slots_.resize(parents_.size() * max_shard_count_);
  empty_ring_.resize(Index(num_lcm_blocks));
  for (std::int32_t lcm_block = 1; lcm_block <= num_lcm_blocks; ++lcm_block) {
    PushEmpty(lcm_block);
  }
}

BlockPool::~BlockPool() {
  Ensure(num_taken_ == 0, "a BlockPool was destroyed while references to its blocks live");
}

BlockPlace BlockPool::PlaceOf(std::int32_t group, std::int32_t block_id) const {
  Ensure(block_id >= 1 && block_id <= num_blocks(group), "a block id lies outside its group");
  const std::int32_t packing = cache_blocks_per_lcm_block(group);
  return {.lcm_block = (block_id - 1) / packing + 1, .slot = (block_id - 1) % packing};
}

bool BlockPool::CanAcquire(std::int32_t group, std::int64_t num_blocks) const {
  const GroupPlacement& placement = groups_[Index(group)];
  return placement.num_free_slots + std::int64_t{num_empty_} * placement.packing >= num_blocks;
}

std::optional<std::vector<CacheBlockRef>> BlockPool::Acquire(std::int32_t group, std::int64_t num_blocks,
                                                             std::vector<std::int64_t> loads) {
  if (!CanAcquire(group, num_blocks)) {
    return std::nullopt;
  }
  loads.resize(Index(shard_count(group)));
  std::vector<CacheBlockRef> blocks;
  blocks.reserve(static_cast<std::size_t>(num_blocks));
  const GroupPlacement& placement = groups_[Index(group)];
  SecurePlaces(group,
               CeilDiv(std::max<std::int64_t>(0, num_blocks - placement.num_free_slots), placement.packing));
  for (std::int64_t i = 0; i < num_blocks; ++i) {
    const std::size_t bucket = ChooseBucket(group, loads);
    blocks.push_back(Occupy(group, bucket));
    ++loads[bucket];
  }
  return blocks;
}

CacheBlockRef BlockPool::AcquireIn(std::int32_t group, std::int32_t bucket) {
  if (groups_[Index(group)].partial_parents[Index(bucket)].empty() && num_empty_ == 0) {
    return {};
  }
  return Occupy(group, Index(bucket));
}

std::size_t BlockPool::ChooseBucket(std::int32_t group, const std::vector<std::int64_t>& loads) const {
  const GroupPlacement& placement = groups_[Index(group)];
  if (placement.num_free_slots == 0) {
    return static_cast<std::size_t>(std::min_element(loads.begin(), loads.end()) - loads.begin());
  }
  std::size_t bucket = 0;
  while (placement.partial_parents[bucket].empty()) {
    ++bucket;
  }
  for (std::size_t other = bucket + 1; other < loads.size(); ++other) {
    if (loads[other] < loads[bucket] && !placement.partial_parents[other].empty()) {
      bucket = other;
    }
  }
  return bucket;
}

CacheBlockRef BlockPool::Occupy(std::int32_t group, std::size_t bucket) {
  GroupPlacement& placement = groups_[Index(group)];
  std::int32_t lcm_block;
  if (placement.partial_parents[bucket].empty()) {
    lcm_block = BindEmptyParent(group);
  } else {
    lcm_block = placement.partial_parents[bucket].begin()->second;
    LeavePartial(placement, lcm_block);
  }
  Parent& parent = parents_[Index(lcm_block)];
  std::int32_t& lowest_free_slot = LowestFreeSlot(lcm_block, bucket);
  const std::int32_t slot = lowest_free_slot;
  const std::size_t child = ChildIndex(lcm_block, slot);
  references_[child] = 1;
  const auto stride = static_cast<std::int32_t>(placement.partial_parents.size());
  do {
    lowest_free_slot += stride;
  } while (lowest_free_slot < placement.packing && references_[ChildIndex(lcm_block, lowest_free_slot)] > 0);
  placement.num_watched_only_lcm_blocks -= parent.IsWatchedOnly() ? 1 : 0;
  if (++parent.num_occupied < placement.packing) {
    EnterPartial(placement, lcm_block);
  }
  --placement.num_free_slots;
  ++placement.num_taken;
  ++num_taken_;
  return CacheBlockRef(this, static_cast<std::int32_t>(child),
                       1 + (lcm_block - 1) * placement.packing + slot);
}

void BlockPool::EnterPartial(GroupPlacement& placement, std::int32_t lcm_block) noexcept {
  for (std::size_t bucket = 0; bucket < placement.partial_parents.size(); ++bucket) {
    if (LowestFreeSlot(lcm_block, bucket) < placement.packing) {
      PartialParents::node_type place = std::move(spare_places_.back());
      spare_places_.pop_back();
      place.value() = {-parents_[Index(lcm_block)].num_occupied, lcm_block};
      placement.partial_parents[bucket].insert(std::move(place));
    }
  }
}

void BlockPool::LeavePartial(GroupPlacement& placement, std::int32_t lcm_block) noexcept {
  for (std::size_t bucket = 0; bucket < placement.partial_parents.size(); ++bucket) {
    if (LowestFreeSlot(lcm_block, bucket) < placement.packing) {
      spare_places_.push_back(
          placement.partial_parents[bucket].extract({-parents_[Index(lcm_block)].num_occupied, lcm_block}));
    }
  }
}

void BlockPool::SecurePlaces(std::int32_t group, std::int64_t num_parents) {
  const auto num_needed = static_cast<std::size_t>(num_parents) * Index(shard_count(group));
  while (num_free_places_ < num_needed) {
    if (spare_places_.capacity() <= num_places_) {
      spare_places_.reserve(2 * num_places_ + 16);  // room for all, so that no release allocates
    }
    PartialParents maker;
    maker.emplace(0, 0);
    spare_places_.push_back(maker.extract(maker.begin()));
    ++num_places_;
    ++num_free_places_;
  }
}

std::int32_t BlockPool::BindEmptyParent(std::int32_t group) {
  SecurePlaces(group, 1);
  num_free_places_ -= Index(shard_count(group));
  const std::int32_t lcm_block = PopEmpty();
  parents_[Index(lcm_block)].group = group;
  for (std::size_t bucket = 0; bucket < groups_[Index(group)].partial_parents.size(); ++bucket) {
    LowestFreeSlot(lcm_block, bucket) = static_cast<std::int32_t>(bucket);
  }
  groups_[Index(group)].num_free_slots += groups_[Index(group)].packing;
  return lcm_block;
}

void BlockPool::Vacate(std::int32_t lcm_block, std::int32_t slot) noexcept {
  Parent& parent = parents_[Index(lcm_block)];
  GroupPlacement& placement = groups_[Index(parent.group)];
  Ensure(num_standing_[ChildIndex(lcm_block, slot)] == 0, "a watched or pinned block was freed");
  if (parent.num_occupied < placement.packing) {
    LeavePartial(placement, lcm_block);
  }
  const std::size_t bucket = Index(slot) % placement.partial_parents.size();
  LowestFreeSlot(lcm_block, bucket) = std::min(LowestFreeSlot(lcm_block, bucket), slot);
  --parent.num_occupied;
  --placement.num_taken;
  --num_taken_;
  ++num_freed_slots_;
  if (parent.num_occupied == 0) {
    placement.num_free_slots -= placement.packing - 1;
    num_free_places_ += placement.partial_parents.size();
    parent.group = -1;
    PushEmpty(lcm_block);
    return;
  }
  ++placement.num_free_slots;
  placement.num_watched_only_lcm_blocks += parent.IsWatchedOnly() ? 1 : 0;
  EnterPartial(placement, lcm_block);
}

void BlockPool::Release(std::int32_t child, std::int32_t block_id) noexcept {
  std::int32_t& references = references_[Index(child)];
  Ensure(references > 0, "a free cache block was released");
  --references;
  if (references == 0) {
    Vacate(child / max_packing_, child % max_packing_);
  } else if (references == num_standing_[Index(child)]) {
    ReportIdle(child, block_id);
  }
}

void BlockPool::ReportIdle(std::int32_t child, std::int32_t block_id) noexcept {
  if (num_pins_[Index(child)] > 0) {
    ++PlacementOf(child).num_pinned_only;
    return;
  }
  AddWatchedOnlyChild(child, 1);
  PlacementOf(child).observer->OnSoleOwner(block_id);
}

void BlockPool::ReportUsed(std::int32_t child, std::int32_t block_id) noexcept {
  if (num_pins_[Index(child)] > 0) {
    --PlacementOf(child).num_pinned_only;
    return;
  }
  AddWatchedOnlyChild(child, -1);
  PlacementOf(child).observer->OnShared(block_id);
}

void BlockPool::AddWatchedOnlyChild(std::int32_t child, std::int32_t change) noexcept {
  Parent& parent = ParentOf(child);
  std::int32_t& num_lcm_blocks = groups_[Index(parent.group)].num_watched_only_lcm_blocks;
  num_lcm_blocks -= parent.IsWatchedOnly() ? 1 : 0;
  parent.num_watched_only += change;
  num_lcm_blocks += parent.IsWatchedOnly() ? 1 : 0;
}

void BlockPool::SetObserver(std::int32_t group, SharingObserver* observer) {
  groups_[Index(group)].observer = observer;
}

void BlockPool::Watch(const CacheBlockRef& block) {
  Ensure(block.pool_ == this && PlacementOf(block.child_).observer != nullptr,
         "a block was watched without an observer");
  ChangeStanding(block, 1, 0);
}

void BlockPool::Unwatch(const CacheBlockRef& block) {
  ChangeStanding(block, -1, 0);
}

void BlockPool::Pin(const CacheBlockRef& block) {
  Ensure(block.pool_ == this, "a block of another pool was pinned");
  ChangeStanding(block, 0, 1);
}

void BlockPool::Unpin(const CacheBlockRef& block) noexcept {
  ChangeStanding(block, 0, -1);
}

void BlockPool::ChangeStanding(const CacheBlockRef& block, std::int32_t watch_change,
                               std::int32_t pin_change) noexcept {
  const std::int32_t child = block.child_;
  if (IsIdle(child)) {
    ReportUsed(child, block.block_id());
  }
  num_standing_[Index(child)] =
      static_cast<std::uint8_t>(num_standing_[Index(child)] + watch_change + pin_change);
  num_pins_[Index(child)] = static_cast<std::uint8_t>(num_pins_[Index(child)] + pin_change);
  PlacementOf(child).num_pins += pin_change;
  if (IsIdle(child)) {
    ReportIdle(child, block.block_id());
  }
}

bool BlockPool::IsPinnedBehind(const CacheBlockRef& block) const {
  return block && num_pins_[Index(block.child_)] > 0 &&
         references_[Index(block.child_)] == num_standing_[Index(block.child_)] + 1;
}

void BlockPool::PushEmpty(std::int32_t lcm_block) noexcept {
  empty_ring_[(empty_head_ + Index(num_empty_)) % empty_ring_.size()] = lcm_block;
  ++num_empty_;
}

std::int32_t BlockPool::PopEmpty() noexcept {
  const std::int32_t lcm_block = empty_ring_[empty_head_];
  empty_head_ = (empty_head_ + 1) % empty_ring_.size();
  --num_empty_;
  return lcm_block;
}

}  // namespace pdmesh
