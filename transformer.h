/* transformer.h - transformer language models in one C header               MIT licence: at the end

   Do this in ONE C or C++ file, and include the header plainly everywhere else:

     #define TRANSFORMER_IMPLEMENTATION
     #include "transformer.h"

     int main(int argc, char **argv) {                      // ./hello MODEL "Once upon a time"
       if (argc != 3) return 2;
       tfm_model *m = tfm_model_load(argv[1], NULL);        // a folder, .safetensors, .gguf, .bin
       tfm_tokenizer *t = m ? tfm_tokenizer_load(argv[1], NULL) : NULL;
       tfm_session *s = tfm_session_create(m, NULL);        // NULL: every default
       tfm_sampling how = {.temperature = 0.8f, .top_p = 0.95f, .seed = 1};
       int id = tfm_feed_text(s, t, argv[2]);
       while (id >= 0 && (id = tfm_next(s, &how)) >= 0) fputs(tfm_text(s), stdout);
       if (id != TFM_END) fprintf(stderr, "%s\n", tfm_error());
       tfm_session_free(s); tfm_tokenizer_free(t); tfm_model_free(m);
     }

   cc -O3 -march=native hello.c -lm -lpthread           portable C: the reference
   cc -O3 -DTFM_USE_CPU hello.c transformer_cpu.c ...   with tuned kernels, where they are written
   nvcc -DTFM_USE_CUDA hello.c transformer_cuda.cu ...  with a GPU, where they are written

   IT reads Hugging Face folders, safetensors, GGUF and llama2.c checkpoints of the families in the
   table of >>families; tokenizes exactly as Hugging Face does; runs prompts and many sequences at a
   time over a paged cache; computes what transformers computes in float32, to rounding. It returns
   a status and one sentence for whatever goes wrong, tells its memory in advance, and takes it from
   you.

   IT DOES NOT exit, abort, assert or print; keep global state; allocate while generating; execute
   anything from a model; read pickles; fetch models; guess at what it does not know.

   Needs: a C11 or C++17 compiler (gcc or clang), POSIX or MinGW-w64, a machine of 32 or 64 bits
   (x86 of 32 with -msse2 -mfpmath=sse) in either byte order (big-endian ones read model files
   instead of mapping them), stb_ds.h on the include path (as stb_ds.h or stb/stb_ds.h; hidden from
   your program, which may use it too). Under -std=c11 include this header before the C library's,
   or define _POSIX_C_SOURCE yourself.

   Contents; search for the anchor:
     >>api        types, contracts, declarations    >>families   models as rows of data, loading
     >>backend    the table of kernels              >>device     opening a table; the thread pool
     >>base       errors, memory, files             >>kernels    the reference, in portable C
     >>objects    what the sections share           >>gradients  the reference of training's entries
     >>unicode    letters, numbers, white space     >>forward    one pass through the network
     >>json       a strict pull parser              >>engine     memory, pages, many sequences
     >>gguf       the GGUF container                >>session    feeding, choosing, text
     >>steps      text rewritten, cut to pieces     >>generate   prompt in, text out
     >>tokenizer  text to ids and back              >>convert    models written in other formats
     >>vocabulary built from text, saved            >>train      backward pass, optimiser, trainer
     >>chat       templates of conversations        >>export     folders, checkpoints
     >>formats    safetensors, shards, llama2.c     >>data       text files to sequences

   Options, defined before the include:
     TRANSFORMER_IMPLEMENTATION         this file gets the code
     TFM_STATIC                         everything static: for one-file programs without companions
     TFM_LINKED                         no code here after all: another object of the link has it
     TFM_API                            your own linkage, for example a DLL export
     TFM_MALLOC, TFM_REALLOC, TFM_FREE  all three; default allocator of instances without one
     TFM_ASSERT(c)                      checks of the library's own reasoning; default: nothing
     TFM_USE_CPU, TFM_USE_CUDA          the companions are linked
     TFM_NO_TRAINING                    leaves out tfm_trainer_*: a third of the compile time

   How it is built. Three layers, each written once. Files become a tfm_net, numbers and pointers,
   and a family is a row of data about how (>>families). One forward pass (>>forward) runs a tfm_net
   over a table of kernels (>>backend), of which the portable one (>>kernels) is the specification
   of all others. An engine (>>engine) feeds the pass with rows of tokens from any number of
   sessions and keeps their keys and values in pages. */

#if defined(TRANSFORMER_IMPLEMENTATION) && defined(__FAST_MATH__)
#error "transformer.h: -Ofast and -ffast-math break its arithmetic (infinities, NaN); use -O3"
#endif
#if defined(TRANSFORMER_IMPLEMENTATION) && defined(__FLT_EVAL_METHOD__)
#if __FLT_EVAL_METHOD__ == 2
#error "transformer.h: x87 keeps more digits than a float has; use -msse2 -mfpmath=sse"
#elif __FLT_EVAL_METHOD__ == 1
#error "transformer.h: floats are computed as doubles here; use -fexcess-precision=fast"
#endif
#endif
#if defined(TRANSFORMER_IMPLEMENTATION) && defined(__STRICT_ANSI__) && !defined(_POSIX_C_SOURCE)
#define _POSIX_C_SOURCE 200809L /* -std=c11 hides what POSIX adds to the C library's headers */
#endif
#ifndef TRANSFORMER_H
#define TRANSFORMER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* =================================================================================================
   >>api   types, contracts, declarations
   =================================================================================================

   Letters used in shapes, here and in the implementation:
     B sequences   T rows (tokens) of one call   C model width   H query heads   K key/value heads
     D head width  F feed-forward width          V vocabulary    L layers        E experts

   Objects are opaque and belong to whoever created them; every _free accepts NULL. Structs are
   transparent, and zero is the default of every field: pass NULL, or write only what you change.

   Errors. Constructors return NULL and most functions a tfm_status below zero; tfm_error() then
   holds one sentence: object, expected, found, remedy. A NULL object yields TFM_E_ARG and keeps the
   earlier sentence, so that a short program may check once, at its end.

   Threads. A model and a tokenizer are immutable once loaded: share them freely. An engine with its
   sessions belongs to one thread at a time, and does not survive fork: create it in the child.
   tfm_cancel may be called from any thread and from a signal handler. There is no global state but
   the error sentence, which is per thread. */

#ifdef __cplusplus
extern "C" {
#endif

#ifndef TFM_API
#  if defined(TFM_STATIC) && defined(__GNUC__)
#    define TFM_API __attribute__((unused)) static
#  elif defined(TFM_STATIC)
#    define TFM_API static
#  else
#    define TFM_API extern
#  endif
#endif

#define TFM_VERSION_MAJOR 0
#define TFM_VERSION_MINOR 1
#define TFM_VERSION_PATCH 0
#define TFM_VERSION "0.1.0"

typedef enum tfm_status {
  TFM_OK = 0,
  TFM_E_ARG = -1,         /* an argument is outside its contract */
  TFM_E_MEMORY = -2,      /* the allocator or the memory limit said no */
  TFM_E_IO = -3,          /* a file could not be opened, mapped or read */
  TFM_E_FORMAT = -4,      /* a file's bytes contradict its format */
  TFM_E_UNSUPPORTED = -5, /* well formed, but not something this build can reproduce exactly */
  TFM_E_DEVICE = -6,      /* a device failed, or is not there */
  TFM_E_FULL = -7,        /* the context, or the engine's sequences, are used up */
  TFM_E_STATE = -8,       /* the call does not fit what was called before */
  TFM_E_CANCELLED = -9    /* tfm_cancel, the cancel flag, or a progress callback stopped the work */
} tfm_status;

#define TFM_END (-100) /* tfm_next met an end token: not an error */

/* Number formats of weights, activations and caches. The Q formats are GGML's: blocks of 32 values,
   those of K 256, with scales; rows must fill whole blocks. */
typedef enum tfm_type {
  TFM_TYPE_DEFAULT = 0, /* in a config: choose for me */
  TFM_F32 = 1,
  TFM_F16 = 2,
  TFM_BF16 = 3,
  TFM_Q8_0 = 4, /* f16 scale, 32 x int8 */
  TFM_Q4_0 = 5, /* f16 scale, 32 x 4 bits, offset 8 */
  TFM_Q4_1 = 6, /* f16 scale, f16 lowest value, 32 x 4 bits */
  TFM_Q5_0 = 7, /* f16 scale, 32 x 5 bits, offset 16 */
  TFM_Q5_1 = 8, /* f16 scale, f16 lowest value, 32 x 5 bits */
  TFM_Q4_K = 9, /* from here on: read, never written */
  TFM_Q5_K = 10,
  TFM_Q6_K = 11,
  /* as torch.float8_e4m3fn, without infinities; in files with or without scales beside it. CUDA
     computes with it, 64 columns of a row sharing a scale; other devices do with BF16 */
  TFM_F8_E4M3 = 12,
  TFM_F8_E5M2 = 13,
  TFM_TYPE_COUNT = 14
} tfm_type;

typedef enum tfm_device { /* which table of kernels computes; chosen when a model is loaded */
  TFM_AUTO = 0,           /* the first of CUDA, CPU, REF that is compiled in and usable */
  TFM_REF = 1,            /* transformer.h alone: portable C, the specification of the others */
  TFM_CPU = 2,            /* transformer_cpu.c, with TFM_USE_CPU */
  TFM_CUDA = 3            /* transformer_cuda.cu, with TFM_USE_CUDA */
} tfm_device;

typedef enum tfm_log_level {
  TFM_LOG_INFO = 1,
  TFM_LOG_WARNING = 2,
  TFM_LOG_ERROR = 3
} tfm_log_level;

/* ---- What an application lends to an instance ------------------------------------------------ */

/* Files by callback, for archives, encrypted stores, consoles. `name` is the path that was
   passed to the load function, or that path's folder joined with a plain file name by '/'. All
   four may be called only during the load call, except that mapped memory must stay until the
   object is freed. */
typedef struct tfm_io {
  void *user;
  /* A handle, with the size in *bytes, or NULL when there is no such file. */
  void *(*open)(void *user, const char *name, uint64_t *bytes);
  /* Fill dst with exactly `bytes` bytes from `offset`; false on failure. */
  bool (*read)(void *user, void *file, uint64_t offset, void *dst, size_t bytes);
  /* Optional: the whole file as memory that stays valid until close. NULL: it is read instead. */
  const void *(*map)(void *user, void *file);
  /* Files that were mapped are closed when the model is freed, others before the load returns. */
  void (*close)(void *user, void *file);
} tfm_io;

typedef struct tfm_host {
  void *user; /* passed to every callback below */
  /* As realloc, with the old size told; bytes 0 frees; results are aligned for any C object.
     NULL: TFM_REALLOC and TFM_FREE. Called by the thread that called the library, only: by every
     thread that encodes with a tokenizer that they share. */
  void *(*alloc)(void *user, void *old, size_t old_bytes, size_t bytes);
  /* One line, no newline at its end. NULL: silence. */
  void (*log)(void *user, tfm_log_level level, const char *line);
  /* Long work reports its phase and the share done, 0 to 1; returning false cancels. NULL: none. */
  bool (*progress)(void *user, const char *phase, double done);
  /* Becomes nonzero when the work should stop; read often, so a signal handler may set it. */
  const volatile int32_t *cancel;
  /* Runs job(context, 0 .. workers-1), at the same time or one after another, on the caller's own
     threads, and returns when all have returned. NULL: the engine keeps a pool of its own. */
  void (*parallel)(void *user, int32_t workers, void (*job)(void *context, int32_t worker),
                   void *context);
  uint64_t memory_limit_bytes; /* for this instance; 0: no limit. tfm_encode: for each call */
  const tfm_io *io;            /* NULL: the file system */
} tfm_host;

/* ---- Errors and version ---------------------------------------------------------------------- */

TFM_API const char *tfm_version(void); /* TFM_VERSION of the implementation that was linked */
/* The calling thread's last error, one sentence; "" when there was none. Valid until the next call
   into the library on this thread. */
TFM_API const char *tfm_error(void);
TFM_API tfm_status tfm_error_status(void);         /* the status that belongs to that sentence */
TFM_API const char *tfm_status_name(int status);   /* "TFM_E_FORMAT"; never NULL */
TFM_API const char *tfm_type_name(tfm_type type);  /* "Q8_0"; "?" outside the enum */

/* ---- Models ---------------------------------------------------------------------------------- */

/* weights and shape; immutable, shared by any number of threads */
typedef struct tfm_model tfm_model;

typedef struct tfm_model_config {
  tfm_host host;           /* zero: libc, silent, unlimited */
  tfm_device device;       /* 0: TFM_AUTO */
  int32_t device_index;    /* 0: the first GPU */
  /* 0: as in the file; else every matrix is converted while loading, to F32, F16, BF16, Q8_0, Q4_0,
     Q4_1, Q5_0, Q5_1 or, on a GPU, F8_E4M3 */
  tfm_type weights;
  /* text of a config.json, for .safetensors from memory; NULL: look beside */
  const char *config_json;
  /* "attn,norm": these entries of the table run the reference; NULL: none */
  const char *override;
  int32_t threads;         /* workers while loading; 0: one per core */
  bool no_mmap;            /* read files instead of mapping them */
  bool no_fallback;        /* an unusable requested device is an error, not a warning */
} tfm_model_config;

/* Loads a Hugging Face folder (config.json, *.safetensors, *.index.json), a .safetensors file with
   its config.json beside it, a GGUF file, or a llama2.c checkpoint (version 0 and "ak42" 1). The
   file must not change while the model lives (it is mapped). NULL on failure. */
TFM_API tfm_model *tfm_model_load(const char *path, const tfm_model_config *config);
/* The same from memory, which is borrowed until tfm_model_free; one file (GGUF, llama2.c, or
   .safetensors together with config->config_json). */
TFM_API tfm_model *tfm_model_load_memory(const void *data, size_t bytes,
                                         const tfm_model_config *config);
TFM_API void tfm_model_free(tfm_model *model); /* after its engines and sessions */

typedef struct tfm_model_info {
  const char *family;    /* "gpt2", "llama"; strings live as long as the model */
  const char *format;    /* "safetensors", "gguf", "llama2.c" */
  const char *device;    /* name of the table: "ref", "cpu", "cuda" */
  int32_t layers, width, heads, kv_heads, head_width, ffn_width, vocabulary, experts;
  int32_t context;       /* positions the model was made for */
  bool tied;             /* the head is the embedding table */
  tfm_type weights;      /* type of most weight bytes */
  int32_t bos;           /* -1: none */
  const int32_t *end;    /* [end_count] ids that end a text */
  int32_t end_count;
  uint64_t parameters;
  uint64_t token_bytes;  /* weight bytes read to compute one token */
  uint64_t mapped_bytes; /* of files that stay mapped */
  uint64_t memory_bytes; /* held now from the allocator and the device, mapped files not counted */
  uint64_t peak_bytes;   /* high-water mark of the load */
  int32_t converted;     /* matrices that `weights` gave another type, once, while loading; */
  uint64_t converted_from, converted_to; /* their bytes in the file, and now */
} tfm_model_info;

TFM_API tfm_status tfm_model_describe(const tfm_model *model, tfm_model_info *out);

/* ---- Files of models, without loading them --------------------------------------------------- */

typedef struct tfm_tensor_info { /* texts are valid during the call */
  const char *name, *type;       /* as the file has it: "F32", "Q4_K", "I64" */
  int32_t rank;
  uint64_t dims[4], bytes;       /* slowest first; what is beyond the fourth is not told */
  /* By tfm_convert only. error: root mean square of what the new type changed, in units of the
     values' own. */
  const char *new_name, *new_type;
  uint64_t new_bytes;
  double error;
} tfm_tensor_info;

typedef void (*tfm_tensor_visitor)(void *user, const tfm_tensor_info *tensor);

/* Tells all tensors of a model's files, of any family, in the order of their names. */
TFM_API tfm_status tfm_model_tensors(const char *path, const tfm_host *host,
                                     tfm_tensor_visitor visitor, void *user);

typedef struct tfm_convert_config {
  tfm_host host;
  tfm_type type;     /* of matrices; 0: as they are, where the new format has it */
  int32_t threads;   /* 0: one per core */
  bool overwrite;    /* files that are there already */
  tfm_tensor_visitor visitor; /* called for each tensor when it is written; NULL: none */
  void *user;
} tfm_convert_config;

/* Writes a model that tfm_model_load reads, in another format or type, with its tokenizer: a GGUF
   file when `to` ends with .gguf (F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1; vectors stay F32),
   else a Hugging Face folder (F32, F16, BF16). Each file appears under its name when it is whole.
   The numbers do not depend on threads, and are gguf's own. */
TFM_API tfm_status tfm_convert(const char *from, const char *to, const tfm_convert_config *config);

/* ---- Tokenizers ------------------------------------------------------------------------------ */

typedef struct tfm_tokenizer tfm_tokenizer; /* immutable, shared by any number of threads */

typedef struct tfm_tokenizer_config {
  tfm_host host;
  int32_t vocabulary; /* llama2.c's tokenizer.bin does not say its size: expect it; 0: to its end */
  const char *splitting; /* tiktoken's files do not say how text is split: "gpt2", "r50k_base",
                            "p50k_base", "cl100k_base", "o200k_base", "llama3", "qwen"; NULL: the
                            file is named after it */
} tfm_tokenizer_config;

/* Loads tokenizer.json (byte-level BPE; BPE with byte fallback), vocab.json with merges.txt beside
   it, SentencePiece BPE .model, llama2.c tokenizer.bin, or the vocabulary inside a GGUF file. Given
   a folder, or a model file without a vocabulary, looks there and beside it for tokenizer.json,
   tokenizer.model, tokenizer.bin, tok512.bin, vocab.json + merges.txt, in this order. What cannot
   be reproduced exactly is refused. Files must not change while they are loaded. NULL on
   failure. */
TFM_API tfm_tokenizer *tfm_tokenizer_load(const char *path, const tfm_tokenizer_config *config);
/* The same from memory, which may be released afterwards; the kind is recognised by its bytes. */
TFM_API tfm_tokenizer *tfm_tokenizer_load_memory(const void *data, size_t bytes,
                                                 const tfm_tokenizer_config *config);

typedef enum tfm_vocabulary { /* what tokens are, in a vocabulary built from text */
  TFM_BPE = 0,       /* bytes, merged by frequency */
  TFM_WORDS = 1,     /* what the pattern cuts out, blanks included: the most frequent */
  TFM_CHARACTERS = 2 /* code points, in their order */
} tfm_vocabulary;

typedef struct tfm_vocabulary_config {
  tfm_host host;
  tfm_vocabulary kind;
  int32_t size;          /* tokens at most; 0: 4096 of BPE, 32768 words, every character */
  int64_t min_frequency; /* a token's, in the texts; 0: 2 of BPE, else 1 */
  const char *pattern;   /* how BPE and words cut text: "gpt2", "llama3", "qwen2"; NULL: "gpt2" */
  /* Texts of special tokens, which get the first ids. Their names make them BOS ("<s>", "<bos>"),
     EOS ("</s>", "<eos>"), both ("<|endoftext|>"), PAD ("<pad>") and, for words and characters, UNK
     ("<unk>"), without which unknown ones are an error to encode. */
  const char *const *special;
  int32_t special_count;
  bool adds_bos, adds_eos; /* what TFM_ENCODE_SPECIAL adds */
  int32_t threads;       /* workers; 0: one per core. The result is the same */
} tfm_vocabulary_config;

/* Builds a vocabulary from `count` texts of UTF-8; bytes NULL: each ends with a NUL. NULL config:
   byte-level BPE. Merges and ids are those of Hugging Face's BpeTrainer, fed the same texts. */
TFM_API tfm_tokenizer *tfm_tokenizer_train(const char *const *texts, const size_t *bytes,
                                           size_t count, const tfm_vocabulary_config *config);
/* Writes tokenizer.json, which Hugging Face's tokenizers loads with the same ids: of what was built
   from text and of any byte-level BPE. Others are refused: copy their file. */
TFM_API tfm_status tfm_tokenizer_save(const tfm_tokenizer *tokenizer, const char *path);
TFM_API void tfm_tokenizer_free(tfm_tokenizer *tokenizer);

typedef struct tfm_tokenizer_info {
  const char *kind;    /* "byte-level BPE", "SentencePiece BPE", "words", "characters" */
  int32_t vocabulary;  /* ids are 0 .. vocabulary-1; gaps have no text */
  int32_t bos, eos, unk, pad; /* -1: none */
  bool adds_bos, adds_eos;    /* what TFM_ENCODE_SPECIAL adds */
} tfm_tokenizer_info;

TFM_API tfm_status tfm_tokenizer_describe(const tfm_tokenizer *tokenizer, tfm_tokenizer_info *out);

enum {
  TFM_ENCODE_SPECIAL = 1,      /* add BOS / EOS as the tokenizer's template says */
  /* "<|endoftext|>" in the text becomes that token: trusted text only */
  TFM_ENCODE_PARSE_SPECIAL = 2
};

/* Encodes `bytes` bytes of UTF-8 into ids[0 .. cap-1]. Returns how many ids the text has, which may
   exceed cap (then only cap are written; cap 0 with ids NULL asks), or a negative status. Without
   flags, text that looks like a special token stays text. Bytes that are not UTF-8 are encoded as
   bytes where the vocabulary has bytes, else as U+FFFD. Time is near linear in `bytes`. Work memory
   comes from the tokenizer's host.alloc, on the calling thread, whichever threads share it; its
   memory limit holds for each call by itself. */
TFM_API int64_t tfm_encode(const tfm_tokenizer *tokenizer, const char *text, size_t bytes,
                           unsigned flags, int32_t *ids, size_t cap);
typedef struct tfm_encoding { /* one text of a batch */
  const char *text;
  size_t bytes;
  int32_t *ids;  /* [cap] */
  size_t cap;
  int64_t count; /* out: what tfm_encode returns */
} tfm_encoding;

/* tfm_encode for n texts over `threads` threads (0: one per core), each text by one of them. What
   went wrong first, in the order of the texts, is returned; the others are encoded all the same.
   host.alloc is called by all of these threads. */
TFM_API tfm_status tfm_encode_batch(const tfm_tokenizer *tokenizer, tfm_encoding *batch, size_t n,
                                    unsigned flags, int32_t threads);
/* The text of n ids as UTF-8, snprintf fashion: returns its length in bytes, writes at most cap - 1
   and a terminating NUL. Bytes that form no character become U+FFFD. Special tokens are written
   out. A negative status when an id is outside the vocabulary. */
TFM_API int64_t tfm_decode(const tfm_tokenizer *tokenizer, const int32_t *ids, size_t n, char *text,
                           size_t cap);

/* Decoding as ids arrive: a character may span tokens, so the state is an object (zero to
   start). */
typedef struct tfm_decoder {
  uint8_t pending[8]; /* bytes of a character that is not complete yet */
  uint8_t pending_bytes;
  bool started; /* the leading space of SentencePiece has been dealt with */
} tfm_decoder;
/* Longest text that one id can complete, for the buffer of tfm_decode_next: bytes with the NUL. */
TFM_API size_t tfm_decode_bound(const tfm_tokenizer *tokenizer);
/* Appends one id (or ends the stream: id -1, which releases a broken tail as U+FFFD) and writes the
   characters that are now whole, with a NUL. Returns their bytes, 0 for "not yet", or a status.
   The concatenation equals tfm_decode of all ids. cap must be at least tfm_decode_bound. */
TFM_API int64_t tfm_decode_next(const tfm_tokenizer *tokenizer, tfm_decoder *state, int32_t id,
                                char *text, size_t cap);

/* The vocabulary's own spelling of an id ("\xc4\xa0the", "<0x0A>"), *bytes long, or NULL. */
TFM_API const char *tfm_token_text(const tfm_tokenizer *tokenizer, int32_t id, size_t *bytes);
/* The id of that spelling, special tokens included, or -1. */
TFM_API int32_t tfm_token_id(const tfm_tokenizer *tokenizer, const char *text, size_t bytes);

/* ---- Conversations --------------------------------------------------------------------------- */

typedef enum tfm_role { TFM_SYSTEM = 0, TFM_USER = 1, TFM_ASSISTANT = 2 } tfm_role;

typedef struct tfm_message {
  tfm_role role;
  const char *text;
} tfm_message;

typedef struct tfm_chat { /* how a model was trained to read conversations */
  const char *name;    /* "chatml", "llama3", ...; NULL: not known yet */
  bool system;         /* has a place for a system message */
  int32_t end[4];      /* [end_count] ids that end an answer */
  int32_t end_count;
} tfm_chat;

/* Fills *out with the template of this name: none, chatml, qwen2, qwen2.5, llama2, llama3,
   llama3.1, mistral-v1, mistral-v3, mistral-v3-tekken, mistral-v7, gemma, gemma3, phi3, phi3.5,
   phi3-first. With name NULL, of the model at `path`: of a GGUF file, or of chat_template.jinja,
   else of tokenizer_config.json, in the folder or beside the file, all of the file system. That is
   recognised, not run: one that is none of the published ones known here is refused with
   TFM_E_UNSUPPORTED. */
TFM_API tfm_status tfm_chat_find(const tfm_tokenizer *tokenizer, const char *path,
                                 const char *name, tfm_chat *out);
/* The ids of a conversation, as transformers' apply_chat_template gives them, and with `answer` of
   what begins an answer; ids, cap and result as with tfm_encode. A system message, if any, comes
   first. What looks like a special token in a message stays text. */
TFM_API int64_t tfm_chat_encode(const tfm_tokenizer *tokenizer, const tfm_chat *chat,
                                const tfm_message *messages, size_t n, bool answer, int32_t *ids,
                                size_t cap);

/* ---- Engines and sessions -------------------------------------------------------------------- */

/* An engine owns what computing takes: threads, workspace, and the pages of the key/value cache.
   A session is one sequence in it. All memory is allocated by the constructors, none while
   running. */
typedef struct tfm_engine tfm_engine;
typedef struct tfm_session tfm_session;

/* Called after each named step of the forward pass with its result, float32 [rows, cols]; names as
   in the forward section ("embed", "norm1", "qkv", "probs", ...); layer -1 outside the layers. The
   rows are those of the pass, session by session; data is valid during the call. */
typedef void (*tfm_tap)(void *user, const char *name, int32_t layer, const float *data,
                        int32_t rows, int32_t cols);

typedef struct tfm_engine_config {
  tfm_host host;       /* zero: libc, silent, unlimited */
  int32_t context;     /* positions per sequence; 0: the model's, at most 4096 */
  int32_t sequences;   /* sessions at a time; 0: 1 */
  /* rows of one forward pass; 0: 256, on a GPU 2,048, or fewer for a shorter context */
  int32_t batch_rows;
  int32_t page_tokens; /* positions per cache page; 0: 64. context: one page, contiguous */
  /* of the cache, shared by the sequences; 0: enough for all at full context */
  int32_t pages;
  /* of keys and values: F32, F16, BF16; or Q8_0, with heads of a multiple of 32 values. 0: the
     device's activation type, but on a GPU that of weights of 16 bits or fewer: BF16, else F16 */
  tfm_type cache;
  int32_t threads;     /* workers; 0: one per core */
  tfm_tap tap;         /* NULL: none. Slows everything down */
  void *tap_user;
  /* A sequence's bits do not depend on what else is in the batch, nor on how its prompt is cut. A
     GPU, and a CPU that has AMX, then do without their fastest ways; others always keep that. */
  bool deterministic;
  bool profile;        /* tell kinds of work apart in tfm_stats.work_seconds; slows a GPU down */
} tfm_engine_config;

TFM_API tfm_engine *tfm_engine_create(const tfm_model *model, const tfm_engine_config *config);
TFM_API void tfm_engine_free(tfm_engine *engine); /* after its sessions */

/* A sequence in an engine; TFM_E_FULL when `sequences` are open already. */
TFM_API tfm_session *tfm_session_open(tfm_engine *engine);
/* A sequence with an engine of its own: the short way. */
TFM_API tfm_session *tfm_session_create(const tfm_model *model, const tfm_engine_config *config);
TFM_API void tfm_session_free(tfm_session *session);

/* How to choose the next token. Steps and their order as in Hugging Face transformers: repetition
   penalty, temperature, top-k, top-p, min-p; equal probabilities are kept or dropped together. The
   draw inverts the cumulative sum, in id order, of the tokens that are left, at the random number
   philox(seed, sequence, position): the same whatever else is in the batch. */
typedef struct tfm_sampling {
  float temperature;        /* 0: greedy, the most probable token (the lowest id among equals) */
  int32_t top_k;            /* 0: off */
  float top_p;              /* 0 or 1: off */
  float min_p;              /* 0: off */
  float repetition_penalty; /* 0 or 1: off; over the tokens of the session so far */
  uint64_t seed;
  uint64_t sequence;        /* a second seed: number your requests, keep one seed */
} tfm_sampling;

/* Runs n ids through the model after what the session holds. TFM_E_FULL (and nothing fed) when they
   do not fit. Cancelling leaves the session as it was before the call. */
TFM_API tfm_status tfm_feed(tfm_session *session, const int32_t *ids, size_t n);
/* Encodes text (with BOS where the session is empty; special tokens in it stay text) and feeds it.
   The session keeps the tokenizer, which must outlive it, for tfm_text. "" starts from BOS. */
TFM_API tfm_status tfm_feed_text(tfm_session *session, const tfm_tokenizer *tokenizer,
                                 const char *text);
/* As tfm_feed, and writes the logits of every one of the n positions: logits [n, V]. */
TFM_API tfm_status tfm_eval(tfm_session *session, const int32_t *ids, size_t n, float *logits);

/* Chooses and appends the next token: its id, TFM_END at an end token (which is not appended), or a
   negative status. NULL: greedy. */
TFM_API int32_t tfm_next(tfm_session *session, const tfm_sampling *sampling);
/* tfm_next for n sessions of one engine in one forward pass, each with its own sampling[i]
   (sampling NULL: greedy); ids[i] as tfm_next would return. Open, feed and free sessions between
   calls as requests come and go: continuous batching. */
TFM_API tfm_status tfm_next_batch(tfm_session *const *sessions, size_t n,
                                  const tfm_sampling *sampling, int32_t *ids);
/* The text that the last tfm_next completed, whole characters only, "" when there is none yet;
   after TFM_END what was left of a broken one. Needs tfm_feed_text before. Valid until the next
   call. */
TFM_API const char *tfm_text(tfm_session *session);

/* Logits [V], float32, from which the last tfm_next chose, or, after a feed, that it would choose
   from; NULL with an error when nothing was fed. Valid until the engine's next call. */
TFM_API const float *tfm_logits(tfm_session *session);
/* Natural logarithm of id's probability under those logits at temperature 1; NaN on error. */
TFM_API float tfm_logprob(tfm_session *session, int32_t id);
/* The k most probable ids under those logits and their log-probabilities, descending; either array
   may be NULL. Returns min(k, V) or a negative status. */
TFM_API int32_t tfm_top(tfm_session *session, int32_t k, int32_t *ids, float *logprobs);

/* The session's tokens so far; valid until its next call. */
TFM_API const int32_t *tfm_session_tokens(const tfm_session *session, size_t *n);
/* Forgets all but the first n tokens; cheap. */
TFM_API tfm_status tfm_session_rewind(tfm_session *session, size_t n);
/* Makes the call in progress on the session's engine, or else its next one that computes, return
   TFM_E_CANCELLED within about one layer's work. Any thread; async-signal-safe. */
TFM_API void tfm_cancel(tfm_session *session);

typedef struct tfm_generate_config {
  tfm_sampling sampling;
  int32_t max_tokens;      /* 0: until an end token or the context is full */
  const char *const *stop; /* [stop_count] strings that end the text; they are not output */
  size_t stop_count;
  /* Text as it comes, whole characters; false stops. A possible beginning of a stop string is held
     back until it is decided. It may use and free other objects; this session, its tokenizer and
     its model only after tfm_generate has returned. */
  bool (*on_text)(void *user, const char *text, size_t bytes);
  void *user;
} tfm_generate_config;

/* Feeds the prompt and generates until max_tokens, an end token, a stop string, a full context or
   on_text's false. Returns the number of tokens generated, or a negative status. */
TFM_API int64_t tfm_generate(tfm_session *session, const tfm_tokenizer *tokenizer,
                             const char *prompt, const tfm_generate_config *config);

typedef enum tfm_work { /* what a device spends its time on */
  TFM_WORK_NONE,         /* nothing: it waits */
  TFM_WORK_PASS,         /* a whole pass through the layers, unless tfm_engine_config.profile: */
  TFM_WORK_EMBED,
  TFM_WORK_ATTENTION,    /* with its norms and projections */
  TFM_WORK_FEED_FORWARD,
  TFM_WORK_LAYER,        /* both at once, where the device has them fused */
  TFM_WORK_HEAD,         /* final norm and logits */
  TFM_WORK_SAMPLE,
  TFM_WORK_DECODE,       /* whole steps that a device takes by itself */
  TFM_WORK_COUNT
} tfm_work;

typedef struct tfm_stats { /* of a session's engine since its creation */
  uint64_t prompt_tokens, generated_tokens;
  double prompt_seconds, generate_seconds;
  uint64_t memory_bytes, peak_bytes; /* held by the engine now, and at most */
  uint64_t pages, pages_used;        /* of the cache */
  int32_t threads;
  double seconds;                    /* the engine's age */
  double first_token_seconds;        /* from the beginning of the latest feed to a token of it */
  double last_seconds, slowest_seconds; /* of calls for the next token: the latest; ever */
  /* The device's time by kind of work, by events where it is a GPU; the sum over `seconds` is the
     share that it was busy. */
  double work_seconds[TFM_WORK_COUNT];
  /* Of a GPU's own memory, else 0: the engine's part, now and at most; all that is there, all that
     is free. */
  uint64_t device_bytes, device_peak_bytes, device_total_bytes, device_free_bytes;
} tfm_stats;

TFM_API tfm_status tfm_session_stats(const tfm_session *session, tfm_stats *out);

/* ---- Memory, told in advance ----------------------------------------------------------------- */

typedef struct tfm_plan {      /* exact: the instances' high-water marks equal these */
  /* of files that stay mapped (shared, reclaimable, not counted below) */
  uint64_t mapped_bytes;
  uint64_t load_peak_bytes;    /* while loading */
  uint64_t model_bytes;        /* held by the model afterwards: model_info.memory_bytes */
  uint64_t engine_bytes;       /* held by an engine: cache + workspace + the rest */
  uint64_t cache_bytes;        /* of these, keys and values */
  uint64_t workspace_bytes;    /* of these, activations and logits */
} tfm_plan;

/* Reads the metadata of a model and tells what it and an engine would take, without allocating
   either. Configs as for the constructors, NULL allowed; memory limits are not applied, threads'
   stacks not counted. */
TFM_API tfm_status tfm_plan_memory(const char *path, const tfm_model_config *model,
                                   const tfm_engine_config *engine, tfm_plan *out);

/* ---- Training -------------------------------------------------------------------------------- */

/* A trainer owns a copy of a model's weights in float32, their gradients, the optimiser's moments
   and the activations of one pass: all memory is taken when it is created, none in a step. */
typedef struct tfm_trainer tfm_trainer;

typedef enum tfm_schedule { /* of the learning rate after the warm-up */
  TFM_CONSTANT = 0,
  TFM_LINEAR = 1,  /* down to min_lr, which the step after the last would have */
  TFM_COSINE = 2,  /* the same along half a cosine */
  TFM_WSD = 3      /* warm-up, stable, decay: linear over the last decay_steps */
} tfm_schedule;

enum { /* parts of a network, for tfm_trainer_config.freeze */
  TFM_EMBEDDINGS = 1,    /* of tokens and positions; the head too, where it is tied */
  TFM_HEAD = 2,
  TFM_NORMS = 4,
  TFM_ATTENTION = 8,     /* projections and their biases, as the next */
  TFM_FEED_FORWARD = 16,
  TFM_EXPERTS = 32       /* and their router */
};

typedef struct tfm_trainer_config {
  tfm_host host;
  tfm_device device;     /* of tfm_trainer_init; 0: the first. tfm_trainer_create takes the model's.
                            Where that cannot train yet, the reference does */
  /* What matrix products round their operands to; weights, sums and all else stay F32. 0: F32.
     BF16: faster on processors with AMX; elsewhere F32 all the same, with a warning in the log */
  tfm_type precision;
  int32_t threads;       /* workers; 0: one per core */
  int32_t batch;         /* B rows of tokens in one pass; 0: 1 */
  int32_t context;       /* T tokens of each; 0: the model's, at most 1024 */
  int32_t accumulate;    /* passes of one step, whose gradients are averaged; 0: 1 */
  float lr, min_lr;      /* highest learning rate, and what it falls to; 0: 3e-4, 0 */
  float beta1, beta2;    /* 0: 0.9, 0.95 */
  float eps;             /* 0: 1e-8 */
  float decay;           /* of matrices, not of vectors; 0: 0.1; below 0: none */
  float clip;            /* longest gradient over all parameters; 0: 1; below 0: any */
  tfm_schedule schedule;
  int32_t warmup;        /* steps of a linear start */
  int32_t steps;         /* in all, for the schedules that end */
  int32_t decay_steps;   /* of TFM_WSD; 0: a fifth of steps */
  /* Shares that a step drops at random, as GPT-2's embd_pdrop, attn_pdrop and resid_pdrop; what
     stays is scaled up. Drawn by seed, sequence and place, so the same whatever the batch, the
     threads and the device. */
  float drop_embed, drop_attn, drop_residual;
  uint64_t seed;         /* of these */
  bool recompute;        /* keep one layer's activations and compute them again: less memory, a
                            quarter more time, the same bits */
  unsigned freeze;       /* parts that are not trained, TFM_EMBEDDINGS | TFM_NORMS ... */
  int32_t first_layer;   /* layers below it are not trained either, nor are the embeddings */
  int32_t keep;          /* newest checkpoints that saving leaves: PATH, PATH.1 ...; 0: 1 */
  uint64_t data;         /* tfm_data.mark: checkpoints of other data are refused; 0: of none */
  float balance;         /* weight of the experts' load-balancing loss (Fedus et al. 2021), which is
                            not in tfm_step.loss; 0: the model's router_aux_loss_coef; below 0:
                            none */
} tfm_trainer_config;

typedef struct tfm_shape { /* a model to be made; what is 0 is as the family has it */
  const char *family;    /* a model_type: "gpt2", "llama", "qwen3", "gpt2_moe"; NULL: "gpt2" */
  int32_t layers, width, heads, vocabulary, context; /* required */
  int32_t kv_heads;      /* 0: heads */
  int32_t head_width;    /* 0: width / heads */
  int32_t ffn_width;     /* 0: 4 width; gated: 8/3 width, up to a multiple of 32 */
  int32_t experts, experts_used; /* of families with experts, in every layer; 0: as the family */
  int32_t expert_width;  /* 0: ffn_width */
  int32_t window;        /* of families with windows; 0: as the family; below 0: none */
  bool untied;           /* a head of its own instead of the embedding table */
  uint64_t seed;
  const tfm_tokenizer *tokenizer; /* its BOS and EOS are the model's; NULL: there are none */
} tfm_shape;

typedef struct tfm_step {
  double loss;           /* mean cross entropy, natural logarithm, before the step; by weight */
  double accuracy;       /* share of targets that were the most probable; by weight */
  double balance;        /* the experts' load-balancing loss, not weighted; 0 without experts */
  int64_t targets;       /* that were counted: neither -100 nor of weight 0 */
  float gradient_norm;   /* of all parameters together, before clipping */
  float lr;
  int64_t step;          /* steps taken, this one included */
  bool skipped;          /* loss or gradient was not finite: nothing was changed */
} tfm_step;

typedef struct tfm_trainer_info {
  uint64_t parameters;
  uint64_t memory_bytes;   /* held, which is also the most that it ever held */
  uint64_t state_bytes;    /* of these, weights, gradients and moments */
  int32_t batch, context, accumulate;
  int64_t step;
  int64_t sequences; /* rows that steps were given, skipped ones too: where the data goes on */
  tfm_type precision; /* that is computed in: F32, or BF16 where the device has it */
} tfm_trainer_info;

/* Trains what the model's files hold, matrices of any type made float32. The model may be freed. */
TFM_API tfm_trainer *tfm_trainer_create(const tfm_model *model, const tfm_trainer_config *config);
/* Trains a new model, its weights drawn as the family's reference does: normal with deviation 0.02,
   GPT-2's projections into the residual stream 0.02 / sqrt(2 L). */
TFM_API tfm_trainer *tfm_trainer_init(const tfm_shape *shape, const tfm_trainer_config *config);
TFM_API void tfm_trainer_free(tfm_trainer *trainer);
/* What tfm_trainer_init would take, exactly, without taking it. */
TFM_API tfm_status tfm_trainer_plan(const tfm_shape *shape, const tfm_trainer_config *config,
                                    tfm_trainer_info *out);
TFM_API tfm_status tfm_trainer_describe(const tfm_trainer *trainer, tfm_trainer_info *out);

/* One step of AdamW. tokens and targets [accumulate, batch, context]: each row is a sequence of its
   own, and a target is the token after its place, or -100 where none counts. weights, of the same
   shape, say how much each target counts; NULL: all alike. out may be NULL. */
TFM_API tfm_status tfm_trainer_step(tfm_trainer *trainer, const int32_t *tokens,
                                    const int32_t *targets, const float *weights, tfm_step *out);
/* The same loss and accuracy of one pass, [batch, context], without learning from it. */
TFM_API tfm_status tfm_trainer_eval(tfm_trainer *trainer, const int32_t *tokens,
                                    const int32_t *targets, const float *weights, tfm_step *out);
/* Writes config.json and model.safetensors (float32) into an existing folder, each under a
   temporary name first; tfm_model_load and transformers read them. */
TFM_API tfm_status tfm_trainer_export(tfm_trainer *trainer, const char *folder);
/* A checkpoint: weights, moments, the step and the place in the data, in one file with a checksum
   that takes its name only when it is whole on the disk: whenever the machine stops, the name holds
   this one or the last. */
TFM_API tfm_status tfm_trainer_save(tfm_trainer *trainer, const char *path);
/* Goes on from a checkpoint, bit for bit as if never interrupted, in a trainer made of the same
   shape with the same config. A file that does not fit or is damaged changes nothing. */
TFM_API tfm_status tfm_trainer_resume(tfm_trainer *trainer, const char *path);

/* Text to train on: one long row of ids, cut into sequences of `context` tokens. Their order has no
   end: each epoch visits all of them once, shuffled by the seed and shifted by a random number of
   tokens. Sequence i is the same whoever asks and whenever, so that a number is the whole place in
   the data. A document is preceded by BOS and followed by EOS, where the vocabulary has them. Both
   are learnt: sequences run on from one document into the next, and what begins one is told after
   its BOS, or else after the EOS before it, as it will be asked for. */
typedef struct tfm_data_config {
  tfm_host host;
  int32_t context;       /* T tokens of a sequence; 0: 256 */
  float held_out;        /* share of the tokens, the last ones, that training never sees; 1: all */
  uint64_t seed;
  const char *separator; /* text that ends a document within a file; NULL: a file is a document */
  /* A file that keeps the ids, mapped; NULL: memory does. It is no text, though it lies among
     them; a file that is there and is no such cache is refused. */
  const char *cache;
} tfm_data_config;

typedef struct tfm_data {  /* read only */
  int64_t tokens, held_out; /* in all; of these, held out */
  int64_t documents;
  int64_t sequences, held_sequences; /* of an epoch; of the held-out tokens */
  uint64_t mark;           /* of the ids, context, seed and share: for tfm_trainer_config.data */
  bool cached;             /* the ids came from the cache as it was */
} tfm_data;

/* Reads n files, and folders with all below them, in the order of their names, hidden ones left
   out. Texts are read piece by piece; the cache is made anew when a name, a size, a time of
   modification, the tokenizer or the separator differs, or its checksum. NULL on failure. */
TFM_API tfm_data *tfm_data_open(const char *const *paths, size_t n, const tfm_tokenizer *tokenizer,
                                const tfm_data_config *config);
TFM_API void tfm_data_free(tfm_data *data);
/* Sequences first, first + 1, ...: tokens and targets [rows, T], as tfm_trainer_step wants them.
   held_out: of the tokens that are, always in the same order, again from the start at their end. */
TFM_API tfm_status tfm_data_read(const tfm_data *data, bool held_out, int64_t first, int32_t rows,
                                 int32_t *tokens, int32_t *targets);

/* =================================================================================================
   >>backend   the table of kernels that a device fills in
   =================================================================================================

   Stop here if you only use the library; from here on, it is for those who write kernels.

   The model, the cache, the sampler, the engine and the trainer are written once, over this table.
   transformer.h fills it with portable C, the reference, which is the specification: a tuned entry
   is right when it agrees with the reference's on the same arguments.

   1. Matrices are two-dimensional, row-major views; tokens, heads and experts fold into rows or
      columns. `data` NULL marks an optional matrix as absent. `stride` is the distance between rows
      in elements; a row itself is contiguous. Shapes in comments are [rows, cols].
   2. What varies from step to step (ids, positions, pages, sampling parameters) is read from device
      arrays, so that a recorded graph can be replayed. Scalars and pointers may be frozen into it.
   3. Padding: the engine rounds passes up to `row_multiple` rows. A row whose `seq` is -1 is
      ignored by embed, rope, kv_put, attn and sample; what an entry writes for it is undefined.
      Passes that have a backward have no padding.
   4. Entries return nothing. A failure is kept in the device (tfm_dev_fail), everything enqueued
      after it may be skipped, and `sync` returns it, once. Arguments come from the library and are
      trusted.
   5. Unless its comment says otherwise an entry overwrites its outputs, reads and writes no padding
      between rows, and outputs do not overlap inputs. "may alias" means: the same view exactly.
   6. Activations have the table's type `activation`; logits, log-probabilities, statistics, losses,
      norm weights and biases are F32. The residual stream (what layers add to) has type `residual`.
      Gradients of weights accumulate; other outputs overwrite.
   7. Rows are independent: the bits of a row may depend on neither the other rows of the call nor
      the number of threads. The reference keeps this exactly. A table that has faster ways without
      it says so at its top, and takes none of them while tfm_dev.deterministic is set.
   8. An entry that is NULL is declined. Required for inference: device (all), pack, and forward but
      `layer` and `decode`; required by the trainer: backward and optimiser. Loading and the trainer
      name what is missing (TFM_E_UNSUPPORTED), never later. A table in host memory may forward an
      entry to tfm_backend_ref()'s, which needs of a tfm_dev only what is declared here. */

typedef struct tfm_backend tfm_backend;

/* ---- Views ---- */

typedef struct tfm_mat { /* a view; owns nothing */
  void *data;            /* [rows, cols] of a float type, in the device's memory */
  tfm_type type;
  int32_t rows, cols;
  int64_t stride; /* elements from row to row */
} tfm_mat;

/* ---- The device ---- */

typedef struct tfm_usage { /* what tfm_stats tells of a device */
  double seconds[TFM_WORK_COUNT];
  uint64_t bytes, peak_bytes, total_bytes, free_bytes;
  tfm_work now;          /* what runs, and since when: where `mark` is not the table's */
  double since;
} tfm_usage;

/* Opened twice in a program's life as a rule: by the model, to hold weights, and by each engine,
   for its queue and workspace. The front part is the library's. */
typedef struct tfm_dev {
  const tfm_backend *table;
  const tfm_host *host;
  struct tfmi_pool *pool; /* for tfm_parallel_for */
  int32_t threads;        /* shares that work is cut into; no more threads than cores run */
  int32_t index;          /* which GPU */
  uint64_t override_mask; /* bit i: entry i of the table is the reference's */
  bool host_visible;      /* memory from `alloc` must be addressable by the host (for override) */
  bool deterministic;     /* rule 7 without exceptions; set before `open` */
  tfm_status status;      /* sticky until sync */
  char message[256];
  void *work; /* an engine's or a trainer's: work_bytes for temporaries of entries; else NULL */
  void *state; /* the backend's own, from open to close */
  tfm_usage usage;
  /* `open` says whether products of BF16, summed up in F32, are faster here than of F32; then they
     may be asked for with BF16, before work_bytes. By the trainer: of attention, of matmul and
     matmul_moe with weights that learn, of matmul_dx, matmul_dw, moe_dx and moe_dw. By an engine,
     unless its weights are F32 or it is deterministic: of attention. */
  bool has_bf16;
  tfm_type products; /* TFM_BF16, or 0: of the operands as they are */
  tfm_type cache;    /* an engine's; set before work_bytes */
} tfm_dev;

/* Keeps the first failure until sync. printf-like. By the thread that called the entry only. */
TFM_API void tfm_dev_fail(tfm_dev *d, tfm_status status, const char *format, ...);
/* Runs job on ranges that cover 0 .. n-1, each once, in `grain`-sized steps at least, and waits.
   The split depends on threads, so sums must not cross items. worker is 0 .. threads-1. */
typedef void (*tfm_job)(void *context, int32_t begin, int32_t end, int32_t worker);
TFM_API void tfm_parallel_for(tfm_dev *d, int32_t n, int32_t grain, tfm_job job, void *context);

/* ---- Weights ---- */

enum { /* what a weight is used for: pack may lay it out differently */
  TFM_ROLE_MATMUL = 1,   /* y = x W^T */
  TFM_ROLE_GATHER = 2,   /* rows by id: an embedding table (a tied head is both) */
  /* Training: also dx = dy W. The one part lies in the device's memory, stable, in the arena that
     adamw writes; the weight is packed again, from there to the same place, after each update. */
  TFM_ROLE_GRADIENT = 4
};

/* What each tall x wide values of a matrix [rows, cols] are multiplied by: [ceil(rows / tall),
   ceil(cols / wide)], in host memory that lives as long as the load. at NULL: by nothing. */
typedef struct tfm_scales {
  const float *at;
  int32_t tall, wide;
} tfm_scales;

typedef struct tfm_part { /* rows of a weight that lie together in a file */
  const void *data;       /* host memory, any alignment; for TFM_ROLE_GRADIENT device memory */
  tfm_type type;
  int32_t rows;
  tfm_scales scales; /* of F8, not transposed */
} tfm_part;

/* Where a weight comes from: parts stacked along rows (q, k, v; gate, up; the experts), each [rows,
   cols] row-major, of possibly different types, or [cols, rows] when transposed (GPT-2's Conv1D,
   float types only). rows counts one expert's rows; parts repeat for every expert in turn. */
typedef struct tfm_weight_source {
  const tfm_part *parts;
  int32_t part_count, rows, cols, experts; /* experts 0: a plain matrix */
  bool transposed;
  bool stable;    /* the bytes outlive the weight: it may use them in place */
  bool on_device; /* the parts lie in the device's memory: packing again after an update */
  unsigned roles;
  tfm_type type;  /* convert to this; TFM_TYPE_DEFAULT: keep each part's */
} tfm_weight_source;

/* opaque but for this front: kernels are chosen by it; by row counts as rule 7 allows */
typedef struct tfm_weight {
  int32_t rows, cols, experts;
  unsigned roles;
  uint64_t bytes;               /* read when all of it is used once */
  /* memory of pack_size's first figure: the backend's own structure */
  void *host;
  void *device;                 /* ... and of its second */
  const struct tfm_weight *reference; /* the reference's form of it, when entries are overridden */
} tfm_weight;

/* multiples of 64 */
typedef struct tfm_pack_size { size_t host_bytes, device_bytes; } tfm_pack_size;

/* ---- Parameters of entries ---- */

typedef enum tfm_act {
  TFM_ACT_NONE,
  TFM_ACT_GELU,      /* x/2 (1 + erf(x / sqrt 2)) */
  TFM_ACT_GELU_TANH, /* its tanh approximation: GPT-2's gelu_new */
  TFM_ACT_SILU,
  TFM_ACT_RELU
} tfm_act;
typedef enum tfm_norm_kind { TFM_NORM_LAYER, TFM_NORM_RMS } tfm_norm_kind;

typedef struct tfm_norm {
  tfm_norm_kind kind;
  float eps;
  float offset;   /* added to the weight: 1 for Gemma's (1 + w) */
  int32_t groups; /* each row is that many vectors, normalised apart (head norms); 0: 1 */
} tfm_norm;

/* Element (row, col) is dropped when its random number is below the rate: word col % 4 of
   philox(key seed; counter pos << 32 | col / 4, site << 32 | seq), its upper 24 bits as a
   fraction. */
typedef struct tfm_dropout {
  float rate;                /* 0: none; kept elements are scaled by 1 / (1 - rate) */
  uint64_t seed;
  uint32_t site;             /* which dropout of the network */
  const int32_t *pos, *seq;  /* [rows] */
} tfm_dropout;

/* y = residual + dropout(cap(act(x W^T + bias))) */
typedef struct tfm_epilogue {
  const float *bias;   /* [N]; NULL: none */
  tfm_act act;
  float softcap;       /* c tanh(v / c); 0: none */
  tfm_mat residual;    /* [M, N]; may alias y, or be another matrix; data NULL: none */
  tfm_mat aux;         /* [M, N]: receives the value before act, which its backward reads */
  tfm_dropout dropout;
} tfm_epilogue;

/* Rotary embedding (Su et al. 2021). Of each head's D values the first `rot` are rotated in pairs:
   (i, i + rot/2), or (2i, 2i + 1) when interleaved (Meta's and GGUF's order of rows). The angle is
   (float)pos * inv_freq[i], its cosine and sine are multiplied by scale. */
typedef struct tfm_rope {
  int32_t head_width, rot;
  bool interleaved, inverse; /* inverse rotates back: the backward of itself */
  const float *inv_freq;     /* [rot/2]; all kinds of scaling are already in it */
  float scale;               /* attention factor of yarn and longrope; 1 otherwise */
} tfm_rope;

typedef struct tfm_rows { /* the tokens of one forward pass */
  int32_t n;              /* T, padding included */
  const int32_t *id;      /* [T] */
  const int32_t *pos;     /* [T] position in its sequence */
  const int32_t *seq;     /* [T] slot in the page table; -1: padding */
  bool apart;             /* no row is of the same sequence as the one before it */
} tfm_rows;

/* Keys and values of one layer: pages of page_tokens positions, page p at offset p * K *
   page_tokens * D, laid out [K, page_tokens, D]; table[seq, position / page_tokens] is a page
   number. A contiguous cache is the one-page case. How a vector of Q8_0 lies in its D / 32 * 34
   bytes is the table's own. table NULL: no cache; k and v are the rows of
   this very call, as views [T, K*D] of key_rows and value_rows; the rows of a sequence then lie
   together in ascending positions, and row r sees those before it of its own seq. */
typedef struct tfm_kv {
  void *k, *v;
  tfm_type type;
  const int32_t *table; /* [sequences, max_pages], -1 where there is no page */
  int32_t max_pages, page_tokens, heads, width;
  tfm_mat key_rows, value_rows;
} tfm_kv;

typedef struct tfm_attn {
  int32_t heads;   /* H, a multiple of kv->heads: head h reads kv head h / (H / K) */
  float scale;     /* of q . k */
  float softcap;   /* c tanh(s / c) on the scaled scores; 0: none */
  int32_t window;  /* sees positions > pos - window; 0: all */
  float *probs;    /* debugging: [T * H, probs_stride] softmax, 0 where masked; NULL: not wanted */
  int32_t probs_stride;
  tfm_dropout dropout; /* of the probabilities: col is h * 2^20 + key position */
} tfm_attn;

typedef struct tfm_moe { /* how the router's logits become a routing */
  int32_t experts, top_k;
  bool normalise;     /* the chosen weights are divided by their sum */
  bool softmax_after; /* softmax over the chosen only, instead of over all */
  float scale;        /* of the weights; 0: 1 */
} tfm_moe;

typedef struct tfm_routing { /* T tokens to E experts; device arrays owned by the caller */
  int32_t tokens, top_k, experts;
  /* [T, top_k] chosen experts, descending by weight; the lower id first in a tie */
  int32_t *expert;
  float *weight;    /* [T, top_k] */
  int32_t *order;   /* [T * top_k] slots t * top_k + j sorted by expert, then t */
  int32_t *begin;   /* [E + 1] range of each expert in order */
  float *probs;     /* [T, E] softmax of the router's logits, for its backward */
  /* [E], or NULL: route adds the slots of each expert and the sum of its probs, layer by layer, for
     the balance of all layers together */
  float *count, *mass;
} tfm_routing;

typedef struct tfm_sampler { /* one row of logits each; device arrays */
  const tfm_sampling *params; /* [R] */
  const int32_t *pos;         /* [R] position that the sampled token will have */
  const int32_t *seq;         /* [R] row of history; -1: padding */
  const int32_t *history;     /* [sequences, history_stride]: the tokens so far, `pos` of them */
  int32_t history_stride;
  float *work;                /* [R, 2 V] scratch */
} tfm_sampler;

typedef struct tfm_adamw { /* Loshchilov and Hutter 2019 */
  float lr, beta1, beta2, eps, decay; /* decay 0 for vectors */
  float clip;                         /* longest gradient, as a root of sumsq; 0: any */
  int32_t step;                       /* from 1, for the bias correction */
} tfm_adamw;

/* ---- The network: what the one forward pass reads, for entries that fuse parts of it ---- */

typedef struct tfm_layer {
  const float *norm1, *norm1_bias, *norm2, *norm2_bias; /* [C] before attention and feed-forward */
  const float *post1, *post2;                           /* [C] after them (Gemma 2), or NULL */
  const float *q_norm, *k_norm;                         /* [D], or NULL */
  tfm_weight qkv, out;      /* [(H+2K)*D, C] rows q then k then v; [C, H*D] */
  const float *qkv_bias, *out_bias;
  tfm_weight up, down;      /* [F, C], or gate then up [2F, C] when gated; [C, F]. rows 0: none */
  const float *up_bias, *down_bias;
  tfm_weight router, expert_up, expert_down, shared_gate; /* mixture of experts; rows 0: dense */
  tfm_rope rope;            /* rot 0: none */
  tfm_attn attn;
  /* Of experts: [E, N]. With a router, up and down are of the expert for all tokens, behind
     shared_gate [1, C]. */
  const float *expert_up_bias, *expert_down_bias;
} tfm_layer;

typedef struct tfm_net {
  int32_t layers, width, heads, kv_heads, head_width, ffn_width, vocabulary, context;
  int32_t experts, experts_used, expert_width;
  tfm_norm norm, head_norm; /* of layers and the end; of q and k */
  tfm_act act;
  bool gated;               /* y = act(gate) * up */
  tfm_moe moe;
  float embed_scale;        /* 0: 1 */
  float logit_softcap;
  tfm_weight embed;         /* [V, C] */
  tfm_weight positions;     /* [context, C] learned positions; rows 0: none */
  tfm_weight head;          /* [V, C]; a copy of `embed`'s front when tied */
  const float *head_bias;   /* [V], or NULL */
  const float *final_norm, *final_norm_bias;
  tfm_layer *layer;         /* [L] */
} tfm_net;

/* The state of a batch that decodes by itself. Device arrays but for ids. Pages and history for
   `steps` more positions are there. After each step rows.id, rows.pos and sampler.pos advance and
   history grows; a sequence that met one of `end` goes on, its further ids are not looked at. What
   ran ahead in vain is discarded by sync and a put of id, pos and seq: cached positions beyond a
   sequence's length are never read. */
typedef struct tfm_run_ahead {
  const tfm_net *net;
  const tfm_kv *kv;    /* [L] */
  tfm_rows rows;       /* one row per sequence: its last token and position */
  tfm_sampler sampler;
  int32_t *ids; /* [steps, T] from alloc_shared; -1 until the device has stored the choice */
} tfm_run_ahead;

/* ---- The table ---- */

#define TFM_BACKEND_ABI 6

struct tfm_backend {
  uint32_t abi; /* TFM_BACKEND_ABI */
  const char *name;
  tfm_type activation;  /* type of activations */
  tfm_type residual;    /* of the residual stream; the same, or wider */
  int32_t row_multiple; /* passes are padded to a multiple of this many rows; 1: never */
  int32_t pass_rows;    /* rows of a pass at most, where the engine's config does not say */
  bool half_cache;      /* caches have 16 bits by default where weights have no more */
  bool f8;              /* packs F8_E4M3 as it is; others are asked to make BF16 of it */

  /* Device. All may be called at any time after open; memory is zeroed by nobody. */
  /* fills d->state; on failure calls tfm_dev_fail and returns why */
  tfm_status (*open)(tfm_dev *d);
  void (*close)(tfm_dev *d);
  tfm_status (*sync)(tfm_dev *d);  /* wait for everything; return and clear the sticky failure */
  void *(*alloc)(tfm_dev *d, size_t bytes);            /* aligned to 64; NULL: out of memory */
  void (*release)(tfm_dev *d, void *p, size_t bytes);
  /* returns when host may change */
  void (*put)(tfm_dev *d, void *dst, const void *host, size_t bytes);
  /* returns when host is filled */
  void (*get)(tfm_dev *d, void *host, const void *src, size_t bytes);
  /* device to device, in order */
  void (*copy)(tfm_dev *d, void *dst, const void *src, size_t bytes);
  void (*zero)(tfm_dev *d, void *dst, size_t bytes);
  /* Memory that the host and the device both address; NULL: out of memory. */
  void *(*alloc_shared)(tfm_dev *d, size_t bytes);
  void (*release_shared)(tfm_dev *d, void *p, size_t bytes);
  /* Bytes of tfm_dev.work that entries want for passes of up to `rows` rows over a context; for
     backward and the optimiser too when net->embed has TFM_ROLE_GRADIENT. */
  size_t (*work_bytes)(tfm_dev *d, const tfm_net *net, int32_t rows, int32_t sequences,
                       int32_t context);
  /* Graphs. replay runs what was recorded under a key; false: nothing was. record(begin) starts a
     recording, or returns false: the calls then just run. While recording, entries are not run but
     kept, marks are not looked at, and put, get, sync and alloc are not called; record(end) keeps
     them under the key and runs them once. The engine's key is the number of rows, 2^32 more for
     those that are apart, and 2^33 for every id that is chosen; its memory does not move. */
  bool (*replay)(tfm_dev *d, uint64_t key);
  bool (*record)(tfm_dev *d, uint64_t key, bool begin);

  /* Weights. Sizes first, then packing into memory of exactly those sizes. An unknown source type
     fails with TFM_E_UNSUPPORTED. unpack writes rows [first, first + y.rows) back as floats. */
  tfm_pack_size (*pack_size)(tfm_dev *d, const tfm_weight_source *s);
  void (*pack)(tfm_dev *d, tfm_weight *w, const tfm_weight_source *s, void *host, void *device);
  void (*unpack)(tfm_dev *d, tfm_mat y, const tfm_weight *w, int32_t first);

  /* Forward. */
  /* y = x, converted; any float types; y may alias x when the types agree. */
  void (*cast)(tfm_dev *d, tfm_mat y, tfm_mat x);
  /* y[t] = scale * table[ids[t]] + (positions ? positions[pos[t]] : 0). y [T, C]. */
  void (*embed)(tfm_dev *d, tfm_mat y, const tfm_weight *table, const tfm_weight *positions,
                const tfm_rows *rows, float scale);
  /* y[i] = x[index[i]], i < y.rows; index is a device array. */
  void (*gather)(tfm_dev *d, tfm_mat y, tfm_mat x, const int32_t *index);
  /* y = residual + norm(x) * (w + offset) + b. w, b [cols / groups]; b and residual optional; y
     may alias x or residual. stats, if not NULL, receives (mean, 1/deviation) per group [T,
     groups, 2]. */
  void (*norm)(tfm_dev *d, tfm_mat y, tfm_mat x, const float *w, const float *b, tfm_mat residual,
               float *stats, const tfm_norm *p);
  /* y = epilogue(x W^T). x [M, K], W [N, K], y [M, N]. */
  void (*matmul)(tfm_dev *d, tfm_mat y, tfm_mat x, const tfm_weight *w, const tfm_epilogue *e);
  /* Rotates in place the heads of x [T, heads * D] (of q and k together: they lie side by side). */
  void (*rope)(tfm_dev *d, tfm_mat x, const int32_t *pos, const tfm_rope *p);
  /* Stores k, v [T, K*D] at (seq, pos). The page must be in the table. */
  void (*kv_put)(tfm_dev *d, const tfm_kv *kv, tfm_mat k, tfm_mat v, const tfm_rows *rows);
  /* y [T, H*D] = softmax(scale q k^T) v over positions 0..pos of the row's sequence, which are in
     the cache already. q [T, H*D]. lse, if not NULL, receives the log of the sum of exponentials
     [T, H]. */
  void (*attn)(tfm_dev *d, tfm_mat y, tfm_mat q, const tfm_kv *kv, const tfm_rows *rows, float *lse,
               const tfm_attn *p);
  /* gate_up [T, 2F]: y [T, F] = act(gate) * up. */
  void (*glu)(tfm_dev *d, tfm_mat y, tfm_mat gate_up, tfm_act act);
  /* logits [T, E]: fills routing. */
  void (*route)(tfm_dev *d, tfm_routing *r, tfm_mat logits, const tfm_moe *p);
  /* For slot s = order[i] of expert e: y[s] = x[from(s)] W_e^T, from(s) = s / top_k when `spread`
     (x [T, K]), else s (x [T * top_k, K]). y [T * top_k, N]. */
  void (*matmul_moe)(tfm_dev *d, tfm_mat y, tfm_mat x, const tfm_weight *w, const tfm_routing *r,
                     bool spread);
  /* y[t] = residual[t] + sum over j of weight[t, j] * x[t * top_k + j], in order of j. y may alias
     residual. */
  void (*combine)(tfm_dev *d, tfm_mat y, tfm_mat x, tfm_mat residual, const tfm_routing *r);
  /* ids[r] chosen from logits [R, V], which are left as they were. logprobs optional [R]; ids may
     be memory of alloc_shared. Two tables agree but where the random number lies within 1e-6 of a
     step of the cumulative sum. */
  void (*sample)(tfm_dev *d, int32_t *ids, float *logprobs, tfm_mat logits, const tfm_sampler *s);
  /* The k >= 1 best of each row, descending, the lower id first in a tie: ids, logprobs [R, k]. */
  void (*top)(tfm_dev *d, int32_t *ids, float *logprobs, tfm_mat logits, int32_t k);
  /* Optional fusions; false: declined, nothing done, the caller takes the entries above.
     matmul_glu: y [M, F] = act(gate) * up, both halves of x W^T [M, 2F]. layer: x [T, C] through
     one layer in place. decode: `steps` whole steps, sampling and next-token feedback included,
     enqueued without waiting; results appear in s->ids. */
  bool (*matmul_glu)(tfm_dev *d, tfm_mat y, tfm_mat x, const tfm_weight *w, tfm_act act);
  bool (*layer)(tfm_dev *d, tfm_mat x, const tfm_net *net, int32_t index, const tfm_kv *kv,
                const tfm_rows *rows);
  bool (*decode)(tfm_dev *d, const tfm_run_ahead *s, int32_t steps);

  /* Backward. dy is the gradient of the loss by y. */
  /* Cross entropy. losses[r] = weight[r] * -log softmax(logits[r])[target[r]]; hits[r] = weight[r]
     where the target is the most probable (the lowest id among equals), else 0; both 0 where target
     is -100. logits [R, V] become their gradient, times scale. weight NULL: ones. */
  void (*loss)(tfm_dev *d, float *losses, float *hits, tfm_mat logits, const int32_t *target,
               const float *weight, float scale);
  /* dx = beta * dx + dy W: beta 0 or 1; then, where x came out of an epilogue itself, through that
     as epilogue_bwd does, in place. w needs TFM_ROLE_GRADIENT; before NULL: none. */
  void (*matmul_dx)(tfm_dev *d, tfm_mat dx, tfm_mat dy, const tfm_weight *w, float beta,
                    const tfm_epilogue *before);
  /* dw = beta * dw + dy^T x [N, K]: beta 0 or 1; db += column sums of dy [N], when not NULL.
     dw.type: the gradients' type, F32 in the reference. */
  void (*matmul_dw)(tfm_dev *d, tfm_mat dw, float *db, tfm_mat dy, tfm_mat x, float beta);
  /* Backward of the epilogue up to x W^T + bias: dx = dropout(dy) * cap'(act'(aux)), which may
     alias dy; without aux neither act nor cap is passed. The residual's gradient is dy as it
     was. */
  void (*epilogue_bwd)(tfm_dev *d, tfm_mat dx, tfm_mat dy, const tfm_epilogue *e);
  /* dx = residual + gradient through norm; dw, db += [cols / groups]. dx may alias dy or
     residual. */
  void (*norm_bwd)(tfm_dev *d, tfm_mat dx, float *dw, float *db, tfm_mat dy, tfm_mat x,
                   const float *w, tfm_mat residual, const float *stats, const tfm_norm *p);
  /* kv without a table. dk, dv [T, K*D], dq [T, H*D] overwrite; y and lse as forward left them. */
  void (*attn_bwd)(tfm_dev *d, tfm_mat dq, tfm_mat dk, tfm_mat dv, tfm_mat dy, tfm_mat y, tfm_mat q,
                   const tfm_kv *kv, const tfm_rows *rows, const float *lse, const tfm_attn *p);
  void (*glu_bwd)(tfm_dev *d, tfm_mat dgate_up, tfm_mat dy, tfm_mat gate_up, tfm_act act);
  /* dtable[ids[t]] += scale * dy[t]; dpositions[pos[t]] += dy[t]; either may be absent. Order of
     sums fixed by t. */
  void (*embed_bwd)(tfm_dev *d, tfm_mat dtable, tfm_mat dpositions, tfm_mat dy,
                    const tfm_rows *rows, float scale);
  /* dlogits [T, E] from dweight [T, top_k], plus the load-balancing loss's gradient times balance;
     balance_loss[0], if not NULL, += that loss: E * sum over e of (slots of e / T) * (mean of
     probs[, e]), as Fedus et al. 2021 have it for top_k 1. Where r->count is, both are taken over
     all rows that were counted, not over this layer's, as transformers does it. */
  void (*route_bwd)(tfm_dev *d, tfm_mat dlogits, const float *dweight, const tfm_routing *r,
                    const tfm_moe *p, float balance, float *balance_loss);
  /* dx[s] = weight[s] * dy[s / top_k]; dweight[s] = dy[s / top_k] . x[s]: slots s [T * top_k]. */
  void (*combine_bwd)(tfm_dev *d, tfm_mat dx, float *dweight, tfm_mat dy, tfm_mat x,
                      const tfm_routing *r);
  /* dx[from(s)] = dy[s] W_e, from() as in matmul_moe; spread: dx [T, K] sums its slots in order of
     j. dw [E * N, K] += dy[s]^T x[from(s)]. */
  void (*moe_dx)(tfm_dev *d, tfm_mat dx, tfm_mat dy, const tfm_weight *w, const tfm_routing *r,
                 bool spread);
  void (*moe_dw)(tfm_dev *d, tfm_mat dw, tfm_mat dy, tfm_mat x, const tfm_routing *r, bool spread);

  /* Optimiser, over contiguous arenas: one launch for a whole model. */
  /* out[0] += sum of squares, non-finite when any element is. Fixed order. */
  void (*sumsq)(tfm_dev *d, float *out, const void *x, tfm_type type, int64_t n);
  /* sumsq[0] is of all gradients of the step, on the device: it tells the factor of clipping, and
     skips the step when it is not finite. w is stored in its type from the float32 master (w ==
     master when it is F32). */
  void (*adamw)(tfm_dev *d, void *w, tfm_type type, float *master, float *m, float *v,
                const void *g, tfm_type gtype, int64_t n, const float *sumsq, const tfm_adamw *p);

  /* Experts' small change: required for models that have them. */
  /* y[s] = act(x[s] + bias[e]), e the expert of slot s: slots [T * top_k, N], bias [E, N] or NULL;
     y may alias x. */
  void (*moe_bias)(tfm_dev *d, tfm_mat y, tfm_mat x, const float *bias, const tfm_routing *r,
                   tfm_act act);
  /* y[t] += x[t] / (1 + e^-gate[t]): gate [T, 1], F32. */
  void (*add_gated)(tfm_dev *d, tfm_mat y, tfm_mat x, tfm_mat gate);
  /* db [E, N] += sums of dy over each expert's slots, in their order. */
  void (*moe_bias_bwd)(tfm_dev *d, float *db, tfm_mat dy, const tfm_routing *r);
  /* Backward of add_gated: dx and dgate overwrite; y's gradient is dy. */
  void (*add_gated_bwd)(tfm_dev *d, tfm_mat dx, tfm_mat dgate, tfm_mat dy, tfm_mat x, tfm_mat gate);

  /* Measuring; NULL: the library looks at its clock, which is right where entries compute at once.
     mark: what is enqueued from here on is work of this kind. usage: d->usage is to be up to date
     as far as the device has come. Neither waits. */
  void (*mark)(tfm_dev *d, tfm_work kind);
  void (*usage)(tfm_dev *d);
};

/* The reference; and the companions, when they are linked (TFM_USE_CPU, TFM_USE_CUDA). A companion
   built against another layout of the table does not link: its name carries the number. */
#define tfm_backend_cpu tfm_backend_cpu_abi4
#define tfm_backend_cuda tfm_backend_cuda_abi4
TFM_API const tfm_backend *tfm_backend_ref(void);
extern const tfm_backend *tfm_backend_cpu(void);
extern const tfm_backend *tfm_backend_cuda(void);

#ifdef __cplusplus
}
#endif
#endif /* TRANSFORMER_H */
/* =================================================================================================
   Stop now, if you are only interested in the interface.
   ============================================================================================== */

#if defined(TRANSFORMER_IMPLEMENTATION) && !defined(TFM_LINKED)
#ifndef TFMI_IMPLEMENTED
#define TFMI_IMPLEMENTED

#include <errno.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <dirent.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef TFM_ASSERT
#define TFM_ASSERT(condition) ((void)0) /* for our own mistakes only, never for input */
#endif
#ifndef TFM_MALLOC
#define TFM_MALLOC malloc
#define TFM_REALLOC realloc
#define TFM_FREE free
#endif

/* =================================================================================================
   >>base   errors, memory, files, threads' little helpers
   =================================================================================================

   Two ways of failing, by phase. While loading, code that parses a file runs inside a `tfmi_load`:
   tfmi_fail records the sentence and jumps back to the entry point, which releases everything that
   the load held. So parsers read straight down, without a check per line. Afterwards nothing can
   fail but the device (sticky, see >>backend) and the arguments of public calls, which return.

   All memory comes from a `tfmi_heap`, one per object: it counts, keeps the high-water mark, and
   enforces the limit. In a dry heap nothing is allocated by tfmi_heap_charge but all is counted:
   the memory plan is the load itself, run dry. Within a load, memory is `scratch`, gone when the
   load ends, or `kept`, handed to the object. */

#if defined(__cplusplus) && __cplusplus >= 201103L
#define TFMI_THREAD thread_local
#else
#define TFMI_THREAD _Thread_local
#endif
#if defined(__GNUC__)
#define TFMI_PRINTF(a, b) __attribute__((format(printf, a, b)))
#define TFMI_NORETURN __attribute__((noreturn))
#define TFMI_UNUSED __attribute__((unused))
#define TFMI_NOINLINE __attribute__((noinline))
#else
#define TFMI_PRINTF(a, b)
#define TFMI_NORETURN
#define TFMI_UNUSED
#define TFMI_NOINLINE
#endif
/* What runs once a model, or once a pass, need not be compiled as kernels are: that takes a third
   of the compiler's time. */
#if defined(__GNUC__) && !defined(__clang__) && defined(__OPTIMIZE__)
#define TFMI_COMPILES_COLD 1
#else
#define TFMI_COMPILES_COLD 0
#endif
#define TFMI_COUNT(array) ((int32_t)(sizeof(array) / sizeof *(array)))
#define TFMI_NEW(type, pointer) ((type *)(void *)(pointer)) /* the cast that C++ wants of malloc */

/* ---- Errors ---- */

typedef struct tfmi_error_state {
  tfm_status status;
  char text[512];
} tfmi_error_state;
static TFMI_THREAD tfmi_error_state tfmi_error; /* the only state that outlives a call */

static void tfmi_error_set(tfm_status status, const char *format, va_list args) {
  char text[sizeof tfmi_error.text]; /* an argument may be the previous sentence */
  vsnprintf(text, sizeof text, format, args);
  memcpy(tfmi_error.text, text, sizeof text);
  tfmi_error.status = status;
}

/* Records a sentence and returns its status: `return tfmi_report(TFM_E_ARG, "...")`. */
static TFMI_PRINTF(2, 3) tfm_status tfmi_report(tfm_status status, const char *format, ...) {
  va_list args;
  va_start(args, format);
  tfmi_error_set(status, format, args);
  va_end(args);
  return status;
}

/* A NULL object keeps the sentence of the call that failed to make it. */
static tfm_status tfmi_null_object(const char *call) {
  if (tfmi_error.status == TFM_OK) tfmi_report(TFM_E_ARG, "%s: the object is NULL", call);
  return TFM_E_ARG;
}

TFM_API const char *tfm_version(void) { return TFM_VERSION; }
TFM_API const char *tfm_error(void) { return tfmi_error.text; }
TFM_API tfm_status tfm_error_status(void) { return tfmi_error.status; }

TFM_API const char *tfm_status_name(int status) {
  static const char *const names[] = {"TFM_OK",         "TFM_E_ARG",         "TFM_E_MEMORY",
                                      "TFM_E_IO",       "TFM_E_FORMAT",      "TFM_E_UNSUPPORTED",
                                      "TFM_E_DEVICE",   "TFM_E_FULL",        "TFM_E_STATE",
                                      "TFM_E_CANCELLED"};
  if (status == TFM_END) return "TFM_END";
  if (status > 0 || status <= -TFMI_COUNT(names)) return "?";
  return names[-status];
}

/* ---- Checked arithmetic: every size that a file had a say in goes through these ---- */

static bool tfmi_mul(uint64_t a, uint64_t b, uint64_t *out) {
  if (b != 0 && a > UINT64_MAX / b) return false;
  *out = a * b;
  return true;
}

/* bytes = count * size, and it fits a size_t. */
static bool tfmi_bytes(uint64_t count, uint64_t size, size_t *bytes) {
  uint64_t product;
  if (!tfmi_mul(count, size, &product) || product > SIZE_MAX / 2) return false;
  *bytes = (size_t)product;
  return true;
}

static size_t tfmi_align64(size_t n) { return (n + 63) & ~(size_t)63; }

enum { TFMI_SLACK = 128 }; /* bytes more than asked for that a block aligned to 64 takes */

/* ---- The heap of an object ---- */

typedef struct tfmi_heap {
  tfm_host host;
  uint64_t used, peak;
  bool dry;
} tfmi_heap;

static void *tfmi_host_realloc(const tfm_host *host, void *old, size_t old_bytes, size_t bytes) {
  if (host->alloc) return host->alloc(host->user, old, old_bytes, bytes);
  if (bytes == 0) {
    TFM_FREE(old);
    return NULL;
  }
  return old ? TFM_REALLOC(old, bytes) : TFM_MALLOC(bytes);
}

/* Counts memory in; the caller allocates it elsewhere, or, when dry, not at all. */
static tfm_status tfmi_heap_charge(tfmi_heap *h, size_t bytes) {
  if (h->host.memory_limit_bytes && h->used + bytes > h->host.memory_limit_bytes)
    return tfmi_report(TFM_E_MEMORY,
                       "memory limit: %llu bytes in use and %llu more wanted, limit is %llu; raise "
                       "memory_limit_bytes or shorten the context",
                       (unsigned long long)h->used, (unsigned long long)bytes,
                       (unsigned long long)h->host.memory_limit_bytes);
  h->used += bytes;
  if (h->used > h->peak) h->peak = h->used;
  return TFM_OK;
}

/* Grows or shrinks a block; NULL with an error set on failure, the old block then untouched. */
static void *tfmi_heap_realloc(tfmi_heap *h, void *old, size_t old_bytes, size_t bytes) {
  void *p;
  if (bytes > old_bytes && tfmi_heap_charge(h, bytes - old_bytes) != TFM_OK) return NULL;
  p = tfmi_host_realloc(&h->host, old, old_bytes, bytes);
  if (!p && bytes) {
    if (bytes > old_bytes) h->used -= bytes - old_bytes;
    tfmi_report(TFM_E_MEMORY, "out of memory: the allocator refused %llu bytes, with %llu in use",
                (unsigned long long)bytes, (unsigned long long)h->used);
    return NULL;
  }
  if (bytes < old_bytes) h->used -= old_bytes - bytes;
  return p;
}

/* A zeroed block. */
static void *tfmi_heap_get(tfmi_heap *h, size_t bytes) {
  void *p = tfmi_heap_realloc(h, NULL, 0, bytes ? bytes : 1);
  if (p) memset(p, 0, bytes);
  return p;
}

static void tfmi_heap_put(tfmi_heap *h, void *p, size_t bytes) {
  if (p) tfmi_heap_realloc(h, p, bytes ? bytes : 1, 0);
}

/* ---- The application's callbacks ---- */

static TFMI_PRINTF(3, 4) void tfmi_log(const tfm_host *host, tfm_log_level level,
                                       const char *format, ...) {
  char line[512];
  va_list args;
  if (!host->log) return;
  va_start(args, format);
  vsnprintf(line, sizeof line, format, args);
  va_end(args);
  host->log(host->user, level, line);
}

/* False when the application wants to stop. */
static bool tfmi_goes_on(const tfm_host *host, const char *phase, double done) {
  if (host->cancel && *host->cancel) return false;
  return !host->progress || host->progress(host->user, phase, done);
}

/* ---- Files ---- */

typedef enum tfmi_file_kind { /* who gives the bytes back */
  TFMI_FILE_NONE, TFMI_FILE_BORROWED, TFMI_FILE_MAPPED, TFMI_FILE_READ, TFMI_FILE_IO
} tfmi_file_kind;

typedef struct tfmi_file { /* a whole file, read only */
  const uint8_t *data;
  size_t bytes;
  tfmi_file_kind kind;
  void *handle; /* of tfm_io */
} tfmi_file;

/* ---- A load ---- */

typedef struct tfmi_block { /* precedes each block of a load */
  struct tfmi_block *prev, *next;
  size_t bytes;             /* of the whole, this header included */
  size_t pad;               /* keeps what follows aligned to 16 */
} tfmi_block;

typedef struct tfmi_load {
  tfmi_heap *heap;
  tfmi_block scratch, kept; /* rings; kept passes to the object on success */
  jmp_buf fail;
  const char *object;       /* what errors are about: a path, as the user wrote it */
  bool no_mmap;
} tfmi_load;

static void tfmi_ring_init(tfmi_block *ring) { ring->prev = ring->next = ring; }

static void tfmi_load_init(tfmi_load *l, tfmi_heap *heap, const char *object) {
  memset(l, 0, sizeof *l);
  l->heap = heap;
  l->object = object;
  tfmi_ring_init(&l->scratch);
  tfmi_ring_init(&l->kept);
}

/* Ends the load with a status and a sentence; jumps to the entry point's setjmp(l->fail). */
static TFMI_NORETURN TFMI_PRINTF(3, 4) void tfmi_fail(tfmi_load *l, tfm_status status,
                                                      const char *format, ...) {
  char text[400];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  if (l->object) tfmi_report(status, "%s: %s", l->object, text);
  else tfmi_report(status, "%s", text);
  longjmp(l->fail, 1);
}

/* As tfmi_fail, keeping a sentence that was recorded further down. */
static TFMI_NORETURN void tfmi_fail_again(tfmi_load *l) { longjmp(l->fail, 1); }

static void tfmi_ring_free(tfmi_heap *heap, tfmi_block *ring) {
  while (ring->next != ring) {
    tfmi_block *b = ring->next;
    ring->next = b->next;
    b->next->prev = ring;
    tfmi_heap_put(heap, b, b->bytes);
  }
}

static void *tfmi_ring_realloc(tfmi_load *l, tfmi_block *ring, void *old, size_t bytes) {
  tfmi_block *b = old ? (tfmi_block *)old - 1 : NULL, *before = b ? b->prev : ring->prev;
  if (b) { /* out of the ring while it may move; put back below, whatever happened */
    b->prev->next = b->next;
    b->next->prev = b->prev;
  }
  if (bytes <= SIZE_MAX / 2) {
    size_t whole = bytes + sizeof *b;
    tfmi_block *moved =
        TFMI_NEW(tfmi_block, tfmi_heap_realloc(l->heap, b, b ? b->bytes : 0, whole));
    if (moved) {
      if (!b) memset(moved, 0, whole);
      moved->bytes = whole;
      b = moved;
      bytes = 0;
    }
  } else {
    tfmi_report(TFM_E_MEMORY, "out of memory: a block of more than half the address space");
  }
  if (b) {
    b->prev = before;
    b->next = before->next;
    before->next->prev = b;
    before->next = b;
  }
  if (bytes || !b) tfmi_fail_again(l);
  return b + 1;
}

static void *tfmi_ring_get(tfmi_load *l, tfmi_block *ring, uint64_t count, uint64_t size) {
  size_t bytes;
  if (!tfmi_bytes(count, size, &bytes))
    tfmi_fail(l, TFM_E_MEMORY, "out of memory: %llu elements of %llu bytes",
              (unsigned long long)count, (unsigned long long)size);
  return tfmi_ring_realloc(l, ring, NULL, bytes ? bytes : 1);
}

/* Zeroed memory that goes when the load ends; or when released. Never NULL: failure jumps. */
static void *tfmi_scratch(tfmi_load *l, uint64_t count, uint64_t size) {
  return tfmi_ring_get(l, &l->scratch, count, size);
}

/* Zeroed memory that belongs to the object being loaded. */
static void *tfmi_keep(tfmi_load *l, uint64_t count, uint64_t size) {
  return tfmi_ring_get(l, &l->kept, count, size);
}

/* Gives back scratch or kept memory before the end. */
static void tfmi_release(tfmi_load *l, void *p) {
  tfmi_block *b;
  if (!p) return;
  b = TFMI_NEW(tfmi_block, p) - 1;
  b->prev->next = b->next;
  b->next->prev = b->prev;
  tfmi_heap_put(l->heap, b, b->bytes);
}

/* ---- Little-endian, as all files are, read and written ----

   Numbers are taken from bytes by tfmi_u16 and its like, at any alignment. Blocks of quantised
   values stay as they are, since their codecs take the scales so. Floats have the machine's order
   in memory: where that is another, tfmi_little turns them, when they come and when they go. */

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
enum { TFMI_BIG_ENDIAN = 1 };
#else
enum { TFMI_BIG_ENDIAN = 0 };
#endif

static uint16_t tfmi_u16(const void *p) {
  const uint8_t *b = (const uint8_t *)p;
  return (uint16_t)(b[0] | b[1] << 8);
}
static uint32_t tfmi_u32(const void *p) {
  const uint8_t *b = (const uint8_t *)p;
  return (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
}
static uint64_t tfmi_u64(const void *p) {
  return (uint64_t)tfmi_u32(p) | (uint64_t)tfmi_u32((const uint8_t *)p + 4) << 32;
}
static float tfmi_f32(const void *p) {
  uint32_t bits = tfmi_u32(p);
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* Words of `width` bytes, `bytes` in all, from the machine's order to that of files, or back. */
static void tfmi_little(void *words, size_t bytes, size_t width) {
  uint8_t *word = (uint8_t *)words, t;
  size_t at, i;
  for (at = 0; TFMI_BIG_ENDIAN && at + width <= bytes; at += width, word += width)
    for (i = 0; i < width / 2; i++) {
      t = word[i];
      word[i] = word[width - 1 - i];
      word[width - 1 - i] = t;
    }
}

/* ---- The platform: POSIX, or what MinGW-w64 has of it ---- */

#ifdef _WIN32
#include <direct.h>
#include <io.h>
#ifdef __cplusplus
extern "C" {
#endif
/* As windows.h has them, which is not to be had without its macros. */
__declspec(dllimport) int __stdcall MoveFileExA(const char *, const char *, unsigned long);
__declspec(dllimport) int __stdcall CreateHardLinkA(const char *, const char *, void *);
#ifdef __cplusplus
}
#endif
typedef struct _stat64 tfmi_stat;
enum {
  TFMI_OPEN_READ = O_RDONLY | O_BINARY | O_NOINHERIT,
  TFMI_OPEN_WRITE = O_WRONLY | O_CREAT | O_TRUNC | O_BINARY | O_NOINHERIT
};
static bool tfmi_stat_path(const char *path, tfmi_stat *st) { return _stat64(path, st) == 0; }
static bool tfmi_stat_open(int fd, tfmi_stat *st) { return _fstat64(fd, st) == 0; }
static uint64_t tfmi_modified(const tfmi_stat *st) { return (uint64_t)st->st_mtime * 1000000000u; }
static void *tfmi_map(int fd, size_t bytes) {
  (void)fd, (void)bytes;
  return NULL;
}
static void tfmi_unmap(const void *data, size_t bytes) { (void)data, (void)bytes; }
static void tfmi_page_out(const uint8_t *data, size_t bytes) { (void)data, (void)bytes; }
static bool tfmi_sync(int fd) { return _commit(fd) == 0; }
static void tfmi_sync_folder(const char *path) { (void)path; }
static bool tfmi_rename(const char *from, const char *to) {
  return MoveFileExA(from, to, 1 /* MOVEFILE_REPLACE_EXISTING */) != 0;
}
static bool tfmi_link(const char *from, const char *to) {
  return CreateHardLinkA(to, from, NULL) != 0;
}
static int tfmi_make_folder(const char *path) { return _mkdir(path); }
static int tfmi_remove_folder(const char *path) { return _rmdir(path); }
static const char *tfmi_last_slash(const char *path) {
  const char *slash = strrchr(path, '/'), *other = strrchr(path, '\\');
  return !slash || (other && other > slash) ? other : slash;
}
static long tfmi_processors(void) { return pthread_num_processors_np(); }
static bool tfmi_thread_start(pthread_t *thread, void *(*main)(void *), void *context) {
  return pthread_create(thread, NULL, main, context) == 0;
}
enum { TFMI_MAPS = 0 }; /* files cannot be mapped: they are read */
#else
#include <signal.h>
#include <sys/mman.h>
typedef struct stat tfmi_stat;
enum {
  TFMI_OPEN_READ = O_RDONLY | O_CLOEXEC | O_NONBLOCK, /* which a pipe or a device would need */
  TFMI_OPEN_WRITE = O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC
};
static bool tfmi_stat_path(const char *path, tfmi_stat *st) { return stat(path, st) == 0; }
static bool tfmi_stat_open(int fd, tfmi_stat *st) { return fstat(fd, st) == 0; }
static uint64_t tfmi_modified(const tfmi_stat *st) {
  return (uint64_t)st->st_mtim.tv_sec * 1000000000u + (uint64_t)st->st_mtim.tv_nsec;
}
static void *tfmi_map(int fd, size_t bytes) {
  void *map = mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, fd, 0);
  return map == MAP_FAILED ? NULL : map;
}
static void tfmi_unmap(const void *data, size_t bytes) { munmap((void *)(uintptr_t)data, bytes); }
/* Whole pages of a mapped file leave the process's memory until they are read again. */
static void tfmi_page_out(const uint8_t *data, size_t bytes) {
  const uintptr_t page = 1 << 16; /* no system's are larger */
  uintptr_t first = ((uintptr_t)data + page - 1) & ~(page - 1);
  uintptr_t end = ((uintptr_t)data + bytes) & ~(page - 1);
#ifdef MADV_DONTNEED /* which -std=c11 hides */
  if (first < end) madvise((void *)first, end - first, MADV_DONTNEED);
#endif
  (void)first, (void)end;
}
static bool tfmi_sync(int fd) { return fsync(fd) == 0; }
/* A name is on the disk when its folder is. */
static void tfmi_sync_folder(const char *path) {
  const char *slash = strrchr(path, '/');
  char folder[1040];
  int fd;
  snprintf(folder, sizeof folder, "%.*s", slash ? (int)(slash - path) + 1 : 1, slash ? path : ".");
  fd = open(folder, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return;
  fsync(fd);
  close(fd);
}
static bool tfmi_rename(const char *from, const char *to) { return rename(from, to) == 0; }
static bool tfmi_link(const char *from, const char *to) { return link(from, to) == 0; }
static int tfmi_make_folder(const char *path) { return mkdir(path, 0777); }
static int tfmi_remove_folder(const char *path) { return rmdir(path); }
static const char *tfmi_last_slash(const char *path) { return strrchr(path, '/'); }
static long tfmi_processors(void) { return sysconf(_SC_NPROCESSORS_ONLN); }
/* With signals blocked: they are for the application's threads. */
static bool tfmi_thread_start(pthread_t *thread, void *(*main)(void *), void *context) {
  sigset_t all, before;
  int failed;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  failed = pthread_create(thread, NULL, main, context);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return failed == 0;
}
enum { TFMI_MAPS = 1 };
#endif

/* ---- Opening files ---- */

static bool tfmi_read_all(int fd, uint8_t *data, size_t bytes) {
  while (bytes) {
    ssize_t n = read(fd, data, bytes < (1u << 30) ? bytes : (1u << 30));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    data += n;
    bytes -= (size_t)n;
  }
  return true;
}

/* From the file system; fills *f, or returns what went wrong. Only regular files: a pipe or device
   has no size and could go on for ever. */
static const char *tfmi_file_open_path(tfmi_load *l, const char *path, tfmi_file *f) {
  tfmi_stat st;
  const char *wrong = NULL;
  int fd = open(path, TFMI_OPEN_READ);
  if (fd < 0) return "cannot be opened; check the path and the permissions";
  if (!tfmi_stat_open(fd, &st) || !S_ISREG(st.st_mode)) {
    wrong = "is not a regular file";
  } else if (st.st_size == 0) {
    f->kind = TFMI_FILE_BORROWED;
    f->data = (const uint8_t *)"";
  } else if ((uint64_t)st.st_size > SIZE_MAX / 2) {
    wrong = "is larger than the address space";
  } else if (TFMI_MAPS && !l->no_mmap) {
    f->data = (const uint8_t *)tfmi_map(fd, (size_t)st.st_size);
    if (!f->data) wrong = "cannot be mapped; try no_mmap";
    f->kind = TFMI_FILE_MAPPED;
    f->bytes = (size_t)st.st_size;
  } else {
    uint8_t *data = (uint8_t *)tfmi_heap_realloc(l->heap, NULL, 0, (size_t)st.st_size);
    f->data = data;
    f->bytes = (size_t)st.st_size;
    f->kind = data ? TFMI_FILE_READ : TFMI_FILE_NONE;
    if (!data) wrong = "";
    else if (!tfmi_read_all(fd, data, f->bytes)) wrong = "cannot be read to its end";
  }
  close(fd);
  return wrong;
}

static const char *tfmi_file_open_io(tfmi_load *l, const char *path, tfmi_file *f) {
  const tfm_io *io = l->heap->host.io;
  uint64_t bytes = 0;
  f->handle = io->open(io->user, path, &bytes);
  if (!f->handle) return "cannot be opened; check the name";
  f->kind = TFMI_FILE_IO;
  if (bytes > SIZE_MAX / 2) return "is larger than the address space";
  f->bytes = (size_t)bytes;
  if (io->map && !l->no_mmap) {
    f->data = (const uint8_t *)io->map(io->user, f->handle);
    return f->data ? NULL : "cannot be mapped; try no_mmap";
  } else {
    uint8_t *data = (uint8_t *)tfmi_heap_realloc(l->heap, NULL, 0, f->bytes ? f->bytes : 1);
    bool whole = data && io->read(io->user, f->handle, 0, data, f->bytes);
    io->close(io->user, f->handle);
    f->handle = NULL;
    f->data = data;
    f->kind = data ? TFMI_FILE_READ : TFMI_FILE_NONE;
    return !data ? "" : whole ? NULL : "cannot be read to its end";
  }
}

static void tfmi_file_close(tfmi_heap *heap, tfmi_file *f) {
  const tfm_io *io = heap->host.io;
  if (f->kind == TFMI_FILE_MAPPED && f->data) tfmi_unmap(f->data, f->bytes);
  if (f->kind == TFMI_FILE_READ) tfmi_heap_put(heap, (void *)(uintptr_t)f->data, f->bytes);
  if (f->kind == TFMI_FILE_IO && f->handle) io->close(io->user, f->handle);
  memset(f, 0, sizeof *f);
}

/* Opens or fails. On failure *f is empty: nothing to close. */
static void tfmi_file_open(tfmi_load *l, const char *path, tfmi_file *f) {
  const char *wrong;
  memset(f, 0, sizeof *f);
  wrong = l->heap->host.io ? tfmi_file_open_io(l, path, f) : tfmi_file_open_path(l, path, f);
  if (!wrong) return;
  tfmi_file_close(l->heap, f);
  if (*wrong == 0) tfmi_fail_again(l); /* out of memory, already told */
  if (l->object && strcmp(l->object, path) == 0) tfmi_fail(l, TFM_E_IO, "it %s", wrong);
  tfmi_fail(l, TFM_E_IO, "%s %s", path, wrong);
}

static bool tfmi_file_exists(tfmi_load *l, const char *path) {
  const tfm_io *io = l->heap->host.io;
  tfmi_stat st;
  if (io) {
    uint64_t bytes;
    void *handle = io->open(io->user, path, &bytes);
    if (handle) io->close(io->user, handle);
    return handle != NULL;
  }
  return tfmi_stat_path(path, &st) && S_ISREG(st.st_mode);
}

/* By callback, a name that cannot be opened is taken for a folder. */
static bool tfmi_is_folder(tfmi_load *l, const char *path) {
  tfmi_stat st;
  if (l->heap->host.io) return !tfmi_file_exists(l, path);
  return tfmi_stat_path(path, &st) && S_ISDIR(st.st_mode);
}

/* Where the system numbers its files: Windows does not. */
static bool tfmi_same_file(const tfmi_stat *a, const tfmi_stat *b) {
  return a->st_ino != 0 && a->st_ino == b->st_ino && a->st_dev == b->st_dev;
}

/* folder + "/" + name, scratch. */
static char *tfmi_join(tfmi_load *l, const char *folder, const char *name) {
  size_t a = strlen(folder), b = strlen(name), slash = a && folder[a - 1] != '/';
  char *path = (char *)tfmi_scratch(l, a + slash + b + 1, 1);
  memcpy(path, folder, a);
  if (slash) path[a] = '/';
  memcpy(path + a + slash, name, b + 1);
  return path;
}

/* The folder that a file is in: "a/b.gguf" gives "a", "b.gguf" gives ".". Scratch. */
static char *tfmi_folder_of(tfmi_load *l, const char *path) {
  const char *slash = tfmi_last_slash(path);
  size_t n = slash ? (size_t)(slash - path) : 1;
  char *folder = (char *)tfmi_scratch(l, n + 2, 1);
  if (!slash) memcpy(folder, l->heap->host.io ? "" : ".", l->heap->host.io ? 1 : 2);
  else if (n == 0) memcpy(folder, "/", 2);
  else memcpy(folder, path, n);
  return folder;
}

static bool tfmi_ends_with(const char *text, const char *end) {
  size_t n = strlen(text), m = strlen(end);
  return n >= m && memcmp(text + n - m, end, m) == 0;
}

/* ---- Writing files ---- */

typedef struct tfmi_out { /* a file being written; fd -1 only counts */
  int fd;
  bool failed;
  uint64_t bytes, sum; /* so far, and the checksum of what was flushed */
  size_t used;
  char temporary[1040];
  char buffer[4096];
} tfmi_out;

/* Of n bytes more, in words of 8; only the last call may end within one. The bytes are those of a
   file: width 1; or of numbers so many bytes wide, and the sum is of what a file has of them. */
static uint64_t tfmi_checksum(uint64_t sum, const void *data, size_t n, size_t width) {
  const char *from = (const char *)data;
  size_t i;
  for (i = 0; i < n; i += 8) {
    uint64_t word = 0;
    memcpy(&word, from + i, n - i < 8 ? n - i : 8);
    tfmi_little(&word, sizeof word, width);
    tfmi_little(&word, sizeof word, sizeof word);
    sum = (sum ^ word) * UINT64_C(0x9E3779B97F4A7C15);
    sum ^= sum >> 29;
  }
  return sum;
}

static void tfmi_out_flush(tfmi_out *o) {
  const char *at = o->buffer;
  o->sum = tfmi_checksum(o->sum, o->buffer, o->used, 1);
  while (o->fd >= 0 && o->used && !o->failed) {
    ssize_t n = write(o->fd, at, o->used);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) o->failed = true;
    else at += n, o->used -= (size_t)n;
  }
  o->used = 0;
}

static void tfmi_out_bytes(tfmi_out *o, const void *data, size_t n) {
  const char *from = (const char *)data;
  o->bytes += n;
  while (n) {
    size_t some = sizeof o->buffer - o->used < n ? sizeof o->buffer - o->used : n;
    memcpy(o->buffer + o->used, from, some);
    o->used += some;
    from += some;
    n -= some;
    if (o->used == sizeof o->buffer) tfmi_out_flush(o);
  }
}

/* Words of `width` bytes in the machine's order; n bytes in all. */
static void tfmi_out_words(tfmi_out *o, const void *words, size_t n, size_t width) {
  const char *from = (const char *)words;
  char piece[256];
  while (TFMI_BIG_ENDIAN && n) {
    size_t some = n < sizeof piece ? n : sizeof piece;
    tfmi_little(memcpy(piece, from, some), some, width);
    tfmi_out_bytes(o, piece, some);
    from += some;
    n -= some;
  }
  tfmi_out_bytes(o, from, n);
}

static TFMI_PRINTF(2, 3) void tfmi_out_text(tfmi_out *o, const char *format, ...) {
  char text[512];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  tfmi_out_bytes(o, text, strlen(text));
}

static void tfmi_out_number_le(tfmi_out *o, uint64_t value, int bytes) {
  uint8_t le[8];
  int i;
  for (i = 0; i < bytes; i++) le[i] = (uint8_t)(value >> 8 * i);
  tfmi_out_bytes(o, le, (size_t)bytes);
}

/* A file is written under a temporary name and takes its own when it is whole: it is there whole,
   or as it was. Begin, write, commit. */
static tfm_status tfmi_out_begin(tfmi_out *o, const char *path) {
  int n;
  memset(o, 0, sizeof *o);
  n = snprintf(o->temporary, sizeof o->temporary, "%s.part", path);
  if (n < 0 || (size_t)n >= sizeof o->temporary)
    return tfmi_report(TFM_E_ARG, "the name of a file to write is longer than 1000 bytes");
  o->fd = open(o->temporary, TFMI_OPEN_WRITE, 0666);
  if (o->fd >= 0) return TFM_OK;
  return tfmi_report(TFM_E_IO, "%s cannot be created; does the folder exist?", path);
}

/* The last `keep` files of a name: path, path.1, ... Each keeps its name until it has the next. */
static void tfmi_out_rotate(const char *path, int32_t keep) {
  char from[1040], to[1040];
  int32_t i;
  for (i = keep - 1; i >= 1; i--) {
    snprintf(to, sizeof to, "%s.%d", path, (int)i);
    snprintf(from, sizeof from, "%s.%d", path, (int)i - 1);
    if (i > 1) tfmi_rename(from, to);
    else if ((unlink(to) != 0 && errno != ENOENT) || !tfmi_link(path, to)) return;
  }
}

static tfm_status tfmi_out_commit(tfmi_out *o, const char *path, int32_t keep) {
  tfmi_out_flush(o);
  if (!tfmi_sync(o->fd)) o->failed = true;
  if (close(o->fd) != 0) o->failed = true;
  if (!o->failed) tfmi_out_rotate(path, keep);
  if (!o->failed && tfmi_rename(o->temporary, path)) {
    tfmi_sync_folder(path);
    return TFM_OK;
  }
  unlink(o->temporary);
  return tfmi_report(TFM_E_IO, "%s cannot be written to its end; is the disk full?", path);
}

/* Instead of a commit: as if it had never begun. */
static void tfmi_out_drop(tfmi_out *o) {
  close(o->fd);
  unlink(o->temporary);
}

typedef void (*tfmi_writer)(void *context, tfmi_out *o);

static tfm_status tfmi_out_file(const char *path, tfmi_writer writer, void *context) {
  tfmi_out o;
  tfm_status status = tfmi_out_begin(&o, path);
  if (status != TFM_OK) return status;
  writer(context, &o);
  return tfmi_out_commit(&o, path, 1);
}

static double tfmi_seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- stb_ds, privately ---- Dynamic arrays of the load phase: stbds_arrput and friends, on
   scratch memory of the current load (tfmi_stb_load, a thread-local), so that they go when
   the load ends and failure jumps. Its hash maps are not used: they share a seed between threads.
   The include is hidden from the application, which may use stb_ds too, before or after us: other
   names, its guard restored. */

static TFMI_THREAD tfmi_load *tfmi_stb_load; /* set for the duration of a load only */

static void *tfmi_stb_realloc(void *p, size_t bytes) {
  return tfmi_ring_realloc(tfmi_stb_load, &tfmi_stb_load->scratch, p, bytes);
}
static void tfmi_stb_free(void *p) { tfmi_release(tfmi_stb_load, p); }
#pragma push_macro("STBDS_REALLOC")
#pragma push_macro("STBDS_FREE")
#pragma push_macro("STBDS_ASSERT")
#pragma push_macro("STBDS_ASSERT_WAS_UNDEFINED")
#pragma push_macro("STBDS_NO_SHORT_NAMES")
#pragma push_macro("STB_DS_IMPLEMENTATION")
#pragma push_macro("STBDS_UNIT_TESTS")
#undef STBDS_REALLOC
#undef STBDS_FREE
#undef STBDS_ASSERT
#undef STBDS_ASSERT_WAS_UNDEFINED
#undef STBDS_NO_SHORT_NAMES
#undef STB_DS_IMPLEMENTATION
#undef STBDS_UNIT_TESTS
#define STBDS_REALLOC(context, p, bytes) tfmi_stb_realloc(p, bytes)
#define STBDS_FREE(context, p) tfmi_stb_free(p)
#define STBDS_NO_SHORT_NAMES
#define STB_DS_IMPLEMENTATION
#define stbds_rand_seed tfmi_stbds_rand_seed
#define stbds_hash_bytes tfmi_stbds_hash_bytes
#define stbds_hash_string tfmi_stbds_hash_string
#define stbds_string_arena tfmi_stbds_string_arena
#define stbds_stralloc tfmi_stbds_stralloc
#define stbds_strreset tfmi_stbds_strreset
#define stbds_unit_tests tfmi_stbds_unit_tests
#define stbds_arrgrowf tfmi_stbds_arrgrowf
#define stbds_arrfreef tfmi_stbds_arrfreef
#define stbds_hmfree_func tfmi_stbds_hmfree_func
#define stbds_hmget_key tfmi_stbds_hmget_key
#define stbds_hmget_key_ts tfmi_stbds_hmget_key_ts
#define stbds_hmput_default tfmi_stbds_hmput_default
#define stbds_hmput_key tfmi_stbds_hmput_key
#define stbds_hmdel_key tfmi_stbds_hmdel_key
#define stbds_shmode_func tfmi_stbds_shmode_func
#define stbds_array_header tfmi_stbds_array_header
#define stbds_string_block tfmi_stbds_string_block
#define stbds_hash_index tfmi_stbds_hash_index
#define stbds_hash_bucket tfmi_stbds_hash_bucket
#define stbds_hash_seed tfmi_stbds_hash_seed
#define stbds_probe_position tfmi_stbds_probe_position
#define stbds_log2 tfmi_stbds_log2
#define stbds_make_hash_index tfmi_stbds_make_hash_index
#define stbds_siphash_bytes tfmi_stbds_siphash_bytes
#define stbds_is_key_equal tfmi_stbds_is_key_equal
#define stbds_hm_find_slot tfmi_stbds_hm_find_slot
#define stbds_strdup tfmi_stbds_strdup
#define STBDS_SH_NONE TFMI_STBDS_SH_NONE
#define STBDS_SH_DEFAULT TFMI_STBDS_SH_DEFAULT
#define STBDS_SH_STRDUP TFMI_STBDS_SH_STRDUP
#define STBDS_SH_ARENA TFMI_STBDS_SH_ARENA
#ifdef __cplusplus /* in C these are macros of stb_ds itself */
#define stbds_arrgrowf_wrapper tfmi_stbds_arrgrowf_wrapper
#define stbds_hmget_key_wrapper tfmi_stbds_hmget_key_wrapper
#define stbds_hmget_key_ts_wrapper tfmi_stbds_hmget_key_ts_wrapper
#define stbds_hmput_default_wrapper tfmi_stbds_hmput_default_wrapper
#define stbds_hmput_key_wrapper tfmi_stbds_hmput_key_wrapper
#define stbds_hmdel_key_wrapper tfmi_stbds_hmdel_key_wrapper
#define stbds_shmode_func_wrapper tfmi_stbds_shmode_func_wrapper
#endif
#ifdef INCLUDE_STB_DS_H
#define TFMI_STB_WAS_INCLUDED
#undef INCLUDE_STB_DS_H
#endif
#if defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wconversion"
#pragma GCC diagnostic ignored "-Wsign-conversion"
#pragma GCC diagnostic ignored "-Wshadow"
#pragma GCC diagnostic ignored "-Wsign-compare"
#pragma GCC diagnostic ignored "-Wunused-function"
#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC diagnostic ignored "-Wimplicit-fallthrough"
#pragma GCC diagnostic ignored "-Wpedantic"
#endif
#if defined(__has_include)
#if __has_include("stb_ds.h")
#include "stb_ds.h"
#elif __has_include(<stb/stb_ds.h>)
#include <stb/stb_ds.h>
#else
#error "transformer.h needs stb_ds.h on the include path (Debian: apt-get install libstb-dev)"
#endif
#else
#include "stb_ds.h"
#endif
#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif
#ifndef TFMI_STB_WAS_INCLUDED
#undef INCLUDE_STB_DS_H /* the application's own include, if one follows, is not skipped */
#endif
#undef TFMI_STB_WAS_INCLUDED

/* ---- 16-bit floats ---- */

static uint32_t tfmi_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static float tfmi_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static float tfmi_from_f16(uint16_t h) { /* exact */
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, bits,
           mantissa = h & 0x3ff;
  if (exponent == 0) { /* zero or subnormal: mantissa * 2^-24 */
    float value = (float)mantissa * (1.0f / 16777216.0f);
    return sign ? -value : value;
  }
  bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
  return tfmi_from_bits(bits);
}

static uint16_t tfmi_to_f16(float value) { /* round to nearest, ties to even */
  uint32_t bits = tfmi_bits(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00); /* NaN */
  if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* 65520 and above */
  if (magnitude < 0x38800000) /* subnormal: adding 0.5 aligns the last bit kept with 2^-24 */
    return (uint16_t)(sign | (tfmi_bits(tfmi_from_bits(magnitude) + 0.5f) - 0x3f000000));
  magnitude += 0xfff + (magnitude >> 13 & 1);
  return (uint16_t)(sign | ((magnitude - 0x38000000) >> 13));
}

static float tfmi_from_bf16(uint16_t h) {
  return tfmi_from_bits((uint32_t)h << 16);
}

static uint16_t tfmi_to_bf16(float value) {
  const uint32_t bits = tfmi_bits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* ---- Types ---- */

static const struct tfmi_type_row {
  const char *name;
  int16_t block_values, block_bytes; /* 0: no such thing */
} tfmi_types[TFM_TYPE_COUNT] = {
  {"default", 0, 0}, {"F32", 1, 4},     {"F16", 1, 2},      {"BF16", 1, 2},     {"Q8_0", 32, 34},
  {"Q4_0", 32, 18},  {"Q4_1", 32, 20},  {"Q5_0", 32, 22},   {"Q5_1", 32, 24},   {"Q4_K", 256, 144},
  {"Q5_K", 256, 176}, {"Q6_K", 256, 210}, {"F8_E4M3", 1, 1}, {"F8_E5M2", 1, 1},
};

TFM_API const char *tfm_type_name(tfm_type type) {
  return (int)type < 0 || type >= TFM_TYPE_COUNT ? "?" : tfmi_types[type].name;
}

static bool tfmi_is_f8(tfm_type type) { return type == TFM_F8_E4M3 || type == TFM_F8_E5M2; }

/* Bytes of what has the machine's order in memory; those of blocks have the file's. */
static size_t tfmi_word_bytes(tfm_type type) {
  return tfmi_types[type].block_values == 1 ? (size_t)tfmi_types[type].block_bytes : 1;
}

/* Bytes of n values, which must fill whole blocks; SIZE_MAX / 2 at most, false otherwise. */
static bool tfmi_type_bytes(tfm_type type, uint64_t n, size_t *bytes) {
  const struct tfmi_type_row *row = &tfmi_types[type];
  if (!row->block_values || n % (uint64_t)row->block_values) return false;
  return tfmi_bytes(n / (uint64_t)row->block_values, (uint64_t)row->block_bytes, bytes);
}

/* ---- Random numbers by counter: Philox 4x32-10 (Salmon et al. 2011) ---- */

typedef struct tfmi_random { uint32_t word[4]; } tfmi_random;

static tfmi_random tfmi_philox(uint64_t key, uint64_t low, uint64_t high) {
  uint32_t c[4] = {(uint32_t)low, (uint32_t)(low >> 32), (uint32_t)high, (uint32_t)(high >> 32)};
  uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
  tfmi_random r;
  int round;
  for (round = 0; round < 10; round++) {
    uint64_t a = (uint64_t)0xD2511F53u * c[0], b = (uint64_t)0xCD9E8D57u * c[2];
    c[0] = (uint32_t)(b >> 32) ^ c[1] ^ k0;
    c[1] = (uint32_t)b;
    c[2] = (uint32_t)(a >> 32) ^ c[3] ^ k1;
    c[3] = (uint32_t)a;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  memcpy(r.word, c, sizeof r.word);
  return r;
}

/* The number that chooses a token: in [0, 1), 24 bits. */
static float tfmi_uniform(uint64_t seed, uint64_t sequence, uint64_t position) {
  return (float)(tfmi_philox(seed, position, sequence).word[0] >> 8) * (1.0f / 16777216.0f);
}

/* =================================================================================================
   >>objects   what the sections below share
   ============================================================================================== */

typedef enum tfmi_rope_kind {
  TFMI_ROPE_DEFAULT, TFMI_ROPE_LINEAR, TFMI_ROPE_DYNAMIC, TFMI_ROPE_LLAMA3, TFMI_ROPE_YARN,
  TFMI_ROPE_LONG
} tfmi_rope_kind;

enum { TFMI_ROPE_PIECE = 128 }; /* frequencies made at a time */

typedef struct tfmi_rotation { /* what the frequencies are computed from */
  tfmi_rope_kind kind;
  double theta, factor;
  double low, high;        /* llama3's factors; yarn's turns over the original context */
  double original;         /* context that scaling starts from */
  double scale;            /* of cosines and sines */
  int32_t rot;             /* 0: no rotation */
  int32_t trained;         /* positions, before dynamic scaling */
  bool truncate;           /* yarn's range is of whole pairs */
  const float *divisor[2]; /* [rot/2] of frequencies: up to the original context, beyond; or NULL */
} tfmi_rotation;

struct tfm_model {
  tfmi_heap heap;
  tfmi_block kept;    /* ring of everything the load kept */
  tfm_dev dev;        /* holds the weights */
  tfm_net net;        /* what the forward pass reads */
  const char *family, *format;
  tfm_type weights;   /* type of most weight bytes */
  bool tied;
  tfmi_rotation rotation[2]; /* of full attention, of windows */
  double balance;     /* weight of the experts' balance in training, as the model's files say */
  int32_t bos;        /* -1: none */
  int32_t end[16], end_count;
  uint64_t parameters, token_bytes, mapped_bytes;
  int32_t converted;  /* matrices that got another type; their bytes in the file, and now */
  uint64_t converted_from, converted_to;
  tfmi_file *files;   /* that the weights lie in */
  int32_t file_count;
  tfmi_file text;     /* a config.json, open only while it is copied */
  void *device;       /* the one block of the device's memory */
  size_t device_bytes;
};

/* >>formats: what a file of weights begins with. */
static bool tfmi_is_safetensors(const uint8_t *data, size_t bytes);
static bool tfmi_is_llama2(const uint8_t *data, size_t bytes);

/* >>device: opens `which` (or what AUTO finds) with its pool; the pool's memory comes from heap. */
static tfm_status tfmi_dev_open(tfm_dev *d, tfmi_heap *heap, tfm_device which, int32_t index,
                                int32_t threads, const char *override, bool no_fallback);
static void tfmi_dev_close(tfm_dev *d, tfmi_heap *heap);
static tfm_status tfmi_pool_open(tfm_dev *d, tfmi_heap *heap, int32_t threads); /* only threads */
static void tfmi_pool_close(tfm_dev *d, tfmi_heap *heap);
static int32_t tfmi_cores(void);
/* The name of an entry that models with experts need and the table has not; NULL: it has all. */
static const char *tfmi_experts_missing(const tfm_backend *table);

/* >>kernels: y[i] = x[i] from type to type, n values that fill whole blocks, at any alignment. */
static void tfmi_convert(tfm_type to, uint8_t *y, tfm_type from, const uint8_t *x, int32_t n);

/* The entry of the device's table, or the reference's where the model was loaded with .override:
   all calls of the forward pass read TFMI_OP(d, norm)(d, ...). */
#define TFMI_ENTRY_BIT(entry) (UINT64_C(1) << (offsetof(tfm_backend, entry) / sizeof(void *)))
#define TFMI_OP(d, entry)                                                      \
  (*((d)->override_mask & TFMI_ENTRY_BIT(entry) ? tfmi_reference_for(d)->entry \
                                                : (d)->table->entry))

/* Waits in the middle of a pass; a failure stays in the device for the sync at its end. */
static bool tfmi_dev_wait(tfm_dev *d) {
  tfm_status status = d->table->sync(d);
  if (status != TFM_OK) d->status = status;
  return status == TFM_OK;
}

/* What follows is work of this kind, for tfm_stats. */
static void tfmi_mark(tfm_dev *d, tfm_work kind) {
  tfm_usage *u = &d->usage;
  double now;
  if (d->table->mark) {
    d->table->mark(d, kind);
    return;
  }
  now = tfmi_seconds();
  if (u->now != TFM_WORK_NONE) u->seconds[u->now] += now - u->since;
  u->now = kind;
  u->since = now;
}

/* The reference's table, once the device has finished what it reads. */
static const tfm_backend *tfmi_reference_for(tfm_dev *d) {
  tfmi_dev_wait(d);
  return tfm_backend_ref();
}

/* The override mask, and a uint64_t's bits, hold all entries. */
typedef char tfmi_entries_fit[sizeof(tfm_backend) / sizeof(void *) <= 64 ? 1 : -1];

/* =================================================================================================
   >>unicode   UTF-8, and the classes of characters that splitting patterns tell apart
   =================================================================================================

   The patterns know letters (\p{L}), numbers (\p{N}), white space (\s) and the rest, to which marks
   (\p{M}) belong. The table is what Hugging Face's tokenizers 0.23 answer for each code point
   (Unicode 16.0), asked by tests/make_unicode.py: each entry is the code point from which a class
   holds, times four, plus the class.

   Text is read by tfmi_rune_at, which never fails: bytes that form no character come back as the
   "maximal subpart" for which Unicode (chapter 3.9) recommends one U+FFFD. */

typedef enum tfmi_class { TFMI_OTHER, TFMI_LETTER, TFMI_NUMBER, TFMI_SPACE } tfmi_class;

/* ---- tables by tests/make_unicode.py ---- */
static const uint32_t tfmi_class_starts[] = {
  0x0, 0x27, 0x38, 0x83, 0x84, 0xc2, 0xe8, 0x105, 0x16c, 0x185, 0x1ec, 0x217, 0x218, 0x283, 0x284,
  0x2a9, 0x2ac, 0x2ca, 0x2d0, 0x2d5, 0x2d8, 0x2e6, 0x2e9, 0x2ec, 0x2f2, 0x2fc, 0x301, 0x35c, 0x361,
  0x3dc, 0x3e1, 0xb08, 0xb19, 0xb48, 0xb81, 0xb94, 0xbb1, 0xbb4, 0xbb9, 0xbbc, 0xdc1, 0xdd4, 0xdd9,
  0xde0, 0xde9, 0xdf8, 0xdfd, 0xe00, 0xe19, 0xe1c, 0xe21, 0xe2c, 0xe31, 0xe34, 0xe39, 0xe88, 0xe8d,
  0xfd8, 0xfdd, 0x1208, 0x1229, 0x14c0, 0x14c5, 0x155c, 0x1565, 0x1568, 0x1581, 0x1624, 0x1741,
  0x17ac, 0x17bd, 0x17cc, 0x1881, 0x192c, 0x1982, 0x19a8, 0x19b9, 0x19c0, 0x19c5, 0x1b50, 0x1b55,
  0x1b58, 0x1b95, 0x1b9c, 0x1bb9, 0x1bc2, 0x1be9, 0x1bf4, 0x1bfd, 0x1c00, 0x1c41, 0x1c44, 0x1c49,
  0x1cc0, 0x1d35, 0x1e98, 0x1ec5, 0x1ec8, 0x1f02, 0x1f29, 0x1fac, 0x1fd1, 0x1fd8, 0x1fe9, 0x1fec,
  0x2001, 0x2058, 0x2069, 0x206c, 0x2091, 0x2094, 0x20a1, 0x20a4, 0x2101, 0x2164, 0x2181, 0x21ac,
  0x21c1, 0x2220, 0x2225, 0x223c, 0x2281, 0x2328, 0x2411, 0x24e8, 0x24f5, 0x24f8, 0x2541, 0x2544,
  0x2561, 0x2588, 0x259a, 0x25c0, 0x25c5, 0x2604, 0x2615, 0x2634, 0x263d, 0x2644, 0x264d, 0x26a4,
  0x26a9, 0x26c4, 0x26c9, 0x26cc, 0x26d9, 0x26e8, 0x26f5, 0x26f8, 0x2739, 0x273c, 0x2771, 0x2778,
  0x277d, 0x2788, 0x279a, 0x27c1, 0x27c8, 0x27d2, 0x27e8, 0x27f1, 0x27f4, 0x2815, 0x282c, 0x283d,
  0x2844, 0x284d, 0x28a4, 0x28a9, 0x28c4, 0x28c9, 0x28d0, 0x28d5, 0x28dc, 0x28e1, 0x28e8, 0x2965,
  0x2974, 0x2979, 0x297c, 0x299a, 0x29c0, 0x29c9, 0x29d4, 0x2a15, 0x2a38, 0x2a3d, 0x2a48, 0x2a4d,
  0x2aa4, 0x2aa9, 0x2ac4, 0x2ac9, 0x2ad0, 0x2ad5, 0x2ae8, 0x2af5, 0x2af8, 0x2b41, 0x2b44, 0x2b81,
  0x2b88, 0x2b9a, 0x2bc0, 0x2be5, 0x2be8, 0x2c15, 0x2c34, 0x2c3d, 0x2c44, 0x2c4d, 0x2ca4, 0x2ca9,
  0x2cc4, 0x2cc9, 0x2cd0, 0x2cd5, 0x2ce8, 0x2cf5, 0x2cf8, 0x2d71, 0x2d78, 0x2d7d, 0x2d88, 0x2d9a,
  0x2dc0, 0x2dc5, 0x2dca, 0x2de0, 0x2e0d, 0x2e10, 0x2e15, 0x2e2c, 0x2e39, 0x2e44, 0x2e49, 0x2e58,
  0x2e65, 0x2e6c, 0x2e71, 0x2e74, 0x2e79, 0x2e80, 0x2e8d, 0x2e94, 0x2ea1, 0x2eac, 0x2eb9, 0x2ee8,
  0x2f41, 0x2f44, 0x2f9a, 0x2fcc, 0x3015, 0x3034, 0x3039, 0x3044, 0x3049, 0x30a4, 0x30a9, 0x30e8,
  0x30f5, 0x30f8, 0x3161, 0x316c, 0x3175, 0x3178, 0x3181, 0x3188, 0x319a, 0x31c0, 0x31e2, 0x31fc,
  0x3201, 0x3204, 0x3215, 0x3234, 0x3239, 0x3244, 0x3249, 0x32a4, 0x32a9, 0x32d0, 0x32d5, 0x32e8,
  0x32f5, 0x32f8, 0x3375, 0x337c, 0x3381, 0x3388, 0x339a, 0x33c0, 0x33c5, 0x33cc, 0x3411, 0x3434,
  0x3439, 0x3444, 0x3449, 0x34ec, 0x34f5, 0x34f8, 0x3539, 0x353c, 0x3551, 0x355c, 0x3562, 0x357d,
  0x3588, 0x359a, 0x35e4, 0x35e9, 0x3600, 0x3615, 0x365c, 0x3669, 0x36c8, 0x36cd, 0x36f0, 0x36f5,
  0x36f8, 0x3701, 0x371c, 0x379a, 0x37c0, 0x3805, 0x38c4, 0x38c9, 0x38d0, 0x3901, 0x391c, 0x3942,
  0x3968, 0x3a05, 0x3a0c, 0x3a11, 0x3a14, 0x3a19, 0x3a2c, 0x3a31, 0x3a90, 0x3a95, 0x3a98, 0x3a9d,
  0x3ac4, 0x3ac9, 0x3ad0, 0x3af5, 0x3af8, 0x3b01, 0x3b14, 0x3b19, 0x3b1c, 0x3b42, 0x3b68, 0x3b71,
  0x3b80, 0x3c01, 0x3c04, 0x3c82, 0x3cd0, 0x3d01, 0x3d20, 0x3d25, 0x3db4, 0x3e21, 0x3e34, 0x4001,
  0x40ac, 0x40fd, 0x4102, 0x4128, 0x4141, 0x4158, 0x4169, 0x4178, 0x4185, 0x4188, 0x4195, 0x419c,
  0x41b9, 0x41c4, 0x41d5, 0x4208, 0x4239, 0x423c, 0x4242, 0x4268, 0x4281, 0x4318, 0x431d, 0x4320,
  0x4335, 0x4338, 0x4341, 0x43ec, 0x43f1, 0x4924, 0x4929, 0x4938, 0x4941, 0x495c, 0x4961, 0x4964,
  0x4969, 0x4978, 0x4981, 0x4a24, 0x4a29, 0x4a38, 0x4a41, 0x4ac4, 0x4ac9, 0x4ad8, 0x4ae1, 0x4afc,
  0x4b01, 0x4b04, 0x4b09, 0x4b18, 0x4b21, 0x4b5c, 0x4b61, 0x4c44, 0x4c49, 0x4c58, 0x4c61, 0x4d6c,
  0x4da6, 0x4df4, 0x4e01, 0x4e40, 0x4e81, 0x4fd8, 0x4fe1, 0x4ff8, 0x5005, 0x59b4, 0x59bd, 0x5a03,
  0x5a05, 0x5a6c, 0x5a81, 0x5bac, 0x5bba, 0x5bc5, 0x5be4, 0x5c01, 0x5c48, 0x5c7d, 0x5cc8, 0x5d01,
  0x5d48, 0x5d81, 0x5db4, 0x5db9, 0x5dc4, 0x5e01, 0x5ed0, 0x5f5d, 0x5f60, 0x5f71, 0x5f74, 0x5f82,
  0x5fa8, 0x5fc2, 0x5fe8, 0x6042, 0x6068, 0x6081, 0x61e4, 0x6201, 0x6214, 0x621d, 0x62a4, 0x62a9,
  0x62ac, 0x62c1, 0x63d8, 0x6401, 0x647c, 0x651a, 0x6541, 0x65b8, 0x65c1, 0x65d4, 0x6601, 0x66b0,
  0x66c1, 0x6728, 0x6742, 0x676c, 0x6801, 0x685c, 0x6881, 0x6954, 0x6a02, 0x6a28, 0x6a42, 0x6a68,
  0x6a9d, 0x6aa0, 0x6c15, 0x6cd0, 0x6d15, 0x6d34, 0x6d42, 0x6d68, 0x6e0d, 0x6e84, 0x6eb9, 0x6ec2,
  0x6ee9, 0x6f98, 0x7001, 0x7090, 0x7102, 0x7128, 0x7135, 0x7142, 0x7169, 0x71f8, 0x7201, 0x722c,
  0x7241, 0x72ec, 0x72f5, 0x7300, 0x73a5, 0x73b4, 0x73b9, 0x73d0, 0x73d5, 0x73dc, 0x73e9, 0x73ec,
  0x7401, 0x7700, 0x7801, 0x7c58, 0x7c61, 0x7c78, 0x7c81, 0x7d18, 0x7d21, 0x7d38, 0x7d41, 0x7d60,
  0x7d65, 0x7d68, 0x7d6d, 0x7d70, 0x7d75, 0x7d78, 0x7d7d, 0x7df8, 0x7e01, 0x7ed4, 0x7ed9, 0x7ef4,
  0x7ef9, 0x7efc, 0x7f09, 0x7f14, 0x7f19, 0x7f34, 0x7f41, 0x7f50, 0x7f59, 0x7f70, 0x7f81, 0x7fb4,
  0x7fc9, 0x7fd4, 0x7fd9, 0x7ff4, 0x8003, 0x802c, 0x80a3, 0x80a8, 0x80bf, 0x80c0, 0x817f, 0x8180,
  0x81c2, 0x81c5, 0x81c8, 0x81d2, 0x81e8, 0x81fd, 0x8202, 0x8228, 0x8241, 0x8274, 0x8409, 0x840c,
  0x841d, 0x8420, 0x8429, 0x8450, 0x8455, 0x8458, 0x8465, 0x8478, 0x8491, 0x8494, 0x8499, 0x849c,
  0x84a1, 0x84a4, 0x84a9, 0x84b8, 0x84bd, 0x84e8, 0x84f1, 0x8500, 0x8515, 0x8528, 0x8539, 0x853c,
  0x8542, 0x860d, 0x8616, 0x8628, 0x9182, 0x9270, 0x93aa, 0x9400, 0x9dda, 0x9e50, 0xb001, 0xb394,
  0xb3ad, 0xb3bc, 0xb3c9, 0xb3d0, 0xb3f6, 0xb3f8, 0xb401, 0xb498, 0xb49d, 0xb4a0, 0xb4b5, 0xb4b8,
  0xb4c1, 0xb5a0, 0xb5bd, 0xb5c0, 0xb601, 0xb65c, 0xb681, 0xb69c, 0xb6a1, 0xb6bc, 0xb6c1, 0xb6dc,
  0xb6e1, 0xb6fc, 0xb701, 0xb71c, 0xb721, 0xb73c, 0xb741, 0xb75c, 0xb761, 0xb77c, 0xb8bd, 0xb8c0,
  0xc003, 0xc004, 0xc015, 0xc01e, 0xc020, 0xc086, 0xc0a8, 0xc0c5, 0xc0d8, 0xc0e2, 0xc0ed, 0xc0f4,
  0xc105, 0xc25c, 0xc275, 0xc280, 0xc285, 0xc3ec, 0xc3f1, 0xc400, 0xc415, 0xc4c0, 0xc4c5, 0xc63c,
  0xc64a, 0xc658, 0xc681, 0xc700, 0xc7c1, 0xc800, 0xc882, 0xc8a8, 0xc922, 0xc940, 0xc946, 0xc980,
  0xca02, 0xca28, 0xcac6, 0xcb00, 0xd001, 0x13700, 0x13801, 0x29234, 0x29341, 0x293f8, 0x29401,
  0x29834, 0x29841, 0x29882, 0x298a9, 0x298b0, 0x29901, 0x299bc, 0x299fd, 0x29a78, 0x29a81, 0x29b9a,
  0x29bc0, 0x29c5d, 0x29c80, 0x29c89, 0x29e24, 0x29e2d, 0x29f38, 0x29f41, 0x29f48, 0x29f4d, 0x29f50,
  0x29f55, 0x29f74, 0x29fc9, 0x2a008, 0x2a00d, 0x2a018, 0x2a01d, 0x2a02c, 0x2a031, 0x2a08c, 0x2a0c2,
  0x2a0d8, 0x2a101, 0x2a1d0, 0x2a209, 0x2a2d0, 0x2a342, 0x2a368, 0x2a3c9, 0x2a3e0, 0x2a3ed, 0x2a3f0,
  0x2a3f5, 0x2a3fc, 0x2a402, 0x2a429, 0x2a498, 0x2a4c1, 0x2a51c, 0x2a581, 0x2a5f4, 0x2a611, 0x2a6cc,
  0x2a73d, 0x2a742, 0x2a768, 0x2a781, 0x2a794, 0x2a799, 0x2a7c2, 0x2a7e9, 0x2a7fc, 0x2a801, 0x2a8a4,
  0x2a901, 0x2a90c, 0x2a911, 0x2a930, 0x2a942, 0x2a968, 0x2a981, 0x2a9dc, 0x2a9e9, 0x2a9ec, 0x2a9f9,
  0x2aac0, 0x2aac5, 0x2aac8, 0x2aad5, 0x2aadc, 0x2aae5, 0x2aaf8, 0x2ab01, 0x2ab04, 0x2ab09, 0x2ab0c,
  0x2ab6d, 0x2ab78, 0x2ab81, 0x2abac, 0x2abc9, 0x2abd4, 0x2ac05, 0x2ac1c, 0x2ac25, 0x2ac3c, 0x2ac45,
  0x2ac5c, 0x2ac81, 0x2ac9c, 0x2aca1, 0x2acbc, 0x2acc1, 0x2ad6c, 0x2ad71, 0x2ada8, 0x2adc1, 0x2af8c,
  0x2afc2, 0x2afe8, 0x2b001, 0x35e90, 0x35ec1, 0x35f1c, 0x35f2d, 0x35ff0, 0x3e401, 0x3e9b8, 0x3e9c1,
  0x3eb68, 0x3ec01, 0x3ec1c, 0x3ec4d, 0x3ec60, 0x3ec75, 0x3ec78, 0x3ec7d, 0x3eca4, 0x3eca9, 0x3ecdc,
  0x3ece1, 0x3ecf4, 0x3ecf9, 0x3ecfc, 0x3ed01, 0x3ed08, 0x3ed0d, 0x3ed14, 0x3ed19, 0x3eec8, 0x3ef4d,
  0x3f4f8, 0x3f541, 0x3f640, 0x3f649, 0x3f720, 0x3f7c1, 0x3f7f0, 0x3f9c1, 0x3f9d4, 0x3f9d9, 0x3fbf4,
  0x3fc42, 0x3fc68, 0x3fc85, 0x3fcec, 0x3fd05, 0x3fd6c, 0x3fd99, 0x3fefc, 0x3ff09, 0x3ff20, 0x3ff29,
  0x3ff40, 0x3ff49, 0x3ff60, 0x3ff69, 0x3ff74, 0x40001, 0x40030, 0x40035, 0x4009c, 0x400a1, 0x400ec,
  0x400f1, 0x400f8, 0x400fd, 0x40138, 0x40141, 0x40178, 0x40201, 0x403ec, 0x4041e, 0x404d0, 0x40502,
  0x405e4, 0x4062a, 0x40630, 0x40a01, 0x40a74, 0x40a81, 0x40b44, 0x40b86, 0x40bf0, 0x40c01, 0x40c82,
  0x40c90, 0x40cb5, 0x40d06, 0x40d09, 0x40d2a, 0x40d2c, 0x40d41, 0x40dd8, 0x40e01, 0x40e78, 0x40e81,
  0x40f10, 0x40f21, 0x40f40, 0x40f46, 0x40f58, 0x41001, 0x41278, 0x41282, 0x412a8, 0x412c1, 0x41350,
  0x41361, 0x413f0, 0x41401, 0x414a0, 0x414c1, 0x41590, 0x415c1, 0x415ec, 0x415f1, 0x4162c, 0x41631,
  0x4164c, 0x41651, 0x41658, 0x4165d, 0x41688, 0x4168d, 0x416c8, 0x416cd, 0x416e8, 0x416ed, 0x416f4,
  0x41701, 0x417d0, 0x41801, 0x41cdc, 0x41d01, 0x41d58, 0x41d81, 0x41da0, 0x41e01, 0x41e18, 0x41e1d,
  0x41ec4, 0x41ec9, 0x41eec, 0x42001, 0x42018, 0x42021, 0x42024, 0x42029, 0x420d8, 0x420dd, 0x420e4,
  0x420f1, 0x420f4, 0x420fd, 0x42158, 0x42162, 0x42181, 0x421dc, 0x421e6, 0x42201, 0x4227c, 0x4229e,
  0x422c0, 0x42381, 0x423cc, 0x423d1, 0x423d8, 0x423ee, 0x42401, 0x4245a, 0x42470, 0x42481, 0x424e8,
  0x42601, 0x426e0, 0x426f2, 0x426f9, 0x42702, 0x42740, 0x4274a, 0x42801, 0x42804, 0x42841, 0x42850,
  0x42855, 0x42860, 0x42865, 0x428d8, 0x42902, 0x42924, 0x42981, 0x429f6, 0x429fc, 0x42a01, 0x42a76,
  0x42a80, 0x42b01, 0x42b20, 0x42b25, 0x42b94, 0x42bae, 0x42bc0, 0x42c01, 0x42cd8, 0x42d01, 0x42d58,
  0x42d62, 0x42d81, 0x42dcc, 0x42de2, 0x42e01, 0x42e48, 0x42ea6, 0x42ec0, 0x43001, 0x43124, 0x43201,
  0x432cc, 0x43301, 0x433cc, 0x433ea, 0x43401, 0x43490, 0x434c2, 0x434e8, 0x43502, 0x43529, 0x43598,
  0x435bd, 0x43618, 0x43982, 0x439fc, 0x43a01, 0x43aa8, 0x43ac1, 0x43ac8, 0x43b09, 0x43b14, 0x43c01,
  0x43c76, 0x43c9d, 0x43ca0, 0x43cc1, 0x43d18, 0x43d46, 0x43d54, 0x43dc1, 0x43e08, 0x43ec1, 0x43f16,
  0x43f30, 0x43f81, 0x43fdc, 0x4400d, 0x440e0, 0x4414a, 0x441c0, 0x441c5, 0x441cc, 0x441d5, 0x441d8,
  0x4420d, 0x442c0, 0x44341, 0x443a4, 0x443c2, 0x443e8, 0x4440d, 0x4449c, 0x444da, 0x44500, 0x44511,
  0x44514, 0x4451d, 0x44520, 0x44541, 0x445cc, 0x445d9, 0x445dc, 0x4460d, 0x446cc, 0x44705, 0x44714,
  0x44742, 0x44769, 0x4476c, 0x44771, 0x44774, 0x44786, 0x447d4, 0x44801, 0x44848, 0x4484d, 0x448b0,
  0x448fd, 0x44904, 0x44a01, 0x44a1c, 0x44a21, 0x44a24, 0x44a29, 0x44a38, 0x44a3d, 0x44a78, 0x44a7d,
  0x44aa4, 0x44ac1, 0x44b7c, 0x44bc2, 0x44be8, 0x44c15, 0x44c34, 0x44c3d, 0x44c44, 0x44c4d, 0x44ca4,
  0x44ca9, 0x44cc4, 0x44cc9, 0x44cd0, 0x44cd5, 0x44ce8, 0x44cf5, 0x44cf8, 0x44d41, 0x44d44, 0x44d75,
  0x44d88, 0x44e01, 0x44e28, 0x44e2d, 0x44e30, 0x44e39, 0x44e3c, 0x44e41, 0x44ed8, 0x44edd, 0x44ee0,
  0x44f45, 0x44f48, 0x44f4d, 0x44f50, 0x45001, 0x450d4, 0x4511d, 0x4512c, 0x45142, 0x45168, 0x4517d,
  0x45188, 0x45201, 0x452c0, 0x45311, 0x45318, 0x4531d, 0x45320, 0x45342, 0x45368, 0x45601, 0x456bc,
  0x45761, 0x45770, 0x45801, 0x458c0, 0x45911, 0x45914, 0x45942, 0x45968, 0x45a01, 0x45aac, 0x45ae1,
  0x45ae4, 0x45b02, 0x45b28, 0x45b42, 0x45b90, 0x45c01, 0x45c6c, 0x45cc2, 0x45cf0, 0x45d01, 0x45d1c,
  0x46001, 0x460b0, 0x46281, 0x46382, 0x463cc, 0x463fd, 0x4641c, 0x46425, 0x46428, 0x46431, 0x46450,
  0x46455, 0x4645c, 0x46461, 0x464c0, 0x464fd, 0x46500, 0x46505, 0x46508, 0x46542, 0x46568, 0x46681,
  0x466a0, 0x466a9, 0x46744, 0x46785, 0x46788, 0x4678d, 0x46790, 0x46801, 0x46804, 0x4682d, 0x468cc,
  0x468e9, 0x468ec, 0x46941, 0x46944, 0x46971, 0x46a28, 0x46a75, 0x46a78, 0x46ac1, 0x46be4, 0x46f01,
  0x46f84, 0x46fc2, 0x46fe8, 0x47001, 0x47024, 0x47029, 0x470bc, 0x47101, 0x47104, 0x47142, 0x471b4,
  0x471c9, 0x47240, 0x47401, 0x4741c, 0x47421, 0x47428, 0x4742d, 0x474c4, 0x47519, 0x4751c, 0x47542,
  0x47568, 0x47581, 0x47598, 0x4759d, 0x475a4, 0x475a9, 0x47628, 0x47661, 0x47664, 0x47682, 0x476a8,
  0x47b81, 0x47bcc, 0x47c09, 0x47c0c, 0x47c11, 0x47c44, 0x47c49, 0x47cd0, 0x47d42, 0x47d68, 0x47ec1,
  0x47ec4, 0x47f02, 0x47f54, 0x48001, 0x48e68, 0x49002, 0x491bc, 0x49201, 0x49510, 0x4be41, 0x4bfc4,
  0x4c001, 0x4d0c0, 0x4d105, 0x4d11c, 0x4d181, 0x50fec, 0x51001, 0x5191c, 0x58401, 0x58478, 0x584c2,
  0x584e8, 0x5a001, 0x5a8e4, 0x5a901, 0x5a97c, 0x5a982, 0x5a9a8, 0x5a9c1, 0x5aafc, 0x5ab02, 0x5ab28,
  0x5ab41, 0x5abb8, 0x5ac01, 0x5acc0, 0x5ad01, 0x5ad10, 0x5ad42, 0x5ad68, 0x5ad6e, 0x5ad88, 0x5ad8d,
  0x5ade0, 0x5adf5, 0x5ae40, 0x5b501, 0x5b5b4, 0x5b5c2, 0x5b5e8, 0x5b901, 0x5ba02, 0x5ba5c, 0x5bc01,
  0x5bd2c, 0x5bd41, 0x5bd44, 0x5be4d, 0x5be80, 0x5bf81, 0x5bf88, 0x5bf8d, 0x5bf90, 0x5c001, 0x61fe0,
  0x62001, 0x63358, 0x633fd, 0x63424, 0x6bfc1, 0x6bfd0, 0x6bfd5, 0x6bff0, 0x6bff5, 0x6bffc, 0x6c001,
  0x6c48c, 0x6c4c9, 0x6c4cc, 0x6c541, 0x6c54c, 0x6c555, 0x6c558, 0x6c591, 0x6c5a0, 0x6c5c1, 0x6cbf0,
  0x6f001, 0x6f1ac, 0x6f1c1, 0x6f1f4, 0x6f201, 0x6f224, 0x6f241, 0x6f268, 0x733c2, 0x733e8, 0x74b02,
  0x74b50, 0x74b82, 0x74bd0, 0x74d82, 0x74de4, 0x75001, 0x75154, 0x75159, 0x75274, 0x75279, 0x75280,
  0x75289, 0x7528c, 0x75295, 0x7529c, 0x752a5, 0x752b4, 0x752b9, 0x752e8, 0x752ed, 0x752f0, 0x752f5,
  0x75310, 0x75315, 0x75418, 0x7541d, 0x7542c, 0x75435, 0x75454, 0x75459, 0x75474, 0x75479, 0x754e8,
  0x754ed, 0x754fc, 0x75501, 0x75514, 0x75519, 0x7551c, 0x75529, 0x75544, 0x75549, 0x75a98, 0x75aa1,
  0x75b04, 0x75b09, 0x75b6c, 0x75b71, 0x75bec, 0x75bf1, 0x75c54, 0x75c59, 0x75cd4, 0x75cd9, 0x75d3c,
  0x75d41, 0x75dbc, 0x75dc1, 0x75e24, 0x75e29, 0x75ea4, 0x75ea9, 0x75f0c, 0x75f11, 0x75f30, 0x75f3a,
  0x76000, 0x77c01, 0x77c7c, 0x77c95, 0x77cac, 0x780c1, 0x781b8, 0x78401, 0x784b4, 0x784dd, 0x784f8,
  0x78502, 0x78528, 0x78539, 0x7853c, 0x78a41, 0x78ab8, 0x78b01, 0x78bb0, 0x78bc2, 0x78be8, 0x79341,
  0x793b0, 0x793c2, 0x793e8, 0x79741, 0x797b8, 0x797c1, 0x797c6, 0x797ec, 0x79f81, 0x79f9c, 0x79fa1,
  0x79fb0, 0x79fb5, 0x79fbc, 0x79fc1, 0x79ffc, 0x7a001, 0x7a314, 0x7a31e, 0x7a340, 0x7a401, 0x7a510,
  0x7a52d, 0x7a530, 0x7a542, 0x7a568, 0x7b1c6, 0x7b2b0, 0x7b2b6, 0x7b2c0, 0x7b2c6, 0x7b2d4, 0x7b406,
  0x7b4b8, 0x7b4be, 0x7b4f8, 0x7b801, 0x7b810, 0x7b815, 0x7b880, 0x7b885, 0x7b88c, 0x7b891, 0x7b894,
  0x7b89d, 0x7b8a0, 0x7b8a5, 0x7b8cc, 0x7b8d1, 0x7b8e0, 0x7b8e5, 0x7b8e8, 0x7b8ed, 0x7b8f0, 0x7b909,
  0x7b90c, 0x7b91d, 0x7b920, 0x7b925, 0x7b928, 0x7b92d, 0x7b930, 0x7b935, 0x7b940, 0x7b945, 0x7b94c,
  0x7b951, 0x7b954, 0x7b95d, 0x7b960, 0x7b965, 0x7b968, 0x7b96d, 0x7b970, 0x7b975, 0x7b978, 0x7b97d,
  0x7b980, 0x7b985, 0x7b98c, 0x7b991, 0x7b994, 0x7b99d, 0x7b9ac, 0x7b9b1, 0x7b9cc, 0x7b9d1, 0x7b9e0,
  0x7b9e5, 0x7b9f4, 0x7b9f9, 0x7b9fc, 0x7ba01, 0x7ba28, 0x7ba2d, 0x7ba70, 0x7ba85, 0x7ba90, 0x7ba95,
  0x7baa8, 0x7baad, 0x7baf0, 0x7c402, 0x7c434, 0x7efc2, 0x7efe8, 0x80001, 0xa9b80, 0xa9c01, 0xadce8,
  0xadd01, 0xae078, 0xae081, 0xb3a88, 0xb3ac1, 0xbaf84, 0xbafc1, 0xbb978, 0xbe001, 0xbe878, 0xc0001,
  0xc4d2c, 0xc4d41, 0xc8ec0
};
static const char *const tfmi_packed_category[] = {
  "Y,f*I1Ed)DS+DS*P-S)e)S)J5d)DBDK5CDCDI+EI5ECe*CT)=CD8T*Q)D:S)DA=Cb)CZ3DZ+K4DK,9:9:9:9:9:9:9:9:9",
  ":9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9K)9:9:9:9:9:9:9:9K)9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9",
  ":9:9:9:9:J):9:9[)J):9:J):Z)K)J*:J):Z)[)J):J):9:9:J):9K)9:J):Z):9:J)K)=9[)N*9;:9;:9;:9:9:9:9:9:",
  "9:9:9K)9:9:9:9:9:9:9:9:9K)9;:9:Z):9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9[+J",
  "):J)K)9:J*:9:9:9:9[K)=[5M1T*M.T/^*e+<D<e0Ob)9:9:<D9:I)<[)C9I*T)9CZ)898J):Z08Z,[99K)Z)[)9:9:9:9",
  ":9:9:9:9:9:9:9:9[*9:D9:J)K)ZBKA9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:D`+9:9:9:9:9:9:9:9:9:9:9:9:9:",
  "9:9:9:9:9:9:9:9:9:9:9:9:9:9:J):9:9:9:9:9:9K)9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:",
  "9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:8J;I)<S+[<S)I)e)8`>C>CO)CO)C>I,_5I*N*S)Y0e)S)DS)",
  "T)`-C8d)N8<N-`2P-S*N)>_Z)C=`+8DO+M)O)DO*N)P-_)T)=S/I)=>N7`5I)_U)`-=I/P-_8`,M)Dd)<I)>T)N3O*<`,<",
  "`)<`*I)d/8_4`)I)C8_-Y*N4DN+I,`,_<<O48`8ND`)=O1=`+N-O)S)P-C<_/`)8N,I)N)I)N38_+8=Y)N*I)>=`+I)O)I",
  ")`)=I,>I*N)8_)O)I)P-N)T)Q+T)=C>I)`)8N+I*N)I)N38_+8N)8N)8N)I)>8`*I*O)I)`)Y)>Y+N*8=Y+P-O)_)>CI-`",
  ")8_,8_)8N38_+8N)8_*I)>=O,8`)8`)I)=Y/N)O)I)P-CDY+=O+8`)8N,I)N)I)N38_+8N)8_*I)>=`+I)O)I)`)Y+`)I*",
  "N)8_)O)I)P-D=Q+I->=8N+Y)_)8N*Y)N)8=8N)Y)N)Y)_)Y)N.I*`*Y)`)8O*I)=I+>I/P-b)T,Y*`*N,8_)8_38N0I)>=",
  "`+8`)8O*Y+O)8_)I)=I)N)O)I)P-Y+Cb+D=`)CN,8_)8_38N-8_*I)>=`+8`)8O*Y+O)I+N)8N)O)I)P-8N)>I.O*_,8_)",
  "8_<O)=`+8`)8O*=DI*_)>b+_)O)I)P-b,DN+8`)8N1Y)N48_,8=I)_+Y)>I*O+8>8O,I+P-I)O)CI.NA>N)`+I*DN+<O,C",
  "P-S)Y:N)8=8_*8N48=8N->N)`,=I)_*8<8`+8P-I)N*I8=e)d/DCe)O)T+P-Q-D>D>D>S*O)N,8N:I*O2CO)_*`-8O:8T,",
  ">T+8T)d*T*S)Y:_=O2=P-S+N+O*N*`)=`)N)`+_)O*_.O.=>P-O*T)J;89Y*9I)[=C<[)_M-8N*I)_+8=8N*I)_<8N*I)_",
  "88N*I)_+8=8N*I)_/8_E8N*I)_J)I)`)d,Q2Y)N0T-I+JT)I)K+I)CN`1DC_0EN5S)Y)_N)d)b)N,Y+N1O*Y,_1`)S)Y,N",
  "1O)I._.8_)8O)I.NCO8d)<d)D=>I)P-I+Q-I+d-`)8>P-I+_9<_CY+_*O)N9>=Y*NL)I-_78O.I*O.I*DY)S)P-N7I)_*Y",
  "-N>I*N5I+P-AY)T9_3`*I)S)_CO-8`6I)>P-I+P-I+d+<S+I)`7YA`*_@`0N,8S)P-d+T-`,e,d)`)N7`.N)P-N>O/I,S*",
  "N:O2Y)d*P-Y)_)P-N7M+S)[,9:Y*Z=I)Z)S,I,`)C`2N*>N+>N)`)=Y*K>^H[.<K9^:OI)9:9:9:9:9:9:9:9:9:9:9:9:",
  "9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:",
  "9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9[,9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9",
  ":9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9[,J,K+I)J+I)K,J,K,J,K+I)J+I)K,89898989K,J,K/I)K,L,K,L,K,L,",
  "[*8K)J*;D:e)[)8K)J*;e)K*I)K)J*8e)K,Z*e)I)[)8K)J*;T)8f-Y*S4U)Y*Ed/R)d)Dd.DCBS-EI0A<I)Q+e)S)<Q-e",
  ")S)8^.Y)e8Y/`8Y/T)9T*9T):Z)K)Z):D9e)Z*T+9D9D9DJ*D:J*:N*:T)K)J)e*9K*T*:DbB9:b*T)I*Tf-S*e6S)ei+I",
  "3e-Y2QGTP)Q3T^1S/Q7eAS)e7S-eR.S3eHS*T8S)Te-I)T88e^)JAKA9:Z)K)9:9:9:J*:9K)9K+M)Z):9:9:9:9:9:9:9",
  ":9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9K)T+9:9:`)",
  "9:Y*S*AS)K;8:Y*:I)NEY+<CI/>_3Y,_+8_+8_+8_+8_+8_+8_+8_+8O8d@<S8T)S.I9T58eU)I.TT+I5T0Ed)D<=AS-T)",
  "S.Db,O+C^*T)b)<=CT)8NT)I)O)T)M)=CNV)C^)=Y*_=8NX)8T)Q*T-N8T;Y,DN0e78Q-T7Q,Db/T8Q-e;b/TI-NIP+TI)",
  "_SQ2<_e9Y)eDY,N<M+S)NO,<d)N0P-N)I29:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:=O*CO-C<9:9:9:",
  "9:9:9:9:9:9:9:9:9:9:9:M)O)NL)Q-O)S+I,e3^,T)9:9:9:9:9:9:9[)9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:",
  "9:9:9:9:9:9:9:9:9:9:9:9:9:<K,9:9:J):9:9:9:9:<T)9:9:=9:9[)9:9:9:9:9:9:9:9:9:9:Z*:Z*:9:9:9:9:9:9",
  ":9:J*:9:J):I)9:8:8:9:9:9:9Y2^)9:=M):_+>_)>N*>_3`*T*>Y)Q+T*I+NCS*I,O)NBO1I,S)P-I+O1N+d)=CN)>P-N",
  "6O,S)_3`.Y-C_6Y)O*_@O/d.8<P-I*S)_*><_,P-_*8_<O/Y,_)>N,O)I)P-I)S*N0<N+e)=`)NB>=`)N)O)_*O)=>=I4N",
  ")<S)_-`*S)=M)O)I-N+I)N+I)N+Y,_+8_+8[=DM*[,<T)I*KQ)_9O,CO)I)P-I+N[W-I._3I*_AIKM,Na-I)N_)I;[+I.[",
  "*Y*=>N-D_.8_*8=8N)8N)8N`)e0I0__-S)T0NI)I)NDY+DI8N.T*O0S-I+O0d)R)S4c)d)8S/DCe)8CDS)I*_*8_L*I*d)",
  "DS+DS*P-S)e)S)J5d)DBDK5CDCDd+N-<_>M)_7Y)N+I)N+I)N+I)_)Y)e+8e+Y.T)I)N.8N58_18N)8_/I)N/I9_g)Y*d)",
  "I*b>Y)e,bEe0Q)e)8e.Y)DY@e>>IJ*_6Y)_AY/>b5I*N8Q*Y,N2AN,AY*N;`*Y*N78CN:I*N,Cb*I=J<K<NP)I)P-I+J:I",
  "*K:I*N<I,NCY-CZ-8Z/8Z+8J)8[-8[/8[+8K)Y)NCI._e,Y,N3I-N,I4M+8M=8^,YK)N+I)=8N>8N)Y)=I)_38CQ,_3T)b",
  "+_7I,b,IA_18N)Y*b*N3Q+Y)CN5Y*CII)NEI*Q)N)Q0I)Q@=`)8O)Y*O*N*8_)8_6I)`)I*>b,Y+d,Y+_6Q)C_6b)I8N,D",
  "N6O)I*b*d+Y,NDY)d+N3I)Q,_1Y*Q,N1Y+S*I.b+IQ)_M)YDZBY.[BY+Q+N:O*I,P-I+P-N*<=J3Y)`*C<K3I,T)IQ+b78",
  "N=8O)CI)N)I0_)YDO*_6Q-=I,N3`-Q*d*I3N1O*S*I;_2b+I2_3Y,`)_C`/d+I*Q2P->N)O)=Y,O*_>`-S)8S*>Y._4Y+P",
  "-I+`)N:O/8P-S*=O)=I,_9>S)=Y,`)NAO/N*S*O*CO)P-=C=d)8Q2Y-N18_4O.S+>N)>IH_+8=8N*8_/8N-CI+_@O.Y*P-",
  "I+O*8N,I)N)I)N38_+8N)8_*8O)=`+I)O)I)`)I)=I+>Y*_*O)I)`+Y)`*Y-N-8=I)=8N;8=`,8>I)>8O*8`*=>=S)8S)I",
  ",O)Y6_CO1N*d*P-S)8C>_)I7NAO2N)C=I,P-I]*_@`+I)`,d3N*O)I9NA`0d)=Y-P-I+d.Y1_=`.=CI+P-I+P2I6_5I)`/",
  "I*P-Q)d)D_+Yf*N>`/CI[)J8K8P-b,I.N,I)=I)N,8N)8N4O+8O)I)O*=>=O)d)Y,P-IL)N,I)_;`+I)`+=C=>Y5=O-N<`",
  "+=O*S,>I,=`-N@O0d)=d*Y._M)Y+S-Ie*_8CI/P-I+_,8_:O,8O,=d*I-P-b1Y)S)N7I)O38O/YM)_+8N)8N;O+Y)>8O)8",
  "`+=>I,P-I+N+8N)8N8`*8O)8`*=Y+P-Ie,_1O*S)Y+O)=>_.8N9`+Y)`*d.P->YS)=Y/b2e6Y.CNV6I])ba)8d*Y-NK+IO",
  "R)_Y)S)Y.Nb8I0>N+`/I-_Vh)Y*_L1YfS+N7O1P-ILD_f0Y+_78P-I*S)_P)8P-I+N7I)`*CI-NA`+d*T*M*CDI-P-8b+8",
  "_2Y*_1Ib.^)N<M)d)P-IL+J8K8b3S*Y[)_N)I*>=`DY+O*^.II)M)C<>Y-O)I/Nfi*I,NT;Y<N-Y]T,M*8^+8M)8_Z,Y/=",
  "Y6_)I)=I/N*I,NO.IKM)__)Y*_.Y)_,Y+N-I)DO)CIYg)Tb+P-I+Td.IO)O@I)`3Y,Td)IGTe+I-e;I)TG`*e)O+I,O,T)",
  "`+T7O*eGY2TJ)`)DIg)Q2I.Q2I.eT)Y,b4YL*J5K5J5[+8K1J5K598J)I)9I)J)I)J*8J,K*8:8[+8[-J5K5J)8J*I)J,8",
  "Z+8K5J)8J*8Z*89Y)Z+8K5J5K5J5K5J5K5J5K5J5K5J5K6I)Z4D[4DK+Z4D[4DK+Z4D[4DK+Z4D[4DK+Z4D[4DK+9:I)PB",
  "TI0`DT*OBT,>T/>T)d*Y/`*8`/IQ9K-=K2I+K+YS+`+8`0I)`+8O)8`*Y*MHY8>Ib)_>Y)`+^+I)P-I*=DII-N7>Y0N>O*",
  "P-Y*DIQ/_5<O*P-IT+N7O)=P-I*CIY/_+8N*8N)8_/8_K+I)b,`+Y<J9K9`+<I*P-I*S)YQ4bFDb)DQ*IO)b>Db/IJ+N*8",
  "_58N)8=I)=8N-8N*8=8=I+=I*=8=8=8_)8N)8=I)=8=8=8=8=8N)8=I)N*8_+8N*8N*8=8N-8_0Y*_)8_*8_0ICT)IP,T>",
  "I*T[)I.e/I)e/8e/8e:I-b.eY*IEe6Y.T>I*e,Y+T)I/T+IV*TU7I*e0Y)e.Y)ee)I*eX)I+T.I*DY/T.I*TEI,T-I+T<I",
  ",T7I)T.I*T)IHTS-I.T/I)e.Y)T-Y*TEY+e/I)e-I+e,Y+eR*8TW)P-IL8NYe<I8NgI*I+NX+I)NJd*I/_b^+Y/Na1IZO)",
  "NX0IZ@_NV*Y*NYJ*IQ_e2Ob+IQbi*",
  NULL
};
static const char *const tfmi_packed_word[] = {
  "Y)2/C,))CX))2),)-@)H)S6,46-/)))9_+)**,)).))+)))<)]*)T,)V-)O)*).R)0V))))*)*))0D,,F3-S*,O+)0*2);",
  "*)8e)*N+6`),)*)*W):E,3-A).0T*)J,*2);)0***>)/))+,*1***,0),*)-*42)))*+).,**>)/)*)*)**))-,**++)/,",
  "))/83+)1)+)>)/)*)-*2)+)+*)7,*21/)+)0***>)/)*)-*1***+/+,*)-*2))8*).++),+*)))*+*+++4,-++),*).)62",
  "85)+)@)8*1)+),/*)+*)*,*28,)0)+)@)2)-*1)+),/*.*),*2)+45)+)]))+)--,/-*22.)+):+A)1))*/+),.)))0.2*",
  "*5d)-7)2P)*)))-)A)))@*-)))/)2*,I))@*.23))))),2)M),<):)M)1)c)S*.W**O)))-)*T))V2),*/))),*R)),*J)",
  "),*/))),*7)c)),*L**+I)88`**.+U;*9)C-T*+3/>1>3<45)+)*4^*+),**2J)+)3.c*/T)-O*2H)4,42Q)*-3U),C.2O",
  ")E,i))F*3.25)0HZ)V*+2914^+4b)02+Z)*3-T)*+8+)P)-`8*.*O)*.*0)))))))H*_))/))++)/+,*.,5-+)/7*Z)*;)",
  "E)5)85])J)9),)*2))+-.)))))),)3*,--,)9R)VB^)`b)N/.14O)))-)*b)/)7A1/)/)/)/)/)/)/)/)I)X))_6+B7)-*",
  "-,`****+)d*),-T))h*9I)Y)8I8IW.I*V^=L*W)*V0+E<]))2)]+N)1*P+*L***)))0=`),);^)4O*22.A+))Z)*M)4F+J",
  "*63.H)a)16*2.@+R*A+*8*-2.*.*.1/)/)T))6.e+)**2.Mg24@,Z)MQ0W3*S+O)/4--4)5)-)))*)*)U+J)T3:I**`)Q)",
  "4,888+*A+I)-)P,;2/C,))C3c*+.*.*.*+L)4)C);)*)7*6K)e+N*_)Q,)K,F+Z)7)HI)5G-T)-G*M),0)-S)h,*2.M),M",
  "),Q)0^)43)7)/)*)3)7)/)*+^)4a11>20A.)S))1N*.*))U))*+)*@2@1HJ*;)*2>2CO*b).*I*,)*-0)+)F*+,)I)F+FL",
  ")0)GB`)2>2;5:W+R*a)])5])5Q)02.O)+-)@d/S))*+*8+a)J)2)0J)H>S)=D@1P*H81f)/)5B/2._))2,,0M)*)1N*,,)",
  "5))L):)N).,h)/))),)7)2/e)-2.,)0***>)/)*)-)2***+*).)-/*/+-32))*))O))2))*)),)05*FT*-2,,GO*))02O-",
  "`)*1@.K)J*+)32O)c)/2.<ED*7,2./c-e)N+S*=0*)*0)*)G)**142O*0*W)*0)*Di)0)0S*+):R*P.J)72.1)V))172AG",
  "*>)6R*/)*)U)+))*)102..)*)N))*)./2`1@19)R)+-53_*)X*dEO+X+9M.U[*J+7YJ)8>2ef+-P:c_.d)O`)c9/H)2.X*",
  ")2.G*-3a)1,421=-;Y5V)+2O.I*I,T*,c)/9I**)*3*6bi-0`O)R)2Pa0,)/)*)L17)F+*)6,0U4MQ*T+-5+1/2+*ZK,2O",
  "8W)*@h8-+.00*/G,^,+e5_*)P*)**)***,)4)))/)J*),*0)/)E),)-))+/)^2*B)B)H)B)H)B)H)B)H)B)0*[)I8a),[)",
  "0)6)>-)7YK)H.._./)9*/)*)--h)J))Y+V)+6*2,)J2H9d)`6S)`.T)N7/),)*)7)N.3/R)U*,2ON),)D)*))*))2),)))",
  ").),))))))+)*))*))))))))))*))*,)/),),)))2)9-+)-)9^;C.C.CO]*2OI)IaR)I)dJ,.h.*K^-6ZR/7W;KV*h8KX)",
  "Td,-IL,YSa=Y/",
  NULL
};
static const char *const tfmi_packed_numeric[] = {
  "Y)2b+*-)*+JV)2O,2O.2f42`+2,.U+2`+2`+2*.W+5]+20/P+2Q+//;V+2I+2`+2O*<U02O*2X><ZD+X/2.2>2U12I,3N-",
  "2.2`-2`*2O,2.2`I))+..2O.])*-`>f)W*>`;GRT))RA)B16+a2,S,2G0)7I)2P)7IeE2f-2I2.d,2O)2O.2>2`*2`42`b",
  "<2V7V)4c)9*_2DM),F)0)O,-S.2WF0B/P)1T*->.I-**8*W)I*1^)*G+T*-Q+0A0R)/S2.Y)2.2`0Hh,2S),Y+/O,GI,2f",
  ")2Y,2/<e/2`22`+2`32O+2.<U*4M5;g*2`<2`*FL/2O*2`)2O32O+=TJ)X+JO72OR*2`*2O,2)/W82O0@g2+cP@2OW)<4<",
  "U+B_K)[)IS*2O52`72a/2U>1I,2aAe))+),U*V))7KG5La*2",
  NULL
};
static const char *const tfmi_packed_punctuation[] = {
  "J)72/C.C,K))-)+)2*+)+)h=)0)[6.R)*]))))*)*)U)*<*)*5)**S*,O+)T)6R/+`)7H)N0*2)i3)LA)d*)2*Q-7))N),",
  "P*)S*-,*X+.T-)M;1a,)U;*U)*W*+P**g,+)+N)3c1*b.*I,/).U-/e,,e)-h)*I*03)fBA0<)5)4G*6*c;,F*gJ)6X**H",
  "2]4>i),I)*e@,)*Y+)X,X));h5+,2*48)4)K+)d*)KIF*V0+L+)2)]+.f3,`**Q)+))Z)*X))J+58*f+,h+*8*c/)[S<*Y",
  ".2>L))6)),))*_,+).),2*+*C+))D))))/d4+f<)Y))h4)P@)P.)H)Y01O))Y+/K*/c*,SN)/V+*),h+,Y)*X*-+)5))+b",
  "*.T+)f8)d/@R++b/+ZR+-cX9*N,)J*-0)dS<)PX/-",
  NULL
};
static const char *const tfmi_packed_mark[] = {
  "IAY+]0/P0V))))*)*))Q*3Y)=8)N+/*.**),L))GDe*3d)1K),)1)+)-T)+b+6)J)`)+):)/2*F+b)))/***+1)2*F+b))",
  ")-,**++)G*+)3+b)))0)+)+<*F+b)))/***+0*2*G)e)-++),1)Q),d)/)+),/*3*F+b)))/)+),/*3*F+d)/)+),1)2*G",
  "*O*),.)))0:*g))*/40K+)*.)*3.S**D))))),*Z)<)*-3)M)1)M+<@,,+)+*/+,54))2,i=+[F+F+F*G*I*I)1)V)+a+*",
  "K))`+4,4e.-c)2)F*)Y)7J*-X)9O)14+G5b)6Y)<b,+)=,),++*O.`)--Y>J)hi*+V,)I+I)S9.R+*^WF,)2I)*Y**Y0)+",
  "),)@-b**[):C:^)0B5U),X)6M))L*64)0*V)+[)))+**-*))R)--*U/0)*Yc;)J@888VG)K/)_,-O^)+)*-,Q)+,)N-*cQ",
  ")+_)7b),V)3N*+M)6h))4+Y)61+i*4.)I-4=,b)))/***+1)2**/+-I.:R+<T//*1D*[*9S+5N+7LQ)0)0[*>)6cZ;-e)/",
  "dI)W)8,SQ;*OO--+.00*/G,^,+eg)a),[)0)6)>-)7YS)/)9*/)*)-NN*/V+/_gNAY/",
  NULL
};
static const char *const tfmi_packed_lower[] = {
  "J**I*)*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*(O+*()*()*()*()",
  "*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*(**()*()*()*()*()*()*(K)*g)**(**(**(**(",
  "**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(*,T4WY)**Y4**(**(+*(**(**(**(**(**(**",
  "(**(+*(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**]/)*^/**(**(,*K5)*J",
  "5**(**d4)*c4**b4)*()*a4+*f,)*`/)**)*]4**b4)*,**0)*+)*i4,*M5)*,***)*R5**(**(**[5)*Z5**[5+*Z5**[",
  "5)*Z5**Y5)*()*X5**(**^5)*]5,*(0**)*)***)*)***)*)**(**(**(**(**(**(**(**(+*(**(**(**(**(**(**(*",
  "*(**(+**)*)**(**L.)*[*)*[+**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**N0**O0**(",
  "**(**(**(**(**(**(**(0*^K=)*]K=**P2)*`U=+*VK=**P4)*Y8)*,)*T,**(**(**(**(K1*(**(,*(1*O//*e,**))",
  "*()*(**`)**))*(**g))*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*(**()*()*()*()*()*()*()*()*(",
  "M)*X)1*5**(**(**(**(**(**(**(**(**(**(**(.*c++*d+**7)*8+*N0)*()*()*M5)*()*()*()*()*()*()*()*()",
  "*()*()*()*()*()*()*()*i*)*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()",
  "*()*()*()*()*()*()*()*(Z)*g)**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(2*(**(**(**(**(**(",
  "**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**E)*D**(**(**(**(**(**(+*(**(*",
  "*(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**",
  "(**(**(**(**(**(**(**(**(**(**(**(**(**(**(+*h*)*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*",
  "()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*(Sd**IL6)*()*()*()*()*()*()*()*",
  "()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*(**(.*(",
  "]>*Iag))*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*(",
  ")*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()",
  "*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*XfT*)*()*()*()*()*(^M**5/*Jf-)*()*()",
  "*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*",
  "()*()*()*()*()*()*()*()*(+*()*()*(J2*Kf-**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(",
  "**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(*",
  "*(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(2*ie6**If6**(**(**(*",
  "*(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**",
  "(**(**(**(**(**(**(**(**(**(**(**(**(2*9)*()*()*()*()*()*()*(1*()*()*()*()*()*(3*()*()*()*()*(",
  ")*()*()*(1*()*()*()*()*()*()*()*(1*()*()*()*()*()*(4*(**(**(**(1*()*()*()*()*()*()*()*(B*()*()",
  "*()*()*()*()*()*(1*()*()*()*()*()*()*()*(1*()*()*()*()*()*()*()*(1*()*()*L,)*()*K,4*c,)*()*()*",
  "()*d,4**)*()*a-)*(5*b-)*()*X.)*()*[.4*Z/)*()*,)*()*S/S1*P_6,*L`))*[//*MO8W)*@)*()*()*()*()*()*",
  "()*()*()*()*()*()*()*()*()*(<*F]B*[))*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()",
  "*()*()*()*()*()*(Zc)*U))*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*",
  "()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*(Z)*g***Xi<)*KZ5)*JY5+*Yh",
  "<**(**(**cJ=)*h))*L*)****hJ=+*(1*iL=)*()*IM=**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**",
  "(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(",
  "**(1*(**(-*(WSG*(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(<*(**(**(**",
  "(**(**(**(**(**(**(**(**(**(**(Q,*(**(**(**(**(**(**(,*(**(**(**(**(**(**(**(**(**(**(**(**(**",
  "(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(**(3*(**(**RIN*)*SIN***(**(**(**(-*(**Z[[*+*[",
  "[[***(,*(**(**(**(**(**(**(**(**(**(**R^[*)*=)*0)*<)*-**M+)*X))*S))*ST^*)*gc)**(**(**(**(**(**",
  "(**(**J+)*NZ[*)*`Y5)*[LN***(**X`[*)*Y`[***(**(**(**(**(**(**(**LM]*B*MM]*Uc=*h))*()*()*()*()*(",
  ")*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*(OO)*8)*()*()*()*()*()*()*()*()*()*",
  "()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*(R,*()*",
  "()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*(",
  ")*()*()*(g,*))*()*()*()*()*()*()*()*()*()*(**()*()*()*()*()*()*()*()*()*()*()*()*()*()*(**()*(",
  ")*()*()*()*()*(**()*(Ta)*[))*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()",
  "*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*(h,*i))*()*(",
  ")*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*(ec**()*()*()*()*()*()*()*()*()*()*()*",
  "()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*(JU=*()*()*()*()*()*()*()*()*()*()",
  "*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*(J**1)*()*()*()*()*()*()*()*()",
  "*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*(Q[G*6)*()*()*()*()*()*()*()*()*()*()*()*()*()*(",
  ")*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*(",
  NULL
};
static const char *const tfmi_packed_nfd[] = {
  "I.,K,IY)),(*),(*),(*),(2),(,*,,d)),,V*),(*),(*),(4),07),(*),(*),(4*,21),*-),(*),(*),(*),(2+,47",
  "),(*),(*),(4),05+,8)),(*),(*),(*),(2),(,*,,d)),,V*),(*),(*),(4),07),(*),(*),(4*,21),*-),(*),(*",
  "),(*),(2+,47),(*),(*),(4),05*,(6),X+/),I*(),i),),I*(),i)M*),I*(),e)V*),I*(),i)*),I*(),i)2),I*(",
  "),i)2),I*(),g)(),I*(+,g)7),I*(),i),),I*(),i)*),I*(),i)K*),I*(),i)a)),I*(),e);),I*(),i)0),I*(),",
  "i)*),I*(),i)I*),I*(),g)R*),I*(+,g)*),I*(),i)*),I*(),i),),I*(),i)M*),I*(),i)J*,,*1),I*(),g)S*),",
  "I*(*,g)T*),I*(),i)U*),I*(),i)_)),I*(-,e)=),I*(),i)U*),I*(),i)_)),I*(,,g)7),I*(),i),),I*(),i)2)",
  ",I*(+,c);),I*(),i)U*),I*(),i)_)),I*(),g)=),I*(),i)*),I*(),i)S*),I*(),i)_)),I*(),g)`)),I*(),i)_",
  ")),I*(+,g)9),I*(),i)*),I*(),i),),I*(),i)0),I*(),i)*),I*(),i)d)),I*(),e)T*),I*(),e)(),I*(),i)4)",
  ",*5),I*(),i)4),I*(),i)2),I*(K),_*G),I*(6,])(),I*(F,P+F),I*(),X)(),I*(),])(),I*(),])(),I*().i)/",
  "QY)).I*(().i)(-).I*(().i)(>).I*(().i)(@).I*((*.P+(0).I*(().i))().I*((),S.-),I*(+,g18),I*(),a)(",
  "),I*(),a)b)),I*().i)(().I*((),Y<a)),`5(),XK)(,,N*=),I*(+,Z))),I*().c*<-).I*((),S.9),I*(),D(),I",
  "*(),V3E),I*(),i),),I*(),a)+),I*(),i),),I*(),a)+),I*(),i),),I*(),])+),I*(),i),),I*(),c)+),I*(),",
  "i),),I*(),c)+),I*(),i),),I*(),L*S)),I*(),g)(),I*(+,a*])),I*(/,V*1),I*(),a)I*),I*().T)g).).I*((",
  ").i)1().I*((),i)0),I*().i)(().I*((),T)-),I*(V0+^@)+(*+I))-=-Y)+g/2+XQ)/,d.(),[W)()+_V)),fV)(),",
  ",(),,(*,4(*,4(),0().I)6-C,i)(),A(),A5),0(),,(),,().A6(C,@(),A(),35),4(),0(-,:(),(6U),O,7),(8*,",
  "+5,,B6-,Q)5),+)),>43,=(I),I*(@,-3),(8*,+5,,O*6-,a)5),+)),>4A,K+:),*(S*,g-9),I*(6,T*(),I*(),i),",
  "),I*(+,_)+),I*(+,O2,),*(),N4(),I*(),g)(),I*(+,g)/),I*(),i)0),I*(),])(),I*(+,^2(),*(),a3(),I*()",
  ",]*/),I*(),i)0),I*(),i).),I*(),a)-),I*(+,a)(),I*(R1,bF`^)),(*),K*(),J**),O*)d,,`0(*,P)(9,K)(`:",
  ",UN)YW)0,8(+,.(M)-e)()-*()-*()-2()-2()-*()-:()-0(U+,Y1M0),([)8-T*_))-*(*-C(^*-O0I0+-4(L)-L*()-",
  "*()-2(+-G(S/,b9^9+,(X)),([)8-T*_))-*(a),I/`1`),Q+Z)),*(),)[)f+,I0h/b+,[/h//,6(),(**,(P)).((Qg,",
  "i+,I0b/),*(),)[)W,,O1O/*,(2).((S7),(I)N3-[>YF2-<(--2(--2(--2(5-_)+2-K+N,*-(,)-K,A*-*(1-L,(:-K*",
  "W+2-<(--2(--2(--2(5-_)+V+,S1[/Ia*,IW-WY-*,,(*,,(*,,(*,,(,,0(R),[*(*,,(+,,(),*(*,.(g=,JY5iI4),I",
  "*(),g)e)),I*(),i)b)),I*(),i)E),I*().g);ZU-).I*((),g)i)),I*(),i)b)),I*(),i)E),I*(),i);),I*(),i)",
  "4),I*().g)Z*)).I*(().i)(*).I*((),i)[*),I*(),i).),I*().i)92).I*((),g)i)),I*(),g)-),I*(),g).),I*",
  "(),i)b)),I*(),i)_)),I*(),i)h)),I*(),i)6),I*(),g),),I*().i)X*1).I*((),e)5),I*(),i)M*),I*(),i)E)",
  ",I*(),g)D),I*().i)(.).I*((),i)E),I*(),i)/),I*(),g)a*),I*(),i)4),I*(),i)b)),I*(),g)a)),I*(),i)b",
  ")),I*(),i)E),I*(),i)/),I*().g)]*-).I*(().i)(6).I*(().i)*7).I*(().i)(*).I*((),g)-),I*(),i)4),I*",
  "(),e)(),I*(),i)b)),I*().i)(.).I*((),i)E),I*(),g)]*),I*(),i)b)),I*().i)L*.).I*(().i)>().I*(().i",
  ")W)().I*((),g)a)),I*(),i)b)),I*(),i)E),I*(),i)/),I*(),g)9),I*(),i)A),I*(),i)-),I*().i)]*3).I*(",
  "().i)*6).I*((),g))),I*(),i)I*),I*(),g)N*),I*(),i)*),I*(),i)6),I*(),i))),I*(),i)b)),I*(),g)a)),",
  "I*(),i)*),I*(),g))),I*(),g)1),I*(),i)K*),I*(),i)E),I*(),L)(),AZ*),.,),,(*,U8--,e;b)),I*(),i)])",
  "),I*().i)55).I*(().i)()).I*(().i)(:).I*(().i)(3).I*(().i)K*)).I*(().i)c))).I*(().i)()).I*(().i",
  ")(:).I*(().i)(3).I*(().i)d).).I*((),a)(),I*(),i)])),I*(),i)3),I*().i))1).I*(().i)()).I*(().i)(",
  ":).I*(().i)(3).I*(().i)K*)).I*((),a)])),I*(),i)^)),I*(),])(),I*(),i)])),I*().i)5)).I*(().i)())",
  ".I*(().i)(:).I*(().i)(3).I*(().i)K*)).I*(().i)7)).I*(().i)()).I*(().i)(:).I*(().i)(3).I*(().i)",
  "(I*).I*((),])8),I*(),i)])),I*().i)M)L*).I*(().i)()).I*(().i)(:).I*(().i)(3).I*(().i)(I*).I*(()",
  ",a)_)),I*(),i)O*),I*(),i)])),I*(),i)3),I*(/,Y])I)),(*).()N*).(*().()*).(*().()K,).(*(),i))),(*",
  ").()L,).(*().()*).(*().()K,).(*(),Q*)),(*).()L,).(*().()*).(*(+,i))),(*).())).(*().()*).(*(+,M",
  "*)),(*).())).(*().()*).(*().()K,).(*(),i))),(*).()L,).(*().()*).(*().()K,).(*(),M*)),(*).()L,)",
  ".(*().()*).(*().()K,).(*(),i))),(*).()L,).(*().()*).(*().()K,).(*(),U*)),(*).()L,).(*().()*).(",
  "*(+,i))),(*).())).(*().()*).(*(+,U*)),(*).())).(*().()*).(*().()K,).(*(*,i)(*.((L,*.((**.((K,)",
  ",Q*)),(*).()L,).(*().()*).(*().()K,).(*(),i))),(*).()L,).(*().()*).(*().()K,).(*(),8P))-(*),0)",
  ")-(*),,))-(*),,))-(*),4))-(*),4))-(*),0))-(*+.X)M).).(*()0()R,S^))0(*(()0()*()0(*(()0()K,()0(*",
  "(().i)).).(*()0()R,()0(*(()0()*()0(*(()0()K,()0(*(().U*).).(*()0()R,()0(*(()0()*()0(*(()0()K,(",
  ")0(*(().i)).).(*()0()R,()0(*(()0()*()0(*(()0()K,()0(*(().M+).).(*()0()R,()0(*(()0()*()0(*(()0(",
  ")K,()0(*(().i)).).(*()0()R,()0(*(()0()*()0(*(()0()K,()0(*((),8D),(+).(/.),(S,).(P,(*,(K,).((()",
  ",i)a+),(+),(/)-(*),(Q,*+U*+,JZ)-).hY)L,(),(S,).(P,(*,(K,).(((),L*L,)-(*),,))-(*),(Q,),YK6R,),(",
  "*),(K,),TI6a+),(+).(0R,)/((*+,(^+).(]+K,),i)+),(+),(/)-(**,SO6)),(*),(K,),ZL6a+),(+).(0L,)/((*",
  "),/>),(*),0f*).(]+K,),i)+),(+),(/)-(*),/O)),ZX)P))-(*)+Z,+.[`)).),(S,).(P,(*,(K,).(((),]*L,)-(",
  "*),<))-(*),(Q,)+TX)++`^7)+(N1+ga6,+L`))-;_+X+,h^8f*),,(;,,(H,b+(),0(),+(_),K+(-,2(+,.(A,Y)(*,,",
  "(D,W)(+,6(+,,(*,.(@,_I9(*,QK9(3,P)(),JJ9(),,(),UK9(),*(+,C(),*(+,.(),*(/,.(),*(+,6(),*(+,.(),*",
  "(L),`)(),4(),*(),,(Z),g*(),*(),Q)(),*(/,I*(),*(),*(),*(f)+WZ.)+([g)-a[*(YT),f`*K`>*,,(*,,(*,,(",
  "*,,(*,,(*,,(*,,(*,,(*,,(*,,(*,,(+,.(*,,(*,,(/,6(),(**,.)),(**,.)),(**,.)),(**,.)),(*@,R+)2,W-(",
  "6,E(*,,(*,,(*,,(*,,(*,,(*,,(*,,(*,,(*,,(*,,(*,,(+,.(*,,(*,,(/,6(),(**,.)),(**,.)),(**,.)),(**,",
  ".)),(*@,R+)+,[,(),*(),*(),*(,,>(KI[)+VT`))+R_:)+Sg;)+NI))+Xi6)+iR8)+Me*)+UeN))+))+aML))+hPE)+_",
  "MG)+If))+dS,)+MP2)+`Z,)+[T+)+^@)+d;)+Uc+)+eQ;)+YZ))+de))+QY))+fN0)+b[.)+UQ,)+i`N))+MX*)+fb3)+U",
  "Z+)+KJ2)+Ii3)+gUI))+^R1)+Kh2)+Uc))+aR;)+fY7)+UM+)+T_<)+bM,)+MN+)+Kc*)+Kg6)+Z^I))+IL))+U:)+Sh0)",
  "+fI+)+b]+)+UV*)+[Z,)+QI+)+S-)+Mc+)+M^,)+bL*)+^Q))+g`:)+M7)+IK*)+YK+)+^]/)+^a-)+]d1)+XiA)+QK+)+",
  "`_6)+dJ*)+cJ/)+WO+)+Wi1)+QL-)+iJH)+[b))+Ie.)+Uf))+Q;)+hJ/)+W8)+OJ4)+]aJ))+Ye>)+iS@)+J))+hM<)+K",
  "d))+ML+)+OQ1)+TX-)+LT<)+M]+)+`X8)+TUG)+dd.)+^K*)+Qa1)+YG)+]N9)+Oh:)+c]<)+[h/)+cc0)+fT7)+R_+)+[",
  "d3)+i_<)+^R*)+MS7)+W^.)+IO+)+JX7)+Si9)+Z[9)+_b,)+Uh7)+T^7)+Qf0)+XT;)+^T))+h-)+WT3)+SO2)+Wb*)+M",
  "O,)+bX+)+_VH)+b<)+I]*)+Ya*)+YV+)+YL-)+`[,)+MQ6)+bT*)+bK*)+U+)+PLO))+^K2)+IT*)+^h9)+gWA)+`Z))+h",
  ".)+[R))+YQ-)+SK))+h]))+I^*)+[K*)+^P))+UT/)+ZL-)+Q]-)+U[))+P]I))+`0)+[J))+^I6)+[i3)+WG)+Lh=)+`:",
  ")+Sb))+ML,)+hQ0)+]U,)+LR:)+QJ,)+dW*)+MF)+KO))+Sc1)+U3)+I]-)+`2)+dh0)+KU*)+K-)+h4)+eQM))+MK=)+S",
  "I4)+OY*)+XgC)+aN1)+ON))+OZ-)+I-)+[_,)+YO*)+`f+)+OP*)+[T/)+ha-)+IZ/)+TYE)+Sd@)+TdJ))+KX2)+W/)+d",
  "^*)+^=)+b`*)+h<)+KZ))+QS*)+d^5)+LXL))+IU0)+[MC)+eML))+dW.)+IV0)+h]8)+ic@)+YD)+MV+)+h`-)+fX9)+e",
  "NK))+SG)+SN,)+dd,)+^;)+[=)+bL*)+I[+)+`F)+Uc,)+S_,)+K))+^W,)+SZ*)+PdJ))+^a5)+eR5)+Me6)+WU))+K`0",
  ")+YS0)+Oe*)+WM))+ZYD)+OL+)+bJ2)+eZ+)+Q-)+K@)+Ng,)+XK))+fT5)+ZRG)+SPC)+cXA)+P+)+fR.)+bK*)+MI5)+",
  "L_8)+Yc0)+_O+)+UQ<)+iW+)+II/)+NU.)+ZT=)+Pc.)+hP*++WR)*+YJ/++ZR2)+`^8)+hc))+KP))+K*)+4)+[*)+Uf6",
  ")+ZR5)+fX)*+ON+*+QW*++d]*)+Q4,+fh+)+A)+`*)+`Q*)+VV.)+Yg*)+]YL))+Y;)+S.)+`@)+^))+b.)+`M))+Y.)+K",
  ".)+WF)+W.)+`e))+:)+SK*)+O5)+S*)+O.)+b_))+M1)+f2)+OH)+KX*)+M2)+W8)+`M))+b3)+UH)+fO*)+b2)+<)++)+",
  "6)+2)+4)+h*)+()+K3)+I,)+f;)+OL))+Q))+W+)+I;)+M1)+WG)+`0)+))+dF)+YT*)+S0)+^>)+W+)+[B)+Q+)+dS))+",
  "K0)+^S+)+`9)+`+)+VfD)+YPZ/)+VVI/++RiB)+fb))+e,)+ZG)+QE)+^+)+U<)+M+)+MS))+Z,)+O,)+Y,)+WP))+Y-)+",
  "I1)+G)+d8)+S4)+[d))+4)+h0)+O,)+^:)+S/)+V,)+S0)+g*)+K1)+K,)+hA)+W-)+S+)+O8)+d9)+M2)+.)+^+)+MK*)",
  "+I,)+UA)+[B)+J))+U-)+`7)+h<)+YL+)+Na*)+[/)+^/)+U<)+Q1)+Q+)+K6)+*)+^2)+I))+Y))+S-)+=)+`A)+QG)+f",
  "8)+^3)+h5)+Y1)+[<)+U4)+b^))+b1)+[b))+WE)+Q,)+G)+Y:)+Y+)+e*)+S+)+/)+L))+`,)+I-)+d@)+hK))+[;)+U:",
  ")+b5)+SI*)+U.)+M/)+Q0)+O*)+>)+h*)+UV))+[Q*)+dSM.)+5)+Ic-)+ZLf/)+^P*)+I*)+hIR0)+UQ-)+MI9)+JcX/)",
  "+^,M*-ReU*RW=*-[).3-9<)-(*)/(3bP))/((*)-Z)1)-(*)-(0)-*()-*()-*()-*()-*()-*(*-,()-*()-*()-*()-*",
  "(*-,(*-,()-*(*-,()-*(*-,()-*()-*()-*()-*()-R)-)-/4)-<()-:(US-,STN,`XN,*,,(7,<(L,,b0d.),*(f8,SJ",
  ")WJ)),([)X3,M@O>),(;*,(Cf/,h7M7),*(LgW)-fcg*Ueg*)-*()/((bdN/)/((*)/((*)/((*)/((*a*-K.()-*()/)(",
  "/)/*(()/)(*)/*((I[R*+ce^2)+3)+8)+IWc.)+Nfb.)+d,)+A)+U,)+W/)+f))+d,)+Z))+LL6)+`cQ/)+eWd.)+4)+G)",
  "+M))+Qdc.)+POQ/)+dS6)+S*)+dec.)+Rec.)+A)+ZV))+hV))+8)+[KI1)+_hi0)+C)+R[6)+`_6)+<)+`*)+0)+N`6)+",
  "Ke6)+*)+^))+S))+<)+()+I))+K+)+6)+8)+Y))+:)+*)+))+))+bSe.)+ceU.)+VS6)+Q))+Obe.)+Zae.)+2)+Q))+W1",
  ")+V.)+G)+h))+[+)+O-)+[))+M,)+G)+I*)+))+Q))+K))+6)+E)+O=)+J9)+I9)+V4)+M*)+eO*)+UW+)+J:)+S*)+Y))",
  "+N0)+U2)++)+^/)+WLh.)+Nig.)+0)+E)+O))+6)+h+)+S^h.)+K,)+gXh.)+f*)+>)+i,)+d0)+Za9)+C)+`I:)+S+)+)",
  ")+[Qi.)+TIi.)+Q))+E)+>)+Q[i.)+]Zi.)+4)+b^))+L]))+LS:)+fV:)+C)+K-)+P+)+U_I/)+LSI/)+MSI/)+ZPI/)+",
  "/)+I))+Q.)+()+Pe:)+df:)+^*)+Q))+`*)+XI;)+I[^/)+XY^/)+OL;)+,)+,)+O))+WUK1)+RRK1)+MLK/)+))+J]Y.)",
  "+iV9)+))+aN;)+Iif/)+K[@)+ZPJ0)+8)+ZQ;)+UT;)+M+)+:)+K*)+W0)+X^;)+g))+Wa;)+hLL/)+eIL/)+I0)+.)+*)",
  "+-)+d*)+O))+O*)+F)+<)+f*)+O))+.)+[))+<)+K,)+O-)+M*)+`/)+`eL/)+ifL/)+L,)+`.)+^))+I.)+bIM/)+ifL/",
  ")+e-)+c))+aa<)+^L=)+Q))+f))+V*)+aI=)+MW=)+b))+dRN/)+XKN/)+Q9)+i2)+J]=)+Wa=)+]b=)+R*)+dS3)+,)+^",
  "`2)+R.)+IJ5)+RVG)+d]9)+.)+2)+b+)+@)+hOO/)+_Pf/)+IT>)+T/)+b4)+M+)+WhN/)+igN/)+i.)+Q7)+Xa>)+Qd>)",
  "+I.)+U,)+d3)+^iN/)+ZfN/)+PU@)+YY@)+SbO/)+P_O/)+VY@)+O[@)+b*)+^))+()+KVP/)+Nb6)+fh6)+cSP/)+dOQ/",
  ")+eiP/)+C)+V.)+f2)+W*)+Y+)+V+)+W*)+E)+A)+YcP/)+_hP/)+^7)+f+)+a]A)+WcA)+1)+[IQ/)+ZVQ/)+Q@)+hhP/",
  ")+h*)+ZfP/)+M/)+a))+/)+TQB)+OTB)+M+)+5)+S+)+WPS.)+JhR.)+dZQ/)+XUQ/)+fIR/)+PbQ/)+A)+^))+WeR/)+Z",
  "bR/)+Q))+hRS/)+f5)+_RS/)+I))+iVC)+YXC)+eWC)+))+fbC)+Q))+Q))+O))+Q,)+idC)+YID)+KZT/)+ZXT/)+O_T/",
  ")+N[T/)+fK`.)+ib_.)+IcU/)+U))+`0)+ZMQ0)+>)+`WD)+fiU/)++)+U*)+[))+TJV/)+()+))+^*)+LZD)+K_D)+T^D",
  ")+h,)+UbR0)+ifV/)+d+)+h+)+]hD)+M^S0)+JVW/)+O^W/)+^*)+V]W/)+`-)+cTE)+IZE)+:)+0)+b[X/)+^:)+))+]e",
  "X/)+cWE)+YdU0)+ThX/)+,)+NdE)+YNV0)+gdX/)+NLF)+WMF)+3)+b))+SQZ/)+PKZ/)+NOF)+SUF)+^+)+M,)+LZF)+O",
  "XX0)+f))+gWX0)+haX0)+i_Z/)+OfZ/)+]dZ/)+Q.)+<)+QV[/)+Y,)+PU[/)+W^[/)+Z][/)+fWc.)+_ba/)+bVG)+I-)",
  "+ZXG)+M]G)+]Q;)+KXO0)+C)+NKC)+8)+acb.)+,)+[c.)+P]N))+SKH)+5)+K))+_h@)+di@)+*)+:)+Y*)+SN^/)+XN^",
  "/)+W+)+S,)+[,)+_0)+[1)+[*)+h.)+R8)+U/)+*)+G)+[N^/)+Q;)+V1)+_d]0)+SfH)+*)+M*)+OTa/)+VOa/)+Wf^/)",
  "+if^0)+.)+hM_0)+I:)+X`_0)+QWI))+>)+<)+*)+h+)+L*)+S0)+c*)+U1)+L-)+M,)+^))+idI))+[IJ))+h))+ZIJ))",
  "+UOJ))+,)+OIa/)+Jc`/)+4)+]SJ))+QUJ))+iLS))+MiJ1)+W3)+ZSc0)+8)+YgJ))+b,)+b1)+^4)+MNb/)+eia/)+S)",
  ")+[-)+`-)+Web/)+a[e))+]Lg-)+H)+O+)+dWg-)+_Ig-)+O.)+[Re/)+^))+]_d/)+b-)+h))+bJe/)+PJe/)+b9)+f1)",
  "+()+c-)+b@)+`))+Qhe/)+iOe/)+ViN))+KKO))+hee/)+LcJ1)+bVO))+LZE)+IaE)+KKg/)+Q5)+cdL1)+6)+[`O))+[",
  "Kh/)+Z_M1)+OhM1)+aQh/)+))+d))+bbh/)+RVh/)+idO))+SiO))+d/)+^))+`+)+JLP))+K`P1)+gJI0)+d:)+b3)+iK",
  "Q))+f))+[PQ))+U`J0)+VgR1)+bIS1)+Y8)+M0)+VgJ0)+T`Q))+MdQ))+0)+4)+:)+4)+Q*)+QUL0",
  NULL
};
static const char *const tfmi_packed_nfkd[] = {
  "I-*i/0,(YY)**h+-,J,/+*G)*(),N)-)*`c)+,ac)U*)*I))*d+*.e+dZ6Q+).((+).,(,^+,U)]i7),I*I*4,c)d,),I*",
  "(1,IN)Z,`)*gP)N*.g*P)YV)).(I*().I*((),X)i*),(I*),I*(),e)i)),(I*),I*(N),]*H),(I*),I*(g-*Z3)*dH)",
  "*cH)*6)*UI))**)*2)*_I))**I),Z-bQ)),(*),(.),(f)),(R*),(8+*IM))*XH)*4)*0)*bJ)`,,RP)^+2,(P,).(6=T",
  "**W^))*2)*P)),(5),(6)*I*)*5C*i))*4)*(**a*)*b),*T)W4,ME^P)W/,M4M7),K*(),h/(),c/(eg),OI,fe+I,,I0",
  "I0R),L*Z)),(8X)*K+T+.W2I5hP.*.*((L4*]-YJ+*_U6)*Q0)*R0**()*()*Y<)*X<)*()*()*()*()*()*()*(**))*M",
  "F)*NF)**)**)*()**)*:)*fG)*()*IT5)*JS6)**)*()*OH)**)*()*TH**,)**)*d5)*c5)*QG)*KU5)*()*XS6)*.)*(",
  ")*WS6)*gS5)*]H)*fS6)*Pa4)*()*()*K))*()*g_))*8)*,)*()*`]))*()*C)*0)*(6*Y.L)*eI))*iG)*KH)*T>)*`>",
  ")*VH)*YH)**)*.)*,)*()*()*IZ5)*gV5)*J+)*WZ5)*VW5)*g*)*+)**)*()*()*()*,)*:)*()*Z5)*d5)*()*KR5)*L",
  "R5)*()*NJ))*SJ))*()*()*S:e.,V_)NT.),M)[,K1,N-A*,((),(h*).(]+eL.4.(>L,).((*).((K,6.(*L,).((*).(",
  "(K,6.(@L,).((*7,(5),(O)**+)*))*))*))*))*))*))*))*))*))*)/*[h7.,ih7h)5**),(RY)).((NV)1*V),,MJ8Q",
  "I8).((QI8*,..).((.-,PJ8PJ8*,)QW)1,h)TU)),(e)),e)f)60KJ8Oi7-ML80*]J89*))*Y++*X+)*()*()*()*()*()",
  "*F)*Uh8)*Tg8)*T))*()*Q,)*g+)*()*()*()*()*()*()*()*()*()*F)*Uh8)*Tg8)*T))*(**U+)*.)*:)*8)*IG)*L",
  "H)*,)*()*()*()**)*,)*(4,L*ge7b*.GP,gf7).((I))*g)),d.Q)*.c,P)/).((4)*b:*,i5W))*],)*i))*))*))*h)",
  ")*f3)*g5)*))*,)*h)**i)),([*+*))*()*()*))*)+,*L*).*7Z*),(8**0,*/,*a))*(**I*)*J*)*(**2)*K*)*I`*)",
  "*()*()*()*_`**.N*@A)*[a))*D)*J*)*A)*IP7-*Lg8)*h))*()*.)*(/.Z+OI8J*).((,)0((7LI8).((,).*(().)(,",
  ").*(().*(().*(().-(*).0(()./(,).,(().,(().,((),3()*W)),(_i7).((K)),(C)*A),(B).((()0((([)),BG)*",
  "E),(F).((()*B)*;)*()*8)*`)),(I*).((I*),(C)*A),(B).((()0(((I*),BG)*E),(F).((()*B)*;)*()*82.c+`g",
  "7T+L-,`i8WG).((Yi8*,..).((.Y9*cK:)*()*()*()*()*()*()*()*(),7ei8),(*),(*),(*),(*),(*),(*),(*),(",
  "*),(*),*9).;*RI9).(*().(*().(*().(*().(*().(*().(*().(*()0(76i+)0((*()0((*()0((*()0((*()0((*()",
  "0((*()0((*()0((*()0((*()0(*9(),:/),*(),*(),*(),*(),*(),*(),*(),*().7,+).(*().(*().(*().(*().(*",
  "().(*().(*().(*().(*().*9().;K+1).(*().(*().(*().(*().(*().(*().(*().(*().(*().(*().(*().(*().",
  "(*().(*().(*().(*().(*().(*().(*().(*().(*().(*().(*().(*().(*()*Y))*()*()*()*()*()*()*()*()*(",
  ")*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*4)*()*()*()*()*()*()*()*()*()*()*()*()*()*()",
  "*()*()*()*()*()*()*()*()*()*()*()*_,KR)0`i8Ke8MI9MI9Q+.Ji8Ji8eh8),..).(((O8*ZF)*R)[/*[J>Y1*b]G",
  "^**faB5*adQ))*W*)*C)*8)*[))*`*)*4)*O))*[))*QQ))*S*)*2)*U))*O))*Q))*Q+)*Q))*<)*^1)*d-)*`))*0)*d",
  "))*8)*^))*A)*Y))*O+)*K))*^))*OX))*W,)*`E)*U))*6)*<)*K))*`,)*bF)*h*)*W/)*U))*M))*S))*S+)*,)*[>)",
  "*:)*>)*A)*O/)*6)*0)*Q/)*:)*A)*6)*b+)*I))*K))*h,)*QM))*d*)*Q))*OW))*0)*M-)*G)*A)*Q))*U*)*0)*^8)",
  "*W))*h))*Wi))*K,)*U))*[+)*W))*8)*4)*O+)*0)*h))*UL*)*fD)*>)*0)*.)*6)*K))**)*I-)*W5)*0)*M=)*:)*K",
  "+)*4)*8)*6)*^-)*4)*O6)*4)*I+)*I))*f*)*b6)*4)*I))*U<)*d/)*2)*S3)*U-)*d*)*[@)*Q0)*dL))*^))*Y+)*M",
  "+)*O,)*<)*2)*I*)*`,)*:)*[=)*4)*8)*8)*G)*E)*.)*f,)*.)*2)*Qg))*d))*QF)*>)*U))*^9)*A)*U,)*d*)*UL)",
  ")*E)*E)*M*)*Q*)*U4)*>)*M,)*W7)*f))*I5)*Q))*0)*`5)*W3)*b/)*2)*0)*Sd))*8)*`1)*[1)*,)*f*)*Y.)*A)*",
  ".)*4)*K.)*K*)*2)*C)*U2)*M+)*.)*U3)*,)*M))*`7)*h*)*4)*S,)*:)*,)*:)*d))*^A)*hA)*:)*S*)*S))*6)*:)",
  "*.)*W*)*.)*I))*0)*A)*^))*E)*6)*^+)*E)*.T)*_dX*`)*be@**d[9)*,)*(J+,R[R)bNA),(*+,YOAHI+,`*f+[)*R",
  "h7)*()*Y2)*Z2)*[2)*()*_2)*()*()*^2)*()*()*()*()*()*a1)*R))*()*()*Y))*Z))*()*()*()*()*()*()*()*",
  "()*()*f,)*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*T))*c,)*()*K3)*()*.)**)*",
  "0)*.)**)*e3)*I4)**)*N4)*()**)**)*()*.)**)**)*()*()*()*()*,)*.)*:)*4)*0)*Q2)*()*a1)*()*()*^*)*(",
  ")*,)*8)*()**)*:)*,,*`NG)*`0)*P0)*KV,)*LV,)*M*)*N*)*U[;)*]V;)*J,)*Z))*W[-)*]H)*VP,J+.LRP)Xf7P))",
  ".(,().(*().(,().(*().(*().(,().(,().(*().(,().(*().(*().(*().(*()0(L)Y]0LI9)0(,(()0(*(()0(,(()",
  "0(*(()0(*(()0(,(()0(,(()0(*(()0(,(()0(*(()0(*(()0(*(()0(*(()0(3C()6()1OW0S`0`d0[*)4(((4:Lb0*.(",
  "SXGi]0).(b0().(N0().(MV,().(VM,().([V)().(]`)().(Y`)().(eY)().(QW*().(Wf1().(O`,().(VL*().(aY*",
  "().([S=().(LTF().(UU/().(SM)().(J:().(SL1().(J]:().(bO7().(YK5().(P^1().(ZS;().(Jg)().([c*().(",
  "^W+().(da5().(Lh;().(UfG().(NaE().([J;().(aN=().([VB().(:()*U[S))*b[,)*^Y+)*WI31.g]g)gcI*b)),e",
  ")N*),(*),(*),(*),(*),(*),(*),(*),(*),*9),(*),(*),(*),(*),(*)*bU0)**)*()**)*()*()**)**)*()**)*(",
  ")*()*()*(),L)b[0),,(),*(),,(),*(),*(),,(),,(),*(),,(),*(),*(),*(),*()2/(Ma0L)1)0+Ca2Q/),)(**OX",
  "G)*`0)*P0)*KV,)*XM,)*YV))*_`))*W`))*gY))*OW*)*Uf1)*M`,)*XL*)*cY*)*YS=)*NTF)*SU/)*QM))*L:)*QL1)",
  "*L]:)*`O7)*WK5)*R^1)*]S;)*O[;)*LS*)*Rf5)*SXD)*i]H)*SM))*Wa4)*bZ=)*RXM))*WQ))*[f4)*]_6)*M*)*N*)",
  "*^g/)*Pi,)*Z3)*`N,)*L+)*ba5)*Nh;)*SfG)*PaE)*Wf*),ZWU)X]0),(*),(*),(*),*9),(*),(*),(*),(*),(*),",
  "(*),(*),(*),(*),*9),/YV])),*(),*(),*(),*(),*(),*(),*(),*().7XV])diS)).(*().(*(),W)S+).d)>JS]))",
  ",(a)).Z)+N*)*SNA)**)**)**)**)*()**)**)**)**)**)**)**)**)**)**)**)*,)**)**)**)*()*()*()*()*()*,",
  ")*,)*,)*,)*,)*()*()*()*()**)**)**)*()*()*()*()*()**)*()*()*(*2i,`PAUNAYb7h_7)0(b)`+_-)2(8.5T*)",
  ".(:O))2,J+8S)9).(Y*L+).,],M+)4,I)P,d,h*IPA)0(O,/().,9E).(:W*).*X-<)0(S,V*P+)0(0W*Q+)0(P-.9)0((",
  "4R))0,(X,R,)0((I*O.)0(b,h)()4(a,*c+g*O.),(Q-)4((a+T*I-a))4((M+O.J*>)2((EZ+()0,P-3d))4(((((8)4(",
  "M-e*V,P*3)0(,K,Q+).,GN,).,J)K))0(K)K)N+)0,X-a*K-)2(h,M)K)b+)2,9M+c,V,).0:L+).((6)00]-Q+<).6(R,",
  ").,(Q+),(^-),,R*).0=N*).*g)/)4(;Y+,^-R*)0(((:)2()(Y*7)4.*]-N+N*O*)0((CM+).((0).()Y+)4.8+X*(L-)",
  "0(,O)2)4(;Z+J)J*M-).(I-I+)2.]+P+S,Q,).(R)+)0((E]*).(K-5)0(J-h*Z))2((:+L-)0()(8)2.*X-Q+h*)0()W,",
  "_*),(^-)2(Z-8(g*).(M.7).((8)0.X-P,S*).((b+).(h)a)).(Y*i))2(883^-)0*P,U+A),(`+)4((e)]-:().,g+T+",
  ")2(((h*9)0(K-h*O*)0.((L-).((O*).,]-8)00K*_*M-),(U*)0*V)e*K))2(^*`+N.7),*a))4(O)BY)L-8)..i*(),g",
  "TAUiH),*(),*(),*(),*(),*(),*(),*(),*(),*().7ZQb)KiH).(*().(*().(*().(*().(*().(*().(*().(*().(",
  "*().*9().(*().(*().(*().(*().U+b)XNb)),/K)),N*@).K*AK)),C=),*C),@<).((i+).((*),_)X)),^KX)`eY))",
  ",^e+Pb.),TY.WV3),WW.Y=)0bJ)ad.WWP)dQM)),]e])eUX)),+(),f^)(),g^)(),+(),i)*),,(),3().b)h)eSP))08",
  ",=LVf)),2c)),+(),f^)(),(K*),g^)(),+(),N*O)).O*L+[)).e)(().3(().C((),Y`)Q*),g^)(),9(),6(),1*),8",
  "(),f^)(),g^)(),;(),8().,(X,).;((),<_+).+`+().,(*).;((),<]+).+^+().,Yd8I,)0(((]+),c)Pe8).`)J)L)",
  ").e)(().3(().`*K).)2(((Oh8TKA)4(((((JUA),+M)),+(),f^)(),g^)(),.c)),+(),f^)(),g^)(),+(),e)(),O*",
  "*),+(),f^)(),g^)(),+(),e)(),f)M_)),e)()0Q)_a):Vh8),g)O,),K*D),(*)0i)Ke8+[+).(Td8c+),K*c*),c)W+",
  "),K*X)),i)J)),K*f)),e)N*),(,),I*W*),*5),(*).(*[+),(:),*T)).(62).(4(),c)V*)0I*])*Z+).i)M*i)),(,",
  "),O*I*),i)0),0P)).)Oe8I*).R)((),HIgJ)),*(),*(),*(),*(),*(),*(),*(),*().7Re[)Ya[)).(*().(*().(*",
  "().(*().(*().(*().(*().(*().(*().*9().(*().(*().(*().(*().(*().(*().(*().(*().(*().*9().(*().Q",
  "+I+Za[)g^E*]Ta))**].*INZ*Q,*JV]*)*b*LD*KPZ*)*hI*)*cU^*)*UW^*Jg;,aW_*2),(.),(.).(3-).((.),CE),(",
  "(5,KY*MY*),(J)),(4),<>),;91*S.)*N))*,)*()*4)*()*()*<)**)*ie*O),Sd*h.)*I2)*))*:)*))*))*))*,)*))",
  "*))*))**)*))*))*))*5)*))*))*))*0)*))*))*))*5)*))*))*))*^*)*))*))*))**)*))*))*))*N*)*))*))*))*+",
  ")*))*))*))*,)*))*))*))*()*))*))*))*2)*))*+)*))**)*))*5)*))*G)*))*7)*))*W))*))*))*))*2)*))*))*)",
  ")*.)*))*))*))*-)*))*))*))*8)*))*()*))*))*)),^)Y/),(()*R))*))*))*))*/)*))*))*))*O))*)),((),((K)",
  "*V,)*))*))*))*[))*))*+)*))**)*)),)I*)*.)*))*5)*))*.)*))*4)*))*))*))*X0)*)).*i)`e*).((().((f2).",
  "((().((c0).((().((h/).((().(()).((().((,).((().((8).((().((().((V0).((().((()*K0)*))*))*)).L0(",
  "c)).((*).((Y)).((0).((*),L*X*),(*),(*),(W)),(0),(*),,e)),(*),(*),(W)),(0),(*),*e)),([)),(0),(*",
  "),*c)),(Y)),*Z)),([)),*Z)),(*),(Y)),2Z)),(*),(*),(W)),,X)),(Y)),*Z)),(*),(*),(W)),*X)),(Y)),*(",
  "),*Z)),([)),*Z)),([)),6Z)),(*),(*),(W)),(0),(*),*c)),(Y)),(0),(*),*N*),(2),(*),(*),(U)),(*),(0",
  "),(*),*e)),(*),(*),(W)),(0),(*),*e)),(*),(*),(W)),(0),(*),*e)),(*),(*),(W)),(0),(*),*e)),([)),",
  "(0),(*),.e)),(*),(*),(W)),(0),(*),])U*),*(),Y)().ZK+P*6).(*().(*().(*().(*().(*h)).^K+.g+).((*",
  ").((O)).((*).((.).((*),L*N*),(*),(O)),(*),(.),(*),,Z)),(*),(O)),(*),(.),(*),*Z)),(*),(O)),(*),",
  "(.),(*),U))),(*),*)),(*),*N*),(d)),(*),(0),(*),*1),(0),(*),*N*),(f)),*P)),(*),(O)),(*),(.),(*)",
  ",.U*),*g+),(*),(O)),(*),(.),(*).(<e)).((*).((*).((W)).((,),L*X*),(*),(*),(W)),(,),,_)),(*),(*)",
  ",(W)),(,),*+),*X)),(Y)),*Z)),([)),*Z)),([)),2Z)),(*),(*),(W)),,X)),(*),(W)),*Z)),(*),(*),(W)),",
  "*X)),*Y)),*Z)),([)),*Z)),([)),6Z)),(*),(*),(W)),*X)),(Y)),*Z)),(*),(*),(U)),(*),*Z)),(*),(*),(",
  "W)),(,),*_)),(*),(*),(W)),*Z)),(*),(*),(W)),(,),*_)),([)),(`*),.P,),(*),(*),(W)),(,).(C+).((,)",
  ",L*F),(,),,+),(,),*+),(,),8+),(,),*+),(,),G-),(*),*(),,(),(,),0+),(,).;6<).(*().(*(),95),(*),,",
  ")),(*),*)),(*),5)),(*),*)),(*),5)),(*),))),(*),,)),(*),6)),(*),*)),(*),+e)),(*),(*),(W)),(P)),",
  ")(),,(),*(),*Y)),(*),,)),(*),*)),(*),5)),(*),*)),(*),5)),(*),))),(*),,)),(*),6)),(*),*)),(*),+",
  "e)),(*),(*),(W)),(P)),)(),,(),*(),+1),(*),(*),(W)),),),*(),.+),/Z)),(*),(*),*+),(*),(*),.W)),*",
  "(),J)4),((;..g)@).(*Z)).((().(([)).(*().(W)Z)).((*).((*).,()).((().*(d)).(()).4X)c)).()*).((b)",
  ").([)a)).((().(()).(([)).((().,X)X)).((().(Y)Y)).)X)().((().()2).([)a)).((().((W)).((().,X)0).",
  "(*/).((().*W)X)).((().((Y)).((2).,Z)1).([)().((().((0).*(/).((2).(()).6V)/).((().*W)X)).((Y)).",
  ",X)().((2).(()).()c)).((().(,[)).((().(W)X)).((().*X))).(([)).((2).()c)).((Y)).(,Z)).(([)+.(+V",
  ")).,[)+).(([)).)X)().((0).()/).((().((0).([)*).(()).0(/).((().L*V)2).,+().(()).(,*).(()).(W)*)",
  ".(()).,(*).(X))).(Y)().6V)().,)*).)(().,(().E)().([)().4X)().()().([)().1(().-(().0X)()./Y)c))",
  ".,X)Y)).=Y)2).<(()..Z)c)).),d)).)+1).)[)().*Z)().,(X)).])*d)).*)().Y)(()./[)().Z)X)().`)Y)1).;",
  "Z)()./[)().+V)2).O)+(R).J)Y)Y0).C(()0_)(e0[J+)0()a)T))0f)T)d)+)0HW)@U))0/J)G))08K),.)0GJ)3+).N",
  ")K)2)M)(((RK+Qe*MJ+`J+WM+I*[L+QM+^M+WM+I*YM+OL+QM+SM+)89(ZK+bI+d)c)(()02Y0WI+Y)<*ZJ+)*Qg@)*()*",
  "Zf@)*()*_))*d))*Ug@)*().Zh@eR+Zi*@,(()*Sh7)*+)*Re7)*))*X+)*()*K-)**)*Uc@)*()*3)*()*7)*()*/)*()",
  "*,)*()*()*(+*Ve@)**),c+WV)),((),((),(()*f+)*))*))*P+)*Qg@)*Pg@**>)*+)*0)*g))*Mi7)*ch7)*()*K-)*",
  "*)*Uc@)*()*Ni@)*,)*.)*()**)*E)**)*+**d))*Z+)*()*^)-,i)U^)),IK+(),iJ+**,(**,(*),IK+(),iJ+*),IK+",
  "(),iJ+*),IK+(),iJ+*),IK+(),iJ+*),IK+()*i)),4*),((),(*),((),K*(),((),J**),((),O*)),((),((),(()*",
  "P*)*))*()*))*))*))*()*))*()*))*))*))*()*))*))*))*()*))*))*))*()*))*))*))*()*))*))*))*()*))*()*",
  "))*()*))*()*))*()*))*))*))*()*))*))*))*()*))*))*))*()*))*))*))*()*))*))*))*()*))*))*))*()*))*)",
  ")*))*()*))*))*))*4)*))*))*))*()*))*))*))*()*))*))*))*()*))*))*))*()*))*))*))*()*))*))*))*()*))",
  "*))*))*()*))*()*))*()*))*))*)).3c*SK+).((().((*).((().((*).(((),((),((-*XK+)*()*()*()*()*()*()",
  "*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*",
  "()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*(",
  ")*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*UY<)*()*`P+)*:)*()*B",
  ")*[7)*;)*L-)**)**)**)**)*[+)**)**)*R*)*Y+)*_-)**)**)**)**)*()**)**)**)**)**)**)**)**)**)**)**)",
  "*,)**)**)**)*()*()*()*()*()*,)*,)*,)*,)*,)*()*()*()*()**)**)**)*()*()*()*()*()**)*.)*_-)*()*_]",
  "7)*J.)*()*Y2)*Z2)*[2)*()*_2)*()*()*^2)*()*()*()*()*()*a1)*R))*()*()*Y))*Z))*()*()*()*()*()*()*",
  "()*()*(,*`,)*()*()*()*()*(+*+)*()*()*()*()*(+*+)*()*()*()*()*(+*+)*()*(,*VV0)*()*8),a0N[))*S0)",
  "*+)*OI8**WN*)*Na))*()*()*()*bI*)*^*[I_)*acf+)*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*",
  "()*()*()*()*()*()*()*()*()*4)*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*(",
  ")*()*()*()*]+)*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*4)*(",
  ")*()*()*()*()*(**()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*]+)*()*()*()*()*()*()*(",
  ")*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*4)*()*()*()*()*()*()*()*()*()*()*()*()",
  "*()*()*()*()*()*()*()*()*()*()*()*()*()*]+**()*(+*(+*()*(+*()*()*()*(**()*()*()*()*()*()*()*()",
  "*4)*()*()*(**(**()*()*()*()*()*()*(**()*()*()*()*()*()*()*()*()*()*()*]+)*()*()*()*()*()*()*()",
  "*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*4)*()*()*()*()*()*()*()*()*()*()*()*()*",
  "()*()*()*()*()*()*()*()*()*()*()*()*()*]+)*(**()*()*()*(+*()*()*()*()*()*()*()*(**()*()*()*()*",
  "()*()*(**4)*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*]+)*(**",
  "()*()*()*(**()*()*()*()*(**(,*()*()*()*()*()*()*(**4)*()*()*()*()*()*()*()*()*()*()*()*()*()*(",
  ")*()*()*()*()*()*()*()*()*()*()*()*]+)*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*(",
  ")*()*()*()*()*()*()*4)*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()",
  "*()*]+)*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*4)*()*()*()",
  "*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*]+)*()*()*()*()*()*()*()*()",
  "*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*4)*()*()*()*()*()*()*()*()*()*()*()*()*()*",
  "()*()*()*()*()*()*()*()*()*()*()*()*]+)*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*",
  "()*()*()*()*()*()*()*4)*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*(",
  ")*()*]+)*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*4)*()*()*(",
  ")*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*]+)*()*()*()*()*()*()*()*(",
  ")*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*4)*()*()*()*()*()*()*()*()*()*()*()*()*()",
  "*()*()*()*()*()*()*()*()*()*()*()*()*U3)*S8+*W=)*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*",
  "()*;)*<)*()*()*()*()*()*()*dN7)*VN7)*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*",
  "()*()*()*()*()*YL7)*eM7)*,)**)*>)*3)*+)*i*)*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*;)",
  "*<)*()*()*()*()*()*()*dN7)*VN7)*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()",
  "*()*()*()*YL7)*eM7)*,)**)*>)*3)*+)*i*)*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*;)*<)*(",
  ")*()*()*()*()*()*dN7)*VN7)*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*(",
  ")*()*YL7)*eM7)*,)**)*>)*3)*+)*i*)*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*;)*<)*()*()*",
  "()*()*()*()*dN7)*VN7)*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*",
  "YL7)*eM7)*,)**)*>)*3)*+)*i*)*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*;)*<)*()*()*()*()",
  "*()*()*dN7)*VN7)*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*YL7)*",
  "eM7)*,)**)*>)*3)*+)*`))*(+*id))*()*()*()*()*()*()*()*()*()*;)*()*()*()*()*()*()*()*()*()*;)*()",
  "*()*()*()*()*()*()*()*()*;)*()*()*()*()*()*()*()*()*()*;)*()*()*()*()*()*()*()*()*(JY-*NJ0)*()",
  "*.)*,**W))*V))*3)*:)*M))*7)*()*()*()*P))*2)*6)*B)*A)*L))*,)*=)*()*,)**)*2)**)**)*O+)*`,)*]))*N",
  "+**Z,)*.**[)+*c)**`))*7)*()*()*()*P))*2)*6)*B)*A**H)*=)*()*,**4**,/*R)-*/**`)**7**()*P))*2**3)",
  "*A**H+*9**4**,**f/**c,**Z,)*.**[)+*c))*:)*M))*7**()*()*P))*2)*6)*B)*A**H)*=)*()*,**4)**)**)*O+",
  "**K+**a/)*()*.)*,)*W))*()*V))*3)*:)*M)**7)*()*()*P))*2)*6)*B)*A)*L))*,)*=)*()*,)**)*2)**)**.*X",
  "))*.)*,**W))*V))*3)*:)*M)**7)*()*()*P))*2)*6)*B)*A)*L))*,)*=)*()*,)**)*2)**)**N:,]I+TV)),(+),*",
  "(),*(),*(),*(),*(),*(),*(),*(),*(..J)S)aK+).(*().(*().(*().(*().(*().(*().(*().(*().(*().(*().",
  "(*().(*().(*().(*().(*().(*().(*().(*().(*().(*().(*().(*().(*().(*().(*().bh@5bh@)*Lg@)*E),FF",
  "),Q)U)**X))*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*()*(),L)/),2(",
  "),4L)),(G).--ge@),6BD,;(),(*N),94Y+,WLAKIA),Y+Y.)**6*YbA)*RX+)*ab+),TY9]))*Sf6)*dQ-)*YUA)*_TA)",
  "*TQ-)*`a3)*IY-)*Zb-)*c^1)*f].)*ii.)*MK2)*Pc1)*Q[=)*PK,)*[b3)*]eB)*XT*)*^V5)*iP.)*h3)*T_2)*8)*I",
  "MJ))*ROB)*]e/)*Sf*)*OZ/)*YO=)*eZ=)*d[3)*Y7)*NP;)*WP5)*Xa+)*+)*^K/)*LU9)*O^))*UcF-.Z]Y)ORDhe@).",
  "(N[4().(O0().(dX.().(I]2().(TO/().(QQ2().(]i9().(^P1(0*`a@)*Zd-",
  NULL
};
/* Combining classes are numbered by their order: 54 of them. */
static const char *const tfmi_packed_combining[] = {
  "IA(=[))]),V))]))T)-V)*R),V)*R)3V)-),V)0[))`))[)+V)+[)*V))(+[),V))[))])*V))[))^)*_))^)*_))^)5[)",
  "]0(-[)R0()V),[))V)+[))W))V).[).V)*[))V)*[))W))Z))[))-).)/)0)1)2)3)4)5*6)7)8)9)():)();)<)()[))V",
  "))()5Q*(0[))B)C)DY)()>)@)A)B)C)D)E)F*[)*V)-[))V)*[))V)8()GN+(/[)*(,[))V))[)*(*[))()V)*[))V)L)(",
  ")HG()[))V)*[))V)*[)+V))[)*V))[))V)+[))V))[))V))[))V))[))V)*[)I-(/[))V))[)K)(,[))(1[))(+[))(-[)",
  "T)(+V)b+(6[))()V)*[))V)*[))V)+[)+V))>)@)A+[))V)*[)*V)-[)f)()*8(),+()[))V)*[)P+()*8(),W+()*8(),",
  "W+()*8(),W+()*8(),i+(),i+(),/()I))J)N+()*8(),i+(),f+(),V+(*K)),5(,L)U+(*M)6(,N)U*(*V)D()V))()V",
  "))()T)a)()O))P))()Q)-(,P)*()P))(*[)),)(*[)h)()V)Y+()*)(*,[*()V)X>(+[)^F(),H(),g,(),2()[)T.()Z)",
  "X,()W))[))V)e.()[))V)P*(),<(0[)*()V)Y)(-[).V)*[))V)`+()*7(),O)()[))V)/[)`)(*,d)()*3(*,L*()*b,(",
  "+[))())-V)*[),V))[))(/),()V).()[)+(*[)O.(*[))V)/[))V)*[))_))S))V))R)N)[)-()[))^))V))[))V)Y>(*[",
  ")*),[)+)*[),()[)+(*))[))V))[)*),V))[)hi*(+[)V,(),I+(I)[)S9()U))Z))]))W)*X)R+(*+^WF()[),(2[)I)(",
  "*[)Y*(*[)^0(),g-(),D(:[)c)(+V)N)(),i*()*4(),X/()[))(*[))V)*(*[)-(*[))()[)^)(),`/(),Yc;()=JA(/[",
  ")/V)*[)VG()V)K/()V)_,(-[)[^)()V))()[)Q)()[))))V),(),N-()[))V)iS)(),b)(),c)(),)*N*(+[)Y)(*,h)()",
  "*U*(),1()*S+(),)*[-()*),Z*()*8(),A(/[)+(-[)V.(),+()*e+(),)*e/(),)*h+(),`+(),)*]+(),]Q)(),Y_;(-",
  ")e)(/[)PT<())OO-(*T)+)+()Y)-T)0(0V)*(-[)*V)G(,[)^,(+[)eV+(/[))(9[)*(/[))(*[))(-[)NN*(/V)V+(.[)",
  ")*__NG(",
  NULL
};
static const char *const tfmi_packed_cluster[] = {
  "J8YX)Z8Y,;Y)9;YQ1Rb)YR,c+YL,c>8B8R)8R)8BIEK+I-c-89I@c2I0BY[)c+:8R+I)R)8R*Y8:8BI7c5YV)c-IFc,Y,B",
  "I4R*8c,8c)8c*Y=c)ICK)Y*c,I=R4:R8AY0^:BAB8b)R,Q*DQ)8c+M,I)R)I2M,8BQ)Y0M28^+8<Y)M*I)B8BQ)R*I)Q)I",
  ")Q)DY,BI*M)8<I)R)I.M)I.BI)R)AIEB8b)R)I*R)I)c)Y)BI7R)Y)BY-R)AY0M28^+8M)8^*I)B8b)c*8R)A8Q)DI2R)Y",
  "2<R+8BQ)Y0M28^+8M)8^*I)B8R)AR*I)Q)I)Q)DY+c)I*M)8<I)R)Y.<I0BYFBABQ)Y)b)8b)BY,BI<Bb)BI0M28M0I)B8",
  "c)Q*8c)8c)DY+R)8^)Y+R)Y6BQ)IEB8AR)ABQ)8c)8R*Y+R)Y-R)Y/AI.R)Q)Y0M;R)8BQ)R*8b)8b)D:I,BI-R)Y6BQ)I",
  "L)BI*BQ)c)8B8b+BI1Q)YGB8Ac+I.R,IZ)B8Ac,Y-c+YM)R)Y5B8B8BI*Q)YAR/Ac*8R)Y*c-8R:Y,BYE^=I)R*AR+8DBQ",
  ")R)<I0M+Q)R)M*c)<Y)M)Y+^)R*^.B8AR)I+B<I/BIZ)NY)OM)PU)YW-c)Ic6R*I6c)Y6R)I7R)I.MCR)Ac+Q,BQ)c,DBY",
  ",BY>c)9BYd)R)I9BIe)c)Q*R)b)I*Q)BQ+c)YV+R)Q)BI*^CABAc+8D8BI)R,Q+R-I)BIAR@I)R.I2R*AI+M)I+^8R-Q*R",
  ")DM,I7c,I.R)AM7AR*Q)c)DR)M)Y-^)I<BAR)b)BAc*IAQ,R,Q)R)IU*c)8c.Ac+I*BI+BI)AR)IL+RI)YN09CEJ)I4Z+Y",
  ".;I.;I3J0IY)c8YA;I3;IV)L+Y/L)Ya-L)I.;I]*;Y4]-I*])YL+;Y]+L)I-;Y,;IFL*8]*Y,;I);I)L)I);I*;I);8L)I",
  ");Y);Y)L)I,])Y*;8;Y*L.Y-L)I);8L)8;I1;I)L)I1L+8;8L)Y)L)Y*;I)L)I*L)Y-L)Y*L)I);Y*L)8;8L)I2L)Y*L+8",
  "L*I);I*;I);I)L+8;I);8;8;I+;Y);I+;I-L)Y/;I);I*;8;I*])8;Y-L)IA])Y,;I/;I/;Id-L)YP/])Y1L)YB;I*;YU.",
  "c)YO*BIY)R8I_0R+;I.;YV)R)Ih/;8;YSX6R*8R-I8R)IQ)R)IQ,BY)BI*BY3Q)R)AI*BYR)Q)IBQ0R)I5R1Y.BI;R,Y4c",
  "-ABI._6Y)c)AY*^)Y)M:BQ)R*Q)R)Q)DY7^*B8^,I-^*I=R+Q)R)Q)R)I.BI,BAI1M08^)I+<8B8M)IAB8c)I)R)Y*R)8B",
  "I7^-AR)Q)Y*ADYM+^5I,Q)BQ)BQ)8ABIJX-`3I*aAIZU,BYY3R0I0R0YP+9IX*R)IQ)J.YI0BIZ+BYS*c*ILCc)8R)Y*R*",
  "I<c)I*DY[*R)Yh0R*YI)c*Yh,R)YO)R+IL)c-YAR*Ig)ABAYCc/Y<BI)R)I-c)AY>b)R*Q)R)I):I*BI-:IBc)I:c*AR+D",
  "BI0Q)I>BI.R)AIAb)c,AB8K)Y*R*8ABIW)b)c)Q)R*I+BI)BYW*Bb)R,Y2R)Q)YDR)8BABQ*I)Q)I)Q)BY,BI-Q)I)c+Y)",
  "c*YJ)BQ)R+8BI)B8c)A8Q)R)D:BI/R)IR)b)R,Q)c)ABY3BYQ)BQ)R+ABQ)BAR)AR)Y_+BQ)R*I)Q*R)AR)Y5R)IR)b)R,",
  "Q)BAR)I_)BABQ)R,Y[)BABI)R*Ac*II,b)c,AR)Yd+Bb*8Q)I)c)D:A:ABYO*b)R*I)R)Q*BY)AI6R-I<R+A8R*I,DY,R+",
  "Q)c)I<K+c.ABDIL+BAc)ABAYL+Ac+8R+ABIR)R38Ac+AR)AR)Ig)R+Y)B8R)8c+:BIJ)b*8R)8Q)BABYV-R)Q)Y,R):AIA",
  "Q)c*Y)Q)R)DY3BY[]*BI+c/IM]-R.b)c)IIP)c*YFc+IU8B8bDY+R*YQ)BY-R)Y_[1R)YYR*R@I)c3IX0c*Y)R+I,R,I)c",
  "+I7R*IS*c)YgGcDI*RBI,BI/BI3c*8c/IQ=c+8c0I)c+8R)8c*I[)BIY*c+Ye-BYGR*Ih/R*Ii+R)Yc+BI)BY+R)Y*BIV/",
  "c+Y`)c+YfC;Y;L*I[)L.Y/L)Y/;I/L)Y:L-Ib)L)I.L)I/;I)L-Y1LEY5]/I-;I2;I)],8L*Y,]3I+Lh*I)Lb)I)L)8])I",
  ")]R)I)])8L*c*Li+8]HY-L+8L4Y+L)I)L,I.;I)L*I);I*L)Y.L)I);I,L)Y,;Y*])I.])I,])I);8;I*;I+;Y);I+LT)I",
  "ALL)Y*L,I)]0Y);8L+I)].IV+L;I.L*IEL,I-L+I<L,I7L)I.L*I)L/Y,];I.]@8L-8]f*IU)L,I/LR*II,Li7IZII4RY)",
  "II*Rb+IQbi*",
  NULL
};
/* ---- end of the tables ---- */

static tfmi_class tfmi_class_of(uint32_t c) {
  uint32_t low = 0, high = (uint32_t)TFMI_COUNT(tfmi_class_starts);
  if (c < 128) {
    if ((c | 32) - 'a' < 26) return TFMI_LETTER;
    if (c - '0' < 10) return TFMI_NUMBER;
    return c == ' ' || c - '\t' < 5 ? TFMI_SPACE : TFMI_OTHER;
  }
  while (high - low > 1) {
    uint32_t middle = (low + high) / 2;
    if (tfmi_class_starts[middle] >> 2 <= c) low = middle;
    else high = middle;
  }
  return (tfmi_class)(tfmi_class_starts[low] & 3);
}

typedef enum tfmi_rune_state {
  TFMI_RUNE_WHOLE,
  TFMI_RUNE_OPEN,  /* the bytes end within a character that more of them could complete */
  TFMI_RUNE_BROKEN /* no character begins like this */
} tfmi_rune_state;

typedef struct tfmi_rune {
  uint32_t code, bytes; /* code: U+FFFD unless whole */
  tfmi_rune_state state;
} tfmi_rune;

/* The character at p, of n > 0 bytes: RFC 3629, no overlong forms, no surrogates. */
static tfmi_rune tfmi_rune_at(const char *p, size_t n) {
  const uint8_t *b = (const uint8_t *)p;
  tfmi_rune r = {b[0], 1, TFMI_RUNE_WHOLE};
  uint32_t need, code, low, high;
  if (b[0] < 0x80) return r;
  need = b[0] < 0xc2 || b[0] > 0xf4 ? 0 : b[0] < 0xe0 ? 2 : b[0] < 0xf0 ? 3 : 4;
  low = b[0] == 0xe0 ? 0xa0 : b[0] == 0xf0 ? 0x90 : 0x80; /* the second byte's range */
  high = b[0] == 0xed ? 0x9f : b[0] == 0xf4 ? 0x8f : 0xbf;
  code = b[0] & (0x7fu >> need);
  r.code = 0xfffd;
  r.state = TFMI_RUNE_BROKEN;
  if (need == 0) return r;
  for (; r.bytes < need; r.bytes++) {
    if (r.bytes == n) {
      r.state = TFMI_RUNE_OPEN;
      return r;
    }
    if (b[r.bytes] < low || b[r.bytes] > high) return r;
    code = code << 6 | (b[r.bytes] & 0x3f);
    low = 0x80;
    high = 0xbf;
  }
  r.code = code;
  r.state = TFMI_RUNE_WHOLE;
  return r;
}

static char *tfmi_put_utf8(char *to, uint32_t c) {
  if (c < 0x80) {
    *to++ = (char)c;
    return to;
  }
  if (c < 0x800) {
    *to++ = (char)(0xc0 | c >> 6);
  } else {
    if (c < 0x10000) {
      *to++ = (char)(0xe0 | c >> 12);
    } else {
      *to++ = (char)(0xf0 | c >> 18);
      *to++ = (char)(0x80 | (c >> 12 & 0x3f));
    }
    *to++ = (char)(0x80 | (c >> 6 & 0x3f));
  }
  *to++ = (char)(0x80 | (c & 0x3f));
  return to;
}

/* ---- Packed tables ----
   What pipelines of tokenizers ask about characters beyond that: kept as text in the header, and
   laid out in memory by the load of a tokenizer that needs it. */

typedef enum tfmi_category { /* general categories, as far as patterns tell them apart */
  TFMI_CAT_OTHER, TFMI_CAT_LU, TFMI_CAT_LL, TFMI_CAT_LT, TFMI_CAT_LM, TFMI_CAT_LO, TFMI_CAT_M,
  TFMI_CAT_ND, TFMI_CAT_NX, TFMI_CAT_PC, TFMI_CAT_PX, TFMI_CAT_S, TFMI_CAT_SPACE
} tfmi_category;

typedef enum tfmi_cluster { /* classes of characters in grapheme clusters */
  TFMI_CLUSTER_OTHER, TFMI_CLUSTER_CONTROL, TFMI_CLUSTER_PREPEND, TFMI_CLUSTER_PICTURE,
  TFMI_CLUSTER_CONSONANT, TFMI_CLUSTER_L, TFMI_CLUSTER_V, TFMI_CLUSTER_T,
  TFMI_CLUSTER_SPACING,    /* from here on they join what is before them */
  TFMI_CLUSTER_EXTEND,
  TFMI_CLUSTER_NON_JOINER, /* extends pictures, but no conjuncts */
  TFMI_CLUSTER_LINKER, TFMI_CLUSTER_JOINER,
  TFMI_CLUSTER_LV, TFMI_CLUSTER_LVT /* computed */
} tfmi_cluster;

enum { TFMI_CODES = 0x110000, TFMI_PAGES = TFMI_CODES / 256, TFMI_MAP_MOST = 32 };

typedef enum tfmi_charset_name {
  TFMI_CHARS_CATEGORY, TFMI_CHARS_CLUSTER, TFMI_CHARS_WORD, TFMI_CHARS_NUMERIC,
  TFMI_CHARS_PUNCTUATION, TFMI_CHARS_MARK, TFMI_CHARS_COMBINING, TFMI_CHARS_LOWER, TFMI_CHARS_NFD,
  TFMI_CHARS_NFKD, TFMI_CHARSETS
} tfmi_charset_name;

typedef enum tfmi_packing {
  TFMI_PACKED_TOGGLES, /* lengths of the runs outside and inside a set, by turns */
  TFMI_PACKED_RUNS,    /* of each run its length times 16 plus its value */
  TFMI_PACKED_PAIRS,   /* of each run its length, then its value */
  TFMI_PACKED_MAP      /* of each code the characters that it becomes: see tfmi_charset_map */
} tfmi_packing;

static const struct tfmi_charset_row {
  const char *const *rows;
  tfmi_packing packing;
} tfmi_charset_rows[TFMI_CHARSETS] = {
  {tfmi_packed_category, TFMI_PACKED_RUNS},     {tfmi_packed_cluster, TFMI_PACKED_RUNS},
  {tfmi_packed_word, TFMI_PACKED_TOGGLES},      {tfmi_packed_numeric, TFMI_PACKED_TOGGLES},
  {tfmi_packed_punctuation, TFMI_PACKED_TOGGLES}, {tfmi_packed_mark, TFMI_PACKED_TOGGLES},
  {tfmi_packed_combining, TFMI_PACKED_PAIRS},   {tfmi_packed_lower, TFMI_PACKED_MAP},
  {tfmi_packed_nfd, TFMI_PACKED_MAP},           {tfmi_packed_nfkd, TFMI_PACKED_MAP},
};

typedef struct tfmi_charset { /* a value for each code point */
  uint16_t *cell;             /* [pages][256]; neighbouring equal pages are one */
  uint32_t *begin, *target;   /* of a map: value v > 0 becomes target[begin[v-1] .. begin[v]) */
  uint8_t *flag;              /* [v-1] */
  uint32_t values;
  uint16_t page[TFMI_PAGES];
} tfmi_charset;

static uint32_t tfmi_charset_at(const tfmi_charset *set, uint32_t code) {
  return code < TFMI_CODES ? set->cell[(size_t)set->page[code >> 8] << 8 | (code & 255)] : 0;
}

typedef struct tfmi_numbers {
  const char *const *row;
  const char *at;
} tfmi_numbers;

/* The next number in base 32, lowest digit first, digits with 32 added where it goes on. The digits
   are the characters from ( to i, but for ? and \. False at the end. */
static bool tfmi_packed_next(tfmi_numbers *p, uint32_t *number) {
  uint32_t shift = 0, digit;
  *number = 0;
  do {
    if (p->at && !*p->at) p->at = *++p->row;
    if (!p->at) return false;
    digit = (uint32_t)(*p->at - '(' - (*p->at > '?') - (*p->at > '\\'));
    p->at++;
    *number |= (digit & 31) << shift;
    shift += 5;
  } while (digit & 32);
  return true;
}

static void tfmi_charset_fill(uint16_t *value, uint32_t *code, uint32_t count, uint32_t with) {
  for (; count && *code < TFMI_CODES; count--) value[(*code)++] = (uint16_t)with;
}

/* Of each code: the distance from the last, twice the number of its targets plus a flag, and the
   targets relative to those of the last, the lowest bit for the sign. Where there is but one it is
   taken to have moved on with its code. */
static void tfmi_charset_map(tfmi_load *l, tfmi_charset *set, tfmi_numbers p, uint16_t *value) {
  uint32_t before[TFMI_MAP_MOST] = {0}, code = 0, step, head, delta, i, used = 0;
  tfmi_numbers count = p;
  uint64_t numbers = 0;
  while (tfmi_packed_next(&count, &step)) numbers++;
  set->begin = TFMI_NEW(uint32_t, tfmi_keep(l, numbers, sizeof *set->begin));
  set->target = TFMI_NEW(uint32_t, tfmi_keep(l, numbers, sizeof *set->target));
  set->flag = TFMI_NEW(uint8_t, tfmi_keep(l, numbers, 1));
  while (tfmi_packed_next(&p, &step) && tfmi_packed_next(&p, &head)) {
    code += step;
    if (head >> 1 == 1) before[0] += step;
    set->flag[set->values] = head & 1;
    for (i = 0; i < head >> 1 && tfmi_packed_next(&p, &delta); i++)
      set->target[used++] = before[i] += (delta >> 1) ^ (0u - (delta & 1));
    value[code] = (uint16_t)++set->values;
    set->begin[set->values] = used;
  }
}

static void tfmi_charset_pages(tfmi_load *l, tfmi_charset *set, const uint16_t *value) {
  size_t pages = 0, i;
  const size_t bytes = 256 * sizeof *value;
  for (i = 0; i < TFMI_PAGES; i++)
    pages += i == 0 || memcmp(value + 256 * i, value + 256 * (i - 1), bytes) != 0;
  set->cell = TFMI_NEW(uint16_t, tfmi_keep(l, pages, bytes));
  for (i = 0, pages = 0; i < TFMI_PAGES; i++) {
    bool fresh = i == 0 || memcmp(value + 256 * i, value + 256 * (i - 1), bytes) != 0;
    if (fresh) memcpy(set->cell + 256 * pages++, value + 256 * i, bytes);
    set->page[i] = (uint16_t)(pages - 1);
  }
}

static tfmi_charset *tfmi_charset_make(tfmi_load *l, tfmi_charset_name name) {
  const struct tfmi_charset_row *row = &tfmi_charset_rows[name];
  tfmi_charset *set = TFMI_NEW(tfmi_charset, tfmi_keep(l, 1, sizeof *set));
  uint16_t *value = TFMI_NEW(uint16_t, tfmi_scratch(l, TFMI_CODES, sizeof *value));
  uint32_t code = 0, n, with = 1;
  tfmi_numbers p;
  p.row = row->rows;
  p.at = *row->rows;
  if (row->packing == TFMI_PACKED_MAP) tfmi_charset_map(l, set, p, value);
  while (row->packing != TFMI_PACKED_MAP && tfmi_packed_next(&p, &n)) {
    with = row->packing == TFMI_PACKED_TOGGLES ? !with : n & 15;
    if (row->packing == TFMI_PACKED_RUNS) n >>= 4;
    if (row->packing == TFMI_PACKED_PAIRS && !tfmi_packed_next(&p, &with)) break;
    tfmi_charset_fill(value, &code, n, with);
  }
  tfmi_charset_pages(l, set, value);
  tfmi_release(l, value);
  return set;
}

#if TFMI_COMPILES_COLD
#pragma GCC push_options
#pragma GCC optimize("O1")
#endif
/* =================================================================================================
   >>json   a strict pull parser
   =================================================================================================

   Reads RFC 8259 text straight through, without a tree, recursion or limits but a depth of 64. The
   caller asks for what it expects; anything else fails the load with what, the position and what
   was expected. Numbers do not depend on the locale.

     tfmi_json_object(&j);
     while (tfmi_json_member(&j, &key))
       if (tfmi_text_is(key, "n_layer")) layers = tfmi_json_integer(&j, 1, 4096); else
       tfmi_json_skip(&j);                                                                     */

typedef struct tfmi_text { /* bytes, not terminated; may hold NULs */
  const char *at;
  size_t n;
} tfmi_text;

typedef enum tfmi_json_kind {
  TFMI_JSON_OBJECT, TFMI_JSON_ARRAY, TFMI_JSON_STRING, TFMI_JSON_NUMBER, TFMI_JSON_TRUE,
  TFMI_JSON_FALSE, TFMI_JSON_NULL
} tfmi_json_kind;

typedef struct tfmi_json {
  tfmi_load *load;
  const char *what; /* "config.json" */
  const char *begin, *at, *end;
  int depth;
  bool first; /* nothing has been read yet of the innermost object or array */
} tfmi_json;

static tfmi_text tfmi_text_of(const char *word);
static bool tfmi_text_is(tfmi_text text, const char *word);
static void tfmi_json_init(tfmi_json *j, tfmi_load *l, const char *what, const void *text,
                           size_t n);
/* Fails with what, the byte offset and the message. */
static TFMI_NORETURN TFMI_PRINTF(3, 4) void tfmi_json_fail(tfmi_json *j, tfm_status status,
                                                           const char *format, ...);
static tfmi_json_kind tfmi_json_peek(tfmi_json *j); /* of the next value; fails on anything else */
static void tfmi_json_object(tfmi_json *j);         /* enters {; then tfmi_json_member */
static bool tfmi_json_member(tfmi_json *j, tfmi_text *key); /* false: } has been read */
static void tfmi_json_array(tfmi_json *j);          /* enters [; then tfmi_json_element */
static bool tfmi_json_element(tfmi_json *j);        /* false: ] has been read */
static tfmi_text tfmi_json_string(tfmi_json *j);    /* in place, or scratch when it has escapes */
static double tfmi_json_number(tfmi_json *j);
static int64_t tfmi_json_integer(tfmi_json *j, int64_t low, int64_t high); /* 12, not 12.0 or 1e3 */
static bool tfmi_json_bool(tfmi_json *j);
static bool tfmi_json_null(tfmi_json *j);           /* reads null if it is next */
static void tfmi_json_skip(tfmi_json *j);           /* one value of any kind */
static void tfmi_json_finish(tfmi_json *j);         /* nothing but white space may follow */

static tfmi_text tfmi_text_of(const char *word) {
  tfmi_text text;
  text.at = word;
  text.n = strlen(word);
  return text;
}

static bool tfmi_text_is(tfmi_text text, const char *word) {
  return strlen(word) == text.n && memcmp(text.at, word, text.n) == 0;
}

static void tfmi_json_init(tfmi_json *j, tfmi_load *l, const char *what, const void *text,
                           size_t n) {
  memset(j, 0, sizeof *j);
  j->load = l;
  j->what = what;
  j->begin = j->at = (const char *)text;
  j->end = j->begin + n;
}

static TFMI_NORETURN TFMI_PRINTF(3, 4) void tfmi_json_fail(tfmi_json *j, tfm_status status,
                                                           const char *format, ...) {
  char text[320];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  tfmi_fail(j->load, status, "%s, byte %llu: %s", j->what, (unsigned long long)(j->at - j->begin),
            text);
}

/* ---- Characters ---- */

static char tfmi_json_next(tfmi_json *j) { /* the next character that is not white space, or NUL */
  while (j->at < j->end && (*j->at == ' ' || *j->at == '\t' || *j->at == '\n' || *j->at == '\r'))
    j->at++;
  return (char)(j->at < j->end ? *j->at : 0);
}

static TFMI_NORETURN void tfmi_json_expected(tfmi_json *j, const char *expected) {
  char found = tfmi_json_next(j);
  if (j->at == j->end)
    tfmi_json_fail(j, TFM_E_FORMAT, "expected %s, found the end of the text", expected);
  if (found > ' ' && found < 127)
    tfmi_json_fail(j, TFM_E_FORMAT, "expected %s, found '%c'", expected, found);
  tfmi_json_fail(j, TFM_E_FORMAT, "expected %s, found byte 0x%02x", expected, (uint8_t)found);
}

static void tfmi_json_word(tfmi_json *j, const char *word) { /* white space is behind us */
  size_t n = strlen(word);
  if ((size_t)(j->end - j->at) < n || memcmp(j->at, word, n) != 0) tfmi_json_expected(j, word);
  j->at += n;
}

static tfmi_json_kind tfmi_json_peek(tfmi_json *j) {
  switch (tfmi_json_next(j)) {
    case '{': return TFMI_JSON_OBJECT;
    case '[': return TFMI_JSON_ARRAY;
    case '"': return TFMI_JSON_STRING;
    case 't': return TFMI_JSON_TRUE;
    case 'f': return TFMI_JSON_FALSE;
    case 'n': return TFMI_JSON_NULL;
    case '-': case '0': case '1': case '2': case '3': case '4': case '5': case '6': case '7':
    case '8': case '9': return TFMI_JSON_NUMBER;
    default: tfmi_json_expected(j, "a value");
  }
}

/* ---- Objects and arrays ---- */

static void tfmi_json_enter(tfmi_json *j, char bracket, const char *expected) {
  if (tfmi_json_next(j) != bracket) tfmi_json_expected(j, expected);
  if (j->depth == 64)
    tfmi_json_fail(j, TFM_E_FORMAT, "objects and arrays lie more than 64 deep in each other");
  j->depth++;
  j->at++;
  j->first = true;
}

/* Steps over the comma to the next item; false when the closing bracket has been read. */
static bool tfmi_json_item(tfmi_json *j, char bracket, const char *expected) {
  char c = tfmi_json_next(j);
  if (c == bracket) {
    j->at++;
    j->depth--;
    j->first = false;
    return false;
  }
  if (!j->first) {
    if (c != ',') tfmi_json_expected(j, expected);
    j->at++;
  }
  j->first = false;
  return true;
}

static void tfmi_json_object(tfmi_json *j) { tfmi_json_enter(j, '{', "an object"); }
static void tfmi_json_array(tfmi_json *j) { tfmi_json_enter(j, '[', "an array"); }
static bool tfmi_json_element(tfmi_json *j) { return tfmi_json_item(j, ']', "',' or ']'"); }

static bool tfmi_json_member(tfmi_json *j, tfmi_text *key) {
  if (!tfmi_json_item(j, '}', "',' or '}'")) return false;
  *key = tfmi_json_string(j);
  if (tfmi_json_next(j) != ':') tfmi_json_expected(j, "':'");
  j->at++;
  return true;
}

/* ---- Strings ---- */

static uint32_t tfmi_json_hex4(tfmi_json *j) {
  uint32_t value = 0;
  int i;
  for (i = 0; i < 4; i++, j->at++) {
    char c = (char)(j->at < j->end ? *j->at : 0);
    if (c >= '0' && c <= '9') value = value << 4 | (uint32_t)(c - '0');
    else if (c >= 'a' && c <= 'f') value = value << 4 | (uint32_t)(c - 'a' + 10);
    else if (c >= 'A' && c <= 'F') value = value << 4 | (uint32_t)(c - 'A' + 10);
    else tfmi_json_fail(j, TFM_E_FORMAT, "expected four hexadecimal digits after \\u");
  }
  return value;
}

/* The code point of \uXXXX, or of a surrogate pair; half a pair has no UTF-8 form. */
static uint32_t tfmi_json_code_point(tfmi_json *j) {
  uint32_t high = tfmi_json_hex4(j), low = 0;
  if (high < 0xd800 || high > 0xdfff) return high;
  if (high < 0xdc00 && j->end - j->at >= 6 && j->at[0] == '\\' && j->at[1] == 'u') {
    j->at += 2;
    low = tfmi_json_hex4(j);
  }
  if (low < 0xdc00 || low > 0xdfff)
    tfmi_json_fail(j, TFM_E_FORMAT, "\\u%04x is half of a surrogate pair", (unsigned)high);
  return 0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00);
}

static char *tfmi_json_escape(tfmi_json *j, char *to) { /* at the character after the backslash */
  static const char from[] = "\"\\/bfnrt", into[] = "\"\\/\b\f\n\r\t";
  char c = (char)(j->at < j->end ? *j->at : 0);
  const char *found = c ? strchr(from, c) : NULL;
  if (c == 'u') {
    j->at++;
    return tfmi_put_utf8(to, tfmi_json_code_point(j));
  }
  if (!found) tfmi_json_fail(j, TFM_E_FORMAT, "unknown escape after a backslash in a string");
  j->at++;
  *to++ = into[found - from];
  return to;
}

/* Finds the closing quote and checks what lies before it; true when there are escapes. */
static bool tfmi_json_scan_string(tfmi_json *j) {
  bool escapes = false;
  char ignored[4];
  while (j->at < j->end && *j->at != '"') {
    tfmi_rune r = tfmi_rune_at(j->at, (size_t)(j->end - j->at));
    if ((uint8_t)*j->at < ' ')
      tfmi_json_fail(j, TFM_E_FORMAT, "control character 0x%02x in a string", (uint8_t)*j->at);
    if (r.state != TFMI_RUNE_WHOLE) tfmi_json_fail(j, TFM_E_FORMAT, "a string is not UTF-8");
    j->at += r.bytes;
    if (j->at[-1] != '\\') continue;
    tfmi_json_escape(j, ignored);
    escapes = true;
  }
  if (j->at == j->end) tfmi_json_fail(j, TFM_E_FORMAT, "a string does not end");
  return escapes;
}

static tfmi_text tfmi_json_string(tfmi_json *j) {
  tfmi_text text;
  const char *begin, *end;
  char *to;
  if (tfmi_json_next(j) != '"') tfmi_json_expected(j, "a string");
  text.at = begin = ++j->at;
  if (!tfmi_json_scan_string(j)) {
    text.n = (size_t)(j->at++ - begin);
    return text;
  }
  end = j->at;
  text.at = to = (char *)tfmi_scratch(j->load, (uint64_t)(end - begin), 1); /* text only shrinks */
  for (j->at = begin; j->at < end;)
    if (*j->at == '\\') {
      j->at++;
      to = tfmi_json_escape(j, to);
    } else {
      *to++ = *j->at++;
    }
  text.n = (size_t)(to - text.at);
  j->at = end + 1;
  return text;
}

/* ---- Numbers ---- */

typedef struct tfmi_json_digits { /* (-1)^negative * mantissa * 10^exponent */
  uint64_t mantissa;
  int64_t exponent;
  bool negative, whole; /* whole: neither a point nor an exponent, and nothing dropped */
} tfmi_json_digits;

/* One run of digits. Beyond 19 they no longer fit the mantissa: dropped, the exponent tells. */
static void tfmi_json_run(tfmi_json *j, tfmi_json_digits *d, bool fraction) {
  if (j->at == j->end || *j->at < '0' || *j->at > '9') tfmi_json_expected(j, "a digit");
  for (; j->at < j->end && *j->at >= '0' && *j->at <= '9'; j->at++) {
    bool fits = d->mantissa < UINT64_C(1000000000000000000);
    if (fits) d->mantissa = d->mantissa * 10 + (uint64_t)(*j->at - '0');
    else d->whole = false;
    d->exponent += (fits ? 0 : 1) - (fraction ? 1 : 0);
  }
}

static int64_t tfmi_json_exponent(tfmi_json *j) {
  tfmi_json_digits e = {0, 0, false, true};
  if (j->at < j->end && (*j->at == '+' || *j->at == '-')) e.negative = *j->at++ == '-';
  tfmi_json_run(j, &e, false);
  if (!e.whole || e.mantissa > 1000000) e.mantissa = 1000000; /* infinite, or zero, either way */
  return e.negative ? -(int64_t)e.mantissa : (int64_t)e.mantissa;
}

static tfmi_json_digits tfmi_json_digits_of(tfmi_json *j) {
  tfmi_json_digits d = {0, 0, false, true};
  if (tfmi_json_peek(j) != TFMI_JSON_NUMBER) tfmi_json_expected(j, "a number");
  if (*j->at == '-') {
    d.negative = true;
    j->at++;
  }
  if (j->at + 1 < j->end && *j->at == '0' && j->at[1] >= '0' && j->at[1] <= '9')
    tfmi_json_fail(j, TFM_E_FORMAT, "a number begins with a superfluous 0");
  tfmi_json_run(j, &d, false);
  if (j->at < j->end && *j->at == '.') {
    d.whole = false;
    j->at++;
    tfmi_json_run(j, &d, true);
  }
  if (j->at < j->end && (*j->at == 'e' || *j->at == 'E')) {
    d.whole = false;
    j->at++;
    d.exponent += tfmi_json_exponent(j);
  }
  return d;
}

/* mantissa * 10^exponent rounded once: in 128 bits, the highest of them set, so that the truncation
   of all steps together stays far below half a unit of the 53 bits kept. */
static double tfmi_decimal(uint64_t mantissa, int64_t exponent) {
  uint32_t w[5] = {0, 0, 0, 0, 0}; /* least significant first; w[4] is room for a carry */
  uint64_t top, rest, sticky = 0;
  int binary = 0, i;
  if (mantissa == 0 || exponent < -400) return 0;
  if (exponent > 400) return HUGE_VAL;
  w[2] = (uint32_t)mantissa;
  w[3] = (uint32_t)(mantissa >> 32);
  for (;;) {
    while (w[4]) { /* right, to 128 bits */
      sticky |= w[0] & 1;
      for (i = 0; i < 4; i++) w[i] = w[i] >> 1 | w[i + 1] << 31;
      w[4] >>= 1;
      binary++;
    }
    while (!(w[3] >> 31)) { /* left, to 128 bits */
      for (i = 3; i > 0; i--) w[i] = w[i] << 1 | w[i - 1] >> 31;
      w[0] <<= 1;
      binary--;
    }
    if (exponent == 0) break;
    rest = 0;
    if (exponent > 0) {
      for (i = 0; i < 5; i++, rest >>= 32) w[i] = (uint32_t)(rest += (uint64_t)w[i] * 10);
      exponent--;
    } else {
      for (i = 3; i >= 0; i--) {
        rest = (rest % 10) << 32 | w[i];
        w[i] = (uint32_t)(rest / 10);
      }
      sticky |= rest % 10;
      exponent++;
    }
  }
  top = (uint64_t)w[3] << 32 | w[2];
  sticky |= w[1] | w[0];
  rest = top & 0x7ff;
  top >>= 11;
  if (rest > 0x400 || (rest == 0x400 && (sticky || (top & 1)))) top++;
  return ldexp((double)top, binary + 11);
}

static double tfmi_json_number(tfmi_json *j) {
  tfmi_json_digits d = tfmi_json_digits_of(j);
  double value = tfmi_decimal(d.mantissa, d.exponent);
  if (value > DBL_MAX) tfmi_json_fail(j, TFM_E_FORMAT, "a number is too large for a double");
  return d.negative ? -value : value;
}

static int64_t tfmi_json_integer(tfmi_json *j, int64_t low, int64_t high) {
  tfmi_json_digits d = tfmi_json_digits_of(j);
  int64_t value;
  if (!d.whole || d.mantissa > INT64_MAX)
    tfmi_json_fail(j, TFM_E_FORMAT, "expected a whole number, found a fraction or over 18 digits");
  value = d.negative ? -(int64_t)d.mantissa : (int64_t)d.mantissa;
  if (value < low || value > high)
    tfmi_json_fail(j, TFM_E_FORMAT, "expected a number from %lld to %lld, found %lld",
                   (long long)low, (long long)high, (long long)value);
  return value;
}

/* ---- Words, and what nobody asked for ---- */

static bool tfmi_json_bool(tfmi_json *j) {
  tfmi_json_kind kind = tfmi_json_peek(j);
  if (kind != TFMI_JSON_TRUE && kind != TFMI_JSON_FALSE) tfmi_json_expected(j, "true or false");
  tfmi_json_word(j, kind == TFMI_JSON_TRUE ? "true" : "false");
  return kind == TFMI_JSON_TRUE;
}

static bool tfmi_json_null(tfmi_json *j) {
  if (tfmi_json_peek(j) != TFMI_JSON_NULL) return false;
  tfmi_json_word(j, "null");
  return true;
}

static void tfmi_json_skip_string(tfmi_json *j) {
  j->at++;
  tfmi_json_scan_string(j);
  j->at++;
}

/* Iterative: bit d of `object` tells what encloses at depth d below the start. */
static void tfmi_json_skip(tfmi_json *j) {
  uint64_t object = 0;
  int start = j->depth;
  tfmi_text key;
  do {
    bool more = true;
    switch (tfmi_json_peek(j)) {
      case TFMI_JSON_OBJECT:
        tfmi_json_object(j);
        object |= UINT64_C(1) << (j->depth - 1);
        break;
      case TFMI_JSON_ARRAY:
        tfmi_json_array(j);
        object &= ~(UINT64_C(1) << (j->depth - 1));
        break;
      case TFMI_JSON_STRING: tfmi_json_skip_string(j); break;
      case TFMI_JSON_NUMBER: tfmi_json_digits_of(j); break;
      case TFMI_JSON_NULL: tfmi_json_null(j); break;
      default: tfmi_json_bool(j);
    }
    while (j->depth > start && more) /* up, through all that ends here, to the next value */
      more = !(object >> (j->depth - 1) & 1 ? tfmi_json_member(j, &key) : tfmi_json_element(j));
  } while (j->depth > start);
}

static void tfmi_json_finish(tfmi_json *j) {
  tfmi_json_next(j);
  if (j->at != j->end) tfmi_json_expected(j, "the end of the text");
}

/* =================================================================================================
   >>gguf   the GGUF container, version 3
   =================================================================================================

   Magic, version, two counts; then key/value pairs, tensor descriptions, padding, the data section.
   tfmi_gguf_open walks all of it once and checks everything, so that who reads a value later can
   trust its lengths: a value is kept as a pointer into the file. Counts are compared with the bytes
   that are left before anything is allocated. Keys and tensors end up sorted, which is also how
   duplicates and overlapping tensors are found.

   A file without tensors (a vocabulary) is a valid container. Refused are nested arrays, booleans
   other than 0 and 1, names with a NUL, and alignments that are no power of two from 8 to 2^20. */

typedef struct tfmi_tensor { /* of any format; lies in a file */
  tfmi_text name;
  tfm_type type;         /* TFM_TYPE_DEFAULT: none of ours, only its name is known */
  const char *type_name;
  uint64_t rank, dims[4]; /* slowest first; beyond the fourth they are not kept */
  int32_t file;           /* which of the model's files it lies in */
  bool used;              /* something asked for it: */
  bool bias;
  /* as this (a tfmi_slot) of this layer, and of this expert; -1: as the scales of another */
  int32_t slot, layer, expert;
  const uint8_t *data;
  size_t bytes;
  tfm_scales scales;      /* another tensor's, found beside it */
} tfmi_tensor;

typedef struct tfmi_gguf_value {
  uint32_t type, element; /* TFMI_GGUF_...; element: of an array */
  uint64_t count;         /* elements; 1 unless an array */
  const uint8_t *at;      /* the first element; a string begins with its length */
  uint64_t bytes;
} tfmi_gguf_value;

typedef struct tfmi_gguf_entry {
  tfmi_text key;
  tfmi_gguf_value value;
} tfmi_gguf_entry;

typedef struct tfmi_gguf { /* all in scratch memory */
  tfmi_load *load;
  const uint8_t *at, *end; /* while reading */
  tfmi_gguf_entry *entry;  /* [entries], sorted by key */
  tfmi_tensor *tensor;     /* [tensors], sorted by name */
  uint64_t entries, tensors, alignment;
} tfmi_gguf;

enum {
  TFMI_GGUF_U8, TFMI_GGUF_I8, TFMI_GGUF_U16, TFMI_GGUF_I16, TFMI_GGUF_U32, TFMI_GGUF_I32,
  TFMI_GGUF_F32, TFMI_GGUF_BOOL, TFMI_GGUF_STRING, TFMI_GGUF_ARRAY, TFMI_GGUF_U64, TFMI_GGUF_I64,
  TFMI_GGUF_F64
};

static const struct tfmi_gguf_type_row {
  const char *name;
  uint8_t bytes;
} tfmi_gguf_types[] = { /* by number */
  {"u8", 1}, {"i8", 1}, {"u16", 2}, {"i16", 2}, {"u32", 4}, {"i32", 4}, {"f32", 4}, {"bool", 1},
  {"string", 0}, {"array", 0}, {"u64", 8}, {"i64", 8}, {"f64", 8},
};

static const struct tfmi_ggml_row {
  uint32_t id;
  const char *name;
  uint16_t block_values, block_bytes;
  tfm_type type;
} tfmi_ggml_types[] = {
  {0, "F32", 1, 4, TFM_F32},         {1, "F16", 1, 2, TFM_F16},
  {2, "Q4_0", 32, 18, TFM_Q4_0},     {3, "Q4_1", 32, 20, TFM_Q4_1},
  {6, "Q5_0", 32, 22, TFM_Q5_0},     {7, "Q5_1", 32, 24, TFM_Q5_1},
  {8, "Q8_0", 32, 34, TFM_Q8_0},     {9, "Q8_1", 32, 36, TFM_TYPE_DEFAULT},
  {10, "Q2_K", 256, 84, TFM_TYPE_DEFAULT},  {11, "Q3_K", 256, 110, TFM_TYPE_DEFAULT},
  {12, "Q4_K", 256, 144, TFM_Q4_K},  {13, "Q5_K", 256, 176, TFM_Q5_K},
  {14, "Q6_K", 256, 210, TFM_Q6_K},  {15, "Q8_K", 256, 292, TFM_TYPE_DEFAULT},
  {16, "IQ2_XXS", 256, 66, TFM_TYPE_DEFAULT}, {17, "IQ2_XS", 256, 74, TFM_TYPE_DEFAULT},
  {18, "IQ3_XXS", 256, 98, TFM_TYPE_DEFAULT}, {19, "IQ1_S", 256, 50, TFM_TYPE_DEFAULT},
  {20, "IQ4_NL", 32, 18, TFM_TYPE_DEFAULT},   {21, "IQ3_S", 256, 110, TFM_TYPE_DEFAULT},
  {22, "IQ2_S", 256, 82, TFM_TYPE_DEFAULT},   {23, "IQ4_XS", 256, 136, TFM_TYPE_DEFAULT},
  {24, "I8", 1, 1, TFM_TYPE_DEFAULT},         {25, "I16", 1, 2, TFM_TYPE_DEFAULT},
  {26, "I32", 1, 4, TFM_TYPE_DEFAULT},        {27, "I64", 1, 8, TFM_TYPE_DEFAULT},
  {28, "F64", 1, 8, TFM_TYPE_DEFAULT},        {29, "IQ1_M", 256, 56, TFM_TYPE_DEFAULT},
  {30, "BF16", 1, 2, TFM_BF16},               {34, "TQ1_0", 256, 54, TFM_TYPE_DEFAULT},
  {35, "TQ2_0", 256, 66, TFM_TYPE_DEFAULT},   {39, "MXFP4", 32, 17, TFM_TYPE_DEFAULT},
};

/* ---- Names: ordered, and fit to be printed ---- */

static int tfmi_text_order(tfmi_text a, tfmi_text b) {
  size_t n = a.n < b.n ? a.n : b.n;
  int order = n ? memcmp(a.at, b.at, n) : 0;
  return order ? order : a.n < b.n ? -1 : a.n > b.n;
}

typedef struct tfmi_plain_text { char text[100]; } tfmi_plain_text;

/* For a sentence: cut when long, what is not printable ASCII as '?'. */
static tfmi_plain_text tfmi_plain(tfmi_text name) {
  tfmi_plain_text s;
  size_t n = name.n < sizeof s.text - 4 ? name.n : sizeof s.text - 4, i;
  for (i = 0; i < n; i++)
    s.text[i] = (char)(name.at[i] < ' ' || name.at[i] > '~' ? '?' : name.at[i]);
  memcpy(s.text + n, n < name.n ? "..." : "", n < name.n ? 4 : 1);
  return s;
}

typedef int (*tfmi_order)(const void *a, const void *b);

static void tfmi_swap(uint8_t *a, uint8_t *b, size_t bytes) {
  for (; bytes; bytes--, a++, b++) {
    uint8_t t = *a;
    *a = *b;
    *b = t;
  }
}

/* Heap sort: in place, n log n on any input, no recursion and, unlike some a qsort, no malloc. */
static void tfmi_sort(void *items, size_t n, size_t size, tfmi_order order) {
  uint8_t *a = (uint8_t *)items;
  size_t begin = n / 2, end = n, root, child;
  while (end > 1) {
    if (begin) begin--; /* still building the heap */
    else tfmi_swap(a, a + --end * size, size);
    for (root = begin; (child = 2 * root + 1) < end; root = child) {
      if (child + 1 < end && order(a + child * size, a + (child + 1) * size) < 0) child++;
      if (order(a + root * size, a + child * size) >= 0) break;
      tfmi_swap(a + root * size, a + child * size, size);
    }
  }
}

static int tfmi_name_order(const void *a, const void *b) {
  return tfmi_text_order(*(const tfmi_text *)a, *(const tfmi_text *)b);
}

/* Sorts names; the same one twice fails. */
static void tfmi_names_unique(tfmi_load *l, const char *what, tfmi_text *name, uint64_t count) {
  uint64_t i;
  tfmi_sort(name, (size_t)count, sizeof *name, tfmi_name_order);
  for (i = 1; i < count; i++)
    if (tfmi_text_order(name[i - 1], name[i]) == 0)
      tfmi_fail(l, TFM_E_FORMAT, "%s: \"%s\" is there twice", what, tfmi_plain(name[i]).text);
}

static int tfmi_tensor_name_order(const void *a, const void *b) {
  return tfmi_text_order(((const tfmi_tensor *)a)->name, ((const tfmi_tensor *)b)->name);
}

/* By place, the empty ones first, so that only real overlaps look like ones. */
static int tfmi_tensor_place_order(const void *a, const void *b) {
  const tfmi_tensor *s = (const tfmi_tensor *)a, *t = (const tfmi_tensor *)b;
  if (s->data != t->data) return s->data < t->data ? -1 : 1;
  return s->bytes < t->bytes ? -1 : s->bytes > t->bytes;
}

/* Sorts by name; the same name twice fails. */
static void tfmi_tensors_sort(tfmi_load *l, tfmi_tensor *tensor, uint64_t count) {
  uint64_t i;
  tfmi_sort(tensor, (size_t)count, sizeof *tensor, tfmi_tensor_name_order);
  for (i = 1; i < count; i++)
    if (tfmi_text_order(tensor[i - 1].name, tensor[i].name) == 0)
      tfmi_fail(l, TFM_E_FORMAT, "tensor %s is there twice; a name must be unique",
                tfmi_plain(tensor[i].name).text);
}

/* ---- Reading straight through ---- */

static const uint8_t *tfmi_gguf_take(tfmi_gguf *g, uint64_t bytes, const char *what) {
  const uint8_t *at = g->at;
  if (bytes > (uint64_t)(g->end - at))
    tfmi_fail(g->load, TFM_E_FORMAT, "%s needs %llu bytes, but the file ends after %llu", what,
              (unsigned long long)bytes, (unsigned long long)(g->end - at));
  g->at += bytes;
  return at;
}

static uint32_t tfmi_gguf_u32(tfmi_gguf *g, const char *what) {
  return tfmi_u32(tfmi_gguf_take(g, 4, what));
}

static uint64_t tfmi_gguf_u64(tfmi_gguf *g, const char *what) {
  return tfmi_u64(tfmi_gguf_take(g, 8, what));
}

/* A count of things that take at least `least` bytes each. */
static uint64_t tfmi_gguf_count(tfmi_gguf *g, uint64_t count, uint64_t least, const char *what) {
  uint64_t room = (uint64_t)(g->end - g->at) / least;
  if (count > room)
    tfmi_fail(g->load, TFM_E_FORMAT, "%llu %s are announced, but the file has room for %llu",
              (unsigned long long)count, what, (unsigned long long)room);
  return count;
}

static const uint8_t *tfmi_gguf_text_at(const uint8_t *at, tfmi_text *out) {
  out->n = (size_t)tfmi_u64(at);
  out->at = (const char *)at + 8;
  return at + 8 + out->n;
}

static tfmi_text tfmi_gguf_name(tfmi_gguf *g, uint64_t most, const char *what) {
  tfmi_text name;
  uint64_t n = tfmi_gguf_u64(g, what);
  name.at = (const char *)tfmi_gguf_take(g, n, what);
  name.n = (size_t)n;
  if (n == 0 || n > most)
    tfmi_fail(g->load, TFM_E_FORMAT, "%s has %llu bytes, expected 1 to %llu", what,
              (unsigned long long)n, (unsigned long long)most);
  if (memchr(name.at, 0, name.n))
    tfmi_fail(g->load, TFM_E_FORMAT, "%s \"%s\" contains a NUL", what, tfmi_plain(name).text);
  return name;
}

/* ---- Keys and values ---- */

static void tfmi_gguf_elements(tfmi_gguf *g, tfmi_text key, uint32_t type, uint64_t count) {
  const uint8_t *at;
  uint64_t i;
  if (type == TFMI_GGUF_STRING) {
    for (i = 0; i < count; i++) tfmi_gguf_take(g, tfmi_gguf_u64(g, "a string"), "a string");
    return;
  }
  at = tfmi_gguf_take(g, count * tfmi_gguf_types[type].bytes, "a value"); /* count was checked */
  for (i = 0; type == TFMI_GGUF_BOOL && i < count; i++)
    if (at[i] > 1)
      tfmi_fail(g->load, TFM_E_FORMAT, "key %s is a bool of value %d, expected 0 or 1",
                tfmi_plain(key).text, at[i]);
}

static void tfmi_gguf_array(tfmi_gguf *g, tfmi_text key, tfmi_gguf_value *v) {
  uint64_t least;
  v->element = tfmi_gguf_u32(g, "an array");
  v->count = tfmi_gguf_u64(g, "an array");
  if (v->element == TFMI_GGUF_ARRAY)
    tfmi_fail(g->load, TFM_E_UNSUPPORTED, "key %s is an array of arrays, expected of plain values",
              tfmi_plain(key).text);
  if (v->element >= (uint32_t)TFMI_COUNT(tfmi_gguf_types))
    tfmi_fail(g->load, TFM_E_FORMAT, "key %s is an array of type %u, expected 0 to 12",
              tfmi_plain(key).text, (unsigned)v->element);
  least = v->element == TFMI_GGUF_STRING ? 8 : tfmi_gguf_types[v->element].bytes;
  tfmi_gguf_count(g, v->count, least, "array elements");
}

static void tfmi_gguf_read_entry(tfmi_gguf *g, tfmi_gguf_entry *e) {
  tfmi_gguf_value *v = &e->value;
  e->key = tfmi_gguf_name(g, 65535, "a key");
  v->element = v->type = tfmi_gguf_u32(g, "a key's type");
  v->count = 1;
  if (v->type >= (uint32_t)TFMI_COUNT(tfmi_gguf_types))
    tfmi_fail(g->load, TFM_E_FORMAT, "key %s has type %u, expected 0 to 12",
              tfmi_plain(e->key).text, (unsigned)v->type);
  if (v->type == TFMI_GGUF_ARRAY) tfmi_gguf_array(g, e->key, v);
  v->at = g->at;
  tfmi_gguf_elements(g, e->key, v->element, v->count);
  v->bytes = (uint64_t)(g->at - v->at);
}

static int tfmi_gguf_key_order(const void *a, const void *b) {
  return tfmi_text_order(((const tfmi_gguf_entry *)a)->key, ((const tfmi_gguf_entry *)b)->key);
}

static void tfmi_gguf_read_entries(tfmi_gguf *g) {
  uint64_t i;
  g->entry = TFMI_NEW(tfmi_gguf_entry, tfmi_scratch(g->load, g->entries, sizeof *g->entry));
  for (i = 0; i < g->entries; i++) tfmi_gguf_read_entry(g, &g->entry[i]);
  tfmi_sort(g->entry, (size_t)g->entries, sizeof *g->entry, tfmi_gguf_key_order);
  for (i = 1; i < g->entries; i++)
    if (tfmi_text_order(g->entry[i - 1].key, g->entry[i].key) == 0)
      tfmi_fail(g->load, TFM_E_FORMAT, "key %s is there twice; a key must be unique",
                tfmi_plain(g->entry[i].key).text);
}

static const tfmi_gguf_value *tfmi_gguf_find(const tfmi_gguf *g, const char *key) {
  uint64_t low = 0, high = g->entries;
  tfmi_text text = tfmi_text_of(key);
  while (low < high) {
    uint64_t middle = low + (high - low) / 2;
    int order = tfmi_text_order(text, g->entry[middle].key);
    if (order == 0) return &g->entry[middle].value;
    if (order < 0) high = middle;
    else low = middle + 1;
  }
  return NULL;
}

static TFMI_NORETURN void tfmi_gguf_mistyped(const tfmi_gguf *g, const char *key,
                                             const tfmi_gguf_value *v, const char *expected) {
  tfmi_fail(g->load, TFM_E_FORMAT, "key %s has type %s, expected %s", key,
            tfmi_gguf_types[v->type].name, expected);
}

/* One whole number of any width; false when it is of another type. */
static bool tfmi_gguf_int_at(const tfmi_gguf *g, const char *key, uint32_t type, const uint8_t *at,
                             int64_t *out) {
  uint64_t u;
  switch (type) {
    case TFMI_GGUF_U8: *out = at[0]; return true;
    case TFMI_GGUF_I8: *out = (int8_t)at[0]; return true;
    case TFMI_GGUF_U16: *out = tfmi_u16(at); return true;
    case TFMI_GGUF_I16: *out = (int16_t)tfmi_u16(at); return true;
    case TFMI_GGUF_U32: *out = tfmi_u32(at); return true;
    case TFMI_GGUF_I32: *out = (int32_t)tfmi_u32(at); return true;
    case TFMI_GGUF_U64: case TFMI_GGUF_I64: break;
    default: return false;
  }
  u = tfmi_u64(at);
  if (type == TFMI_GGUF_U64 && u > INT64_MAX)
    tfmi_fail(g->load, TFM_E_FORMAT, "key %s is %llu, expected less than 2^63", key,
              (unsigned long long)u);
  *out = (int64_t)u;
  return true;
}

static bool tfmi_gguf_get_int(const tfmi_gguf *g, const char *key, int64_t *out) {
  const tfmi_gguf_value *v = tfmi_gguf_find(g, key);
  if (!v) return false;
  if (!tfmi_gguf_int_at(g, key, v->type, v->at, out)) tfmi_gguf_mistyped(g, key, v, "an integer");
  return true;
}

static bool tfmi_gguf_get_real(const tfmi_gguf *g, const char *key, double *out) {
  const tfmi_gguf_value *v = tfmi_gguf_find(g, key);
  uint64_t bits;
  if (!v) return false;
  if (v->type != TFMI_GGUF_F32 && v->type != TFMI_GGUF_F64) tfmi_gguf_mistyped(g, key, v, "f32");
  if (v->type == TFMI_GGUF_F32) {
    *out = (double)tfmi_f32(v->at);
  } else {
    bits = tfmi_u64(v->at);
    memcpy(out, &bits, sizeof *out);
  }
  return true;
}

static TFMI_UNUSED bool tfmi_gguf_get_bool(const tfmi_gguf *g, const char *key, bool *out) {
  const tfmi_gguf_value *v = tfmi_gguf_find(g, key);
  if (!v) return false;
  if (v->type != TFMI_GGUF_BOOL) tfmi_gguf_mistyped(g, key, v, "bool");
  *out = v->at[0] != 0;
  return true;
}

static bool tfmi_gguf_get_text(const tfmi_gguf *g, const char *key, tfmi_text *out) {
  const tfmi_gguf_value *v = tfmi_gguf_find(g, key);
  if (!v) return false;
  if (v->type != TFMI_GGUF_STRING) tfmi_gguf_mistyped(g, key, v, "string");
  tfmi_gguf_text_at(v->at, out);
  return true;
}

/* ---- Tensors ---- */

static const struct tfmi_ggml_row *tfmi_ggml_find(uint32_t id) {
  int i;
  for (i = 0; i < TFMI_COUNT(tfmi_ggml_types); i++)
    if (tfmi_ggml_types[i].id == id) return &tfmi_ggml_types[i];
  return NULL;
}

/* The file counts dimensions from the fastest, which must fill whole blocks. */
static void tfmi_gguf_shape(tfmi_gguf *g, tfmi_tensor *t) {
  uint64_t elements = 1, i;
  t->rank = tfmi_gguf_u32(g, "a tensor's rank");
  if (t->rank < 1 || t->rank > 4)
    tfmi_fail(g->load, TFM_E_FORMAT, "tensor %s has %llu dimensions, expected 1 to 4",
              tfmi_plain(t->name).text, (unsigned long long)t->rank);
  for (i = t->rank; i-- > 0;) {
    t->dims[i] = tfmi_gguf_u64(g, "a tensor's shape");
    if (t->dims[i] == 0 || t->dims[i] > INT64_MAX)
      tfmi_fail(g->load, TFM_E_FORMAT, "tensor %s has a dimension of %llu, expected 1 to 2^63 - 1",
                tfmi_plain(t->name).text, (unsigned long long)t->dims[i]);
    if (!tfmi_mul(elements, t->dims[i], &elements))
      tfmi_fail(g->load, TFM_E_FORMAT, "tensor %s has more than 2^64 elements",
                tfmi_plain(t->name).text);
  }
}

static void tfmi_gguf_type(tfmi_gguf *g, tfmi_tensor *t) {
  uint32_t id = tfmi_gguf_u32(g, "a tensor's type");
  const struct tfmi_ggml_row *row = tfmi_ggml_find(id);
  uint64_t blocks, i;
  if (!row)
    tfmi_fail(g->load, TFM_E_UNSUPPORTED, "tensor %s has type %u, which is not known here",
              tfmi_plain(t->name).text, (unsigned)id);
  blocks = t->dims[t->rank - 1] / row->block_values;
  if (t->dims[t->rank - 1] % row->block_values)
    tfmi_fail(g->load, TFM_E_FORMAT, "tensor %s: rows of %llu values do not fill blocks of %s (%d)",
              tfmi_plain(t->name).text, (unsigned long long)t->dims[t->rank - 1], row->name,
              row->block_values);
  for (i = 0; i + 1 < t->rank; i++) blocks *= t->dims[i]; /* no more than the elements: it fits */
  if (!tfmi_bytes(blocks, row->block_bytes, &t->bytes))
    tfmi_fail(g->load, TFM_E_FORMAT, "tensor %s is larger than the address space",
              tfmi_plain(t->name).text);
  t->type = row->type;
  t->type_name = row->name;
}

/* Where the data begins is known only behind the last description: offsets are kept apart. */
static void tfmi_gguf_read_tensors(tfmi_gguf *g, uint64_t *offset) {
  uint64_t i;
  for (i = 0; i < g->tensors; i++) {
    tfmi_tensor *t = &g->tensor[i];
    t->name = tfmi_gguf_name(g, 64, "a tensor's name");
    tfmi_gguf_shape(g, t);
    tfmi_gguf_type(g, t);
    offset[i] = tfmi_gguf_u64(g, "a tensor's offset");
    if (offset[i] % g->alignment)
      tfmi_fail(g->load, TFM_E_FORMAT, "tensor %s lies at offset %llu, expected a multiple of %llu",
                tfmi_plain(t->name).text, (unsigned long long)offset[i],
                (unsigned long long)g->alignment);
  }
}

static void tfmi_gguf_place_tensors(tfmi_gguf *g, const uint8_t *begin, const uint64_t *offset) {
  uint64_t header = (uint64_t)(g->at - begin), whole = (uint64_t)(g->end - begin), room, i;
  header = (header + g->alignment - 1) & ~(g->alignment - 1);
  room = header < whole ? whole - header : 0;
  for (i = 0; i < g->tensors; i++) {
    tfmi_tensor *t = &g->tensor[i];
    if (offset[i] > room || t->bytes > room - offset[i])
      tfmi_fail(g->load, TFM_E_FORMAT,
                "tensor %s lies at offset %llu with %llu bytes, but the data section has %llu; the "
                "file may be cut off", tfmi_plain(t->name).text, (unsigned long long)offset[i],
                (unsigned long long)t->bytes, (unsigned long long)room);
    t->data = begin + header + offset[i];
  }
  tfmi_sort(g->tensor, (size_t)g->tensors, sizeof *g->tensor, tfmi_tensor_place_order);
  for (i = 1; i < g->tensors; i++)
    if (g->tensor[i - 1].data + g->tensor[i - 1].bytes > g->tensor[i].data)
      tfmi_fail(g->load, TFM_E_FORMAT, "tensors %s and %s overlap",
                tfmi_plain(g->tensor[i - 1].name).text, tfmi_plain(g->tensor[i].name).text);
  tfmi_tensors_sort(g->load, g->tensor, g->tensors);
}

/* ---- The whole ---- */

static void tfmi_gguf_header(tfmi_gguf *g) {
  const uint8_t *magic = tfmi_gguf_take(g, 4, "the magic number");
  uint32_t version;
  if (memcmp(magic, "GGUF", 4) != 0)
    tfmi_fail(g->load, TFM_E_FORMAT, "the file does not begin with GGUF");
  version = tfmi_gguf_u32(g, "the version");
  if (version == 0x03000000)
    tfmi_fail(g->load, TFM_E_UNSUPPORTED, "GGUF for big-endian machines; convert it again");
  if (version != 3)
    tfmi_fail(g->load, TFM_E_UNSUPPORTED, "GGUF version %u, expected 3; convert the model again",
              (unsigned)version);
  g->tensors = tfmi_gguf_u64(g, "the number of tensors");
  g->entries = tfmi_gguf_u64(g, "the number of keys");
  tfmi_gguf_count(g, g->entries, 8 + 1 + 4 + 1, "keys");
  tfmi_gguf_count(g, g->tensors, 8 + 1 + 4 + 8 + 4 + 8, "tensors");
}

static void tfmi_gguf_read_alignment(tfmi_gguf *g) {
  const char *key = "general.alignment";
  const tfmi_gguf_value *v = tfmi_gguf_find(g, key);
  g->alignment = 32;
  if (!v) return;
  if (v->type != TFMI_GGUF_U32) tfmi_gguf_mistyped(g, key, v, "u32");
  g->alignment = tfmi_u32(v->at);
  if (g->alignment < 8 || g->alignment > 1u << 20 || (g->alignment & (g->alignment - 1)))
    tfmi_fail(g->load, TFM_E_FORMAT, "key %s is %llu, expected a power of two from 8 to 2^20", key,
              (unsigned long long)g->alignment);
}

static void tfmi_gguf_open(tfmi_gguf *g, tfmi_load *l, const void *data, size_t bytes) {
  uint64_t *offset;
  memset(g, 0, sizeof *g);
  g->load = l;
  g->at = (const uint8_t *)data;
  g->end = g->at + bytes;
  tfmi_gguf_header(g);
  tfmi_gguf_read_entries(g);
  tfmi_gguf_read_alignment(g);
  tfmi_gguf_count(g, g->tensors, 8 + 1 + 4 + 8 + 4 + 8, "tensors");
  g->tensor = TFMI_NEW(tfmi_tensor, tfmi_scratch(l, g->tensors, sizeof *g->tensor));
  offset = TFMI_NEW(uint64_t, tfmi_scratch(l, g->tensors, sizeof *offset));
  tfmi_gguf_read_tensors(g, offset);
  tfmi_gguf_place_tensors(g, (const uint8_t *)data, offset);
  tfmi_release(l, offset);
}

#if TFMI_COMPILES_COLD
#pragma GCC pop_options
#endif

/* =================================================================================================
   >>steps   what a tokenizer does to text before its model sees it
   =================================================================================================

   A pipeline is two lists of steps, filled in while loading: those that rewrite a text (normalizers
   in tokenizer.json) and those that cut it into pieces (pre_tokenizers), of which some rewrite each
   piece first. Every step is a function and the few fields of tfmi_step that it looks at; there is
   no other state, so that threads share them.

     rewriting   text in, text out, in two buffers by turns; bytes that are no UTF-8 stay
     cutting     a finder tells the next stretch and whether it matches; the behaviour says what
                 becomes of matches: own pieces, gone, or joined to a neighbour

   Splitting patterns that most files have are written by hand. All work is linear in the text. */

typedef struct tfmi_buffer {
  char *at;
  size_t n, cap;
} tfmi_buffer;

enum { TFMI_STEPS_MAX = 12, TFMI_BUFFERS = 2 + TFMI_STEPS_MAX };

typedef struct tfmi_codes { /* code points, and TFMI_CODES + byte for bytes that form none */
  uint32_t *at;
  size_t n, cap;
} tfmi_codes;

typedef struct tfmi_work { /* memory of one call */
  tfmi_heap heap;          /* under the tokenizer's limit */
  tfm_status status;
  bool goes_on;            /* the text does, from one before it: nothing is put before it */
  tfmi_buffer buffer[TFMI_BUFFERS]; /* two for rewriting, one for each step that cuts */
  tfmi_codes codes, sorted;
} tfmi_work;

typedef struct tfmi_stretch {
  size_t n;
  bool match;
} tfmi_stretch;

typedef enum tfmi_behavior {
  TFMI_ISOLATED, TFMI_REMOVED, TFMI_CONTIGUOUS, TFMI_WITH_PREVIOUS, TFMI_WITH_NEXT
} tfmi_behavior;

typedef struct tfmi_composed { /* two characters that compose to one */
  uint32_t first, second, whole;
} tfmi_composed;

enum { TFMI_PAIR_SLOTS = 4096 };

typedef struct tfmi_charsmap { /* SentencePiece's: a trie in units, texts that end in NUL */
  const uint8_t *units;
  const char *texts;
  size_t unit_count, bytes;
} tfmi_charsmap;

typedef struct tfmi_step tfmi_step;
typedef void (*tfmi_rewriter)(tfmi_work *w, const tfmi_step *s, tfmi_text in, tfmi_buffer *out);
typedef int (*tfmi_each)(const tfmi_step *s, uint32_t code, uint32_t to[TFMI_MAP_MOST]);
typedef tfmi_stretch (*tfmi_finder)(const tfmi_step *s, const char *p, size_t n); /* n > 0 */
typedef size_t (*tfmi_splitter)(const char *p, size_t n); /* bytes of the first piece, n > 0 */

struct tfmi_step {
  tfmi_rewriter rewrite; /* NULL: it only cuts */
  tfmi_each each;        /* of tfmi_rewrite_each: what a character becomes; -1: itself */
  tfmi_finder find;      /* NULL: it only rewrites */
  tfmi_splitter split;   /* of tfmi_find_split */
  tfmi_behavior behavior;
  bool invert;           /* what is found is not a match, the rest is */
  bool left, right;      /* ends to strip; left alone: only the text's very beginning */
  bool composes, squeeze;
  tfmi_text text;        /* looked for, or put before */
  tfmi_text content;     /* put in its place */
  const tfmi_charset *set, *compat, *combining;
  const tfmi_composed *pairs;
  const tfmi_charsmap *map;
  const struct tfmi_regex *regex;
};

/* ---- Writing ---- */

/* Room for `more` elements of `size` bytes behind the n of the block; NULL when memory is out. */
static void *tfmi_work_grow(tfmi_work *w, void *p, size_t n, size_t *cap, size_t more,
                            size_t size) {
  void *grown = NULL;
  size_t need = n + more;
  if (p && need <= *cap) return p;
  need += need / 2 + 64;
  if (more < SIZE_MAX / 64 - n)
    grown = tfmi_heap_realloc(&w->heap, p, *cap * size, need * size);
  if (!grown) {
    w->status = TFM_E_MEMORY;
    return NULL;
  }
  *cap = need;
  return grown;
}

static bool tfmi_room(tfmi_work *w, tfmi_buffer *out, size_t more) {
  char *at = (char *)tfmi_work_grow(w, out->at, out->n, &out->cap, more, 1);
  if (at) out->at = at;
  return at != NULL;
}

static void tfmi_write(tfmi_work *w, tfmi_buffer *out, const char *p, size_t n) {
  if (!tfmi_room(w, out, n)) return;
  if (n) memcpy(out->at + out->n, p, n);
  out->n += n;
}

static void tfmi_write_text(tfmi_work *w, tfmi_buffer *out, tfmi_text text) {
  tfmi_write(w, out, text.at, text.n);
}

static void tfmi_write_code(tfmi_work *w, tfmi_buffer *out, uint32_t code) {
  if (!tfmi_room(w, out, 4)) return;
  if (code < TFMI_CODES) out->n = (size_t)(tfmi_put_utf8(out->at + out->n, code) - out->at);
  else out->at[out->n++] = (char)(code - TFMI_CODES);
}

static void tfmi_work_free(tfmi_work *w) {
  int i;
  for (i = 0; i < TFMI_BUFFERS; i++) tfmi_heap_put(&w->heap, w->buffer[i].at, w->buffer[i].cap);
  tfmi_heap_put(&w->heap, w->codes.at, w->codes.cap * sizeof *w->codes.at);
  tfmi_heap_put(&w->heap, w->sorted.at, w->sorted.cap * sizeof *w->sorted.at);
}

static bool tfmi_begins(tfmi_text text, tfmi_text with) {
  return text.n >= with.n && memcmp(text.at, with.at, with.n) == 0;
}

/* ---- Rewriting: blanks and affixes ---- */

static size_t tfmi_append(char *out, size_t size, tfmi_text text) {
  if (text.n) memcpy(out + size, text.at, text.n);
  return size + text.n;
}

/* SentencePiece's own: `text` before it, each blank becomes `content`, and those at the ends and in
   runs go. Where they go, a text goes on after white space. */
static void tfmi_rewrite_blanks(tfmi_work *w, const tfmi_step *s, tfmi_text in, tfmi_buffer *out) {
  tfmi_text blank = s->content;
  size_t bound = s->text.n + in.n, i;
  for (i = 0; i < in.n; i++)
    if (in.at[i] == ' ') bound += blank.n - 1;
  i = 0;
  while (s->squeeze && i < in.n && in.at[i] == ' ') i++;
  if (i == in.n || !tfmi_room(w, out, bound)) return;
  if (!w->goes_on || s->squeeze) out->n = tfmi_append(out->at, 0, s->text);
  for (; i < in.n; i++) {
    if (in.at[i] != ' ') out->at[out->n++] = in.at[i];
    else if (!s->squeeze || in.at[i - 1] != ' ') out->n = tfmi_append(out->at, out->n, blank);
  }
  while (s->squeeze && out->n >= blank.n &&
         memcmp(out->at + out->n - blank.n, blank.at, blank.n) == 0)
    out->n -= blank.n;
}

static void tfmi_rewrite_prepend(tfmi_work *w, const tfmi_step *s, tfmi_text in,
                                 tfmi_buffer *out) {
  if (in.n && !w->goes_on) tfmi_write_text(w, out, s->text);
  tfmi_write_text(w, out, in);
}

/* Metaspace, and ByteLevel's add_prefix_space: blanks become `content`; then `text` is put before
   what does not begin with it. */
static void tfmi_rewrite_lead(tfmi_work *w, const tfmi_step *s, tfmi_text in, tfmi_buffer *out) {
  size_t at = 0, k;
  if (s->text.n && !tfmi_begins(in, s->text) && !(s->content.n && in.at[0] == ' '))
    tfmi_write_text(w, out, s->text);
  for (; s->content.n && at < in.n; at += k + 1) {
    const char *blank = (const char *)memchr(in.at + at, ' ', in.n - at);
    k = blank ? (size_t)(blank - in.at) - at : in.n - at;
    tfmi_write(w, out, in.at + at, k);
    if (blank) tfmi_write_text(w, out, s->content);
  }
  if (!s->content.n) tfmi_write_text(w, out, in);
}

static void tfmi_rewrite_replace(tfmi_work *w, const tfmi_step *s, tfmi_text in,
                                 tfmi_buffer *out) {
  size_t at = 0;
  while (at < in.n && w->status == TFM_OK) {
    tfmi_stretch span = s->find(s, in.at + at, in.n - at);
    if (span.match) tfmi_write_text(w, out, s->content);
    else tfmi_write(w, out, in.at + at, span.n);
    at += span.n;
  }
}

/* Where the white space begins that p[0 .. n) ends with. */
static size_t tfmi_before_blanks(const char *p, size_t n) {
  while (n) {
    size_t at = n - 1;
    while (at && n - at < 4 && ((uint8_t)p[at] & 0xc0) == 0x80) at--;
    if (tfmi_class_of(tfmi_rune_at(p + at, n - at).code) != TFMI_SPACE) break;
    n = at;
  }
  return n;
}

static size_t tfmi_run_of(const char *p, size_t n, tfmi_class wanted) {
  size_t at = 0;
  while (at < n) {
    tfmi_rune r = tfmi_rune_at(p + at, n - at);
    if (tfmi_class_of(r.code) != wanted) break;
    at += r.bytes;
  }
  return at;
}

static void tfmi_rewrite_strip(tfmi_work *w, const tfmi_step *s, tfmi_text in, tfmi_buffer *out) {
  size_t start = s->left ? tfmi_run_of(in.at, in.n, TFMI_SPACE) : 0;
  size_t stop = s->right ? start + tfmi_before_blanks(in.at + start, in.n - start) : in.n;
  tfmi_write(w, out, in.at + start, stop - start);
}

/* ---- Rewriting: character by character ---- */

static void tfmi_rewrite_each(tfmi_work *w, const tfmi_step *s, tfmi_text in, tfmi_buffer *out) {
  uint32_t to[TFMI_MAP_MOST];
  size_t at = 0;
  while (at < in.n && w->status == TFM_OK) {
    tfmi_rune r = tfmi_rune_at(in.at + at, in.n - at);
    int count = r.state == TFMI_RUNE_WHOLE ? s->each(s, r.code, to) : -1, i;
    if (count < 0) tfmi_write(w, out, in.at + at, r.bytes);
    for (i = 0; i < count; i++) tfmi_write_code(w, out, to[i]);
    at += r.bytes;
  }
}

static int tfmi_each_mapped(const tfmi_step *s, uint32_t code, uint32_t to[TFMI_MAP_MOST]) {
  uint32_t v = tfmi_charset_at(s->set, code), i, n = 0;
  if (!v) return -1;
  for (i = s->set->begin[v - 1]; i < s->set->begin[v]; i++) to[n++] = s->set->target[i];
  return (int)n;
}

static int tfmi_each_left_out(const tfmi_step *s, uint32_t code, uint32_t to[TFMI_MAP_MOST]) {
  (void)to;
  return tfmi_charset_at(s->set, code) ? 0 : -1;
}

/* What translation models drop and what they take for a blank, as the reference lists it. */
static int tfmi_each_nmt(const tfmi_step *s, uint32_t code, uint32_t to[TFMI_MAP_MOST]) {
  static const struct {
    uint32_t first, last;
    int count;
  } rows[] = {
    {0x01, 0x08, 0},     {0x09, 0x0a, 1},     {0x0b, 0x0b, 0},     {0x0c, 0x0d, 1},
    {0x0e, 0x1f, 0},     {0x7f, 0x7f, 0},     {0x8f, 0x8f, 0},     {0x9f, 0x9f, 0},
    {0x1680, 0x1680, 1}, {0x200b, 0x200f, 1}, {0x2028, 0x2029, 1}, {0x2581, 0x2581, 1},
    {0xfeff, 0xfeff, 1}, {0xfffd, 0xfffd, 1},
  };
  int i;
  (void)s;
  to[0] = ' ';
  for (i = 0; i < TFMI_COUNT(rows); i++)
    if (code >= rows[i].first && code <= rows[i].last) return rows[i].count;
  return -1;
}

static uint32_t tfmi_letter_of_byte(uint32_t byte) { /* GPT-2's alphabet for bytes */
  return byte <= 0x20                   ? byte + 0x100
         : byte >= 0x7f && byte <= 0xa0 ? byte - 0x7f + 0x121
         : byte == 0xad                 ? 0x143
                                        : byte;
}

static void tfmi_rewrite_bytes(tfmi_work *w, const tfmi_step *s, tfmi_text in, tfmi_buffer *out) {
  size_t i;
  (void)s;
  for (i = 0; i < in.n && w->status == TFM_OK; i++)
    tfmi_write_code(w, out, tfmi_letter_of_byte((uint8_t)in.at[i]));
}

/* ---- Rewriting: Unicode's normal forms ---- */

enum { /* syllables of Hangul are computed */
  TFMI_HANGUL = 0xac00, TFMI_HANGUL_L = 0x1100, TFMI_HANGUL_V = 0x1161, TFMI_HANGUL_T = 0x11a7,
  TFMI_HANGUL_COUNT = 11172, TFMI_HANGUL_PER_L = 588, TFMI_HANGUL_PER_V = 28,
  TFMI_HANGUL_LS = 19, TFMI_HANGUL_VS = 21
};

static void tfmi_codes_add(tfmi_work *w, tfmi_codes *codes, uint32_t code) {
  uint32_t *at = codes->n < codes->cap ? codes->at
                                       : TFMI_NEW(uint32_t, tfmi_work_grow(w, codes->at, codes->n,
                                             &codes->cap, 1, sizeof *codes->at));
  if (!at) return;
  codes->at = at;
  codes->at[codes->n++] = code;
}

static void tfmi_decompose(tfmi_work *w, const tfmi_step *s, uint32_t code) {
  uint32_t v = s->compat ? tfmi_charset_at(s->compat, code) : 0, i, k = code - TFMI_HANGUL;
  const tfmi_charset *set = v ? s->compat : s->set;
  if (!v) v = tfmi_charset_at(s->set, code);
  if (code >= TFMI_HANGUL && k < TFMI_HANGUL_COUNT) {
    tfmi_codes_add(w, &w->codes, TFMI_HANGUL_L + k / TFMI_HANGUL_PER_L);
    tfmi_codes_add(w, &w->codes, TFMI_HANGUL_V + k % TFMI_HANGUL_PER_L / TFMI_HANGUL_PER_V);
    if (k % TFMI_HANGUL_PER_V)
      tfmi_codes_add(w, &w->codes, TFMI_HANGUL_T + k % TFMI_HANGUL_PER_V);
  } else if (v) {
    for (i = set->begin[v - 1]; i < set->begin[v]; i++)
      tfmi_codes_add(w, &w->codes, set->target[i]);
  } else {
    tfmi_codes_add(w, &w->codes, code);
  }
}

/* Sorts a run of marks by combining class, those of one class staying in order. */
static void tfmi_sort_marks(tfmi_work *w, const tfmi_step *s, uint32_t *mark, size_t n) {
  size_t first[65] = {0}, i, k;
  uint32_t *sorted = TFMI_NEW(uint32_t, tfmi_work_grow(w, w->sorted.at, 0, &w->sorted.cap, n,
                                                       sizeof *sorted));
  if (!sorted) return;
  w->sorted.at = sorted;
  for (i = 0; i < n; i++) first[(tfmi_charset_at(s->combining, mark[i]) & 63) + 1]++;
  for (k = 1; k < 65; k++) first[k] += first[k - 1];
  for (i = 0; i < n; i++) sorted[first[tfmi_charset_at(s->combining, mark[i]) & 63]++] = mark[i];
  memcpy(mark, sorted, n * sizeof *mark);
}

static void tfmi_order_marks(tfmi_work *w, const tfmi_step *s) {
  uint32_t *code = w->codes.at;
  size_t n = w->codes.n, i, k;
  for (i = 0; i < n; i = k + 1) {
    for (k = i; k < n && tfmi_charset_at(s->combining, code[k]); k++) {}
    if (k - i > 1) tfmi_sort_marks(w, s, code + i, k - i);
  }
}

static size_t tfmi_composed_slot(const tfmi_composed *pairs, uint32_t first, uint32_t second) {
  size_t i = (first * 31 + second * 2654435761u) >> 7 & (TFMI_PAIR_SLOTS - 1);
  while (pairs[i].whole && (pairs[i].first != first || pairs[i].second != second))
    i = (i + 1) & (TFMI_PAIR_SLOTS - 1);
  return i;
}

static uint32_t tfmi_compose(const tfmi_step *s, uint32_t first, uint32_t second) { /* 0: not */
  uint32_t l = first - TFMI_HANGUL_L, v = second - TFMI_HANGUL_V, k = first - TFMI_HANGUL;
  if (second < 0x300) return 0;
  if (l < TFMI_HANGUL_LS && v < TFMI_HANGUL_VS)
    return TFMI_HANGUL + l * TFMI_HANGUL_PER_L + v * TFMI_HANGUL_PER_V;
  if (k < TFMI_HANGUL_COUNT && k % TFMI_HANGUL_PER_V == 0 && second > TFMI_HANGUL_T &&
      second < TFMI_HANGUL_T + TFMI_HANGUL_PER_V)
    return first + second - TFMI_HANGUL_T;
  return s->pairs[tfmi_composed_slot(s->pairs, first, second)].whole;
}

/* A character composes with the last starter when nothing between them has its class or none. */
static void tfmi_compose_all(tfmi_work *w, const tfmi_step *s) {
  uint32_t *code = w->codes.at, last = 0;
  size_t to = 0, starter = SIZE_MAX, i;
  for (i = 0; i < w->codes.n; i++) {
    uint32_t rank = tfmi_charset_at(s->combining, code[i]), whole = 0;
    if (starter != SIZE_MAX && (to == starter + 1 || (last && last < rank)))
      whole = tfmi_compose(s, code[starter], code[i]);
    if (whole) {
      code[starter] = whole;
      continue;
    }
    if (!rank) starter = to;
    last = rank;
    code[to++] = code[i];
  }
  w->codes.n = to;
}

static void tfmi_rewrite_form(tfmi_work *w, const tfmi_step *s, tfmi_text in, tfmi_buffer *out) {
  size_t at = 0, i;
  uint8_t any = 0;
  for (i = 0; i < in.n; i++) any |= (uint8_t)in.at[i];
  if (any < 0x80) {
    tfmi_write_text(w, out, in);
    return;
  }
  for (w->codes.n = 0; at < in.n && w->status == TFM_OK;) {
    tfmi_rune r = tfmi_rune_at(in.at + at, in.n - at);
    if (r.state == TFMI_RUNE_WHOLE) tfmi_decompose(w, s, r.code);
    for (i = 0; i < r.bytes && r.state != TFMI_RUNE_WHOLE; i++)
      tfmi_codes_add(w, &w->codes, TFMI_CODES + (uint8_t)in.at[at + i]);
    at += r.bytes;
  }
  if (w->status == TFM_OK) tfmi_order_marks(w, s);
  if (w->status == TFM_OK && s->composes) tfmi_compose_all(w, s);
  for (i = 0; i < w->codes.n && w->status == TFM_OK; i++) tfmi_write_code(w, out, w->codes.at[i]);
}

/* ---- Rewriting: SentencePiece's compiled rules ---- */

static tfmi_cluster tfmi_cluster_of(const tfmi_charset *set, uint32_t code) {
  uint32_t k = code - TFMI_HANGUL;
  if (code >= TFMI_HANGUL && k < TFMI_HANGUL_COUNT)
    return k % TFMI_HANGUL_PER_V ? TFMI_CLUSTER_LVT : TFMI_CLUSTER_LV;
  return (tfmi_cluster)tfmi_charset_at(set, code);
}

static bool tfmi_hangul_joins(tfmi_cluster a, tfmi_cluster b) {
  if (a == TFMI_CLUSTER_L)
    return b == TFMI_CLUSTER_L || b == TFMI_CLUSTER_V || b == TFMI_CLUSTER_LV ||
           b == TFMI_CLUSTER_LVT;
  if (a == TFMI_CLUSTER_LV || a == TFMI_CLUSTER_V)
    return b == TFMI_CLUSTER_V || b == TFMI_CLUSTER_T;
  return (a == TFMI_CLUSTER_LVT || a == TFMI_CLUSTER_T) && b == TFMI_CLUSTER_T;
}

/* Bytes of the grapheme cluster at p (Unicode's annex 29). Pairs of regional indicators are taken
   apart: they have eight bytes, and what is longer than five is not looked at as a whole anyway. */
static size_t tfmi_cluster_at(const tfmi_charset *set, const char *p, size_t n) {
  tfmi_rune r = tfmi_rune_at(p, n);
  tfmi_cluster last = tfmi_cluster_of(set, r.code), now;
  int picture = last == TFMI_CLUSTER_PICTURE, conjunct = last == TFMI_CLUSTER_CONSONANT;
  size_t at = r.bytes;
  if (r.code == '\r' && at < n && p[at] == '\n') return 2;
  for (; at < n && last != TFMI_CLUSTER_CONTROL; at += r.bytes, last = now) {
    bool joins, extends;
    r = tfmi_rune_at(p + at, n - at);
    now = tfmi_cluster_of(set, r.code);
    joins = now >= TFMI_CLUSTER_SPACING && now <= TFMI_CLUSTER_JOINER;
    extends = joins && now != TFMI_CLUSTER_SPACING;
    if (!joins && now == TFMI_CLUSTER_CONTROL) break;
    if (!joins && last != TFMI_CLUSTER_PREPEND && !tfmi_hangul_joins(last, now) &&
        !(picture == 2 && now == TFMI_CLUSTER_PICTURE) &&
        !(conjunct == 2 && now == TFMI_CLUSTER_CONSONANT)) break;
    if (now == TFMI_CLUSTER_PICTURE) picture = 1;
    else picture = picture && extends ? 1 + (now == TFMI_CLUSTER_JOINER) : 0;
    if (now == TFMI_CLUSTER_CONSONANT) conjunct = 1;
    else if (!extends || now == TFMI_CLUSTER_NON_JOINER) conjunct = 0;
    else if (conjunct && now == TFMI_CLUSTER_LINKER) conjunct = 2;
  }
  return at;
}

/* The text of the rule whose number this is. at NULL: the file is damaged. */
static tfmi_text tfmi_charsmap_text(const tfmi_charsmap *m, size_t index) {
  tfmi_text text = {NULL, 0};
  if (index > m->bytes) return text;
  text.at = m->texts + index;
  while (index + text.n < m->bytes && text.at[text.n]) text.n++;
  return text;
}

/* What the rules make of p: the text of the shortest rule that it begins with, as the reference has
   it, or, where `matched` is asked for, of the longest with its bytes. at NULL: no rule. */
static tfmi_text tfmi_charsmap_find(const tfmi_charsmap *m, const char *p, size_t n,
                                    size_t *matched) {
  tfmi_text found = {NULL, 0};
  size_t node = 0, i;
  uint32_t unit = tfmi_u32(m->units);
  for (i = 0; i < n && p[i]; i++) {
    size_t leaf;
    node ^= (size_t)(unit >> 10) << ((unit & 512) >> 6) ^ (uint8_t)p[i];
    if (node >= m->unit_count) return found;
    unit = tfmi_u32(m->units + 4 * node);
    if ((unit & 0x800000ff) != (uint8_t)p[i]) return found;
    leaf = node ^ (size_t)(unit >> 10) << ((unit & 512) >> 6);
    if (!(unit >> 8 & 1)) continue;
    if (leaf >= m->unit_count) return found;
    found = tfmi_charsmap_text(m, tfmi_u32(m->units + 4 * leaf) & 0x7fffffff);
    if (!matched) return found;
    *matched = i + 1;
  }
  return found;
}

/* As SentencePiece itself does it: the longest rule at each place. */
static void tfmi_rewrite_longest(tfmi_work *w, const tfmi_step *s, tfmi_text in,
                                 tfmi_buffer *out) {
  size_t at = 0;
  while (at < in.n && w->status == TFM_OK) {
    size_t n = tfmi_rune_at(in.at + at, in.n - at).bytes;
    tfmi_text to = tfmi_charsmap_find(s->map, in.at + at, in.n - at, &n);
    if (to.at) tfmi_write_text(w, out, to);
    else tfmi_write(w, out, in.at + at, n);
    at += n;
  }
}

/* A cluster of up to five bytes by one rule, if there is one; else character by character. */
static void tfmi_rewrite_mapped(tfmi_work *w, const tfmi_step *s, tfmi_text in, tfmi_buffer *out) {
  size_t at = 0, stop;
  for (; at < in.n && w->status == TFM_OK; at = stop) {
    size_t n = tfmi_cluster_at(s->set, in.at + at, in.n - at);
    tfmi_text to = {NULL, 0};
    stop = at + n;
    if (n < 6) to = tfmi_charsmap_find(s->map, in.at + at, n, NULL);
    if (to.at) {
      tfmi_write_text(w, out, to);
      continue;
    }
    while (at < stop && w->status == TFM_OK) {
      tfmi_rune r = tfmi_rune_at(in.at + at, stop - at);
      to = tfmi_charsmap_find(s->map, in.at + at, r.bytes, NULL);
      if (to.at) tfmi_write_text(w, out, to);
      else tfmi_write(w, out, in.at + at, r.bytes);
      at += r.bytes;
    }
  }
}

/* The text after all steps, which may be the one given. */
static tfmi_text tfmi_rewrite_all(tfmi_work *w, const tfmi_step *steps, int32_t count,
                                  tfmi_text text) {
  int32_t i;
  for (i = 0; i < count && w->status == TFM_OK; i++) {
    tfmi_buffer *out = &w->buffer[i & 1];
    out->n = 0;
    steps[i].rewrite(w, &steps[i], text, out);
    text.at = out->at ? out->at : "";
    text.n = out->n;
  }
  return text;
}

/* ---- Cutting ---- */

static tfmi_stretch tfmi_stretch_of(size_t n, bool match) {
  tfmi_stretch span;
  span.n = n;
  span.match = match;
  return span;
}

static tfmi_stretch tfmi_find_split(const tfmi_step *s, const char *p, size_t n) {
  return tfmi_stretch_of(s->split(p, n), true);
}

static tfmi_stretch tfmi_find_text(const tfmi_step *s, const char *p, size_t n) {
  size_t at = 0;
  while (n - at >= s->text.n) {
    const char *c = (const char *)memchr(p + at, s->text.at[0], n - at - s->text.n + 1);
    if (!c) break;
    at = (size_t)(c - p);
    if (memcmp(c, s->text.at, s->text.n) == 0)
      return at ? tfmi_stretch_of(at, false) : tfmi_stretch_of(s->text.n, true);
    at++;
  }
  return tfmi_stretch_of(n, false);
}

/* One character of the set, or all up to the next. No set: white space. */
static tfmi_stretch tfmi_find_character(const tfmi_step *s, const char *p, size_t n) {
  size_t at = 0;
  while (at < n) {
    tfmi_rune r = tfmi_rune_at(p + at, n - at);
    bool match = s->set ? tfmi_charset_at(s->set, r.code) : tfmi_class_of(r.code) == TFMI_SPACE;
    if (match) return at ? tfmi_stretch_of(at, false) : tfmi_stretch_of(r.bytes, true);
    at += r.bytes;
  }
  return tfmi_stretch_of(n, false);
}

/* Whitespace: a run of \w, or of what is neither that nor white space. */
static tfmi_stretch tfmi_find_words(const tfmi_step *s, const char *p, size_t n) {
  size_t at = 0;
  int kind = -1;
  while (at < n) {
    tfmi_rune r = tfmi_rune_at(p + at, n - at);
    int now = tfmi_charset_at(s->set, r.code) ? 1 : tfmi_class_of(r.code) == TFMI_SPACE ? 2 : 0;
    if (kind >= 0 && now != kind) break;
    kind = now;
    at += r.bytes;
  }
  return tfmi_stretch_of(at, kind != 2);
}

static tfmi_stretch tfmi_step_find(const tfmi_step *s, const char *p, size_t n) {
  tfmi_stretch span = s->find(s, p, n);
  span.match = span.match != s->invert;
  return span;
}

/* Whether a piece that ends with a span goes on with the next. */
static bool tfmi_stretches_join(tfmi_behavior behavior, bool match, bool next) {
  switch (behavior) {
    case TFMI_CONTIGUOUS: return match == next;
    case TFMI_WITH_PREVIOUS: return !match && next;
    case TFMI_WITH_NEXT: return match && !next;
    default: return false;
  }
}

/* The next piece: its bytes, and whether it is a match. */
static tfmi_stretch tfmi_step_piece(const tfmi_step *s, const char *p, size_t n) {
  tfmi_stretch piece = tfmi_step_find(s, p, n);
  bool match = piece.match;
  while (s->behavior >= TFMI_CONTIGUOUS && piece.n < n) {
    tfmi_stretch next = tfmi_step_find(s, p + piece.n, n - piece.n);
    if (!tfmi_stretches_join(s->behavior, match, next.match)) break;
    piece.n += next.n;
    match = next.match;
  }
  return piece;
}

/* ---- Cutting: other patterns ----
   Compiled while loading to an automaton over classes of characters. A state is the list of places
   in the pattern where a match may go on, best first, as a backtracking matcher would try them: the
   list is cut where a match is found. Assertions about the next character need no more, since the
   automaton says with each character whether a match ended before it. */

enum { TFMI_REGEX_MATCH = 0x8000, TFMI_REGEX_START = 1 }; /* state 0: no match can go on */

typedef struct tfmi_regex {
  tfmi_charset *classes;
  uint16_t *next;  /* [states][width] */
  uint32_t width;  /* classes, and the end of the text as the last */
} tfmi_regex;

/* Bytes of the match at p; 0: there is none. */
static size_t tfmi_regex_at(const tfmi_regex *x, const char *p, size_t n) {
  uint32_t state = TFMI_REGEX_START;
  size_t at = 0, match = 0;
  while (state) {
    tfmi_rune r = {0, 0, TFMI_RUNE_WHOLE};
    uint32_t next, c = x->width - 1;
    if (at < n) {
      r = tfmi_rune_at(p + at, n - at);
      c = tfmi_charset_at(x->classes, r.code);
    }
    next = x->next[state * x->width + c];
    if (next & TFMI_REGEX_MATCH) match = at;
    state = at < n ? next & (TFMI_REGEX_MATCH - 1) : 0;
    at += r.bytes;
  }
  return match;
}

static tfmi_stretch tfmi_find_regex(const tfmi_step *s, const char *p, size_t n) {
  size_t at = tfmi_regex_at(s->regex, p, n);
  if (at) return tfmi_stretch_of(at, true);
  while (at < n) {
    at += tfmi_rune_at(p + at, n - at).bytes;
    if (at < n && tfmi_regex_at(s->regex, p + at, n - at)) break;
  }
  return tfmi_stretch_of(at, false);
}

/* ---- Cutting: patterns ----
   Written by hand after the regular expressions, which are compared as strings while loading. Every
   character is a letter, a number, white space or other, so that each pattern's alternatives cover
   all text and can be told apart by one or two characters. Time is linear. */

static tfmi_class tfmi_class_at(const char *p, size_t n) { /* n may be 0 */
  return n ? tfmi_class_of(tfmi_rune_at(p, n).code) : TFMI_SPACE;
}

/* 's 't 're 've 'm 'll 'd, in any case when `fold` (then U+017F is an s too); 0: none is here. */
static size_t tfmi_split_contraction(const char *p, size_t n, bool fold) {
  static const char ends[][3] = {"s", "t", "re", "ve", "m", "ll", "d"};
  int lower = fold ? 32 : 0, i;
  if (n < 2 || p[0] != '\'') return 0;
  if (fold && n > 2 && memcmp(p + 1, "\xc5\xbf", 2) == 0) return 3;
  for (i = 0; i < TFMI_COUNT(ends); i++) {
    size_t k = strlen(ends[i]);
    if (k < n && (p[1] | lower) == ends[i][0] && (k == 1 || (p[2] | lower) == ends[i][1]))
      return k + 1;
  }
  return 0;
}

/* White space at p: \s*[\r\n]+ when `lines`, then \s+(?!\S)|\s+ : all of it at the end of the text,
   else all but the last character, which goes with what follows. */
static size_t tfmi_split_space(const char *p, size_t n, bool lines) {
  size_t at = 0, last = 0, line = 0;
  while (at < n) {
    tfmi_rune r = tfmi_rune_at(p + at, n - at);
    if (tfmi_class_of(r.code) != TFMI_SPACE) break;
    last = at;
    at += r.bytes;
    if (lines && (r.code == '\n' || r.code == '\r')) line = at;
  }
  if (line) return line;
  return at == n || last == 0 ? at : last;
}

static size_t tfmi_split_gpt2(const char *p, size_t n) {
  size_t blank = p[0] == ' ', k = tfmi_split_contraction(p, n, false);
  tfmi_class here = tfmi_class_at(p + blank, n - blank);
  if (k) return k;
  if (here == TFMI_SPACE) return tfmi_split_space(p, n, false);
  return blank + tfmi_run_of(p + blank, n - blank, here);
}

static size_t tfmi_split_numbers(const char *p, size_t n, int most) {
  size_t at = 0;
  for (; most > 0 && tfmi_class_at(p + at, n - at) == TFMI_NUMBER; most--)
    at += tfmi_rune_at(p + at, n - at).bytes;
  return at;
}

static size_t tfmi_split_cl100k(const char *p, size_t n, int digits) {
  size_t blank = p[0] == ' ', k = tfmi_split_contraction(p, n, true), at;
  tfmi_rune r = tfmi_rune_at(p, n);
  tfmi_class here = tfmi_class_of(r.code);
  if (k) return k;
  if (here == TFMI_NUMBER) return tfmi_split_numbers(p, n, digits);
  at = here == TFMI_LETTER || r.code == '\r' || r.code == '\n' ? 0 : r.bytes;
  k = tfmi_run_of(p + at, n - at, TFMI_LETTER);
  if (k) return at + k;
  if (tfmi_class_at(p + blank, n - blank) == TFMI_SPACE) return tfmi_split_space(p, n, true);
  if (tfmi_class_at(p + blank, n - blank) != TFMI_OTHER) return blank; /* a blank and a number */
  at = blank + tfmi_run_of(p + blank, n - blank, TFMI_OTHER);
  while (at < n && (p[at] == '\r' || p[at] == '\n')) at++;
  return at;
}

static size_t tfmi_split_llama3(const char *p, size_t n) { return tfmi_split_cl100k(p, n, 3); }
static size_t tfmi_split_qwen2(const char *p, size_t n) { return tfmi_split_cl100k(p, n, 1); }

#define TFMI_GPT2_PATTERN \
  "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
#define TFMI_CL100K_PATTERN(digits) \
  "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}" digits \
  "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define TFMI_UPPER "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define TFMI_LOWER "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define TFMI_CASED_PATTERN(suffix, digits) \
  "[^\\r\\n\\p{L}\\p{N}]?" TFMI_UPPER "*" TFMI_LOWER "+" suffix \
  "|[^\\r\\n\\p{L}\\p{N}]?" TFMI_UPPER "+" TFMI_LOWER "*" suffix \
  "|\\p{N}" digits "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define TFMI_O200K_PATTERN TFMI_CASED_PATTERN("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "{1,3}")
#define TFMI_TEKKEN_PATTERN TFMI_CASED_PATTERN("", "")

static const struct tfmi_pattern_row {
  const char *pattern;
  tfmi_splitter split;
} tfmi_patterns[] = {
  {TFMI_GPT2_PATTERN, tfmi_split_gpt2},
  {TFMI_CL100K_PATTERN("{1,3}"), tfmi_split_llama3},
  {TFMI_CL100K_PATTERN(""), tfmi_split_qwen2},
};

/* =================================================================================================
   >>tokenizer   text to ids and back, exactly as the vocabulary's makers do it
   =================================================================================================

   Text passes through stages, each a row or a field of the tokenizer:

     added      special and added tokens are cut out of the text (first set), leftmost, then longest
     rewrite    steps change what lies between (>>steps)
     added      those that are looked for in rewritten text (second set)
     cut        steps make pieces of it, which the model sees one by one
     model      merges: symbols (bytes or characters) are merged pair by pair, lowest rank first;
                Unigram: of all ways to spell the piece, the one of the highest score;
                words: the piece itself, or unk

   Every vocabulary of merges, whatever file it comes from, is brought to one form while loading:
   texts with ids, and a table (left id, right id) -> (rank, id). Vocabularies of scored pieces
   (SentencePiece) become such a table too: a piece can arise from any two symbols that spell it,
   its rank is the order of its score, and equal scores have equal ranks. Characters that occur in
   pieces without being one get `phantom` ids beyond the vocabulary; they exist between merges only.

   Merging keeps the symbols in a linked list and takes the candidates by (rank, position): near
   linear in the text. Candidates go stale when a neighbour merges first; they are skipped when they
   come up. They wait in a heap, and those of long pieces in a list per rank, where most arrive in
   the order in which they will be taken. Tables are frozen: open addressing, written once, read by
   any number of threads. */

/* ---- Frozen tables ---- */

typedef struct tfmi_text_slot {
  uint32_t hash, at, n; /* of the text in the arena */
  int32_t id;           /* -1: free */
} tfmi_text_slot;

typedef struct tfmi_text_table {
  tfmi_text_slot *slot; /* NULL: no table */
  const char *arena;
  uint64_t mask;
} tfmi_text_table;

typedef struct tfmi_merge {
  int32_t left, right, into; /* into -1: free */
  uint32_t rank;
} tfmi_merge;

typedef struct tfmi_merge_table {
  tfmi_merge *slot;
  uint64_t mask;
  int64_t ranks; /* are 0 .. ranks-1 */
} tfmi_merge_table;

typedef struct tfmi_join_table { /* pairs of first symbols that some merge can reach across */
  uint64_t *slot;                /* UINT64_MAX: free */
  uint64_t mask;
} tfmi_join_table;

/* Slots for n entries: a power of two, at most half full. */
static uint64_t tfmi_slots(uint64_t n) {
  uint64_t slots = 16;
  while (slots < 2 * n) slots *= 2;
  return slots;
}

static uint64_t tfmi_mix(uint64_t key) {
  key *= UINT64_C(0x9E3779B97F4A7C15);
  return key ^ key >> 29;
}

static uint64_t tfmi_pair_key(int32_t left, int32_t right) {
  return (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
}

static uint32_t tfmi_text_hash(const char *p, size_t n) {
  uint64_t h = UINT64_C(0xcbf29ce484222325);
  size_t i;
  for (i = 0; i < n; i++) h = (h ^ (uint8_t)p[i]) * UINT64_C(0x100000001b3);
  return (uint32_t)(tfmi_mix(h) >> 20);
}

/* The slot of the text, or the free one where it belongs. */
static tfmi_text_slot *tfmi_text_slot_of(const tfmi_text_table *table, const char *p, size_t n,
                                         uint32_t hash) {
  uint64_t i = hash & table->mask;
  for (;; i = (i + 1) & table->mask) {
    tfmi_text_slot *s = &table->slot[i];
    if (s->id < 0) return s;
    if (s->hash == hash && s->n == n && memcmp(table->arena + s->at, p, n) == 0) return s;
  }
}

static int32_t tfmi_text_find(const tfmi_text_table *table, const char *p, size_t n) {
  return tfmi_text_slot_of(table, p, n, tfmi_text_hash(p, n))->id;
}

/* The slot of the pair, or the free one where it belongs. */
static tfmi_merge *tfmi_merge_slot_of(const tfmi_merge_table *table, int32_t left, int32_t right) {
  uint64_t i = tfmi_mix(tfmi_pair_key(left, right)) & table->mask;
  for (;; i = (i + 1) & table->mask) {
    tfmi_merge *m = &table->slot[i];
    if (m->into < 0 || (m->left == left && m->right == right)) return m;
  }
}

static uint64_t *tfmi_join_slot_of(const tfmi_join_table *table, int32_t left, int32_t right) {
  uint64_t key = tfmi_pair_key(left, right), i = tfmi_mix(key) & table->mask;
  while (table->slot[i] != key && table->slot[i] != UINT64_MAX) i = (i + 1) & table->mask;
  return &table->slot[i];
}

/* ---- The object ---- */

typedef enum tfmi_speech { /* how a token is decoded */
  TFMI_SPEECH_NONE,        /* a gap between the ids */
  TFMI_SPEECH_TEXT,        /* whole characters */
  TFMI_SPEECH_BYTES        /* bytes, which become characters together with their neighbours' */
} tfmi_speech;

typedef struct tfmi_token {
  uint32_t at, n;           /* the vocabulary's spelling, in the arena */
  uint32_t said_at, said_n; /* what it decodes to */
  tfmi_speech speech;
  bool added;               /* not one of the model's own: never a symbol */
} tfmi_token;

typedef struct tfmi_added {
  uint32_t at, n; /* what is looked for, in the arena */
  int32_t id;
  bool special, left_blanks, right_blanks; /* swallow white space before, behind */
  bool word;                               /* only where no word goes on at either side */
} tfmi_added;

typedef struct tfmi_added_set {
  tfmi_added *token; /* [count], sorted by their bytes */
  int32_t count;
  bool first[256];   /* bytes that some token begins with */
} tfmi_added_set;

typedef enum tfmi_model { TFMI_MERGES, TFMI_UNIGRAM, TFMI_WHOLE } tfmi_model;

typedef struct tfmi_trie_slot { /* a node, known by its slot, below another with a byte between */
  uint32_t above;               /* UINT32_MAX: free; slots: the root */
  int32_t id;                   /* of the piece that ends here; -1: none */
  uint8_t byte;
} tfmi_trie_slot;

typedef struct tfmi_trie {
  tfmi_trie_slot *slot;
  uint64_t mask;
} tfmi_trie;

/* The slot of the node below `above`, or the free one where it belongs. */
static tfmi_trie_slot *tfmi_trie_below(const tfmi_trie *trie, uint32_t above, uint8_t byte) {
  uint64_t i = tfmi_mix((uint64_t)above << 8 | byte) >> 8 & trie->mask;
  while (trie->slot[i].above != UINT32_MAX &&
         (trie->slot[i].above != above || trie->slot[i].byte != byte))
    i = (i + 1) & trie->mask;
  return &trie->slot[i];
}

struct tfm_tokenizer {
  tfmi_heap heap;
  tfmi_block kept;
  const char *kind;
  int32_t vocabulary, bos, eos, unk, pad;
  char *arena;              /* all texts */
  tfmi_token *token;        /* [vocabulary + phantoms] */
  uint32_t longest_said;
  tfmi_text_table spelled;  /* by the vocabulary's spelling */
  tfmi_text_table whole;    /* pre-tokens that are tokens without merging, by their bytes */
  tfmi_merge_table merges;
  tfmi_join_table joins;    /* characters only */
  tfmi_added_set added[2];  /* in raw text, in normalised text */
  tfmi_step rewrite[TFMI_STEPS_MAX], cut[TFMI_STEPS_MAX];
  int32_t rewrites, cuts;
  const tfmi_charset *word; /* what added tokens must not be amidst; NULL: none asks */
  tfmi_model model;
  tfmi_trie trie;           /* Unigram's pieces, with */
  double *score;            /* their scores, by id */
  double unk_score;
  bool single;              /* scores are added up in single precision */
  bool from_bytes;          /* symbols are bytes, not characters */
  bool says_letters;        /* decoding takes letters for bytes, the same ones */
  bool says_gaps;           /* decoding puts a blank between tokens */
  bool drops_first;         /* decoding drops the first token's blanks */
  tfmi_text blank;          /* what decoding turns into U+0020; n 0: nothing */
  bool byte_fallback;       /* a character that is no symbol becomes its bytes' tokens */
  bool fuse_unk;            /* a run of unknown characters is one unk */
  bool strict;              /* an unknown character is an error */
  bool strip;               /* decoding drops one leading blank */
  int32_t byte_id[256];     /* first symbols (from_bytes), or the fallback's tokens; -1: none */
  int32_t ascii_id[128];    /* first symbols of these characters */
  int32_t *before, *after;  /* what TFM_ENCODE_SPECIAL adds */
  int32_t before_count, after_count;
};

/* The id of a text that the model itself knows, or -1. */
static int32_t tfmi_own_id(const tfm_tokenizer *t, const char *p, size_t n) {
  int32_t id = tfmi_text_find(&t->spelled, p, n);
  return id >= 0 && !t->token[id].added ? id : -1;
}

/* ---- Encoding: work memory ---- */

typedef struct tfmi_symbol {
  int32_t id, previous, next; /* -1: none */
  int32_t merge;              /* slot of the merge with the next; -1: none */
} tfmi_symbol;

typedef struct tfmi_waiting { /* a candidate in its rank's list */
  uint32_t position, next;
} tfmi_waiting;

typedef struct tfmi_bucket { /* such a list */
  uint32_t first, last;
} tfmi_bucket;

#define TFMI_NOBODY UINT32_MAX
enum { TFMI_LONG_PIECE = 4096 };

typedef struct tfmi_way { /* the best way to spell a piece up to here */
  double score;
  int32_t id;
  uint32_t start; /* of its last part; UINT32_MAX: there is no way yet */
} tfmi_way;

/* A flag beside those of tfm_encode: the text goes on where another ended. */
enum { TFMI_ENCODE_GOES_ON = 4 };

typedef struct tfmi_passage { /* a stretch of a text, from where the one before ends */
  size_t end;
  bool trusted; /* it may name special tokens */
} tfmi_passage;

typedef struct tfmi_encoder {
  const tfm_tokenizer *t;
  const char *whole;  /* the text, in [spans] stretches; span NULL: one, trusted as flags say */
  const tfmi_passage *span;
  size_t spans;
  tfmi_work work;
  unsigned flags;
  int32_t *ids;       /* [cap] */
  size_t cap;
  int64_t count;      /* of all ids, those beyond cap too */
  int32_t last;       /* id that this pre-token gave last; -1: none yet */
  tfmi_symbol *symbol;   /* [symbols] not merged yet */
  uint64_t *queue;       /* [queued] heap of rank << 32 | position */
  tfmi_waiting *waiting; /* [waitings] nodes of the lists, those in `spare` free */
  tfmi_bucket *bucket;   /* [ranks] lists; NULL until a piece is long */
  tfmi_way *best;       /* [bytes of a piece + 1] */
  size_t symbols, symbol_cap, queued, queue_cap, waitings, waiting_cap, bucket_cap, best_cap;
  int64_t now;           /* candidates up to this rank wait in the heap, others in lists */
  uint32_t batch, spare; /* what is left of the list of rank `now`; free nodes */
  tfmi_symbol few_symbols[96];
  uint64_t few_queued[128];
} tfmi_encoder;

/* The block p of *cap elements with room for `need`; `few` is where it began, on the stack. NULL
   when memory is out. */
static void *tfmi_encoder_grow(tfmi_encoder *e, void *p, const void *few, size_t *cap, size_t need,
                               size_t size) {
  bool stack = p == few;
  void *grown;
  if (need <= *cap) return p;
  grown = tfmi_heap_realloc(&e->work.heap, stack ? NULL : p, stack ? 0 : *cap * size, need * size);
  if (!grown) {
    e->work.status = TFM_E_MEMORY;
    return NULL;
  }
  if (stack && p) memcpy(grown, p, *cap * size);
  *cap = need;
  return grown;
}

static void tfmi_encoder_init(tfmi_encoder *e, const tfm_tokenizer *t, unsigned flags) {
  memset(e, 0, offsetof(tfmi_encoder, few_symbols));
  e->t = t;
  e->work.heap = t->heap;
  e->flags = flags;
  e->symbol = e->few_symbols;
  e->symbol_cap = (size_t)TFMI_COUNT(e->few_symbols);
  e->queue = e->few_queued;
  e->queue_cap = (size_t)TFMI_COUNT(e->few_queued);
  e->batch = e->spare = TFMI_NOBODY;
}

static void tfmi_encoder_free(tfmi_encoder *e) {
  if (e->symbol != e->few_symbols)
    tfmi_heap_put(&e->work.heap, e->symbol, e->symbol_cap * sizeof *e->symbol);
  if (e->queue != e->few_queued)
    tfmi_heap_put(&e->work.heap, e->queue, e->queue_cap * sizeof *e->queue);
  tfmi_heap_put(&e->work.heap, e->waiting, e->waiting_cap * sizeof *e->waiting);
  tfmi_heap_put(&e->work.heap, e->bucket, e->bucket_cap * sizeof *e->bucket);
  tfmi_heap_put(&e->work.heap, e->best, e->best_cap * sizeof *e->best);
  tfmi_work_free(&e->work);
}

static void tfmi_emit(tfmi_encoder *e, int32_t id) {
  if ((size_t)e->count < e->cap) e->ids[e->count] = id;
  e->count++;
}

/* ---- Encoding: merging ---- */

static void tfmi_queue_push(tfmi_encoder *e, uint64_t key) {
  size_t i = e->queued;
  if (i == e->queue_cap) {
    uint64_t *grown = TFMI_NEW(uint64_t, tfmi_encoder_grow(
        e, e->queue, e->few_queued, &e->queue_cap, 2 * i, sizeof *grown));
    if (!grown) return;
    e->queue = grown;
  }
  for (e->queued++; i > 0 && e->queue[(i - 1) / 2] > key; i = (i - 1) / 2)
    e->queue[i] = e->queue[(i - 1) / 2];
  e->queue[i] = key;
}

static uint64_t tfmi_queue_pop(tfmi_encoder *e) {
  uint64_t top = e->queue[0], key = e->queue[--e->queued];
  size_t i = 0, child;
  while ((child = 2 * i + 1) < e->queued) {
    child += child + 1 < e->queued && e->queue[child + 1] < e->queue[child];
    if (e->queue[child] >= key) break;
    e->queue[i] = e->queue[child];
    i = child;
  }
  e->queue[i] = key;
  return top;
}

static void tfmi_bucket_append(tfmi_encoder *e, tfmi_bucket *bucket, uint32_t node) {
  if (bucket->first == TFMI_NOBODY) bucket->first = node;
  else e->waiting[bucket->last].next = node;
  bucket->last = node;
  e->waiting[node].next = TFMI_NOBODY;
}

/* Takes the first node out of the list and frees it; its position. */
static uint32_t tfmi_waiting_take(tfmi_encoder *e, uint32_t *list) {
  uint32_t node = *list;
  *list = e->waiting[node].next;
  e->waiting[node].next = e->spare;
  e->spare = node;
  return e->waiting[node].position;
}

static void tfmi_candidate_add(tfmi_encoder *e, uint32_t rank, uint32_t position) {
  uint32_t node = e->spare;
  if (rank <= e->now) {
    tfmi_queue_push(e, (uint64_t)rank << 32 | position);
    return;
  }
  if (node != TFMI_NOBODY) {
    e->spare = e->waiting[node].next;
  } else if (e->waitings < e->waiting_cap) {
    node = (uint32_t)e->waitings++;
  } else {
    size_t need = e->waiting_cap ? e->waiting_cap + e->waiting_cap / 2 : e->symbols;
    tfmi_waiting *grown = TFMI_NEW(tfmi_waiting, tfmi_encoder_grow(
        e, e->waiting, NULL, &e->waiting_cap, need, sizeof *grown));
    if (!grown) return;
    e->waiting = grown;
    node = (uint32_t)e->waitings++;
  }
  e->waiting[node].position = position;
  tfmi_bucket_append(e, &e->bucket[rank], node);
}

/* The next rank's list becomes the batch; who is not in order there goes through the heap. */
static bool tfmi_batch_open(tfmi_encoder *e) {
  tfmi_bucket *bucket, kept = {TFMI_NOBODY, TFMI_NOBODY};
  do {
    if (e->now >= e->t->merges.ranks - 1) return false;
    bucket = &e->bucket[++e->now];
  } while (bucket->first == TFMI_NOBODY);
  while (bucket->first != TFMI_NOBODY) {
    uint32_t node = bucket->first, position = e->waiting[node].position;
    if (kept.first != TFMI_NOBODY && position < e->waiting[kept.last].position) {
      tfmi_queue_push(e, (uint64_t)e->now << 32 | tfmi_waiting_take(e, &bucket->first));
    } else {
      bucket->first = e->waiting[node].next;
      tfmi_bucket_append(e, &kept, node);
    }
  }
  e->batch = kept.first;
  return true;
}

/* The candidate of lowest rank, then position; false: none is left. */
static bool tfmi_candidate_next(tfmi_encoder *e, uint64_t *key) {
  while (!e->queued && e->batch == TFMI_NOBODY)
    if (!tfmi_batch_open(e)) return false;
  if (e->batch != TFMI_NOBODY) {
    *key = (uint64_t)e->now << 32 | e->waiting[e->batch].position;
    if (!e->queued || *key <= e->queue[0]) {
      tfmi_waiting_take(e, &e->batch);
      return true;
    }
  }
  *key = tfmi_queue_pop(e);
  return true;
}

/* Chooses where candidates wait: a short piece needs no lists. */
static bool tfmi_candidates_begin(tfmi_encoder *e) {
  size_t ranks = (size_t)e->t->merges.ranks;
  tfmi_bucket *bucket;
  e->now = INT64_MAX;
  if (e->symbols < TFMI_LONG_PIECE || ranks == 0) return true;
  e->now = -1;
  if (e->bucket) return true; /* all empty again */
  bucket = TFMI_NEW(tfmi_bucket, tfmi_encoder_grow(e, NULL, NULL, &e->bucket_cap, ranks,
                                                   sizeof *bucket));
  if (!bucket) return false;
  memset(bucket, 0xff, ranks * sizeof *bucket); /* TFMI_NOBODY */
  e->bucket = bucket;
  return true;
}

/* Symbol i has a new neighbour: looks their merge up and queues it. */
static void tfmi_symbol_pair(tfmi_encoder *e, int32_t i) {
  const tfmi_merge_table *merges = &e->t->merges;
  tfmi_symbol *s = &e->symbol[i];
  const tfmi_merge *m;
  s->merge = -1;
  if (s->next < 0) return;
  m = tfmi_merge_slot_of(merges, s->id, e->symbol[s->next].id);
  if (m->into < 0) return;
  s->merge = (int32_t)(m - merges->slot);
  tfmi_candidate_add(e, m->rank, (uint32_t)i);
}

static void tfmi_symbol_merge(tfmi_encoder *e, int32_t i) {
  tfmi_symbol *left = &e->symbol[i], *right = &e->symbol[left->next];
  left->id = e->t->merges.slot[left->merge].into;
  left->next = right->next;
  if (right->next >= 0) e->symbol[right->next].previous = i;
  right->merge = -1; /* it is gone: what is queued for it goes stale */
  if (left->previous >= 0) tfmi_symbol_pair(e, left->previous);
  tfmi_symbol_pair(e, i);
}

/* The ids of a character that is no symbol: its bytes, unk, or none. */
static int tfmi_fallback(tfmi_encoder *e, const char *p, size_t n, int32_t ids[4]) {
  const tfm_tokenizer *t = e->t;
  size_t i;
  if (t->byte_fallback) {
    for (i = 0; i < n; i++) ids[i] = t->byte_id[(uint8_t)p[i]];
    return (int)n;
  }
  if (t->strict && e->work.status == TFM_OK)
    e->work.status = tfmi_report(TFM_E_ARG,
                            "tfm_encode: the character U+%04X is not in this vocabulary; remove it "
                            "from the text", (unsigned)tfmi_rune_at(p, n).code);
  ids[0] = t->unk;
  return t->unk >= 0;
}

static void tfmi_emit_symbol(tfmi_encoder *e, int32_t id) {
  const tfm_tokenizer *t = e->t;
  int32_t ids[4];
  int n = 1, i;
  ids[0] = id;
  if (id >= t->vocabulary) /* a phantom that did not merge */
    n = tfmi_fallback(e, t->arena + t->token[id].at, t->token[id].n, ids);
  for (i = 0; i < n; i++) {
    if (!t->fuse_unk || ids[i] != t->unk || e->last != t->unk) tfmi_emit(e, ids[i]);
    e->last = ids[i];
  }
}

static void tfmi_merge_all(tfmi_encoder *e) {
  int32_t n = (int32_t)e->symbols, i;
  uint64_t key;
  if (!tfmi_candidates_begin(e)) return;
  for (i = 0; i < n; i++) {
    e->symbol[i].previous = i - 1;
    e->symbol[i].next = i + 1 < n ? i + 1 : -1;
  }
  for (i = 0; i < n; i++) tfmi_symbol_pair(e, i);
  while (tfmi_candidate_next(e, &key)) {
    const tfmi_symbol *s = &e->symbol[i = (int32_t)(uint32_t)key];
    if (s->merge >= 0 && e->t->merges.slot[s->merge].rank == key >> 32) tfmi_symbol_merge(e, i);
  }
}

/* Merges the symbols at hand, gives their ids out, and starts afresh. */
static void tfmi_symbols_done(tfmi_encoder *e) {
  int32_t i = e->symbols ? 0 : -1;
  if (e->symbols) tfmi_merge_all(e);
  if (e->work.status != TFM_OK) return;
  for (; i >= 0; i = e->symbol[i].next) tfmi_emit_symbol(e, e->symbol[i].id);
  e->symbols = 0;
}

/* Appends a symbol. Where no merge can reach across, what lies before is finished first. */
static void tfmi_symbol_add(tfmi_encoder *e, int32_t id, size_t most) {
  const tfmi_join_table *joins = &e->t->joins;
  if (e->symbols && joins->slot &&
      *tfmi_join_slot_of(joins, e->symbol[e->symbols - 1].id, id) == UINT64_MAX)
    tfmi_symbols_done(e);
  if (e->symbols == e->symbol_cap) {
    size_t need = 2 * e->symbol_cap < most ? 2 * e->symbol_cap : most;
    tfmi_symbol *grown = TFMI_NEW(tfmi_symbol, tfmi_encoder_grow(
        e, e->symbol, e->few_symbols, &e->symbol_cap, need > e->symbols ? need : e->symbols + 1,
        sizeof *grown));
    if (!grown) return;
    e->symbol = grown;
  }
  e->symbol[e->symbols++].id = id;
}

/* ---- Encoding: the stages ---- */

static void tfmi_add_unknown(tfmi_encoder *e, const char *p, size_t n, size_t most) {
  int32_t ids[4];
  int count = tfmi_fallback(e, p, n, ids), i;
  for (i = 0; i < count; i++) tfmi_symbol_add(e, ids[i], most);
}

static void tfmi_encode_bytes(tfmi_encoder *e, const char *p, size_t n) {
  size_t i;
  for (i = 0; i < n && e->work.status == TFM_OK; i++) {
    int32_t id = e->t->byte_id[(uint8_t)p[i]];
    if (id >= 0) tfmi_symbol_add(e, id, n);
    else tfmi_add_unknown(e, p + i, 1, n);
  }
}

static void tfmi_encode_characters(tfmi_encoder *e, const char *p, size_t n) {
  static const char replacement[] = "\xef\xbf\xbd";
  const tfm_tokenizer *t = e->t;
  size_t at = 0;
  while (at < n && e->work.status == TFM_OK) {
    tfmi_rune r = tfmi_rune_at(p + at, n - at);
    bool broken = r.state != TFMI_RUNE_WHOLE;
    const char *c = broken && !t->byte_fallback ? replacement : p + at;
    size_t bytes = c == replacement ? 3 : r.bytes;
    int32_t id = broken && t->byte_fallback ? -1
                 : r.code < 128             ? t->ascii_id[r.code]
                                            : tfmi_own_id(t, c, bytes);
    if (id >= 0) tfmi_symbol_add(e, id, n);
    else tfmi_add_unknown(e, c, bytes, n);
    at += r.bytes;
  }
}

/* ---- Encoding: Unigram ---- */

static int32_t tfmi_trie_find(const tfmi_trie *trie, const char *p, size_t n) {
  uint32_t node = (uint32_t)trie->mask + 1;
  const tfmi_trie_slot *s = NULL;
  size_t i;
  for (i = 0; i < n; i++) {
    s = tfmi_trie_below(trie, node, (uint8_t)p[i]);
    if (s->above == UINT32_MAX) return -1;
    node = (uint32_t)(s - trie->slot);
  }
  return s ? s->id : -1;
}

static void tfmi_best_try(const tfm_tokenizer *t, tfmi_way *best, size_t from, size_t to,
                          int32_t id, double score) {
  score += best[from].score;
  if (t->single) score = (double)(float)score;
  if (best[to].start != UINT32_MAX && score <= best[to].score) return;
  best[to].score = score;
  best[to].start = (uint32_t)from;
  best[to].id = id;
}

/* Scores every piece that begins here; a character that is none is unknown. */
static void tfmi_best_from(const tfm_tokenizer *t, tfmi_way *best, const char *p, size_t at,
                           size_t n, size_t character) {
  uint32_t node = (uint32_t)t->trie.mask + 1;
  bool known = false;
  size_t to;
  for (to = at; to < n;) {
    const tfmi_trie_slot *s = tfmi_trie_below(&t->trie, node, (uint8_t)p[to++]);
    if (s->above == UINT32_MAX) break;
    node = (uint32_t)(s - t->trie.slot);
    if (s->id < 0) continue;
    known = known || to - at == character;
    tfmi_best_try(t, best, at, to, s->id, t->score[s->id]);
  }
  if (!known) tfmi_best_try(t, best, at, at + character, t->unk, t->unk_score);
}

/* Emits what runs of unknown characters are: a piece after all, bytes, or unk. */
static void tfmi_emit_unknown(tfmi_encoder *e, const char *p, size_t n) {
  int32_t id = tfmi_trie_find(&e->t->trie, p, n);
  size_t i;
  if (id < 0 && e->t->byte_fallback) {
    for (i = 0; i < n; i++) tfmi_emit(e, e->t->byte_id[(uint8_t)p[i]]);
  } else if (id < 0 && e->t->unk < 0) {
    e->work.status = tfmi_report(TFM_E_ARG, "tfm_encode: the character U+%04X is not in this "
                                 "vocabulary, which has no unknown token; remove it from the text",
                                 (unsigned)tfmi_rune_at(p, n).code);
  } else {
    tfmi_emit(e, id < 0 ? e->t->unk : id);
  }
}

/* Turns the links from each part to the one before it round; the first part's end. */
static uint32_t tfmi_best_turn(tfmi_way *best, size_t n) {
  uint32_t at = (uint32_t)n, after = 0;
  while (at) {
    uint32_t before = best[at].start;
    best[at].start = after;
    after = at;
    at = before;
  }
  return after;
}

static void tfmi_encode_unigram(tfmi_encoder *e, const char *p, size_t n) {
  const tfm_tokenizer *t = e->t;
  size_t at, start = 0, unknown = 0;
  uint32_t stop;
  tfmi_way *best = TFMI_NEW(tfmi_way, tfmi_encoder_grow(e, e->best, NULL, &e->best_cap, n + 1,
                                                          sizeof *best));
  if (!best) return;
  e->best = best;
  for (at = 0; at <= n; at++) best[at].start = UINT32_MAX;
  best[0].score = 0;
  for (at = 0; at < n;) {
    size_t character = tfmi_rune_at(p + at, n - at).bytes;
    tfmi_best_from(t, best, p, at, n, character);
    at += character;
  }
  for (stop = tfmi_best_turn(best, n); stop && e->work.status == TFM_OK; stop = best[stop].start) {
    if (best[stop].id == t->unk) {
      unknown += stop - start;
    } else {
      if (unknown) tfmi_emit_unknown(e, p + start - unknown, unknown);
      unknown = 0;
      tfmi_emit(e, best[stop].id);
    }
    start = stop;
  }
  if (unknown) tfmi_emit_unknown(e, p + n - unknown, unknown);
}

static void tfmi_encode_word(tfmi_encoder *e, const char *p, size_t n) {
  tfmi_text word = {p, n};
  int32_t id = tfmi_own_id(e->t, p, n);
  if (id < 0 && e->t->strict)
    e->work.status = tfmi_report(TFM_E_ARG, "tfm_encode: the word \"%s\" is not in this "
                                 "vocabulary; remove it from the text", tfmi_plain(word).text);
  else tfmi_emit(e, id < 0 ? e->t->unk : id);
}

static void tfmi_encode_piece(tfmi_encoder *e, const char *p, size_t n) { /* one pre-token */
  const tfm_tokenizer *t = e->t;
  int32_t id;
  e->last = -1;
  if (n == 0) return;
  if (t->model == TFMI_WHOLE) {
    tfmi_encode_word(e, p, n);
    return;
  }
  if (t->whole.slot) {
    id = tfmi_text_find(&t->whole, p, n);
    if (id >= 0) {
      tfmi_emit(e, id);
      return;
    }
  }
  if (n > INT32_MAX) {
    e->work.status = tfmi_report(TFM_E_ARG, "tfm_encode: %llu bytes in one piece, expected at most "
                            "2^31 - 1; cut the text", (unsigned long long)n);
    return;
  }
  if (t->model == TFMI_UNIGRAM) tfmi_encode_unigram(e, p, n);
  else if (t->from_bytes) tfmi_encode_bytes(e, p, n);
  else tfmi_encode_characters(e, p, n);
  if (e->work.status == TFM_OK) tfmi_symbols_done(e);
}

static void tfmi_encode_step(tfmi_encoder *e, int32_t k, const char *p, size_t n);

/* Each piece that step k makes of the text goes on to the next step. */
static void tfmi_encode_cut(tfmi_encoder *e, int32_t k, const char *p, size_t n) {
  const tfmi_step *s = &e->t->cut[k];
  tfmi_stretch piece;
  for (; n && e->work.status == TFM_OK; p += piece.n, n -= piece.n) {
    piece = tfmi_step_piece(s, p, n);
    if (!piece.match || s->behavior != TFMI_REMOVED) tfmi_encode_step(e, k + 1, p, piece.n);
  }
}

/* What step k, of at most TFMI_STEPS_MAX, makes of the text. */
static void tfmi_encode_step(tfmi_encoder *e, int32_t k, const char *p, size_t n) {
  const tfmi_step *s = &e->t->cut[k];
  if (k == e->t->cuts) {
    e->work.goes_on = false;
    tfmi_encode_piece(e, p, n);
  } else if (s->rewrite) {
    tfmi_buffer *out = &e->work.buffer[2 + k];
    tfmi_step own = *s;
    tfmi_text in;
    in.at = p;
    in.n = n;
    out->n = 0;
    if (e->work.goes_on || (s->left && p != e->whole)) own.text.n = 0;
    s->rewrite(&e->work, &own, in, out);
    if (e->work.status == TFM_OK) tfmi_encode_step(e, k + 1, out->at, out->n);
  } else {
    tfmi_encode_cut(e, k, p, n);
  }
}

static void tfmi_encode_pieces(tfmi_encoder *e, const char *p, size_t n) {
  tfmi_encode_step(e, 0, p, n);
}

/* The first of the sorted tokens low .. high-1 whose byte at `depth` is not below `byte`. */
static int32_t tfmi_added_bound(const tfm_tokenizer *t, const tfmi_added_set *set, int32_t low,
                                int32_t high, size_t depth, int byte) {
  while (low < high) {
    int32_t middle = low + (high - low) / 2;
    if ((uint8_t)t->arena[set->token[middle].at + depth] < byte) low = middle + 1;
    else high = middle;
  }
  return low;
}

/* The longest token of the set at p: the candidates are a range of the sorted tokens, which each
   further byte narrows. */
static const tfmi_added *tfmi_added_match(const tfm_tokenizer *t, const tfmi_added_set *set,
                                          const char *p, size_t n) {
  const tfmi_added *best = NULL;
  int32_t low = 0, high = set->count;
  size_t depth;
  for (depth = 0; low < high && depth < n; depth++) {
    int byte = (uint8_t)p[depth];
    low = tfmi_added_bound(t, set, low, high, depth, byte);
    high = tfmi_added_bound(t, set, low, high, depth, byte + 1);
    if (low < high && set->token[low].n == depth + 1) best = &set->token[low++];
  }
  return best;
}

static bool tfmi_is_word(const tfm_tokenizer *t, const char *p, size_t n) { /* n may be 0 */
  return n && tfmi_charset_at(t->word, tfmi_rune_at(p, n).code);
}

/* True when words end at start and begin at stop. */
static bool tfmi_stands_alone(const tfm_tokenizer *t, const char *p, size_t n, size_t start,
                              size_t stop) {
  size_t before = start;
  while (before && (before == start || ((uint8_t)p[before] & 0xc0) == 0x80)) before--;
  return !tfmi_is_word(t, p + before, start - before) && !tfmi_is_word(t, p + stop, n - stop);
}

/* Bytes at p[0 .. n) that one token may take, and whether it may be a special one. In a copy that
   was normalised nothing tells whose text it is: none. */
static size_t tfmi_token_room(const tfmi_encoder *e, const char *p, size_t n, bool *special) {
  uintptr_t at = (uintptr_t)p - (uintptr_t)e->whole;
  size_t low = 0, high = e->spans;
  *special = (e->flags & TFM_ENCODE_PARSE_SPECIAL) != 0;
  if (!e->span) return n;
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    if (e->span[middle].end <= at) low = middle + 1;
    else high = middle;
  }
  *special = low < e->spans && e->span[low].trusted;
  return low < e->spans && e->span[low].end - at < n ? e->span[low].end - (size_t)at : n;
}

typedef void (*tfmi_between)(tfmi_encoder *e, const char *p, size_t n);

/* Cuts the tokens of a set out of the text and hands on what lies between. A special token that
   shall stay text still hides those that overlap it, as in the reference. */
static void tfmi_encode_added(tfmi_encoder *e, const tfmi_added_set *set, const char *p, size_t n,
                              tfmi_between between) {
  size_t at = 0, done = 0;
  while (set->count && at < n && e->work.status == TFM_OK) {
    const tfmi_added *a = NULL;
    size_t start = at, stop;
    bool special = false;
    if (set->first[(uint8_t)p[at]])
      a = tfmi_added_match(e->t, set, p + at, tfmi_token_room(e, p + at, n - at, &special));
    if (!a) {
      at++;
      continue;
    }
    stop = at += a->n;
    if (a->special && !special) continue;
    if (a->word && !tfmi_stands_alone(e->t, p, n, start, stop)) continue;
    if (a->left_blanks && stop <= done) continue; /* swallowed whole by the one before */
    if (a->left_blanks)
      start = done + tfmi_before_blanks(p + done, start > done ? start - done : 0);
    if (a->right_blanks) stop += tfmi_run_of(p + stop, n - stop, TFMI_SPACE);
    if (done < start) between(e, p + done, start - done);
    tfmi_emit(e, a->id);
    done = stop;
  }
  if (done < n && e->work.status == TFM_OK) between(e, p + done, n - done);
}

static void tfmi_encode_normal(tfmi_encoder *e, const char *p, size_t n) {
  const tfm_tokenizer *t = e->t;
  tfmi_text text;
  text.at = p;
  text.n = n;
  e->work.goes_on = (e->flags & TFMI_ENCODE_GOES_ON) != 0 && p == e->whole;
  text = tfmi_rewrite_all(&e->work, t->rewrite, t->rewrites, text);
  if (e->work.status == TFM_OK)
    tfmi_encode_added(e, &t->added[1], text.at, text.n, tfmi_encode_pieces);
}

/* As tfm_encode, of a text in stretches when span is not NULL, or one that goes on. */
static int64_t tfmi_encode_text(const tfm_tokenizer *tokenizer, const char *text, size_t bytes,
                                unsigned flags, const tfmi_passage *span, size_t spans,
                                int32_t *ids, size_t cap) {
  tfmi_encoder e;
  bool special = (flags & TFM_ENCODE_SPECIAL) != 0;
  int32_t i;
  tfmi_encoder_init(&e, tokenizer, flags);
  e.whole = text;
  e.span = span;
  e.spans = spans;
  e.ids = ids;
  e.cap = cap;
  for (i = 0; special && i < tokenizer->before_count; i++) tfmi_emit(&e, tokenizer->before[i]);
  tfmi_encode_added(&e, &tokenizer->added[0], text, bytes, tfmi_encode_normal);
  for (i = 0; special && i < tokenizer->after_count; i++) tfmi_emit(&e, tokenizer->after[i]);
  tfmi_encoder_free(&e);
  return e.work.status == TFM_OK ? e.count : (int64_t)e.work.status;
}

TFM_API int64_t tfm_encode(const tfm_tokenizer *tokenizer, const char *text, size_t bytes,
                           unsigned flags, int32_t *ids, size_t cap) {
  if (!tokenizer) return tfmi_null_object("tfm_encode");
  if ((bytes && !text) || (cap && !ids))
    return tfmi_report(TFM_E_ARG, "tfm_encode: text or ids is NULL, but its size is not 0");
  if (bytes > SIZE_MAX / 8)
    return tfmi_report(TFM_E_ARG, "tfm_encode: %llu bytes of text, expected at most %llu; cut it",
                       (unsigned long long)bytes, (unsigned long long)(SIZE_MAX / 8));
  if (flags & ~(unsigned)(TFM_ENCODE_SPECIAL | TFM_ENCODE_PARSE_SPECIAL))
    return tfmi_report(TFM_E_ARG, "tfm_encode: flags are 0x%x, expected 0 to 3", flags);
  return tfmi_encode_text(tokenizer, text, bytes, flags, NULL, 0, ids, cap);
}

/* ---- Decoding ----
   As the reference decodes a whole list, with one difference that streaming forces. The reference
   takes each run of byte tokens ("<0xE4>") as a whole: when the run is not UTF-8 throughout, each
   byte of it becomes U+FFFD, valid characters too. Here the characters of such a run are kept, and
   only the bytes that belong to none become U+FFFD, one each, as SentencePiece does it. */

typedef struct tfmi_sink {
  const tfm_tokenizer *t;
  tfm_decoder *state;
  char *text;
  size_t cap;
  int64_t bytes; /* of all text, what did not fit too */
} tfmi_sink;

static void tfmi_say(tfmi_sink *s, const char *p, size_t n) {
  size_t at, room;
  if (n && !s->state->started) {
    s->state->started = true;
    if (s->t->strip && p[0] == ' ') {
      p++;
      n--;
    }
  }
  at = (size_t)s->bytes;
  room = at + 1 < s->cap ? s->cap - 1 - at : 0;
  if (n && room) memcpy(s->text + at, p, n < room ? n : room);
  s->bytes += (int64_t)n;
}

/* Replaces the first k pending bytes, which form no character: together, or one by one. */
static void tfmi_say_broken(tfmi_sink *s, size_t k) {
  tfm_decoder *d = s->state;
  size_t times = s->t->says_letters ? k > 0 : k;
  for (; times; times--) tfmi_say(s, "\xef\xbf\xbd", 3);
  d->pending_bytes = (uint8_t)(d->pending_bytes - k);
  memmove(d->pending, d->pending + k, d->pending_bytes);
}

static void tfmi_say_byte(tfmi_sink *s, char byte) {
  tfm_decoder *d = s->state;
  d->pending[d->pending_bytes++] = (uint8_t)byte;
  while (d->pending_bytes) {
    tfmi_rune r = tfmi_rune_at((const char *)d->pending, d->pending_bytes);
    if (r.state == TFMI_RUNE_OPEN) return;
    if (r.state == TFMI_RUNE_BROKEN) {
      tfmi_say_broken(s, r.bytes);
    } else {
      tfmi_say(s, (const char *)d->pending, r.bytes);
      d->pending_bytes = 0; /* only the last byte can complete a character */
    }
  }
}

/* Text in which `blank` stands for a blank, or, in the first token, for nothing. */
static void tfmi_say_blanks(tfmi_sink *s, const char *p, size_t n, bool first) {
  tfmi_text blank = s->t->blank;
  size_t at = 0, done = 0;
  while (at + blank.n <= n) {
    if (memcmp(p + at, blank.at, blank.n) != 0) {
      at++;
      continue;
    }
    tfmi_say(s, p + done, at - done);
    if (!first || !s->t->drops_first) tfmi_say(s, " ", 1);
    done = at += blank.n;
  }
  tfmi_say(s, p + done, n - done);
}

static void tfmi_say_token(tfmi_sink *s, int32_t id) {
  const tfmi_token *token = &s->t->token[id];
  const char *p = s->t->arena + token->said_at;
  size_t n = token->said_n, i;
  bool first = !s->state->started;
  if (s->t->says_gaps && !first && token->speech != TFMI_SPEECH_NONE) tfmi_say(s, " ", 1);
  if (s->t->says_gaps || s->t->drops_first)
    s->state->started = first ? token->speech != TFMI_SPEECH_NONE : true;
  if (token->speech == TFMI_SPEECH_BYTES) {
    for (i = 0; i < n; i++) tfmi_say_byte(s, p[i]);
  } else if (token->speech == TFMI_SPEECH_TEXT) {
    tfmi_say_broken(s, s->state->pending_bytes);
    if (s->t->blank.n) tfmi_say_blanks(s, p, n, first);
    else tfmi_say(s, p, n);
  }
}

/* A state that another call or nobody filled in must not lead out of its array. */
static bool tfmi_decoder_fits(const tfm_decoder *d) { return d->pending_bytes < 4; }

TFM_API size_t tfm_decode_bound(const tfm_tokenizer *tokenizer) {
  return tokenizer ? 3 * ((size_t)tokenizer->longest_said + 4) + 1 : 0; /* all of it U+FFFD */
}

TFM_API int64_t tfm_decode_next(const tfm_tokenizer *tokenizer, tfm_decoder *state, int32_t id,
                                char *text, size_t cap) {
  tfmi_sink s = {tokenizer, state, text, cap, 0};
  if (!tokenizer) return tfmi_null_object("tfm_decode_next");
  if (!state || !text || !tfmi_decoder_fits(state))
    return tfmi_report(TFM_E_ARG, "tfm_decode_next: state or text is NULL, or state not zeroed");
  if (cap < tfm_decode_bound(tokenizer))
    return tfmi_report(TFM_E_ARG, "tfm_decode_next: cap is %llu, expected at least %llu "
                       "(tfm_decode_bound)", (unsigned long long)cap,
                       (unsigned long long)tfm_decode_bound(tokenizer));
  if (id < -1 || id >= tokenizer->vocabulary)
    return tfmi_report(TFM_E_ARG, "tfm_decode_next: id %d is outside the vocabulary of %d, and not "
                       "the -1 that ends a text", (int)id, (int)tokenizer->vocabulary);
  if (id < 0) tfmi_say_broken(&s, state->pending_bytes);
  else tfmi_say_token(&s, id);
  text[s.bytes] = 0;
  return s.bytes;
}

TFM_API int64_t tfm_decode(const tfm_tokenizer *tokenizer, const int32_t *ids, size_t n, char *text,
                           size_t cap) {
  tfm_decoder state = {{0}, 0, false};
  tfmi_sink s = {tokenizer, &state, text, cap, 0};
  size_t i;
  if (!tokenizer) return tfmi_null_object("tfm_decode");
  if ((n && !ids) || (cap && !text))
    return tfmi_report(TFM_E_ARG, "tfm_decode: ids or text is NULL, but its size is not 0");
  for (i = 0; i < n; i++) {
    if (ids[i] < 0 || ids[i] >= tokenizer->vocabulary)
      return tfmi_report(TFM_E_ARG, "tfm_decode: ids[%llu] is %d, expected 0 to %d",
                         (unsigned long long)i, (int)ids[i], (int)tokenizer->vocabulary - 1);
    tfmi_say_token(&s, ids[i]);
  }
  tfmi_say_broken(&s, state.pending_bytes);
  if (cap) text[(size_t)s.bytes < cap ? (size_t)s.bytes : cap - 1] = 0;
  return s.bytes;
}

/* ---- Asking ---- */

TFM_API tfm_status tfm_tokenizer_describe(const tfm_tokenizer *tokenizer, tfm_tokenizer_info *out) {
  if (!tokenizer) return tfmi_null_object("tfm_tokenizer_describe");
  if (!out) return tfmi_report(TFM_E_ARG, "tfm_tokenizer_describe: out is NULL");
  out->kind = tokenizer->kind;
  out->vocabulary = tokenizer->vocabulary;
  out->bos = tokenizer->bos;
  out->eos = tokenizer->eos;
  out->unk = tokenizer->unk;
  out->pad = tokenizer->pad;
  out->adds_bos = tokenizer->before_count > 0;
  out->adds_eos = tokenizer->after_count > 0;
  return TFM_OK;
}

TFM_API const char *tfm_token_text(const tfm_tokenizer *tokenizer, int32_t id, size_t *bytes) {
  const tfmi_token *token;
  if (!tokenizer || id < 0 || id >= tokenizer->vocabulary) return NULL;
  token = &tokenizer->token[id];
  if (token->speech == TFMI_SPEECH_NONE) return NULL;
  if (bytes) *bytes = token->n;
  return tokenizer->arena + token->at;
}

TFM_API int32_t tfm_token_id(const tfm_tokenizer *tokenizer, const char *text, size_t bytes) {
  int32_t id = -1;
  if (tokenizer && (text || !bytes)) id = tfmi_text_find(&tokenizer->spelled, text, bytes);
  return id >= 0 && id < tokenizer->vocabulary ? id : -1; /* phantoms are nobody's business */
}

/* What stands in for an empty prompt; -1: nothing does. */
static int32_t tfmi_tokenizer_start_id(const tfm_tokenizer *t) {
  static const char end[] = "<|endoftext|>"; /* what GPT-2 was trained to start after */
  return t->bos >= 0 ? t->bos : tfm_token_id(t, end, sizeof end - 1);
}

#if TFMI_COMPILES_COLD
#pragma GCC push_options
#pragma GCC optimize("O1")
#endif
/* ---- Making: what every kind of file is brought to ---- */

enum { /* types of pieces, numbered as by SentencePiece and GGUF */
  TFMI_PIECE_NORMAL = 1, TFMI_PIECE_UNKNOWN, TFMI_PIECE_CONTROL, TFMI_PIECE_USER,
  TFMI_PIECE_UNUSED, TFMI_PIECE_BYTE, TFMI_PIECE_PHANTOM, TFMI_PIECE_ADDED
};
enum {
  TFMI_VOCABULARY_MAX = 1 << 22, TFMI_PIECE_BYTES_MAX = 512, TFMI_PROBES_MAX = 2000,
  TFMI_AFFIX_MAX = 64 /* bytes of what a normaliser puts in */
};

typedef struct tfmi_piece {
  tfmi_text text;
  int32_t id, type;
  double score;
} tfmi_piece;

typedef struct tfmi_merge_text {
  tfmi_text left, right; /* left.at NULL: `right` is a line that cannot be cut in two */
} tfmi_merge_text;

typedef struct tfmi_added_text {
  tfmi_text text;
  tfmi_text pattern; /* what is looked for: the text, or what the rewriting steps make of it */
  int32_t id;
  bool special, left_blanks, right_blanks, word;
  bool normalised; /* belongs to the second set ... */
  bool verbatim;   /* ... and is looked for as it is, not in normalised form */
} tfmi_added_text;

typedef struct tfmi_template_id {
  tfmi_text name;
  int32_t id;
} tfmi_template_id;

typedef struct tfmi_make { /* a load of a tokenizer */
  tfmi_load load;
  tfmi_heap heap;
  tfmi_load *outer; /* the load that this one interrupts, if any */
  const tfm_tokenizer_config *config;
  const char *path; /* or NULL, then: */
  const void *data;
  size_t bytes;
  tfmi_file file[8]; /* the model, all that may lie beside it, its companions */
  int32_t files;
  bool done;
  tfm_tokenizer *t;
  tfmi_piece *piece;            /* stb arrays, all of them */
  tfmi_merge_text *merge;
  tfmi_added_text *added;
  tfmi_text *template_names;    /* before and after the text, at NULL */
  tfmi_template_id *template_ids;
  size_t vocabulary_pieces;     /* the first so many are the model's own */
  uint32_t arena_bytes, arena_cap;
  uint64_t merge_count;
  tfmi_text unk;                /* spelling; n 0: none, or known by its id */
  bool scored;                  /* merges follow from the scores */
  bool whole_first;             /* a pre-token that is a token needs no merging */
  bool says_bytes, says_blanks; /* decoding knows "<0x0A>"; turns U+2581 into a blank */
  bool no_blanks;               /* steps leave no blank in the text */
  tfmi_step blanks;             /* the step that SentencePiece files share; rewrite NULL: none */
  tfmi_charset *set[TFMI_CHARSETS];
  tfmi_composed *pairs;
  tfmi_encoder *work;           /* for rewriting while loading */
} tfmi_make;

static const char tfmi_low_line[] = "\xe2\x96\x81"; /* U+2581, SentencePiece's blank */

static tfmi_piece *tfmi_make_piece(tfmi_make *m, tfmi_text text, int64_t id, int32_t type,
                                   double score) {
  tfmi_piece p;
  if (id < 0 || id >= TFMI_VOCABULARY_MAX)
    tfmi_fail(&m->load, id < 0 ? TFM_E_FORMAT : TFM_E_UNSUPPORTED,
              "token \"%s\" has id %lld, expected 0 to %d", tfmi_plain(text).text, (long long)id,
              TFMI_VOCABULARY_MAX - 1);
  p.text = text;
  p.id = (int32_t)id;
  p.type = type;
  p.score = score;
  stbds_arrput(m->piece, p);
  return &m->piece[stbds_arrlen(m->piece) - 1];
}

static uint32_t tfmi_arena_put(tfmi_make *m, const char *p, size_t n) {
  uint32_t at = m->arena_bytes;
  TFM_ASSERT(n <= m->arena_cap - at);
  if (n) memcpy(m->t->arena + at, p, n);
  m->arena_bytes += (uint32_t)n;
  return at;
}

/* Room for every text twice, as it is spelled and as it is said, and for what added tokens are. */
static void tfmi_arena_make(tfmi_make *m) {
  uint64_t bytes = 1;
  ptrdiff_t i;
  for (i = 0; i < stbds_arrlen(m->piece); i++) bytes += 2 * (uint64_t)m->piece[i].text.n;
  for (i = 0; i < stbds_arrlen(m->added); i++)
    bytes += 2 * (uint64_t)m->added[i].pattern.n;
  if (bytes > UINT32_MAX)
    tfmi_fail(&m->load, TFM_E_UNSUPPORTED, "the vocabulary's texts take %llu bytes, expected less "
              "than 2^32", (unsigned long long)bytes);
  m->t->arena = (char *)tfmi_keep(&m->load, bytes, 1);
  m->arena_cap = (uint32_t)bytes;
  m->arena_bytes = 0;
}

static void tfmi_text_table_make(tfmi_make *m, tfmi_text_table *table, uint64_t count) {
  uint64_t slots = tfmi_slots(count), i;
  table->slot = TFMI_NEW(tfmi_text_slot, tfmi_keep(&m->load, slots, sizeof *table->slot));
  table->mask = slots - 1;
  table->arena = m->t->arena;
  for (i = 0; i < slots; i++) table->slot[i].id = -1;
}

/* Keys that crowd one place of a table, far from where their hash has them, were made to do so. */
static void tfmi_check_probes(tfmi_make *m, ptrdiff_t slot, uint64_t hash, uint64_t mask) {
  if ((((uint64_t)slot - hash) & mask) > TFMI_PROBES_MAX)
    tfmi_fail(&m->load, TFM_E_UNSUPPORTED, "more than %d of the vocabulary's texts or merges have "
              "the same hash", TFMI_PROBES_MAX);
}

/* The id that already has this text, or -1 and now it is `id`. */
static int32_t tfmi_text_table_put(tfmi_make *m, tfmi_text_table *table, uint32_t at, uint32_t n,
                                   int32_t id) {
  uint32_t hash = tfmi_text_hash(table->arena + at, n);
  tfmi_text_slot *s = tfmi_text_slot_of(table, table->arena + at, n, hash);
  tfmi_check_probes(m, s - table->slot, hash, table->mask);
  if (s->id >= 0) return s->id;
  s->hash = hash;
  s->at = at;
  s->n = n;
  s->id = id;
  return -1;
}

static void tfmi_check_utf8(tfmi_make *m, const tfmi_piece *p) {
  size_t at = 0;
  while (at < p->text.n) {
    tfmi_rune r = tfmi_rune_at(p->text.at + at, p->text.n - at);
    if (r.state != TFMI_RUNE_WHOLE)
      tfmi_fail(&m->load, TFM_E_FORMAT, "token %d, \"%s\", is not UTF-8", (int)p->id,
                tfmi_plain(p->text).text);
    at += r.bytes;
  }
}

static void tfmi_place_piece(tfmi_make *m, const tfmi_piece *p) {
  tfmi_token *token = &m->t->token[p->id];
  int32_t other;
  if (token->speech != TFMI_SPEECH_NONE)
    tfmi_fail(&m->load, TFM_E_FORMAT, "tokens \"%s\" and \"%.*s\" have the same id, %d",
              tfmi_plain(p->text).text, (int)(token->n < 60 ? token->n : 60),
              m->t->arena + token->at, (int)p->id);
  tfmi_check_utf8(m, p);
  token->speech = TFMI_SPEECH_TEXT;
  token->added = p->type == TFMI_PIECE_ADDED;
  token->n = (uint32_t)p->text.n;
  token->at = tfmi_arena_put(m, p->text.at, p->text.n);
  other = tfmi_text_table_put(m, &m->t->spelled, token->at, token->n, p->id);
  if (other >= 0)
    tfmi_fail(&m->load, TFM_E_FORMAT, "token \"%s\" is there twice, with the ids %d and %d",
              tfmi_plain(p->text).text, (int)other, (int)p->id);
}

/* The texts with their ids, findable. Again from the start when pieces have been added since. */
static void tfmi_place(tfmi_make *m) {
  tfm_tokenizer *t = m->t;
  ptrdiff_t count = stbds_arrlen(m->piece), i;
  int32_t ids = 0;
  tfmi_release(&m->load, t->arena);
  tfmi_release(&m->load, t->token);
  tfmi_release(&m->load, t->spelled.slot);
  t->vocabulary = 0;
  for (i = 0; i < count; i++) {
    if (m->piece[i].id >= ids) ids = m->piece[i].id + 1;
    if (m->piece[i].type != TFMI_PIECE_PHANTOM) t->vocabulary = ids;
  }
  if (t->vocabulary == 0) tfmi_fail(&m->load, TFM_E_FORMAT, "the vocabulary is empty");
  tfmi_arena_make(m);
  t->token = TFMI_NEW(tfmi_token, tfmi_keep(&m->load, (uint64_t)ids, sizeof *t->token));
  tfmi_text_table_make(m, &t->spelled, (uint64_t)count);
  for (i = 0; i < count; i++) tfmi_place_piece(m, &m->piece[i]);
}

/* Fields that a file hands over as scratch outlive it. */
static tfmi_text tfmi_keep_bytes(tfmi_make *m, tfmi_text text) {
  char *kept = (char *)tfmi_keep(&m->load, text.n + 1, 1);
  tfmi_append(kept, 0, text);
  text.at = kept;
  return text;
}

/* ---- Making: steps ---- */

static tfmi_step *tfmi_add_step(tfmi_make *m, tfmi_step *list, int32_t *count) {
  if (*count == TFMI_STEPS_MAX)
    tfmi_fail(&m->load, TFM_E_UNSUPPORTED, "more than %d steps", TFMI_STEPS_MAX);
  return &list[(*count)++];
}

static tfmi_step *tfmi_add_rewrite(tfmi_make *m, tfmi_rewriter rewrite) {
  tfmi_step *s = tfmi_add_step(m, m->t->rewrite, &m->t->rewrites);
  s->rewrite = rewrite;
  return s;
}

static tfmi_step *tfmi_add_cut(tfmi_make *m, tfmi_finder find, tfmi_behavior behavior) {
  tfmi_step *s = tfmi_add_step(m, m->t->cut, &m->t->cuts);
  s->find = find;
  s->behavior = behavior;
  return s;
}

static void tfmi_cut_by(tfmi_make *m, tfmi_splitter split) {
  tfmi_add_cut(m, tfmi_find_split, TFMI_ISOLATED)->split = split;
}

/* Before or between cuts: what Metaspace and ByteLevel's add_prefix_space do. */
static tfmi_step *tfmi_add_lead(tfmi_make *m, tfmi_text prefix) {
  tfmi_step *s = tfmi_add_step(m, m->t->cut, &m->t->cuts);
  s->rewrite = tfmi_rewrite_lead;
  s->text = prefix;
  return s;
}

static tfmi_charset *tfmi_make_charset(tfmi_make *m, tfmi_charset_name name) {
  if (!m->set[name]) m->set[name] = tfmi_charset_make(&m->load, name);
  return m->set[name];
}

/* A character of n parts composes of the one of its first n - 1 parts and the last part. */
static void tfmi_make_pair(tfmi_make *m, const uint32_t *part, uint32_t n, uint32_t code) {
  uint32_t first = part[0], i;
  size_t slot = 0;
  for (i = 1; i < n; i++) {
    slot = tfmi_composed_slot(m->pairs, first, part[i]);
    if (i + 1 < n) first = m->pairs[slot].whole;
  }
  m->pairs[slot].first = first;
  m->pairs[slot].second = part[n - 1];
  m->pairs[slot].whole = code;
}

/* From canonical decompositions, which are complete: those of fewer parts first. */
static const tfmi_composed *tfmi_make_pairs(tfmi_make *m) {
  const tfmi_charset *nfd = tfmi_make_charset(m, TFMI_CHARS_NFD);
  uint32_t code, n, v;
  if (m->pairs) return m->pairs;
  m->pairs = TFMI_NEW(tfmi_composed, tfmi_keep(&m->load, TFMI_PAIR_SLOTS, sizeof *m->pairs));
  for (n = 2; n <= 4; n++)
    for (code = 0; code < TFMI_CODES; code++)
      if ((v = tfmi_charset_at(nfd, code)) != 0 && !nfd->flag[v - 1] &&
          nfd->begin[v] - nfd->begin[v - 1] == n)
        tfmi_make_pair(m, nfd->target + nfd->begin[v - 1], n, code);
  return m->pairs;
}

static void tfmi_add_form(tfmi_make *m, bool composes, bool compat) {
  tfmi_step *s = tfmi_add_rewrite(m, tfmi_rewrite_form);
  s->set = tfmi_make_charset(m, TFMI_CHARS_NFD);
  s->combining = tfmi_make_charset(m, TFMI_CHARS_COMBINING);
  if (compat) s->compat = tfmi_make_charset(m, TFMI_CHARS_NFKD);
  if (composes) s->pairs = tfmi_make_pairs(m);
  s->composes = composes;
}

/* ---- Making: patterns ----
   The part of regular expressions that can be done exactly and in linear time: literals, classes,
   groups, |, greedy repetition, (?i:), and assertions about one character. */

enum {
  TFMI_REGEX_SETS = 32, TFMI_REGEX_OPS = 1000, TFMI_REGEX_STATES = 1000, TFMI_REGEX_DEPTH = 16
};

typedef enum tfmi_regex_op {
  TFMI_OP_SET, TFMI_OP_FORK, TFMI_OP_JUMP, TFMI_OP_NOT_AHEAD, TFMI_OP_AHEAD, TFMI_OP_MATCH
} tfmi_regex_op;

typedef struct tfmi_regex_code {
  tfmi_regex_op op;
  int32_t a, b; /* FORK: tried in this order; JUMP: a; others: set a */
} tfmi_regex_code;

typedef struct tfmi_regex_item { /* characters of these categories, or from first to last */
  uint32_t categories, first, last;
  bool word, negated;            /* \w */
} tfmi_regex_item;

typedef struct tfmi_regex_set {
  tfmi_regex_item *item; /* stb array */
  bool negated;
} tfmi_regex_set;

typedef struct tfmi_regex_make {
  tfmi_make *make;
  const char *pattern, *at, *end;
  tfmi_regex_set set[TFMI_REGEX_SETS];
  int32_t sets, depth;
  bool fold;
  char folded;             /* the last literal where case does not matter; 0: none */
  tfmi_regex_code *code;   /* stb array */
  int32_t *place;          /* stb array: the places of all states, one state after the other */
  int32_t *begin;          /* stb array: where those of a state begin, and the end */
  uint32_t *members;       /* stb array: the sets of each class, as bits */
  uint16_t *next;          /* stb array: [states][width] */
  int32_t stack[2 * TFMI_REGEX_OPS];
  bool seen[TFMI_REGEX_OPS + 1];
} tfmi_regex_make;

static TFMI_NORETURN void tfmi_regex_fail(tfmi_regex_make *x, const char *what) {
  tfmi_text pattern;
  pattern.at = x->pattern;
  pattern.n = (size_t)(x->end - x->pattern);
  tfmi_fail(&x->make->load, TFM_E_UNSUPPORTED, "the pattern \"%s\" has %s at its byte %llu, which "
            "cannot be reproduced exactly", tfmi_plain(pattern).text, what,
            (unsigned long long)(x->at - x->pattern));
}

static bool tfmi_regex_take(tfmi_regex_make *x, const char *word) {
  size_t n = strlen(word);
  if ((size_t)(x->end - x->at) < n || memcmp(x->at, word, n) != 0) return false;
  x->at += n;
  return true;
}

static int32_t tfmi_regex_emit(tfmi_regex_make *x, tfmi_regex_op op, int32_t a, int32_t b) {
  tfmi_regex_code code;
  code.op = op;
  code.a = a;
  code.b = b;
  if (stbds_arrlen(x->code) >= TFMI_REGEX_OPS) tfmi_regex_fail(x, "too many parts");
  stbds_arrput(x->code, code);
  return (int32_t)stbds_arrlen(x->code) - 1;
}

static uint32_t tfmi_regex_rune(tfmi_regex_make *x) {
  tfmi_rune r;
  if (x->at == x->end) tfmi_regex_fail(x, "its end");
  r = tfmi_rune_at(x->at, (size_t)(x->end - x->at));
  if (r.state != TFMI_RUNE_WHOLE) tfmi_regex_fail(x, "no UTF-8");
  x->at += r.bytes;
  return r.code;
}

static const struct tfmi_regex_property {
  const char *name;
  uint32_t categories;
} tfmi_regex_properties[] = {
  {"L}", 1 << TFMI_CAT_LU | 1 << TFMI_CAT_LL | 1 << TFMI_CAT_LT | 1 << TFMI_CAT_LM |
         1 << TFMI_CAT_LO},
  {"Lu}", 1 << TFMI_CAT_LU}, {"Ll}", 1 << TFMI_CAT_LL}, {"Lt}", 1 << TFMI_CAT_LT},
  {"Lm}", 1 << TFMI_CAT_LM}, {"Lo}", 1 << TFMI_CAT_LO}, {"M}", 1 << TFMI_CAT_M},
  {"N}", 1 << TFMI_CAT_ND | 1 << TFMI_CAT_NX}, {"Nd}", 1 << TFMI_CAT_ND},
  {"P}", 1 << TFMI_CAT_PC | 1 << TFMI_CAT_PX}, {"Pc}", 1 << TFMI_CAT_PC},
  {"S}", 1 << TFMI_CAT_S},
};

/* After the backslash: a property, a class, or a character by its code. */
static tfmi_regex_item tfmi_regex_escape(tfmi_regex_make *x) {
  static const char names[] = "nrtfv", codes[] = "\n\r\t\f\v";
  tfmi_regex_item item = {0, 1, 0, false, false};
  uint32_t c = tfmi_regex_rune(x), lower = c | 32;
  const char *found;
  int i;
  item.negated = c == 'P' || c == 'S' || c == 'D' || c == 'W';
  if (lower == 'p' && tfmi_regex_take(x, "{")) {
    for (i = 0; i < TFMI_COUNT(tfmi_regex_properties); i++) {
      item.categories = tfmi_regex_properties[i].categories;
      if (tfmi_regex_take(x, tfmi_regex_properties[i].name)) return item;
    }
    tfmi_regex_fail(x, "a property");
  }
  if (lower == 's') item.categories = 1 << TFMI_CAT_SPACE;
  else if (lower == 'd') item.categories = 1 << TFMI_CAT_ND;
  else if (lower == 'w') item.word = true;
  else if (c < 128 && (found = strchr(names, (int)c)) != NULL && c)
    item.first = item.last = (uint32_t)codes[found - names];
  else if (c < 128 && !(lower >= 'a' && lower <= 'z') && !(c >= '0' && c <= '9'))
    item.first = item.last = c;
  else tfmi_regex_fail(x, "an escape");
  return item;
}

static tfmi_regex_set *tfmi_regex_set_new(tfmi_regex_make *x) {
  if (x->sets == TFMI_REGEX_SETS) tfmi_regex_fail(x, "too many classes");
  return &x->set[x->sets++];
}

/* Adds an item, and what Onigmo takes for the same in another case. */
static void tfmi_regex_item_add(tfmi_regex_make *x, tfmi_regex_set *set, tfmi_regex_item item) {
  uint32_t c = item.first, lower = c | 32;
  stbds_arrput(set->item, item);
  if (!x->fold || item.categories || item.word) return;
  if (item.first != item.last || c > 127) tfmi_regex_fail(x, "a class in any case");
  if (lower < 'a' || lower > 'z') return;
  item.first = item.last = c ^ 32;
  stbds_arrput(set->item, item);
  item.first = item.last = lower == 's' ? 0x17f : 0x212a; /* long s, the sign for kelvin */
  if (lower == 's' || lower == 'k') stbds_arrput(set->item, item);
}

static bool tfmi_regex_same_set(const tfmi_regex_set *a, const tfmi_regex_set *b) {
  ptrdiff_t i, n = stbds_arrlen(a->item);
  if (a->negated != b->negated || n != stbds_arrlen(b->item)) return false;
  for (i = 0; i < n; i++) {
    const tfmi_regex_item *p = &a->item[i], *q = &b->item[i];
    if (p->categories != q->categories || p->first != q->first || p->last != q->last ||
        p->word != q->word || p->negated != q->negated)
      return false;
  }
  return true;
}

/* The newest set, or the earlier one that is the same: what a pattern repeats takes no room. */
static int32_t tfmi_regex_set_done(tfmi_regex_make *x) {
  int32_t newest = x->sets - 1, i = 0;
  while (!tfmi_regex_same_set(&x->set[i], &x->set[newest])) i++;
  if (i == newest) return newest;
  stbds_arrfree(x->set[newest].item);
  memset(&x->set[newest], 0, sizeof x->set[newest]);
  x->sets--;
  return i;
}

static tfmi_regex_item tfmi_regex_member(tfmi_regex_make *x) { /* within [ ] */
  tfmi_regex_item item = {0, 1, 0, false, false}, last;
  const char *at = x->at;
  if (*at == '[' || (*at == '&' && x->end - at > 1 && at[1] == '&'))
    tfmi_regex_fail(x, "a class within a class");
  if (tfmi_regex_take(x, "\\")) item = tfmi_regex_escape(x);
  else item.first = item.last = tfmi_regex_rune(x);
  if (x->end - x->at < 2 || x->at[0] != '-' || x->at[1] == ']') return item;
  if (item.categories || item.word) tfmi_regex_fail(x, "a range from a class");
  x->at++;
  last = item;
  if (tfmi_regex_take(x, "\\")) last = tfmi_regex_escape(x);
  else last.first = last.last = tfmi_regex_rune(x);
  if (last.categories || last.word || last.first < item.first) tfmi_regex_fail(x, "a range");
  item.last = last.first;
  return item;
}

/* A class, an escape, or a character: the number of its set. */
static int32_t tfmi_regex_one(tfmi_regex_make *x) {
  static const char special[] = "^$*+?{}()|]";
  tfmi_regex_set *set = tfmi_regex_set_new(x);
  tfmi_regex_item item = {0, 1, 0, false, false};
  if (tfmi_regex_take(x, "[")) {
    set->negated = tfmi_regex_take(x, "^");
    if (x->at < x->end && *x->at == ']') tfmi_regex_fail(x, "an empty class");
    while (!tfmi_regex_take(x, "]")) tfmi_regex_item_add(x, set, tfmi_regex_member(x));
    return tfmi_regex_set_done(x);
  }
  if (tfmi_regex_take(x, "\\")) {
    item = tfmi_regex_escape(x);
  } else if (tfmi_regex_take(x, ".")) {
    item.first = item.last = '\n';
    set->negated = true;
  } else if (x->at < x->end && *x->at && strchr(special, *x->at)) {
    tfmi_regex_fail(x, "an operator");
  } else {
    item.first = item.last = tfmi_regex_rune(x);
  }
  tfmi_regex_item_add(x, set, item);
  return tfmi_regex_set_done(x);
}

/* In any case "ss" is also one letter, and so are these. */
static void tfmi_regex_check_pair(tfmi_regex_make *x, char c) {
  static const char pairs[][3] = {"ss", "st", "ff", "fi", "fl"};
  int i;
  for (i = 0; i < TFMI_COUNT(pairs); i++)
    if (x->fold && x->folded == pairs[i][0] && (c | 32) == pairs[i][1])
      tfmi_regex_fail(x, "letters that are one in another case");
  x->folded = (char)(c | 32);
}

static void tfmi_regex_choice(tfmi_regex_make *x);

static void tfmi_regex_group(tfmi_regex_make *x) { /* after ( */
  bool fold = x->fold;
  if (++x->depth > TFMI_REGEX_DEPTH) tfmi_regex_fail(x, "groups too deep");
  if (tfmi_regex_take(x, "?")) {
    if (tfmi_regex_take(x, "i:")) x->fold = true;
    else if (!tfmi_regex_take(x, ":")) tfmi_regex_fail(x, "a kind of group");
  }
  tfmi_regex_choice(x);
  if (!tfmi_regex_take(x, ")")) tfmi_regex_fail(x, "no )");
  x->fold = fold;
  x->depth--;
}

static void tfmi_regex_atom(tfmi_regex_make *x) {
  bool not_ahead = tfmi_regex_take(x, "(?!"), ahead = !not_ahead && tfmi_regex_take(x, "(?=");
  if (not_ahead || ahead) {
    tfmi_regex_emit(x, not_ahead ? TFMI_OP_NOT_AHEAD : TFMI_OP_AHEAD, tfmi_regex_one(x), 0);
    if (!tfmi_regex_take(x, ")")) tfmi_regex_fail(x, "an assertion of more than one character");
  } else if (tfmi_regex_take(x, "(")) {
    tfmi_regex_group(x);
  } else {
    if (x->at < x->end) tfmi_regex_check_pair(x, *x->at);
    tfmi_regex_emit(x, TFMI_OP_SET, tfmi_regex_one(x), 0);
  }
}

/* {2}, {2,} or {2,5}; most -1: without end. False: no repetition follows. */
static bool tfmi_regex_times(tfmi_regex_make *x, int32_t *least, int32_t *most) {
  int32_t *to = least;
  *least = tfmi_regex_take(x, "+");
  *most = -1;
  if (*least || tfmi_regex_take(x, "*")) return true;
  *most = 1;
  if (tfmi_regex_take(x, "?")) return true;
  if (!tfmi_regex_take(x, "{")) return false;
  for (*most = -1; x->at < x->end && *x->at != '}'; x->at++) {
    if (*x->at == ',' && to == least) to = most;
    else if (*x->at < '0' || *x->at > '9' || *to > 99) tfmi_regex_fail(x, "a repetition");
    else *to = (*to < 0 ? 0 : *to * 10) + (*x->at - '0');
  }
  if (to == least) *most = *least;
  if (!tfmi_regex_take(x, "}") || *most == 0 || (*most > 0 && *most < *least))
    tfmi_regex_fail(x, "a repetition");
  return true;
}

/* An atom that has been written from `from` on becomes as many as wanted: x{2,} is xxx*. */
static void tfmi_regex_repeat(tfmi_regex_make *x, int32_t from, int32_t least, int32_t most) {
  tfmi_regex_code *copy = NULL;
  int32_t count = (int32_t)stbds_arrlen(x->code) - from, i, at, k;
  for (i = 0; i < count; i++) stbds_arrput(copy, x->code[from + i]);
  stbds_arrsetlen(x->code, (size_t)from);
  for (k = 0; k < (most < 0 ? least + 1 : most); k++) {
    int32_t fork = -1, by;
    if (k >= least) fork = tfmi_regex_emit(x, TFMI_OP_FORK, 0, 0);
    at = (int32_t)stbds_arrlen(x->code);
    by = at - from;
    for (i = 0; i < count; i++) {
      bool moves = copy[i].op == TFMI_OP_FORK || copy[i].op == TFMI_OP_JUMP;
      tfmi_regex_emit(x, copy[i].op, copy[i].a + (moves ? by : 0), copy[i].b + (moves ? by : 0));
    }
    if (k < least) continue;
    if (most < 0) tfmi_regex_emit(x, TFMI_OP_JUMP, fork, 0);
    x->code[fork].a = at;
    x->code[fork].b = -1; /* to the end, which is known below */
  }
  for (i = from; i < (int32_t)stbds_arrlen(x->code); i++)
    if (x->code[i].op == TFMI_OP_FORK && x->code[i].b == -1)
      x->code[i].b = (int32_t)stbds_arrlen(x->code);
  stbds_arrfree(copy);
}

/* Whether the ops from `from` to the last can be passed without a character. */
static bool tfmi_regex_empty(tfmi_regex_make *x, int32_t from) {
  int32_t end = (int32_t)stbds_arrlen(x->code), n = 0;
  memset(x->seen, 0, sizeof x->seen);
  for (x->stack[n++] = from; n;) {
    int32_t i = x->stack[--n];
    if (i >= end) return true;
    if (x->seen[i]) continue;
    x->seen[i] = true;
    if (x->code[i].op == TFMI_OP_SET) continue;
    if (x->code[i].op == TFMI_OP_FORK) x->stack[n++] = x->code[i].b;
    x->stack[n++] = x->code[i].op == TFMI_OP_FORK || x->code[i].op == TFMI_OP_JUMP
                        ? x->code[i].a : i + 1;
  }
  return false;
}

static void tfmi_regex_sequence(tfmi_regex_make *x) {
  x->folded = 0;
  while (x->at < x->end && *x->at != '|' && *x->at != ')') {
    int32_t from = (int32_t)stbds_arrlen(x->code), least, most;
    tfmi_regex_atom(x);
    if (!tfmi_regex_times(x, &least, &most)) continue;
    if (x->at < x->end && strchr("+*?", *x->at) && *x->at)
      tfmi_regex_fail(x, "a possessive or lazy repetition");
    if (tfmi_regex_empty(x, from)) tfmi_regex_fail(x, "a repetition of what can be empty");
    tfmi_regex_repeat(x, from, least, most);
    x->folded = 0;
  }
}

static void tfmi_regex_choice(tfmi_regex_make *x) {
  int32_t from = (int32_t)stbds_arrlen(x->code), *jump = NULL;
  ptrdiff_t i;
  tfmi_regex_sequence(x);
  while (tfmi_regex_take(x, "|")) { /* what is there goes behind a fork */
    int32_t count = (int32_t)stbds_arrlen(x->code) - from;
    tfmi_regex_emit(x, TFMI_OP_JUMP, 0, 0);
    memmove(x->code + from + 1, x->code + from, (size_t)count * sizeof *x->code);
    for (i = from + 1; i <= from + count; i++)
      if (x->code[i].op == TFMI_OP_FORK || x->code[i].op == TFMI_OP_JUMP) {
        x->code[i].a++;
        x->code[i].b++;
      }
    x->code[from].op = TFMI_OP_FORK;
    x->code[from].a = from + 1;
    stbds_arrput(jump, tfmi_regex_emit(x, TFMI_OP_JUMP, 0, 0));
    x->code[from].b = (int32_t)stbds_arrlen(x->code);
    from = x->code[from].b;
    tfmi_regex_sequence(x);
  }
  for (i = 0; i < stbds_arrlen(jump); i++)
    x->code[jump[i]].a = (int32_t)stbds_arrlen(x->code);
  stbds_arrfree(jump);
}

/* Onigmo's \w has the numbers of Latin-1, and not what joins. */
static bool tfmi_regex_is_word(const tfmi_charset *words, uint32_t c) {
  if (c == 0xb2 || c == 0xb3 || c == 0xb9 || (c >= 0xbc && c <= 0xbe)) return true;
  return c != 0x200c && c != 0x200d && tfmi_charset_at(words, c);
}

/* The sets of a character, as bits. */
static uint32_t tfmi_regex_members(const tfmi_regex_make *x, uint32_t code, uint32_t category,
                                   bool word) {
  uint32_t bits = 0;
  int32_t i;
  ptrdiff_t k;
  for (i = 0; i < x->sets; i++) {
    bool in = false;
    for (k = 0; k < stbds_arrlen(x->set[i].item) && !in; k++) {
      const tfmi_regex_item *item = &x->set[i].item[k];
      in = item->word ? word : (item->categories >> category & 1) ||
                                   (code >= item->first && code <= item->last);
      in = in != item->negated;
    }
    bits |= (uint32_t)(in != x->set[i].negated) << i;
  }
  return bits;
}

/* Where an item begins or has ended, next behind a character. */
static uint32_t tfmi_regex_edge(const tfmi_regex_make *x, uint32_t code) {
  uint32_t edge = TFMI_CODES;
  int32_t i;
  ptrdiff_t k;
  for (i = 0; i < x->sets; i++)
    for (k = 0; k < stbds_arrlen(x->set[i].item); k++) {
      const tfmi_regex_item *item = &x->set[i].item[k];
      if (item->first > code && item->first < edge) edge = item->first;
      if (item->last >= code && item->last < edge) edge = item->last + 1;
    }
  return edge;
}

/* Characters of the same sets are one class. */
static uint16_t tfmi_regex_class(tfmi_regex_make *x, uint32_t members) {
  ptrdiff_t k = 0;
  while (k < stbds_arrlen(x->members) && x->members[k] != members) k++;
  if (k == stbds_arrlen(x->members)) stbds_arrput(x->members, members);
  if (k > 250) tfmi_regex_fail(x, "too many classes of characters");
  return (uint16_t)k;
}

/* Between the edges of items only the category counts, and what \w says. */
static tfmi_charset *tfmi_regex_classes(tfmi_regex_make *x) {
  tfmi_load *l = &x->make->load;
  tfmi_charset *classes = TFMI_NEW(tfmi_charset, tfmi_keep(l, 1, sizeof *classes));
  const tfmi_charset *categories = tfmi_make_charset(x->make, TFMI_CHARS_CATEGORY);
  const tfmi_charset *words = tfmi_make_charset(x->make, TFMI_CHARS_WORD);
  uint16_t *value = TFMI_NEW(uint16_t, tfmi_scratch(l, TFMI_CODES, sizeof *value));
  uint16_t known[32][2]; /* a class, plus 1 */
  uint32_t code, edge = 0;
  for (code = 0; code < TFMI_CODES; code++) {
    uint32_t category = tfmi_charset_at(categories, code);
    bool word = tfmi_regex_is_word(words, code);
    uint16_t *class_ = &known[category][word];
    if (code == edge) {
      memset(known, 0, sizeof known);
      edge = tfmi_regex_edge(x, code);
    }
    if (!*class_)
      *class_ = (uint16_t)(1 + tfmi_regex_class(x, tfmi_regex_members(x, code, category, word)));
    value[code] = (uint16_t)(*class_ - 1);
  }
  tfmi_charset_pages(l, classes, value);
  tfmi_release(l, value);
  return classes;
}

/* From a state with the next character's class, or the end: the places after it go to the end of
   x->place; true when a match ends before it. */
static bool tfmi_regex_step(tfmi_regex_make *x, int32_t state, uint32_t class_, bool end) {
  uint32_t members = end ? 0 : x->members[class_];
  int32_t k, n, i;
  memset(x->seen, 0, sizeof x->seen);
  for (k = x->begin[state]; k < x->begin[state + 1]; k++)
    for (n = 0, x->stack[n++] = x->place[k]; n;) {
      const tfmi_regex_code *c = &x->code[i = x->stack[--n]];
      bool in = c->op != TFMI_OP_FORK && members >> (c->a & 31) & 1;
      if (x->seen[i]) continue;
      x->seen[i] = true;
      switch (c->op) {
        case TFMI_OP_MATCH: return true;
        case TFMI_OP_FORK: x->stack[n++] = c->b, x->stack[n++] = c->a; break; /* a comes first */
        case TFMI_OP_JUMP: x->stack[n++] = c->a; break;
        case TFMI_OP_NOT_AHEAD: if (!in) x->stack[n++] = i + 1; break;
        case TFMI_OP_AHEAD: if (in) x->stack[n++] = i + 1; break;
        case TFMI_OP_SET: if (in) stbds_arrput(x->place, i + 1); break;
      }
    }
  return false;
}

/* The state of the places behind all states; a new one, unless it is there. */
static int32_t tfmi_regex_state(tfmi_regex_make *x) {
  int32_t states = (int32_t)stbds_arrlen(x->begin) - 1, i;
  int32_t from = x->begin[states], n = (int32_t)stbds_arrlen(x->place) - from;
  for (i = 0; i < states; i++)
    if (x->begin[i + 1] - x->begin[i] == n &&
        (n == 0 || !memcmp(x->place + x->begin[i], x->place + from, (size_t)n * sizeof n))) {
      stbds_arrsetlen(x->place, (size_t)from);
      return i;
    }
  if (states == TFMI_REGEX_STATES) tfmi_regex_fail(x, "too many states");
  stbds_arrput(x->begin, from + n);
  return states;
}

/* Linear time. A search goes on behind its last match in the hope of a longer one; in vain, the
   next search begins at that match and sees the same characters again. So two are followed,
   of which the later begins anywhere in the earlier's vain part. No circle of states may leave the
   later without a match meanwhile: then its matches reach to within some steps of the end of the
   earlier's way, and no character is seen by more than two long searches. */
static uint32_t tfmi_regex_both(const tfmi_regex_make *x, uint32_t width, uint32_t both,
                                uint32_t class_, bool *later) { /* 0: an end, or an earlier match */
  uint32_t states = (uint32_t)stbds_arrlen(x->begin) - 1;
  uint32_t a = x->next[both / states * width + class_], b = x->next[both % states * width + class_];
  *later = (b & TFMI_REGEX_MATCH) != 0;
  b &= TFMI_REGEX_MATCH - 1;
  return a & TFMI_REGEX_MATCH || !a || !b ? 0 : a * states + b;
}

static void tfmi_regex_check_circles(tfmi_regex_make *x, uint32_t width) {
  uint32_t states = (uint32_t)stbds_arrlen(x->begin) - 1, *reached = NULL, *free_ = NULL, c, to;
  int32_t *into = TFMI_NEW(int32_t, tfmi_scratch(&x->make->load, (uint64_t)states * states,
                                                 sizeof *into)); /* 0: not reached; else + 1 */
  bool later;
  ptrdiff_t i;
  for (c = 1; c < states; c++) {
    stbds_arrput(reached, c * states + 1);
    into[c * states + 1] = 1;
  }
  for (i = 0; i < stbds_arrlen(reached); i++)
    for (c = 0; c + 1 < width; c++) {
      if ((to = tfmi_regex_both(x, width, reached[i], c, &later)) == 0) continue;
      if (!into[to]) stbds_arrput(reached, to), into[to]++;
      into[to] += !later;
    }
  for (i = 0; i < stbds_arrlen(reached); i++)
    if (into[reached[i]] == 1) stbds_arrput(free_, reached[i]);
  for (i = 0; i < stbds_arrlen(free_); i++)
    for (c = 0; c + 1 < width; c++)
      if ((to = tfmi_regex_both(x, width, free_[i], c, &later)) != 0 && !later && --into[to] == 1)
        stbds_arrput(free_, to);
  if (stbds_arrlen(free_) < stbds_arrlen(reached))
    tfmi_regex_fail(x, "what may take more than linear time");
  stbds_arrfree(reached);
  stbds_arrfree(free_);
  tfmi_release(&x->make->load, into);
}

static void tfmi_regex_automaton(tfmi_regex_make *x, uint32_t width) {
  int32_t state;
  uint32_t c;
  stbds_arrput(x->begin, 0);
  stbds_arrput(x->begin, 0); /* state 0 has no places */
  stbds_arrput(x->place, 0);
  stbds_arrput(x->begin, 1); /* state 1 begins at the first op */
  for (state = 0; state + 1 < stbds_arrlen(x->begin); state++)
    for (c = 0; c < width; c++) {
      bool match = tfmi_regex_step(x, state, c, c + 1 == width);
      uint16_t next = (uint16_t)tfmi_regex_state(x);
      stbds_arrput(x->next, (uint16_t)(next | (match ? TFMI_REGEX_MATCH : 0)));
    }
}

static tfmi_regex *tfmi_regex_compile(tfmi_make *m, tfmi_text pattern) {
  tfmi_regex_make *x = TFMI_NEW(tfmi_regex_make, tfmi_scratch(&m->load, 1, sizeof *x));
  tfmi_regex *regex = TFMI_NEW(tfmi_regex, tfmi_keep(&m->load, 1, sizeof *regex));
  size_t bytes;
  int32_t i;
  x->make = m;
  x->pattern = x->at = pattern.at;
  x->end = pattern.at + pattern.n;
  tfmi_regex_choice(x);
  if (x->at < x->end) tfmi_regex_fail(x, "an operator");
  if (tfmi_regex_empty(x, 0)) tfmi_regex_fail(x, "a way to match nothing");
  tfmi_regex_emit(x, TFMI_OP_MATCH, 0, 0);
  regex->classes = tfmi_regex_classes(x);
  regex->width = (uint32_t)stbds_arrlen(x->members) + 1;
  tfmi_regex_automaton(x, regex->width);
  tfmi_regex_check_circles(x, regex->width);
  bytes = (size_t)stbds_arrlen(x->next) * sizeof *x->next;
  regex->next = TFMI_NEW(uint16_t, tfmi_keep(&m->load, bytes, 1));
  memcpy(regex->next, x->next, bytes);
  for (i = 0; i < x->sets; i++) stbds_arrfree(x->set[i].item);
  stbds_arrfree(x->code);
  stbds_arrfree(x->place);
  stbds_arrfree(x->begin);
  stbds_arrfree(x->members);
  stbds_arrfree(x->next);
  tfmi_release(&m->load, x);
  return regex;
}

/* What a step looks for: one of the patterns written by hand, or any other. */
static void tfmi_find_by(tfmi_make *m, tfmi_step *s, tfmi_text pattern) {
  int i;
  for (i = 0; i < TFMI_COUNT(tfmi_patterns); i++)
    if (tfmi_text_is(pattern, tfmi_patterns[i].pattern)) {
      s->find = tfmi_find_split;
      s->split = tfmi_patterns[i].split;
      return;
    }
  s->find = tfmi_find_regex;
  s->text = tfmi_keep_bytes(m, pattern); /* by which it is known again when it is written */
  s->regex = tfmi_regex_compile(m, pattern);
}

/* ---- Making: phantoms ---- */

static bool tfmi_is_long(tfmi_text text) { /* more than one character */
  return text.n > 0 && tfmi_rune_at(text.at, text.n).bytes < text.n;
}

static void tfmi_make_character(tfmi_make *m, uint32_t code, int64_t id, int32_t type) {
  char *spelled = (char *)tfmi_scratch(&m->load, 4, 1);
  tfmi_text c;
  c.at = spelled;
  c.n = (size_t)(tfmi_put_utf8(spelled, code) - spelled);
  tfmi_make_piece(m, c, id, type, 0);
}

/* Characters of pieces to be merged that are no pieces themselves. */
static void tfmi_make_phantoms(tfmi_make *m) {
  uint8_t *wanted = (uint8_t *)tfmi_scratch(&m->load, TFMI_CODES, 1);
  int32_t id = m->t->vocabulary;
  uint32_t code;
  ptrdiff_t i;
  size_t at;
  for (i = 0; i < stbds_arrlen(m->piece); i++) {
    tfmi_text text = m->piece[i].text;
    tfmi_rune r;
    if (m->piece[i].type != TFMI_PIECE_NORMAL || !tfmi_is_long(text)) continue;
    for (at = 0; at < text.n; at += r.bytes) {
      r = tfmi_rune_at(text.at + at, text.n - at);
      if (tfmi_text_find(&m->t->spelled, text.at + at, r.bytes) < 0) wanted[r.code] = 1;
    }
  }
  for (code = 0; code < TFMI_CODES; code++)
    if (wanted[code]) tfmi_make_character(m, code, id++, TFMI_PIECE_PHANTOM);
  tfmi_release(&m->load, wanted);
  if (id > m->t->vocabulary) tfmi_place(m);
}

/* ---- Making: merges ---- */

static void tfmi_merge_table_make(tfmi_make *m, uint64_t count) {
  tfmi_merge_table *table = &m->t->merges;
  uint64_t slots = tfmi_slots(count), i;
  if (slots > INT32_MAX) tfmi_fail(&m->load, TFM_E_UNSUPPORTED, "more than 2^29 merges");
  table->slot = TFMI_NEW(tfmi_merge, tfmi_keep(&m->load, slots, sizeof *table->slot));
  table->mask = slots - 1;
  table->ranks = 0;
  for (i = 0; i < slots; i++) table->slot[i].into = -1;
}

static void tfmi_merge_put(tfmi_make *m, int32_t left, int32_t right, int32_t into, uint32_t rank) {
  tfmi_merge_table *table = &m->t->merges;
  tfmi_merge *slot = tfmi_merge_slot_of(table, left, right);
  tfmi_check_probes(m, slot - table->slot, tfmi_mix(tfmi_pair_key(left, right)), table->mask);
  if (slot->into < 0) m->merge_count++;
  slot->left = left;
  slot->right = right;
  slot->into = into;
  if (rank >= table->ranks) table->ranks = (int64_t)rank + 1;
  slot->rank = rank; /* of the last, when a pair is listed twice, as in the reference */
}

static int32_t tfmi_merge_part(tfmi_make *m, ptrdiff_t i, tfmi_text part, const char *which) {
  int32_t id = tfmi_own_id(m->t, part.at, part.n);
  if (id < 0)
    tfmi_fail(&m->load, TFM_E_FORMAT, "merge %lld: its %s, \"%s\", is not in the vocabulary",
              (long long)i, which, tfmi_plain(part).text);
  if (id == m->t->unk)
    tfmi_fail(&m->load, TFM_E_UNSUPPORTED, "merge %lld: it merges the unknown token", (long long)i);
  return id;
}

/* A line with more than one blank is an error, but some files have blanks where U+00A0 was. Where
   the normaliser leaves no blank in the text such a merge can never apply. */
static void tfmi_merge_uncut(tfmi_make *m, ptrdiff_t i) {
  if (!m->no_blanks)
    tfmi_fail(&m->load, TFM_E_FORMAT, "merge %lld, \"%s\", expected two parts with one blank "
              "between", (long long)i, tfmi_plain(m->merge[i].right).text);
  tfmi_log(&m->heap.host, TFM_LOG_WARNING, "%s: merge %lld, \"%s\", is malformed and was left out",
           m->load.object, (long long)i, tfmi_plain(m->merge[i].right).text);
}

static void tfmi_merges_from_texts(tfmi_make *m) {
  ptrdiff_t i, count = stbds_arrlen(m->merge);
  char *both = NULL;
  tfmi_merge_table_make(m, (uint64_t)count);
  for (i = 0; i < count; i++) {
    tfmi_text left = m->merge[i].left, right = m->merge[i].right, into;
    int32_t a, b;
    if (!left.at) {
      tfmi_merge_uncut(m, i);
      continue;
    }
    a = tfmi_merge_part(m, i, left, "left part");
    b = tfmi_merge_part(m, i, right, "right part");
    into.n = left.n + right.n;
    stbds_arrsetlen(both, into.n + 1);
    into.at = both;
    tfmi_append(both, tfmi_append(both, 0, left), right);
    tfmi_merge_put(m, a, b, tfmi_merge_part(m, i, into, "result"), (uint32_t)i);
  }
  stbds_arrfree(both);
}

typedef struct tfmi_scored {
  double score;
  int32_t piece;
} tfmi_scored;

static int tfmi_score_order(const void *a, const void *b) { /* best first */
  const tfmi_scored *s = (const tfmi_scored *)a, *t = (const tfmi_scored *)b;
  if (s->score != t->score) return s->score > t->score ? -1 : 1;
  return s->piece - t->piece;
}

/* The id of a text that can be a symbol while merging: a character, or what merging gave. */
static int32_t tfmi_symbol_find(tfmi_make *m, const uint8_t *mergeable, const char *p, size_t n) {
  int32_t id = tfmi_text_find(&m->t->spelled, p, n);
  return id >= 0 && (mergeable[id] || tfmi_rune_at(p, n).bytes == n) ? id : -1;
}

/* The merges that give the piece, put into the table unless it is still to be made; how many. */
static uint64_t tfmi_merges_of_piece(tfmi_make *m, const uint8_t *mergeable, const tfmi_piece *p,
                                     uint32_t rank) {
  tfmi_text text = p->text;
  uint64_t count = 0;
  size_t at = tfmi_rune_at(text.at, text.n).bytes;
  for (; at < text.n; at += tfmi_rune_at(text.at + at, text.n - at).bytes) {
    int32_t left = tfmi_symbol_find(m, mergeable, text.at, at), right;
    if (left < 0) continue;
    right = tfmi_symbol_find(m, mergeable, text.at + at, text.n - at);
    if (right < 0) continue;
    if (m->t->merges.slot) tfmi_merge_put(m, left, right, p->id, rank);
    count++;
  }
  return count;
}

static void tfmi_check_scored(tfmi_make *m, const tfmi_piece *p) {
  if (p->text.n > TFMI_PIECE_BYTES_MAX)
    tfmi_fail(&m->load, TFM_E_UNSUPPORTED, "token %d has %llu bytes, expected at most %d",
              (int)p->id, (unsigned long long)p->text.n, TFMI_PIECE_BYTES_MAX);
  if (isnan(p->score))
    tfmi_fail(&m->load, TFM_E_FORMAT, "token %d, \"%s\", has a score that is not a number",
              (int)p->id, tfmi_plain(p->text).text);
}

static void tfmi_merges_from_scores(tfmi_make *m) {
  uint8_t *mergeable = (uint8_t *)tfmi_scratch(
      &m->load, (uint64_t)m->t->vocabulary + (uint64_t)stbds_arrlen(m->piece), 1);
  tfmi_scored *order = NULL, s;
  uint64_t merges = 0;
  uint32_t rank = 0;
  ptrdiff_t i, count;
  for (i = 0; i < stbds_arrlen(m->piece); i++) {
    const tfmi_piece *p = &m->piece[i];
    if (p->type != TFMI_PIECE_NORMAL || !tfmi_is_long(p->text)) continue;
    tfmi_check_scored(m, p);
    mergeable[p->id] = 1;
    s.score = p->score;
    s.piece = (int32_t)i;
    stbds_arrput(order, s);
  }
  count = stbds_arrlen(order);
  tfmi_sort(order, (size_t)count, sizeof *order, tfmi_score_order);
  for (i = 0; i < count; i++)
    merges += tfmi_merges_of_piece(m, mergeable, &m->piece[order[i].piece], 0);
  tfmi_merge_table_make(m, merges);
  for (i = 0; i < count; i++) {
    if (i && order[i].score != order[i - 1].score) rank = (uint32_t)i;
    tfmi_merges_of_piece(m, mergeable, &m->piece[order[i].piece], rank);
  }
  stbds_arrfree(order);
  tfmi_release(&m->load, mergeable);
}

/* ---- Making: joins ---- */

/* The first symbols with which the text of a token can begin, or end: itself, if it comes from a
   fallback, and its first or last character. */
static int tfmi_edge_symbols(const tfm_tokenizer *t, int32_t id, bool end, int32_t edge[2]) {
  const char *p = t->arena + t->token[id].at;
  size_t n = t->token[id].n, at = end && n ? n - 1 : 0;
  edge[0] = id;
  if (n == 0) return 1;
  while (end && at && ((uint8_t)p[at] & 0xc0) == 0x80) at--;
  edge[1] = tfmi_own_id(t, p + at, tfmi_rune_at(p + at, n - at).bytes);
  return edge[1] < 0 || edge[1] == id ? 1 : 2;
}

/* True when the pair was not there. */
static bool tfmi_join_put(tfmi_make *m, tfmi_join_table *table, uint64_t key) {
  uint64_t *slot = tfmi_join_slot_of(table, (int32_t)(key >> 32), (int32_t)(uint32_t)key);
  bool fresh = *slot == UINT64_MAX;
  tfmi_check_probes(m, slot - table->slot, tfmi_mix(key), table->mask);
  *slot = key;
  return fresh;
}

static void tfmi_join_table_make(tfmi_join_table *table, void *slots, uint64_t count) {
  table->slot = TFMI_NEW(uint64_t, slots);
  table->mask = count - 1;
  memset(slots, 0xff, count * sizeof *table->slot);
}

/* Which neighbours in the text a merge can ever reach across: those where one side of a merge ends
   and the other begins. Everywhere else text can be cut, which keeps the work in small pieces. */
static void tfmi_make_joins(tfmi_make *m) {
  const tfmi_merge_table *merges = &m->t->merges;
  uint64_t slots = tfmi_slots(4 * m->merge_count), distinct = 0, i;
  tfmi_join_table all;
  tfmi_join_table_make(&all, tfmi_scratch(&m->load, slots, sizeof *all.slot), slots);
  for (i = 0; i <= merges->mask; i++) {
    int32_t ends[2], begins[2];
    int a, b, k;
    if (merges->slot[i].into < 0) continue;
    a = tfmi_edge_symbols(m->t, merges->slot[i].left, true, ends);
    b = tfmi_edge_symbols(m->t, merges->slot[i].right, false, begins);
    for (k = 0; k < a * b; k++)
      distinct += tfmi_join_put(m, &all, tfmi_pair_key(ends[k / b], begins[k % b]));
  }
  slots = tfmi_slots(distinct);
  tfmi_join_table_make(&m->t->joins, tfmi_keep(&m->load, slots, sizeof *all.slot), slots);
  for (i = 0; i <= all.mask; i++)
    if (all.slot[i] != UINT64_MAX) tfmi_join_put(m, &m->t->joins, all.slot[i]);
  tfmi_release(&m->load, all.slot);
}

/* ---- Making: bytes ---- */

/* GPT-2's alphabet for bytes: printable Latin-1 stands for itself, the rest follows from U+0100. */
static int tfmi_byte_of(uint32_t c) { /* -1: no such letter */
  if (c >= 0x100 && c <= 0x120) return (int)(c - 0x100);
  if (c >= 0x121 && c <= 0x142) return (int)(c - 0x121 + 0x7f);
  if (c == 0x143) return 0xad;
  return (c > 0x20 && c < 0x7f) || (c > 0xa0 && c <= 0xff && c != 0xad) ? (int)c : -1;
}

static size_t tfmi_spell_byte(const tfm_tokenizer *t, uint32_t byte, char spelled[8]) {
  if (t->from_bytes) return (size_t)(tfmi_put_utf8(spelled, tfmi_letter_of_byte(byte)) - spelled);
  return (size_t)snprintf(spelled, 8, "<0x%02X>", (unsigned)byte);
}

static void tfmi_make_symbols(tfmi_make *m) {
  tfm_tokenizer *t = m->t;
  int32_t found = 0, i;
  char spelled[8];
  for (i = 0; i < 256; i++) {
    size_t n = tfmi_spell_byte(t, (uint32_t)i, spelled);
    t->byte_id[i] = tfmi_own_id(t, spelled, n);
    found += t->byte_id[i] >= 0;
  }
  if (t->byte_fallback && found > 0 && found < 256)
    tfmi_fail(&m->load, TFM_E_UNSUPPORTED, "byte fallback with %d byte tokens, expected all 256",
              (int)found);
  t->byte_fallback = t->byte_fallback && found;
  for (i = 0; i < 128; i++) {
    char c = (char)i;
    t->ascii_id[i] = tfmi_own_id(t, &c, 1);
  }
}

/* Writes what the letters of a text stand for; false when one is outside the alphabet. */
static bool tfmi_unspell(const char *p, size_t n, char *out, size_t *size) {
  size_t at = 0;
  for (*size = 0; at < n;) {
    tfmi_rune r = tfmi_rune_at(p + at, n - at);
    int byte = tfmi_byte_of(r.code);
    if (byte < 0) return false;
    out[(*size)++] = (char)byte;
    at += r.bytes;
  }
  return true;
}

static int tfmi_hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  return (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
}

static int tfmi_byte_token(const char *p, size_t n) { /* the byte of "<0x0A>", -1: not like this */
  int high, low;
  if (n != 6 || memcmp(p, "<0x", 3) != 0 || p[5] != '>') return -1;
  high = tfmi_hex_digit(p[3]);
  low = tfmi_hex_digit(p[4]);
  return high < 0 || low < 0 ? -1 : high * 16 + low;
}

static size_t tfmi_unescape(const char *p, size_t n, char *out) { /* U+2581 becomes a blank */
  size_t at = 0, size = 0;
  while (at < n)
    if (n - at >= 3 && memcmp(p + at, tfmi_low_line, 3) == 0) {
      out[size++] = ' ';
      at += 3;
    } else {
      out[size++] = p[at++];
    }
  return size;
}

/* What the token decodes to, which is never longer than the text that it stands for. */
static void tfmi_make_said(tfmi_make *m, tfmi_token *token, const char *p, size_t n) {
  tfm_tokenizer *t = m->t;
  char *out = t->arena + m->arena_bytes;
  size_t whole = n;
  int byte = m->says_bytes ? tfmi_byte_token(p, n) : -1;
  token->said_at = m->arena_bytes;
  if (t->says_letters || byte >= 0) token->speech = TFMI_SPEECH_BYTES;
  if (byte >= 0) {
    out[0] = (char)byte;
    n = 1;
  } else if (m->says_blanks) {
    n = tfmi_unescape(p, n, out);
  } else if (!t->says_letters || !tfmi_unspell(p, n, out, &n)) {
    n = whole; /* a letter that is no byte's: the reference takes the text as it is */
    if (n) memcpy(out, p, n);
  }
  token->said_n = (uint32_t)n;
  m->arena_bytes += (uint32_t)n;
  if (token->said_n > t->longest_said) t->longest_said = token->said_n;
}

/* The model's own tokens as they stand in pieces, for those who look these up before merging. */
static void tfmi_make_whole(tfmi_make *m) {
  tfm_tokenizer *t = m->t;
  size_t i, n;
  char *out = (char *)tfmi_scratch(&m->load, m->arena_cap, 1);
  tfmi_text_table_make(m, &t->whole, m->vocabulary_pieces);
  for (i = 0; i < m->vocabulary_pieces; i++) {
    const tfmi_token *token = &t->token[m->piece[i].id];
    if (!t->from_bytes) tfmi_text_table_put(m, &t->whole, token->at, token->n, m->piece[i].id);
    else if (token->n && tfmi_unspell(t->arena + token->at, token->n, out, &n))
      tfmi_text_table_put(m, &t->whole, token->said_at, token->said_n, m->piece[i].id);
  }
  tfmi_release(&m->load, out);
}

/* ---- Making: Unigram's trie ---- */

static bool tfmi_is_scored_piece(const tfmi_piece *p) {
  return p->type == TFMI_PIECE_NORMAL && p->text.n > 0;
}

static int tfmi_piece_order(const void *a, const void *b) {
  return tfmi_text_order((*(const tfmi_piece *const *)a)->text,
                         (*(const tfmi_piece *const *)b)->text);
}

/* Nodes of a trie of all pieces: in order, each adds what it does not share with the last. */
static uint64_t tfmi_trie_nodes(tfmi_make *m) {
  const tfmi_piece **order = NULL;
  uint64_t nodes = 0;
  size_t i, shared, count;
  for (i = 0; i < m->vocabulary_pieces; i++)
    if (tfmi_is_scored_piece(&m->piece[i])) stbds_arrput(order, &m->piece[i]);
  count = (size_t)stbds_arrlen(order);
  tfmi_sort(order, count, sizeof *order, tfmi_piece_order);
  for (i = 0; i < count; i++) {
    tfmi_text text = order[i]->text, last = i ? order[i - 1]->text : tfmi_text_of("");
    for (shared = 0; shared < text.n && shared < last.n; shared++)
      if (text.at[shared] != last.at[shared]) break;
    nodes += text.n - shared;
  }
  stbds_arrfree(order);
  return nodes;
}

static void tfmi_trie_put(tfmi_make *m, const tfmi_piece *p) {
  tfmi_trie *trie = &m->t->trie;
  uint32_t node = (uint32_t)trie->mask + 1;
  tfmi_trie_slot *s = NULL;
  size_t i;
  for (i = 0; i < p->text.n; i++) {
    uint8_t byte = (uint8_t)p->text.at[i];
    s = tfmi_trie_below(trie, node, byte);
    tfmi_check_probes(m, s - trie->slot, tfmi_mix((uint64_t)node << 8 | byte) >> 8, trie->mask);
    s->above = node;
    s->byte = byte;
    node = (uint32_t)(s - trie->slot);
  }
  if (s) s->id = p->id;
}

static void tfmi_make_unigram(tfmi_make *m) {
  tfm_tokenizer *t = m->t;
  uint64_t slots = tfmi_slots(tfmi_trie_nodes(m)), i;
  double least = HUGE_VAL;
  if (slots > INT32_MAX) tfmi_fail(&m->load, TFM_E_UNSUPPORTED, "the pieces take 2^29 nodes");
  t->trie.slot = TFMI_NEW(tfmi_trie_slot, tfmi_keep(&m->load, slots, sizeof *t->trie.slot));
  t->trie.mask = slots - 1;
  t->score = TFMI_NEW(double, tfmi_keep(&m->load, (uint64_t)t->vocabulary, sizeof *t->score));
  for (i = 0; i < slots; i++) {
    t->trie.slot[i].above = UINT32_MAX;
    t->trie.slot[i].id = -1;
  }
  for (i = 0; i < m->vocabulary_pieces; i++) {
    const tfmi_piece *p = &m->piece[i];
    if (!tfmi_is_scored_piece(p)) continue;
    tfmi_check_scored(m, p);
    t->score[p->id] = p->score;
    if (p->score < least) least = p->score;
    tfmi_trie_put(m, p);
  }
  t->unk_score = least - 10; /* what an unknown character scores, says SentencePiece */
  if (t->single) t->unk_score = (double)(float)t->unk_score;
}

/* ---- Making: added tokens ---- */

static int tfmi_added_order(const void *a, const void *b) {
  const tfmi_added_text *s = (const tfmi_added_text *)a, *t = (const tfmi_added_text *)b;
  int order = tfmi_text_order(s->pattern, t->pattern);
  return order ? order : s->special != t->special ? (s->special ? -1 : 1) : s->id - t->id;
}

/* What the rewriting steps make of a text, in memory of the load. */
static tfmi_text tfmi_make_rewritten(tfmi_make *m, tfmi_text text) {
  tfmi_work *w;
  char *copy;
  if (!m->work) {
    m->work = TFMI_NEW(tfmi_encoder, tfmi_scratch(&m->load, 1, sizeof *m->work));
    tfmi_encoder_init(m->work, m->t, 0);
    m->work->work.heap = m->heap;
  }
  w = &m->work->work;
  text = tfmi_rewrite_all(w, m->t->rewrite, m->t->rewrites, text);
  if (w->status != TFM_OK) tfmi_fail(&m->load, w->status, "out of memory");
  copy = (char *)tfmi_scratch(&m->load, text.n + 1, 1);
  tfmi_append(copy, 0, text);
  text.at = copy;
  return text;
}

static void tfmi_make_patterns(tfmi_make *m) {
  ptrdiff_t i;
  for (i = 0; i < stbds_arrlen(m->added); i++) {
    tfmi_added_text *a = &m->added[i];
    if (a->text.n > TFMI_PIECE_BYTES_MAX)
      tfmi_fail(&m->load, TFM_E_UNSUPPORTED, "added token \"%s\" has %llu bytes, expected at most "
                "%d", tfmi_plain(a->text).text, (unsigned long long)a->text.n,
                TFMI_PIECE_BYTES_MAX);
    a->pattern = a->text;
    if (a->normalised && !a->verbatim) a->pattern = tfmi_make_rewritten(m, a->text);
    if (!a->pattern.n)
      tfmi_fail(&m->load, TFM_E_UNSUPPORTED, "nothing is left of the added token \"%s\" when it is "
                "normalised", tfmi_plain(a->text).text);
  }
}

static void tfmi_make_added_set(tfmi_make *m, tfmi_added_set *set, bool normalised) {
  tfmi_added_text *list = NULL;
  ptrdiff_t i;
  for (i = 0; i < stbds_arrlen(m->added); i++) {
    tfmi_added_text a = m->added[i];
    if (a.normalised == normalised && a.pattern.n) stbds_arrput(list, a);
  }
  tfmi_sort(list, (size_t)stbds_arrlen(list), sizeof *list, tfmi_added_order);
  set->token = TFMI_NEW(tfmi_added, tfmi_keep(&m->load, (uint64_t)stbds_arrlen(list),
                                              sizeof *set->token));
  for (i = 0; i < stbds_arrlen(list); i++) {
    const tfmi_added_text *a = &list[i];
    tfmi_added *to = &set->token[set->count];
    if (a->normalised && !a->verbatim) /* the reference decodes it in normalised form too */
      tfmi_make_said(m, &m->t->token[a->id], a->pattern.at, a->pattern.n);
    if (i && tfmi_text_order(list[i - 1].pattern, a->pattern) == 0) {
      if (list[i - 1].id != a->id) /* the reference takes now this one, now that */
        tfmi_fail(&m->load, TFM_E_UNSUPPORTED, "added tokens \"%s\" and \"%s\" are the same when "
                  "they are normalised", tfmi_plain(list[i - 1].text).text,
                  tfmi_plain(a->text).text);
      continue;
    }
    to->at = tfmi_arena_put(m, a->pattern.at, a->pattern.n);
    to->n = (uint32_t)a->pattern.n;
    to->id = a->id;
    to->special = a->special;
    to->left_blanks = a->left_blanks;
    to->right_blanks = a->right_blanks;
    to->word = a->word;
    if (a->word) m->t->word = tfmi_make_charset(m, TFMI_CHARS_WORD);
    set->first[(uint8_t)a->pattern.at[0]] = true;
    set->count++;
  }
  stbds_arrfree(list);
}

static void tfmi_make_added(tfmi_make *m, tfmi_text text, int32_t id, bool special) {
  tfmi_added_text a;
  memset(&a, 0, sizeof a);
  a.text = text;
  a.id = id;
  a.special = special;
  stbds_arrput(m->added, a);
}

/* ---- Making: the template, and the whole ---- */

static void tfmi_keep_ids(tfmi_make *m, const int32_t *ids, int32_t count, int32_t **kept,
                          int32_t *kept_count) {
  *kept = TFMI_NEW(int32_t, tfmi_keep(&m->load, (uint64_t)count, sizeof **kept));
  if (count) memcpy(*kept, ids, (size_t)count * sizeof **kept);
  *kept_count = count;
}

/* What TFM_ENCODE_SPECIAL adds. */
static void tfmi_make_before(tfmi_make *m, const int32_t *ids, int32_t count) {
  tfmi_keep_ids(m, ids, count, &m->t->before, &m->t->before_count);
}
static void tfmi_make_after(tfmi_make *m, const int32_t *ids, int32_t count) {
  tfmi_keep_ids(m, ids, count, &m->t->after, &m->t->after_count);
}

/* An id from a file, or -1 where it names no token. */
static int32_t tfmi_known_id(const tfm_tokenizer *t, int64_t id) {
  bool known = id >= 0 && id < t->vocabulary && t->token[id].speech != TFMI_SPEECH_NONE;
  return known ? (int32_t)id : -1;
}

/* The special token of the first of these names, -1: none. */
static int32_t tfmi_guess_id(tfmi_make *m, const char *const *names, int32_t count) {
  int32_t i;
  ptrdiff_t k;
  for (i = 0; i < count; i++)
    for (k = 0; k < stbds_arrlen(m->added); k++)
      if (m->added[k].special && tfmi_text_is(m->added[k].text, names[i])) return m->added[k].id;
  return -1;
}

static void tfmi_guess_ids(tfmi_make *m) {
  static const char *const bos[] = {"<s>", "<|begin_of_text|>", "<bos>", "<|endoftext|>"};
  static const char *const eos[] = {"</s>", "<|end_of_text|>", "<eos>", "<|endoftext|>"};
  static const char *const unk[] = {"<unk>"}, *const pad[] = {"<pad>", "<|pad|>"};
  tfm_tokenizer *t = m->t;
  if (t->bos < 0) t->bos = tfmi_guess_id(m, bos, TFMI_COUNT(bos));
  if (t->eos < 0) t->eos = tfmi_guess_id(m, eos, TFMI_COUNT(eos));
  if (t->pad < 0) t->pad = tfmi_guess_id(m, pad, TFMI_COUNT(pad));
  if (t->unk < 0 && t->byte_fallback && t->model == TFMI_MERGES)
    t->unk = tfmi_guess_id(m, unk, TFMI_COUNT(unk));
}

static void tfmi_make_unk(tfmi_make *m) {
  if (!m->unk.n) return;
  m->t->unk = tfmi_own_id(m->t, m->unk.at, m->unk.n);
  if (m->t->unk < 0)
    tfmi_fail(&m->load, TFM_E_FORMAT, "the unknown token, \"%s\", is not in the vocabulary",
              tfmi_plain(m->unk).text);
}

/* From the pieces, merges and added tokens that a file gave to the finished tables. */
static void tfmi_make_tables(tfmi_make *m) {
  tfm_tokenizer *t = m->t;
  int32_t i;
  if (m->blanks.rewrite) *tfmi_add_step(m, t->rewrite, &t->rewrites) = m->blanks;
  tfmi_make_patterns(m);
  tfmi_place(m);
  if (m->scored) tfmi_make_phantoms(m);
  tfmi_make_unk(m);
  tfmi_make_symbols(m);
  if (t->model == TFMI_UNIGRAM) tfmi_make_unigram(m);
  else if (m->scored) tfmi_merges_from_scores(m);
  else tfmi_merges_from_texts(m);
  if (t->model == TFMI_MERGES && !t->from_bytes) tfmi_make_joins(m);
  for (i = 0; i < t->vocabulary; i++)
    if (t->token[i].speech != TFMI_SPEECH_NONE)
      tfmi_make_said(m, &t->token[i], t->arena + t->token[i].at, t->token[i].n);
  if (m->whole_first) tfmi_make_whole(m);
  tfmi_make_added_set(m, &t->added[0], false);
  tfmi_make_added_set(m, &t->added[1], true);
  tfmi_guess_ids(m);
}

static int tfmi_base64_digit(char c) {
  if (c >= 'A' && c <= 'Z') return c - 'A';
  if (c >= 'a' && c <= 'z') return c - 'a' + 26;
  if (c >= '0' && c <= '9') return c - '0' + 52;
  return c == '+' ? 62 : c == '/' ? 63 : -1;
}

/* Writes at most n / 4 * 3 bytes; SIZE_MAX: that is not base64. */
static size_t tfmi_unbase64(const char *p, size_t n, char *out) {
  size_t size = 0, i;
  uint32_t bits = 0;
  if (n % 4) return SIZE_MAX;
  while (n && p[n - 1] == '=' && n % 4 != 2) n--;
  for (i = 0; i < n; i++) {
    int digit = tfmi_base64_digit(p[i]);
    if (digit < 0) return SIZE_MAX;
    bits = bits << 6 | (uint32_t)digit;
    if (i % 4) out[size++] = (char)(bits >> (6 - i % 4 * 2));
  }
  return size;
}

static tfmi_text tfmi_base64(tfmi_make *m, tfmi_text coded) { /* at NULL: that is not base64 */
  char *out = (char *)tfmi_keep(&m->load, coded.n + 1, 1);
  tfmi_text text;
  text.n = tfmi_unbase64(coded.at, coded.n, out);
  text.at = text.n == SIZE_MAX ? NULL : out;
  return text;
}

/* SentencePiece's rules: bytes of the trie, the trie, the texts that it refers to. */
static void tfmi_add_charsmap(tfmi_make *m, tfmi_text raw, tfmi_rewriter rewrite) {
  tfmi_charsmap *map = TFMI_NEW(tfmi_charsmap, tfmi_keep(&m->load, 1, sizeof *map));
  uint32_t bytes = raw.n >= 8 ? tfmi_u32((const uint8_t *)raw.at) : 0;
  tfmi_step *s = tfmi_add_rewrite(m, rewrite);
  size_t at;
  if (bytes < 4 || bytes % 4 || bytes > raw.n - 4)
    tfmi_fail(&m->load, TFM_E_FORMAT, "the precompiled_charsmap of %llu bytes says that its trie "
              "has %llu", (unsigned long long)raw.n, (unsigned long long)bytes);
  map->units = (const uint8_t *)raw.at + 4;
  map->unit_count = bytes / 4;
  map->texts = raw.at + 4 + bytes;
  map->bytes = raw.n - 4 - bytes;
  for (at = 0; at < map->bytes;) {
    tfmi_rune r = tfmi_rune_at(map->texts + at, map->bytes - at);
    if (r.state != TFMI_RUNE_WHOLE)
      tfmi_fail(&m->load, TFM_E_FORMAT, "the precompiled_charsmap has texts that are not UTF-8");
    at += r.bytes;
  }
  s->map = map;
  s->set = tfmi_make_charset(m, TFMI_CHARS_CLUSTER);
}

/* ---- tokenizer.json ----
   Normaliser, pre-tokenizer, post-processor and decoder are each one part or a Sequence of parts. A
   part is read into one flat struct, whatever its type; then each stage looks the type up in its
   table, and refuses what is not there, or has other options, with the place in the file. */

typedef struct tfmi_part {
  const char *at; /* in the file */
  tfmi_text type, prepend, content, behavior, pattern, replacement, scheme, charsmap, delimiter;
  tfmi_template_id cls, sep;
  bool regex, add_prefix_space, use_regex, invert, individual, split, left, right;
  bool last; /* in its stage */
  int64_t start, stop;
} tfmi_part;

typedef struct tfmi_json_parts {
  tfmi_json *json;
  tfmi_part *normalise, *split, *after, *decode; /* stb arrays */
} tfmi_json_parts;

static const struct tfmi_part_field {
  const char *name;
  tfmi_json_kind kind;
  size_t offset;
} tfmi_part_fields[] = {
  {"type", TFMI_JSON_STRING, offsetof(tfmi_part, type)},
  {"prepend", TFMI_JSON_STRING, offsetof(tfmi_part, prepend)},
  {"content", TFMI_JSON_STRING, offsetof(tfmi_part, content)},
  {"behavior", TFMI_JSON_STRING, offsetof(tfmi_part, behavior)},
  {"replacement", TFMI_JSON_STRING, offsetof(tfmi_part, replacement)},
  {"prepend_scheme", TFMI_JSON_STRING, offsetof(tfmi_part, scheme)},
  {"precompiled_charsmap", TFMI_JSON_STRING, offsetof(tfmi_part, charsmap)},
  {"delimiter", TFMI_JSON_STRING, offsetof(tfmi_part, delimiter)},
  {"add_prefix_space", TFMI_JSON_TRUE, offsetof(tfmi_part, add_prefix_space)},
  {"use_regex", TFMI_JSON_TRUE, offsetof(tfmi_part, use_regex)},
  {"invert", TFMI_JSON_TRUE, offsetof(tfmi_part, invert)},
  {"individual_digits", TFMI_JSON_TRUE, offsetof(tfmi_part, individual)},
  {"split", TFMI_JSON_TRUE, offsetof(tfmi_part, split)},
  {"strip_left", TFMI_JSON_TRUE, offsetof(tfmi_part, left)},
  {"strip_right", TFMI_JSON_TRUE, offsetof(tfmi_part, right)},
  {"start", TFMI_JSON_NUMBER, offsetof(tfmi_part, start)},
  {"stop", TFMI_JSON_NUMBER, offsetof(tfmi_part, stop)},
};

/* Reads the member if the part has such a field; null leaves it as it is. */
static bool tfmi_part_member(tfmi_json *j, tfmi_part *part, tfmi_text key) {
  int i;
  for (i = 0; i < TFMI_COUNT(tfmi_part_fields); i++) {
    const struct tfmi_part_field *field = &tfmi_part_fields[i];
    char *to = (char *)part + field->offset;
    if (!tfmi_text_is(key, field->name)) continue;
    if (tfmi_json_null(j)) return true;
    if (field->kind == TFMI_JSON_STRING) *TFMI_NEW(tfmi_text, to) = tfmi_json_string(j);
    else if (field->kind == TFMI_JSON_TRUE) *TFMI_NEW(bool, to) = tfmi_json_bool(j);
    else *TFMI_NEW(int64_t, to) = tfmi_json_integer(j, 0, INT32_MAX);
    return true;
  }
  return false;
}

static void tfmi_part_pattern(tfmi_json *j, tfmi_part *part) { /* {"String": " "}, {"Regex": "."} */
  tfmi_text key;
  tfmi_json_object(j);
  while (tfmi_json_member(j, &key)) {
    part->regex = tfmi_text_is(key, "Regex");
    part->pattern = tfmi_json_string(j);
  }
}

static void tfmi_part_token(tfmi_json *j, tfmi_template_id *token) { /* ["</s>", 2] */
  tfmi_json_array(j);
  if (!tfmi_json_element(j)) tfmi_json_fail(j, TFM_E_FORMAT, "expected a token's text and its id");
  token->name = tfmi_json_string(j);
  if (!tfmi_json_element(j)) tfmi_json_fail(j, TFM_E_FORMAT, "expected a token's text and its id");
  token->id = (int32_t)tfmi_json_integer(j, 0, TFMI_VOCABULARY_MAX);
  if (tfmi_json_element(j)) tfmi_json_fail(j, TFM_E_FORMAT, "expected a token's text and its id");
}

/* [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}] */
static void tfmi_json_template(tfmi_make *m, tfmi_json *j) {
  tfmi_text key, inner;
  tfmi_json_array(j);
  while (tfmi_json_element(j)) {
    tfmi_text name = {NULL, 0};
    bool text = false;
    tfmi_json_object(j);
    while (tfmi_json_member(j, &key)) {
      text = tfmi_text_is(key, "Sequence");
      tfmi_json_object(j);
      while (tfmi_json_member(j, &inner))
        if (tfmi_text_is(inner, "id")) name = tfmi_json_string(j);
        else tfmi_json_skip(j);
    }
    if (!name.at) tfmi_json_fail(j, TFM_E_FORMAT, "a part of the template has no id");
    if (text && !tfmi_text_is(name, "A"))
      tfmi_json_fail(j, TFM_E_UNSUPPORTED, "a template for one text names the sequence \"%s\"",
                     tfmi_plain(name).text);
    if (text) name.at = NULL;
    stbds_arrput(m->template_names, name);
  }
}

/* {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}} */
static void tfmi_json_template_ids(tfmi_make *m, tfmi_json *j) {
  tfmi_template_id entry;
  tfmi_text key;
  tfmi_json_object(j);
  while (tfmi_json_member(j, &entry.name)) {
    tfmi_json_object(j);
    while (tfmi_json_member(j, &key)) {
      if (!tfmi_text_is(key, "ids")) {
        tfmi_json_skip(j);
        continue;
      }
      tfmi_json_array(j);
      while (tfmi_json_element(j)) {
        entry.id = (int32_t)tfmi_json_integer(j, 0, TFMI_VOCABULARY_MAX);
        stbds_arrput(m->template_ids, entry);
      }
    }
  }
}

static bool tfmi_is_sequence_key(tfmi_text key) {
  return tfmi_text_is(key, "normalizers") || tfmi_text_is(key, "pretokenizers") ||
         tfmi_text_is(key, "processors") || tfmi_text_is(key, "decoders");
}

/* Appends a part, or, where it may be a Sequence, the parts of that: *list NULL forbids it. */
static void tfmi_part_read(tfmi_make *m, tfmi_json *j, tfmi_part **list, bool nested) {
  tfmi_part part;
  tfmi_text key;
  bool sequence = false;
  memset(&part, 0, sizeof part);
  part.use_regex = part.add_prefix_space = part.split = true;
  part.at = j->at;
  tfmi_json_object(j);
  while (tfmi_json_member(j, &key))
    if (tfmi_part_member(j, &part, key)) {
      continue;
    } else if (!nested && tfmi_is_sequence_key(key)) {
      sequence = true;
      tfmi_json_array(j);
      while (tfmi_json_element(j)) tfmi_part_read(m, j, list, true);
    } else if (tfmi_text_is(key, "pattern") && tfmi_json_peek(j) == TFMI_JSON_OBJECT) {
      tfmi_part_pattern(j, &part);
    } else if (tfmi_text_is(key, "cls")) {
      tfmi_part_token(j, &part.cls);
    } else if (tfmi_text_is(key, "sep")) {
      tfmi_part_token(j, &part.sep);
    } else if (tfmi_text_is(key, "single")) {
      tfmi_json_template(m, j);
    } else if (tfmi_text_is(key, "special_tokens")) {
      tfmi_json_template_ids(m, j);
    } else {
      tfmi_json_skip(j);
    }
  if (!sequence) stbds_arrput(*list, part);
}

static void tfmi_parts_read(tfmi_make *m, tfmi_json *j, tfmi_part **list) {
  if (!tfmi_json_null(j)) tfmi_part_read(m, j, list, false);
}

static TFMI_NORETURN void tfmi_part_refuse(tfmi_json *j, const tfmi_part *part, const char *stage) {
  j->at = part->at;
  tfmi_json_fail(j, TFM_E_UNSUPPORTED, "the %s \"%s\", or one of its options here, cannot be "
                 "reproduced exactly", stage, tfmi_plain(part->type).text);
}

/* What a part looks for: a text, or a pattern. */
static void tfmi_part_find(tfmi_make *m, tfmi_json *j, const tfmi_part *p, tfmi_step *s) {
  if (p->regex) {
    tfmi_find_by(m, s, p->pattern);
    return;
  }
  if (p->pattern.n > TFMI_PIECE_BYTES_MAX) tfmi_part_refuse(j, p, "pattern of");
  s->find = tfmi_find_text;
  s->text = tfmi_keep_bytes(m, p->pattern);
}

/* ---- tokenizer.json: the stages ---- */

typedef void (*tfmi_part_maker)(tfmi_make *m, tfmi_json *j, const tfmi_part *p);

typedef struct tfmi_part_row {
  const char *type;
  tfmi_part_maker make;
} tfmi_part_row;

/* A text of a part that becomes a step's: kept, and short. */
static tfmi_text tfmi_part_text(tfmi_make *m, tfmi_json *j, const tfmi_part *p, tfmi_text text,
                                const char *stage) {
  if (text.n > TFMI_AFFIX_MAX) tfmi_part_refuse(j, p, stage);
  return tfmi_keep_bytes(m, text);
}

static void tfmi_normalise_nfc(tfmi_make *m, tfmi_json *j, const tfmi_part *p) {
  (void)j;
  tfmi_add_form(m, p->type.at[2] != 'D' && p->type.at[3] != 'D', p->type.at[2] == 'K');
}

static void tfmi_normalise_lowercase(tfmi_make *m, tfmi_json *j, const tfmi_part *p) {
  tfmi_step *s = tfmi_add_rewrite(m, tfmi_rewrite_each);
  (void)j, (void)p;
  s->each = tfmi_each_mapped;
  s->set = tfmi_make_charset(m, TFMI_CHARS_LOWER);
}

static void tfmi_normalise_accents(tfmi_make *m, tfmi_json *j, const tfmi_part *p) {
  tfmi_step *s = tfmi_add_rewrite(m, tfmi_rewrite_each);
  (void)j, (void)p;
  s->each = tfmi_each_left_out;
  s->set = tfmi_make_charset(m, TFMI_CHARS_MARK);
}

static void tfmi_normalise_nmt(tfmi_make *m, tfmi_json *j, const tfmi_part *p) {
  (void)j, (void)p;
  tfmi_add_rewrite(m, tfmi_rewrite_each)->each = tfmi_each_nmt;
}

static void tfmi_normalise_bytes(tfmi_make *m, tfmi_json *j, const tfmi_part *p) {
  (void)j, (void)p;
  tfmi_add_rewrite(m, tfmi_rewrite_bytes);
}

static void tfmi_normalise_strip(tfmi_make *m, tfmi_json *j, const tfmi_part *p) {
  tfmi_step *s = tfmi_add_rewrite(m, tfmi_rewrite_strip);
  (void)j;
  s->left = p->left;
  s->right = p->right;
}

static void tfmi_normalise_prepend(tfmi_make *m, tfmi_json *j, const tfmi_part *p) {
  tfmi_step *s = tfmi_add_rewrite(m, tfmi_rewrite_prepend);
  s->text = tfmi_part_text(m, j, p, p->prepend, "normalizer");
}

static void tfmi_normalise_replace(tfmi_make *m, tfmi_json *j, const tfmi_part *p) {
  tfmi_step *s = tfmi_add_rewrite(m, tfmi_rewrite_replace);
  if (!p->pattern.n) tfmi_part_refuse(j, p, "normalizer");
  tfmi_part_find(m, j, p, s);
  s->content = tfmi_part_text(m, j, p, p->content, "normalizer");
  if (tfmi_text_is(p->pattern, " ") && !p->regex)
    m->no_blanks = p->content.n == 0 || !memchr(p->content.at, ' ', p->content.n);
}

static void tfmi_normalise_charsmap(tfmi_make *m, tfmi_json *j, const tfmi_part *p) {
  tfmi_text raw = tfmi_base64(m, p->charsmap);
  if (!raw.at) tfmi_json_fail(j, TFM_E_FORMAT, "precompiled_charsmap is not base64");
  tfmi_add_charsmap(m, raw, tfmi_rewrite_mapped);
}

static const tfmi_part_row tfmi_normalisers[] = {
  {"NFC", tfmi_normalise_nfc},
  {"NFD", tfmi_normalise_nfc},
  {"NFKC", tfmi_normalise_nfc},
  {"NFKD", tfmi_normalise_nfc},
  {"Lowercase", tfmi_normalise_lowercase},
  {"StripAccents", tfmi_normalise_accents},
  {"Nmt", tfmi_normalise_nmt},
  {"ByteLevel", tfmi_normalise_bytes},
  {"Strip", tfmi_normalise_strip},
  {"Prepend", tfmi_normalise_prepend},
  {"Replace", tfmi_normalise_replace},
  {"Precompiled", tfmi_normalise_charsmap},
};

static const struct tfmi_behavior_row {
  const char *name;
  tfmi_behavior behavior;
} tfmi_behaviors[] = {
  {"Isolated", TFMI_ISOLATED},
  {"Removed", TFMI_REMOVED},
  {"Contiguous", TFMI_CONTIGUOUS},
  {"MergedWithPrevious", TFMI_WITH_PREVIOUS},
  {"MergedWithNext", TFMI_WITH_NEXT},
};

static tfmi_behavior tfmi_part_behavior(tfmi_json *j, const tfmi_part *p) {
  int i;
  for (i = 0; i < TFMI_COUNT(tfmi_behaviors); i++)
    if (tfmi_text_is(p->behavior, tfmi_behaviors[i].name)) return tfmi_behaviors[i].behavior;
  tfmi_part_refuse(j, p, "pre_tokenizer");
}

static void tfmi_cut_split(tfmi_make *m, tfmi_json *j, const tfmi_part *p) {
  tfmi_step *s = tfmi_add_cut(m, NULL, tfmi_part_behavior(j, p));
  if (!p->pattern.n) tfmi_part_refuse(j, p, "pre_tokenizer");
  tfmi_part_find(m, j, p, s);
  s->invert = p->invert;
}

static void tfmi_cut_delimiter(tfmi_make *m, tfmi_json *j, const tfmi_part *p) {
  tfmi_step *s = tfmi_add_cut(m, tfmi_find_text, TFMI_REMOVED);
  if (!p->delimiter.n) tfmi_part_refuse(j, p, "pre_tokenizer");
  s->text = tfmi_part_text(m, j, p, p->delimiter, "pre_tokenizer");
}

static void tfmi_cut_digits(tfmi_make *m, tfmi_json *j, const tfmi_part *p) {
  (void)j;
  tfmi_add_cut(m, tfmi_find_character, p->individual ? TFMI_ISOLATED : TFMI_CONTIGUOUS)->set =
      tfmi_make_charset(m, TFMI_CHARS_NUMERIC);
}

static void tfmi_cut_punctuation(tfmi_make *m, tfmi_json *j, const tfmi_part *p) {
  tfmi_add_cut(m, tfmi_find_character, p->behavior.n ? tfmi_part_behavior(j, p) : TFMI_ISOLATED)
      ->set = tfmi_make_charset(m, TFMI_CHARS_PUNCTUATION);
}

static void tfmi_cut_blanks(tfmi_make *m, tfmi_json *j, const tfmi_part *p) {
  (void)j, (void)p;
  tfmi_add_cut(m, tfmi_find_character, TFMI_REMOVED);
}

static void tfmi_cut_bert(tfmi_make *m, tfmi_json *j, const tfmi_part *p) {
  tfmi_cut_blanks(m, j, p);
  tfmi_cut_punctuation(m, j, p);
}

static void tfmi_cut_words(tfmi_make *m, tfmi_json *j, const tfmi_part *p) {
  tfmi_step *s = tfmi_add_cut(m, tfmi_find_words, TFMI_REMOVED);
  (void)j, (void)p;
  s->set = tfmi_make_charset(m, TFMI_CHARS_WORD);
  s->invert = true;
}

/* The byte-level model takes the bytes themselves; where other steps or another model follow, they
   see the letters that stand for bytes. */
static void tfmi_cut_bytes(tfmi_make *m, tfmi_json *j, const tfmi_part *p) {
  (void)j;
  if (p->add_prefix_space) tfmi_add_lead(m, tfmi_text_of(" "));
  if (p->use_regex) tfmi_cut_by(m, tfmi_split_gpt2);
  if (p->last && m->t->model == TFMI_MERGES) m->t->from_bytes = true;
  else tfmi_add_step(m, m->t->cut, &m->t->cuts)->rewrite = tfmi_rewrite_bytes;
}

/* The reference asks where in the original text a piece begins: told apart only while nothing has
   rewritten it. */
static void tfmi_cut_metaspace(tfmi_make *m, tfmi_json *j, const tfmi_part *p) {
  bool never = tfmi_text_is(p->scheme, "never") || !p->add_prefix_space;
  bool first = tfmi_text_is(p->scheme, "first");
  tfmi_text blank = p->replacement;
  tfmi_step *s;
  int32_t i;
  for (i = 0; first && i < m->t->cuts; i++)
    if (m->t->cut[i].rewrite) tfmi_part_refuse(j, p, "pre_tokenizer after other steps,");
  if (first && m->t->rewrites) tfmi_part_refuse(j, p, "pre_tokenizer after a normalizer,");
  if (!blank.n || tfmi_is_long(blank) || tfmi_text_is(blank, " "))
    tfmi_part_refuse(j, p, "pre_tokenizer");
  blank = tfmi_keep_bytes(m, blank);
  s = tfmi_add_lead(m, blank);
  s->content = blank;
  s->left = first;
  if (never) s->text.n = 0;
  m->no_blanks = true;
  if (!p->split) return;
  s = tfmi_add_cut(m, tfmi_find_text, TFMI_WITH_NEXT);
  s->text = blank;
}

static const tfmi_part_row tfmi_cutters[] = {
  {"Split", tfmi_cut_split},
  {"ByteLevel", tfmi_cut_bytes},
  {"Metaspace", tfmi_cut_metaspace},
  {"Digits", tfmi_cut_digits},
  {"Punctuation", tfmi_cut_punctuation},
  {"Whitespace", tfmi_cut_words},
  {"WhitespaceSplit", tfmi_cut_blanks},
  {"BertPreTokenizer", tfmi_cut_bert},
  {"CharDelimiterSplit", tfmi_cut_delimiter},
};

static void tfmi_json_stage(tfmi_make *m, tfmi_json *j, tfmi_part *list, const tfmi_part_row *rows,
                            int count, const char *stage) {
  ptrdiff_t i;
  int k;
  for (i = 0; i < stbds_arrlen(list); i++) {
    list[i].last = i + 1 == stbds_arrlen(list);
    for (k = 0; k < count; k++)
      if (tfmi_text_is(list[i].type, rows[k].type)) break;
    if (k == count) tfmi_part_refuse(j, &list[i], stage);
    rows[k].make(m, j, &list[i]);
  }
}

/* Decoders of characters come in this order, each at most once. */
static int tfmi_decode_rank(const tfmi_part *p) {
  if (tfmi_text_is(p->type, "Replace") && !p->regex && tfmi_text_is(p->content, " ") &&
      tfmi_text_is(p->pattern, tfmi_low_line)) return 1;
  if (tfmi_text_is(p->type, "Metaspace") && p->replacement.n && !tfmi_is_long(p->replacement))
    return 1;
  if (tfmi_text_is(p->type, "ByteFallback")) return 2;
  if (tfmi_text_is(p->type, "Fuse")) return 3;
  if (tfmi_text_is(p->type, "Strip") && tfmi_text_is(p->content, " ") && p->start <= 1 &&
      p->stop == 0) return 4;
  return 0;
}

static void tfmi_decode_metaspace(tfmi_make *m, const tfmi_part *p) {
  m->says_blanks = false;
  m->t->blank = tfmi_keep_bytes(m, p->replacement);
  m->t->drops_first = p->add_prefix_space && !tfmi_text_is(p->scheme, "never");
}

static void tfmi_json_decode(tfmi_make *m, tfmi_json_parts *parts) {
  tfm_tokenizer *t = m->t;
  ptrdiff_t i, count = stbds_arrlen(parts->decode);
  int before = 0;
  t->says_gaps = count == 0;
  t->says_letters = count == 1 && tfmi_text_is(parts->decode[0].type, "ByteLevel");
  if (t->from_bytes && !t->says_letters)
    tfmi_json_fail(parts->json, TFM_E_UNSUPPORTED, "the decoder of byte-level BPE is %s, expected "
                   "ByteLevel", count ? tfmi_plain(parts->decode[0].type).text : "missing");
  for (i = 0; i < count && !t->says_letters; i++) {
    const tfmi_part *p = &parts->decode[i];
    int rank = tfmi_decode_rank(p);
    if (rank <= before || (rank == 4 && (before != 3 || t->drops_first)))
      tfmi_part_refuse(parts->json, p, "decoder");
    if (rank == 1) m->says_blanks = true;
    if (tfmi_text_is(p->type, "Metaspace")) tfmi_decode_metaspace(m, p);
    if (rank == 2) m->says_bytes = true;
    if (rank == 4) t->strip = p->start == 1;
    before = rank;
  }
}

/* BERT's and RoBERTa's own: cls before the text, sep behind it. */
static void tfmi_after_pair(tfmi_make *m, const tfmi_part *p) {
  tfmi_text text = {NULL, 0};
  stbds_arrput(m->template_names, p->cls.name);
  stbds_arrput(m->template_names, text);
  stbds_arrput(m->template_names, p->sep.name);
  stbds_arrput(m->template_ids, p->cls);
  if (tfmi_text_order(p->cls.name, p->sep.name)) stbds_arrput(m->template_ids, p->sep);
}

static void tfmi_json_after(tfmi_make *m, const tfmi_json_parts *parts) {
  int templates = 0;
  ptrdiff_t i;
  for (i = 0; i < stbds_arrlen(parts->after); i++) {
    const tfmi_part *p = &parts->after[i];
    bool pair = tfmi_text_is(p->type, "RobertaProcessing") ||
                tfmi_text_is(p->type, "BertProcessing");
    if (tfmi_text_is(p->type, "ByteLevel")) continue; /* moves offsets only */
    if ((!pair && !tfmi_text_is(p->type, "TemplateProcessing")) || templates++ ||
        (pair && (!p->cls.name.n || !p->sep.name.n)))
      tfmi_part_refuse(parts->json, p, "post_processor");
    if (pair) tfmi_after_pair(m, p);
  }
}

static int32_t *tfmi_template_expand(tfmi_make *m, tfmi_json *j, ptrdiff_t from, ptrdiff_t to) {
  int32_t *ids = NULL, before;
  for (; from < to; from++) {
    ptrdiff_t k;
    before = (int32_t)stbds_arrlen(ids);
    for (k = 0; k < stbds_arrlen(m->template_ids); k++)
      if (tfmi_text_order(m->template_ids[k].name, m->template_names[from]) == 0)
        stbds_arrput(ids, m->template_ids[k].id);
    if (before == (int32_t)stbds_arrlen(ids))
      tfmi_json_fail(j, TFM_E_FORMAT, "the template's token \"%s\" is not among its special_tokens",
                     tfmi_plain(m->template_names[from]).text);
  }
  return ids;
}

static void tfmi_json_template_use(tfmi_make *m, tfmi_json *j) {
  ptrdiff_t count = stbds_arrlen(m->template_names), text = -1, i;
  int32_t *before, *after;
  if (count == 0) return;
  if (count > 64 || stbds_arrlen(m->template_ids) > 4096)
    tfmi_json_fail(j, TFM_E_UNSUPPORTED, "the template adds more than 63 special tokens");
  for (i = 0; i < count; i++) {
    if (m->template_names[i].at) continue;
    if (text >= 0) tfmi_json_fail(j, TFM_E_UNSUPPORTED, "the template has its text twice");
    text = i;
  }
  if (text < 0) tfmi_json_fail(j, TFM_E_UNSUPPORTED, "the template leaves its text out");
  before = tfmi_template_expand(m, j, 0, text);
  after = tfmi_template_expand(m, j, text + 1, count);
  tfmi_make_before(m, before, (int32_t)stbds_arrlen(before));
  tfmi_make_after(m, after, (int32_t)stbds_arrlen(after));
  stbds_arrfree(before);
  stbds_arrfree(after);
}

static void tfmi_json_check_template(tfmi_make *m) { /* once the vocabulary is known */
  const tfm_tokenizer *t = m->t;
  ptrdiff_t i;
  for (i = 0; i < stbds_arrlen(m->template_ids); i++)
    if (tfmi_known_id(t, m->template_ids[i].id) < 0)
      tfmi_fail(&m->load, TFM_E_FORMAT, "the template's token \"%s\" has id %d, no token's",
                tfmi_plain(m->template_ids[i].name).text, (int)m->template_ids[i].id);
}

static void tfmi_json_added_token(tfmi_make *m, tfmi_json *j) {
  tfmi_added_text a;
  tfmi_text key;
  memset(&a, 0, sizeof a);
  a.id = -1;
  tfmi_json_object(j);
  while (tfmi_json_member(j, &key))
    if (tfmi_text_is(key, "content")) a.text = tfmi_json_string(j);
    else if (tfmi_text_is(key, "id")) a.id = (int32_t)tfmi_json_integer(j, 0, TFMI_VOCABULARY_MAX);
    else if (tfmi_text_is(key, "special")) a.special = tfmi_json_bool(j);
    else if (tfmi_text_is(key, "lstrip")) a.left_blanks = tfmi_json_bool(j);
    else if (tfmi_text_is(key, "rstrip")) a.right_blanks = tfmi_json_bool(j);
    else if (tfmi_text_is(key, "normalized")) a.normalised = tfmi_json_bool(j);
    else if (tfmi_text_is(key, "single_word")) a.word = tfmi_json_bool(j);
    else tfmi_json_skip(j);
  if (a.text.n) stbds_arrput(m->added, a); /* the reference ignores those without text */
}

static void tfmi_json_added(tfmi_make *m, tfmi_json *j) {
  tfmi_json_array(j);
  while (tfmi_json_element(j)) {
    ptrdiff_t count = stbds_arrlen(m->added);
    tfmi_json_added_token(m, j);
    if (stbds_arrlen(m->added) > count && m->added[count].id < 0)
      tfmi_json_fail(j, TFM_E_FORMAT, "an added token has no id");
  }
}

static void tfmi_json_vocabulary(tfmi_make *m, tfmi_json *j) {
  tfmi_text key;
  tfmi_json_object(j);
  while (tfmi_json_member(j, &key))
    tfmi_make_piece(m, key, tfmi_json_integer(j, 0, UINT32_MAX), TFMI_PIECE_NORMAL, 0);
  m->vocabulary_pieces = (size_t)stbds_arrlen(m->piece);
}

/* "a b": exactly one blank, which neither begins nor ends the line. */
static void tfmi_make_merge_line(tfmi_make *m, tfmi_text line) {
  const char *blank = line.n ? (const char *)memchr(line.at, ' ', line.n) : NULL;
  tfmi_merge_text pair = {{NULL, 0}, {NULL, 0}};
  pair.right = line;
  if (blank && !memchr(blank + 1, ' ', (size_t)(line.at + line.n - blank - 1))) {
    pair.left.at = line.at;
    pair.left.n = (size_t)(blank - line.at);
    pair.right.at = blank + 1;
    pair.right.n = line.n - pair.left.n - 1;
  }
  stbds_arrput(m->merge, pair);
}

static void tfmi_json_merges(tfmi_make *m, tfmi_json *j) {
  tfmi_merge_text pair;
  tfmi_json_array(j);
  while (tfmi_json_element(j)) {
    if (tfmi_json_peek(j) == TFMI_JSON_STRING) {
      tfmi_make_merge_line(m, tfmi_json_string(j));
      continue;
    }
    tfmi_json_array(j);
    if (!tfmi_json_element(j)) tfmi_json_fail(j, TFM_E_FORMAT, "a merge is empty, expected a pair");
    pair.left = tfmi_json_string(j);
    if (!tfmi_json_element(j)) tfmi_json_fail(j, TFM_E_FORMAT, "a merge of one part, expected two");
    pair.right = tfmi_json_string(j);
    if (tfmi_json_element(j))
      tfmi_json_fail(j, TFM_E_FORMAT, "a merge of three parts, expected two");
    stbds_arrput(m->merge, pair);
  }
}

static bool tfmi_json_flag(tfmi_json *j) { return !tfmi_json_null(j) && tfmi_json_bool(j); }

static void tfmi_json_empty_text(tfmi_json *j, tfmi_text key) { /* null or "" */
  if (!tfmi_json_null(j) && tfmi_json_string(j).n)
    tfmi_json_fail(j, TFM_E_UNSUPPORTED, "%s is not empty", tfmi_plain(key).text);
}

/* A score as the reference reads it: all digits as one integer, rounded, divided by a power of ten,
   rounded again. Which of two equal ways wins can hang on the last bit. */
static double tfmi_json_score(tfmi_json *j) {
  tfmi_json_kind kind = tfmi_json_peek(j);
  const char *p = j->at;
  double exact = tfmi_json_number(j), power = 1;
  uint64_t digits = 0;
  int places = 0, i;
  bool point = false;
  for (; kind == TFMI_JSON_NUMBER && p < j->at; p++) {
    if (*p == '.') point = true;
    if (*p == '.' || *p == '-') continue;
    if (*p < '0' || *p > '9') break;
    if (digits > (UINT64_MAX - (uint64_t)(*p - '0')) / 10) break;
    digits = 10 * digits + (uint64_t)(*p - '0');
    places += point;
  }
  if (p < j->at && (!point || *p == 'e' || *p == 'E')) return exact;
  if (places > 22) return exact; /* powers of ten are exact up to that one */
  for (i = 0; i < places; i++) power *= 10;
  return (exact < 0 ? -1 : 1) * ((double)digits / power);
}

/* Unigram's: [["<unk>", 0.0], ["a", -2.5]] */
static void tfmi_json_scores(tfmi_make *m, tfmi_json *j) {
  tfmi_json_array(j);
  while (tfmi_json_element(j)) {
    tfmi_text text;
    tfmi_json_array(j);
    if (!tfmi_json_element(j)) tfmi_json_fail(j, TFM_E_FORMAT, "a piece is empty, expected a pair");
    text = tfmi_json_string(j);
    if (!tfmi_json_element(j)) tfmi_json_fail(j, TFM_E_FORMAT, "a piece without a score");
    tfmi_make_piece(m, text, stbds_arrlen(m->piece), TFMI_PIECE_NORMAL, tfmi_json_score(j));
    if (tfmi_json_element(j)) tfmi_json_fail(j, TFM_E_FORMAT, "a piece of three parts");
  }
  m->vocabulary_pieces = (size_t)stbds_arrlen(m->piece);
}

static const struct tfmi_model_row {
  const char *type, *kind;
  tfmi_model model;
} tfmi_models[] = {
  {"BPE", "SentencePiece BPE", TFMI_MERGES},
  {"Unigram", "Unigram", TFMI_UNIGRAM},
  {"WordLevel", "words", TFMI_WHOLE},
};

/* Old files do not tell the type: then it is BPE, or Unigram where the vocabulary has scores. */
static void tfmi_json_model_type(tfmi_make *m, tfmi_json *j, tfmi_text type) {
  int i;
  for (i = 0; i < TFMI_COUNT(tfmi_models); i++)
    if (tfmi_text_is(type, tfmi_models[i].type)) {
      m->t->model = tfmi_models[i].model;
      m->t->kind = tfmi_models[i].kind;
      return;
    }
  tfmi_json_fail(j, TFM_E_UNSUPPORTED, "the model is %s, expected BPE, Unigram or WordLevel",
                 tfmi_plain(type).text);
}

/* A member that is read the same whatever the model; false: it is none of these. */
static bool tfmi_json_model_member(tfmi_make *m, tfmi_json *j, tfmi_text key) {
  tfm_tokenizer *t = m->t;
  if (tfmi_text_is(key, "merges")) tfmi_json_merges(m, j);
  else if (tfmi_text_is(key, "fuse_unk")) t->fuse_unk = tfmi_json_flag(j);
  else if (tfmi_text_is(key, "byte_fallback")) t->byte_fallback = tfmi_json_flag(j);
  else if (tfmi_text_is(key, "ignore_merges")) m->whole_first = tfmi_json_flag(j);
  else if (tfmi_text_is(key, "continuing_subword_prefix")) tfmi_json_empty_text(j, key);
  else if (tfmi_text_is(key, "end_of_word_suffix")) tfmi_json_empty_text(j, key);
  else if (tfmi_json_null(j)) return true;
  else if (tfmi_text_is(key, "unk_token")) m->unk = tfmi_json_string(j);
  else if (tfmi_text_is(key, "unk_id"))
    t->unk = (int32_t)tfmi_json_integer(j, 0, TFMI_VOCABULARY_MAX);
  else if (tfmi_text_is(key, "dropout") && tfmi_json_number(j) != 0)
    tfmi_json_fail(j, TFM_E_UNSUPPORTED, "dropout makes tokens random");
  else return tfmi_text_is(key, "dropout");
  return true;
}

static void tfmi_json_model(tfmi_make *m, tfmi_json *j) {
  tfmi_text key, type = tfmi_text_of(""), *keys = NULL;
  tfmi_json_object(j);
  while (tfmi_json_member(j, &key)) {
    stbds_arrput(keys, key);
    if (tfmi_text_is(key, "type")) {
      tfmi_json_model_type(m, j, type = tfmi_json_string(j));
    } else if (tfmi_text_is(key, "vocab")) {
      bool scores = tfmi_json_peek(j) == TFMI_JSON_ARRAY;
      if (!type.n) tfmi_json_model_type(m, j, tfmi_text_of(scores ? "Unigram" : "BPE"));
      if (scores) tfmi_json_scores(m, j);
      else tfmi_json_vocabulary(m, j);
      if (scores != (m->t->model == TFMI_UNIGRAM))
        tfmi_json_fail(j, TFM_E_FORMAT, "the vocabulary is not one of %s", m->t->kind);
    } else if (!tfmi_json_model_member(m, j, key)) {
      tfmi_json_skip(j);
    }
  }
  tfmi_names_unique(&m->load, "the model in tokenizer.json", keys, (uint64_t)stbds_arrlen(keys));
  stbds_arrfree(keys);
  if (m->t->model == TFMI_UNIGRAM && (size_t)m->t->unk + 1 > m->vocabulary_pieces)
    tfmi_json_fail(j, TFM_E_FORMAT, "unk_id is %d, expected less than %llu", (int)m->t->unk,
                   (unsigned long long)m->vocabulary_pieces);
}

/* The reference gives ids by its own rule, whatever the file says: those of the model's tokens of
   the same text, else the next behind all others. A file that says otherwise is refused. */
static void tfmi_json_added_ids(tfmi_make *m) {
  int64_t size = (int64_t)m->vocabulary_pieces, largest = -1;
  ptrdiff_t i;
  tfmi_place(m);
  for (i = 0; i < stbds_arrlen(m->added); i++) {
    const tfmi_added_text *a = &m->added[i];
    int64_t id = tfmi_text_find(&m->t->spelled, a->text.at, a->text.n);
    if (id < 0) {
      id = largest >= size ? largest + 1 : size;
      tfmi_make_piece(m, a->text, id, TFMI_PIECE_ADDED, 0);
    }
    if (id != a->id)
      tfmi_fail(&m->load, TFM_E_FORMAT, "added token \"%s\" has id %d, expected %lld by its place "
                "in the vocabulary", tfmi_plain(a->text).text, (int)a->id, (long long)id);
    if (id > largest) largest = id;
  }
}

/* What shapes batches in the reference; here the application does that. */
static void tfmi_json_ignored(tfmi_make *m, tfmi_json *j, tfmi_text key) {
  if (tfmi_json_null(j)) return;
  tfmi_json_skip(j);
  tfmi_log(&m->heap.host, TFM_LOG_WARNING, "%s: its %s is not applied", m->load.object,
           tfmi_plain(key).text);
}

static void tfmi_read_json(tfmi_make *m, tfmi_text file) {
  tfmi_json_parts parts = {NULL, NULL, NULL, NULL, NULL};
  tfmi_json j;
  tfmi_text key, *keys = NULL;
  tfmi_json_init(&j, &m->load, "tokenizer.json", file.at, file.n);
  parts.json = &j;
  tfmi_json_object(&j);
  while (tfmi_json_member(&j, &key)) {
    stbds_arrput(keys, key);
    if (tfmi_text_is(key, "model")) tfmi_json_model(m, &j);
    else if (tfmi_text_is(key, "added_tokens")) tfmi_json_added(m, &j);
    else if (tfmi_text_is(key, "normalizer")) tfmi_parts_read(m, &j, &parts.normalise);
    else if (tfmi_text_is(key, "pre_tokenizer")) tfmi_parts_read(m, &j, &parts.split);
    else if (tfmi_text_is(key, "post_processor")) tfmi_parts_read(m, &j, &parts.after);
    else if (tfmi_text_is(key, "decoder")) tfmi_parts_read(m, &j, &parts.decode);
    else if (tfmi_text_is(key, "truncation") || tfmi_text_is(key, "padding"))
      tfmi_json_ignored(m, &j, key);
    else tfmi_json_skip(&j);
  }
  tfmi_json_finish(&j);
  tfmi_names_unique(&m->load, "tokenizer.json", keys, (uint64_t)stbds_arrlen(keys));
  stbds_arrfree(keys);
  if (!m->vocabulary_pieces)
    tfmi_fail(&m->load, TFM_E_FORMAT, "model.vocab is missing or empty; this is no tokenizer.json");
  tfmi_json_stage(m, &j, parts.normalise, tfmi_normalisers, TFMI_COUNT(tfmi_normalisers),
                  "normalizer");
  tfmi_json_stage(m, &j, parts.split, tfmi_cutters, TFMI_COUNT(tfmi_cutters), "pre_tokenizer");
  tfmi_json_decode(m, &parts);
  tfmi_json_after(m, &parts);
  tfmi_json_template_use(m, &j);
  if (m->t->from_bytes && m->t->byte_fallback)
    tfmi_fail(&m->load, TFM_E_UNSUPPORTED, "byte_fallback together with byte-level BPE");
  if (m->t->from_bytes) m->t->kind = "byte-level BPE";
  tfmi_json_added_ids(m);
  tfmi_make_tables(m);
  if (!m->t->from_bytes && m->t->model == TFMI_MERGES && !m->merge_count)
    m->t->kind = "characters";
  m->t->strict = m->t->model == TFMI_WHOLE && m->t->unk < 0;
  tfmi_json_check_template(m);
}

/* ---- vocab.json with merges.txt: GPT-2's own files ---- */

static void tfmi_read_merge_lines(tfmi_make *m, tfmi_text file) {
  const char *end = file.at + file.n;
  tfmi_text line;
  for (line.at = file.at; line.at < end; line.at += line.n + 1) {
    const char *stop = (const char *)memchr(line.at, '\n', (size_t)(end - line.at));
    tfmi_text kept = line;
    line.n = (size_t)((stop ? stop : end) - line.at);
    kept.n = line.n && line.at[line.n - 1] == '\r' ? line.n - 1 : line.n;
    if (kept.n >= 8 && memcmp(kept.at, "#version", 8) == 0) continue;
    tfmi_make_merge_line(m, kept);
  }
}

typedef struct tfmi_beside_row { /* what tokenizer_config.json's classes add to the two files */
  const char *name;
  tfmi_splitter split;
  bool composes; /* NFC comes first */
} tfmi_beside_row;

static const tfmi_beside_row tfmi_besides[] = {
  {"GPT2Tokenizer", tfmi_split_gpt2, false},
  {"GPT2TokenizerFast", tfmi_split_gpt2, false},
  {"Qwen2Tokenizer", tfmi_split_qwen2, true},
  {"Qwen2TokenizerFast", tfmi_split_qwen2, true},
};

static void tfmi_read_gpt2(tfmi_make *m, tfmi_text vocabulary, tfmi_text merges) {
  tfmi_json j;
  tfmi_json_init(&j, &m->load, "vocab.json", vocabulary.at, vocabulary.n);
  tfmi_json_vocabulary(m, &j);
  tfmi_json_finish(&j);
  tfmi_read_merge_lines(m, merges);
}

/* ---- GGUF ---- */

typedef struct tfmi_split_row { /* a name for how text is split, and for what goes with it */
  const char *name, *pattern[3];
  bool digits;      /* every one by itself, before the patterns */
  bool composes;    /* NFC comes first */
  bool whole_first;
  bool adds_bos;    /* unless the file says otherwise */
} tfmi_split_row;

/* tokenizer.ggml.pre: what the models of that name have in their tokenizer.json. "default" is none
   of them: converters wrote it where they did not know better. */
static const tfmi_split_row tfmi_gguf_pres[] = {
  {"gpt-2", {TFMI_GPT2_PATTERN}, false, false, false, false},
  {"phi-2", {TFMI_GPT2_PATTERN}, false, false, false, false},
  {"mpt", {TFMI_GPT2_PATTERN}, false, true, false, false},
  {"olmo", {TFMI_GPT2_PATTERN}, false, true, false, false},
  {"starcoder", {TFMI_GPT2_PATTERN}, true, false, false, false},
  {"refact", {TFMI_GPT2_PATTERN}, true, false, false, false},
  {"smollm", {TFMI_GPT2_PATTERN}, true, false, false, false},
  {"command-r", {TFMI_GPT2_PATTERN}, true, true, false, true},
  {"llama-bpe", {TFMI_CL100K_PATTERN("{1,3}")}, false, false, true, true},
  {"llama3", {TFMI_CL100K_PATTERN("{1,3}")}, false, false, true, true},
  {"llama-v3", {TFMI_CL100K_PATTERN("{1,3}")}, false, false, true, true},
  {"smaug-bpe", {TFMI_CL100K_PATTERN("{1,3}")}, false, false, false, false},
  {"dbrx", {TFMI_CL100K_PATTERN("{1,3}")}, false, false, false, false},
  {"qwen2", {TFMI_CL100K_PATTERN("")}, false, true, false, false},
  {"deepseek-r1-qwen", {TFMI_CL100K_PATTERN("")}, false, true, false, true},
  {"gpt-4o", {TFMI_O200K_PATTERN}, false, false, false, false},
  {"llama4", {TFMI_O200K_PATTERN}, false, false, false, true},
  {"tekken", {TFMI_TEKKEN_PATTERN}, false, false, true, true},
  {"deepseek-v3",
   {"\\p{N}{1,3}", "[\xe4\xb8\x80-\xe9\xbe\xa5\xe3\x81\x80-\xe3\x82\x9f\xe3\x82\xa0-\xe3\x83\xbf]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
    "|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"},
   false, false, false, true},
};

/* The steps of a byte-level vocabulary whose splitting has a name. */
static void tfmi_split_as(tfmi_make *m, const tfmi_split_row *row) {
  int i;
  m->t->kind = "byte-level BPE";
  m->t->from_bytes = m->t->says_letters = true;
  m->whole_first = row->whole_first;
  if (row->composes) tfmi_add_form(m, true, false);
  if (row->digits)
    tfmi_add_cut(m, tfmi_find_character, TFMI_ISOLATED)->set =
        tfmi_make_charset(m, TFMI_CHARS_NUMERIC);
  for (i = 0; i < 3 && row->pattern[i]; i++)
    tfmi_find_by(m, tfmi_add_cut(m, NULL, TFMI_ISOLATED), tfmi_text_of(row->pattern[i]));
}

static const tfmi_gguf_value *tfmi_gguf_list(tfmi_make *m, const tfmi_gguf *g, const char *key,
                                             uint64_t count) {
  const tfmi_gguf_value *v = tfmi_gguf_find(g, key);
  if (v && (v->type != TFMI_GGUF_ARRAY || v->count != count))
    tfmi_fail(&m->load, TFM_E_FORMAT, "key %s has %llu elements, expected an array of %llu", key,
              (unsigned long long)v->count, (unsigned long long)count);
  return v;
}

/* Texts with types and scores, where the file has them. */
static void tfmi_gguf_pieces(tfmi_make *m, const tfmi_gguf *g) {
  const char *key = "tokenizer.ggml.tokens", *type_key = "tokenizer.ggml.token_type";
  const tfmi_gguf_value *tokens = tfmi_gguf_find(g, key), *types, *scores;
  const uint8_t *at;
  uint64_t i;
  tfmi_text text;
  if (!tokens || tokens->type != TFMI_GGUF_ARRAY || tokens->element != TFMI_GGUF_STRING)
    tfmi_fail(&m->load, TFM_E_FORMAT, "key %s is missing or no array of strings", key);
  types = tfmi_gguf_list(m, g, type_key, tokens->count);
  scores = tfmi_gguf_list(m, g, "tokenizer.ggml.scores", tokens->count);
  if (scores && scores->element != TFMI_GGUF_F32)
    tfmi_fail(&m->load, TFM_E_FORMAT, "key tokenizer.ggml.scores is not an array of f32");
  at = tokens->at;
  for (i = 0; i < tokens->count; i++) {
    int64_t type = TFMI_PIECE_NORMAL;
    at = tfmi_gguf_text_at(at, &text);
    if (types && !tfmi_gguf_int_at(g, type_key, types->element,
                                   types->at + i * (types->bytes / types->count), &type))
      tfmi_fail(&m->load, TFM_E_FORMAT, "key %s is not an array of integers", type_key);
    if (type < TFMI_PIECE_NORMAL || type > TFMI_PIECE_BYTE)
      tfmi_fail(&m->load, TFM_E_FORMAT, "token %llu has type %lld, expected 1 to 6",
                (unsigned long long)i, (long long)type);
    tfmi_make_piece(m, text, (int64_t)i, (int32_t)type, scores ? tfmi_f32(scores->at + 4 * i) : 0);
    if (type == TFMI_PIECE_UNKNOWN || type == TFMI_PIECE_CONTROL || type == TFMI_PIECE_USER)
      tfmi_make_added(m, text, (int32_t)i, type != TFMI_PIECE_USER);
  }
  m->vocabulary_pieces = (size_t)stbds_arrlen(m->piece);
}

static void tfmi_gguf_merges(tfmi_make *m, const tfmi_gguf *g) {
  const tfmi_gguf_value *v = tfmi_gguf_find(g, "tokenizer.ggml.merges");
  const uint8_t *at;
  tfmi_text line;
  uint64_t i;
  if (!v || v->type != TFMI_GGUF_ARRAY || v->element != TFMI_GGUF_STRING)
    tfmi_fail(&m->load, TFM_E_FORMAT, "key tokenizer.ggml.merges is missing, or no array of texts");
  for (i = 0, at = v->at; i < v->count; i++) {
    at = tfmi_gguf_text_at(at, &line);
    tfmi_make_merge_line(m, line);
  }
}

/* How text is split; true when such a vocabulary begins texts with BOS. Of the files that do not
   say it, GPT-2's own is certain. */
static bool tfmi_gguf_pre(tfmi_make *m, const tfmi_gguf *g) {
  tfmi_text pre = tfmi_text_of("default"), architecture = tfmi_text_of("");
  int i;
  tfmi_gguf_get_text(g, "tokenizer.ggml.pre", &pre);
  tfmi_gguf_get_text(g, "general.architecture", &architecture);
  if (tfmi_text_is(pre, "default") && tfmi_text_is(architecture, "gpt2"))
    pre = tfmi_text_of("gpt-2");
  for (i = 0; i < TFMI_COUNT(tfmi_gguf_pres); i++)
    if (tfmi_text_is(pre, tfmi_gguf_pres[i].name)) {
      tfmi_split_as(m, &tfmi_gguf_pres[i]);
      return tfmi_gguf_pres[i].adds_bos;
    }
  tfmi_fail(&m->load, TFM_E_UNSUPPORTED, "tokenizer.ggml.pre is \"%s\", whose splitting is not "
            "known here; use the model's tokenizer.json", tfmi_plain(pre).text);
}

static void tfmi_make_spm(tfmi_make *m, bool prefix) { /* what all SentencePiece files share */
  tfm_tokenizer *t = m->t;
  t->kind = "SentencePiece BPE";
  m->blanks.rewrite = tfmi_rewrite_blanks;
  m->blanks.content = tfmi_text_of(tfmi_low_line);
  if (prefix) m->blanks.text = m->blanks.content;
  m->no_blanks = true;
  t->strip = prefix;
  t->byte_fallback = true;
  t->fuse_unk = true;
  m->scored = true;
  m->says_bytes = true;
  m->says_blanks = true;
}

/* Unigram in SentencePiece's own files, which its own code reads: in single precision, with rules
   that take the longest match at each place. */
static void tfmi_make_spm_unigram(tfmi_make *m, tfmi_text charsmap) {
  m->t->kind = "Unigram";
  m->t->model = TFMI_UNIGRAM;
  m->t->single = true;
  m->scored = false;
  if (charsmap.n) tfmi_add_charsmap(m, charsmap, tfmi_rewrite_longest);
}

static tfmi_text tfmi_gguf_charsmap(tfmi_make *m, const tfmi_gguf *g) { /* n 0: none */
  static const char key[] = "tokenizer.ggml.precompiled_charsmap";
  const tfmi_gguf_value *v = tfmi_gguf_find(g, key);
  tfmi_text map = {NULL, 0};
  if (!v) return map;
  if (v->type != TFMI_GGUF_ARRAY || v->bytes != v->count)
    tfmi_fail(&m->load, TFM_E_FORMAT, "key %s is not an array of bytes", key);
  map.at = (const char *)v->at;
  map.n = (size_t)v->bytes;
  return tfmi_keep_bytes(m, map);
}

static int32_t tfmi_gguf_id(const tfmi_gguf *g, const char *key) {
  int64_t id = -1;
  tfmi_gguf_get_int(g, key, &id);
  return id >= 0 && id < TFMI_VOCABULARY_MAX ? (int32_t)id : -1; /* 2^32 - 1 means none */
}

static void tfmi_gguf_adds(tfmi_make *m, const tfmi_gguf *g, bool bos, bool eos) {
  tfm_tokenizer *t = m->t;
  tfmi_gguf_get_bool(g, "tokenizer.ggml.add_bos_token", &bos);
  tfmi_gguf_get_bool(g, "tokenizer.ggml.add_eos_token", &eos);
  t->bos = tfmi_known_id(t, tfmi_gguf_id(g, "tokenizer.ggml.bos_token_id"));
  t->eos = tfmi_known_id(t, tfmi_gguf_id(g, "tokenizer.ggml.eos_token_id"));
  t->pad = tfmi_known_id(t, tfmi_gguf_id(g, "tokenizer.ggml.padding_token_id"));
  tfmi_make_before(m, &t->bos, bos && t->bos >= 0);
  tfmi_make_after(m, &t->eos, eos && t->eos >= 0);
}

/* False when the file has no vocabulary. */
static bool tfmi_read_gguf(tfmi_make *m, tfmi_text file) {
  tfmi_gguf g;
  tfmi_text model;
  bool prefix = true, spm, unigram, bos;
  tfmi_gguf_open(&g, &m->load, file.at, file.n);
  if (!tfmi_gguf_get_text(&g, "tokenizer.ggml.model", &model)) return false;
  if (tfmi_text_is(model, "no_vocab")) return false;
  unigram = tfmi_text_is(model, "t5");
  bos = !unigram; /* T5 ends its texts with EOS instead */
  spm = unigram || tfmi_text_is(model, "llama");
  if (!spm && !tfmi_text_is(model, "gpt2"))
    tfmi_fail(&m->load, TFM_E_UNSUPPORTED, "tokenizer.ggml.model is \"%s\", expected gpt2, llama "
              "or t5; use the model's tokenizer.json", tfmi_plain(model).text);
  tfmi_gguf_pieces(m, &g);
  if (spm) {
    tfmi_gguf_get_bool(&g, "tokenizer.ggml.add_space_prefix", &prefix);
    tfmi_gguf_get_bool(&g, "tokenizer.ggml.remove_extra_whitespaces", &m->blanks.squeeze);
    tfmi_make_spm(m, prefix);
    if (unigram) tfmi_make_spm_unigram(m, tfmi_gguf_charsmap(m, &g));
    if (!tfmi_gguf_find(&g, "tokenizer.ggml.scores"))
      tfmi_fail(&m->load, TFM_E_FORMAT, "key tokenizer.ggml.scores is missing");
  } else {
    bos = tfmi_gguf_pre(m, &g);
    tfmi_gguf_merges(m, &g);
  }
  m->t->unk = tfmi_gguf_id(&g, "tokenizer.ggml.unknown_token_id");
  tfmi_make_tables(m);
  m->t->unk = tfmi_known_id(m->t, m->t->unk);
  tfmi_gguf_adds(m, &g, bos, unigram);
  return true;
}

/* ---- tiktoken: lines of a token's bytes in base64, a blank, its rank, which is its id ---- */

static const tfmi_split_row tfmi_tiktokens[] = {
  {"gpt2", {TFMI_GPT2_PATTERN}, false, false, true, false},
  {"r50k_base", {TFMI_GPT2_PATTERN}, false, false, true, false},
  {"p50k_base", {TFMI_GPT2_PATTERN}, false, false, true, false},
  {"cl100k_base", /* the white space that a text ends with is one piece */
   {"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}"
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s+(?![\\s\\S])|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"},
   false, false, true, false},
  {"o200k_base", {TFMI_O200K_PATTERN}, false, false, true, false},
  {"llama3", {TFMI_CL100K_PATTERN("{1,3}")}, false, false, true, true},
  {"qwen", {TFMI_CL100K_PATTERN("")}, false, true, true, false},
};

/* What the files leave out too: tiktoken's own from tiktoken_ext/openai_public.py, Qwen's from
   Qwen/Qwen-7B, tokenization_qwen.py, Llama 3's those that all its versions agree about
   (llama/tokenizer.py of meta-llama/llama3, models/llama3/tokenizer.py of llama-models). */
static const struct tfmi_tiktoken_special {
  const char *splitting, *text;
  int32_t id;
  int32_t series; /* so many, with numbers from 0 on and "|>" behind the text; 0: one */
} tfmi_tiktoken_specials[] = {
  {"gpt2", "<|endoftext|>", 50256, 0},
  {"r50k_base", "<|endoftext|>", 50256, 0},
  {"p50k_base", "<|endoftext|>", 50256, 0},
  {"cl100k_base", "<|endoftext|>", 100257, 0},
  {"cl100k_base", "<|fim_prefix|>", 100258, 0},
  {"cl100k_base", "<|fim_middle|>", 100259, 0},
  {"cl100k_base", "<|fim_suffix|>", 100260, 0},
  {"cl100k_base", "<|endofprompt|>", 100276, 0},
  {"o200k_base", "<|endoftext|>", 199999, 0},
  {"o200k_base", "<|endofprompt|>", 200018, 0},
  {"llama3", "<|begin_of_text|>", 128000, 0},
  {"llama3", "<|end_of_text|>", 128001, 0},
  {"llama3", "<|start_header_id|>", 128006, 0},
  {"llama3", "<|end_header_id|>", 128007, 0},
  {"llama3", "<|eot_id|>", 128009, 0},
  {"qwen", "<|endoftext|>", 151643, 0},
  {"qwen", "<|im_start|>", 151644, 0},
  {"qwen", "<|im_end|>", 151645, 0},
  {"qwen", "<|extra_", 151646, 205},
};

/* The next line's token and rank; false when it is not one. *at goes behind it. */
static bool tfmi_tiktoken_line(const char **at, const char *end, tfmi_text *token, int64_t *rank) {
  const char *p = *at;
  token->at = p;
  while (p < end && (tfmi_base64_digit(*p) >= 0 || *p == '=')) p++;
  token->n = (size_t)(p - token->at);
  if (!token->n || p == end || *p++ != ' ' || p == end || *p < '0' || *p > '9') return false;
  for (*rank = 0; p < end && *p >= '0' && *p <= '9' && *rank < TFMI_VOCABULARY_MAX; p++)
    *rank = 10 * *rank + (*p - '0');
  if (p < end && *p == '\r') p++;
  if (p < end && *p++ != '\n') return false;
  *at = p;
  return true;
}

static bool tfmi_is_tiktoken(tfmi_text file) {
  const char *at = file.at;
  tfmi_text token;
  int64_t rank;
  return tfmi_tiktoken_line(&at, file.at + file.n, &token, &rank);
}

/* The row of a name, or the one that the file is named after: "cl100k_base.tiktoken". */
static const tfmi_split_row *tfmi_tiktoken_row(tfmi_make *m, const char *path) {
  const char *name = m->config ? m->config->splitting : NULL, *slash;
  size_t n;
  int i;
  if (!name) name = path ? path : "";
  while (!(m->config && m->config->splitting) && (slash = strpbrk(name, "/\\")) != NULL)
    name = slash + 1;
  n = strcspn(name, ".");
  for (i = 0; i < TFMI_COUNT(tfmi_tiktokens); i++)
    if (strlen(tfmi_tiktokens[i].name) == n && memcmp(tfmi_tiktokens[i].name, name, n) == 0)
      return &tfmi_tiktokens[i];
  tfmi_fail(&m->load, TFM_E_UNSUPPORTED, "a tiktoken file does not say how text is split, and "
            "\"%s\" is not known; set the config's splitting to gpt2, r50k_base, p50k_base, "
            "cl100k_base, o200k_base, llama3 or qwen", tfmi_plain(tfmi_text_of(name)).text);
}

/* Tokens are spelled in letters for bytes, and merge by rank. */
static void tfmi_tiktoken_pieces(tfmi_make *m, tfmi_text file) {
  const char *at = file.at, *end = file.at + file.n;
  char *bytes = (char *)tfmi_scratch(&m->load, file.n, 1);
  char *letters = (char *)tfmi_scratch(&m->load, 2 * (uint64_t)file.n, 1);
  while (at < end) {
    tfmi_text token, piece;
    int64_t rank;
    size_t n, i;
    const char *line = at;
    bool whole = tfmi_tiktoken_line(&at, end, &token, &rank);
    n = whole ? tfmi_unbase64(token.at, token.n, bytes) : SIZE_MAX;
    if (n == SIZE_MAX)
      tfmi_fail(&m->load, TFM_E_FORMAT, "byte %llu: expected a token in base64, a blank and a rank",
                (unsigned long long)(line - file.at));
    piece.at = letters;
    for (i = 0; i < n; i++)
      letters = tfmi_put_utf8(letters, tfmi_letter_of_byte((uint8_t)bytes[i]));
    piece.n = (size_t)(letters - piece.at);
    tfmi_make_piece(m, piece, rank, TFMI_PIECE_NORMAL, -(double)rank);
  }
  m->vocabulary_pieces = (size_t)stbds_arrlen(m->piece);
}

static void tfmi_tiktoken_special_add(tfmi_make *m, const struct tfmi_tiktoken_special *s) {
  int32_t i;
  for (i = 0; i == 0 || i < s->series; i++) {
    char *name = (char *)tfmi_scratch(&m->load, 64, 1);
    tfmi_text text;
    if (s->series) snprintf(name, 64, "%s%d|>", s->text, (int)i);
    else snprintf(name, 64, "%s", s->text);
    text = tfmi_text_of(name);
    tfmi_make_piece(m, text, s->id + i, TFMI_PIECE_ADDED, 0);
    tfmi_make_added(m, text, s->id + i, true);
  }
}

static void tfmi_read_tiktoken(tfmi_make *m, tfmi_text file, const char *path) {
  const tfmi_split_row *row = tfmi_tiktoken_row(m, path);
  tfm_tokenizer *t = m->t;
  int i;
  tfmi_tiktoken_pieces(m, file);
  for (i = 0; i < TFMI_COUNT(tfmi_tiktoken_specials); i++)
    if (strcmp(tfmi_tiktoken_specials[i].splitting, row->name) == 0)
      tfmi_tiktoken_special_add(m, &tfmi_tiktoken_specials[i]);
  tfmi_split_as(m, row);
  m->scored = true;
  tfmi_make_tables(m);
  for (i = 0; i < 256; i++)
    if (t->byte_id[i] < 0 || t->byte_id[i] >= t->vocabulary)
      tfmi_fail(&m->load, TFM_E_FORMAT, "no token for the byte 0x%02X", i);
  if (row->adds_bos) tfmi_make_before(m, &t->bos, t->bos >= 0);
}

/* ---- SentencePiece .model: protocol buffers, of which only these fields are read ---- */

typedef struct tfmi_proto {
  tfmi_make *make;
  const uint8_t *at, *end;
} tfmi_proto;

typedef struct tfmi_proto_field {
  uint32_t number, wire; /* wire: 0 varint, 1 eight bytes, 2 bytes, 5 four bytes */
  uint64_t value;        /* of a varint, or four bytes */
  tfmi_text bytes;
} tfmi_proto_field;

static uint64_t tfmi_proto_varint(tfmi_proto *p) {
  uint64_t value = 0;
  int shift;
  for (shift = 0; shift < 70 && p->at < p->end; shift += 7) {
    uint8_t byte = *p->at++;
    if (shift < 64) value |= (uint64_t)(byte & 0x7f) << shift;
    if (byte < 0x80) return value;
  }
  tfmi_fail(&p->make->load, TFM_E_FORMAT, "a number in the model does not end");
}

static tfmi_text tfmi_proto_bytes(tfmi_proto *p, uint64_t n) {
  tfmi_text bytes;
  if (n > (uint64_t)(p->end - p->at))
    tfmi_fail(&p->make->load, TFM_E_FORMAT,
              "a field of the model has %llu bytes, but %llu are left", (unsigned long long)n,
              (unsigned long long)(p->end - p->at));
  bytes.at = (const char *)p->at;
  bytes.n = (size_t)n;
  p->at += n;
  return bytes;
}

static bool tfmi_proto_next(tfmi_proto *p, tfmi_proto_field *f) {
  uint64_t key;
  memset(f, 0, sizeof *f);
  if (p->at == p->end) return false;
  key = tfmi_proto_varint(p);
  f->number = (uint32_t)(key >> 3);
  f->wire = (uint32_t)(key & 7);
  if (key >> 3 == 0 || key >> 3 > 536870911)
    tfmi_fail(&p->make->load, TFM_E_FORMAT, "the model has a field of number 0 or above 2^29 - 1");
  switch (f->wire) {
    case 0: f->value = tfmi_proto_varint(p); break;
    case 1: tfmi_proto_bytes(p, 8); break;
    case 2: f->bytes = tfmi_proto_bytes(p, tfmi_proto_varint(p)); break;
    case 5: f->value = tfmi_u32(tfmi_proto_bytes(p, 4).at); break;
    default:
      tfmi_fail(&p->make->load, TFM_E_FORMAT, "field %u of the model has wire type %u, expected "
                "0, 1, 2 or 5", (unsigned)f->number, (unsigned)f->wire);
  }
  return true;
}

static tfmi_proto tfmi_proto_open(tfmi_make *m, tfmi_text bytes) {
  tfmi_proto p;
  p.make = m;
  p.at = (const uint8_t *)bytes.at;
  p.end = p.at + bytes.n;
  return p;
}

static void tfmi_proto_expect(tfmi_make *m, const tfmi_proto_field *f, uint32_t wire) {
  if (f->wire != wire)
    tfmi_fail(&m->load, TFM_E_FORMAT, "field %u of the model has wire type %u, expected %u",
              (unsigned)f->number, (unsigned)f->wire, (unsigned)wire);
}

static void tfmi_spm_piece(tfmi_make *m, tfmi_text bytes) {
  tfmi_proto p = tfmi_proto_open(m, bytes);
  tfmi_proto_field f;
  tfmi_text text = {"", 0};
  uint64_t type = TFMI_PIECE_NORMAL;
  uint32_t bits = 0;
  float score;
  int32_t id = (int32_t)stbds_arrlen(m->piece);
  while (tfmi_proto_next(&p, &f)) {
    if (f.number <= 3) tfmi_proto_expect(m, &f, f.number == 1 ? 2 : f.number == 2 ? 5 : 0);
    if (f.number == 1) text = f.bytes;
    else if (f.number == 2) bits = (uint32_t)f.value;
    else if (f.number == 3) type = f.value;
  }
  if (text.n == 0) tfmi_fail(&m->load, TFM_E_FORMAT, "piece %d is empty", (int)id);
  if (type < TFMI_PIECE_NORMAL || type > TFMI_PIECE_BYTE || type == TFMI_PIECE_UNUSED)
    tfmi_fail(&m->load, TFM_E_UNSUPPORTED, "piece %d, \"%s\", has type %llu; unused pieces cannot "
              "be reproduced", (int)id, tfmi_plain(text).text, (unsigned long long)type);
  memcpy(&score, &bits, sizeof score);
  tfmi_make_piece(m, text, id, (int32_t)type, score);
  if (type == TFMI_PIECE_UNKNOWN && m->t->unk < 0) m->t->unk = id;
  if (type == TFMI_PIECE_NORMAL || type == TFMI_PIECE_BYTE) return;
  tfmi_make_added(m, text, id, type != TFMI_PIECE_USER);
  m->added[stbds_arrlen(m->added) - 1].normalised = type == TFMI_PIECE_USER;
  m->added[stbds_arrlen(m->added) - 1].verbatim = true;
}

static void tfmi_spm_trainer(tfmi_make *m, tfmi_text bytes, int64_t ids[4]) {
  static const char *const models[] = {"?", "Unigram", "BPE", "words", "characters"};
  tfmi_proto p = tfmi_proto_open(m, bytes);
  tfmi_proto_field f;
  uint64_t model = 1;
  bool fallback = false;
  while (tfmi_proto_next(&p, &f)) {
    if (f.number == 3) model = f.value;
    else if (f.number == 35) fallback = f.value != 0;
    else if (f.number >= 40 && f.number <= 43) ids[f.number - 40] = (int32_t)(uint32_t)f.value;
    else if (f.number == 24 && f.value)
      tfmi_fail(&m->load, TFM_E_UNSUPPORTED, "treat_whitespace_as_suffix cannot be reproduced");
  }
  if (model != 1 && model != 2)
    tfmi_fail(&m->load, TFM_E_UNSUPPORTED, "the SentencePiece model is %s, expected BPE or Unigram",
              model < 5 ? models[model] : "?");
  if (model == 1) tfmi_make_spm_unigram(m, tfmi_text_of(""));
  m->t->byte_fallback = fallback;
}

static void tfmi_spm_normaliser(tfmi_make *m, tfmi_text bytes) {
  tfmi_proto p = tfmi_proto_open(m, bytes);
  tfmi_proto_field f;
  tfm_tokenizer *t = m->t;
  while (tfmi_proto_next(&p, &f)) {
    if (f.number == 2 && f.bytes.n)
      tfmi_add_charsmap(m, tfmi_keep_bytes(m, f.bytes), tfmi_rewrite_longest);
    if (f.number == 3) t->strip = f.value != 0;
    if (f.number == 4) m->blanks.squeeze = f.value != 0;
    if (f.number == 5 && !f.value)
      tfmi_fail(&m->load, TFM_E_UNSUPPORTED, "a model without escape_whitespaces");
  }
  m->blanks.text.n = t->strip ? m->blanks.content.n : 0;
}

static void tfmi_read_spm(tfmi_make *m, tfmi_text file) {
  tfmi_proto p = tfmi_proto_open(m, file);
  tfmi_proto_field f;
  tfm_tokenizer *t = m->t;
  int64_t ids[4] = {0, 1, 2, -1}; /* unk, bos, eos, pad: the format's defaults */
  bool trainer = false;
  tfmi_make_spm(m, true);
  m->blanks.squeeze = true;
  while (tfmi_proto_next(&p, &f)) {
    if (f.number <= 3) tfmi_proto_expect(m, &f, 2);
    if (f.number == 1) tfmi_spm_piece(m, f.bytes);
    else if (f.number == 2) tfmi_spm_trainer(m, f.bytes, ids);
    else if (f.number == 3) tfmi_spm_normaliser(m, f.bytes);
    trainer = trainer || f.number == 2;
  }
  if (!trainer) tfmi_fail(&m->load, TFM_E_FORMAT, "not a SentencePiece model: no trainer_spec");
  if (t->unk < 0) tfmi_fail(&m->load, TFM_E_FORMAT, "the model has no unknown piece");
  m->vocabulary_pieces = (size_t)stbds_arrlen(m->piece);
  tfmi_make_tables(m);
  t->bos = tfmi_known_id(t, ids[1]);
  t->eos = tfmi_known_id(t, ids[2]);
  t->pad = tfmi_known_id(t, ids[3]);
  tfmi_make_before(m, &t->bos, t->bos >= 0); /* as Llama's code does */
}

/* ---- llama2.c tokenizer.bin ----
   int32 longest, then for each id float score, int32 length, bytes; pieces have a plain blank. Ids
   0, 1, 2 are unk, bos, eos, 3 to 258 the bytes, which is how llama2.c falls back on them. */

static void tfmi_check_llama2c(tfmi_make *m) {
  int i;
  for (i = 0; i < 256; i++)
    if (m->t->byte_id[i] != i + 3)
      tfmi_fail(&m->load, TFM_E_FORMAT, "the token of byte 0x%02X has id %d, expected %d", i,
                (int)m->t->byte_id[i], i + 3);
}

static void tfmi_read_llama2c(tfmi_make *m, tfmi_text file) {
  static const char *const names[] = {"<unk>", "<s>", "</s>"};
  const uint8_t *at = (const uint8_t *)file.at + 4, *end = (const uint8_t *)file.at + file.n;
  tfm_tokenizer *t = m->t;
  int32_t expected = m->config ? m->config->vocabulary : 0, id = 0;
  for (; at < end && (!expected || id < expected); id++) {
    tfmi_text text;
    float score = end - at >= 8 ? tfmi_f32(at) : 0;
    uint32_t n = end - at >= 8 ? tfmi_u32(at + 4) : 0;
    if (end - at < 8 || n > (uint32_t)INT32_MAX || n > (size_t)(end - at - 8))
      tfmi_fail(&m->load, TFM_E_FORMAT, "token %d of tokenizer.bin goes beyond the end of the file",
                (int)id);
    text.at = (const char *)at + 8;
    text.n = n;
    at += 8 + n;
    if (id < 3) text = tfmi_text_of(names[id]);
    tfmi_make_piece(m, text, id, id < 3 ? TFMI_PIECE_CONTROL
                                 : id < 259 ? TFMI_PIECE_BYTE : TFMI_PIECE_NORMAL, score);
    if (id < 3) tfmi_make_added(m, text, id, true);
  }
  if (at < end || (expected && id != expected) || id < 259)
    tfmi_fail(&m->load, TFM_E_FORMAT, "tokenizer.bin has %s%d tokens, expected %d%s",
              at < end ? "more than " : "", (int)id, (int)(expected ? expected : 259),
              expected ? "" : " or more");
  tfmi_make_spm(m, true);
  m->blanks.text = m->blanks.content = tfmi_text_of(" ");
  m->says_blanks = false;
  t->unk = 0;
  tfmi_make_tables(m);
  tfmi_check_llama2c(m);
  t->bos = 1;
  t->eos = 2;
  tfmi_make_before(m, &t->bos, 1);
}

/* ---- Finding the file, knowing its kind ---- */

static tfmi_text tfmi_make_file(tfmi_make *m, const char *path) {
  tfmi_file *f = &m->file[m->files];
  tfmi_text text;
  tfmi_file_open(&m->load, path, f);
  m->files++;
  text.at = (const char *)f->data;
  text.n = f->bytes;
  return text;
}

/* Of vocab.json's members all are numbers, of tokenizer.json's the first is a string. */
static bool tfmi_is_vocabulary(tfmi_make *m, tfmi_text file) {
  tfmi_json j;
  tfmi_text key;
  tfmi_json_init(&j, &m->load, "JSON", file.at, file.n);
  tfmi_json_object(&j);
  return tfmi_json_member(&j, &key) && tfmi_json_peek(&j) == TFMI_JSON_NUMBER;
}

/* {"50256": {"content": "<|endoftext|>", "special": true}} */
static void tfmi_beside_added(tfmi_make *m, tfmi_json *j) {
  tfmi_text id;
  tfmi_json_object(j);
  while (tfmi_json_member(j, &id)) {
    ptrdiff_t count = stbds_arrlen(m->added);
    const char *at = id.at, *end = id.at + id.n;
    int64_t number = 0;
    tfmi_json_added_token(m, j);
    while (at < end && *at >= '0' && *at <= '9' && number < TFMI_VOCABULARY_MAX)
      number = 10 * number + (*at++ - '0');
    if (at < end || !id.n)
      tfmi_json_fail(j, TFM_E_FORMAT, "\"%s\" is no id of an added token", tfmi_plain(id).text);
    if (stbds_arrlen(m->added) > count) m->added[count].id = (int32_t)number;
  }
}

static bool tfmi_is_beside_option(tfmi_text key) {
  return tfmi_text_is(key, "add_prefix_space") || tfmi_text_is(key, "add_bos_token") ||
         tfmi_text_is(key, "add_eos_token");
}

/* Its class is the row that is returned; its added tokens are added. */
static const tfmi_beside_row *tfmi_beside_config(tfmi_make *m, tfmi_text file) {
  tfmi_text key, name = tfmi_text_of("GPT2Tokenizer");
  tfmi_json j;
  int i;
  tfmi_json_init(&j, &m->load, "tokenizer_config.json", file.at, file.n);
  tfmi_json_object(&j);
  while (tfmi_json_member(&j, &key)) {
    tfmi_json_kind kind = tfmi_json_peek(&j);
    if (kind == TFMI_JSON_TRUE && tfmi_is_beside_option(key))
      tfmi_json_fail(&j, TFM_E_UNSUPPORTED, "%s is true; use the model's tokenizer.json",
                     tfmi_plain(key).text);
    if (kind == TFMI_JSON_OBJECT && tfmi_text_is(key, "added_tokens_decoder"))
      tfmi_beside_added(m, &j);
    else if (kind == TFMI_JSON_STRING && tfmi_text_is(key, "tokenizer_class"))
      name = tfmi_json_string(&j);
    else tfmi_json_skip(&j);
  }
  for (i = 0; i < TFMI_COUNT(tfmi_besides); i++)
    if (tfmi_text_is(name, tfmi_besides[i].name)) return &tfmi_besides[i];
  tfmi_fail(&m->load, TFM_E_UNSUPPORTED, "tokenizer_config.json names %s, not GPT2Tokenizer or "
            "Qwen2Tokenizer; use the model's tokenizer.json", tfmi_plain(name).text);
}

/* What the two files do not tell, from those that may lie beside them. */
static void tfmi_finish_gpt2(tfmi_make *m, const char *folder) {
  char *config = tfmi_join(&m->load, folder, "tokenizer_config.json");
  const tfmi_beside_row *row = &tfmi_besides[0];
  tfmi_text end = tfmi_text_of("<|endoftext|>");
  ptrdiff_t i;
  if (tfmi_file_exists(&m->load, tfmi_join(&m->load, folder, "added_tokens.json")))
    tfmi_fail(&m->load, TFM_E_UNSUPPORTED, "added_tokens.json lies beside vocab.json, which cannot "
              "be reproduced; use the model's tokenizer.json");
  if (tfmi_file_exists(&m->load, config)) row = tfmi_beside_config(m, tfmi_make_file(m, config));
  for (i = 0; i < stbds_arrlen(m->piece) && !stbds_arrlen(m->added); i++)
    if (tfmi_text_order(m->piece[i].text, end) == 0) tfmi_make_added(m, end, m->piece[i].id, true);
  m->t->kind = "byte-level BPE";
  m->t->from_bytes = m->t->says_letters = true;
  if (row->composes) tfmi_add_form(m, true, false);
  tfmi_cut_by(m, row->split);
  tfmi_json_added_ids(m);
  tfmi_make_tables(m);
}

static void tfmi_read_beside(tfmi_make *m, tfmi_text vocabulary, const char *path) {
  static const char *const names[] = {"merges.txt", "vocab.bpe"};
  char *folder = path ? tfmi_folder_of(&m->load, path) : NULL;
  int i;
  for (i = 0; folder && i < TFMI_COUNT(names); i++) {
    char *merges = tfmi_join(&m->load, folder, names[i]);
    if (!tfmi_file_exists(&m->load, merges)) continue;
    tfmi_read_gpt2(m, vocabulary, tfmi_make_file(m, merges));
    tfmi_finish_gpt2(m, folder);
    return;
  }
  tfmi_fail(&m->load, path ? TFM_E_IO : TFM_E_UNSUPPORTED, "a vocab.json needs its merges.txt "
            "beside it; load it by its path, or use tokenizer.json");
}

static bool tfmi_begins_with(tfmi_text file, const char *magic) {
  size_t n = strlen(magic);
  return file.n >= n && memcmp(file.at, magic, n) == 0;
}

/* Reads the vocabulary in the file; false when this is a model file that has none. */
static bool tfmi_read_file(tfmi_make *m, tfmi_text file, const char *path) {
  const uint8_t *data = (const uint8_t *)file.at;
  uint32_t longest = file.n > 12 ? tfmi_u32(data) : 0;
  size_t at = 0;
  if (tfmi_begins_with(file, "GGUF")) return tfmi_read_gguf(m, file);
  if (tfmi_is_safetensors(data, file.n) || tfmi_is_llama2(data, file.n)) return false;
  while (at < file.n && file.at[at] && strchr(" \t\r\n", file.at[at])) at++;
  if (at < file.n && file.at[at] == '{') {
    if (tfmi_is_vocabulary(m, file)) tfmi_read_beside(m, file, path);
    else tfmi_read_json(m, file);
  } else if (file.n > 2 && file.at[0] == '\n' && file.at[1]) { /* a piece: field 1 with bytes */
    tfmi_read_spm(m, file);
  } else if (tfmi_is_tiktoken(file)) {
    tfmi_read_tiktoken(m, file, path);
  } else if (longest > 0 && longest <= TFMI_PIECE_BYTES_MAX) {
    tfmi_read_llama2c(m, file);
  } else {
    tfmi_fail(&m->load, TFM_E_FORMAT, "%s", tfmi_begins_with(file, "\xef\xbb\xbf")
                  ? "the file begins with a byte order mark, which JSON has not; remove it"
                  : "the file is no vocabulary known here; expected tokenizer.json, "
                    "tokenizer.model, tokenizer.bin, vocab.json or GGUF");
  }
  return true;
}

static void tfmi_read_folder(tfmi_make *m, const char *folder) {
  static const char *const names[] = {"tokenizer.json", "tokenizer.model", "tokenizer.bin",
                                      "tok512.bin", "vocab.json"};
  int i;
  for (i = 0; i < TFMI_COUNT(names); i++) {
    char *path = tfmi_join(&m->load, folder, names[i]);
    if (tfmi_file_exists(&m->load, path) &&
        tfmi_read_file(m, tfmi_make_file(m, path), path)) return;
    tfmi_release(&m->load, path);
  }
  tfmi_fail(&m->load, TFM_E_IO, "no tokenizer there; expected tokenizer.json, tokenizer.model, "
            "tokenizer.bin, tok512.bin, or vocab.json with merges.txt");
}

static void tfmi_read_path(tfmi_make *m) {
  if (tfmi_is_folder(&m->load, m->path)) tfmi_read_folder(m, m->path);
  else if (!tfmi_read_file(m, tfmi_make_file(m, m->path), m->path))
    tfmi_read_folder(m, tfmi_folder_of(&m->load, m->path));
}

static void tfmi_read_memory(tfmi_make *m) {
  tfmi_text file;
  file.at = (const char *)m->data;
  file.n = m->bytes;
  if (!tfmi_read_file(m, file, NULL))
    tfmi_fail(&m->load, TFM_E_UNSUPPORTED, "a model file without a vocabulary; load its "
              "tokenizer's file instead");
}

/* ---- Entry points ---- */

static void tfmi_make_run(tfmi_make *m, void (*read)(tfmi_make *m)) {
  m->t = TFMI_NEW(tfm_tokenizer, tfmi_keep(&m->load, 1, sizeof *m->t));
  m->t->bos = m->t->eos = m->t->unk = m->t->pad = -1;
  read(m);
}

/* The memory that the load kept becomes the tokenizer's. */
static tfm_tokenizer *tfmi_make_finish(tfmi_make *m) {
  tfm_tokenizer *t = m->t;
  t->heap = m->heap;
  t->kept = m->load.kept;
  t->kept.next->prev = t->kept.prev->next = &t->kept;
  return t;
}

static tfm_tokenizer *tfmi_make_tokenizer(tfmi_make *m, const char *object,
                                          const tfm_tokenizer_config *config,
                                          void (*read)(tfmi_make *m)) {
  if (config) m->heap.host = config->host;
  m->config = config;
  tfmi_load_init(&m->load, &m->heap, object);
  m->outer = tfmi_stb_load;
  tfmi_stb_load = &m->load;
  if (setjmp(m->load.fail) == 0) {
    tfmi_make_run(m, read);
    m->done = true;
  }
  tfmi_stb_load = m->outer;
  while (m->files) tfmi_file_close(&m->heap, &m->file[--m->files]);
  if (m->work) tfmi_encoder_free(m->work);
  tfmi_ring_free(&m->heap, &m->load.scratch);
  if (m->done) return tfmi_make_finish(m);
  tfmi_ring_free(&m->heap, &m->load.kept);
  return NULL;
}

TFM_API tfm_tokenizer *tfm_tokenizer_load(const char *path, const tfm_tokenizer_config *config) {
  tfmi_make m;
  memset(&m, 0, sizeof m);
  m.path = path;
  if (!path) {
    tfmi_report(TFM_E_ARG, "tfm_tokenizer_load: path is NULL");
    return NULL;
  }
  return tfmi_make_tokenizer(&m, path, config, tfmi_read_path);
}

TFM_API tfm_tokenizer *tfm_tokenizer_load_memory(const void *data, size_t bytes,
                                                 const tfm_tokenizer_config *config) {
  tfmi_make m;
  memset(&m, 0, sizeof m);
  m.data = data;
  m.bytes = bytes;
  if (!data) {
    tfmi_report(TFM_E_ARG, "tfm_tokenizer_load_memory: data is NULL");
    return NULL;
  }
  return tfmi_make_tokenizer(&m, "tokenizer in memory", config, tfmi_read_memory);
}

TFM_API void tfm_tokenizer_free(tfm_tokenizer *tokenizer) {
  tfmi_heap heap;
  tfmi_block kept;
  if (!tokenizer) return;
  heap = tokenizer->heap; /* both lie in the memory that goes */
  kept = tokenizer->kept;
  kept.next->prev = kept.prev->next = &kept;
  tfmi_ring_free(&heap, &kept);
}
/* =================================================================================================
   >>vocabulary   vocabularies built from text, and written to files
   =================================================================================================

   Texts are cut into pre-tokens and these counted, by several workers: each counts a share of the
   bytes in a table of its own, whose entries point into the texts. Workers take no memory: one
   whose table is full, or whose stretch is done, returns; the caller makes room, tells the progress
   and sends all on. Shares begin between a letter and white space, where every pattern cuts. The
   tables are then joined and sorted by count and bytes: from here on, and in the result, nothing
   depends on the number of workers.

   Byte-level BPE merges the most frequent pair of symbols, again and again. A queue holds pairs by
   count, each with the words that it was found in; when a pair comes up whose count has changed it
   is put back with the right one. So one merge costs what its words do, not a pass over all. Among
   equal counts the pair of lowest ids is first: the merges are those of Hugging Face's BpeTrainer.
   One case is open there: when two pairs spell one token, so that a pair can be queued twice with
   one count, its heap does not tell which of the two is first; here it is the earlier one. */

typedef struct tfmi_word { /* a pre-token of the texts */
  const char *at;
  int64_t count; /* 0: a free slot */
  uint32_t n, hash;
} tfmi_word;

typedef struct tfmi_counter { /* a worker */
  tfmi_word *slot;
  uint64_t mask, used;
  size_t text, at, last, end; /* it is at byte `at` of a text, and stops at `end` of the last one */
  uint64_t counted;           /* bytes */
  bool full, broken;          /* broken: a pre-token of 2^32 bytes, told by the caller */
} tfmi_counter;

typedef struct tfmi_training { /* one call */
  const char *const *texts;
  const size_t *bytes; /* NULL: each text ends with a NUL */
  size_t count;
  uint64_t total;      /* bytes of all texts */
  const tfm_vocabulary_config *config;
  tfmi_heap heap;      /* of the pool */
  tfm_dev dev;         /* has nothing but the pool */
  tfmi_splitter split;
  int32_t size;        /* of the vocabulary */
  int64_t least;       /* occurrences */
  tfmi_counter *counter;
  tfmi_word *word;     /* [words] once they are sorted */
  int32_t words;
} tfmi_training;

enum { TFMI_STRETCH_BYTES = 1 << 21 }; /* that a worker counts before it comes back */

static size_t tfmi_text_bytes(const tfmi_training *r, size_t i) {
  return r->bytes ? r->bytes[i] : strlen(r->texts[i]);
}

static void tfmi_training_goes_on(tfmi_make *m, const char *phase, double done) {
  if (!tfmi_goes_on(&m->heap.host, phase, done))
    tfmi_fail(&m->load, TFM_E_CANCELLED, "cancelled while %s", phase);
}

/* ---- Counting words ---- */

/* The slot of the word, or the free one where it belongs. */
static tfmi_word *tfmi_word_slot_of(const tfmi_counter *c, const char *p, uint32_t n,
                                    uint32_t hash) {
  uint64_t i = hash & c->mask;
  for (;; i = (i + 1) & c->mask) {
    tfmi_word *w = &c->slot[i];
    if (!w->count || (w->hash == hash && w->n == n && memcmp(w->at, p, n) == 0)) return w;
  }
}

/* False when the table is too full to take a new word. */
static bool tfmi_word_count(tfmi_counter *c, const char *p, uint32_t n, uint32_t hash,
                            int64_t times) {
  tfmi_word *w = tfmi_word_slot_of(c, p, n, hash);
  if (!w->count) {
    if (2 * c->used > c->mask) return false;
    c->used++;
    w->at = p;
    w->n = n;
    w->hash = hash;
  }
  w->count += times;
  return true;
}

/* Counts on, until the share, the stretch or the table's room is at its end. */
static void tfmi_counter_run(const tfmi_training *r, tfmi_counter *c) {
  uint64_t stop = c->counted + TFMI_STRETCH_BYTES;
  while (c->text < r->count && c->counted < stop) {
    const char *text = r->texts[c->text];
    size_t end = c->text == c->last ? c->end : tfmi_text_bytes(r, c->text);
    while (c->at < end && c->counted < stop) {
      size_t n = r->split(text + c->at, end - c->at);
      c->broken = n > UINT32_MAX;
      c->full = !c->broken && !tfmi_word_count(c, text + c->at, (uint32_t)n,
                                               tfmi_text_hash(text + c->at, n), 1);
      if (c->broken || c->full) return;
      c->at += n;
      c->counted += n;
    }
    if (c->at < end) return;
    c->text = c->text == c->last ? r->count : c->text + 1;
    c->at = 0;
  }
}

static void tfmi_counters_run(void *context, int32_t begin, int32_t end, int32_t worker) {
  tfmi_training *r = (tfmi_training *)context;
  int32_t i;
  (void)worker;
  for (i = begin; i < end; i++) tfmi_counter_run(r, &r->counter[i]);
}

static void tfmi_counter_grow(tfmi_make *m, tfmi_counter *c) {
  tfmi_counter old = *c;
  uint64_t slots = old.slot ? 2 * (old.mask + 1) : 1 << 14, i;
  c->slot = TFMI_NEW(tfmi_word, tfmi_scratch(&m->load, slots, sizeof *c->slot));
  c->mask = slots - 1;
  c->used = 0;
  c->full = false;
  for (i = 0; old.slot && i <= old.mask; i++) {
    const tfmi_word *w = &old.slot[i];
    if (w->count) tfmi_word_count(c, w->at, w->n, w->hash, w->count);
  }
  tfmi_release(&m->load, old.slot);
}

/* The first place from `at` on where a share can begin: before white space that follows a letter.
   Whatever the pattern, the letter ends its pre-token, and what follows is cut as if it were the
   text's beginning. */
static size_t tfmi_share_begin(const char *p, size_t n, size_t at) {
  for (; at && at < n; at++) {
    unsigned letter = (unsigned)((uint8_t)p[at - 1] | 32) - 'a';
    if (letter < 26 && (p[at] == ' ' || p[at] == '\n')) break;
  }
  return at;
}

/* Cuts the texts into shares of about the same size. */
static void tfmi_counters_start(tfmi_training *r, int32_t workers) {
  uint64_t before = 0; /* bytes of the texts before `text` */
  size_t text = 0;
  int32_t i;
  for (i = 0; i < workers; i++) {
    tfmi_counter *c = &r->counter[i];
    uint64_t from = r->total / (uint64_t)workers * (uint64_t)i;
    while (text + 1 < r->count && before + tfmi_text_bytes(r, text) <= from)
      before += tfmi_text_bytes(r, text++);
    c->text = text;
    c->at = tfmi_share_begin(r->texts[text], tfmi_text_bytes(r, text), (size_t)(from - before));
    if (i) {
      c[-1].last = text;
      c[-1].end = c->at;
    }
  }
  r->counter[workers - 1].last = r->count - 1;
  r->counter[workers - 1].end = tfmi_text_bytes(r, r->count - 1);
}

static int tfmi_word_order(const void *a, const void *b) { /* most frequent first, then by bytes */
  const tfmi_word *v = (const tfmi_word *)a, *w = (const tfmi_word *)b;
  size_t n = v->n < w->n ? v->n : w->n;
  int order;
  if (v->count != w->count) return v->count > w->count ? -1 : 1;
  order = memcmp(v->at, w->at, n);
  return order ? order : v->n < w->n ? -1 : v->n > w->n;
}

/* Joins the workers' tables into the first and makes a sorted list of it. */
static void tfmi_words_join(tfmi_make *m, tfmi_training *r, int32_t workers) {
  tfmi_counter *all = &r->counter[0];
  uint64_t k, n = 0;
  int32_t i;
  for (i = 1; i < workers; i++) {
    tfmi_counter *c = &r->counter[i];
    for (k = 0; k <= c->mask; k++) {
      const tfmi_word *w = &c->slot[k];
      while (w->count && !tfmi_word_count(all, w->at, w->n, w->hash, w->count))
        tfmi_counter_grow(m, all);
    }
    tfmi_release(&m->load, c->slot);
  }
  for (k = 0; k <= all->mask; k++)
    if (all->slot[k].count) all->slot[n++] = all->slot[k];
  if (n > INT32_MAX)
    tfmi_fail(&m->load, TFM_E_UNSUPPORTED, "the texts have %llu different words, expected less "
              "than 2^31", (unsigned long long)n);
  tfmi_sort(all->slot, (size_t)n, sizeof *all->slot, tfmi_word_order);
  r->word = all->slot;
  r->words = (int32_t)n;
}

static void tfmi_count_words(tfmi_make *m, tfmi_training *r) {
  int32_t workers = r->dev.threads, i;
  bool more = true;
  uint64_t counted;
  r->counter = TFMI_NEW(tfmi_counter, tfmi_scratch(&m->load, (uint64_t)workers,
                                                   sizeof *r->counter));
  for (i = 0; i < workers; i++) tfmi_counter_grow(m, &r->counter[i]);
  tfmi_counters_start(r, workers);
  while (more) {
    tfm_parallel_for(&r->dev, workers, 1, tfmi_counters_run, r);
    for (more = false, counted = 0, i = 0; i < workers; i++) {
      if (r->counter[i].broken)
        tfmi_fail(&m->load, TFM_E_ARG, "text %llu cannot be cut within 2^32 bytes",
                  (unsigned long long)r->counter[i].text);
      if (r->counter[i].full) tfmi_counter_grow(m, &r->counter[i]);
      more = more || r->counter[i].text < r->count;
      counted += r->counter[i].counted;
    }
    tfmi_training_goes_on(m, "counting words", (double)counted / (double)r->total);
  }
  tfmi_words_join(m, r, workers);
}

/* ---- Byte-level BPE ---- */

typedef struct tfmi_spelling { /* a token's, in the arena of tfmi_bpe */
  uint32_t at, n;
} tfmi_spelling;

typedef struct tfmi_symbols { /* a word that is being merged */
  size_t at; /* in the list of all symbols */
  int64_t count;
  int32_t n;
} tfmi_symbols;

typedef struct tfmi_pair {
  int32_t left, right;
  int64_t count;
  int32_t *words; /* stb array: where it has come up since it was queued last; ascending */
} tfmi_pair;

typedef struct tfmi_queued {
  int64_t count; /* when it was queued */
  int32_t pair, order;
  int32_t *words;
} tfmi_queued;

typedef struct tfmi_bpe {
  tfmi_make *make;
  char *arena;             /* stb arrays, all but the tables */
  tfmi_spelling *token;    /* by id */
  tfmi_text_table spelled; /* whose arena moves */
  int32_t *symbol;
  tfmi_symbols *word;
  tfmi_pair *pair;
  int32_t *merged;         /* pairs, in order */
  int32_t *touched;        /* pairs to be queued */
  tfmi_queued *queue;      /* a heap */
  int32_t *pair_slot;      /* by ids; -1: free */
  uint64_t pair_mask;
  int32_t queued;          /* so far */
} tfmi_bpe;

/* The id of a spelling, which is a new one when there was none. */
static int32_t tfmi_bpe_token(tfmi_bpe *b, const char *p, size_t n) {
  size_t at = (size_t)stbds_arrlen(b->arena);
  int32_t id = (int32_t)stbds_arrlen(b->token), known;
  tfmi_spelling s;
  if (at + n > UINT32_MAX)
    tfmi_fail(&b->make->load, TFM_E_UNSUPPORTED, "the vocabulary's texts take more than 2^32 bytes;"
              " expected a smaller size");
  stbds_arrsetlen(b->arena, at + n);
  memcpy(b->arena + at, p, n);
  b->spelled.arena = b->arena;
  s.at = (uint32_t)at;
  s.n = (uint32_t)n;
  known = tfmi_text_table_put(b->make, &b->spelled, s.at, s.n, id);
  if (known < 0) stbds_arrput(b->token, s);
  else stbds_arrsetlen(b->arena, at);
  return known < 0 ? id : known;
}

static tfmi_text tfmi_bpe_text(const tfmi_bpe *b, int32_t id) {
  tfmi_text text;
  text.at = b->arena + b->token[id].at;
  text.n = b->token[id].n;
  return text;
}

static int32_t tfmi_bpe_joined(tfmi_bpe *b, int32_t left, int32_t right) {
  tfmi_text l = tfmi_bpe_text(b, left), r = tfmi_bpe_text(b, right);
  char *both = (char *)tfmi_scratch(&b->make->load, l.n + r.n, 1);
  int32_t id = tfmi_bpe_token(b, both, tfmi_append(both, tfmi_append(both, 0, l), r));
  tfmi_release(&b->make->load, both);
  return id;
}

static int32_t *tfmi_pair_slot(tfmi_bpe *b, int32_t left, int32_t right) {
  uint64_t i = tfmi_mix(tfmi_pair_key(left, right)) & b->pair_mask;
  for (;; i = (i + 1) & b->pair_mask) {
    int32_t *slot = &b->pair_slot[i];
    if (*slot < 0 || (b->pair[*slot].left == left && b->pair[*slot].right == right)) return slot;
  }
}

static void tfmi_pairs_grow(tfmi_bpe *b) {
  uint64_t slots = b->pair_slot ? 2 * (b->pair_mask + 1) : 1 << 16;
  ptrdiff_t i;
  tfmi_release(&b->make->load, b->pair_slot);
  b->pair_slot = TFMI_NEW(int32_t, tfmi_scratch(&b->make->load, slots, sizeof *b->pair_slot));
  b->pair_mask = slots - 1;
  memset(b->pair_slot, 0xff, slots * sizeof *b->pair_slot);
  for (i = 0; i < stbds_arrlen(b->pair); i++)
    *tfmi_pair_slot(b, b->pair[i].left, b->pair[i].right) = (int32_t)i;
}

/* The pair has become more or less frequent by one place of a word. */
static void tfmi_pair_count(tfmi_bpe *b, int32_t left, int32_t right, int32_t word, bool more) {
  int64_t count = b->word[word].count;
  int32_t *slot = tfmi_pair_slot(b, left, right);
  tfmi_pair *p;
  if (*slot < 0) {
    tfmi_pair fresh = {left, right, 0, NULL};
    if (2 * (uint64_t)stbds_arrlen(b->pair) > b->pair_mask) {
      tfmi_pairs_grow(b);
      slot = tfmi_pair_slot(b, left, right);
    }
    *slot = (int32_t)stbds_arrlen(b->pair);
    stbds_arrput(b->pair, fresh);
  }
  p = &b->pair[*slot];
  p->count += more ? count : -count;
  if (!more) return;
  if (!p->words) stbds_arrput(b->touched, *slot);
  if (!p->words || stbds_arrlast(p->words) != word) stbds_arrput(p->words, word);
}

static bool tfmi_queued_before(const tfmi_bpe *b, const tfmi_queued *x, const tfmi_queued *y) {
  const tfmi_pair *p = &b->pair[x->pair], *q = &b->pair[y->pair];
  if (x->count != y->count) return x->count > y->count;
  if (p->left != q->left) return p->left < q->left;
  return p->right != q->right ? p->right < q->right : x->order < y->order;
}

static void tfmi_pair_queue(tfmi_bpe *b, tfmi_queued entry) {
  size_t i = (size_t)stbds_arrlen(b->queue);
  stbds_arrput(b->queue, entry);
  for (; i > 0 && tfmi_queued_before(b, &entry, &b->queue[(i - 1) / 2]); i = (i - 1) / 2)
    b->queue[i] = b->queue[(i - 1) / 2];
  b->queue[i] = entry;
}

static tfmi_queued tfmi_pair_unqueue(tfmi_bpe *b) {
  tfmi_queued top = b->queue[0], last = stbds_arrpop(b->queue);
  size_t i = 0, child, n = (size_t)stbds_arrlen(b->queue);
  while ((child = 2 * i + 1) < n) {
    child += child + 1 < n && tfmi_queued_before(b, &b->queue[child + 1], &b->queue[child]);
    if (!tfmi_queued_before(b, &b->queue[child], &last)) break;
    b->queue[i] = b->queue[child];
    i = child;
  }
  if (n) b->queue[i] = last;
  return top;
}

static void tfmi_queue_touched(tfmi_bpe *b) {
  while (stbds_arrlen(b->touched)) {
    tfmi_queued entry;
    tfmi_pair *p;
    entry.pair = stbds_arrpop(b->touched);
    p = &b->pair[entry.pair];
    entry.count = p->count;
    entry.words = p->words;
    entry.order = b->queued++;
    p->words = NULL;
    if (entry.count > 0) tfmi_pair_queue(b, entry);
    else stbds_arrfree(entry.words);
  }
}

/* Merges the pair wherever the word has it. Its own count stays: it is not asked for again. */
static void tfmi_word_merge(tfmi_bpe *b, int32_t word, int32_t left, int32_t right, int32_t into) {
  tfmi_symbols *w = &b->word[word];
  int32_t *s = b->symbol + w->at, n = w->n, from = 0, to = 0;
  while (from < n) {
    if (from + 1 == n || s[from] != left || s[from + 1] != right) {
      s[to++] = s[from++];
      continue;
    }
    if (to) {
      tfmi_pair_count(b, s[to - 1], left, word, false);
      tfmi_pair_count(b, s[to - 1], into, word, true);
    }
    from += 2;
    s[to++] = into;
    if (from < n) {
      tfmi_pair_count(b, right, s[from], word, false);
      tfmi_pair_count(b, into, s[from], word, true);
    }
  }
  w->n = to;
}

/* The words as symbols, and their pairs counted. */
static void tfmi_bpe_words(tfmi_bpe *b, const tfmi_training *r, const int32_t byte_id[256]) {
  int32_t i, k;
  for (i = 0; i < r->words; i++) {
    const tfmi_word *from = &r->word[i];
    tfmi_symbols w;
    uint32_t j;
    w.at = (size_t)stbds_arrlen(b->symbol);
    w.n = (int32_t)from->n;
    w.count = from->count;
    if (from->n > INT32_MAX)
      tfmi_fail(&b->make->load, TFM_E_ARG, "a word of the texts has more than 2^31 bytes");
    stbds_arrput(b->word, w);
    for (j = 0; j < from->n; j++) stbds_arrput(b->symbol, byte_id[(uint8_t)from->at[j]]);
    for (k = 1; k < w.n; k++)
      tfmi_pair_count(b, b->symbol[w.at + (size_t)k - 1], b->symbol[w.at + (size_t)k], i, true);
  }
  tfmi_queue_touched(b);
}

/* The next merge, or false: no pair is frequent enough. */
static bool tfmi_bpe_merge(tfmi_bpe *b, int64_t least) {
  tfmi_queued top;
  tfmi_pair p;
  int32_t into;
  ptrdiff_t i;
  for (;;) {
    if (!stbds_arrlen(b->queue)) return false;
    top = tfmi_pair_unqueue(b);
    p = b->pair[top.pair];
    if (p.count == top.count) break;
    top.count = p.count;
    tfmi_pair_queue(b, top);
  }
  if (p.count < 1 || p.count < least) return false;
  into = tfmi_bpe_joined(b, p.left, p.right);
  stbds_arrput(b->merged, top.pair);
  for (i = 0; i < stbds_arrlen(top.words); i++)
    tfmi_word_merge(b, top.words[i], p.left, p.right, into);
  stbds_arrfree(top.words);
  tfmi_queue_touched(b);
  return true;
}

/* Letters stand for bytes; their ids follow the letters' order. */
static void tfmi_bpe_alphabet(tfmi_bpe *b, int32_t byte_id[256]) {
  uint32_t letter;
  char spelled[4];
  for (letter = 0; letter < 0x144; letter++) {
    int byte = tfmi_byte_of(letter);
    if (byte < 0) continue;
    byte_id[byte] = tfmi_bpe_token(b, spelled, (size_t)(tfmi_put_utf8(spelled, letter) - spelled));
  }
}

static void tfmi_train_bpe(tfmi_make *m, tfmi_training *r) {
  int32_t byte_id[256], i;
  tfmi_merge_text merge;
  tfmi_bpe b;
  memset(&b, 0, sizeof b);
  b.make = m;
  tfmi_text_table_make(m, &b.spelled, (uint64_t)r->size + 256); /* the check below comes later */
  tfmi_pairs_grow(&b);
  for (i = 0; i < (int32_t)stbds_arrlen(m->piece); i++)
    tfmi_bpe_token(&b, m->piece[i].text.at, m->piece[i].text.n);
  tfmi_bpe_alphabet(&b, byte_id);
  if (stbds_arrlen(b.token) > r->size)
    tfmi_fail(&m->load, TFM_E_ARG, "size is %d, expected at least %lld: 256 bytes and the special "
              "tokens", (int)r->size, (long long)stbds_arrlen(b.token));
  tfmi_count_words(m, r);
  tfmi_bpe_words(&b, r, byte_id);
  while ((int32_t)stbds_arrlen(b.token) < r->size && tfmi_bpe_merge(&b, r->least))
    if (stbds_arrlen(b.token) % 64 == 0)
      tfmi_training_goes_on(m, "merging", (double)stbds_arrlen(b.token) / (double)r->size);
  for (i = (int32_t)stbds_arrlen(m->piece); i < (int32_t)stbds_arrlen(b.token); i++)
    tfmi_make_piece(m, tfmi_bpe_text(&b, i), i, TFMI_PIECE_NORMAL, 0);
  for (i = 0; i < (int32_t)stbds_arrlen(b.merged); i++) {
    merge.left = tfmi_bpe_text(&b, b.pair[b.merged[i]].left);
    merge.right = tfmi_bpe_text(&b, b.pair[b.merged[i]].right);
    stbds_arrput(m->merge, merge);
  }
  m->t->kind = "byte-level BPE";
  m->t->from_bytes = m->t->says_letters = true;
  if (r->split) tfmi_cut_by(m, r->split);
}

/* ---- Words, characters ---- */

/* The bytes before the first that is not UTF-8. */
static size_t tfmi_utf8_bytes(const char *p, size_t n) {
  size_t at = 0;
  while (at < n) {
    tfmi_rune c = tfmi_rune_at(p + at, n - at);
    if (c.state != TFMI_RUNE_WHOLE) break;
    at += c.bytes;
  }
  return at;
}

static void tfmi_check_texts(tfmi_make *m, const tfmi_training *r) { /* are UTF-8 */
  size_t i;
  for (i = 0; i < r->count; i++) {
    size_t n = tfmi_text_bytes(r, i), good = tfmi_utf8_bytes(r->texts[i], n);
    if (good < n)
      tfmi_fail(&m->load, TFM_E_ARG, "byte %llu of text %llu is not UTF-8; convert the text",
                (unsigned long long)good, (unsigned long long)i);
  }
}

static bool tfmi_is_special(const tfmi_make *m, tfmi_text text) {
  ptrdiff_t i;
  for (i = 0; i < stbds_arrlen(m->added); i++)
    if (tfmi_text_order(m->added[i].text, text) == 0) return true;
  return false;
}

static void tfmi_train_words(tfmi_make *m, tfmi_training *r) {
  int32_t i, id = (int32_t)stbds_arrlen(m->piece);
  tfmi_check_texts(m, r);
  tfmi_count_words(m, r);
  for (i = 0; i < r->words && id < r->size && r->word[i].count >= r->least; i++) {
    tfmi_text text;
    text.at = r->word[i].at;
    text.n = r->word[i].n;
    if (!tfmi_is_special(m, text)) tfmi_make_piece(m, text, id++, TFMI_PIECE_NORMAL, 0);
  }
  m->t->kind = "words";
  m->t->model = TFMI_WHOLE;
  if (r->split) tfmi_cut_by(m, r->split);
}

typedef struct tfmi_character {
  int64_t count;
  uint32_t code;
} tfmi_character;

static int tfmi_character_order(const void *a, const void *b) { /* most frequent first */
  const tfmi_character *c = (const tfmi_character *)a, *d = (const tfmi_character *)b;
  if (c->count != d->count) return c->count > d->count ? -1 : 1;
  return c->code < d->code ? -1 : c->code > d->code;
}

static int tfmi_code_order(const void *a, const void *b) {
  const tfmi_character *c = (const tfmi_character *)a, *d = (const tfmi_character *)b;
  return c->code < d->code ? -1 : c->code > d->code;
}

static tfmi_character *tfmi_count_characters(tfmi_make *m, const tfmi_training *r) {
  int64_t *count = TFMI_NEW(int64_t, tfmi_scratch(&m->load, TFMI_CODES, sizeof *count));
  tfmi_character *found = NULL, c;
  size_t i, at;
  for (i = 0; i < r->count; i++) {
    size_t n = tfmi_text_bytes(r, i);
    tfmi_rune rune;
    for (at = 0; at < n; at += rune.bytes) {
      rune = tfmi_rune_at(r->texts[i] + at, n - at);
      count[rune.code]++;
    }
    tfmi_training_goes_on(m, "counting characters", (double)(i + 1) / (double)r->count);
  }
  for (c.code = 0; c.code < TFMI_CODES; c.code++) {
    c.count = count[c.code];
    if (c.count >= r->least) stbds_arrput(found, c);
  }
  return found;
}

static void tfmi_train_characters(tfmi_make *m, tfmi_training *r) {
  int32_t id = (int32_t)stbds_arrlen(m->piece);
  ptrdiff_t room = r->size - id, i;
  tfmi_character *c;
  tfmi_check_texts(m, r);
  c = tfmi_count_characters(m, r);
  tfmi_sort(c, (size_t)stbds_arrlen(c), sizeof *c, tfmi_character_order);
  if (stbds_arrlen(c) > room) stbds_arrsetlen(c, (size_t)(room > 0 ? room : 0));
  tfmi_sort(c, (size_t)stbds_arrlen(c), sizeof *c, tfmi_code_order);
  for (i = 0; i < stbds_arrlen(c); i++)
    tfmi_make_character(m, c[i].code, id++, TFMI_PIECE_NORMAL);
  m->t->kind = "characters";
}

/* ---- Training ---- */

static const struct tfmi_vocabulary_row {
  void (*train)(tfmi_make *m, tfmi_training *r);
  int32_t size;
  int64_t least;
} tfmi_vocabularies[] = { /* by tfm_vocabulary, with what 0 means */
  {tfmi_train_bpe, 4096, 2},
  {tfmi_train_words, 32768, 1},
  {tfmi_train_characters, TFMI_VOCABULARY_MAX, 1},
};

static const struct tfmi_named_split { const char *name; tfmi_splitter split; } tfmi_splits[] = {
  {"gpt2", tfmi_split_gpt2}, {"llama3", tfmi_split_llama3}, {"qwen2", tfmi_split_qwen2}};

static tfmi_splitter tfmi_split_named(tfmi_make *m, const char *name) {
  int i;
  for (i = 0; i < TFMI_COUNT(tfmi_splits); i++)
    if (!strcmp(name ? name : "gpt2", tfmi_splits[i].name)) return tfmi_splits[i].split;
  tfmi_fail(&m->load, TFM_E_ARG, "pattern is \"%s\", expected gpt2, llama3 or qwen2", name);
}

static void tfmi_training_special(tfmi_make *m, const tfm_vocabulary_config *c) {
  int32_t i;
  for (i = 0; i < c->special_count; i++) {
    tfmi_text text = c->special && c->special[i] ? tfmi_text_of(c->special[i]) : tfmi_text_of("");
    if (!text.n) tfmi_fail(&m->load, TFM_E_ARG, "special[%d] is NULL or empty", (int)i);
    if (tfmi_utf8_bytes(text.at, text.n) < text.n)
      tfmi_fail(&m->load, TFM_E_ARG, "special[%d] is not UTF-8", (int)i);
    if (tfmi_is_special(m, text))
      tfmi_fail(&m->load, TFM_E_ARG, "special[%d] is \"%s\" again; name it once", (int)i,
                tfmi_plain(text).text);
    tfmi_make_piece(m, text, i, TFMI_PIECE_NORMAL, 0);
    tfmi_make_added(m, text, i, true);
  }
}

/* What TFM_ENCODE_SPECIAL adds. */
static void tfmi_training_template(tfmi_make *m, const tfm_vocabulary_config *c) {
  tfm_tokenizer *t = m->t;
  if ((c->adds_bos && t->bos < 0) || (c->adds_eos && t->eos < 0))
    tfmi_fail(&m->load, TFM_E_ARG, "adds_%s: no special token is named like one; expected %s",
              c->adds_bos && t->bos < 0 ? "bos" : "eos",
              c->adds_bos && t->bos < 0 ? "\"<s>\" or \"<bos>\"" : "\"</s>\" or \"<eos>\"");
  tfmi_make_before(m, &t->bos, c->adds_bos);
  tfmi_make_after(m, &t->eos, c->adds_eos);
}

static void tfmi_training_check(tfmi_make *m, tfmi_training *r) {
  const tfm_vocabulary_config *c = r->config;
  size_t i;
  if ((int)c->kind < 0 || (int)c->kind >= TFMI_COUNT(tfmi_vocabularies))
    tfmi_fail(&m->load, TFM_E_ARG, "kind is %d, expected 0 to %d", (int)c->kind,
              TFMI_COUNT(tfmi_vocabularies) - 1);
  if (c->size < 0 || c->size > TFMI_VOCABULARY_MAX || c->min_frequency < 0 || c->special_count < 0)
    tfmi_fail(&m->load, TFM_E_ARG, "size is %d, min_frequency %lld, special_count %d; expected 0 to"
              " %d, and no negative number", (int)c->size, (long long)c->min_frequency,
              (int)c->special_count, TFMI_VOCABULARY_MAX);
  for (i = 0; i < r->count; i++) {
    if (!r->texts[i])
      tfmi_fail(&m->load, TFM_E_ARG, "text %llu is NULL", (unsigned long long)i);
    r->total += tfmi_text_bytes(r, i);
  }
  if (!r->total) tfmi_fail(&m->load, TFM_E_ARG, "the texts are empty");
}

static void tfmi_read_texts(tfmi_make *m) {
  tfmi_training *r = (tfmi_training *)(uintptr_t)m->data;
  const struct tfmi_vocabulary_row *row;
  static const char *const unk[] = {"<unk>", "[UNK]"};
  tfmi_training_check(m, r);
  row = &tfmi_vocabularies[r->config->kind];
  r->size = r->config->size ? r->config->size : row->size;
  if (r->size < r->config->special_count)
    tfmi_fail(&m->load, TFM_E_ARG, "size is %d, expected at least %d: the special tokens",
              (int)r->size, (int)r->config->special_count);
  r->least = r->config->min_frequency ? r->config->min_frequency : row->least;
  r->split = tfmi_split_named(m, r->config->pattern);
  if (tfmi_pool_open(&r->dev, &r->heap, r->config->threads) != TFM_OK) tfmi_fail_again(&m->load);
  tfmi_training_special(m, r->config);
  row->train(m, r);
  m->vocabulary_pieces = (size_t)stbds_arrlen(m->piece);
  if (!m->t->from_bytes) m->t->unk = tfmi_guess_id(m, unk, TFMI_COUNT(unk));
  m->t->strict = !m->t->from_bytes && m->t->unk < 0;
  tfmi_make_tables(m);
  tfmi_training_template(m, r->config);
}

TFM_API tfm_tokenizer *tfm_tokenizer_train(const char *const *texts, const size_t *bytes,
                                           size_t count, const tfm_vocabulary_config *config) {
  tfm_vocabulary_config none;
  tfm_tokenizer_config c;
  tfmi_training r;
  tfmi_make m;
  tfm_tokenizer *t;
  if (!texts || !count) {
    tfmi_report(TFM_E_ARG, "tfm_tokenizer_train: there are no texts");
    return NULL;
  }
  memset(&none, 0, sizeof none);
  memset(&c, 0, sizeof c);
  memset(&r, 0, sizeof r);
  memset(&m, 0, sizeof m);
  r.config = config ? config : &none;
  r.heap.host = c.host = r.config->host;
  r.dev.host = &r.heap.host;
  r.texts = texts;
  r.bytes = bytes;
  r.count = count;
  m.data = &r;
  t = tfmi_make_tokenizer(&m, "tfm_tokenizer_train", &c, tfmi_read_texts);
  tfmi_pool_close(&r.dev, &r.heap);
  return t;
}

/* ---- Saving: Hugging Face's tokenizer.json ----
   Of vocabularies that are tables of merges, or of whole words, as they are there too. Those of
   scored pieces are not: their ranks are equal where their scores are. */

typedef struct tfmi_saved {
  tfmi_merge merge;
  uint32_t left_n, right_n; /* bytes */
} tfmi_saved;

typedef struct tfmi_saving {
  const tfm_tokenizer *t;
  tfmi_saved *merge; /* [merges] in their order */
  uint64_t merges;
} tfmi_saving;

static void tfmi_save_string(tfmi_out *o, const char *p, size_t n) {
  size_t i;
  tfmi_out_bytes(o, "\"", 1);
  for (i = 0; i < n; i++)
    if ((uint8_t)p[i] < 0x20 || p[i] == '"' || p[i] == '\\')
      tfmi_out_text(o, "\\u%04x", (unsigned)(uint8_t)p[i]);
    else tfmi_out_bytes(o, p + i, 1);
  tfmi_out_bytes(o, "\"", 1);
}

static void tfmi_save_token(const tfm_tokenizer *t, tfmi_out *o, int32_t id) {
  tfmi_save_string(o, t->arena + t->token[id].at, t->token[id].n);
}

static const char *tfmi_save_bool(bool value) { return value ? "true" : "false"; }

/* The added token of this id and the set it is in, or NULL. */
static const tfmi_added *tfmi_added_of(const tfm_tokenizer *t, int32_t id, int *set) {
  int32_t i;
  for (*set = 0; *set < 2; ++*set)
    for (i = 0; i < t->added[*set].count; i++)
      if (t->added[*set].token[i].id == id) return &t->added[*set].token[i];
  return NULL;
}

static void tfmi_save_added(const tfm_tokenizer *t, tfmi_out *o) {
  int32_t id, count = 0;
  int set;
  tfmi_out_text(o, ",\n  \"added_tokens\": [");
  for (id = 0; id < t->vocabulary; id++) { /* the order of ids is asked for */
    const tfmi_added *a = tfmi_added_of(t, id, &set);
    if (!a) continue;
    tfmi_out_text(o, "%s\n    {\"id\": %d, \"content\": ", count++ ? "," : "", (int)id);
    tfmi_save_token(t, o, id);
    tfmi_out_text(o, ", \"single_word\": %s, \"lstrip\": %s, \"rstrip\": %s, "
                  "\"normalized\": %s, \"special\": %s}", tfmi_save_bool(a->word),
                  tfmi_save_bool(a->left_blanks),
                  tfmi_save_bool(a->right_blanks), tfmi_save_bool(set == 1),
                  tfmi_save_bool(a->special));
  }
  tfmi_out_text(o, "]");
}

/* Whether a blank is put before the text that the cuts see. */
static bool tfmi_save_prefix(const tfm_tokenizer *t) {
  return t->cuts && t->cut[0].rewrite == tfmi_rewrite_lead && !t->cut[0].content.n;
}

/* What goes into the file for a step that rewrites; false: there is no word for it. o NULL: only
   told. SentencePiece's blanks are two normalizers there. */
static bool tfmi_save_rewrite(const tfmi_step *s, tfmi_out *o) {
  bool form = s->rewrite == tfmi_rewrite_form;
  bool blanks = s->rewrite == tfmi_rewrite_blanks && !s->squeeze;
  bool prepends = s->rewrite == tfmi_rewrite_prepend || (blanks && s->text.n);
  bool replaces = blanks || (s->rewrite == tfmi_rewrite_replace && s->find == tfmi_find_text);
  tfmi_text from = blanks ? tfmi_text_of(" ") : s->text;
  if (!o) return form || prepends || replaces;
  if (form)
    tfmi_out_text(o, "{\"type\": \"NF%s%s\"}", s->compat ? "K" : "", s->composes ? "C" : "D");
  if (prepends) {
    tfmi_out_text(o, "{\"type\": \"Prepend\", \"prepend\": ");
    tfmi_save_string(o, s->text.at, s->text.n);
    tfmi_out_text(o, replaces ? "}, " : "}");
  }
  if (replaces) {
    tfmi_out_text(o, "{\"type\": \"Replace\", \"pattern\": {\"String\": ");
    tfmi_save_string(o, from.at, from.n);
    tfmi_out_text(o, "}, \"content\": ");
    tfmi_save_string(o, s->content.at, s->content.n);
    tfmi_out_text(o, "}");
  }
  return true;
}

/* Likewise for a step that cuts. */
static bool tfmi_save_cut(const tfmi_step *s, tfmi_out *o) {
  bool digits = s->find == tfmi_find_character && s->set && tfmi_charset_at(s->set, '1') &&
                tfmi_charset_at(s->set, 0xbd) && !tfmi_charset_at(s->set, 'a');
  tfmi_text pattern = {NULL, 0};
  int i;
  for (i = 0; i < TFMI_COUNT(tfmi_patterns) && s->find == tfmi_find_split; i++)
    if (s->split == tfmi_patterns[i].split) pattern = tfmi_text_of(tfmi_patterns[i].pattern);
  if (s->find == tfmi_find_regex) pattern = s->text;
  if (!o) return (pattern.n || digits) && !s->rewrite && s->behavior == TFMI_ISOLATED && !s->invert;
  if (digits) {
    tfmi_out_text(o, "{\"type\": \"Digits\", \"individual_digits\": true}");
  } else {
    tfmi_out_text(o, "{\"type\": \"Split\", \"pattern\": {\"Regex\": ");
    tfmi_save_string(o, pattern.at, pattern.n);
    tfmi_out_text(o, "}, \"behavior\": \"Isolated\", \"invert\": false}");
  }
  return true;
}

/* Whether the last cut is what ByteLevel does by itself. */
static bool tfmi_save_own(const tfm_tokenizer *t) {
  const tfmi_step *last = t->cuts ? &t->cut[t->cuts - 1] : NULL;
  return t->from_bytes && last && last->find == tfmi_find_split && last->split == tfmi_split_gpt2;
}

static void tfmi_save_sequence(tfmi_out *o, const char *key, const char *inner, int32_t count) {
  tfmi_out_text(o, ",\n  \"%s\": ", key);
  if (count == 0) tfmi_out_text(o, "null");
  if (count > 1) tfmi_out_text(o, "{\"type\": \"Sequence\", \"%s\": [", inner);
}

/* Normalizer, pre-tokenizer and decoder. */
static void tfmi_save_steps(const tfm_tokenizer *t, tfmi_out *o) {
  int32_t first = tfmi_save_prefix(t), end = t->cuts - tfmi_save_own(t), i;
  int32_t count = end - first + t->from_bytes;
  tfmi_save_sequence(o, "normalizer", "normalizers", t->rewrites ? 2 : 0);
  for (i = 0; i < t->rewrites; i++) {
    tfmi_out_text(o, i ? ", " : "");
    tfmi_save_rewrite(&t->rewrite[i], o);
  }
  tfmi_out_text(o, t->rewrites ? "]}" : "");
  tfmi_save_sequence(o, "pre_tokenizer", "pretokenizers", count);
  for (i = first; i < end; i++) {
    tfmi_out_text(o, i > first ? ", " : "");
    tfmi_save_cut(&t->cut[i], o);
  }
  if (t->from_bytes)
    tfmi_out_text(o, "%s{\"type\": \"ByteLevel\", \"add_prefix_space\": %s, "
                  "\"trim_offsets\": false, \"use_regex\": %s}", end > first ? ", " : "",
                  tfmi_save_bool(first),
                  tfmi_save_bool(tfmi_save_own(t)));
  tfmi_out_text(o, count > 1 ? "]}" : "");
  if (t->from_bytes)
    tfmi_out_text(o, ",\n  \"decoder\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false, "
                  "\"trim_offsets\": false, \"use_regex\": false}");
  else if (t->byte_fallback)
    tfmi_out_text(o, ",\n  \"decoder\": {\"type\": \"Sequence\", \"decoders\": [{\"type\": "
                  "\"Replace\", \"pattern\": {\"String\": \"%s\"}, \"content\": \" \"}, "
                  "{\"type\": \"ByteFallback\"}, {\"type\": \"Fuse\"}%s]}", tfmi_low_line, t->strip
                  ? ", {\"type\": \"Strip\", \"content\": \" \", \"start\": 1, \"stop\": 0}" : "");
  else tfmi_out_text(o, ",\n  \"decoder\": {\"type\": \"Fuse\"}");
}

/* One token of the template, with what separates it from its neighbours. */
static void tfmi_save_template_token(const tfm_tokenizer *t, tfmi_out *o, const char *before,
                                     int32_t id, const char *behind) {
  tfmi_out_text(o, "%s{\"SpecialToken\": {\"id\": ", before);
  tfmi_save_token(t, o, id);
  tfmi_out_text(o, ", \"type_id\": 0}}%s", behind);
}

static void tfmi_save_template(const tfm_tokenizer *t, tfmi_out *o) {
  int32_t i, k, count = t->before_count + t->after_count;
  tfmi_out_text(o, ",\n  \"post_processor\": ");
  if (!count) {
    tfmi_out_text(o, "null");
    return;
  }
  tfmi_out_text(o, "{\"type\": \"TemplateProcessing\", \"single\": [");
  for (i = 0; i < t->before_count; i++) tfmi_save_template_token(t, o, "", t->before[i], ", ");
  tfmi_out_text(o, "{\"Sequence\": {\"id\": \"A\", \"type_id\": 0}}");
  for (i = 0; i < t->after_count; i++) tfmi_save_template_token(t, o, ", ", t->after[i], "");
  tfmi_out_text(o, "], \"pair\": [{\"Sequence\": {\"id\": \"A\", \"type_id\": 0}}, "
                "{\"Sequence\": {\"id\": \"B\", \"type_id\": 1}}], \"special_tokens\": {");
  for (i = 0; i < count; i++) {
    int32_t id = i < t->before_count ? t->before[i] : t->after[i - t->before_count];
    for (k = 0; k < i; k++) /* once each */
      if ((k < t->before_count ? t->before[k] : t->after[k - t->before_count]) == id) break;
    if (k < i) continue;
    tfmi_out_text(o, i ? ", " : "");
    tfmi_save_token(t, o, id);
    tfmi_out_text(o, ": {\"id\": ");
    tfmi_save_token(t, o, id);
    tfmi_out_text(o, ", \"ids\": [%d], \"tokens\": [", (int)id);
    tfmi_save_token(t, o, id);
    tfmi_out_text(o, "]}");
  }
  tfmi_out_text(o, "}}");
}

static void tfmi_save_model(const tfmi_saving *s, tfmi_out *o) {
  const tfm_tokenizer *t = s->t;
  int32_t id, last, count = 0;
  uint64_t i;
  tfmi_out_text(o, ",\n  \"model\": {\n    \"type\": \"%s\"",
                t->model == TFMI_WHOLE ? "WordLevel" : "BPE");
  if (t->unk >= 0 || t->model == TFMI_WHOLE) {
    tfmi_out_text(o, ",\n    \"unk_token\": ");
    if (t->unk >= 0) tfmi_save_token(t, o, t->unk);
    else tfmi_out_text(o, "\"\""); /* the reference wants one, and fails where it is missing */
  }
  if (t->model != TFMI_WHOLE)
    tfmi_out_text(o, ",\n    \"dropout\": null,\n    \"fuse_unk\": %s,\n    \"byte_fallback\": "
                  "%s,\n    \"ignore_merges\": %s", tfmi_save_bool(t->fuse_unk),
                  tfmi_save_bool(t->byte_fallback), tfmi_save_bool(t->whole.slot != NULL));
  tfmi_out_text(o, ",\n    \"vocab\": {");
  for (last = t->vocabulary; last > 0 && t->token[last - 1].added;) last--;
  for (id = 0; id < last; id++) { /* added tokens behind the others get their ids from the order */
    if (t->token[id].speech == TFMI_SPEECH_NONE && !t->token[id].added) continue;
    tfmi_out_text(o, "%s\n      ", count++ ? "," : "");
    tfmi_save_token(t, o, id);
    tfmi_out_text(o, ": %d", (int)id);
  }
  tfmi_out_text(o, "\n    }");
  if (t->model != TFMI_WHOLE) tfmi_out_text(o, ",\n    \"merges\": [");
  for (i = 0; i < s->merges; i++) {
    tfmi_out_text(o, "%s\n      [", i ? "," : "");
    tfmi_save_token(t, o, s->merge[i].merge.left);
    tfmi_out_text(o, ", ");
    tfmi_save_token(t, o, s->merge[i].merge.right);
    tfmi_out_text(o, "]");
  }
  tfmi_out_text(o, "%s\n  }\n}\n", t->model == TFMI_WHOLE ? "" : "]");
}

static void tfmi_save_json(void *context, tfmi_out *o) {
  const tfmi_saving *s = (const tfmi_saving *)context;
  tfmi_out_text(o, "{\n  \"version\": \"1.0\",\n  \"truncation\": null,\n  \"padding\": null");
  tfmi_save_added(s->t, o);
  tfmi_save_steps(s->t, o);
  tfmi_save_template(s->t, o);
  tfmi_save_model(s, o);
}

/* U+2581 in the vocabulary is a blank in texts. */
static bool tfmi_says_blanks(const tfm_tokenizer *t) {
  int32_t id = tfmi_text_find(&t->spelled, tfmi_low_line, strlen(tfmi_low_line));
  return id >= 0 && t->token[id].said_n == 1 && t->arena[t->token[id].said_at] == ' ';
}

static bool tfmi_can_save(const tfm_tokenizer *t) {
  bool says = t->from_bytes || t->byte_fallback ||
              !(t->says_letters || t->says_gaps || t->blank.n || t->strip);
  bool blanks = t->from_bytes || !t->byte_fallback || tfmi_says_blanks(t);
  int32_t first = tfmi_save_prefix(t), end = t->cuts - tfmi_save_own(t), i;
  for (i = 0; i < t->rewrites; i++)
    if (!tfmi_save_rewrite(&t->rewrite[i], NULL)) return false;
  for (i = first; i < end; i++)
    if (!tfmi_save_cut(&t->cut[i], NULL)) return false;
  if (first && t->from_bytes && end > first) return false; /* the blank would come too late */
  return says && blanks && !t->drops_first &&
         (t->from_bytes || t->model == TFMI_WHOLE ||
          (t->model == TFMI_MERGES && (t->byte_fallback || t->merges.ranks == 0)));
}

/* Of equal ones those of the longest parts come first. */
static int tfmi_saved_order(const void *a, const void *b) {
  const tfmi_saved *x = (const tfmi_saved *)a, *y = (const tfmi_saved *)b;
  if (x->merge.rank != y->merge.rank) return x->merge.rank < y->merge.rank ? -1 : 1;
  if (x->left_n != y->left_n) return x->left_n > y->left_n ? -1 : 1;
  return x->right_n > y->right_n ? -1 : x->right_n < y->right_n;
}

/* Whether two pieces are one character again and again: which of these is longer grows first. */
static bool tfmi_are_runs(const tfm_tokenizer *t, int32_t a, int32_t b) {
  const char *p = t->arena + t->token[a].at, *q = t->arena + t->token[b].at;
  size_t n = t->token[a].n, m = t->token[b].n, unit = tfmi_rune_at(p, n).bytes;
  return m >= unit && !memcmp(p, q, unit) && !memcmp(p, p + unit, n - unit) &&
         !memcmp(q, q + unit, m - unit);
}

/* The merges in order. False when a file cannot say it: several pieces are equally good, so that
   the place decides, or a symbol of some has no id. */
static bool tfmi_save_merges(tfmi_saving *s) {
  const tfm_tokenizer *t = s->t;
  uint64_t i;
  for (i = 0; t->merges.slot && i <= t->merges.mask; i++) {
    const tfmi_merge *m = &t->merges.slot[i];
    if (m->into < 0) continue;
    if (m->left >= t->vocabulary || m->right >= t->vocabulary || m->into >= t->vocabulary)
      return false;
    s->merge[s->merges].merge = *m;
    s->merge[s->merges].left_n = t->token[m->left].n;
    s->merge[s->merges++].right_n = t->token[m->right].n;
  }
  tfmi_sort(s->merge, (size_t)s->merges, sizeof *s->merge, tfmi_saved_order);
  for (i = 1; i < s->merges; i++) {
    const tfmi_merge *m = &s->merge[i].merge, *before = &s->merge[i - 1].merge;
    if (m->rank == before->rank && m->into != before->into &&
        !tfmi_are_runs(t, before->into, m->into))
      return false;
  }
  return true;
}

TFM_API tfm_status tfm_tokenizer_save(const tfm_tokenizer *tokenizer, const char *path) {
  const tfm_tokenizer *t = tokenizer;
  tfmi_saving s;
  tfmi_heap heap;
  tfm_status status = TFM_E_UNSUPPORTED;
  size_t bytes;
  if (!t) return tfmi_null_object("tfm_tokenizer_save");
  if (!path) return tfmi_report(TFM_E_ARG, "tfm_tokenizer_save: path is NULL");
  memset(&s, 0, sizeof s);
  s.t = t;
  heap = t->heap;
  bytes = ((size_t)t->merges.mask + 1) * sizeof *s.merge;
  s.merge = TFMI_NEW(tfmi_saved, tfmi_heap_get(&heap, bytes));
  if (!s.merge) return TFM_E_MEMORY;
  if (tfmi_can_save(t) && tfmi_save_merges(&s)) status = tfmi_out_file(path, tfmi_save_json, &s);
  else tfmi_report(status, "tfm_tokenizer_save: this %s vocabulary cannot be written as "
                   "tokenizer.json; copy its own file", t->kind);
  tfmi_heap_put(&heap, s.merge, bytes);
  return status;
}

/* ---- Many texts ---- */

typedef struct tfmi_encodings {
  const tfm_tokenizer *t;
  tfm_encoding *item;
  size_t count, next; /* atomic: the first that nobody has taken */
  unsigned flags;
} tfmi_encodings;

static void tfmi_encodings_run(void *context, int32_t begin, int32_t end, int32_t worker) {
  tfmi_encodings *b = (tfmi_encodings *)context;
  const volatile int32_t *cancel = b->t->heap.host.cancel;
  (void)begin, (void)end, (void)worker; /* whoever is free takes the next text */
  for (;;) {
    size_t i = __atomic_fetch_add(&b->next, 1, __ATOMIC_RELAXED);
    tfm_encoding *e;
    if (i >= b->count) return;
    e = &b->item[i];
    e->count = cancel && *cancel ? (int64_t)TFM_E_CANCELLED
                                 : tfm_encode(b->t, e->text, e->bytes, b->flags, e->ids, e->cap);
  }
}

TFM_API tfm_status tfm_encode_batch(const tfm_tokenizer *tokenizer, tfm_encoding *batch, size_t n,
                                    unsigned flags, int32_t threads) {
  tfmi_encodings b = {tokenizer, batch, n, 0, flags};
  tfmi_heap heap;
  tfm_status status;
  tfm_dev dev;
  size_t i;
  if (!tokenizer) return tfmi_null_object("tfm_encode_batch");
  if (n && !batch) return tfmi_report(TFM_E_ARG, "tfm_encode_batch: batch is NULL, n is not 0");
  heap = tokenizer->heap;
  memset(&dev, 0, sizeof dev);
  dev.host = &heap.host;
  if (threads == 0) threads = tfmi_cores();
  if (threads > 0 && (uint64_t)threads > n) threads = n ? (int32_t)n : 1;
  status = tfmi_pool_open(&dev, &heap, threads);
  if (status != TFM_OK) return status;
  tfm_parallel_for(&dev, dev.threads, 1, tfmi_encodings_run, &b);
  tfmi_pool_close(&dev, &heap);
  for (i = 0; i < n && batch[i].count >= 0; i++) continue;
  if (i == n) return TFM_OK;
  if (batch[i].count == TFM_E_CANCELLED)
    return tfmi_report(TFM_E_CANCELLED, "tfm_encode_batch: cancelled at text %llu",
                       (unsigned long long)i);
  /* the sentence was another thread's, and may not come again: memory comes and goes */
  if (tfm_encode(tokenizer, batch[i].text, batch[i].bytes, flags, NULL, 0) >= 0)
    tfmi_report((tfm_status)batch[i].count, "tfm_encode_batch: text %llu failed with %s",
                (unsigned long long)i, tfm_status_name((int)batch[i].count));
  return (tfm_status)batch[i].count;
}

/* =================================================================================================
   >>chat   conversations as the families' models were trained to read them
   =================================================================================================

   A template is a row: what stands before and behind each kind of message, where a system message
   goes, what ends an answer. A conversation is written as one text, as its model's own template (a
   program in a language of its own, Jinja) would write it; but each stretch of it is remembered as
   ours or as a message's. Then it is encoded in one go, so that the ids are those of the reference,
   except that special tokens are recognised in our stretches only, and never across the edge of
   one. Whatever a message says, it cannot end its turn or open another.

   A model's template is known by its length and hash, from a list of published ones that have been
   compared with these rows. Any other is refused: a guess would work badly without anybody seeing
   it. Naming a row is the way past that. */

typedef enum tfmi_system_place { /* of a system message */
  TFMI_SYSTEM_TURN,  /* a turn of its own */
  TFMI_SYSTEM_FIRST, /* in the first message of the user */
  TFMI_SYSTEM_LAST,  /* in the last one */
  TFMI_SYSTEM_NONE   /* there is no place for it */
} tfmi_system_place;

typedef struct tfmi_chat_row {
  const char *name;
  const char *start;        /* before everything */
  const char *around[3][2]; /* before and behind a message, by tfm_role */
  const char *prompt;       /* what an answer begins with */
  const char *finish;       /* instead of that, where none is wanted */
  const char *system;       /* where the conversation has none; NULL: nothing */
  tfmi_system_place place;
  int trims;                /* white space around messages of these roles goes: bits */
  bool alternates;          /* user and assistant must take turns, the user first */
  bool drops;               /* an empty system message goes */
  const char *needs[4];     /* special tokens that must be known */
  const char *ends[3];      /* of which any ends an answer */
} tfmi_chat_row;

enum { /* sets of roles */
  TFMI_TRIMS_ASSISTANT = 1 << TFM_ASSISTANT,
  TFMI_TRIMS_TALK = TFMI_TRIMS_ASSISTANT | 1 << TFM_USER,
  TFMI_TRIMS_ALL = TFMI_TRIMS_TALK | 1 << TFM_SYSTEM
};

#define TFMI_CHATML(system)                                                                     \
  "", {{"<|im_start|>system\n", "<|im_end|>\n"}, {"<|im_start|>user\n", "<|im_end|>\n"},        \
       {"<|im_start|>assistant\n", "<|im_end|>\n"}},                                            \
  "<|im_start|>assistant\n", "", system, TFMI_SYSTEM_TURN, 0, false, false,                     \
  {"<|im_start|>", "<|im_end|>"}, {"<|im_end|>", "<|endoftext|>"}
#define TFMI_LLAMA3_HEAD(role) "<|start_header_id|>" role "<|end_header_id|>\n\n"
#define TFMI_LLAMA3(note, system)                                                               \
  "<|begin_of_text|>", {{TFMI_LLAMA3_HEAD("system") note, "<|eot_id|>"},                        \
                        {TFMI_LLAMA3_HEAD("user"), "<|eot_id|>"},                               \
                        {TFMI_LLAMA3_HEAD("assistant"), "<|eot_id|>"}},                         \
  TFMI_LLAMA3_HEAD("assistant"), "", system, TFMI_SYSTEM_TURN, TFMI_TRIMS_ALL, false, false,    \
  {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"},              \
  {"<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"}
#define TFMI_GEMMA(place, trims)                                                                \
  "<bos>", {{"", "\n\n"}, {"<start_of_turn>user\n", "<end_of_turn>\n"},                         \
            {"<start_of_turn>model\n", "<end_of_turn>\n"}},                                     \
  "<start_of_turn>model\n", "", NULL, place, trims, true, false,                                \
  {"<bos>", "<start_of_turn>", "<end_of_turn>"}, {"<end_of_turn>", "<eos>"}
#define TFMI_PHI3(drops)                                                                        \
  "", {{"<|system|>\n", "<|end|>\n"}, {"<|user|>\n", "<|end|>\n"},                              \
       {"<|assistant|>\n", "<|end|>\n"}},                                                       \
  "<|assistant|>\n", "<|endoftext|>", NULL, TFMI_SYSTEM_TURN, 0, false, drops,                  \
  {"<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"}, {"<|end|>", "<|endoftext|>"}

static const tfmi_chat_row tfmi_chats[] = {
  {"none", "", {{"", ""}, {"", ""}, {"", ""}},
   "", "", NULL, TFMI_SYSTEM_TURN, 0, false, false, {NULL}, {NULL}},
  {"chatml", TFMI_CHATML(NULL)},
  {"qwen2", TFMI_CHATML("You are a helpful assistant.")},
  {"qwen2.5", TFMI_CHATML("You are Qwen, created by Alibaba Cloud. You are a helpful assistant.")},
  {"llama2", "",
   {{"<<SYS>>\n", "\n<</SYS>>\n\n"}, {"<s>[INST] ", " [/INST]"}, {" ", " </s>"}},
   "", "", NULL, TFMI_SYSTEM_FIRST, TFMI_TRIMS_TALK, true, false, {"<s>", "</s>"}, {"</s>"}},
  {"llama3", TFMI_LLAMA3("", NULL)},
  {"llama3.1", TFMI_LLAMA3("Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n",
                           "")},
  {"mistral-v1", "<s>", {{"", ""}, {"[INST] ", " [/INST]"}, {"", "</s>"}},
   "", "", NULL, TFMI_SYSTEM_NONE, 0, true, false, {"<s>", "</s>"}, {"</s>"}},
  {"mistral-v3", "<s>", {{"", "\n\n"}, {"[INST] ", "[/INST]"}, {" ", "</s>"}},
   "", "", NULL, TFMI_SYSTEM_LAST, TFMI_TRIMS_ASSISTANT, true, false,
   {"<s>", "</s>", "[INST]", "[/INST]"}, {"</s>"}},
  {"mistral-v3-tekken", "<s>", {{"", "\n\n"}, {"[INST]", "[/INST]"}, {"", "</s>"}},
   "", "", NULL, TFMI_SYSTEM_LAST, 0, true, false, {"<s>", "</s>", "[INST]", "[/INST]"}, {"</s>"}},
  {"mistral-v7", "<s>",
   {{"[SYSTEM_PROMPT] ", "[/SYSTEM_PROMPT]"}, {"[INST] ", "[/INST]"}, {" ", "</s>"}},
   "", "", NULL, TFMI_SYSTEM_TURN, 0, true, false,
   {"[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]"}, {"</s>"}},
  {"gemma", TFMI_GEMMA(TFMI_SYSTEM_NONE, TFMI_TRIMS_ALL)},
  {"gemma3", TFMI_GEMMA(TFMI_SYSTEM_FIRST, TFMI_TRIMS_TALK)},
  {"phi3", TFMI_PHI3(false)},
  {"phi3.5", TFMI_PHI3(true)},
  {"phi3-first", "<s>", {{"", ""}, {"<|user|>\n", "<|end|>\n<|assistant|>\n"}, {"", "<|end|>\n"}},
   "", "", NULL, TFMI_SYSTEM_NONE, 0, false, false,
   {"<s>", "<|user|>", "<|assistant|>", "<|end|>"}, {"<|end|>", "<|endoftext|>"}},
};

#undef TFMI_CHATML
#undef TFMI_LLAMA3
#undef TFMI_LLAMA3_HEAD
#undef TFMI_GEMMA
#undef TFMI_PHI3

/* ---- Which template ---- */

static const struct tfmi_chat_known { /* published templates, told apart by bytes and hash */
  uint32_t bytes;
  uint64_t hash;
  const char *name;
} tfmi_chat_known[] = { /* from tests/make_chat_goldens.py */
  {196, UINT64_C(0x88bf4138d5c826f0), "chatml"},
  {199, UINT64_C(0xa41d6bae9b9141bc), "chatml"},
  {328, UINT64_C(0x8a87094e0e1e24c5), "qwen2"},
  {333, UINT64_C(0x75e88977b2787cd7), "qwen2"},
  {815, UINT64_C(0xf344eecf1bd3a427), "llama2"},
  {811, UINT64_C(0x4d1512049817743d), "llama2"},
  {389, UINT64_C(0x0e60067a5537498e), "llama3"},
  {393, UINT64_C(0x32844fd43eab01d2), "llama3"},
  {470, UINT64_C(0x8c734b90b4f8d84d), "mistral-v1"},
  {591, UINT64_C(0x5c10ee65212d93b3), "gemma"},
  {594, UINT64_C(0x70f3cded3fb90051), "gemma"},
  {407, UINT64_C(0xecebdb26677c663d), "phi3"},
  {414, UINT64_C(0xb57fd8a13386ab5f), "phi3"},
  {430, UINT64_C(0xcf278cde387a54c8), "phi3.5"},
  {437, UINT64_C(0x95fa28927d49ef90), "phi3.5"},
  {269, UINT64_C(0x4ebae769b67b72f1), "phi3-first"},
  {273, UINT64_C(0xebc826f08cf92eab), "phi3-first"},
  {4613, UINT64_C(0xcc0368e1ffb6b958), "llama3.1"},
  {2506, UINT64_C(0xe642ce246d7f2e3d), "qwen2.5"},
  {3944, UINT64_C(0x20783e9d94168233), "mistral-v3-tekken"},
};

static uint64_t tfmi_chat_hash(tfmi_text text) {
  uint64_t h = UINT64_C(0xcbf29ce484222325);
  size_t i;
  for (i = 0; i < text.n; i++) h = (h ^ (uint8_t)text.at[i]) * UINT64_C(0x100000001b3);
  return h;
}

static const tfmi_chat_row *tfmi_chat_named(const char *name) {
  int i;
  for (i = 0; i < TFMI_COUNT(tfmi_chats); i++)
    if (!strcmp(name, tfmi_chats[i].name)) return &tfmi_chats[i];
  return NULL;
}

/* The row that writes what this template writes, or NULL. */
static const tfmi_chat_row *tfmi_chat_recognise(tfmi_text text) {
  uint64_t hash;
  int i;
  if (text.n && text.at[text.n - 1] == '\n') text.n--; /* which Jinja leaves out */
  hash = tfmi_chat_hash(text);
  for (i = 0; i < TFMI_COUNT(tfmi_chat_known); i++)
    if (tfmi_chat_known[i].bytes == text.n && tfmi_chat_known[i].hash == hash)
      return tfmi_chat_named(tfmi_chat_known[i].name);
  return NULL;
}

typedef struct tfmi_chat_search {
  tfmi_load load, *outer;
  tfmi_heap heap;
  tfmi_file file[3];
  int32_t files;
  const tfmi_chat_row *row;
} tfmi_chat_search;

static tfmi_text tfmi_chat_file(tfmi_chat_search *s, const char *path) {
  tfmi_text text;
  tfmi_file *f = &s->file[s->files];
  tfmi_file_open(&s->load, path, f);
  s->files++;
  text.at = (const char *)f->data;
  text.n = f->bytes;
  return text;
}

/* "chat_template": a text, or [{"name": "default", "template": a text}, ...]. n 0: none. */
static tfmi_text tfmi_chat_member(tfmi_json *j) {
  tfmi_text key, found = {NULL, 0};
  if (tfmi_json_null(j)) return found;
  if (tfmi_json_peek(j) == TFMI_JSON_STRING) return tfmi_json_string(j);
  tfmi_json_array(j);
  while (tfmi_json_element(j)) {
    tfmi_text name = {"", 0}, text = {NULL, 0};
    tfmi_json_object(j);
    while (tfmi_json_member(j, &key))
      if (tfmi_text_is(key, "name")) name = tfmi_json_string(j);
      else if (tfmi_text_is(key, "template")) text = tfmi_json_string(j);
      else tfmi_json_skip(j);
    if (tfmi_text_is(name, "default")) found = text;
  }
  return found;
}

static tfmi_text tfmi_chat_of_config(tfmi_chat_search *s, const char *path) {
  tfmi_text file = tfmi_chat_file(s, path), key, found = {NULL, 0};
  tfmi_json j;
  tfmi_json_init(&j, &s->load, "tokenizer_config.json", file.at, file.n);
  tfmi_json_object(&j);
  while (tfmi_json_member(&j, &key))
    if (tfmi_text_is(key, "chat_template")) found = tfmi_chat_member(&j);
    else tfmi_json_skip(&j);
  tfmi_json_finish(&j);
  return found;
}

/* The template of a GGUF file, of a folder, or of the folder that a file lies in. */
static tfmi_text tfmi_chat_of(tfmi_chat_search *s, const char *path) {
  tfmi_text text = {NULL, 0};
  char *beside;
  if (!tfmi_is_folder(&s->load, path)) {
    tfmi_text file = tfmi_chat_file(s, path);
    if (tfmi_begins_with(file, "GGUF")) {
      tfmi_gguf g;
      tfmi_gguf_open(&g, &s->load, file.at, file.n);
      tfmi_gguf_get_text(&g, "tokenizer.chat_template", &text);
      return text;
    }
    path = tfmi_folder_of(&s->load, path);
  }
  beside = tfmi_join(&s->load, path, "chat_template.jinja");
  if (tfmi_file_exists(&s->load, beside)) return tfmi_chat_file(s, beside);
  beside = tfmi_join(&s->load, path, "tokenizer_config.json");
  return tfmi_file_exists(&s->load, beside) ? tfmi_chat_of_config(s, beside) : text;
}

static void tfmi_chat_find(tfmi_chat_search *s, const char *path) {
  tfmi_text text = tfmi_chat_of(s, path);
  if (!text.n)
    tfmi_fail(&s->load, TFM_E_UNSUPPORTED, "the model has no chat template; name one, if it was "
              "trained on conversations at all");
  s->row = tfmi_chat_recognise(text);
  if (!s->row)
    tfmi_fail(&s->load, TFM_E_UNSUPPORTED, "its chat template, of %llu bytes with hash %016llx, is "
              "none of those known here; name the one that it amounts to",
              (unsigned long long)text.n, (unsigned long long)tfmi_chat_hash(text));
}

static const tfmi_chat_row *tfmi_chat_search_run(const tfm_tokenizer *t, const char *path) {
  tfmi_chat_search s;
  memset(&s, 0, sizeof s);
  s.outer = tfmi_stb_load;
  s.heap = t->heap;
  s.heap.host.io = NULL; /* which is promised to be there while loading only */
  tfmi_load_init(&s.load, &s.heap, path);
  tfmi_stb_load = &s.load;
  if (setjmp(s.load.fail) == 0) tfmi_chat_find(&s, path);
  else s.row = NULL;
  tfmi_stb_load = s.outer;
  while (s.files) tfmi_file_close(&s.heap, &s.file[--s.files]);
  tfmi_ring_free(&s.heap, &s.load.scratch);
  tfmi_ring_free(&s.heap, &s.load.kept);
  return s.row;
}

/* The id of a text that stands for one special token, or -1. */
static int32_t tfmi_chat_token(const tfm_tokenizer *t, const char *text) {
  int32_t id = -1;
  int64_t n = tfm_encode(t, text, strlen(text), TFM_ENCODE_PARSE_SPECIAL, &id, 1);
  return n == 1 && tfm_token_id(t, text, strlen(text)) == id ? id : -1;
}

static tfm_status tfmi_chat_fill(const tfm_tokenizer *t, const tfmi_chat_row *row, tfm_chat *out) {
  int i;
  memset(out, 0, sizeof *out);
  out->name = row->name;
  out->system = row->place != TFMI_SYSTEM_NONE;
  for (i = 0; i < TFMI_COUNT(row->needs) && row->needs[i]; i++)
    if (tfmi_chat_token(t, row->needs[i]) < 0)
      return tfmi_report(TFM_E_UNSUPPORTED, "chat template %s: its token %s is not in this "
                         "vocabulary; choose the model's own template", row->name, row->needs[i]);
  for (i = 0; i < TFMI_COUNT(row->ends) && row->ends[i]; i++) {
    int32_t id = tfmi_chat_token(t, row->ends[i]);
    if (id >= 0) out->end[out->end_count++] = id;
  }
  return TFM_OK;
}

TFM_API tfm_status tfm_chat_find(const tfm_tokenizer *tokenizer, const char *path,
                                 const char *name, tfm_chat *out) {
  const tfmi_chat_row *row;
  if (!tokenizer) return tfmi_null_object("tfm_chat_find");
  if (!out || (!path && !name))
    return tfmi_report(TFM_E_ARG, "tfm_chat_find: out, or both path and name, are NULL");
  row = name ? tfmi_chat_named(name) : tfmi_chat_search_run(tokenizer, path);
  if (!row && name)
    return tfmi_report(TFM_E_ARG, "tfm_chat_find: there is no template \"%s\"; expected none, "
                       "chatml, qwen2, qwen2.5, llama2, llama3, llama3.1, mistral-v1, mistral-v3, "
                       "mistral-v3-tekken, mistral-v7, gemma, gemma3, phi3, phi3.5 or phi3-first",
                       name);
  return row ? tfmi_chat_fill(tokenizer, row, out) : tfm_error_status();
}

/* ---- Writing a conversation ---- */

typedef struct tfmi_chat_text { /* text NULL: only counts */
  char *text;
  size_t bytes;
  tfmi_passage *span;
  size_t spans;
} tfmi_chat_text;

static void tfmi_chat_put(tfmi_chat_text *c, const char *p, size_t n, bool trusted) {
  if (!n) return;
  if (c->text) {
    memcpy(c->text + c->bytes, p, n);
    c->span[c->spans].end = c->bytes + n;
    c->span[c->spans].trusted = trusted;
  }
  c->bytes += n;
  c->spans++;
}

static void tfmi_chat_put_ours(tfmi_chat_text *c, const char *text) {
  tfmi_chat_put(c, text, strlen(text), true);
}

/* What Python's strip() takes: White_Space, and four separators of old. */
static bool tfmi_chat_is_blank(uint32_t c) {
  return tfmi_class_of(c) == TFMI_SPACE || (c >= 0x1c && c <= 0x1f);
}

static tfmi_text tfmi_chat_trim(tfmi_text text, bool left) {
  size_t at;
  while (left && text.n) {
    tfmi_rune r = tfmi_rune_at(text.at, text.n);
    if (!tfmi_chat_is_blank(r.code)) break;
    text.at += r.bytes;
    text.n -= r.bytes;
  }
  while (text.n) {
    for (at = text.n - 1; at && text.n - at < 4 && ((uint8_t)text.at[at] & 0xc0) == 0x80;) at--;
    if (!tfmi_chat_is_blank(tfmi_rune_at(text.at + at, text.n - at).code)) break;
    text.n = at;
  }
  return text;
}

/* One turn; `system` is what goes into it, or NULL. */
static void tfmi_chat_turn(tfmi_chat_text *c, const tfmi_chat_row *row, const tfm_message *m,
                           const char *system) {
  const char *const *around = row->around[m->role], *const *inner = row->around[TFM_SYSTEM];
  tfmi_text text = tfmi_text_of(m->text);
  bool left = !system || row->around[TFM_SYSTEM][0][0] == 0; /* Llama 2 strips the two together */
  tfmi_chat_put_ours(c, around[0]);
  if (system) {
    tfmi_chat_put_ours(c, inner[0]);
    tfmi_chat_put(c, system, strlen(system), false);
    tfmi_chat_put_ours(c, inner[1]);
  }
  if (row->trims >> m->role & 1) text = tfmi_chat_trim(text, left);
  tfmi_chat_put(c, text.at, text.n, false);
  tfmi_chat_put_ours(c, around[1]);
}

static void tfmi_chat_write(tfmi_chat_text *c, const tfmi_chat_row *row, const tfm_message *m,
                            size_t n, bool answer) {
  bool given = n && m[0].role == TFM_SYSTEM, turn = row->place == TFMI_SYSTEM_TURN;
  size_t first = given && !turn, inside = row->place == TFMI_SYSTEM_LAST ? n - 1 : first, i;
  tfm_message own;
  tfmi_chat_put_ours(c, row->start);
  own.role = TFM_SYSTEM;
  own.text = row->system;
  if (!given && row->system) tfmi_chat_turn(c, row, &own, NULL);
  if (given && row->drops && !m[0].text[0]) first = 1;
  for (i = first; i < n; i++)
    tfmi_chat_turn(c, row, &m[i], given && !turn && i == inside ? m[0].text : NULL);
  tfmi_chat_put_ours(c, answer ? row->prompt : row->finish);
}

/* Refuses what the template has no form for. */
static tfm_status tfmi_chat_check(const tfmi_chat_row *row, const tfm_message *m, size_t n) {
  size_t first = n && m[0].role == TFM_SYSTEM, i;
  for (i = 0; i < n; i++) {
    bool user = (i - first) % 2 == 0;
    if ((int)m[i].role < 0 || m[i].role > TFM_ASSISTANT || !m[i].text)
      return tfmi_report(TFM_E_ARG, "tfm_chat_encode: message %llu has no text, or role %d",
                         (unsigned long long)i, (int)m[i].role);
    if (m[i].role == TFM_SYSTEM && i)
      return tfmi_report(TFM_E_ARG, "tfm_chat_encode: message %llu is the system's, expected that "
                         "first or not at all", (unsigned long long)i);
    if (row->alternates && i >= first && user != (m[i].role == TFM_USER))
      return tfmi_report(TFM_E_ARG, "chat template %s: message %llu is the %s's; expected user and "
                         "assistant to take turns, the user first", row->name,
                         (unsigned long long)i, user ? "assistant" : "user");
  }
  if (first && row->place == TFMI_SYSTEM_NONE)
    return tfmi_report(TFM_E_UNSUPPORTED, "chat template %s has no place for a system message; put "
                       "it into the user's first", row->name);
  if (first && row->place != TFMI_SYSTEM_TURN && (n < 2 || m[n - 1].role != TFM_USER) &&
      (n < 2 || row->place == TFMI_SYSTEM_LAST))
    return tfmi_report(TFM_E_UNSUPPORTED, "chat template %s has no place for a system message "
                       "without a user's behind it", row->name);
  return TFM_OK;
}

TFM_API int64_t tfm_chat_encode(const tfm_tokenizer *tokenizer, const tfm_chat *chat,
                                const tfm_message *messages, size_t n, bool answer, int32_t *ids,
                                size_t cap) {
  const tfmi_chat_row *row;
  tfmi_chat_text c;
  tfmi_heap heap;
  size_t bytes, spans;
  int64_t count;
  if (!tokenizer) return tfmi_null_object("tfm_chat_encode");
  if (!chat || !chat->name || (n && !messages) || (cap && !ids))
    return tfmi_report(TFM_E_ARG, "tfm_chat_encode: chat, messages or ids is NULL");
  row = tfmi_chat_named(chat->name);
  if (!row) return tfmi_report(TFM_E_ARG, "tfm_chat_encode: chat is not from tfm_chat_find");
  if (tfmi_chat_check(row, messages, n) != TFM_OK) return tfm_error_status();
  memset(&c, 0, sizeof c);
  tfmi_chat_write(&c, row, messages, n, answer);
  heap = tokenizer->heap;
  bytes = c.bytes;
  spans = (c.spans + 1) * sizeof *c.span; /* one more: NULL would mean that all may be special */
  memset(&c, 0, sizeof c);
  c.text = (char *)tfmi_heap_get(&heap, bytes);
  c.span = TFMI_NEW(tfmi_passage, c.text ? tfmi_heap_get(&heap, spans) : NULL);
  if (c.span) tfmi_chat_write(&c, row, messages, n, answer);
  count = c.span ? tfmi_encode_text(tokenizer, c.text, bytes, TFM_ENCODE_PARSE_SPECIAL, c.span,
                                    c.spans, ids, cap)
                 : (int64_t)TFM_E_MEMORY;
  tfmi_heap_put(&heap, c.span, spans);
  tfmi_heap_put(&heap, c.text, bytes);
  return count;
}

/* =================================================================================================
   >>formats   safetensors, shards, GGUF and llama2.c files become one directory of tensors
   =================================================================================================

   Whatever the format, a model's files become a `tfmi_source`: a directory of tensors, by name,
   each pointing into its file, and settings, the numbers of config.json or of GGUF's keys.
   A llama2.c checkpoint, which has neither names nor keys, is given Hugging Face's, so that nothing
   below this section knows it.

   Kinds of files are told apart by their first bytes. Every rule of the formats is checked here, in
   the order of the reference implementations; where those are lax (duplicate names, unknown
   fields), we are not. Settings are found by name: nested ones, two levels deep, by
   "rope_scaling.factor". */

typedef struct tfmi_setting { /* of config.json */
  tfmi_text key;
  tfmi_json_kind kind;
  tfmi_text value; /* as it is written there */
} tfmi_setting;

typedef struct tfmi_settings {
  tfmi_setting *at; /* sorted by key */
  uint64_t count;
} tfmi_settings;

typedef struct tfmi_source {
  tfmi_load *load;
  tfm_model *model;
  const char *path; /* of the weights; NULL: from memory */
  const char *format;
  tfmi_tensor *tensor; /* sorted by name */
  uint64_t tensors;
  tfmi_settings config, generation;
  tfmi_text config_text; /* as it is written, when it is a file's */
  tfmi_gguf *gguf;    /* where settings come from instead, or NULL */
  bool interleaved;   /* q and k rows are in Meta's order, for rotation of neighbours */
} tfmi_source;

/* ---- Settings of a config.json ---- */

static int tfmi_setting_order(const void *a, const void *b) {
  return tfmi_text_order(((const tfmi_setting *)a)->key, ((const tfmi_setting *)b)->key);
}

static tfmi_text tfmi_text_join(tfmi_load *l, tfmi_text a, tfmi_text b) { /* "a.b" */
  char *at = (char *)tfmi_scratch(l, a.n + 1 + b.n, 1);
  tfmi_text joined;
  if (a.n) memcpy(at, a.at, a.n);
  at[a.n] = '.';
  if (b.n) memcpy(at + a.n + 1, b.at, b.n);
  joined.at = at;
  joined.n = a.n + 1 + b.n;
  return joined;
}

static tfmi_setting tfmi_setting_read(tfmi_json *j, tfmi_text key) {
  tfmi_setting s;
  s.key = key;
  s.kind = tfmi_json_peek(j);
  s.value.at = j->at;
  tfmi_json_skip(j);
  s.value.n = (size_t)(j->at - s.value.at);
  return s;
}

/* All members, and those of objects among them, two levels deep. */
static void tfmi_settings_object(tfmi_load *l, tfmi_json *j, tfmi_text outer, int depth,
                                 tfmi_setting **all) {
  tfmi_json inner;
  tfmi_setting s;
  tfmi_text name;
  tfmi_json_object(j);
  while (tfmi_json_member(j, &name)) {
    inner = *j;
    s = tfmi_setting_read(j, depth ? tfmi_text_join(l, outer, name) : name);
    stbds_arrput(*all, s);
    if (s.kind == TFMI_JSON_OBJECT && depth < 2 && name.n <= 64) /* inner keys repeat the name */
      tfmi_settings_object(l, &inner, s.key, depth + 1, all);
  }
}

static tfmi_settings tfmi_settings_read(tfmi_load *l, const char *what, const void *text,
                                        size_t n) {
  tfmi_setting *all = NULL;
  tfmi_settings out;
  tfmi_json j;
  tfmi_text none = {"", 0};
  uint64_t i;
  tfmi_json_init(&j, l, what, text, n);
  tfmi_settings_object(l, &j, none, 0, &all);
  tfmi_json_finish(&j);
  out.at = all;
  out.count = (uint64_t)stbds_arrlen(all);
  tfmi_sort(all, (size_t)out.count, sizeof *all, tfmi_setting_order);
  for (i = 1; i < out.count; i++)
    if (tfmi_text_order(all[i - 1].key, all[i].key) == 0)
      tfmi_fail(l, TFM_E_FORMAT, "%s: \"%s\" is there twice", what, tfmi_plain(all[i].key).text);
  return out;
}

/* A small file's text, scratch. While open the file is the model's, which closes it on failure. */
static tfmi_text tfmi_text_of_file(tfmi_source *s, const char *path) {
  tfmi_file *file = &s->model->text;
  tfmi_text text;
  char *copy;
  tfmi_file_open(s->load, path, file);
  text.n = file->bytes;
  text.at = copy = (char *)tfmi_scratch(s->load, text.n, 1);
  memcpy(copy, file->data, text.n);
  tfmi_file_close(s->load->heap, file);
  return text;
}

/* ---- The directory ---- */

static tfmi_tensor *tfmi_tensor_find(const tfmi_source *s, tfmi_text name) {
  uint64_t low = 0, high = s->tensors;
  while (low < high) {
    uint64_t middle = low + (high - low) / 2;
    int order = tfmi_text_order(name, s->tensor[middle].name);
    if (order == 0) return &s->tensor[middle];
    if (order < 0) high = middle;
    else low = middle + 1;
  }
  return NULL;
}

/* ---- Files of weights: the model's, until it is freed ---- */

/* A dry load maps what the real one would read, and counts its bytes; but what has to be turned is
   read by both. */
static tfmi_file *tfmi_source_open(tfmi_source *s, const char *path) {
  tfmi_load *l = s->load;
  tfm_model *m = s->model;
  const tfm_io *io = l->heap->host.io;
  tfmi_file *file = &m->files[m->file_count];
  bool no_mmap = l->no_mmap, maps = !TFMI_BIG_ENDIAN && (io ? io->map != NULL : TFMI_MAPS != 0);
  bool pretend = l->heap->dry && no_mmap && maps;
  l->no_mmap = !maps || (no_mmap && !pretend);
  tfmi_file_open(l, path, file);
  l->no_mmap = no_mmap;
  m->file_count++;
  if (pretend && file->kind != TFMI_FILE_BORROWED) {
    if (tfmi_heap_charge(l->heap, file->bytes) != TFM_OK) tfmi_fail_again(l);
  } else if (file->kind == TFMI_FILE_MAPPED || file->kind == TFMI_FILE_IO) {
    m->mapped_bytes += file->bytes;
  }
  return file;
}

static void tfmi_source_files(tfmi_source *s, uint64_t count) {
  s->model->files = TFMI_NEW(tfmi_file, tfmi_keep(s->load, count, sizeof *s->model->files));
}

/* ---- safetensors ---- */

static const struct tfmi_dtype_row {
  const char *name;
  uint8_t bits;
  tfm_type type;
} tfmi_dtypes[] = {
  {"F32", 32, TFM_F32}, {"F16", 16, TFM_F16}, {"BF16", 16, TFM_BF16},
  {"F8_E4M3", 8, TFM_F8_E4M3}, {"F8_E5M2", 8, TFM_F8_E5M2}, {"BOOL", 8, TFM_TYPE_DEFAULT},
  {"U8", 8, TFM_TYPE_DEFAULT}, {"I8", 8, TFM_TYPE_DEFAULT}, {"U16", 16, TFM_TYPE_DEFAULT},
  {"I16", 16, TFM_TYPE_DEFAULT}, {"U32", 32, TFM_TYPE_DEFAULT}, {"I32", 32, TFM_TYPE_DEFAULT},
  {"U64", 64, TFM_TYPE_DEFAULT}, {"I64", 64, TFM_TYPE_DEFAULT}, {"F64", 64, TFM_TYPE_DEFAULT},
  {"C64", 64, TFM_TYPE_DEFAULT}, {"F4", 4, TFM_TYPE_DEFAULT}, {"F6_E2M3", 6, TFM_TYPE_DEFAULT},
  {"F6_E3M2", 6, TFM_TYPE_DEFAULT}, {"F8_E8M0", 8, TFM_TYPE_DEFAULT},
  {"F8_E4M3FNUZ", 8, TFM_TYPE_DEFAULT}, {"F8_E5M2FNUZ", 8, TFM_TYPE_DEFAULT},
};

enum { TFMI_SAFETENSORS_MAX = 100000000 }; /* bytes of a header */

typedef struct tfmi_description { /* of one tensor in a header */
  const struct tfmi_dtype_row *dtype;
  uint64_t elements, begin, end;
  bool shape_seen, offsets_seen;
} tfmi_description;

static void tfmi_safetensors_dtype(tfmi_json *j, tfmi_description *d, const tfmi_tensor *t) {
  tfmi_text name = tfmi_json_string(j);
  int i;
  if (d->dtype)
    tfmi_json_fail(j, TFM_E_FORMAT, "tensor %s: dtype twice", tfmi_plain(t->name).text);
  for (i = 0; i < TFMI_COUNT(tfmi_dtypes); i++)
    if (tfmi_text_is(name, tfmi_dtypes[i].name)) d->dtype = &tfmi_dtypes[i];
  if (!d->dtype)
    tfmi_json_fail(j, TFM_E_FORMAT, "tensor %s: unknown dtype \"%s\"", tfmi_plain(t->name).text,
                   tfmi_plain(name).text);
}

/* The product is checked from left to right: a zero hides no overflow before it. */
static void tfmi_safetensors_shape(tfmi_json *j, tfmi_description *d, tfmi_tensor *t) {
  if (d->shape_seen)
    tfmi_json_fail(j, TFM_E_FORMAT, "tensor %s: shape twice", tfmi_plain(t->name).text);
  d->shape_seen = true;
  d->elements = 1;
  tfmi_json_array(j);
  while (tfmi_json_element(j)) {
    uint64_t dim = (uint64_t)tfmi_json_integer(j, 0, INT64_MAX);
    if (t->rank < 4) t->dims[t->rank] = dim;
    t->rank++;
    if (!tfmi_mul(d->elements, dim, &d->elements))
      tfmi_json_fail(j, TFM_E_FORMAT, "tensor %s: the shape has more than 2^64 elements",
                     tfmi_plain(t->name).text);
  }
}

static void tfmi_safetensors_offsets(tfmi_json *j, tfmi_description *d, const tfmi_tensor *t) {
  uint64_t offset[2] = {0, 0}, n = 0;
  if (d->offsets_seen)
    tfmi_json_fail(j, TFM_E_FORMAT, "tensor %s: data_offsets twice", tfmi_plain(t->name).text);
  d->offsets_seen = true;
  tfmi_json_array(j);
  for (; tfmi_json_element(j); n++)
    if (n < 2) offset[n] = (uint64_t)tfmi_json_integer(j, 0, INT64_MAX);
    else tfmi_json_skip(j);
  if (n != 2)
    tfmi_json_fail(j, TFM_E_FORMAT, "tensor %s: data_offsets has %llu numbers, expected 2",
                   tfmi_plain(t->name).text, (unsigned long long)n);
  d->begin = offset[0];
  d->end = offset[1];
}

static void tfmi_safetensors_check(tfmi_json *j, const tfmi_description *d, const tfmi_tensor *t,
                                   uint64_t room) {
  uint64_t bits;
  const char *missing = !d->dtype ? "dtype" : !d->shape_seen ? "shape" : "data_offsets";
  if (!d->dtype || !d->shape_seen || !d->offsets_seen)
    tfmi_json_fail(j, TFM_E_FORMAT, "tensor %s has no %s", tfmi_plain(t->name).text, missing);
  if (!tfmi_mul(d->elements, d->dtype->bits, &bits))
    tfmi_json_fail(j, TFM_E_FORMAT, "tensor %s has more than 2^64 bits", tfmi_plain(t->name).text);
  if (bits % 8)
    tfmi_json_fail(j, TFM_E_FORMAT, "tensor %s: %llu values of %s do not fill whole bytes",
                   tfmi_plain(t->name).text, (unsigned long long)d->elements, d->dtype->name);
  if (d->begin > d->end || d->end - d->begin != bits / 8)
    tfmi_json_fail(j, TFM_E_FORMAT,
                   "tensor %s: data_offsets [%llu, %llu] do not span the %llu bytes of its shape",
                   tfmi_plain(t->name).text, (unsigned long long)d->begin,
                   (unsigned long long)d->end, (unsigned long long)(bits / 8));
  if (d->end > room)
    tfmi_json_fail(j, TFM_E_FORMAT, "tensor %s ends at %llu, but the file has %llu bytes of data; "
                   "it may be cut off", tfmi_plain(t->name).text, (unsigned long long)d->end,
                   (unsigned long long)room);
}

static tfmi_tensor tfmi_safetensors_tensor(tfmi_json *j, tfmi_text name, const uint8_t *data,
                                           uint64_t room) {
  tfmi_tensor t;
  tfmi_description d;
  tfmi_text key;
  memset(&t, 0, sizeof t);
  memset(&d, 0, sizeof d);
  t.name = name;
  tfmi_json_object(j);
  while (tfmi_json_member(j, &key))
    if (tfmi_text_is(key, "dtype")) tfmi_safetensors_dtype(j, &d, &t);
    else if (tfmi_text_is(key, "shape")) tfmi_safetensors_shape(j, &d, &t);
    else if (tfmi_text_is(key, "data_offsets")) tfmi_safetensors_offsets(j, &d, &t);
    else
      tfmi_json_fail(j, TFM_E_FORMAT, "tensor %s has an unknown field \"%s\"",
                     tfmi_plain(name).text, tfmi_plain(key).text);
  tfmi_safetensors_check(j, &d, &t, room);
  t.type = d.dtype->type;
  t.type_name = d.dtype->name;
  t.data = data + d.begin;
  t.bytes = (size_t)(d.end - d.begin);
  return t;
}

static void tfmi_safetensors_metadata(tfmi_json *j) {
  tfmi_text key, *keys = NULL;
  tfmi_json_object(j);
  while (tfmi_json_member(j, &key)) {
    stbds_arrput(keys, key);
    tfmi_json_string(j);
  }
  tfmi_names_unique(j->load, "__metadata__", keys, (uint64_t)stbds_arrlen(keys));
  stbds_arrfree(keys);
}

/* Tensors must cover the data from its first byte to its last: no holes, nothing hidden. */
static void tfmi_safetensors_tile(tfmi_load *l, tfmi_tensor *t, uint64_t n, const uint8_t *data,
                                  const uint8_t *end) {
  uint64_t i;
  tfmi_sort(t, (size_t)n, sizeof *t, tfmi_tensor_place_order);
  for (i = 0; i < n; data = t[i].data + t[i].bytes, i++)
    if (t[i].data != data)
      tfmi_fail(l, TFM_E_FORMAT, "tensor %s %s", tfmi_plain(t[i].name).text,
                t[i].data < data ? "overlaps the one before it"
                : i == 0 ? "comes first but does not begin at offset 0"
                         : "leaves a hole behind the one before it");
  if (data != end)
    tfmi_fail(l, TFM_E_FORMAT, "%llu bytes follow the last tensor, expected none",
              (unsigned long long)(end - data));
}

/* Appends the tensors of one file to an stb array. */
static void tfmi_safetensors_read(tfmi_load *l, const tfmi_file *file, int32_t index,
                                  tfmi_tensor **all) {
  uint64_t n = file->bytes < 8 ? 0 : tfmi_u64(file->data), before = (uint64_t)stbds_arrlen(*all);
  const uint8_t *data;
  tfmi_json j;
  tfmi_text name;
  bool metadata = false;
  if (file->bytes < 8)
    tfmi_fail(l, TFM_E_FORMAT, "safetensors: the file has %llu bytes, expected 8 at least",
              (unsigned long long)file->bytes);
  if (n > TFMI_SAFETENSORS_MAX || n > file->bytes - 8)
    tfmi_fail(l, TFM_E_FORMAT, "safetensors: a header of %llu bytes is announced, expected at most "
              "%s", (unsigned long long)n,
              n > TFMI_SAFETENSORS_MAX ? "100000000" : "the file's own size");
  data = file->data + 8 + n;
  tfmi_json_init(&j, l, "safetensors header", file->data + 8, (size_t)n);
  tfmi_json_object(&j);
  while (tfmi_json_member(&j, &name))
    if (tfmi_text_is(name, "__metadata__")) {
      if (metadata) tfmi_json_fail(&j, TFM_E_FORMAT, "__metadata__ twice");
      metadata = true;
      tfmi_safetensors_metadata(&j);
    } else {
      tfmi_tensor t = tfmi_safetensors_tensor(&j, name, data, file->bytes - 8 - n);
      t.file = index;
      stbds_arrput(*all, t);
    }
  tfmi_json_finish(&j);
  tfmi_safetensors_tile(l, *all ? *all + before : NULL, (uint64_t)stbds_arrlen(*all) - before,
                        data, file->data + file->bytes);
}

static void tfmi_source_tensors(tfmi_source *s, tfmi_tensor *all) { /* an stb array */
  s->tensor = all;
  s->tensors = (uint64_t)stbds_arrlen(all);
  tfmi_tensors_sort(s->load, s->tensor, s->tensors);
}

/* ---- Shards ---- */

typedef struct tfmi_shard_entry { tfmi_text tensor, file; } tfmi_shard_entry;

/* A file name comes from outside: it may not lead out of the folder. */
static void tfmi_shard_name_check(tfmi_json *j, tfmi_text name) {
  if (name.n == 0 || name.n > 255 || name.at[0] == '.' || memchr(name.at, '/', name.n) ||
      memchr(name.at, '\\', name.n) || memchr(name.at, 0, name.n))
    tfmi_json_fail(j, TFM_E_FORMAT, "\"%s\" is not a plain file name", tfmi_plain(name).text);
}

static tfmi_shard_entry *tfmi_index_read(tfmi_source *s, tfmi_text text) {
  tfmi_shard_entry *map = NULL, e;
  tfmi_json j;
  tfmi_text key;
  bool seen = false;
  tfmi_json_init(&j, s->load, "index", text.at, text.n);
  tfmi_json_object(&j);
  while (tfmi_json_member(&j, &key)) {
    if (!tfmi_text_is(key, "weight_map")) {
      tfmi_json_skip(&j);
      continue;
    }
    if (seen) tfmi_json_fail(&j, TFM_E_FORMAT, "weight_map twice");
    seen = true;
    tfmi_json_object(&j);
    while (tfmi_json_member(&j, &e.tensor)) {
      e.file = tfmi_json_string(&j);
      tfmi_shard_name_check(&j, e.file);
      stbds_arrput(map, e);
    }
  }
  tfmi_json_finish(&j);
  if (!map) tfmi_fail(s->load, TFM_E_FORMAT, "index: weight_map is missing or empty");
  return map;
}

/* The distinct file names, sorted; an stb array. */
static tfmi_text *tfmi_index_files(const tfmi_shard_entry *map) {
  tfmi_text *all = NULL, *files = NULL;
  int64_t i, n = (int64_t)stbds_arrlen(map);
  for (i = 0; i < n; i++) stbds_arrput(all, map[i].file);
  tfmi_sort(all, (size_t)n, sizeof *all, tfmi_name_order);
  for (i = 0; i < n; i++)
    if (i == 0 || tfmi_text_order(all[i - 1], all[i]) != 0) stbds_arrput(files, all[i]);
  stbds_arrfree(all);
  return files;
}

/* The map and the shards must tell the same. */
static void tfmi_index_check(tfmi_source *s, const tfmi_shard_entry *map, const tfmi_text *files) {
  tfmi_text *names = NULL;
  uint64_t i, n = (uint64_t)stbds_arrlen(map);
  for (i = 0; i < n; i++) {
    const tfmi_tensor *t = tfmi_tensor_find(s, map[i].tensor);
    if (!t || tfmi_text_order(files[t->file], map[i].file) != 0)
      tfmi_fail(s->load, TFM_E_FORMAT, "index: tensor %s is not in %s, where weight_map has it",
                tfmi_plain(map[i].tensor).text, tfmi_plain(map[i].file).text);
    stbds_arrput(names, map[i].tensor);
  }
  tfmi_names_unique(s->load, "weight_map", names, n);
  for (i = 0; n != s->tensors && i < s->tensors; i++)
    if (i >= n || tfmi_text_order(names[i], s->tensor[i].name) != 0)
      tfmi_fail(s->load, TFM_E_FORMAT, "index: tensor %s of shard %s is not in weight_map",
                tfmi_plain(s->tensor[i].name).text, tfmi_plain(files[s->tensor[i].file]).text);
  stbds_arrfree(names);
}

static void tfmi_source_shards(tfmi_source *s, const char *path) {
  tfmi_load *l = s->load;
  const char *object = l->object, *folder = tfmi_folder_of(l, path);
  tfmi_shard_entry *map = tfmi_index_read(s, tfmi_text_of_file(s, path));
  tfmi_text *files = tfmi_index_files(map);
  tfmi_tensor *all = NULL;
  int32_t i, n = (int32_t)stbds_arrlen(files);
  char name[256];
  tfmi_source_files(s, (uint64_t)n);
  for (i = 0; i < n; i++) {
    const tfmi_file *file;
    memcpy(name, files[i].at, files[i].n);
    name[files[i].n] = 0;
    l->object = tfmi_join(l, folder, name);
    file = tfmi_source_open(s, l->object);
    tfmi_safetensors_read(l, file, i, &all);
    l->object = object;
  }
  tfmi_source_tensors(s, all);
  tfmi_index_check(s, map, files);
  s->format = "safetensors";
}

/* ---- llama2.c checkpoints ---- */

typedef struct tfmi_llama2 { /* the header's numbers */
  uint64_t width, ffn, layers, heads, kv_heads, vocabulary, context;
  bool tied;
} tfmi_llama2;

/* In file order, all layers of a row together. Sizes: C width, K width of all keys, F, V, T as
   elsewhere, D half a head, 1 a vector. */
typedef struct tfmi_llama2_row {
  const char *name; /* NULL: not a weight (rotation tables of version 0) */
  bool per_layer;
  char rows, cols;
} tfmi_llama2_row;

static const tfmi_llama2_row tfmi_llama2_v0[] = {
  {"model.embed_tokens.weight", false, 'V', 'C'},
  {"model.layers.%d.input_layernorm.weight", true, '1', 'C'},
  {"model.layers.%d.self_attn.q_proj.weight", true, 'C', 'C'},
  {"model.layers.%d.self_attn.k_proj.weight", true, 'K', 'C'},
  {"model.layers.%d.self_attn.v_proj.weight", true, 'K', 'C'},
  {"model.layers.%d.self_attn.o_proj.weight", true, 'C', 'C'},
  {"model.layers.%d.post_attention_layernorm.weight", true, '1', 'C'},
  {"model.layers.%d.mlp.gate_proj.weight", true, 'F', 'C'},
  {"model.layers.%d.mlp.down_proj.weight", true, 'C', 'F'},
  {"model.layers.%d.mlp.up_proj.weight", true, 'F', 'C'},
  {"model.norm.weight", false, '1', 'C'},
  {NULL, false, 'T', 'D'},
  {NULL, false, 'T', 'D'},
  {"lm_head.weight", false, 'V', 'C'}, /* last in both: absent when tied */
};

static const tfmi_llama2_row tfmi_llama2_v1[] = {
  {"model.layers.%d.input_layernorm.weight", true, '1', 'C'},
  {"model.layers.%d.post_attention_layernorm.weight", true, '1', 'C'},
  {"model.norm.weight", false, '1', 'C'},
  {"model.embed_tokens.weight", false, 'V', 'C'},
  {"model.layers.%d.self_attn.q_proj.weight", true, 'C', 'C'},
  {"model.layers.%d.self_attn.k_proj.weight", true, 'K', 'C'},
  {"model.layers.%d.self_attn.v_proj.weight", true, 'K', 'C'},
  {"model.layers.%d.self_attn.o_proj.weight", true, 'C', 'C'},
  {"model.layers.%d.mlp.gate_proj.weight", true, 'F', 'C'},
  {"model.layers.%d.mlp.down_proj.weight", true, 'C', 'F'},
  {"model.layers.%d.mlp.up_proj.weight", true, 'F', 'C'},
  {"lm_head.weight", false, 'V', 'C'},
};

static uint64_t tfmi_llama2_size(const tfmi_llama2 *h, char letter) {
  switch (letter) {
    case 'C': return h->width;
    case 'K': return h->width / h->heads * h->kv_heads;
    case 'F': return h->ffn;
    case 'V': return h->vocabulary;
    case 'T': return h->context;
    case 'D': return h->width / h->heads / 2;
    default: return 1;
  }
}

/* Seven numbers from `at`; false when they cannot be a model's. */
static bool tfmi_llama2_header(tfmi_llama2 *h, const uint8_t *at) {
  uint64_t n[7];
  int i;
  bool negative = tfmi_u32(at + 20) >> 31;
  for (i = 0; i < 7; i++) {
    n[i] = i == 5 && negative ? 0u - tfmi_u32(at + 20) : tfmi_u32(at + 4 * i);
    if (n[i] == 0 || n[i] > 1u << 24) return false;
  }
  h->width = n[0];
  h->ffn = n[1];
  h->layers = n[2];
  h->heads = n[3];
  h->kv_heads = n[4];
  h->vocabulary = n[5];
  h->context = n[6];
  h->tied = !negative;
  return h->layers <= 4096 && h->width % h->heads == 0 && h->heads % h->kv_heads == 0;
}

/* prefix + pattern + suffix, the layer's number in place of "%d". The longest of ours has 60
   characters; what does not fit is cut. */
static tfmi_text tfmi_layer_name(char *out, size_t size, const char *prefix, const char *pattern,
                                 int32_t layer, const char *suffix) {
  const char *number = strstr(pattern, "%d");
  int before = number ? (int)(number - pattern) : (int)strlen(pattern);
  tfmi_text name;
  if (number)
    snprintf(out, size, "%s%.*s%d%s%s", prefix, before, pattern, (int)layer, number + 2, suffix);
  else
    snprintf(out, size, "%s%s%s", prefix, pattern, suffix);
  name.at = out;
  name.n = strlen(out);
  return name;
}

static tfmi_tensor tfmi_llama2_tensor(tfmi_load *l, const tfmi_llama2 *h,
                                      const tfmi_llama2_row *row, int32_t layer) {
  tfmi_tensor t;
  char *name;
  memset(&t, 0, sizeof t);
  if (row->name) {
    name = (char *)tfmi_scratch(l, 64, 1);
    t.name = tfmi_layer_name(name, 64, "", row->name, layer, "");
  }
  t.type = TFM_F32;
  t.type_name = "F32";
  t.rank = row->rows == '1' ? 1 : 2;
  t.dims[0] = tfmi_llama2_size(h, t.rank == 1 ? row->cols : row->rows);
  t.dims[1] = t.rank == 1 ? 0 : tfmi_llama2_size(h, row->cols);
  t.bytes = (size_t)(t.dims[0] * (t.rank == 1 ? 1 : t.dims[1]) * 4); /* below 2^51 */
  return t;
}

static void tfmi_llama2_tensors(tfmi_source *s, const tfmi_llama2 *h, const tfmi_llama2_row *row,
                                int32_t rows, const tfmi_file *file, size_t at) {
  tfmi_tensor *all = NULL;
  int32_t i, layer;
  for (i = 0; i < rows - h->tied; i++)
    for (layer = 0; layer < (row[i].per_layer ? (int32_t)h->layers : 1); layer++) {
      tfmi_tensor t = tfmi_llama2_tensor(s->load, h, &row[i], layer);
      if (t.bytes > file->bytes - at)
        tfmi_fail(s->load, TFM_E_FORMAT, "llama2.c checkpoint: %s needs %llu bytes, but the file "
                  "ends after %llu", row[i].name ? tfmi_plain(t.name).text : "a rotation table",
                  (unsigned long long)t.bytes, (unsigned long long)(file->bytes - at));
      t.data = file->data + at;
      at += t.bytes;
      if (row[i].name) stbds_arrput(all, t);
    }
  if (at != file->bytes)
    tfmi_fail(s->load, TFM_E_FORMAT, "llama2.c checkpoint: %llu bytes follow the last tensor, "
              "expected none", (unsigned long long)(file->bytes - at));
  tfmi_source_tensors(s, all);
}

/* What the header does not say is the same in every such model. */
static void tfmi_llama2_settings(tfmi_source *s, const tfmi_llama2 *h) {
  char *text = (char *)tfmi_scratch(s->load, 512, 1);
  snprintf(text, 512,
           "{\"model_type\":\"llama\",\"hidden_size\":%d,\"intermediate_size\":%d,"
           "\"num_hidden_layers\":%d,\"num_attention_heads\":%d,\"num_key_value_heads\":%d,"
           "\"vocab_size\":%d,\"max_position_embeddings\":%d,\"tie_word_embeddings\":%s,"
           "\"rms_norm_eps\":1e-5,\"rope_theta\":10000,\"bos_token_id\":1,\"eos_token_id\":[1,2]}",
           (int)h->width, (int)h->ffn, (int)h->layers, (int)h->heads, (int)h->kv_heads,
           (int)h->vocabulary, (int)h->context, h->tied ? "true" : "false");
  s->config = tfmi_settings_read(s->load, "llama2.c header", text, strlen(text));
}

static void tfmi_source_llama2(tfmi_source *s, const tfmi_file *file, bool ak42) {
  tfmi_llama2 h;
  uint32_t version;
  s->format = "llama2.c";
  s->interleaved = true;
  if (!ak42) {
    if (file->bytes < 28 || !tfmi_llama2_header(&h, file->data))
      tfmi_fail(s->load, TFM_E_FORMAT, "the file is not recognised; expected GGUF, safetensors or "
                "a llama2.c checkpoint");
    tfmi_llama2_tensors(s, &h, tfmi_llama2_v0, TFMI_COUNT(tfmi_llama2_v0), file, 28);
  } else {
    version = file->bytes < 256 ? 0 : tfmi_u32(file->data + 4);
    if (file->bytes < 256)
      tfmi_fail(s->load, TFM_E_FORMAT, "llama2.c checkpoint: the file has %llu bytes, expected a "
                "header of 256", (unsigned long long)file->bytes);
    if (version != 1)
      tfmi_fail(s->load, TFM_E_UNSUPPORTED, "llama2.c checkpoint: version %u, expected 1 (2 is "
                "quantised); export it again", (unsigned)version);
    if (!tfmi_llama2_header(&h, file->data + 8) || tfmi_u32(file->data + 28) >> 31)
      tfmi_fail(s->load, TFM_E_FORMAT, "llama2.c checkpoint: the header's numbers are no model's");
    h.tied = file->data[36] != 0;
    tfmi_llama2_tensors(s, &h, tfmi_llama2_v1, TFMI_COUNT(tfmi_llama2_v1), file, 256);
  }
  tfmi_llama2_settings(s, &h);
}

/* ---- Which kind of file it is ---- */

static void tfmi_source_gguf(tfmi_source *s, const tfmi_file *file) {
  s->gguf = TFMI_NEW(tfmi_gguf, tfmi_scratch(s->load, 1, sizeof *s->gguf));
  tfmi_gguf_open(s->gguf, s->load, file->data, file->bytes);
  s->tensor = s->gguf->tensor;
  s->tensors = s->gguf->tensors;
  s->format = "gguf";
  s->interleaved = true;
  if (s->tensors == 0)
    tfmi_fail(s->load, TFM_E_FORMAT, "the file has no tensors: it is a vocabulary, not a model");
}

/* The header's length, within its limit, and the header, which white space may precede. */
static bool tfmi_is_safetensors(const uint8_t *data, size_t bytes) {
  size_t i = 8;
  while (i < bytes && i < 64 && data[i] && strchr(" \t\r\n", data[i])) i++;
  return i < bytes && data[i] == '{' && tfmi_u64(data) <= TFMI_SAFETENSORS_MAX;
}

static bool tfmi_is_ak42(const uint8_t *data, size_t bytes) {
  return bytes >= 4 && tfmi_u32(data) == 0x616b3432;
}

static bool tfmi_is_llama2(const uint8_t *data, size_t bytes) {
  tfmi_llama2 h;
  return tfmi_is_ak42(data, bytes) || (bytes >= 28 && tfmi_llama2_header(&h, data));
}

/* A zip archive, as torch.save makes, or its older form: a pickle of a long magic number. */
static bool tfmi_is_pickle(const uint8_t *data, size_t bytes) {
  return bytes >= 4 && (memcmp(data, "PK\3\4", 4) == 0 || memcmp(data, "\x80\2\x8a\n", 4) == 0);
}

static TFMI_NORETURN void tfmi_refuse_pickle(tfmi_load *l) {
  tfmi_fail(l, TFM_E_UNSUPPORTED, "a PyTorch pickle, which is a program, not data; convert it with "
            "transformers: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OUT)");
}

static void tfmi_source_file(tfmi_source *s, const tfmi_file *file) {
  static const char *const old[] = {"lmgg", "tjgg", "fmgg", "algg", "GGML", "GGJT", "ggml", "ggjt"};
  tfmi_tensor *all = NULL;
  int i;
  if (file->bytes == 0) tfmi_fail(s->load, TFM_E_FORMAT, "the file is empty");
  for (i = 0; i < TFMI_COUNT(old); i++)
    if (file->bytes >= 4 && memcmp(file->data, old[i], 4) == 0)
      tfmi_fail(s->load, TFM_E_UNSUPPORTED, "an old GGML file, expected GGUF version 3; convert "
                "the model again");
  if (tfmi_is_pickle(file->data, file->bytes)) tfmi_refuse_pickle(s->load);
  if (file->bytes >= 4 && memcmp(file->data, "GGUF", 4) == 0) {
    tfmi_source_gguf(s, file);
  } else if (tfmi_is_ak42(file->data, file->bytes)) {
    tfmi_source_llama2(s, file, true);
  } else if ((s->path && tfmi_ends_with(s->path, ".safetensors")) ||
             tfmi_is_safetensors(file->data, file->bytes)) {
    tfmi_safetensors_read(s->load, file, 0, &all);
    tfmi_source_tensors(s, all);
    s->format = "safetensors";
  } else {
    tfmi_source_llama2(s, file, false);
  }
}

/* config.json and generation_config.json of a folder, or the former as the application gave it. */
static void tfmi_source_settings(tfmi_source *s, const char *config_json) {
  tfmi_load *l = s->load;
  const char *folder, *path;
  tfmi_text text;
  if (config_json) {
    s->config = tfmi_settings_read(l, "config_json", config_json, strlen(config_json));
    return;
  }
  if (!s->path)
    tfmi_fail(l, TFM_E_ARG, "safetensors from memory need config_json, the text of a config.json");
  folder = tfmi_folder_of(l, s->path);
  text = s->config_text = tfmi_text_of_file(s, tfmi_join(l, folder, "config.json"));
  s->config = tfmi_settings_read(l, "config.json", text.at, text.n);
  path = tfmi_join(l, folder, "generation_config.json");
  if (!tfmi_file_exists(l, path)) return;
  text = tfmi_text_of_file(s, path);
  s->generation = tfmi_settings_read(l, "generation_config.json", text.at, text.n);
}

/* The file of weights that stands for a folder. */
static const char *tfmi_folder_weights(tfmi_load *l, const char *folder) {
  static const char *const names[] = {"model.safetensors", "model.safetensors.index.json"};
  static const char *const pickles[] = {"pytorch_model.bin", "pytorch_model.bin.index.json"};
  int i;
  for (i = 0; i < TFMI_COUNT(names); i++) {
    const char *path = tfmi_join(l, folder, names[i]);
    if (tfmi_file_exists(l, path)) return path;
  }
  for (i = 0; i < TFMI_COUNT(pickles); i++)
    if (tfmi_file_exists(l, tfmi_join(l, folder, pickles[i]))) tfmi_refuse_pickle(l);
  tfmi_fail(l, TFM_E_IO, "the folder has neither model.safetensors nor its .index.json; name a "
            "GGUF or llama2.c file itself");
}

/* Floats get the machine's order where they lie, which is in memory of ours. */
static void tfmi_source_turn(tfmi_source *s) {
  uint64_t i;
  for (i = 0; TFMI_BIG_ENDIAN && i < s->tensors; i++)
    tfmi_little((void *)(uintptr_t)s->tensor[i].data, s->tensor[i].bytes,
                tfmi_word_bytes(s->tensor[i].type));
}

/* Fills the directory. path NULL: data, borrowed. */
static void tfmi_source_read(tfmi_source *s, const char *path, const void *data, size_t bytes) {
  tfmi_load *l = s->load;
  s->path = path;
  if (path) {
    if (tfmi_is_folder(l, path)) s->path = tfmi_folder_weights(l, path);
    if (tfmi_ends_with(s->path, ".index.json")) {
      tfmi_source_shards(s, s->path);
    } else {
      tfmi_source_files(s, 1);
      tfmi_source_file(s, tfmi_source_open(s, s->path));
    }
  } else {
    tfmi_source_files(s, 1);
    if (TFMI_BIG_ENDIAN) data = memcpy(tfmi_keep(l, bytes, 1), data, bytes);
    s->model->file_count = 1;
    s->model->files[0].kind = TFMI_FILE_BORROWED;
    s->model->files[0].data = (const uint8_t *)data;
    s->model->files[0].bytes = bytes;
    tfmi_source_file(s, &s->model->files[0]);
  }
  tfmi_source_turn(s);
}

/* =================================================================================================
   >>families   rows of data that make a network of a model's files
   =================================================================================================

   A family is a row of tfmi_families: how its numbers are called in config.json and GGUF and what
   they may be, how its tensors are called, and how it differs: norms, biases, windows, rotation,
   experts. Whatever no row describes exactly is refused by name, never guessed: tfmi_rules lists
   what other models say in config.json that would change the arithmetic.

   tfmi_network walks the network twice by the same code. The first pass measures: it finds every
   tensor, checks its shape and type, and adds up what the table wants for the packed weights and
   what vectors take. Then come one block from the heap and one from the device, and the second pass
   fills them. The memory plan is a load on a dry heap that stops in between. Vectors (norms,
   biases) are converted to F32 and lie in the device's block too. Frequencies are not there: some
   depend on the context, so an engine or a trainer makes its own.

   gpt2_moe is ours: GPT-2 whose feed-forward is a choice of experts. config.json is GPT-2's, with
   n_expert (8), n_expert_used (2), n_expert_inner (0: n_inner) and router_aux_loss_coef. In every
   layer h.%d.mlp.router.weight [E, C], a plain matrix, gives the logits; the best n_expert_used
   are weighted by the softmax over their own logits. Experts are stored together: h.%d.mlp.
   experts.c_fc.weight [E, F, C] and .bias [E, F], h.%d.mlp.experts.c_proj.weight [E, C, F] and
   .bias [E, C]: y = c_proj(act(c_fc(x))), rows by outputs (not turned as Conv1D's are). */

typedef enum tfmi_quantity { /* the first nine every family has */
  TFMI_N_LAYERS, TFMI_N_WIDTH, TFMI_N_HEADS, TFMI_N_KV_HEADS, TFMI_N_HEAD_WIDTH, TFMI_N_FFN,
  TFMI_N_VOCABULARY, TFMI_N_CONTEXT, TFMI_N_EPS,
  TFMI_N_THETA, TFMI_N_LOCAL_THETA, TFMI_N_PARTIAL, TFMI_N_ORIGINAL, /* rotation */
  TFMI_N_WINDOW, TFMI_N_WINDOW_LAYERS, TFMI_N_WINDOW_EVERY, /* every so many layers one sees all */
  TFMI_N_QUERY_SCALAR, TFMI_N_ATTN_CAP, TFMI_N_LOGIT_CAP,
  TFMI_N_EXPERTS, TFMI_N_EXPERTS_USED, TFMI_N_EXPERT_FFN, TFMI_N_SHARED_FFN, TFMI_N_SPARSE_STEP,
  TFMI_N_BALANCE,
  TFMI_QUANTITIES
} tfmi_quantity;

typedef struct tfmi_key { /* what a number is called and may be */
  const char *hf[2]; /* spellings in config.json; NULL: not told there */
  const char *gguf;  /* behind the "llama." of the architecture */
  bool whole;
  double low, high;  /* null means 0 where 0 is allowed, else the same as absence */
  double fallback;   /* when absent; NAN: it must be there */
} tfmi_key;

typedef struct tfmi_flag { /* whether something is there, in Hugging Face's models */
  const char *key; /* NULL: always as the fallback says */
  bool fallback;
} tfmi_flag;

typedef enum tfmi_slot { /* tensors, without ".weight" and ".bias" */
  TFMI_EMBED, TFMI_POSITIONS, TFMI_HEAD, TFMI_FINAL_NORM, TFMI_NORM1, TFMI_NORM2, TFMI_POST1,
  TFMI_POST2, TFMI_Q_NORM, TFMI_K_NORM,
  TFMI_QKV, TFMI_Q, TFMI_K, TFMI_V, TFMI_OUT, TFMI_GATE_UP, TFMI_GATE, TFMI_UP, TFMI_DOWN,
  TFMI_ROUTER, TFMI_EXPERT_GATE_UP, TFMI_EXPERT_GATE, TFMI_EXPERT_UP, TFMI_EXPERT_DOWN,
  TFMI_SHARED_ROUTER, TFMI_SHARED_GATE_UP, TFMI_SHARED_GATE, TFMI_SHARED_UP, TFMI_SHARED_DOWN,
  TFMI_SLOTS
} tfmi_slot;

enum { /* what a family has */
  TFMI_GATED = 1,          /* y = act(gate) * up */
  TFMI_ROTARY = 2,         /* else learned positions */
  TFMI_LAYER_NORM = 4,     /* else RMS */
  TFMI_CONV1D = 8,         /* Hugging Face stores matrices of layers as [in, out] */
  TFMI_LAYER_SCALE = 16,   /* honours GPT-2's scale_attn_... */
  TFMI_ONE_PLUS = 32,      /* norms multiply by 1 + w, where GGUF has stored 1 + w */
  TFMI_SCALED_EMBED = 64,  /* by the root of the width, rounded to the model's type */
  TFMI_HEAD_NORMS = 128,   /* of each query and key head, before rotation */
  TFMI_POST_NORMS = 256,   /* of what a layer adds to the stream */
  TFMI_MOE = 512,          /* experts; a layer without them is told by config.json */
  TFMI_SHARED = 1024,      /* ... and one for all tokens, behind a gate */
  TFMI_SOFTMAX_AFTER = 2048, /* the softmax is over the chosen experts' logits only */
  TFMI_LONGROPE = 4096,    /* every rotation that is scaled is longrope, "yarn" included */
  TFMI_PAIRS = 8192,       /* GGUF keeps rows of q and k in Meta's order */
  TFMI_NORMALISED = 16384  /* GGUF has only experts whose weights add up to 1 */
};

/* Which layers see a window only. Without layer_types: those from the first until the last of
   max_window_layers on, as the family has it, but for every TFMI_N_WINDOW_EVERY-th. */
typedef struct tfmi_windows {
  const char *use; /* a flag that must be set; NULL: none */
  bool from, until, types;
} tfmi_windows;

typedef struct tfmi_said {
  tfmi_quantity what;
  double fallback;
} tfmi_said;

typedef struct tfmi_family {
  const char *name, *gguf;     /* model_type; general.architecture, which TFMI_MOE tells apart */
  const char *classes[2];      /* of config.json's "architectures" */
  const char *prefix;          /* that names have in some files; the head never */
  const char *const *slot;     /* [TFMI_SLOTS] */
  const tfmi_key *key;         /* [TFMI_QUANTITIES] */
  unsigned is;
  const char *act_key, *act;   /* and the activation when it is absent */
  tfmi_flag qkv_bias, out_bias, up_bias, down_bias, tied, normalise;
  tfmi_windows windows;
  int32_t wide_layers;         /* a GGUF with so many layers scales scores by width / heads */
  tfmi_said said[13];          /* numbers beside the first nine, and other fallbacks; 0s end it */
} tfmi_family;

#define TFMI_BIG 16777216.0

static const tfmi_key tfmi_llama_keys[TFMI_QUANTITIES] = {
  {{"num_hidden_layers", NULL}, "block_count", true, 1, 4096, NAN},
  {{"hidden_size", NULL}, "embedding_length", true, 1, TFMI_BIG, NAN},
  {{"num_attention_heads", NULL}, "attention.head_count", true, 1, 65536, NAN},
  {{"num_key_value_heads", NULL}, "attention.head_count_kv", true, 1, 65536, 0},
  {{"head_dim", NULL}, "attention.key_length", true, 1, 65536, 0},
  {{"intermediate_size", NULL}, "feed_forward_length", true, 1, TFMI_BIG, NAN},
  {{"vocab_size", NULL}, "vocab_size", true, 1, TFMI_BIG, 0},
  {{"max_position_embeddings", NULL}, "context_length", true, 1, TFMI_BIG, 2048},
  {{"rms_norm_eps", NULL}, "attention.layer_norm_rms_epsilon", false, 1e-30, 1, 1e-6},
  {{"rope_theta", NULL}, "rope.freq_base", false, 1e-3, 1e12, 10000},
  {{"rope_local_base_freq", NULL}, "rope.freq_base_swa", false, 1e-3, 1e12, 10000},
  {{"partial_rotary_factor", NULL}, NULL, false, 1e-3, 1, 1},
  {{"original_max_position_embeddings", NULL}, "rope.scaling.original_context_length", true, 2,
   TFMI_BIG, 0},
  {{"sliding_window", NULL}, "attention.sliding_window", true, 0, TFMI_BIG, 0},
  {{"max_window_layers", NULL}, NULL, true, 0, TFMI_BIG, 28},
  {{"sliding_window_pattern", "_sliding_window_pattern"}, NULL, true, 1, 4096, 0},
  {{"query_pre_attn_scalar", NULL}, NULL, false, 1e-3, TFMI_BIG, 0},
  {{"attn_logit_softcapping", NULL}, "attn_logit_softcapping", false, 0, 1e9, 0},
  {{"final_logit_softcapping", NULL}, "final_logit_softcapping", false, 0, 1e9, 0},
  {{"num_experts", "num_local_experts"}, "expert_count", true, 1, 65536, NAN},
  {{"num_experts_per_tok", NULL}, "expert_used_count", true, 1, 65536, 2},
  {{"moe_intermediate_size", NULL}, "expert_feed_forward_length", true, 1, TFMI_BIG, 0},
  {{"shared_expert_intermediate_size", NULL}, "expert_shared_feed_forward_length", true, 1,
   TFMI_BIG, NAN},
  {{"decoder_sparse_step", NULL}, NULL, true, 1, TFMI_BIG, 1},
  {{"router_aux_loss_coef", NULL}, NULL, false, 0, 1e9, 0.001},
};

static const tfmi_key tfmi_gpt2_keys[TFMI_QUANTITIES] = {
  {{"n_layer", NULL}, "block_count", true, 1, 4096, NAN},
  {{"n_embd", NULL}, "embedding_length", true, 1, TFMI_BIG, NAN},
  {{"n_head", NULL}, "attention.head_count", true, 1, 65536, NAN},
  {{NULL, NULL}, "attention.head_count_kv", true, 1, 65536, 0},
  {{NULL, NULL}, NULL, true, 1, 65536, 0},
  {{"n_inner", NULL}, "feed_forward_length", true, 1, TFMI_BIG, 0},
  {{"vocab_size", NULL}, "vocab_size", true, 1, TFMI_BIG, 0},
  {{"n_positions", NULL}, "context_length", true, 1, TFMI_BIG, NAN},
  {{"layer_norm_epsilon", NULL}, "attention.layer_norm_epsilon", false, 1e-30, 1, 1e-5},
  {{NULL, NULL}, NULL, false, 0, 0, 0}, {{NULL, NULL}, NULL, false, 0, 0, 0},
  {{NULL, NULL}, NULL, false, 0, 0, 0}, {{NULL, NULL}, NULL, false, 0, 0, 0},
  {{NULL, NULL}, NULL, false, 0, 0, 0}, {{NULL, NULL}, NULL, false, 0, 0, 0},
  {{NULL, NULL}, NULL, false, 0, 0, 0}, {{NULL, NULL}, NULL, false, 0, 0, 0},
  {{NULL, NULL}, NULL, false, 0, 0, 0}, {{NULL, NULL}, NULL, false, 0, 0, 0},
  {{"n_expert", NULL}, "expert_count", true, 1, 65536, 8},
  {{"n_expert_used", NULL}, "expert_used_count", true, 1, 65536, 2},
  {{"n_expert_inner", NULL}, "expert_feed_forward_length", true, 0, TFMI_BIG, 0},
  {{NULL, NULL}, NULL, false, 0, 0, 0},
  {{NULL, NULL}, NULL, false, 1, 1, 1},
  {{"router_aux_loss_coef", NULL}, NULL, false, 0, 1e9, 0.001},
};

/* Names, in tfmi_slot's order. */
#define TFMI_ATTENTION_NAMES "layers.%d.self_attn.q_proj", "layers.%d.self_attn.k_proj",           \
                             "layers.%d.self_attn.v_proj", "layers.%d.self_attn.o_proj"
#define TFMI_MLP_NAMES "layers.%d.mlp.gate_proj", "layers.%d.mlp.up_proj", "layers.%d.mlp.down_proj"

static const char *const tfmi_gpt2_slots[TFMI_SLOTS] = {
  "wte", "wpe", "lm_head", "ln_f", "h.%d.ln_1", "h.%d.ln_2", NULL, NULL, NULL, NULL,
  "h.%d.attn.c_attn", NULL, NULL, NULL, "h.%d.attn.c_proj", NULL, NULL, "h.%d.mlp.c_fc",
  "h.%d.mlp.c_proj", "h.%d.mlp.router", NULL, NULL, "h.%d.mlp.experts.c_fc",
  "h.%d.mlp.experts.c_proj", NULL, NULL, NULL, NULL, NULL};

static const char *const tfmi_llama_slots[TFMI_SLOTS] = {
  "embed_tokens", NULL, "lm_head", "norm", "layers.%d.input_layernorm",
  "layers.%d.post_attention_layernorm", NULL, NULL, "layers.%d.self_attn.q_norm",
  "layers.%d.self_attn.k_norm", NULL, TFMI_ATTENTION_NAMES, NULL, TFMI_MLP_NAMES,
  "layers.%d.mlp.gate", NULL, "layers.%d.mlp.experts.%e.gate_proj",
  "layers.%d.mlp.experts.%e.up_proj", "layers.%d.mlp.experts.%e.down_proj",
  "layers.%d.mlp.shared_expert_gate", NULL, "layers.%d.mlp.shared_expert.gate_proj",
  "layers.%d.mlp.shared_expert.up_proj", "layers.%d.mlp.shared_expert.down_proj"};

static const char *const tfmi_gemma2_slots[TFMI_SLOTS] = {
  "embed_tokens", NULL, "lm_head", "norm", "layers.%d.input_layernorm",
  "layers.%d.pre_feedforward_layernorm", "layers.%d.post_attention_layernorm",
  "layers.%d.post_feedforward_layernorm", "layers.%d.self_attn.q_norm",
  "layers.%d.self_attn.k_norm", NULL, TFMI_ATTENTION_NAMES, NULL, TFMI_MLP_NAMES, NULL, NULL,
  NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL};

static const char *const tfmi_phi3_slots[TFMI_SLOTS] = {
  "embed_tokens", NULL, "lm_head", "norm", "layers.%d.input_layernorm",
  "layers.%d.post_attention_layernorm", NULL, NULL, NULL, NULL, "layers.%d.self_attn.qkv_proj",
  NULL, NULL, NULL, "layers.%d.self_attn.o_proj", "layers.%d.mlp.gate_up_proj", NULL, NULL,
  "layers.%d.mlp.down_proj", NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL};

static const char *const tfmi_mixtral_slots[TFMI_SLOTS] = {
  "embed_tokens", NULL, "lm_head", "norm", "layers.%d.input_layernorm",
  "layers.%d.post_attention_layernorm", NULL, NULL, NULL, NULL, NULL, TFMI_ATTENTION_NAMES, NULL,
  TFMI_MLP_NAMES, "layers.%d.block_sparse_moe.gate", NULL,
  "layers.%d.block_sparse_moe.experts.%e.w1", "layers.%d.block_sparse_moe.experts.%e.w3",
  "layers.%d.block_sparse_moe.experts.%e.w2", NULL, NULL, NULL, NULL, NULL};

static const char *const tfmi_gguf_slots[TFMI_SLOTS] = { /* the same for every family */
  "token_embd", "position_embd", "output", "output_norm", "blk.%d.attn_norm", "blk.%d.ffn_norm",
  "blk.%d.post_attention_norm", "blk.%d.post_ffw_norm", "blk.%d.attn_q_norm",
  "blk.%d.attn_k_norm", "blk.%d.attn_qkv", "blk.%d.attn_q", "blk.%d.attn_k", "blk.%d.attn_v",
  "blk.%d.attn_output", "blk.%d.ffn_up", /* both in one, where there is no ffn_gate */
  "blk.%d.ffn_gate", "blk.%d.ffn_up", "blk.%d.ffn_down", "blk.%d.ffn_gate_inp", NULL,
  "blk.%d.ffn_gate_exps", "blk.%d.ffn_up_exps", "blk.%d.ffn_down_exps",
  "blk.%d.ffn_gate_inp_shexp", NULL, "blk.%d.ffn_gate_shexp", "blk.%d.ffn_up_shexp",
  "blk.%d.ffn_down_shexp"};

static const tfmi_family tfmi_families[] = {
  {"gpt2", "gpt2", {"GPT2LMHeadModel", "GPT2Model"}, "transformer.", tfmi_gpt2_slots,
   tfmi_gpt2_keys, TFMI_LAYER_NORM | TFMI_CONV1D | TFMI_LAYER_SCALE,
   "activation_function", "gelu_new",
   {NULL, true}, {NULL, true}, {NULL, true}, {NULL, true}, {"tie_word_embeddings", true},
   {NULL, false}, {NULL, false, false, false}, 0, {{TFMI_N_LAYERS, 0}}},
  {"llama", "llama", {"LlamaForCausalLM", "LlamaModel"}, "model.", tfmi_llama_slots,
   tfmi_llama_keys, TFMI_GATED | TFMI_ROTARY | TFMI_PAIRS, "hidden_act", "silu",
   {"attention_bias", false}, {"attention_bias", false}, {"mlp_bias", false}, {"mlp_bias", false},
   {"tie_word_embeddings", false}, {NULL, false}, {NULL, false, false, false}, 0,
   {{TFMI_N_THETA, 10000}, {TFMI_N_ORIGINAL, 0}}},
  {"mistral", NULL, {"MistralForCausalLM", "MistralModel"}, "model.", tfmi_llama_slots,
   tfmi_llama_keys, TFMI_GATED | TFMI_ROTARY, "hidden_act", "silu",
   {NULL, false}, {NULL, false}, {NULL, false}, {NULL, false}, {"tie_word_embeddings", false},
   {NULL, false}, {NULL, false, false, false}, 0,
   {{TFMI_N_THETA, 10000}, {TFMI_N_ORIGINAL, 0}, {TFMI_N_WINDOW, 4096}}},
  {"qwen2", "qwen2", {"Qwen2ForCausalLM", "Qwen2Model"}, "model.", tfmi_llama_slots,
   tfmi_llama_keys, TFMI_GATED | TFMI_ROTARY, "hidden_act", "silu",
   {NULL, true}, {NULL, false}, {NULL, false}, {NULL, false}, {"tie_word_embeddings", false},
   {NULL, false}, {"use_sliding_window", true, false, true}, 0,
   {{TFMI_N_THETA, 10000}, {TFMI_N_ORIGINAL, 0}, {TFMI_N_WINDOW, 4096},
    {TFMI_N_WINDOW_LAYERS, 28}}},
  {"qwen3", "qwen3", {"Qwen3ForCausalLM", "Qwen3Model"}, "model.", tfmi_llama_slots,
   tfmi_llama_keys, TFMI_GATED | TFMI_ROTARY | TFMI_HEAD_NORMS, "hidden_act", "silu",
   {"attention_bias", false}, {"attention_bias", false}, {NULL, false}, {NULL, false},
   {"tie_word_embeddings", false}, {NULL, false}, {"use_sliding_window", true, false, true}, 0,
   {{TFMI_N_THETA, 10000}, {TFMI_N_ORIGINAL, 0}, {TFMI_N_WINDOW, 4096}, {TFMI_N_WINDOW_LAYERS, 28},
    {TFMI_N_HEAD_WIDTH, 128}}},
  {"gemma", "gemma", {"GemmaForCausalLM", "GemmaModel"}, "model.", tfmi_llama_slots,
   tfmi_llama_keys, TFMI_GATED | TFMI_ROTARY | TFMI_ONE_PLUS | TFMI_SCALED_EMBED,
   "hidden_act", "gelu_pytorch_tanh",
   {"attention_bias", false}, {"attention_bias", false}, {NULL, false}, {NULL, false},
   {"tie_word_embeddings", true}, {NULL, false}, {NULL, false, false, false}, 0,
   {{TFMI_N_THETA, 10000}, {TFMI_N_ORIGINAL, 0}, {TFMI_N_HEAD_WIDTH, 256}}},
  {"gemma2", "gemma2", {"Gemma2ForCausalLM", "Gemma2Model"}, "model.", tfmi_gemma2_slots,
   tfmi_llama_keys,
   TFMI_GATED | TFMI_ROTARY | TFMI_ONE_PLUS | TFMI_SCALED_EMBED | TFMI_POST_NORMS,
   "hidden_activation", "gelu_pytorch_tanh",
   {"attention_bias", false}, {"attention_bias", false}, {NULL, false}, {NULL, false},
   {"tie_word_embeddings", true}, {NULL, false}, {NULL, false, false, true}, 46,
   {{TFMI_N_THETA, 10000}, {TFMI_N_ORIGINAL, 0}, {TFMI_N_HEAD_WIDTH, 256}, {TFMI_N_WINDOW, 4096},
    {TFMI_N_WINDOW_EVERY, 2}, {TFMI_N_QUERY_SCALAR, 256}, {TFMI_N_ATTN_CAP, 50},
    {TFMI_N_LOGIT_CAP, 30}}},
  {"gemma3_text", "gemma3", {"Gemma3ForCausalLM", "Gemma3TextModel"}, "model.",
   tfmi_gemma2_slots, tfmi_llama_keys,
   TFMI_GATED | TFMI_ROTARY | TFMI_ONE_PLUS | TFMI_SCALED_EMBED | TFMI_POST_NORMS |
       TFMI_HEAD_NORMS,
   "hidden_activation", "gelu_pytorch_tanh",
   {"attention_bias", false}, {"attention_bias", false}, {NULL, false}, {NULL, false},
   {"tie_word_embeddings", true}, {NULL, false}, {NULL, false, false, true}, 62,
   {{TFMI_N_THETA, 1e6}, {TFMI_N_LOCAL_THETA, 10000}, {TFMI_N_ORIGINAL, 0},
    {TFMI_N_HEAD_WIDTH, 256}, {TFMI_N_WINDOW, 4096}, {TFMI_N_WINDOW_EVERY, 6},
    {TFMI_N_QUERY_SCALAR, 256}, {TFMI_N_LOGIT_CAP, 0}}},
  {"phi3", "phi3", {"Phi3ForCausalLM", "Phi3Model"}, "model.", tfmi_phi3_slots, tfmi_llama_keys,
   TFMI_GATED | TFMI_ROTARY | TFMI_LONGROPE, "hidden_act", "silu",
   {NULL, false}, {NULL, false}, {NULL, false}, {NULL, false}, {"tie_word_embeddings", false},
   {NULL, false}, {NULL, false, false, false}, 0,
   {{TFMI_N_THETA, 10000}, {TFMI_N_PARTIAL, 1}, {TFMI_N_ORIGINAL, 4096}, {TFMI_N_WINDOW, 0},
    {TFMI_N_EPS, 1e-5}}},
  {"mixtral", "llama", {"MixtralForCausalLM", "MixtralModel"}, "model.", tfmi_mixtral_slots,
   tfmi_llama_keys, TFMI_GATED | TFMI_ROTARY | TFMI_PAIRS | TFMI_MOE, "hidden_act", "silu",
   {NULL, false}, {NULL, false}, {NULL, false}, {NULL, false}, {"tie_word_embeddings", false},
   {NULL, true}, {NULL, false, false, false}, 0,
   {{TFMI_N_THETA, 1e6}, {TFMI_N_ORIGINAL, 0}, {TFMI_N_WINDOW, 0}, {TFMI_N_EPS, 1e-5},
    {TFMI_N_EXPERTS, 8}, {TFMI_N_EXPERTS_USED, 2}, {TFMI_N_BALANCE, 0.001}}},
  {"qwen2_moe", "qwen2moe", {"Qwen2MoeForCausalLM", "Qwen2MoeModel"}, "model.", tfmi_llama_slots,
   tfmi_llama_keys, TFMI_GATED | TFMI_ROTARY | TFMI_MOE | TFMI_SHARED, "hidden_act", "silu",
   {"qkv_bias", true}, {NULL, false}, {NULL, false}, {NULL, false},
   {"tie_word_embeddings", false}, {"norm_topk_prob", false},
   {"use_sliding_window", false, true, true}, 0,
   {{TFMI_N_THETA, 10000}, {TFMI_N_ORIGINAL, 0}, {TFMI_N_WINDOW, 4096}, {TFMI_N_WINDOW_LAYERS, 28},
    {TFMI_N_WINDOW_EVERY, 2}, {TFMI_N_EXPERTS, 60}, {TFMI_N_EXPERTS_USED, 4},
    {TFMI_N_EXPERT_FFN, 1408}, {TFMI_N_SHARED_FFN, 5632}, {TFMI_N_SPARSE_STEP, 1},
    {TFMI_N_BALANCE, 0.001}}},
  {"qwen3_moe", "qwen3moe", {"Qwen3MoeForCausalLM", "Qwen3MoeModel"}, "model.", tfmi_llama_slots,
   tfmi_llama_keys, TFMI_GATED | TFMI_ROTARY | TFMI_HEAD_NORMS | TFMI_MOE | TFMI_NORMALISED,
   "hidden_act", "silu",
   {"attention_bias", false}, {"attention_bias", false}, {NULL, false}, {NULL, false},
   {"tie_word_embeddings", false}, {"norm_topk_prob", false},
   {"use_sliding_window", false, false, false}, 0,
   {{TFMI_N_THETA, 10000}, {TFMI_N_ORIGINAL, 0}, {TFMI_N_WINDOW, 4096}, {TFMI_N_EXPERTS, 128},
    {TFMI_N_EXPERTS_USED, 8}, {TFMI_N_EXPERT_FFN, 768}, {TFMI_N_SPARSE_STEP, 1},
    {TFMI_N_BALANCE, 0.001}}},
  {"gpt2_moe", NULL, {"GPT2MoeLMHeadModel", "GPT2MoeModel"}, "transformer.", tfmi_gpt2_slots,
   tfmi_gpt2_keys,
   TFMI_LAYER_NORM | TFMI_CONV1D | TFMI_LAYER_SCALE | TFMI_MOE | TFMI_SOFTMAX_AFTER,
   "activation_function", "gelu_new",
   {NULL, true}, {NULL, true}, {NULL, true}, {NULL, true}, {"tie_word_embeddings", true},
   {NULL, true}, {NULL, false, false, false}, 0,
   {{TFMI_N_EXPERTS, 8}, {TFMI_N_EXPERTS_USED, 2}, {TFMI_N_EXPERT_FFN, 0}, {TFMI_N_SPARSE_STEP, 1},
    {TFMI_N_BALANCE, 0.001}}},
};

/* What config.json may say only so: nothing, null, false, or this number. A family that reads a
   key has its own bounds for it. Sub-objects' keys come behind a dot. */
static const struct tfmi_rule {
  const char *key;
  double only; /* NAN: no number */
} tfmi_rules[] = {
  {"is_encoder_decoder", NAN}, {"add_cross_attention", NAN},
  {"use_bidirectional_attention", NAN}, {"attention_bias", NAN}, {"qkv_bias", NAN},
  {"mlp_bias", NAN}, {"use_bias", NAN}, {"partial_rotary_factor", 1}, {"rotary_pct", 1},
  {"rope_parameters.partial_rotary_factor", 1}, {"rope_scaling.mrope_section", NAN},
  {"rope_parameters.mrope_section", NAN}, {"rope_parameters.full_attention", NAN},
  {"rope_parameters.sliding_attention", NAN}, {"rope_local_base_freq", NAN},
  {"rope_interleave", NAN}, {"no_rope_layers", NAN}, {"alibi", NAN},
  {"sliding_window", 0}, {"attention_chunk_size", NAN}, {"attention_sinks", NAN},
  {"attn_temperature_tuning", NAN}, {"query_pre_attn_scalar", NAN}, {"attention_multiplier", NAN},
  {"attn_logit_softcapping", 0}, {"final_logit_softcapping", 0}, {"logit_scale", 1},
  {"logits_scaling", 1}, {"embedding_multiplier", 1}, {"residual_multiplier", 1},
  {"qk_layernorm", NAN}, {"use_qk_norm", NAN}, {"qk_norm", NAN}, {"clip_qkv", NAN},
  {"parallel_attn", NAN}, {"use_parallel_residual", NAN}, {"num_experts", 0},
  {"num_local_experts", 0}, {"n_routed_experts", 0}, {"n_shared_experts", 0},
  {"n_group", 1}, {"first_k_dense_replace", 0}, {"shared_expert_intermediate_size", 0},
  {"norm_topk_prob", NAN}, {"routed_scaling_factor", 1}, {"num_nextn_predict_layers", 0},
};

static const tfmi_key tfmi_gguf_neutral[] = { /* likewise in GGUF, for every family */
  {{NULL, NULL}, "rope.scale_linear", false, 1, 1, 1},
  {{NULL, NULL}, "attention.scale", false, 0, 0, 0},
  {{NULL, NULL}, "attention.key_length_mla", false, 0, 0, 0},
  {{NULL, NULL}, "logit_scale", false, 1, 1, 1},
  {{NULL, NULL}, "embedding_scale", false, 1, 1, 1},
  {{NULL, NULL}, "residual_scale", false, 1, 1, 1},
  {{NULL, NULL}, "expert_weights_scale", false, 1, 1, 1},
  {{NULL, NULL}, "expert_gating_func", true, 1, 1, 1}, /* a softmax */
  {{NULL, NULL}, "leading_dense_block_count", true, 0, 0, 0},
};

static const struct tfmi_act_name {
  const char *name;
  tfm_act act;
} tfmi_acts[] = {
  {"gelu_new", TFM_ACT_GELU_TANH}, {"gelu_pytorch_tanh", TFM_ACT_GELU_TANH},
  {"gelu", TFM_ACT_GELU}, {"relu", TFM_ACT_RELU}, {"silu", TFM_ACT_SILU}, {"swish", TFM_ACT_SILU},
};

static bool tfmi_has(const tfmi_family *f, unsigned what) { return (f->is & what) == what; }

/* ---- Settings by name ---- */

static const tfmi_setting *tfmi_setting_at(const tfmi_settings *s, const char *key) {
  tfmi_text name = tfmi_text_of(key);
  uint64_t low = 0, high = s->count;
  while (low < high) {
    uint64_t middle = low + (high - low) / 2;
    int order = tfmi_text_order(name, s->at[middle].key);
    if (order == 0) return &s->at[middle];
    if (order < 0) high = middle;
    else low = middle + 1;
  }
  return NULL;
}

/* NULL when absent or null, which nearly always mean the same in a config.json. */
static const tfmi_setting *tfmi_setting_find(const tfmi_settings *s, const char *key) {
  const tfmi_setting *v = tfmi_setting_at(s, key);
  return v && v->kind != TFMI_JSON_NULL ? v : NULL;
}

static bool tfmi_setting_null(const tfmi_settings *s, const char *key) {
  const tfmi_setting *v = tfmi_setting_at(s, key);
  return v && v->kind == TFMI_JSON_NULL;
}

static tfmi_json tfmi_setting_json(const tfmi_source *s, const tfmi_setting *v,
                                   tfmi_json_kind kind) {
  static const char *const names[] = {"an object", "an array", "text", "a number", "true or false",
                                      "true or false", "null"};
  tfmi_json_kind found = v->kind == TFMI_JSON_FALSE ? TFMI_JSON_TRUE : v->kind;
  tfmi_json j;
  if (found != kind)
    tfmi_fail(s->load, TFM_E_FORMAT, "config.json: %s is %s, expected %s",
              tfmi_plain(v->key).text, names[found], names[kind]);
  tfmi_json_init(&j, s->load, "config.json", v->value.at, v->value.n);
  return j;
}

static bool tfmi_setting_number(const tfmi_source *s, const char *key, bool whole, double *out) {
  const tfmi_setting *v = tfmi_setting_find(&s->config, key);
  tfmi_json j;
  if (!v) return false;
  j = tfmi_setting_json(s, v, TFMI_JSON_NUMBER);
  *out = tfmi_json_number(&j);
  if (whole && (*out != floor(*out) || memchr(v->value.at, '.', v->value.n)))
    tfmi_fail(s->load, TFM_E_FORMAT, "config.json: %s is %s, expected a whole number", key,
              tfmi_plain(v->value).text);
  return true;
}

static bool tfmi_setting_text(const tfmi_source *s, const char *key, tfmi_text *out) {
  const tfmi_setting *v = tfmi_setting_find(&s->config, key);
  tfmi_json j;
  if (!v) return false;
  j = tfmi_setting_json(s, v, TFMI_JSON_STRING);
  *out = tfmi_json_string(&j);
  return true;
}

static bool tfmi_setting_flag(const tfmi_source *s, const char *key, bool fallback) {
  const tfmi_setting *v = tfmi_setting_find(&s->config, key);
  tfmi_json j;
  if (!v) return fallback;
  j = tfmi_setting_json(s, v, TFMI_JSON_TRUE);
  return tfmi_json_bool(&j);
}

static bool tfmi_gguf_number(const tfmi_source *s, const char *key, bool whole, double *out) {
  int64_t n;
  if (!whole) return tfmi_gguf_get_real(s->gguf, key, out);
  if (!tfmi_gguf_get_int(s->gguf, key, &n)) return false;
  *out = (double)n;
  return true;
}

/* A key's number wherever it is told, checked. */
static double tfmi_key_number(const tfmi_source *s, const tfmi_family *f, const tfmi_key *k,
                              double fallback) {
  char name[160];
  double value = fallback;
  bool there = false;
  int i;
  if (s->gguf && k->gguf) {
    snprintf(name, sizeof name, "%s.%s", f->gguf, k->gguf);
    there = tfmi_gguf_number(s, name, k->whole, &value);
  }
  for (i = 0; !s->gguf && !there && i < 2 && k->hf[i]; i++) {
    snprintf(name, sizeof name, "%s", k->hf[i]);
    there = tfmi_setting_number(s, name, k->whole, &value);
    if (!there && k->low == 0 && tfmi_setting_null(&s->config, name)) return 0;
  }
  if (!there && isnan(value))
    tfmi_fail(s->load, TFM_E_FORMAT, "%s is missing", s->gguf ? name : k->hf[0]);
  if (there && !(value >= k->low && value <= k->high))
    tfmi_fail(s->load, TFM_E_FORMAT, "%s is %g, expected %g to %g", name, value, k->low, k->high);
  return value;
}

/* What the family says of a quantity beside the common ones; NULL: nothing. */
static const tfmi_said *tfmi_family_said(const tfmi_family *f, tfmi_quantity what) {
  int i;
  for (i = 0; f->said[i].what != TFMI_N_LAYERS; i++)
    if (f->said[i].what == what) return &f->said[i];
  return NULL;
}

/* A number of the model; 0 where its family has no such thing. */
static double tfmi_number(const tfmi_source *s, const tfmi_family *f, tfmi_quantity what) {
  const tfmi_said *said = tfmi_family_said(f, what);
  if (!said && what > TFMI_N_EPS) return 0;
  return tfmi_key_number(s, f, &f->key[what], said ? said->fallback : f->key[what].fallback);
}

static int32_t tfmi_whole(const tfmi_source *s, const tfmi_family *f, tfmi_quantity what) {
  return (int32_t)tfmi_number(s, f, what);
}

/* ---- Which family ---- */

static const tfmi_family *tfmi_family_named(tfmi_text name) {
  int i;
  for (i = 0; i < TFMI_COUNT(tfmi_families); i++)
    if (tfmi_text_is(name, tfmi_families[i].name)) return &tfmi_families[i];
  return NULL;
}

/* GGUF has one architecture for a family with and without experts. */
static const tfmi_family *tfmi_family_of_gguf(const tfmi_source *s, tfmi_text name) {
  char key[96];
  int64_t experts = 0;
  int i;
  snprintf(key, sizeof key, "%.*s.expert_count", (int)(name.n < 64 ? name.n : 64), name.at);
  if (name.n < 64) tfmi_gguf_get_int(s->gguf, key, &experts);
  for (i = 0; i < TFMI_COUNT(tfmi_families); i++) {
    const tfmi_family *f = &tfmi_families[i];
    if (f->gguf && tfmi_text_is(name, f->gguf) && tfmi_has(f, TFMI_MOE) == (experts > 0)) return f;
  }
  return NULL;
}

static const tfmi_family *tfmi_family_of_class(tfmi_text name) {
  int i, k;
  for (i = 0; i < TFMI_COUNT(tfmi_families); i++)
    for (k = 0; k < 2; k++)
      if (tfmi_text_is(name, tfmi_families[i].classes[k])) return &tfmi_families[i];
  return NULL;
}

static TFMI_NORETURN void tfmi_refuse(const tfmi_source *s, const char *what, tfmi_text name) {
  char known[256] = "";
  size_t n = 0;
  int i;
  for (i = 0; i < TFMI_COUNT(tfmi_families) && n < sizeof known; i++)
    n += (size_t)snprintf(known + n, sizeof known - n, "%s%s", i ? ", " : "",
                          tfmi_families[i].name);
  tfmi_fail(s->load, TFM_E_UNSUPPORTED, "%s \"%s\" is not supported; expected %s", what,
            tfmi_plain(name).text, known);
}

/* By model_type, or where that is missing by architectures; these must agree. */
static const tfmi_family *tfmi_family_find(const tfmi_source *s) {
  const tfmi_setting *v = tfmi_setting_find(&s->config, "architectures");
  const tfmi_family *f = NULL, *by_class = NULL;
  tfmi_text name;
  tfmi_json j;
  if (s->gguf) {
    if (!tfmi_gguf_get_text(s->gguf, "general.architecture", &name))
      tfmi_fail(s->load, TFM_E_FORMAT, "key general.architecture is missing");
    f = tfmi_family_of_gguf(s, name);
    if (!f) tfmi_refuse(s, "architecture", name);
    return f;
  }
  if (tfmi_setting_text(s, "model_type", &name)) {
    f = tfmi_family_named(name);
    if (!f) tfmi_refuse(s, "model_type", name);
  }
  if (v) {
    j = tfmi_setting_json(s, v, TFMI_JSON_ARRAY);
    tfmi_json_array(&j);
    while (tfmi_json_element(&j)) {
      name = tfmi_json_string(&j);
      by_class = tfmi_family_of_class(name);
      if (!by_class || (f && by_class != f)) tfmi_refuse(s, "architecture", name);
    }
  }
  if (!f && !by_class)
    tfmi_fail(s->load, TFM_E_FORMAT, "config.json: model_type is missing");
  return f ? f : by_class;
}

/* ---- What is refused ---- */

/* Whether the family gives a key of config.json a meaning of its own. */
static bool tfmi_family_reads(const tfmi_family *f, const char *key) {
  const tfmi_flag *flags[] = {&f->qkv_bias, &f->out_bias, &f->up_bias,
                              &f->down_bias, &f->tied, &f->normalise};
  int i, k;
  if (strncmp(key, "rope_parameters.", 16) == 0) {
    key += 16;
    if (strstr(key, "_attention")) return tfmi_family_said(f, TFMI_N_LOCAL_THETA) != NULL;
  }
  for (i = 0; i < TFMI_COUNT(flags); i++)
    if (flags[i]->key && strcmp(flags[i]->key, key) == 0) return true;
  for (i = 0; i < TFMI_QUANTITIES; i++)
    for (k = 0; k < 2 && (i <= TFMI_N_EPS || tfmi_family_said(f, (tfmi_quantity)i)); k++)
      if (f->key[i].hf[k] && strcmp(f->key[i].hf[k], key) == 0) return true;
  return false;
}

static void tfmi_rule_check(const tfmi_source *s, const struct tfmi_rule *rule) {
  const tfmi_setting *v = tfmi_setting_find(&s->config, rule->key);
  double value;
  if (!v || v->kind == TFMI_JSON_FALSE) return;
  if (v->kind == TFMI_JSON_NUMBER && tfmi_setting_number(s, rule->key, false, &value) &&
      value == rule->only)
    return;
  tfmi_fail(s->load, TFM_E_UNSUPPORTED, "config.json: %s is %s, which is not supported", rule->key,
            tfmi_plain(v->value).text);
}

/* Of the ways to quantise, those whose weights are F8 with scales beside them. */
static void tfmi_quantization_check(const tfmi_source *s) {
  static const char *const known[] = {"fp8", "fbgemm_fp8", "compressed-tensors"};
  const char *key = "quantization_config.quant_method";
  const tfmi_setting *v = tfmi_setting_find(&s->config, "quantization_config");
  tfmi_text method = {NULL, 0};
  int i;
  if (!v || v->kind == TFMI_JSON_FALSE) return;
  tfmi_setting_text(s, key, &method);
  for (i = 0; i < TFMI_COUNT(known); i++)
    if (tfmi_text_is(method, known[i])) return;
  tfmi_fail(s->load, TFM_E_UNSUPPORTED, "config.json: %s is \"%s\", expected fp8, fbgemm_fp8 or "
            "compressed-tensors; or weights that are not quantised", key, tfmi_plain(method).text);
}

static void tfmi_family_check(const tfmi_source *s, const tfmi_family *f) {
  int i;
  if (!s->gguf) tfmi_quantization_check(s);
  for (i = 0; !s->gguf && i < TFMI_COUNT(tfmi_rules); i++)
    if (!tfmi_family_reads(f, tfmi_rules[i].key)) tfmi_rule_check(s, &tfmi_rules[i]);
  for (i = 0; s->gguf && i < TFMI_COUNT(tfmi_gguf_neutral); i++)
    tfmi_key_number(s, f, &tfmi_gguf_neutral[i], tfmi_gguf_neutral[i].fallback);
}

/* ---- The shape of the network ---- */

static void tfmi_net_heads(const tfmi_source *s, const tfmi_family *f, tfm_net *net) {
  net->heads = tfmi_whole(s, f, TFMI_N_HEADS);
  net->kv_heads = tfmi_whole(s, f, TFMI_N_KV_HEADS);
  net->head_width = tfmi_whole(s, f, TFMI_N_HEAD_WIDTH);
  if (net->kv_heads == 0) net->kv_heads = net->heads;
  if (net->head_width == 0 && net->width % net->heads)
    tfmi_fail(s->load, TFM_E_FORMAT, "width %d is not divisible by %d heads", (int)net->width,
              (int)net->heads);
  if (net->head_width == 0) net->head_width = net->width / net->heads;
  if (net->heads % net->kv_heads)
    tfmi_fail(s->load, TFM_E_FORMAT, "%d heads are not divisible by %d key/value heads",
              (int)net->heads, (int)net->kv_heads);
  if ((double)net->heads * net->head_width > TFMI_BIG)
    tfmi_fail(s->load, TFM_E_FORMAT, "%d heads of width %d are wider than 2^24", (int)net->heads,
              (int)net->head_width);
}

static tfm_act tfmi_net_act(const tfmi_source *s, const tfmi_family *f) {
  tfmi_text name = tfmi_text_of(f->act);
  int i;
  if (!s->gguf) tfmi_setting_text(s, f->act_key, &name);
  for (i = 0; i < TFMI_COUNT(tfmi_acts); i++)
    if (tfmi_text_is(name, tfmi_acts[i].name)) return tfmi_acts[i].act;
  tfmi_fail(s->load, TFM_E_UNSUPPORTED, "config.json: %s \"%s\" is not supported", f->act_key,
            tfmi_plain(name).text);
}

/* The scale of the scores of one layer. */
static float tfmi_net_attn_scale(const tfmi_source *s, const tfmi_family *f, const tfm_net *net,
                                 int32_t layer) {
  double scalar = tfmi_number(s, f, TFMI_N_QUERY_SCALAR), scale;
  if (scalar == 0 || s->gguf) scalar = net->head_width;
  if (s->gguf && f->wide_layers == net->layers) scalar = net->width / net->heads;
  scale = 1.0 / sqrt(scalar);
  if (tfmi_has(f, TFMI_LAYER_SCALE)) {
    if (!tfmi_setting_flag(s, "scale_attn_weights", true)) scale = 1;
    if (tfmi_setting_flag(s, "scale_attn_by_inverse_layer_idx", false)) scale /= layer + 1;
  }
  return (float)scale;
}

/* Rounded to the type that the model was trained in, as transformers does with its weights. */
static float tfmi_net_embed_scale(const tfmi_source *s, const tfmi_family *f, const tfm_net *net,
                                  const tfmi_tensor *embed) {
  float scale = (float)sqrt((double)net->width);
  tfmi_text type = tfmi_text_of(s->gguf ? "float32" : embed->type == TFM_F16 ? "float16"
                                : embed->type == TFM_BF16 ? "bfloat16" : "float32");
  if (!tfmi_has(f, TFMI_SCALED_EMBED)) return 0;
  tfmi_setting_text(s, "torch_dtype", &type);
  tfmi_setting_text(s, "dtype", &type);
  if (tfmi_text_is(type, "bfloat16")) return tfmi_from_bf16(tfmi_to_bf16(scale));
  if (tfmi_text_is(type, "float16")) return tfmi_from_f16(tfmi_to_f16(scale));
  return scale;
}

/* ---- Windows ---- */

static bool tfmi_windows_at(const tfmi_source *s, const tfmi_family *f, int32_t layer) {
  int32_t every = tfmi_whole(s, f, TFMI_N_WINDOW_EVERY);
  int32_t last = tfmi_whole(s, f, TFMI_N_WINDOW_LAYERS);
  return (!f->windows.from || layer >= last) && (!f->windows.until || layer < last) &&
         (every == 0 || (layer + 1) % every != 0);
}

/* layer_types names every layer; where the family does not read it, it must say what is done. */
static void tfmi_windows_named(const tfmi_source *s, const tfmi_family *f, tfm_net *net,
                               int32_t window) {
  const tfmi_setting *v = tfmi_setting_find(&s->config, "layer_types");
  tfmi_json j;
  int32_t i;
  if (!v) return;
  j = tfmi_setting_json(s, v, TFMI_JSON_ARRAY);
  tfmi_json_array(&j);
  for (i = 0; tfmi_json_element(&j); i++) {
    tfmi_text type = tfmi_json_string(&j);
    bool sliding = tfmi_text_is(type, "sliding_attention");
    if (i == net->layers) {
      i++;
      break;
    }
    if ((!sliding && !tfmi_text_is(type, "full_attention")) || (sliding && window == 0) ||
        (!f->windows.types && sliding != (net->layer[i].attn.window != 0)))
      tfmi_fail(s->load, TFM_E_UNSUPPORTED, "config.json: layer_types has \"%s\" for layer %d, "
                "which is not supported with a sliding_window of %d", tfmi_plain(type).text, (int)i,
                (int)window);
    net->layer[i].attn.window = sliding ? window : 0;
  }
  if (i != net->layers)
    tfmi_fail(s->load, TFM_E_FORMAT, "config.json: layer_types does not name the %d layers",
              (int)net->layers);
}

static void tfmi_windows_of(const tfmi_source *s, const tfmi_family *f, tfm_net *net) {
  bool use = !f->windows.use || (!s->gguf && tfmi_setting_flag(s, f->windows.use, false));
  bool told = !s->gguf || !tfmi_has(f, TFMI_PAIRS); /* its "llama" has no windows */
  int32_t window = use && told ? tfmi_whole(s, f, TFMI_N_WINDOW) : 0, i;
  for (i = 0; i < net->layers; i++)
    net->layer[i].attn.window = tfmi_windows_at(s, f, i) ? window : 0;
  if (!s->gguf) tfmi_windows_named(s, f, net, window);
}

/* ---- Experts ---- */

static void tfmi_net_experts(const tfmi_source *s, const tfmi_family *f, tfm_net *net) {
  if (!tfmi_has(f, TFMI_MOE)) return;
  net->experts = net->moe.experts = tfmi_whole(s, f, TFMI_N_EXPERTS);
  net->experts_used = net->moe.top_k = tfmi_whole(s, f, TFMI_N_EXPERTS_USED);
  net->expert_width = tfmi_whole(s, f, TFMI_N_EXPERT_FFN);
  if (net->expert_width == 0) net->expert_width = net->ffn_width;
  net->moe.softmax_after = tfmi_has(f, TFMI_SOFTMAX_AFTER);
  net->moe.normalise = f->normalise.fallback || (s->gguf && (f->is & TFMI_NORMALISED));
  if (f->normalise.key && !s->gguf)
    net->moe.normalise = tfmi_setting_flag(s, f->normalise.key, f->normalise.fallback);
  if (net->experts_used > net->experts)
    tfmi_fail(s->load, TFM_E_FORMAT, "%d experts of %d are used by each token, expected at most "
              "all", (int)net->experts_used, (int)net->experts);
}

/* Whether config.json gives a layer experts, or a feed-forward like any other model's. */
static bool tfmi_is_sparse(const tfmi_source *s, const tfmi_family *f, int32_t layer) {
  const tfmi_setting *v = tfmi_setting_find(&s->config, "mlp_only_layers");
  int32_t step = tfmi_whole(s, f, TFMI_N_SPARSE_STEP);
  bool sparse = step == 0 || (layer + 1) % step == 0;
  tfmi_json j;
  if (!tfmi_has(f, TFMI_MOE)) return false;
  if (!v || step == 0) return sparse;
  j = tfmi_setting_json(s, v, TFMI_JSON_ARRAY);
  tfmi_json_array(&j);
  while (tfmi_json_element(&j))
    if (tfmi_json_integer(&j, 0, INT32_MAX) == layer) sparse = false;
  return sparse;
}

static void tfmi_net_shape(const tfmi_source *s, const tfmi_family *f, tfm_net *net) {
  int32_t i;
  net->layers = tfmi_whole(s, f, TFMI_N_LAYERS);
  net->width = tfmi_whole(s, f, TFMI_N_WIDTH);
  tfmi_net_heads(s, f, net);
  net->ffn_width = tfmi_whole(s, f, TFMI_N_FFN);
  if (net->ffn_width == 0) net->ffn_width = 4 * net->width;
  net->vocabulary = tfmi_whole(s, f, TFMI_N_VOCABULARY);
  net->context = tfmi_whole(s, f, TFMI_N_CONTEXT);
  net->norm.kind = tfmi_has(f, TFMI_LAYER_NORM) ? TFM_NORM_LAYER : TFM_NORM_RMS;
  net->norm.eps = (float)tfmi_number(s, f, TFMI_N_EPS);
  net->norm.offset = tfmi_has(f, TFMI_ONE_PLUS) && !s->gguf ? 1.0f : 0.0f;
  net->head_norm = net->norm;
  net->act = tfmi_net_act(s, f);
  net->gated = tfmi_has(f, TFMI_GATED);
  net->logit_softcap = (float)tfmi_number(s, f, TFMI_N_LOGIT_CAP);
  tfmi_net_experts(s, f, net);
  net->layer = TFMI_NEW(tfm_layer, tfmi_keep(s->load, (uint64_t)net->layers, sizeof *net->layer));
  for (i = 0; i < net->layers; i++) {
    net->layer[i].attn.heads = net->heads;
    net->layer[i].attn.scale = tfmi_net_attn_scale(s, f, net, i);
    net->layer[i].attn.softcap = (float)tfmi_number(s, f, TFMI_N_ATTN_CAP);
  }
  tfmi_windows_of(s, f, net);
}

/* ---- Rotation ---- */

typedef struct tfmi_rope_reader { /* where one rotation is described */
  const tfmi_source *s;
  const tfmi_family *f;
  const char *group; /* the object of config.json */
  const tfm_net *net;
  tfmi_rotation *r;
} tfmi_rope_reader;

/* "rope_scaling.factor", "rope_parameters.full_attention.factor". fallback NAN: must be there. */
static double tfmi_rope_number(const tfmi_rope_reader *x, const char *name, const char *gguf,
                               double low, double fallback) {
  tfmi_key key = {{NULL, NULL}, NULL, false, 0, 1e12, 0};
  char path[128];
  snprintf(path, sizeof path, "%s.%s", x->group, name);
  key.hf[0] = path;
  key.gguf = gguf;
  key.low = low;
  return tfmi_key_number(x->s, x->f, &key, fallback);
}

/* The context that the scaling starts from: beside the object, in it, or the whole context. */
static double tfmi_rope_original(const tfmi_rope_reader *x) {
  double outside = tfmi_number(x->s, x->f, TFMI_N_ORIGINAL);
  double inside = tfmi_rope_number(x, "original_max_position_embeddings", NULL, 2, 0);
  bool told = tfmi_setting_find(&x->s->config, "original_max_position_embeddings") != NULL;
  if ((told || x->s->gguf || inside == 0) && outside > 0) return outside;
  return inside > 0 ? inside : fmax(x->net->context, 2);
}

static void tfmi_rope_linear(const tfmi_rope_reader *x) {
  x->r->factor = tfmi_rope_number(x, "factor", "rope.scaling.factor", 1e-6, NAN);
}

static void tfmi_rope_llama3(const tfmi_rope_reader *x) {
  tfmi_rotation *r = x->r;
  r->factor = tfmi_rope_number(x, "factor", NULL, 1e-6, NAN);
  r->low = tfmi_rope_number(x, "low_freq_factor", NULL, 1e-6, NAN);
  r->high = tfmi_rope_number(x, "high_freq_factor", NULL, 1e-6, NAN);
  r->original = tfmi_rope_original(x);
  if (r->low >= r->high)
    tfmi_fail(x->s->load, TFM_E_FORMAT, "config.json: %s.low_freq_factor is %g, expected less than "
              "high_freq_factor, which is %g", x->group, r->low, r->high);
}

static double tfmi_rope_mscale(double factor, double scale) {
  return factor > 1 ? 0.1 * scale * log(factor) + 1 : 1;
}

static void tfmi_rope_yarn(const tfmi_rope_reader *x) {
  tfmi_rotation *r = x->r;
  char path[128];
  double one, all;
  r->original = tfmi_rope_original(x);
  r->factor = tfmi_rope_number(x, "factor", "rope.scaling.factor", 1e-6,
                               x->net->context / r->original);
  r->high = tfmi_rope_number(x, "beta_fast", "rope.scaling.yarn_beta_fast", 0, 32);
  r->low = tfmi_rope_number(x, "beta_slow", "rope.scaling.yarn_beta_slow", 0, 1);
  if (r->high == 0) r->high = 32;
  if (r->low == 0) r->low = 1;
  one = tfmi_rope_number(x, "mscale", NULL, 0, 0);
  all = tfmi_rope_number(x, "mscale_all_dim", NULL, 0, 0);
  r->scale = one != 0 && all != 0
                 ? tfmi_rope_mscale(r->factor, one) / tfmi_rope_mscale(r->factor, all)
                 : tfmi_rope_mscale(r->factor, 1);
  if (x->s->gguf) r->scale *= tfmi_rope_number(x, "", "rope.scaling.attn_factor", 1e-6, 1);
  else r->scale = tfmi_rope_number(x, "attention_factor", NULL, 1e-6, r->scale);
  snprintf(path, sizeof path, "%s.truncate", x->group);
  r->truncate = x->s->gguf || tfmi_setting_flag(x->s, path, true);
}

/* An array of rot/2 divisors, kept with the model. */
static const float *tfmi_rope_divisors(const tfmi_rope_reader *x, const char *name) {
  const tfmi_setting *v;
  int32_t half = x->r->rot / 2, i;
  char path[128];
  float *out;
  tfmi_json j;
  snprintf(path, sizeof path, "%s.%s", x->group, name);
  v = tfmi_setting_find(&x->s->config, path);
  if (!v) tfmi_fail(x->s->load, TFM_E_FORMAT, "config.json: %s is missing", path);
  out = TFMI_NEW(float, tfmi_keep(x->s->load, (uint64_t)half, sizeof *out));
  j = tfmi_setting_json(x->s, v, TFMI_JSON_ARRAY);
  tfmi_json_array(&j);
  for (i = 0; tfmi_json_element(&j); i++) {
    double value = tfmi_json_number(&j);
    if (!(value > 1e-6 && value < 1e12) || i >= half)
      tfmi_fail(x->s->load, TFM_E_FORMAT, "config.json: %s has %g at %d, expected %d numbers above "
                "0", path, value, (int)i, (int)half);
    out[i] = (float)value;
  }
  if (i != half)
    tfmi_fail(x->s->load, TFM_E_FORMAT, "config.json: %s has %d numbers, expected %d", path, (int)i,
              (int)half);
  return out;
}

static void tfmi_rope_longrope(const tfmi_rope_reader *x) {
  tfmi_rotation *r = x->r;
  r->original = tfmi_rope_original(x);
  r->factor = tfmi_rope_number(x, "factor", "rope.scaling.factor", 1e-6,
                               x->net->context / r->original);
  if (r->factor > 1 && !x->s->gguf) r->scale = sqrt(1 + log(r->factor) / log(r->original));
  r->scale = tfmi_rope_number(x, "attention_factor", "rope.scaling.attn_factor", 1e-6, r->scale);
  if (x->s->gguf) return; /* tensors */
  r->divisor[0] = tfmi_rope_divisors(x, "short_factor");
  r->divisor[1] = tfmi_rope_divisors(x, "long_factor");
}

static const struct tfmi_rope_kind_row {
  const char *name;
  tfmi_rope_kind kind;
  void (*read)(const tfmi_rope_reader *x);
} tfmi_rope_kinds[] = {
  {"default", TFMI_ROPE_DEFAULT, NULL}, {"none", TFMI_ROPE_DEFAULT, NULL}, /* GGUF's */
  {"linear", TFMI_ROPE_LINEAR, tfmi_rope_linear}, {"dynamic", TFMI_ROPE_DYNAMIC, tfmi_rope_linear},
  {"llama3", TFMI_ROPE_LLAMA3, tfmi_rope_llama3}, {"yarn", TFMI_ROPE_YARN, tfmi_rope_yarn},
  {"longrope", TFMI_ROPE_LONG, tfmi_rope_longrope}, {"su", TFMI_ROPE_LONG, tfmi_rope_longrope},
};

/* The name of the scaling: before transformers 4.43 it was "type". */
static tfmi_text tfmi_rope_type(const tfmi_rope_reader *x) {
  tfmi_text type = tfmi_text_of("default");
  char path[128];
  if (x->s->gguf) {
    snprintf(path, sizeof path, "%s.rope.scaling.type", x->f->gguf);
    if (tfmi_gguf_get_text(x->s->gguf, path, &type)) return type;
    if (tfmi_tensor_find(x->s, tfmi_text_of("rope_factors_long.weight")))
      return tfmi_text_of("longrope"); /* which files do not always name */
    return tfmi_rope_number(x, "", "rope.scaling.factor", 1e-6, 1) != 1 ? tfmi_text_of("linear")
                                                                        : type;
  }
  snprintf(path, sizeof path, "%s.type", x->group);
  tfmi_setting_text(x->s, path, &type);
  snprintf(path, sizeof path, "%s.rope_type", x->group);
  tfmi_setting_text(x->s, path, &type);
  return type;
}

static void tfmi_rope_scaling(const tfmi_rope_reader *x) {
  tfmi_text type = tfmi_rope_type(x);
  int i;
  if (tfmi_has(x->f, TFMI_LONGROPE) && tfmi_text_is(type, "yarn")) type = tfmi_text_of("longrope");
  for (i = 0; i < TFMI_COUNT(tfmi_rope_kinds); i++)
    if (tfmi_text_is(type, tfmi_rope_kinds[i].name)) break;
  if (i == TFMI_COUNT(tfmi_rope_kinds) ||
      (tfmi_has(x->f, TFMI_LONGROPE) && tfmi_rope_kinds[i].read &&
       tfmi_rope_kinds[i].kind != TFMI_ROPE_LONG))
    tfmi_fail(x->s->load, TFM_E_UNSUPPORTED, "rope type \"%s\" is not supported; default, linear, "
              "dynamic, llama3, yarn and longrope are, where the family has them",
              tfmi_plain(type).text);
  x->r->kind = tfmi_rope_kinds[i].kind;
  if (tfmi_rope_kinds[i].read) tfmi_rope_kinds[i].read(x);
}

/* How many of a head's values turn. GGUF says it as a number of them. */
static int32_t tfmi_rope_rot(const tfmi_rope_reader *x) {
  tfmi_key dimensions = {{NULL, NULL}, "rope.dimension_count", true, 0, 0, 0};
  bool partial = tfmi_family_said(x->f, TFMI_N_PARTIAL) != NULL;
  int32_t width = x->net->head_width, rot = width;
  double share = tfmi_number(x->s, x->f, TFMI_N_PARTIAL);
  dimensions.low = partial ? 2 : width;
  dimensions.high = width;
  if (x->s->gguf) rot = (int32_t)tfmi_key_number(x->s, x->f, &dimensions, width);
  else if (partial) {
    share = tfmi_rope_number(x, "partial_rotary_factor", NULL, 1e-3, share);
    rot = (int32_t)(width * (share < 1 ? share : 1));
  }
  if (rot % 2 || rot == 0)
    tfmi_fail(x->s->load, TFM_E_FORMAT, "%d values of the head width %d are odd, expected pairs to "
              "rotate", (int)rot, (int)width);
  return rot;
}

static tfmi_rotation tfmi_rotation_read(const tfmi_source *s, const tfmi_family *f,
                                        const tfm_net *net, const char *group, double theta) {
  tfmi_rotation r;
  tfmi_rope_reader x;
  memset(&r, 0, sizeof r);
  x.s = s;
  x.f = f;
  x.group = group;
  x.net = net;
  x.r = &r;
  r.scale = 1;
  r.trained = net->context;
  r.theta = tfmi_rope_number(&x, "rope_theta", NULL, 1e-3, theta);
  r.rot = tfmi_rope_rot(&x);
  tfmi_rope_scaling(&x);
  return r;
}

/* The object of config.json that describes the rotation of full attention; "" for none. */
static const char *tfmi_rope_group(const tfmi_source *s, const tfmi_family *f) {
  static const char *const names[] = {"rope_parameters.full_attention", "rope_parameters",
                                      "rope_scaling"};
  const tfmi_setting *older = tfmi_setting_find(&s->config, "rope_scaling");
  const tfmi_setting *v = tfmi_setting_find(&s->config, "rope_parameters");
  int i;
  if (older && v)
    tfmi_fail(s->load, TFM_E_UNSUPPORTED, "config.json: rope_scaling and rope_parameters are "
              "both there, expected one; remove the other");
  for (i = tfmi_family_said(f, TFMI_N_LOCAL_THETA) ? 0 : 1; i < TFMI_COUNT(names); i++) {
    v = tfmi_setting_find(&s->config, names[i]);
    if (!v) continue;
    tfmi_setting_json(s, v, TFMI_JSON_OBJECT); /* it is one */
    return names[i];
  }
  return "";
}

/* [0] of layers that see all, [1] of those that see a window, where these have their own. */
static void tfmi_rotations(const tfmi_source *s, const tfmi_family *f, tfm_net *net,
                           tfmi_rotation *r) {
  tfmi_key values = {{NULL, NULL}, "attention.value_length", true, 0, 0, 0};
  double theta = tfmi_number(s, f, TFMI_N_THETA), local = tfmi_number(s, f, TFMI_N_LOCAL_THETA);
  int32_t i;
  values.low = values.high = net->head_width;
  if (s->gguf) tfmi_key_number(s, f, &values, net->head_width);
  r[0] = r[1] = tfmi_rotation_read(s, f, net, tfmi_rope_group(s, f), theta);
  if (local != 0) {
    r[1] = tfmi_rotation_read(s, f, net, "rope_parameters.sliding_attention", local);
    if (s->gguf) r[1].kind = TFMI_ROPE_DEFAULT; /* only full attention is scaled there */
  }
  for (i = 0; i < net->layers; i++) {
    tfm_rope *rope = &net->layer[i].rope;
    const tfmi_rotation *own = &r[net->layer[i].attn.window != 0];
    rope->head_width = net->head_width;
    rope->rot = own->rot;
    rope->interleaved = s->interleaved && (!s->gguf || tfmi_has(f, TFMI_PAIRS));
    rope->scale = (float)own->scale;
  }
  if (r[0].kind == TFMI_ROPE_DYNAMIC) /* made for more than it was trained on */
    net->context = (int32_t)fmin(net->context * r[0].factor, TFMI_BIG);
}

/* Step by step in float32, as transformers has it (_compute_llama3_parameters). */
static float tfmi_rotation_llama3(const tfmi_rotation *r, float frequency) {
  float wavelength = (float)(2 * 3.14159265358979323846) / frequency, smooth, scaled;
  scaled = frequency / (float)r->factor;
  if (wavelength > (float)(r->original / r->low)) return scaled;
  if (wavelength < (float)(r->original / r->high)) return frequency;
  smooth = ((float)r->original / wavelength - (float)r->low) / (float)(r->high - r->low);
  return (1.0f - smooth) * frequency / (float)r->factor + smooth * frequency;
}

/* The pair that turns `turns` times over the original context. */
static double tfmi_yarn_pair(const tfmi_rotation *r, double turns) {
  return r->rot * log(r->original / (turns * 2 * 3.14159265358979323846)) / (2 * log(r->theta));
}

/* Slow pairs are slowed down, fast ones are not, those between are mixed (Peng et al. 2023). */
static float tfmi_rotation_yarn(const tfmi_rotation *r, float power, int32_t i) {
  double low = tfmi_yarn_pair(r, r->high), high = tfmi_yarn_pair(r, r->low);
  float ramp;
  if (r->truncate) low = floor(low), high = ceil(high);
  if (low < 0) low = 0;
  if (high > r->rot - 1) high = r->rot - 1;
  if (low == high) high += 0.001;
  ramp = (float)((i - low) / (high - low));
  ramp = ramp < 0 ? 0.0f : ramp > 1 ? 1.0f : ramp;
  return 1.0f / ((float)r->factor * power) * ramp + 1.0f / power * (1.0f - ramp);
}

/* Frequency i of rot/2. Two kinds depend on the context: it is the engine's or the trainer's, as
   what is in the cache has been rotated already. */
static float tfmi_rotation_frequency(const tfmi_rotation *r, int32_t context, int32_t i) {
  float theta = (float)r->theta, power;
  const float *divisor = r->divisor[context > r->original];
  if (r->kind == TFMI_ROPE_DYNAMIC) {
    double stretched = r->factor * (context > r->trained ? context : r->trained) / r->trained;
    theta = (float)(r->theta * pow(stretched - (r->factor - 1), r->rot / (r->rot - 2.0)));
  }
  power = powf(theta, (float)(2 * i) / (float)r->rot);
  switch (r->kind) {
    case TFMI_ROPE_LINEAR: return 1.0f / power / (float)r->factor;
    case TFMI_ROPE_LLAMA3: return tfmi_rotation_llama3(r, 1.0f / power);
    case TFMI_ROPE_YARN: return tfmi_rotation_yarn(r, power, i);
    default: return 1.0f / ((divisor ? divisor[i] : 1.0f) * power);
  }
}

/* Makes the frequencies of both rotations for a context, at [2, D/2] in the device's memory, and
   points the layers there. */
static void tfmi_net_rotate(tfm_dev *d, tfm_net *net, const tfmi_rotation *r, int32_t context,
                            float *device) {
  int32_t half = net->head_width / 2, k, i, j;
  float piece[TFMI_ROPE_PIECE];
  if (r[0].rot == 0) return;
  for (k = 0; k < 2; k++)
    for (i = 0; i < r[k].rot / 2; i += TFMI_ROPE_PIECE) {
      int32_t n = r[k].rot / 2 - i < TFMI_ROPE_PIECE ? r[k].rot / 2 - i : (int32_t)TFMI_ROPE_PIECE;
      for (j = 0; j < n; j++) piece[j] = tfmi_rotation_frequency(&r[k], context, i + j);
      d->table->put(d, device + (int64_t)k * half + i, piece, (size_t)n * sizeof *piece);
    }
  for (i = 0; i < net->layers; i++)
    net->layer[i].rope.inv_freq = device + (net->layer[i].attn.window != 0 ? half : 0);
}

/* ---- The ids that begin and end a text ---- */

static void tfmi_end_add(const tfmi_source *s, const char *key, int64_t id) {
  tfm_model *m = s->model;
  if (id < 0 || id >= m->net.vocabulary) {
    tfmi_log(&m->heap.host, TFM_LOG_WARNING, "%s %lld is outside the vocabulary of %d: ignored",
             key, (long long)id, (int)m->net.vocabulary);
    return;
  }
  if (m->end_count == TFMI_COUNT(m->end))
    tfmi_fail(s->load, TFM_E_UNSUPPORTED, "%s has more than %d ids", key, TFMI_COUNT(m->end));
  m->end[m->end_count++] = (int32_t)id;
}

static void tfmi_end_read(const tfmi_source *s, const tfmi_settings *settings) {
  const tfmi_setting *v = tfmi_setting_find(settings, "eos_token_id");
  tfmi_json j;
  if (!v) return;
  if (v->kind == TFMI_JSON_NUMBER) {
    j = tfmi_setting_json(s, v, TFMI_JSON_NUMBER);
    tfmi_end_add(s, "eos_token_id", tfmi_json_integer(&j, INT32_MIN, INT64_MAX));
    return;
  }
  j = tfmi_setting_json(s, v, TFMI_JSON_ARRAY);
  tfmi_json_array(&j);
  while (tfmi_json_element(&j))
    tfmi_end_add(s, "eos_token_id", tfmi_json_integer(&j, INT32_MIN, INT64_MAX));
}

static int32_t tfmi_bos_read(const tfmi_source *s, const tfmi_settings *settings) {
  const tfmi_setting *v = tfmi_setting_find(settings, "bos_token_id");
  tfmi_json j;
  int64_t id;
  if (!v) return -1;
  j = tfmi_setting_json(s, v, TFMI_JSON_NUMBER);
  id = tfmi_json_integer(&j, INT32_MIN, INT64_MAX);
  return id < 0 || id >= s->model->net.vocabulary ? -1 : (int32_t)id;
}

/* generation_config.json goes before config.json, as in transformers. */
static void tfmi_ends(const tfmi_source *s) {
  tfm_model *m = s->model;
  int64_t id;
  if (s->gguf) {
    if (tfmi_gguf_get_int(s->gguf, "tokenizer.ggml.eos_token_id", &id))
      tfmi_end_add(s, "tokenizer.ggml.eos_token_id", id);
    if (tfmi_gguf_get_int(s->gguf, "tokenizer.ggml.bos_token_id", &id) && id >= 0 &&
        id < m->net.vocabulary)
      m->bos = (int32_t)id;
    return;
  }
  tfmi_end_read(s, &s->generation);
  if (m->end_count == 0) tfmi_end_read(s, &s->config);
  m->bos = tfmi_bos_read(s, &s->generation);
  if (m->bos < 0) m->bos = tfmi_bos_read(s, &s->config);
}

/* ---- From tensors to weights ---- */

typedef struct tfmi_builder {
  tfmi_source *s;
  tfm_model *m;
  const tfmi_family *f;
  const char *const *slot;
  const char *prefix;
  tfm_type convert;
  bool measure;
  uint8_t *host, *device;              /* the blocks, and what is used of them */
  uint64_t host_used, device_used;
  uint64_t done_bytes, total_bytes;    /* of matrices, for the progress */
  uint64_t longest;                    /* vector */
  float *stage;                        /* [longest] */
  tfm_part *part;                      /* [2 E, or 3] of the matrix at hand */
  uint64_t type_bytes[TFM_TYPE_COUNT]; /* of the matrices, in memory */
} tfmi_builder;

/* The name of a slot, the expert's number in place of "%e". */
static tfmi_text tfmi_slot_name(char *out, size_t size, const char *prefix, const char *pattern,
                                int32_t layer, int32_t expert, const char *suffix) {
  const char *at = strstr(pattern, "%e");
  char one[96];
  if (!at) return tfmi_layer_name(out, size, prefix, pattern, layer, suffix);
  snprintf(one, sizeof one, "%.*s%d%s", (int)(at - pattern), pattern, (int)expert, at + 2);
  return tfmi_layer_name(out, size, prefix, one, layer, suffix);
}

static tfmi_tensor *tfmi_ask_expert(tfmi_builder *b, tfmi_slot slot, int32_t layer, int32_t expert,
                                    const char *suffix) {
  char name[128];
  tfmi_tensor *t;
  const char *prefix = slot == TFMI_HEAD ? "" : b->prefix, *pattern = b->slot[slot];
  if (!pattern) return NULL;
  t = tfmi_tensor_find(b->s, tfmi_slot_name(name, sizeof name, prefix, pattern, layer, expert,
                                            suffix));
  if (!t) return NULL;
  t->used = true;
  t->slot = (int32_t)slot;
  t->layer = layer;
  t->expert = expert;
  t->bias = strcmp(suffix, ".bias") == 0;
  return t;
}

static tfmi_tensor *tfmi_ask(tfmi_builder *b, tfmi_slot slot, int32_t layer, const char *suffix) {
  return tfmi_ask_expert(b, slot, layer, 0, suffix);
}

static tfmi_tensor *tfmi_need_expert(tfmi_builder *b, tfmi_slot slot, int32_t layer, int32_t expert,
                                     const char *suffix) {
  char name[128];
  tfmi_tensor *t = tfmi_ask_expert(b, slot, layer, expert, suffix);
  if (t) return t;
  tfmi_slot_name(name, sizeof name, slot == TFMI_HEAD ? "" : b->prefix,
                 b->slot[slot] ? b->slot[slot] : "a matrix of layer %d", layer, expert, suffix);
  tfmi_fail(b->s->load, TFM_E_FORMAT, "tensor %s is missing", name);
}

static tfmi_tensor *tfmi_need(tfmi_builder *b, tfmi_slot slot, int32_t layer, const char *suffix) {
  return tfmi_need_expert(b, slot, layer, 0, suffix);
}

static void tfmi_expect_dims(tfmi_builder *b, const tfmi_tensor *t, const int32_t *dims, int n) {
  char found[96] = "", expected[64] = "";
  bool good = t->rank == (uint64_t)n;
  size_t at = 0;
  int i;
  for (i = 0; good && i < n; i++) good = t->dims[i] == (uint64_t)dims[i];
  if (good) return;
  for (i = 0; i < (int)t->rank && i < 4; i++)
    at += (size_t)snprintf(found + at, sizeof found - at, "%s%llu", i ? ", " : "",
                           (unsigned long long)t->dims[i]);
  for (i = 0, at = 0; i < n; i++)
    at += (size_t)snprintf(expected + at, sizeof expected - at, "%s%d", i ? ", " : "",
                           (int)dims[i]);
  tfmi_fail(b->s->load, TFM_E_FORMAT, "tensor %s has shape [%s%s], expected [%s]",
            tfmi_plain(t->name).text, found, t->rank > 4 ? ", ..." : "", expected);
}

/* cols 0: a vector; experts 0: no stack of them. */
static void tfmi_expect(tfmi_builder *b, const tfmi_tensor *t, int32_t experts, int32_t rows,
                        int32_t cols) {
  int32_t dims[3], n = 0;
  if (experts) dims[n++] = experts;
  dims[n++] = rows;
  if (cols) dims[n++] = cols;
  if (rows == 1 && cols && t->rank == 1) dims[0] = cols, n = 1; /* GGUF's matrices of one row */
  tfmi_expect_dims(b, t, dims, n);
}

static void tfmi_expect_type(tfmi_builder *b, const tfmi_tensor *t, bool floats) {
  if (t->type != TFM_TYPE_DEFAULT && (!floats || tfmi_types[t->type].block_values == 1)) return;
  tfmi_fail(b->s->load, TFM_E_UNSUPPORTED, "tensor %s has type %s, expected F32, F16, BF16%s",
            tfmi_plain(t->name).text, t->type_name,
            floats ? " or F8" : ", F8, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K or Q6_K");
}

/* ---- Vectors ---- */

/* stage[0 .. n-1] go to the device. */
static const float *tfmi_vector_end(tfmi_builder *b, uint64_t n) {
  uint8_t *at = b->measure ? NULL : b->device + b->device_used;
  b->device_used += tfmi_align64((size_t)n * sizeof(float));
  if (n > b->longest) b->longest = n;
  if (at) b->m->dev.table->put(&b->m->dev, at, b->stage, (size_t)n * sizeof(float));
  return TFMI_NEW(const float, at);
}

static void tfmi_floats(float *to, const tfmi_tensor *t, int32_t n) {
  tfmi_convert(TFM_F32, (uint8_t *)to, t->type, t->data, n);
}

/* Vectors one behind the other: the biases of q, k and v are one. */
static const float *tfmi_vector(tfmi_builder *b, tfmi_tensor *const *t, const int32_t *rows,
                                int n) {
  uint64_t total = 0;
  int i;
  for (i = 0; i < n; i++) {
    tfmi_expect(b, t[i], 0, rows[i], 0);
    tfmi_expect_type(b, t[i], true);
    if (!b->measure) tfmi_floats(b->stage + total, t[i], rows[i]);
    total += (uint64_t)rows[i];
  }
  if (b->measure) b->m->parameters += total;
  return tfmi_vector_end(b, total);
}

static const float *tfmi_norm_vector_of(tfmi_builder *b, tfmi_slot slot, int32_t layer,
                                        const char *suffix, int32_t width) {
  tfmi_tensor *t = tfmi_need(b, slot, layer, suffix);
  return tfmi_vector(b, &t, &width, 1);
}

static void tfmi_norm_vectors(tfmi_builder *b, tfmi_slot slot, int32_t layer, const float **weight,
                              const float **bias) {
  int32_t width = b->m->net.width;
  *weight = tfmi_norm_vector_of(b, slot, layer, ".weight", width);
  if (tfmi_has(b->f, TFMI_LAYER_NORM))
    *bias = tfmi_norm_vector_of(b, slot, layer, ".bias", width);
}

/* ---- Matrices ---- */

typedef struct tfmi_matrix { /* one weight, of up to three tensors stacked along rows */
  tfmi_slot slot[3];
  int n;
  int32_t rows[3], cols;
  int32_t experts; /* each of which has these parts; 0: none */
  bool plain;      /* stored [out, in] in every family */
  unsigned roles;
} tfmi_matrix;

static void tfmi_builder_check(tfmi_builder *b, const tfmi_tensor *t) {
  tfm_dev *d = &b->m->dev;
  if (d->status == TFM_OK) return;
  tfmi_fail(b->s->load, d->status, "tensor %s: %s", tfmi_plain(t->name).text, d->message);
}

/* Packs with one table into the blocks, or measures. */
static void tfmi_pack(tfmi_builder *b, const tfm_backend *table, tfm_weight *w,
                      const tfm_weight_source *src) {
  tfm_pack_size size = table->pack_size(&b->m->dev, src);
  w->rows = src->rows;
  w->cols = src->cols;
  w->experts = src->experts;
  w->roles = src->roles;
  if (!b->measure) {
    w->host = b->host + b->host_used;
    w->device = b->device + b->device_used;
    table->pack(&b->m->dev, w, src, w->host, w->device);
  }
  b->host_used += size.host_bytes;
  b->device_used += size.device_bytes;
}

/* Where entries run the reference, they read its own form of the weight beside the table's. */
static void tfmi_pack_all(tfmi_builder *b, tfm_weight *w, const tfm_weight_source *src) {
  tfm_dev *d = &b->m->dev;
  tfm_weight *reference;
  tfmi_pack(b, d->table, w, src);
  if (!d->override_mask) return;
  reference = (tfm_weight *)(uintptr_t)w->reference;
  if (!reference) reference = TFMI_NEW(tfm_weight, tfmi_keep(b->s->load, 1, sizeof *reference));
  w->reference = reference;
  tfmi_pack(b, tfm_backend_ref(), reference, src);
}

static void tfmi_count_part(tfmi_builder *b, const tfm_part *part, const tfm_weight_source *src) {
  uint64_t values = (uint64_t)part->rows * (uint64_t)src->cols; /* both below 2^27 */
  size_t bytes = 0, in_file = 0;
  tfm_type type = src->type ? src->type : part->type;
  tfmi_type_bytes(type, values, &bytes);
  tfmi_type_bytes(part->type, values, &in_file);
  if (!b->measure) {
    b->done_bytes += in_file;
    return;
  }
  b->total_bytes += in_file;
  b->type_bytes[type] += bytes;
  b->m->parameters += values;
  if (type == part->type) return;
  b->m->converted++;
  b->m->converted_from += in_file;
  b->m->converted_to += bytes;
}

/* Where a table does not compute with F8, it becomes the shortest float that holds all parts
   exactly; but for scales, which cost BF16 half a unit of its 8 bits. */
static tfm_type tfmi_widened(const tfmi_builder *b, const tfm_part *part, int n) {
  int f8 = 0, e4m3 = 0, bf16 = 0, i;
  for (i = 0; i < n; i++) {
    e4m3 += part[i].type == TFM_F8_E4M3;
    f8 += tfmi_is_f8(part[i].type);
    bf16 += part[i].type == TFM_BF16;
  }
  if (b->m->dev.table->f8 && !b->m->dev.override_mask && e4m3 == n) return TFM_TYPE_DEFAULT;
  return f8 == 0 ? TFM_TYPE_DEFAULT : f8 + bf16 == n ? TFM_BF16 : TFM_F32;
}

/* Rows and columns that share a scale, which the shape of the scales tells: one for all, one for
   each row, or one for each block, of 128 x 128 or what config.json has. */
static tfm_scales tfmi_scales_of(tfmi_builder *b, const tfmi_tensor *scale, int32_t rows,
                                 int32_t cols) {
  tfm_scales all = {NULL, rows, cols}, row = {NULL, 1, cols}, block = {NULL, 128, 128};
  const tfmi_setting *v = tfmi_setting_find(&b->s->config, "quantization_config.weight_block_size");
  size_t values = scale->bytes / tfmi_word_bytes(scale->type);
  int32_t dims[2];
  if (values == 1) return all;
  if (values == (size_t)rows && scale->dims[0] == (uint64_t)rows) return row;
  if (v) {
    tfmi_json j = tfmi_setting_json(b->s, v, TFMI_JSON_ARRAY);
    tfmi_json_array(&j);
    if (tfmi_json_element(&j)) block.tall = (int32_t)tfmi_json_integer(&j, 1, TFMI_BIG);
    if (tfmi_json_element(&j)) block.wide = (int32_t)tfmi_json_integer(&j, 1, TFMI_BIG);
  }
  dims[0] = (rows + block.tall - 1) / block.tall;
  dims[1] = (cols + block.wide - 1) / block.wide;
  tfmi_expect_dims(b, scale, dims, 2);
  return block;
}

/* What transformers calls an inverse (DeepSeek-V3's files began it) multiplies as well. */
static void tfmi_scales_find(tfmi_builder *b, tfmi_tensor *t, int32_t rows, int32_t cols) {
  static const char *const suffix[] = {"_scale_inv", "_scale"};
  tfmi_tensor *scale = NULL;
  char name[160];
  tfm_scales found;
  int32_t across;
  float *at;
  int i;
  if (t->scales.at || !tfmi_is_f8(t->type)) return;
  for (i = 0; i < 2 && !scale; i++) {
    tfmi_text text = {name, 0};
    if (t->name.n + strlen(suffix[i]) >= sizeof name) return;
    text.n = (size_t)snprintf(name, sizeof name, "%.*s%s", (int)t->name.n, t->name.at, suffix[i]);
    scale = tfmi_tensor_find(b->s, text);
  }
  if (!scale) return;
  tfmi_expect_type(b, scale, true);
  found = tfmi_scales_of(b, scale, rows, cols);
  across = (cols + found.wide - 1) / found.wide;
  at = TFMI_NEW(float, tfmi_scratch(b->s->load, (uint64_t)((rows + found.tall - 1) / found.tall) *
                                    (uint64_t)across, sizeof *at));
  for (i = 0; i < (rows + found.tall - 1) / found.tall; i++)
    tfmi_convert(TFM_F32, (uint8_t *)(at + (int64_t)i * across), scale->type,
                 scale->data + (size_t)i * (size_t)across * tfmi_word_bytes(scale->type), across);
  scale->used = true;
  scale->slot = -1;
  found.at = at;
  t->scales = found;
}

/* Part k of a matrix, or of one expert's: a tensor, or its share of one for all experts. */
static tfmi_tensor *tfmi_part_of(tfmi_builder *b, int32_t layer, const tfmi_matrix *x, int k,
                                 int32_t expert, bool turned, tfm_part *part) {
  tfmi_tensor *t = tfmi_need_expert(b, x->slot[k], layer, expert, ".weight");
  bool stacked = x->experts && !strstr(b->slot[x->slot[k]], "%e");
  tfmi_expect(b, t, stacked ? x->experts : 0, turned ? x->cols : x->rows[k],
              turned ? x->rows[k] : x->cols);
  tfmi_expect_type(b, t, turned);
  if (!stacked && !turned) tfmi_scales_find(b, t, x->rows[k], x->cols);
  part->scales = t->scales;
  part->data = t->data + (stacked ? t->bytes / (size_t)x->experts * (size_t)expert : 0);
  part->type = t->type;
  part->rows = x->rows[k];
  return t;
}

/* What has been packed into memory of its own is not needed in that of mapped files as well. */
static void tfmi_let_go(const tfmi_builder *b, const tfm_weight_source *src) {
  const tfm_model *m = b->m;
  int32_t i, k;
  if (b->measure || !m->dev.table->pack_size(&b->m->dev, src).device_bytes) return;
  for (i = 0; i < src->part_count; i++)
    for (k = 0; k < m->file_count; k++) {
      const tfmi_file *f = &m->files[k];
      const uint8_t *data = (const uint8_t *)src->parts[i].data;
      size_t bytes = 0;
      if (f->kind != TFMI_FILE_MAPPED || data < f->data || data >= f->data + f->bytes) continue;
      if (tfmi_type_bytes(src->parts[i].type,
                          (uint64_t)src->parts[i].rows * (uint64_t)src->cols, &bytes))
        tfmi_page_out(data, bytes);
    }
}

static void tfmi_weight(tfmi_builder *b, int32_t layer, const tfmi_matrix *x, tfm_weight *w) {
  tfm_weight_source src;
  tfmi_tensor *t = NULL;
  bool turned = tfmi_has(b->f, TFMI_CONV1D) && !b->s->gguf && x->roles == TFM_ROLE_MATMUL &&
                layer >= 0 && !x->plain;
  int32_t experts = x->experts ? x->experts : 1, e;
  int i;
  memset(&src, 0, sizeof src);
  src.parts = b->part;
  src.part_count = x->n * experts;
  src.cols = x->cols;
  src.experts = x->experts;
  src.transposed = turned;
  src.stable = true;
  src.roles = x->roles;
  src.type = b->convert;
  if (x->slot[0] == TFMI_POSITIONS && tfmi_types[src.type].block_values > 1)
    src.type = TFM_TYPE_DEFAULT; /* too few and too dear to quantise */
  for (e = 0; e < experts; e++)
    for (i = 0; i < x->n; i++)
      t = tfmi_part_of(b, layer, x, i, e, turned, &b->part[e * x->n + i]);
  for (i = 0; i < x->n; i++) src.rows += x->rows[i];
  if (!src.type) src.type = tfmi_widened(b, b->part, src.part_count);
  for (i = 0; i < src.part_count; i++) tfmi_count_part(b, &b->part[i], &src);
  if (src.type && x->cols % tfmi_types[src.type].block_values)
    tfmi_fail(b->s->load, TFM_E_UNSUPPORTED, "tensor %s: rows of %d values do not fill the blocks "
              "of %s; choose another type of weights", tfmi_plain(t->name).text, (int)x->cols,
              tfm_type_name(src.type));
  tfmi_pack_all(b, w, &src);
  tfmi_builder_check(b, t);
  tfmi_let_go(b, &src);
  if (!b->measure && x->roles & TFM_ROLE_MATMUL)
    b->m->token_bytes += w->bytes / (uint64_t)experts *
                         (uint64_t)(x->experts ? b->m->net.experts_used : 1);
  if (!b->measure && !tfmi_goes_on(&b->m->heap.host, "load",
                                   (double)b->done_bytes / (double)b->total_bytes))
    tfmi_fail(b->s->load, TFM_E_CANCELLED, "loading was cancelled");
}

/* Biases are where the config says; GGUF does not, there they are where they are. */
static const float *tfmi_bias(tfmi_builder *b, int32_t layer, const tfmi_matrix *x,
                              const tfmi_flag *flag) {
  tfmi_tensor *t[3];
  bool there = tfmi_ask(b, x->slot[0], layer, ".bias") != NULL, wanted = there;
  int i;
  if (!flag->key) wanted = flag->fallback;
  else if (!b->s->gguf) wanted = tfmi_setting_flag(b->s, flag->key, flag->fallback);
  for (i = 0; i < x->n; i++) {
    t[i] = tfmi_ask(b, x->slot[i], layer, ".bias");
    if (t[i] && !wanted)
      tfmi_fail(b->s->load, TFM_E_FORMAT, "tensor %s is there, although %s is false",
                tfmi_plain(t[i]->name).text, flag->key ? flag->key : "a bias");
    if (wanted && !t[i]) tfmi_need(b, x->slot[i], layer, ".bias");
  }
  return wanted ? tfmi_vector(b, t, x->rows, x->n) : NULL;
}

/* ---- The network, walked once to measure and once to fill ---- */

/* A file may hold the parts fused into one tensor already. */
static tfmi_matrix tfmi_matrix_of(tfmi_builder *b, int32_t layer, tfmi_slot fused, tfmi_slot first,
                                  int n, const int32_t *rows, int32_t cols) {
  tfmi_matrix x;
  int i;
  memset(&x, 0, sizeof x);
  x.cols = cols;
  x.roles = TFM_ROLE_MATMUL;
  x.n = n;
  for (i = 0; i < n; i++) {
    x.slot[i] = (tfmi_slot)((int)first + i);
    x.rows[i] = rows[i];
  }
  if (n == 1 || tfmi_ask(b, first, layer, ".weight")) return x;
  if (b->slot[first] && !tfmi_ask(b, fused, layer, ".weight")) return x;
  x.slot[0] = fused;
  for (x.n = 1; --n > 0;) x.rows[0] += rows[n];
  return x;
}

static void tfmi_layer_attention(tfmi_builder *b, int32_t i, tfm_layer *y) {
  const tfmi_family *f = b->f;
  const tfm_net *net = &b->m->net;
  int32_t all_heads = net->heads * net->head_width, kv = net->kv_heads * net->head_width;
  int32_t rows[3];
  tfmi_matrix x;
  rows[0] = all_heads;
  rows[1] = rows[2] = kv;
  tfmi_norm_vectors(b, TFMI_NORM1, i, &y->norm1, &y->norm1_bias);
  x = tfmi_matrix_of(b, i, TFMI_QKV, TFMI_Q, 3, rows, net->width);
  tfmi_weight(b, i, &x, &y->qkv);
  y->qkv_bias = tfmi_bias(b, i, &x, &f->qkv_bias);
  if (tfmi_has(f, TFMI_HEAD_NORMS)) {
    y->q_norm = tfmi_norm_vector_of(b, TFMI_Q_NORM, i, ".weight", net->head_width);
    y->k_norm = tfmi_norm_vector_of(b, TFMI_K_NORM, i, ".weight", net->head_width);
  }
  x = tfmi_matrix_of(b, i, TFMI_OUT, TFMI_OUT, 1, &net->width, all_heads);
  tfmi_weight(b, i, &x, &y->out);
  y->out_bias = tfmi_bias(b, i, &x, &f->out_bias);
  if (tfmi_has(f, TFMI_POST_NORMS))
    y->post1 = tfmi_norm_vector_of(b, TFMI_POST1, i, ".weight", net->width);
}

/* up and down of a width, from slots that follow `fused` as theirs do TFMI_GATE_UP. */
static void tfmi_layer_dense(tfmi_builder *b, int32_t i, tfm_layer *y, tfmi_slot fused,
                             int32_t width) {
  const tfmi_family *f = b->f;
  const tfm_net *net = &b->m->net;
  tfmi_slot gate = (tfmi_slot)((int)fused + 1), up = (tfmi_slot)((int)fused + 2);
  tfmi_slot down = (tfmi_slot)((int)fused + 3);
  int32_t rows[2];
  tfmi_matrix x;
  rows[0] = rows[1] = width;
  if (net->gated) x = tfmi_matrix_of(b, i, fused, gate, 2, rows, net->width);
  else x = tfmi_matrix_of(b, i, up, up, 1, rows, net->width);
  tfmi_weight(b, i, &x, &y->up);
  y->up_bias = tfmi_bias(b, i, &x, &f->up_bias);
  x = tfmi_matrix_of(b, i, down, down, 1, &net->width, width);
  tfmi_weight(b, i, &x, &y->down);
  y->down_bias = tfmi_bias(b, i, &x, &f->down_bias);
}

/* [E, N]: biases of experts that are stored together. */
static const float *tfmi_expert_bias(tfmi_builder *b, tfmi_slot slot, int32_t layer, int32_t rows) {
  int32_t experts = b->m->net.experts, all = experts * rows;
  tfmi_tensor *t = tfmi_need(b, slot, layer, ".bias");
  tfmi_expect(b, t, 0, experts, rows);
  tfmi_expect_type(b, t, true);
  if (b->measure) b->m->parameters += (uint64_t)all;
  else tfmi_floats(b->stage, t, all);
  return tfmi_vector_end(b, (uint64_t)all);
}

static void tfmi_layer_experts(tfmi_builder *b, int32_t i, tfm_layer *y) {
  const tfm_net *net = &b->m->net;
  int32_t rows[2], one = 1;
  tfmi_matrix x;
  rows[0] = rows[1] = net->expert_width;
  x = tfmi_matrix_of(b, i, TFMI_ROUTER, TFMI_ROUTER, 1, &net->experts, net->width);
  x.plain = true;
  tfmi_weight(b, i, &x, &y->router);
  if (net->gated)
    x = tfmi_matrix_of(b, i, TFMI_EXPERT_GATE_UP, TFMI_EXPERT_GATE, 2, rows, net->width);
  else x = tfmi_matrix_of(b, i, TFMI_EXPERT_UP, TFMI_EXPERT_UP, 1, rows, net->width);
  x.plain = true;
  x.experts = net->experts;
  tfmi_weight(b, i, &x, &y->expert_up);
  x = tfmi_matrix_of(b, i, TFMI_EXPERT_DOWN, TFMI_EXPERT_DOWN, 1, &net->width, net->expert_width);
  x.plain = true;
  x.experts = net->experts;
  tfmi_weight(b, i, &x, &y->expert_down);
  if (b->f->up_bias.fallback) {
    y->expert_up_bias = tfmi_expert_bias(b, TFMI_EXPERT_UP, i, net->expert_width);
    y->expert_down_bias = tfmi_expert_bias(b, TFMI_EXPERT_DOWN, i, net->width);
  }
  if (!tfmi_has(b->f, TFMI_SHARED)) return;
  x = tfmi_matrix_of(b, i, TFMI_SHARED_ROUTER, TFMI_SHARED_ROUTER, 1, &one, net->width);
  tfmi_weight(b, i, &x, &y->shared_gate);
  tfmi_layer_dense(b, i, y, TFMI_SHARED_GATE_UP, tfmi_whole(b->s, b->f, TFMI_N_SHARED_FFN));
}

static void tfmi_layer(tfmi_builder *b, int32_t i) {
  const tfm_net *net = &b->m->net;
  tfm_layer *y = &net->layer[i];
  bool sparse = tfmi_is_sparse(b->s, b->f, i);
  if (b->s->gguf) sparse = sparse && tfmi_ask(b, TFMI_ROUTER, i, ".weight"); /* told by tensors */
  tfmi_layer_attention(b, i, y);
  tfmi_norm_vectors(b, TFMI_NORM2, i, &y->norm2, &y->norm2_bias);
  if (sparse) tfmi_layer_experts(b, i, y);
  else tfmi_layer_dense(b, i, y, TFMI_GATE_UP, net->ffn_width);
  if (tfmi_has(b->f, TFMI_POST_NORMS))
    y->post2 = tfmi_norm_vector_of(b, TFMI_POST2, i, ".weight", net->width);
}

/* GGUF has divisors of frequencies as tensors: of llama3's scaling, or longrope's two. */
static const float *tfmi_factors(tfmi_builder *b, const char *name) {
  tfmi_tensor *t = tfmi_tensor_find(b->s, tfmi_text_of(name));
  int32_t half = b->m->rotation[0].rot / 2;
  float *out;
  if (!t) return NULL;
  t->used = true;
  t->slot = TFMI_SLOTS; /* none */
  tfmi_expect(b, t, 0, half, 0);
  tfmi_expect_type(b, t, true);
  out = TFMI_NEW(float, tfmi_keep(b->s->load, (uint64_t)half, sizeof *out));
  tfmi_floats(out, t, half);
  return out;
}

static void tfmi_rotation_factors(tfmi_builder *b) {
  tfmi_rotation *r = b->m->rotation;
  bool several = r->kind == TFMI_ROPE_LONG;
  if (!b->s->gguf) return;
  r->divisor[0] = tfmi_factors(b, several ? "rope_factors_short.weight" : "rope_freqs.weight");
  r->divisor[1] = several ? tfmi_factors(b, "rope_factors_long.weight") : r->divisor[0];
  if (several && (!r->divisor[0] || !r->divisor[1]))
    tfmi_fail(b->s->load, TFM_E_FORMAT, "tensor rope_factors_short.weight or "
              "rope_factors_long.weight is missing");
  if (!tfmi_family_said(b->f, TFMI_N_LOCAL_THETA)) r[1] = r[0];
}

static void tfmi_network(tfmi_builder *b, bool measure) {
  tfm_net *net = &b->m->net;
  tfmi_matrix x;
  int32_t i;
  b->measure = measure;
  b->host_used = b->device_used = 0;
  x = tfmi_matrix_of(b, -1, TFMI_EMBED, TFMI_EMBED, 1, &net->vocabulary, net->width);
  x.roles = TFM_ROLE_GATHER | (b->m->tied ? (unsigned)TFM_ROLE_MATMUL : 0u);
  tfmi_weight(b, -1, &x, &net->embed);
  if (!tfmi_has(b->f, TFMI_ROTARY)) {
    x = tfmi_matrix_of(b, -1, TFMI_POSITIONS, TFMI_POSITIONS, 1, &net->context, net->width);
    x.roles = TFM_ROLE_GATHER;
    tfmi_weight(b, -1, &x, &net->positions);
  }
  for (i = 0; i < net->layers; i++) tfmi_layer(b, i);
  tfmi_norm_vectors(b, TFMI_FINAL_NORM, -1, &net->final_norm, &net->final_norm_bias);
  if (b->m->tied) {
    net->head = net->embed;
    return;
  }
  x = tfmi_matrix_of(b, -1, TFMI_HEAD, TFMI_HEAD, 1, &net->vocabulary, net->width);
  tfmi_weight(b, -1, &x, &net->head);
}

/* ---- A model ---- */

/* A head in the file is used whatever the config says, as in transformers 5; one that repeats the
   embedding byte by byte costs no memory of its own. */
static bool tfmi_builder_tied(tfmi_builder *b, const tfmi_tensor *embed) {
  const tfmi_tensor *head = tfmi_ask(b, TFMI_HEAD, 0, ".weight");
  if (!head) return b->s->gguf || tfmi_setting_flag(b->s, b->f->tied.key, b->f->tied.fallback);
  return head->type == embed->type && head->rank == embed->rank &&
         memcmp(head->dims, embed->dims, sizeof head->dims) == 0 && head->bytes == embed->bytes &&
         memcmp(head->data, embed->data, head->bytes) == 0;
}

static void tfmi_builder_begin(tfmi_builder *b, tfmi_source *s, const tfm_model_config *config) {
  tfm_model *m = s->model;
  const tfmi_family *f = tfmi_family_find(s);
  tfmi_tensor *embed;
  memset(b, 0, sizeof *b);
  b->s = s;
  b->m = m;
  b->f = f;
  b->convert = config->weights;
  b->slot = s->gguf ? tfmi_gguf_slots : f->slot;
  b->prefix = s->gguf ? "" : f->prefix;
  if (!tfmi_ask(b, TFMI_EMBED, 0, ".weight")) b->prefix = "";
  embed = tfmi_need(b, TFMI_EMBED, 0, ".weight");
  tfmi_family_check(s, f);
  tfmi_net_shape(s, f, &m->net);
  if (m->net.vocabulary == 0) { /* not told: one row each */
    if (embed->rank != 2 || embed->dims[0] > (uint64_t)TFMI_BIG)
      tfmi_fail(s->load, TFM_E_FORMAT, "tensor %s does not tell the vocabulary's size",
                tfmi_plain(embed->name).text);
    m->net.vocabulary = (int32_t)embed->dims[0];
  }
  m->net.embed_scale = tfmi_net_embed_scale(s, f, &m->net, embed);
  m->balance = tfmi_number(s, f, TFMI_N_BALANCE);
  b->part = TFMI_NEW(tfm_part, tfmi_scratch(s->load, 3 + 2 * (uint64_t)m->net.experts,
                                            sizeof *b->part));
  if (tfmi_has(f, TFMI_ROTARY)) tfmi_rotations(s, f, &m->net, m->rotation);
  tfmi_rotation_factors(b);
  m->tied = tfmi_builder_tied(b, embed);
  m->family = f->name;
  m->format = s->format;
  tfmi_ends(s);
}

/* Whether it ends with one of n words. */
static bool tfmi_name_ends(tfmi_text name, const char *const *word, int n) {
  int k;
  for (k = 0; k < n; k++) {
    size_t bytes = strlen(word[k]);
    if (name.n >= bytes && !memcmp(name.at + name.n - bytes, word[k], bytes)) return true;
  }
  return false;
}

/* What nobody asked for is a sign of another architecture, a mask that old files carry along, or
   what activations of 8 bits would be divided by; weights mean nothing without their scales. */
static void tfmi_builder_report(const tfmi_builder *b) {
  static const char *const harmless[] = {".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq",
                                         ".input_scale"};
  static const char *const scales[] = {".weight_scale", ".weight_scale_inv"};
  const tfmi_tensor *first = NULL;
  uint64_t i, count = 0;
  for (i = 0; i < b->s->tensors; i++) {
    const tfmi_tensor *t = &b->s->tensor[i];
    if (t->used || tfmi_name_ends(t->name, harmless, TFMI_COUNT(harmless))) continue;
    if (tfmi_name_ends(t->name, scales, TFMI_COUNT(scales)))
      tfmi_fail(b->s->load, TFM_E_UNSUPPORTED, "tensor %s: scales are read beside matrices of F8 "
                "only, [out, in]; expected weights that are whole without them, as BF16",
                tfmi_plain(t->name).text);
    if (!first) first = t;
    count++;
  }
  if (first)
    tfmi_log(&b->m->heap.host, TFM_LOG_WARNING, "%s: %llu tensors are not used, the first is %s",
             b->s->load->object, (unsigned long long)count, tfmi_plain(first->name).text);
}

static void tfmi_dev_check(tfmi_load *l, tfm_dev *d) {
  tfm_status status = d->table->sync(d);
  if (status != TFM_OK) tfmi_fail(l, status, "device %s: %s", d->table->name, d->message);
}

/* The two blocks; a dry heap only counts them. */
static void tfmi_builder_allocate(tfmi_builder *b) {
  tfmi_load *l = b->s->load;
  tfm_model *m = b->m;
  tfm_dev *d = &m->dev;
  b->stage = TFMI_NEW(float, tfmi_scratch(l, b->longest, sizeof *b->stage));
  if (b->host_used > SIZE_MAX / 4 || b->device_used > SIZE_MAX / 4)
    tfmi_fail(l, TFM_E_MEMORY, "the weights are larger than the address space");
  if (tfmi_heap_charge(l->heap, (size_t)b->device_used + TFMI_SLACK) != TFM_OK) tfmi_fail_again(l);
  if (l->heap->dry) {
    if (tfmi_heap_charge(l->heap, (size_t)b->host_used + 64 + sizeof(tfmi_block)) != TFM_OK)
      tfmi_fail_again(l);
    return;
  }
  b->host = (uint8_t *)tfmi_keep(l, b->host_used + 64, 1);
  b->host += 64 - (uintptr_t)b->host % 64;
  m->device_bytes = (size_t)b->device_used;
  m->device = d->table->alloc(d, m->device_bytes);
  b->device = (uint8_t *)m->device;
  if (!m->device)
    tfmi_fail(l, TFM_E_MEMORY, "out of memory: device %s refused %llu bytes for weights",
              d->table->name, (unsigned long long)b->device_used);
}

static void tfmi_builder_measure(tfmi_builder *b) {
  int type;
  tfmi_network(b, true);
  tfmi_dev_check(b->s->load, &b->m->dev);
  tfmi_builder_report(b);
  for (type = 1, b->m->weights = TFM_F32; type < TFM_TYPE_COUNT; type++)
    if (b->type_bytes[type] > b->type_bytes[b->m->weights]) b->m->weights = (tfm_type)type;
  if (b->m->converted)
    tfmi_log(&b->m->heap.host, TFM_LOG_INFO, "%s: %d matrices converted, from %llu bytes to %llu",
             b->s->load->object, (int)b->m->converted,
             (unsigned long long)b->m->converted_from, (unsigned long long)b->m->converted_to);
}

static void tfmi_builder_run(tfmi_builder *b) {
  tfmi_builder_measure(b);
  tfmi_builder_allocate(b);
  if (b->s->load->heap->dry) return;
  tfmi_network(b, false);
  tfmi_dev_check(b->s->load, &b->m->dev);
}

static void tfmi_builder_entries(const tfmi_builder *b) {
  const tfm_backend *table = b->m->dev.table;
  const char *missing = b->m->net.experts ? tfmi_experts_missing(table) : NULL;
  if (missing)
    tfmi_fail(b->s->load, TFM_E_UNSUPPORTED, "device %s lacks the entry %s, which experts need; "
              "use another", table->name, missing);
}

typedef struct tfmi_model_request {
  const char *path; /* NULL: data */
  const void *data;
  size_t bytes;
  const tfm_model_config *config;
  struct tfmi_conversion *conversion; /* not NULL: written again instead of loaded */
  tfm_model *model;
  tfmi_load load;
  tfmi_source source;
  tfmi_builder builder;
} tfmi_model_request;

/* >>convert: written instead of loaded; true: only told what there is. */
static void tfmi_conversion_run(tfmi_model_request *r);
static bool tfmi_conversion_tells(const struct tfmi_conversion *c, const tfmi_source *s);

static void tfmi_model_read(tfmi_model_request *r) {
  const tfm_model_config *c = r->config;
  r->source.load = &r->load;
  r->source.model = r->model;
  tfmi_source_read(&r->source, r->path, r->data, r->bytes);
  if (r->conversion && tfmi_conversion_tells(r->conversion, &r->source)) return;
  if (strcmp(r->source.format, "safetensors") == 0)
    tfmi_source_settings(&r->source, c->config_json);
  tfmi_builder_begin(&r->builder, &r->source, c);
  if (tfmi_dev_open(&r->model->dev, &r->model->heap, c->device, c->device_index, c->threads,
                    c->override, c->no_fallback) != TFM_OK)
    tfmi_fail_again(&r->load);
  tfmi_builder_entries(&r->builder);
  if (r->conversion) tfmi_conversion_run(r);
  else tfmi_builder_run(&r->builder);
  tfmi_pool_close(&r->model->dev, &r->model->heap); /* engines have pools of their own */
  r->model->dev.threads = 1;
}

static bool tfmi_model_try(tfmi_model_request *r) {
  if (setjmp(r->load.fail)) return false;
  tfmi_model_read(r);
  return true;
}

static void tfmi_ring_move(tfmi_block *to, tfmi_block *from) { /* `to` is empty */
  if (from->next == from) return;
  to->next = from->next;
  to->prev = from->prev;
  to->next->prev = to->prev->next = to;
  tfmi_ring_init(from);
}

/* dry: everything but the weights, for a plan. */
static tfm_model *tfmi_model_make(const char *path, const void *data, size_t bytes,
                                  const tfm_model_config *config, bool dry,
                                  struct tfmi_conversion *conversion) {
  tfmi_load *outer = tfmi_stb_load;
  tfmi_model_request r;
  tfm_model_config c;
  tfmi_heap heap;
  tfm_model *m;
  bool done;
  memset(&c, 0, sizeof c);
  memset(&heap, 0, sizeof heap);
  memset(&r, 0, sizeof r);
  if (config) c = *config;
  if ((int)c.weights < 0 || (c.weights > TFM_Q5_1 && c.weights != TFM_F8_E4M3)) {
    tfmi_report(TFM_E_ARG, "model config: weights cannot be converted to %s; expected F32, F16, "
                "BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1 or, on a device that has it, F8_E4M3",
                tfm_type_name(c.weights));
    return NULL;
  }
  heap.host = c.host;
  heap.dry = dry;
  if (dry) heap.host.memory_limit_bytes = 0; /* a plan tells what a limit would refuse */
  m = TFMI_NEW(tfm_model, tfmi_heap_get(&heap, sizeof *m));
  if (!m) return NULL;
  m->heap = heap;
  m->bos = -1;
  tfmi_ring_init(&m->kept);
  r.path = path;
  r.data = data;
  r.bytes = bytes;
  r.config = &c;
  r.conversion = conversion;
  r.model = m;
  tfmi_load_init(&r.load, &m->heap, path ? path : "model in memory");
  r.load.no_mmap = c.no_mmap;
  tfmi_stb_load = &r.load;
  done = tfmi_model_try(&r);
  tfmi_stb_load = outer;
  tfmi_ring_free(&m->heap, &r.load.scratch);
  tfmi_ring_move(&m->kept, &r.load.kept);
  if (done) return m;
  tfm_model_free(m);
  return NULL;
}

TFM_API tfm_model *tfm_model_load(const char *path, const tfm_model_config *config) {
  if (path) return tfmi_model_make(path, NULL, 0, config, false, NULL);
  tfmi_report(TFM_E_ARG, "tfm_model_load: path is NULL");
  return NULL;
}

TFM_API tfm_model *tfm_model_load_memory(const void *data, size_t bytes,
                                         const tfm_model_config *config) {
  if (data) return tfmi_model_make(NULL, data, bytes, config, false, NULL);
  tfmi_report(TFM_E_ARG, "tfm_model_load_memory: data is NULL");
  return NULL;
}

TFM_API void tfm_model_free(tfm_model *model) {
  tfmi_heap heap;
  int32_t i;
  if (!model) return;
  if (model->device) model->dev.table->release(&model->dev, model->device, model->device_bytes);
  tfmi_dev_close(&model->dev, &model->heap);
  for (i = 0; i < model->file_count; i++) tfmi_file_close(&model->heap, &model->files[i]);
  tfmi_file_close(&model->heap, &model->text);
  tfmi_ring_free(&model->heap, &model->kept);
  heap = model->heap;
  tfmi_heap_put(&heap, model, sizeof *model);
}

TFM_API tfm_status tfm_model_describe(const tfm_model *model, tfm_model_info *out) {
  const tfm_net *net;
  if (!model) return tfmi_null_object("tfm_model_describe");
  if (!out) return tfmi_report(TFM_E_ARG, "tfm_model_describe: out is NULL");
  net = &model->net;
  memset(out, 0, sizeof *out);
  out->family = model->family;
  out->format = model->format;
  out->device = model->dev.table->name;
  out->layers = net->layers;
  out->width = net->width;
  out->heads = net->heads;
  out->kv_heads = net->kv_heads;
  out->head_width = net->head_width;
  out->ffn_width = net->ffn_width;
  out->vocabulary = net->vocabulary;
  out->experts = net->experts;
  out->context = net->context;
  out->tied = model->tied;
  out->weights = model->weights;
  out->bos = model->bos;
  out->end = model->end;
  out->end_count = model->end_count;
  out->parameters = model->parameters;
  out->token_bytes = model->token_bytes;
  out->mapped_bytes = model->mapped_bytes;
  out->memory_bytes = model->heap.used;
  out->peak_bytes = model->heap.peak;
  out->converted = model->converted;
  out->converted_from = model->converted_from;
  out->converted_to = model->converted_to;
  return TFM_OK;
}

static tfm_status tfmi_engine_plan(const tfm_model *model, const tfm_engine_config *config,
                                   tfm_plan *out); /* >>engine */

TFM_API tfm_status tfm_plan_memory(const char *path, const tfm_model_config *model,
                                   const tfm_engine_config *engine, tfm_plan *out) {
  tfm_model *m;
  tfm_status status;
  if (!path || !out) return tfmi_report(TFM_E_ARG, "tfm_plan_memory: path or out is NULL");
  memset(out, 0, sizeof *out);
  m = tfmi_model_make(path, NULL, 0, model, true, NULL);
  if (!m) return tfmi_error.status;
  out->mapped_bytes = m->mapped_bytes;
  out->load_peak_bytes = m->heap.peak;
  out->model_bytes = m->heap.used;
  status = tfmi_engine_plan(m, engine, out);
  tfm_model_free(m);
  return status;
}


#if TFMI_COMPILES_COLD
#pragma GCC pop_options
#endif

/* =================================================================================================
   >>device   opening a table of kernels; the thread pool
   =================================================================================================

   tfmi_dev_open walks down CUDA, CPU, REF from the device that was asked for, and takes the first
   table that is compiled in, complete, and whose `open` succeeds. What it passes over it tells the
   log, or, with no_fallback, its caller.

   Work is a range 0 .. n-1, cut into one contiguous share per thread that was asked for. A pool's
   workers are created once, no more of them than there are other cores. The caller computes share
   0, then every share that no worker has begun, so it never waits for a thread that does not run:
   only for one that stopped midway. Each share has a word that its worker watches: spinning at
   first, as the next small operation is usually a microsecond away, then asleep on a condition
   variable, as the caller sleeps for the last shares. Who sleeps says so before reading the word
   again, and who writes the word reads afterwards whether somebody sleeps (both sequentially
   consistent), so one of the two sees the other. A job must not dispatch again. */

/* ---- Atomics: C11's header is not C++, the compilers' builtins are both ---- */

static uint32_t tfmi_atomic_load(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
static void tfmi_atomic_store(uint32_t *p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_SEQ_CST); }
static void tfmi_atomic_add(uint32_t *p, uint32_t n) { __atomic_add_fetch(p, n, __ATOMIC_SEQ_CST); }
/* True if it was `from` and has become `to`. */
static bool tfmi_atomic_exchange_if(uint32_t *p, uint32_t from, uint32_t to) {
  return __atomic_compare_exchange_n(p, &from, to, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

static void tfmi_pause(void) { /* tells the core that this is a spin */
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/* ---- The pool ---- */

typedef struct tfmi_task { /* one tfm_parallel_for */
  tfm_job job;
  void *context;
  int32_t n, grain, shares;
} tfmi_task;

typedef enum tfmi_share_state {
  TFMI_SHARE_DONE,
  TFMI_SHARE_READY, /* p->task is set */
  TFMI_SHARE_TAKEN, /* p->task must not change */
  TFMI_SHARE_STOP   /* the worker is to return */
} tfmi_share_state;

typedef struct tfmi_share { /* a cache line each */
  uint32_t state; /* atomic: tfmi_share_state */
  int32_t index;  /* 1 .. threads-1; the first of worker `index`, if there is one */
  struct tfmi_pool *pool;
  pthread_t thread;
  char apart[64 - 2 * sizeof(int32_t) - sizeof(void *) - sizeof(pthread_t)];
} tfmi_share;

typedef struct tfmi_pool {
  uint32_t sleeping; /* atomic: workers */
  uint32_t waiting;  /* atomic: whether the caller sleeps */
  int32_t shares;    /* besides the caller's */
  int32_t workers;   /* that were started: worker w computes shares w, w + workers, ... */
  tfmi_task task;
  pthread_mutex_t lock;
  pthread_cond_t wake, done;
  size_t bytes;
  tfmi_share *share; /* [shares] */
} tfmi_pool;

/* About a fifth of a millisecond: longer than a token pauses, shorter than a time slice. */
enum { TFMI_SPINS = 4000 };

/* Computes one share: multiples of grain, cut evenly. */
static void tfmi_task_run(void *context, int32_t worker) {
  const tfmi_task *t = (const tfmi_task *)context;
  int64_t units = ((int64_t)t->n + t->grain - 1) / t->grain;
  int64_t begin = units * worker / t->shares * t->grain;
  int64_t end = units * (worker + 1) / t->shares * t->grain;
  if (end > t->n) end = t->n;
  if (begin < end) t->job(t->context, (int32_t)begin, (int32_t)end, worker);
}

/* Runs a share unless another thread has begun it. */
static void tfmi_share_run(tfmi_share *s) {
  tfmi_pool *p = s->pool;
  if (!tfmi_atomic_exchange_if(&s->state, TFMI_SHARE_READY, TFMI_SHARE_TAKEN)) return;
  tfmi_task_run(&p->task, s->index);
  tfmi_atomic_store(&s->state, TFMI_SHARE_DONE);
  if (tfmi_atomic_load(&p->waiting) == 0) return;
  pthread_mutex_lock(&p->lock);
  pthread_cond_signal(&p->done);
  pthread_mutex_unlock(&p->lock);
}

static bool tfmi_share_idle(const tfmi_share *s) { /* nothing to do for its worker */
  uint32_t state = tfmi_atomic_load(&s->state);
  return state == TFMI_SHARE_DONE || state == TFMI_SHARE_TAKEN;
}

static bool tfmi_share_unfinished(const tfmi_share *s) {
  return tfmi_atomic_load(&s->state) != TFMI_SHARE_DONE;
}

/* Waits while `still`, asleep if it takes long, having said so in *asleep. */
static void tfmi_share_await(const tfmi_share *s, bool (*still)(const tfmi_share *),
                             uint32_t *asleep, pthread_cond_t *signal) {
  int32_t i;
  for (i = 0; i < TFMI_SPINS; i++) {
    if (!still(s)) return;
    tfmi_pause();
  }
  pthread_mutex_lock(&s->pool->lock);
  tfmi_atomic_add(asleep, 1);
  while (still(s)) pthread_cond_wait(signal, &s->pool->lock);
  tfmi_atomic_add(asleep, (uint32_t)-1);
  pthread_mutex_unlock(&s->pool->lock);
}

/* Sets the words of the first n shares. */
static void tfmi_pool_tell(tfmi_pool *p, int32_t n, tfmi_share_state state) {
  int32_t i;
  for (i = 0; i < n; i++) tfmi_atomic_store(&p->share[i].state, state);
  if (tfmi_atomic_load(&p->sleeping) == 0) return;
  pthread_mutex_lock(&p->lock);
  pthread_cond_broadcast(&p->wake);
  pthread_mutex_unlock(&p->lock);
}

static void *tfmi_worker_main(void *context) {
  tfmi_share *own = (tfmi_share *)context;
  tfmi_pool *p = own->pool;
  int32_t i;
  for (;;) {
    tfmi_share_await(own, tfmi_share_idle, &p->sleeping, &p->wake);
    if (tfmi_atomic_load(&own->state) == TFMI_SHARE_STOP) return NULL;
    for (i = own->index - 1; i < p->shares; i += p->workers) tfmi_share_run(&p->share[i]);
  }
}

static void tfmi_pool_run(tfmi_pool *p, const tfmi_task *task) {
  int32_t n = task->shares - 1, i;
  p->task = *task;
  tfmi_pool_tell(p, n, TFMI_SHARE_READY);
  tfmi_task_run(&p->task, 0);
  for (i = n - 1; i >= 0; i--) tfmi_share_run(&p->share[i]); /* workers begin at the other end */
  for (i = 0; i < n; i++)
    tfmi_share_await(&p->share[i], tfmi_share_unfinished, &p->waiting, &p->done);
}

TFM_API void tfm_parallel_for(tfm_dev *d, int32_t n, int32_t grain, tfm_job job, void *context) {
  tfmi_task t = {job, context, n, grain > 0 ? grain : 1, d->threads};
  int32_t units = n > 0 ? (n - 1) / t.grain + 1 : 0;
  if (units < t.shares) t.shares = units;
  if (n <= 0) return;
  if (t.shares <= 1) job(context, 0, n, 0);
  else if (d->host->parallel) d->host->parallel(d->host->user, t.shares, tfmi_task_run, &t);
  else if (d->pool && d->pool->workers > 0) tfmi_pool_run(d->pool, &t);
  else job(context, 0, n, 0);
}

/* Starts a worker. */
static bool tfmi_worker_start(tfmi_share *own) {
  return tfmi_thread_start(&own->thread, tfmi_worker_main, own);
}

/* Cores that this thread may run on, as Linux tells it: a mask in hexadecimal. 0: unknown. */
static int32_t tfmi_cores_allowed(void) {
  char text[4096], *at;
  int file = open("/proc/thread-self/status", TFMI_OPEN_READ);
  ssize_t n = file < 0 ? 0 : read(file, text, sizeof text - 1);
  int32_t cores = 0;
  if (file >= 0) close(file);
  text[n > 0 ? n : 0] = 0;
  at = strstr(text, "Cpus_allowed:");
  for (at += at ? strlen("Cpus_allowed:") : 0; at && *at && *at != '\n'; at++) {
    int digit = *at >= 'a' && *at <= 'f' ? *at - 'a' + 10 : *at >= '0' && *at <= '9' ? *at & 15 : 0;
    for (; digit; digit &= digit - 1) cores++;
  }
  return cores;
}

static int32_t tfmi_cores(void) {
  long n = tfmi_processors(), allowed = tfmi_cores_allowed();
  if (allowed > 0 && allowed < n) n = allowed;
  return n < 1 ? 1 : n > 64 ? 64 : (int32_t)n;
}

/* d->pool for d->threads, with so many workers. A dry heap counts its memory but starts none. */
static tfm_status tfmi_pool_start(tfm_dev *d, tfmi_heap *heap, int32_t workers) {
  int32_t shares = d->threads - 1, i;
  size_t bytes = sizeof(tfmi_pool) + 64 + (size_t)shares * sizeof(tfmi_share);
  tfmi_pool *p = TFMI_NEW(tfmi_pool, tfmi_heap_get(heap, bytes));
  if (!p) return tfm_error_status();
  d->pool = p;
  p->bytes = bytes;
  p->shares = shares;
  p->share = TFMI_NEW(tfmi_share, ((uintptr_t)(p + 1) + 63) & ~(uintptr_t)63);
  pthread_mutex_init(&p->lock, NULL);
  pthread_cond_init(&p->wake, NULL);
  pthread_cond_init(&p->done, NULL);
  if (heap->dry) return TFM_OK;
  for (i = 0; i < shares; i++) p->share[i].pool = p, p->share[i].index = i + 1;
  while (p->workers < workers && tfmi_worker_start(&p->share[p->workers])) p->workers++;
  if (p->workers < workers)
    tfmi_log(&heap->host, TFM_LOG_WARNING, "threads: the system gave %d of %d", (int)p->workers + 1,
             (int)workers + 1);
  return TFM_OK;
}

/* Sets d->threads and d->pool. */
static tfm_status tfmi_pool_open(tfm_dev *d, tfmi_heap *heap, int32_t threads) {
  int32_t cores = tfmi_cores();
  if (threads < 0 || threads > 1024)
    return tfmi_report(TFM_E_ARG, "threads: expected 0 to 1024, found %d", (int)threads);
  d->threads = threads ? threads : cores;
  if (d->threads == 1 || heap->host.parallel) return TFM_OK;
  if (d->threads < cores || cores == 64) cores = d->threads; /* 64: perhaps there are more */
  return tfmi_pool_start(d, heap, cores - 1);
}

static void tfmi_pool_close(tfm_dev *d, tfmi_heap *heap) {
  tfmi_pool *p = d->pool;
  int32_t i;
  if (!p) return;
  tfmi_pool_tell(p, p->workers, TFMI_SHARE_STOP);
  for (i = 0; i < p->workers; i++) pthread_join(p->share[i].thread, NULL);
  pthread_cond_destroy(&p->done);
  pthread_cond_destroy(&p->wake);
  pthread_mutex_destroy(&p->lock);
  tfmi_heap_put(heap, p, p->bytes);
  d->pool = NULL;
}

/* ---- Failure ---- */

TFM_API TFMI_PRINTF(3, 4) void tfm_dev_fail(tfm_dev *d, tfm_status status, const char *format,
                                            ...) {
  va_list args;
  if (d->status != TFM_OK) return;
  d->status = status;
  va_start(args, format);
  vsnprintf(d->message, sizeof d->message, format, args);
  va_end(args);
}

/* ---- The entries by name: which are missing, which are overridden ---- */

typedef enum tfmi_entry_kind {
  TFMI_ENTRY_DEVICE,   /* required; the table's own always */
  TFMI_ENTRY_FORWARD,  /* required */
  TFMI_ENTRY_OPTIONAL, /* a table may decline it */
  TFMI_ENTRY_EXPERTS,  /* required by models with experts */
  TFMI_ENTRY_BACKWARD  /* required by the trainer */
} tfmi_entry_kind;

typedef struct tfmi_entry {
  const char *name;
  size_t offset; /* in tfm_backend */
  tfmi_entry_kind kind;
} tfmi_entry;

#define TFMI_ENTRY(name, kind) {#name, offsetof(tfm_backend, name), TFMI_ENTRY_##kind}
static const tfmi_entry tfmi_entries[] = {
  TFMI_ENTRY(open, DEVICE), TFMI_ENTRY(close, DEVICE), TFMI_ENTRY(sync, DEVICE),
  TFMI_ENTRY(alloc, DEVICE), TFMI_ENTRY(release, DEVICE), TFMI_ENTRY(put, DEVICE),
  TFMI_ENTRY(get, DEVICE), TFMI_ENTRY(copy, DEVICE), TFMI_ENTRY(zero, DEVICE),
  TFMI_ENTRY(alloc_shared, DEVICE), TFMI_ENTRY(release_shared, DEVICE),
  TFMI_ENTRY(work_bytes, DEVICE), TFMI_ENTRY(replay, DEVICE), TFMI_ENTRY(record, DEVICE),
  TFMI_ENTRY(pack_size, DEVICE), TFMI_ENTRY(pack, DEVICE), TFMI_ENTRY(unpack, DEVICE),
  TFMI_ENTRY(cast, FORWARD), TFMI_ENTRY(embed, FORWARD), TFMI_ENTRY(gather, FORWARD),
  TFMI_ENTRY(norm, FORWARD), TFMI_ENTRY(matmul, FORWARD), TFMI_ENTRY(rope, FORWARD),
  TFMI_ENTRY(kv_put, FORWARD), TFMI_ENTRY(attn, FORWARD), TFMI_ENTRY(glu, FORWARD),
  TFMI_ENTRY(route, FORWARD), TFMI_ENTRY(matmul_moe, FORWARD), TFMI_ENTRY(combine, FORWARD),
  TFMI_ENTRY(sample, FORWARD), TFMI_ENTRY(top, FORWARD),
  TFMI_ENTRY(matmul_glu, OPTIONAL), TFMI_ENTRY(layer, OPTIONAL), TFMI_ENTRY(decode, OPTIONAL),
  TFMI_ENTRY(loss, BACKWARD), TFMI_ENTRY(matmul_dx, BACKWARD), TFMI_ENTRY(matmul_dw, BACKWARD),
  TFMI_ENTRY(epilogue_bwd, BACKWARD), TFMI_ENTRY(norm_bwd, BACKWARD),
  TFMI_ENTRY(attn_bwd, BACKWARD), TFMI_ENTRY(glu_bwd, BACKWARD), TFMI_ENTRY(embed_bwd, BACKWARD),
  TFMI_ENTRY(route_bwd, BACKWARD), TFMI_ENTRY(combine_bwd, BACKWARD),
  TFMI_ENTRY(moe_dx, BACKWARD), TFMI_ENTRY(moe_dw, BACKWARD), TFMI_ENTRY(sumsq, BACKWARD),
  TFMI_ENTRY(adamw, BACKWARD), TFMI_ENTRY(moe_bias, EXPERTS), TFMI_ENTRY(add_gated, EXPERTS),
  TFMI_ENTRY(moe_bias_bwd, BACKWARD), TFMI_ENTRY(add_gated_bwd, BACKWARD),
  TFMI_ENTRY(mark, OPTIONAL), TFMI_ENTRY(usage, OPTIONAL)};
#undef TFMI_ENTRY

static bool tfmi_entry_present(const tfm_backend *table, const tfmi_entry *e) {
  void (*function)(void);
  memcpy(&function, (const char *)table + e->offset, sizeof function);
  return function != NULL;
}

/* The name of the first entry of that kind that the table declines, or NULL. */
static const char *tfmi_entry_missing(const tfm_backend *table, tfmi_entry_kind kind) {
  int32_t i;
  for (i = 0; i < TFMI_COUNT(tfmi_entries); i++)
    if (tfmi_entries[i].kind == kind && !tfmi_entry_present(table, &tfmi_entries[i]))
      return tfmi_entries[i].name;
  return NULL;
}

static const char *tfmi_experts_missing(const tfm_backend *table) {
  return tfmi_entry_missing(table, TFMI_ENTRY_EXPERTS);
}

static bool tfmi_entry_overridable(const tfmi_entry *e) {
  return e->kind != TFMI_ENTRY_DEVICE && tfmi_entry_present(tfm_backend_ref(), e);
}

/* Bits of the overridable entries called name[0 .. n-1], of all for "all"; 0: there is none. */
static uint64_t tfmi_override_bits(const char *name, size_t n) {
  bool all = n == 3 && memcmp(name, "all", 3) == 0;
  uint64_t bits = 0;
  int32_t i;
  for (i = 0; i < TFMI_COUNT(tfmi_entries); i++) {
    const tfmi_entry *e = &tfmi_entries[i];
    bool match = all || (strlen(e->name) == n && memcmp(e->name, name, n) == 0);
    if (match && tfmi_entry_overridable(e)) bits |= UINT64_C(1) << (e->offset / sizeof(void *));
  }
  return bits;
}

static tfm_status tfmi_override_unknown(const char *name, size_t n) {
  char list[360] = "all";
  size_t used = 3;
  int32_t i;
  for (i = 0; i < TFMI_COUNT(tfmi_entries); i++) {
    const tfmi_entry *e = &tfmi_entries[i];
    size_t length = strlen(e->name);
    if (!tfmi_entry_overridable(e) || used + length + 3 > sizeof list) continue;
    memcpy(list + used, ", ", 2);
    memcpy(list + used + 2, e->name, length + 1);
    used += length + 2;
  }
  return tfmi_report(TFM_E_ARG, "override: \"%.*s\" is no entry; expected some of: %s",
                     (int)(n < 40 ? n : 40), name, list);
}

/* "attn, norm" to bits of override_mask. */
static tfm_status tfmi_override_parse(const char *text, uint64_t *mask) {
  const char *at = text ? text : "";
  *mask = 0;
  while (*(at += strspn(at, ", "))) {
    size_t n = strcspn(at, ", ");
    uint64_t bits = tfmi_override_bits(at, n);
    if (!bits) return tfmi_override_unknown(at, n);
    *mask |= bits;
    at += n;
  }
  return TFM_OK;
}

/* ---- Opening ---- */

static const struct tfmi_table_row {
  tfm_device device;
  const char *name, *remedy;
  const tfm_backend *(*table)(void); /* NULL: not compiled in */
} tfmi_tables[] = { /* fastest first: the order of TFM_AUTO and of falling back */
#ifdef TFM_USE_CUDA
  {TFM_CUDA, "cuda", "", tfm_backend_cuda},
#else
  {TFM_CUDA, "cuda", "define TFM_USE_CUDA and link transformer_cuda.cu", NULL},
#endif
#ifdef TFM_USE_CPU
  {TFM_CPU, "cpu", "", tfm_backend_cpu},
#else
  {TFM_CPU, "cpu", "define TFM_USE_CPU and link transformer_cpu.c", NULL},
#endif
  {TFM_REF, "ref", "", tfm_backend_ref}};

/* Why a table cannot be used, left in the device; TFM_OK when it can. */
static tfm_status tfmi_table_check(tfm_dev *d, const tfm_backend *table) {
  const char *missing = tfmi_entry_missing(table, TFMI_ENTRY_DEVICE);
  if (!missing) missing = tfmi_entry_missing(table, TFMI_ENTRY_FORWARD);
  if (table->abi != TFM_BACKEND_ABI)
    tfm_dev_fail(d, TFM_E_UNSUPPORTED, "its table has layout %u, expected %u; rebuild it",
                 (unsigned)table->abi, (unsigned)TFM_BACKEND_ABI);
  else if (missing)
    tfm_dev_fail(d, TFM_E_UNSUPPORTED, "its table lacks the entry %s", missing);
  else if (d->override_mask && table->activation != TFM_F32)
    tfm_dev_fail(d, TFM_E_UNSUPPORTED, "its activations are %s, but an override computes in F32",
                 tfm_type_name(table->activation));
  return d->status;
}

/* One table; on failure d->message says why and d is as before. */
static tfm_status tfmi_table_open(tfm_dev *d, const struct tfmi_table_row *row, uint64_t mask) {
  const tfm_backend *table = row->table ? row->table() : NULL;
  tfm_status status;
  d->status = TFM_OK;
  d->message[0] = 0;
  d->override_mask = table == tfm_backend_ref() ? 0 : mask;
  d->host_visible = d->override_mask != 0;
  if (!table) {
    tfm_dev_fail(d, TFM_E_UNSUPPORTED, "it is not compiled in; %s", row->remedy);
    return d->status;
  }
  status = tfmi_table_check(d, table);
  if (status != TFM_OK) return status;
  d->table = table;
  status = table->open(d);
  if (status == TFM_OK) return TFM_OK;
  tfm_dev_fail(d, status, "it cannot be opened");
  d->table = NULL;
  d->state = NULL;
  return status;
}

/* Walks down the tables from the one asked for. */
static tfm_status tfmi_table_choose(tfm_dev *d, tfm_device which, uint64_t mask, bool no_fallback) {
  const struct tfmi_table_row *row = tfmi_tables, *end = row + TFMI_COUNT(tfmi_tables);
  tfm_status status = TFM_E_ARG;
  bool found = which == TFM_AUTO;
  for (; row < end; row++) {
    found = found || row->device == which;
    if (!found || (which == TFM_AUTO && !row->table)) continue;
    status = tfmi_table_open(d, row, mask);
    if (status == TFM_OK) {
      tfmi_log(d->host, TFM_LOG_INFO, "device: %s, threads: %d", d->table->name, (int)d->threads);
      return TFM_OK;
    }
    if (which != TFM_AUTO && no_fallback) break;
    tfmi_log(d->host, TFM_LOG_WARNING, "device %s is passed over: %s", row->name, d->message);
  }
  if (!found) return tfmi_report(status, "device: %d is none of tfm_device's", (int)which);
  return tfmi_report(status, "device %s: %s", (row < end ? row : end - 1)->name, d->message);
}

static void tfmi_dev_close(tfm_dev *d, tfmi_heap *heap) {
  if (d->table) d->table->close(d);
  tfmi_pool_close(d, heap);
  memset(d, 0, sizeof *d);
}

static tfm_status tfmi_dev_open(tfm_dev *d, tfmi_heap *heap, tfm_device which, int32_t index,
                                int32_t threads, const char *override, bool no_fallback) {
  uint64_t mask;
  tfm_status status = tfmi_override_parse(override, &mask);
  memset(d, 0, sizeof *d);
  d->host = &heap->host;
  d->index = index;
  if (status == TFM_OK) status = tfmi_pool_open(d, heap, threads);
  if (status == TFM_OK) status = tfmi_table_choose(d, which, mask, no_fallback);
  if (status != TFM_OK) tfmi_dev_close(d, heap);
  return status;
}

/* =================================================================================================
   >>kernels   the reference: every entry of the table in portable C
   =================================================================================================

   This is what a transformer computes, and what tuned kernels are compared with. Activations are
   F32.

   Sums over a row run in 16 lanes, lane l taking the elements l, l + 16, ..., and the lanes are
   added as a tree at the end. That is the only order of summation here: it does not depend on how
   many rows are computed together, nor on the threads, so neither do the bits of a result.

   One kernel does nearly all the work: tfmi_dots multiplies up to 16 rows of x by 4 rows of W. It
   serves the matrix products, the experts, and the scores of attention, whose x are the query heads
   and whose W the keys. Rows of W that are not F32 are decoded on the stack, a piece at a time, and
   used for all rows of x. Work is split over rows of W, heads, or rows of x, never inside a sum. */

/* ---- Lanes ---- */

#if defined(__GNUC__)
#define TFMI_INLINE static inline __attribute__((always_inline))
#define TFMI_RESTRICT __restrict
#define TFMI_PREFETCH(p) __builtin_prefetch(p)
typedef float tfmi_lanes __attribute__((vector_size(64)));
typedef float tfmi_lanes8 __attribute__((vector_size(32)));
typedef float tfmi_lanes4 __attribute__((vector_size(16)));

TFMI_INLINE void tfmi_lanes_madd(tfmi_lanes *sum, const tfmi_lanes *a, const tfmi_lanes *b) {
  *sum += *a * *b;
}

TFMI_INLINE float tfmi_lanes_sum(const tfmi_lanes *v) {
  tfmi_lanes8 half[2];
  tfmi_lanes4 quarter[2];
  float t[4];
  memcpy(half, v, sizeof half);
  half[0] += half[1];
  memcpy(quarter, half, sizeof quarter);
  quarter[0] += quarter[1];
  memcpy(t, quarter, sizeof t);
  return (t[0] + t[2]) + (t[1] + t[3]);
}
#else
#define TFMI_INLINE static inline
#define TFMI_RESTRICT
#define TFMI_PREFETCH(p) ((void)(p))
typedef struct tfmi_lanes { float lane[16]; } tfmi_lanes;
TFMI_INLINE void tfmi_lanes_madd(tfmi_lanes *sum, const tfmi_lanes *a, const tfmi_lanes *b) {
  int l;
  for (l = 0; l < 16; l++) sum->lane[l] += a->lane[l] * b->lane[l];
}

TFMI_INLINE float tfmi_lanes_sum(const tfmi_lanes *v) {
  tfmi_lanes t = *v;
  int l;
  for (l = 0; l < 8; l++) t.lane[l] += t.lane[l + 8];
  for (l = 0; l < 4; l++) t.lane[l] += t.lane[l + 4];
  return (t.lane[0] + t.lane[2]) + (t.lane[1] + t.lane[3]);
}
#endif

enum {
  TFMI_LANES = 16,
  TFMI_ROWS = 16,   /* rows of x in one tfmi_dots */
  TFMI_PANEL = 32,  /* rows of W whose products are collected before the epilogue; keys in a tile */
  TFMI_PIECE = 256, /* values decoded at a time: the longest block */
  TFMI_STRETCH = 1024, /* values of F32 rows multiplied at a time: 4 rows stay in the first cache */
  TFMI_AHEAD = 1024 /* values: how far ahead of its use a row of W is asked for, for one row of x */
};

static float tfmi_max(const float *x, int64_t n) { /* NaN is passed over; -INFINITY when all are */
  enum { LANES = 32 }; /* gcc 12 makes 16 of them scalars */
  float t[LANES], best = -INFINITY;
  int64_t i;
  int l;
  for (l = 0; l < LANES; l++) t[l] = -INFINITY;
  for (i = 0; i + LANES <= n; i += LANES)
    for (l = 0; l < LANES; l++) t[l] = x[i + l] > t[l] ? x[i + l] : t[l];
  for (; i < n; i++) best = x[i] > best ? x[i] : best;
  for (l = 0; l < LANES; l++) best = t[l] > best ? t[l] : best;
  return best;
}

static int32_t tfmi_min32(int32_t a, int32_t b) { return a < b ? a : b; }

/* ---- Elementary functions ---- */

/* e^x within 2 units in the last place, 0 below e^-86.9; without branches, so that loops of it are
   vectorised. x = n log 2 + r, and a polynomial for e^r (the coefficients are Cephes'). */
TFMI_INLINE float tfmi_exp(float x) {
  const float low = -86.9f, high = 88.7228f;
  float c = x < low ? low : x, shifted, n, r, p, half;
  uint32_t bits;
  c = c > high ? high : c;
  shifted = c * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the integer lands in the low bits */
  n = shifted - 12582912.0f;
  r = c - n * 0.693359375f + n * 2.12194440e-4f;
  p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  memcpy(&bits, &shifted, sizeof bits);
  bits = (bits - 0x4b400000u + 126u) << 23;                            /* 2^(n-1): n may be 128 */
  bits = (bits | (0x7f800000u & (0u - (x > high)))) & ~(0u - (x < low)); /* infinity; 0 */
  memcpy(&half, &bits, sizeof half);
  return p * half * 2.0f;
}

/* v[i] = act(v[i]) */
static void tfmi_act_row(float *v, int32_t n, tfm_act act) {
  int32_t i;
  switch (act) {
    case TFM_ACT_NONE: break;
    case TFM_ACT_GELU:
      for (i = 0; i < n; i++) v[i] = 0.5f * v[i] * (1.0f + erff(v[i] * 0.70710678f));
      break;
    case TFM_ACT_GELU_TANH: /* x/2 (1 + tanh u) = x / (1 + e^-2u) */
      for (i = 0; i < n; i++) {
        float u = 0.79788456f * (v[i] + 0.044715f * v[i] * v[i] * v[i]);
        v[i] = v[i] / (1.0f + tfmi_exp(-2.0f * u));
      }
      break;
    case TFM_ACT_SILU:
      for (i = 0; i < n; i++) v[i] = v[i] / (1.0f + tfmi_exp(-v[i]));
      break;
    case TFM_ACT_RELU:
      for (i = 0; i < n; i++) v[i] = v[i] > 0 || v[i] != v[i] ? v[i] : 0.0f; /* NaN stays */
      break;
  }
}

static void tfmi_softcap_row(float *v, int32_t n, float cap) {
  int32_t i;
  for (i = 0; i < n; i++) v[i] = cap * tanhf(v[i] / cap);
}

/* What element (row, col) is multiplied by. The bit: word col % 4 of philox(seed; pos, col / 4;
   site, seq), its upper 24 bits as a number in [0, 1), which drops the element below the rate. */
static float tfmi_dropout(const tfm_dropout *p, int32_t row, int32_t col) {
  uint64_t low = (uint64_t)(uint32_t)p->pos[row] << 32 | (uint32_t)col / 4;
  uint64_t high = (uint64_t)p->site << 32 | (uint32_t)p->seq[row];
  uint32_t word = tfmi_philox(p->seed, low, high).word[col % 4];
  float u = (float)(word >> 8) * (1.0f / 16777216.0f);
  return u < p->rate ? 0.0f : 1.0f / (1.0f - p->rate);
}

/* ---- Number formats: n values at x or y, whole blocks, any alignment ---- */

static uint16_t tfmi_load16(const uint8_t *x) {
  uint16_t h;
  memcpy(&h, x, sizeof h);
  return h;
}
static void tfmi_store16(uint8_t *y, uint16_t h) { memcpy(y, &h, sizeof h); }
static void tfmi_put16(uint8_t *y, uint16_t h) { /* in a block, little-endian everywhere */
  y[0] = (uint8_t)h;
  y[1] = (uint8_t)(h >> 8);
}

static void tfmi_decode_f32(float *y, const uint8_t *x, int32_t n) {
  memcpy(y, x, (size_t)n * sizeof *y);
}

/* As tfmi_from_f16, by masks instead of branches. */
TFMI_INLINE float tfmi_from_f16_masked(uint32_t h) {
  uint32_t size = h & 0x7fff, tiny = 0u - (size < 0x400), huge = 0u - (size > 0x7bff), bits;
  float value = (float)(int32_t)size * (1.0f / 16777216.0f); /* a subnormal's */
  memcpy(&bits, &value, sizeof bits);
  bits = (bits & tiny) | (((size << 13) + (112u << 23) + (huge & 112u << 23)) & ~tiny);
  bits |= (h & 0x8000) << 16;
  memcpy(&value, &bits, sizeof bits);
  return value;
}

static void tfmi_decode_f16(float *TFMI_RESTRICT y, const uint8_t *TFMI_RESTRICT x, int32_t n) {
  int32_t i;
  for (i = 0; i < n; i++) y[i] = tfmi_from_f16_masked(tfmi_load16(x + 2 * (int64_t)i));
}

static void tfmi_decode_bf16(float *TFMI_RESTRICT y, const uint8_t *TFMI_RESTRICT x, int32_t n) {
  int32_t i;
  for (i = 0; i < n; i++) y[i] = tfmi_from_bf16(tfmi_load16(x + 2 * (int64_t)i));
}

static void tfmi_decode_q8_0(float *TFMI_RESTRICT y, const uint8_t *TFMI_RESTRICT x, int32_t n) {
  int32_t i, j;
  for (i = 0; i < n; i += 32, x += 34) {
    float scale = tfmi_from_f16(tfmi_u16(x));
    for (j = 0; j < 32; j++) y[i + j] = scale * (float)(int8_t)x[2 + j];
  }
}

static void tfmi_decode_q4_0(float *TFMI_RESTRICT y, const uint8_t *TFMI_RESTRICT x, int32_t n) {
  int32_t i, j;
  for (i = 0; i < n; i += 32, x += 18) {
    float scale = tfmi_from_f16(tfmi_u16(x));
    for (j = 0; j < 16; j++) y[i + j] = scale * (float)((x[2 + j] & 15) - 8);
    for (j = 0; j < 16; j++) y[i + 16 + j] = scale * (float)((x[2 + j] >> 4) - 8);
  }
}

/* Of a block whose values are q times its first number plus its second. */
static void tfmi_decode_q4_1(float *TFMI_RESTRICT y, const uint8_t *TFMI_RESTRICT x, int32_t n) {
  int32_t i, j;
  for (i = 0; i < n; i += 32, x += 20) {
    float scale = tfmi_from_f16(tfmi_u16(x)), low = tfmi_from_f16(tfmi_u16(x + 2));
    for (j = 0; j < 16; j++) y[i + j] = scale * (float)(x[4 + j] & 15) + low;
    for (j = 0; j < 16; j++) y[i + 16 + j] = scale * (float)(x[4 + j] >> 4) + low;
  }
}

/* 32 numbers of 5 bits: the fifths in 4 bytes, then 16 bytes of low halves. */
static void tfmi_unpack5(float *y, const uint8_t *x) {
  uint32_t high = tfmi_u32(x);
  int32_t j;
  for (j = 0; j < 16; j++) {
    y[j] = (float)((x[4 + j] & 15u) | (high >> j & 1) << 4);
    y[16 + j] = (float)(x[4 + j] >> 4 | (high >> (j + 16) & 1) << 4);
  }
}

static void tfmi_decode_q5_0(float *TFMI_RESTRICT y, const uint8_t *TFMI_RESTRICT x, int32_t n) {
  int32_t i, j;
  for (i = 0; i < n; i += 32, x += 22) {
    float scale = tfmi_from_f16(tfmi_u16(x));
    tfmi_unpack5(y + i, x + 2);
    for (j = 0; j < 32; j++) y[i + j] = scale * (y[i + j] - 16);
  }
}

static void tfmi_decode_q5_1(float *TFMI_RESTRICT y, const uint8_t *TFMI_RESTRICT x, int32_t n) {
  int32_t i, j;
  for (i = 0; i < n; i += 32, x += 24) {
    float scale = tfmi_from_f16(tfmi_u16(x)), low = tfmi_from_f16(tfmi_u16(x + 2));
    tfmi_unpack5(y + i, x + 4);
    for (j = 0; j < 32; j++) y[i + j] = scale * y[i + j] + low;
  }
}

/* Scale and offset of the g-th of 8 groups in a block of 256: two f16, then 8 scales and 8 offsets
   of 6 bits in 12 bytes, the upper bits of the last four of each beside the first four's. */
static void tfmi_group(float *scale, float *offset, const uint8_t *x, int g) {
  const uint8_t *at = x + 4;
  int a = at[g % 4] & 63, b = at[g % 4 + 4] & 63;
  if (g >= 4) {
    a = (at[g + 4] & 15) | (at[g % 4] >> 6) << 4;
    b = at[g + 4] >> 4 | (at[g % 4 + 4] >> 6) << 4;
  }
  *scale = tfmi_from_f16(tfmi_u16(x)) * (float)a;
  *offset = tfmi_from_f16(tfmi_u16(x + 2)) * (float)b;
}

/* Groups 2 g and 2 g + 1 share 32 bytes, low halves first. */
static void tfmi_decode_q4_k(float *TFMI_RESTRICT y, const uint8_t *TFMI_RESTRICT x, int32_t n) {
  float scale, offset;
  int32_t i, j;
  int g;
  for (i = 0; i < n; i += 256, x += 144)
    for (g = 0; g < 8; g++) {
      const uint8_t *low = x + 16 + g / 2 * 32;
      tfmi_group(&scale, &offset, x, g);
      for (j = 0; j < 32; j++)
        y[i + 32 * g + j] = scale * (float)(low[j] >> g % 2 * 4 & 15) - offset;
    }
}

/* The same with a fifth bit: bit g of 32 bytes before. */
static void tfmi_decode_q5_k(float *TFMI_RESTRICT y, const uint8_t *TFMI_RESTRICT x, int32_t n) {
  float scale, offset;
  int32_t i, j;
  int g;
  for (i = 0; i < n; i += 256, x += 176)
    for (g = 0; g < 8; g++) {
      const uint8_t *high = x + 16, *low = x + 48 + g / 2 * 32;
      tfmi_group(&scale, &offset, x, g);
      for (j = 0; j < 32; j++) {
        int q = (low[j] >> g % 2 * 4 & 15) | (high[j] >> g & 1) << 4;
        y[i + 32 * g + j] = scale * (float)q - offset;
      }
    }
}

/* 128 bytes of low halves, 64 of upper pairs, 16 signed scales, an f16 scale of these. In each half
   of the block groups 0 and 2, and 1 and 3, share 32 bytes of halves, and all four 32 of pairs. */
static void tfmi_decode_q6_k(float *TFMI_RESTRICT y, const uint8_t *TFMI_RESTRICT x, int32_t n) {
  int32_t i, j;
  int g;
  for (i = 0; i < n; i += 256, x += 210)
    for (g = 0; g < 8; g++) {
      const uint8_t *low = x + g / 4 * 64 + g % 2 * 32, *high = x + 128 + g / 4 * 32;
      float whole = tfmi_from_f16(tfmi_u16(x + 208)), scale[2];
      for (j = 0; j < 2; j++) scale[j] = whole * (float)(int8_t)x[192 + 2 * g + j];
      for (j = 0; j < 32; j++) {
        int q = (low[j] >> g % 4 / 2 * 4 & 15) | (high[j] >> g % 4 * 2 & 3) << 4;
        y[i + 32 * g + j] = scale[j / 16] * (float)(q - 32);
      }
    }
}

/* A sign, 7 - m bits of exponent, m of mantissa. With 3 the largest number is 448 and there is no
   infinity; with 2 it is as in F16, whose upper half it is. */
static float tfmi_from_f8(uint8_t code, int m) {
  int size = code & 0x7f, exponent = size >> m;
  float value;
  if (m == 2) return tfmi_from_f16((uint16_t)(code << 8));
  if (size == 0x7f) return NAN;
  value = exponent ? ldexpf((float)(8 + (size & 7)), exponent - 10) : ldexpf((float)size, -9);
  return code & 0x80 ? -value : value;
}

static void tfmi_decode_e4m3(float *y, const uint8_t *x, int32_t n) {
  int32_t i;
  for (i = 0; i < n; i++) y[i] = tfmi_from_f8(x[i], 3);
}

static void tfmi_decode_e5m2(float *y, const uint8_t *x, int32_t n) {
  int32_t i;
  for (i = 0; i < n; i++) y[i] = tfmi_from_f8(x[i], 2);
}

static void tfmi_encode_f32(uint8_t *y, const float *x, int32_t n) {
  memcpy(y, x, (size_t)n * sizeof *x);
}

static void tfmi_encode_f16(uint8_t *y, const float *x, int32_t n) {
  int32_t i;
  for (i = 0; i < n; i++) tfmi_store16(y + 2 * (int64_t)i, tfmi_to_f16(x[i]));
}

static void tfmi_encode_bf16(uint8_t *y, const float *x, int32_t n) {
  int32_t i;
  for (i = 0; i < n; i++) tfmi_store16(y + 2 * (int64_t)i, tfmi_to_bf16(x[i]));
}

/* The element of 32 that is largest in magnitude, the first of equals, with its sign; NaN is passed
   over. As integers, whose maximum compilers vectorise. */
static float tfmi_extreme(const float *x) {
  int32_t bits[32], up = 0, down = 0;
  int i;
  float best;
  memcpy(bits, x, sizeof bits);
  for (i = 0; i < 32; i++) {
    int32_t size = bits[i] & 0x7fffffff, above, below;
    size = size > 0x7f800000 ? 0 : size;
    above = bits[i] < 0 ? 0 : size;
    below = bits[i] < 0 ? size : 0;
    up = above > up ? above : up;
    down = below > down ? below : down;
  }
  if (up == 0 && down == 0) return 0;
  for (i = 0; up == down && (bits[i] & 0x7fffffff) != up; i++) continue;
  down = up > down || (up == down && bits[i] >= 0) ? up : down | INT32_MIN;
  memcpy(&best, &down, sizeof best);
  return best;
}

/* y[i] = (x[i] - low) / step, of 32, by a product; a step of 0 makes zeros. Not inlined: fused with
   an addition that follows it would round otherwise than gguf does. */
static TFMI_NOINLINE void tfmi_steps(float *y, const float *x, float low, float step) {
  float inverse = step != 0 ? 1.0f / step : 0.0f;
  int i;
  for (i = 0; i < 32; i++) y[i] = (x[i] - low) * inverse;
}

static void tfmi_encode_q8_0(uint8_t *y, const float *x, int32_t n) {
  float step[32];
  int32_t i, j;
  for (i = 0; i < n; i += 32, y += 34) {
    float scale = fabsf(tfmi_extreme(x + i)) / 127.0f;
    tfmi_put16(y, tfmi_to_f16(scale));
    tfmi_steps(step, x + i, 0, scale);
    for (j = 0; j < 32; j++) { /* roundf, which compilers do not vectorise; NaN: 0 */
      float v = step[j] > -127.5f && step[j] < 127.5f ? step[j] : 0.0f, rest;
      int32_t q = (int32_t)v;
      rest = v - (float)q; /* exact */
      y[2 + j] = (uint8_t)(q + (rest >= 0.5f) - (rest <= -0.5f));
    }
  }
}

/* 32 steps from `low` to 0 .. most, rounded; NaN becomes -low. */
static void tfmi_quants(uint8_t *q, const float *x, float low, float step, float zero, float most) {
  float steps[32];
  int j;
  tfmi_steps(steps, x, low, step);
  for (j = 0; j < 32; j++) {
    float v = steps[j] + (zero + 0.5f);
    q[j] = (uint8_t)(v >= most ? most : v >= 0.0f ? v : v < 0.0f ? 0.0f : zero);
  }
}

static void tfmi_put_halves(uint8_t *y, const uint8_t *q) { /* of 4 bits */
  int j;
  for (j = 0; j < 16; j++) y[j] = (uint8_t)((q[j] & 15) | (q[j + 16] & 15) << 4);
}

static void tfmi_put_fifths(uint8_t *y, const uint8_t *q) {
  int j;
  memset(y, 0, 4);
  for (j = 0; j < 32; j++) y[j / 8] = (uint8_t)(y[j / 8] | (q[j] >> 4) << j % 8);
}

static void tfmi_encode_q4_0(uint8_t *y, const float *x, int32_t n) {
  uint8_t q[32];
  int32_t i;
  for (i = 0; i < n; i += 32, y += 18) {
    float scale = tfmi_extreme(x + i) / -8.0f;
    tfmi_put16(y, tfmi_to_f16(scale));
    tfmi_quants(q, x + i, 0, scale, 8, 15);
    tfmi_put_halves(y + 2, q);
  }
}

static void tfmi_encode_q5_0(uint8_t *y, const float *x, int32_t n) {
  uint8_t q[32];
  int32_t i;
  for (i = 0; i < n; i += 32, y += 22) {
    float scale = tfmi_extreme(x + i) / -16.0f;
    tfmi_put16(y, tfmi_to_f16(scale));
    tfmi_quants(q, x + i, 0, scale, 16, 31);
    tfmi_put_fifths(y + 2, q);
    tfmi_put_halves(y + 6, q);
  }
}

/* Scale and lowest of 32 values; their numbers, 0 to `most`. */
static void tfmi_encode_range(uint8_t *y, uint8_t *q, const float *x, float most) {
  float low = x[0], high = x[0], scale;
  int j;
  for (j = 1; j < 32; j++) {
    low = x[j] < low ? x[j] : low;
    high = x[j] > high ? x[j] : high;
  }
  scale = (high - low) / most;
  tfmi_put16(y, tfmi_to_f16(scale));
  tfmi_put16(y + 2, tfmi_to_f16(low));
  tfmi_quants(q, x, low, scale, 0, most);
}

static void tfmi_encode_q4_1(uint8_t *y, const float *x, int32_t n) {
  uint8_t q[32];
  int32_t i;
  for (i = 0; i < n; i += 32, y += 20) {
    tfmi_encode_range(y, q, x + i, 15);
    tfmi_put_halves(y + 4, q);
  }
}

static void tfmi_encode_q5_1(uint8_t *y, const float *x, int32_t n) {
  uint8_t q[32];
  int32_t i;
  for (i = 0; i < n; i += 32, y += 24) {
    tfmi_encode_range(y, q, x + i, 31);
    tfmi_put_fifths(y + 4, q);
    tfmi_put_halves(y + 8, q);
  }
}

static const struct tfmi_codec {
  void (*decode)(float *y, const uint8_t *x, int32_t n);
  void (*encode)(uint8_t *y, const float *x, int32_t n);
  size_t alignment; /* of rows that are used where they lie in a file */
} tfmi_codecs[TFM_TYPE_COUNT] = { /* by tfm_type; NULL: read, never written */
  {NULL, NULL, 0},
  {tfmi_decode_f32, tfmi_encode_f32, 4},
  {tfmi_decode_f16, tfmi_encode_f16, 2},
  {tfmi_decode_bf16, tfmi_encode_bf16, 2},
  {tfmi_decode_q8_0, tfmi_encode_q8_0, 1},
  {tfmi_decode_q4_0, tfmi_encode_q4_0, 1},
  {tfmi_decode_q4_1, tfmi_encode_q4_1, 1},
  {tfmi_decode_q5_0, tfmi_encode_q5_0, 1},
  {tfmi_decode_q5_1, tfmi_encode_q5_1, 1},
  {tfmi_decode_q4_k, NULL, 1},
  {tfmi_decode_q5_k, NULL, 1},
  {tfmi_decode_q6_k, NULL, 1},
  {tfmi_decode_e4m3, NULL, 1},
  {tfmi_decode_e5m2, NULL, 1}};

/* Bytes that n values take; whole blocks. A division would be felt in the loops below. */
static size_t tfmi_span(tfm_type type, int64_t n) {
  size_t bytes = (size_t)tfmi_types[type].block_bytes;
  switch (tfmi_types[type].block_values) {
    case 1: return (size_t)n * bytes;
    case 32: return (size_t)n / 32 * bytes;
    default: return (size_t)n / 256 * bytes;
  }
}

/* By way of floats where the types differ. */
static void tfmi_convert(tfm_type to, uint8_t *y, tfm_type from, const uint8_t *x, int32_t n) {
  float piece[TFMI_PIECE];
  int32_t i;
  if (to == from) {
    memmove(y, x, tfmi_span(to, n));
    return;
  }
  for (i = 0; i < n; i += TFMI_PIECE) {
    int32_t some = tfmi_min32(TFMI_PIECE, n - i);
    tfmi_codecs[from].decode(piece, x + tfmi_span(from, i), some);
    tfmi_codecs[to].encode(y + tfmi_span(to, i), piece, some);
  }
}

/* x[i] *= the scale of value (row, col + i) of a matrix with `cols` columns. */
static void tfmi_scale(float *x, const tfm_scales *s, int32_t cols, int64_t row, int32_t col,
                       int32_t n) {
  const float *at;
  int32_t i;
  if (!s->at) return;
  at = s->at + row / s->tall * ((cols + s->wide - 1) / s->wide);
  for (i = 0; i < n; i++) x[i] *= at[(col + i) / s->wide];
}

/* Part of a row of a matrix with scales. */
static void tfmi_convert_scaled(tfm_type to, uint8_t *y, const tfm_part *p, int32_t cols,
                                int32_t row) {
  const uint8_t *from = (const uint8_t *)p->data + (size_t)row * tfmi_span(p->type, cols);
  float piece[TFMI_PIECE];
  int32_t i;
  for (i = 0; i < cols; i += TFMI_PIECE) {
    int32_t n = tfmi_min32(TFMI_PIECE, cols - i);
    tfmi_codecs[p->type].decode(piece, from + tfmi_span(p->type, i), n);
    tfmi_scale(piece, &p->scales, cols, row, i, n);
    tfmi_codecs[to].encode(y + tfmi_span(to, i), piece, n);
  }
}

/* ---- Views ---- */

static float *tfmi_row(tfm_mat m, int64_t row) { return TFMI_NEW(float, m.data) + row * m.stride; }

static uint8_t *tfmi_row_bytes(tfm_mat m, int64_t row) {
  return (uint8_t *)m.data + tfmi_span(m.type, row * m.stride);
}

/* Rows per share that make a share worth its dispatch. */
static int32_t tfmi_grain(int64_t work_per_row) {
  int64_t rows = work_per_row > 0 ? 16384 / work_per_row + 1 : 16384;
  return (int32_t)rows;
}

/* ---- Packed weights: parts with the bytes where they lie, or converted into our memory ---- */

typedef struct tfmi_stripe { /* consecutive rows in one type */
  const uint8_t *data;
  int32_t rows;
  tfm_type type;
  size_t row_bytes;
  int64_t first; /* row of the whole weight, all experts stacked */
} tfmi_stripe;

typedef struct tfmi_packed {
  int64_t count; /* of stripes, which follow */
} tfmi_packed;

static tfmi_packed *tfmi_packed_of(const tfm_weight *w) { /* our own form, when overridden */
  return TFMI_NEW(tfmi_packed, w->reference ? w->reference->host : w->host);
}

/* The stripe that holds a row. */
static const tfmi_stripe *tfmi_stripe_at(const tfm_weight *w, int64_t row) {
  const tfmi_packed *packed = tfmi_packed_of(w);
  const tfmi_stripe *s = (const tfmi_stripe *)(const void *)(packed + 1);
  int64_t low = 0, high = packed->count;
  while (high - low > 1) {
    int64_t middle = (low + high) / 2;
    if (s[middle].first <= row) low = middle;
    else high = middle;
  }
  return s + low;
}

static const uint8_t *tfmi_stripe_row(const tfmi_stripe *s, int64_t row) {
  return s->data + (size_t)(row - s->first) * s->row_bytes;
}

static tfm_type tfmi_stripe_type(const tfm_weight_source *s, const tfm_part *p) {
  return s->type == TFM_TYPE_DEFAULT ? p->type : s->type;
}

static bool tfmi_used_in_place(const tfm_weight_source *s, const tfm_part *p) {
  return s->stable && !s->transposed && tfmi_stripe_type(s, p) == p->type && !p->scales.at &&
         (uintptr_t)p->data % tfmi_codecs[p->type].alignment == 0;
}

/* What speaks against packing a part, as a status left in the device. */
static tfm_status tfmi_part_check(tfm_dev *d, const tfm_weight_source *s, const tfm_part *p) {
  tfm_type type = tfmi_stripe_type(s, p), wrong = type;
  size_t bytes;
  if (tfmi_type_bytes(type, (uint64_t)s->cols, &bytes)) wrong = p->type;
  if ((type != p->type || p->scales.at) && !tfmi_codecs[type].encode)
    tfm_dev_fail(d, TFM_E_UNSUPPORTED, "weights cannot be converted to %s: expected F32, F16, "
                 "BF16, Q8_0, Q4_0, Q4_1, Q5_0 or Q5_1", tfm_type_name(type));
  else if (s->transposed && tfmi_types[p->type].block_values > 1)
    tfm_dev_fail(d, TFM_E_UNSUPPORTED, "a transposed matrix of type %s: expected a float type",
                 tfm_type_name(p->type));
  else if (!tfmi_type_bytes(wrong, (uint64_t)s->cols, &bytes))
    tfm_dev_fail(d, TFM_E_UNSUPPORTED,
                 "a matrix with %d columns cannot be %s, whose blocks have %d; choose a float type",
                 (int)s->cols, tfm_type_name(wrong), (int)tfmi_types[wrong].block_values);
  return d->status;
}

static tfm_pack_size tfmi_ref_pack_size(tfm_dev *d, const tfm_weight_source *s) {
  tfm_pack_size size = {0, 0}, failed = {0, 0};
  int32_t i;
  size.host_bytes = tfmi_align64(sizeof(tfmi_packed) + (size_t)s->part_count * sizeof(tfmi_stripe));
  for (i = 0; i < s->part_count; i++) {
    const tfm_part *p = &s->parts[i];
    if (tfmi_part_check(d, s, p) != TFM_OK) return failed;
    if (!tfmi_used_in_place(s, p))
      size.host_bytes += tfmi_align64((size_t)p->rows * tfmi_span(tfmi_stripe_type(s, p), s->cols));
  }
  return size;
}

typedef struct tfmi_pack_job {
  const tfm_part *part;
  uint8_t *to;
  tfm_type type;
  int32_t cols;
  bool transposed;
} tfmi_pack_job;

/* tile [16, 32] = values (row + i, col + j) of a source that is stored [cols, rows]. */
static void tfmi_transpose_tile(float *tile, const tfmi_pack_job *t, int32_t row, int32_t rows,
                                int32_t col, int32_t cols) {
  const uint8_t *from = (const uint8_t *)t->part->data;
  float line[TFMI_ROWS];
  int32_t i, j;
  for (j = 0; j < cols; j++) {
    int64_t at = (int64_t)(col + j) * t->part->rows + row;
    tfmi_codecs[t->part->type].decode(line, from + tfmi_span(t->part->type, at), rows);
    for (i = 0; i < rows; i++) tile[i * 32 + j] = line[i];
  }
}

static void tfmi_pack_transposed(const tfmi_pack_job *t, int32_t begin, int32_t end) {
  float tile[TFMI_ROWS * 32];
  int32_t row, col, i;
  for (row = begin; row < end; row += TFMI_ROWS)
    for (col = 0; col < t->cols; col += 32) {
      int32_t rows = tfmi_min32(TFMI_ROWS, end - row), cols = tfmi_min32(32, t->cols - col);
      tfmi_transpose_tile(tile, t, row, rows, col, cols);
      for (i = 0; i < rows; i++)
        tfmi_codecs[t->type].encode(t->to + (size_t)(row + i) * tfmi_span(t->type, t->cols) +
                                    tfmi_span(t->type, col), tile + i * 32, cols);
    }
}

static void tfmi_pack_rows(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_pack_job *t = (const tfmi_pack_job *)context;
  size_t from_bytes = tfmi_span(t->part->type, t->cols), to_bytes = tfmi_span(t->type, t->cols);
  const uint8_t *from = (const uint8_t *)t->part->data;
  int32_t row;
  (void)worker;
  if (t->transposed) tfmi_pack_transposed(t, begin, end);
  for (row = begin; row < end && !t->transposed; row++)
    if (t->part->scales.at)
      tfmi_convert_scaled(t->type, t->to + (size_t)row * to_bytes, t->part, t->cols, row);
    else
      tfmi_convert(t->type, t->to + (size_t)row * to_bytes, t->part->type,
                   from + (size_t)row * from_bytes, t->cols);
}

/* Fills one stripe; returns the bytes of `own` that it took. */
static size_t tfmi_pack_stripe(tfm_dev *d, tfmi_stripe *stripe, const tfm_weight_source *s,
                               const tfm_part *p, uint8_t *own) {
  tfmi_pack_job job = {p, own, tfmi_stripe_type(s, p), s->cols, s->transposed};
  bool in_place = tfmi_used_in_place(s, p);
  stripe->data = in_place ? (const uint8_t *)p->data : own;
  stripe->rows = p->rows;
  stripe->type = job.type;
  stripe->row_bytes = tfmi_span(job.type, s->cols);
  if (in_place) return 0;
  tfm_parallel_for(d, p->rows, TFMI_ROWS, tfmi_pack_rows, &job);
  return tfmi_align64((size_t)p->rows * stripe->row_bytes);
}

static void tfmi_ref_pack(tfm_dev *d, tfm_weight *w, const tfm_weight_source *s, void *host,
                          void *device) {
  tfmi_packed *packed = TFMI_NEW(tfmi_packed, host);
  tfmi_stripe *stripe = TFMI_NEW(tfmi_stripe, packed + 1);
  size_t header = sizeof *packed + (size_t)s->part_count * sizeof *stripe;
  uint8_t *own = (uint8_t *)host + tfmi_align64(header);
  int64_t first = 0;
  int32_t i;
  memset(w, 0, sizeof *w);
  for (i = 0; i < s->part_count; i++)
    if (tfmi_part_check(d, s, &s->parts[i]) != TFM_OK) return;
  w->rows = s->rows;
  w->cols = s->cols;
  w->experts = s->experts;
  w->roles = s->roles;
  w->host = host;
  w->device = device;
  packed->count = s->part_count;
  for (i = 0; i < s->part_count; i++) {
    stripe[i].first = first;
    own += tfmi_pack_stripe(d, &stripe[i], s, &s->parts[i], own);
    first += stripe[i].rows;
    w->bytes += (uint64_t)stripe[i].rows * stripe[i].row_bytes;
  }
}

/* y[0 .. cols-1] = one row of the weight, all experts stacked. */
static void tfmi_weight_row(float *y, const tfm_weight *w, int64_t row) {
  const tfmi_stripe *s = tfmi_stripe_at(w, row);
  tfmi_codecs[s->type].decode(y, tfmi_stripe_row(s, row), w->cols);
}

static void tfmi_ref_unpack(tfm_dev *d, tfm_mat y, const tfm_weight *w, int32_t first) {
  int32_t i;
  (void)d;
  for (i = 0; i < y.rows; i++) tfmi_weight_row(tfmi_row(y, i), w, (int64_t)first + i);
}

/* ---- The product of rows ---- */

/* sum[i][j] += x[i] * w[j], lane by lane, over n values, a multiple of 16. `rows` is a constant
   where this is inlined, so that the sums stay in registers. */
TFMI_INLINE void tfmi_tile(tfmi_lanes (*sum)[4], const float *const *x, const float *const *w,
                           int32_t n, const int rows) {
  tfmi_lanes s[4][4], b[4], a;
  int32_t k;
  int i, j;
  for (i = 0; i < rows; i++)
    for (j = 0; j < 4; j++) s[i][j] = sum[i][j];
  for (k = 0; k < n; k += TFMI_LANES) {
    for (j = 0; j < 4; j++) {
      memcpy(&b[j], w[j] + k, sizeof a);
      if (rows == 1) TFMI_PREFETCH(w[j] + k + TFMI_AHEAD);
    }
    for (i = 0; i < rows; i++) {
      memcpy(&a, x[i] + k, sizeof a);
      for (j = 0; j < 4; j++) tfmi_lanes_madd(&s[i][j], &a, &b[j]);
    }
  }
  for (i = 0; i < rows; i++)
    for (j = 0; j < 4; j++) sum[i][j] = s[i][j];
}

/* The same for any number of rows up to 16. */
static void tfmi_tiles(tfmi_lanes (*sum)[4], const float *const *x, int32_t rows,
                       const float *const *w, int32_t n) {
  int32_t i;
  for (i = 0; i + 4 <= rows; i += 4) tfmi_tile(sum + i, x + i, w, n, 4);
  if (rows - i == 1) tfmi_tile(sum + i, x + i, w, n, 1);
  if (rows - i == 2) tfmi_tile(sum + i, x + i, w, n, 2);
  if (rows - i == 3) tfmi_tile(sum + i, x + i, w, n, 3);
}

/* What is left of rows whose width is no multiple of 16, filled up with zeros. */
static void tfmi_tile_rest(tfmi_lanes (*sum)[4], const float *const *x, int32_t rows,
                           const float *const *w, int32_t n) {
  float xs[TFMI_ROWS][TFMI_LANES], ws[4][TFMI_LANES];
  const float *xp[TFMI_ROWS], *wp[4];
  int32_t i;
  memset(ws, 0, sizeof ws);
  for (i = 0; i < 4; i++) wp[i] = (float *)memcpy(ws[i], w[i], (size_t)n * sizeof *w[i]);
  for (i = 0; i < rows; i++) {
    memset(xs[i], 0, sizeof xs[i]);
    xp[i] = (float *)memcpy(xs[i], x[i], (size_t)n * sizeof *x[i]);
  }
  tfmi_tiles(sum, xp, rows, wp, TFMI_LANES);
}

/* out[i * TFMI_PANEL + j] = x[i] . w[j], for up to 16 rows of x and up to 4 of W, of any type. */
static void tfmi_dots(float *out, const float *const *x, int32_t m, const uint8_t *const *w,
                      int32_t n, tfm_type type, int32_t cols) {
  int32_t stretch = type == TFM_F32 ? TFMI_STRETCH : TFMI_PIECE, i, j, k;
  tfmi_lanes sum[TFMI_ROWS][4];
  float decoded[4][TFMI_PIECE];
  const float *xk[TFMI_ROWS], *wk[4];
  for (i = 0; i < m; i++) memset(sum[i], 0, sizeof sum[i]);
  for (k = 0; k < cols; k += stretch) {
    int32_t some = tfmi_min32(stretch, cols - k), whole = some & ~(TFMI_LANES - 1);
    for (j = 0; j < 4; j++) { /* rows that are not there repeat the last */
      const uint8_t *from = w[tfmi_min32(j, n - 1)] + tfmi_span(type, k);
      wk[j] = type == TFM_F32 ? (const float *)(const void *)from : decoded[j];
      if (type != TFM_F32) tfmi_codecs[type].decode(decoded[j], from, some);
    }
    for (i = 0; i < m; i++) xk[i] = x[i] + k;
    tfmi_tiles(sum, xk, m, wk, whole);
    if (whole == some) continue;
    for (i = 0; i < m; i++) xk[i] += whole;
    for (j = 0; j < 4; j++) wk[j] += whole;
    tfmi_tile_rest(sum, xk, m, wk, some - whole);
  }
  for (i = 0; i < m; i++)
    for (j = 0; j < n; j++) out[i * TFMI_PANEL + j] = tfmi_lanes_sum(&sum[i][j]);
}

/* out[i][j] = x[i] . row first + j of W, for up to 16 rows of x and n <= TFMI_PANEL of W. */
static void tfmi_panel(float *out, const float *const *x, int32_t m, const tfm_weight *w,
                       int64_t first, int32_t n) {
  const uint8_t *row[4];
  int32_t j, k;
  for (j = 0; j < n;) {
    const tfmi_stripe *s = tfmi_stripe_at(w, first + j);
    int64_t left = s->first + s->rows - (first + j);
    int32_t rows = tfmi_min32(n - j, left < 4 ? (int32_t)left : 4);
    for (k = 0; k < rows; k++) row[k] = tfmi_stripe_row(s, first + j + k);
    tfmi_dots(out + j, x, m, row, rows, s->type, w->cols);
    j += rows;
  }
}

/* ---- matmul ---- */

/* v[0 .. n-1], columns col and on of a row of x W^T, become that part of the row of y. */
static void tfmi_epilogue(float *v, int32_t n, const tfm_epilogue *e, int32_t row, int32_t col) {
  int32_t j;
  if (e->bias)
    for (j = 0; j < n; j++) v[j] += e->bias[col + j];
  if (e->aux.data) memcpy(tfmi_row(e->aux, row) + col, v, (size_t)n * sizeof *v);
  tfmi_act_row(v, n, e->act);
  if (e->softcap != 0) tfmi_softcap_row(v, n, e->softcap);
  if (e->dropout.rate > 0)
    for (j = 0; j < n; j++) v[j] *= tfmi_dropout(&e->dropout, row, col + j);
  if (e->residual.data) {
    const float *residual = tfmi_row(e->residual, row) + col;
    for (j = 0; j < n; j++) v[j] += residual[j];
  }
}

typedef struct tfmi_matmul_job {
  tfm_mat y, x;
  const tfm_weight *w;
  const tfm_epilogue *e;
  const tfm_routing *routing; /* of matmul_moe */
  bool spread;
} tfmi_matmul_job;

/* Columns begin .. end-1 of y: rows of W. */
static void tfmi_matmul_columns(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_matmul_job *t = (const tfmi_matmul_job *)context;
  float out[TFMI_ROWS * TFMI_PANEL];
  const float *x[TFMI_ROWS];
  int32_t col, row, i;
  (void)worker;
  for (col = begin; col < end; col += TFMI_PANEL)
    for (row = 0; row < t->x.rows; row += TFMI_ROWS) {
      int32_t n = tfmi_min32(TFMI_PANEL, end - col), m = tfmi_min32(TFMI_ROWS, t->x.rows - row);
      for (i = 0; i < m; i++) x[i] = tfmi_row(t->x, row + i);
      tfmi_panel(out, x, m, t->w, col, n);
      for (i = 0; i < m; i++) {
        if (t->e) tfmi_epilogue(out + i * TFMI_PANEL, n, t->e, row + i, col);
        memcpy(tfmi_row(t->y, row + i) + col, out + i * TFMI_PANEL, (size_t)n * sizeof *out);
      }
    }
}

/* W's rows cut evenly into shares that are worth a dispatch, in whole lanes: so an element of y is
   in the same place of a vector, and of the loop over vectors, whatever the threads. */
static int32_t tfmi_matmul_grain(const tfm_dev *d, const tfm_weight *w, int32_t rows) {
  int64_t shares = (int64_t)w->rows * w->cols * rows / 16384 + 1, each;
  if (shares > d->threads) shares = d->threads;
  each = (w->rows + shares - 1) / shares;
  return (int32_t)((each + TFMI_LANES - 1) & ~(int64_t)(TFMI_LANES - 1));
}

static void tfmi_ref_matmul(tfm_dev *d, tfm_mat y, tfm_mat x, const tfm_weight *w,
                            const tfm_epilogue *e) {
  tfmi_matmul_job job = {y, x, w, e, NULL, false};
  tfm_parallel_for(d, w->rows, tfmi_matmul_grain(d, w, x.rows), tfmi_matmul_columns, &job);
}

/* ---- Copies: cast, gather, embed ---- */

typedef struct tfmi_copy_job {
  tfm_mat y, x;
  const int32_t *index; /* NULL: in order */
} tfmi_copy_job;

static void tfmi_copy_rows(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_copy_job *t = (const tfmi_copy_job *)context;
  int32_t i;
  (void)worker;
  for (i = begin; i < end; i++)
    tfmi_convert(t->y.type, tfmi_row_bytes(t->y, i), t->x.type,
                 tfmi_row_bytes(t->x, t->index ? t->index[i] : i), t->y.cols);
}

static void tfmi_ref_cast(tfm_dev *d, tfm_mat y, tfm_mat x) {
  tfmi_copy_job job = {y, x, NULL};
  tfm_parallel_for(d, y.rows, tfmi_grain(y.cols), tfmi_copy_rows, &job);
}

static void tfmi_ref_gather(tfm_dev *d, tfm_mat y, tfm_mat x, const int32_t *index) {
  tfmi_copy_job job = {y, x, index};
  tfm_parallel_for(d, y.rows, tfmi_grain(y.cols), tfmi_copy_rows, &job);
}

typedef struct tfmi_embed_job {
  tfm_mat y;
  const tfm_weight *table, *positions;
  const tfm_rows *rows;
  float scale;
} tfmi_embed_job;

/* y[0 .. cols-1] += one row of the weight. */
static void tfmi_weight_row_add(float *y, const tfm_weight *w, int64_t row) {
  const tfmi_stripe *s = tfmi_stripe_at(w, row);
  const uint8_t *from = tfmi_stripe_row(s, row);
  float piece[TFMI_PIECE];
  int32_t i, j;
  for (i = 0; i < w->cols; i += TFMI_PIECE) {
    int32_t n = tfmi_min32(TFMI_PIECE, w->cols - i);
    tfmi_codecs[s->type].decode(piece, from + tfmi_span(s->type, i), n);
    for (j = 0; j < n; j++) y[i + j] += piece[j];
  }
}

static void tfmi_embed_rows(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_embed_job *t = (const tfmi_embed_job *)context;
  int32_t i, j;
  (void)worker;
  for (i = begin; i < end; i++) {
    float *y = tfmi_row(t->y, i);
    if (t->rows->seq[i] < 0) continue;
    tfmi_weight_row(y, t->table, t->rows->id[i]);
    for (j = 0; j < t->y.cols; j++) y[j] *= t->scale;
    if (t->positions) tfmi_weight_row_add(y, t->positions, t->rows->pos[i]);
  }
}

static void tfmi_ref_embed(tfm_dev *d, tfm_mat y, const tfm_weight *table,
                           const tfm_weight *positions, const tfm_rows *rows, float scale) {
  tfmi_embed_job job = {y, table, positions && positions->rows ? positions : NULL, rows,
                        scale != 0 ? scale : 1.0f};
  tfm_parallel_for(d, y.rows, tfmi_grain(y.cols), tfmi_embed_rows, &job);
}

/* ---- norm ---- */

/* lane[l] += (x[l] - mean)^power */
TFMI_INLINE void tfmi_moment_lanes(float *lane, const float *x, int32_t n, float mean, int power) {
  int32_t l;
  for (l = 0; l < n; l++) {
    float c = x[l] - mean;
    lane[l] += power == 1 ? c : c * c;
  }
}

/* The sum of (x - mean)^power over n values, power 1 or 2. */
TFMI_INLINE float tfmi_moment(const float *x, int32_t n, float mean, const int power) {
  float lane[TFMI_LANES] = {0};
  tfmi_lanes sum;
  int32_t i;
  for (i = 0; i + TFMI_LANES <= n; i += TFMI_LANES)
    tfmi_moment_lanes(lane, x + i, TFMI_LANES, mean, power);
  tfmi_moment_lanes(lane, x + i, n - i, mean, power);
  memcpy(&sum, lane, sizeof sum);
  return tfmi_lanes_sum(&sum);
}

typedef struct tfmi_norm_job {
  tfm_mat y, x, residual;
  const float *w, *b;
  float *stats; /* [T, groups, 2] */
  const tfm_norm *p;
  int32_t groups;
} tfmi_norm_job;

/* One vector: y = residual + (x - mean) * deviation^-1 * (w + offset) + b. */
static void tfmi_norm_vector(const tfmi_norm_job *t, float *y, const float *x,
                             const float *residual, int32_t n, float *stats) {
  const tfm_norm *p = t->p;
  float mean = p->kind == TFM_NORM_LAYER ? tfmi_moment(x, n, 0, 1) / (float)n : 0.0f;
  float variance = tfmi_moment(x, n, mean, 2) / (float)n, inverse = 1.0f / sqrtf(variance + p->eps);
  int32_t i;
  for (i = 0; i < n; i++) {
    float v = (x[i] - mean) * inverse * (t->w[i] + p->offset) + (t->b ? t->b[i] : 0.0f);
    y[i] = residual ? residual[i] + v : v;
  }
  if (!stats) return;
  stats[0] = mean;
  stats[1] = inverse;
}

static void tfmi_norm_rows(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_norm_job *t = (const tfmi_norm_job *)context;
  int32_t n = t->x.cols / t->groups, i, g;
  (void)worker;
  for (i = begin; i < end; i++)
    for (g = 0; g < t->groups; g++)
      tfmi_norm_vector(t, tfmi_row(t->y, i) + g * n, tfmi_row(t->x, i) + g * n,
                       t->residual.data ? tfmi_row(t->residual, i) + g * n : NULL, n,
                       t->stats ? t->stats + 2 * ((int64_t)i * t->groups + g) : NULL);
}

static void tfmi_ref_norm(tfm_dev *d, tfm_mat y, tfm_mat x, const float *w, const float *b,
                          tfm_mat residual, float *stats, const tfm_norm *p) {
  tfmi_norm_job job = {y, x, residual, w, b, stats, p, p->groups > 0 ? p->groups : 1};
  tfm_parallel_for(d, x.rows, tfmi_grain(x.cols), tfmi_norm_rows, &job);
}

/* ---- rope ---- */

typedef struct tfmi_rope_job {
  tfm_mat x;
  const int32_t *pos;
  const tfm_rope *p;
} tfmi_rope_job;

/* Rotates pairs first .. first + n - 1 of one head. */
static void tfmi_rope_head(float *x, const tfm_rope *p, int32_t first, int32_t n, const float *c,
                           const float *s) {
  int32_t step = p->interleaved ? 2 : 1, apart = p->interleaved ? 1 : p->rot / 2, i;
  float *a = x + first * step, *b = a + apart;
  for (i = 0; i < n; i++, a += step, b += step) {
    float u = *a, v = *b;
    *a = u * c[i] - v * s[i];
    *b = v * c[i] + u * s[i];
  }
}

/* The angles of a row are the same for all its heads: 64 pairs at a time. */
static void tfmi_rope_rows(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_rope_job *t = (const tfmi_rope_job *)context;
  const tfm_rope *p = t->p;
  float c[64], s[64];
  int32_t row, first, head, i;
  (void)worker;
  for (row = begin; row < end; row++)
    for (first = 0; first < p->rot / 2; first += 64) {
      int32_t n = tfmi_min32(64, p->rot / 2 - first);
      for (i = 0; i < n; i++) {
        float angle = (float)t->pos[row] * p->inv_freq[first + i];
        c[i] = cosf(angle) * p->scale;
        s[i] = (p->inverse ? -sinf(angle) : sinf(angle)) * p->scale;
      }
      for (head = 0; head < t->x.cols; head += p->head_width)
        tfmi_rope_head(tfmi_row(t->x, row) + head, p, first, n, c, s);
    }
}

static void tfmi_ref_rope(tfm_dev *d, tfm_mat x, const int32_t *pos, const tfm_rope *p) {
  tfmi_rope_job job = {x, pos, p};
  tfm_parallel_for(d, x.rows, tfmi_grain(x.cols), tfmi_rope_rows, &job);
}

/* ---- The cache ---- */

typedef struct tfmi_kv_job {
  const tfm_kv *kv;
  tfm_mat k, v;
  const tfm_rows *rows;
} tfmi_kv_job;

/* Bytes from the start of the cache to the vector of (seq, pos, kv head). */
static size_t tfmi_kv_at(const tfm_kv *kv, int32_t seq, int32_t pos, int32_t head) {
  int64_t page = kv->table[(int64_t)seq * kv->max_pages + pos / kv->page_tokens];
  int64_t row = (page * kv->heads + head) * kv->page_tokens + pos % kv->page_tokens;
  return tfmi_span(kv->type, row * kv->width);
}

static void tfmi_kv_rows(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_kv_job *t = (const tfmi_kv_job *)context;
  const tfm_kv *kv = t->kv;
  int32_t i, h;
  (void)worker;
  for (i = begin; i < end; i++)
    for (h = 0; h < kv->heads && t->rows->seq[i] >= 0; h++) {
      size_t at = tfmi_kv_at(kv, t->rows->seq[i], t->rows->pos[i], h);
      tfmi_codecs[kv->type].encode((uint8_t *)kv->k + at, tfmi_row(t->k, i) + h * kv->width,
                                   kv->width);
      tfmi_codecs[kv->type].encode((uint8_t *)kv->v + at, tfmi_row(t->v, i) + h * kv->width,
                                   kv->width);
    }
}

static void tfmi_ref_kv_put(tfm_dev *d, const tfm_kv *kv, tfm_mat k, tfm_mat v,
                            const tfm_rows *rows) {
  tfmi_kv_job job = {kv, k, v, rows};
  tfm_parallel_for(d, rows->n, tfmi_grain(2 * k.cols), tfmi_kv_rows, &job);
}

/* ---- attn ----
   Softmax as it comes (Milakov and Gimelshein 2018): for each tile of up to 32 visible keys the
   largest score so far is raised, and what has been summed is scaled down accordingly. Tiles are
   filled by counting visible keys, so they fall alike whatever the pages and the batch. */

typedef struct tfmi_attn_job {
  tfm_mat y, q;
  const tfm_kv *kv;
  const tfm_rows *rows;
  float *lse;
  const tfm_attn *p;
  int32_t group, blocks; /* query heads per kv head; blocks of up to TFMI_HEADS of them */
} tfmi_attn_job;

enum { TFMI_HEADS = 4 }; /* query heads computed together */

typedef struct tfmi_keys { /* a tile of the keys that one row sees, for one kv head */
  int32_t row, head;       /* of kv */
  int32_t next;            /* position, or row of the call, to go on with */
  tfm_type type;
  int32_t n;
  int32_t pos[TFMI_PANEL];
  const uint8_t *k[TFMI_PANEL], *v[TFMI_PANEL];
} tfmi_keys;

/* Where to begin to look for the rows of a row's sequence: at its position 0 when that is where an
   unbroken run begins, else at the first of all. */
static int32_t tfmi_first_row(const tfm_rows *rows, int32_t row) {
  int32_t first = row - rows->pos[row];
  return first >= 0 && rows->pos[first] == 0 && rows->seq[first] == rows->seq[row] ? first : 0;
}

static void tfmi_keys_first(tfmi_keys *keys, const tfmi_attn_job *t, int32_t row, int32_t head) {
  int32_t pos = t->rows->pos[row];
  keys->row = row;
  keys->head = head;
  keys->type = t->kv->table ? t->kv->type : t->kv->key_rows.type;
  keys->next = 0;
  if (!t->kv->table) keys->next = tfmi_first_row(t->rows, row);
  else if (t->p->window > 0 && pos >= t->p->window) keys->next = pos - t->p->window + 1;
}

/* From the cache. */
static void tfmi_keys_paged(tfmi_keys *keys, const tfmi_attn_job *t) {
  const tfm_kv *kv = t->kv;
  int32_t last = t->rows->pos[keys->row], seq = t->rows->seq[keys->row], i, n;
  size_t bytes = tfmi_span(kv->type, kv->width);
  while (keys->n < TFMI_PANEL && keys->next <= last) {
    size_t at = tfmi_kv_at(kv, seq, keys->next, keys->head);
    n = tfmi_min32(TFMI_PANEL - keys->n, kv->page_tokens - keys->next % kv->page_tokens);
    n = tfmi_min32(n, last - keys->next + 1);
    for (i = 0; i < n; i++, at += bytes) {
      keys->k[keys->n] = (const uint8_t *)kv->k + at;
      keys->v[keys->n] = (const uint8_t *)kv->v + at;
      keys->pos[keys->n++] = keys->next++;
    }
  }
}

/* From the rows of this call. */
static void tfmi_keys_rows(tfmi_keys *keys, const tfmi_attn_job *t) {
  const tfm_kv *kv = t->kv;
  const int32_t *pos = t->rows->pos, *seq = t->rows->seq;
  int32_t last = pos[keys->row], r;
  size_t at = tfmi_span(keys->type, (int64_t)keys->head * kv->width);
  while (keys->n < TFMI_PANEL && keys->next <= keys->row) {
    r = keys->next++;
    if (seq[r] != seq[keys->row] || pos[r] > last) continue;
    if (t->p->window > 0 && pos[r] <= last - t->p->window) continue;
    keys->k[keys->n] = tfmi_row_bytes(kv->key_rows, r) + at;
    keys->v[keys->n] = tfmi_row_bytes(kv->value_rows, r) + at;
    keys->pos[keys->n++] = pos[r];
  }
}

/* The next tile; false when there is none. */
static bool tfmi_keys_next(tfmi_keys *keys, const tfmi_attn_job *t) {
  keys->n = 0;
  if (t->kv->table) tfmi_keys_paged(keys, t);
  else tfmi_keys_rows(keys, t);
  return keys->n > 0;
}

/* score[g][i] = cap(scale * q[g] . k[i]), -infinity where the tile has no key. */
static void tfmi_attn_scores(float *score, const tfmi_attn_job *t, const float *const *q,
                             int32_t heads, const tfmi_keys *keys) {
  int32_t g, i;
  for (i = 0; i < keys->n; i += 4)
    tfmi_dots(score + i, q, heads, keys->k + i, tfmi_min32(4, keys->n - i), keys->type,
              t->kv->width);
  for (g = 0; g < heads; g++, score += TFMI_PANEL) {
    for (i = 0; i < keys->n; i++) score[i] *= t->p->scale;
    if (t->p->softcap != 0) tfmi_softcap_row(score, keys->n, t->p->softcap);
    for (i = keys->n; i < TFMI_PANEL; i++) score[i] = -INFINITY;
  }
}

/* y += p[0] v[0] + p[1] v[1] + ... over n values */
static void tfmi_attn_mix(float *TFMI_RESTRICT y, const float *p, const float *const *v,
                          int32_t keys, int32_t n) {
  int32_t i, j;
  for (i = 0; i + 4 <= keys; i += 4) {
    const float *a = v[i], *b = v[i + 1], *c = v[i + 2], *e = v[i + 3];
    for (j = 0; j < n; j++)
      y[j] = y[j] + p[i] * a[j] + p[i + 1] * b[j] + p[i + 2] * c[j] + p[i + 3] * e[j];
  }
  for (; i < keys; i++)
    for (j = 0; j < n; j++) y[j] += p[i] * v[i][j];
}

/* y[g] += sum over i of p[g][i] rows[i], four rows at a time. */
static void tfmi_attn_values(float *const *y, const float *p, int32_t heads,
                             const uint8_t *const *rows, int32_t count, tfm_type type,
                             int32_t width) {
  float decoded[4][TFMI_PIECE];
  const float *v[4];
  int32_t i, j, g, first;
  for (i = 0; i < count; i += 4)
    for (first = 0; first < width; first += TFMI_PIECE) {
      int32_t n = tfmi_min32(TFMI_PIECE, width - first), some = tfmi_min32(4, count - i);
      for (j = 0; j < some; j++) {
        const uint8_t *from = rows[i + j] + tfmi_span(type, first);
        v[j] = type == TFM_F32 ? (const float *)(const void *)from : decoded[j];
        if (type != TFM_F32) tfmi_codecs[type].decode(decoded[j], from, n);
      }
      for (g = 0; g < heads; g++) tfmi_attn_mix(y[g] + first, p + g * TFMI_PANEL + i, v, some, n);
    }
}

typedef struct tfmi_softmax { float max, sum; } tfmi_softmax;

/* Scores become exponentials below the new maximum; y and the sum are brought down to it. */
static void tfmi_attn_exp(tfmi_softmax *state, float *score, float *y, int32_t width) {
  float top = tfmi_max(score, TFMI_PANEL), lane[TFMI_LANES], correction;
  tfmi_lanes sum;
  int32_t i;
  if (top < state->max) top = state->max;
  correction = state->sum > 0 ? tfmi_exp(state->max - top) : 0.0f;
  for (i = 0; i < TFMI_PANEL; i++) score[i] = tfmi_exp(score[i] - top);
  for (i = 0; i < TFMI_LANES; i++) lane[i] = score[i] + score[i + TFMI_LANES];
  memcpy(&sum, lane, sizeof sum);
  state->sum = state->sum * correction + tfmi_lanes_sum(&sum);
  state->max = top;
  if (correction != 1.0f)
    for (i = 0; i < width; i++) y[i] *= correction;
}

static float *tfmi_probs_row(const tfmi_attn_job *t, int32_t row, int32_t head) {
  return t->p->probs + ((int64_t)row * t->p->heads + head) * t->p->probs_stride;
}

/* Leaves a tile's scores where the probabilities will be. */
static void tfmi_probs_put(const tfmi_attn_job *t, const tfmi_keys *keys, int32_t head,
                           const float *score) {
  float *probs = tfmi_probs_row(t, keys->row, head);
  int32_t i;
  for (i = 0; i < keys->n; i++)
    if (keys->pos[i] < t->p->probs_stride) probs[keys->pos[i]] = score[i];
}

static void tfmi_attn_dropout(const tfmi_attn_job *t, const tfmi_keys *keys, int32_t head,
                              float *p) {
  int32_t i;
  for (i = 0; i < keys->n; i++)
    p[i] *= tfmi_dropout(&t->p->dropout, keys->row, head * (1 << 20) + keys->pos[i]);
}

/* The end of one head: the division, and what was asked for besides. */
static void tfmi_attn_finish(const tfmi_attn_job *t, int32_t row, int32_t head, float *y,
                             tfmi_softmax state) {
  float *probs = t->p->probs ? tfmi_probs_row(t, row, head) : NULL;
  int32_t i;
  for (i = 0; i < t->kv->width; i++) y[i] /= state.sum;
  if (t->lse) t->lse[(int64_t)row * t->p->heads + head] = state.max + logf(state.sum);
  for (i = 0; probs && i < t->p->probs_stride; i++)
    probs[i] = tfmi_exp(probs[i] - state.max) / state.sum;
}

/* One row, and query heads first .. first + heads - 1, which share a kv head. */
static void tfmi_attn_heads(const tfmi_attn_job *t, int32_t row, int32_t first, int32_t heads) {
  const float *q[TFMI_HEADS];
  float *y[TFMI_HEADS], score[TFMI_HEADS * TFMI_PANEL];
  tfmi_softmax state[TFMI_HEADS];
  tfmi_keys keys;
  int32_t g, i, width = t->kv->width;
  for (g = 0; g < heads; g++) {
    q[g] = tfmi_row(t->q, row) + (first + g) * width;
    y[g] = tfmi_row(t->y, row) + (first + g) * width;
    memset(y[g], 0, (size_t)width * sizeof *y[g]);
    state[g].max = -INFINITY;
    state[g].sum = 0;
    for (i = 0; t->p->probs && i < t->p->probs_stride; i++)
      tfmi_probs_row(t, row, first + g)[i] = -INFINITY;
  }
  tfmi_keys_first(&keys, t, row, first / t->group);
  while (tfmi_keys_next(&keys, t)) {
    tfmi_attn_scores(score, t, q, heads, &keys);
    for (g = 0; g < heads; g++) {
      float *s = score + g * TFMI_PANEL;
      if (t->p->probs) tfmi_probs_put(t, &keys, first + g, s);
      tfmi_attn_exp(&state[g], s, y[g], width);
      if (t->p->dropout.rate > 0) tfmi_attn_dropout(t, &keys, first + g, s);
    }
    tfmi_attn_values(y, score, heads, keys.v, keys.n, keys.type, width);
  }
  for (g = 0; g < heads; g++) tfmi_attn_finish(t, row, first + g, y[g], state[g]);
}

/* Items are (block of heads, row), rows running fastest: a head's keys stay in the cache. */
static void tfmi_attn_items(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_attn_job *t = (const tfmi_attn_job *)context;
  int32_t item;
  (void)worker;
  for (item = begin; item < end; item++) {
    int32_t row = item % t->rows->n, block = item / t->rows->n;
    int32_t in_group = block % t->blocks * TFMI_HEADS;
    if (t->rows->seq[row] >= 0)
      tfmi_attn_heads(t, row, block / t->blocks * t->group + in_group,
                      tfmi_min32(TFMI_HEADS, t->group - in_group));
  }
}

static void tfmi_ref_attn(tfm_dev *d, tfm_mat y, tfm_mat q, const tfm_kv *kv, const tfm_rows *rows,
                          float *lse, const tfm_attn *p) {
  tfmi_attn_job job = {y, q, kv, rows, lse, p, p->heads / kv->heads, 0};
  job.blocks = (job.group + TFMI_HEADS - 1) / TFMI_HEADS;
  tfm_parallel_for(d, rows->n * kv->heads * job.blocks, 1, tfmi_attn_items, &job);
}

/* ---- glu ---- */

typedef struct tfmi_glu_job {
  tfm_mat y, gate_up;
  tfm_act act;
  int32_t pieces; /* of TFMI_STRETCH columns, per row */
} tfmi_glu_job;

static void tfmi_glu_pieces(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_glu_job *t = (const tfmi_glu_job *)context;
  int32_t item, i;
  (void)worker;
  for (item = begin; item < end; item++) {
    int32_t row = item / t->pieces, col = item % t->pieces * TFMI_STRETCH;
    int32_t n = tfmi_min32(TFMI_STRETCH, t->y.cols - col);
    const float *gate = tfmi_row(t->gate_up, row) + col, *up = gate + t->y.cols;
    float *y = tfmi_row(t->y, row) + col;
    memcpy(y, gate, (size_t)n * sizeof *y);
    tfmi_act_row(y, n, t->act);
    for (i = 0; i < n; i++) y[i] *= up[i];
  }
}

static void tfmi_ref_glu(tfm_dev *d, tfm_mat y, tfm_mat gate_up, tfm_act act) {
  tfmi_glu_job job = {y, gate_up, act, (y.cols + TFMI_STRETCH - 1) / TFMI_STRETCH};
  tfm_parallel_for(d, y.rows * job.pieces, 4, tfmi_glu_pieces, &job);
}

/* ---- Mixture of experts ---- */

/* The order in which values are chosen: larger first, then the lower index; NaN counts as the
   smallest. */
static bool tfmi_before(const float *value, int32_t a, int32_t b) {
  float u = value[a] == value[a] ? value[a] : -INFINITY;
  float v = value[b] == value[b] ? value[b] : -INFINITY;
  return u > v || (u == v && a < b);
}

/* The first index in that order which comes after `after` (-1: the first of all). */
static int32_t tfmi_next_best(const float *value, int32_t n, int32_t after) {
  int32_t best = -1, i;
  for (i = 0; i < n; i++)
    if ((after < 0 || tfmi_before(value, after, i)) && (best < 0 || tfmi_before(value, i, best)))
      best = i;
  return best;
}

/* probs = softmax(logits); chosen experts and their weights. */
static void tfmi_route_row(const float *logits, float *probs, int32_t *expert, float *weight,
                           const tfm_moe *p) {
  float top = tfmi_max(logits, p->experts), sum = 0, chosen = 0, factor;
  int32_t i, j, best = -1;
  for (i = 0; i < p->experts; i++) sum += probs[i] = tfmi_exp(logits[i] - top);
  for (i = 0; i < p->experts; i++) probs[i] /= sum;
  for (j = 0; j < p->top_k; j++) {
    best = expert[j] = tfmi_next_best(logits, p->experts, best);
    weight[j] = p->softmax_after ? tfmi_exp(logits[best] - logits[expert[0]]) : probs[best];
    chosen += weight[j];
  }
  factor = p->scale != 0 ? p->scale : 1.0f;
  for (j = 0; j < p->top_k; j++)
    weight[j] = (p->normalise || p->softmax_after ? weight[j] / chosen : weight[j]) * factor;
}

/* order and begin from expert, by counting: two passes, stable. */
static void tfmi_route_sort(tfm_routing *r) {
  int32_t slots = r->tokens * r->top_k, i;
  memset(r->begin, 0, ((size_t)r->experts + 1) * sizeof *r->begin);
  for (i = 0; i < slots; i++) r->begin[r->expert[i]]++;
  for (i = 0; i < r->experts; i++) r->begin[i + 1] += r->begin[i];
  for (i = slots - 1; i >= 0; i--) r->order[--r->begin[r->expert[i]]] = i;
  r->begin[r->experts] = slots;
}

/* What the balance of all layers is made of. */
static void tfmi_route_count(tfm_routing *r) {
  int32_t t, e;
  for (e = 0; e < r->experts; e++) {
    double mass = (double)r->mass[e];
    for (t = 0; t < r->tokens; t++) mass += (double)r->probs[(int64_t)t * r->experts + e];
    r->mass[e] = (float)mass;
    r->count[e] += (float)(r->begin[e + 1] - r->begin[e]);
  }
}

typedef struct tfmi_route_job {
  const tfm_routing *routing;
  tfm_mat logits;
  const tfm_moe *p;
} tfmi_route_job;

static void tfmi_route_rows(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_route_job *t = (const tfmi_route_job *)context;
  const tfm_routing *r = t->routing;
  int32_t row;
  (void)worker;
  for (row = begin; row < end; row++) {
    int64_t slot = (int64_t)row * r->top_k;
    tfmi_route_row(tfmi_row(t->logits, row), r->probs + (int64_t)row * r->experts,
                   r->expert + slot, r->weight + slot, t->p);
  }
}

static void tfmi_ref_route(tfm_dev *d, tfm_routing *r, tfm_mat logits, const tfm_moe *p) {
  tfmi_route_job job = {r, logits, p};
  r->tokens = logits.rows;
  r->top_k = p->top_k;
  r->experts = p->experts;
  tfm_parallel_for(d, r->tokens, tfmi_grain((int64_t)r->experts * (r->top_k + 8)),
                   tfmi_route_rows, &job);
  tfmi_route_sort(r);
  if (r->count) tfmi_route_count(r);
}

/* Columns begin .. end-1 of y for the slots of one expert. */
static void tfmi_moe_expert(const tfmi_matmul_job *t, int32_t e, int32_t begin, int32_t end) {
  const tfm_routing *r = t->routing;
  float out[TFMI_ROWS * TFMI_PANEL];
  const float *x[TFMI_ROWS];
  int32_t col, first, i;
  for (col = begin; col < end; col += TFMI_PANEL)
    for (first = r->begin[e]; first < r->begin[e + 1]; first += TFMI_ROWS) {
      const int32_t *slot = r->order + first;
      int32_t m = tfmi_min32(TFMI_ROWS, r->begin[e + 1] - first);
      int32_t n = tfmi_min32(TFMI_PANEL, end - col);
      for (i = 0; i < m; i++) x[i] = tfmi_row(t->x, t->spread ? slot[i] / r->top_k : slot[i]);
      tfmi_panel(out, x, m, t->w, (int64_t)e * t->w->rows + col, n);
      for (i = 0; i < m; i++)
        memcpy(tfmi_row(t->y, slot[i]) + col, out + i * TFMI_PANEL, (size_t)n * sizeof *out);
    }
}

static void tfmi_moe_columns(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_matmul_job *t = (const tfmi_matmul_job *)context;
  int32_t e;
  (void)worker;
  for (e = 0; e < t->routing->experts; e++) tfmi_moe_expert(t, e, begin, end);
}

static void tfmi_ref_matmul_moe(tfm_dev *d, tfm_mat y, tfm_mat x, const tfm_weight *w,
                                const tfm_routing *r, bool spread) {
  tfmi_matmul_job job = {y, x, w, NULL, r, spread};
  tfm_parallel_for(d, w->rows, tfmi_matmul_grain(d, w, y.rows), tfmi_moe_columns, &job);
}

typedef struct tfmi_combine_job {
  tfm_mat y, x, residual;
  const tfm_routing *routing;
} tfmi_combine_job;

static void tfmi_combine_rows(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_combine_job *t = (const tfmi_combine_job *)context;
  int32_t k = t->routing->top_k, row, j, i;
  (void)worker;
  for (row = begin; row < end; row++) {
    float *y = tfmi_row(t->y, row);
    if (!t->residual.data) memset(y, 0, (size_t)t->y.cols * sizeof *y);
    else memmove(y, tfmi_row(t->residual, row), (size_t)t->y.cols * sizeof *y);
    for (j = 0; j < k; j++) {
      const float *x = tfmi_row(t->x, (int64_t)row * k + j);
      float weight = t->routing->weight[(int64_t)row * k + j];
      for (i = 0; i < t->y.cols; i++) y[i] += weight * x[i];
    }
  }
}

static void tfmi_ref_combine(tfm_dev *d, tfm_mat y, tfm_mat x, tfm_mat residual,
                             const tfm_routing *r) {
  tfmi_combine_job job = {y, x, residual, r};
  tfm_parallel_for(d, y.rows, tfmi_grain((int64_t)y.cols * r->top_k), tfmi_combine_rows, &job);
}

typedef struct tfmi_slots_job { /* of moe_bias and add_gated, and their backward */
  tfm_mat y, x, gate, dy;
  const float *bias;
  const tfm_routing *routing;
  tfm_act act;
} tfmi_slots_job;

static void tfmi_moe_bias_rows(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_slots_job *t = (const tfmi_slots_job *)context;
  int32_t row, i, n = t->y.cols;
  (void)worker;
  for (row = begin; row < end; row++) {
    const float *bias = t->bias ? t->bias + (int64_t)t->routing->expert[row] * n : NULL;
    float *y = tfmi_row(t->y, row);
    memmove(y, tfmi_row(t->x, row), (size_t)n * sizeof *y);
    for (i = 0; bias && i < n; i++) y[i] += bias[i];
    tfmi_act_row(y, n, t->act);
  }
}

static void tfmi_ref_moe_bias(tfm_dev *d, tfm_mat y, tfm_mat x, const float *bias,
                              const tfm_routing *r, tfm_act act) {
  tfmi_slots_job job;
  memset(&job, 0, sizeof job);
  job.y = y;
  job.x = x;
  job.bias = bias;
  job.routing = r;
  job.act = act;
  tfm_parallel_for(d, y.rows, tfmi_grain(4 * (int64_t)y.cols), tfmi_moe_bias_rows, &job);
}

static float tfmi_logistic(float x) { return 1.0f / (1.0f + tfmi_exp(-x)); }

static void tfmi_add_gated_rows(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_slots_job *t = (const tfmi_slots_job *)context;
  int32_t row, i;
  (void)worker;
  for (row = begin; row < end; row++) {
    const float *x = tfmi_row(t->x, row);
    float *y = tfmi_row(t->y, row), share = tfmi_logistic(*tfmi_row(t->gate, row));
    for (i = 0; i < t->y.cols; i++) y[i] += share * x[i];
  }
}

static void tfmi_ref_add_gated(tfm_dev *d, tfm_mat y, tfm_mat x, tfm_mat gate) {
  tfmi_slots_job job;
  memset(&job, 0, sizeof job);
  job.y = y;
  job.x = x;
  job.gate = gate;
  tfm_parallel_for(d, y.rows, tfmi_grain(y.cols), tfmi_add_gated_rows, &job);
}

/* ---- top ---- */

/* log of the sum of e^x, NaN passed over. */
static float tfmi_log_sum_exp(const float *x, int32_t n) {
  float top = tfmi_max(x, n), piece[TFMI_PIECE];
  double sum = 0;
  int32_t i, j;
  if (top == -INFINITY || top == INFINITY) return top;
  for (i = 0; i < n; i += TFMI_PIECE) {
    int32_t some = tfmi_min32(TFMI_PIECE, n - i);
    for (j = 0; j < some; j++) piece[j] = x[i + j] == x[i + j] ? x[i + j] : -INFINITY;
    for (j = 0; j < some; j++) piece[j] = tfmi_exp(piece[j] - top);
    sum += (double)tfmi_moment(piece, some, 0, 1);
  }
  return top + (float)log(sum);
}

/* Restores the heap ids[0 .. n-1], worst on top, below i. */
static void tfmi_heap_down(int32_t *ids, int32_t n, int32_t i, const float *value) {
  for (;;) {
    int32_t child = 2 * i + 1, id = ids[i];
    if (child >= n) return;
    if (child + 1 < n && tfmi_before(value, ids[child], ids[child + 1])) child++;
    if (tfmi_before(value, ids[child], id)) return;
    ids[i] = ids[child];
    ids[child] = id;
    i = child;
  }
}

/* ids = the k first of n in tfmi_before's order: a heap of the best so far, then its heapsort. */
static void tfmi_best(int32_t *ids, int32_t k, const float *value, int32_t n) {
  int32_t i;
  for (i = 0; i < k; i++) ids[i] = i;
  for (i = k / 2; i >= 0; i--) tfmi_heap_down(ids, k, i, value);
  for (i = k; i < n; i++)
    if (tfmi_before(value, i, ids[0])) {
      ids[0] = i;
      tfmi_heap_down(ids, k, 0, value);
    }
  for (i = k - 1; i > 0; i--) {
    int32_t worst = ids[0];
    ids[0] = ids[i];
    ids[i] = worst;
    tfmi_heap_down(ids, i, 0, value);
  }
}

typedef struct tfmi_choice_job { /* of top and sample */
  tfm_mat logits;
  int32_t *ids, k;
  float *logprobs;
  const tfm_sampler *sampler;
} tfmi_choice_job;

static void tfmi_top_rows(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_choice_job *t = (const tfmi_choice_job *)context;
  int32_t row, j;
  (void)worker;
  for (row = begin; row < end; row++) {
    const float *logits = tfmi_row(t->logits, row);
    int32_t *ids = t->ids + (int64_t)row * t->k;
    float all = t->logprobs ? tfmi_log_sum_exp(logits, t->logits.cols) : 0.0f;
    tfmi_best(ids, t->k, logits, t->logits.cols);
    for (j = 0; t->logprobs && j < t->k; j++)
      t->logprobs[(int64_t)row * t->k + j] = logits[ids[j]] - all;
  }
}

static void tfmi_ref_top(tfm_dev *d, int32_t *ids, float *logprobs, tfm_mat logits, int32_t k) {
  tfmi_choice_job job = {logits, ids, k, logprobs, NULL};
  tfm_parallel_for(d, logits.rows, 1, tfmi_top_rows, &job);
}

/* ---- sample ----
   Everything happens on probabilities relative to the largest, p[i] = e^((l[i] - max) /
   temperature), in [0, 1]: top-k, top-p and min-p are each a threshold on p, and the highest one
   counts. Passes over a row go by stretches. What is found of these is put together in their
   order, so nothing depends on how many threads share them. */

/* p = logits after the repetition penalty. */
static void tfmi_penalise(float *p, const float *logits, int32_t n, float penalty,
                          const int32_t *history, int32_t past) {
  int32_t i;
  memcpy(p, logits, (size_t)n * sizeof *p);
  for (i = 0; i < past; i++) { /* from the logits: a token that occurs twice is penalised once */
    float l = logits[history[i]];
    p[history[i]] = l < 0 ? l * penalty : l / penalty;
  }
}

static int32_t tfmi_first_of(const float *x, int32_t n, float value) {
  int32_t i = 0;
  while (i < n - 1 && x[i] != value) i++;
  return i;
}

/* Passes leave an element of `sums` for each stretch of x: before `end`, see tfmi_choose. */
typedef struct tfmi_sweep {
  tfm_dev *d; /* whose threads share stretches; NULL: one does all */
  const float *x;
  int32_t n;
  float *y, *end;
  float top, temperature; /* of tfmi_relative */
  float least;            /* of tfmi_masses */
  uint32_t count;         /* atomic: elements that are >= least */
  uint32_t low, high;     /* of tfmi_places and tfmi_selected: bits that are asked for */
} tfmi_sweep;

static int32_t tfmi_stretches(int32_t n) { return (n - 1) / TFMI_STRETCH + 1; }

static float *tfmi_sums(const tfmi_sweep *t) { return t->end - tfmi_stretches(t->n); }

static int32_t tfmi_sweep_part(const tfmi_sweep *t, int32_t i) { /* stretch i is so long */
  return tfmi_min32(TFMI_STRETCH, t->n - i * TFMI_STRETCH);
}

static void tfmi_sweep_run(tfmi_sweep *t, tfm_job job) {
  if (t->d) tfm_parallel_for(t->d, tfmi_stretches(t->n), 4, job, t);
  else job(t, 0, tfmi_stretches(t->n), 0);
}

static void tfmi_maxima(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_sweep *t = (const tfmi_sweep *)context;
  int32_t i;
  (void)worker;
  for (i = begin; i < end; i++)
    tfmi_sums(t)[i] = tfmi_max(t->x + i * TFMI_STRETCH, tfmi_sweep_part(t, i));
}

/* y = e^((x - top) / temperature), 0 for NaN */
static void tfmi_relative(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_sweep *t = (const tfmi_sweep *)context;
  const float top = t->top, temperature = t->temperature;
  int32_t i, first = begin * TFMI_STRETCH, n = tfmi_min32(end * TFMI_STRETCH, t->n) - first;
  const float *x = t->x + first;
  float *y = t->y + first;
  (void)worker;
  for (i = 0; i < n; i++) y[i] = x[i] == x[i] ? x[i] : -INFINITY;
  for (i = 0; i < n; i++) y[i] = tfmi_exp((y[i] - top) / temperature);
}

static float tfmi_if_least(float p, float least) { return p >= least ? p : 0.0f; }

/* The sum of the elements that are >= least, of a stretch: halves added, and their halves. */
static float tfmi_stretch_mass(const float *p, int32_t n, float least) {
  float sum[TFMI_STRETCH / 2];
  int32_t half = 1, i;
  while (2 * half < n) half *= 2;
  for (i = 0; i < n - half; i++)
    sum[i] = tfmi_if_least(p[i], least) + tfmi_if_least(p[i + half], least);
  for (; i < half; i++) sum[i] = tfmi_if_least(p[i], least);
  for (half /= 2; half > 0; half /= 2)
    for (i = 0; i < half; i++) sum[i] += sum[i + half];
  return sum[0];
}

static void tfmi_masses(void *context, int32_t begin, int32_t end, int32_t worker) {
  tfmi_sweep *t = (tfmi_sweep *)context;
  const float least = t->least;
  uint32_t count = 0;
  int32_t i, j, n;
  (void)worker;
  for (i = begin; i < end; i++) {
    const float *x = t->x + i * TFMI_STRETCH;
    n = tfmi_sweep_part(t, i);
    for (j = 0; j < n; j++) count += x[j] >= least;
    tfmi_sums(t)[i] = tfmi_stretch_mass(x, n, least);
  }
  tfmi_atomic_add(&t->count, count);
}

/* How many elements of a stretch are selected: their place among all is the sum of those before. */
static void tfmi_places(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_sweep *t = (const tfmi_sweep *)context;
  const uint32_t low = t->low, span = t->high - t->low;
  int32_t i, j, n;
  (void)worker;
  for (i = begin; i < end; i++) {
    const float *x = t->x + i * TFMI_STRETCH;
    int32_t count = 0;
    for (j = 0, n = tfmi_sweep_part(t, i); j < n; j++) count += tfmi_bits(x[j]) - low < span;
    tfmi_sums(t)[i] = (float)count;
  }
}

static void tfmi_selected(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_sweep *t = (const tfmi_sweep *)context;
  const uint32_t low = t->low, span = t->high - t->low;
  float some[TFMI_STRETCH], *y = t->y;
  size_t kept, j, n;
  int32_t i;
  (void)worker;
  for (i = 0; i < begin; i++) y += (int32_t)tfmi_sums(t)[i];
  for (i = begin; i < end; i++, y += kept) {
    const float *x = t->x + i * TFMI_STRETCH;
    for (j = kept = 0, n = (size_t)tfmi_sweep_part(t, i); j < n; j++) {
      some[kept] = x[j];
      kept += tfmi_bits(x[j]) - low < span;
    }
    memcpy(y, some, kept * sizeof *some);
  }
}

/* The sum of the elements that are >= least; t->count of them. */
static double tfmi_mass(tfmi_sweep *t, float least) {
  double sum = 0;
  int32_t i;
  t->least = least;
  t->count = 0;
  tfmi_sweep_run(t, tfmi_masses);
  for (i = 0; i < tfmi_stretches(t->n); i++) sum += (double)tfmi_sums(t)[i];
  return sum;
}

/* x becomes its elements whose bits are in [low, high), in order: at y, which moves on. */
static void tfmi_select(tfmi_sweep *t, uint32_t low, uint32_t high) {
  int32_t kept = 0, i;
  t->low = low;
  t->high = high;
  tfmi_sweep_run(t, tfmi_places);
  for (i = 0; i < tfmi_stretches(t->n); i++) kept += (int32_t)tfmi_sums(t)[i];
  tfmi_sweep_run(t, tfmi_selected);
  t->x = t->y;
  t->y += kept;
  t->n = kept;
}

/* The largest t >= least such that the elements >= t have at least `goal` of mass; mass is 1 each,
   or the value itself. Elements are in [0, 1], where floats are ordered as their bits are: a
   bisection of the bits, which goes on with a selection once few are left. */
static float tfmi_threshold(tfmi_sweep t, double goal, float least, bool count) {
  uint32_t low = tfmi_bits(least), high = 0x3f800001; /* t is in [low, high) */
  double above = 0, over = 0;        /* mass of elements that were left out from above; >= high */
  int32_t at_low = t.n, at_high = 0; /* how many elements are >= low, at most; >= high */
  while (high - low > 1 && t.n > 0) {
    const uint32_t middle = low + (high - low) / 2;
    const double values = tfmi_mass(&t, tfmi_from_bits(middle)), mass = count ? t.count : values;
    if (above + mass >= goal) {
      low = middle;
      at_low = (int32_t)t.count;
    } else {
      high = middle;
      at_high = (int32_t)t.count;
      over = mass;
    }
    if (at_low - at_high > t.n / 8) continue;
    tfmi_select(&t, low, high);
    at_low = t.n;
    above += over;
    over = 0;
    at_high = 0;
  }
  return tfmi_from_bits(low);
}

/* The p below which nothing is drawn. */
static float tfmi_least(tfmi_sweep *t, const tfm_sampling *s) {
  float least = 0;
  if (s->top_k > 0 && s->top_k < t->n) least = tfmi_threshold(*t, s->top_k, 0, true);
  if (s->top_p > 0 && s->top_p < 1) { /* all below (1 - top_p) mass / n together are not missed */
    double mass = tfmi_mass(t, least), goal = mass * (double)s->top_p;
    float cut = (float)((mass - goal) / t->n * 0.99);
    least = tfmi_threshold(*t, goal, cut > least ? cut : least, false);
  }
  if (s->min_p > least) least = s->min_p < 1 ? s->min_p : 1.0f;
  return least;
}

/* The first id, in id order, where the running sum of what is left exceeds u of the whole: first
   the stretch that it lies in, then the id. */
static int32_t tfmi_draw(tfmi_sweep *t, float least, float u) {
  double goal = tfmi_mass(t, least) * (double)u, sum = 0, more = 0;
  int32_t i, first = 0, last = 0;
  for (i = 0; i < tfmi_stretches(t->n) && sum + more <= goal; i++) {
    sum += more;
    first = i * TFMI_STRETCH;
    more = (double)tfmi_sums(t)[i];
  }
  for (i = first; i < t->n && i < first + TFMI_STRETCH; i++) {
    if (t->x[i] < least || t->x[i] == 0) continue;
    sum += (double)t->x[i];
    last = i;
    if (sum > goal) break;
  }
  return last;
}

/* The first id whose logit is the largest; tfmi_maxima has found that of each stretch. */
static int32_t tfmi_likeliest(const tfmi_sweep *t) {
  int32_t i = tfmi_first_of(tfmi_sums(t), tfmi_stretches(t->n), t->top);
  return i * TFMI_STRETCH +
         tfmi_first_of(t->x + i * TFMI_STRETCH, tfmi_sweep_part(t, i), t->top);
}

/* work: 2 n floats. p, what is selected of it, an eighth at most of what there was each time, and
   at the end the sums. d: see tfmi_sweep. */
static int32_t tfmi_choose(tfm_dev *d, const float *logits, float *work, int32_t n,
                           const tfm_sampling *s, uint64_t position, const int32_t *history) {
  tfmi_sweep t = {d, logits, n, work, work + 2 * (int64_t)n, 0, s->temperature, 0, 0, 0, 0};
  int32_t i;
  if (s->repetition_penalty != 0 && s->repetition_penalty != 1) {
    tfmi_penalise(work, logits, n, s->repetition_penalty, history, (int32_t)position);
    t.x = work;
  }
  tfmi_sweep_run(&t, tfmi_maxima);
  t.top = tfmi_max(tfmi_sums(&t), tfmi_stretches(n));
  if (t.top == -INFINITY) { /* nothing is possible: the first that at least is a number */
    for (i = 0; i < n - 1 && t.x[i] != t.x[i]; i++) continue;
    return t.x[i] == t.x[i] ? i : 0;
  }
  if (!(s->temperature > 0) || t.top == INFINITY) return tfmi_likeliest(&t);
  tfmi_sweep_run(&t, tfmi_relative);
  t.x = work;
  t.y = work + n;
  return tfmi_draw(&t, tfmi_least(&t, s), tfmi_uniform(s->seed, s->sequence, position));
}

static void tfmi_sample_row(tfm_dev *d, const tfmi_choice_job *t, int32_t row) {
  const tfm_sampler *s = t->sampler;
  const float *logits = tfmi_row(t->logits, row);
  const int32_t n = t->logits.cols;
  if (s->seq[row] < 0) return;
  t->ids[row] = tfmi_choose(d, logits, s->work + (int64_t)row * 2 * n, n, &s->params[row],
                            (uint64_t)s->pos[row],
                            s->history + (int64_t)s->seq[row] * s->history_stride);
  if (t->logprobs) t->logprobs[row] = logits[t->ids[row]] - tfmi_log_sum_exp(logits, n);
}

static void tfmi_sample_rows(void *context, int32_t begin, int32_t end, int32_t worker) {
  int32_t row;
  (void)worker;
  for (row = begin; row < end; row++)
    tfmi_sample_row(NULL, (const tfmi_choice_job *)context, row);
}

/* Threads have rows, or, where these are fewer, share each. */
static void tfmi_ref_sample(tfm_dev *d, int32_t *ids, float *logprobs, tfm_mat logits,
                            const tfm_sampler *s) {
  tfmi_choice_job job = {logits, ids, 1, logprobs, s};
  int32_t row;
  if (logits.rows >= d->threads) tfm_parallel_for(d, logits.rows, 1, tfmi_sample_rows, &job);
  else
    for (row = 0; row < logits.rows; row++) tfmi_sample_row(d, &job, row);
}

/* ---- The device: the host itself ---- */

static tfm_status tfmi_ref_open(tfm_dev *d) {
  d->state = NULL;
  return TFM_OK;
}

static void tfmi_ref_close(tfm_dev *d) { (void)d; }

static tfm_status tfmi_ref_sync(tfm_dev *d) {
  tfm_status status = d->status;
  d->status = TFM_OK;
  return status;
}

/* From the application's allocator, whose start is kept before the aligned block. */
static void *tfmi_ref_alloc(tfm_dev *d, size_t bytes) {
  char *raw = bytes <= SIZE_MAX / 2
                  ? (char *)tfmi_host_realloc(d->host, NULL, 0, bytes + 128) : NULL;
  char *p;
  if (!raw) return NULL;
  p = raw + 128 - ((uintptr_t)raw & 63);
  memcpy(p - sizeof raw, &raw, sizeof raw);
  return p;
}

static void tfmi_ref_release(tfm_dev *d, void *p, size_t bytes) {
  char *raw;
  if (!p) return;
  memcpy(&raw, (char *)p - sizeof raw, sizeof raw);
  tfmi_host_realloc(d->host, raw, bytes + 128, 0);
}

static void tfmi_ref_copy(tfm_dev *d, void *dst, const void *src, size_t bytes) {
  (void)d;
  if (bytes) memmove(dst, src, bytes);
}

static void tfmi_ref_zero(tfm_dev *d, void *dst, size_t bytes) {
  (void)d;
  if (bytes) memset(dst, 0, bytes);
}

static size_t tfmi_ref_work_bytes(tfm_dev *d, const tfm_net *net, int32_t rows, int32_t sequences,
                                  int32_t context) {
  (void)d, (void)net, (void)rows, (void)sequences, (void)context;
  return 0; /* what an entry needs beside its arguments is on the stack */
}

static bool tfmi_ref_replay(tfm_dev *d, uint64_t key) {
  (void)d, (void)key;
  return false;
}

static bool tfmi_ref_record(tfm_dev *d, uint64_t key, bool begin) {
  (void)d, (void)key, (void)begin;
  return false;
}

#ifndef TFM_NO_TRAINING
/* =================================================================================================
   >>gradients   the reference of what training adds: backward entries and the optimiser
   =================================================================================================

   The gradient of a product is two products, dx = dy W and dW += dy^T x, and both are one kernel:
   rows of y grow by multiples of rows of b, y[i] += sum over j of a[j][i] b[j]. For dx the b are
   rows of W, so that the weight needs no second form (TFM_ROLE_GRADIENT costs nothing here); for dW
   they are the tokens' x. tfmi_mix_rows does that for 16 rows of y, the experts' lists of tokens
   included.

   Order of sums: over j as they come, one after the other; over tokens in the order of tokens. Work
   is split over what is written, never over what is summed, so no bit depends on the threads.
   Attention goes over its scores twice, once by rows for dq and once by keys for dk and dv, for the
   same reason. */

/* ---- Derivatives ---- */

/* d[i] = act'(v[i]) */
static void tfmi_act_slope(float *TFMI_RESTRICT d, const float *TFMI_RESTRICT v, int32_t n,
                           tfm_act act) {
  int32_t i;
  switch (act) {
    case TFM_ACT_NONE:
      for (i = 0; i < n; i++) d[i] = 1.0f;
      break;
    case TFM_ACT_GELU: /* the normal distribution's integral, and x times its density */
      for (i = 0; i < n; i++)
        d[i] = 0.5f * (1.0f + erff(v[i] * 0.70710678f)) +
               v[i] * 0.39894228f * tfmi_exp(-0.5f * v[i] * v[i]);
      break;
    case TFM_ACT_GELU_TANH: /* x s(2u), s the logistic function: s + x s (1 - s) 2u' */
      for (i = 0; i < n; i++) {
        float square = v[i] * v[i], u = 0.79788456f * (v[i] + 0.044715f * v[i] * square);
        float s = 1.0f / (1.0f + tfmi_exp(-2.0f * u));
        d[i] = s + v[i] * s * (1.0f - s) * 1.59576912f * (1.0f + 0.134145f * square);
      }
      break;
    case TFM_ACT_SILU:
      for (i = 0; i < n; i++) {
        float s = 1.0f / (1.0f + tfmi_exp(-v[i]));
        d[i] = s + v[i] * s * (1.0f - s);
      }
      break;
    case TFM_ACT_RELU:
      for (i = 0; i < n; i++) d[i] = v[i] > 0 ? 1.0f : 0.0f;
      break;
  }
}

/* The sum of a[i] b[i], in the lanes of all sums over rows. */
static float tfmi_dot(const float *a, const float *b, int32_t n) {
  float lane[TFMI_LANES] = {0};
  tfmi_lanes sum;
  int32_t i, l;
  for (i = 0; i + TFMI_LANES <= n; i += TFMI_LANES)
    for (l = 0; l < TFMI_LANES; l++) lane[l] += a[i + l] * b[i + l];
  for (l = 0; i + l < n; l++) lane[l] += a[i + l] * b[i + l];
  memcpy(&sum, lane, sizeof sum);
  return tfmi_lanes_sum(&sum);
}

/* ---- The kernel ---- */

enum {
  TFMI_DEPTH = 64,       /* rows of b at a time */
  TFMI_DEPTH_CODED = 16, /* ... when they must be decoded, on the stack */
  TFMI_TILE = 64,        /* columns whose sums are in registers: 4 vectors of 16 */
  TFMI_WIDTH = 256       /* columns of one item of work */
};

TFMI_INLINE void tfmi_lanes_axpy(tfmi_lanes *sum, float a, const tfmi_lanes *b) {
#if defined(__GNUC__)
  *sum += a * *b;
#else
  int l;
  for (l = 0; l < 16; l++) sum->lane[l] += a * b->lane[l];
#endif
}

/* y[i] += sum over j of a[j][i] b[j], 16 * vectors columns from col on. rows and vectors are
   constants where this is inlined, so that the sums stay in registers. */
TFMI_INLINE void tfmi_mix_tile(float *const *y, const float (*a)[TFMI_ROWS], const float *const *b,
                               int32_t n, int32_t col, const int rows, const int vectors) {
  tfmi_lanes s[4][4], t[4];
  int32_t j;
  int i, v;
  for (i = 0; i < rows; i++)
    for (v = 0; v < vectors; v++) memcpy(&s[i][v], y[i] + col + v * TFMI_LANES, sizeof s[i][v]);
  for (j = 0; j < n; j++) {
    for (v = 0; v < vectors; v++) memcpy(&t[v], b[j] + col + v * TFMI_LANES, sizeof t[v]);
    for (i = 0; i < rows; i++)
      for (v = 0; v < vectors; v++) tfmi_lanes_axpy(&s[i][v], a[j][i], &t[v]);
  }
  for (i = 0; i < rows; i++)
    for (v = 0; v < vectors; v++) memcpy(y[i] + col + v * TFMI_LANES, &s[i][v], sizeof s[i][v]);
}

/* Up to 4 rows over all columns: wide tiles, narrow ones, single columns. */
TFMI_INLINE void tfmi_mix_block(float *const *y, const float (*a)[TFMI_ROWS], const float *const *b,
                                int32_t n, int32_t cols, const int rows) {
  int32_t col = 0, j;
  int i;
  for (; col + TFMI_TILE <= cols; col += TFMI_TILE) tfmi_mix_tile(y, a, b, n, col, rows, 4);
  for (; col + TFMI_LANES <= cols; col += TFMI_LANES) tfmi_mix_tile(y, a, b, n, col, rows, 1);
  for (; col < cols; col++)
    for (i = 0; i < rows; i++) {
      float sum = y[i][col];
      for (j = 0; j < n; j++) sum += a[j][i] * b[j][col];
      y[i][col] = sum;
    }
}

/* y[i] += sum over j of a[j][i] b[j], up to 16 rows of y and n of b. */
static void tfmi_mix_rows(float *const *y, int32_t m, const float (*a)[TFMI_ROWS],
                          const float *const *b, int32_t n, int32_t cols) {
  int32_t i;
  for (i = 0; i + 4 <= m; i += 4)
    tfmi_mix_block(y + i, (const float (*)[TFMI_ROWS])&a[0][i], b, n, cols, 4);
  a = (const float (*)[TFMI_ROWS])&a[0][i];
  if (m - i == 1) tfmi_mix_block(y + i, a, b, n, cols, 1);
  if (m - i == 2) tfmi_mix_block(y + i, a, b, n, cols, 2);
  if (m - i == 3) tfmi_mix_block(y + i, a, b, n, cols, 3);
}

/* Columns col .. col + n-1 of a row, a part of a block where blocks are longer than a tile. */
static void tfmi_decode_within(float *y, tfm_type type, const uint8_t *row, int32_t col,
                               int32_t n) {
  float block[TFMI_PIECE];
  int32_t within = col % tfmi_types[type].block_values;
  if (tfmi_types[type].block_values <= TFMI_TILE) {
    tfmi_codecs[type].decode(y, row + tfmi_span(type, col), n);
    return;
  }
  tfmi_codecs[type].decode(block, row + tfmi_span(type, col - within), TFMI_PIECE);
  memcpy(y, block + within, (size_t)n * sizeof *y);
}

/* Rows of a stripe by way of the stack, where they are not F32. */
static void tfmi_mix_coded(float *const *y, int32_t m, const float (*a)[TFMI_ROWS],
                           const tfmi_stripe *s, int64_t first, int32_t n, int32_t col,
                           int32_t cols) {
  float decoded[TFMI_DEPTH_CODED][TFMI_TILE], *to[TFMI_ROWS];
  const float *b[TFMI_DEPTH_CODED];
  int32_t at, i, j;
  for (at = 0; at < cols; at += TFMI_TILE) {
    int32_t some = tfmi_min32(TFMI_TILE, cols - at);
    for (j = 0; j < n; j++) {
      tfmi_decode_within(decoded[j], s->type, tfmi_stripe_row(s, first + j), col + at, some);
      b[j] = decoded[j];
    }
    for (i = 0; i < m; i++) to[i] = y[i] + at;
    tfmi_mix_rows(to, m, a, b, n, some);
  }
}

/* y[i] += dy[i] W, columns col and on, where W are w->rows rows from `first`; y points to col. */
static void tfmi_mix_weight(float *const *y, const float *const *dy, int32_t m, const tfm_weight *w,
                            int64_t first, int32_t col, int32_t cols) {
  float a[TFMI_DEPTH][TFMI_ROWS];
  const float *b[TFMI_DEPTH];
  int32_t i, j, n, row;
  for (row = 0; row < w->rows; row += n) {
    const tfmi_stripe *s = tfmi_stripe_at(w, first + row);
    int64_t left = s->first + s->rows - (first + row);
    n = tfmi_min32(w->rows - row, s->type == TFM_F32 ? TFMI_DEPTH : TFMI_DEPTH_CODED);
    n = left < n ? (int32_t)left : n;
    for (j = 0; j < n; j++)
      for (i = 0; i < m; i++) a[j][i] = dy[i][row + j];
    if (s->type != TFM_F32) {
      tfmi_mix_coded(y, m, (const float (*)[TFMI_ROWS])a, s, first + row, n, col, cols);
      continue;
    }
    for (j = 0; j < n; j++)
      b[j] = (const float *)(const void *)tfmi_stripe_row(s, first + row + j) + col;
    tfmi_mix_rows(y, m, (const float (*)[TFMI_ROWS])a, b, n, cols);
  }
}

/* ---- matmul_dx, matmul_dw and their experts' forms ---- */

typedef struct tfmi_mix_job {
  tfm_mat y, dy, x; /* y: dx or dw */
  const tfm_weight *w;
  float *sums;      /* db */
  float beta;
  const tfm_routing *routing;
  bool spread;
  int32_t pass;     /* of moe_dx: only the slots of this rank j; -1: all */
  int32_t blocks, panels; /* of 16 rows of y, of TFMI_WIDTH columns */
} tfmi_mix_job;

/* Items are (panel, block), blocks running fastest: they share the panel of b. */
static void tfmi_mix_run(tfm_dev *d, tfmi_mix_job *t, int32_t rows, int64_t depth, tfm_job job) {
  int64_t work = depth * TFMI_ROWS * tfmi_min32(t->y.cols, TFMI_WIDTH);
  t->blocks = (rows + TFMI_ROWS - 1) / TFMI_ROWS;
  t->panels = (t->y.cols + TFMI_WIDTH - 1) / TFMI_WIDTH;
  tfm_parallel_for(d, t->blocks * t->panels, tfmi_grain(work), job, t);
}

static void tfmi_dx_items(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_mix_job *t = (const tfmi_mix_job *)context;
  const float *dy[TFMI_ROWS];
  float *y[TFMI_ROWS];
  int32_t item, i;
  (void)worker;
  for (item = begin; item < end; item++) {
    int32_t row = item % t->blocks * TFMI_ROWS, col = item / t->blocks * TFMI_WIDTH;
    int32_t m = tfmi_min32(TFMI_ROWS, t->y.rows - row);
    int32_t cols = tfmi_min32(TFMI_WIDTH, t->y.cols - col);
    for (i = 0; i < m; i++) {
      dy[i] = tfmi_row(t->dy, row + i);
      y[i] = tfmi_row(t->y, row + i) + col;
      if (t->beta == 0) memset(y[i], 0, (size_t)cols * sizeof *y[i]);
    }
    tfmi_mix_weight(y, dy, m, t->w, 0, col, cols);
  }
}

static void tfmi_ref_epilogue_bwd(tfm_dev *d, tfm_mat dx, tfm_mat dy, const tfm_epilogue *e);

static void tfmi_ref_matmul_dx(tfm_dev *d, tfm_mat dx, tfm_mat dy, const tfm_weight *w, float beta,
                               const tfm_epilogue *before) {
  tfmi_mix_job job = {dx, dy, {NULL, TFM_F32, 0, 0, 0}, w, NULL, beta, NULL, false, -1, 0, 0};
  tfmi_mix_run(d, &job, dx.rows, w->rows, tfmi_dx_items);
  if (before) tfmi_ref_epilogue_bwd(d, dx, dx, before);
}

/* y[i] += sum over the n tokens (of slot, or all) of dy[token][row + i] x[token]. */
static void tfmi_mix_tokens(const tfmi_mix_job *t, float *const *y, int32_t m, int32_t row,
                            const int32_t *slot, int32_t n, int32_t col, int32_t cols) {
  float a[TFMI_DEPTH][TFMI_ROWS];
  const float *b[TFMI_DEPTH];
  int32_t first, i, j;
  for (first = 0; first < n; first += TFMI_DEPTH) {
    int32_t some = tfmi_min32(TFMI_DEPTH, n - first);
    for (j = 0; j < some; j++) {
      int32_t from = slot ? slot[first + j] : first + j;
      const float *dy = tfmi_row(t->dy, from) + row;
      for (i = 0; i < m; i++) a[j][i] = dy[i];
      b[j] = tfmi_row(t->x, slot && t->spread ? from / t->routing->top_k : from) + col;
    }
    tfmi_mix_rows(y, m, (const float (*)[TFMI_ROWS])a, b, some, cols);
  }
}

static void tfmi_column_sums(float *sums, tfm_mat x, int32_t first, int32_t n) {
  int32_t row, i;
  for (row = 0; row < x.rows; row++) {
    const float *from = tfmi_row(x, row) + first;
    for (i = 0; i < n; i++) sums[first + i] += from[i];
  }
}

/* With a routing, y is [E * N, K], and each expert's blocks begin anew. */
static void tfmi_dw_items(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_mix_job *t = (const tfmi_mix_job *)context;
  const tfm_routing *r = t->routing;
  int32_t rows = t->dy.cols, per_expert = (rows + TFMI_ROWS - 1) / TFMI_ROWS, item, i;
  float *y[TFMI_ROWS];
  (void)worker;
  for (item = begin; item < end; item++) {
    int32_t block = item % t->blocks, col = item / t->blocks * TFMI_WIDTH;
    int32_t e = block / per_expert, row = block % per_expert * TFMI_ROWS;
    int32_t m = tfmi_min32(TFMI_ROWS, rows - row), cols = tfmi_min32(TFMI_WIDTH, t->y.cols - col);
    for (i = 0; i < m; i++) {
      y[i] = tfmi_row(t->y, (int64_t)e * rows + row + i) + col;
      if (t->beta == 0) memset(y[i], 0, (size_t)cols * sizeof *y[i]);
    }
    if (r) tfmi_mix_tokens(t, y, m, row, r->order + r->begin[e], r->begin[e + 1] - r->begin[e],
                           col, cols);
    else tfmi_mix_tokens(t, y, m, row, NULL, t->dy.rows, col, cols);
    if (t->sums && col == 0) tfmi_column_sums(t->sums, t->dy, row, m);
  }
}

/* The gradients of weights are F32 here. */
static bool tfmi_dw_check(tfm_dev *d, tfm_mat dw) {
  if (dw.type != TFM_F32)
    tfm_dev_fail(d, TFM_E_UNSUPPORTED, "gradients of type %s: the reference has F32",
                 tfm_type_name(dw.type));
  return dw.type == TFM_F32;
}

static void tfmi_ref_matmul_dw(tfm_dev *d, tfm_mat dw, float *db, tfm_mat dy, tfm_mat x,
                               float beta) {
  tfmi_mix_job job = {dw, dy, x, NULL, db, beta, NULL, false, -1, 0, 0};
  if (tfmi_dw_check(d, dw)) tfmi_mix_run(d, &job, dy.cols, dy.rows, tfmi_dw_items);
}

static void tfmi_ref_moe_dw(tfm_dev *d, tfm_mat dw, tfm_mat dy, tfm_mat x, const tfm_routing *r,
                            bool spread) {
  tfmi_mix_job job = {dw, dy, x, NULL, NULL, 1, r, spread, -1, 0, 0};
  int32_t blocks = r->experts * ((dy.cols + TFMI_ROWS - 1) / TFMI_ROWS);
  if (tfmi_dw_check(d, dw))
    tfmi_mix_run(d, &job, blocks * TFMI_ROWS, dy.rows / r->experts + 1, tfmi_dw_items);
}

/* The slots of expert e that belong to this pass, 16 at a time: dx += dy W_e. */
static void tfmi_moe_dx_expert(const tfmi_mix_job *t, int32_t e, int32_t col, int32_t cols) {
  const tfm_routing *r = t->routing;
  const float *dy[TFMI_ROWS];
  float *y[TFMI_ROWS];
  int32_t at, m = 0;
  for (at = r->begin[e]; at < r->begin[e + 1]; at++) {
    int32_t slot = r->order[at];
    if (t->pass < 0 || slot % r->top_k == t->pass) {
      dy[m] = tfmi_row(t->dy, slot);
      y[m++] = tfmi_row(t->y, t->spread ? slot / r->top_k : slot) + col;
    }
    if (m == TFMI_ROWS || (m && at + 1 == r->begin[e + 1])) {
      tfmi_mix_weight(y, dy, m, t->w, (int64_t)e * t->w->rows, col, cols);
      m = 0;
    }
  }
}

/* Items are lanes of columns: a token's slots may lie with any expert. */
static void tfmi_moe_dx_items(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_mix_job *t = (const tfmi_mix_job *)context;
  int32_t e, col = begin * TFMI_LANES, cols = tfmi_min32(end * TFMI_LANES, t->y.cols) - col, row;
  (void)worker;
  for (row = 0; t->beta == 0 && row < t->y.rows; row++)
    memset(tfmi_row(t->y, row) + col, 0, (size_t)cols * sizeof(float));
  for (e = 0; e < t->routing->experts; e++) tfmi_moe_dx_expert(t, e, col, cols);
}

static void tfmi_ref_moe_dx(tfm_dev *d, tfm_mat dx, tfm_mat dy, const tfm_weight *w,
                            const tfm_routing *r, bool spread) {
  tfmi_mix_job job = {dx, dy, {NULL, TFM_F32, 0, 0, 0}, w, NULL, 0, r, spread, -1, 0, 0};
  int32_t strips = (dx.cols + TFMI_LANES - 1) / TFMI_LANES, passes = spread ? r->top_k : 1, j;
  for (j = 0; j < passes; j++) { /* one rank after the other keeps the order of the sum */
    job.pass = spread ? j : -1;
    job.beta = j > 0;
    tfm_parallel_for(d, strips, tfmi_grain((int64_t)TFMI_LANES * w->rows * dy.rows),
                     tfmi_moe_dx_items, &job);
  }
}

/* ---- epilogue_bwd, glu_bwd ---- */

typedef struct tfmi_slope_job {
  tfm_mat dx, dy, gate_up;
  const tfm_epilogue *e;
  tfm_act act;
  int32_t pieces; /* of TFMI_PIECE columns, per row */
} tfmi_slope_job;

/* d[0 .. n-1] = the derivative of cap(act(v)) at aux. */
static void tfmi_epilogue_slope(float *d, const float *v, int32_t n, const tfm_epilogue *e) {
  float value[TFMI_PIECE];
  int32_t j;
  tfmi_act_slope(d, v, n, e->act);
  if (e->softcap == 0) return;
  memcpy(value, v, (size_t)n * sizeof *v);
  tfmi_act_row(value, n, e->act);
  for (j = 0; j < n; j++) {
    float t = tanhf(value[j] / e->softcap);
    d[j] *= 1.0f - t * t;
  }
}

static void tfmi_epilogue_bwd_pieces(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_slope_job *t = (const tfmi_slope_job *)context;
  const tfm_epilogue *e = t->e;
  float slope[TFMI_PIECE];
  int32_t item, j;
  (void)worker;
  for (item = begin; item < end; item++) {
    int32_t row = item / t->pieces, col = item % t->pieces * TFMI_PIECE;
    int32_t n = tfmi_min32(TFMI_PIECE, t->dx.cols - col);
    const float *dy = tfmi_row(t->dy, row) + col;
    float *dx = tfmi_row(t->dx, row) + col;
    for (j = 0; j < n; j++) slope[j] = 1.0f;
    if (e->aux.data) tfmi_epilogue_slope(slope, tfmi_row(e->aux, row) + col, n, e);
    if (e->dropout.rate > 0)
      for (j = 0; j < n; j++) slope[j] *= tfmi_dropout(&e->dropout, row, col + j);
    for (j = 0; j < n; j++) dx[j] = slope[j] * dy[j];
  }
}

static void tfmi_ref_epilogue_bwd(tfm_dev *d, tfm_mat dx, tfm_mat dy, const tfm_epilogue *e) {
  tfmi_slope_job job = {dx, dy, {NULL, TFM_F32, 0, 0, 0}, e, TFM_ACT_NONE, 0};
  job.pieces = (dx.cols + TFMI_PIECE - 1) / TFMI_PIECE;
  tfm_parallel_for(d, dx.rows * job.pieces, 32, tfmi_epilogue_bwd_pieces, &job);
}

static void tfmi_glu_bwd_pieces(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_slope_job *t = (const tfmi_slope_job *)context;
  float slope[TFMI_PIECE], value[TFMI_PIECE];
  int32_t item, j;
  (void)worker;
  for (item = begin; item < end; item++) {
    int32_t row = item / t->pieces, col = item % t->pieces * TFMI_PIECE;
    int32_t n = tfmi_min32(TFMI_PIECE, t->dy.cols - col);
    const float *dy = tfmi_row(t->dy, row) + col, *gate = tfmi_row(t->gate_up, row) + col;
    const float *up = gate + t->dy.cols;
    float *dgate = tfmi_row(t->dx, row) + col, *dup = dgate + t->dy.cols;
    memcpy(value, gate, (size_t)n * sizeof *value);
    tfmi_act_row(value, n, t->act);
    tfmi_act_slope(slope, gate, n, t->act);
    for (j = 0; j < n; j++) dgate[j] = dy[j] * up[j] * slope[j];
    for (j = 0; j < n; j++) dup[j] = dy[j] * value[j];
  }
}

static void tfmi_ref_glu_bwd(tfm_dev *d, tfm_mat dgate_up, tfm_mat dy, tfm_mat gate_up,
                             tfm_act act) {
  tfmi_slope_job job = {dgate_up, dy, gate_up, NULL, act, 0};
  job.pieces = (dy.cols + TFMI_PIECE - 1) / TFMI_PIECE;
  tfm_parallel_for(d, dy.rows * job.pieces, 32, tfmi_glu_bwd_pieces, &job);
}

/* ---- norm_bwd ---- */

typedef struct tfmi_norm_bwd_job {
  tfm_mat dx, dy, x, residual;
  const float *w, *stats;
  float *dw, *db;
  const tfm_norm *p;
  int32_t groups;
} tfmi_norm_bwd_job;

/* sum[0] = the sum of g, sum[1] = of g xhat, where g = dy (w + offset), over n values. */
static void tfmi_norm_bwd_sums(const tfmi_norm_bwd_job *t, float *sum, const float *dy,
                               const float *x, int32_t n, const float *stats) {
  float lane[2][TFMI_LANES] = {{0}};
  tfmi_lanes v;
  int32_t i, l;
  for (i = 0; i < n; i += TFMI_LANES) {
    int32_t some = tfmi_min32(TFMI_LANES, n - i);
    for (l = 0; l < some; l++) {
      float g = dy[i + l] * (t->w[i + l] + t->p->offset);
      lane[0][l] += g;
      lane[1][l] += g * (x[i + l] - stats[0]) * stats[1];
    }
  }
  for (i = 0; i < 2; i++) {
    memcpy(&v, lane[i], sizeof v);
    sum[i] = tfmi_lanes_sum(&v);
  }
}

static void tfmi_norm_bwd_vector(const tfmi_norm_bwd_job *t, float *dx, const float *dy,
                                 const float *x, const float *residual, int32_t n,
                                 const float *stats) {
  float sum[2];
  int32_t i;
  tfmi_norm_bwd_sums(t, sum, dy, x, n, stats);
  sum[0] = t->p->kind == TFM_NORM_LAYER ? sum[0] / (float)n : 0.0f; /* the mean's part */
  sum[1] /= (float)n;
  for (i = 0; i < n; i++) {
    float g = dy[i] * (t->w[i] + t->p->offset), xhat = (x[i] - stats[0]) * stats[1];
    float v = stats[1] * (g - sum[0] - xhat * sum[1]);
    dx[i] = residual ? residual[i] + v : v;
  }
}

static void tfmi_norm_bwd_rows(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_norm_bwd_job *t = (const tfmi_norm_bwd_job *)context;
  int32_t n = t->x.cols / t->groups, i, g;
  (void)worker;
  for (i = begin; i < end; i++)
    for (g = 0; g < t->groups; g++)
      tfmi_norm_bwd_vector(t, tfmi_row(t->dx, i) + g * n, tfmi_row(t->dy, i) + g * n,
                           tfmi_row(t->x, i) + g * n,
                           t->residual.data ? tfmi_row(t->residual, i) + g * n : NULL, n,
                           t->stats + 2 * ((int64_t)i * t->groups + g));
}

/* Columns [begin, end) of dw and db, over all rows and groups. */
static void tfmi_norm_bwd_columns(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_norm_bwd_job *t = (const tfmi_norm_bwd_job *)context;
  int32_t n = t->x.cols / t->groups, row, i, g;
  (void)worker;
  for (row = 0; row < t->x.rows; row++)
    for (g = 0; g < t->groups; g++) {
      const float *dy = tfmi_row(t->dy, row) + g * n, *x = tfmi_row(t->x, row) + g * n;
      const float *stats = t->stats + 2 * ((int64_t)row * t->groups + g);
      for (i = begin; i < end; i++) t->dw[i] += dy[i] * (x[i] - stats[0]) * stats[1];
      for (i = begin; t->db && i < end; i++) t->db[i] += dy[i];
    }
}

static int32_t tfmi_lanes_grain(int64_t work_per_column) { /* whole lanes: see tfmi_matmul_grain */
  return (tfmi_grain(work_per_column) + TFMI_LANES - 1) & ~(TFMI_LANES - 1);
}

static void tfmi_ref_norm_bwd(tfm_dev *d, tfm_mat dx, float *dw, float *db, tfm_mat dy, tfm_mat x,
                              const float *w, tfm_mat residual, const float *stats,
                              const tfm_norm *p) {
  tfmi_norm_bwd_job job = {dx, dy, x, residual, w, stats, dw, db, p, p->groups > 0 ? p->groups : 1};
  tfm_parallel_for(d, x.cols / job.groups, tfmi_lanes_grain((int64_t)x.rows * job.groups),
                   tfmi_norm_bwd_columns, &job); /* first: dx may lie over dy */
  tfm_parallel_for(d, x.rows, tfmi_grain(4 * (int64_t)x.cols), tfmi_norm_bwd_rows, &job);
}

/* ---- attn_bwd ----
   With p the probability of a key, from its score s and the row's lse, and dp = dy . v:
   dv = sum of p dy, ds = p (dp - dy . y), dq = sum of ds k, dk = sum of ds q. Dropout multiplies p
   for dv, and dp; the cap of a score c tanh(s / c) multiplies ds by 1 - (s / c)^2. */

typedef struct tfmi_attn_bwd_job {
  tfmi_attn_job attn; /* y, q, kv, rows, lse, p as forward had them */
  tfm_mat dq, dk, dv, dy;
} tfmi_attn_bwd_job;

/* Scores become p in place, and dp becomes ds, for one pair of row and key. */
static void tfmi_attn_pair(const tfmi_attn_bwd_job *t, float *score, float *dp, int32_t row,
                           int32_t head, int32_t key_pos, float delta) {
  const tfm_attn *a = t->attn.p;
  float s = *score, drop = 1.0f, p;
  p = tfmi_exp(s - t->attn.lse[(int64_t)row * a->heads + head]);
  if (a->dropout.rate > 0) drop = tfmi_dropout(&a->dropout, row, head * (1 << 20) + key_pos);
  *dp = p * (*dp * drop - delta) * a->scale;
  if (a->softcap != 0) *dp *= 1.0f - s / a->softcap * (s / a->softcap);
  *score = p * drop;
}

static float tfmi_attn_delta(const tfmi_attn_bwd_job *t, int32_t row, int32_t head) {
  int32_t width = t->attn.kv->width;
  return tfmi_dot(tfmi_row(t->dy, row) + head * width, tfmi_row(t->attn.y, row) + head * width,
                  width);
}

/* dq of one row, query heads first .. first + heads - 1, which share a kv head. */
static void tfmi_attn_dq(const tfmi_attn_bwd_job *t, int32_t row, int32_t first, int32_t heads) {
  const tfmi_attn_job *a = &t->attn;
  float score[TFMI_HEADS * TFMI_PANEL], dp[TFMI_HEADS * TFMI_PANEL], delta[TFMI_HEADS];
  const float *q[TFMI_HEADS], *dy[TFMI_HEADS];
  float *dq[TFMI_HEADS];
  tfmi_keys keys;
  int32_t g, i, width = a->kv->width;
  for (g = 0; g < heads; g++) {
    q[g] = tfmi_row(a->q, row) + (first + g) * width;
    dy[g] = tfmi_row(t->dy, row) + (first + g) * width;
    dq[g] = tfmi_row(t->dq, row) + (first + g) * width;
    delta[g] = tfmi_attn_delta(t, row, first + g);
    memset(dq[g], 0, (size_t)width * sizeof *dq[g]);
  }
  tfmi_keys_first(&keys, a, row, first / a->group);
  while (tfmi_keys_next(&keys, a)) {
    tfmi_attn_scores(score, a, q, heads, &keys);
    for (i = 0; i < keys.n; i += 4)
      tfmi_dots(dp + i, dy, heads, keys.v + i, tfmi_min32(4, keys.n - i), keys.type, width);
    for (g = 0; g < heads; g++)
      for (i = 0; i < keys.n; i++)
        tfmi_attn_pair(t, score + g * TFMI_PANEL + i, dp + g * TFMI_PANEL + i, row, first + g,
                       keys.pos[i], delta[g]);
    tfmi_attn_values(dq, dp, heads, keys.k, keys.n, keys.type, width);
  }
}

static void tfmi_attn_dq_items(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_attn_bwd_job *t = (const tfmi_attn_bwd_job *)context;
  const tfmi_attn_job *a = &t->attn;
  int32_t item;
  (void)worker;
  for (item = begin; item < end; item++) {
    int32_t row = item % a->rows->n, block = item / a->rows->n;
    int32_t in_group = block % a->blocks * TFMI_HEADS;
    tfmi_attn_dq(t, row, block / a->blocks * a->group + in_group,
                 tfmi_min32(TFMI_HEADS, a->group - in_group));
  }
}

typedef struct tfmi_queries { /* rows that see one of up to 4 keys: a tile of them */
  int32_t next, n;
  int32_t row[TFMI_PANEL];
} tfmi_queries;

static bool tfmi_sees(const tfmi_attn_job *a, int32_t row, int32_t key) {
  const int32_t *pos = a->rows->pos, *seq = a->rows->seq;
  return key <= row && seq[key] == seq[row] && pos[key] <= pos[row] &&
         (a->p->window <= 0 || pos[key] > pos[row] - a->p->window);
}

static bool tfmi_queries_next(tfmi_queries *tile, const tfmi_attn_job *a, int32_t key,
                              int32_t keys) {
  int32_t i;
  for (tile->n = 0; tile->n < TFMI_PANEL && tile->next < a->rows->n; tile->next++) {
    for (i = 0; i < keys && !tfmi_sees(a, tile->next, key + i); i++) continue;
    if (i < keys) tile->row[tile->n++] = tile->next;
  }
  return tile->n > 0;
}

/* dk and dv of keys key .. key + n - 1 grow by what one query head of a tile of rows has. */
static void tfmi_attn_dkv_tile(const tfmi_attn_bwd_job *t, const tfmi_queries *tile, int32_t key,
                               int32_t n, int32_t head) {
  const tfmi_attn_job *a = &t->attn;
  int32_t width = a->kv->width, at = head / a->group * width, i, j;
  float score[TFMI_HEADS * TFMI_PANEL], dp[TFMI_HEADS * TFMI_PANEL], *dk[TFMI_HEADS],
      *dv[TFMI_HEADS];
  const float *k[TFMI_HEADS], *v[TFMI_HEADS];
  const uint8_t *q[TFMI_PANEL], *dy[TFMI_PANEL];
  for (j = 0; j < n; j++) {
    k[j] = tfmi_row(a->kv->key_rows, key + j) + at;
    v[j] = tfmi_row(a->kv->value_rows, key + j) + at;
    dk[j] = tfmi_row(t->dk, key + j) + at;
    dv[j] = tfmi_row(t->dv, key + j) + at;
  }
  for (i = 0; i < tile->n; i++) {
    q[i] = (const uint8_t *)(tfmi_row(a->q, tile->row[i]) + head * width);
    dy[i] = (const uint8_t *)(tfmi_row(t->dy, tile->row[i]) + head * width);
  }
  for (i = 0; i < tile->n; i += 4) {
    tfmi_dots(score + i, k, n, q + i, tfmi_min32(4, tile->n - i), TFM_F32, width);
    tfmi_dots(dp + i, v, n, dy + i, tfmi_min32(4, tile->n - i), TFM_F32, width);
  }
  for (j = 0; j < n; j++)
    for (i = 0; i < tile->n; i++) score[j * TFMI_PANEL + i] *= a->p->scale;
  for (j = 0; a->p->softcap != 0 && j < n; j++)
    tfmi_softcap_row(score + j * TFMI_PANEL, tile->n, a->p->softcap);
  for (i = 0; i < tile->n; i++) {
    float delta = tfmi_attn_delta(t, tile->row[i], head);
    for (j = 0; j < n; j++) {
      float *s = score + j * TFMI_PANEL + i, *d = dp + j * TFMI_PANEL + i;
      if (!tfmi_sees(a, tile->row[i], key + j)) *s = *d = 0.0f;
      else tfmi_attn_pair(t, s, d, tile->row[i], head, a->rows->pos[key + j], delta);
    }
  }
  tfmi_attn_values(dk, dp, n, q, tile->n, TFM_F32, width);
  tfmi_attn_values(dv, score, n, dy, tile->n, TFM_F32, width);
}

/* Items are (kv head, block of 4 keys). */
static void tfmi_attn_dkv_items(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_attn_bwd_job *t = (const tfmi_attn_bwd_job *)context;
  const tfmi_attn_job *a = &t->attn;
  int32_t blocks = (a->rows->n + TFMI_HEADS - 1) / TFMI_HEADS, width = a->kv->width, item, i, g;
  (void)worker;
  for (item = begin; item < end; item++) {
    int32_t key = item % blocks * TFMI_HEADS, head = item / blocks;
    int32_t n = tfmi_min32(TFMI_HEADS, a->rows->n - key);
    tfmi_queries tile;
    for (i = 0; i < n; i++) {
      memset(tfmi_row(t->dk, key + i) + head * width, 0, (size_t)width * sizeof(float));
      memset(tfmi_row(t->dv, key + i) + head * width, 0, (size_t)width * sizeof(float));
    }
    tile.next = key;
    while (tfmi_queries_next(&tile, a, key, n))
      for (g = 0; g < a->group; g++) tfmi_attn_dkv_tile(t, &tile, key, n, head * a->group + g);
  }
}

static void tfmi_ref_attn_bwd(tfm_dev *d, tfm_mat dq, tfm_mat dk, tfm_mat dv, tfm_mat dy, tfm_mat y,
                              tfm_mat q, const tfm_kv *kv, const tfm_rows *rows, const float *lse,
                              const tfm_attn *p) {
  tfmi_attn_bwd_job job;
  int32_t blocks = (rows->n + TFMI_HEADS - 1) / TFMI_HEADS;
  memset(&job, 0, sizeof job);
  job.attn.y = y;
  job.attn.q = q;
  job.attn.kv = kv;
  job.attn.rows = rows;
  job.attn.lse = (float *)(uintptr_t)lse; /* only read here */
  job.attn.p = p;
  job.attn.group = p->heads / kv->heads;
  job.attn.blocks = (job.attn.group + TFMI_HEADS - 1) / TFMI_HEADS;
  job.dq = dq;
  job.dk = dk;
  job.dv = dv;
  job.dy = dy;
  tfm_parallel_for(d, rows->n * kv->heads * job.attn.blocks, 1, tfmi_attn_dq_items, &job);
  tfm_parallel_for(d, blocks * kv->heads, 1, tfmi_attn_dkv_items, &job);
}

/* ---- embed_bwd ---- */

typedef struct tfmi_embed_bwd_job {
  tfm_mat dtable, dpositions, dy;
  const tfm_rows *rows;
  float scale;
} tfmi_embed_bwd_job;

/* Items are columns: rows of the table may meet, columns do not. */
static void tfmi_embed_bwd_columns(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_embed_bwd_job *t = (const tfmi_embed_bwd_job *)context;
  int32_t row, i;
  (void)worker;
  for (row = 0; row < t->rows->n; row++) {
    const float *dy = tfmi_row(t->dy, row);
    if (t->rows->seq[row] < 0) continue;
    if (t->dtable.data) {
      float *to = tfmi_row(t->dtable, t->rows->id[row]);
      for (i = begin; i < end; i++) to[i] += t->scale * dy[i];
    }
    if (t->dpositions.data) {
      float *to = tfmi_row(t->dpositions, t->rows->pos[row]);
      for (i = begin; i < end; i++) to[i] += dy[i];
    }
  }
}

static void tfmi_ref_embed_bwd(tfm_dev *d, tfm_mat dtable, tfm_mat dpositions, tfm_mat dy,
                               const tfm_rows *rows, float scale) {
  tfmi_embed_bwd_job job = {dtable, dpositions, dy, rows, scale != 0 ? scale : 1.0f};
  if ((dtable.data && !tfmi_dw_check(d, dtable)) ||
      (dpositions.data && !tfmi_dw_check(d, dpositions)))
    return;
  tfm_parallel_for(d, dy.cols, tfmi_lanes_grain(rows->n), tfmi_embed_bwd_columns, &job);
}

/* ---- loss ---- */

typedef struct tfmi_loss_job {
  float *losses, *hits;
  tfm_mat logits;
  const int32_t *target;
  const float *weight;
  float scale;
} tfmi_loss_job;

static void tfmi_loss_rows(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_loss_job *t = (const tfmi_loss_job *)context;
  int32_t row, i, n = t->logits.cols;
  (void)worker;
  for (row = begin; row < end; row++) {
    float *x = tfmi_row(t->logits, row), weight = t->weight ? t->weight[row] : 1.0f, all, top;
    int32_t target = t->target[row];
    t->losses[row] = t->hits[row] = 0;
    if (target < 0) {
      memset(x, 0, (size_t)n * sizeof *x);
      continue;
    }
    all = tfmi_log_sum_exp(x, n);
    top = tfmi_max(x, n);
    t->losses[row] = weight * (all - x[target]);
    t->hits[row] = tfmi_first_of(x, n, top) == target ? weight : 0.0f;
    for (i = 0; i < n; i++) x[i] = weight * t->scale * tfmi_exp(x[i] - all);
    x[target] -= weight * t->scale;
  }
}

static void tfmi_ref_loss(tfm_dev *d, float *losses, float *hits, tfm_mat logits,
                          const int32_t *target, const float *weight, float scale) {
  tfmi_loss_job job = {losses, hits, logits, target, weight, scale};
  tfm_parallel_for(d, logits.rows, tfmi_grain(16 * (int64_t)logits.cols), tfmi_loss_rows, &job);
}

/* ---- Mixture of experts ---- */

/* dlogits of one token from dweight: the chosen weights are either a softmax of their own logits
   (normalised, or softmax after the choice: the same thing), or entries of the softmax over all. */
static void tfmi_route_bwd_row(float *dlogits, const float *dweight, const int32_t *expert,
                               const float *weight, const float *probs, const tfm_moe *p) {
  float factor = p->scale != 0 ? p->scale : 1.0f, mean = 0;
  bool own = p->normalise || p->softmax_after;
  int32_t i, j;
  memset(dlogits, 0, (size_t)p->experts * sizeof *dlogits);
  for (j = 0; j < p->top_k; j++) mean += weight[j] * dweight[j];
  for (i = 0; !own && i < p->experts; i++) dlogits[i] = -probs[i] * mean;
  for (j = 0; j < p->top_k; j++)
    dlogits[expert[j]] += weight[j] * (own ? dweight[j] - mean / factor : dweight[j]);
}

/* The share of rows that went to each expert, and its mean probability: of this layer, or of all
   that were counted. */
static float tfmi_balance_share(const tfm_routing *r, int32_t e) {
  double rows = 0;
  int32_t i;
  if (!r->count) return (float)(r->begin[e + 1] - r->begin[e]) / (float)r->tokens;
  for (i = 0; i < r->experts; i++) rows += (double)r->count[i];
  return (float)((double)r->count[e] * r->top_k / rows);
}

static double tfmi_balance_mean(const tfm_routing *r, int32_t e) {
  double mean = 0, rows = 0;
  int32_t t;
  for (t = 0; !r->count && t < r->tokens; t++)
    mean += (double)r->probs[(int64_t)t * r->experts + e];
  if (!r->count) return mean / r->tokens;
  for (t = 0; t < r->experts; t++) rows += (double)r->count[t];
  return (double)r->mass[e] * r->top_k / rows;
}

static double tfmi_balance(const tfm_routing *r) {
  double sum = 0;
  int32_t e;
  for (e = 0; e < r->experts; e++)
    sum += (double)tfmi_balance_share(r, e) * tfmi_balance_mean(r, e);
  return sum * r->experts;
}

static void tfmi_ref_route_bwd(tfm_dev *d, tfm_mat dlogits, const float *dweight,
                               const tfm_routing *r, const tfm_moe *p, float balance,
                               float *balance_loss) {
  float rows = (float)r->tokens, each;
  int32_t t, e;
  (void)d;
  for (e = 0, rows = r->count ? 0.0f : rows; r->count && e < r->experts; e++)
    rows += r->count[e] / (float)r->top_k;
  each = balance * (float)r->experts / rows;
  for (t = 0; t < r->tokens; t++) {
    const float *probs = r->probs + (int64_t)t * r->experts;
    int64_t slot = (int64_t)t * r->top_k;
    float *to = tfmi_row(dlogits, t), mean = 0;
    tfmi_route_bwd_row(to, dweight + slot, r->expert + slot, r->weight + slot, probs, p);
    for (e = 0; e < r->experts && balance != 0; e++) mean += probs[e] * tfmi_balance_share(r, e);
    for (e = 0; e < r->experts && balance != 0; e++)
      to[e] += each * probs[e] * (tfmi_balance_share(r, e) - mean);
  }
  if (balance_loss) *balance_loss = (float)((double)*balance_loss + tfmi_balance(r));
}

typedef struct tfmi_combine_bwd_job {
  tfm_mat dx, dy, x;
  float *dweight;
  const tfm_routing *routing;
} tfmi_combine_bwd_job;

static void tfmi_combine_bwd_slots(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_combine_bwd_job *t = (const tfmi_combine_bwd_job *)context;
  int32_t slot, i;
  (void)worker;
  for (slot = begin; slot < end; slot++) {
    const float *dy = tfmi_row(t->dy, slot / t->routing->top_k), *x = tfmi_row(t->x, slot);
    float *dx = tfmi_row(t->dx, slot);
    for (i = 0; i < t->dx.cols; i++) dx[i] = t->routing->weight[slot] * dy[i];
    t->dweight[slot] = tfmi_dot(dy, x, t->dx.cols);
  }
}

static void tfmi_ref_combine_bwd(tfm_dev *d, tfm_mat dx, float *dweight, tfm_mat dy, tfm_mat x,
                                 const tfm_routing *r) {
  tfmi_combine_bwd_job job = {dx, dy, x, dweight, r};
  tfm_parallel_for(d, x.rows, tfmi_grain(2 * (int64_t)x.cols), tfmi_combine_bwd_slots, &job);
}

/* Items are experts. */
static void tfmi_moe_bias_bwd_experts(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_slots_job *t = (const tfmi_slots_job *)context;
  const tfm_routing *r = t->routing;
  int32_t e, at, i, n = t->dy.cols;
  (void)worker;
  for (e = begin; e < end; e++) {
    float *db = tfmi_row(t->y, e);
    for (at = r->begin[e]; at < r->begin[e + 1]; at++) {
      const float *dy = tfmi_row(t->dy, r->order[at]);
      for (i = 0; i < n; i++) db[i] += dy[i];
    }
  }
}

static void tfmi_ref_moe_bias_bwd(tfm_dev *d, float *db, tfm_mat dy, const tfm_routing *r) {
  tfmi_slots_job job;
  memset(&job, 0, sizeof job);
  job.y.data = db;
  job.y.stride = dy.cols;
  job.dy = dy;
  job.routing = r;
  tfm_parallel_for(d, r->experts, 1, tfmi_moe_bias_bwd_experts, &job);
}

static void tfmi_add_gated_bwd_rows(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_slots_job *t = (const tfmi_slots_job *)context;
  int32_t row, i, n = t->x.cols;
  (void)worker;
  for (row = begin; row < end; row++) {
    const float *dy = tfmi_row(t->dy, row);
    float *dx = tfmi_row(t->y, row), *gate = tfmi_row(t->gate, row), share = *gate;
    *gate = tfmi_dot(dy, tfmi_row(t->x, row), n) * share * (1.0f - share);
    for (i = 0; i < n; i++) dx[i] = share * dy[i];
  }
}

static void tfmi_ref_add_gated_bwd(tfm_dev *d, tfm_mat dx, tfm_mat dgate, tfm_mat dy, tfm_mat x,
                                   tfm_mat gate) {
  tfmi_slots_job job;
  int32_t row;
  memset(&job, 0, sizeof job);
  job.y = dx;
  job.x = x;
  job.gate = dgate;
  job.dy = dy;
  for (row = 0; row < dy.rows; row++)
    *tfmi_row(dgate, row) = tfmi_logistic(*tfmi_row(gate, row));
  tfm_parallel_for(d, dy.rows, tfmi_grain(2 * (int64_t)dy.cols), tfmi_add_gated_bwd_rows, &job);
}

/* ---- The optimiser ---- */

enum { TFMI_SHARES = 256 }; /* of a sum over an arena: their ends depend on its length only */

typedef struct tfmi_arena_job {
  void *w;
  tfm_type type, gtype;
  float *master, *m, *v;
  float factor, fix1, fix2; /* of the gradient: clipping; of m and v: bias correction */
  const uint8_t *g;
  int64_t n, share; /* elements; of these in one item */
  double *sums;     /* [TFMI_SHARES] */
  const tfm_adamw *p;
} tfmi_arena_job;

/* A piece of the gradients as floats: where they lie, or decoded into `piece`. */
static const float *tfmi_floats_at(const tfmi_arena_job *t, int64_t at, int32_t n, float *piece) {
  if (t->gtype == TFM_F32) return (const float *)(const void *)t->g + at;
  tfmi_codecs[t->gtype].decode(piece, t->g + tfmi_span(t->gtype, at), n);
  return piece;
}

static void tfmi_sumsq_shares(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_arena_job *t = (const tfmi_arena_job *)context;
  float piece[TFMI_PIECE];
  int32_t item;
  (void)worker;
  for (item = begin; item < end; item++) {
    int64_t at = item * t->share, last = at + t->share < t->n ? at + t->share : t->n;
    double sum = 0;
    for (; at < last; at += TFMI_PIECE) {
      int32_t some = last - at < TFMI_PIECE ? (int32_t)(last - at) : TFMI_PIECE;
      sum += (double)tfmi_moment(tfmi_floats_at(t, at, some, piece), some, 0, 2);
    }
    t->sums[item] = sum;
  }
}

static void tfmi_ref_sumsq(tfm_dev *d, float *out, const void *x, tfm_type type, int64_t n) {
  double sums[TFMI_SHARES], sum = 0;
  tfmi_arena_job job;
  int32_t items, i;
  memset(&job, 0, sizeof job);
  job.g = (const uint8_t *)x;
  job.gtype = type;
  job.n = n;
  job.share = (n / TFMI_SHARES / TFMI_STRETCH + 1) * TFMI_STRETCH;
  job.sums = sums;
  items = (int32_t)((n + job.share - 1) / job.share);
  tfm_parallel_for(d, items, tfmi_grain(job.share), tfmi_sumsq_shares, &job);
  for (i = 0; i < items; i++) sum += sums[i];
  out[0] = (float)((double)out[0] + sum);
}

static void tfmi_adamw_piece(const tfmi_arena_job *t, int64_t at, int32_t n) {
  const tfm_adamw *p = t->p;
  float *TFMI_RESTRICT w = t->master + at, *TFMI_RESTRICT m = t->m + at;
  float *TFMI_RESTRICT v = t->v + at, piece[TFMI_PIECE];
  const float *g = tfmi_floats_at(t, at, n, piece);
  int32_t i;
  for (i = 0; i < n; i++) {
    float slope = g[i] * t->factor;
    m[i] = p->beta1 * m[i] + (1 - p->beta1) * slope;
    v[i] = p->beta2 * v[i] + (1 - p->beta2) * slope * slope;
    w[i] -= p->lr * (m[i] * t->fix1 / (sqrtf(v[i] * t->fix2) + p->eps) + p->decay * w[i]);
  }
  if (t->w == (void *)t->master) return;
  tfmi_codecs[t->type].encode((uint8_t *)t->w + tfmi_span(t->type, at), w, n);
}

static void tfmi_adamw_shares(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_arena_job *t = (const tfmi_arena_job *)context;
  int64_t at = begin * t->share, last = end * t->share < t->n ? end * t->share : t->n;
  (void)worker;
  for (; at < last; at += TFMI_PIECE)
    tfmi_adamw_piece(t, at, last - at < TFMI_PIECE ? (int32_t)(last - at) : TFMI_PIECE);
}

static void tfmi_ref_adamw(tfm_dev *d, void *w, tfm_type type, float *master, float *m, float *v,
                           const void *g, tfm_type gtype, int64_t n, const float *sumsq,
                           const tfm_adamw *p) {
  tfmi_arena_job job = {w, type, gtype, master, m, v, 1, 1, 1, (const uint8_t *)g, n, TFMI_STRETCH,
                        NULL, p};
  float norm = sqrtf(sumsq[0]);
  if (!(norm <= FLT_MAX)) return; /* infinite, or not a number */
  if (p->clip > 0 && norm > p->clip) job.factor = p->clip / norm;
  job.fix1 = (float)(1 / (1 - pow((double)p->beta1, p->step)));
  job.fix2 = (float)(1 / (1 - pow((double)p->beta2, p->step)));
  tfm_parallel_for(d, (int32_t)((n + job.share - 1) / job.share), 16, tfmi_adamw_shares, &job);
}

#endif /* TFM_NO_TRAINING */

/* ---- The table ---- */

static const tfm_backend tfmi_ref_table = { /* in tfm_backend's order, which the types check */
  TFM_BACKEND_ABI,
  "ref",
  TFM_F32, /* activation */
  TFM_F32, /* residual */
  1,       /* row_multiple */
  256,     /* pass_rows */
  false,   /* half_cache */
  false,   /* f8 */
  tfmi_ref_open,
  tfmi_ref_close,
  tfmi_ref_sync,
  tfmi_ref_alloc,
  tfmi_ref_release,
  tfmi_ref_copy, /* put */
  tfmi_ref_copy, /* get */
  tfmi_ref_copy,
  tfmi_ref_zero,
  tfmi_ref_alloc,   /* alloc_shared */
  tfmi_ref_release, /* release_shared */
  tfmi_ref_work_bytes,
  tfmi_ref_replay,
  tfmi_ref_record,
  tfmi_ref_pack_size,
  tfmi_ref_pack,
  tfmi_ref_unpack,
  tfmi_ref_cast,
  tfmi_ref_embed,
  tfmi_ref_gather,
  tfmi_ref_norm,
  tfmi_ref_matmul,
  tfmi_ref_rope,
  tfmi_ref_kv_put,
  tfmi_ref_attn,
  tfmi_ref_glu,
  tfmi_ref_route,
  tfmi_ref_matmul_moe,
  tfmi_ref_combine,
  tfmi_ref_sample,
  tfmi_ref_top,
  NULL, NULL, NULL, /* matmul_glu layer decode */
#ifndef TFM_NO_TRAINING
  tfmi_ref_loss,
  tfmi_ref_matmul_dx,
  tfmi_ref_matmul_dw,
  tfmi_ref_epilogue_bwd,
  tfmi_ref_norm_bwd,
  tfmi_ref_attn_bwd,
  tfmi_ref_glu_bwd,
  tfmi_ref_embed_bwd,
  tfmi_ref_route_bwd,
  tfmi_ref_combine_bwd,
  tfmi_ref_moe_dx,
  tfmi_ref_moe_dw,
  tfmi_ref_sumsq,
  tfmi_ref_adamw,
#else
  NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
#endif
  tfmi_ref_moe_bias,
  tfmi_ref_add_gated,
#ifndef TFM_NO_TRAINING
  tfmi_ref_moe_bias_bwd,
  tfmi_ref_add_gated_bwd,
#else
  NULL, NULL,
#endif
  NULL, /* mark */
  NULL  /* usage */
};

TFM_API const tfm_backend *tfm_backend_ref(void) { return &tfmi_ref_table; }

/* =================================================================================================
   >>forward   one pass of tokens through the network
   =================================================================================================

   The same code runs prompts, single tokens, batches of sequences and, with buffers of its own for
   every layer, training. What a family is made of are numbers, pointers and absent matrices in
   tfm_net; there is no family here. Buffers of one layer, in the order in which they are filled:

     in [T, C] -> norm1 [T, C] -> qkv [T, (H+2K)*D] -> attn [T, H*D] -> mid [T, C] = in + attention
               -> norm2 [T, C] -> up [T, F or 2F]   -> act [T, F]    -> out [T, C] = mid +
               feed-forward

   For inference in, mid and out are one buffer, and so are norm1 and norm2. `up` is the projection
   before the activation: kept apart where it is wanted (gated, training, tap), else act's own.
   Queries and keys are normalised and rotated where they are, in qkv; training keeps what its
   backward needs of them before that, so there they are a matrix of their own. What a norm follows
   (post1, post2) lands in branch1 and branch2 first; for inference that is norm1's and norm2's
   memory, whose contents nobody needs any more.

   In a layer with a router, a token is S = top_k slots:

     norm2 -> router [T, E] -> routing; slots_up [T*S, Fe or 2Fe] -> slots_act [T*S, Fe]
           -> slots_out [T*S, C] -> out = mid + their weighted sum

   and where one expert is for all tokens, up and act are its own, shared [T, C] what it says, and
   gate [T, 1] how much of that counts. */

typedef struct tfmi_buffers { /* of one layer */
  tfm_mat in, norm1, qkv, qk, attn, branch1, mid, norm2, up, act, branch2, out;
  /* Of the norms [T, 2], of heads' norms [T, H, 2] and [T, K, 2], of attention [T, H]: training,
     or NULL. */
  float *stats1, *stats2, *post_stats1, *post_stats2, *q_stats, *k_stats, *lse;
  tfm_mat router, gate, slots_up, slots_act, slots_out, shared; /* absent without experts */
  tfm_routing routing;
} tfmi_buffers;

typedef struct tfmi_drop { /* dropout of a training pass */
  float rate[3];            /* of TFMI_DROP_EMBED, _ATTN, and of both that end in the residual */
  uint64_t seed;
} tfmi_drop;

enum { TFMI_DROP_EMBED, TFMI_DROP_ATTN, TFMI_DROP_OUT, TFMI_DROP_DOWN, TFMI_DROPS };

typedef struct tfmi_pass { /* what one forward pass needs beside the network */
  tfm_dev *dev;
  const tfm_net *net;
  const tfm_kv *kv;            /* [L] */
  tfm_rows rows;
  tfmi_buffers buffers;        /* [T, ...] views */
  const tfmi_buffers *kept;    /* [L] of each layer, for training; NULL: layers share buffers */
  const tfmi_drop *drop;       /* NULL: no dropout */
  bool again;                  /* the layer's result is known: only what its backward reads */
  float *probs;                /* [T * H, context] when tapped, else NULL */
  int32_t context;
  bool profile;                /* the parts of the pass are timed apart */
  const int32_t *cancel; /* the engine's, looked at before every layer; may be NULL, as the next */
  const volatile int32_t *host_cancel;
  tfm_tap tap;
  void *tap_user;
  float *tap_host;             /* [T, widest row] */
} tfmi_pass;

/* Columns [first, first + cols) of a view. */
static tfm_mat tfmi_columns(tfm_mat m, int32_t first, int32_t cols) {
  m.data = (char *)m.data + (size_t)first * (size_t)tfmi_types[m.type].block_bytes;
  m.cols = cols;
  return m;
}

/* Rows [first, first + rows) of a view. */
static tfm_mat tfmi_rows_of(tfm_mat m, int32_t first, int32_t rows) {
  m.data =
      (char *)m.data + (size_t)first * (size_t)m.stride * (size_t)tfmi_types[m.type].block_bytes;
  m.rows = rows;
  return m;
}

static tfm_mat tfmi_absent(void) {
  tfm_mat none;
  memset(&none, 0, sizeof none);
  return none;
}

/* Shows a result to the application's tap, row by row contiguous, as float32. */
static void tfmi_tell(tfmi_pass *p, const char *name, int32_t layer, tfm_mat m) {
  tfm_mat line;
  int32_t row;
  if (!p->tap || !tfmi_dev_wait(p->dev)) return;
  for (row = 0; row < m.rows; row++) {
    line = tfmi_rows_of(m, row, 1);
    p->dev->table->get(p->dev, p->tap_host + (size_t)row * (size_t)m.cols, line.data,
                       (size_t)m.cols * sizeof(float));
  }
  p->tap(p->tap_user, name, layer, p->tap_host, m.rows, m.cols);
}

static void tfmi_tell_probs(tfmi_pass *p, int32_t layer) {
  tfm_mat probs;
  if (!p->tap) return;
  probs = tfmi_absent();
  probs.data = p->probs;
  probs.type = TFM_F32;
  probs.rows = p->rows.n * p->net->heads;
  probs.cols = p->context;
  probs.stride = p->context;
  tfmi_tell(p, "probs", layer, probs);
}

/* The dropout of one place of the network: every layer has TFMI_DROPS of them. */
static tfm_dropout tfmi_drop_at(const tfmi_drop *drop, const tfm_rows *rows, int which,
                                int32_t layer) {
  tfm_dropout d;
  memset(&d, 0, sizeof d);
  if (!drop) return d;
  d.rate = drop->rate[which < 2 ? which : 2];
  d.seed = drop->seed;
  d.site = (uint32_t)(layer + 1) * TFMI_DROPS + (uint32_t)which;
  d.pos = rows->pos;
  d.seq = rows->seq;
  return d;
}

/* y = dropout(x), which is also its own backward. */
static void tfmi_drop_out(tfm_dev *d, tfm_mat y, tfm_mat x, tfm_dropout dropout) {
  tfm_epilogue e;
  memset(&e, 0, sizeof e);
  e.dropout = dropout;
  TFMI_OP(d, epilogue_bwd)(d, y, x, &e);
}

/* y = residual + x W^T + bias, the commonest of projections. */
static void tfmi_project(tfmi_pass *p, tfm_mat y, tfm_mat x, const tfm_weight *w, const float *bias,
                         tfm_mat residual) {
  tfm_epilogue e;
  memset(&e, 0, sizeof e);
  e.bias = bias;
  e.residual = residual;
  TFMI_OP(p->dev, matmul)(p->dev, y, x, w, &e);
}

static void tfmi_apply_norm(tfmi_pass *p, tfm_mat y, tfm_mat x, const float *w, const float *b,
                            float *stats) {
  TFMI_OP(p->dev, norm)(p->dev, y, x, w, b, tfmi_absent(), stats, &p->net->norm);
}

/* y = residual + dropout(x W^T + bias), or residual + norm(x W^T + bias) by way of branch. */
static void tfmi_project_back_in(tfmi_pass *p, tfm_mat y, tfm_mat x, const tfm_weight *w,
                                 const float *bias, tfm_mat residual, const float *post,
                                 tfm_mat branch, float *stats, tfm_dropout dropout) {
  tfm_epilogue e;
  memset(&e, 0, sizeof e);
  e.bias = bias;
  e.residual = post ? tfmi_absent() : residual;
  e.dropout = dropout;
  TFMI_OP(p->dev, matmul)(p->dev, post ? branch : y, x, w, &e);
  if (post)
    TFMI_OP(p->dev, norm)(p->dev, y, branch, post, NULL, residual, stats, &p->net->norm);
}

/* Queries and keys of qkv, normalised head by head and rotated, in qk. */
static void tfmi_queries_and_keys(tfmi_pass *p, const tfm_layer *layer) {
  const tfm_net *net = p->net;
  const tfmi_buffers *b = &p->buffers;
  int32_t q_width = net->heads * net->head_width, k_width = net->kv_heads * net->head_width;
  tfm_norm norm = net->head_norm;
  if (layer->q_norm) {
    norm.groups = net->heads;
    TFMI_OP(p->dev, norm)(p->dev, tfmi_columns(b->qk, 0, q_width), tfmi_columns(b->qkv, 0, q_width),
                          layer->q_norm, NULL, tfmi_absent(), b->q_stats, &norm);
    norm.groups = net->kv_heads;
    TFMI_OP(p->dev, norm)(p->dev, tfmi_columns(b->qk, q_width, k_width),
                          tfmi_columns(b->qkv, q_width, k_width), layer->k_norm, NULL,
                          tfmi_absent(), b->k_stats, &norm);
  }
  if (layer->rope.rot) TFMI_OP(p->dev, rope)(p->dev, b->qk, p->rows.pos, &layer->rope);
}

/* mid = in + attention(norm(in)). */
static void tfmi_attention(tfmi_pass *p, int32_t index) {
  const tfm_net *net = p->net;
  const tfm_layer *layer = &net->layer[index];
  const tfmi_buffers *b = &p->buffers;
  int32_t q_width = net->heads * net->head_width, k_width = net->kv_heads * net->head_width;
  tfm_mat q = tfmi_columns(b->qk, 0, q_width), k = tfmi_columns(b->qk, q_width, k_width);
  tfm_mat v = tfmi_columns(b->qkv, q_width + k_width, k_width);
  tfm_attn attn = layer->attn;
  attn.probs = p->probs;
  attn.probs_stride = p->context;
  attn.dropout = tfmi_drop_at(p->drop, &p->rows, TFMI_DROP_ATTN, index);

  tfmi_apply_norm(p, b->norm1, b->in, layer->norm1, layer->norm1_bias, b->stats1);
  tfmi_tell(p, "norm1", index, b->norm1);
  tfmi_project(p, b->qkv, b->norm1, &layer->qkv, layer->qkv_bias, tfmi_absent());
  tfmi_tell(p, "qkv", index, b->qkv);
  tfmi_queries_and_keys(p, layer);
  tfmi_tell(p, "q", index, q);
  tfmi_tell(p, "k", index, k);
  if (p->kv[index].table) TFMI_OP(p->dev, kv_put)(p->dev, &p->kv[index], k, v, &p->rows);
  TFMI_OP(p->dev, attn)(p->dev, b->attn, q, &p->kv[index], &p->rows, b->lse, &attn);
  tfmi_tell_probs(p, index);
  tfmi_tell(p, "attn", index, b->attn);
  tfmi_project_back_in(p, b->mid, b->attn, &layer->out, layer->out_bias, b->in, layer->post1,
                       b->branch1, b->post_stats1,
                       tfmi_drop_at(p->drop, &p->rows, TFMI_DROP_OUT, index));
  tfmi_tell(p, "mid", index, b->mid);
}

/* Whether a device's fusions may be taken: all entries are its own, and nobody looks in between. */
static bool tfmi_may_fuse(const tfmi_pass *p) {
  return !p->tap && !p->kept && !p->dev->override_mask;
}

/* Gate and up at once, where the device has that. */
static bool tfmi_gate_up(tfmi_pass *p, tfm_mat act, const tfm_layer *layer) {
  tfm_dev *d = p->dev;
  return d->table->matmul_glu && !layer->up_bias && tfmi_may_fuse(p) &&
         d->table->matmul_glu(d, act, p->buffers.norm2, &layer->up, p->net->act);
}

/* act(up(norm2)): [T, F] of this layer, whose F may be less than others'. */
static tfm_mat tfmi_hidden(tfmi_pass *p, int32_t index) {
  const tfm_net *net = p->net;
  const tfm_layer *layer = &net->layer[index];
  const tfmi_buffers *b = &p->buffers;
  tfm_mat act = tfmi_columns(b->act, 0, layer->down.cols), wide = b->up;
  tfm_epilogue up;
  memset(&up, 0, sizeof up);
  up.bias = layer->up_bias;
  wide.cols = wide.data ? layer->up.rows : 0;
  if (net->gated) {
    if (tfmi_gate_up(p, act, layer)) return act;
    TFMI_OP(p->dev, matmul)(p->dev, wide, b->norm2, &layer->up, &up);
    TFMI_OP(p->dev, glu)(p->dev, act, wide, net->act);
  } else {
    up.act = net->act;
    up.aux = wide;
    TFMI_OP(p->dev, matmul)(p->dev, act, b->norm2, &layer->up, &up);
  }
  if (wide.data) tfmi_tell(p, "up", index, wide);
  tfmi_tell(p, "act", index, act);
  return act;
}

/* slots_out = down(act(up(norm2))) of the experts that the router chose for each token. */
static void tfmi_run_experts(tfmi_pass *p, int32_t index) {
  tfm_dev *d = p->dev;
  const tfm_net *net = p->net;
  const tfm_layer *layer = &net->layer[index];
  tfmi_buffers *b = &p->buffers;
  tfm_routing *r = &b->routing;
  tfmi_project(p, b->router, b->norm2, &layer->router, NULL, tfmi_absent());
  tfmi_tell(p, "router", index, b->router);
  if (p->again) r->count = r->mass = NULL; /* counted the first time */
  TFMI_OP(d, route)(d, r, b->router, &net->moe);
  TFMI_OP(d, matmul_moe)(d, b->slots_up, b->norm2, &layer->expert_up, r, true);
  if (layer->expert_up_bias)
    TFMI_OP(d, moe_bias)(d, b->slots_up, b->slots_up, layer->expert_up_bias, r, TFM_ACT_NONE);
  if (net->gated) TFMI_OP(d, glu)(d, b->slots_act, b->slots_up, net->act);
  else TFMI_OP(d, moe_bias)(d, b->slots_act, b->slots_up, NULL, r, net->act);
  TFMI_OP(d, matmul_moe)(d, b->slots_out, b->slots_act, &layer->expert_down, r, false);
  if (layer->expert_down_bias)
    TFMI_OP(d, moe_bias)(d, b->slots_out, b->slots_out, layer->expert_down_bias, r, TFM_ACT_NONE);
}

/* y = residual + experts(norm2), and the share of the one that is for all tokens. */
static void tfmi_mixture(tfmi_pass *p, int32_t index, tfm_mat y, tfm_mat residual) {
  tfm_dev *d = p->dev;
  const tfm_layer *layer = &p->net->layer[index];
  const tfmi_buffers *b = &p->buffers;
  tfmi_run_experts(p, index);
  TFMI_OP(d, combine)(d, y, b->slots_out, residual, &b->routing);
  if (!layer->shared_gate.rows) return;
  tfmi_project(p, b->gate, b->norm2, &layer->shared_gate, NULL, tfmi_absent());
  tfmi_project(p, b->shared, tfmi_hidden(p, index), &layer->down, layer->down_bias, tfmi_absent());
  TFMI_OP(d, add_gated)(d, y, b->shared, b->gate);
}

/* out = mid + down(act(up(norm(mid)))), or experts in its place. */
static void tfmi_feed_forward(tfmi_pass *p, int32_t index) {
  const tfm_net *net = p->net;
  const tfm_layer *layer = &net->layer[index];
  const tfmi_buffers *b = &p->buffers;
  tfmi_apply_norm(p, b->norm2, b->mid, layer->norm2, layer->norm2_bias, b->stats2);
  tfmi_tell(p, "norm2", index, b->norm2);
  if (layer->router.rows) {
    tfmi_mixture(p, index, b->out, b->mid);
  } else {
    tfm_mat act = tfmi_hidden(p, index);
    if (p->again && !layer->post2) return;
    tfmi_project_back_in(p, b->out, act, &layer->down, layer->down_bias, b->mid, layer->post2,
                         b->branch2, b->post_stats2,
                         tfmi_drop_at(p->drop, &p->rows, TFMI_DROP_DOWN, index));
  }
  tfmi_tell(p, "out", index, b->out);
}

static void tfmi_profile(const tfmi_pass *p, tfm_work kind) {
  if (p->profile) tfmi_mark(p->dev, kind);
}

/* The whole layer at once, where the device has that. */
static bool tfmi_fused(tfmi_pass *p, int32_t layer) {
  tfm_dev *d = p->dev;
  if (!d->table->layer || !tfmi_may_fuse(p)) return false;
  tfmi_profile(p, TFM_WORK_LAYER);
  return d->table->layer(d, p->buffers.out, p->net, layer, &p->kv[layer], &p->rows);
}

static bool tfmi_cancelled(const tfmi_pass *p) {
  return (p->cancel && __atomic_load_n(p->cancel, __ATOMIC_RELAXED)) ||
         (p->host_cancel && __atomic_load_n(p->host_cancel, __ATOMIC_RELAXED));
}

/* The rows through all layers: their residual stream ends up in buffers.out. False: cancelled. */
static bool tfmi_forward(tfmi_pass *p) {
  const tfm_net *net = p->net;
  tfm_dev *d = p->dev;
  int32_t layer;
  tfmi_profile(p, TFM_WORK_EMBED);
  TFMI_OP(d, embed)(d, p->buffers.in, &net->embed, net->positions.rows ? &net->positions : NULL,
                    &p->rows, net->embed_scale != 0 ? net->embed_scale : 1.0f);
  if (p->drop && p->drop->rate[TFMI_DROP_EMBED] > 0)
    tfmi_drop_out(d, p->buffers.in, p->buffers.in,
                  tfmi_drop_at(p->drop, &p->rows, TFMI_DROP_EMBED, -1));
  tfmi_tell(p, "embed", -1, p->buffers.in);
  for (layer = 0; layer < net->layers; layer++) {
    if (tfmi_cancelled(p)) return false;
    if (p->kept) p->buffers = p->kept[layer];
    if (tfmi_fused(p, layer)) continue;
    tfmi_profile(p, TFM_WORK_ATTENTION);
    tfmi_attention(p, layer);
    tfmi_profile(p, TFM_WORK_FEED_FORWARD);
    tfmi_feed_forward(p, layer);
  }
  return true;
}

/* logits [R, V] of residual rows x [R, C]; h [R, C] is scratch. */
static void tfmi_head(tfmi_pass *p, tfm_mat logits, tfm_mat h, tfm_mat x) {
  tfm_epilogue e;
  memset(&e, 0, sizeof e);
  e.bias = p->net->head_bias;
  e.softcap = p->net->logit_softcap;
  tfmi_mark(p->dev, TFM_WORK_HEAD);
  tfmi_apply_norm(p, h, x, p->net->final_norm, p->net->final_norm_bias, NULL);
  tfmi_tell(p, "norm", -1, h);
  TFMI_OP(p->dev, matmul)(p->dev, logits, h, &p->net->head, &e);
  tfmi_mark(p->dev, TFM_WORK_NONE);
  tfmi_tell(p, "logits", -1, logits);
}

/* =================================================================================================
   >>engine   memory, pages, and passes over many sequences
   =================================================================================================

   An engine takes all its memory when it is created: one host block and one device block, laid out
   by functions that run twice: once to measure (that is also the plan), once to point.

   The cache is a pool of pages. A sequence has a row of the page table; it takes pages as it grows
   and gives them back when it is rewound or freed, so pages are spent by tokens, not by slots.

   Each session is a list of tokens of which the first `done` are in the cache. tfmi_advance runs
   what is not done yet, of one session or of many, in passes of at most batch_rows rows: a prompt,
   a step of a batch, or both mixed are the same thing. The head turns the residual row of a
   sequence's last token into logits when somebody asks; until then the row stays in the stream,
   where the pass left it, or, when another pass needs the place, in the slot kept behind for it.

   A device may fail at any point of a pass and tells at the end: then nothing that it holds is
   trusted, and sessions run again from their tokens. */

#define TFMI_TEXT_MAX 4096 /* longest text of one token that a session can hand out */
#define TFMI_STOP_MAX 1024 /* longest stop string */
#define TFMI_EVAL_ROWS 16  /* rows of logits at a time, when all are asked for */
#define TFMI_STEPS_AHEAD 4 /* that a device is asked for at a time; up to twice as many run */

struct tfm_session {
  tfm_engine *engine;
  bool open, owns_engine;
  int32_t slot;          /* row of the page table and of the history */
  int32_t *tokens;       /* [context] */
  int32_t length, done;  /* tokens so far; of these, in the cache */
  int32_t told;          /* ... and in the device's history, which only a penalty reads */
  int32_t pages;         /* taken */
  bool chosen;           /* the last token came from tfm_next: its logits are one position back */
  int32_t last_at;       /* the stream has the residual row after this many tokens; 0: it has not */
  int32_t last_row;      /* ... in this row */
  int32_t logits_row;    /* of the engine's logits, when logits_epoch is the engine's */
  int32_t logits_at;     /* ... after this many tokens */
  uint64_t logits_epoch;
  uint64_t call;         /* the last tfm_next_batch that named this session */
  const tfm_tokenizer *tokenizer;
  tfm_decoder decoder;
  char text[TFMI_TEXT_MAX];
};

/* Tokens that the device chooses by itself, before they are asked for: see >>session. */
typedef struct tfmi_ahead {
  int32_t *ids;           /* [2, TFMI_STEPS_AHEAD] shared with the device; NULL: it does not */
  tfm_session *session;   /* whose they are; NULL: nothing runs */
  int32_t queued, taken;  /* steps asked for, and handed out */
  const tfm_session *last; /* who was asked for a token last, alone, */
  tfm_sampling how;        /* ... and how it was to be chosen */
} tfmi_ahead;

/* What passes are told: one block, laid out alike on the host and on the device, so that one put
   carries all of a step. */
typedef struct tfmi_told {
  tfm_sampling *params;      /* [sequences] */
  int32_t *pick, *at, *slot; /* [sequences] each: rows of the stream, positions, slots */
  int32_t *id, *pos, *seq;   /* [rows] each */
} tfmi_told;

struct tfm_engine {
  tfmi_heap heap;
  tfm_dev dev;
  const tfm_model *model;
  tfm_net net;              /* the model's, with the frequencies of this engine's context */
  tfm_engine_config config; /* with the defaults filled in */
  int32_t max_pages;        /* of one sequence */
  int32_t rows;             /* batch_rows, padded to what the device wants */
  int32_t cancel;           /* atomic */
  uint64_t epoch;           /* counts what overwrote the logits */
  uint64_t calls;           /* of tfm_next_batch */
  tfm_stats stats;
  double born, fed;         /* its birth; the latest feed, until a token of it */
  tfmi_ahead ahead;
  size_t host_bytes, device_bytes, cache_bytes;
  void *host_block, *device_block;
  /* host */
  tfm_session *sessions;     /* [sequences] */
  tfmi_told told;            /* the pass being put together */
  int32_t *table;            /* [sequences, max_pages] */
  int32_t *free_pages, free_count;
  int32_t *chosen;           /* [sequences] ids on their way to the caller; shared */
  float *host_logits;        /* [V] */
  float *tap_host;
  tfm_kv *kv;                /* [L] */
  /* device */
  tfmi_told d_told;
  int32_t *d_table, *d_history;
  float *d_work;             /* [sequences, 2 V] */
  float *d_probs, *d_frequencies;
  tfmi_buffers buffers;
  tfm_mat stream;            /* [rows + sequences, C]: of the pass, then what was put aside */
  tfm_mat picked, logits;    /* [sequences, C], [logit_rows, V] */
  char held[TFMI_TEXT_MAX + TFMI_STOP_MAX]; /* by tfm_generate: may begin a stop string */
};

/* ---- Memory ---- */

typedef struct tfmi_arena { /* base NULL: only measures */
  char *base;
  size_t used;
  bool overflow;
} tfmi_arena;

static void *tfmi_take(tfmi_arena *a, uint64_t count, uint64_t size) {
  size_t bytes, at = a->used;
  if (!tfmi_bytes(count, size, &bytes) || bytes > SIZE_MAX / 4 - at) {
    a->overflow = true;
    return NULL;
  }
  a->used = tfmi_align64(at + bytes);
  return a->base ? a->base + at : NULL;
}

static tfm_mat tfmi_take_mat(tfmi_arena *a, tfm_type type, int32_t rows, int32_t cols) {
  tfm_mat m;
  m.data = tfmi_take(a, (uint64_t)rows * (uint64_t)cols, (uint64_t)tfmi_types[type].block_bytes);
  m.type = type;
  m.rows = rows;
  m.cols = cols;
  m.stride = cols;
  return m;
}

static int32_t tfmi_max32(int32_t a, int32_t b) { return a > b ? a : b; }

/* The widest feed-forward that is not of the router's experts. */
static int32_t tfmi_hidden_width(const tfm_net *net) {
  int32_t width = 0, i;
  for (i = 0; i < net->layers; i++) width = tfmi_max32(width, net->layer[i].down.cols);
  return width;
}

static tfm_routing tfmi_take_routing(tfmi_arena *a, const tfm_net *net, int32_t rows) {
  tfm_routing r;
  uint64_t slots = (uint64_t)rows * (uint64_t)net->experts_used, experts = (uint64_t)net->experts;
  memset(&r, 0, sizeof r);
  r.tokens = rows;
  r.top_k = net->experts_used;
  r.experts = net->experts;
  r.expert = (int32_t *)tfmi_take(a, slots, sizeof(int32_t));
  r.weight = (float *)tfmi_take(a, slots, sizeof(float));
  r.order = (int32_t *)tfmi_take(a, slots, sizeof(int32_t));
  r.begin = (int32_t *)tfmi_take(a, experts + 1, sizeof(int32_t));
  r.probs = (float *)tfmi_take(a, (uint64_t)rows * experts, sizeof(float));
  return r;
}

/* What experts need beside the buffers of every layer. */
static void tfmi_take_slots(tfmi_arena *a, tfmi_buffers *b, const tfm_net *net, tfm_type type,
                            int32_t rows) {
  int32_t slots = rows * net->experts_used, width = net->expert_width;
  if (!net->experts) return;
  b->router = tfmi_take_mat(a, TFM_F32, rows, net->experts);
  b->gate = tfmi_take_mat(a, TFM_F32, rows, 1);
  b->slots_up = tfmi_take_mat(a, type, slots, net->gated ? 2 * width : width);
  b->slots_act = tfmi_take_mat(a, type, slots, width);
  b->slots_out = tfmi_take_mat(a, type, slots, net->width);
  b->shared = tfmi_take_mat(a, type, rows, net->width);
  b->routing = tfmi_take_routing(a, net, rows);
}

/* The buffers of a layer, shared by all layers: see >>forward. */
static tfmi_buffers tfmi_take_buffers(tfmi_arena *a, const tfm_net *net, tfm_mat stream,
                                      tfm_type type, int32_t rows, bool keep_up) {
  tfmi_buffers b;
  int32_t qkv = (net->heads + 2 * net->kv_heads) * net->head_width, wide = tfmi_hidden_width(net);
  memset(&b, 0, sizeof b);
  b.in = b.mid = b.out = stream;
  b.norm1 = b.norm2 = b.branch1 = b.branch2 = tfmi_take_mat(a, type, rows, net->width);
  b.qkv = tfmi_take_mat(a, type, rows, qkv);
  b.qk = b.qkv; /* its first columns; there is no memory yet when sizes are told */
  b.qk.cols = (net->heads + net->kv_heads) * net->head_width;
  b.attn = tfmi_take_mat(a, type, rows, net->heads * net->head_width);
  b.act = tfmi_take_mat(a, type, rows, wide);
  if (net->gated) b.up = tfmi_take_mat(a, type, rows, 2 * wide);
  else if (keep_up) b.up = tfmi_take_mat(a, type, rows, wide);
  tfmi_take_slots(a, &b, net, type, rows);
  return b;
}

static void tfmi_take_cache(tfm_engine *e, tfmi_arena *a) {
  const tfm_net *net = &e->model->net;
  uint64_t page = tfmi_span(e->config.cache, (int64_t)net->kv_heads * net->head_width *
                                                 e->config.page_tokens);
  size_t begin = a->used;
  int32_t layer;
  for (layer = 0; layer < net->layers; layer++) {
    void *k = tfmi_take(a, (uint64_t)e->config.pages, page);
    void *v = tfmi_take(a, (uint64_t)e->config.pages, page);
    if (!a->base) continue;
    e->kv[layer].k = k;
    e->kv[layer].v = v;
    e->kv[layer].type = e->config.cache;
    e->kv[layer].table = e->d_table;
    e->kv[layer].max_pages = e->max_pages;
    e->kv[layer].page_tokens = e->config.page_tokens;
    e->kv[layer].heads = net->kv_heads;
    e->kv[layer].width = net->head_width;
  }
  e->cache_bytes = a->used - begin;
}

/* Floats of the widest result that a tap can be shown. */
static uint64_t tfmi_tap_floats(const tfm_engine *e) {
  const tfmi_buffers *b = &e->buffers;
  uint64_t probs = (uint64_t)e->config.context * (uint64_t)e->model->net.heads;
  int32_t wide = tfmi_max32(tfmi_max32(b->qkv.cols, b->up.cols), b->act.cols);
  wide = tfmi_max32(tfmi_max32(wide, b->in.cols), e->model->net.vocabulary);
  wide = tfmi_max32(wide, b->router.cols);
  return (uint64_t)e->rows * (probs > (uint64_t)wide ? probs : (uint64_t)wide);
}

static int32_t *tfmi_take_ints(tfmi_arena *a, uint64_t count, uint64_t times) {
  return (int32_t *)tfmi_take(a, count * times, sizeof(int32_t));
}

static tfmi_told tfmi_take_told(tfmi_arena *a, int32_t sequences, int32_t rows) {
  const uint64_t ints = 3 * ((uint64_t)sequences + (uint64_t)rows) * sizeof(int32_t);
  tfmi_told t;
  memset(&t, 0, sizeof t);
  t.params = (tfm_sampling *)tfmi_take(a, (uint64_t)sequences * sizeof *t.params + ints, 1);
  if (!t.params) return t;
  t.pick = (int32_t *)(void *)(t.params + sequences);
  t.at = t.pick + sequences;
  t.slot = t.at + sequences;
  t.id = t.slot + sequences;
  t.pos = t.id + rows;
  t.seq = t.pos + rows;
  return t;
}

static void tfmi_lay_out_device(tfm_engine *e, tfmi_arena *a) {
  const tfm_net *net = &e->model->net;
  const tfm_engine_config *c = &e->config;
  const tfm_backend *table = e->dev.table;
  uint64_t sequences = (uint64_t)c->sequences, rows = (uint64_t)e->rows;
  uint64_t context = (uint64_t)c->context;
  int32_t logit_rows = tfmi_max32(c->sequences, TFMI_EVAL_ROWS);
  e->d_told = tfmi_take_told(a, c->sequences, e->rows);
  e->d_table = tfmi_take_ints(a, sequences, (uint64_t)e->max_pages);
  e->d_history = tfmi_take_ints(a, sequences, context);
  e->d_work = (float *)tfmi_take(a, sequences * (uint64_t)net->vocabulary, 2 * sizeof(float));
  e->stream = tfmi_take_mat(a, table->residual, e->rows + c->sequences, net->width);
  e->buffers = tfmi_take_buffers(a, net, e->stream, table->activation, e->rows, c->tap != NULL);
  e->picked = tfmi_take_mat(a, table->residual, c->sequences, net->width);
  e->logits = tfmi_take_mat(a, TFM_F32, logit_rows, net->vocabulary);
  if (c->tap)
    e->d_probs = (float *)tfmi_take(a, rows * context, (uint64_t)net->heads * sizeof(float));
  e->d_frequencies = (float *)tfmi_take(a, (uint64_t)net->head_width, sizeof(float));
  e->dev.cache = c->cache;
  if (e->dev.has_bf16 && !c->deterministic && e->model->weights != TFM_F32)
    e->dev.products = TFM_BF16;
  e->dev.work =
      tfmi_take(a, table->work_bytes(&e->dev, net, e->rows, c->sequences, c->context), 1);
  tfmi_take_cache(e, a);
}

static void tfmi_lay_out_host(tfm_engine *e, tfmi_arena *a) {
  const tfm_engine_config *c = &e->config;
  uint64_t sequences = (uint64_t)c->sequences;
  int32_t s;
  e->sessions = TFMI_NEW(tfm_session, tfmi_take(a, sequences, sizeof(tfm_session)));
  e->told = tfmi_take_told(a, c->sequences, e->rows);
  e->table = tfmi_take_ints(a, sequences, (uint64_t)e->max_pages);
  e->free_pages = tfmi_take_ints(a, (uint64_t)c->pages, 1);
  e->host_logits = (float *)tfmi_take(a, (uint64_t)e->model->net.vocabulary, sizeof(float));
  e->kv = TFMI_NEW(tfm_kv, tfmi_take(a, (uint64_t)e->net.layers, sizeof(tfm_kv)));
  e->net.layer = TFMI_NEW(tfm_layer, tfmi_take(a, (uint64_t)e->net.layers, sizeof(tfm_layer)));
  for (s = 0; s < c->sequences; s++) {
    int32_t *tokens = tfmi_take_ints(a, (uint64_t)c->context, 1);
    if (a->base) e->sessions[s].tokens = tokens;
  }
  if (c->tap) e->tap_host = (float *)tfmi_take(a, tfmi_tap_floats(e), sizeof(float));
}

/* Of ids that the device chooses, and may choose ahead. */
static size_t tfmi_chosen_bytes(const tfm_engine *e) {
  return ((size_t)e->config.sequences + 2 * TFMI_STEPS_AHEAD) * sizeof(int32_t);
}

/* ---- Creation ---- */

/* Opens for an engine the device that its model was loaded on, with a pool of its own. */
static tfm_status tfmi_dev_open_like(tfm_dev *d, tfmi_heap *heap, const tfm_dev *model,
                                     int32_t threads, bool deterministic) {
  tfm_status status;
  memset(d, 0, sizeof *d);
  d->deterministic = deterministic;
  d->host = &heap->host;
  d->index = model->index;
  d->override_mask = model->override_mask;
  d->host_visible = model->host_visible;
  status = tfmi_pool_open(d, heap, threads);
  if (status != TFM_OK) return status;
  d->table = model->table;
  status = d->table->open(d);
  if (status == TFM_OK) return TFM_OK;
  tfmi_report(status, "device %s: %s", d->table->name, d->message);
  d->table = NULL;
  tfmi_dev_close(d, heap);
  return status;
}

static tfm_status tfmi_bad_config(const char *field, int64_t value, const char *expected) {
  return tfmi_report(TFM_E_ARG, "tfm_engine_config.%s is %lld; expected %s", field,
                     (long long)value, expected);
}

static int32_t tfmi_round_up(int32_t n, int32_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

static tfm_type tfmi_cache_default(const tfm_engine *e) {
  tfm_type weights = e->model->weights;
  if (!e->dev.table->half_cache || weights == TFM_F32) return e->dev.table->activation;
  return weights == TFM_BF16 ? TFM_BF16 : TFM_F16;
}

/* Fills in the defaults: every 0 becomes what the comments of tfm_engine_config say. */
static tfm_status tfmi_engine_configure(tfm_engine *e) {
  const tfm_net *net = &e->model->net;
  tfm_engine_config *c = &e->config;
  if (c->context < 0 || c->context > net->context)
    return tfmi_report(TFM_E_ARG,
                       "tfm_engine_config.context is %d; expected 1 to the model's %d, or 0",
                       c->context, net->context);
  if (c->sequences < 0 || c->sequences > 65536)
    return tfmi_bad_config("sequences", c->sequences, "1 to 65536, or 0 for 1");
  if (c->batch_rows < 0 || c->batch_rows > 65536)
    return tfmi_bad_config("batch_rows", c->batch_rows, "1 to 65536, or 0 for the device's own");
  if (c->page_tokens < 0) return tfmi_bad_config("page_tokens", c->page_tokens, "0 or more");
  if (c->pages < 0) return tfmi_bad_config("pages", c->pages, "0 or more");
  if (c->context == 0) c->context = tfmi_min32(net->context, 4096);
  if (c->sequences == 0) c->sequences = 1;
  if (c->batch_rows == 0) c->batch_rows = tfmi_min32(e->dev.table->pass_rows, c->context);
  c->batch_rows = tfmi_max32(c->batch_rows, c->sequences);
  e->rows = tfmi_round_up(c->batch_rows, e->dev.table->row_multiple);
  if (c->page_tokens == 0) c->page_tokens = 64;
  c->page_tokens = tfmi_min32(c->page_tokens, c->context);
  e->max_pages = (c->context - 1) / c->page_tokens + 1;
  if ((int64_t)e->max_pages * c->sequences > INT32_MAX)
    return tfmi_bad_config("sequences", c->sequences,
                           "fewer, or larger pages: they cannot be counted");
  if (c->pages == 0 || c->pages > e->max_pages * c->sequences)
    c->pages = e->max_pages * c->sequences;
  if (c->cache == TFM_TYPE_DEFAULT) c->cache = tfmi_cache_default(e);
  if (c->cache != TFM_F32 && c->cache != TFM_F16 && c->cache != TFM_BF16 && c->cache != TFM_Q8_0)
    return tfmi_report(TFM_E_UNSUPPORTED,
                       "tfm_engine_config.cache is %s; expected F32, F16, BF16 or Q8_0",
                       tfm_type_name(c->cache));
  if (c->cache == TFM_Q8_0 && net->head_width % 32 != 0)
    return tfmi_report(TFM_E_UNSUPPORTED, "tfm_engine_config.cache is Q8_0, which needs heads of a "
                       "multiple of 32 values, found %d; choose F16", (int)net->head_width);
  if (c->cache == TFM_Q8_0 && e->dev.table->half_cache && e->dev.override_mask)
    return tfmi_report(TFM_E_UNSUPPORTED, "tfm_engine_config.cache is Q8_0, which lies otherwise "
                       "on %s than on ref, whose entries are to read it; choose F16",
                       e->dev.table->name);
  if (c->tap && (e->dev.table->activation != TFM_F32 || e->dev.table->residual != TFM_F32))
    return tfmi_report(TFM_E_UNSUPPORTED,
                       "tap: device %s has activations of type %s; a tap needs F32 throughout",
                       e->dev.table->name, tfm_type_name(e->dev.table->activation));
  return TFM_OK;
}

/* Opens the device, fills in the defaults and measures; on failure nothing is left open. dry: for a
   plan, which starts no threads and knows no limit. */
static tfm_status tfmi_engine_begin(tfm_engine *e, const tfm_model *model,
                                    const tfm_engine_config *config, bool dry) {
  tfmi_arena host = {NULL, 0, false}, device = {NULL, 0, false};
  tfm_status status;
  memset(e, 0, sizeof *e);
  if (config) e->config = *config;
  e->heap.host = e->config.host;
  e->heap.dry = dry;
  if (dry) e->heap.host.memory_limit_bytes = 0;
  e->model = model;
  e->net = model->net;
  status = tfmi_heap_charge(&e->heap, sizeof *e);
  if (status == TFM_OK)
    status = tfmi_dev_open_like(&e->dev, &e->heap, &model->dev, e->config.threads,
                                e->config.deterministic);
  if (status != TFM_OK) return status;
  status = tfmi_engine_configure(e);
  if (status == TFM_OK) tfmi_lay_out_device(e, &device);
  if (status == TFM_OK) tfmi_lay_out_host(e, &host);
  if (status == TFM_OK && (host.overflow || device.overflow))
    status = tfmi_report(TFM_E_MEMORY,
                         "engine: %d sequences of %d positions are more than the address "
                         "space holds; shorten the context",
                         e->config.sequences, e->config.context);
  if (status == TFM_OK) status = tfmi_heap_charge(&e->heap, host.used + TFMI_SLACK);
  if (status == TFM_OK) status = tfmi_heap_charge(&e->heap, device.used + TFMI_SLACK);
  if (status == TFM_OK) status = tfmi_heap_charge(&e->heap, tfmi_chosen_bytes(e) + TFMI_SLACK);
  if (status != TFM_OK) tfmi_dev_close(&e->dev, &e->heap);
  e->host_bytes = host.used;
  e->device_bytes = device.used;
  return status;
}

static tfm_status tfmi_engine_plan(const tfm_model *model, const tfm_engine_config *config,
                                   tfm_plan *out) {
  tfm_engine e;
  tfm_status status = tfmi_engine_begin(&e, model, config, true);
  if (status != TFM_OK) return status;
  out->engine_bytes = e.heap.peak;
  out->cache_bytes = e.cache_bytes;
  out->workspace_bytes = e.device_bytes - e.cache_bytes;
  tfmi_dev_close(&e.dev, &e.heap);
  return TFM_OK;
}

/* Allocates both blocks, whose sizes have been charged, and lays them out. */
static tfm_status tfmi_engine_allocate(tfm_engine *e) {
  tfmi_arena host = {NULL, 0, false}, device = {NULL, 0, false};
  int32_t i;
  e->host_block = tfmi_host_realloc(&e->heap.host, NULL, 0, e->host_bytes + TFMI_SLACK);
  if (e->host_block) e->device_block = e->dev.table->alloc(&e->dev, e->device_bytes);
  if (e->device_block)
    e->chosen = (int32_t *)e->dev.table->alloc_shared(&e->dev, tfmi_chosen_bytes(e));
  if (!e->chosen)
    return tfmi_report(TFM_E_MEMORY,
                       "engine: out of memory for %llu bytes; shorten the context or "
                       "lower sequences",
                       (unsigned long long)(e->host_bytes + e->device_bytes));
  memset(e->host_block, 0, e->host_bytes + TFMI_SLACK);
  host.base = (char *)e->host_block + (64 - (uintptr_t)e->host_block % 64);
  device.base = (char *)e->device_block;
  tfmi_lay_out_host(e, &host); /* first: the device's part fills in kv */
  tfmi_lay_out_device(e, &device);
  memcpy(e->net.layer, e->model->net.layer, (size_t)e->net.layers * sizeof *e->net.layer);
  tfmi_net_rotate(&e->dev, &e->net, e->model->rotation, e->config.context, e->d_frequencies);
  for (i = 0; i < e->config.pages; i++) e->free_pages[i] = e->config.pages - 1 - i;
  e->free_count = e->config.pages;
  for (i = 0; i < e->config.sequences; i++) {
    e->sessions[i].engine = e;
    e->sessions[i].slot = i;
  }
  e->epoch = 1;
  e->born = tfmi_seconds();
  if (e->dev.table->decode && !e->config.tap && !e->dev.override_mask)
    e->ahead.ids = e->chosen + e->config.sequences;
  return TFM_OK;
}

TFM_API void tfm_engine_free(tfm_engine *engine) {
  tfmi_heap heap;
  if (!engine) return;
  heap = engine->heap;
  if (engine->ahead.session) engine->dev.table->sync(&engine->dev);
  if (engine->chosen)
    engine->dev.table->release_shared(&engine->dev, engine->chosen, tfmi_chosen_bytes(engine));
  if (engine->device_block)
    engine->dev.table->release(&engine->dev, engine->device_block, engine->device_bytes);
  if (engine->host_block)
    tfmi_host_realloc(&heap.host, engine->host_block, engine->host_bytes + TFMI_SLACK, 0);
  tfmi_dev_close(&engine->dev, &heap);
  tfmi_host_realloc(&heap.host, engine, sizeof *engine, 0);
}

TFM_API tfm_engine *tfm_engine_create(const tfm_model *model, const tfm_engine_config *config) {
  tfm_host host;
  tfm_engine *e;
  if (!model) {
    tfmi_null_object("tfm_engine_create");
    return NULL;
  }
  memset(&host, 0, sizeof host);
  if (config) host = config->host;
  e = TFMI_NEW(tfm_engine, tfmi_host_realloc(&host, NULL, 0, sizeof *e));
  if (!e) {
    tfmi_report(TFM_E_MEMORY, "engine: out of memory for %llu bytes",
                (unsigned long long)sizeof *e);
    return NULL;
  }
  if (tfmi_engine_begin(e, model, config, false) != TFM_OK) {
    tfmi_host_realloc(&host, e, sizeof *e, 0);
    return NULL;
  }
  if (tfmi_engine_allocate(e) == TFM_OK) return e;
  tfm_engine_free(e);
  return NULL;
}

/* ---- Pages ---- */

static void tfmi_put_pages(tfm_session *s) {
  tfm_engine *e = s->engine;
  size_t at = (size_t)s->slot * (size_t)e->max_pages;
  e->dev.table->put(&e->dev, e->d_table + at, e->table + at, (size_t)s->pages * sizeof *e->table);
}

/* Makes room in the cache for the first `tokens` of a session. False: the pool is empty. */
static bool tfmi_pages_grow(tfm_session *s, int32_t tokens) {
  tfm_engine *e = s->engine;
  int32_t wanted = tokens ? (tokens - 1) / e->config.page_tokens + 1 : 0;
  int32_t *row = e->table + (size_t)s->slot * (size_t)e->max_pages;
  if (wanted <= s->pages) return true;
  if (wanted - s->pages > e->free_count) return false;
  while (s->pages < wanted) row[s->pages++] = e->free_pages[--e->free_count];
  tfmi_put_pages(s);
  return true;
}

/* Gives back the pages beyond the first `tokens`. */
static void tfmi_pages_shrink(tfm_session *s, int32_t tokens) {
  tfm_engine *e = s->engine;
  int32_t wanted = tokens ? (tokens - 1) / e->config.page_tokens + 1 : 0;
  const int32_t *row = e->table + (size_t)s->slot * (size_t)e->max_pages;
  while (s->pages > wanted) e->free_pages[e->free_count++] = row[--s->pages];
}

/* ---- Passes ---- */

/* Views of the first rows only. */
static void tfmi_buffers_trim(tfmi_buffers *b, int32_t rows) {
  tfm_mat *const view[] = {&b->in, &b->norm1, &b->qkv, &b->qk, &b->attn, &b->branch1, &b->mid,
                           &b->norm2, &b->up, &b->act, &b->branch2, &b->out, &b->router, &b->gate,
                           &b->shared};
  tfm_mat *const slots[] = {&b->slots_up, &b->slots_act, &b->slots_out};
  int i;
  for (i = 0; i < TFMI_COUNT(view); i++) view[i]->rows = rows;
  for (i = 0; i < TFMI_COUNT(slots); i++) slots[i]->rows = rows * b->routing.top_k;
  b->routing.tokens = rows;
}

static tfmi_pass tfmi_engine_pass(tfm_engine *e, int32_t rows) {
  tfmi_pass p;
  memset(&p, 0, sizeof p);
  p.dev = &e->dev;
  p.net = &e->net;
  p.kv = e->kv;
  p.rows.n = rows;
  p.rows.id = e->d_told.id;
  p.rows.pos = e->d_told.pos;
  p.rows.seq = e->d_told.seq;
  p.buffers = e->buffers;
  tfmi_buffers_trim(&p.buffers, rows);
  p.probs = e->d_probs;
  p.context = e->config.context;
  p.profile = e->config.profile;
  p.cancel = &e->cancel;
  p.host_cancel = e->heap.host.cancel;
  p.tap = e->config.tap;
  p.tap_user = e->config.tap_user;
  p.tap_host = e->tap_host;
  return p;
}

static void tfmi_put_history(tfm_session *s) { /* what the device has not been told */
  tfm_engine *e = s->engine;
  size_t at = (size_t)s->slot * (size_t)e->config.context + (size_t)s->told;
  if (s->told >= s->length) return;
  e->dev.table->put(&e->dev, e->d_history + at, s->tokens + s->told,
                    (size_t)(s->length - s->told) * sizeof *s->tokens);
  s->told = s->length;
}

/* Waits; the device's first failure becomes the error sentence, and what it holds is forgotten. */
static tfm_status tfmi_engine_sync(tfm_engine *e) {
  tfm_status status = e->dev.table->sync(&e->dev);
  int32_t i;
  if (status == TFM_OK) return TFM_OK;
  e->epoch++;
  for (i = 0; i < e->config.sequences; i++) {
    tfm_session *s = &e->sessions[i];
    s->done = s->last_at = s->told = 0;
    tfmi_put_pages(s);
  }
  return tfmi_report(status, "device %s: %s", e->dev.table->name, e->dev.message);
}

/* What has run ahead is forgotten. A failure on the way there is met again by whoever needs the
   device next: it runs all tokens anew. */
static void tfmi_ahead_stop(tfm_engine *e) {
  tfm_session *s = e->ahead.session;
  e->ahead.last = NULL;
  if (!s) return;
  e->ahead.session = NULL;
  tfmi_engine_sync(e);
  tfmi_pages_shrink(s, s->length);
}

static tfm_status tfmi_engine_cancelled(tfm_engine *e) {
  __atomic_store_n(&e->cancel, 0, __ATOMIC_RELAXED);
  return tfmi_report(TFM_E_CANCELLED, "cancelled: by tfm_cancel, the cancel flag or a callback");
}

/* Puts the next rows of session s into the pass, as many as fit after `rows`; returns the new
   count. */
static int32_t tfmi_pass_fill(tfm_engine *e, const tfm_session *s, int32_t rows) {
  int32_t n = tfmi_min32(s->length - s->done, e->config.batch_rows - rows), i;
  for (i = 0; i < n; i++) {
    e->told.id[rows + i] = s->tokens[s->done + i];
    e->told.pos[rows + i] = s->done + i;
    e->told.seq[rows + i] = s->slot;
  }
  return rows + n;
}

/* Before a pass overwrites the stream: rows that may still be asked for go behind it. */
static void tfmi_put_aside(tfm_engine *e) {
  size_t bytes = (size_t)e->stream.cols * (size_t)tfmi_types[e->stream.type].block_bytes;
  int32_t i;
  for (i = 0; i < e->config.sequences; i++) {
    tfm_session *s = &e->sessions[i];
    int32_t row = s->last_row;
    if (s->last_at != s->length) s->last_at = 0;
    if (s->last_at == 0 || row >= e->rows) continue;
    s->last_row = e->rows + i;
    e->dev.table->copy(&e->dev, tfmi_rows_of(e->stream, s->last_row, 1).data,
                       tfmi_rows_of(e->stream, row, 1).data, bytes);
  }
}

/* A part of what the host has put together. */
static void tfmi_tell_device(tfm_engine *e, const void *first, const void *end) {
  const size_t at = (size_t)((const char *)first - (const char *)e->told.params);
  e->dev.table->put(&e->dev, (char *)e->d_told.params + at, first,
                    (size_t)((const char *)end - (const char *)first));
}

/* The rows that have been put together, as a pass; the device is yet to be told. */
static tfmi_pass tfmi_pass_of(tfm_engine *e, int32_t rows) {
  int32_t padded = tfmi_round_up(rows, e->dev.table->row_multiple), i;
  tfmi_pass p = tfmi_engine_pass(e, padded);
  for (i = rows; i < padded; i++) {
    e->told.id[i] = e->told.pos[i] = 0;
    e->told.seq[i] = -1;
  }
  p.rows.apart = true;
  for (i = 1; i < rows; i++) p.rows.apart &= e->told.seq[i] != e->told.seq[i - 1];
  tfmi_put_aside(e);
  return p;
}

static tfm_sampler tfmi_sampler_of(tfm_engine *e) {
  tfm_sampler sampler;
  sampler.params = e->d_told.params;
  sampler.pos = e->d_told.at;
  sampler.seq = e->d_told.slot;
  sampler.history = e->d_history;
  sampler.history_stride = e->config.context;
  sampler.work = e->d_work;
  return sampler;
}

/* An id for each of the first n rows of logits, into e->chosen: there after a sync. */
static void tfmi_choose_ids(tfm_engine *e, int32_t n) {
  const tfm_sampler sampler = tfmi_sampler_of(e);
  tfmi_mark(&e->dev, TFM_WORK_SAMPLE);
  TFMI_OP(&e->dev, sample)(&e->dev, e->chosen, NULL, tfmi_rows_of(e->logits, 0, n), &sampler);
}

/* The layers, and for the first `draws` rows, which are sequences' last ones, what follows. */
static bool tfmi_pass_compute(tfm_engine *e, tfmi_pass *p, int32_t draws) {
  tfmi_mark(&e->dev, TFM_WORK_PASS);
  if (!tfmi_forward(p)) return false;
  if (draws == 0) return true;
  tfmi_head(p, tfmi_rows_of(e->logits, 0, draws), tfmi_rows_of(p->buffers.norm1, 0, draws),
            tfmi_rows_of(p->buffers.out, 0, draws));
  tfmi_choose_ids(e, draws);
  return true;
}

/* The same as a recorded graph, where the device keeps some. False: cancelled. */
static bool tfmi_pass_run(tfm_engine *e, tfmi_pass *p, int32_t draws) {
  const tfm_backend *table = e->dev.table;
  uint64_t key = (uint64_t)p->rows.n | (uint64_t)p->rows.apart << 32 | (uint64_t)draws << 33;
  bool plain = !p->tap && !p->profile && !e->dev.override_mask, recording, done;
  if (tfmi_cancelled(p)) return false;
  tfmi_mark(&e->dev, draws ? TFM_WORK_DECODE : TFM_WORK_PASS);
  done = plain && table->replay(&e->dev, key);
  if (!done) {
    recording = plain && table->record(&e->dev, key, true);
    if (recording) p->cancel = NULL, p->host_cancel = NULL; /* half a graph is none */
    done = tfmi_pass_compute(e, p, draws);
    if (recording) table->record(&e->dev, key, false);
  }
  tfmi_mark(&e->dev, TFM_WORK_NONE);
  return done;
}

/* Runs the rows that have been put together. False: cancelled. */
static bool tfmi_engine_run(tfm_engine *e, tfmi_pass *p, int32_t rows) {
  *p = tfmi_pass_of(e, rows);
  tfmi_tell_device(e, e->told.id, e->told.seq + p->rows.n);
  return tfmi_pass_run(e, p, 0);
}

typedef struct tfmi_advance_job { /* where tfmi_advance is */
  tfm_session *const *sessions;
  size_t n;
  float *logits;      /* [tokens to run, V] for tfm_eval, host memory; NULL: not wanted */
  const char *phase;  /* for progress; NULL: too short to tell */
} tfmi_advance_job;

/* Logits of the first `rows` rows of a pass, to the caller's memory. False: cancelled. */
static bool tfmi_eval_rows(tfm_engine *e, tfmi_pass *p, int32_t rows, float *out) {
  size_t row_bytes = (size_t)e->logits.cols * sizeof(float);
  int32_t row;
  e->epoch++;
  for (row = 0; row < rows; row += e->logits.rows) {
    int32_t n = tfmi_min32(e->logits.rows, rows - row);
    if (tfmi_cancelled(p)) return false;
    tfmi_head(p, tfmi_rows_of(e->logits, 0, n), tfmi_rows_of(p->buffers.norm1, row, n),
              tfmi_rows_of(p->buffers.out, row, n));
    e->dev.table->get(&e->dev, out + (size_t)row * (size_t)e->logits.cols, e->logits.data,
                      (size_t)n * row_bytes);
  }
  return true;
}

/* One pass over the sessions that have tokens to run. *still: whether some are left for another. */
static tfm_status tfmi_advance_once(tfm_engine *e, tfmi_advance_job *job, bool *still) {
  tfmi_pass pass;
  int32_t rows = 0;
  size_t i;
  *still = false;
  for (i = 0; i < job->n && rows < e->config.batch_rows; i++)
    rows = tfmi_pass_fill(e, job->sessions[i], rows);
  if (rows == 0) return TFM_OK;
  if (!tfmi_engine_run(e, &pass, rows)) return tfmi_engine_cancelled(e);
  if (job->logits) {
    if (!tfmi_eval_rows(e, &pass, rows, job->logits)) return tfmi_engine_cancelled(e);
    job->logits += (size_t)rows * (size_t)e->logits.cols;
  }
  rows = 0;
  for (i = 0; i < job->n; i++) {
    tfm_session *s = job->sessions[i];
    int32_t n = tfmi_min32(s->length - s->done, e->config.batch_rows - rows);
    rows += n;
    s->done += n;
    if (s->done < s->length) *still = true;
    if (n == 0 || s->done < s->length) continue;
    s->last_at = s->length;
    s->last_row = rows - 1;
  }
  return TFM_OK;
}

/* Runs whatever the sessions have not run yet; the caller syncs. On failure their `done` tells how
   far it got. */
static tfm_status tfmi_advance(tfm_engine *e, tfmi_advance_job *job) {
  int64_t total = 0, left;
  bool still = true;
  size_t i;
  for (i = 0; i < job->n; i++) total += job->sessions[i]->length - job->sessions[i]->done;
  while (still) {
    tfm_status status = tfmi_advance_once(e, job, &still);
    if (status != TFM_OK) return status;
    for (left = 0, i = 0; i < job->n; i++)
      left += job->sessions[i]->length - job->sessions[i]->done;
    if (job->phase &&
        !tfmi_goes_on(&e->heap.host, job->phase, total ? 1 - (double)left / (double)total : 1))
      return tfmi_engine_cancelled(e);
  }
  return TFM_OK;
}

/* The engine's logits are now those of these sessions, after all their tokens. */
static void tfmi_logits_are_of(tfm_engine *e, tfm_session *const *sessions, size_t n) {
  size_t i;
  e->epoch++;
  for (i = 0; i < n; i++) {
    sessions[i]->logits_row = (int32_t)i;
    sessions[i]->logits_at = sessions[i]->length;
    sessions[i]->logits_epoch = e->epoch;
  }
}

/* Logits of n sessions, each after all its tokens, into rows 0 .. n-1 of the engine's; nothing runs
   ahead, and the caller syncs. Leaves rows, positions and slots of the sessions on the device, for
   the sampler. */
static tfm_status tfmi_logits_of(tfm_engine *e, tfm_session *const *sessions, size_t n) {
  tfmi_advance_job job = {sessions, n, NULL, NULL};
  tfm_mat x = tfmi_rows_of(e->picked, 0, (int32_t)n);
  tfmi_pass p;
  size_t i;
  for (i = 0; i < n; i++) { /* a row that is not there is computed again from the last token */
    tfm_session *s = sessions[i];
    if (s->done == s->length && s->last_at != s->length) s->done--;
  }
  if (tfmi_advance(e, &job) != TFM_OK) return tfmi_error.status;
  for (i = 0; i < n; i++) {
    e->told.pick[i] = sessions[i]->last_row;
    e->told.at[i] = sessions[i]->length;
    e->told.slot[i] = sessions[i]->slot;
  }
  tfmi_logits_are_of(e, sessions, n);
  tfmi_tell_device(e, e->told.pick, e->told.slot + n);
  TFMI_OP(&e->dev, gather)(&e->dev, x, e->stream, e->d_told.pick);
  p = tfmi_engine_pass(e, (int32_t)n);
  tfmi_head(&p, tfmi_rows_of(e->logits, 0, (int32_t)n), p.buffers.norm1, x);
  return TFM_OK;
}

/* =================================================================================================
   >>session   sequences: feeding, choosing, text
   ============================================================================================== */

/* ---- Opening and freeing ---- */

TFM_API tfm_session *tfm_session_open(tfm_engine *engine) {
  int32_t i;
  if (!engine) {
    tfmi_null_object("tfm_session_open");
    return NULL;
  }
  for (i = 0; i < engine->config.sequences; i++) {
    tfm_session *s = &engine->sessions[i];
    if (s->open) continue;
    s->open = true;
    return s;
  }
  tfmi_report(TFM_E_FULL,
              "engine: all %d sequences are open; free one or create the engine with more",
              engine->config.sequences);
  return NULL;
}

TFM_API tfm_session *tfm_session_create(const tfm_model *model, const tfm_engine_config *config) {
  tfm_engine *engine = tfm_engine_create(model, config);
  tfm_session *s = engine ? tfm_session_open(engine) : NULL;
  if (s) s->owns_engine = true;
  return s;
}

/* The slot as it was before it was opened. */
static void tfmi_session_reset(tfm_session *s) {
  tfm_engine *engine = s->engine;
  int32_t slot = s->slot, *tokens = s->tokens;
  tfmi_ahead_stop(engine);
  tfmi_pages_shrink(s, 0);
  memset(s, 0, sizeof *s);
  s->engine = engine;
  s->slot = slot;
  s->tokens = tokens;
}

TFM_API void tfm_session_free(tfm_session *session) {
  if (!session) return;
  if (session->owns_engine) tfm_engine_free(session->engine);
  else tfmi_session_reset(session);
}

/* ---- Feeding ---- */

static tfm_status tfmi_full(const tfm_session *s, size_t more) {
  return tfmi_report(
      TFM_E_FULL,
      "context: %d tokens so far and %llu more do not fit into %d; rewind the session or "
      "create its engine with a longer context",
      s->length, (unsigned long long)more, s->engine->config.context);
}

static tfm_status tfmi_out_of_pages(const tfm_session *s) {
  return tfmi_report(TFM_E_FULL,
                     "cache: all %d pages are taken; free or rewind a session, or create the "
                     "engine with more pages",
                     s->engine->config.pages);
}

static tfm_status tfmi_check_ids(const tfm_session *s, const int32_t *ids, size_t n) {
  size_t i;
  int32_t vocabulary = s->engine->model->net.vocabulary;
  if (!ids && n)
    return tfmi_report(TFM_E_ARG, "ids is NULL; expected %llu token ids", (unsigned long long)n);
  for (i = 0; i < n; i++)
    if (ids[i] < 0 || ids[i] >= vocabulary)
      return tfmi_report(TFM_E_ARG, "token id %d at %llu; the model's ids are 0 to %d", ids[i],
                         (unsigned long long)i, vocabulary - 1);
  return TFM_OK;
}

/* Forgets the tokens from n on, wherever they came from. */
static void tfmi_session_cut(tfm_session *s, int32_t n) {
  tfmi_ahead_stop(s->engine);
  s->length = n;
  s->done = tfmi_min32(s->done, n);
  if (s->last_at > n) s->last_at = 0;
  if (s->logits_at > n) s->logits_epoch = 0;
  s->chosen = false;
  tfmi_pages_shrink(s, n);
}

/* Appends ids, which have been checked and may be in place already; they take pages at once, so
   that running them cannot find the cache full. */
static tfm_status tfmi_session_append(tfm_session *s, const int32_t *ids, size_t n) {
  tfm_engine *e = s->engine;
  int32_t first = s->length;
  if (n > (size_t)(e->config.context - first)) return tfmi_full(s, n);
  if (n == 0) return TFM_OK;
  if (!tfmi_pages_grow(s, first + (int32_t)n)) return tfmi_out_of_pages(s);
  memmove(s->tokens + first, ids, n * sizeof *ids);
  s->length += (int32_t)n;
  if (!e->ahead.session) s->told = tfmi_min32(s->told, first);
  else if (s->told == first) s->told = s->length; /* the device has chosen it */
  return TFM_OK;
}

/* Appends and runs n checked ids; all or nothing. */
static tfm_status tfmi_feed_ids(tfm_session *s, const int32_t *ids, size_t n, float *logits) {
  tfm_engine *e = s->engine;
  int32_t before = s->length;
  bool chosen = s->chosen;
  double start = tfmi_seconds();
  tfmi_advance_job job;
  tfm_status status = TFM_OK;
  job.sessions = &s;
  job.n = 1;
  job.logits = NULL;
  job.phase = NULL;
  tfmi_ahead_stop(e);
  if (logits) status = tfmi_advance(e, &job); /* so that the first logits are those of ids[0] */
  if (status == TFM_OK) status = tfmi_session_append(s, ids, n);
  if (status != TFM_OK) return status;
  job.logits = logits;
  job.phase = "prompt";
  status = tfmi_advance(e, &job);
  if (status == TFM_OK) status = tfmi_engine_sync(e);
  if (status != TFM_OK) {
    tfmi_session_cut(s, before);
    s->chosen = chosen;
    return status;
  }
  s->chosen = false;
  e->fed = start;
  e->stats.prompt_tokens += n;
  e->stats.prompt_seconds += tfmi_seconds() - start;
  return TFM_OK;
}

/* The decoder has to have seen the n tokens that were fed last; their text is not wanted. A BOS
   that begins the session is no text: what follows it is still the beginning. */
static void tfmi_decode_past(tfm_session *s, size_t n) {
  int32_t i = s->length - (int32_t)n;
  s->text[0] = 0;
  if (!s->tokenizer) return;
  if (i == 0 && n && s->tokens[0] == tfmi_tokenizer_start_id(s->tokenizer)) i = 1;
  for (; i < s->length; i++)
    tfm_decode_next(s->tokenizer, &s->decoder, s->tokens[i], s->text, sizeof s->text);
  s->text[0] = 0;
}

TFM_API tfm_status tfm_feed(tfm_session *session, const int32_t *ids, size_t n) {
  tfm_status status;
  if (!session) return tfmi_null_object("tfm_feed");
  status = tfmi_check_ids(session, ids, n);
  if (status == TFM_OK) status = tfmi_feed_ids(session, ids, n, NULL);
  if (status == TFM_OK) tfmi_decode_past(session, n);
  return status;
}

TFM_API tfm_status tfm_eval(tfm_session *session, const int32_t *ids, size_t n, float *logits) {
  tfm_status status;
  if (!session) return tfmi_null_object("tfm_eval");
  if (!logits && n)
    return tfmi_report(TFM_E_ARG, "tfm_eval: logits is NULL; expected [n, vocabulary]");
  status = tfmi_check_ids(session, ids, n);
  if (status == TFM_OK) status = tfmi_feed_ids(session, ids, n, logits);
  if (status == TFM_OK) tfmi_decode_past(session, n);
  return status;
}

static tfm_status tfmi_attach(tfm_session *s, const tfm_tokenizer *t) {
  size_t bound = tfm_decode_bound(t);
  if (bound > sizeof s->text)
    return tfmi_report(TFM_E_UNSUPPORTED,
                       "tokenizer: a token of up to %llu bytes; sessions hand out at "
                       "most %d",
                       (unsigned long long)bound, TFMI_TEXT_MAX);
  s->tokenizer = t;
  s->decoder.started = s->length > 0;
  return TFM_OK;
}

TFM_API tfm_status tfm_feed_text(tfm_session *session, const tfm_tokenizer *tokenizer,
                                 const char *text) {
  unsigned flags;
  int32_t *ids, room;
  int64_t n;
  tfm_status status;
  if (!session || !tokenizer) return tfmi_null_object("tfm_feed_text");
  if (!text) return tfmi_report(TFM_E_ARG, "tfm_feed_text: text is NULL; \"\" starts from BOS");
  if (session->tokenizer != tokenizer && (status = tfmi_attach(session, tokenizer)) != TFM_OK)
    return status;
  flags = session->length == 0 ? (unsigned)TFM_ENCODE_SPECIAL : 0;
  ids = session->tokens + session->length; /* encoded where they will stand */
  room = session->engine->config.context - session->length;
  n = tfm_encode(tokenizer, text, strlen(text), flags, ids, (size_t)room);
  if (n < 0) return (tfm_status)n;
  if (flags) n -= tokenizer->after_count; /* an EOS would end the text before it begins */
  if (n == 0 && session->length == 0) {
    ids[0] = tfmi_tokenizer_start_id(tokenizer);
    if (ids[0] < 0) ids[0] = session->engine->model->bos;
    if (ids[0] < 0)
      return tfmi_report(TFM_E_ARG, "empty prompt: neither tokenizer nor model has a BOS "
                                    "to start from; give some text");
    n = 1;
  }
  if (n > room) return tfmi_full(session, (size_t)n);
  return tfm_feed(session, ids, (size_t)n);
}

TFM_API tfm_status tfm_session_rewind(tfm_session *session, size_t n) {
  if (!session) return tfmi_null_object("tfm_session_rewind");
  if (n > (size_t)session->length)
    return tfmi_report(TFM_E_ARG, "tfm_session_rewind: to %llu tokens; the session has %d",
                       (unsigned long long)n, session->length);
  if (n == (size_t)session->length) return TFM_OK;
  tfmi_session_cut(session, (int32_t)n);
  memset(&session->decoder, 0, sizeof session->decoder);
  tfmi_decode_past(session, n); /* the new end may lie inside a character */
  return TFM_OK;
}

/* ---- Choosing ---- */

static bool tfmi_in(float value, float low, float high) { return value >= low && value <= high; }

static tfm_status tfmi_check_sampling(const tfm_sampling *p) {
  if (!tfmi_in(p->temperature, 0, FLT_MAX))
    return tfmi_report(TFM_E_ARG, "tfm_sampling.temperature is %g; expected 0 (greedy) or more",
                       (double)p->temperature);
  if (p->top_k < 0)
    return tfmi_report(TFM_E_ARG, "tfm_sampling.top_k is %d; expected 0 (off) or more", p->top_k);
  if (!tfmi_in(p->top_p, 0, 1))
    return tfmi_report(TFM_E_ARG, "tfm_sampling.top_p is %g; expected 0 (off) to 1",
                       (double)p->top_p);
  if (!tfmi_in(p->min_p, 0, 1))
    return tfmi_report(TFM_E_ARG, "tfm_sampling.min_p is %g; expected 0 (off) to 1",
                       (double)p->min_p);
  if (!tfmi_in(p->repetition_penalty, 0, FLT_MAX))
    return tfmi_report(TFM_E_ARG, "tfm_sampling.repetition_penalty is %g; expected 0 (off) or more",
                       (double)p->repetition_penalty);
  return TFM_OK;
}

static tfm_status tfmi_check_batch(tfm_session *const *sessions, size_t n,
                                   const tfm_sampling *sampling) {
  tfm_engine *e;
  size_t i;
  if (!sessions || n == 0 || !sessions[0]) return tfmi_null_object("tfm_next_batch");
  e = sessions[0]->engine;
  e->calls++;
  for (i = 0; i < n; i++) {
    tfm_session *s = sessions[i];
    if (!s) return tfmi_null_object("tfm_next_batch");
    if (s->engine != e)
      return tfmi_report(TFM_E_ARG, "tfm_next_batch: session %llu belongs to another engine",
                         (unsigned long long)i);
    if (s->call == e->calls)
      return tfmi_report(TFM_E_ARG, "tfm_next_batch: session %llu is there twice",
                         (unsigned long long)i);
    s->call = e->calls;
    if (s->length == 0)
      return tfmi_report(TFM_E_STATE, "tfm_next: the session is empty; feed it something first");
    if (sampling && tfmi_check_sampling(&sampling[i]) != TFM_OK) return TFM_E_ARG;
  }
  return TFM_OK;
}

/* How to choose for these sessions; of a penalty the device needs the history, too. */
static void tfmi_put_sampling(tfm_engine *e, tfm_session *const *sessions, size_t n,
                              const tfm_sampling *sampling) {
  size_t i;
  for (i = 0; sampling && i < n; i++)
    if (sampling[i].repetition_penalty != 0) tfmi_put_history(sessions[i]);
  memset(e->told.params, 0, n * sizeof *e->told.params);
  if (sampling) memcpy(e->told.params, sampling, n * sizeof *sampling);
}

/* Samples rows 0 .. n-1 of the logits that tfmi_logits_of has just computed into e->chosen. */
static tfm_status tfmi_sample(tfm_engine *e, tfm_session *const *sessions, size_t n,
                              const tfm_sampling *sampling) {
  tfmi_put_sampling(e, sessions, n, sampling);
  tfmi_tell_device(e, e->told.params, e->told.params + n);
  tfmi_choose_ids(e, (int32_t)n);
  tfmi_mark(&e->dev, TFM_WORK_NONE);
  return tfmi_engine_sync(e);
}

/* ---- A step ----
   Where each session has one token to run, which is the usual thing, the pass, the head and the
   choice are one graph for the device, and one put tells it all. */

static bool tfmi_is_step(const tfm_engine *e, tfm_session *const *sessions, size_t n) {
  size_t i;
  for (i = 0; i < n; i++)
    if (sessions[i]->done != sessions[i]->length - 1) return false;
  return n <= (size_t)e->config.batch_rows;
}

/* The pass of a step; tells the device all about it. */
static tfmi_pass tfmi_step_pass(tfm_engine *e, tfm_session *const *sessions, size_t n,
                                const tfm_sampling *sampling) {
  tfmi_pass p;
  size_t i;
  for (i = 0; i < n; i++) {
    tfmi_pass_fill(e, sessions[i], (int32_t)i);
    e->told.at[i] = sessions[i]->length;
    e->told.slot[i] = sessions[i]->slot;
  }
  tfmi_put_sampling(e, sessions, n, sampling);
  p = tfmi_pass_of(e, (int32_t)n);
  tfmi_tell_device(e, e->told.params, e->told.seq + p.rows.n);
  return p;
}

/* The next id of each session, into e->chosen. */
static tfm_status tfmi_step_run(tfm_engine *e, tfm_session *const *sessions, size_t n,
                                const tfm_sampling *sampling) {
  tfmi_pass p = tfmi_step_pass(e, sessions, n, sampling);
  size_t i;
  if (!tfmi_pass_run(e, &p, (int32_t)n)) return tfmi_engine_cancelled(e);
  for (i = 0; i < n; i++) {
    sessions[i]->done = sessions[i]->last_at = sessions[i]->length;
    sessions[i]->last_row = (int32_t)i;
  }
  tfmi_logits_are_of(e, sessions, n);
  return tfmi_engine_sync(e);
}

/* ---- Running ahead ----
   A device with `decode` chooses tokens while the application still looks at earlier ones. It is
   asked for them when one session, alone, is asked for a token twice in a row in the same way; from
   then on two batches of steps are in flight, and tfm_next waits for an id only. Whatever else
   happens to the engine stops it first, and the session is as if nothing had run ahead: its `done`
   is what its tokens tell. */

static bool tfmi_same_sampling(const tfm_sampling *a, const tfm_sampling *b) {
  return a->temperature == b->temperature && a->top_k == b->top_k && a->top_p == b->top_p &&
         a->min_p == b->min_p && a->repetition_penalty == b->repetition_penalty &&
         a->seed == b->seed && a->sequence == b->sequence;
}

/* Asks for more steps, as far as context and pages go. False: none. */
static bool tfmi_ahead_queue(tfm_engine *e, tfm_session *s) {
  tfmi_ahead *a = &e->ahead;
  int32_t begin = s->length + a->queued - a->taken, slot, i;
  int32_t steps = tfmi_min32(TFMI_STEPS_AHEAD, e->config.context - begin);
  tfm_run_ahead run;
  if (steps <= 0 || !tfmi_pages_grow(s, begin + steps)) return false;
  slot = a->queued % (2 * TFMI_STEPS_AHEAD);
  for (i = 0; i < steps; i++) __atomic_store_n(&a->ids[slot + i], -1, __ATOMIC_RELAXED);
  run.net = &e->net;
  run.kv = e->kv;
  run.rows = tfmi_engine_pass(e, 1).rows;
  run.sampler = tfmi_sampler_of(e);
  run.ids = a->ids + slot;
  tfmi_mark(&e->dev, TFM_WORK_DECODE);
  if (e->dev.table->decode(&e->dev, &run, steps)) a->queued += steps;
  else steps = 0;
  tfmi_mark(&e->dev, TFM_WORK_NONE);
  return steps > 0;
}

/* Puts the session's last token, which has not been run, where the device goes on from. */
static bool tfmi_ahead_start(tfm_engine *e, tfm_session *s, const tfm_sampling *how) {
  tfmi_step_pass(e, &s, 1, how);
  e->ahead.queued = e->ahead.taken = 0;
  return tfmi_ahead_queue(e, s);
}

/* Whether the next token of these sessions runs ahead, or can be made to; else nothing does. */
static bool tfmi_ahead_serves(tfm_engine *e, tfm_session *const *sessions, size_t n,
                              const tfm_sampling *sampling) {
  tfmi_ahead *a = &e->ahead;
  tfm_session *s = sessions[0];
  tfm_sampling how;
  bool again;
  if (!a->ids) return false;
  memset(&how, 0, sizeof how);
  if (sampling) how = sampling[0];
  again = n == 1 && a->last == s && tfmi_same_sampling(&how, &a->how);
  if (again && a->session == s) return true;
  tfmi_ahead_stop(e);
  if (n != 1) return false;
  a->last = s;
  a->how = how;
  if (!again || !s->chosen || s->done != s->length - 1) return false;
  if (!tfmi_ahead_start(e, s, &how)) return false;
  a->session = s;
  return true;
}

/* Waits for a step that has been asked for: its id, or -1 when the device has failed. */
static int32_t tfmi_ahead_wait(tfm_engine *e, const int32_t *id) {
  double start = tfmi_seconds();
  int32_t value, i;
  for (i = 1; (value = __atomic_load_n(id, __ATOMIC_ACQUIRE)) < 0; i++) {
    tfmi_pause();
    if (e->dev.status != TFM_OK) break;
    if (i % 4096 == 0 && tfmi_seconds() - start > 2) break; /* sync waits as long as it takes */
  }
  if (value >= 0) return value;
  if (tfmi_engine_sync(e) != TFM_OK) return -1;
  value = __atomic_load_n(id, __ATOMIC_ACQUIRE);
  if (value < 0) tfmi_report(TFM_E_DEVICE, "device %s: no token came back", e->dev.table->name);
  return value;
}

/* The next token of what runs ahead, into e->chosen. */
static tfm_status tfmi_ahead_take(tfm_engine *e) {
  tfmi_ahead *a = &e->ahead;
  tfm_session *s = a->session;
  tfmi_pass pass = tfmi_engine_pass(e, 1);
  if (tfmi_cancelled(&pass)) {
    tfmi_ahead_stop(e);
    return tfmi_engine_cancelled(e);
  }
  if (a->queued - a->taken <= TFMI_STEPS_AHEAD && a->queued % TFMI_STEPS_AHEAD == 0)
    tfmi_ahead_queue(e, s);
  e->chosen[0] = a->queued > a->taken
                     ? tfmi_ahead_wait(e, &a->ids[a->taken % (2 * TFMI_STEPS_AHEAD)]) : -2;
  if (e->chosen[0] == -1) {
    a->session = NULL;
    tfmi_pages_shrink(s, s->length);
    return tfmi_error.status;
  }
  if (e->chosen[0] < 0) { /* the context or the pages are used up: the way that says so */
    tfmi_ahead_stop(e);
    return TFM_E_FULL;
  }
  a->taken++;
  s->done = s->length;
  s->last_at = 0;
  s->logits_epoch = 0;
  return TFM_OK;
}

static bool tfmi_is_end(const tfm_model *m, int32_t id) {
  int32_t i;
  for (i = 0; i < m->end_count; i++)
    if (m->end[i] == id) return true;
  return false;
}

/* Appends a chosen token, or says why not: what tfm_next returns. */
static int32_t tfmi_accept(tfm_session *s, int32_t id) {
  tfm_status status;
  s->text[0] = 0;
  s->chosen = false;
  if (tfmi_is_end(s->engine->model, id)) {
    if (s->tokenizer) tfm_decode_next(s->tokenizer, &s->decoder, -1, s->text, sizeof s->text);
    return TFM_END;
  }
  status = tfmi_session_append(s, &id, 1);
  if (status != TFM_OK) return status;
  s->chosen = true;
  if (s->tokenizer) tfm_decode_next(s->tokenizer, &s->decoder, id, s->text, sizeof s->text);
  return id;
}

/* The next id of each session, into e->chosen. */
static tfm_status tfmi_choose_next(tfm_engine *e, tfm_session *const *sessions, size_t n,
                                   const tfm_sampling *sampling) {
  tfm_status status = TFM_E_FULL;
  if (tfmi_ahead_serves(e, sessions, n, sampling)) status = tfmi_ahead_take(e);
  if (status != TFM_E_FULL) return status; /* else nothing runs ahead */
  if (tfmi_is_step(e, sessions, n)) return tfmi_step_run(e, sessions, n, sampling);
  status = tfmi_logits_of(e, sessions, n);
  return status == TFM_OK ? tfmi_sample(e, sessions, n, sampling) : status;
}

static void tfmi_time_call(tfm_engine *e, double start, double end) {
  tfm_stats *s = &e->stats;
  s->generate_seconds += s->last_seconds = end - start;
  if (s->last_seconds > s->slowest_seconds) s->slowest_seconds = s->last_seconds;
  if (e->fed > 0) s->first_token_seconds = end - e->fed;
  e->fed = 0;
}

TFM_API tfm_status tfm_next_batch(tfm_session *const *sessions, size_t n,
                                  const tfm_sampling *sampling, int32_t *ids) {
  tfm_status status = tfmi_check_batch(sessions, n, sampling);
  tfm_engine *e;
  double start = tfmi_seconds();
  size_t i;
  if (status != TFM_OK) return status;
  if (!ids) return tfmi_report(TFM_E_ARG, "tfm_next_batch: ids is NULL; expected room for %llu",
                               (unsigned long long)n);
  e = sessions[0]->engine;
  status = tfmi_choose_next(e, sessions, n, sampling);
  if (status != TFM_OK) return status;
  for (i = 0; i < n; i++) {
    ids[i] = tfmi_accept(sessions[i], e->chosen[i]);
    if (ids[i] >= 0) e->stats.generated_tokens++;
    else if (e->ahead.session) tfmi_ahead_stop(e);
  }
  tfmi_time_call(e, start, tfmi_seconds());
  return TFM_OK;
}

TFM_API int32_t tfm_next(tfm_session *session, const tfm_sampling *sampling) {
  int32_t id = 0;
  tfm_status status;
  if (!session) return tfmi_null_object("tfm_next");
  status = tfm_next_batch(&session, 1, sampling, &id);
  return status == TFM_OK ? id : status;
}

TFM_API const char *tfm_text(tfm_session *session) {
  if (!session) tfmi_null_object("tfm_text");
  return session ? session->text : "";
}

/* ---- Looking at the logits ---- */

/* Makes row *row of the engine's logits those that the last token was chosen from, or, when it was
   fed, those after it. */
static tfm_status tfmi_current_row(tfm_session *s, int32_t *row) {
  int32_t length = s->length, wanted = s->chosen ? length - 1 : length;
  tfm_status status = TFM_OK;
  *row = 0;
  tfmi_ahead_stop(s->engine);
  if (length == 0)
    return tfmi_report(TFM_E_STATE, "logits: the session is empty; feed it something first");
  if (s->logits_epoch != s->engine->epoch || s->logits_at != wanted) {
    s->length = wanted; /* for a moment the chosen token is not there */
    s->done = tfmi_min32(s->done, wanted);
    status = tfmi_logits_of(s->engine, &s, 1);
    if (status == TFM_OK) status = tfmi_engine_sync(s->engine);
    s->length = length;
  }
  *row = s->logits_row;
  return status;
}

TFM_API const float *tfm_logits(tfm_session *session) {
  tfm_engine *e;
  int32_t row;
  if (!session) {
    tfmi_null_object("tfm_logits");
    return NULL;
  }
  if (tfmi_current_row(session, &row) != TFM_OK) return NULL;
  e = session->engine;
  e->dev.table->get(&e->dev, e->host_logits, tfmi_rows_of(e->logits, row, 1).data,
                    (size_t)e->logits.cols * sizeof(float));
  return tfmi_engine_sync(e) == TFM_OK ? e->host_logits : NULL;
}

TFM_API float tfm_logprob(tfm_session *session, int32_t id) {
  const float *logits = tfm_logits(session);
  if (!logits || tfmi_check_ids(session, &id, 1) != TFM_OK) return NAN;
  return logits[id] - tfmi_log_sum_exp(logits, session->engine->logits.cols);
}

TFM_API int32_t tfm_top(tfm_session *session, int32_t k, int32_t *ids, float *logprobs) {
  tfm_engine *e;
  int32_t row, *d_ids;
  float *d_logprobs;
  tfm_status status;
  if (!session) return tfmi_null_object("tfm_top");
  if (k < 0) return tfmi_report(TFM_E_ARG, "tfm_top: k is %d; expected 0 or more", k);
  status = tfmi_current_row(session, &row);
  if (status != TFM_OK) return status;
  e = session->engine;
  k = tfmi_min32(k, e->logits.cols);
  if (k == 0) return 0;
  d_ids = (int32_t *)(void *)e->d_work; /* the sampler's scratch holds both results */
  d_logprobs = e->d_work + e->logits.cols;
  TFMI_OP(&e->dev, top)(&e->dev, d_ids, d_logprobs, tfmi_rows_of(e->logits, row, 1), k);
  if (ids) e->dev.table->get(&e->dev, ids, d_ids, (size_t)k * sizeof *ids);
  if (logprobs) e->dev.table->get(&e->dev, logprobs, d_logprobs, (size_t)k * sizeof *logprobs);
  status = tfmi_engine_sync(e);
  return status == TFM_OK ? k : status;
}

/* ---- The rest ---- */

TFM_API const int32_t *tfm_session_tokens(const tfm_session *session, size_t *n) {
  if (!session) tfmi_null_object("tfm_session_tokens");
  if (n) *n = session ? (size_t)session->length : 0;
  return session ? session->tokens : NULL;
}

TFM_API void tfm_cancel(tfm_session *session) {
  if (session) __atomic_store_n(&session->engine->cancel, 1, __ATOMIC_RELAXED);
}

TFM_API tfm_status tfm_session_stats(const tfm_session *session, tfm_stats *out) {
  tfm_engine *e;
  tfm_usage *u;
  if (!session || !out) return tfmi_null_object("tfm_session_stats");
  e = session->engine;
  u = &e->dev.usage;
  if (e->dev.table->usage) e->dev.table->usage(&e->dev);
  *out = e->stats;
  out->seconds = tfmi_seconds() - e->born;
  memcpy(out->work_seconds, u->seconds, sizeof out->work_seconds);
  out->device_bytes = u->bytes;
  out->device_peak_bytes = u->peak_bytes;
  out->device_total_bytes = u->total_bytes;
  out->device_free_bytes = u->free_bytes;
  out->memory_bytes = e->heap.used;
  out->peak_bytes = e->heap.peak;
  out->pages = (uint64_t)e->config.pages;
  out->pages_used = (uint64_t)(e->config.pages - e->free_count);
  out->threads = e->dev.threads;
  return TFM_OK;
}

/* =================================================================================================
   >>generate   prompt in, text out
   =================================================================================================

   Text goes out as soon as it can no longer become part of a stop string: what is held back is the
   longest end of the text so far that is the beginning of some stop string. */

typedef struct tfmi_output {
  const tfm_generate_config *config;
  char *held;  /* [TFMI_TEXT_MAX + TFMI_STOP_MAX] */
  size_t n;    /* bytes held */
  bool ended;  /* by a stop string or by on_text */
} tfmi_output;

static void tfmi_output_emit(tfmi_output *o, size_t bytes) {
  if (bytes && o->config->on_text && !o->config->on_text(o->config->user, o->held, bytes))
    o->ended = true;
  o->n -= bytes;
  memmove(o->held, o->held + bytes, o->n);
}

/* How far from its beginning the held text can go out: up to the first stop string (*found), else
   up to where one may begin. */
static size_t tfmi_releasable(const tfmi_output *o, bool *found) {
  size_t at, i;
  *found = false;
  for (at = 0; at < o->n; at++)
    for (i = 0; i < o->config->stop_count; i++) {
      const char *stop = o->config->stop[i];
      size_t length = strlen(stop), rest = o->n - at;
      if (memcmp(o->held + at, stop, rest < length ? rest : length) != 0) continue;
      *found = rest >= length;
      return at;
    }
  return o->n;
}

static void tfmi_output_text(tfmi_output *o, const char *text) {
  size_t n = strlen(text), out;
  bool found;
  memcpy(o->held + o->n, text, n);
  o->n += n;
  out = tfmi_releasable(o, &found);
  tfmi_output_emit(o, out);
  if (found) o->ended = true;
}

static tfm_status tfmi_check_stops(const tfm_generate_config *c) {
  size_t i;
  if (c->stop_count && !c->stop) return tfmi_report(TFM_E_ARG, "tfm_generate_config.stop is NULL");
  for (i = 0; i < c->stop_count; i++) {
    size_t n = c->stop[i] ? strlen(c->stop[i]) : 0;
    if (n == 0 || n >= TFMI_STOP_MAX)
      return tfmi_report(TFM_E_ARG, "stop string %llu has %llu bytes; expected 1 to %d",
                         (unsigned long long)i, (unsigned long long)n, TFMI_STOP_MAX - 1);
  }
  if (c->max_tokens < 0)
    return tfmi_report(TFM_E_ARG,
                       "tfm_generate_config.max_tokens is %d; expected 0 (no limit) or more",
                       c->max_tokens);
  return tfmi_check_sampling(&c->sampling);
}

TFM_API int64_t tfm_generate(tfm_session *session, const tfm_tokenizer *tokenizer,
                             const char *prompt, const tfm_generate_config *config) {
  static const tfm_generate_config defaults = {{0, 0, 0, 0, 0, 0, 0}, 0, NULL, 0, NULL, NULL};
  tfmi_output o;
  int64_t tokens = 0;
  int32_t id = 0;
  tfm_status status;
  o.config = config ? config : &defaults;
  o.n = 0;
  o.ended = false;
  if (!session) return tfmi_null_object("tfm_generate");
  o.held = session->engine->held;
  status = tfmi_check_stops(o.config);
  if (status == TFM_OK) status = tfm_feed_text(session, tokenizer, prompt);
  if (status != TFM_OK) return status;
  while (!o.ended && (o.config->max_tokens == 0 || tokens < o.config->max_tokens)) {
    id = tfm_next(session, &o.config->sampling);
    if (id < 0 && id != TFM_END) break;
    tfmi_output_text(&o, session->text);
    if (id == TFM_END) break;
    tokens++;
  }
  if (!o.ended) tfmi_output_emit(&o, o.n); /* what was held back never became a stop string */
  return id >= 0 || id == TFM_END || id == TFM_E_FULL ? tokens : id;
}

/* =================================================================================================
   >>convert   a model's files written again: Hugging Face folders, GGUF
   =================================================================================================

   A conversion is a load that stops after its first walk: by then everything has been checked, and
   each tensor that the network asked for knows what it is of which layer. That, and not its name,
   decides what it is called in the other format; so families need nothing here.

   Rows are converted into a chunk by all threads and written behind one another. On the way a
   matrix may be turned (GPT-2's are [in, out] in Hugging Face's files only), the rows of q and k
   brought from halves to pairs or back (see tfm_rope), and 1 added to norms that GGUF stores so.
   Experts' matrices, a tensor each in folders, are one behind the other in GGUF's.

   Whatever can fail but the disk fails before the first byte is written, save that the format has
   no way to tell the model: that is found by reading again what was written, which then goes. Files
   get their names when they are whole (tfmi_out_file), and never the name of what is read. The
   vocabulary of a GGUF file is written from the tokenizer that was loaded, whatever kind of file
   that came from. */

#if TFMI_COMPILES_COLD
#pragma GCC push_options
#pragma GCC optimize("O1")
#endif

/* A number of JSON whatever the locale. transformers tells reals from whole ones by their point. */
static void tfmi_out_number(tfmi_out *o, double value, bool whole) {
  char text[40], *comma;
  snprintf(text, sizeof text, "%.17g", value);
  comma = strchr(text, ',');
  if (comma) *comma = '.';
  tfmi_out_text(o, "%s%s", text, whole || strpbrk(text, ".e") ? "" : ".0");
}

typedef struct tfmi_described { /* what a config.json tells */
  const tfmi_family *family;
  const tfm_net *net;
  const tfmi_rotation *rotation;
  double balance; /* router_aux_loss_coef */
  bool tied, qkv_bias, up_bias;
  int32_t bos, end_count;
  const int32_t *end;
  tfm_type type;
} tfmi_described;

static const char *tfmi_torch_name(tfm_type type) {
  return type == TFM_F16 ? "float16" : type == TFM_BF16 ? "bfloat16" : "float32";
}

static void tfmi_config_number(tfmi_out *o, const char *key, double value, bool whole) {
  tfmi_out_text(o, ",\n  \"%s\": ", key);
  tfmi_out_number(o, value, whole);
}

static void tfmi_config_divisors(tfmi_out *o, const char *key, const float *divisor, int32_t n) {
  int32_t i;
  for (i = 0; i < n; i++) {
    if (i) tfmi_out_text(o, ", ");
    else tfmi_out_text(o, ", \"%s\": [", key);
    tfmi_out_number(o, (double)divisor[i], false);
  }
  tfmi_out_text(o, "]");
}

/* What is between the braces of rope_scaling, or of one of rope_parameters. */
static void tfmi_config_scaling(tfmi_out *o, const tfmi_rotation *r) {
  const struct { unsigned kinds; const char *name; double value; } rows[] = {
    {1u << TFMI_ROPE_LINEAR | 1u << TFMI_ROPE_DYNAMIC | 1u << TFMI_ROPE_LLAMA3 |
         1u << TFMI_ROPE_YARN, "factor", r->factor},
    {1u << TFMI_ROPE_LLAMA3, "low_freq_factor", r->low},
    {1u << TFMI_ROPE_LLAMA3, "high_freq_factor", r->high},
    {1u << TFMI_ROPE_YARN, "beta_fast", r->high}, {1u << TFMI_ROPE_YARN, "beta_slow", r->low},
    {1u << TFMI_ROPE_YARN | 1u << TFMI_ROPE_LONG, "attention_factor", r->scale},
    {1u << TFMI_ROPE_LLAMA3 | 1u << TFMI_ROPE_YARN | 1u << TFMI_ROPE_LONG,
     "original_max_position_embeddings", r->original}};
  int i;
  for (i = 0; tfmi_rope_kinds[i].kind != r->kind; i++) continue;
  tfmi_out_text(o, "\"rope_type\": \"%s\"", tfmi_rope_kinds[i].name);
  for (i = 0; i < TFMI_COUNT(rows); i++) {
    if (!(rows[i].kinds >> r->kind & 1)) continue;
    tfmi_out_text(o, ", \"%s\": ", rows[i].name);
    tfmi_out_number(o, rows[i].value, i == TFMI_COUNT(rows) - 1);
  }
  if (r->kind == TFMI_ROPE_YARN && !r->truncate) tfmi_out_text(o, ", \"truncate\": false");
  if (r->kind != TFMI_ROPE_LONG) return;
  tfmi_config_divisors(o, "short_factor", r->divisor[0], r->rot / 2);
  tfmi_config_divisors(o, "long_factor", r->divisor[1], r->rot / 2);
}

static void tfmi_config_rope(const tfmi_described *t, tfmi_out *o) {
  static const char *const types[] = {"full_attention", "sliding_attention"};
  const tfmi_rotation *r = t->rotation;
  int i;
  if (tfmi_family_said(t->family, TFMI_N_LOCAL_THETA)) {
    tfmi_out_text(o, ",\n  \"rope_parameters\": {");
    for (i = 0; i < 2; i++) {
      tfmi_out_text(o, "%s\"%s\": {\"rope_theta\": ", i ? ", " : "", types[i]);
      tfmi_out_number(o, r[i].theta, false);
      tfmi_out_text(o, ", ");
      tfmi_config_scaling(o, &r[i]);
      tfmi_out_text(o, "}");
    }
    tfmi_out_text(o, "}");
    return;
  }
  tfmi_config_number(o, "rope_theta", r->theta, false);
  if (tfmi_family_said(t->family, TFMI_N_PARTIAL))
    tfmi_config_number(o, "partial_rotary_factor", (double)r->rot / t->net->head_width,
                       false);
  if (r->kind == TFMI_ROPE_DEFAULT) return;
  if (r->kind == TFMI_ROPE_LONG)
    tfmi_config_number(o, "original_max_position_embeddings", r->original, true);
  tfmi_out_text(o, ",\n  \"rope_scaling\": {");
  tfmi_config_scaling(o, r);
  tfmi_out_text(o, "}");
}

/* What layers differ in: windows by their types, layers without experts by their numbers. */
static void tfmi_config_layers(const tfmi_described *t, tfmi_out *o, bool windowed) {
  const tfmi_family *f = t->family;
  const tfm_net *net = t->net;
  int32_t i, n = 0;
  if (f->windows.use)
    tfmi_out_text(o, ",\n  \"%s\": %s", f->windows.use, windowed ? "true" : "false");
  for (i = 0; f->windows.types && i < net->layers; i++)
    tfmi_out_text(o, "%s\"%s_attention\"", i ? ", " : ",\n  \"layer_types\": [",
                  net->layer[i].attn.window ? "sliding" : "full");
  if (f->windows.types) tfmi_out_text(o, "]");
  for (i = 0; net->experts && i < net->layers; i++)
    if (!net->layer[i].router.rows)
      tfmi_out_text(o, "%s%d", n++ ? ", " : ",\n  \"mlp_only_layers\": [", (int)i);
  if (n) tfmi_out_text(o, "]");
}

/* Widths of the feed-forwards of layers with and without experts; 0: there are none. */
static int32_t tfmi_config_width(const tfm_net *net, bool sparse) {
  int32_t i;
  for (i = 0; i < net->layers; i++)
    if ((net->layer[i].router.rows != 0) == sparse) return net->layer[i].down.cols;
  return 0;
}

/* The numbers that not all families have; what layers tell apart is told by their types. */
static void tfmi_config_numbers(const tfmi_described *t, tfmi_out *o) {
  const tfmi_family *f = t->family;
  const tfm_net *net = t->net;
  double scale = (double)net->layer[0].attn.scale, scalar = round(1 / (scale * scale));
  int32_t window = 0, i;
  int k;
  if ((float)(1 / sqrt(scalar)) != net->layer[0].attn.scale) scalar = 1 / (scale * scale);
  for (i = 0; i < net->layers; i++) window = tfmi_max32(window, net->layer[i].attn.window);
  {
    const struct { tfmi_quantity what; double value; } rows[] = {
      {TFMI_N_QUERY_SCALAR, scalar},
      {TFMI_N_ATTN_CAP, (double)net->layer[0].attn.softcap},
      {TFMI_N_LOGIT_CAP, (double)net->logit_softcap}, {TFMI_N_EXPERTS, (double)net->experts},
      {TFMI_N_EXPERTS_USED, (double)net->experts_used},
      {TFMI_N_EXPERT_FFN, (double)net->expert_width},
      {TFMI_N_SHARED_FFN, (double)tfmi_config_width(net, true)}, {TFMI_N_SPARSE_STEP, 1},
      {TFMI_N_BALANCE, t->balance}};
    for (k = 0; k < TFMI_COUNT(rows); k++) {
      const tfmi_key *key = &f->key[rows[k].what];
      bool whole = key->whole || rows[k].what == TFMI_N_QUERY_SCALAR;
      bool caps = rows[k].what == TFMI_N_ATTN_CAP || rows[k].what == TFMI_N_LOGIT_CAP;
      if (!tfmi_family_said(f, rows[k].what) || !key->hf[0]) continue;
      if (caps && rows[k].value == 0) tfmi_out_text(o, ",\n  \"%s\": null", key->hf[0]);
      else tfmi_config_number(o, key->hf[0], rows[k].value, whole);
    }
  }
  if (tfmi_family_said(f, TFMI_N_WINDOW)) {
    if (window) tfmi_config_number(o, "sliding_window", window, true);
    else tfmi_out_text(o, ",\n  \"sliding_window\": null");
  }
  tfmi_config_layers(t, o, window != 0);
}

static void tfmi_config_flags(const tfmi_described *t, tfmi_out *o) {
  const tfmi_family *f = t->family;
  const tfm_layer *y = &t->net->layer[0];
  bool by_scale = tfmi_has(f, TFMI_LAYER_SCALE), scaled = y->attn.scale != 1.0f;
  bool by_layer = t->net->layers > 1 && y[1].attn.scale != y->attn.scale;
  const struct { const char *key; bool value; } rows[] = {
    {f->qkv_bias.key, t->qkv_bias}, {f->up_bias.key, t->up_bias},
    {f->tied.key, t->tied}, {f->normalise.key, t->net->moe.normalise},
    {by_scale ? "scale_attn_weights" : NULL, scaled},
    {by_scale ? "scale_attn_by_inverse_layer_idx" : NULL, by_layer}};
  int i;
  for (i = 0; i < TFMI_COUNT(rows); i++)
    if (rows[i].key)
      tfmi_out_text(o, ",\n  \"%s\": %s", rows[i].key, rows[i].value ? "true" : "false");
  tfmi_out_text(o, ",\n  \"pad_token_id\": null"); /* transformers' defaults may lie outside */
  if (t->bos >= 0) tfmi_out_text(o, ",\n  \"bos_token_id\": %d", (int)t->bos);
  for (i = 0; i < t->end_count; i++)
    tfmi_out_text(o, "%s%d", i ? ", " : ",\n  \"eos_token_id\": [", (int)t->end[i]);
  if (t->end_count) tfmi_out_text(o, "]");
}

/* The type of the file; or that which a scale of embeddings is rounded to. */
static const char *tfmi_config_type(const tfmi_described *t) {
  const tfm_net *net = t->net;
  float scale = (float)sqrt((double)net->width);
  if (t->type != TFM_F32 || net->embed_scale == 0 || net->embed_scale == scale)
    return tfmi_torch_name(t->type);
  return net->embed_scale == tfmi_from_bf16(tfmi_to_bf16(scale)) ? "bfloat16" : "float16";
}

static void tfmi_config_write(const tfmi_described *t, tfmi_out *o) {
  const tfmi_family *f = t->family;
  const tfm_net *net = t->net;
  bool dynamic = t->rotation[0].kind == TFMI_ROPE_DYNAMIC;
  int32_t dense = tfmi_config_width(net, false), i;
  const double values[] = {
    (double)net->layers, (double)net->width, (double)net->heads, (double)net->kv_heads,
    (double)net->head_width, (double)(dense ? dense : net->expert_width), (double)net->vocabulary,
    (double)(dynamic ? t->rotation[0].trained : net->context), (double)net->norm.eps};
  tfmi_out_text(o, "{\n  \"model_type\": \"%s\",\n  \"architectures\": [\"%s\"]", f->name,
                f->classes[0]);
  for (i = 0; i < TFMI_COUNT(values); i++)
    if (f->key[i].hf[0]) tfmi_config_number(o, f->key[i].hf[0], values[i], f->key[i].whole);
  for (i = 0; tfmi_acts[i].act != net->act; i++) continue;
  tfmi_out_text(o, ",\n  \"%s\": \"%s\"", f->act_key, tfmi_acts[i].name);
  tfmi_config_flags(t, o);
  tfmi_config_numbers(t, o);
  if (tfmi_has(f, TFMI_ROTARY)) tfmi_config_rope(t, o);
  tfmi_out_text(o, ",\n  \"torch_dtype\": \"%s\"\n}\n", tfmi_config_type(t));
}

typedef struct tfmi_item { /* a tensor to be written */
  const tfmi_tensor *t; /* its values */
  uint64_t begin;       /* row of t where they begin: an expert's of a stack */
  const tfmi_tensor *const *stack; /* [dims[0]] experts, t the first, that become one; or NULL */
  const float *made;    /* or these values */
  const char *name;
  tfm_type type;
  uint64_t rank, dims[4]; /* of the new one, slowest first */
  uint64_t rows, cols;  /* likewise; a vector is one row, with rows 0 */
  bool turned;          /* [cols, rows] in t */
  int32_t pairs;        /* head width, where rows go from halves to pairs; below 0: back */
  float add;            /* to each value */
  size_t bytes;
} tfmi_item;

typedef struct tfmi_conversion {
  const char *to;       /* NULL: only tell the tensors */
  tfm_convert_config config;
  const tfm_tokenizer *tokenizer; /* or NULL */
  const tfmi_merge *merge;        /* [merges] of the tokenizer, in their order */
  int64_t merges;
  int32_t *kind;                  /* [vocabulary] GGUF's token types */
  float *score;                   /* and scores */
  bool gguf, cancelled;
  const tfmi_family *there; /* what GGUF takes the model for; NULL: nothing */
  tfmi_builder *b;
  tfmi_item *item;
  uint64_t items, done_bytes, total_bytes;
  tfmi_text *line;      /* [lines] of the old config.json */
  uint64_t lines;
  tfm_type type;        /* of most matrices */
  uint8_t *chunk;       /* [chunk_bytes], of whole rows */
  size_t chunk_bytes;
  double *sums;         /* [2, rows of a chunk]: squares of values, of errors */
} tfmi_conversion;

enum { TFMI_CHUNK = 1 << 20 };

/* ---- What is written ---- */

static bool tfmi_is_matrix(const tfmi_tensor *t) { return t->rank > 1 && !t->bias; }

static bool tfmi_is_norm(const tfmi_tensor *t) { return t->rank == 1 && !t->bias; }

/* Whether rotated pairs are neighbours: in some families' GGUF files. */
static bool tfmi_pairs_there(const tfmi_conversion *c) {
  return c->gguf && tfmi_has(c->there, TFMI_PAIRS);
}

static tfm_type tfmi_item_type(const tfmi_conversion *c, const tfmi_tensor *t, uint64_t cols) {
  tfm_type type = c->config.type ? c->config.type : t->type;
  if (!c->gguf) return c->type;
  if (!tfmi_is_matrix(t) || t->slot == TFMI_POSITIONS || t->slot == TFMI_ROUTER ||
      t->slot == TFMI_SHARED_ROUTER) return TFM_F32; /* as llama.cpp expects them */
  if (cols % (uint64_t)tfmi_types[type].block_values) return TFM_F16; /* as llama.cpp does it */
  return tfmi_is_f8(type) ? TFM_BF16 : type;
}

/* Patterns of names where it goes to. */
static const char *const *tfmi_slots_there(const tfmi_conversion *c) {
  return c->gguf ? tfmi_gguf_slots : c->b->f->slot;
}

static bool tfmi_is_other(const tfmi_conversion *c) { return c->gguf != (c->b->s->gguf != NULL); }

/* The name in the other format; fails where it has none. */
static const char *tfmi_item_name(const tfmi_conversion *c, const tfmi_tensor *t, int32_t expert) {
  tfmi_load *l = c->b->s->load;
  const char *pattern = t->slot == TFMI_SLOTS ? NULL : tfmi_slots_there(c)[t->slot];
  const char *prefix = c->gguf || t->slot == TFMI_HEAD ? "" : c->b->f->prefix;
  char *name = (char *)tfmi_scratch(l, 128, 1);
  if (!tfmi_is_other(c) && t->name.n < 128)
    return (const char *)memcpy(name, t->name.at, t->name.n);
  if (!pattern)
    tfmi_fail(l, TFM_E_UNSUPPORTED, "tensor %s has no counterpart in %s; its parts are stored "
              "otherwise there", tfmi_plain(t->name).text, c->gguf ? "GGUF" : "such a folder");
  tfmi_slot_name(name, 128, prefix, pattern, t->layer, expert, t->bias ? ".bias" : ".weight");
  return name;
}

static void tfmi_item_shape(const tfmi_conversion *c, tfmi_item *m) {
  const tfmi_tensor *t = m->t;
  uint64_t k;
  m->rank = t->rank;
  memcpy(m->dims, t->dims, sizeof m->dims);
  if (m->turned) m->dims[0] = t->dims[1], m->dims[1] = t->dims[0];
  if (t->slot == TFMI_SHARED_ROUTER && tfmi_is_other(c)) { /* GGUF has it as a vector */
    m->rank = c->gguf ? 1 : 2;
    m->dims[m->rank - 1] = t->dims[t->rank - 1];
    if (!c->gguf) m->dims[0] = 1;
  }
  m->cols = m->dims[m->rank - 1];
  m->rows = m->rank > 1;
  for (k = 0; k + 1 < m->rank; k++) m->rows *= m->dims[k]; /* checked by the network */
}

static tfmi_item tfmi_item_of(const tfmi_conversion *c, const tfmi_tensor *t) {
  const tfmi_builder *b = c->b;
  bool pairs_here = b->m->net.layer[0].rope.interleaved, pairs_there = tfmi_pairs_there(c);
  tfmi_item m;
  memset(&m, 0, sizeof m);
  m.t = t;
  m.name = tfmi_item_name(c, t, 0);
  m.turned = tfmi_has(b->f, TFMI_CONV1D) && tfmi_is_matrix(t) && t->layer >= 0 && tfmi_is_other(c);
  tfmi_item_shape(c, &m);
  if ((t->slot == TFMI_Q || t->slot == TFMI_K) && pairs_here != pairs_there) {
    m.pairs = pairs_there ? b->m->net.head_width : -b->m->net.head_width;
    if (t->rank < 2) m.rows = m.cols, m.cols = 1; /* a bias, by its elements */
  }
  if (tfmi_is_norm(t) && tfmi_is_other(c) && tfmi_has(b->f, TFMI_ONE_PLUS))
    m.add = c->gguf ? 1.0f : -1.0f;
  m.type = tfmi_item_type(c, t, m.cols);
  return m;
}

/* All experts' matrices behind the first's. */
static void tfmi_item_stack(const tfmi_conversion *c, tfmi_item *m) {
  tfmi_builder *b = c->b;
  int32_t experts = b->m->net.experts, e;
  const tfmi_tensor **stack = TFMI_NEW(const tfmi_tensor *, tfmi_scratch(
      b->s->load, (uint64_t)experts, sizeof *stack));
  for (e = 0; e < experts; e++)
    stack[e] = tfmi_need_expert(b, (tfmi_slot)m->t->slot, m->t->layer, e, ".weight");
  m->stack = stack;
  m->rank = 3;
  m->dims[2] = m->dims[1];
  m->dims[1] = m->dims[0];
  m->dims[0] = (uint64_t)experts;
  m->rows *= (uint64_t)experts;
}

/* One of a stack by itself. */
static tfmi_item tfmi_item_expert(const tfmi_conversion *c, const tfmi_item *whole, int32_t e) {
  tfmi_item m = *whole;
  m.rank = 2;
  m.dims[0] = whole->dims[1];
  m.dims[1] = whole->dims[2];
  m.rows = m.dims[0];
  m.begin = (uint64_t)e * m.rows;
  m.name = tfmi_item_name(c, m.t, e);
  return m;
}

/* Experts are one tensor in GGUF, and a tensor each in folders of some families. */
static void tfmi_items_add(const tfmi_conversion *c, const tfmi_tensor *t, tfmi_item **all) {
  const tfmi_builder *b = c->b;
  bool matters = tfmi_is_other(c) && t->slot != TFMI_SLOTS;
  bool each_here = matters && b->slot[t->slot] && strstr(b->slot[t->slot], "%e");
  const char *there = matters ? tfmi_slots_there(c)[t->slot] : NULL;
  bool each_there = there && strstr(there, "%e");
  tfmi_item m, one;
  int32_t e;
  if (each_here && t->expert > 0) return; /* it is in the first's stack */
  m = tfmi_item_of(c, t);
  if (each_here) tfmi_item_stack(c, &m);
  if (!each_there) stbds_arrput(*all, m);
  for (e = 0; each_there && e < b->m->net.experts; e++) {
    one = tfmi_item_expert(c, &m, e);
    stbds_arrput(*all, one);
  }
}

/* GGUF tells llama3's scaling of the rotation as divisors of the frequencies. */
static tfmi_item tfmi_item_rotation(const tfmi_conversion *c) {
  const tfmi_rotation *r = c->b->m->rotation;
  tfmi_rotation plain = r[0];
  int32_t half = r->rot / 2, i;
  float *divisor = TFMI_NEW(float, tfmi_scratch(c->b->s->load, (uint64_t)half, sizeof *divisor));
  tfmi_item m;
  memset(&m, 0, sizeof m);
  m.name = "rope_freqs.weight";
  m.type = TFM_F32;
  m.rank = 1;
  m.dims[0] = m.cols = (uint64_t)half;
  m.made = divisor;
  plain.kind = TFMI_ROPE_DEFAULT;
  for (i = 0; i < half; i++)
    divisor[i] = tfmi_rotation_frequency(&plain, 0, i) / tfmi_rotation_frequency(r, 0, i);
  return m;
}

static void tfmi_conversion_items(tfmi_conversion *c) {
  tfmi_source *s = c->b->s;
  tfmi_load *l = s->load;
  tfmi_item *all = NULL;
  uint64_t i;
  for (i = 0; i < s->tensors; i++)
    if (s->tensor[i].used && s->tensor[i].slot >= 0 &&
        (c->gguf || s->tensor[i].slot != TFMI_SLOTS))
      tfmi_items_add(c, &s->tensor[i], &all);
  if (c->gguf && c->b->m->rotation[0].kind == TFMI_ROPE_LLAMA3) {
    tfmi_item m = tfmi_item_rotation(c);
    stbds_arrput(all, m);
  }
  c->item = all;
  c->items = (uint64_t)stbds_arrlen(all);
  for (i = 0; i < c->items; i++) {
    uint64_t values; /* bounded: t has as many */
    if (!tfmi_mul(all[i].rows ? all[i].rows : 1, all[i].cols, &values) ||
        !tfmi_type_bytes(all[i].type, values, &all[i].bytes))
      tfmi_fail(l, TFM_E_FORMAT, "tensor %s is larger than the address space", all[i].name);
    c->total_bytes += all[i].bytes;
  }
}

/* ---- Values ---- */

/* Where a row of the new tensor is in the old one. */
static uint64_t tfmi_item_row(const tfmi_item *m, uint64_t row) {
  uint64_t width = (uint64_t)(m->pairs < 0 ? -m->pairs : m->pairs), in, half = width / 2;
  if (m->pairs == 0) return row;
  in = row % width;
  if (m->pairs > 0) return row - in + in % 2 * half + in / 2;
  return row - in + (in < half ? 2 * in : 2 * (in - half) + 1);
}

/* y[i] = values (row, col + i) of the new tensor, n <= TFMI_PIECE of them. */
static void tfmi_item_values(const tfmi_item *m, float *y, uint64_t row, uint64_t col, int32_t n) {
  const struct tfmi_codec *codec;
  const tfmi_tensor *t = m->stack ? m->stack[row / m->dims[1]] : m->t;
  uint64_t from = m->stack ? row % m->dims[1] : m->begin + tfmi_item_row(m, row);
  int32_t i;
  if (m->made) {
    memcpy(y, m->made + col, (size_t)n * sizeof *y);
    return;
  }
  codec = &tfmi_codecs[t->type];
  if (m->turned) {
    for (i = 0; i < n; i++)
      codec->decode(y + i, t->data + tfmi_span(t->type, (int64_t)((col + (uint64_t)i) * m->rows +
                                                                  from)), 1);
  } else {
    codec->decode(y, t->data + tfmi_span(t->type, (int64_t)(from * m->cols + col)), n);
    tfmi_scale(y, &t->scales, (int32_t)m->cols, (int64_t)from, (int32_t)col, n);
  }
  for (i = 0; m->add != 0 && i < n; i++) y[i] += m->add;
}

typedef struct tfmi_item_job {
  const tfmi_item *m;
  uint64_t first; /* row of the chunk's first */
  size_t row_bytes;
  uint8_t *to;
  double *sums;   /* NULL: nobody asks */
  int32_t rows;
} tfmi_item_job;

static void tfmi_item_errors(const tfmi_item_job *t, int32_t row, const float *x, const uint8_t *y,
                             int32_t n) {
  float back[TFMI_PIECE];
  int32_t i;
  tfmi_codecs[t->m->type].decode(back, y, n);
  for (i = 0; i < n; i++) {
    double error = (double)x[i] - (double)back[i];
    t->sums[row] += (double)x[i] * (double)x[i];
    t->sums[t->rows + row] += error * error;
  }
}

static void tfmi_item_rows(void *context, int32_t begin, int32_t end, int32_t worker) {
  const tfmi_item_job *t = (const tfmi_item_job *)context;
  const tfmi_item *m = t->m;
  float piece[TFMI_PIECE];
  int32_t row;
  uint64_t col;
  (void)worker;
  for (row = begin; row < end; row++)
    for (col = 0; col < m->cols; col += TFMI_PIECE) {
      int32_t n = m->cols - col < TFMI_PIECE ? (int32_t)(m->cols - col) : TFMI_PIECE;
      uint8_t *to = t->to + (size_t)row * t->row_bytes + tfmi_span(m->type, (int64_t)col);
      tfmi_item_values(m, piece, t->first + (uint64_t)row, col, n);
      tfmi_codecs[m->type].encode(to, piece, n);
      if (t->sums) tfmi_item_errors(t, row, piece, to, n);
    }
}

/* The same bytes in the same order. */
static bool tfmi_item_as_it_is(const tfmi_item *m) {
  return m->t && !m->stack && m->type == m->t->type && !m->turned && !m->pairs && m->add == 0 &&
         !m->t->scales.at;
}

static void tfmi_item_tell(tfmi_conversion *c, const tfmi_item *m, double values, double errors) {
  tfm_tensor_info info;
  tfmi_plain_text name = tfmi_plain(m->t ? m->t->name : tfmi_text_of(m->name));
  if (!c->config.visitor) return;
  memset(&info, 0, sizeof info);
  info.name = name.text;
  info.type = m->t ? m->t->type_name : "F32";
  info.rank = (int32_t)m->rank;
  memcpy(info.dims, m->dims, sizeof info.dims);
  if (m->turned) info.dims[0] = m->dims[1], info.dims[1] = m->dims[0];
  info.bytes = m->t ? (size_t)tfmi_span(m->t->type, (int64_t)((m->rows ? m->rows : 1) * m->cols))
                    : m->bytes;
  info.new_name = m->name;
  info.new_type = tfm_type_name(m->type);
  info.new_bytes = m->bytes;
  info.error = values > 0 ? sqrt(errors / values) : 0;
  c->config.visitor(c->config.user, &info);
}

static void tfmi_item_write(tfmi_conversion *c, const tfmi_item *m, tfmi_out *o) {
  tfm_dev *d = &c->b->m->dev;
  uint64_t rows = m->rows ? m->rows : 1, first;
  size_t row_bytes = m->bytes / (size_t)rows, word_bytes = tfmi_word_bytes(m->type);
  int32_t most = (int32_t)(row_bytes < TFMI_CHUNK ? TFMI_CHUNK / (row_bytes + 1) + 1 : 1), i;
  double values = 0, errors = 0;
  tfmi_item_job job = {m, 0, row_bytes, c->chunk, c->config.visitor ? c->sums : NULL, 0};
  for (first = 0; first < rows && !o->failed; first += (uint64_t)job.rows) {
    job.first = first;
    job.rows = rows - first < (uint64_t)most ? (int32_t)(rows - first) : most;
    if (tfmi_item_as_it_is(m)) {
      tfmi_out_words(o, m->t->data + (m->begin + first) * row_bytes, (size_t)job.rows * row_bytes,
                     word_bytes);
    } else {
      for (i = 0; job.sums && i < 2 * job.rows; i++) job.sums[i] = 0;
      tfm_parallel_for(d, job.rows, 1, tfmi_item_rows, &job);
      tfmi_out_words(o, c->chunk, (size_t)job.rows * row_bytes, word_bytes);
      for (i = 0; job.sums && i < job.rows; i++)
        values += job.sums[i], errors += job.sums[job.rows + i];
    }
    c->done_bytes += (uint64_t)job.rows * row_bytes;
    if (!tfmi_goes_on(&c->config.host, "convert", (double)c->done_bytes / (double)c->total_bytes))
      c->cancelled = o->failed = true;
  }
  if (!o->failed) tfmi_item_tell(c, m, values, errors);
}

/* ---- A Hugging Face folder ---- */

static void tfmi_folder_header(const tfmi_conversion *c, tfmi_out *o) {
  uint64_t i, at = 0;
  tfmi_out_text(o, "{\"__metadata__\":{\"format\":\"pt\"}");
  for (i = 0; i < c->items; i++) {
    const tfmi_item *m = &c->item[i];
    const char *dtype = tfm_type_name(m->type);
    uint64_t k;
    tfmi_out_text(o, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", m->name, dtype);
    for (k = 0; k < m->rank; k++)
      tfmi_out_text(o, "%s%llu", k ? "," : "", (unsigned long long)m->dims[k]);
    tfmi_out_text(o, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)at,
                  (unsigned long long)(at + m->bytes));
    at += m->bytes;
  }
  tfmi_out_text(o, "}");
  while (o->bytes % 8) tfmi_out_text(o, " ");
}

static void tfmi_folder_weights_write(void *context, tfmi_out *o) {
  tfmi_conversion *c = (tfmi_conversion *)context;
  tfmi_out count;
  uint64_t i;
  memset(&count, 0, sizeof count);
  count.fd = -1;
  tfmi_folder_header(c, &count);
  tfmi_out_number_le(o, count.bytes, 8);
  tfmi_folder_header(c, o);
  for (i = 0; i < c->items; i++) tfmi_item_write(c, &c->item[i], o);
}

/* A config.json is copied line by line, but for what tells the type. */
static void tfmi_conversion_lines(tfmi_conversion *c) {
  static const char *const types[] = {"torch_dtype", "dtype", "quantization_config"};
  tfmi_source *s = c->b->s;
  tfmi_text key, line, *all = NULL;
  tfmi_json j;
  int i;
  if (!s->config_text.at) return;
  tfmi_json_init(&j, s->load, "config.json", s->config_text.at, s->config_text.n);
  tfmi_json_object(&j);
  while (tfmi_json_member(&j, &key)) {
    bool plain = key.at >= s->config_text.at && key.at < s->config_text.at + s->config_text.n;
    tfmi_json_skip(&j);
    for (i = 0; i < TFMI_COUNT(types); i++) plain = plain && !tfmi_text_is(key, types[i]);
    if (!plain) continue;
    line.at = key.at - 1; /* at its quotation mark */
    line.n = (size_t)(j.at - line.at);
    stbds_arrput(all, line);
  }
  c->line = all;
  c->lines = (uint64_t)stbds_arrlen(all);
}

static void tfmi_folder_config_write(void *context, tfmi_out *o) {
  const tfmi_conversion *c = (const tfmi_conversion *)context;
  const tfm_model *model = c->b->m;
  tfmi_described d;
  uint64_t i;
  if (c->lines) {
    tfmi_out_text(o, "{\n  \"torch_dtype\": \"%s\"", tfmi_torch_name(c->type));
    for (i = 0; i < c->lines; i++) {
      tfmi_out_text(o, ",\n  ");
      tfmi_out_bytes(o, c->line[i].at, c->line[i].n);
    }
    tfmi_out_text(o, "\n}\n");
    return;
  }
  memset(&d, 0, sizeof d);
  d.family = c->b->f;
  d.net = &model->net;
  d.rotation = model->rotation;
  d.balance = model->balance;
  d.tied = model->tied;
  for (i = 0; i < c->items; i++) {
    const tfmi_tensor *t = c->item[i].t;
    if (!t || !t->bias) continue;
    d.qkv_bias = d.qkv_bias || t->slot == TFMI_Q || t->slot == TFMI_QKV;
    d.up_bias = d.up_bias || t->slot == TFMI_UP || t->slot == TFMI_GATE_UP;
  }
  d.bos = model->bos;
  d.end = model->end;
  d.end_count = model->end_count;
  d.type = c->type;
  tfmi_config_write(&d, o);
}

static void tfmi_conversion_exists(tfmi_conversion *c, const char *path) {
  tfmi_stat st;
  if (!c->config.overwrite && tfmi_stat_path(path, &st))
    tfmi_fail(c->b->s->load, TFM_E_IO, "%s is there already; remove it or ask to overwrite", path);
}

/* What is converted is never written over: should the new one be refused, neither would be left. */
static void tfmi_conversion_apart(const tfmi_conversion *c) {
  const tfmi_source *s = c->b->s;
  bool folder = strcmp(s->format, "safetensors") == 0;
  tfmi_stat from, to;
  if (!s->path || s->load->heap->host.io || c->gguf != (s->gguf != NULL)) return;
  if (!c->gguf && !folder) return;
  if (tfmi_stat_path(folder ? tfmi_folder_of(s->load, s->path) : s->path, &from) &&
      tfmi_stat_path(c->to, &to) && tfmi_same_file(&from, &to))
    tfmi_fail(s->load, TFM_E_ARG, "%s is what is to be converted; expected another place", c->to);
}

static void tfmi_file_write(void *context, tfmi_out *o) {
  const tfmi_text *text = (const tfmi_text *)context;
  tfmi_out_bytes(o, text->at, text->n);
}

typedef void (*tfmi_folder_copy)(tfmi_conversion *c, const char *from, const char *to);

static void tfmi_folder_copy_check(tfmi_conversion *c, const char *from, const char *to) {
  (void)from;
  tfmi_conversion_exists(c, to);
}

static void tfmi_folder_copy_write(tfmi_conversion *c, const char *from, const char *to) {
  tfmi_text text = tfmi_text_of_file(c->b->s, from);
  if (tfmi_out_file(to, tfmi_file_write, &text) != TFM_OK) tfmi_fail_again(c->b->s->load);
}

/* What belongs to the model besides: the files of its tokenizer, as they are. */
static void tfmi_folder_copies(tfmi_conversion *c, tfmi_folder_copy copy) {
  static const char *const names[] = {
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja"};
  tfmi_source *s = c->b->s;
  const char *folder;
  int i;
  if (s->gguf || !s->path || strcmp(s->format, "safetensors") != 0) return;
  folder = tfmi_folder_of(s->load, s->path);
  for (i = 0; i < TFMI_COUNT(names); i++) {
    const char *path = tfmi_join(s->load, folder, names[i]);
    if (tfmi_file_exists(s->load, path)) copy(c, path, tfmi_join(s->load, c->to, names[i]));
  }
}

static void tfmi_folder_template_write(void *context, tfmi_out *o) {
  const tfmi_conversion *c = (const tfmi_conversion *)context;
  const tfm_tokenizer *t = c->tokenizer;
  tfmi_text chat = {NULL, 0};
  tfmi_gguf_get_text(c->b->s->gguf, "tokenizer.chat_template", &chat);
  tfmi_out_text(o, "{\n  \"tokenizer_class\": \"PreTrainedTokenizerFast\",\n"
                "  \"clean_up_tokenization_spaces\": false");
  if (t->bos >= 0) tfmi_out_text(o, ",\n  \"bos_token\": "), tfmi_save_token(t, o, t->bos);
  if (t->eos >= 0) tfmi_out_text(o, ",\n  \"eos_token\": "), tfmi_save_token(t, o, t->eos);
  if (t->unk >= 0) tfmi_out_text(o, ",\n  \"unk_token\": "), tfmi_save_token(t, o, t->unk);
  if (t->pad >= 0) tfmi_out_text(o, ",\n  \"pad_token\": "), tfmi_save_token(t, o, t->pad);
  if (chat.n) tfmi_out_text(o, ",\n  \"chat_template\": "), tfmi_save_string(o, chat.at, chat.n);
  tfmi_out_text(o, "\n}\n");
}

/* What a GGUF file says about text, as tokenizer.json and tokenizer_config.json. */
static void tfmi_folder_vocabulary(tfmi_conversion *c, bool write) {
  static const char *const names[] = {"tokenizer.json", "tokenizer_config.json"};
  tfmi_load *l = c->b->s->load;
  char *path[2];
  tfm_status status;
  int i;
  if (!c->b->s->gguf || !c->tokenizer) return;
  for (i = 0; i < 2; i++) {
    path[i] = tfmi_join(l, c->to, names[i]);
    if (!write) tfmi_conversion_exists(c, path[i]);
  }
  if (!write) return;
  status = tfm_tokenizer_save(c->tokenizer, path[0]);
  if (status == TFM_OK) status = tfmi_out_file(path[1], tfmi_folder_template_write, c);
  if (status == TFM_E_UNSUPPORTED)
    tfmi_log(&c->config.host, TFM_LOG_WARNING, "%s has no vocabulary: %s", c->to, tfm_error());
  else if (status != TFM_OK) tfmi_fail_again(l);
}

/* ---- GGUF ---- */

typedef struct tfmi_pairs { /* keys and values being written */
  tfmi_out *o;
  const char *family;
  uint64_t count;
} tfmi_pairs;

static void tfmi_pairs_string(tfmi_pairs *p, const char *at, size_t n) {
  tfmi_out_number_le(p->o, n, 8);
  tfmi_out_bytes(p->o, at, n);
}

/* A key; one that begins with a point belongs to the architecture. */
static void tfmi_pairs_key(tfmi_pairs *p, const char *key, uint32_t type) {
  char whole[96];
  snprintf(whole, sizeof whole, "%s%s", key[0] == '.' ? p->family : "", key);
  tfmi_pairs_string(p, whole, strlen(whole));
  tfmi_out_number_le(p->o, type, 4);
  p->count++;
}

static void tfmi_pairs_text(tfmi_pairs *p, const char *key, const char *value) {
  tfmi_pairs_key(p, key, TFMI_GGUF_STRING);
  tfmi_pairs_string(p, value, strlen(value));
}

static void tfmi_pairs_whole(tfmi_pairs *p, const char *key, int64_t value) { /* below 0: none */
  if (value < 0) return;
  tfmi_pairs_key(p, key, TFMI_GGUF_U32);
  tfmi_out_number_le(p->o, (uint64_t)value, 4);
}

static void tfmi_pairs_flag(tfmi_pairs *p, const char *key, bool value) {
  tfmi_pairs_key(p, key, TFMI_GGUF_BOOL);
  tfmi_out_number_le(p->o, value, 1);
}

static void tfmi_pairs_float(tfmi_pairs *p, float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  tfmi_out_number_le(p->o, bits, 4);
}

static void tfmi_pairs_real(tfmi_pairs *p, const char *key, double value) {
  tfmi_pairs_key(p, key, TFMI_GGUF_F32);
  tfmi_pairs_float(p, (float)value);
}

static void tfmi_pairs_array(tfmi_pairs *p, const char *key, uint32_t type, uint64_t n) {
  tfmi_pairs_key(p, key, TFMI_GGUF_ARRAY);
  tfmi_out_number_le(p->o, type, 4);
  tfmi_out_number_le(p->o, n, 8);
}

/* The number of llama.cpp's that names the type of most matrices. */
static int64_t tfmi_gguf_file_type(tfm_type type) {
  static const struct { tfm_type type; int64_t number; } rows[] = {
    {TFM_F32, 0}, {TFM_F16, 1}, {TFM_Q4_0, 2}, {TFM_Q4_1, 3}, {TFM_Q8_0, 7}, {TFM_Q5_0, 8},
    {TFM_Q5_1, 9}, {TFM_BF16, 32}, {TFM_Q4_K, 15}, {TFM_Q5_K, 17}, {TFM_Q6_K, 18}};
  int i;
  for (i = 0; i < TFMI_COUNT(rows); i++)
    if (rows[i].type == type) return rows[i].number;
  return 1024; /* guessed, as llama.cpp calls it */
}

/* A number of the model as it turned out, which its files may have left to be understood. */
static double tfmi_conversion_number(const tfmi_conversion *c, tfmi_quantity what) {
  const tfm_net *net = &c->b->m->net;
  const int32_t known[] = {net->layers, net->width, net->heads, net->kv_heads, net->head_width,
                           net->ffn_width, net->vocabulary, net->context};
  if (what == TFMI_N_EPS) return (double)net->norm.eps;
  return what < TFMI_N_EPS ? (double)known[what] : tfmi_number(c->b->s, c->b->f, what);
}

static void tfmi_gguf_numbers(const tfmi_conversion *c, tfmi_pairs *p) {
  const tfmi_family *f = c->b->f;
  const tfmi_rotation *r = c->b->m->rotation;
  char key[96];
  int i;
  tfmi_pairs_text(p, "general.architecture", c->there->gguf);
  tfmi_pairs_text(p, "general.name", f->name);
  tfmi_pairs_whole(p, "general.quantization_version", 2);
  tfmi_pairs_whole(p, "general.file_type", tfmi_gguf_file_type(c->type));
  for (i = 0; i < TFMI_QUANTITIES; i++) {
    double value = tfmi_conversion_number(c, (tfmi_quantity)i);
    if (!f->key[i].gguf || value == 0) continue;
    snprintf(key, sizeof key, ".%s", f->key[i].gguf);
    if (f->key[i].whole) tfmi_pairs_whole(p, key, (int64_t)value);
    else tfmi_pairs_real(p, key, value);
  }
  if (r->rot == 0) return;
  tfmi_pairs_whole(p, ".attention.value_length", c->b->m->net.head_width);
  tfmi_pairs_whole(p, ".rope.dimension_count", r->rot);
  if (r->kind != TFMI_ROPE_LINEAR) return;
  tfmi_pairs_text(p, ".rope.scaling.type", "linear");
  tfmi_pairs_real(p, ".rope.scaling.factor", r->factor);
}

/* ---- The vocabulary of a GGUF file ---- */

static int tfmi_merge_order(const void *a, const void *b) {
  const tfmi_merge *x = (const tfmi_merge *)a, *y = (const tfmi_merge *)b;
  return x->rank < y->rank ? -1 : x->rank > y->rank;
}

static void tfmi_conversion_merges(tfmi_conversion *c) {
  const tfmi_merge_table *table = &c->tokenizer->merges;
  tfmi_merge *all = NULL;
  uint64_t i;
  for (i = 0; table->slot && i <= table->mask; i++)
    if (table->slot[i].into >= 0) stbds_arrput(all, table->slot[i]);
  c->merge = all;
  c->merges = (int64_t)stbds_arrlen(all);
  tfmi_sort(all, (size_t)c->merges, sizeof *all, tfmi_merge_order);
}

/* Whether a step cuts by this pattern, whoever wrote its matcher. */
static bool tfmi_is_pattern(const tfmi_step *s, const char *pattern) {
  int i;
  if (s->find == tfmi_find_regex) return tfmi_text_is(s->text, pattern);
  for (i = 0; i < TFMI_COUNT(tfmi_patterns); i++)
    if (s->find == tfmi_find_split && s->split == tfmi_patterns[i].split)
      return strcmp(tfmi_patterns[i].pattern, pattern) == 0;
  return false;
}

/* Whether the steps are those of the row, and no others. */
static bool tfmi_is_split_as(const tfm_tokenizer *t, const tfmi_split_row *row) {
  const tfmi_step *s = t->cut, *end = t->cut + t->cuts;
  int i;
  if (t->rewrites != row->composes || row->whole_first != (t->whole.slot != NULL)) return false;
  if (row->composes &&
      (t->rewrite[0].rewrite != tfmi_rewrite_form || !t->rewrite[0].composes ||
       t->rewrite[0].compat)) return false;
  if (row->digits) {
    if (s == end || s->find != tfmi_find_character || s->behavior != TFMI_ISOLATED || !s->set ||
        !tfmi_charset_at(s->set, '1')) return false;
    s++;
  }
  for (i = 0; i < 3 && row->pattern[i]; i++, s++)
    if (s == end || s->rewrite || s->behavior != TFMI_ISOLATED || s->invert ||
        !tfmi_is_pattern(s, row->pattern[i])) return false;
  return s == end;
}

static const char *tfmi_gguf_pre_name(const tfm_tokenizer *t) {
  int i;
  for (i = 0; i < TFMI_COUNT(tfmi_gguf_pres); i++)
    if (tfmi_is_split_as(t, &tfmi_gguf_pres[i])) return tfmi_gguf_pres[i].name;
  return NULL;
}

typedef struct tfmi_spm_form { /* how a vocabulary of characters treats blanks */
  bool known;                  /* in a way that GGUF has a word for */
  bool prefix, squeeze;
  bool low_line;               /* they are U+2581 in its tokens too */
} tfmi_spm_form;

static tfmi_spm_form tfmi_spm_form_of(const tfm_tokenizer *t) {
  tfmi_spm_form form = {t->model == TFMI_MERGES && !t->cuts, false, false, false};
  int32_t i;
  for (i = 0; i < t->rewrites; i++) {
    const tfmi_step *s = &t->rewrite[i];
    bool replaces = s->rewrite == tfmi_rewrite_replace && s->find == tfmi_find_text &&
                    tfmi_text_is(s->text, " ") && tfmi_text_is(s->content, tfmi_low_line);
    bool prepends = s->rewrite == tfmi_rewrite_prepend && tfmi_text_is(s->text, tfmi_low_line);
    bool blanks = s->rewrite == tfmi_rewrite_blanks;
    form.known = form.known && (replaces || prepends || blanks);
    form.prefix = form.prefix || prepends || (blanks && s->text.n);
    form.squeeze = form.squeeze || (blanks && s->squeeze);
    form.low_line = form.low_line || replaces ||
                    (blanks && tfmi_text_is(s->content, tfmi_low_line));
  }
  return form;
}

/* What llama.cpp calls a token: normal 1, unknown 2, control 3, the user's 4, unused 5, a byte 6;
   and its score: what a merge makes is better the earlier it is made. */
static void tfmi_conversion_tokens(tfmi_conversion *c) {
  const tfm_tokenizer *t = c->tokenizer;
  tfmi_load *l = c->b->s->load;
  int32_t n = c->b->m->net.vocabulary, i, set;
  int64_t k;
  if (t->vocabulary > n)
    tfmi_fail(l, TFM_E_FORMAT, "the tokenizer has %d tokens, but the model's vocabulary only %d",
              (int)t->vocabulary, (int)n);
  c->kind = TFMI_NEW(int32_t, tfmi_scratch(l, (uint64_t)n, sizeof *c->kind));
  c->score = TFMI_NEW(float, tfmi_scratch(l, (uint64_t)n, sizeof *c->score));
  for (i = 0; i < n; i++)
    c->kind[i] = i >= t->vocabulary || t->token[i].speech == TFMI_SPEECH_NONE ? 5 : 1;
  for (i = 0; i < 256 && !t->from_bytes; i++)
    if (t->byte_id[i] >= 0) c->kind[t->byte_id[i]] = 6;
  for (set = 0; set < 2; set++)
    for (i = 0; i < t->added[set].count; i++)
      c->kind[t->added[set].token[i].id] = t->added[set].token[i].special ? 3 : 4;
  if (t->unk >= 0 && !t->from_bytes) c->kind[t->unk] = 2;
  for (k = c->merges; k-- > 0;) /* the first that makes it counts */
    if (c->merge[k].into < t->vocabulary) c->score[c->merge[k].into] = -(float)c->merge[k].rank;
}

/* Everything that the file will say about the vocabulary, or why it cannot. */
static void tfmi_conversion_vocabulary(tfmi_conversion *c) {
  tfmi_load *l = c->b->s->load;
  if (!c->tokenizer) {
    tfmi_log(&c->config.host, TFM_LOG_WARNING, "%s: no tokenizer was found: the GGUF file has no "
             "vocabulary", l->object);
    return;
  }
  if (c->tokenizer->from_bytes ? !tfmi_gguf_pre_name(c->tokenizer)
                               : !tfmi_spm_form_of(c->tokenizer).known)
    tfmi_fail(l, TFM_E_UNSUPPORTED, "the tokenizer splits text in a way that has no name in GGUF");
  tfmi_conversion_merges(c);
  tfmi_conversion_tokens(c);
}

/* llama2.c spells blanks as they are, where SentencePiece has U+2581. */
static void tfmi_gguf_token(const tfm_tokenizer *t, int32_t id, tfmi_pairs *p) {
  const char *at = t->arena + t->token[id].at;
  size_t n = t->token[id].n, blanks = 0, i;
  bool plain = t->from_bytes || t->token[id].added || tfmi_spm_form_of(t).low_line;
  for (i = 0; !plain && i < n; i++) blanks += at[i] == ' ';
  tfmi_out_number_le(p->o, n + 2 * blanks, 8);
  for (i = 0; i < n; i++)
    if (at[i] == ' ' && blanks) tfmi_out_bytes(p->o, "\xe2\x96\x81", 3);
    else tfmi_out_bytes(p->o, at + i, 1);
}

static void tfmi_gguf_tokens(const tfmi_conversion *c, tfmi_pairs *p) {
  const tfm_tokenizer *t = c->tokenizer;
  uint64_t n = (uint64_t)c->b->m->net.vocabulary, i;
  char pad[32];
  tfmi_pairs_array(p, "tokenizer.ggml.tokens", TFMI_GGUF_STRING, n);
  for (i = 0; i < n; i++) {
    bool there = c->kind[i] != 5 && i < (uint64_t)t->vocabulary;
    snprintf(pad, sizeof pad, "[PAD%llu]", (unsigned long long)i);
    if (there) tfmi_gguf_token(t, (int32_t)i, p);
    else tfmi_pairs_string(p, pad, strlen(pad));
  }
  tfmi_pairs_array(p, "tokenizer.ggml.token_type", TFMI_GGUF_I32, n);
  for (i = 0; i < n; i++) tfmi_out_number_le(p->o, (uint64_t)c->kind[i], 4);
  if (t->from_bytes) return;
  tfmi_pairs_array(p, "tokenizer.ggml.scores", TFMI_GGUF_F32, n);
  for (i = 0; i < n; i++) tfmi_pairs_float(p, c->score[i]);
}

static void tfmi_gguf_merge_list(const tfmi_conversion *c, tfmi_pairs *p) {
  const tfm_tokenizer *t = c->tokenizer;
  int64_t i;
  tfmi_pairs_array(p, "tokenizer.ggml.merges", TFMI_GGUF_STRING, (uint64_t)c->merges);
  for (i = 0; i < c->merges; i++) {
    const tfmi_token *left = &t->token[c->merge[i].left], *right = &t->token[c->merge[i].right];
    tfmi_out_number_le(p->o, (uint64_t)left->n + 1 + right->n, 8);
    tfmi_out_bytes(p->o, t->arena + left->at, left->n);
    tfmi_out_bytes(p->o, " ", 1);
    tfmi_out_bytes(p->o, t->arena + right->at, right->n);
  }
}

static void tfmi_gguf_vocabulary(const tfmi_conversion *c, tfmi_pairs *p) {
  const tfm_tokenizer *t = c->tokenizer;
  if (!t) {
    tfmi_pairs_text(p, "tokenizer.ggml.model", "no_vocab");
    return;
  }
  tfmi_pairs_text(p, "tokenizer.ggml.model", t->from_bytes ? "gpt2" : "llama");
  tfmi_pairs_text(p, "tokenizer.ggml.pre", t->from_bytes ? tfmi_gguf_pre_name(t) : "default");
  tfmi_gguf_tokens(c, p);
  if (t->from_bytes) {
    tfmi_gguf_merge_list(c, p);
  } else {
    tfmi_spm_form form = tfmi_spm_form_of(t);
    tfmi_pairs_flag(p, "tokenizer.ggml.add_space_prefix", form.prefix);
    tfmi_pairs_flag(p, "tokenizer.ggml.remove_extra_whitespaces", form.squeeze);
  }
  tfmi_pairs_whole(p, "tokenizer.ggml.bos_token_id", t->bos);
  tfmi_pairs_whole(p, "tokenizer.ggml.eos_token_id", t->eos);
  tfmi_pairs_whole(p, "tokenizer.ggml.unknown_token_id", t->unk);
  tfmi_pairs_whole(p, "tokenizer.ggml.padding_token_id", t->pad);
  tfmi_pairs_flag(p, "tokenizer.ggml.add_bos_token", t->before_count > 0);
  tfmi_pairs_flag(p, "tokenizer.ggml.add_eos_token", t->after_count > 0);
}

/* ---- The file ---- */

static uint64_t tfmi_gguf_pairs_write(const tfmi_conversion *c, tfmi_out *o) {
  tfmi_pairs p = {o, c->there->gguf, 0};
  tfmi_gguf_numbers(c, &p);
  tfmi_gguf_vocabulary(c, &p);
  return p.count;
}

static uint32_t tfmi_ggml_id(tfm_type type) {
  int i = 0;
  while (tfmi_ggml_types[i].type != type) i++;
  return tfmi_ggml_types[i].id;
}

static void tfmi_gguf_align(tfmi_out *o) {
  while (o->bytes % 32) tfmi_out_bytes(o, "", 1);
}

static void tfmi_gguf_write(void *context, tfmi_out *o) {
  tfmi_conversion *c = (tfmi_conversion *)context;
  uint64_t i, at = 0;
  tfmi_out count;
  memset(&count, 0, sizeof count);
  count.fd = -1;
  tfmi_out_text(o, "GGUF");
  tfmi_out_number_le(o, 3, 4);
  tfmi_out_number_le(o, c->items, 8);
  tfmi_out_number_le(o, tfmi_gguf_pairs_write(c, &count), 8);
  tfmi_gguf_pairs_write(c, o);
  for (i = 0; i < c->items; i++, at = (at + 31) & ~(uint64_t)31) {
    const tfmi_item *m = &c->item[i];
    uint64_t k;
    tfmi_out_number_le(o, strlen(m->name), 8);
    tfmi_out_text(o, "%s", m->name);
    tfmi_out_number_le(o, m->rank, 4);
    for (k = m->rank; k-- > 0;) tfmi_out_number_le(o, m->dims[k], 8);
    tfmi_out_number_le(o, tfmi_ggml_id(m->type), 4);
    tfmi_out_number_le(o, at, 8);
    at += m->bytes;
  }
  for (i = 0; i < c->items; i++) {
    tfmi_gguf_align(o);
    tfmi_item_write(c, &c->item[i], o);
  }
}

/* ---- The whole ---- */

static bool tfmi_conversion_tells(const tfmi_conversion *c, const tfmi_source *s) {
  tfm_tensor_info info;
  uint64_t i;
  if (c->to) return false;
  memset(&info, 0, sizeof info);
  for (i = 0; i < s->tensors; i++) {
    const tfmi_tensor *t = &s->tensor[i];
    tfmi_plain_text name = tfmi_plain(t->name);
    info.name = name.text;
    info.type = t->type_name;
    info.rank = (int32_t)(t->rank < INT32_MAX ? t->rank : INT32_MAX);
    memcpy(info.dims, t->dims, sizeof info.dims);
    info.bytes = t->bytes;
    c->config.visitor(c->config.user, &info);
  }
  return true;
}

/* The type that holds what a folder is to have: its matrices' own where it can. */
static void tfmi_conversion_type(tfmi_conversion *c) {
  tfm_type type = c->config.type ? c->config.type : c->b->m->weights;
  bool is_float = type == TFM_F32 || type == TFM_F16 || type == TFM_BF16;
  if (c->config.type && !c->gguf && !is_float)
    tfmi_fail(c->b->s->load, TFM_E_ARG, "a Hugging Face folder cannot hold %s; choose F32, F16 or "
              "BF16, or name a file .gguf", tfm_type_name(type));
  c->type = c->gguf || is_float ? type : TFM_F16;
}

static void tfmi_conversion_chunk(tfmi_conversion *c) {
  uint64_t i, widest = 0, rows, most = 1;
  for (i = 0; i < c->items; i++) {
    uint64_t row = c->item[i].bytes / (c->item[i].rows ? c->item[i].rows : 1);
    rows = TFMI_CHUNK / (row + 1) + 1; /* as tfmi_item_write has it */
    if (row > widest) widest = row;
    if (rows > most) most = rows;
  }
  c->chunk_bytes = TFMI_CHUNK + 2 * (size_t)widest;
  c->chunk = (uint8_t *)tfmi_scratch(c->b->s->load, c->chunk_bytes, 1);
  c->sums = TFMI_NEW(double, tfmi_scratch(c->b->s->load, 2 * most, sizeof *c->sums));
}

/* Goes on, or fails as writing did. */
static void tfmi_conversion_wrote(tfmi_conversion *c, tfm_status status) {
  if (status == TFM_OK) return;
  if (c->cancelled) tfmi_fail(c->b->s->load, TFM_E_CANCELLED, "the conversion was cancelled");
  tfmi_fail_again(c->b->s->load);
}

static bool tfmi_rotations_agree(const tfmi_rotation *a, const tfmi_rotation *b) {
  int32_t context, i;
  if (a->rot != b->rot || fabs(a->scale - b->scale) > 1e-6) return false;
  for (context = 1; context < 1 << 20; context *= 32)
    for (i = 0; i < a->rot / 2; i++) {
      float x = tfmi_rotation_frequency(a, context, i), y = tfmi_rotation_frequency(b, context, i);
      if (fabsf(x - y) > 1e-6f * x) return false;
    }
  return true;
}

/* A file that others will read must say what was meant: each architecture of GGUF does some things
   in one way only, and what is not in a format is understood to be usual. So what has been written
   is read again, all but the weights, and compared, before it takes the place of what was there. */
static const char *tfmi_models_differ(const tfm_model *m, const tfm_model *again) {
  const tfm_net *x = &m->net, *y = &again->net;
  int32_t i;
  if (x->act != y->act) return "the activation";
  if (x->context != y->context || x->norm.eps != y->norm.eps || m->tied != again->tied)
    return "the numbers";
  if (x->logit_softcap != y->logit_softcap) return "the cap of logits";
  if (fabsf(x->embed_scale - y->embed_scale) > 0.004f * x->embed_scale)
    return "the scale of embeddings"; /* which llama.cpp does not round */
  for (i = 0; i < x->layers; i++) {
    const tfm_attn *a = &x->layer[i].attn, *b = &y->layer[i].attn;
    if (fabsf(a->scale - b->scale) > 1e-6f * a->scale) return "the scale of the scores";
    if (a->window != b->window) return "the windows";
    if (a->softcap != b->softcap) return "the cap of the scores";
    if (!x->layer[i].router.rows != !y->layer[i].router.rows) return "the layers with experts";
  }
  if (x->experts_used != y->experts_used || x->moe.normalise != y->moe.normalise)
    return "the weights of experts";
  for (i = 0; i < x->layers; i++) {
    int which = x->layer[i].attn.window != 0;
    if (!tfmi_rotations_agree(&m->rotation[which], &again->rotation[which])) return "the rotation";
  }
  return NULL;
}

static tfm_status tfmi_conversion_check(tfmi_conversion *c, const char *path) {
  tfm_model_config plain;
  const char *untold = NULL;
  tfm_model *again;
  memset(&plain, 0, sizeof plain);
  plain.host = c->config.host;
  plain.device = TFM_REF;
  plain.threads = 1;
  again = tfmi_model_make(path, NULL, 0, &plain, true, NULL);
  if (again) untold = tfmi_models_differ(c->b->m, again);
  tfm_model_free(again);
  if (!again) return tfmi_error.status;
  if (!untold) return TFM_OK;
  return tfmi_report(TFM_E_UNSUPPORTED, "%s cannot tell %s of this model; convert to %s",
                     c->gguf ? "GGUF" : "config.json", untold, c->gguf ? "a folder" : ".gguf");
}

static void tfmi_conversion_file(tfmi_conversion *c) {
  tfm_status status;
  tfmi_out o;
  tfmi_conversion_exists(c, c->to);
  tfmi_conversion_vocabulary(c);
  if (tfmi_out_begin(&o, c->to) != TFM_OK) tfmi_fail_again(c->b->s->load);
  tfmi_gguf_write(c, &o);
  tfmi_out_flush(&o);
  status = o.failed ? TFM_OK : tfmi_conversion_check(c, o.temporary);
  if (status != TFM_OK) tfmi_out_drop(&o);
  else status = tfmi_out_commit(&o, c->to, 1);
  tfmi_conversion_wrote(c, status);
}

static void tfmi_conversion_folder_make(tfmi_conversion *c, const char *folder) {
  if (tfmi_make_folder(folder) != 0 && errno != EEXIST)
    tfmi_fail(c->b->s->load, TFM_E_IO, "the folder %s cannot be made; is the one that it is in "
              "there?", folder);
}

/* Weights and config.json lie in a folder beside it until they have been read again. */
static void tfmi_conversion_folder(tfmi_conversion *c) {
  static const char *const name[] = {"model.safetensors", "config.json"};
  static const tfmi_writer write[] = {tfmi_folder_weights_write, tfmi_folder_config_write};
  tfmi_load *l = c->b->s->load;
  char *part = (char *)tfmi_scratch(l, strlen(c->to) + sizeof ".part", 1), *from[2], *to[2];
  tfm_status status = TFM_OK;
  size_t n = strlen(c->to);
  int i;
  while (n > 1 && c->to[n - 1] == '/') n--;
  snprintf(part, n + sizeof ".part", "%.*s.part", (int)n, c->to);
  for (i = 0; i < 2; i++) {
    from[i] = tfmi_join(l, part, name[i]);
    to[i] = tfmi_join(l, c->to, name[i]);
    tfmi_conversion_exists(c, to[i]);
  }
  tfmi_folder_copies(c, tfmi_folder_copy_check);
  tfmi_folder_vocabulary(c, false);
  tfmi_conversion_lines(c);
  tfmi_conversion_folder_make(c, c->to);
  tfmi_conversion_folder_make(c, part);
  for (i = 0; i < 2 && status == TFM_OK; i++) status = tfmi_out_file(from[i], write[i], c);
  if (status == TFM_OK) status = tfmi_conversion_check(c, part);
  for (i = 0; i < 2; i++) {
    if (status == TFM_OK && !tfmi_rename(from[i], to[i]))
      status = tfmi_report(TFM_E_IO, "%s cannot be written; is it a folder?", to[i]);
    unlink(from[i]);
  }
  tfmi_remove_folder(part);
  tfmi_conversion_wrote(c, status);
  tfmi_folder_copies(c, tfmi_folder_copy_write);
  tfmi_folder_vocabulary(c, true);
}

/* What GGUF takes a family for: itself, or one that differs in the order of rows only (Mistral is
   written as a Llama; if it has windows, the comparison above finds out). */
static const tfmi_family *tfmi_family_there(const tfmi_family *f) {
  int i;
  for (i = 0; i < TFMI_COUNT(tfmi_families) && !f->gguf; i++) {
    const tfmi_family *g = &tfmi_families[i];
    bool alike = g->slot == f->slot && g->key == f->key && g->is == (f->is | TFMI_PAIRS);
    if (g->gguf && alike) return g;
  }
  return f->gguf ? f : NULL;
}

static void tfmi_conversion_run(tfmi_model_request *r) {
  tfmi_conversion *c = r->conversion;
  const tfm_net *net = &r->model->net;
  c->b = &r->builder;
  c->there = tfmi_family_there(c->b->f);
  tfmi_builder_measure(c->b);
  if (c->gguf && !c->there)
    tfmi_fail(&r->load, TFM_E_UNSUPPORTED, "GGUF has no architecture for %s", c->b->f->name);
  if (c->gguf && net->experts && tfmi_config_width(net, false))
    tfmi_fail(&r->load, TFM_E_UNSUPPORTED, "GGUF has no word for layers without experts between "
              "others; convert to a folder");
  tfmi_conversion_apart(c);
  tfmi_conversion_type(c);
  tfmi_conversion_items(c);
  tfmi_conversion_chunk(c);
  if (c->gguf) tfmi_conversion_file(c);
  else tfmi_conversion_folder(c);
}

static tfm_status tfmi_conversion_make(tfmi_conversion *c, const char *from) {
  tfm_model_config config;
  tfm_model *model;
  memset(&config, 0, sizeof config);
  config.host = c->config.host;
  config.device = TFM_REF;
  config.threads = c->config.threads;
  model = tfmi_model_make(from, NULL, 0, &config, false, c);
  tfm_model_free(model);
  return model ? TFM_OK : tfmi_error.status;
}

TFM_API tfm_status tfm_model_tensors(const char *path, const tfm_host *host,
                                     tfm_tensor_visitor visitor, void *user) {
  tfmi_conversion c;
  if (!path || !visitor)
    return tfmi_report(TFM_E_ARG, "tfm_model_tensors: path or visitor is NULL");
  memset(&c, 0, sizeof c);
  if (host) c.config.host = *host;
  c.config.visitor = visitor;
  c.config.user = user;
  return tfmi_conversion_make(&c, path);
}

TFM_API tfm_status tfm_convert(const char *from, const char *to, const tfm_convert_config *config) {
  tfm_tokenizer_config vocabulary;
  tfm_tokenizer *tokenizer = NULL;
  tfmi_conversion c;
  tfm_status status;
  if (!from || !to) return tfmi_report(TFM_E_ARG, "tfm_convert: from or to is NULL");
  memset(&c, 0, sizeof c);
  if (config) c.config = *config;
  if ((int)c.config.type < 0 || c.config.type > TFM_Q5_1)
    return tfmi_report(TFM_E_ARG, "tfm_convert: %s cannot be written; expected F32, F16, BF16, "
                       "Q8_0, Q4_0, Q4_1, Q5_0 or Q5_1", tfm_type_name(c.config.type));
  memset(&vocabulary, 0, sizeof vocabulary);
  vocabulary.host = c.config.host;
  c.to = to;
  c.gguf = tfmi_ends_with(to, ".gguf");
  if (c.gguf || tfmi_ends_with(from, ".gguf")) {
    tokenizer = tfm_tokenizer_load(from, &vocabulary);
    if (!tokenizer && c.gguf && tfmi_error.status != TFM_E_IO) return tfmi_error.status;
  }
  c.tokenizer = tokenizer;
  status = tfmi_conversion_make(&c, from);
  tfm_tokenizer_free(tokenizer);
  return status;
}

#if TFMI_COMPILES_COLD
#pragma GCC pop_options
#endif

#ifndef TFM_NO_TRAINING
/* =================================================================================================
   >>train   the backward pass, the optimiser's steps, the trainer
   =================================================================================================

   All weights lie in one arena of floats, matrices first, then vectors, as only matrices decay;
   gradients and the two moments are arenas of the same layout. So the optimiser is two launches,
   and the gradient of anything is found by its distance from the start. tfmi_parameters lists what
   there is; a parameter is one matrix or vector of the tfm_net.

   A pass is >>forward with buffers of its own for every layer, then the same in reverse. `d`
   carries the gradient of the residual stream down through the layers: each branch adds to it
   through its norm. The head runs over some rows at a time, so that logits are never held for
   all. */

enum { TFMI_HEAD_ROWS = 256, TFMI_HEAD_LOGITS = 1 << 22 }; /* as many at a time: at least, about */

typedef struct tfmi_parameter {
  tfmi_slot slot;
  int32_t layer;        /* -1: of the whole network */
  bool bias, frozen;
  int32_t rows, cols;   /* of all experts together; cols 0: a vector of rows */
  tfm_weight *weight;   /* of a matrix */
  const float **vector; /* of a vector */
  int64_t at;           /* in the arenas */
  int32_t experts;      /* that the rows are of; 0: none */
} tfmi_parameter;

typedef struct tfmi_layer_at { /* in the arenas */
  int64_t qkv, out, up, down, router, expert_up, expert_down, shared_gate;
} tfmi_layer_at;

struct tfm_trainer {
  tfmi_heap heap;
  tfm_dev dev;
  tfm_trainer_config config; /* with the defaults filled in */
  const tfmi_family *family;
  tfmi_rotation rotation[2];
  tfm_net net;               /* over the arenas */
  bool tied;
  int32_t bos;               /* -1: none */
  int32_t end[16], end_count; /* as the model's */
  int32_t rows;              /* N = batch * context */
  int64_t step, sequences;
  int64_t total, matrices, trained; /* floats of an arena; of its matrices; that are not frozen */
  int32_t lowest;            /* layer with trained parameters; -1: embeddings too */
  tfmi_drop drop;
  float balance;             /* of the load-balancing loss's gradient, in one pass */
  float beta;                /* of matrices' gradients: 0 in a step's first pass, then 1 */
  size_t list_bytes, host_bytes, device_bytes;
  void *lists, *host_block, *device_block;
  /* host */
  tfmi_parameter *parameter; /* [parameters] */
  tfm_part *part;            /* [max(E, 1)] of the matrix that is being packed */
  int32_t parameters;
  tfmi_layer_at *at;         /* [L] */
  tfmi_buffers *buffers;     /* [L] */
  tfm_kv *kv;                /* [L] */
  float *stage;              /* what comes and goes: at least [max(N, TFMI_STRETCH)] */
  int32_t *ids;              /* [N] */
  uint8_t *packed;           /* the weights' own structures */
  /* device */
  uint8_t *packed_device;
  float *w, *g, *m, *v, *frequencies, *sumsq, *losses, *hits, *weights, *head_stats;
  int32_t *id, *pos, *seq, *target;
  tfm_mat normed, logits;                     /* [N, C], [rows at a time, V] */
  tfm_mat uncapped;                           /* logits before their cap, where they have one */
  float *balance_count;                       /* [2, E] of all layers: slots, and probabilities */
  tfmi_buffers d_slots;                       /* gradients of what experts need; their routing's
                                                 weight is that of the weights */
  tfm_mat d, d_norm, d_qkv, d_attn, d_up, d_act; /* gradients of the layer at hand */
};

/* ---- Parameters ---- */

static unsigned tfmi_part_of_slot(tfmi_slot slot) {
  if (slot >= TFMI_ROUTER) return TFM_EXPERTS;
  if (slot >= TFMI_GATE_UP) return TFM_FEED_FORWARD;
  if (slot >= TFMI_QKV) return TFM_ATTENTION;
  if (slot >= TFMI_FINAL_NORM) return TFM_NORMS;
  return slot == TFMI_HEAD ? TFM_HEAD : TFM_EMBEDDINGS;
}

static bool tfmi_is_frozen(const tfm_trainer *t, const tfmi_parameter *p) {
  bool below = p->slot == TFMI_EMBED || p->slot == TFMI_POSITIONS || p->layer >= 0;
  return (t->config.freeze & tfmi_part_of_slot(p->slot)) != 0 ||
         (below && p->layer < t->config.first_layer && t->config.first_layer > 0);
}

static int64_t tfmi_parameter_values(const tfmi_parameter *p) {
  return (int64_t)p->rows * (p->cols ? p->cols : 1);
}

static void tfmi_parameter_add(tfm_trainer *t, tfmi_parameter p) {
  int64_t values = tfmi_parameter_values(&p);
  p.frozen = tfmi_is_frozen(t, &p);
  t->trained += p.frozen ? 0 : values;
  if (!p.frozen && p.layer < t->lowest && p.slot != TFMI_HEAD && p.slot != TFMI_FINAL_NORM)
    t->lowest = p.layer;
  p.at = t->total;
  t->total += values;
  t->parameter[t->parameters++] = p;
}

static int64_t tfmi_matrix_add(tfm_trainer *t, tfmi_slot slot, int32_t layer, tfm_weight *w,
                               int32_t rows, int32_t cols) {
  tfmi_parameter p = {slot, layer, false, false, rows, cols, w, NULL, 0, 0};
  int64_t at = t->total;
  tfmi_parameter_add(t, p);
  return at;
}

static int64_t tfmi_experts_add(tfm_trainer *t, tfmi_slot slot, int32_t layer, tfm_weight *w,
                                int32_t rows, int32_t cols) {
  int32_t experts = t->net.experts;
  tfmi_parameter p = {slot, layer, false, false, experts * rows, cols, w, NULL, 0, experts};
  int64_t at = t->total;
  tfmi_parameter_add(t, p);
  return at;
}

/* A vector is there when the network had it: the pointer says so. */
static void tfmi_vector_add(tfm_trainer *t, tfmi_slot slot, int32_t layer, bool bias,
                            const float **vector, int32_t rows) {
  tfmi_parameter p = {slot, layer, bias, false, rows, 0, NULL, vector, 0, 0};
  if (slot > TFMI_ROUTER && slot < TFMI_SHARED_ROUTER) p.experts = t->net.experts;
  if (*vector) tfmi_parameter_add(t, p);
}

/* Slots of what is gate and up in one where the family is gated, else up alone. */
static tfmi_slot tfmi_up_slot(const tfm_net *net, const tfm_layer *y) {
  tfmi_slot fused = y->router.rows ? TFMI_SHARED_GATE_UP : TFMI_GATE_UP;
  return net->gated ? fused : (tfmi_slot)((int)fused + 2);
}

static tfmi_slot tfmi_down_slot(const tfm_layer *y) {
  return y->router.rows ? TFMI_SHARED_DOWN : TFMI_DOWN;
}

static void tfmi_layer_matrices(tfm_trainer *t, int32_t i) {
  tfm_net *net = &t->net;
  tfm_layer *y = &net->layer[i];
  tfmi_layer_at *at = &t->at[i];
  int32_t all = net->heads * net->head_width, kv = net->kv_heads * net->head_width;
  at->qkv = tfmi_matrix_add(t, TFMI_QKV, i, &y->qkv, all + 2 * kv, net->width);
  at->out = tfmi_matrix_add(t, TFMI_OUT, i, &y->out, net->width, all);
  if (y->down.cols) {
    at->up = tfmi_matrix_add(t, tfmi_up_slot(net, y), i, &y->up, y->down.cols * (1 + net->gated),
                             net->width);
    at->down = tfmi_matrix_add(t, tfmi_down_slot(y), i, &y->down, net->width, y->down.cols);
  }
  if (!y->router.rows) return;
  at->router = tfmi_matrix_add(t, TFMI_ROUTER, i, &y->router, net->experts, net->width);
  at->expert_up = tfmi_experts_add(t, net->gated ? TFMI_EXPERT_GATE_UP : TFMI_EXPERT_UP, i,
                                   &y->expert_up, net->expert_width * (1 + net->gated), net->width);
  at->expert_down = tfmi_experts_add(t, TFMI_EXPERT_DOWN, i, &y->expert_down, net->width,
                                     net->expert_width);
  if (y->shared_gate.rows)
    at->shared_gate = tfmi_matrix_add(t, TFMI_SHARED_ROUTER, i, &y->shared_gate, 1, net->width);
}

static void tfmi_layer_vectors(tfm_trainer *t, int32_t i) {
  tfm_net *net = &t->net;
  tfm_layer *y = &net->layer[i];
  int32_t all = (net->heads + 2 * net->kv_heads) * net->head_width;
  tfmi_vector_add(t, TFMI_NORM1, i, false, &y->norm1, net->width);
  tfmi_vector_add(t, TFMI_NORM1, i, true, &y->norm1_bias, net->width);
  tfmi_vector_add(t, TFMI_QKV, i, true, &y->qkv_bias, all);
  tfmi_vector_add(t, TFMI_OUT, i, true, &y->out_bias, net->width);
  tfmi_vector_add(t, TFMI_NORM2, i, false, &y->norm2, net->width);
  tfmi_vector_add(t, TFMI_NORM2, i, true, &y->norm2_bias, net->width);
  tfmi_vector_add(t, tfmi_up_slot(net, y), i, true, &y->up_bias, y->down.cols * (1 + net->gated));
  tfmi_vector_add(t, tfmi_down_slot(y), i, true, &y->down_bias, net->width);
  tfmi_vector_add(t, TFMI_POST1, i, false, &y->post1, net->width);
  tfmi_vector_add(t, TFMI_POST2, i, false, &y->post2, net->width);
  tfmi_vector_add(t, TFMI_Q_NORM, i, false, &y->q_norm, net->head_width);
  tfmi_vector_add(t, TFMI_K_NORM, i, false, &y->k_norm, net->head_width);
  tfmi_vector_add(t, TFMI_EXPERT_UP, i, true, &y->expert_up_bias,
                  net->experts * net->expert_width * (1 + net->gated));
  tfmi_vector_add(t, TFMI_EXPERT_DOWN, i, true, &y->expert_down_bias, net->experts * net->width);
}

/* Lists all parameters, in the order of the arenas. */
static void tfmi_parameters(tfm_trainer *t) {
  tfm_net *net = &t->net;
  int32_t i;
  t->parameters = 0;
  t->total = t->trained = 0;
  t->lowest = net->layers;
  tfmi_matrix_add(t, TFMI_EMBED, -1, &net->embed, net->vocabulary, net->width);
  if (net->positions.rows)
    tfmi_matrix_add(t, TFMI_POSITIONS, -1, &net->positions, net->context, net->width);
  if (!t->tied) tfmi_matrix_add(t, TFMI_HEAD, -1, &net->head, net->vocabulary, net->width);
  for (i = 0; i < net->layers; i++) tfmi_layer_matrices(t, i);
  t->matrices = t->total;
  for (i = 0; i < net->layers; i++) tfmi_layer_vectors(t, i);
  tfmi_vector_add(t, TFMI_FINAL_NORM, -1, false, &net->final_norm, net->width);
  tfmi_vector_add(t, TFMI_FINAL_NORM, -1, true, &net->final_norm_bias, net->width);
}

static tfm_mat tfmi_parameter_mat(float *arena, const tfmi_parameter *p) {
  tfm_mat m = {arena + p->at, TFM_F32, p->rows, p->cols, p->cols};
  return m;
}

/* The gradient of a matrix of the network, [rows, cols] at its place in the arena. */
static tfm_mat tfmi_gradient(const tfm_trainer *t, int64_t at, const tfm_weight *w) {
  int32_t rows = w->rows * (w->experts ? w->experts : 1);
  tfm_mat m = {t->g + at, TFM_F32, rows, w->cols, w->cols};
  return m;
}

/* Whether the matrix there is frozen, and so is its bias. */
static bool tfmi_frozen_at(const tfm_trainer *t, int64_t at) {
  int32_t i;
  if (t->trained == t->total) return false;
  for (i = 0; t->parameter[i].at != at; i++) continue;
  return t->parameter[i].frozen;
}

/* ... and of a vector; NULL where there is none. */
static float *tfmi_vector_gradient(const tfm_trainer *t, const float *vector) {
  return vector ? t->g + (vector - t->w) : NULL;
}

/* ---- Packing: again after each update, as tables may keep weights in forms of their own ---- */

static tfm_weight_source tfmi_parameter_source(const tfm_trainer *t, const tfmi_parameter *p) {
  int32_t parts = p->experts ? p->experts : 1, i;
  tfm_weight_source s;
  memset(&s, 0, sizeof s);
  s.parts = t->part;
  s.part_count = parts;
  s.experts = p->experts;
  s.rows = p->rows / parts;
  s.cols = p->cols;
  for (i = 0; i < parts; i++) {
    t->part[i].data = t->w + p->at + (int64_t)i * s.rows * p->cols;
    t->part[i].type = TFM_F32;
    t->part[i].rows = s.rows;
  }
  s.stable = true;
  if (p->slot != TFMI_POSITIONS) s.roles = (unsigned)TFM_ROLE_MATMUL | (unsigned)TFM_ROLE_GRADIENT;
  if (p->slot == TFMI_EMBED || p->slot == TFMI_POSITIONS) s.roles |= (unsigned)TFM_ROLE_GATHER;
  return s;
}

/* Packs all matrices into the blocks; or, while these are not there, adds up what they take. */
static void tfmi_pack_parameters(tfm_trainer *t, size_t *host, size_t *device) {
  const tfm_backend *table = t->dev.table;
  int32_t i;
  *host = *device = 0;
  for (i = 0; i < t->parameters && t->parameter[i].weight; i++) {
    const tfmi_parameter *p = &t->parameter[i];
    tfm_weight_source s = tfmi_parameter_source(t, p);
    tfm_pack_size size = table->pack_size(&t->dev, &s);
    p->weight->rows = s.rows;
    p->weight->cols = s.cols;
    p->weight->experts = s.experts;
    p->weight->roles = s.roles;
    if (t->packed)
      table->pack(&t->dev, p->weight, &s, t->packed + *host, t->packed_device + *device);
    *host += size.host_bytes;
    *device += size.device_bytes;
  }
  if (t->tied) t->net.head = t->net.embed;
}

/* ---- Memory ---- */

static float *tfmi_take_floats(tfmi_arena *a, int64_t count) {
  return TFMI_NEW(float, tfmi_take(a, (uint64_t)count, sizeof(float)));
}

/* What one layer keeps from forward for backward; `in` is the out of the layer below. */
static tfmi_buffers tfmi_take_kept(tfm_trainer *t, tfmi_arena *a, tfm_mat in) {
  const tfm_net *net = &t->net;
  tfm_type type = t->dev.table->activation;
  int32_t n = t->rows, wide = tfmi_hidden_width(net);
  tfmi_buffers b;
  memset(&b, 0, sizeof b);
  b.in = in;
  b.norm1 = tfmi_take_mat(a, type, n, net->width);
  b.qkv = tfmi_take_mat(a, type, n, (net->heads + 2 * net->kv_heads) * net->head_width);
  b.qk = b.qkv; /* its first columns; there is no memory yet when sizes are told */
  b.qk.cols = (net->heads + net->kv_heads) * net->head_width;
  if (net->layer[0].q_norm) {
    b.qk = tfmi_take_mat(a, type, n, (net->heads + net->kv_heads) * net->head_width);
    b.q_stats = tfmi_take_floats(a, 2 * (int64_t)n * net->heads);
    b.k_stats = tfmi_take_floats(a, 2 * (int64_t)n * net->kv_heads);
  }
  if (net->layer[0].post1) {
    b.branch1 = tfmi_take_mat(a, type, n, net->width);
    b.branch2 = tfmi_take_mat(a, type, n, net->width);
    b.post_stats1 = tfmi_take_floats(a, 2 * (int64_t)n);
    b.post_stats2 = tfmi_take_floats(a, 2 * (int64_t)n);
  }
  tfmi_take_slots(a, &b, net, type, n);
  b.routing.count = t->balance_count;
  b.routing.mass = t->balance_count ? t->balance_count + net->experts : NULL;
  b.attn = tfmi_take_mat(a, type, n, net->heads * net->head_width);
  b.mid = tfmi_take_mat(a, type, n, net->width);
  b.norm2 = tfmi_take_mat(a, type, n, net->width);
  b.up = tfmi_take_mat(a, type, n, wide * (1 + net->gated));
  b.act = tfmi_take_mat(a, type, n, wide);
  b.out = tfmi_take_mat(a, type, n, net->width);
  b.stats1 = tfmi_take_floats(a, 2 * (int64_t)n);
  b.stats2 = tfmi_take_floats(a, 2 * (int64_t)n);
  b.lse = tfmi_take_floats(a, (int64_t)n * net->heads);
  return b;
}

/* What one layer keeps when the rest is computed again: its result. */
static tfmi_buffers tfmi_take_result(tfm_trainer *t, tfmi_arena *a, tfm_mat in) {
  tfmi_buffers b = t->buffers[0];
  b.in = in;
  b.out = tfmi_take_mat(a, t->dev.table->activation, t->rows, t->net.width);
  return b;
}

/* Keys and values of a pass are its own rows. */
static tfm_kv tfmi_kept_kv(const tfm_net *net, const tfmi_buffers *b) {
  int32_t q = net->heads * net->head_width, k = net->kv_heads * net->head_width;
  tfm_kv kv;
  memset(&kv, 0, sizeof kv);
  kv.type = b->qkv.type;
  kv.heads = net->kv_heads;
  kv.width = net->head_width;
  kv.key_rows = tfmi_columns(b->qk, q, k);
  kv.value_rows = tfmi_columns(b->qkv, q + k, k);
  return kv;
}

static void tfmi_take_gradients(tfm_trainer *t, tfmi_arena *a) {
  const tfm_net *net = &t->net;
  tfm_type type = t->dev.table->activation;
  int32_t n = t->rows, wide = tfmi_hidden_width(net);
  t->d = tfmi_take_mat(a, type, n, net->width);
  t->d_norm = tfmi_take_mat(a, type, n, net->width);
  t->d_qkv = tfmi_take_mat(a, type, n, (net->heads + 2 * net->kv_heads) * net->head_width);
  t->d_attn = tfmi_take_mat(a, type, n, net->heads * net->head_width);
  t->d_act = tfmi_take_mat(a, type, n, wide);
  t->d_up = net->gated ? tfmi_take_mat(a, type, n, 2 * wide) : t->d_act;
  if (!net->experts) return;
  tfmi_take_slots(a, &t->d_slots, net, type, n);
  if (!net->gated) t->d_slots.slots_up = t->d_slots.slots_act;
}

static void tfmi_take_device(tfm_trainer *t, tfmi_arena *a, size_t packed) {
  const tfm_net *net = &t->net;
  tfm_type type = t->dev.table->activation;
  tfm_mat in;
  int32_t i;
  t->w = tfmi_take_floats(a, t->total);
  t->g = tfmi_take_floats(a, t->total);
  t->m = tfmi_take_floats(a, t->total);
  t->v = tfmi_take_floats(a, t->total);
  t->packed_device = (uint8_t *)tfmi_take(a, packed, 1);
  t->dev.work = tfmi_take(a, t->dev.table->work_bytes(&t->dev, net, t->rows, t->config.batch,
                                                      t->config.context), 1);
  t->frequencies = tfmi_take_floats(a, net->head_width);
  t->sumsq = tfmi_take_floats(a, 1);
  t->losses = tfmi_take_floats(a, t->rows);
  t->hits = tfmi_take_floats(a, t->rows);
  t->weights = tfmi_take_floats(a, t->rows);
  t->head_stats = tfmi_take_floats(a, 2 * (int64_t)t->rows);
  t->id = (int32_t *)tfmi_take(a, (uint64_t)t->rows, sizeof(int32_t));
  t->pos = (int32_t *)tfmi_take(a, (uint64_t)t->rows, sizeof(int32_t));
  t->seq = (int32_t *)tfmi_take(a, (uint64_t)t->rows, sizeof(int32_t));
  t->target = (int32_t *)tfmi_take(a, (uint64_t)t->rows, sizeof(int32_t));
  t->normed = tfmi_take_mat(a, type, t->rows, net->width);
  t->logits = tfmi_take_mat(a, TFM_F32,
                            tfmi_min32(t->rows, tfmi_max32(TFMI_HEAD_ROWS,
                                                           TFMI_HEAD_LOGITS / net->vocabulary)),
                            net->vocabulary);
  if (net->logit_softcap != 0)
    t->uncapped = tfmi_take_mat(a, TFM_F32, t->logits.rows, net->vocabulary);
  if (net->experts) t->balance_count = tfmi_take_floats(a, 2 * (int64_t)net->experts);
  tfmi_take_gradients(t, a);
  in = tfmi_take_mat(a, type, t->rows, net->width);
  for (i = 0; i < net->layers; i++) {
    tfmi_buffers b = i && t->config.recompute ? tfmi_take_result(t, a, in)
                                              : tfmi_take_kept(t, a, in);
    in = b.out;
    t->buffers[i] = b;
    if (a->base) t->kv[i] = tfmi_kept_kv(net, &b);
  }
}

/* Lists of L entries come first: what follows is measured with their help, in a plan too. */
static void tfmi_take_lists(tfm_trainer *t, tfmi_arena *a) {
  uint64_t layers = (uint64_t)t->net.layers;
  t->net.layer = TFMI_NEW(tfm_layer, tfmi_take(a, layers, sizeof(tfm_layer)));
  t->parameter = TFMI_NEW(tfmi_parameter, tfmi_take(a, 5 + 24 * layers, sizeof(tfmi_parameter)));
  t->part = TFMI_NEW(tfm_part, tfmi_take(a, (uint64_t)tfmi_max32(t->net.experts, 1),
                                         sizeof(tfm_part)));
  t->at = TFMI_NEW(tfmi_layer_at, tfmi_take(a, layers, sizeof(tfmi_layer_at)));
  t->buffers = TFMI_NEW(tfmi_buffers, tfmi_take(a, layers, sizeof(tfmi_buffers)));
  t->kv = TFMI_NEW(tfm_kv, tfmi_take(a, layers, sizeof(tfm_kv)));
}

static void tfmi_take_host(tfm_trainer *t, tfmi_arena *a, size_t packed) {
  int32_t i, stage = tfmi_max32(tfmi_max32(t->rows, TFMI_STRETCH), 2 * t->net.experts);
  for (i = 0; i < t->parameters; i++) /* export turns matrices of layers 16 columns at a time */
    if (t->parameter[i].layer >= 0) stage = tfmi_max32(stage, TFMI_LANES * t->parameter[i].rows);
  t->stage = tfmi_take_floats(a, stage);
  t->ids = (int32_t *)tfmi_take(a, (uint64_t)t->rows, sizeof(int32_t));
  t->packed = (uint8_t *)tfmi_take(a, packed, 1);
}

static char *tfmi_aligned(void *block) {
  return block ? (char *)block + (64 - (uintptr_t)block % 64) % 64 : NULL;
}

static tfm_status tfmi_trainer_lists(tfm_trainer *t) {
  tfmi_arena a = {NULL, 0, false};
  tfmi_take_lists(t, &a);
  t->list_bytes = a.used + 64;
  t->lists = tfmi_heap_get(&t->heap, t->list_bytes);
  if (!t->lists) return tfmi_error.status;
  a.base = tfmi_aligned(t->lists);
  a.used = 0;
  tfmi_take_lists(t, &a);
  return TFM_OK;
}

/* Measures, charges, and, unless the heap is dry, allocates. */
static tfm_status tfmi_trainer_memory(tfm_trainer *t) {
  tfmi_arena host = {NULL, 0, false}, device = {NULL, 0, false};
  size_t packed, packed_device;
  tfm_status status;
  tfmi_pack_parameters(t, &packed, &packed_device);
  tfmi_take_host(t, &host, packed);
  tfmi_take_device(t, &device, packed_device);
  if (host.overflow || device.overflow)
    return tfmi_report(TFM_E_MEMORY, "trainer: the model and %d rows of activations are more than "
                       "the address space holds", (int)t->rows);
  status = tfmi_heap_charge(&t->heap, device.used + TFMI_SLACK);
  if (status != TFM_OK) return status;
  if (t->heap.dry) return tfmi_heap_charge(&t->heap, host.used + 64);
  t->host_block = tfmi_heap_get(&t->heap, t->host_bytes = host.used + 64);
  if (!t->host_block) return tfmi_error.status;
  t->device_block = t->dev.table->alloc(&t->dev, t->device_bytes = device.used);
  if (!t->device_block)
    return tfmi_report(TFM_E_MEMORY, "out of memory: device %s refused %llu bytes for training",
                       t->dev.table->name, (unsigned long long)device.used);
  host.base = tfmi_aligned(t->host_block);
  device.base = (char *)t->device_block;
  host.used = device.used = 0;
  tfmi_take_host(t, &host, packed);
  tfmi_take_device(t, &device, packed_device);
  return TFM_OK;
}

/* ---- One pass forward and back ---- */

typedef struct tfmi_lesson { /* of one pass, or of several; weights may be NULL */
  const int32_t *tokens, *targets;
  const float *weights;
} tfmi_lesson;

/* Pass number i of a batch goes to the device. */
static void tfmi_batch_put(tfm_trainer *t, const tfmi_lesson *b, int32_t i) {
  size_t bytes = (size_t)t->rows * sizeof(int32_t);
  int64_t at = (int64_t)i * t->rows;
  t->dev.table->put(&t->dev, t->id, b->tokens + at, bytes);
  t->dev.table->put(&t->dev, t->target, b->targets + at, bytes);
  if (b->weights) t->dev.table->put(&t->dev, t->weights, b->weights + at, bytes);
}

/* Rows are known by the number of their sequence since training began: dropout draws by it. */
static void tfmi_sequences_put(tfm_trainer *t, int32_t pass) {
  int64_t first = t->sequences + (int64_t)pass * t->config.batch;
  int32_t i;
  for (i = 0; i < t->rows; i++)
    t->ids[i] = (int32_t)((first + i / t->config.context) & INT32_MAX);
  t->dev.table->put(&t->dev, t->seq, t->ids, (size_t)t->rows * sizeof *t->ids);
}

static tfm_rows tfmi_batch_rows(const tfm_trainer *t) {
  tfm_rows rows;
  rows.n = t->rows;
  rows.id = t->id;
  rows.pos = t->pos;
  rows.seq = t->seq;
  return rows;
}

static tfmi_pass tfmi_train_pass(tfm_trainer *t, bool learn) {
  tfmi_pass p;
  memset(&p, 0, sizeof p);
  p.dev = &t->dev;
  p.net = &t->net;
  p.kv = t->kv;
  p.rows = tfmi_batch_rows(t);
  p.kept = t->buffers;
  p.buffers = t->buffers[0];
  p.drop = learn ? &t->drop : NULL;
  p.host_cancel = t->heap.host.cancel;
  return p;
}

/* The rows through all layers, and what their backward needs kept. False: cancelled. */
static bool tfmi_train_forward(tfm_trainer *t, bool learn) {
  tfmi_pass p = tfmi_train_pass(t, learn);
  if (!tfmi_forward(&p)) return false;
  tfmi_apply_norm(&p, t->normed, p.buffers.out, t->net.final_norm, t->net.final_norm_bias,
                  t->head_stats);
  return true;
}

/* What layers share was overwritten by those above: the same once more. */
static void tfmi_train_again(tfm_trainer *t, int32_t layer) {
  tfmi_pass p = tfmi_train_pass(t, true);
  p.buffers = t->buffers[layer];
  p.buffers.routing.count = p.buffers.routing.mass = NULL; /* the balance counts a layer once */
  p.again = true;
  tfmi_attention(&p, layer);
  tfmi_feed_forward(&p, layer);
}

typedef struct tfmi_loss { /* what a pass makes of its losses */
  float scale;    /* of their gradients: 1 / the sum of all weights */
  bool weighted;  /* by t->weights */
  bool learn;     /* gradients are wanted */
} tfmi_loss;

/* Rows [first, first + n) through the head: losses and hits; and, when learning, the head's
   gradient and what it leaves in d_norm. */
static void tfmi_train_head(tfm_trainer *t, int32_t first, int32_t n, const tfmi_loss *how) {
  tfm_dev *d = &t->dev;
  int64_t at = t->parameter[t->tied ? 0 : t->net.positions.rows ? 2 : 1].at;
  tfm_mat h = tfmi_rows_of(t->normed, first, n), logits = tfmi_rows_of(t->logits, 0, n);
  tfm_epilogue e;
  memset(&e, 0, sizeof e);
  e.softcap = t->net.logit_softcap;
  e.aux = t->uncapped;
  e.aux.rows = n;
  TFMI_OP(d, matmul)(d, logits, h, &t->net.head, &e);
  TFMI_OP(d, loss)(d, t->losses + first, t->hits + first, logits, t->target + first,
                   how->weighted ? t->weights + first : NULL, how->scale);
  if (!how->learn) return;
  if (e.softcap != 0) TFMI_OP(d, epilogue_bwd)(d, logits, logits, &e);
  if (!tfmi_frozen_at(t, at))
    TFMI_OP(d, matmul_dw)(d, tfmi_gradient(t, at, &t->net.head), NULL, logits, h,
                          first ? 1 : t->beta);
  TFMI_OP(d, matmul_dx)(d, tfmi_rows_of(t->d_norm, first, n), logits, &t->net.head, 0, NULL);
}

static void tfmi_train_loss(tfm_trainer *t, const tfmi_loss *how) {
  int32_t first;
  for (first = 0; first < t->rows; first += t->logits.rows)
    tfmi_train_head(t, first, tfmi_min32(t->logits.rows, t->rows - first), how);
}

/* d += the gradient of d_norm through a norm whose input was x. */
static void tfmi_norm_back(tfm_trainer *t, tfm_mat residual, tfm_mat x, const float *w,
                           const float *b, const float *stats) {
  tfm_dev *d = &t->dev;
  TFMI_OP(d, norm_bwd)(d, t->d, tfmi_vector_gradient(t, w), tfmi_vector_gradient(t, b), t->d_norm,
                       x, w, residual, stats, &t->net.norm);
}

/* The gradients of y = x W^T + bias; dx = beta dx + ... */
static void tfmi_project_back_add(tfm_trainer *t, tfm_mat dx, tfm_mat dy, tfm_mat x, int64_t at,
                                  const tfm_weight *w, const float *bias, float beta,
                                  const tfm_epilogue *before) {
  tfm_dev *d = &t->dev;
  if (!tfmi_frozen_at(t, at))
    TFMI_OP(d, matmul_dw)(d, tfmi_gradient(t, at, w), tfmi_vector_gradient(t, bias), dy, x,
                          t->beta);
  TFMI_OP(d, matmul_dx)(d, dx, dy, w, beta, before);
}

static void tfmi_project_back(tfm_trainer *t, tfm_mat dx, tfm_mat dy, tfm_mat x, int64_t at,
                              const tfm_weight *w, const float *bias) {
  tfmi_project_back_add(t, dx, dy, x, at, w, bias, 0, NULL);
}

/* The gradient of a branch into the residual stream, whose own is d: without a norm or a dropout at
   its end the same. */
static tfm_mat tfmi_branch_gradient(tfm_trainer *t, int which, int32_t layer, const float *post,
                                    tfm_mat branch, const float *stats) {
  tfm_dev *d = &t->dev;
  tfm_rows rows = tfmi_batch_rows(t);
  tfm_dropout dropout = tfmi_drop_at(&t->drop, &rows, which, layer);
  tfm_mat dy = t->d;
  if (post) {
    TFMI_OP(d, norm_bwd)(d, t->d_norm, tfmi_vector_gradient(t, post), NULL, dy, branch, post,
                         tfmi_absent(), stats, &t->net.norm);
    dy = t->d_norm;
  }
  if (dropout.rate == 0) return dy;
  tfmi_drop_out(d, t->d_norm, dy, dropout);
  return t->d_norm;
}

/* d_norm = beta d_norm + what down(act(up(norm2))) passes on of dy. */
static void tfmi_hidden_back(tfm_trainer *t, int32_t i, tfm_mat dy, float beta) {
  tfm_dev *d = &t->dev;
  const tfm_layer *layer = &t->net.layer[i];
  const tfmi_buffers *b = &t->buffers[i];
  tfm_mat act = tfmi_columns(b->act, 0, layer->down.cols), up = b->up;
  tfm_mat d_act = tfmi_columns(t->d_act, 0, layer->down.cols), d_up = t->d_up;
  tfm_epilogue e;
  up.cols = d_up.cols = layer->up.rows;
  memset(&e, 0, sizeof e);
  e.act = t->net.act;
  e.aux = up;
  tfmi_project_back_add(t, d_act, dy, act, t->at[i].down, &layer->down, layer->down_bias, 0,
                        t->net.gated ? NULL : &e);
  if (t->net.gated) TFMI_OP(d, glu_bwd)(d, d_up, d_act, up, t->net.act);
  tfmi_project_back_add(t, t->d_norm, d_up, b->norm2, t->at[i].up, &layer->up, layer->up_bias, beta,
                        NULL);
}

/* The gradients of y = x W_e^T + bias_e of the slots' experts. */
static void tfmi_experts_project_back(tfm_trainer *t, tfm_mat dx, tfm_mat dy, tfm_mat x, int64_t at,
                                      const tfm_weight *w, const float *bias,
                                      const tfm_routing *r, bool spread) {
  tfm_dev *d = &t->dev;
  if (!tfmi_frozen_at(t, at)) {
    TFMI_OP(d, moe_dw)(d, tfmi_gradient(t, at, w), dy, x, r, spread);
    if (bias) TFMI_OP(d, moe_bias_bwd)(d, tfmi_vector_gradient(t, bias), dy, r);
  }
  TFMI_OP(d, moe_dx)(d, dx, dy, w, r, spread);
}

/* d_norm = what the experts and their router pass on of d, the balance's gradient included. */
static void tfmi_experts_back(tfm_trainer *t, int32_t i) {
  tfm_dev *d = &t->dev;
  const tfm_net *net = &t->net;
  const tfm_layer *layer = &net->layer[i];
  const tfmi_buffers *b = &t->buffers[i], *g = &t->d_slots;
  const tfm_routing *r = &b->routing;
  tfm_epilogue e;
  memset(&e, 0, sizeof e);
  e.act = net->act;
  e.aux = b->slots_up;
  TFMI_OP(d, combine_bwd)(d, g->slots_out, g->routing.weight, t->d, b->slots_out, r);
  tfmi_experts_project_back(t, g->slots_act, g->slots_out, b->slots_act, t->at[i].expert_down,
                            &layer->expert_down, layer->expert_down_bias, r, false);
  if (net->gated) TFMI_OP(d, glu_bwd)(d, g->slots_up, g->slots_act, b->slots_up, net->act);
  else TFMI_OP(d, epilogue_bwd)(d, g->slots_up, g->slots_act, &e);
  tfmi_experts_project_back(t, t->d_norm, g->slots_up, b->norm2, t->at[i].expert_up,
                            &layer->expert_up, layer->expert_up_bias, r, true);
  TFMI_OP(d, route_bwd)(d, g->router, g->routing.weight, r, &net->moe, t->balance, NULL);
  tfmi_project_back_add(t, t->d_norm, g->router, b->norm2, t->at[i].router, &layer->router, NULL, 1,
                        NULL);
  if (!layer->shared_gate.rows) return;
  TFMI_OP(d, add_gated_bwd)(d, g->shared, g->gate, t->d, b->shared, b->gate);
  tfmi_project_back_add(t, t->d_norm, g->gate, b->norm2, t->at[i].shared_gate, &layer->shared_gate,
                        NULL, 1, NULL);
  tfmi_hidden_back(t, i, g->shared, 1);
}

/* out = mid + down(act(up(norm(mid)))), backwards: d is out's gradient and becomes mid's. */
static void tfmi_feed_forward_back(tfm_trainer *t, int32_t i) {
  const tfm_layer *layer = &t->net.layer[i];
  const tfmi_buffers *b = &t->buffers[i];
  if (layer->router.rows) tfmi_experts_back(t, i);
  else
    tfmi_hidden_back(t, i, tfmi_branch_gradient(t, TFMI_DROP_DOWN, i, layer->post2, b->branch2,
                                                b->post_stats2), 0);
  tfmi_norm_back(t, t->d, b->mid, layer->norm2, layer->norm2_bias, b->stats2);
}

/* What became of qkv's queries and keys in qk, backwards, in d_qkv. */
static void tfmi_queries_and_keys_back(tfm_trainer *t, int32_t i) {
  tfm_dev *d = &t->dev;
  const tfm_net *net = &t->net;
  const tfm_layer *layer = &net->layer[i];
  const tfmi_buffers *b = &t->buffers[i];
  int32_t q = net->heads * net->head_width, k = net->kv_heads * net->head_width;
  tfm_mat dq = tfmi_columns(t->d_qkv, 0, q), dk = tfmi_columns(t->d_qkv, q, k);
  tfm_rope back = layer->rope;
  tfm_norm norm = net->head_norm;
  back.inverse = true;
  if (back.rot) TFMI_OP(d, rope)(d, tfmi_columns(t->d_qkv, 0, q + k), t->pos, &back);
  if (!layer->q_norm) return;
  norm.groups = net->heads;
  TFMI_OP(d, norm_bwd)(d, dq, tfmi_vector_gradient(t, layer->q_norm), NULL, dq,
                       tfmi_columns(b->qkv, 0, q), layer->q_norm, tfmi_absent(), b->q_stats, &norm);
  norm.groups = net->kv_heads;
  TFMI_OP(d, norm_bwd)(d, dk, tfmi_vector_gradient(t, layer->k_norm), NULL, dk,
                       tfmi_columns(b->qkv, q, k), layer->k_norm, tfmi_absent(), b->k_stats, &norm);
}

/* mid = in + out(attention(norm(in))), backwards: d is mid's gradient and becomes in's. */
static void tfmi_attention_back(tfm_trainer *t, int32_t i) {
  tfm_dev *d = &t->dev;
  const tfm_net *net = &t->net;
  const tfm_layer *layer = &net->layer[i];
  const tfmi_buffers *b = &t->buffers[i];
  int32_t q = net->heads * net->head_width, k = net->kv_heads * net->head_width;
  tfm_rows rows = tfmi_batch_rows(t);
  tfm_attn attn = layer->attn;
  tfm_mat dy = tfmi_branch_gradient(t, TFMI_DROP_OUT, i, layer->post1, b->branch1, b->post_stats1);
  attn.dropout = tfmi_drop_at(&t->drop, &rows, TFMI_DROP_ATTN, i);
  tfmi_project_back(t, t->d_attn, dy, b->attn, t->at[i].out, &layer->out, layer->out_bias);
  TFMI_OP(d, attn_bwd)(d, tfmi_columns(t->d_qkv, 0, q), tfmi_columns(t->d_qkv, q, k),
                       tfmi_columns(t->d_qkv, q + k, k), t->d_attn, b->attn,
                       tfmi_columns(b->qk, 0, q), &t->kv[i], &rows, b->lse, &attn);
  tfmi_queries_and_keys_back(t, i);
  tfmi_project_back(t, t->d_norm, t->d_qkv, b->norm1, t->at[i].qkv, &layer->qkv, layer->qkv_bias);
  tfmi_norm_back(t, t->d, b->in, layer->norm1, layer->norm1_bias, b->stats1);
}

/* All gradients of a batch whose losses are known; d_norm holds that of the final norm's result. */
static void tfmi_train_back(tfm_trainer *t) {
  tfm_dev *d = &t->dev;
  const tfm_net *net = &t->net;
  tfm_rows rows = tfmi_batch_rows(t);
  tfm_mat positions = tfmi_absent();
  int32_t i;
  tfmi_norm_back(t, tfmi_absent(), t->buffers[net->layers - 1].out, net->final_norm,
                 net->final_norm_bias, t->head_stats);
  for (i = net->layers - 1; i >= 0 && i >= t->lowest; i--) {
    if (t->config.recompute && i < net->layers - 1) tfmi_train_again(t, i);
    tfmi_feed_forward_back(t, i);
    tfmi_attention_back(t, i);
  }
  if (t->lowest >= 0) return;
  if (t->drop.rate[TFMI_DROP_EMBED] > 0)
    tfmi_drop_out(d, t->d, t->d, tfmi_drop_at(&t->drop, &rows, TFMI_DROP_EMBED, -1));
  if (net->positions.rows) positions = tfmi_gradient(t, t->parameter[1].at, &net->positions);
  TFMI_OP(d, embed_bwd)(d, tfmi_gradient(t, 0, &net->embed), positions, t->d, &rows,
                        net->embed_scale);
}

/* ---- Steps ---- */

/* The learning rate of step s, counted from 0. */
static float tfmi_learning_rate(const tfm_trainer_config *c, int64_t s) {
  double whole = c->steps - c->warmup, done = whole > 0 ? (double)(s - c->warmup) / whole : 1, left;
  if (s < c->warmup) return c->lr * (float)((double)(s + 1) / c->warmup);
  if (done > 1) done = 1;
  left = 1; /* of the way from min_lr to lr */
  if (c->schedule == TFM_LINEAR) left = 1 - done;
  if (c->schedule == TFM_COSINE) left = 0.5 + 0.5 * cos(3.14159265358979323846 * done);
  if (c->schedule == TFM_WSD && s > c->steps - c->decay_steps)
    left = s < c->steps ? (double)(c->steps - s) / c->decay_steps : 0;
  return c->min_lr + (c->lr - c->min_lr) * (float)left;
}

static tfm_status tfmi_token_check(const tfm_trainer *t, const tfmi_lesson *b, int64_t i) {
  int32_t vocabulary = t->net.vocabulary, token = b->tokens[i], target = b->targets[i];
  if (token < 0 || token >= vocabulary)
    return tfmi_report(TFM_E_ARG, "trainer: token %lld is %d; expected 0 to %d", (long long)i,
                       (int)token, (int)vocabulary - 1);
  if (target != -100 && (target < 0 || target >= vocabulary))
    return tfmi_report(TFM_E_ARG, "trainer: target %lld is %d; expected 0 to %d, or -100",
                       (long long)i, (int)target, (int)vocabulary - 1);
  if (b->weights && !(b->weights[i] >= 0 && b->weights[i] <= FLT_MAX))
    return tfmi_report(TFM_E_ARG, "trainer: weight %lld is %g; expected 0 or more", (long long)i,
                       (double)b->weights[i]);
  return TFM_OK;
}

/* Checks n rows; counts the targets, and sums up their weights. */
static tfm_status tfmi_batch_check(const tfm_trainer *t, const tfmi_lesson *b, int64_t n,
                                   int64_t *counted, double *weight) {
  int64_t i;
  *counted = 0;
  *weight = 0;
  if (!b->tokens || !b->targets)
    return tfmi_report(TFM_E_ARG, "trainer: tokens or targets are NULL");
  for (i = 0; i < n; i++) {
    tfm_status status = tfmi_token_check(t, b, i);
    double one = b->targets[i] == -100 ? 0 : b->weights ? (double)b->weights[i] : 1;
    if (status != TFM_OK) return status;
    *counted += one > 0;
    *weight += one;
  }
  if (*counted == 0) return tfmi_report(TFM_E_ARG, "trainer: every target is -100 or of weight 0");
  return TFM_OK;
}

/* The load-balancing loss of the last pass: E times the sum over experts of their share of the rows
   times their mean probability, over all layers that have them. */
static double tfmi_balance_back(tfm_trainer *t) {
  int32_t experts = t->net.experts, e;
  double sum = 0, slots = 0;
  if (!experts) return 0;
  t->dev.table->get(&t->dev, t->stage, t->balance_count, 2 * (size_t)experts * sizeof *t->stage);
  for (e = 0; e < experts; e++) slots += (double)t->stage[e];
  for (e = 0; e < experts; e++) sum += (double)t->stage[e] * (double)t->stage[experts + e];
  slots /= t->net.experts_used;
  return slots > 0 ? experts * sum / (slots * slots) : 0;
}

static double tfmi_sum_back(tfm_trainer *t, const float *device) {
  double sum = 0;
  int32_t i;
  t->dev.table->get(&t->dev, t->stage, device, (size_t)t->rows * sizeof *t->stage);
  for (i = 0; i < t->rows; i++) sum += (double)t->stage[i];
  return sum;
}

static tfm_status tfmi_trainer_sync(tfm_trainer *t) {
  tfm_dev *d = &t->dev;
  tfm_status status = d->table->sync(d);
  if (status == TFM_OK) return TFM_OK;
  return tfmi_report(status, "device %s: %s", d->table->name, d->message);
}

/* Gradients begin at 0, but for those that the first product of a step overwrites. */
static void tfmi_gradients_clear(tfm_trainer *t) {
  int32_t i;
  for (i = 0; i < t->parameters; i++) {
    const tfmi_parameter *p = &t->parameter[i];
    bool gathered = p->slot == TFMI_POSITIONS || (p->slot == TFMI_EMBED && !t->tied);
    if (p->cols == 0 || p->experts || gathered)
      t->dev.table->zero(&t->dev, t->g + p->at,
                         (size_t)tfmi_parameter_values(p) * sizeof *t->g);
  }
}

/* Runs `passes` batches: sums in out, and, when learning, the mean's gradient in g. */
static tfm_status tfmi_train_passes(tfm_trainer *t, const tfmi_lesson *batch, int32_t passes,
                                    bool learn, tfm_step *out) {
  tfm_dev *d = &t->dev;
  tfmi_loss how = {0, batch->weights != NULL, learn};
  tfm_status status;
  double weight;
  int32_t i;
  memset(out, 0, sizeof *out);
  status = tfmi_batch_check(t, batch, (int64_t)passes * t->rows, &out->targets, &weight);
  if (status != TFM_OK) return status;
  how.scale = (float)(1.0 / weight);
  t->balance = t->config.balance / (float)passes;
  if (learn) tfmi_gradients_clear(t);
  for (i = 0; i < passes; i++) {
    t->beta = i ? 1.0f : 0.0f;
    tfmi_batch_put(t, batch, i);
    if (t->net.experts)
      d->table->zero(d, t->balance_count, 2 * (size_t)t->net.experts * sizeof(float));
    tfmi_sequences_put(t, i);
    if (!tfmi_train_forward(t, learn))
      return tfmi_report(TFM_E_CANCELLED, "training was cancelled");
    tfmi_train_loss(t, &how);
    if (learn) tfmi_train_back(t);
    out->loss += tfmi_sum_back(t, t->losses);
    out->accuracy += tfmi_sum_back(t, t->hits);
    out->balance += tfmi_balance_back(t) / passes;
  }
  out->loss /= weight;
  out->accuracy /= weight;
  return tfmi_trainer_sync(t);
}

/* The next range of the arenas that is trained, from *begin on, all matrices or all vectors or
   (mixed) both; false: there is none. */
static bool tfmi_trained_range(const tfm_trainer *t, bool mixed, int64_t *begin, int64_t *end) {
  int32_t i;
  bool found = false;
  for (i = 0; i < t->parameters; i++) {
    const tfmi_parameter *p = &t->parameter[i];
    if (p->at < *begin) continue;
    if (found && (p->frozen || (!mixed && p->at == t->matrices))) return true;
    if (p->frozen) continue;
    if (!found) *begin = p->at;
    found = true;
    *end = p->at + tfmi_parameter_values(p);
  }
  return found;
}

/* Of all gradients that count. */
static float tfmi_gradient_square(tfm_trainer *t) {
  tfm_dev *d = &t->dev;
  int64_t begin, end;
  float square = 0;
  d->table->zero(d, t->sumsq, sizeof *t->sumsq);
  for (begin = 0; tfmi_trained_range(t, true, &begin, &end); begin = end)
    TFMI_OP(d, sumsq)(d, t->sumsq, t->g + begin, TFM_F32, end - begin);
  d->table->get(d, &square, t->sumsq, sizeof square);
  return square;
}

/* w moves along g, and is packed again. */
static void tfmi_train_update(tfm_trainer *t, float lr) {
  const tfm_trainer_config *c = &t->config;
  tfm_dev *d = &t->dev;
  tfm_adamw p = {lr, c->beta1, c->beta2, c->eps, c->decay, c->clip, 0};
  int64_t begin, end;
  size_t host, device;
  p.step = (int32_t)(t->step < INT32_MAX ? t->step + 1 : INT32_MAX);
  for (begin = 0; tfmi_trained_range(t, false, &begin, &end); begin = end) {
    p.decay = begin < t->matrices ? c->decay : 0;
    TFMI_OP(d, adamw)(d, t->w + begin, TFM_F32, t->w + begin, t->m + begin, t->v + begin,
                      t->g + begin, TFM_F32, end - begin, t->sumsq, &p);
  }
  tfmi_pack_parameters(t, &host, &device);
}

TFM_API tfm_status tfm_trainer_step(tfm_trainer *trainer, const int32_t *tokens,
                                    const int32_t *targets, const float *weights, tfm_step *out) {
  tfmi_lesson batch = {tokens, targets, weights};
  tfm_trainer *t = trainer;
  tfm_step s;
  tfm_status status;
  float square;
  if (!t) return tfmi_null_object("tfm_trainer_step");
  status = tfmi_train_passes(t, &batch, t->config.accumulate, true, &s);
  if (status != TFM_OK) return status;
  square = tfmi_gradient_square(t);
  s.gradient_norm = sqrtf(square);
  s.lr = tfmi_learning_rate(&t->config, t->step);
  s.skipped = !isfinite(square) || !isfinite(s.loss);
  if (s.skipped) {
    tfmi_log(&t->heap.host, TFM_LOG_WARNING, "step %lld is skipped: loss %g, gradient norm %g",
             (long long)t->step + 1, s.loss, (double)s.gradient_norm);
  } else {
    tfmi_train_update(t, s.lr);
    t->step++;
  }
  t->sequences += (int64_t)t->config.accumulate * t->config.batch;
  s.step = t->step;
  if (out) *out = s;
  return tfmi_trainer_sync(t);
}

TFM_API tfm_status tfm_trainer_eval(tfm_trainer *trainer, const int32_t *tokens,
                                    const int32_t *targets, const float *weights, tfm_step *out) {
  tfmi_lesson batch = {tokens, targets, weights};
  tfm_step s;
  tfm_status status;
  if (!trainer) return tfmi_null_object("tfm_trainer_eval");
  status = tfmi_train_passes(trainer, &batch, 1, false, &s);
  s.step = trainer->step;
  if (status == TFM_OK && out) *out = s;
  return status;
}

/* ---- Creation ---- */

static tfm_status tfmi_bad_training(const char *field, double value, const char *expected) {
  return tfmi_report(TFM_E_ARG, "tfm_trainer_config.%s is %g; expected %s", field, value, expected);
}

static tfm_status tfmi_trainer_check(const tfm_trainer_config *c) {
  if (c->precision != TFM_TYPE_DEFAULT && c->precision != TFM_F32 && c->precision != TFM_BF16)
    return tfmi_report(TFM_E_ARG, "tfm_trainer_config.precision is %s; expected F32 or BF16",
                       tfm_type_name(c->precision));
  if (c->batch < 1 || c->batch > 65536) return tfmi_bad_training("batch", c->batch, "1 to 65536");
  if (c->accumulate < 1) return tfmi_bad_training("accumulate", c->accumulate, "1 or more");
  if (!(c->lr > 0 && c->lr < FLT_MAX)) return tfmi_bad_training("lr", (double)c->lr, "above 0");
  if (!(c->min_lr >= 0 && c->min_lr <= c->lr))
    return tfmi_bad_training("min_lr", (double)c->min_lr, "0 to lr");
  if (!(c->beta1 >= 0 && c->beta1 < 1))
    return tfmi_bad_training("beta1", (double)c->beta1, "0 to below 1");
  if (!(c->beta2 >= 0 && c->beta2 < 1))
    return tfmi_bad_training("beta2", (double)c->beta2, "0 to below 1");
  if (!(c->eps > 0)) return tfmi_bad_training("eps", (double)c->eps, "above 0");
  if (!isfinite(c->decay)) return tfmi_bad_training("decay", (double)c->decay, "a finite number");
  if (!isfinite(c->clip)) return tfmi_bad_training("clip", (double)c->clip, "a finite number");
  if ((int)c->schedule < 0 || c->schedule > TFM_WSD)
    return tfmi_bad_training("schedule", (double)c->schedule, "one of tfm_schedule");
  if (c->warmup < 0) return tfmi_bad_training("warmup", c->warmup, "0 or more");
  if (c->steps < 0 || (c->schedule != TFM_CONSTANT && c->steps <= c->warmup))
    return tfmi_bad_training("steps", c->steps, "more than warmup, as the schedule ends");
  if (c->decay_steps < 0 || c->decay_steps > c->steps)
    return tfmi_bad_training("decay_steps", c->decay_steps, "0 to steps");
  if (!(c->drop_embed >= 0 && c->drop_embed < 1))
    return tfmi_bad_training("drop_embed", (double)c->drop_embed, "0 to below 1");
  if (!(c->drop_attn >= 0 && c->drop_attn < 1))
    return tfmi_bad_training("drop_attn", (double)c->drop_attn, "0 to below 1");
  if (!(c->drop_residual >= 0 && c->drop_residual < 1))
    return tfmi_bad_training("drop_residual", (double)c->drop_residual, "0 to below 1");
  if (c->freeze >= 2u * TFM_EXPERTS)
    return tfmi_bad_training("freeze", c->freeze, "TFM_EMBEDDINGS to TFM_EXPERTS, added up");
  if (c->keep < 1 || c->keep > 1000) return tfmi_bad_training("keep", c->keep, "1 to 1000");
  return TFM_OK;
}

/* Fills in the defaults: every 0 becomes what the comments of tfm_trainer_config say. */
static tfm_status tfmi_trainer_configure(tfm_trainer *t) {
  tfm_trainer_config *c = &t->config;
  tfm_status status;
  if (c->batch == 0) c->batch = 1;
  if (c->accumulate == 0) c->accumulate = 1;
  if (c->keep == 0) c->keep = 1;
  if (c->context == 0) c->context = tfmi_min32(t->net.context, 1024);
  if (c->lr == 0) c->lr = 3e-4f;
  if (c->beta1 == 0) c->beta1 = 0.9f;
  if (c->beta2 == 0) c->beta2 = 0.95f;
  if (c->eps == 0) c->eps = 1e-8f;
  if (c->decay == 0) c->decay = 0.1f;
  if (c->decay < 0) c->decay = 0;
  if (c->clip == 0) c->clip = 1;
  if (c->clip < 0) c->clip = 0;
  if (c->decay_steps == 0) c->decay_steps = tfmi_max32(c->steps / 5, 1) * (c->steps > 0);
  if (c->balance < 0) c->balance = 0;
  status = tfmi_trainer_check(c);
  if (status != TFM_OK) return status;
  if (c->context < 1 || c->context > t->net.context)
    return tfmi_report(TFM_E_ARG, "tfm_trainer_config.context is %d; expected 1 to the model's %d",
                       (int)c->context, (int)t->net.context);
  if ((int64_t)c->batch * c->context > (1 << 24))
    return tfmi_bad_training("batch", c->batch, "at most 2^24 tokens in a pass; use accumulate");
  if (c->drop_residual > 0 && (t->net.experts || t->net.layer[0].post1))
    return tfmi_report(TFM_E_UNSUPPORTED, "tfm_trainer_config.drop_residual: a model with experts, "
                       "or norms after its layers, has no such dropout");
  if (c->first_layer < 0 || c->first_layer > t->net.layers)
    return tfmi_bad_training("first_layer", c->first_layer, "0 to the number of layers");
  t->rows = c->batch * c->context;
  t->drop.rate[0] = c->drop_embed;
  t->drop.rate[1] = c->drop_attn;
  t->drop.rate[2] = c->drop_residual;
  t->drop.seed = c->seed;
  return TFM_OK;
}

/* Where the parameters come from: a model, or a shape. */
typedef struct tfmi_origin {
  const tfm_model *model;
  const tfm_shape *shape;
} tfmi_origin;

static const float tfmi_there = 0; /* what a vector points to before there is memory for it */

/* What begins and ends a text, for the config.json that is exported. */
static void tfmi_shape_ends(tfm_trainer *t, const tfm_tokenizer *tokenizer) {
  tfm_tokenizer_info v;
  if (!tokenizer || tfm_tokenizer_describe(tokenizer, &v) != TFM_OK) return;
  t->bos = v.bos;
  t->end_count = v.eos >= 0;
  t->end[0] = v.eos;
}

/* A number that a shape leaves to its family: what config.json means by saying nothing. */
static double tfmi_shape_default(const tfmi_family *f, tfmi_quantity what) {
  const tfmi_said *said = tfmi_family_said(f, what);
  return said ? said->fallback : what <= TFMI_N_EPS ? f->key[what].fallback : 0;
}

static void tfmi_shape_experts(tfm_net *net, const tfmi_family *f, const tfm_shape *s) {
  if (!tfmi_has(f, TFMI_MOE)) return;
  net->experts = s->experts ? s->experts : (int32_t)tfmi_shape_default(f, TFMI_N_EXPERTS);
  net->experts_used = s->experts_used ? s->experts_used
                                      : (int32_t)tfmi_shape_default(f, TFMI_N_EXPERTS_USED);
  net->expert_width = s->expert_width ? s->expert_width : net->ffn_width;
  net->moe.experts = net->experts;
  net->moe.top_k = net->experts_used;
  net->moe.normalise = f->normalise.fallback;
  net->moe.softmax_after = tfmi_has(f, TFMI_SOFTMAX_AFTER);
}

static void tfmi_shape_rotation(tfm_trainer *t) {
  const tfmi_family *f = t->family;
  double local = tfmi_shape_default(f, TFMI_N_LOCAL_THETA);
  int i;
  for (i = 0; i < 2 && tfmi_has(f, TFMI_ROTARY); i++) {
    t->rotation[i].theta = tfmi_shape_default(f, TFMI_N_THETA);
    t->rotation[i].scale = 1;
    t->rotation[i].rot = t->net.head_width;
    t->rotation[i].trained = t->net.context;
  }
  if (local != 0) t->rotation[1].theta = local;
}

/* The network of a shape, but for its layers. */
static tfm_status tfmi_shape_net(tfm_trainer *t, const tfm_shape *s) {
  tfm_net *net = &t->net;
  const tfmi_family *f = tfmi_family_named(tfmi_text_of(s->family ? s->family : "gpt2"));
  bool layer_norm = f && tfmi_has(f, TFMI_LAYER_NORM);
  int i;
  if (!f)
    return tfmi_report(TFM_E_UNSUPPORTED, "tfm_shape.family is %s; expected a model_type, such as "
                       "gpt2 or llama", s->family);
  t->family = f;
  t->tied = !s->untied;
  net->layers = s->layers;
  net->width = s->width;
  net->heads = s->heads;
  net->kv_heads = s->kv_heads ? s->kv_heads : s->heads;
  net->head_width = s->head_width ? s->head_width : s->width / (s->heads > 0 ? s->heads : 1);
  net->ffn_width = s->ffn_width ? s->ffn_width
                   : tfmi_has(f, TFMI_GATED) ? (s->width * 8 / 3 + 31) / 32 * 32 : 4 * s->width;
  net->vocabulary = s->vocabulary;
  net->context = s->context;
  net->norm.kind = layer_norm ? TFM_NORM_LAYER : TFM_NORM_RMS;
  net->norm.eps = (float)tfmi_shape_default(f, TFMI_N_EPS);
  net->norm.offset = tfmi_has(f, TFMI_ONE_PLUS) ? 1.0f : 0.0f;
  net->head_norm = net->norm;
  net->gated = tfmi_has(f, TFMI_GATED);
  net->logit_softcap = (float)tfmi_shape_default(f, TFMI_N_LOGIT_CAP);
  if (tfmi_has(f, TFMI_SCALED_EMBED)) net->embed_scale = (float)sqrt((double)net->width);
  for (i = 0; i < TFMI_COUNT(tfmi_acts); i++)
    if (strcmp(tfmi_acts[i].name, f->act) == 0) net->act = tfmi_acts[i].act;
  if (!tfmi_has(f, TFMI_ROTARY)) net->positions.rows = net->context;
  tfmi_shape_experts(net, f, s);
  tfmi_shape_rotation(t);
  if (t->config.balance == 0) t->config.balance = (float)tfmi_shape_default(f, TFMI_N_BALANCE);
  net->final_norm = &tfmi_there;
  net->final_norm_bias = layer_norm ? &tfmi_there : NULL;
  tfmi_shape_ends(t, s->tokenizer);
  return TFM_OK;
}

static const float *tfmi_there_if(bool there) { return there ? &tfmi_there : NULL; }

static void tfmi_shape_layer(const tfm_trainer *t, const tfm_shape *s, int32_t i) {
  const tfmi_family *f = t->family;
  const tfm_net *net = &t->net;
  tfm_layer *y = &net->layer[i];
  int32_t every = (int32_t)tfmi_shape_default(f, TFMI_N_WINDOW_EVERY);
  int32_t window = (int32_t)tfmi_shape_default(f, TFMI_N_WINDOW);
  bool head_norms = tfmi_has(f, TFMI_HEAD_NORMS), post_norms = tfmi_has(f, TFMI_POST_NORMS);
  y->norm1 = y->norm2 = &tfmi_there;
  y->norm1_bias = y->norm2_bias = tfmi_there_if(tfmi_has(f, TFMI_LAYER_NORM));
  y->post1 = y->post2 = tfmi_there_if(post_norms);
  y->q_norm = y->k_norm = tfmi_there_if(head_norms);
  y->qkv_bias = tfmi_there_if(f->qkv_bias.fallback);
  y->out_bias = tfmi_there_if(f->out_bias.fallback);
  y->up_bias = tfmi_there_if(f->up_bias.fallback && !net->experts);
  y->down_bias = tfmi_there_if(f->down_bias.fallback && !net->experts);
  y->expert_up_bias = tfmi_there_if(f->up_bias.fallback && net->experts);
  y->expert_down_bias = tfmi_there_if(f->down_bias.fallback && net->experts);
  y->router.rows = net->experts; /* packing fills in the rest */
  y->shared_gate.rows = tfmi_has(f, TFMI_SHARED);
  y->down.cols = net->experts && !y->shared_gate.rows ? 0 : net->ffn_width;
  if (f->windows.use && s->window <= 0) window = 0;
  if (s->window != 0 && window != 0) window = s->window;
  if (f->windows.use && s->window > 0) window = s->window;
  y->attn.window = window > 0 && (every == 0 || (i + 1) % every != 0) ? window : 0;
  y->attn.heads = net->heads;
  y->attn.scale = (float)(1.0 / sqrt((double)net->head_width));
  y->attn.softcap = (float)tfmi_shape_default(f, TFMI_N_ATTN_CAP);
  y->rope.head_width = net->head_width;
  y->rope.rot = t->rotation[0].rot;
  y->rope.scale = 1;
}

/* The numbers of a shape are in bounds: checked by the same rules as a file's. */
static tfm_status tfmi_shape_check(const tfm_trainer *t) {
  const tfm_net *net = &t->net;
  const tfmi_family *f = t->family;
  const struct { const char *name; const tfmi_key *key; int32_t value; } rows[] = {
    {"layers", &f->key[TFMI_N_LAYERS], net->layers}, {"width", &f->key[TFMI_N_WIDTH], net->width},
    {"heads", &f->key[TFMI_N_HEADS], net->heads},
    {"kv_heads", &f->key[TFMI_N_KV_HEADS], net->kv_heads},
    {"head_width", &f->key[TFMI_N_HEAD_WIDTH], net->head_width},
    {"ffn_width", &f->key[TFMI_N_FFN], net->ffn_width},
    {"vocabulary", &f->key[TFMI_N_VOCABULARY], net->vocabulary},
    {"context", &f->key[TFMI_N_CONTEXT], net->context}};
  int i;
  for (i = 0; i < TFMI_COUNT(rows); i++)
    if (!(rows[i].value >= rows[i].key->low && rows[i].value <= rows[i].key->high))
      return tfmi_report(TFM_E_ARG, "tfm_shape.%s is %d; expected %g to %g", rows[i].name,
                         (int)rows[i].value, rows[i].key->low, rows[i].key->high);
  if (net->experts && (net->experts < 1 || net->experts > 65536 || net->experts_used < 1 ||
                       net->experts_used > net->experts || net->expert_width < 1 ||
                       net->expert_width > TFMI_BIG))
    return tfmi_report(TFM_E_ARG, "tfm_shape: %d of %d experts of width %d; expected 1 to all of 1 "
                       "to 65536, and a width of 1 to 2^24", (int)net->experts_used,
                       (int)net->experts, (int)net->expert_width);
  if (net->heads % net->kv_heads)
    return tfmi_report(TFM_E_ARG, "tfm_shape: %d heads are not divisible by %d key/value heads",
                       (int)net->heads, (int)net->kv_heads);
  if (!f->key[TFMI_N_HEAD_WIDTH].hf[0] &&
      (net->kv_heads != net->heads || net->head_width * net->heads != net->width))
    return tfmi_report(TFM_E_ARG, "tfm_shape: %s has width / heads as its head width, and as many "
                       "key/value heads as heads", f->name);
  if (tfmi_has(f, TFMI_ROTARY) && net->head_width % 2)
    return tfmi_report(TFM_E_ARG, "tfm_shape: the head width %d is odd", (int)net->head_width);
  return TFM_OK;
}

static tfm_status tfmi_model_trainable(const tfm_model *m) {
  const tfm_net *net = &m->net;
  const char *what = net->head_bias ? "a bias of the head" : m->dev.override_mask
                     ? "overridden entries" : NULL;
  if (!what) return TFM_OK;
  return tfmi_report(TFM_E_UNSUPPORTED, "trainer: a model with %s cannot be trained yet", what);
}

/* The table: the model's, or the first, if it has all that training needs; else the reference. */
static tfm_status tfmi_trainer_open(tfm_trainer *t, const tfmi_origin *from) {
  const char *missing;
  tfm_device which = t->config.device;
  tfm_status status =
      from->model ? tfmi_dev_open_like(&t->dev, &t->heap, &from->model->dev, t->config.threads,
                                       false)
                  : tfmi_dev_open(&t->dev, &t->heap, which, 0, t->config.threads, NULL, which != 0);
  if (status != TFM_OK) return status;
  missing = tfmi_entry_missing(t->dev.table, TFMI_ENTRY_BACKWARD);
  if (!missing) return TFM_OK;
  if (from->model || which == TFM_AUTO) {
    tfmi_log(&t->heap.host, TFM_LOG_INFO, "device %s cannot train, it lacks %s: the reference does",
             t->dev.table->name, missing);
    tfmi_dev_close(&t->dev, &t->heap);
    return tfmi_dev_open(&t->dev, &t->heap, TFM_REF, 0, t->config.threads, NULL, true);
  }
  return tfmi_report(TFM_E_UNSUPPORTED, "device %s cannot train: it lacks the entry %s; use "
                     "TFM_REF", t->dev.table->name, missing);
}

/* Products in BF16 where that was asked for and is faster. */
static void tfmi_trainer_precision(tfm_trainer *t) {
  if (t->config.precision != TFM_BF16) return;
  if (t->dev.has_bf16) t->dev.products = TFM_BF16;
  else
    tfmi_log(&t->heap.host, TFM_LOG_WARNING, "precision BF16: device %s has no products of BF16 "
             "here that are faster than those of F32; it trains in F32", t->dev.table->name);
}

static tfm_status tfmi_trainer_net(tfm_trainer *t, const tfmi_origin *from) {
  const tfm_model *m = from->model;
  tfm_status status;
  int32_t i;
  if (!m) {
    status = tfmi_shape_net(t, from->shape);
    if (status == TFM_OK) status = tfmi_shape_check(t);
    if (status == TFM_OK) status = tfmi_trainer_lists(t);
    for (i = 0; status == TFM_OK && i < t->net.layers; i++) tfmi_shape_layer(t, from->shape, i);
    return status;
  }
  status = tfmi_model_trainable(m);
  if (status != TFM_OK) return status;
  t->net = m->net;
  t->family = tfmi_family_named(tfmi_text_of(m->family));
  t->tied = m->tied;
  memcpy(t->rotation, m->rotation, sizeof t->rotation);
  if (t->config.balance == 0) t->config.balance = (float)m->balance;
  t->bos = m->bos;
  memcpy(t->end, m->end, sizeof t->end);
  t->end_count = m->end_count;
  status = tfmi_trainer_lists(t);
  if (status == TFM_OK)
    memcpy(t->net.layer, m->net.layer, (size_t)t->net.layers * sizeof *t->net.layer);
  return status;
}

/* n values, normal with that deviation, from the counter `first`, a multiple of 4 (Box, Muller). */
static void tfmi_normals(float *to, int32_t n, uint64_t seed, uint64_t which, int64_t first,
                         double deviation) {
  int32_t i, j;
  for (i = 0; i < n; i += 4) {
    tfmi_random r = tfmi_philox(seed, (uint64_t)(first + i) / 4, which);
    for (j = 0; j < 4 && i + j < n; j++) {
      double radius = sqrt(-2 * log(((double)r.word[j & 2] + 1) / 4294967296.0));
      double angle = 6.28318530717958647692 * ((double)r.word[j | 1] / 4294967296.0);
      to[i + j] = (float)(deviation * radius * (j & 1 ? sin(angle) : cos(angle)));
    }
  }
}

/* Draws a parameter: the same numbers whatever the device. */
static void tfmi_parameter_draw(tfm_trainer *t, int32_t index, uint64_t seed) {
  const tfmi_parameter *p = &t->parameter[index];
  bool residual = !t->net.gated && (p->slot == TFMI_OUT || p->slot == TFMI_DOWN ||
                                    p->slot == TFMI_EXPERT_DOWN);
  double deviation = residual ? 0.02 / sqrt(2.0 * t->net.layers) : 0.02;
  int64_t n = (int64_t)p->rows * (p->cols ? p->cols : 1), at;
  int32_t i;
  for (at = 0; at < n; at += TFMI_STRETCH) {
    int32_t some = n - at < TFMI_STRETCH ? (int32_t)(n - at) : TFMI_STRETCH;
    if (p->cols) tfmi_normals(t->stage, some, seed, (uint64_t)index, at, deviation);
    else
      for (i = 0; i < some; i++) t->stage[i] = p->bias ? 0.0f : 1.0f - t->net.norm.offset;
    t->dev.table->put(&t->dev, t->w + p->at + at, t->stage, (size_t)some * sizeof *t->stage);
  }
}

/* From the model's memory, where the network still points; its weights are its own table's. */
static void tfmi_parameter_copy(tfm_trainer *t, const tfm_model *m, const tfmi_parameter *p) {
  if (p->weight)
    m->dev.table->unpack(&t->dev, tfmi_parameter_mat(t->w, p), p->weight, 0);
  else
    t->dev.table->copy(&t->dev, t->w + p->at, *p->vector, (size_t)p->rows * sizeof(float));
}

/* Weights, positions and sequences of rows, and zero moments. */
static void tfmi_trainer_fill(tfm_trainer *t, const tfmi_origin *from) {
  const tfm_backend *b = t->dev.table;
  size_t bytes = (size_t)t->rows * sizeof(int32_t), host, device;
  int32_t i;
  for (i = 0; i < t->rows; i++) t->ids[i] = i % t->config.context;
  b->put(&t->dev, t->pos, t->ids, bytes);
  for (i = 0; i < t->rows; i++) t->ids[i] = i / t->config.context;
  b->put(&t->dev, t->seq, t->ids, bytes);
  b->zero(&t->dev, t->m, (size_t)t->total * sizeof(float));
  b->zero(&t->dev, t->v, (size_t)t->total * sizeof(float));
  for (i = 0; i < t->parameters; i++) {
    tfmi_parameter *p = &t->parameter[i];
    if (from->model) tfmi_parameter_copy(t, from->model, p);
    else tfmi_parameter_draw(t, i, from->shape->seed);
    if (p->vector) *p->vector = t->w + p->at;
  }
  tfmi_net_rotate(&t->dev, &t->net, t->rotation, t->config.context, t->frequencies);
  tfmi_pack_parameters(t, &host, &device);
}

static tfm_status tfmi_trainer_make(tfm_trainer *t, const tfmi_origin *from) {
  tfm_status status = tfmi_trainer_net(t, from);
  if (status == TFM_OK) status = tfmi_trainer_configure(t);
  if (status == TFM_OK) status = tfmi_trainer_open(t, from);
  if (status != TFM_OK) return status;
  tfmi_trainer_precision(t);
  tfmi_parameters(t);
  if (!t->trained)
    return tfmi_report(TFM_E_ARG, "trainer: every parameter is frozen; nothing is left to train");
  status = tfmi_trainer_memory(t);
  if (status != TFM_OK || t->heap.dry) return status;
  tfmi_trainer_fill(t, from);
  return tfmi_trainer_sync(t);
}

static tfm_trainer *tfmi_trainer_new(const tfmi_origin *from, const tfm_trainer_config *config,
                                     bool dry) {
  tfmi_heap heap;
  tfm_trainer *t;
  memset(&heap, 0, sizeof heap);
  if (config) heap.host = config->host;
  heap.dry = dry;
  t = TFMI_NEW(tfm_trainer, tfmi_heap_get(&heap, sizeof *t));
  if (!t) return NULL;
  if (config) t->config = *config;
  t->heap = heap;
  t->bos = -1;
  if (tfmi_trainer_make(t, from) == TFM_OK) return t;
  tfm_trainer_free(t);
  return NULL;
}

TFM_API tfm_trainer *tfm_trainer_create(const tfm_model *model, const tfm_trainer_config *config) {
  tfmi_origin from = {model, NULL};
  if (model) return tfmi_trainer_new(&from, config, false);
  tfmi_null_object("tfm_trainer_create");
  return NULL;
}

TFM_API tfm_trainer *tfm_trainer_init(const tfm_shape *shape, const tfm_trainer_config *config) {
  tfmi_origin from = {NULL, shape};
  if (shape) return tfmi_trainer_new(&from, config, false);
  tfmi_report(TFM_E_ARG, "tfm_trainer_init: shape is NULL");
  return NULL;
}

TFM_API void tfm_trainer_free(tfm_trainer *trainer) {
  tfm_trainer *t = trainer;
  tfmi_heap heap;
  if (!t) return;
  if (t->device_block) t->dev.table->release(&t->dev, t->device_block, t->device_bytes);
  tfmi_heap_put(&t->heap, t->host_block, t->host_bytes);
  tfmi_heap_put(&t->heap, t->lists, t->list_bytes);
  tfmi_dev_close(&t->dev, &t->heap);
  heap = t->heap;
  tfmi_heap_put(&heap, t, sizeof *t);
}

TFM_API tfm_status tfm_trainer_describe(const tfm_trainer *trainer, tfm_trainer_info *out) {
  if (!trainer) return tfmi_null_object("tfm_trainer_describe");
  if (!out) return tfmi_report(TFM_E_ARG, "tfm_trainer_describe: out is NULL");
  out->parameters = (uint64_t)trainer->total;
  out->memory_bytes = trainer->heap.used;
  out->state_bytes = (uint64_t)trainer->total * 4 * sizeof(float);
  out->batch = trainer->config.batch;
  out->context = trainer->config.context;
  out->accumulate = trainer->config.accumulate;
  out->step = trainer->step;
  out->sequences = trainer->sequences;
  out->precision = trainer->dev.products == TFM_BF16 ? TFM_BF16 : TFM_F32;
  return TFM_OK;
}

TFM_API tfm_status tfm_trainer_plan(const tfm_shape *shape, const tfm_trainer_config *config,
                                    tfm_trainer_info *out) {
  tfmi_origin from = {NULL, shape};
  tfm_trainer *t;
  tfm_status status;
  if (!shape || !out) return tfmi_report(TFM_E_ARG, "tfm_trainer_plan: shape or out is NULL");
  t = tfmi_trainer_new(&from, config, true);
  if (!t) return tfmi_error.status;
  status = tfm_trainer_describe(t, out);
  tfm_trainer_free(t);
  return status;
}

#if TFMI_COMPILES_COLD
#pragma GCC push_options
#pragma GCC optimize("O1")
#endif
/* =================================================================================================
   >>export   files of what was trained: Hugging Face folders, checkpoints
   =================================================================================================

   The parameters of >>train become tensors under the names of the family's row, cut apart, turned
   or put in order again where Hugging Face stores them otherwise, and the numbers of the network
   become its config.json, by the same keys that >>families reads. The file is written in one go:
   its header is made twice, first to be measured.

   A checkpoint is eight words (tfmi_checkpoint_head), the arenas of weights and moments as they
   are, and the checksum of all that. It is checked whole before any of it is taken over. */

typedef struct tfmi_cut { /* a tensor of the file: rows of a parameter */
  const tfmi_parameter *p;
  tfmi_slot slot;
  int32_t first, rows;
  int32_t expert;   /* whose they are, in its name */
  bool turned;      /* stored [cols, rows] */
  bool interleaved; /* rows of each head lie in pairs here, and in halves there */
  bool less;        /* a norm's 1 + w, of which the file has w */
} tfmi_cut;

/* The pieces that the rows of a parameter, or of each expert in it, are stored in. */
static int tfmi_pieces(const tfm_trainer *t, const tfmi_parameter *p, int32_t *rows) {
  const tfm_net *net = &t->net;
  int32_t all = p->rows / (p->experts ? p->experts : 1);
  rows[0] = all;
  if (t->family->slot[p->slot]) return 1;
  if (p->slot == TFMI_QKV) {
    rows[0] = net->heads * net->head_width;
    rows[1] = rows[2] = net->kv_heads * net->head_width;
    return 3;
  }
  rows[0] = rows[1] = all / 2;
  return 2;
}

/* Whether a parameter's experts are tensors of their own. */
static bool tfmi_parted(const tfm_trainer *t, const tfmi_parameter *p) {
  const char *name = t->family->slot[p->slot];
  if (!name) name = t->family->slot[(int)p->slot + 1];
  return p->experts && strstr(name, "%e");
}

/* How many tensors a parameter becomes. */
static int32_t tfmi_cuts(const tfm_trainer *t, const tfmi_parameter *p) {
  int32_t rows[3];
  return tfmi_pieces(t, p, rows) * (tfmi_parted(t, p) ? p->experts : 1);
}

static tfmi_cut tfmi_cut_of(const tfm_trainer *t, const tfmi_parameter *p, int32_t k) {
  const tfm_rope *rope = &t->net.layer[0].rope;
  int32_t rows[3], i;
  int pieces = tfmi_pieces(t, p, rows), piece = (int)(k % pieces);
  tfmi_cut cut;
  memset(&cut, 0, sizeof cut);
  cut.p = p;
  cut.slot = pieces == 1 ? p->slot : (tfmi_slot)((int)p->slot + 1 + piece);
  cut.rows = p->experts && !tfmi_parted(t, p) ? p->rows : rows[piece];
  cut.expert = k / pieces;
  for (i = 0; i < pieces; i++) cut.first += cut.expert * rows[i];
  for (i = 0; i < piece; i++) cut.first += rows[i];
  cut.turned = tfmi_has(t->family, TFMI_CONV1D) && p->cols && p->layer >= 0 &&
               p->slot < TFMI_ROUTER;
  cut.interleaved = rope->rot && rope->interleaved && p->slot == TFMI_QKV && piece < 2;
  cut.less = tfmi_has(t->family, TFMI_ONE_PLUS) && t->net.norm.offset == 0 && !p->cols &&
             p->slot >= TFMI_FINAL_NORM && p->slot <= TFMI_K_NORM;
  return cut;
}

static uint64_t tfmi_cut_entry(const tfm_trainer *t, tfmi_out *o, const tfmi_cut *cut,
                                 uint64_t at) {
  const tfmi_parameter *p = cut->p;
  int32_t cols = p->cols ? p->cols : 1, rows = cut->rows;
  uint64_t end = at + (uint64_t)rows * (uint64_t)cols * sizeof(float);
  char name[128];
  tfmi_slot_name(name, sizeof name, p->slot == TFMI_HEAD ? "" : t->family->prefix,
                 t->family->slot[cut->slot], p->layer, cut->expert, p->bias ? ".bias" : ".weight");
  tfmi_out_text(o, "%s\"%s\":{\"dtype\":\"F32\",\"shape\":[", at ? "," : "", name);
  if (p->experts && rows == p->rows) {
    tfmi_out_text(o, "%d,", (int)p->experts);
    rows /= p->experts;
  }
  if (!p->cols) tfmi_out_text(o, "%d", (int)rows);
  else tfmi_out_text(o, "%d,%d", (int)(cut->turned ? cols : rows),
                     (int)(cut->turned ? rows : cols));
  tfmi_out_text(o, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)at,
                (unsigned long long)end);
  return end;
}

/* Row i of a cut, in the parameter. */
static int64_t tfmi_cut_row(const tfm_trainer *t, const tfmi_cut *cut, int32_t i) {
  int32_t width = t->net.head_width, in = i % width, half = width / 2;
  if (cut->interleaved) i += (in < half ? 2 * in : 2 * (in - half) + 1) - in;
  return cut->first + i;
}

static void tfmi_cut_plain(tfm_trainer *t, const float *arena, tfmi_out *o,
                             const tfmi_cut *cut) {
  int32_t cols = cut->p->cols ? cut->p->cols : 1, i, at, j;
  for (i = 0; i < cut->rows; i++)
    for (at = 0; at < cols; at += TFMI_STRETCH) {
      int32_t n = tfmi_min32(TFMI_STRETCH, cols - at);
      t->dev.table->get(&t->dev, t->stage,
                        arena + cut->p->at + tfmi_cut_row(t, cut, i) * cols + at,
                        (size_t)n * sizeof(float));
      for (j = 0; cut->less && arena == t->w && j < n; j++) t->stage[j] -= 1;
      tfmi_out_words(o, t->stage, (size_t)n * sizeof(float), sizeof(float));
    }
}

/* 16 columns at a time become rows. */
static void tfmi_cut_turned(tfm_trainer *t, const float *arena, tfmi_out *o,
                              const tfmi_cut *cut) {
  int32_t cols = cut->p->cols, col, i, j;
  for (col = 0; col < cols; col += TFMI_LANES) {
    int32_t n = tfmi_min32(TFMI_LANES, cols - col);
    for (i = 0; i < cut->rows; i++)
      t->dev.table->get(&t->dev, t->stage + (int64_t)i * TFMI_LANES,
                        arena + cut->p->at + tfmi_cut_row(t, cut, i) * cols + col,
                        (size_t)n * sizeof(float));
    for (j = 0; j < n; j++)
      for (i = 0; i < cut->rows; i++)
        tfmi_out_words(o, t->stage + (int64_t)i * TFMI_LANES + j, sizeof(float), sizeof(float));
  }
}

/* The header of a safetensors file, or what it has between its braces. */
static void tfmi_export_header(const tfm_trainer *t, tfmi_out *o) {
  uint64_t at = 0;
  int32_t i, k, n;
  tfmi_out_text(o, "{");
  for (i = 0; i < t->parameters; i++)
    for (n = tfmi_cuts(t, &t->parameter[i]), k = 0; k < n; k++) {
      tfmi_cut cut = tfmi_cut_of(t, &t->parameter[i], k);
      at = tfmi_cut_entry(t, o, &cut, at);
    }
  tfmi_out_text(o, "}");
  while (o->bytes % 8) tfmi_out_text(o, " "); /* behind the 8 bytes of its length */
}

typedef struct tfmi_export { /* what a writer is given */
  tfm_trainer *t;
  const float *arena;
} tfmi_export;

/* A whole arena, weights or gradients, under the names of the family. */
static void tfmi_export_tensors(void *context, tfmi_out *o) {
  const tfmi_export *e = (const tfmi_export *)context;
  tfm_trainer *t = e->t;
  tfmi_out count;
  uint8_t length[8];
  int32_t i, k, n;
  memset(&count, 0, sizeof count);
  count.fd = -1;
  tfmi_export_header(t, &count);
  for (k = 0; k < 8; k++) length[k] = (uint8_t)(count.bytes >> 8 * k);
  tfmi_out_bytes(o, length, sizeof length);
  tfmi_export_header(t, o);
  for (i = 0; i < t->parameters; i++)
    for (n = tfmi_cuts(t, &t->parameter[i]), k = 0; k < n; k++) {
      tfmi_cut cut = tfmi_cut_of(t, &t->parameter[i], k);
      if (cut.turned) tfmi_cut_turned(t, e->arena, o, &cut);
      else tfmi_cut_plain(t, e->arena, o, &cut);
    }
}

static void tfmi_export_config(void *context, tfmi_out *o) {
  const tfm_trainer *t = ((const tfmi_export *)context)->t;
  tfmi_described d;
  memset(&d, 0, sizeof d);
  d.family = t->family;
  d.net = &t->net;
  d.rotation = t->rotation;
  d.tied = t->tied;
  d.balance = t->config.balance > 0 ? (double)t->config.balance : 0;
  d.qkv_bias = t->net.layer[0].qkv_bias != NULL;
  d.up_bias = t->net.layer[0].up_bias != NULL;
  d.bos = t->bos;
  d.end = t->end;
  d.end_count = t->end_count;
  d.type = TFM_F32;
  tfmi_config_write(&d, o);
}

static tfm_status tfmi_export_file(tfm_trainer *t, const char *folder, const char *name,
                                   tfmi_writer writer, const float *arena) {
  tfmi_export e = {t, arena};
  char path[1024];
  int n = snprintf(path, sizeof path, "%s/%s", folder, name);
  if (n < 0 || (size_t)n >= sizeof path)
    return tfmi_report(TFM_E_ARG, "export: the name of the folder is longer than 1000 bytes");
  return tfmi_out_file(path, writer, &e);
}

TFM_API tfm_status tfm_trainer_export(tfm_trainer *trainer, const char *folder) {
  tfm_trainer *t = trainer;
  tfm_status status;
  if (!t) return tfmi_null_object("tfm_trainer_export");
  if (!folder) return tfmi_report(TFM_E_ARG, "tfm_trainer_export: folder is NULL");
  if (t->rotation[0].divisor[0] && t->rotation[0].kind != TFMI_ROPE_LONG)
    return tfmi_report(TFM_E_UNSUPPORTED, "export: the model's rotation has factors of its own, "
                       "which config.json cannot tell");
  status = tfmi_export_file(t, folder, "config.json", tfmi_export_config, NULL);
  if (status != TFM_OK) return status;
  return tfmi_export_file(t, folder, "model.safetensors", tfmi_export_tensors, t->w);
}

/* ---- Checkpoints ---- */

enum { /* the words of a checkpoint's head */
  TFMI_WORD_MARK, TFMI_WORD_FORMAT, TFMI_WORD_SHAPE, TFMI_WORD_TOTAL, TFMI_WORD_MATRICES,
  TFMI_WORD_DATA, TFMI_WORD_STEP, TFMI_WORD_SEQUENCES, TFMI_WORDS
};
enum { TFMI_CHECKPOINT_FORMAT = 2 };
#define TFMI_STEP_MOST (UINT64_C(1) << 48)

static void tfmi_checkpoint_head(const tfm_trainer *t, uint64_t *word) {
  const tfm_net *net = &t->net;
  const int32_t shape[] = {net->layers, net->width, net->heads, net->kv_heads, net->head_width,
                           net->ffn_width, net->vocabulary, net->context, (int32_t)net->act,
                           (int32_t)net->norm.kind, net->gated, t->tied};
  word[TFMI_WORD_MARK] = tfmi_u64("tfmtrain");
  word[TFMI_WORD_FORMAT] = TFMI_CHECKPOINT_FORMAT;
  word[TFMI_WORD_SHAPE] = tfmi_checksum(1, shape, sizeof shape, sizeof *shape);
  word[TFMI_WORD_TOTAL] = (uint64_t)t->total;
  word[TFMI_WORD_MATRICES] = (uint64_t)t->matrices;
  word[TFMI_WORD_DATA] = t->config.data;
  word[TFMI_WORD_STEP] = (uint64_t)t->step;
  word[TFMI_WORD_SEQUENCES] = (uint64_t)t->sequences;
}

static void tfmi_checkpoint_arena(tfm_trainer *t, const float *arena, tfmi_out *o) {
  int64_t at;
  for (at = 0; at < t->total; at += TFMI_STRETCH) {
    size_t n = (size_t)(t->total - at < TFMI_STRETCH ? t->total - at : (int64_t)TFMI_STRETCH);
    t->dev.table->get(&t->dev, t->stage, arena + at, n * sizeof *t->stage);
    tfmi_out_words(o, t->stage, n * sizeof *t->stage, sizeof *t->stage);
  }
}

static void tfmi_checkpoint_write(tfm_trainer *t, tfmi_out *o) {
  uint64_t word[TFMI_WORDS];
  tfmi_checkpoint_head(t, word);
  tfmi_out_words(o, word, sizeof word, sizeof *word);
  tfmi_checkpoint_arena(t, t->w, o);
  tfmi_checkpoint_arena(t, t->m, o);
  tfmi_checkpoint_arena(t, t->v, o);
  tfmi_out_flush(o);
  tfmi_out_number_le(o, o->sum, 8);
}

TFM_API tfm_status tfm_trainer_save(tfm_trainer *trainer, const char *path) {
  tfmi_out o;
  tfm_status status;
  if (!trainer) return tfmi_null_object("tfm_trainer_save");
  if (!path) return tfmi_report(TFM_E_ARG, "tfm_trainer_save: path is NULL");
  status = tfmi_out_begin(&o, path);
  if (status != TFM_OK) return status;
  tfmi_checkpoint_write(trainer, &o);
  return tfmi_out_commit(&o, path, trainer->config.keep);
}

/* Says what of a checkpoint's head does not fit this trainer's. */
static tfm_status tfmi_checkpoint_fits(const char *path, const uint64_t *found,
                                       const uint64_t *word) {
  const struct { int first, last; const char *what; } rows[] = {
    {TFMI_WORD_MARK, TFMI_WORD_MARK, "no checkpoint of a trainer"},
    {TFMI_WORD_FORMAT, TFMI_WORD_FORMAT, "a checkpoint in another version's format"},
    {TFMI_WORD_SHAPE, TFMI_WORD_MATRICES, "the checkpoint of a model of another shape"},
    {TFMI_WORD_DATA, TFMI_WORD_DATA, "a checkpoint of training on other data"}};
  int i;
  for (i = 0; i < TFMI_COUNT(rows); i++) {
    size_t words = (size_t)(rows[i].last - rows[i].first + 1);
    if (memcmp(found + rows[i].first, word + rows[i].first, words * sizeof *word) != 0)
      return tfmi_report(TFM_E_FORMAT, "%s is %s", path, rows[i].what);
  }
  return TFM_OK;
}

/* Takes over a checkpoint in memory, where its floats are turned, or says what is wrong with it. */
static tfm_status tfmi_checkpoint_take(tfm_trainer *t, const char *path, uint8_t *data,
                                       size_t bytes) {
  uint64_t word[TFMI_WORDS], found[TFMI_WORDS] = {0};
  size_t arena = (size_t)t->total * sizeof(float), end = sizeof word + 3 * arena, host, device;
  tfm_status status;
  tfmi_checkpoint_head(t, word);
  if (bytes >= sizeof found) memcpy(found, data, sizeof found);
  tfmi_little(found, sizeof found, sizeof *found);
  status = tfmi_checkpoint_fits(path, found, word);
  if (status != TFM_OK) return status;
  if (bytes != end + 8 || tfmi_u64(data + end) != tfmi_checksum(0, data, end, 1))
    return tfmi_report(TFM_E_FORMAT, "%s is damaged: its checksum does not fit", path);
  if (found[TFMI_WORD_STEP] > TFMI_STEP_MOST || found[TFMI_WORD_SEQUENCES] > TFMI_STEP_MOST)
    return tfmi_report(TFM_E_FORMAT, "%s is damaged: step %lld after %lld sequences; expected 0 to "
                       "2^48", path, (long long)found[TFMI_WORD_STEP],
                       (long long)found[TFMI_WORD_SEQUENCES]);
  data += sizeof word;
  tfmi_little(data, 3 * arena, sizeof(float));
  t->dev.table->put(&t->dev, t->w, data, arena);
  t->dev.table->put(&t->dev, t->m, data + arena, arena);
  t->dev.table->put(&t->dev, t->v, data + 2 * arena, arena);
  t->step = (int64_t)found[TFMI_WORD_STEP];
  t->sequences = (int64_t)found[TFMI_WORD_SEQUENCES];
  tfmi_pack_parameters(t, &host, &device);
  return tfmi_trainer_sync(t);
}

TFM_API tfm_status tfm_trainer_resume(tfm_trainer *trainer, const char *path) {
  tfmi_load load;
  tfmi_file file;
  const char *wrong;
  tfm_status status;
  if (!trainer) return tfmi_null_object("tfm_trainer_resume");
  if (!path) return tfmi_report(TFM_E_ARG, "tfm_trainer_resume: path is NULL");
  memset(&file, 0, sizeof file);
  tfmi_load_init(&load, &trainer->heap, path);
  load.no_mmap = TFMI_BIG_ENDIAN; /* a map cannot be written to */
  wrong = tfmi_file_open_path(&load, path, &file);
  if (!wrong)
    status = tfmi_checkpoint_take(trainer, path, (uint8_t *)(uintptr_t)file.data, file.bytes);
  else status = *wrong ? tfmi_report(TFM_E_IO, "%s %s", path, wrong) : tfm_error_status();
  tfmi_file_close(load.heap, &file);
  return status;
}

/* =================================================================================================
   >>data   text files to sequences of ids
   =================================================================================================

   Opening lists the files, tells their mark (names, sizes, times, tokenizer, separator), and takes
   the ids from the cache if that carries the same mark and its checksum holds; else it encodes file
   by file, a piece of at most TFMI_TEXT_PIECE bytes at a time, cut behind a line, so that texts of
   any size need little memory. The cache is: two words (format, mark), the ids, two bytes each
   where the vocabulary has at most 65536 and four otherwise, zeros to a whole word, three words
   (ids, documents, checksum of all before). It appears whole or not at all, as a checkpoint does.

   A row of ids is read as a ring, from which an epoch cuts sequences end to end, beginning at a
   random place. Their order is a permutation that needs no memory: a Feistel network over the
   smallest even number of bits that holds them all, walked until it falls inside. */

enum {
  TFMI_TEXT_PIECE = 1 << 20, TFMI_TEXT_SAMPLE = 1 << 16,
  TFMI_FOLDERS_DEEP = 32,
  TFMI_DATA_FORMAT = 2,
  TFMI_DATA_HEAD = 16, TFMI_DATA_TAIL = 24 /* bytes of a cache around its ids */
};

typedef struct tfmi_data_file {
  char *path;
  uint64_t bytes, time;
} tfmi_data_file;

typedef struct tfmi_data { /* what tfm_data is the front of */
  tfm_data front;
  tfmi_heap heap;
  tfmi_block kept;
  tfmi_file file;       /* the cache, mapped */
  void *block;          /* or the ids themselves */
  size_t block_bytes;
  const uint8_t *ids;   /* [front.tokens] */
  int32_t width;        /* bytes of one: 2 or 4 */
  int32_t context;
  uint64_t seed;
} tfmi_data;

typedef struct tfmi_data_make {
  tfmi_load load, *outer;
  tfmi_heap heap;
  const tfm_data_config *config;
  const char *const *paths;
  size_t path_count;
  const tfm_tokenizer *tokenizer;
  tfm_tokenizer_info vocabulary;
  tfmi_data *data;
  tfmi_data_file *files; /* stb */
  tfmi_file text;        /* open */
  DIR *dir;              /* open */
  tfmi_out out;          /* the cache being written, or only the checksum */
  uint64_t bytes, done;  /* of all texts */
  uint64_t mark;
  tfmi_stat own[2];      /* the cache, and what an end of the machine left of one: no texts */
  int32_t *piece;        /* ids of a piece of text; scratch */
  size_t piece_room;
  bool writing, finished;
} tfmi_data_make;

/* ---- Files ---- */

static int tfmi_data_order(const void *a, const void *b) {
  return strcmp(TFMI_NEW(const tfmi_data_file, a)->path, TFMI_NEW(const tfmi_data_file, b)->path);
}

static void tfmi_data_folder(tfmi_data_make *m, const char *folder, int depth);

static void tfmi_data_own(tfmi_data_make *m) {
  char part[1040];
  if (!m->config->cache) return;
  snprintf(part, sizeof part, "%s.part", m->config->cache);
  if (!tfmi_stat_path(m->config->cache, &m->own[0])) memset(&m->own[0], 0, sizeof m->own[0]);
  if (!tfmi_stat_path(part, &m->own[1])) memset(&m->own[1], 0, sizeof m->own[1]);
}

static bool tfmi_is_own(const tfmi_data_make *m, const tfmi_stat *st) {
  return tfmi_same_file(&m->own[0], st) || tfmi_same_file(&m->own[1], st);
}

/* The size of a file that only callbacks know. */
static uint64_t tfmi_data_io_bytes(tfmi_data_make *m, const char *path) {
  const tfm_io *io = m->heap.host.io;
  uint64_t bytes = 0;
  void *handle = io->open(io->user, path, &bytes);
  if (handle) io->close(io->user, handle);
  return bytes;
}

/* A file, or what is in a folder. */
static void tfmi_data_path(tfmi_data_make *m, char *path, int depth) {
  tfmi_data_file f = {path, 0, 0};
  tfmi_stat st;
  if (m->heap.host.io) {
    f.bytes = tfmi_data_io_bytes(m, path);
  } else {
    if (!tfmi_stat_path(path, &st)) tfmi_fail(&m->load, TFM_E_IO, "%s is not there", path);
    if (S_ISDIR(st.st_mode)) {
      tfmi_data_folder(m, path, depth);
      return;
    }
    if (tfmi_is_own(m, &st) && depth > 0) return;
    f.bytes = (uint64_t)st.st_size;
    f.time = tfmi_modified(&st);
  }
  stbds_arrput(m->files, f);
  m->bytes += f.bytes;
}

static void tfmi_data_folder(tfmi_data_make *m, const char *folder, int depth) {
  char **names = NULL;
  struct dirent *entry;
  int i;
  DIR *dir = depth < TFMI_FOLDERS_DEEP ? opendir(folder) : NULL;
  if (!dir)
    tfmi_fail(&m->load, TFM_E_IO, "%s cannot be listed%s", folder,
              depth < TFMI_FOLDERS_DEEP ? "" : ": folders go too deep");
  m->dir = dir;
  while ((entry = readdir(dir)) != NULL)
    if (entry->d_name[0] != '.') stbds_arrput(names, tfmi_join(&m->load, folder, entry->d_name));
  closedir(dir);
  m->dir = NULL;
  for (i = 0; i < (int)stbds_arrlen(names); i++) tfmi_data_path(m, names[i], depth + 1);
}

/* All files, those of one argument in the order of their names. */
static void tfmi_data_list(tfmi_data_make *m) {
  size_t i;
  tfmi_data_own(m);
  for (i = 0; i < m->path_count; i++) {
    size_t first = (size_t)stbds_arrlen(m->files);
    tfmi_data_path(m, tfmi_join(&m->load, "", m->paths[i]), 0);
    qsort(m->files + first, (size_t)stbds_arrlen(m->files) - first, sizeof *m->files,
          tfmi_data_order);
  }
  if (stbds_arrlen(m->files) == 0) tfmi_fail(&m->load, TFM_E_IO, "there is no file to read");
}

/* ---- Encoding ---- */

/* How much of a text to take: at most that many bytes, to the end of a line or of a character. */
static size_t tfmi_text_cut(const char *text, size_t n, size_t most) {
  size_t at = most;
  if (n <= most) return n;
  while (at > 0 && text[at - 1] != '\n') at--;
  if (at == 0)
    for (at = most; at > most - 4 && ((unsigned char)text[at] & 0xc0) == 0x80;) at--;
  return at;
}

/* Encodes into m->piece; returns how many. flags: 0, or TFMI_ENCODE_GOES_ON. */
static int64_t tfmi_data_encode(tfmi_data_make *m, const char *text, size_t bytes, unsigned flags) {
  const tfm_tokenizer *t = m->tokenizer;
  int64_t n = tfmi_encode_text(t, text, bytes, flags, NULL, 0, m->piece, m->piece_room);
  if (n > (int64_t)m->piece_room) {
    tfmi_release(&m->load, m->piece);
    m->piece_room = (size_t)n + 1024;
    m->piece = TFMI_NEW(int32_t, tfmi_scratch(&m->load, m->piece_room, sizeof *m->piece));
    n = tfmi_encode_text(t, text, bytes, flags, NULL, 0, m->piece, m->piece_room);
  }
  if (n < 0) tfmi_fail_again(&m->load);
  return n;
}

/* Ids go to the cache, or else to memory that doubles. */
static void tfmi_data_put(tfmi_data_make *m, const int32_t *ids, int64_t n) {
  tfmi_data *d = m->data;
  uint8_t code[4];
  int64_t i;
  int b;
  for (i = 0; i < n; i++) {
    for (b = 0; b < d->width; b++) code[b] = (uint8_t)((uint32_t)ids[i] >> 8 * b);
    if (!m->writing) {
      size_t at = (size_t)d->front.tokens * (size_t)d->width;
      if (at + 4 > d->block_bytes) {
        size_t more = 2 * d->block_bytes + 65536;
        void *grown = tfmi_heap_realloc(&m->heap, d->block, d->block_bytes, more);
        if (!grown) tfmi_fail_again(&m->load);
        d->block = grown;
        d->block_bytes = more;
      }
      memcpy((uint8_t *)d->block + at, code, (size_t)d->width);
    }
    tfmi_out_bytes(&m->out, code, (size_t)d->width);
    d->front.tokens++;
  }
}

static void tfmi_data_document(tfmi_data_make *m, const char *text, size_t bytes) {
  const tfm_tokenizer_info *v = &m->vocabulary;
  unsigned flags = 0;
  if (!bytes) return;
  m->data->front.documents++;
  if (v->bos >= 0 && v->bos != v->eos) tfmi_data_put(m, &v->bos, 1);
  while (bytes) {
    size_t n = tfmi_text_cut(text, bytes, TFMI_TEXT_PIECE);
    tfmi_data_put(m, m->piece, tfmi_data_encode(m, text, n, flags));
    flags = TFMI_ENCODE_GOES_ON;
    text += n;
    bytes -= n;
    m->done += n;
    if (!tfmi_goes_on(&m->heap.host, "tokenize", (double)m->done / (double)(m->bytes + 1)))
      tfmi_fail(&m->load, TFM_E_CANCELLED, "reading was cancelled");
  }
  if (v->eos >= 0) tfmi_data_put(m, &v->eos, 1);
}

/* The bytes before the next separator, or all. */
static size_t tfmi_until(const char *text, size_t n, const char *separator) {
  size_t length = strlen(separator), at = 0;
  while (length && at + length <= n) {
    const char *found = (const char *)memchr(text + at, separator[0], n - at - length + 1);
    if (!found) break;
    at = (size_t)(found - text);
    if (memcmp(found, separator, length) == 0) return at;
    at++;
  }
  return n;
}

static void tfmi_data_file_read(tfmi_data_make *m, const char *path) {
  const char *separator = m->config->separator ? m->config->separator : "", *text;
  size_t left, n;
  tfmi_file_open(&m->load, path, &m->text);
  text = (const char *)m->text.data;
  for (left = m->text.bytes; left; text += n, left -= n) {
    n = tfmi_until(text, left, separator);
    tfmi_data_document(m, text, n);
    n += n < left ? strlen(separator) : 0;
  }
  tfmi_file_close(&m->heap, &m->text);
}

/* All texts, into the cache or into memory. */
static void tfmi_data_read_all(tfmi_data_make *m) {
  tfmi_data *d = m->data;
  uint64_t word[2] = {tfmi_u64("tfmdata1"), m->mark}, zero = 0;
  int i;
  memset(&m->out, 0, sizeof m->out);
  m->out.fd = -1;
  if (m->config->cache && tfmi_out_begin(&m->out, m->config->cache) != TFM_OK)
    tfmi_fail_again(&m->load);
  m->writing = m->config->cache != NULL;
  tfmi_out_words(&m->out, word, sizeof word, sizeof *word);
  for (i = 0; i < (int)stbds_arrlen(m->files); i++) tfmi_data_file_read(m, m->files[i].path);
  tfmi_out_bytes(&m->out, &zero, (size_t)(-m->out.bytes % 8));
  word[0] = (uint64_t)d->front.tokens;
  word[1] = (uint64_t)d->front.documents;
  tfmi_out_words(&m->out, word, sizeof word, sizeof *word);
  tfmi_out_flush(&m->out);
  tfmi_out_number_le(&m->out, m->out.sum, 8);
  d->front.mark = m->out.sum;
  d->ids = (const uint8_t *)d->block;
  if (!m->writing) return;
  m->writing = false;
  if (tfmi_out_commit(&m->out, m->config->cache, 1) != TFM_OK) tfmi_fail_again(&m->load);
}

/* ---- The cache ---- */

/* Takes the ids of a cache file that fits; false: it does not, or is damaged. */
static bool tfmi_cache_take(tfmi_data_make *m) {
  tfmi_data *d = m->data;
  const uint8_t *file = d->file.data, *tail;
  uint64_t tokens, bytes;
  if (d->file.bytes < TFMI_DATA_HEAD + TFMI_DATA_TAIL || d->file.bytes % 8) return false;
  tail = file + d->file.bytes - TFMI_DATA_TAIL;
  tokens = tfmi_u64(tail);
  if (memcmp(file, "tfmdata1", 8) != 0 || tfmi_u64(file + 8) != m->mark) return false;
  if (!tfmi_mul(tokens, (uint64_t)d->width, &bytes) || bytes > d->file.bytes) return false;
  if (TFMI_DATA_HEAD + (bytes + 7) / 8 * 8 + TFMI_DATA_TAIL != d->file.bytes) return false;
  if (tfmi_checksum(0, file, d->file.bytes - 8, 1) != tfmi_u64(tail + 16)) return false;
  d->ids = file + TFMI_DATA_HEAD;
  d->front.tokens = (int64_t)tokens;
  d->front.documents = (int64_t)tfmi_u64(tail + 8);
  d->front.mark = tfmi_u64(tail + 16);
  return true;
}

/* The cache is a file of the system's, whatever texts come from. One that does not fit is made
   anew; a file that never was one, somebody's text perhaps, is not written over. */
static bool tfmi_cache_open(tfmi_data_make *m) {
  const tfmi_file *f = &m->data->file;
  const char *wrong = tfmi_file_open_path(&m->load, m->config->cache, &m->data->file);
  if (!wrong && tfmi_cache_take(m)) return true;
  if (!wrong && f->bytes && (f->bytes < 8 || memcmp(f->data, "tfmdata1", 8) != 0))
    tfmi_fail(&m->load, TFM_E_ARG, "%s is there and is no cache of ids; expected the name of one, "
              "or of a new file", m->config->cache);
  tfmi_file_close(&m->heap, &m->data->file);
  return false;
}

static void tfmi_data_ids(tfmi_data_make *m) {
  tfmi_data *d = m->data;
  d->width = m->vocabulary.vocabulary <= 65536 ? 2 : 4;
  d->front.cached = m->config->cache && tfmi_cache_open(m);
  if (d->front.cached) return;
  tfmi_data_read_all(m);
  if (m->config->cache && !tfmi_cache_open(m))
    tfmi_fail(&m->load, TFM_E_IO, "the cache that was just written cannot be read again");
}

/* ---- The mark: what the ids depend on ---- */

static uint64_t tfmi_mark_text(uint64_t sum, const char *text, size_t n) {
  uint64_t bytes = n;
  return tfmi_checksum(tfmi_checksum(sum, &bytes, sizeof bytes, sizeof bytes), text, n, 1);
}

/* All texts of the vocabulary, and how it splits a sample: merges have no other face. */
static uint64_t tfmi_mark_tokenizer(tfmi_data_make *m, uint64_t sum) {
  const int32_t numbers[] = {m->vocabulary.vocabulary, m->vocabulary.bos, m->vocabulary.eos};
  int32_t id;
  int64_t n;
  size_t bytes;
  sum = tfmi_checksum(sum, numbers, sizeof numbers, sizeof *numbers);
  for (id = 0; id < m->vocabulary.vocabulary; id++) {
    const char *text = tfm_token_text(m->tokenizer, id, &bytes);
    sum = tfmi_mark_text(sum, text ? text : "", text ? bytes : 0);
  }
  tfmi_file_open(&m->load, m->files[0].path, &m->text);
  bytes = tfmi_text_cut((const char *)m->text.data, m->text.bytes, TFMI_TEXT_SAMPLE);
  n = tfmi_data_encode(m, (const char *)m->text.data, bytes, 0);
  tfmi_file_close(&m->heap, &m->text);
  return tfmi_checksum(sum, m->piece, (size_t)n * sizeof *m->piece, sizeof *m->piece);
}

static void tfmi_data_mark(tfmi_data_make *m) {
  const char *separator = m->config->separator ? m->config->separator : "";
  uint64_t sum = tfmi_mark_text(TFMI_DATA_FORMAT, separator, strlen(separator));
  int i;
  for (i = 0; i < (int)stbds_arrlen(m->files); i++) {
    const tfmi_data_file *f = &m->files[i];
    const uint64_t numbers[] = {f->bytes, f->time};
    sum = tfmi_mark_text(sum, f->path, strlen(f->path));
    sum = tfmi_checksum(sum, numbers, sizeof numbers, sizeof *numbers);
  }
  m->mark = tfmi_mark_tokenizer(m, sum);
}

/* ---- Sequences ---- */

/* What is drawn of which tokens: those of training, or the held-out ones. */
typedef struct tfmi_ring {
  int64_t first, tokens, sequences;
} tfmi_ring;

static tfmi_ring tfmi_data_ring(const tfmi_data *d, bool held_out) {
  const tfm_data *f = &d->front;
  tfmi_ring training = {0, f->tokens - f->held_out, f->sequences};
  tfmi_ring held = {f->tokens - f->held_out, f->held_out, f->held_sequences};
  return held_out ? held : training;
}

/* Number i of a permutation of 0 .. n-1, which key and epoch choose. */
static int64_t tfmi_permuted(int64_t i, int64_t n, uint64_t key, uint64_t epoch) {
  int half = 1, round;
  uint64_t mask, left, right;
  while (half < 31 && (int64_t)1 << 2 * half < n) half++;
  mask = ((uint64_t)1 << half) - 1;
  do {
    left = (uint64_t)i >> half;
    right = (uint64_t)i & mask;
    for (round = 0; round < 4; round++) {
      uint64_t was = right;
      right = left ^ (tfmi_philox(key, right << 2 | (uint64_t)round, epoch).word[0] & mask);
      left = was;
    }
    i = (int64_t)(left << half | right);
  } while (i >= n);
  return i;
}

static int32_t tfmi_data_id(const tfmi_data *d, int64_t at) {
  const uint8_t *p = d->ids + at * d->width;
  return d->width == 2 ? (int32_t)tfmi_u16(p) : (int32_t)tfmi_u32(p);
}

/* Sequence i of a ring: T tokens, and each one's next. */
static void tfmi_data_sequence(const tfmi_data *d, const tfmi_ring *ring, bool shift, int64_t i,
                               int32_t *tokens, int32_t *targets) {
  uint64_t epoch = shift ? (uint64_t)(i / ring->sequences) : 0, high = UINT64_C(1) << 63 | epoch;
  tfmi_random r = tfmi_philox(d->seed, 0, high);
  uint64_t start = shift ? (uint64_t)r.word[0] << 32 | r.word[1] : 0;
  int64_t at = tfmi_permuted(i % ring->sequences, ring->sequences, d->seed, epoch) * d->context;
  int32_t k;
  at = (int64_t)(((uint64_t)at + start % (uint64_t)ring->tokens) % (uint64_t)ring->tokens);
  for (k = 0; k < d->context; k++) {
    tokens[k] = tfmi_data_id(d, ring->first + at);
    at = at + 1 == ring->tokens ? 0 : at + 1;
    targets[k] = tfmi_data_id(d, ring->first + at);
  }
}

TFM_API tfm_status tfm_data_read(const tfm_data *data, bool held_out, int64_t first, int32_t rows,
                                 int32_t *tokens, int32_t *targets) {
  const tfmi_data *d = TFMI_NEW(const tfmi_data, data);
  tfmi_ring ring;
  int32_t i;
  if (!d) return tfmi_null_object("tfm_data_read");
  if (first < 0 || rows < 0 || !tokens || !targets)
    return tfmi_report(TFM_E_ARG, "tfm_data_read: first or rows is below 0, or an array is NULL");
  ring = tfmi_data_ring(d, held_out);
  if (!ring.sequences)
    return tfmi_report(TFM_E_ARG, "tfm_data_read: no tokens are %s; set held_out between 0 and 1",
                       held_out ? "held out" : "left for training");
  for (i = 0; i < rows; i++)
    tfmi_data_sequence(d, &ring, !held_out, first + i, tokens + (int64_t)i * d->context,
                       targets + (int64_t)i * d->context);
  return TFM_OK;
}

/* ---- Opening ---- */

/* Divides the ids; the mark becomes that of all that a place in the data depends on. */
static void tfmi_data_divide(tfmi_data_make *m) {
  tfmi_data *d = m->data;
  tfm_data *f = &d->front;
  float share = m->config->held_out;
  uint64_t numbers[4] = {f->mark, d->seed, (uint64_t)d->context, 0};
  uint32_t bits;
  f->held_out = (int64_t)((double)share * (double)f->tokens);
  if (f->held_out > 0) /* the last target is within, as it is not a ring */
    f->held_sequences = (f->held_out - 1) / d->context;
  f->sequences = (f->tokens - f->held_out) / d->context;
  if (share < 1 && f->tokens - f->held_out <= d->context)
    tfmi_fail(&m->load, TFM_E_ARG, "the texts have %lld tokens%s; expected more than the context "
              "of %d", (long long)f->tokens, share > 0 ? ", some held out" : "", (int)d->context);
  if (share > 0 && f->held_sequences < 1)
    tfmi_fail(&m->load, TFM_E_ARG, "%lld tokens are held out; expected more than the context of "
              "%d: give more text, or shorten the context", (long long)f->held_out,
              (int)d->context);
  memcpy(&bits, &share, sizeof bits);
  numbers[3] = bits;
  f->mark = tfmi_checksum(0, numbers, sizeof numbers, sizeof *numbers);
  if (!f->mark) f->mark = 1;
}

static void tfmi_data_run(tfmi_data_make *m) {
  tfmi_data *d = TFMI_NEW(tfmi_data, tfmi_keep(&m->load, 1, sizeof *d));
  m->data = d;
  d->context = m->config->context ? m->config->context : 256;
  d->seed = m->config->seed;
  if (d->context < 1 || !(m->config->held_out >= 0 && m->config->held_out <= 1))
    tfmi_fail(&m->load, TFM_E_ARG, "tfm_data_config: context is %d and held_out %g; expected 1 or "
              "more, and 0 to 1", (int)d->context, (double)m->config->held_out);
  if (tfm_tokenizer_describe(m->tokenizer, &m->vocabulary) != TFM_OK) tfmi_fail_again(&m->load);
  tfmi_data_list(m);
  tfmi_data_mark(m);
  tfmi_data_ids(m);
  tfmi_data_divide(m);
}

static void tfmi_data_release(tfmi_heap *heap, tfmi_data *d) {
  tfmi_file_close(heap, &d->file);
  tfmi_heap_put(heap, d->block, d->block_bytes);
}

/* Whatever was open when the load ended. */
static void tfmi_data_close(tfmi_data_make *m) {
  if (m->dir) closedir(m->dir);
  tfmi_file_close(&m->heap, &m->text);
  if (m->writing) tfmi_out_drop(&m->out);
  tfmi_ring_free(&m->heap, &m->load.scratch);
  if (m->finished) return;
  if (m->data) tfmi_data_release(&m->heap, m->data);
  tfmi_ring_free(&m->heap, &m->load.kept);
}

static tfm_data *tfmi_data_make_run(tfmi_data_make *m) {
  tfmi_data *d;
  tfmi_load_init(&m->load, &m->heap, NULL);
  m->outer = tfmi_stb_load;
  tfmi_stb_load = &m->load;
  if (setjmp(m->load.fail) == 0) {
    tfmi_data_run(m);
    m->finished = true;
  }
  tfmi_data_close(m);
  tfmi_stb_load = m->outer;
  if (!m->finished) return NULL;
  d = m->data;
  d->heap = m->heap;
  d->kept = m->load.kept;
  d->kept.next->prev = d->kept.prev->next = &d->kept;
  return &d->front;
}

TFM_API tfm_data *tfm_data_open(const char *const *paths, size_t n, const tfm_tokenizer *tokenizer,
                                const tfm_data_config *config) {
  tfm_data_config defaults;
  tfmi_data_make m;
  memset(&defaults, 0, sizeof defaults);
  memset(&m, 0, sizeof m);
  if (!tokenizer || !paths) {
    if (tokenizer || tfmi_error.status == TFM_OK)
      tfmi_report(TFM_E_ARG, "tfm_data_open: paths or tokenizer is NULL");
    return NULL;
  }
  m.config = config ? config : &defaults;
  m.heap.host = m.config->host;
  m.paths = paths;
  m.path_count = n;
  m.tokenizer = tokenizer;
  return tfmi_data_make_run(&m);
}

TFM_API void tfm_data_free(tfm_data *data) {
  tfmi_data *d = TFMI_NEW(tfmi_data, data);
  tfmi_heap heap;
  tfmi_block kept;
  if (!d) return;
  heap = d->heap; /* both lie in the memory that goes */
  kept = d->kept;
  kept.next->prev = kept.prev->next = &kept;
  tfmi_data_release(&heap, d);
  tfmi_ring_free(&heap, &kept);
}

#if TFMI_COMPILES_COLD
#pragma GCC pop_options
#endif
#endif /* TFM_NO_TRAINING */

#undef stbds_rand_seed
#undef stbds_hash_bytes
#undef stbds_hash_string
#undef stbds_string_arena
#undef stbds_stralloc
#undef stbds_strreset
#undef stbds_unit_tests
#undef stbds_arrgrowf
#undef stbds_arrfreef
#undef stbds_hmfree_func
#undef stbds_hmget_key
#undef stbds_hmget_key_ts
#undef stbds_hmput_default
#undef stbds_hmput_key
#undef stbds_hmdel_key
#undef stbds_shmode_func
#undef stbds_array_header
#undef stbds_string_block
#undef stbds_hash_index
#undef stbds_hash_bucket
#undef stbds_hash_seed
#undef stbds_probe_position
#undef stbds_log2
#undef stbds_make_hash_index
#undef stbds_siphash_bytes
#undef stbds_is_key_equal
#undef stbds_hm_find_slot
#undef stbds_strdup
#undef STBDS_SH_NONE
#undef STBDS_SH_DEFAULT
#undef STBDS_SH_STRDUP
#undef STBDS_SH_ARENA
#ifdef __cplusplus
#undef stbds_arrgrowf_wrapper
#undef stbds_hmget_key_wrapper
#undef stbds_hmget_key_ts_wrapper
#undef stbds_hmput_default_wrapper
#undef stbds_hmput_key_wrapper
#undef stbds_hmdel_key_wrapper
#undef stbds_shmode_func_wrapper
#endif
#pragma pop_macro("STBDS_REALLOC")
#pragma pop_macro("STBDS_FREE")
#pragma pop_macro("STBDS_ASSERT")
#pragma pop_macro("STBDS_ASSERT_WAS_UNDEFINED")
#pragma pop_macro("STBDS_NO_SHORT_NAMES")
#pragma pop_macro("STB_DS_IMPLEMENTATION")
#pragma pop_macro("STBDS_UNIT_TESTS")

#endif /* TFMI_IMPLEMENTED */
#endif /* TRANSFORMER_IMPLEMENTATION */

/* MIT License

   Copyright (c) 2026 The transformer.h authors

   Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
   associated documentation files (the "Software"), to deal in the Software without restriction,
   including without limitation the rights to use, copy, modify, merge, publish, distribute,
   sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is
   furnished to do so, subject to the following conditions:

   The above copyright notice and this permission notice shall be included in all copies or
   substantial portions of the Software.

   THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT
   NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
   NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM,
   DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
   OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE. */
