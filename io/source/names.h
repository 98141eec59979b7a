#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::io {

/// How names of somebody else's checkpoint become names of a model's tensors.
struct NameRules {
  /// Remove what wrappers of a training program put into names: `_orig_mod` (torch.compile),
  /// `_fsdp_wrapped_module` and `_checkpoint_wrapped_module` wherever they stand between dots, and
  /// `model.` and `module.` at the beginning, as often as they stand there.
  bool strip_wrappers = true;
  /// Instead: each is removed, once and in this order, from the beginning of names that have it.
  std::vector<std::string> prefixes = {};
  /// How often `model.` is removed at most from the beginning of names of weights, and of the names
  /// that optimizer state has of them (less than 0: so many are put in front); empty: as often as
  /// it stands there. If it is said, the key of a dict of dicts that weights lie under is removed
  /// from their names before.
  struct ModelLevels {
    int weights = 0, state = 0;
  };
  std::optional<ModelLevels> model_levels = {};
};

/// What of a training run a tensor is.
enum class TensorRole {
  Weight,
  OptimizerState,
  Other,  ///< a counter, a random generator's state: what a loop keeps beside its model
};

struct TensorName {
  std::string source;  ///< as the checkpoint has it
  std::string name;    ///< of a weight: by the rules; of state: "exp_avg/NAME", or as it was
  TensorRole role = TensorRole::Weight;
};

/// Tells from a name what a tensor is, and what it is called in a model. Optimizer state is what
/// lies under `optimizer`, `optimizers`, `optimizer_0`, `optim` and the like;
/// `optimizer.state.NAME.exp_avg` becomes `exp_avg/NAME`. What lies under `train_state`,
/// `lr_scheduler`, `dataloader` and the like is neither. If some lie under the key `model` of a
/// dict of dicts, those under its other keys are no weights.
/// @param top_key  outermost key of the tensor's path; empty if the dict was flat
/// @param keyed    whether the checkpoint has tensors under the top key `model` or the like
TensorName classify(std::string_view source, std::string_view top_key, bool keyed,
                    const NameRules& rules);

/// A tensor of somebody else's checkpoint.
struct KeyedName {
  std::string_view name, top_key;  ///< as classify() takes them
};

/// How the dict that was saved was nested.
struct NameNesting {
  /// The key that model, optimizer and the like lie under, as `app` in PyTorch's own recipe
  /// (`app.model.X`, `app.optim.state.X.exp_avg`) and Composer's `state`; empty if none does.
  std::string outer = {};
  bool keyed = false;  ///< as classify() takes it; of what lies under `outer`, if there is one
};

/// @param names  of all tensors
NameNesting find_nesting(const std::vector<KeyedName>& names);

/// The same as above, of what lies below the outer key; prefixes of the rules are removed from
/// whole names of weights.
TensorName classify(const KeyedName& tensor, const NameNesting& nesting, const NameRules& rules);

/// Whether weights are kept under this key by those who nest their state.
bool is_model_key(std::string_view top_key);

/// A weight's name by the rules, but with the key of a dict of dicts; empty if nothing is left.
std::string strip_name(std::string_view source, const NameRules& rules);

/// @param names  of weights, as the checkpoint has them
/// @return the prefixes of the rules that strip_name() removes from none of them
std::vector<std::string> unused_prefixes(const std::vector<std::string_view>& names,
                                         const NameRules& rules);

/// How often `model.` is to be removed from names so that they are those that Hugging Face's
/// programs know: as often as the names of all weights begin with it, but not the last one where
/// what lies under it is a decoder without head (`model.layers.0...`; a tied head is not stored),
/// unless the model has none. Of state: so that it has its weights' names.
/// @param names     of all tensors, by rules whose model_levels are 0
/// @param headless  whether the model is one without head, such as LlamaModel
NameRules::ModelLevels count_model_levels(const std::vector<TensorName>& names, bool headless);

/// @throws InvalidArgument naming both if two tensors of the same role would have one name, or one
///         would have none
void check_distinct(const std::vector<TensorName>& names, const std::string& source);

/// Whether a name matches one of the shell patterns (`*`, which matches dots and slashes too, `?`
/// and `[...]`), or there are none.
bool is_chosen(const std::vector<std::string>& patterns, const std::string& name);
/// @param option  that gave the patterns; @param of  whose names these are. Both are for messages
/// @throws InvalidArgument that lists all patterns which fit no name
void check_patterns(const std::vector<std::string>& patterns, const std::vector<std::string>& names,
                    std::string_view option, std::string_view of);

}  // namespace tessera::io
