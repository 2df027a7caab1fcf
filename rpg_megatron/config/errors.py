"""The error type for all user errors."""


class UserError(Exception):
    """A problem in the user's input or machine: what is wrong, where, and how to fix it.

    The command line prints the message without a traceback and exits with code 2. Any other exception is a
    bug of rpg_megatron and keeps its traceback.
    """


_SHOWN = 80


def shorten(text: str, limit: int = _SHOWN) -> str:
    """A text for a message, cut after ``limit`` characters."""
    return text if len(text) <= limit else f"{text[:limit]}..."


def first_line(error: BaseException, limit: int = 200) -> str:
    """The first line of an error's text, cut after ``limit`` characters; its type if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:limit]


def gib(nbytes: float) -> str:
    """A size in GiB or MiB."""
    return f"{nbytes / 1024**3:.2f} GiB" if nbytes >= 1024**3 / 10 else f"{nbytes / 1024**2:.1f} MiB"
