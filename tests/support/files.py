"""Files spoilt as a full disk or a bad block would."""


def truncate(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def flip(path, fraction=2, bits=1):
    """Some bits of the byte that lies 1/fraction of the way through."""
    content = bytearray(path.read_bytes())
    content[len(content) // fraction] ^= bits
    path.write_bytes(content)
