// What a request has computed becomes a prefix that others find.
#include <algorithm>

#include "scheduler/scheduler.h"

namespace pdmesh {

void Scheduler::PublishPending(Request& request, Holdings& holdings, StoreScope scope) {
  Publish(request, holdings, ProgressOf(request, holdings, scope, config_.enable_prefix_cache));
}

void Scheduler::Publish(Request& request, Holdings& holdings, const RequestProgress& progress) {
  if (progress.first_grain < progress.end_grain) {
    coordinator_.Publish(holdings.tables, holdings.epoch, progress);
    holdings.num_published_grains = progress.end_grain;
    DescribePublished(request);
  }
}

// An admission published what the host had; what storage reads is published when it is there.
void Scheduler::NoteRestored(Request& request, const PrefixProbe& probe) {
  DescribePublished(request);
  if (prefix_events_ && probe.storage_hit_tokens > 0) {
    const std::span<const Digest> digests =
        probe.digests.first(static_cast<std::size_t>(probe.hit_tokens / config_.prefix_granularity));
    planned_readings_.push_back(
        {.tokens = {request.tokens.begin(), request.tokens.begin() + probe.hit_tokens},
         .digests = {digests.begin(), digests.end()},
         .is_announced = Announces(request)});
  }
}

void Scheduler::DescribePublished(Request& request) {
  if (prefix_keys_) {
    prefix_keys_->Describe(request.chain.digests());
  }
  if (!prefix_events_) {
    return;
  }
  if (Announces(request)) {
    prefix_events_->Describe(request.tokens, request.event_hashes);
  } else {
    prefix_events_->LeaveOut();
  }
}

// Publishes what a retracted request would want to find again: full grains, and the newest state that one of
// its chunks left, whatever boundary that was. The host copies it ahead of what the plan does with the
// blocks.
void Scheduler::PublishSnapshot(Request& request, Holdings& holdings) {
  if (request.phase() == Phase::kPrefilling) {
    holdings.boundary_kind = std::max(holdings.boundary_kind, BoundaryKind::kEndpoint);
  }
  const bool is_kept = config_.enable_prefix_cache || coordinator_.has_host_tier();
  Publish(request, holdings, ProgressOf(request, holdings, StoreScope::kNothing, is_kept));
  QueueSnapshot(request, holdings, StoreGuard::kAhead);
}

void Scheduler::QueueSnapshot(const Request& request, const Holdings& holdings, StoreGuard guard) {
  coordinator_.QueueSnapshot(request.chain.digests(), holdings.num_published_grains, guard);
}

StoreScope Scheduler::PrefillStoreScope() const {
  return config_.role == Role::kDecode ? StoreScope::kNothing : StoreScope::kEverything;
}

StoreScope Scheduler::DecodeStoreScope() const {
  return config_.role == Role::kDecode ? StoreScope::kNothing : StoreScope::kWindows;
}

RequestProgress Scheduler::ProgressOf(Request& request, Holdings& holdings, StoreScope scope,
                                      bool publishes) const {
  const std::int32_t first_grain = holdings.num_published_grains;
  const std::int32_t end_grain =
      publishes ? holdings.num_computed_tokens / config_.prefix_granularity : first_grain;
  request.chain.ExtendTo(request.tokens, end_grain);
  return {.digests = request.chain.digests(),
          .first_grain = first_grain,
          .end_grain = std::max(first_grain, end_grain),
          .kind = end_grain * config_.prefix_granularity == holdings.boundary_tokens ? holdings.boundary_kind
                                                                                     : BoundaryKind::kChunk,
          .state_checkpoint_tokens = holdings.checkpoint_tokens,
          .keeps_duplicates = config_.role == Role::kPrefill,
          .uses = &holdings.uses,
          .store_scope = scope};
}

}  // namespace pdmesh
