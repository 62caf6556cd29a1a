#include "worker_pool.h"

#include <chrono>

namespace pdmesh::kernels {
namespace {

// Longer than the gap between two operations of a forward, shorter than anyone notices on an idle machine.
constexpr std::chrono::microseconds kAwake{50};

// With more threads than CPUs whoever spins holds the CPU that the one waited for needs.
std::chrono::microseconds awake_time(int num_threads) {
  return static_cast<unsigned>(num_threads) <= std::thread::hardware_concurrency() ? kAwake : kAwake.zero();
}

}  // namespace

WorkerPool::WorkerPool(int num_threads)
    : posted_(awake_time(num_threads)), finished_(awake_time(num_threads)) {
  workers_.reserve(static_cast<std::size_t>(num_threads - 1));
  for (int index = 1; index < num_threads; ++index) {
    workers_.emplace_back([this, index] { work(index); });
  }
}

WorkerPool::~WorkerPool() {
  stopping_ = true;
  posted_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void WorkerPool::run_on_all(const std::function<void(int)>& task) {
  const std::lock_guard turn(turn_);
  task_ = &task;
  first_error_ = nullptr;
  num_unfinished_ = num_threads();
  ++generation_;
  posted_.notify_all();
  run_one(task, 0);
  finished_.wait([this] { return num_unfinished_ == 0; });
  if (first_error_) std::rethrow_exception(first_error_);
}

void WorkerPool::work(int thread_index) {
  std::uint64_t seen_generation = 0;
  while (true) {
    posted_.wait([&] { return stopping_ || generation_ != seen_generation; });
    if (stopping_) return;
    ++seen_generation;
    run_one(*task_, thread_index);
  }
}

void WorkerPool::run_one(const std::function<void(int)>& task, int thread_index) {
  try {
    task(thread_index);
  } catch (...) {
    const std::lock_guard lock(error_mutex_);
    if (!first_error_) first_error_ = std::current_exception();
  }
  if (--num_unfinished_ == 0) finished_.notify_all();
}

}  // namespace pdmesh::kernels
