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

namespace tessera::test {

/// Lets ranks that are threads of one process save together.
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

/// A small GPT-2 with values that tell where they belong, and moments beside them.
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
/// @param salt  changes every value
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
  /// What the file system is said to have; empty: what it has.
  std::optional<std::int64_t> free_bytes{};
};

/// What `rank` saves: its segment of each unit, as ShardLayout cuts it.
io::SaveRequest make_request(const SampleModel& model, const io::fs::path& dir, int rank,
                             const SaveOptions& options);

/// Saves with a thread per rank. @return the message of each rank's error; empty where it succeeded
std::vector<std::string> save_ranks(const SampleModel& model, const io::fs::path& dir,
                                    const SaveOptions& options);
/// The same, for a save that must succeed. @return the checkpoint's path
io::fs::path save(const SampleModel& model, const io::fs::path& dir,
                  const SaveOptions& options = {});

/// A checkpoint of one tensor "w", written by hand: any dtype, whole or in boxes of columns.
io::CheckpointReader write_tensor(const io::fs::path& path, DType dtype, const Shape& shape,
                                  const std::string& bytes, bool boxed = false);

/// A tensor of a shard in the safetensors form of a PyTorch Distributed Checkpoint.
struct DcpEntry {
  std::string name, dtype;
  std::vector<std::int64_t> shape;
  std::string bytes;
  std::vector<std::int64_t> offsets{};  ///< in the whole tensor; empty: zeros
};
void write_dcp_shard(const io::fs::path& file, const std::vector<DcpEntry>& entries);

/// Content of a file, and the other way.
std::string read_text(const io::fs::path& path);
void write_text(const io::fs::path& path, std::string_view content);
/// Gives the index of a checkpoint another format version, and the checksum that belongs to it.
void set_format_version(const io::fs::path& checkpoint, int version);
/// Changes one bit of a file.
void flip_bit(const io::fs::path& path, std::int64_t byte);

}  // namespace tessera::test
