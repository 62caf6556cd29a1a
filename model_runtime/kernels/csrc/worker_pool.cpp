#include "worker_pool.h"

namespace pdmesh::kernels {

WorkerPool::WorkerPool(int num_threads) {
  workers_.reserve(static_cast<std::size_t>(num_threads - 1));
  for (int index = 1; index < num_threads; ++index) {
    workers_.emplace_back([this, index] { work(index); });
  }
}

WorkerPool::~WorkerPool() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  task_posted_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void WorkerPool::run_on_all(const std::function<void(int)>& task) {
  const std::lock_guard turn(turn_);
  {
    const std::lock_guard lock(mutex_);
    task_ = &task;
    first_error_ = nullptr;
    num_unfinished_ = num_threads();
    ++generation_;
  }
  task_posted_.notify_all();
  run_one(task, 0);
  std::unique_lock lock(mutex_);
  all_done_.wait(lock, [this] { return num_unfinished_ == 0; });
  task_ = nullptr;
  if (first_error_) std::rethrow_exception(first_error_);
}

void WorkerPool::work(int thread_index) {
  std::uint64_t seen_generation = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    task_posted_.wait(lock, [&] { return stopping_ || generation_ != seen_generation; });
    if (stopping_) return;
    seen_generation = generation_;
    const std::function<void(int)>& task = *task_;
    lock.unlock();
    run_one(task, thread_index);
    lock.lock();
  }
}

void WorkerPool::run_one(const std::function<void(int)>& task, int thread_index) {
  std::exception_ptr error;
  try {
    task(thread_index);
  } catch (...) {
    error = std::current_exception();
  }
  const std::lock_guard lock(mutex_);
  if (error && !first_error_) first_error_ = error;
  if (--num_unfinished_ == 0) all_done_.notify_all();
}

}  // namespace pdmesh::kernels
