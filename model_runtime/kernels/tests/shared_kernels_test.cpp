// Kernels that share their work out: the result is that of one thread, bit for bit, and nobody reads what
// another thread writes.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "attention_core.h"
#include "elementwise.h"
#include "linear.h"
#include "paged_attention.h"

namespace pdmesh::kernels {
namespace {

constexpr int kNumThreads = 3;

// Small numbers without a pattern that a wrong stride would keep.
std::vector<float> Numbers(std::size_t count) {
  std::vector<float> numbers(count);
  std::uint32_t state = 7;
  for (float& number : numbers) {
    state = state * 1664525U + 1013904223U;
    number = static_cast<float>(state >> 16) / 65536.0F - 0.5F;
  }
  return numbers;
}

std::vector<float> Multiplied(int num_threads) {
  constexpr int kNumRows = 150;  // more than meet a panel at once
  constexpr int kNumColumns = 70;
  constexpr int kDepth = 256;
  WorkerPool pool(num_threads);
  const LinearCore core = baseline::linear_core();
  const std::vector<float> weight = Numbers(std::size_t{kNumColumns} * kDepth);
  const std::vector<float> input = Numbers(std::size_t{kNumRows} * kDepth);
  PanelMemory memory;
  PackedWeight packed(WeightFormat::kFloat32, kNumColumns, kDepth, core.columns_per_panel, memory);
  pack(pool, {.data = weight.data(), .stride = kDepth}, packed);
  std::vector<float> output(std::size_t{kNumRows} * kNumColumns);
  multiply(pool, core, {.data = input.data(), .stride = kDepth}, kNumRows, packed,
           {.data = output.data(), .stride = kNumColumns});
  return output;
}

TEST(SharedKernels, AProductIsThatOfOneThread) {
  const std::vector<float> expected = Multiplied(1);
  EXPECT_NE(expected.front(), 0.0F);
  EXPECT_EQ(Multiplied(kNumThreads), expected);
}

std::vector<float> Normalized(int num_threads) {
  constexpr int kNumRows = 300;
  constexpr int kWidth = 256;  // together enough to be shared out
  WorkerPool pool(num_threads);
  const std::vector<float> input = Numbers(std::size_t{kNumRows} * kWidth);
  const std::vector<float> weight = Numbers(kWidth);
  std::vector<float> output(input.size());
  const RowsTask task{.input = input.data(),
                      .input_stride = kWidth,
                      .output = output.data(),
                      .output_stride = kWidth,
                      .num_rows = kNumRows,
                      .width = kWidth};
  for_slices(pool, task,
             [&](int, const RowsTask& slice) { baseline::rms_norm(slice, weight.data(), 1e-5F); });
  return output;
}

TEST(SharedKernels, ANormIsThatOfOneThread) {
  const std::vector<float> expected = Normalized(1);
  EXPECT_NE(expected.back(), 0.0F);
  EXPECT_EQ(Normalized(kNumThreads), expected);
}

std::vector<float> Attended(int num_threads) {
  constexpr int kHeads = 4;
  constexpr int kKvHeads = 2;
  constexpr int kHeadDim = 32;
  constexpr int kPageTokens = 8;
  constexpr int kPages = 20;
  const std::vector<std::int32_t> page_table = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  const std::vector<std::int32_t> begins = {0, 40};
  const std::vector<std::int32_t> lengths = {40, 3};
  constexpr int kNumTokens = 43;
  const std::vector<float> query = Numbers(std::size_t{kNumTokens} * kHeads * kHeadDim);
  const std::vector<float> key = Numbers(std::size_t{kPages} * kPageTokens * kKvHeads * kHeadDim);
  std::vector<float> value = key;
  value.front() = 1.0F;
  std::vector<float> output(query.size());
  const AttentionCall call{.query = query.data(),
                           .query_token_stride = kHeads * kHeadDim,
                           .output = output.data(),
                           .output_token_stride = kHeads * kHeadDim,
                           .key = key.data(),
                           .value = value.data(),
                           .key_page_stride = kPageTokens * kKvHeads * kHeadDim,
                           .key_token_stride = kKvHeads * kHeadDim,
                           .value_page_stride = kPageTokens * kKvHeads * kHeadDim,
                           .value_token_stride = kKvHeads * kHeadDim,
                           .page_table = page_table.data(),
                           .begins = begins.data(),
                           .lengths = lengths.data(),
                           .num_tokens = kNumTokens,
                           .num_rows = 2,
                           .max_pages = 6,
                           .num_pages = kPages,
                           .page_tokens = kPageTokens,
                           .num_heads = kHeads,
                           .num_kv_heads = kKvHeads,
                           .head_dim = kHeadDim,
                           .scale = 0.25F};
  call.validate();
  WorkerPool pool(num_threads);
  PagedAttention attention(baseline::attention_core(), num_threads);
  attention.attend(call, pool);
  return output;
}

TEST(SharedKernels, AttentionIsThatOfOneThread) {
  const std::vector<float> expected = Attended(1);
  EXPECT_NE(expected.back(), 0.0F);
  EXPECT_EQ(Attended(kNumThreads), expected);
}

}  // namespace
}  // namespace pdmesh::kernels
