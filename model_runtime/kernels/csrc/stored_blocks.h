// The quantised blocks of a GGUF file, taken apart one by one when a weight is packed.
//
// Must not know panels or threads.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "weight_format.h"

namespace pdmesh::kernels {

// kBlockDepth weights of one column: code * scale + minimum, a scale for each weights_per_scale of the packed
// format. Every product of a code and a scale is exact in float32.
struct PlainBlock {
  std::uint8_t codes[kBlockDepth] = {};  // two's complement where the packed format is signed
  float scales[2] = {};
  float minima[2] = {};
};

struct StoredQuantization {
  std::string_view name;  // as in ggml
  WeightFormat format;    // that packs it without loss
  int weights_per_block;  // a multiple of kBlockDepth
  int block_bytes;
  // Part `part` of a stored block: its weights [part * kBlockDepth, (part + 1) * kBlockDepth).
  PlainBlock (*read)(const std::uint8_t* block, int part);

  std::int64_t row_bytes(std::int64_t depth) const { return depth / weights_per_block * block_bytes; }
  PlainBlock read_part(const std::uint8_t* row, int index) const {
    const int parts_per_block = weights_per_block / kBlockDepth;
    return read(row + static_cast<std::int64_t>(index / parts_per_block) * block_bytes,
                index % parts_per_block);
  }
};

const std::vector<StoredQuantization>& stored_quantizations();

// Throws std::invalid_argument naming those there are.
const StoredQuantization& find_stored_quantization(std::string_view name);

}  // namespace pdmesh::kernels
