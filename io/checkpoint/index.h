#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/error.h"
#include "core/base/shape.h"
#include "io/pump/chunk.h"

namespace tessera::io {

inline constexpr std::string_view kCheckpointFormat = "tessera-checkpoint";
inline constexpr int kCheckpointVersion = 1;
inline constexpr int kMaxWorldSize = 99'999;  // names of shards have five digits
inline constexpr std::int64_t kMaxIndexBytes = std::int64_t{256} << 20;

/// Role of a tensor: a weight, or a state tensor that the optimizer keeps for a weight.
struct Section {
  std::string state;  ///< "exp_avg"; empty: weights
  bool is_model() const { return state.empty(); }
  /// "model" or "optimizer/STATE": the prefix of tensor names in shards.
  std::string name() const { return is_model() ? "model" : "optimizer/" + state; }
  // clang-tidy 14 mistakes its 0 for a null pointer. NOLINTNEXTLINE(modernize-use-nullptr)
  auto operator<=>(const Section&) const = default;
};
inline const Section kModelSection{};
/// Moving average of the trained weights, kept by any optimizer.
inline const Section kAverageSection{"ema"};

/// Whether a name of an optimizer's state tensor is valid: 1 to 100 letters, digits or '_'.
bool is_state_name(std::string_view name);

using TensorMap = std::map<std::string, TensorRecord>;

struct OptimizerSection {
  std::int64_t step = 0;                   ///< updates made so far, for bias correction
  std::map<std::string, TensorMap> state;  ///< by name of the state tensor
};

/// The header of a shard: all bytes before its tensor data.
struct ShardHeader {
  std::int64_t size = 0;  ///< bytes
  std::uint64_t crc64 = 0;
};

struct TrainerSection {
  std::string file;
  std::int64_t size = 0;  ///< bytes
  std::uint64_t crc64 = 0;
};

/// Content of a checkpoint's index.json; io/FORMAT.md defines it.
struct CheckpointIndex {
  std::int64_t step = 0;
  int world_size = 1;
  std::string run_id;
  std::string created;              ///< UTC, "2026-01-31T12:00:00Z"
  std::string tessera_version;      ///< version of the program that wrote it
  std::string model_config = "{}";  ///< JSON of the "model" section of the run's configuration
  std::map<std::string, std::int64_t> files;   ///< shards and their sizes in bytes
  std::map<std::string, ShardHeader> headers;  ///< by shard; older indexes lack some
  std::optional<TensorMap> model;
  std::optional<OptimizerSection> optimizer;
  std::optional<TrainerSection> trainer;

  /// The model, if present, then the optimizer's state tensors.
  std::vector<Section> tensor_sections() const;
  /// Null if the checkpoint has no such section.
  const TensorMap* tensors(const Section& section) const;
  TensorMap* tensors(const Section& section);
};

/// Thrown for an inconsistent index entry of one tensor.
class CorruptTensor : public CorruptCheckpoint {
 public:
  /// @param begin, end  elements that are in no chunk or in two, relative to the box if `what`
  ///                    names one; equal for other errors
  CorruptTensor(std::string tensor, std::int64_t begin, std::int64_t end, const std::string& what)
      : CorruptCheckpoint("{}", what), tensor_(std::move(tensor)), begin_(begin), end_(end) {}
  /// "model/wte.weight"
  const std::string& tensor() const { return tensor_; }
  std::int64_t begin() const { return begin_; }
  std::int64_t end() const { return end_; }

 private:
  std::string tensor_;
  std::int64_t begin_, end_;
};

/// Thrown for an intact file in a newer format. Callers must not silently skip it.
class NewerFormat : public CorruptCheckpoint {
 public:
  NewerFormat(const std::string& file, std::int64_t version, std::int64_t known)
      : CorruptCheckpoint(
            "{} has format version {}; this build reads up to {}: use a newer tessera", file,
            version, known) {}
};

/// Current time in the format of CheckpointIndex::created.
std::string utc_now();

/// Whether a text is a valid run id: 1 to 100 letters, digits, '.', '_' or '-'.
bool is_run_id(std::string_view text);

/// Parses and validates an index; reads no other file. An index of an early version, without a
/// checksum, must have no unknown field.
/// @param source  named in errors
/// @throws CorruptCheckpoint naming the field, the expected and the found value; CorruptTensor for
///         an error in one tensor; NewerFormat if the checksum is right
CheckpointIndex parse_index(std::string_view text, const std::string& source);

/// Text of index.json, including its checksum. Inverse of parse_index().
std::string format_index(const CheckpointIndex& index);

/// Sorts chunks by box, then by first element, and checks that they cover the tensor exactly once.
/// @param where  named in errors
/// @throws CorruptCheckpoint on a gap, an overlap, or a chunk outside its box or the tensor
void check_coverage(TensorRecord& tensor, const std::string& where);

/// Appends chunks for elements [begin, end), which are stored in a file from byte `offset`.
/// @param chunk_elements  elements of each chunk but the last
/// @param crcs            checksum of each chunk
void add_chunks(TensorRecord& tensor, const std::string& file, std::int64_t offset,
                std::int64_t begin, std::int64_t end, std::int64_t chunk_elements,
                const std::vector<std::uint64_t>& crcs);

/// CRC-64 of the tensor's bytes in row-major order, from the checksums of its chunks; empty if a
/// chunk has a box other than the whole tensor.
std::optional<std::uint64_t> tensor_checksum(const TensorRecord& tensor);

}  // namespace tessera::io
