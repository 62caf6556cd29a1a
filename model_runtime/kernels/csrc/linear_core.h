// The inner part of a linear layer: some output columns for all rows of the input.
//
// Plain data and one function pointer, compiled once per instruction set. Must not know threads or Python.
#pragma once

#include <cstdint>

namespace pdmesh::kernels {

// Columns are handed out in pieces of this many: small enough to share evenly, large enough to stream.
inline constexpr int kColumnsPerPiece = 32;

// output[m, n] = sum over k of input[m, k] * weight[n, k]. Strides in floats; the last axis is contiguous.
struct LinearTile {
  const float* input = nullptr;  // [num_rows, depth]
  std::int64_t input_stride = 0;
  const float* weight = nullptr;  // [num_columns, depth]
  std::int64_t weight_stride = 0;
  float* output = nullptr;  // [num_rows, num_columns]
  std::int64_t output_stride = 0;
  int num_rows = 0;
  int num_columns = 0;
  int depth = 0;
};

using LinearCore = void (*)(const LinearTile& tile);

namespace baseline {
void multiply_tile(const LinearTile& tile);
}
namespace avx2 {
void multiply_tile(const LinearTile& tile);
}
namespace avx512 {
void multiply_tile(const LinearTile& tile);
}

}  // namespace pdmesh::kernels
