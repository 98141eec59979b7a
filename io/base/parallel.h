#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace tessera::io {

/// Calls body(i) once for each i of [0, n), on up to `threads` threads of which the caller is one;
/// they take the i in ascending order. For work that waits for files: threads are made for each
/// call. The first exception keeps further i from being taken, and is rethrown once all threads
/// have ended.
void parallel_for_each(std::size_t n, int threads, const std::function<void(std::size_t)>& body);

/// Cuts [0, n) into batches of neighbours for threads to take: a batch ends where `joins(i)` is
/// false (i does not go on where i - 1 ends), or where i would bring its sum of `size(i)` over
/// `most`.
/// @return where the batches begin, and n
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
