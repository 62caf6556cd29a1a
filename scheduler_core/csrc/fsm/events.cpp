#include "fsm/events.h"

#include <array>

namespace pdmesh {

const std::string& RequestIdOf(const EventView& event) {
  return std::visit([](const auto* concrete) -> const std::string& { return concrete->request_id; }, event);
}

const char* NameOf(const EventView& event) {
  constexpr std::array<const char*, std::variant_size_v<EventView>> kNames = {
      "result",      "finish", "abort",    "ready",   "granted", "done",
      "handed_over", "failed", "quiesced", "reserve", "retract"};
  return kNames[event.index()];
}

}  // namespace pdmesh
