"""The error type for all user errors."""


class UserError(Exception):
    """A problem in the user's input or machine: what is wrong, where, and how to fix it.

    The command line prints the message without a traceback and exits with code 2. Any other exception is a
    bug of rpg_megatron and keeps its traceback.
    """
