"""Figures and reports, drawn from files alone."""
