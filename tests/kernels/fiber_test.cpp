// The fibers report behaviour that is undefined on a GPU. They are the oracle of the CUDA kernels'
// tests, so each rule is violated here on purpose.
#include "tests/support/fiber/fiber.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <array>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cuda/device/mma.h"
#include "kernels/cuda/device/reduce.h"
#include "tests/support/text.h"

namespace tessera::test {
namespace {

using fiber::ModelError;
using fiber::run_grid;
using kernels::cuda::commit_copies;
using kernels::cuda::copy_async;
using kernels::cuda::kAllLanes;
using kernels::cuda::SharedMemory;
using kernels::cuda::wait_copies;

int thread() { return static_cast<int>(threadIdx.x); }

template <typename F>
std::string broken_rule(unsigned threads, int shared_bytes, F&& body, unsigned blocks = 1) {
  try {
    run_grid("k", {blocks, 1, 1}, {threads, 1, 1}, static_cast<std::size_t>(shared_bytes), body);
  } catch (const ModelError& error) {
    return error.what();
  }
  return "none";
}

TEST_CASE("every thread of every block runs once with its own indices") {
  std::vector<int> visits(2 * 3 * 4 * 64, 0);
  run_grid("k", {2, 3, 4}, {16, 2, 2}, 0, [&] {
    const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const unsigned in_block = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    ++visits[block * 64 + in_block];
  });
  CHECK(visits == std::vector<int>(visits.size(), 1));
}

TEST_CASE("warp operations exchange values between lanes") {
  std::vector<int> down(64), bits(64), sums(64);
  run_grid("k", {1, 1, 1}, {64, 1, 1}, 0, [&] {
    const auto t = static_cast<std::size_t>(thread());
    down[t] = __shfl_down_sync(kAllLanes, thread(), 3);
    bits[t] = static_cast<int>(__ballot_sync(kAllLanes, thread() % 32 < 2));
    sums[t] = kernels::cuda::warp_reduce(thread(), kernels::cuda::Sum{});
  });
  CHECK(down[0] == 3);
  CHECK(down[31] == 31);  // source beyond the warp: its own value
  CHECK(down[40] == 43);
  CHECK(bits[5] == 3);
  CHECK(sums[7] == 31 * 16);
  CHECK(sums[63] == 31 * 16 + 32 * 32);
}

TEST_CASE("lanes of disjoint masks do not wait for each other") {
  std::vector<int> got(32);
  run_grid("k", {1, 1, 1}, {32, 1, 1}, 0, [&] {
    const bool low = thread() < 16;
    const int rounds = low ? 1 : 3;
    int value = thread();
    for (int i = 0; i < rounds; ++i) value += __shfl_xor_sync(low ? 0xffffU : 0xffff0000U, 1, 1);
    got[static_cast<std::size_t>(thread())] = value - thread();
  });
  CHECK(got[0] == 1);
  CHECK(got[31] == 3);
}

TEST_CASE("a block reduction gives all threads the same result") {
  std::vector<float> got(96);
  run_grid("k", {1, 1, 1}, {96, 1, 1},
           static_cast<std::size_t>(SharedMemory::shared_bytes<float>(32)), [&] {
             const auto scratch = SharedMemory().take<float>(32);
             const auto value = static_cast<float>(thread());
             float sum = kernels::cuda::block_reduce(value, scratch, 0.0F, kernels::cuda::Sum{});
             sum += kernels::cuda::block_reduce(value, scratch, 0.0F, kernels::cuda::Maximum{});
             got[static_cast<std::size_t>(thread())] = sum;
           });
  CHECK(got == std::vector<float>(96, 95.0F * 48.0F + 95.0F));
}

TEST_CASE("a barrier that some threads do not reach is reported") {
  const std::string ended = broken_rule(64, 0, [] {
    if (thread() < 40) __syncthreads();
  });
  CHECK(holds(ended, "k, block (0, 0, 0), thread 0: waits at the barrier at fiber_test.cpp:"));
  CHECK(holds(ended, "which thread 40 never reached: it has ended"));

  const std::string elsewhere = broken_rule(64, 0, [] {
    if (thread() == 5) {
      __syncthreads();
    } else {
      __syncthreads();
    }
  });
  CHECK(holds(elsewhere, "thread 5 at the one at fiber_test.cpp:"));
}

TEST_CASE("a warp operation that some lanes of its mask do not reach is reported") {
  CHECK(holds(broken_rule(32, 0,
                          [] {
                            if (thread() != 9) __syncwarp(kAllLanes);
                          }),
              "for thread 9, which has ended"));
  CHECK(holds(broken_rule(32, 0, [] { __syncwarp(thread() == 3 ? 0xffffU : kAllLanes); }),
              "mask 0xffff"));
  CHECK(holds(broken_rule(32, 0, [] { __syncwarp(0xfffffffeU); }), "which leaves it out"));
  CHECK(holds(broken_rule(16, 0, [] { __syncwarp(kAllLanes); }),
              "names lane 16, which does not exist"));
  CHECK(holds(broken_rule(64, 0,
                          [] {
                            if (thread() == 3)
                              __syncthreads();
                            else if (thread() < 32)
                              __syncwarp(kAllLanes);
                          }),
              "no thread can go on"));
}

TEST_CASE("uninitialized and out-of-bounds shared memory accesses are reported") {
  CHECK(holds(broken_rule(1, 64,
                          [] {
                            const auto x = SharedMemory().take<float>(16);
                            x[0] = 1.0F;
                            x[2] = x[1] + x[0];
                          }),
              "reads shared memory at byte 4, which nobody wrote"));
  CHECK(holds(broken_rule(1, 64, [] { SharedMemory().take<float>(17)[16] = 1.0F; }),
              "writes shared memory at byte 64, 4 bytes, outside of the 64 of the launch"));
  // Shared memory does not persist between blocks.
  std::string text = "none";
  try {
    run_grid("k", {2, 1, 1}, {1, 1, 1}, 16, [] {
      const auto x = SharedMemory().take<int>(4);
      if (blockIdx.x == 0) x[0] = 1;
      x[1] = x[0];
    });
  } catch (const ModelError& error) {
    text = error.what();
  }
  CHECK(holds(text, "block (1, 0, 0), thread 0: reads shared memory at byte 0"));
}

TEST_CASE("races in shared memory are reported") {
  const auto read_after_write = [](auto&& barrier) {
    return [barrier] {
      const auto x = SharedMemory().take<int>(64);
      x[thread()] = 0;
      __syncthreads();
      x[thread()] = thread();
      barrier();
      const int other = x[(thread() + 1) % 64];
      __syncthreads();
      x[thread()] = other;
    };
  };
  constexpr int kBytes = 256;
  CHECK(holds(
      broken_rule(32, kBytes / 2, read_after_write([] {})),
      "thread 1: writes shared memory at byte 4, which thread 0 read with no barrier between"));
  CHECK(holds(broken_rule(64, kBytes, read_after_write([] { __syncwarp(kAllLanes); })),
              "with no barrier between"));
  CHECK(broken_rule(64, kBytes, read_after_write([] { __syncthreads(); })) == "none");

  CHECK(holds(broken_rule(2, 16, [] { SharedMemory().take<int>(1)[0] = 1; }),
              "thread 1: writes shared memory at byte 0, which thread 0 wrote"));
  const auto write_after_read = [](unsigned readers) {
    return broken_rule(64, 16, [readers] {
      const auto x = SharedMemory().take<int>(1);
      if (thread() == 0) x[0] = 1;
      __syncthreads();
      int value = 0;
      if (threadIdx.x < readers) value = x[0];
      if (thread() == 63) x[0] = value + 2;
    });
  };
  CHECK(write_after_read(0) == "none");
  CHECK(holds(write_after_read(1), "with no barrier between"));
  CHECK(holds(write_after_read(64), "with no barrier between"));
  // Warp operations order the accesses of a warp's lanes.
  CHECK(broken_rule(32, 128, [] {
          const auto x = SharedMemory().take<int>(32);
          x[thread()] = thread();
          __syncwarp(kAllLanes);
          const int other = x[31 - thread()];
          __syncwarp(kAllLanes);
          x[thread()] = other;
        }) == "none");
  // The last reader is the writer itself.
  CHECK(holds(broken_rule(32, 16,
                          [] {
                            const auto x = SharedMemory().take<int>(1);
                            if (thread() == 0) x[0] = 1;
                            __syncwarp(kAllLanes);
                            const int value = x[0];
                            if (thread() == 31) x[0] = value + 1;
                          }),
              "which thread 30 read with no barrier between"));
}

#if defined(TESSERA_CHECKS_GLOBAL_MEMORY)
TEST_CASE("races in global memory between blocks are reported") {
  std::vector<int> memory(256);
  int* const x = memory.data();
  const auto first_thread_of_block = [](unsigned block) {
    return blockIdx.x == block && threadIdx.x == 0;
  };
  const auto in_two_blocks = [](auto&& body) { return broken_rule(64, 0, body, 2); };
  const auto at = [](const int* address) {
    return fmt::format("global memory at {}, which ", fmt::ptr(address));
  };

  const std::string two_writes = in_two_blocks([x] {
    if (threadIdx.x == 5) x[7] = 1;
  });
  CHECK(holds(two_writes, "k, block ("));
  CHECK(holds(two_writes, "thread 5: writes " + at(x + 7)));
  CHECK(holds(two_writes, "which block ("));
  CHECK(holds(two_writes, "thread 5 wrote in the same launch (TESSERA_FIBER_SEED="));
  // Blocks run in either order.
  const std::string read_and_write = in_two_blocks([=] {
    if (first_thread_of_block(0)) x[3] = 1;
    if (first_thread_of_block(1)) x[100] = x[3];
    __syncthreads();
    if (blockIdx.x == 1) x[128 + thread()] = x[100];
  });
  CHECK(holds(read_and_write, at(x + 3)));
  CHECK(holds(read_and_write, "in the same launch"));
  // A block that reads, too, overwrites the others' input.
  CHECK(holds(in_two_blocks([=] {
                x[64 + 64 * blockIdx.x + threadIdx.x] = x[0];
                __syncthreads();
                if (first_thread_of_block(0)) x[0] = 1;
              }),
              "in the same launch"));

  auto* const bytes = reinterpret_cast<unsigned char*>(x);
  for (int launch = 0; launch < 2; ++launch) {  // launches are ordered
    CHECK(in_two_blocks([=] {
            bytes[2 * threadIdx.x + blockIdx.x] = 1;  // neighbours' bytes
            x[64 + 64 * blockIdx.x + threadIdx.x] = x[200];
          }) == "none");
  }
}

TEST_CASE("races in global memory within a block are reported") {
  std::vector<int> memory(64);
  int* const x = memory.data();
  const auto read_after_write = [x](unsigned threads, auto&& barrier) {
    return broken_rule(threads, 0, [=] {
      x[threadIdx.x] = thread();
      barrier();
      const int other = x[(threadIdx.x + 1) % threads];
      barrier();
      x[threadIdx.x] = other;
    });
  };
  const auto warp_barrier = [] { __syncwarp(kAllLanes); };
  CHECK(holds(read_after_write(32, [] {}), "which thread 0 read with no barrier between"));
  CHECK(holds(read_after_write(64, warp_barrier), "with no barrier between"));
  CHECK(read_after_write(32, warp_barrier) == "none");
  CHECK(read_after_write(64, [] { __syncthreads(); }) == "none");
  // An asynchronous copy reads until it is waited for.
  CHECK(holds(broken_rule(32, 16,
                          [x] {
                            if (thread() == 0) {
                              copy_async(SharedMemory().take<int>(4), x, false);
                              commit_copies();
                            }
                            __syncwarp(kAllLanes);
                            if (thread() == 1) x[2] = 1;
                            if (thread() == 0) wait_copies<0>();
                          }),
              "which thread 0 read with no barrier between"));
}
#endif

__attribute__((no_sanitize("thread"))) void append(std::array<unsigned, 512>& to) {
  to[to[0]++] = blockIdx.x * 32 + threadIdx.x / 32;
}

TEST_CASE("blocks and warps run in an order that the seed selects") {
  const auto order = [] {
    std::array<unsigned, 512> result{1};
    const auto run = [&] {
      run_grid("k", {8, 1, 1}, {128, 1, 1}, 0, [&] {
        if (threadIdx.x % 32 == 0) append(result);
        __syncthreads();
        if (threadIdx.x % 32 == 0) append(result);
      });
    };
    std::thread(run).join();  // each host thread draws from the seed
    return result;
  };
  const auto first = order();
  CHECK(first == order());
  CHECK(first[0] == 1 + 8 * 4 * 2);
  const auto in_order = [&](std::size_t begin, std::size_t step, std::size_t count) {
    for (std::size_t i = 1; i < count; ++i)
      if (first[begin + i * step] < first[begin + (i - 1) * step]) return false;
    return true;
  };
  CHECK(!in_order(1, 8, 8));  // blocks
  bool warps_in_order = true;
  for (std::size_t phase = 0; phase < 16; ++phase)
    warps_in_order = warps_in_order && in_order(1 + phase * 4, 1, 4);
  CHECK(!warps_in_order);
}

TEST_CASE("exceptions of a kernel, and invalid launch shapes, reach the caller") {
  CHECK_THROWS_WITH_AS(run_grid("k", {2, 1, 1}, {32, 1, 1}, 0,
                                [] {
                                  if (thread() == 7) throw std::runtime_error("seven");
                                  __syncthreads();
                                }),
                       "seven", std::runtime_error);
  CHECK_THROWS_AS(run_grid("k", {1, 1, 1}, {1025, 1, 1}, 0, [] {}), ModelError);
  CHECK_THROWS_AS(run_grid("k", {0, 1, 1}, {32, 1, 1}, 0, [] {}), ModelError);
  CHECK_THROWS_AS(thread(), ModelError);
}

}  // namespace
}  // namespace tessera::test
