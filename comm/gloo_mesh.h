#pragma once

#include <gloo/transport/context.h>
#include <gloo/transport/unbound_buffer.h>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "comm/gloo.h"

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

  /// Peers are there, as far as the store knows, but can't be connected to: the culprits. What this
  /// rank has connected to stays so until the error is gone, so that it can be told of before.
  class Unreachable : public CommError {
   public:
    using CommError::CommError;
    std::shared_ptr<::gloo::transport::Context> connections;
    Clock::time_point they_end;  ///< until then the culprits try, too
  };

  /// Connects to all peers: half of the time is theirs to say where they listen, half to connect.
  /// @throws Unreachable; CommError Timeout if a peer does not say where it listens, Aborted if
  /// this rank can't listen, Mismatch if the addresses don't go together; the run's verdict, if
  /// there is one and options.communicator.ends_run
  GlooMesh(Store& store, int rank, int world_size, const GlooOptions& options);
  ~GlooMesh();
  GlooMesh(const GlooMesh&) = delete;
  GlooMesh& operator=(const GlooMesh&) = delete;

  /// Both sides of a message name the same slot, and the same size: Gloo ends the process if the
  /// sizes differ.
  Transfer receive(int peer, std::uint64_t slot, void* data, std::size_t bytes);
  Transfer send(int peer, std::uint64_t slot, const void* data, std::size_t bytes);
  /// For the waits that follow.
  /// @param overdue     a wait that lasts until then calls on_overdue once, with those that owe
  ///                    something, and goes on
  /// @param on_overdue  on the thread that waits, which sees to the deadline only after it
  void set_deadline(Clock::time_point overdue, Clock::time_point deadline,
                    std::function<void(const std::vector<int>& owing)> on_overdue);
  /// Waits for all transfers. A peer that left is no loss if its transfers are done.
  Result wait(const std::vector<Transfer>& transfers);
  /// Ends the wait under way and all that follow. Any thread.
  void interrupt() noexcept;
  /// Closes all connections: peers that wait for this rank see it at once. Idempotent; transfers
  /// must be gone.
  void close() noexcept;

 private:
  /// What a rank tells another one.
  struct Invitation {
    std::chrono::milliseconds patience{};  ///< it tries for so long to connect
    std::string address;                   ///< Gloo's, as bytes
    std::string encode() const;
    static Invitation decode(const std::string& text);
  };
  struct Attempt {
    bool is_made = false;  ///< else there was no time
    std::string problem;   ///< empty: it is connected
  };
  enum class Step { Done, Ended, Lost, Interrupted };
  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
  std::vector<int> peers() const;
  void connect(Store& store, const GlooOptions& options);
  std::shared_ptr<::gloo::transport::Context> listen(const GlooOptions& options,
                                                     std::vector<std::string>& addresses) const;
  std::string cannot_listen(const GlooOptions& options, std::string_view why) const;
  void check_address(int peer, const std::string& mine, const std::string& theirs) const;
  std::vector<Attempt> connect_all(::gloo::transport::Context& context,
                                   const std::vector<Invitation>& invitations,
                                   Clock::time_point end) const;
  Step wait_once(const Transfer& transfer, const std::vector<bool>& owing);
  std::vector<bool> lost_peers();
  bool is_overdue();
  void tell_overdue(const std::vector<int>& owing);
  void watch();
  void look_for_lost_peers_locked();
  void end_wait_locked();

  const int rank_;
  const std::size_t world_size_;
  const std::string address_;  // of this host
  std::shared_ptr<::gloo::transport::Context> context_;
  // Receives that never come: a connection's end is what they wait for.
  std::vector<std::unique_ptr<Buffer>> canaries_;
  std::mutex mutex_;
  std::condition_variable stop_changed_;
  Buffer* waiting_ = nullptr;  // guarded by mutex_, as all below
  bool receiving_ = false;
  std::vector<bool> owing_, lost_;  // by rank
  bool interrupted_ = false;
  bool stop_ = false;
  Clock::time_point overdue_ = Clock::time_point::max();  // max: told in this wait
  Clock::time_point overdue_at_ = Clock::time_point::max();
  Clock::time_point deadline_ = Clock::time_point::max();
  std::function<void(const std::vector<int>&)> on_overdue_;  // of the thread that waits
  std::thread watcher_;
};

}  // namespace tessera::comm
