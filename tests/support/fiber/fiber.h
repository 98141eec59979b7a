#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

// Runs a CUDA grid on one host thread: one block after the other, its threads as fibers. A fiber
// runs until a barrier, a warp operation or its end. Blocks, and between barriers the warps of a
// block, run in a random order that TESSERA_FIBER_SEED selects. Undefined behaviour throws
// ModelError with kernel, block, thread and seed:
// - a barrier that some threads of the block do not reach, or reach at another line
// - a warp operation that some lanes of its mask do not reach, or reach at another line
// - shared memory read before it was written, or beyond the size of the launch
// - a race in shared or global memory: two threads access it, one of them writes, no barrier
//   between. In global memory this needs kernels compiled by cmake/compile_on_host.cmake without
//   other sanitizers; accesses by memcpy and memset are not seen.
// - a misaligned asynchronous copy
// Asynchronous copies complete when their thread waits for them, the latest that CUDA allows; until
// then the target holds NaNs.
namespace tessera::fiber {

/// Undefined behaviour in a kernel.
class ModelError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

struct Dim {
  unsigned x = 1, y = 1, z = 1;
  std::size_t count() const { return std::size_t{x} * y * z; }
};

inline constexpr int kWarp = 32;

/// Runs `body` once for every thread of every block.
/// @param kernel  name for messages
/// @throws ModelError, and whatever `body` throws
void run_grid(const char* kernel, Dim grid, Dim block, std::size_t shared_bytes,
              const std::function<void()>& body);

/// Maximum shared memory per block in bytes: an H100's, or TESSERA_FIBER_SHARED.
int most_shared_bytes();

// The rest may only be called by kernels, inside run_grid.

struct Place {
  Dim thread, block, block_dim, grid_dim;
};
Place place();

void sync_block(const char* file, int line);
void sync_warp(std::uint32_t mask, const char* file, int line);

/// Warp shuffle: returns the value that lane `source` passed, or the caller's own if `source` is
/// outside of the mask. All lanes of the mask must call it.
std::uint64_t exchange(std::uint32_t mask, std::uint64_t value, int source, const char* file,
                       int line);
std::uint32_t ballot(std::uint32_t mask, bool value, const char* file, int line);
int lane();
/// Returns the values that all lanes of the mask passed, valid until the thread's next warp
/// operation. No memory barrier, like ldmatrix and mma.
const std::array<std::uint64_t, kWarp>& gather(std::uint32_t mask, std::uint64_t value,
                                               const char* file, int line);

/// The block's shared memory, 16-byte aligned, initially undefined.
std::byte* shared_memory();
void check_read(const void* address, std::size_t bytes);
void check_write(const void* address, std::size_t bytes);
/// Called by compiled kernels for each access to memory; without effect outside of kernels and for
/// stacks and shared memory.
void note_global(const void* address, std::size_t bytes, bool write);

/// cp.async: copies `filled` bytes to shared memory and zero-fills up to `bytes`.
void copy_async(void* to, const void* from, std::size_t bytes, std::size_t filled);
void commit_copies();
/// cp.async.wait_group: waits until at most `groups` of the thread's latest groups are in flight.
void wait_copies(std::size_t groups);

}  // namespace tessera::fiber
