#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace tessera::io {

/// @throws InvalidArgument unless [begin, begin + count) is inside [0, size]
void check_token_range(std::int64_t begin, std::int64_t count, std::int64_t size);

/// A sequence of token ids with random access. Immutable and thread-safe.
class TokenSource {
 public:
  virtual ~TokenSource() = default;
  virtual std::int64_t size() const = 0;
  /// Writes tokens [begin, begin + count) to dst.
  /// @throws InvalidArgument outside [0, size()]; IoError if the file is unreadable, truncated, or
  ///   has an id outside the vocabulary
  virtual void read(std::int64_t begin, std::int64_t count, std::int32_t* dst) const = 0;
  /// Starts reading tokens [begin, begin + count) into the page cache, without waiting.
  /// @throws InvalidArgument outside [0, size()]
  virtual void prefetch(std::int64_t begin, std::int64_t count) const {
    check_token_range(begin, count, size());
  }
};
using TokenSourcePtr = std::shared_ptr<const TokenSource>;

/// Tokens [begin, end) of a source. @throws InvalidArgument unless 0 <= begin <= end <= size
TokenSourcePtr slice_tokens(TokenSourcePtr source, std::int64_t begin, std::int64_t end);
/// @throws InvalidArgument if there are no sources
TokenSourcePtr concatenate_tokens(std::vector<TokenSourcePtr> sources);
TokenSourcePtr tokens_in_memory(std::vector<std::uint16_t> tokens);
/// Takes 2 bytes a token if all ids are below 65536, else 4.
TokenSourcePtr token_ids_in_memory(const std::vector<std::int32_t>& ids);
/// Largest id; -1 if the source is empty. Reads the whole source.
std::int32_t max_token_id(const TokenSource& source);

}  // namespace tessera::io
