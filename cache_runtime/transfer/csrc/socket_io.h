// Socket calls with their interruptions and errors dealt with.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <span>
#include <stdexcept>

namespace pdmesh::transfer {

// A connection that can be used no more; says why.
class ConnectionLost : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Fills the buffer. False when the peer closed the connection before the first byte. Throws ConnectionLost.
bool receive_all(int descriptor, void* buffer, std::size_t num_bytes);

// Throws ConnectionLost.
void send_all(int descriptor, const void* buffer, std::size_t num_bytes);

// Without waiting: bytes moved, 0 when the socket is not ready. Throws ConnectionLost, on a closed connection
// too.
std::size_t receive_some(int descriptor, std::span<iovec> buffers);
std::size_t send_some(int descriptor, std::span<iovec> buffers);

// Waits until something can be read. Throws ConnectionLost.
void wait_readable(int descriptor);

}  // namespace pdmesh::transfer
