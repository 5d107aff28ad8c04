// One block of the cache: laid out as panels, keys and then values, and multiplied like weights; the softmax between.
#include "attention.h"
#include "softmax.h"

typedef uint16_t halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef uint32_t eight __attribute__((vector_size(32), aligned(4), may_alias));

#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)

INLINE halves rounded(floats x) {  // to bfloat16
#ifdef __AVX512BF16__
  return (halves)_mm512_cvtneps_pbh((__m512)x);
#else
  const words bits = (words)x, nan = (words)((bits & 0x7fffffff) > 0x7f800000);
  return __builtin_convertvector(((bits + 0x7fff + (bits >> 16 & 1)) & ~nan | (bits | 0x400000) & nan) >> 16, halves);
#endif
}

void round_row(const Attention *a, char *to, const float *from, int n, float scale) {
  int i = 0;
  for (; i + LANES <= n; i += LANES) {
    floats x = *(const floats *)(from + i) * scale;
    if (a->row_bytes == 2) *(halves *)(to + i * 2) = rounded(x);
    else *(floats *)(to + i * 4) = a->bytes == 4 ? x : (floats)(__builtin_convertvector(rounded(x), words) << 16);
  }
  for (; i < n; i++) {
    const float x = from[i] * scale;
    if (a->row_bytes == 2) ((uint16_t *)to)[i] = to_bfloat16(x);
    else ((float *)to)[i] = a->bytes == 4 ? x : round_to_bfloat16(x);
  }
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
  eight r[8], s[8];
  UNROLLED for (int i = 0; i < 8; i++) r[i] = *(const eight *)(from[i] + at);
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
    *(eight *)(panel + i * PANEL * 4) = PICK(r[i], r[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    *(eight *)(panel + (i + 4) * PANEL * 4) = PICK(r[i], r[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
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
    for (int i = 0; i < PANEL / LANES; i++) {
      words low = __builtin_convertvector(((const halves *)even)[i], words);
      words high = __builtin_convertvector(((const halves *)odd)[i], words);
      ((words *)panel)[i] = low | high << 16;
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
  const Weight keys = {a->bytes == 2 ? BF16 : F32, a->width, 0, 0, a->row_bytes == 4};
  for (int z = w->begin / PANEL * PANEL; z < w->end; z += PANEL) {
    const int begin = w->begin > z ? w->begin : z, end = w->end < z + PANEL ? w->end : z + PANEL;
    for (int m = 0, next; m < w->queries; m = next) {
      const void *x[QUERIES];
      float *y[QUERIES];
      next = alike(w, m);
      pack_keys(w, node_of(w, m), m && w->own > begin ? w->own : begin, end);
      for (int i = m; i < next; i++) x[i] = w->q + (size_t)i * a->width * a->row_bytes, y[i] = w->score + (size_t)i * w->stride + z;
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
  ints iota;
  for (int i = 0; i < LANES; i++) iota[i] = i;
  const uint8_t *kept = a->kept ? a->kept + ((size_t)w->b * a->count + node_of(w, m)) * a->room + w->at : NULL;
  int begin, end;
  seen(w, m, &begin, &end);
  floats top = all(w->top[m]);
  for (int z = begin & -LANES; z < end; z += LANES) {
    floats *s = (floats *)(w->score + (size_t)m * w->stride + z);
    ints sees = (iota + z >= begin) & (iota + z < end);
    for (int i = 0; kept && i < LANES && z + i < end; i++)
      if (!kept[z + i]) sees[i] = 0;
    if (kept || z < begin || z + LANES > end) *s = choose(sees, *s, all(-INFINITY));
    top = larger(*s, top);
  }
  return largest(top);
}

void weigh_block(Work *w, int m, float top) {
  const Attention *a = w->a;
  float *score = w->score + (size_t)m * w->stride;
  int begin, end;
  seen(w, m, &begin, &end);
  for (int z = 0; z < w->stride; z += LANES) {
    floats *s = (floats *)(score + z);
    if (z >= end || z + LANES <= begin) *s = (floats){0};
    else if (a->kept || z < begin || z + LANES > end) *s = choose(*s > -INFINITY, exponential(*s - top), (floats){0});
    else *s = exponential(*s - top);
  }
  round_row(a, w->weight + (size_t)m * a->block * a->row_bytes, score, a->block, 1);
  w->keep[m] = exponential(all(w->top[m] - top))[0];
  w->total[m] = fmaf(w->total[m], w->keep[m], halving_sum(score, a->block));
  w->top[m] = top;
}

void add_values(Work *w) {
  const Attention *a = w->a;
  const int begin = w->begin & ~1, end = (w->end + 1) & ~1;
  const Weight values = {a->bytes == 2 ? BF16 : F32, end - begin, 0, 0, a->row_bytes == 4};
  float added[QUERIES][PANEL];
  for (int c = 0; c < a->value_width; c += PANEL)
    for (int m = 0, next; m < w->queries; m = next) {
      const void *x[QUERIES];
      float *y[QUERIES];
      next = alike(w, m);
      pack_values(w, node_of(w, m), m && w->own > begin ? w->own & ~1 : begin, end, c);
      for (int i = m; i < next; i++) x[i] = w->weight + ((size_t)i * a->block + begin) * a->row_bytes, y[i] = added[i];
      tile(&values, w->panel + (size_t)begin * PANEL * a->bytes, NULL, x + m, y + m, next - m);
      for (int i = m; i < next; i++) {
        float *out = w->out[i] + c;
        for (int j = 0; j + LANES <= a->value_width - c && j < PANEL; j += LANES)
          *(floats *)(out + j) = multiply_add(*(floats *)(out + j), all(w->keep[i]), *(floats *)(added[i] + j));
        for (int j = (a->value_width - c) & -LANES; j < a->value_width - c && j < PANEL; j++)
          out[j] = fmaf(out[j], w->keep[i], added[i][j]);
      }
    }
}
