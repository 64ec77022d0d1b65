"""Triton's CPU interpreter, made faster for the tests."""


def patch_language_once() -> None:
    """Lets a launch replace the functions of `triton.language` once, and not again in every jit function that its kernel calls.

    The interpreter's own way gives the same functions each time and takes a third to a half of a test.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch, launch, replaced = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def patch_what_is_new(fn):
        modules = {module for module in (tl, tl.core) if any(value is module for value in fn.__globals__.values())}
        if modules and modules <= replaced:
            return None
        replaced.update(modules)
        return patch(fn)

    def launch_anew(self, *arguments, **options):
        replaced.clear()
        return launch(self, *arguments, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_what_is_new, launch_anew
