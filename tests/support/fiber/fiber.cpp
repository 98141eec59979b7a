#include "tests/support/fiber/fiber.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <boost/context/fiber.hpp>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "tests/support/fiber/accesses.h"

#if defined(TESSERA_ADDRESS_SANITIZER)
#include <sanitizer/asan_interface.h>
#endif

namespace tessera::fiber {
namespace {

namespace context = boost::context;

constexpr std::size_t kMostThreads = 1024;
constexpr std::size_t kStackBytes = std::size_t{256} << 10;

// Fiber stacks, reused between blocks; the system provides pages as they are touched.
class Stacks {
 public:
  Stacks() {
#if defined(TESSERA_ADDRESS_SANITIZER)
    for (std::size_t i = 0; i < kMostThreads; ++i) __asan_poison_memory_region(get(i), 256);
#endif
  }
  std::byte* get(std::size_t i) const { return memory_.get() + i * kStackBytes; }
  bool hold(const void* address) const { return address >= get(0) && address < get(kMostThreads); }

 private:
  std::unique_ptr<std::byte[]> memory_ =
      std::make_unique_for_overwrite<std::byte[]>(kMostThreads * kStackBytes);
};

struct BorrowedStack {
  using traits_type = context::stack_traits;
  context::stack_context allocate() { return {}; }
  void deallocate(context::stack_context&) {}
};

struct Unwinding {};  // thrown inside a fiber to end it

enum class State { Ready, AtBarrier, AtWarp, Ended };

struct Site {
  const char* file = "";
  int line = 0;
  bool operator==(const Site& other) const {
    return line == other.line && std::strcmp(file, other.file) == 0;
  }
  std::string str() const {
    const char* slash = std::strrchr(file, '/');
    return fmt::format("{}:{}", slash == nullptr ? file : slash + 1, line);
  }
};

struct Copy {
  std::byte* to;
  const std::byte* from;
  std::size_t bytes, filled;
};
using CopyGroup = std::vector<Copy>;

struct Thread {
  context::fiber fiber;
  State state = State::Ready;
  Site site;
  std::uint32_t mask = 0;
  std::uint64_t value = 0;                // passed to the warp operation
  std::array<std::uint64_t, kWarp> seen;  // values that all lanes of the mask passed
  bool orders = false;                    // the warp operation is a memory barrier
  std::uint32_t warp_barrier = 0;         // time of the warp's latest memory barrier
  std::vector<CopyGroup> copies;          // in flight; the last group is not committed yet
  void* fake_stack = nullptr;             // address sanitizer's handle
};

// TESSERA_FIBER_SEED: selects the order of blocks and warps.
unsigned order_seed() {
  const char* seed = std::getenv("TESSERA_FIBER_SEED");  // NOLINT(concurrency-mt-unsafe)
  return seed == nullptr ? 0 : static_cast<unsigned>(std::strtoul(seed, nullptr, 10));
}

Dim dim_of(std::size_t index, const Dim& dim) {
  const auto i = static_cast<unsigned>(index);
  return {i % dim.x, i / dim.x % dim.y, i / dim.x / dim.y};
}

// Per host thread, reused between blocks: in small blocks, allocating memory dominates the run time.
struct Scratch {
  Stacks stacks;
  std::vector<Thread> threads;
  Accesses shared;
  GlobalAccesses global;
  std::uint32_t time = 0;
  std::mt19937 order{order_seed()};

  void begin_grid() {
    if (global.pages() > 1024 || time > std::numeric_limits<std::uint32_t>::max() / 2) {
      shared = {};
      global = {};
      time = 0;
    }
    ++time;
  }
};

Scratch& scratch() {
  thread_local Scratch result;
  return result;
}

class Block;
constinit thread_local Block* current_block = nullptr;

class Block {
 public:
  Block(const char* kernel, Dim grid, Dim block_dim, std::size_t index, std::size_t shared_bytes,
        std::uint32_t grid_time, const std::function<void()>& body)
      : kernel_(kernel),
        place_{{}, dim_of(index, grid), block_dim, grid},
        body_(body),
        shared_bytes_(shared_bytes) {
    threads_.clear();
    threads_.resize(block_dim.count());
    // NaNs as floats, wild values as indices. A new allocation, so that the address sanitizer knows
    // the end.
    shared_ = std::vector<std::uint64_t>((shared_bytes + 15) / 16 * 2, 0xfbfbfbfbfbfbfbfbU);
    scratch_.shared.resize(shared_bytes);
    warps_.resize((threads_.size() + kWarp - 1) / kWarp);
    std::iota(warps_.begin(), warps_.end(), 0);
    now_.grid = grid_time;
    now_.block = now_.block_barrier = ++scratch_.time;
    now_.first_thread = static_cast<std::uint32_t>(index * threads_.size());
    for (std::size_t i = 0; i < threads_.size(); ++i) start(i);
  }

  void run() {
    try {
      run_threads();
    } catch (...) {
      // Unwinds unfinished fibers here: boost's own unwinding is invisible to the address
      // sanitizer.
      unwinding_ = true;
      for (std::size_t i = 0; i < threads_.size(); ++i) {
        if (threads_[i].state != State::Ended) resume(i);
      }
      throw;
    }
  }

  const Place& place() const { return place_; }
  std::size_t running() const { return running_; }
  Thread& thread() { return threads_[running_]; }
  std::byte* shared() { return reinterpret_cast<std::byte*>(shared_.data()); }

  void wait(State state, Site site) {
    Thread& t = thread();
    t.state = state;
    t.site = site;
    yield();
  }

  ModelError error(const std::string& what) const {
    return ModelError(fmt::format("{}, block {}, {}: {} (TESSERA_FIBER_SEED={})", kernel_,
                                  str(place_.block), name(running_), what, order_seed()));
  }
  [[noreturn]] void fail(const std::string& what) const { throw error(what); }

  void check(const void* address, std::size_t bytes, bool write) {
    const auto* begin = static_cast<const std::byte*>(address);
    if (begin < shared() || begin + bytes > shared() + shared_bytes_)
      fail(fmt::format("{} shared memory at byte {}, {} bytes, outside of the {} of the launch",
                       write ? "writes" : "reads", begin - shared(), bytes, shared_bytes_));
    const auto first = static_cast<std::size_t>(begin - shared());
    const auto conflict = scratch_.shared.add<Accesses::Shared>(first, bytes, write, now());
    if (conflict)
      fail(describe(*conflict, write, fmt::format("shared memory at byte {}", conflict->byte)));
  }

  // Keeps the error until the thread waits or ends: compilers expect that it does not throw.
  void note_global(const void* address, std::size_t bytes, bool write) {
    if (scratch_.stacks.hold(address) ||
        (address >= shared() && address < shared() + shared_bytes_))
      return;
    const auto first = reinterpret_cast<std::uintptr_t>(address);
    const auto conflict = scratch_.global.add(first, bytes, write, now());
    if (conflict && !error_)
      error_ = std::make_exception_ptr(
          error(describe(*conflict, write, fmt::format("global memory at {:#x}", conflict->byte))));
  }

 private:
  const Now& now() {
    now_.time = scratch_.time;
    now_.thread = now_.first_thread + static_cast<std::uint32_t>(running_);
    now_.warp_barrier = threads_[running_].warp_barrier;
    return now_;
  }

  std::string describe(const Conflict& conflict, bool write, const std::string& where) const {
    const std::string access = fmt::format("{} {}", write ? "writes" : "reads", where);
    if (conflict.kind == Conflict::Unwritten) return access + ", which nobody wrote";
    const Access& before = conflict.before;
    const std::string other = name(before.thread % threads_.size());
    const char* verb = conflict.kind == Conflict::Read ? "read" : "wrote";
    if (before.time >= now_.block)
      return fmt::format("{}, which {} {} with no barrier between", access, other, verb);
    return fmt::format("{}, which block {}, {} {} in the same launch", access,
                       str(dim_of(before.thread / threads_.size(), place_.grid_dim)), other, verb);
  }

  static std::string str(const Dim& d) { return fmt::format("({}, {}, {})", d.x, d.y, d.z); }
  std::string name(std::size_t thread) const {
    const Dim& d = place_.block_dim;
    return d.y == 1 && d.z == 1 ? fmt::format("thread {}", thread)
                                : "thread " + str(dim_of(thread, d));
  }

  void start(std::size_t i) {
    context::stack_context bounds;
    bounds.size = kStackBytes;
    bounds.sp = stacks_.get(i) + kStackBytes;
    threads_[i].fiber =
        context::fiber(std::allocator_arg, context::preallocated(bounds.sp, bounds.size, bounds),
                       BorrowedStack{}, [this](context::fiber&& back) {
                         back_ = std::move(back);
                         entered();
                         try {
                           if (!unwinding_) body_();
                         } catch (const Unwinding&) {
                         } catch (const context::detail::forced_unwind&) {
                           throw;
                         } catch (...) {
                           if (!error_) error_ = std::current_exception();
                         }
                         thread().state = State::Ended;
                         leaving(true);
                         return std::move(back_);
                       });
  }

  void resume(std::size_t i) {
    running_ = i;
    place_.thread = dim_of(i, place_.block_dim);
    Block* const before = std::exchange(current_block, this);
#if defined(TESSERA_ADDRESS_SANITIZER)
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, stacks_.get(i), kStackBytes);
#endif
    threads_[i].fiber = std::move(threads_[i].fiber).resume();
#if defined(TESSERA_ADDRESS_SANITIZER)
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
    current_block = before;
  }

  void yield() {
    leaving(false);
    context::fiber back = std::move(back_).resume();
    back_ = std::move(back);
    entered();
    if (unwinding_) throw Unwinding{};
  }

  // Tells the address sanitizer which stack is active.
  void entered() {
#if defined(TESSERA_ADDRESS_SANITIZER)
    __sanitizer_finish_switch_fiber(thread().fake_stack, &host_stack_, &host_stack_bytes_);
#endif
  }
  void leaving([[maybe_unused]] bool for_good) {
#if defined(TESSERA_ADDRESS_SANITIZER)
    __sanitizer_start_switch_fiber(for_good ? nullptr : &thread().fake_stack, host_stack_,
                                   host_stack_bytes_);
#endif
  }

  // Between barriers of the block, one warp after the other.
  void run_threads() {
    for (;;) {
      bool progress = false;
      std::shuffle(warps_.begin(), warps_.end(), scratch_.order);
      for (const std::size_t warp : warps_) progress = run_warp(warp * kWarp) || progress;
      meet_in_block();
      if (std::all_of(threads_.begin(), threads_.end(),
                      [](const Thread& t) { return t.state == State::Ended; }))
        return;
      if (!progress) fail_stuck();
    }
  }

  // Runs a warp until none of its lanes can go on. @return whether one did
  bool run_warp(std::size_t first) {
    for (bool progress = false;; progress = true) {
      bool ran = false;
      for (std::size_t i = first; i < warp_end(first); ++i) {
        if (threads_[i].state != State::Ready) continue;
        ran = true;
        resume(i);
        if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
      }
      if (!ran) return progress;
      meet_in_warp(first);
    }
  }

  std::size_t warp_end(std::size_t first) const { return std::min(first + kWarp, threads_.size()); }

  // Resumes each group of lanes once all of its lanes have arrived.
  void meet_in_warp(std::size_t first) {
    for (std::size_t i = first; i < warp_end(first); ++i) {
      const Thread& t = threads_[i];
      if (t.state != State::AtWarp) continue;
      bool all = true;
      for (std::size_t l = 0; l < kWarp; ++l) {
        if ((t.mask >> l & 1U) == 0) continue;
        running_ = i;
        if (first + l >= threads_.size())
          fail(fmt::format("the mask {:#x} at {} names lane {}, which does not exist", t.mask,
                           t.site.str(), l));
        const Thread& other = threads_[first + l];
        if (other.state == State::Ended)
          fail(fmt::format("waits at {} for {}, which has ended", t.site.str(), name(first + l)));
        if (other.state == State::AtWarp && (!(other.site == t.site) || other.mask != t.mask))
          fail(fmt::format("is at {} with mask {:#x}, {} at {} with mask {:#x}", t.site.str(),
                           t.mask, name(first + l), other.site.str(), other.mask));
        all = all && other.state == State::AtWarp;
      }
      if (all) release_lanes(first, t.mask);
    }
  }

  void release_lanes(std::size_t first, std::uint32_t mask) {
    const std::uint32_t time = ++scratch_.time;
    std::array<std::uint64_t, kWarp> values{};
    for (std::size_t l = 0; l < kWarp; ++l) {
      if ((mask >> l & 1U) != 0) values[l] = threads_[first + l].value;
    }
    for (std::size_t l = 0; l < kWarp; ++l) {
      if ((mask >> l & 1U) == 0) continue;
      Thread& t = threads_[first + l];
      t.seen = values;
      t.state = State::Ready;
      if (t.orders) t.warp_barrier = time;
    }
  }

  void meet_in_block() {
    const auto first = std::find_if(threads_.begin(), threads_.end(),
                                    [](const Thread& t) { return t.state == State::AtBarrier; });
    if (first == threads_.end()) return;
    const auto waiting = static_cast<std::size_t>(first - threads_.begin());
    const Site& site = threads_[waiting].site;
    for (std::size_t i = 0; i < threads_.size(); ++i) {
      const Thread& t = threads_[i];
      running_ = waiting;
      if (t.state == State::Ended)
        fail(fmt::format("waits at the barrier at {}, which {} never reached: it has ended",
                         site.str(), name(i)));
      if (t.state != State::AtBarrier) return;
      if (!(t.site == site))
        fail(fmt::format("waits at the barrier at {}, {} at the one at {}", site.str(), name(i),
                         t.site.str()));
    }
    now_.block_barrier = ++scratch_.time;
    for (Thread& t : threads_) t.state = State::Ready;
  }

  [[noreturn]] void fail_stuck() {
    std::string text = "no thread can go on";
    for (std::size_t i = 0; i < threads_.size(); ++i) {
      const Thread& t = threads_[i];
      running_ = i;
      if (t.state == State::AtBarrier)
        text += fmt::format("; {} waits at the barrier at {}", name(i), t.site.str());
      if (t.state == State::AtWarp)
        text += fmt::format("; {} waits for mask {:#x} at {}", name(i), t.mask, t.site.str());
      if (text.size() > 400) break;
    }
    fail(text);
  }

  const char* kernel_;
  Place place_;
  const std::function<void()>& body_;
  Scratch& scratch_ = scratch();
  const Stacks& stacks_ = scratch_.stacks;
  std::vector<Thread>& threads_ = scratch_.threads;
  std::vector<std::size_t> warps_;  // in the order of execution
  std::vector<std::uint64_t> shared_;
  const std::size_t shared_bytes_;
  Now now_;
  std::size_t running_ = 0;
  context::fiber back_;
  std::exception_ptr error_;
  bool unwinding_ = false;
#if defined(TESSERA_ADDRESS_SANITIZER)
  const void* host_stack_ = nullptr;
  std::size_t host_stack_bytes_ = 0;
#endif
};

Block& block() {
  if (current_block == nullptr) throw ModelError("device code was called outside of a kernel");
  return *current_block;
}

void meet_lanes(std::uint32_t mask, std::uint64_t value, Site site, bool orders) {
  Thread& t = block().thread();
  if ((mask >> lane() & 1U) == 0)
    block().fail(fmt::format("calls a warp operation at {} with mask {:#x}, which leaves it out",
                             site.str(), mask));
  t.mask = mask;
  t.value = value;
  t.orders = orders;
  block().wait(State::AtWarp, site);
}

}  // namespace

int most_shared_bytes() {
  constexpr int kHopper = 227 * 1024;
  const char* limit = std::getenv("TESSERA_FIBER_SHARED");  // NOLINT(concurrency-mt-unsafe)
  return limit == nullptr ? kHopper : std::atoi(limit);
}

void run_grid(const char* kernel, Dim grid, Dim block_dim, std::size_t shared_bytes,
              const std::function<void()>& body) {
  if (block_dim.count() == 0 || block_dim.count() > kMostThreads || grid.count() == 0 ||
      grid.y > 65535 || grid.z > 65535 || block_dim.z > 64)
    throw ModelError(fmt::format("{}: no device runs a grid of {} x {} x {} blocks of {} x {} x {}",
                                 kernel, grid.x, grid.y, grid.z, block_dim.x, block_dim.y,
                                 block_dim.z));
  Scratch& state = scratch();
  state.begin_grid();
  const std::uint32_t time = state.time;
  std::vector<std::size_t> blocks(grid.count());
  std::iota(blocks.begin(), blocks.end(), 0);
  std::shuffle(blocks.begin(), blocks.end(), state.order);
  for (const std::size_t index : blocks)
    Block(kernel, grid, block_dim, index, shared_bytes, time, body).run();
}

Place place() { return block().place(); }

void sync_block(const char* file, int line) { block().wait(State::AtBarrier, {file, line}); }

void sync_warp(std::uint32_t mask, const char* file, int line) {
  meet_lanes(mask, 0, {file, line}, true);
}

std::uint64_t exchange(std::uint32_t mask, std::uint64_t value, int source, const char* file,
                       int line) {
  meet_lanes(mask, value, {file, line}, true);
  const auto& seen = block().thread().seen;
  const bool valid = source >= 0 && source < kWarp && (mask >> source & 1U) != 0;
  return valid ? seen[static_cast<std::size_t>(source)] : value;
}

std::uint32_t ballot(std::uint32_t mask, bool value, const char* file, int line) {
  meet_lanes(mask, value ? 1 : 0, {file, line}, true);
  std::uint32_t result = 0;
  for (std::size_t l = 0; l < kWarp; ++l) {
    if ((mask >> l & 1U) != 0 && block().thread().seen[l] != 0) result |= 1U << l;
  }
  return result;
}

const std::array<std::uint64_t, kWarp>& gather(std::uint32_t mask, std::uint64_t value,
                                               const char* file, int line) {
  meet_lanes(mask, value, {file, line}, false);
  return block().thread().seen;
}

int lane() { return static_cast<int>(block().running() % kWarp); }

std::byte* shared_memory() { return block().shared(); }
void check_read(const void* address, std::size_t bytes) { block().check(address, bytes, false); }
void check_write(const void* address, std::size_t bytes) { block().check(address, bytes, true); }
void note_global(const void* address, std::size_t bytes, bool write) {
  if (current_block != nullptr) current_block->note_global(address, bytes, write);
}

void copy_async(void* to, const void* from, std::size_t bytes, std::size_t filled) {
  const auto misaligned = [bytes](const void* p) {
    return reinterpret_cast<std::uintptr_t>(p) % bytes != 0;
  };
  if (misaligned(to) || misaligned(from))
    block().fail(fmt::format("copies {} bytes from {} to {}, which are not aligned to them", bytes,
                             from, to));
  block().check(to, bytes, true);  // may be written, and `from` read, asynchronously from now on
  block().note_global(from, filled, false);
  std::memset(to, 0xff, bytes);  // NaNs until the copy completes
  auto& groups = block().thread().copies;
  if (groups.empty()) groups.emplace_back();
  groups.back().push_back(
      {static_cast<std::byte*>(to), static_cast<const std::byte*>(from), bytes, filled});
}

void commit_copies() {
  auto& groups = block().thread().copies;
  if (groups.empty()) groups.emplace_back();
  groups.emplace_back();
}

void wait_copies(std::size_t groups) {
  auto& all = block().thread().copies;
  while (all.size() > groups + 1) {
    for (const Copy& copy : all.front()) {
      block().check(copy.to, copy.bytes, true);
      block().note_global(copy.from, copy.filled, false);
      if (copy.filled > 0) std::memcpy(copy.to, copy.from, copy.filled);
      std::memset(copy.to + copy.filled, 0, copy.bytes - copy.filled);
    }
    all.erase(all.begin());
  }
}

}  // namespace tessera::fiber
