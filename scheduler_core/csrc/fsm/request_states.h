// The states of a request. A state owns what the request holds in it; a transition moves the bundle whole.
//
// The verbs below are the only ways from one state to the next; what has no verb does not compile. Which
// event allows which of them is decided by the transition table (fsm/transitions.h).
#pragma once

#include <cstdint>
#include <variant>
#include <vector>

#include "cache/coordinator/block_reserve.h"
#include "cache/core/block_table.h"
#include "cache/prefix/aged_frequency.h"
#include "fsm/results_out.h"
#include "fsm/slot_pool.h"

namespace pdmesh {

// Everything a request holds between its first admission and its end.
struct Holdings {
  SlotLease slot;
  ReserveLease reserve;            // outlives the tables
  std::vector<BlockTable> tables;  // by group
  std::uint64_t epoch = 0;
  PromptUses uses;
  std::int32_t num_hit_tokens = 0;
  // Of a prompt what is written or being written; later all tokens but the last, which is the next input.
  std::int32_t num_computed_tokens = 0;
  // Positions that the tables have made room for, drafts of rows whose results are out included.
  std::int64_t num_covered_tokens = 0;
  std::int32_t num_published_grains = 0;  // hits included
  // What the admission secured covers all that the request may still generate: it never needs another block.
  bool is_secured = false;
  // Where a prompt is stopped because others share it up to there; 0 for nowhere.
  std::int32_t promotion_tokens = 0;
  // The newest grain boundary that a chunk or landing reached, its kind, and where a state was computed into
  // a block, 0 for nowhere.
  std::int32_t boundary_tokens = 0;
  BoundaryKind boundary_kind = BoundaryKind::kChunk;
  std::int32_t checkpoint_tokens = 0;
};

struct AwaitingReady {};  // decode role: the peer has not started
struct Waiting {};
struct Prefilling {
  Holdings holdings;
  ResultsOut results_out;
};
struct AwaitingResult {  // the last chunk is out
  Holdings holdings;
  ResultsOut results_out;
};
struct RemotePrefilling {  // decode role: a peer fills the blocks
  Holdings holdings;
};
struct PrefillDone {  // the first token has landed
  Holdings holdings;
};
struct Decoding {
  Holdings holdings;
  ResultsOut results_out;           // the last chunk's may be among them
  std::int32_t reserve_tokens = 0;  // room that the next step is to make, at least what its row needs
};
struct HandingOver {  // prefill role: the transfer reads the blocks until the peer has everything
  Holdings holdings;
};
struct TransferHeld {  // prefill role: ended, but the transfer still reads the blocks
  ReserveLease reserve;
  std::vector<BlockTable> tables;
};
struct Quarantined {  // decode role: ended, but a peer may still write into the blocks
  ReserveLease reserve;
  std::vector<BlockTable> tables;
};
// Decode and fused roles: gave its blocks back in the middle. Its prompt is everything it has by now, and a
// local prefill of that goes on where it stopped.
struct Retracted {};
struct Finished {};

using RequestState =
    std::variant<AwaitingReady, Waiting, Prefilling, AwaitingResult, RemotePrefilling, PrefillDone, Decoding,
                 HandingOver, TransferHeld, Quarantined, Retracted, Finished>;

// In the order of RequestState.
enum class Phase : std::uint8_t {
  kAwaitingReady,
  kWaiting,
  kPrefilling,
  kAwaitingResult,
  kRemotePrefilling,
  kPrefillDone,
  kDecoding,
  kHandingOver,
  kTransferHeld,
  kQuarantined,
  kRetracted,
  kFinished,
};

inline Phase PhaseOf(const RequestState& state) {
  return static_cast<Phase>(state.index());
}
const char* NameOf(Phase phase);

// The holdings of a state that has them, else nullptr.
Holdings* HoldingsOf(RequestState& state);
const Holdings* HoldingsOf(const RequestState& state);
// The results that are out in a state; none in one that schedules no row.
ResultsOut ResultsOutOf(const RequestState& state);
// The tables of a state that holds blocks, else nullptr.
const std::vector<BlockTable>* TablesOf(const RequestState& state);

// Gives the blocks of a state back, for a request that keeps none: the groups in index order, in each the
// slots from the last to the first, then what was promised. The order decides where later blocks come from.
void ReleaseBlocks(RequestState& state) noexcept;

// Transitions.
Prefilling StartPrefill(Waiting&&, Holdings holdings);
Prefilling StartPrefill(Retracted&&, Holdings holdings);
AwaitingResult CompletePrompt(Prefilling&& state);
RemotePrefilling GrantRemotePrefill(Waiting&&, Holdings holdings);
PrefillDone LandFirstToken(AwaitingResult&& state);
PrefillDone LandRemotePrefill(RemotePrefilling&& state);
Decoding StartDecoding(PrefillDone&& state);
Decoding StartDecoding(AwaitingResult&& state);
HandingOver StartHandover(PrefillDone&& state);
// Slot and blocks return; what the holdings said of them is forgotten.
Retracted Retract(Prefilling&& state);
Retracted Retract(AwaitingResult&& state);
Retracted Retract(PrefillDone&& state);
Retracted Retract(Decoding&& state);
// The slot and everything but the blocks returns at once.
TransferHeld HoldForTransfer(Holdings holdings);
// Claimed prefix hits return at once: no peer writes there. `num_hit_slots[group]` leading slots are hits.
Quarantined Quarantine(RemotePrefilling&& state, const std::vector<std::int32_t>& num_hit_slots);

}  // namespace pdmesh
