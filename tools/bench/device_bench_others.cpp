#include <fmt/format.h>

#include "core/base/rng.h"
#include "core/ops/rotary.h"
#include "kernels/activation.h"
#include "kernels/dropout.h"
#include "kernels/elementwise.h"
#include "kernels/norm.h"
#include "kernels/optimizer.h"
#include "kernels/rotary.h"
#include "kernels/sampling.h"
#include "tools/bench/device_measure.h"

// Bytes count each operand once.
namespace tessera::kernels {
namespace {

void rms_norm(DeviceMeasure& bench, const DeviceShapes& s) {
  const std::int64_t rows = s.rows(), c = s.width();
  const double elements = bench.halves(rows, c);
  const std::string shape = fmt::format("{}x{}", rows, c);
  const auto x = [&] { return bench.tensor({rows, c}); };
  const auto norm = [&] {
    return NormForward{
        .x = x(), .weight = bench.tensor({c}), .y = x(), .rstd = bench.tensor({rows}, DType::F32)};
  };
  bench.measure_kernel("rms_norm_forward " + shape, Bound::Memory, 4 * elements, rms_norm_forward,
                       norm);
  bench.measure_kernel("rms_norm_forward + residual " + shape, Bound::Memory, 8 * elements,
                       rms_norm_forward, [&] {
                         NormForward args = norm();
                         args.residual = x();
                         args.sum = x();
                         return args;
                       });
  bench.measure_kernel("rms_norm_backward " + shape, Bound::Memory, 6 * elements, rms_norm_backward,
                       [&] {
                         const NormForward forward = norm();
                         rms_norm_forward(bench.context(), forward);
                         return NormBackward{.x = forward.x,
                                             .weight = forward.weight,
                                             .rstd = forward.rstd,
                                             .grad_y = x(),
                                             .grad_x = fresh(x()),
                                             .grad_weight = added(bench.tensor({c}, DType::F32))};
                       });
}

/// Gate and up are the halves of one matrix product, and their gradients likewise.
void gated(DeviceMeasure& bench, const DeviceShapes& s) {
  const std::int64_t rows = s.rows(), hidden = 4 * s.width();
  const double elements = bench.halves(rows, hidden);
  const auto half = [&](const TensorView& packed, std::int64_t part) {
    return packed.narrow(1, part * hidden, hidden);
  };
  const auto packed = [&] { return bench.tensor({rows, 2 * hidden}); };
  const auto single = [&] { return bench.tensor({rows, hidden}); };
  for (const GatedKind kind : {GatedKind::SwiGlu, GatedKind::GeGlu}) {
    const char* name = kind == GatedKind::SwiGlu ? "swiglu" : "geglu";
    bench.measure_kernel(fmt::format("{} forward {}x{}", name, rows, hidden), Bound::Memory,
                         6 * elements, gated_forward, [&] {
                           const TensorView in = packed();
                           return GatedForward{half(in, 0), half(in, 1), single(), kind};
                         });
    bench.measure_kernel(fmt::format("{} backward {}x{}", name, rows, hidden), Bound::Memory,
                         10 * elements, gated_backward, [&] {
                           const TensorView in = packed(), grad = packed();
                           return GatedBackward{
                               half(in, 0),          half(in, 1),          single(),
                               fresh(half(grad, 0)), fresh(half(grad, 1)), kind};
                         });
  }
}

/// As in a Llama-style block: rotates queries and keys and copies values of one packed tensor.
void rotary_and_dropout(DeviceMeasure& bench, const DeviceShapes& s) {
  const std::int64_t rows = s.rows(), c = s.width();
  const Shape qkv{s.batch, s.seq, 3 * s.heads, s.head_dim};
  for (const bool inverse : {false, true}) {
    bench.measure_kernel(fmt::format("rotary{} {}x{}", inverse ? " inverse" : "", rows, 3 * c),
                         Bound::Memory, 12 * bench.halves(rows, c), rotary, [&] {
                           return Rotary{.x = bench.tensor(qkv),
                                         .y = fresh(bench.tensor(qkv)),
                                         .angles = ops::rotary_angles({.base = 1e4}, s.head_dim, 0),
                                         .inverse = inverse,
                                         .copied_heads = s.heads};
                         });
  }
  bench.measure_kernel(fmt::format("dropout {}x{}", rows, c), Bound::Memory,
                       4 * bench.halves(rows, c), dropout, [&] {
                         return Dropout{.x = bench.tensor({rows, c}),
                                        .y = fresh(bench.tensor({rows, c})),
                                        .p = 0.1F,
                                        .rng = bench.context().rng_step(),
                                        .sample_elements = static_cast<std::uint64_t>(c)};
                       });
}

/// Small kernels: sampling from the logits of one token per sequence, and the clipping factor.
void sampling_and_clipping(DeviceMeasure& bench, const DeviceShapes& s) {
  struct Choice {
    const char* name;
    double temperature;
    std::int64_t top_k;
    double top_p;
  };
  for (const Choice& choice :
       {Choice{"the most likely", 0.0, 0, 1.0}, Choice{"any", 1.0, 0, 1.0},
        Choice{"top_k=50", 1.0, 50, 1.0}, Choice{"top_p=0.9", 1.0, 0, 0.9}}) {
    bench.measure_kernel(fmt::format("sample {} {}x{}", choice.name, s.batch, s.vocab),
                         Bound::Memory, 4 * number(s.batch) * number(s.vocab), sample, [&] {
                           return Sampling{.logits = bench.tensor({s.batch, s.vocab}, DType::F32),
                                           .tokens = bench.empty({s.batch}, DType::I32),
                                           .temperature = choice.temperature,
                                           .top_k = choice.top_k,
                                           .top_p = choice.top_p,
                                           .key = RngKey::make(1, RngPurpose::Sampling, 0)};
                         });
  }
  bench.measure_kernel("clip_factor", Bound::Memory, 2 * 8 + 4, clip_factor, [&] {
    const ClipFactor args{bench.empty({2}, DType::F64), bench.empty({1}, DType::F32), 1.0};
    fill(bench.context(), args.totals, 4.0);
    return args;
  });
}

void updates(DeviceMeasure& bench, const DeviceShapes& s) {
  const std::int64_t n = s.parameters();
  bench.measure_kernel(fmt::format("adamw + bf16 copy n={}", n), Bound::Memory, 30 * number(n),
                       adamw, [&] {
                         AdamW args = adamw_of(bench, n, DType::F32);
                         args.copy = bench.empty({n}, DType::BF16);
                         return args;
                       });
  for (const bool stochastic : {false, true}) {
    bench.measure_kernel(
        fmt::format("adamw bf16 weights{} n={}", stochastic ? ", stochastic" : "", n),
        Bound::Memory, 24 * number(n), adamw, [&] {
          AdamW args = adamw_of(bench, n, DType::BF16);
          args.stochastic = stochastic;
          args.rng = bench.context().rng_step();
          return args;
        });
  }
}

}  // namespace

void measure_other_kernels(DeviceMeasure& bench, const DeviceShapes& s) {
  rms_norm(bench, s);
  gated(bench, s);
  rotary_and_dropout(bench, s);
  sampling_and_clipping(bench, s);
  updates(bench, s);
  if (bench.dtype() != DType::F32) measure_attention(bench, s, DType::F32);
}

}  // namespace tessera::kernels
