// BlockPool: where the children of every group lie in the shared parents.
//
// The pool owns placement and reference counts. It knows which child slots are taken, never by whom, and not
// what they hold. Two kinds of reference stand apart from the others, because somebody has to know without a
// scan when only they are left: the one watcher of a block (the prefix index) and its pins (transfers). A
// parent (LCM block) has no group until its first child binds it and loses the group with its last child. No
// call walks the parents: free-slot counts, the order of partly filled parents and the FIFO of empty parents
// change together with every occupancy change. All memory that an acquire needs is allocated before anything
// changes, and a release needs none, so a failed allocation leaves the pool as it was.
//
// Not thread-safe. Outlives every CacheBlockRef it hands out (destroying it earlier ends the process).
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace pdmesh {

class CacheBlockRef;

inline constexpr std::int32_t kNullBlockId = 0;

// Told when a watched block of one group starts or stops being held by its watcher alone. Must not throw and
// must not acquire or release blocks of the pool while being told.
class SharingObserver {
 public:
  virtual ~SharingObserver() = default;
  virtual void OnSoleOwner(std::int32_t block_id) noexcept = 0;
  virtual void OnShared(std::int32_t block_id) noexcept = 0;
};

struct BlockPlace {
  std::int32_t lcm_block;  // 1-based; 0 is the null parent and never handed out
  std::int32_t slot;       // in [0, cache_blocks_per_lcm_block)
};

class BlockPool {
 public:
  // `cache_blocks_per_lcm_block[group]` is the packing of every group, complete and fixed for life.
  // Throws std::invalid_argument when a count is not positive or a block id would not fit int32.
  // `shard_counts[group]` owners hold the blocks of a group cyclically: block id i lies in bucket
  // (i - 1) mod shard_count. Divides the packing; empty means one everywhere.
  BlockPool(std::int32_t num_lcm_blocks, std::vector<std::int32_t> cache_blocks_per_lcm_block,
            std::vector<std::int32_t> shard_counts = {});
  ~BlockPool();
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  std::int32_t num_groups() const { return static_cast<std::int32_t>(groups_.size()); }
  std::int32_t num_lcm_blocks() const { return num_lcm_blocks_; }
  std::int32_t num_empty_lcm_blocks() const { return num_empty_; }
  // Free child slots in parents that are bound to `group`.
  std::int64_t num_free_slots(std::int32_t group) const { return groups_[Index(group)].num_free_slots; }
  std::int32_t cache_blocks_per_lcm_block(std::int32_t group) const { return groups_[Index(group)].packing; }
  // Blocks of `group` that somebody holds.
  std::int64_t num_taken(std::int32_t group) const { return groups_[Index(group)].num_taken; }
  // Pins on blocks of `group`.
  std::int64_t num_pins(std::int32_t group) const { return groups_[Index(group)].num_pins; }
  // Blocks of `group` that are held by pins and perhaps a watcher, and by nobody else.
  std::int64_t num_pinned_only(std::int32_t group) const { return groups_[Index(group)].num_pinned_only; }
  std::int32_t num_occupied_slots(std::int32_t lcm_block) const {
    return parents_[Index(lcm_block)].num_occupied;
  }

  // Parents of `group` whose every child is held by its watcher alone and not pinned.
  std::int32_t num_watched_only_lcm_blocks(std::int32_t group) const {
    return groups_[Index(group)].num_watched_only_lcm_blocks;
  }
  // Children of a parent that are held by their watcher alone.
  std::int32_t num_watched_only_slots(std::int32_t lcm_block) const {
    return parents_[Index(lcm_block)].num_watched_only;
  }
  // References to a block besides its watcher's.
  std::int32_t num_references(std::int32_t group, std::int32_t block_id) const {
    const BlockPlace place = PlaceOf(group, block_id);
    const std::size_t child = ChildIndex(place.lcm_block, place.slot);
    return references_[child] - (num_standing_[child] - num_pins_[child]);
  }
  // Child slots freed so far; never falls.
  std::uint64_t num_freed_slots() const { return num_freed_slots_; }

  // Largest block id of `group`; arenas hold this many blocks and the null block.
  std::int32_t num_blocks(std::int32_t group) const {
    return num_lcm_blocks_ * cache_blocks_per_lcm_block(group);
  }
  // REQUIRES: block_id is in [1, num_blocks(group)].
  BlockPlace PlaceOf(std::int32_t group, std::int32_t block_id) const;

  std::int32_t shard_count(std::int32_t group) const {
    return static_cast<std::int32_t>(groups_[Index(group)].partial_parents.size());
  }
  std::int32_t BucketOf(std::int32_t group, std::int32_t block_id) const {
    return (block_id - 1) % shard_count(group);
  }

  bool CanAcquire(std::int32_t group, std::int64_t num_blocks) const;

  // All or nothing: the returned references are the only owners. nullopt, with nothing changed, if they do
  // not fit. Placement: the bucket with the smallest of `loads` that has a free slot (tie: lowest), the
  // fullest partial parent there (tie: lowest id), its lowest free slot; an empty parent, oldest first, only
  // when the group has no free slot left. `loads` are what the caller holds in each bucket, empty for
  // nothing.
  std::optional<std::vector<CacheBlockRef>> Acquire(std::int32_t group, std::int64_t num_blocks,
                                                    std::vector<std::int64_t> loads = {});

  // One block in a given bucket: the fullest partial parent with a free slot there, else the oldest empty
  // parent. Empty, with nothing changed, if there is neither.
  CacheBlockRef AcquireIn(std::int32_t group, std::int32_t bucket);

  // The one observer of a group; nullptr takes it away. REQUIRES: no block of the group is watched.
  void SetObserver(std::int32_t group, SharingObserver* observer);
  // Starts or stops reporting for one held block. The watcher holds one reference of its own.
  void Watch(const CacheBlockRef& block);
  void Unwatch(const CacheBlockRef& block);

  // Marks one reference, which its holder keeps until Unpin, as a transfer's. A pinned block is not its
  // watcher's alone.
  void Pin(const CacheBlockRef& block);
  void Unpin(const CacheBlockRef& block) noexcept;
  // Whether pins, and perhaps a watcher, would be all that is left of a pinned block without this reference.
  bool IsPinnedBehind(const CacheBlockRef& block) const;

 private:
  friend class CacheBlockRef;

  struct Parent {
    std::int32_t group = -1;
    std::int32_t num_occupied = 0;
    std::int32_t num_watched_only = 0;  // children held by their watcher alone and not pinned

    bool IsWatchedOnly() const { return num_occupied > 0 && num_watched_only == num_occupied; }
  };
  using PartialParents = std::set<std::pair<std::int32_t, std::int32_t>>;  // (-occupied, id), fullest first
  struct GroupPlacement {
    std::int32_t packing = 0;
    std::int64_t num_free_slots = 0;
    std::int64_t num_taken = 0;
    std::int64_t num_pins = 0;
    std::int64_t num_pinned_only = 0;
    std::int32_t num_watched_only_lcm_blocks = 0;
    std::vector<PartialParents> partial_parents;  // by bucket, those with a free slot there
    SharingObserver* observer = nullptr;
  };

  static std::size_t Index(std::int32_t i) { return static_cast<std::size_t>(i); }
  std::size_t ChildIndex(std::int32_t lcm_block, std::int32_t slot) const {
    return Index(lcm_block) * Index(max_packing_) + Index(slot);
  }

  void Retain(std::int32_t child, std::int32_t block_id) noexcept {
    const std::int32_t num_references = references_[Index(child)]++;
    if (num_references == num_standing_[Index(child)] && num_references != 0) [[unlikely]] {
      ReportUsed(child, block_id);
    }
  }
  // A block starts or stops being held by its watcher and its pins alone.
  void ReportIdle(std::int32_t child, std::int32_t block_id) noexcept;
  void ReportUsed(std::int32_t child, std::int32_t block_id) noexcept;
  bool IsIdle(std::int32_t child) const {
    return num_standing_[Index(child)] != 0 && references_[Index(child)] == num_standing_[Index(child)];
  }
  // Changes how many references of a block are its watcher's and its pins'.
  void ChangeStanding(const CacheBlockRef& block, std::int32_t watch_change,
                      std::int32_t pin_change) noexcept;
  void AddWatchedOnlyChild(std::int32_t child, std::int32_t change) noexcept;
  void Release(std::int32_t child, std::int32_t block_id) noexcept;
  Parent& ParentOf(std::int32_t child) noexcept { return parents_[Index(child / max_packing_)]; }
  GroupPlacement& PlacementOf(std::int32_t child) noexcept { return groups_[Index(ParentOf(child).group)]; }

  std::int32_t BindEmptyParent(std::int32_t group);
  // REQUIRES: the group has a free slot, or there is an empty parent.
  std::size_t ChooseBucket(std::int32_t group, const std::vector<std::int64_t>& loads) const;
  CacheBlockRef Occupy(std::int32_t group, std::size_t bucket);
  void Vacate(std::int32_t lcm_block, std::int32_t slot) noexcept;
  std::int32_t& LowestFreeSlot(std::int32_t lcm_block, std::size_t bucket) {
    return lowest_free_slots_[Index(lcm_block) * max_shard_count_ + bucket];
  }
  void EnterPartial(GroupPlacement& placement, std::int32_t lcm_block) noexcept;
  void LeavePartial(GroupPlacement& placement, std::int32_t lcm_block) noexcept;
  // Allocates what binding that many more parents to `group` takes.
  void SecurePlaces(std::int32_t group, std::int64_t num_parents);
  void PushEmpty(std::int32_t lcm_block) noexcept;
  std::int32_t PopEmpty() noexcept;

  std::int32_t num_lcm_blocks_;
  std::int32_t max_packing_ = 0;
  std::size_t max_shard_count_ = 1;
  std::int64_t num_taken_ = 0;
  std::uint64_t num_freed_slots_ = 0;
  std::vector<GroupPlacement> groups_;
  std::vector<Parent> parents_;                  // by parent id; [0] is the null parent
  std::vector<std::int32_t> references_;         // by child index
  std::vector<std::uint8_t> num_standing_;       // by child index: references of the watcher and of pins
  std::vector<std::uint8_t> num_pins_;           // by child index
  std::vector<std::int32_t> lowest_free_slots_;  // by parent and bucket; the packing or more for none
  // Nodes of partial_parents that are in none. A bound parent owns one for every bucket of its group, in use
  // or here; those of nobody are counted as free.
  std::vector<PartialParents::node_type> spare_places_;
  std::size_t num_places_ = 0;
  std::size_t num_free_places_ = 0;
  std::vector<std::int32_t> empty_ring_;  // FIFO of empty parents
  std::size_t empty_head_ = 0;
  std::int32_t num_empty_ = 0;
};

}  // namespace pdmesh
