import minidist                                     # noqa: F401  one BLAS thread, before NumPy
