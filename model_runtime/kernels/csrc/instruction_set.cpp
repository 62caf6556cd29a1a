#include "instruction_set.h"

#include <stdexcept>

namespace pdmesh::kernels {

std::vector<InstructionSet> runnable_instruction_sets() {
  std::vector<InstructionSet> found;
#ifdef PDMESH_HAS_AVX512
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("fma")) {
    found.push_back({"avx512", avx512::attention_core(), avx512::linear_core(), &avx512::rms_norm,
                     &avx512::add_rms_norm, &avx512::silu_multiply, &avx512::gelu_tanh_multiply,
                     &avx512::sigmoid_multiply, &avx512::rotate, &avx512::recur, &avx512::convolve,
                     &avx512::score_rows, &avx512::find_largest});
  }
#endif
#ifdef PDMESH_HAS_AVX2
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    found.push_back({"avx2", avx2::attention_core(), avx2::linear_core(), &avx2::rms_norm,
                     &avx2::add_rms_norm, &avx2::silu_multiply, &avx2::gelu_tanh_multiply,
                     &avx2::sigmoid_multiply, &avx2::rotate, &avx2::recur, &avx2::convolve, &avx2::score_rows,
                     &avx2::find_largest});
  }
#endif
  found.push_back({"baseline", baseline::attention_core(), baseline::linear_core(), &baseline::rms_norm,
                   &baseline::add_rms_norm, &baseline::silu_multiply, &baseline::gelu_tanh_multiply,
                   &baseline::sigmoid_multiply, &baseline::rotate, &baseline::recur, &baseline::convolve,
                   &baseline::score_rows, &baseline::find_largest});
  return found;
}

InstructionSet choose_instruction_set(std::string_view name) {
  for (const InstructionSet& set : runnable_instruction_sets()) {
    if (name.empty() || name == set.name) return set;
  }
  throw std::invalid_argument("instruction set \"" + std::string(name) + "\" does not run on this CPU");
}

}  // namespace pdmesh::kernels
