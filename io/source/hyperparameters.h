#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
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

  /// Removes the number of updates from the settings, for optimizers that count them for all weights at
  /// once. @return empty if there is none, or not the same in all groups
  std::optional<std::int64_t> take_step();
};

/// Collects the param_groups of torch.optim from the values of a training state. Executes nothing.
/// Memory: about 100 bytes for each setting of a weight, at most 256 MiB.
class HyperparametersReader {
 public:
  /// @param where  file or directory, named in errors
  explicit HyperparametersReader(std::string where);
  ~HyperparametersReader();
  HyperparametersReader(HyperparametersReader&&) noexcept;

  /// Whether a value of a state has hyperparameters, by the keys on the path to it:
  /// "optimizer.param_groups", "optimizer.param_groups.0.lr", or with FSDP's
  /// flatten_optimizer_state_dict "optimizer.param_groups.NAME.lr".
  static bool is_one(std::string_view name);
  /// Adds such a value. @throws CorruptCheckpoint if there is more than any optimizer has
  void add(std::string_view name, const PickleValue& value);
  /// Notes that a value cannot be read.
  void leave_out(std::string_view name);
  /// Groups whose weights are named, by lists or by each weight. Call once.
  Hyperparameters finish();

  /// A group's settings without its weights; null if it is no dict. @param left_out  receives names
  static std::shared_ptr<const Json> read_settings(const PickleValue& group,
                                                   std::vector<std::string>& left_out);

 private:
  struct Content;
  std::unique_ptr<Content> content_;
};

}  // namespace tessera::io
