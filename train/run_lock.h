#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "comm/control/socket.h"

namespace tessera::train {

/// Locks a run's directory by its .lock file, which names the holder. Ends with the process.
/// @param other  for messages: "choose another --run.out"
/// @throws IoError if that fails; InvalidArgument naming the holder if another job has the lock
comm::FileDescriptor lock_run_directory(const std::filesystem::path& path, std::string_view other);

/// Locks the .lock file of a run, unless another process has it.
/// @param advice  for the message: "by another run ({}); choose another --run.out or stop it"
/// @return 0, or the error number of a file system without locks
/// @throws InvalidArgument naming the holder
int lock_run(const comm::FileDescriptor& lock, const std::filesystem::path& run,
             std::string_view advice);

/// Whether a run's directory exists and is unlocked.
bool is_idle_run(const std::filesystem::path& path);

}  // namespace tessera::train
