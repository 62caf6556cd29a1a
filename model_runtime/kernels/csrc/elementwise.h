// Shares the rows of an element-wise task out among a pool's threads.
#pragma once

#include <cstdint>
#include <functional>

#include "elementwise_core.h"
#include "worker_pool.h"

namespace pdmesh::kernels {

// The location of a row that is stored nowhere.
constexpr std::int64_t kNowhere = -1;

// Calls run(first_row, slice of the task) for consecutive slices that together cover the task, in any order.
void for_slices(WorkerPool& pool, const RowsTask& task, const std::function<void(int, const RowsTask&)>& run);

}  // namespace pdmesh::kernels
