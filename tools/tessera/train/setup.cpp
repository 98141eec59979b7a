#include "tools/tessera/train/setup.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>
#include <set>

#include "core/optim/adamw8bit.h"
#include "core/optim/moving_average.h"
#include "core/optim/muon.h"
#include "io/checkpoint/find.h"
#include "io/data/mixture.h"
#include "io/hf/lora.h"
#include "io/source/names.h"
#include "kernels/attention.h"
#include "models/presets.h"

namespace tessera::tools {
namespace {

// Copies the stored model's shape to keys that the user did not set.
// @param given_wins  allow keys set by the user to differ
// @param resizes     allow vocabulary and positions to differ
// @return the differences, one phrase each
std::vector<std::string> adopt_shape(Config& config, const models::Arch& stored, bool given_wins,
                                     bool resizes = false) {
  std::vector<std::string> differences;
  const auto adopt = [&](const char* key, auto& value, auto theirs, bool is_set = true,
                         bool may_differ = false) {
    const bool given = is_set && config.given.contains(key);
    if (given && !given_wins && !may_differ && value != theirs)
      differences.push_back(fmt::format("{} is {}, but the model has {}", key, value, theirs));
    if (!given) value = theirs;
  };
  adopt("model.arch", config.model.arch, stored.family);
  adopt("model.n_layer", config.model.n_layer, stored.n_layer);
  adopt("model.n_head", config.model.n_head, stored.n_head);
  adopt("model.n_kv_head", config.model.n_kv_head, stored.n_kv_head, config.model.n_kv_head != 0);
  adopt("model.head_dim", config.model.head_dim, stored.head_dim, config.model.head_dim != 0);
  adopt("model.n_embd", config.model.n_embd, stored.n_embd);
  adopt("model.n_inner", config.model.n_inner, stored.n_inner, config.model.n_inner != 0);
  adopt("model.n_expert", config.model.n_expert, stored.experts.count, config.model.n_expert != 0);
  adopt("model.n_expert_used", config.model.n_expert_used, stored.experts.per_token,
        config.model.n_expert_used != 0);
  adopt("model.n_expert_inner", config.model.n_expert_inner, stored.experts.inner,
        config.model.n_expert_inner != 0);
  adopt("model.vocab_size", config.model.vocab_size, stored.vocab_size, config.model.vocab_size > 0,
        resizes);
  adopt("model.layer_norm_eps", config.model.layer_norm_eps, stored.norm_eps);
  if (!config.given.contains("model.aux_loss")) config.model.aux_loss = stored.experts.aux_loss;
  if (!config.given.contains("model.seq_len")) config.model.seq_len = stored.seq_len;
  if (!given_wins && !resizes && config.model.seq_len > stored.seq_len) {
    differences.push_back(fmt::format("model.seq_len is {}, but the model has {} positions",
                                      config.model.seq_len, stored.seq_len));
  }
  return differences;
}

[[noreturn]] void refuse_shape(const models::Arch& model,
                               const std::vector<std::string>& differences,
                               const std::vector<io::TensorInfo>& found,
                               const std::string& source) {
  const auto comparison = io::compare_tensors(train::tensors_of(*models::make_model(model)), found);
  throw InvalidArgument(
      "the keys do not match the model in {}: {}; leave {} out to use the model's{}{}", source,
      fmt::join(differences, "; "), differences.size() == 1 ? "the key" : "these keys",
      comparison.allowed(io::LoadPolicy::Partial)
          ? ", or load what fits with --checkpoint.load_policy partial"
          : "",
      comparison.str().empty() ? "" : ":" + comparison.str());
}

constexpr const char* kTokenizerFile = "tokenizer_tessera.json";

io::TokenizerPtr tokenizer_of(const train::TrainerState& state) {
  return state.tokenizer == "null" ? nullptr : io::tokenizer_from_json(state.tokenizer);
}

// The value of data.tokenizer for a stored tokenizer that is not given again.
std::string name_of(const io::Tokenizer& tokenizer, const std::string& stored_config,
                    const std::string& init_from) {
  if (tokenizer.kind() == "bytes" || tokenizer.kind() == "chars")
    return std::string(tokenizer.kind());
  const auto config = nlohmann::json::parse(stored_config);
  if (!config.is_object()) return init_from;
  return config.value("/data/tokenizer"_json_pointer, std::string(tokenizer.kind()));
}

// Notes on changed keys that affect the training of a resumed run.
std::vector<std::string> changes_since(const nlohmann::json& before, const nlohmann::json& now,
                                       std::int64_t step) {
  std::vector<std::string> notes;
  for (const char* section : {"data", "train", "optim", "model", "lora", "shard"}) {
    if (!before.contains(section)) continue;
    for (const auto& [key, value] : now.at(section).items()) {
      static const std::set<std::string_view> kFree = {
          "threads",       "log_every",     "micro_batch",
          "sample_prompt", "nonfinite",     "memory_limit",
          "memory_check",  "sample_tokens", "init_from",
          "eval_every",    "eval_batches",  "mode",
          "group",         "gather_ahead",  "reshard_after_forward",
          "units",         "recompute",     "check_replicas_every",
          "reduce_behind"};
      const auto& old = before.at(section);
      if (kFree.contains(key) || !old.contains(key) || old.at(key) == value) continue;
      notes.push_back(fmt::format("note: since step {}, {}.{} changes from {} to {}", step, section,
                                  key, old.at(key).dump(), value.dump()));
    }
  }
  return notes;
}

std::string absolute_path(const std::filesystem::path& path) {
  return std::filesystem::absolute(path / "").lexically_normal().parent_path().string();
}

// LoRA's settings of a checkpoint, for keys that are not given.
void adopt_lora(Config& config, const models::Arch& stored, const std::string& source) {
  Config::Lora& lora = config.lora;
  require(stored.lora || lora.rank == 0,
          "lora.rank is {}, but {} trained whole weights; adapt them in another run, with "
          "--model.init_from {}",
          lora.rank, source, source);
  if (!stored.lora) return;
  const models::Lora& theirs = *stored.lora;
  // Zero and an empty list stand for a default, also if they are given.
  const auto adopt = [&]<typename T>(const char* key, T& value, const T& stored_value) {
    require(!config.given.contains(key) || value == T() || value == stored_value,
            "{} differs from that of the adapters in {}; leave it out, or start another run", key,
            source);
    value = stored_value;
  };
  adopt("lora.rank", lora.rank, theirs.rank);
  adopt("lora.alpha", lora.alpha, theirs.alpha);
  adopt("lora.targets", lora.targets, theirs.targets);
  if (!config.given.contains("lora.dropout")) lora.dropout = theirs.dropout;
}

// The model that the adapters of setup.resume belong to: where they say or, if it is not there, the
// one of model.init_from.
void open_lora_base(RunSetup& setup, Config& config, const models::Lora& lora) {
  const std::string of = setup.resume->path().string(), given = config.model.init_from;
  std::error_code error;
  const bool is_there = std::filesystem::is_directory(lora.base, error);
  const std::string path = is_there ? lora.base : given, asked = absolute_path(given);
  require(std::filesystem::is_directory(path, error),
          "{} holds LoRA adapters of the model '{}', which is no directory here; name its "
          "directory with --model.init_from",
          of, path.empty() ? lora.base : path);
  setup.init_from = io::open_model(path, {}, io::LoadPolicy::Partial);
  io::check_base(*setup.init_from, lora.base_digest, of);
  if (!is_there)
    setup.notes.push_back(
        fmt::format("warning: the adapters belong to {}, which is gone; {} is used in its place",
                    lora.base, path));
  else if (!given.empty() && lora.base != asked && !lora.base.starts_with(asked + "/"))
    setup.notes.push_back(fmt::format(
        "note: model.init_from is not used: the adapters of this run belong to {}", lora.base));
  config.model.init_from = path;
}

// The adapters of lora.init_from, whose settings the keys that are not given get; null without it.
std::unique_ptr<io::TensorSource> open_adapters(Config& config, const io::Json& model) {
  const std::string& path = config.lora.init_from;
  if (path.empty()) return nullptr;
  models::Arch theirs;
  std::unique_ptr<io::TensorSource> source;
  if (io::is_peft(path)) {
    io::PeftAdapter adapter = io::open_peft(path, model);
    require<Unsupported>(
        adapter.rank > 0,
        "{}: the layers have different ranks or alphas; tessera trains one of each", path);
    theirs.lora =
        models::Lora{.rank = adapter.rank, .alpha = adapter.alpha, .targets = adapter.targets};
    source = std::move(adapter.source);
  } else {
    const auto reader = io::open_checkpoint(path);
    theirs = models::parse_arch(reader.index().model_config, reader.path().string());
    require(theirs.lora.has_value(), "{} holds no LoRA adapters; omit lora.init_from",
            reader.path().string());
    source = io::open_checkpoint_model(reader);
  }
  adopt_lora(config, theirs, path);
  return source;
}

// Matrices with a row for each token or position.
std::vector<std::string> resizable(const models::Arch& model) {
  const models::Names names = models::names_of(model);
  std::vector<std::string> result;
  for (const std::string_view module : {names.embed, names.head, names.positions})
    result.push_back(fmt::format("{}.weight", module));
  return result;
}

void warn_of_resizing(RunSetup& setup, const models::Arch& stored) {
  const models::Arch& now = setup.model;
  std::vector<std::string> names;
  for (const auto& [name, rows] : setup.load.resized) names.push_back(name);
  const auto warn = [&](const char* what, std::int64_t before, std::int64_t after) {
    if (before == after) return;
    setup.notes.push_back(fmt::format("warning: {} {}, and the model of {} has {}", what, after,
                                      setup.init_from->path().string(), before));
  };
  warn("model.vocab_size is", stored.vocab_size, now.vocab_size);
  warn("model.seq_len is", stored.seq_len, now.seq_len);
  if (!names.empty())
    setup.notes.push_back(fmt::format(
        "warning: the rows of {} were resized: new ones are the mean of the others, superfluous "
        "ones are dropped",
        fmt::join(names, ", ")));
}

// A checkpoint has the state of its optimizer, for the weights that were trained.
void check_optimizer(const RunSetup& setup, const Config& config) {
  const auto stored = nlohmann::json::parse(setup.state.config);
  const auto name = stored.value("/optim/name"_json_pointer, config.optim.name);
  require(name == config.optim.name,
          "optim.name is {}, and was {} in {}; continue with --optim.name {}, or start another run "
          "from "
          "its weights with --model.init_from",
          config.optim.name, name, setup.resume->path().string(), name);
  const auto before = stored.value("/optim/freeze"_json_pointer, std::vector<std::string>());
  require(
      before == config.optim.freeze,
      "optim.freeze is [{}], and was [{}] in {}, which has moments of the weights that it trained; "
      "start another run with --model.init_from, or go on with --checkpoint.load_policy partial",
      fmt::join(config.optim.freeze, ", "), fmt::join(before, ", "), setup.resume->path().string());
}

// Chooses what is loaded from where.
void plan_loading(RunSetup& setup, const Config& config, io::LoadPolicy policy) {
  const auto model = make_model(config, setup.model);
  auto tensors = train::tensors_of(*model);
  const auto trainable = train::tensors_of(*model, true);
  std::vector<io::TensorInfo> frozen;
  if (setup.model.lora) {
    frozen = tensors;
    std::erase_if(frozen, [&](const io::TensorInfo& tensor) {
      return std::ranges::find(trainable, tensor.name, &io::TensorInfo::name) != trainable.end();
    });
    tensors = trainable;
  }
  train::LoadPlan weights;
  const bool lora = setup.model.lora.has_value();
  require(!lora || config.checkpoint.load_tensors.empty(),
          "checkpoint.load_tensors chooses weights of model.init_from, and LoRA needs all");
  if (setup.init_from)
    weights = train::plan_weights(*setup.init_from, lora ? frozen : tensors,
                                  lora ? io::LoadPolicy::Exact : policy,
                                  config.checkpoint.load_tensors, resizable(setup.model));
  require(!lora || weights.resized.empty(),
          "LoRA keeps the sizes of its model; leave model.vocab_size out");
  auto& from_base = weights.tensors[io::kModelSection];
  if (setup.resume) {
    setup.load = train::plan_resume(*setup.resume, tensors,
                                    train::state_tensors(*model, *make_optimizer(config)), policy);
    setup.load.base = std::move(from_base);
  } else if (setup.adapters) {
    setup.load.notes = std::move(weights.notes);
    setup.load.base = std::move(from_base);
    io::match_tensors(tensors, setup.adapters->tensors(), setup.adapters->path().string());
    for (const io::TensorInfo& tensor : tensors)
      setup.load.tensors[io::kModelSection].insert(tensor.name);
  } else if (setup.init_from) {
    setup.load = std::move(weights);
  }
}

}  // namespace

io::TokenizerPtr model_tokenizer(const io::ModelSource& source, std::string& gap) {
  std::filesystem::path dir = source.path();
  if (const io::CheckpointReader* checkpoint = source.checkpoint()) {
    const io::CheckpointIndex& index = checkpoint->index();
    if (index.trainer) {
      auto tokenizer = tokenizer_of(train::parse_trainer_state(
          checkpoint->trainer_json(), (checkpoint->path() / index.trainer->file).string()));
      if (tokenizer) return tokenizer;
    }
    dir = source.path() / "../../tokenizer";
  }
  const auto own = dir / kTokenizerFile;
  if (std::filesystem::exists(own)) return io::load_tokenizer(own.string());
  try {
    return io::load_tokenizer(dir.string());
  } catch (const Error& error) {
    std::error_code missing;
    gap = std::filesystem::exists(dir, missing) ? error.what() : "there is none";
    return nullptr;
  }
}

RunSetup set_up(Config config, int world_size, const std::optional<std::filesystem::path>& resume) {
  RunSetup setup;
  const io::LoadPolicy policy = io::parse_load_policy(config.checkpoint.load_policy);
  std::int64_t positions = 0;
  std::optional<models::Arch> stored;
  io::TokenizerPtr tokenizer;
  std::string no_tokenizer;
  const auto adopt = [&](const std::string& section, const std::string& source,
                         const std::vector<io::TensorInfo>& tensors, bool given_wins) {
    stored = models::parse_arch(section, source);
    const auto differences = adopt_shape(config, *stored, given_wins, !resume);
    if (!differences.empty()) refuse_shape(model_of(config, stored), differences, tensors, source);
    positions = std::max(stored->seq_len, config.model.seq_len);
  };
  const bool any_fit = policy != io::LoadPolicy::Exact;
  const std::vector<std::string>& chosen = config.checkpoint.load_tensors;
  if (resume) {
    setup.resume = io::CheckpointReader::open(*resume);
    adopt(setup.resume->index().model_config, resume->string(),
          setup.resume->source(io::kModelSection).tensors(), any_fit);
    setup.state = train::read_trainer_state(*setup.resume);
    tokenizer = tokenizer_of(setup.state);
    if (stored->lora) open_lora_base(setup, config, *stored->lora);
    adopt_lora(config, *stored, resume->string());
  } else if (!config.model.init_from.empty()) {
    setup.init_from = io::open_model(config.model.init_from, {}, io::LoadPolicy::Partial);
    // Unselected tensors may have other shapes.
    adopt(setup.init_from->config().dump(), setup.init_from->path().string(),
          setup.init_from->tensors(), any_fit || !chosen.empty());
    tokenizer = model_tokenizer(*setup.init_from, no_tokenizer);
    setup.adapters = open_adapters(config, setup.init_from->config());
  } else {
    require(config.lora.rank == 0 && config.lora.init_from.empty(),
            "lora.{}, but there is no model to adapt; name one with --model.init_from",
            config.lora.rank > 0 ? fmt::format("rank is {}", config.lora.rank)
                                 : "init_from is " + config.lora.init_from);
    stored = adopt_known(config);
  }
  if (resume && !config.given.contains("data.chat_date"))
    config.data.chat_date = nlohmann::json::parse(setup.state.config)
                                .value("/data/chat_date"_json_pointer, config.data.chat_date);
  const bool tokenizer_given = config.given.contains("data.tokenizer");
  const bool by_name = config.data.tokenizer == "bytes" || config.data.tokenizer == "chars";
  if (tokenizer && tokenizer_given) {
    require(!by_name || config.data.tokenizer == tokenizer->kind(),
            "data.tokenizer is {}, but the model was trained with {}; leave the key out",
            config.data.tokenizer, tokenizer->kind());
    if (!by_name && !resume) tokenizer = io::load_tokenizer(config.data.tokenizer);
  }
  config.validate(world_size);

  const auto shares = io::parse_shares(config.data.train);
  std::vector<std::string> train_files;
  for (const auto& source : shares) train_files.push_back(source.pattern);
  setup.dataset = io::open_dataset({.train = shares.empty() ? config.data.train : train_files,
                                    .val = config.data.val,
                                    .tokenizer = config.data.tokenizer,
                                    .val_fraction = shares.empty() ? config.data.val_fraction : 0,
                                    .vocab_size = config.model.vocab_size,
                                    .fixed_tokenizer = tokenizer,
                                    .refuse_text = positions > 0 && !tokenizer && !tokenizer_given,
                                    .no_tokenizer = no_tokenizer,
                                    .chat_template = config.data.chat_template,
                                    .chat_date = config.data.chat_date});
  config.model.vocab_size = setup.dataset.vocab_size;
  if (const std::string& file = setup.dataset.tokenizer_file; !tokenizer && !file.empty()) {
    require(
        !tokenizer_given || !by_name || config.data.tokenizer == setup.dataset.tokenizer->kind(),
        "data.tokenizer is {}, but the tokens are those of {}; leave the key out",
        config.data.tokenizer, file);
    config.data.tokenizer = file;
  }
  if (setup.dataset.tokenizer && tokenizer && !tokenizer_given)
    config.data.tokenizer = name_of(*tokenizer, setup.state.config, config.model.init_from);
  for (const std::string& warning : setup.dataset.warnings)
    setup.notes.push_back("warning: " + warning);
  const auto order = io::parse_data_order(config.data.order);
  const auto seed = static_cast<std::uint64_t>(config.train.seed);
  const auto pack = [&](const auto& data, io::DataOrder in, const char* name,
                        std::optional<io::PackingReport>& report) {
    auto rows =
        std::make_unique<io::ConversationSamples>(data, config.model.seq_len, in, seed, name);
    report = rows->report();
    return rows;
  };
  require(shares.empty() || !setup.dataset.conversations,
          "data.train has shares (PATTERN=SHARE), which conversations can't have; leave them out");
  if (setup.dataset.conversations) {
    setup.train = pack(setup.dataset.conversations, order, "the training data", setup.packing);
  } else {
    const auto sampler = [&](const io::TokenSourcePtr& source, std::string_view name) {
      return std::make_unique<io::Sampler>(source, config.model.seq_len, order, seed, name);
    };
    std::vector<io::Mixture::Part> parts;
    for (std::size_t i = 0; i < shares.size(); ++i)
      parts.push_back({sampler(setup.dataset.train_parts[i], shares[i].pattern), shares[i].share});
    if (parts.empty())
      setup.train = sampler(setup.dataset.train, "the training data");
    else
      setup.train = std::make_unique<io::Mixture>(std::move(parts), seed);
  }
  const auto& val = setup.dataset.val_conversations;
  const auto has_targets = [&] {
    for (std::int64_t i = 0; i < val->count(); ++i)
      if (val->targets(i, config.model.seq_len) > 0) return true;
    return false;
  };
  if (val && config.data.val.empty() && !has_targets()) {
    setup.notes.push_back(fmt::format(
        "note: no validation: {} of the conversations are {}, without a token with loss",
        config.data.val_fraction, val->count()));
  } else if (val) {
    setup.val = pack(val, io::DataOrder::Sequential, "the validation data", setup.val_packing);
  } else if (setup.dataset.val && setup.dataset.val->size() > config.model.seq_len) {
    setup.val =
        std::make_unique<io::Sampler>(setup.dataset.val, config.model.seq_len,
                                      io::DataOrder::Sequential, seed, "the validation data");
  } else if (setup.dataset.val) {
    require(config.data.val.empty(),
            "the validation data has {} tokens, fewer than a row of {} + 1",
            setup.dataset.val->size(), config.model.seq_len);
    setup.notes.push_back(
        fmt::format("note: no validation: {} of the text are {} tokens, fewer than a row of {} + 1",
                    config.data.val_fraction, setup.dataset.val->size(), config.model.seq_len));
  }
  if (!setup.dataset.val && !shares.empty())
    setup.notes.push_back(
        "note: no validation: sources with shares are not split; name some with --data.val FILE");
  else if (setup.dataset.train && !setup.dataset.val && config.data.val_fraction > 0)
    setup.notes.push_back(
        "note: no validation: token files are not split; name some with --data.val FILE");
  if (!config.train.sample_prompt.empty()) {
    require(setup.dataset.tokenizer != nullptr,
            "train.sample_prompt is text, but these token files have no tokenizer; leave the key "
            "out, or "
            "name a directory of tessera data tokenize");
    setup.dataset.tokenizer->encode(config.train.sample_prompt, "train.sample_prompt");
  }
  setup.model = model_of(config, stored);
  if (positions > 0) setup.model.seq_len = positions;
  if (setup.model.lora) {
    models::Lora& lora = *setup.model.lora;
    require(!setup.init_from->is_merged(),
            "{} has LoRA adapters already, and adapters of those can't be merged; merge them first "
            "(tessera consolidate {} OUT --merge-lora), or go on with --lora.init_from",
            config.model.init_from, config.model.init_from);
    require(setup.model.seq_len == stored->seq_len,
            "LoRA keeps the sizes of its model, which has {} positions; model.seq_len is {}",
            stored->seq_len, setup.model.seq_len);
    // A run may save again, so its opened checkpoint is recorded.
    const io::CheckpointReader* const base = setup.init_from->checkpoint();
    lora.base =
        absolute_path(base == nullptr ? io::fs::path(config.model.init_from) : base->path());
    lora.base_digest = base == nullptr ? "" : base->digest();
    // As the run's configuration shows them.
    config.lora.alpha = lora.alpha;
    config.lora.targets = lora.targets;
  }
  setup.model.validate();
  (void)adopt_shape(config, setup.model, true);  // sizes that the family has chosen
  if (resume && policy == io::LoadPolicy::Exact) check_optimizer(setup, config);
  plan_loading(setup, config, policy);
  if (setup.init_from && !resume) warn_of_resizing(setup, *stored);
  for (const std::string& note : setup.load.notes) setup.notes.push_back(note);
  if (resume) {
    const auto before = nlohmann::json::parse(setup.state.config);
    const auto now = nlohmann::json::parse(to_json(config).dump());
    for (auto& note : changes_since(before, now, setup.state.step)) {
      setup.notes.push_back(std::move(note));
    }
  }
  setup.config = std::move(config);
  return setup;
}

nlohmann::ordered_json to_json(const io::PackingReport& report) {
  return {{"conversations", report.conversations},
          {"tokens", report.tokens},
          {"targets", report.targets},
          {"rows", report.rows},
          {"padding", report.padding},
          {"truncated", report.truncated},
          {"lost_tokens", report.lost},
          {"dropped", report.dropped},
          {"unlocated", report.unlocated}};
}

std::filesystem::path tuned_products_file(const Config& config) {
  if (!config.train.tuned_products.empty()) return config.train.tuned_products;
  if (config.train.deterministic == "on") return {};
  return std::filesystem::path(config.run.out) / "tuned_products.json";
}

std::int64_t prompt_tokens(const RunSetup& setup) {
  const std::string& prompt = setup.config.train.sample_prompt;
  if (prompt.empty()) return 0;
  const io::Tokenizer& tokenizer = *setup.dataset.tokenizer;
  return std::ssize(tokenizer.encode(prompt, "train.sample_prompt")) +
         std::ssize(tokenizer.prefix());
}

std::optional<models::Arch> adopt_known(Config& config) {
  if (config.model.preset.empty() && config.model.init_from.empty()) return std::nullopt;
  if (config.model.preset.empty()) {
    const auto source = io::open_model(config.model.init_from, {}, io::LoadPolicy::Partial);
    models::Arch arch = models::parse_arch(source->config().dump(), source->path().string());
    (void)adopt_shape(config, arch, true);
    (void)open_adapters(config, source->config());
    return arch;
  }
  models::Arch arch = models::arch_of_preset(config.model.preset);
  require(!config.given.contains("model.arch") || config.model.arch == arch.family,
          "model.preset {} is a {}, but model.arch is {}; leave one of them out",
          config.model.preset, arch.family, config.model.arch);
  (void)adopt_shape(config, arch, true);
  return arch;
}

models::Arch model_of(const Config& config, const std::optional<models::Arch>& stored) {
  const Config::Model& c = config.model;
  models::Arch model = stored && stored->family == c.arch
                           ? *stored
                           : models::arch_of_family(c.arch, {.n_layer = c.n_layer,
                                                             .n_head = c.n_head,
                                                             .n_kv_head = c.n_kv_head,
                                                             .head_dim = c.head_dim,
                                                             .n_embd = c.n_embd,
                                                             .n_inner = c.n_inner,
                                                             .vocab_size = c.vocab_size,
                                                             .seq_len = c.seq_len,
                                                             .n_expert = c.n_expert,
                                                             .n_expert_used = c.n_expert_used,
                                                             .n_expert_inner = c.n_expert_inner});
  if (stored) {
    model.n_layer = c.n_layer;
    model.n_head = c.n_head;
    model.n_kv_head = c.n_kv_head;
    model.head_dim = c.head_dim;
    model.n_embd = c.n_embd;
    model.n_inner = c.n_inner;
    model.experts.count = c.n_expert;
    model.experts.per_token = c.n_expert_used;
    model.experts.inner = c.n_expert_inner;
    model.vocab_size = c.vocab_size;
    model.seq_len = c.seq_len;
  }
  if (config.given.contains("model.layer_norm_eps"))
    model.norm_eps = model.qk_norm.norm.eps = c.layer_norm_eps;
  model.experts.aux_loss = c.aux_loss;
  model.dropout = static_cast<float>(c.dropout);
  // Ids of a vocabulary that became smaller.
  const auto is_gone = [&](std::int64_t id) { return c.vocab_size > 0 && id >= c.vocab_size; };
  for (std::int64_t* id : {&model.bos_token, &model.pad_token})
    if (is_gone(*id)) *id = -1;
  std::erase_if(model.eos_tokens, is_gone);
  const Config::Lora& lora = config.lora;
  require(lora.rank > 0 || (lora.alpha == 0 && lora.dropout == 0 && lora.targets.empty()),
          "lora.alpha, lora.dropout and lora.targets are for adapters, and lora.rank is 0");
  if (lora.rank > 0) {
    model.lora =
        models::Lora{.rank = lora.rank,
                     .alpha = lora.alpha > 0 ? lora.alpha : 2.0 * static_cast<double>(lora.rank),
                     .dropout = lora.dropout,
                     .base = c.init_from};
    if (!lora.targets.empty()) model.lora->targets = lora.targets;
  }
  return model;
}

std::unique_ptr<models::LanguageModel> make_model(const Config& config, const models::Arch& arch) {
  auto model = models::make_model(arch);
  std::vector<std::string> names;
  for (const Parameter* p : model->parameters()) names.push_back(p->name);
  if (!config.optim.freeze.empty()) {
    require(!arch.lora,
            "optim.freeze is not for LoRA, which freezes the model's weights; choose lora.targets");
    io::check_patterns(config.optim.freeze, names, "optim.freeze", "the model");
    for (Parameter* p : model->parameters())
      if (io::is_chosen(config.optim.freeze, p->name)) p->tensor.set_requires_grad(false);
    require(model->is_trainable(), "optim.freeze leaves no weight to train");
  }
  for (const std::string& rule : config.optim.lr_scale) {
    const auto equals = rule.rfind('=');
    float factor = 0;
    const char* const end = rule.data() + rule.size();
    const auto [stop, error] =
        std::from_chars(rule.data() + std::min(equals, rule.size() - 1) + 1, end, factor);
    require(equals != rule.npos && equals > 0 && error == std::errc() && stop == end &&
                factor >= 0 && factor <= 1e6F,
            "optim.lr_scale must be PATTERN=FACTOR, with a factor from 0, got '{}'", rule);
    const std::vector<std::string> pattern{rule.substr(0, equals)};
    io::check_patterns(pattern, names, "optim.lr_scale", "the model");
    for (Parameter* p : model->parameters())
      if (io::is_chosen(pattern, p->name)) p->lr_scale = factor;
  }
  return model;
}

comm::ShardSpec shard_spec_of(const Config& config) {
  const auto dtype = [](bool wide) { return wide ? DType::F32 : DType::BF16; };
  comm::ShardSpec spec = comm::shard_spec(config.shard.mode);
  if (config.shard.accumulate == "whole") spec.gradients = comm::Hold::Whole;
  spec.units = nn::parse_unit_policy(config.shard.units);
  spec.reshard_after_forward = config.shard.reshard_after_forward == "on";
  spec.gather_ahead = static_cast<int>(config.shard.gather_ahead);
  spec.reduce_behind = static_cast<int>(config.shard.reduce_behind);
  spec.tokens = config.train.micro_batch * config.model.seq_len;
  spec.compute = dtype(config.train.precision == "fp32");
  spec.master = dtype(config.train.precision != "bf16-true");
  if (config.lora.rank > 0) spec.frozen = spec.compute;  // not saved, so not needed in float32
  spec.gradient = dtype(config.shard.gradient_dtype == "f32");
  spec.reduction = dtype(config.shard.reduce_dtype == "f32");
  spec.offload = config.shard.offload == "optimizer";
  return spec;
}

int shard_group_size(const Config& config, int world_size, int local_world_size) {
  if (config.shard.mode != "hybrid")
    return comm::shard_group_size(config.shard.mode, world_size, 1);
  const auto group = static_cast<int>(config.shard.group);
  require(group > 0 || world_size % local_world_size == 0,
          "shard.mode hybrid shards over the ranks of a host, {} here, which do not divide the {} "
          "ranks; set --shard.group",
          local_world_size, world_size);
  return comm::shard_group_size(config.shard.mode, world_size,
                                group > 0 ? group : local_world_size);
}

train::LossFunction loss_of(models::LanguageModel& model) {
  return [&model](const train::Batch& batch, double scale) {
    return model.loss(batch.tokens, batch.targets, scale,
                      {batch.documents, batch.positions, batch.target_count});
  };
}

train::TrainerOptions trainer_options(const Config& config) {
  return {.skip_nonfinite = config.train.nonfinite == "skip",
          .exchange = {},
          .clip_norm = config.optim.clip_norm,
          .seed = static_cast<std::uint64_t>(config.train.seed),
          .schedule = {optim::LrSchedule::parse(config.optim.schedule), config.optim.lr,
                       config.optim.min_lr, config.optim.warmup_steps, config.train.steps},
          .steps = config.train.steps};
}

train::LoaderOptions loader_options(const Config& config) {
  return {config.train.global_batch, config.train.micro_batch};
}

namespace {

std::unique_ptr<optim::Optimizer> make_plain_optimizer(const Config& config) {
  const optim::AdamWOptions adamw{
      config.optim.beta1, config.optim.beta2, config.optim.eps, config.optim.weight_decay,
      config.optim.decay == "shrinking" ? kernels::Decay::Shrinking : kernels::Decay::All};
  if (config.optim.name == "muon")
    return std::make_unique<optim::Muon>(optim::MuonOptions{config.optim.momentum, adamw});
  if (config.optim.name == "adamw8bit") return std::make_unique<optim::AdamW8bit>(adamw);
  return std::make_unique<optim::AdamW>(adamw);
}

}  // namespace

std::unique_ptr<optim::Optimizer> make_optimizer(const Config& config) {
  auto optimizer = make_plain_optimizer(config);
  if (config.optim.ema == 0) return optimizer;
  return std::make_unique<optim::MovingAverage>(std::move(optimizer), config.optim.ema);
}

void require_head_dim(const models::Arch& model, Device device, std::string_view cpu_flag) {
  const std::int64_t head_dim = model.width_of_head();
  require<Unsupported>(device.type != DeviceType::CUDA || head_dim <= kernels::kMostCudaHeadDim,
                       "model.n_embd {} over model.n_head {} is a head_dim of {}, and the GPU "
                       "kernels support at most {}; raise "
                       "model.n_head, or compute on the CPU ({})",
                       model.n_embd, model.n_head, head_dim, kernels::kMostCudaHeadDim, cpu_flag);
}

}  // namespace tessera::tools
