#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "io/base/file.h"
#include "io/checkpoint/index.h"
#include "io/pump/tensor_source.h"

namespace tessera::io {

/// Thrown if a file that the index lists is missing, or differs from the index.
class CorruptFile : public CorruptCheckpoint {
 public:
  /// @param file  name inside the checkpoint directory
  CorruptFile(std::string file, const std::string& what)
      : CorruptCheckpoint("{}", what), file_(std::move(file)) {}
  const std::string& file() const { return file_; }

 private:
  std::string file_;
};

/// Describes how a file differs from its size in the index: "is missing, but the index lists it".
/// Empty if it does not differ. @throws IoError if the file cannot be examined
std::string compare_file(const fs::path& path, std::int64_t size);

/// Weights of a checkpoint: as they were trained, or their moving average (kAverageSection).
enum class WeightKind : std::uint8_t { Trained, Average };

/// A committed checkpoint, open for reading. Cheap to copy. Threads may read concurrently.
/// The first read of a chunk verifies the whole chunk.
class CheckpointReader {
 public:
  /// Reads and validates the index; checks that all files exist in their full size.
  /// @param dir  the checkpoint directory itself; see open_checkpoint for runs
  /// @throws CorruptCheckpoint naming the wrong field, CorruptFile, IoError
  static CheckpointReader open(const fs::path& dir);

  /// The same checkpoint with the moving average in the place of each weight that has one, in the model
  /// section. @throws InvalidArgument, with advice, if it holds none
  CheckpointReader with(WeightKind weights) const;

  const fs::path& path() const;
  const CheckpointIndex& index() const;
  bool has(const Section& section) const { return index().tensors(section) != nullptr; }

  /// Tensors of a section by name. @throws InvalidArgument, with advice, if the checkpoint lacks
  /// the section
  const TensorMap& tensors(const Section& section) const;

  /// Sections of optimizer state. @throws InvalidArgument, with advice, if there are none
  std::vector<Section> states() const;

  /// Tensors of a section as a source for the pump; valid while this reader or a copy exists.
  /// @throws as tensors()
  const TensorSource& source(const Section& section) const;
  void read(const Section& section, const std::string& name, std::int64_t begin, std::int64_t end,
            void* out, DType dtype) const {
    source(section).read(name, begin, end, out, dtype);
  }

  /// Content of trainer.json, verified. @throws InvalidArgument if the checkpoint has none
  std::string trainer_json() const;

  /// Fingerprint of the weights, "crc64:...", independent of the world size. CRC-64 over names,
  /// dtypes, shapes and tensor checksums in order of names; see io/FORMAT.md. Reads data only if a
  /// tensor is stored in boxes.
  std::string digest() const;

 private:
  struct State;
  explicit CheckpointReader(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

}  // namespace tessera::io
