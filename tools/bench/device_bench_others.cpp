#include <fmt/format.h>

#include "core/base/rng.h"
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
  const auto x = [&] { return bench.tensor({rows, c}); };
  const auto norm = [&] {
    RmsNormForward args;
    args.x = x();
    args.weight = bench.tensor({c});
    args.y = x();
    args.rstd = bench.tensor({rows}, DType::F32);
    return args;
  };
  bench.measure(fmt::format("rms_norm_forward {}x{}", rows, c), Bound::Memory, 4 * elements, [&] {
    return [args = norm(), &bench] { rms_norm_forward(bench.context(), args); };
  });
  bench.measure(fmt::format("rms_norm_forward + residual {}x{}", rows, c), Bound::Memory,
                8 * elements, [&] {
                  RmsNormForward args = norm();
                  args.residual = x();
                  args.sum = x();
                  return [args, &bench] { rms_norm_forward(bench.context(), args); };
                });
  bench.measure(fmt::format("rms_norm_backward {}x{}", rows, c), Bound::Memory, 6 * elements, [&] {
    const RmsNormForward forward = norm();
    rms_norm_forward(bench.context(), forward);
    const RmsNormBackward args{forward.x, forward.weight, forward.rstd,
                               x(),       fresh(x()),     added(bench.tensor({c}, DType::F32))};
    return [args, &bench] { rms_norm_backward(bench.context(), args); };
  });
}

/// Gate and up are the halves of one product; the same for their gradients.
void gated(DeviceMeasure& bench, const DeviceShapes& s) {
  const std::int64_t rows = s.rows(), hidden = 4 * s.width();
  const double elements = bench.halves(rows, hidden);
  const auto half = [&](const TensorView& packed, std::int64_t part) {
    TensorView view = packed;
    view.data = static_cast<std::byte*>(packed.data) +
                static_cast<std::size_t>(part * hidden) * dtype_size(packed.dtype);
    view.shape = {rows, hidden};
    return view;
  };
  const auto packed = [&] { return bench.tensor({rows, 2 * hidden}); };
  const auto single = [&] { return bench.tensor({rows, hidden}); };
  for (const GatedKind kind : {GatedKind::SwiGlu, GatedKind::GeGlu}) {
    const char* name = kind == GatedKind::SwiGlu ? "swiglu" : "geglu";
    bench.measure(fmt::format("{} forward {}x{}", name, rows, hidden), Bound::Memory, 6 * elements,
                  [&] {
                    const TensorView in = packed();
                    const GatedForward args{half(in, 0), half(in, 1), single(), kind};
                    return [args, &bench] { gated_forward(bench.context(), args); };
                  });
    bench.measure(fmt::format("{} backward {}x{}", name, rows, hidden), Bound::Memory,
                  10 * elements, [&] {
                    const TensorView in = packed(), grad = packed();
                    const GatedBackward args{half(in, 0),          half(in, 1),          single(),
                                             fresh(half(grad, 0)), fresh(half(grad, 1)), kind};
                    return [args, &bench] { gated_backward(bench.context(), args); };
                  });
  }
}

/// As in a block: rotates queries and keys and copies values of one packed product.
void rotary_and_dropout(DeviceMeasure& bench, const DeviceShapes& s) {
  const std::int64_t rows = s.rows(), c = s.width();
  const Shape qkv{s.batch, s.seq, 3 * s.heads, s.head_dim};
  for (const bool inverse : {false, true}) {
    bench.measure(fmt::format("rotary{} {}x{}", inverse ? " inverse" : "", rows, 3 * c),
                  Bound::Memory, 12 * bench.halves(rows, c), [&] {
                    const Rotary args{.x = bench.tensor(qkv),
                                      .y = fresh(bench.tensor(qkv)),
                                      .inverse = inverse,
                                      .copied_heads = s.heads};
                    return [args, &bench] { rotary(bench.context(), args); };
                  });
  }
  bench.measure(fmt::format("dropout {}x{}", rows, c), Bound::Memory, 4 * bench.halves(rows, c),
                [&] {
                  const Dropout args{.x = bench.tensor({rows, c}),
                                     .y = fresh(bench.tensor({rows, c})),
                                     .p = 0.1F,
                                     .rng = bench.context().rng_step(),
                                     .sample_elements = static_cast<std::uint64_t>(c)};
                  return [args, &bench] { dropout(bench.context(), args); };
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
    bench.measure(fmt::format("sample {} {}x{}", choice.name, s.batch, s.vocab), Bound::Memory,
                  4 * number(s.batch) * number(s.vocab), [&] {
                    const Sampling args{.logits = bench.tensor({s.batch, s.vocab}, DType::F32),
                                        .tokens = bench.empty({s.batch}, DType::I32),
                                        .temperature = choice.temperature,
                                        .top_k = choice.top_k,
                                        .top_p = choice.top_p,
                                        .key = RngKey::make(1, RngPurpose::Sampling, 0)};
                    return [args, &bench] { sample(bench.context(), args); };
                  });
  }
  bench.measure("clip_factor", Bound::Memory, 2 * 8 + 4, [&] {
    const ClipFactor args{bench.empty({2}, DType::F64), bench.empty({1}, DType::F32), 1.0};
    fill(bench.context(), args.totals, 4.0);
    return [args, &bench] { clip_factor(bench.context(), args); };
  });
}

void updates(DeviceMeasure& bench, const DeviceShapes& s) {
  const std::int64_t n = s.parameters();
  const auto update = [&](DType dtype) {
    AdamW args{bench.tensor({n}, dtype), bench.tensor({n}, DType::F32),
               bench.tensor({n}, DType::F32), bench.tensor({n}, DType::F32), 1e-4};
    fill(bench.context(), args.exp_avg_sq, 0.25);
    args.weight_decay = 0.1;
    return args;
  };
  bench.measure(fmt::format("adamw + bf16 copy n={}", n), Bound::Memory, 30 * number(n), [&] {
    AdamW args = update(DType::F32);
    args.copy = bench.empty({n}, DType::BF16);
    return [args, &bench] { adamw(bench.context(), args); };
  });
  for (const bool stochastic : {false, true}) {
    bench.measure(fmt::format("adamw bf16 weights{} n={}", stochastic ? ", stochastic" : "", n),
                  Bound::Memory, 24 * number(n), [&] {
                    AdamW args = update(DType::BF16);
                    args.stochastic = stochastic;
                    args.rng = bench.context().rng_step();
                    return [args, &bench] { adamw(bench.context(), args); };
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
