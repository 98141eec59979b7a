#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/nn/parameter.h"
#include "core/nn/recompute.h"

namespace tessera::nn {

class UnitRuntime;

/// A part of a model: a tree of modules and parameters, which are members that register with their
/// parent when they are constructed. Their order of construction is the order of parameters.
///
///   struct Mlp : nn::Module {
///     nn::Linear up, down;
///     Mlp(Module& parent, std::string_view name, std::int64_t width)
///         : Module(parent, name), up(*this, "up", {width, 4 * width}), ... {}
///     Tensor operator()(const Tensor& x) const { return down(ops::gelu(up(x))); }
///   };
class Module {
 public:
  /// The root of a tree.
  Module();
  /// A module within `parent`, which must outlive it.
  /// @param name  unique within the parent, not empty, without '.'
  /// @throws InvalidArgument if the parent has a module of this name
  Module(Module& parent, std::string_view name);
  virtual ~Module();
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  /// "h.0.attn"; empty for a root.
  const std::string& path() const { return path_; }
  std::string path_of(std::string_view member) const;
  /// All parameters of the tree below, in order of construction.
  const std::vector<Parameter*>& parameters() const { return parameters_; }
  /// Number of weights below.
  std::int64_t parameter_count() const;
  /// Whether a weight below requires a gradient.
  bool is_trainable() const;
  const std::vector<Parameter*>& own_parameters() const { return own_parameters_; }
  const std::vector<Module*>& children() const { return children_; }
  /// True for nn::List, whose elements are the blocks of a model.
  virtual bool is_list() const { return false; }
  /// True for an element of an outermost nn::List.
  bool is_block() const;
  /// True for a block that the model's setting recomputes as a whole. nn::unit recomputes a run if
  /// this holds for one of its modules.
  bool is_recomputed() const;

  /// Settings of the whole tree, kept by its root.
  bool training() const { return root_->training_; }
  /// Training: dropout applies. Initially off.
  void set_training(bool training) { root_->training_ = training; }
  Recompute recompute() const { return root_->recompute_; }
  void set_recompute(Recompute recompute) { root_->recompute_ = recompute; }
  /// Callbacks around nn::unit; null: none.
  UnitRuntime* unit_runtime() const { return root_->unit_runtime_; }
  void set_unit_runtime(UnitRuntime* runtime) { root_->unit_runtime_ = runtime; }

 private:
  friend Parameter;
  void add(Parameter& parameter);

  Module* parent_ = nullptr;
  Module* root_ = this;
  std::string name_, path_;
  std::vector<Parameter*> parameters_, own_parameters_;
  std::vector<Module*> children_;
  // Used in a root only:
  bool training_ = false;
  Recompute recompute_{};
  UnitRuntime* unit_runtime_ = nullptr;
};

/// The blocks of a model, named "0", "1", ...
template <typename M>
class List final : public Module {
 public:
  using Module::Module;
  /// `count` modules M(list, name, arguments...).
  template <typename... Arguments>
  List(Module& parent, std::string_view name, std::int64_t count, const Arguments&... arguments)
      : Module(parent, name) {
    for (std::int64_t i = 0; i < count; ++i) append(arguments...);
  }
  template <typename... Arguments>
  M& append(Arguments&&... arguments) {
    modules_.push_back(std::make_unique<M>(*this, std::to_string(modules_.size()),
                                           std::forward<Arguments>(arguments)...));
    return *modules_.back();
  }
  bool is_list() const override { return true; }

  std::int64_t size() const { return static_cast<std::int64_t>(modules_.size()); }
  M& operator[](std::int64_t i) const { return *modules_.at(static_cast<std::size_t>(i)); }

  class Iterator {
   public:
    explicit Iterator(const std::unique_ptr<M>* at) : at_(at) {}
    M& operator*() const { return **at_; }
    Iterator& operator++() {
      ++at_;
      return *this;
    }
    bool operator==(const Iterator&) const = default;

   private:
    const std::unique_ptr<M>* at_;
  };
  Iterator begin() const { return Iterator(modules_.data()); }
  Iterator end() const { return Iterator(modules_.data() + modules_.size()); }

 private:
  std::vector<std::unique_ptr<M>> modules_;
};

}  // namespace tessera::nn
