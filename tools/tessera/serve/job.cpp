#include "tools/tessera/serve/job.h"

namespace tessera::tools {

void Job::push(CompletionPart part) {
  const std::lock_guard lock(mutex_);
  parts_.push_back(std::move(part));
  changed_.notify_one();
}

void Job::close(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  error_ = std::move(error);
  changed_.notify_one();
}

std::optional<CompletionPart> Job::next(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, patience, [&] { return !parts_.empty() || closed_; });
  if (parts_.empty()) return std::nullopt;
  CompletionPart part = std::move(parts_.front());
  parts_.pop_front();
  return part;
}

bool Job::finished() {
  const std::lock_guard lock(mutex_);
  if (!closed_ || !parts_.empty()) return false;
  if (error_) std::rethrow_exception(error_);
  return true;
}

void Job::cancel() {
  const std::lock_guard lock(mutex_);
  cancelled_ = true;
}

bool Job::cancelled() const {
  const std::lock_guard lock(mutex_);
  return cancelled_;
}

}  // namespace tessera::tools
