// Request slots: small numbers that name a live request to the runtime. 0 is reserved.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <utility>

namespace pdmesh {

class SlotPool;

// Holds one slot; returns it at the end.
class SlotLease {
 public:
  SlotLease() = default;
  SlotLease(SlotLease&& other) noexcept
      : pool_(std::exchange(other.pool_, nullptr)), slot_(std::exchange(other.slot_, 0)) {}
  SlotLease& operator=(SlotLease&& other) noexcept {
    Reset();
    pool_ = std::exchange(other.pool_, nullptr);
    slot_ = std::exchange(other.slot_, 0);
    return *this;
  }
  SlotLease(const SlotLease&) = delete;
  SlotLease& operator=(const SlotLease&) = delete;
  ~SlotLease() { Reset(); }

  std::int32_t slot() const { return slot_; }
  void Reset() noexcept;

 private:
  friend class SlotPool;
  SlotLease(SlotPool* pool, std::int32_t slot) : pool_(pool), slot_(slot) {}

  SlotPool* pool_ = nullptr;
  std::int32_t slot_ = 0;
};

// Outlives its leases.
class SlotPool {
 public:
  explicit SlotPool(std::int32_t num_slots) : num_slots_(num_slots) {}
  SlotPool(const SlotPool&) = delete;
  SlotPool& operator=(const SlotPool&) = delete;

  bool has_free_slot() const { return num_free_slots() > 0; }
  std::int32_t num_free_slots() const {
    return num_slots_ - num_used_ + static_cast<std::int32_t>(returned_.size());
  }
  // The lowest free slot. REQUIRES: has_free_slot().
  SlotLease Lease();

 private:
  friend class SlotLease;
  std::int32_t num_slots_;
  std::int32_t num_used_ = 0;        // slots [1, num_used_] were leased at some time
  std::set<std::int32_t> returned_;  // those of them that are free
};

}  // namespace pdmesh
