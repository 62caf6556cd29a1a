#include "linear.h"

#include <algorithm>
#include <atomic>

namespace pdmesh::kernels {
namespace {

// Below this many weights waking a sleeping thread costs more than it saves.
constexpr std::int64_t kMinWeightsToShare = 65536;

}  // namespace

void multiply(WorkerPool& pool, LinearCore core, const LinearTile& call) {
  std::atomic<int> next_column{0};
  const auto drain = [&](int) {
    for (int column = next_column.fetch_add(kColumnsPerPiece); column < call.num_columns;
         column = next_column.fetch_add(kColumnsPerPiece)) {
      LinearTile tile = call;
      tile.weight += column * call.weight_stride;
      tile.output += column;
      tile.num_columns = std::min(kColumnsPerPiece, call.num_columns - column);
      core(tile);
    }
  };
  if (static_cast<std::int64_t>(call.num_columns) * call.depth < kMinWeightsToShare) {
    drain(0);
  } else {
    pool.run_on_all(drain);
  }
}

}  // namespace pdmesh::kernels
