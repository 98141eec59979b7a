#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::io {

/// Rules that derive the names of a model's tensors from names in another program's checkpoint.
struct NameRules {
  /// Remove keys of the saved dict that contain the model (`model`, `app`), and the parts that
  /// wrappers add anywhere between dots: `_orig_mod` (torch.compile), `_fsdp_wrapped_module` and
  /// `_checkpoint_wrapped_module`.
  bool strip_wrappers = true;
  /// Whether names of weights keep the keys of the saved dict if neither of the other two removes
  /// them. False for outputs that have keys of their own.
  bool keep_keys = true;
  /// If not empty, replaces strip_wrappers: removes each prefix once, in this order.
  std::vector<std::string> prefixes = {};
  /// Changes to each name after that, in this order: `s/OLD/NEW/`, where OLD is an ECMAScript
  /// expression, NEW may have `$1`, and any character may replace the slash.
  std::vector<std::string> renames = {};
  /// Patterns (see is_chosen) of names in the checkpoint. If `select` is not empty, tensors that
  /// match one of its patterns are the weights, whatever their key; `exclude` removes weights.
  std::vector<std::string> select = {}, exclude = {};
  bool must_match = true;  ///< whether a rule that matches no name is an error

  /// Whether names of a model may be searched behind any prefix.
  bool is_auto() const { return strip_wrappers && prefixes.empty(); }
};

/// Role of a tensor in a training run.
enum class TensorRole {
  Weight,
  OptimizerState,
  Other,  ///< other state of the training loop: a counter, a random generator
};

struct TensorName {
  std::string source;  ///< name in the checkpoint
  std::string name;    ///< of a weight, or of the weight that the state belongs to
  TensorRole role = TensorRole::Weight;
  std::string kind = {};  ///< of optimizer state: "exp_avg"; empty if its name has another form
  /// Name without keys of the dict and parts of wrappers, before the rules: equal for a weight and
  /// its state.
  std::string link = {};
  const char* why = "not part of the model";  ///< of Other

  /// "exp_avg/NAME", or the name.
  std::string str() const { return kind.empty() ? name : kind + "/" + name; }
};

/// Name and key of a tensor in another program's checkpoint.
struct KeyedName {
  std::string_view name;
  std::string_view top_key;  ///< outermost key of the tensor's path; empty for a flat dict
};

/// Derives roles and names from names in a checkpoint. Keys such as `optimizer`, `optimizers`,
/// `optimizer_0` and `optim` contain optimizer state: `optimizer.state.NAME.exp_avg`; so do names
/// `state.NAME.exp_avg` if there is a tensor NAME. Keys such as
/// `train_state`, `lr_scheduler` and `dataloader` contain other state. If a nested dict has the key
/// `model` or a synonym, its other keys contain no weights. One key may contain all others, such as
/// `app` in PyTorch's recipe (`app.model.X`, `app.optim.state.X.exp_avg`).
/// @param tensors  all tensors of the checkpoint
/// @param of       directory, for messages
/// @throws InvalidArgument on a malformed rename, or listing rules that match nothing
std::vector<TensorName> name_tensors(const std::vector<KeyedName>& tensors, const NameRules& rules,
                                     const std::string& of);

/// A name without the parts that wrappers add, such as `_orig_mod`.
std::string without_wrappers(std::string_view name);

/// @throws InvalidArgument naming both if two tensors of a role would get one name, or if a name
///         would be empty
void check_distinct(const std::vector<TensorName>& names, const std::string& source);

/// Whether a name matches one of the shell patterns (`*` also matches dots and slashes, `?`,
/// `[...]`), or there are no patterns.
bool is_chosen(const std::vector<std::string>& patterns, const std::string& name);
/// @param option  option that has the patterns, for messages
/// @param of      directory that has the names, for messages
/// @throws InvalidArgument listing all patterns that match no name, and some names
void check_patterns(const std::vector<std::string>& patterns, const std::vector<std::string>& names,
                    std::string_view option, std::string_view of);

}  // namespace tessera::io
