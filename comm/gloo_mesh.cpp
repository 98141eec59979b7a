#include "comm/gloo_mesh.h"

#include <fmt/format.h>
#include <gloo/common/error.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/address.h>
#include <gloo/transport/tcp/device.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <system_error>

#include "comm/collective.h"
#include "comm/control/agreement.h"
#include "comm/control/socket.h"
#include "comm/pipe_signal_block.h"

namespace tessera::comm {
namespace {

// How often the watcher looks.
constexpr std::chrono::milliseconds kTick{20};
// The same when one transfer after the other is asked, twice, whether it is done: a deadline is met
// to within this for each.
constexpr std::chrono::milliseconds kFastTick{2};
// Gloo's timeout of a single wait, which our deadline must always precede.
constexpr std::chrono::milliseconds kNever = std::chrono::hours(24);
// Gloo waits so many times a pair's timeout for its connection.
constexpr int kConnectTimeouts = 5;
constexpr std::size_t kConnectAtOnce = 64;
constexpr std::uint64_t kCanarySlot = ~std::uint64_t{0};

std::vector<int> ranks_of(const std::vector<bool>& set) {
  std::vector<int> ranks;
  for (std::size_t r = 0; r < set.size(); ++r) {
    if (set[r]) ranks.push_back(static_cast<int>(r));
  }
  return ranks;
}

}  // namespace

GlooMesh::GlooMesh(Store& store, int rank, int world_size, const GlooOptions& options)
    : rank_(rank),
      world_size_(static_cast<std::size_t>(world_size)),
      address_(options.address),
      canaries_(world_size_),
      owing_(world_size_),
      lost_(world_size_) {
  if (!has_address(options.address)) {  // Gloo would not look
    throw CommError(
        CommFailure::Aborted, std::vector<int>{rank},
        "rank {}: its host's name, {}, has no address, so the other ranks can't connect "
        "to it; add the name to /etc/hosts or to the name server",
        rank, options.address);
  }
  const PipeSignalBlock block;
  connect(store, options);
  for (const int peer : peers()) {
    // Nothing is ever written there, so any memory will do.
    canaries_[index(peer)] = receive(peer, kCanarySlot, this, 1).buffer;
  }
  try {
    watcher_ = std::thread([this] { watch(); });
  } catch (const std::system_error& error) {
    throw CommError(CommFailure::Aborted, std::vector<int>{rank_},
                    "rank {} can't begin a thread: {}; is there a limit of processes (ulimit -u)?",
                    rank_, error.what());
  }
}

std::string GlooMesh::Invitation::encode() const {
  return fmt::format("{} {}", patience.count(), address);
}

GlooMesh::Invitation GlooMesh::Invitation::decode(const std::string& text) {
  const std::size_t space = std::min(text.find(' '), text.size());
  std::int64_t ms = 0;
  std::from_chars(text.data(), text.data() + space, ms);
  return {std::chrono::milliseconds(ms), text.substr(std::min(space + 1, text.size()))};
}

// Each rank tells each other one on what address it expects it, and how long it will.
void GlooMesh::connect(Store& store, const GlooOptions& options) {
  const auto began = Clock::now();
  const auto half = options.connect_timeout / 2;
  std::vector<std::string> mine;
  std::shared_ptr<::gloo::transport::Context> context = listen(options, mine);
  const std::string prefix = options.name + "/address";
  const auto key = [&](int of, int towards) {
    return fmt::format("{}/{}/{}", prefix, of, towards);
  };
  for (const int peer : peers())
    store.set(key(rank_, peer), Invitation{half, mine[index(peer)]}.encode());
  // All addresses first: a rank that waits for one of them connects to nobody.
  std::vector<Invitation> invitations(world_size_);
  for (const int peer : peers()) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(began + half - Clock::now());
    const auto limit = std::max(std::chrono::milliseconds(1), left);
    std::string text;
    try {
      text = options.communicator.ends_run ? get_or_verdict(store, key(peer, rank_), limit)
                                           : store.get(key(peer, rank_), limit);
    } catch (const CommError& error) {
      if (error.failure() != CommFailure::Timeout || !error.culprits().empty()) throw;
      throw CommError(CommFailure::Timeout, {peer},
                      "rank {} did not say where it listens within {}; it may have ended after the "
                      "rendezvous",
                      peer, format_seconds(half));
    }
    invitations[index(peer)] = Invitation::decode(text);
    check_address(peer, mine[index(peer)], invitations[index(peer)].address);
  }
  const auto met = Clock::now();
  const std::vector<Attempt> attempts = connect_all(*context, invitations, began + 2 * half);
  std::vector<int> unreached, untried;
  auto they_end = met;
  for (const int peer : peers()) {
    const Attempt& attempt = attempts[index(peer)];
    if (attempt.problem.find(std::generic_category().message(EMFILE)) != std::string::npos) {
      throw CommError(CommFailure::Aborted, std::vector<int>{rank_}, "{}",
                      cannot_listen(options, attempt.problem));
    }
    if (!attempt.is_made) untried.push_back(peer);
    if (attempt.problem.empty()) continue;
    unreached.push_back(peer);
    they_end = std::max(they_end, met + invitations[index(peer)].patience);
  }
  const auto took = std::chrono::ceil<std::chrono::milliseconds>(Clock::now() - began);
  if (!unreached.empty()) {
    Unreachable unreachable(CommFailure::Timeout, unreached,
                            "rank {} could not connect to {} from {} within {}: {}", rank_,
                            rank_list(unreached), options.address, format_seconds(took),
                            attempts[index(unreached.front())].problem);
    unreachable.connections = std::move(context);
    unreachable.they_end = they_end;
    throw unreachable;
  }
  if (!untried.empty()) {
    throw CommError(CommFailure::Timeout, std::vector<int>{rank_},
                    "rank {} came to connect to {} only after {}, which is too late", rank_,
                    rank_list(untried), format_seconds(took));
  }
  store.leave(prefix, static_cast<int>(world_size_));
  context->setTimeout(kNever);
  context_ = std::move(context);
}

// Makes a pair for each peer. @param addresses  where it expects each of them, by rank
std::shared_ptr<::gloo::transport::Context> GlooMesh::listen(
    const GlooOptions& options, std::vector<std::string>& addresses) const {
  addresses.resize(world_size_);
  try {  // not all that Gloo throws is its own Exception
    ::gloo::transport::tcp::attr attr(options.address.c_str());
    const int world = static_cast<int>(world_size_);
    auto context = ::gloo::transport::tcp::CreateDevice(attr)->createContext(rank_, world);
    context->setTimeout(std::max(options.connect_timeout / 2 / kConnectTimeouts, kTick));
    for (const int peer : peers()) {
      auto& pair = context->createPair(peer);
      pair->setLocalRank(0);
      const std::vector<char> address = pair->address().bytes();
      addresses[index(peer)].assign(address.begin(), address.end());
    }
    return context;
  } catch (const std::exception& error) {
    throw CommError(CommFailure::Aborted, std::vector<int>{rank_}, "{}",
                    cannot_listen(options, error.what()));
  }
}

std::string GlooMesh::cannot_listen(const GlooOptions& options, std::string_view why) const {
  return fmt::format(
      "rank {} can't listen on {} for the other ranks, which takes {} sockets (ulimit -n): {}",
      rank_, options.address, world_size_, why);
}

// @param mine  where this rank expects that peer
void GlooMesh::check_address(int peer, const std::string& mine, const std::string& theirs) const {
  if (theirs.size() != mine.size()) {
    throw CommError(CommFailure::Mismatch, {peer},
                    "rank {} tells an address of {} bytes instead of {}; is it the same build?",
                    peer, theirs.size(), mine.size());
  }
  const ::gloo::transport::tcp::Address a(std::vector<char>(mine.begin(), mine.end()));
  const ::gloo::transport::tcp::Address b(std::vector<char>(theirs.begin(), theirs.end()));
  const auto family = [](const auto& address) {
    return address.getSockaddr().ss_family == AF_INET6 ? "IPv6" : "IPv4";
  };
  if (a.getSockaddr().ss_family == b.getSockaddr().ss_family) return;
  throw CommError(CommFailure::Mismatch, {std::min(rank_, peer), std::max(rank_, peer)},
                  "rank {} listens on an {} address ({}) and rank {} on an {} one; give the run's "
                  "address (MASTER_ADDR) in the family that all hosts have",
                  rank_, family(a), address_, peer, family(b));
}

// Connects to many at once, so that one that can't be reached holds up few others. All ranks go in
// the same order, so of two that the others wait for, each is at the other's turn.
std::vector<GlooMesh::Attempt> GlooMesh::connect_all(::gloo::transport::Context& context,
                                                     const std::vector<Invitation>& invitations,
                                                     Clock::time_point end) const {
  std::vector<Attempt> attempts(world_size_);
  const std::vector<int> order = peers();
  std::atomic<std::size_t> next = 0;
  const auto work = [&] {
    for (std::size_t i; (i = next++) < order.size();) {
      if (Clock::now() >= end) return;
      Attempt& attempt = attempts[index(order[i])];
      attempt.is_made = true;
      const std::string& address = invitations[index(order[i])].address;
      try {
        context.getPair(order[i])->connect({address.begin(), address.end()});
      } catch (const std::exception& error) {
        attempt.problem = error.what();
      }
    }
  };
  std::vector<std::jthread> threads;
  try {
    while (threads.size() + 1 < std::min(order.size(), kConnectAtOnce)) threads.emplace_back(work);
  } catch (const std::system_error&) {  // no more of them: fewer do
  }
  work();
  threads.clear();  // joins
  return attempts;
}

std::vector<int> GlooMesh::peers() const {
  std::vector<int> all;
  for (int r = 0; r < static_cast<int>(world_size_); ++r) {
    if (r != rank_) all.push_back(r);
  }
  return all;
}

GlooMesh::~GlooMesh() { close(); }

GlooMesh::Transfer GlooMesh::receive(int peer, std::uint64_t slot, void* data, std::size_t bytes) {
  Transfer transfer{peer, true, context_->createUnboundBuffer(data, bytes)};
  try {
    transfer.buffer->recv(peer, slot, 0, bytes);
  } catch (const ::gloo::Exception&) {
    transfer.buffer.reset();
  }
  return transfer;
}

GlooMesh::Transfer GlooMesh::send(int peer, std::uint64_t slot, const void* data,
                                  std::size_t bytes) {
  Transfer transfer{peer, false, context_->createUnboundBuffer(const_cast<void*>(data), bytes)};
  try {
    transfer.buffer->send(peer, slot, 0, bytes);
  } catch (const ::gloo::Exception&) {
    transfer.buffer.reset();
  }
  return transfer;
}

void GlooMesh::set_deadline(Clock::time_point overdue, Clock::time_point deadline,
                            std::function<void(const std::vector<int>&)> on_overdue) {
  const std::lock_guard lock(mutex_);
  overdue_ = overdue_at_ = overdue;
  deadline_ = deadline;
  on_overdue_ = std::move(on_overdue);
}

bool GlooMesh::is_overdue() {
  const std::lock_guard lock(mutex_);
  return Clock::now() >= overdue_;
}

void GlooMesh::tell_overdue(const std::vector<int>& owing) {
  {
    const std::lock_guard lock(mutex_);
    overdue_ = Clock::time_point::max();
  }
  on_overdue_(owing);
}

std::vector<bool> GlooMesh::lost_peers() {
  const std::lock_guard lock(mutex_);
  return lost_;
}

GlooMesh::Step GlooMesh::wait_once(const Transfer& transfer, const std::vector<bool>& owing) {
  {
    const std::lock_guard lock(mutex_);
    if (interrupted_) return Step::Interrupted;
    owing_ = owing;
    waiting_ = transfer.buffer.get();
    receiving_ = transfer.receiving;
  }
  Step step = Step::Ended;
  try {
    if (transfer.receiving ? transfer.buffer->waitRecv(kNever)
                           : transfer.buffer->waitSend(kNever)) {
      step = Step::Done;
    }
  } catch (const ::gloo::Exception&) {
    step = Step::Lost;
  }
  const std::lock_guard lock(mutex_);
  waiting_ = nullptr;
  return step == Step::Ended && interrupted_ ? Step::Interrupted : step;
}

GlooMesh::Result GlooMesh::wait(const std::vector<Transfer>& transfers) {
  struct Pending {
    const Transfer* transfer;
    int ended = 0;    // how often its wait was ended for a reason of its own
    int overdue = 0;  // how often because all waits are overdue
  };
  std::vector<Pending> pending;
  for (const Transfer& t : transfers) {
    if (!t.buffer) return {Outcome::Lost, {t.peer}};
    pending.push_back({&t});
  }
  {
    const std::lock_guard lock(mutex_);
    overdue_ = overdue_at_;
  }
  std::vector<int> late;
  while (!pending.empty()) {
    // Those of lost peers first: if they are done, the peer may go.
    const std::vector<bool> lost = lost_peers();
    const auto is_lost = [&](const Pending& p) {
      return lost[static_cast<std::size_t>(p.transfer->peer)];
    };
    auto next = std::find_if(pending.begin(), pending.end(), is_lost);
    if (next == pending.end()) next = pending.begin();
    const int peer = next->transfer->peer;
    std::vector<bool> owing(world_size_);
    for (const Pending& p : pending) owing[static_cast<std::size_t>(p.transfer->peer)] = true;

    switch (wait_once(*next->transfer, owing)) {
      case Step::Done:
        pending.erase(next);
        continue;
      case Step::Interrupted:
        return {Outcome::Interrupted, {}};
      case Step::Lost:
        return {Outcome::Lost, {peer}};
      case Step::Ended:
        break;
    }
    // A wait may be ended just as its transfer completes; a second time it is not there.
    const bool expired = Clock::now() >= deadline_;
    if ((is_lost(*next) || expired) && ++next->ended == 2) {
      if (is_lost(*next)) return {Outcome::Lost, {peer}};
      late.push_back(peer);
      pending.erase(next);
    } else if (!expired && is_overdue()) {
      ++next->overdue;
      std::rotate(next, next + 1, pending.end());  // each is asked, in turn
      if (std::all_of(pending.begin(), pending.end(),
                      [](const Pending& p) { return p.overdue >= 2; }))
        tell_overdue(ranks_of(owing));
    }
  }
  if (late.empty()) return {};
  std::sort(late.begin(), late.end());
  late.erase(std::unique(late.begin(), late.end()), late.end());
  return {Outcome::Late, late};
}

void GlooMesh::end_wait_locked() {
  if (waiting_ == nullptr) return;
  if (receiving_) {
    waiting_->abortWaitRecv();
  } else {
    waiting_->abortWaitSend();
  }
}

void GlooMesh::look_for_lost_peers_locked() {
  for (std::size_t peer = 0; peer < world_size_; ++peer) {
    if (!canaries_[peer] || lost_[peer]) continue;
    try {
      canaries_[peer]->abortWaitRecv();  // so that the next line only looks
      canaries_[peer]->waitRecv(kNever);
    } catch (const ::gloo::Exception&) {
      lost_[peer] = true;
    }
  }
}

void GlooMesh::watch() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    stop_changed_.wait_for(lock, Clock::now() < std::min(overdue_, deadline_) ? kTick : kFastTick);
    if (waiting_ == nullptr) continue;
    look_for_lost_peers_locked();
    bool end = Clock::now() >= std::min(overdue_, deadline_);
    for (std::size_t peer = 0; peer < world_size_; ++peer)
      end = end || (owing_[peer] && lost_[peer]);
    if (end) end_wait_locked();
  }
}

void GlooMesh::interrupt() noexcept {
  const std::lock_guard lock(mutex_);
  interrupted_ = true;
  end_wait_locked();
}

void GlooMesh::close() noexcept {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stop_changed_.notify_all();
  if (watcher_.joinable()) watcher_.join();
  canaries_.clear();
  context_.reset();
}

}  // namespace tessera::comm
