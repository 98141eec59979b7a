#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "comm/control/client_session.h"
#include "comm/control/key_values.h"
#include "comm/control/monitor.h"
#include "comm/control/socket.h"
#include "comm/control/store.h"
#include "core/base/error.h"

namespace tessera::comm {

struct TcpStoreServerOptions {
  std::string host = "127.0.0.1";
  std::uint16_t port = 0;  ///< 0: any free one
  /// Clients send it in their first message; it keeps out other runs, not attackers.
  std::string run_id = {};
  /// See authentication.h. May be empty on a loopback address only.
  std::string token = {};
  std::size_t max_connections = 1024;  ///< a rank uses one for each thread that waits
  /// Maximum number of connections that have not completed the handshake, besides max_connections.
  std::size_t max_strangers = 256;
  /// Time limit of the whole handshake.
  std::chrono::milliseconds hello_timeout{2000};
};

/// Serves the key-value store of a run over TCP, on its own thread, to clients that know run id and
/// token. Strangers, which have not completed the handshake, may send one small frame within
/// hello_timeout. Beyond max_strangers, a new stranger replaces a random one, so that strangers
/// can't keep a rank out. Buffers at most one frame per client; malformed frames close the
/// connection. The work per event does not grow with the number of connections.
class TcpStoreServer {
 public:
  /// @throws InvalidArgument if the address is not a loopback one and there is no token; CommError
  /// if the address is taken
  explicit TcpStoreServer(TcpStoreServerOptions options);
  ~TcpStoreServer();
  TcpStoreServer(const TcpStoreServer&) = delete;
  TcpStoreServer& operator=(const TcpStoreServer&) = delete;

  const std::string& host() const { return options_.host; }
  std::uint16_t port() const { return port_; }
  const std::string& run_id() const { return secrets_.run_id; }
  const std::string& token() const { return secrets_.token; }
  /// Connected clients that completed the handshake.
  int clients() const { return clients_.load(); }
  /// Open connections, strangers included.
  std::size_t connections() const { return held_.load(); }
  /// Clients refused so far: wrong run or token, malformed bytes, or a late handshake; not those
  /// that left or were replaced.
  std::uint64_t refused() const { return refused_.load(); }
  std::size_t size() const;
  /// Writes `value` unless the key is taken; returns the key's value. Needs no connection.
  std::string set_or_get(const std::string& key, std::string_view value);
  std::optional<std::string> find(std::string_view key) const;
  BeatTable& beats() { return beats_; }
  /// Waits up to `timeout` until all clients have left.
  void drain(std::chrono::milliseconds timeout) const;

 private:
  struct Connection;
  using Clock = std::chrono::steady_clock;
  using Id = std::uint64_t;  // of a connection, never reused

  void wake() const;
  void serve();
  void accept_some();
  void admit(FileDescriptor fd);
  void pause_accepting();
  bool proceed(Connection& connection, std::uint32_t events);
  bool receive(Connection& connection);
  bool join(Connection& connection);
  bool handle(Connection& connection, std::string_view body);
  void reply(Connection& connection, std::uint8_t status, std::string value);
  bool flush(Connection& connection);
  void wake_for_others();
  void start_waiting(Connection& connection, std::string key, Clock::time_point deadline);
  void stop_waiting(Connection& connection);
  void wake_waiting(const std::string& key, const std::string& value);
  void pass_deadlines(Clock::time_point now);
  void set_deadline(Connection& connection, std::optional<Clock::time_point> deadline);
  void leave_strangers(Connection& connection);
  void evict_stranger();
  void close(Id id);
  int next_timeout() const;

  const TcpStoreServerOptions options_;
  const StoreSecrets secrets_;
  FileDescriptor listener_, wake_, events_;
  std::uint16_t port_ = 0;
  std::atomic<int> clients_{0};
  std::atomic<std::size_t> held_{0};
  std::atomic<std::uint64_t> refused_{0};
  BeatTable beats_;
  std::atomic<bool> stop_{false};
  mutable std::mutex values_mutex_;
  KeyValues values_;                        // guarded by values_mutex_, like the next
  std::vector<std::string> set_elsewhere_;  // keys set without a connection
  // Used by thread_ only, like all below.
  std::unordered_map<Id, std::unique_ptr<Connection>> connections_;
  std::vector<Id> strangers_;                             // unordered
  std::set<std::pair<Clock::time_point, Id>> deadlines_;  // of handshakes and gets
  std::set<std::pair<std::string, Id>> waiting_;          // (key, connection) of waiting gets
  std::optional<Clock::time_point> accept_again_;         // set while accepting is paused
  std::mt19937_64 random_;
  Id next_id_ = 0;
  std::thread thread_;
};

/// Client of TcpStoreServer. Concurrent calls use separate connections, kept for reuse.
class TcpStore final : public Store {
 public:
  /// Connects. Retries the name lookup and all ports in [port, port + ports), because the server
  /// may start later. Refuses a store that does not know the token.
  /// @param served_by  blamed, with fate kNoAnswer, if the store does not answer
  /// @throws CommError Timeout if no store answers before the deadline; Mismatch if its run id or
  ///   token differs, at once if `ports` is 1
  TcpStore(std::string host, std::uint16_t port, std::string run_id,
           std::chrono::milliseconds connect_deadline, int ports = 1, std::string token = {},
           StoreHost served_by = {});
  ~TcpStore() override;

  void set(const std::string& key, std::string_view value) override;
  std::string get(const std::string& key, std::chrono::milliseconds deadline) override;
  bool has(const std::string& key) override;
  void leave(const std::string& name, int readers) override;
  void beat(int rank, const RankState& state) override;
  std::shared_ptr<Store> separate(std::chrono::milliseconds answer_time) const override;
  void give_up() override { given_up_.store(true); }

 private:
  Message call(const Message& request, std::chrono::milliseconds deadline);
  FileDescriptor connect(Deadline deadline) const;
  CommError lost(std::string_view what) const;
  CommError refused(bool by_us) const;
  std::string where() const;

  const std::string host_;
  std::uint16_t port_;
  const StoreSecrets secrets_;
  const StoreHost served_by_;
  std::atomic<bool> given_up_{false};
  // Time for an answer; get() adds it to the deadline, which the server enforces.
  std::chrono::milliseconds answer_time_{5000};
  std::mutex mutex_;
  std::vector<FileDescriptor> idle_;
};

/// Store protocol. Each request gets one reply, whose only field is the value.
struct StoreProtocol {
  static constexpr std::string_view kMagic = "tessera-store-4";
  // Handshake: hello {magic, run id, nonce; empty without a token}, answered by yes, no, or
  // challenge {nonce}; prove {client's proof}, answered by yes {server's proof} or no.
  static constexpr std::uint8_t kHello = 'H', kChallenge = 'C', kProve = 'P';
  // Requests, named like the functions of Store: set {key, value}, get {key, milliseconds in
  // decimal}, has {key}, leave {name, readers in decimal}, beat {rank in decimal, RankState}
  static constexpr std::uint8_t kSet = 'S', kGet = 'G', kHas = '?', kLeave = 'L', kBeat = 'B';
  // Replies. "no" to set: the key has another value; to get: not set in time; to has: not set; to
  // a handshake: refused.
  static constexpr std::uint8_t kYes = 'y', kNo = 'n';
};

}  // namespace tessera::comm
