// The largest number of a row at which those that are not smaller weigh enough together, without a sort; and with it
// what top-k and top-p leave out.
#include "call.h"
#include "softmax.h"

#include <stdlib.h>

enum { MOST_BITS = 11 };  // of a digit: 2^11 weights stay in the first cache

INLINE words order(words u) {  // unsigned numbers in the order of the floats with these bits
  return u ^ ((words)((ints)u >> 31) | 0x80000000u);
}

// Returns the largest digit at which its weight and that of larger ones reach what is left, less what larger ones
// weigh; -1 if they do not.
static int digit_at(const uint32_t *weight, int digits, uint32_t *left) {
  for (int digit = digits - 1; digit >= 0; *left -= weight[digit--])
    if (weight[digit] >= *left) return digit;
  return -1;
}

// Returns that number, not-a-number where all weigh less; without weights each weighs 1.
static float find(const float *x, const int32_t *weight, int width, uint32_t left) {
  const int bits[] = {MOST_BITS, MOST_BITS, 10};
  uint32_t found = 0;
  for (int digit = 0, shift = 32; digit < 3; digit++) {
    uint32_t sums[1 << MOST_BITS] = {0};
    const int above = shift;  // those with the digits found so far, which are all for the first one
    const uint32_t mask = (1u << bits[digit]) - 1;
    shift -= bits[digit];
    for (int i = 0; i < width; i += LANES) {
      const int count = width - i < LANES ? width - i : LANES;
      const words u = order((words)some(x + i, count));
      if (digit && !any(u >> above == found)) continue;
      for (int lane = 0; lane < count; lane++)
        if (!digit || u[lane] >> above == found) sums[u[lane] >> shift & mask] += weight ? (uint32_t)weight[i + lane] : 1;
    }
    const int chosen = digit_at(sums, 1 << bits[digit], &left);
    if (chosen < 0) {  // which is not a number
      found = 0;
      break;
    }
    found = found << bits[digit] | (uint32_t)chosen;
  }
  found = found >> 31 ? found & 0x7fffffffu : ~found;
  float number;
  memcpy(&number, &found, 4);
  return number;
}

typedef struct {
  int width;
  const float *x;
  const int32_t *weight, *least;
  float *out;
} Threshold;

static void threshold_piece(void *job, int row) {
  const Threshold *t = job;
  const size_t first = (size_t)row * t->width;
  t->out[row] = find(t->x + first, t->weight + first, t->width, (uint32_t)t->least[row]);
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

typedef struct {
  int width;
  const float *x, *floor;        // from the best score to the least that min-p keeps
  const int32_t *top_k, *units;  // 0 for all; of 2^-30 of the probability, 0 for all
  float *out;
  atomic_int failed;
} Cut;

static float best_of(const float *x, int width) {
  floats best = all(-INFINITY);
  for (int i = 0; i < width; i += LANES) best = larger(some(x + i, width - i), best);
  return largest(best);
}

static void cut_piece(void *job, int row) {
  static _Thread_local float *weight;  // of a row, and once more to be added up
  static _Thread_local int room;
  Cut *c = job;
  const int width = c->width, padded = (width + LANES - 1) / LANES * LANES;
  const float *x = c->x + (size_t)row * width, best = best_of(x, width);
  float cut = best + c->floor[row];
  if (c->top_k[row] > 0 && c->top_k[row] < width) {
    const float kth = find(x, NULL, width, (uint32_t)c->top_k[row]);
    cut = kth > cut ? kth : cut;
  }
  if (c->units[row] && isfinite(best)) {
    if (room < padded) {
      free(weight);
      weight = malloc((size_t)padded * 2 * sizeof *weight);
      room = weight ? padded : 0;
      if (!weight) {
        c->failed = 1;
        return;
      }
    }
    float *terms = weight + padded;
    for (int i = 0; i < width; i += LANES) {
      const floats s = some(x + i, width - i);
      *(floats *)(weight + i) = *(floats *)(terms + i) = exponential(choose(s < cut, all(-INFINITY), s) - best);
    }
    const float total = halving_sum(terms, width);
    for (int i = 0; i < width; i += LANES) {
      const floats share = *(floats *)(weight + i) / total * (float)(1 << 30);
      // The nearest whole number: what has a fraction is below 2^23.
      const floats whole = choose(share < 8388608.0f, share + 8388608.0f - 8388608.0f, share);
      *(ints *)(weight + i) = __builtin_convertvector(whole, ints);
    }
    const float least = find(x, (const int32_t *)weight, width, (uint32_t)c->units[row]);
    cut = least > cut ? least : cut;
  }
  c->out[row] = cut;
}

// x [N, V] float32, and of each row what min-p takes from the best score [N] float32 (-infinity for all that there is),
// top-k [N] int32 and top-p in units of 2^-30 [N] int32, both 0 for none -> out [N] float32, below which scores go.
XLA_FFI_Error *jaxspec_cut(XLA_FFI_CallFrame *frame) {
  if (asked_for_version(frame)) return NULL;
  const XLA_FFI_Buffer *x = arg(frame, 0);
  Cut c = {(int)x->dims[1], x->data, arg(frame, 1)->data, arg(frame, 2)->data, arg(frame, 3)->data,
           result(frame, 0)->data};
  share((int)x->dims[0], cut_piece, &c);
  return c.failed ? out_of_memory(frame) : NULL;
}
