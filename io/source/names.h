#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::io {

/// Rules that turn names of another program's checkpoint into names of a model's tensors.
struct NameRules {
  /// Remove the parts that wrappers of a training program add: `_orig_mod` (torch.compile),
  /// `_fsdp_wrapped_module` and `_checkpoint_wrapped_module` anywhere between dots, and all leading
  /// `model.` and `module.`.
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

/// Role of a tensor in a training run.
enum class TensorRole {
  Weight,
  OptimizerState,
  Other,  ///< other state of the training loop: a counter, a random generator
};

struct TensorName {
  std::string source;  ///< as the checkpoint has it
  std::string name;    ///< of a weight: by the rules; of state: "exp_avg/NAME", or as it was
  TensorRole role = TensorRole::Weight;
};

/// Derives a tensor's role and its name in a model from its name in the checkpoint. Keys such as
/// `optimizer`, `optimizers`, `optimizer_0` and `optim` hold optimizer state:
/// `optimizer.state.NAME.exp_avg` becomes `exp_avg/NAME`. Keys such as `train_state`,
/// `lr_scheduler` and `dataloader` hold other state. If a dict of dicts has the key `model`, its
/// other keys hold no weights.
/// @param top_key  outermost key of the tensor's path; empty if the dict was flat
/// @param keyed    whether the checkpoint has tensors under the top key `model` or the like
TensorName classify(std::string_view source, std::string_view top_key, bool keyed,
                    const NameRules& rules);

/// A tensor of another program's checkpoint.
struct KeyedName {
  std::string_view name, top_key;  ///< as classify() takes them
};

/// Nesting of the saved dict.
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

/// Whether a name matches one of the shell patterns (`*` also matches dots and slashes, `?`,
/// `[...]`), or there are no patterns.
bool is_chosen(const std::vector<std::string>& patterns, const std::string& name);
/// @param option  flag that gave the patterns; @param of  owner of the names. Both for messages
/// @throws InvalidArgument listing all patterns that match no name
void check_patterns(const std::vector<std::string>& patterns, const std::vector<std::string>& names,
                    std::string_view option, std::string_view of);

}  // namespace tessera::io
