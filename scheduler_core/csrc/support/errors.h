// The kinds of failure the core knows. A refusal for lack of capacity is a value, never an exception.
#pragma once

#include <stdexcept>
#include <string>

namespace pdmesh {

// Bad configuration: found by SchedulerConfig::Validate before anything exists.
class ConfigError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// A submitted batch that cannot be accepted; nothing of the batch was inserted.
class SubmitError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// The caller broke an agreement (an event that its request's state does not allow); nothing was changed.
class ContractError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A promise of the core to itself is broken after state was changed: there is no way back, so the process
// ends.
[[noreturn]] void Fatal(const char* what) noexcept;

inline void Ensure(bool holds, const char* what) noexcept {
  if (!holds) [[unlikely]] {
    Fatal(what);
  }
}

}  // namespace pdmesh
