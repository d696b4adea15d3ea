/* What the fuzzers make files of: their bytes, read one by one as choices. The file that arises is
   well formed, its lengths and places are right, but for what a choice makes wrong: so that few
   bytes reach far behind the first checks. A choice of 0 is the sound one, and so is the end. */
#ifndef FUZZ_CHOICES_H
#define FUZZ_CHOICES_H

#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

#define COUNT(array) ((unsigned)(sizeof(array) / sizeof(array)[0]))
#define FUZZ_UNUSED __attribute__((unused)) /* not every fuzzer needs every helper */
enum { ROOM = 1 << 16 };

typedef struct choices {
  const uint8_t *at, *end;
  uint8_t file[ROOM];
  size_t n;
} choices;

static unsigned choice(choices *c) { return c->at < c->end ? *c->at++ : 0; }

static FUZZ_UNUSED void put(choices *c, uint64_t value, int bytes) {
  for (; bytes && c->n < ROOM; bytes--, value >>= 8) c->file[c->n++] = (uint8_t)value;
}

static FUZZ_UNUSED void put_text(choices *c, const char *text) {
  for (; *text; text++) put(c, (uint8_t)*text, 1);
}

/* Mostly the sound value; else a small one, or one at the edge of its kind. */
static FUZZ_UNUSED uint64_t number(choices *c, uint64_t sound) {
  static const uint64_t edges[] = {0, 1, 0x7fffffff, 0x80000000, 0xffffffff, UINT64_C(1) << 32,
                                   UINT64_C(1) << 61, INT64_MAX, UINT64_MAX - 31, UINT64_MAX};
  unsigned k = choice(c);
  if (k < 160) return sound;
  return k < 224 ? k - 160 : edges[(k - 224) % 10];
}

/* The same as JSON, and what is no such number. */
static FUZZ_UNUSED void put_number(choices *c, uint64_t sound) {
  static const char *const odd[] = {"-1", "1.5", "1e400", "1e-5", "0.0", "null", "true", "\"7\"",
                                    "[]", "{}", "[1,2]", "-0", "18446744073709551616", "[0.5]"};
  unsigned k = choice(c);
  char text[24];
  snprintf(text, sizeof text, "%llu", (unsigned long long)(k < 192 ? sound : number(c, sound)));
  put_text(c, k < 240 ? text : odd[k % 14]);
}

/* One of the texts, of which the first is the sound one. */
static FUZZ_UNUSED void put_one_of(choices *c, const char *const *texts, unsigned n) {
  put_text(c, texts[choice(c) % n]);
}

#endif
