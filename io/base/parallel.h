#pragma once

#include <cstddef>
#include <functional>

namespace tessera::io {

/// Calls body(i) once for each i of [0, n), on up to `threads` threads of which the caller is one;
/// they take the i in ascending order. For work that waits for files: threads are made for each
/// call. The first exception keeps further i from being taken, and is rethrown once all threads
/// have ended.
void parallel_for_each(std::size_t n, int threads, const std::function<void(std::size_t)>& body);

}  // namespace tessera::io
