"""A PNG of a few pixels, written without a library of images."""

from __future__ import annotations

import base64
import struct
import zlib

from torch import Tensor

__all__ = ["png_source"]


def png_source(pixels: Tensor) -> str:
    """Pixels (h, w, 4), red, green, blue and opacity in uint8, as the source of an image in a page or a picture."""
    height, width = pixels.shape[:2]
    raw = b"".join(b"\0" + bytes(row.flatten().tolist()) for row in pixels)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"
