// Times kernels on a GPU or the CPU, those of a GPT-2 124M step first, and prints each kernel's
// share of the roof: a copy of 1 GiB, or a square product in the kernel's compute dtype, in the same
// run.
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

constexpr const char* kCopyRoof = "roof: copy f32";
constexpr const char* kProductRoof = "roof: matmul";
constexpr const char* kProductRoofF32 = "roof: matmul f32";

/// One [M, K] x [K, N] product; weight gradients (transpose_a) accumulate in float32.
void product(DeviceMeasure& bench, const std::string& name, std::int64_t m, std::int64_t k,
             std::int64_t n, bool transpose_a, bool transpose_b, bool bias = false) {
  const bool weight_gradient = transpose_a;
  bench.measure(fmt::format("{} [{}x{}] [{}x{}]", name, m, k, k, n), Bound::Arithmetic,
                2 * number(m) * number(k) * number(n), [=, &bench] {
                  Matmul args;
                  args.a = bench.tensor(transpose_a ? Shape{k, m} : Shape{m, k});
                  args.b = bench.tensor(transpose_b ? Shape{n, k} : Shape{k, n});
                  args.c = bench.tensor({m, n}, weight_gradient ? DType::F32 : bench.dtype());
                  args.transpose_a = transpose_a;
                  args.transpose_b = transpose_b;
                  args.accumulate = weight_gradient;
                  if (bias) args.bias = bench.tensor({n});
                  return [args, &bench] { matmul(bench.context(), args); };
                });
}

void roofs(DeviceMeasure& bench, const DeviceShapes& s) {
  bench.measure(kCopyRoof, Bound::Memory, 8 * number(s.copied), [&] {
    const TensorView from = bench.tensor({s.copied}, DType::F32);
    const TensorView to = bench.tensor({s.copied}, DType::F32);
    return [=, &bench] { cast(bench.context(), from, fresh(to)); };
  });
  product(bench, kProductRoof, s.square, s.square, s.square, false, false);
  const std::int64_t n = s.square;
  bench.measure(fmt::format("{} [{}x{}] [{}x{}]", kProductRoofF32, n, n, n, n),
                Bound::ArithmeticF32, 2 * number(n) * number(n) * number(n), [&] {
                  Matmul args;
                  args.a = bench.tensor({n, n}, DType::F32);
                  args.b = bench.tensor({n, n}, DType::F32);
                  args.c = bench.tensor({n, n}, DType::F32);
                  return [args, &bench] { matmul(bench.context(), args); };
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

/// The MLP's products with GELU and its gradient: fused, and as separate kernels.
void products_and_gelu(DeviceMeasure& bench, const DeviceShapes& s) {
  const std::int64_t rows = s.rows(), narrow = s.width(), wide = 4 * s.width();
  const std::string shape = fmt::format("{}x{}x{}", rows, narrow, wide);
  const double work = 2 * number(rows) * number(narrow) * number(wide);
  const auto hidden = [&bench, rows, wide] { return bench.tensor({rows, wide}); };
  const auto forward = [&] {
    return Matmul{.a = bench.tensor({rows, narrow}),
                  .b = bench.tensor({narrow, wide}),
                  .c = hidden(),
                  .bias = bench.tensor({wide}),
                  .epilogue = Epilogue::Gelu,
                  .pre = hidden()};
  };
  const auto backward = [&] {
    return Matmul{.a = bench.tensor({rows, narrow}),
                  .b = bench.tensor({wide, narrow}),
                  .c = hidden(),
                  .transpose_b = true,
                  .epilogue = Epilogue::GeluGradient,
                  .pre = hidden()};
  };
  bench.measure("matmul_gelu mlp in " + shape, Bound::Arithmetic, work,
                [&] { return [args = forward(), &bench] { matmul(bench.context(), args); }; });
  bench.measure("matmul, gelu_forward mlp in " + shape, Bound::Arithmetic, work, [&] {
    return [args = forward(), &bench] {
      Matmul product = args;
      product.epilogue = Epilogue::None;
      product.c = args.pre;
      matmul(bench.context(), product);
      gelu_forward(bench.context(), {args.pre, args.c});
    };
  });
  bench.measure("matmul_gelu_backward mlp out " + shape, Bound::Arithmetic, work,
                [&] { return [args = backward(), &bench] { matmul(bench.context(), args); }; });
  bench.measure("matmul, gelu_backward mlp out " + shape, Bound::Arithmetic, work, [&] {
    return [args = backward(), &bench] {
      Matmul product = args;
      product.epilogue = Epilogue::None;
      matmul(bench.context(), product);
      gelu_backward(bench.context(), {args.pre, args.c, fresh(args.c)});
    };
  });
}

/// Gradients of weight and bias: fused (with TESSERA_BIAS_EPILOGUE=1 in the product), and separate.
void products_and_bias_gradients(DeviceMeasure& bench, const DeviceShapes& s) {
  const std::int64_t rows = s.rows(), in = s.width(), out = 4 * s.width();
  const std::string shape = fmt::format("{}x{}x{}", rows, in, out);
  const double work = 2 * number(rows) * number(in) * number(out);
  const auto args = [&] {
    return Matmul{.a = bench.tensor({rows, in}),
                  .b = bench.tensor({rows, out}),
                  .c = bench.tensor({in, out}, DType::F32),
                  .transpose_a = true,
                  .epilogue = Epilogue::BiasGradient,
                  .bias_gradient = fresh(bench.tensor({out}, DType::F32))};
  };
  bench.measure("matmul_bias_gradient mlp in " + shape, Bound::Arithmetic, work,
                [&] { return [args = args(), &bench] { matmul(bench.context(), args); }; });
  bench.measure("matmul, sum_rows mlp in " + shape, Bound::Arithmetic, work, [&] {
    return [args = args(), &bench] {
      Matmul product = args;
      product.epilogue = Epilogue::None;
      matmul(bench.context(), product);
      sum_rows(bench.context(), args.gradient(), args.bias_gradient);
    };
  });
}

/// Head and cross entropy on a part of all rows; rows of logits are padded to 128 bytes.
void head(DeviceMeasure& bench, const DeviceShapes& s) {
  const std::int64_t c = s.width(), rows = s.logit_rows, v = s.vocab;
  const double work = 2 * number(rows) * number(v) * number(c);
  const auto logits = [&bench, &s] {
    TensorView view = bench.tensor({s.logit_rows, s.vocab_row});
    view.shape[1] = s.vocab;
    return view;
  };
  const auto name = [&](const char* what) {
    return fmt::format("matmul head{} {} rows", what, rows);
  };
  const auto run = [&bench](const Matmul& args) {
    return [args, &bench] { matmul(bench.context(), args); };
  };
  bench.measure(name(""), Bound::Arithmetic, work, [&] {
    return run({bench.tensor({rows, c}), bench.tensor({v, c}), logits(), false, true});
  });
  bench.measure(name(" dx"), Bound::Arithmetic, work, [&] {
    return run({logits(), bench.tensor({v, c}), bench.tensor({rows, c})});
  });
  bench.measure(name(" dw"), Bound::Arithmetic, work, [&] {
    return run(
        {logits(), bench.tensor({rows, c}), bench.tensor({v, c}, DType::F32), true, false, true});
  });
  bench.measure(
      fmt::format("cross_entropy with gradient {}x{}", rows, v), Bound::Memory,
      4 * bench.halves(rows, v), [&] {
        TensorView targets = bench.indices(1, rows, v);
        targets.shape = {rows};
        targets.strides = {1};
        const CrossEntropy args{logits(), targets, bench.tensor({rows}, DType::F32), true, 1e-3};
        return [args, &bench] { cross_entropy(bench.context(), args); };
      });
}

void rows_of_activations(DeviceMeasure& bench, const DeviceShapes& s) {
  const std::int64_t rows = s.rows(), c = s.width();
  const double elements = bench.halves(rows, c);
  const auto x = [&bench, rows](std::int64_t width) { return bench.tensor({rows, width}); };
  bench.measure(fmt::format("add {}x{}", rows, c), Bound::Memory, 6 * elements, [&] {
    const TensorView a = x(c), b = x(c), y = x(c);
    return [=, &bench] { add(bench.context(), a, b, y); };
  });
  bench.measure(fmt::format("sum_rows {}x{}", rows, 4 * c), Bound::Memory, 8 * elements, [&] {
    const TensorView in = x(4 * c), out = bench.tensor({4 * c}, DType::F32);
    return [=, &bench] { sum_rows(bench.context(), in, added(out)); };
  });
  bench.measure(fmt::format("gelu_forward {}x{}", rows, 4 * c), Bound::Memory, 16 * elements, [&] {
    const GeluForward args{x(4 * c), x(4 * c)};
    return [args, &bench] { gelu_forward(bench.context(), args); };
  });
  bench.measure(fmt::format("gelu_backward {}x{}", rows, 4 * c), Bound::Memory, 24 * elements, [&] {
    const GeluBackward args{x(4 * c), x(4 * c), fresh(x(4 * c))};
    return [args, &bench] { gelu_backward(bench.context(), args); };
  });
  const auto norm = [&] {
    LayerNormForward args;
    args.x = x(c);
    args.weight = bench.tensor({c});
    args.bias = bench.tensor({c});
    args.y = x(c);
    args.mean = bench.tensor({rows}, DType::F32);
    args.rstd = bench.tensor({rows}, DType::F32);
    return args;
  };
  bench.measure(fmt::format("layer_norm_forward {}x{}", rows, c), Bound::Memory, 4 * elements, [&] {
    return [args = norm(), &bench] { layer_norm_forward(bench.context(), args); };
  });
  bench.measure(fmt::format("layer_norm_forward + residual {}x{}", rows, c), Bound::Memory,
                8 * elements, [&] {
                  LayerNormForward args = norm();
                  args.residual = x(c);
                  args.sum = x(c);
                  return [args, &bench] { layer_norm_forward(bench.context(), args); };
                });
  bench.measure(fmt::format("layer_norm_backward {}x{}", rows, c), Bound::Memory, 6 * elements,
                [&] {
                  const LayerNormForward forward = norm();
                  layer_norm_forward(bench.context(), forward);
                  const LayerNormBackward args{forward.x,
                                               forward.weight,
                                               forward.mean,
                                               forward.rstd,
                                               x(c),
                                               fresh(x(c)),
                                               added(bench.tensor({c}, DType::F32)),
                                               added(bench.tensor({c}, DType::F32))};
                  return [args, &bench] { layer_norm_backward(bench.context(), args); };
                });
  // Bytes: one row read from the table and one row written for each token.
  bench.measure(fmt::format("embedding_forward {}x{}", rows, c), Bound::Memory, 4 * elements, [&] {
    EmbeddingForward args;
    args.tokens = bench.indices(s.batch, s.seq, s.vocab);
    args.token_weight = bench.tensor({s.vocab, c});
    args.position_weight = bench.tensor({s.seq, c});
    args.y = bench.tensor({s.batch, s.seq, c});
    return [args, &bench] { embedding_forward(bench.context(), args); };
  });
  // Counts one read of grad_y; each of the two gradients needs one, so that 65536 rows reach at
  // most 72% of the roof.
  bench.measure(fmt::format("embedding_backward {}x{}", rows, c), Bound::Memory,
                2 * elements + 4 * number(s.vocab + s.seq) * number(c), [&] {
                  const EmbeddingBackward args{bench.indices(s.batch, s.seq, s.vocab),
                                               bench.tensor({s.batch, s.seq, c}),
                                               fresh(bench.tensor({s.vocab, c}, DType::F32)),
                                               fresh(bench.tensor({s.seq, c}, DType::F32))};
                  return [args, &bench] { embedding_backward(bench.context(), args); };
                });
}

void all_parameters(DeviceMeasure& bench, const DeviceShapes& s) {
  const std::int64_t n = s.parameters();
  const auto x = [&bench, n](DType dtype) { return bench.tensor({n}, dtype); };
  bench.measure(fmt::format("cast f32 to bf16 n={}", n), Bound::Memory, 6 * number(n), [&] {
    const TensorView from = x(DType::F32), to = x(DType::BF16);
    return [=, &bench] { cast(bench.context(), from, fresh(to)); };
  });
  bench.measure(fmt::format("adamw n={}", n), Bound::Memory, 28 * number(n), [&] {
    AdamW args{x(DType::F32), x(DType::F32), x(DType::F32), x(DType::F32), 1e-4};
    fill(bench.context(), args.exp_avg_sq, 0.25);
    args.weight_decay = 0.1;
    return [args, &bench] { adamw(bench.context(), args); };
  });
  bench.measure(fmt::format("sum_of_squares n={}", n), Bound::Memory, 4 * number(n), [&] {
    const SumOfSquares args{x(DType::F32), bench.empty({1}, DType::F64)};
    return [args, &bench] { sum_of_squares(bench.context(), args); };
  });
}

}  // namespace

void measure_attention(DeviceMeasure& bench, const DeviceShapes& s, DType dtype) {
  const std::int64_t c = s.width(), pairs = s.seq * (s.seq + 1) / 2;
  const double work = number(s.batch * c) * number(pairs);  // pairs below the diagonal
  const bool half = dtype == DType::BF16;
  const Bound bound = half ? Bound::Arithmetic : Bound::ArithmeticF32;
  const std::string kind = half ? "attention" : "f32 attention";
  const std::string shape = fmt::format("B={} T={} H={} D={}", s.batch, s.seq, s.heads, s.head_dim);
  const auto window = [&s, c](const TensorView& packed, std::int64_t part) {
    TensorView view = packed;
    view.data = static_cast<std::byte*>(packed.data) +
                static_cast<std::size_t>(part * c) * dtype_size(packed.dtype);
    view.shape = {s.batch, s.seq, s.heads, s.head_dim};
    view.strides = {s.seq * 3 * c, 3 * c, s.head_dim, 1};
    return view;
  };
  const auto make = [&] {
    const TensorView qkv = bench.tensor({s.batch, s.seq, 3 * c}, dtype);
    AttentionForward args;
    args.q = window(qkv, 0);
    args.k = window(qkv, 1);
    args.v = window(qkv, 2);
    args.out = bench.tensor({s.batch, s.seq, s.heads, s.head_dim}, dtype);
    args.log_sum_exp = bench.tensor({s.batch, s.heads, s.seq}, DType::F32);
    args.scale = 0.125F;
    return args;
  };
  bench.measure(kind + " forward " + shape, bound, 4 * work, [&] {
    return [args = make(), &bench] { attention_forward(bench.context(), args); };
  });
  bench.measure(kind + " backward " + shape, bound, 10 * work, [&] {
    const AttentionForward forward = make();
    attention_forward(bench.context(), forward);
    const TensorView grad = bench.tensor({s.batch, s.seq, 3 * c}, dtype);
    const TensorView grad_out = bench.tensor({s.batch, s.seq, s.heads, s.head_dim}, dtype);
    const AttentionBackward args{forward.q,
                                 forward.k,
                                 forward.v,
                                 forward.out,
                                 forward.log_sum_exp,
                                 grad_out,
                                 fresh(window(grad, 0)),
                                 fresh(window(grad, 1)),
                                 fresh(window(grad, 2)),
                                 forward.scale};
    return [args, &bench] { attention_backward(bench.context(), args); };
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
  products_and_gelu(bench, shapes);
  products_and_bias_gradients(bench, shapes);
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
