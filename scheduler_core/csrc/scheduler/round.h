// Round: a plan in the making, with the budgets that bound it.
#pragma once

#include <cstdint>
#include <vector>

#include "scheduler/plan.h"
#include "scheduler/request.h"

namespace pdmesh {

// What the rows of a plan are laid out by.
struct RowLayout {
  std::int32_t prefix_granularity;
  std::vector<std::int32_t> state_granularity;  // by group: of a state group, 0 for others
  bool has_state = false;
};

class Round {
 public:
  Round(const RowLayout& layout, std::int32_t max_num_rows, std::int32_t token_budget);

  std::int32_t num_free_rows() const { return num_free_rows_; }
  std::int32_t num_budget_tokens() const { return num_budget_tokens_; }
  bool has_room() const { return num_free_rows_ > 0 && num_budget_tokens_ > 0; }
  // Something to compute or to grant was planned.
  bool has_work() const {
    return !prefill_rows_.empty() || !decode_rows_.empty() || !plan_.remote_prefills.empty();
  }

  // The request's next `num_new_tokens` prompt tokens from `begin`, behind `num_replay_tokens` before it that
  // are fed again. REQUIRES: room for both.
  void AddPrefillRow(const Request& request, std::int32_t begin, std::int32_t num_new_tokens,
                     std::int32_t num_replay_tokens = 0);
  // The request's newest token and drafts behind it, `num_input_tokens` in all. `cost_tokens` is what the row
  // takes from the budget.
  void AddDecodeRow(const Request& request, std::int32_t num_input_tokens, std::int32_t cost_tokens);
  void AddZeroBlocks(const std::vector<std::vector<std::int32_t>>& fresh_ids);

  // Takes the request's decode row out again, and from the zero list what `tables` hold of it.
  void Withdraw(const Request& request, const std::vector<BlockTable>& tables);

  // The first request that wanted to be in the round and found no memory.
  void NoteBlocked(Request& request) { blocked_ = blocked_ == nullptr ? &request : blocked_; }
  Request* blocked() const { return blocked_; }
  // A prompt that had chunks in earlier rounds gets on in this one.
  bool has_later_chunk() const { return has_later_chunk_; }
  void NoteLaterChunk() { has_later_chunk_ = true; }
  // One that holds blocks and needs more: nobody new may take them.
  bool is_sealed() const { return blocked_ != nullptr && HoldingsOf(blocked_->state) != nullptr; }
  std::int32_t num_prefill_rows() const { return static_cast<std::int32_t>(prefill_rows_.size()); }
  // A prompt got on in this round, here or at a peer.
  bool has_prefill() const { return !prefill_rows_.empty() || !plan_.remote_prefills.empty(); }

  // Calls `visit` with the request of every row.
  template <typename Visit>
  void ForEachRow(const Visit& visit) const {
    for (const std::vector<Row>* rows : {&prefill_rows_, &decode_rows_}) {
      for (const Row& row : *rows) {
        visit(*row.request);
      }
    }
  }

  // Lists that are no rows are filled directly.
  Plan& plan() { return plan_; }

  // Lays the rows out. Nothing may be added afterwards.
  Plan Build() &&;

 private:
  struct Row {
    const Request* request;
    std::int32_t begin;
    std::int32_t num_input_tokens;
    std::int32_t num_replay_tokens;
    std::int32_t num_results_out;
    std::int32_t cost_tokens;
    bool is_prefill;
  };

  void LayOutRow(const Row& row);
  void LayOutTokens(const Row& row);
  void LayOutStates(const Row& row);
  void LayOutTables(const std::vector<Row>& rows);

  const RowLayout& layout_;
  Plan plan_;
  std::int32_t num_free_rows_;
  std::int32_t num_budget_tokens_;
  std::vector<Row> prefill_rows_;
  std::vector<Row> decode_rows_;
  Request* blocked_ = nullptr;
  bool has_later_chunk_ = false;
};

}  // namespace pdmesh
