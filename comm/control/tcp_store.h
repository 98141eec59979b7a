#pragma once

#include <atomic>
#include <list>
#include <mutex>
#include <string>
#include <thread>

#include "comm/control/key_values.h"
#include "comm/control/socket.h"
#include "comm/control/store.h"
#include "core/base/error.h"

namespace tessera::comm {

struct TcpStoreServerOptions {
  std::string host = "127.0.0.1";
  std::uint16_t port = 0;  ///< 0: any free one
  /// Clients must name it in their first message. It keeps out stale and foreign processes; it is
  /// not a secret that protects an open network.
  std::string run_id = {};
  std::size_t max_connections = 1024;  ///< a rank takes one for each of its threads that waits
  /// Connections that have not introduced themselves by then are closed.
  std::chrono::milliseconds hello_timeout{5000};
};

/// The key-value store of a run, served over TCP by a thread of its own. Whatever clients send, it
/// buffers at most one frame for each; malformed frames close the connection, and a full house
/// closes the oldest stranger.
class TcpStoreServer {
 public:
  /// @throws CommError if the address is taken
  explicit TcpStoreServer(TcpStoreServerOptions options);
  ~TcpStoreServer();
  TcpStoreServer(const TcpStoreServer&) = delete;
  TcpStoreServer& operator=(const TcpStoreServer&) = delete;

  const std::string& host() const { return options_.host; }
  std::uint16_t port() const { return port_; }
  const std::string& run_id() const { return options_.run_id; }
  /// Clients that have introduced themselves and are still connected.
  int clients() const { return clients_.load(); }
  /// Entries that are held: the measure of its growth.
  std::size_t size() const { return size_.load(); }
  /// Waits until no client is left, at most so long: who serves the store leaves last.
  void drain(std::chrono::milliseconds timeout) const;

 private:
  struct Connection;
  void serve();
  void accept_all();
  bool receive(Connection& connection);
  bool handle(Connection& connection, std::string_view body);
  void reply(Connection& connection, std::uint8_t status, std::string value);
  bool flush(Connection& connection);
  int next_timeout() const;

  const TcpStoreServerOptions options_;
  FileDescriptor listener_, wake_;
  std::uint16_t port_ = 0;
  std::atomic<int> clients_{0};
  std::atomic<std::size_t> size_{0};
  KeyValues values_;  // the thread's own, as all below
  std::list<Connection> connections_;
  std::thread thread_;
};

/// A client of TcpStoreServer. Each call that runs takes a connection of its own, kept for reuse.
class TcpStore final : public Store {
 public:
  /// Connects, trying the ports [port, port + ports) again and again: who serves may come later.
  /// A host name without an address is one that does not have it yet.
  /// @throws CommError Timeout at the deadline; Mismatch if ports is 1 and the store there serves
  /// another run
  TcpStore(std::string host, std::uint16_t port, std::string run_id,
           std::chrono::milliseconds connect_deadline, int ports = 1);
  ~TcpStore() override;

  void set(const std::string& key, std::string_view value) override;
  std::string get(const std::string& key, std::chrono::milliseconds deadline) override;
  bool has(const std::string& key) override;
  void leave(const std::string& name, int readers) override;

 private:
  Message call(const Message& request, std::chrono::milliseconds deadline);
  CommError lost(std::string_view what) const;
  std::string where() const;

  const std::string host_;
  std::uint16_t port_;
  const std::string run_id_;
  std::mutex mutex_;
  std::vector<FileDescriptor> idle_;
};

/// What the messages mean. A request is answered by one reply whose only field is the value.
struct StoreProtocol {
  static constexpr std::string_view kMagic = "tessera-store-1";
  // Requests: hello {magic, run id}, set {key, value}, get {key, milliseconds in decimal}, has
  // {key}, leave {name, readers in decimal}
  static constexpr std::uint8_t kHello = 'H', kSet = 'S', kGet = 'G', kHas = '?', kLeave = 'L';
  // Replies; "no": a taken key, a key that did not come in time, one that is not there, a stranger.
  static constexpr std::uint8_t kYes = 'y', kNo = 'n';
};

}  // namespace tessera::comm
