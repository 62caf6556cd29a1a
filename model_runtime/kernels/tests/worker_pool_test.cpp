// The pool hands plain memory from thread to thread; under the thread sanitizer these tests show that it does
// so in order.
#include "worker_pool.h"

#include <gtest/gtest.h>

#include <numeric>
#include <stdexcept>
#include <vector>

namespace pdmesh::kernels {
namespace {

constexpr int kNumThreads = 3;
constexpr int kMoreThreadsThanCpus = 16;  // these do not spin on most machines

TEST(WorkerPool, EveryThreadRunsATaskOnceAndTheCallerSeesWhatTheyWrote) {
  for (const int num_threads : {1, kNumThreads, kMoreThreadsThanCpus}) {
    WorkerPool pool(num_threads);
    std::vector<int> num_runs(static_cast<std::size_t>(num_threads));
    for (int task = 1; task <= 100; ++task) {
      pool.run_on_all([&](int thread_index) { ++num_runs[static_cast<std::size_t>(thread_index)]; });
      ASSERT_EQ(num_runs, std::vector<int>(static_cast<std::size_t>(num_threads), task));
    }
  }
}

TEST(WorkerPool, AThreadSeesWhatTheCallerAndOtherThreadsWroteBefore) {
  WorkerPool pool(kNumThreads);
  std::vector<int> values(kNumThreads, 1);
  for (int task = 0; task < 100; ++task) {
    std::vector<int> sums(kNumThreads);
    pool.run_on_all([&](int thread_index) {
      sums[static_cast<std::size_t>(thread_index)] = std::accumulate(values.begin(), values.end(), 0);
    });
    ASSERT_EQ(sums, std::vector<int>(kNumThreads, kNumThreads * (task + 1)));
    pool.run_on_all([&](int thread_index) { ++values[static_cast<std::size_t>(thread_index)]; });
  }
}

TEST(WorkerPool, CallersOnTwoThreadsTakeTurns) {
  WorkerPool pool(kNumThreads);
  int num_running = 0;  // not atomic: the turns keep the callers apart
  int num_tasks = 0;
  const auto call_often = [&] {
    for (int task = 0; task < 100; ++task) {
      pool.run_on_all([&](int thread_index) {
        if (thread_index == 0) {
          ++num_running;
          ++num_tasks;
          EXPECT_EQ(num_running, 1);
          --num_running;
        }
      });
    }
  };
  std::thread other(call_often);
  call_often();
  other.join();
  EXPECT_EQ(num_tasks, 200);
}

TEST(WorkerPool, TheFirstExceptionReachesTheCallerAndThePoolGoesOn) {
  WorkerPool pool(kNumThreads);
  for (int task = 0; task < 20; ++task) {
    EXPECT_THROW(pool.run_on_all([](int) { throw std::runtime_error("no"); }), std::runtime_error);
    int num_runs = 0;
    pool.run_on_all([&](int thread_index) {
      if (thread_index == 1) {
        ++num_runs;
      }
    });
    EXPECT_EQ(num_runs, 1);
  }
}

}  // namespace
}  // namespace pdmesh::kernels
