// Products of rows with one panel of bfloat16 by Intel's matrix unit: 16 rows and 16 columns over 32 depths at a time.
//
// The unit adds even and odd depths apart, 16 of each, and then their sum to what was there before: one order for any
// number of rows, but not that of tile.c.
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
enum { ROWS = 16, DEPTHS = 32, REQUEST_PERMISSION = 0x1023, TILE_DATA = 18, AHEAD = 4096 };

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

int has_matrix_unit(void) { return 1; }

void matrix_tile(const Weight *w, const uint8_t *panel, const uint8_t *x, float *const *y, int rows) {
  const int depth = w->depth, rest = depth % DEPTHS;
  const size_t row_bytes = (size_t)depth * 2;
  float out[ROWS][PANEL];
  for (int first = 0; first < rows; first += ROWS) {
    const int count = rows - first < ROWS ? rows - first : ROWS;
    const uint8_t *xs = x + first * row_bytes, *p = panel;
    if (!first || count < ROWS) configure(count, rest);
    _tile_zero(LOW);
    _tile_zero(HIGH);
    for (int k = 0; k + DEPTHS <= depth; k += DEPTHS, p += DEPTHS / 2 * PANEL * 4) {
      if (!first)
        for (int line = 0; line < DEPTHS * PANEL * 2; line += 64) _mm_prefetch(p + AHEAD + line, _MM_HINT_T0);
      _tile_loadd(X, xs + k * 2, row_bytes);
      _tile_loadd(W_LOW, p, PANEL * 4);
      _tile_loadd(W_HIGH, p + 64, PANEL * 4);
      _tile_dpbf16ps(LOW, X, W_LOW);
      _tile_dpbf16ps(HIGH, X, W_HIGH);
    }
    if (rest) {
      _tile_loadd(X_REST, xs + (depth - rest) * 2, row_bytes);
      _tile_loadd(W_LOW_REST, p, PANEL * 4);
      _tile_loadd(W_HIGH_REST, p + 64, PANEL * 4);
      _tile_dpbf16ps(LOW, X_REST, W_LOW_REST);
      _tile_dpbf16ps(HIGH, X_REST, W_HIGH_REST);
    }
    _tile_stored(LOW, out, sizeof out[0]);
    _tile_stored(HIGH, out[0] + 16, sizeof out[0]);
    for (int m = 0; m < count; m++) memcpy(y[first + m], out[m], sizeof out[m]);
  }
  _tile_release();
}
#else
int jaxspec_usable(void) { return 1; }

int has_matrix_unit(void) { return 0; }

void matrix_tile(const Weight *w, const uint8_t *panel, const uint8_t *x, float *const *y, int rows) {
  (void)w, (void)panel, (void)x, (void)y, (void)rows;
}
#endif
