#include "io/data/encode_corpus.h"

#include <condition_variable>
#include <map>
#include <mutex>
#include <string_view>
#include <utility>

#include "core/base/error.h"
#include "io/base/parallel.h"
#include "io/data/token_file.h"

namespace tessera::io {
namespace {

/// Encodes batches; for one thread.
class BatchEncoder {
 public:
  explicit BatchEncoder(const TokenizeOptions& options)
      : options_(options), encoder_(options.tokenizer->make_encoder()) {
    if (options.special_tokens) {
      prefix_ = options.tokenizer->prefix();
      suffix_ = options.tokenizer->suffix();
    }
    if (options.end_token >= 0) suffix_.push_back(options.end_token);
  }

  EncodedBatch encode(const CorpusBatch& batch) {
    EncodedBatch out;
    out.consumed = batch.consumed;
    ids_.clear();
    for (const CorpusBatch::Unit& unit : batch.units) {
      const std::size_t before = ids_.size();
      EncodedBatch::Unit& done = out.units.emplace_back();
      done.at = unit.at;
      done.error = unit.missing;
      if (!done.error.empty()) continue;
      try {
        done.is_document = add(batch.text, unit) && !unit.at.inside;
      } catch (const CutInToken&) {
        throw;
      } catch (const Error& error) {
        // Where a text is cut depends on where the process began, so a piece must not be skipped.
        const CorpusFile& file = options_.sources[static_cast<std::size_t>(unit.at.file)];
        if (!options_.skip_bad || !(file.has_lines() || file.has_rows())) throw;
        done.error = error.what();
        ids_.resize(before);
      }
      done.tokens = static_cast<std::int64_t>(ids_.size() - before);
      if (done.tokens > 0) out.text_bytes += static_cast<std::int64_t>(unit.end - unit.begin);
    }
    if (needs_wide_tokens(options_.tokenizer->vocab_size())) {
      out.ids.assign(reinterpret_cast<const char*>(ids_.data()),
                     ids_.size() * sizeof(std::int32_t));
    } else {
      out.ids.resize(ids_.size() * sizeof(std::uint16_t));
      auto* to = reinterpret_cast<std::uint16_t*>(out.ids.data());
      for (const std::int32_t id : ids_) *to++ = static_cast<std::uint16_t>(id);
    }
    return out;
  }

 private:
  /// Appends the ids of a unit. @return whether it has text
  bool add(std::string_view all, const CorpusBatch::Unit& unit) {
    const CorpusFile& file = options_.sources[static_cast<std::size_t>(unit.at.file)];
    std::string_view text = all.substr(unit.begin, unit.end - unit.begin);
    std::string value, name = file.path;
    if (file.has_rows()) name += fmt::format(": row {}", unit.at.line + 1);
    if (file.has_lines()) {
      name += fmt::format(":{}", unit.at.line + 1);
      try {
        text = value = json_text(text, options_.field);
      } catch (const CorruptCheckpoint& error) {
        throw IoError("{}: {}", name, error.what());
      }
    }
    if (text.empty() && !unit.at.inside) return false;
    if (!unit.at.inside) ids_.insert(ids_.end(), prefix_.begin(), prefix_.end());
    if (unit.last) {
      encoder_->encode(text, name, ids_);
      ids_.insert(ids_.end(), suffix_.begin(), suffix_.end());
    } else if (!encoder_->encode_part(all.substr(unit.begin, unit.context - unit.begin),
                                      unit.end - unit.begin, name, ids_)) {
      throw CutInToken(unit.at.file);
    }
    return true;
  }

  const TokenizeOptions& options_;
  std::unique_ptr<Encoder> encoder_;
  std::vector<std::int32_t> prefix_, suffix_, ids_;
};

}  // namespace

void encode_corpus(const TokenizeOptions& options, const FileRange& range,
                   const CorpusPosition& from, const std::function<bool(std::int64_t file)>& cut,
                   const std::function<void(const EncodedBatch&)>& use) {
  constexpr std::int64_t kAheadPerThread = 2;  // batches that may wait for an earlier one
  std::mutex read_mutex, mutex;
  CorpusReader reader(
      options.sources, range, from,
      {.cut = cut, .column = options.field, .skip_damage = options.skip_bad, .warn = options.warn});
  std::int64_t begun = 0;                        // this and the next, guarded by read_mutex
  bool readable = true;                          // false at the end, and after an error
  std::condition_variable changed;               // the next three, guarded by mutex
  std::map<std::int64_t, EncodedBatch> waiting;  // by number
  std::int64_t used = 0;
  bool failed = false;
  const auto work = [&] {
    BatchEncoder encoder(options);
    CorpusBatch batch;
    for (;;) {
      std::int64_t number = 0;
      {
        const std::lock_guard lock(read_mutex);
        if (!std::exchange(readable, false) || !reader.next(batch)) return;
        readable = true;
        number = begun++;
      }
      EncodedBatch encoded = encoder.encode(batch);
      std::unique_lock lock(mutex);
      waiting.emplace(number, std::move(encoded));
      for (auto next = waiting.find(used); !failed && next != waiting.end();
           next = waiting.find(used)) {
        try {
          use(next->second);
        } catch (...) {
          failed = true;  // before another thread uses the batch again
          throw;
        }
        waiting.erase(next);
        ++used;
        changed.notify_all();
      }
      changed.wait(lock,
                   [&] { return failed || number < used + kAheadPerThread * options.threads; });
      if (failed) return;
    }
  };
  parallel_for_each(static_cast<std::size_t>(options.threads), options.threads, [&](std::size_t) {
    try {
      work();
    } catch (...) {
      const std::lock_guard lock(mutex);
      failed = true;
      changed.notify_all();
      throw;
    }
  });
}

}  // namespace tessera::io
