#include "scheduler/round.h"

#include <algorithm>
#include <utility>

#include "support/errors.h"

namespace pdmesh {

Round::Round(const RowLayout& layout, std::int32_t max_num_rows, std::int32_t token_budget)
    : layout_(layout), num_free_rows_(max_num_rows), num_budget_tokens_(token_budget) {
  const std::size_t num_groups = layout.state_granularity.size();
  plan_.zero_blocks.resize(num_groups);
  plan_.block_tables.resize(num_groups);
  plan_.state_input_slots.resize(num_groups);
  plan_.state_output_slots.resize(num_groups);
}

void Round::AddPrefillRow(const Request& request, std::int32_t begin, std::int32_t num_new_tokens,
                          std::int32_t num_replay_tokens) {
  const std::int32_t num_input_tokens = num_new_tokens + num_replay_tokens;
  Ensure(num_free_rows_ > 0 && num_budget_tokens_ >= num_input_tokens, "a round was overfilled");
  --num_free_rows_;
  num_budget_tokens_ -= num_input_tokens;
  prefill_rows_.push_back({.request = &request,
                           .begin = begin - num_replay_tokens,
                           .num_input_tokens = num_input_tokens,
                           .num_replay_tokens = num_replay_tokens,
                           .num_results_out = request.num_results_out(),
                           .cost_tokens = num_input_tokens,
                           .is_prefill = true});
}

void Round::AddDecodeRow(const Request& request, std::int32_t num_input_tokens, std::int32_t cost_tokens) {
  --num_free_rows_;
  num_budget_tokens_ -= cost_tokens;
  const std::int32_t num_results_out = request.num_results_out();
  decode_rows_.push_back({.request = &request,
                          .begin = request.num_tokens() - 1 + num_results_out,
                          .num_input_tokens = num_input_tokens,
                          .num_replay_tokens = 0,
                          .num_results_out = num_results_out,
                          .cost_tokens = cost_tokens,
                          .is_prefill = false});
}

void Round::Withdraw(const Request& request, const std::vector<BlockTable>& tables) {
  const auto row = std::find_if(decode_rows_.begin(), decode_rows_.end(),
                                [&](const Row& planned) { return planned.request == &request; });
  if (row == decode_rows_.end()) {
    return;
  }
  ++num_free_rows_;
  num_budget_tokens_ += row->cost_tokens;
  decode_rows_.erase(row);
  for (std::size_t group = 0; group < tables.size(); ++group) {
    const std::span<const std::int32_t> held = tables[group].block_ids();
    std::erase_if(plan_.zero_blocks[group], [&](std::int32_t block_id) {
      return std::find(held.begin(), held.end(), block_id) != held.end();
    });
  }
}

void Round::AddZeroBlocks(const std::vector<std::vector<std::int32_t>>& fresh_ids) {
  for (std::size_t group = 0; group < fresh_ids.size(); ++group) {
    std::vector<std::int32_t>& zero_blocks = plan_.zero_blocks[group];
    zero_blocks.insert(zero_blocks.end(), fresh_ids[group].begin(), fresh_ids[group].end());
  }
}

Plan Round::Build() && {
  std::vector<Row> rows = std::move(prefill_rows_);
  plan_.num_prefill_rows = static_cast<std::int32_t>(rows.size());
  rows.insert(rows.end(), decode_rows_.begin(), decode_rows_.end());
  plan_.num_rows = static_cast<std::int32_t>(rows.size());
  for (auto* column : {&plan_.request_slots, &plan_.input_lengths, &plan_.begins, &plan_.replay_lengths,
                       &plan_.prefill_lengths, &plan_.checkpoint_tokens, &plan_.num_results_out}) {
    column->reserve(rows.size());
  }
  plan_.request_ids.reserve(rows.size());
  plan_.logits_wanted.reserve(rows.size());
  for (const Row& row : rows) {
    LayOutRow(row);
  }
  LayOutTables(rows);
  return std::move(plan_);
}

void Round::LayOutRow(const Row& row) {
  const Request& request = *row.request;
  const bool is_last_chunk = row.begin + row.num_input_tokens == request.num_tokens();
  plan_.request_ids.push_back(request.request_id);
  plan_.request_slots.push_back(HoldingsOf(request.state)->slot.slot());
  plan_.input_lengths.push_back(row.num_input_tokens);
  plan_.begins.push_back(row.begin);
  plan_.num_results_out.push_back(row.num_results_out);
  plan_.replay_lengths.push_back(row.num_replay_tokens);
  plan_.prefill_lengths.push_back(row.is_prefill ? request.num_prompt_tokens : 0);
  plan_.logits_wanted.push_back(!row.is_prefill || is_last_chunk ? 1 : 0);
  LayOutTokens(row);
  LayOutStates(row);
}

void Round::LayOutTokens(const Row& row) {
  const std::vector<std::int32_t>& tokens = row.request->tokens;
  const auto num_landed = static_cast<std::int32_t>(tokens.size());
  const std::int32_t end = row.begin + row.num_input_tokens;
  plan_.token_ids.insert(plan_.token_ids.end(), tokens.begin() + std::min(row.begin, num_landed),
                         tokens.begin() + std::min(end, num_landed));
  plan_.token_ids.insert(plan_.token_ids.end(),
                         static_cast<std::size_t>(end - std::clamp(num_landed, row.begin, end)), -1);
}

void Round::LayOutStates(const Row& row) {
  const std::int32_t end = row.begin + row.num_input_tokens;
  const std::int32_t checkpoint = end / layout_.prefix_granularity * layout_.prefix_granularity;
  const bool is_internal = layout_.has_state && row.is_prefill && row.begin < checkpoint && checkpoint < end;
  plan_.checkpoint_tokens.push_back(is_internal ? checkpoint : 0);
  for (std::size_t group = 0; group < layout_.state_granularity.size(); ++group) {
    if (const std::int32_t granularity = layout_.state_granularity[group]; granularity > 0) {
      plan_.state_input_slots[group].push_back(row.begin > 0 ? (row.begin - 1) / granularity : -1);
      plan_.state_output_slots[group].push_back((end - 1) / granularity);
    }
  }
}

void Round::LayOutTables(const std::vector<Row>& rows) {
  for (std::size_t group = 0; group < plan_.block_tables.size(); ++group) {
    BlockTableRows& table = plan_.block_tables[group];
    for (const Row& row : rows) {
      table.num_slots = std::max(table.num_slots, HoldingsOf(row.request->state)->tables[group].num_slots());
    }
    table.num_rows = plan_.num_rows;
    table.block_ids.reserve(rows.size() * static_cast<std::size_t>(table.num_slots));
    for (const Row& row : rows) {
      const std::span<const std::int32_t> block_ids =
          HoldingsOf(row.request->state)->tables[group].block_ids();
      table.block_ids.insert(table.block_ids.end(), block_ids.begin(), block_ids.end());
      table.block_ids.resize(
          table.block_ids.size() + static_cast<std::size_t>(table.num_slots) - block_ids.size(), -1);
    }
  }
}

}  // namespace pdmesh
