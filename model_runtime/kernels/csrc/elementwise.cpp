#include "elementwise.h"

#include <algorithm>
#include <atomic>

namespace pdmesh::kernels {
namespace {

// Below this many elements waking a sleeping thread costs more than it saves.
constexpr std::int64_t kMinElementsToShare = 65536;
constexpr int kRowsPerSlice = 16;

}  // namespace

void for_slices(WorkerPool& pool, const RowsTask& task,
                const std::function<void(int, const RowsTask&)>& run) {
  if (static_cast<std::int64_t>(task.num_rows) * task.width < kMinElementsToShare) {
    run(0, task);
    return;
  }
  std::atomic<int> next_row{0};
  pool.run_on_all([&](int) {
    for (int row = next_row.fetch_add(kRowsPerSlice); row < task.num_rows;
         row = next_row.fetch_add(kRowsPerSlice)) {
      run(row, task.slice(row, std::min(kRowsPerSlice, task.num_rows - row)));
    }
  });
}

}  // namespace pdmesh::kernels
