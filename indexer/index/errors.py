"""What FAISS says when something goes wrong."""


def reason_of(error: BaseException) -> str:
    """The end of its message, without the place in the C++ source."""
    return str(error).rpartition("Error: ")[2].strip() or type(error).__name__
