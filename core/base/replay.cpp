#include "core/base/replay.h"

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
  backend.begin_capture(within == nullptr ? nullptr : within->captured_.get());
  try {
    work();
  } catch (...) {
    backend.abandon_capture();
    throw;
  }
  captured_ = backend.end_capture();
  context_->ledger().book(entry_of(*context_), static_cast<std::int64_t>(memory_bytes()));
}

Replay::~Replay() {
  context_->ledger().book(entry_of(*context_), -static_cast<std::int64_t>(memory_bytes()));
}

void Replay::run() { captured_->run(); }

std::size_t Replay::memory_bytes() const { return captured_->memory_bytes(); }

}  // namespace tessera
