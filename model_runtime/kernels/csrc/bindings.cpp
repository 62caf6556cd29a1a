// Python face of the native kernels: checks shapes, releases the interpreter lock, forwards.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>

#include "cpu_kernels.h"
#include "linear.h"
#include "tensor_view.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pdmesh::kernels {
namespace {

using Heads = TensorView<const float, 3>;
using MutableHeads = TensorView<float, 3>;
using Pages = TensorView<const float, 4>;
using Table = TensorView<const std::int32_t, 2, true>;
using Matrix = TensorView<const float, 2>;
using MutableMatrix = TensorView<float, 2>;
using BlockRows = TensorView<const std::uint8_t, 2>;
using RowIds = TensorView<const std::int64_t, 1, true>;
using RowInts = TensorView<const std::int32_t, 1, true>;

void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(std::string("paged attention: ") + message);
}

void require_linear(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(std::string("linear: ") + message);
}

MatrixView view(const Matrix& matrix) {
  return {matrix.data(), matrix.stride(0)};
}
MutableMatrixView view(const MutableMatrix& matrix) {
  return {matrix.data(), matrix.stride(0)};
}

AttentionCall describe_call(const Heads& query, const Pages& key_pages, const Pages& value_pages,
                            const Table& page_table, const RowInts& begins, const RowInts& lengths,
                            const MutableHeads& output, float scale, std::optional<int> window_left_tokens,
                            const std::optional<MutableMatrix>& log_sum_exp) {
  const auto head_dim = static_cast<std::int64_t>(query.shape(2));
  require(has_stride(query, 2, 1) && has_stride(query, 1, head_dim), "the heads of query must be contiguous");
  require(has_stride(output, 2, 1) && has_stride(output, 1, head_dim),
          "the heads of output must be contiguous");
  for (std::size_t axis = 0; axis < 3; ++axis) {
    require(query.shape(axis) == output.shape(axis), "output must have the shape of query");
  }
  for (std::size_t axis = 0; axis < 4; ++axis) {
    require(key_pages.shape(axis) == value_pages.shape(axis),
            "key_pages and value_pages must have one shape");
  }
  for (const Pages* pages : {&key_pages, &value_pages}) {
    require(pages->shape(3) == query.shape(2), "query and cache must have one head_dim");
    require(has_stride(*pages, 3, 1) && has_stride(*pages, 2, head_dim),
            "the heads of a cache row must be contiguous");
    require(pages->shape(1) > 0, "a page must hold at least one token");
  }
  require(begins.shape(0) == page_table.shape(0) && lengths.shape(0) == page_table.shape(0),
          "page_table, begins and lengths must have one row count");

  AttentionCall call;
  call.query = query.data();
  call.query_token_stride = query.stride(0);
  call.output = output.data();
  call.output_token_stride = output.stride(0);
  call.key = key_pages.data();
  call.key_page_stride = key_pages.stride(0);
  call.key_token_stride = key_pages.stride(1);
  call.value = value_pages.data();
  call.value_page_stride = value_pages.stride(0);
  call.value_token_stride = value_pages.stride(1);
  call.page_table = page_table.data();
  call.begins = begins.data();
  call.lengths = lengths.data();
  call.num_tokens = static_cast<std::int64_t>(query.shape(0));
  call.num_rows = static_cast<std::int64_t>(page_table.shape(0));
  call.max_pages = static_cast<std::int64_t>(page_table.shape(1));
  call.num_pages = static_cast<std::int64_t>(key_pages.shape(0));
  call.page_tokens = static_cast<std::int64_t>(key_pages.shape(1));
  call.num_heads = static_cast<int>(query.shape(1));
  call.num_kv_heads = static_cast<int>(key_pages.shape(2));
  call.head_dim = static_cast<int>(head_dim);
  call.scale = scale;
  if (window_left_tokens) {
    require(*window_left_tokens >= 0 && *window_left_tokens < std::numeric_limits<int>::max(),
            "window_left_tokens must not be negative");
    call.window_tokens = *window_left_tokens + 1;
  }
  if (log_sum_exp) {
    require(log_sum_exp->shape(0) == query.shape(0) && log_sum_exp->shape(1) == query.shape(1),
            "log_sum_exp must have one number per token and head of query");
    require(has_stride(*log_sum_exp, 1, 1), "the heads of log_sum_exp must be contiguous");
    call.log_sum_exp = log_sum_exp->data();
    call.log_sum_exp_token_stride = log_sum_exp->stride(0);
  }
  return call;
}

std::unique_ptr<PackedWeight> allocate_weight(CpuKernels& self, WeightFormat format, std::size_t num_columns,
                                              std::size_t depth) {
  constexpr std::size_t kLargest = std::numeric_limits<int>::max();
  require_linear(num_columns <= kLargest && depth <= kLargest, "the weight is too large");
  return std::make_unique<PackedWeight>(format, static_cast<int>(num_columns), static_cast<int>(depth),
                                        self.set().linear.columns_per_panel, self.panel_memory());
}

void require_packed(const CpuKernels& self, const PackedWeight& weight) {
  require_linear(weight.columns_per_panel() == self.set().linear.columns_per_panel,
                 "weight must be packed by these kernels");
}

std::vector<std::string> quantizations(const CpuKernels&) {
  std::vector<std::string> names;
  for (const StoredQuantization& stored : stored_quantizations()) names.emplace_back(stored.name);
  return names;
}

// A name of its own, because what a binding forwards to has the same.
namespace bound {

void attend(CpuKernels& self, const Heads& query, const Pages& key_pages, const Pages& value_pages,
            const Table& page_table, const RowInts& begins, const RowInts& lengths,
            const MutableHeads& output, float scale, std::optional<int> window_left_tokens,
            const std::optional<MutableMatrix>& log_sum_exp) {
  const AttentionCall call = describe_call(query, key_pages, value_pages, page_table, begins, lengths, output,
                                           scale, window_left_tokens, log_sum_exp);
  const nb::gil_scoped_release unlocked;
  self.attention().attend(call, self.pool());
}

std::unique_ptr<PackedWeight> pack(CpuKernels& self, const Matrix& weight) {
  require_linear(has_stride(weight, 1, 1), "the last axis must be contiguous");
  auto packed = allocate_weight(self, WeightFormat::kFloat32, weight.shape(0), weight.shape(1));
  const nb::gil_scoped_release unlocked;
  kernels::pack(self.pool(), view(weight), *packed);
  self.count_packed(*packed);
  return packed;
}

std::unique_ptr<PackedWeight> pack_blocks(CpuKernels& self, const BlockRows& blocks,
                                          std::string_view quantization) {
  const StoredQuantization& stored = find_stored_quantization(quantization);
  require_linear(has_stride(blocks, 1, 1), "the last axis must be contiguous");
  require_linear(blocks.shape(1) % static_cast<std::size_t>(stored.block_bytes) == 0,
                 "the last axis must be whole blocks");
  const std::size_t num_blocks = blocks.shape(1) / static_cast<std::size_t>(stored.block_bytes);
  auto packed = allocate_weight(self, stored.format, blocks.shape(0),
                                num_blocks * static_cast<std::size_t>(stored.weights_per_block));
  const nb::gil_scoped_release unlocked;
  kernels::pack_blocks(self.pool(), {blocks.data(), blocks.stride(0)}, stored, *packed);
  self.count_packed(*packed);
  return packed;
}

void gather_rows(CpuKernels& self, const PackedWeight& weight, const RowIds& rows,
                 const MutableMatrix& output) {
  require_packed(self, weight);
  require_linear(
      output.shape(0) == rows.shape(0) && output.shape(1) == static_cast<std::size_t>(weight.depth()),
      "output must have one row of the weight's depth per row id");
  require_linear(has_stride(output, 1, 1), "the last axis must be contiguous");
  for (std::size_t i = 0; i < rows.shape(0); ++i) {
    require_linear(rows(i) >= 0 && rows(i) < weight.num_columns(), "row ids must name rows of the weight");
  }
  const nb::gil_scoped_release unlocked;
  kernels::gather_rows(weight, rows.data(), static_cast<int>(rows.shape(0)), view(output));
}

void require_output(const Matrix& input, const PackedWeight& weight, const MutableMatrix& output) {
  require_linear(output.shape(0) == input.shape(0), "output must have input's rows");
  require_linear(output.shape(1) == static_cast<std::size_t>(weight.num_columns()),
                 "output must have weight's rows as columns");
  require_linear(has_stride(input, 1, 1) && has_stride(output, 1, 1), "the last axis must be contiguous");
}

void multiply(CpuKernels& self, const Matrix& input, const PackedWeight& weight,
              const MutableMatrix& output) {
  require_packed(self, weight);
  require_linear(input.shape(1) == static_cast<std::size_t>(weight.depth()),
                 "input and weight must have one depth");
  require_output(input, weight, output);
  const nb::gil_scoped_release unlocked;
  kernels::multiply(self.pool(), self.set().linear, view(input), static_cast<int>(input.shape(0)), weight,
                    view(output));
}

void gated_network(CpuKernels& self, GateCore multiply_gate, const Matrix& input, const PackedWeight& gate,
                   const PackedWeight& up, const PackedWeight& down, const MutableMatrix& output) {
  for (const PackedWeight* weight : {&gate, &up, &down}) require_packed(self, *weight);
  require_linear(input.shape(1) == static_cast<std::size_t>(gate.depth()),
                 "input and gate must have one depth");
  require_linear(up.num_columns() == gate.num_columns() && up.depth() == gate.depth(),
                 "gate and up must have one shape");
  require_linear(down.depth() == gate.num_columns(), "down must be as deep as gate has rows");
  require_output(input, down, output);
  const nb::gil_scoped_release unlocked;
  kernels::gated_network(self.pool(), self.set().linear, {multiply_gate, gate, up, down}, view(input),
                         static_cast<int>(input.shape(0)), self.scratch(), view(output));
}

void silu_network(CpuKernels& self, const Matrix& input, const PackedWeight& gate, const PackedWeight& up,
                  const PackedWeight& down, const MutableMatrix& output) {
  gated_network(self, self.set().silu_multiply, input, gate, up, down, output);
}

void gelu_tanh_network(CpuKernels& self, const Matrix& input, const PackedWeight& gate,
                       const PackedWeight& up, const PackedWeight& down, const MutableMatrix& output) {
  gated_network(self, self.set().gelu_tanh_multiply, input, gate, up, down, output);
}

}  // namespace bound

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const InstructionSet& set : runnable_instruction_sets()) names.emplace_back(set.name);
  return names;
}

}  // namespace
}  // namespace pdmesh::kernels

NB_MODULE(_native, module) {
  using pdmesh::kernels::CpuKernels;
  using pdmesh::kernels::PackedWeight;
  module.doc() = "Native CPU kernels of model_runtime.";
  nb::class_<PackedWeight>(module, "PackedWeight",
                           "A weight [num_columns, depth] in the layout of one instruction set.")
      .def_prop_ro("num_columns", &PackedWeight::num_columns)
      .def_prop_ro("depth", &PackedWeight::depth)
      .def_prop_ro("num_bytes", &PackedWeight::num_bytes);
  nb::class_<CpuKernels> kernels(module, "CpuKernels",
                                 "Float32 kernels with threads of their own; one call at a time.");
  kernels
      .def(nb::init<int, std::string_view>(), "num_threads"_a, "instruction_set"_a = "",
           "The calling thread counts as one of num_threads; an empty instruction_set takes the best.")
      .def_prop_ro("num_threads", &CpuKernels::num_threads)
      .def_prop_ro("instruction_set", &CpuKernels::instruction_set)
      .def_prop_ro("quantizations", &pdmesh::kernels::quantizations, "What pack_blocks accepts.")
      .def_prop_ro("num_packed_bytes", &CpuKernels::num_packed_bytes,
                   "Memory of all weights packed by these kernels.")
      .def("attend", &pdmesh::kernels::bound::attend, "query"_a.noconvert(), "key_pages"_a.noconvert(),
           "value_pages"_a.noconvert(), "page_table"_a.noconvert(), "begins"_a.noconvert(),
           "lengths"_a.noconvert(), "output"_a.noconvert(), "scale"_a, "window_left_tokens"_a = nb::none(),
           "log_sum_exp"_a.noconvert() = nb::none(),
           "query, output float32[num_tokens, num_heads, head_dim]; pages float32[num_pages, page_tokens, "
           "num_kv_heads, head_dim]; page_table int32[num_rows, max_pages]; begins, lengths int32[num_rows]. "
           "window_left_tokens: tokens before its own that a query sees, None for all. log_sum_exp "
           "float32[num_tokens, num_heads]: what the scores of a query come to; with it pages may be absent, "
           "-1.")
      .def("pack", &pdmesh::kernels::bound::pack, "weight"_a.noconvert(),
           "weight float32[columns, depth] in the layout that multiply and gather_rows of this instruction "
           "set read.")
      .def("pack_blocks", &pdmesh::kernels::bound::pack_blocks, "blocks"_a.noconvert(), "quantization"_a,
           "blocks uint8[columns, bytes] of a GGUF quantization, kept quantised; products are those of the "
           "float32 weight that the blocks stand for, bit for bit.")
      .def("gather_rows", &pdmesh::kernels::bound::gather_rows, "weight"_a.noconvert(), "rows"_a.noconvert(),
           "output"_a.noconvert(),
           "output float32[num_rows, depth] = rows int64[num_rows] of a packed weight.")
      .def("multiply", &pdmesh::kernels::bound::multiply, "input"_a.noconvert(), "weight"_a.noconvert(),
           "output"_a.noconvert(),
           "output float32[rows, columns] = input [rows, depth] times the transpose of a packed weight.")
      .def("silu_network", &pdmesh::kernels::bound::silu_network, "input"_a.noconvert(), "gate"_a.noconvert(),
           "up"_a.noconvert(), "down"_a.noconvert(), "output"_a.noconvert(),
           "output float32[rows, columns] = down(silu(gate) * up) of packed weights.")
      .def("gelu_tanh_network", &pdmesh::kernels::bound::gelu_tanh_network, "input"_a.noconvert(),
           "gate"_a.noconvert(), "up"_a.noconvert(), "down"_a.noconvert(), "output"_a.noconvert(),
           "output float32[rows, columns] = down(gelu(gate) * up) of packed weights.");
  pdmesh::kernels::bind_rows(kernels);
  pdmesh::kernels::bind_states(kernels);
  pdmesh::kernels::bind_selection(kernels);
  module.def("instruction_sets", &pdmesh::kernels::instruction_sets, "What this CPU can run, best first.");
}
