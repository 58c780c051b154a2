// Calls functions of a kernel library for a program on another architecture, which sends memory and arguments over stdin and gets
// the memory back over stdout. Runs under qemu-user.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

void read_all(void* to, size_t bytes) {
  char* at = static_cast<char*>(to);
  for (ssize_t n; bytes > 0; at += n, bytes -= n)
    if ((n = read(0, at, bytes)) <= 0) std::exit(0);
}
void write_all(const void* from, size_t bytes) {
  const char* at = static_cast<const char*>(from);
  for (ssize_t n; bytes > 0; at += n, bytes -= n)
    if ((n = write(1, at, bytes)) <= 0) std::exit(1);
}
int64_t read_number() {
  int64_t value;
  read_all(&value, sizeof value);
  return value;
}

}  // namespace

// AAPCS64 passes the first eight whole numbers and the first eight floating-point ones in registers, and further whole numbers on
// the stack in 8 bytes each, whatever their order among one another. So one type of function serves for all.
typedef int64_t (*Function)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, double, double, double, double,
                            double, double, double, double, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                            int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                            int64_t, int64_t, int64_t, int64_t, int64_t);

int main(int, char** argv) {
  void* library = dlopen(argv[1], RTLD_NOW);
  if (library == nullptr) return std::fprintf(stderr, "%s\n", dlerror()), 1;
  while (true) {
    char name[64];
    read_all(name, sizeof name);
    std::vector<std::pair<char*, int64_t>> regions(read_number());
    for (auto& [memory, bytes] : regions) {
      bytes = read_number();
      memory = static_cast<char*>(std::aligned_alloc(64, (bytes + 127) / 64 * 64));
      read_all(memory, bytes);
    }
    int64_t whole[32] = {};
    double floating[8] = {};
    const int64_t wholes = read_number();
    for (int64_t i = 0; i < wholes; ++i) {  // a region and an offset, or -1 and a number
      const int64_t region = read_number(), value = read_number();
      whole[i] = region < 0 ? value : reinterpret_cast<int64_t>(regions[region].first + value);
    }
    const int64_t floatings = read_number();
    for (int64_t i = 0; i < floatings; ++i) read_all(&floating[i], sizeof floating[i]);
    const Function function = reinterpret_cast<Function>(dlsym(library, name));
    const int64_t* w = whole;
    const double* f = floating;
    const int64_t result =
        function(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], w[8], w[9], w[10],
                 w[11], w[12], w[13], w[14], w[15], w[16], w[17], w[18], w[19], w[20], w[21], w[22], w[23],
                 w[24], w[25], w[26], w[27], w[28], w[29], w[30], w[31]);
    write_all(&result, sizeof result);
    for (const auto& [memory, bytes] : regions) {
      write_all(memory, bytes);
      std::free(memory);
    }
  }
}
