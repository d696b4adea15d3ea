"""transformer.py - transformer.h for Python: one file, no build step but the library's own.

    make lib-shared                                     build/libtransformer.so
    python3 examples/transformer.py MODEL "Once upon a time"

    import transformer
    model = transformer.Model("stories260K.bin")        # a folder, .safetensors, .gguf, .bin
    for piece in model.session().generate("Once upon a time", temperature=0.8, seed=1):
        print(piece, end="", flush=True)
    ids = model.tokenizer.encode("Once upon a time")    # numpy int32
    logits = model.session().logits(ids)                # numpy float32 [len(ids), vocabulary]

The library is looked for in $LIBTRANSFORMER, beside this file, in ../build, and where the system
looks. Whatever goes wrong is an Error with the library's sentence.
"""

import ctypes
import os
import sys
from ctypes import POINTER, Structure, byref, c_bool, c_char_p, c_float, c_int32, c_int64, c_size_t, c_uint32
from ctypes import c_uint64, c_void_p

import numpy as np

VERSION = "0.1"  # of the library that the structures below belong to
END = -100
SPECIAL, PARSE_SPECIAL = 1, 2
DEVICES = {"auto": 0, "ref": 1, "cpu": 2, "cuda": 3}


class Error(Exception):
    """What the library says of a failure."""


class Host(Structure):
    _fields_ = [(name, c_void_p) for name in ["user", "alloc", "log", "progress", "cancel", "parallel"]]
    _fields_ += [("memory_limit_bytes", c_uint64), ("io", c_void_p)]


class ModelConfig(Structure):
    _fields_ = [("host", Host), ("device", c_int32), ("device_index", c_int32), ("weights", c_int32)]
    _fields_ += [("config_json", c_char_p), ("override", c_char_p), ("threads", c_int32)]
    _fields_ += [("no_mmap", c_bool), ("no_fallback", c_bool)]


class ModelInfo(Structure):
    _fields_ = [(name, c_char_p) for name in ["family", "format", "device"]]
    _fields_ += [(name, c_int32) for name in ["layers", "width", "heads", "kv_heads", "head_width", "ffn_width"]]
    _fields_ += [(name, c_int32) for name in ["vocabulary", "experts", "context"]]
    _fields_ += [("tied", c_bool), ("weights", c_int32), ("bos", c_int32), ("end", POINTER(c_int32))]
    _fields_ += [("end_count", c_int32), ("parameters", c_uint64), ("token_bytes", c_uint64)]
    _fields_ += [(name, c_uint64) for name in ["mapped_bytes", "memory_bytes", "peak_bytes"]]
    _fields_ += [("converted", c_int32), ("converted_from", c_uint64), ("converted_to", c_uint64)]


class Sampling(Structure):
    _fields_ = [("temperature", c_float), ("top_k", c_int32), ("top_p", c_float), ("min_p", c_float)]
    _fields_ += [("repetition_penalty", c_float), ("seed", c_uint64), ("sequence", c_uint64)]


IDS, FLOATS = np.ctypeslib.ndpointer(np.int32, flags="C"), np.ctypeslib.ndpointer(np.float32, flags="C")
CALLS = {  # name: result, arguments
    "tfm_error": (c_char_p, []),
    "tfm_model_load": (c_void_p, [c_char_p, POINTER(ModelConfig)]),
    "tfm_model_free": (None, [c_void_p]),
    "tfm_model_describe": (c_int32, [c_void_p, POINTER(ModelInfo)]),
    "tfm_tokenizer_load": (c_void_p, [c_char_p, c_void_p]),
    "tfm_tokenizer_free": (None, [c_void_p]),
    "tfm_encode": (c_int64, [c_void_p, c_char_p, c_size_t, c_uint32, c_void_p, c_size_t]),
    "tfm_decode": (c_int64, [c_void_p, IDS, c_size_t, c_char_p, c_size_t]),
    "tfm_session_create": (c_void_p, [c_void_p, c_void_p]),
    "tfm_session_free": (None, [c_void_p]),
    "tfm_session_rewind": (c_int32, [c_void_p, c_size_t]),
    "tfm_feed_text": (c_int32, [c_void_p, c_void_p, c_char_p]),
    "tfm_eval": (c_int32, [c_void_p, IDS, c_size_t, FLOATS]),
    "tfm_next": (c_int32, [c_void_p, POINTER(Sampling)]),
    "tfm_text": (c_char_p, [c_void_p]),
}


def _open():
    named, here = os.environ.get("LIBTRANSFORMER"), os.path.dirname(os.path.abspath(__file__))
    places = [os.path.join(here, "libtransformer.so"), os.path.join(here, "..", "build", "libtransformer.so")]
    path = named or next(filter(os.path.exists, places), "libtransformer.so")
    try:
        return ctypes.CDLL(path)
    except OSError as error:
        raise Error(f"{error}; build it with `make lib-shared`, or set LIBTRANSFORMER to its path") from None


def _load():
    library = _open()
    library.tfm_version.restype = c_char_p
    version = library.tfm_version().decode()
    if version.rsplit(".", 1)[0] != VERSION:
        raise Error(f"libtransformer.so is version {version}, expected {VERSION}; use the transformer.py beside it")
    for name, (result, arguments) in CALLS.items():
        call = getattr(library, name)
        call.restype, call.argtypes = result, arguments
    return library


_library = _load()


def _check(result):
    """A status or a pointer of the library's, or its sentence as an Error."""
    if result is None or (isinstance(result, int) and result < 0):
        raise Error(_library.tfm_error().decode(errors="replace"))
    return result


class Tokenizer:
    """Text to ids and back, as the vocabulary's makers do it."""

    def __init__(self, path):
        self._free = _library.tfm_tokenizer_free
        self.pointer = _check(_library.tfm_tokenizer_load(os.fsencode(path), None))

    def __del__(self):
        if getattr(self, "pointer", None):
            self._free(self.pointer)

    def encode(self, text, special=False, parse_special=False):
        data, flags = text.encode(), SPECIAL * special | PARSE_SPECIAL * parse_special
        count = _check(_library.tfm_encode(self.pointer, data, len(data), flags, None, 0))
        ids = np.empty(count, np.int32)
        _check(_library.tfm_encode(self.pointer, data, len(data), flags, ids.ctypes.data, count))
        return ids

    def decode(self, ids):
        ids = np.ascontiguousarray(ids, np.int32)
        count = _check(_library.tfm_decode(self.pointer, ids, ids.size, None, 0))
        text = ctypes.create_string_buffer(count + 1)
        _check(_library.tfm_decode(self.pointer, ids, ids.size, text, count + 1))
        return text.raw[:count].decode(errors="replace")


class Model:
    """Weights and shape; sessions keep it alive."""

    def __init__(self, path, device="auto", threads=0, tokenizer=None):
        self._free = _library.tfm_model_free
        config = ModelConfig(device=DEVICES[device], threads=threads)
        self.pointer = _check(_library.tfm_model_load(os.fsencode(path), byref(config)))
        self.info = ModelInfo()
        _check(_library.tfm_model_describe(self.pointer, byref(self.info)))
        self._path, self._tokenizer = path, tokenizer

    def __del__(self):
        if getattr(self, "pointer", None):
            self._free(self.pointer)

    @property
    def tokenizer(self):
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self._path)
        return self._tokenizer

    def session(self):
        return Session(self)


class Session:
    """One sequence of tokens, with what the model remembers of it."""

    def __init__(self, model):
        self._free, self._model = _library.tfm_session_free, model
        self.pointer = _check(_library.tfm_session_create(model.pointer, None))

    def __del__(self):
        if getattr(self, "pointer", None):
            self._free(self.pointer)

    def rewind(self, tokens=0):
        _check(_library.tfm_session_rewind(self.pointer, tokens))

    def logits(self, ids):
        """Feeds ids; returns what follows each of them, [len(ids), vocabulary]."""
        ids = np.ascontiguousarray(ids, np.int32)
        out = np.empty((ids.size, self._model.info.vocabulary), np.float32)
        _check(_library.tfm_eval(self.pointer, ids, ids.size, out))
        return out

    def generate(self, prompt, max_tokens=None, **sampling):
        """Feeds the prompt; yields text as it comes. Keywords: temperature, top_k, top_p, min_p, seed, ..."""
        how, tokens = Sampling(**sampling), 0
        if "\0" in prompt:
            raise Error("the prompt has a NUL, which would end it; remove it")
        _check(_library.tfm_feed_text(self.pointer, self._model.tokenizer.pointer, prompt.encode()))
        while max_tokens is None or tokens < max_tokens:
            token = _library.tfm_next(self.pointer, byref(how))
            if token != END:
                _check(token)
            yield _library.tfm_text(self.pointer).decode(errors="replace")
            if token == END:
                return
            tokens += 1


def main():
    if len(sys.argv) != 3:
        sys.exit('usage: transformer.py MODEL "PROMPT"')
    try:
        for piece in Model(sys.argv[1]).session().generate(sys.argv[2], max_tokens=200, temperature=0.8, seed=1):
            print(piece, end="", flush=True)
        print()
    except Error as error:
        sys.exit(f"transformer.py: {error}")


if __name__ == "__main__":
    main()
