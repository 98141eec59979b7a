#include "io/checkpoint/save.h"

#include <exception>
#include <nlohmann/json.hpp>

#include "capi/call.h"
#include "core/base/error.h"
#include "io/checkpoint/agree.h"
#include "io/pump/box.h"
#include "io/safetensors/dtype.h"

struct tessera_messages {
  std::vector<std::string> texts;
};

namespace tessera::capi {
namespace {

class Exchange final : public io::SaveCoordinator {
 public:
  Exchange(tessera_exchange exchange, void* user, int world_size)
      : exchange_(exchange), user_(user), world_size_(static_cast<std::size_t>(world_size)) {}

  std::vector<std::string> exchange(const std::string& phase, std::string_view mine) override {
    if (exchange_ == nullptr) return {std::string(mine)};
    tessera_messages all;
    const bool failed = exchange_(user_, phase.c_str(), mine.data(), mine.size(), &all) != 0;
    if (failed || all.texts.size() != world_size_) {
      throw CommError(CommFailure::Aborted, {}, "{}: the exchange of messages {}", phase,
                      failed ? "failed"
                             : fmt::format("returned {} messages from {} ranks", all.texts.size(),
                                           world_size_));
    }
    return std::move(all.texts);
  }

 private:
  const tessera_exchange exchange_;
  void* const user_;
  const std::size_t world_size_;
};

io::TensorPart part_of(const tessera_part& part) {
  const std::string name = text_argument(part.name, "the name of a part");
  const std::string dtype = text_argument(part.dtype, "the dtype of a part");
  const auto stored = io::dtype_from_safetensors(dtype);
  require<Unsupported>(stored.has_value(), "part of {}: checkpoints have no tensors of dtype {}",
                       name, dtype);
  require(part.dims == 0 || (part.shape && part.offsets && part.extents),
          "part of {}: shape, offsets or extents are NULL", name);
  io::TensorPart result{name, Shape(part.shape, part.dims), *stored, 0, 0, part.data};
  const io::Box box{Shape(part.offsets, part.dims), Shape(part.extents, part.dims)};
  for (int i = 0; i < result.shape.size(); ++i)
    require(box.offsets[i] >= 0 && box.shape[i] >= 0,
            "part of {}: the offsets {} and extents {} must not be negative", name, box.offsets,
            box.shape);
  require(io::is_inside(box, result.shape),
          "part of {}: the part at {} of shape {} is outside the shape {}", name, box.offsets,
          box.shape, result.shape);
  const std::int64_t elements = numel(box.shape);
  if (elements == 0) return result;
  if (io::is_one_run(box, result.shape)) {
    result.begin = io::first_element(box, result.shape);
  } else {
    result.box = box;
  }
  result.end = result.begin + elements;
  return result;
}

int small_number(const io::OptionTexts& given, const char* name, std::int64_t least,
                 int otherwise) {
  const std::int64_t value = given.integer(name, least).value_or(otherwise);
  require(value <= io::kMaxWorldSize, "{} is {}; at most {}", name, value, io::kMaxWorldSize);
  return static_cast<int>(value);
}

void read_arguments(io::SaveRequest& request, const io::OptionTexts& given,
                    std::span<const tessera_part> parts) {
  if (const std::string* failed = given.find("failed")) throw InvalidArgument("{}", *failed);
  const auto step = given.integer("step", 0);
  require(step.has_value(), "option step is missing");
  request.step = *step;
  request.run_id = given.text("run-id", "run");
  request.model_config = given.text("model", "{}");
  request.trainer_json = given.text("trainer", "");
  given.refuse_others();
  require(parts.data() != nullptr || parts.empty(), "the parts are NULL");
  for (const tessera_part& part : parts) {
    const io::Section section = part.state == nullptr ? io::kModelSection : io::Section{part.state};
    request.parts[section].push_back(part_of(part));
  }
}

}  // namespace
}  // namespace tessera::capi

void tessera_add_message(tessera_messages* messages, const void* data, size_t bytes) {
  if (messages == nullptr) return;
  // Without memory, the message is missing, which fails the exchange.
  tessera::capi::run_call(
      {}, [&] { messages->texts.emplace_back(static_cast<const char*>(data), bytes); });
}

int tessera_save(const char* dir, const tessera_option* options, size_t option_count,
                 const tessera_part* parts, size_t part_count, tessera_exchange exchange,
                 tessera_text report, void* user) {
  namespace capi = tessera::capi;
  namespace io = tessera::io;
  return capi::run_call({dir == nullptr ? "" : dir, ""}, [&] {
    const io::OptionTexts given = capi::option_texts(options, option_count);
    io::SaveRequest request;
    request.checkpoints_dir = capi::text_argument(dir, "the directory");
    request.rank = capi::small_number(given, "rank", 0, 0);
    request.world_size = capi::small_number(given, "world", 1, 1);
    tessera::require(exchange != nullptr || request.world_size == 1, "{} ranks need an exchange",
                     request.world_size);
    capi::Exchange coordinator(exchange, user, request.world_size);
    // Errors of one rank's arguments must not leave the others waiting for it.
    std::exception_ptr own;
    std::vector<std::string> steps;
    try {
      steps = io::agree(request, coordinator, "save/arguments",
                        {"the checkpoint was not saved", "former checkpoints are unchanged"}, [&] {
                          try {
                            capi::read_arguments(request, given, {parts, part_count});
                          } catch (...) {
                            own = std::current_exception();
                            throw;
                          }
                          return std::to_string(request.step);
                        });
    } catch (const tessera::IoError&) {
      if (own) std::rethrow_exception(own);
      throw;
    }
    // The names of the following phases contain the step.
    for (std::size_t rank = 1; rank < steps.size(); ++rank)
      tessera::require(steps[rank] == steps[0], "rank 0 saves step {}, rank {} saves step {}",
                       steps[0], rank, steps[rank]);
    const io::SaveReport saved = io::save_checkpoint(request, coordinator);
    capi::send_json(report, user,
                    {{"path", saved.path.string()},
                     {"bytes", saved.bytes},
                     {"total_bytes", saved.total_bytes},
                     {"seconds", saved.seconds}});
  });
}
