// Waiting for a condition on atomics, awake for a bounded time and then asleep.
//
// The condition and the changes to it must be sequentially consistent: a waiter announces its sleep before it
// looks a last time, a notifier changes the condition before it looks for sleepers, so one sees the other.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>

namespace pdmesh::kernels {

class SpinEvent {
 public:
  explicit SpinEvent(std::chrono::microseconds awake) : awake_(awake) {}

  template <class Condition>
  void wait(const Condition& holds) {
    if (spin(holds)) return;
    std::unique_lock lock(mutex_);
    ++num_asleep_;
    changed_.wait(lock, holds);
    --num_asleep_;
  }

  // Call after the condition may have become true.
  void notify_all() {
    if (num_asleep_ == 0) return;
    {
      const std::lock_guard lock(mutex_);
    }  // a waiter that has looked is now really waiting
    changed_.notify_all();
  }

 private:
  static constexpr int kLooksPerClockRead = 32;

  template <class Condition>
  bool spin(const Condition& holds) const {
    if (awake_.count() == 0) return false;
    const auto deadline = std::chrono::steady_clock::now() + awake_;
    do {
      for (int look = 0; look < kLooksPerClockRead; ++look) {
        if (holds()) return true;
        pause();
      }
    } while (std::chrono::steady_clock::now() < deadline);
    return false;
  }

  // Tells the core that this is a spin, so that its sibling thread gets the execution units.
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  const std::chrono::microseconds awake_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<int> num_asleep_{0};
};

}  // namespace pdmesh::kernels
