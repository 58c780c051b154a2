// Calls of kernels that were recorded, and are made again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace starling {

// An argument out of its word: an address, a whole number, or the bits of a double.
template <typename T>
inline T argument(int64_t word) {
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<T>(word);
  } else if constexpr (std::is_floating_point_v<T>) {
    double value;
    std::memcpy(&value, &word, sizeof value);
    return static_cast<T>(value);
  } else {
    return static_cast<T>(word);
  }
}

template <typename... A, size_t... I>
inline void call_with(void (*function)(A...), const int64_t* words, std::index_sequence<I...>) {
  function(argument<A>(words[I])...);
}
template <typename... A>
inline void call_with(void (*function)(A...), const int64_t* words) {
  call_with(function, words, std::index_sequence_for<A...>{});
}

}  // namespace starling

// Makes `name`_again(words), which calls the function with its arguments. It stands behind the function's definition.
#define STARLING_RECORDABLE(name) \
  extern "C" void name##_again(const int64_t* words) { starling::call_with(name, words); }
