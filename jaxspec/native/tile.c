// Products of rows with one panel of a packed weight, for the instruction set that the compiler is told.
//
// One column of one row is one chain of additions along the depth, whatever the number of rows and the instruction
// set. A product of two bfloat16 numbers is exact in float32, so fusing it with its addition changes no bit, and
// VDPBF16PS does the same two additions per pair: the odd depth's first, then the even one's.
#include "lanes.h"

#include <string.h>

enum { ROWS = LANES == 16 ? 12 : LANES == 8 ? 6 : 4 };  // as many as there are registers for their sums

typedef uint8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int8_t chars __attribute__((vector_size(LANES), aligned(1), may_alias));

INLINE words widen_bytes(const uint8_t *p) {
#if defined(__AVX512F__)
  return (words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX2__)
  return (words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
  return __builtin_convertvector(*(const bytes *)p, words);
#endif
}

INLINE words from_int8(const uint8_t *p) {
#if defined(__AVX512F__)
  return (words)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(__AVX2__)
  return (words)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
  return (words) __builtin_convertvector(__builtin_convertvector(*(const chars *)p, ints), floats);
#endif
}

INLINE words pick(ints mask, words yes, words no) { return ((words)mask & yes) | (~(words)mask & no); }

// e4m3 as the bits of float32. No subnormal number is made on the way: XLA's threads take those for zero.
INLINE words from_e4m3(words b) {
  words magnitude = (b & 0x7fu) << 20;
  words low = (words)((floats)(magnitude + (121u << 23)) - 0x1p-6f);
  return pick(magnitude < (8u << 20), low, magnitude + (120u << 23)) | (b & 0x80u) << 24;
}

// e2m1 as the bits of float32: the lowest four of each number, whatever lies above.
INLINE words from_e2m1(words b) {
#if defined(__AVX512F__)
  const __m512 numbers = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
  return (words)_mm512_permutexvar_ps((__m512i)b, numbers);
#elif defined(__AVX2__)
  const __m256i magnitudes = _mm256_setr_epi32(0, 0x3f000000, 0x3f800000, 0x3fc00000, 0x40000000, 0x40400000, 0x40800000, 0x40c00000);
  return (words)_mm256_permutevar8x32_epi32(magnitudes, (__m256i)b) | (b << 28 & 0x80000000u);
#else
  words magnitude = b & 7u;
  words low = (magnitude & 1u) * 0x3f000000u;  // 0 or 0.5
  return pick(magnitude < 2u, low, (magnitude << 22) + (126u << 23)) | (b & 8u) << 28;
#endif
}

typedef struct { words even, odd; } Depths;  // two depths of some columns, as the bits of float32

// The numbers at depths 2k and 2k + 1 of the columns from ``at`` on.
INLINE Depths weights(const enum Kind kind, const uint8_t *panel, int k, int at) {
  if (kind == BF16) {
    words pair = *(const words *)(panel + (size_t)k * PANEL * 4 + at * 4);
    return (Depths){pair << 16, pair & 0xffff0000u};
  }
  if (kind == FP4) {
    words both = widen_bytes(panel + (size_t)k * PANEL + at);
    return (Depths){from_e2m1(both), from_e2m1(both >> 4)};
  }
  const uint8_t *p = panel + (size_t)k * PANEL * 2 + at;
  if (kind == INT8) return (Depths){from_int8(p), from_int8(p + PANEL)};
  return (Depths){from_e4m3(widen_bytes(p)), from_e4m3(widen_bytes(p + PANEL))};
}

#ifdef __AVX512BW__
// bfloat16 numbers by their codes: e4m3 without exponent, and e2m1 twice, so that the code beside it does no harm.
static uint16_t e4m3[32] __attribute__((aligned(64))), e2m1[32] __attribute__((aligned(64)));
__attribute__((constructor)) static void at_load(void) {
  for (uint32_t code = 0; code < 8; code++) e4m3[code] = (uint16_t)(from_e4m3((words){code})[0] >> 16);
  for (uint32_t code = 0; code < 32; code++) e2m1[code] = (uint16_t)(from_e2m1((words){code & 15})[0] >> 16);
}

INLINE __m512i from_codes(const enum Kind kind, __m512i code) {
  if (kind == FP4) return _mm512_permutexvar_epi16(code, *(const __m512i *)e2m1);
  __m512i magnitude = _mm512_and_si512(code, _mm512_set1_epi16(0x7f));
  __m512i size = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
  __mmask32 small = _mm512_cmplt_epi16_mask(magnitude, _mm512_set1_epi16(8));
  size = _mm512_mask_permutexvar_epi16(size, small, code, *(const __m512i *)e4m3);
  return _mm512_ternarylogic_epi32(size, _mm512_slli_epi16(code, 8), _mm512_set1_epi16((short)0x8000), 0xf8);
}

INLINE __m512i codes(const uint8_t *p) { return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)p)); }

// The numbers of all 32 columns, as pairs of bfloat16: the odd depth in the high half.
INLINE void weight_pairs(const enum Kind kind, const uint8_t *panel, int k, words pair[2]) {
  if (kind == FP8 || kind == FP4) {
    const __m512i step = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i pairs = _mm512_add_epi32(_mm512_mullo_epi32(step, _mm512_set1_epi32(0x10001)), _mm512_set1_epi32(32 << 16));
    const uint8_t *p = panel + (size_t)k * PANEL * (kind == FP4 ? 1 : 2);
    __m512i first = codes(p), second = kind == FP4 ? _mm512_srli_epi16(first, 4) : codes(p + PANEL);
    __m512i even = from_codes(kind, first), odd = from_codes(kind, second);
    pair[0] = (words)_mm512_permutex2var_epi16(even, pairs, odd);
    pair[1] = (words)_mm512_permutex2var_epi16(even, _mm512_add_epi16(pairs, _mm512_set1_epi16(16)), odd);
    return;
  }
  for (int half = 0; half < 2; half++) {
    if (kind == BF16) pair[half] = *(const words *)(panel + (size_t)k * PANEL * 4 + half * 64);
    else {
      Depths two = weights(kind, panel, k, half * 16);
      pair[half] = two.even >> 16 | (two.odd & 0xffff0000u);
    }
  }
}
#endif

INLINE floats scale_at(const Weight *w, const void *scale, size_t group, int column) {
  size_t at = group * PANEL + column;
  if (w->exponent_scales) return (floats)(widen_bytes((const uint8_t *)scale + at) << 23);
  return *(const floats *)((const float *)scale + at);
}

enum { AHEAD = 4096, STEP = 64 };  // bytes; depths, after which the next columns are taken while these lie near
INLINE void ask(const enum Kind kind, const uint8_t *panel, int k) {  // for what is read soon
  const int bytes = kind == FP4 ? PANEL : kind == BF16 || kind == F32 ? PANEL * 4 : PANEL * 2;
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(panel + (size_t)k * bytes + AHEAD + i, 0, 3);
}

#ifdef __AMX_BF16__
// Pairs of bfloat16 times powers of two, one for each column. What bfloat16 cannot hold (scales below 2^-125) becomes zero, or
// not a number (above 2^125); few_rows keeps some of these.
INLINE __m512i times_powers(__m512i pair, __m512i exponent) {
  const __m512i sign = _mm512_set1_epi16((short)0x8000);
  __m512i size = _mm512_andnot_si512(sign, pair), scaled = _mm512_max_epi16(_mm512_adds_epi16(size, exponent), _mm512_setzero_si512());
  scaled = _mm512_maskz_mov_epi16(_mm512_test_epi16_mask(size, size), scaled);
  return _mm512_ternarylogic_epi32(scaled, pair, sign, 0xf8);
}

// The exponents of columns' scales, as they are added to each half of a pair.
INLINE __m512i exponents_of(const uint8_t *scale) {
  __m512i one = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)scale));
  one = _mm512_slli_epi32(_mm512_sub_epi32(one, _mm512_set1_epi32(127)), 7);
  return _mm512_mask_blend_epi16(0xaaaaaaaa, one, _mm512_slli_epi32(one, 16));
}

INLINE void widen_kind(const enum Kind kind, const int powers, const Weight *w, const uint8_t *panel, const uint8_t *scale, int from,
                       int count, uint32_t (*restrict pairs)[PANEL]) {
  __m512i low = _mm512_setzero_si512(), high = low;
  for (int k = 0; k < count / 2; k++) {
    const int depth = from + 2 * k;
    if (powers && (!k || depth % w->group == 0)) {
      const uint8_t *here = scale + (size_t)(depth / w->group) * PANEL;
      low = exponents_of(here), high = exponents_of(here + 16);
    }
    words pair[2];
    ask(kind, panel, depth / 2);
    weight_pairs(kind, panel, depth / 2, pair);
    _mm512_store_si512(pairs[k], powers ? times_powers((__m512i)pair[0], low) : (__m512i)pair[0]);
    _mm512_store_si512(pairs[k] + 16, powers ? times_powers((__m512i)pair[1], high) : (__m512i)pair[1]);
  }
}

void widen_depths(const Weight *w, const uint8_t *panel, const uint8_t *scale, int from, int count, uint32_t (*restrict pairs)[PANEL]) {
#define WIDEN(kind) \
  case kind: \
    if (w->exponent_scales) widen_kind(kind, 1, w, panel, scale, from, count, pairs); \
    else widen_kind(kind, 0, w, panel, scale, from, count, pairs); \
    return;
  switch (w->kind) {
    WIDEN(INT8) WIDEN(FP8) WIDEN(FP4)
    default: return;  // the unit takes bfloat16 as it is
  }
}

void add_scaled(const Weight *w, const void *scale, int group, const float *sums, float *y) {
  for (int n = 0; n < PANEL; n += LANES) {
    floats *out = (floats *)(y + n), part = *(const floats *)(sums + n) * scale_at(w, scale, (size_t)group, n);
    ROUND_HERE(part);
    if (group) part += *out;
    *out = part;
  }
}

// Rows so few that widening for the unit takes longer than their products: in its order, without it.
INLINE void few_rows_of(const int rows, const enum Kind kind, const int powers, const Weight *w, const uint8_t *panel,
                        const uint8_t *scale, const uint8_t *x, float *const *y) {
  const size_t row_bytes = (size_t)w->depth * 2;
  const int step = powers ? w->depth : w->group;
  for (int begin = 0; begin < w->depth; begin += step) {
    const int end = begin + step < w->depth ? begin + step : w->depth;
    floats total[FEW_ROWS][2] = {0};
    for (int from = begin; from < end; from += UNIT_DEPTHS) {
      floats even[FEW_ROWS][2] = {0}, odd[FEW_ROWS][2] = {0};
      for (int k = from / 2; k < (from + UNIT_DEPTHS < end ? from + UNIT_DEPTHS : end) / 2; k++) {
        Depths two[2];
        ask(kind, panel, k);
        if (kind != FP8) two[0] = weights(kind, panel, k, 0), two[1] = weights(kind, panel, k, 16);
        else {
          words pair[2];
          weight_pairs(kind, panel, k, pair);
          for (int v = 0; v < 2; v++) two[v] = (Depths){pair[v] << 16, pair[v] & 0xffff0000u};
        }
        for (int m = 0; m < rows; m++) {
          uint32_t both;
          memcpy(&both, x + m * row_bytes + k * 4, 4);
          const words all = (words){0} + both;
          for (int v = 0; v < 2; v++) {
            even[m][v] += (floats)two[v].even * (floats)(all << 16);
            odd[m][v] += (floats)two[v].odd * (floats)(all & 0xffff0000u);
          }
        }
      }
      for (int v = 0; v < 2; v++) {
        const floats power = powers ? scale_at(w, scale, from / w->group, v * 16) : (floats){0};
        for (int m = 0; m < rows; m++) total[m][v] += powers ? (even[m][v] + odd[m][v]) * power : even[m][v] + odd[m][v];
      }
    }
    for (int m = 0; m < rows; m++) {
      if (powers) memcpy(y[m], total[m], sizeof total[m]);
      else add_scaled(w, scale, begin / step, (const float *)total[m], y[m]);
    }
  }
}

void few_rows(const Weight *w, const uint8_t *panel, const uint8_t *scale, const uint8_t *x, float *const *y, int rows) {
#define FEW_OF(n, kind, powers) if (rows == n) few_rows_of(n, kind, powers, w, panel, scale, x, y);
#define FEW(kind, powers) FEW_OF(1, kind, powers) FEW_OF(2, kind, powers)
#define FEW_CASE(kind) \
  case kind: \
    if (w->exponent_scales) { FEW(kind, 1) } else { FEW(kind, 0) } \
    return;
  switch (w->kind) {
    FEW_CASE(INT8) FEW_CASE(FP8) FEW_CASE(FP4)
    default: return;
  }
}
#endif

// Two depths added to sums.
INLINE floats add_two(floats acc, Depths w, const float *x) {
  acc += (floats)w.odd * x[1];
  return acc + (floats)w.even * x[0];
}

#define EACH_ROW _Pragma("GCC unroll 12") for (int m = 0; m < rows; m++)
#define EACH_VECTOR _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++)

// Two depths of ``vectors`` vectors of columns from ``at`` on, added to the sums of each row.
INLINE void add_depths(const int rows, const int vectors, const enum Kind kind, const int wide, const uint8_t *panel, int k, int at,
                       const void *const *x, floats acc[][4]) {
#ifdef __AVX512BW__
  words pair[2];
  weight_pairs(kind, panel, k, pair);
#ifdef __AVX512BF16__
  if (!wide) {
    EACH_ROW {
      uint32_t both;
      memcpy(&both, (const uint16_t *)x[m] + 2 * k, 4);
      EACH_VECTOR acc[m][v] = (floats)_mm512_dpbf16_ps((__m512)acc[m][v], (__m512bh)_mm512_set1_epi32((int)both), (__m512bh)pair[v]);
    }
    return;
  }
#endif
#endif
  Depths w[4];
#ifdef __AVX512BW__
  EACH_VECTOR w[v] = (Depths){pair[v] << 16, pair[v] & 0xffff0000u};
#else
  EACH_VECTOR w[v] = weights(kind, panel, k, at + v * LANES);
#endif
  EACH_ROW {
    const float *two = (const float *)x[m] + 2 * k;
    EACH_VECTOR acc[m][v] = add_two(acc[m][v], w[v], two);
  }
}

// Products at depths from .. to, of pairs unless F32, with the columns from ``at`` on: as many as registers hold the sums of.
// They go on from what y has if ``goes_on``.
INLINE void fixed_columns(const int rows, const int vectors, const enum Kind kind, const int wide, const uint8_t *panel, int from,
                          int to, int at, const floats *scale, int goes_on, const void *const *x, float *const *y) {
  floats acc[ROWS][4];
  const int plain = kind == BF16 || kind == F32;
  EACH_ROW EACH_VECTOR acc[m][v] = plain && goes_on ? *(const floats *)(y[m] + at + v * LANES) : (floats){0};
  for (int k = from; k < to; k++) {
    if (!at) ask(kind, panel, k);
    if (kind != F32) {
      add_depths(rows, vectors, kind, wide, panel, k, at, x, acc);
      continue;
    }
    const floats *line = (const floats *)((const float *)panel + (size_t)k * PANEL + at);
    EACH_ROW {
      float one = ((const float *)x[m])[k];
      EACH_VECTOR acc[m][v] += line[v] * one;
    }
  }
  EACH_ROW EACH_VECTOR {
    floats *out = (floats *)(y[m] + at + v * LANES), part = acc[m][v];
    if (!plain) {
      part *= scale[v];
      ROUND_HERE(part);
      if (goes_on) part += *out;
    }
    *out = part;
  }
}

INLINE void fixed_rows(const int rows, const enum Kind kind, const int wide, const Weight *w, const uint8_t *panel, const void *scale,
                       const void *const *x, float *const *y) {
  const int vectors = LANES < 16 && rows <= 3 ? 4 : 2, plain = kind == BF16 || kind == F32;
  const int depths = kind == F32 ? w->depth : w->depth / 2, group = w->group ? w->group / 2 : depths;
  const int step = plain && vectors * LANES < PANEL ? STEP : group;
  for (int from = 0; from < depths; from += step)
    for (int at = 0; at < PANEL; at += vectors * LANES) {
      floats scales[4];
      if (!plain) EACH_VECTOR scales[v] = scale_at(w, scale, from / step, at + v * LANES);
      fixed_columns(rows, vectors, kind, wide, panel, from, from + step < depths ? from + step : depths, at, scales, from > 0, x, y);
    }
}

// Rows in as few tiles as there are sizes for; every size is code of its own, of which each kind has one more.
INLINE void tiles(const enum Kind kind, const int wide, const Weight *w, const void *panel, const void *scale, const void *const *x,
                  float *const *y, int rows) {
#define TAKE(n) for (; n <= ROWS && rows >= n; rows -= n, x += n, y += n) fixed_rows(n, kind, wide, w, panel, scale, x, y);
  TAKE(12) TAKE(8) TAKE(6) TAKE(4) TAKE(3) TAKE(2) TAKE(1)
}

void tile(const Weight *w, const void *panel, const void *scale, const void *const *x, float *const *y, int rows) {
#define CASE(kind) \
  case kind: \
    if (!NARROW_ROWS || w->wide) tiles(kind, 1, w, panel, scale, x, y, rows); \
    else tiles(kind, 0, w, panel, scale, x, y, rows); \
    return;
  switch (w->kind) {
    CASE(BF16) CASE(INT8) CASE(FP8) CASE(FP4)
    case F32: tiles(F32, 1, w, panel, scale, x, y, rows); return;
  }
}
