"""Messages for optional packages that are not installed."""


def missing_package(user: str, error: ModuleNotFoundError, *extras: str) -> str:
    """A message for `user`, which cannot import a package.

    Args:
        user: what needs the package, such as "kinlens-serve".
        error: the failed import. An error about a module of this project is re-raised.
        extras: the extras that bring the package; any one of them is enough.
    """
    if error.name is None or error.name.split(".")[0] == "kinlens":
        raise error
    commands = " or ".join(f"pip install 'kinlens[{extra}]'" for extra in extras)
    return f"{user} needs the package {error.name}, which is not installed. Install it: {commands}."
