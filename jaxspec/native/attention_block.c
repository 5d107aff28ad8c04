// One block of the cache: laid out as panels, keys and then values, and multiplied like weights; the softmax between.
#include "attention.h"

#include <math.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define UNROLLED _Pragma("GCC unroll 8")
#define INLINE static inline __attribute__((always_inline))

typedef float f16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t u16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t u8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint16_t h16 __attribute__((vector_size(32), aligned(2), may_alias));

// ---- Arithmetic ----

INLINE f16 all(float x) { return (f16){0} + x; }
INLINE f16 choose(i16 mask, f16 yes, f16 no) { return (f16)((mask & (i16)yes) | (~mask & (i16)no)); }

INLINE f16 larger(f16 a, f16 b) {
#ifdef __AVX512F__
  return (f16)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return choose(a > b, a, b);
#endif
}

INLINE f16 multiply_add(f16 a, f16 b, f16 c) {  // rounded once
#if defined(__FMA__) || defined(__aarch64__)
  return a * b + c;
#else
  for (int i = 0; i < 16; i++) c[i] = fmaf(a[i], b[i], c[i]);
  return c;
#endif
}

INLINE f16 exponential(f16 x) {  // of numbers up to 0: polynomial_exp of pallas_kernels/steady.py
  static const float factors[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
  x = larger(x, all(-87.0f));
  i16 whole = __builtin_convertvector(x * (float)(2 * 1.4426950408889634), i16) >> 1;
  f16 power = __builtin_convertvector(whole, f16);
  f16 rest = multiply_add(-power, all(0.693359375f), x);
  rest = multiply_add(-power, all(-2.12194440e-4f), rest);
  f16 tail = all(1.9875691500e-4f);
  UNROLLED for (int i = 0; i < 5; i++) tail = multiply_add(tail, rest, all(factors[i]));
  return (multiply_add(tail, rest * rest, rest) + 1.0f) * (f16)((whole + 127) << 23);
}

#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)

static float halving_sum(float *x, int n) {  // of row_sum in nn/steady.py; changes x
  for (; n % 32 == 0; n /= 2)
    for (int i = 0; i < n / 2; i += 16) *(f16 *)(x + i) += *(f16 *)(x + n / 2 + i);
  if (n == 16) {
    f16 v = *(f16 *)x;
    v += PICK(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    v += PICK(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    return (v[0] + v[2]) + (v[1] + v[3]);
  }
  while (n > 1) {
    int half = (n + 1) / 2;
    for (int i = 0; i < n - half; i++) x[i] += x[half + i];
    n = half;
  }
  return x[0];
}

INLINE float largest(f16 v) {
  v = larger(v, PICK(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = larger(v, PICK(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = larger(v, PICK(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  return v[0] > v[1] ? v[0] : v[1];
}

INLINE h16 rounded(f16 x) {  // to bfloat16
#ifdef __AVX512BF16__
  return (h16)_mm512_cvtneps_pbh((__m512)x);
#else
  const u16 bits = (u16)x, nan = (u16)((bits & 0x7fffffff) > 0x7f800000);
  return __builtin_convertvector(((bits + 0x7fff + (bits >> 16 & 1)) & ~nan | (bits | 0x400000) & nan) >> 16, h16);
#endif
}

void round_row(const Attention *a, char *to, const float *from, int n, float scale) {
  int i = 0;
  for (; i + 16 <= n; i += 16)
    if (a->bytes == 4) ((f16 *)to)[i / 16] = *(const f16 *)(from + i) * scale;
    else ((h16 *)to)[i / 16] = rounded(*(const f16 *)(from + i) * scale);
  for (; i < n; i++)
    if (a->bytes == 4) ((float *)to)[i] = from[i] * scale;
    else ((uint16_t *)to)[i] = to_bfloat16(from[i] * scale);
}

// ---- Where positions lie ----

size_t entry(const Work *w, int position) {  // numbered over all pages, positions of a head one after another
  const Attention *a = w->a;
  int in_row = a->ring ? 0 : clip(position / a->page, 0, a->pages_per_row - 1);
  int page = clip(a->table[(size_t)w->b * a->pages_per_row + in_row] + *a->base, 0, a->pages - 1);
  return ((size_t)page * a->kv_heads + w->g) * a->page + clip(position, 0, INT32_MAX) % a->page;
}

// Entries of 8 positions of the block from z on, as a node sees them: in a tree its ancestors, at their depths.
INLINE void find(const Work *w, const char *pages, int stride, int node, int z, const char **out) {
  const Attention *a = w->a;
  const size_t bytes = (size_t)stride * a->bytes;
  const char *at = pages + (w->entry + z) * bytes;
  UNROLLED for (int i = 0; i < 8; i++, at += bytes) out[i] = at;
  if (z + 8 <= w->own) return;
  const int start = a->start[w->b], depth = w->at + z - start;
  const int32_t *path = a->path + ((size_t)(a->paths_per_row ? w->b : 0) * a->count + node) * a->depths;
  for (int i = depth < 0 ? -depth : 0; i < 8 && depth + i < a->depths; i++)
    out[i] = pages + entry(w, start + path[depth + i]) * bytes;
}

INLINE void ask(const Ahead *next, int z) {  // for 8 entries, to arrive meanwhile
  if (next->at)
    for (const char *line = next->at + z * next->bytes, *end = line + 8 * next->bytes; line < end; line += 64)
      __builtin_prefetch(line, 0, 2);
}

// ---- Panels ----

INLINE void transpose(const char *const *from, size_t at, char *panel) {  // 8 words of 8 rows
  u8 r[8], s[8];
  UNROLLED for (int i = 0; i < 8; i++) r[i] = *(const u8 *)(from[i] + at);
  UNROLLED for (int i = 0; i < 8; i += 2) {
    s[i] = PICK(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    s[i + 1] = PICK(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  UNROLLED for (int i = 0; i < 8; i += 4)
    UNROLLED for (int j = 0; j < 2; j++) {
      r[i + 2 * j] = PICK(s[i + j], s[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      r[i + 2 * j + 1] = PICK(s[i + j], s[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  UNROLLED for (int i = 0; i < 4; i++) {
    *(u8 *)(panel + i * PANEL * 4) = PICK(r[i], r[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    *(u8 *)(panel + (i + 4) * PANEL * 4) = PICK(r[i], r[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

// Keys from .. to of the block as columns of one panel; a word is a number, or two of bfloat16.
static void pack_keys(const Work *w, int node, int from, int to) {
  const Attention *a = w->a;
  const int words = a->width * a->bytes / 4;
  for (int z = from & ~7; z < to; z += 8) {
    const char *key[8];
    char *panel = w->panel + z % PANEL * 4;
    int at = 0;
    find(w, a->k, a->width, node, z, key);
    if (node == node_of(w, 0)) ask(&w->by_keys, z);
    for (int i = a->block - z; i < 8; i++) key[i] = key[0];
    for (; at + 8 <= words; at += 8) transpose(key, (size_t)at * 4, panel + (size_t)at * PANEL * 4);
    for (; at < words; at++)
      for (int i = 0; i < 8; i++) memcpy(panel + (size_t)at * PANEL * 4 + i * 4, key[i] + (size_t)at * 4, 4);
  }
}

// 32 channels, or fewer, of values of two positions, as two depths of a panel.
INLINE void pack_pair(const Attention *a, const char *even, const char *odd, int channels, char *panel) {
  if (a->bytes == 4) {
    memcpy(panel, even, channels * 4), memcpy(panel + PANEL * 4, odd, channels * 4);
  } else if (channels == PANEL) {
    for (int half = 0; half < 2; half++) {
      u16 low = __builtin_convertvector(((const h16 *)even)[half], u16);
      u16 high = __builtin_convertvector(((const h16 *)odd)[half], u16);
      ((u16 *)panel)[half] = low | high << 16;
    }
  } else {
    for (int i = 0; i < channels; i++) memcpy(panel + 4 * i, even + 2 * i, 2), memcpy(panel + 4 * i + 2, odd + 2 * i, 2);
  }
}

// Channels c .. c + 32 of the values from .. to of the block, both even, as depths of one panel.
static void pack_values(const Work *w, int node, int from, int to, int c) {
  const Attention *a = w->a;
  const int channels = a->value_width - c < PANEL ? a->value_width - c : PANEL;
  for (int z = from; z < to; z += 8) {
    const char *value[8];
    find(w, a->v + (size_t)c * a->bytes, a->value_stride, node, z, value);
    if (!c && node == node_of(w, 0)) ask(&w->by_values, z);
    UNROLLED for (int i = 0; i < 8; i += 2)
      if (z + i < to) pack_pair(a, value[i], value[i + 1], channels, w->panel + (size_t)(z + i) * PANEL * a->bytes);
  }
}

// ---- One block ----

// Queries that see the block alike: all of them, or those of one node where nodes of a tree differ. Returns the end.
static int alike(const Work *w, int first) {
  if (w->own >= w->end) return w->queries;
  int end = ((w->first + first) / w->a->group + 1) * w->a->group - w->first;
  return end < w->queries ? end : w->queries;
}

void score_block(Work *w) {
  const Attention *a = w->a;
  const Weight keys = {a->bytes == 2 ? BF16 : F32, a->width, 0, 0};
  for (int z = w->begin / PANEL * PANEL; z < w->end; z += PANEL) {
    const int begin = w->begin > z ? w->begin : z, end = w->end < z + PANEL ? w->end : z + PANEL;
    for (int m = 0, next; m < w->queries; m = next) {
      const void *x[QUERIES];
      float *y[QUERIES];
      next = alike(w, m);
      pack_keys(w, node_of(w, m), m && w->own > begin ? w->own : begin, end);
      for (int i = m; i < next; i++) x[i] = w->q + (size_t)i * a->width * a->bytes, y[i] = w->score + (size_t)i * w->stride + z;
      tile(&keys, w->panel, NULL, x + m, y + m, next - m);
    }
  }
}

static void seen(const Work *w, int m, int *begin, int *end) {  // of the block's positions, by a query
  const int last = w->position[m] - w->at, first = first_seen(w->a, w->position[m]) - w->at;
  *begin = first > 0 ? first : 0;
  *end = last < w->a->block ? last + 1 : w->a->block;
}

float see_block(Work *w, int m) {
  const Attention *a = w->a;
  const i16 iota = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const uint8_t *kept = a->kept ? a->kept + ((size_t)w->b * a->count + node_of(w, m)) * a->room + w->at : NULL;
  int begin, end;
  seen(w, m, &begin, &end);
  f16 top = all(w->top[m]);
  for (int z = begin & ~15; z < end; z += 16) {
    f16 *s = (f16 *)(w->score + (size_t)m * w->stride + z);
    i16 sees = (iota + z >= begin) & (iota + z < end);
    for (int i = 0; kept && i < 16 && z + i < end; i++)
      if (!kept[z + i]) sees[i] = 0;
    if (kept || z < begin || z + 16 > end) *s = choose(sees, *s, all(-INFINITY));
    top = larger(*s, top);
  }
  return largest(top);
}

void weigh_block(Work *w, int m, float top) {
  const Attention *a = w->a;
  float *score = w->score + (size_t)m * w->stride;
  int begin, end;
  seen(w, m, &begin, &end);
  for (int z = 0; z < w->stride; z += 16) {
    f16 *s = (f16 *)(score + z);
    if (z >= end || z + 16 <= begin) *s = (f16){0};
    else if (a->kept || z < begin || z + 16 > end) *s = choose(*s > -INFINITY, exponential(*s - top), (f16){0});
    else *s = exponential(*s - top);
  }
  round_row(a, w->weight + (size_t)m * a->block * a->bytes, score, a->block, 1);
  w->keep[m] = exponential(all(w->top[m] - top))[0];
  w->total[m] = fmaf(w->total[m], w->keep[m], halving_sum(score, a->block));
  w->top[m] = top;
}

void add_values(Work *w) {
  const Attention *a = w->a;
  const int begin = w->begin & ~1, end = (w->end + 1) & ~1;
  const Weight values = {a->bytes == 2 ? BF16 : F32, end - begin, 0, 0};
  float added[QUERIES][PANEL];
  for (int c = 0; c < a->value_width; c += PANEL)
    for (int m = 0, next; m < w->queries; m = next) {
      const void *x[QUERIES];
      float *y[QUERIES];
      next = alike(w, m);
      pack_values(w, node_of(w, m), m && w->own > begin ? w->own & ~1 : begin, end, c);
      for (int i = m; i < next; i++) x[i] = w->weight + ((size_t)i * a->block + begin) * a->bytes, y[i] = added[i];
      tile(&values, w->panel + (size_t)begin * PANEL * a->bytes, NULL, x + m, y + m, next - m);
      for (int i = m; i < next; i++) {
        float *out = w->out[i] + c;
        for (int j = 0; j + 16 <= a->value_width - c && j < PANEL; j += 16)
          *(f16 *)(out + j) = multiply_add(*(f16 *)(out + j), all(w->keep[i]), *(f16 *)(added[i] + j));
        for (int j = (a->value_width - c) & ~15; j < a->value_width - c && j < PANEL; j++)
          out[j] = fmaf(out[j], w->keep[i], added[i][j]);
      }
    }
}
