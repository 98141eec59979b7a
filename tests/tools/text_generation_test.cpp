#include "tools/tessera/model/text_generation.h"

#include <doctest/doctest.h>

#include "core/base/error.h"
#include "io/data/tokenizer.h"
#include "models/decoder.h"
#include "tests/support/check_throws.h"
#include "tests/support/paths.h"

using namespace tessera;
using namespace tessera::tools;

namespace {

constexpr std::int64_t kPositions = 16;
constexpr std::int32_t kVocabulary = 31;

struct Fixture {
  models::Decoder model{
      {.n_layer = 2, .n_head = 3, .n_embd = 24, .vocab_size = kVocabulary, .seq_len = kPositions}};
  std::shared_ptr<Context> context = Context::create({.threads = 1});

  // Weights larger than initial ones, so that each token depends on all others.
  Fixture() {
    materialize(model, context, DType::F32,
                [](const Parameter& p, std::int64_t begin, std::int64_t end, float* out) {
                  initialize_range(p, 5, begin, end, out);
                  const bool norm = p.name.find("ln_") != std::string::npos;
                  for (std::int64_t i = begin; i < end && !norm; ++i) out[i - begin] *= 10;
                });
  }
  Tokens run(const Tokens& prompt, std::int64_t count,
             const std::function<void(std::int32_t)>& on_token = {}) {
    return generate(model, context, {prompt},
                    {.count = count,
                     .sampling = {.temperature = 0},
                     .on_token = [&](std::size_t, std::int32_t token, const Tensor&) {
                       if (on_token) on_token(token);
                       return true;
                     }})[0];
  }
};

Tokens make_tokens(std::size_t count, std::uint32_t seed) {
  Tokens tokens(count);
  for (auto& token : tokens) {
    seed = seed * 1664525 + 1013904223;
    token = static_cast<std::int32_t>((seed >> 16) % kVocabulary);
  }
  return tokens;
}

Tokens last(const Tokens& tokens, std::size_t count) {
  return {tokens.end() - static_cast<std::ptrdiff_t>(count), tokens.end()};
}

}  // namespace

TEST_CASE_FIXTURE(Fixture,
                  "each new token is reported once, and longer texts start like shorter ones") {
  const Tokens prompt = make_tokens(5, 1);
  Tokens told;
  const Tokens all = run(prompt, 11, [&](std::int32_t token) { told.push_back(token); });
  CHECK(all.size() == 11);
  CHECK(told == all);
  CHECK(run(prompt, 4) == Tokens(all.begin(), all.begin() + 4));
  CHECK(run(prompt, 0).empty());
  CHECK_THROWS_HOLDING(InvalidArgument, "the prompt is empty", run({}, 1));
  CHECK_THROWS_AS(run({kVocabulary}, 1), InvalidArgument);
}

TEST_CASE_FIXTURE(Fixture, "a prompt beyond the context is read from its end, then by half") {
  int half_differs = 0;
  for (std::uint32_t seed = 0; seed < 20; ++seed) {
    for (const std::size_t length : {16, 17, 40}) {
      CAPTURE(seed);
      CAPTURE(length);
      Tokens text = make_tokens(length, seed);
      const Tokens made = run(text, 3);
      REQUIRE(made.size() == 3);
      CHECK(made[0] == run(last(text, 16), 1)[0]);
      half_differs += made[0] != run(last(text, 8), 1)[0] ? 1 : 0;
      text.push_back(made[0]);
      CHECK(made[1] == run(last(text, 8), 1)[0]);
      text.push_back(made[1]);
      CHECK(made[2] == run(last(text, 9), 1)[0]);
    }
  }
  CHECK(half_differs > 20);  // of 60: shows that the lengths differ in effect
}

TEST_CASE_FIXTURE(Fixture, "samples of a batch are those of single rows, and end one by one") {
  const Tokens prompt = make_tokens(5, 1);
  GenerationOptions options{.count = 8,
                            .sampling = {.repetition_penalty = 1.3},
                            .key = RngKey::make(1, RngPurpose::Sampling, 0)};
  const std::vector<Tokens> all = generate(model, context, {prompt, prompt, prompt}, options);
  CHECK(all[0] != all[1]);
  CHECK(all[1] != all[2]);
  for (std::size_t row = 0; row < 3; ++row) {
    options.first_sample = row;
    CHECK(generate(model, context, {prompt}, options)[0] == all[row]);
  }
  options.first_sample = 0;
  options.on_token = [&](std::size_t row, std::int32_t token, const Tensor& logits) {
    CHECK(logits.to_vector<float>().size() == kVocabulary);
    return row != 1 || token != all[1][2];
  };
  const std::vector<Tokens> cut = generate(model, context, {prompt, prompt, prompt}, options);
  CHECK(cut[0] == all[0]);
  CHECK(cut[1].size() <= 3);
  CHECK(cut[2] == all[2]);
  CHECK_THROWS_HOLDING(InvalidArgument, "equal lengths, got 5 and 1",
                       generate(model, context, {prompt, {1}}, options));
}

TEST_CASE("text ends before the first stop string, whatever the chunks") {
  const std::string text = "one, two, three\n\nfour";
  struct Case {
    std::vector<std::string> stops;
    const char* expected;
  };
  for (const Case& c : {Case{{}, "one, two, three\n\nfour"},
                        {{"\n\n"}, "one, two, three"},
                        {{"three\nx", ", t"}, "one"},
                        {{"one"}, ""},
                        {{"four!", "fours"}, "one, two, three\n\nfour"},
                        {{"two, thrice", "wo"}, "one, t"}}) {
    for (std::size_t step = 1; step <= text.size(); ++step) {
      CAPTURE(step);
      StopText cut(c.stops);
      std::string shown;
      for (std::size_t at = 0; at < text.size(); at += step)
        shown += cut.add(text.substr(at, step));
      const bool stopped = cut.stopped();
      CHECK(shown + cut.rest() == c.expected);
      CHECK(stopped == (c.expected != text));
    }
  }
  CHECK_THROWS_AS(StopText({""}), InvalidArgument);
}

TEST_CASE("unprintable bytes become the replacement character") {
  const std::string r = "\uFFFD";
  CHECK(printable("a\tb\n\u00e9\u20ac\U0001F600") == "a\tb\n\u00e9\u20ac\U0001F600");
  CHECK(printable("a\r\nb") == "a\r\nb");
  CHECK(printable("a\rb\r") == "a" + r + "b" + r);
  CHECK(printable("\x1b[1m\x7f") == r + "[1m" + r);
  CHECK(printable("\xff\xc3") == r + r);
  CHECK(printable("\xed\xa0\x80") == r + r + r);  // a surrogate
  CHECK(printable("") == "");
}

TEST_CASE("text that is not for a terminal keeps control characters") {
  std::string pending = "a\r\x1b\xff\xe2\x82";
  CHECK(take_characters(pending) == "a\r\x1b\uFFFD");
  CHECK(pending == "\xe2\x82");
}

TEST_CASE("streamed text is the text of all ids") {
  const auto tokenizer =
      io::load_tokenizer(test::source_path("tests/io/tokenizer/fixtures/llama2.json"));
  const std::string text = "Hello  world, \u6211 d\u00e9j\u00e0";
  TextStream stream(*tokenizer);
  std::string streamed;
  for (const std::int32_t id : tokenizer->encode(text)) streamed += stream.next({&id, 1});
  CHECK(streamed == text);
}

TEST_CASE("streamed text is shown in whole characters, whatever the chunks") {
  const std::string text = "a\u00e9\u20ac\U0001F600\U0001F600\r\n\u20acz\xf0\x9f\xffq\xe0\x80!";
  for (std::size_t step = 1; step <= text.size(); ++step) {
    CAPTURE(step);
    std::string pending, shown;
    for (std::size_t at = 0; at < text.size(); at += step) {
      pending += text.substr(at, step);
      shown += take_printable(pending);
      CHECK(pending.size() <= 3);
    }
    CHECK(pending.empty());
    CHECK(shown == printable(text));
  }
  for (const auto& [piece, kept] : {std::pair("a\r", 1U),
                                    {"a\xe2\x82", 2U},
                                    {"\xff", 0U},
                                    {"\xf0\x9f\x98", 3U},
                                    {"\xe0\x80", 0U}}) {
    std::string pending = piece;
    take_printable(pending);
    CHECK(pending.size() == kept);
  }
}
