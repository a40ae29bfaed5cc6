"""Not part of the package. A clone in a folder named megafx, with Python started beside it, is what `import megafx` finds
first: this file hands over to the package inside."""

if __name__ == "megafx":
    from pathlib import Path

    __path__ = [str(Path(__file__).parent / "megafx")]
    __file__ = str(Path(__path__[0]) / "__init__.py")
    exec(compile(Path(__file__).read_text(), __file__, "exec"))
