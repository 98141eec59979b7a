#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/shape.h"
#include "io/base/byte_range.h"
#include "io/pickle/pickle.h"
#include "io/zip/zip.h"

namespace tessera::io {

/// Names of a dtype in PyTorch, of its PyTorch storage class, and in safetensors; empty: no name.
struct TorchDType {
  std::string_view name, storage, safetensors;
};
inline constexpr TorchDType kTorchDTypes[] = {
    {"float64", "DoubleStorage", "F64"},
    {"float32", "FloatStorage", "F32"},
    {"bfloat16", "BFloat16Storage", "BF16"},
    {"float16", "HalfStorage", "F16"},
    {"int64", "LongStorage", "I64"},
    {"int32", "IntStorage", "I32"},
    {"int16", "ShortStorage", "I16"},
    {"int8", "CharStorage", "I8"},
    {"uint64", "", "U64"},
    {"uint32", "", "U32"},
    {"uint16", "", "U16"},
    {"uint8", "ByteStorage", "U8"},
    {"bool", "BoolStorage", "BOOL"},
    {"complex32", "", ""},
    {"complex64", "ComplexFloatStorage", "C64"},
    {"complex128", "ComplexDoubleStorage", ""},
    {"float4_e2m1fn_x2", "", ""},
    {"float8_e4m3fn", "", "F8_E4M3"},
    {"float8_e5m2", "", "F8_E5M2"},
    {"float8_e4m3fnuz", "", "F8_E4M3FNUZ"},
    {"float8_e5m2fnuz", "", "F8_E5M2FNUZ"},
    {"float8_e8m0fnu", "", "F8_E8M0"},
};

/// Maximum bytes of the pickle of a state dict.
inline constexpr std::int64_t kMaxTorchDict = std::int64_t{256} << 20;

/// safetensors name of a PyTorch dtype ("F32" for "float32"); empty if there is none.
std::string_view safetensors_from_torch(std::string_view name);

/// A tensor in a torch.save archive, and the location of its bytes.
struct TorchTensor {
  std::string_view dtype;      ///< PyTorch's name
  DType carrier = DType::F32;  ///< same dtype, or the integer of the same size if tessera lacks it
  Shape shape;
  Strides strides;                 ///< in elements, none negative
  std::int64_t begin = 0;          ///< offset of the first element in the archive, in bytes
  std::int64_t storage_begin = 0;  ///< range of the storage around it in the archive, in bytes
  std::int64_t storage_end = 0;
  std::optional<std::uint32_t> crc32;  ///< of the storage; empty if not recorded
};

/// A call that makes a pickled tensor; null: not one.
struct TorchCall {
  const PickleGlobal* function = nullptr;
  const PickleValue* arguments = nullptr;
};
/// The call that makes a tensor, without what wraps it: a parameter, or attributes of the tensor.
TorchCall rebuild_call(const PickleValue& value);
/// Whether TorchArchive::tensor() reads it: a dense tensor, whatever wraps it.
bool is_plain_tensor(const PickleValue& value);

/// A torch.save archive: a zip file of a pickle and of the storages that its tensors name. Reads the
/// zip directory and the pickle, but no tensor data, and executes nothing: see Pickle.
class TorchArchive {
 public:
  /// @param archive     must outlive this
  /// @param max_pickle  maximum bytes of the pickle
  /// @param more        accepted globals besides those of plain tensors and dicts
  /// @throws Unsupported if it is another file or big-endian, or as Pickle; CorruptCheckpoint, IoError
  TorchArchive(const ByteRange& archive, std::int64_t max_pickle,
               std::span<const PickleGlobal> more = {},
               UnknownGlobals unknown = UnknownGlobals::Refuse);
  TorchArchive(const TorchArchive&) = delete;
  TorchArchive& operator=(const TorchArchive&) = delete;

  const PickleValue& root() const { return pickle_->root(); }
  std::int64_t pickle_bytes() const { return pickle_bytes_; }
  /// @param value  one with is_plain_tensor()
  /// @param name   of the value, for messages; empty: the root
  /// @throws Unsupported on another object, a dtype that safetensors lacks too, or a pending
  ///         conjugation or negation; CorruptCheckpoint
  TorchTensor tensor(const PickleValue& value, const std::string& name) const;

 private:
  const ByteRange& archive_;
  const std::string where_;
  std::vector<PickleGlobal> known_;
  ZipDirectory directory_;
  std::string folder_;
  std::int64_t pickle_bytes_ = 0;
  std::optional<Pickle> pickle_;
};

/// @throws Unsupported, with advice, if a file is a pointer of Git LFS, or no zip archive
void require_torch_archive(const ByteRange& archive);

/// Reads the description of the single tensor in a torch.save archive: the zip directory and the
/// pickle data.pkl, but no tensor data. Executes nothing: see Pickle.
/// @throws Unsupported on a dtype that safetensors lacks too, big-endian data, a pending
///         conjugation or negation, or another object than one tensor; CorruptCheckpoint, IoError
TorchTensor read_torch_tensor(const ByteRange& archive);

}  // namespace tessera::io
