#include "kernels/work.h"

#include <algorithm>

#include "core/base/tensor_view.h"
#include "kernels/activation.h"
#include "kernels/attention.h"
#include "kernels/binary.h"
#include "kernels/bit_hash.h"
#include "kernels/cross_entropy.h"
#include "kernels/dropout.h"
#include "kernels/elementwise_args.h"
#include "kernels/embedding.h"
#include "kernels/experts.h"
#include "kernels/gather.h"
#include "kernels/grouped_matmul.h"
#include "kernels/matmul.h"
#include "kernels/norm.h"
#include "kernels/optimizer.h"
#include "kernels/reduction.h"
#include "kernels/rotary.h"
#include "kernels/sampling.h"
#include "kernels/selection.h"
#include "kernels/softmax.h"
#include "kernels/unary.h"

namespace tessera::kernels {
namespace {

double bytes(const TensorView& view) {
  return view.defined() ? static_cast<double>(view.bytes()) : 0.0;
}

// Sums up operands; undefined views and unwanted gradients count nothing.
class Operands {
 public:
  template <typename... Views>
  Operands& read(const Views&... views) {
    work_.read += (bytes(views) + ...);
    return *this;
  }
  template <typename... Views>
  Operands& write(const Views&... views) {
    (add(views), ...);
    return *this;
  }
  Operands& flops(double count) {
    work_.flops += count;
    return *this;
  }
  // NOLINTNEXTLINE(google-explicit-constructor)
  operator KernelWork() const { return work_; }

 private:
  void add(const TensorView& view) { work_.written += bytes(view); }
  void add(const GradientView& gradient) {
    if (!gradient) return;
    work_.written += bytes(gradient.view);
    if (gradient.accumulate) work_.read += bytes(gradient.view);
  }

  KernelWork work_;
};

template <typename... Views>
Operands read(const Views&... views) {
  return Operands().read(views...);
}

// Rows of `table` that tokens select, each once.
double selected_bytes(const TensorView& tokens, const TensorView& table) {
  if (!table.defined() || table.shape[0] == 0) return 0;
  const std::int64_t rows = std::min(tokens.numel(), table.shape[0]);
  return bytes(table) * static_cast<double>(rows) / static_cast<double>(table.shape[0]);
}

// Operations of `products` products over the scores that are not hidden.
double attention_flops(const TensorView& q, const TensorView& k, const AttentionVariant& variant,
                       double products) {
  const auto queries = static_cast<double>(q.shape[1]), keys = static_cast<double>(k.shape[1]);
  double seen = variant.causal ? keys - (queries - 1) / 2 : keys;  // keys per query
  if (variant.window > 0) seen = std::min(seen, static_cast<double>(variant.window));
  return 2 * products * static_cast<double>(q.numel()) * seen;
}

// As if all groups had equally many rows.
template <typename Args>
double share_of_groups(const Args& args) {
  return static_cast<double>(args.groups) / static_cast<double>(args.offsets.shape[0] - 1);
}

}  // namespace

KernelWork work(const Add& args) { return read(args.a, args.b).write(args.y); }

KernelWork work(const AdamW& args) {
  const KernelWork all = read(args.param, args.grad, args.exp_avg, args.exp_avg_sq)
                             .write(args.param, args.exp_avg, args.exp_avg_sq, args.copy);
  double share = 0;
  for (const AdamWRange& range : args.ranges)
    share += static_cast<double>(range.end - range.begin) / static_cast<double>(args.param.numel());
  return {.read = share * all.read, .written = share * all.written};
}

KernelWork work(const AdamW8bit& args) {
  const KernelWork codes = work(args.step);
  const KernelWork scales = read(args.exp_avg_scale, args.exp_avg_sq_scale)
                                .write(args.exp_avg_scale, args.exp_avg_sq_scale);
  return {.read = codes.read + scales.read, .written = codes.written + scales.written};
}

KernelWork work(const AttentionForward& args) {
  return read(args.q, args.k, args.v)
      .write(args.out, args.log_sum_exp)
      .flops(attention_flops(args.q, args.k, args.variant, 2));
}

KernelWork work(const AttentionBackward& args) {
  return read(args.q, args.k, args.v, args.out, args.log_sum_exp, args.grad_out)
      .write(args.grad_q, args.grad_k, args.grad_v)
      .flops(attention_flops(args.q, args.k, args.variant, 5));
}

KernelWork work(const Binary& args) { return read(args.a, args.b).write(args.y); }

KernelWork work(const BitHash& args) { return read(args.x).write(args.hash); }

KernelWork work(const Cast& args) { return read(args.in).write(args.out); }

KernelWork work(const ClipFactor& args) { return read(args.totals).write(args.factor); }

KernelWork work(const CollectRows& args) {
  return read(args.x, args.place, args.weights).write(args.y);
}

KernelWork work(const Compare& args) { return read(args.a, args.b).write(args.y); }

KernelWork work(const CrossEntropy& args) {
  Operands operands = read(args.logits, args.targets).write(args.losses);
  if (args.write_gradient) operands.write(args.logits);
  return operands;
}

KernelWork work(const Dropout& args) { return read(args.x).write(args.y); }

KernelWork work(const EmbeddingForward& args) {
  KernelWork work = read(args.tokens).write(args.y);
  work.read += selected_bytes(args.tokens, args.token_weight);
  if (args.position_weight.defined())
    work.read += bytes(args.position_weight.narrow(0, 0, args.y.shape[1]));
  return work;
}

KernelWork work(const EmbeddingBackward& args) {
  KernelWork work = read(args.tokens, args.grad_y).write(args.grad_position_weight);
  if (!args.grad_token_weight) return work;
  const TensorView& table = args.grad_token_weight.view;
  const double selected = selected_bytes(args.tokens, table);
  work.written += args.grad_token_weight.accumulate ? selected : bytes(table);
  if (args.grad_token_weight.accumulate) work.read += selected;
  return work;
}

KernelWork work(const EmbeddingBackwardRows& args) {
  return read(args.tokens, args.grad_y).write(args.rows, args.ids);
}

KernelWork work(const Fill& args) { return Operands().write(args.out); }

KernelWork work(const GatedForward& args) { return read(args.gate, args.up).write(args.y); }

KernelWork work(const GatedBackward& args) {
  return read(args.gate, args.up, args.grad_y).write(args.grad_gate, args.grad_up);
}

KernelWork work(const Gather& args) { return read(args.y, args.index).write(args.y); }

KernelWork work(const GeluForward& args) { return read(args.x).write(args.y); }

KernelWork work(const GeluBackward& args) { return read(args.x, args.grad_y).write(args.grad_x); }

KernelWork work(const GroupPairs& args) {
  return read(args.experts).write(args.order, args.place, args.offsets, args.counts);
}

KernelWork work(const GroupedMatmul& args) {
  const double share = share_of_groups(args);
  KernelWork work = read(args.a).write(args.c).flops(2.0 * static_cast<double>(args.a.numel()) *
                                                     static_cast<double>(args.c.view.shape[1]));
  work = {share * work.read, share * work.written, share * work.flops};
  for (std::int64_t i = 0; i < args.groups; ++i) work.read += bytes(args.b[i]);
  return work;
}

KernelWork work(const GroupedGradient& args) {
  const double share = share_of_groups(args);
  Operands results;
  for (std::int64_t i = 0; i < args.groups; ++i) results.write(args.c[i]);
  KernelWork work = results;
  work.read += share * (bytes(args.a) + bytes(args.b));
  work.flops =
      2.0 * share * static_cast<double>(args.a.numel()) * static_cast<double>(args.b.shape[1]);
  return work;
}

KernelWork work(const Matmul& args) {
  Operands operands = read(args.a, args.b, args.bias, args.residual);
  if (args.accumulate) operands.read(args.c);
  if (args.epilogue == Epilogue::GeluGradient) operands.read(args.pre);
  if (args.epilogue == Epilogue::Gelu) operands.write(args.pre);
  return operands.write(args.c).flops(2.0 * static_cast<double>(args.c.numel()) *
                                      static_cast<double>(args.a.shape[args.transpose_a ? 0 : 1]));
}

KernelWork work(const MaxAlong& args) { return read(args.in).write(args.values, args.indices); }

KernelWork work(const NormForward& args) {
  return read(args.x, args.weight, args.bias, args.residual)
      .write(args.y, args.mean, args.rstd, args.sum);
}

KernelWork work(const NormBackward& args) {
  return read(args.x, args.weight, args.mean, args.rstd, args.grad_y)
      .write(args.grad_x, args.grad_weight, args.grad_bias, args.grad_x_sums);
}

KernelWork work(const Rotary& args) { return read(args.x).write(args.y); }

KernelWork work(const RowProducts& args) { return read(args.a, args.b, args.place).write(args.y); }

KernelWork work(const Sampling& args) { return read(args.logits).write(args.tokens); }

KernelWork work(const ScatterAdd& args) { return read(args.y, args.index, args.y).write(args.y); }

KernelWork work(const SoftmaxForward& args) { return read(args.x).write(args.y); }

KernelWork work(const SoftmaxBackward& args) {
  return read(args.y, args.grad_y).write(args.grad_x);
}

KernelWork work(const SpreadRows& args) {
  return read(args.x, args.order, args.weights).write(args.y);
}

KernelWork work(const MovingAverage& args) {
  return read(args.param, args.average).write(args.average);
}

KernelWork work(const MuonMomentum& args) {
  return read(args.grad, args.momentum).write(args.momentum, args.out);
}

KernelWork work(const Normalize& args) { return read(args.x).write(args.out); }

KernelWork work(const SumOfSquares& args) { return read(args.x).write(args.sum); }

KernelWork work(const SumRows& args) { return read(args.in).write(args.out); }

KernelWork work(const SumTo& args) { return read(args.in).write(args.out); }

KernelWork work(const TopK& args) { return read(args.x).write(args.index); }

KernelWork work(const Total& args) { return read(args.in).write(args.out); }

KernelWork work(const Unary& args) { return read(args.x).write(args.y); }

KernelWork work(const WeightUpdate& args) {
  return read(args.param, args.update).write(args.param, args.copy);
}

KernelWork work(const Where& args) { return read(args.condition, args.a, args.b).write(args.y); }

}  // namespace tessera::kernels
