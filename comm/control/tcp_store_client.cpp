#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <optional>

#include "comm/collective.h"
#include "comm/control/authentication.h"
#include "comm/control/tcp_store.h"
#include "comm/control/withheld_time.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using P = StoreProtocol;

constexpr milliseconds kReplyTick{100};
constexpr milliseconds kRetryPause{20};
constexpr milliseconds kAttempt{1000};
// Time to retry while the server drops connections, because too many strangers connect.
constexpr milliseconds kDropped{3000};
// Time limit of a call after give_up().
constexpr milliseconds kLastTry{500};
// Pause between look-ups of a host name.
constexpr milliseconds kResolvePause{200};

// End of a call: at the deadline, or once `given_up` is set.
struct CallEnd {
  Deadline deadline;
  const std::atomic<bool>* given_up = nullptr;
};

// @return false if the call must end. Excludes time in which this process could not run.
bool wait_for(int fd, short events, CallEnd& end) {
  Deadline& deadline = end.deadline;
  WithheldTime withheld(kReplyTick);
  for (;;) {
    deadline += withheld.look(Clock::now());
    if (end.given_up != nullptr && *end.given_up) return false;
    const int left = milliseconds_until(deadline);
    pollfd waiting{fd, events, 0};
    const int ready = ::poll(&waiting, 1, std::min(left, static_cast<int>(kReplyTick.count())));
    if (ready > 0) return true;
    if ((ready == 0 && left == 0) || (ready < 0 && errno != EINTR)) return false;
  }
}

// Sends a request and returns the answer; nothing if the connection broke, the answer is malformed
// or the deadline passed. Discard the connection then.
std::optional<Message> round_trip(const FileDescriptor& connection, std::string_view request,
                                  CallEnd end) {
  const int fd = connection.get();
  while (!request.empty()) {
    const ssize_t n = ::send(fd, request.data(), request.size(), MSG_NOSIGNAL);
    if (n >= 0) {
      request.remove_prefix(static_cast<std::size_t>(n));
    } else if (errno != EINTR) {
      if (errno != EAGAIN || !wait_for(fd, POLLOUT, end)) return std::nullopt;
    }
  }
  std::string in;
  char bytes[16384];
  for (;;) {
    const ssize_t n = ::recv(fd, bytes, sizeof(bytes), 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      if (errno != EAGAIN || !wait_for(fd, POLLIN, end)) return std::nullopt;
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

struct Attempt {
  FileDescriptor connection;
  bool refused = false;    // the server has another run or token
  bool unproven = false;   // the server does not know our token
  bool dropped = false;    // the server closed the connection without an answer
  std::string unresolved;  // why the host has no address
};

// Returns the last answer of the handshake.
std::optional<Message> shake_hands(const FileDescriptor& connection, const StoreSecrets& secrets,
                                   bool& unproven, Deadline deadline) {
  const bool has_token = !secrets.token.empty();
  const std::string nonce = has_token ? make_nonce() : std::string();
  auto answer = round_trip(
      connection, Message{P::kHello, {std::string(P::kMagic), secrets.run_id, nonce}}.encode(),
      {deadline});
  if (!answer || !has_token || answer->type == P::kNo) return answer;
  const std::string challenge = answer->fields[0];
  unproven = answer->type != P::kChallenge || challenge.size() != kNonceBytes;
  if (unproven) return answer;
  const auto proof = [&](ProofRole role) {
    return make_proof(secrets.token, role, secrets.run_id, nonce, challenge);
  };
  answer =
      round_trip(connection, Message{P::kProve, {proof(ProofRole::Client)}}.encode(), {deadline});
  if (!answer || answer->type == P::kNo) return answer;
  unproven = !is_same_secret(answer->fields[0], proof(ProofRole::Server));
  return answer;
}

Attempt introduce(const std::string& host, std::uint16_t port, const StoreSecrets& secrets,
                  Deadline deadline) {
  Attempt attempt;
  FileDescriptor connection;
  try {
    connection = connect_to(host, port, deadline);
  } catch (const CommError& error) {
    attempt.unresolved = error.what();
  }
  if (!connection) return attempt;
  const auto answer = shake_hands(connection, secrets, attempt.unproven, deadline);
  attempt.dropped = !answer && Clock::now() < deadline;
  if (!answer || attempt.unproven) return attempt;
  attempt.refused = answer->type != P::kYes;
  if (!attempt.refused) attempt.connection = std::move(connection);
  return attempt;
}

}  // namespace

TcpStore::TcpStore(std::string host, std::uint16_t port, std::string run_id,
                   milliseconds connect_deadline, int ports, std::string token, StoreHost served_by)
    : host_(std::move(host)),
      port_(port),
      secrets_{std::move(run_id), std::move(token)},
      served_by_(std::move(served_by)) {
  const auto end = Clock::now() + connect_deadline;
  bool is_refused = false, is_unproven = false;
  std::string unresolved;
  do {
    for (int i = 0; i < ports; ++i) {
      port_ = static_cast<std::uint16_t>(port + i);
      Attempt attempt = introduce(host_, port_, secrets_, std::min(end, Clock::now() + kAttempt));
      if (attempt.connection) {
        idle_.push_back(std::move(attempt.connection));
        return;
      }
      is_refused = is_refused || attempt.refused;
      is_unproven = is_unproven || attempt.unproven;
      unresolved = std::move(attempt.unresolved);
      if (!unresolved.empty()) break;
    }
    if ((is_refused || is_unproven) && ports == 1) break;
    std::this_thread::sleep_for(unresolved.empty() ? kRetryPause : kResolvePause);
  } while (Clock::now() < end);
  port_ = port;
  if (is_refused || is_unproven) throw refused(!is_refused);
  throw CommError(CommFailure::Timeout, {},
                  "no store answered at {} within {}{}{}; is the launcher (or rank 0) running, and "
                  "is the address right?",
                  where(), format_seconds(connect_deadline), unresolved.empty() ? "" : ": ",
                  unresolved);
}

TcpStore::~TcpStore() = default;

std::string TcpStore::where() const { return fmt::format("{}:{}", host_, port_); }

CommError TcpStore::refused(bool by_us) const {
  if (by_us) {
    return CommError(CommFailure::Mismatch, {},
                     "the store at {} does not know this run's token, so this process did not "
                     "join it; set the same TESSERA_TOKEN on all ranks, or on none",
                     where());
  }
  return CommError(
      CommFailure::Mismatch, {},
      "the store at {} refused this process: it serves another run than '{}', or {}; end a "
      "leftover process of an earlier run, choose another port, or set the same TESSERA_TOKEN on "
      "all ranks",
      where(), secrets_.run_id,
      secrets_.token.empty() ? "requires a token, which is not set here" : "has another token");
}

CommError TcpStore::lost(std::string_view what) const {
  CommError error(
      CommFailure::PeerLost, served_by_.ranks,
      "the store at {} did not answer ({}); {}, which serves it, ended or is stopped, or the "
      "network to it is cut",
      where(), what, served_by_.name);
  return error.set_fate(kNoAnswer);
}

FileDescriptor TcpStore::connect(Deadline deadline) const {
  const auto end = std::min(deadline, Clock::now() + kDropped);
  for (;;) {
    Attempt attempt = introduce(host_, port_, secrets_, std::min(end, Clock::now() + kAttempt));
    if (!attempt.dropped || given_up_ || Clock::now() + kRetryPause >= end) {
      return std::move(attempt.connection);
    }
    std::this_thread::sleep_for(kRetryPause);
  }
}

Message TcpStore::call(const Message& message, milliseconds deadline) {
  const std::string frame = message.encode();
  const bool is_last_try = given_up_;
  const auto end = Clock::now() + (is_last_try ? std::min(deadline, kLastTry) : deadline);
  const CallEnd call_end{end, is_last_try ? nullptr : &given_up_};
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
  if (!reused) connection = connect(end);
  if (!connection) throw lost(key);
  std::optional<Message> answer = round_trip(connection, frame, call_end);
  // A firewall may have dropped the idle connection: retry. Only leave is not idempotent.
  if (!answer && reused && message.type != P::kLeave && Clock::now() < end &&
      (is_last_try || !given_up_)) {
    connection = {};  // close it first, because the server limits connections
    connection = connect(end);
    if (connection) answer = round_trip(connection, frame, call_end);
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
  const Message answer = call({P::kSet, {key, std::string(value)}}, answer_time_);
  require(answer.type == P::kYes, "store key '{}' already has another value; keys are written once",
          key);
}

std::string TcpStore::get(const std::string& key, milliseconds deadline) {
  Message answer =
      call({P::kGet, {key, std::to_string(std::max<std::int64_t>(0, deadline.count()))}},
           deadline + answer_time_);
  if (answer.type != P::kYes) {
    throw CommError(CommFailure::Timeout, {}, "store key '{}' was not set within {}", key,
                    format_seconds(deadline));
  }
  return std::move(answer.fields[0]);
}

bool TcpStore::has(const std::string& key) {
  return call({P::kHas, {key}}, answer_time_).type == P::kYes;
}

void TcpStore::leave(const std::string& name, int readers) {
  call({P::kLeave, {name, std::to_string(readers)}}, answer_time_);
}

void TcpStore::beat(int rank, const RankState& state) {
  call({P::kBeat, {std::to_string(rank), state.encode()}}, answer_time_);
}

std::shared_ptr<Store> TcpStore::separate(milliseconds answer_time) const {
  auto store = std::make_shared<TcpStore>(host_, port_, secrets_.run_id, answer_time, 1,
                                          secrets_.token, served_by_);
  store->answer_time_ = answer_time;
  return store;
}

}  // namespace tessera::comm
