// BlockTable: the blocks of one request in one group, by absolute slot. Slot i never moves: what goes becomes
// a hole.
//
// The table owns its references. It knows no tokens: `tail_room` is a number the geometry computed and reads
// back.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "cache/core/cache_block_ref.h"

namespace pdmesh {

class BlockTable {
 public:
  BlockTable() = default;
  BlockTable(BlockTable&&) noexcept = default;
  BlockTable& operator=(BlockTable&& other) noexcept;
  BlockTable(const BlockTable&) = delete;
  BlockTable& operator=(const BlockTable&) = delete;
  ~BlockTable() { Clear(); }

  std::int32_t num_slots() const { return static_cast<std::int32_t>(block_ids_.size()); }
  // One id per slot, 0 for a hole. Valid until the next change of the table.
  std::span<const std::int32_t> block_ids() const { return block_ids_; }
  const CacheBlockRef& block(std::int32_t slot) const { return blocks_[static_cast<std::size_t>(slot)]; }
  std::int64_t tail_room() const { return tail_room_; }
  // Slots from the front that were given up; all of them are holes.
  std::int32_t num_reclaimed_slots() const { return num_reclaimed_slots_; }
  std::int32_t num_held_blocks() const;

  void Append(CacheBlockRef block);
  // Puts another reference in the place of a slot's block and returns what the slot held.
  CacheBlockRef Replace(std::int32_t slot, CacheBlockRef block);
  // Holds a block that is in no slot until the table is cleared.
  void Keep(CacheBlockRef block) { kept_.push_back(std::move(block)); }
  void AppendHoles(std::int64_t num_holes);
  // Turns the slots [0, num_slots) into holes, no more of them than there are. Costs what it newly gives up.
  void ReleaseFront(std::int32_t num_slots);
  void SetTailRoom(std::int64_t tail_room) { tail_room_ = tail_room; }
  // Releases from the last slot to the first, then what was kept. May be repeated.
  void Clear() noexcept;

 private:
  std::vector<CacheBlockRef> blocks_;
  std::vector<std::int32_t> block_ids_;
  std::vector<CacheBlockRef> kept_;
  std::int64_t tail_room_ = 0;
  std::int32_t num_reclaimed_slots_ = 0;
};

}  // namespace pdmesh
