// A linear layer without bias: input [num_rows, depth] times the transpose of weight [num_columns, depth].
//
// The weight is packed once into panels, [ceil(num_columns / columns_per_panel), depth, columns_per_panel],
// so that every product reads it front to back. A row's result depends on nothing but the row and the weight.
#pragma once

#include <cstdint>

#include "linear_core.h"
#include "worker_pool.h"

namespace pdmesh::kernels {

// A packed weight; not owned. Columns past num_columns in the last panel are zero.
struct PackedWeight {
  const float* panels = nullptr;
  int num_columns = 0;
  int depth = 0;
  int columns_per_panel = 0;

  int num_panels() const { return (num_columns + columns_per_panel - 1) / columns_per_panel; }
  std::int64_t panel_floats() const { return static_cast<std::int64_t>(depth) * columns_per_panel; }
};

// A matrix whose last axis is contiguous; not owned. Strides in floats.
struct MatrixView {
  const float* data = nullptr;
  std::int64_t stride = 0;
};
struct MutableMatrixView {
  float* data = nullptr;
  std::int64_t stride = 0;
};

// Writes `panels`, which has the shape of `packed`, from weight [num_columns, depth].
void pack(WorkerPool& pool, MatrixView weight, const PackedWeight& packed, float* panels);

// output[i] = row rows[i] of the weight that was packed. REQUIRES: rows in [0, num_columns).
void gather_rows(const PackedWeight& weight, const std::int64_t* rows, int num_rows,
                 MutableMatrixView output);

// output [num_rows, num_columns], which must not overlap the operands.
void multiply(WorkerPool& pool, const LinearCore& core, MatrixView input, int num_rows,
              const PackedWeight& weight, MutableMatrixView output);

}  // namespace pdmesh::kernels
