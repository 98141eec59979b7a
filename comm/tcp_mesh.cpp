#include "comm/tcp_mesh.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>

#include "comm/collective.h"
#include "comm/control/agreement.h"
#include "comm/control/authentication.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::size_t kMaxStrangers = 64;
constexpr int kAcceptsAtOnce = 16;
constexpr milliseconds kStrangerTime{2000};
constexpr milliseconds kRetryPause{50};
constexpr milliseconds kAcceptTick{100};
constexpr std::size_t kRankBytes = 4;
constexpr std::size_t kIntroduction = kRankBytes + kNonceBytes + kProofBytes;

bool is_out_of_descriptors(int code) { return code == EMFILE || code == ENFILE; }

// Every message fits the empty send buffer, so that a partial send means a lost connection.
bool send_message(int fd, const std::string& message) {
  return ::send(fd, message.data(), message.size(), MSG_NOSIGNAL) ==
         static_cast<ssize_t>(message.size());
}

// A connection that is not authenticated yet.
struct Pending {
  FileDescriptor fd;
  int peer;  // -1: incoming, from an unknown process (a stranger)
  Deadline deadline;
  std::string nonce;   // of this rank
  std::string theirs;  // nonce of the server, once received by the client
  std::string in;
  std::size_t wanted;  // bytes of the next message
};

class Connector {
 public:
  Connector(Store& store, int rank, int world_size, const TcpOptions& options)
      : store_(store),
        options_(options),
        rank_(rank),
        sockets_(static_cast<std::size_t>(world_size)),
        problems_(sockets_.size(), "it did not connect"),
        retry_at_(sockets_.size()) {}

  std::vector<FileDescriptor> connect() {
    const auto half = options_.connect_timeout / 2;
    listen();
    addresses_ =
        exchange(store_, options_.agreement("address"), rank_, static_cast<int>(sockets_.size()),
                 fmt::format("{} {}", bound_address(listener_.get()), bound_port(listener_.get())),
                 std::max(half, milliseconds(1)));
    const auto time = std::max(half, options_.watched_within);
    const auto end = Clock::now() + time;
    const bool looks = options_.communicator.ends_run || options_.group() != nullptr;
    auto look = Clock::now();
    for (auto left = missing(); !left.empty(); left = missing()) {
      const auto now = Clock::now();
      if (looks && now >= look) {
        if (const auto verdict = find_verdict(store_, milliseconds(0), options_.verdict_key())) {
          throw CommError(*verdict);
        }
        look = now + kAcceptTick;
      }
      if (now >= end) throw unreachable(left, time);
      for (const int peer : left) {
        if (peer < rank_ && now >= retry_at_[index(peer)]) start(peer);
      }
      wait(end);
    }
    return std::move(sockets_);
  }

 private:
  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
  int world(int rank) const { return world_rank(options_.group(), rank); }

  std::vector<int> missing() const {
    std::vector<int> ranks;
    for (int r = 0; r < static_cast<int>(sockets_.size()); ++r) {
      if (r != rank_ && !sockets_[index(r)]) ranks.push_back(r);
    }
    return ranks;
  }

  void listen() {
    try {
      listener_ = listen_on(options_.address, 0, SOMAXCONN);
    } catch (const CommError& error) {
      throw cannot_listen(error.what());
    }
  }

  CommError cannot_listen(std::string_view why) const {
    return CommError(CommFailure::Aborted, std::vector<int>{world(rank_)},
                     "rank {} can't accept the other ranks' connections on {}, for which it needs "
                     "{} descriptors (ulimit -n) and an address of this host: {}",
                     world(rank_), options_.address, sockets_.size(), why);
  }

  // No rank is known to be dead or stopped, so both ends are blamed.
  CommError unreachable(const std::vector<int>& peers, milliseconds time) const {
    std::vector<int> ends = peers;
    ends.insert(std::lower_bound(ends.begin(), ends.end(), rank_), rank_);
    const std::size_t first = index(peers.front());
    const auto world_peers = world_ranks(options_.group(), peers);
    return CommError(CommFailure::Timeout, world_ranks(options_.group(), ends),
                     "rank {} could not connect to {} within {}: rank {} at {}: {}; is the network "
                     "between them cut, or a port blocked by a firewall?",
                     world(rank_), rank_list(world_peers), format_seconds(time),
                     world_peers.front(), addresses_[first], problems_[first]);
  }

  void start(int peer) {
    retry_at_[index(peer)] = Deadline::max();
    const std::string& address = addresses_[index(peer)];
    const std::size_t space = std::min(address.find(' '), address.size());
    std::uint16_t port = 0;
    parse_number(std::string_view(address).substr(std::min(space + 1, address.size())), port);
    Pending p{{}, peer, Deadline::max(), make_nonce(), {}, {}, kNonceBytes};
    p.fd = start_connecting(address.substr(0, space), port);
    if (p.fd) {
      pending_.push_back(std::move(p));
    } else if (is_out_of_descriptors(errno)) {
      throw cannot_listen(std::strerror(errno));
    } else {
      fail(peer, std::strerror(errno));
    }
  }

  void fail(int peer, std::string problem) {
    if (peer < 0) return;
    problems_[index(peer)] = std::move(problem);
    retry_at_[index(peer)] = Clock::now() + kRetryPause;
  }

  void wait(Deadline end) {
    polls_ = {{listener_.get(), POLLIN, 0}};
    for (const Pending& p : pending_) polls_.push_back({p.fd.get(), POLLIN, 0});
    const int timeout = std::min(milliseconds_until(end), static_cast<int>(kRetryPause.count()));
    if (::poll(polls_.data(), polls_.size(), timeout) < 0) return;  // EINTR
    const auto now = Clock::now();
    std::vector<Pending> kept;
    for (std::size_t i = 0; i < pending_.size(); ++i) {
      const bool is_open = polls_[i + 1].revents == 0 || proceed(pending_[i]);
      if (is_open && now < pending_[i].deadline) kept.push_back(std::move(pending_[i]));
    }
    pending_ = std::move(kept);
    if (polls_[0].revents != 0) accept();
  }

  void accept() {
    for (int i = 0; i < kAcceptsAtOnce; ++i) {
      FileDescriptor fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!fd && is_out_of_descriptors(errno)) {
        const int code = errno;
        if (!evict()) throw cannot_listen(std::strerror(code));
      }
      if (!fd) return;
      const auto is_stranger = [](const Pending& p) { return p.peer < 0; };
      if (std::ranges::count_if(pending_, is_stranger) >= std::ptrdiff_t{kMaxStrangers}) evict();
      keep_alive(fd.get());
      Pending p{std::move(fd), -1, Clock::now() + kStrangerTime, make_nonce(), {}, {},
                kIntroduction};
      if (send_message(p.fd.get(), p.nonce)) pending_.push_back(std::move(p));
    }
  }

  // Closes the connection of a random stranger; false: there is none.
  bool evict() {
    std::vector<std::size_t> strangers;
    for (std::size_t i = 0; i < pending_.size(); ++i) {
      if (pending_[i].peer < 0) strangers.push_back(i);
    }
    if (strangers.empty()) return false;
    const std::size_t chosen = strangers[random_() % strangers.size()];
    pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(chosen));
    return true;
  }

  // Reads available bytes. @return false: close the connection
  bool proceed(Pending& p) {
    char bytes[kIntroduction];
    const ssize_t n = ::recv(p.fd.get(), bytes, p.wanted - p.in.size(), 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return true;
    if (n <= 0) {
      fail(p.peer, n < 0 ? std::strerror(errno) : "it closed the connection");
      return false;
    }
    p.in.append(bytes, static_cast<std::size_t>(n));
    if (p.in.size() < p.wanted) return true;
    const std::string message = std::exchange(p.in, {});
    if (p.peer < 0) {
      admit(p, message);
      return false;
    }
    return answer(p, message);
  }

  std::string proof(ProofRole role, int client, int server, std::string_view client_nonce,
                    std::string_view server_nonce) const {
    return make_proof(options_.token, role,
                      fmt::format("{}/{}/{}>{}", options_.run_id, options_.name, client, server),
                      client_nonce, server_nonce);
  }

  // Server side: checks the client's introduction.
  void admit(Pending& p, std::string_view introduction) {
    const std::uint32_t claimed = read_u32(introduction);
    if (claimed <= static_cast<std::uint32_t>(rank_) || claimed >= sockets_.size()) return;
    const int client = static_cast<int>(claimed);
    const std::string_view nonce = introduction.substr(kRankBytes, kNonceBytes);
    if (!is_same_secret(introduction.substr(kRankBytes + kNonceBytes),
                        proof(ProofRole::Client, client, rank_, nonce, p.nonce))) {
      return;
    }
    if (send_message(p.fd.get(), proof(ProofRole::Server, client, rank_, nonce, p.nonce))) {
      sockets_[index(client)] = std::move(p.fd);  // replaces a connection that the client gave up
    }
  }

  // Client side: receives the server's nonce, then its proof.
  bool answer(Pending& p, const std::string& message) {
    if (p.theirs.empty()) {
      p.theirs = message;
      p.wanted = kProofBytes;
      const std::string own = proof(ProofRole::Client, rank_, p.peer, p.nonce, p.theirs);
      std::string introduction;
      append_u32(introduction, index(rank_));
      if (send_message(p.fd.get(), introduction + p.nonce + own)) return true;
      fail(p.peer, std::strerror(errno));
    } else if (is_same_secret(message,
                              proof(ProofRole::Server, rank_, p.peer, p.nonce, p.theirs))) {
      sockets_[index(p.peer)] = std::move(p.fd);
    } else {
      fail(p.peer, "it does not know this run's token");
    }
    return false;
  }

  Store& store_;
  const TcpOptions& options_;
  const int rank_;
  FileDescriptor listener_;
  std::vector<std::string> addresses_;   // "address port", by rank like the next three
  std::vector<FileDescriptor> sockets_;  // authenticated
  std::vector<std::string> problems_;    // error of the last attempt
  std::vector<Deadline> retry_at_;       // of lower ranks; max(): an attempt is running
  std::vector<Pending> pending_;
  std::vector<pollfd> polls_;
  std::mt19937_64 random_{std::random_device{}()};
};

}  // namespace

std::vector<FileDescriptor> connect_tcp_mesh(Store& store, int rank, int world_size,
                                             const TcpOptions& options) {
  return Connector(store, rank, world_size, options).connect();
}

}  // namespace tessera::comm
