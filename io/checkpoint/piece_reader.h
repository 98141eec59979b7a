#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "io/checkpoint/open_files.h"
#include "io/checkpoint/reader.h"

namespace tessera::io {

/// Elements [begin, end) of a tensor in row-major order, and the checksum of their bytes.
struct PieceSum {
  std::int64_t begin = 0, end = 0;
  std::uint64_t crc64 = 0;
};

/// Reads tensors of a checkpoint in pieces that threads take in any order, each byte once:
/// checksums of pieces combine to those of chunks, so that what was read can be verified when all
/// of it has been. Nothing that is made of it may be used before. The reader must outlive this.
class PieceReader {
 public:
  explicit PieceReader(const CheckpointReader& reader) : reader_(reader), files_(reader.path()) {}

  const CheckpointReader& checkpoint() const { return reader_; }
  /// Where pieces have to end, ascending: the first elements of all chunks but the first, and the
  /// number of elements. A tensor that is stored in boxes has no other ends than its own.
  static std::vector<std::int64_t> ends(const TensorRecord& tensor);

  /// Reads pieces in the stored dtype, each where the one before it ends; none may reach over one
  /// of ends(). What lies in one piece in a file is read at once. Tensors stored in boxes are
  /// verified here, and with chunks that are read more than once.
  /// @param pieces  receive their checksums. @throws IoError, CorruptCheckpoint
  void read(Section section, const std::string& name, const TensorRecord& tensor,
            std::span<PieceSum> pieces, void* out);
  /// The same of one piece. @return its checksum
  std::uint64_t read(Section section, const std::string& name, const TensorRecord& tensor,
                     std::int64_t begin, std::int64_t end, void* out) {
    PieceSum piece{begin, end};
    read(section, name, tensor, std::span(&piece, 1), out);
    return piece.crc64;
  }

  /// Checks the chunks of a tensor of which every element has been read.
  /// @param pieces  by first element, without gap
  /// @throws CorruptCheckpoint naming file, tensor and elements
  void verify(Section section, const std::string& name, const TensorRecord& tensor,
              std::span<const PieceSum> pieces) const;

 private:
  const CheckpointReader& reader_;
  OpenFiles files_;
};

/// Whether chunks of a tensor lie in boxes other than the whole of it.
bool is_boxed(const TensorRecord& tensor);

}  // namespace tessera::io
