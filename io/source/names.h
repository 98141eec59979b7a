#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::io {

/// Rules that derive the names of a model's tensors from names in another program's checkpoint.
struct NameRules {
  /// Remove the outermost key of a nested dict from names of weights, and the parts added by
  /// wrappers: `_orig_mod` (torch.compile), `_fsdp_wrapped_module` and `_checkpoint_wrapped_module`
  /// anywhere between dots, and all leading `model.` and `module.`.
  bool strip_wrappers = true;
  /// If not empty, replaces strip_wrappers: removes each prefix once, in this order.
  std::vector<std::string> prefixes = {};
  /// Maximum number of leading `model.` that strip_wrappers removes from names of weights, and from
  /// those inside names of optimizer state; a negative number is added instead. Empty: removes all.
  struct ModelLevels {
    int weights = 0, state = 0;
  };
  std::optional<ModelLevels> model_levels = {};
};

/// Role of a tensor in a training run.
enum class TensorRole {
  Weight,
  OptimizerState,
  Other,  ///< other state of the training loop: a counter, a random generator
};

struct TensorName {
  std::string source;  ///< name in the checkpoint
  std::string name;    ///< of a weight: from the rules; of state: "exp_avg/NAME", or unchanged
  TensorRole role = TensorRole::Weight;
};

/// Derives the role of a tensor and its name in a model from its name in the checkpoint. Keys such
/// as `optimizer`, `optimizers`, `optimizer_0` and `optim` contain optimizer state:
/// `optimizer.state.NAME.exp_avg` becomes `exp_avg/NAME`. Keys such as `train_state`,
/// `lr_scheduler` and `dataloader` contain other state. If a nested dict has the key `model`, its
/// other keys contain no weights.
/// @param top_key  outermost key of the tensor's path; empty for a flat dict
/// @param keyed    whether the checkpoint has tensors under the top key `model` or a synonym
TensorName classify(std::string_view source, std::string_view top_key, bool keyed,
                    const NameRules& rules);

/// Name and key of a tensor in another program's checkpoint.
struct KeyedName {
  std::string_view name, top_key;  ///< see classify()
};

/// Nesting of the saved dict.
struct NameNesting {
  /// Key that contains model and optimizer, such as `app` in PyTorch's recipe (`app.model.X`,
  /// `app.optim.state.X.exp_avg`) and `state` of Composer; empty if there is none.
  std::string outer = {};
  bool keyed = false;  ///< see classify(); refers to the keys inside `outer` if there is one
};

/// @param names  of all tensors
NameNesting find_nesting(const std::vector<KeyedName>& names);

/// As above, but removes the outer key first. Prefixes of the rules apply to full names of weights.
TensorName classify(const KeyedName& tensor, const NameNesting& nesting, const NameRules& rules);

/// @param names  names of weights in the checkpoint
/// @return prefixes of the rules that match none of the names
std::vector<std::string> unused_prefixes(const std::vector<std::string_view>& names,
                                         const NameRules& rules);

/// Number of leading `model.` to remove so that names become those of Hugging Face. For weights: as
/// many as all names have, but one less if a decoder without head would remain, unless the model is
/// headless (`model.layers.0...` keeps `model.`; a tied head is not stored). For state: as many as
/// make its names match those of weights.
/// @param names     names of all tensors, from rules with model_levels of 0
/// @param headless  whether the model has no head, such as LlamaModel
NameRules::ModelLevels count_model_levels(const std::vector<TensorName>& names, bool headless);

/// @throws InvalidArgument naming both if two tensors of a role would get one name, or if a name
///         would be empty
void check_distinct(const std::vector<TensorName>& names, const std::string& source);

/// Whether a name matches one of the shell patterns (`*` also matches dots and slashes, `?`,
/// `[...]`), or there are no patterns.
bool is_chosen(const std::vector<std::string>& patterns, const std::string& name);
/// @param option  option that has the patterns, for messages
/// @param of      directory that has the names, for messages
/// @throws InvalidArgument listing all patterns that match no name
void check_patterns(const std::vector<std::string>& patterns, const std::vector<std::string>& names,
                    std::string_view option, std::string_view of);

}  // namespace tessera::io
