"""Triton's interpreter without what takes most of its time, and changes nothing."""

import functools
from dataclasses import replace
from typing import Any


def hasten() -> None:
    """Has the interpreter do once what it does at each operation, and leave out what it does for nothing.

    Its arrays are small, so that nearly all of its time is its own.
    """
    _prepare_once()
    _describe_once()
    _check_no_overflow()


def _prepare_once() -> None:
    """Has it prepare Triton's language once for each launch of a kernel and each module whose functions it calls.

    By itself it looks through all of the language at each call of a function from a kernel, `tl.cdiv` and `tl.sum` among them, and
    finds that the launch has prepared it already.
    """
    from triton.runtime import interpreter

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

    interpreter.GridExecutor.__call__ = launched
    interpreter.InterpretedFunction.__call__ = called


def _describe_once() -> None:
    """Has it describe each shape once. By itself each operation makes types, wraps each size and writes their names anew.

    At each load it makes its table of types anew.
    """
    from triton import language
    from triton.language import core
    from triton.runtime import interpreter

    found_anew = interpreter._get_np_dtype
    found_once = functools.cache(found_anew)
    describe, one, no_sizes = core.block_type.__init__, core.constexpr(1), core.tuple([])

    def numpys(kind: Any) -> Any:
        element = kind.element_ty if type(kind) is core.block_type else kind
        return found_once(element) if type(element) is language.dtype else found_anew(kind)  # what holds others has no hash

    def block(this: Any, element: Any, shape: Any) -> None:
        sizes = tuple([each if type(each) is int else core._unwrap_if_constexpr(each) for each in shape])
        described = vars(element).setdefault("_described", {})
        if sizes not in described:
            describe(this, element, shape)
            this._numel, this._sizes = core.constexpr(this.numel), core.tuple([core.constexpr(each) for each in sizes])
            described[sizes] = dict(vars(this))
        vars(this).update(described[sizes])

    def tensor(this: Any, handle: Any, kind: Any) -> None:
        this.handle, this.type, this.dtype = handle, kind, kind.scalar
        this.numel, this.shape = (kind._numel, kind._sizes) if type(kind) is core.block_type else (one, no_sizes)

    interpreter._get_np_dtype = numpys
    core.block_type.__init__ = block
    core.tensor.__init__ = tensor


def _check_no_overflow() -> None:
    """Leaves out that it computes each sum and product of integers again in 64 bits, and drops what it finds."""
    from triton.runtime.interpreter import interpreter_builder

    assert not interpreter_builder.options.debug
    interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)
