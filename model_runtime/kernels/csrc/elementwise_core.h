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

// The same of input + total, which total becomes.
using AddRmsNormCore = void (*)(const RowsTask& task, float* total, std::int64_t total_stride,
                                const float* weight, float eps);

// Input rows are [gate, up], twice as wide as the output: output = f(gate) * up, where f is
// gate * sigmoid(gate), gelu(gate) in its tanh approximation, or sigmoid(gate).
using GateCore = void (*)(const RowsTask& task);

// How far the heads of each row turn: cosines and sines are [num_rows, half], 2 * half <= head_dim.
struct RowAngles {
  const float* cosines = nullptr;
  const float* sines = nullptr;
  int half = 0;
  int head_dim = 0;
};

// Input rows are heads side by side, width = num_heads * head_dim. Each head's dimension i turns with
// dimension i + half by the row's angle i; the dimensions behind those are not touched.
using RotateCore = void (*)(const RowsTask& task, const RowAngles& angles);

namespace baseline {
void rms_norm(const RowsTask& task, const float* weight, float eps);
void add_rms_norm(const RowsTask& task, float* total, std::int64_t total_stride, const float* weight,
                  float eps);
void silu_multiply(const RowsTask& task);
void gelu_tanh_multiply(const RowsTask& task);
void sigmoid_multiply(const RowsTask& task);
void rotate(const RowsTask& task, const RowAngles& angles);
}  // namespace baseline
namespace avx2 {
void rms_norm(const RowsTask& task, const float* weight, float eps);
void add_rms_norm(const RowsTask& task, float* total, std::int64_t total_stride, const float* weight,
                  float eps);
void silu_multiply(const RowsTask& task);
void gelu_tanh_multiply(const RowsTask& task);
void sigmoid_multiply(const RowsTask& task);
void rotate(const RowsTask& task, const RowAngles& angles);
}  // namespace avx2
namespace avx512 {
void rms_norm(const RowsTask& task, const float* weight, float eps);
void add_rms_norm(const RowsTask& task, float* total, std::int64_t total_stride, const float* weight,
                  float eps);
void silu_multiply(const RowsTask& task);
void gelu_tanh_multiply(const RowsTask& task);
void sigmoid_multiply(const RowsTask& task);
void rotate(const RowsTask& task, const RowAngles& angles);
}  // namespace avx512

}  // namespace pdmesh::kernels
