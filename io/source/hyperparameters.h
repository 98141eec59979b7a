#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/base/json.h"
#include "io/pickle/pickle.h"

namespace tessera::io {

/// Weights that an optimizer updates with the same hyperparameters.
struct ParamGroup {
  enum class Of {
    Named,     ///< `weights`
    All,       ///< all weights
    Matrices,  ///< weights of two or more dims
    Others,    ///< weights of fewer dims
  };
  /// An object by PyTorch's names: "lr", "betas", ...; null, booleans, finite numbers, texts and
  /// arrays of these, for lists and tuples.
  std::shared_ptr<const Json> settings;
  Of of = Of::All;
  std::vector<std::string> weights = {};
};

struct Hyperparameters {
  std::vector<ParamGroup> groups;
  std::vector<std::string> left_out;  ///< names of settings with values of other kinds
  bool too_many = false;  ///< more than HyperparametersReader reads: there are no groups

  /// Removes the number of updates from the settings, for optimizers that count them for all weights at
  /// once. @return empty if there is none, it is no count, or not the same in all groups
  std::optional<std::int64_t> take_step();
};

/// Collects the param_groups of torch.optim from the values of a training state. Executes nothing.
/// Memory: about 100 bytes for each weight and different setting, at most 64 MiB. If there are more,
/// or a group has more than 256 settings, it reads none.
class HyperparametersReader {
 public:
  HyperparametersReader();
  ~HyperparametersReader();
  HyperparametersReader(HyperparametersReader&&) noexcept;

  /// Whether a value of a state has hyperparameters, by the keys on the path to it:
  /// "optimizer.param_groups", "optimizer.param_groups.0.lr", or with FSDP's
  /// flatten_optimizer_state_dict "optimizer.param_groups.NAME.lr".
  static bool is_one(std::string_view name);
  /// Adds such a value.
  void add(std::string_view name, const PickleValue& value);
  /// Notes that a value cannot be read.
  void leave_out(std::string_view name);
  /// Makes finish() say that there are too many.
  void leave_out_all();
  bool is_full() const;
  /// Groups whose weights are named, by lists or by each weight. Call once.
  Hyperparameters finish();

  /// A group's settings, and the numbers of its weights; null if it is no dict. It is not in the
  /// groups of finish(), but counts, and what it leaves out is there.
  std::pair<std::shared_ptr<const Json>, std::vector<std::int64_t>> read_group(
      const PickleValue& group);

 private:
  struct Content;
  std::unique_ptr<Content> content_;
};

}  // namespace tessera::io
