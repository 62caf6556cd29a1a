// The inner loops of one instruction set, and the choice among them at run time.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "attention_core.h"
#include "elementwise_core.h"
#include "linear_core.h"
#include "recurrence_core.h"
#include "selection_core.h"

namespace pdmesh::kernels {

struct InstructionSet {
  const char* name;
  AttentionCore attention;
  LinearCore linear;
  RmsNormCore rms_norm;
  AddRmsNormCore add_rms_norm;
  GateCore silu_multiply;
  GateCore gelu_tanh_multiply;
  GateCore sigmoid_multiply;
  RotateCore rotate;
  RecurrenceCore recurrence;
  ConvCore conv;
  SelectionCore selection;
  LargestCore find_largest;
};

// What this CPU can run, best first; never empty.
std::vector<InstructionSet> runnable_instruction_sets();

// The best for an empty name. Throws std::invalid_argument for one this CPU cannot run.
InstructionSet choose_instruction_set(std::string_view name);

}  // namespace pdmesh::kernels
