#include "state_rows.h"

#include <stdexcept>
#include <string>

namespace pdmesh::kernels {
namespace {

void require(bool holds, const std::string& message) {
  if (!holds) throw std::invalid_argument("states: " + message);
}

std::string of_row(std::int64_t row) {
  return " of row " + std::to_string(row);
}

}  // namespace

void StateRows::validate() const {
  const auto is_block = [this](std::int32_t id) { return id >= 1 && id < num_blocks; };
  const std::string range = " is outside [1, " + std::to_string(num_blocks) + ")";
  std::int64_t sum = 0;
  for (std::int64_t row = 0; row < num_rows; ++row) {
    require(lengths[row] >= 1, "length" + of_row(row) + " is " + std::to_string(lengths[row]));
    sum += lengths[row];
    require(input_blocks[row] == kNoBlock || is_block(input_blocks[row]),
            "input block " + std::to_string(input_blocks[row]) + of_row(row) + range);
    require(is_block(output_blocks[row]),
            "output block " + std::to_string(output_blocks[row]) + of_row(row) + range);
    const bool has_checkpoint = checkpoint_blocks[row] != kNoBlock;
    require(!has_checkpoint || is_block(checkpoint_blocks[row]),
            "checkpoint block " + std::to_string(checkpoint_blocks[row]) + of_row(row) + range);
    require(has_checkpoint ? checkpoint_lengths[row] >= 1 && checkpoint_lengths[row] < lengths[row]
                           : checkpoint_lengths[row] == 0,
            "checkpoint length " + std::to_string(checkpoint_lengths[row]) + of_row(row) +
                " is not inside its " + std::to_string(lengths[row]) + " tokens");
  }
  require(sum == num_tokens, "lengths sum to " + std::to_string(sum) + ", the tensors hold " +
                                 std::to_string(num_tokens) + " tokens");
}

}  // namespace pdmesh::kernels
