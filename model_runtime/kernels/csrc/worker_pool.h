// A small pool of sleeping threads for data-parallel kernels.
//
// Must not know what it runs. Idle workers wait on a condition variable: a model that is not computing costs
// no CPU, and processes that share a machine do not spin against one another.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace pdmesh::kernels {

class WorkerPool {
 public:
  // REQUIRES: num_threads >= 1. The calling thread counts as one of them.
  explicit WorkerPool(int num_threads);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // Calls task(thread_index) once on each of the threads, thread_index in [0, num_threads), and returns when
  // all are done. The first exception is rethrown. One call at a time; a second caller waits for its turn.
  void run_on_all(const std::function<void(int)>& task);

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

 private:
  void work(int thread_index);
  void run_one(const std::function<void(int)>& task, int thread_index);

  std::mutex turn_;  // held by the caller for the whole of run_on_all
  std::mutex mutex_;
  std::condition_variable task_posted_;
  std::condition_variable all_done_;
  const std::function<void(int)>* task_ = nullptr;
  std::uint64_t generation_ = 0;
  int num_unfinished_ = 0;
  bool stopping_ = false;
  std::exception_ptr first_error_;
  std::vector<std::thread> workers_;
};

}  // namespace pdmesh::kernels
