// What one request holds at most, against the formulas written out.
#include <gtest/gtest.h>

#include <algorithm>

#include "scheduler/capacity_model.h"
#include "support/int_math.h"

namespace pdmesh {
namespace {

struct Shape {
  Role role;
  std::int64_t prefix_granularity;
  std::int64_t block_granularity;
  std::int64_t window_tokens;  // 0 for other kinds
  std::int64_t token_budget;
  bool enable_prefix_cache = true;
  std::int64_t verify_width = 1;
  std::int64_t overlap_depth = 0;

  // Rows that a step planned ahead may write behind the last token.
  std::int64_t protected_tokens() const { return role == Role::kPrefill ? 0 : overlap_depth * verify_width; }
  std::int64_t step_tokens() const { return verify_width + protected_tokens(); }
};

struct Steps {
  std::int64_t verify_width;
  std::int64_t overlap_depth;
};
constexpr Steps kSteps[] = {{1, 0}, {4, 0}, {1, 1}, {3, 1}};

CacheGroupConfig Group(const Shape& shape, Family family, std::string group_id = "only",
                       std::int32_t packing = 1) {
  CacheGroupConfig group{.group_id = std::move(group_id),
                         .family = family,
                         .retention = Retention::kFullHistory,
                         .block_granularity = static_cast<std::int32_t>(shape.block_granularity),
                         .cache_blocks_per_lcm_block = packing,
                         .sliding_window_tokens = {}};
  if (shape.window_tokens > 0) {
    group.retention = Retention::kSlidingWindow;
    group.sliding_window_tokens = static_cast<std::int32_t>(shape.window_tokens);
  }
  return group;
}

CapacityModel Model(const Shape& shape, std::vector<CacheGroupConfig> groups,
                    std::int32_t num_lcm_blocks = 1000) {
  SchedulerConfig config{.role = shape.role,
                         .prefix_granularity = static_cast<std::int32_t>(shape.prefix_granularity),
                         .num_lcm_blocks = num_lcm_blocks,
                         .max_batch_size = 8,
                         .token_budget = static_cast<std::int32_t>(shape.token_budget),
                         .cache_groups = std::move(groups),
                         .enable_prefix_cache = shape.enable_prefix_cache,
                         .verify_width = static_cast<std::int32_t>(shape.verify_width),
                         .overlap_depth = static_cast<std::int32_t>(shape.overlap_depth)};
  config.Validate();
  return CapacityModel(config);
}

// behaviour: K1
TEST(CapacityPeaks, ParentsAreWhatTheBlocksOfEachGroupNeed) {
  const Shape full{.role = Role::kFused,
                   .prefix_granularity = 4,
                   .block_granularity = 4,
                   .window_tokens = 0,
                   .token_budget = 64};
  Shape fine = full;
  fine.block_granularity = 2;
  const CapacityModel model =
      Model(full, {Group(full, Family::kHistory, "coarse", 3), Group(fine, Family::kHistory, "fine", 8)}, 12);
  EXPECT_EQ(model.BlocksFor(0, 41), 11);
  EXPECT_EQ(model.BlocksFor(1, 41), 21);
  EXPECT_EQ(model.LcmBlocksFor(41), 4 + 3);
  EXPECT_EQ(model.LcmBlocksFor(0), 0);
  // The largest that fits: 8 parents for 24 blocks of four tokens, and all of 48 blocks of two beside them.
  EXPECT_EQ(model.max_request_tokens(), 80);
  EXPECT_EQ(model.LcmBlocksFor(80), 7 + 5);
  EXPECT_EQ(model.LcmBlocksFor(81), 7 + 6);
}

// behaviour: K2
TEST(CapacityPeaks, AFullGroupHoldsEveryToken) {
  for (const Role role : {Role::kPrefill, Role::kDecode, Role::kFused}) {
    for (const auto& [verify_width, overlap_depth] : kSteps) {
      const Shape shape{.role = role,
                        .prefix_granularity = 8,
                        .block_granularity = 4,
                        .window_tokens = 0,
                        .token_budget = 8,
                        .verify_width = verify_width,
                        .overlap_depth = overlap_depth};
      const CapacityModel model = Model(shape, {Group(shape, Family::kHistory)});
      for (std::int64_t num_tokens = 1; num_tokens < 50; ++num_tokens) {
        EXPECT_EQ(model.BlocksFor(0, num_tokens), CeilDiv(num_tokens + shape.protected_tokens(), 4))
            << NameOf(role) << " " << num_tokens;
      }
    }
  }
}

// A local prompt whose chunks begin on block boundaries.
std::int64_t WindowPeak(const Shape& s, std::int64_t num_tokens) {
  const std::int64_t step = s.step_tokens();
  const std::int64_t prompt = std::max<std::int64_t>(num_tokens - s.verify_width, 0);
  const std::int64_t lookback = CeilDiv(s.window_tokens - 1, s.block_granularity);
  std::int64_t peak = CeilDiv(std::min(prompt, s.token_budget) + step, s.block_granularity);
  if (prompt > s.token_budget) {
    const std::int64_t rest = std::min(prompt - s.token_budget, s.token_budget);
    peak = std::max({peak, lookback + CeilDiv(s.token_budget, s.block_granularity),
                     lookback + CeilDiv(rest + step, s.block_granularity)});
  }
  return std::min(peak, CeilDiv(num_tokens + s.protected_tokens(), s.block_granularity));
}

// behaviour: K2
TEST(CapacityPeaks, AWindowHoldsItselfAndAChunkWhereverTheChunkBegins) {
  for (const std::int64_t window : {1, 2, 9, 10, 40}) {
    for (const std::int64_t budget : {4, 7, 8, 16}) {
      for (const auto& [verify_width, overlap_depth] : kSteps) {
        const Shape shape{.role = Role::kFused,
                          .prefix_granularity = 8,
                          .block_granularity = 4,
                          .window_tokens = window,
                          .token_budget = budget,
                          .verify_width = verify_width,
                          .overlap_depth = overlap_depth};
        const CapacityModel model = Model(shape, {Group(shape, Family::kHistory)});
        for (std::int64_t num_tokens = 1; num_tokens < 90; ++num_tokens) {
          const std::int64_t blocks = model.BlocksFor(0, num_tokens);
          EXPECT_GE(blocks, WindowPeak(shape, num_tokens))
              << window << " " << budget << " " << num_tokens << " " << verify_width << overlap_depth;
          EXPECT_LE(blocks, CeilDiv(num_tokens + shape.protected_tokens(), 4))
              << "never more than the tokens have";
          EXPECT_LE(blocks, CeilDiv(window - 1 + budget + shape.step_tokens() + 3, 4));
        }
      }
    }
  }
  const Shape shape{.role = Role::kFused,
                    .prefix_granularity = 4,
                    .block_granularity = 4,
                    .window_tokens = 10,
                    .token_budget = 16};
  const CapacityModel model = Model(shape, {Group(shape, Family::kHistory)});
  EXPECT_EQ(model.BlocksFor(0, 10), 3);
  EXPECT_EQ(model.BlocksFor(0, 17), 5);
  EXPECT_EQ(model.BlocksFor(0, 100), 3 + 5) << "lookback, and 16 tokens with a step behind them";
}

// A prompt that is cut only when it is longer than the budget.
std::int64_t StatePeak(const Shape& s, std::int64_t num_tokens) {
  if (num_tokens == 0) {
    return 0;
  }
  const std::int64_t prompt = std::max<std::int64_t>(num_tokens - s.verify_width, 0);
  const std::int64_t reserve = s.role == Role::kPrefill ? 0 : std::max(s.block_granularity, s.step_tokens());
  const auto out = [&](std::int64_t tail) { return 1 + CeilDiv(tail + reserve, s.block_granularity); };
  const auto tail = [&](std::int64_t before) {
    return std::max<std::int64_t>(
        0, std::min({s.prefix_granularity - 1, s.token_budget - s.prefix_granularity, prompt - before}));
  };
  std::int64_t peak = (s.enable_prefix_cache ? 1 : 0) + out(tail(s.prefix_granularity));
  if (prompt > s.token_budget) {
    peak = std::max(peak, 1 + out(tail(2 * s.prefix_granularity)));
  }
  return peak;
}

// behaviour: K3
TEST(CapacityPeaks, AStateGroupHoldsItsInputASnapshotItsEndAndAReserve) {
  for (const Role role : {Role::kPrefill, Role::kFused}) {
    for (const bool enable_prefix_cache : {true, false}) {
      for (const std::int64_t budget : {8, 11, 24}) {
        for (const auto& [verify_width, overlap_depth] : kSteps) {
          const Shape shape{.role = role,
                            .prefix_granularity = 8,
                            .block_granularity = 2,
                            .window_tokens = 0,
                            .token_budget = budget,
                            .enable_prefix_cache = enable_prefix_cache,
                            .verify_width = verify_width,
                            .overlap_depth = overlap_depth};
          const CapacityModel model = Model(shape, {Group(shape, Family::kState)});
          EXPECT_EQ(model.BlocksFor(0, 0), 0);
          for (std::int64_t num_tokens = 1; num_tokens < 90; ++num_tokens) {
            const std::int64_t prompt = std::max<std::int64_t>(num_tokens - verify_width, 0);
            const std::int64_t reserve =
                role == Role::kPrefill ? 0 : std::max<std::int64_t>(2, shape.step_tokens());
            const std::int64_t slots =
                CeilDiv(std::max(num_tokens + shape.protected_tokens(), prompt + reserve), 2);
            const std::int64_t expected = std::min(StatePeak(shape, num_tokens), slots);
            const std::int64_t blocks = model.BlocksFor(0, num_tokens);
            EXPECT_GE(blocks, expected) << NameOf(role) << " " << budget << " " << num_tokens;
            // Beside decodes any prompt longer than a grain may be cut.
            if (prompt <= 8 || prompt > budget || enable_prefix_cache) {
              EXPECT_EQ(blocks, expected) << NameOf(role) << " " << budget << " " << num_tokens;
            }
          }
        }
      }
    }
  }
}

// behaviour: K4
TEST(CapacityPeaks, ADecodeNodeHoldsALandingOrARecoveryWhicheverIsLarger) {
  for (const std::int64_t window : {1, 6, 33}) {
    for (const std::int64_t budget : {4, 32}) {
      const Shape decode{.role = Role::kDecode,
                         .prefix_granularity = 4,
                         .block_granularity = 4,
                         .window_tokens = window,
                         .token_budget = budget};
      Shape fused = decode;
      fused.role = Role::kFused;
      const CapacityModel model = Model(decode, {Group(decode, Family::kHistory)});
      const CapacityModel local = Model(fused, {Group(fused, Family::kHistory)});
      const std::int64_t lookback = CeilDiv(window - 1, 4);
      const std::int64_t landing = lookback + CeilDiv(window - 1 + 1 + 4 - 1, 4);
      for (std::int64_t num_tokens = 1; num_tokens < 90; ++num_tokens) {
        EXPECT_EQ(model.BlocksFor(0, num_tokens),
                  std::min(CeilDiv(num_tokens, 4), std::max(landing, local.BlocksFor(0, num_tokens))))
            << window << " " << budget << " " << num_tokens;
      }
    }
  }
  const Shape state{.role = Role::kDecode,
                    .prefix_granularity = 8,
                    .block_granularity = 2,
                    .window_tokens = 0,
                    .token_budget = 8};
  const PromptSpan landing{.begin_tokens = 0,
                           .end_tokens = 30,
                           .num_prompt_tokens = 30,
                           .num_headroom_tokens = 10,
                           .num_limit_tokens = 40,
                           .is_local = false};
  const CapacityModel model = Model(state, {Group(state, Family::kState)});
  EXPECT_EQ(model.FirstDemands(landing)[0].num_promised_blocks, 1 + 1);
  EXPECT_EQ(model.BlocksFor(0, 40), StatePeak(state, 40)) << "the recovery needs more";
}

// behaviour: K7
TEST(CapacityPeaks, ADecodeNodeIsSizedForLandingsSideBySideAndOneRecovery) {
  Shape shape{.role = Role::kDecode,
              .prefix_granularity = 4,
              .block_granularity = 4,
              .window_tokens = 17,
              .token_budget = 16};
  const CapacityModel landings = Model(shape, {Group(shape, Family::kHistory)});
  EXPECT_EQ(landings.BlocksFor(0, 3000), 4 + 5) << "no recovery needs more than a landing";
  EXPECT_EQ(landings.ConcurrentBlocksFor(0, 8, 20000, 3000), 8 * 9);
  EXPECT_EQ(landings.ConcurrentBlocksFor(0, 8, 100, 3000), 25 + 8) << "no more than all tokens take";
  EXPECT_EQ(landings.ConcurrentBlocksFor(0, 0, 20000, 3000), 0);
  shape.token_budget = 64;
  const CapacityModel recovery = Model(shape, {Group(shape, Family::kHistory)});
  EXPECT_EQ(recovery.BlocksFor(0, 3000), 21);
  EXPECT_EQ(recovery.ConcurrentBlocksFor(0, 8, 20000, 3000), 8 * 9 + 12);
}

}  // namespace
}  // namespace pdmesh
