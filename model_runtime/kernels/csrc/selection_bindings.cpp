// Python face of the selection of rows: checks shapes, releases the interpreter lock, forwards.
#include <nanobind/nanobind.h>

#include <atomic>
#include <stdexcept>
#include <string>

#include "cpu_kernels.h"
#include "row_selection.h"
#include "tensor_view.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pdmesh::kernels {
namespace {

void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(std::string("selection: ") + message);
}

void bound_select_rows(CpuKernels& self, const TensorView<const float, 3>& query,
                       const TensorView<const float, 2>& weights, const TensorView<const float, 3>& key_pages,
                       const TensorView<const std::int32_t, 2, true>& page_table,
                       const TensorView<const std::int32_t, 1, true>& begins,
                       const TensorView<const std::int32_t, 1, true>& lengths,
                       const TensorView<std::int32_t, 2, true>& selected) {
  require(has_stride(query, 2, 1) && has_stride(weights, 1, 1) && has_stride(key_pages, 2, 1),
          "the last axis must be contiguous");
  require(weights.shape(0) == query.shape(0) && weights.shape(1) == query.shape(1),
          "weights must have one number per token and head of query");
  require(key_pages.shape(2) == query.shape(2), "query and cache must have one head_dim");
  require(key_pages.shape(1) > 0, "a page must hold at least one token");
  require(selected.shape(0) == query.shape(0) && selected.shape(1) > 0,
          "selected must have a row of at least one position per token");
  require(begins.shape(0) == page_table.shape(0) && lengths.shape(0) == page_table.shape(0),
          "page_table, begins and lengths must have one row count");
  SelectionCall call;
  AttentionCall& attention = call.attention;
  attention.query = query.data();
  attention.query_token_stride = query.stride(0);
  attention.key = key_pages.data();
  attention.key_page_stride = key_pages.stride(0);
  attention.key_token_stride = key_pages.stride(1);
  attention.page_table = page_table.data();
  attention.begins = begins.data();
  attention.lengths = lengths.data();
  attention.num_tokens = static_cast<std::int64_t>(query.shape(0));
  attention.num_rows = static_cast<std::int64_t>(page_table.shape(0));
  attention.max_pages = static_cast<std::int64_t>(page_table.shape(1));
  attention.num_pages = static_cast<std::int64_t>(key_pages.shape(0));
  attention.page_tokens = static_cast<std::int64_t>(key_pages.shape(1));
  attention.num_heads = static_cast<int>(query.shape(1));
  attention.num_kv_heads = 1;
  attention.head_dim = static_cast<int>(query.shape(2));
  call.query_head_stride = query.stride(1);
  call.weights = weights.data();
  call.weight_token_stride = weights.stride(0);
  call.selected = selected.data();
  call.num_selected = static_cast<int>(selected.shape(1));
  const nb::gil_scoped_release unlocked;
  kernels::select_rows(call, self.set().selection, self.pool());
}

// A row is long: each is worth a thread.
void find_largest(CpuKernels& self, const TensorView<const float, 2>& rows,
                  const TensorView<std::int64_t, 1, true>& places) {
  require(places.shape(0) == rows.shape(0), "places must have one number per row");
  if (rows.shape(0) == 0) return;
  require(rows.shape(1) > 0 && has_stride(rows, 1, 1), "rows must be contiguous and not empty");
  const nb::gil_scoped_release unlocked;
  std::atomic<std::size_t> next_row{0};
  self.pool().run_on_all([&](int) {
    for (std::size_t row = next_row++; row < rows.shape(0); row = next_row++) {
      const float* numbers = rows.data() + static_cast<std::int64_t>(row) * rows.stride(0);
      places(row) = self.set().find_largest(numbers, static_cast<int>(rows.shape(1)));
    }
  });
}

}  // namespace

void bind_selection(nb::class_<CpuKernels>& kernels) {
  kernels.def(
      "find_largest", &find_largest, "rows"_a.noconvert(), "places"_a.noconvert(),
      "places int64[num_rows]: where the largest number of each of rows float32[num_rows, width] is.");
  kernels.def("select_rows", &bound_select_rows, "query"_a.noconvert(), "weights"_a.noconvert(),
              "key_pages"_a.noconvert(), "page_table"_a.noconvert(), "begins"_a.noconvert(),
              "lengths"_a.noconvert(), "selected"_a.noconvert(),
              "query float32[num_tokens, num_heads, head_dim]; weights float32[num_tokens, num_heads]; "
              "key_pages float32[num_pages, page_tokens, head_dim]; page_table int32[num_rows, max_pages]; "
              "begins, lengths int32[num_rows]; selected int32[num_tokens, num_selected].");
}

}  // namespace pdmesh::kernels
