#include "io/torch/torch_directory.h"

#include <set>
#include <vector>

#include "core/base/error.h"
#include "io/safetensors/directory.h"
#include "io/torch/saved_state.h"

namespace tessera::io {
namespace {

constexpr const char* kSingle = "pytorch_model.bin";
// FULL_STATE_DICT of accelerate: whole tensors; of the optimizer, by the names of the weights.
constexpr const char* kAccelerateFull = "pytorch_model_fsdp.bin";
constexpr const char* kAccelerateSecondFull = "pytorch_model_fsdp_1.bin";
constexpr const char* kAccelerateOptimizerFull = "optimizer.bin";
constexpr const char* kIndex = "pytorch_model.bin.index.json";

std::unique_ptr<ShardedSource> open_files(const fs::path& dir, std::vector<std::string> files,
                                          const std::string& kind) {
  auto source = std::make_unique<ShardedSource>(dir, kind);
  std::vector<std::string> objects;
  std::set<std::string> names;
  for (std::uint32_t number = 0; number < files.size(); ++number) {
    const auto file = source->file(files[number]);
    const SavedState state = read_saved_state(ByteRange(*file, 0, file->size()));
    for (const SavedTensor& tensor : state.tensors) {
      require<Unsupported>(!tensor.is_part, "{}: {} is a rank's part of a tensor",
                           (dir / files[number]).string(), tensor.name);
      require<CorruptCheckpoint>(names.insert(tensor.name).second, "{}: {} is stored twice",
                                 dir.string(), tensor.name);
      std::vector<StoredBlock> blocks;
      for (const SavedTensor::Stored& stored : tensor.stored)
        blocks.push_back(
            {stored.box, number, 0, 0, std::make_shared<const TorchTensor>(stored.tensor)});
      source->add(tensor.name, tensor.dtype, safetensors_from_torch(tensor.dtype), tensor.shape,
                  std::move(blocks), tensor.top_key);
    }
    objects.insert(objects.end(), state.objects.begin(), state.objects.end());
    if (!state.hyperparameters.groups.empty() || state.hyperparameters.too_many)
      source->set_hyperparameters([found = state.hyperparameters] { return found; });
  }
  source->finish(std::move(files), std::move(objects), false);
  return source;
}

}  // namespace

bool is_torch_directory(const fs::path& dir) {
  return is_there(dir / kSingle) || is_there(dir / kIndex) || is_there(dir / kAccelerateFull);
}

std::unique_ptr<ShardedSource> open_torch_file(const fs::path& dir, const std::string& name,
                                               const std::string& kind) {
  return open_files(dir, {name}, kind);
}

std::unique_ptr<ShardedSource> open_torch_directory(const fs::path& dir, bool moments) {
  constexpr const char* kKind = "Hugging Face model";
  if (is_there(dir / kSingle)) return open_files(dir, {kSingle}, kKind);
  if (!is_there(dir / kIndex)) {
    require(!is_there(dir / kAccelerateSecondFull), "{} holds several models; give one, such as {}",
            dir.string(), (dir / kAccelerateFull).string());
    std::vector<std::string> files{kAccelerateFull};
    const bool has_moments = is_there(dir / kAccelerateOptimizerFull);
    if (has_moments && moments) files.push_back(kAccelerateOptimizerFull);
    auto source = open_files(dir, files, "checkpoint of accelerate's FSDP");
    if (has_moments && !moments) source->set_left_out({kAccelerateOptimizerFull});
    return source;
  }
  const WeightMap map = read_weight_map(dir / kIndex);
  auto source = open_files(dir, map.files, kKind);
  std::set<std::string> found;
  for (const TensorInfo& info : source->tensors()) found.insert(info.name);
  for (const ShardedSource::Unreadable& tensor : source->unreadable()) found.insert(tensor.name);
  for (const auto& [name, file] : map.file_of)
    require<CorruptCheckpoint>(found.contains(name),
                               "{}: {} is not in {}, although the index says so", dir.string(),
                               name, file);
  return source;
}

}  // namespace tessera::io
