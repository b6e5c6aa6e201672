"""What the package that students get holds in the place of the exercises' bodies: compiled code.

    def reduce_scatter(...):            source without a body: that is the assignment
    handed.fill(globals(), ...)         and the body as code of this version of Python, without text

So every lesson runs there, whatever it builds on, and no solution can be read. It is no secret:
whoever decompiles it, or finds minidist itself, has the answers. `python -m lessons.course` writes
lessons/handed_code.py; minidist itself has none.
"""
import base64
import importlib.util
import marshal
import sys
import types


def codes(module, source, names):
    """Compile functions of a module.  -> {name: base64 text}"""
    top = compile(source, f"<{module}>", "exec")
    return {code.co_name: base64.b64encode(marshal.dumps(code)).decode()
            for code in top.co_consts
            if isinstance(code, types.CodeType) and code.co_name in names}


def version():
    """What compiled code depends on."""
    return importlib.util.MAGIC_NUMBER.hex()


def fill(names, *functions):
    """Give functions, names in a module's globals, the bodies that were compiled for them."""
    from lessons.handed_code import CODE, PYTHONS
    if version() not in CODE:
        print(f"error: this package was made for Python {', '.join(PYTHONS)}, and this is "
              f"{sys.version.split()[0]}; use one of these, or ask for another package",
              file=sys.stderr)
        sys.exit(2)                                          # an import, before any command runs
    for name in functions:
        here = names[name].__code__                          # where its signature stands
        code = marshal.loads(base64.b64decode(CODE[version()][names["__name__"]][name]))
        names[name].__code__ = code.replace(co_filename=here.co_filename,
                                            co_firstlineno=here.co_firstlineno)
