#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "scheduler/plan.h"

namespace pdmesh::bindings {

namespace {

using Flags = nb::ndarray<nb::numpy, const std::uint8_t, nb::ndim<1>, nb::c_contig>;
using Rectangle = nb::ndarray<nb::numpy, const std::int32_t, nb::ndim<2>, nb::c_contig>;
using Int32Arrays = nb::typed<nb::list, Int32Array>;
using PlanHandle = nb::handle_t<Plan>;

const Plan& Of(PlanHandle self) {
  return ValueOf<Plan>(self);
}

template <std::vector<std::int32_t> Plan::* Column>
Int32Array ColumnOf(PlanHandle self) {
  return ViewOf(Of(self).*Column, self);
}

// The elements stay where they are; each keeps the plan alive.
template <auto Member>
auto ElementsOf(PlanHandle self) {
  using Element = typename std::decay_t<decltype(Of(self).*Member)>::value_type;
  nb::typed<nb::list, Element> elements;
  for (const Element& element : Of(self).*Member) {
    elements.append(nb::cast(&element, nb::rv_policy::reference_internal, self));
  }
  return elements;
}

void BindParts(nb::module_& module) {
  nb::class_<RemotePrefill>(module, "RemotePrefill",
                            "Decode role: a grant to send; a peer fills these blocks.")
      .def_ro("request_id", &RemotePrefill::request_id)
      .def_ro("from_token", &RemotePrefill::from_token, "the prompt before it is cached here already")
      .def_ro("first_slots", &RemotePrefill::first_slots, "per group: slot of the first granted block")
      .def_prop_ro(
          "block_ids",
          [](nb::handle_t<RemotePrefill> self) {
            return Int32Arrays(ViewsOf(ValueOf<RemotePrefill>(self).block_ids, self));
          },
          "per group: int32[n], granted blocks up to the prompt's end");
  nb::class_<Handover>(module, "Handover", "Prefill role: a prompt is computed and its first token landed.")
      .def_ro("request_id", &Handover::request_id)
      .def_ro("token", &Handover::token);
  nb::class_<AdmissionReport>(
      module, "Admission",
      "An admission of a prompt, that of a retracted request included: where it was found.")
      .def_ro("request_id", &AdmissionReport::request_id)
      .def_ro("device_hit_tokens", &AdmissionReport::device_hit_tokens)
      .def_ro("host_hit_tokens", &AdmissionReport::host_hit_tokens)
      .def_ro("storage_hit_tokens", &AdmissionReport::storage_hit_tokens);
}

nb::typed<nb::list, Rectangle> BlockTablesOf(PlanHandle self) {
  nb::typed<nb::list, Rectangle> tables;
  for (const BlockTableRows& table : Of(self).block_tables) {
    const auto num_rows = static_cast<std::size_t>(table.num_rows);
    const auto num_slots = static_cast<std::size_t>(table.num_slots);
    tables.append(Rectangle(table.block_ids.data(), {num_rows, num_slots}, self));
  }
  return tables;
}

}  // namespace

void BindPlan(nb::module_& module) {
  BindParts(module);
  nb::class_<Plan>(
      module, "Plan",
      "What to carry out next, in this order: stores that are not pinned, zero blocks, loads, send remote "
      "prefills and handovers, run the rows; pinned stores beside all of it. Arrays are read-only views that "
      "keep the plan alive.")
      .def_ro("num_rows", &Plan::num_rows, "prefill rows, then decode rows")
      .def_ro("num_prefill_rows", &Plan::num_prefill_rows)
      .def_ro("request_ids", &Plan::request_ids, "per row")
      .def_prop_ro("request_slots", &ColumnOf<&Plan::request_slots>, "int32[num_rows], from 1")
      .def_prop_ro("input_lengths", &ColumnOf<&Plan::input_lengths>, "int32[num_rows], tokens")
      .def_prop_ro("begins", &ColumnOf<&Plan::begins>,
                   "int32[num_rows], position of the row's first input token; of a decode row planned while "
                   "results are out the earliest, one token counted for each of them")
      .def_prop_ro("num_results_out", &ColumnOf<&Plan::num_results_out>,
                   "int32[num_rows], results of the request that were out when the row was planned")
      .def_prop_ro("replay_lengths", &ColumnOf<&Plan::replay_lengths>,
                   "int32[num_rows], inputs at the row's begin whose rows only replayable groups write; the "
                   "others have them")
      .def_prop_ro("prefill_lengths", &ColumnOf<&Plan::prefill_lengths>,
                   "int32[num_rows], whole prompt length, 0 on decode rows")
      .def_prop_ro(
          "logits_wanted",
          [](PlanHandle self) {
            return Flags(Of(self).logits_wanted.data(), {Of(self).logits_wanted.size()}, self);
          },
          "uint8[num_rows], 1 on the last chunk of a prompt and on decode rows")
      .def_prop_ro("checkpoint_tokens", &ColumnOf<&Plan::checkpoint_tokens>,
                   "int32[num_rows], position inside the row up to which a state is computed as well, 0 for "
                   "none; its slot is (checkpoint_tokens - 1) // block_granularity")
      .def_prop_ro(
          "state_input_slots",
          [](PlanHandle self) { return Int32Arrays(ViewsOf(Of(self).state_input_slots, self)); },
          "per group: int32[num_rows], the table slot whose state a row continues from, -1 for none; empty "
          "for history groups")
      .def_prop_ro(
          "state_output_slots",
          [](PlanHandle self) { return Int32Arrays(ViewsOf(Of(self).state_output_slots, self)); },
          "per group: int32[num_rows], the table slot a row leaves its final state in; empty for history "
          "groups")
      .def_prop_ro("token_ids", &ColumnOf<&Plan::token_ids>,
                   "int32[sum(input_lengths)], inputs of all rows in row order, -1 for a draft and for a "
                   "token that has "
                   "not landed")
      .def_prop_ro("block_tables", &BlockTablesOf,
                   "per group: int32[num_rows, max_slots], 0 = hole, -1 = padding")
      .def_prop_ro(
          "zero_blocks", [](PlanHandle self) { return Int32Arrays(ViewsOf(Of(self).zero_blocks, self)); },
          "per group: int32[n], fresh blocks to zero before anything below")
      .def_prop_ro("stores", &ElementsOf<&Plan::stores>, "those that are not pinned first")
      .def_prop_ro("loads", &ElementsOf<&Plan::loads>, "at most one")
      .def_prop_ro("remote_prefills", &ElementsOf<&Plan::remote_prefills>)
      .def_prop_ro("handovers", &ElementsOf<&Plan::handovers>)
      .def_prop_ro("admissions", &ElementsOf<&Plan::admissions>)
      .def_ro("retracted", &Plan::retracted,
              "gave their blocks back for others; they come back by themselves")
      .def_ro("finished", &Plan::finished, "requests that ended since the last plan, however they ended")
      .def_ro(
          "num_stalled_plans", &Plan::num_stalled_plans,
          "plans in a row without anything in them while requests live and nobody owes an answer; told at "
          "1024 and at each doubling, else 0")
      .def_prop_ro("is_empty", &Plan::is_empty);
}

}  // namespace pdmesh::bindings
