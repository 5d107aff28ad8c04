// Products of rows with one panel of a packed weight, for the instruction set that the compiler is told.
//
// One column of one row is one chain of additions along the depth, whatever the number of rows and the instruction
// set. A product of two bfloat16 numbers is exact in float32, so fusing it with its addition changes no bit, and
// VDPBF16PS does the same two additions per pair: the odd depth's first, then the even one's.
#include "kernels.h"

#include <string.h>
#ifdef __AVX512BW__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#ifdef __AVX512F__
enum { ROWS = 12 };
#else
enum { ROWS = 3 };
#endif

typedef float f16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t u16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint8_t b16 __attribute__((vector_size(16), aligned(1), may_alias));
typedef int8_t c16 __attribute__((vector_size(16), aligned(1), may_alias));

INLINE u16 widen_bytes(const uint8_t *p) { return __builtin_convertvector(*(const b16 *)p, u16); }
INLINE u16 pick(i16 mask, u16 yes, u16 no) { return ((u16)mask & yes) | (~(u16)mask & no); }

// e4m3 as the bits of float32. No subnormal number is made on the way: XLA's threads take those for zero.
INLINE u16 from_e4m3(u16 b) {
  u16 magnitude = (b & 0x7fu) << 20;
  u16 low = (u16)((f16)(magnitude + (121u << 23)) - 0x1p-6f);
  return pick(magnitude < (8u << 20), low, magnitude + (120u << 23)) | (b & 0x80u) << 24;
}

// e2m1 as the bits of float32.
INLINE u16 from_e2m1(u16 b) {
  u16 magnitude = b & 7u;
  u16 low = (magnitude & 1u) * 0x3f000000u;  // 0 or 0.5
  return pick(magnitude < 2u, low, (magnitude << 22) + (126u << 23)) | (b & 8u) << 28;
}

// The numbers at depths 2k (low half) and 2k + 1 (high half) of 16 columns, as pairs of bfloat16.
INLINE u16 weight_pair(const enum Kind kind, const uint8_t *panel, int k, int half) {
  const int at = half * 16;
  u16 even, odd;
  if (kind == BF16) return *(const u16 *)(panel + (size_t)k * PANEL * 4 + at * 4);
  if (kind == FP4) {
    u16 both = widen_bytes(panel + (size_t)k * PANEL + at);
    even = from_e2m1(both & 15u), odd = from_e2m1(both >> 4);
  } else {
    const uint8_t *p = panel + (size_t)k * PANEL * 2 + at;
    if (kind == FP8) {
      even = from_e4m3(widen_bytes(p)), odd = from_e4m3(widen_bytes(p + PANEL));
    } else {
      even = (u16) __builtin_convertvector(__builtin_convertvector(*(const c16 *)p, i16), f16);
      odd = (u16) __builtin_convertvector(__builtin_convertvector(*(const c16 *)(p + PANEL), i16), f16);
    }
  }
  return even >> 16 | (odd & 0xffff0000u);
}

#ifdef __AVX512BW__
// bfloat16 numbers by their codes: magnitudes of e4m3, and e2m1 twice, so that the code beside it does no harm.
static uint16_t e4m3[128] __attribute__((aligned(64))), e2m1[32] __attribute__((aligned(64)));
__attribute__((constructor)) static void at_load(void) {
  for (uint32_t code = 0; code < 128; code++) e4m3[code] = (uint16_t)(from_e4m3((u16){code})[0] >> 16);
  for (uint32_t code = 0; code < 32; code++) e2m1[code] = (uint16_t)(from_e2m1((u16){code & 15})[0] >> 16);
}

INLINE __m512i look_up(const enum Kind kind, __m512i code) {
  const __m512i *t = (const __m512i *)e4m3;
  if (kind == FP4) return _mm512_permutexvar_epi16(code, *(const __m512i *)e2m1);
  __m512i low = _mm512_permutex2var_epi16(t[0], code, t[1]), high = _mm512_permutex2var_epi16(t[2], code, t[3]);
  __m512i size = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(code, _mm512_set1_epi16(64)), low, high);
  return _mm512_ternarylogic_epi32(size, _mm512_slli_epi16(code, 8), _mm512_set1_epi16((short)0x8000), 0xf8);
}

INLINE __m512i codes(const uint8_t *p) { return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)p)); }

INLINE u16 from_int8(const uint8_t *p) {
  return (u16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
#endif

// The same of all 32 columns.
INLINE void weight_pairs(const enum Kind kind, const uint8_t *panel, int k, u16 *low, u16 *high) {
#ifdef __AVX512BW__
  if (kind == INT8) {
    const uint8_t *p = panel + (size_t)k * PANEL * 2;
    *low = from_int8(p) >> 16 | (from_int8(p + PANEL) & 0xffff0000u);
    *high = from_int8(p + 16) >> 16 | (from_int8(p + PANEL + 16) & 0xffff0000u);
    return;
  }
  if (kind == FP8 || kind == FP4) {
    const __m512i step = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i pairs = _mm512_add_epi32(_mm512_mullo_epi32(step, _mm512_set1_epi32(0x10001)), _mm512_set1_epi32(32 << 16));
    const uint8_t *p = panel + (size_t)k * PANEL * (kind == FP4 ? 1 : 2);
    __m512i first = codes(p), second = kind == FP4 ? _mm512_srli_epi16(first, 4) : codes(p + PANEL);
    __m512i even = look_up(kind, first), odd = look_up(kind, second);
    *low = (u16)_mm512_permutex2var_epi16(even, pairs, odd);
    *high = (u16)_mm512_permutex2var_epi16(even, _mm512_add_epi16(pairs, _mm512_set1_epi16(16)), odd);
    return;
  }
#endif
  *low = weight_pair(kind, panel, k, 0), *high = weight_pair(kind, panel, k, 1);
}

INLINE float high_half(uint32_t pair) {
  float f;
  pair &= 0xffff0000u;
  memcpy(&f, &pair, 4);
  return f;
}

INLINE f16 add_pair(f16 acc, u16 w, uint32_t x) {
#ifdef __AVX512BF16__
  return (f16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32((int)x), (__m512bh)w);
#else
  acc += (f16)(w & 0xffff0000u) * high_half(x);
  return acc + (f16)(w << 16) * high_half(x << 16);
#endif
}

INLINE f16 add_wide(f16 acc, u16 w, const float *x) {
  acc += (f16)(w & 0xffff0000u) * x[1];
  return acc + (f16)(w << 16) * x[0];
}

INLINE f16 scale_at(const Weight *w, const void *scale, size_t group, int half) {
  size_t at = group * PANEL + half * 16;
  if (w->exponent_scales) return (f16)(widen_bytes((const uint8_t *)scale + at) << 23);
  return *(const f16 *)((const float *)scale + at);
}

#define EACH_ROW _Pragma("GCC unroll 12") for (int m = 0; m < rows; m++)

INLINE void fixed_rows(const int rows, const enum Kind kind, const int wide, const Weight *w, const uint8_t *panel, const void *scale,
                 const void *const *x, float *const *y) {
  f16 acc[ROWS][2];
  EACH_ROW acc[m][0] = acc[m][1] = (f16){0};
  if (kind == F32) {
    for (int k = 0; k < w->depth; k++, panel += PANEL * 4) {
      f16 low = *(const f16 *)panel, high = *(const f16 *)(panel + 64);
      EACH_ROW {
        float one = ((const float *)x[m])[k];
        acc[m][0] += low * one, acc[m][1] += high * one;
      }
    }
  }
  const int pairs = kind == F32 ? 0 : w->depth / 2, step = w->group ? w->group / 2 : pairs;
  for (int first = 0, group = 0; first < pairs; first += step, group++) {
    const int last = first + step < pairs ? first + step : pairs;
    for (int k = first; k < last; k++) {
      u16 low, high;
      weight_pairs(kind, panel, k, &low, &high);
      EACH_ROW {
        if (wide) {
          const float *two = (const float *)x[m] + 2 * k;
          acc[m][0] = add_wide(acc[m][0], low, two), acc[m][1] = add_wide(acc[m][1], high, two);
          continue;
        }
        uint32_t both;
        memcpy(&both, (const uint16_t *)x[m] + 2 * k, 4);
        acc[m][0] = add_pair(acc[m][0], low, both), acc[m][1] = add_pair(acc[m][1], high, both);
      }
    }
    if (kind == BF16) break;
    EACH_ROW for (int half = 0; half < 2; half++) {
      f16 *out = (f16 *)(y[m] + half * 16), part = acc[m][half] * scale_at(w, scale, group, half);
      if (first) part += *out;
      *out = part;
      acc[m][half] = (f16){0};
    }
  }
  if (kind == BF16 || kind == F32) EACH_ROW for (int half = 0; half < 2; half++) *(f16 *)(y[m] + half * 16) = acc[m][half];
}

// Rows in as few tiles as there are sizes for; every size is code of its own, of which each kind has one more.
INLINE void tiles(const enum Kind kind, const int wide, const Weight *w, const void *panel, const void *scale, const void *const *x,
                  float *const *y, int rows) {
#define TAKE(n) for (; rows >= n; rows -= n, x += n, y += n) fixed_rows(n, kind, wide, w, panel, scale, x, y);
#ifdef __AVX512F__
  TAKE(12) TAKE(8) TAKE(6) TAKE(4)
#endif
  TAKE(3) TAKE(2) TAKE(1)
}

void tile(const Weight *w, const void *panel, const void *scale, const void *const *x, float *const *y, int rows) {
#define CASE(kind) \
  case kind: \
    if (w->wide) tiles(kind, 1, w, panel, scale, x, y, rows); \
    else tiles(kind, 0, w, panel, scale, x, y, rows); \
    return;
  switch (w->kind) {
    CASE(BF16) CASE(INT8) CASE(FP8) CASE(FP4)
    case F32: tiles(F32, 1, w, panel, scale, x, y, rows); return;
  }
}
