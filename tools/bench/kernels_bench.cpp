// Times kernels on a GPU or the CPU, those of a GPT-2 124M step first, and prints each kernel's
// share of the roof, measured in the same run: a copy of 1 GiB, or a square matrix product in the
// kernel's compute dtype.
//
//   tessera_kernels_bench --device cuda|cpu [--quick] [--batch B] [--only PART] [--json FILE]
//     [--plugin FILE] [--threads N] [--level v3|...] [--dtype f32|bf16]
//
// A sample is the host time of enough launches for some milliseconds, between two synchronizations;
// "CPU" is the CPU time of one launch, meaningful on shared cores, too. Bytes count each operand
// once. Each result is written at once. Exit code 1 if a kernel failed and was left out.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <string>

#include "core/base/device_backend.h"
#include "core/base/error.h"
#include "kernels/activation.h"
#include "kernels/attention.h"
#include "kernels/cross_entropy.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "kernels/matmul.h"
#include "kernels/norm.h"
#include "kernels/optimizer.h"
#include "tools/bench/device_measure.h"

namespace tessera::kernels {
namespace {

double flops(std::int64_t m, std::int64_t k, std::int64_t n) {
  return 2 * number(m) * number(k) * number(n);
}

/// One [M, K] x [K, N] matrix product; weight gradients (transpose_a) accumulate in float32.
void product(DeviceMeasure& bench, const std::string& name, std::int64_t m, std::int64_t k,
             std::int64_t n, bool transpose_a, bool transpose_b, bool bias = false) {
  const bool weight_gradient = transpose_a;
  bench.measure_kernel(
      fmt::format("{} [{}x{}] [{}x{}]", name, m, k, k, n), Bound::Arithmetic, flops(m, k, n),
      matmul, [&] {
        Matmul args;
        args.a = bench.tensor(transpose_a ? Shape{k, m} : Shape{m, k});
        args.b = bench.tensor(transpose_b ? Shape{n, k} : Shape{k, n});
        args.c = bench.tensor({m, n}, weight_gradient ? DType::F32 : bench.dtype());
        args.transpose_a = transpose_a;
        args.transpose_b = transpose_b;
        args.accumulate = weight_gradient;
        if (bias) args.bias = bench.tensor({n});
        return args;
      });
}

void roofs(DeviceMeasure& bench, const DeviceShapes& s) {
  bench.measure("roof: copy f32", Bound::Memory, 8 * number(s.copied), [&] {
    const TensorView from = bench.tensor({s.copied}, DType::F32);
    const TensorView to = bench.tensor({s.copied}, DType::F32);
    return [=, &bench] { cast(bench.context(), from, fresh(to)); };
  });
  const std::int64_t n = s.square;
  product(bench, "roof: matmul", n, n, n, false, false);
  const auto square = [&] { return bench.tensor({n, n}, DType::F32); };
  bench.measure_kernel(fmt::format("roof: matmul f32 [{0}x{0}] [{0}x{0}]", n), Bound::ArithmeticF32,
                       flops(n, n, n), matmul, [&] {
                         return Matmul{square(), square(), square()};
                       });
}

void products(DeviceMeasure& bench, const DeviceShapes& s) {
  struct Linear {
    const char* name;
    std::int64_t in, out;
  };
  const std::int64_t c = s.width(), rows = s.rows();
  for (const auto& [name, in, out] : {Linear{"qkv", c, 3 * c},
                                      {"attention proj", c, c},
                                      {"mlp in", c, 4 * c},
                                      {"mlp out", 4 * c, c}}) {
    product(bench, fmt::format("matmul {}", name), rows, in, out, false, false, true);
    product(bench, fmt::format("matmul {} dx", name), rows, out, in, false, true);
    product(bench, fmt::format("matmul {} dw", name), in, rows, out, true, false);
  }
}

Matmul without_epilogue(Matmul args) {
  args.epilogue = Epilogue::None;
  return args;
}
void matmul_then_gelu(Context& context, const Matmul& args) {
  Matmul product = without_epilogue(args);
  product.c = args.pre;
  matmul(context, product);
  gelu_forward(context, {args.pre, args.c});
}
void matmul_then_gelu_backward(Context& context, const Matmul& args) {
  matmul(context, without_epilogue(args));
  gelu_backward(context, {args.pre, args.c, fresh(args.c)});
}
/// The MLP's matrix products with GELU, or GELU's gradient: fused, and as separate kernels.
void products_with_epilogue(DeviceMeasure& bench, const DeviceShapes& s) {
  const std::int64_t rows = s.rows(), narrow = s.width(), wide = 4 * s.width();
  const auto both = [&](const char* fused, const char* separate, const char* layer,
                        void (*separately)(Context&, const Matmul&), const auto& prepare) {
    const std::string shape = fmt::format(" {} {}x{}x{}", layer, rows, narrow, wide);
    const double work = flops(rows, narrow, wide);
    bench.measure_kernel(fused + shape, Bound::Arithmetic, work, matmul, prepare);
    bench.measure_kernel(separate + shape, Bound::Arithmetic, work, separately, prepare);
  };
  const auto hidden = [&] { return bench.tensor({rows, wide}); };
  both("matmul_gelu", "matmul, gelu_forward", "mlp in", matmul_then_gelu, [&] {
    return Matmul{.a = bench.tensor({rows, narrow}),
                  .b = bench.tensor({narrow, wide}),
                  .c = hidden(),
                  .bias = bench.tensor({wide}),
                  .epilogue = Epilogue::Gelu,
                  .pre = hidden()};
  });
  both("matmul_gelu_backward", "matmul, gelu_backward", "mlp out", matmul_then_gelu_backward, [&] {
    return Matmul{.a = bench.tensor({rows, narrow}),
                  .b = bench.tensor({wide, narrow}),
                  .c = hidden(),
                  .transpose_b = true,
                  .epilogue = Epilogue::GeluGradient,
                  .pre = hidden()};
  });
}

/// Head and cross entropy on a part of all rows, as linear_cross_entropy() computes them: logits and
/// weight are padded to a multiple of 64 columns and rows, the weight's gradient is not.
void head(DeviceMeasure& bench, const DeviceShapes& s) {
  const std::int64_t c = s.width(), rows = s.logit_rows, v = s.vocab;
  const auto padded = [&] { return bench.tensor({rows, s.vocab_row}); };
  const auto padded_weight = [&] { return bench.tensor({s.vocab_row, c}); };
  const auto logits = [&] { return padded().narrow(1, 0, v); };
  const auto x = [&] { return bench.tensor({rows, c}); };
  const auto measure = [&](const char* what, const auto& prepare) {
    bench.measure_kernel(fmt::format("matmul head{} {} rows", what, rows), Bound::Arithmetic,
                         flops(rows, v, c), matmul, prepare);
  };
  measure("", [&] { return Matmul{x(), padded_weight(), padded(), false, true}; });
  measure(" dx", [&] { return Matmul{padded(), padded_weight(), x()}; });
  measure(" dw", [&] {
    return Matmul{logits(), x(), bench.tensor({v, c}, DType::F32), true, false, true};
  });
  bench.measure_kernel(
      fmt::format("cross_entropy with gradient {}x{}", rows, v), Bound::Memory,
      4 * bench.halves(rows, v), cross_entropy, [&] {
        TensorView targets = bench.indices(1, rows, v);
        targets.shape = {rows};
        targets.strides = {1};
        return CrossEntropy{logits(), targets, bench.tensor({rows}, DType::F32), true, 1e-3};
      });
}

void rows_of_activations(DeviceMeasure& bench, const DeviceShapes& s) {
  const std::int64_t rows = s.rows(), c = s.width();
  const double elements = bench.halves(rows, c);
  const std::string shape = fmt::format("{}x{}", rows, c), wide = fmt::format("{}x{}", rows, 4 * c);
  const auto x = [&](std::int64_t width) { return bench.tensor({rows, width}); };
  const auto sums = [&] { return added(bench.tensor({c}, DType::F32)); };
  bench.measure("add " + shape, Bound::Memory, 6 * elements, [&] {
    const TensorView a = x(c), b = x(c), y = x(c);
    return [=, &bench] { add(bench.context(), a, b, y); };
  });
  bench.measure("sum_rows " + wide, Bound::Memory, 8 * elements, [&] {
    const TensorView in = x(4 * c), out = bench.tensor({4 * c}, DType::F32);
    return [=, &bench] { sum_rows(bench.context(), in, added(out)); };
  });
  bench.measure_kernel("gelu_forward " + wide, Bound::Memory, 16 * elements, gelu_forward, [&] {
    return GeluForward{x(4 * c), x(4 * c)};
  });
  bench.measure_kernel("gelu_backward " + wide, Bound::Memory, 24 * elements, gelu_backward, [&] {
    return GeluBackward{x(4 * c), x(4 * c), fresh(x(4 * c))};
  });
  const auto norm = [&] {
    return NormForward{.x = x(c),
                       .weight = bench.tensor({c}),
                       .bias = bench.tensor({c}),
                       .y = x(c),
                       .mean = bench.tensor({rows}, DType::F32),
                       .rstd = bench.tensor({rows}, DType::F32)};
  };
  bench.measure_kernel("layer_norm_forward " + shape, Bound::Memory, 4 * elements,
                       layer_norm_forward, norm);
  bench.measure_kernel("layer_norm_forward + residual " + shape, Bound::Memory, 8 * elements,
                       layer_norm_forward, [&] {
                         NormForward args = norm();
                         args.residual = x(c);
                         args.sum = x(c);
                         return args;
                       });
  const auto norm_backward = [&] {
    const NormForward forward = norm();
    layer_norm_forward(bench.context(), forward);
    return NormBackward{forward.x, forward.weight, forward.mean, forward.rstd,
                        x(c),      fresh(x(c)),    sums(),       sums()};
  };
  bench.measure_kernel("layer_norm_backward " + shape, Bound::Memory, 6 * elements,
                       layer_norm_backward, norm_backward);
  // As within a block: adds to the residual's gradient, and sums it for a bias.
  bench.measure_kernel("layer_norm_backward + residual, sums " + shape, Bound::Memory, 8 * elements,
                       layer_norm_backward, [&] {
                         NormBackward args = norm_backward();
                         args.grad_x = added(x(c));
                         args.grad_x_sums = sums();
                         return args;
                       });
  // Bytes: one row read from the table and one row written for each token.
  bench.measure_kernel("embedding_forward " + shape, Bound::Memory, 4 * elements, embedding_forward,
                       [&] {
                         return EmbeddingForward{.tokens = bench.indices(s.batch, s.seq, s.vocab),
                                                 .token_weight = bench.tensor({s.vocab, c}),
                                                 .position_weight = bench.tensor({s.seq, c}),
                                                 .y = bench.tensor({s.batch, s.seq, c})};
                       });
  // Counts one read of grad_y, although both gradients read it, so that 65536 rows reach at most
  // 72% of the roof.
  bench.measure_kernel("embedding_backward " + shape, Bound::Memory,
                       2 * elements + 4 * number(s.vocab + s.seq) * number(c), embedding_backward,
                       [&] {
                         return EmbeddingBackward{bench.indices(s.batch, s.seq, s.vocab),
                                                  bench.tensor({s.batch, s.seq, c}),
                                                  fresh(bench.tensor({s.vocab, c}, DType::F32)),
                                                  fresh(bench.tensor({s.seq, c}, DType::F32))};
                       });
}

void all_parameters(DeviceMeasure& bench, const DeviceShapes& s) {
  const std::int64_t n = s.parameters();
  bench.measure(fmt::format("cast f32 to bf16 n={}", n), Bound::Memory, 6 * number(n), [&] {
    const TensorView from = bench.tensor({n}, DType::F32), to = bench.tensor({n}, DType::BF16);
    return [=, &bench] { cast(bench.context(), from, fresh(to)); };
  });
  bench.measure_kernel(fmt::format("adamw n={}", n), Bound::Memory, 28 * number(n), adamw,
                       [&] { return adamw_of(bench, n, DType::F32); });
  bench.measure_kernel(
      fmt::format("sum_of_squares n={}", n), Bound::Memory, 4 * number(n), sum_of_squares, [&] {
        return SumOfSquares{bench.tensor({n}, DType::F32), bench.empty({1}, DType::F64)};
      });
}

}  // namespace

AdamW adamw_of(DeviceMeasure& bench, std::int64_t n, DType dtype) {
  const auto values = [&] { return bench.tensor({n}, DType::F32); };
  AdamW args{.param = bench.tensor({n}, dtype),
             .grad = values(),
             .exp_avg = values(),
             .exp_avg_sq = values(),
             .ranges = {{.end = n, .lr = 1e-4, .weight_decay = 0.1}}};
  fill(bench.context(), args.exp_avg_sq, 0.25);
  return args;
}

void measure_attention(DeviceMeasure& bench, const DeviceShapes& s, DType dtype) {
  const std::int64_t c = s.width(), pairs = s.seq * (s.seq + 1) / 2;
  const double work = number(s.batch * c) * number(pairs);  // pairs below the diagonal
  const bool half = dtype == DType::BF16;
  const Bound bound = half ? Bound::Arithmetic : Bound::ArithmeticF32;
  const std::string kind = half ? "attention" : "f32 attention";
  const std::string shape = fmt::format("B={} T={} H={} D={}", s.batch, s.seq, s.heads, s.head_dim);
  const auto window = [&](const TensorView& packed, std::int64_t part) {
    TensorView view = packed;
    view.data = packed.at(part * c);
    view.shape = {s.batch, s.seq, s.heads, s.head_dim};
    view.strides = {s.seq * 3 * c, 3 * c, s.head_dim, 1};
    return view;
  };
  const auto packed = [&] { return bench.tensor({s.batch, s.seq, 3 * c}, dtype); };
  const auto single = [&] { return bench.tensor({s.batch, s.seq, s.heads, s.head_dim}, dtype); };
  const auto make = [&] {
    const TensorView qkv = packed();
    return AttentionForward{.q = window(qkv, 0),
                            .k = window(qkv, 1),
                            .v = window(qkv, 2),
                            .out = single(),
                            .log_sum_exp = bench.tensor({s.batch, s.heads, s.seq}, DType::F32),
                            .scale = 0.125F};
  };
  bench.measure_kernel(kind + " forward " + shape, bound, 4 * work, attention_forward, make);
  bench.measure_kernel(kind + " backward " + shape, bound, 10 * work, attention_backward, [&] {
    const AttentionForward forward = make();
    attention_forward(bench.context(), forward);
    const TensorView grad = packed();
    return AttentionBackward{.q = forward.q,
                             .k = forward.k,
                             .v = forward.v,
                             .out = forward.out,
                             .log_sum_exp = forward.log_sum_exp,
                             .grad_out = single(),
                             .grad_q = fresh(window(grad, 0)),
                             .grad_k = fresh(window(grad, 1)),
                             .grad_v = fresh(window(grad, 2)),
                             .scale = forward.scale};
  });
}

namespace {

// @return number of kernels that failed and were left out
int run(const DeviceBenchOptions& options, const ContextOptions& device, std::int64_t batch) {
  const bool gpu = device.device.type == DeviceType::CUDA;
  DeviceShapes shapes{.batch = batch,
                      .seq = 1024,
                      .heads = 12,
                      .head_dim = 64,
                      .vocab = 50257,
                      .vocab_row = 50304,
                      .layers = 12,
                      .logit_rows = std::min<std::int64_t>(8192, batch * 1024),
                      .copied = std::int64_t{1} << 28,
                      .square = gpu ? 8192 : 1024};
  if (options.quick) shapes = {2, 32, 2, 16, 97, 128, 2, 33, 4096, 64};
  DeviceMeasure bench(Context::create(device), options);
  Context& context = bench.context();
  fmt::print("{}; GPT-2 shapes, {}, B={} T={}\n",
             gpu ? context.backend().description()
                 : fmt::format("{}, {} threads", cpu_level_name(device.cpu_level), device.threads),
             options.dtype, shapes.batch, shapes.seq);
  fmt::print("{:<46} {:>9} {:>9} {:>9} {:>9} {:>18} {:>6}\n", "", "ms", "best", "worst", "CPU",
             "rate", "roof");
  roofs(bench, shapes);
  products(bench, shapes);
  products_with_epilogue(bench, shapes);
  head(bench, shapes);
  measure_attention(bench, shapes, options.dtype);
  rows_of_activations(bench, shapes);
  all_parameters(bench, shapes);
  measure_other_kernels(bench, shapes);
  if (gpu)
    for (const std::string& note : context.backend().take_notes()) fmt::print("{}\n", note);
  return bench.left_out();
}

}  // namespace
}  // namespace tessera::kernels

int main(int argc, char** argv) {
  tessera::kernels::DeviceBenchOptions options;
  tessera::ContextOptions context;
  std::string device, level, dtype;
  int batch = 0;
  CLI::App app("Times kernels");
  app.add_option("--device", device)->required()->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--batch", batch, "Sequences of 1024 tokens; default: 64, or 1 on the CPU")
      ->check(CLI::PositiveNumber);
  app.add_option("--dtype", dtype, "Of activations; default: bf16, or f32 on the CPU")
      ->check(CLI::IsMember({"f32", "bf16"}));
  app.add_option("--only", options.only, "Part of the kernels' names");
  app.add_option("--json", options.json, "Also write results to this file");
  app.add_option("--plugin", context.plugin, "Of the GPU");
  app.add_option("--threads", context.threads, "Of the CPU")->check(CLI::PositiveNumber);
  app.add_option("--level", level, "Of the CPU's instructions");
  app.add_flag("--quick", options.quick, "Tiny shapes and one sample, to test the benchmark");
  CLI11_PARSE(app, argc, argv);
  const bool gpu = device == "cuda";
  if (gpu) context.device = {tessera::DeviceType::CUDA, 0};
  if (!(dtype.empty() ? gpu : dtype == "bf16")) options.dtype = tessera::DType::F32;
  try {
    if (!level.empty()) context.cpu_level = tessera::parse_cpu_level(level);
    return tessera::kernels::run(options, context, batch > 0 ? batch : gpu ? 64 : 1) == 0 ? 0 : 1;
  } catch (const tessera::Error& error) {
    fmt::print(stderr, "tessera_kernels_bench: {}\n", error.what());
    return 1;
  }
}
