#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>

#include "bindings.h"

namespace pdmesh::bindings {

using namespace nb::literals;

namespace {

template <typename Event>
void BindPlainEvent(nb::module_& module, const char* name, const char* doc) {
  nb::class_<Event>(module, name, doc)
      .def(
          "__init__",
          [](Event* self, std::string request_id) { new (self) Event{.request_id = std::move(request_id)}; },
          "request_id"_a)
      .def_ro("request_id", &Event::request_id);
}

template <typename Event, typename... Others>
AnyEventView ViewAsOneOf(nb::handle event) {
  if (nb::isinstance<Event>(event)) {
    const Event* view = &ValueOf<Event>(event);
    if constexpr (std::is_constructible_v<EventView, const Event*>) {
      return EventView(view);
    } else {
      return TransferEventView(view);
    }
  }
  if constexpr (sizeof...(Others) > 0) {
    return ViewAsOneOf<Others...>(event);
  } else {
    throw nb::type_error("advance takes events only");
  }
}

}  // namespace

AnyEventView EventViewOf(nb::handle event) {
  return ViewAsOneOf<ResultEvent, FinishEvent, AbortEvent, ReadyEvent, GrantedEvent, DoneEvent,
                     HandedOverEvent, FailedEvent, QuiescedEvent, ReserveEvent, RetractEvent, StoreDoneEvent,
                     LoadDoneEvent>(event);
}

void BindEvents(nb::module_& module) {
  nb::class_<ResultEvent>(
      module, "ResultEvent",
      "The result of a scheduled row: no token for a chunk before the last, one for the last, up to "
      "verify_width for a decode row.")
      .def(
          "__init__",
          [](ResultEvent* self, std::string request_id, std::vector<std::int32_t> tokens) {
            new (self) ResultEvent{.request_id = std::move(request_id), .tokens = std::move(tokens)};
          },
          "request_id"_a, "tokens"_a)
      .def_ro("request_id", &ResultEvent::request_id)
      .def_ro("tokens", &ResultEvent::tokens);
  nb::class_<DoneEvent>(
      module, "DoneEvent",
      "Decode role: every granted block has landed; the token is the first of the completion.")
      .def(
          "__init__",
          [](DoneEvent* self, std::string request_id, std::int32_t token) {
            new (self) DoneEvent{.request_id = std::move(request_id), .token = token};
          },
          "request_id"_a, "token"_a)
      .def_ro("request_id", &DoneEvent::request_id)
      .def_ro("token", &DoneEvent::token);
  nb::class_<ReserveEvent>(
      module, "ReserveEvent",
      "The room, in tokens, that the next decode step of a request makes in groups that "
      "keep everything, once and in place of what it would take by itself; never less than "
      "its row needs. The last one counts.")
      .def(
          "__init__",
          [](ReserveEvent* self, std::string request_id, std::int32_t num_tokens) {
            new (self) ReserveEvent{.request_id = std::move(request_id), .num_tokens = num_tokens};
          },
          "request_id"_a, "num_tokens"_a)
      .def_ro("request_id", &ReserveEvent::request_id)
      .def_ro("num_tokens", &ReserveEvent::num_tokens);
  BindPlainEvent<FinishEvent>(module, "FinishEvent", "The runtime found the end of the completion.");
  BindPlainEvent<AbortEvent>(module, "AbortEvent", "The request is given up; legal in every state.");
  BindPlainEvent<ReadyEvent>(module, "ReadyEvent",
                             "Decode role: the prefill node has started on the prompt.");
  BindPlainEvent<GrantedEvent>(module, "GrantedEvent",
                               "Prefill role: the peer has said where the blocks go.");
  BindPlainEvent<HandedOverEvent>(module, "HandedOverEvent", "Prefill role: the peer has everything.");
  BindPlainEvent<FailedEvent>(module, "FailedEvent", "The handoff broke.");
  BindPlainEvent<QuiescedEvent>(
      module, "QuiescedEvent",
      "Nothing is being written or read for the request any more, and nothing will be.");
  BindPlainEvent<RetractEvent>(
      module, "RetractEvent",
      "Decode and fused roles: what the request's rows computed is given up; it starts over with the tokens "
      "that have landed. No result of a row planned before may be reported after it.");
}

}  // namespace pdmesh::bindings
