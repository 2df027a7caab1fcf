"""The one error type for what a user can mend."""


class UserError(Exception):
    """A problem in the user's input or machine: what is wrong, where, and how to mend it.

    The command line prints the message alone, without a traceback, and exits with code 2. Anything that is
    not a UserError is a bug of ours and keeps its traceback.
    """
