// Python face of what happens to rows between two products: checks shapes, releases the interpreter lock,
// forwards.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cpu_kernels.h"
#include "elementwise.h"
#include "tensor_view.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pdmesh::kernels {
namespace {

using MutableHeads = TensorView<float, 3>;
using Matrix = TensorView<const float, 2>;
using MutableMatrix = TensorView<float, 2>;
using Vector = TensorView<const float, 1, true>;
using Angles = TensorView<const float, 2, true>;
using RowIds = TensorView<const std::int64_t, 1, true>;

void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(std::string("rows: ") + message);
}

RowsTask describe_rows(const Matrix& input, const MutableMatrix& output, std::size_t width) {
  require(output.shape(0) == input.shape(0) && output.shape(1) == width, "output has the wrong shape");
  require(has_stride(input, 1, 1) && has_stride(output, 1, 1), "the last axis must be contiguous");
  RowsTask task;
  task.input = input.data();
  task.input_stride = input.stride(0);
  task.output = output.data();
  task.output_stride = output.stride(0);
  task.num_rows = static_cast<int>(input.shape(0));
  task.width = static_cast<int>(width);
  return task;
}

void rms_norm(CpuKernels& self, const Matrix& input, const Vector& weight, float eps,
              const MutableMatrix& output) {
  require(weight.shape(0) == input.shape(1), "weight must be as wide as input");
  const RowsTask task = describe_rows(input, output, input.shape(1));
  const nb::gil_scoped_release unlocked;
  for_slices(self.pool(), task,
             [&](int, const RowsTask& part) { self.set().rms_norm(part, weight.data(), eps); });
}

void add_rms_norm(CpuKernels& self, const Matrix& addend, const MutableMatrix& total, const Vector& weight,
                  float eps, const MutableMatrix& output) {
  require(weight.shape(0) == addend.shape(1), "weight must be as wide as addend");
  require(total.shape(0) == addend.shape(0) && total.shape(1) == addend.shape(1) && has_stride(total, 1, 1),
          "total must have the shape of addend and contiguous rows");
  const RowsTask task = describe_rows(addend, output, addend.shape(1));
  const nb::gil_scoped_release unlocked;
  for_slices(self.pool(), task, [&](int first_row, const RowsTask& part) {
    self.set().add_rms_norm(part, total.data() + first_row * total.stride(0), total.stride(0), weight.data(),
                            eps);
  });
}

void gate_multiply(CpuKernels& self, GateCore core, const Matrix& input, const MutableMatrix& output) {
  require(input.shape(1) == 2 * output.shape(1), "input must be twice as wide as output");
  const RowsTask task = describe_rows(input, output, output.shape(1));
  const nb::gil_scoped_release unlocked;
  for_slices(self.pool(), task, [&](int, const RowsTask& part) { core(part); });
}

void silu_multiply(CpuKernels& self, const Matrix& input, const MutableMatrix& output) {
  gate_multiply(self, self.set().silu_multiply, input, output);
}

void gelu_tanh_multiply(CpuKernels& self, const Matrix& input, const MutableMatrix& output) {
  gate_multiply(self, self.set().gelu_tanh_multiply, input, output);
}

void sigmoid_multiply(CpuKernels& self, const Matrix& input, const MutableMatrix& output) {
  gate_multiply(self, self.set().sigmoid_multiply, input, output);
}

// Those of the rows from first_row on, turning the first 2 * half dimensions of heads of head_dim.
RowAngles row_angles(const Angles& cosines, const Angles& sines, int head_dim, int first_row) {
  const auto half = static_cast<std::int64_t>(cosines.shape(1));
  return {cosines.data() + first_row * half, sines.data() + first_row * half, static_cast<int>(half),
          head_dim};
}

void require_angles(const Angles& cosines, const Angles& sines, std::size_t num_rows) {
  require(cosines.shape(0) == num_rows && sines.shape(0) == num_rows && sines.shape(1) == cosines.shape(1),
          "cosines and sines must have one row per row of heads");
}

void rotate(CpuKernels& self, const Matrix& input, const Angles& cosines, const Angles& sines,
            const MutableMatrix& output) {
  const std::size_t head_dim = 2 * cosines.shape(1);
  require(head_dim > 0 && input.shape(1) % head_dim == 0, "input must be whole heads wide");
  require_angles(cosines, sines, input.shape(0));
  const RowsTask task = describe_rows(input, output, input.shape(1));
  const nb::gil_scoped_release unlocked;
  for_slices(self.pool(), task, [&](int first_row, const RowsTask& part) {
    self.set().rotate(part, row_angles(cosines, sines, static_cast<int>(head_dim), first_row));
  });
}

void store_row(const MutableHeads& buffer, std::int64_t location, const float* row) {
  const auto width = static_cast<std::int64_t>(buffer.shape(1) * buffer.shape(2));
  std::copy_n(row, width, buffer.data() + location * buffer.stride(0));
}

void require_cache(const MutableHeads& buffer, const MutableHeads& heads) {
  require(buffer.shape(2) == heads.shape(2), "cache rows must have heads of head_dim");
  require(has_stride(buffer, 2, 1) && has_stride(buffer, 1, static_cast<std::int64_t>(buffer.shape(2))),
          "a cache row must be contiguous");
}

void rotate_and_store(CpuKernels& self, const MutableHeads& heads, const Angles& cosines, const Angles& sines,
                      const RowIds& locations, const MutableHeads& key_rows, const MutableHeads& value_rows) {
  const auto head_dim = static_cast<std::int64_t>(heads.shape(2));
  const auto num_kv_heads = static_cast<std::int64_t>(key_rows.shape(1));
  const std::int64_t num_turning = static_cast<std::int64_t>(heads.shape(1)) - num_kv_heads;
  require(has_stride(heads, 2, 1) && has_stride(heads, 1, head_dim), "a token's heads must be contiguous");
  require_cache(key_rows, heads);
  require_cache(value_rows, heads);
  require(value_rows.shape(0) == key_rows.shape(0) && value_rows.shape(1) == key_rows.shape(1),
          "key_rows and value_rows must have one shape");
  require(num_turning >= num_kv_heads, "heads must hold those of query, key and value");
  require(2 * static_cast<std::int64_t>(cosines.shape(1)) <= head_dim,
          "there are more angles than dimensions");
  require_angles(cosines, sines, heads.shape(0));
  require(locations.shape(0) == heads.shape(0), "there must be one location per row");
  for (std::size_t i = 0; i < locations.shape(0); ++i) {
    require(locations(i) >= kNowhere && locations(i) < static_cast<std::int64_t>(key_rows.shape(0)),
            "locations must name rows of the cache");
  }
  RowsTask task;
  task.input = task.output = heads.data();
  task.input_stride = task.output_stride = heads.stride(0);
  task.num_rows = static_cast<int>(heads.shape(0));
  task.width = static_cast<int>(num_turning * head_dim);
  const nb::gil_scoped_release unlocked;
  for_slices(self.pool(), task, [&](int first_row, const RowsTask& part) {
    self.set().rotate(part, row_angles(cosines, sines, static_cast<int>(head_dim), first_row));
    for (int row = 0; row < part.num_rows; ++row) {
      const std::int64_t location = locations(static_cast<std::size_t>(first_row + row));
      if (location == kNowhere) continue;
      const float* values = part.output + row * part.output_stride + part.width;
      store_row(key_rows, location, values - num_kv_heads * head_dim);
      store_row(value_rows, location, values);
    }
  });
}

// Buffers and rows of two axes or three.
template <int kDims>
void store_rows(CpuKernels&, const TensorView<const float, kDims>& rows, const RowIds& locations,
                const TensorView<float, kDims>& buffer) {
  std::int64_t width = 1;
  for (int axis = kDims - 1; axis > 0; --axis) {
    const auto index = static_cast<std::size_t>(axis);
    require(rows.shape(index) == buffer.shape(index), "buffer must have rows of the same shape");
    require(has_stride(rows, index, width) && has_stride(buffer, index, width), "a row must be contiguous");
    width *= static_cast<std::int64_t>(rows.shape(index));
  }
  require(locations.shape(0) == rows.shape(0), "there must be one location per row");
  const auto num_locations = static_cast<std::int64_t>(buffer.shape(0));
  for (std::size_t i = 0; i < locations.shape(0); ++i) {
    require(locations(i) >= 0 && locations(i) < num_locations, "locations must name rows of buffer");
  }
  const nb::gil_scoped_release unlocked;
  for (std::size_t i = 0; i < locations.shape(0); ++i) {
    const float* from = rows.data() + static_cast<std::int64_t>(i) * rows.stride(0);
    std::copy_n(from, width, buffer.data() + locations(i) * buffer.stride(0));
  }
}

}  // namespace

void bind_rows(nb::class_<CpuKernels>& kernels) {
  kernels
      .def("store_rows", &store_rows<3>, "rows"_a.noconvert(), "locations"_a.noconvert(),
           "buffer"_a.noconvert(),
           "buffer[locations[i]] = rows[i], float32 of two axes or three; locations int64[num_rows].")
      .def("store_rows", &store_rows<2>, "rows"_a.noconvert(), "locations"_a.noconvert(),
           "buffer"_a.noconvert())
      .def("rms_norm", &rms_norm, "input"_a.noconvert(), "weight"_a.noconvert(), "eps"_a,
           "output"_a.noconvert(), "input, output float32[rows, width]; weight float32[width].")
      .def("add_rms_norm", &add_rms_norm, "addend"_a.noconvert(), "total"_a.noconvert(),
           "weight"_a.noconvert(), "eps"_a, "output"_a.noconvert(),
           "total += addend, output = rms_norm(total); all float32[rows, width], weight float32[width].")
      .def("silu_multiply", &silu_multiply, "input"_a.noconvert(), "output"_a.noconvert(),
           "input float32[rows, 2 * width] holds gate and up; output float32[rows, width].")
      .def("gelu_tanh_multiply", &gelu_tanh_multiply, "input"_a.noconvert(), "output"_a.noconvert(),
           "input float32[rows, 2 * width] holds gate and up; output float32[rows, width].")
      .def("sigmoid_multiply", &sigmoid_multiply, "input"_a.noconvert(), "output"_a.noconvert(),
           "input float32[rows, 2 * width] holds gate and up; output float32[rows, width].")
      .def("rotate", &rotate, "input"_a.noconvert(), "cosines"_a.noconvert(), "sines"_a.noconvert(),
           "output"_a.noconvert(),
           "input, output float32[rows, num_heads * head_dim]; cosines, sines float32[rows, head_dim / 2].")
      .def("rotate_and_store", &rotate_and_store, "heads"_a.noconvert(), "cosines"_a.noconvert(),
           "sines"_a.noconvert(), "locations"_a.noconvert(), "key_rows"_a.noconvert(),
           "value_rows"_a.noconvert(),
           "heads float32[num_tokens, num_heads + 2 * num_kv_heads, head_dim], queries, keys and values; "
           "cosines, sines float32[num_tokens, turning dimensions / 2]; locations int64[num_tokens], -1 for "
           "nowhere; rows float32[num_locations, num_kv_heads, head_dim].");
}

}  // namespace pdmesh::kernels
