// What happens to activations between two products, for some rows of them.
//
// Plain data and function pointers, compiled once per instruction set. Must not know threads or Python.
#pragma once

#include <cstdint>

namespace pdmesh::kernels {

// Strides in floats; the last axis is contiguous. `output` may be `input`.
struct RowsTask {
  const float* input = nullptr;
  std::int64_t input_stride = 0;
  float* output = nullptr;
  std::int64_t output_stride = 0;
  int num_rows = 0;
  int width = 0;  // of an output row

  // First row of a slice of this task becomes row 0.
  RowsTask slice(int first_row, int count) const {
    RowsTask part = *this;
    part.input += first_row * input_stride;
    part.output += first_row * output_stride;
    part.num_rows = count;
    return part;
  }
};

// output = input / sqrt(mean(input^2) + eps) * weight[width], per row.
using RmsNormCore = void (*)(const RowsTask& task, const float* weight, float eps);

// Input rows are [gate, up], twice as wide as the output: output = f(gate) * up, where f is
// gate * sigmoid(gate), gelu(gate) in its tanh approximation, or sigmoid(gate).
using GateCore = void (*)(const RowsTask& task);

// Input rows are heads of head_dim floats, width = num_heads * head_dim. Each head's dimension i turns with
// dimension i + head_dim / 2 by the row's angle i; cosines and sines are [num_rows, head_dim / 2]. `output`
// is not `input`.
using RotateCore = void (*)(const RowsTask& task, int head_dim, const float* cosines, const float* sines);

namespace baseline {
void rms_norm(const RowsTask& task, const float* weight, float eps);
void silu_multiply(const RowsTask& task);
void gelu_tanh_multiply(const RowsTask& task);
void sigmoid_multiply(const RowsTask& task);
void rotate(const RowsTask& task, int head_dim, const float* cosines, const float* sines);
}  // namespace baseline
namespace avx2 {
void rms_norm(const RowsTask& task, const float* weight, float eps);
void silu_multiply(const RowsTask& task);
void gelu_tanh_multiply(const RowsTask& task);
void sigmoid_multiply(const RowsTask& task);
void rotate(const RowsTask& task, int head_dim, const float* cosines, const float* sines);
}  // namespace avx2
namespace avx512 {
void rms_norm(const RowsTask& task, const float* weight, float eps);
void silu_multiply(const RowsTask& task);
void gelu_tanh_multiply(const RowsTask& task);
void sigmoid_multiply(const RowsTask& task);
void rotate(const RowsTask& task, int head_dim, const float* cosines, const float* sines);
}  // namespace avx512

}  // namespace pdmesh::kernels
