#include "state_rows.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace pdmesh::kernels {
namespace {

void require(bool holds, const std::string& message) {
  if (!holds) throw std::invalid_argument("states: " + message);
}

std::string of_row(std::int64_t row) {
  return " of row " + std::to_string(row);
}

using BlockOfRow = std::pair<std::int32_t, std::int64_t>;

std::vector<BlockOfRow> written_blocks(const StateRows& rows) {
  std::vector<BlockOfRow> written;
  for (std::int64_t row = 0; row < rows.num_rows; ++row) {
    written.emplace_back(rows.output_blocks[row], row);
    if (rows.checkpoint_blocks[row] != kNoBlock) written.emplace_back(rows.checkpoint_blocks[row], row);
  }
  std::sort(written.begin(), written.end());
  return written;
}

// Rows run at the same time: what one writes must be nobody else's.
void require_no_sharing(const StateRows& rows) {
  const std::vector<BlockOfRow> written = written_blocks(rows);
  for (std::size_t i = 1; i < written.size(); ++i) {
    require(written[i].first != written[i - 1].first, "block " + std::to_string(written[i].first) +
                                                          " is written twice, the second time" +
                                                          of_row(written[i].second));
  }
  for (std::int64_t row = 0; row < rows.num_rows; ++row) {
    const std::int32_t block = rows.input_blocks[row];
    const auto use = std::lower_bound(written.begin(), written.end(), BlockOfRow{block, 0});
    require(use == written.end() || use->first != block || use->second == row,
            "input block " + std::to_string(block) + of_row(row) + " is written by another row");
  }
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
  require_no_sharing(*this);
}

}  // namespace pdmesh::kernels
