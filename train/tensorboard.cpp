#include "train/tensorboard.h"

#include <fmt/format.h>
#include <isa-l/crc.h>
#include <unistd.h>

#include <bit>
#include <chrono>
#include <cstdint>
#include <ctime>

#include "io/base/file.h"

namespace tessera::train {
namespace {

// Protocol buffers.
enum Wire : std::uint8_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

void add_varint(std::string& out, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  out += static_cast<char>(value);
}
template <typename T>
void add_little_endian(std::string& out, T value) {
  for (std::size_t i = 0; i < sizeof(T); ++i) out += static_cast<char>(value >> (8 * i));
}
void add_key(std::string& out, int field, Wire wire) {
  add_varint(out, static_cast<std::uint64_t>(field) << 3 | wire);
}
void add_double(std::string& out, int field, double value) {
  add_key(out, field, kFixed64);
  add_little_endian(out, std::bit_cast<std::uint64_t>(value));
}
void add_float(std::string& out, int field, float value) {
  add_key(out, field, kFixed32);
  add_little_endian(out, std::bit_cast<std::uint32_t>(value));
}
void add_int(std::string& out, int field, std::int64_t value) {
  add_key(out, field, kVarint);
  add_varint(out, static_cast<std::uint64_t>(value));
}
void add_bytes(std::string& out, int field, std::string_view value) {
  add_key(out, field, kBytes);
  add_varint(out, value.size());
  out += value;
}

std::uint32_t masked_crc32c(std::string_view data) {
  auto* const bytes = reinterpret_cast<unsigned char*>(const_cast<char*>(data.data()));
  const std::uint32_t crc = ~::crc32_iscsi(bytes, static_cast<int>(data.size()), 0xFFFFFFFFU);
  return std::rotr(crc, 15) + 0xA282EAD8U;
}

// TFRecord: length, its checksum, data, its checksum.
std::string record(std::string_view data) {
  std::string out;
  add_little_endian(out, std::uint64_t{data.size()});
  add_little_endian(out, masked_crc32c(out));
  out += data;
  add_little_endian(out, masked_crc32c(data));
  return out;
}

// Event{wall_time = 1, step = 2}
std::string event(std::int64_t step) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  std::string out;
  add_double(out, 1, std::chrono::duration<double>(now).count());
  add_int(out, 2, step);
  return out;
}

std::filesystem::path event_file(const std::filesystem::path& directory) {
  io::make_directories_durably(directory);
  char host[256] = "localhost";
  ::gethostname(host, sizeof(host) - 1);
  return directory /
         fmt::format("events.out.tfevents.{:010}.{}.{}", std::time(nullptr), host, ::getpid());
}

}  // namespace

TensorBoardWriter::TensorBoardWriter(const std::filesystem::path& directory,
                                     std::int64_t first_step)
    : file_(event_file(directory)) {
  std::string version = event(0);
  add_bytes(version, 3, "brain.Event:2");  // Event::file_version
  file_.write(record(version));
  if (first_step == 0) return;
  std::string start = event(first_step);
  std::string log;
  add_int(log, 1, 1);        // SessionLog{status = START}
  add_bytes(start, 7, log);  // Event::session_log
  file_.write(record(start));
}

void TensorBoardWriter::write_scalars(std::int64_t step,
                                      const std::vector<std::pair<const char*, double>>& scalars) {
  std::string summary;
  for (const auto& [tag, number] : scalars) {
    std::string value;  // Summary::Value{tag = 1, simple_value = 2}
    add_bytes(value, 1, tag);
    add_float(value, 2, static_cast<float>(number));
    add_bytes(summary, 1, value);
  }
  std::string out = event(step);
  add_bytes(out, 5, summary);  // Event::summary
  file_.write(record(out));
}

void TensorBoardWriter::write_step(const StepMetrics& m) {
  std::vector<std::pair<const char*, double>> scalars = {
      {"train/loss", m.loss},
      {"train/grad_norm", m.grad_norm},
      {"train/lr", m.lr},
      {"speed/step_ms", m.step_ms},
      {"speed/tokens_per_s", m.tokens_per_s},
      {"memory/peak_bytes", static_cast<double>(m.memory_bytes)}};
  if (m.mfu) scalars.emplace_back("speed/mfu", *m.mfu);
  write_scalars(m.step, scalars);
}

void TensorBoardWriter::write_evaluation(std::int64_t step, double val_loss) {
  write_scalars(step, {{"validation/loss", val_loss}});
}

}  // namespace tessera::train
