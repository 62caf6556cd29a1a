// Compiled once per instruction set; PDMESH_LANES floats fill one vector register.
//
// Every output element is a chain of additions over each kDepthPerStep of the depth, and the chains are added
// in order, whatever the rows and columns around it: a row's result does not depend on the batch it is
// computed in. Quantised weights become float32 with one rounding before they meet the input, in the same
// chains.
#include "linear_core.h"

#include <algorithm>
#include <type_traits>

#include "lanes.h"

namespace pdmesh::kernels::PDMESH_VARIANT {
namespace {

// The block of sums that the registers hold next to one row of the panel and one input element.
constexpr int kRowsPerBlock = kLanes == 16 ? 8 : 4;
constexpr int kVectorsPerPanel = kLanes == 4 ? 2 : 3;
constexpr int kColumnsPerPanel = kVectorsPerPanel * kLanes;
static_assert(kColumnsPerPanel <= kMostColumnsPerPanel);

// So much of a panel stays in the nearest cache while all rows meet it. Short chains also round less than one
// long one.
constexpr int kDepthPerStep = 128;
static_assert(kDepthPerStep % kBlockDepth == 0);

constexpr int kFloatsPerCacheLine = 16;
constexpr int kLinesPerDepth = (kColumnsPerPanel + kFloatsPerCacheLine - 1) / kFloatsPerCacheLine;
constexpr int kBytesPerCacheLine = 64;

// How far ahead of its use a panel is fetched: memory answers in the time of a few hundred multiplications.
constexpr int kPrefetchFloats = 2048;
constexpr int kPrefetchRecords = 4;

// ---- one step of a panel, in float32 ----

// Weights to fetch from memory while a block is computed: at every depth `kLines` cache lines from `next` on,
// which then moves by `floats_per_depth`.
template <int kLines>
struct Ahead {
  const float* next = nullptr;
  int floats_per_depth = 0;

  void fetch() {
    for (int line = 0; line < kLines; ++line) __builtin_prefetch(next + line * kFloatsPerCacheLine);
    if constexpr (kLines > 0) next += floats_per_depth;
  }
};

// Adds the depths [begin, end) to the block at `row`, which need not be set before the first. `weights` is
// the panel from `begin` on.
template <int kRows, int kLines>
void multiply_block(const PanelProduct& product, const float* weights, int row, int begin, int end,
                    Ahead<kLines>& ahead) {
  const float* input = product.input + row * product.input_stride;
  float* output = product.output + row * product.output_stride;
  Vec sums[kRows][kVectorsPerPanel] = {};
  for (int k = begin; k < end; ++k, weights += kColumnsPerPanel) {
    Vec depth[kVectorsPerPanel];
#pragma GCC unroll 3
    for (int v = 0; v < kVectorsPerPanel; ++v) depth[v] = load(weights + v * kLanes);
    ahead.fetch();
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const float x = input[m * product.input_stride + k];
#pragma GCC unroll 3
      for (int v = 0; v < kVectorsPerPanel; ++v) sums[m][v] += x * depth[v];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 3
    for (int v = 0; v < kVectorsPerPanel; ++v) {
      float* to = output + m * product.output_stride + v * kLanes;
      store(to, begin > 0 ? load(to) + sums[m][v] : sums[m][v]);
    }
  }
}

template <int kRows, int kLines>
void multiply_last_rows(const PanelProduct& product, const float* weights, int row, int begin, int end,
                        Ahead<kLines>& ahead) {
  if (product.num_rows - row == kRows) {
    multiply_block<kRows>(product, weights, row, begin, end, ahead);
  } else if constexpr (kRows > 1) {
    multiply_last_rows<kRows - 1>(product, weights, row, begin, end, ahead);
  }
}

// Rows lie far apart and are read a short run at a time, which the hardware does not foresee.
void prefetch_rows(const PanelProduct& product, int row, int begin, int end) {
  for (const int last = std::min(row + kRowsPerBlock, product.num_rows); row < last; ++row) {
    const float* input = product.input + row * product.input_stride;
    for (int k = begin; k < end; k += kFloatsPerCacheLine) __builtin_prefetch(input + k);
  }
}

template <int kLines>
void multiply_step(const PanelProduct& product, const float* weights, int begin, int end,
                   Ahead<kLines> ahead) {
  int row = 0;
  for (; row + kRowsPerBlock <= product.num_rows; row += kRowsPerBlock) {
    prefetch_rows(product, row + kRowsPerBlock, begin, end);
    multiply_block<kRowsPerBlock>(product, weights, row, begin, end, ahead);
  }
  multiply_last_rows<kRowsPerBlock - 1>(product, weights, row, begin, end, ahead);
}

// Memory is kept busy all the time: one block fetches what it will soon need itself, several fetch an equal
// part each of the next step.
void multiply_float_panel(const PanelProduct& product) {
  const auto* weights = reinterpret_cast<const float*>(product.panel);
  const int num_blocks = (product.num_rows + kRowsPerBlock - 1) / kRowsPerBlock;
  for (int begin = 0; begin < product.depth; begin += kDepthPerStep) {
    const int end = std::min(begin + kDepthPerStep, product.depth);
    const float* next_step = weights + static_cast<std::int64_t>(end - begin) * kColumnsPerPanel;
    if (num_blocks == 1) {
      multiply_step<kLinesPerDepth>(product, weights, begin, end,
                                    {weights + kPrefetchFloats, kColumnsPerPanel});
    } else {
      multiply_step<std::max(1, kLinesPerDepth - 1)>(product, weights, begin, end,
                                                     {next_step, kColumnsPerPanel / num_blocks});
    }
    weights = next_step;
  }
}

// ---- quantised weights ----

template <WeightFormat kFormat>
struct Record {
  static constexpr BlockLayout kLayout = block_layout(kFormat);
  static constexpr int kBytes = kLayout.record() * kColumnsPerPanel;

  // Calls visit(k, v, weights) for every depth k of the record in order and every vector v of its columns.
  template <class Visit>
  static inline __attribute__((always_inline)) void visit(const std::byte* record, const Visit& visit) {
    if constexpr (kLayout.code_bits == 4) {
      visit_words(record, visit);
    } else {
      visit_bytes(record, visit);
    }
  }

 private:
  static inline Vec scalars(const std::byte* from, int index) {
    const std::byte* at = from + index * kLanes * kLayout.scale_bytes;
    if constexpr (kLayout.scale_bytes == 2) {
      return load_halves(at);
    } else {
      return load(reinterpret_cast<const float*>(at));
    }
  }

  template <class Visit>
  static inline __attribute__((always_inline)) void visit_words(const std::byte* record, const Visit& visit) {
    Vec scales[kVectorsPerPanel];
    Vec minima[kVectorsPerPanel];
    for (int v = 0; v < kVectorsPerPanel; ++v) {
      scales[v] = scalars(record, v);
      minima[v] = scalars(record + kLayout.minima() * kColumnsPerPanel, v);
    }
    const std::byte* codes = record + kLayout.codes() * kColumnsPerPanel;
    for (int first = 0; first < kBlockDepth; first += kCodesPerWord) {
      IntVec words[kVectorsPerPanel];
#pragma GCC unroll 3
      for (int v = 0; v < kVectorsPerPanel; ++v, codes += sizeof(IntVec)) words[v] = load_ints(codes);
#pragma GCC unroll 8
      for (int i = 0; i < kCodesPerWord; ++i) {
#pragma GCC unroll 3
        for (int v = 0; v < kVectorsPerPanel; ++v) {
          visit(first + i, v, nibble_to_float(words[v] >> 4 * i) * scales[v] + minima[v]);
        }
      }
    }
  }

  template <class Visit>
  static inline __attribute__((always_inline)) void visit_bytes(const std::byte* record, const Visit& visit) {
    const std::byte* codes = record + kLayout.codes() * kColumnsPerPanel;
    for (int part = 0; part < kLayout.num_scales(); ++part) {
      Vec scales[kVectorsPerPanel];
      for (int v = 0; v < kVectorsPerPanel; ++v) scales[v] = scalars(record, part * kVectorsPerPanel + v);
#pragma GCC unroll 4
      for (int i = 0; i < kLayout.weights_per_scale; ++i) {
#pragma GCC unroll 3
        for (int v = 0; v < kVectorsPerPanel; ++v, codes += kLanes) {
          visit(part * kLayout.weights_per_scale + i, v, load_bytes(codes) * scales[v]);
        }
      }
    }
  }
};

template <int kBytes>
void prefetch_record(const std::byte* record) {
  for (int offset = 0; offset < kBytes; offset += kBytesPerCacheLine) {
    __builtin_prefetch(record + kPrefetchRecords * kBytes + offset);
  }
}

// One row uses each weight once, so it is used where it is made.
template <WeightFormat kFormat>
void multiply_row(const PanelProduct& product) {
  using Blocks = Record<kFormat>;
  const std::byte* record = product.panel;
  Vec totals[kVectorsPerPanel] = {};
  for (int begin = 0; begin < product.depth; begin += kDepthPerStep) {
    const int end = std::min(begin + kDepthPerStep, product.depth);
    Vec sums[kVectorsPerPanel] = {};
    for (int first = begin; first < end; first += kBlockDepth, record += Blocks::kBytes) {
      prefetch_record<Blocks::kBytes>(record);
      const float* input = product.input + first;
      Blocks::visit(record, [&](int k, int v, Vec weights) { sums[v] += input[k] * weights; });
    }
    for (int v = 0; v < kVectorsPerPanel; ++v) totals[v] = begin > 0 ? totals[v] + sums[v] : sums[v];
  }
  for (int v = 0; v < kVectorsPerPanel; ++v) store(product.output + v * kLanes, totals[v]);
}

// Several rows share a step of the panel in float32, which stays in the nearest cache.
template <WeightFormat kFormat>
void multiply_rows(const PanelProduct& product) {
  using Blocks = Record<kFormat>;
  alignas(64) float weights[kDepthPerStep * kColumnsPerPanel];
  const std::byte* record = product.panel;
  for (int begin = 0; begin < product.depth; begin += kDepthPerStep) {
    const int end = std::min(begin + kDepthPerStep, product.depth);
    for (float* to = weights; to < weights + (end - begin) * kColumnsPerPanel;
         to += kBlockDepth * kColumnsPerPanel, record += Blocks::kBytes) {
      prefetch_record<Blocks::kBytes>(record);
      Blocks::visit(record,
                    [&](int k, int v, Vec part) { store(to + k * kColumnsPerPanel + v * kLanes, part); });
    }
    multiply_step<0>(product, weights, begin, end, {});
  }
}

template <WeightFormat kFormat>
void multiply_blocks(const PanelProduct& product) {
  if (product.num_rows == 1) {
    multiply_row<kFormat>(product);
  } else {
    multiply_rows<kFormat>(product);
  }
}

void multiply_whole_panel(const PanelProduct& product) {
  switch (product.format) {
    case WeightFormat::kFloat32:
      return multiply_float_panel(product);
    case WeightFormat::kNibblesHalf:
      return multiply_blocks<WeightFormat::kNibblesHalf>(product);
    case WeightFormat::kNibblesFloat:
      return multiply_blocks<WeightFormat::kNibblesFloat>(product);
    case WeightFormat::kBytesHalf:
      return multiply_blocks<WeightFormat::kBytesHalf>(product);
    case WeightFormat::kBytesFloat:
      return multiply_blocks<WeightFormat::kBytesFloat>(product);
  }
}

// Padding has no place in the output: the panel is computed whole beside it.
void multiply_partial_panel(const PanelProduct& product) {
  float columns[kRowsPerPiece * kColumnsPerPanel];
  PanelProduct whole = product;
  whole.output = columns;
  whole.output_stride = kColumnsPerPanel;
  multiply_whole_panel(whole);
  for (int row = 0; row < product.num_rows; ++row) {
    std::copy_n(columns + row * kColumnsPerPanel, product.num_columns,
                product.output + row * product.output_stride);
  }
}

void multiply_panel(const PanelProduct& product) {
  if (product.num_columns == kColumnsPerPanel) {
    multiply_whole_panel(product);
  } else {
    multiply_partial_panel(product);
  }
}

}  // namespace

LinearCore linear_core() {
  return {kColumnsPerPanel, &multiply_panel};
}

}  // namespace pdmesh::kernels::PDMESH_VARIANT
