#include "comm/gloo_mesh.h"

#include <gloo/rendezvous/context.h>
#include <gloo/transport/tcp/device.h>
#include <pthread.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>

namespace tessera::comm {
namespace {

// How often the watcher looks; a deadline is met to within this.
constexpr std::chrono::milliseconds kTick{20};
// Gloo's timeout of a single wait, which our deadline must always precede.
constexpr std::chrono::hours kNever{24};
constexpr std::uint64_t kCanarySlot = ~std::uint64_t{0};

// Gloo's view of our store, for the exchange of addresses.
class StoreAdaptor final : public ::gloo::rendezvous::Store {
 public:
  StoreAdaptor(comm::Store& store, std::string prefix, std::chrono::milliseconds timeout)
      : store_(store),
        prefix_(std::move(prefix)),
        deadline_(std::chrono::steady_clock::now() + timeout) {}

  void set(const std::string& key, const std::vector<char>& data) override {
    store_.set(prefix_ + key, std::string_view(data.data(), data.size()));
  }
  std::vector<char> get(const std::string& key) override {
    const std::string value = fetch(key);
    return {value.begin(), value.end()};
  }
  void wait(const std::vector<std::string>& keys) override {
    for (const std::string& key : keys) fetch(key);
  }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds&) override {
    wait(keys);
  }

 private:
  // Gloo's key is the rank whose addresses it waits for.
  std::string fetch(const std::string& rank) {
    const auto left = deadline_ - std::chrono::steady_clock::now();
    try {
      return store_.get(prefix_ + rank,
                        std::max(std::chrono::milliseconds(1),
                                 std::chrono::duration_cast<std::chrono::milliseconds>(left)));
    } catch (const CommError& error) {
      if (error.failure() != CommFailure::Timeout) throw;
      throw CommError(CommFailure::Timeout, {std::atoi(rank.c_str())},
                      "rank {} did not say where it listens within the time to connect; it may "
                      "have ended after the rendezvous",
                      rank);
    }
  }
  comm::Store& store_;
  const std::string prefix_;
  const std::chrono::steady_clock::time_point deadline_;
};

// Blocks SIGPIPE for a scope.
class PipeSignalBlock {
 public:
  PipeSignalBlock() {
    sigset_t pipe;
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe, &before_);
  }
  ~PipeSignalBlock() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  PipeSignalBlock(const PipeSignalBlock&) = delete;
  PipeSignalBlock& operator=(const PipeSignalBlock&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

GlooMesh::GlooMesh(Store& store, int rank, int world_size, const GlooOptions& options)
    : rank_(rank),
      world_size_(static_cast<std::size_t>(world_size)),
      canaries_(world_size_),
      owing_(world_size_),
      lost_(world_size_) {
  // Gloo's thread writes without MSG_NOSIGNAL: it must inherit a mask that blocks SIGPIPE.
  const PipeSignalBlock block;
  try {
    ::gloo::transport::tcp::attr attr(options.address.c_str());
    auto device = ::gloo::transport::tcp::CreateDevice(attr);
    auto context = std::make_shared<::gloo::rendezvous::Context>(rank, world_size);
    context->setTimeout(options.connect_timeout);
    StoreAdaptor adaptor(store, options.name + "/address/", options.connect_timeout);
    context->connectFullMesh(adaptor, device);
    context->setTimeout(std::chrono::duration_cast<std::chrono::milliseconds>(kNever));
    context_ = std::move(context);
  } catch (const ::gloo::Exception& error) {
    throw CommError(CommFailure::Timeout, {},
                    "rank {} of {} could not connect to all others from {} within {:g} s: {}", rank,
                    world_size, options.address,
                    std::chrono::duration<double>(options.connect_timeout).count(), error.what());
  }
  for (int peer = 0; peer < world_size; ++peer) {
    if (peer == rank_) continue;
    // Nothing is ever written there, so any memory will do.
    canaries_[static_cast<std::size_t>(peer)] = receive(peer, kCanarySlot, this, 1).buffer;
  }
  watcher_ = std::thread([this] { watch(); });
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

void GlooMesh::set_deadline(Clock::time_point deadline) {
  const std::lock_guard lock(mutex_);
  deadline_ = deadline;
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
    if (transfer.receiving ? transfer.buffer->waitRecv() : transfer.buffer->waitSend()) {
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
    int ended = 0;  // how often its wait was ended for a reason of its own
  };
  std::vector<Pending> pending;
  for (const Transfer& t : transfers) {
    if (!t.buffer) return {Outcome::Lost, {t.peer}};
    pending.push_back({&t});
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
      canaries_[peer]->waitRecv();
    } catch (const ::gloo::Exception&) {
      lost_[peer] = true;
    }
  }
}

void GlooMesh::watch() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    stop_changed_.wait_for(lock, kTick);
    if (waiting_ == nullptr) continue;
    look_for_lost_peers_locked();
    bool end = Clock::now() >= deadline_;
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
