#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

// Runs the threads of a CUDA block as fibers of one thread of the host, one block after the other.
//
// A fiber runs until it comes to a barrier, a warp operation, or its end. So every run is the same,
// and what would be undefined on a GPU is reported with the kernel's name and the thread:
//   - a barrier that some threads of the block don't reach, or reach at another line
//   - a warp operation that some lanes of its mask don't reach, or reach at another line
//   - shared memory that is read before anybody wrote it, or lies outside of what was launched with
//   - shared memory that two threads touch, one of them writing, with no barrier between
//   - an asynchronous copy between addresses that are not aligned
// An asynchronous copy is made as late as it may be, when its thread waits for it; until then its
// target holds NaNs.
namespace tessera::fiber {

/// A broken rule of the execution model, as above.
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
/// @throws ModelError; what `body` throws
void run_grid(const char* kernel, Dim grid, Dim block, std::size_t shared_bytes,
              const std::function<void()>& body);

/// Shared memory of a block at most, in bytes: that of an H100, or what the environment's
/// TESSERA_FIBER_SHARED says.
int most_shared_bytes();

/// Of a device that would run blocks side by side; few, so that a block that walks over its work
/// takes more than one step in small tests.
constexpr int processors() { return 2; }

// What follows is called by kernels, that is, inside run_grid.

struct Place {
  Dim thread, block, block_dim, grid_dim;
};
Place place();

void sync_block(const char* file, int line);
void sync_warp(std::uint32_t mask, const char* file, int line);

/// Hands in `value` and returns what lane `source` of the warp handed in; all lanes of the mask
/// must call it. A source outside of the mask gives the lane's own value.
std::uint64_t exchange(std::uint32_t mask, std::uint64_t value, int source, const char* file,
                       int line);
/// Bit l is set if lane l of the mask handed in true.
std::uint32_t ballot(std::uint32_t mask, bool value, const char* file, int line);
int lane();
/// What all lanes of the mask hand in. They meet, but their accesses to memory are not ordered by
/// it: so it is with ldmatrix and mma. Valid until the thread's next warp operation.
const std::array<std::uint64_t, kWarp>& gather(std::uint32_t mask, std::uint64_t value,
                                               const char* file, int line);

/// Shared memory of the block, 16-byte aligned; its contents are undefined at the start.
std::byte* shared_memory();
void check_read(const void* address, std::size_t bytes);
void check_write(const void* address, std::size_t bytes);

/// cp.async: copies `filled` bytes to shared memory and zeros behind them, `bytes` in all, once the
/// thread has waited for the copy's group.
void copy_async(void* to, const void* from, std::size_t bytes, std::size_t filled);
/// cp.async.commit_group: the copies since the last one become a group.
void commit_copies();
/// cp.async.wait_group: until at most `groups` of the thread's latest are under way.
void wait_copies(std::size_t groups);

}  // namespace tessera::fiber
