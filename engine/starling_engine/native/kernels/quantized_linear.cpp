// y = x W^T + b with W in 2 to 8 bits: some columns of a row share a scale (and perhaps a minimum). Rows of x are quantized to 8
// bits, by groups of as many columns or less, so that products and their sums are whole numbers within a group. (The arithmetic is
// llama.cpp's for its types of 32.)
//
// W is packed in blocks of 16 rows. A quad is 4 columns of them: 64 bytes, one a weight, which one instruction multiplies by 4
// bytes of x. Codes of less than 8 bits are cut in two fields, low and high, and each field of a group is a plane of lines of 64
// bytes. A line has the fields of as many quads as fit in 8 bits: with 4 bits, line l has quad l in the low halves of its bytes, and
// in the high ones the quad that is half of the group further.
#include "quantized_tiles.h"
#include "replay.h"

namespace starling {
namespace {

// How a weight's codes lie; `Format` in group_quantized.py says what they mean.
template <int BITS, int GROUP, bool TABLE = false>
struct Layout {
  static constexpr int kBits = BITS, kGroup = GROUP, kQuads = GROUP / 4;
  static constexpr int kLow = BITS == 8 ? 8 : BITS >= 4 ? 4 : 2, kHigh = BITS - kLow;
  static constexpr int kLowBytes = GROUP * kBlockCols * kLow / 8, kBytes = GROUP * kBlockCols * BITS / 8;
  static constexpr bool kTable = TABLE, kMatrices = false;
  // Bits of what is multiplied.
  static constexpr int kProductBits = TABLE ? 8 : BITS;
  static_assert(kQuads * kLow % 8 == 0 && kQuads * kHigh % 8 == 0, "lines are whole");
};

// The same codes once they are unpacked: a byte each, with what a table has for them.
template <typename L>
struct Unpacked {
  static constexpr int kGroup = L::kGroup, kQuads = L::kQuads, kLow = 8, kHigh = 0;
  static constexpr int kLowBytes = kGroup * kBlockCols, kBytes = kLowBytes;
  static constexpr bool kTable = false, kMatrices = false;
  static constexpr int kProductBits = L::kProductBits;
};

#ifdef STARLING_MATRICES
// The same as numbers with a sign, for products of matrices: 8 of two columns in a register, and so 8 registers of 16 columns.
template <int GROUP>
struct Matrices {
  static constexpr int kGroup = GROUP, kBytes = GROUP * kBlockCols;
  static constexpr bool kTable = false, kMatrices = true;
};
#endif

#ifdef STARLING_BYTE_PAIRS
// Has a sum in its register before the next product is computed. GCC would compute all products of a block first, and keep them in
// memory: with AVX2 that took 1.1 (8 bits) to 1.5 times (4 bits) as long.
template <typename T>
inline void settle(T& sum) {
  asm("" : "+v"(sum));
}

// Quads by products of bytes that are added in pairs, in 16 bits: those of 8 bits by their magnitudes, or they would not fit.
constexpr bool kSignedBytes = true;
template <int BITS>
struct Quads {
  IReg sum;
  void begin(IReg with) { sum = with; }
  void add(IReg codes, IReg x) {
    if (BITS < 8) {
      sum = sum + add_pairs(multiply_bytes(codes, x));
    } else {
      const IReg numbers = codes ^ static_cast<int32_t>(0x80808080);
      sum = sum + add_pairs(multiply_bytes(magnitudes(numbers), with_signs(x, numbers)));
    }
    settle(sum);
  }
  IReg total() const { return sum; }
};
// The 8 quads of a block fit in 16 bits: 8 * 2 * 15 * 127.
struct ShortQuads {
  IReg before;
  Pairs sum;
  void begin(IReg with) { before = with, sum = Pairs{}; }
  void add(IReg codes, IReg x) {
    sum = sum + multiply_bytes(codes, x);
    settle(sum);
  }
  IReg total() const { return before + add_pairs(sum); }
};
template <>
struct Quads<4> : ShortQuads {};
template <>
struct Quads<2> : ShortQuads {};
#endif

// The fields of WIDTH bits of one quad of 4 columns in each lane, moved up by `up` bits.
template <int WIDTH, int QUADS>
inline IReg field(const uint8_t* plane, int q, int part, int up) {
  constexpr int kLines = QUADS * WIDTH / 8;
  const IReg bytes = load_words(plane + q % kLines * 64 + part * kLanes * 4, kLanes);
  if constexpr (WIDTH == 8) return bytes;
  const int down = q / kLines * WIDTH - up;
  const UReg moved = down >= 0 ? (UReg)bytes >> down : (UReg)bytes << -down;
  return (IReg)(moved & ((1u << WIDTH) - 1) * 0x01010101u << up);
}

// The codes of one quad in each lane, as bytes without sign.
template <typename L>
inline IReg quad(const uint8_t* group, int q, int part, IReg table) {
  IReg codes = field<L::kLow, L::kQuads>(group, q, part, 0);
  if constexpr (L::kHigh > 0) codes |= field<L::kHigh, L::kQuads>(group + L::kLowBytes, q, part, L::kLow);
  return L::kTable ? look_up_bytes(table, codes) : codes;
}

// Few rows wait for memory. With AVX-512 VNNI the hardware alone reads codes in one plane best on EPYC 9004, once scales, a slower
// stream beside them, are fetched: one row in 4 bits reads 1.1 times as fast as with codes fetched. On a Xeon (Sapphire Rapids) it comes
// too late for fewer than 8 bits: a replayed step of the 0.6B shape in int4 takes 0.8 of the time with codes fetched. Other sets
// compute sooner than the hardware fetches ahead, too: on EPYC 7003 (AVX2) one row takes 5 to 20 % less time with codes fetched. More
// rows are bound by their instructions.
constexpr int kFetchingRows = 2, kScalesAhead = 8 * kBlockCols;
#if defined(__x86_64__)
const bool kIntel = __builtin_cpu_is("intel");
#else
constexpr bool kIntel = false;
#endif
// How many bytes further codes are fetched; 0: they are not.
template <typename L>
inline int codes_ahead() {
  if (L::kLow < 8 && kIntel) return 2048;
  return kSignedBytes || L::kHigh > 0 ? 1024 : 0;
}

// Adds the products of a block of columns: 16 rows of codes, and ROWS of a tile of x.
template <typename L, int ROWS>
inline void add_block(const uint8_t* codes, const int8_t* a, IReg table, IReg (&sums)[ROWS][kParts]) {
  if (const int ahead = codes_ahead<L>(); ROWS <= kFetchingRows && ahead > 0)
    for (int at = 0; at < L::kBytes; at += 64) fetch(codes + ahead + at);
  Quads<L::kProductBits> sum[ROWS][kParts];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) sum[i][p].begin(sums[i][p]);
#pragma GCC unroll 8
  for (int q = 0; q < L::kQuads; ++q) {
    IReg weights[kParts];
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) weights[p] = quad<L>(codes, q, p, table);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      int32_t four;
      std::memcpy(&four, a + i * L::kGroup + q * 4, sizeof four);
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) sum[i][p].add(weights[p], IReg{} + four);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) sums[i][p] = sum[i][p].total();
}

#ifdef STARLING_MATRICES
// Begins sums of two rows by two columns: of rows 2i and 2i + 1, with the first two columns of a part in sums[2i], the others next.
// An odd row is its own second one.
template <int ROWS>
inline void begin_matrices(const int32_t* begins, IReg (&sums)[ROWS + ROWS % 2][kParts]) {
  for (int i = 0; i < ROWS; i += 2) {
    const int32_t first = begins[i], second = begins[std::min(i + 1, ROWS - 1)];
    for (int p = 0; p < kParts; ++p) sums[i][p] = sums[i + 1][p] = IReg{first, first, second, second};
  }
}

template <typename L, int ROWS>
inline void add_matrices(const uint8_t* codes, const int8_t* a, IReg (&sums)[ROWS + ROWS % 2][kParts]) {
#pragma GCC unroll 4
  for (int k = 0; k < L::kGroup; k += 8) {
    IReg rows[(ROWS + 1) / 2];
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; i += 2)
      rows[i / 2] = two_rows(a + i * L::kGroup + k, a + std::min(i + 1, ROWS - 1) * L::kGroup + k);
#pragma GCC unroll 8
    for (int j = 0; j < 2 * kParts; ++j) {
      const IReg columns = load_words(codes + (k * 2 * kParts + j * 8) * 2, kLanes);
#pragma GCC unroll 4
      for (int i = 0; i < ROWS; i += 2) sums[i + j % 2][j / 2] = multiply_matrices(sums[i + j % 2][j / 2], rows[i / 2], columns);
    }
  }
}

// Makes them sums of a row each.
template <int ROWS>
inline void separate(IReg (&sums)[ROWS][kParts]) {
  for (int i = 0; i < ROWS; i += 2)
    for (int p = 0; p < kParts; ++p) {
      const IReg a = sums[i][p], b = sums[i + 1][p];
      sums[i][p] = sums_of_first(a, b), sums[i + 1][p] = sums_of_second(a, b);
    }
}
#endif

// The sums of a group of x, whose `span` blocks of columns begin at `codes` and `a`.
template <typename L, int ROWS>
inline void sum_group(const int32_t* begins, const uint8_t* codes, const int8_t* a, int64_t span, IReg table,
                      IReg (&sums)[ROWS][kParts]) {
#ifdef STARLING_MATRICES
  if constexpr (L::kMatrices) {
    IReg both[ROWS + ROWS % 2][kParts];
    begin_matrices<ROWS>(begins, both);
    for (int64_t s = 0; s < span; ++s, codes += L::kBytes, a += ROWS * L::kGroup) add_matrices<L, ROWS>(codes, a, both);
    separate(both);
    for (int i = 0; i < ROWS; ++i)
      for (int p = 0; p < kParts; ++p) sums[i][p] = both[i][p];
    return;
  } else
#endif
  {
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) sums[i][p] = IReg{} + begins[i];
    add_block<L, ROWS>(codes, a, table, sums);
    codes += L::kBytes, a += ROWS * L::kGroup;
    for (int64_t s = 1; s < span; ++s, codes += L::kBytes, a += ROWS * L::kGroup) add_block<L, ROWS>(codes, a, table, sums);
  }
}

// c[rows][16] of the rows from `row` on and one block, whose codes are at `codes`.
template <typename L, int ROWS>
void run_tile(const QuantizedRows& x, int64_t row, const QuantizedWeight& w, int64_t block, const uint8_t* codes, float* c,
              ptrdiff_t c_stride) {
  const Columns& columns = w.columns;
  const uint16_t* scales = w.scales + block * columns.scales() * kBlockCols;
  const uint16_t* minima = w.minima == nullptr ? nullptr : w.minima + (scales - w.scales);
  const int8_t* a = x.codes + row * columns.k;
  const int64_t groups = columns.groups(), span = columns.span, share = columns.share;
  int64_t left = share, side = row * groups;
  const IReg table = L::kTable ? broadcast_bytes(w.table) : IReg{};
  Reg total[ROWS][kParts];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) total[i][p] = splat(0.0f);
  for (int64_t g = 0; g < groups; ++g, side += ROWS) {
    IReg sums[ROWS][kParts];
    sum_group<L, ROWS>(x.begins + side, codes, a, span, table, sums);
    codes += span * L::kBytes, a += span * ROWS * L::kGroup;
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) {
      const Reg scale = load_half(scales + p * kLanes);
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; ++i) {
        const Reg by = scale * splat(x.scales[side + i]);
        total[i][p] = multiply_add(__builtin_convertvector(sums[i][p], Reg), by, total[i][p]);
      }
      if (minima == nullptr) continue;
      const Reg minimum = load_half(minima + p * kLanes);
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; ++i)
        total[i][p] = multiply_add(minimum, splat(x.sums[side + i]), total[i][p]);
    }
    if (--left > 0) continue;
    left = share;
    if (ROWS <= kFetchingRows) fetch(scales + kScalesAhead);
    scales += kBlockCols;
    if (minima == nullptr) continue;
    if (ROWS <= kFetchingRows) fetch(minima + kScalesAhead);
    minima += kBlockCols;
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) store(c + i * c_stride + p * kLanes, total[i][p]);
}

template <typename L, int ROWS>
constexpr RunTile run_with() {
  if constexpr (ROWS <= kQuantizedRows) return run_tile<L, ROWS>;
  return nullptr;
}
template <typename L>
constexpr RunTile kRunTile[8] = {run_with<L, 1>(), run_with<L, 2>(), run_with<L, 3>(), run_with<L, 4>(),
                                 run_with<L, 5>(), run_with<L, 6>(), run_with<L, 7>(), run_with<L, 8>()};

template <typename L>
void unpack_block(const QuantizedWeight& w, const uint8_t* codes, uint8_t* out) {
  const IReg table = L::kTable ? broadcast_bytes(w.table) : IReg{};
  for (int64_t g = 0; g < w.columns.blocks(); ++g, codes += L::kBytes)
#pragma GCC unroll 8
    for (int q = 0; q < L::kQuads; ++q)
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p, out += kLanes * 4) store_words(out, quad<L>(codes, q, p, table));
}

#ifdef STARLING_TILES
// Lines of bytes: 4 columns of 16 rows.
template <typename L>
void unpack_bytes(const QuantizedWeight& w, int64_t block, int64_t first, int64_t count, int8_t* out) {
  typedef uint8_t Bytes __attribute__((vector_size(64)));
  const IReg table = L::kTable ? broadcast_bytes(w.table) : IReg{};
  const Bytes zero = Bytes{} + static_cast<uint8_t>(w.zero);
  const uint8_t* codes = w.codes + (block * w.columns.blocks() + first) * L::kBytes;
  for (int64_t g = 0; g < count; ++g, codes += L::kBytes)
#pragma GCC unroll 8
    for (int q = 0; q < L::kQuads; ++q, out += 64) store_words(out, (IReg)((Bytes)quad<L>(codes, q, 0, table) - zero));
}

// Lines of bf16: pairs of columns of 16 rows.
template <typename L>
void unpack_bf16(const QuantizedWeight& w, int64_t block, int64_t first, int64_t count, bf16* out) {
  const Columns& columns = w.columns;
  const IReg table = L::kTable ? broadcast_bytes(w.table) : IReg{};
  const Reg zero = splat(static_cast<float>(w.zero));
  const auto number = [&](IReg codes, int byte, Reg scale, Reg minimum) {
    const Reg code = __builtin_convertvector((IReg)((UReg)codes >> (8 * byte)) & 0xFF, Reg);
    return multiply_add(code - zero, scale, minimum);
  };
  for (int64_t g = first; g < first + count; ++g) {
    const int64_t at = (block * columns.scales() + g / (columns.span * columns.share)) * kBlockCols;
    const uint8_t* codes = w.codes + (block * columns.blocks() + g) * L::kBytes;
    const Reg scale = load_half(w.scales + at), minimum = w.minima ? load_half(w.minima + at) : splat(0.0f);
#pragma GCC unroll 8
    for (int q = 0; q < L::kQuads; ++q)
      for (int byte = 0; byte < 4; byte += 2, out += kLine<bf16>) {
        const IReg four = quad<L>(codes, q, 0, table);
        store_words(out, pairs_of(number(four, byte, scale, minimum), number(four, byte + 1, scale, minimum)));
      }
  }
}
#endif

#ifdef STARLING_MATRICES
template <typename L>
void unpack_matrices(const QuantizedWeight& w, const uint8_t* codes, uint8_t* out) {
  const IReg table = L::kTable ? broadcast_bytes(w.table) : IReg{};
  const int32_t sign = L::kProductBits == 8 ? static_cast<int32_t>(0x80808080) : 0;
  for (int64_t g = 0; g < w.columns.blocks(); ++g, codes += L::kBytes)
#pragma GCC unroll 4
    for (int q = 0; q < L::kQuads; q += 2)
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p, out += 32) {
        const IReg a = quad<L>(codes, q, p, table) ^ sign, b = quad<L>(codes, q + 1, p, table) ^ sign;
        store_words(out, first_columns(a, b)), store_words(out + 16, last_columns(a, b));
      }
}
#endif

#ifdef STARLING_BYTE_PAIRS
// Codes in two planes or with a table are unpacked first: 1.2 times as fast from 64 rows on, with a table 1.1 (EPYC 7003, AVX2). Those
// in 4 or 2 bits gain nothing.
template <typename L>
constexpr bool kUnpacks = L::kTable || L::kHigh > 0;
#else
template <typename L>
constexpr bool kUnpacks = false;
#endif

template <typename L>
constexpr QuantizedTiles tiles_of() {
  QuantizedTiles tiles{};
  tiles.run = kRunTile<L>;
#ifdef STARLING_MATRICES
  tiles.run_unpacked = kRunTile<Matrices<L::kGroup>>, tiles.unpack = unpack_matrices<L>;
#endif
  if constexpr (kUnpacks<L>) tiles.run_unpacked = kRunTile<Unpacked<L>>, tiles.unpack = unpack_block<L>;
#ifdef STARLING_TILES
  tiles.unpack_bytes = unpack_bytes<L>, tiles.unpack_bf16 = unpack_bf16<L>;
#endif
  return tiles;
}
template <typename L>
constexpr QuantizedTiles kTiles = tiles_of<L>();

// The field of column j of row i of a block.
template <int WIDTH, int GROUP>
int field_at(const uint8_t* plane, int64_t i, int64_t j) {
  constexpr int kLines = GROUP / 4 * WIDTH / 8;
  const int q = static_cast<int>(j / 4);
  return plane[q % kLines * 64 + i * 4 + j % 4] >> (q / kLines * WIDTH) & ((1 << WIDTH) - 1);
}

// Packs the fields of WIDTH bits of a group of one row, which begin at bit `from` of its codes, four at a time.
template <int WIDTH, int GROUP>
void pack_fields(const uint8_t* codes, int from, int64_t i, uint8_t* plane) {
  constexpr int kLines = GROUP / 4 * WIDTH / 8;
  constexpr uint32_t kMask = ((1u << WIDTH) - 1) * 0x01010101u;
  for (int q = 0; q < GROUP / 4; ++q) {
    uint32_t four, line;
    uint8_t* to = plane + q % kLines * 64 + i * 4;
    std::memcpy(&four, codes + q * 4, sizeof four);
    std::memcpy(&line, to, sizeof line);
    line |= (four >> from & kMask) << (q / kLines * WIDTH);
    std::memcpy(to, &line, sizeof line);
  }
}

// Packs a block of 16 rows of codes, one a byte: row i is at rows[i], null past the last.
template <typename L>
void pack_block(const uint8_t* const* rows, int64_t k, uint8_t* out) {
  for (int64_t g = 0; g < k; g += L::kGroup, out += L::kBytes) {
    std::memset(out, 0, L::kBytes);
    for (int64_t i = 0; i < kBlockCols; ++i) {
      if (rows[i] == nullptr) continue;
      pack_fields<L::kLow, L::kGroup>(rows[i] + g, 0, i, out);
      if constexpr (L::kHigh > 0) pack_fields<L::kHigh, L::kGroup>(rows[i] + g, L::kLow, i, out + L::kLowBytes);
    }
  }
}

// Reads row `lane` of a block of 16 -> values [k], where a code of 0 stands for -zero.
template <typename L>
void unpack_row(const QuantizedWeight& w, int64_t block, int64_t lane, int zero, bf16* out) {
  const Columns& columns = w.columns;
  for (int64_t g = 0; g < columns.blocks(); ++g) {
    const int64_t at = block * columns.scales() + g / (columns.span * columns.share);
    const uint8_t* codes = w.codes + (block * columns.blocks() + g) * L::kBytes;
    const float scale = half_to_float(w.scales[at * kBlockCols + lane]);
    const float minimum = w.minima ? half_to_float(w.minima[at * kBlockCols + lane]) : 0.0f;
    alignas(64) float values[L::kGroup];
    for (int64_t j = 0; j < L::kGroup; ++j) {
      int code = field_at<L::kLow, L::kGroup>(codes, lane, j);
      if constexpr (L::kHigh > 0) code |= field_at<L::kHigh, L::kGroup>(codes + L::kLowBytes, lane, j) << L::kLow;
      values[j] = scale * static_cast<float>((L::kTable ? w.table[code] : code) - zero) + minimum;
    }
    for (int64_t j = 0; j < L::kGroup; j += 16) store16(out + g * L::kGroup + j, load16(values + j));
  }
}

// Calls f(Layout) with the layout of these codes.
template <typename F>
void with_layout(int bits, int64_t group, bool table, const F& f) {
  if (bits == 8) return f(Layout<8, 32>{});
  if (bits == 6) return f(Layout<6, 16>{});
  if (bits == 5) return f(Layout<5, 32>{});
  if (bits == 2) return f(Layout<2, 16>{});
  if (group == 16) return table ? f(Layout<4, 16, true>{}) : f(Layout<4, 16>{});
  table ? f(Layout<4, 32, true>{}) : f(Layout<4, 32>{});
}

}  // namespace

int32_t QuantizedWeight::begin() const { return (bits == 8 || table) && kSignedBytes ? 0 : zero; }

const QuantizedTiles& QuantizedWeight::tiles() const {
  const QuantizedTiles* found = nullptr;
  with_layout(bits, columns.block, table != nullptr, [&](auto layout) { found = &kTiles<decltype(layout)>; });
  return *found;
}

}  // namespace starling

using namespace starling;

extern "C" {

// Codes [n, k], one a byte and without sign, and scales [n, k / (size span share)] fp16 (minima the same, or null) -> the packed form.
// `size`, `span` and `share` as in Columns. n is a multiple of 16 where gated: a block then has 8 rows of the gate and 8 of up.
void starling_pack_quantized(const uint8_t* codes, const uint16_t* scales, const uint16_t* minima, const uint8_t* table, int64_t n,
                             int64_t k, int64_t size, int64_t span, int64_t share, int bits, int gated, uint8_t* out,
                             uint16_t* out_scales,
                             uint16_t* out_minima, int threads) {
  const Columns columns{k, size, span, share};
  parallel_for(ceil_div(n, kBlockCols), threads, [&](int64_t block) {
    const uint8_t* rows[kBlockCols];
    for (int64_t i = 0; i < kBlockCols; ++i) {
      const int64_t row = packed_row(block, i, n, gated != 0);
      rows[i] = row < n ? codes + row * k : nullptr;
      const int64_t count = columns.scales();
      for (int64_t g = 0; g < count; ++g) {
        const int64_t to = (block * count + g) * kBlockCols + i;
        out_scales[to] = row < n ? scales[row * count + g] : 0;
        if (minima) out_minima[to] = row < n ? minima[row * count + g] : 0;
      }
    }
    with_layout(bits, columns.block, table != nullptr, [&](auto layout) {
      using L = decltype(layout);
      pack_block<L>(rows, k, out + block * columns.blocks() * L::kBytes);
    });
  });
}

// x [m, k] bf16 (rows x_stride elements apart) -> out [m, n], or gated [m, n / 2], bf16 or fp32 (rows out_stride apart). `zero` is
// the code of 0, or what stands for it in the table. `bias` may be null.
void starling_quantized_linear(const bf16* x, int64_t x_stride, int64_t m, const uint8_t* codes, const uint16_t* scales,
                               const uint16_t* minima, const uint8_t* table, int64_t n, int64_t k, int64_t size, int64_t span,
                               int64_t share, int bits,
                               int zero, const bf16* bias, int gated, void* out, int64_t out_stride, int out_fp32, int threads) {
  if (m == 0) return;
  const Columns columns{k, size, span, share};
  const QuantizedWeight weight{codes, scales, minima, table, n, columns, bits, zero};
  [[maybe_unused]] const By by = multiplied_by(columns, m);
  const auto to = [&](auto type) {
    const StoreSums<decltype(type)> store_sums{bias, n, gated != 0, static_cast<decltype(type)*>(out), out_stride};
#ifdef STARLING_TILES
    if (by == By::kBf16Tiles) {
      const Bf16OfCodes tiles_of{weight, weight.tiles()};
      return multiply_all_by_tiles<kMaxRows>(x, x_stride, m, n, k, tiles_of, store_sums, threads);
    }
#endif
    Scratch& scratch = Scratch::mine();
    scratch.reset(QuantizedRows::bytes(m, columns));
    const QuantizedRows rows = QuantizedRows::in(scratch, m, columns).part(0, m);
    parallel_for(m, threads_for(m, m * k * sizeof(bf16), threads),
                 [&](int64_t row) { rows.quantize(row, x + row * x_stride, weight.begin()); });
#ifdef STARLING_TILES
    if (by == By::kByteTiles)
      return in_parallel(threads, [&](Part part) { multiply_bytes(rows, weight, part.of(weight.pairs()), store_sums); });
#endif
    const QuantizedTiles& tiles = weight.tiles();
    in_parallel(threads_for(weight.pairs(), weight.bytes() * ceil_div(m, rows.step), threads), [&](Part part) {
      if (m <= kFetchingRows && part.index > 0) rows.fetch_all();
      const Span mine = part.of(weight.pairs());
      for (int64_t pair = mine.begin; pair < mine.end; ++pair) run_pair(rows, weight, tiles, pair, store_sums);
    });
  };
  out_fp32 ? to(float{}) : to(bf16{});
}

// Rows `ids` of the packed weight -> out [tokens, k].
void starling_embedding_quantized(const int64_t* ids, int64_t tokens, const uint8_t* codes, const uint16_t* scales,
                                  const uint16_t* minima, const uint8_t* table, int64_t n, int64_t k, int64_t size, int64_t span,
                                  int64_t share, int bits, int zero, bf16* out, int threads) {
  const Columns columns{k, size, span, share};
  const QuantizedWeight weight{codes, scales, minima, table, n, columns, bits, zero};
  with_layout(bits, columns.block, table != nullptr, [&](auto layout) {
    parallel_for(tokens, threads_for(tokens, tokens * k * 32, threads), [&](int64_t t) {
      unpack_row<decltype(layout)>(weight, ids[t] / kBlockCols, ids[t] % kBlockCols, zero, out + t * k);
    });
  });
}

}  // extern "C"

STARLING_RECORDABLE(starling_quantized_linear)
STARLING_RECORDABLE(starling_embedding_quantized)
