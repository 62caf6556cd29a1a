// Recurrent layers that share their work out: outputs and snapshots are those of one thread, bit for bit, and
// nobody reads what another thread writes.
#include <gtest/gtest.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "recurrence.h"
#include "worker_pool.h"

namespace pdmesh::kernels {
namespace {

constexpr int kNumThreads = 3;
constexpr int kNumBlocks = 6;
constexpr int kNumTokens = 90;

using OutputAndStates = std::pair<std::vector<float>, std::vector<float>>;

// Small numbers without a pattern that a wrong stride would keep.
std::vector<float> Numbers(std::size_t count) {
  std::vector<float> numbers(count);
  std::uint32_t state = 11;
  for (float& number : numbers) {
    state = state * 1664525U + 1013904223U;
    number = static_cast<float>(state >> 16) / 65536.0F - 0.5F;
  }
  return numbers;
}

// A prompt with a checkpoint, a row in place, and a chunk that continues from a snapshot of somebody else.
struct Rows {
  std::vector<std::int32_t> input_blocks = {kNoBlock, 2, 3};
  std::vector<std::int32_t> output_blocks = {1, 2, 4};
  std::vector<std::int32_t> checkpoint_blocks = {5, kNoBlock, kNoBlock};
  std::vector<std::int32_t> checkpoint_lengths = {48, 0, 0};
  std::vector<std::int32_t> lengths = {59, 1, 30};

  StateRows View() const {
    return {.input_blocks = input_blocks.data(),
            .output_blocks = output_blocks.data(),
            .checkpoint_blocks = checkpoint_blocks.data(),
            .checkpoint_lengths = checkpoint_lengths.data(),
            .lengths = lengths.data(),
            .num_rows = 3,
            .num_tokens = kNumTokens,
            .num_blocks = kNumBlocks};
  }
};

OutputAndStates Recurred(int num_threads) {
  constexpr int kHeads = 4;
  constexpr int kKeyHeads = 2;
  constexpr int kKeyDim = 32;
  constexpr int kValueDim = 96;  // a whole slab of columns and half of one
  constexpr int kBlockFloats = kHeads * kKeyDim * kValueDim;
  const Rows rows;
  const std::vector<float> keys = Numbers(std::size_t{kNumTokens} * kKeyHeads * kKeyDim);
  const std::vector<float> values = Numbers(std::size_t{kNumTokens} * kHeads * kValueDim);
  const std::vector<float> steps = Numbers(std::size_t{kNumTokens} * kHeads * kKeyDim);
  const std::vector<float> step_bias = Numbers(std::size_t{kHeads} * kKeyDim);
  const std::vector<float> rate(kHeads, 0.25F);
  std::vector<float> states = Numbers(std::size_t{kNumBlocks} * kBlockFloats);
  std::vector<float> output(values.size());
  const RecurrenceCall call{.rows = rows.View(),
                            .query = {keys.data(), kKeyHeads * kKeyDim, kKeyDim},
                            .key = {keys.data(), kKeyHeads * kKeyDim, kKeyDim},
                            .value = {values.data(), kHeads * kValueDim, kValueDim},
                            .output = {output.data(), kHeads * kValueDim, kValueDim},
                            .step = {steps.data(), kHeads * kKeyDim, kKeyDim},
                            .step_bias = step_bias.data(),
                            .rate = rate.data(),
                            .steps_per_head = kKeyDim,
                            .strength_logits = steps.data(),
                            .strength_token_stride = kHeads,
                            .states = states.data(),
                            .state_block_stride = kBlockFloats,
                            .num_heads = kHeads,
                            .num_key_heads = kKeyHeads,
                            .key_dim = kKeyDim,
                            .value_dim = kValueDim};
  WorkerPool pool(num_threads);
  Recurrence(&baseline::recur, &baseline::convolve).recur(call, pool);
  return {output, states};
}

TEST(SharedRecurrences, ADeltaRuleIsThatOfOneThread) {
  const OutputAndStates expected = Recurred(1);
  EXPECT_NE(expected.first.back(), 0.0F);
  EXPECT_EQ(Recurred(kNumThreads), expected);
}

OutputAndStates Convolved(int num_threads) {
  constexpr int kChannels = 600;
  constexpr int kWidth = 4;
  constexpr int kBlockFloats = (kWidth - 1) * kChannels;
  const Rows rows;
  const std::vector<float> input = Numbers(std::size_t{kNumTokens} * kChannels);
  const std::vector<float> weight = Numbers(std::size_t{kWidth} * kChannels);
  std::vector<float> states = Numbers(std::size_t{kNumBlocks} * kBlockFloats);
  std::vector<float> output(input.size());
  const ConvCall call{.rows = rows.View(),
                      .input = input.data(),
                      .input_stride = kChannels,
                      .weight = weight.data(),
                      .output = output.data(),
                      .output_stride = kChannels,
                      .states = states.data(),
                      .state_block_stride = kBlockFloats,
                      .num_channels = kChannels,
                      .width = kWidth};
  WorkerPool pool(num_threads);
  Recurrence(&baseline::recur, &baseline::convolve).convolve(call, pool);
  return {output, states};
}

TEST(SharedRecurrences, AConvolutionIsThatOfOneThread) {
  const OutputAndStates expected = Convolved(1);
  EXPECT_NE(expected.first.back(), 0.0F);
  EXPECT_EQ(Convolved(kNumThreads), expected);
}

}  // namespace
}  // namespace pdmesh::kernels
