// Source: block layouts of ggml, `ggml-common.h` (block_q4_0, block_q4_1, block_q5_0, block_q8_0, block_q4_K,
// block_q6_K).
#include "stored_blocks.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace pdmesh::kernels {
namespace {

constexpr int kHalfBlock = kBlockDepth / 2;
constexpr int kSuperBlock = 256;

float read_half(const std::uint8_t* from) {
  _Float16 half;
  std::memcpy(&half, from, sizeof(half));
  return static_cast<float>(half);
}

std::uint8_t signed_code(int value) {
  return static_cast<std::uint8_t>(static_cast<std::int8_t>(value));
}

// The low halves of the bytes are the first sixteen codes, the high halves the others.
void read_nibbles(const std::uint8_t* from, PlainBlock& block) {
  for (int i = 0; i < kHalfBlock; ++i) {
    block.codes[i] = from[i] & 0x0F;
    block.codes[kHalfBlock + i] = from[i] >> 4;
  }
}

PlainBlock read_q4_0(const std::uint8_t* from, int) {
  PlainBlock block;
  read_nibbles(from + 2, block);
  block.scales[0] = read_half(from);
  block.minima[0] = -8.0F * block.scales[0];
  return block;
}

PlainBlock read_q4_1(const std::uint8_t* from, int) {
  PlainBlock block;
  read_nibbles(from + 4, block);
  block.scales[0] = read_half(from);
  block.minima[0] = read_half(from + 2);
  return block;
}

PlainBlock read_q5_0(const std::uint8_t* from, int) {
  PlainBlock block;
  read_nibbles(from + 6, block);
  for (int i = 0; i < kBlockDepth; ++i) {
    const int fifth_bit = from[2 + i / 8] >> i % 8 & 1;
    block.codes[i] = signed_code((block.codes[i] | fifth_bit << 4) - 16);
  }
  block.scales[0] = read_half(from);
  return block;
}

PlainBlock read_q8_0(const std::uint8_t* from, int) {
  PlainBlock block;
  std::copy_n(from + 2, kBlockDepth, block.codes);
  block.scales[0] = read_half(from);
  return block;
}

// Scales and minima are six bits each: those of the first four parts in whole bytes, those of the last four
// split between the halves of bytes 8 to 11 and the top bits of the others.
PlainBlock read_q4_k(const std::uint8_t* from, int part) {
  const std::uint8_t* packed = from + 4;
  const int low = part % 4;
  const int scale = part < 4 ? packed[low] & 63 : (packed[8 + low] & 15) | (packed[low] >> 6 << 4);
  const int minimum = part < 4 ? packed[4 + low] & 63 : packed[8 + low] >> 4 | (packed[4 + low] >> 6 << 4);
  PlainBlock block;
  const std::uint8_t* codes = from + 16 + part / 2 * kBlockDepth;
  for (int i = 0; i < kBlockDepth; ++i) {
    block.codes[i] = static_cast<std::uint8_t>(part % 2 == 0 ? codes[i] & 15 : codes[i] >> 4);
  }
  block.scales[0] = read_half(from) * static_cast<float>(scale);
  block.minima[0] = -(read_half(from + 2) * static_cast<float>(minimum));
  return block;
}

// Each half of a block, 128 codes, has 64 bytes of low nibbles and 32 bytes of pairs of high bits.
PlainBlock read_q6_k(const std::uint8_t* from, int part) {
  const int half = part / 4;
  const int quarter = part % 4;
  const std::uint8_t* low = from + half * 64 + quarter % 2 * kBlockDepth;
  const std::uint8_t* high = from + 128 + half * 32;
  const std::uint8_t* scales = from + 192 + half * 8 + quarter * 2;
  const float scale = read_half(from + 208);
  PlainBlock block;
  for (int i = 0; i < kBlockDepth; ++i) {
    const int nibble = quarter < 2 ? low[i] & 15 : low[i] >> 4;
    block.codes[i] = signed_code((nibble | (high[i] >> 2 * quarter & 3) << 4) - 32);
  }
  for (int i = 0; i < 2; ++i)
    block.scales[i] = scale * static_cast<float>(static_cast<std::int8_t>(scales[i]));
  return block;
}

}  // namespace

const std::vector<StoredQuantization>& stored_quantizations() {
  static const std::vector<StoredQuantization> all = {
      {"Q4_0", WeightFormat::kNibblesFloat, kBlockDepth, 18, &read_q4_0},
      {"Q4_1", WeightFormat::kNibblesHalf, kBlockDepth, 20, &read_q4_1},
      {"Q5_0", WeightFormat::kBytesHalf, kBlockDepth, 22, &read_q5_0},
      {"Q8_0", WeightFormat::kBytesHalf, kBlockDepth, 34, &read_q8_0},
      {"Q4_K", WeightFormat::kNibblesFloat, kSuperBlock, 144, &read_q4_k},
      {"Q6_K", WeightFormat::kBytesFloat, kSuperBlock, 210, &read_q6_k},
  };
  return all;
}

const StoredQuantization& find_stored_quantization(std::string_view name) {
  std::string names;
  for (const StoredQuantization& stored : stored_quantizations()) {
    if (stored.name == name) return stored;
    names += (names.empty() ? "" : ", ") + std::string(stored.name);
  }
  throw std::invalid_argument("linear: quantization \"" + std::string(name) +
                              "\" cannot be packed (can be: " + names + ")");
}

}  // namespace pdmesh::kernels
