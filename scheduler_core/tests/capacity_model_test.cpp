#include "scheduler/capacity_model.h"

#include <gtest/gtest.h>

namespace pdmesh {
namespace {

CacheGroupConfig Full(std::int32_t block_granularity) {
  return {.group_id = "full",
          .family = Family::kHistory,
          .retention = Retention::kFullHistory,
          .block_granularity = block_granularity,
          .sliding_window_tokens = {}};
}
CacheGroupConfig Sliding(std::int32_t block_granularity, std::int32_t window_tokens) {
  return {.group_id = "sliding",
          .family = Family::kHistory,
          .retention = Retention::kSlidingWindow,
          .block_granularity = block_granularity,
          .sliding_window_tokens = window_tokens};
}
CacheGroupConfig State(std::int32_t block_granularity) {
  return {.group_id = "state",
          .family = Family::kState,
          .retention = Retention::kFullHistory,
          .block_granularity = block_granularity,
          .sliding_window_tokens = {}};
}

SchedulerConfig Config(Role role, std::int32_t prefix_granularity, std::int32_t token_budget,
                       std::vector<CacheGroupConfig> groups) {
  return {.role = role,
          .prefix_granularity = prefix_granularity,
          .num_lcm_blocks = 1000,
          .max_batch_size = 8,
          .token_budget = token_budget,
          .cache_groups = std::move(groups)};
}

// What later chunks of a prompt materialise: the slots of a state table that hold a block.
std::vector<std::int64_t> StateSlots(const CapacityModel& model, std::size_t group, std::int32_t granularity,
                                     PromptSpan span) {
  const auto suffix = std::get<SparseSuffix>(model.NextExtents(span)[group]);
  std::vector<std::int64_t> slots;
  for (std::int64_t slot = suffix.first_slot;
       slot < CeilDiv(suffix.extent_tokens + suffix.reserve_tokens, granularity); ++slot) {
    slots.push_back(slot);
  }
  return slots;
}

using Slots = std::vector<std::int64_t>;

// behaviour: K4, K5
TEST(CapacityModel, TheBoundOfADecodeNodeCoversAPromptThatIsComputedThere) {
  SchedulerConfig config = Config(Role::kDecode, 32, 1024, {Sliding(32, 513)});
  const CapacityModel model(config);
  const PromptSpan landing{.begin_tokens = 0,
                           .end_tokens = 4000,
                           .num_prompt_tokens = 4000,
                           .num_headroom_tokens = 0,
                           .num_limit_tokens = 8000,
                           .is_local = false};
  EXPECT_EQ(model.FirstDemands(landing)[0].num_promised_blocks, 16 + 17);
  PromptSpan local = landing;
  local.is_local = true;
  local.end_tokens = 1024;
  EXPECT_EQ(model.FirstDemands(local)[0].num_promised_blocks, 16 + 33);
  EXPECT_EQ(model.BlocksFor(0, 8000), 49);
  config.num_lcm_blocks = 33;
  EXPECT_EQ(CapacityModel(config).max_request_tokens(), 33 * 32);
  config.num_lcm_blocks = 49;
  EXPECT_GT(CapacityModel(config).max_request_tokens(), 1 << 30);
}

// behaviour: K6, K8
TEST(CapacityModel, ConcurrentDemandsOfAllKinds) {
  SchedulerConfig config = Config(Role::kFused, 32, 1024, {Full(32), State(32), Sliding(32, 100)});
  const CapacityModel plain(config);
  EXPECT_EQ(plain.ConcurrentBlocksFor(0, 8, 20000, 3000), 625 + 8);
  EXPECT_EQ(plain.ConcurrentBlocksFor(1, 8, 20000, 3000), 8 * 4);
  EXPECT_EQ(plain.ConcurrentBlocksFor(2, 8, 20000, 3000), 8 * 5 + 4 + 32);
  config.verify_width = 2;
  config.overlap_depth = 1;
  const CapacityModel ahead(config);
  EXPECT_EQ(ahead.ConcurrentBlocksFor(0, 8, 20000, 3000), 625 + 16);
  EXPECT_EQ(ahead.ConcurrentBlocksFor(1, 8, 20000, 3000), 32);
  EXPECT_EQ(ahead.ConcurrentBlocksFor(2, 8, 20000, 3000), 40 + 4 + 32);
}

// behaviour: K9
TEST(CapacityModel, TheBoundLeavesRoomForWhatIsPlannedAhead) {
  const auto bound = [](std::int32_t overlap_depth, std::int32_t second_granularity, Role role) {
    SchedulerConfig config = Config(role, 2, 64, {Full(2), Full(second_granularity)});
    config.num_lcm_blocks = 8;
    config.overlap_depth = overlap_depth;
    return CapacityModel(config).max_request_tokens();
  };
  EXPECT_EQ(bound(0, 2, Role::kFused), 8);
  EXPECT_EQ(bound(1, 2, Role::kFused), 7);
  EXPECT_EQ(bound(0, 1, Role::kFused), 5);
  EXPECT_EQ(bound(1, 2, Role::kPrefill), 8);  // plans no decode row
}

// behaviour: K3
TEST(CapacityModel, AStateTableReservesForTheRowsThatAreOut) {
  const auto promised = [](std::int32_t verify_width, std::int32_t overlap_depth, Role role) {
    SchedulerConfig config = Config(role, 4, 64, {State(4)});
    config.verify_width = verify_width;
    config.overlap_depth = overlap_depth;
    return CapacityModel(config).held_while_decoding()[0];
  };
  EXPECT_EQ(promised(1, 0, Role::kFused), 2);
  EXPECT_EQ(promised(4, 0, Role::kFused), 2);
  EXPECT_EQ(promised(2, 1, Role::kFused), 2);
  EXPECT_EQ(promised(4, 1, Role::kFused), 3);
  EXPECT_EQ(promised(4, 1, Role::kPrefill), 1);
}

// behaviour: K4
TEST(CapacityModel, ALandingHoldsItsWindowAndTheRowsThatAreOut) {
  SchedulerConfig config = Config(Role::kDecode, 4, 64, {Sliding(2, 5)});
  config.verify_width = 3;
  config.overlap_depth = 1;
  const PromptSpan landing{.begin_tokens = 0,
                           .end_tokens = 40,
                           .num_prompt_tokens = 40,
                           .num_headroom_tokens = 0,
                           .num_limit_tokens = 60,
                           .is_local = false};
  // L + ceil((W - 1 + w + d * w + g - 1) / g)
  EXPECT_EQ(CapacityModel(config).FirstDemands(landing)[0].num_promised_blocks, 2 + 6);
}

// behaviour: K10
TEST(CapacityModel, APoolSizedForItsConcurrencyHoldsWhatTheBoundAccepts) {
  for (const Role role : {Role::kPrefill, Role::kDecode, Role::kFused}) {
    for (const std::int32_t token_budget : {8, 64, 1024}) {
      for (const std::int32_t verify_width : {1, 2, 5, 8}) {
        for (const std::int32_t overlap_depth : {0, 1}) {
          SchedulerConfig config = Config(role, 8, token_budget,
                                          {Full(8), State(4), Sliding(4, 7), Sliding(8, 100), Sliding(2, 1)});
          config.verify_width = verify_width;
          config.overlap_depth = overlap_depth;
          const CapacityModel model(config);
          for (const std::int64_t num_tokens : {1, 2, 7, 8, 9, 63, 64, 65, 200, 1023, 5000}) {
            for (std::size_t group = 0; group < 5; ++group) {
              EXPECT_GE(model.ConcurrentBlocksFor(group, 1, num_tokens, num_tokens),
                        model.BlocksFor(group, num_tokens))
                  << NameOf(role) << " " << token_budget << " " << verify_width << " " << overlap_depth << " "
                  << num_tokens << " " << group;
            }
          }
        }
      }
    }
  }
}

TEST(CapacityModel, TheDemandNeverFallsWithTheLength) {
  const CapacityModel model(Config(Role::kDecode, 8, 16, {Full(8), State(4), Sliding(4, 7)}));
  for (std::int64_t num_tokens = 1; num_tokens < 200; ++num_tokens) {
    EXPECT_LE(model.LcmBlocksFor(num_tokens - 1), model.LcmBlocksFor(num_tokens)) << num_tokens;
  }
}

// behaviour: H13
TEST(CapacityModel, TheEndOfAPromptIsNotCutIntoBodyAndTail) {
  const CapacityModel model(Config(Role::kFused, 128, 4096, {Full(128), State(128), State(32)}));
  const PromptSpan span{.begin_tokens = 1280,
                        .end_tokens = 1636,
                        .num_prompt_tokens = 1636,
                        .num_headroom_tokens = 0,
                        .num_limit_tokens = 1700,
                        .is_local = true};
  EXPECT_EQ(StateSlots(model, 1, 128, span), (Slots{11, 12, 13}));
  EXPECT_EQ(StateSlots(model, 2, 32, span), (Slots{47, 48, 49, 50, 51, 52}));
}

// behaviour: H14
TEST(CapacityModel, AChunkThatEndsOnAGrainBoundaryMaterialisesItsFinalStateAlone) {
  const CapacityModel coarse(Config(Role::kFused, 4, 64, {State(4)}));
  PromptSpan span{.begin_tokens = 0,
                  .end_tokens = 12,
                  .num_prompt_tokens = 30,
                  .num_headroom_tokens = 0,
                  .num_limit_tokens = 40,
                  .is_local = true};
  EXPECT_EQ(StateSlots(coarse, 0, 4, span), (Slots{2}));
  const CapacityModel fine(Config(Role::kFused, 2, 64, {State(2)}));
  for (const auto& [begin, end, slots] : std::vector<std::tuple<std::int64_t, std::int64_t, Slots>>{
           {0, 8, {3}}, {8, 16, {7}}, {16, 24, {11}}}) {
    span.begin_tokens = begin;
    span.end_tokens = end;
    EXPECT_EQ(StateSlots(fine, 0, 2, span), slots);
  }
}

// behaviour: K15, L5
TEST(CapacityModel, AStateTableHoldsAReserveBehindThePromptWhereItIsContinued) {
  const PromptSpan landing{.begin_tokens = 0,
                           .end_tokens = 8,
                           .num_prompt_tokens = 8,
                           .num_headroom_tokens = 0,
                           .num_limit_tokens = 20,
                           .is_local = false};
  const CapacityModel decode(Config(Role::kDecode, 4, 64, {State(1)}));
  EXPECT_EQ(StateSlots(decode, 0, 1, landing), (Slots{7, 8}));
  EXPECT_EQ(decode.FirstDemands(landing)[0].num_promised_blocks, 2);
  PromptSpan local = landing;
  local.is_local = true;
  const CapacityModel prefill(Config(Role::kPrefill, 4, 64, {State(1)}));
  EXPECT_EQ(StateSlots(prefill, 0, 1, local), (Slots{7}));
}

// Reserve of a full group behind a chunk.
std::int64_t FullReserve(const CapacityModel& model, std::int64_t num_prompt_tokens, std::int64_t end_tokens,
                         std::int64_t num_headroom_tokens) {
  const PromptSpan span{.begin_tokens = 0,
                        .end_tokens = end_tokens,
                        .num_prompt_tokens = num_prompt_tokens,
                        .num_headroom_tokens = num_headroom_tokens,
                        .num_limit_tokens = num_prompt_tokens + num_headroom_tokens,
                        .is_local = true};
  return std::get<DenseGrowth>(model.FirstDemands(span)[0].extent).reserve_tokens;
}

// behaviour: K13
TEST(CapacityModel, AFirstChunkHoldsTheRestOfThePromptAndTheHeadroom) {
  const CapacityModel model(Config(Role::kFused, 4, 512, {Full(4)}));
  EXPECT_EQ(FullReserve(model, 1000, 512, model.HeadroomTokens(300, 0)), 788);
  EXPECT_EQ(FullReserve(model, 1000, 512, model.HeadroomTokens(std::nullopt, 0)), 488);
}

// behaviour: K12
TEST(CapacityModel, TheCompletingChunkHoldsAStepBehindThePromptAndEarlierOnesHoldNone) {
  SchedulerConfig config = Config(Role::kDecode, 4, 512, {Full(4)});
  config.verify_width = 3;
  const CapacityModel model(config);
  EXPECT_EQ(FullReserve(model, 1000, 1000, 0), 3);
  EXPECT_EQ(FullReserve(model, 1000, 1000, 2), 3);
  EXPECT_EQ(FullReserve(model, 1000, 1000, 5), 5);
  EXPECT_EQ(FullReserve(model, 1000, 512, 0), 488);
  const PromptSpan last{.begin_tokens = 512,
                        .end_tokens = 1000,
                        .num_prompt_tokens = 1000,
                        .num_headroom_tokens = 0,
                        .num_limit_tokens = 1003,
                        .is_local = true};
  EXPECT_EQ(std::get<DenseGrowth>(model.NextExtents(last)[0]).reserve_tokens, 3);
  PromptSpan earlier = last;
  earlier.end_tokens = 996;
  EXPECT_EQ(std::get<DenseGrowth>(model.NextExtents(earlier)[0]).reserve_tokens, 0);
}

// behaviour: K12
TEST(CapacityModel, ThePrefillRoleHoldsTheWholePromptAndAStepFromTheFirstChunkOn) {
  const CapacityModel model(Config(Role::kPrefill, 4, 512, {Full(4)}));
  EXPECT_EQ(FullReserve(model, 1000, 512, model.HeadroomTokens(300, 0)), 489);
}

// behaviour: K11
TEST(CapacityModel, OneAdmissionDecidesTheReserveOfEveryGroupByWhatTheGroupKeeps) {
  const CapacityModel model(Config(Role::kFused, 8, 512, {Full(4), Sliding(4, 9), State(8)}));
  PromptSpan span{.begin_tokens = 0,
                  .end_tokens = 20,
                  .num_prompt_tokens = 20,
                  .num_headroom_tokens = 30,
                  .num_limit_tokens = 50,
                  .is_local = true};
  const auto reserves = [&] {
    std::vector<std::int64_t> tokens;
    for (const GroupDemand& demand : model.FirstDemands(span)) {
      tokens.push_back(std::visit([](const auto& extent) { return extent.reserve_tokens; }, demand.extent));
    }
    return tokens;
  };
  EXPECT_EQ(reserves(), (Slots{30, 1, 8}));
  span.end_tokens = 16;
  EXPECT_EQ(reserves(), (Slots{34, 0, 0}));
}

// behaviour: M15
TEST(CapacityModel, HeadroomGrowsWithEveryRetractionUpToWhatMayStillBeGenerated) {
  const CapacityModel model(Config(Role::kFused, 4, 512, {Full(4)}));
  EXPECT_EQ(model.HeadroomTokens(20000, 0), 4096);
  EXPECT_EQ(model.HeadroomTokens(20000 - 5000, 1), 8192);
  EXPECT_EQ(model.HeadroomTokens(20000 - 12000, 2), 8000);
  EXPECT_EQ(model.HeadroomTokens(std::nullopt, 7), 0);
}

// behaviour: M5
TEST(CapacityModel, HeadroomSecuresTheWholeGenerationWhenThatIsNotLonger) {
  const CapacityModel model(Config(Role::kFused, 4, 512, {Full(4)}));
  EXPECT_EQ(model.HeadroomTokens(4000, 0), 4000);
  EXPECT_LT(model.HeadroomTokens(6000, 0), 6000);
  EXPECT_EQ(model.HeadroomTokens(6000 - 1000, 1), 5000);
}

}  // namespace
}  // namespace pdmesh
