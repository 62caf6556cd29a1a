// Shares the rows of an element-wise task out among a pool's threads.
#pragma once

#include <functional>

#include "elementwise_core.h"
#include "worker_pool.h"

namespace pdmesh::kernels {

// Calls run(first_row, slice of the task) for consecutive slices that together cover the task, in any order.
void for_slices(WorkerPool& pool, const RowsTask& task, const std::function<void(int, const RowsTask&)>& run);

}  // namespace pdmesh::kernels
