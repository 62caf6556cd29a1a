#include "fsm/request_states.h"

#include <array>
#include <utility>

namespace pdmesh {
namespace {

// The request acquires nothing any more: it is promised what it holds.
void LowerReserve(ReserveLease& reserve, const std::vector<BlockTable>& tables) {
  std::vector<std::int64_t> num_held;
  for (const BlockTable& table : tables) {
    num_held.push_back(table.num_held_blocks());
  }
  reserve.LowerTo(num_held);
}

void ReleaseAll(std::vector<BlockTable>& tables, ReserveLease& reserve) noexcept {
  for (BlockTable& table : tables) {
    table.Clear();
  }
  reserve.Reset();
}

Retracted GiveBack(Holdings holdings) {
  ReleaseAll(holdings.tables, holdings.reserve);
  return {};
}

}  // namespace

const char* NameOf(Phase phase) {
  constexpr std::array<const char*, std::variant_size_v<RequestState>> kNames = {
      "awaiting_ready",    "waiting",      "prefilling", "awaiting_result",
      "remote_prefilling", "prefill_done", "decoding",   "handing_over",
      "transfer_held",     "quarantined",  "retracted",  "finished"};
  return kNames[static_cast<std::size_t>(phase)];
}

Holdings* HoldingsOf(RequestState& state) {
  return std::visit(
      [](auto& concrete) -> Holdings* {
        if constexpr (requires { concrete.holdings; }) {
          return &concrete.holdings;
        } else {
          return nullptr;
        }
      },
      state);
}

const Holdings* HoldingsOf(const RequestState& state) {
  return HoldingsOf(const_cast<RequestState&>(state));
}

ResultsOut ResultsOutOf(const RequestState& state) {
  return std::visit(
      [](const auto& concrete) -> ResultsOut {
        if constexpr (requires { concrete.results_out; }) {
          return concrete.results_out;
        } else {
          return {};
        }
      },
      state);
}

const std::vector<BlockTable>* TablesOf(const RequestState& state) {
  if (const Holdings* holdings = HoldingsOf(state)) {
    return &holdings->tables;
  }
  if (const auto* held = std::get_if<TransferHeld>(&state)) {
    return &held->tables;
  }
  if (const auto* quarantined = std::get_if<Quarantined>(&state)) {
    return &quarantined->tables;
  }
  return nullptr;
}

void ReleaseBlocks(RequestState& state) noexcept {
  std::visit(
      [](auto& concrete) {
        if constexpr (requires { concrete.holdings; }) {
          ReleaseAll(concrete.holdings.tables, concrete.holdings.reserve);
        } else if constexpr (requires { concrete.tables; }) {
          ReleaseAll(concrete.tables, concrete.reserve);
        }
      },
      state);
}

Prefilling StartPrefill(Waiting&&, Holdings holdings) {
  return {.holdings = std::move(holdings), .results_out = {}};
}

Prefilling StartPrefill(Retracted&&, Holdings holdings) {
  return {.holdings = std::move(holdings), .results_out = {}};
}

AwaitingResult CompletePrompt(Prefilling&& state) {
  return {.holdings = std::move(state.holdings), .results_out = state.results_out};
}

RemotePrefilling GrantRemotePrefill(Waiting&&, Holdings holdings) {
  return {.holdings = std::move(holdings)};
}

PrefillDone LandFirstToken(AwaitingResult&& state) {
  return {.holdings = std::move(state.holdings)};
}

PrefillDone LandRemotePrefill(RemotePrefilling&& state) {
  return {.holdings = std::move(state.holdings)};
}

Decoding StartDecoding(PrefillDone&& state) {
  return {.holdings = std::move(state.holdings), .results_out = {}};
}

Decoding StartDecoding(AwaitingResult&& state) {
  return {.holdings = std::move(state.holdings), .results_out = state.results_out};
}

HandingOver StartHandover(PrefillDone&& state) {
  state.holdings.slot.Reset();  // no row is scheduled any more
  return {.holdings = std::move(state.holdings)};
}

Retracted Retract(Prefilling&& state) {
  return GiveBack(std::move(state.holdings));
}

Retracted Retract(AwaitingResult&& state) {
  return GiveBack(std::move(state.holdings));
}

Retracted Retract(PrefillDone&& state) {
  return GiveBack(std::move(state.holdings));
}

Retracted Retract(Decoding&& state) {
  return GiveBack(std::move(state.holdings));
}

TransferHeld HoldForTransfer(Holdings holdings) {
  LowerReserve(holdings.reserve, holdings.tables);
  return {.reserve = std::move(holdings.reserve), .tables = std::move(holdings.tables)};
}

Quarantined Quarantine(RemotePrefilling&& state, const std::vector<std::int32_t>& num_hit_slots) {
  std::vector<BlockTable> tables = std::move(state.holdings.tables);
  for (std::size_t group = 0; group < tables.size(); ++group) {
    tables[group].ReleaseFront(num_hit_slots[group]);
  }
  LowerReserve(state.holdings.reserve, tables);
  return {.reserve = std::move(state.holdings.reserve), .tables = std::move(tables)};
}

}  // namespace pdmesh
