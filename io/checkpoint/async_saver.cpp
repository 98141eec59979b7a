#include "io/checkpoint/async_saver.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/clock.h"
#include "core/base/device_backend.h"
#include "core/base/error.h"
#include "core/base/memory.h"
#include "core/base/thread_pool.h"

namespace tessera::io {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kAlignment = 64;
constexpr std::size_t kPiece = std::size_t{1} << 20;  // bytes per memcpy
constexpr std::size_t kPage = 4096;

std::size_t bytes_of(const TensorPart& part) {
  return static_cast<std::size_t>(part.end - part.begin) * dtype_size(part.dtype);
}

std::size_t padded(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

struct Copy {
  std::byte* to;
  const std::byte* from;
  std::size_t bytes;
};

/// A list of copies executed by several threads.
class SharedCopies {
 public:
  explicit SharedCopies(std::vector<Copy> copies) : copies_(std::move(copies)) {}

  /// Makes copies until none is left to start. Several threads may call it at once.
  void work() {
    for (std::size_t i = next_++; i < copies_.size(); i = next_++) {
      std::memcpy(copies_[i].to, copies_[i].from, copies_[i].bytes);
      done_.fetch_add(1, std::memory_order_release);
    }
  }
  /// Makes copies like work(), then waits until those of other threads are complete too.
  void finish() {
    work();
    while (done_.load(std::memory_order_acquire) < copies_.size()) std::this_thread::yield();
  }
  bool is_done() const { return done_.load(std::memory_order_acquire) == copies_.size(); }

 private:
  const std::vector<Copy> copies_;
  std::atomic<std::size_t> next_ = 0, done_ = 0;
};

/// Staging buffer in host memory, pinned for a GPU context.
class Staging {
 public:
  Staging(std::shared_ptr<Context> context, std::size_t bytes)
      : context_(std::move(context)),
        allocator_(context_->device().type == DeviceType::CUDA
                       ? context_->backend().host_allocator()
                       : context_->allocator()),
        entry_(context_->host_ledger().entry(MemoryCategory::Staging, "checkpoint")),
        bytes_(bytes) {
    try {
      data_ = static_cast<std::byte*>(allocator_.allocate(bytes));
    } catch (const OutOfMemory& error) {
      throw OutOfMemory("{} for the staging of checkpoints; checkpoint.async=off needs none\n{}",
                        error.what(), context_->host_ledger().table());
    }
    context_->host_ledger().book(entry_, static_cast<std::int64_t>(bytes_));
    if (context_->device().type == DeviceType::CUDA) return;
    // Touches each page, so that page faults do not slow down the first copy.
    context_->threads().parallel_for(static_cast<std::int64_t>((bytes_ + kPage - 1) / kPage), 256,
                                     [this](std::int64_t begin, std::int64_t end) {
                                       for (std::int64_t page = begin; page < end; ++page) {
                                         data_[static_cast<std::size_t>(page) * kPage] =
                                             std::byte{0};
                                       }
                                     });
  }
  ~Staging() {
    allocator_.deallocate(data_, bytes_);
    context_->host_ledger().book(entry_, -static_cast<std::int64_t>(bytes_));
  }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  std::size_t bytes() const { return bytes_; }

  /// Points the request's parts into the buffer. Copies GPU parts; returns the host copies to make.
  std::vector<Copy> take(SaveRequest& request) {
    const bool on_device = context_->device().type == DeviceType::CUDA;
    std::vector<Copy> copies;
    std::size_t at = 0;
    for (auto& [section, parts] : request.parts) {
      for (TensorPart& part : parts) {
        const std::size_t bytes = bytes_of(part);
        const auto* from = static_cast<const std::byte*>(part.data);
        std::byte* const to = data_ + at;
        if (on_device && bytes > 0) context_->backend().copy_to_host(to, from, bytes);
        for (std::size_t done = 0, n = 0; !on_device && done < bytes; done += n) {
          n = std::min(bytes - done, kPiece);
          copies.push_back({to + done, from + done, n});
        }
        part.data = bytes > 0 ? to : nullptr;
        at += padded(bytes);
      }
    }
    return copies;
  }

 private:
  const std::shared_ptr<Context> context_;
  Allocator& allocator_;
  MemoryEntry& entry_;
  const std::size_t bytes_;
  std::byte* data_ = nullptr;
};

}  // namespace

// Shared with the writer thread, which may outlive the saver.
struct AsyncSaver::State {
  State(std::shared_ptr<Context> context, std::size_t bytes) : staging(std::move(context), bytes) {}

  Staging staging;
  std::mutex mutex;
  std::condition_variable changed;
  // Guarded by mutex:
  SaveRequest request;
  std::shared_ptr<SharedCopies> copies = std::make_shared<SharedCopies>(std::vector<Copy>());
  Write write;  // not null while a save is in flight
  Clock::time_point started;
  std::optional<FinishedSave> finished;
  bool quit = false;
  std::thread writer;  // used by AsyncSaver only

  std::shared_ptr<SharedCopies> shared_copies() {
    const std::lock_guard lock(mutex);
    return copies;
  }

  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [this] { return write || quit; });
      if (!write) return;
      const auto to_copy = copies;
      lock.unlock();
      to_copy->finish();
      SaveReport report;
      std::exception_ptr error;
      try {
        report = write(request);
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      finished->report = std::move(report);
      finished->error = std::move(error);
      finished->seconds = seconds_since(started);
      write = nullptr;
      changed.notify_all();
    }
  }
};

std::size_t AsyncSaver::staging_bytes(const SaveRequest& request) {
  std::size_t bytes = 0;
  for (const auto& [section, parts] : request.parts) {
    for (const TensorPart& part : parts) bytes += padded(bytes_of(part));
  }
  return bytes;
}

AsyncSaver::AsyncSaver(std::shared_ptr<Context> context, std::size_t bytes,
                       std::chrono::milliseconds patience)
    : context_(std::move(context)),
      state_(std::make_shared<State>(context_, bytes)),
      patience_(patience) {
  // The writer inherits a mask that blocks all signals except those that it causes (SIGSEGV, ...).
  sigset_t signals, before;
  sigfillset(&signals);
  for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&signals, own);
  ::pthread_sigmask(SIG_SETMASK, &signals, &before);
  try {
    state_->writer = std::thread([state = state_] { state->run(); });
  } catch (...) {
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  ::pthread_setname_np(state_->writer.native_handle(), "checkpoint");
}

AsyncSaver::~AsyncSaver() {
  state_->shared_copies()->finish();  // the caller may then free the source memory
  const bool idle = wait_until(Clock::now() + patience_);
  {
    const std::lock_guard lock(state_->mutex);
    state_->quit = true;
    state_->changed.notify_all();
  }
  if (idle) {
    state_->writer.join();
  } else {
    state_->writer.detach();
  }
}

void AsyncSaver::start(SaveRequest request, Write write) {
  const auto start = Clock::now();
  require<InternalError>(write != nullptr, "a save without a writer");
  {
    const std::lock_guard lock(state_->mutex);
    require<InternalError>(!state_->write && !state_->finished,
                           "save of step {} started before the outcome of step {} was taken",
                           request.step, state_->request.step);
  }
  const std::size_t bytes = staging_bytes(request);
  require(bytes <= state_->staging.bytes(),
          "the save of step {} needs {} bytes of staging, but the buffer has {}", request.step,
          bytes, state_->staging.bytes());
  auto copies = std::make_shared<SharedCopies>(state_->staging.take(request));
  const std::lock_guard lock(state_->mutex);
  state_->copies = std::move(copies);
  state_->request = std::move(request);
  state_->write = std::move(write);
  state_->started = start;
  state_->finished = FinishedSave{};
  state_->finished->step = state_->request.step;
  state_->finished->stall_seconds = seconds_since(start);
  state_->changed.notify_all();
}

void AsyncSaver::wait_copied() {
  const auto start = Clock::now();
  const auto copies = state_->shared_copies();
  if (copies->is_done()) return;
  context_->threads().parallel_for(context_->threads().size(), 1,
                                   [&](std::int64_t, std::int64_t) { copies->work(); });
  copies->finish();
  const std::lock_guard lock(state_->mutex);
  if (state_->finished) state_->finished->stall_seconds += seconds_since(start);
}

bool AsyncSaver::wait_until(Clock::time_point deadline) const {
  std::unique_lock lock(state_->mutex);
  return state_->changed.wait_until(lock, deadline, [this] { return state_->write == nullptr; });
}

std::optional<FinishedSave> AsyncSaver::take() {
  const std::lock_guard lock(state_->mutex);
  if (state_->write) return std::nullopt;
  return std::exchange(state_->finished, std::nullopt);
}

}  // namespace tessera::io
