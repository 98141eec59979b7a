#pragma once

#include <cstddef>
#include <functional>

namespace tessera::io {

/// Calls body(i) for each i in [0, n), started in ascending order, on up to `threads` threads
/// including the caller's. For I/O: each call starts new threads. An exception stops further calls
/// and is rethrown once all threads have ended.
void parallel_for_each(std::size_t n, int threads, const std::function<void(std::size_t)>& body);

}  // namespace tessera::io
