#include "io/checkpoint/diff.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "core/base/error.h"
#include "io/base/json.h"

namespace tessera::io {
namespace {

class Comparison {
 public:
  Comparison(const CheckpointReader& a, const CheckpointReader& b, const DiffOptions& options)
      : a_(a), b_(b), options_(options) {}

  DiffReport run() {
    compare_settings();
    if (options_.model) match(kModelSection);
    if (options_.optimizer) {
      std::set<Section> states;
      for (const CheckpointReader* reader : {&a_, &b_})
        for (Section& section : reader->states()) states.insert(std::move(section));
      for (const Section& section : states) match(section);
    }
    add_pairs(report_, pairs_, options_);
    return std::move(report_);
  }

 private:
  void compare_settings() {
    const Json a = Json::parse(a_.index().model_config), b = Json::parse(b_.index().model_config);
    const auto text = [](const Json& json, const std::string& key) {
      const auto found = json.find(key);
      return found == json.end() ? std::string() : found->dump();
    };
    Json keys = a;
    keys.update(b);
    for (const auto& [key, unused] : keys.items()) {
      if (text(a, key) == text(b, key)) continue;
      report_.settings.push_back({key, text(a, key), text(b, key)});
    }
  }

  void match(const Section& section) {
    // A state tensor of another optimizer is absent as a whole.
    static const TensorMap kNone;
    const auto tensors_of = [&](const CheckpointReader& reader) -> const TensorMap& {
      return section.is_model() || reader.has(section) ? reader.tensors(section) : kNone;
    };
    const TensorMap &a = tensors_of(a_), &b = tensors_of(b_);
    const auto note = [&](const std::string& name, TensorDifference::Kind kind,
                          const TensorRecord* x, const TensorRecord* y) {
      TensorDifference difference;
      difference.name = fmt::format("{}/{}", section.name(), name);
      difference.kind = kind;
      if (x) difference.dtype_a = x->dtype, difference.shape_a = x->shape;
      if (y) difference.dtype_b = y->dtype, difference.shape_b = y->shape;
      return difference;
    };
    using Kind = TensorDifference::Kind;
    for (const auto& [name, record] : b) {
      if (!a.contains(name)) {
        report_.differences.push_back(note(name, Kind::OnlyInB, nullptr, &record));
      }
    }
    for (const auto& [name, record] : a) {
      const auto other = b.find(name);
      if (other == b.end()) {
        report_.differences.push_back(note(name, Kind::OnlyInA, &record, nullptr));
        continue;
      }
      ++report_.compared;
      if (record.shape != other->second.shape) {
        report_.differences.push_back(note(name, Kind::Shape, &record, &other->second));
        continue;
      }
      const bool same_dtype = record.dtype == other->second.dtype;
      const auto crc = tensor_checksum(record);
      if (same_dtype && crc && crc == tensor_checksum(other->second)) continue;
      ComparedPair pair{
          {&a_.source(section), name},
          {&b_.source(section), name},
          note(name, same_dtype ? Kind::Values : Kind::Dtype, &record, &other->second)};
      pair.difference.elements = numel(record.shape);
      pairs_.push_back(std::move(pair));
    }
  }

  const CheckpointReader &a_, &b_;
  const DiffOptions& options_;
  DiffReport report_;
  std::vector<ComparedPair> pairs_;
};

}  // namespace

void add_pairs(DiffReport& report, std::vector<ComparedPair>& pairs, const DiffOptions& options) {
  report.bytes_read = compare_pairs(pairs, options);
  for (const auto& [a, b, difference] : pairs) {
    if (options.rounded && difference.is_rounding())
      ++report.rounded;
    else if (difference.kind == TensorDifference::Kind::Dtype || difference.count > 0)
      report.differences.push_back(difference);
  }
  // Sorts by section too, because "model/..." precedes "optimizer/...".
  std::ranges::stable_sort(report.differences, {}, &TensorDifference::name);
}

DiffReport diff_checkpoints(const CheckpointReader& a, const CheckpointReader& b,
                            const DiffOptions& options) {
  return Comparison(a, b, options).run();
}

}  // namespace tessera::io
