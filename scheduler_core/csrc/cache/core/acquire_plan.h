// AcquirePlan: a token demand turned into block counts. The allocator carries it out without deriving
// anything.
#pragma once

#include <cstdint>

namespace pdmesh {

struct AcquirePlan {
  std::int64_t num_blocks;  // fresh blocks to append
  std::int64_t tail_room;   // what the table records afterwards, verbatim
};

}  // namespace pdmesh
