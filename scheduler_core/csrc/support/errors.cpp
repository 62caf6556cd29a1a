#include "support/errors.h"

#include <string>

namespace pdmesh {
namespace {

[[noreturn]] void Raise(const char* what) {
  throw std::logic_error(std::string("scheduler_core: broken invariant: ") + what);
}

}  // namespace

// An exception that leaves a noexcept function ends the process and shows its text: loud, without I/O of our
// own.
void Fatal(const char* what) noexcept {
  Raise(what);
}

}  // namespace pdmesh
