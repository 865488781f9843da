"""How the benches take their command lines and end: what cannot be is refused before anything is measured."""

import argparse
import contextlib
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable


def out_file(text: str) -> str:
    """An argparse type: a file that can be written, in a folder that is there or can be made. A run takes minutes, and its
    file is written at the end."""
    path = pathlib.Path(text).absolute()
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file, got the folder {text!r}")
    place = next(p for p in path.parents if p.exists())
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as e:
        raise argparse.ArgumentTypeError(f"expected a file that can be written, got {text!r} ({place}: {e.strerror})") from None
    return text


def out_folder(text: str) -> str:
    """An argparse type: a folder that files can be written to, there or to be made."""
    if os.path.exists(text) and not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"expected a folder, got the file {text!r}")
    out_file(os.path.join(text, "file"))
    return text


def run_program(name: str, main: Callable[[], object]) -> None:
    """Run a bench as a program. Ends with status 2 and one line for bad input, 130 if interrupted, and quietly if the
    reader of its output went away. DSV41_TRACEBACK=1 lets the exceptions behind status 2 through."""
    with contextlib.suppress(BrokenPipeError):
        try:
            main()
        except KeyboardInterrupt:
            print(f"{name}: interrupted", file=sys.stderr)
            sys.exit(130)
        except BrokenPipeError:
            raise
        except (ValueError, OSError) as e:
            if os.environ.get("DSV41_TRACEBACK") == "1":
                raise
            print(f"{name}: error: {e}", file=sys.stderr)
            sys.exit(2)
