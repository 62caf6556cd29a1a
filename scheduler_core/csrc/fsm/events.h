// What the runtime tells the scheduler, about requests and about transfers. Plain values; the transition
// table gives those of requests their meaning.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "cache/prefix/cache_key.h"

namespace pdmesh {

// The result of a scheduled row: no token for a chunk before the last, one for the last chunk, and as many as
// a decode row has verified, at least one.
struct ResultEvent {
  std::string request_id;
  std::vector<std::int32_t> tokens;
};
// The runtime found the end of the completion.
struct FinishEvent {
  std::string request_id;
};
struct AbortEvent {
  std::string request_id;
};
// Room that the next decode step is to make, once and in place of what it would take by itself.
struct ReserveEvent {
  std::string request_id;
  std::int32_t num_tokens;
};
// Decode role: the prefill node has started on the prompt.
struct ReadyEvent {
  std::string request_id;
};
// Prefill role: the decode node has said where the blocks go.
struct GrantedEvent {
  std::string request_id;
};
// Decode role: every granted block has landed; the token is the first of the completion.
struct DoneEvent {
  std::string request_id;
  std::int32_t token;
};
// Prefill role: the peer has everything.
struct HandedOverEvent {
  std::string request_id;
};
// The handoff broke.
struct FailedEvent {
  std::string request_id;
};
// Nothing is being written or read for this request any more, and nothing will be.
struct QuiescedEvent {
  std::string request_id;
};
// Decode and fused roles: the caller gives up what the request's rows computed since they cannot be trusted,
// and the request starts over with the tokens that have landed. It returns its blocks at once and publishes
// nothing. REQUIRES of the caller: it reports no result of a row that was planned before this event; such a
// result is ignored as long as no newer row is out, and cannot be told from the newer row's afterwards.
struct RetractEvent {
  std::string request_id;
};

// A view of one event; the caller keeps the event alive for the call it is passed to.
using EventView =
    std::variant<const ResultEvent*, const FinishEvent*, const AbortEvent*, const ReadyEvent*,
                 const GrantedEvent*, const DoneEvent*, const HandedOverEvent*, const FailedEvent*,
                 const QuiescedEvent*, const ReserveEvent*, const RetractEvent*>;

// The copies of a store are done, and with storage its blocks are backed up. `created` are the keys that
// storage did not have before. Of a store that is not under way it changes nothing.
struct StoreDoneEvent {
  std::uint64_t operation_id;
  std::vector<CacheKey> created;
};
// The copies of a load are done. Or it failed: `missed` are the keys that storage turned out not to have,
// nothing of the load was copied and the rows of its plan were not run. REQUIRES of the caller: a failure is
// reported before the next plan is asked for and behind the results of earlier plans, and no result of that
// plan is reported at all. Of a load that is not under way it changes nothing.
struct LoadDoneEvent {
  std::uint64_t operation_id;
  bool success = true;
  std::vector<CacheKey> missed;
};

// Transfers belong to no request: they end later than the requests they were for.
using TransferEventView = std::variant<const StoreDoneEvent*, const LoadDoneEvent*>;
using AnyEventView = std::variant<EventView, TransferEventView>;

const std::string& RequestIdOf(const EventView& event);
const char* NameOf(const EventView& event);

}  // namespace pdmesh
