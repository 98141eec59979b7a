#include "tools/bench/device_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/base/context.h"
#include "core/base/error.h"
#include "core/base/storage.h"
#include "kernels/activation.h"
#include "kernels/attention.h"
#include "kernels/cross_entropy.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "kernels/matmul.h"
#include "kernels/norm.h"
#include "kernels/optimizer.h"

namespace tessera::kernels {
namespace {

using std::chrono::steady_clock;

enum class Bound { Memory, Arithmetic };
constexpr const char* kCopyRoof = "roof: copy f32";
constexpr const char* kProductRoof = "roof: matmul";

/// The shapes of a training step.
struct Shapes {
  std::int64_t batch, seq, heads, head_dim, vocab, vocab_row, layers, logit_rows;
  std::int64_t copied;  ///< f32 elements of the memory roof
  std::int64_t square;  ///< of the arithmetic roof
  std::int64_t width() const { return heads * head_dim; }
  std::int64_t rows() const { return batch * seq; }
  /// Of GPT-2: embeddings, and per block four products and two norms with their biases.
  std::int64_t parameters() const {
    const std::int64_t c = width();
    return (vocab + seq) * c + layers * (12 * c * c + 13 * c) + 2 * c;
  }
};

class Bench {
 public:
  Bench(std::shared_ptr<Context> context, const DeviceBenchOptions& options)
      : context_(std::move(context)), options_(options) {
    if (!options_.json.empty()) {
      file_.reset(std::fopen(options_.json.c_str(), "w"));
      require<IoError>(file_ != nullptr, "{} can't be written", options_.json);
    }
  }

  Context& context() { return *context_; }
  int left_out() const { return left_out_; }

  TensorView empty(const Shape& shape, DType dtype) {
    const std::size_t bytes = static_cast<std::size_t>(numel(shape)) * dtype_size(dtype);
    storages_.push_back(Storage::allocate(context_, bytes, MemoryCategory::Data, "bench"));
    return dense_view(storages_.back()->data(), dtype, shape, context_->device());
  }

  /// Values in [-0.5, 0.5): the products of zeros take less power, and so less time.
  TensorView tensor(const Shape& shape, DType dtype = DType::BF16) {  // or F32
    const TensorView view = empty(shape, dtype);
    const std::int64_t count = numel(shape);
    constexpr std::int64_t kFromHost = std::int64_t{1} << 20;
    std::int64_t done = std::min(count, kFromHost);
    std::vector<float> single;
    std::vector<BFloat16> half;
    for (std::int64_t i = 0; i < done; ++i) {
      single.push_back(static_cast<float>(i * 2654435761U % 1000) * 1e-3F - 0.5F);
      half.emplace_back(single.back());
    }
    const void* from = dtype == DType::BF16 ? static_cast<const void*>(half.data()) : single.data();
    context_->backend().copy_from_host(view.data, from,
                                       static_cast<std::size_t>(done) * dtype_size(dtype));
    while (done < count) {  // the rest from what is there
      const std::int64_t part = std::min(done, count - done);
      cast(*context_, range(view, 0, part), {range(view, done, part), false, true});
      done += part;
    }
    return view;
  }

  TensorView indices(std::int64_t batch, std::int64_t seq, std::int64_t below) {
    std::vector<std::int32_t> values;
    for (std::int64_t i = 0; i < batch * seq; ++i)
      values.push_back(static_cast<std::int32_t>(i * 2654435761U % 4294967291U % below));
    const TensorView view = empty({batch, seq}, DType::I32);
    context_->backend().copy_from_host(view.data, values.data(), view.bytes());
    return view;
  }

  /// Runs `prepare`, which takes memory and gives what is to be measured; then gives the memory
  /// back. What can't be measured is left out; an error that the device does not recover from is
  /// thrown.
  void measure(const std::string& name, Bound bound, double work,
               const std::function<std::function<void()>()>& prepare) {
    const bool is_roof = name.starts_with("roof");
    if (!is_roof && name.find(options_.only) == std::string::npos) return;
    try {
      time(name, bound, work, prepare());
    } catch (const Error& error) {
      fmt::print("{:<46} left out: {}\n", name, error.what());
      std::fflush(stdout);
      ++left_out_;
    }
    context_->backend().synchronize();
    storages_.clear();
  }

 private:
  static TensorView range(const TensorView& view, std::int64_t begin, std::int64_t count) {
    return dense_view(static_cast<std::byte*>(view.data) +
                          static_cast<std::size_t>(begin) * dtype_size(view.dtype),
                      view.dtype, {count}, view.device);
  }

  double seconds(const std::function<void()>& body, int launches) {
    context_->backend().synchronize();
    const auto start = steady_clock::now();
    for (int i = 0; i < launches; ++i) body();
    context_->backend().synchronize();
    return std::chrono::duration<double>(steady_clock::now() - start).count() / launches;
  }

  void time(const std::string& name, Bound bound, double work, const std::function<void()>& body) {
    constexpr double kSampleSeconds = 5e-3;
    constexpr int kSamples = 15, kMostLaunches = 1000;
    const double first = seconds(body, 1);  // loads the kernel
    std::vector<double> samples = {first};
    if (!options_.quick) {
      const double warm = seconds(body, 3);
      const int launches = static_cast<int>(
          std::clamp(kSampleSeconds / warm, 1.0, static_cast<double>(kMostLaunches)));
      samples.clear();
      for (int i = 0; i < kSamples; ++i) samples.push_back(seconds(body, launches));
      std::sort(samples.begin(), samples.end());
    }
    const double median = samples[samples.size() / 2];
    report(name, bound, median, samples.front(), samples.back(), work);
  }

  /// Written at once: what is measured later may end the program.
  void report(const std::string& name, Bound bound, double median, double best, double worst,
              double work) {
    const bool memory = bound == Bound::Memory;
    const double rate = work / median * (memory ? 1e-9 : 1e-12);
    double& roof = memory ? copy_roof_ : product_roof_;
    if (name.starts_with("roof")) roof = rate;
    const double share = roof > 0 ? rate / roof : 0;
    const char* unit = memory ? "GB/s" : "TFLOP/s";
    fmt::print("{:<46} {:>9.4f} {:>9.4f} {:>9.4f} {:>10.2f} {:<7} {:>5.0f}%\n", name, median * 1e3,
               best * 1e3, worst * 1e3, rate, unit, 100 * share);
    std::fflush(stdout);
    if (!file_) return;
    fmt::print(
        file_.get(),
        R"({{"name": "{}", "ms": {:.5f}, "best_ms": {:.5f}, "worst_ms": {:.5f}, "rate": {:.3f}, )"
        R"("unit": "{}", "share_of_roof": {:.4f}}})"
        "\n",
        name, median * 1e3, best * 1e3, worst * 1e3, rate, unit, share);
    require<IoError>(std::fflush(file_.get()) == 0, "{} can't be written", options_.json);
  }

  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };

  std::shared_ptr<Context> context_;
  DeviceBenchOptions options_;
  std::vector<std::shared_ptr<Storage>> storages_;
  std::unique_ptr<std::FILE, Close> file_;
  double copy_roof_ = 0, product_roof_ = 0;  ///< what they reached; 0: left out
  int left_out_ = 0;
};

double number(std::int64_t n) { return static_cast<double>(n); }

GradientView fresh(const TensorView& view) { return {view, false, true}; }
GradientView added(const TensorView& view) { return {view, true, true}; }

/// One [M, K] x [K, N] product; the gradient of a weight is added to in float32.
void product(Bench& bench, const std::string& name, std::int64_t m, std::int64_t k, std::int64_t n,
             bool transpose_a, bool transpose_b, bool bias = false) {
  const bool weight_gradient = transpose_a;
  bench.measure(fmt::format("{} [{}x{}] [{}x{}]", name, m, k, k, n), Bound::Arithmetic,
                2 * number(m) * number(k) * number(n), [=, &bench] {
                  Matmul args;
                  args.a = bench.tensor(transpose_a ? Shape{k, m} : Shape{m, k});
                  args.b = bench.tensor(transpose_b ? Shape{n, k} : Shape{k, n});
                  args.c = bench.tensor({m, n}, weight_gradient ? DType::F32 : DType::BF16);
                  args.transpose_a = transpose_a;
                  args.transpose_b = transpose_b;
                  args.accumulate = weight_gradient;
                  if (bias) args.bias = bench.tensor({n});
                  return [args, &bench] { matmul(bench.context(), args); };
                });
}

void roofs(Bench& bench, const Shapes& s) {
  bench.measure(kCopyRoof, Bound::Memory, 8 * number(s.copied), [&] {
    const TensorView from = bench.tensor({s.copied}, DType::F32);
    const TensorView to = bench.tensor({s.copied}, DType::F32);
    return [=, &bench] { cast(bench.context(), from, fresh(to)); };
  });
  product(bench, kProductRoof, s.square, s.square, s.square, false, false);
}

void products(Bench& bench, const Shapes& s) {
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

/// The MLP's products beside GELU and its gradient: by the kernels that may join them, and apart.
void products_and_gelu(Bench& bench, const Shapes& s) {
  const std::int64_t rows = s.rows(), narrow = s.width(), wide = 4 * s.width();
  const std::string shape = fmt::format("{}x{}x{}", rows, narrow, wide);
  const double work = 2 * number(rows) * number(narrow) * number(wide);
  const auto hidden = [&bench, rows, wide] { return bench.tensor({rows, wide}); };
  const auto forward = [&] {
    return MatmulGelu{.product = {.a = bench.tensor({rows, narrow}),
                                  .b = bench.tensor({narrow, wide}),
                                  .c = hidden(),
                                  .bias = bench.tensor({wide})},
                      .pre = hidden()};
  };
  const auto backward = [&] {
    return MatmulGeluBackward{.product = {.a = bench.tensor({rows, narrow}),
                                          .b = bench.tensor({wide, narrow}),
                                          .c = hidden(),
                                          .transpose_b = true},
                              .pre = hidden()};
  };
  bench.measure("matmul_gelu mlp in " + shape, Bound::Arithmetic, work,
                [&] { return [args = forward(), &bench] { matmul_gelu(bench.context(), args); }; });
  bench.measure("matmul, gelu_forward mlp in " + shape, Bound::Arithmetic, work, [&] {
    return [args = forward(), &bench] {
      Matmul product = args.product;
      product.c = args.pre;
      matmul(bench.context(), product);
      gelu_forward(bench.context(), {args.pre, args.product.c});
    };
  });
  bench.measure("matmul_gelu_backward mlp out " + shape, Bound::Arithmetic, work, [&] {
    return [args = backward(), &bench] { matmul_gelu_backward(bench.context(), args); };
  });
  bench.measure("matmul, gelu_backward mlp out " + shape, Bound::Arithmetic, work, [&] {
    return [args = backward(), &bench] {
      const TensorView& c = args.product.c;
      matmul(bench.context(), args.product);
      gelu_backward(bench.context(), {args.pre, c, fresh(c)});
    };
  });
}

/// Logits lie in rows of whole 128 bytes, a part of all rows at a time.
void head(Bench& bench, const Shapes& s) {
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
      4 * number(rows) * number(v), [&] {
        TensorView targets = bench.indices(1, rows, v);
        targets.shape = {rows};
        targets.strides = {1};
        const CrossEntropy args{logits(), targets, bench.tensor({rows}, DType::F32), true, 1e-3};
        return [args, &bench] { cross_entropy(bench.context(), args); };
      });
}

void attention(Bench& bench, const Shapes& s) {
  const std::int64_t c = s.width(), pairs = s.seq * (s.seq + 1) / 2;
  const double work = number(s.batch * c) * number(pairs);  // below the diagonal
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
    const TensorView qkv = bench.tensor({s.batch, s.seq, 3 * c});
    AttentionForward args;
    args.q = window(qkv, 0);
    args.k = window(qkv, 1);
    args.v = window(qkv, 2);
    args.out = bench.tensor({s.batch, s.seq, s.heads, s.head_dim});
    args.log_sum_exp = bench.tensor({s.batch, s.heads, s.seq}, DType::F32);
    args.scale = 0.125F;
    return args;
  };
  bench.measure("attention forward " + shape, Bound::Arithmetic, 4 * work, [&] {
    return [args = make(), &bench] { attention_forward(bench.context(), args); };
  });
  bench.measure("attention backward " + shape, Bound::Arithmetic, 10 * work, [&] {
    const AttentionForward forward = make();
    attention_forward(bench.context(), forward);
    const TensorView grad = bench.tensor({s.batch, s.seq, 3 * c});
    const TensorView grad_out = bench.tensor({s.batch, s.seq, s.heads, s.head_dim});
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

void rows_of_activations(Bench& bench, const Shapes& s) {
  const std::int64_t rows = s.rows(), c = s.width();
  const double elements = number(rows) * number(c);
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
  // A row of the table for each token, and the rows that are written.
  bench.measure(fmt::format("embedding_forward {}x{}", rows, c), Bound::Memory, 4 * elements, [&] {
    EmbeddingForward args;
    args.tokens = bench.indices(s.batch, s.seq, s.vocab);
    args.token_weight = bench.tensor({s.vocab, c});
    args.position_weight = bench.tensor({s.seq, c});
    args.y = bench.tensor({s.batch, s.seq, c});
    return [args, &bench] { embedding_forward(bench.context(), args); };
  });
  bench.measure(fmt::format("embedding_backward {}x{}", rows, c), Bound::Memory,
                2 * elements + 4 * number(s.vocab + s.seq) * number(c), [&] {
                  const EmbeddingBackward args{bench.indices(s.batch, s.seq, s.vocab),
                                               bench.tensor({s.batch, s.seq, c}),
                                               fresh(bench.tensor({s.vocab, c}, DType::F32)),
                                               fresh(bench.tensor({s.seq, c}, DType::F32))};
                  return [args, &bench] { embedding_backward(bench.context(), args); };
                });
}

void all_parameters(Bench& bench, const Shapes& s) {
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

int run_device_bench(const DeviceBenchOptions& options) {
  Shapes shapes{.batch = options.batch,
                .seq = 1024,
                .heads = 12,
                .head_dim = 64,
                .vocab = 50257,
                .vocab_row = 50304,
                .layers = 12,
                .logit_rows = std::min<std::int64_t>(8192, options.batch * 1024),
                .copied = std::int64_t{1} << 28,
                .square = 8192};
  if (options.quick) shapes = {2, 32, 2, 16, 97, 128, 2, 33, 4096, 64};
  Bench bench(Context::create({.device = {DeviceType::CUDA, 0}, .plugin = options.plugin}),
              options);
  fmt::print("{}; GPT-2 shapes, bf16, B={} T={}\n", bench.context().backend().description(),
             shapes.batch, shapes.seq);
  fmt::print("{:<46} {:>9} {:>9} {:>9} {:>18} {:>6}\n", "", "ms", "best", "worst", "rate", "roof");
  roofs(bench, shapes);
  products(bench, shapes);
  products_and_gelu(bench, shapes);
  head(bench, shapes);
  attention(bench, shapes);
  rows_of_activations(bench, shapes);
  all_parameters(bench, shapes);
  for (const std::string& note : bench.context().backend().take_notes()) fmt::print("{}\n", note);
  return bench.left_out();
}

}  // namespace tessera::kernels
