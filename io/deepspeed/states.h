#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "io/source/sharded_source.h"

namespace tessera::io {

// Source of the format: DeepSpeed's runtime/engine.py, runtime/zero/stage_1_and_2.py,
// runtime/zero/stage3.py, runtime/bf16_optimizer.py and utils/zero_to_fp32.py (0.14 to 0.19).

template <typename T>
using Named = std::vector<std::pair<std::string, T>>;

/// A file `..._model_states.pt`: names and shapes of parameters, and tensors that ranks keep whole.
struct DeepSpeedModel {
  bool zero = false;                 ///< whether an optimizer of ZeRO has the parameters
  std::vector<Named<Shape>> groups;  ///< parameters of each group, in the order of its flat buffer
  Named<Shape> frozen;
  Named<TorchTensor> fragments;      ///< of frozen parameters: whole, or this rank's part (ZeRO-3)
  Named<TorchTensor> module;         ///< state dict; parameters are empty in ZeRO-3
  std::vector<std::string> buffers;  ///< names in `module`
  std::vector<std::pair<std::string, std::string>> shared;  ///< name, and name of the same tensor
  std::vector<std::string> objects;                         ///< keys of other entries
  std::int64_t step = 0;                                    ///< of training; 0: not recorded
};

/// A part of a group's flat buffer, and of the optimizer's state of its elements.
struct DeepSpeedPart {
  TorchTensor values;          ///< one-dimensional, contiguous
  Named<TorchTensor> moments;  ///< "exp_avg", ...; at least as long as `values`
};

/// A file `..._optim_states.pt`: one rank's parts.
struct DeepSpeedOptimizer {
  int stage = 0;           ///< of ZeRO
  std::int64_t ranks = 0;  ///< number of partitions
  std::vector<DeepSpeedPart> parts;
  /// Elements that follow each parameter of each group; empty: none (ZeRO-1 and 2).
  std::vector<std::vector<std::int64_t>> paddings;
  /// Settings of ParamGroup, and indices of the parts of the model's groups that have them.
  std::vector<std::pair<std::shared_ptr<const Json>, std::vector<std::int64_t>>> settings;
  std::vector<std::string> left_out;  ///< as in Hyperparameters
  bool too_many = false;              ///< as in Hyperparameters
  std::string steps;  ///< step counters of the optimizer; equal on all ranks of a save
};

/// @param archive  a whole file
/// @throws Unsupported if it holds something else or has experts; CorruptCheckpoint; IoError
DeepSpeedModel read_deepspeed_model(const ByteRange& archive);
DeepSpeedOptimizer read_deepspeed_optimizer(const ByteRange& archive);

/// A tensor of the training run, cut from flat buffers.
struct DeepSpeedTensor {
  std::string name, moment;  ///< moment: empty for a weight, else "exp_avg", ...
  std::string dtype;         ///< PyTorch's name
  Shape shape;
  std::vector<StoredBlock> blocks;  ///< file: index into files()
};

/// The files of a checkpoint.
class DeepSpeedStates {
 public:
  /// Adds files in the order of ranks, which with ZeRO-3 have one of each kind; else there is one
  /// model. @throws CorruptCheckpoint if the file is of another save than the first
  void add(std::string file, DeepSpeedModel model);
  void add(std::string file, DeepSpeedOptimizer optimizer);

  const DeepSpeedModel& model() const { return models_.front(); }
  /// Stage of ZeRO; 0: without it.
  int stage() const { return optimizers_.empty() ? 0 : optimizers_.front().stage; }
  /// Number of updates, if the optimizer records one for all of its parts.
  std::optional<std::int64_t> optimizer_step() const;
  /// Reads the groups of named weights; none if the files do not say which weights they have.
  Hyperparameters hyperparameters() const;
  /// Files of models, then of optimizers.
  std::vector<std::string> files() const;
  /// Cuts all tensors: weights of the optimizer in float32 and their moments; frozen parameters,
  /// buffers and, without ZeRO, all weights in the dtype of the module.
  /// @param moments  false: moments have no blocks, which are as many as those of weights
  /// @throws CorruptCheckpoint if files are missing, or shapes do not fill the flat buffers
  std::vector<DeepSpeedTensor> cut(bool moments = true) const;

 private:
  friend class DeepSpeedCutter;
  std::vector<std::string> model_files_, optimizer_files_;
  std::vector<DeepSpeedModel> models_;  // after the first: fragments only
  std::vector<DeepSpeedOptimizer> optimizers_;
};

}  // namespace tessera::io
