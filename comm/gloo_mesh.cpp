#include "comm/gloo_mesh.h"

#include <gloo/rendezvous/context.h>
#include <gloo/transport/tcp/device.h>
#include <pthread.h>

#include <csignal>

namespace tessera::comm {
namespace {

// How often the watcher looks; a deadline is met to within this.
constexpr std::chrono::milliseconds kTick{20};
// Gloo's timeout of a single wait, which our deadline must always precede.
constexpr std::chrono::hours kNever{24};

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
    const std::string value = store_.get(prefix_ + key, remaining());
    return {value.begin(), value.end()};
  }
  void wait(const std::vector<std::string>& keys) override {
    for (const std::string& key : keys) store_.get(prefix_ + key, remaining());
  }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds&) override {
    wait(keys);
  }

 private:
  std::chrono::milliseconds remaining() const {
    const auto left = deadline_ - std::chrono::steady_clock::now();
    return std::max(std::chrono::milliseconds(1),
                    std::chrono::duration_cast<std::chrono::milliseconds>(left));
  }
  comm::Store& store_;
  const std::string prefix_;
  const std::chrono::steady_clock::time_point deadline_;
};

}  // namespace

GlooMesh::GlooMesh(Store& store, int rank, int world_size, const GlooOptions& options)
    : rank_(rank), world_size_(world_size) {
  // Gloo's thread writes without MSG_NOSIGNAL: it must inherit a mask that blocks SIGPIPE.
  sigset_t pipe, before;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &pipe, &before);
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
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw CommError(CommFailure::Timeout, {},
                    "rank {} of {} could not connect to all others from {} within {:g} s: {}", rank,
                    world_size, options.address,
                    std::chrono::duration<double>(options.connect_timeout).count(), error.what());
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  watcher_ = std::thread([this] { watch(); });
}

GlooMesh::~GlooMesh() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stop_changed_.notify_all();
  watcher_.join();
}

std::unique_ptr<GlooMesh::Buffer> GlooMesh::buffer(void* data, std::size_t bytes) {
  return context_->createUnboundBuffer(data, bytes);
}

void GlooMesh::set_deadline(Clock::time_point deadline) {
  const std::lock_guard lock(mutex_);
  deadline_ = deadline;
}

GlooMesh::Wait GlooMesh::wait(Buffer& buffer, bool receive, int count) {
  while (count > 0) {
    {
      const std::lock_guard lock(mutex_);
      if (interrupted_) return Wait::Interrupted;
      waiting_ = &buffer;
      receiving_ = receive;
    }
    bool lost = false, done = false;
    try {
      done = receive ? buffer.waitRecv() : buffer.waitSend();
    } catch (const ::gloo::Exception&) {
      lost = true;
    }
    const std::lock_guard lock(mutex_);
    waiting_ = nullptr;
    if (lost) return Wait::Lost;
    if (done) {
      --count;
    } else if (interrupted_) {
      return Wait::Interrupted;
    } else if (Clock::now() >= deadline_) {
      return Wait::Late;
    }  // else: a leftover of a wait that completed as it was ended
  }
  return Wait::Done;
}

void GlooMesh::end_wait_locked() {
  if (waiting_ == nullptr) return;
  if (receiving_) {
    waiting_->abortWaitRecv();
  } else {
    waiting_->abortWaitSend();
  }
}

void GlooMesh::watch() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    stop_changed_.wait_for(lock, kTick);
    if (Clock::now() >= deadline_) end_wait_locked();
  }
}

void GlooMesh::interrupt() noexcept {
  const std::lock_guard lock(mutex_);
  interrupted_ = true;
  end_wait_locked();
}

std::vector<int> GlooMesh::lost_peers() {
  // A connection that failed throws on any further use.
  std::vector<int> lost;
  std::byte nothing{};
  const auto probe = buffer(&nothing, sizeof(nothing));
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    try {
      probe->recv(peer, ~std::uint64_t{0}, 0, sizeof(nothing));
    } catch (const ::gloo::Exception&) {
      lost.push_back(peer);
    }
  }
  return lost;
}

void GlooMesh::close() noexcept { context_.reset(); }

}  // namespace tessera::comm
