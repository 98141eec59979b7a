#include "io/deepspeed/deepspeed_source.h"

#include "core/base/error.h"
#include "io/deepspeed/files.h"
#include "io/deepspeed/states.h"

namespace tessera::io {

std::unique_ptr<ShardedSource> open_deepspeed(const fs::path& dir, bool moments) {
  const DeepSpeedFiles files = find_deepspeed(dir);
  DeepSpeedStates states;
  for (const std::string& name : files.models) {
    const File file = File::open(files.run / name);
    states.add(name, read_deepspeed_model(ByteRange(file, 0, file.size())));
  }
  const DeepSpeedModel& model = states.model();
  require<CorruptCheckpoint>(
      model.zero == !files.optimizers.empty(),
      "{} is of a run {} ZeRO, but the folder has {} files of its optimizer: "
      "the save was not finished, or files of two saves are mixed",
      (files.run / files.models.front()).string(), model.zero ? "with" : "without",
      files.optimizers.size());
  for (const std::string& name : files.optimizers) {
    const File file = File::open(files.run / name);
    states.add(name, read_deepspeed_optimizer(ByteRange(file, 0, file.size())));
  }
  require<CorruptCheckpoint>(
      files.models.size() == (states.stage() == 3 ? files.optimizers.size() : 1),
      "{} has {} files of model states and {} of optimizer states, but ZeRO-{} writes {}: files "
      "are "
      "missing, or of different saves",
      (files.run / files.models.front()).parent_path().string(), files.models.size(),
      files.optimizers.size(), states.stage(),
      states.stage() == 3 ? "one of each per rank" : "one of model states");
  auto source = std::make_unique<ShardedSource>(
      files.run, states.stage() == 0 ? "DeepSpeed checkpoint without ZeRO"
                                     : fmt::format("DeepSpeed ZeRO-{} checkpoint", states.stage()));
  std::vector<std::string> left_out;
  for (DeepSpeedTensor& tensor : states.cut(moments)) {
    const bool weight = tensor.moment.empty();
    const std::string name =
        weight ? tensor.name : fmt::format("optimizer.state.{}.{}", tensor.name, tensor.moment);
    if (!weight && !moments) {
      left_out.push_back(name);
      continue;
    }
    source->add(name, tensor.dtype, safetensors_from_torch(tensor.dtype), tensor.shape,
                std::move(tensor.blocks), weight ? "module" : "optimizer");
  }
  source->set_left_out(std::move(left_out));
  source->set_optimizer_step(states.optimizer_step());
  source->set_hyperparameters([found = states.hyperparameters()] { return found; });
  source->finish(states.files(), model.objects, false);
  return source;
}

}  // namespace tessera::io
