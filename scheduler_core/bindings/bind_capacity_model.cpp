#include "bindings.h"
#include "scheduler/capacity_model.h"

namespace pdmesh::bindings {

using namespace nb::literals;

namespace {

std::size_t GroupOf(const CapacityModel& model, std::int64_t group) {
  if (group < 0 || group >= model.num_groups()) {
    throw nb::index_error("there is no such group");
  }
  return static_cast<std::size_t>(group);
}

// Counts and lengths are never negative, and sums of them stay within 64 bits.
std::int64_t Counted(std::int64_t number) {
  if (number < 0 || number > (std::int64_t{1} << 40)) {
    throw nb::value_error("counts and lengths lie in [0, 2**40]");
  }
  return number;
}

}  // namespace

void BindCapacityModel(nb::module_& module) {
  nb::class_<CapacityModel>(
      module, "CapacityModel",
      "How much storage requests need, from the configuration alone: what a pool is sized by before it "
      "exists, and what the scheduler then accepts and reserves. num_lcm_blocks may be 0 for sizing. "
      "IndexError: no such group; ValueError: a negative number.")
      .def(
          "__init__",
          [](CapacityModel* self, const SchedulerConfig& config) {
            new (self) CapacityModel(CapacityModel::ForSizing(config));
          },
          "config"_a, "Raises ConfigError for what validate() refuses, counts of blocks apart.")
      .def(
          "blocks",
          [](const CapacityModel& model, std::int64_t group, std::int64_t num_tokens) {
            return model.BlocksFor(GroupOf(model, group), Counted(num_tokens));
          },
          "group"_a, "num_tokens"_a,
          "Blocks of a group that one request of num_tokens holds at most at one time.")
      .def(
          "lcm_blocks",
          [](const CapacityModel& model, std::int64_t num_tokens) {
            return model.LcmBlocksFor(Counted(num_tokens));
          },
          "num_tokens"_a, "Parents that such a request occupies at most when it is alone.")
      .def(
          "concurrent_blocks",
          [](const CapacityModel& model, std::int64_t group, std::int64_t num_requests,
             std::int64_t num_tokens, std::int64_t context_tokens) {
            return model.ConcurrentBlocksFor(GroupOf(model, group), Counted(num_requests),
                                             Counted(num_tokens), Counted(context_tokens));
          },
          nb::kw_only(), "group"_a, "num_requests"_a, "num_tokens"_a, "context_tokens"_a,
          "Blocks of a group that num_requests of up to context_tokens each hold at most, num_tokens in all.")
      .def(
          "lcm_blocks_for_concurrency",
          [](const CapacityModel& model, std::int64_t num_requests, std::int64_t num_tokens,
             std::int64_t context_tokens) {
            return model.LcmBlocksForConcurrency(Counted(num_requests), Counted(num_tokens),
                                                 Counted(context_tokens));
          },
          nb::kw_only(), "num_requests"_a, "num_tokens"_a, "context_tokens"_a,
          "Parents that all groups together need for that.")
      .def_prop_ro("max_request_tokens", &CapacityModel::max_request_tokens,
                   "Largest request that fits the configured number of parents alone.");
}

}  // namespace pdmesh::bindings
