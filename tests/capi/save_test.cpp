#include <doctest/doctest.h>
#include <tessera/c_api.h>

#include <cstring>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "tests/io/support.h"
#include "tests/support/safetensors_reader.h"
#include "tests/support/temp_dir.h"

namespace tessera::test {
namespace {

namespace fs = std::filesystem;

constexpr int kRanks = 3;

struct Rank {
  ThreadCoordinator::Board& board;
  int rank;
  bool broken = false;  // its exchange fails
  std::string report;
};

int exchange(void* user, const char* phase, const void* mine, size_t bytes, tessera_messages* all) {
  auto& self = *static_cast<Rank*>(user);
  if (self.broken) return 1;
  ThreadCoordinator coordinator(self.board, self.rank);
  for (const std::string& text :
       coordinator.exchange(phase, {static_cast<const char*>(mine), bytes}))
    tessera_add_message(all, text.data(), text.size());
  return 0;
}

// Saves a matrix of 4 x 9 by its columns and a vector of 6 by its elements, of which each rank has a
// third, and a moment of the vector.
struct Job {
  std::vector<std::int64_t> matrix{4, 9}, vector{6}, columns{4, 3}, elements{2};
  std::string step = "5";
  std::vector<int> statuses = std::vector<int>(kRanks);
  std::vector<std::string> messages = std::vector<std::string>(kRanks);

  // @param change  of a rank's parts and options
  void run(const fs::path& dir,
           const std::function<void(int rank, std::vector<tessera_part>&,
                                    std::vector<tessera_option>&)>& change = {}) {
    ThreadCoordinator::Board board(kRanks);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([&, rank] {
        const std::int64_t at[] = {0, 3 * rank}, begin[] = {2 * rank};
        std::vector<float> block, part{10.F * static_cast<float>(rank), 1};
        for (int i = 0; i < 12; ++i)
          block.push_back(static_cast<float>(i / 3 * 9 + 3 * rank + i % 3));
        std::vector<tessera_part> parts{
            {nullptr, "matrix", "F32", 2, matrix.data(), at, columns.data(), block.data()},
            {nullptr, "vector", "F32", 1, vector.data(), begin, elements.data(), part.data()},
            {"exp_avg", "vector", "F32", 1, vector.data(), begin, elements.data(), part.data()}};
        const std::string text = std::to_string(rank);
        std::vector<tessera_option> options{{"step", step.c_str()},
                                            {"rank", text.c_str()},
                                            {"world", "3"},
                                            {"model", R"({"arch": "own"})"},
                                            {"trainer", R"({"tokens": 12})"}};
        if (change) change(rank, parts, options);
        Rank user{board, rank, false, ""};
        const auto report = [](void* self, const char* json) {
          static_cast<Rank*>(self)->report = json;
        };
        const auto slot = static_cast<std::size_t>(rank);
        statuses[slot] = tessera_save(dir.c_str(), options.data(), options.size(), parts.data(),
                                      parts.size(), exchange, report, &user);
        messages[slot] = tessera_error_message();
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
};

TEST_CASE("ranks save blocks of columns, which read, verify and consolidate as the whole") {
  const TempDir dir;
  const fs::path run = dir.path() / "run", out = dir.path() / "out";
  Job job;
  job.run(run);
  CAPTURE(job.messages[0]);
  REQUIRE(job.statuses == std::vector<int>(kRanks, TESSERA_OK));
  CHECK(tessera_verify(run.c_str(), nullptr, 0, nullptr, nullptr, nullptr, nullptr) == TESSERA_OK);

  tessera_source* source = nullptr;
  REQUIRE(tessera_open(run.c_str(), nullptr, 0, &source) == TESSERA_OK);
  REQUIRE(tessera_tensor_count(source) == 3);
  CHECK(tessera_tensor_name(source, 1) == std::string("optimizer/exp_avg/vector"));
  std::vector<float> found(36), expected(36);
  std::iota(expected.begin(), expected.end(), 0.F);
  CHECK(tessera_read(source, 0, nullptr, nullptr, nullptr, found.data(), 36 * sizeof(float)) ==
        TESSERA_OK);
  CHECK(found == expected);
  // Two columns, of two ranks.
  const std::int64_t begin[] = {1, 2}, end[] = {3, 4};
  CHECK(tessera_read(source, 0, begin, end, "F32", found.data(), 4 * sizeof(float)) == TESSERA_OK);
  CHECK(std::vector(found.begin(), found.begin() + 4) == std::vector<float>{11, 12, 20, 21});
  std::vector<std::uint16_t> rounded(4);
  CHECK(tessera_read(source, 0, begin, end, "BF16", rounded.data(), 8) == TESSERA_OK);
  CHECK(rounded[0] == BFloat16(11.F).bits);
  tessera_close(source);

  const tessera_option format{"format", "safetensors"};
  REQUIRE(tessera_consolidate(run.c_str(), out.c_str(), &format, 1, nullptr, nullptr, nullptr,
                              nullptr) == TESSERA_OK);
  const auto tensors = tensors_of(out / "model.safetensors");
  const std::string bytes(reinterpret_cast<const char*>(expected.data()), 36 * sizeof(float));
  CHECK(tensors.at("matrix") == "F32 [4, 9] " + bytes);
}

TEST_CASE("an error of one rank reaches all ranks, and the former checkpoint stays") {
  const TempDir dir;
  Job job;
  job.run(dir.path());
  REQUIRE(job.statuses == std::vector<int>(kRanks, TESSERA_OK));
  job.step = "6";
  const std::int64_t far[] = {0, 7};
  const auto expect = [&](int own, const char* text) {
    CAPTURE(job.messages[1]);
    CHECK(job.statuses == std::vector<int>{TESSERA_IO, own, TESSERA_IO});
    for (const std::string& message : job.messages) CHECK(message.find(text) != std::string::npos);
    CHECK(!fs::exists(dir.path() / "step-00000006"));
    CHECK(fs::exists(dir.path() / "step-00000005" / "index.json"));
  };
  job.run(dir.path(), [&](int rank, auto& parts, auto&) {
    if (rank == 1) parts[0].offsets = far;
  });
  expect(TESSERA_INVALID_ARGUMENT, "part of matrix: the part at [0, 7]");
  job.run(dir.path(), [&](int rank, auto& parts, auto&) {
    if (rank == 1) parts[0].dtype = "F8_E4M3";
  });
  expect(TESSERA_UNSUPPORTED, "no tensors of dtype F8_E4M3");
  job.run(dir.path(), [&](int rank, auto&, auto& options) {
    if (rank == 1) options.push_back({"failed", "no memory for a copy"});
  });
  expect(TESSERA_INVALID_ARGUMENT, "no memory for a copy");
  job.run(dir.path(), [&](int rank, auto& parts, auto&) {
    if (rank == 1) parts.erase(parts.begin());
  });
  expect(TESSERA_IO, "24 of the 36 elements");
  job.run(dir.path(), [&](int rank, auto&, auto& options) {
    if (rank == 1) options[0].value = "8";
  });
  CHECK(job.statuses == std::vector<int>(kRanks, TESSERA_INVALID_ARGUMENT));
  CHECK(job.messages[2] == "rank 0 saves step 6, rank 1 saves step 8");
}

TEST_CASE("a failing exchange is an error of communication") {
  const TempDir dir;
  const std::int64_t size = 1, zero = 0;
  const float value = 1;
  const tessera_part part{nullptr, "x", "F32", 1, &size, &zero, &size, &value};
  const std::vector<tessera_option> options{{"step", "1"}, {"world", "2"}};
  ThreadCoordinator::Board board(2);
  Rank user{board, 0, true, ""};
  CHECK(tessera_save(dir.path().c_str(), options.data(), 2, &part, 1, exchange, nullptr, &user) ==
        TESSERA_COMMUNICATION);
  CHECK(tessera_save(dir.path().c_str(), options.data(), 2, &part, 1, nullptr, nullptr, nullptr) ==
        TESSERA_INVALID_ARGUMENT);
  CHECK(fs::is_empty(dir.path()));
}

}  // namespace
}  // namespace tessera::test
