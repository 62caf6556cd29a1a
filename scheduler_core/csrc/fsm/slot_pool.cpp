#include "fsm/slot_pool.h"

#include "support/errors.h"

namespace pdmesh {

void SlotLease::Reset() noexcept {
  if (pool_ != nullptr) {
    std::exchange(pool_, nullptr)->free_.insert(std::exchange(slot_, 0));
  }
}

SlotPool::SlotPool(std::int32_t num_slots) {
  for (std::int32_t slot = 1; slot <= num_slots; ++slot) {
    free_.insert(free_.end(), slot);
  }
}

SlotLease SlotPool::Lease() {
  Ensure(has_free_slot(), "a request slot was leased while none was free");
  return SlotLease(this, free_.extract(free_.begin()).value());
}

}  // namespace pdmesh
