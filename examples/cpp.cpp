/* cpp.cpp - hello.c in C++17: objects that free themselves, errors as exceptions.

   build:   c++ -std=c++17 -O3 -march=native -o cpp examples/cpp.cpp -lm -lpthread
   run:     ./cpp stories260K.bin "Once upon a time"
   output:  as hello.c's. */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"

#include <exception>
#include <iostream>
#include <memory>
#include <stdexcept>

namespace {

struct Free {
  void operator()(tfm_model *m) const { tfm_model_free(m); }
  void operator()(tfm_tokenizer *t) const { tfm_tokenizer_free(t); }
  void operator()(tfm_session *s) const { tfm_session_free(s); }
};

template <class T> std::unique_ptr<T, Free> owned(T *object) {
  if (!object) throw std::runtime_error(tfm_error());
  return std::unique_ptr<T, Free>(object);
}

void check(int32_t status) {
  if (status < 0 && status != TFM_END && status != TFM_E_FULL)
    throw std::runtime_error(tfm_error());
}

void tell(const char *path, const char *prompt) {
  auto model = owned(tfm_model_load(path, nullptr));
  auto tokenizer = owned(tfm_tokenizer_load(path, nullptr));
  auto session = owned(tfm_session_create(model.get(), nullptr)); // destroyed first
  tfm_sampling how{};
  int32_t id = 0;
  how.temperature = 0.8f;
  how.top_p = 0.95f;
  how.seed = 1;
  check(tfm_feed_text(session.get(), tokenizer.get(), prompt));
  while ((id = tfm_next(session.get(), &how)) >= 0) std::cout << tfm_text(session.get());
  std::cout << (id == TFM_END ? tfm_text(session.get()) : "") << '\n';
  check(id);
}

} // namespace

int main(int argc, char **argv) try {
  if (argc != 3) throw std::runtime_error("usage: cpp MODEL PROMPT");
  tell(argv[1], argv[2]);
} catch (const std::exception &e) {
  std::cerr << "cpp: " << e.what() << '\n';
  return 1;
}
