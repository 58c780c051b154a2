"""Triton's interpreter without what takes most of its time, and changes nothing."""

import functools
from typing import Any


def hasten() -> None:
    """Has the interpreter prepare Triton's language once for each launch of a kernel and each module whose functions it calls.

    By itself it looks through all of the language at each call of a function from a kernel, `tl.cdiv` and `tl.sum` among them, and
    finds that the launch has prepared it already. At each load it makes its table of types anew.
    """
    from triton import language
    from triton.runtime import interpreter

    found_anew = interpreter._get_np_dtype
    found_once = functools.cache(found_anew)

    launch, prepared = interpreter.GridExecutor.__call__, set[int]()

    def launched(executor: Any, *arguments: Any, **named: Any) -> None:
        prepared.clear()
        launch(executor, *arguments, **named)

    def called(function: Any, *arguments: Any, **named: Any) -> Any:
        module = id(function.fn.__globals__)
        if module not in prepared:
            interpreter._patch_lang(function.fn)
            prepared.add(module)
        try:
            return function.rewrite()(*arguments, **named)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    def numpys(kind: Any) -> Any:
        return found_once(kind) if type(kind) is language.dtype else found_anew(kind)  # what holds others has no hash

    interpreter._get_np_dtype = numpys
    interpreter.GridExecutor.__call__ = launched
    interpreter.InterpretedFunction.__call__ = called
