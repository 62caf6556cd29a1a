// BlockReserve: blocks kept for requests that were promised more than they hold at the moment.
//
// A request of a group whose blocks expire holds few of them at a time, but never the same ones. Its
// admission promises it the most it can hold at once, and the reserve keeps that promise physically: for each
// such group
//
//   blocks in tables + blocks in reserve = sum of what the live requests were promised,
//
// a block that several requests share counting once, and one that only a transfer still holds not at all: it
// comes back to the pool, not to a table. Blocks that expire unpublished, or that only the prefix
// cache still holds, leave the left side; a block is then taken back from the pool, which always works,
// because the one that left can be evicted if nothing better can. So no request that was admitted waits for a
// block, whoever shares its prefix. The exception is a block that a transfer holds when it leaves: whoever
// makes it leave sees to it first that the pool has another one.
//
// Owned by the coordinator; outlives the leases.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <utility>
#include <vector>

#include "cache/coordinator/admission_planner.h"
#include "cache/core/block_pool.h"
#include "cache/core/cache_block_ref.h"
#include "cache/prefix/prefix_index.h"

namespace pdmesh {

class BlockReserve;

// What one request was promised, by group. Given back at the end; then the request's blocks must be gone.
class ReserveLease {
 public:
  ReserveLease() = default;
  ReserveLease(ReserveLease&& other) noexcept
      : reserve_(std::exchange(other.reserve_, nullptr)), num_blocks_(std::exchange(other.num_blocks_, {})) {}
  ReserveLease& operator=(ReserveLease&& other) noexcept;
  ReserveLease(const ReserveLease&) = delete;
  ReserveLease& operator=(const ReserveLease&) = delete;
  ~ReserveLease() { Reset(); }

  const std::vector<std::int64_t>& num_blocks() const { return num_blocks_; }
  // Lowers the promise to what the request holds for good: it acquires nothing any more.
  void LowerTo(const std::vector<std::int64_t>& num_blocks) noexcept;
  void Reset() noexcept;

 private:
  friend class BlockReserve;
  ReserveLease(BlockReserve* reserve, std::vector<std::int64_t> num_blocks)
      : reserve_(reserve), num_blocks_(std::move(num_blocks)) {}

  BlockReserve* reserve_ = nullptr;
  std::vector<std::int64_t> num_blocks_;
};

class BlockReserve {
 public:
  // `evict` takes an entry out of its index, for the owner to note.
  BlockReserve(BlockPool& pool, std::vector<const PrefixCacheIndex*> indexes,
               std::function<void(const EvictionVictim&)> evict);

  // From now on blocks of the group are promised. REQUIRES: none is taken yet.
  void Bound(std::int32_t group) { groups_[Index(group)].is_bounded = true; }
  bool is_bounded(std::int32_t group) const { return groups_[Index(group)].is_bounded; }

  std::int64_t num_promised(std::int32_t group) const { return groups_[Index(group)].num_promised; }
  std::int64_t num_kept(std::int32_t group) const { return groups_[Index(group)].num_kept; }
  // Blocks of a bounded group that must be acquired for `num_more_promised` further ones. Hits that are held
  // already are not missing.
  std::int64_t NumMissing(std::int32_t group, std::int64_t num_more_promised) const;

  // Promises `num_blocks[group]`, 0 for groups that are not bounded, and acquires what is missing for it.
  // REQUIRES: it is there (planned by the admission).
  ReserveLease Lease(std::vector<std::int64_t> num_blocks);

  // Prefers buckets in which the caller holds little. REQUIRES: it stays within what it was promised.
  std::vector<CacheBlockRef> Take(std::int32_t group, std::int64_t num_blocks,
                                  std::vector<std::int64_t> loads);
  // One block in a given bucket, exchanged with the pool if the reserve has none there. Empty, with nothing
  // changed, if the pool has none there either.
  CacheBlockRef TakeIn(std::int32_t group, std::int32_t bucket);

  // Makes the equation true again after blocks left tables. Evicts if it must.
  void Settle() noexcept;

 private:
  friend class ReserveLease;

  struct Group {
    bool is_bounded = false;
    std::int64_t num_promised = 0;
    std::int64_t num_kept = 0;
    std::vector<std::deque<CacheBlockRef>> kept;  // by bucket, oldest first
  };

  static std::size_t Index(std::int32_t i) { return static_cast<std::size_t>(i); }
  void ChangePromise(std::size_t group, std::int64_t change) { groups_[group].num_promised += change; }
  void DropOne(Group& group) noexcept;
  void AcquireMissing();

  BlockPool& pool_;
  std::vector<const PrefixCacheIndex*> indexes_;  // by group
  std::function<void(const EvictionVictim&)> evict_;
  std::vector<Group> groups_;
};

}  // namespace pdmesh
