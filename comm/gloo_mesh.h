#pragma once

#include <gloo/transport/unbound_buffer.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/gloo.h"

namespace gloo {
class Context;
}

namespace tessera::comm {

/// Connections to all peers, with waits that end at a deadline, when a peer is lost, or when
/// another thread says so.
///
/// Gloo's own timeouts are not used: they close every connection before anybody can be told why.
/// Nor are its errors enough: it does not tell a transfer that is half done when its connection
/// breaks. A watching thread sees to both, and the connections stay until close().
class GlooMesh {
 public:
  using Buffer = ::gloo::transport::UnboundBuffer;
  using Clock = std::chrono::steady_clock;

  /// One message to or from one peer, under way until wait() has seen it done, or until it is
  /// destroyed; then Gloo no longer touches the memory.
  struct Transfer {
    int peer = 0;
    bool receiving = false;
    std::unique_ptr<Buffer> buffer;  ///< null: the connection was lost before
  };
  enum class Outcome { Done, Late, Lost, Interrupted };
  struct Result {
    Outcome outcome = Outcome::Done;
    std::vector<int> peers;  ///< Late: who owes something; Lost: whose connection is gone
  };

  /// Connects to all peers. @throws CommError
  GlooMesh(Store& store, int rank, int world_size, const GlooOptions& options);
  ~GlooMesh();
  GlooMesh(const GlooMesh&) = delete;
  GlooMesh& operator=(const GlooMesh&) = delete;

  /// Both sides of a message name the same slot, and the same size: Gloo ends the process if the
  /// sizes differ.
  Transfer receive(int peer, std::uint64_t slot, void* data, std::size_t bytes);
  Transfer send(int peer, std::uint64_t slot, const void* data, std::size_t bytes);
  /// Deadline of the waits that follow.
  void set_deadline(Clock::time_point deadline);
  /// Waits for all transfers. A peer that left is no loss if its transfers are done.
  Result wait(const std::vector<Transfer>& transfers);
  /// Ends the wait under way and all that follow. Any thread.
  void interrupt() noexcept;
  /// Closes all connections: peers that wait for this rank see it at once. Idempotent; transfers
  /// must be gone.
  void close() noexcept;

 private:
  enum class Step { Done, Ended, Lost, Interrupted };
  Step wait_once(const Transfer& transfer, const std::vector<bool>& owing);
  std::vector<bool> lost_peers();
  void watch();
  void look_for_lost_peers_locked();
  void end_wait_locked();

  const int rank_;
  const std::size_t world_size_;
  std::shared_ptr<::gloo::Context> context_;
  // Receives that never come: a connection's end is what they wait for.
  std::vector<std::unique_ptr<Buffer>> canaries_;
  std::mutex mutex_;
  std::condition_variable stop_changed_;
  Buffer* waiting_ = nullptr;  // guarded by mutex_, as all below
  bool receiving_ = false;
  std::vector<bool> owing_, lost_;  // by rank
  bool interrupted_ = false;
  bool stop_ = false;
  Clock::time_point deadline_ = Clock::time_point::max();
  std::thread watcher_;
};

}  // namespace tessera::comm
