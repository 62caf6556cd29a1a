// A linear layer without bias: input [num_rows, depth] times the transpose of weight [num_columns, depth].
//
// Shares columns out among the pool's threads. A row's result depends on nothing but the row and the weight.
#pragma once

#include "linear_core.h"
#include "worker_pool.h"

namespace pdmesh::kernels {

// `call` describes the whole product; the output must not overlap the operands.
void multiply(WorkerPool& pool, LinearCore core, const LinearTile& call);

}  // namespace pdmesh::kernels
