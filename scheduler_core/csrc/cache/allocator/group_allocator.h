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

  // Appends holes, then shared blocks in slot order. REQUIRES: the table is empty.
  void Claim(BlockTable& table, std::int64_t num_holes, std::vector<CacheBlockRef> hits) const;

  // Appends further blocks of the hit in slot order. REQUIRES: nothing was appended since the claim.
  void Extend(BlockTable& table, std::vector<CacheBlockRef> blocks) const;

  // Carries out a plan with blocks of the pool and appends their ids to `fresh_ids` in slot order.
  // REQUIRES: the pool can provide them (checked by the admission that made the plan).
  void Acquire(BlockTable& table, const AcquirePlan& plan, std::vector<std::int32_t>& fresh_ids) const;
  // The same with blocks that were acquired earlier. REQUIRES: as many as the plan says.
  void Place(BlockTable& table, const AcquirePlan& plan, std::vector<CacheBlockRef> blocks,
             std::vector<std::int32_t>& fresh_ids) const;

  // What the table holds in each bucket of the group, its reserve and shared blocks included. Derived, not
  // kept.
  std::vector<std::int64_t> LoadsOf(const BlockTable& table) const;

  // Makes a published slot refer to the canonical block of its content. The duplicate is released, or held
  // until the table is cleared.
  void Repoint(BlockTable& table, std::int32_t slot, const CacheBlockRef& canonical,
               bool keeps_duplicate) const;

  // Gives up the slots [0, num_slots). False if there was nothing to give up.
  bool ReclaimExpired(BlockTable& table, std::int64_t num_slots) const;

 private:
  BlockPool& pool_;
  std::int32_t group_;
};

}  // namespace pdmesh
