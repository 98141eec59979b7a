#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/base/open_files.h"
#include "io/pump/tensor_source.h"
#include "io/source/hyperparameters.h"
#include "io/torch/torch_archive.h"

namespace tessera::io {

/// A block of a tensor, and the location of its elements or of the torch.save archive with them.
struct StoredBlock {
  Box box;
  std::uint32_t file = 0;   ///< index into a list of files
  std::int64_t offset = 0;  ///< bytes from the start of the file, or of `known`
  std::int64_t length = 0;  ///< bytes
  /// Where the elements are in the file, if that is known; else `archives` of finish() says how to
  /// find them.
  std::shared_ptr<const TorchTensor> known{};
  /// Whether the box has one dim and is of the flattened tensor, as parts of a flat buffer are.
  bool flat = false;
  bool zstd = false;  ///< whether the archive is compressed
  /// First dims of what is stored, which the box lacks: its position in them, and their extents.
  std::shared_ptr<const Box> lead{};
};
static_assert(sizeof(StoredBlock) <= 208, "checkpoints of 1,024 ranks have millions of blocks");

/// A tensor made of rows of another, or of one item of another that stacks several.
struct MadeTensor {
  std::string name, of;
  Shape item;  ///< position in the first dims of `of`, which the item lacks; empty: all of it
  std::vector<std::pair<std::int64_t, std::int64_t>> rows;  ///< first row and number; concatenated
  bool transposed = false;                                  ///< transposes the result, of two dims
};

/// Tensors of another program's sharded checkpoint, under their original names.
class ShardedSource final : public TensorSource {
 public:
  /// @param kind  format of the directory: "Hugging Face model", "PyTorch DCP", "Lightning FSDP
  ///              (PyTorch DCP)", "PyTorch DCP as safetensors", "PyTorch FSDP checkpoint of rank files", "DeepSpeed
  ///              ZeRO-3 checkpoint", ...; or of its file: "PyTorch Lightning checkpoint", "PyTorch
  ///              file"
  ShardedSource(fs::path dir, std::string kind)
      : dir_(std::move(dir)),
        config_dir_(dir_),
        kind_(std::move(kind)),
        where_(dir_.string()),
        open_files_(dir_) {}

  /// @param dtype              as in the source
  /// @param safetensors_dtype  safetensors name of the dtype; empty if there is none
  /// @param top_key            as in top_keys()
  void add(const std::string& name, const std::string& dtype, std::string_view safetensors_dtype,
           const Shape& shape, std::vector<StoredBlock> blocks, const std::string& top_key = "");
  /// @param files     names of the files of the blocks
  /// @param objects   as objects()
  /// @param archives  whether blocks are torch.save archives, not bare elements
  void finish(std::vector<std::string> files, std::vector<std::string> objects, bool archives);
  /// Replaces tensors by others, made of all their elements. Call after finish().
  /// @throws CorruptCheckpoint if the name of an item, "of[3]", is that of a tensor
  void make(std::vector<MadeTensor> made);
  void warn(std::vector<std::string> warnings) { warnings_ = std::move(warnings); }
  void warn_of_loss(std::vector<std::string> warnings) { loss_warnings_ = std::move(warnings); }
  void set_left_out(std::vector<std::string> moments) { left_out_ = std::move(moments); }
  void set_config_dir(fs::path dir) { config_dir_ = std::move(dir); }
  void set_where(std::string where) { where_ = std::move(where); }
  void set_optimizer_step(std::optional<std::int64_t> step) { optimizer_step_ = step; }
  void set_hyperparameters(std::function<Hyperparameters()> read) {
    hyperparameters_ = std::move(read);
  }
  std::shared_ptr<const File> file(const std::string& name) const { return open_files_.get(name); }

  const std::string& kind() const { return kind_; }
  /// Path for messages: path(), or the file of a source of one file.
  const std::string& where() const { return where_; }
  /// Directory of the model's config.json and tokenizer, if it has them; path() by default.
  const fs::path& config_dir() const { return config_dir_; }
  /// Names of entries that are not tensors.
  const std::vector<std::string>& objects() const { return objects_; }
  /// Names of moments that the caller of open_sharded did not ask for.
  const std::vector<std::string>& left_out() const { return left_out_; }
  /// Number of updates that the optimizer made, if it is recorded other than as a tensor.
  std::optional<std::int64_t> optimizer_step() const { return optimizer_step_; }
  /// Reads the optimizer's hyperparameters, with weights named as in its state; none if the source
  /// has none. @throws IoError, CorruptCheckpoint
  Hyperparameters hyperparameters() const {
    return hyperparameters_ ? hyperparameters_() : Hyperparameters();
  }
  /// A tensor of a dtype that tessera lacks.
  struct Unreadable {
    std::string name, dtype, top_key;  ///< dtype: its name in the source; top_key: see top_keys()
    Shape shape;
    std::string safetensors_dtype;  ///< safetensors name of the dtype; empty if there is none
    /// Integer dtype for copying the elements unchanged; empty: read() and record() throw.
    std::optional<DType> carrier;
    std::optional<std::uint32_t> file;  ///< index of the file of its first elements, if any
  };
  /// File of a tensor's first elements; the directory if it has none.
  fs::path file_of(const Unreadable& tensor) const {
    return tensor.file ? dir_ / files_[*tensor.file] : dir_;
  }
  /// Tensors that tensors() leaves out because of their dtype.
  const std::vector<Unreadable>& unreadable() const { return unreadable_; }
  /// Outermost key of each tensor of tensors() in the saved nested dict; empty for a flat dict or
  /// if unknown.
  const std::vector<std::string>& top_keys() const { return top_keys_; }
  /// Sentences about the data.
  const std::vector<std::string>& warnings() const { return warnings_; }
  /// Sentences about losses of data that only the expected shapes of a known model can detect.
  const std::vector<std::string>& loss_warnings() const { return loss_warnings_; }

  const fs::path& path() const override { return dir_; }
  const std::vector<TensorInfo>& tensors() const override { return infos_; }
  std::shared_ptr<const TensorRecord> record(const std::string& name) const override;
  File open_file(const std::string& name) const override { return open_files_.open(name); }
  /// Name of a tensor and, if make() made it, of the tensor with its elements.
  std::string title(const std::string& name) const override;

 private:
  struct StoredTensor {
    Shape shape;
    std::string dtype_name;    // in the source
    DType dtype = DType::F32;  // same dtype, or the integer of the same size
    std::vector<StoredBlock> blocks;
    std::size_t first_block = 0;  // index of blocks[0] among the blocks of all tensors
  };
  /// Location of a block's elements in its file.
  struct Location {
    std::int64_t begin = 0;                  ///< offset of the first element, in bytes
    std::shared_ptr<const Strides> strides;  ///< null: row-major in its box
    /// Bytes covered by the checksum, either the block or the storage around it.
    std::int64_t checked_begin = 0, checked_end = 0;
    std::optional<std::uint32_t> crc32;
    std::shared_ptr<const ZstdItem> zstd{};  ///< null: bytes are of the file, else decoded ones
  };
  const StoredTensor& find(const std::string& name) const;
  void add_items(const std::string& name, const std::vector<Shape>& items);
  // @param boxes  whether chunks have a box even if their elements are contiguous in the tensor
  TensorRecord stored_record(const std::string& name, bool boxes) const;
  Location locate(const std::string& name, const StoredTensor& tensor, std::size_t i) const;
  TorchTensor read_archive(const std::string& name, const StoredTensor& tensor,
                           const StoredBlock& block) const;

  const fs::path dir_;
  fs::path config_dir_;
  const std::string kind_;
  std::string where_;
  std::vector<TensorInfo> infos_;
  std::vector<std::string> top_keys_, objects_, files_, warnings_, loss_warnings_, left_out_;
  std::vector<Unreadable> unreadable_;
  std::map<std::string, StoredTensor> tensors_;  // and items of made_, named "of[3][5]"
  std::map<std::string, MadeTensor> made_;
  std::size_t block_count_ = 0;
  std::optional<std::int64_t> optimizer_step_;
  std::function<Hyperparameters()> hyperparameters_;
  bool archives_ = false;
  mutable OpenFiles open_files_;
  mutable StorageChecks checks_;
  mutable std::mutex mutex_;  // guards locations_ and decoded_
  mutable std::vector<std::optional<Location>> locations_;
  mutable std::map<std::pair<std::uint32_t, ZstdRange>, TorchTensor> decoded_;  // by file and range
  std::shared_ptr<ZstdPool> zstd_ = std::make_shared<ZstdPool>();
};

}  // namespace tessera::io
