"""`python llama_cpp_tokens.py FILE TEXT...`: llama.cpp's tokens of each text, as JSON.

A process of its own, as `llama_cpp_ends.py` is.
"""

import ctypes
import json
import sys

import xllamacpp.xllamacpp

from tests.engine.frontend.llama_cpp_ends import Params

MOST = 4096


def main(file: str, texts: list[str]) -> None:
    library = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
    library.llama_model_default_params.restype = Params
    library.llama_model_load_from_file.restype = library.llama_model_get_vocab.restype = ctypes.c_void_p
    library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, Params]
    library.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
    pointer, number = ctypes.POINTER(ctypes.c_int32), ctypes.c_int32
    library.llama_tokenize.argtypes = [ctypes.c_void_p, ctypes.c_char_p, number, pointer, number, ctypes.c_bool, ctypes.c_bool]
    model = library.llama_model_load_from_file(file.encode(), library.llama_model_default_params())
    vocabulary = library.llama_model_get_vocab(model)
    found, ids = [], (number * MOST)()
    for text in texts:
        count = library.llama_tokenize(vocabulary, text.encode(), len(text.encode()), ids, MOST, False, False)
        found.append(ids[:count])
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
