#include "train/load_state.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <nlohmann/json.hpp>

#include "io/source/names.h"

namespace tessera::train {
namespace {

using Piece = comm::ShardedModel::Piece;

constexpr const char* kRandom = "random initial values";
constexpr const char* kZeros = "zero moments";
constexpr const char* kWeights = "the weights as they are now";

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

bool holds(const LoadPlan& plan, const io::Section& section, const std::string& name) {
  const auto found = plan.tensors.find(section);
  return found != plan.tensors.end() && found->second.contains(name);
}

// Rows of a matrix that its source lacks: the mean of those that it has.
void fill_new_rows(const io::TensorSource& source, const Piece& piece, const Tensor& into,
                   std::int64_t rows) {
  constexpr std::int64_t kRows = 256;
  const std::int64_t width = piece.parameter->tensor.dim(1);
  std::vector<double> sums(static_cast<std::size_t>(width));
  std::vector<float> block(static_cast<std::size_t>(kRows * width));
  for (std::int64_t row = 0; row < rows; row += kRows) {
    const std::int64_t count = std::min(kRows, rows - row) * width;
    source.read(piece.parameter->name, row * width, row * width + count, block.data(), DType::F32);
    for (std::int64_t i = 0; i < count; ++i)
      sums[static_cast<std::size_t>(i % width)] +=
          static_cast<double>(block[static_cast<std::size_t>(i)]);
  }
  const std::int64_t first = std::max(piece.begin, rows * width);
  fill_from_host(into.alias({piece.end - first}, {1}, first - piece.begin),
                 [&](std::int64_t begin, std::int64_t end, float* out) {
                   for (std::int64_t i = begin; i < end; ++i)
                     out[i - begin] =
                         static_cast<float>(sums[static_cast<std::size_t>((first + i) % width)] /
                                            static_cast<double>(rows));
                 });
}

io::ReadReport load_sections(
    comm::ShardedModel& sharded,
    const std::function<const io::TensorSource&(const io::Section&)>& source, const LoadPlan& plan,
    int threads, std::uint64_t seed, const io::TensorSource* base) {
  std::vector<io::ReadPart> parts;
  std::vector<std::pair<const Piece*, std::size_t>> starting;
  std::mutex copying;
  const std::vector<Piece> pieces = sharded.held_pieces();
  for (const Piece& piece : pieces) {
    const auto read = [&](const io::TensorSource& from, const Tensor& into) {
      Piece stored = piece;
      if (const auto old = plan.resized.find(piece.parameter->name); old != plan.resized.end()) {
        const std::int64_t elements = old->second * piece.parameter->tensor.dim(1);
        if (piece.end > elements) fill_new_rows(from, piece, into, old->second);
        stored.end = std::min(piece.end, elements);
      }
      if (stored.begin < stored.end) parts.push_back(part_of(from, stored, into, copying));
    };
    if (base != nullptr && plan.base.contains(piece.parameter->name))
      read(*base, piece.master);
    else if (holds(plan, io::kModelSection, piece.parameter->name))
      read(source(io::kModelSection), piece.master);
    else
      start_randomly(piece, seed);
    for (std::size_t i = 0; i < piece.state.size(); ++i) {
      const Piece::State& state = piece.state[i];
      const io::Section section{sharded.state_names()[i]};
      if (!state.values.defined()) continue;
      if (!holds(plan, section, piece.parameter->name)) {
        starting.emplace_back(&piece, i);
        continue;
      }
      Piece stored = piece;
      stored.begin = state.begin;
      stored.end = state.end;
      parts.push_back(part_of(source(section), stored, state.values, copying));
    }
  }
  const io::ReadReport report = io::read_parts(parts, {.threads = threads});
  for (const auto& [piece, state] : starting) piece->start_state(state);
  sharded.values_changed();
  return report;
}

}  // namespace

std::vector<io::TensorInfo> tensors_of(const nn::Module& model, bool trainable_only) {
  std::vector<io::TensorInfo> tensors;
  for (const Parameter* p : model.parameters())
    if (!trainable_only || p->tensor.requires_grad())
      tensors.push_back({p->name, p->tensor.shape(), p->tensor.dtype()});
  return tensors;
}

StateTensors state_tensors(const nn::Module& model, const optim::Optimizer& optimizer) {
  Unit trainable;
  for (Parameter* p : model.parameters())
    if (p->tensor.requires_grad()) trainable.parameters.push_back(p);
  const ShardLayout layout = layout_of(trainable, 1);
  StateTensors states;
  for (std::string& name : optimizer.state_names()) {
    std::vector<io::TensorInfo> tensors;
    for (const ParameterSlot& slot : layout.slots())
      if (optimizer.has_state(states.size(), slot))
        tensors.push_back({slot.name, optimizer.state_shape(states.size(), slot.shape),
                           optimizer.state_kind(states.size()).dtype});
    states.push_back(
        {std::move(name), optimizer.state_kind(states.size()).starts_as_param, std::move(tensors)});
  }
  return states;
}

LoadPlan plan_resume(const io::CheckpointReader& reader,
                     const std::vector<io::TensorInfo>& expected, const StateTensors& states,
                     io::LoadPolicy policy) {
  LoadPlan plan;
  struct Wanted {
    io::Section section;
    const std::vector<io::TensorInfo>* tensors;
    const char* otherwise;
  };
  std::vector<Wanted> sections{{io::kModelSection, &expected, kRandom}};
  const bool any_state = reader.index().optimizer && !reader.index().optimizer->state.empty();
  if (any_state || policy != io::LoadPolicy::Partial) {
    for (const auto& [state, starts_as_param, tensors] : states) {
      if (any_state && starts_as_param && !reader.has({state}))
        plan.notes.push_back(fmt::format("note: {} holds no {}, which starts as {}",
                                         reader.path().string(), state, kWeights));
      else
        sections.push_back({{state}, &tensors, starts_as_param ? kWeights : kZeros});
    }
  } else if (!states.empty()) {
    plan.notes.push_back(
        fmt::format("note: {} holds no optimizer state: training continues with {}",
                    reader.path().string(), kZeros));
  }
  for (const auto& [section, tensors, otherwise] : sections) {
    // A state that no trained weight has is not stored.
    if (!section.is_model() && tensors->empty() && reader.index().tensors(section) == nullptr)
      continue;
    const auto comparison = io::compare_tensors(*tensors, reader.source(section).tensors());
    const std::string where = fmt::format("{}, section {}", reader.path().string(), section.name());
    for (std::string& note : io::apply_policy(comparison, policy, where, otherwise)) {
      plan.notes.push_back(std::move(note));
    }
    plan.tensors[section] = comparison.usable;
  }
  for (const io::Section& section : reader.index().tensor_sections())
    if (!states.empty() && !section.is_model() &&
        std::ranges::find(states, section.state, &StateTensorsOf::state) == states.end())
      plan.notes.push_back(fmt::format("note: {} of {} is dropped: the optimizer has no such state",
                                       section.state, reader.path().string()));
  return plan;
}

LoadPlan plan_weights(const io::ModelSource& source, std::vector<io::TensorInfo> expected,
                      io::LoadPolicy policy, const std::vector<std::string>& chosen,
                      const std::vector<std::string>& resizable) {
  std::vector<io::TensorInfo> found = source.tensors();
  LoadPlan plan;
  for (io::TensorInfo& theirs : found) {
    const auto ours = std::ranges::find(expected, theirs.name, &io::TensorInfo::name);
    const bool resizes = ours != expected.end() &&
                         std::ranges::find(resizable, theirs.name) != resizable.end() &&
                         ours->shape.size() == 2 && theirs.shape.size() == 2 &&
                         ours->shape[1] == theirs.shape[1] && ours->shape != theirs.shape;
    if (!resizes) continue;
    plan.resized[theirs.name] = theirs.shape[0];
    theirs.shape = ours->shape;
  }
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
  plan.tensors[io::kModelSection] = comparison.usable;
  return plan;
}

io::ReadReport load_training_state(comm::ShardedModel& sharded, const optim::Optimizer& optimizer,
                                   const io::CheckpointReader& reader, const LoadPlan& plan,
                                   int threads, std::uint64_t seed, const io::TensorSource* base) {
  sharded.create_optimizer_state(optimizer);
  return load_sections(
      sharded,
      [&](const io::Section& section) -> const io::TensorSource& { return reader.source(section); },
      plan, threads, seed, base);
}

io::ReadReport load_weights(comm::ShardedModel& sharded, const io::TensorSource& source,
                            const LoadPlan& plan, int threads, std::uint64_t seed,
                            const io::TensorSource* base) {
  return load_sections(
      sharded, [&](const io::Section&) -> const io::TensorSource& { return source; }, plan, threads,
      seed, base);
}

}  // namespace tessera::train
