#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>

// Runs the threads of a CUDA block as fibers of one thread of the host, one block after the other.
//
// A fiber runs until it comes to a barrier, a warp operation, or its end. So every run is the same,
// and what would be undefined on a GPU is reported with the kernel's name and the thread:
//   - a barrier that some threads of the block don't reach, or reach at another line
//   - a warp operation that some lanes of its mask don't reach, or reach at another line
//   - shared memory that is read before anybody wrote it, or lies outside of what was launched with
//   - shared memory that two threads touch, one of them writing, with no barrier between
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

/// Runs `body` once for every thread of every block. Returns when all have ended.
/// @param kernel  name for messages
/// @throws ModelError; what `body` throws
void run_grid(const char* kernel, Dim grid, Dim block, std::size_t shared_bytes,
              const std::function<void()>& body);

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

/// Shared memory of the block, 16-byte aligned; its contents are undefined at the start.
std::byte* shared_memory();
void check_read(const void* address, std::size_t bytes);
void check_write(const void* address, std::size_t bytes);

}  // namespace tessera::fiber
