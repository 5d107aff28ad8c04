// The best token of a row of scores with the noise that draws it: Gumbel noise of those tokens alone that may be best.
#include "call.h"
#include "lanes.h"

#include <float.h>
#include <math.h>

typedef struct {
  int width, own_tokens;  // whether each row has tokens of its own
  const float *score;
  const uint32_t *first, *second;  // of each row's key
  const int32_t *warm, *token;     // NULL where a token's id is its place
  int32_t *out;
} Draw;

static const uint8_t TURNS[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
static const float MOST_NOISE = 16.7f;  // above that of the largest number below 1
static const float SLACK = 1e-3f;       // above what sums and bounds round

// Encrypts numbers by Threefry-2x32 with 20 rounds, as jaxspec/keys.py; returns uniform numbers in [0, 1).
INLINE floats uniform(uint32_t first, uint32_t second, words number) {
  const uint32_t keys[3] = {first, second, first ^ second ^ 0x1BD11BDAu};
  words y = number + second, x = (words){0} + first;
#pragma GCC unroll 5
  for (int turn = 0; turn < 5; turn++) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const uint32_t by = TURNS[turn % 2][i];
      x += y;
      y = x ^ (y << by | y >> (32 - by));
    }
    x += keys[(turn + 1) % 3];
    y += keys[(turn + 2) % 3] + (uint32_t)(turn + 1);
  }
  return (floats)(((x ^ y) >> 9) | 0x3F800000u) - 1.0f;
}

static float noise(float below_1) {
  const float inner = (float)-log(below_1 > 0 ? below_1 : FLT_MIN);
  return (float)-log(inner);
}

// Returns the first place of the largest score, or of the first one that is not a number.
static int largest(const float *score, int width) {
  floats most = (floats){0} - INFINITY;
  ints unknown = {0};
  for (int i = 0; i < width; i += LANES) {
    const floats s = some(score + i, width - i);
    const words larger = (words)(s > most);
    unknown |= s != s;
    most = (floats)(((words)s & larger) | ((words)most & ~larger));
  }
  float best = most[0];
  for (int lane = 1; lane < LANES; lane++) best = most[lane] > best ? most[lane] : best;
  const int lacks = any(unknown);
  for (int i = 0; i < width; i += LANES) {
    const floats s = some(score + i, width - i);
    if (any(lacks ? s != s : s == best))
      for (int lane = 0; lane < LANES; lane++)
        if (lacks ? s[lane] != s[lane] : s[lane] == best) return i + lane;
  }
  return 0;
}

static void draw_piece(void *job, int row) {
  const Draw *d = job;
  const float *score = d->score + (size_t)row * d->width;
  const int32_t *token = d->token && d->own_tokens ? d->token + (size_t)row * d->width : d->token;
  int at = largest(score, d->width);
  d->out[row] = at;
  if (!d->warm[row] || !isfinite(score[at])) return;  // an infinity stays what it is with noise
  words place;
  for (int lane = 0; lane < LANES; lane++) place[lane] = (uint32_t)lane;
  float best = -INFINITY;
  // The best score's own noise comes first: most others then cannot reach it.
  for (int i = at / LANES * LANES, first = 1; i < d->width; i = first ? 0 : i + LANES, first = 0) {
    const int count = d->width - i < LANES ? d->width - i : LANES;
    const floats s = some(score + i, count);
    if (!any(s + MOST_NOISE >= best)) continue;
    words number = place + (uint32_t)i;
    if (token) number = (words)some((const float *)(token + i), count);
    const floats u = uniform(d->first[row], d->second[row], number);
    // Noise is at most -log(1 - u), of which the exponent's bits say enough.
    const ints exponent = (ints)((words)(1.0f - u) >> 23) - 127;
    const ints may = s - __builtin_convertvector(exponent, floats) * 0.6931472f + SLACK >= best;
    if (!any(may)) continue;
    for (int lane = 0; lane < count; lane++) {
      if (!may[lane]) continue;
      const float noisy = s[lane] + noise(u[lane]);
      if (noisy > best || (noisy == best && i + lane < at)) best = noisy, at = i + lane;
    }
  }
  d->out[row] = at;
}

// score [N, V] float32, words of a key [N] uint32 each, whether noise is added [N] int32, and maybe tokens' ids [V] or
// [N, V] int32 -> place of the best [N] int32.
XLA_FFI_Error *jaxspec_draw(XLA_FFI_CallFrame *frame) {
  if (asked_for_version(frame)) return NULL;
  const XLA_FFI_Buffer *score = arg(frame, 0), *token = frame->args.size > 4 ? arg(frame, 4) : NULL;
  Draw d = {(int)score->dims[1], token && token->rank == 2, score->data,
            arg(frame, 1)->data, arg(frame, 2)->data, arg(frame, 3)->data, token ? token->data : NULL,
            result(frame, 0)->data};
  share((int)score->dims[0], draw_piece, &d);
  return NULL;
}
