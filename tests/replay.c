/* Every committed input of a fuzzer once more, without libFuzzer: the program fuzz_gguf replays
   tests/data/fuzz/gguf/. A finding ends it without the closing line. */
#define _POSIX_C_SOURCE 200809L
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PREFIX "fuzz_"

int LLVMFuzzerInitialize(int *argc, char ***argv) __attribute__((weak));
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

/* Of exactly the file's size, so that a read beyond it is seen. */
static int replay(const char *folder, const char *name) {
  char path[512];
  uint8_t *data = NULL;
  long bytes = -1;
  FILE *f;
  snprintf(path, sizeof path, "%s/%s", folder, name);
  f = fopen(path, "rb");
  if (f && fseek(f, 0, SEEK_END) == 0 && (bytes = ftell(f)) >= 0)
    data = (uint8_t *)malloc((size_t)bytes + !bytes);
  if (data && (rewind(f), fread(data, 1, (size_t)bytes, f) == (size_t)bytes)) {
    alarm(60); /* endless work is a finding too */
    LLVMFuzzerTestOneInput(data, (size_t)bytes);
  } else {
    printf("FAIL %s: it cannot be read\n", path);
    bytes = -1;
  }
  free(data);
  if (f) fclose(f);
  return bytes >= 0;
}

int main(int argc, char **argv) {
  const char *name = strrchr(argv[0], '/') ? strrchr(argv[0], '/') + 1 : argv[0];
  int inputs = 0, failed = 0;
  char folder[256];
  struct dirent *entry;
  DIR *open;
  if (strncmp(name, PREFIX, strlen(PREFIX)) == 0) name += strlen(PREFIX);
  snprintf(folder, sizeof folder, "tests/data/fuzz/%s", name);
  open = opendir(folder);
  if (LLVMFuzzerInitialize) LLVMFuzzerInitialize(&argc, &argv);
  while (open && (entry = readdir(open)) != NULL) {
    if (entry->d_name[0] == '.') continue;
    inputs++;
    failed |= !replay(folder, entry->d_name);
  }
  if (open) closedir(open), printf("%d inputs of %s\n", inputs, folder);
  else printf("skip %s: %s holds no inputs yet\n", name, folder);
  printf("%d passed, %d failed, %d skipped\n", open && !failed, failed, !open);
  return failed;
}
