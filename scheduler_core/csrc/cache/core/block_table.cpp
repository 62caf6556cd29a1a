#include "cache/core/block_table.h"

#include <algorithm>
#include <utility>

namespace pdmesh {

BlockTable& BlockTable::operator=(BlockTable&& other) noexcept {
  if (this != &other) {
    Clear();
    blocks_ = std::exchange(other.blocks_, {});
    block_ids_ = std::exchange(other.block_ids_, {});
    kept_ = std::exchange(other.kept_, {});
    tail_room_ = std::exchange(other.tail_room_, 0);
    num_reclaimed_slots_ = std::exchange(other.num_reclaimed_slots_, 0);
  }
  return *this;
}

void BlockTable::Append(CacheBlockRef block) {
  block_ids_.push_back(block.block_id());
  blocks_.push_back(std::move(block));
}

CacheBlockRef BlockTable::Replace(std::int32_t slot, CacheBlockRef block) {
  block_ids_[static_cast<std::size_t>(slot)] = block.block_id();
  return std::exchange(blocks_[static_cast<std::size_t>(slot)], std::move(block));
}

std::int32_t BlockTable::num_held_blocks() const {
  return num_slots() -
         static_cast<std::int32_t>(std::count(block_ids_.begin(), block_ids_.end(), kNullBlockId));
}

void BlockTable::AppendHoles(std::int64_t num_holes) {
  blocks_.resize(blocks_.size() + static_cast<std::size_t>(num_holes));
  block_ids_.resize(blocks_.size(), kNullBlockId);
}

void BlockTable::ReleaseFront(std::int32_t num_slots) {
  const std::int32_t end_slot = std::min(num_slots, this->num_slots());
  for (std::int32_t slot = end_slot - 1; slot >= num_reclaimed_slots_; --slot) {
    Replace(slot, CacheBlockRef());
  }
  num_reclaimed_slots_ = std::max(num_reclaimed_slots_, end_slot);
}

void BlockTable::Clear() noexcept {
  while (!blocks_.empty()) {
    blocks_.pop_back();
  }
  block_ids_.clear();
  kept_.clear();
  tail_room_ = 0;
  num_reclaimed_slots_ = 0;
}

}  // namespace pdmesh
