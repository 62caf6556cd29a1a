#include "cpu_kernels.h"

#include <stdexcept>

namespace pdmesh::kernels {
namespace {

int checked_num_threads(int num_threads) {
  if (num_threads < 1) {
    throw std::invalid_argument("num_threads must be at least 1, got " + std::to_string(num_threads));
  }
  return num_threads;
}

}  // namespace

CpuKernels::CpuKernels(int num_threads, std::string_view instruction_set)
    : set_(choose_instruction_set(instruction_set)),
      pool_(checked_num_threads(num_threads)),
      attention_(set_.attention, num_threads),
      recurrence_(set_.recurrence, set_.conv) {}

}  // namespace pdmesh::kernels
