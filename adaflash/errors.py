"""The base of every error whose message is all that a user needs; the CLI prints it as one line and exits with 1."""


class UserError(Exception):
    """Raised with a message that says what is wrong and, where that is not obvious, what to change."""


def one_line(error: ValueError) -> str:
    """A pydantic error as `key: message; key: message`, fit for one line of a terminal."""
    details = getattr(error, "errors", None)
    if details is None:
        return str(error)
    return "; ".join(
        f"{'.'.join(map(str, e['loc'])) or 'config'}: {e['msg'].removeprefix('Value error, ')}" for e in details()
    )
