#include "tools/tessera/train/summary.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/base/device_backend.h"
#include "core/base/memory.h"
#include "core/base/system_memory.h"
#include "core/base/thread_pool.h"
#include "io/data/mixture.h"
#include "kernels/product_library.h"
#include "models/language_model.h"
#include "tools/tessera/config/depth.h"
#include "tools/tessera/train/memory_plan.h"

namespace tessera::tools {
namespace {

std::string batch_text(const Config& config, int world_size) {
  const std::int64_t per_rank = config.train.global_batch / world_size;
  const std::int64_t micro_batches = per_rank / config.train.micro_batch;
  return fmt::format("{} sequences of {} tokens per step: {} x {} micro-batch{} of {}",
                     config.train.global_batch, config.model.seq_len, counted(world_size, "rank"),
                     micro_batches, micro_batches == 1 ? "" : "es", config.train.micro_batch);
}

std::string compute_text(Context& context) {
  const int threads = context.threads().size();
  if (context.device().type == DeviceType::CUDA) {
    return fmt::format("{} ({}), {} per rank", context.device().str(),
                       context.backend().description(), counted(threads, "host thread"));
  }
  const kernels::ProductLibrary& products = kernels::product_library();
  return fmt::format("cpu, {}, {} per rank, products by {}{}{}",
                     cpu_level_name(context.cpu_level()), counted(threads, "thread"), products.name,
                     products.has_bf16 ? " (bf16 too)" : "",
                     products.problem.empty() ? "" : fmt::format(" ({})", products.problem));
}

std::string data_text(const RunSetup& setup) {
  if (setup.packing) return fmt::format("{}; {}", setup.packing->str(), setup.config.data.order);
  std::string text = fmt::format("{} tokens, {} per row, {}",
                                 format_count(static_cast<double>(setup.dataset.train->size())),
                                 setup.config.model.seq_len, setup.config.data.order);
  const auto shares = io::parse_shares(setup.config.data.train);
  double sum = 0;
  for (const io::WeightedSource& source : shares) sum += source.share;
  for (const io::WeightedSource& source : shares)
    text += fmt::format("; {:.3g}% {}", 100 * source.share / sum, source.pattern);
  if (setup.val) {
    text += fmt::format("; validation {}",
                        format_count(static_cast<double>(setup.dataset.val->size())));
  }
  text += setup.dataset.tokenizer ? fmt::format("; {} tokenizer", setup.dataset.tokenizer->kind())
                                  : std::string("; token files");
  return text;
}

std::string precision_text(const std::string& precision) {
  if (precision == "bf16") return "bf16 compute, float32 weights and optimizer";
  if (precision == "bf16-true")
    return "bf16 compute and weights, stochastic rounding, float32 optimizer";
  return "float32";
}

std::string start_text(const RunSetup& setup) {
  if (setup.resume) {
    return fmt::format("step {} of {}, from {}", setup.state.step, setup.config.train.steps,
                       setup.resume->path().string());
  }
  if (setup.init_from) return fmt::format("weights of {}", setup.init_from->path().string());
  return fmt::format("random weights, seed {}", setup.config.train.seed);
}

constexpr const char* kNoSave = "nothing was saved: no save succeeded, see the warnings above";

std::string after_stop(const Config& config, std::int64_t step, std::optional<std::int64_t> saved) {
  if (config.checkpoint.every == 0) return "nothing was saved (checkpoint.every is 0)";
  if (!saved) return kNoSave;
  if (config.checkpoint.what == "model")
    return "the weights are saved; start from them with --model.init_from " + config.run.out;
  const std::string where =
      *saved == step ? "there" : fmt::format("from step {}, the last save", *saved);
  return config.checkpoint.resume == "auto" ? "the same command resumes " + where
                                            : "resume with --checkpoint.resume auto";
}

std::string after_end(const Config& config, std::int64_t step, std::optional<std::int64_t> saved) {
  if (!saved) return kNoSave;
  return fmt::format("tessera consolidate {} MODEL_DIR{}", config.run.out,
                     *saved == step ? "" : fmt::format(" (of step {}, the last save)", *saved));
}

}  // namespace

std::string start_table(const ConsoleStyle& style, const RunSetup& setup,
                        const comm::ShardedModel& sharded, const comm::Communicator& communicator,
                        Context& context, const RankPlan& plan) {
  const Config& config = setup.config;
  const models::Arch& model = setup.model;
  const int world_size = communicator.world_size();
  const std::int64_t parameters = sharded.module().parameter_count();
  std::vector<std::pair<std::string, std::string>> rows = {
      {"run", config.run.out},
      {"start", start_text(setup)},
      {"model",
       fmt::format("{}, {} layers, {} heads, width {}, {} positions, vocabulary {}", model.family,
                   model.n_layer, model.n_head, model.n_embd, model.seq_len, model.vocab_size)},
      {"parameters",
       fmt::format("{} ({})", parameters, format_count(static_cast<double>(parameters)))},
      {"precision", precision_text(config.train.precision)},
      {"sharding", world_size == 1
                       ? std::string("1 rank holds everything")
                       : fmt::format("{}, {} units over {} ranks ({})", config.shard.mode,
                                     sharded.units().size(), world_size, communicator.backend())},
      {"compute", compute_text(context)},
      {"batch", batch_text(config, world_size)},
      {"data", data_text(setup)}};
  for (std::string& line : depth_lines(config))
    rows.emplace_back(rows.back().first == "data" ? "depth" : "", std::move(line));
  if (setup.val_packing) rows.emplace_back("validation", setup.val_packing->str());
  rows.emplace_back(
      "memory",
      fmt::format("{} planned for rank {}{}, reached at {}", format_bytes(plan.peak),
                  communicator.rank(),
                  plan.libraries.empty()
                      ? ""
                      : ", beside at most " + format_bytes(plan.library_bytes()) + " of libraries",
                  plan.reached_at));
  rows.emplace_back("", train::describe(plan.at_peak));
  if (plan.offloaded > 0)
    rows.emplace_back("", fmt::format("offloaded: up to {} of host memory per rank",
                                      format_bytes(plan.offloaded)));
  return format_rows(style, rows);
}

std::string end_summary(const ConsoleStyle& style, const RunSetup& setup,
                        const train::MetricsWriter& metrics, const train::TrainerState& state,
                        std::int64_t first_step, double seconds, int signal,
                        std::optional<std::int64_t> saved, const Context& context,
                        const RankPlan& plan) {
  const Config& config = setup.config;
  std::vector<std::pair<std::string, std::string>> rows;
  const auto& train = metrics.train_losses();
  if (!train.empty()) {
    std::vector<double> losses;
    losses.reserve(train.size());
    for (const train::LossPoint& point : train) losses.push_back(point.loss);
    rows.emplace_back("loss", fmt::format("{:.4f} -> {:.4f}  {}", losses.front(), losses.back(),
                                          sparkline(losses, std::clamp(style.width - 40, 10, 60))));
  }
  if (!metrics.val_losses().empty()) {
    rows.emplace_back("validation",
                      fmt::format("{:.4f} at step {}", metrics.val_losses().back().loss,
                                  metrics.val_losses().back().step));
  }
  const std::int64_t steps = state.step - first_step;
  if (steps > 0) {
    const auto tokens =
        static_cast<double>(steps * config.train.global_batch * config.model.seq_len);
    rows.emplace_back("time",
                      fmt::format("{} for {} steps, {} tokens/s with evaluations and saves",
                                  format_duration(seconds), steps, format_count(tokens / seconds)));
  }
  const std::int64_t resident = peak_resident_bytes();
  rows.emplace_back(
      "memory",
      fmt::format("peak {} on rank 0, planned {}{}", format_bytes(context.ledger().total().peak),
                  format_bytes(plan.peak),
                  resident == 0 ? "" : "; resident on its host " + format_bytes(resident)));
  rows.emplace_back("", train::describe(train::category_peaks(context.ledger())));
  rows.emplace_back("curve", config.run.out + "/loss.svg");
  if (signal != 0) {
    rows.emplace_back("stopped", fmt::format("by signal {} after step {}; {}", signal, state.step,
                                             after_stop(config, state.step, saved)));
  } else if (config.checkpoint.every > 0) {
    rows.emplace_back("next", after_end(config, state.step, saved));
  }
  return format_rows(style, rows);
}

}  // namespace tessera::tools
