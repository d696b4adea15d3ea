/* hello.c - the README's program: a model continues a text.

   build:   cc -O3 -march=native -o hello examples/hello.c -lm -lpthread
   run:     ./hello stories260K.bin "Once upon a time"
   output:  how the story goes on (the prompt is not repeated), to the model's end token or until
            the context is full; on failure one sentence on stderr and exit status 1. */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"
#include <stdio.h>

int main(int argc, char **argv) {
  if (argc != 3) return fputs("hello: usage: hello MODEL PROMPT\n", stderr), 2;
  tfm_model *m = tfm_model_load(argv[1], NULL); /* a folder, .safetensors, .gguf, .bin */
  tfm_tokenizer *t = m ? tfm_tokenizer_load(argv[1], NULL) : NULL;
  tfm_session *s = tfm_session_create(m, NULL); /* NULL: every default */
  tfm_sampling how = {.temperature = 0.8f, .top_p = 0.95f, .seed = 1};
  int32_t id = tfm_feed_text(s, t, argv[2]); /* of any length; NULL objects pass through */
  while (id >= 0 && (id = tfm_next(s, &how)) >= 0) fputs(tfm_text(s), stdout);
  if (id == TFM_END || id == TFM_E_FULL) puts(tfm_text(s));
  else fprintf(stderr, "hello: %s\n", tfm_error());
  tfm_session_free(s), tfm_tokenizer_free(t), tfm_model_free(m);
  return id != TFM_END && id != TFM_E_FULL;
}
