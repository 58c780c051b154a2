// Makes the calls of a recorded step, one after the other.
#include <cstdint>

using Again = void (*)(const int64_t* words);

// `calls` has, for each call, the function's address, how many words its arguments are, and these.
extern "C" void starling_replay(const int64_t* calls, int64_t count) {
  for (int64_t i = 0; i < count; ++i, calls += 2 + calls[1]) reinterpret_cast<Again>(calls[0])(calls + 2);
}
