#include "cache/allocator/group_allocator.h"

#include <utility>

#include "support/errors.h"

namespace pdmesh {

void GroupAllocator::Claim(BlockTable& table, std::int64_t num_holes, std::vector<CacheBlockRef> hits) const {
  Ensure(table.num_slots() == 0, "prefix hits were claimed into a table that is not empty");
  table.AppendHoles(num_holes);
  table.ReleaseFront(static_cast<std::int32_t>(num_holes));
  for (CacheBlockRef& hit : hits) {
    table.Append(std::move(hit));
  }
}

void GroupAllocator::Extend(BlockTable& table, std::vector<CacheBlockRef> blocks) const {
  for (CacheBlockRef& block : blocks) {
    table.Append(std::move(block));
  }
}

void GroupAllocator::Acquire(BlockTable& table, const AcquirePlan& plan,
                             std::vector<std::int32_t>& fresh_ids) const {
  std::optional<std::vector<CacheBlockRef>> blocks = pool_.Acquire(group_, plan.num_blocks, LoadsOf(table));
  Ensure(blocks.has_value(), "the pool refused blocks that an admission had planned");
  Place(table, plan, std::move(*blocks), fresh_ids);
}

void GroupAllocator::Place(BlockTable& table, const AcquirePlan& plan, std::vector<CacheBlockRef> blocks,
                           std::vector<std::int32_t>& fresh_ids) const {
  table.AppendHoles(plan.num_holes);
  for (CacheBlockRef& block : blocks) {
    fresh_ids.push_back(block.block_id());
    table.Append(std::move(block));
  }
  table.SetTailRoom(plan.tail_room);
}

std::vector<std::int64_t> GroupAllocator::LoadsOf(const BlockTable& table) const {
  std::vector<std::int64_t> loads(static_cast<std::size_t>(pool_.shard_count(group_)));
  if (loads.size() > 1) {
    for (const std::int32_t block_id : table.block_ids()) {
      if (block_id != kNullBlockId) {
        ++loads[static_cast<std::size_t>(pool_.BucketOf(group_, block_id))];
      }
    }
  }
  return loads;
}

void GroupAllocator::Repoint(BlockTable& table, std::int32_t slot, const CacheBlockRef& canonical,
                             bool keeps_duplicate) const {
  CacheBlockRef duplicate = table.Replace(slot, canonical);
  if (keeps_duplicate) {
    table.Keep(std::move(duplicate));
  }
}

bool GroupAllocator::ReclaimExpired(BlockTable& table, std::int64_t num_slots) const {
  const std::int32_t num_before = table.num_reclaimed_slots();
  if (num_slots <= num_before) {
    return false;
  }
  table.ReleaseFront(static_cast<std::int32_t>(num_slots));
  return table.num_reclaimed_slots() > num_before;
}

}  // namespace pdmesh
