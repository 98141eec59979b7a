#include "core/base/replay.h"

#include <utility>

#include "core/base/error.h"

namespace tessera {
namespace {

MemoryLedger::Entry& entry_of(Context& context) {
  return context.ledger().entry(MemoryCategory::Workspace, "captured work");
}

}  // namespace

Replay::Replay(std::shared_ptr<Context> context, const std::function<void()>& work,
               const Replay* within)
    : context_(std::move(context)) {
  require<Unsupported>(context_->device().type == DeviceType::CUDA,
                       "work of {} cannot be captured; only a GPU's can", context_->device().str());
  DeviceBackend& backend = context_->backend();
  require<InternalError>(within == nullptr || within->context_ == context_,
                         "captured work shares memory within one context");
  backend.begin_capture(within == nullptr ? nullptr : within->last_.get());
  context_->set_capture(this);
  try {
    work();
  } catch (...) {
    context_->set_capture(nullptr);
    backend.abandon_capture();
    throw;
  }
  context_->set_capture(nullptr);
  last_ = backend.end_capture();
  context_->ledger().book(entry_of(*context_), static_cast<std::int64_t>(memory_bytes()));
}

Replay::~Replay() {
  context_->ledger().book(entry_of(*context_), -static_cast<std::int64_t>(memory_bytes()));
}

void Replay::run() {
  for (const Part& part : parts_) {
    if (part.work) part.work->run();
    part.action();
  }
  last_->run();
}

// NOLINTNEXTLINE(performance-unnecessary-value-param): it is kept
void Replay::between(Context& context, std::function<void()> action) {
  Replay* const replay = context.capture();
  if (replay == nullptr) return action();
  replay->parts_.push_back({context.backend().end_part(), std::move(action)});
}

std::size_t Replay::parts() const {
  std::size_t count = 1;
  for (const Part& part : parts_) count += part.work ? 1 : 0;
  return count;
}

std::size_t Replay::memory_bytes() const { return last_->memory_bytes(); }

}  // namespace tessera
