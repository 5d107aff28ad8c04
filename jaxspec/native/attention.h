// What one call of attention computes, and how it goes through a block of the cache.
#include "call.h"

enum { QUERIES = 48 };  // most of one piece of work

typedef struct {
  int rows, count, heads, kv_heads, group;  // B, T, H, G, H / G
  int width, value_width, value_stride;     // of keys, of values, and from one value to the next
  int bytes, row_bytes;                     // of a number of the cache, and as products take it: 2 for bfloat16, 4 for float32
  int block, page, pages, pages_per_row, span, ring, depths, paths_per_row, tiles;
  float scale;
  const float *q, *sinks;
  const char *k, *v;
  const uint8_t *kept;       // [B, T, room], which of the positions a query may see, NULL for all
  int room, most_positions;
  const int32_t *position, *start, *path, *table, *base;
  float *out;
  atomic_int failed;
  float *store;       // of blocks whose parts are put together at the end, else NULL
  int blocks, most_queries, parts;  // most of a piece, and how many parts share its blocks
} Attention;

typedef struct { const char *at; size_t bytes; } Ahead;  // entries that are read next, and the size of one

// Some queries of a row and kv head, those of a position side by side, and the block before them.
typedef struct {
  const Attention *a;
  int b, g, first, queries;
  int lowest, last;          // first and last position that any query sees
  int at, begin, end, own;   // the block's first position; in it: where any query sees, and where nodes of a tree differ
  size_t entry;              // of the block's first position
  Ahead by_keys, by_values;  // what to ask for while keys and while values are laid out
  char *panel, *q, *weight;  // q [queries, width] and weight [queries, block], as products take them
  float *score;              // [queries, stride]
  int stride;
  float *out[QUERIES];       // sums of weighted values
  int position[QUERIES];
  float top[QUERIES], total[QUERIES], keep[QUERIES];
} Work;

static inline int clip(int x, int low, int high) { return x < low ? low : x > high ? high : x; }
// The first position that a query sees: span of them, all for 0, or below 0 those from the last multiple of -span on.
static inline int first_seen(const Attention *a, int position) {
  if (!a->span || position < 0) return 0;
  if (a->span < 0) return position - position % -a->span;
  return position >= a->span ? position - a->span + 1 : 0;
}
static inline int node_of(const Work *w, int query) { return (w->first + query) / w->a->group; }

void round_row(const Attention *a, char *to, const float *from, int n, float scale);
size_t entry(const Work *w, int position);
void score_block(Work *w);                     // queries times keys
float see_block(Work *w, int m);               // takes out what a query does not see; the larger of its maximum and the block's
void weigh_block(Work *w, int m, float top);   // scores to weights, and the running maximum and sum
void add_values(Work *w);
