// What the bound kernels of one model share: an instruction set, and the threads that run it.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "instruction_set.h"
#include "linear.h"
#include "paged_attention.h"
#include "panel_memory.h"
#include "recurrence.h"
#include "tensor_view.h"
#include "worker_pool.h"

namespace pdmesh::kernels {

// One call at a time.
class CpuKernels {
 public:
  // Throws std::invalid_argument for num_threads below 1 and for a set this CPU cannot run.
  CpuKernels(int num_threads, std::string_view instruction_set);

  int num_threads() const { return pool_.num_threads(); }
  std::string instruction_set() const { return set_.name; }
  std::int64_t num_packed_bytes() const { return num_packed_bytes_; }

  const InstructionSet& set() const { return set_; }
  WorkerPool& pool() { return pool_; }
  PanelMemory& panel_memory() { return panel_memory_; }
  std::vector<float>& scratch() { return scratch_; }
  PagedAttention& attention() { return attention_; }
  Recurrence& recurrence() { return recurrence_; }
  void count_packed(const PackedWeight& weight) { num_packed_bytes_ += weight.num_bytes(); }

 private:
  InstructionSet set_;
  WorkerPool pool_;
  PanelMemory panel_memory_;
  std::vector<float> scratch_;  // of the running call
  PagedAttention attention_;
  Recurrence recurrence_;
  std::int64_t num_packed_bytes_ = 0;
};

// A dimension of extent one may carry any stride.
template <class Array>
bool has_stride(const Array& array, std::size_t axis, std::int64_t stride) {
  return array.shape(axis) == 1 || array.stride(axis) == stride;
}

void bind_rows(nanobind::class_<CpuKernels>& kernels);
void bind_states(nanobind::class_<CpuKernels>& kernels);
void bind_selection(nanobind::class_<CpuKernels>& kernels);

}  // namespace pdmesh::kernels
