// The transition table of request events: pure, over a small view of a request, so that a batch of events can
// be judged as a whole before the first one is applied.
#pragma once

#include <string>

#include "fsm/events.h"
#include "fsm/request_states.h"
#include "role.h"

namespace pdmesh {

// What the table needs to know of a request.
struct PhaseView {
  Phase phase;
  bool is_remote;  // decode role: a peer prefills the prompt
  ResultsOut results_out = {};
  std::int32_t num_wanted_tokens = 0;  // completion tokens that have not landed and may still be generated
};

enum class Verdict : std::uint8_t {
  kApply,
  kIgnore,  // late or repeated: changes nothing
};

struct Judgement {
  Verdict verdict;
  PhaseView next;  // how the request looks afterwards; the view itself when ignored
};

// Throws ContractError naming event, phase and request when the event breaks the agreement.
Judgement Judge(Role role, const PhaseView& view, const EventView& event);

}  // namespace pdmesh
