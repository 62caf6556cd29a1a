// A linear layer without bias: input [num_rows, depth] times the transpose of weight [num_columns, depth].
//
// The weight is packed once into panels of adjacent columns, so that every product reads it front to back. A
// row's result depends on nothing but the row and the weight: a quantised weight gives the bits that the same
// weight gives in float32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "elementwise_core.h"
#include "linear_core.h"
#include "panel_memory.h"
#include "stored_blocks.h"
#include "weight_format.h"
#include "worker_pool.h"

namespace pdmesh::kernels {

// A matrix whose last axis is contiguous; not owned. Strides in elements.
template <class Element>
struct RowsView {
  Element* data = nullptr;
  std::int64_t stride = 0;
};
using MatrixView = RowsView<const float>;
using MutableMatrixView = RowsView<float>;
using BlockRowsView = RowsView<const std::uint8_t>;

// Its panels begin on a cache line of memory that it shares with others. Columns past num_columns in the last
// panel are zero.
class PackedWeight {
 public:
  // Panels are not initialised. Throws std::bad_alloc.
  PackedWeight(WeightFormat format, int num_columns, int depth, int columns_per_panel, PanelMemory& memory);

  WeightFormat format() const { return format_; }
  int num_columns() const { return num_columns_; }
  int depth() const { return depth_; }
  int columns_per_panel() const { return columns_per_panel_; }
  int num_panels() const { return (num_columns_ + columns_per_panel_ - 1) / columns_per_panel_; }
  std::int64_t panel_bytes() const;
  std::int64_t num_bytes() const { return num_panels() * panel_bytes(); }
  std::byte* panel(int index) { return panels_.get() + index * panel_bytes(); }
  const std::byte* panel(int index) const { return panels_.get() + index * panel_bytes(); }

 private:
  WeightFormat format_;
  int num_columns_;
  int depth_;
  int columns_per_panel_;
  std::shared_ptr<std::byte> panels_;
};

// Fills a float32 weight from [num_columns, depth].
void pack(WorkerPool& pool, MatrixView weight, PackedWeight& packed);

// Fills a weight of the stored quantization's format from rows of its blocks, [num_columns, row bytes].
// Throws std::invalid_argument for a scale or minimum that is not finite.
void pack_blocks(WorkerPool& pool, BlockRowsView rows, const StoredQuantization& stored,
                 PackedWeight& packed);

// output[i] = row rows[i] of the weight that was packed. REQUIRES: rows in [0, num_columns).
void gather_rows(const PackedWeight& weight, const std::int64_t* rows, int num_rows,
                 MutableMatrixView output);

// output [num_rows, num_columns], which must not overlap the operands.
void multiply(WorkerPool& pool, const LinearCore& core, MatrixView input, int num_rows,
              const PackedWeight& weight, MutableMatrixView output);

// down(f(gate) * up), where gate and up are of one shape and down is as deep as they have columns.
struct GatedNetwork {
  GateCore multiply_gate;
  const PackedWeight& gate;
  const PackedWeight& up;
  const PackedWeight& down;
};

// output [num_rows, down's columns]; the bits are those of the three products and of the gate after one
// another. What is between them is left in `scratch`, which grows as needed.
void gated_network(WorkerPool& pool, const LinearCore& core, const GatedNetwork& network, MatrixView input,
                   int num_rows, std::vector<float>& scratch, MutableMatrixView output);

}  // namespace pdmesh::kernels
