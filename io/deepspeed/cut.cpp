#include <algorithm>
#include <charconv>
#include <map>
#include <set>
#include <sstream>

#include "core/base/error.h"
#include "io/deepspeed/states.h"
#include "io/pump/box.h"

namespace tessera::io {
namespace {

/// One rank's part of a flat buffer, or a tensor of one dim.
struct FlatPiece {
  std::uint32_t file = 0;
  std::int64_t begin = 0, n = 0;  ///< elements in the buffer
  std::shared_ptr<const TorchTensor> values;
  std::map<std::string, std::shared_ptr<const TorchTensor>, std::less<>> moments{};
};

/// A flat buffer that consists of pieces.
class FlatBuffer {
 public:
  std::int64_t size() const { return size_; }

  void append(std::uint32_t file, const DeepSpeedPart& part, const std::string& where) {
    FlatPiece piece{file, size_, part.values.shape[0], share(part.values)};
    for (const auto& [kind, tensor] : part.moments) piece.moments[kind] = share(tensor);
    require<CorruptCheckpoint>(!__builtin_add_overflow(size_, piece.n, &size_),
                               "{}: more than 2^63 elements", where);
    pieces_.push_back(std::move(piece));
  }

  /// Adds elements [from, from + n) to a tensor and to its moments, as elements from `to`.
  /// @param tensors  weight and moments; created by the first call for them
  /// @param moments  whether moments get the elements too
  void cut(std::int64_t from, std::int64_t n, std::int64_t to,
           std::map<std::string, DeepSpeedTensor>& tensors, bool moments,
           const std::string& where) const {
    auto piece = std::ranges::upper_bound(pieces_, from, {},
                                          [](const FlatPiece& p) { return p.begin + p.n; });
    for (const std::int64_t end = from + n; from < end; ++piece) {
      require<CorruptCheckpoint>(piece != pieces_.end(), "{}: the flat buffer ends at {} of {}",
                                 where, size_, end);
      const std::int64_t count = std::min(end, piece->begin + piece->n) - from;
      if (count == 0) continue;
      if (tensors.empty()) {
        tensors[""];
        for (const auto& [kind, stored] : piece->moments) tensors[kind];
      }
      for (auto& [kind, tensor] : tensors) {
        const auto found = piece->moments.find(kind);
        require<CorruptCheckpoint>(kind.empty() || found != piece->moments.end(),
                                   "{}: its {} is missing on another rank", where, kind);
        if (kind.empty() || moments)
          add(tensor, *piece, kind.empty() ? piece->values : found->second, from, count, to, where);
      }
      from += count;
      to += count;
    }
  }

 private:
  static std::shared_ptr<const TorchTensor> share(const TorchTensor& tensor) {
    return std::make_shared<const TorchTensor>(tensor);
  }
  static void add(DeepSpeedTensor& tensor, const FlatPiece& piece,
                  const std::shared_ptr<const TorchTensor>& stored, std::int64_t from,
                  std::int64_t n, std::int64_t to, const std::string& where) {
    if (tensor.dtype.empty()) tensor.dtype = stored->dtype;
    require<CorruptCheckpoint>(tensor.dtype == stored->dtype, "{} is {}, and {} on another rank",
                               where, tensor.dtype, stored->dtype);
    const auto width = static_cast<std::int64_t>(dtype_size(stored->carrier));
    tensor.blocks.push_back({Box{Shape{to}, Shape{n}}, piece.file, (from - piece.begin) * width,
                             n * width, stored, true});
  }

  std::vector<FlatPiece> pieces_;
  std::int64_t size_ = 0;
};

std::int64_t divide_up(std::int64_t n, std::int64_t by) { return n / by + (n % by != 0 ? 1 : 0); }

template <typename T>
void check_same(const T& value, const T& first, const char* what, const std::string& file,
                const std::string& first_file) {
  require<CorruptCheckpoint>(value == first,
                             "{} has {} {}, but {} has {}: they are of different saves, or one was "
                             "not finished",
                             file, value, what, first_file, first);
}

}  // namespace

class DeepSpeedCutter {
 public:
  DeepSpeedCutter(const DeepSpeedStates& states, bool moments)
      : states_(states), moments_(moments), world_(std::ssize(states.optimizer_files_)) {
    for (const DeepSpeedModel& model : states.models_) {
      auto& fragments = fragments_.emplace_back();
      for (const auto& [name, tensor] : model.fragments) fragments.emplace(name, &tensor);
    }
    for (std::size_t rank = 0; rank < states.optimizers_.size(); ++rank) {
      require<CorruptCheckpoint>(
          states.optimizers_[rank].ranks == world_,
          "{} is of a run of {} ranks, but the files of {} are here: some are missing, or of "
          "another save",
          states.optimizer_files_[rank], states.optimizers_[rank].ranks, world_);
    }
  }

  std::vector<DeepSpeedTensor> run() {
    const DeepSpeedModel& model = states_.model();
    const bool parted = states_.stage() == 3;
    if (parted) {
      cut_parameters();
    } else if (world_ > 0) {
      cut_groups();
    }
    for (const auto& [name, shape] : model.frozen) add_frozen(name, shape, parted);
    add_shared();
    // With ZeRO-3, parameters in the module are empty. Else it has all, and ZeRO-1 stores frozen
    // ones only there.
    const std::set<std::string_view> buffers(model.buffers.begin(), model.buffers.end());
    for (const auto& [name, tensor] : model.module)
      if (!seen_.contains(name) && (!parted || buffers.contains(name))) add_whole(name, tensor);
    return std::move(tensors_);
  }

 private:
  const std::string& model_file() const { return states_.model_files_.front(); }
  const std::string& optimizer_file() const { return states_.optimizer_files_.front(); }
  std::uint32_t file_of_rank(std::int64_t rank) const {
    return static_cast<std::uint32_t>(std::ssize(states_.model_files_) + rank);
  }
  const DeepSpeedPart& part(std::int64_t rank, std::size_t i) const {
    return states_.optimizers_[static_cast<std::size_t>(rank)].parts[i];
  }

  void see(const std::string& name) {
    require<CorruptCheckpoint>(seen_.insert(name).second, "{}: the parameter {} is listed twice",
                               model_file(), name);
  }

  void add(const std::string& name, const Shape& shape,
           std::map<std::string, DeepSpeedTensor> tensors) {
    see(name);
    tensors[""];  // of a parameter without elements
    for (auto& [kind, tensor] : tensors) {
      if (tensor.dtype.empty()) tensor.dtype = "float32";
      tensor.name = name;
      tensor.moment = kind;
      tensor.shape = shape;
      tensors_.push_back(std::move(tensor));
    }
  }

  // ZeRO-1 and 2: the ranks' parts of a group, one after the other, hold its parameters.
  void cut_groups() {
    const DeepSpeedModel& model = states_.model();
    const DeepSpeedOptimizer& first = states_.optimizers_.front();
    require<CorruptCheckpoint>(
        model.groups.size() == first.parts.size() &&
            (first.paddings.empty() || first.paddings.size() == model.groups.size()),
        "{} has {} groups of parameters, but {} has {}", model_file(), model.groups.size(),
        optimizer_file(), first.parts.size());
    for (std::size_t g = 0; g < model.groups.size(); ++g) {
      FlatBuffer buffer;
      for (std::int64_t rank = 0; rank < world_; ++rank)
        buffer.append(file_of_rank(rank), part(rank, g), optimizer_file());
      const Named<Shape>& group = model.groups[g];
      const std::vector<std::int64_t> none(group.size());
      const std::vector<std::int64_t>& paddings = first.paddings.empty() ? none : first.paddings[g];
      require<CorruptCheckpoint>(paddings.size() == group.size(),
                                 "{}: {} paddings for {} parameters of group {}", optimizer_file(),
                                 paddings.size(), group.size(), g);
      std::int64_t at = 0;
      for (std::size_t i = 0; i < group.size(); ++i) {
        const auto& [name, shape] = group[i];
        cut_parameter(name, shape, buffer, at);
        advance(at, paddings[i], buffer);
      }
      // The end is padded to a multiple of twice the ranks; some versions store that, some do not.
      const std::int64_t unit = 2 * world_;
      require_all(divide_up(at, unit) == divide_up(buffer.size(), unit), at, buffer, g);
    }
  }

  void cut_parameter(const std::string& name, const Shape& shape, const FlatBuffer& buffer,
                     std::int64_t& at) {
    const std::int64_t begin = at, n = numel(shape);
    advance(at, n, buffer);
    std::map<std::string, DeepSpeedTensor> tensors;
    buffer.cut(begin, n, 0, tensors, moments_, name);
    add(name, shape, std::move(tensors));
  }

  void advance(std::int64_t& at, std::int64_t n, const FlatBuffer& buffer) const {
    require<CorruptCheckpoint>(
        n <= buffer.size() - at,
        "{}: a parameter needs {} elements, but {} of {} are left in its flat "
        "buffer: rank files are cut, or of another save",
        model_file(), n, buffer.size() - at, buffer.size());
    at += n;
  }

  void require_all(bool used, std::int64_t at, const FlatBuffer& buffer, std::size_t group) const {
    require<CorruptCheckpoint>(used,
                               "{}: parameters use {} elements, but the flat buffer {} of the "
                               "optimizer has {}: the files are of different saves",
                               model_file(), at, group, buffer.size());
  }

  // ZeRO-3: each parameter is cut into a part per rank, and each rank has the parts in order.
  void cut_parameters() {
    std::vector<FlatBuffer> buffers(static_cast<std::size_t>(world_));
    for (std::int64_t rank = 0; rank < world_; ++rank) {
      FlatBuffer& buffer = buffers[static_cast<std::size_t>(rank)];
      const DeepSpeedOptimizer& optimizer = states_.optimizers_[static_cast<std::size_t>(rank)];
      for (const DeepSpeedPart& part : optimizer.parts)
        buffer.append(file_of_rank(rank), part, optimizer_file());
      check_same(buffer.size(), buffers.front().size(), "elements",
                 states_.optimizer_files_[static_cast<std::size_t>(rank)], optimizer_file());
    }
    std::int64_t at = 0;
    for (const Named<Shape>& group : states_.model().groups) {
      for (const auto& [name, shape] : group) {
        const std::int64_t n = numel(shape), share = divide_up(n, world_), begin = at;
        advance(at, share, buffers.front());
        std::map<std::string, DeepSpeedTensor> tensors;
        for (std::int64_t rank = 0, to = 0; to < n; ++rank, to += share)
          buffers[static_cast<std::size_t>(rank)].cut(begin, std::min(share, n - to), to, tensors,
                                                      moments_, name);
        add(name, shape, std::move(tensors));
      }
    }
    require_all(at == buffers.front().size(), at, buffers.front(), 0);
  }

  void add_whole(const std::string& name, const TorchTensor& tensor) {
    see(name);
    const Box whole{Shape(std::vector<std::int64_t>(static_cast<std::size_t>(tensor.shape.size()))),
                    tensor.shape};
    tensors_.push_back({name,
                        "",
                        std::string(tensor.dtype),
                        tensor.shape,
                        {{whole, 0, 0, 0, std::make_shared<const TorchTensor>(tensor)}}});
  }

  void add_frozen(const std::string& name, const Shape& shape, bool parted) {
    const std::int64_t n = numel(shape), share = divide_up(n, std::max<std::int64_t>(world_, 1));
    FlatBuffer buffer;
    for (std::size_t rank = 0; rank < states_.models_.size(); ++rank) {
      const std::string where = fmt::format("{}: {}", states_.model_files_[rank], name);
      const auto found = fragments_[rank].find(name);
      require<CorruptCheckpoint>(found != fragments_[rank].end(),
                                 "{}: the frozen parameter has no values", where);
      const TorchTensor& tensor = *found->second;
      const Shape expected = parted ? Shape{share} : shape;
      require<CorruptCheckpoint>(tensor.shape == expected,
                                 "{}: the frozen parameter has shape {}, expected {}", where,
                                 tensor.shape, expected);
      if (!parted) return add_whole(name, tensor);
      require<CorruptCheckpoint>(share <= 1 || tensor.strides[0] == 1, "{}: strides {}", where,
                                 tensor.strides);
      buffer.append(static_cast<std::uint32_t>(rank), {tensor, {}}, where);
    }
    std::map<std::string, DeepSpeedTensor> tensors;
    buffer.cut(0, n, 0, tensors, moments_, name);
    add(name, shape, std::move(tensors));
  }

  // Adds names of tensors that are stored under another one.
  void add_shared() {
    std::map<std::string_view, std::size_t> weights;
    for (std::size_t i = 0; i < tensors_.size(); ++i)
      if (tensors_[i].moment.empty()) weights.emplace(tensors_[i].name, i);
    std::vector<DeepSpeedTensor> more;
    for (const auto& [name, of] : states_.model().shared) {
      const auto found = weights.find(of);
      if (found == weights.end()) continue;  // excluded from the save
      see(name);
      more.push_back(tensors_[found->second]);
      more.back().name = name;
    }
    std::ranges::move(more, std::back_inserter(tensors_));
  }

  const DeepSpeedStates& states_;
  const bool moments_;
  const std::int64_t world_;
  std::vector<std::map<std::string_view, const TorchTensor*>> fragments_;  // of each model
  std::set<std::string> seen_;
  std::vector<DeepSpeedTensor> tensors_;
};

void DeepSpeedStates::add(std::string file, DeepSpeedModel model) {
  if (!models_.empty()) {
    const DeepSpeedModel& first = models_.front();
    check_same(model.step, first.step, "global_steps", file, model_files_.front());
    require<CorruptCheckpoint>(model.groups == first.groups && model.frozen == first.frozen,
                               "{} has parameters of other names or shapes than {}: they are of "
                               "different saves",
                               file, model_files_.front());
    Named<TorchTensor> fragments = std::move(model.fragments);
    model = {};
    model.fragments = std::move(fragments);
  }
  model_files_.push_back(std::move(file));
  models_.push_back(std::move(model));
}

void DeepSpeedStates::add(std::string file, DeepSpeedOptimizer optimizer) {
  if (!optimizers_.empty()) {
    const DeepSpeedOptimizer& first = optimizers_.front();
    const std::string& of = optimizer_files_.front();
    check_same(optimizer.stage, first.stage, "as its ZeRO stage", file, of);
    check_same(optimizer.ranks, first.ranks, "as its number of ranks", file, of);
    check_same(optimizer.parts.size(), first.parts.size(), "groups", file, of);
    check_same(optimizer.steps, first.steps, "as the optimizer's steps", file, of);
  }
  optimizer_files_.push_back(std::move(file));
  if (!optimizers_.empty()) {  // ranks have the same
    optimizer.settings.clear();
    optimizer.left_out.clear();
  }
  optimizers_.push_back(std::move(optimizer));
}

std::optional<std::int64_t> DeepSpeedStates::optimizer_step() const {
  if (optimizers_.empty()) return {};
  std::set<std::string> steps;
  std::istringstream text(optimizers_.front().steps);
  for (std::string step; text >> step;) steps.insert(step);
  std::int64_t value = 0;
  if (steps.size() != 1) return {};
  const std::string& step = *steps.begin();
  const auto parsed = std::from_chars(step.data(), step.data() + step.size(), value);
  const bool is_count =
      parsed.ec == std::errc() && parsed.ptr == step.data() + step.size() && value >= 0;
  return is_count ? std::optional(value) : std::nullopt;
}

Hyperparameters DeepSpeedStates::hyperparameters() const {
  Hyperparameters result;
  if (optimizers_.empty()) return result;
  result.too_many = optimizers_.front().too_many;
  std::set<std::int64_t> used;
  for (const auto& [settings, parts] : optimizers_.front().settings) {
    if (settings == nullptr) return {};
    ParamGroup& group = result.groups.emplace_back(ParamGroup{settings, ParamGroup::Of::Named});
    for (const std::int64_t part : parts) {
      if (part < 0 || part >= std::ssize(model().groups) || !used.insert(part).second) return {};
      for (const auto& [name, shape] : model().groups[static_cast<std::size_t>(part)])
        group.weights.push_back(name);
    }
  }
  result.left_out = optimizers_.front().left_out;
  return result;
}

std::vector<std::string> DeepSpeedStates::files() const {
  std::vector<std::string> files = model_files_;
  files.insert(files.end(), optimizer_files_.begin(), optimizer_files_.end());
  return files;
}

std::vector<DeepSpeedTensor> DeepSpeedStates::cut(bool moments) const {
  return DeepSpeedCutter(*this, moments).run();
}

}  // namespace tessera::io
