#pragma once

#include <gloo/transport/unbound_buffer.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/gloo.h"

namespace gloo {
class Context;
}

namespace tessera::comm {

/// Connections to all peers, with waits that end at a deadline or when another thread says so.
///
/// Gloo's own timeouts are not used: they close every connection before anybody can be told why.
/// A watching thread ends a wait instead, and the connections stay until close().
class GlooMesh {
 public:
  using Buffer = ::gloo::transport::UnboundBuffer;
  using Clock = std::chrono::steady_clock;
  /// How a wait ended.
  enum class Wait { Done, Late, Interrupted, Lost };

  /// Connects to all peers. @throws CommError
  GlooMesh(Store& store, int rank, int world_size, const GlooOptions& options);
  ~GlooMesh();
  GlooMesh(const GlooMesh&) = delete;
  GlooMesh& operator=(const GlooMesh&) = delete;

  std::unique_ptr<Buffer> buffer(void* data, std::size_t bytes);
  /// Deadline of the waits that follow.
  void set_deadline(Clock::time_point deadline);
  /// Waits for `count` receives (sends) of the buffer.
  Wait wait_received(Buffer& buffer, int count) { return wait(buffer, true, count); }
  Wait wait_sent(Buffer& buffer, int count) { return wait(buffer, false, count); }
  /// Ends the wait under way and all that follow. Any thread.
  void interrupt() noexcept;
  /// Peers whose connection is gone.
  std::vector<int> lost_peers();
  /// Closes all connections: peers that wait for this rank see it at once. Idempotent; buffers must
  /// be gone.
  void close() noexcept;

 private:
  Wait wait(Buffer& buffer, bool receive, int count);
  void watch();
  void end_wait_locked();

  const int rank_, world_size_;
  std::shared_ptr<::gloo::Context> context_;
  std::mutex mutex_;
  std::condition_variable stop_changed_;
  Buffer* waiting_ = nullptr;  // guarded by mutex_, as all below
  bool receiving_ = false;
  bool interrupted_ = false;
  bool stop_ = false;
  Clock::time_point deadline_{};
  std::thread watcher_;
};

}  // namespace tessera::comm
