#include "train/tensorboard.h"

#include <doctest/doctest.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "io/base/file.h"
#include "tests/support/temp_dir.h"

using namespace tessera;
using namespace tessera::train;

namespace {

// CRC-32C bit by bit, masked as in TFRecord.
std::uint32_t masked_crc(std::string_view data) {
  std::uint32_t crc = 0xFFFFFFFFU;
  for (const char c : data) {
    crc ^= static_cast<unsigned char>(c);
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ ((crc & 1) != 0 ? 0x82F63B78U : 0);
  }
  return std::rotr(~crc, 15) + 0xA282EAD8U;
}

template <typename T>
T number(std::string_view& data) {
  T value;
  REQUIRE(data.size() >= sizeof(T));
  std::memcpy(&value, data.data(), sizeof(T));
  data.remove_prefix(sizeof(T));
  return value;
}

// Payloads of the records of the only file in a directory.
std::vector<std::string> records(const std::filesystem::path& directory) {
  std::vector<std::string> found;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    CHECK(entry.path().filename().string().starts_with("events.out.tfevents."));
    const std::string file = io::read_file(entry.path(), 1 << 20);
    for (std::string_view data = file; !data.empty();) {
      const std::string_view length = data.substr(0, 8);
      const auto size = number<std::uint64_t>(data);
      CHECK(number<std::uint32_t>(data) == masked_crc(length));
      found.emplace_back(data.substr(0, size));
      data.remove_prefix(size);
      CHECK(number<std::uint32_t>(data) == masked_crc(found.back()));
    }
  }
  return found;
}

std::string float_bytes(float value) {
  std::string bytes(sizeof(value), '\0');
  std::memcpy(bytes.data(), &value, sizeof(value));
  return bytes;
}

}  // namespace

TEST_CASE("event files are TFRecords of events with a tag and a value") {
  const test::TempDir dir;
  TensorBoardWriter writer(dir.path() / "events", 5);
  writer.write_step({.step = 300, .loss = 2.5, .mfu = 0.5});
  writer.write_evaluation(301, 1.25);
  writer.flush();
  const auto events = records(dir.path() / "events");
  REQUIRE(events.size() == 4);
  CHECK(events[0].find("brain.Event:2") != std::string::npos);
  // Step 5, then a session log with status START: TensorBoard hides later steps of earlier files.
  CHECK(events[1].substr(9) == std::string("\x10\x05\x3a\x02\x08\x01"));
  // Key 2, 300 as a varint; a value with a tag of 10 bytes.
  CHECK(events[2].substr(9, 3) == std::string("\x10\xac\x02"));
  CHECK(events[2].find("\x0a\x0atrain/loss\x15" + float_bytes(2.5F)) != std::string::npos);
  CHECK(events[2].find("speed/mfu\x15" + float_bytes(0.5F)) != std::string::npos);
  CHECK(events[3].find("validation/loss\x15" + float_bytes(1.25F)) != std::string::npos);
}
