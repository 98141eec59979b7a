#pragma once

#include <fmt/core.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

/// Root of every error that tessera throws. A message says what was expected, what was found,
/// where, and what to do next.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Declares an error type whose constructor formats its message with fmt.
#define TESSERA_DECLARE_ERROR(Name)                                 \
  class Name : public Error {                                       \
   public:                                                          \
    template <typename... Args>                                     \
    explicit Name(fmt::format_string<Args...> text, Args&&... args) \
        : Error(fmt::format(text, std::forward<Args>(args)...)) {}  \
  }

/// An argument is invalid: shape, dtype, device, configuration.
TESSERA_DECLARE_ERROR(InvalidArgument);
/// This device or build cannot serve the request.
TESSERA_DECLARE_ERROR(Unsupported);
/// An allocation failed; the message holds the request and the memory ledger.
TESSERA_DECLARE_ERROR(OutOfMemory);
/// A CUDA call failed.
TESSERA_DECLARE_ERROR(CudaError);
/// A file could not be opened, read, written, synced or renamed.
TESSERA_DECLARE_ERROR(IoError);
/// A checkpoint or model file is malformed, incomplete, or fails its checksum.
TESSERA_DECLARE_ERROR(CorruptCheckpoint);
/// Loss or gradients of a training step are NaN or infinite.
TESSERA_DECLARE_ERROR(NonFiniteLoss);
/// A broken invariant: a bug.
TESSERA_DECLARE_ERROR(InternalError);

#undef TESSERA_DECLARE_ERROR

/// How communication failed.
enum class CommFailure { Timeout, PeerLost, Mismatch, Aborted };

/// A collective or the rendezvous failed. The communicator that threw it is dead.
class CommError : public Error {
 public:
  template <typename... Args>
  CommError(CommFailure failure, std::vector<int> culprits, fmt::format_string<Args...> text,
            Args&&... args)
      : Error(fmt::format(text, std::forward<Args>(args)...)),
        failure_(failure),
        culprits_(std::move(culprits)) {}

  CommFailure failure() const { return failure_; }
  /// Ranks held responsible, ascending; empty if unknown.
  const std::vector<int>& culprits() const { return culprits_; }
  /// How the culprits ended, if known: "SIGKILL", "out of memory".
  const std::string& fate() const { return fate_; }
  CommError& set_fate(std::string fate) {
    fate_ = std::move(fate);
    return *this;
  }

 private:
  CommFailure failure_;
  std::vector<int> culprits_;
  std::string fate_;
};

/// Throws E, formatted, unless the condition holds.
template <typename E = InvalidArgument, typename... Args>
void require(bool condition, fmt::format_string<Args...> text, Args&&... args) {
  if (!condition) [[unlikely]] {
    throw E(text, std::forward<Args>(args)...);
  }
}

}  // namespace tessera
