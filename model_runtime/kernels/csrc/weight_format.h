// How the columns of a linear layer's weight lie in memory, for whoever packs, reads or sizes them.
//
// A packed weight is panels of adjacent columns. In float32 a panel is [depth, columns_per_panel]. Quantised,
// it is one record per kBlockDepth depths: the columns' scales, their minima where the format has them, then
// the codes; a weight is code * scale + minimum with one rounding, exactly the float32 that the file stands
// for. Scales and minima are [kBlockDepth / weights_per_scale, columns_per_panel]. Codes of four bits are
// unsigned and lie in 32-bit words [kBlockDepth / 8, columns_per_panel], the lowest bits first; codes of
// eight are signed bytes [kBlockDepth, columns_per_panel].
#pragma once

#include <cstdint>

namespace pdmesh::kernels {

enum class WeightFormat : std::uint8_t {
  kFloat32,
  kNibblesHalf,   // four bits, float16 scale and minimum
  kNibblesFloat,  // four bits, float32 scale and minimum
  kBytesHalf,     // eight bits, float16 scale
  kBytesFloat,    // eight bits, float32 scale for each 16 weights
};

inline constexpr int kBlockDepth = 32;
inline constexpr int kCodesPerWord = 8;

struct BlockLayout {
  int code_bits;
  int scale_bytes;
  int weights_per_scale;
  bool has_minimum;

  constexpr int num_scales() const { return kBlockDepth / weights_per_scale; }
  // Offsets and size in bytes per column of a panel.
  constexpr int minima() const { return num_scales() * scale_bytes; }
  constexpr int codes() const { return (has_minimum ? 2 : 1) * num_scales() * scale_bytes; }
  constexpr int record() const { return codes() + kBlockDepth * code_bits / 8; }
};

// REQUIRES: format is not kFloat32, which has no blocks.
constexpr BlockLayout block_layout(WeightFormat format) {
  switch (format) {
    case WeightFormat::kNibblesHalf:
      return {4, 2, 32, true};
    case WeightFormat::kNibblesFloat:
      return {4, 4, 32, true};
    case WeightFormat::kBytesHalf:
      return {8, 2, 32, false};
    default:
      return {8, 4, 16, false};
  }
}

}  // namespace pdmesh::kernels
