#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "core/base/clock.h"
#include "io/base/file.h"
#include "io/tokenizer/unicode.h"
#include "tools/tessera/generate/generate_options.h"
#include "tools/tessera/model/chat_prompt.h"

namespace tessera::tools {
namespace {

constexpr std::int64_t kSamplesAtOnce = 16;

struct Prompt {
  Tokens tokens;
  std::size_t hidden = 0;  // tokens before the text that is shown
  Tokens ends;
};

Prompt prompt_of(const GenerateOptions& options, const LoadedModel& loaded) {
  const io::Tokenizer& tokenizer = *loaded.tokenizer;
  if (options.prompt) {
    const bool reads = *options.prompt == "-";
    const std::string text =
        reads ? std::string(std::istreambuf_iterator<char>(std::cin), {}) : *options.prompt;
    Prompt prompt{tokenizer.prefix(), tokenizer.prefix().size(), {}};
    const Tokens tokens = tokenizer.encode(text, reads ? "standard input" : "--prompt");
    prompt.tokens.insert(prompt.tokens.end(), tokens.begin(), tokens.end());
    return prompt;
  }
  const std::size_t malformed = io::find_malformed_utf8(options.chat);
  require(malformed == options.chat.npos, "--chat: byte {} is not valid UTF-8", malformed);
  const bool has_file = !options.messages.empty();
  const ChatPrompt chat = chat_prompt(
      tokenizer,
      has_file ? read_messages(options.messages)
               : io::OrderedJson{{"messages", {{{"role", "user"}, {"content", options.chat}}}}},
      options.chat_template, has_file ? options.messages : "--chat");
  return {chat.tokens, chat.tokens.size(), chat.ends};
}

int run(const GenerateOptions& options) {
  options.sampling.validate();
  const int prompts = (options.prompt ? 1 : 0) + (options.prompt_tokens.empty() ? 0 : 1) +
                      (options.chat.empty() ? 0 : 1) +
                      (options.messages.empty() && !options.interactive ? 0 : 1);
  require(
      prompts == 1,
      "give one prompt: --prompt TEXT, --chat TEXT, --messages FILE, --prompt-tokens ID ..., or "
      "--interactive");
  require(!options.interactive || (options.samples == 1 && !options.json),
          "--interactive cannot be combined with --samples or --json");
  LoadedModel loaded = load_model(options.model, options.load);
  require<Unsupported>(
      loaded.tokenizer != nullptr || (!options.prompt_tokens.empty() && options.stop.empty()),
      "{} came without a tokenizer that this build reads ({}); give token ids with "
      "--prompt-tokens, and no --stop",
      loaded.path.string(), loaded.no_tokenizer);
  if (options.interactive) return run_interactive(options, loaded);

  const Prompt prompt = options.prompt_tokens.empty() ? prompt_of(options, loaded)
                                                      : Prompt{options.prompt_tokens, 0, {}};
  const std::int64_t vocab_size = loaded.model->arch().vocab_size;
  for (const std::int32_t id : prompt.tokens)
    require(id >= 0 && id < vocab_size,
            "--prompt-tokens: {} is not one of the model's ids, 0 to {}", id, vocab_size - 1);

  const bool chats = !options.chat.empty() || !options.messages.empty();
  // One sample is streamed; several are shown when they are complete.
  const bool streams = !options.json && options.samples == 1;
  const auto start = std::chrono::steady_clock::now();
  nlohmann::ordered_json samples = nlohmann::ordered_json::array();
  GenerationOptions generation = options.generation();
  generation.ends = prompt.ends;
  for (std::int64_t first = 0; first < options.samples; first += kSamplesAtOnce) {
    const auto rows = static_cast<std::size_t>(std::min(kSamplesAtOnce, options.samples - first));
    std::vector<SampleText> texts(rows, SampleText(loaded.tokenizer.get(), options.stop));
    std::vector<std::string> shown(rows);
    const auto show = [&](std::size_t row, const std::string& part) {
      if (streams)
        std::cout << part << std::flush;
      else
        shown[row] += part;
    };
    for (std::size_t row = 0; row < rows; ++row) {
      const std::string text =
          texts[row].add_prompt(std::span(prompt.tokens).subspan(prompt.hidden));
      if (!options.json) show(row, text);
    }
    generation.first_sample = static_cast<std::uint64_t>(first);
    generation.on_token = [&](std::size_t row, std::int32_t token, const Tensor&) {
      if (!chats || !loaded.ends_text(token, prompt.ends)) show(row, texts[row].add(token));
      return !texts[row].stopped();
    };
    const std::vector<Tokens> ids = generate(*loaded.model, loaded.context,
                                             std::vector<Tokens>(rows, prompt.tokens), generation);
    for (std::size_t row = 0; row < rows; ++row) {
      show(row, texts[row].rest());
      if (options.json) {
        nlohmann::ordered_json sample = {{"tokens", ids[row]}};
        if (loaded.tokenizer) sample["text"] = shown[row];
        samples.push_back(std::move(sample));
      } else if (streams) {
        std::cout << std::endl;
      } else {
        std::cout << fmt::format("--- sample {}\n", first + static_cast<std::int64_t>(row) + 1)
                  << shown[row] << std::endl;
      }
    }
  }
  if (!options.json) return 0;
  nlohmann::ordered_json out;
  out["model"] = loaded.path.string();
  out["prompt_tokens"] = prompt.tokens;
  if (options.samples == 1)
    out.update(samples[0]);
  else
    out["samples"] = samples;
  out["seconds"] = seconds_since(start);
  // error_handler_t::replace, because the path can be invalid UTF-8.
  constexpr auto kReplace = nlohmann::ordered_json::error_handler_t::replace;
  std::cout << out.dump(-1, ' ', false, kReplace) << std::endl;
  return 0;
}

}  // namespace

SampleText::SampleText(const io::Tokenizer* tokenizer, const std::vector<std::string>& stops)
    : cut_(stops) {
  if (tokenizer != nullptr) stream_.emplace(*tokenizer);
}

std::string SampleText::text_of_tokens(std::span<const std::int32_t> tokens) {
  if (stream_) return stream_->next(tokens);
  const char* separator = std::exchange(first_, false) ? "" : " ";
  return fmt::format("{}{}", separator, fmt::join(tokens, " "));
}

std::string SampleText::add_prompt(std::span<const std::int32_t> tokens) {
  pending_ += text_of_tokens(tokens);
  return take_printable(pending_);
}

std::string SampleText::add(std::int32_t token) {
  pending_ += cut_.add(text_of_tokens({&token, 1}));
  return take_printable(pending_);
}

std::string SampleText::rest() { return printable(std::exchange(pending_, {}) + cut_.rest()); }

io::OrderedJson read_messages(const std::string& file) {
  io::OrderedJson json = io::parse_ordered_json(io::read_file(file, 64 << 20), file);
  if (json.is_array()) json = io::OrderedJson{{"messages", json}};
  require(json.is_object() && json.contains("messages") && json["messages"].is_array(),
          "{}: expected a list of messages, or an object with \"messages\"", file);
  return json;
}

Command add_generate(CLI::App& parent) {
  const auto options = std::make_shared<GenerateOptions>();
  CLI::App* app = parent.add_subcommand("generate", "Continue a text with a model");
  add_load_options(*app, options->model, options->load);
  app->add_option("--prompt", options->prompt, "Text to continue; -: from standard input");
  app->add_option("--chat", options->chat, "Message to answer, through the model's chat template");
  app->add_option("--messages", options->messages,
                  "JSON file with a conversation to answer: a list of messages, or an object with "
                  "\"messages\"");
  app->add_flag("--interactive", options->interactive,
                "Answer the lines of standard input as one conversation, which --messages may "
                "begin. Ctrl-C ends an answer, Ctrl-D the conversation");
  app->add_option("--chat-template", options->chat_template,
                  "File with a chat template for conversations; default: the model's");
  app->add_option("--prompt-tokens", options->prompt_tokens, "Token ids to continue");
  app->add_option("--max-new-tokens", options->max_new_tokens, "Number of tokens to generate")
      ->capture_default_str()
      ->check(CLI::Range(0, 1 << 30));
  app->add_option("--temperature", options->sampling.temperature,
                  "Sampling temperature; 0: always the most likely token")
      ->capture_default_str();
  app->add_option("--top-k", options->sampling.top_k,
                  "Sample from the k most likely tokens; 0: all")
      ->capture_default_str();
  app->add_option("--top-p", options->sampling.top_p,
                  "Sample from the most likely tokens that together reach this probability")
      ->capture_default_str();
  app->add_option("--min-p", options->sampling.min_p,
                  "Sample from tokens with at least this times the most likely one's probability")
      ->capture_default_str();
  app->add_option("--repetition-penalty", options->sampling.repetition_penalty,
                  "Above 1: lowers the logits of tokens of the prompt and the text so far")
      ->capture_default_str();
  app->add_option("--stop", options->stop, "End before any of these strings");
  app->add_option("--samples", options->samples, "Number of samples")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 20));
  app->add_option("--seed", options->seed, "Random seed")->capture_default_str();
  app->add_flag("--json", options->json, "Machine-readable output");
  return {app,
          [options] { return with_load_advice(options->load, {}, [&] { return run(*options); }); }};
}

}  // namespace tessera::tools
