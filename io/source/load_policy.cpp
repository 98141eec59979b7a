#include "io/source/load_policy.h"

#include <algorithm>
#include <map>

#include "core/base/error.h"
#include "io/base/convert.h"

namespace tessera::io {
namespace {

// Maximum number of names listed in a message, which then says how many more there are.
constexpr std::size_t kToldNames = 8;

std::string enumerate(const std::vector<std::string>& items) {
  std::string text;
  for (std::size_t i = 0; i < items.size() && i < kToldNames; ++i) {
    text += (i == 0 ? "" : ", ") + items[i];
  }
  if (items.size() > kToldNames) text += fmt::format(" and {} more", items.size() - kToldNames);
  return text;
}

std::string tensors(std::size_t n) { return n == 1 ? "1 tensor" : fmt::format("{} tensors", n); }

}  // namespace

LoadPolicy parse_load_policy(std::string_view text) {
  if (text == "exact") return LoadPolicy::Exact;
  if (text == "ignore-extra") return LoadPolicy::IgnoreExtra;
  require(text == "partial", "a load policy is exact, ignore-extra or partial, got {}", text);
  return LoadPolicy::Partial;
}

bool TensorComparison::allowed(LoadPolicy policy) const {
  if (policy == LoadPolicy::Partial) return !usable.empty();
  const bool all = missing.empty() && shapes.empty() && dtypes.empty();
  return all && (policy == LoadPolicy::IgnoreExtra || unexpected.empty());
}

std::string TensorComparison::str(std::size_t most) const {
  std::string text;
  const auto add = [&](const char* kind, const std::vector<std::string>& items) {
    for (std::size_t i = 0; i < std::min(items.size(), most); ++i)
      text += fmt::format("\n  {}: {}", kind, items[i]);
    if (items.size() > most) text += fmt::format("\n  {}: {} more", kind, items.size() - most);
  };
  add("missing", missing);
  add("shape", shapes);
  add("dtype", dtypes);
  add("unexpected", unexpected);
  return text;
}

TensorComparison compare_tensors(const std::vector<TensorInfo>& expected,
                                 const std::vector<TensorInfo>& found) {
  TensorComparison result;
  std::map<std::string, const TensorInfo*> left;
  for (const TensorInfo& tensor : found) left[tensor.name] = &tensor;
  for (const TensorInfo& tensor : expected) {
    const auto match = left.find(tensor.name);
    if (match == left.end()) {
      result.missing.push_back(fmt::format("{} {}", tensor.name, tensor.shape));
      continue;
    }
    if (match->second->shape != tensor.shape) {
      result.shapes.push_back(
          fmt::format("{} is {}, expected {}", tensor.name, match->second->shape, tensor.shape));
    } else if (!can_convert(match->second->dtype,
                            is_floating(tensor.dtype) ? DType::F32 : tensor.dtype)) {
      result.dtypes.push_back(
          fmt::format("{} is {}, expected {}", tensor.name, match->second->dtype,
                      is_floating(tensor.dtype) ? "f32, bf16 or f16" : dtype_name(tensor.dtype)));
    } else {
      result.usable.insert(tensor.name);
    }
    left.erase(match);
  }
  for (const auto& [name, tensor] : left) {
    result.unexpected.push_back(fmt::format("{} {}", name, tensor->shape));
  }
  return result;
}

std::vector<std::string> apply_policy(const TensorComparison& comparison, LoadPolicy policy,
                                      const std::string& source, const std::string& start) {
  const auto& [usable, missing, unexpected, shapes, dtypes] = comparison;
  if (!comparison.allowed(policy)) {
    std::string advice = "none of its tensors fits: choose another source";
    if (comparison.allowed(LoadPolicy::IgnoreExtra)) {
      advice = "to skip tensors that the model lacks, use --checkpoint.load_policy ignore-extra";
    } else if (comparison.allowed(LoadPolicy::Partial)) {
      advice = fmt::format(
          "to load the {} that {}, and keep {} for the others, use --checkpoint.load_policy "
          "partial",
          tensors(usable.size()), usable.size() == 1 ? "fits" : "fit", start);
    }
    throw InvalidArgument("the tensors of {} do not match the model; {}:{}", source, advice,
                          comparison.str());
  }
  std::vector<std::string> notes;
  const auto note = [&](const std::vector<std::string>& items, const std::string& one,
                        const std::string& many) {
    if (items.empty()) return;
    notes.push_back(fmt::format("note: {} {}: {}", tensors(items.size()),
                                items.size() == 1 ? one : many, enumerate(items)));
  };
  note(unexpected, fmt::format("of {} is skipped, since the model lacks it", source),
       fmt::format("of {} are skipped, since the model lacks them", source));
  note(missing, fmt::format("is missing in {}, and keeps {}", source, start),
       fmt::format("are missing in {}, and keep {}", source, start));
  note(shapes, fmt::format("of {} does not fit, and keeps {}", source, start),
       fmt::format("of {} do not fit, and keep {}", source, start));
  note(dtypes, fmt::format("of {} has an unsupported dtype, and keeps {}", source, start),
       fmt::format("of {} have unsupported dtypes, and keep {}", source, start));
  return notes;
}

void match_tensors(const std::vector<TensorInfo>& expected, const std::vector<TensorInfo>& found,
                   const std::string& source) {
  const std::string problems = compare_tensors(expected, found).str();
  require(problems.empty(), "the tensors of {} do not match its model configuration:{}", source,
          problems);
}

}  // namespace tessera::io
