"""`python llama_cpp_ends.py FILE`: the ids of the tokens that end an answer in llama.cpp, as JSON.

A process of its own, since llama.cpp writes to its output. The library's C interface has what its Python package does not show.
"""

import ctypes
import json
import sys

import xllamacpp.xllamacpp


class Params(ctypes.Structure):
    """llama_model_params, which is no larger than this."""

    _fields_ = (("bytes", ctypes.c_char * 512),)


def main(file: str) -> None:
    library = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
    library.llama_model_default_params.restype = Params
    library.llama_model_load_from_file.restype = library.llama_model_get_vocab.restype = ctypes.c_void_p
    library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, Params]
    library.llama_model_get_vocab.argtypes = library.llama_vocab_n_tokens.argtypes = [ctypes.c_void_p]
    library.llama_vocab_is_eog.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    library.llama_vocab_is_eog.restype = ctypes.c_bool
    model = library.llama_model_load_from_file(file.encode(), library.llama_model_default_params())
    vocabulary = library.llama_model_get_vocab(model)
    ids = range(library.llama_vocab_n_tokens(vocabulary))
    print("\n" + json.dumps([id_ for id_ in ids if library.llama_vocab_is_eog(vocabulary, id_)]))


if __name__ == "__main__":
    main(sys.argv[1])
