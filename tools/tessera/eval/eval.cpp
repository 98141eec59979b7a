#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cmath>
#include <iostream>
#include <nlohmann/json.hpp>

#include "core/base/clock.h"
#include "io/data/sampler.h"
#include "tools/tessera/eval/eval_options.h"
#include "tools/tessera/report/console.h"

namespace tessera::tools {
namespace {

int run_data(const EvalOptions& options, LoadedModel& loaded) {
  models::LanguageModel& model = *loaded.model;
  const std::int64_t seq_len = options.seq_len;
  require(!loaded.tokenizer || options.tokenizer.empty() ||
              options.tokenizer == loaded.tokenizer->kind(),
          "--tokenizer {}: the model has its own tokenizer ({}); leave the option out",
          options.tokenizer, loaded.tokenizer ? loaded.tokenizer->kind() : "");
  const io::Dataset dataset =
      io::open_dataset({.train = options.data,
                        .val = {},
                        .tokenizer = options.tokenizer,
                        .val_fraction = 0,
                        .vocab_size = model.arch().vocab_size,
                        .fixed_tokenizer = loaded.tokenizer,
                        .refuse_text = loaded.tokenizer == nullptr && options.tokenizer.empty(),
                        .no_tokenizer = loaded.no_tokenizer,
                        .chat_template = options.chat_template,
                        .chat_date = options.chat_date});
  const auto warn = [](const std::string& text) {
    std::cerr << fmt::format("tessera: warning: {}\n", text);
  };
  const std::int64_t vocab_size = model.arch().vocab_size;
  for (const std::string& text : dataset.warnings) warn(text);
  if (!loaded.tokenizer && !options.tokenizer.empty() && dataset.tokenizer &&
      dataset.tokenizer->vocab_size() < vocab_size / 2)
    warn(fmt::format("the {} tokenizer has {} tokens, the model {}: is it the model's tokenizer?",
                     options.tokenizer, dataset.tokenizer->vocab_size(), vocab_size));
  std::unique_ptr<io::Samples> samples;
  if (dataset.conversations) {
    auto packed = std::make_unique<io::ConversationSamples>(dataset.conversations, seq_len,
                                                            io::DataOrder::Sequential, 0);
    std::cerr << fmt::format("tessera: {}\n", packed->report().str());
    samples = std::move(packed);
  } else {
    samples = std::make_unique<io::Sampler>(dataset.train, seq_len, io::DataOrder::Sequential, 0);
  }
  const io::Samples& rows = *samples;
  std::int64_t count = rows.samples_per_epoch();
  if (options.max_rows > 0) count = std::min(count, options.max_rows);

  const auto started = std::chrono::steady_clock::now();
  double sum = 0;
  for (std::int64_t first = 0; first < count; first += options.batch) {
    const std::int64_t batch = std::min(options.batch, count - first);
    const Shape shape{batch, seq_len};
    std::vector<std::int32_t> inputs(static_cast<std::size_t>(numel(shape)));
    std::vector<std::int32_t> targets(inputs.size());
    rows.fill_batch(first, batch, inputs.data(), targets.data());
    const auto make = [&](const std::vector<std::int32_t>& values) {
      return Tensor::from<std::int32_t>(loaded.context, shape, std::span(values));
    };
    models::Packing packing;
    if (rows.is_packed()) {
      std::vector<std::int32_t> documents(inputs.size()), positions(inputs.size());
      rows.fill_documents(first, batch, documents.data(), positions.data());
      packing = {make(documents), make(positions)};
    }
    sum += model.loss(make(inputs), make(targets), 1.0, packing).item();
  }
  const double seconds = seconds_since(started);
  const auto tokens = static_cast<double>(count * seq_len);
  const std::int64_t predictions = rows.count_targets(0, count);
  const double loss = sum / static_cast<double>(predictions);
  if (const double uniform = std::log(static_cast<double>(vocab_size)); loss > uniform + 0.1)
    warn(
        fmt::format("the loss of {:.4f} is worse than a uniform guess, ln {} = {:.4f}; are these "
                    "the tokens that the model was trained on?",
                    loss, vocab_size, uniform));
  if (options.json) {
    const nlohmann::ordered_json out = {{"model", loaded.path.string()},
                                        {"device", loaded.context->device().str()},
                                        {"loss", loss},
                                        {"perplexity", std::exp(loss)},
                                        {"tokens", count * seq_len},
                                        {"targets", predictions},
                                        {"rows", count},
                                        {"seq_len", seq_len},
                                        {"tokens_per_s", tokens / seconds}};
    std::cout << out.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace)
              << std::endl;
    return 0;
  }
  std::cout << format_rows(
      detect_console(STDOUT_FILENO),
      {{"model", loaded.path.string()},
       {"device", loaded.context->device().str()},
       {"loss", fmt::format("{:.4f} nats per {}", loss,
                            dataset.conversations ? "token with loss" : "token")},
       {"perplexity", fmt::format("{:.3f}", std::exp(loss))},
       {"tokens", fmt::format("{} in {} rows of {}", count * seq_len, count, seq_len)},
       {"speed", fmt::format("{} tokens/s", format_count(tokens / seconds))}});
  return 0;
}

int run(EvalOptions options) {
  const int inputs = (options.data.empty() ? 0 : 1) + (options.documents.empty() ? 0 : 1) +
                     (options.choices.empty() ? 0 : 1);
  require(inputs == 1,
          "give one input: --data FILE ..., --documents FILE ..., or --choices FILE ...");
  LoadedModel loaded = load_model(options.model, options.load);
  const std::int64_t positions = loaded.model->arch().seq_len;
  if (options.seq_len == 0) options.seq_len = positions;
  require(options.seq_len <= positions, "--seq-len {} is more than the model's {} positions",
          options.seq_len, positions);
  if (!options.data.empty()) return run_data(options, loaded);
  if (!loaded.tokenizer && !options.tokenizer.empty())
    loaded.tokenizer = options.tokenizer == "bytes" ? io::make_byte_tokenizer()
                                                    : io::load_tokenizer(options.tokenizer);
  require<Unsupported>(loaded.tokenizer != nullptr,
                       "{} came without a tokenizer that this build reads ({}); give one with "
                       "--tokenizer",
                       loaded.path.string(), loaded.no_tokenizer);
  return options.documents.empty() ? run_choices(options, loaded) : run_documents(options, loaded);
}

}  // namespace

Command add_eval(CLI::App& parent) {
  const auto options = std::make_shared<EvalOptions>();
  CLI::App* app =
      parent.add_subcommand("eval", "Measure a model's loss on data, or its answers to questions");
  add_load_options(*app, options->model, options->load);
  app->add_option(
      "--data", options->data,
      "Token files (.bin), or conversations (.jsonl) or text for the model's tokenizer, cut "
      "into rows");
  app->add_option(
      "--documents", options->documents,
      "Text files, or lines of JSON (.jsonl) with \"text\": the perplexity of documents, "
      "each from its start");
  app->add_option(
      "--choices", options->choices,
      "Questions with choices (.jsonl), as HellaSwag and ARC ship them, or with "
      "\"context\", \"choices\" and \"answer\": how often the likeliest choice is right");
  app->add_option("--tokenizer", options->tokenizer,
                  "For text, if the model has none: bytes, chars, a tokenizer file or directory");
  app->add_option("--chat-template", options->chat_template,
                  "For conversations: a file with a chat template; default: the model's");
  app->add_option("--chat-date", options->chat_date,
                  "Date that the template gets from strftime_now")
      ->capture_default_str();
  app->add_option("--seq-len", options->seq_len,
                  "Tokens per row, or of context at most; 0: the model's context length")
      ->capture_default_str()
      ->check(CLI::Range(0, 1 << 30));
  app->add_option("--batch", options->batch, "Rows at a time")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 20));
  app->add_option("--max-rows", options->max_rows,
                  "Rows, documents or questions to evaluate; 0: all")
      ->capture_default_str()
      ->check(CLI::Range(0, 1 << 30));
  app->add_flag("--json", options->json, "Machine-readable output");
  return {app, [options] {
            MemoryAdvice advice;
            if (options->batch > 1)
              advice.add(fmt::format("--batch {}", options->batch / 2), "fewer rows at a time");
            return with_load_advice(options->load, advice, [&] { return run(*options); });
          }};
}

}  // namespace tessera::tools
