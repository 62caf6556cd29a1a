#include "cache/core/block_table.h"

#include <utility>

namespace pdmesh {

BlockTable& BlockTable::operator=(BlockTable&& other) noexcept {
  if (this != &other) {
    Clear();
    blocks_ = std::exchange(other.blocks_, {});
    block_ids_ = std::exchange(other.block_ids_, {});
    kept_ = std::exchange(other.kept_, {});
    tail_room_ = std::exchange(other.tail_room_, 0);
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

void BlockTable::ReleaseFront(std::int32_t num_slots) {
  for (std::int32_t slot = num_slots - 1; slot >= 0; --slot) {
    Replace(slot, CacheBlockRef());
  }
}

void BlockTable::Clear() noexcept {
  while (!blocks_.empty()) {
    blocks_.pop_back();
  }
  block_ids_.clear();
  kept_.clear();
  tail_room_ = 0;
}

}  // namespace pdmesh
