#include "comm/tcp.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <functional>
#include <span>
#include <utility>

#include "comm/process_backend.h"
#include "comm/reduce.h"
#include "comm/tcp_mesh.h"
#include "core/base/storage.h"

namespace tessera::comm {
namespace {

// Sent by every rank to every other at the start of a collective. Small data travels in the
// payload, so that a barrier or a scalar sum takes one message per peer.
struct Header {
  Signature signature;
  std::array<std::byte, 192> payload;
};
static_assert(std::is_trivially_copyable_v<Header> && sizeof(Header) == 256);

// Sequence number of the header that announces a clean exit.
constexpr std::uint64_t kGoodbye = ~std::uint64_t{0};

// Up to this size, all_reduce sends all elements to all ranks: one exchange instead of two.
constexpr std::size_t kDirectTcpAllReduce = 32 * 1024;
// Bytes per peer that a reduction receives before summing.
constexpr std::size_t kPiece = 256 * 1024;
constexpr std::chrono::milliseconds kPollTick{100};
// Time to send the goodbye header to slow peers.
constexpr std::chrono::milliseconds kGoodbyeTime{1000};

class TcpBackend final : public ProcessBackend {
 public:
  TcpBackend(const std::shared_ptr<Store>& store, int rank, int world_size,
             const TcpOptions& options)
      : ProcessBackend(store, rank, world_size, options),
        options_(options),
        store_(store),
        context_(options.communicator.context),
        wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
        peers_(index(world_size)) {
    auto sockets = connect_tcp_mesh(*store, rank, world_size, options);
    for_peers([&](int r) { peers_[index(r)].socket = std::move(sockets[index(r)]); });
  }

  std::string_view name() const override { return "tcp"; }

  std::unique_ptr<CollectiveBackend> connect_subgroup(const Membership& subgroup,
                                                      int rank) override {
    TcpOptions options = options_;
    options.enter(subgroup);
    return std::make_unique<TcpBackend>(store_, rank,
                                        static_cast<int>(subgroup.group->ranks.size()), options);
  }

  void close(const CommError* reason) noexcept override {
    if (reason != nullptr) {
      report_.verdict(*reason);
    } else {
      say_goodbye();
    }
    for (Peer& peer : peers_) peer.socket = FileDescriptor();
  }

 private:
  void wake() noexcept override {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto n = ::write(wake_.get(), &one, sizeof(one));
  }

  struct Peer {
    FileDescriptor socket;
    Header header;  // of the running collective
    std::size_t header_bytes = 0;
    std::span<std::byte> in;                      // payload still to receive
    std::vector<std::span<const std::byte>> out;  // data still to send, in order
    bool has_left = false;
    bool is_leaving = false;  // closed, with data to be read before its goodbye

    bool wants() const { return header_bytes < sizeof(Header) || !in.empty(); }
  };

  void run_checked(const Collective& c) override {
    const std::size_t total = c.bytes();
    const std::size_t part = total / index(world_);
    auto* data = static_cast<std::byte*>(c.out);
    switch (c.kind) {
      case CollectiveKind::Barrier:
        exchange_headers({}, {});
        return finish();
      case CollectiveKind::AllGather:
        return all_gather(data, part);
      case CollectiveKind::ReduceScatter: {
        const auto* in = static_cast<const std::byte*>(c.in);
        exchange_headers({}, [&](int r) { return std::span(in + part * index(r), part); });
        const std::size_t size = dtype_size(c.dtype);
        reduce(in + part * index(rank_), part, [&](const auto& parts, std::size_t at, auto bytes) {
          sum_parts_f32(parts, c.dtype, static_cast<float*>(c.out) + at / size,
                        static_cast<std::int64_t>(bytes / size));
        });
        return finish();
      }
      case CollectiveKind::AllReduce:
        return all_reduce(c);
      case CollectiveKind::Broadcast: {
        const std::span<std::byte> all(data, total);
        const bool is_root = c.root == rank_;
        if (total <= sizeof(Header::payload)) {
          exchange_headers(is_root ? all : std::span<std::byte>(), {});
          if (!is_root) copy(data, payload(c.root), total);
        } else {
          exchange_headers({}, [&](int) { return is_root ? all : std::span<std::byte>(); });
          if (!is_root) receive(c.root, all);
        }
        return finish();
      }
    }
  }

  void all_gather(std::byte* data, std::size_t bytes) {
    const auto part = [&](int r) { return std::span(data + bytes * index(r), bytes); };
    const std::span<std::byte> own = part(rank_);
    if (own.size() <= sizeof(Header::payload)) {
      exchange_headers(own, {});
      for_peers([&](int r) { copy(part(r).data(), payload(r), own.size()); });
    } else {
      exchange_headers({}, [&](int) { return own; });
      for_peers([&](int r) { receive(r, part(r)); });
    }
    finish();
  }

  void all_reduce(const Collective& c) {
    const std::size_t total = c.bytes();
    const std::size_t size = dtype_size(c.dtype);
    auto* data = static_cast<std::byte*>(c.out);
    const auto combine_at = [&](std::byte* to) {
      return [&c, to, size](const auto& parts, std::size_t at, std::size_t bytes) {
        reduce_parts(parts, c.dtype, c.op, to + at, static_cast<std::int64_t>(bytes / size));
      };
    };
    if (total <= sizeof(Header::payload)) {
      exchange_headers({data, total}, {});
      finish();
      return combine_at(data)(parts([&](int r) { return r == rank_ ? data : payload(r); }), 0,
                              total);
    }
    if (total <= kDirectTcpAllReduce) {
      exchange_headers({}, [&](int) { return std::span(data, total); });
      finish();  // all sends are done before `data` is overwritten
      return reduce(data, total, combine_at(data));
    }
    // Each rank reduces its slice of the elements, then all ranks gather the slices.
    const auto begin = [&](int r) { return static_cast<std::size_t>(c.count * r / world_) * size; };
    const auto slice = [&](int r) { return std::span(data + begin(r), begin(r + 1) - begin(r)); };
    exchange_headers({}, slice);
    const std::span<std::byte> own = slice(rank_);
    reduce(own.data(), own.size(), combine_at(own.data()));
    for_peers([&](int r) { send(r, own); });
    // Overwriting slice r is safe, because peer r sends it only after receiving this rank's copy.
    for_peers([&](int r) { receive(r, slice(r)); });
    finish();
  }

  // Sends a header with `payload`, then part(r), to every peer r; returns once all headers have
  // arrived and agree.
  void exchange_headers(std::span<const std::byte> payload,
                        const std::function<std::span<const std::byte>(int)>& part) {
    header_.signature = Signature(*collective_);
    copy(header_.payload.data(), payload.data(), payload.size());
    std::vector<int> gone;
    for_peers([&](int r) {
      if (peers_[index(r)].has_left) gone.push_back(r);
    });
    if (!gone.empty()) throw report_.lost(*collective_, gone);
    for_peers([&](int r) {
      peers_[index(r)].header_bytes = 0;
      peers_[index(r)].out.push_back(std::as_bytes(std::span(&header_, 1)));
      send(r, part ? part(r) : std::span<const std::byte>());
    });
    exchange([](const Peer& p) { return p.header_bytes < sizeof(Header); });
    compare_signatures(
        [&](int r) { return (r == rank_ ? header_ : peers_[index(r)].header).signature; });
  }

  // Receives `bytes` from each peer, at most kPiece at a time, and combines them with `own`.
  // @param combine  called with (data by rank, offset, bytes)
  template <typename Combine>
  void reduce(const std::byte* own, std::size_t bytes, Combine&& combine) {
    const std::size_t step = std::min(bytes, kPiece);
    std::byte* staging = stage(step * index(world_ - 1));
    const auto place = [&](int r) { return staging + step * index(r < rank_ ? r : r - 1); };
    for (std::size_t at = 0; at < bytes; at += step) {
      const std::size_t size = std::min(step, bytes - at);
      for_peers([&](int r) { receive(r, {place(r), size}); });
      exchange([](const Peer& p) { return p.wants(); });
      combine(parts([&](int r) { return r == rank_ ? own + at : place(r); }), at, size);
    }
  }

  void finish() {
    exchange([](const Peer& p) { return p.wants() || !p.out.empty(); });
  }

  void send(int r, std::span<const std::byte> bytes) {
    Peer& peer = peers_[index(r)];
    if (!bytes.empty()) peer.out.push_back(bytes);
    send_some(r, peer);
  }

  void receive(int r, std::span<std::byte> bytes) {
    Peer& peer = peers_[index(r)];
    peer.in = bytes;
    peer.is_leaving = false;  // checked again by the next poll
    receive_some(r, peer);
  }

  // Sends and receives until owes() is false for every peer.
  template <typename Owes>
  void exchange(Owes&& owes) {
    WithheldTime withheld(kPollTick);
    for (;;) {
      check_interruption();
      std::vector<int> owing;
      polls_ = {{wake_.get(), POLLIN, 0}};
      for_peers([&](int r) {
        const Peer& p = peers_[index(r)];
        if (owes(p)) owing.push_back(r);
        const int events = POLLRDHUP | (p.wants() ? POLLIN : 0) | (p.out.empty() ? 0 : POLLOUT);
        const bool is_quiet = p.has_left || (p.is_leaving && !p.wants());
        polls_.push_back({is_quiet ? -1 : p.socket.get(), static_cast<short>(events), 0});
      });
      if (owing.empty()) return;
      const auto now = Clock::now();
      deadline_ += withheld.look(now);
      if (now >= deadline_) {
        std::sort(owing.begin(), owing.end());
        throw late(owing, "is it stopped, or the network to it cut?");
      }
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline_ - now);
      if (::poll(polls_.data(), polls_.size(),
                 static_cast<int>(std::min(left, kPollTick).count())) < 1)
        continue;
      std::size_t at = 0;
      for_peers([&](int r) {
        Peer& peer = peers_[index(r)];
        const int events = polls_[++at].revents;
        if (events == 0) return;
        if ((events & POLLOUT) != 0) send_some(r, peer);
        if (peer.wants()) {
          receive_some(r, peer);
        } else if ((events & (POLLRDHUP | POLLHUP | POLLERR)) != 0) {
          see_it_leave(r, peer);
        }
      });
    }
  }

  void send_some(int r, Peer& peer) {
    while (!peer.out.empty()) {
      std::array<iovec, 2> parts{};
      const std::size_t count = std::min(parts.size(), peer.out.size());
      for (std::size_t i = 0; i < count; ++i) {
        parts[i] = {const_cast<std::byte*>(peer.out[i].data()), peer.out[i].size()};
      }
      msghdr message{};
      message.msg_iov = parts.data();
      message.msg_iovlen = count;
      const ssize_t n = ::sendmsg(peer.socket.get(), &message, MSG_NOSIGNAL);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
      if (n < 0) throw lost(r);
      auto sent = static_cast<std::size_t>(n);
      while (sent > 0) {
        const std::size_t of_first = std::min(sent, peer.out[0].size());
        peer.out[0] = peer.out[0].subspan(of_first);
        if (peer.out[0].empty()) peer.out.erase(peer.out.begin());
        sent -= of_first;
      }
    }
  }

  void receive_some(int r, Peer& peer) {
    while (peer.wants()) {
      const bool is_header = peer.header_bytes < sizeof(Header);
      const std::span<std::byte> to =
          is_header ? std::as_writable_bytes(std::span(&peer.header, 1)).subspan(peer.header_bytes)
                    : peer.in;
      const ssize_t n = ::recv(peer.socket.get(), to.data(), to.size(), 0);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
      if (n <= 0) throw lost(r);
      const auto received = static_cast<std::size_t>(n);
      if (is_header) {
        peer.header_bytes += received;
        if (!peer.wants() && peer.header.signature.sequence == kGoodbye) throw lost(r);
      } else {
        peer.in = peer.in.subspan(received);
      }
      if (received < to.size()) return;  // no more available now
    }
  }

  // Handles a connection closed by a peer from which nothing is wanted now. Throws if the peer is
  // lost.
  void see_it_leave(int r, Peer& peer) {
    Header last;
    const ssize_t n = ::recv(peer.socket.get(), &last, sizeof(last), MSG_PEEK);
    if (n <= 0 || !peer.out.empty()) throw lost(r);
    peer.has_left = n == sizeof(last) && last.signature.sequence == kGoodbye;
    peer.is_leaving = !peer.has_left;
  }

  CommError lost(int r) const { return report_.lost(*collective_, std::array{r}); }

  // Called after the last collective, when no other data is queued.
  void say_goodbye() noexcept {
    const auto end = Clock::now() + kGoodbyeTime;
    header_ = {};
    header_.signature.sequence = kGoodbye;
    for_peers([&](int r) {
      const int socket = peers_[index(r)].socket.get();
      std::span<const std::byte> left = std::as_bytes(std::span(&header_, 1));
      while (!left.empty()) {
        const ssize_t n = ::send(socket, left.data(), left.size(), MSG_NOSIGNAL);
        if (n > 0) left = left.subspan(static_cast<std::size_t>(n));
        pollfd room{socket, POLLOUT, 0};
        if (n < 0 && (errno != EAGAIN || ::poll(&room, 1, milliseconds_until(end)) < 1)) return;
      }
    });
  }

  const std::byte* payload(int r) const { return peers_[index(r)].header.payload.data(); }

  std::byte* stage(std::size_t bytes) {
    if (!staging_ || staging_->bytes() < bytes) {
      staging_.reset();  // first, to make room
      // Without context_, use a new context: a shared one would keep the former buffer for reuse.
      staging_ = Storage::allocate_on_host(context_ ? context_ : Context::create(), bytes,
                                           MemoryCategory::Communication, "tcp staging");
    }
    return static_cast<std::byte*>(staging_->data());
  }

  const TcpOptions options_;
  const std::shared_ptr<Store> store_;
  const std::shared_ptr<Context> context_;  // may be null
  const FileDescriptor wake_;
  // Used by the queue's thread only.
  std::vector<Peer> peers_;  // by rank
  std::vector<pollfd> polls_;
  Header header_{};
  std::shared_ptr<Storage> staging_;
};

}  // namespace

std::unique_ptr<Communicator> make_tcp_communicator(const std::shared_ptr<Store>& store, int rank,
                                                    int world_size, const TcpOptions& options) {
  return std::make_unique<QueuedCommunicator>(
      std::make_unique<TcpBackend>(store, rank, world_size, options), options.communicator.timeout,
      options.membership);
}

std::size_t tcp_staging_bytes(const Collective& c, int rank, int world_size) {
  std::size_t bytes = 0;  // that are combined at a time
  if (c.kind == CollectiveKind::ReduceScatter) {
    bytes = c.bytes() / static_cast<std::size_t>(world_size);
  } else if (c.kind == CollectiveKind::AllReduce && c.bytes() > sizeof(Header::payload)) {
    bytes = c.bytes();
    if (bytes > kDirectTcpAllReduce)
      bytes = static_cast<std::size_t>(c.count * (rank + 1) / world_size -
                                       c.count * rank / world_size) *
              dtype_size(c.dtype);
  }
  return std::min(bytes, kPiece) * static_cast<std::size_t>(world_size - 1);
}

}  // namespace tessera::comm
