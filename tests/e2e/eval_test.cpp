// tessera eval on documents and questions.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "tests/e2e/inference_support.h"

using namespace tessera;
using namespace tessera::test;

namespace {

nlohmann::json evaluated(const Arguments& more) {
  return json_of(joined({"eval", SmallModel::get().run, "--batch", "3"}, more));
}

double log_likelihood(const TempDir& dir, const std::string& text) {
  const auto result = evaluated({"--documents", dir.write("one.txt", text)});
  return -result["loss"].get<double>() * result["tokens"].get<double>();
}

}  // namespace

TEST_CASE("a document is scored from its start, and a long one in windows that miss no token") {
  const TempDir dir;
  const std::string text = make_text().substr(0, 120);
  const auto row = evaluated({"--data", dir.write("row.txt", text.substr(0, 49))});
  const auto one = evaluated({"--documents", dir.write("row.txt", text.substr(0, 49))});
  REQUIRE(row["targets"] == 48);
  CHECK(one["tokens"] == 48);
  CHECK(relative(one["loss"].get<double>(), row["loss"].get<double>()) < 1e-6);
  CHECK(log_likelihood(dir, text) < log_likelihood(dir, text.substr(0, 70)));

  std::string lines;
  std::int64_t words = 0;
  double sum = 0;
  for (const std::string& part :
       {text, text.substr(10, 30), std::string(" to  the\nsum "), text.substr(3, 96)}) {
    lines += nlohmann::json({{"text", part}, {"id", 1}}).dump() + "\n";
    sum += log_likelihood(dir, part);
    words += evaluated({"--documents", dir.write("one.txt", part)})["words"].get<std::int64_t>();
  }
  const auto all = evaluated({"--documents", dir.write("all.jsonl", lines)});
  CHECK(all["documents"] == 4);
  CHECK(all["tokens"] == 119 + 29 + 12 + 95);
  CHECK(all["bytes"] == 120 + 30 + 13 + 96);
  CHECK(all["words"] == words);
  CHECK(evaluated({"--documents", dir.write("w.txt", " to  the\nsum ")})["words"] == 5);
  CHECK(relative(-sum / 255, all["loss"].get<double>()) < 1e-6);
  const auto of = [&](const char* key) { return all[key].get<double>(); };
  CHECK(relative(of("perplexity"), std::exp(-sum / 255)) < 1e-6);
  CHECK(relative(of("byte_perplexity"), std::exp(-sum / 259)) < 1e-6);
  CHECK(relative(of("word_perplexity"), std::exp(-sum / static_cast<double>(words))) < 1e-5);
  CHECK(relative(of("bits_per_byte"), -sum / 259 / std::log(2.0)) < 1e-6);
  CHECK(evaluated({"--documents", dir.file("all.jsonl"), "--max-rows", "2"})["documents"] == 2);

  CHECK(run_to(3, {"eval", SmallModel::get().run, "--documents",
                   dir.write("bad.jsonl", "{\"text\": \"a\"}\n{\"txt\": \"a\"}\n")})
            .err.find("bad.jsonl:2") != std::string::npos);
  run_to(2, {"eval", SmallModel::get().run});
  run_to(2, {"eval", SmallModel::get().run, "--documents", "a", "--choices", "b"});
}

TEST_CASE("the choice with the highest log-likelihood is the answer, whatever the file's format") {
  const TempDir dir;
  const std::vector<std::string> questions = {"the rank of", "sum is"};
  const std::vector<std::vector<std::string>> choices = {{"the model", "ledom eht", "to"},
                                                         {"kkk", "is", "each step"}};
  const auto line = [](const nlohmann::json& json) { return json.dump() + "\n"; };
  std::string generic, hellaswag, arc, published_arc;
  std::size_t right = 0, right_arc = 0;  // by log-likelihood per character
  for (std::size_t q = 0; q < questions.size(); ++q) {
    // The likeliest choice after a context; whether it is also the likeliest per character.
    const auto choose = [&](const std::string& context) {
      const double before = log_likelihood(dir, context);
      std::vector<double> sums, normed;
      for (const std::string& choice : choices[q]) {
        sums.push_back(log_likelihood(dir, context + " " + choice) - before);
        normed.push_back(sums.back() / static_cast<double>(choice.size()));
      }
      const auto best = std::ranges::max_element(sums) - sums.begin();
      return std::pair(best, best == std::ranges::max_element(normed) - normed.begin());
    };
    const auto plain = choose(questions[q]);
    const auto asked = choose("Question: " + questions[q] + "\nAnswer:");
    right += plain.second ? 1 : 0;
    right_arc += asked.second ? 1 : 0;
    nlohmann::json labeled = nlohmann::json::array(), labels = nlohmann::json::array();
    for (std::size_t i = 0; i < choices[q].size(); ++i) {
      labels.push_back(std::to_string(i + 1));
      labeled.push_back({{"text", choices[q][i]}, {"label", labels.back()}});
    }
    generic += line({{"context", questions[q]}, {"choices", choices[q]}, {"answer", plain.first}});
    hellaswag += line(
        {{"ctx", questions[q]}, {"endings", choices[q]}, {"label", std::to_string(plain.first)}});
    const std::string key = labels[static_cast<std::size_t>(asked.first)];
    arc += line({{"question", {{"stem", questions[q]}, {"choices", labeled}}}, {"answerKey", key}});
    published_arc += line({{"question", questions[q]},
                           {"choices", {{"text", choices[q]}, {"label", labels}}},
                           {"answerKey", key}});
  }
  CHECK(right < questions.size());  // shows that lengths matter
  for (const auto& [text, expected] : {std::pair(generic, right),
                                       {hellaswag, right},
                                       {arc, right_arc},
                                       {published_arc, right_arc}}) {
    const auto result = evaluated({"--choices", dir.write("q.jsonl", text)});
    CHECK(result["questions"] == 2);
    CHECK(result["acc"] == 1.0);
    CHECK(result["acc_norm"].get<double>() * 2 == doctest::Approx(expected));
    CHECK(result["acc_norm"] == result["acc_bytes"]);
  }
  for (const char* bad : {"{}", R"({"context":"a","choices":["b","c"],"answer":2})",
                          R"({"context":"a","choices":["b","c"],"answer":"x"})",
                          R"({"context":"a","choices":["b",""],"answer":0})", "{"})
    CHECK(run_to(3, {"eval", SmallModel::get().run, "--choices", dir.write("bad.jsonl", bad)})
              .err.find("bad.jsonl:1") != std::string::npos);
}
