// Feeds a fuzz target without a fuzzer: `PROGRAM [num_inputs [first_seed]]` makes that many pseudo-random
// inputs, the same ones in every run; `PROGRAM @FILE...` replays what a fuzzer found. A finding ends the
// process with SIGABRT and the seed to repeat it with.
#include <algorithm>
#include <array>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

constexpr std::uint64_t kDefaultNumInputs = 1000;
constexpr std::uint64_t kMaxInputBytes = 800;

volatile std::sig_atomic_t is_seed_known = 0;
std::uint64_t current_seed;

// An xorshift generator; equal seeds give equal bytes everywhere.
class Bytes {
 public:
  explicit Bytes(std::uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ULL + 1) {}

  std::uint64_t Next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return (state_ * 0x2545f4914f6cdd1dULL) >> 32;
  }

 private:
  std::uint64_t state_;
};

void SayHowToRepeat(int) {
  if (is_seed_known != 0) {
    std::fprintf(stderr, "repeat with the arguments: 1 %llu\n",
                 static_cast<unsigned long long>(current_seed));
  }
}

void RunSeed(std::uint64_t seed) {
  Bytes bytes(seed);
  std::vector<std::uint8_t> input(bytes.Next() % kMaxInputBytes);
  std::generate(input.begin(), input.end(), [&] { return static_cast<std::uint8_t>(bytes.Next()); });
  current_seed = seed;
  is_seed_known = 1;
  LLVMFuzzerTestOneInput(input.data(), input.size());
}

bool RunFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    std::fprintf(stderr, "cannot read %s\n", path.c_str());
    return false;
  }
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const std::vector<std::uint8_t> input(bytes.begin(), bytes.end());
  LLVMFuzzerTestOneInput(input.data(), input.size());
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGABRT, SayHowToRepeat);
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (!arguments.empty() && arguments[0][0] == '@') {
    const bool is_all_read = std::all_of(arguments.begin(), arguments.end(), [](const std::string& argument) {
      return RunFile(argument.substr(1));
    });
    return is_all_read ? EXIT_SUCCESS : EXIT_FAILURE;
  }
  const std::uint64_t num_inputs = arguments.empty() ? kDefaultNumInputs : std::stoull(arguments[0]);
  const std::uint64_t first_seed = arguments.size() < 2 ? 0 : std::stoull(arguments[1]);
  for (std::uint64_t seed = first_seed; seed < first_seed + num_inputs; ++seed) {
    RunSeed(seed);
  }
  std::printf("%llu inputs, no finding\n", static_cast<unsigned long long>(num_inputs));
  return EXIT_SUCCESS;
}
