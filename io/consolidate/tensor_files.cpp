#include "io/consolidate/tensor_files.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>

#include "core/base/error.h"
#include "io/base/convert.h"
#include "io/base/json.h"
#include "io/safetensors/writer.h"

namespace tessera::io {
namespace {

constexpr std::size_t kMaxBuffer = std::size_t{16} << 20;
constexpr std::size_t kMinBuffer = std::size_t{64} << 10;

std::int64_t byte_count(const ExportTensor& tensor) {
  return numel(tensor.shape) * static_cast<std::int64_t>(dtype_size(tensor.written));
}

/// One output file and the tensors in it.
struct OutputFile {
  std::string name;
  std::vector<const ExportTensor*> tensors;
  SafetensorsPlan plan;
  std::optional<File> file;  ///< while some of its tensors are copied and others are to come
  std::size_t left = 0;      ///< tensors that are not copied yet
};

std::vector<OutputFile> assign(const std::vector<ExportTensor>& tensors,
                               const TensorFilesOptions& options) {
  std::vector<const ExportTensor*> sorted;
  for (const ExportTensor& tensor : tensors) sorted.push_back(&tensor);
  std::sort(sorted.begin(), sorted.end(),
            [](const ExportTensor* a, const ExportTensor* b) { return a->name < b->name; });
  std::vector<OutputFile> files(1);
  std::int64_t filled = 0;
  for (const ExportTensor* tensor : sorted) {
    const std::int64_t bytes = byte_count(*tensor);
    if (!files.back().tensors.empty() && filled + bytes > options.max_shard_size) {
      files.emplace_back();
      filled = 0;
    }
    files.back().tensors.push_back(tensor);
    filled += bytes;
  }
  for (std::size_t i = 0; i < files.size(); ++i) {
    files[i].name = files.size() == 1 ? fmt::format("{}.safetensors", options.stem)
                                      : fmt::format("{}-{:05}-of-{:05}.safetensors", options.stem,
                                                    i + 1, files.size());
  }
  return files;
}

// Copies one tensor to its place; buffers of source and conversion share buffer_bytes.
void copy_tensor(const ExportTensor& tensor, File& file, std::int64_t offset,
                 std::size_t buffer_bytes, const std::function<void(std::int64_t)>& wrote) {
  const auto width = static_cast<std::int64_t>(dtype_size(tensor.written));
  std::vector<char> converted;
  const bool convert = tensor.stored != tensor.written;
  const std::size_t share = dtype_size(tensor.stored) + (convert ? dtype_size(tensor.written) : 0);
  const std::size_t source_bytes = buffer_bytes / share * dtype_size(tensor.stored);
  tensor.stream(source_bytes, [&](std::int64_t begin, const void* data, std::int64_t n) {
    const void* out = data;
    if (convert) {
      converted.resize(static_cast<std::size_t>(n * width));
      convert_elements(tensor.stored, data, tensor.written, converted.data(), n);
      out = converted.data();
    }
    file.write_at(offset + begin * width, out, static_cast<std::size_t>(n * width));
    wrote(n * width);
  });
}

void write_index(const fs::path& dir, const std::vector<OutputFile>& files,
                 const std::string& name) {
  Json weight_map = Json::object();
  std::int64_t total = 0;
  for (const OutputFile& file : files) {
    for (const ExportTensor* tensor : file.tensors) {
      weight_map[tensor->name] = file.name;
      total += byte_count(*tensor);
    }
  }
  const Json index{{"metadata", {{"total_size", total}}}, {"weight_map", std::move(weight_map)}};
  write_file_atomically(dir / name, index.dump(2) + "\n");
}

}  // namespace

std::vector<std::string> write_tensor_files(const fs::path& dir,
                                            const std::vector<ExportTensor>& tensors,
                                            const TensorFilesOptions& options) {
  std::vector<OutputFile> files = assign(tensors, options);
  struct Task {
    const ExportTensor* tensor;
    OutputFile* file;
    std::int64_t offset;
  };
  std::vector<Task> tasks;
  for (OutputFile& file : files) {
    std::vector<SafetensorsSpec> specs;
    std::map<std::string, const ExportTensor*> by_name;
    for (const ExportTensor* tensor : file.tensors) {
      specs.push_back({tensor->name, tensor->written, tensor->shape});
      by_name[tensor->name] = tensor;
    }
    file.plan = plan_safetensors(specs, options.metadata);
    file.left = file.plan.tensors.size();
    for (const SafetensorsEntry& entry : file.plan.tensors) {
      tasks.push_back({by_name.at(entry.name), &file, entry.begin});
    }
  }

  const auto most = std::max<std::size_t>(
      1, std::min(tasks.size(), static_cast<std::size_t>(options.memory) / kMinBuffer));
  const std::size_t jobs = std::min(most, static_cast<std::size_t>(std::max(options.jobs, 1)));
  const std::size_t buffer =
      std::clamp(static_cast<std::size_t>(options.memory) / jobs, kMinBuffer, kMaxBuffer);
  std::atomic<std::size_t> next{0};
  std::mutex mutex;  // guards the callback, the first error, and `file` and `left` of each file
  std::exception_ptr error;
  const auto wrote = [&](std::int64_t bytes) {
    if (!options.wrote) return;
    const std::lock_guard lock(mutex);
    options.wrote(bytes);
  };
  // Tasks are in order of files, so few files are open at once, however many there are.
  const auto open = [&](OutputFile& file) -> File& {
    const std::lock_guard lock(mutex);
    if (!file.file) {
      file.file = File::create(dir / file.name);
      file.file->write(file.plan.preamble.data(), file.plan.preamble.size());
    }
    return *file.file;
  };
  const auto close = [&](OutputFile& file) {
    {
      const std::lock_guard lock(mutex);
      if (--file.left > 0) return;
    }
    file.file->finish();
    file.file.reset();
  };
  const auto work = [&] {
    try {
      for (std::size_t i = next++; i < tasks.size(); i = next++) {
        OutputFile& file = *tasks[i].file;
        copy_tensor(*tasks[i].tensor, open(file), tasks[i].offset, buffer, wrote);
        close(file);
      }
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
      next = tasks.size();  // the others stop after their tensor
    }
  };
  {
    std::vector<std::jthread> threads;
    try {
      while (threads.size() + 1 < jobs) threads.emplace_back(work);
    } catch (const std::system_error&) {
      // The system allows no more threads; those that started do the work.
    }
    work();
  }
  if (error) std::rethrow_exception(error);

  std::vector<std::string> names;
  for (const OutputFile& file : files) names.push_back(file.name);
  if (files.size() > 1) {
    names.push_back(options.stem + ".safetensors.index.json");
    write_index(dir, files, names.back());
  }
  return names;
}

}  // namespace tessera::io
