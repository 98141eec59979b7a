#pragma once

#include <cstddef>
#include <functional>

namespace tessera::io {

/// Calls body(i) for each i in [0, n), started in ascending order, on up to `threads` threads
/// including the caller's. Meant for I/O: starts new threads each time. An exception stops
/// further calls of body and is rethrown once all threads have ended.
void parallel_for_each(std::size_t n, int threads, const std::function<void(std::size_t)>& body);

}  // namespace tessera::io
