// Python face of the recurrent kernels: checks shapes, releases the interpreter lock, forwards.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <limits>
#include <optional>
#include <stdexcept>
#include <string>

#include "cpu_kernels.h"
#include "recurrence.h"
#include "tensor_view.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pdmesh::kernels {
namespace {

using Heads = TensorView<const float, 3>;
using MutableHeads = TensorView<float, 3>;
using Matrix = TensorView<const float, 2>;
using MutableMatrix = TensorView<float, 2>;
using Table = TensorView<const float, 2, true>;
using Vector = TensorView<const float, 1, true>;
using RowInts = TensorView<const std::int32_t, 1, true>;
using ConvStates = TensorView<float, 3>;
using States = TensorView<float, 4>;

void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(std::string("states: ") + message);
}

StateRows describe_rows(const RowInts& input_blocks, const RowInts& output_blocks,
                        const RowInts& checkpoint_blocks, const RowInts& checkpoint_lengths,
                        const RowInts& lengths, std::size_t num_tokens, std::size_t num_blocks) {
  for (const RowInts* column : {&input_blocks, &output_blocks, &checkpoint_blocks, &checkpoint_lengths}) {
    require(column->shape(0) == lengths.shape(0), "blocks and lengths must have one row count");
  }
  StateRows rows;
  rows.input_blocks = input_blocks.data();
  rows.output_blocks = output_blocks.data();
  rows.checkpoint_blocks = checkpoint_blocks.data();
  rows.checkpoint_lengths = checkpoint_lengths.data();
  rows.lengths = lengths.data();
  rows.num_rows = static_cast<std::int64_t>(lengths.shape(0));
  rows.num_tokens = static_cast<std::int64_t>(num_tokens);
  rows.num_blocks = static_cast<std::int64_t>(num_blocks);
  return rows;
}

template <class Element>
TokenHeads<Element> view(const TensorView<Element, 3>& heads) {
  require(has_stride(heads, 2, 1), "the last axis must be contiguous");
  return {heads.data(), heads.stride(0), heads.stride(1)};
}

void causal_conv(CpuKernels& self, const Matrix& input, const Table& weight, std::optional<Vector> bias,
                 const ConvStates& states, const RowInts& input_blocks, const RowInts& output_blocks,
                 const RowInts& checkpoint_blocks, const RowInts& checkpoint_lengths, const RowInts& lengths,
                 const MutableMatrix& output) {
  const std::size_t num_channels = input.shape(1);
  require(weight.shape(0) >= 2 && weight.shape(0) <= 64, "a convolution must be 2 to 64 tokens wide");
  require(weight.shape(1) == num_channels, "weight must have input's channels");
  require(!bias || bias->shape(0) == num_channels, "bias must have input's channels");
  require(output.shape(0) == input.shape(0) && output.shape(1) == num_channels,
          "output must have the shape of input");
  require(input.data() != output.data(), "output must not be input");
  require(has_stride(input, 1, 1) && has_stride(output, 1, 1), "the last axis must be contiguous");
  require(states.shape(1) + 1 == weight.shape(0) && states.shape(2) == num_channels,
          "a state must hold the channels of width - 1 tokens");
  require(has_stride(states, 2, 1) && has_stride(states, 1, static_cast<std::int64_t>(num_channels)),
          "a state must be contiguous");
  ConvCall call;
  call.rows = describe_rows(input_blocks, output_blocks, checkpoint_blocks, checkpoint_lengths, lengths,
                            input.shape(0), states.shape(0));
  call.input = input.data();
  call.input_stride = input.stride(0);
  call.weight = weight.data();
  call.bias = bias ? bias->data() : nullptr;
  call.output = output.data();
  call.output_stride = output.stride(0);
  call.states = states.data();
  call.state_block_stride = states.stride(0);
  call.num_channels = static_cast<std::int64_t>(num_channels);
  call.width = static_cast<int>(weight.shape(0));
  const nb::gil_scoped_release unlocked;
  self.recurrence().convolve(call, self.pool());
}

// What both recurrences have in common. `query` and `key` are [num_tokens, num_key_heads, key_dim].
RecurrenceCall describe_call(const Heads& query, const Heads& key, const Heads& value, const Heads& step,
                             const Table& step_bias, const Vector& rate, const States& states,
                             const StateRows& rows, const MutableHeads& output) {
  const std::size_t num_heads = value.shape(1);
  const std::size_t key_dim = query.shape(2);
  for (std::size_t axis = 0; axis < 3; ++axis) {
    require(query.shape(axis) == key.shape(axis), "query and key must have one shape");
    require(output.shape(axis) == value.shape(axis), "output must have the shape of value");
  }
  require(query.shape(0) == value.shape(0) && step.shape(0) == value.shape(0),
          "all inputs must have one token count");
  require(query.shape(1) > 0 && num_heads % query.shape(1) == 0,
          "value heads must be a multiple of key heads");
  require(step.shape(1) == num_heads && step_bias.shape(0) == num_heads && rate.shape(0) == num_heads,
          "steps, their bias and rate must have value's heads");
  require(step.shape(2) == 1 || step.shape(2) == key_dim,
          "a head must have one step, or one per key channel");
  require(step_bias.shape(1) == step.shape(2), "the bias must be as wide as the steps");
  require(states.shape(1) == num_heads && states.shape(2) == key_dim && states.shape(3) == value.shape(2),
          "a state must be [num_heads, key_dim, value_dim]");
  const auto row = static_cast<std::int64_t>(value.shape(2));
  require(has_stride(states, 3, 1) && has_stride(states, 2, row) &&
              has_stride(states, 1, static_cast<std::int64_t>(key_dim) * row),
          "a state must be contiguous");
  RecurrenceCall call;
  call.rows = rows;
  call.query = view(query);
  call.key = view(key);
  call.value = view(value);
  call.step = view(step);
  call.step_bias = step_bias.data();
  call.rate = rate.data();
  call.steps_per_head = static_cast<std::int64_t>(step.shape(2));
  call.output = view(output);
  call.states = states.data();
  call.state_block_stride = states.stride(0);
  call.num_heads = static_cast<std::int64_t>(num_heads);
  call.num_key_heads = static_cast<std::int64_t>(query.shape(1));
  call.key_dim = static_cast<std::int64_t>(key_dim);
  call.value_dim = row;
  return call;
}

void gated_delta_rule(CpuKernels& self, const Heads& query, const Heads& key, const Heads& value,
                      const Heads& step, const Table& step_bias, const Vector& rate,
                      const Matrix& strength_logits, const States& states, const RowInts& input_blocks,
                      const RowInts& output_blocks, const RowInts& checkpoint_blocks,
                      const RowInts& checkpoint_lengths, const RowInts& lengths, const MutableHeads& output) {
  const StateRows rows = describe_rows(input_blocks, output_blocks, checkpoint_blocks, checkpoint_lengths,
                                       lengths, value.shape(0), states.shape(0));
  RecurrenceCall call = describe_call(query, key, value, step, step_bias, rate, states, rows, output);
  require(strength_logits.shape(0) == value.shape(0) && strength_logits.shape(1) == value.shape(1) &&
              has_stride(strength_logits, 1, 1),
          "strength_logits must have one number per token and head");
  call.strength_logits = strength_logits.data();
  call.strength_token_stride = strength_logits.stride(0);
  const nb::gil_scoped_release unlocked;
  self.recurrence().recur(call, self.pool());
}

void selective_scan(CpuKernels& self, const Heads& value, const Heads& key, const Heads& query,
                    const Heads& step, const Table& step_bias, const Vector& rate, const Vector& skip,
                    float min_step, float max_step, const States& states, const RowInts& input_blocks,
                    const RowInts& output_blocks, const RowInts& checkpoint_blocks,
                    const RowInts& checkpoint_lengths, const RowInts& lengths, const MutableHeads& output) {
  const StateRows rows = describe_rows(input_blocks, output_blocks, checkpoint_blocks, checkpoint_lengths,
                                       lengths, value.shape(0), states.shape(0));
  RecurrenceCall call = describe_call(query, key, value, step, step_bias, rate, states, rows, output);
  require(step.shape(2) == 1, "a head must have one step");
  require(skip.shape(0) == value.shape(1), "skip must have one number per head");
  require(min_step >= 0.0F && min_step <= max_step, "min_step must be in [0, max_step]");
  call.skip = skip.data();
  call.min_step = min_step;
  call.max_step = max_step;
  const nb::gil_scoped_release unlocked;
  self.recurrence().recur(call, self.pool());
}

}  // namespace

void bind_states(nb::class_<CpuKernels>& kernels) {
  kernels
      .def("causal_conv", &causal_conv, "input"_a.noconvert(), "weight"_a.noconvert(),
           "bias"_a.noconvert().none(), "states"_a.noconvert(), "input_blocks"_a.noconvert(),
           "output_blocks"_a.noconvert(), "checkpoint_blocks"_a.noconvert(),
           "checkpoint_lengths"_a.noconvert(), "lengths"_a.noconvert(), "output"_a.noconvert(),
           "input, output float32[num_tokens, channels]; weight float32[width, channels]; bias "
           "float32[channels] or None; states float32[num_blocks, width - 1, channels]; the rest "
           "int32[num_rows].")
      .def("gated_delta_rule", &gated_delta_rule, "query"_a.noconvert(), "key"_a.noconvert(),
           "value"_a.noconvert(), "step"_a.noconvert(), "step_bias"_a.noconvert(), "rate"_a.noconvert(),
           "strength_logits"_a.noconvert(), "states"_a.noconvert(), "input_blocks"_a.noconvert(),
           "output_blocks"_a.noconvert(), "checkpoint_blocks"_a.noconvert(),
           "checkpoint_lengths"_a.noconvert(), "lengths"_a.noconvert(), "output"_a.noconvert(),
           "query, key float32[num_tokens, num_key_heads, key_dim]; value, output float32[num_tokens, "
           "num_heads, value_dim]; step float32[num_tokens, num_heads, 1 or key_dim]; states "
           "float32[num_blocks, num_heads, key_dim, value_dim]; block arrays int32[num_rows].")
      .def("selective_scan", &selective_scan, "value"_a.noconvert(), "key"_a.noconvert(),
           "query"_a.noconvert(), "step"_a.noconvert(), "step_bias"_a.noconvert(), "rate"_a.noconvert(),
           "skip"_a.noconvert(), "min_step"_a, "max_step"_a, "states"_a.noconvert(),
           "input_blocks"_a.noconvert(), "output_blocks"_a.noconvert(), "checkpoint_blocks"_a.noconvert(),
           "checkpoint_lengths"_a.noconvert(), "lengths"_a.noconvert(), "output"_a.noconvert(),
           "value, output float32[num_tokens, num_heads, value_dim]; key, query float32[num_tokens, "
           "num_groups, key_dim]; step float32[num_tokens, num_heads, 1]; states float32[num_blocks, "
           "num_heads, key_dim, value_dim]; block arrays int32[num_rows].");
}

}  // namespace pdmesh::kernels
