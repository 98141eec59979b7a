#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/base/memory.h"
#include "tools/tessera/command.h"
#include "tools/tessera/config/fields.h"
#include "tools/tessera/config/load.h"
#include "tools/tessera/model/loaded_model.h"
#include "tools/tessera/report/console.h"
#include "tools/tessera/train/memory_advice.h"
#include "tools/tessera/train/memory_plan.h"
#include "tools/tessera/train/setup.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;

// Ranks of larger worlds are not planned one by one.
constexpr int kPlannedOneByOne = 16;

constexpr const char* kNotCovered =
    "            (at most; a library chooses it on the GPU, one at a time. Not counted: the CUDA\n"
    "            context, NCCL's buffers, gaps in the memory pool)\n";

struct Options {
  int world_size = 1;
  int per_host = 0;
  std::string backend;  // empty: nccl on GPUs, else shm
  std::optional<std::string> memory;
  double flops = 0, bandwidth = 0;
  bool json = false;
};

// "80GB", "80GiB", "1024"
std::int64_t parse_bytes(const std::string& text) {
  const CLI::AsSizeValue to_bytes(true);  // GB: 10^9, GiB: 2^30
  std::string value = text;
  bool is_size = true;
  try {
    is_size = to_bytes(value).empty();
  } catch (const CLI::Error&) {
    is_size = false;
  }
  const std::int64_t bytes = is_size && !value.empty() ? std::stoll(value) : 0;
  require(bytes > 0, "--memory '{}': expected a whole number and a unit, such as 80GB", text);
  return bytes;
}

class Planner {
 public:
  explicit Planner(const Options& options) : options_(options) {}

  RankPlan plan(Config config, int rank) const {
    const models::Arch model = resolve(config);
    return plan_rank(
        config, model, rank, options_.world_size,
        {.context = {.device = device_of(config),
                     .threads = train::default_threads(config.train.threads, per_host())},
         .backend = backend(config),
         .local_world_size = per_host(),
         .packed = std::ranges::any_of(config.data.train, io::is_conversation_file),
         .prompt_tokens = std::ssize(config.train.sample_prompt)});
  }

  /// The largest memory of all ranks, with libraries; nothing if the configuration is not valid.
  /// Rank 0 has the most: it also samples, and ranks differ by padding alone otherwise.
  std::optional<std::int64_t> peak(const Config& config) const {
    try {
      const RankPlan first = plan(config, 0);
      return first.peak + first.library_bytes();
    } catch (const InvalidArgument&) {
      return std::nullopt;
    }
  }

 private:
  static Device device_of(const Config& config) {
    return {config.train.device.starts_with("cuda") ? DeviceType::CUDA : DeviceType::CPU, 0};
  }
  std::string backend(const Config& config) const {
    const bool gpu = device_of(config).type == DeviceType::CUDA;
    if (options_.world_size == 1) return gpu ? "host-staged single" : "single";
    if (options_.backend.empty() || options_.backend == "nccl") return gpu ? "nccl" : "shm";
    return (gpu ? "host-staged " : "") + options_.backend;
  }
  int per_host() const { return options_.per_host > 0 ? options_.per_host : options_.world_size; }
  models::Arch resolve(Config& config) const {
    const std::optional<models::Arch> known = adopt_known(config);
    config.validate(options_.world_size, false);
    if (config.model.vocab_size == 0 && config.data.tokenizer == "bytes")
      config.model.vocab_size = 256;
    require(config.model.vocab_size > 0,
            "the size of the vocabulary is not known; give it with --model.vocab_size");
    return model_of(config, known);
  }
  const Options& options_;
};

// The largest micro-batch whose plan fits, with a global batch that it divides; 0: none.
std::int64_t largest_micro_batch(const Planner& planner, const Config& config, int world_size,
                                 std::int64_t memory) {
  const auto fits = [&](std::int64_t rows) {
    Config other = config;
    other.train.micro_batch = rows;
    other.train.global_batch = rows * world_size;
    const auto peak = planner.peak(other);
    return peak && *peak <= memory;
  };
  if (!fits(1)) return 0;
  std::int64_t good = 1, bad = 2;
  while (bad < (1 << 20) && fits(bad)) good = std::exchange(bad, 2 * bad);
  while (bad - good > 1) {
    const std::int64_t middle = (good + bad) / 2;
    (fits(middle) ? good : bad) = middle;
  }
  return good;
}

ordered_json by_category(const train::MemoryByCategory& bytes) {
  ordered_json json = ordered_json::object();
  for (std::size_t c = 0; c < bytes.size(); ++c)
    json[std::string(memory_category_name(static_cast<MemoryCategory>(c)))] = bytes[c];
  return json;
}

int run(const Options& options, const std::vector<std::string>& words) {
  Config config = load_config(parse_train_arguments(words), tessera_environment());
  config.validate(options.world_size, false);
  const bool gpu = config.train.device.starts_with("cuda");
  require(gpu || options.backend != "nccl",
          "--backend nccl is for ranks on GPUs; add --train.device cuda");
  const Planner planner(options);
  const std::int64_t memory = options.memory ? parse_bytes(*options.memory) : 0;
  const int world = options.world_size;

  std::vector<RankPlan> plans;
  const int each = world <= kPlannedOneByOne ? world : 2;
  for (int rank = 0; rank < each; ++rank) plans.push_back(planner.plan(config, rank));
  const RankPlan& first = plans.front();
  std::int64_t peak = 0;
  for (const RankPlan& plan : plans) peak = std::max(peak, plan.peak);
  const std::int64_t needed = peak + first.library_bytes();
  const std::vector<MemoryChange> changes =
      memory_changes(config, world, [&](const Config& c) { return planner.peak(c); });
  const std::int64_t largest = memory > 0 ? largest_micro_batch(planner, config, world, memory) : 0;
  const auto sent = static_cast<double>(first.traffic.total());
  const double compute_s = options.flops > 0 ? first.flops / options.flops : 0;
  const double network_s = options.bandwidth > 0 ? sent / options.bandwidth : 0;

  if (options.json) {
    ordered_json json;
    json["world_size"] = world;
    for (int rank = 0; rank < world; ++rank) {
      const RankPlan& plan = plans[static_cast<std::size_t>(std::min(rank, each - 1))];
      json["ranks"].push_back({{"rank", rank},
                               {"peak_bytes", plan.peak},
                               {"by_category", by_category(plan.at_peak)},
                               {"peak_at", plan.reached_at}});
    }
    if (gpu) json["host_peak_bytes"] = first.host_peak + first.offloaded;
    for (const auto& [name, bytes] : first.libraries) json["library_bytes_at_most"][name] = bytes;
    json["sent_bytes_per_step"] = {{"all_gather", first.traffic.all_gather},
                                   {"reduce_scatter", first.traffic.reduce_scatter},
                                   {"all_reduce", first.traffic.all_reduce}};
    json["flops_per_step"] = first.flops;
    if (compute_s > 0) json["compute_seconds_per_step"] = compute_s;
    if (network_s > 0) json["network_seconds_per_step"] = network_s;
    if (memory > 0) json["fits"] = needed <= memory;
    if (memory > 0) json["largest_micro_batch"] = largest;
    for (const MemoryChange& change : changes)
      json["changes"].push_back({{"flags", change.flags}, {"peak_bytes", change.peak}});
    fmt::print("{}\n", json.dump());
    return memory > 0 && needed > memory ? kMemory : 0;
  }

  fmt::print("memory      {} per rank, reached at {}\n", format_bytes(peak), first.reached_at);
  fmt::print("            {:<16} {:>12} {:>12}\n", "", "at the peak", "most");
  for (std::size_t c = 0; c < first.most.size(); ++c)
    if (first.most[c] > 0)
      fmt::print("            {:<16} {:>12} {:>12}\n",
                 memory_category_name(static_cast<MemoryCategory>(c)),
                 format_bytes(first.at_peak[c]), format_bytes(first.most[c]));
  for (const auto& [name, bytes] : first.libraries)
    fmt::print("{:<11} {:<16} {:>12}\n", &name == &first.libraries.begin()->first ? "plus" : "",
               name, format_bytes(bytes));
  if (gpu) fmt::print("{}", kNotCovered);
  if (gpu)
    fmt::print("host        {} of host memory per rank\n",
               format_bytes(first.host_peak + first.offloaded));
  if (world > 1)
    fmt::print(
        "sent        {} per rank and step: all_gather {}, reduce_scatter {}, all_reduce {}\n",
        format_bytes(first.traffic.total()), format_bytes(first.traffic.all_gather),
        format_bytes(first.traffic.reduce_scatter), format_bytes(first.traffic.all_reduce));
  fmt::print("work        {:.3g} floating-point operations per rank and step\n", first.flops);
  if (compute_s > 0) fmt::print("time        {:.3g} s of computing per step\n", compute_s);
  if (network_s > 0)
    fmt::print("            {:.3g} s of communication, partly overlapped\n", network_s);
  if (memory > 0)
    fmt::print("fits        {} into {}; largest micro-batch {}\n", needed <= memory ? "yes" : "no,",
               format_bytes(memory), largest == 0 ? "none" : std::to_string(largest));
  for (const MemoryChange& change : changes)
    fmt::print("{:<11} {:<30} {}\n", &change == changes.data() ? "to change" : "", change.flags,
               format_bytes(change.peak));
  return memory > 0 && needed > memory ? kMemory : 0;
}

}  // namespace

Command add_plan(CLI::App& parent) {
  const auto options = std::make_shared<Options>();
  CLI::App* app = parent.add_subcommand(
      "plan", "Plan memory and traffic of a training run, without its data or a GPU");
  app->footer(config_help());
  app->allow_extras();
  const auto rate = [](const std::string& text) {
    return CLI::NonNegativeNumber(text).empty() ? "" : "expected a number from 0";
  };
  const CLI::Validator kRate(rate, "NUMBER");
  app->add_option("--world", options->world_size, "Number of ranks")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app->add_option("--per-host", options->per_host,
                  "Ranks per host, for shard.mode hybrid; all of them unless given")
      ->check(CLI::PositiveNumber);
  app->add_option("--backend", options->backend,
                  "shm, tcp, or nccl on GPUs; nccl with --train.device cuda, else shm")
      ->check(CLI::IsMember({"shm", "tcp", "nccl"}));
  app->add_option("--memory", options->memory,
                  "Memory of a rank, such as 80GB: exit 5 if the plan exceeds it, and find the "
                  "largest micro-batch");
  app->add_option("--flops", options->flops,
                  "Floating-point operations per second of a rank, to estimate time")
      ->check(kRate);
  app->add_option("--bandwidth", options->bandwidth,
                  "Bytes per second that a rank sends, to estimate time")
      ->check(kRate);
  app->add_flag("--json", options->json, "One JSON object on standard output");
  return {app, [options, app] { return run(*options, app->remaining()); }};
}

}  // namespace tessera::tools
