#include "tools/tessera/train/load_state.h"

#include <chrono>
#include <mutex>
#include <nlohmann/json.hpp>

#include "io/hf/gpt2.h"
#include "io/source/names.h"
#include "tools/tessera/train/checkpoints.h"

namespace tessera::tools {
namespace {

using Piece = comm::ShardedModel::Piece;

constexpr const char* kRandom = "random initial values";
constexpr const char* kZeros = "zero moments";

io::ReadPart part_of(const io::TensorSource& source, const Piece& piece, const Tensor& into,
                     std::mutex& copying) {
  io::ReadPart part{&source, piece.parameter->name, piece.begin, piece.end, into.dtype()};
  if (into.device().type == DeviceType::CPU) {
    part.data = into.view().data;
  } else {
    part.sink = [&copying, into, begin = piece.begin](std::int64_t at, const void* values,
                                                      std::int64_t n) {
      const Tensor window = into.alias({n}, {1}, at - begin);
      const std::lock_guard lock(copying);  // the device has one staging buffer
      window.copy_from_host(values);
    };
  }
  return part;
}

void start_randomly(const Piece& piece, std::uint64_t seed) {
  fill_from_host(piece.master, [&](std::int64_t begin, std::int64_t end, float* out) {
    initialize_range(*piece.parameter, seed, piece.begin + begin, piece.begin + end, out);
  });
}

bool holds(const LoadPlan& plan, io::Section section, const std::string& name) {
  const auto found = plan.tensors.find(section);
  return found != plan.tensors.end() && found->second.contains(name);
}

io::ReadReport load_sections(comm::ShardedModel& sharded,
                             const std::function<const io::TensorSource&(io::Section)>& source,
                             const LoadPlan& plan, int threads, std::uint64_t seed) {
  std::vector<io::ReadPart> parts;
  std::mutex copying;
  for (const Piece& piece : sharded.held_pieces()) {
    const auto add = [&](io::Section section, const Tensor& into) {
      const bool wanted = holds(plan, section, piece.parameter->name);
      if (wanted) parts.push_back(part_of(source(section), piece, into, copying));
      return wanted;
    };
    if (!add(io::Section::Model, piece.master)) start_randomly(piece, seed);
    if (!piece.exp_avg.defined()) continue;
    add(io::Section::ExpAvg, piece.exp_avg);
    add(io::Section::ExpAvgSq, piece.exp_avg_sq);
  }
  const io::ReadReport report = io::read_parts(parts, {.threads = threads});
  sharded.values_changed();
  return report;
}

}  // namespace

LoadPlan plan_resume(const io::CheckpointReader& reader, const models::Gpt2Config& model,
                     io::LoadPolicy policy) {
  const std::vector<io::TensorInfo> expected = io::gpt2_tensors(model_section(model));
  LoadPlan plan;
  for (const io::Section section : io::kSections) {
    const bool is_model = section == io::Section::Model;
    if (policy == io::LoadPolicy::Partial && !is_model && !reader.has(section)) {
      if (section == io::Section::ExpAvg) {
        plan.notes.push_back(
            fmt::format("note: {} holds no optimizer state: training continues with {}",
                        reader.path().string(), kZeros));
      }
      continue;
    }
    const auto comparison = io::compare_tensors(expected, reader.source(section).tensors());
    const std::string where =
        fmt::format("{}, section {}", reader.path().string(), io::section_name(section));
    for (std::string& note :
         io::apply_policy(comparison, policy, where, is_model ? kRandom : kZeros)) {
      plan.notes.push_back(std::move(note));
    }
    plan.tensors[section] = comparison.usable;
  }
  return plan;
}

LoadPlan plan_weights(const io::ModelSource& source, const models::Gpt2Config& model,
                      io::LoadPolicy policy, const std::vector<std::string>& chosen) {
  std::vector<io::TensorInfo> expected = io::gpt2_tensors(model_section(model));
  std::vector<io::TensorInfo> found = source.tensors();
  LoadPlan plan;
  if (!chosen.empty()) {
    std::vector<std::string> names;
    for (const auto* tensors : {&expected, &found}) {
      for (const io::TensorInfo& tensor : *tensors) names.push_back(tensor.name);
    }
    io::check_patterns(chosen, names, "checkpoint.load_tensors", source.path().string());
    const auto is_left = [&](const io::TensorInfo& tensor) {
      return !io::is_chosen(chosen, tensor.name);
    };
    const auto left = std::erase_if(expected, is_left);
    std::erase_if(found, is_left);
    if (left > 0) {
      plan.notes.push_back(
          fmt::format("note: {} of {} tensors {} not chosen by "
                      "checkpoint.load_tensors: {}",
                      left, left + expected.size(), left == 1 ? "is" : "are", kRandom));
    }
  }
  const auto comparison = io::compare_tensors(expected, found);
  for (std::string& note : io::apply_policy(comparison, policy, source.path().string(), kRandom)) {
    plan.notes.push_back(std::move(note));
  }
  plan.tensors[io::Section::Model] = comparison.usable;
  return plan;
}

io::ReadReport load_training_state(comm::ShardedModel& sharded, const io::CheckpointReader& reader,
                                   const LoadPlan& plan, int threads, std::uint64_t seed) {
  sharded.create_optimizer_state();
  return load_sections(
      sharded,
      [&](io::Section section) -> const io::TensorSource& { return reader.source(section); }, plan,
      threads, seed);
}

io::ReadReport load_weights(comm::ShardedModel& sharded, const io::ModelSource& source,
                            const LoadPlan& plan, int threads, std::uint64_t seed) {
  return load_sections(
      sharded, [&](io::Section) -> const io::TensorSource& { return source; }, plan, threads, seed);
}

}  // namespace tessera::tools
