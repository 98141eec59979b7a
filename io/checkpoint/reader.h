#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "core/base/error.h"
#include "io/base/file.h"
#include "io/checkpoint/index.h"

namespace tessera::io {

/// A file that the index lists is missing, or is not as the index says.
class CorruptFile : public CorruptCheckpoint {
 public:
  /// @param file  its name inside the checkpoint directory
  CorruptFile(std::string file, const std::string& what)
      : CorruptCheckpoint("{}", what), file_(std::move(file)) {}
  const std::string& file() const { return file_; }

 private:
  std::string file_;
};

/// A committed checkpoint, open for reading. Cheap to copy (copies share what they verified).
/// Threads may read at once.
///
/// No byte reaches the caller unverified: a chunk is read through and checked on first touch, also
/// if a part of it is asked for, and then no more.
class CheckpointReader {
 public:
  /// Reads and validates the index; looks whether all files are there in their full size.
  /// @param dir  the checkpoint directory itself; see open_checkpoint for runs
  /// @throws CorruptCheckpoint naming the field that does not fit, CorruptFile, IoError
  static CheckpointReader open(const fs::path& dir);

  const fs::path& path() const;
  const CheckpointIndex& index() const;
  bool has(Section section) const { return index().tensors(section) != nullptr; }

  /// Tensors of a section by name. @throws InvalidArgument that tells what to do if the checkpoint
  /// does not hold the section
  const TensorMap& tensors(Section section) const;
  /// @throws InvalidArgument also if there is no such tensor
  const TensorRecord& tensor(Section section, const std::string& name) const;

  /// Reads elements [begin, end) of a tensor, in row-major order, converted to `dtype`.
  /// @param out  room for end - begin elements of dtype
  /// @throws InvalidArgument on a range outside the tensor, Unsupported if the dtypes do not
  /// convert
  ///         (f32, bf16, f16 to f32, bf16, or equal), IoError, CorruptCheckpoint naming file,
  ///         section, tensor and element range on a wrong checksum
  void read(Section section, const std::string& name, std::int64_t begin, std::int64_t end,
            void* out, DType dtype) const;

  /// Receives elements [begin, begin + n) in the stored dtype.
  using Sink = std::function<void(std::int64_t begin, const void* data, std::int64_t n)>;
  /// Passes a whole tensor, in order, through a buffer of at most `buffer_bytes`. Each chunk's
  /// checksum is checked at its end, so the sink has seen data of a chunk that turns out wrong:
  /// what it made of it must not be used if this throws.
  void stream(Section section, const std::string& name, std::size_t buffer_bytes,
              const Sink& sink) const;

  /// A shard, open for reading, whose first bytes are those that the index tells of.
  /// @throws IoError, CorruptCheckpoint
  std::shared_ptr<const File> file(const std::string& name) const;
  /// @throws CorruptCheckpoint that names file, section, tensor, elements and bytes
  [[noreturn]] void fail_checksum(Section section, const std::string& tensor,
                                  const Chunk& chunk) const;

  /// Reads a chunk piece by piece; begin counts inside the chunk's box.
  /// @return whether its checksum is right
  bool scan(const TensorRecord& tensor, const Chunk& chunk, std::size_t buffer_bytes,
            const Sink& sink) const;

  /// Content of trainer.json, verified. @throws InvalidArgument if the checkpoint has none
  std::string trainer_json() const;

  /// Fingerprint of the model's content, "crc64:...": equal for equal weights whatever the world
  /// size they were saved at. CRC-64 over names, dtypes, shapes and tensor checksums in order of
  /// names; see io/FORMAT.md. Reads data only if a tensor is stored in boxes.
  std::string digest() const;

 private:
  struct State;
  explicit CheckpointReader(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

}  // namespace tessera::io
