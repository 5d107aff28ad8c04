// Products of rows with one panel by Intel's matrix unit: 16 rows and 16 columns over 32 depths at a time.
//
// The unit adds even and odd depths apart, 16 of each, and then their sum to what was there before: one order for any
// number of rows, but not that of tile.c. It knows bfloat16 alone: other numbers are widened some depths at a time.
#include "kernels.h"

#include <string.h>
#ifdef __AMX_BF16__
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

// Tiles, which the compiler wants as literals; _REST for what 32 does not divide.
#define LOW 0
#define HIGH 1
#define X 2
#define W_LOW 3
#define W_HIGH 4
#define X_REST 5
#define W_LOW_REST 6
#define W_HIGH_REST 7
enum { ROWS = 16, DEPTHS = UNIT_DEPTHS, REQUEST_PERMISSION = 0x1023, TILE_DATA = 18, AHEAD = 4096, WIDENED = 512, FEWEST = 128 };

typedef struct {
  uint8_t palette, start, zero[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} Config;

static void configure(int rows, int rest) {
  Config c = {.palette = 1};
  int x[] = {LOW, HIGH, X, X_REST};
  for (int i = 0; i < 4; i++) c.rows[x[i]] = (uint8_t)rows, c.row_bytes[x[i]] = 64;
  for (int i = 0; i < 2; i++) c.rows[W_LOW + i] = 16, c.row_bytes[W_LOW + i] = 64;
  for (int i = 0; i < 2; i++) c.rows[W_LOW_REST + i] = (uint8_t)(rest ? rest / 2 : 1), c.row_bytes[W_LOW_REST + i] = 64;
  c.row_bytes[X_REST] = (uint16_t)(rest ? rest * 2 : 4);
  __asm__ volatile("" ::"r"(&c) : "memory");  // some compilers take the instruction to read 8 bytes, and write no others
  _tile_loadconfig(&c);
}

int jaxspec_usable(void) { return !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA); }

// Depths of one panel, as pairs of bfloat16, added to the sums of each row, which begin at zero unless they go on.
static void add_depths(const uint8_t *pairs, int depth, const uint8_t *x, size_t row_bytes, float sums[][PANEL], int rows, int goes_on,
                       int ahead) {
  const int rest = depth % DEPTHS;
  for (int first = 0; first < rows; first += ROWS, x += ROWS * row_bytes, sums += ROWS) {
    const int count = rows - first < ROWS ? rows - first : ROWS;
    const uint8_t *p = pairs;
    if (!first || count < ROWS) configure(count, rest);
    if (goes_on) {
      _tile_loadd(LOW, sums, sizeof sums[0]);
      _tile_loadd(HIGH, sums[0] + 16, sizeof sums[0]);
    } else {
      _tile_zero(LOW);
      _tile_zero(HIGH);
    }
    for (int k = 0; k + DEPTHS <= depth; k += DEPTHS, p += DEPTHS / 2 * PANEL * 4) {
      for (int line = 0; ahead && !first && line < DEPTHS * PANEL * 2; line += 64) _mm_prefetch(p + AHEAD + line, _MM_HINT_T0);
      _tile_loadd(X, x + k * 2, row_bytes);
      _tile_loadd(W_LOW, p, PANEL * 4);
      _tile_loadd(W_HIGH, p + 64, PANEL * 4);
      _tile_dpbf16ps(LOW, X, W_LOW);
      _tile_dpbf16ps(HIGH, X, W_HIGH);
    }
    if (rest) {
      _tile_loadd(X_REST, x + (depth - rest) * 2, row_bytes);
      _tile_loadd(W_LOW_REST, p, PANEL * 4);
      _tile_loadd(W_HIGH_REST, p + 64, PANEL * 4);
      _tile_dpbf16ps(LOW, X_REST, W_LOW_REST);
      _tile_dpbf16ps(HIGH, X_REST, W_HIGH_REST);
    }
    _tile_stored(LOW, sums, sizeof sums[0]);
    _tile_stored(HIGH, sums[0] + 16, sizeof sums[0]);
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
  float sums[ROWS_AT_ONCE][PANEL];
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
