// AcquirePlan: a token demand turned into block counts. The allocator carries it out without deriving
// anything.
#pragma once

#include <cstdint>

namespace pdmesh {

struct AcquirePlan {
  std::int64_t num_holes;   // empty slots to append first
  std::int64_t num_blocks;  // fresh blocks to append behind them
  std::int64_t tail_room;   // what the table records afterwards, verbatim
};

}  // namespace pdmesh
