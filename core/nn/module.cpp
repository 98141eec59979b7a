#include "core/nn/module.h"

#include <algorithm>

#include "core/base/error.h"

namespace tessera::nn {

Module::Module() = default;
Module::~Module() = default;

Module::Module(Module& parent, std::string_view name)
    : parent_(&parent), root_(parent.root_), name_(name), path_(parent.path_of(name)) {
  require(!name.empty() && name.find('.') == std::string_view::npos,
          "the name of a module must be there and not contain '.', got '{}' in '{}'", name,
          parent.path());
  const bool is_new = std::none_of(parent.children_.begin(), parent.children_.end(),
                                   [&](const Module* other) { return other->name_ == name; });
  require(is_new, "module '{}' has two members named '{}'; rename one", parent.path(), name);
  parent.children_.push_back(this);
}

std::int64_t Module::parameter_count() const {
  std::int64_t count = 0;
  for (const Parameter* p : parameters_) count += p->tensor.numel();
  return count;
}

bool Module::is_trainable() const {
  return std::any_of(parameters_.begin(), parameters_.end(),
                     [](const Parameter* p) { return p->tensor.requires_grad(); });
}

std::string Module::path_of(std::string_view member) const {
  if (path_.empty()) return std::string(member);
  return fmt::format("{}.{}", path_, member);
}

bool Module::is_block() const {
  if (parent_ == nullptr || !parent_->is_list()) return false;
  for (const Module* m = parent_->parent_; m != nullptr; m = m->parent_)
    if (m->is_list()) return false;
  return true;
}

bool Module::is_recomputed() const {
  const Recompute setting = recompute();
  if (setting.part != Recompute::Block || !is_block()) return false;
  const auto& blocks = parent_->children_;
  return (std::find(blocks.begin(), blocks.end(), this) - blocks.begin()) % setting.every == 0;
}

void Module::add(Parameter& parameter) {
  // Paths of modules are unique, so that names are compared within the owner alone.
  const std::size_t begin = path_.empty() ? 0 : path_.size() + 1;
  require(parameter.name.find('.', begin) == std::string::npos,
          "the name of a parameter must not contain '.', got '{}' in '{}'",
          parameter.name.substr(begin), path_);
  for (const Parameter* other : own_parameters_)
    require(other->name != parameter.name, "the model has two parameters named '{}'; rename one",
            parameter.name);
  own_parameters_.push_back(&parameter);
  for (Module* m = this; m != nullptr; m = m->parent_) m->parameters_.push_back(&parameter);
}

}  // namespace tessera::nn
