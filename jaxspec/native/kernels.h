// What tile.c and kernels.c share.
#include <stddef.h>
#include <stdint.h>

#ifndef JAXSPEC_KERNELS
#define JAXSPEC_KERNELS

enum { PANEL = 32 };                       // columns that lie together
#ifdef __AVX512BF16__
enum { NARROW_ROWS = 1 };                  // whether products take rows of bfloat16 as they are, else as float32
#else
enum { NARROW_ROWS = 0 };
#endif
enum Kind { BF16, F32, INT8, FP8, FP4 };   // how numbers are stored

// One matrix [depth, columns], packed: see packing.py.
typedef struct {
  enum Kind kind;
  int depth, group;     // numbers along the depth; how many of them share a scale, 0 without scales
  int exponent_scales;  // whether scales are bytes, powers of two
  int wide;             // whether rows are float32: always for F32, and without NARROW_ROWS
} Weight;

static inline size_t panel_bytes(const Weight *w) {
  static const int eighths[] = {16, 32, 8, 8, 4};
  return (size_t)w->depth * PANEL * eighths[w->kind] / 8;
}

static inline size_t panel_scales(const Weight *w) {  // bytes
  return w->group ? (size_t)((w->depth + w->group - 1) / w->group) * PANEL * (w->exponent_scales ? 1 : 4) : 0;
}

// Multiplies rows with one panel: y[m][0..32) = x[m] times the panel.
typedef void Tile(const Weight *w, const void *panel, const void *scale, const void *const *x, float *const *y, int rows);

// The same by the CPU's matrix unit, if these kernels are compiled for one and it takes such weights: bfloat16 rows one
// after the other, ROWS_AT_ONCE at most.
enum { ROWS_AT_ONCE = 96 };
int matrix_unit_takes(const Weight *w);
void matrix_tile(const Weight *w, const uint8_t *panel, const void *scale, const uint8_t *x, float *const *y, int rows);

// What it needs of tile.c: ``count`` depths of quantized numbers as pairs of bfloat16, times their scales if these are
// powers of two; and sums of a group times its other scales, added to y after the first group.
void widen_depths(const Weight *w, const uint8_t *panel, const uint8_t *scale, int from, int count, uint32_t (*restrict pairs)[PANEL]);
void add_scaled(const Weight *w, const void *scale, int group, const float *sums, float *y);
// The unit's bits, for few rows of quantized numbers.
enum { FEW_ROWS = 2, UNIT_DEPTHS = 32 };
void few_rows(const Weight *w, const uint8_t *panel, const uint8_t *scale, const uint8_t *x, float *const *y, int rows);
#endif
