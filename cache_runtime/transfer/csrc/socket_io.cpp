#include "socket_io.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <string>

namespace pdmesh::transfer {
namespace {

[[noreturn]] void fail(const char* what) {
  throw ConnectionLost(std::string(what) + ": " + std::strerror(errno));
}

}  // namespace

bool receive_all(int descriptor, void* buffer, std::size_t num_bytes) {
  std::size_t num_received = 0;
  while (num_received < num_bytes) {
    const ssize_t received =
        recv(descriptor, static_cast<char*>(buffer) + num_received, num_bytes - num_received, MSG_WAITALL);
    if (received < 0 && errno == EINTR) continue;
    if (received < 0) fail("receiving");
    if (received == 0 && num_received == 0) return false;
    if (received == 0) throw ConnectionLost("the peer closed the connection inside a frame");
    num_received += static_cast<std::size_t>(received);
  }
  return true;
}

void send_all(int descriptor, const void* buffer, std::size_t num_bytes) {
  std::size_t num_sent = 0;
  while (num_sent < num_bytes) {
    const ssize_t sent =
        send(descriptor, static_cast<const char*>(buffer) + num_sent, num_bytes - num_sent, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) fail("sending");
    num_sent += static_cast<std::size_t>(sent);
  }
}

std::size_t receive_some(int descriptor, std::span<iovec> buffers) {
  msghdr message{};
  message.msg_iov = buffers.data();
  message.msg_iovlen = buffers.size();
  const ssize_t received = recvmsg(descriptor, &message, MSG_DONTWAIT);
  if (received == 0) throw ConnectionLost("the peer closed the connection");
  if (received > 0) return static_cast<std::size_t>(received);
  if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) fail("receiving");
  return 0;
}

std::size_t send_some(int descriptor, std::span<iovec> buffers) {
  msghdr message{};
  message.msg_iov = buffers.data();
  message.msg_iovlen = buffers.size();
  const ssize_t sent = sendmsg(descriptor, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent >= 0) return static_cast<std::size_t>(sent);
  if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) fail("sending");
  return 0;
}

void wait_readable(int descriptor) {
  pollfd wanted{descriptor, POLLIN, 0};
  while (poll(&wanted, 1, -1) < 0) {
    if (errno != EINTR) fail("waiting");
  }
}

}  // namespace pdmesh::transfer
