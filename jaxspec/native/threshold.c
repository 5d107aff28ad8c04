// The largest number of a row at which those that are not smaller weigh enough together, without a sort.
#include "call.h"
#include "lanes.h"

#include <string.h>

enum { MOST_BITS = 11 };  // of a digit: 2^11 weights stay in the first cache

typedef struct {
  int width;
  const float *x;
  const int32_t *weight, *least;
  float *out;
} Threshold;

INLINE words order(words u) {  // unsigned numbers in the order of the floats with these bits
  return u ^ ((words)((ints)u >> 31) | 0x80000000u);
}

// Returns the largest digit at which its weight and that of larger ones reach what is left, less what larger ones
// weigh; -1 if they do not.
static int choose(const uint32_t *weight, int digits, uint32_t *left) {
  for (int digit = digits - 1; digit >= 0; *left -= weight[digit--])
    if (weight[digit] >= *left) return digit;
  return -1;
}

static void threshold_piece(void *job, int row) {
  const Threshold *t = job;
  const float *x = t->x + (size_t)row * t->width;
  const int32_t *weight = t->weight + (size_t)row * t->width;
  const int bits[] = {MOST_BITS, MOST_BITS, 10};
  uint32_t left = (uint32_t)t->least[row], found = 0;
  for (int digit = 0, shift = 32; digit < 3; digit++) {
    uint32_t sums[1 << MOST_BITS] = {0};
    const int above = shift;  // those with the digits found so far, which are all for the first one
    const uint32_t mask = (1u << bits[digit]) - 1;
    shift -= bits[digit];
    for (int i = 0; i < t->width; i += LANES) {
      const int count = t->width - i < LANES ? t->width - i : LANES;
      const words u = order((words)some(x + i, count));
      if (digit && !any(u >> above == found)) continue;
      for (int lane = 0; lane < count; lane++)
        if (!digit || u[lane] >> above == found) sums[u[lane] >> shift & mask] += (uint32_t)weight[i + lane];
    }
    const int chosen = choose(sums, 1 << bits[digit], &left);
    if (chosen < 0) {  // all weigh less
      memset(t->out + row, 0xff, 4);
      return;
    }
    found = found << bits[digit] | (uint32_t)chosen;
  }
  found = found >> 31 ? found & 0x7fffffffu : ~found;
  memcpy(t->out + row, &found, 4);
}

// x [N, V] float32, weight [N, V] int32 of 0 or more, below 2^31 together, least [N] int32 of at least 1 -> out [N]
// float32, not-a-number where a row weighs less.
XLA_FFI_Error *jaxspec_threshold(XLA_FFI_CallFrame *frame) {
  if (asked_for_version(frame)) return NULL;
  const XLA_FFI_Buffer *x = arg(frame, 0);
  Threshold t = {(int)x->dims[1], x->data, arg(frame, 1)->data, arg(frame, 2)->data, result(frame, 0)->data};
  share((int)x->dims[0], threshold_piece, &t);
  return NULL;
}
