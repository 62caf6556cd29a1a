// A small pool of threads for data-parallel kernels.
//
// Must not know what it runs. A worker that has finished waits a moment for the next task awake, because the
// operations of one forward follow each other faster than a sleeping thread wakes; then it sleeps: a model
// that is not computing costs no CPU.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "spin_event.h"

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
  SpinEvent posted_;
  SpinEvent finished_;
  std::atomic<std::uint64_t> generation_{0};  // counts tasks; task_ is written before it moves on
  std::atomic<int> num_unfinished_{0};
  std::atomic<bool> stopping_{false};
  const std::function<void(int)>* task_ = nullptr;
  std::mutex error_mutex_;
  std::exception_ptr first_error_;
  std::vector<std::thread> workers_;
};

}  // namespace pdmesh::kernels
