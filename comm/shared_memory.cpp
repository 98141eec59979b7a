#include "comm/shared_memory.h"

#include <fmt/format.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <ctime>
#include <utility>

#include "comm/process_backend.h"
#include "comm/reduce.h"
#include "core/base/context.h"
#include "core/base/memory.h"
#include "core/base/processors.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;

// Interval at which a waiting rank checks for lost peers, an interruption, and its deadline.
constexpr std::chrono::milliseconds kFutexTick{20};
// Spin time before sleeping, if each rank can have a core.
constexpr std::chrono::microseconds kSpin{20};
// Up to this size, each rank of an all_reduce reduces all elements: one barrier instead of two.
constexpr std::size_t kDirectAllReduce = 32 * 1024;
constexpr std::size_t kLine = 64;
constexpr std::size_t kPage = 4096;
constexpr int kMostRanks = 1024;

constexpr std::size_t round_up(std::size_t value, std::size_t to) {
  return (value + to - 1) / to * to;
}

using Word = std::atomic<std::uint32_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == 4, "required for a futex");

// Start of the segment, which is zero-initialized. One Entry per rank follows, then one arena of
// two chunks per rank.
struct alignas(kLine) Barrier {
  Word complete;  // number of the last barrier that all ranks reached; waiters sleep on it
  Word sleepers;
};
struct alignas(kLine) Entry {
  Word arrived;                           // number of the last barrier that this rank reached
  Word left;                              // 1: left cleanly; set before the rank releases its lock
  alignas(kLine) Signature signature[2];  // used alternately by collectives
};

struct Layout {
  std::size_t world_size, chunk;
  std::size_t entries() const { return sizeof(Barrier); }
  std::size_t arenas() const { return round_up(entries() + world_size * sizeof(Entry), kPage); }
  std::size_t bytes() const { return arenas() + world_size * 2 * chunk; }
};

Layout layout_of(int world_size, const SharedMemoryOptions& options) {
  const auto world = static_cast<std::size_t>(world_size);
  // At least one cache line per rank.
  return {world, round_up(std::max(options.chunk_bytes, world * kLine), kPage)};
}

// counter >= number, for counters that wrap around.
bool reaches(std::uint32_t counter, std::uint32_t number) {
  return static_cast<std::int32_t>(counter - number) >= 0;
}

void sleep_on(Word& word, std::uint32_t seen, std::chrono::nanoseconds time) {
  timespec spec{};
  spec.tv_sec = static_cast<time_t>(time.count() / 1'000'000'000);
  spec.tv_nsec = static_cast<long>(time.count() % 1'000'000'000);
  ::syscall(SYS_futex, &word, FUTEX_WAIT, seen, &spec, nullptr, 0);
}

void wake_all(Word& word) noexcept {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class SharedMemoryBackend final : public ProcessBackend {
 public:
  SharedMemoryBackend(const std::shared_ptr<Store>& store, int rank, int world_size,
                      SharedSegment segment, const SharedMemoryOptions& options)
      : ProcessBackend(store, rank, world_size, options),
        options_(options),
        store_(store),
        context_(options.communicator.context),
        layout_(layout_of(world_size, options)),
        spins_(world_size <= this_process_processors().shared()),
        segment_(std::move(segment)) {
    require(segment_.bytes() >= layout_.bytes(),
            "a segment of {} bytes is too small for {} ranks with chunks of {}, which need {}",
            segment_.bytes(), world_size, layout_.chunk, layout_.bytes());
    book(1);
  }
  ~SharedMemoryBackend() override { book(-1); }
  SharedMemoryBackend(const SharedMemoryBackend&) = delete;
  SharedMemoryBackend& operator=(const SharedMemoryBackend&) = delete;

  std::string_view name() const override { return "shm"; }

  std::unique_ptr<CollectiveBackend> connect_subgroup(const Membership& subgroup,
                                                      int rank) override {
    SharedMemoryOptions options = options_;
    options.enter(subgroup);
    const int size = static_cast<int>(subgroup.group->ranks.size());
    return std::make_unique<SharedMemoryBackend>(
        store_, rank, size, connect_shared_segment(*store_, rank, size, options), options);
  }

  void close(const CommError* reason) noexcept override {
    if (reason != nullptr) report_.verdict(*reason);
    entry(rank_).left.store(1);
    segment_.let_go(rank_);
    wake_all(barrier().complete);  // wakes peers that wait for this rank
  }

 private:
  void wake() noexcept override { wake_all(barrier().complete); }

  void run_checked(const Collective& c) override {
    const std::size_t total = c.bytes();
    const std::size_t part = total / index(world_);
    auto* data = static_cast<std::byte*>(c.out);
    switch (c.kind) {
      case CollectiveKind::Barrier:
        return in_chunks(
            c, 0, 1, [](std::byte*, Range) {}, [](Range) {});
      case CollectiveKind::AllGather:
        return in_chunks(
            c, part, layout_.chunk,
            [&](std::byte* to, Range x) { copy(to, data + part * index(rank_) + x.begin, x.size); },
            [&](Range x) {
              for_peers([&](int r) { copy(data + part * index(r) + x.begin, chunk(r), x.size); });
            });
      case CollectiveKind::ReduceScatter:
        return reduce_scatter(c, part);
      case CollectiveKind::AllReduce:
        return all_reduce(c);
      case CollectiveKind::Broadcast:
        return in_chunks(
            c, total, layout_.chunk,
            [&](std::byte* to, Range x) {
              if (rank_ == c.root) copy(to, data + x.begin, x.size);
            },
            [&](Range x) {
              if (rank_ != c.root) copy(data + x.begin, chunk(c.root), x.size);
            });
    }
  }

  // A rank's chunk holds one piece for each peer. Each peer sums its pieces without copying them.
  void reduce_scatter(const Collective& c, std::size_t part) {
    const auto* in = static_cast<const std::byte*>(c.in);
    auto* out = static_cast<std::byte*>(c.out);
    const std::size_t size = dtype_size(c.dtype);
    const std::size_t piece = layout_.chunk / index(world_ - 1) / kLine * kLine;
    const auto place = [&](int writer, int reader) {
      return piece * index(reader < writer ? reader : reader - 1);
    };
    in_chunks(
        c, part, piece,
        [&](std::byte* to, Range x) {
          for_peers(
              [&](int r) { copy(to + place(rank_, r), in + part * index(r) + x.begin, x.size); });
        },
        [&](Range x) {
          const std::byte* own = in + part * index(rank_) + x.begin;
          sum_parts_f32(parts([&](int r) { return r == rank_ ? own : chunk(r) + place(r, rank_); }),
                        c.dtype, reinterpret_cast<float*>(out + x.begin / size * sizeof(float)),
                        static_cast<std::int64_t>(x.size / size));
        });
  }

  void all_reduce(const Collective& c) {
    auto* data = static_cast<std::byte*>(c.out);
    const std::size_t size = dtype_size(c.dtype);
    const bool direct = c.bytes() <= std::min(kDirectAllReduce, layout_.chunk);
    const auto write = [&](std::byte* to, Range x) { copy(to, data + x.begin, x.size); };
    const auto read = [&](Range x) {
      std::byte* own = data + x.begin;
      const auto count = static_cast<std::int64_t>(x.size / size);
      if (direct) {
        return reduce_parts(parts([&](int r) { return r == rank_ ? own : chunk(r); }), c.dtype,
                            c.op, own, count);
      }
      // Each rank reduces its slice into its own chunk, where no other rank reads that slice; then
      // every rank copies all slices.
      const auto begin = [&](int r) { return static_cast<std::size_t>(count * r / world_) * size; };
      const std::size_t mine = begin(rank_);
      reduce_parts(parts([&](int r) { return chunk(r) + mine; }), c.dtype, c.op,
                   chunk(rank_) + mine,
                   static_cast<std::int64_t>((begin(rank_ + 1) - mine) / size));
      wait_for_all(c);
      for (int r = 0; r < world_; ++r) {
        copy(own + begin(r), chunk(r) + begin(r), begin(r + 1) - begin(r));
      }
    };
    in_chunks(c, c.bytes(), layout_.chunk, write, read);
  }

  struct Range {
    std::size_t begin = 0, size = 0;  // bytes
  };

  // Moves `bytes` through the arenas, `step` at a time: write() fills this rank's chunk, read()
  // uses the chunks of all ranks.
  //
  // The two chunks of an arena are used alternately. A chunk is overwritten only after the barrier
  // of the next chunk, which each rank reaches after reading this one. Signatures alternate the
  // same way.
  template <typename Write, typename Read>
  void in_chunks(const Collective& c, std::size_t bytes, std::size_t step, Write&& write,
                 Read&& read) {
    const std::size_t turn = collectives_++ % 2;
    entry(rank_).signature[turn] = Signature(c);
    Range range;
    do {
      if (agreed_) check_time(c);
      range.size = std::min(step, bytes - range.begin);
      turn_ = 1 - turn_;
      write(chunk(rank_), range);
      wait_for_all(c);
      if (!agreed_) compare_signatures([&](int r) { return entry(r).signature[turn]; });
      read(range);
      range.begin += range.size;
    } while (range.begin < bytes);
  }

  // Called between chunks, because a barrier that only spins checks no interruption or deadline.
  void check_time(const Collective& c) const {
    check_interruption();
    if (Clock::now() > deadline_) throw report_.stuck(c, {}, "is the machine overloaded?");
  }

  // Waits until all ranks have arrived; their earlier writes are then visible.
  void wait_for_all(const Collective& c) {
    ++number_;
    entry(rank_).arrived.store(number_);
    if (all_arrived()) return announce();
    if (spins_ && spin()) return;
    WithheldTime withheld(kFutexTick);
    for (bool slept = false;; slept = true) {
      deadline_ += withheld.look(Clock::now());
      const std::uint32_t seen = barrier().complete.load();
      if (reaches(seen, number_)) return;
      if (all_arrived()) return announce();  // the last rank may have died before announcing
      check_interruption();
      if (slept) find_lost(c);
      const auto left = deadline_ - Clock::now();
      if (left <= left.zero()) {
        find_late();
        continue;
      }
      barrier().sleepers.fetch_add(1);
      sleep_on(barrier().complete, seen, std::min<Clock::duration>(left, kFutexTick));
      barrier().sleepers.fetch_sub(1);
    }
  }

  bool spin() {
    const auto end = Clock::now() + kSpin;
    do {
      for (int i = 0; i < 16; ++i) {
        if (reaches(barrier().complete.load(std::memory_order_acquire), number_)) return true;
        relax();
      }
    } while (Clock::now() < end);
    return false;
  }

  // Needs sequential consistency. If two ranks arrive last at the same time, at least one sees
  // both; a rank about to sleep is counted in `sleepers`, or sees the new number.
  void announce() {
    Word& complete = barrier().complete;
    std::uint32_t seen = complete.load();
    while (!reaches(seen, number_) && !complete.compare_exchange_weak(seen, number_)) {
    }
    if (barrier().sleepers.load() != 0) wake_all(complete);
  }

  bool has_arrived(int r) const { return reaches(entry(r).arrived.load(), number_); }
  bool all_arrived() const {
    for (int r = 0; r < world_; ++r) {
      if (!has_arrived(r)) return false;
    }
    return true;
  }

  // A dead rank counts as lost even if it arrived. Ranks that left cleanly, perhaps because of a
  // dead one, are blamed only if none is dead.
  void find_lost(const Collective& c) const {
    std::vector<int> dead, left;
    for_peers([&](int r) {
      if (segment_.is_held_elsewhere(r)) return;
      if (entry(r).left.load() == 0) {
        dead.push_back(r);
      } else if (!has_arrived(r)) {
        left.push_back(r);
      }
    });
    // A rank may have arrived and left between the two checks.
    std::erase_if(left, [&](int r) { return has_arrived(r); });
    if (!dead.empty()) throw report_.lost(c, dead);
    if (!left.empty()) throw report_.lost(c, left);
  }

  // Throws unless all ranks have arrived by now.
  void find_late() const {
    std::vector<int> ranks;
    for_peers([&](int r) {
      if (!has_arrived(r)) ranks.push_back(r);
    });
    if (!ranks.empty()) throw late(ranks, "is it stopped?");
  }

  Barrier& barrier() const { return *reinterpret_cast<Barrier*>(segment_.data()); }
  Entry& entry(int r) const {
    return reinterpret_cast<Entry*>(segment_.data() + layout_.entries())[r];
  }
  std::byte* chunk(int r) const {
    return segment_.data() + layout_.arenas() + (2 * index(r) + turn_) * layout_.chunk;
  }

  void book(std::int64_t sign) {
    if (!context_) return;
    MemoryLedger& ledger = context_->host_ledger();
    ledger.book(
        ledger.entry(MemoryCategory::Communication, "shared memory"),
        sign * static_cast<std::int64_t>(shared_memory_share(segment_.bytes(), rank_, world_)));
  }

  const SharedMemoryOptions options_;
  const std::shared_ptr<Store> store_;
  const std::shared_ptr<Context> context_;
  const Layout layout_;
  const bool spins_;
  const SharedSegment segment_;
  // Used by the queue thread only; equal on all ranks at the same barrier.
  std::uint32_t number_ = 0;  // of the last barrier that this rank reached
  std::size_t turn_ = 0, collectives_ = 0;
};

}  // namespace

std::size_t shared_memory_bytes(int world_size, const SharedMemoryOptions& options) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return (layout_of(world_size, options).bytes() + page - 1) / page * page;
}

std::size_t shared_memory_share(std::size_t bytes, int rank, int world_size) {
  const auto world = static_cast<std::size_t>(world_size);
  return bytes / world + (rank == 0 ? bytes % world : 0);
}

SharedSegment connect_shared_segment(Store& store, int rank, int world_size,
                                     const SharedMemoryOptions& options) {
  require(world_size >= 2 && rank >= 0 && rank < world_size,
          "shared memory needs a rank of a group of two or more, got rank {} of {}", rank,
          world_size);
  require<Unsupported>(world_size <= kMostRanks, "shared memory supports at most {} ranks, got {}",
                       kMostRanks, world_size);
  const auto end = Clock::now() + options.connect_timeout;
  const auto left = [&] { return std::max(std::chrono::milliseconds(1), time_until(end)); };
  std::optional<SharedSegment> segment;
  std::string problem, address;
  const auto attempt = [&](const auto& make) {
    try {
      segment.emplace(make());
      segment->hold(rank);
    } catch (const IoError& error) {
      problem = error.what();
    }
  };
  if (rank == 0) {
    attempt([&] { return SharedSegment::create(shared_memory_bytes(world_size, options)); });
    if (problem.empty()) address = segment->address();
  }
  address =
      exchange(store, options.agreement("address"), rank, world_size, address, left()).front();
  if (rank != 0 && !address.empty()) attempt([&] { return SharedSegment::open(address); });
  const std::vector<std::string> problems =
      exchange(store, options.agreement("problem"), rank, world_size, problem, left());
  for (std::size_t r = 0; r < problems.size(); ++r) {
    require<Unsupported>(problems[r].empty(), "rank {} can't share memory with the others: {}",
                         world_rank(options.group(), static_cast<int>(r)), problems[r]);
  }
  return *std::move(segment);
}

std::unique_ptr<Communicator> make_shared_memory_communicator(const std::shared_ptr<Store>& store,
                                                              int rank, int world_size,
                                                              SharedSegment segment,
                                                              const SharedMemoryOptions& options) {
  return std::make_unique<QueuedCommunicator>(
      std::make_unique<SharedMemoryBackend>(store, rank, world_size, std::move(segment), options),
      options.communicator.timeout, options.membership);
}

std::string shared_memory_problem() {
  try {
    SharedSegment first = SharedSegment::create(kPage);
    first.hold(0);
    SharedSegment::open(first.address()).hold(1);
  } catch (const IoError& error) {
    return error.what();
  }
  return {};
}

}  // namespace tessera::comm
