// GroupAllocator: physical placement of one group. There is one kind for every attention family.
//
// It moves blocks between the pool and block tables and perceives block counts only; they come from the
// geometry. It is the only one that changes a table. Owned by the coordinator; the pool outlives it.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/core/acquire_plan.h"
#include "cache/core/block_pool.h"
#include "cache/core/block_table.h"

namespace pdmesh {

class GroupAllocator {
 public:
  GroupAllocator(BlockPool& pool, std::int32_t group) : pool_(pool), group_(group) {}

  // Appends shared blocks in slot order. REQUIRES: the table is empty.
  void Claim(BlockTable& table, std::vector<CacheBlockRef> hits) const;

  // Carries out a plan and returns the ids of the fresh blocks in slot order.
  // REQUIRES: the pool can provide them (checked by the admission that made the plan).
  std::vector<std::int32_t> Acquire(BlockTable& table, const AcquirePlan& plan) const;

  // Makes a published slot refer to the canonical block of its content. The duplicate is released, or held
  // until the table is cleared.
  void Repoint(BlockTable& table, std::int32_t slot, const CacheBlockRef& canonical,
               bool keeps_duplicate) const;

 private:
  BlockPool& pool_;
  std::int32_t group_;
};

}  // namespace pdmesh
