// The inner part of a linear layer: one panel of packed weights against some rows of the input.
//
// Plain data and function pointers, compiled once per instruction set. Must not know threads or Python.
#pragma once

#include <cstddef>
#include <cstdint>

#include "weight_format.h"

namespace pdmesh::kernels {

// Most rows that meet a panel at once: enough to pay for reading it, few enough to share out evenly.
inline constexpr int kRowsPerPiece = 128;

inline constexpr int kMostColumnsPerPanel = 48;

// output[m, n] = sum over k of input[m, k] * panel[k, n]. Strides in floats; the last axis is contiguous.
struct PanelProduct {
  const float* input = nullptr;  // [num_rows, depth]
  std::int64_t input_stride = 0;
  const std::byte* panel = nullptr;  // of `format`; aligned for float
  WeightFormat format = WeightFormat::kFloat32;
  float* output = nullptr;  // [num_rows, num_columns]
  std::int64_t output_stride = 0;
  int num_rows = 0;     // at most kRowsPerPiece
  int num_columns = 0;  // in [1, columns_per_panel]; the panel's other columns are padding
  int depth = 0;        // whole blocks, if the format has blocks
};

struct LinearCore {
  int columns_per_panel;
  void (*multiply_panel)(const PanelProduct& product);
};

namespace baseline {
LinearCore linear_core();
}
namespace avx2 {
LinearCore linear_core();
}
namespace avx512 {
LinearCore linear_core();
}

}  // namespace pdmesh::kernels
