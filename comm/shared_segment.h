#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "comm/control/socket.h"

namespace tessera::comm {

/// Memory that processes of one host share. It has no name in any file system, so nothing is left
/// of it when they are gone, however they ended; and it does not come out of /dev/shm, which
/// containers keep small. Others reach it through /proc while a process that has it lives.
class SharedSegment {
 public:
  /// Takes all its pages now, zeroed: too little memory is an error here, never a signal later.
  /// @param bytes  rounded up to whole pages
  /// @throws IoError with the system's reason
  static SharedSegment create(std::size_t bytes);
  /// @param address  of a segment of another process, or of this one
  /// @throws IoError if it can't be reached from here, say from another container
  static SharedSegment open(const std::string& address);
  /// The same memory at the same place, as a holder of its own: for ranks that are threads.
  /// @throws IoError
  SharedSegment open_again() const;

  /// What open() needs; good as long as this object lives.
  const std::string& address() const { return address_; }
  std::byte* data() const { return memory_.get(); }
  std::size_t bytes() const { return bytes_; }

  /// Marks place `index` as held by this object, until let_go() or the end of the process, by
  /// whatever cause. @throws IoError if it is taken, or the system has no such locks
  void hold(int index);
  void let_go(int index) const noexcept;
  /// Whether another object holds the place, of whatever process.
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
