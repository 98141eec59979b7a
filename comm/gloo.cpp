#include "comm/gloo.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "comm/control/agreement.h"
#include "comm/failure_report.h"
#include "comm/gloo_mesh.h"
#include "comm/host_memory.h"
#include "comm/pipe_signal_block.h"
#include "comm/reduce.h"

namespace tessera::comm {
namespace {

// What a rank sends to all others in every collective. Contributions that fit travel inside, so a
// barrier or the sum of a scalar is one message to each peer.
struct Header {
  Signature signature;
  std::array<std::byte, 192> payload;
};
static_assert(std::is_trivially_copyable_v<Header> && sizeof(Header) == 256);

// all_reduce up to this size sends everything to everybody: one exchange instead of two.
constexpr std::size_t kDirectAllReduce = 32 * 1024;

// Slot of a collective's data. It depends on the whole signature, so that ranks that disagree never
// receive each other's data: Gloo ends the process when sizes differ.
std::uint64_t data_slot(const Signature& signature, int phase) {
  std::uint64_t hash = 14695981039346656037ULL;  // FNV-1a
  std::array<unsigned char, sizeof(Signature)> bytes;
  std::memcpy(bytes.data(), &signature, sizeof(Signature));
  for (const unsigned char byte : bytes) hash = (hash ^ byte) * 1099511628211ULL;
  return ((hash + static_cast<std::uint64_t>(phase)) >> 1) | (1ULL << 62);
}

class GlooBackend final : public CollectiveBackend {
 public:
  GlooBackend(const std::shared_ptr<Store>& store, int rank, int world_size,
              const GlooOptions& options)
      : options_(options),
        rank_(rank),
        world_(world_size),
        report_(store, options.communicator.ends_run ? kVerdict : options.name + "/failure",
                world_size, options.processes),
        headers_(static_cast<std::size_t>(world_size)) {
    try {
      mesh_ = std::make_unique<GlooMesh>(*store, rank, world_size, options);
    } catch (const GlooMesh::Unreachable& error) {
      throw report_.verdict(unreachable(*store, error, error.they_end));
    }
    const PipeSignalBlock block;
    post_headers(0);
  }

  int rank() const override { return rank_; }
  int world_size() const override { return world_; }
  std::string_view name() const override { return "gloo"; }

  void run(const Collective& c) override {
    const PipeSignalBlock block;
    const auto now = GlooMesh::Clock::now();
    mesh_->set_deadline(now + c.deadline, now + c.deadline, [](const auto&) {});
    try {
      run_checked(c);
      post_headers(c.sequence + 1);
    } catch (const CommError& error) {
      throw report_.verdict(error);
    }
  }

  void interrupt(const CommError& reason) noexcept override {
    report_.set_interruption(reason);
    mesh_->interrupt();
  }

  void close(const CommError* reason) noexcept override {
    if (reason != nullptr) report_.verdict(*reason);
    incoming_.clear();
    mesh_->close();
  }

 private:
  void run_checked(const Collective& c) {
    const std::size_t total = c.bytes();
    const std::size_t part = total / static_cast<std::size_t>(world_);
    auto* data = static_cast<std::byte*>(c.out);
    switch (c.kind) {
      case CollectiveKind::Barrier:
        exchange_headers(c, nullptr, 0);
        return;
      case CollectiveKind::AllGather: {
        const std::byte* mine = data + part * index(rank_);
        if (part <= sizeof(Header::payload)) {
          exchange_headers(c, mine, part);
          for_peers([&](int r) { copy(data + part * index(r), payload(r), part); });
        } else {
          Phase phase(*this, c, 0, data, data);
          for_peers([&](int r) { phase.receive(r, part * index(r), part); });
          for_peers([&](int r) { phase.send(r, part * index(rank_), part); });
          exchange_headers(c, nullptr, 0);
          phase.finish();
        }
        return;
      }
      case CollectiveKind::ReduceScatter:
        return reduce_scatter(c);
      case CollectiveKind::AllReduce:
        return all_reduce(c);
      case CollectiveKind::Broadcast: {
        const bool root = c.root == rank_;
        if (total <= sizeof(Header::payload)) {
          exchange_headers(c, data, root ? total : 0);
          if (!root) copy(data, payload(c.root), total);
        } else {
          Phase phase(*this, c, 0, data, data);
          if (root) {
            for_peers([&](int r) { phase.send(r, 0, total); });
          } else {
            phase.receive(c.root, 0, total);
          }
          exchange_headers(c, nullptr, 0);
          phase.finish();
        }
        return;
      }
    }
  }

  void reduce_scatter(const Collective& c) {
    const std::size_t part = c.bytes() / static_cast<std::size_t>(world_);
    std::byte* staging = stage(part * index(world_ - 1));
    const auto place = [&](int r) { return part * index(r < rank_ ? r : r - 1); };
    Phase phase(*this, c, 0, staging, c.in);
    for_peers([&](int r) { phase.receive(r, place(r), part); });
    for_peers([&](int r) { phase.send(r, part * index(r), part); });
    exchange_headers(c, nullptr, 0);
    phase.finish();
    const std::byte* mine = static_cast<const std::byte*>(c.in) + part * index(rank_);
    sum_parts_f32(parts([&](int r) { return r == rank_ ? mine : staging + place(r); }), c.dtype,
                  static_cast<float*>(c.out), c.count / world_);
  }

  void all_reduce(const Collective& c) {
    const std::size_t total = c.bytes();
    auto* data = static_cast<std::byte*>(c.out);
    if (total <= sizeof(Header::payload)) {
      exchange_headers(c, data, total);
      reduce_parts(parts([&](int r) { return r == rank_ ? data : payload(r); }), c.dtype, c.op,
                   data, c.count);
      return;
    }
    if (total <= kDirectAllReduce) {
      std::byte* staging = stage(total * index(world_ - 1));
      const auto place = [&](int r) { return total * index(r < rank_ ? r : r - 1); };
      Phase phase(*this, c, 0, staging, data);
      for_peers([&](int r) { phase.receive(r, place(r), total); });
      for_peers([&](int r) { phase.send(r, 0, total); });
      exchange_headers(c, nullptr, 0);
      phase.finish();
      reduce_parts(parts([&](int r) { return r == rank_ ? data : staging + place(r); }), c.dtype,
                   c.op, data, c.count);
      return;
    }
    // Each rank reduces its stretch of the elements, then all gather the stretches.
    const auto begin = [&](int r) {
      return static_cast<std::size_t>(c.count * r / world_) * dtype_size(c.dtype);
    };
    const auto length = [&](int r) { return begin(r + 1) - begin(r); };
    const std::size_t mine = length(rank_);
    std::byte* staging = stage(mine * index(world_ - 1));
    const auto place = [&](int r) { return mine * index(r < rank_ ? r : r - 1); };
    Phase scatter(*this, c, 0, staging, data);
    for_peers([&](int r) { scatter.receive(r, place(r), mine); });
    for_peers([&](int r) { scatter.send(r, begin(r), length(r)); });
    exchange_headers(c, nullptr, 0);
    scatter.finish();
    std::byte* own = data + begin(rank_);
    reduce_parts(parts([&](int r) { return r == rank_ ? own : staging + place(r); }), c.dtype, c.op,
                 own, static_cast<std::int64_t>(mine / dtype_size(c.dtype)));
    Phase gather(*this, c, 1, data, data);
    for_peers([&](int r) { gather.receive(r, begin(r), length(r)); });
    for_peers([&](int r) { gather.send(r, begin(rank_), mine); });
    gather.finish();
  }

  // The data of one collective that is under way at once.
  class Phase {
   public:
    Phase(GlooBackend& backend, const Collective& c, int number, void* in, const void* out)
        : backend_(backend),
          collective_(c),
          slot_(data_slot(Signature(c), number)),
          in_(static_cast<std::byte*>(in)),
          out_(static_cast<const std::byte*>(out)) {}
    void receive(int peer, std::size_t offset, std::size_t bytes) {
      if (bytes == 0) return;
      transfers_.push_back(backend_.mesh_->receive(peer, slot_, in_ + offset, bytes));
    }
    void send(int peer, std::size_t offset, std::size_t bytes) {
      if (bytes == 0) return;
      transfers_.push_back(backend_.mesh_->send(peer, slot_, out_ + offset, bytes));
    }
    void finish() {
      const GlooMesh::Result result = backend_.mesh_->wait(transfers_);
      if (result.outcome == GlooMesh::Outcome::Late) {
        throw backend_.late(collective_, result.peers, true);
      }
      backend_.check(collective_, result);
    }

   private:
    GlooBackend& backend_;
    const Collective& collective_;
    const std::uint64_t slot_;
    std::byte* const in_;
    const std::byte* const out_;
    std::vector<GlooMesh::Transfer> transfers_;
  };

  template <typename F>
  void for_peers(F&& f) const {
    for (int r = 0; r < world_; ++r) {
      if (r != rank_) f(r);
    }
  }
  template <typename F>
  std::vector<const void*> parts(F&& f) const {
    std::vector<const void*> result;
    for (int r = 0; r < world_; ++r) result.push_back(f(r));
    return result;
  }
  static std::size_t index(int r) { return static_cast<std::size_t>(r); }
  const std::byte* payload(int r) const { return headers_[index(r)].payload.data(); }
  static void copy(void* to, const void* from, std::size_t bytes) {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }

  // Asks for the next collective's headers. Only when all data of the last one is here: a peer that
  // closes as we ask resets the connection, and unread data with it.
  void post_headers(std::uint64_t sequence) {
    incoming_.clear();
    for_peers([&](int r) {
      incoming_.push_back(mesh_->receive(r, sequence, &headers_[index(r)], sizeof(Header)));
    });
  }

  void exchange_headers(const Collective& c, const std::byte* payload, std::size_t bytes) {
    header_.signature = Signature(c);
    copy(header_.payload.data(), payload, bytes);
    std::vector<GlooMesh::Transfer> outgoing;
    for_peers(
        [&](int r) { outgoing.push_back(mesh_->send(r, c.sequence, &header_, sizeof(Header))); });
    check(c, mesh_->wait(incoming_));
    check(c, mesh_->wait(outgoing));
    headers_[index(rank_)].signature = header_.signature;
    std::vector<Signature> signatures;
    for (const Header& header : headers_) signatures.push_back(header.signature);
    if (const auto mismatch = find_mismatch(signatures)) throw CommError(*mismatch);
  }

  // Not all data came in time. @param arrived  but all ranks did come
  CommError late(const Collective& c, const std::vector<int>& owing, bool arrived) {
    return arrived ? report_.stuck(c, owing, "is it stopped, or the network to it cut?")
                   : report_.missing(c, owing);
  }

  // A rank that ended or is stopped can't be reached, either: its verdict comes first.
  CommError unreachable(Store& store, const CommError& error,
                        GlooMesh::Clock::time_point they_end) {
    const auto end = std::max(they_end, GlooMesh::Clock::now() + options_.watched_within);
    while (options_.communicator.ends_run && GlooMesh::Clock::now() < end) {
      if (const auto verdict = find_verdict(store, std::chrono::milliseconds(100))) return *verdict;
    }
    return error;
  }

  void check(const Collective& c, const GlooMesh::Result& result) {
    switch (result.outcome) {
      case GlooMesh::Outcome::Done:
        return;
      case GlooMesh::Outcome::Lost:
        throw report_.lost(c, result.peers);
      case GlooMesh::Outcome::Late:
        throw late(c, result.peers, false);
      case GlooMesh::Outcome::Interrupted:
        throw report_.interruption();
    }
  }

  std::byte* stage(std::size_t bytes) {
    if (bytes <= staging_bytes_) return staging_;
    staging_ = nullptr;
    staging_bytes_ = 0;
    if (options_.communicator.context) {
      booked_.reset();
      booked_ = std::make_unique<HostMemory>(options_.communicator.context, bytes, "gloo staging");
      staging_ = booked_->data();
    } else {
      unbooked_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
      staging_ = unbooked_.get();
    }
    staging_bytes_ = bytes;
    return staging_;
  }

  const GlooOptions options_;
  const int rank_, world_;
  FailureReport report_;
  std::unique_ptr<GlooMesh> mesh_;
  Header header_{};
  std::vector<Header> headers_;
  std::vector<GlooMesh::Transfer> incoming_;  // the next collective's headers
  std::unique_ptr<HostMemory> booked_;
  std::unique_ptr<std::byte[]> unbooked_;
  std::byte* staging_ = nullptr;
  std::size_t staging_bytes_ = 0;
};

}  // namespace

std::unique_ptr<Communicator> make_gloo_communicator(const std::shared_ptr<Store>& store, int rank,
                                                     int world_size, const GlooOptions& options) {
  require(store != nullptr && world_size >= 2 && rank >= 0 && rank < world_size,
          "gloo needs a store and a rank of a group of two or more, got rank {} of {}", rank,
          world_size);
  return std::make_unique<QueuedCommunicator>(
      std::make_unique<GlooBackend>(store, rank, world_size, options),
      options.communicator.timeout);
}

}  // namespace tessera::comm
