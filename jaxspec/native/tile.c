// Products of rows with one panel of a packed weight, for the instruction set that the compiler is told.
//
// One column of one row is one chain of additions along the depth, whatever the number of rows and the instruction
// set. A product of two bfloat16 numbers is exact in float32, so fusing it with its addition changes no bit, and
// VDPBF16PS does the same two additions per pair: the odd depth's first, then the even one's.
#include "kernels.h"

#include <string.h>
#ifdef __AVX512BF16__
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
      u16 low = weight_pair(kind, panel, k, 0), high = weight_pair(kind, panel, k, 1);
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
