#include "fsm/transitions.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

#include "support/errors.h"

namespace pdmesh {
namespace {

constexpr std::array kAllPhases = {Phase::kAwaitingReady,  Phase::kWaiting,          Phase::kPrefilling,
                                   Phase::kAwaitingResult, Phase::kRemotePrefilling, Phase::kPrefillDone,
                                   Phase::kDecoding,       Phase::kHandingOver,      Phase::kTransferHeld,
                                   Phase::kQuarantined,    Phase::kFinished};

// "next phase", "-" for ignored, "!" for a broken contract.
std::string Outcome(Role role, Phase phase, const EventView& event, bool is_remote) {
  try {
    const Judgement judgement =
        Judge(role, {.phase = phase, .is_remote = is_remote, .owes_result = false}, event);
    return judgement.verdict == Verdict::kIgnore ? "-" : NameOf(judgement.next.phase);
  } catch (const ContractError& error) {
    EXPECT_NE(std::string(error.what()).find(NameOf(event)), std::string::npos);
    EXPECT_NE(std::string(error.what()).find(NameOf(phase)), std::string::npos);
    return "!";
  }
}

std::map<std::string, std::string> Outcomes(Role role, const EventView& event, bool is_remote) {
  std::map<std::string, std::string> outcomes;
  for (const Phase phase : kAllPhases) {
    outcomes[NameOf(phase)] = Outcome(role, phase, event, is_remote);
  }
  return outcomes;
}

TEST(Transitions, AbortIsLegalInEveryStateAndKeepsWhatAPeerMayTouch) {
  const AbortEvent abort{.request_id = "r"};
  const auto prefill = Outcomes(Role::kPrefill, &abort, false);
  EXPECT_EQ(prefill.at("waiting"), "finished");
  for (const char* phase : {"prefilling", "awaiting_result", "prefill_done", "handing_over"}) {
    EXPECT_EQ(prefill.at(phase), "transfer_held") << phase;
  }
  const auto decode = Outcomes(Role::kDecode, &abort, true);
  EXPECT_EQ(decode.at("remote_prefilling"), "quarantined");
  for (const char* phase : {"awaiting_ready", "waiting", "prefilling", "prefill_done", "decoding"}) {
    EXPECT_EQ(decode.at(phase), "finished") << phase;
  }
  for (const char* phase : {"transfer_held", "quarantined", "finished"}) {
    EXPECT_EQ(decode.at(phase), "-") << phase;
    EXPECT_EQ(prefill.at(phase), "-") << phase;
  }
}

TEST(Transitions, FinishEndsOnlyRequestsThatHaveTheirFirstToken) {
  const FinishEvent finish{.request_id = "r"};
  for (const Role role : {Role::kDecode, Role::kFused}) {
    for (const auto& [phase, outcome] : Outcomes(role, &finish, false)) {
      const bool is_legal = phase == "prefill_done" || phase == "decoding";
      const bool has_ended = phase == "transfer_held" || phase == "quarantined" || phase == "finished";
      EXPECT_EQ(outcome, is_legal ? "finished" : has_ended ? "-" : "!") << phase;
    }
  }
  EXPECT_EQ(Outcome(Role::kPrefill, Phase::kPrefillDone, &finish, false), "!");
}

TEST(Transitions, DoneBeforeAGrantIsABrokenContractAndLaterIsLate) {
  const DoneEvent done{.request_id = "r", .token = 3};
  const auto outcomes = Outcomes(Role::kDecode, &done, true);
  EXPECT_EQ(outcomes.at("awaiting_ready"), "!");
  EXPECT_EQ(outcomes.at("waiting"), "!");
  EXPECT_EQ(outcomes.at("remote_prefilling"), "prefill_done");
  EXPECT_EQ(outcomes.at("decoding"), "-");
  EXPECT_EQ(outcomes.at("quarantined"), "-");
  const DoneEvent negative{.request_id = "r", .token = -1};
  EXPECT_EQ(Outcome(Role::kDecode, Phase::kRemotePrefilling, &negative, true), "!");
}

TEST(Transitions, ReadyIsHeardOnce) {
  const ReadyEvent ready{.request_id = "r"};
  for (const auto& [phase, outcome] : Outcomes(Role::kDecode, &ready, true)) {
    EXPECT_EQ(outcome, phase == "awaiting_ready" ? "waiting" : "-") << phase;
  }
}

TEST(Transitions, HandedOverNeedsAHandover) {
  const HandedOverEvent handed_over{.request_id = "r"};
  const auto outcomes = Outcomes(Role::kPrefill, &handed_over, false);
  EXPECT_EQ(outcomes.at("handing_over"), "finished");
  EXPECT_EQ(outcomes.at("transfer_held"), "finished");
  EXPECT_EQ(outcomes.at("prefill_done"), "!");
  EXPECT_EQ(outcomes.at("finished"), "-");
}

TEST(Transitions, OnlyQuiescedFreesWhatWasHeldBack) {
  const QuiescedEvent quiesced{.request_id = "r"};
  for (const auto& [phase, outcome] : Outcomes(Role::kPrefill, &quiesced, false)) {
    EXPECT_EQ(outcome, phase == "transfer_held" || phase == "quarantined" ? "finished" : "-") << phase;
  }
}

TEST(Transitions, AFailureAfterDoneIsLate) {
  const FailedEvent failed{.request_id = "r"};
  const auto outcomes = Outcomes(Role::kDecode, &failed, true);
  EXPECT_EQ(outcomes.at("remote_prefilling"), "quarantined");
  EXPECT_EQ(outcomes.at("waiting"), "finished");
  EXPECT_EQ(outcomes.at("decoding"), "-");
  EXPECT_EQ(Outcome(Role::kFused, Phase::kDecoding, &failed, false), "!");
}

TEST(Transitions, AResultMustBeOwedAndHoldWhatTheRowWasDue) {
  const ResultEvent none{.request_id = "r", .tokens = {}};
  const ResultEvent one{.request_id = "r", .tokens = {5}};
  const auto judge = [](Phase phase, bool owes, const ResultEvent& result) {
    return Judge(Role::kFused, {.phase = phase, .is_remote = false, .owes_result = owes}, &result).next.phase;
  };
  EXPECT_EQ(judge(Phase::kPrefilling, true, none), Phase::kPrefilling);
  EXPECT_EQ(judge(Phase::kAwaitingResult, true, one), Phase::kPrefillDone);
  EXPECT_EQ(judge(Phase::kDecoding, true, one), Phase::kDecoding);
  EXPECT_EQ(judge(Phase::kFinished, false, one), Phase::kFinished);
  EXPECT_THROW(judge(Phase::kPrefilling, true, one), ContractError);
  EXPECT_THROW(judge(Phase::kDecoding, true, none), ContractError);
  EXPECT_THROW(judge(Phase::kDecoding, false, one), ContractError);
}

TEST(Transitions, EventsOfAnotherRoleAreABrokenContract) {
  const GrantedEvent granted{.request_id = "r"};
  const ReadyEvent ready{.request_id = "r"};
  EXPECT_EQ(Outcome(Role::kDecode, Phase::kWaiting, &granted, true), "!");
  EXPECT_EQ(Outcome(Role::kFused, Phase::kWaiting, &ready, false), "!");
}

}  // namespace
}  // namespace pdmesh
