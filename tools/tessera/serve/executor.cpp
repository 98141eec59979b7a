#include "tools/tessera/serve/executor.h"

#include <algorithm>

#include "io/tokenizer/unicode.h"

namespace tessera::tools {
namespace {

std::int64_t count_starts(std::string_view text) {
  return std::ranges::count_if(text, [](char c) { return (c & 0xC0) != 0x80; });
}

}  // namespace

/// A choice's text as its tokens come.
class Executor::Choice {
 public:
  Choice(Job& job, std::size_t number, const LoadedModel& loaded)
      : job_(job),
        loaded_(loaded),
        number_(number),
        stream_(*loaded.tokenizer),
        cut_(job.request().stop) {}

  const ServePrompt& prompt() const {
    return job_.request().prompts[number_ / job_.request().choices];
  }

  /// @param scores  of all tokens but the first; empty without log-probabilities
  void begin(const std::vector<TokenScore>& scores) {
    const Tokens& tokens = prompt().tokens;
    if (!job_.request().echo) {
      stream_.next(std::span(tokens).subspan(prompt().hidden));
      return;
    }
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const bool hidden = i < prompt().hidden;
      const std::string text =
          hidden ? text_of(*loaded_.tokenizer, {&tokens[i], 1}) : stream_.next({&tokens[i], 1});
      if (job_.request().top_logprobs)
        record(tokens[i], text, i == 0 ? std::nullopt : std::optional<TokenScore>(scores[i - 1]));
      if (!hidden) append(text, text);
    }
    push(take_characters(pending_));
  }

  /// @return whether the choice goes on
  bool add(std::int32_t token, const Tensor& logits) {
    ++generated_;
    if (loaded_.ends_text(token, job_.request().generation.ends)) {
      finish_reason_ = "stop";
      return false;
    }
    const std::string text = stream_.next({&token, 1});
    if (const auto top = job_.request().top_logprobs)
      record(token, text, score_rows(logits, {token}, *top)[0]);
    append(text, cut_.add(text));
    if (cut_.stopped()) {
      finish_reason_ = "stop";
      return false;
    }
    push(take_characters(pending_));
    return true;
  }

  void end() {
    if (finish_reason_ == nullptr) finish_reason_ = "length";
    pending_ += cut_.rest();
    push(io::replace_malformed_utf8(std::exchange(pending_, {})));
  }

 private:
  void record(std::int32_t token, const std::string& text, std::optional<TokenScore> score) {
    records_.push_back({token, text, characters_, std::move(score)});
  }

  /// @param certain  what is not held back, of this text and the texts before
  void append(const std::string& text, const std::string& certain) {
    characters_ += count_starts(text);
    pending_ += certain;
  }

  void push(std::string text) {
    shown_ += count_starts(text);
    CompletionPart part{.choice = number_, .text = std::move(text), .generated = generated_};
    part.finish_reason = finish_reason_;
    // Tokens of text that is held back wait for it; those after a stop string are dropped.
    const auto held = std::ranges::find_if(
        records_, [&](const TokenRecord& record) { return record.offset >= shown_; });
    const bool all = finish_reason_ != nullptr && !cut_.stopped();
    const auto end = all ? records_.end() : held;
    part.tokens.assign(std::make_move_iterator(records_.begin()), std::make_move_iterator(end));
    records_.erase(records_.begin(), end);
    if (!part.text.empty() || !part.tokens.empty() || part.finish_reason != nullptr)
      job_.push(std::move(part));
  }

  Job& job_;
  const LoadedModel& loaded_;
  const std::size_t number_;
  TextStream stream_;
  StopText cut_;
  std::string pending_;
  std::vector<TokenRecord> records_;
  std::int64_t characters_ = 0, shown_ = 0, generated_ = 0;
  const char* finish_reason_ = nullptr;
};

Executor::Executor(LoadedModel& loaded, std::int64_t batch)
    : loaded_(loaded), batch_(batch), thread_([this] { run_jobs(); }) {}

void Executor::submit(std::shared_ptr<Job> job) {
  const std::lock_guard lock(mutex_);
  if (stopping_) {
    job->close(std::make_exception_ptr(ServerStopping("the server is stopping")));
    return;
  }
  waiting_.push_back(std::move(job));
  changed_.notify_one();
}

void Executor::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

bool Executor::goes_on(const Job& job) const {
  if (job.cancelled()) return false;
  const std::lock_guard lock(mutex_);
  return !stopping_;
}

void Executor::run_jobs() {
  for (;;) {
    std::shared_ptr<Job> job;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stopping_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      job = std::move(waiting_.front());
      waiting_.pop_front();
    }
    try {
      if (goes_on(*job)) run(*job);
      const bool complete = goes_on(*job);
      job->close(complete ? nullptr
                          : std::make_exception_ptr(ServerStopping("the server is stopping")));
    } catch (...) {
      job->close(std::current_exception());
    }
  }
}

void Executor::run(Job& job) {
  const CompletionRequest& request = job.request();
  std::vector<Choice> choices;
  for (std::size_t i = 0; i < request.prompts.size() * request.choices; ++i)
    choices.emplace_back(job, i, loaded_);
  const auto keep_going = [&] { return goes_on(job); };

  std::vector<std::vector<TokenScore>> scores(request.prompts.size());
  std::vector<Tensor> next(request.prompts.size());  // logits after the prompts
  const bool scores_prompts = request.echo && request.top_logprobs;
  if (scores_prompts) {
    std::vector<ScoredText> texts;
    for (const ServePrompt& prompt : request.prompts) texts.push_back({prompt.tokens, 1});
    ScoreOptions options{.batch = batch_, .top = *request.top_logprobs, .keep_going = keep_going};
    // One token after each prompt needs no other pass.
    if (request.generation.count == 1)
      options.on_next = [&](std::size_t prompt, const Tensor& logits) {
        next[prompt] = Tensor::from<float>(loaded_.context, logits.shape(),
                                           std::span<const float>(logits.to_vector<float>()));
      };
    scores = score(*loaded_.model, loaded_.context, texts, options);
    if (!keep_going()) return;
  }
  for (std::size_t i = 0; i < choices.size(); ++i) choices[i].begin(scores[i / request.choices]);

  for (std::size_t first = 0, end = 0; first < choices.size() && keep_going(); first = end) {
    // Prompts of equal lengths are decoded together.
    std::vector<Tokens> prompts;
    for (; end < choices.size() && std::ssize(prompts) < batch_; ++end) {
      const Tokens& tokens = choices[end].prompt().tokens;
      if (!prompts.empty() && tokens.size() != prompts[0].size()) break;
      prompts.push_back(tokens);
    }
    GenerationOptions generation = request.generation;
    generation.first_sample = first;
    generation.on_token = [&](std::size_t row, std::int32_t token, const Tensor& logits) {
      return keep_going() && choices[first + row].add(token, logits);
    };
    for (std::size_t i = first; i < end; ++i)
      generation.first_logits.push_back(next[i / request.choices]);
    generate(*loaded_.model, loaded_.context, prompts, generation);
    for (std::size_t i = first; i < end && keep_going(); ++i) choices[i].end();
  }
}

}  // namespace tessera::tools
