#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <optional>

#include "comm/control/authentication.h"
#include "comm/control/tcp_store.h"

namespace tessera::comm {
namespace {

// Events, and new connections, handled per iteration.
constexpr int kEventsAtOnce = 64, kAcceptsAtOnce = 16;
// Pause after the system ran out of descriptors.
constexpr std::chrono::milliseconds kAcceptPause{100};
// Random picks per eviction, to find a stranger that has not sent the run id.
constexpr int kLooks = 8;

// Keeps strangers from predicting which of them is replaced.
std::uint64_t unpredictable() {
  std::uint64_t value = 0;
  std::memcpy(&value, make_nonce().data(), sizeof(value));
  return value;
}

FileDescriptor listen_for(const TcpStoreServerOptions& options) {
  require_token(options.host, options.token);
  return listen_on(options.host, options.port, SOMAXCONN);
}

bool watch(int epoll, int operation, int fd, std::uint64_t id, std::uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  return ::epoll_ctl(epoll, operation, fd, &event) == 0;
}

constexpr std::uint64_t kWakeId = 0, kListenerId = 1, kFirstId = 2;

}  // namespace

struct TcpStoreServer::Connection {
  Connection(Id number, FileDescriptor socket, const StoreSecrets& secrets)
      : id(number), fd(std::move(socket)), session(secrets) {}

  const Id id;
  FileDescriptor fd;
  ClientSession session;
  std::string out;
  bool reads = true;                          // polled for reading; else for writing
  bool waiting = false;                       // in a get whose key is not set yet
  std::string key;                            // of the get
  std::optional<Clock::time_point> deadline;  // of the get, or of the handshake
  std::size_t place = 0;                      // index in strangers_ until the handshake completes
  std::optional<int> beats;                   // rank that sends heartbeats over it
};

TcpStoreServer::TcpStoreServer(TcpStoreServerOptions options)
    : options_(std::move(options)),
      secrets_{options_.run_id, options_.token},
      listener_(listen_for(options_)),
      wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      events_(::epoll_create1(EPOLL_CLOEXEC)),
      port_(bound_port(listener_.get())),
      random_(unpredictable()),
      next_id_(kFirstId) {
  if (!watch(events_.get(), EPOLL_CTL_ADD, wake_.get(), kWakeId, EPOLLIN) ||
      !watch(events_.get(), EPOLL_CTL_ADD, listener_.get(), kListenerId, EPOLLIN)) {
    throw CommError(CommFailure::Aborted, {}, "the store at {}:{} cannot watch its connections: {}",
                    options_.host, port_, std::strerror(errno));
  }
  thread_ = std::thread([this] { serve(); });
}

TcpStoreServer::~TcpStoreServer() {
  stop_.store(true);
  wake();
  thread_.join();
}

void TcpStoreServer::wake() const {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof(one));
}

std::string TcpStoreServer::set_or_get(const std::string& key, std::string_view value) {
  {
    const std::lock_guard lock(values_mutex_);
    if (const std::string* const found = values_.find(key)) return *found;
    values_.set(key, value);
    set_elsewhere_.push_back(key);
  }
  wake();
  return std::string(value);
}

std::size_t TcpStoreServer::size() const {
  const std::lock_guard lock(values_mutex_);
  return values_.size();
}

std::optional<std::string> TcpStoreServer::find(std::string_view key) const {
  const std::lock_guard lock(values_mutex_);
  const std::string* const found = values_.find(key);
  return found == nullptr ? std::nullopt : std::optional(*found);
}

void TcpStoreServer::wake_for_others() {
  std::vector<std::string> keys;
  {
    const std::lock_guard lock(values_mutex_);
    keys.swap(set_elsewhere_);
  }
  for (const std::string& key : keys) {
    if (const auto value = find(key)) wake_waiting(key, *value);
  }
}

void TcpStoreServer::drain(std::chrono::milliseconds timeout) const {
  const auto end = Clock::now() + timeout;
  while (clients() > 0 && Clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

int TcpStoreServer::next_timeout() const {
  int timeout = 60'000;
  if (!deadlines_.empty()) {
    timeout = std::min(timeout, milliseconds_until(deadlines_.begin()->first));
  }
  if (accept_again_) timeout = std::min(timeout, milliseconds_until(*accept_again_));
  return timeout;
}

void TcpStoreServer::serve() {
  std::array<epoll_event, kEventsAtOnce> events;
  for (;;) {
    const int ready = ::epoll_wait(events_.get(), events.data(), kEventsAtOnce, next_timeout());
    if (ready < 0 && errno != EINTR) return;
    bool has_new_connection = false;
    for (int i = 0; i < ready; ++i) {
      const epoll_event& event = events[static_cast<std::size_t>(i)];
      const Id id = event.data.u64;
      if (id == kWakeId) {
        // Reset the event first, so that later requests wake this thread again.
        std::uint64_t count = 0;
        [[maybe_unused]] const auto n = ::read(wake_.get(), &count, sizeof(count));
        if (stop_.load()) return;
        wake_for_others();
        continue;
      }
      has_new_connection = has_new_connection || id == kListenerId;
      const auto found = connections_.find(id);
      if (found != connections_.end() && !proceed(*found->second, event.events)) close(id);
    }
    const auto now = Clock::now();
    pass_deadlines(now);
    if (accept_again_ && *accept_again_ <= now) {
      accept_again_.reset();
      if (!watch(events_.get(), EPOLL_CTL_ADD, listener_.get(), kListenerId, EPOLLIN)) {
        pause_accepting();
      }
    }
    if (has_new_connection) accept_some();
  }
}

void TcpStoreServer::accept_some() {
  for (int i = 0; i < kAcceptsAtOnce; ++i) {
    FileDescriptor fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd) {
      admit(std::move(fd));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return;
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      // Pending connections stay in the listen queue and would wake this thread at once.
      if (strangers_.empty()) return pause_accepting();
      evict_stranger();
    }  // else the client left before it was accepted
  }
}

void TcpStoreServer::pause_accepting() {
  ::epoll_ctl(events_.get(), EPOLL_CTL_DEL, listener_.get(), nullptr);
  accept_again_ = Clock::now() + kAcceptPause;
}

void TcpStoreServer::admit(FileDescriptor fd) {
  if (strangers_.size() >= std::max<std::size_t>(1, options_.max_strangers)) evict_stranger();
  keep_alive(fd.get());
  const Id id = next_id_++;
  if (!watch(events_.get(), EPOLL_CTL_ADD, fd.get(), id, EPOLLIN)) return;
  auto& added = connections_[id];
  added = std::make_unique<Connection>(id, std::move(fd), secrets_);
  held_.store(connections_.size());
  added->place = strangers_.size();
  strangers_.push_back(id);
  set_deadline(*added, Clock::now() + options_.hello_timeout);
  // A rank's hello has often arrived already.
  if (!receive(*added)) close(id);
}

void TcpStoreServer::evict_stranger() {
  Id id = 0;
  for (int look = 0; look < kLooks; ++look) {
    id = strangers_[random_() % strangers_.size()];
    if (!connections_.at(id)->session.greeted()) break;
  }
  close(id);
}

void TcpStoreServer::leave_strangers(Connection& c) {
  connections_.at(strangers_.back())->place = c.place;
  strangers_[c.place] = strangers_.back();
  strangers_.pop_back();
}

void TcpStoreServer::close(Id id) {
  Connection& c = *connections_.at(id);
  stop_waiting(c);
  set_deadline(c, std::nullopt);
  if (c.beats) beats_.broken(*c.beats, id);
  if (c.session.introduced()) {
    clients_.fetch_sub(1);
  } else {
    leave_strangers(c);
  }
  // Deregister it, because a forked process may hold a copy of the descriptor.
  ::epoll_ctl(events_.get(), EPOLL_CTL_DEL, c.fd.get(), nullptr);
  connections_.erase(id);
  held_.store(connections_.size());
}

void TcpStoreServer::set_deadline(Connection& c, std::optional<Clock::time_point> deadline) {
  if (c.deadline) deadlines_.erase({*c.deadline, c.id});
  c.deadline = deadline;
  if (deadline) deadlines_.insert({*deadline, c.id});
}

void TcpStoreServer::pass_deadlines(Clock::time_point now) {
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    Connection& c = *connections_.at(deadlines_.begin()->second);
    if (!c.session.introduced()) {
      refused_.fetch_add(1);
      close(c.id);
      continue;
    }
    stop_waiting(c);
    reply(c, StoreProtocol::kNo, {});
    if (!flush(c)) close(c.id);
  }
}

void TcpStoreServer::start_waiting(Connection& c, std::string key, Clock::time_point deadline) {
  c.waiting = true;
  c.key = std::move(key);
  waiting_.insert({c.key, c.id});
  set_deadline(c, deadline);
}

void TcpStoreServer::stop_waiting(Connection& c) {
  if (!c.waiting) return;
  c.waiting = false;
  waiting_.erase({c.key, c.id});
  set_deadline(c, std::nullopt);
}

void TcpStoreServer::wake_waiting(const std::string& key, const std::string& value) {
  for (auto first = waiting_.lower_bound({key, 0}); first != waiting_.end() && first->first == key;
       first = waiting_.lower_bound({key, 0})) {
    Connection& c = *connections_.at(first->second);
    stop_waiting(c);
    reply(c, StoreProtocol::kYes, value);
    flush(c);  // the rest and errors are handled when the socket is writable
  }
}

bool TcpStoreServer::proceed(Connection& c, std::uint32_t events) {
  if ((events & EPOLLOUT) != 0 && !flush(c)) return false;
  return (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) == 0 || receive(c);
}

bool TcpStoreServer::receive(Connection& c) {
  using Next = ClientSession::Next;
  std::array<char, 16384> bytes;
  for (;;) {
    const std::size_t most =
        c.session.introduced() ? bytes.size() : ClientSession::kMaxHelloFrame + 5;
    const ssize_t n = ::recv(c.fd.get(), bytes.data(), most, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    if (n == 0 || c.waiting) return false;  // closed, or a second request before the answer
    switch (c.session.take({bytes.data(), static_cast<std::size_t>(n)}, c.out)) {
      case Next::Wait:
        if (!c.out.empty() && !flush(c)) return false;
        continue;
      case Next::Joined:
        return join(c) && flush(c);
      case Next::Request:
        return handle(c, c.session.take_request()) && flush(c);
      case Next::Refuse:
        refused_.fetch_add(1);
        flush(c);
        return false;
      case Next::Close:
        refused_.fetch_add(1);
        return false;
    }
  }
}

bool TcpStoreServer::join(Connection& c) {
  leave_strangers(c);
  set_deadline(c, std::nullopt);
  // Beyond the limit the client is disconnected without an answer and may retry.
  return static_cast<std::size_t>(clients_.fetch_add(1)) < options_.max_connections;
}

bool TcpStoreServer::handle(Connection& c, std::string_view body) {
  using P = StoreProtocol;
  Message m;
  if (!Message::decode(body, m)) return false;
  const std::size_t count = m.fields.size();
  if (m.type == P::kSet && count == 2) {
    bool taken = false;
    {
      const std::lock_guard lock(values_mutex_);
      taken = !values_.set(m.fields[0], m.fields[1]);
    }
    reply(c, taken ? P::kNo : P::kYes, {});
    if (!taken) wake_waiting(m.fields[0], m.fields[1]);
    return true;
  }
  if (m.type == P::kHas && count == 1) {
    reply(c, find(m.fields[0]) ? P::kYes : P::kNo, {});
    return true;
  }
  if (m.type == P::kBeat && count == 2) {
    int rank = 0;
    auto state = RankState::decode(m.fields[1]);
    if (!state || !parse_number(m.fields[0], rank) || rank < 0) return false;
    c.beats = rank;
    beats_.beat(rank, *std::move(state), c.id);
    reply(c, P::kYes, {});
    return true;
  }
  if (m.type == P::kLeave && count == 2) {
    int readers = 0;
    if (!parse_number(m.fields[1], readers) || readers < 1) return false;
    {
      const std::lock_guard lock(values_mutex_);
      values_.leave(m.fields[0], readers);
    }
    reply(c, P::kYes, {});
    return true;
  }
  if (m.type != P::kGet || count != 2) return false;
  if (auto found = find(m.fields[0])) {
    reply(c, P::kYes, *std::move(found));
    return true;
  }
  std::int64_t milliseconds = 0;
  if (!parse_number(m.fields[1], milliseconds) || milliseconds < 0) return false;
  start_waiting(
      c, m.fields[0],
      Clock::now() + std::chrono::milliseconds(std::min<std::int64_t>(milliseconds, 86'400'000)));
  return true;
}

void TcpStoreServer::reply(Connection& c, std::uint8_t status, std::string value) {
  c.out += Message{status, {std::move(value)}}.encode();
}

bool TcpStoreServer::flush(Connection& c) {
  while (!c.out.empty()) {
    const ssize_t n = ::send(c.fd.get(), c.out.data(), c.out.size(), MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK) return false;
    if (n < 0) break;
    c.out.erase(0, static_cast<std::size_t>(n));
  }
  // Read more from a client only after the whole answer has been sent.
  if (c.reads == c.out.empty()) return true;
  c.reads = c.out.empty();
  return watch(events_.get(), EPOLL_CTL_MOD, c.fd.get(), c.id, c.reads ? EPOLLIN : EPOLLOUT);
}

}  // namespace tessera::comm
