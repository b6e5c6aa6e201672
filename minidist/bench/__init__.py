"""Measurements, each beside a reference: python -m minidist.bench."""
