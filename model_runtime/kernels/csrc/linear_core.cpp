// Compiled once per instruction set; PDMESH_LANES floats fill one vector register.
//
// Every output element is accumulated per lane over the depth and then summed over lanes by one tree,
// whatever the number of rows and columns around it: a row's result does not depend on the batch it is
// computed in.
#include "linear_core.h"

#include <algorithm>

#include "lanes.h"

namespace pdmesh::kernels::PDMESH_VARIANT {
namespace {

// The block of sums that the registers hold next to the operands.
constexpr int kRowsPerBlock = kLanes == 16 ? 6 : 4;
constexpr int kColumnsPerBlock = kLanes == 16 ? 4 : 2;
constexpr int kRowsPerSum = kLanes / 4;
constexpr int kFewRows = 48;

Vec load_tail(const float* from, int count) {
  Vec result = {};
  for (int i = 0; i < count; ++i) result[i] = from[i];
  return result;
}

template <int kRows, int kColumns>
void multiply_block(const LinearTile& tile, int row, int column) {
  const float* input = tile.input + row * tile.input_stride;
  const float* weight = tile.weight + column * tile.weight_stride;
  Vec sums[kRows][kColumns] = {};
  int k = 0;
  for (; k + kLanes <= tile.depth; k += kLanes) {
    Vec w[kColumns];
#pragma GCC unroll 4
    for (int n = 0; n < kColumns; ++n) {
      w[n] = load(weight + n * tile.weight_stride + k);
      __builtin_prefetch(weight + (kColumns + n) * tile.weight_stride + k);
    }
#pragma GCC unroll 6
    for (int m = 0; m < kRows; ++m) {
      const Vec x = load(input + m * tile.input_stride + k);
#pragma GCC unroll 4
      for (int n = 0; n < kColumns; ++n) sums[m][n] += x * w[n];
    }
  }
  if (const int count = tile.depth - k; count > 0) {
    for (int m = 0; m < kRows; ++m) {
      const Vec x = load_tail(input + m * tile.input_stride + k, count);
      for (int n = 0; n < kColumns; ++n)
        sums[m][n] += x * load_tail(weight + n * tile.weight_stride + k, count);
    }
  }
  // One tree per element; elements that share a call of sum_lanes do not touch one another.
#pragma GCC unroll 6
  for (int first = 0; first < kRows; first += kRowsPerSum) {
    Vec parts[kLanes] = {};
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if (first + i / 4 < kRows && i % 4 < kColumns) parts[i] = sums[first + i / 4][i % 4];
    }
    const Vec totals = sum_lanes(parts);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      const int m = first + i / 4;
      if (m < kRows && i % 4 < kColumns) {
        tile.output[(row + m) * tile.output_stride + column + i % 4] = totals[i];
      }
    }
  }
}

template <int kColumns>
void multiply_last_rows(const LinearTile& tile, int row, int column) {
  switch (tile.num_rows - row) {
    case 1:
      return multiply_block<1, kColumns>(tile, row, column);
    case 2:
      return multiply_block<2, kColumns>(tile, row, column);
    case 3:
      return multiply_block<3, kColumns>(tile, row, column);
    case 4:
      return multiply_block<4, kColumns>(tile, row, column);
    case 5:
      return multiply_block<5, kColumns>(tile, row, column);
    default:
      return;
  }
}

template <int kColumns>
void multiply_columns(const LinearTile& tile, int row_begin, int row_end, int column) {
  int row = row_begin;
  for (; row + kRowsPerBlock <= row_end; row += kRowsPerBlock) {
    multiply_block<kRowsPerBlock, kColumns>(tile, row, column);
  }
  if (row < row_end) multiply_last_rows<kColumns>(tile, row, column);
}

// Few rows: each weight is read from memory once and meets all rows while it is in the nearest cache. Many
// rows: a group of rows stays there instead, and the tile's weights come from the second level.
void multiply_group(const LinearTile& tile, int row_begin, int row_end) {
  int column = 0;
  for (; column + kColumnsPerBlock <= tile.num_columns; column += kColumnsPerBlock) {
    multiply_columns<kColumnsPerBlock>(tile, row_begin, row_end, column);
  }
  for (; column < tile.num_columns; ++column) multiply_columns<1>(tile, row_begin, row_end, column);
}

}  // namespace

void multiply_tile(const LinearTile& tile) {
  const int rows_per_group = tile.num_rows <= kFewRows ? kFewRows : kRowsPerBlock;
  for (int row = 0; row < tile.num_rows; row += rows_per_group) {
    multiply_group(tile, row, std::min(row + rows_per_group, tile.num_rows));
  }
}

}  // namespace pdmesh::kernels::PDMESH_VARIANT
