// What a failed allocation leaves behind. A program of its own, because it replaces the global operator new.
#include <gtest/gtest.h>

#include <cstdlib>
#include <new>
#include <optional>

#include "cache/core/block_pool.h"
#include "cache/core/cache_block_ref.h"

namespace {

std::optional<int> num_allocations_left;  // none: all succeed

}  // namespace

void* operator new(std::size_t size) {
  if (num_allocations_left && (*num_allocations_left)-- <= 0) {
    throw std::bad_alloc();
  }
  if (void* memory = std::malloc(size > 0 ? size : 1)) {
    return memory;
  }
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}

namespace pdmesh {
namespace {

using Refs = std::vector<CacheBlockRef>;

struct View {
  std::int32_t num_empty;
  std::int64_t num_free_slots;
  std::int64_t num_taken;
  std::uint64_t num_freed_slots;

  bool operator==(const View&) const = default;
};

View ViewOf(const BlockPool& pool) {
  return {.num_empty = pool.num_empty_lcm_blocks(),
          .num_free_slots = pool.num_free_slots(0),
          .num_taken = pool.num_taken(0),
          .num_freed_slots = pool.num_freed_slots()};
}

std::vector<std::int32_t> IdsOf(const Refs& refs) {
  std::vector<std::int32_t> ids;
  for (const CacheBlockRef& ref : refs) {
    ids.push_back(ref.block_id());
  }
  return ids;
}

// A pool in which parents are full, partly full and empty, and the blocks that are held of it.
struct UsedPool {
  explicit UsedPool(std::int32_t shard_count) : pool(8, {4}, {shard_count}), held(*pool.Acquire(0, 14)) {
    held.erase(held.begin() + 5);
    held.erase(held.begin() + 1);
  }

  BlockPool pool;
  Refs held;
};

// behaviour: B3
TEST(FailedAllocation, LeavesThePoolAsItWas) {
  for (const std::int32_t shard_count : {1, 2}) {
    for (const std::int64_t num_blocks : {1, 3, 4, 5, 17, 20}) {
      UsedPool untouched(shard_count);
      const std::vector<std::int32_t> expected = IdsOf(*untouched.pool.Acquire(0, num_blocks));
      int num_failures = 0;
      for (bool has_failed = true; has_failed; ++num_failures) {
        UsedPool used(shard_count);
        const View before = ViewOf(used.pool);
        num_allocations_left = num_failures;
        std::optional<Refs> blocks;
        try {
          blocks = used.pool.Acquire(0, num_blocks, std::vector<std::int64_t>());
          has_failed = false;
        } catch (const std::bad_alloc&) {
        }
        num_allocations_left.reset();
        if (has_failed) {
          ASSERT_EQ(ViewOf(used.pool), before);
          blocks = used.pool.Acquire(0, num_blocks);
        }
        ASSERT_EQ(IdsOf(*blocks), expected) << num_failures;
      }
      EXPECT_GT(num_failures, 1) << "no allocation has failed";
    }
  }
}

// behaviour: B3
TEST(FailedAllocation, DoesNotHappenInARelease) {
  UsedPool used(2);
  num_allocations_left = 0;
  while (!used.held.empty()) {
    used.held.erase(used.held.begin() + static_cast<std::ptrdiff_t>(used.held.size() / 2));
  }
  num_allocations_left.reset();
  EXPECT_EQ(used.pool.num_empty_lcm_blocks(), 8);
}

}  // namespace
}  // namespace pdmesh
