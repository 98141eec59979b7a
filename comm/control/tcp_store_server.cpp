#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>

#include "comm/control/tcp_store.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::size_t kMaxHelloFrame = 1024;

template <typename Int>
bool parse(std::string_view text, Int& value) {
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  return result.ec == std::errc() && result.ptr == text.data() + text.size();
}

}  // namespace

struct TcpStoreServer::Connection {
  FileDescriptor fd;
  std::string in, out;
  bool introduced = false;
  bool waiting = false;  // in a get whose key is not there yet
  std::string key;
  Clock::time_point deadline;  // of the get, or of the introduction
};

TcpStoreServer::TcpStoreServer(TcpStoreServerOptions options)
    : options_(std::move(options)),
      listener_(listen_on(options_.host, options_.port, 256)),
      wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      port_(bound_port(listener_.get())),
      thread_([this] { serve(); }) {}

TcpStoreServer::~TcpStoreServer() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof(one));
  thread_.join();
}

void TcpStoreServer::drain(std::chrono::milliseconds timeout) const {
  const auto end = Clock::now() + timeout;
  while (clients() > 0 && Clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

int TcpStoreServer::next_timeout() const {
  int timeout = 60'000;
  for (const Connection& c : connections_) {
    if (c.waiting || !c.introduced) timeout = std::min(timeout, milliseconds_until(c.deadline));
  }
  return timeout;
}

void TcpStoreServer::serve() {
  std::vector<pollfd> polled;
  for (;;) {
    polled.assign({{wake_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}});
    for (const Connection& c : connections_) {
      // A client that does not read its answer is not read either: one frame is the limit.
      polled.push_back({c.fd.get(), static_cast<short>(c.out.empty() ? POLLIN : POLLOUT), 0});
    }
    if (::poll(polled.data(), polled.size(), next_timeout()) < 0 && errno != EINTR) return;
    if (polled[0].revents != 0) return;

    const auto now = Clock::now();
    std::size_t i = 2;
    for (auto c = connections_.begin(); c != connections_.end(); ++i) {
      const auto events = polled[i].revents;
      bool keep = true;
      if ((events & POLLOUT) != 0) keep = flush(*c);
      if (keep && (events & (POLLIN | POLLHUP | POLLERR)) != 0) keep = receive(*c);
      if (keep && !c->introduced && c->deadline <= now) keep = false;
      if (keep && c->waiting && c->deadline <= now) {
        c->waiting = false;
        reply(*c, StoreProtocol::kNo, {});
        keep = flush(*c);
      }
      if (!keep && c->introduced) clients_.fetch_sub(1);
      c = keep ? std::next(c) : connections_.erase(c);
    }
    if (polled[1].revents != 0) accept_all();
  }
}

void TcpStoreServer::accept_all() {
  for (;;) {
    FileDescriptor fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd) return;  // none left, or out of descriptors: the others go on
    if (connections_.size() >= options_.max_connections) {
      const auto stranger = std::find_if(connections_.begin(), connections_.end(),
                                         [](const Connection& c) { return !c.introduced; });
      if (stranger == connections_.end()) continue;
      connections_.erase(stranger);
    }
    keep_alive(fd.get());
    Connection& added = connections_.emplace_back();
    added.fd = std::move(fd);
    added.deadline = Clock::now() + options_.hello_timeout;
  }
}

bool TcpStoreServer::receive(Connection& c) {
  char bytes[16384];
  for (;;) {
    const ssize_t n = ::recv(c.fd.get(), bytes, sizeof(bytes), 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    if (n == 0 || c.waiting) return false;  // gone, or talks before it was answered
    c.in.append(bytes, static_cast<std::size_t>(n));
    const std::size_t size = frame_size(c.in);
    if (size > 4 + (c.introduced ? kMaxFrame : kMaxHelloFrame)) return false;
    if (size == 0 || c.in.size() < size) continue;
    if (c.in.size() > size) return false;
    const std::string frame = std::exchange(c.in, {});
    return handle(c, std::string_view(frame).substr(4)) && flush(c);
  }
}

bool TcpStoreServer::handle(Connection& c, std::string_view body) {
  using P = StoreProtocol;
  Message m;
  if (!Message::decode(body, m)) return false;
  const std::size_t count = m.fields.size();
  if (!c.introduced) {
    if (m.type != P::kHello || count != 2 || m.fields[0] != P::kMagic) return false;
    c.introduced = m.fields[1] == options_.run_id;
    if (c.introduced) clients_.fetch_add(1);
    reply(c, c.introduced ? P::kYes : P::kNo, {});
    return true;  // a stranger is closed once its time to introduce itself is over
  }
  if (m.type == P::kSet && count == 2) {
    const bool taken = !values_.set(m.fields[0], m.fields[1]);
    size_.store(values_.size());
    reply(c, taken ? P::kNo : P::kYes, {});
    if (taken) return true;
    for (Connection& other : connections_) {
      if (!other.waiting || other.key != m.fields[0]) continue;
      other.waiting = false;
      reply(other, P::kYes, m.fields[1]);
      flush(other);  // what does not go now goes when the socket takes it; errors show there
    }
    return true;
  }
  if (m.type == P::kHas && count == 1) {
    reply(c, values_.find(m.fields[0]) != nullptr ? P::kYes : P::kNo, {});
    return true;
  }
  if (m.type == P::kLeave && count == 2) {
    int readers = 0;
    if (!parse(m.fields[1], readers) || readers < 1) return false;
    values_.leave(m.fields[0], readers);
    size_.store(values_.size());
    reply(c, P::kYes, {});
    return true;
  }
  if (m.type != P::kGet || count != 2) return false;
  if (const std::string* const found = values_.find(m.fields[0])) {
    reply(c, P::kYes, *found);
    return true;
  }
  std::int64_t milliseconds = 0;
  if (!parse(m.fields[1], milliseconds) || milliseconds < 0) return false;
  c.waiting = true;
  c.key = m.fields[0];
  c.deadline =
      Clock::now() + std::chrono::milliseconds(std::min<std::int64_t>(milliseconds, 86'400'000));
  return true;
}

void TcpStoreServer::reply(Connection& c, std::uint8_t status, std::string value) {
  Message answer;
  answer.type = status;
  answer.fields.push_back(std::move(value));
  c.out += answer.encode();
}

bool TcpStoreServer::flush(Connection& c) {
  while (!c.out.empty()) {
    const ssize_t n = ::send(c.fd.get(), c.out.data(), c.out.size(), MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    c.out.erase(0, static_cast<std::size_t>(n));
  }
  return true;
}

}  // namespace tessera::comm
