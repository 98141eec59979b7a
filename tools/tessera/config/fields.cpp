#include "tools/tessera/config/fields.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "models/language_model.h"

namespace tessera::tools {
namespace {

constexpr double kHuge = 1e30;         // no limit; JSON has no infinity
constexpr double kBig = 2147483647.0;  // limit of 32-bit sizes

// Arguments `ref` and `key` of a field: accessor and name of the Config member.
#define KEY(member) [](Config& c) -> FieldRef { return &c.member; }, #member

Field number(FieldRef (*ref)(Config&), std::string_view key, double min, double max,
             std::string_view help, bool min_exclusive = false) {
  return {key, ref, help, min, max, min_exclusive, {}};
}
Field text(FieldRef (*ref)(Config&), std::string_view key, std::string_view help,
           std::vector<std::string_view> choices = {}) {
  return {key, ref, help, 0, 0, false, std::move(choices)};
}

std::vector<Field> make_fields() {
  const bool positive = true;
  return {
      text(KEY(model.preset), "a known model, see tessera models; other model keys change it"),
      number(KEY(model.depth), 0, 512,
             "one dial: layers of a nanochat, from which its width, heads, tokens, batch and "
             "learning rate follow; other keys change them; 0: off"),
      text(KEY(model.arch), "model family", models::families()),
      number(KEY(model.n_layer), 1, 4096, "transformer blocks"),
      number(KEY(model.n_head), 1, 4096, "attention heads; must divide n_embd"),
      number(KEY(model.n_kv_head), 0, 4096,
             "heads of keys and values, which divide n_head; 0: n_head"),
      number(KEY(model.head_dim), 0, 4096, "width of a head; 0: n_embd / n_head"),
      number(KEY(model.n_embd), 1, 1 << 20, "width of the residual stream"),
      number(KEY(model.n_inner), 0, 1 << 22,
             "width of the MLP; 0: 4 n_embd, or 8/3 if it is gated"),
      number(KEY(model.n_expert), 0, 256, "experts of a layer; 0: as the family does it"),
      number(KEY(model.n_expert_used), 0, 256,
             "experts that compute a token; 0: as the family does it"),
      number(KEY(model.n_expert_inner), 0, 1 << 22, "width of an expert; 0: as the family does it"),
      number(KEY(model.aux_loss), 0, 1e3,
             "coefficient of the loss that balances the use of experts; 0: none"),
      number(KEY(model.vocab_size), 0, kBig,
             "number of token ids; 0: from the tokenizer or the data"),
      number(KEY(model.seq_len), 1, 1 << 24, "context length in tokens"),
      number(KEY(model.dropout), 0, 0.99, "dropout probability"),
      number(KEY(model.layer_norm_eps), 0, 1, "epsilon of the norms", positive),
      text(KEY(model.init_from),
           "start from the weights of a checkpoint, a run or a Hugging Face directory"),

      text(KEY(data.train),
           "training files or globs: token files (.bin), conversations (.jsonl) or text; or "
           "PATTERN=SHARE each: "
           "the share of rows that come from these files"),
      text(KEY(data.val),
           "validation files or globs; empty: the end of the text, or nothing if data.train is "
           "token files"),
      text(KEY(data.tokenizer),
           "for text: bytes, chars, a tokenizer file, or a directory with one"),
      number(KEY(data.val_fraction), 0, 0.99,
             "share of the text or conversations, at the end, used for validation if data.val is "
             "empty"),
      text(KEY(data.order), "order of the training rows", {"shuffled", "sequential"}),
      text(KEY(data.chat_template),
           "for conversations: a file with a chat template; empty: the tokenizer's own"),
      text(KEY(data.chat_date), "date that a chat template gets from strftime_now"),

      number(KEY(train.steps), 1, 1e15, "optimizer steps"),
      number(KEY(train.seed), 0, 9.2e18, "random seed of weights, data order and dropout"),
      number(KEY(train.global_batch), 1, kBig, "sequences per step, over all ranks"),
      number(KEY(train.micro_batch), 0, kBig,
             "sequences per rank in one pass; 0: global_batch / ranks"),
      text(KEY(train.device),
           "auto (a GPU if one can be used), cpu, cuda (the GPU of the local rank), or cuda:N"),
      text(KEY(train.precision),
           "bf16: bf16 compute, float32 weights; bf16-true: bf16 weights too, with stochastic "
           "rounding; moments are always float32",
           {"fp32", "bf16", "bf16-true"}),
      text(KEY(train.nonfinite),
           "on a NaN or infinite loss or gradient: stop, or skip the step, at most 10 in a row",
           {"stop", "skip"}),
      text(KEY(train.deterministic),
           "off: on a GPU, gradients of attention are faster, and matrix products are tuned; "
           "losses may differ from run to run in the last bits",
           {"on", "off"}),
      text(
          KEY(train.tuned_products),
          "on GPUs: a file of cuBLASLt's fastest kernels; the first step times those that it "
          "lacks, and adds them; with deterministic off by default tuned_products.json in run.out"),
      text(
          KEY(train.recompute),
          "recompute in backward instead of keeping: none, cheap (results of norms, GELU, SiLU and "
          "element-wise products), mlp (these and the inside of MLPs), block (all but the inputs "
          "of blocks), "
          "or "
          "'every N' (the same for blocks 0, N, 2N, ...)"),
      number(KEY(train.eval_every), 0, 1e15, "steps between evaluations; 0: only at the end"),
      number(KEY(train.eval_batches), 0, kBig,
             "global batches per evaluation; 0: all validation data"),
      number(KEY(train.threads), 0, 4096,
             "CPU threads per rank; 0: the processors divided by the ranks of this host"),
      text(KEY(train.memory_check),
           "if the plan needs more memory than the host or GPU has: refuse to start, or warn",
           {"refuse", "warn"}),
      number(KEY(train.memory_limit), 0, 9.2e18,
             "most bytes of tensors of a rank on the CPU; 0: no limit"),
      number(KEY(train.log_every), 1, 1e15, "steps between lines of output that is not a terminal"),
      text(KEY(train.profile),
           "write a Chrome trace of a few steps to this file; ranks above 0 append their number"),
      text(KEY(train.sample_prompt),
           "prompt to sample from at each evaluation; empty: no sampling"),
      number(KEY(train.sample_tokens), 1, 1 << 20, "tokens to generate from sample_prompt"),

      text(
          KEY(optim.name),
          "adamw; adamw8bit, with moments in 8 bits; or muon, for weights of linear layers between "
          "embedding and head, with AdamW for the others",
          {"adamw", "adamw8bit", "muon"}),
      number(KEY(optim.lr), 0, 1e3, "peak learning rate"),
      number(KEY(optim.beta1), 0, 0.999999, "AdamW: decay of the first moment"),
      number(KEY(optim.beta2), 0, 0.999999, "AdamW: decay of the second moment"),
      number(KEY(optim.eps), 0, 1, "AdamW: added to the denominator", positive),
      number(KEY(optim.momentum), 0, 0.999999, "Muon: decay of the momentum"),
      number(KEY(optim.weight_decay), 0, 1e3, "on tensors of two or more dimensions"),
      text(KEY(optim.decay), "shrinking: decay only weights that the update makes smaller",
           {"all", "shrinking"}),
      number(KEY(optim.clip_norm), 0, kHuge, "largest global gradient norm; 0: no clipping"),
      number(KEY(optim.ema), 0, 0.999999,
             "decay of a moving average of the weights, such as 0.999; 0: none"),
      number(KEY(optim.warmup_steps), 0, 1e15, "steps of linear increase to lr"),
      text(KEY(optim.schedule), "learning rate after warm-up",
           {"constant", "cosine", "linear", "wsd"}),
      number(KEY(optim.min_lr), 0, 1e3,
             "learning rate at the end of the schedule; a tenth of lr unless given"),

      text(KEY(optim.freeze), "patterns such as 'embed.*': these weights are not trained"),
      text(KEY(optim.lr_scale),
           "PATTERN=FACTOR such as 'layers.0.*=0.1': factor of the learning rate of these weights; "
           "the last pattern that matches counts"),

      number(KEY(lora.rank), 0, 1 << 20,
             "rank of LoRA adapters of model.init_from, whose weights are frozen; 0: no adapters"),
      number(KEY(lora.alpha), 0, 1e9, "adapters count alpha / rank; 0: twice the rank"),
      number(KEY(lora.dropout), 0, 0.99, "dropout probability of the adapters' inputs"),
      text(KEY(lora.targets),
           "adapted layers by their Hugging Face names such as q_proj, patterns of whole names, or "
           "all-linear, which is the default"),
      text(KEY(lora.init_from), "start from the adapters of a run, or of a directory of PEFT"),

      text(KEY(shard.mode),
           "full: parameters, gradients, optimizer state; gradients: the last two; optimizer: the "
           "last; hybrid: full within groups of ranks",
           {"full", "gradients", "optimizer", "hybrid", "none"}),
      number(KEY(shard.group), 0, 1 << 20,
             "ranks per group of mode hybrid; 0: the ranks of a host"),
      text(
          KEY(shard.units),
          "what is gathered together: block; a number of parameters such as 50M (blocks are merged "
          "until they have as many); or patterns with commas such as h.*.mlp (such modules alone)"),
      text(KEY(shard.reshard_after_forward),
           "off: keep parameters gathered until backward has used them", {"on", "off"}),
      text(KEY(shard.accumulate),
           "whole: reduce gradients once per step, not once per micro-batch; takes their memory",
           {"sharded", "whole"}),
      text(KEY(shard.gradient_dtype), "dtype of gradients before their reduction", {"f32", "bf16"}),
      text(KEY(shard.reduce_dtype), "dtype in which gradients are sent", {"f32", "bf16"}),
      number(KEY(shard.gather_ahead), 0, 1 << 20, "units to gather ahead of the one in use"),
      number(KEY(shard.reduce_behind), 0, 1 << 20,
             "units being reduced while the next one's gradients are computed; 0 saves memory"),
      text(KEY(shard.offload),
           "optimizer: with a GPU, keep and update master weights and moments in host memory",
           {"none", "optimizer"}),
      number(KEY(shard.check_replicas_every), 0, 1e15,
             "steps between comparisons of replicated weights and optimizer state; 0: none"),

      number(KEY(checkpoint.every), 0, 1e15,
             "steps between checkpoints, with one more at the end; 0: none at all"),
      text(KEY(checkpoint.async), "on: save in the background, from a copy in host memory",
           {"on", "off"}),
      number(KEY(checkpoint.keep), 0, kBig, "number of newest checkpoints to keep; 0: all"),
      number(KEY(checkpoint.keep_every), 0, 1e15,
             "also keep checkpoints whose step is a multiple of this; 0: none"),
      number(
          KEY(checkpoint.keep_best), 0, kBig,
          "also keep this many checkpoints with the lowest validation loss, measured at each save"),
      text(KEY(checkpoint.what), "model: weights only, to start from but not to resume",
           {"all", "model"}),
      text(KEY(checkpoint.resume),
           "auto: the run's newest checkpoint, if any; never; or the path of a checkpoint to use "
           "until the run has its own"),
      text(KEY(checkpoint.load_policy),
           "exact: all tensors must match; ignore-extra: skip unknown tensors; partial: also "
           "initialize missing or mismatched tensors at random",
           {"exact", "ignore-extra", "partial"}),
      text(KEY(checkpoint.load_tensors),
           "patterns such as 'h.0.*': load only these tensors of model.init_from, initialize the "
           "others at random"),
      text(KEY(checkpoint.on_error),
           "after a failed save: warn and continue, or stop with exit code 3", {"warn", "stop"}),
      number(KEY(checkpoint.timeout), 0, 1e6, "seconds without progress after which a save fails",
             positive),
      number(KEY(checkpoint.load_timeout), 0, 1e6,
             "seconds that ranks wait for each other while loading", positive),

      text(KEY(comm.backend),
           "transport between ranks: nccl (GPUs), shm (shared memory of one host), tcp (also "
           "called gloo); auto: the first that works",
           {"auto", "shm", "tcp", "nccl"}),
      number(KEY(comm.init_timeout), 0, 1e6, "seconds to wait for all ranks at the start",
             positive),
      number(KEY(comm.heartbeat_timeout), 0, 1e6,
             "seconds without a heartbeat after which a rank counts as stopped and the run ends; "
             "0: never"),
      number(KEY(comm.timeout), 0, 1e6, "seconds that a collective may take", positive),
      text(KEY(comm.bind),
           "address on which rank 0 listens without --nproc; empty: the rendezvous address; any "
           "but loopback needs TESSERA_TOKEN"),

      text(KEY(run.out), "run directory: configuration, metrics, logs and checkpoints"),
      text(KEY(run.tensorboard), "on: also write TensorBoard event files to run.out/tensorboard",
           {"off", "on"}),
  };
}

std::string_view section_of(const Field& field) { return field.key.substr(0, field.key.find('.')); }

template <typename T>
bool parse_whole(std::string_view text, T& value) {
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value);
  return status == std::errc() && end == text.data() + text.size();
}

[[noreturn]] void refuse(const Field& field, std::string_view where, std::string_view found) {
  throw InvalidArgument("{}: {} must be {} {}, found {}", where, field.key,
                        field.type_name() == "integer" ? "an" : "a", field.type_name(), found);
}

std::string describe(const FieldValue& value) {
  struct Visitor {
    std::string operator()(std::int64_t v) const { return fmt::format("{}", v); }
    std::string operator()(double v) const { return fmt::format("{}", v); }
    std::string operator()(const std::string& v) const { return fmt::format("\"{}\"", v); }
    std::string operator()(const std::vector<std::string>&) const { return "a list"; }
    std::string operator()(const FieldText& v) const { return fmt::format("'{}'", v.text); }
  };
  return std::visit(Visitor{}, value);
}

template <typename T>
void check_range(const Field& field, T value, std::string_view where) {
  const auto v = static_cast<double>(value);
  const bool fits =
      (field.min_exclusive ? v > field.min : v >= field.min) && v <= field.max;  // false for NaN
  if (fits) return;
  const std::string lower = field.min_exclusive ? fmt::format("above {}", field.min)
                                                : fmt::format("at least {}", field.min);
  throw InvalidArgument("{}: {} must be {} and at most {}, found {}", where, field.key, lower,
                        field.max, value);
}

/// The configuration is saved as JSON, which must be UTF-8.
void check_utf8(const Field& field, const std::string& text, std::string_view where) {
  try {
    (void)nlohmann::json(text).dump();
  } catch (const nlohmann::json::type_error&) {
    throw InvalidArgument(
        "{}: {} must be UTF-8 text, found other bytes in {}; rename files whose names are not "
        "UTF-8",
        where, field.key,
        nlohmann::json(text).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace));
  }
}

template <typename Number>
void assign(Number& target, const Field& field, const FieldValue& value, std::string_view where) {
  constexpr bool kInteger = std::is_same_v<Number, std::int64_t>;
  Number parsed = 0;
  if (const auto* whole = std::get_if<std::int64_t>(&value)) {
    parsed = static_cast<Number>(*whole);
  } else if (const auto* number = std::get_if<double>(&value);
             number && (!kInteger || std::abs(*number) >= 0x1p63)) {
    check_range(field, *number, where);  // throws if Number is an integer: value beyond int64
    parsed = static_cast<Number>(*number);
  } else if (const auto* text = std::get_if<FieldText>(&value);
             !text || !parse_whole(text->text, parsed)) {
    refuse(field, where, describe(value));
  }
  check_range(field, parsed, where);
  target = parsed;
}

void assign(std::string& target, const Field& field, const FieldValue& value,
            std::string_view where) {
  std::string parsed;
  if (const auto* string = std::get_if<std::string>(&value)) {
    parsed = *string;
  } else if (const auto* text = std::get_if<FieldText>(&value)) {
    parsed = text->text;
  } else {
    refuse(field, where, describe(value));
  }
  check_utf8(field, parsed, where);
  if (field.key == "comm.backend" && parsed == "gloo") parsed = "tcp";  // accepted alias
  if (!field.choices.empty() && std::ranges::count(field.choices, parsed) == 0) {
    throw InvalidArgument("{}: {} must be one of {}, found \"{}\"", where, field.key,
                          fmt::join(field.choices, ", "), parsed);
  }
  target = std::move(parsed);
}

void assign(std::vector<std::string>& target, const Field& field, const FieldValue& value,
            std::string_view where) {
  std::vector<std::string> parsed;
  if (const auto* list = std::get_if<std::vector<std::string>>(&value)) {
    parsed = *list;
  } else if (const auto* string = std::get_if<std::string>(&value)) {
    parsed = {*string};
  } else if (const auto* text = std::get_if<FieldText>(&value)) {
    parsed = {text->text};
    // Environment variables give a list as JSON. Other text, such as [a].txt, is a file name.
    if (text->text.starts_with('[')) {
      const auto json = nlohmann::json::parse(text->text, nullptr, /*allow_exceptions=*/false);
      const bool strings =
          json.is_array() &&
          std::all_of(json.begin(), json.end(), [](const auto& e) { return e.is_string(); });
      if (strings) parsed = json.get<std::vector<std::string>>();
    }
  } else {
    refuse(field, where, describe(value));
  }
  std::erase(parsed, std::string());  // --data.val "" is an empty list
  for (const std::string& element : parsed) check_utf8(field, element, where);
  target = std::move(parsed);
}

}  // namespace

bool Field::is_list() const {
  Config config;
  return std::holds_alternative<std::vector<std::string>*>(ref(config));
}

std::string_view Field::type_name() const {
  static constexpr std::string_view kNames[] = {"integer", "number", "string", "list of strings"};
  Config config;
  return kNames[ref(config).index()];
}

std::string Field::environment_name() const {
  std::string name = "TESSERA_" + std::string(key);
  for (char& c : name) c = c == '.' ? '_' : static_cast<char>(std::toupper(c));
  return name;
}

std::span<const Field> fields() {
  static const std::vector<Field> table = make_fields();
  return table;
}

const Field* find_field(std::string_view key) {
  const auto found = std::ranges::find(fields(), key, &Field::key);
  return found == fields().end() ? nullptr : &*found;
}

bool is_section(std::string_view name) {
  return std::ranges::find(fields(), name, section_of) != fields().end();
}

std::string_view nearest_section(std::string_view name) {
  const auto distance = [&](const Field& field) { return edit_distance(name, section_of(field)); };
  return section_of(*std::ranges::min_element(fields(), {}, distance));
}

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, diagonal + 1, row[j] + 1});
    }
  }
  return row.back();
}

std::string_view nearest_key(std::string_view key) {
  const auto last = key.substr(key.find('.') + 1);
  const auto distance = [&](const Field& field) {
    // The right name in the wrong section is the most common mistake: weigh the name most.
    const auto name = field.key.substr(field.key.find('.') + 1);
    return 2 * edit_distance(last, name) + edit_distance(key, field.key);
  };
  return std::ranges::min_element(fields(), {}, distance)->key;
}

void set_field(Config& config, const Field& field, const FieldValue& value,
               std::string_view where) {
  std::visit([&](auto* target) { assign(*target, field, value, where); }, field.ref(config));
  config.given.emplace(field.key);
}

std::string config_help() {
  Config defaults;
  std::string out =
      "Usage with keys: tessera train [OPTIONS] [CONFIG.json] [--section.key VALUE]...\n\n"
      "Set a key by --section.key VALUE, by TESSERA_SECTION_KEY in the environment, or by\n"
      "\"section\": {\"key\": VALUE} in CONFIG.json (comments allowed); the first of these wins.\n";
  std::string_view section;
  for (const Field& field : fields()) {
    if (const auto here = section_of(field); here != section) {
      section = here;
      out += '\n';
    }
    const auto value = std::visit(
        [](const auto* v) -> std::string {
          using T = std::remove_cvref_t<decltype(*v)>;
          if constexpr (std::is_same_v<T, std::vector<std::string>>) {
            return "";
          } else {
            return fmt::format("{}", *v);
          }
        },
        field.ref(defaults));
    out += fmt::format("  --{:<23} {:<12} {}", field.key, value.empty() ? "-" : value, field.help);
    if (!field.choices.empty()) out += fmt::format(" ({})", fmt::join(field.choices, ", "));
    out += '\n';
  }
  return out;
}

}  // namespace tessera::tools
