#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <iostream>
#include <nlohmann/json.hpp>

#include "core/base/clock.h"
#include "io/base/json.h"
#include "io/chat/conversation_reader.h"
#include "io/tokenizer/unicode.h"
#include "tools/tessera/eval/eval_options.h"
#include "tools/tessera/report/console.h"

namespace tessera::tools {
namespace {

constexpr std::size_t kQuestionsAtOnce = 64;  // sorted by length
constexpr const char* kSpace = " \t\r\n";

struct Question {
  std::string context;
  std::vector<std::string> choices;
  std::size_t answer = 0;
};

std::vector<std::string> strings_of(const io::JsonReader& list) {
  std::vector<std::string> strings;
  for (std::size_t i = 0; i < list.array_size(); ++i) strings.push_back(list.at(i).string());
  return strings;
}

// HellaSwag's texts without WikiHow's marks. Source: lm-evaluation-harness, tasks/hellaswag/utils.py.
std::string without_marks(std::string text) {
  const auto replace_all = [&](std::string_view from, std::string_view to) {
    for (std::size_t at = 0; (at = text.find(from, at)) != text.npos; at += to.size())
      text.replace(at, from.size(), to);
  };
  text.erase(0, std::min(text.find_first_not_of(kSpace), text.size()));
  text.erase(text.find_last_not_of(kSpace) + 1);
  replace_all(" [title]", ". ");
  for (std::size_t open = 0; (open = text.find('[', open)) != text.npos;) {
    const std::size_t close = text.find_first_of("]\n", open);
    if (close != text.npos && text[close] == ']')
      text.erase(open, close + 1 - open);
    else
      ++open;
  }
  replace_all("  ", " ");
  return text;
}

std::string capitalized(const std::string& text) {
  if (text.empty()) return text;
  const std::size_t first = io::utf8_length(text[0]);
  return io::uppercase_unicode(text.substr(0, first)) + io::lowercase_unicode(text.substr(first));
}

// Index of an answer given as a label, as an index, or as a letter.
std::size_t answer_of(const io::JsonReader& answer, const std::vector<std::string>& labels,
                      std::size_t count) {
  std::int64_t index = -1;
  if (answer.value().is_string()) {
    const std::string& text = answer.string();
    const auto found = std::ranges::find(labels, text);
    if (found != labels.end())
      index = found - labels.begin();
    else if (text.size() == 1 && text[0] >= 'A' && text[0] <= 'Z')
      index = text[0] - 'A';
    else
      std::from_chars(text.data(), text.data() + text.size(), index);
  } else {
    index = answer.integer();
  }
  require<IoError>(index >= 0 && index < static_cast<std::int64_t>(count),
                   "{}: {} is not one of {} choices", answer.where(), answer.value().dump(), count);
  return static_cast<std::size_t>(index);
}

Question parse_question(std::string_view line, const std::string& where) {
  const io::Json json = io::parse_json(line, where);
  const io::JsonReader in(json, where);
  Question question;
  std::vector<std::string> labels;
  const auto add_labeled = [&](const io::JsonReader& list) {
    for (std::size_t i = 0; i < list.array_size(); ++i) {
      question.choices.push_back(list.at(i).at("text").string());
      labels.push_back(list.at(i).at("label").string());
    }
  };
  const char* answer = "answer";
  if (in.has("endings")) {  // HellaSwag
    answer = "label";
    question.choices = strings_of(in.at("endings"));
    const bool has_parts = in.has("ctx_a") && in.has("ctx_b") && in.has("activity_label");
    question.context = has_parts ? without_marks(in.at("activity_label").string() + ": " +
                                                 in.at("ctx_a").string() + " " +
                                                 capitalized(in.at("ctx_b").string()))
                                 : in.at("ctx").string();
    if (has_parts)
      for (std::string& choice : question.choices) choice = without_marks(choice);
  } else if (in.has("answerKey")) {  // ARC, as its authors or Hugging Face ship it
    answer = "answerKey";
    const io::JsonReader stem = in.at("question");
    if (stem.value().is_object()) {
      add_labeled(stem.at("choices"));
      question.context = stem.at("stem").string();
    } else {
      question.choices = strings_of(in.at("choices").at("text"));
      labels = strings_of(in.at("choices").at("label"));
      question.context = stem.string();
    }
    question.context = "Question: " + question.context + "\nAnswer:";
  } else {
    question.choices = strings_of(in.at("choices"));
    question.context = in.at(in.has("context") ? "context" : "question").string();
  }
  require<IoError>(question.choices.size() >= 2, "{}: a question needs two choices or more, got {}",
                   where, question.choices.size());
  for (const std::string& choice : question.choices)
    require<IoError>(!choice.empty(), "{}: a choice is empty", where);
  question.answer = answer_of(in.at(answer), labels, question.choices.size());
  return question;
}

// The choice is scored after the context, with the white space between them.
ScoredText scored_choice(const io::Tokenizer& tokenizer, const std::string& context,
                         const std::string& choice, std::size_t positions) {
  const std::size_t end = context.find_last_not_of(kSpace) + 1;  // 0: no text
  const std::string text = context.substr(0, end);
  std::string rest = context.substr(end) + choice;
  if (end > 0 && std::string_view(kSpace).find(rest[0]) == std::string_view::npos)
    rest = " " + rest;
  Tokens tokens = text.empty() ? scoring_prefix(tokenizer) : tokenizer.prefix();
  std::size_t first = tokens.size() + tokenizer.encode(text, "the context").size();
  const Tokens whole = tokenizer.encode(text + rest, "the choice");
  tokens.insert(tokens.end(), whole.begin(), whole.end());
  const std::size_t dropped = tokens.size() - std::min(tokens.size(), positions + 1);
  tokens.erase(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(dropped));
  first = std::max(first, dropped + 1) - dropped;
  return {std::move(tokens), first};
}

std::int64_t count_characters(const std::string& text) {
  return std::ranges::count_if(text, [](char c) { return (c & 0xC0) != 0x80; });
}

/// Right answers of a way to choose.
struct Accuracy {
  std::int64_t right = 0, questions = 0;
  double value() const { return static_cast<double>(right) / static_cast<double>(questions); }
  double error() const {
    const double others = static_cast<double>(std::max<std::int64_t>(questions - 1, 1));
    return std::sqrt(value() * (1 - value()) / others);
  }
};

}  // namespace

int run_choices(const EvalOptions& options, LoadedModel& loaded) {
  const auto start = std::chrono::steady_clock::now();
  Accuracy plain, by_characters, by_bytes;
  std::vector<Question> questions;
  const auto flush = [&] {
    std::vector<ScoredText> texts;
    for (const Question& question : questions)
      for (const std::string& choice : question.choices)
        texts.push_back(scored_choice(*loaded.tokenizer, question.context, choice,
                                      static_cast<std::size_t>(options.seq_len)));
    const auto scores = score(*loaded.model, loaded.context, texts, {.batch = options.batch});
    auto next = scores.begin();
    for (const Question& question : questions) {
      std::vector<double> sums;
      for (std::size_t i = 0; i < question.choices.size(); ++i)
        sums.push_back(log_likelihood(*next++));
      const auto choose = [&](Accuracy& accuracy, const auto& length_of) {
        std::vector<double> normed = sums;
        for (std::size_t i = 0; i < sums.size(); ++i)
          normed[i] /= static_cast<double>(length_of(question.choices[i]));
        const auto chosen = std::ranges::max_element(normed) - normed.begin();
        accuracy.right += static_cast<std::size_t>(chosen) == question.answer ? 1 : 0;
        ++accuracy.questions;
      };
      choose(plain, [](const std::string&) { return 1; });
      choose(by_characters, count_characters);
      choose(by_bytes, [](const std::string& choice) { return choice.size(); });
    }
    questions.clear();
  };
  for (const std::string& file : io::expand_globs(options.choices)) {
    io::for_each_line(file, [&](std::string_view line, const std::string& where) {
      questions.push_back(parse_question(line, where));
      const std::int64_t count = plain.questions + std::ssize(questions);
      if (questions.size() == kQuestionsAtOnce) flush();
      return options.max_rows == 0 || count < options.max_rows;
    });
  }
  flush();
  require<IoError>(plain.questions > 0, "{} has no question", fmt::join(options.choices, ", "));
  const double speed = static_cast<double>(plain.questions) / seconds_since(start);
  if (options.json) {
    const nlohmann::ordered_json out = {{"model", loaded.path.string()},
                                        {"device", loaded.context->device().str()},
                                        {"acc", plain.value()},
                                        {"acc_stderr", plain.error()},
                                        {"acc_norm", by_characters.value()},
                                        {"acc_norm_stderr", by_characters.error()},
                                        {"acc_bytes", by_bytes.value()},
                                        {"acc_bytes_stderr", by_bytes.error()},
                                        {"questions", plain.questions},
                                        {"questions_per_s", speed}};
    std::cout << out.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace)
              << std::endl;
    return 0;
  }
  const auto row = [](const char* name, const Accuracy& accuracy) {
    return std::pair<std::string, std::string>(
        name, fmt::format("{:.4f} \u00b1 {:.4f}", accuracy.value(), accuracy.error()));
  };
  std::cout << format_rows(detect_console(STDOUT_FILENO),
                           {{"model", loaded.path.string()},
                            {"device", loaded.context->device().str()},
                            row("acc", plain),
                            row("acc_norm", by_characters),
                            row("acc_bytes", by_bytes),
                            {"questions", fmt::format("{}", plain.questions)},
                            {"speed", fmt::format("{:.1f} questions/s", speed)}});
  return 0;
}

}  // namespace tessera::tools
