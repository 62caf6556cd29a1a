// One column's share of a record of quantised weights: where its scales, minima and codes lie.
//
// For packing and for reading single columns; products read whole records. Must not know files or threads.
#pragma once

#include <cstddef>

#include "stored_blocks.h"
#include "weight_format.h"

namespace pdmesh::kernels {

struct RecordColumn {
  BlockLayout layout;
  int columns_per_panel;
  int column;

  void store(const PlainBlock& block, std::byte* record) const;
  PlainBlock load(const std::byte* record) const;

 private:
  // Offsets from the record in bytes.
  int scale(int index) const;
  int minimum(int index) const;
  int word(int depth) const;  // holds the codes of kCodesPerWord depths
  int code(int depth) const;
};

}  // namespace pdmesh::kernels
