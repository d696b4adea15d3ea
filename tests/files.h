/* What several tests share: files, a folder with one file replaced, an allocator that fails. */
#ifndef TEST_FILES_H
#define TEST_FILES_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include "test.h"

#define TEST_UNUSED __attribute__((unused)) /* not every test needs every helper */

typedef struct blob {
  unsigned char *data;
  size_t bytes;
} blob;

/* NULL data when there is no such file; always followed by a NUL. */
static TEST_UNUSED blob blob_read(const char *path) {
  blob b = {NULL, 0};
  struct stat st;
  FILE *f = stat(path, &st) == 0 && S_ISREG(st.st_mode) ? fopen(path, "rb") : NULL;
  long n;
  if (!f) return b;
  fseek(f, 0, SEEK_END);
  n = ftell(f);
  rewind(f);
  b.data = (unsigned char *)malloc((size_t)n + 1);
  b.bytes = fread(b.data, 1, (size_t)n, f);
  b.data[b.bytes] = 0;
  fclose(f);
  return b;
}

/* A little-endian number of 8 bytes. */
static TEST_UNUSED uint64_t blob_u64(const blob *b, size_t at) {
  uint64_t value = 0;
  int i;
  for (i = 8; i--;) value = value << 8 | b->data[at + (size_t)i];
  return value;
}

/* Words of 4 bytes, little-endian in the file from `first` on, become the machine's. */
static TEST_UNUSED void blob_turn(blob *b, size_t first) {
  size_t at;
  for (at = first; at + 4 <= b->bytes; at += 4) {
    const unsigned char *p = b->data + at;
    uint32_t word = p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
    memcpy(b->data + at, &word, 4);
  }
}

/* Where the tests' own data and the shared data lie, seen from the repository's top. */
#define DATA "tests/data/"
#define SHARED "../shared/data/"

/* ---- A tfm_io on the file system in which one name has other contents ---- */

typedef struct overlay {
  const char *name; /* the end of the path that is replaced; NULL: nothing */
  const char *text;
  size_t bytes;
} overlay;

typedef struct overlay_file {
  blob b;
  bool replaced;
} overlay_file;

static void *overlay_open(void *user, const char *path, uint64_t *bytes) {
  const overlay *o = (const overlay *)user;
  overlay_file *f = (overlay_file *)calloc(1, sizeof *f);
  size_t n = strlen(path), m = o->name ? strlen(o->name) : 0;
  if (o->name && n >= m && !strcmp(path + n - m, o->name)) {
    f->replaced = true;
    f->b.data = (unsigned char *)(uintptr_t)o->text;
    f->b.bytes = o->bytes;
  } else {
    f->b = blob_read(path);
  }
  *bytes = f->b.bytes;
  if (f->b.data) return f;
  free(f);
  return NULL;
}

static bool overlay_read(void *user, void *file, uint64_t offset, void *dst, size_t bytes) {
  const overlay_file *f = (const overlay_file *)file;
  (void)user;
  if (offset > f->b.bytes || bytes > f->b.bytes - offset) return false;
  memcpy(dst, f->b.data + offset, bytes);
  return true;
}

static const void *overlay_map(void *user, void *file) {
  (void)user;
  return ((const overlay_file *)file)->b.data;
}

static void overlay_close(void *user, void *file) {
  overlay_file *f = (overlay_file *)file;
  (void)user;
  if (!f->replaced) free(f->b.data);
  free(f);
}

static TEST_UNUSED tfm_io overlay_io(overlay *o) {
  tfm_io io;
  io.user = o;
  io.open = overlay_open;
  io.read = overlay_read;
  io.map = overlay_map;
  io.close = overlay_close;
  return io;
}

/* ---- An allocator that counts, and refuses the n-th request, once or from then on ---- */

typedef struct failing {
  long calls, fail_at; /* fail_at 0: never */
  bool for_ever;
  long live;           /* blocks that have not been given back */
  size_t bytes, peak;
} failing;

static TEST_UNUSED void *failing_alloc(void *user, void *old, size_t old_bytes, size_t bytes) {
  failing *f = (failing *)user;
  void *p;
  if (bytes == 0) {
    if (old) f->live--, f->bytes -= old_bytes;
    free(old);
    return NULL;
  }
  f->calls++;
  if (f->fail_at && (f->calls == f->fail_at || (f->for_ever && f->calls > f->fail_at))) return NULL;
  p = realloc(old, bytes);
  if (!old) f->live++;
  f->bytes += bytes - old_bytes;
  if (f->bytes > f->peak) f->peak = f->bytes;
  return p;
}

#endif
