#include "core/ops/cross_entropy.h"

#include <algorithm>
#include <cmath>

#include "core/autograd/autograd.h"
#include "core/ops/broadcast.h"
#include "core/ops/checks.h"
#include "kernels/binary.h"
#include "kernels/cross_entropy.h"
#include "kernels/dispatch.h"
#include "kernels/elementwise.h"
#include "kernels/matmul.h"

namespace tessera::ops {
namespace {

constexpr std::string_view kName = "linear_cross_entropy";
// Rows of logits are padded to a multiple of this, because tensor cores need 128-byte alignment.
constexpr std::int64_t kRowStep = 64;

// Large chunks on a GPU are a multiple of this, so that tiles of products are full.
constexpr std::int64_t kTileRows = 256;

// Maximum bytes of logits at a time. Each chunk reads and writes the whole gradient of the weight,
// so a GPU needs large chunks.
std::int64_t most_logits_bytes(Device device) {
  return device.type == DeviceType::CUDA ? std::int64_t{1} << 30 : std::int64_t{64} << 20;
}

// Logits that take more bytes exist in halves or quarters, or less. Each chunk reads the weight anew.
constexpr std::int64_t kHalves = std::int64_t{64} << 20, kQuarters = std::int64_t{256} << 20;

std::int64_t choose_chunk_rows(std::int64_t rows, std::int64_t row_bytes, Device device,
                               std::int64_t wanted) {
  if (wanted > 0) return std::min(wanted, rows);
  std::int64_t most = std::clamp<std::int64_t>(most_logits_bytes(device) / row_bytes, 1, rows);
  const std::int64_t bytes = rows * row_bytes;
  const std::int64_t parts = bytes > kQuarters ? 4 : bytes > kHalves ? 2 : 1;
  most = std::min(most, (rows + parts - 1) / parts);
  const std::int64_t chunks = (rows + most - 1) / most;
  const std::int64_t even = (rows + chunks - 1) / chunks;
  const std::int64_t step =
      device.type == DeviceType::CUDA && even >= 8 * kTileRows ? kTileRows : 1;
  return std::min((even + step - 1) / step * step, rows);
}

// Called before any write, so that an error does not leave the weight's gradient half accumulated.
void check_targets(std::string_view operation, const Tensor& targets, std::int64_t vocab) {
  if (targets.device().type != DeviceType::CPU) return;  // other devices check in the kernel
  const std::int32_t* values = targets.data<std::int32_t>();
  for (std::int64_t i = 0; i < targets.numel(); ++i)
    require(values[i] == kernels::kIgnoreTarget || (values[i] >= 0 && values[i] < vocab),
            "{}: target {} at row {} is outside of the vocabulary of {}; {} marks a row to ignore",
            operation, values[i], i, vocab, kernels::kIgnoreTarget);
}

}  // namespace

Tensor cross_entropy(const Tensor& logits, const Tensor& targets, double scale) {
  constexpr std::string_view kOperation = "cross_entropy";
  const auto& context = common_context(kOperation, {&logits, &targets});
  check_dims(kOperation, "logits", logits, 2, "[N, V]");
  check_rows(kOperation, "logits", logits);
  check_dense(kOperation, "targets", targets, DType::I32, {logits.dim(0)});
  require(logits.dim(1) > 0, "{}: needs a vocabulary, got logits of shape {}", kOperation,
          logits.shape());
  require(std::isfinite(scale), "{}: scale must be finite, got {}", kOperation, scale);
  check_targets(kOperation, targets, logits.dim(1));

  const DType accumulator = kernels::accumulator_dtype(logits.dtype());
  const Tensor losses =
      Tensor::empty(context, {logits.dim(0)}, accumulator, MemoryCategory::Workspace, kOperation);
  kernels::cross_entropy(*context, {logits.view(), targets.view(), losses.view()});
  Tensor loss = Tensor::empty(context, {1}, accumulator, MemoryCategory::Activations, kOperation);
  kernels::sum(*context, losses.view(), {loss.view(), false, true}, scale);

  if (autograd::needs_grad({&logits})) {
    const auto backward = [=, saved_logits = autograd::SavedTensor(logits),
                           saved_targets = autograd::SavedTensor(targets)](
                              const Tensor& grad_loss, autograd::InputGradients& into) {
      const Tensor& kept = saved_logits.get(kOperation);
      const GradientView to = into.target(0);
      // The kernel overwrites logits with their gradient: in place of the result, or in a copy.
      Tensor copy;
      if (to.accumulate || to.view.dtype != accumulator)
        copy = Tensor::empty(kept.context(), kept.shape(), accumulator, MemoryCategory::Workspace,
                             kOperation);
      const TensorView work = copy.defined() ? copy.view() : to.view;
      Context& ctx = *kept.context();
      const Tensor unused = Tensor::empty(kept.context(), {kept.dim(0)}, accumulator,
                                          MemoryCategory::Workspace, kOperation);
      kernels::cast(ctx, kept.view(), {work, false, true});
      kernels::cross_entropy(
          ctx, {work, saved_targets.get(kOperation).view(), unused.view(), true, scale});
      if (!into.is_default_seed())
        kernels::binary(ctx, {work,
                              broadcast_view(grad_loss, kept.shape()),
                              {work, false, true},
                              kernels::BinaryKind::Multiply});
      if (copy.defined()) kernels::cast(ctx, work, to);
    };
    autograd::record(kOperation, loss, {logits}, backward);
  }
  return loss;
}

Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& targets,
                            double scale, std::int64_t max_chunk_rows, double softcap) {
  const auto& context = common_context(kName, {&x, &weight, &targets});
  check_dims(kName, "x", x, 2, "[N, C]");
  check_rows(kName, "x", x);
  check_dims(kName, "weight", weight, 2, "[V, C]");
  check_dense(kName, "weight", weight, x.dtype(), {weight.dim(0), x.dim(1)});
  check_dense(kName, "targets", targets, DType::I32, {x.dim(0)});
  const std::int64_t rows = x.dim(0);
  const std::int64_t vocab = weight.dim(0);
  require(rows > 0 && vocab > 0, "{}: needs rows and a vocabulary, got x {} and weight {}", kName,
          x.shape(), weight.shape());
  require(std::isfinite(scale), "{}: scale must be finite, got {}", kName, scale);
  require(max_chunk_rows >= 0, "{}: max_chunk_rows must not be negative, got {}", kName,
          max_chunk_rows);
  require(std::isfinite(softcap) && softcap >= 0.0, "{}: softcap must not be negative, got {}",
          kName, softcap);
  check_targets(kName, targets, vocab);

  const DType accumulator = kernels::accumulator_dtype(x.dtype());
  // Tensor cores write the dtype that the next matmul reads; the CPU keeps the precision.
  const DType logits_dtype = context->target().type == DeviceType::CUDA ? x.dtype() : accumulator;
  const std::int64_t row_step = (vocab + kRowStep - 1) / kRowStep * kRowStep;
  const std::int64_t chunk_rows =
      choose_chunk_rows(rows, row_step * static_cast<std::int64_t>(dtype_size(logits_dtype)),
                        context->target(), max_chunk_rows);
  const auto workspace = [&](const Shape& shape, DType dtype) {
    return Tensor::empty(context, shape, dtype, MemoryCategory::Workspace, kName);
  };
  const bool recorded = autograd::needs_grad({&x, &weight});
  const bool wants_x = recorded && x.requires_grad();
  const bool wants_weight = recorded && weight.requires_grad();

  Tensor grad_x;
  if (wants_x)
    grad_x = Tensor::empty(context, x.shape(), x.dtype(), MemoryCategory::Activations,
                           "linear_cross_entropy.grad");
  const auto padded_rows = [&](DType dtype) { return workspace({chunk_rows, row_step}, dtype); };
  Tensor logits = padded_rows(logits_dtype);
  Tensor losses = workspace({rows}, accumulator);
  Tensor narrow;  // the logits' gradient in x's dtype, for matmul
  if (recorded && x.dtype() != logits_dtype) narrow = padded_rows(x.dtype());
  GradientView grad_weight, leaf_place;
  Tensor staged;  // for a leaf whose buffer is not in the accumulator dtype
  if (wants_weight) {
    grad_weight = leaf_place = autograd::leaf_target(weight);
    if (leaf_place.view.dtype != accumulator) {
      staged = workspace(weight.shape(), accumulator);
      grad_weight = {staged.view(), false, true};
    }
  }

  // Tensor cores take products of any extent, but cuBLASLt runs those of 50257 columns at a tenth of
  // the rate of 50304. Rows of zeros leave the padding of the logits, and of their gradient, zero.
  Tensor padded_weight;
  if (vocab % kRowStep != 0 && context->target().type == DeviceType::CUDA &&
      x.dtype() == DType::BF16) {
    padded_weight = workspace({row_step, weight.dim(1)}, x.dtype());
    kernels::cast(*context, weight.view(), {padded_weight.view().narrow(0, 0, vocab), false, true});
    kernels::fill(*context, padded_weight.view().narrow(0, vocab, row_step - vocab), 0.0);
  }
  const TensorView product_weight = padded_weight.defined() ? padded_weight.view() : weight.view();
  const std::int64_t columns = product_weight.shape[0];

  for (std::int64_t begin = 0; begin < rows; begin += chunk_rows) {
    const std::int64_t count = std::min(chunk_rows, rows - begin);
    const TensorView x_chunk = x.view().narrow(0, begin, count);
    const TensorView all_logits = logits.view().narrow(0, 0, count).narrow(1, 0, columns);
    const TensorView logits_chunk = all_logits.narrow(1, 0, vocab);
    kernels::matmul(*context, {x_chunk, product_weight, all_logits, false, true});
    kernels::cross_entropy(*context,
                           {logits_chunk, targets.view().narrow(0, begin, count),
                            losses.view().narrow(0, begin, count), recorded, scale, softcap});
    if (!recorded) continue;
    TensorView grad_logits = all_logits;
    if (narrow.defined()) {
      grad_logits = narrow.view().narrow(0, 0, count).narrow(1, 0, columns);
      kernels::cast(*context, all_logits, {grad_logits, false, true});
    }
    if (wants_x)
      kernels::matmul(*context,
                      {grad_logits, product_weight, grad_x.view().narrow(0, begin, count)});
    if (wants_weight) {
      kernels::matmul(*context, {grad_logits.narrow(1, 0, vocab), x_chunk, grad_weight.view, true,
                                 false, grad_weight.accumulate});
      grad_weight.accumulate = true;
    }
  }
  if (staged.defined()) kernels::cast(*context, staged.view(), leaf_place);

  Tensor loss = Tensor::empty(context, {1}, accumulator, MemoryCategory::Activations, kName);
  kernels::sum(*context, losses.view(), {loss.view(), false, true}, scale);
  if (recorded) {
    auto backward = [grad_x = std::move(grad_x)](const Tensor& grad_loss,
                                                 autograd::InputGradients& into) {
      // On a GPU only the default seed is accepted, because reading a value would wait.
      const bool is_one = into.is_default_seed() || grad_loss.device().type == DeviceType::Meta ||
                          (grad_loss.device().type == DeviceType::CPU && grad_loss.item() == 1.0);
      require(is_one,
              "{} must be the root of backward, or a term of a sum that is: its gradients were "
              "computed during forward for a "
              "gradient of 1, got {}; use its scale",
              kName,
              grad_loss.device().type == DeviceType::CPU ? fmt::format("{}", grad_loss.item())
                                                         : "another");
      if (grad_x.defined()) into.pass(0, grad_x);
    };
    // Recorded even if x needs no gradient, because the loss is still a root.
    autograd::record(kName, loss, {x}, std::move(backward), true);
  }
  return loss;
}

}  // namespace tessera::ops
