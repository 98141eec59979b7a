#include "tests/support/fiber/fiber.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <boost/context/fiber.hpp>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#if defined(TESSERA_ADDRESS_SANITIZER)
#include <sanitizer/common_interface_defs.h>
#endif

namespace tessera::fiber {
namespace {

namespace context = boost::context;

constexpr std::size_t kStackBytes = std::size_t{256} << 10;
constexpr std::uint16_t kNobody = 0xffff;

// Fiber stacks, reused between blocks.
class Stacks {
 public:
  std::byte* get(std::size_t i) {
    while (stacks_.size() <= i)
      stacks_.push_back(std::make_unique_for_overwrite<std::byte[]>(kStackBytes));
    return stacks_[i].get();
  }

 private:
  std::vector<std::unique_ptr<std::byte[]>> stacks_;
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
  std::uint32_t warp_phase = 0;           // number of the warp's memory barriers so far
  std::vector<CopyGroup> copies;          // in flight; the last group is not committed yet
  void* fake_stack = nullptr;             // address sanitizer's handle
};

// Last access to a byte of shared memory. Two accesses are ordered if a block barrier, or within a
// warp a warp barrier, lies between them.
struct Access {
  std::uint32_t block_phase = 0;
  std::uint32_t warp_phase = 0;
  std::uint16_t thread = kNobody;
  bool by_several = false;  // reads by different warps since the block's last barrier
};
struct Touched {
  Access write, read;
  bool split = false;  // its bytes are tracked separately
};
constexpr std::size_t kWord = 4;

// Per host thread, reused between blocks: in small blocks, allocating zeroed memory dominates the
// run time.
struct Scratch {
  Stacks stacks;
  std::vector<Thread> threads;
  std::vector<Touched> words, bytes;  // state of shared memory
};

Scratch& scratch() {
  thread_local Scratch result;
  return result;
}

class Block {
 public:
  Block(const char* kernel, const Place& place, std::size_t shared_bytes,
        const std::function<void()>& body)
      : kernel_(kernel), place_(place), body_(body), shared_bytes_(shared_bytes) {
    threads_.clear();
    threads_.resize(place.block_dim.count());
    // NaNs as floats, wild values as indices. A new allocation, so that the address sanitizer knows
    // the end.
    shared_ = std::vector<std::uint64_t>((shared_bytes + 15) / 16 * 2, 0xfbfbfbfbfbfbfbfbU);
    words_.assign(shared_bytes / kWord + 1, {});
    bytes_.resize(words_.size() * kWord);
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

  static Block*& current() {
    thread_local Block* block = nullptr;
    return block;
  }
  Place place() const {
    Place result = place_;
    const auto x = static_cast<unsigned>(running_);
    const Dim& d = place_.block_dim;
    result.thread = {x % d.x, x / d.x % d.y, x / d.x / d.y};
    return result;
  }
  std::size_t running() const { return running_; }
  Thread& thread() { return threads_[running_]; }
  std::byte* shared() { return reinterpret_cast<std::byte*>(shared_.data()); }

  void wait(State state, Site site) {
    Thread& t = thread();
    t.state = state;
    t.site = site;
    yield();
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw ModelError(fmt::format("{}, block ({}, {}, {}), {}: {}", kernel_, place_.block.x,
                                 place_.block.y, place_.block.z, name(running_), what));
  }

  void check(const void* address, std::size_t bytes, bool write) {
    const auto* begin = static_cast<const std::byte*>(address);
    if (begin < shared() || begin + bytes > shared() + shared_bytes_)
      fail(fmt::format("{} shared memory at byte {}, {} bytes, outside of the {} of the launch",
                       write ? "writes" : "reads", begin - shared(), bytes, shared_bytes_));
    const auto first = static_cast<std::size_t>(begin - shared());
    const Access now{block_phase_, thread().warp_phase, static_cast<std::uint16_t>(running_)};
    const auto end = first + bytes;
    for (std::size_t i = first; i < end;) {
      Touched& word = words_[i / kWord];
      if (i % kWord == 0 && end - i >= kWord && !word.split) {
        touch(word, now, write, i);
        i += kWord;
        continue;
      }
      if (!word.split) {
        std::fill_n(bytes_.begin() + static_cast<std::ptrdiff_t>(i / kWord * kWord), kWord, word);
        word.split = true;
      }
      touch(bytes_[i], now, write, i);
      ++i;
    }
  }

 private:
  void touch(Touched& touched, const Access& now, bool write, std::size_t i) {
    if (!write && touched.write.thread == kNobody)
      fail(fmt::format("reads shared memory at byte {}, which nobody wrote", i));
    if (!ordered(touched.write, now))
      fail(fmt::format("{} shared memory at byte {}, which {} wrote with no barrier between",
                       write ? "writes" : "reads", i, name(touched.write.thread)));
    if (!write) return note_read(touched.read, now);
    if (!ordered(touched.read, now) ||
        (touched.read.by_several && touched.read.block_phase == block_phase_))
      fail(fmt::format("writes shared memory at byte {}, which {} read with no barrier between", i,
                       name(touched.read.thread)));
    touched.write = now;
  }
  static void note_read(Access& last, const Access& now) {
    if (last.thread == kNobody || last.block_phase != now.block_phase) {
      last = now;
      return;
    }
    const bool same_warp = last.thread / kWarp == now.thread / kWarp;
    const bool by_several = last.by_several || !same_warp;
    // Within a warp, keep only the read of the latest phase.
    if (!same_warp || now.warp_phase >= last.warp_phase) last = now;
    last.by_several = by_several;
  }
  static bool ordered(const Access& before, const Access& now) {
    if (before.thread == now.thread || before.thread == kNobody) return true;
    if (before.block_phase != now.block_phase) return true;
    return before.thread / kWarp == now.thread / kWarp && before.warp_phase < now.warp_phase;
  }

  std::string name(std::size_t thread) const {
    const Dim& d = place_.block_dim;
    return d.y == 1 && d.z == 1 ? fmt::format("thread {}", thread)
                                : fmt::format("thread ({}, {}, {})", thread % d.x,
                                              thread / d.x % d.y, thread / d.x / d.y);
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
                           error_ = std::current_exception();
                         }
                         thread().state = State::Ended;
                         leaving(true);
                         return std::move(back_);
                       });
  }

  void resume(std::size_t i) {
    running_ = i;
    Block* const before = std::exchange(current(), this);
#if defined(TESSERA_ADDRESS_SANITIZER)
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, stacks_.get(i), kStackBytes);
#endif
    threads_[i].fiber = std::move(threads_[i].fiber).resume();
#if defined(TESSERA_ADDRESS_SANITIZER)
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
    current() = before;
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

  void run_threads() {
    for (;;) {
      bool progress = false;
      for (std::size_t i = 0; i < threads_.size(); ++i) {
        if (threads_[i].state != State::Ready) continue;
        progress = true;
        resume(i);
        if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
      }
      for (std::size_t first = 0; first < threads_.size(); first += kWarp) meet_in_warp(first);
      meet_in_block();
      if (std::all_of(threads_.begin(), threads_.end(),
                      [](const Thread& t) { return t.state == State::Ended; }))
        return;
      if (!progress) fail_stuck();
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
    std::array<std::uint64_t, kWarp> values{};
    for (std::size_t l = 0; l < kWarp; ++l) {
      if ((mask >> l & 1U) != 0) values[l] = threads_[first + l].value;
    }
    for (std::size_t l = 0; l < kWarp; ++l) {
      if ((mask >> l & 1U) == 0) continue;
      Thread& t = threads_[first + l];
      t.seen = values;
      t.state = State::Ready;
      if (t.orders) ++t.warp_phase;
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
    ++block_phase_;
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
  const Place place_;
  const std::function<void()>& body_;
  Stacks& stacks_ = scratch().stacks;
  std::vector<Thread>& threads_ = scratch().threads;
  std::vector<std::uint64_t> shared_;
  const std::size_t shared_bytes_;
  std::vector<Touched>&words_ = scratch().words, &bytes_ = scratch().bytes;
  std::uint32_t block_phase_ = 0;
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
  Block* current = Block::current();
  if (current == nullptr) throw ModelError("device code was called outside of a kernel");
  return *current;
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
  if (block_dim.count() == 0 || block_dim.count() > 1024 || grid.count() == 0 || grid.y > 65535 ||
      grid.z > 65535 || block_dim.z > 64)
    throw ModelError(fmt::format("{}: no device runs a grid of {} x {} x {} blocks of {} x {} x {}",
                                 kernel, grid.x, grid.y, grid.z, block_dim.x, block_dim.y,
                                 block_dim.z));
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x)
        Block(kernel, Place{{0, 0, 0}, {x, y, z}, block_dim, grid}, shared_bytes, body).run();
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

void copy_async(void* to, const void* from, std::size_t bytes, std::size_t filled) {
  const auto misaligned = [bytes](const void* p) {
    return reinterpret_cast<std::uintptr_t>(p) % bytes != 0;
  };
  if (misaligned(to) || misaligned(from))
    block().fail(fmt::format("copies {} bytes from {} to {}, which are not aligned to them", bytes,
                             from, to));
  block().check(to, bytes, true);  // may be written asynchronously from now on
  std::memset(to, 0xff, bytes);    // NaNs until the copy completes
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
      if (copy.filled > 0) std::memcpy(copy.to, copy.from, copy.filled);
      std::memset(copy.to + copy.filled, 0, copy.bytes - copy.filled);
    }
    all.erase(all.begin());
  }
}

}  // namespace tessera::fiber
