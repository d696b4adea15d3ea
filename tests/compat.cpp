/* C++17: the implementation, the declarations twice, and every kind of public object used once. */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"
#include "../transformer.h"

int main() {
  tfm_model_config model{};
  tfm_engine_config engine{};
  tfm_sampling sampling{};
  tfm_plan plan{};
  tfm_vocabulary_config characters{};
  const char *texts[] = {"abc"};
  characters.kind = TFM_CHARACTERS;
  tfm_tokenizer *t = tfm_tokenizer_train(texts, nullptr, 1, &characters);
  int32_t ids[3] = {0, 0, 0};
  model.device = TFM_REF;
  sampling.temperature = 1;
  bool good = tfm_encode(t, "cab", 3, 0, ids, 3) == 3 && ids[0] == 2 && ids[1] == 0 && ids[2] == 1;
  tfm_tokenizer_free(t);
  good = good && tfm_plan_memory("no/such", &model, &engine, &plan) == TFM_E_IO;
  return good && tfm_next(nullptr, &sampling) == TFM_E_ARG ? 0 : 1;
}
