/* A test runner in one header: TEST(name) { CHECK(...); } and, in the last line, TEST_MAIN.

     ./test_x            runs everything
     ./test_x tokenize   runs the tests whose names contain "tokenize"

   The closing line is `N passed, N failed, N skipped`. */
#ifndef TEST_H
#define TEST_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof(array)[0]))

typedef struct test_case {
  const char *name;
  void (*run)(void);
  struct test_case *next;
} test_case;

static test_case *test_first, **test_last = &test_first;
static int test_failures; /* of the test that runs */
static const char *test_skipped;

static void test_add(test_case *t) {
  *test_last = t;
  test_last = &t->next;
}

#define TEST(test_name)                                                              \
  static void test_name(void);                                                       \
  static test_case test_name##_case = {#test_name, test_name, NULL};                 \
  __attribute__((constructor)) static void test_name##_add(void) { test_add(&test_name##_case); } \
  static void test_name(void)

static void test_fail(const char *file, int line, const char *what) {
  if (test_failures++ < 10) fprintf(stderr, "%s:%d: %s\n", file, line, what);
}

#define CHECK(condition) \
  do { if (!(condition)) test_fail(__FILE__, __LINE__, "failed: " #condition); } while (0)

static __attribute__((unused)) void test_equal(const char *file, int line, const char *what,
                                               long long a, long long b) {
  char text[300];
  if (a == b) return;
  snprintf(text, sizeof text, "%s: %lld, expected %lld", what, a, b);
  test_fail(file, line, text);
}
#define CHECK_EQ_INT(a, b) test_equal(__FILE__, __LINE__, #a, (long long)(a), (long long)(b))

static __attribute__((unused)) void test_text(const char *file, int line, const char *text,
                                              const char *part, int whole) {
  char message[900];
  if (whole ? !strcmp(text, part) : strstr(text, part) != NULL) return;
  snprintf(message, sizeof message, "\"%.400s\" %s \"%.400s\"", text, whole ? "is not" : "lacks",
           part);
  test_fail(file, line, message);
}
#define CHECK_STR(a, b) test_text(__FILE__, __LINE__, a, b, 1)
#define CHECK_STR_HAS(text, part) test_text(__FILE__, __LINE__, text, part, 0)

#define SKIP(reason) do { test_skipped = (reason); return; } while (0)

static int test_run_all(int argc, char **argv) {
  int passed = 0, failed = 0, skipped = 0;
  test_case *t;
  for (t = test_first; t; t = t->next) {
    if (argc > 1 && !strstr(t->name, argv[1])) continue;
    test_failures = 0;
    test_skipped = NULL;
    t->run();
    if (test_failures) failed++, printf("FAIL %s\n", t->name);
    else if (test_skipped) skipped++, printf("skip %s: %s\n", t->name, test_skipped);
    else passed++;
    fflush(stdout);
  }
  printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
  return failed != 0;
}

#define TEST_MAIN \
  int main(int argc, char **argv) { return test_run_all(argc, argv); }

#endif
