#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace tessera::io {

/// Calls body(i) for each i in [0, n), started in ascending order, on up to `threads` threads
/// including the caller's. For I/O: each call starts new threads. An exception stops further calls
/// and is rethrown once all threads have ended.
void parallel_for_each(std::size_t n, int threads, const std::function<void(std::size_t)>& body);

/// Splits [0, n) into contiguous batches. A batch begins at i if `joins(i)` is false (i does not
/// continue i - 1), or if the batch's sum of `size(i)` would exceed `most`.
/// @return begins of the batches, and n
template <typename Joins, typename Size>
std::vector<std::size_t> cut_batches(std::size_t n, std::int64_t most, Joins&& joins, Size&& size) {
  std::vector<std::size_t> begins;
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < n; ++i) {
    if (i == 0 || !joins(i) || sum + size(i) > most) {
      begins.push_back(i);
      sum = 0;
    }
    sum += size(i);
  }
  begins.push_back(n);
  return begins;
}

}  // namespace tessera::io
