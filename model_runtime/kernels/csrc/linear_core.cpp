// Compiled once per instruction set; PDMESH_LANES floats fill one vector register.
//
// Every output element is a chain of additions over each kDepthPerStep of the depth, and the chains are added
// in order, whatever the rows and columns around it: a row's result does not depend on the batch it is
// computed in.
#include "linear_core.h"

#include <algorithm>

#include "lanes.h"

namespace pdmesh::kernels::PDMESH_VARIANT {
namespace {

// The block of sums that the registers hold next to one row of the panel and one input element.
constexpr int kRowsPerBlock = kLanes == 16 ? 8 : 4;
constexpr int kVectorsPerPanel = kLanes == 4 ? 2 : 3;
constexpr int kColumnsPerPanel = kVectorsPerPanel * kLanes;

// So much of a panel stays in the nearest cache while all rows meet it. Short chains also round less than one
// long one.
constexpr int kDepthPerStep = 128;

constexpr int kFloatsPerCacheLine = 16;

// How far ahead of its use a panel is fetched: memory answers in the time of a few hundred multiplications.
constexpr int kPrefetchFloats = 2048;

// Adds the depths [begin, end) to the block at `row`, which need not be set before the first.
template <int kRows>
void multiply_block(const PanelProduct& product, int row, int begin, int end) {
  const float* input = product.input + row * product.input_stride;
  float* output = product.output + row * product.output_stride;
  Vec sums[kRows][kVectorsPerPanel] = {};
  const float* panel = product.panel + static_cast<std::int64_t>(begin) * kColumnsPerPanel;
  for (int k = begin; k < end; ++k, panel += kColumnsPerPanel) {
    Vec weights[kVectorsPerPanel];
#pragma GCC unroll 3
    for (int v = 0; v < kVectorsPerPanel; ++v) {
      weights[v] = load(panel + v * kLanes);
      __builtin_prefetch(panel + kPrefetchFloats + v * kLanes);
    }
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const float x = input[m * product.input_stride + k];
#pragma GCC unroll 3
      for (int v = 0; v < kVectorsPerPanel; ++v) sums[m][v] += x * weights[v];
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

template <int kRows>
void multiply_last_rows(const PanelProduct& product, int row, int begin, int end) {
  if (product.num_rows - row == kRows) {
    multiply_block<kRows>(product, row, begin, end);
  } else if constexpr (kRows > 1) {
    multiply_last_rows<kRows - 1>(product, row, begin, end);
  }
}

// Rows lie far apart and are read a short run at a time, which the hardware does not foresee.
void prefetch_rows(const PanelProduct& product, int row, int begin, int end) {
  for (const int last = std::min(row + kRowsPerBlock, product.num_rows); row < last; ++row) {
    const float* input = product.input + row * product.input_stride;
    for (int k = begin; k < end; k += kFloatsPerCacheLine) __builtin_prefetch(input + k);
  }
}

void multiply_whole_panel(const PanelProduct& product) {
  for (int begin = 0; begin < product.depth; begin += kDepthPerStep) {
    const int end = std::min(begin + kDepthPerStep, product.depth);
    int row = 0;
    for (; row + kRowsPerBlock <= product.num_rows; row += kRowsPerBlock) {
      prefetch_rows(product, row + kRowsPerBlock, begin, end);
      multiply_block<kRowsPerBlock>(product, row, begin, end);
    }
    multiply_last_rows<kRowsPerBlock - 1>(product, row, begin, end);
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
