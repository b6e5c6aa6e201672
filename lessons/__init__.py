"""Runnable lessons, one per technique.  Imported first, so that BLAS is set before NumPy loads."""
import minidist                                     # noqa: F401  one BLAS thread per rank
