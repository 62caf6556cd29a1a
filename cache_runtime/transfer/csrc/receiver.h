// The receiving end of one connection: takes batches, places what is granted, throws the rest away, answers.
//
// Trusts nothing that arrives: a frame that breaks a bound ends the connection, a piece that no live grant
// holds is dropped and counted. Runs on one thread of its own; knows no interpreter.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "grant_table.h"

namespace pdmesh::transfer {

// Memory of the writer as it is mapped here.
struct SharedSource {
  std::uint64_t peer_address;
  std::uint64_t num_bytes;
  const std::byte* here;
};

class Receiver {
 public:
  // `descriptor`: a connected, blocking stream socket, which stays the caller's. With `is_shared` bytes are
  // copied from `sources` and from nowhere else, otherwise they follow in the stream.
  Receiver(std::shared_ptr<GrantTable> grants, int descriptor, bool is_shared,
           std::vector<SharedSource> sources);

  // Serves until the connection ends, which another thread brings about by shutting it down. Returns why it
  // ended, nothing when the writer closed it between frames.
  std::string serve();

 private:
  struct Placing;

  bool take_batch();
  void check_pieces(const BatchHeader& header) const;
  const std::byte* find_source(const Piece& piece) const;
  void copy_pieces(Placing& placing) const;
  void receive_pieces(Placing& placing);
  void gather_buffers(const Placing& placing);
  void append_buffer(std::byte* begin, std::size_t num_bytes);
  void note_received(Grant& grant, std::size_t num_bytes) const;
  void advance(Placing& placing, std::size_t num_bytes) const;

  std::shared_ptr<GrantTable> grants_;
  int descriptor_;
  bool is_shared_;
  std::vector<SharedSource> sources_;
  std::uint64_t next_batch_ = 0;
  std::vector<Piece> pieces_;
  std::vector<iovec> buffers_;
  std::vector<std::byte> waste_;  // where bytes go that are not granted
};

}  // namespace pdmesh::transfer
