// Request: one live request of the scheduler. Its state owns what it holds; the rest is its history.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cache/prefix/prefix_hasher.h"
#include "fsm/request_states.h"
#include "fsm/transitions.h"
#include "scheduler/request_spec.h"

namespace pdmesh {

// A first admission that failed. It cannot succeed before blocks come free or its cached prefix grows.
struct BlockedAdmission {
  std::uint64_t capacity_version;
  std::uint64_t publication_version;
  std::int32_t num_hit_grains;
};

struct Request {
  Request(RequestSpec spec, std::uint64_t submission_number, bool prefilled_by_peer,
          std::int32_t prefix_granularity)
      : submission(submission_number),
        request_id(std::move(spec.request_id)),
        num_prompt_tokens(static_cast<std::int32_t>(spec.tokens.size())),
        max_new_tokens(spec.max_new_tokens),
        is_remote(prefilled_by_peer),
        tokens(std::move(spec.tokens)),
        chain(prefix_granularity, std::move(spec.extra_keys)),
        state(is_remote ? RequestState(AwaitingReady()) : RequestState(Waiting())) {}

  const std::uint64_t submission;  // older requests have smaller numbers
  const std::string request_id;
  const std::int32_t num_prompt_tokens;
  const std::int32_t max_new_tokens;
  const bool is_remote;

  std::vector<std::int32_t> tokens;  // prompt, then completion
  GrainChain chain;
  RequestState state;
  bool is_granted = false;         // prefill role: the peer has said where the blocks go
  std::int32_t num_overtakes = 0;  // younger requests admitted while this one was blocked
  std::optional<BlockedAdmission> blocked;
  PhaseView judged{};              // how the events of one batch so far would leave the request,
  std::uint64_t judged_batch = 0;  // valid for this batch only

  std::int32_t num_tokens() const { return static_cast<std::int32_t>(tokens.size()); }
  Phase phase() const { return PhaseOf(state); }
  bool OwesResult() const {
    if (const auto* prefilling = std::get_if<Prefilling>(&state)) {
      return prefilling->owes_result;
    }
    if (const auto* decoding = std::get_if<Decoding>(&state)) {
      return decoding->owes_result;
    }
    return std::holds_alternative<AwaitingResult>(state);
  }
  PhaseView view() const { return {.phase = phase(), .is_remote = is_remote, .owes_result = OwesResult()}; }

  // A decode row may be planned: the last token has landed and another one is wanted.
  bool CanDecode() const {
    const std::int32_t num_generated = num_tokens() - num_prompt_tokens;
    return !OwesResult() && num_generated < max_new_tokens;
  }
};

struct BySubmission {
  bool operator()(const Request* a, const Request* b) const { return a->submission < b->submission; }
};

}  // namespace pdmesh
