// Prepares attention's inputs from the fused projection: per-head norm, rotary embedding, and keys and values to the cache.
#include <cmath>

#include "parallel.h"
#include "cache_rows.h"
#include "replay.h"

namespace starling {
namespace {

constexpr int64_t kMaxDim = 512;

template <typename T>
void store_scaled(T* out, Floats v, float, Lanes lanes) {
  store16(out, v, lanes);
}
void store_scaled(fp8* out, Floats v, float by, Lanes lanes) { store16(out, v * splat16(by), lanes); }

// C is what the cache holds: T, or fp8, as T times `keys_by` and `values_by`, or rows with scales. W is what weights of norms are:
// T, or float, where a row is rounded to T behind its weight alone.
template <typename T, typename C, typename W>
struct Heads {
  const T* qkv;  // [tokens][(heads + 2 kv_heads) * dim], in rows of `stride`
  int64_t stride;
  int64_t heads, kv_heads, dim;
  const float* cos_sin;  // [positions][rotary]: cosines, then sines
  int64_t rotary;
  const W* q_norm;  // [dim] or null
  const W* k_norm;
  float eps;
  C* kv;  // blocks of [2][kv_heads][block_size][row_size]
  int64_t block_stride;  // elements from one block to the next
  int64_t block_size;
  T* q;  // [tokens][heads][dim]
  float keys_by, values_by;

  void run(int64_t token, int64_t position, int64_t slot) const {
    const T* row = qkv + token * stride;
    const float* cosines = cos_sin + position * rotary;
    for (int64_t h = 0; h < heads; ++h) rotate(row + h * dim, q_norm, cosines, q + (token * heads + h) * dim, 1);
    if (slot < 0) return;
    const int64_t size = row_size<C>(dim), head_size = block_size * size;
    C* keys = kv + slot / block_size * block_stride + slot % block_size * size;
    C* values = keys + kv_heads * head_size;
    for (int64_t h = 0; h < kv_heads; ++h) {
      rotate_key(row + (heads + h) * dim, cosines, keys + h * head_size);
      copy(row + (heads + kv_heads + h) * dim, values + h * head_size);
    }
  }

 private:
  void rotate_key(const T* in, const float* cosines, C* out) const {
    if constexpr (kIsRow<C>) {
      T rotated[kMaxDim + 16];
      rotate(in, k_norm, cosines, rotated, 1);
      store_row(rotated, dim, out);
    } else {
      rotate(in, k_norm, cosines, out, keys_by);
    }
  }

  void copy(const T* in, int8_code* out) const { store_row(in, dim, out); }
  void copy(const T* in, int4_pair* out) const { store_row(in, dim, out); }
  void copy(const T* in, T* out) const { std::memcpy(out, in, dim * sizeof(T)); }
  void copy(const T* in, fp8* out) const {
    for (int64_t i = 0; i < dim; i += 16)
      store_scaled(out + i, load16(in + i, first_lanes(dim - i)), values_by, first_lanes(dim - i));
  }

  // One head, normalised if `norm` says how, then rotated: element i with element i + rotary / 2.
  template <typename Out>
  void rotate(const T* in, const W* norm, const float* cosines, Out* out, float scaled_by) const {
    alignas(64) float x[kMaxDim + 16];
    const float by = norm ? inverse_rms(in) : 1.0f;
    for (int64_t i = 0; i < dim; i += 16) {
      const Lanes lanes = first_lanes(dim - i);
      Floats v = load16(in + i, lanes);
      if (norm) {
        const Floats unit = rounded<W>(v * splat16(by));
        v = rounded<T>(unit * load16(norm + i, lanes));
      }
      store16(x + i, v);
    }
    const int64_t half = rotary / 2;
    for (int64_t i = 0; i < half; i += 16) {
      const Lanes lanes = first_lanes(half - i);
      const Floats cosine = load16(cosines + i, lanes), sine = load16(cosines + half + i, lanes);
      const Floats low = load16(x + i), high = load16(x + half + i, lanes);
      store_scaled(out + i, low * cosine - high * sine, scaled_by, lanes);
      store_scaled(out + half + i, high * cosine + low * sine, scaled_by, lanes);
    }
    for (int64_t i = rotary; i < dim; i += 16)
      store_scaled(out + i, load16(x + i, first_lanes(dim - i)), scaled_by, first_lanes(dim - i));
  }

  float inverse_rms(const T* in) const {
    Floats squares = splat16(0.0f);
    for (int64_t i = 0; i < dim; i += 16) {
      const Floats v = load16(in + i, first_lanes(dim - i));
      squares = multiply_add(v, v, squares);
    }
    return 1.0f / std::sqrt(sum_of(squares) / static_cast<float>(dim) + eps);
  }
};

// One head in place: rotated, element i with i + dim / 2, then normalised, and rounded once.
template <typename T>
void rotate_and_norm(T* head, int64_t dim, const float* cosines, const float* weight, float eps) {
  alignas(64) float x[kMaxDim + 16];
  const int64_t half = dim / 2;
  Floats squares = splat16(0.0f);
  for (int64_t i = 0; i < half; i += 16) {
    const Lanes lanes = first_lanes(half - i);
    const Floats cosine = load16(cosines + i, lanes), sine = load16(cosines + half + i, lanes);
    const Floats low = load16(head + i, lanes), high = load16(head + half + i, lanes);
    const Floats first = low * cosine - high * sine, second = high * cosine + low * sine;
    squares = multiply_add(first, first, multiply_add(second, second, squares));
    store16(x + i, first, lanes);
    store16(x + half + i, second, lanes);
  }
  const Floats by = splat16(1.0f / std::sqrt(sum_of(squares) / static_cast<float>(dim) + eps));
  for (int64_t i = 0; i < dim; i += 16) {
    const Lanes lanes = first_lanes(dim - i);
    store16(head + i, load16(x + i, lanes) * by * load16(weight + i, lanes), lanes);
  }
}

}  // namespace
}  // namespace starling

using namespace starling;

extern "C" {

// `cache` is the kind of the cache; one of fp8 holds keys times keys_by and values times values_by. positions are int64 or int32.
// block_stride is in elements of the cache. slots [tokens] are block * block_size + offset, or -1 to store nothing. `wide`: weights of
// the norms are float.
void starling_qk_norm_rope_store(const void* qkv, int64_t stride, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim,
                                 const void* positions, int wide_positions, const float* cos_sin, int64_t rotary,
                                 const void* q_norm, const void* k_norm, float eps, void* kv, int64_t block_stride,
                                 int64_t block_size, const int64_t* slots, void* q, float keys_by, float values_by,
                                 int fp32, int cache, int wide, int threads) {
  with_types(fp32, cache, [&](auto type, auto cached) {
    using T = decltype(type);
    using C = decltype(cached);
    const auto run = [&](auto weights) {
      using W = decltype(weights);
      const Heads<T, C, W> work{static_cast<const T*>(qkv),    stride, heads, kv_heads, dim, cos_sin, rotary,
                                static_cast<const W*>(q_norm), static_cast<const W*>(k_norm), eps,
                                static_cast<C*>(kv),           block_stride, block_size, static_cast<T*>(q), keys_by,
                                values_by};
      const int64_t bytes = tokens * (heads + 2 * kv_heads) * dim * 2 * sizeof(T);
      parallel_for(tokens, threads_for(tokens, bytes, threads), [&](int64_t t) {
        work.run(t, wide_positions ? static_cast<const int64_t*>(positions)[t] : static_cast<const int32_t*>(positions)[t],
                 slots[t]);
      });
    };
    wide ? run(float{}) : run(T{});
  });
}

// Rotates and then normalises, in place, the first heads of rows of their stride: `heads` of queries by weights [dim], `kv_heads` of
// keys by those behind.
void starling_rotate_and_norm(void* qkv, int64_t stride, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim,
                              const int64_t* positions, const float* cos_sin, const float* weights, float eps, int fp32, int threads) {
  const auto run = [&](auto type) {
    using T = decltype(type);
    const int64_t all = heads + kv_heads;
    parallel_for(tokens, threads_for(tokens, tokens * all * dim * 2 * sizeof(T), threads), [&](int64_t t) {
      T* row = static_cast<T*>(qkv) + t * stride;
      for (int64_t h = 0; h < all; ++h)
        rotate_and_norm(row + h * dim, dim, cos_sin + positions[t] * dim, weights + (h < heads ? 0 : dim), eps);
    });
  };
  fp32 ? run(float{}) : run(bf16{});
}

}  // extern "C"

STARLING_RECORDABLE(starling_rotate_and_norm)
STARLING_RECORDABLE(starling_qk_norm_rope_store)
