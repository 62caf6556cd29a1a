#include "linear.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <stdexcept>
#include <string>

#include "block_record.h"

namespace pdmesh::kernels {
namespace {

// Below this many weights handing a part to another thread costs more than it saves.
constexpr std::int64_t kMinWeightsToShare = 16384;
// Few enough that a turn is worth streaming, many enough that the threads end together.
constexpr int kTurnsPerThread = 8;

void for_panels(WorkerPool& pool, int num_panels, const std::function<void(int)>& run) {
  std::atomic<int> next_panel{0};
  pool.run_on_all([&](int) {
    for (int panel = next_panel++; panel < num_panels; panel = next_panel++) run(panel);
  });
}

// Some rows of the input and one panel of a weight.
struct Piece {
  int panel = 0;
  int first_row = 0;
  int num_rows = 0;
  int first_column = 0;
  int num_columns = 0;

  PanelProduct product(MatrixView input, const PackedWeight& weight, float* output,
                       std::int64_t output_stride) const {
    return {.input = input.data + first_row * input.stride,
            .input_stride = input.stride,
            .panel = weight.panel(panel),
            .format = weight.format(),
            .output = output,
            .output_stride = output_stride,
            .num_rows = num_rows,
            .num_columns = num_columns,
            .depth = weight.depth()};
  }
};

// Calls run for pieces that together cover the product, on all threads if it is worth it. Pieces of one panel
// follow one another: it is read from memory once, the input comes from the caches. So do the panels of one
// turn: the end of one fetches the beginning of the next.
template <class Run>
void for_pieces(WorkerPool& pool, const PackedWeight& weight, int num_rows, const Run& run) {
  const int pieces_per_panel = (num_rows + kRowsPerPiece - 1) / kRowsPerPiece;
  const int num_pieces = weight.num_panels() * pieces_per_panel;
  const int pieces_per_turn =
      std::max(1, weight.num_panels() / (kTurnsPerThread * pool.num_threads())) * pieces_per_panel;
  std::atomic<int> next_turn{0};
  const auto run_piece = [&](int index) {
    Piece piece;
    piece.panel = index / pieces_per_panel;
    piece.first_row = index % pieces_per_panel * kRowsPerPiece;
    piece.num_rows = std::min(kRowsPerPiece, num_rows - piece.first_row);
    piece.first_column = piece.panel * weight.columns_per_panel();
    piece.num_columns = std::min(weight.columns_per_panel(), weight.num_columns() - piece.first_column);
    run(piece);
  };
  const auto drain = [&](int) {
    for (int first = pieces_per_turn * next_turn++; first < num_pieces;
         first = pieces_per_turn * next_turn++) {
      for (int index = first; index < std::min(first + pieces_per_turn, num_pieces); ++index)
        run_piece(index);
    }
  };
  if (static_cast<std::int64_t>(weight.num_columns()) * weight.depth() < kMinWeightsToShare) {
    drain(0);
  } else {
    pool.run_on_all(drain);
  }
}

// ---- float32 panels ----

void pack_panel(MatrixView weight, PackedWeight& packed, int panel) {
  const int columns = packed.columns_per_panel();
  float* to = reinterpret_cast<float*>(packed.panel(panel));
  for (int n = 0; n < columns; ++n) {
    const int column = panel * columns + n;
    const bool is_padding = column >= packed.num_columns();
    const float* from = is_padding ? nullptr : weight.data + column * weight.stride;
    for (int k = 0; k < packed.depth(); ++k) {
      to[static_cast<std::int64_t>(k) * columns + n] = is_padding ? 0.0F : from[k];
    }
  }
}

void gather_column(const PackedWeight& weight, const float* panel, int n, float* to) {
  for (int k = 0; k < weight.depth(); ++k) {
    to[k] = panel[static_cast<std::int64_t>(k) * weight.columns_per_panel() + n];
  }
}

// ---- panels of blocks ----

void require_finite(const PlainBlock& block, int column) {
  for (int i = 0; i < 2; ++i) {
    if (!std::isfinite(block.scales[i]) || !std::isfinite(block.minima[i])) {
      throw std::invalid_argument("linear: row " + std::to_string(column) +
                                  " of the weight has a scale that is not finite");
    }
  }
}

void pack_panel_of_blocks(BlockRowsView rows, const StoredQuantization& stored, PackedWeight& packed,
                          int panel) {
  const BlockLayout layout = block_layout(packed.format());
  const int columns = packed.columns_per_panel();
  for (int n = 0; n < columns; ++n) {
    const int column = panel * columns + n;
    for (int index = 0; index < packed.depth() / kBlockDepth; ++index) {
      PlainBlock block;
      if (column < packed.num_columns()) {
        block = stored.read_part(rows.data + column * rows.stride, index);
        require_finite(block, column);
      }
      const RecordColumn place{layout, columns, n};
      place.store(block, packed.panel(panel) + static_cast<std::int64_t>(index) * layout.record() * columns);
    }
  }
}

void gather_column_of_blocks(const PackedWeight& weight, const std::byte* panel, int n, float* to) {
  const BlockLayout layout = block_layout(weight.format());
  const RecordColumn place{layout, weight.columns_per_panel(), n};
  const bool is_signed = layout.code_bits == 8;
  for (int first = 0; first < weight.depth(); first += kBlockDepth) {
    const PlainBlock block = place.load(panel);
    for (int k = 0; k < kBlockDepth; ++k) {
      const int code = is_signed ? static_cast<std::int8_t>(block.codes[k]) : block.codes[k];
      const int scale = k < layout.weights_per_scale ? 0 : 1;
      to[first + k] = static_cast<float>(code) * block.scales[scale] + block.minima[scale];
    }
    panel += layout.record() * weight.columns_per_panel();
  }
}

}  // namespace

PackedWeight::PackedWeight(WeightFormat format, int num_columns, int depth, int columns_per_panel,
                           PanelMemory& memory)
    : format_(format), num_columns_(num_columns), depth_(depth), columns_per_panel_(columns_per_panel) {
  panels_ = memory.allocate(num_bytes());
}

std::int64_t PackedWeight::panel_bytes() const {
  const auto columns = static_cast<std::int64_t>(columns_per_panel_);
  if (format_ == WeightFormat::kFloat32) return columns * depth_ * static_cast<std::int64_t>(sizeof(float));
  return columns * (depth_ / kBlockDepth) * block_layout(format_).record();
}

void pack(WorkerPool& pool, MatrixView weight, PackedWeight& packed) {
  for_panels(pool, packed.num_panels(), [&](int panel) { pack_panel(weight, packed, panel); });
}

void pack_blocks(WorkerPool& pool, BlockRowsView rows, const StoredQuantization& stored,
                 PackedWeight& packed) {
  for_panels(pool, packed.num_panels(),
             [&](int panel) { pack_panel_of_blocks(rows, stored, packed, panel); });
}

void gather_rows(const PackedWeight& weight, const std::int64_t* rows, int num_rows,
                 MutableMatrixView output) {
  for (int i = 0; i < num_rows; ++i) {
    const std::byte* panel = weight.panel(static_cast<int>(rows[i] / weight.columns_per_panel()));
    const auto n = static_cast<int>(rows[i] % weight.columns_per_panel());
    float* to = output.data + i * output.stride;
    if (weight.format() == WeightFormat::kFloat32) {
      gather_column(weight, reinterpret_cast<const float*>(panel), n, to);
    } else {
      gather_column_of_blocks(weight, panel, n, to);
    }
  }
}

void multiply(WorkerPool& pool, const LinearCore& core, MatrixView input, int num_rows,
              const PackedWeight& weight, MutableMatrixView output) {
  for_pieces(pool, weight, num_rows, [&](const Piece& piece) {
    float* to = output.data + piece.first_row * output.stride + piece.first_column;
    core.multiply_panel(piece.product(input, weight, to, output.stride));
  });
}

void gated_network(WorkerPool& pool, const LinearCore& core, const GatedNetwork& network, MatrixView input,
                   int num_rows, std::vector<float>& scratch, MutableMatrixView output) {
  const std::int64_t width = network.gate.num_columns();
  scratch.resize(std::max(scratch.size(), static_cast<std::size_t>(num_rows * width)));
  for_pieces(pool, network.gate, num_rows, [&](const Piece& piece) {
    // Both halves of the piece stay in the caches until they have met.
    float products[kRowsPerPiece * 2 * kMostColumnsPerPanel];
    const std::int64_t stride = 2 * static_cast<std::int64_t>(piece.num_columns);
    core.multiply_panel(piece.product(input, network.gate, products, stride));
    core.multiply_panel(piece.product(input, network.up, products + piece.num_columns, stride));
    network.multiply_gate({.input = products,
                           .input_stride = stride,
                           .output = scratch.data() + piece.first_row * width + piece.first_column,
                           .output_stride = width,
                           .num_rows = piece.num_rows,
                           .width = piece.num_columns});
  });
  multiply(pool, core, {scratch.data(), width}, num_rows, network.down, output);
}

}  // namespace pdmesh::kernels
