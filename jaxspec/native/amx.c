// Products of rows with one panel by Intel's matrix unit: 32 rows and 32 columns over 32 depths at a time.
//
// The unit adds even and odd depths apart, 16 of each, and then their sum to what was there before: one order for any
// number of rows, but not that of tile.c. It knows bfloat16 alone: other numbers are widened some depths at a time.
#include "lanes.h"

#include <string.h>
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>

// Tiles, which the compiler wants as literals: sums of 16 rows and 16 columns each, and what they are products of.
#define LOW 0
#define HIGH 1
#define NEXT_LOW 2
#define NEXT_HIGH 3
#define X 4
#define NEXT_X 5
#define W_LOW 6
#define W_HIGH 7
enum { ROWS = 16, DEPTHS = UNIT_DEPTHS, REQUEST_PERMISSION = 0x1023, TILE_DATA = 18, AHEAD = 4096, WIDENED = 512, FEWEST = 128 };

typedef struct {
  uint8_t palette, start, zero[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} Config;

static void shape(Config *c, int tile, int rows, int bytes) { c->rows[tile] = (uint8_t)rows, c->row_bytes[tile] = (uint16_t)bytes; }

// For ``rows`` rows, 32 at most, and ``depths`` at a time.
static void configure(int rows, int depths) {
  Config c = {.palette = 1};
  const int first = rows < ROWS ? rows : ROWS, next = rows > ROWS ? rows - ROWS : 1;
  for (int tile = LOW; tile <= NEXT_HIGH; tile++) shape(&c, tile, tile < NEXT_LOW ? first : next, 64);
  shape(&c, X, first, depths * 2), shape(&c, NEXT_X, next, depths * 2);
  for (int tile = W_LOW; tile <= W_HIGH; tile++) shape(&c, tile, depths / 2, 64);
  __asm__ volatile("" ::"r"(&c) : "memory");  // some compilers take the instruction to read 8 bytes, and write no others
  _tile_loadconfig(&c);
}

int jaxspec_usable(void) { return !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA); }

// The products of some depths of one panel with up to 32 rows, ``blocks`` times as many as the tiles are configured for.
INLINE void add_block(const int two, const uint8_t *p, int blocks, const uint8_t *x, size_t row_bytes, float (*sums)[PANEL], int goes_on,
                      int ahead) {
  const uint8_t *next_x = x + ROWS * row_bytes;
  float(*next)[PANEL] = sums + ROWS;
  if (goes_on) {
    _tile_loadd(LOW, sums, PANEL * 4);
    _tile_loadd(HIGH, sums[0] + 16, PANEL * 4);
    if (two) _tile_loadd(NEXT_LOW, next, PANEL * 4);
    if (two) _tile_loadd(NEXT_HIGH, next[0] + 16, PANEL * 4);
  } else {
    _tile_zero(LOW);
    _tile_zero(HIGH);
    _tile_zero(NEXT_LOW);
    _tile_zero(NEXT_HIGH);
  }
  for (int k = 0; k < blocks; k++, p += DEPTHS * PANEL * 2, x += DEPTHS * 2, next_x += DEPTHS * 2) {
    for (int line = 0; ahead && line < DEPTHS * PANEL * 2; line += 64) _mm_prefetch(p + AHEAD + line, _MM_HINT_T0);
    _tile_loadd(X, x, row_bytes);
    _tile_loadd(W_LOW, p, PANEL * 4);
    _tile_loadd(W_HIGH, p + 64, PANEL * 4);
    _tile_dpbf16ps(LOW, X, W_LOW);
    _tile_dpbf16ps(HIGH, X, W_HIGH);
    if (two) {
      _tile_loadd(NEXT_X, next_x, row_bytes);
      _tile_dpbf16ps(NEXT_LOW, NEXT_X, W_LOW);
      _tile_dpbf16ps(NEXT_HIGH, NEXT_X, W_HIGH);
    }
  }
  _tile_stored(LOW, sums, PANEL * 4);
  _tile_stored(HIGH, sums[0] + 16, PANEL * 4);
  if (two) _tile_stored(NEXT_LOW, next, PANEL * 4);
  if (two) _tile_stored(NEXT_HIGH, next[0] + 16, PANEL * 4);
}

// Depths of one panel, as pairs of bfloat16, added to the sums of each row, which begin at zero unless they go on.
static void add_depths(const uint8_t *pairs, int depth, const uint8_t *x, size_t row_bytes, float (*sums)[PANEL], int rows, int goes_on,
                       int ahead) {
  const int whole = depth / DEPTHS, rest = depth % DEPTHS;
  for (int first = 0, configured = 0; first < rows; first += 2 * ROWS, x += 2 * ROWS * row_bytes, sums += 2 * ROWS) {
    const int count = rows - first < 2 * ROWS ? rows - first : 2 * ROWS, asks = ahead && !first;
    if (whole) {
      if (configured != count) configure(count, DEPTHS);
      configured = rest ? 0 : count;
      if (count > ROWS) add_block(1, pairs, whole, x, row_bytes, sums, goes_on, asks);
      else add_block(0, pairs, whole, x, row_bytes, sums, goes_on, asks);
    }
    if (rest) {
      configure(count, rest);
      const uint8_t *p = pairs + (size_t)whole * DEPTHS * PANEL * 2, *last = x + whole * DEPTHS * 2;
      if (count > ROWS) add_block(1, p, 1, last, row_bytes, sums, goes_on || whole, 0);
      else add_block(0, p, 1, last, row_bytes, sums, goes_on || whole, 0);
    }
  }
}

int matrix_unit_takes(const Weight *w) {
  if (w->kind == BF16 || w->kind == F32) return w->kind == BF16;
  if (w->group >= w->depth) return 1;
  return w->group % DEPTHS == 0 && (w->exponent_scales || w->group >= FEWEST);  // a sum apart of few takes longer than it saves
}

void matrix_tile(const Weight *w, const uint8_t *panel, const void *scale, const uint8_t *x, float *const *y, int rows) {
  const size_t row_bytes = (size_t)w->depth * 2;
  if (w->kind != BF16 && rows <= FEW_ROWS) {
    few_rows(w, panel, scale, x, y, rows);
    return;
  }
  const int apart = w->kind != BF16 && !w->exponent_scales, step = apart ? w->group : w->depth;
  float sums[ROWS_AT_ONCE][PANEL] __attribute__((aligned(64)));
  uint32_t pairs[WIDENED / 2][PANEL] __attribute__((aligned(64)));
  for (int begin = 0; begin < w->depth; begin += step) {
    const int end = begin + step < w->depth ? begin + step : w->depth;
    if (w->kind == BF16) add_depths(panel, w->depth, x, row_bytes, sums, rows, 0, 1);
    else
      for (int from = begin; from < end; from += WIDENED) {
        const int count = end - from < WIDENED ? end - from : WIDENED;
        widen_depths(w, panel, scale, from, count, pairs);
        add_depths((const uint8_t *)pairs, count, x + from * 2, row_bytes, sums, rows, from > begin, 0);
      }
    for (int m = 0; m < rows; m++) {
      if (apart) add_scaled(w, scale, begin / step, sums[m], y[m]);
      else memcpy(y[m], sums[m], sizeof sums[m]);
    }
  }
  _tile_release();
}
#else
int jaxspec_usable(void) { return 1; }

int matrix_unit_takes(const Weight *w) {
  (void)w;
  return 0;
}

void matrix_tile(const Weight *w, const uint8_t *panel, const void *scale, const uint8_t *x, float *const *y, int rows) {
  (void)w, (void)panel, (void)scale, (void)x, (void)y, (void)rows;
}
#endif
