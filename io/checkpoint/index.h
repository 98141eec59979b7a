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
#include "io/base/json.h"

namespace tessera::io {

inline constexpr std::string_view kCheckpointFormat = "tessera-checkpoint";
inline constexpr int kCheckpointVersion = 1;
inline constexpr int kMaxWorldSize = 99'999;  // a shard's name has five digits
inline constexpr std::int64_t kMaxIndexBytes = std::int64_t{256} << 20;

/// What of a training run a tensor is. The optimizer section of a checkpoint holds both moments.
enum class Section { Model, ExpAvg, ExpAvgSq };
inline constexpr Section kSections[] = {Section::Model, Section::ExpAvg, Section::ExpAvgSq};
/// "model", "optimizer/exp_avg", "optimizer/exp_avg_sq": also the prefix of names in shards.
std::string_view section_name(Section section);

/// A block of a tensor. In elements, one value per dim of the tensor.
struct Box {
  Shape offsets, shape;
  friend bool operator==(const Box&, const Box&) = default;
};

/// A contiguous range of elements, in row-major order, of a box of a tensor, and where it lies.
struct Chunk {
  std::string file;             ///< name inside the checkpoint directory
  std::int64_t byte_begin = 0;  ///< from the start of the file
  std::int64_t byte_end = 0;
  std::int64_t begin = 0;  ///< first element, counted inside the box
  std::int64_t end = 0;
  std::optional<Box> box;   ///< absent: the whole tensor
  std::uint64_t crc64 = 0;  ///< of the bytes
};

struct TensorRecord {
  DType dtype = DType::F32;
  Shape shape;
  std::vector<Chunk> chunks;  ///< by box, then by first element; cover every element exactly once
};
using TensorMap = std::map<std::string, TensorRecord>;

struct OptimizerSection {
  std::int64_t step = 0;  ///< updates made so far, for bias correction
  TensorMap exp_avg, exp_avg_sq;
};

/// The bytes of a shard before its data.
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
  std::string created;                         ///< UTC, "2026-01-31T12:00:00Z"
  std::string tessera_version;                 ///< of the writer
  Json model_config;                           ///< the "model" section of the run's configuration
  std::map<std::string, std::int64_t> files;   ///< shards and their sizes in bytes
  std::map<std::string, ShardHeader> headers;  ///< of those shards whose index tells of it
  std::optional<TensorMap> model;
  std::optional<OptimizerSection> optimizer;
  std::optional<TrainerSection> trainer;

  /// Null if the checkpoint does not hold that section.
  const TensorMap* tensors(Section section) const;
  TensorMap* tensors(Section section);
};

/// What an index says of one tensor does not hold together.
class CorruptTensor : public CorruptCheckpoint {
 public:
  /// @param begin, end  elements that are in no chunk, or in two, counted in the box that `what`
  /// names, if it names one; or equal
  CorruptTensor(std::string tensor, std::int64_t begin, std::int64_t end, const std::string& what)
      : CorruptCheckpoint("{}", what), tensor_(std::move(tensor)), begin_(begin), end_(end) {}
  /// With its section: "model/wte.weight".
  const std::string& tensor() const { return tensor_; }
  std::int64_t begin() const { return begin_; }
  std::int64_t end() const { return end_; }

 private:
  std::string tensor_;
  std::int64_t begin_, end_;
};

/// A file of a checkpoint is whole, but of a format that only a newer tessera reads: nothing is
/// broken, and nobody is to go on without it unasked.
class NewerFormat : public CorruptCheckpoint {
 public:
  NewerFormat(const std::string& file, std::int64_t version, std::int64_t known)
      : CorruptCheckpoint(
            "{} has format version {}; this build reads up to {}: use a newer tessera", file,
            version, known) {}
};

/// Whether a text may be a run id: 1 to 100 letters, digits, '.', '_' or '-'.
bool is_run_id(std::string_view text);

/// Parses and validates an index completely; touches no other file. An index without a checksum of
/// its own, as tessera wrote them at first, is read unchecked, but may have no unknown field.
/// @param source  named in errors
/// @throws CorruptCheckpoint naming the field, what was expected and what was found; CorruptTensor
/// if it is a tensor's; NewerFormat unless its checksum is wrong: then it may be damage
CheckpointIndex parse_index(std::string_view text, const std::string& source);

/// Text of index.json, with its checksum. parse_index(format_index(i)) is i.
std::string format_index(const CheckpointIndex& index);

/// Sorts chunks by box, then by first element, and checks that they cover the tensor exactly once.
/// @param where  named in errors. @throws CorruptCheckpoint on a gap, an overlap, or a chunk
///               outside its box or the tensor
void check_coverage(TensorRecord& tensor, const std::string& where);

/// CRC-64 of the tensor's bytes in row-major order, from the checksums of its chunks; empty if a
/// box other than the whole tensor is among them.
std::optional<std::uint64_t> tensor_checksum(const TensorRecord& tensor);

}  // namespace tessera::io
