// What every kernel that XLA calls needs: its arguments, the pool of threads, rounding.
#include "kernels.h"

#include <stdatomic.h>
#include <string.h>
#include "xla/ffi/api/c_api.h"

Tile tile;

// Runs numbered pieces of a job on all threads, in any order, and returns when all are done.
typedef void Piece(void *job, int number);
void share(int pieces, Piece *run, void *job);
int threads_of_pool(void);  // how many compute, the caller's included

static inline XLA_FFI_Buffer *arg(XLA_FFI_CallFrame *frame, int i) { return frame->args.args[i]; }
static inline XLA_FFI_Buffer *result(XLA_FFI_CallFrame *frame, int i) { return frame->rets.rets[i]; }

static inline int64_t number(XLA_FFI_CallFrame *frame, const char *name) {  // an int64 attribute
  for (int64_t i = 0; i < frame->attrs.size; i++) {
    XLA_FFI_ByteSpan *span = frame->attrs.names[i];
    if (span->len == strlen(name) && !memcmp(span->ptr, name, span->len))
      return *(int64_t *)((XLA_FFI_Scalar *)frame->attrs.attrs[i])->value;
  }
  return 0;
}

static inline float real(XLA_FFI_CallFrame *frame, const char *name) {  // a float64 attribute
  int64_t bits = number(frame, name);
  double x;
  memcpy(&x, &bits, 8);
  return (float)x;
}

static inline int asked_for_version(XLA_FFI_CallFrame *frame) {  // before its first call XLA asks what this was built for
  for (__typeof__(frame->extension_start) e = frame->extension_start; e; e = e->next)  // jax 0.12 names the type anew
    if (e->type == XLA_FFI_Extension_Metadata) {
      XLA_FFI_Metadata *m = ((XLA_FFI_Metadata_Extension *)e)->metadata;
      m->api_version.major_version = XLA_FFI_API_MAJOR, m->api_version.minor_version = XLA_FFI_API_MINOR;
      return 1;
    }
  return 0;
}

static inline XLA_FFI_Error *out_of_memory(XLA_FFI_CallFrame *frame) {
  XLA_FFI_Error_Create_Args args = {sizeof args, NULL, "jaxspec: no memory for the rows of a CPU kernel",
                                    XLA_FFI_Error_Code_RESOURCE_EXHAUSTED};
  return frame->api->XLA_FFI_Error_Create(&args);
}

static inline uint16_t to_bfloat16(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)(u >> 16 | 64);
  return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static inline float round_to_bfloat16(float f) {
  uint32_t u = (uint32_t)to_bfloat16(f) << 16;
  memcpy(&f, &u, 4);
  return f;
}
