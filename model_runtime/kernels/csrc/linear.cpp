#include "linear.h"

#include <algorithm>
#include <atomic>

namespace pdmesh::kernels {
namespace {

// Below this many weights handing a part to another thread costs more than it saves.
constexpr std::int64_t kMinWeightsToShare = 16384;

void pack_panel(MatrixView weight, const PackedWeight& packed, int panel, float* to) {
  const int first_column = panel * packed.columns_per_panel;
  for (int n = 0; n < packed.columns_per_panel; ++n) {
    const bool is_padding = first_column + n >= packed.num_columns;
    const float* from = is_padding ? nullptr : weight.data + (first_column + n) * weight.stride;
    for (int k = 0; k < packed.depth; ++k) {
      to[static_cast<std::int64_t>(k) * packed.columns_per_panel + n] = is_padding ? 0.0F : from[k];
    }
  }
}

}  // namespace

void pack(WorkerPool& pool, MatrixView weight, const PackedWeight& packed, float* panels) {
  std::atomic<int> next_panel{0};
  pool.run_on_all([&](int) {
    for (int panel = next_panel++; panel < packed.num_panels(); panel = next_panel++) {
      pack_panel(weight, packed, panel, panels + panel * packed.panel_floats());
    }
  });
}

void gather_rows(const PackedWeight& weight, const std::int64_t* rows, int num_rows,
                 MutableMatrixView output) {
  for (int i = 0; i < num_rows; ++i) {
    const std::int64_t panel = rows[i] / weight.columns_per_panel;
    const float* from = weight.panels + panel * weight.panel_floats() + rows[i] % weight.columns_per_panel;
    float* to = output.data + i * output.stride;
    for (int k = 0; k < weight.depth; ++k) {
      to[k] = from[static_cast<std::int64_t>(k) * weight.columns_per_panel];
    }
  }
}

void multiply(WorkerPool& pool, const LinearCore& core, MatrixView input, int num_rows,
              const PackedWeight& weight, MutableMatrixView output) {
  // Pieces of one panel follow one another: it is read from memory once, the input comes from the caches.
  const int pieces_per_panel = (num_rows + kRowsPerPiece - 1) / kRowsPerPiece;
  const int num_pieces = weight.num_panels() * pieces_per_panel;
  std::atomic<int> next_piece{0};
  const auto drain = [&](int) {
    for (int piece = next_piece++; piece < num_pieces; piece = next_piece++) {
      const int panel = piece / pieces_per_panel;
      const int row = piece % pieces_per_panel * kRowsPerPiece;
      const int column = panel * weight.columns_per_panel;
      PanelProduct product;
      product.input = input.data + row * input.stride;
      product.input_stride = input.stride;
      product.panel = weight.panels + panel * weight.panel_floats();
      product.output = output.data + row * output.stride + column;
      product.output_stride = output.stride;
      product.num_rows = std::min(kRowsPerPiece, num_rows - row);
      product.num_columns = std::min(weight.columns_per_panel, weight.num_columns - column);
      product.depth = weight.depth;
      core.multiply_panel(product);
    }
  };
  if (weight.num_panels() * weight.panel_floats() < kMinWeightsToShare) {
    drain(0);
  } else {
    pool.run_on_all(drain);
  }
}

}  // namespace pdmesh::kernels
