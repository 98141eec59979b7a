// Speed of the CPU kernels on the shapes of GPT-2 124M (256 and 1024 tokens per step) and of a tiny
// GPT. Prints the median and best of several runs and the CPU time of one; with one thread, the CPU
// time is meaningful on shared cores, too.
//
//   tessera_kernels_bench [threads] [level] [only]
//   tessera_kernels_bench --device cuda [--quick] [--batch B] [--only PART] [--json FILE] [--plugin
//   FILE]
//
// The second form measures GPU kernels: see device_bench.h.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <string>
#include <vector>

#include "core/base/context.h"
#include "core/base/error.h"
#include "core/base/storage.h"
#include "kernels/attention.h"
#include "kernels/cross_entropy.h"
#include "kernels/matmul.h"
#include "kernels/optimizer.h"
#include "tools/bench/device_bench.h"

namespace tessera::kernels {
namespace {

class Bench {
 public:
  Bench(std::shared_ptr<Context> context, std::string only)
      : context_(std::move(context)), only_(std::move(only)) {}

  TensorView tensor(const Shape& shape, DType dtype = DType::F32) {
    const std::size_t bytes = static_cast<std::size_t>(numel(shape)) * dtype_size(dtype);
    storages_.push_back(Storage::allocate(context_, bytes, MemoryCategory::Data, "bench"));
    const TensorView view = dense_view(storages_.back()->data(), dtype, shape);
    std::memset(view.data, 0, bytes);
    for (std::int64_t i = 0; i < numel(shape); ++i) {
      const float value = static_cast<float>(i * 2654435761U % 1000) * 1e-3F - 0.5F;
      if (dtype == DType::F32) static_cast<float*>(view.data)[i] = value;
      if (dtype == DType::BF16) static_cast<BFloat16*>(view.data)[i] = BFloat16(value);
    }
    return view;
  }

  void measure(const std::string& name, double work, const char* unit,
               const std::function<void()>& body) {
    if (!selected(name)) return;
    body();
    std::vector<double> seconds;
    const std::clock_t cpu_begin = std::clock();
    const auto begin = std::chrono::steady_clock::now();
    do {
      const auto start = std::chrono::steady_clock::now();
      body();
      seconds.push_back(
          std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    } while (seconds.size() < 5 ||
             std::chrono::steady_clock::now() - begin < std::chrono::milliseconds(200));
    const double cpu = static_cast<double>(std::clock() - cpu_begin) / CLOCKS_PER_SEC;
    const double cpu_per_run = cpu / static_cast<double>(seconds.size());
    std::sort(seconds.begin(), seconds.end());
    const double median = seconds[seconds.size() / 2];
    fmt::print("{:<44} {:>9.3f} ms, best {:>9.3f}, CPU {:>9.3f}; {:>7.1f} {}, {:>7.1f} a CPU\n",
               name, median * 1e3, seconds.front() * 1e3, cpu_per_run * 1e3, work / median * 1e-9,
               unit, work / cpu_per_run * 1e-9);
  }

  void matmul_case(std::int64_t m, std::int64_t k, std::int64_t n, bool ta, bool tb,
                   DType dtype = DType::F32, bool accumulate = false) {
    const std::string name =
        fmt::format("matmul {} {}{} [{}x{}] [{}x{}]{}", dtype_name(dtype), ta ? "T" : "N",
                    tb ? "T" : "N", m, k, k, n, accumulate ? " +=" : "");
    if (!selected(name)) return;
    Matmul args;
    args.a = tensor(ta ? Shape{k, m} : Shape{m, k}, dtype);
    args.b = tensor(tb ? Shape{n, k} : Shape{k, n}, dtype);
    args.c = tensor({m, n}, accumulate ? DType::F32 : dtype);
    args.transpose_a = ta;
    args.transpose_b = tb;
    args.accumulate = accumulate;
    measure(name, 2.0 * static_cast<double>(m * k * n), "GFLOP/s",
            [&] { matmul(*context_, args); });
    storages_.clear();
  }

  /// q, k, v are windows of one packed buffer, as in the model.
  void attention_case(std::int64_t b, std::int64_t t, std::int64_t h, std::int64_t d,
                      DType dtype = DType::F32) {
    const std::string shape = fmt::format("{} B={} T={} H={} D={}", dtype_name(dtype), b, t, h, d);
    if (!selected("attention forward " + shape) && !selected("attention backward " + shape)) return;
    const auto window = [&](const TensorView& packed, std::int64_t part) {
      TensorView view{static_cast<char*>(packed.data) +
                          static_cast<std::size_t>(part * h * d) * dtype_size(dtype),
                      dtype,
                      {b, t, h, d},
                      {t * 3 * h * d, 3 * h * d, d, 1},
                      {}};
      return view;
    };
    const TensorView qkv = tensor({b, t, 3 * h * d}, dtype);
    const TensorView grad = tensor({b, t, 3 * h * d}, dtype);
    AttentionForward forward{window(qkv, 0),    window(qkv, 1),
                             window(qkv, 2),    tensor({b, t, h, d}, dtype),
                             tensor({b, h, t}), 0.125F};
    const std::int64_t pairs_of_head = t * (t + 1) / 2;
    const double pairs = static_cast<double>(b * h * d) * static_cast<double>(pairs_of_head);
    measure("attention forward " + shape, 4 * pairs, "GFLOP/s",
            [&] { attention_forward(*context_, forward); });
    AttentionBackward backward{forward.q,
                               forward.k,
                               forward.v,
                               forward.out,
                               forward.log_sum_exp,
                               tensor({b, t, h, d}, dtype),
                               {window(grad, 0), false, true},
                               {window(grad, 1), false, true},
                               {window(grad, 2), false, true},
                               0.125F};
    measure("attention backward " + shape, 10 * pairs, "GFLOP/s",
            [&] { attention_backward(*context_, backward); });
    storages_.clear();
  }

  void cross_entropy_case(std::int64_t rows, std::int64_t vocabulary) {
    const std::string name = fmt::format("cross_entropy with gradient {}x{}", rows, vocabulary);
    if (!selected(name)) return;
    const TensorView targets = tensor({rows}, DType::I32);
    CrossEntropy args{tensor({rows, vocabulary}), targets, tensor({rows}), true, 1.0};
    measure(name, 8.0 * static_cast<double>(rows * vocabulary), "GB/s",
            [&] { cross_entropy(*context_, args); });
    storages_.clear();
  }

  void optimizer_case(std::int64_t n) {
    if (!selected("adamw") && !selected("sum_of_squares")) return;
    AdamW args{tensor({n}), tensor({n}), tensor({n}), tensor({n}), 1e-4};
    std::memset(args.exp_avg_sq.data, 0, args.exp_avg_sq.bytes());
    args.weight_decay = 0.1;
    measure(fmt::format("adamw n={}", n), 28.0 * static_cast<double>(n), "GB/s",
            [&] { adamw(*context_, args); });
    measure(fmt::format("sum_of_squares n={}", n), 4.0 * static_cast<double>(n), "GB/s",
            [&] { sum_of_squares(*context_, args.grad); });
    storages_.clear();
  }

 private:
  bool selected(const std::string& name) const { return name.find(only_) != std::string::npos; }

  std::shared_ptr<Context> context_;
  std::string only_;
  std::vector<std::shared_ptr<Storage>> storages_;
};

void run(int threads, CpuLevel level, const std::string& only) {
  Bench bench(Context::create({{}, threads, level}), only);
  fmt::print("{} threads, {}\n", threads, cpu_level_name(level));
  for (const std::int64_t rows : {256, 1024}) {
    bench.matmul_case(rows, 768, 2304, false, false);
    bench.matmul_case(rows, 768, 768, false, false);
    bench.matmul_case(rows, 768, 3072, false, false);
    bench.matmul_case(rows, 3072, 768, false, false);
    bench.matmul_case(rows, 3072, 768, false, true);  // dx of the first MLP product
    bench.matmul_case(768, rows, 3072, true, false, DType::F32, true);  // dW
    bench.matmul_case(3072, rows, 768, true, false, DType::F32, true);
    bench.matmul_case(256, 768, 50257, false, true);   // logits
    bench.matmul_case(256, 50257, 768, false, false);  // dx of the head
    bench.matmul_case(50257, 256, 768, true, false, DType::F32, true);
  }
  bench.matmul_case(128, 768, 50257, false, true);
  bench.matmul_case(768, 128, 384, false, false);
  bench.matmul_case(768, 128, 512, false, false);
  bench.matmul_case(768, 512, 128, false, false);
  bench.matmul_case(768, 384, 128, false, true);
  bench.matmul_case(768, 128, 512, false, true);
  bench.matmul_case(128, 768, 512, true, false, DType::F32, true);
  bench.matmul_case(512, 768, 128, true, false, DType::F32, true);
  bench.matmul_case(128, 768, 128, true, false, DType::F32, true);
  bench.matmul_case(768, 128, 65, false, true);
  bench.matmul_case(768, 65, 128, false, false);
  bench.matmul_case(65, 768, 128, true, false, DType::F32, true);
  bench.matmul_case(128, 768, 384, true, false, DType::F32, true);
  bench.matmul_case(1, 768, 3072, false, false);
  bench.matmul_case(1, 768, 50257, false, true);
  bench.matmul_case(256, 768, 3072, false, false, DType::BF16);
  bench.matmul_case(256, 768, 50257, false, true, DType::BF16);
  bench.matmul_case(768, 256, 3072, true, false, DType::BF16, true);
  bench.attention_case(4, 64, 12, 64);
  bench.attention_case(1, 256, 12, 64);
  bench.attention_case(1, 1024, 12, 64);
  bench.attention_case(12, 64, 4, 32);
  bench.attention_case(1, 1024, 12, 64, DType::BF16);
  bench.cross_entropy_case(256, 50257);
  bench.cross_entropy_case(768, 65);
  bench.optimizer_case(16 << 20);
}

}  // namespace
}  // namespace tessera::kernels

namespace {

int usage(const std::string& word) {
  fmt::print(stderr,
             "tessera_kernels_bench: unknown argument '{}'; see the top of "
             "tools/bench/kernels_bench.cpp\n",
             word);
  return 2;
}

int bench_device(const std::vector<std::string>& words) {
  tessera::kernels::DeviceBenchOptions options;
  for (std::size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (word == "--quick") {
      options.quick = true;
      continue;
    }
    if (i + 1 == words.size()) return usage(word);
    const std::string& value = words[++i];
    if (word == "--device" && value == "cuda") continue;
    if (word == "--only")
      options.only = value;
    else if (word == "--json")
      options.json = value;
    else if (word == "--plugin")
      options.plugin = value;
    else if (word == "--batch" && std::atoi(value.c_str()) > 0)
      options.batch = std::atoi(value.c_str());
    else
      return usage(word + " " + value);
  }
  try {
    if (tessera::kernels::run_device_bench(options) != 0) return 1;
  } catch (const tessera::Error& error) {
    fmt::print(stderr, "tessera_kernels_bench: {}\n", error.what());
    return 1;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (!words.empty() && words[0].starts_with("--")) return bench_device(words);
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
  const auto level = argc > 2 ? tessera::parse_cpu_level(argv[2]) : tessera::detect_cpu_level();
  tessera::kernels::run(threads, level, argc > 3 ? argv[3] : "");
}
