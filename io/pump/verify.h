#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "io/pump/pump.h"
#include "io/pump/tensor_source.h"

namespace tessera::io {

struct VerifyProblem {
  std::string file;
  std::string tensor;               ///< "model/wte.weight"; empty: the whole file
  std::int64_t begin = 0, end = 0;  ///< elements, row-major inside the chunk's box; equal: unknown
  std::string what;
  std::int64_t byte_begin = 0, byte_end = 0;  ///< of the elements in the file; equal: unknown
  bool unread = false;  ///< an I/O error prevented reading; the data may be intact
  /// "rank-...: tensor model/wte.weight, elements 0 to 96 (bytes 512 to 896): the checksum is
  /// wrong"
  std::string str() const;
};

struct VerifyReport {
  std::vector<VerifyProblem> problems;
  std::int64_t tensors = 0;
  std::int64_t bytes = 0;         ///< tensor data read
  std::int64_t unverifiable = 0;  ///< bytes of it without a checksum
};

struct VerifyOptions {
  int threads = 1;           ///< each takes 1 MiB of memory
  bool check_finite = true;  ///< report infinities and NaN as problems
  /// Called with the bytes of tensor data read and the total. Calls are serialized.
  std::function<void(std::int64_t done, std::int64_t total)> progress{};
  /// Files to verify; absent: all, with those that hold no tensors.
  std::optional<std::set<std::string>> files{};
};

/// Reads tensors of sources, and collects wrong checksums and values that are not finite.
class TensorVerification {
 public:
  /// @param options  must outlive this
  explicit TensorVerification(const VerifyOptions& options) : options_(options) {}

  /// Adds a tensor. The source must outlive this.
  void add(const TensorSource& source, const std::string& name);
  /// Reads all tensors. Continues after a problem. Call once, after all add().
  /// @param absent  files to leave out
  void read(const std::set<std::string>& absent = {});

  /// A chunk of a tensor that was added.
  struct NamedChunk {
    PumpTensor* tensor;
    std::size_t number;               ///< index of the chunk in its tensor
    std::string name;                 ///< title of the tensor
    std::string error{};              ///< why it could not be read
    bool unread = false;              ///< `error` is an I/O error
    bool wrong = false;               ///< the checksum is wrong
    std::int64_t non_finite = kNone;  ///< first non-finite element, counted like Chunk::begin

    const Chunk& chunk() const { return tensor->record->chunks[number]; }
  };
  /// Chunks in a file of the sources.
  std::vector<const NamedChunk*> chunks_in(const std::string& file) const;

  VerifyReport report;

 private:
  static constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();
  void judge(const NamedChunk& named);

  const VerifyOptions& options_;
  std::vector<std::unique_ptr<PumpTensor>> tensors_;
  std::vector<NamedChunk> chunks_;                           // in the order of add(), by element
  std::map<std::string, std::vector<std::size_t>> by_file_;  // indices into chunks_
};

/// Reads tensors of a source. Those whose description is damaged are problems, too.
VerifyReport verify_tensors(const TensorSource& source, const std::vector<std::string>& names,
                            const VerifyOptions& options = {});

}  // namespace tessera::io
