#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "io/hf/family.h"
#include "io/hf/parts_source.h"
#include "io/source/load_policy.h"
#include "io/source/names.h"
#include "io/source/sharded_source.h"

namespace tessera::io {

/// A tensor of a Hugging Face model's files, and the tensor of a running model of transformers that
/// holds it: the same, or since transformers 5 one that stacks the experts of a layer.
struct ModelTensor {
  std::string name;
  Shape shape;
  std::string held = {};  ///< name in the running model
  Shape held_shape = {};
  std::int64_t expert = -1;  ///< position in dim 0 of `held`; -1: it has this shape
  std::int64_t begin = 0;    ///< first row in held[expert]
};

/// The tensors that a Hugging Face model must have.
struct ModelNames {
  std::string of;  ///< file or directory that they follow from, for messages
  std::vector<ModelTensor> tensors;
  /// Prefix that names lack in checkpoints of the model without head: "model."; may be empty.
  std::string base;
  /// Whether the model may have other tensors outside of `base`: a head that tessera does not know.
  bool is_open = false;
};

/// @param model   tessera's "model" section of `config`
/// @param config  Hugging Face's config.json; its "architectures" determines the head
ModelNames names_of_family(const HfFamily& family, const Json& model, const Json& config,
                           const std::string& of);

/// The tensors in a Hugging Face directory. @throws InvalidArgument if it is none; as open_sharded
ModelNames names_in_directory(const fs::path& dir);

/// Takes the weights of a checkpoint as those of its model, whose base is the part before the first dot
/// if all names have the same. @param names  from name_all()
ModelNames names_of_weights(const ShardedSource& source, const std::vector<TensorName>& names);

/// Form in which a checkpoint has the names of a model.
struct NameLayout {
  bool is_held = false;     ///< names of a running model
  bool lacks_base = false;  ///< without ModelNames::base
  std::string prefix = {};  ///< before each name
  std::size_t found = 0;    ///< names of the model that the checkpoint has
  bool is_complete = false;
  /// Other prefixes, before at least a fifth of the names of the model in any form: further models.
  std::vector<std::string> others = {};

  /// Name of a tensor in this form, after the prefix.
  std::string name_of(const ModelNames& model, const ModelTensor& tensor) const;
};

/// The form with all names of the model, or else with most of them.
/// @param names       in the checkpoint, distinct
/// @param any_prefix  whether to accept prefixes, which end in a dot; else only none
NameLayout find_layout(const ModelNames& model, const std::vector<std::string>& names,
                       bool any_prefix);

/// The tensors of a model in another program's checkpoint.
struct ModelMatch {
  NameLayout layout;
  /// For each tensor of the model: its position, among the source's tensors() and then
  /// unreadable(); empty if missing, or if the shape does not allow to take the part.
  std::vector<std::optional<std::size_t>> found;
  std::vector<std::size_t>
      extra;  ///< positions of weights outside of the model: see ModelNames::is_open
  /// Positions of the other weights, and the reason why the model does without them.
  std::vector<std::pair<std::size_t, std::string>> ignored;
  TensorComparison comparison;  ///< by names in the layout, without prefix
};

/// Finds a model's weights. Ignores those outside the prefix of the model, buffers, and copies of
/// another weight, such as a tied head (compares bytes).
/// @param names       from name_tensors() or name_all()
/// @param any_prefix  as for find_layout
/// @throws IoError, CorruptCheckpoint
ModelMatch match_model(const ModelNames& model, const ShardedSource& source,
                       const std::vector<TensorName>& names, bool any_prefix);

/// A tensor, and the source that has it.
struct TensorPlace {
  const TensorSource* source = nullptr;
  TensorInfo info;
};

/// Place of a model's tensor: in the source, or in `parts` (of the source), to which a part of a
/// tensor of experts is then added.
/// @param stored  tensor of the source that is or holds it, of the model's shape
TensorPlace place_of(const ModelTensor& tensor, const TensorInfo& stored, const NameLayout& layout,
                     const TensorSource& source, PartsSource& parts);

/// name_tensors() of the source's tensors(), then of unreadable().
std::vector<TensorName> name_all(const ShardedSource& source, const NameRules& rules);

}  // namespace tessera::io
