#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "io/checkpoint/reader.h"
#include "io/checkpoint/save.h"
#include "tests/support/text.h"

namespace tessera::test {

class ThreadCoordinator : public io::SaveCoordinator {
 public:
  struct Board {
    explicit Board(int ranks) : world_size(ranks) {}
    int world_size;
    std::mutex mutex;
    std::condition_variable changed;
    std::map<std::string, std::map<int, std::string>> values;
  };
  ThreadCoordinator(Board& board, int rank) : board_(board), rank_(rank) {}
  std::vector<std::string> exchange(const std::string& phase, std::string_view mine) override;

 private:
  Board& board_;
  int rank_;
};

/// Coordinator of a world of one.
class SoloCoordinator : public io::SaveCoordinator {
 public:
  std::vector<std::string> exchange(const std::string&, std::string_view mine) override {
    return {std::string(mine)};
  }
};

/// A small GPT-2 whose values are unique per position, with moments.
struct SampleModel {
  std::string config;  ///< JSON of the "model" section
  struct Tensor {
    std::string name;
    Shape shape;
    std::vector<float> weight, exp_avg, exp_avg_sq;
  };
  std::vector<Tensor> tensors;
  const Tensor& at(const std::string& name) const;
};
/// @param salt  changes all values
SampleModel make_sample_model(int salt = 0);

struct SaveOptions {
  int world_size = 1;
  std::int64_t step = 7;
  std::string run_id = "run-a";
  bool optimizer = true;
  std::string trainer_json = R"({"step": 7})";
  std::int64_t chunk_bytes = 0;  ///< as in SaveRequest
  /// Called at each labelled point.
  std::function<void(int rank, std::string_view point)> at_point = nullptr;
  /// Simulated free space; empty: the file system's.
  std::optional<std::int64_t> free_bytes{};
};

/// A rank's save request: its segment of each unit's ShardLayout.
io::SaveRequest make_request(const SampleModel& model, const io::fs::path& dir, int rank,
                             const SaveOptions& options);

/// Saves with one thread per rank. @return error message of each rank; empty on success
std::vector<std::string> save_ranks(const SampleModel& model, const io::fs::path& dir,
                                    const SaveOptions& options);
/// Saves and requires success. @return the checkpoint's path
io::fs::path save(const SampleModel& model, const io::fs::path& dir,
                  const SaveOptions& options = {});

/// Writes a checkpoint of one tensor "w": any dtype, whole or in two boxes of columns, each in two
/// chunks.
io::CheckpointReader write_tensor(const io::fs::path& path, DType dtype, const Shape& shape,
                                  const std::string& bytes, bool boxed = false);

struct DcpEntry {
  std::string name, dtype;
  std::vector<std::int64_t> shape;
  std::string bytes;
  std::vector<std::int64_t> offsets{};  ///< in the whole tensor; empty: zeros
};
void write_dcp_shard(const io::fs::path& file, const std::vector<DcpEntry>& entries);

/// Names of the items of a directory, sorted.
std::vector<std::string> names_in(const io::fs::path& dir);
/// Steps of the committed checkpoints.
std::vector<std::int64_t> steps_in(const io::fs::path& dir);

std::string read_text(const io::fs::path& path);
void write_text(const io::fs::path& path, std::string_view content);
/// Changes a checkpoint's format version, with a matching index checksum.
void set_format_version(const io::fs::path& checkpoint, int version);
/// Runs `body` in a forked process. @return its wait status
int in_child(const std::function<int()>& body);
/// Flips a bit of a byte; negative: counted from the end.
void flip_bit(const io::fs::path& path, std::int64_t byte);

}  // namespace tessera::test
