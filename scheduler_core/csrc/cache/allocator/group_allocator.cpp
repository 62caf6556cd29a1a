#include "cache/allocator/group_allocator.h"

#include <utility>

#include "support/errors.h"

namespace pdmesh {

void GroupAllocator::Claim(BlockTable& table, std::vector<CacheBlockRef> hits) const {
  Ensure(table.num_slots() == 0, "prefix hits were claimed into a table that is not empty");
  for (CacheBlockRef& hit : hits) {
    table.Append(std::move(hit));
  }
}

std::vector<std::int32_t> GroupAllocator::Acquire(BlockTable& table, const AcquirePlan& plan) const {
  std::optional<std::vector<CacheBlockRef>> blocks = pool_.Acquire(group_, plan.num_blocks);
  Ensure(blocks.has_value(), "the pool refused blocks that an admission had planned");
  std::vector<std::int32_t> fresh_ids;
  fresh_ids.reserve(blocks->size());
  for (CacheBlockRef& block : *blocks) {
    fresh_ids.push_back(block.block_id());
    table.Append(std::move(block));
  }
  table.SetTailRoom(plan.tail_room);
  return fresh_ids;
}

void GroupAllocator::Repoint(BlockTable& table, std::int32_t slot, const CacheBlockRef& canonical,
                             bool keeps_duplicate) const {
  CacheBlockRef duplicate = table.Replace(slot, canonical);
  if (keeps_duplicate) {
    table.Keep(std::move(duplicate));
  }
}

}  // namespace pdmesh
