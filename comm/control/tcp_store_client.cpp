#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <optional>

#include "comm/collective.h"
#include "comm/control/tcp_store.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using P = StoreProtocol;

// The server answers at once but for get, whose own deadline it watches; this is on top.
constexpr milliseconds kAnswerTime{5000};
constexpr milliseconds kRetryPause{20};
constexpr milliseconds kAttempt{1000};
// A name server is asked less often than a port.
constexpr milliseconds kResolvePause{200};

bool wait_for(int fd, short events, Deadline deadline) {
  for (;;) {
    pollfd waiting{fd, events, 0};
    const int ready = ::poll(&waiting, 1, milliseconds_until(deadline));
    if (ready >= 0) return ready > 0;
    if (errno != EINTR) return false;
  }
}

// One request and its answer; nothing if the connection broke or the deadline passed.
std::optional<Message> round_trip(int fd, std::string_view request, Deadline deadline) {
  while (!request.empty()) {
    const ssize_t n = ::send(fd, request.data(), request.size(), MSG_NOSIGNAL);
    if (n >= 0) {
      request.remove_prefix(static_cast<std::size_t>(n));
    } else if (errno != EINTR) {
      if (errno != EAGAIN || !wait_for(fd, POLLOUT, deadline)) return std::nullopt;
    }
  }
  std::string in;
  char bytes[16384];
  for (;;) {
    const ssize_t n = ::recv(fd, bytes, sizeof(bytes), 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      if (errno != EAGAIN || !wait_for(fd, POLLIN, deadline)) return std::nullopt;
      continue;
    }
    if (n == 0) return std::nullopt;
    in.append(bytes, static_cast<std::size_t>(n));
    const std::size_t size = frame_size(in);
    if (size > 4 + kMaxFrame) return std::nullopt;
    if (size == 0 || in.size() < size) continue;
    Message answer;
    if (!Message::decode(std::string_view(in).substr(4, size - 4), answer)) return std::nullopt;
    if (answer.fields.size() != 1) return std::nullopt;
    return answer;
  }
}

Message request(std::uint8_t type, std::vector<std::string> fields) {
  Message message;
  message.type = type;
  message.fields = std::move(fields);
  return message;
}

struct Attempt {
  FileDescriptor connection;
  bool refused = false;    // it answered, and serves another run
  std::string unresolved;  // why the host has no address
};

Attempt introduce(const std::string& host, std::uint16_t port, const std::string& run_id,
                  Deadline deadline) {
  Attempt attempt;
  FileDescriptor fd;
  try {
    fd = connect_to(host, port, deadline);
  } catch (const CommError& error) {
    attempt.unresolved = error.what();
  }
  if (!fd) return attempt;
  const auto answer =
      round_trip(fd.get(), request(P::kHello, {std::string(P::kMagic), run_id}).encode(), deadline);
  if (!answer) return attempt;
  attempt.refused = answer->type != P::kYes;
  if (!attempt.refused) attempt.connection = std::move(fd);
  return attempt;
}

}  // namespace

TcpStore::TcpStore(std::string host, std::uint16_t port, std::string run_id,
                   milliseconds connect_deadline, int ports)
    : host_(std::move(host)), port_(port), run_id_(std::move(run_id)) {
  const auto end = Clock::now() + connect_deadline;
  bool refused = false;
  std::string unresolved;
  do {
    for (int i = 0; i < ports; ++i) {
      port_ = static_cast<std::uint16_t>(port + i);
      Attempt attempt = introduce(host_, port_, run_id_, std::min(end, Clock::now() + kAttempt));
      if (attempt.connection) {
        idle_.push_back(std::move(attempt.connection));
        return;
      }
      refused = refused || attempt.refused;
      unresolved = std::move(attempt.unresolved);
      if (!unresolved.empty()) break;
    }
    if (refused && ports == 1) break;
    std::this_thread::sleep_for(unresolved.empty() ? kRetryPause : kResolvePause);
  } while (Clock::now() < end);
  port_ = port;
  if (refused) {
    throw CommError(CommFailure::Mismatch, {},
                    "the store at {} serves another run than '{}'; a process of an earlier run may "
                    "still be there: end it, or choose another port",
                    where(), run_id_);
  }
  throw CommError(CommFailure::Timeout, {},
                  "no store answered at {} within {}{}{}; is the launcher (or rank 0) running, and "
                  "is the address right?",
                  where(), format_seconds(connect_deadline), unresolved.empty() ? "" : ": ",
                  unresolved);
}

TcpStore::~TcpStore() = default;

std::string TcpStore::where() const { return fmt::format("{}:{}", host_, port_); }

CommError TcpStore::lost(std::string_view what) const {
  return CommError(
      CommFailure::PeerLost, {},
      "the store at {} did not answer ({}); the launcher (or rank 0), which serves it, "
      "ended or is stopped",
      where(), what);
}

Message TcpStore::call(const Message& message, milliseconds deadline) {
  const std::string frame = message.encode();
  const auto end = Clock::now() + deadline;
  FileDescriptor connection;
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      connection = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  const std::string& key = message.fields[0];
  const bool reused = static_cast<bool>(connection);
  if (!connection) {
    connection =
        introduce(host_, port_, run_id_, std::min(end, Clock::now() + kAttempt)).connection;
  }
  if (!connection) throw lost(key);
  std::optional<Message> answer = round_trip(connection.get(), frame, end);
  // Something on the way may have forgotten a connection that was idle. All but leave may be asked
  // twice.
  if (!answer && reused && message.type != P::kLeave && Clock::now() < end) {
    connection =
        introduce(host_, port_, run_id_, std::min(end, Clock::now() + kAttempt)).connection;
    if (connection) answer = round_trip(connection.get(), frame, end);
  }
  if (!answer) throw lost(key);
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(connection));
  return *answer;
}

void TcpStore::set(const std::string& key, std::string_view value) {
  const std::size_t size = 1 + 4 + key.size() + 4 + value.size();
  require(size <= kMaxFrame,
          "store key '{}': its value of {} bytes makes a message of {}, over the limit of {}; "
          "exchange less at once",
          key, value.size(), size, kMaxFrame);
  const Message answer = call(request(P::kSet, {key, std::string(value)}), kAnswerTime);
  require(answer.type == P::kYes, "store key '{}' is taken by another value; keys are written once",
          key);
}

std::string TcpStore::get(const std::string& key, milliseconds deadline) {
  Message answer =
      call(request(P::kGet, {key, std::to_string(std::max<std::int64_t>(0, deadline.count()))}),
           deadline + kAnswerTime);
  if (answer.type != P::kYes) {
    throw CommError(CommFailure::Timeout, {}, "store key '{}' was not set within {}", key,
                    format_seconds(deadline));
  }
  return std::move(answer.fields[0]);
}

bool TcpStore::has(const std::string& key) {
  return call(request(P::kHas, {key}), kAnswerTime).type == P::kYes;
}

void TcpStore::leave(const std::string& name, int readers) {
  call(request(P::kLeave, {name, std::to_string(readers)}), kAnswerTime);
}

}  // namespace tessera::comm
