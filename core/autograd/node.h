#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "core/autograd/autograd.h"
#include "core/tensor_impl.h"

namespace tessera::autograd {

/// One recorded operation. Internal to core.
///
/// Results own their producers: tensor -> node -> producers of its inputs. A node must not hold its
/// own outputs (see SavedTensor).
class Node {
 public:
  struct Input {
    std::shared_ptr<Node> node;        // producer of the input; null for a leaf
    std::size_t output = 0;            // which of the producer's outputs it is
    std::shared_ptr<TensorImpl> leaf;  // the input, if a leaf; both null: no gradient is wanted
    DType dtype = DType::F32;          // when recorded, because a leaf may be rebound
    bool handed_out = false;           // the running backward has the gradient's destination
    Tensor staged{};                   // gradient to add once that backward returns
  };

  struct Output {
    Shape shape;
    DType dtype = DType::F32;
    Tensor grad{};            // accumulated so far
    bool wants_sums = false;  // of the gradient, over its rows
    Tensor sums{};
    int uses = 0;  // inputs of the pass's operations that are this output and have not run
  };

  Node() = default;
  ~Node();
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  std::string_view operation;
  std::uint64_t sequence = 0;
  std::uint64_t visited = 0;  // last pass that reached this node
  bool done = false;          // has run; inputs and backward are gone
  std::shared_ptr<Context> context;
  std::shared_ptr<Scope> scope;  // null: none
  std::vector<Output> outputs;
  std::vector<Input> inputs;
  JointBackward backward;
};

/// Like backward(), from several roots, and throws on nodes recorded before number `oldest`.
/// @param roots  results of recorded operations
/// @param grads  of the roots, contiguous, of their shapes and dtypes
void run_backward(std::span<const Tensor> roots, std::span<const Tensor> grads,
                  std::uint64_t oldest);

/// The gradient buffer of a leaf, created in the accumulator dtype if missing.
const Tensor& leaf_buffer(TensorImpl& leaf);
/// Destination of the next contribution to a leaf's gradient; counts as an accumulation.
GradientView take_leaf_place(TensorImpl& leaf);

}  // namespace tessera::autograd
