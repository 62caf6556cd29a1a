#include "block_record.h"

#include <cstdint>
#include <cstring>

namespace pdmesh::kernels {
namespace {

template <class Value>
void store_as(std::byte* to, Value value) {
  std::memcpy(to, &value, sizeof(value));
}

template <class Value>
Value load_as(const std::byte* from) {
  Value value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

bool is_half(const BlockLayout& layout) {
  return layout.scale_bytes == sizeof(_Float16);
}

}  // namespace

int RecordColumn::scale(int index) const {
  return (index * columns_per_panel + column) * layout.scale_bytes;
}
int RecordColumn::minimum(int index) const {
  return layout.minima() * columns_per_panel + scale(index);
}
int RecordColumn::word(int depth) const {
  constexpr int kWordBytes = sizeof(std::uint32_t);
  return layout.codes() * columns_per_panel +
         (depth / kCodesPerWord * columns_per_panel + column) * kWordBytes;
}
int RecordColumn::code(int depth) const {
  return (layout.codes() + depth) * columns_per_panel + column;
}

void RecordColumn::store(const PlainBlock& block, std::byte* record) const {
  const auto store_scalar = [&](int offset, float value) {
    if (is_half(layout)) {
      store_as(record + offset, static_cast<_Float16>(value));
    } else {
      store_as(record + offset, value);
    }
  };
  for (int i = 0; i < layout.num_scales(); ++i) {
    store_scalar(scale(i), block.scales[i]);
    if (layout.has_minimum) store_scalar(minimum(i), block.minima[i]);
  }
  if (layout.code_bits == 8) {
    for (int k = 0; k < kBlockDepth; ++k) store_as(record + code(k), block.codes[k]);
    return;
  }
  for (int first = 0; first < kBlockDepth; first += kCodesPerWord) {
    std::uint32_t codes = 0;
    for (int i = 0; i < kCodesPerWord; ++i) codes |= std::uint32_t{block.codes[first + i]} << 4 * i;
    store_as(record + word(first), codes);
  }
}

PlainBlock RecordColumn::load(const std::byte* record) const {
  const auto load_scalar = [&](int offset) {
    return is_half(layout) ? static_cast<float>(load_as<_Float16>(record + offset))
                           : load_as<float>(record + offset);
  };
  PlainBlock block;
  for (int i = 0; i < layout.num_scales(); ++i) {
    block.scales[i] = load_scalar(scale(i));
    if (layout.has_minimum) block.minima[i] = load_scalar(minimum(i));
  }
  if (layout.code_bits == 8) {
    for (int k = 0; k < kBlockDepth; ++k) block.codes[k] = load_as<std::uint8_t>(record + code(k));
    return block;
  }
  for (int first = 0; first < kBlockDepth; first += kCodesPerWord) {
    const auto codes = load_as<std::uint32_t>(record + word(first));
    for (int i = 0; i < kCodesPerWord; ++i) block.codes[first + i] = codes >> 4 * i & 15;
  }
  return block;
}

}  // namespace pdmesh::kernels
