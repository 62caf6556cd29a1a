#include "fsm/slot_pool.h"

#include "support/errors.h"

namespace pdmesh {

void SlotLease::Reset() noexcept {
  if (pool_ != nullptr) {
    std::exchange(pool_, nullptr)->returned_.insert(std::exchange(slot_, 0));
  }
}

SlotLease SlotPool::Lease() {
  Ensure(has_free_slot(), "a request slot was leased while none was free");
  return SlotLease(this, returned_.empty() ? ++num_used_ : returned_.extract(returned_.begin()).value());
}

}  // namespace pdmesh
