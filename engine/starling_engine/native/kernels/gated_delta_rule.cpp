// The gated delta rule (arXiv 2412.06464, eq. 10). Columns of a head's state do not know of each other, so a block of them stays in
// the first cache while it runs a piece of the sequence, token by token. A decode is a piece of one token.
//
// With S the state before a token, d its decay and r its rate of learning:
//
//   change = r (v - d S'k),   out = d S'q + (k'q) change,   S := d S + k change'
//
// A token's pass over the block makes both products with S, and writes the change of the token before it on the way. The decay
// costs nothing: S is kept divided by the product of decays, and multiplied by it where that has become small.
//
// Where each row of S has a decay of its own (Kimi Delta Attention, arXiv 2510.26692), d is a vector: it multiplies k and q in
// the products with S, and rows where the change is written.
#include <cmath>
#include <type_traits>

#include "parallel.h"
#include "recurrent_state.h"
#include "replay.h"
#include "simd.h"

namespace starling {
namespace {

constexpr int kColumns = 16;
// Sums of each product that are made side by side, for as many registers as hide how long an addition takes.
constexpr int kChains = 4 / kParts;
// Tokens whose queries and keys are made ready at once, for all columns.
constexpr int64_t kPiece = 32;
// Rows of the state that a decode multiplies at a time, and how many before it does they are fetched.
constexpr int64_t kRows = 4, kRowsAhead = 16;
constexpr float kSmall = 0x1p-40f;
constexpr float kLengthEps = 1e-6f;

// How the state is read before a token: stored * scale + key * change.
struct Pending {
  const float* key;
  Floats change;
  float scale;
};

// The other ways to scale a row: not at all, and each by a number of its own.
struct Unscaled {
  Floats operator()(int64_t, Floats s) const { return s; }
};
struct ByRow {
  const float* scale;
  Floats operator()(int64_t r, Floats s) const { return s * splat16(scale[r]); }
};
struct ByScale {
  float scale;
  Floats operator()(int64_t, Floats s) const { return s * splat16(scale); }
};

// A token's inputs, the same for all columns of a head. decay is at most 1; where rows have theirs, it is 1.
struct Gates {
  float decay, rate, key_query;
};

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// The products of a block of the state with a key and a query.
struct Products {
  Floats with_key, with_query;
};

// Takes rows of the state from `read(row)`, and writes them to `block` with the pending change, scaled by `scaled(row, values)`.
template <typename Read, typename Scaled>
inline Products pass(int64_t rows, const Read& read, const Scaled& scaled, const Pending& pending, float* block, const float* key,
                     const float* query) {
  const Floats change = pending.change;
  Products sums[kChains];
  for (Products& each : sums) each = {splat16(0.0f), splat16(0.0f)};
  const auto add = [&](int64_t r, Products& to) __attribute__((always_inline)) {
    const Floats s = multiply_add(splat16(pending.key[r]), change, scaled(r, read(r)));
    store16(block + r * kColumns, s);
    to.with_key = multiply_add(splat16(key[r]), s, to.with_key);
    to.with_query = multiply_add(splat16(query[r]), s, to.with_query);
  };
  int64_t r = 0;
  for (; r + kChains <= rows; r += kChains)
#pragma GCC unroll 4
    for (int i = 0; i < kChains; ++i) add(r + i, sums[i]);
  for (; r < rows; ++r) add(r, sums[0]);
  for (int i = 1; i < kChains; ++i) sums[0] = {sums[0].with_key + sums[i].with_key, sums[0].with_query + sums[i].with_query};
  return sums[0];
}

template <typename T, bool kRowDecays>
struct DeltaRule {
  const T* q;  // [tokens][key_heads][key_dim], in rows of q_stride
  const T* k;
  const T* v;  // [tokens][value_heads][value_dim]
  const T* a;  // [tokens][value_heads], or [tokens][value_heads][key_dim] where rows have decays of their own
  const T* b;  // [tokens][value_heads]
  int64_t q_stride, k_stride, v_stride, a_stride, b_stride;
  const float* a_log;
  const float* dt_bias;  // as a
  float rate_scale;
  int64_t key_heads, value_heads, key_dim, value_dim;
  T* out;
  StateRows state;  // value_heads rows
  StepSequences step;

  int64_t blocks() const { return ceil_div(value_dim, kColumns); }

  // Runs blocks of columns [begin, end) of a head through a sequence's tokens.
  void run(int64_t s, int64_t head, int64_t begin, int64_t end) const {
    const int64_t row = ceil_div(key_dim, 16) * 16, width = (end - begin) * kColumns, tokens = step.run(s);
    const int64_t block_size = key_dim * kColumns, start = begin * kColumns, at = head * value_dim + start;
    const int64_t columns = std::min(width, value_dim - start);
    // Between pieces all blocks are kept; of one piece, only that at work.
    const int64_t kept = tokens > kPiece ? end - begin : 1;
    Scratch& scratch = Scratch::mine();
    constexpr int64_t kVectors = kRowDecays ? 4 : 2;
    scratch.reset((kPiece * (kVectors * row + width) + kept * block_size) * sizeof(float) + (end - begin) * sizeof(Products));
    float* queries = scratch.take<float>(kPiece * row);
    float* keys = scratch.take<float>(kPiece * row);
    float* decays = kRowDecays ? scratch.take<float>(kPiece * row) : nullptr;
    float* decayed_keys = kRowDecays ? scratch.take<float>(kPiece * row) : keys;
    float* values = scratch.take<float>(kPiece * width);
    float* kept_blocks = scratch.take<float>(kept * block_size);
    float* head_state = state.row(s, head);
    const float forgetting = std::exp(a_log[head]);
    Gates gates[kPiece];
    for (int64_t t = 0; t < tokens; t += kPiece) {
      const int64_t count = std::min(kPiece, tokens - t), token = step.begin(s) + t;
      for (int64_t i = 0; i < count; ++i) {
        gates[i] = prepare(token + i, head, forgetting, queries + i * row, keys + i * row);
        if constexpr (kRowDecays)
          decay_rows(token + i, head, forgetting, keys + i * row, queries + i * row, decays + i * row, decayed_keys + i * row);
        copy(v + (token + i) * v_stride + at, columns, values + i * width);
      }
      const Piece piece{count, row, width, queries, decayed_keys, keys, decays, values, gates};
      if (tokens == 1 && step.takes(s)) {
        run_token(piece, columns, !step.is_first(s), head_state + start);
      } else {
        const bool is_start = t == 0, is_end = t + count == tokens;
        for (int64_t c = 0; c < columns; c += kColumns) {
          float* in_pool = head_state + start + c;
          const float* from = step.is_first(s) ? nullptr : in_pool;
          float* block = kept_blocks + (kept > 1 ? c : 0) * key_dim;
          run_block(piece, c, first_lanes(columns - c), is_start, from, block, is_end && step.takes(s) ? in_pool : nullptr);
        }
      }
      for (int64_t i = 0; i < count; ++i) copy(values + i * width, columns, out + (token + i) * value_heads * value_dim + at);
    }
  }

 private:
  // Some tokens of a sequence.
  struct Piece {
    int64_t count, row, width;
    const float* queries;  // [count][row]: what S is multiplied by
    const float* keys;
    const float* added_keys;  // what the change is multiplied by
    const float* decays;      // of rows that have theirs
    float* values;  // [count][width]; results take their place
    const Gates* gates;
  };

  template <typename From, typename To>
  static void copy(const From* from, int64_t n, To* to) {
    for (int64_t i = 0; i < n; i += 16) store16(to + i, load16(from + i, first_lanes(n - i)), first_lanes(n - i));
  }

  // Writes a token's query and key in fp32, each of length 1, the query divided by the root of its dimension.
  Gates prepare(int64_t token, int64_t head, float forgetting, float* query, float* key) const {
    const int64_t at = head / (value_heads / key_heads) * key_dim;
    normalise(q + token * q_stride + at, 1.0f / std::sqrt(static_cast<float>(key_dim)), query);
    normalise(k + token * k_stride + at, 1.0f, key);
    Floats product = splat16(0.0f);
    for (int64_t i = 0; i < key_dim; i += 16) product = multiply_add(load16(query + i), load16(key + i), product);
    float decay = 1.0f;
    if constexpr (!kRowDecays) decay = std::exp(-forgetting * softplus(to_float(a[token * a_stride + head]) + dt_bias[head]));
    alignas(64) T rate[16];
    store16(rate, splat16(sigmoid(to_float(b[token * b_stride + head]))));
    return {decay, to_float(rate[0]) * rate_scale, sum_of(product)};
  }

  // Writes a token's decays, and multiplies the query and a copy of the key by them.
  void decay_rows(int64_t token, int64_t head, float forgetting, const float* key, float* query, float* decays,
                  float* decayed_key) const {
    const T* gate = a + token * a_stride + head * key_dim;
    const float* shift = dt_bias + head * key_dim;
    for (int64_t i = 0; i < key_dim; i += 16) {
      const Lanes lanes = first_lanes(key_dim - i);
      const Floats decay = exp(splat16(-forgetting) * softplus(load16(gate + i, lanes) + load16(shift + i, lanes)));
      store16(decays + i, decay);
      store16(decayed_key + i, load16(key + i) * decay);
      store16(query + i, load16(query + i) * decay);
    }
  }

  void normalise(const T* in, float by, float* to) const {
    Floats squares = splat16(0.0f);
    for (int64_t i = 0; i < key_dim; i += 16) {
      const Floats x = load16(in + i, first_lanes(key_dim - i));
      squares = multiply_add(x, x, squares);
      store16(to + i, x);
    }
    const Floats scale = splat16(by / std::sqrt(sum_of(squares) + kLengthEps));
    for (int64_t i = 0; i < key_dim; i += 16) store16(to + i, load16(to + i) * scale);
  }

  // A block of columns from `column` on, of which there are `lanes`. It begins as `from` in the pool, or as zeros, where the
  // sequence starts, and is written to the pool if `to` is given.
  void run_block(const Piece& piece, int64_t column, Lanes lanes, bool is_start, const float* from, float* block, float* to) const {
    float product = 1.0f;  // The state is this times what is stored.
    Pending pending{piece.added_keys, splat16(0.0f), 1.0f};
    const auto in_pool = [&](int64_t r) { return from ? load16(from + r * value_dim, lanes) : splat16(0.0f); };
    const auto in_block = [&](int64_t r) { return load16(block + r * kColumns); };
    for (int64_t t = 0; t < piece.count; ++t) {
      const float* key = piece.keys + t * piece.row;
      const float* query = piece.queries + t * piece.row;
      const auto read = [&](auto from, auto scaled) { return pass(key_dim, from, scaled, pending, block, key, query); };
      Products products;
      if (t == 0)
        products = is_start ? read(in_pool, Unscaled{}) : read(in_block, Unscaled{});
      else if constexpr (kRowDecays)
        products = read(in_block, ByRow{piece.decays + (t - 1) * piece.row});
      else
        products = pending.scale < 1.0f ? read(in_block, ByScale{pending.scale}) : read(in_block, Unscaled{});
      product *= piece.gates[t].decay;
      const Floats change = answer(piece.gates[t], product, products, piece.values + t * piece.width + column);
      const float* added_key = piece.added_keys + t * piece.row;
      if (product < kSmall) {
        pending = {added_key, change, product};
        product = 1.0f;
      } else {
        pending = {added_key, change * splat16(1.0f / product), 1.0f};
      }
    }
    const float* last_decays = kRowDecays ? piece.decays + (piece.count - 1) * piece.row : nullptr;
    for (int64_t r = 0; r < key_dim; ++r) {
      const Floats scaled = in_block(r) * splat16(kRowDecays ? last_decays[r] : pending.scale);
      const Floats s = multiply_add(splat16(pending.key[r]), pending.change, scaled) * splat16(product);
      to ? store16(to + r * value_dim, s, lanes) : store16(block + r * kColumns, s);
    }
  }

  // A decode: it reads the state row by row, as it lies in memory, and again to change it. A few rows are multiplied at a time.
  void run_token(const Piece& piece, int64_t columns, bool with_state, float* state) const {
    Products* products = Scratch::mine().take<Products>(ceil_div(columns, kColumns));
    const auto each_block = [&](auto f) {
      for (int64_t c = 0; c < columns; c += kColumns) f(c, products[c / kColumns], first_lanes(columns - c));
    };
    each_block([](int64_t, Products& sums, Lanes) { sums = {splat16(0.0f), splat16(0.0f)}; });
    for (int64_t first = 0; with_state && first < key_dim; first += kRows)
      each_block([&](int64_t c, Products& to, Lanes lanes) {
        Products sums = to;
        for (int64_t r = first; r < std::min(key_dim, first + kRows); ++r) {
          fetch(state + (r + kRowsAhead) * value_dim + c);
          const Floats s = load16(state + r * value_dim + c, lanes);
          sums.with_key = multiply_add(splat16(piece.keys[r]), s, sums.with_key);
          sums.with_query = multiply_add(splat16(piece.queries[r]), s, sums.with_query);
        }
        to = sums;
      });
    const float decay = piece.gates->decay;
    each_block([&](int64_t c, Products& of, Lanes) { of.with_key = answer(*piece.gates, decay, of, piece.values + c); });
    for (int64_t r = 0; r < key_dim; ++r)
      each_block([&](int64_t c, const Products& change, Lanes lanes) {
        float* at = state + r * value_dim + c;
        const Floats s = with_state ? load16(at, lanes) * splat16(kRowDecays ? piece.decays[r] : decay) : splat16(0.0f);
        store16(at, multiply_add(splat16(piece.added_keys[r]), change.with_key, s), lanes);
      });
  }

  // Writes a token's result where its value was, and gives the change of the state.
  static Floats answer(const Gates& gates, float product, const Products& products, float* value) {
    const Floats change = (load16(value) - products.with_key * splat16(product)) * splat16(gates.rate);
    store16(value, multiply_add(change, splat16(gates.key_query), products.with_query * splat16(product)));
    return change;
  }
};

}  // namespace
}  // namespace starling

using namespace starling;

extern "C" {

// q, k, v, a, b are tokens' rows, each with its stride; out [tokens, value_heads, value_dim]. For the state see `StateRows`, for
// `row_decays` a of `DeltaRule`.
void starling_gated_delta_rule(const void* q, const void* k, const void* v, const void* a, const void* b, int64_t q_stride,
                               int64_t k_stride, int64_t v_stride, int64_t a_stride, int64_t b_stride, const float* a_log,
                               const float* dt_bias, float rate_scale, int64_t key_heads, int64_t value_heads,
                               int64_t key_dim, int64_t value_dim, int row_decays, void* out, float* storage, int64_t block_stride, const int32_t* tables,
                               int64_t width, int64_t column, int64_t per_block, int64_t first, const int64_t* slots,
                               const int32_t* query_start, const int32_t* context_lens, const int32_t* taken,
                               int64_t sequences, int fp32, int threads) {
  const StateRows state{storage, block_stride, tables, width, column, per_block, first, key_dim * value_dim};
  const StepSequences step{slots, query_start, context_lens, taken, sequences};
  const auto run = [&](auto type, auto by_row) {
    using T = decltype(type);
    const DeltaRule<T, decltype(by_row)::value> work{
        static_cast<const T*>(q), static_cast<const T*>(k), static_cast<const T*>(v), static_cast<const T*>(a),
        static_cast<const T*>(b), q_stride, k_stride, v_stride, a_stride, b_stride, a_log, dt_bias, rate_scale, key_heads,
        value_heads, key_dim, value_dim, static_cast<T*>(out), state, step};
    // A head's columns share the work of its queries and keys, unless there are too few heads for the threads.
    const int64_t heads = sequences * value_heads, parts = heads < 4 * threads ? work.blocks() : 1;
    const int64_t bytes = step.tokens() * value_heads * key_dim * value_dim * sizeof(float);
    each_in_turn(heads * parts, threads_for(heads * parts, bytes, threads), [&](int64_t i) {
      const int64_t s = i / parts / value_heads, head = i / parts % value_heads;
      const Span blocks = Part{static_cast<int>(i % parts), static_cast<int>(parts)}.of(work.blocks());
      if (step.is_real(s)) work.run(s, head, blocks.begin, blocks.end);
    });
  };
  if (row_decays) return fp32 ? run(float{}, std::true_type{}) : run(bf16{}, std::true_type{});
  fp32 ? run(float{}, std::false_type{}) : run(bf16{}, std::false_type{});
}

}  // extern "C"

STARLING_RECORDABLE(starling_gated_delta_rule)
