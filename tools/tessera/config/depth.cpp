#include "tools/tessera/config/depth.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "core/base/error.h"
#include "tools/tessera/config/fields.h"

namespace tessera::tools {
namespace {

constexpr std::int64_t kHeadDim = 128, kWidthPerLayer = 64, kVocabulary = 32768;
constexpr std::int64_t kTokensPerParameter = 12;
// The depth for which the others were tuned, and its tokens per step.
constexpr std::int64_t kReferenceDepth = 12, kReferenceBatch = 1 << 19;

std::int64_t width_of(std::int64_t depth) {
  return (depth * kWidthPerLayer + kHeadDim - 1) / kHeadDim * kHeadDim;
}

double tokens_of(std::int64_t layers, std::int64_t width, std::int64_t vocabulary) {
  return static_cast<double>(kTokensPerParameter) * static_cast<double>(width) *
         static_cast<double>(12 * layers * width + vocabulary);
}

double three_digits(double value) { return std::stod(fmt::format("{:.3g}", value)); }

}  // namespace

void apply_depth(Config& config) {
  const std::int64_t depth = config.model.depth;
  if (depth == 0) return;
  const char* const other = !config.model.preset.empty()      ? "model.preset"
                            : !config.model.init_from.empty() ? "model.init_from"
                                                              : nullptr;
  require(other == nullptr,
          "model.depth {} makes a new model, and {} names one; leave one of them out", depth,
          other == nullptr ? "" : other);
  require(!config.given.contains("model.n_layer") || config.model.n_layer == depth,
          "model.depth is {0}, but model.n_layer is {1}, which the config.json of a run gives too; "
          "leave out model.n_layer and the keys that follow from the depth, or set --model.depth 0",
          depth, config.model.n_layer);
  const auto set = [&](std::string_view key, const auto& value) {
    if (config.given.contains(key)) return;
    set_field(config, *find_field(key), value, "model.depth");
    if constexpr (requires { value.front().size(); })
      config.from_depth.push_back(fmt::format("--{} '{}'", key, fmt::join(value, "' '")));
    else
      config.from_depth.push_back(fmt::format("--{} {}", key, value));
  };
  const auto& model = config.model;
  set("model.arch", std::string("nanochat"));
  set("model.n_layer", depth);
  set("model.n_embd", width_of(depth));
  set("model.n_head", std::max<std::int64_t>(1, model.n_embd / kHeadDim));
  set("model.seq_len", std::int64_t{2048});

  const std::int64_t vocabulary = model.vocab_size > 0 ? model.vocab_size : kVocabulary;
  const double tokens = tokens_of(model.n_layer, model.n_embd, vocabulary);
  const double reference = tokens_of(kReferenceDepth, width_of(kReferenceDepth), vocabulary);
  const double ideal = kReferenceBatch * std::pow(tokens / reference, 0.383);
  const double rows = std::exp2(std::round(std::log2(ideal))) / static_cast<double>(model.seq_len);
  set("train.global_batch", std::max<std::int64_t>(1, std::llround(rows)));
  const auto batch = static_cast<double>(config.train.global_batch * model.seq_len);
  set("train.steps", std::max<std::int64_t>(1, std::llround(tokens / batch)));

  set("optim.name", std::string("muon"));
  set("optim.warmup_steps", std::min<std::int64_t>(40, config.train.steps / 10));
  if (config.optim.name != "muon" || model.arch != "nanochat") return;
  set("optim.lr",
      three_digits(0.1 * std::sqrt(batch / kReferenceBatch / static_cast<double>(model.n_embd))));
  set("optim.lr_scale", std::vector<std::string>{"embed.*=2", "head.*=2"});
  set("optim.schedule", std::string("wsd"));
  set("optim.min_lr", 0.0);
}

std::vector<std::string> depth_lines(const Config& config) {
  std::vector<std::string> lines;
  std::string_view section;
  for (const std::string& flag : config.from_depth) {
    const auto here = std::string_view(flag).substr(0, flag.find('.'));
    if (here == section)
      lines.back() += " " + flag;
    else
      lines.push_back(flag);
    section = here;
  }
  return lines;
}

}  // namespace tessera::tools
