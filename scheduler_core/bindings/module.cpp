#include <cstdlib>

#include "bindings.h"
#include "support/errors.h"

NB_MODULE(_core, module) {
  namespace nb = nanobind;
  module.doc() = "The native scheduler: decides what a node computes next. Pure; not thread-safe.";
  // A process may end while a daemon thread's frames still hold plans; that is no leak worth a wall of
  // warnings. Tests that end cleanly ask for them, so that a reference too many in a binding shows.
  nb::set_leak_warnings(std::getenv("PDMESH_REPORT_LEAKS") != nullptr);
  nb::exception<pdmesh::ConfigError>(module, "ConfigError", PyExc_ValueError);
  nb::exception<pdmesh::SubmitError>(module, "SubmitError", PyExc_ValueError);
  nb::exception<pdmesh::ContractError>(module, "ContractError", PyExc_RuntimeError);
  pdmesh::bindings::BindConfig(module);
  pdmesh::bindings::BindCapacityModel(module);
  pdmesh::bindings::BindEvents(module);
  pdmesh::bindings::BindTiers(module);
  pdmesh::bindings::BindPlan(module);
  pdmesh::bindings::BindPrefixEvents(module);
  pdmesh::bindings::BindScheduler(module);
}
