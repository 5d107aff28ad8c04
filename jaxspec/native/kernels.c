// Calls of XLA's foreign function interface, and the threads that share their work.
#include "call.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#else
#define PAUSE() __asm__ volatile("" ::: "memory")
#endif

// ---- Threads ----
// Work comes as numbered pieces that threads take one by one. The ticket holds the number of the job and how many of
// its pieces nobody took yet; a piece is taken by counting down, so a thread that comes late takes nothing.

static struct { Piece *run; void *job; } work;
static _Atomic uint64_t ticket;
static atomic_int finished, sleeping, helpers;
static pthread_mutex_t one_job = PTHREAD_MUTEX_INITIALIZER, bed = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t alarm_clock = PTHREAD_COND_INITIALIZER;
enum { SPINS = 4000 };  // about 50 microseconds: longer than what lies between two products of a step

static void take_pieces(void) {
  for (uint64_t t = atomic_load(&ticket); (uint32_t)t; t = atomic_load(&ticket))
    if (atomic_compare_exchange_weak(&ticket, &t, t - 1)) {
      work.run(work.job, (int)(uint32_t)t - 1);
      atomic_fetch_add(&finished, 1);
    }
}

static void flush_subnormals(void) {  // as XLA's own threads do
#if defined(__x86_64__)
  _mm_setcsr(_mm_getcsr() | 0x8040);
#endif
}

static void *help(void *unused) {
  (void)unused;
  flush_subnormals();
  for (;;) {
    for (int i = 0; i < SPINS && !(uint32_t)atomic_load_explicit(&ticket, memory_order_relaxed); i++) PAUSE();
    take_pieces();
    if ((uint32_t)atomic_load(&ticket)) continue;
    pthread_mutex_lock(&bed);
    atomic_fetch_add(&sleeping, 1);
    while (!(uint32_t)atomic_load(&ticket)) pthread_cond_wait(&alarm_clock, &bed);
    atomic_fetch_sub(&sleeping, 1);
    pthread_mutex_unlock(&bed);
  }
  return NULL;
}

void jaxspec_threads(int count) {  // how many threads compute, the caller's included; never fewer than before
  for (pthread_t thread; atomic_load(&helpers) < count - 1;) {
    if (pthread_create(&thread, NULL, help, NULL)) return;
    pthread_detach(thread);
    atomic_fetch_add(&helpers, 1);
  }
}

int threads_of_pool(void) { return atomic_load(&helpers) + 1; }

static void forget_helpers(void) {  // a forked child has none
  atomic_store(&helpers, 0), atomic_store(&sleeping, 0), atomic_store(&ticket, 0);
}
__attribute__((constructor)) static void at_load(void) { pthread_atfork(NULL, NULL, forget_helpers); }

void share(int pieces, Piece *run, void *job) {
  if (pieces < 2 || !atomic_load(&helpers) || pthread_mutex_trylock(&one_job)) {
    for (int i = 0; i < pieces; i++) run(job, i);
    return;
  }
  work.run = run, work.job = job;
  atomic_store(&finished, 0);
  uint64_t number = (atomic_load(&ticket) >> 32) + 1;
  atomic_store(&ticket, number << 32 | (uint32_t)pieces);
  if (atomic_load(&sleeping)) {
    pthread_mutex_lock(&bed);
    pthread_cond_broadcast(&alarm_clock);
    pthread_mutex_unlock(&bed);
  }
  take_pieces();
  while (atomic_load(&finished) < pieces) PAUSE();
  pthread_mutex_unlock(&one_job);
}

// ---- product: rows times the matrices that they chose ----

enum { PANELS_PER_PIECE = 4, LINE = 64 };
typedef struct {
  Weight w;
  const uint8_t *data, *scale;
  size_t matrix_bytes, matrix_scales;
  int panels, pieces_per_matrix, columns;
  int matrices, *matrix, *last;  // those that any row chose, and where their rows end in x and y
  const void **x;
  float **y, *weight;     // rows sorted by matrix; their weights if they are summed
  int together, sums;     // how many neighbors are summed, and how many sums there are
  float *parts, *result;  // what is summed
  const uint8_t *bias;    // of each matrix, or NULL
  int wide_bias;          // whether it is float32 and not bfloat16
  int matrix_unit;        // whether it multiplies; rows of x then lie in their order
} Product;

static void add_bias(const Product *p, float *y, size_t first, int left) {
  for (int n = 0; n < PANEL && n < left; n++) {
    uint32_t u = p->wide_bias ? ((const uint32_t *)p->bias)[first + n] : (uint32_t)((const uint16_t *)p->bias)[first + n] << 16;
    float b;
    memcpy(&b, &u, 4);
    y[n] += b;
  }
}

static void product_piece(void *job, int piece) {
  Product *p = job;
  int at = piece / p->pieces_per_matrix, begin = piece % p->pieces_per_matrix * PANELS_PER_PIECE;
  const uint8_t *data = p->data + p->matrix[at] * p->matrix_bytes, *scale = p->scale + p->matrix[at] * p->matrix_scales;
  for (int first = at ? p->last[at - 1] : 0, last = p->last[at]; first < last; first += ROWS_AT_ONCE)
    for (int panel = begin; panel < begin + PANELS_PER_PIECE && panel < p->panels; panel++) {
      float *y[ROWS_AT_ONCE], edge[ROWS_AT_ONCE][PANEL];
      int left = p->columns - panel * PANEL, rows = last - first < ROWS_AT_ONCE ? last - first : ROWS_AT_ONCE;
      for (int m = 0; m < rows; m++) y[m] = left < PANEL ? edge[m] : p->y[first + m] + panel * PANEL;
      const uint8_t *numbers = data + panel * panel_bytes(&p->w), *scales = scale + panel * panel_scales(&p->w);
      if (p->matrix_unit) matrix_tile(&p->w, numbers, scales, p->x[first], y, rows);
      else tile(&p->w, numbers, scales, p->x + first, y, rows);
      for (int m = 0; p->bias && m < rows; m++) add_bias(p, y[m], (size_t)p->matrix[at] * p->columns + panel * PANEL, left);
      for (int m = 0; p->together && m < rows; m++)
        for (int n = 0; n < PANEL; n++) y[m][n] *= p->weight[first + m];
      for (int m = 0; left < PANEL && m < rows; m++) memcpy(p->y[first + m] + panel * PANEL, edge[m], left * sizeof(float));
    }
}

enum { SUMS_PER_PIECE = 8 };
static void sum_piece(void *job, int piece) {  // apart from the weighting, with which a compiler would fuse it
  Product *p = job;
  for (int m = piece * SUMS_PER_PIECE; m < (piece + 1) * SUMS_PER_PIECE && m < p->sums; m++) {
    float *sum = p->result + (size_t)m * p->columns, *part = p->parts + (size_t)m * p->together * p->columns;
    memcpy(sum, part, p->columns * sizeof(float));
    for (int a = 1; a < p->together; a++)
      for (int n = 0; n < p->columns; n++) sum[n] += part[(size_t)a * p->columns + n];
  }
}

// x [M, depth] float32, matrix chosen per row [M, A] int32 (none if not in range) or [0] for the only one, layer,
// data, scales, weights, bias of each matrix or [0] -> y [M * A, columns] float32; with weights [M * A] the sums of neighbors times their weights.
XLA_FFI_Error *jaxspec_product(XLA_FFI_CallFrame *frame) {
  if (asked_for_version(frame)) return NULL;
  XLA_FFI_Buffer *x = arg(frame, 0), *choice = arg(frame, 1), *y = result(frame, 0);
  int rows = (int)x->dims[0], width = (int)x->dims[1], matrices = (int)number(frame, "matrices");
  int all_choose = choice->rank < 2, each = all_choose ? 1 : (int)choice->dims[1], routed = rows * each;
  Product p = {.w = {(enum Kind)number(frame, "kind"), (int)number(frame, "depth"), (int)number(frame, "group"),
                (int)number(frame, "exponent_scales"), (int)number(frame, "wide")}};
  p.columns = (int)y->dims[1], p.panels = (p.columns + PANEL - 1) / PANEL;
  p.sums = (int)y->dims[0], p.together = arg(frame, 5)->dims[0] ? routed / p.sums : 0;
  p.matrix_bytes = p.panels * panel_bytes(&p.w), p.matrix_scales = p.panels * panel_scales(&p.w);
  size_t layer = *(int32_t *)arg(frame, 2)->data;
  p.data = (const uint8_t *)arg(frame, 3)->data + layer * matrices * p.matrix_bytes;
  p.scale = (const uint8_t *)arg(frame, 4)->data + layer * matrices * p.matrix_scales;

  int rounds = !p.w.wide, narrow = rounds && NARROW_ROWS, copy = rounds || p.w.depth != width;
  p.w.wide = !narrow;
  p.matrix_unit = narrow && matrix_unit_takes(&p.w);
  int sorted = p.matrix_unit && !all_choose;
  size_t row_bytes = (size_t)p.w.depth * (narrow ? 2 : 4);
  size_t part_bytes = p.together ? (size_t)routed * (p.columns + 1) * sizeof(float) : 0;
  size_t size = routed * 2 * sizeof(void *) + (matrices * 3 + 1) * sizeof(int) + part_bytes + (copy ? rows * row_bytes : 0) + (sorted ? routed * row_bytes : 0) + LINE;
  char *memory = malloc(size), *free_memory = memory;
  if (!memory) return out_of_memory(frame);
  p.x = (void *)memory, p.y = (void *)(p.x + routed), p.matrix = (int *)(p.y + routed), p.last = p.matrix + matrices;
  p.weight = (float *)(p.last + matrices * 2 + 1), p.parts = p.weight + routed;
  char *copied = (char *)(((uintptr_t)p.weight + part_bytes + LINE - 1) / LINE * LINE);  // whose tiles begin with a cache line
  const float *weights = arg(frame, 5)->data;
  p.result = y->data, p.wide_bias = arg(frame, 6)->dtype == XLA_FFI_DataType_F32;
  if (arg(frame, 6)->dims[0])
    p.bias = (const uint8_t *)arg(frame, 6)->data + layer * matrices * p.columns * (p.wide_bias ? 4 : 2);
  float *rows_of_y = p.together ? p.parts : y->data;

  for (int m = 0; copy && m < rows; m++) {
    const float *from = (const float *)x->data + (size_t)m * width;
    if (narrow) {
      uint16_t *to = (uint16_t *)(copied + m * row_bytes);
      for (int k = 0; k < width; k++) to[k] = to_bfloat16(from[k]);
      for (int k = width; k < p.w.depth; k++) to[k] = 0;
    } else {
      float *to = memcpy(copied + m * row_bytes, from, width * 4);
      for (int k = 0; rounds && k < width; k++) to[k] = round_to_bfloat16(to[k]);
      for (int k = width; k < p.w.depth; k++) to[k] = 0;
    }
  }
  const char *base = copy ? copied : x->data;
  const int32_t *chosen_by = choice->data;
  int *place = p.last + matrices;  // counting sort: rows of a matrix keep their order
  memset(place, 0, (matrices + 1) * sizeof(int));
  for (int r = 0; r < routed; r++) {
    int e = all_choose ? 0 : chosen_by[r];
    if (e >= 0 && e < matrices) place[e + 1]++;
    else memset(rows_of_y + (size_t)r * p.columns, 0, p.columns * sizeof(float));
  }
  for (int e = 0; e < matrices; e++) place[e + 1] += place[e];
  for (int r = 0; r < routed; r++) {
    int e = all_choose ? 0 : chosen_by[r];
    if (e < 0 || e >= matrices) continue;
    p.x[place[e]] = base + (size_t)(r / each) * row_bytes;
    if (sorted) p.x[place[e]] = memcpy(copied + (size_t)(rows + place[e]) * row_bytes, p.x[place[e]], row_bytes);
    if (p.together) p.weight[place[e]] = weights[r];
    p.y[place[e]++] = rows_of_y + (size_t)r * p.columns;
  }
  for (int e = 0, before = 0; e < matrices; before = place[e++])  // place[e] is now where e's rows end
    if (place[e] > before) p.matrix[p.matrices] = e, p.last[p.matrices++] = place[e];
  p.pieces_per_matrix = (p.panels + PANELS_PER_PIECE - 1) / PANELS_PER_PIECE;
  share(p.matrices * p.pieces_per_matrix, product_piece, &p);
  if (p.together) share((p.sums + SUMS_PER_PIECE - 1) / SUMS_PER_PIECE, sum_piece, &p);
  free(free_memory);
  return NULL;
}
