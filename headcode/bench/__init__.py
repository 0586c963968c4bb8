"""Measurements: `headcode bench`."""
