// A scheduler belongs to one thread, but its plans and events do not: a runtime reads a plan on another
// thread while the next one is made. Under the thread sanitizer these tests show that nothing is shared.
#include <gtest/gtest.h>

#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "scheduler/scheduler.h"

namespace pdmesh {
namespace {

SchedulerConfig Config() {
  return {.role = Role::kFused,
          .prefix_granularity = 4,
          .num_lcm_blocks = 40,
          .max_batch_size = 4,
          .token_budget = 16,
          .cache_groups = {{.group_id = "full",
                            .family = Family::kHistory,
                            .retention = Retention::kFullHistory,
                            .block_granularity = 4,
                            .sliding_window_tokens = {}},
                           {.group_id = "sliding",
                            .family = Family::kHistory,
                            .retention = Retention::kSlidingWindow,
                            .block_granularity = 2,
                            .sliding_window_tokens = 5}},
          .enable_prefix_events = true};
}

std::vector<std::int32_t> Prompt(std::int32_t num_tokens) {
  std::vector<std::int32_t> tokens;
  for (std::int32_t token = 0; token < num_tokens; ++token) {
    tokens.push_back(token);
  }
  return tokens;
}

std::int64_t SumOf(const Plan& plan) {
  std::int64_t sum = plan.num_rows;
  for (const std::vector<std::int32_t>* column : {&plan.begins, &plan.input_lengths, &plan.token_ids}) {
    for (const std::int32_t value : *column) {
      sum += value;
    }
  }
  for (const BlockTableRows& table : plan.block_tables) {
    for (const std::int32_t block_id : table.block_ids) {
      sum += block_id;
    }
  }
  for (const std::string& request_id : plan.request_ids) {
    sum += static_cast<std::int64_t>(request_id.size());
  }
  return sum;
}

// Serves some prompts; every plan is read by `read` while the scheduler goes on.
std::vector<std::int64_t> Serve(Scheduler& scheduler,
                                const std::function<std::future<std::int64_t>(std::shared_ptr<Plan>)>& read) {
  for (std::int32_t number = 0; number < 6; ++number) {
    scheduler.Submit({{.request_id = std::to_string(number),
                       .tokens = Prompt(9 + 5 * number),
                       .max_new_tokens = 3,
                       .extra_keys = {}}});
  }
  std::vector<std::future<std::int64_t>> sums;
  for (int round = 0; round < 40; ++round) {
    const auto plan = std::make_shared<Plan>(scheduler.NextPlan());
    sums.push_back(read(plan));
    std::vector<ResultEvent> results;
    for (std::size_t row = 0; row < plan->request_ids.size(); ++row) {
      results.push_back({.request_id = plan->request_ids[row], .tokens = {}});
      results.back().tokens.resize(plan->logits_wanted[row], 7);
    }
    std::vector<AnyEventView> events;
    for (const ResultEvent& result : results) {
      events.push_back(EventView(&result));
    }
    scheduler.Advance(events);
  }
  std::vector<std::int64_t> values;
  for (std::future<std::int64_t>& sum : sums) {
    values.push_back(sum.get());
  }
  return values;
}

std::future<std::int64_t> ReadHere(const std::shared_ptr<Plan>& plan) {
  std::promise<std::int64_t> sum;
  sum.set_value(SumOf(*plan));
  return sum.get_future();
}

std::future<std::int64_t> ReadElsewhere(std::shared_ptr<Plan> plan) {
  return std::async(std::launch::async, [plan = std::move(plan)] { return SumOf(*plan); });
}

TEST(SchedulerThreads, APlanIsReadOnAnotherThreadWhileTheNextOneIsMade) {
  Scheduler here(Config());
  Scheduler elsewhere(Config());
  const std::vector<std::int64_t> expected = Serve(here, ReadHere);
  EXPECT_GT(expected.front(), 0);
  EXPECT_EQ(Serve(elsewhere, ReadElsewhere), expected);
}

TEST(SchedulerThreads, SchedulersOnTwoThreadsShareNothing) {
  std::vector<std::int64_t> sums[2];
  const auto run = [&sums](int which) {
    Scheduler scheduler(Config());
    sums[which] = Serve(scheduler, ReadHere);
  };
  std::thread other(run, 1);
  run(0);
  other.join();
  EXPECT_EQ(sums[0], sums[1]);
}

TEST(SchedulerThreads, PrefixEventsAreReadOnAnotherThreadWhileTheSchedulerGoesOn) {
  Scheduler scheduler(Config());
  Serve(scheduler, ReadHere);
  auto num_tokens = std::async(std::launch::async, [events = scheduler.DrainPrefixEvents()] {
    std::size_t count = 0;
    for (const PrefixEvent& event : events) {
      const auto* stored = std::get_if<PrefixStored>(&event);
      count += stored == nullptr ? 0 : stored->tokens.size();
    }
    return count;
  });
  const AbortEvent abort{.request_id = "0"};
  scheduler.Advance(std::vector<AnyEventView>{EventView(&abort)});
  scheduler.NextPlan();
  EXPECT_GT(num_tokens.get(), 0U);
}

}  // namespace
}  // namespace pdmesh
