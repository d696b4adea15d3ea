/* What compat_stb_before.c and compat_stb_after.c share: an application that uses stb_ds for
   itself, hash maps too, and this library, in one file. */
static int app_uses_stb_ds(void) {
  struct entry { char *key; int value; } *map = NULL;
  int *list = NULL, i, sum = 0;
  for (i = 0; i < 1000; i++) arrput(list, i);
  for (i = 0; i < arrlen(list); i++) sum += list[i];
  shput(map, "one", 1);
  shput(map, "two", 2);
  sum += shget(map, "two");
  arrfree(list);
  shfree(map);
  return sum == 499502;
}

static int app_uses_transformer(const char *path) {
  tfm_model *m = tfm_model_load(path, NULL);
  tfm_tokenizer *t = tfm_tokenizer_load(path, NULL);
  tfm_session *s = tfm_session_create(m, NULL);
  int32_t id = tfm_feed_text(s, t, "Once");
  if (id == TFM_OK) id = tfm_next(s, NULL);
  if (id < 0 && id != TFM_END) fprintf(stderr, "%s\n", tfm_error());
  tfm_session_free(s);
  tfm_tokenizer_free(t);
  tfm_model_free(m);
  return id >= 0 || id == TFM_END;
}

int main(int argc, char **argv) {
  bool good = argc == 2 && app_uses_stb_ds() && app_uses_transformer(argv[1]) && app_uses_stb_ds();
  return good ? 0 : 1;
}
