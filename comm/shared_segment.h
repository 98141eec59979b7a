#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "comm/control/socket.h"

namespace tessera::comm {

/// Memory shared by processes of one host: a memfd that other processes open through /proc. The
/// system frees it when the last of these processes ends or is killed. The size of /dev/shm does
/// not limit it.
class SharedSegment {
 public:
  /// Allocates all pages, zeroed, so that a lack of memory is an error here and not a SIGBUS later.
  /// @param bytes  rounded up to whole pages
  /// @throws IoError with the system's reason
  static SharedSegment create(std::size_t bytes);
  /// @param address  address() of a segment of any process on this host
  /// @throws IoError if it can't be opened, for example from another container
  static SharedSegment open(const std::string& address);
  /// The same mapping with separate locks, for ranks that are threads.
  /// @throws IoError
  SharedSegment open_again() const;

  /// Argument of open(), valid while this object lives.
  const std::string& address() const { return address_; }
  std::byte* data() const { return memory_.get(); }
  std::size_t bytes() const { return bytes_; }

  /// Locks byte `index` until let_go() or the end of the process. The lock is advisory.
  /// @throws IoError if it is locked already, or the system can't lock memfd files
  void hold(int index);
  void let_go(int index) const noexcept;
  /// Whether another SharedSegment, of any process, has locked byte `index`.
  bool is_held_elsewhere(int index) const noexcept;

 private:
  SharedSegment(FileDescriptor file, std::string address, std::size_t bytes,
                std::shared_ptr<std::byte> memory);
  FileDescriptor file_;
  std::string address_;
  std::size_t bytes_ = 0;
  std::shared_ptr<std::byte> memory_;
};

}  // namespace tessera::comm
