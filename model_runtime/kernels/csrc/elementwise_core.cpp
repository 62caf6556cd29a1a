// Compiled once per instruction set. Rows are computed one by one in a fixed order, so a row's result does
// not depend on the rows around it.
#include "elementwise_core.h"

#include <algorithm>
#include <cmath>

#include "lanes.h"

namespace pdmesh::kernels::PDMESH_VARIANT {
namespace {

Vec load_some(const float* from, int count) {
  if (count >= kLanes) return load(from);
  Vec result = {};
  for (int i = 0; i < count; ++i) result[i] = from[i];
  return result;
}

void store_some(float* to, Vec value, int count) {
  if (count >= kLanes) return store(to, value);
  for (int i = 0; i < count; ++i) to[i] = value[i];
}

Vec sigmoid(Vec x) {
  const Vec decayed = exp_nonpositive(x < Vec{} ? x : -x);
  const Vec inverse = 1.0F / (1.0F + decayed);
  return x < Vec{} ? decayed * inverse : inverse;
}

struct Silu {
  static Vec of(Vec x) { return x * sigmoid(x); }
};
// The tanh approximation, 0.5 * (1 + tanh(u)) being sigmoid(2 * u). Source: Hendrycks and Gimpel 2016,
// "Gaussian error linear units"; the factor is 2 * sqrt(2 / pi).
struct GeluTanh {
  static Vec of(Vec x) { return x * sigmoid(1.59576912F * (x + 0.044715F * x * x * x)); }
};
struct Sigmoid {
  static Vec of(Vec x) { return sigmoid(x); }
};

// One copy of the code, because the compiler may fuse a product and a sum either way.
__attribute__((noinline)) void norm_row(const float* input, const float* weight, float eps, float* output,
                                        int width) {
  Vec squares = {};
  for (int i = 0; i < width; i += kLanes) {
    const Vec x = load_some(input + i, width - i);
    squares += x * x;
  }
  const Vec parts[kLanes] = {squares};
  const float inverse = 1.0F / std::sqrt(sum_lanes(parts)[0] / static_cast<float>(width) + eps);
  for (int i = 0; i < width; i += kLanes) {
    const int count = width - i;
    store_some(output + i, load_some(input + i, count) * inverse * load_some(weight + i, count), count);
  }
}

template <class Gate>
void gate_multiply(const RowsTask& task) {
  for (int row = 0; row < task.num_rows; ++row) {
    const float* gate = task.input + row * task.input_stride;
    const float* up = gate + task.width;
    float* output = task.output + row * task.output_stride;
    for (int i = 0; i < task.width; i += kLanes) {
      const int count = task.width - i;
      store_some(output + i, Gate::of(load_some(gate + i, count)) * load_some(up + i, count), count);
    }
  }
}

}  // namespace

void rms_norm(const RowsTask& task, const float* weight, float eps) {
  for (int row = 0; row < task.num_rows; ++row) {
    norm_row(task.input + row * task.input_stride, weight, eps, task.output + row * task.output_stride,
             task.width);
  }
}

void add_rms_norm(const RowsTask& task, float* total, std::int64_t total_stride, const float* weight,
                  float eps) {
  for (int row = 0; row < task.num_rows; ++row) {
    const float* input = task.input + row * task.input_stride;
    float* sums = total + row * total_stride;
    for (int i = 0; i < task.width; i += kLanes) {
      const int count = task.width - i;
      store_some(sums + i, load_some(input + i, count) + load_some(sums + i, count), count);
    }
    norm_row(sums, weight, eps, task.output + row * task.output_stride, task.width);
  }
}

void silu_multiply(const RowsTask& task) {
  gate_multiply<Silu>(task);
}

void gelu_tanh_multiply(const RowsTask& task) {
  gate_multiply<GeluTanh>(task);
}

void sigmoid_multiply(const RowsTask& task) {
  gate_multiply<Sigmoid>(task);
}

void rotate(const RowsTask& task, const RowAngles& angles) {
  const int half = angles.half;
  for (int row = 0; row < task.num_rows; ++row) {
    const float* cosine = angles.cosines + static_cast<std::int64_t>(row) * half;
    const float* sine = angles.sines + static_cast<std::int64_t>(row) * half;
    for (int head = 0; head < task.width; head += angles.head_dim) {
      const float* input = task.input + row * task.input_stride + head;
      float* output = task.output + row * task.output_stride + head;
      for (int i = 0; i < half; i += kLanes) {
        const int count = half - i;
        const Vec first = load_some(input + i, count);
        const Vec second = load_some(input + half + i, count);
        const Vec c = load_some(cosine + i, count);
        const Vec s = load_some(sine + i, count);
        store_some(output + i, first * c - second * s, count);
        store_some(output + half + i, second * c + first * s, count);
      }
    }
  }
}

}  // namespace pdmesh::kernels::PDMESH_VARIANT
