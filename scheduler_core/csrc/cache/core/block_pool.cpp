#include "cache/core/block_pool.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "cache/core/cache_block_ref.h"
#include "support/errors.h"
#include "support/int_math.h"

namespace pdmesh {

BlockPool::BlockPool(std::int32_t num_lcm_blocks, std::vector<std::int32_t> cache_blocks_per_lcm_block)
    : num_lcm_blocks_(num_lcm_blocks) {
  if (num_lcm_blocks < 1) {
    throw std::invalid_argument("num_lcm_blocks must be at least 1, got " + std::to_string(num_lcm_blocks));
  }
  for (const std::int32_t packing : cache_blocks_per_lcm_block) {
    if (packing < 1) {
      throw std::invalid_argument("cache_blocks_per_lcm_block must be at least 1, got " +
                                  std::to_string(packing));
    }
    max_packing_ = std::max(max_packing_, packing);
    groups_.emplace_back().packing = packing;
  }
  const std::int64_t num_children = (std::int64_t{num_lcm_blocks} + 1) * max_packing_;
  if (num_children > std::numeric_limits<std::int32_t>::max()) {
    throw std::invalid_argument("num_lcm_blocks * cache_blocks_per_lcm_block exceeds int32 block ids");
  }
  parents_.resize(Index(num_lcm_blocks) + 1);
  references_.resize(static_cast<std::size_t>(num_children));
  watched_.resize(static_cast<std::size_t>(num_children));
  empty_ring_.resize(Index(num_lcm_blocks));
  for (std::int32_t lcm_block = 1; lcm_block <= num_lcm_blocks; ++lcm_block) {
    PushEmpty(lcm_block);
  }
}

BlockPool::~BlockPool() {
  Ensure(num_taken_ == 0, "a BlockPool was destroyed while references to its blocks live");
}

BlockPlace BlockPool::PlaceOf(std::int32_t group, std::int32_t block_id) const {
  const std::int32_t packing = cache_blocks_per_lcm_block(group);
  return {.lcm_block = (block_id - 1) / packing + 1, .slot = (block_id - 1) % packing};
}

bool BlockPool::CanAcquire(std::int32_t group, std::int64_t num_blocks) const {
  const GroupPlacement& placement = groups_[Index(group)];
  return placement.num_free_slots + std::int64_t{num_empty_} * placement.packing >= num_blocks;
}

std::optional<std::vector<CacheBlockRef>> BlockPool::Acquire(std::int32_t group, std::int64_t num_blocks) {
  if (!CanAcquire(group, num_blocks)) {
    return std::nullopt;
  }
  std::vector<CacheBlockRef> blocks;
  blocks.reserve(static_cast<std::size_t>(num_blocks));
  for (std::int64_t i = 0; i < num_blocks; ++i) {
    blocks.push_back(Occupy(group));
  }
  return blocks;
}

CacheBlockRef BlockPool::Occupy(std::int32_t group) {
  GroupPlacement& placement = groups_[Index(group)];
  std::int32_t lcm_block;
  if (placement.partial_parents.empty()) {
    lcm_block = BindEmptyParent(group);
  } else {
    lcm_block = placement.partial_parents.begin()->second;
    placement.partial_parents.erase(placement.partial_parents.begin());
  }
  Parent& parent = parents_[Index(lcm_block)];
  const std::int32_t slot = LowestFreeSlot(lcm_block);
  placement.num_watched_only_lcm_blocks -= parent.IsWatchedOnly() ? 1 : 0;
  if (++parent.num_occupied < placement.packing) {
    placement.partial_parents.emplace(-parent.num_occupied, lcm_block);
  }
  --placement.num_free_slots;
  ++placement.num_taken;
  ++num_taken_;
  const std::size_t child = ChildIndex(lcm_block, slot);
  references_[child] = 1;
  return CacheBlockRef(this, static_cast<std::int32_t>(child),
                       1 + (lcm_block - 1) * placement.packing + slot);
}

std::int32_t BlockPool::BindEmptyParent(std::int32_t group) {
  const std::int32_t lcm_block = PopEmpty();
  parents_[Index(lcm_block)].group = group;
  groups_[Index(group)].num_free_slots += groups_[Index(group)].packing;
  return lcm_block;
}

void BlockPool::Vacate(std::int32_t lcm_block, std::int32_t slot) noexcept {
  Parent& parent = parents_[Index(lcm_block)];
  GroupPlacement& placement = groups_[Index(parent.group)];
  Ensure(watched_[ChildIndex(lcm_block, slot)] == 0, "a watched block was freed");
  if (parent.num_occupied < placement.packing) {
    placement.partial_parents.erase({-parent.num_occupied, lcm_block});
  }
  --parent.num_occupied;
  --placement.num_taken;
  --num_taken_;
  ++num_freed_slots_;
  if (parent.num_occupied == 0) {
    placement.num_free_slots -= placement.packing - 1;
    parent.group = -1;
    PushEmpty(lcm_block);
    return;
  }
  ++placement.num_free_slots;
  placement.num_watched_only_lcm_blocks += parent.IsWatchedOnly() ? 1 : 0;
  placement.partial_parents.emplace(-parent.num_occupied, lcm_block);
}

void BlockPool::Release(std::int32_t child, std::int32_t block_id) noexcept {
  std::int32_t& references = references_[Index(child)];
  Ensure(references > 0, "a free cache block was released");
  --references;
  if (references == 0) {
    Vacate(child / max_packing_, child % max_packing_);
  } else if (references == 1 && watched_[Index(child)] != 0) {
    ReportSoleOwner(child, block_id);
  }
}

void BlockPool::ReportSoleOwner(std::int32_t child, std::int32_t block_id) noexcept {
  AddWatchedOnlyChild(child, 1);
  ObserverOf(child)->OnSoleOwner(block_id);
}

void BlockPool::ReportShared(std::int32_t child, std::int32_t block_id) noexcept {
  AddWatchedOnlyChild(child, -1);
  ObserverOf(child)->OnShared(block_id);
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
  Ensure(block.pool_ == this && ObserverOf(block.child_) != nullptr,
         "a block was watched without an observer");
  watched_[Index(block.child_)] = 1;
  if (references_[Index(block.child_)] == 1) {
    ReportSoleOwner(block.child_, block.block_id());
  }
}

void BlockPool::Unwatch(const CacheBlockRef& block) {
  if (references_[Index(block.child_)] == 1) {
    ReportShared(block.child_, block.block_id());
  }
  watched_[Index(block.child_)] = 0;
}

std::int32_t BlockPool::LowestFreeSlot(std::int32_t lcm_block) const {
  const std::int32_t* first = references_.data() + ChildIndex(lcm_block, 0);
  return static_cast<std::int32_t>(std::find(first, first + max_packing_, 0) - first);
}

void BlockPool::PushEmpty(std::int32_t lcm_block) {
  empty_ring_[(empty_head_ + Index(num_empty_)) % empty_ring_.size()] = lcm_block;
  ++num_empty_;
}

std::int32_t BlockPool::PopEmpty() {
  const std::int32_t lcm_block = empty_ring_[empty_head_];
  empty_head_ = (empty_head_ + 1) % empty_ring_.size();
  --num_empty_;
  return lcm_block;
}

}  // namespace pdmesh
