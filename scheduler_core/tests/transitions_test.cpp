#include "fsm/transitions.h"

#include <gtest/gtest.h>

#include <initializer_list>
#include <map>
#include <string>

#include "support/errors.h"

namespace pdmesh {
namespace {

constexpr std::array kAllPhases = {Phase::kAwaitingReady,  Phase::kWaiting,          Phase::kPrefilling,
                                   Phase::kAwaitingResult, Phase::kRemotePrefilling, Phase::kPrefillDone,
                                   Phase::kDecoding,       Phase::kHandingOver,      Phase::kTransferHeld,
                                   Phase::kQuarantined,    Phase::kRetracted,        Phase::kFinished};

// "next phase", "-" for ignored, "!" for a broken contract.
std::string Outcome(Role role, Phase phase, const EventView& event, bool is_remote) {
  try {
    const Judgement judgement = Judge(role, {.phase = phase, .is_remote = is_remote}, event);
    return judgement.verdict == Verdict::kIgnore ? "-" : NameOf(judgement.next.phase);
  } catch (const ContractError& error) {
    EXPECT_NE(std::string(error.what()).find(NameOf(event)), std::string::npos);
    EXPECT_NE(std::string(error.what()).find(NameOf(phase)), std::string::npos);
    return "!";
  }
}

// Results that are out, by the most tokens they bring.
ResultsOut Out(std::initializer_list<std::int32_t> max_tokens) {
  ResultsOut out;
  for (const std::int32_t most : max_tokens) {
    out.Add(most);
  }
  return out;
}

std::map<std::string, std::string> Outcomes(Role role, const EventView& event, bool is_remote) {
  std::map<std::string, std::string> outcomes;
  for (const Phase phase : kAllPhases) {
    outcomes[NameOf(phase)] = Outcome(role, phase, event, is_remote);
  }
  return outcomes;
}

// behaviour: J14
TEST(Transitions, AbortIsLegalInEveryStateAndKeepsWhatAPeerMayTouch) {
  const AbortEvent abort{.request_id = "r"};
  const auto prefill = Outcomes(Role::kPrefill, &abort, false);
  EXPECT_EQ(prefill.at("waiting"), "finished");
  for (const char* phase : {"prefilling", "awaiting_result", "prefill_done", "handing_over"}) {
    EXPECT_EQ(prefill.at(phase), "transfer_held") << phase;
  }
  const auto decode = Outcomes(Role::kDecode, &abort, true);
  EXPECT_EQ(decode.at("remote_prefilling"), "quarantined");
  for (const char* phase :
       {"awaiting_ready", "waiting", "prefilling", "prefill_done", "decoding", "retracted"}) {
    EXPECT_EQ(decode.at(phase), "finished") << phase;
  }
  for (const char* phase : {"transfer_held", "quarantined", "finished"}) {
    EXPECT_EQ(decode.at(phase), "-") << phase;
    EXPECT_EQ(prefill.at(phase), "-") << phase;
  }
}

// behaviour: B5, J14, L7
TEST(Transitions, FinishEndsOnlyRequestsThatHaveTheirFirstToken) {
  const FinishEvent finish{.request_id = "r"};
  for (const Role role : {Role::kDecode, Role::kFused}) {
    for (const auto& [phase, outcome] : Outcomes(role, &finish, false)) {
      const bool is_legal = phase == "prefill_done" || phase == "decoding" || phase == "retracted";
      const bool has_ended = phase == "transfer_held" || phase == "quarantined" || phase == "finished";
      EXPECT_EQ(outcome, is_legal ? "finished" : has_ended ? "-" : "!") << phase;
    }
  }
  EXPECT_EQ(Outcome(Role::kPrefill, Phase::kPrefillDone, &finish, false), "!");
}

// behaviour: B5, L7
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

// behaviour: L7
TEST(Transitions, DoneOfAWaitingRequestThatNoPeerPrefillsIsABrokenContract) {
  const DoneEvent done{.request_id = "r", .token = 3};
  const auto outcomes = Outcomes(Role::kDecode, &done, false);
  EXPECT_EQ(outcomes.at("waiting"), "!");
  for (const char* phase : {"prefilling", "decoding", "retracted", "finished"}) {
    EXPECT_EQ(outcomes.at(phase), "-") << phase;
  }
}

// behaviour: M18
TEST(Transitions, RetractTakesBackWhatAScheduledRequestHolds) {
  const RetractEvent retract{.request_id = "r"};
  for (const Role role : {Role::kDecode, Role::kFused}) {
    const auto outcomes = Outcomes(role, &retract, false);
    for (const char* phase : {"prefilling", "awaiting_result", "prefill_done", "decoding"}) {
      EXPECT_EQ(outcomes.at(phase), "retracted") << phase;
    }
    for (const char* phase : {"retracted", "quarantined", "finished"}) {
      EXPECT_EQ(outcomes.at(phase), "-") << phase;
    }
  }
}

// behaviour: B5
TEST(Transitions, RetractOfARequestThatHasNoRowOfItsOwnIsABrokenContract) {
  const RetractEvent retract{.request_id = "r"};
  const auto outcomes = Outcomes(Role::kDecode, &retract, true);
  for (const char* phase : {"awaiting_ready", "waiting", "remote_prefilling"}) {
    EXPECT_EQ(outcomes.at(phase), "!") << phase;
  }
  EXPECT_EQ(Outcome(Role::kPrefill, Phase::kPrefilling, &retract, false), "!");
}

// behaviour: M18
TEST(Transitions, AResultOfARetractedRequestIsLate) {
  const ResultEvent result{.request_id = "r", .tokens = {1, 2, 3}};
  EXPECT_EQ(Outcome(Role::kFused, Phase::kRetracted, &result, false), "-");
}

// behaviour: L1, T3
TEST(Transitions, ReadyIsHeardOnce) {
  const ReadyEvent ready{.request_id = "r"};
  for (const auto& [phase, outcome] : Outcomes(Role::kDecode, &ready, true)) {
    EXPECT_EQ(outcome, phase == "awaiting_ready" ? "waiting" : "-") << phase;
  }
}

// behaviour: B5
TEST(Transitions, HandedOverNeedsAHandover) {
  const HandedOverEvent handed_over{.request_id = "r"};
  const auto outcomes = Outcomes(Role::kPrefill, &handed_over, false);
  EXPECT_EQ(outcomes.at("handing_over"), "finished");
  EXPECT_EQ(outcomes.at("transfer_held"), "finished");
  EXPECT_EQ(outcomes.at("prefill_done"), "!");
  EXPECT_EQ(outcomes.at("finished"), "-");
}

// behaviour: L9
TEST(Transitions, OnlyQuiescedFreesWhatWasHeldBack) {
  const QuiescedEvent quiesced{.request_id = "r"};
  for (const auto& [phase, outcome] : Outcomes(Role::kPrefill, &quiesced, false)) {
    EXPECT_EQ(outcome, phase == "transfer_held" || phase == "quarantined" ? "finished" : "-") << phase;
  }
}

// behaviour: T3
TEST(Transitions, AFailureAfterDoneIsLate) {
  const FailedEvent failed{.request_id = "r"};
  const auto outcomes = Outcomes(Role::kDecode, &failed, true);
  EXPECT_EQ(outcomes.at("remote_prefilling"), "quarantined");
  EXPECT_EQ(outcomes.at("waiting"), "finished");
  EXPECT_EQ(outcomes.at("decoding"), "-");
  EXPECT_EQ(Outcome(Role::kFused, Phase::kDecoding, &failed, false), "!");
}

// behaviour: J11
TEST(Transitions, AResultMustBeOwedAndHoldWhatTheRowWasDue) {
  const ResultEvent none{.request_id = "r", .tokens = {}};
  const ResultEvent one{.request_id = "r", .tokens = {5}};
  const auto judge = [](Phase phase, const ResultsOut& out, const ResultEvent& result) {
    const PhaseView view{.phase = phase, .is_remote = false, .results_out = out, .num_wanted_tokens = 9};
    return Judge(Role::kFused, view, &result).next.phase;
  };
  EXPECT_EQ(judge(Phase::kPrefilling, Out({0}), none), Phase::kPrefilling);
  EXPECT_EQ(judge(Phase::kAwaitingResult, Out({1}), one), Phase::kPrefillDone);
  EXPECT_EQ(judge(Phase::kDecoding, Out({1}), one), Phase::kDecoding);
  EXPECT_EQ(judge(Phase::kFinished, Out({}), one), Phase::kFinished);
  EXPECT_THROW(judge(Phase::kPrefilling, Out({0}), one), ContractError);
  EXPECT_THROW(judge(Phase::kDecoding, Out({1}), none), ContractError);
  EXPECT_THROW(judge(Phase::kDecoding, Out({}), one), ContractError);
}

// behaviour: S1
TEST(Transitions, ADecodeRowBringsAtLeastOneTokenAndNoMoreThanItFedOrAreWanted) {
  const auto outcome = [](std::vector<std::int32_t> tokens, std::int32_t num_wanted_tokens) {
    const ResultEvent result{.request_id = "r", .tokens = std::move(tokens)};
    const PhaseView view{.phase = Phase::kDecoding,
                         .is_remote = false,
                         .results_out = Out({4}),
                         .num_wanted_tokens = num_wanted_tokens};
    try {
      return std::to_string(Judge(Role::kFused, view, &result).next.num_wanted_tokens);
    } catch (const ContractError& error) {
      return std::string(error.what());
    }
  };
  EXPECT_EQ(outcome({5}, 9), "8");
  EXPECT_EQ(outcome({5, 6, 7, 8}, 9), "5");
  EXPECT_NE(outcome({}, 9).find("tokens must hold 1 to 4, got 0"), std::string::npos);
  EXPECT_NE(outcome({1, 2, 3, 4, 5}, 9).find("tokens must hold 1 to 4, got 5"), std::string::npos);
  EXPECT_NE(outcome({1, 2, 3}, 2).find("tokens must hold 1 to 2, got 3"), std::string::npos);
  EXPECT_NE(outcome({1, -2}, 9).find("tokens[1] must not be negative, got -2"), std::string::npos);
  EXPECT_EQ(outcome({}, 0), "0");  // the result before it brought all
}

// behaviour: J11
TEST(Transitions, ResultsOfOverlappedRowsLandInTheOrderOfTheirRows) {
  const ResultEvent none{.request_id = "r", .tokens = {}};
  const ResultEvent one{.request_id = "r", .tokens = {5}};
  const ResultEvent two{.request_id = "r", .tokens = {5, 6}};
  const PhaseView completed{.phase = Phase::kAwaitingResult,
                            .is_remote = false,
                            .results_out = Out({0, 1}),
                            .num_wanted_tokens = 9};
  EXPECT_THROW(Judge(Role::kFused, completed, &one), ContractError);
  const PhaseView last_out = Judge(Role::kFused, completed, &none).next;
  EXPECT_EQ(last_out.phase, Phase::kAwaitingResult);
  EXPECT_THROW(Judge(Role::kFused, last_out, &none), ContractError);
  EXPECT_EQ(Judge(Role::kFused, last_out, &one).next.phase, Phase::kPrefillDone);

  const PhaseView ahead{
      .phase = Phase::kDecoding, .is_remote = false, .results_out = Out({1, 4}), .num_wanted_tokens = 9};
  EXPECT_THROW(Judge(Role::kFused, ahead, &two), ContractError);
  const PhaseView first_landed = Judge(Role::kFused, ahead, &one).next;
  EXPECT_EQ(first_landed.results_out.num(), 1);
  EXPECT_EQ(Judge(Role::kFused, first_landed, &two).next.results_out.num(), 0);
}

TEST(Transitions, EventsOfAnotherRoleAreABrokenContract) {
  const GrantedEvent granted{.request_id = "r"};
  const ReadyEvent ready{.request_id = "r"};
  EXPECT_EQ(Outcome(Role::kDecode, Phase::kWaiting, &granted, true), "!");
  EXPECT_EQ(Outcome(Role::kFused, Phase::kWaiting, &ready, false), "!");
}

}  // namespace
}  // namespace pdmesh
