#include "fsm/transitions.h"

#include <algorithm>

#include "support/errors.h"

namespace pdmesh {
namespace {

bool HasEnded(Phase phase) {
  return phase == Phase::kTransferHeld || phase == Phase::kQuarantined || phase == Phase::kFinished;
}

// Not admitted to anything so far.
bool NeverRan(Phase phase) {
  return phase == Phase::kAwaitingReady || phase == Phase::kWaiting;
}

// The judgements of one request in one role; one overload per event.
class Table {
 public:
  Table(Role role, const PhaseView& view, const EventView& event) : role_(role), view_(view), event_(event) {}

  Judgement operator()(const ResultEvent* result) const {
    if (HasEnded(view_.phase) || view_.phase == Phase::kRetracted) {
      return Ignore();
    }
    if (view_.results_out.num() == 0) {
      Refuse("no result is owed");
    }
    CheckTokens(result->tokens);
    const bool is_first_token =
        view_.phase == Phase::kAwaitingResult && view_.results_out.oldest_max_tokens() > 0;
    PhaseView next = view_;
    next.phase = is_first_token ? Phase::kPrefillDone : view_.phase;
    next.results_out.Land();
    next.num_wanted_tokens -= static_cast<std::int32_t>(result->tokens.size());
    return {.verdict = Verdict::kApply, .next = next};
  }

  Judgement operator()(const FinishEvent*) const {
    if (HasEnded(view_.phase)) {
      return Ignore();
    }
    const bool is_legal = view_.phase == Phase::kPrefillDone || view_.phase == Phase::kDecoding ||
                          view_.phase == Phase::kRetracted;
    if (!is_legal || role_ == Role::kPrefill) {
      Refuse(role_ == Role::kPrefill ? "the transfer ends a request of the prefill role"
                                     : "only prefill_done, decoding and retracted requests finish");
    }
    return To(Phase::kFinished);
  }

  Judgement operator()(const AbortEvent*) const { return HasEnded(view_.phase) ? Ignore() : EndEarly(); }

  Judgement operator()(const ReadyEvent*) const {
    RequireRole(Role::kDecode);
    return view_.phase == Phase::kAwaitingReady ? To(Phase::kWaiting) : Ignore();
  }

  Judgement operator()(const GrantedEvent*) const {
    RequireRole(Role::kPrefill);
    return HasEnded(view_.phase) ? Ignore() : Judgement{.verdict = Verdict::kApply, .next = view_};
  }

  Judgement operator()(const DoneEvent* done) const {
    RequireRole(Role::kDecode);
    if (NeverRan(view_.phase)) {
      Refuse(view_.is_remote ? "nothing was granted yet" : "no peer prefills this request");
    }
    if (view_.phase != Phase::kRemotePrefilling) {
      return Ignore();
    }
    if (done->token < 0) {
      Refuse("token must not be negative, got " + std::to_string(done->token));
    }
    Judgement landed = To(Phase::kPrefillDone);
    --landed.next.num_wanted_tokens;
    return landed;
  }

  Judgement operator()(const HandedOverEvent*) const {
    RequireRole(Role::kPrefill);
    if (view_.phase == Phase::kHandingOver || view_.phase == Phase::kTransferHeld) {
      return To(Phase::kFinished);
    }
    if (view_.phase != Phase::kFinished) {
      Refuse("no handover was planned yet");
    }
    return Ignore();
  }

  Judgement operator()(const FailedEvent*) const {
    if (role_ == Role::kFused) {
      Refuse("the fused role hands nothing over");
    }
    if (HasEnded(view_.phase)) {
      return Ignore();
    }
    // On the decode role a failure after done, or of a request that no peer prefills, is a late message.
    const bool concerns_decode =
        view_.phase == Phase::kRemotePrefilling || (view_.is_remote && NeverRan(view_.phase));
    return role_ == Role::kPrefill || concerns_decode ? EndEarly() : Ignore();
  }

  Judgement operator()(const RetractEvent*) const {
    if (role_ == Role::kPrefill) {
      Refuse("the prefill role retracts nothing");
    }
    if (HasEnded(view_.phase) || view_.phase == Phase::kRetracted) {
      return Ignore();
    }
    if (NeverRan(view_.phase) || view_.phase == Phase::kRemotePrefilling) {
      Refuse("no row of it was planned");
    }
    return To(Phase::kRetracted);
  }

  Judgement operator()(const QuiescedEvent*) const {
    if (role_ == Role::kFused) {
      Refuse("the fused role hands nothing over");
    }
    const bool is_held = view_.phase == Phase::kTransferHeld || view_.phase == Phase::kQuarantined;
    return is_held ? To(Phase::kFinished) : Ignore();
  }

  Judgement operator()(const ReserveEvent* reserve) const {
    if (HasEnded(view_.phase)) {
      return Ignore();
    }
    if (view_.phase != Phase::kDecoding) {
      Refuse("only decoding requests reserve");
    }
    if (reserve->num_tokens < 1) {
      Refuse("num_tokens must be at least 1, got " + std::to_string(reserve->num_tokens));
    }
    return {.verdict = Verdict::kApply, .next = view_};
  }

 private:
  [[noreturn]] void Refuse(const std::string& why) const {
    throw ContractError("event " + std::string(NameOf(event_)) + " of request \"" + RequestIdOf(event_) +
                        "\" in state " + NameOf(view_.phase) + ": " + why);
  }

  // A row that was planned ahead brings none when the result before it brought all that was wanted. The first
  // token lands whether one is wanted or not.
  void CheckTokens(const std::vector<std::int32_t>& tokens) const {
    std::int32_t most = view_.results_out.oldest_max_tokens();
    if (view_.phase == Phase::kDecoding) {
      most = std::min(most, view_.num_wanted_tokens);
    }
    const std::int32_t least = std::min(1, most);
    const auto num_tokens = static_cast<std::int64_t>(tokens.size());
    if (num_tokens < least || num_tokens > most) {
      const std::string due =
          least == most ? std::to_string(most) : std::to_string(least) + " to " + std::to_string(most);
      Refuse("tokens must hold " + due + ", got " + std::to_string(num_tokens));
    }
    const auto negative =
        std::find_if(tokens.begin(), tokens.end(), [](std::int32_t token) { return token < 0; });
    if (negative != tokens.end()) {
      Refuse("tokens[" + std::to_string(negative - tokens.begin()) + "] must not be negative, got " +
             std::to_string(*negative));
    }
  }

  void RequireRole(Role role) const {
    if (role_ != role) {
      Refuse(std::string("the event belongs to the ") + NameOf(role) + " role, this scheduler is " +
             NameOf(role_));
    }
  }

  Judgement Ignore() const { return {.verdict = Verdict::kIgnore, .next = view_}; }

  Judgement To(Phase phase) const {
    return {.verdict = Verdict::kApply,
            .next = {.phase = phase,
                     .is_remote = view_.is_remote,
                     .results_out = {},
                     .num_wanted_tokens = view_.num_wanted_tokens}};
  }

  // An end that the request's own work did not reach. What a peer may still touch is kept until it is quiet.
  Judgement EndEarly() const {
    if (view_.phase == Phase::kRemotePrefilling) {
      return To(Phase::kQuarantined);
    }
    const bool holds_blocks = !NeverRan(view_.phase) && view_.phase != Phase::kRetracted;
    return To(role_ == Role::kPrefill && holds_blocks ? Phase::kTransferHeld : Phase::kFinished);
  }

  Role role_;
  const PhaseView& view_;
  const EventView& event_;
};

}  // namespace

Judgement Judge(Role role, const PhaseView& view, const EventView& event) {
  return std::visit(Table(role, view, event), event);
}

}  // namespace pdmesh
