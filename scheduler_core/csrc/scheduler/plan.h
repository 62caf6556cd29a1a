// Plan: what the runtime carries out next, in this order: stores that are not pinned, zero blocks, loads,
// send remote prefills and handovers, run the forward batch. Pinned stores may take their time beside all of
// it. Immutable once built; the scheduler keeps nothing of it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cache/prefix/cache_key.h"

namespace pdmesh {

struct RemotePrefill {
  std::string request_id;
  std::int32_t from_token;                           // the prefix before it is here already
  std::vector<std::int32_t> first_slots;             // by group: slot of the first granted block
  std::vector<std::vector<std::int32_t>> block_ids;  // by group: granted blocks, up to the prompt's end
};

struct Handover {
  std::string request_id;
  std::int32_t token;  // the first of the completion
};

// An admission of a prompt, that of a retracted request included: where it was found. The sum is below the
// prompt length.
struct AdmissionReport {
  std::string request_id;
  std::int32_t device_hit_tokens;
  std::int32_t host_hit_tokens;
  std::int32_t storage_hit_tokens;
};

// Blocks to copy between the tiers, group by group, each copy as (group, source, destination) in `copies`.
// Acknowledged by StoreDoneEvent or LoadDoneEvent, which alone release the blocks.
struct TransferOperation {
  std::uint64_t operation_id = 0;    // rises, never used again
  std::vector<std::int32_t> copies;  // [num_copies, 3], at least one
  std::vector<CacheKey> keys;        // [num_copies], of the contents
};

struct StoreOperation : TransferOperation {  // from the device to the host
  // Nobody writes to the sources before the acknowledgement. If not, the plan itself may grant them to
  // others: the copies go before everything else.
  bool is_pinned = true;
};

struct LoadOperation : TransferOperation {  // from the host to the device
  std::vector<std::uint8_t> reads_storage;  // [num_copies], 1 where the source is read from storage first
};

// A row-major int32 rectangle.
struct BlockTableRows {
  std::int32_t num_rows = 0;
  std::int32_t num_slots = 0;
  std::vector<std::int32_t> block_ids;
};

struct Plan {
  std::int32_t num_rows = 0;  // prefill rows, then decode rows
  std::int32_t num_prefill_rows = 0;
  std::vector<std::string> request_ids;  // [num_rows], as all below up to token_ids
  std::vector<std::int32_t> request_slots;
  std::vector<std::int32_t> input_lengths;
  // Position of the row's first input token. A decode row that is planned while results are out may begin
  // later: one token is counted for each of them, and the caller knows how many there were.
  std::vector<std::int32_t> begins;
  std::vector<std::int32_t> num_results_out;  // of the request when the row was planned
  std::vector<std::int32_t> replay_lengths;   // inputs at the row's begin that only replayable groups write
  std::vector<std::int32_t> prefill_lengths;  // whole prompt length, 0 on decode rows
  std::vector<std::uint8_t> logits_wanted;    // 1 on the last chunk of a prompt and on decode rows
  // Position inside the row up to which a state is computed into a block of its own as well, 0 for none. Its
  // slot is (checkpoint_tokens - 1) / block_granularity.
  std::vector<std::int32_t> checkpoint_tokens;
  // Inputs of all rows, concatenated in row order; -1 for a draft and for a token that has not landed.
  std::vector<std::int32_t> token_ids;
  std::vector<BlockTableRows> block_tables;  // by group; 0 = hole, -1 = padding behind a row's last slot
  // By group, [num_rows] each for state groups and empty for others: the table slots that a row continues
  // from, -1 at the beginning of a prompt, and leaves its final state in.
  std::vector<std::vector<std::int32_t>> state_input_slots;
  std::vector<std::vector<std::int32_t>> state_output_slots;
  std::vector<StoreOperation> stores;                  // those that are not pinned first
  std::vector<std::vector<std::int32_t>> zero_blocks;  // by group: fresh blocks, each once
  std::vector<LoadOperation> loads;                    // at most one
  std::vector<RemotePrefill> remote_prefills;
  std::vector<Handover> handovers;
  std::vector<AdmissionReport> admissions;
  std::vector<std::string> retracted;  // gave their blocks back for others; they come back by themselves
  std::vector<std::string> finished;   // requests that ended since the last plan, however they ended

  // Plans in a row without anything in them while requests live and nobody owes an answer: a caller that
  // forgot an event, or our mistake. Told at 1024 and at each doubling, 0 else.
  std::int64_t num_stalled_plans = 0;

  bool is_empty() const {
    return num_rows == 0 && remote_prefills.empty() && handovers.empty() && admissions.empty() &&
           retracted.empty() && finished.empty() && stores.empty() && loads.empty();
  }
};

}  // namespace pdmesh
