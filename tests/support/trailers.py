"""A request with trailers that only a hostile client sends."""


def with_trailers(address: str) -> bytes:
    """A chunked request whose trailers name another client address."""
    return (
        b"POST /search HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
        b"Content-Type: text/plain\r\nConnection: close\r\nTrailer: X-Forwarded-For, X-Last\r\n\r\n"
        b"1\r\nx\r\n0\r\n" + f"X-Forwarded-For: {address}\r\nX-Last: z\r\n\r\n".encode()
    )
