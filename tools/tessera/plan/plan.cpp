#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/base/memory.h"
#include "io/base/file.h"
#include "tools/tessera/command.h"
#include "tools/tessera/config/depth.h"
#include "tools/tessera/config/fields.h"
#include "tools/tessera/config/load.h"
#include "tools/tessera/model/loaded_model.h"
#include "tools/tessera/plan/rates.h"
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
  std::vector<std::string> time;  // "h100", or profiles
  std::optional<std::string> link, network, timeline;
  bool json = false;
};

// "80GB", "80GiB", "1024"
std::int64_t parse_bytes(const std::string& option, const std::string& text) {
  const CLI::AsSizeValue to_bytes(true);  // GB: 10^9, GiB: 2^30
  std::string value = text;
  bool is_size = true;
  try {
    is_size = to_bytes(value).empty();
  } catch (const CLI::Error&) {
    is_size = false;
  }
  std::int64_t bytes = 0;
  if (is_size) std::from_chars(value.data(), value.data() + value.size(), bytes);
  require(bytes > 0, "{} '{}': expected a whole number and a unit, such as 80GB", option, text);
  return bytes;
}

class Planner {
 public:
  explicit Planner(const Options& options) : options_(options) {}

  /// @param rates   to plan the time; or null
  RankPlan plan(Config config, int rank, const DeviceRates* rates = nullptr) const {
    const models::Arch model = resolve(config);
    return plan_rank(
        config, model, rank, options_.world_size,
        {.context = {.device = device_of(config),
                     .threads = train::default_threads(config.train.threads, per_host())},
         .backend = backend(config),
         .local_world_size = per_host(),
         .packed = std::ranges::any_of(config.data.train, io::is_conversation_file),
         .prompt_tokens = std::ssize(config.train.sample_prompt),
         .rates = rates != nullptr ? &rates->kernels : nullptr,
         .links = rates != nullptr ? rates->links : comm::Links{}});
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

std::optional<DeviceRates> rates_for(const Options& options, const Config& config, bool gpu) {
  if (options.time.empty()) return std::nullopt;
  const bool h100 = std::ranges::count(options.time, "h100") > 0;
  require(!h100 || options.time.size() == 1, "--time takes h100 alone, or profiles");
  require(!options.timeline || std::ranges::count(options.time, *options.timeline) == 0,
          "--timeline {} would replace the profile of --time", options.timeline.value_or(""));
  require(!h100 || gpu, "--time h100 is for ranks on GPUs; add --train.device cuda");
  require(!h100 || config.train.precision != "fp32",
          "--time h100 knows kernels of bf16 alone; add --train.precision bf16");
  require(config.shard.offload == "none", "--time does not know the copies of shard.offload {}",
          config.shard.offload);
  require(!gpu || options.world_size == 1 || options.backend.empty() || options.backend == "nccl",
          "--time does not know the copies of GPU data through {}", options.backend);
  const int per_host = options.per_host > 0 ? options.per_host : options.world_size;
  std::map<std::string, std::string> wanted = {
      {"device", gpu ? "cuda" : "cpu"}, {"precision", config.train.precision}, {"ranks", "1"}};
  if (!gpu)
    wanted["threads"] = std::to_string(train::default_threads(config.train.threads, per_host));
  DeviceRates rates = h100 ? h100_rates() : rates_of_profiles(options.time, wanted);
  const auto rate = [](const char* option, const std::string& text) {
    return static_cast<double>(parse_bytes(option, text));
  };
  if (options.link) rates.links.in_host = rate("--link", *options.link);
  if (options.network) rates.links.between_hosts = rate("--network", *options.network);
  rates.links.per_host = per_host;
  require(options.world_size == 1 || rates.links.in_host > 0,
          "a profile has no times of links; give --link, the bytes per second that a rank sends to "
          "its host");
  require(options.world_size <= per_host || rates.links.between_hosts > 0,
          "a profile has no times of links; give --network, the bytes per second that a rank sends "
          "to other hosts");
  return rates;
}

// Kernels of less are not printed.
constexpr double kShownShare = 0.002;

// Speed that follows from a step's time.
struct Speed {
  double tokens_per_s = 0;
  double share = 0;  // of the peak rate, recomputation included; 0: the peak is not known
};

Speed speed_of(const RankPlan& plan, const DeviceRates& rates) {
  return {.tokens_per_s = static_cast<double>(plan.tokens) / plan.time.seconds,
          .share = rates.peak_flops > 0 ? plan.flops / plan.time.seconds / rates.peak_flops : 0};
}

void print_time(const RankPlan& plan, const Speed& speed, const DeviceRates& rates) {
  const StepTime& time = plan.time;
  fmt::print("time        {:.1f} ms per step, {:.0f} tokens/s", time.seconds * 1e3,
             speed.tokens_per_s);
  if (speed.share > 0)
    fmt::print(", {:.1f}% of the peak rate (recomputation counts)", speed.share * 100);
  fmt::print("\n            estimated by {}\n", rates.name);
  std::vector<std::pair<std::string, StepTime::Kernel>> rows(time.kernels.begin(),
                                                             time.kernels.end());
  std::ranges::sort(rows, std::greater{}, [](const auto& row) { return row.second.seconds; });
  fmt::print("            {:<26} {:>7} {:>10} {:>7} {:>9} {:>8}\n", "", "calls", "ms", "share",
             "TFLOP/s", "GB/s");
  for (const auto& [name, kernel] : rows)
    if (kernel.seconds > kShownShare * time.seconds)
      fmt::print("            {:<26} {:>7.0f} {:>10.2f} {:>6.1f}% {:>9} {:>8.0f}\n", name,
                 kernel.calls, kernel.seconds * 1e3, kernel.seconds / time.seconds * 100,
                 kernel.work.flops > 0
                     ? fmt::format("{:.3g}", kernel.work.flops / kernel.seconds * 1e-12)
                     : "",
                 (kernel.work.read + kernel.work.written) / kernel.seconds * 1e-9);
  if (time.waits > kShownShare * time.seconds)
    fmt::print("            {:<26} {:>7} {:>10.2f} {:>6.1f}%\n", "waiting for collectives", "",
               time.waits * 1e3, time.waits / time.seconds * 100);
  std::string guessed;
  for (const auto& [name, kernel] : rows)
    if (!rates.kernels.knows(name) && kernel.seconds > kShownShare * time.seconds)
      guessed += (guessed.empty() ? "" : ", ") + name;
  if (!guessed.empty())
    fmt::print("            without rates of their own, timed like all others: {}\n", guessed);
}

ordered_json time_json(const RankPlan& plan, const Speed& speed) {
  ordered_json json = {{"ms_per_step", plan.time.seconds * 1e3},
                       {"tokens_per_s", speed.tokens_per_s},
                       {"ms_waiting_for_collectives", plan.time.waits * 1e3}};
  if (speed.share > 0) json["share_of_peak"] = speed.share;
  for (const auto& [name, kernel] : plan.time.kernels)
    json["kernels"][name] = {{"calls", kernel.calls},
                             {"ms", kernel.seconds * 1e3},
                             {"bytes", kernel.work.read + kernel.work.written},
                             {"flops", kernel.work.flops}};
  return json;
}

int run(const Options& options, const std::vector<std::string>& words) {
  Config config = load_config(parse_train_arguments(words), tessera_environment());
  config.validate(options.world_size, false);
  const bool gpu = config.train.device.starts_with("cuda");
  require(gpu || options.backend != "nccl",
          "--backend nccl is for ranks on GPUs; add --train.device cuda");
  const Planner planner(options);
  const std::int64_t memory = options.memory ? parse_bytes("--memory", *options.memory) : 0;
  const int world = options.world_size;

  const std::optional<DeviceRates> rates = rates_for(options, config, gpu);
  std::vector<RankPlan> plans;
  const int each = world <= kPlannedOneByOne ? world : 2;
  for (int rank = 0; rank < each; ++rank)
    plans.push_back(planner.plan(config, rank, rank == 0 && rates ? &*rates : nullptr));
  const RankPlan& first = plans.front();
  std::int64_t peak = 0;
  for (const RankPlan& plan : plans) peak = std::max(peak, plan.peak);
  const std::int64_t needed = peak + first.library_bytes();
  const std::vector<MemoryChange> changes =
      memory_changes(config, world, [&](const Config& c) { return planner.peak(c); });
  const std::int64_t largest = memory > 0 ? largest_micro_batch(planner, config, world, memory) : 0;
  const Speed speed = rates ? speed_of(first, *rates) : Speed{};
  require(!rates || (std::isfinite(first.time.seconds) && first.time.seconds > 0),
          "--time: no time of a step follows from the profile");

  if (options.timeline) io::write_file_atomically(*options.timeline, first.timeline);

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
    if (rates) json["time"] = time_json(first, speed);
    if (memory > 0) json["fits"] = needed <= memory;
    if (memory > 0) json["largest_micro_batch"] = largest;
    for (const MemoryChange& change : changes)
      json["changes"].push_back({{"flags", change.flags}, {"peak_bytes", change.peak}});
    fmt::print("{}\n", json.dump());
    return memory > 0 && needed > memory ? kMemory : 0;
  }

  const std::vector<std::string> depth = depth_lines(config);
  for (const std::string& line : depth)
    fmt::print("{:<11} {}\n", &line == depth.data() ? "depth" : "", line);
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
  if (rates) print_time(first, speed, *rates);
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
      "plan", "Plan memory, traffic and time of a training run, without its data or a GPU");
  app->footer(config_help());
  app->allow_extras();
  app->add_option("--world", options->world_size, "Number of ranks")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app->add_option("--per-host", options->per_host,
                  "Ranks per host, for shard.mode hybrid and --time; all of them unless given")
      ->check(CLI::PositiveNumber);
  app->add_option("--backend", options->backend,
                  "shm, tcp, or nccl on GPUs; nccl with --train.device cuda, else shm")
      ->check(CLI::IsMember({"shm", "tcp", "nccl"}));
  app->add_option("--memory", options->memory,
                  "Memory of a rank, such as 80GB: exit 5 if the plan exceeds it, and find the "
                  "largest micro-batch");
  auto* const time =
      app->add_option(
             "--time", options->time,
             "Estimate the time of a step: h100, or a profile that train --train.profile "
             "wrote on one rank of this kind; may be repeated, for profiles of several sizes")
          ->allow_extra_args(false);
  app->add_option("--link", options->link,
                  "Bytes per second that a rank sends within its host, such as 360GB")
      ->needs(time);
  app->add_option("--network", options->network,
                  "Bytes per second that a rank sends to other hosts, such as 45GB")
      ->needs(time);
  app->add_option("--timeline", options->timeline,
                  "Write the estimated step as a Chrome trace to this file")
      ->needs(time);
  app->add_flag("--json", options->json, "One JSON object on standard output");
  return {app, [options, app] { return run(*options, app->remaining()); }};
}

}  // namespace tessera::tools
