#pragma once

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/control/agreement.h"
#include "comm/control/withheld_time.h"
#include "comm/failure_report.h"
#include "comm/queued_communicator.h"

namespace tessera::comm {

/// Base of the backends whose ranks are processes. Handles deadlines, interruption, and the
/// verdict: the error that all ranks agree to report.
class ProcessBackend : public CollectiveBackend {
 public:
  int rank() const override { return rank_; }
  int world_size() const override { return world_; }
  std::string key() const override { return key_; }
  std::chrono::milliseconds connect_timeout() const override { return connect_timeout_; }
  void run(const Collective& collective) final {
    collective_ = &collective;
    deadline_ = Clock::now() + collective.deadline;
    agreed_ = false;
    try {
      look_for_verdict();
      run_checked(collective);
    } catch (const CommError& error) {
      throw report_.verdict(error);
    }
  }
  void interrupt(const CommError& reason) noexcept final {
    report_.set_interruption(reason);
    interrupted_.store(true, std::memory_order_release);
    wake();
  }

 protected:
  using Clock = std::chrono::steady_clock;

  ProcessBackend(const std::shared_ptr<Store>& store, int rank, int world_size,
                 const ConnectOptions& options)
      : rank_(rank),
        world_(world_size),
        report_(store, options.verdict_key(), world_size, options.processes,
                options.membership.group),
        key_(options.name),
        connect_timeout_(options.connect_timeout),
        store_(store),
        verdict_key_(options.verdict_key()),
        looks_for_verdict_(options.group() != nullptr && !options.communicator.ends_run) {
    require(store != nullptr && world_size >= 2 && rank >= 0 && rank < world_size,
            "{} needs a store and a rank of a group of two or more, got rank {} of {}",
            options.name, rank, world_size);
  }

  virtual void run_checked(const Collective& collective) = 0;
  /// Ends a wait of run_checked(), which then calls check_interruption(). Any thread.
  virtual void wake() noexcept = 0;

  void check_interruption() const {
    if (interrupted_.load(std::memory_order_acquire)) throw report_.interruption();
  }
  /// @param signature_of  returns the signature of a rank. @throws CommError(Mismatch)
  template <typename F>
  void compare_signatures(F&& signature_of) {
    std::vector<Signature> signatures;
    for (int r = 0; r < world_; ++r) signatures.push_back(signature_of(r));
    if (const auto mismatch = find_mismatch(signatures, report_.group()))
      throw CommError(*mismatch);
    agreed_ = true;
  }
  CommError late(const std::vector<int>& ranks, std::string_view question) const {
    return agreed_ ? report_.stuck(*collective_, ranks, question)
                   : report_.missing(*collective_, ranks);
  }

  /// Calls f for the other ranks, starting after this one, so that ranks begin with different ones.
  template <typename F>
  void for_peers(F&& f) const {
    for (int i = 1; i < world_; ++i) f((rank_ + i) % world_);
  }
  template <typename F>
  std::vector<const void*> parts(F&& part_of) const {
    std::vector<const void*> result;
    for (int r = 0; r < world_; ++r) result.push_back(part_of(r));
    return result;
  }
  static std::size_t index(int r) { return static_cast<std::size_t>(r); }
  static void copy(void* to, const void* from, std::size_t bytes) {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }

  const int rank_, world_;
  FailureReport report_;
  // Used by the queue's thread only.
  const Collective* collective_ = nullptr;  // the running one
  Clock::time_point deadline_;
  bool agreed_ = false;  // all ranks arrived with equal signatures

 private:
  // Ranks of other groups may fail while this group works; the next collective of all would report
  // it. In a run that a failure ends, the heartbeat does.
  void look_for_verdict() {
    constexpr std::chrono::milliseconds kLookPeriod{250};
    const auto now = Clock::now();
    if (!looks_for_verdict_ || now < next_look_) return;
    next_look_ = now + kLookPeriod;
    std::optional<CommError> verdict;
    try {
      if (store_->has(verdict_key_))
        verdict = report_.verdict(CommError(CommFailure::Aborted, {}, "another rank failed"));
    } catch (const CommError&) {
      looks_for_verdict_ = false;  // losing the store alone is no failure
    }
    if (verdict) throw CommError(*verdict);
  }

  const std::string key_;
  const std::chrono::milliseconds connect_timeout_;
  const std::shared_ptr<Store> store_;
  const std::string verdict_key_;
  bool looks_for_verdict_;
  Clock::time_point next_look_{};
  std::atomic<bool> interrupted_{false};
};

}  // namespace tessera::comm
