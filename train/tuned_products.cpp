#include "train/tuned_products.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <thread>

#include "comm/control/socket.h"
#include "core/base/error.h"
#include "io/base/file.h"
#include "io/base/json.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;
constexpr const char* kTunedFormat = "tessera-tuned-products";
constexpr std::int64_t kTunedVersion = 1;

bool is_hex(const std::string& text) {
  return !text.empty() && text.size() % 2 == 0 &&
         text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

TunedProduct parse_tuned_product(const io::JsonReader& json) {
  TunedProduct result;
  const io::Json& microseconds = json.at("microseconds").value();
  require<CorruptCheckpoint>(microseconds.is_number() && microseconds.get<double>() >= 0,
                             "{}.microseconds is {}", json.where(), microseconds.dump());
  result.microseconds = microseconds.get<double>();
  if (json.has("apart")) {
    const io::Json& apart = json.at("apart").value();
    require<CorruptCheckpoint>(apart == true, "{}.apart is {}", json.where(), apart.dump());
    result.apart = true;
    return result;
  }
  result.algorithm = json.at("algorithm").string();
  require<CorruptCheckpoint>(is_hex(result.algorithm), "{}.algorithm is \"{}\", not hexadecimal",
                             json.where(), result.algorithm);
  result.workspace_bytes = json.at("workspace_bytes").integer();
  return result;
}

// A file that is there may have every product: adding to it tells whether it can be written.
void require_readable_or_writable(const fs::path& file) {
  io::require_replaceable(file);
  if (io::is_there(file)) return;
  const fs::path folder = fs::absolute(file).parent_path();
  require<IoError>(::access(folder.c_str(), W_OK | X_OK) == 0, "cannot write a file in {}: {}",
                   folder.string(), std::strerror(errno));
}

/// Locks a folder against other writers of its file, for seconds at most. A file system without locks
/// holds none.
comm::FileDescriptor lock_folder(const fs::path& folder) {
  comm::FileDescriptor lock(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  for (int left = 200;
       lock && ::flock(lock.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;) {
    require<IoError>(--left > 0, "another process holds the lock of {}", folder.string());
    std::this_thread::sleep_for(std::chrono::milliseconds(25));
  }
  return lock;
}

}  // namespace

std::string format_tuned_products(const TunedProducts& products) {
  io::OrderedJson gpus = io::OrderedJson::object();
  for (const auto& [gpu, entries] : products) {
    io::OrderedJson& of_gpu = gpus[gpu] = io::OrderedJson::object();
    for (const auto& [product, entry] : entries) {
      io::OrderedJson& json = of_gpu[product];
      if (entry.apart) {
        json["apart"] = true;
      } else {
        json["algorithm"] = entry.algorithm;
        json["workspace_bytes"] = entry.workspace_bytes;
      }
      json["microseconds"] = entry.microseconds;
    }
  }
  return io::OrderedJson{{"format", kTunedFormat}, {"version", kTunedVersion}, {"gpus", gpus}}.dump(
             1) +
         "\n";
}

TunedProducts parse_tuned_products(const std::string& text, const std::string& source) {
  try {
    const io::Json json = io::parse_json(text, source);
    const io::JsonReader top(json, source);
    const std::string& format = top.at("format").string();
    require<CorruptCheckpoint>(format == kTunedFormat, "{}: format is \"{}\", not \"{}\"", source,
                               format, kTunedFormat);
    const std::int64_t version = top.at("version").integer();
    require<CorruptCheckpoint>(version == kTunedVersion, "{}: version is {}; this tessera reads {}",
                               source, version, kTunedVersion);
    TunedProducts result;
    const io::JsonReader gpus = top.at("gpus");
    for (const auto& [gpu, entries] : gpus.object().items())
      for (const auto& [product, entry] : gpus.at(gpu).object().items())
        result[gpu][product] = parse_tuned_product(gpus.at(gpu).at(product));
    return result;
  } catch (const CorruptCheckpoint& error) {
    throw InvalidArgument(
        "{}; this is no valid file of tuned products: remove it to time them again, or name "
        "another --train.tuned_products",
        error.what());
  }
}

TunedProducts open_tuned_products(const fs::path& file) {
  try {
    require_readable_or_writable(file);
    if (!io::is_there(file)) return {};
    return parse_tuned_products(io::read_file(file, kMostTunedBytes), file.string());
  } catch (const CorruptCheckpoint& error) {  // longer than that
    throw InvalidArgument("train.tuned_products: {}; name another file", error.what());
  } catch (const IoError& error) {
    throw IoError("train.tuned_products: {}", error.what());
  }
}

void add_tuned_products(const fs::path& file, const TunedProducts& newer) {
  const comm::FileDescriptor lock = lock_folder(fs::absolute(file).parent_path());
  TunedProducts all = open_tuned_products(file);
  merge(all, newer);
  const std::string text = format_tuned_products(all);
  require<IoError>(text.size() <= kMostTunedBytes,
                   "{} would grow to {} bytes, and may have {}; start a new file", file.string(),
                   text.size(), kMostTunedBytes);
  io::write_file_atomically(file, text);
}

}  // namespace tessera::train
