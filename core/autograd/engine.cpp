// Runs a recorded graph backward. Sequence numbers ascend from inputs to results, so descending
// order is a topological order: all users of a node's outputs run before the node.

#include <algorithm>
#include <string>
#include <utility>

#include "core/autograd/node.h"
#include "kernels/dispatch.h"
#include "kernels/elementwise.h"

namespace tessera::autograd {
namespace {

// Whether the tensor's memory is unshared and may be overwritten. Views, pending gradients, callers
// and saved tensors each hold a reference.
bool is_exclusive(const Tensor& tensor) {
  return tensor.shared_impl().use_count() == 1 && tensor.storage().use_count() == 1;
}

Tensor new_gradient(const Node& node, std::size_t output) {
  return Tensor::empty(node.context, node.outputs[output].shape, node.outputs[output].dtype,
                       MemoryCategory::Activations, std::string(node.operation) + ".grad");
}

// Destination of the next contribution to the gradient of a node's output.
GradientView take_place(Node& node, std::size_t output) {
  Tensor& grad = node.outputs[output].grad;
  if (!grad.defined()) {
    grad = new_gradient(node, output);
    return {grad.view(), false, true};
  }
  if (!is_exclusive(grad)) {
    Tensor own = new_gradient(node, output);
    kernels::cast(*node.context, grad.view(), {own.view(), false, true});
    grad = std::move(own);
  }
  return {grad.view(), true, true};
}

// Shape of an edge's tensor.
const Shape& shape_of(const Node::Input& edge) {
  return edge.node ? edge.node->outputs[edge.output].shape : edge.leaf->shape;
}

GradientView take_place(const Node::Input& edge) {
  return edge.node ? take_place(*edge.node, edge.output) : take_leaf_place(*edge.leaf);
}

// Adds `grad`, whose memory may be shared, to the gradient of a node's output.
void give(Node& node, std::size_t output, Tensor grad) {
  Tensor& total = node.outputs[output].grad;
  if (!total.defined()) {
    total = std::move(grad);
    return;
  }
  Tensor sum = is_exclusive(total) ? total : new_gradient(node, output);
  kernels::add(*node.context, total.view(), grad.view(), sum.view());
  total = std::move(sum);
}

class NodeGradients final : public InputGradients {
 public:
  // @param grad, sums  of the node's first output
  NodeGradients(Node& node, const Tensor& grad, const Tensor& sums, bool default_seed)
      : node_(node), grad_(grad), sums_(sums), default_seed_(default_seed) {}

  GradientView target(int i) override {
    Node::Input& edge = input(i);
    return place(edge, edge.dtype);
  }

  GradientView weight_target(int i) override {
    Node::Input& edge = input(i);
    return place(edge, kernels::accumulator_dtype(edge.dtype));
  }

  RowGradient row_target(int i, std::int64_t count) override {
    Node::Input& edge = input(i);
    if (!edge.leaf || edge.leaf->row_receiver == nullptr || is_taken(edge)) return {};
    const RowGradient rows = edge.leaf->row_receiver->receive(count);
    edge.handed_out = static_cast<bool>(rows);
    return rows;
  }

  GradientView sums_target(int i) override {
    const Node::Input& edge = input(i);
    if (!edge.node || !edge.handed_out || !completes(edge)) return {};
    Node::Output& output = edge.node->outputs[edge.output];
    const std::int64_t columns = output.shape[output.shape.size() - 1];
    output.sums = Tensor::empty(node_.context, {columns}, kernels::accumulator_dtype(output.dtype),
                                MemoryCategory::Activations,
                                std::string(edge.node->operation) + ".grad_sums");
    return {output.sums.view(), false, true};
  }

  const Tensor& gradient_sums() const override { return sums_; }

  void pass(int i, Tensor grad) override {
    Node::Input& edge = input(i);
    if (!is_wanted(edge)) return;
    const Shape& shape = shape_of(edge);
    require(grad.shape() == shape && grad.is_contiguous(),
            "{}: its backward must give input {} a dense gradient of the input's shape {}, got {} "
            "with strides {}; sum over broadcast dims, or copy a strided view",
            node_.operation, i, shape, grad.shape(), grad.strides());
    // The operation has already taken the destination for this input's gradient: stage this one.
    if (is_taken(edge)) {
      stage(edge, std::move(grad));
    } else if (edge.node && grad.dtype() == edge.node->outputs[edge.output].dtype) {
      Node::Output& output = edge.node->outputs[edge.output];
      if (grad.impl() == grad_.impl() && !output.grad.defined() && completes(edge))
        output.sums = sums_;
      give(*edge.node, edge.output, std::move(grad));
    } else {
      add(edge, grad);
    }
  }

  bool is_default_seed() const override { return default_seed_; }

  void finish() {
    for (Node::Input& edge : node_.inputs)
      if (edge.staged.defined()) add(edge, std::exchange(edge.staged, Tensor()));
  }

 private:
  static bool is_wanted(const Node::Input& edge) { return edge.node || edge.leaf; }

  Node::Input& input(int i) {
    require(i >= 0 && i < static_cast<int>(node_.inputs.size()),
            "{}: its backward requests the gradient of input {}, but record() was given {} inputs",
            node_.operation, i, node_.inputs.size());
    return node_.inputs[static_cast<std::size_t>(i)];
  }

  // Whether a producer wants sums, and this node's is the last contribution to the gradient.
  static bool completes(const Node::Input& edge) {
    const Node::Output& output = edge.node->outputs[edge.output];
    return output.wants_sums && output.uses == 1;
  }

  bool is_taken(const Node::Input& edge) const {
    return std::any_of(node_.inputs.begin(), node_.inputs.end(), [&](const Node::Input& other) {
      return other.handed_out && other.node == edge.node && other.output == edge.output &&
             other.leaf == edge.leaf;
    });
  }

  GradientView place(Node::Input& edge, DType dtype) {
    if (!is_wanted(edge)) return {};
    const bool fits = dtype == (edge.node ? edge.node->outputs[edge.output].dtype
                                          : leaf_buffer(*edge.leaf).dtype());
    if (fits && !is_taken(edge)) {
      edge.handed_out = true;
      return take_place(edge);
    }
    stage(edge, Tensor::empty(node_.context, shape_of(edge), dtype, MemoryCategory::Workspace,
                              "gradient staging"));
    return {edge.staged.view(), false, true};
  }

  void stage(Node::Input& edge, Tensor grad) {
    require(!edge.staged.defined(),
            "{}: its backward gave the gradient of one input twice; add the two up first",
            node_.operation);
    edge.staged = std::move(grad);
  }

  static void add(Node::Input& edge, const Tensor& grad) {
    kernels::cast(*grad.context(), grad.view(), take_place(edge));
  }

  Node& node_;
  const Tensor& grad_;
  const Tensor& sums_;
  const bool default_seed_;
};

// All nodes behind `roots`, latest first.
std::vector<std::shared_ptr<Node>> collect(std::span<const Tensor> roots, std::uint64_t oldest) {
  const std::uint64_t pass = roots.front().context()->next_sequence();
  std::vector<std::shared_ptr<Node>> order;
  const auto reach = [&](const std::shared_ptr<Node>& node) {
    if (node->visited == pass) return;
    node->visited = pass;
    order.push_back(node);
  };
  for (const Tensor& root : roots)
    if (root.grad_fn()) reach(root.grad_fn());
  for (std::size_t i = 0; i < order.size(); ++i) {
    Node& node = *order[i];
    require(!node.done,
            "backward reached {} (output {}) a second time: an earlier backward freed this part "
            "of the graph; add up the losses, or run forward again",
            node.operation, node.outputs.front().shape);
    require(node.sequence >= oldest,
            "recompute: the block uses the result of {} (shape {}), which was recorded outside of "
            "it; pass it as x, or detach it",
            node.operation, node.outputs.front().shape);
    for (const Node::Input& input : node.inputs)
      if (input.node) reach(input.node);
  }
  for (const auto& node : order)
    for (Node::Output& output : node->outputs) {
      output.grad = output.sums = Tensor();
      output.uses = 0;
    }
  for (const auto& node : order)
    for (const Node::Input& input : node->inputs)
      if (input.node) ++input.node->outputs[input.output].uses;
  std::sort(order.begin(), order.end(),
            [](const auto& a, const auto& b) { return a->sequence > b->sequence; });
  return order;
}

// @param default_seed  the gradient of 1 that backward() began with, or null
void run(Node& node, const TensorImpl* default_seed) {
  std::vector<Tensor> grads;
  bool any = false;
  for (Node::Output& output : node.outputs) {
    any = any || output.grad.defined();
    grads.push_back(std::exchange(output.grad, Tensor()));
  }
  // A node without gradient runs on zeros, because it may have callbacks.
  if (!any) {
    grads.front() = new_gradient(node, 0);
    kernels::fill(*node.context, grads.front().view(), 0.0);
  }
  const Tensor sums = std::exchange(node.outputs.front().sums, Tensor());
  NodeGradients into(node, grads.front(), sums,
                     default_seed != nullptr && grads.front().impl() == default_seed);
  node.done = true;
  node.backward(grads, into);
  into.finish();
  for (const Node::Input& input : node.inputs)
    if (input.node) --input.node->outputs[input.output].uses;
  node.backward = nullptr;
  node.inputs.clear();
}

}  // namespace

// The scopes that a backward pass is in, outermost first. Operations of a scope have consecutive
// numbers, so that a pass enters and leaves each scope once.
class OpenScopes {
 public:
  void move_to(const std::shared_ptr<Scope>& scope) {
    if (open_.empty() ? scope == nullptr : open_.back() == scope) return;
    std::vector<std::shared_ptr<Scope>> wanted;
    for (auto s = scope; s != nullptr; s = s->parent_) wanted.push_back(s);
    std::reverse(wanted.begin(), wanted.end());
    const auto common = std::mismatch(open_.begin(), open_.end(), wanted.begin(), wanted.end());
    const auto stay = common.first - open_.begin();
    while (std::ssize(open_) > stay) {
      const std::shared_ptr<Scope> left = std::move(open_.back());
      open_.pop_back();
      left->after_backward();
    }
    for (auto next = wanted.begin() + stay; next != wanted.end(); ++next) {
      open_.push_back(*next);
      open_.back()->before_backward();
    }
  }

 private:
  std::vector<std::shared_ptr<Scope>> open_;
};

void run_backward(std::span<const Tensor> roots, std::span<const Tensor> grads,
                  std::uint64_t oldest) {
  const std::shared_ptr<Context>& context = roots.front().context();
  const NoGradGuard off(*context);
  std::vector<std::shared_ptr<Node>> order = collect(roots, oldest);
  Tensor default_seed;  // of the first root; shared, so that no operation changes it in place
  for (std::size_t i = 0; i < roots.size(); ++i) {
    const TensorImpl& root = *roots[i].impl();
    const Tensor seed =
        grads[i].defined() ? grads[i] : Tensor::full(context, root.shape, root.dtype, 1.0);
    if (i == 0 && !grads[i].defined()) default_seed = seed;
    if (root.node == nullptr)
      kernels::cast(*context, seed.view(), take_leaf_place(*roots[i].impl()));
    else
      give(*root.node, root.output, seed);
  }
  OpenScopes scopes;
  for (std::shared_ptr<Node>& node : order) {
    scopes.move_to(node->scope);
    run(*node, default_seed.impl());
    node.reset();
  }
  scopes.move_to(nullptr);
}

void backward(const Tensor& root, const Tensor& grad) {
  require(root.defined() && root.requires_grad(),
          "backward: root does not require a gradient; no leaf behind it does, or it was computed "
          "while recording was off");
  if (!grad.defined()) {
    require(root.numel() == 1, "backward: root has shape {}; give its gradient, or sum it up first",
            root.shape());
    return run_backward(std::span(&root, 1), std::span(&grad, 1), 0);
  }
  require(grad.shape() == root.shape() && grad.dtype() == root.dtype(),
          "backward: the gradient of root must be {} {}, got {} {}", root.shape(), root.dtype(),
          grad.shape(), grad.dtype());
  require(grad.is_contiguous(), "backward: the gradient of root must be contiguous, got {}",
          grad.strides());
  require(grad.context() == root.context(), "backward: root and its gradient differ in context");
  // A copy, because `grad` may be the buffer of a leaf that this pass writes.
  const Tensor own = Tensor::empty(grad.context(), grad.shape(), grad.dtype(),
                                   MemoryCategory::Activations, "root.grad");
  kernels::cast(*grad.context(), grad.view(), {own.view(), false, true});
  run_backward(std::span(&root, 1), std::span(&own, 1), 0);
}

}  // namespace tessera::autograd
