// Request: one live request of the scheduler. Its state owns what it holds; the rest is its history.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cache/prefix/prefix_hasher.h"
#include "fsm/request_states.h"
#include "fsm/results_out.h"
#include "fsm/transitions.h"
#include "scheduler/request_spec.h"

namespace pdmesh {

// The admission of a prompt that failed. It cannot succeed before blocks come free or its cached prefix
// grows.
struct BlockedAdmission {
  std::uint64_t capacity_version;
  std::uint64_t publication_version;
  std::int32_t num_hit_grains;
  std::int32_t num_budget_tokens;  // what its first chunk could take
};

struct Request {
  Request(RequestSpec spec, std::uint64_t submission_number, bool prefilled_by_peer,
          std::int32_t prefix_granularity, std::int32_t max_request_tokens)
      : submission(submission_number),
        request_id(std::move(spec.request_id)),
        num_prompt_tokens(static_cast<std::int32_t>(spec.tokens.size())),
        max_new_tokens(spec.max_new_tokens),
        num_submitted_tokens(num_prompt_tokens),
        limit_tokens(max_request_tokens - num_prompt_tokens < max_new_tokens.value_or(max_request_tokens)
                         ? max_request_tokens
                         : num_prompt_tokens + *max_new_tokens),
        is_remote(prefilled_by_peer),
        has_extra_keys(!spec.extra_keys.empty()),
        tokens(std::move(spec.tokens)),
        chain(prefix_granularity, std::move(spec.extra_keys)),
        state(is_remote ? RequestState(AwaitingReady()) : RequestState(Waiting())) {}

  const std::uint64_t submission;  // older requests have smaller numbers
  const std::string request_id;
  std::int32_t num_prompt_tokens;  // what a prefill computes: a retraction adds what was generated
  const std::optional<std::int32_t> max_new_tokens;  // nullopt: undeclared
  const std::int32_t num_submitted_tokens;
  const std::int32_t limit_tokens;  // prompt and completion, where it is scheduled no further
  bool is_remote;                   // decode role: a peer prefills the prompt; never after a retraction
  const bool has_extra_keys;        // nobody without them shares its prefixes

  std::vector<std::int32_t> tokens;  // prompt, then completion
  GrainChain chain;
  std::vector<std::uint64_t> event_hashes;  // of its first grains, as far as they were announced
  RequestState state;
  bool is_granted = false;         // prefill role: the peer has said where the blocks go
  std::int32_t num_overtakes = 0;  // younger requests admitted while this one was blocked
  std::optional<BlockedAdmission> blocked;
  std::int32_t num_retractions = 0;    // for want of memory
  std::uint64_t retraction_epoch = 0;  // rises with every retraction of any request
  PhaseView judged{};                  // how the events of one batch so far would leave the request,
  std::uint64_t judged_batch = 0;      // valid for this batch only
  std::uint64_t last_plan = 0;         // the number of the last plan that has a row of it

  std::int32_t num_tokens() const { return static_cast<std::int32_t>(tokens.size()); }
  Phase phase() const { return PhaseOf(state); }
  ResultsOut results_out() const { return ResultsOutOf(state); }
  std::int32_t num_results_out() const { return results_out().num(); }
  bool has_output() const { return num_tokens() > num_submitted_tokens; }
  // What may still be generated, behind the prompt as it is now.
  std::int32_t num_wanted_tokens() const { return std::max(0, limit_tokens - num_prompt_tokens); }
  // Retracted when nothing was left to generate: it waits for the caller's finish.
  bool IsComplete() const { return phase() == Phase::kRetracted && has_output() && num_wanted_tokens() == 0; }
  PhaseView view() const {
    return {.phase = phase(),
            .is_remote = is_remote,
            .results_out = results_out(),
            .num_wanted_tokens = limit_tokens - num_tokens()};
  }

  // Starts over with a prompt of everything it has.
  void Rebase(std::uint64_t epoch) {
    num_prompt_tokens = num_tokens();
    is_remote = false;
    blocked.reset();
    retraction_epoch = epoch;
  }

  // Completion tokens that no row was planned for yet, each result out counted for one. REQUIRES: only the
  // last chunk and decode rows are out.
  std::int32_t num_open_tokens() const { return limit_tokens - num_tokens() - num_results_out(); }
};

struct BySubmission {
  bool operator()(const Request* a, const Request* b) const { return a->submission < b->submission; }
};

}  // namespace pdmesh
