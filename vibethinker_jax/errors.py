"""The one exception type for bad input: the command line prints it without a traceback."""


class UserError(ValueError):
    """Input that the user can mend. The message names the file, the field and the value, and says what to do."""
