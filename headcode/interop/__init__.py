"""Models from elsewhere, and to elsewhere."""

from headcode.interop.reference import load_reference, to_reference

__all__ = ["load_reference", "to_reference"]
