#include "tests/support/virtual_network.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <net/if_arp.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>

namespace tessera::test {
namespace {

using comm::FileDescriptor;

constexpr std::size_t kMaxFrame = 2048;  // an Ethernet frame has 1514 bytes
constexpr std::chrono::milliseconds kTick{20};
constexpr const char* kDevice = "lan0";

void check(bool done, const std::string& what) {
  if (!done) throw NoVirtualNetwork("cannot " + what + ": " + std::strerror(errno));
}

FileDescriptor open_file(const char* path) {
  FileDescriptor fd(::open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK));
  if (!fd) fd = FileDescriptor(::open(path, O_RDONLY | O_CLOEXEC));
  check(static_cast<bool>(fd), std::string("open ") + path);
  return fd;
}

// On a new thread, so that the caller stays in its namespace.
void on_thread(const std::function<void()>& body) {
  std::exception_ptr error;
  std::thread([&] {
    try {
      body();
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  if (error) std::rethrow_exception(error);
}

ifreq device(const char* name) {
  ifreq request{};
  std::strncpy(request.ifr_name, name, IFNAMSIZ - 1);
  return request;
}

void set_address(int socket, unsigned long what, const std::string& address) {
  ifreq request = device(kDevice);
  auto* to = reinterpret_cast<sockaddr_in*>(&request.ifr_addr);
  to->sin_family = AF_INET;
  ::inet_pton(AF_INET, address.c_str(), &to->sin_addr);
  check(::ioctl(socket, what, &request) == 0, "give a device an address");
}

void bring_up(int socket, const char* name) {
  ifreq request = device(name);
  request.ifr_flags = IFF_UP | IFF_RUNNING;
  check(::ioctl(socket, SIOCSIFFLAGS, &request) == 0, std::string("bring up ") + name);
}

// MAC addresses 02:00:00:00:00:NN: the switch needs no learning.
constexpr std::size_t kMacBytes = 6;
void set_mac(int socket, int number) {
  ifreq request = device(kDevice);
  request.ifr_hwaddr.sa_family = ARPHRD_ETHER;
  request.ifr_hwaddr.sa_data[0] = 2;
  request.ifr_hwaddr.sa_data[kMacBytes - 1] = static_cast<char>(number);
  check(::ioctl(socket, SIOCSIFHWADDR, &request) == 0, "set a device's Ethernet address");
}

}  // namespace

VirtualNetwork::VirtualNetwork(int hosts) {
  hosts_.resize(static_cast<std::size_t>(hosts));
  for (int i = 0; i < hosts; ++i) {
    Host& host = hosts_[static_cast<std::size_t>(i)];
    on_thread([&] { make_host(i, host); });
  }
  switch_ = std::thread([this] { serve(); });
}

VirtualNetwork::~VirtualNetwork() {
  stop_.store(true);
  switch_.join();
}

void VirtualNetwork::make_host(int number, Host& host) {
  check(::unshare(CLONE_NEWNET | CLONE_NEWUTS) == 0, "make network namespaces");
  const std::string own_name = name(number);
  check(::sethostname(own_name.data(), own_name.size()) == 0, "name a host");
  host.network = open_file("/proc/thread-self/ns/net");
  host.names = open_file("/proc/thread-self/ns/uts");
  host.tap = open_file("/dev/net/tun");
  ifreq tap = device(kDevice);
  tap.ifr_flags = IFF_TAP | IFF_NO_PI;
  check(::ioctl(host.tap.get(), TUNSETIFF, &tap) == 0, "make a TAP device");
  const FileDescriptor socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  check(static_cast<bool>(socket), "open a socket");
  set_mac(socket.get(), number);
  set_address(socket.get(), SIOCSIFADDR, address(number));
  set_address(socket.get(), SIOCSIFNETMASK, "255.255.255.0");
  bring_up(socket.get(), kDevice);
  bring_up(socket.get(), "lo");
}

void VirtualNetwork::on(int host, const std::function<void()>& body) const {
  const Host& there = hosts_.at(static_cast<std::size_t>(host));
  on_thread([&] {
    check(::setns(there.network.get(), CLONE_NEWNET) == 0 &&
              ::setns(there.names.get(), CLONE_NEWUTS) == 0,
          "enter a namespace");
    body();
  });
}

void VirtualNetwork::set_link(int host, Link link) {
  const std::lock_guard lock(mutex_);
  hosts_.at(static_cast<std::size_t>(host)).link = link;
}

void VirtualNetwork::cut_between(int a, int b) {
  const std::lock_guard lock(mutex_);
  apart_.insert(std::minmax(a, b));
}

void VirtualNetwork::serve() {
  std::vector<pollfd> taps;
  for (const Host& host : hosts_) taps.push_back({host.tap.get(), POLLIN, 0});
  std::string bytes(kMaxFrame, '\0');
  while (!stop_.load()) {
    auto wait = kTick;
    if (!under_way_.empty()) {
      const auto left =
          std::chrono::ceil<std::chrono::milliseconds>(under_way_.front().due - Clock::now());
      wait = std::clamp(left, std::chrono::milliseconds(0), kTick);
    }
    ::poll(taps.data(), taps.size(), static_cast<int>(wait.count()));
    for (std::size_t from = 0; from < taps.size(); ++from) {
      if (taps[from].revents == 0) continue;
      const ssize_t n = ::read(taps[from].fd, bytes.data(), bytes.size());
      if (n > 0) pass_on(from, bytes.substr(0, static_cast<std::size_t>(n)));
    }
    deliver(Clock::now());
  }
}

// Delivers to the frame's destination, or to all hosts for broadcast and multicast.
void VirtualNetwork::pass_on(std::size_t from, const std::string& frame) {
  if (frame.size() < kMacBytes) return;
  const bool to_all = (frame[0] & 1) != 0;
  const auto receiver = std::size_t{static_cast<unsigned char>(frame[kMacBytes - 1])};
  const std::lock_guard lock(mutex_);
  const auto is_lost = [&](const Link& link) {
    return std::uniform_real_distribution<double>(0, 1)(random_) < link.loss;
  };
  if (is_lost(hosts_[from].link)) return;
  const bool is_ip = frame.size() > 2 * kMacBytes + 1 && frame[2 * kMacBytes] == 0x08 &&
                     frame[2 * kMacBytes + 1] == 0x00;
  for (std::size_t to = 0; to < hosts_.size(); ++to) {
    if (to == from || (!to_all && to != receiver) || is_lost(hosts_[to].link)) continue;
    if (is_ip && apart_.contains(std::minmax(static_cast<int>(from), static_cast<int>(to))))
      continue;
    const auto due = Clock::now() + hosts_[from].link.delay + hosts_[to].link.delay;
    const auto after = std::find_if(under_way_.rbegin(), under_way_.rend(),
                                    [&](const Frame& other) { return other.due <= due; });
    under_way_.insert(after.base(), {due, to, frame});
  }
}

void VirtualNetwork::deliver(Clock::time_point now) {
  while (!under_way_.empty() && under_way_.front().due <= now) {
    const Frame& frame = under_way_.front();
    // A full queue drops the frame, as a switch does.
    [[maybe_unused]] const ssize_t n =
        ::write(hosts_[frame.to].tap.get(), frame.bytes.data(), frame.bytes.size());
    under_way_.pop_front();
  }
}

}  // namespace tessera::test
