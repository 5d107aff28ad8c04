// Attention of T new positions per row to that row's cache, which is read once for all of them.
//
// Blocks lie at multiples of their size, and the running softmax (Milakov 2018) goes over them in their order, so a
// query's sums depend on its own position alone: what it does not see adds zero. Where threads would have nothing to
// do, parts of the blocks are computed side by side, and their sums put together in the same order: the same bits.
#include "attention.h"

#include <math.h>
#include <stdlib.h>

static const float MASKED = -1e30f;
static const size_t MOST_STORED = (size_t)256 << 20;  // bytes

enum { OWN, SHARED, USES };
static char *scratch(int use, size_t size) {  // this thread's, kept for the next call
  static _Thread_local char *memory[USES];
  static _Thread_local size_t there[USES];
  if (size > there[use]) {
    free(memory[use]);
    memory[use] = aligned_alloc(64, (size + 63) / 64 * 64), there[use] = memory[use] ? size : 0;
  }
  return memory[use];
}

static int lay_out(Work *w) {
  const Attention *a = w->a;
  const size_t deepest = a->width > a->block ? a->width : a->block;
  const size_t sizes[] = {(deepest + 2) * PANEL * 4, (size_t)w->queries * a->width * 4,
                          (size_t)w->queries * a->block * 4, (size_t)w->queries * w->stride * 4};
  size_t at[5] = {0};
  for (int i = 0; i < 4; i++) at[i + 1] = at[i] + (sizes[i] + 63) / 64 * 64;
  char *memory = scratch(OWN, at[4]);
  w->panel = memory, w->q = memory + at[1], w->weight = memory + at[2], w->score = (float *)(memory + at[3]);
  return memory != NULL;
}

static void choose_queries(Work *w, const Attention *a, int piece) {
  const int all_queries = a->count * a->group;
  *w = (Work){a, piece / a->tiles / a->kv_heads, piece / a->tiles % a->kv_heads, piece % a->tiles * QUERIES};
  w->queries = all_queries - w->first < QUERIES ? all_queries - w->first : QUERIES;
  w->stride = (a->block + PANEL - 1) / PANEL * PANEL, w->lowest = INT32_MAX, w->last = -1;
  for (int m = 0; m < w->queries; m++) {
    const int position = a->position[(size_t)w->b * a->count + node_of(w, m)];
    w->position[m] = clip(position, -1, a->most_positions - 1);
    w->last = w->position[m] > w->last ? w->position[m] : w->last;
    w->lowest = w->position[m] < w->lowest ? w->position[m] : w->lowest;
  }
  w->lowest = first_seen(a, w->lowest);
}

// Takes up a piece's queries; returns whether there is memory for them.
static int begin(Work *w, Attention *a, int piece) {
  choose_queries(w, a, piece);
  if (!lay_out(w)) {
    a->failed = 1;
    return 0;
  }
  for (int m = 0; m < w->queries; m++) {
    const int head = w->g * a->group + (w->first + m) % a->group;
    const size_t at = ((size_t)w->b * a->count + node_of(w, m)) * a->heads + head;
    round_row(a, w->q + (size_t)m * a->width * a->row_bytes, a->q + at * a->width, a->width, a->scale);
    w->top[m] = a->sinks ? a->sinks[head] : MASKED, w->total[m] = a->sinks ? 1 : 0;
    w->out[m] = a->out + at * a->value_width;
  }
  return 1;
}

static int blocks(const Work *w) { return w->last < 0 ? 0 : w->last / w->a->block - w->lowest / w->a->block + 1; }

static void go_to(Work *w, int number) {  // of the blocks that any query sees
  const Attention *a = w->a;
  w->at = (w->lowest / a->block + number) * a->block;
  w->begin = w->lowest > w->at ? w->lowest - w->at : 0;
  w->end = w->last - w->at < a->block ? w->last - w->at + 1 : a->block;
  w->entry = entry(w, w->at);
  w->own = a->depths ? clip(a->start[w->b] - w->at, 0, a->block) : a->block;
  const int is_last = w->at + a->block > w->last, own_values = a->v != a->k;
  const size_t next = is_last ? 0 : entry(w, w->at + a->block), key = (size_t)a->width * a->bytes;
  const size_t value = (size_t)a->value_stride * a->bytes;
  const Ahead keys = {is_last ? NULL : a->k + next * key, key}, values = {a->v + w->entry * value, value};
  const Ahead next_values = {is_last ? NULL : a->v + next * value, value}, none = {0};
  w->by_keys = a->store ? keys : own_values ? values : none;
  w->by_values = !a->store ? keys : own_values ? next_values : none;
}

static void finish(Work *w) {
  for (int m = 0; m < w->queries; m++) {
    const float inverse = 1 / (w->total[m] > 1e-30f ? w->total[m] : 1e-30f);
    for (int c = 0; c < w->a->value_width; c++) w->out[m][c] *= inverse;
  }
}

static void attend(void *job, int piece) {
  Work w;
  if (!begin(&w, job, piece)) return;
  for (int m = 0; m < w.queries; m++) memset(w.out[m], 0, w.a->value_width * 4);
  for (int n = 0; n < blocks(&w); n++) {
    go_to(&w, n);
    score_block(&w);
    for (int m = 0; m < w.queries; m++) weigh_block(&w, m, see_block(&w, m));
    add_values(&w);
  }
  finish(&w);
}

// ---- The same in parts: scores of all blocks, then their weights and values, then the sums ----

typedef struct { float *score, *added, *top, *keep, *sum; } Block;  // [queries, ...], as stored

static size_t block_floats(const Attention *a) {
  return a->most_queries * ((size_t)(a->block + PANEL - 1) / PANEL * PANEL + a->value_width + 3);
}

static Block stored(const Work *w, int piece, int number) {
  const Attention *a = w->a;
  float *score = a->store + ((size_t)piece * a->blocks + number) * block_floats(a);
  const size_t queries = a->most_queries;
  float *added = score + queries * w->stride, *top = added + queries * a->value_width;
  return (Block){score, added, top, top + queries, top + 2 * queries};
}

static int part_begin(const Work *w, int part) { return (int)((int64_t)blocks(w) * part / w->a->parts); }

static void score_part(void *job, int number) {
  Attention *a = job;
  const int piece = number / a->parts, part = number % a->parts;
  Work w;
  if (!begin(&w, a, piece)) return;
  for (int n = part_begin(&w, part); n < part_begin(&w, part + 1); n++) {
    const Block block = stored(&w, piece, n);
    go_to(&w, n);
    w.score = block.score;
    score_block(&w);
    for (int m = 0; m < w.queries; m++) block.top[m] = see_block(&w, m);
  }
}

static void add_part(void *job, int number) {
  Attention *a = job;
  const int piece = number / a->parts, part = number % a->parts;
  Work w;
  if (!begin(&w, a, piece)) return;
  for (int n = 0; n < part_begin(&w, part + 1); n++) {
    const Block block = stored(&w, piece, n);
    const int earlier = n < part_begin(&w, part);
    go_to(&w, n);
    w.score = block.score;
    for (int m = 0; m < w.queries; m++) {
      const float top = block.top[m] > w.top[m] ? block.top[m] : w.top[m];
      w.total[m] = 0, w.out[m] = block.added + (size_t)m * a->value_width;
      if (earlier) w.top[m] = top;
      else weigh_block(&w, m, top), block.keep[m] = w.keep[m], block.sum[m] = w.total[m];
    }
    if (earlier) continue;
    memset(block.added, 0, (size_t)w.queries * a->value_width * 4);
    add_values(&w);
  }
}

static void put_together(void *job, int piece) {
  Work w;
  if (!begin(&w, job, piece)) return;
  const int width = w.a->value_width;
  for (int m = 0; m < w.queries; m++) memset(w.out[m], 0, width * 4);
  for (int n = 0; n < blocks(&w); n++) {
    const Block block = stored(&w, piece, n);
    for (int m = 0; m < w.queries; m++) {
      w.total[m] = fmaf(w.total[m], block.keep[m], block.sum[m]);
      for (int c = 0; c < width; c++) w.out[m][c] = fmaf(w.out[m][c], block.keep[m], block.added[(size_t)m * width + c]);
    }
  }
  finish(&w);
}

// Whether to compute in parts: where whole pieces would leave half of the threads without work.
static int plan_parts(Attention *a, int pieces) {
  const int threads = threads_of_pool(), turns = (pieces + threads - 1) / threads;
  if (threads < 2 || pieces * 2 > turns * threads) return 0;
  for (int piece = 0; piece < pieces; piece++) {
    Work w;
    choose_queries(&w, a, piece);
    a->blocks = blocks(&w) > a->blocks ? blocks(&w) : a->blocks;
  }
  a->parts = threads < a->blocks / 2 ? threads : a->blocks / 2;
  const size_t bytes = (size_t)pieces * a->blocks * block_floats(a) * 4;
  if (a->parts < 2 || bytes > MOST_STORED) return 0;
  a->store = (float *)scratch(SHARED, bytes);
  return a->store != NULL;
}

// q [B, T, H, C] float32, keys [P, G, Z, C], values [P, G, Z, C'] (or [0]: the beginnings of the keys), position [B, T],
// table [B, J] and base [1]: pages of each row, start [B], path [B or 1, T, D] (or [0]: a chain), sinks [H] (or [0]),
// kept [B * T, room] (or [0]: all) -> out [B, T, H, C'] float32.
XLA_FFI_Error *jaxspec_attention(XLA_FFI_CallFrame *frame) {
  if (asked_for_version(frame)) return NULL;
  const XLA_FFI_Buffer *q = arg(frame, 0), *k = arg(frame, 1), *v = arg(frame, 2), *table = arg(frame, 4);
  const XLA_FFI_Buffer *path = arg(frame, 7), *sinks = arg(frame, 8), *kept = arg(frame, 9), *out = result(frame, 0);
  Attention a = {(int)q->dims[0], (int)q->dims[1], (int)q->dims[2], (int)k->dims[1]};
  a.group = a.heads / a.kv_heads, a.width = (int)q->dims[3], a.value_width = (int)out->dims[3];
  a.value_stride = v->rank == 4 ? a.value_width : a.width, a.bytes = (int)number(frame, "bytes");
  a.row_bytes = NARROW_ROWS ? a.bytes : 4;
  a.block = (int)number(frame, "block"), a.span = (int)number(frame, "span"), a.ring = (int)number(frame, "ring");
  a.pages = (int)k->dims[0], a.page = (int)k->dims[2], a.pages_per_row = (int)table->dims[1], a.scale = real(frame, "scale");
  a.depths = path->rank == 3 ? (int)path->dims[2] : 0, a.paths_per_row = path->rank == 3 && path->dims[0] > 1;
  a.q = q->data, a.k = k->data, a.v = v->rank == 4 ? v->data : k->data, a.position = arg(frame, 3)->data;
  a.table = table->data, a.base = arg(frame, 5)->data, a.start = arg(frame, 6)->data, a.path = path->data;
  if (kept->rank == 2) a.kept = kept->data, a.room = (int)kept->dims[1];
  a.sinks = sinks->dims[0] ? sinks->data : NULL, a.out = out->data;
  a.most_positions = a.ring ? INT32_MAX : a.pages_per_row * a.page;
  if (a.kept && a.room < a.most_positions) a.most_positions = a.room;
  a.most_queries = a.count * a.group < QUERIES ? a.count * a.group : QUERIES;
  a.tiles = (a.count * a.group + QUERIES - 1) / QUERIES;
  const int pieces = a.rows * a.kv_heads * a.tiles;
  if (plan_parts(&a, pieces)) {
    share(pieces * a.parts, score_part, &a);
    if (!a.failed) share(pieces * a.parts, add_part, &a);
    if (!a.failed) share(pieces, put_together, &a);
  } else {
    share(pieces, attend, &a);
  }
  return a.failed ? out_of_memory(frame) : NULL;
}
